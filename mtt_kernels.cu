/* mtt_kernels.cu - the CUDA backend of mtt.h: every operation of MTT_OPS, on GPUs of compute capability 8.0
   and later, and in FP32 and FP16 on those of 7.5, with CUDA 12.0 and later; for sm_90a with 12.5

      nvcc -O3 -arch=native -c mtt_kernels.cu -o mtt_kernels.o
      cc -O3 train.c mtt_kernels.o -lcublasLt -lcudart -lstdc++ -lpthread -lm

   On an H100 or H200, -gencode=arch=compute_90a,code=sm_90a in place of -arch=native adds faster kernels.
   -DMTT_NO_FP16 leaves out FP16, FP16 alone: BF16 stays. The file then compiles a quarter faster.

   Where to begin: the operations' table is MTT_OPS in mtt.h. Each row has a function mtt__cuda_<name> here,
   which launches kernels, mtt_k_<name>. >>elementwise has the simplest ones. mtt__cuda_run in >>backend calls
   them. Each kernel's comment is its contract: the formula, shapes, launch, requirements, memory traffic, why
   its result is always the same, and the function of mtt.h that computes the same in plain C.

   Operations run in order on one stream. What goes to other ranks goes beside them, on a stream of its own:
   GPUs of one host copy, others send by NCCL, whose library is loaded then. From its second run on, a list of
   operations runs as a graph. Once the backend is open, it allocates nothing but these graphs and plans of
   matrix products. A pinned staging buffer on the host, the graphs, and what the driver, cuBLASLt and NCCL
   take for themselves are outside the arena. No sum depends on the order in which threads arrive: the same
   inputs give the same bits on the same GPU.

   Symbols: B sequences of T tokens, R = B T rows, C = d_model, H heads of width D, F = d_ff, V ids, Vp = V
   padded to 128. T as a template parameter: the type of a tensor's elements.

   >>turing         what a T4 does in another way: skip it
   The lesson: what training needs, in FP32 and 16 bits, by the simplest kernels that are fast.
   >>toolbox        loads, stores, reductions, dropout    >>products     linear layers, by cuBLASLt
   >>backend state  contexts, errors, launches            >>loss         cross-entropy
   >>elementwise    GELU, SwiGLU, residuals, sums         >>optimizer    gradient norm, AdamW
   >>norm           LayerNorm, RMSNorm, gradients         >>attention    scores, softmax, values
   >>embedding      and its gradient                      >>flash        attention without the scores
   The wings: more speed, less memory, more GPUs, generation. Each can be skipped.
   >>rotary and cache  Llama's positions, generation      >>compact state  moments of 8 bits
   >>eight bits     FP8: numbers, operands of products    >>trials       the fastest of cuBLASLt's algorithms
   >>tensor cores   FlashAttention by mma.sync            >>ranks        copies between GPUs, NCCL
   >>hopper         the same and more, by wgmma           >>backend      memory, graphs, run

   READING PATH: attention, from the simplest kernel to the fastest. Each step is readable after the one
   before. mtt__cuda_linear in >>products and mtt_k_adamw in >>optimizer are the rest of a step's time.

      >>elementwise    mtt_k_activation, with its packs     the shape of all kernels here
      >>attention      mtt_k_softmax                        a running maximum and sum
      >>norm           mtt__norm_row                        rows in registers
      >>attention      mtt_k_group_gradient                 a product by tiles in shared memory
      >>flash          mtt_k_flash_forward_exact            no T x T matrix
                       mtt_k_flash_backward_exact           its gradients, in one order
      >>tensor cores   mtt_k_flash_forward, _backward       mma.sync, copies ahead
      >>hopper         mtt_k_flash_forward_wgmma            warpgroups
                       mtt_k_flash_backward_wgmma

   Most kernels are templates; E is BF16 or FP16. Half of the compiler's time is attention by mma.sync: 45 of
   249 kernels for sm_90a, for both types, 5 widths of heads, dropout, and windows. */
#ifndef MTT_CUDA
#define MTT_CUDA
#endif
#define MTT_BACKEND_API
#include "mtt.h"

/* The host's part of this file only launches kernels: at -O1 instead of -O3 gcc takes 4 s less for it. */
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDA_ARCH__)
#pragma nv_diag_suppress 1675 /* nvcc's front end does not know gcc's pragma */
#pragma GCC optimize("O1")
#pragma nv_diag_default 1675
#endif

#include <cub/device/device_radix_sort.cuh>
#include <cublasLt.h>
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <math_constants.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <type_traits>

#if CUDART_VERSION < 12000
#error "mtt_kernels.cu needs CUDA 12.0 or later"
#endif
#if CUDART_VERSION < 12050 && defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(MTT_NO_HOPPER)
#error "sm_90a needs CUDA 12.5 or later: build for sm_90"
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
#error "mtt_kernels.cu needs -arch=sm_75 or later. With an older GPU, build for the CPU, without MTT_CUDA"
#endif

/* The room >>hopper holds what only an H100 or H200 runs; -DMTT_NO_HOPPER leaves it out. MTT__HOPPER:
   the compiler is making device code for it (sm_90a). */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(MTT_NO_HOPPER)
#define MTT__HOPPER 1
#else
#define MTT__HOPPER 0
#endif

/* Shared memory of a processor of the architecture that code is made for. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ / 100 == 10
#define MTT__PROCESSOR_KB 228
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
#define MTT__PROCESSOR_KB 164
#else
#define MTT__PROCESSOR_KB (MTT__TURING ? 64 : 100)
#endif

#define MTT__MEMBER __device__ __forceinline__
#define MTT__DEVICE static MTT__MEMBER

/* ----------------------------------------------------------------------------------------------------------
   >>turing   what a T4 does in another way. Without one, begin with the next room
   ----------------------------------------------------------------------------------------------------------
   MTT__TURING: the compiler is making device code for compute capability 7.5. It has no copies beside the
   program, no tensor cores for BF16, 1,024 threads a processor, and 64 KB of shared memory a block, where
   later ones have 99 KB or more. */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define MTT__TURING 1
#else
#define MTT__TURING 0
#endif

/* Threads of a block, and blocks that a processor is to hold, for __launch_bounds__. */
#define MTT__BOUNDS(threads, blocks) \
    threads, MTT__TURING && (threads) * (blocks) > 1024 ? 1024 / (threads) : (blocks)

/* Shared memory for the rows that norm_backward copies ahead, by that of a block. */
enum { MTT__NORM_ROOM = (MTT__TURING ? 48 : 96) << 10 };
static int mtt__norm_room(int shared_bytes) { return shared_bytes < 96 << 10 ? 48 << 10 : 96 << 10; }

#if MTT__TURING
/* Copies go through registers. No kernel copies what it has written, so loads of several copies may come
   first. */
template <int BYTES = 16>
MTT__DEVICE void mtt__copy_async(uint32_t to_smem, const void *from_gmem, bool valid)
{
    if constexpr (BYTES == 16) {
        const uint4 v = valid ? __ldg((const uint4 *)from_gmem) : uint4();
        asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
                     ::"r"(to_smem), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
    } else if constexpr (BYTES == 8) {
        const uint2 v = valid ? __ldg((const uint2 *)from_gmem) : uint2();
        asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(to_smem), "r"(v.x), "r"(v.y) : "memory");
    } else {
        const uint32_t v = valid ? __ldg((const uint32_t *)from_gmem) : 0;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to_smem), "r"(v) : "memory");
    }
}

MTT__DEVICE void mtt__copy_commit(void) {}
template <int PENDING = 0> MTT__DEVICE void mtt__copy_wait(void) {}

/* Two products of half the depth. */
MTT__DEVICE void mtt__mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1, __half)
{
    MTT__UNROLL for (int k = 0; k < 2; k++)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(k ? b1 : b0));
}
MTT__DEVICE void mtt__mma(float *, const uint32_t *, uint32_t, uint32_t, __nv_bfloat16) {} /* never runs */
#endif

/* ----------------------------------------------------------------------------------------------------------
   >>toolbox
   -------------------------------------------------------------------------------------------------------- */

/* Neighbours in a row, moved in accesses of up to 16 bytes. 8 of them are the unit of nearly every
   kernel: widths are multiples of 8, and one draw of dropout serves 8 elements. */
template <class T, int N = 8> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) mtt__vector {
    T v[N];
};

MTT__DEVICE float mtt__to_float(float x) { return x; }
MTT__DEVICE float mtt__to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
MTT__DEVICE float mtt__to_float(__half x) { return __half2float(x); }

template <class T> MTT__DEVICE T mtt__from_float(float x);
template <> __device__ __forceinline__ float mtt__from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 mtt__from_float<__nv_bfloat16>(float x)
{
    return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ __half mtt__from_float<__half>(float x) { return __float2half_rn(x); }

template <int N = 8, class T> MTT__DEVICE mtt__vector<T, N> mtt__load_vector(const T *at)
{
    return *reinterpret_cast<const mtt__vector<T, N> *>(at);
}

/* A vector as floats. BF16 is the upper half of a float: taken from words, an element costs one instruction,
   where the compiler's own code needs two for every other one. */
template <int N, class T> MTT__DEVICE void mtt__to_floats(const mtt__vector<T, N> &vector, float *values)
{
    if constexpr (std::is_same<T, __nv_bfloat16>::value && N % 2 == 0) {
        const uint32_t *words = reinterpret_cast<const uint32_t *>(&vector);
        MTT__UNROLL for (int k = 0; k < N; k++)
            values[k] = __uint_as_float(k % 2 ? words[k / 2] & 0xffff0000u : words[k / 2] << 16);
    } else
        MTT__UNROLL for (int k = 0; k < N; k++) values[k] = mtt__to_float(vector.v[k]);
}

template <class T, int N = 8> MTT__DEVICE mtt__vector<T, N> mtt__from_floats(const float *values)
{
    mtt__vector<T, N> vector;
    MTT__UNROLL for (int k = 0; k < N; k++) vector.v[k] = mtt__from_float<T>(values[k]);
    return vector;
}

template <int N = 8, class T> MTT__DEVICE void mtt__read_floats(const T *at, float *values)
{
    mtt__to_floats(mtt__load_vector<N>(at), values);
}

template <int N = 8, class T> MTT__DEVICE void mtt__store_floats(T *at, const float *values)
{
    *reinterpret_cast<mtt__vector<T, N> *>(at) = mtt__from_floats<T, N>(values);
}

MTT__DEVICE uint32_t mtt__smem(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Copies 16, 8 or 4 bytes to shared memory, or zeros. Copies form groups. A thread may read its own after it
   has waited for their group. */
#if !MTT__TURING /* a T4: see >>turing */
template <int BYTES = 16>
MTT__DEVICE void mtt__copy_async(uint32_t to_smem, const void *from_gmem, bool valid)
{
    const int bytes = valid ? BYTES : 0;
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     ::"r"(to_smem), "l"(from_gmem), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;"
                     ::"r"(to_smem), "l"(from_gmem), "r"(bytes), "n"(BYTES) : "memory");
}

MTT__DEVICE void mtt__copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most PENDING of the thread's groups of copies are not done. */
template <int PENDING = 0> MTT__DEVICE void mtt__copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#endif

/* Instructions of the special function unit, good to 2 ulp and 1 ulp. */
MTT__DEVICE float mtt__exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

MTT__DEVICE float mtt__reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* e^x, good to 2 ulp for floats. For 16-bit data by the special function unit: its error of 1e-6 is lost when
   the result is rounded to 16 bits. */
template <class T> MTT__DEVICE float mtt__exp_for(float x)
{
    return sizeof(T) == 4 ? expf(x) : __expf(x);
}

/* factor e^(x - from). For 16-bit data one multiply-add and one special function, with the factor in the
   exponent. */
template <class T> MTT__DEVICE float mtt__exp_from(float x, float from, float factor)
{
    float y;
    if (sizeof(T) == 4) return factor * expf(x - from);
    x = fmaf(x, 1.44269504f, __log2f(factor) - from * 1.44269504f);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct mtt__plus {
    template <class V> static __device__ V join(V a, V b) { return a + b; }
};

struct mtt__maximum {
    static __device__ float join(float a, float b) { return fmaxf(a, b); }
};

/* Reduces a value over THREADS neighbours, a warp or a whole block (through `shared`, 32 values). All of them
   get the result. */
template <class JOIN, int THREADS, class V> MTT__DEVICE V mtt__reduce(V x, V *shared)
{
    MTT__UNROLL for (int step = 16; step; step /= 2) x = JOIN::join(x, __shfl_xor_sync(0xffffffffu, x, step));
    if (THREADS == 32) return x;
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads(); /* the warps' values are there before anyone joins them */
    x = shared[0];
    MTT__UNROLL for (int warp = 1; warp < THREADS / 32; warp++) x = JOIN::join(x, shared[warp]);
    __syncthreads(); /* all have read before the next reduction writes */
    return x;
}

/* C (16 x 8) += A (16 x 16) B (16 x 8). Lane l holds C's rows l/4 and l/4 + 8, columns 2 (l%4) and the next,
   as c[0..1] and c[2..3]. */
#if !MTT__TURING /* a T4: see >>turing */
#define MTT__MMA(E, TYPE)                                                                                \
    MTT__DEVICE void mtt__mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1, E)              \
    {                                                                                                    \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, " \
            "{%8,%9}, {%0,%1,%2,%3};"                                                                    \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                             \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                             \
    }
MTT__MMA(__nv_bfloat16, "bf16")
MTT__MMA(__half, "f16")
#endif

/* An operation's dropout: see mtt__dropout_threshold. Threshold 0 = no dropout. */
struct mtt__dropout {
    const mtt_control *control;
    uint64_t stream; /* site and layer */
    uint32_t threshold;
    float scale;
};

MTT__DEVICE uint64_t mtt__stream_of(const mtt__dropout &d)
{
    return d.stream | mtt__stream_step(d.control->micro_batch);
}

template <int BITS> MTT__DEVICE bool mtt__keeps(const mtt__dropout &d, uint64_t element)
{
    const mtt_draw draw = mtt__dropout_draw(d.control->seed, element / (128 / BITS), mtt__stream_of(d), BITS);
    const uint32_t *w = draw.word, at = (uint32_t)element * BITS;
    const uint32_t word = at & 64 ? (at & 32 ? w[3] : w[2]) : (at & 32 ? w[1] : w[0]);
    return (word >> (at & 31) & ((1u << BITS) - 1u)) >= d.threshold;
}

/* Multiplies WIDTH values from element `first` by their mask; 8 of them begin at a multiple of 8. BITS: see
   mtt__dropout_bits. __fmul_rn keeps the compiler from fusing the product with an addition, which would
   change bits: the CPU does not fuse. */
template <int WIDTH, int BITS = 16>
MTT__DEVICE void mtt__apply_dropout(const mtt__dropout &d, int64_t first, float *values)
{
    if (!d.threshold) return;
    if (WIDTH == 8) {
        const uint64_t index = (uint64_t)first / (128 / BITS);
        mtt_draw draw = mtt__dropout_draw(d.control->seed, index, mtt__stream_of(d), BITS);
        uint32_t *w = draw.word;
        if (BITS == 8 && first & 8) w[0] = w[2], w[1] = w[3];
        MTT__UNROLL for (int k = 0; k < WIDTH; k++) {
            const bool keeps = mtt__dropout_number(w, k, BITS) >= d.threshold;
            values[k] = __fmul_rn(values[k], keeps ? d.scale : 0.0f);
        }
    } else
        values[0] = __fmul_rn(values[0], mtt__keeps<BITS>(d, (uint64_t)first) ? d.scale : 0.0f);
}

/* ----------------------------------------------------------------------------------------------------------
   >>backend state
   -------------------------------------------------------------------------------------------------------- */

enum { MTT__PLANS = 128, MTT__ALGORITHMS = 8 }; /* products remembered, and algorithms tried for each */
enum { MTT__GRAPHS = 8, MTT__GRAPH_OPS = 8 };   /* lists of operations remembered, and the shortest one */
/* The driver takes 2.4 KB of device memory for each node of a graph: 5 MiB at most. A step of a model of 4
   layers has 350 nodes. Larger graphs come from losses of many chunks, whose kernels are long enough to be
   launched one by one. */
enum { MTT__GRAPH_NODES = 2048 };
static const size_t MTT__STAGING_BYTES = 4 << 20; /* bytes of the staging buffer */

/* A list of operations: captured as a graph when it runs for the second time, and replayed from then on. */
struct mtt__graph {
    const mtt_op *ops;
    int count;
    int64_t runs;
    cudaGraphExec_t exec; /* NULL = none */
    int late;             /* weights that it may wait for */
};

struct mtt__product_plan; /* >>products */
struct mtt__nccl;         /* >>ranks, as the next */
struct mtt__copies;

struct mtt__cuda {
    mtt_env *env;
    mtt_backend backend; /* with the caller's stream and allocator */
    int device, processors;
    int shared_bytes, processor_bytes; /* of shared memory, for a block at most, and of a processor */
    int cluster; /* most blocks of one */
    mtt_precision precision;
    cudaStream_t stream;
    cublasLtHandle_t blas;
    cudaDataType types[MTT_DTYPE_COUNT]; /* of an mtt_dtype, as cuBLASLt names it */
    int hopper; /* 1 = a device of compute capability 9.0 with code for sm_90a: see >>hopper */
    PFN_cuTensorMapEncodeTiled_v12000 encode; /* makes tensor maps; NULL where the driver cannot */
    char *staging; /* pinned memory of the host */
    size_t staging_used; /* by uploads that may not be done */
    mtt__product_plan *plans;
    int plan_count, next_plan; /* when all are taken, a new plan replaces the oldest */
    mtt__graph graphs[MTT__GRAPHS];
    int graph_count;
    int rank, ranks;
    mtt__copies *copies; /* between GPUs of one host; NULL: none, */
    mtt__nccl *nccl;     /* or NCCL makes transfers; NULL: none */
    cudaStream_t wires;  /* on which transfers go to and from other ranks; NULL: one rank */
    cudaEvent_t ready, arrived; /* what they send has been made; they have ended */
    int travelling;      /* 1 = operations have not yet waited for `arrived` */
    int expecting;       /* 1 = the host has not yet waited for transfers */
    int lost;            /* 1 = a rank is: no more transfers */
    int capturing;       /* 1 = operations become a graph */
};

typedef mtt_status (*mtt__function)(mtt__cuda *c, const mtt_op *op);

static mtt_status mtt__cuda_fail(mtt_env *env, mtt_status status, const char *format, ...)
{
    va_list args;
    if (!env) return status;
    va_start(args, format);
    vsnprintf(env->error, sizeof(env->error), format, args);
    va_end(args);
    return status;
}

/* What to do about an error, by its code or else by the call. */
static const char *mtt__remedy(cudaError_t error, const char *of_call)
{
    switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
        return "mtt_kernels.cu was compiled for other GPUs: compile it with -arch=native on this machine. "
               "With a GPU older than compute capability 7.5, use the CPU";
    case cudaErrorInsufficientDriver:
    case cudaErrorUnsupportedPtxVersion:
        return "Update the driver, or compile with the CUDA version that nvidia-smi shows";
    case cudaErrorMemoryAllocation: return "End other programs that use this GPU, or lower the batch";
    case cudaErrorIllegalAddress: /* of a kernel before the call */
    case cudaErrorLaunchFailure: return "Start again. If a smaller model fails, too, update the driver";
    default: return of_call;
    }
}

static mtt_status mtt__checked(mtt__cuda *c, cudaError_t error, const char *what,
                               const char *remedy = "If a smaller model fails, too, update the driver")
{
    if (error == cudaSuccess) return MTT_OK;
    cudaGetLastError(); /* reported here: the next launch must not take it for its own */
    return mtt__cuda_fail(c->env, MTT_E_DEVICE, "CUDA device %d, %s: %s (%s). %s", c->device, what,
                          cudaGetErrorString(error), cudaGetErrorName(error), mtt__remedy(error, remedy));
}

/* Finds a function of the driver, as it is since a version of CUDA; NULL: the driver is older. */
static void *mtt__driver_function(const char *name, unsigned version)
{
    void *function = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found);
#else /* as the toolkit knows it: 12.0 to 12.4 know all as later ones do */
    cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
    (void)version;
#endif
    if (error) cudaGetLastError(); /* the next launch must not take it for its own */
    return !error && found == cudaDriverEntryPointSuccess ? function : NULL;
}

static void *mtt__host_alloc(mtt_env *env, size_t bytes)
{
    void *block = env && env->alloc ? env->alloc(env->user, bytes) : malloc(bytes);
    if (block) memset(block, 0, bytes);
    return block;
}

static void mtt__host_free(mtt_env *env, void *block)
{
    if (block && env && env->alloc) env->free(env->user, block);
    else free(block);
}

/* Launches a kernel with dynamic shared memory. CUDA gives a block more than 48 KiB only on request, and what
   the kernel has by itself counts. */
template <class... P, class... A>
static mtt_status mtt__launch_shared(mtt__cuda *c, const char *what, void (*kernel)(P...), dim3 grid,
                                     dim3 block, size_t bytes, A... args)
{
    if (bytes > (size_t)c->shared_bytes)
        return mtt__cuda_fail(c->env, MTT_E_ARGUMENT,
                              "%s needs %zu bytes of shared memory a block, and CUDA device %d has %d: take "
                              "narrower heads or attention without flash", what, bytes, c->device,
                              c->shared_bytes);
    if (bytes > 40 << 10) {
        const cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
        const cudaError_t error = cudaFuncSetAttribute(kernel, most, (int)bytes);
        if (error != cudaSuccess) return mtt__checked(c, error, what);
    }
    kernel<<<grid, block, bytes, c->stream>>>(static_cast<P>(args)...);
    return mtt__checked(c, cudaGetLastError(), what);
}

template <class... P, class... A>
static mtt_status mtt__launch(mtt__cuda *c, const char *what, void (*kernel)(P...), dim3 grid, dim3 block,
                              A... args)
{
    return mtt__launch_shared(c, what, kernel, grid, block, 0, args...);
}

/* Calls body with a zero of the C++ type of a tensor's elements, of 16 bits. */
template <class BODY> static mtt_status mtt__by_16_bits(mtt__cuda *c, const mtt_tensor *t, BODY body)
{
    switch (t->dtype) {
    case MTT_BF16_BITS: return body(__nv_bfloat16());
#ifndef MTT_NO_FP16
    case MTT_F16_BITS: return body(__half());
#endif
    default: return mtt__cuda_fail(c->env, MTT_E_ARGUMENT, "%s: no kernel for its precision", t->name);
    }
}

/* Calls body with a zero of the C++ type of a tensor's elements, of 32 or 16 bits. The zero brings the type:

       mtt__by_type(c, x, [&](auto zero) {   x is BF16: body gets __nv_bfloat16()
           typedef decltype(zero) T;         T is __nv_bfloat16
           return mtt__launch(c, "norm", mtt_k_norm<T>, ..., mtt__at<T>(x));   the kernel of this type */
template <class BODY> static mtt_status mtt__by_type(mtt__cuda *c, const mtt_tensor *t, BODY body)
{
    return t->dtype == MTT_F32 ? body(0.0f) : mtt__by_16_bits(c, t, body);
}

static unsigned mtt__blocks(int64_t work, int64_t per_block)
{
    return (unsigned)mtt__ceil_div(work, per_block);
}

template <class T> static T *mtt__at(const mtt_tensor *t)
{
    return t ? (T *)t->data : NULL;
}

static mtt__dropout mtt__dropout_of(const mtt_op *op, const mtt_tensor *control)
{
    mtt__dropout d;
    d.control = mtt__at<const mtt_control>(control);
    d.stream = mtt__op_stream(op);
    d.threshold = mtt__dropout_threshold(op->shape->dropout, mtt__dropout_bits(op));
    d.scale = mtt__dropout_scale(d.threshold, mtt__dropout_bits(op));
    return d;
}

/* The scratch tensor, if it holds `bytes`. */
static mtt_status mtt__scratch(mtt__cuda *c, const mtt_op *op, size_t bytes, void **out)
{
    *out = op->workspace->data;
    if (bytes <= op->workspace->bytes) return MTT_OK;
    return mtt__cuda_fail(c->env, MTT_E_BUDGET,
                          "an operation needs %zu bytes of workspace and has %zu: raise workspace_bytes",
                          bytes, op->workspace->bytes);
}

static void mtt__forget_graphs(mtt__cuda *c)
{
    for (int i = 0; i < c->graph_count; i++)
        if (c->graphs[i].exec) cudaGraphExecDestroy(c->graphs[i].exec);
    memset(c->graphs, 0, sizeof(c->graphs));
    c->graph_count = 0;
}

/* ----------------------------------------------------------------------------------------------------------
   >>elementwise
   -------------------------------------------------------------------------------------------------------- */

/* s = 1 / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3): GELU's tanh form is x s. For 16-bit data, -2u
   log2(e) is computed as one polynomial. */
template <class T> MTT__DEVICE float mtt__gelu_gate(float x)
{
    if (sizeof(T) == 4) return 1.0f / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
    return mtt__reciprocal(1.0f + mtt__exp2(x * fmaf(x * x, -0.1029432395f, -2.302208198f)));
}

/* GELU' = s + x s (1 - s) 2u' */
MTT__DEVICE float mtt__gelu_slope_of(float x, float s)
{
    const float xs = x * s;
    return fmaf(fmaf(-s, xs, xs), fmaf(x * x, 0.2140644488f, 1.5957691216f), s);
}

template <class T> MTT__DEVICE float mtt__gelu_slope(float x)
{
    return mtt__gelu_slope_of(x, mtt__gelu_gate<T>(x));
}

/* s = 1 / (1 + e^-x) */
template <class T> MTT__DEVICE float mtt__silu_gate(float x)
{
    if (sizeof(T) == 4) return 1.0f / (1.0f + expf(-x));
    return mtt__reciprocal(1.0f + mtt__exp2(-1.4426950409f * x));
}

/* s of the MLP's activation x s. */
template <class T, mtt_mlp FORM> MTT__DEVICE float mtt__gate(float x)
{
    static_assert(FORM == MTT_MLP_GELU || FORM == MTT_MLP_RELU2 || FORM == MTT_MLP_SILU,
                  "a new form of the MLP needs its formula here, and its slope below");
    return FORM == MTT_MLP_RELU2  ? fmaxf(x, 0.0f)
           : FORM == MTT_MLP_GELU ? mtt__gelu_gate<T>(x)
                                  : mtt__silu_gate<T>(x);
}

/* The activation y of x, and of `up` with a gate. ReLU squared is s s: x s could be -0. */
template <class T, mtt_mlp MLP> MTT__DEVICE float mtt__activated(float x, float up)
{
    constexpr mtt_mlp FORM = mtt__ungated(MLP);
    const float s = mtt__gate<T, FORM>(x), y = (FORM == MTT_MLP_RELU2 ? s : x) * s;
    return mtt__is_gated(MLP) ? y * up : y;
}

/* Turns g, the gradient of y, into that of x, and `up` into its gradient. */
template <class T, mtt_mlp MLP> MTT__DEVICE void mtt__activation_slopes(float x, float &up, float &g)
{
    constexpr mtt_mlp FORM = mtt__ungated(MLP);
    const float s = mtt__gate<T, FORM>(x), y = x * s, dy = g;
    const float slope = FORM == MTT_MLP_RELU2  ? 2.0f * s
                        : FORM == MTT_MLP_GELU ? mtt__gelu_slope_of(x, s)
                                               : fmaf(-s, y, y) + s;
    g *= mtt__is_gated(MLP) ? slope * up : slope;
    up = dy * y;
}

/* A launch works through packs of 8 elements of y, `packs` a row. With a gate a row of x and dx has the F
   columns of the gate, then the F columns of up. */
template <class T> struct mtt__activation_operands {
    const T *x, *dy;
    T *y, *dx;
    int64_t count; /* packs */
    uint32_t packs;
};

/* Returns the element of x, of the gate's if there is one, with which a pack of y begins. */
template <mtt_mlp MLP> MTT__DEVICE int64_t mtt__gate_of(uint32_t pack, uint32_t packs)
{
    return ((int64_t)pack + (mtt__is_gated(MLP) ? pack / packs * packs : 0)) * 8;
}

/* Computes PACKS packs of y. store(at, v) takes those from element `at`. All of x is read before the first
   store, which might alias it. */
template <mtt_mlp MLP, int PACKS, class T, class STORE>
MTT__DEVICE void mtt__activation_packs(const mtt__activation_operands<T> &o, STORE store)
{
    enum { GATED = mtt__is_gated(MLP) };
    const uint32_t first = blockIdx.x * (256 * PACKS) + threadIdx.x;
    mtt__vector<T> xs[PACKS], ups[PACKS];
    MTT__UNROLL for (int i = 0; i < PACKS; i++) {
        const int64_t at = mtt__gate_of<MLP>(first + i * 256, o.packs);
        if ((int64_t)first + i * 256 >= o.count) break;
        xs[i] = mtt__load_vector(o.x + at);
        if (GATED) ups[i] = mtt__load_vector(o.x + at + o.packs * 8);
    }
    MTT__UNROLL for (int i = 0; i < PACKS; i++) {
        float v[8], up[8];
        if ((int64_t)first + i * 256 >= o.count) break;
        mtt__to_floats(xs[i], v);
        if (GATED) mtt__to_floats(ups[i], up);
        MTT__UNROLL for (int k = 0; k < 8; k++) v[k] = mtt__activated<T, MLP>(v[k], GATED ? up[k] : 1.0f);
        store(((int64_t)first + i * 256) * 8, v);
    }
}

/* Math:        y = GELU(x), max(x, 0)^2, silu(x), or silu(x) up
   Shapes:      x [rows, F] or [rows, 2 F], y [rows, F] T
   Launch:      256 threads, two packs of 8 elements each
   Requires:    F a multiple of 8; fewer than 2^32 packs
   Traffic:     x read, y written
   Determinism: elementwise
   Reference:   mtt__cpu_activation */
template <class T, mtt_mlp MLP>
static __global__ void __launch_bounds__(256) mtt_k_activation(const mtt__activation_operands<T> o)
{
    mtt__activation_packs<MLP, 2>(o, [&](int64_t at, const float *v) { mtt__store_floats(o.y + at, v); });
}

/* Math:        dx = dy GELU'(x), dy 2 max(x, 0), or dy (s + x s (1 - s)) with s = 1 / (1 + e^-x), times
                up with a gate; d_up = dy x s
   Shapes:      dy [rows, F], x and dx [rows, F] or [rows, 2 F], all T
   Launch:      256 threads, a pack of 8 elements each
   Requires:    F a multiple of 8; fewer than 2^32 packs; dx may be x, or without a gate dy
   Traffic:     dy and x read, dx written
   Determinism: elementwise
   Reference:   mtt__cpu_activation_backward */
template <class T, mtt_mlp MLP>
static __global__ void __launch_bounds__(256)
    mtt_k_activation_backward(const mtt__activation_operands<T> o)
{
    const uint32_t pack = blockIdx.x * 256 + threadIdx.x;
    const int64_t at = mtt__gate_of<MLP>(pack, o.packs);
    float g[8], x[8], up[8] = {};
    if (pack >= o.count) return;
    mtt__read_floats(o.dy + (int64_t)pack * 8, g);
    mtt__read_floats(o.x + at, x);
    if (mtt__is_gated(MLP)) mtt__read_floats(o.x + at + o.packs * 8, up);
    MTT__UNROLL for (int k = 0; k < 8; k++) mtt__activation_slopes<T, MLP>(x[k], up[k], g[k]);
    mtt__store_floats(o.dx + at, g);
    if (mtt__is_gated(MLP)) mtt__store_floats(o.dx + at + o.packs * 8, up);
}

/* Math:        y = a + mask * b, or mask * b where a is NULL
   Shapes:      a, b, y [count] T; BITS: see mtt__dropout_bits
   Launch:      256 threads, 8 elements each, the last thread fewer
   Requires:    y may be a or b
   Traffic:     a and b read, y written
   Determinism: elementwise
   Reference:   mtt__cpu_masked_sum */
template <class T, int BITS>
static __global__ void __launch_bounds__(256)
    mtt_k_masked_sum(const T *a, const T *b, T *y, int64_t count, mtt__dropout dropout)
{
    int64_t at = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 8;
    float v[8], more[8];
    if (at + 8 <= count) {
        mtt__read_floats(b + at, v);
        if (a) mtt__read_floats(a + at, more);
        mtt__apply_dropout<8, BITS>(dropout, at, v);
        MTT__UNROLL for (int k = 0; k < 8; k++) v[k] = a ? more[k] + v[k] : v[k];
        mtt__store_floats(y + at, v);
        return;
    }
    for (; at < count; at++) {
        v[0] = mtt__to_float(b[at]);
        mtt__apply_dropout<1, BITS>(dropout, at, v);
        y[at] = mtt__from_float<T>(a ? mtt__to_float(a[at]) + v[0] : v[0]);
    }
}

static mtt_status mtt__launch_masked_sum(mtt__cuda *c, const mtt_op *op, const mtt_tensor *a,
                                         const mtt_tensor *b, const mtt_tensor *control, const mtt_tensor *y)
{
    const int64_t count = mtt__elements(y);
    const mtt__dropout dropout = control ? mtt__dropout_of(op, control) : mtt__dropout();
    return mtt__by_type(c, y, [&](auto zero) {
        typedef decltype(zero) T;
        const auto kernel = mtt__dropout_bits(op) == 8 ? mtt_k_masked_sum<T, 8> : mtt_k_masked_sum<T, 16>;
        return mtt__launch(c, "masked_sum", kernel, mtt__blocks(count, 2048), 256, mtt__at<T>(a),
                           mtt__at<T>(b), mtt__at<T>(y), count, dropout);
    });
}

static mtt_status mtt__cuda_residual(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_residual *o = MTT_OPERANDS_OF(residual, op);
    return mtt__launch_masked_sum(c, op, o->x, o->branch, o->control, o->sum);
}

static mtt_status mtt__cuda_add(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_add *o = MTT_OPERANDS_OF(add, op);
    return mtt__launch_masked_sum(c, op, o->a, o->b, NULL, o->sum);
}

/* Both addresses say where they are, so one kind of copy serves all places. */
static mtt_status mtt__cuda_move(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_move *o = MTT_OPERANDS_OF(move, op);
    return mtt__checked(c, cudaMemcpyAsync(o->y->data, o->x->data, o->x->bytes, cudaMemcpyDefault, c->stream),
                        "a copy between host and device");
}

static mtt_status mtt__cuda_dropout_scores(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_dropout_scores *o = MTT_OPERANDS_OF(dropout_scores, op);
    return mtt__launch_masked_sum(c, op, NULL, o->probs, o->control, o->dropped);
}

static mtt_status mtt__cuda_dropout_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_dropout_backward *o = MTT_OPERANDS_OF(dropout_backward, op);
    return mtt__launch_masked_sum(c, op, NULL, o->dy, o->control, o->dx);
}

/* Calls body with the MLP's activation as a constant. */
template <class BODY> static mtt_status mtt__by_mlp(mtt__cuda *c, mtt_mlp mlp, BODY body)
{
    switch (mlp) {
    case MTT_MLP_GELU: return body(std::integral_constant<mtt_mlp, MTT_MLP_GELU>());
    case MTT_MLP_SWIGLU: return body(std::integral_constant<mtt_mlp, MTT_MLP_SWIGLU>());
    case MTT_MLP_RELU2: return body(std::integral_constant<mtt_mlp, MTT_MLP_RELU2>());
    case MTT_MLP_SILU: return body(std::integral_constant<mtt_mlp, MTT_MLP_SILU>());
    default: return mtt__cuda_fail(c->env, MTT_E_ARGUMENT, "mlp %d: no kernel for this activation", (int)mlp);
    }
}

template <class T>
static mtt__activation_operands<T> mtt__activation_at(const mtt_tensor *x, const mtt_tensor *dy,
                                                      const mtt_tensor *y, const mtt_tensor *dx)
{
    const mtt_tensor *result = y ? y : dy; /* has a column for each of the MLP's */
    return {mtt__at<T>(x), mtt__at<T>(dy), mtt__at<T>(y), mtt__at<T>(dx), mtt__elements(result) / 8,
            (uint32_t)mtt__width(result) / 8};
}

static mtt_status mtt__launch_activation(mtt__cuda *c, mtt_mlp mlp, const mtt_tensor *x, const mtt_tensor *y)
{
    return mtt__by_type(c, x, [&](auto zero) {
        return mtt__by_mlp(c, mlp, [&](auto constant) {
            typedef decltype(zero) T;
            const auto o = mtt__activation_at<T>(x, NULL, y, NULL);
            return mtt__launch(c, "activation", mtt_k_activation<T, decltype(constant)::value>,
                               mtt__blocks(o.count, 512), 256, o);
        });
    });
}

static mtt_status mtt__cuda_activation(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_activation *o = MTT_OPERANDS_OF(activation, op);
    return mtt__launch_activation(c, op->shape->mlp, o->x, o->y);
}

static mtt_status mtt__launch_activation_backward(mtt__cuda *c, mtt_mlp mlp, const mtt_tensor *dy,
                                                  const mtt_tensor *x, const mtt_tensor *dx)
{
    return mtt__by_type(c, dx, [&](auto zero) {
        return mtt__by_mlp(c, mlp, [&](auto constant) {
            typedef decltype(zero) T;
            const auto o = mtt__activation_at<T>(x, dy, NULL, dx);
            return mtt__launch(c, "activation_backward",
                               mtt_k_activation_backward<T, decltype(constant)::value>,
                               mtt__blocks(o.count, 256), 256, o);
        });
    });
}

static mtt_status mtt__cuda_activation_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_activation_backward *o = MTT_OPERANDS_OF(activation_backward, op);
    return mtt__launch_activation_backward(c, op->shape->mlp, o->dy, o->x, o->dx);
}

/* Math:        out[j] (+)= sum over rows r of x[r][j], of each slice of rows
   Shapes:      x [rows, width] T; the first `each` columns go to out, the next to more, the rest to last,
                unless that is NULL; slice s writes s * width elements further on
   Launch:      grid (width / 64, slices), 8 x 32 threads: a thread sums every 32nd row of 8 columns
   Requires:    width and each multiples of 8, width at most 3 each
   Traffic:     x read once
   Determinism: rows in a fixed order within a thread, then 32 partial sums in a fixed order
   Reference:   mtt__column_sums */
template <class T>
static __global__ void __launch_bounds__(256)
    mtt_k_column_sums(const T *x, float *out, float *more, float *last, int64_t each, int64_t rows,
                      int64_t width, int64_t slice, int add)
{
    __shared__ float partial[32][65];
    int64_t column = (int64_t)blockIdx.x * 64 + threadIdx.x * 8, begin = blockIdx.y * slice;
    int64_t end = rows < begin + slice ? rows : begin + slice;
    float sum[8] = {0};
    if (column < width)
#pragma unroll 4
        for (int64_t r = begin + threadIdx.y; r < end; r += 32) {
            float v[8];
            mtt__read_floats(x + r * width + column, v);
            MTT__UNROLL for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
    MTT__UNROLL for (int k = 0; k < 8; k++) partial[threadIdx.y][threadIdx.x * 8 + k] = sum[k];
    __syncthreads(); /* all partial sums are there before 64 threads add them up */
    int j = threadIdx.y * 8 + threadIdx.x;
    column = (int64_t)blockIdx.x * 64 + j;
    if (j >= 64 || column >= width) return;
    float total = 0;
    MTT__UNROLL for (int r = 0; r < 32; r++) total += partial[r][j];
    float *at = column < each ? out : column < 2 * each ? more : last;
    if (!at) return;
    at += column % each + blockIdx.y * width;
    *at = total + (add ? *at : 0.0f);
}

/* Sums of `slices` slices of `slice` rows each. */
template <class T>
static mtt_status mtt__sum_slices(mtt__cuda *c, const void *x, int64_t rows, int64_t width, int64_t slices,
                                  int64_t slice, float *out, int add)
{
    return mtt__launch(c, "column_sums", mtt_k_column_sums<T>, dim3(mtt__blocks(width, 64), (unsigned)slices),
                       dim3(8, 32), (const T *)x, out, out, out, width, rows, width, slice, add);
}

/* Sums of columns in two steps: slices of rows into the workspace, then the slices. There are enough slices
   to occupy the device. */
template <class T>
static mtt_status mtt__launch_column_sums(mtt__cuda *c, const mtt_op *op, const void *x, int64_t rows,
                                          int64_t width, float *out, int add)
{
    const int64_t columns = mtt__blocks(width, 64);
    int64_t slices = mtt__min(mtt__ceil_div(8 * c->processors, columns), mtt__ceil_div(rows, 128));
    float *scratch = mtt__at<float>(op->workspace);
    mtt_status status;
    slices = mtt__min(slices, (int64_t)(op->workspace->bytes / ((size_t)width * sizeof(float))));
    if (slices < 2) return mtt__sum_slices<T>(c, x, rows, width, 1, rows, out, add);
    status = mtt__sum_slices<T>(c, x, rows, width, slices, mtt__ceil_div(rows, slices), scratch, 0);
    if (status != MTT_OK) return status;
    return mtt__sum_slices<float>(c, scratch, slices, width, 1, slices, out, add);
}

static mtt_status mtt__bias_gradient(mtt__cuda *c, const mtt_op *op, const mtt_tensor *dy, int64_t rows,
                                     const mtt_tensor *db, int add)
{
    float *out = mtt__at<float>(db);
    return mtt__by_type(c, dy, [&](auto zero) {
        return mtt__launch_column_sums<decltype(zero)>(c, op, dy->data, rows, mtt__width(dy), out, add);
    });
}

/* ----------------------------------------------------------------------------------------------------------
   >>norm
   -------------------------------------------------------------------------------------------------------- */

/* Threads of a row, and packs of 8 elements of a thread: a row of up to their product stays in registers. */
#define MTT__NORM_SHAPES(X) X(32, 1) X(32, 3) X(32, 4) X(256, 1) X(256, 4) X(512, 4)

/* Threads of a block, and blocks of a processor. */
#define MTT__NORM_BOUNDS(T, THREADS, PACKS) \
    THREADS < 128 ? 128 : THREADS, THREADS > 32 || PACKS == 1 ? 0 : sizeof(T) == 4 ? 5 : 7

/* (x - mean) rstd. For 16-bit data one multiply-add. Rounding mean rstd is like an error of 2^-24 in the
   mean, and a mean in FP32 is no more exact. Every kernel that makes a norm's result calls this, so that
   recomputation gives the same bits. */
template <class T> MTT__DEVICE float mtt__normalized(float x, float2 stats)
{
    return sizeof(T) == 4 ? (x - stats.x) * stats.y : fmaf(x, stats.y, -stats.x * stats.y);
}

template <class T> struct mtt__norm_forward {
    const T *x, *branch, *w, *b; /* b NULL: RMSNorm */
    T *joined, *y;
    float2 *stats;
    int64_t rows;
    int width;
    mtt__dropout dropout; /* of the branch */
    float eps;            /* added to the variance */
};

/* Normalizes a row of THREADS threads. store(at, v) takes 8 results from element `at`. */
template <int THREADS, int PACKS, class T, class STORE>
MTT__DEVICE void mtt__norm_row(const mtt__norm_forward<T> &o, STORE store)
{
    const int width = o.width;
    const bool rms = !o.b;
    __shared__ float shared[32];
    int64_t row = (int64_t)blockIdx.x * (THREADS < 128 ? 128 / THREADS : 1) + threadIdx.x / THREADS;
    int lane = threadIdx.x % THREADS;
    mtt__vector<T> xs[PACKS];
    float mean = 0, squares = 0;
    if (row >= o.rows) return;
    /* load x, and add the branch */
    MTT__UNROLL for (int p = 0; p < PACKS; p++) {
        int column = (p * THREADS + lane) * 8;
        if (column < width) xs[p] = mtt__load_vector(o.x + row * width + column);
    }
    if (o.branch) {
        mtt__vector<T> branch[PACKS]; /* loaded before the first store, which it might alias */
        MTT__UNROLL for (int p = 0; p < PACKS; p++) {
            int column = (p * THREADS + lane) * 8;
            if (column < width) branch[p] = mtt__load_vector(o.branch + row * width + column);
        }
        MTT__UNROLL for (int p = 0; p < PACKS; p++) {
            int64_t at = row * width + (p * THREADS + lane) * 8;
            float v[8], added[8];
            if ((p * THREADS + lane) * 8 >= width) break;
            mtt__to_floats(xs[p], v);
            mtt__to_floats(branch[p], added);
            mtt__apply_dropout<8>(o.dropout, at, added);
            MTT__UNROLL for (int k = 0; k < 8; k++) v[k] += added[k];
            xs[p] = mtt__from_floats<T>(v);
            *reinterpret_cast<mtt__vector<T> *>(o.joined + at) = xs[p];
        }
    }
    /* mean, then variance */
    if (!rms) {
        MTT__UNROLL for (int p = 0; p < PACKS; p++) {
            float v[8];
            if ((p * THREADS + lane) * 8 >= width) break;
            mtt__to_floats(xs[p], v);
            MTT__UNROLL for (int k = 0; k < 8; k++) mean += v[k];
        }
        mean = mtt__reduce<mtt__plus, THREADS>(mean, shared) / (float)width;
    }
    MTT__UNROLL for (int p = 0; p < PACKS; p++) {
        float v[8];
        if ((p * THREADS + lane) * 8 >= width) break;
        mtt__to_floats(xs[p], v);
        MTT__UNROLL for (int k = 0; k < 8; k++) squares += (v[k] - mean) * (v[k] - mean);
    }
    float rstd = 1.0f / sqrtf(mtt__reduce<mtt__plus, THREADS>(squares, shared) / (float)width + o.eps);
    if (lane == 0) o.stats[row] = make_float2(mean, rstd);
    /* normalize and store */
    MTT__UNROLL for (int p = 0; p < PACKS; p++) {
        int column = (p * THREADS + lane) * 8;
        float gain[8], shift[8] = {}, out[8];
        if (column >= width) break;
        mtt__read_floats(o.w + column, gain);
        if (!rms) mtt__read_floats(o.b + column, shift);
        mtt__to_floats(xs[p], out);
        MTT__UNROLL for (int k = 0; k < 8; k++)
            out[k] = mtt__normalized<T>(out[k], make_float2(mean, rstd)) * gain[k] + shift[k];
        store(row * width + column, out);
    }
}

/* Math:        y = (x - mean) rstd w + b, rstd = 1 / sqrt(var + eps), var in a second pass over registers.
                Without b, RMSNorm: the mean is 0.
                With a branch, joined = x + mask * branch first, and joined, rounded as stored, takes the
                place of x
   Shapes:      x, branch, joined, y [rows, C], w, b [C] T; stats [rows] (mean, rstd) float
   Launch:      THREADS threads a row, at least 128 a block. Where a warp has a wide row, 7 blocks a
                processor, 5 in FP32: with more the compiler would spill
   Requires:    C a multiple of 8, at most 8 THREADS PACKS; joined and y may be x or branch
   Traffic:     x and branch read once, joined and y written once; w and b stay in cache
   Determinism: fixed tree; with a branch, the bits of mtt_k_masked_sum and then this without a branch
   Reference:   mtt__cpu_norm, mtt__cpu_masked_sum */
template <class T, int THREADS, int PACKS>
static __global__ void __launch_bounds__(MTT__NORM_BOUNDS(T, THREADS, PACKS))
    mtt_k_norm(const __grid_constant__ mtt__norm_forward<T> o)
{
    mtt__norm_row<THREADS, PACKS>(o,
                                  [&](int64_t at, const float *v) { mtt__store_floats(o.y + at, v); });
}

/* Calls body with the threads of a row, and the packs of a thread, as constants: the first of
   MTT__NORM_SHAPES that holds the row.

       columns up to        256      768    1,024    2,048    8,192   16,384
       threads, packs     32, 1    32, 3    32, 4   256, 1   256, 4   512, 4
       few rows           32, 1   256, 1   256, 1   256, 1   256, 4   512, 4

   Few: each row has a processor for itself, as in generation. There a warp takes 3.1 us for several packs of
   a row, and 256 threads 2.1. */
template <class BODY>
static mtt_status mtt__by_norm_shape(mtt__cuda *c, int64_t rows, int width, BODY body)
{
    const bool few = rows <= c->processors;
#define MTT__NORM_CASE(threads, packs)                                                      \
    if (width <= (threads) * (packs) * 8 && !(few && (threads) == 32 && (packs) > 1))       \
        return body(std::integral_constant<int, threads>(), std::integral_constant<int, packs>());
    MTT__NORM_SHAPES(MTT__NORM_CASE)
#undef MTT__NORM_CASE
    return mtt__cuda_fail(c->env, MTT_E_ARGUMENT, "a norm over %d columns: at most 16,384", width);
}

/* The blocks of a norm of so many threads a row. */
static unsigned mtt__norm_blocks(int64_t rows, int threads)
{
    return mtt__blocks(rows, threads < 128 ? 128 / threads : 1);
}

template <class T> static mtt_status mtt__launch_norm(mtt__cuda *c, const mtt__norm_forward<T> &o)
{
    return mtt__by_norm_shape(c, o.rows, o.width, [&](auto threads, auto packs) {
        enum { THREADS = decltype(threads)::value, PACKS = decltype(packs)::value };
        return mtt__launch(c, "norm", mtt_k_norm<T, THREADS, PACKS>, mtt__norm_blocks(o.rows, THREADS),
                           THREADS < 128 ? 128 : THREADS, o);
    });
}

template <class T> static mtt__norm_forward<T> mtt__norm_of(const mtt_op *op)
{
    const mtt_op_norm *o = MTT_OPERANDS_OF(norm, op);
    return {mtt__at<T>(o->x), NULL, mtt__at<T>(o->gain), mtt__at<T>(o->shift), NULL, mtt__at<T>(o->y),
            mtt__at<float2>(o->stats), mtt__rows(o->y), (int)mtt__width(o->y), {}, op->shape->norm_eps};
}

template <class T> static mtt__norm_forward<T> mtt__residual_norm_of(const mtt_op *op)
{
    const mtt_op_residual_norm *o = MTT_OPERANDS_OF(residual_norm, op);
    return {mtt__at<T>(o->x), mtt__at<T>(o->branch), mtt__at<T>(o->gain), mtt__at<T>(o->shift),
            mtt__at<T>(o->sum), mtt__at<T>(o->y), mtt__at<float2>(o->stats), mtt__rows(o->y),
            (int)mtt__width(o->y), mtt__dropout_of(op, o->control), op->shape->norm_eps};
}

static mtt_status mtt__cuda_norm(mtt__cuda *c, const mtt_op *op)
{
    const mtt_tensor *x = MTT_OPERANDS_OF(norm, op)->x;
    return mtt__by_type(c, x,
                        [&](auto zero) { return mtt__launch_norm(c, mtt__norm_of<decltype(zero)>(op)); });
}

static mtt_status mtt__cuda_residual_norm(mtt__cuda *c, const mtt_op *op)
{
    return mtt__by_type(c, MTT_OPERANDS_OF(residual_norm, op)->x, [&](auto zero) {
        return mtt__launch_norm(c, mtt__residual_norm_of<decltype(zero)>(op));
    });
}

template <class T> struct mtt__norm_operands {
    const T *dy, *x, *w, *joined; /* joined NULL: nothing to add */
    const float2 *stats;
    T *dx;
    float *partial; /* of each block */
    int64_t rows;
    int width, threads; /* of a row */
    int tile;           /* neighbours that a block does before it goes on, a power of two */
};

/* Two sums over the threads of a row. Even and odd rows use different slots, so one barrier a row is enough:
   a warp writes to a slot again after all have passed the barrier of the next row. */
MTT__DEVICE float2 mtt__row_sums(float2 v, float2 *slots, int threads)
{
    MTT__UNROLL for (int step = 16; step; step /= 2) {
        v.x += __shfl_xor_sync(0xffffffffu, v.x, step);
        v.y += __shfl_xor_sync(0xffffffffu, v.y, step);
    }
    if (threads == 32) return v;
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = v;
    __syncthreads(); /* all warps' values are stored before they are added */
    v = make_float2(0, 0);
    MTT__UNROLL for (int warp = 0; warp < threads / 32; warp++) {
        float2 other = slots[(threadIdx.x & ~(threads - 1)) / 32 + warp];
        v.x += other.x;
        v.y += other.y;
    }
    return v;
}

/* A block of norm_backward. Here one of 256 threads has 8 rows of 768 columns in BF16 at once: a warp for
   each, 3 packs of 16 bytes a thread.

       columns        0      8     ..  248    256    ..  504    512    ..  760
       row 0 thread   0      1     ..  31     0      ..  31     0      ..  31
       row 1         32     33     ..  63    32      ..  63    32      ..  63
       ..
       row 7        224    225     .. 255   224      .. 255   224      .. 255

   Then it goes on to its next 8 rows, whose dy, x and joined are copied to shared memory meanwhile: a stage,
   3 x 8 x 768 x 2 = 36,864 bytes. In FP32 with more than 8,192 columns no stage fits: rows are read twice
   from global memory. With sums of dx, a thread has half as many elements: it keeps three sums of each, and
   48 registers hold them, but not 96. */
template <class TYPE, int ROW_THREADS, int BLOCK_SIZE, bool OF_RMS, bool OF_DX = false>
struct mtt__norm_block {
    typedef TYPE T;
    enum {
        RMS = OF_RMS,
        SUMS_DX = OF_DX,
        SUMS = 2 - RMS + SUMS_DX,    /* of each column: of dy xhat, of dy without RMS, of dx */
        SIZE = BLOCK_SIZE,           /* threads */
        BLOCKS = SIZE < 512 ? 2 : 1, /* of the grid for each processor, at most */
        THREADS = ROW_THREADS,       /* of a row, a power of two; 0: as the argument says */
        EACH = SUMS_DX ? 16 : 32,    /* elements of a row that a thread has at most, */
        PACK = 16 / sizeof(T),       /* in packs of so many */
        PACKS = EACH / PACK,
        STAGE_BYTES = 3 * SIZE * EACH * sizeof(T), /* of the widest rows */
        STAGES = MTT__NORM_ROOM / STAGE_BYTES
    };
};

/* Starts a thread's copies of its packs of a row: dy, x and joined, `step` elements apart. Beyond the last
   row the group is empty. */
template <class S, class T>
MTT__DEVICE void mtt__copy_row(const mtt__norm_operands<T> &o, int64_t row, int threads, int lane, T *to,
                               int step)
{
    const T *const from[3] = {o.dy, o.x, o.joined};
    MTT__UNROLL for (int p = 0; p < S::PACKS; p++) {
        int column = (p * threads + lane) * S::PACK;
        if (column >= o.width || row >= o.rows) break;
        MTT__UNROLL for (int i = 0; i < 3; i++)
            if (i < 2 || o.joined)
                mtt__copy_async(mtt__smem(to + i * step + column), from[i] + row * o.width + column, true);
    }
    mtt__copy_commit();
}

/* What mtt_k_norm_backward does besides: nothing. A wing has more to do with each pack of dx as it is stored,
   and after all rows before `next`. WHOLE_TILES: it also does so for rows past the end of the last tile. */
struct mtt__norm_no_more {
    enum { WHOLE_TILES = 0 };
    template <class O> MTT__MEMBER mtt__norm_no_more begin(const O &, uint8_t *) const { return {}; }
    template <class V>
    MTT__MEMBER void each(int64_t, int, const V & /* dx */, const float * /* xhat */, const float * /* w */)
        const {}
    MTT__MEMBER void after_rows(int64_t /* next */) const {}
};

/* Stores a block's sums in partial[block]: dw, then db, then the sums of dx, each of `width` floats. Each of
   `groups` groups of threads brings those over its own rows; they are added in the order of groups. `room` is
   the shared memory of the stages, no longer needed: it holds the sums of one turn, which are all of them, or
   where it is too small dw, and then db in a second turn. WHOLE_TILES: it is large enough. */
template <class S, bool WHOLE_TILES>
MTT__DEVICE void mtt__store_sums(float *partial, int width, float *room, int groups, int group, int threads,
                                 int lane, const float (&dw)[S::PACKS][S::PACK],
                                 const float (&db)[S::PACKS][S::PACK], const float (&dx)[S::PACKS][S::PACK])
{
    constexpr int SUMS = S::SUMS, FIT = S::STAGES * 3 * sizeof(typename S::T) / sizeof(float);
    constexpr bool ALL = WHOLE_TILES || S::THREADS == S::SIZE || FIT >= SUMS;
    static_assert(ALL || (FIT >= 1 && !S::SUMS_DX), "sums fit where rows were");
    constexpr int TURNS = ALL ? 1 : SUMS;
    const int sums_width = SUMS * width, turn_width = sums_width / TURNS;
    partial += (int64_t)blockIdx.x * sums_width;
    MTT__UNROLL for (int turn = 0; turn < TURNS; turn++, partial += width) {
        if (groups > 1) __syncthreads(); /* what is there has been read before sums overwrite it */
        MTT__UNROLL for (int p = 0; p < S::PACKS; p++) {
            int column = (p * threads + lane) * S::PACK;
            float *to = (groups > 1 ? room + group * turn_width : partial) + column;
            if (column >= width) break;
            mtt__store_floats<S::PACK>(to, turn ? db[p] : dw[p]);
            if (ALL && !S::RMS) mtt__store_floats<S::PACK>(to + width, db[p]);
            if (S::SUMS_DX) mtt__store_floats<S::PACK>(to + (SUMS - 1) * width, dx[p]);
        }
        if (groups == 1) continue;
        __syncthreads(); /* all groups' sums are there before they are added up */
        for (int j = threadIdx.x; j < turn_width; j += S::SIZE) {
            float total = 0;
            for (int g = 0; g < groups; g++) total += room[g * turn_width + j];
            partial[j] = total;
        }
    }
}

/* Math:        xhat = (x - mean) rstd, g = dy w: dx = rstd (g - mean(g) - xhat mean(g xhat)) [+ joined];
                partial[block] = (sum of dy xhat, sum of dy, sum of dx as stored) over the block's rows. RMS:
                without mean(g) and the sum of dy. SUMS_DX: with the sum of dx
   Shapes:      dy, x, joined, dx [rows, C], w [C] T; stats [rows] (mean, rstd) float; partial
                [blocks, SUMS C] float
   Launch:      S = mtt__norm_block. Blocks stride over tiles of rows, several rows at a time, and copy STAGES
                - 1 steps ahead. A thread reads only its own copies, which takes no barrier; sums of a row
                shared by warps take one
   Requires:    C a multiple of 8, at most EACH times the threads of a row; shared memory for the stages of
                dy, x and joined, which holds the rows' sums in the end; joined, dy or x may be dx
   Traffic:     dy, x, joined read once, dx written once; w stays in cache. Without stages, dy and x are read
                again from L2
   Determinism: rows of a thread in order, then those of a block; mtt_k_column_sums adds up the blocks
   Reference:   mtt__cpu_norm_backward */
template <class S, class MORE, int BLOCKS = S::BLOCKS>
static __global__ void __launch_bounds__(S::SIZE, BLOCKS)
    mtt_k_norm_backward(const __grid_constant__ mtt__norm_operands<typename S::T> o,
                        const __grid_constant__ MORE more)
{
    typedef typename S::T T;
    enum { STAGES = S::STAGES, PACK = S::PACK, PACKS = S::PACKS };
    extern __shared__ uint4 ring[];
    __shared__ float2 slots[2][S::SIZE / 32];
    const int threads = S::THREADS ? S::THREADS : o.threads, log2_threads = 31 - __clz(threads);
    const int block_rows = S::SIZE >> log2_threads, width = o.width, step = block_rows * width;
    const int group = threadIdx.x >> log2_threads, lane = threadIdx.x & (threads - 1);
    const auto after = [&](int64_t row) { /* the group's next row */
        row += block_rows;
        /* the last row of a tile is followed by the block's next tile */
        return ((row - group) & (o.tile - 1)) ? row : row + (int64_t)(gridDim.x - 1) * o.tile;
    };
    const int64_t end = MORE::WHOLE_TILES ? (o.rows + o.tile - 1) & -o.tile : o.rows;
    int64_t row = (int64_t)blockIdx.x * o.tile + group, ahead = row;
    T *const staged = reinterpret_cast<T *>(ring) + group * width;
    const auto extra = more.begin(o, reinterpret_cast<uint8_t *>(ring) + STAGES * 3 * step * sizeof(T));
    const float share = 1.0f / (float)width;
    float dw[PACKS][PACK] = {}, db[PACKS][PACK] = {}, dx_sums[PACKS][PACK] = {};
    float2 next = row < o.rows ? o.stats[row] : make_float2(0, 0);
    /* start copies of the first rows */
    MTT__UNROLL for (int s = 0; s < STAGES; s++, ahead = after(ahead))
        mtt__copy_row<S>(o, ahead, threads, lane, staged + s * 3 * step, step);
    for (int stage = 0, odd = 0; row - group < end; row = after(row), odd ^= 1) {
        T *const copy = staged + stage * 3 * step;
        const T *dy = STAGES ? copy : o.dy + row * width, *x = STAGES ? copy + step : o.x + row * width;
        const T *joined = STAGES ? copy + 2 * step : o.joined + row * width;
        float2 stat = next, sum = make_float2(0, 0);
        if (after(row) < o.rows) next = o.stats[after(row)];
        if (STAGES) mtt__copy_wait<STAGES ? STAGES - 1 : 0>();
        /* sum over the row, and add it to dw and db */
        MTT__UNROLL for (int p = 0; p < PACKS; p++) {
            int column = (p * threads + lane) * PACK;
            float dys[PACK], xs[PACK], gain[PACK];
            if (column >= width || row >= o.rows) break;
            mtt__read_floats<PACK>(dy + column, dys);
            mtt__read_floats<PACK>(x + column, xs);
            mtt__read_floats<PACK>(o.w + column, gain);
            MTT__UNROLL for (int k = 0; k < PACK; k++) {
                float xhat = mtt__normalized<T>(xs[k], stat);
                dw[p][k] += dys[k] * xhat;
                if (!S::RMS) db[p][k] += dys[k];
                if (!S::RMS) sum.x += dys[k] * gain[k];
                sum.y += dys[k] * gain[k] * xhat;
            }
        }
        sum = mtt__row_sums(sum, slots[odd], threads);
        sum.x *= share;
        sum.y *= share;
        /* make dx */
        MTT__UNROLL for (int p = 0; p < PACKS; p++) {
            int column = (p * threads + lane) * PACK;
            float dys[PACK], xs[PACK], gain[PACK], others[PACK] = {}, out[PACK];
            if (column >= width || row >= o.rows) break;
            mtt__read_floats<PACK>(dy + column, dys);
            mtt__read_floats<PACK>(x + column, xs);
            mtt__read_floats<PACK>(o.w + column, gain);
            if (o.joined) mtt__read_floats<PACK>(joined + column, others);
            MTT__UNROLL for (int k = 0; k < PACK; k++) {
                xs[k] = mtt__normalized<T>(xs[k], stat);
                out[k] = stat.y * (dys[k] * gain[k] - sum.x - xs[k] * sum.y) + others[k];
            }
            const mtt__vector<T, PACK> stored = mtt__from_floats<T, PACK>(out);
            *reinterpret_cast<mtt__vector<T, PACK> *>(o.dx + row * width + column) = stored;
            extra.each(row, column, stored, xs, gain);
            if (S::SUMS_DX) {
                mtt__to_floats(stored, out);
                MTT__UNROLL for (int k = 0; k < PACK; k++) dx_sums[p][k] += out[k];
            }
        }
        if (STAGES) mtt__copy_row<S>(o, ahead, threads, lane, copy, step), ahead = after(ahead);
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        extra.after_rows(row - group + block_rows);
    }
    mtt__store_sums<S, MORE::WHOLE_TILES>(o.partial, width, reinterpret_cast<float *>(ring), block_rows,
                                          group, threads, lane, dw, db, dx_sums);
}

/* Threads of a row, of up to `each` elements: a warp at least. */
static int mtt__norm_threads(int64_t width, int each = 32)
{
    int threads = 32;
    while (threads * each < width) threads *= 2;
    return threads;
}

/* Shared memory of the stages. */
template <class S> static size_t mtt__norm_shared(int64_t width, int stages)
{
    return (size_t)(width * S::SIZE / mtt__norm_threads(width, S::EACH)) * stages * 3 * sizeof(typename S::T);
}

/* Runs a kernel of norm_backward, and adds up the sums of its blocks. */
template <class S, class... P, class... A>
static mtt_status mtt__norm_backward_by(mtt__cuda *c, const mtt_op *op, void (*kernel)(P...), size_t shared,
                                        mtt__norm_operands<typename S::T> o, A... more)
{
    const mtt_op_norm_backward *n = MTT_OPERANDS_OF(norm_backward, op);
    const int64_t width = o.width;
    int64_t blocks;
    mtt_status status;
    if (o.tile < S::SIZE / o.threads) o.tile = S::SIZE / o.threads;
    blocks = mtt__min(mtt__blocks(o.rows, o.tile), S::BLOCKS * c->processors);
    blocks = mtt__min(blocks, (int64_t)(op->workspace->bytes / mtt__op_scratch(op)));
    status = mtt__launch_shared(c, "norm_backward", kernel, (unsigned)blocks, S::SIZE, shared, o, more...);
    if (status != MTT_OK) return status;
    return mtt__launch(c, "column_sums", mtt_k_column_sums<float>, mtt__blocks(S::SUMS * width, 64),
                       dim3(8, 32), (const float *)o.partial, mtt__at<float>(n->d_gain),
                       mtt__at<float>(n->d_shift), mtt__at<float>(n->d_bias), width, blocks, S::SUMS * width,
                       blocks, 0);
}

template <class S>
static mtt_status mtt__launch_norm_backward(mtt__cuda *c, const mtt_op *op,
                                            const mtt__norm_operands<typename S::T> &o)
{
    const int stages = mtt__norm_room(c->shared_bytes) / S::STAGE_BYTES;
    return mtt__norm_backward_by<S>(c, op, mtt_k_norm_backward<S, mtt__norm_no_more>,
                                    mtt__norm_shared<S>(o.width, stages), o, mtt__norm_no_more());
}

template <class T>
static mtt__norm_operands<T> mtt__norm_backward_of(const mtt_op *op, void *partial, int tile)
{
    const mtt_op_norm_backward *n = MTT_OPERANDS_OF(norm_backward, op);
    const int64_t width = mtt__width(n->dy);
    return {mtt__at<T>(n->dy), mtt__at<T>(n->x), mtt__at<T>(n->gain), mtt__at<T>(n->joined),
            mtt__at<float2>(n->stats), mtt__at<T>(n->dx), (float *)partial, mtt__rows(n->dy), (int)width,
            mtt__norm_threads(width), tile};
}

/* Whether the kernel also sums dx: that of LayerNorm in 16 bits, for widths up to 4,096. */
static bool mtt__norm_sums_dx(const mtt_op *op)
{
    const mtt_op_norm_backward *n = MTT_OPERANDS_OF(norm_backward, op);
    return n->d_bias && op->shape->norm == MTT_NORM_LAYER && n->dx->dtype != MTT_F32 &&
           mtt__width(n->dx) <= 4096;
}

/* The usual block has 512 / sizeof(T) threads: a warp has a row of up to 1,024 columns. */
template <class T, bool RMS> static mtt_status mtt__norm_backward(mtt__cuda *c, const mtt_op *op, int tile)
{
    enum { SIZE = 512 / sizeof(T) };
    void *scratch;
    mtt_status status = mtt__scratch(c, op, mtt__op_scratch(op), &scratch);
    if (status != MTT_OK) return status;
    mtt__norm_operands<T> o = mtt__norm_backward_of<T>(op, scratch, tile);
    if constexpr (SIZE == 256 && !RMS)
        if (mtt__norm_sums_dx(op)) {
            typedef mtt__norm_block<T, 0, SIZE, RMS, true> S;
            o.threads = mtt__norm_threads(o.width, S::EACH);
            return mtt__launch_norm_backward<S>(c, op, o);
        }
    if (o.threads == 32) return mtt__launch_norm_backward<mtt__norm_block<T, 32, SIZE, RMS>>(c, op, o);
    if (o.threads <= SIZE) return mtt__launch_norm_backward<mtt__norm_block<T, 0, SIZE, RMS>>(c, op, o);
    if constexpr (SIZE < 256)
        if (o.threads == 256) return mtt__launch_norm_backward<mtt__norm_block<T, 256, 256, RMS>>(c, op, o);
    if (o.threads == 512) return mtt__launch_norm_backward<mtt__norm_block<T, 512, 512, RMS>>(c, op, o);
    return mtt__cuda_fail(c->env, MTT_E_ARGUMENT, "a norm over %d columns: at most 16,384", o.width);
}

/* `tile` is 1, or the tile of a wing, so that sums have the same order whichever kernel makes them. */
static mtt_status mtt__norm_backward_tiles(mtt__cuda *c, const mtt_op *op, int tile)
{
    return mtt__by_type(c, MTT_OPERANDS_OF(norm_backward, op)->dy, [&](auto zero) {
        typedef decltype(zero) T;
        if (op->shape->norm == MTT_NORM_LAYER) return mtt__norm_backward<T, false>(c, op, tile);
        return mtt__norm_backward<T, true>(c, op, tile);
    });
}

static mtt_status mtt__cuda_norm_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_norm_backward *o = MTT_OPERANDS_OF(norm_backward, op);
    mtt_status status = mtt__norm_backward_tiles(c, op, 1);
    if (status != MTT_OK || !o->d_bias || mtt__norm_sums_dx(op)) return status;
    return mtt__bias_gradient(c, op, o->dx, mtt__rows(o->dx), o->d_bias, 0);
}

/* ----------------------------------------------------------------------------------------------------------
   >>embedding
   -------------------------------------------------------------------------------------------------------- */

/* Math:        x[r] = mask * (wte[token[r]] + position[r mod T])
   Shapes:      tokens [R] int32; wte [Vp, C], position [T, C], x [R, C] T
   Launch:      256 threads, 8 elements each
   Requires:    C a multiple of 8, tokens below V
   Traffic:     3 R C elements
   Determinism: elementwise
   Reference:   mtt__cpu_embed */
template <class T>
static __global__ void __launch_bounds__(256)
    mtt_k_embed(const int32_t *tokens, const T *wte, const T *positions, T *x, int64_t rows, int seq_len,
                int width, mtt__dropout dropout)
{
    int64_t at = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 8, row = at / width, column = at - row * width;
    float a[8], b[8] = {};
    if (row >= rows) return;
    mtt__read_floats(wte + (int64_t)tokens[row] * width + column, a);
    if (positions) mtt__read_floats(positions + row % seq_len * width + column, b);
    MTT__UNROLL for (int k = 0; k < 8; k++) a[k] += b[k];
    mtt__apply_dropout<8>(dropout, at, a);
    mtt__store_floats(x + at, a);
}

static mtt_status mtt__cuda_embed(mtt__cuda *c, const mtt_op *op)
{
    const mtt_shape *d = op->shape;
    const mtt_op_embed *o = MTT_OPERANDS_OF(embed, op);
    return mtt__by_type(c, o->x, [&](auto zero) {
        typedef decltype(zero) T;
        return mtt__launch(c, "embed", mtt_k_embed<T>, mtt__blocks(d->rows * d->d_model, 2048), 256,
                           mtt__at<int32_t>(o->tokens), mtt__at<T>(o->wte), mtt__at<T>(o->positions),
                           mtt__at<T>(o->x), d->rows, d->seq_len, d->d_model,
                           mtt__dropout_of(op, o->control));
    });
}

/* The gradient of the embedding adds rows of dx that have the same token, always in one order, and spreads
   the work evenly however often a token occurs. Positions are sorted by token, stably: so by position within
   a token. They are cut into chunks of equal length. A warp has a chunk and adds up its runs of equal tokens;
   the part of a run that began in an earlier chunk goes to `heads`, which a second kernel adds to the run's
   beginning. With four chunks of four:

       chunk            0          1          2          3
       sorted tokens    3 3 3 5    5 5 5 5    5 7 7 9    9 9 11 12
       embed_runs       d_wte[3]   heads[1]   heads[2]   heads[3]    where a chunk begins within a run, its
                        d_wte[5]              d_wte[7]   d_wte[11]   part of that goes to heads
                                              d_wte[9]   d_wte[12]
       embed_joins      d_wte[5]   -          d_wte[9]   -           where a run begins and goes on: the 5 at
                        += heads[1]           += heads[3]            the end of chunk 1 began in chunk 0
                        += heads[2] */

enum { MTT__SLAB = 1 << 19 }; /* tokens sorted at a time, at most */

/* Math:        keys[i] = tokens[i], values[i] = i
   Shapes:      tokens, keys, values [n] int32
   Launch:      256 threads, an element each
   Requires:    -
   Traffic:     tokens read, keys and values written
   Determinism: elementwise
   Reference:   - */
static __global__ void __launch_bounds__(256)
    mtt_k_number_tokens(const int32_t *tokens, int n, int32_t *keys, int32_t *values)
{
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    keys[i] = tokens[i];
    values[i] = i;
}

/* Math:        for each run of equal tokens in a chunk: sum of mask * dx over its rows, added to
                d_wte[token], or stored in heads[chunk] if the run began in an earlier chunk
   Shapes:      tokens, at [n] int32 sorted by token; dx [R, C] T; d_wte [Vp, C], heads [chunks, C] float
   Launch:      a warp a chunk and 256 columns, 4 warps a block; 4 blocks a processor
   Requires:    C a multiple of 8
   Traffic:     n C elements of dx, 8 bytes of d_wte a run and column
   Determinism: rows in the order of the sorted positions; each element of d_wte has one writer
   Reference:   mtt__cpu_embed_backward */
template <class T>
static __global__ void __launch_bounds__(128, 4)
    mtt_k_embed_runs(const int32_t *tokens, const int32_t *at, int n, int chunk, const T *dx,
                     int64_t first_row, float *d_wte, float *heads, int width, mtt__dropout dropout)
{
    enum { AHEAD = 4 };
    int slices = (width + 255) / 256, job = blockIdx.x * 4 + threadIdx.x / 32, own = job / slices;
    int column = job % slices * 256 + threadIdx.x % 32 * 8;
    int begin = own * chunk, end = begin + chunk < n ? begin + chunk : n; /* of the warp's chunk */
    if (begin >= n || column >= width) return;
    int32_t token = tokens[begin];
    bool is_head = begin > 0 && tokens[begin - 1] == token;
    float sum[8] = {0};
    for (int i = begin; i < end; i += AHEAD) {
        mtt__vector<T> rows[AHEAD];
        MTT__UNROLL for (int a = 0; a < AHEAD; a++)
            if (i + a < end) rows[a] = mtt__load_vector(dx + (first_row + at[i + a]) * width + column);
        MTT__UNROLL for (int a = 0; a < AHEAD; a++) {
            if (i + a >= end) break;
            if (tokens[i + a] != token) {
                float *out = is_head ? heads + (int64_t)own * width + column
                                     : d_wte + (int64_t)token * width + column;
                MTT__UNROLL for (int k = 0; k < 8; k++) out[k] = sum[k] + (is_head ? 0.0f : out[k]);
                token = tokens[i + a];
                is_head = false;
                MTT__UNROLL for (int k = 0; k < 8; k++) sum[k] = 0;
            }
            float v[8];
            mtt__to_floats(rows[a], v);
            mtt__apply_dropout<8>(dropout, (first_row + at[i + a]) * width + column, v);
            MTT__UNROLL for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
    }
    float *out = is_head ? heads + (int64_t)own * width + column : d_wte + (int64_t)token * width + column;
    MTT__UNROLL for (int k = 0; k < 8; k++) out[k] = sum[k] + (is_head ? 0.0f : out[k]);
}

/* Math:        d_wte[token] += heads of the chunks in which the run continues, for each run that begins in a
                chunk
   Shapes:      tokens [n] int32 sorted; heads [chunks, C], d_wte [Vp, C] float
   Launch:      a warp a chunk and 256 columns, 4 warps a block. It looks at 32 chunks at a time, and loads
                four heads before it adds them
   Requires:    mtt_k_embed_runs before it
   Traffic:     heads read once
   Determinism: chunks in order; each element of d_wte has one writer
   Reference:   mtt__cpu_embed_backward */
static __global__ void __launch_bounds__(128)
    mtt_k_embed_joins(const int32_t *tokens, int n, int chunk, const float *heads, float *d_wte, int width)
{
    enum { AHEAD = 4 };
    int slices = (width + 255) / 256, job = blockIdx.x * 4 + threadIdx.x / 32;
    int column = job % slices * 256 + threadIdx.x % 32 * 8;
    int later = job / slices + 1, next = later * chunk; /* the chunk after the warp's, and its beginning */
    int run, lane = threadIdx.x % 32;
    if (next >= n) return;
    int32_t token = tokens[next - 1];
    /* the run ends with the warp's chunk, or began in an earlier one */
    if (tokens[next] != token || (later > 1 && tokens[next - chunk - 1] == token)) return;
    float sum[8] = {0};
    do {
        const int64_t at = (int64_t)(later + lane) * chunk;
        const uint32_t others = ~__ballot_sync(0xffffffffu, at < n && tokens[at] == token);
        run = others ? __ffs((int)others) - 1 : 32;
        for (int i = 0; i < run && column < width; i += AHEAD) {
            mtt__vector<float> v[AHEAD];
            MTT__UNROLL for (int a = 0; a < AHEAD; a++) /* beyond the run its last head again, not added */
                v[a] = mtt__load_vector(heads + (int64_t)(later + min(i + a, run - 1)) * width + column);
            MTT__UNROLL for (int a = 0; a < AHEAD; a++)
                if (i + a < run)
                    MTT__UNROLL for (int k = 0; k < 8; k++) sum[k] += v[a].v[k];
        }
        later += 32;
    } while (run == 32);
    if (column >= width) return;
    float *out = d_wte + (int64_t)token * width + column;
    MTT__UNROLL for (int k = 0; k < 8; k++) out[k] += sum[k];
}

/* Math:        d_wpe[t] = sum over sequences b of mask * dx[b][t]; 0 for positions that no token had
   Shapes:      dx [B, T, C] T, d_wpe [max_seq, C] float
   Launch:      256 threads, 8 columns of a position each
   Requires:    C a multiple of 8
   Traffic:     dx read once, d_wpe written once
   Determinism: sequences in order
   Reference:   mtt__cpu_embed_backward */
template <class T>
static __global__ void __launch_bounds__(256)
    mtt_k_position_gradient(const T *dx, float *d_wpe, int batch, int seq_len, int64_t count, int width,
                            mtt__dropout dropout)
{
    int64_t at = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 8, sequence = (int64_t)seq_len * width;
    float sum[8] = {0}, v[8];
    if (at >= count) return;
    for (int64_t b = 0; b < (at < sequence ? batch : 0); b++) {
        mtt__read_floats(dx + b * sequence + at, v);
        mtt__apply_dropout<8>(dropout, b * sequence + at, v);
        MTT__UNROLL for (int k = 0; k < 8; k++) sum[k] += v[k];
    }
    mtt__store_floats(d_wpe + at, sum);
}

/* The tokens of a slab and their positions, sorted by token: in the current half of each double buffer. */
struct mtt__sorted {
    cub::DoubleBuffer<int32_t> tokens, positions;
    float *heads;
    int chunk;
};

/* The workspace holds both double buffers, half a byte a token for CUB, and the heads. CUB needs 1 KiB a
   tile, of 4,096 tokens or more, and less than 8 KiB besides. For a short slab this is more than half a byte
   a token. It then extends over the heads, which are written after the sort. */
static mtt_status mtt__sort_tokens(mtt__cuda *c, const mtt_op *op, const int32_t *tokens, int n,
                                   mtt__sorted *s)
{
    const size_t slot = (size_t)mtt__round_up(4 * (int64_t)n, 256), cub_at = 4 * slot;
    const size_t heads_at = cub_at + 1024 * (size_t)mtt__blocks(n, MTT__SORT_LEAST);
    const size_t row = (size_t)op->shape->d_model * sizeof(float);
    size_t bytes = 0;
    int bits = 0;
    void *scratch;
    mtt_status status = mtt__scratch(c, op, heads_at + row, &scratch);
    if (status != MTT_OK) return status;
    char *at = (char *)scratch;
    s->tokens = cub::DoubleBuffer<int32_t>((int32_t *)at, (int32_t *)(at + slot));
    s->positions = cub::DoubleBuffer<int32_t>((int32_t *)(at + 2 * slot), (int32_t *)(at + 3 * slot));
    s->heads = (float *)(at + heads_at);
    for (s->chunk = 32; mtt__blocks(n, s->chunk) * row > op->workspace->bytes - heads_at;) s->chunk *= 2;
    while (op->shape->vocab - 1 >> bits) bits++;
    const auto sort = [&](void *temporary) {
        return cub::DeviceRadixSort::SortPairs(temporary, bytes, s->tokens, s->positions, n, 0, bits,
                                               c->stream);
    };
    status = mtt__checked(c, sort(NULL), "asking for a sort's scratch"); /* sets bytes, and no more */
    if (status == MTT_OK) status = mtt__scratch(c, op, cub_at + bytes, &scratch);
    if (status == MTT_OK)
        status = mtt__launch(c, "number_tokens", mtt_k_number_tokens, mtt__blocks(n, 256), 256, tokens, n,
                             s->tokens.Current(), s->positions.Current());
    return status == MTT_OK ? mtt__checked(c, sort(at + cub_at), "sorting tokens") : status;
}

template <class T> static mtt_status mtt__embed_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_shape *d = op->shape;
    const mtt_op_embed_backward *o = MTT_OPERANDS_OF(embed_backward, op);
    const int32_t *tokens = mtt__at<int32_t>(o->tokens);
    const T *dx = mtt__at<T>(o->dx);
    mtt__dropout dropout = mtt__dropout_of(op, o->control);
    int width = d->d_model, slab = MTT__SLAB;
    mtt_status status = MTT_OK;
    if (o->d_wte && !op->adds)
        status = mtt__checked(c, cudaMemsetAsync(o->d_wte->data, 0, o->d_wte->bytes, c->stream),
                              "zeroing a gradient");
    while (slab > MTT__SORT_LEAST && (size_t)slab * 32 > op->workspace->bytes) slab /= 2;
    for (int64_t first = 0; first < d->rows && o->d_wte && status == MTT_OK; first += slab) {
        int n = (int)mtt__min(slab, d->rows - first);
        unsigned blocks;
        mtt__sorted s;
        status = mtt__sort_tokens(c, op, tokens + first, n, &s);
        if (status != MTT_OK) return status;
        blocks = mtt__blocks((int64_t)mtt__blocks(n, s.chunk) * mtt__blocks(width, 256), 4);
        status = mtt__launch(c, "embed_runs", mtt_k_embed_runs<T>, blocks, 128, s.tokens.Current(),
                             s.positions.Current(), n, s.chunk, dx, first, mtt__at<float>(o->d_wte), s.heads,
                             width, dropout);
        if (status == MTT_OK)
            status = mtt__launch(c, "embed_joins", mtt_k_embed_joins, blocks, 128, s.tokens.Current(), n,
                                 s.chunk, s.heads, mtt__at<float>(o->d_wte), width);
    }
    if (status != MTT_OK || !o->d_wpe) return status;
    return mtt__launch(c, "position_gradient", mtt_k_position_gradient<T>,
                       mtt__blocks(mtt__elements(o->d_wpe), 2048), 256, dx, mtt__at<float>(o->d_wpe),
                       d->batch, d->seq_len, mtt__elements(o->d_wpe), width, dropout);
}

static mtt_status mtt__cuda_embed_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_tensor *dx = MTT_OPERANDS_OF(embed_backward, op)->dx;
    return mtt__by_type(c, dx, [&](auto zero) { return mtt__embed_backward<decltype(zero)>(c, op); });
}

/* Math:        y[i] = x[index[i]], or 0 where index[i] < 0
   Shapes:      x [.., W], index [N] int32, y [N, W], any type
   Launch:      256 threads, 16 bytes each
   Requires:    a row is a multiple of 16 bytes
   Traffic:     N rows read and written
   Determinism: copy
   Reference:   mtt__cpu_gather, mtt__cpu_pick_row */
static __global__ void __launch_bounds__(256)
    mtt_k_gather(const uint4 *x, const int32_t *index, uint4 *y, int64_t rows, int64_t packs)
{
    const int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x, row = at / packs;
    if (row < rows)
        y[at] = index[row] < 0 ? make_uint4(0, 0, 0, 0) : x[index[row] * packs + at - row * packs];
}

static mtt_status mtt__launch_gather(mtt__cuda *c, const mtt_tensor *x, const int32_t *index,
                                     const mtt_tensor *y, int64_t rows)
{
    const int64_t packs = (int64_t)y->bytes / rows / 16;
    return mtt__launch(c, "gather", mtt_k_gather, mtt__blocks(rows * packs, 256), 256, mtt__at<uint4>(x),
                       index, mtt__at<uint4>(y), rows, packs);
}

#ifndef MTT_NO_GENERATOR
static mtt_status mtt__cuda_gather(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_gather *o = MTT_OPERANDS_OF(gather, op);
    return mtt__launch_gather(c, o->x, mtt__at<int32_t>(o->index), o->y, o->y->shape[0]);
}
#endif

static mtt_status mtt__cuda_pick_row(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_pick_row *o = MTT_OPERANDS_OF(pick_row, op);
    return mtt__launch_gather(c, o->x, &mtt__at<mtt_control>(o->control)->row, o->row, 1);
}

/* ----------------------------------------------------------------------------------------------------------
   >>products   cuBLASLt, and GELU beside it
   ------------------------------------------------------------------------------------------------------- */

/* One product, written out: y = x W + b with x [R, K], W [K, N], b [N] and y [R, N] in BF16. cuBLASLt counts
   in columns: what it takes for a matrix of N rows and R columns is y, row after row. So it makes y^T =
   W^T x^T, and the operands change places:

       cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);        sums and alpha in FP32
       cublasLtMatmulDescSetAttribute(desc, .._EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
       cublasLtMatmulDescSetAttribute(desc, .._BIAS_POINTER, b);
       cublasLtMatrixLayoutCreate(&of_w, CUDA_R_16BF, N, K, N);                rows, columns, step of a column
       cublasLtMatrixLayoutCreate(&of_x, CUDA_R_16BF, K, R, K);
       cublasLtMatrixLayoutCreate(&of_y, CUDA_R_16BF, N, R, N);
       cublasLtMatmulAlgoGetHeuristic(blas, desc, of_w, of_x, of_y, of_y, wish, 8, found, &candidates);
       cublasLtMatmul(blas, desc, &one, W, of_w, x, of_x, &zero, y, of_y, y, of_y, &found[0].algo,
                      workspace, workspace_bytes, stream);

   All but the last call make a plan: mtt__make_plan. The last one runs it: mtt__blas_run. mtt__multiply finds
   a product's plan, or makes it, and runs it. The rest of this room is for transposed operands, batches of
   matrices and other types. */

/* A row-major matrix or a batch of them; `transposed`: memory holds its transpose. */
struct mtt__blas_matrix {
    const void *data;
    const float *scale; /* on the device, of one byte an element: multiplies the product; NULL = 1 */
    int64_t ld, stride; /* elements between two rows of what is in memory, and between two matrices */
    int dtype, transposed;
};

/* C (m x n) = alpha A (m x k) B (k x n) + bias, or added to C. A and B have one type, or one byte an element;
   C and the bias have another. */
struct mtt__blas_product {
    int64_t m, n, k;
    mtt__blas_matrix a, b, c;
    const mtt_tensor *bias = NULL;
    int adds = 0, batch = 1;
    float alpha = 1.0f;
};

/* Tells products apart: two with the same bytes share a plan. */
struct mtt__product_key {
    int64_t m, n, k, lda, ldb, ldc, stride_a, stride_b, stride_c;
    int batch, transpose_a, transpose_b, in_a, in_b, out, bias, align_a, align_b, align_c, fast, padding;
    size_t workspace;
};

struct mtt__product_plan {
    mtt__product_key key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulHeuristicResult_t found[MTT__ALGORITHMS];
    int candidates; /* of found; 1 when mtt__tune has put the best one first */
    int bias_apart; /* no algorithm adds the bias: the product adds to it */
};

/* See >>trials: puts the fastest of a plan's algorithms first. */
typedef void mtt__trials(mtt__cuda *c, const mtt_op *op, mtt__product_plan *p, const mtt__blas_product &g);
static mtt__trials mtt__tune;

static int mtt__element_bytes(int dtype)
{
    return (int)mtt__bytes_of((mtt_dtype)dtype, 1);
}

static mtt__blas_matrix mtt__blas_matrix_at(const mtt_tensor *t, int64_t first, int64_t ld, int64_t stride,
                                            int transposed)
{
    mtt__blas_matrix m;
    m.data = (const char *)t->data + first * mtt__element_bytes(t->dtype);
    m.scale = t->scale ? &t->scale->inverse : NULL;
    m.ld = ld;
    m.stride = stride;
    m.dtype = t->dtype;
    m.transposed = transposed;
    return m;
}

static mtt__blas_matrix mtt__blas_whole(const mtt_tensor *t, int transposed)
{
    return mtt__blas_matrix_at(t, 0, mtt__width(t), 0, transposed);
}

/* Fast loads need 16 bytes; below that only the element's size is promised. */
static int mtt__blas_alignment(const mtt__blas_matrix &m)
{
    return (uintptr_t)m.data % 16 == 0 ? 16 : mtt__element_bytes(m.dtype);
}

static void mtt__forget_plan(mtt__product_plan *p)
{
    if (p->desc) cublasLtMatmulDescDestroy(p->desc);
    if (p->a) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) cublasLtMatrixLayoutDestroy(p->b);
    if (p->c) cublasLtMatrixLayoutDestroy(p->c);
    memset(p, 0, sizeof(*p));
}

static void mtt__forget_plans(mtt__cuda *c)
{
    for (int i = 0; i < c->plan_count; i++) mtt__forget_plan(&c->plans[i]);
}

static cublasStatus_t mtt__layout(cublasLtMatrixLayout_t *out, cudaDataType type, int64_t rows,
                                  int64_t columns, int64_t ld, int64_t stride, int batch)
{
    const cublasLtMatrixLayoutAttribute_t count = CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
    const cublasLtMatrixLayoutAttribute_t step = CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
    cublasStatus_t s = cublasLtMatrixLayoutCreate(out, type, (uint64_t)rows, (uint64_t)columns, ld);
    if (!s) s = cublasLtMatrixLayoutSetAttribute(*out, count, &batch, sizeof(batch));
    if (!s) s = cublasLtMatrixLayoutSetAttribute(*out, step, &stride, sizeof(stride));
    return s;
}

/* Asks for the best algorithms. Partial sums of split-K are added in FP32 and in a fixed order, or not at
   all. */
static cublasStatus_t mtt__blas_heuristic(mtt__cuda *c, mtt__product_plan *p)
{
    const mtt__product_key *key = &p->key;
    uint32_t align_a = (uint32_t)key->align_b, align_b = (uint32_t)key->align_a,
             align_c = (uint32_t)key->align_c;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    uint64_t workspace = key->workspace;
    cublasLtMatmulPreference_t wish = NULL;
    cublasStatus_t s = cublasLtMatmulPreferenceCreate(&wish);
#define MTT__WISH(attribute, value)                                                                          \
    if (!s)                                                                                                  \
        s = cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_##attribute, &value,             \
                                                 sizeof(value));
    MTT__WISH(MAX_WORKSPACE_BYTES, workspace)
    MTT__WISH(REDUCTION_SCHEME_MASK, reductions)
    MTT__WISH(MIN_ALIGNMENT_A_BYTES, align_a)
    MTT__WISH(MIN_ALIGNMENT_B_BYTES, align_b)
    MTT__WISH(MIN_ALIGNMENT_C_BYTES, align_c)
    MTT__WISH(MIN_ALIGNMENT_D_BYTES, align_c)
#undef MTT__WISH
    if (!s)
        s = cublasLtMatmulAlgoGetHeuristic(c->blas, p->desc, p->a, p->b, p->c, p->c, wish, MTT__ALGORITHMS,
                                           p->found, &p->candidates);
    if (wish) cublasLtMatmulPreferenceDestroy(wish);
    return !s && !p->candidates ? CUBLAS_STATUS_NOT_SUPPORTED : s;
}

/* The places of the operands' scales on the device. */
static cublasStatus_t mtt__set_scales(mtt__product_plan *p, const mtt__blas_product &g)
{
    const cublasLtMatmulDescAttributes_t first = CUBLASLT_MATMUL_DESC_A_SCALE_POINTER;
    const cublasLtMatmulDescAttributes_t second = CUBLASLT_MATMUL_DESC_B_SCALE_POINTER;
    cublasStatus_t s = cublasLtMatmulDescSetAttribute(p->desc, first, &g.b.scale, sizeof(g.b.scale));
    return s ? s : cublasLtMatmulDescSetAttribute(p->desc, second, &g.a.scale, sizeof(g.a.scale));
}

/* cuBLASLt counts in columns: a row-major C = A B is its C^T = B^T A^T, so the operands change places. With
   one byte an element, tensor cores of Hopper keep 14 bits of a sum. Forward products leave it at that
   (fast), as Transformer Engine does; others add every 128 terms to a sum in FP32. */
static cublasStatus_t mtt__make_plan(mtt__cuda *c, mtt__product_plan *p, const mtt__blas_product &g)
{
    const mtt__product_key *k = &p->key;
    const void *bias = g.bias ? g.bias->data : NULL;
    const int64_t rows_b = k->transpose_b ? k->k : k->n, rows_a = k->transpose_a ? k->m : k->k;
    cublasComputeType_t compute =
        c->precision == MTT_TF32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasOperation_t first = k->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t second = k->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int8_t fast = 1;
    cublasLtEpilogue_t with_bias = CUBLASLT_EPILOGUE_BIAS, none = CUBLASLT_EPILOGUE_DEFAULT;
    cublasStatus_t s = cublasLtMatmulDescCreate(&p->desc, compute, CUDA_R_32F);
#define MTT__SET(attribute, value)                                                                           \
    if (!s)                                                                                                  \
        s = cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_##attribute, &value, sizeof(value));
    MTT__SET(TRANSA, first)
    MTT__SET(TRANSB, second)
    if (k->fast) MTT__SET(FAST_ACCUM, fast)
    if (!s && mtt__element_bytes(k->in_a) == 1) s = mtt__set_scales(p, g);
    if (!s)
        s = mtt__layout(&p->a, c->types[k->in_b], rows_b, k->n + k->k - rows_b, k->ldb, k->stride_b,
                        k->batch);
    if (!s)
        s = mtt__layout(&p->b, c->types[k->in_a], rows_a, k->m + k->k - rows_a, k->lda, k->stride_a,
                        k->batch);
    if (!s) s = mtt__layout(&p->c, c->types[k->out], k->n, k->m, k->ldc, k->stride_c, k->batch);
    if (!s && k->bias) {
        MTT__SET(EPILOGUE, with_bias)
        MTT__SET(BIAS_POINTER, bias)
        if (!s && mtt__blas_heuristic(c, p) == CUBLAS_STATUS_SUCCESS) return CUBLAS_STATUS_SUCCESS;
        p->bias_apart = 1;
        MTT__SET(EPILOGUE, none)
    }
#undef MTT__SET
    return s ? s : mtt__blas_heuristic(c, p);
}

static mtt_status mtt__find_plan(mtt__cuda *c, const mtt__product_key *key, const mtt__blas_product &g,
                                 mtt__product_plan **out)
{
    cublasStatus_t made;
    mtt__product_plan *p;
    for (int i = 0; i < c->plan_count; i++)
        if (!memcmp(&c->plans[i].key, key, sizeof(*key))) {
            *out = &c->plans[i];
            return MTT_OK;
        }
    p = &c->plans[c->next_plan];
    c->next_plan = (c->next_plan + 1) % MTT__PLANS;
    if (c->plan_count < MTT__PLANS) c->plan_count++;
    mtt__forget_plan(p);
    p->key = *key;
    made = mtt__make_plan(c, p, g);
    *out = p;
    if (made == CUBLAS_STATUS_SUCCESS) return MTT_OK;
    mtt__forget_plan(p);
    return mtt__cuda_fail(c->env, MTT_E_DEVICE,
                          "cuBLASLt has no algorithm for a product of %lld x %lld x %lld in %d bits: %s",
                          (long long)key->m, (long long)key->n, (long long)key->k,
                          8 * mtt__element_bytes(key->in_a), cublasLtGetStatusString(made));
}

/* Math:        y[r][j] = bias[j]
   Shapes:      y [rows, width] and bias [width], both T
   Launch:      256 threads, 8 elements each
   Requires:    width a multiple of 8
   Traffic:     y written
   Determinism: elementwise
   Reference:   mtt__gemm; only for products that have no algorithm with the bias in its epilogue. They add to
                y and so round once: a bias added afterwards may cancel all but the rounding */
template <class T>
static __global__ void mtt_k_spread_bias(T *y, const T *bias, int64_t count, int64_t width)
{
    int64_t at = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 8;
    float b[8];
    if (at >= count) return;
    mtt__read_floats(bias + at % width, b);
    mtt__store_floats(y + at, b);
}

/* An algorithm that asks for 4 bytes counts tiles in them, and cuBLASLt clears them before each product: 4 us
   in a graph. Without a workspace it deals the tiles out beforehand. Only a product that is refused so gets
   one. */
static cublasStatus_t mtt__blas_run(mtt__cuda *c, const mtt_op *op, const mtt__product_plan *p, int algorithm,
                                    const mtt__blas_product &g, float beta)
{
    const cublasLtMatmulHeuristicResult_t *const chosen = &p->found[algorithm];
    const auto run = [&](void *workspace, size_t bytes) {
        return cublasLtMatmul(c->blas, p->desc, &g.alpha, g.b.data, p->a, g.a.data, p->b, &beta, g.c.data,
                              p->c, (void *)g.c.data, p->c, &chosen->algo, workspace, bytes, c->stream);
    };
    const cublasStatus_t without = chosen->workspaceSize <= 4 ? run(NULL, 0) : CUBLAS_STATUS_INVALID_VALUE;
    return without == CUBLAS_STATUS_INVALID_VALUE ? run(op->workspace->data, op->workspace->bytes) : without;
}

/* Runs a product by its plan. */
static mtt_status mtt__multiply(mtt__cuda *c, const mtt_op *op, const mtt__blas_product &g)
{
    const void *bias = g.bias ? g.bias->data : NULL;
    mtt__product_key key;
    mtt__product_plan *p;
    cublasStatus_t blas = CUBLAS_STATUS_SUCCESS;
    mtt_status status;
    memset(&key, 0, sizeof(key));
    key.m = g.m, key.n = g.n, key.k = g.k;
    key.lda = g.a.ld, key.ldb = g.b.ld, key.ldc = g.c.ld;
    key.stride_a = g.a.stride, key.stride_b = g.b.stride, key.stride_c = g.c.stride;
    key.batch = g.batch;
    key.transpose_a = g.a.transposed, key.transpose_b = g.b.transposed;
    key.in_a = g.a.dtype, key.in_b = g.b.dtype, key.out = g.c.dtype;
    key.fast = mtt__element_bytes(key.in_a) == 1 && key.in_a == key.in_b; /* forward: one type */
    key.bias = bias != NULL;
    key.align_a = mtt__blas_alignment(g.a), key.align_b = mtt__blas_alignment(g.b),
    key.align_c = mtt__blas_alignment(g.c);
    key.workspace = op->workspace->bytes;
    status = mtt__find_plan(c, &key, g, &p);
    if (status != MTT_OK) return status;
    if (bias && !p->bias_apart)
        blas =
            cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
    if (!blas && mtt__element_bytes(key.in_a) == 1) blas = mtt__set_scales(p, g);
    if (!blas) mtt__tune(c, op, p, g);
    if (!blas && p->bias_apart)
        status = mtt__by_type(c, g.bias, [&](auto zero) {
            typedef decltype(zero) T;
            return mtt__launch(c, "spread_bias", mtt_k_spread_bias<T>, mtt__blocks(g.m * g.n, 2048), 256,
                               (T *)g.c.data, (const T *)bias, g.m * g.n, g.n);
        });
    if (status != MTT_OK) return status;
    if (!blas) blas = mtt__blas_run(c, op, p, 0, g, g.adds || p->bias_apart ? 1.0f : 0.0f);
    if (!blas) return MTT_OK;
    return mtt__cuda_fail(c->env, MTT_E_DEVICE, "cuBLASLt, a product of %lld x %lld x %lld: %s",
                          (long long)g.m, (long long)g.n, (long long)g.k, cublasLtGetStatusString(blas));
}

/* y = x W + b; backward x W^T, of the gradient x. */
static mtt_status mtt__multiply_rows(mtt__cuda *c, const mtt_op *op, const mtt_tensor *x,
                                     const mtt_tensor *weight, int backward, const mtt_tensor *bias,
                                     const mtt_tensor *y)
{
    mtt__blas_product g = {mtt__rows(y), mtt__width(y), mtt__width(x), mtt__blas_whole(x, 0),
                           mtt__blas_whole(weight, weight->transposed != backward), mtt__blas_whole(y, 0),
                           bias};
    g.alpha = mtt__op_scale(op);
    return mtt__multiply(c, op, g);
}

static mtt_status mtt__cuda_linear(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_linear *o = MTT_OPERANDS_OF(linear, op);
    return mtt__multiply_rows(c, op, o->x, o->weight, 0, o->bias, o->y);
}

#ifndef MTT_NO_ADAPTERS
/* y = x W + b, rounded; y += xa B */
static mtt_status mtt__cuda_linear_adapted(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_linear_adapted *o = MTT_OPERANDS_OF(linear_adapted, op);
    mtt_status status = mtt__multiply_rows(c, op, o->x, o->weight, 0, o->bias, o->y);
    if (status != MTT_OK) return status;
    return mtt__multiply(c, op, {mtt__rows(o->y), mtt__width(o->y), mtt__width(o->xa),
                                 mtt__blas_whole(o->xa, 0), mtt__blas_whole(o->lora_b, 0),
                                 mtt__blas_whole(o->y, 0), NULL, 1});
}
#endif

/* dx = scale dy W^T */
static mtt_status mtt__cuda_linear_backward_input(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_linear_backward_input *o = MTT_OPERANDS_OF(linear_backward_input, op);
    return mtt__multiply_rows(c, op, o->dy, o->weight, 1, NULL, o->dx);
}

/* dW (+)= x^T dy, or dy^T x for a transposed weight, in FP32; x begins at row `first`. */
static mtt_status mtt__weight_gradient(mtt__cuda *c, const mtt_op *op, const mtt_tensor *x, int64_t first,
                                       const mtt_tensor *dy, int64_t rows, const mtt_tensor *dw, int add)
{
    const int64_t k = mtt__width(x), n = mtt__width(dy);
    mtt__blas_matrix xs = mtt__blas_matrix_at(x, first * k, k, 0, !dw->transposed);
    mtt__blas_matrix dys = mtt__blas_whole(dy, dw->transposed), out = mtt__blas_whole(dw, 0);
    mtt__blas_product g = {k, n, rows, xs, dys, out, NULL, add};
    if (dw->transposed) g = {n, k, rows, dys, xs, out, NULL, add};
    return mtt__multiply(c, op, g);
}

/* db = sum over rows of dy: first, while dy is in cache. Then dW: see mtt__weight_gradient. */
static mtt_status mtt__cuda_linear_backward_weight(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_linear_backward_weight *o = MTT_OPERANDS_OF(linear_backward_weight, op);
    const int64_t rows = mtt__rows(o->dy);
    mtt_status status = o->d_bias ? mtt__bias_gradient(c, op, o->dy, rows, o->d_bias, 0) : MTT_OK;
    if (status != MTT_OK || !o->d_weight) return status;
    return mtt__weight_gradient(c, op, o->x, 0, o->dy, rows, o->d_weight, 0);
}

/* pre = x W + b, y = GELU(pre) if there is a y */
static mtt_status mtt__cuda_linear_gelu(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_linear_gelu *o = MTT_OPERANDS_OF(linear_gelu, op);
    mtt_status status = mtt__multiply_rows(c, op, o->x, o->weight, 0, o->bias, o->pre);
    return status == MTT_OK && o->y ? mtt__launch_activation(c, MTT_MLP_GELU, o->pre, o->y) : status;
}

/* dx = (dy W^T) GELU'(pre); db = sum over rows of dx */
static mtt_status mtt__cuda_linear_backward_gelu(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_linear_backward_gelu *o = MTT_OPERANDS_OF(linear_backward_gelu, op);
    mtt_status status;
    status = mtt__multiply_rows(c, op, o->dy, o->weight, 1, NULL, o->dx);
    if (status == MTT_OK)
        status = mtt__launch_activation_backward(c, MTT_MLP_GELU, o->dx, o->pre, o->dx);
    if (status != MTT_OK || !o->d_bias) return status;
    return mtt__bias_gradient(c, op, o->dx, mtt__rows(o->dx), o->d_bias, 0);
}

/* ----------------------------------------------------------------------------------------------------------
   >>loss
   -------------------------------------------------------------------------------------------------------- */

/* 8 logits from column j on. Padding is read as a logit whose power is 0. */
template <class T> MTT__DEVICE void mtt__read_classes(const T *at, int j, int classes, float *v)
{
    mtt__read_floats(at, v);
    if (j + 8 > classes)
        MTT__UNROLL for (int k = 0; k < 8; k++) v[k] = j + k < classes ? v[k] : -3.4e38f;
}

/* Math:        lse = log sum e^x over V classes, out = {lse - x[target], x[target] is the largest, lse}, and
                0 for rows whose target does not count
   Shapes:      x [rows, Vp] T; targets [rows] int32; out [rows, 3] float
   Launch:      a block of 512 threads a row
   Requires:    Vp a multiple of 8
   Traffic:     x read
   Determinism: fixed tree; each thread has a running maximum and sum
   Reference:   mtt__row_loss */
template <class T>
static __global__ void __launch_bounds__(512)
    mtt_k_cross_entropy(const T *logits, const int32_t *targets, float *out, int classes, int64_t width)
{
    __shared__ float shared[32];
    const T *x = logits + blockIdx.x * width;
    int target = targets[blockIdx.x];
    float v[8], at = target < 0 ? 0 : mtt__to_float(x[target]), most = -3.4e38f, sum = 0;
    out += 3 * (int64_t)blockIdx.x;
    if (target < 0 && threadIdx.x < 3) out[threadIdx.x] = 0;
    if (target < 0) return;
#pragma unroll 4
    for (int j = threadIdx.x * 8; j < classes; j += 512 * 8) {
        float largest = most, added = 0;
        mtt__read_classes(x + j, j, classes, v);
        MTT__UNROLL for (int k = 0; k < 8; k++) largest = fmaxf(largest, v[k]);
        MTT__UNROLL for (int k = 0; k < 8; k++) added += mtt__exp_from<T>(v[k], largest, 1.0f);
        sum = sum * mtt__exp_from<T>(most, largest, 1.0f) + added;
        most = largest;
    }
    float all = mtt__reduce<mtt__maximum, 512>(most, shared);
    sum = mtt__reduce<mtt__plus, 512>(sum * mtt__exp_from<T>(most, all, 1.0f), shared);
    if (threadIdx.x) return;
    out[2] = all + logf(sum);
    out[1] = at >= all ? 1.0f : 0.0f;
    out[0] = out[2] - at;
}

/* Math:        x = (e^(x - lse) - [j = target]) factor, factor = loss scale / targets that count in the step;
                0 in the padding, and in rows whose target does not count
   Shapes:      x [rows, Vp] T; targets [rows] int32; losses [rows, 3] float, lse in the third column
   Launch:      a block of 512 threads a row
   Requires:    Vp a multiple of 8
   Traffic:     x read and written
   Determinism: elementwise; the target's element is computed once more in FP32, and stored after the others
                by the same thread
   Reference:   mtt__row_gradient */
template <class T>
static __global__ void __launch_bounds__(512)
    mtt_k_cross_entropy_backward(T *logits, const int32_t *targets, const float *losses,
                                 const mtt_control *control, const mtt_counters *counters, int classes,
                                 int64_t width)
{
    T *x = logits + blockIdx.x * width;
    int target = targets[blockIdx.x];
    float v[8], at = target < 0 ? 0 : mtt__to_float(x[target]);
    float lse = losses[3 * (int64_t)blockIdx.x + 2], factor = mtt__loss_factor(control, counters);
    __syncthreads(); /* all have x[target] before it is overwritten */
#pragma unroll 4
    for (int j = threadIdx.x * 8; j < width; j += 512 * 8) {
        mtt__read_classes(x + j, j, classes, v);
        MTT__UNROLL for (int k = 0; k < 8; k++)
            v[k] = target < 0 ? 0.0f : mtt__exp_from<T>(v[k], lse, factor);
        mtt__store_floats(x + j, v);
    }
    if (target >= 0 && target / 8 % 512 == (int)threadIdx.x)
        x[target] = mtt__from_float<T>((expf(at - lse) - 1.0f) * factor);
}

/* Rows of logits with their targets and losses. */
struct mtt__loss_rows {
    const mtt_tensor *logits, *control, *counters;
    const int32_t *targets;
    float *losses;
    int64_t rows;
};

static mtt_status mtt__rows_loss(mtt__cuda *c, const mtt_op *op, const mtt__loss_rows &r)
{
    return mtt__by_type(c, r.logits, [&](auto zero) {
        typedef decltype(zero) T;
        return mtt__launch(c, "cross_entropy", mtt_k_cross_entropy<T>, (unsigned)r.rows, 512,
                           mtt__at<T>(r.logits), r.targets, r.losses, op->shape->vocab, mtt__width(r.logits));
    });
}

static mtt_status mtt__rows_loss_backward(mtt__cuda *c, const mtt_op *op, const mtt__loss_rows &r)
{
    return mtt__by_type(c, r.logits, [&](auto zero) {
        typedef decltype(zero) T;
        return mtt__launch(c, "cross_entropy_backward", mtt_k_cross_entropy_backward<T>, (unsigned)r.rows,
                           512, mtt__at<T>(r.logits), r.targets, r.losses, mtt__at<mtt_control>(r.control),
                           mtt__at<mtt_counters>(r.counters), op->shape->vocab, mtt__width(r.logits));
    });
}

static mtt_status mtt__cuda_cross_entropy(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_cross_entropy *o = MTT_OPERANDS_OF(cross_entropy, op);
    return mtt__rows_loss(c, op, {o->logits, NULL, NULL, mtt__at<int32_t>(o->targets),
                                  mtt__at<float>(o->losses), op->shape->rows});
}

static mtt_status mtt__cuda_cross_entropy_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_cross_entropy_backward *o = MTT_OPERANDS_OF(cross_entropy_backward, op);
    return mtt__rows_loss_backward(
        c, op, {o->d_logits, o->control, o->counters, mtt__at<int32_t>(o->targets),
                mtt__at<float>(o->losses), op->shape->rows});
}

/* Losses of a chunk of rows from row `first`, and the gradients of its x, of the head and of the bias. */
typedef mtt_status (*mtt__chunk_gradient)(mtt__cuda *c, const mtt_op *op, const mtt__loss_rows &r,
                                          int64_t first);

/* Head, loss and their gradients for a few rows at a time: logits are overwritten by the next chunk. */
static mtt_status mtt__chunked_loss_by(mtt__cuda *c, const mtt_op *op, mtt__chunk_gradient gradient)
{
    const mtt_op_chunked_loss *o = MTT_OPERANDS_OF(chunked_loss, op);
    const int64_t C = mtt__width(o->x), Vp = mtt__width(o->logits), rows = op->shape->rows;
    int64_t first, count;
    mtt_status status = MTT_OK;
    for (first = 0; first < rows && status == MTT_OK; first += count) {
        count = mtt__min(o->logits->shape[0], rows - first);
        mtt__blas_product head = {count, Vp, C, mtt__blas_matrix_at(o->x, first * C, C, 0, 0),
                                  mtt__blas_whole(o->weight, o->weight->transposed),
                                  mtt__blas_whole(o->logits, 0), o->bias};
        mtt__loss_rows r = {o->logits, o->control, o->counters, mtt__at<int32_t>(o->targets) + first,
                            mtt__at<float>(o->losses) + 3 * first, count};
        status = mtt__multiply(c, op, head);
        if (status == MTT_OK) status = o->dx ? gradient(c, op, r, first) : mtt__rows_loss(c, op, r);
    }
    return status;
}

/* The products of a chunk whose logits have become their gradients. */
static mtt_status mtt__chunk_products(mtt__cuda *c, const mtt_op *op, int64_t first, int64_t count)
{
    const mtt_op_chunked_loss *o = MTT_OPERANDS_OF(chunked_loss, op);
    const int64_t C = mtt__width(o->x), Vp = mtt__width(o->logits);
    mtt__blas_product back = {count, C, Vp, mtt__blas_whole(o->logits, 0),
                              mtt__blas_whole(o->weight, !o->weight->transposed),
                              mtt__blas_matrix_at(o->dx, first * C, C, 0, 0)};
    mtt_status status = mtt__multiply(c, op, back);
    if (status != MTT_OK || !o->d_weight) return status;
    return mtt__weight_gradient(c, op, o->x, first, o->logits, count, o->d_weight, first > 0);
}

/* Losses of rows, the gradients of their logits in place, and that of the head's bias if it has one. */
static mtt_status mtt__rows_gradient(mtt__cuda *c, const mtt_op *op, const mtt__loss_rows &r,
                                     const mtt_tensor *db, int add)
{
    mtt_status status = mtt__rows_loss(c, op, r);
    if (status == MTT_OK) status = mtt__rows_loss_backward(c, op, r);
    return status != MTT_OK || !db ? status : mtt__bias_gradient(c, op, r.logits, r.rows, db, add);
}

static mtt_status mtt__chunk_in_two_passes(mtt__cuda *c, const mtt_op *op, const mtt__loss_rows &r,
                                           int64_t first)
{
    const mtt_tensor *db = MTT_OPERANDS_OF(chunked_loss, op)->d_bias;
    mtt_status status = mtt__rows_gradient(c, op, r, db, first > 0);
    return status == MTT_OK ? mtt__chunk_products(c, op, first, r.rows) : status;
}

static mtt_status mtt__cuda_chunked_loss(mtt__cuda *c, const mtt_op *op)
{
    return mtt__chunked_loss_by(c, op, mtt__chunk_in_two_passes);
}

/* Math:        counters.loss += sum of the rows' losses, hits += rows that hit; the first micro-batch sets
                both. With `made`, that gets the two instead
   Shapes:      rows [count, 3] float
   Launch:      one block of 1,024 threads
   Requires:    -
   Traffic:     rows read once
   Determinism: fixed order, in double
   Reference:   mtt__cpu_sum_loss */
static __global__ void __launch_bounds__(1024)
    mtt_k_sum_loss(const float *rows, const mtt_control *control, mtt_counters *counters, mtt_count *made,
                   int64_t count, int later)
{
    __shared__ double losses[32];
    __shared__ int shared[32];
    double loss = 0;
    int hits = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += 1024) {
        loss += (double)rows[3 * i];
        hits += rows[3 * i + 1] > 0;
    }
    loss = mtt__reduce<mtt__plus, 1024>(loss, losses);
    hits = mtt__reduce<mtt__plus, 1024>(hits, shared);
    if (threadIdx.x) return;
    const mtt_count sum = {loss, hits};
    if (made) *made = sum;
    else mtt__add_count(counters, &sum, !later);
    counters->targets = control->targets;
}

static mtt_status mtt__cuda_sum_loss(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_sum_loss *o = MTT_OPERANDS_OF(sum_loss, op);
    return mtt__launch(c, "sum_loss", mtt_k_sum_loss, 1, 1024, mtt__at<float>(o->losses),
                       mtt__at<mtt_control>(o->control), mtt__at<mtt_counters>(o->counters),
                       mtt__at<mtt_count>(o->count), op->shape->rows, op->later);
}

/* ----------------------------------------------------------------------------------------------------------
   >>optimizer
   -------------------------------------------------------------------------------------------------------- */

/* One kernel works on all parameters. A block finds its elements in the table of ranges: entries are pieces
   of one parameter, each for MTT__RANGE_BLOCKS blocks. This is the number of elements from the block's first
   one. */
MTT__DEVICE int mtt__range_count(const mtt_range &r)
{
    return r.count - (int)(blockIdx.x % MTT__RANGE_BLOCKS) * MTT__RANGE_BLOCK;
}

/* The block's first element within the parameter. */
MTT__DEVICE int64_t mtt__range_begin(const mtt_range &r)
{
    return r.begin + (int)(blockIdx.x % MTT__RANGE_BLOCKS) * MTT__RANGE_BLOCK;
}

/* Whether the block's elements are in this rank's share, which consists of whole blocks. */
MTT__DEVICE bool mtt__is_mine(const mtt_range &r)
{
    return mtt__range_begin(r) >= r.mine && mtt__range_begin(r) < r.end;
}

/* Says that an address from a table is in global memory: the compiler would take slower generic accesses. */
template <class T> MTT__DEVICE T *mtt__global(T *p)
{
    __builtin_assume(__isGlobal(p));
    return p;
}

MTT__DEVICE void mtt__read_as(int dtype, const void *data, int64_t at, float *g)
{
    const void *const from = mtt__global(data);
    if (dtype == MTT_F32) mtt__read_floats((const float *)from + at, g);
    else if (dtype == MTT_BF16_BITS) mtt__read_floats((const __nv_bfloat16 *)from + at, g);
    else mtt__read_floats((const __half *)from + at, g);
}

MTT__DEVICE void mtt__read_gradient(const mtt_range &r, int64_t at, float *g)
{
    mtt__read_as(r.gradient_dtype, r.gradient, at, g);
}

/* The blocks of an operation. */
static unsigned mtt__range_blocks(const mtt_op *op)
{
    return (unsigned)(op->range_count * MTT__RANGE_BLOCKS);
}

/* Gradients that other ranks have sent: a row of `stride` bytes for each, this rank without one. */
struct mtt__arrivals {
    int64_t stride;
    int rank, ranks; /* 0 and 1: this rank alone */
    int sums;        /* 1 = its own are the sums of its micro-batches, and not those of the last one */
};

/* Math:        sum (+)= gradients of rank 0, then of rank 1, and so on
   Shapes:      gradients of a micro-batch, float or 16-bit, of this rank's share if there are several ranks;
                their sums, float
   Launch:      MTT__RANGE_BLOCKS blocks of 256 threads for each entry of ranges, 4 packs of 8 elements each
   Requires:    counts multiples of 8
   Traffic:     gradients read once, sums written, and read if something was added before
   Determinism: one addition an element and rank, in the order of ranks
   Reference:   mtt__cpu_sum_gradients */
static __global__ void __launch_bounds__(256)
    mtt_k_sum_gradients(const mtt_range *ranges, int add, const mtt__arrivals a)
{
    const mtt_range &r = ranges[blockIdx.x / MTT__RANGE_BLOCKS];
    const int count = mtt__range_count(r);
    const int64_t begin = mtt__range_begin(r);
    const int dtype = a.sums ? r.gradient_dtype : r.made_dtype;
    const void *const own = a.sums ? r.gradient : r.made;
    if (a.ranks > 1 && !mtt__is_mine(r)) return;
    MTT__UNROLL for (int i = 0; i < MTT__RANGE_BLOCK; i += 2048) {
        const int at = i + threadIdx.x * 8;
        float *const sum = (float *)mtt__global(r.gradient) + begin + at;
        float s[8] = {};
        if (at >= count) break;
        if (add) mtt__read_floats(sum, s);
        for (int rank = 0; rank < a.ranks; rank++) {
            const char *const row = (const char *)r.received + (rank - (rank > a.rank)) * a.stride;
            const bool first = rank == 0 && !add; /* -0 + 0 would be +0 */
            float g[8];
            mtt__read_as(dtype, rank == a.rank ? own : row, begin + at, g);
            MTT__UNROLL for (int k = 0; k < 8; k++) s[k] = first ? g[k] : s[k] + g[k];
        }
        mtt__store_floats(sum, s);
    }
}

/* Math:        partial[block] = sum of squares of MTT__RANGE_BLOCK elements
   Shapes:      gradients of all parameters, float or 16-bit, or (mine = 1) of this rank's share of them;
                partial [blocks with elements] double
   Launch:      MTT__RANGE_BLOCKS blocks of 256 threads for each entry of ranges, 4 packs of 8 elements each
   Requires:    counts multiples of 8
   Traffic:     gradients read once
   Determinism: fixed tree
   Reference:   mtt__sum_squares */
static __global__ void __launch_bounds__(256)
    mtt_k_sum_squares(const mtt_range *ranges, double *partial, int mine)
{
    __shared__ double shared[32];
    const mtt_range &r = ranges[blockIdx.x / MTT__RANGE_BLOCKS];
    const int count = mtt__range_count(r);
    const int64_t begin = mtt__range_begin(r);
    float sum = 0;
    if (count <= 0 || (mine && !mtt__is_mine(r))) return;
    MTT__UNROLL for (int i = 0; i < MTT__RANGE_BLOCK; i += 2048) {
        int at = i + threadIdx.x * 8;
        float g[8];
        if (at >= count) break;
        mtt__read_gradient(r, begin + at, g);
        MTT__UNROLL for (int k = 0; k < 8; k++) sum += g[k] * g[k];
    }
    double total = mtt__reduce<mtt__plus, 256>((double)sum, shared);
    if (threadIdx.x == 0) partial[r.block + blockIdx.x % MTT__RANGE_BLOCKS] = total;
}

/* Math:        mtt__scale_gradients of the sum of partial
   Shapes:      partial [count] double
   Launch:      one block of 1,024 threads
   Requires:    -
   Traffic:     partial read once
   Determinism: fixed order, in double
   Reference:   mtt__cpu_grad_norm */
static __global__ void __launch_bounds__(1024)
    mtt_k_grad_norm(const double *partial, int64_t count, const mtt_control *control, mtt_counters *counters)
{
    __shared__ double shared[32];
    double sum = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += 1024) sum += partial[i];
    sum = mtt__reduce<mtt__plus, 1024>(sum, shared);
    if (threadIdx.x == 0) mtt__scale_gradients(control, counters, sum);
}

/* Arguments of the update. */
struct mtt__update {
    const mtt_range *ranges;
    const mtt_control *control;
    const mtt_counters *counters;
    void *master, *m, *v; /* of all parameters; without a master, weights are updated in place */
    int dtype;            /* of the weights */
    int mine;             /* 1 = only this rank's share */
};

/* Math:        mtt__adamw_element
   Shapes:      all parameters: gradient, m, v, master float; weight 16-bit, rounded from the master
   Launch:      MTT__RANGE_BLOCKS blocks of 256 threads for each entry of ranges, 4 elements at a time, so
                that a warp's stores fill whole lines
   Requires:    counts multiples of 8; mtt_k_grad_norm before it
   Traffic:     28 bytes a parameter, 30 with a 16-bit weight
   Determinism: elementwise
   Reference:   mtt__cpu_adamw */
static __global__ void __launch_bounds__(256) mtt_k_adamw(const mtt__update u)
{
    if (u.counters->skipped) return;
    const mtt_range &r = u.ranges[blockIdx.x / MTT__RANGE_BLOCKS];
    if (u.mine && !mtt__is_mine(r)) return;
    const mtt_update_rates rates = mtt__update_rates(u.control, u.counters, r.group);
    const int count = (int)mtt__min(mtt__range_count(r), MTT__RANGE_BLOCK);
    const int64_t begin = mtt__range_begin(r);
    float *const m_at = (float *)u.m + r.first + begin, *const v_at = (float *)u.v + r.first + begin;
    float *const w_at = mtt__global(u.master ? (float *)u.master + r.first : (float *)r.weight) + begin;
    for (int at = threadIdx.x * 4; at < count; at += 1024) {
        float g[4], m[4], v[4], w[4];
        mtt__read_floats<4>((const float *)mtt__global(r.gradient) + begin + at, g);
        mtt__read_floats<4>(m_at + at, m);
        mtt__read_floats<4>(v_at + at, v);
        mtt__read_floats<4>(w_at + at, w);
        MTT__UNROLL for (int k = 0; k < 4; k++) mtt__adamw_element(&rates, g[k], &m[k], &v[k], &w[k]);
        mtt__store_floats<4>(m_at + at, m);
        mtt__store_floats<4>(v_at + at, v);
        mtt__store_floats<4>(w_at + at, w);
        if (u.dtype == MTT_BF16_BITS)
            mtt__store_floats<4>((__nv_bfloat16 *)mtt__global(r.weight) + begin + at, w);
        else if (u.dtype == MTT_F16_BITS)
            mtt__store_floats<4>((__half *)mtt__global(r.weight) + begin + at, w);
    }
}

static mtt_status mtt__cuda_sum_gradients(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_sum_gradients *o = MTT_OPERANDS_OF(sum_gradients, op);
    mtt__arrivals a = {0, 0, 1, 0};
    if (o->received) {
        a.stride = o->received->shape[1];
        a.rank = op->shape->rank;
        a.ranks = op->shape->ranks;
        a.sums = op->phase == MTT_STEP;
    }
    return mtt__launch(c, "sum_gradients", mtt_k_sum_gradients, mtt__range_blocks(op), 256,
                       mtt__at<const mtt_range>(o->ranges) + op->first_range, op->later, a);
}

static mtt_status mtt__sum_squares(mtt__cuda *c, const mtt_op *op, const mtt_tensor *ranges, void *partial,
                                   int mine)
{
    return mtt__launch(c, "sum_squares", mtt_k_sum_squares, mtt__range_blocks(op), 256,
                       mtt__at<const mtt_range>(ranges), (double *)partial, mine);
}

static mtt_status mtt__cuda_grad_norm(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_grad_norm *o = MTT_OPERANDS_OF(grad_norm, op);
    int64_t count = 0;
    void *partial = mtt__at<void>(o->squares);
    mtt_status status = MTT_OK;
    for (int i = 0; i < op->parameters; i++)
        count += mtt__ceil_div(op->parts[i].elements, MTT__RANGE_BLOCK);
    if (!partial && count > 0) {
        status = mtt__scratch(c, op, mtt__op_scratch(op), &partial);
        if (status == MTT_OK) status = mtt__sum_squares(c, op, o->ranges, partial, 0);
    }
    if (status != MTT_OK) return status;
    return mtt__launch(c, "grad_norm", mtt_k_grad_norm, 1, 1024, (const double *)partial, count,
                       mtt__at<mtt_control>(o->control), mtt__at<mtt_counters>(o->counters));
}

static mtt__update mtt__update_of(const mtt_op *op)
{
    const mtt_op_adamw *o = MTT_OPERANDS_OF(adamw, op);
    mtt__update u = {};
    u.ranges = mtt__at<const mtt_range>(o->ranges) + op->first_range;
    u.control = mtt__at<const mtt_control>(o->control);
    u.counters = mtt__at<const mtt_counters>(o->counters);
    u.master = mtt__at<void>(o->master);
    u.m = o->m->data;
    u.v = o->v->data;
    u.dtype = op->weights[0]->dtype;
    for (int i = 0; i < op->parameters; i++) u.mine |= op->parts[i].count < op->parts[i].elements;
    return u;
}

static mtt_status mtt__cuda_adamw(mtt__cuda *c, const mtt_op *op)
{
    return mtt__launch(c, "adamw", mtt_k_adamw, mtt__range_blocks(op), 256, mtt__update_of(op));
}

/* ----------------------------------------------------------------------------------------------------------
   >>attention
   -------------------------------------------------------------------------------------------------------- */

/* ---- products of all heads ---- */

/* cuBLASLt multiplies batches of matrices that are one stride apart. Heads have two strides, between
   sequences and between heads. So a call takes one head of all sequences, or all heads of one sequence,
   whichever needs fewer calls. Where heads of q share k and v, their strides differ: it takes one head. */
struct mtt__head_batch {
    int64_t sequence;                 /* the first matrix: its sequence and head */
    int head, next_sequence, next_head; /* 0 or 1: the steps to the next one */
    int count;
};

/* Calls body(h) for all head batches, until one fails. */
template <class BODY> static mtt_status mtt__for_head_batches(const mtt_op *op, BODY body)
{
    const mtt_shape *d = op->shape;
    const int by_head = d->batch >= d->heads || d->heads_kv < d->heads, calls = by_head ? d->heads : d->batch;
    mtt_status status = MTT_OK;
    for (int i = 0; i < calls && status == MTT_OK; i++) {
        mtt__head_batch h;
        h.sequence = by_head ? 0 : i;
        h.head = by_head ? i : 0;
        h.next_sequence = by_head;
        h.next_head = !by_head;
        h.count = by_head ? d->batch : d->heads;
        status = body(h);
    }
    return status;
}

/* Parts of qkv and d_qkv. */
enum { MTT__PART_Q, MTT__PART_K, MTT__PART_V };

static mtt__blas_matrix mtt__part_matrix(const mtt_op *op, const mtt_tensor *qkv, int part, mtt__head_batch h,
                                         int transposed)
{
    const mtt_qkv v = mtt_qkv_of(op->shape);
    const int64_t sequence = op->shape->seq_len * v.row;
    return mtt__blas_matrix_at(qkv, h.sequence * sequence + mtt_qkv_column(&v, part, h.head), v.row,
                               h.next_sequence * sequence + h.next_head * v.d_head, transposed);
}

/* Rows of `out` or d_out. */
static mtt__blas_matrix mtt__out_matrix(const mtt_op *op, const mtt_tensor *out, mtt__head_batch h)
{
    const int64_t D = op->shape->d_head, C = op->shape->heads * D, sequence = op->shape->seq_len * C;
    return mtt__blas_matrix_at(out, h.sequence * sequence + h.head * D, C,
                               h.next_sequence * sequence + h.next_head * D, 0);
}

/* Scores, probabilities and their gradients. */
static mtt__blas_matrix mtt__square_matrix(const mtt_op *op, const mtt_tensor *scores, mtt__head_batch h,
                                           int transposed)
{
    const int64_t T = op->shape->seq_len, H = op->shape->heads;
    return mtt__blas_matrix_at(scores, (h.sequence * H + h.head) * T * T, T,
                               (h.next_sequence * H + h.next_head) * T * T, transposed);
}

/* out [T, n] = alpha A [T, k] B [k, n] */
static mtt_status mtt__head_product(mtt__cuda *c, const mtt_op *op, mtt__head_batch h, int64_t n, int64_t k,
                                    mtt__blas_matrix a, mtt__blas_matrix b, mtt__blas_matrix out, float alpha)
{
    mtt__blas_product g = {op->shape->seq_len, n, k, a, b, out};
    g.batch = h.count;
    g.alpha = alpha;
    return mtt__multiply(c, op, g);
}

static float mtt__head_scale(const mtt_op *op)
{
    return 1.0f / sqrtf((float)op->shape->d_head);
}

/* S = Q K^T / sqrt(D), the whole square */
static mtt_status mtt__cuda_attention_scores(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_attention_scores *o = MTT_OPERANDS_OF(attention_scores, op);
    const int64_t T = op->shape->seq_len, D = op->shape->d_head;
    return mtt__for_head_batches(op, [&](mtt__head_batch h) {
        mtt__blas_matrix q = mtt__part_matrix(op, o->qkv, MTT__PART_Q, h, 0);
        mtt__blas_matrix k = mtt__part_matrix(op, o->qkv, MTT__PART_K, h, 1);
        mtt__blas_matrix s = mtt__square_matrix(op, o->scores, h, 0);
        return mtt__head_product(c, op, h, T, D, q, k, s, mtt__head_scale(op));
    });
}

/* O = P V */
static mtt_status mtt__cuda_attention_values(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_attention_values *o = MTT_OPERANDS_OF(attention_values, op);
    const int64_t T = op->shape->seq_len, D = op->shape->d_head;
    return mtt__for_head_batches(op, [&](mtt__head_batch h) {
        mtt__blas_matrix p = mtt__square_matrix(op, o->probs, h, 0);
        mtt__blas_matrix v = mtt__part_matrix(op, o->qkv, MTT__PART_V, h, 0);
        return mtt__head_product(c, op, h, D, T, p, v, mtt__out_matrix(op, o->out, h), 1.0f);
    });
}

/* A product by tiles in shared memory, as textbooks have it: the only one of our own in this lesson. A block
   makes 64 x 64 results. 16 rows of both operands come to shared memory at a time; there each number is read
   by 16 threads. A thread makes 4 x 4 results, so two reads from shared memory serve four multiplications.

   Math:        out[j] = alpha * sum over the query heads h of a group and their queries i of S_h[i][j] x_h[i]
   Shapes:      S [B H, T, T], x [B T, x_row] with head h in columns h D up, out in the rows of d_qkv, in the
                columns of `part`, T
   Launch:      256 threads for 64 keys and 64 columns of a head of K or V, 4 by 4 each; 16 queries at a time
   Requires:    S[i][j] = 0 for j > i
   Traffic:     S once for each 64 columns, x once for each 64 keys; 2 D FLOP a pair of query and key
   Determinism: heads, then queries, in order
   Reference:   mtt__heads_gemm */
template <class T>
static __global__ void __launch_bounds__(256)
    mtt_k_group_gradient(const T *squares, const T *x, int64_t x_row, T *out, mtt_qkv view, int part,
                         int seq_len, float alpha)
{
    __shared__ float s_smem[16][64];
    __shared__ float x_smem[16][64];
    const int key_tiles = (seq_len + 63) / 64, column_tiles = (view.d_head + 63) / 64;
    const int members = view.heads / view.heads_kv, key0 = (int)(blockIdx.x % key_tiles) * 64;
    const int column0 = (int)(blockIdx.x / key_tiles % column_tiles) * 64;
    const int row = threadIdx.x / 16, lane = threadIdx.x % 16; /* of the results: row + 16 i, lane + 16 j */
    const int64_t group = blockIdx.x / key_tiles / column_tiles, sequence = group / view.heads_kv;
    const int first_head = (int)(group % view.heads_kv) * members;
    float sums[4][4] = {};
    for (int head = first_head; head < first_head + members; head++) {
        const T *s_gmem = squares + (sequence * view.heads + head) * seq_len * seq_len;
        const T *x_gmem = x + sequence * seq_len * x_row + head * view.d_head;
        for (int query0 = key0; query0 < seq_len; query0 += 16) {
            /* load 16 queries, 4 numbers of each operand a thread; zeros past the edges */
            __syncthreads(); /* all have read the queries before */
            for (int k = threadIdx.x; k < 16 * 64; k += 256) {
                const int query = query0 + k / 64, key = key0 + k % 64, column = column0 + k % 64;
                s_smem[k / 64][k % 64] = query < seq_len && key < seq_len
                                             ? mtt__to_float(s_gmem[(int64_t)query * seq_len + key])
                                             : 0.0f;
                x_smem[k / 64][k % 64] =
                    query < seq_len && column < view.d_head ? mtt__to_float(x_gmem[query * x_row + column])
                                                            : 0.0f;
            }
            __syncthreads(); /* these are there */
            /* multiply */
            MTT__UNROLL for (int query = 0; query < 16; query++)
                MTT__UNROLL for (int i = 0; i < 4; i++)
                    MTT__UNROLL for (int j = 0; j < 4; j++)
                        sums[i][j] += s_smem[query][row + i * 16] * x_smem[query][lane + j * 16];
        }
    }
    /* store */
    out += sequence * seq_len * view.row + mtt_qkv_column(&view, part, first_head);
    for (int k = 0; k < 16; k++) {
        const int key = key0 + row + k / 4 * 16, column = column0 + lane + k % 4 * 16;
        if (key < seq_len && column < view.d_head)
            out[key * view.row + column] = mtt__from_float<T>(sums[k / 4][k % 4] * alpha);
    }
}

/* Gradients of heads of K or V that heads of q share. */
static mtt_status mtt__group_gradient(mtt__cuda *c, const mtt_op *op, const mtt_tensor *squares,
                                      const mtt_tensor *x, const mtt_tensor *d_qkv, int part, float alpha)
{
    const mtt_shape *d = op->shape;
    const int64_t blocks = mtt__ceil_div(d->seq_len, 64) * mtt__ceil_div(d->d_head, 64) * d->heads_kv;
    return mtt__by_type(c, d_qkv, [&](auto zero) {
        typedef decltype(zero) T;
        return mtt__launch(c, "group_gradient", mtt_k_group_gradient<T>, (unsigned)(blocks * d->batch), 256,
                           mtt__at<T>(squares), mtt__at<T>(x), mtt__width(x), mtt__at<T>(d_qkv),
                           mtt_qkv_of(d), part, d->seq_len, alpha);
    });
}

/* dP = dO V^T, dV = P^T dO */
static mtt_status mtt__cuda_attention_values_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_attention_values_backward *o = MTT_OPERANDS_OF(attention_values_backward, op);
    const int64_t T = op->shape->seq_len, D = op->shape->d_head;
    const bool shared = op->shape->heads_kv < op->shape->heads;
    mtt_status status = mtt__for_head_batches(op, [&](mtt__head_batch h) {
        mtt__blas_matrix d_out = mtt__out_matrix(op, o->d_out, h);
        mtt__blas_matrix v = mtt__part_matrix(op, o->qkv, MTT__PART_V, h, 1);
        mtt__blas_matrix dv = mtt__part_matrix(op, o->d_qkv, MTT__PART_V, h, 0);
        mtt__blas_matrix p = mtt__square_matrix(op, o->probs, h, 1);
        mtt__blas_matrix dp = mtt__square_matrix(op, o->d_probs, h, 0);
        mtt_status status = mtt__head_product(c, op, h, T, D, d_out, v, dp, 1.0f);
        if (status != MTT_OK || shared) return status;
        return mtt__head_product(c, op, h, D, T, p, d_out, dv, 1.0f);
    });
    if (status != MTT_OK || !shared) return status;
    return mtt__group_gradient(c, op, o->probs, o->d_out, o->d_qkv, MTT__PART_V, 1.0f);
}

/* dQ = dS K / sqrt(D), dK = dS^T Q / sqrt(D) */
static mtt_status mtt__cuda_attention_scores_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_attention_scores_backward *o = MTT_OPERANDS_OF(attention_scores_backward, op);
    const int64_t T = op->shape->seq_len, D = op->shape->d_head;
    const bool shared = op->shape->heads_kv < op->shape->heads;
    mtt_status status = mtt__for_head_batches(op, [&](mtt__head_batch h) {
        mtt__blas_matrix q = mtt__part_matrix(op, o->qkv, MTT__PART_Q, h, 0);
        mtt__blas_matrix k = mtt__part_matrix(op, o->qkv, MTT__PART_K, h, 0);
        mtt__blas_matrix dq = mtt__part_matrix(op, o->d_qkv, MTT__PART_Q, h, 0);
        mtt__blas_matrix dk = mtt__part_matrix(op, o->d_qkv, MTT__PART_K, h, 0);
        mtt__blas_matrix ds = mtt__square_matrix(op, o->d_scores, h, 0);
        mtt__blas_matrix ds_t = mtt__square_matrix(op, o->d_scores, h, 1);
        mtt_status status = mtt__head_product(c, op, h, D, T, ds, k, dq, mtt__head_scale(op));
        if (status != MTT_OK || shared) return status;
        return mtt__head_product(c, op, h, D, T, ds_t, q, dk, mtt__head_scale(op));
    });
    if (status != MTT_OK || !shared) return status;
    return mtt__group_gradient(c, op, o->d_scores, o->qkv, o->d_qkv, MTT__PART_K, mtt__head_scale(op));
}

/* ---- softmax ---- */

/* Joins a value over the threads of a row: 32, a warp, or 128, a block. */
template <class JOIN> MTT__DEVICE float mtt__reduce_row(float x, int threads, float *shared)
{
    return threads == 32 ? mtt__reduce<JOIN, 32>(x, shared) : mtt__reduce<JOIN, 128>(x, shared);
}

/* Math:        P[i][j] = e^(S[i][j] - max) / sum over the keys j that query i attends, max(0, i - W + 1) ..
                i; 0 elsewhere
   Shapes:      S, P [rows, T] T; row r is of query r mod T
   Launch:      32 or 128 threads a row, 128 a block; WIDTH elements at a time
   Requires:    WIDTH 8 only if T is a multiple of 8
   Traffic:     the attended part of S read twice, the second time from cache; P written once
   Determinism: fixed tree; each thread has a running maximum and sum (Milakov & Gimelshein 2018)
   Reference:   mtt__cpu_softmax */
template <class T, int WIDTH>
static __global__ void __launch_bounds__(128)
    mtt_k_softmax(const T *scores, T *probs, int64_t rows, int seq_len, int window, int threads)
{
    __shared__ float shared[32];
    const int64_t row = threads == 32 ? (int64_t)blockIdx.x * 4 + threadIdx.x / 32 : blockIdx.x;
    const int lane = (threadIdx.x & (threads - 1)) * WIDTH, step = threads * WIDTH;
    const int query = (int)(row % seq_len), low = (int)mtt__first_key(window, query);
    float most = -3.4e38f, sum = 0, v[WIDTH];
    if (row >= rows) return;
    scores += row * seq_len;
    probs += row * seq_len;
    for (int j = low / WIDTH * WIDTH + lane; j <= query; j += step) {
        float largest = most, added = 0;
        mtt__read_floats<WIDTH>(scores + j, v);
        MTT__UNROLL for (int k = 0; k < WIDTH; k++)
            if (j + k >= low && j + k <= query) largest = fmaxf(largest, v[k]);
        MTT__UNROLL for (int k = 0; k < WIDTH; k++)
            if (j + k >= low && j + k <= query) added += mtt__exp_for<T>(v[k] - largest);
        sum = sum * mtt__exp_for<T>(most - largest) + added;
        most = largest;
    }
    const float all = mtt__reduce_row<mtt__maximum>(most, threads, shared);
    const float scale = 1.0f / mtt__reduce_row<mtt__plus>(sum * mtt__exp_for<T>(most - all), threads, shared);
    for (int j = lane; j < seq_len; j += step) {
        const bool attended = j + WIDTH > low && j <= query;
        if (attended) mtt__read_floats<WIDTH>(scores + j, v);
        MTT__UNROLL for (int k = 0; k < WIDTH; k++)
            v[k] = attended && j + k >= low && j + k <= query ? mtt__exp_for<T>(v[k] - all) * scale : 0.0f;
        mtt__store_floats<WIDTH>(probs + j, v);
    }
}

/* Math:        dS = P (mask dP - sum over keys of mask dP P)
   Shapes:      dP, P, dS [rows, T] T; row r is of query r mod T; dropout's element is r T + j
   Launch:      32 or 128 threads a row, 128 a block; WIDTH elements at a time. The bound of 10 blocks leaves
                registers for the 64-bit remainder
   Requires:    WIDTH 8 only if T is a multiple of 8; dS may be dP
   Traffic:     the attended part of dP and P read twice, the second time from cache; dS written once
   Determinism: fixed tree
   Reference:   mtt__cpu_softmax_backward */
template <class T, int WIDTH>
static __global__ void __launch_bounds__(MTT__BOUNDS(128, 10))
    mtt_k_softmax_backward(const T *d_probs, const T *probs, T *d_scores, int64_t rows, int seq_len,
                           int window, int threads, mtt__dropout dropout)
{
    __shared__ float shared[32];
    const int64_t row = threads == 32 ? (int64_t)blockIdx.x * 4 + threadIdx.x / 32 : blockIdx.x;
    const int64_t first = row * seq_len;
    const int lane = (threadIdx.x & (threads - 1)) * WIDTH, step = threads * WIDTH;
    const int query = (int)(row % seq_len), low = (int)mtt__first_key(window, query) / WIDTH * WIDTH;
    float sum = 0, g[WIDTH], p[WIDTH];
    if (row >= rows) return;
    for (int j = low + lane; j <= query; j += step) {
        mtt__read_floats<WIDTH>(d_probs + first + j, g);
        mtt__read_floats<WIDTH>(probs + first + j, p);
        mtt__apply_dropout<WIDTH, 8>(dropout, first + j, g);
        MTT__UNROLL for (int k = 0; k < WIDTH; k++) sum += p[k] != 0 ? g[k] * p[k] : 0.0f;
    }
    sum = mtt__reduce_row<mtt__plus>(sum, threads, shared);
    for (int j = lane; j < seq_len; j += step) {
        if (j >= low && j <= query) {
            mtt__read_floats<WIDTH>(d_probs + first + j, g);
            mtt__read_floats<WIDTH>(probs + first + j, p);
            mtt__apply_dropout<WIDTH, 8>(dropout, first + j, g);
            MTT__UNROLL for (int k = 0; k < WIDTH; k++) g[k] = p[k] != 0 ? p[k] * (g[k] - sum) : 0.0f;
        } else
            MTT__UNROLL for (int k = 0; k < WIDTH; k++) g[k] = 0;
        mtt__store_floats<WIDTH>(d_scores + first + j, g);
    }
}

/* Elements at a time: 8 where rows are aligned. A warp a row up to 512 or 2,048 keys, a block beyond. */
static int mtt__row_width(const mtt_shape *d) { return d->seq_len % 8 ? 1 : 8; }
static int mtt__row_threads(const mtt_shape *d)
{
    return d->seq_len <= (d->seq_len % 8 ? 512 : 2048) ? 32 : 128;
}

template <class T> static mtt_status mtt__launch_softmax(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_softmax *o = MTT_OPERANDS_OF(softmax, op);
    const mtt_shape *d = op->shape;
    const int threads = mtt__row_threads(d);
    const int64_t rows = mtt__rows(o->scores);
    auto kernel = mtt__row_width(d) == 8 ? mtt_k_softmax<T, 8> : mtt_k_softmax<T, 1>;
    return mtt__launch(c, "softmax", kernel, mtt__blocks(rows, 128 / threads), 128, mtt__at<T>(o->scores),
                       mtt__at<T>(o->probs), rows, d->seq_len, d->window, threads);
}

static mtt_status mtt__cuda_softmax(mtt__cuda *c, const mtt_op *op)
{
    const mtt_tensor *probs = MTT_OPERANDS_OF(softmax, op)->probs;
    return mtt__by_type(c, probs, [&](auto zero) { return mtt__launch_softmax<decltype(zero)>(c, op); });
}

template <class T> static mtt_status mtt__launch_softmax_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_softmax_backward *o = MTT_OPERANDS_OF(softmax_backward, op);
    const mtt_shape *d = op->shape;
    const int threads = mtt__row_threads(d);
    const int64_t rows = mtt__rows(o->d_probs);
    auto kernel = mtt__row_width(d) == 8 ? mtt_k_softmax_backward<T, 8> : mtt_k_softmax_backward<T, 1>;
    return mtt__launch(c, "softmax_backward", kernel, mtt__blocks(rows, 128 / threads), 128,
                       mtt__at<T>(o->d_probs), mtt__at<T>(o->probs), mtt__at<T>(o->d_scores), rows,
                       d->seq_len, d->window, threads, mtt__dropout_of(op, o->control));
}

static mtt_status mtt__cuda_softmax_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_tensor *ds = MTT_OPERANDS_OF(softmax_backward, op)->d_scores;
    return mtt__by_type(
        c, ds, [&](auto zero) { return mtt__launch_softmax_backward<decltype(zero)>(c, op); });
}

/* ----------------------------------------------------------------------------------------------------------
   >>flash   FlashAttention (Dao et al. 2022; Dao 2023): causal, with windows and dropout
   ----------------------------------------------------------------------------------------------------------
   For each head, with Q, K, V, O of T rows and head width D:
       S = scale Q K^T,  P = softmax(S) over keys max(0, i - W + 1) .. i,  O = (P o Z) V,
       lse_i = log sum_j e^S_ij,  Z = dropout's mask, 0 or 1 / (1 - p).
   No T x T matrix is in memory: S and P exist a tile at a time, in registers or shared memory.

   Here is the algorithm, in exact FP32, which runs FP32 tensors. >>tensor cores has the same for 16-bit
   tensors, and >>hopper for H100 and H200.

   Symbols: BLOCK_Q queries and BLOCK_KV keys make a tile of scores. _gmem is device memory, _smem shared
   memory (a 32-bit address), _rmem registers.

   Numerics: operands of products have the type of the tensors; all sums and the softmax are FP32.
   Exponentials are powers of two: scale_log2 is scale log2(e). Any T >= 1, any window; D a multiple of 8 up
   to 256, padded with zeros inside. Deterministic, bit for bit, on one device: no float atomics; every sum
   has one order. */

/* ---- what the kernels share ---- */

struct mtt__flash {
    const void *qkv, *d_out; /* [B T, row of the view], [B T, C] */
    void *out, *d_qkv;       /* `out` is read in the backward pass */
    float *lse;              /* [B H, T] */
    mtt_qkv view;
    int64_t seq_len, width; /* T; H D */
    int window, head_count, first_head;
    int members; /* heads of Q that share one of K and V; all or none of them are in head_count */
    float scale, scale_log2;
    float gradient_scale; /* of dQ and dK, with dropout's scale: 0 where every query attends one key */
    mtt__dropout dropout; /* of the probabilities */
    float2 *stats;        /* backward: {lse log2(e), delta} of each query, head by head from first_head */
};

/* First element of a head in `out`, and of a part of it in qkv. */
MTT__DEVICE int64_t mtt__flash_out(const mtt__flash &f, int head)
{
    const int64_t row = (int64_t)(head / f.view.heads) * f.seq_len;
    return row * f.width + (int64_t)(head % f.view.heads) * f.view.d_head;
}

MTT__DEVICE int64_t mtt__flash_part(const mtt__flash &f, int part, int head)
{
    const int64_t row = (int64_t)(head / f.view.heads) * f.seq_len;
    return row * f.view.row + mtt_qkv_column(&f.view, part, head % f.view.heads);
}

/* ---- the algorithm, in exact FP32 ---- */

/* The online softmax. O_i = sum_j e^(S_ij - m) V_j / sum_j e^(S_ij - m) for any m; m = max_j S_ij avoids
   overflow, but is known only after the last key. So each row keeps the maximum m of the keys so far, the sum
   l of e^(S - m), and O = sum of e^(S - m) V. Where a tile of keys raises m to m', both sums are rescaled by
   e^(m - m'). Two tiles of two keys, S = 1, 3 | 4, 2 and V = 10, 20 | 30, 40 (one column):

       tile   m'   rescale           P = e^(S - m')   l                         O
       1, 3   3    -                 0.1353  1        1.1353                    0.1353 10 + 1 20 = 21.353
       4, 2   4    e^(3-4) = 0.3679  1  0.1353        0.3679 1.1353 + 1.1353    0.3679 21.353 + 1 30
                                                        = 1.5530                  + 0.1353 40 = 43.269

   At the end O / l = 27.861 and lse = m + log l = 4.4402. The softmax of all four, 0.0321 0.2369 0.6439
   0.0871, gives the same 27.861. */

/* TILE rows of D floats, D + 1 apart so that a column spreads over the banks; zeros past T. */
template <int TILE>
static __device__ void mtt__load_exact(float *tile_smem, const float *from_gmem, int64_t stride,
                                       int64_t rows_left, int D)
{
    for (int index = threadIdx.x; index < TILE * D; index += 256)
        tile_smem[index / D * (D + 1) + index % D] =
            index / D < rows_left ? from_gmem[index / D * stride + index % D] : 0.0f;
}

static __device__ bool mtt__flash_keeps(const mtt__flash &f, int head, int query, int key)
{
    const uint64_t row = (uint64_t)head * (uint64_t)f.seq_len + (uint64_t)query;
    return mtt__keeps<8>(f.dropout, row * (uint64_t)f.seq_len + (uint64_t)key);
}

static __device__ bool mtt__attends(const mtt__flash &f, int query, int key)
{
    return key <= query && query < f.seq_len && (!f.window || key > query - f.window);
}

/* Math:        O = softmax(scale Q K^T) V tile by tile, with a running maximum and sum of each row; lse
   Shapes:      qkv [B T, row of the view], out [B T, C], lse [B H, T] FP32; WIDTH >= D
   Launch:      a block of 16 x 16 threads a tile of TILE queries and head; thread (x, y) has rows y + 16 r
                and columns x + 16 c. Shared memory: Q; K, then V; P. At WIDTH 64 registers for 5 blocks a
                processor: without the bound ptxas takes 58 on sm_80, for 4
   Requires:    -
   Traffic:     K and V once a tile of queries; 4 D FLOP a pair of query and key
   Determinism: one block makes a row, in one order
   Reference:   mtt__flash_tile; FlashAttention-2, algorithm 1 */
template <int WIDTH, int TILE>
static __global__ void __launch_bounds__(MTT__BOUNDS(256, WIDTH == 64 ? 5 : 1))
    mtt_k_flash_forward_exact(const mtt__flash f)
{
    constexpr int R = TILE / 16;
    extern __shared__ __align__(128) unsigned char shared[];
    const int D = f.view.d_head, T = (int)f.seq_len, tiles = (T + TILE - 1) / TILE;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const int head = blockIdx.x / tiles, q0 = (tiles - 1 - (int)(blockIdx.x % tiles)) * TILE;
    const int64_t stride = f.view.row;
    const float *q_gmem = (const float *)f.qkv + mtt__flash_part(f, MTT__PART_Q, head);
    const float *k_gmem = (const float *)f.qkv + mtt__flash_part(f, MTT__PART_K, head);
    const float *v_gmem = k_gmem + f.view.heads_kv * D;
    float *q_smem = (float *)shared, *kv_smem = q_smem + TILE * (D + 1), *p_smem = kv_smem + TILE * (D + 1);
    float o_rmem[R][WIDTH / 16] = {}, row_max[R], row_sum[R] = {};
    for (int r = 0; r < R; r++) row_max[r] = -CUDART_INF_F;
    mtt__load_exact<TILE>(q_smem, q_gmem + q0 * stride, stride, T - q0, D);
    for (int k0 = f.window ? max(0, q0 - f.window + 1) / TILE * TILE : 0; k0 < min(q0 + TILE, T);
         k0 += TILE) {
        float s[R][R] = {};
        __syncthreads(); /* V of the last tile is read before K overwrites it */
        mtt__load_exact<TILE>(kv_smem, k_gmem + k0 * stride, stride, T - k0, D);
        __syncthreads(); /* Q and K are in shared memory */
        /* S = Q K^T */
        for (int d = 0; d < D; d++)
            for (int r = 0; r < R; r++)
                for (int c = 0; c < R; c++)
                    s[r][c] += q_smem[(y + 16 * r) * (D + 1) + d] * kv_smem[(x + 16 * c) * (D + 1) + d];
        /* the online softmax: P = e^(S - maximum), in powers of 2 (see "Numerics" above) */
        MTT__UNROLL for (int r = 0; r < R; r++) {
            const int query = q0 + y + 16 * r;
            float most = row_max[r], base, rescale;
            for (int c = 0; c < R; c++) {
                s[r][c] = mtt__attends(f, query, k0 + x + 16 * c) ? s[r][c] * f.scale_log2 : -CUDART_INF_F;
                most = fmaxf(most, s[r][c]);
            }
            for (int step = 8; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
            base = most == -CUDART_INF_F ? 0.0f : most; /* no key so far: P and O stay 0 */
            rescale = exp2f(row_max[r] - base);
            row_max[r] = most;
            row_sum[r] *= rescale;
            for (int c = 0; c < WIDTH / 16; c++) o_rmem[r][c] *= rescale;
            MTT__UNROLL for (int c = 0; c < R; c++) {
                const int key = k0 + x + 16 * c;
                float p = exp2f(s[r][c] - base);
                row_sum[r] += p;
                if (f.dropout.threshold && !mtt__flash_keeps(f, head, query, key)) p = 0;
                p_smem[(y + 16 * r) * (TILE + 1) + x + 16 * c] = p;
            }
        }
        __syncthreads(); /* P is written, and K read */
        mtt__load_exact<TILE>(kv_smem, v_gmem + k0 * stride, stride, T - k0, D);
        __syncthreads(); /* V is in shared memory */
        /* O += P V */
        for (int k = 0; k < TILE; k++)
            for (int c = 0; c < WIDTH / 16; c++) {
                if (x + 16 * c >= D) break;
                for (int r = 0; r < R; r++)
                    o_rmem[r][c] += p_smem[(y + 16 * r) * (TILE + 1) + k] * kv_smem[k * (D + 1) + x + 16 * c];
            }
    }
    /* O / sum, and lse */
    float *o_gmem = (float *)f.out + mtt__flash_out(f, head);
    for (int r = 0; r < R; r++) {
        const int query = q0 + y + 16 * r;
        for (int step = 8; step; step /= 2) row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], step);
        if (query >= T) continue;
        for (int c = 0; c < WIDTH / 16; c++)
            if (x + 16 * c < D)
                o_gmem[query * f.width + x + 16 * c] = o_rmem[r][c] * (f.dropout.scale / row_sum[r]);
        if (x == 0) f.lse[(int64_t)head * T + query] = row_max[r] * 0.6931471805599453f + logf(row_sum[r]);
    }
}

/* The backward pass. From O_i = sum_j P_ij Z_ij V_j:
       dV_j = sum_i P_ij Z_ij dO_i,  dP_ij = Z_ij (dO_i . V_j).
   Z is dropout's factor, 1 without it. The softmax has dP_ij / dS_ik = P_ij ([j = k] - P_ik), so
       dS_ik = sum_j dP_ij P_ij ([j = k] - P_ik) = P_ik (dP_ik - sum_j P_ij dP_ij).
   That sum needs no pass over the keys: sum_j P_ij Z_ij (dO_i . V_j) = dO_i . O_i = delta_i. So
       dS = P o (dP - delta),  dQ = scale dS K,  dK = scale dS^T Q.
   P is not kept: P_ij = e^(S_ij - lse_i), from Q, K and one number a row. With dropout Z's factor 1 / (1 - p)
   is applied to the sums at the end: in the loops Z is 0 or 1, and delta is multiplied by 1 - p. */

/* Math:        stats_i = {lse_i log2(e), delta_i = (1 - p) sum_d dO_id O_id}
   Shapes:      d_out, out [B T, C] of E; lse FP32; stats [head_count, T]
   Launch:      2^log_lanes lanes a row and head, 8 columns each; a block has neighbouring rows of one head
   Requires:    8 2^log_lanes >= D, D % 8 == 0, 16-byte aligned tensors
   Traffic:     reads dO, O and lse once, writes 8 bytes a row and head
   Determinism: a fixed tree of sums
   Reference:   mtt__load_queries. O as it was stored, so that delta is that of the rounded O */
template <typename E>
static __global__ void __launch_bounds__(256) mtt_k_flash_stats(const mtt__flash f, int log_lanes)
{
    const int lanes = 1 << log_lanes, rows = 256 >> log_lanes, column = (threadIdx.x & (lanes - 1)) * 8;
    const int tiles = ((int)f.seq_len + rows - 1) / rows, head = f.first_head + (int)blockIdx.x / tiles;
    const int row = (int)blockIdx.x % tiles * rows + (threadIdx.x >> log_lanes);
    const int64_t index = (int64_t)head * f.seq_len + row;
    float sum = 0;
    if (row < (int)f.seq_len && column < f.view.d_head) {
        const int64_t at = mtt__flash_out(f, head) + (int64_t)row * f.width + column;
        float x[8], y[8];
        mtt__read_floats((const E *)f.d_out + at, x);
        mtt__read_floats((const E *)f.out + at, y);
        MTT__UNROLL for (int k = 0; k < 8; k++) sum += x[k] * y[k];
    }
    for (int step = lanes / 2; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (row < (int)f.seq_len && column == 0)
        f.stats[index - (int64_t)f.first_head * f.seq_len] =
            make_float2(f.lse[index] * 1.4426950408889634f, sum / f.dropout.scale);
}

/* Math:        P and dS again from Q, K, lse; with KEYS dK and dV of a tile of keys, else dQ of a tile of
                queries
   Shapes:      qkv, d_qkv [B T, row of the view], d_out [B T, C], lse [B H, T] FP32; WIDTH >= D
   Launch:      a block of 16 x 16 threads a tile of TILE keys or queries and head; thread (x, y) has rows y +
                16 r and columns x + 16 c. Shared memory: Q, dO, K, V, P, dS
   Requires:    stats of mtt_k_flash_stats
   Traffic:     the other side's two tensors once a tile; 8 D FLOP a pair with KEYS, 6 D without: P and dS are
                made twice
   Determinism: one block makes a row of a gradient, in one order: of K and V, head after head that shares it
   Reference:   mtt__flash_backward_keys, mtt__flash_backward_queries */
template <int WIDTH, int TILE, bool KEYS>
static __global__ void __launch_bounds__(256, 2) mtt_k_flash_backward_exact(const mtt__flash f)
{
    constexpr int R = TILE / 16;
    extern __shared__ __align__(128) unsigned char shared[];
    const int D = f.view.d_head, T = (int)f.seq_len, tiles = (T + TILE - 1) / TILE;
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const int members = KEYS ? f.members : 1, own = (int)(blockIdx.x % tiles) * TILE;
    const int first = blockIdx.x / tiles * members; /* of the heads that share the block's */
    const int64_t stride = f.view.row, k_at = mtt__flash_part(f, MTT__PART_K, f.first_head + first);
    const int64_t v_at = mtt__flash_part(f, MTT__PART_V, f.first_head + first);
    const float *k_gmem = (const float *)f.qkv + k_at, *v_gmem = (const float *)f.qkv + v_at;
    float *q_smem = (float *)shared, *do_smem = q_smem + TILE * (D + 1), *k_smem = do_smem + TILE * (D + 1);
    float *v_smem = k_smem + TILE * (D + 1), *p_smem = v_smem + TILE * (D + 1);
    float *ds_smem = p_smem + TILE * (TILE + 1);
    float first_rmem[R][WIDTH / 16] = {}, second_rmem[R][WIDTH / 16] = {}; /* dK or dQ; dV */
    int begin = own, end = min(own + TILE, T);
    if (KEYS) end = f.window ? (int)min((int64_t)T, (int64_t)own + TILE - 1 + f.window) : T;
    else begin = f.window ? max(0, own - f.window + 1) / TILE * TILE : 0;
    for (int local = first, other = begin; local < first + members;) {
        const int q0 = KEYS ? other : own, k0 = KEYS ? own : other;
        const int head = f.first_head + local;
        const float *q_gmem = (const float *)f.qkv + mtt__flash_part(f, MTT__PART_Q, head);
        const float *do_gmem = (const float *)f.d_out + mtt__flash_out(f, head);
        float s[R][R] = {}, dp[R][R] = {};
        __syncthreads(); /* the last tile is read before the next overwrites it */
        if (!KEYS || (local == first && other == begin)) {
            mtt__load_exact<TILE>(k_smem, k_gmem + k0 * stride, stride, T - k0, D);
            mtt__load_exact<TILE>(v_smem, v_gmem + k0 * stride, stride, T - k0, D);
        }
        if (KEYS || other == begin) {
            mtt__load_exact<TILE>(q_smem, q_gmem + q0 * stride, stride, T - q0, D);
            mtt__load_exact<TILE>(do_smem, do_gmem + q0 * f.width, f.width, T - (int)q0, D);
        }
        __syncthreads(); /* all four are in shared memory */
        /* S = Q K^T, dP = dO V^T */
        for (int d = 0; d < D; d++)
            for (int r = 0; r < R; r++)
                for (int c = 0; c < R; c++) {
                    s[r][c] += q_smem[(y + 16 * r) * (D + 1) + d] * k_smem[(x + 16 * c) * (D + 1) + d];
                    dp[r][c] += do_smem[(y + 16 * r) * (D + 1) + d] * v_smem[(x + 16 * c) * (D + 1) + d];
                }
        /* P and dS */
        for (int r = 0; r < R; r++)
            for (int c = 0; c < R; c++) {
                const int query = q0 + y + 16 * r, key = k0 + x + 16 * c;
                const int at = (y + 16 * r) * (TILE + 1) + x + 16 * c;
                float p = 0, delta = 0;
                bool keeps = true;
                if (mtt__attends(f, query, key)) {
                    const float2 stats = f.stats[(int64_t)local * T + query];
                    p = exp2f(s[r][c] * f.scale_log2 - stats.x), delta = stats.y;
                    if (f.dropout.threshold) keeps = mtt__flash_keeps(f, head, query, key);
                }
                p_smem[at] = keeps ? p : 0.0f;
                ds_smem[at] = p * ((keeps ? dp[r][c] : 0.0f) - delta);
            }
        __syncthreads(); /* P and dS are written */
        /* dK += dS^T Q and dV += P^T dO, or dQ += dS K */
        for (int k = 0; k < TILE; k++)
            for (int c = 0; c < WIDTH / 16; c++) {
                if (x + 16 * c >= D) break;
                for (int r = 0; r < R; r++) {
                    const int at = KEYS ? k * (TILE + 1) + y + 16 * r : (y + 16 * r) * (TILE + 1) + k;
                    first_rmem[r][c] += ds_smem[at] * (KEYS ? q_smem : k_smem)[k * (D + 1) + x + 16 * c];
                    if (KEYS) second_rmem[r][c] += p_smem[at] * do_smem[k * (D + 1) + x + 16 * c];
                }
            }
        other += TILE;
        if (other >= end) other = begin, local++;
    }
    /* store dK and dV, or dQ */
    float *first_gmem =
        (float *)f.d_qkv + (KEYS ? k_at : mtt__flash_part(f, MTT__PART_Q, f.first_head + first));
    float *second_gmem = (float *)f.d_qkv + v_at;
    for (int r = 0; r < R; r++)
        for (int c = 0; c < WIDTH / 16; c++) {
            const int row = own + y + 16 * r, column = x + 16 * c;
            if (row >= T || column >= D) continue;
            first_gmem[row * stride + column] = first_rmem[r][c] * f.gradient_scale;
            if (KEYS) second_gmem[row * stride + column] = second_rmem[r][c] * f.dropout.scale;
        }
}

/* ---- launches ---- */

static mtt__flash mtt__flash_of(const mtt_op *op, const mtt_tensor *qkv, const mtt_tensor *out,
                                const mtt_tensor *lse, const mtt_tensor *control)
{
    const mtt_shape *d = op->shape;
    mtt__flash f = {};
    f.qkv = qkv->data, f.out = out->data, f.lse = (float *)lse->data;
    f.view = mtt_qkv_of(d);
    f.seq_len = d->seq_len, f.width = (int64_t)d->heads * d->d_head;
    f.members = d->heads / d->heads_kv;
    f.window = d->window < d->seq_len ? d->window : 0;
    f.head_count = d->batch * d->heads;
    f.scale = mtt__head_scale(op), f.scale_log2 = f.scale * 1.4426950408889634f;
    f.dropout = mtt__dropout_of(op, control);
    f.gradient_scale = mtt__attends_one(d) ? 0.0f : f.scale * f.dropout.scale;
    return f;
}

static mtt__flash mtt__flash_forward_of(const mtt_op *op)
{
    const mtt_op_flash *o = MTT_OPERANDS_OF(flash, op);
    return mtt__flash_of(op, o->qkv, o->out, o->lse, o->control);
}

static mtt__flash mtt__flash_backward_of(const mtt_op *op)
{
    const mtt_op_flash_backward *o = MTT_OPERANDS_OF(flash_backward, op);
    mtt__flash f = mtt__flash_of(op, o->qkv, o->out, o->lse, o->control);
    f.d_out = o->d_out->data, f.d_qkv = o->d_qkv->data;
    return f;
}

static bool mtt__flash_takes(const mtt_shape *d)
{
    return d->d_head >= 8 && d->d_head <= 256 && d->d_head % 8 == 0 && d->rows >= 1 &&
           d->rows < (int64_t)1 << 31;
}

static mtt_status mtt__flash_refuse(mtt__cuda *c, const mtt_shape *d)
{
    return mtt__cuda_fail(c->env, MTT_E_ARGUMENT,
                          "flash attention takes head widths of 8, 16, ... 256 and fewer than 2^31 tokens: "
                          "width %d, %lld tokens",
                          d->d_head, (long long)d->rows);
}

template <typename E> static mtt_status mtt__launch_stats(mtt__cuda *c, const mtt__flash &f)
{
    const int D = f.view.d_head, log_lanes = D <= 32 ? 2 : D <= 64 ? 3 : D <= 128 ? 4 : 5;
    const int64_t tiles = mtt__ceil_div(f.seq_len, 256 >> log_lanes);
    return mtt__launch(c, "flash_backward", mtt_k_flash_stats<E>, (unsigned)(tiles * f.head_count), 256, f,
                       log_lanes);
}

template <int WIDTH, int TILE> static mtt_status mtt__launch_forward_exact(mtt__cuda *c, const mtt__flash &f)
{
    const size_t floats = (size_t)2 * TILE * (f.view.d_head + 1) + TILE * (TILE + 1);
    return mtt__launch_shared(c, "flash", mtt_k_flash_forward_exact<WIDTH, TILE>,
                              mtt__blocks(f.seq_len, TILE) * f.head_count, 256, floats * sizeof(float), f);
}

static size_t mtt__backward_exact_floats(int tile, int D)
{
    return (size_t)4 * tile * (D + 1) + 2 * tile * (tile + 1);
}

/* Scratch: stats of a slice of heads of K, each with its heads of Q. */
template <int WIDTH, int TILE>
static mtt_status mtt__launch_backward_exact(mtt__cuda *c, const mtt_op *op, mtt__flash f)
{
    const size_t floats = mtt__backward_exact_floats(TILE, f.view.d_head);
    const size_t stats_bytes = f.members * (size_t)f.seq_len * sizeof(float2);
    const size_t slice = op->workspace->bytes / stats_bytes;
    const int heads = f.head_count / f.members;
    void *scratch = NULL;
    mtt_status status = mtt__scratch(c, op, stats_bytes, &scratch);
    f.stats = (float2 *)scratch;
    for (int first = 0, count; first < heads && status == MTT_OK; first += count) {
        count = (size_t)(heads - first) < slice ? heads - first : (int)slice;
        f.first_head = first * f.members, f.head_count = count * f.members;
        const unsigned blocks = mtt__blocks(f.seq_len, TILE);
        status = mtt__launch_stats<float>(c, f);
        if (status == MTT_OK)
            status = mtt__launch_shared(c, "flash_backward", mtt_k_flash_backward_exact<WIDTH, TILE, true>,
                                        blocks * count, 256, floats * sizeof(float), f);
        if (status == MTT_OK)
            status = mtt__launch_shared(c, "flash_backward", mtt_k_flash_backward_exact<WIDTH, TILE, false>,
                                        blocks * f.head_count, 256, floats * sizeof(float), f);
    }
    return status;
}

static mtt_status mtt__cuda_flash(mtt__cuda *c, const mtt_op *op)
{
    const mtt__flash f = mtt__flash_forward_of(op);
    if (!mtt__flash_takes(op->shape)) return mtt__flash_refuse(c, op->shape);
    if (f.view.d_head <= 64) return mtt__launch_forward_exact<64, 32>(c, f);
    if (f.view.d_head <= 128) return mtt__launch_forward_exact<128, 32>(c, f);
    return mtt__launch_forward_exact<256, 32>(c, f);
}

static mtt_status mtt__cuda_flash_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt__flash f = mtt__flash_backward_of(op);
    if (!mtt__flash_takes(op->shape)) return mtt__flash_refuse(c, op->shape);
    if (f.view.d_head <= 64) return mtt__launch_backward_exact<64, 32>(c, op, f);
    if (f.view.d_head <= 128 && mtt__backward_exact_floats(32, f.view.d_head) * 4 <= (size_t)c->shared_bytes)
        return mtt__launch_backward_exact<128, 32>(c, op, f);
    return mtt__launch_backward_exact<256, 16>(c, op, f);
}

/* ----------------------------------------------------------------------------------------------------------
   >>rotary and cache   positions of q and k; attention over earlier tokens, for generation
   -------------------------------------------------------------------------------------------------------- */

/* ---- rotary positions, and norms of q and k ---- */

/* A head takes 2^log_lanes neighbouring threads, each with 4 pairs. Heads of q come first, then those of k,
   up to `turned`, then those of v. */
template <class T> struct mtt__rotary_operands {
    const T *x, *dy, *gains[2]; /* gains of q and of k; NULL: no norm */
    const float *angles;        /* [T, D]: cos and sin of each pair; NULL: no rotation */
    T *y;
    float *partial; /* sums of each block */
    int64_t rows;
    int seq_len, heads, turned, all, d_head, interleaved, log_lanes;
    float eps; /* added to the mean square */
};

/* Pairs 4 lane to 4 lane + 3 of a head: a[k] and b[k]. */
template <class T>
MTT__DEVICE void mtt__load_pairs(const mtt__rotary_operands<T> &o, const T *head, int lane, float *a,
                                 float *b)
{
    if (o.interleaved) {
        float v[8];
        mtt__read_floats(head + lane * 8, v);
        MTT__UNROLL for (int k = 0; k < 4; k++) a[k] = v[2 * k], b[k] = v[2 * k + 1];
    } else {
        mtt__read_floats<4>(head + lane * 4, a);
        mtt__read_floats<4>(head + o.d_head / 2 + lane * 4, b);
    }
}

template <class T>
MTT__DEVICE void mtt__store_pairs(const mtt__rotary_operands<T> &o, T *head, int lane, const float *a,
                                  const float *b)
{
    if (o.interleaved) {
        float v[8];
        MTT__UNROLL for (int k = 0; k < 4; k++) v[2 * k] = a[k], v[2 * k + 1] = b[k];
        mtt__store_floats(head + lane * 8, v);
    } else {
        mtt__store_floats<4>(head + lane * 4, a);
        mtt__store_floats<4>(head + o.d_head / 2 + lane * 4, b);
    }
}

/* Cosine and sine of the pairs of a lane at a row's position. */
template <class T>
MTT__DEVICE void mtt__load_angles(const mtt__rotary_operands<T> &o, int row, int lane, float *angles)
{
    if (o.angles) mtt__read_floats(o.angles + (int64_t)(row % o.seq_len) * o.d_head + lane * 8, angles);
}

/* (a, b) becomes (a cos - b sin, b cos + a sin), with `sign` -1 by the negative angles. Its roundings are
   written out, so that every kernel that rotates makes the same bits. */
MTT__DEVICE void mtt__rotate_pairs(const float *angles, float sign, float *a, float *b)
{
    MTT__UNROLL for (int k = 0; k < 4; k++) {
        const float cosine = angles[2 * k], sine = angles[2 * k + 1] * sign, old = a[k];
        a[k] = fmaf(old, cosine, -__fmul_rn(b[k], sine));
        b[k] = fmaf(b[k], cosine, __fmul_rn(old, sine));
    }
}

/* The sum over a head's lanes of the products of their pairs. All lanes of the warp call it. */
MTT__DEVICE float mtt__dot_pairs(int log_lanes, const float *a, const float *b, const float *c,
                                 const float *d)
{
    float sum = 0;
    MTT__UNROLL for (int k = 0; k < 4; k++) sum += a[k] * c[k] + b[k] * d[k];
    for (int step = 1 << log_lanes >> 1; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
}

enum { MTT__ROTARY_HEADS = 4 }; /* of a row, that a thread takes one after the other */

/* Math:        y = x, in which each head of q and k becomes x / sqrt(mean x^2 + eps) gain, rotated by its
                position's angles times `sign`
   Shapes:      x, y [B T, row of qkv], gains [D] T, angles [T, D] float
   Launch:      2^log_lanes threads for MTT__ROTARY_HEADS heads of a row, which share its angles, 256 a block;
                blockIdx.y counts such groups of heads. A thread with a head alone loads twice as many bytes
                of angles as of the head: 0.10 ms for 16,384 rows of 24 heads of 64 on an H100, where groups
                of four take 0.05
   Requires:    D a multiple of 8, at most 8 2^log_lanes; fewer than 2^31 rows; y may be x
   Traffic:     x read once, y written once, of q and k alone where y is x; angles and gains stay in cache
   Determinism: a fixed tree of sums
   Reference:   mtt__cpu_rotary */
template <class T>
static __global__ void __launch_bounds__(256)
    mtt_k_rotary(const mtt__rotary_operands<T> o, int heads_moved, float sign)
{
    const int lane = threadIdx.x & ((1 << o.log_lanes) - 1), first = blockIdx.y * MTT__ROTARY_HEADS;
    const int64_t row = (int64_t)blockIdx.x * (256 >> o.log_lanes) + (threadIdx.x >> o.log_lanes);
    const int64_t at = (row * o.all + first) * o.d_head;
    const bool valid = row < o.rows && lane * 8 < o.d_head;
    float a[MTT__ROTARY_HEADS][4] = {}, b[MTT__ROTARY_HEADS][4] = {}, angles[8];
    MTT__UNROLL for (int h = 0; h < MTT__ROTARY_HEADS; h++)
        if (valid && first + h < heads_moved)
            mtt__load_pairs(o, o.x + at + h * o.d_head, lane, a[h], b[h]);
    if (valid) mtt__load_angles(o, (int)row, lane, angles);
    MTT__UNROLL for (int h = 0; h < MTT__ROTARY_HEADS; h++) {
        const int head = first + h;
        if (o.gains[0]) {
            const float squares = mtt__dot_pairs(o.log_lanes, a[h], b[h], a[h], b[h]);
            const float rstd = 1.0f / sqrtf(squares / (float)o.d_head + o.eps);
            float gain_a[4], gain_b[4];
            if (valid && head < o.turned) {
                mtt__load_pairs(o, head < o.heads ? o.gains[0] : o.gains[1], lane, gain_a, gain_b);
                MTT__UNROLL for (int k = 0; k < 4; k++)
                    a[h][k] *= rstd * gain_a[k], b[h][k] *= rstd * gain_b[k];
            }
        }
        if (!valid || head >= heads_moved) continue;
        if (o.angles && head < o.turned) mtt__rotate_pairs(angles, sign, a[h], b[h]);
        mtt__store_pairs(o, o.y + at + h * o.d_head, lane, a[h], b[h]);
    }
}

/* Math:        g = dy rotated back, xhat = x rstd, rstd = 1 / sqrt(mean x^2 + eps): dx = rstd (g gain - xhat
                mean(g gain xhat)), partial = the block's sums of g xhat over heads of q, and of k
   Shapes:      x, dy, dx [B T, row of qkv], gains [D] T, angles [T, D], partial [blocks, 2, D] float
   Launch:      2^log_lanes threads a head, 256 a block; blocks take turns at heads
   Requires:    D a multiple of 8, at most 8 2^log_lanes; fewer than 2^31 rows; dx may be dy
   Traffic:     dy and x of q and k read once, dx written once
   Determinism: heads of a thread in order, then the threads of a block; mtt_k_column_sums adds up the blocks
   Reference:   mtt__rotary_backward_row */
template <class T>
static __global__ void __launch_bounds__(256) mtt_k_rotary_backward(const mtt__rotary_operands<T> o)
{
    __shared__ float shared[256 * 16];
    const int lane = threadIdx.x & ((1 << o.log_lanes) - 1), slot = threadIdx.x >> o.log_lanes;
    const int slots = 256 >> o.log_lanes, D = o.d_head;
    const int64_t step = (int64_t)gridDim.x * slots, items = o.rows * o.turned;
    float sums[2][8] = {};
    for (int64_t first = (int64_t)blockIdx.x * slots; first < items; first += step) {
        const int64_t row = (first + slot) / o.turned;
        const int head = (int)(first + slot - row * o.turned), of_k = head >= o.heads;
        const bool valid = row < o.rows && lane * 8 < D;
        const int64_t at = (row * o.all + head) * D;
        float a[4] = {}, b[4] = {}, g_a[4] = {}, g_b[4] = {}, gain_a[4] = {}, gain_b[4] = {}, angles[8];
        if (valid) {
            mtt__load_pairs(o, o.x + at, lane, a, b);
            mtt__load_pairs(o, o.dy + at, lane, g_a, g_b);
            mtt__load_pairs(o, of_k ? o.gains[1] : o.gains[0], lane, gain_a, gain_b);
            mtt__load_angles(o, (int)row, lane, angles);
            if (o.angles) mtt__rotate_pairs(angles, -1.0f, g_a, g_b);
        }
        const float squares = mtt__dot_pairs(o.log_lanes, a, b, a, b);
        const float rstd = 1.0f / sqrtf(squares / (float)D + o.eps);
        MTT__UNROLL for (int k = 0; k < 4; k++) {
            a[k] *= rstd, b[k] *= rstd;
            MTT__UNROLL for (int part = 0; part < 2; part++) {
                sums[part][k] += part == of_k ? g_a[k] * a[k] : 0.0f;
                sums[part][k + 4] += part == of_k ? g_b[k] * b[k] : 0.0f;
            }
            g_a[k] *= gain_a[k], g_b[k] *= gain_b[k];
        }
        const float mean = mtt__dot_pairs(o.log_lanes, a, b, g_a, g_b) / (float)D;
        MTT__UNROLL for (int k = 0; k < 4; k++) {
            g_a[k] = rstd * (g_a[k] - a[k] * mean);
            g_b[k] = rstd * (g_b[k] - b[k] * mean);
        }
        if (valid) mtt__store_pairs(o, o.y + at, lane, g_a, g_b);
    }
    if (lane * 8 < D)
        MTT__UNROLL for (int k = 0; k < 16; k++) {
            const int pair = lane * 4 + k % 4, second = k / 4 % 2;
            const int column = o.interleaved ? 2 * pair + second : pair + second * (D / 2);
            shared[(slot * 2 + k / 8) * D + column] = sums[k / 8][k % 8];
        }
    __syncthreads(); /* all sums are there before they are added up */
    for (int j = threadIdx.x; j < 2 * D; j += 256) {
        float total = 0;
        for (int s = 0; s < slots; s++) total += shared[s * 2 * D + j];
        o.partial[(int64_t)blockIdx.x * 2 * D + j] = total;
    }
}

template <class T>
static mtt__rotary_operands<T> mtt__rotary_of(const mtt_op *op, const mtt_tensor *x, const mtt_tensor *dy,
                                              const mtt_tensor *q_gain, const mtt_tensor *k_gain,
                                              const mtt_tensor *angles, const mtt_tensor *y)
{
    const mtt_shape *d = op->shape;
    mtt__rotary_operands<T> o = {};
    o.x = mtt__at<T>(x), o.dy = mtt__at<T>(dy), o.y = mtt__at<T>(y);
    o.gains[0] = mtt__at<T>(q_gain), o.gains[1] = mtt__at<T>(k_gain), o.angles = mtt__at<float>(angles);
    o.rows = d->rows, o.seq_len = d->seq_len, o.heads = d->heads, o.turned = d->heads + d->heads_kv;
    o.all = o.turned + d->heads_kv, o.d_head = d->d_head, o.interleaved = d->rotary_interleaved;
    o.eps = d->norm_eps;
    while (8 << o.log_lanes < d->d_head) o.log_lanes++;
    return o;
}

/* `sign` as in mtt_k_rotary. */
static mtt_status mtt__launch_rotary(mtt__cuda *c, const mtt_op *op, const mtt_tensor *x,
                                     const mtt_tensor *q_gain, const mtt_tensor *k_gain,
                                     const mtt_tensor *angles, const mtt_tensor *y, float sign)
{
    return mtt__by_type(c, y, [&](auto zero) {
        typedef decltype(zero) T;
        const auto o = mtt__rotary_of<T>(op, x, NULL, q_gain, k_gain, angles, y);
        const int moved = x == y ? o.turned : o.all;
        const dim3 blocks(mtt__blocks(o.rows, 256 >> o.log_lanes), mtt__blocks(moved, MTT__ROTARY_HEADS));
        return mtt__launch(c, "rotary", mtt_k_rotary<T>, blocks, 256, o, moved, sign);
    });
}

static mtt_status mtt__cuda_rotary(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_rotary *o = MTT_OPERANDS_OF(rotary, op);
    return mtt__launch_rotary(c, op, o->qkv, o->q_gain, o->k_gain, o->angles, o->y, 1.0f);
}

static mtt_status mtt__cuda_linear_rotary(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_linear_rotary *o = MTT_OPERANDS_OF(linear_rotary, op);
    mtt_status status = mtt__multiply_rows(c, op, o->x, o->weight, 0, o->bias, o->y);
    if (status != MTT_OK) return status;
    return mtt__launch_rotary(c, op, o->y, o->q_gain, o->k_gain, o->angles, o->y, 1.0f);
}

/* In place: dx is dy. */
static mtt_status mtt__cuda_rotary_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_rotary_backward *o = MTT_OPERANDS_OF(rotary_backward, op);
    const int64_t D = op->shape->d_head, blocks = (int64_t)mtt__rotary_scratch(op->shape) / (8 * D);
    void *scratch;
    mtt_status status;
    if (!o->q_gain) return mtt__launch_rotary(c, op, o->dx, NULL, NULL, o->angles, o->dx, -1.0f);
    status = mtt__scratch(c, op, mtt__op_scratch(op), &scratch);
    if (status != MTT_OK) return status;
    status = mtt__by_type(c, o->dx, [&](auto zero) {
        typedef decltype(zero) T;
        auto r = mtt__rotary_of<T>(op, o->qkv, o->dy, o->q_gain, o->k_gain, o->angles, o->dx);
        r.partial = (float *)scratch;
        return mtt__launch(c, "rotary_backward", mtt_k_rotary_backward<T>, (unsigned)blocks, 256, r);
    });
    if (status != MTT_OK) return status;
    return mtt__launch(c, "column_sums", mtt_k_column_sums<float>, mtt__blocks(2 * D, 64), dim3(8, 32),
                       (const float *)scratch, mtt__at<float>(o->d_q_gain), mtt__at<float>(o->d_k_gain),
                       (float *)NULL, D, blocks, 2 * D, blocks, 0);
}

#ifndef MTT_NO_GENERATOR
/* ---- attention over a cache ---- */

template <class T> struct mtt__cached {
    const T *qkv;
    const int32_t *sequences, *places;
    T *keys, *values, *out;
    float *partial;    /* [R, H, parts, D + 2]: the largest score, the sum, and the columns of each part */
    unsigned *arrived; /* [R, H]: parts that are done */
    mtt_qkv view;
    int64_t rows, context;
    int parts, window, log_lanes;
    float scale;
};

/* Math:        keys, values [sequences[r], head, places[r]] = k, v of row r, if there is a place
   Shapes:      qkv [R, row of the view], keys and values [B heads_kv, context, D] T; the indices [R]
   Launch:      256 threads, 8 elements each of k and v
   Requires:    D a multiple of 8; no two rows have the same place of a sequence
   Traffic:     k and v read and written once
   Determinism: copy
   Reference:   mtt__cpu_cached_attention; sets the counts of parts to 0 besides */
template <class T> static __global__ void __launch_bounds__(256) mtt_k_cache(const mtt__cached<T> o)
{
    const int D = o.view.d_head, wide = 2 * o.view.heads_kv * D;
    const int64_t number = (int64_t)blockIdx.x * 256 + threadIdx.x, at = number * 8, row = at / wide;
    for (int64_t i = number; o.parts > 1 && i < o.rows * o.view.heads; i += (int64_t)gridDim.x * 256)
        o.arrived[i] = 0;
    if (row >= o.rows || o.places[row] < 0) return;
    const int column = (int)(at - row * wide), head = column / D % o.view.heads_kv;
    T *to = column < wide / 2 ? o.keys : o.values;
    const int64_t kv = (int64_t)o.sequences[row] * o.view.heads_kv + head;
    *reinterpret_cast<mtt__vector<T> *>(to + (kv * o.context + o.places[row]) * D + column % D) =
        mtt__load_vector(o.qkv + row * o.view.row + o.view.heads * D + column);
}

/* The columns and the sum of parts of a softmax, each relative to its own largest score. Columns are
   `pitch` apart. */
template <class T>
MTT__DEVICE float mtt__join_column(const float *column, const float *most_of, const float *sum_of, int parts,
                                   int pitch, int of_pitch, float most, float *sum)
{
    float value = 0, all = 0;
    for (int s = 0; s < parts; s++) {
        const float share = mtt__exp_for<T>(most_of[s * of_pitch] - most);
        all += share * sum_of[s * of_pitch];
        value += share * column[s * pitch];
    }
    *sum = all;
    return value;
}

/* Math:        O = softmax(scale q K^T) V over the places that a row attends; 0 for a row without a place
   Shapes:      qkv [R, row of the view], keys and values [B heads_kv, context, D], out [R, H D] T; the
                indices [R]
   Launch:      256 threads. blockIdx.x counts rows and heads, blockIdx.y the parts of their places, of which
                a row takes as many as have MTT__CACHED_PLACES. 2^log_lanes threads, 8 columns each, are a
                slot; each slot takes every 256 / 2^log_lanes-th key of the part, with a running maximum and
                sum, and loads the next key before it joins the products of this one. Then the slots join. If
                there are several parts, the block that ends last joins them
   Requires:    D a multiple of 8, at most 8 2^log_lanes; the row's own k and v are in the cache; counts of
                parts are 0
   Traffic:     K and V of the row's places once
   Determinism: keys of a slot in order, then the slots in order, then the parts in order, whichever block
                joins them
   Reference:   mtt__attend */
template <class T>
static __global__ void __launch_bounds__(256) mtt_k_cached_attention(const mtt__cached<T> o)
{
    __shared__ float shared[2048];
    __shared__ float most_of[256];
    __shared__ float sum_of[256];
    __shared__ unsigned done;
    const int D = o.view.d_head, lane = threadIdx.x & ((1 << o.log_lanes) - 1);
    const int slot = threadIdx.x >> o.log_lanes, slots = 256 >> o.log_lanes, pitch = D + 2;
    const int64_t row = blockIdx.x / o.view.heads;
    const int head = (int)(blockIdx.x - row * o.view.heads), place = o.places[row];
    const bool valid = lane * 8 < D;
    T *out = o.out + (row * o.view.heads + head) * D;
    if (place < 0) {
        for (int d = threadIdx.x; d < D && blockIdx.y == 0; d += 256) out[d] = mtt__from_float<T>(0.0f);
        return;
    }
    const int first = (int)mtt__first_key(o.window, place), count = place + 1 - first;
    const int parts = (int)mtt__min(o.parts, mtt__ceil_div(count, MTT__CACHED_PLACES));
    const int length = (int)mtt__ceil_div(count, parts), begin = first + (int)blockIdx.y * length;
    const int end = (int)mtt__min(begin + length, place + 1);
    if ((int)blockIdx.y >= parts) return;
    const int64_t kv = (int64_t)o.sequences[row] * o.view.heads_kv + head / (o.view.heads / o.view.heads_kv);
    const T *k_gmem = o.keys + kv * o.context * D + lane * 8;
    const T *v_gmem = o.values + kv * o.context * D + lane * 8;
    float q[8] = {}, acc[8] = {}, most = -CUDART_INF_F, sum = 0;
    mtt__vector<T> next_k = {}, next_v = {};
    if (valid) mtt__read_floats(o.qkv + row * o.view.row + head * D + lane * 8, q);
    if (valid && begin + slot < end) {
        next_k = mtt__load_vector(k_gmem + (int64_t)(begin + slot) * D);
        next_v = mtt__load_vector(v_gmem + (int64_t)(begin + slot) * D);
    }
    for (int key = begin; key < end; key += slots) { /* all lanes of a warp come to the shuffles */
        const int64_t j = key + slot;
        float k[8], v[8], s = 0;
        mtt__to_floats(next_k, k);
        mtt__to_floats(next_v, v);
        if (valid && j + slots < end) {
            next_k = mtt__load_vector(k_gmem + (j + slots) * D);
            next_v = mtt__load_vector(v_gmem + (j + slots) * D);
        }
        MTT__UNROLL for (int i = 0; i < 8; i++) s += q[i] * k[i];
        for (int step = 1 << o.log_lanes >> 1; step; step /= 2) s += __shfl_xor_sync(0xffffffffu, s, step);
        if (j >= end) continue;
        s *= o.scale;
        const float larger = fmaxf(most, s), rescale = mtt__exp_for<T>(most - larger);
        const float p = mtt__exp_for<T>(s - larger);
        sum = sum * rescale + p;
        MTT__UNROLL for (int i = 0; i < 8; i++) acc[i] = acc[i] * rescale + p * v[i];
        most = larger;
    }
    if (lane == 0) most_of[slot] = most, sum_of[slot] = sum;
    if (valid) MTT__UNROLL for (int i = 0; i < 8; i++) shared[slot * D + lane * 8 + i] = acc[i];
    __syncthreads(); /* the slots' sums are there before they are joined */
    float *const all = o.partial + (int64_t)blockIdx.x * o.parts * pitch;
    float *const own = all + blockIdx.y * pitch;
    for (int s = 0; s < slots; s++) most = fmaxf(most, most_of[s]);
    for (int d = threadIdx.x; d < D; d += 256) {
        const float value = mtt__join_column<T>(shared + d, most_of, sum_of, slots, D, 1, most, &sum);
        if (parts == 1) out[d] = mtt__from_float<T>(value / sum);
        else own[2 + d] = value;
        if (parts > 1 && d == 0) own[0] = most, own[1] = sum;
    }
    if (parts == 1) return;
    __threadfence(); /* the part is in memory before it is counted */
    __syncthreads(); /* the columns of all threads are */
    if (threadIdx.x == 0) done = atomicAdd(&o.arrived[blockIdx.x], 1u) + 1;
    __syncthreads(); /* all know the count */
    if ((int)done < parts) return;
    __threadfence(); /* no part is read before all are counted */
    for (int s = 0; s < parts; s++) most = fmaxf(most, all[s * pitch]);
    for (int d = threadIdx.x; d < D; d += 256) {
        const float value = mtt__join_column<T>(all + 2 + d, all, all + 1, parts, pitch, pitch, most, &sum);
        out[d] = mtt__from_float<T>(value / sum);
    }
}

static mtt_status mtt__cuda_cached_attention(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_cached_attention *p = MTT_OPERANDS_OF(cached_attention, op);
    const mtt_shape *d = op->shape;
    void *scratch;
    const mtt_status found = mtt__scratch(c, op, mtt__op_scratch(op), &scratch);
    if (found != MTT_OK) return found;
    return mtt__by_type(c, p->out, [&](auto zero) {
        typedef decltype(zero) T;
        mtt__cached<T> o = {};
        o.qkv = mtt__at<T>(p->qkv), o.keys = mtt__at<T>(p->keys), o.values = mtt__at<T>(p->values);
        o.out = mtt__at<T>(p->out);
        o.sequences = mtt__at<int32_t>(p->sequences), o.places = mtt__at<int32_t>(p->places);
        o.view = mtt_qkv_of(d), o.rows = d->rows, o.context = p->keys->shape[1], o.window = d->window;
        o.scale = 1.0f / sqrtf((float)d->d_head);
        o.parts = mtt__cached_parts(d, o.context);
        o.partial = (float *)scratch;
        o.arrived = (unsigned *)scratch + d->rows * d->heads * o.parts * (d->d_head + 2);
        while (8 << o.log_lanes < d->d_head) o.log_lanes++;
        const int64_t moved = d->rows * 2 * d->heads_kv * d->d_head;
        mtt_status status = mtt__launch(c, "cache", mtt_k_cache<T>, mtt__blocks(moved, 2048), 256, o);
        if (status != MTT_OK) return status;
        return mtt__launch(c, "cached_attention", mtt_k_cached_attention<T>,
                           dim3((unsigned)(d->rows * d->heads), (unsigned)o.parts), 256, o);
    });
}

/* ---- the choice of an id ---- */

struct mtt__later {
    static __device__ unsigned long long join(unsigned long long a, unsigned long long b)
    {
        return a > b ? a : b;
    }
};

/* A warp's stretch of a row of logits; the block has the row. */
template <class T> struct mtt__stretch {
    const T *row;
    int begin, end;

    /* f(id, x) for 8 ids of each lane at a time; weight 0 behind the end. */
    template <class F> MTT__MEMBER void each(F f) const
    {
#pragma unroll 4
        for (int at = begin + threadIdx.x % 32 * 8; at < end; at += 256) { /* several loads are under way */
            float x[8];
            mtt__read_floats(row + at, x);
            MTT__UNROLL for (int k = 0; k < 8; k++)
                if (at + k < end) f(at + k, x[k]);
        }
    }

    /* As mtt__choice_mass: the sum of the weights of ids whose logit is not before `least` in order; with
       scale 0, their number. slots keeps the sum of each warp. */
    MTT__MEMBER unsigned long long mass(unsigned long long *slots, uint32_t least, float most,
                                        float scale) const
    {
        unsigned long long sum = 0;
        each([&](int, float x) {
            if (mtt__order(x) >= least) sum += scale > 0 ? mtt__choice_weight(most, x, scale) : 1;
        });
        return mtt__reduce<mtt__plus, 1024>(sum, slots);
    }

    /* As mtt__choice_least: the last place in order that leaves a mass of `wanted`. */
    MTT__MEMBER uint32_t bisect(unsigned long long *slots, uint32_t least, float most, float scale,
                                double wanted) const
    {
        uint32_t end_of = mtt__order(most) + 1;
        while (end_of - least > 1) {
            const uint32_t middle = least + (end_of - least) / 2;
            const double found = (double)mass(slots, middle, most, scale);
            if (found < wanted) end_of = middle;
            else least = middle;
            if (found == wanted) break;
        }
        return least;
    }

    /* The id whose weight holds the place `target` of the warp's mass: the lane that has it writes it. */
    MTT__MEMBER void find(unsigned long long target, uint32_t least, float most, float scale,
                          mtt_chosen *chosen) const
    {
        const int lane = threadIdx.x % 32;
        unsigned long long before = 0;
        for (int from = begin; from < end && target >= before; from += 256) {
            const int at = from + lane * 8;
            float x[8] = {};
            uint32_t weights[8];
            unsigned long long sum = 0, upto;
            if (at < end) mtt__read_floats(row + at, x);
            MTT__UNROLL for (int k = 0; k < 8; k++) {
                const bool counts = at + k < end && mtt__order(x[k]) >= least;
                weights[k] = counts ? mtt__choice_weight(most, x[k], scale) : 0;
                sum += weights[k];
            }
            upto = sum;
            MTT__UNROLL for (int step = 1; step < 32; step *= 2) {
                const unsigned long long other = __shfl_up_sync(0xffffffffu, upto, step);
                if (lane >= step) upto += other;
            }
            unsigned long long low = before + upto - sum;
            MTT__UNROLL for (int k = 0; k < 8; k++) {
                if (target >= low && target < low + weights[k]) *chosen = {at + k, x[k]};
                low += weights[k];
            }
            before += __shfl_sync(0xffffffffu, upto, 31);
        }
    }
};

/* Math:        as mtt_choice says. An id has a weight; those whose logit is before `least` are left out, and
                the mass is the sum of the other weights. `place`, a number in [0, 1), times the mass is the
                chosen id's place among them. It is found by the sums of warps, then by those of a warp's
                lanes, in the order of ids
   Shapes:      logits [batch, Vp] T, choices and chosen [batch]
   Launch:      a block of 1,024 threads a row; each warp has a stretch of ids
   Requires:    Vp a multiple of 8
   Traffic:     a row is read once for the largest logit, once more for weights, and for top_k and top_p up to
                32 times from cache
   Determinism: sums of integers, and the largest of pairs (order of the logit, id)
   Reference:   mtt__cpu_choose_id, with the same bits */
template <class T>
static __global__ void __launch_bounds__(1024)
    mtt_k_choose_id(const T *logits, const mtt_choice *choices, mtt_chosen *chosen, int64_t width)
{
    __shared__ unsigned long long slots[32];
    const mtt_choice c = choices[blockIdx.x];
    const int warp = threadIdx.x / 32, length = (c.count + 255) / 256 * 8;
    const int first = (int)mtt__min((int64_t)warp * length, c.count);
    const mtt__stretch<T> own = {logits + blockIdx.x * width, first, (int)mtt__min(first + length, c.count)};
    mtt_chosen result = {-1, 0};
    unsigned long long best, mass;
    if (c.count > 0) {
        uint32_t top = 0, top_id = 0;
        own.each([&](int id, float x) { /* ids ascend: the first of equal ones stays */
            const uint32_t order = mtt__order(x);
            if (order > top) top = order, top_id = id;
        });
        best = mtt__reduce<mtt__later, 1024>((unsigned long long)top << 32 | (0xffffffffu - top_id), slots);
        result.id = (int)(0xffffffffu - (uint32_t)best);
        if (!mtt__order(mtt__to_float(own.row[0]))) result.id = 0; /* a NaN that comes first is noticed */
        result.logit = mtt__to_float(own.row[result.id]);
    }
    const float most = result.logit;
    if (!(c.count > 0 && c.scale > 0 && mtt__finite(most))) {
        if (threadIdx.x == 0) chosen[blockIdx.x] = result;
        return;
    }
    uint32_t least = 1;
    if (c.top_k > 0 && c.top_k < c.count) least = own.bisect(slots, least, most, 0, c.top_k);
    mass = own.mass(slots, least, most, c.scale);
    if (c.top_p > 0 && c.top_p < 1) {
        least = own.bisect(slots, least, most, c.scale, (double)c.top_p * (double)mass);
        mass = own.mass(slots, least, most, c.scale);
    }
    if (mtt__order(most - c.below) > least) {
        least = mtt__order(most - c.below);
        mass = own.mass(slots, least, most, c.scale);
    }
    unsigned long long target = (unsigned long long)((double)mass * c.place), before = 0;
    if (target >= mass) target = mass - 1; /* the product was rounded up */
    for (int w = 0; w < warp; w++) before += slots[w];
    if (target >= before && target < before + slots[warp])
        own.find(target - before, least, most, c.scale, &chosen[blockIdx.x]);
}

static mtt_status mtt__cuda_choose_id(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_choose_id *o = MTT_OPERANDS_OF(choose_id, op);
    return mtt__by_type(c, o->logits, [&](auto zero) {
        typedef decltype(zero) T;
        return mtt__launch(c, "choose_id", mtt_k_choose_id<T>, (unsigned)mtt__rows(o->logits), 1024,
                           mtt__at<T>(o->logits), mtt__at<mtt_choice>(o->choices),
                           mtt__at<mtt_chosen>(o->chosen), mtt__width(o->logits));
    });
}
#endif /* MTT_NO_GENERATOR */

/* ----------------------------------------------------------------------------------------------------------
   >>eight bits   FP8: numbers, scales, operands of products
   -------------------------------------------------------------------------------------------------------- */

#ifndef MTT_NO_FP8
/* ---- numbers of 8 bits ---- */

/* The two kinds, which devices of compute capability 8.9 and later convert to; mtt__to_e4m3, mtt__to_e5m2. */
struct mtt__e4m3 { uint8_t bits; };
struct mtt__e5m2 { uint8_t bits; };

/* Rounds four values, the first one to the lowest byte. */
MTT__DEVICE uint32_t mtt__pack_four(const float *v, mtt__e4m3)
{
    uint32_t out = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    MTT__UNROLL for (int k = 0; k < 4; k++) out |= (uint32_t)mtt__to_e4m3(v[k]) << 8 * k;
#else
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;"
        " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
        : "=r"(out) : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]));
#endif
    return out;
}

/* The instruction clips to 57344. mtt__mark_overflow restores infinities. */
MTT__DEVICE uint32_t mtt__pack_four(const float *v, mtt__e5m2)
{
    uint32_t out = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;"
        " cvt.rn.satfinite.e5m2x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
        : "=r"(out) : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]));
#endif
    return out;
}

/* Replaces the clipped ones of eight e5m2 values with infinities, which report an overflow. One test covers
   all eight: only codes of 57344 (0x7b) and above can have been clipped, and adding 5 sets their top bit. */
MTT__DEVICE void mtt__mark_overflow(uint2 &codes, const float *v)
{
    const uint32_t low = (codes.x & 0x7f7f7f7fu) + 0x05050505u, high = (codes.y & 0x7f7f7f7fu) + 0x05050505u;
    if (!((low | high) & 0x80808080u)) return;
    MTT__UNROLL for (int k = 0; k < 8; k++) {
        uint32_t &word = k < 4 ? codes.x : codes.y;
        if (fabsf(v[k]) >= 61440.0f) word = (word & ~(0x7fu << k % 4 * 8)) | 0x7cu << k % 4 * 8;
    }
}

/* Where a kernel writes 8-bit values, and what it records of them. */
struct mtt__eight {
    void *data;
    mtt_scale *scale; /* NULL = 1 */
    int recorded;
};

MTT__DEVICE float mtt__scale_of(const mtt__eight &e) { return e.scale ? e.scale->scale : 1.0f; }

/* Rounds eight values, times a scale, to 8 bytes. */
template <class Q> MTT__DEVICE uint2 mtt__pack_eight(const float *v, float scale)
{
    float scaled[8];
    MTT__UNROLL for (int k = 0; k < 8; k++) scaled[k] = v[k] * scale;
    uint2 codes = make_uint2(mtt__pack_four(scaled, Q()), mtt__pack_four(scaled + 4, Q()));
    if (std::is_same<Q, mtt__e5m2>::value) mtt__mark_overflow(codes, scaled);
    return codes;
}

/* Four words of four bytes, transposed. */
MTT__DEVICE void mtt__turn(uint32_t to[4], uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    const uint32_t low_ab = __byte_perm(a, b, 0x5140), high_ab = __byte_perm(a, b, 0x7362);
    const uint32_t low_cd = __byte_perm(c, d, 0x5140), high_cd = __byte_perm(c, d, 0x7362);
    to[0] = __byte_perm(low_ab, low_cd, 0x5410);
    to[1] = __byte_perm(low_ab, low_cd, 0x7632);
    to[2] = __byte_perm(high_ab, high_cd, 0x5410);
    to[3] = __byte_perm(high_ab, high_cd, 0x7632);
}

/* A thread's part of what mtt_scale records. Integers' maxima and sums do not depend on order. */
struct mtt__records {
    float largest;
    uint32_t clipped;
};

MTT__DEVICE void mtt__note(mtt__records &r, const float *v, float scale)
{
    float largest = 0;
    MTT__UNROLL for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(v[k]));
    r.largest = fmaxf(r.largest, largest);
    if (largest * scale > 448.0f)
        MTT__UNROLL for (int k = 0; k < 8; k++) r.clipped += fabsf(v[k]) * scale > 448.0f;
}

/* All lanes of a warp call this at the end. */
MTT__DEVICE void mtt__record_warp(const mtt__eight &e, mtt__records r)
{
#if !MTT__TURING
    if (!e.recorded) return;
    const uint32_t largest = __reduce_max_sync(0xffffffffu, __float_as_uint(r.largest));
    const uint32_t clipped = __reduce_add_sync(0xffffffffu, r.clipped);
    if (threadIdx.x % 32) return;
    if (largest > __ldcg(&e.scale->largest)) atomicMax(&e.scale->largest, largest);
    if (clipped) atomicAdd(&e.scale->clipped, clipped);
#endif
}

static mtt__eight mtt__eight_of(const mtt_tensor *t)
{
    mtt__eight e = {};
    if (t) e.data = t->data, e.scale = t->scale, e.recorded = t->recorded;
    return e;
}

/* What a product in 8 bits multiplies by; NULL = 1. */
static const float *mtt__inverse_of(const mtt_tensor *t)
{
    return t->scale ? &t->scale->inverse : NULL;
}

MTT__DEVICE bool mtt__wanted(const mtt__eight &e) { return e.data; }

/* Rounds 8 results of a kernel, and notes them for the scale of later steps. */
MTT__DEVICE void mtt__store_e4m3(const mtt__eight &y, int64_t at, const float *v, float scale,
                                 mtt__records &r)
{
    if (y.recorded) mtt__note(r, v, scale);
    *(uint2 *)((uint8_t *)y.data + at) = mtt__pack_eight<mtt__e4m3>(v, scale);
}

/* ---- operands of products ---- */

/* What mtt_k_quantize rounds. PLAIN: x. NORMED: the norm of x, recomputed from its statistics. ROTATED: x,
   with q and k rotated back. GELU_BACKWARD: the gradient of GELU's input, and GELU's result. GELU_BACKWARD +
   MLP: the same for that activation. */
enum { MTT__PLAIN, MTT__NORMED, MTT__ROTATED, MTT__GELU_BACKWARD };
static_assert(MTT_MLP_GELU == 0, "GELU_BACKWARD + MTT_MLP_GELU");

struct mtt__quantize {
    const __nv_bfloat16 *x, *dy, *gain, *shift;
    const float2 *stats;
    mtt__eight y, y_t, gelu_t; /* without data: not wanted. gelu_t: of the activation's result */
    int64_t rows, padded;      /* elements in a row of a transpose that are written, */
    int64_t pitch;             /* and from row to row */
    int width;
    mtt__rotary_operands<__nv_bfloat16> rotary; /* ROTATED: angles and heads */
};

/* A tile of 128 rows and 64 columns of codes, transposed: a column is 32 words of four codes. One word more
   between columns spreads a warp over the banks of shared memory. */
enum { MTT__TILE_ROWS = 128, MTT__TILE_COLUMNS = 64 };
typedef uint32_t mtt__transposed_tile[MTT__TILE_COLUMNS][MTT__TILE_ROWS / 4 + 1];

/* A thread's four rows of eight columns. Eight neighbours have all columns of the same rows. */
MTT__DEVICE void mtt__transpose_codes(mtt__transposed_tile &to, const uint2 codes[4])
{
    uint32_t words[8];
    mtt__turn(words, codes[0].x, codes[1].x, codes[2].x, codes[3].x);
    mtt__turn(words + 4, codes[0].y, codes[1].y, codes[2].y, codes[3].y);
    MTT__UNROLL for (int k = 0; k < 8; k++) to[threadIdx.x % 8 * 8 + k][threadIdx.x / 8] = words[k];
}

enum { MTT__HALVES_OF_1 = 0x3c003c00 }; /* two halves, each 1 */

/* Adds e5m2 codes on tensor cores. The 16 codes of lanes 4r to 4r + 3 are added to row r of c, in each column
   j whose lanes 4j to 4j + 3 pass MTT__HALVES_OF_1 as `ones`, and not 0. c[0..1] are row l/4, columns 2 (l%4)
   and the next. A byte of e5m2 is the upper byte of a half, and products with 1 are exact. Where some lanes
   pass 0, codes must be finite: infinity times 0 is NaN. */
MTT__DEVICE void mtt__sum_codes(float c[4], uint32_t word, uint32_t ones)
{
    const uint32_t halves[4] = {__byte_perm(word, 0, 0x1404), 0, __byte_perm(word, 0, 0x3424), 0};
    mtt__mma(c, halves, ones, ones, __half());
}

/* Rotates eight columns of a row of q and k back, and rounds them to BF16. If pairs lie half a head apart,
   the other half is read from memory: lines that this block reads anyway, or a block beside it if heads are
   wider than a tile. Seen from the second half of a head, the angles have the other sign. */
MTT__DEVICE void mtt__rotated_values(const mtt__quantize &o, int64_t row, int column, float *v)
{
    const int D = o.rotary.d_head, place = column % D;
    float angles[8], a[4], b[4];
    if (column >= o.rotary.turned * D) return;
    if (o.rotary.interleaved) {
        mtt__load_angles(o.rotary, (int)row, place / 8, angles);
        MTT__UNROLL for (int k = 0; k < 4; k++) a[k] = v[2 * k], b[k] = v[2 * k + 1];
        mtt__rotate_pairs(angles, -1.0f, a, b);
        MTT__UNROLL for (int k = 0; k < 4; k++) v[2 * k] = a[k], v[2 * k + 1] = b[k];
    } else
        MTT__UNROLL for (int g = 0; g < 8; g += 4) { /* half a head is a multiple of 4 */
            const int second = place + g >= D / 2, apart = second ? -D / 2 : D / 2;
            mtt__read_floats<4>(o.x + row * o.width + column + g + apart, b);
            mtt__load_angles(o.rotary, (int)row, (place + g) % (D / 2) / 4, angles);
            mtt__rotate_pairs(angles, second ? 1.0f : -1.0f, v + g, b);
        }
    MTT__UNROLL for (int k = 0; k < 8; k++) v[k] = mtt__to_float(mtt__from_float<__nv_bfloat16>(v[k]));
}

/* Computes eight values of a row: v, the values to round; u, the activation's result; up, the gradient of
   SwiGLU's second half. */
template <int KIND>
MTT__DEVICE void mtt__quantized_values(const mtt__quantize &o, int64_t row, int column,
                                       const mtt__vector<__nv_bfloat16> &x,
                                       const mtt__vector<__nv_bfloat16> &dy, float *v, float *u, float *up)
{
    typedef __nv_bfloat16 T;
    mtt__to_floats(x, v);
    if (KIND == MTT__NORMED) {
        const float2 stats = o.stats[row];
        float gain[8], shift[8] = {};
        mtt__read_floats(o.gain + column, gain);
        if (o.shift) mtt__read_floats(o.shift + column, shift);
        MTT__UNROLL for (int k = 0; k < 8; k++)
            v[k] = mtt__normalized<T>(v[k], stats) * gain[k] + shift[k];
    } else if (KIND == MTT__ROTATED) {
        mtt__rotated_values(o, row, column, v);
    } else if (KIND >= MTT__GELU_BACKWARD) {
        enum { MLP = KIND >= MTT__GELU_BACKWARD ? KIND - MTT__GELU_BACKWARD : MTT_MLP_GELU };
        float d[8];
        mtt__to_floats(dy, d);
        MTT__UNROLL for (int k = 0; k < 8; k++) {
            u[k] = mtt__activated<T, (mtt_mlp)MLP>(v[k], up[k]);
            mtt__activation_slopes<T, (mtt_mlp)MLP>(v[k], up[k], d[k]);
            v[k] = d[k];
        }
    }
}

/* A tile of mtt_k_quantize. */
template <int KIND, class Q> MTT__DEVICE void mtt__quantize_tile(const mtt__quantize &o, int tile)
{
    enum {
        COLUMNS = MTT__TILE_COLUMNS,
        WITH_DY = KIND >= MTT__GELU_BACKWARD,
        GATED = WITH_DY && mtt__is_gated((mtt_mlp)(KIND - MTT__GELU_BACKWARD)),
        TILES = 1 + WITH_DY + GATED
    };
    __shared__ mtt__transposed_tile turned[TILES];
    const int x_width = GATED ? 2 * o.width : o.width;
    const int tiles = (o.width + COLUMNS - 1) / COLUMNS, quad = threadIdx.x / 8;
    const int64_t row0 = (int64_t)(tile / tiles) * MTT__TILE_ROWS;
    const int column0 = tile % tiles * COLUMNS, column = column0 + threadIdx.x % 8 * 8;
    const float scale = mtt__scale_of(o.y_t.data ? o.y_t : o.y);
    const float gelu_scale = WITH_DY ? mtt__scale_of(o.gelu_t) : 1.0f;
    mtt__vector<__nv_bfloat16> xs[4] = {}, dys[4] = {}, ups[4] = {};
    mtt__records records = {};
    uint2 codes[4] = {}, more[4] = {}, of_up[4] = {};
    const auto inside = [&](int i) { return column < o.width && row0 + quad * 4 + i < o.rows; };
    /* load */
    MTT__UNROLL for (int i = 0; i < 4; i++) {
        const int64_t at = (row0 + quad * 4 + i) * o.width + column;
        const int64_t x_at = GATED ? (row0 + quad * 4 + i) * x_width + column : at;
        if (inside(i)) xs[i] = mtt__load_vector(o.x + x_at);
        if (WITH_DY && inside(i)) dys[i] = mtt__load_vector(o.dy + at);
        if (GATED && inside(i)) ups[i] = mtt__load_vector(o.x + x_at + o.width);
    }
    /* round, and store rows */
    MTT__UNROLL for (int i = 0; i < 4; i++) {
        const int64_t row = row0 + quad * 4 + i;
        float v[8], u[8], up[8];
        if (!inside(i)) continue;
        if (WITH_DY) mtt__to_floats(ups[i], up);
        mtt__quantized_values<KIND>(o, row, column, xs[i], dys[i], v, u, up);
        if (o.y.recorded || o.y_t.recorded) mtt__note(records, v, scale);
        codes[i] = mtt__pack_eight<Q>(v, scale);
        if (WITH_DY) more[i] = mtt__pack_eight<mtt__e4m3>(u, gelu_scale);
        if (o.y.data) *(uint2 *)((uint8_t *)o.y.data + row * x_width + column) = codes[i];
        if (!GATED) continue;
        of_up[i] = mtt__pack_eight<Q>(up, scale);
        *(uint2 *)((uint8_t *)o.y.data + row * x_width + o.width + column) = of_up[i];
    }
    mtt__record_warp(o.y.recorded ? o.y : o.y_t, records);
    if (!o.y_t.data) return;
    /* store columns */
    MTT__UNROLL for (int t = 0; t < TILES; t++)
        mtt__transpose_codes(turned[t], t == 0 ? codes : t == 1 ? more : of_up);
    __syncthreads(); /* the tile is there before its columns are stored */
    const int64_t at = row0 + threadIdx.x % 32 * 4;
    for (int j = threadIdx.x / 32; j < COLUMNS && column0 + j < o.width && at < o.padded; j += 8)
        MTT__UNROLL for (int t = 0; t < TILES; t++) {
            uint8_t *const to = (uint8_t *)(t == 1 ? o.gelu_t : o.y_t).data;
            const int64_t to_row = column0 + j + (t == 2 ? o.width : 0);
            if (t == 1 && !to) continue;
            *(uint32_t *)(to + to_row * o.pitch + at) = turned[t][j][threadIdx.x % 32];
        }
}

/* Math:        y = x, or a function of it, in 8 bits, and its transpose: PLAIN x; NORMED (x - mean) rstd gain
                + shift; ROTATED x, with heads below `turned` rotated by the negative angles and rounded to
                BF16; GELU_BACKWARD dy GELU'(x), and gelu_t the transpose of GELU(x) in e4m3; from there up
                the same for the other activations
   Shapes:      x, dy, y [rows, width], y_t, gelu_t [width, padded]; x, dy BF16, y and y_t type Q; angles [T,
                D] float. Gated: x and y have 2 width columns, y_t as many rows, gate before up
   Launch:      a block of 256 threads for a tile of 128 x 64; a thread has 8 columns of 4 rows
   Requires:    width and D multiples of 8; padded one of 16, less than 128 above rows
   Traffic:     x and dy read, what is wanted written: transposes in pieces of 128 bytes, by shared memory
   Determinism: elementwise; records a largest value and a count
   Reference:   mtt__cpu_quantize, mtt__rotary_backward_eight, mtt__cpu_activation_backward */
template <int KIND, class Q>
static __global__ void __launch_bounds__(256) mtt_k_quantize(const mtt__quantize o)
{
    mtt__quantize_tile<KIND, Q>(o, (int)blockIdx.x);
}

/* Matrices that one launch rounds, and the first tile of each. */
struct mtt__quantize_four {
    mtt__quantize matrix[4];
    int first[5];
};

/* Math:        y = x in e4m3, or y_t its transpose, of each of four matrices
   Shapes:      x [rows, width] BF16, y [rows, width] or y_t [width, rows]
   Launch:      a block of 256 threads for a tile of 128 x 64 of a matrix: four launches would take twice as
                long, since weights are small
   Requires:    width a multiple of 8; rows one of 16 for a transpose
   Traffic:     x read, y or y_t written
   Determinism: elementwise; records largest values and counts
   Reference:   mtt__cpu_quantize_weights */
static __global__ void __launch_bounds__(256, 4)
    mtt_k_quantize_four(const __grid_constant__ mtt__quantize_four o)
{
    int i = 0;
    while ((int)blockIdx.x >= o.first[i + 1]) i++;
    mtt__quantize_tile<MTT__PLAIN, mtt__e4m3>(o.matrix[i], (int)blockIdx.x - o.first[i]);
}

static int64_t mtt__quantize_tiles(const mtt__quantize &o)
{
    return mtt__ceil_div(o.rows, MTT__TILE_ROWS) * mtt__ceil_div(o.width, MTT__TILE_COLUMNS);
}

template <int KIND, class Q> static mtt_status mtt__launch_quantize(mtt__cuda *c, const mtt__quantize &o)
{
    return mtt__launch(c, "quantize", mtt_k_quantize<KIND, Q>, (unsigned)mtt__quantize_tiles(o), 256, o);
}

static mtt_status mtt__quantize_by(mtt__cuda *c, const mtt_op_quantize *o)
{
    mtt__quantize q = {};
    q.x = mtt__at<const __nv_bfloat16>(o->x);
    q.stats = mtt__at<const float2>(o->stats);
    q.gain = mtt__at<const __nv_bfloat16>(o->gain), q.shift = mtt__at<const __nv_bfloat16>(o->shift);
    q.y = mtt__eight_of(o->y), q.y_t = mtt__eight_of(o->y_t);
    q.rows = mtt__rows(o->x), q.width = (int)mtt__width(o->x);
    q.padded = q.pitch = o->y_t ? mtt__width(o->y_t) : 0;
    if (o->stats) return mtt__launch_quantize<MTT__NORMED, mtt__e4m3>(c, q);
    if ((o->y ? o->y : o->y_t)->dtype == MTT_F8_E4M3)
        return mtt__launch_quantize<MTT__PLAIN, mtt__e4m3>(c, q);
    return mtt__launch_quantize<MTT__PLAIN, mtt__e5m2>(c, q);
}

static mtt_status mtt__cuda_quantize(mtt__cuda *c, const mtt_op *op)
{
    return mtt__quantize_by(c, MTT_OPERANDS_OF(quantize, op));
}

static mtt_status mtt__eight_rotary_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_rotary_backward *o = MTT_OPERANDS_OF(rotary_backward, op);
    mtt__quantize q = {};
    q.rotary = mtt__rotary_of<__nv_bfloat16>(op, o->dy, NULL, NULL, NULL, o->angles, NULL);
    q.x = q.rotary.x, q.y = mtt__eight_of(o->dx), q.y_t = mtt__eight_of(o->dx_t);
    q.rows = q.rotary.rows, q.width = (int)mtt__width(o->dx), q.padded = q.pitch = mtt__width(o->dx_t);
    return mtt__launch_quantize<MTT__ROTATED, mtt__e5m2>(c, q);
}

static mtt_status mtt__cuda_quantize_weights(mtt__cuda *c, const mtt_op *op)
{
    mtt__quantize_four four = {};
    for (int i = 0; i < 4; i++) {
        mtt__quantize *q = &four.matrix[i];
        q->x = mtt__at<const __nv_bfloat16>(op->operands[i]);
        (op->operands[4 + i]->transposed ? q->y_t : q->y) = mtt__eight_of(op->operands[4 + i]);
        q->rows = mtt__rows(op->operands[i]), q->width = (int)mtt__width(op->operands[i]);
        q->padded = q->pitch = q->rows;
        four.first[i + 1] = four.first[i] + (int)mtt__quantize_tiles(*q);
    }
    return mtt__launch(c, "quantize", mtt_k_quantize_four, (unsigned)four.first[4], 256, four);
}

/* Math:        out[j] (+)= sum of row j over its first `count` elements, divided by x's scale
   Shapes:      x [rows, width] e5m2, out [rows] float
   Launch:      a block of 256 threads a row, all through the same turns, since the lanes of a warp add
                together. A thread loads four pieces of 16 bytes before it adds them: with fewer, longer
                blocks a narrow tensor would not occupy the device
   Requires:    width and count multiples of 16
   Traffic:     x read once
   Determinism: tensor cores add 64 elements of four threads; these sums in order; then a fixed tree
   Reference:   mtt__sum_columns */
static __global__ void __launch_bounds__(256)
    mtt_k_row_sums(const uint8_t *x, const mtt_scale *scale, float *out, int64_t count, int64_t width,
                   int add)
{
    enum { AHEAD = 4, PIECE = 256 * 16 };
    __shared__ float shared[32];
    const uint8_t *const row = x + blockIdx.x * width, *const end = row + count;
    float sum = 0; /* the four threads of 64 elements have the same */
    for (const uint8_t *first = row; first < end; first += AHEAD * PIECE) {
        const uint8_t *const at = first + threadIdx.x * 16;
        uint4 v[AHEAD];
        MTT__UNROLL for (int i = 0; i < AHEAD; i++)
            v[i] = at + i * PIECE < end ? *(const uint4 *)(at + i * PIECE) : make_uint4(0, 0, 0, 0);
        MTT__UNROLL for (int i = 0; i < AHEAD; i++) {
            float c[4] = {};
            mtt__sum_codes(c, v[i].x, MTT__HALVES_OF_1);
            mtt__sum_codes(c, v[i].y, MTT__HALVES_OF_1);
            mtt__sum_codes(c, v[i].z, MTT__HALVES_OF_1);
            mtt__sum_codes(c, v[i].w, MTT__HALVES_OF_1);
            sum += c[0];
        }
    }
    sum = mtt__reduce<mtt__plus, 256>(threadIdx.x % 4 ? 0.0f : sum, shared);
    if (threadIdx.x) return;
    out += blockIdx.x;
    *out = sum * (scale ? scale->inverse : 1.0f) + (add ? *out : 0.0f);
}

static mtt_status mtt__launch_row_sums(mtt__cuda *c, const mtt_tensor *x, int64_t count,
                                       const mtt_tensor *sums, int add)
{
    return mtt__launch(c, "row_sums", mtt_k_row_sums, (unsigned)mtt__rows(x), 256,
                       mtt__at<const uint8_t>(x), (const mtt_scale *)x->scale, mtt__at<float>(sums), count,
                       mtt__width(x), add);
}

/* Math:        mtt__rescale of every scale; counters.clipped = what all of them clipped
   Shapes:      scales [count]
   Launch:      one block of 256 threads
   Requires:    -
   Traffic:     scales read and written
   Determinism: a sum of integers
   Reference:   mtt__cpu_rescale */
static __global__ void __launch_bounds__(256)
    mtt_k_rescale(mtt_scale *scales, int64_t count, mtt_counters *counters)
{
    __shared__ unsigned long long shared[32];
    unsigned long long clipped = 0;
    for (int64_t i = threadIdx.x; i < count; i += 256)
        clipped += mtt__rescale(&scales[i], counters->skipped);
    clipped = mtt__reduce<mtt__plus, 256>(clipped, shared);
    if (threadIdx.x == 0) counters->clipped = (int64_t)clipped;
}

static mtt_status mtt__cuda_rescale(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_rescale *o = MTT_OPERANDS_OF(rescale, op);
    return mtt__launch(c, "rescale", mtt_k_rescale, 1, 256, mtt__at<mtt_scale>(o->scales),
                       o->scales->shape[0],
                       mtt__at<mtt_counters>(o->counters));
}

/* Math:        mtt__scale_logits
   Shapes:      one scale
   Launch:      one thread
   Requires:    -
   Traffic:     -
   Determinism: one value
   Reference:   mtt__cpu_chunked_loss */
static __global__ void mtt_k_scale_logits(mtt_scale *scale, const mtt_control *control,
                                          const mtt_counters *counters)
{
    mtt__scale_logits(scale, control, counters);
}

/* ---- operations of the lesson with results in 8 bits ---- */

/* Math:        y = GELU(x), max(x, 0)^2, silu(x), or silu(x) up, in e4m3
   Shapes:      x [rows, F] or [rows, 2 F] BF16, y [rows, F]
   Launch:      256 threads, PACKS packs of 8 elements each
   Requires:    F a multiple of 8; fewer than 2^32 packs
   Traffic:     x read, y written
   Determinism: elementwise; records a largest value and a count
   Reference:   mtt__cpu_activation */
template <mtt_mlp MLP, int PACKS>
static __global__ void __launch_bounds__(256)
    mtt_k_activation_eight(const __grid_constant__ mtt__activation_operands<__nv_bfloat16> o,
                           const __grid_constant__ mtt__eight y)
{
    const float scale = mtt__scale_of(y);
    mtt__records records = {};
    mtt__activation_packs<MLP, PACKS>(
        o, [&](int64_t at, const float *v) { mtt__store_e4m3(y, at, v, scale, records); });
    mtt__record_warp(y, records);
}

static mtt_status mtt__launch_activation_eight(mtt__cuda *c, mtt_mlp mlp, const mtt_tensor *x,
                                               const mtt_tensor *y)
{
    return mtt__by_mlp(c, mlp, [&](auto constant) {
        constexpr mtt_mlp MLP = decltype(constant)::value;
        constexpr int PACKS = MLP == MTT_MLP_GELU ? 4 : 2;
        const auto o = mtt__activation_at<__nv_bfloat16>(x, NULL, y, NULL);
        return mtt__launch(c, "activation", mtt_k_activation_eight<MLP, PACKS>,
                           mtt__blocks(o.count, 256 * PACKS), 256, o, mtt__eight_of(y));
    });
}

static mtt_status mtt__eight_activation(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_activation *o = MTT_OPERANDS_OF(activation, op);
    return mtt__launch_activation_eight(c, op->shape->mlp, o->x, o->y);
}

static mtt_status mtt__eight_linear_gelu(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_linear_gelu *o = MTT_OPERANDS_OF(linear_gelu, op);
    mtt_status status = mtt__multiply_rows(c, op, o->x, o->weight, 0, o->bias, o->pre);
    return status == MTT_OK ? mtt__launch_activation_eight(c, MTT_MLP_GELU, o->pre, o->y) : status;
}

/* Math:        y = (x - mean) rstd w + b in e4m3, with rstd and a branch as in mtt_k_norm. Without b,
                RMSNorm: the mean is 0
   Shapes:      x, branch, joined [rows, C], w, b [C] BF16; y [rows, C]; stats [rows] (mean, rstd) float
   Launch:      THREADS threads a row, at least 128 a block
   Requires:    C a multiple of 8, at most 8 THREADS PACKS; joined may be x or branch
   Traffic:     x and branch read once, joined and y written once; w and b stay in cache
   Determinism: fixed tree; records a largest value and a count
   Reference:   mtt__cpu_norm, mtt__cpu_masked_sum */
template <int THREADS, int PACKS>
static __global__ void __launch_bounds__(MTT__NORM_BOUNDS(__nv_bfloat16, THREADS, PACKS))
    mtt_k_norm_eight(const __grid_constant__ mtt__norm_forward<__nv_bfloat16> o,
                     const __grid_constant__ mtt__eight y)
{
    const float scale = mtt__scale_of(y);
    mtt__records records = {};
    mtt__norm_row<THREADS, PACKS>(
        o, [&](int64_t at, const float *v) { mtt__store_e4m3(y, at, v, scale, records); });
    mtt__record_warp(y, records);
}

static mtt_status mtt__launch_norm_eight(mtt__cuda *c, const mtt__norm_forward<__nv_bfloat16> &o,
                                         const mtt_tensor *y)
{
    return mtt__by_norm_shape(c, o.rows, o.width, [&](auto threads, auto packs) {
        enum { THREADS = decltype(threads)::value, PACKS = decltype(packs)::value };
        return mtt__launch(c, "norm", mtt_k_norm_eight<THREADS, PACKS>, mtt__norm_blocks(o.rows, THREADS),
                           THREADS < 128 ? 128 : THREADS, o, mtt__eight_of(y));
    });
}

static mtt_status mtt__eight_norm(mtt__cuda *c, const mtt_op *op)
{
    return mtt__launch_norm_eight(c, mtt__norm_of<__nv_bfloat16>(op), MTT_OPERANDS_OF(norm, op)->y);
}

static mtt_status mtt__eight_residual_norm(mtt__cuda *c, const mtt_op *op)
{
    const mtt_tensor *y = MTT_OPERANDS_OF(residual_norm, op)->y;
    return mtt__launch_norm_eight(c, mtt__residual_norm_of<__nv_bfloat16>(op), y);
}

/* Rows of a tile of norm_backward. In a transpose they are 32 bytes, which memory moves at once. */
enum { MTT__NORM_TILE = 32 };

/* The block of norm_backward with results in 8 bits. It has one stage, since codes take 64 bytes a column.
   Where warps share a row, it has a processor to itself, which lets its threads have more than 128
   registers. So it has on sm_120, whose compiler would spill 20 bytes. Its 99 KB hold two blocks of widths up
   to 448, and one up to 896, the widest that it takes there. */
template <int ROW_THREADS, bool OF_RMS>
struct mtt__norm_block_eight : mtt__norm_block<__nv_bfloat16, ROW_THREADS, 256, OF_RMS> {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
    enum { AT_ONCE = 1, STAGES = 1 };
#else
    enum { AT_ONCE = ROW_THREADS ? 2 : 1, STAGES = 1 };
#endif
};

/* The results of norm_backward in 8 bits. */
struct mtt__norm_results {
    const __nv_bfloat16 *b;     /* NULL: RMSNorm */
    mtt__eight dx_8, dx_t, y_t; /* without data: not wanted */
};

/* Transposes the codes of a tile, those of dx and then those of y. A thread has 16 rows of 4 columns at a
   time, its neighbour the other 16, so that together they write 32 bytes of a row. Padding becomes zeros. */
template <class S>
MTT__DEVICE void mtt__turn_tile(const mtt__norm_operands<__nv_bfloat16> &o,
                                const mtt__norm_results &e, const uint8_t *codes, int64_t row0)
{
    const int64_t pitch = (o.rows + 15) & ~15;
    for (int i = threadIdx.x; i < o.width; i += S::SIZE) {
        const int of_y = i >= o.width / 2, part = of_y ? i - o.width / 2 : i, column = part / 2 * 4;
        const int64_t row = row0 + part % 2 * 16;
        const uint8_t *from = codes + (of_y * MTT__NORM_TILE + part % 2 * 16) * o.width + column;
        uint8_t *to = (uint8_t *)(of_y ? e.y_t : e.dx_t).data;
        uint32_t turned[4][4];
        if (!to || row >= o.rows) continue;
        MTT__UNROLL for (int quad = 0; quad < 4; quad++) {
            uint32_t words[4];
            MTT__UNROLL for (int k = 0; k < 4; k++, from += o.width)
                words[k] = row + quad * 4 + k < o.rows ? *(const uint32_t *)from : 0;
            mtt__turn(turned[quad], words[0], words[1], words[2], words[3]);
        }
        MTT__UNROLL for (int k = 0; k < 4; k++)
            *(uint4 *)(to + (column + k) * pitch + row) =
                make_uint4(turned[0][k], turned[1][k], turned[2][k], turned[3][k]);
    }
}

/* More for mtt_k_norm_backward: dx_8 = dx, as stored, in e5m2, dx_t its transpose, y_t that of xhat w + b in
   e4m3. dx_8 is [rows, C]; dx_t and y_t are [C, rows in whole 16]. C is a multiple of 16, x is not dx. A tile
   of MTT__NORM_TILE rows has its codes in shared memory; their transposes take two barriers. */
template <class S> struct mtt__norm_rounding {
    const mtt__norm_operands<__nv_bfloat16> &o;
    const mtt__norm_results &e;
    uint8_t *codes;
    float y_scale;

    MTT__MEMBER void each(int64_t row, int column, const mtt__vector<__nv_bfloat16> &dx, const float *xhat,
                          const float *gain) const
    {
        uint8_t *const to = codes + (row & (MTT__NORM_TILE - 1)) * o.width + column;
        float v[8];
        if (e.dx_t.data) {
            mtt__to_floats(dx, v);
            const uint2 rounded = mtt__pack_eight<mtt__e5m2>(v, 1.0f);
            *(uint2 *)((uint8_t *)e.dx_8.data + row * o.width + column) = *(uint2 *)to = rounded;
        }
        if (e.y_t.data) {
            float shift[8] = {};
            if (!S::RMS) mtt__read_floats(e.b + column, shift);
            MTT__UNROLL for (int k = 0; k < 8; k++) v[k] = xhat[k] * gain[k] + shift[k];
            *(uint2 *)(to + MTT__NORM_TILE * o.width) = mtt__pack_eight<mtt__e4m3>(v, y_scale);
        }
    }

    MTT__MEMBER void after_rows(int64_t next) const
    {
        if (next & (MTT__NORM_TILE - 1)) return;
        __syncthreads(); /* the tile's codes are there before they are transposed */
        mtt__turn_tile<S>(o, e, codes, next - MTT__NORM_TILE);
        __syncthreads(); /* all have read them before the next tile's */
    }
};

template <class S> struct mtt__norm_more {
    enum { WHOLE_TILES = 1 };
    mtt__norm_results results;
    MTT__MEMBER mtt__norm_rounding<S> begin(const mtt__norm_operands<__nv_bfloat16> &o, uint8_t *codes) const
    {
        return {o, results, codes, mtt__scale_of(results.y_t)};
    }
};

/* Shared memory of a stage, and of the codes of a tile of dx and of y. */
template <class S> static size_t mtt__norm_shared_eight(int64_t width)
{
    return mtt__norm_shared<S>(width, S::STAGES) + (size_t)width * 2 * MTT__NORM_TILE;
}

/* Whether the kernel makes the 8-bit results: their codes must fit the shared memory. An H200's takes widths
   of up to 3,040, one of 99 KB up to 896. quantize makes those of other norms. */
static bool mtt__norm_rounds(const mtt__cuda *c, int64_t width)
{
    typedef mtt__norm_block_eight<0, false> S;
    return mtt__norm_threads(width) <= S::SIZE &&
           mtt__norm_shared_eight<S>(width) + 1024 <= (size_t)c->shared_bytes;
}

template <class S> static mtt_status mtt__norm_backward_eight(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_norm_backward *n = MTT_OPERANDS_OF(norm_backward, op);
    const mtt__norm_results e = {mtt__at<__nv_bfloat16>(n->shift), mtt__eight_of(n->dx_8),
                                 mtt__eight_of(n->dx_t), mtt__eight_of(n->y_t)};
    void *scratch;
    mtt_status status = mtt__scratch(c, op, mtt__op_scratch(op), &scratch);
    if (status != MTT_OK) return status;
    const auto o = mtt__norm_backward_of<__nv_bfloat16>(op, scratch, MTT__NORM_TILE);
    return mtt__norm_backward_by<S>(c, op, mtt_k_norm_backward<S, mtt__norm_more<S>, S::AT_ONCE>,
                                    mtt__norm_shared_eight<S>(o.width), o, mtt__norm_more<S>{e});
}

static mtt_status mtt__eight_norm_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_norm_backward *o = MTT_OPERANDS_OF(norm_backward, op);
    const mtt_op_quantize dx = {o->dx, NULL, NULL, NULL, o->dx_8, o->dx_t};
    const mtt_op_quantize y = {o->x, o->stats, o->gain, o->shift, NULL, o->y_t};
    const bool layer = op->shape->norm == MTT_NORM_LAYER, warp = mtt__norm_threads(mtt__width(o->dy)) == 32;
    if (mtt__norm_rounds(c, mtt__width(o->dy))) {
        if (warp && layer) return mtt__norm_backward_eight<mtt__norm_block_eight<32, false>>(c, op);
        if (warp) return mtt__norm_backward_eight<mtt__norm_block_eight<32, true>>(c, op);
        if (layer) return mtt__norm_backward_eight<mtt__norm_block_eight<0, false>>(c, op);
        return mtt__norm_backward_eight<mtt__norm_block_eight<0, true>>(c, op);
    }
    mtt_status status = mtt__norm_backward_tiles(c, op, MTT__NORM_TILE);
    if (status == MTT_OK && o->dx_t) status = mtt__quantize_by(c, &dx);
    if (status == MTT_OK && o->y_t) status = mtt__quantize_by(c, &y);
    return status;
}

/* The gradient of an activation, and its result again, both transposed. */
static mtt_status mtt__activation_backward_eight(mtt__cuda *c, mtt_mlp mlp, const mtt_tensor *dy,
                                                 const mtt_tensor *x, const mtt_tensor *dx,
                                                 const mtt_tensor *dx_t, const mtt_tensor *y_t)
{
    mtt__quantize q = {};
    q.x = mtt__at<const __nv_bfloat16>(x), q.dy = mtt__at<const __nv_bfloat16>(dy);
    q.y = mtt__eight_of(dx), q.y_t = mtt__eight_of(dx_t), q.gelu_t = mtt__eight_of(y_t);
    q.rows = mtt__rows(dy), q.width = (int)mtt__width(dy), q.padded = q.pitch = mtt__width(dx_t);
    return mtt__by_mlp(c, mlp, [&](auto constant) {
        return mtt__launch_quantize<MTT__GELU_BACKWARD + decltype(constant)::value, mtt__e5m2>(c, q);
    });
}

static mtt_status mtt__eight_activation_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_activation_backward *o = MTT_OPERANDS_OF(activation_backward, op);
    return mtt__activation_backward_eight(c, op->shape->mlp, o->dy, o->x, o->dx, o->dx_t, o->y_t);
}

/* dW (+)= x^T dy, or dy^T x for a transposed weight, from transposes: over `rows` of their columns, those of
   x_t from `first` up. */
static mtt_status mtt__weight_gradient_eight(mtt__cuda *c, const mtt_op *op, const mtt_tensor *x_t,
                                             int64_t first, const mtt_tensor *dy_t, int64_t rows,
                                             const mtt_tensor *dw, int add)
{
    const mtt_tensor *a = dw->transposed ? dy_t : x_t, *b = dw->transposed ? x_t : dy_t;
    mtt__blas_product g = {mtt__rows(a), mtt__rows(b), rows, mtt__blas_whole(a, 0), mtt__blas_whole(b, 1),
                           mtt__blas_whole(dw, 0), NULL, add};
    (dw->transposed ? g.b : g.a).data = (const char *)x_t->data + first;
    return mtt__multiply(c, op, g);
}

static mtt_status mtt__eight_linear_backward_weight(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_linear_backward_weight *o = MTT_OPERANDS_OF(linear_backward_weight, op);
    const int64_t rows = mtt__width(o->dy);
    mtt_status status = o->d_bias ? mtt__launch_row_sums(c, o->dy, rows, o->d_bias, 0) : MTT_OK;
    if (status != MTT_OK || !o->d_weight) return status;
    return mtt__weight_gradient_eight(c, op, o->x, 0, o->dy, rows, o->d_weight, 0);
}

/* dx = (dy W^T) GELU'(pre). Nothing holds all of dy W^T: slabs of rows pass through the upper half of the
   workspace. */
static mtt_status mtt__eight_linear_backward_gelu(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_linear_backward_gelu *o = MTT_OPERANDS_OF(linear_backward_gelu, op);
    const int64_t n = mtt__width(o->dx), rows = mtt__rows(o->dx), k = mtt__width(o->dy);
    const size_t half = op->workspace->bytes / 512 * 256;
    const int64_t slab = (int64_t)half / (2 * n) / 128 * 128;
    mtt_tensor workspace = *op->workspace, d_gelu = *o->pre;
    mtt_op part = *op;
    void *scratch;
    mtt_status status = mtt__scratch(c, op, mtt__op_scratch(op), &scratch);
    workspace.bytes = half;
    d_gelu.data = (char *)scratch + half;
    part.workspace = &workspace;
    for (int64_t first = 0; first < rows && status == MTT_OK; first += slab) {
        const int64_t count = mtt__min(slab, rows - first);
        mtt__blas_product g = {count, n, k, mtt__blas_matrix_at(o->dy, first * k, k, 0, 0),
                               mtt__blas_whole(o->weight, !o->weight->transposed),
                               mtt__blas_whole(&d_gelu, 0), NULL};
        mtt__quantize q = {};
        q.x = mtt__at<const __nv_bfloat16>(o->pre) + first * n, q.dy = mtt__at<const __nv_bfloat16>(&d_gelu);
        q.y = mtt__eight_of(o->dx), q.y_t = mtt__eight_of(o->dx_t), q.gelu_t = mtt__eight_of(o->y_t);
        q.y.data = (char *)q.y.data + first * n;
        q.y_t.data = (char *)q.y_t.data + first;
        if (q.gelu_t.data) q.gelu_t.data = (char *)q.gelu_t.data + first;
        q.rows = count, q.width = (int)n, q.pitch = mtt__width(o->dx_t), q.padded = q.pitch - first;
        status = mtt__multiply(c, &part, g);
        if (status == MTT_OK) status = mtt__launch_quantize<MTT__GELU_BACKWARD, mtt__e5m2>(c, q);
    }
    return status;
}

/* ---- the loss ---- */

/* Arguments of mtt_k_logit_gradients. */
struct mtt__logit_gradients {
    const __nv_bfloat16 *logits;
    const int32_t *targets;
    const float *losses;
    const mtt_control *control;
    const mtt_counters *counters;
    uint8_t *y, *y_t;
    const mtt_scale *scale;
    float *sums; /* NULL = not wanted */
    uint64_t stream;
    int first; /* rows of the micro-batch before these */
    int rows, slice, width, classes, pitch; /* slice: rows of it, whole tiles */
};

/* mtt__to_e5m2_by of four values: a byte of e5m2 is the upper one of a half. */
MTT__DEVICE uint32_t mtt__pack_four_by(const float *v, uint32_t bytes)
{
    const __half2 low = __floats2half2_rn(v[0], v[2]), high = __floats2half2_rn(v[1], v[3]);
    const uint32_t even = *(const uint32_t *)&low + (bytes & 0x00ff00ffu);
    const uint32_t odd = *(const uint32_t *)&high + (bytes >> 8 & 0x00ff00ffu);
    return __byte_perm(even, odd, 0x7351);
}

/* The gradients of eight logits of a row, rounded by random bytes. `target` is counted from the first of
   them; `counted` has 0xff for each logit that counts; loss is {lse - x[target], -, lse}. Gradients are at
   most 32768 (mtt__scale_logits). */
MTT__DEVICE uint2 mtt__logit_codes(const mtt__vector<__nv_bfloat16> &logits, int target, const float *loss,
                                   float factor, uint2 counted, uint2 bytes)
{
    const float lse = loss[2];
    float v[8];
    mtt__to_floats(logits, v);
    MTT__UNROLL for (int k = 0; k < 8; k++) v[k] = mtt__exp_from<__nv_bfloat16>(v[k], lse, factor);
    if ((unsigned)target < 8) {
        const float gradient = (expf(-loss[0]) - 1.0f) * factor;
        MTT__UNROLL for (int k = 0; k < 8; k++) v[k] = k == target ? gradient : v[k];
    }
    const uint32_t lost = lse - lse == 0 ? 0 : 0x7f7f7f7fu; /* a byte more could make -0 of NaN's code */
    return make_uint2((mtt__pack_four_by(v, bytes.x) | lost) & counted.x,
                      (mtt__pack_four_by(v + 4, bytes.y) | lost) & counted.y);
}

/* Math:        y = the gradient of mtt_k_cross_entropy, times a scale, rounded to e5m2 by the bytes of
                mtt__logits_draw; y_t its transpose; sums = the sums of y's columns over each slice of rows,
                divided by the scale
   Shapes:      logits [rows, width] BF16; targets [rows] int32; losses [rows, 3] float; y [rows, width]; y_t
                [width, pitch]; sums [slices, width] float
   Launch:      grid (width / 64, slices), 256 threads. A block does the tiles of a slice, 128 x 64, one after
                the other; a thread has 8 columns of 4 rows. Beyond the last row it computes that row again,
                and stores zeros in y_t
   Requires:    width a multiple of 64; pitch of 16, at least rows
   Traffic:     logits read, y and y_t written, the latter in pieces of 128 bytes, by shared memory
   Determinism: elementwise; tensor cores add 16 codes of a column; then tiles in order; then eight sums by a
                tree
   Reference:   mtt__cpu_cross_entropy_backward, mtt__sum_columns */
static __global__ void __launch_bounds__(256, 4) mtt_k_logit_gradients(const mtt__logit_gradients o)
{
    __shared__ mtt__transposed_tile turned;
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 8;
    const int column0 = blockIdx.x * MTT__TILE_COLUMNS, column = column0 + threadIdx.x % 8 * 8;
    const int classes = min(max(o.classes - column, 0), 8);
    const uint64_t bytes = classes ? ~0ull >> (64 - 8 * classes) : 0;
    const float factor = mtt__loss_factor(o.control, o.counters) * o.scale->scale;
    const uint64_t stream = o.stream | mtt__stream_step(o.control->micro_batch);
    float2 sum = make_float2(0, 0); /* of two of the warp's columns, from `first` */
    const int begin = blockIdx.y * o.slice, end = min(begin + o.slice, o.rows);
    uint8_t *to = o.y_t + (int64_t)(column0 + first) * o.pitch + begin + lane * 4;
    for (int row0 = begin; row0 < end; row0 += MTT__TILE_ROWS, to += MTT__TILE_ROWS) {
        mtt__vector<__nv_bfloat16> logits[4];
        uint2 codes[4];
        mtt_draw draw;
        float c[4] = {};
        MTT__UNROLL for (int i = 0; i < 4; i++) {
            const int row = min(row0 + (int)threadIdx.x / 8 * 4 + i, o.rows - 1);
            logits[i] = mtt__load_vector(o.logits + (int64_t)row * o.width + column);
        }
        MTT__UNROLL for (int i = 0; i < 4; i++) {
            const int row = row0 + (int)threadIdx.x / 8 * 4 + i, from = min(row, o.rows - 1);
            const int target = row < o.rows ? o.targets[from] : -1;
            const uint2 counted = target < 0 ? make_uint2(0, 0) : make_uint2((uint32_t)bytes, bytes >> 32);
            if (i % 2 == 0)
                draw = mtt__logits_draw(o.control->seed, stream, o.first + row, column, o.width);
            codes[i] = mtt__logit_codes(logits[i], target - column, o.losses + 3 * from, factor, counted,
                                        make_uint2(draw.word[i % 2 * 2], draw.word[i % 2 * 2 + 1]));
            if (row < o.rows) *(uint2 *)(o.y + (int64_t)row * o.width + column) = codes[i];
        }
        mtt__transpose_codes(turned, codes);
        __syncthreads(); /* the tile is there before its columns are stored */
        MTT__UNROLL for (int i = 0; i < 8; i++) {
            const uint32_t word = turned[first + i][lane];
            if (row0 + lane * 4 < o.pitch) *(uint32_t *)(to + i * o.pitch) = word;
            if (o.sums) mtt__sum_codes(c, word, lane / 4 == i ? MTT__HALVES_OF_1 : 0);
        }
        sum.x += c[0];
        sum.y += c[1];
        __syncthreads(); /* all have read the tile before the next one */
    }
    MTT__UNROLL for (int step = 4; step < 32; step *= 2) {
        sum.x += __shfl_xor_sync(0xffffffffu, sum.x, step);
        sum.y += __shfl_xor_sync(0xffffffffu, sum.y, step);
    }
    if (!o.sums || lane >= 4) return;
    const float inverse = o.scale->inverse;
    *(float2 *)(o.sums + (int64_t)blockIdx.y * o.width + column0 + first + lane * 2) =
        make_float2(sum.x * inverse, sum.y * inverse);
}

/* Makes gradients of the rows' logits in both orders, and that of the head's bias if it has one. Slices of at
   least two tiles, whose sums the workspace holds, make enough blocks to occupy the device several times. */
static mtt_status mtt__rows_gradient_eight(mtt__cuda *c, const mtt_op *op, const mtt__loss_rows &r,
                                           int64_t first, int add)
{
    const mtt_op_chunked_loss *o = MTT_OPERANDS_OF(chunked_loss, op);
    const int64_t width = mtt__width(o->logits), tiles = mtt__ceil_div(r.rows, MTT__TILE_ROWS);
    const int64_t columns = width / MTT__TILE_COLUMNS;
    int64_t slices = mtt__min(mtt__ceil_div(tiles, 2), mtt__ceil_div(64 * c->processors, columns)), slice;
    void *scratch = NULL;
    mtt_status status = o->d_bias ? mtt__scratch(c, op, mtt__op_scratch(op), &scratch) : MTT_OK;
    if (status != MTT_OK) return status;
    if (o->d_bias) slices = mtt__min(slices, (int64_t)(op->workspace->bytes / mtt__op_scratch(op)));
    slice = mtt__ceil_div(tiles, slices) * MTT__TILE_ROWS;
    mtt__logit_gradients g = {mtt__at<const __nv_bfloat16>(o->logits), r.targets, r.losses,
                              mtt__at<const mtt_control>(r.control), mtt__at<const mtt_counters>(r.counters),
                              mtt__at<uint8_t>(o->d_logits), mtt__at<uint8_t>(o->d_logits_t),
                              o->d_logits->scale, (float *)scratch, mtt__op_stream(op), (int)first,
                              (int)r.rows, (int)slice, (int)width, op->shape->vocab,
                              (int)mtt__width(o->d_logits_t)};
    slices = mtt__ceil_div(r.rows, slice);
    const dim3 grid((unsigned)columns, (unsigned)slices);
    status = mtt__launch(c, "logit_gradients", mtt_k_logit_gradients, grid, 256, g);
    if (status != MTT_OK || !o->d_bias) return status;
    return mtt__sum_slices<float>(c, scratch, slices, width, 1, slices, mtt__at<float>(o->d_bias), add);
}

/* A chunk's logits are in 16 bits, their gradients beside them in 8, in both orders. */
static mtt_status mtt__chunk_in_eight(mtt__cuda *c, const mtt_op *op, const mtt__loss_rows &r, int64_t first)
{
    const mtt_op_chunked_loss *o = MTT_OPERANDS_OF(chunked_loss, op);
    const int64_t C = mtt__width(o->x), Vp = mtt__width(o->logits);
    const int add = first > 0;
    mtt_status status = mtt__rows_loss(c, op, r);
    if (status == MTT_OK) status = mtt__rows_gradient_eight(c, op, r, first, add);
    if (status != MTT_OK) return status;
    mtt__blas_product back = {r.rows, C, Vp, mtt__blas_whole(o->d_logits, 0),
                              mtt__blas_whole(o->weight_t, !o->weight_t->transposed),
                              mtt__blas_matrix_at(o->dx, first * C, C, 0, 0)};
    status = mtt__multiply(c, op, back);
    if (status != MTT_OK || !o->d_weight) return status;
    return mtt__weight_gradient_eight(c, op, o->x_t, first, o->d_logits_t, mtt__round_up(r.rows, 16),
                                      o->d_weight, add);
}

static mtt_status mtt__eight_chunked_loss(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_chunked_loss *o = MTT_OPERANDS_OF(chunked_loss, op);
    mtt_status status = MTT_OK;
    if (o->dx)
        status = mtt__launch(c, "scale_logits", mtt_k_scale_logits, 1, 1, o->d_logits->scale,
                             mtt__at<const mtt_control>(o->control),
                             mtt__at<const mtt_counters>(o->counters));
    return status == MTT_OK ? mtt__chunked_loss_by(c, op, mtt__chunk_in_eight) : status;
}

/* ---- which operations run here ---- */

#define MTT__IS_E4M3(name, operand) (MTT_OPERANDS_OF(name, op)->operand->dtype == MTT_F8_E4M3)

/* The function of this room that runs an operation of the lesson with 8 bits; NULL = none. */
static mtt__function mtt__eight_function(const mtt_op *op)
{
    switch (op->kind) {
    case MTT_OP_activation: return MTT__IS_E4M3(activation, y) ? mtt__eight_activation : NULL;
    case MTT_OP_norm: return MTT__IS_E4M3(norm, y) ? mtt__eight_norm : NULL;
    case MTT_OP_residual_norm: return MTT__IS_E4M3(residual_norm, y) ? mtt__eight_residual_norm : NULL;
    case MTT_OP_chunked_loss: return MTT__IS_E4M3(chunked_loss, x) ? mtt__eight_chunked_loss : NULL;
    case MTT_OP_linear_gelu: {
        const mtt_tensor *y = MTT_OPERANDS_OF(linear_gelu, op)->y;
        return y && y->dtype == MTT_F8_E4M3 ? mtt__eight_linear_gelu : NULL;
    }
    case MTT_OP_norm_backward: {
        const mtt_op_norm_backward *o = MTT_OPERANDS_OF(norm_backward, op);
        return o->dx_t || o->y_t ? mtt__eight_norm_backward : NULL;
    }
    case MTT_OP_rotary_backward:
        return MTT_OPERANDS_OF(rotary_backward, op)->dx_t ? mtt__eight_rotary_backward : NULL;
    case MTT_OP_activation_backward:
        return MTT_OPERANDS_OF(activation_backward, op)->dx_t ? mtt__eight_activation_backward : NULL;
    case MTT_OP_linear_backward_gelu:
        return MTT_OPERANDS_OF(linear_backward_gelu, op)->dx_t ? mtt__eight_linear_backward_gelu : NULL;
    case MTT_OP_linear_backward_weight: {
        const mtt_dtype dtype = MTT_OPERANDS_OF(linear_backward_weight, op)->dy->dtype;
        return dtype == MTT_F8_E5M2 ? mtt__eight_linear_backward_weight : NULL;
    }
    default: return NULL;
    }
}

#undef MTT__IS_E4M3

#else /* what fast kernels ask of 8 bits: nothing is wanted */
struct mtt__eight {};
struct mtt__records {};
MTT__DEVICE bool mtt__wanted(const mtt__eight &) { return false; }
MTT__DEVICE float mtt__scale_of(const mtt__eight &) { return 1.0f; }
MTT__DEVICE void mtt__store_e4m3(const mtt__eight &, int64_t, const float *, float, mtt__records &) {}
MTT__DEVICE void mtt__record_warp(const mtt__eight &, mtt__records) {}
static mtt__eight mtt__eight_of(const mtt_tensor *) { return {}; }
static mtt__function mtt__eight_function(const mtt_op *) { return NULL; }
#endif /* MTT_NO_FP8 */

/* ----------------------------------------------------------------------------------------------------------
   >>tensor cores   FlashAttention for 16-bit tensors, by mma.sync
   -------------------------------------------------------------------------------------------------------- */

struct mtt__tiled_flash : mtt__flash {
    mtt__eight out_8; /* `out` in e4m3; without data: not wanted */
    uint8_t *d_qkv_t; /* the transpose of d_qkv, [row of the view, B T], both in e5m2; or NULL */
    int64_t tokens;   /* B T */
    int share;        /* heads that a block takes in the backward pass, one by one: all members, or one */
    int group;        /* heads, or in the backward pass heads / share, whose tiles run side by side */
    /* the backward pass */
    float4 *dq_partial; /* a ring of `slots` heads of numbered dQ sums, in the order of the accumulators */
    float4 *members_partial; /* numbered sums of dK and dV of the heads so far that share the keys */
    struct mtt__backward_block *blocks; /* the work of each block of the launch */
    int *ticket;        /* key tiles given out */
    int slots;
};

/* ---- one instruction each ---- */

/* Four 8 x 8 matrices of 16-bit elements from shared memory. Lane l points to row l % 8 of matrix l / 8, and
   gets two elements of each: row l / 4, columns 2 (l % 4) and the next. Transposed: of the matrices'
   transposes. */
MTT__DEVICE void mtt__load_matrices(uint32_t r[4], uint32_t from_smem)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from_smem) : "memory");
}

MTT__DEVICE void mtt__load_transposed(uint32_t r[4], uint32_t from_smem)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from_smem) : "memory");
}

/* An opaque register: the compiler cannot see where its value comes from. It then neither recomputes the
   value at each use nor hoists work on it out of a loop. These kernels use almost all registers; opaque
   values decide what is held in one and what is computed where it is used. */
MTT__DEVICE uint32_t mtt__opaque(uint32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* A shuffle from lane 0 shows the compiler that a value is the same for the warp, so branches on it do not
   diverge. */
MTT__DEVICE int mtt__uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

/* What the draws of a micro-batch share. Uniform registers hold it, and all round keys of the generator. */
struct mtt__random {
    uint64_t seed, stream;
};

MTT__DEVICE mtt__random mtt__random_of(const mtt__dropout &d)
{
    const auto uniform = [](uint64_t x) {
        return (uint64_t)(uint32_t)mtt__uniform((int)(x >> 32)) << 32 | (uint32_t)mtt__uniform((int)x);
    };
    return {uniform(d.control->seed), uniform(mtt__stream_of(d))};
}

/* The random bytes of 16 elements from `element`, and from every `step` elements more. Elements that do not
   start at a multiple of 16 take the end of one draw and the beginning of the next. The others almost always
   have counters of 32 bits, which saves products. */
template <int COUNT>
MTT__DEVICE void mtt__draw_rows(mtt_draw (&draws)[COUNT], const mtt__random &random, uint64_t element,
                                uint64_t step)
{
    const auto draw = [&](uint64_t index) {
        return mtt__dropout_draw(random.seed, index, random.stream, 8);
    };
    if (((element | step) & 15) == 0 && (element + COUNT * step) >> 36 == 0) {
        MTT__UNROLL for (int k = 0; k < COUNT; k++) draws[k] = draw((uint32_t)((element + k * step) / 16));
        return;
    }
    MTT__UNROLL for (int k = 0; k < COUNT; k++) {
        const uint64_t at = element + k * step;
        const mtt_draw first = draw(at / 16), next = draw(at / 16 + 1);
        uint32_t w[8];
        MTT__UNROLL for (int i = 0; i < 4; i++) w[i] = first.word[i], w[4 + i] = next.word[i];
        MTT__UNROLL for (int i = 0; i < 6; i++) w[i] = at & 8 ? w[i + 2] : w[i];
        MTT__UNROLL for (int i = 0; i < 5; i++) w[i] = at & 4 ? w[i + 1] : w[i];
        MTT__UNROLL for (int i = 0; i < 4; i++)
            draws[k].word[i] = __funnelshift_r(w[i], w[i + 1], ((uint32_t)at & 3) * 8);
    }
}

/* Which of 16 elements are kept: bit w + 8 j says so of element 4 w + j, whose random number is byte j of
   word w. Bytes are compared four at a time. */
MTT__DEVICE uint32_t mtt__keep_mask(const mtt_draw &draw, uint32_t threshold)
{
    const uint32_t low = (threshold & 127) * 0x01010101u, either = (threshold >> 7) - 1;
    uint32_t mask = 0;
    MTT__UNROLL for (int w = 0; w < 4; w++) {
        /* the upper bit of each byte: the lower bits reach those of the threshold */
        const uint32_t x = draw.word[w], reaches = (x | 0x80808080u) - low;
        mask |= ((x & reaches) | ((x | reaches) & either)) >> (7 - w) & 0x01010101u << w;
    }
    return mask;
}

/* The reverse of mtt__load_matrices: left[h] and right[h] are rows l/4 + 8 h of the left and the right 8
   columns. Compute capability 8 has no such instruction: lanes learn the addresses of their rows by
   shuffles. */
MTT__DEVICE void mtt__store_matrices(uint32_t to_smem, const uint32_t left[2], const uint32_t right[2])
{
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(to_smem), "r"(left[0]), "r"(left[1]), "r"(right[0]), "r"(right[1]) : "memory");
#else
    const uint32_t r[4] = {left[0], left[1], right[0], right[1]}, lane = mtt__opaque(threadIdx.x) & 31;
    MTT__UNROLL for (int k = 0; k < 4; k++) {
        const uint32_t row_smem = __shfl_sync(0xffffffffu, to_smem, k * 8 + lane / 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(row_smem + (lane & 3) * 4), "r"(r[k]) : "memory");
    }
#endif
}

/* Transposes an 8 x 8 matrix: lane l has elements l % 4 * 2 and the next of row l/4, then of column l/4. */
MTT__DEVICE uint32_t mtt__transpose_matrix(uint32_t pair)
{
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
    return pair;
}

MTT__DEVICE uint32_t mtt__pack_pair(float x, float y, __nv_bfloat16)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *(const uint32_t *)&pair;
}

#ifndef MTT_NO_FP16
MTT__DEVICE uint32_t mtt__pack_pair(float x, float y, __half)
{
    __half2 pair = __floats2half2_rn(x, y);
    return *(const uint32_t *)&pair;
}
#endif

/* Two 16-bit numbers. */
MTT__DEVICE float2 mtt__unpack_pair(uint32_t bits, __nv_bfloat16)
{
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

#ifndef MTT_NO_FP16
MTT__DEVICE float2 mtt__unpack_pair(uint32_t bits, __half) { return __half22float2(*(const __half2 *)&bits); }
#endif

/* ---- tensor cores: tiles in shared memory ---- */

/* A row of WIDTH 16-bit elements is WIDTH / 8 chunks of 16 bytes. Chunk c lies at c ^ swizzle(row), so that
   the same chunk of 8 rows, which one matrix of an ldmatrix reads, spreads over all 32 banks. Rows 8 apart
   have the same swizzle. */
template <int WIDTH> MTT__DEVICE int mtt__swizzle(int row)
{
    return WIDTH % 64 == 0 ? row & 7 : (row >> 1) & 3;
}

template <int WIDTH> MTT__DEVICE uint32_t mtt__chunk(int row, int chunk)
{
    return (uint32_t)(row * WIDTH * 2 + ((chunk ^ mtt__swizzle<WIDTH>(row)) << 4));
}

/* From the address of chunk 0 or 1 of a row to the one `chunk` (even) further: an XOR and a constant, so that
   one register serves all columns. Tiles start at multiples of 128 bytes. */
template <int WIDTH> MTT__DEVICE uint32_t mtt__advance(uint32_t smem, int chunk)
{
    constexpr int SWIZZLED = WIDTH % 64 == 0 ? 7 : 3;
    return (smem ^ (uint32_t)((chunk & SWIZZLED) << 4)) + (uint32_t)((chunk & ~SWIZZLED) << 4);
}

/* The lane's ldmatrix address of the first 16 x 16 elements of a tile; mtt__advance goes to further columns,
   8 rows are 16 WIDTH bytes. lane_a: A stored by rows or, transposed, B stored by rows of k. lane_b: B stored
   by columns or, transposed, A stored by rows of k; r[0..1] and r[2..3] are then two B's. */
template <int WIDTH> MTT__DEVICE uint32_t mtt__lane_a(int lane)
{
    return mtt__chunk<WIDTH>(lane & 15, lane >> 4);
}

template <int WIDTH> MTT__DEVICE uint32_t mtt__lane_b(int lane)
{
    return mtt__chunk<WIDTH>((lane & 7) + (lane >> 4 << 3), (lane >> 3) & 1);
}

/* Chunk n of part `part` of SPAN chunks: two steps where their bits do not meet, so that the first is
   shared. */
template <int WIDTH, int SPAN> MTT__DEVICE uint32_t mtt__part_column(uint32_t smem, int part, int n)
{
    if (SPAN & (SPAN - 1)) return mtt__advance<WIDTH>(smem, part * SPAN + n);
    return mtt__advance<WIDTH>(mtt__advance<WIDTH>(smem, part * SPAN), n);
}

/* C += A B over 16 of k: load_a(a, k, m) loads 16 x 16 of A, load_b(b, k, n) columns n and n + 1 of B, 8
   each. */
template <typename E, int M, int N, typename LoadA, typename LoadB>
MTT__DEVICE void mtt__mma_step(float (&c)[M][N][4], LoadA load_a, LoadB load_b, int k)
{
    uint32_t a[M][4], b[4];
    MTT__UNROLL for (int m = 0; m < M; m++) load_a(a[m], k, m);
    MTT__UNROLL for (int n = 0; n < N; n += 2) {
        load_b(b, k, n);
        MTT__UNROLL for (int m = 0; m < M; m++) {
            mtt__mma(c[m][n], a[m], b[0], b[1], E());
            mtt__mma(c[m][n + 1], a[m], b[2], b[3], E());
        }
    }
}

template <typename E, int STEPS, int M, int N, typename LoadA, typename LoadB>
MTT__DEVICE void mtt__mma_steps(float (&c)[M][N][4], LoadA load_a, LoadB load_b)
{
    MTT__UNROLL for (int k = 0; k < STEPS; k++) mtt__mma_step<E>(c, load_a, load_b, k);
}

/* Steps begin to end alone, in a loop of their own: a test in each step of the unrolled loop would keep the
   loads of the next step behind it. */
template <typename E, int STEPS, int M, int N, typename LoadA, typename LoadB>
MTT__DEVICE void mtt__mma_part(float (&c)[M][N][4], LoadA load_a, LoadB load_b, int begin, int end)
{
    if (begin == 0 && end >= STEPS) {
        mtt__mma_steps<E, STEPS>(c, load_a, load_b);
        return;
    }
#pragma unroll 1
    for (int k = begin; k < end && k < STEPS; k++) mtt__mma_step<E>(c, load_a, load_b, k);
}

/* Loaders of operands for these, from the lane's address in a tile of WIDTH columns; `offset` in bytes comes
   after the swizzle. A stored by rows, B by columns; A and B stored by rows of k. */
template <int WIDTH> MTT__DEVICE auto mtt__a_rows(uint32_t lane, int offset = 0)
{
    return [=](uint32_t *a, int k, int m) {
        mtt__load_matrices(a, mtt__advance<WIDTH>(lane, k * 2) + m * 16 * WIDTH * 2 + offset);
    };
}

template <int WIDTH> MTT__DEVICE auto mtt__b_columns(uint32_t lane, int offset = 0)
{
    return [=](uint32_t *b, int k, int n) {
        mtt__load_matrices(b, mtt__advance<WIDTH>(lane, k * 2) + n * 8 * WIDTH * 2 + offset);
    };
}

template <int WIDTH> MTT__DEVICE auto mtt__a_of_k(uint32_t lane)
{
    return [=](uint32_t *a, int k, int m) {
        mtt__load_transposed(a, mtt__advance<WIDTH>(lane, m * 2) + k * 16 * WIDTH * 2);
    };
}

/* Loads one of SPAN parts of the columns of B, number `part`. */
template <int WIDTH, int SPAN = 1> MTT__DEVICE auto mtt__b_of_k(uint32_t lane, int offset = 0, int part = 0)
{
    return [=](uint32_t *b, int k, int n) {
        mtt__load_transposed(b, mtt__part_column<WIDTH, SPAN>(lane, part, n) + k * 16 * WIDTH * 2 + offset);
    };
}

/* ROWS rows of d_head elements, `stride` apart, to a tile of WIDTH columns; zeros past `rows_left` and
   d_head. A thread copies the chunk of its lane in every STEP-th row. `thread` is its number. */
template <int ROWS, int WIDTH, int THREADS, typename E>
MTT__DEVICE void mtt__copy_tile(uint32_t tile_smem, const E *from_gmem, int stride, int rows_left,
                                int d_head, uint32_t thread)
{
    constexpr int LANES = WIDTH == 96 ? 16 : WIDTH / 8, STEP = THREADS / LANES;
    static_assert(ROWS % STEP == 0, "every thread copies the same number of rows");
    const int row = thread / LANES, chunk = thread % LANES, left = chunk * 8 < d_head ? rows_left - row : 0;
    const char *at_gmem =
        (const char *)from_gmem + (uint32_t)(row * stride * 2) + mtt__opaque(thread % LANES * 16);
    const uint32_t step = (uint32_t)(STEP * stride * 2);
    if (LANES * 8 > WIDTH && chunk * 8 >= WIDTH) return;
    MTT__UNROLL for (int k = 0; k < ROWS; k += STEP, at_gmem += step)
        mtt__copy_async(tile_smem + mtt__chunk<WIDTH>(row + k, chunk), at_gmem, k < left);
}

/* Transposes 4 x 4 words across the 4 lanes of a quad: lane q ends with word q of each lane. */
MTT__DEVICE void mtt__transpose_quad(uint32_t v[4], int q)
{
    const bool odd = q & 1, high = q & 2;
    MTT__UNROLL for (int k = 0; k < 4; k += 2) {
        uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? v[k] : v[k + 1], 1);
        if (odd) v[k] = got;
        else v[k + 1] = got;
    }
    MTT__UNROLL for (int k = 0; k < 2; k++) {
        uint32_t got = __shfl_xor_sync(0xffffffffu, high ? v[k] : v[k + 2], 2);
        if (high) v[k] = got;
        else v[k + 2] = got;
    }
}

/* For rows that are only stored. */
struct mtt__no_more {
    __device__ void operator()(const uint32_t *, int) {}
};

/* One row of accumulators, COLUMNS / 8 products side by side, times `factor`, to 16-bit memory. `half`: 0 =
   row l/4, 1 = row l/4 + 8; `quad`: the lane within its quad. A lane stores 16 bytes where 32 columns fill a
   quad, and passes them to `more` with the first one's column. All lanes of the warp call it. */
template <typename E, int COLUMNS, class More = mtt__no_more>
MTT__DEVICE void mtt__store_row(E *row_gmem, const float (*c)[4], int half, float factor, bool valid,
                                int columns_left, int quad, More more = More())
{
    MTT__UNROLL for (int n = 0; n < COLUMNS / 8; n += 4) {
        if (n + 4 <= COLUMNS / 8) {
            uint32_t v[4];
            MTT__UNROLL for (int k = 0; k < 4; k++)
                v[k] = mtt__pack_pair(c[n + k][half * 2] * factor, c[n + k][half * 2 + 1] * factor, E());
            mtt__transpose_quad(v, quad);
            if (valid && (n + quad) * 8 < columns_left) {
                *(uint4 *)(row_gmem + (n + quad) * 8) = make_uint4(v[0], v[1], v[2], v[3]);
                more(v, (n + quad) * 8);
            }
        } else {
            MTT__UNROLL for (int k = 0; n + k < COLUMNS / 8; k++)
                if (valid && (n + k) * 8 < columns_left)
                    *(uint32_t *)(row_gmem + (n + k) * 8 + quad * 2) =
                        mtt__pack_pair(c[n + k][half * 2] * factor, c[n + k][half * 2 + 1] * factor, E());
        }
    }
}

#ifndef MTT_NO_FP8
/* 16 rows of accumulators, times `factor`, rounded to BF16 and then to e5m2: as they are, and transposed.
   Where 32 columns fill a quad, a lane stores 8 bytes of each of its two rows and 16 of a column. All lanes
   of the warp call it. */
template <int COLUMNS>
MTT__DEVICE void mtt__store_eight(uint8_t *rows_gmem, int64_t stride, uint8_t *columns_gmem, int64_t pitch,
                                  const float (*c)[4], float factor, int columns_left, int lane)
{
    typedef __nv_bfloat16 E;
    static_assert(COLUMNS % 16 == 0, "eight values are rounded at once");
    MTT__UNROLL for (int n = 0; n < COLUMNS / 8; n += 4) {
        const int column = (n + (lane & 3)) * 8;
        uint32_t a[4] = {}, b[4] = {};
        MTT__UNROLL for (int k = 0; k < 4 && n + k < COLUMNS / 8; k += 2) {
            float2 v[4];
            MTT__UNROLL for (int h = 0; h < 4; h++) {
                const float *const two = c[n + k + h / 2] + h % 2 * 2;
                v[h] = mtt__unpack_pair(mtt__pack_pair(two[0] * factor, two[1] * factor, E()), E());
            }
            const uint2 codes = mtt__pack_eight<mtt__e5m2>(&v[0].x, 1.0f);
            a[k] = codes.x, a[k + 1] = codes.y;
            MTT__UNROLL for (int h = k; h < k + 2; h++) /* pairs of rows 8 apart */
                b[h] = mtt__transpose_matrix(__byte_perm(a[h], 0, 0x3120));
        }
        mtt__transpose_quad(a, lane & 3);
        mtt__transpose_quad(b, lane & 3);
        if (column < COLUMNS && column < columns_left) {
            uint8_t *const to = rows_gmem + lane / 4 * stride + column;
            *(uint2 *)to = make_uint2(__byte_perm(a[0], a[1], 0x5410), __byte_perm(a[2], a[3], 0x5410));
            *(uint2 *)(to + 8 * stride) =
                make_uint2(__byte_perm(a[0], a[1], 0x7632), __byte_perm(a[2], a[3], 0x7632));
            *(uint4 *)(columns_gmem + (column + lane / 4) * pitch) =
                make_uint4(__byte_perm(b[0], b[1], 0x6420), __byte_perm(b[2], b[3], 0x6420),
                           __byte_perm(b[0], b[1], 0x7531), __byte_perm(b[2], b[3], 0x7531));
        }
    }
}
#endif

/* ---- tensor cores: forward ---- */

/* A head: its number, its first row of B T, its first columns of Q and O, and of K. It is in shared memory,
   because accumulators take all registers. */
struct mtt__flash_head {
    int head, first_row, column, key_column;
};

MTT__DEVICE void mtt__flash_head_set(mtt__flash_head &h, const mtt__tiled_flash &f, int head)
{
    h.head = head;
    h.first_row = head / f.view.heads * (int)f.seq_len;
    h.column = (int)mtt_qkv_column(&f.view, MTT__PART_Q, head % f.view.heads);
    h.key_column = (int)mtt_qkv_column(&f.view, MTT__PART_K, head % f.view.heads);
}

/* First element of a row of a head, in `out` or in the Q of qkv, whose rows are `stride` elements. */
MTT__DEVICE int64_t mtt__flash_row(const mtt__flash_head &h, int row, int stride)
{
    return (int64_t)(h.first_row + row) * stride + h.column;
}

/* The same in the K of qkv. */
MTT__DEVICE int64_t mtt__key_row(const mtt__flash_head &h, int row, int stride)
{
    return (int64_t)(h.first_row + row) * stride + h.key_column;
}

/* Whether code for this architecture never runs the kernel, so that its body is left out: it is for devices
   with less shared memory, or with more; the >>hopper room has one in its place; Turing has no BF16. */
template <class S> static __device__ constexpr bool mtt__replaced(int stages)
{
#if MTT__TURING
    return S::SHARED > 64 << 10 || !std::is_same<typename S::E, __half>::value;
#elif MTT__HOPPER
    return S::FOR_TURING || stages == 1 || S::D == 64 || S::D == 128;
#else
    return S::FOR_TURING;
#endif
}

/* Blocks that a processor with so many bytes of shared memory holds: as many as fit, or as registers suffice
   for, and one where none fits. A block takes 1 KiB more than it asks for. */
template <class S> __host__ __device__ constexpr int mtt__blocks_that_fit(int processor_bytes)
{
    const int fit = processor_bytes / (S::SHARED + 1024);
    return fit < 1 ? 1 : fit < S::MIN_BLOCKS ? fit : S::MIN_BLOCKS;
}

/* -inf for scores of keys that the query does not attend. `apart`: the query of the first score minus its
   key. A further row of accumulators adds `row_sign` to it (1: rows are queries, columns keys; -1: the
   reverse), a further column the opposite. */
template <int M, int N>
MTT__DEVICE void mtt__flash_mask(float (&s)[M][N][4], int apart, int row_sign, int window)
{
    const int beyond = window ? apart - window : -(1 << 30);
    MTT__UNROLL for (int m = 0; m < M; m++)
        MTT__UNROLL for (int n = 0; n < N; n++)
            MTT__UNROLL for (int e = 0; e < 4; e++) {
                const int more = row_sign * (m * 16 + (e >> 1) * 8 - n * 8 - (e & 1));
                if (apart < -more || beyond >= -more) s[m][n][e] = -CUDART_INF_F;
            }
}

/* The sizes of mtt_k_flash_forward. A warp owns ROWS rows, so the softmax needs no other warp. A kernel
   without DROPOUT may have larger tiles: keep masks take registers. ONLY_TURING: others have larger tiles. */
template <typename ELEMENT, int WIDTH, int QUERY_TILE, int KEY_TILE, int QUERY_ROW_TILES, bool Q_HELD,
          int BLOCKS_AT_LEAST, bool WITH_DROPOUT, bool ONLY_TURING = false>
struct mtt__forward_sizes {
    typedef ELEMENT E;
    static constexpr int D = WIDTH, BLOCK_Q = QUERY_TILE, BLOCK_KV = KEY_TILE, ROW_TILES = QUERY_ROW_TILES;
    static constexpr int MIN_BLOCKS = BLOCKS_AT_LEAST, ROWS = 16 * ROW_TILES, THREADS = BLOCK_Q / ROWS * 32;
    static constexpr int KEY_TILES = BLOCK_KV / 8;
    static constexpr bool Q_IN_REGISTERS = Q_HELD, DROPOUT = WITH_DROPOUT, FOR_TURING = ONLY_TURING;
    static constexpr int KEEPS = (ROWS * BLOCK_KV + 1023) / 1024; /* a lane's registers of keep masks */
    typedef float scores[ROW_TILES][KEY_TILES][4], outputs[ROW_TILES][D / 8][4], rows[ROW_TILES][2];
    /* shared memory: Q, two stages of K and V; mtt__forward_block, in the place of a Q held in registers */
    static constexpr int Q_BYTES = BLOCK_Q * D * 2, KV_BYTES = BLOCK_KV * D * 2;
    static constexpr int TILES = Q_BYTES + 4 * KV_BYTES, BLOCK_AT = Q_IN_REGISTERS ? 0 : TILES;
    static constexpr int SHARED = TILES + (Q_IN_REGISTERS ? 0 : 64);
    static_assert(!Q_HELD || MIN_BLOCKS * (SHARED + 1024) <= 164 << 10, "the blocks fit an A100");
};

/* A block's work, in shared memory. */
struct mtt__forward_block {
    mtt__flash_head head;
    int first_key; /* of the first tile of keys that one of the block's queries attends */
};

/* K and V of BLOCK_KV keys from k0, to a stage. */
template <class S>
MTT__DEVICE void mtt__forward_copy(const mtt__tiled_flash &f, const mtt__flash_head &h, int k0,
                                   uint32_t stage_smem)
{
    const int stride = (int)f.view.row, left = (int)f.seq_len - k0, D = f.view.d_head;
    const typename S::E *k_gmem = (const typename S::E *)f.qkv + mtt__key_row(h, k0, stride);
    const typename S::E *v_gmem = k_gmem + (int64_t)f.view.heads_kv * f.view.d_head;
    mtt__copy_tile<S::BLOCK_KV, S::D, S::THREADS>(stage_smem, k_gmem, stride, left, D, threadIdx.x);
    mtt__copy_tile<S::BLOCK_KV, S::D, S::THREADS>(stage_smem + S::KV_BYTES, v_gmem, stride, left, D,
                                                  threadIdx.x);
    mtt__copy_commit();
}

/* Raises the rows' maxima. A row keeps its maximum, and O and the sum are not rescaled, until a score exceeds
   it by SLACK in the exponent of 2: P then stays below 2^8, and a rescale is rare. The final division uses
   the same maximum, so the result is exact. */
template <class S>
MTT__DEVICE void mtt__forward_rescale(typename S::rows &row_max, typename S::rows &row_sum,
                                      typename S::outputs &o, const typename S::scores &s, float scale_log2)
{
    constexpr float SLACK = 8.0f;
    typename S::rows most;
    bool exceeds = false;
    MTT__UNROLL for (int m = 0; m < S::ROW_TILES; m++)
        MTT__UNROLL for (int h = 0; h < 2; h++) {
            most[m][h] = -CUDART_INF_F;
            MTT__UNROLL for (int n = 0; n < S::KEY_TILES; n++)
                most[m][h] = fmaxf(most[m][h], fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            exceeds |= (most[m][h] - row_max[m][h]) * scale_log2 > SLACK;
        }
    if (!__any_sync(0xffffffffu, exceeds)) return;
    MTT__UNROLL for (int m = 0; m < S::ROW_TILES; m++)
        MTT__UNROLL for (int h = 0; h < 2; h++) {
            float most_now = most[m][h], rescale;
            most_now = fmaxf(most_now, __shfl_xor_sync(0xffffffffu, most_now, 1));
            most_now = fmaxf(most_now, __shfl_xor_sync(0xffffffffu, most_now, 2));
            most_now = fmaxf(most_now, row_max[m][h]);
            /* a row without a key so far keeps -inf, and its P and O stay 0 */
            rescale = mtt__exp2((row_max[m][h] - (most_now == -CUDART_INF_F ? 0.0f : most_now)) * scale_log2);
            row_max[m][h] = most_now;
            row_sum[m][h] *= rescale;
            MTT__UNROLL for (int n = 0; n < S::D / 8; n++) {
                o[m][n][2 * h] *= rescale;
                o[m][n][2 * h + 1] *= rescale;
            }
        }
}

/* P in place of scores, and its sums. */
template <int M, int N>
MTT__DEVICE void mtt__forward_softmax(float (&s)[M][N][4], float (&row_sum)[M][2],
                                      const float (&row_max)[M][2], float scale_log2)
{
    MTT__UNROLL for (int m = 0; m < M; m++)
        MTT__UNROLL for (int h = 0; h < 2; h++) {
            const float base = row_max[m][h] == -CUDART_INF_F ? 0.0f : row_max[m][h] * scale_log2;
            MTT__UNROLL for (int n = 0; n < N; n++)
                MTT__UNROLL for (int e = 2 * h; e < 2 * h + 2; e++) {
                    s[m][n][e] = mtt__exp2(fmaf(s[m][n][e], scale_log2, -base));
                    row_sum[m][h] += s[m][n][e];
                }
        }
}

/* Draws the dropout masks of a tile, before the scores need the registers. A draw covers 16 keys of a row.
   The four lanes of a quad divide its 2 ROW_TILES rows and the BLOCKS of 16 keys among them: lane q has block
   q % BLOCKS and every SHARERS-th row. Each word of `keep` holds the masks of two of its rows. */
template <class S>
MTT__DEVICE void mtt__forward_keep(uint32_t (&keep)[S::KEEPS], const mtt__tiled_flash &f,
                                   const mtt__random &random, int head, int row0, int k0)
{
    constexpr int BLOCKS = S::BLOCK_KV / 16, SHARERS = 4 / BLOCKS;
    constexpr int DRAWS = 2 * S::ROW_TILES / SHARERS > 1 ? 2 : 1; /* in one of `keep` */
    const int lane = mtt__opaque(threadIdx.x) & 31, q = lane & 3;
    const int64_t row = (int64_t)head * f.seq_len + row0 + q / BLOCKS * 8 + lane / 4;
    MTT__UNROLL for (int n = 0; n < S::KEEPS; n++) {
        keep[n] = 0xffffffffu;
        if (f.dropout.threshold) {
            const int64_t at = (row + n * 2 * SHARERS * 8) * f.seq_len + k0 + q % BLOCKS * 16;
            mtt_draw draws[DRAWS];
            mtt__draw_rows(draws, random, (uint64_t)at, (uint64_t)(SHARERS * 8 * f.seq_len));
            keep[n] = 0;
            MTT__UNROLL for (int r = 0; r < DRAWS; r++)
                keep[n] |= mtt__keep_mask(draws[r], f.dropout.threshold) << 4 * r;
        }
        keep[n] = mtt__opaque(keep[n]);
    }
}

template <int M, int N, int KEEPS>
MTT__DEVICE void mtt__forward_drop(float (&p)[M][N][4], const uint32_t (&keep)[KEEPS])
{
    constexpr int BLOCKS = N / 2, SHARERS = 4 / BLOCKS;
    const int lane = threadIdx.x & 31, shift = (lane & 1) * 16 + (lane >> 1 & 1);
    MTT__UNROLL for (int b = 0; b < BLOCKS; b++) {
        uint32_t bits[SHARERS];
        MTT__UNROLL for (int r = 0; r < 2 * M; r++) {
            const int draw = r / SHARERS, sharer = r % SHARERS, from = (lane & 28) | (sharer * BLOCKS + b);
            if (draw % 2 == 0) bits[sharer] = __shfl_sync(0xffffffffu, keep[draw / 2], from) >> shift;
            MTT__UNROLL for (int k = 0; k < 4; k++) {
                const bool kept = bits[sharer] >> (draw % 2 * 4 + k / 2 * 2 + k % 2 * 8) & 1u;
                if (!kept) p[r / 2][b * 2 + k / 2][r % 2 * 2 + k % 2] = 0.0f;
            }
        }
    }
}

/* O of the warp's rows from row0, and lse. O in 8 bits is rounded from O in BF16. */
template <class S>
MTT__DEVICE void mtt__forward_store(const mtt__tiled_flash &f, const mtt__flash_head &head, int row0,
                                    const typename S::outputs &o, const typename S::rows &row_max,
                                    const typename S::rows &row_sum)
{
    typedef typename S::E E;
    const int row = row0 + threadIdx.x % 32 / 4, width = (int)f.width;
    const int64_t at = mtt__flash_row(head, row, width);
    const bool in_eight = std::is_same<E, __nv_bfloat16>::value && mtt__wanted(f.out_8);
    const float scale = in_eight ? mtt__scale_of(f.out_8) : 1.0f;
    mtt__records records = {};
    float *lse_gmem = f.lse + (int64_t)head.head * f.seq_len + row;
    MTT__UNROLL for (int m = 0; m < S::ROW_TILES; m++)
        MTT__UNROLL for (int h = 0; h < 2; h++) {
            const int further = m * 16 + h * 8;
            const bool valid = row + further < (int)f.seq_len;
            float sum = row_sum[m][h];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            const int64_t row_at = at + (int64_t)further * width;
            const auto round_more = [&](const uint32_t *pairs, int column) {
                float2 v[4];
                MTT__UNROLL for (int k = 0; k < 4; k++) v[k] = mtt__unpack_pair(pairs[k], E());
                if (in_eight) mtt__store_e4m3(f.out_8, row_at + column, &v[0].x, scale, records);
            };
            mtt__store_row<E, S::D>((E *)f.out + row_at, o[m], h, f.dropout.scale / sum, valid,
                                    f.view.d_head, threadIdx.x & 3, round_more);
            if (threadIdx.x % 4 == 0 && valid) lse_gmem[further] = row_max[m][h] * f.scale + logf(sum);
        }
    if (in_eight) mtt__record_warp(f.out_8, records);
}

/* The block's place: blocks of a group of heads, whose K and V stay in L2, run side by side; the last
   queries, which attend the most keys, come first. */
struct mtt__forward_place {
    int head, q0;
};

template <class S> MTT__DEVICE mtt__forward_place mtt__forward_place_of(const mtt__tiled_flash &f)
{
    const int tiles = ((int)f.seq_len + S::BLOCK_Q - 1) / S::BLOCK_Q, per_group = f.group * tiles;
    const int first_head = (int)(blockIdx.x / per_group) * f.group, in_group = (int)(blockIdx.x % per_group);
    const int group = min(f.group, f.head_count - first_head);
    mtt__forward_place place;
    place.head = first_head + in_group % group;
    place.q0 = (tiles - 1 - in_group / group) * S::BLOCK_Q;
    return place;
}

/* Math:        O = softmax(scale Q K^T) V tile by tile, with a running maximum and sum of each row; lse
   Shapes:      qkv [B T, row of the view] and out [B T, C] of 16-bit E, lse [B H, T] FP32, out_8 as out;
                S::D >= D
   Launch:      a block of BLOCK_Q / ROWS warps a tile of queries and head. Shared memory: Q, two stages of K
                and V
   Requires:    D % 8 == 0, 16-byte aligned tensors; no dropout unless S::DROPOUT; out_8 only beside BF16
   Traffic:     reads Q, K, V and writes O, lse once from device memory while a group's K and V fit L2; 4 D
                FLOP a pair of query and key
   Determinism: one block makes a row, in one order; records a largest value and a count
   Reference:   mtt_k_flash_forward_exact. A row's maximum is raised as FlashAttention-4 does */
template <class S>
static __global__ void __launch_bounds__(S::THREADS, mtt__blocks_that_fit<S>(MTT__PROCESSOR_KB << 10))
    mtt_k_flash_forward(const mtt__tiled_flash f)
{
    if (mtt__replaced<S>(2)) return;
    typedef typename S::E E;
    constexpr int D = S::D, ROWS = S::ROWS, BLOCK_KV = S::BLOCK_KV;
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t q_smem = mtt__smem(shared), kv_smem = q_smem + S::Q_BYTES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, T = (int)f.seq_len, stride = (int)f.view.row;
    const mtt__forward_place place = mtt__forward_place_of<S>(f);
    const int q0 = place.q0, row0 = q0 + warp * ROWS;
    const int last_key = (min(q0 + S::BLOCK_Q, T) - 1) / BLOCK_KV * BLOCK_KV;
    mtt__forward_block &block = *(mtt__forward_block *)(shared + S::BLOCK_AT);
    mtt__flash_head head;
    mtt__flash_head_set(head, f, place.head);
    const E *q_gmem = (const E *)f.qkv + mtt__flash_row(head, q0, stride);
    typename S::outputs o_rmem = {};
    typename S::rows row_max, row_sum = {};
    uint32_t q_rmem[D / 16][S::ROW_TILES][4];
    MTT__UNROLL for (int m = 0; m < S::ROW_TILES; m++) row_max[m][0] = row_max[m][1] = -CUDART_INF_F;
    mtt__random random = {};
    if (S::DROPOUT && f.dropout.threshold) random = mtt__random_of(f.dropout);

    mtt__copy_tile<S::BLOCK_Q, D, S::THREADS>(q_smem, q_gmem, stride, T - q0, f.view.d_head, threadIdx.x);
    mtt__forward_copy<S>(f, head, last_key, kv_smem);
    if (S::Q_IN_REGISTERS) {
        const uint32_t q_lane = q_smem + mtt__lane_a<D>(lane) + warp * ROWS * D * 2;
        mtt__copy_wait();
        __syncthreads(); /* Q is in shared memory */
        MTT__UNROLL for (int k = 0; k < D / 16; k++)
            MTT__UNROLL for (int m = 0; m < S::ROW_TILES; m++)
                mtt__load_matrices(q_rmem[k][m], mtt__advance<D>(q_lane, k * 2) + m * 16 * D * 2);
    }
    __syncwarp(); /* the warp has read its rows of Q, which the block's work may replace */
    if (threadIdx.x == 0) {
        block.head = head;
        block.first_key = f.window ? max(0, q0 - f.window + 1) / BLOCK_KV * BLOCK_KV : 0;
    }
    __syncthreads(); /* the block's work is known to all */
    for (int k0 = last_key, stage = 0; k0 >= block.first_key; k0 -= BLOCK_KV, stage ^= 1) {
        const uint32_t at = stage * 2 * S::KV_BYTES;
        mtt__copy_wait();
        __syncthreads(); /* this stage is in shared memory, and no warp still reads the other one */
        if (k0 > block.first_key)
            mtt__forward_copy<S>(f, block.head, k0 - BLOCK_KV, kv_smem + (stage ^ 1) * 2 * S::KV_BYTES);
        if (k0 > row0 + ROWS - 1 || (f.window && k0 + BLOCK_KV <= row0 - f.window + 1))
            continue; /* the warp's queries attend no key of this tile */

        /* the lane's addresses in Q, K and V: computed for each tile where O and scores take most
           registers */
        const int thread = S::Q_IN_REGISTERS ? (int)threadIdx.x : (int)mtt__opaque(threadIdx.x);
        const uint32_t lane_a = mtt__lane_a<D>(thread & 31);
        const uint32_t q_lane = q_smem + lane_a + thread / 32 * ROWS * D * 2;
        const uint32_t k_lane = kv_smem + mtt__lane_b<D>(thread & 31) + at;
        const uint32_t v_lane = kv_smem + lane_a + S::KV_BYTES + at;
        uint32_t keep[S::KEEPS];
        if (S::DROPOUT) mtt__forward_keep<S>(keep, f, random, block.head.head, row0, k0);
        typename S::scores s_rmem = {};
        const auto load_q = [&](uint32_t *a, int k, int m) {
            if (!S::Q_IN_REGISTERS)
                mtt__load_matrices(a, mtt__advance<D>(q_lane, k * 2) + m * 16 * D * 2);
            else
                for (int r = 0; r < 4; r++) a[r] = q_rmem[k][m][r];
        };
        const auto load_p = [&](uint32_t *a, int k, int m) {
            for (int r = 0; r < 4; r++) {
                const float *p = s_rmem[m][2 * k + r / 2] + r % 2 * 2;
                a[r] = mtt__pack_pair(p[0], p[1], E());
            }
        };
        /* S = Q K^T, the online softmax, O += P V */
        mtt__mma_steps<E, D / 16>(s_rmem, load_q, mtt__b_columns<D>(k_lane));
        if (k0 + BLOCK_KV - 1 > row0 || (f.window && k0 <= row0 + ROWS - 1 - f.window))
            mtt__flash_mask(s_rmem, row0 + lane / 4 - k0 - (lane & 3) * 2, 1, f.window);
        mtt__forward_rescale<S>(row_max, row_sum, o_rmem, s_rmem, f.scale_log2);
        mtt__forward_softmax(s_rmem, row_sum, row_max, f.scale_log2);
        if (S::DROPOUT) mtt__forward_drop(s_rmem, keep);
        mtt__mma_steps<E, BLOCK_KV / 16>(o_rmem, load_p, mtt__b_of_k<D>(v_lane));
    }
    mtt__forward_store<S>(f, block.head, row0, o_rmem, row_max, row_sum);
}

/* ---- tensor cores: backward ---- */

/* A block has a tile of keys: it keeps their dK and dV in registers and walks the tiles of queries that
   attend them, from the last to the first. A tile of dQ has terms of many blocks, which add to it one after
   another, in the order of rising keys, whatever the timing. The blocks of a head start together at the last
   queries, so each runs a step behind the one before it. With four tiles of keys and of queries:

       step           1       2       3       4
       keys 0       dQ 3    dQ 2    dQ 1    dQ 0 *
                       \       \       \
       keys 1               dQ 3    dQ 2    dQ 1 *
                               \       \
       keys 2                       dQ 3    dQ 2 *         \  hands the sums over
                                       \                   *  the last contributor writes dQ
       keys 3                               dQ 3 *

   The sums pass through dq_partial, in device memory that stays in L2. Thread i of a block takes over the
   sums of thread i of the block before. A unit is 4 sums, 128 bits, and carries the number of its
   contribution: 7 bits in place of the lowest 7 of each of the first two sums. These keep 17 bits of
   significand; their terms were rounded to 8 or 11.

   Why this is correct under PTX's memory model, without a fence: a unit is one scalar access, `relaxed` at
   the scope of the GPU, so all accesses to it are morally strong and none sees half a unit. Numbers of a
   launch never repeat (mtt__launch_backward sees to that, and zeros the ring: number 0), so a unit that
   carries number n was written by contribution n and not by one that happens to look like it. Contribution n
   + 1 writes a unit after it has read n in it, in the same thread, which orders the two in the coherence of
   that unit. No other memory is handed over, so there is nothing else to order. Waiting is reading again
   until the number is there.

   PTX has such accesses since CUDA 12.3. Before it, a unit is two of 64 bits: the half with the number is
   stored last, by a release, and loaded first, by an acquire. That is slower and gives the same bits. */
#if CUDART_VERSION >= 12030
#define MTT__LOAD_UNIT                                                                  \
    "{ .reg .b128 unit; .reg .b64 low, high; ld.relaxed.gpu.global.b128 unit, [%4];"    \
    " mov.b128 {low, high}, unit; mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high; }"
#define MTT__STORE_UNIT                                                                 \
    "{ .reg .b128 unit; .reg .b64 low, high; mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4};" \
    " mov.b128 unit, {low, high}; st.relaxed.gpu.global.b128 [%0], unit; }"
#else
#define MTT__LOAD_UNIT                                                                  \
    "{ .reg .b64 low, high; ld.acquire.gpu.global.b64 low, [%4]; ld.relaxed.gpu.global.b64 high, [%4 + 8];" \
    " mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high; }"
#define MTT__STORE_UNIT                                                                 \
    "{ .reg .b64 low, high; mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4};"             \
    " st.relaxed.gpu.global.b64 [%0 + 8], high; st.release.gpu.global.b64 [%0], low; }"
#endif
template <int COUNT, int THREADS> MTT__DEVICE void mtt__sums_load(float (*sums)[4], const float4 *from_gmem)
{
    MTT__UNROLL for (int n = 0; n < COUNT; n++)
        asm volatile(MTT__LOAD_UNIT
                     : "=f"(sums[n][0]), "=f"(sums[n][1]), "=f"(sums[n][2]), "=f"(sums[n][3])
                     : "l"(from_gmem + n * THREADS) : "memory");
}

/* Compares 7 bits once, after joining the differences of all units. */
template <int COUNT> MTT__DEVICE bool mtt__sums_are_of(const float (*sums)[4], uint32_t number)
{
    uint32_t wrong[2] = {};
    MTT__UNROLL for (int n = 0; n < COUNT * 2; n++)
        wrong[n % 2] |= __float_as_uint(sums[n / 2][n % 2]) ^ number >> n % 2 * 7;
    return !(mtt__opaque(wrong[0] | wrong[1]) & 127u);
}

/* Loads sums again until they are of contribution `number`, in all threads of the warp. */
template <int COUNT, int THREADS>
MTT__DEVICE void mtt__sums_await(float (*sums)[4], const float4 *from_gmem, uint32_t number)
{
    while (!__all_sync(0xffffffffu, mtt__sums_are_of<COUNT>(sums, number)))
        mtt__sums_load<COUNT, THREADS>(sums, from_gmem);
}

/* The number replaces bits and is even as often as they are, so no sum drifts. Infinities and NaN remain
   such. */
template <int COUNT, int THREADS>
MTT__DEVICE void mtt__sums_store(float4 *to_gmem, const float (*sums)[4], uint32_t number)
{
    MTT__UNROLL for (int n = 0; n < COUNT; n++) {
        uint32_t v[4];
        MTT__UNROLL for (int e = 0; e < 4; e++) v[e] = __float_as_uint(sums[n][e]);
        MTT__UNROLL for (int e = 0; e < 2; e++) v[e] = (v[e] & ~127u) | (number >> 7 * e & 127u);
        asm volatile(MTT__STORE_UNIT
                     ::"l"(to_gmem + n * THREADS), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
    }
}

/* The sizes of mtt_k_flash_backward. A warp makes scores of KEYS keys by QUERIES queries, CHUNK of these at a
   time; dK and dV of its KEYS keys by COLUMNS columns; dQ of 16 QUERY_ROWS queries by DQ_COLUMNS columns.
   A kernel without DROPOUT may have larger chunks: keep masks take registers. */
template <typename ELEMENT, int WIDTH, int QUERY_TILE, int KEY_TILE, int WARP_COUNT, int KEY_ROW_TILES,
          int QUERY_ROW_TILES, int STAGE_COUNT, int BLOCKS_AT_LEAST, bool WITH_DROPOUT,
          bool ONLY_TURING = false>
struct mtt__backward_sizes {
    typedef ELEMENT E;
    static constexpr int D = WIDTH, BLOCK_Q = QUERY_TILE, BLOCK_KV = KEY_TILE, WARPS = WARP_COUNT;
    static constexpr int THREADS = WARPS * 32, STAGES = STAGE_COUNT;
    static constexpr int MIN_BLOCKS = BLOCKS_AT_LEAST;
    static constexpr int KEY_ROWS = KEY_ROW_TILES, QUERY_ROWS = QUERY_ROW_TILES;
    static constexpr int KEYS = 16 * KEY_ROWS, KEY_WARPS = BLOCK_KV / KEYS;
    static constexpr int QUERY_WARPS = WARPS / KEY_WARPS, QUERIES = BLOCK_Q / QUERY_WARPS;
    static constexpr int CHUNK = QUERIES < 32 ? QUERIES : WITH_DROPOUT ? 16 : 32, COLUMNS = D / QUERY_WARPS;
    static constexpr int DQ_ROW_WARPS = BLOCK_Q / (16 * QUERY_ROWS), DQ_COLUMNS = D / (WARPS / DQ_ROW_WARPS);
    static constexpr int SUMS = QUERY_ROWS * DQ_COLUMNS / 8;
    static constexpr bool DROPOUT = WITH_DROPOUT, P_IN_REGISTERS = QUERY_WARPS == 1;
    static constexpr bool FOR_TURING = ONLY_TURING;
    typedef float scores[KEY_ROWS][CHUNK / 8][4], key_sums[KEY_ROWS][COLUMNS / 8][4];
    typedef float query_sums[QUERY_ROWS][DQ_COLUMNS / 8][4];
    typedef uint32_t packed[KEY_ROWS][CHUNK / 8][2];
    /* registers only suffice if addresses are computed at each use */
    static constexpr bool CRAMPED = D == 256 || (D == 64 && MTT__PROCESSOR_KB == 100);
    /* shared memory: K, V; then STAGES of Q, dO, stats; then dS^T, P^T; then mtt__backward_block, which is in
       the scratch for narrow heads: with the 1 KiB that a block takes besides, two of theirs fill an A100's
       processor to the byte for D = 64, an RTX card's for D = 32. Reading it there costs 1 to 5 %, a block
       less on a processor costs 25 to 31 %. */
    static constexpr bool BLOCK_IN_SHARED = D > 64;
    static constexpr int KV_BYTES = BLOCK_KV * D * 2, Q_BYTES = BLOCK_Q * D * 2;
    static constexpr int STAGE = 2 * Q_BYTES + BLOCK_Q * 8;
    static constexpr int S_BYTES = BLOCK_KV * BLOCK_Q * 2, S_AT = 2 * KV_BYTES + STAGES * STAGE;
    static constexpr int BLOCK_AT = S_AT + (P_IN_REGISTERS ? 1 : 2) * S_BYTES;
    static constexpr int SHARED = BLOCK_AT + (BLOCK_IN_SHARED ? 64 : 0);
    static_assert(D != 64 || SHARED + 1024 <= 82 << 10, "two blocks fit the 164 KB of an A100");
    static_assert(D != 32 || SHARED + 1024 <= 50 << 10, "two blocks fit the 100 KB of an RTX card");
    static_assert(DQ_COLUMNS % 16 == 0 && COLUMNS % 16 == 0 && CHUNK % 16 == 0,
                  "products come in 16 columns");
};

/* A block's work, known to all of its threads. */
struct mtt__backward_block {
    mtt__flash_head head;
    int local, slot, round; /* head of the slice; its slot in the ring of dQ, and heads that had it before */
    int k0, first_tile, last_tile; /* first key; tiles of queries that attend one of the keys */
    const char *q_gmem, *do_gmem;  /* the head's first rows */
};

/* The lane's ldmatrix addresses. The operands of a product are A and B. */
struct mtt__backward_at {
    const mtt__backward_block *block;
    int k0;
    uint32_t k_b;  /* K, B of dQ; at offsets from it K and V, A of S and dP; Q and dO, B of dK and dV */
    uint32_t q_b;  /* Q and dO, B of S and dP */
    uint32_t s_a;  /* P^T and dS^T: where they are stored, and A of dV and dK */
    uint32_t dq_a; /* dS, A of dQ */
};

/* The warp's part of the tiles, computed at each use. */
MTT__DEVICE int mtt__backward_warp(void) { return mtt__uniform((int)mtt__opaque(threadIdx.x) / 32); }
template <class S> MTT__DEVICE int mtt__key_warp(void) { return mtt__backward_warp() % S::KEY_WARPS; }
template <class S> MTT__DEVICE int mtt__query_warp(void) { return mtt__backward_warp() / S::KEY_WARPS; }

template <class S> MTT__DEVICE int mtt__dq_row(void)
{
    return mtt__backward_warp() % S::DQ_ROW_WARPS * 16 * S::QUERY_ROWS;
}

template <class S> MTT__DEVICE int mtt__dq_part(void) { return mtt__backward_warp() / S::DQ_ROW_WARPS; }

template <class S> MTT__DEVICE uint32_t mtt__backward_thread(void)
{
    return S::CRAMPED ? mtt__opaque(threadIdx.x) : threadIdx.x;
}

/* The block goes on to head `local` of the slice. For one thread. */
MTT__DEVICE void mtt__backward_go_to(const mtt__tiled_flash &f, mtt__backward_block *block, int local)
{
    mtt__flash_head_set(block->head, f, f.first_head + local);
    block->local = local, block->slot = local % f.slots, block->round = local / f.slots;
    block->q_gmem = (const char *)f.qkv + mtt__flash_row(block->head, 0, (int)f.view.row) * 2;
    block->do_gmem = (const char *)f.d_out + mtt__flash_row(block->head, 0, (int)f.width) * 2;
}

/* To the next head that the block takes, if there is one. All threads call this. */
MTT__DEVICE bool mtt__backward_next(const mtt__tiled_flash &f, mtt__backward_block *block)
{
    const int next = mtt__uniform(block->local) + 1;
    if (next % f.share == 0) return false;
    __syncthreads(); /* all are through with the head before */
    if (threadIdx.x == 0) mtt__backward_go_to(f, block, next);
    __syncthreads(); /* the block's work is known to all */
    return true;
}

/* Takes the next tile of keys. For one thread. Blocks draw a ticket and take the tiles of `group` times
   `share` heads: the first of each head, then the second, ... So the longest go first. */
template <class S> MTT__DEVICE void mtt__backward_take(const mtt__tiled_flash &f, mtt__backward_block *block)
{
    const int ticket = atomicAdd(f.ticket, 1), key_tiles = ((int)f.seq_len + S::BLOCK_KV - 1) / S::BLOCK_KV;
    const int first = ticket / (f.group * key_tiles) * f.group;
    const int group = min(f.group, f.head_count / f.share - first);
    const int in_group = ticket % (f.group * key_tiles), key_tile = in_group / group;
    const int64_t end = f.window ? (int64_t)(key_tile + 1) * S::BLOCK_KV - 1 + f.window : f.seq_len;
    mtt__backward_go_to(f, block, (first + in_group % group) * f.share);
    block->k0 = key_tile * S::BLOCK_KV, block->first_tile = block->k0 / S::BLOCK_Q;
    block->last_tile = ((int)min(f.seq_len, end) - 1) / S::BLOCK_Q;
}

template <class S>
MTT__DEVICE mtt__backward_block *mtt__backward_block_of(const mtt__tiled_flash &f, unsigned char *shared)
{
    return S::BLOCK_IN_SHARED ? (mtt__backward_block *)(shared + S::BLOCK_AT) : f.blocks + blockIdx.x;
}

template <class S>
MTT__DEVICE mtt__backward_at mtt__backward_begin(const mtt__tiled_flash &f, unsigned char *shared)
{
    const int lane = threadIdx.x & 31;
    mtt__backward_block *const block = mtt__backward_block_of<S>(f, shared);
    mtt__backward_at at;
    if (threadIdx.x == 0) mtt__backward_take<S>(f, block);
    __syncthreads(); /* the block's work is known to all */
    at.block = block, at.k0 = mtt__uniform(block->k0);
    const uint32_t smem = mtt__smem(shared), s_smem = smem + S::S_AT, own_keys = mtt__key_warp<S>() * S::KEYS;
    at.q_b = smem + 2 * S::KV_BYTES + mtt__lane_b<S::D>(lane) + mtt__query_warp<S>() * S::QUERIES * S::D * 2;
    at.k_b = smem + mtt__lane_a<S::D>(lane);
    at.s_a = s_smem + mtt__lane_a<S::BLOCK_Q>(lane) + own_keys * S::BLOCK_Q * 2;
    at.dq_a = mtt__advance<S::BLOCK_Q>(s_smem + mtt__lane_b<S::BLOCK_Q>(lane), mtt__dq_row<S>() / 8);
    return at;
}

/* Finds the block's work in the scratch again, so that its address holds no registers between uses. */
template <class S> MTT__DEVICE void mtt__backward_find(const mtt__tiled_flash &f, mtt__backward_at &at)
{
    if (!S::BLOCK_IN_SHARED) at.block = f.blocks + mtt__opaque(blockIdx.x);
}

/* Called in each round of the loop: what is computed from these holds no registers between rounds. */
MTT__DEVICE void mtt__backward_opaque(mtt__backward_at &at)
{
    at.k_b = mtt__opaque(at.k_b), at.q_b = mtt__opaque(at.q_b), at.s_a = mtt__opaque(at.s_a);
    at.dq_a = mtt__opaque(at.dq_a), at.k0 = (int)mtt__opaque(at.k0);
}

/* The stage of a tile of queries. */
template <class S> MTT__DEVICE uint32_t mtt__backward_stage(int tile)
{
    return (tile & (S::STAGES - 1)) * S::STAGE;
}

/* Q, dO and stats of a tile of queries, to its stage. Stats past the end are zeros, so P is 1 there, but the
   rows of Q and dO are zeros. */
template <class S>
MTT__DEVICE void mtt__backward_copy(const mtt__tiled_flash &f, const mtt__backward_at &at, uint32_t smem,
                                    int tile)
{
    typedef typename S::E E;
    const int row = tile * S::BLOCK_Q, left = (int)f.seq_len - row, thread = (int)mtt__backward_thread<S>();
    const uint32_t to = smem + 2 * S::KV_BYTES + mtt__backward_stage<S>(tile);
    const uint32_t q_stride = (uint32_t)f.view.row, do_stride = (uint32_t)f.width;
    const char *q_gmem = at.block->q_gmem + (uint64_t)(uint32_t)row * (q_stride * 2);
    const char *do_gmem = at.block->do_gmem + (uint64_t)(uint32_t)row * (do_stride * 2);
    mtt__copy_tile<S::BLOCK_Q, S::D, S::THREADS>(to, (const E *)q_gmem, (int)q_stride, left, f.view.d_head,
                                                 thread);
    mtt__copy_tile<S::BLOCK_Q, S::D, S::THREADS>(to + S::Q_BYTES, (const E *)do_gmem, (int)do_stride, left,
                                                 f.view.d_head, thread);
    if (thread < S::BLOCK_Q)
        mtt__copy_async<8>(to + 2 * S::Q_BYTES + thread * 8,
                           f.stats + at.block->local * f.seq_len + row + thread, thread < left);
    mtt__copy_commit();
}

/* S^T and dP^T of the warp's keys and of a chunk of queries. */
template <class S>
MTT__DEVICE void mtt__backward_scores(typename S::scores &s, typename S::scores &dp, uint32_t kv_a,
                                      uint32_t q_b, int chunk)
{
    constexpr int D = S::D;
    const int q_at = chunk * S::CHUNK * D * 2, do_at = q_at + S::Q_BYTES;
    mtt__mma_steps<typename S::E, D / 16>(s, mtt__a_rows<D>(kv_a), mtt__b_columns<D>(q_b, q_at));
    mtt__mma_steps<typename S::E, D / 16>(dp, mtt__a_rows<D>(kv_a, S::KV_BYTES),
                                          mtt__b_columns<D>(q_b, do_at));
}

/* Draws the dropout masks of a chunk. Lane l holds those of query l % CHUNK, one for each 16 of the warp's
   keys. With a CHUNK of 16, two lanes share a query, and each draws half of its masks. */
template <class S>
MTT__DEVICE uint32_t mtt__backward_keep(const mtt__tiled_flash &f, const mtt__random &random,
                                        const mtt__backward_at &at, int key, int query)
{
    constexpr int SHARERS = 32 / S::CHUNK;
    const int lane = (int)(mtt__opaque(threadIdx.x) & 31);
    const int64_t row = (int64_t)at.block->head.head * f.seq_len + query + lane % S::CHUNK;
    uint32_t keep = 0;
    if (!f.dropout.threshold) return 0xffffffffu;
    MTT__UNROLL for (int k = 0; k < S::KEY_ROWS; k += SHARERS) {
        const int m = k + lane / S::CHUNK;
        mtt_draw draw[1];
        mtt__draw_rows(draw, random, row * f.seq_len + key + m * 16, 0);
        keep |= mtt__keep_mask(draw[0], f.dropout.threshold) << 4 * m;
    }
    return SHARERS == 1 ? keep : keep | __shfl_xor_sync(0xffffffffu, keep, 16);
}

/* P and dS of scores and dP, packed as A operands. */
template <class S>
MTT__DEVICE void mtt__backward_p_ds(typename S::packed &p_packed, typename S::packed &ds_packed,
                                    const typename S::scores &s, const typename S::scores &dp,
                                    const mtt__tiled_flash &f, uint32_t stats_smem, uint32_t keep)
{
    typedef typename S::E E;
    const int lane = (int)(mtt__backward_thread<S>() & 31), shift = lane / 4 % 4 * 8 + lane / 16;
    MTT__UNROLL for (int n = 0; n < S::CHUNK / 8; n++) {
        float lse[2], delta[2];
        uint32_t bits[2];
        asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(lse[0]), "=f"(delta[0]), "=f"(lse[1]), "=f"(delta[1])
                     : "r"(stats_smem + (n * 8 + (lane & 3) * 2) * 8) : "memory");
        if (S::DROPOUT) {
            MTT__UNROLL for (int e = 0; e < 2; e++)
                bits[e] = __shfl_sync(0xffffffffu, keep, n * 8 + (lane & 3) * 2 + e) >> shift;
        }
        MTT__UNROLL for (int m = 0; m < S::KEY_ROWS; m++) {
            float p[4], ds[4];
            MTT__UNROLL for (int e = 0; e < 4; e++) {
                p[e] = mtt__exp2(fmaf(s[m][n][e], f.scale_log2, -lse[e & 1]));
                if (S::DROPOUT) {
                    const bool kept = bits[e & 1] >> (4 * m + 2 * (e >> 1)) & 1u;
                    ds[e] = p[e] * ((kept ? dp[m][n][e] : 0.0f) - delta[e & 1]);
                    p[e] = kept ? p[e] : 0.0f;
                } else ds[e] = p[e] * (dp[m][n][e] - delta[e & 1]);
            }
            MTT__UNROLL for (int h = 0; h < 2; h++) {
                p_packed[m][n][h] = mtt__pack_pair(p[2 * h], p[2 * h + 1], E());
                ds_packed[m][n][h] = mtt__pack_pair(ds[2 * h], ds[2 * h + 1], E());
            }
        }
    }
}

/* A chunk of queries: P^T and dS^T to shared memory and, if P stays in registers, dV and dK. */
template <class S>
MTT__DEVICE void mtt__backward_chunk(typename S::key_sums &dk, typename S::key_sums &dv,
                                     const mtt__tiled_flash &f, const mtt__random &random,
                                     const mtt__backward_at &at, uint32_t kv_a, uint32_t stage_at,
                                     uint32_t smem, int q0, int chunk)
{
    typedef typename S::E E;
    constexpr int CHUNK = S::CHUNK, D = S::D;
    const int part = mtt__query_warp<S>() * (S::QUERIES / CHUNK) + chunk, column = part * CHUNK;
    const int key = at.k0 + mtt__key_warp<S>() * S::KEYS, query = q0 + column;
    typename S::packed p_packed, ds_packed;
    const bool attended = key <= query + CHUNK - 1 && (!f.window || key + S::KEYS - 1 > query - f.window);
    if (attended) {
        /* opaque: drawn here, while no scores take registers */
        const uint32_t keep = S::DROPOUT ? mtt__opaque(mtt__backward_keep<S>(f, random, at, key, query)) : 0;
        typename S::scores s = {}, dp = {};
        mtt__backward_scores<S>(s, dp, kv_a, at.q_b + stage_at, chunk);
        if (at.k0 + S::BLOCK_KV - 1 > q0 || (f.window && at.k0 <= q0 + S::BLOCK_Q - 1 - f.window)) {
            const int lane = mtt__opaque(threadIdx.x) & 31;
            mtt__flash_mask(s, query - key - (lane / 4 - (lane & 3) * 2), -1, f.window);
        }
        const uint32_t stats_smem = smem + 2 * S::KV_BYTES + stage_at + 2 * S::Q_BYTES + column * 8;
        mtt__backward_p_ds<S>(p_packed, ds_packed, s, dp, f, stats_smem, keep);
    } else {
        const uint32_t zero = S::P_IN_REGISTERS ? 0 : mtt__opaque(0);
        MTT__UNROLL for (int n = 0; n < CHUNK / 8; n++)
            for (int r = 0; r < 2 * S::KEY_ROWS; r++)
                p_packed[r / 2][n][r % 2] = ds_packed[r / 2][n][r % 2] = zero;
    }
    MTT__UNROLL for (int n = 0; n < CHUNK / 8; n += 2)
        MTT__UNROLL for (int m = 0; m < S::KEY_ROWS; m++) {
            const uint32_t to =
                mtt__part_column<S::BLOCK_Q, CHUNK / 8>(at.s_a, part, n) + m * 16 * S::BLOCK_Q * 2;
            mtt__store_matrices(to, ds_packed[m][n], ds_packed[m][n + 1]);
            if (!S::P_IN_REGISTERS) mtt__store_matrices(to + S::S_BYTES, p_packed[m][n], p_packed[m][n + 1]);
        }
    if (!S::P_IN_REGISTERS || !attended) return;
    const auto load_p = [&](uint32_t *a, int k, int m) {
        for (int r = 0; r < 4; r++) a[r] = p_packed[m][2 * k + r / 2][r % 2];
    };
    const auto load_ds = [&](uint32_t *a, int k, int m) {
        for (int r = 0; r < 4; r++) a[r] = ds_packed[m][2 * k + r / 2][r % 2];
    };
    const uint32_t from = at.k_b + 2 * S::KV_BYTES + stage_at;
    const int q_at = chunk * CHUNK * D * 2, do_at = q_at + S::Q_BYTES;
    mtt__mma_steps<E, CHUNK / 16>(dv, load_p, mtt__b_of_k<D>(from, do_at));
    mtt__mma_steps<E, CHUNK / 16>(dk, load_ds, mtt__b_of_k<D>(from, q_at));
}

/* dV and dK of a whole tile of queries, with P^T and dS^T of other warps too. Queries before the warp's keys
   do not attend them. */
template <class S>
MTT__DEVICE void mtt__backward_keys(typename S::key_sums &dk, typename S::key_sums &dv,
                                    const mtt__backward_at &at, uint32_t stage_at, int q0)
{
    typedef typename S::E E;
    constexpr int BLOCK_Q = S::BLOCK_Q, D = S::D, SPAN = S::COLUMNS / 8, STEPS = BLOCK_Q / 16;
    const int first = max(0, at.k0 + mtt__key_warp<S>() * S::KEYS - q0) / 16, part = mtt__query_warp<S>();
    const uint32_t from = at.k_b + 2 * S::KV_BYTES + stage_at;
    mtt__mma_part<E, STEPS>(dv, mtt__a_rows<BLOCK_Q>(at.s_a, S::S_BYTES),
                            mtt__b_of_k<D, SPAN>(from, S::Q_BYTES, part), first, STEPS);
    mtt__mma_part<E, STEPS>(dk, mtt__a_rows<BLOCK_Q>(at.s_a), mtt__b_of_k<D, SPAN>(from, 0, part), first,
                            STEPS);
}

/* The thread's sums of a tile of dQ, in the ring. */
template <class S>
MTT__DEVICE float4 *mtt__dq_sums(const mtt__tiled_flash &f, const mtt__backward_at &at, int tile)
{
    const int tiles = ((int)f.seq_len + S::BLOCK_Q - 1) / S::BLOCK_Q;
    const int64_t in_ring = at.block->slot * tiles + (int)mtt__opaque(tile);
    return f.dq_partial + in_ring * (S::BLOCK_Q * S::D / 4) + threadIdx.x;
}

/* A block's place among the contributors to a tile of dQ. */
struct mtt__dq_order {
    int place, contributors;
    uint32_t number;            /* contributions to this tile of the ring so far */
    uint32_t waits, hands_over; /* after another block, even one of another head; before another */
};

/* Opaque: the compiler would otherwise copy the rest of the loop for each case. */
template <class S>
MTT__DEVICE mtt__dq_order mtt__dq_order_of(const mtt__tiled_flash &f, const mtt__backward_at &at, int q0)
{
    const int first_contributor = f.window ? max(0, q0 - f.window + 1) / S::BLOCK_KV : 0;
    const bool last_round = mtt__uniform(at.block->local) + f.slots >= f.head_count;
    mtt__dq_order order;
    order.contributors = (min(q0 + S::BLOCK_Q, (int)f.seq_len) - 1) / S::BLOCK_KV - first_contributor + 1;
    order.place = (int)mtt__opaque(at.k0) / S::BLOCK_KV - first_contributor;
    order.number = (uint32_t)(mtt__uniform(at.block->round) * order.contributors + order.place);
    order.waits = mtt__opaque(order.contributors > 1 && order.number > 0);
    order.hands_over =
        mtt__opaque(order.contributors > 1 && (order.place < order.contributors - 1 || !last_round));
    return order;
}

/* Waits for the sums of the block before; the first contributor begins with zeros. */
template <class S>
MTT__DEVICE void mtt__dq_await(float (*sums)[4], const mtt__tiled_flash &f, const mtt__backward_at &at,
                               int tile, const mtt__dq_order &order)
{
    mtt__sums_await<S::SUMS, S::THREADS>(sums, mtt__dq_sums<S>(f, at, tile), order.number);
    if (order.place == 0) /* opaque zeros: a rare branch, not a selection for each sum */
        MTT__UNROLL for (int n = 0; n < S::SUMS * 4; n++)
            sums[n / 4][n % 4] = __uint_as_float(mtt__opaque(0));
}

/* Heads that share keys, each in a block of its own: adds the sums of dK or dV of the heads before, which
   their blocks have handed over, and hands over in turn. Whether the sums are those of all. */
template <class S, int COUNT>
MTT__DEVICE bool mtt__members_add(const mtt__tiled_flash &f, const mtt__backward_at &at, float (*sums)[4],
                                  int piece)
{
    const int local = mtt__uniform(at.block->local), member = local % f.members;
    float4 *gmem = f.members_partial + (int64_t)at.k0 * (S::D / 2) + piece * COUNT * S::THREADS + threadIdx.x;
    if (local > 0) { /* the first of a head of K and V waits until those of the one before have been read */
        float before[COUNT][4];
        mtt__sums_load<COUNT, S::THREADS>(before, gmem);
        mtt__sums_await<COUNT, S::THREADS>(before, gmem, (uint32_t)local);
        if (member > 0)
            MTT__UNROLL for (int n = 0; n < COUNT * 4; n++) sums[n / 4][n % 4] += before[n / 4][n % 4];
    }
    if (local + 1 < f.head_count) mtt__sums_store<COUNT, S::THREADS>(gmem, sums, (uint32_t)local + 1);
    return member == f.members - 1;
}

/* dQ += dS K over the block's keys, those beyond the queries left out. */
template <class S>
MTT__DEVICE void mtt__backward_queries(typename S::query_sums &dq, const mtt__backward_at &at, int q0)
{
    const auto load_ds = mtt__a_of_k<S::BLOCK_Q>(at.dq_a);
    const auto load_k = mtt__b_of_k<S::D, S::DQ_COLUMNS / 8>(at.k_b, 0, mtt__dq_part<S>());
    mtt__mma_part<typename S::E, S::BLOCK_KV / 16>(dq, load_ds, load_k, 0,
                                                   (q0 + S::BLOCK_Q - at.k0 + 15) / 16);
}

/* A head's first column of a part of qkv. */
template <int PART> MTT__DEVICE int mtt__head_column(const mtt__tiled_flash &f, const mtt__flash_head &h)
{
    if (PART == MTT__PART_Q) return h.column;
    return PART == MTT__PART_K ? h.key_column : h.key_column + f.view.heads_kv * f.view.d_head;
}

/* 16 M rows of gradients of the warp, from `row`, times `factor`, to columns from `column` of a part of
   d_qkv and, in 8 bits, of d_qkv_t. */
template <class S, int PART, int M, int COLUMNS>
MTT__DEVICE void mtt__backward_store(const mtt__tiled_flash &f, const mtt__backward_at &at,
                                     const float (&c)[M][COLUMNS / 8][4], int row, int column, float factor)
{
    const int stride = (int)f.view.row, lane = mtt__opaque(threadIdx.x) & 31;
#ifndef MTT_NO_FP8
    if constexpr (std::is_same<typename S::E, __nv_bfloat16>::value)
        if (f.d_qkv_t) {
            const int64_t first = mtt__head_column<PART>(f, at.block->head) + column;
            const int64_t token = at.block->head.first_row + row;
            MTT__UNROLL for (int m = 0; m < M; m++)
                if (row + m * 16 < (int)f.seq_len)
                    mtt__store_eight<COLUMNS>((uint8_t *)f.d_qkv + (token + m * 16) * stride + first, stride,
                                              f.d_qkv_t + first * f.tokens + token + m * 16, f.tokens, c[m],
                                              factor, f.view.d_head - column, lane);
            return;
        }
#endif
    row += lane / 4;
    typename S::E *to_gmem = (typename S::E *)f.d_qkv + (int64_t)(at.block->head.first_row + row) * stride;
    to_gmem += mtt__head_column<PART>(f, at.block->head) + column;
    MTT__UNROLL for (int m = 0; m < M; m++)
        MTT__UNROLL for (int h = 0; h < 2; h++) {
            const int further = m * 16 + h * 8;
            mtt__store_row<typename S::E, COLUMNS>(to_gmem + (int64_t)further * stride, c[m], h, factor,
                                                   row + further < (int)f.seq_len, f.view.d_head - column,
                                                   lane & 3);
        }
}

/* Math:        P and dS again from Q, K, lse; dV += (P o Z)^T dO, dK += dS^T Q in registers; dQ += dS K,
                block after block. Scores are transposed, keys by queries: P^T and dS^T are then A operands of
                dV and dK
   Shapes:      qkv, d_qkv [B T, row of the view], d_out [B T, C] of 16-bit E; d_qkv in e5m2 beside d_qkv_t
                [row of the view, B T]; stats of mtt_k_flash_stats; dq_partial [slots, tiles of BLOCK_Q,
                BLOCK_Q S::D]
   Launch:      a block of WARPS warps a tile of keys and head, which it takes by a ticket. Shared memory: K,
                V, STAGES of Q, dO and stats, dS^T, and P^T unless a warp holds all queries of its keys
                (QUERY_WARPS 1)
   Requires:    dq_partial and ticket zero at the start; at least one slot; fewer than 2^14 contributions to a
                tile of the ring; with d_qkv_t, BF16 and T % 16 == 0
   Traffic:     reads K, V once, Q and dO once a tile of keys (from L2), and moves 8 BLOCK_Q S::D bytes of dQ
                a pair of tiles through L2; 10 D FLOP a pair of query and key
   Determinism: a tile of dQ is summed in the order of rising keys. No deadlock: a block waits only for the
                tile of keys before its own in its head, for the blocks of the head `slots` before, or for
                that of its keys in the head before, all of smaller tickets; a ticket is drawn by a running
                block, so all smaller ones are running or done, and the smallest of those running waits for
                none
   Reference:   mtt_k_flash_backward_exact; FlashAttention-2, algorithm 2. The last contributor writes dQ, so
                dQ needs neither zeros before nor a pass after; a slot serves head after head */
template <class S>
static __global__ void __launch_bounds__(S::THREADS, mtt__blocks_that_fit<S>(MTT__PROCESSOR_KB << 10))
    mtt_k_flash_backward(const mtt__tiled_flash f)
{
    if (mtt__replaced<S>(S::STAGES)) return;
    typedef typename S::E E;
    extern __shared__ __align__(128) unsigned char shared[];
    mtt__backward_at at = mtt__backward_begin<S>(f, shared);
    const uint32_t smem = mtt__smem(shared);
    const int T = (int)f.seq_len, stride = (int)f.view.row, D = f.view.d_head;
    const E *k_gmem = (const E *)f.qkv + mtt__key_row(at.block->head, at.k0, stride);
    const E *v_gmem = k_gmem + (int64_t)f.view.heads_kv * D;
    mtt__copy_tile<S::BLOCK_KV, S::D, S::THREADS>(smem, k_gmem, stride, T - at.k0, D, threadIdx.x);
    mtt__copy_tile<S::BLOCK_KV, S::D, S::THREADS>(smem + S::KV_BYTES, v_gmem, stride, T - at.k0, D,
                                                  threadIdx.x);
    typename S::key_sums dk_rmem = {}, dv_rmem = {};
    mtt__random random = {};
    if (S::DROPOUT && f.dropout.threshold) random = mtt__random_of(f.dropout);
    do { /* for each head that shares the keys */
        mtt__backward_copy<S>(f, at, smem, mtt__uniform(at.block->last_tile));
        for (int tile = mtt__uniform(at.block->last_tile); tile >= mtt__uniform(at.block->first_tile);
             tile--) {
            const int q0 = tile * S::BLOCK_Q;
            const uint32_t stage_at = mtt__backward_stage<S>(tile);
            mtt__backward_opaque(at);
            mtt__backward_find<S>(f, at);
            mtt__copy_wait();
            __syncthreads(); /* this tile is in shared memory; the last tile's P and dS have been read */
            if (S::STAGES > 1 && tile > mtt__uniform(at.block->first_tile))
                mtt__backward_copy<S>(f, at, smem, tile - 1);
            /* P and dS; with all queries of its keys in a warp, also dK and dV */
            MTT__UNROLL for (int chunk = 0; chunk < S::QUERIES / S::CHUNK; chunk++)
                mtt__backward_chunk<S>(dk_rmem, dv_rmem, f, random, at,
                                       at.k_b + mtt__key_warp<S>() * S::KEYS * S::D * 2, stage_at, smem, q0,
                                       chunk);
            __syncthreads(); /* all of P and dS is written before any of it is read */

            /* dQ, behind the block before; dK and dV */
            mtt__backward_find<S>(f, at);
            const mtt__dq_order order = mtt__dq_order_of<S>(f, at, q0);
            typename S::query_sums dq_rmem = {};
            float (*sums)[4] = dq_rmem[0];
            if (order.waits) mtt__sums_load<S::SUMS, S::THREADS>(sums, mtt__dq_sums<S>(f, at, tile));
            if (!S::P_IN_REGISTERS) mtt__backward_keys<S>(dk_rmem, dv_rmem, at, stage_at, q0);
            if (order.waits) mtt__dq_await<S>(sums, f, at, tile, order);
            mtt__backward_queries<S>(dq_rmem, at, q0);
            if (order.place == order.contributors - 1)
                mtt__backward_store<S, MTT__PART_Q, S::QUERY_ROWS, S::DQ_COLUMNS>(
                    f, at, dq_rmem, q0 + mtt__dq_row<S>(), mtt__dq_part<S>() * S::DQ_COLUMNS,
                    f.gradient_scale);
            if (order.hands_over)
                mtt__sums_store<S::SUMS, S::THREADS>(mtt__dq_sums<S>(f, at, tile), sums, order.number + 1);
            if (S::STAGES == 1 && tile > mtt__uniform(at.block->first_tile)) {
                __syncthreads(); /* all have read Q and dO before the next tile overwrites them */
                mtt__backward_copy<S>(f, at, smem, tile - 1);
            }
        }
    } while (mtt__backward_next(f, mtt__backward_block_of<S>(f, shared)));
    /* store dK and dV, or hand them to the next head */
    const int key = at.k0 + mtt__key_warp<S>() * S::KEYS, column = mtt__query_warp<S>() * S::COLUMNS;
    constexpr int SUMS = S::KEY_ROWS * S::COLUMNS / 8;
    const bool whole = f.share == f.members;
    if (whole || mtt__members_add<S, SUMS>(f, at, dk_rmem[0], 0))
        mtt__backward_store<S, MTT__PART_K, S::KEY_ROWS, S::COLUMNS>(f, at, dk_rmem, key, column,
                                                                     f.gradient_scale);
    if (whole || mtt__members_add<S, SUMS>(f, at, dv_rmem[0], 1))
        mtt__backward_store<S, MTT__PART_V, S::KEY_ROWS, S::COLUMNS>(f, at, dv_rmem, key, column,
                                                                     f.dropout.scale);
}

/* ---- launches ---- */

static mtt__tiled_flash mtt__tiled_forward_of(const mtt_op *op)
{
    mtt__tiled_flash f = {mtt__flash_forward_of(op)};
    f.out_8 = mtt__eight_of(MTT_OPERANDS_OF(flash, op)->out_8);
    return f;
}

static mtt__tiled_flash mtt__tiled_backward_of(const mtt_op *op)
{
    mtt__tiled_flash f = {mtt__flash_backward_of(op)};
    f.d_qkv_t = mtt__at<uint8_t>(MTT_OPERANDS_OF(flash_backward, op)->d_qkv_t), f.tokens = op->shape->rows;
    return f;
}

/* Heads whose K and V stay in L2 together. */
static int mtt__forward_group(const mtt__tiled_flash &f)
{
    const int64_t group = (32 << 20) / (f.seq_len * f.view.d_head * 4);
    return (int)mtt__min((group < 1 ? 1 : group) * f.members, f.head_count);
}

template <class S> static mtt_status mtt__launch_forward(mtt__cuda *c, mtt__tiled_flash f)
{
    f.group = mtt__forward_group(f);
    return mtt__launch_shared(c, "flash", mtt_k_flash_forward<S>,
                              mtt__blocks(f.seq_len, S::BLOCK_Q) * f.head_count, S::THREADS, S::SHARED, f);
}

/* Warps of a kernel that a processor holds; 0 where a block does not fit. */
template <class S> static int mtt__warps_that_fit(const mtt__cuda *c)
{
    if (S::SHARED > c->shared_bytes) return 0;
    return mtt__blocks_that_fit<S>(c->processor_bytes) * S::THREADS / 32;
}

/* Of a width's rows the one with the most warps on a processor is taken, of equals the first; where none
   fits, the first is refused. The table is read twice: for the most warps, then for the row. Rows that name
   DROPOUT alone run without dropout, too: a kernel without would have the same tiles. Turing has rows of its
   own, in FP16. */
template <typename E> static mtt_status mtt__tensor_forward(mtt__cuda *c, const mtt__tiled_flash &f)
{
    const int D = mtt__flash_width(f.view.d_head);
    const bool keep = f.dropout.threshold == 0 /* all */, window = f.window > 0;
#define MTT__ROW(...)                                                                \
    do {                                                                             \
        typedef mtt__forward_sizes<E, __VA_ARGS__> S;                                \
        const int warps = mtt__warps_that_fit<S>(c);                                 \
        if (chosen && warps == most) return mtt__launch_forward<S>(c, f);            \
        if (warps > most) most = warps;                                              \
    } while (0)
    for (int most = 0, chosen = 0;; chosen = 1) {
        /*                                         D BLOCK_Q BLOCK_KV ROW_TILES Q_HELD MIN_BLOCKS DROPOUT */
        if (D == 32 && keep)            MTT__ROW( 32,    128,      64,        2,  true,         3,   false);
        if (D == 32)                    MTT__ROW( 32,    128,      32,        2,  true,         3,    true);
        if (D == 64 && window && keep)  MTT__ROW( 64,     64,      64,        1,  true,         4,   false);
        if (D == 64 && window)          MTT__ROW( 64,     64,      64,        1,  true,         2,    true);
        if (D == 64 && !window && keep) MTT__ROW( 64,    128,      64,        2,  true,         2,   false);
        if (D == 64 && !window)         MTT__ROW( 64,    128,      64,        2,  true,         2,    true);
        if (D == 96 && keep)            MTT__ROW( 96,    128,      64,        2, false,         2,   false);
        if (D == 96)                    MTT__ROW( 96,    128,      32,        2, false,         2,    true);
        if (D == 128 && keep)           MTT__ROW(128,    128,      64,        2, false,         2,   false);
        if (D == 128)                   MTT__ROW(128,    128,      32,        2, false,         2,    true);
        if constexpr (std::is_same<E, __half>::value)
            if (D == 128)               MTT__ROW(128,     64,      32,        1, false,         1,    true,
                                                 /* Turing */ true);
        if (D == 256)                   MTT__ROW(256,     64,      32,        1, false,         2,    true);
    }
#undef MTT__ROW
}

/* Heads that share keys can be taken one by one by a block, which keeps dK and dV in registers, or each by a
   block of its own, and blocks hand over dK and dV. The former waits: dQ is summed in the order of keys, so
   at each head the blocks of late keys, which have less to do, wait for those of the first keys. The latter
   moves 8 BLOCK_KV S::D bytes twice a block. It is faster from this many tiles of keys up. */
enum { MTT__TILES_APART = 6 };

/* Scratch: the ticket; dK and dV of a head; the ring of dQ, of one slot a head; stats of a slice of heads;
   the work of its blocks. A group is the heads whose blocks fill the device, two at least: with fewer, blocks
   wait for each other's dQ; with more, L2 holds less of each. The slots of a second group let blocks go on to
   its heads. Heads that do not fit at once, or whose contributions would take more than 14 bits to number, go
   slice by slice: 4 heads a slot, since with one each head would be a launch of its own. Here heads come in
   packs of f.share. */
template <class S, typename Kernel>
static mtt_status mtt__launch_backward(mtt__cuda *c, const mtt_op *op, Kernel *kernel, mtt__tiled_flash f)
{
    const int64_t query_tiles = mtt__ceil_div(f.seq_len, S::BLOCK_Q);
    const int64_t key_tiles = mtt__ceil_div(f.seq_len, S::BLOCK_KV);
    const int64_t in_flight = (int64_t)c->processors * S::MIN_BLOCKS;
    const int64_t group = in_flight / key_tiles > 2 ? in_flight / key_tiles : 2;
    const size_t room = op->workspace->bytes, head_stats = (size_t)f.seq_len * sizeof(float2);
    const size_t head_blocks = (size_t)key_tiles * sizeof(mtt__backward_block);
    const size_t head_sums = key_tiles > 1 ? (size_t)query_tiles * S::BLOCK_Q * S::D * sizeof(float) : 0;
    const size_t members_sums = (size_t)key_tiles * S::BLOCK_KV * S::D * 2 * sizeof(float);
    const bool apart = f.members > 1 && key_tiles >= MTT__TILES_APART && key_tiles * f.members <= 16383;
    const size_t header = 256 + (apart ? members_sums : 0);
    f.share = apart ? 1 : f.members;
    const size_t stats_bytes = f.share * head_stats + head_blocks, slot_bytes = f.share * head_sums;
    const int packs = f.head_count / f.share, least = f.members / f.share;
    size_t slots = (size_t)mtt__min(group * 2, packs), slice;
    void *scratch = NULL;
    mtt_status status = mtt__scratch(c, op, header + least * stats_bytes + slot_bytes, &scratch);
    if (status != MTT_OK) return status;
    while (slots > 1 && header + (size_t)mtt__min(packs, 4 * (int64_t)slots + least - 1) * stats_bytes +
                                slots * slot_bytes > room)
        slots--;
    slice = (room - header - slots * slot_bytes) / stats_bytes;
    slice = (size_t)mtt__min((int64_t)slice, (int64_t)slots * (16383 / key_tiles));
    if (apart) slice = (size_t)mtt__min((int64_t)slice, 16383) / least * least;
    if (slice < 1)
        return mtt__cuda_fail(c->env, MTT_E_ARGUMENT,
                              "flash_backward takes sequences of at most %lld tokens: %lld",
                              (long long)16383 * S::BLOCK_KV, (long long)f.seq_len);
    f.slots = (int)slots * f.share;
    f.group = (int)mtt__min(group, (int64_t)slots);
    f.ticket = (int *)scratch;
    f.members_partial = (float4 *)((char *)scratch + 256);
    f.dq_partial = (float4 *)((char *)scratch + header);
    f.stats = (float2 *)((char *)scratch + header + slots * slot_bytes); /* a multiple of 256 */
    f.blocks = (mtt__backward_block *)(f.stats + slice * f.share * f.seq_len);
    for (int first = 0, count; first < packs && status == MTT_OK; first += count) {
        count = (size_t)(packs - first) < slice ? packs - first : (int)slice;
        f.first_head = first * f.share, f.head_count = count * f.share;
        status = mtt__checked(c, cudaMemsetAsync(scratch, 0, header + slots * slot_bytes, c->stream),
                              "flash_backward");
        if (status == MTT_OK) status = mtt__launch_stats<typename S::E>(c, f);
        if (status == MTT_OK)
            status = mtt__launch_shared(c, "flash_backward", kernel, (unsigned)(count * key_tiles),
                                        S::THREADS, S::SHARED, f);
    }
    return status;
}

/* As for the forward pass. RTX cards, compute capability 8.6, 8.9 and 12.0, have 99 KiB of shared memory: for
   wider heads they run the rows of one stage. For D = 64 one block of 4 warps fits; 8 warps of half as many
   keys were 22 % slower, on an H100 with room for one block. */
template <typename E>
static mtt_status mtt__tensor_backward(mtt__cuda *c, const mtt_op *op, const mtt__tiled_flash &f)
{
    const int D = mtt__flash_width(f.view.d_head);
    const bool keep = f.dropout.threshold == 0; /* all */
#define MTT__ROW(...)                                                                       \
    do {                                                                                    \
        typedef mtt__backward_sizes<E, __VA_ARGS__> S;                                      \
        const int warps = mtt__warps_that_fit<S>(c);                                        \
        const auto kernel = mtt_k_flash_backward<S>;                                        \
        if (chosen && warps == most) return mtt__launch_backward<S>(c, op, kernel, f);      \
        if (warps > most) most = warps;                                                     \
    } while (0)
    for (int most = 0, chosen = 0;; chosen = 1) {
        /*                              D BLOCK_Q BLOCK_KV WARPS KEY_ROWS QUERY_ROWS STAGES BLOCKS DROPOUT */
        if (D == 32 && keep)  MTT__ROW( 32,     64,     128,    4,       2,         2,     2,     3,  false);
        if (D == 32)          MTT__ROW( 32,     64,     128,    4,       2,         2,     2,     3,   true);
        if (D == 64 && keep)  MTT__ROW( 64,     64,     128,    4,       2,         2,     2,     2,  false);
        if (D == 64)          MTT__ROW( 64,     64,     128,    4,       2,         2,     2,     2,   true);
        if constexpr (std::is_same<E, __half>::value)
            if (D == 64)      MTT__ROW( 64,     32,     128,    4,       2,         2,     2,     1,   true,
                                      /* Turing */ true);
        if (D == 96)          MTT__ROW( 96,     64,      64,    4,       2,         2,     2,     2,   true);
        if (D == 128 && keep) MTT__ROW(128,     64,     128,    8,       2,         2,     2,     1,  false);
        if (D == 128)         MTT__ROW(128,     64,     128,    8,       2,         2,     2,     1,   true);
        if (D == 128)         MTT__ROW(128,     64,      64,    8,       2,         2,     1,     1,   true);
        if constexpr (std::is_same<E, __half>::value)
            if (D == 96 || D == 128)
                              MTT__ROW(128,     64,      32,    4,       2,         2,     1,     1,   true,
                                      /* Turing */ true);
        if (D == 256)         MTT__ROW(256,     64,      64,    8,       2,         2,     2,     1,   true);
        if (D == 256)         MTT__ROW(256,     32,      32,    4,       1,         1,     1,     1,   true);
    }
#undef MTT__ROW
}

static mtt_status mtt__tensor_flash(mtt__cuda *c, const mtt_op *op)
{
    const mtt__tiled_flash f = mtt__tiled_forward_of(op);
    if (!mtt__flash_takes(op->shape)) return mtt__flash_refuse(c, op->shape);
    return mtt__by_16_bits(c, MTT_OPERANDS_OF(flash, op)->qkv,
                           [&](auto zero) { return mtt__tensor_forward<decltype(zero)>(c, f); });
}

static mtt_status mtt__tensor_flash_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt__tiled_flash f = mtt__tiled_backward_of(op);
    if (!mtt__flash_takes(op->shape)) return mtt__flash_refuse(c, op->shape);
    return mtt__by_16_bits(c, MTT_OPERANDS_OF(flash_backward, op)->qkv,
                           [&](auto zero) { return mtt__tensor_backward<decltype(zero)>(c, op, f); });
}

/* Which of an operation's functions is in this room, for 16-bit tensors; NULL = none. */
static mtt__function mtt__tensor_function(const mtt_op *op)
{
    if (op->kind == MTT_OP_flash && MTT_OPERANDS_OF(flash, op)->qkv->dtype != MTT_F32)
        return mtt__tensor_flash;
    if (op->kind == MTT_OP_flash_backward && MTT_OPERANDS_OF(flash_backward, op)->qkv->dtype != MTT_F32)
        return mtt__tensor_flash_backward;
    return NULL;
}

/* ----------------------------------------------------------------------------------------------------------
   >>hopper   kernels for the H100 and H200: warpgroup products (wgmma), tensor copies (TMA), clusters
   -----------------------------------------------------------------------------------------------------------
   Each operation here has an equal in the rooms above, which other devices run. The code is for
   sm_90a alone, but for the loss in one pass: other devices run it with clusters, or with single blocks. */
#ifndef MTT_NO_HOPPER

/* ---- products of warpgroups ---- */
#if MTT__HOPPER

/* A warpgroup is four warps. wgmma multiplies 64 rows of A by 32, 64, 128 or 256 columns of B, 16 of k at a
   time, while the warps go on. Operands come from shared memory, by descriptors (PTX, asynchronous warpgroup
   level matrix instructions); A also from registers. Warp w has rows 16 w to 16 w + 15 of C, in its lanes as
   those of mtt__mma. From mtt__wgmma_begin to mtt__wgmma_wait accumulators, and A in registers, belong to the
   tensor cores. */
MTT__DEVICE void mtt__wgmma_begin(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MTT__DEVICE void mtt__wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING = 0> MTT__DEVICE void mtt__wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* After a wait: keeps the compiler from reading C before. */
template <int N> MTT__DEVICE void mtt__wgmma_hold(float (&c)[N][4])
{
    MTT__UNROLL for (int n = 0; n < N * 4; n++) asm volatile("" : "+f"(c[n / 4][n % 4])::"memory");
}

/* Before a barrier: makes the thread's writes to shared memory visible to wgmma and to tensor copies. */
MTT__DEVICE void mtt__wgmma_publish(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* The lower half of the descriptor of a tile at a multiple of 1024 bytes: rows of 64 elements as
   mtt__copy_tile writes them, which is wgmma's swizzle of 128 bytes. For a transposed operand, `wide` is the
   distance in bytes to the tile of its next 64 columns. */
MTT__DEVICE uint32_t mtt__wgmma_tile(uint32_t smem, uint32_t wide)
{
    return wide / 16 << 16 | (smem & 0x3ffffu) / 16;
}

/* The descriptor `bytes` into a tile: 16 columns are 32 bytes, 16 rows 2048. The upper half says that 8 rows
   are 1024 bytes. */
MTT__DEVICE uint64_t mtt__wgmma_at(uint32_t tile, uint32_t bytes)
{
    return (uint64_t)(1u << 30 | 1024 / 16) << 32 | (tile + bytes / 16);
}

/* The lists of 16 to 128 accumulators that the instructions take. */
#define MTT__FOUR(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define MTT__16(c, n) MTT__FOUR(c, n), MTT__FOUR(c, n + 1), MTT__FOUR(c, n + 2), MTT__FOUR(c, n + 3)
#define MTT__32(c, n) MTT__16(c, n), MTT__16(c, n + 4)
#define MTT__64(c, n) MTT__32(c, n), MTT__32(c, n + 8)
#define MTT__128(c, n) MTT__64(c, n), MTT__64(c, n + 16)
#define MTT__NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define MTT__NAMES_32 \
    MTT__NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MTT__NAMES_64                                                                       \
    MTT__NAMES_32                                                                           \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52," \
    "%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define MTT__NAMES_128                                                                      \
    MTT__NAMES_64                                                                           \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84," \
    "%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104," \
    "%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121," \
    "%122,%123,%124,%125,%126,%127"

/* C = A B, or C += A B if `more`, over 16 of k. Transposed: the rows in shared memory are those of k. */
#define MTT__WGMMA(E, TYPE, N, COUNT, A, B, MORE, TEXT_A, TEXT_B)                                            \
    template <bool TRANS_A, bool TRANS_B>                                                                    \
    MTT__DEVICE void mtt__wgmma(float (&c)[N / 8][4], uint64_t a, uint64_t b, int more, E)                   \
    {                                                                                                        \
        asm volatile("{ .reg .pred more; setp.ne.b32 more, " MORE ", 0; "                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" MTT__NAMES_##COUNT \
                     "}, " A ", " B ", more, 1, 1, " TEXT_A ", " TEXT_B "; }"                                \
                     : MTT__##COUNT(c, 0)                                                                    \
                     : "l"(a), "l"(b), "r"(more), "n"(TRANS_A), "n"(TRANS_B) : "memory");                    \
    }
/* C += A B with A in registers, B transposed */
#define MTT__WGMMA_REGISTERS(E, TYPE, N, COUNT, R1, R2, R3, R4, B)                                           \
    MTT__DEVICE void mtt__wgmma(float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b, E)                 \
    {                                                                                                        \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" MTT__NAMES_##COUNT \
                     "}, {" R1 "," R2 "," R3 "," R4 "}, " B ", 1, 1, 1, 1;"                                  \
                     : MTT__##COUNT(c, 0)                                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");                       \
    }
#define MTT__WGMMA_ALL(E, TYPE)                                              \
    MTT__WGMMA(E, TYPE, 32, 16, "%16", "%17", "%18", "%19", "%20")           \
    MTT__WGMMA(E, TYPE, 64, 32, "%32", "%33", "%34", "%35", "%36")           \
    MTT__WGMMA(E, TYPE, 128, 64, "%64", "%65", "%66", "%67", "%68")          \
    MTT__WGMMA(E, TYPE, 256, 128, "%128", "%129", "%130", "%131", "%132")    \
    MTT__WGMMA_REGISTERS(E, TYPE, 64, 32, "%32", "%33", "%34", "%35", "%36") \
    MTT__WGMMA_REGISTERS(E, TYPE, 128, 64, "%64", "%65", "%66", "%67", "%68")
MTT__WGMMA_ALL(__nv_bfloat16, "bf16")
#ifndef MTT_NO_FP16
MTT__WGMMA_ALL(__half, "f16")
#endif

#ifndef MTT_NO_FP8
/* The same in 8 bits, 32 of k, A in e5m2 and B in e4m3; both have their rows in shared memory. */
MTT__DEVICE void mtt__wgmma_eight(float (&c)[16][4], uint64_t a, uint64_t b, int more)
{
    asm volatile("{ .reg .pred more; setp.ne.b32 more, %66, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e5m2.e4m3 {" MTT__NAMES_64
                 "}, %64, %65, more, 1, 1; }"
                 : MTT__64(c, 0) : "l"(a), "l"(b), "r"(more) : "memory");
}
#endif

/* C = A B^T over D of k, A and B of rows of D elements: tiles of A_ROWS and B_ROWS rows for each 64 of k. */
template <int D, int A_ROWS, int B_ROWS, int N, typename E>
MTT__DEVICE void mtt__wgmma_abt(float (&c)[N][4], uint32_t a_tile, uint32_t b_tile, E)
{
    MTT__UNROLL for (int k = 0; k < D / 16; k++)
        mtt__wgmma<false, false>(c, mtt__wgmma_at(a_tile, k / 4 * A_ROWS * 128 + k % 4 * 32),
                                 mtt__wgmma_at(b_tile, k / 4 * B_ROWS * 128 + k % 4 * 32), k > 0, E());
}

/* C += A B over 16 STEPS of k, A in registers, a row of B for each k. */
template <int STEPS, int N, typename E>
MTT__DEVICE void mtt__wgmma_ab(float (&c)[N][4], const uint32_t (&a)[STEPS][4], uint32_t b_tile, E)
{
    MTT__UNROLL for (int k = 0; k < STEPS; k++) mtt__wgmma(c, a[k], mtt__wgmma_at(b_tile, k * 2048), E());
}

/* ROWS rows of d_head elements as tiles of 64 columns, each ROWS * 128 bytes. */
template <int ROWS, int D, int THREADS, typename E>
MTT__DEVICE void mtt__wgmma_copy(uint32_t tiles_smem, const E *from_gmem, int stride, int rows_left,
                                 int d_head)
{
    MTT__UNROLL for (int column = 0; column < D; column += 64)
        mtt__copy_tile<ROWS, 64, THREADS>(tiles_smem + column * ROWS * 2, from_gmem + column, stride,
                                          rows_left, d_head - column, threadIdx.x);
}

/* Dropout of tiles. The random bytes of 512 elements wait in shared memory: lane l stores its draw, for 16
   neighbouring keys of one query, as row l % 8 of the 8 x 8 matrix l / 8. A pair of bytes, of keys k and k +
   8, is an element of that matrix. ldmatrix takes from each lane the address of the row it wrote, and gives
   it the bytes of its accumulators. */
MTT__DEVICE void mtt__store_draw(uint32_t to_smem, const mtt_draw &draw)
{
    const uint32_t *w = draw.word;
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
                 ::"r"(to_smem), "r"(__byte_perm(w[0], w[2], 0x5140)), "r"(__byte_perm(w[0], w[2], 0x7362)),
                 "r"(__byte_perm(w[1], w[3], 0x5140)), "r"(__byte_perm(w[1], w[3], 0x7362)) : "memory");
}

/* The lane's COUNT draws, TOGETHER at a time so that their rounds overlap. */
template <int COUNT, int TOGETHER>
MTT__DEVICE void mtt__draw_tiles(const mtt__random &random, uint64_t element, uint64_t step,
                                 uint32_t row_smem)
{
#pragma unroll 1
    for (int k = 0; k < COUNT; k += TOGETHER) {
        mtt_draw draws[TOGETHER];
        mtt__draw_rows(draws, random, element + k * step, step);
        MTT__UNROLL for (int i = 0; i < TOGETHER; i++) mtt__store_draw(row_smem + (k + i) * 512, draws[i]);
    }
    __syncwarp(); /* all rows are written before ldmatrix reads them */
}

/* A mask of the kept of two elements: of bytes 0 and 2, or 1 and 3. `threshold` is in both halves. As FP16
   numbers, bytes have the order of integers. */
MTT__DEVICE uint32_t mtt__keep_pair(uint32_t bytes, int odd, uint32_t threshold)
{
    const uint32_t pair = odd ? __byte_perm(bytes, 0, 0x4341) : bytes & 0x00ff00ffu;
    return __hge2_mask(*(const __half2 *)&pair, *(const __half2 *)&threshold);
}

/* 1 if the element of a byte is kept, else 0. 2^23 + byte is a float whose lowest byte is that byte. */
MTT__DEVICE float mtt__keep_factor(uint32_t bytes, int byte, float threshold)
{
    const float number = __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440 | byte));
    return __saturatef(number - (8388607.0f + threshold));
}

/* The view's row, computed: then ptxas keeps it, and the addresses made of it, in uniform registers. */
MTT__DEVICE int mtt__uniform_row(const mtt_qkv &v) { return (v.heads + 2 * v.heads_kv) * v.d_head; }

#endif

/* ---- flash attention, forward ---- */

/* Math:        O = softmax(scale Q K^T) V tile by tile, with a running maximum and sum of each row; lse
   Shapes:      qkv [B T, row of the view] and out [B T, C] of 16-bit E, lse [B H, T] FP32, out_8 as out;
                S::D 64 or 128
   Launch:      a block of a warpgroup for each 64 of its BLOCK_Q queries of a head. Shared memory: Q, two
                stages of K and V, and the random bits of a tile, which are drawn under the scores' product if
                D is 64; it is used from a multiple of 1,024 bytes, at most 896 from its start. Two blocks a
                processor: one makes exponentials while the other multiplies
   Requires:    code for sm_90a (the kernel is empty otherwise); D % 8 == 0, 16-byte aligned tensors; no
                dropout unless S::DROPOUT; out_8 only beside BF16
   Traffic:     Q, K, V read and O, lse written once from device memory while a group's K and V fit L2
   Determinism: one block makes a row, in one order; records a largest value and a count
   Reference:   mtt_k_flash_forward */
template <class S>
static __global__ void __launch_bounds__(S::THREADS, S::MIN_BLOCKS)
    mtt_k_flash_forward_wgmma(const mtt__tiled_flash f)
{
#if MTT__HOPPER
    typedef typename S::E E;
    constexpr int D = S::D, BLOCK_Q = S::BLOCK_Q, BLOCK_KV = S::BLOCK_KV;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ mtt__forward_block block;
    const uint32_t q_smem = (mtt__smem(shared) + 1023) & ~1023u, kv_smem = q_smem + S::Q_BYTES;
    const int lane = threadIdx.x & 31, warpgroup = mtt__uniform((int)threadIdx.x / 128);
    const int T = (int)f.seq_len, stride = mtt__uniform_row(f.view);
    const mtt__forward_place place = mtt__forward_place_of<S>(f);
    const int q0 = place.q0, group0 = q0 + warpgroup * 64, row0 = q0 + threadIdx.x / 32 * 16;
    const int last_key = (min(q0 + BLOCK_Q, T) - 1) / BLOCK_KV * BLOCK_KV;
    const int first_key = f.window ? max(0, q0 - f.window + 1) / BLOCK_KV * BLOCK_KV : 0;
    if (threadIdx.x == 0) mtt__flash_head_set(block.head, f, place.head);
    __syncthreads(); /* the block's work is known to all */
    const E *q_gmem = (const E *)f.qkv + mtt__flash_row(block.head, 0, stride);
    const E *first_key_gmem = (const E *)f.qkv + mtt__key_row(block.head, 0, stride);
    const int d_head = f.view.d_head;
    const auto copy = [&](int k0, uint32_t to_smem) {
        const E *k_gmem = first_key_gmem + (int64_t)k0 * stride;
        const E *v_gmem = k_gmem + (int64_t)f.view.heads_kv * f.view.d_head;
        mtt__wgmma_copy<BLOCK_KV, D, S::THREADS>(to_smem, k_gmem, stride, T - k0, d_head);
        mtt__wgmma_copy<BLOCK_KV, D, S::THREADS>(to_smem + S::KV_BYTES, v_gmem, stride, T - k0, d_head);
        mtt__copy_commit();
    };
    const uint32_t q_tile = mtt__wgmma_tile(q_smem + warpgroup * 64 * 128, 0);
    float o_rmem[1][D / 8][4] = {}, row_max[1][2] = {{-CUDART_INF_F, -CUDART_INF_F}}, row_sum[1][2] = {};
    const auto bits_smem = [&] {
        const uint32_t thread = mtt__opaque(threadIdx.x);
        return q_smem + S::TILES + thread / 32 * (BLOCK_KV * 16) + thread % 32 * 16;
    };
    mtt__random random = {};
    int64_t draws_at = 0; /* the lane's first element in the columns of key 0 */
    bool drawn = false;   /* the tile's random bits are there */
    if (S::DROPOUT) {
        random = mtt__random_of(f.dropout);
        draws_at = ((int64_t)block.head.head * T + row0 + (lane & 15)) * T + lane / 16 * 16;
    }

    mtt__wgmma_copy<BLOCK_Q, D, S::THREADS>(q_smem, q_gmem + (int64_t)q0 * stride, stride, T - q0, d_head);
    copy(last_key, kv_smem);
    for (int k0 = last_key, stage = 0; k0 >= first_key; k0 -= BLOCK_KV, stage ^= 1) {
        const uint32_t k_tile = mtt__wgmma_tile(kv_smem + stage * 2 * S::KV_BYTES, 0);
        const uint32_t v_tile = mtt__wgmma_tile(kv_smem + (stage * 2 + 1) * S::KV_BYTES, BLOCK_KV * 128);
        mtt__copy_wait();
        mtt__wgmma_publish();
        __syncthreads(); /* this stage is in shared memory, and no warp still reads the other one */
        if (k0 > first_key) copy(k0 - BLOCK_KV, kv_smem + (stage ^ 1) * 2 * S::KV_BYTES);
        if (k0 > group0 + 63 || (f.window && k0 + BLOCK_KV <= group0 - f.window + 1))
            continue; /* the warpgroup's queries attend no key of this tile */
        /* S = Q K^T */
        float s_rmem[1][S::KEY_TILES][4];
        if (S::DROPOUT && D > 64 && !drawn)
            mtt__draw_tiles<BLOCK_KV / 32, 1>(random, draws_at + k0, 32, bits_smem());
        mtt__wgmma_begin();
        mtt__wgmma_abt<D, BLOCK_Q, BLOCK_KV>(s_rmem[0], q_tile, k_tile, E());
        mtt__wgmma_commit();
        if (S::DROPOUT && D == 64) /* while the tensor cores work */
            mtt__draw_tiles<BLOCK_KV / 32, 2>(random, draws_at + k0, 32, bits_smem());
        mtt__wgmma_wait();
        mtt__wgmma_hold(s_rmem[0]);
        /* the online softmax */
        if (k0 + BLOCK_KV - 1 > row0 || (f.window && k0 <= row0 + 15 - f.window))
            mtt__flash_mask(s_rmem, row0 + lane / 4 - k0 - (lane & 3) * 2, 1, f.window);
        mtt__forward_rescale<S>(row_max, row_sum, o_rmem, s_rmem, f.scale_log2);
        mtt__forward_softmax(s_rmem, row_sum, row_max, f.scale_log2);
        /* P in 16 bits, dropped */
        uint32_t p_rmem[BLOCK_KV / 16][4], bytes[4];
        MTT__UNROLL for (int n = 0; n < BLOCK_KV / 4; n++) {
            const float *p = s_rmem[0][n / 2] + n % 2 * 2;
            p_rmem[n / 4][n % 4] = mtt__pack_pair(p[0], p[1], E());
            if (S::DROPOUT && n % 8 == 0) mtt__load_matrices(bytes, bits_smem() + n / 8 * 512);
            if (S::DROPOUT)
                p_rmem[n / 4][n % 4] &= mtt__keep_pair(bytes[n % 8 / 4 * 2 + n % 2], n % 4 / 2,
                                                       f.dropout.threshold * 0x10001u);
        }
        /* O += P V */
        mtt__wgmma_begin();
        mtt__wgmma_ab(o_rmem[0], p_rmem, v_tile, E());
        mtt__wgmma_commit();
        if (S::DROPOUT && D > 64) /* the next tile's: under the scores' product there are no registers */
            mtt__draw_tiles<BLOCK_KV / 32, 1>(random, draws_at + k0 - BLOCK_KV, 32, bits_smem());
        drawn = true;
        mtt__wgmma_wait();
        mtt__wgmma_hold(o_rmem[0]);
    }
    mtt__forward_store<S>(f, block.head, row0, o_rmem, row_max, row_sum);
#endif
}

/* ---- flash attention, backward ---- */

/* The sizes of mtt_k_flash_backward_wgmma. Each of two warpgroups has 64 of every 128 keys, dK and dV of
   which fill its registers, and DQ_COLUMNS of the columns of dQ. GROUPS: heads may share the keys. With
   dropout, 256 keys leave no registers for that. */
template <typename ELEMENT, int WIDTH, bool WITH_DROPOUT, bool WITH_GROUPS = true>
struct mtt__backward_wgmma_sizes {
    typedef ELEMENT E;
    static constexpr bool DROPOUT = WITH_DROPOUT, GROUPS = WITH_GROUPS;
    static constexpr int D = WIDTH, KEY_ROWS = DROPOUT && GROUPS ? 1 : 128 / D;
    static constexpr int BLOCK_Q = 64, BLOCK_KV = 128 * KEY_ROWS;
    static constexpr int THREADS = 256, MIN_BLOCKS = 1, DQ_COLUMNS = D / 2, SUMS = DQ_COLUMNS / 8;
    /* shared memory: K, V; two stages of Q, dO, stats; dS^T; random bits of each 128 keys */
    static constexpr int KV_BYTES = BLOCK_KV * D * 2, Q_BYTES = BLOCK_Q * D * 2, STAGE = 2 * Q_BYTES + 1024;
    static constexpr int S_AT = 2 * KV_BYTES + 2 * STAGE, BITS_AT = S_AT + BLOCK_KV * BLOCK_Q * 2;
    static constexpr int BITS_BYTES = 128 * BLOCK_Q;
    static constexpr int SHARED = BITS_AT + (DROPOUT ? KEY_ROWS * BITS_BYTES : 0) + 1024;
};

#if MTT__HOPPER
/* P = 2^(S scale_log2 - lse), keys by queries, in place of S; lse of the lane's queries is 32 bytes apart. */
template <int N> MTT__DEVICE void mtt__backward_p(float (&s)[N][4], uint32_t lse_smem, float scale_log2)
{
    float lse[2];
    MTT__UNROLL for (int n = 0; n < N; n++) {
        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                     : "=f"(lse[0]), "=f"(lse[1]) : "r"(lse_smem + n * 32) : "memory");
        MTT__UNROLL for (int e = 0; e < 4; e++) s[n][e] = mtt__exp2(fmaf(s[n][e], scale_log2, -lse[e & 1]));
    }
}

/* P and dS = P (dP - delta) as A of dV and dK. The dropped of P and dP are zeros. */
template <bool DROPOUT, int N, typename E>
MTT__DEVICE void mtt__backward_ds(uint32_t (&p_packed)[N / 2][4], uint32_t (&ds_packed)[N / 2][4],
                                  const float (&p)[N][4], const float (&dp)[N][4], uint32_t delta_smem, E,
                                  uint32_t bits_smem, uint32_t threshold)
{
    float delta[2];
    uint32_t bytes[4];
    MTT__UNROLL for (int n = 0; n < N; n++) {
        if (DROPOUT && n % 4 == 0) mtt__load_transposed(bytes, bits_smem + n / 4 * 512);
        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                     : "=f"(delta[0]), "=f"(delta[1]) : "r"(delta_smem + n * 32) : "memory");
        MTT__UNROLL for (int h = 0; h < 2; h++) {
            const float *x = p[n] + 2 * h, *y = dp[n] + 2 * h;
            float kept[2] = {x[0], x[1]}, ds[2] = {y[0] - delta[0], y[1] - delta[1]};
            if (DROPOUT)
                MTT__UNROLL for (int e = 0; e < 2; e++) {
                    const float z = mtt__keep_factor(bytes[n % 4], 2 * e + h, (float)threshold);
                    kept[e] *= z, ds[e] = fmaf(y[e], z, -delta[e]);
                }
            p_packed[n / 2][n % 2 * 2 + h] = mtt__pack_pair(kept[0], kept[1], E());
            ds_packed[n / 2][n % 2 * 2 + h] = mtt__pack_pair(x[0] * ds[0], x[1] * ds[1], E());
        }
    }
}

/* Heads in blocks of their own: adds the sums of dK and dV of the heads before and stores them, or hands them
   over. Through shared memory: beside dK and dV there are no registers for the sums before. */
template <class S>
MTT__DEVICE void mtt__backward_hand_over(const mtt__tiled_flash &f, const mtt__backward_at &at,
                                         const float (&dk)[S::KEY_ROWS][1][S::D / 8][4],
                                         const float (&dv)[S::KEY_ROWS][1][S::D / 8][4],
                                         unsigned char *shared)
{
    constexpr int SUMS = S::D / 8;
    static_assert(2 * S::KEY_ROWS * SUMS * 16 * S::THREADS <= S::SHARED, "there is room for dK and dV");
    float4 *const own = (float4 *)shared + threadIdx.x;
    __syncthreads(); /* all have read what is there */
    MTT__UNROLL for (int m = 0; m < S::KEY_ROWS; m++)
        MTT__UNROLL for (int n = 0; n < SUMS; n++) {
            const float *k = dk[m][0][n], *v = dv[m][0][n];
            own[(2 * m * SUMS + n) * S::THREADS] = make_float4(k[0], k[1], k[2], k[3]);
            own[((2 * m + 1) * SUMS + n) * S::THREADS] = make_float4(v[0], v[1], v[2], v[3]);
        }
#pragma unroll 1
    for (int piece = 0; piece < 2 * S::KEY_ROWS; piece++) {
        const int key = at.k0 + piece / 2 * 128 + mtt__backward_warp() * 16;
        float sums[1][SUMS][4];
        MTT__UNROLL for (int n = 0; n < SUMS; n++) {
            const float4 unit = own[(piece * SUMS + n) * S::THREADS];
            float *sum = sums[0][n];
            sum[0] = unit.x, sum[1] = unit.y, sum[2] = unit.z, sum[3] = unit.w;
        }
        if (!mtt__members_add<S, SUMS>(f, at, sums[0], piece)) continue;
        if (piece % 2) mtt__backward_store<S, MTT__PART_V, 1, S::D>(f, at, sums, key, 0, f.dropout.scale);
        else mtt__backward_store<S, MTT__PART_K, 1, S::D>(f, at, sums, key, 0, f.gradient_scale);
    }
}
#endif

/* Math:        P and dS again from Q, K, lse; dV += (P o Z)^T dO, dK += dS^T Q in registers; dQ += dS K,
                block after block. dS^T is, transposed and in shared memory, A of dQ
   Shapes:      qkv, d_qkv [B T, row of the view], d_out [B T, C] of 16-bit E; d_qkv in e5m2 beside d_qkv_t
                [row of the view, B T]; stats of mtt_k_flash_stats; S::D 64 or 128
   Launch:      a block of two warpgroups a tile of keys and head, by ticket, one a processor. A block has as
                many keys as its registers hold dK and dV of, 256 at S::D 64, so that fewer sums of dQ pass
                between blocks. Draws and exponentials run under dP's product, the next scores under the wait
                for dQ's sums. Shared memory, from a multiple of 1,024 bytes: K, V, two stages of Q, dO, lse
                and delta, dS^T, random bits
   Requires:    code for sm_90a (the kernel is empty otherwise); the ring and the ticket of
                mtt_k_flash_backward; with d_qkv_t, BF16 and T % 16 == 0
   Traffic:     K, V read once, Q and dO once a tile of keys (from L2); dQ's sums move through L2
   Determinism: a tile of dQ is summed in the order of rising keys, through the ring of mtt_k_flash_backward
   Reference:   mtt_k_flash_backward */
template <class S>
static __global__ void __launch_bounds__(S::THREADS, S::MIN_BLOCKS)
    mtt_k_flash_backward_wgmma(const mtt__tiled_flash f)
{
#if MTT__HOPPER
    typedef typename S::E E;
    constexpr int D = S::D, BLOCK_Q = S::BLOCK_Q, BLOCK_KV = S::BLOCK_KV, KEY_ROWS = S::KEY_ROWS;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ mtt__backward_block block;
    const uint32_t smem = (mtt__smem(shared) + 1023) & ~1023u, s_smem = smem + S::S_AT;
    const int lane = threadIdx.x & 31, warp = mtt__uniform((int)threadIdx.x / 32), warpgroup = warp / 4;
    const int T = (int)f.seq_len, stride = mtt__uniform_row(f.view), d_head = f.view.d_head;
    if (threadIdx.x == 0) mtt__backward_take<S>(f, &block);
    __syncthreads(); /* the block's work is known to all */
    mtt__backward_at at = {};
    at.block = &block, at.k0 = mtt__uniform(block.k0);
    const int first_tile = mtt__uniform(block.first_tile);
    const E *k_gmem = (const E *)f.qkv + mtt__key_row(block.head, at.k0, stride);
    const E *v_gmem = k_gmem + (int64_t)f.view.heads_kv * d_head;
    const auto stage_of = [&](int tile) { return smem + 2 * S::KV_BYTES + (tile & 1) * S::STAGE; };
    const auto copy = [&](int tile) {
        const int row = tile * BLOCK_Q, left = T - row, thread = threadIdx.x;
        const uint32_t to = stage_of(tile);
        const E *q_gmem = (const E *)block.q_gmem + (int64_t)row * stride;
        const E *do_gmem = (const E *)block.do_gmem + (int64_t)row * f.width;
        mtt__wgmma_copy<BLOCK_Q, D, S::THREADS>(to, q_gmem, stride, left, d_head);
        mtt__wgmma_copy<BLOCK_Q, D, S::THREADS>(to + S::Q_BYTES, do_gmem, (int)f.width, left, d_head);
        if (thread < 2 * BLOCK_Q) { /* lse, then delta; zeros past the end, as the rows of Q and dO */
            const float2 *stats = f.stats + block.local * f.seq_len + row + thread % BLOCK_Q;
            mtt__copy_async<4>(to + 2 * S::Q_BYTES + thread * 4, (const float *)stats + thread / BLOCK_Q,
                               thread % BLOCK_Q < left);
        }
        mtt__copy_commit();
    };
    mtt__wgmma_copy<BLOCK_KV, D, S::THREADS>(smem, k_gmem, stride, T - at.k0, d_head);
    mtt__wgmma_copy<BLOCK_KV, D, S::THREADS>(smem + S::KV_BYTES, v_gmem, stride, T - at.k0, d_head);
    copy(mtt__uniform(block.last_tile));

    const int column = warpgroup * S::DQ_COLUMNS;
    const uint32_t k_columns = mtt__wgmma_tile(smem + column / 64 * BLOCK_KV * 128 + column % 64 * 2, 0);
    const uint32_t ds_columns = mtt__wgmma_tile(s_smem, 0);
    uint32_t k_tile = mtt__wgmma_tile(smem + warpgroup * 64 * 128, 0); /* the warpgroup's first 64 keys */
    float dk_rmem[KEY_ROWS][1][D / 8][4] = {}, dv_rmem[KEY_ROWS][1][D / 8][4] = {};
    float s_rmem[1][BLOCK_Q / 8][4], dp_rmem[BLOCK_Q / 8][4];
    const auto score = [&](int tile, int m) { /* S of its m-th 64 keys */
        mtt__wgmma_begin();
        const uint32_t keys = k_tile + m * 128 * 128 / 16, queries = mtt__wgmma_tile(stage_of(tile), 0);
        mtt__wgmma_abt<D, BLOCK_KV, BLOCK_Q>(s_rmem[0], keys, queries, E());
        mtt__wgmma_commit();
    };
    const auto score_gradient = [&](int tile, int m) { /* dP of these */
        mtt__wgmma_begin();
        const uint32_t values = k_tile + (S::KV_BYTES + m * 128 * 128) / 16;
        const uint32_t gradients = mtt__wgmma_tile(stage_of(tile) + S::Q_BYTES, 0);
        mtt__wgmma_abt<D, BLOCK_KV, BLOCK_Q>(dp_rmem, values, gradients, E());
        mtt__wgmma_commit();
    };
    mtt__random random = {};
    if (S::DROPOUT) random = mtt__random_of(f.dropout);
    const uint32_t bits_smem = smem + S::BITS_AT + warp * (BLOCK_Q * 16) + lane * 16;
    const auto draw = [&](int tile, int rows) { /* for the warp's 16 of each 128 keys, transposed */
        const int64_t row = (int64_t)block.head.head * T + tile * BLOCK_Q + lane;
#pragma unroll 1
        for (int m = 0; m < rows; m++)
            mtt__draw_tiles<BLOCK_Q / 32, 2>(random, row * T + at.k0 + m * 128 + warp * 16, 32 * (int64_t)T,
                                             bits_smem + m * S::BITS_BYTES);
    };
    /* A tile of queries by the block's first 128 ROWS keys, whose first S is there. Numbers count 128 keys,
       VK is dV and dK, S' is of the next tile. With ROWS 1 the lines with S1 and VK1 drop out.

           begun        waits for     in flight then   under it
           dP0          dP0           -                copies, draws, P0
           S1 dP1 VK0   S1            dP1 VK0          dS0 to shared memory
                        dP1           VK0              P1
           VK1          -             VK0 VK1          dS1 to shared memory
           dQ           VK0 VK1       dQ               dQ's sums so far are loaded
           S'0          dQ            S'0              the block before hands over dQ
                        S'0           -                dQ is stored or handed over */
    const auto pass = [&](int tile, auto rows_of_128) {
        constexpr int ROWS = decltype(rows_of_128)::value;
        const int q0 = tile * BLOCK_Q;
        k_tile = mtt__opaque(k_tile); /* its descriptors are computed where they are used */
        const uint32_t q_columns = mtt__wgmma_tile(stage_of(tile), BLOCK_Q * 128);
        const uint32_t do_columns = q_columns + S::Q_BYTES / 16;
        const uint32_t lse_smem = stage_of(tile) + 2 * S::Q_BYTES + (lane & 3) * 8;
        uint32_t p_packed[ROWS][BLOCK_Q / 16][4], ds_packed[ROWS][BLOCK_Q / 16][4];
        score_gradient(tile, 0);
        __syncthreads(); /* the last tile's Q, dO and dS have been read */
        if (tile > first_tile) copy(tile - 1);
        if (S::DROPOUT) draw(tile, ROWS);
        MTT__UNROLL for (int m = 0; m < ROWS; m++) {
            const int k0 = at.k0 + m * 128;
            if (k0 + 127 > q0 || (f.window && k0 <= q0 + BLOCK_Q - 1 - f.window))
                mtt__flash_mask(s_rmem, q0 - k0 - warp * 16 - (lane / 4 - (lane & 3) * 2), -1, f.window);
            mtt__backward_p(s_rmem[0], lse_smem, f.scale_log2);
            if (m) mtt__wgmma_wait<1>(); /* dV and dK of the keys before may go on */
            else mtt__wgmma_wait();
            mtt__wgmma_hold(dp_rmem);
            mtt__backward_ds<S::DROPOUT>(p_packed[m], ds_packed[m], s_rmem[0], dp_rmem,
                                         lse_smem + BLOCK_Q * 4, E(), bits_smem + m * S::BITS_BYTES,
                                         f.dropout.threshold);
            if (m + 1 < ROWS) {
                score(tile, m + 1);
                score_gradient(tile, m + 1);
            }
            mtt__wgmma_begin();
            mtt__wgmma_ab(dv_rmem[m][0], p_packed[m], do_columns, E());
            mtt__wgmma_ab(dk_rmem[m][0], ds_packed[m], q_columns, E());
            mtt__wgmma_commit();
            MTT__UNROLL for (int n = 0; n < BLOCK_Q / 8; n += 2) {
                const uint32_t to = s_smem + (m * 128 + warp * 16) * 128 + mtt__lane_a<64>(lane);
                mtt__store_matrices(mtt__advance<64>(to, n), &ds_packed[m][n / 2][0],
                                    &ds_packed[m][n / 2][2]);
            }
            if (m + 1 < ROWS) {
                mtt__wgmma_wait<2>();
                mtt__wgmma_hold(s_rmem[0]);
            }
        }
        mtt__copy_wait();
        mtt__wgmma_publish();
        __syncthreads(); /* all of dS is written before any of it is read; the next tile has arrived */

        const mtt__dq_order order = mtt__dq_order_of<S>(f, at, q0);
        float dq_rmem[1][S::SUMS][4], sums[S::SUMS][4] = {};
        if (order.waits) mtt__sums_load<S::SUMS, S::THREADS>(sums, mtt__dq_sums<S>(f, at, tile));
        mtt__wgmma_begin();
        MTT__UNROLL for (int k = 0; k < ROWS * 8; k++)
            mtt__wgmma<true, true>(dq_rmem[0], mtt__wgmma_at(ds_columns, k * 2048),
                                   mtt__wgmma_at(k_columns, k * 2048), k > 0, E());
        mtt__wgmma_commit();
        mtt__wgmma_wait<1>();
        MTT__UNROLL for (int m = 0; m < KEY_ROWS; m++) {
            mtt__wgmma_hold(dv_rmem[m][0]);
            mtt__wgmma_hold(dk_rmem[m][0]);
        }
        score(tile > first_tile ? tile - 1 : tile, 0);
        if (order.waits) mtt__dq_await<S>(sums, f, at, tile, order);
        mtt__wgmma_wait<1>();
        mtt__wgmma_hold(dq_rmem[0]);
        MTT__UNROLL for (int n = 0; n < S::SUMS * 4; n++) dq_rmem[0][n / 4][n % 4] += sums[n / 4][n % 4];
        if (order.place == order.contributors - 1)
            mtt__backward_store<S, MTT__PART_Q, 1, S::DQ_COLUMNS>(f, at, dq_rmem, q0 + warp % 4 * 16, column,
                                                                  f.gradient_scale);
        if (order.hands_over)
            mtt__sums_store<S::SUMS, S::THREADS>(mtt__dq_sums<S>(f, at, tile), dq_rmem[0], order.number + 1);
        mtt__wgmma_wait();
        mtt__wgmma_hold(s_rmem[0]);
    };
    for (;;) { /* for each head that shares the keys */
        int tile = mtt__uniform(block.last_tile); /* the last tiles attend only the first 128 keys */
        mtt__copy_wait();
        mtt__wgmma_publish();
        __syncthreads(); /* K, V and the first tile are in shared memory */
        score(tile, 0);
        mtt__wgmma_wait();
        mtt__wgmma_hold(s_rmem[0]);
        for (; tile >= first_tile + KEY_ROWS * 2 - 2; tile--)
            pass(tile, std::integral_constant<int, KEY_ROWS>());
        for (; tile >= first_tile; tile--) pass(tile, std::integral_constant<int, 1>());
        if (!S::GROUPS || !mtt__backward_next(f, &block)) break;
        copy(mtt__uniform(block.last_tile));
    }
    if (S::GROUPS && f.share < f.members) {
        mtt__backward_hand_over<S>(f, at, dk_rmem, dv_rmem, shared);
        return;
    }
    MTT__UNROLL for (int m = 0; m < KEY_ROWS; m++) {
        const int key = at.k0 + m * 128 + warp * 16;
        mtt__backward_store<S, MTT__PART_K, 1, D>(f, at, dk_rmem[m], key, 0, f.gradient_scale);
        mtt__backward_store<S, MTT__PART_V, 1, D>(f, at, dv_rmem[m], key, 0, f.dropout.scale);
    }
#endif
}

/* ---- flash attention, launches ---- */

template <class S> static mtt_status mtt__hopper_forward_of(mtt__cuda *c, mtt__tiled_flash f)
{
    f.group = mtt__forward_group(f);
    return mtt__launch_shared(c, "flash", mtt_k_flash_forward_wgmma<S>,
                              mtt__blocks(f.seq_len, S::BLOCK_Q) * f.head_count, S::THREADS,
                              S::TILES + (S::DROPOUT ? S::BLOCK_Q * S::BLOCK_KV : 0) + 896, f);
}

/* With a window, or a short sequence, blocks are short and mostly wait for their first tiles: more and
   smaller blocks are faster then. For long sequences they would read K and V from L2 twice as often, but with
   dropout the larger tiles need more registers. */
template <typename E> static mtt_status mtt__hopper_forward(mtt__cuda *c, const mtt__tiled_flash &f)
{
#define MTT__RUN(...) return mtt__hopper_forward_of<mtt__forward_sizes<E, __VA_ARGS__>>(c, f)
    const bool small = f.window || f.seq_len <= 4096, keep = f.dropout.threshold == 0 /* all */;
    const int D = f.view.d_head;
    /*                              D BLOCK_Q BLOCK_KV ROW_TILES Q_HELD MIN_BLOCKS DROPOUT */
    if (D > 64 && keep)    MTT__RUN(128,    128,      64,        1, false,         2,   false);
    if (D > 64)            MTT__RUN(128,    128,      64,        1, false,         2,    true);
    if (!keep)             MTT__RUN( 64,     64,      64,        1, false,         4,    true);
    if (small)             MTT__RUN( 64,     64,      64,        1, false,         5,   false);
                           MTT__RUN( 64,    128,     128,        1, false,         2,   false);
#undef MTT__RUN
}

template <typename E, bool DROPOUT>
static mtt_status mtt__hopper_backward_of(mtt__cuda *c, const mtt_op *op, const mtt__tiled_flash &f)
{
    typedef mtt__backward_wgmma_sizes<E, 64, DROPOUT> D_64;
    typedef mtt__backward_wgmma_sizes<E, 128, DROPOUT> D_128;
    if (f.view.d_head > 64) return mtt__launch_backward<D_128>(c, op, mtt_k_flash_backward_wgmma<D_128>, f);
    if constexpr (DROPOUT)
        if (f.members == 1) {
            typedef mtt__backward_wgmma_sizes<E, 64, DROPOUT, false> ALONE;
            return mtt__launch_backward<ALONE>(c, op, mtt_k_flash_backward_wgmma<ALONE>, f);
        }
    return mtt__launch_backward<D_64>(c, op, mtt_k_flash_backward_wgmma<D_64>, f);
}

template <typename E>
static mtt_status mtt__hopper_backward(mtt__cuda *c, const mtt_op *op, const mtt__tiled_flash &f)
{
    if (f.dropout.threshold) return mtt__hopper_backward_of<E, true>(c, op, f);
    return mtt__hopper_backward_of<E, false>(c, op, f);
}

static mtt_status mtt__hopper_flash(mtt__cuda *c, const mtt_op *op)
{
    const mtt__tiled_flash f = mtt__tiled_forward_of(op);
    return mtt__by_16_bits(c, MTT_OPERANDS_OF(flash, op)->qkv,
                           [&](auto zero) { return mtt__hopper_forward<decltype(zero)>(c, f); });
}

static mtt_status mtt__hopper_flash_backward(mtt__cuda *c, const mtt_op *op)
{
    const mtt__tiled_flash f = mtt__tiled_backward_of(op);
    return mtt__by_16_bits(c, MTT_OPERANDS_OF(flash_backward, op)->qkv,
                           [&](auto zero) { return mtt__hopper_backward<decltype(zero)>(c, op, f); });
}

/* ---- linear and GELU in one kernel ---- */

/* A product with GELU or its gradient as its epilogue. A tensor map describes a matrix to the copy engine
   (PTX, tensor copies). The engine loads tiles into shared memory in wgmma's swizzle, with zeros outside the
   matrix, and stores tiles without what is outside. */
struct mtt__tile_arguments {
    CUtensorMap a, w, pre, out; /* x or dy [rows, k]; W [k, n], backward [n, k]; pre, and y or dx [rows, n] */
    const void *bias;           /* forward: [n] */
    int has_y;                  /* forward: 0 = makes only pre */
    float *sums;                /* backward: [rows / 64 rounded up, n], dx summed over 64 rows; or NULL */
    int rows, n, k;
    /* backward with operands in 8 bits: their scales; dx; transposes [n, padded] */
    const float *a_scale, *w_scale;
    mtt__eight dx, dx_t, gelu_t;
    int64_t padded;
};

/* Stages of 128 bytes of k in a ring. What the epilogue reads or writes passes through a ring of slots of 32
   columns, 64 rows for each warpgroup. */
enum { MTT__TILE_STAGES = 4, MTT__SIDE_SLOTS = 4, MTT__SIDE_PART = 64 * 32 * 2 };

/* In the place of a 16-bit type, backward: operands in 8 bits, pre in BF16. */
struct mtt__eights {};

/* GROUPS: warpgroups that multiply, 64 rows each. M, N: size of a tile. K: columns of a stage, 128 bytes.
   PARTS: of a tile's epilogue. R: type of pre. In 8 bits the epilogue takes longer than the product.
   So three warpgroups share a processor, to hide latencies, and a tile has half the columns, so that each
   thread has enough registers. */
template <typename E> struct mtt__tile_types {
    static constexpr bool EIGHT = std::is_same<E, mtt__eights>::value;
    static constexpr int GROUPS = EIGHT ? 3 : 2, THREADS = 128 * (GROUPS + 1), REGISTERS = EIGHT ? 160 : 240;
    static constexpr int M = 64 * GROUPS, N = EIGHT ? 128 : 256, K = EIGHT ? 128 : 64;
    static constexpr int PARTS = N / (EIGHT ? 64 : 32);
    /* shared memory: stages of A and W; slots; two parts of the bias; room to align it to 1,024 bytes */
    static constexpr int A_BYTES = M * 128, STAGE = A_BYTES + N * 128, SLOT = GROUPS * MTT__SIDE_PART;
    static constexpr int SIDE_AT = MTT__TILE_STAGES * STAGE, BIAS_AT = SIDE_AT + MTT__SIDE_SLOTS * SLOT;
    static constexpr int BIAS_BYTES = N * 2, SHARED = BIAS_AT + 2 * BIAS_BYTES + 1024;
    typedef typename std::conditional<EIGHT, __nv_bfloat16, E>::type R;
    typedef float sums[N / 8][4];    /* a lane's part of a tile */
    typedef uint32_t held[N / 8][2]; /* the same in 16 bits */
};

#if MTT__HOPPER

/* Barriers in shared memory count arrivals, and bytes that the copy engine has written. A wait names the
   parity of a barrier phase; the phase before the first one counts as done. */
struct mtt__tile_barriers {
    uint64_t full[MTT__TILE_STAGES], empty[MTT__TILE_STAGES];
    uint64_t side_full[MTT__SIDE_SLOTS], side_empty[MTT__SIDE_SLOTS];
};

MTT__DEVICE void mtt__barrier_init(uint64_t *barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 ::"r"(mtt__smem(barrier)), "r"(arrivals) : "memory");
}

MTT__DEVICE void mtt__barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mtt__smem(barrier)) : "memory");
}

MTT__DEVICE void mtt__barrier_expect(uint64_t *barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(mtt__smem(barrier)), "r"(bytes) : "memory");
}

MTT__DEVICE void mtt__barrier_wait(uint64_t *barrier, int parity)
{
    asm volatile("{ .reg .pred done;"
                 " again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }"
                 ::"r"(mtt__smem(barrier)), "r"(parity) : "memory");
}

/* Loads a box of elements that begins at (column, row); `barrier` counts its bytes. */
MTT__DEVICE void mtt__tensor_load(uint32_t to_smem, const CUtensorMap *map, uint64_t *barrier, int column,
                                  int row)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to_smem), "l"(map), "r"(mtt__smem(barrier)), "r"(column), "r"(row) : "memory");
}

/* Stores a box. One thread calls this, after mtt__wgmma_publish and a barrier of the threads that wrote. */
MTT__DEVICE void mtt__tensor_store(const CUtensorMap *map, uint32_t from_smem, int column, int row)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(map), "r"(from_smem), "r"(column), "r"(row) : "memory");
}

MTT__DEVICE void mtt__tensor_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until shared memory has been read for all but PENDING of the thread's groups of stores. */
template <int PENDING> MTT__DEVICE void mtt__tensor_wait(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* Where a tile begins. Tiles are ordered in groups of 16 rows of tiles: those worked on at the same time
   share rows of A and columns of W in L2. */
template <typename S> MTT__DEVICE int2 mtt__tile_place(const mtt__tile_arguments &o, int tile)
{
    const int rows = (o.rows + S::M - 1) / S::M;
    const int columns = (o.n + S::N - 1) / S::N;
    const int group = tile / (16 * columns), in_group = tile % (16 * columns);
    const int high = min(16, rows - 16 * group);
    return make_int2((16 * group + in_group % high) * S::M, in_group / high * S::N);
}

template <typename S> MTT__DEVICE int mtt__tile_count(const mtt__tile_arguments &o)
{
    return (o.rows + S::M - 1) / S::M * ((o.n + S::N - 1) / S::N);
}

/* Producer thread 1: loads A and W of all of the block's tiles, as far ahead as there are stages. */
template <typename E, bool BACKWARD>
MTT__DEVICE void mtt__tile_feed(const mtt__tile_arguments &o, mtt__tile_barriers *barriers, uint32_t smem)
{
    typedef mtt__tile_types<E> S;
    int step = 0;
    for (int tile = blockIdx.x; tile < mtt__tile_count<S>(o); tile += gridDim.x) {
        const int2 at = mtt__tile_place<S>(o, tile);
        for (int k = 0; k < o.k; k += S::K, step++) {
            const int stage = step % MTT__TILE_STAGES;
            const uint32_t a_smem = smem + stage * S::STAGE, w_smem = a_smem + S::A_BYTES;
            mtt__barrier_wait(&barriers->empty[stage], (step / MTT__TILE_STAGES & 1) ^ 1);
            mtt__barrier_expect(&barriers->full[stage], S::STAGE);
            mtt__tensor_load(a_smem, &o.a, &barriers->full[stage], k, at.x);
            if (BACKWARD) mtt__tensor_load(w_smem, &o.w, &barriers->full[stage], k, at.y);
            else
                for (int n = 0; n < S::N; n += 64)
                    mtt__tensor_load(w_smem + n * 128, &o.w, &barriers->full[stage], at.y + n, k);
        }
    }
}

/* Producer thread 2, forward: loads the tile's part of the bias. */
template <typename S>
MTT__DEVICE void mtt__tile_feed_bias(const mtt__tile_arguments &o, mtt__tile_barriers *barriers,
                                     uint32_t smem)
{
    int step = 0;
    for (int tile = blockIdx.x; tile < mtt__tile_count<S>(o); tile += gridDim.x, step++) {
        const int slot = step % 2, column = mtt__tile_place<S>(o, tile).y;
        const int bytes = min(S::N, o.n - column) * 2;
        mtt__barrier_wait(&barriers->side_empty[slot], (step / 2 & 1) ^ 1);
        mtt__barrier_expect(&barriers->side_full[slot], bytes);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(smem + S::BIAS_AT + slot * S::BIAS_BYTES),
                     "l"((const char *)o.bias + column * 2), "r"(bytes),
                     "r"(mtt__smem(&barriers->side_full[slot])) : "memory");
    }
}

/* Producer thread 2, backward: loads the tile's part of pre. */
template <typename S>
MTT__DEVICE void mtt__tile_feed_pre(const mtt__tile_arguments &o, mtt__tile_barriers *barriers, uint32_t side)
{
    int step = 0;
    for (int tile = blockIdx.x; tile < mtt__tile_count<S>(o); tile += gridDim.x) {
        const int2 at = mtt__tile_place<S>(o, tile);
        for (int n = 0; n < S::N; n += 32, step++) {
            const int slot = step % MTT__SIDE_SLOTS;
            mtt__barrier_wait(&barriers->side_empty[slot], (step / MTT__SIDE_SLOTS & 1) ^ 1);
            mtt__barrier_expect(&barriers->side_full[slot], S::SLOT);
            for (int group = 0; group < S::GROUPS; group++)
                mtt__tensor_load(side + slot * S::SLOT + group * MTT__SIDE_PART, &o.pre,
                                 &barriers->side_full[slot], at.y + n, at.x + 64 * group);
        }
    }
}

/* C += A W over the tile's k-th stage, for the warpgroup's 64 rows. Returns while the product runs. `step`
   counts stages over all tiles. */
template <typename E, bool BACKWARD>
MTT__DEVICE void mtt__tile_multiply(typename mtt__tile_types<E>::sums &c, mtt__tile_barriers *barriers,
                                    uint32_t smem, int warpgroup, int k, int &step)
{
    typedef mtt__tile_types<E> S;
    const int stage = step % MTT__TILE_STAGES;
    const uint32_t a_smem = smem + stage * S::STAGE;
    const uint32_t a = mtt__wgmma_tile(a_smem + warpgroup * 64 * 128, 0);
    const uint32_t w = mtt__wgmma_tile(a_smem + S::A_BYTES, 64 * 128);
    mtt__barrier_wait(&barriers->full[stage], step / MTT__TILE_STAGES & 1);
    mtt__wgmma_begin();
    MTT__UNROLL for (int j = 0; j < 4; j++)
        if constexpr (S::EIGHT) {
            MTT_IF_EIGHT(
                mtt__wgmma_eight(c, mtt__wgmma_at(a, j * 32), mtt__wgmma_at(w, j * 32), k > 0 || j > 0);)
        } else
            mtt__wgmma<false, !BACKWARD>(c, mtt__wgmma_at(a, j * 32),
                                         mtt__wgmma_at(w, BACKWARD ? j * 32 : j * 2048), k > 0 || j > 0, E());
    mtt__wgmma_commit();
    mtt__wgmma_wait<1>(); /* the stage before has been read */
    if (k > 0 && threadIdx.x % 128 == 0) mtt__barrier_arrive(&barriers->empty[(step - 1) % MTT__TILE_STAGES]);
    step++;
}

/* Rounds a tile's results to 16 bits, with the scales of 8-bit operands, forward with the bias. This frees
   the accumulators for the next tile. `tiles`: number of tiles before it. */
template <typename E, bool BACKWARD>
MTT__DEVICE void mtt__tile_hold(typename mtt__tile_types<E>::held &held,
                                const typename mtt__tile_types<E>::sums &c,
                                const mtt__tile_arguments &o, mtt__tile_barriers *barriers, uint32_t smem,
                                int tiles)
{
    typedef mtt__tile_types<E> S;
    typedef typename S::R R;
    const float scale = S::EIGHT ? (o.a_scale ? *o.a_scale : 1.0f) * *o.w_scale : 1.0f;
    const int lane = threadIdx.x & 31, slot = tiles % 2;
    const uint32_t bias_smem = smem + S::BIAS_AT + slot * S::BIAS_BYTES + (lane & 3) * 4;
    if (!BACKWARD) mtt__barrier_wait(&barriers->side_full[slot], tiles / 2 & 1);
    MTT__UNROLL for (int n = 0; n < S::N / 8; n++) {
        float2 b = make_float2(0.0f, 0.0f);
        if (!BACKWARD) {
            uint32_t bias;
            asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bias) : "r"(bias_smem + n * 16) : "memory");
            b = mtt__unpack_pair(bias, R());
        }
        held[n][0] = mtt__pack_pair(fmaf(c[n][0], scale, b.x), fmaf(c[n][1], scale, b.y), R());
        held[n][1] = mtt__pack_pair(fmaf(c[n][2], scale, b.x), fmaf(c[n][3], scale, b.y), R());
    }
    __syncwarp(); /* the warp has read the bias */
    if (!BACKWARD && lane == 0) mtt__barrier_arrive(&barriers->side_empty[slot]);
}

/* Stores a part, 32 columns, of pre, which is held, and of y = GELU(pre). Each warp stores its own 16
   rows. */
template <typename E>
MTT__DEVICE void mtt__tile_gelu(const typename mtt__tile_types<E>::held &held, const mtt__tile_arguments &o,
                                uint32_t side, int warp, int2 at, int part)
{
    const int lane = threadIdx.x & 31;
    const uint32_t pre_smem = side + warp * 4096 + part % 2 * 2048, y_smem = pre_smem + 1024;
    const uint32_t lane_at = mtt__lane_a<32>(lane);
    if (lane == 0) mtt__tensor_wait<1>();
    __syncwarp(); /* two of the four buffers are free */
    MTT__UNROLL for (int n = 0; n < 4; n += 2) {
        const uint32_t(*pre)[2] = held + part * 4 + n;
        mtt__store_matrices(mtt__advance<32>(pre_smem + lane_at, n), pre[0], pre[1]);
        if (!o.has_y) continue;
        uint32_t y[4];
        MTT__UNROLL for (int e = 0; e < 4; e++) {
            const float2 x = mtt__unpack_pair(pre[e / 2][e % 2], E());
            y[e] = mtt__pack_pair(x.x * mtt__gelu_gate<E>(x.x), x.y * mtt__gelu_gate<E>(x.y), E());
        }
        mtt__store_matrices(mtt__advance<32>(y_smem + lane_at, n), &y[0], &y[2]);
    }
    mtt__wgmma_publish();
    __syncwarp(); /* all of the warp's rows are written before one lane stores them */
    if (lane == 0) {
        mtt__tensor_store(&o.pre, pre_smem, at.y + part * 32, at.x + warp * 16);
        if (o.has_y) mtt__tensor_store(&o.out, y_smem, at.y + part * 32, at.x + warp * 16);
        mtt__tensor_commit();
    }
}

/* A part of dx = dy W^T, which is held, times GELU'(pre), in the place of pre in shared memory. Sums of its
   columns over the warpgroup's 64 rows are the product of ones and dx on tensor cores, 8 columns a warp.
   `step` counts parts over all tiles. */
template <typename E>
MTT__DEVICE void mtt__tile_gelu_backward(const typename mtt__tile_types<E>::held &held,
                                         const mtt__tile_arguments &o, mtt__tile_barriers *barriers,
                                         uint32_t side, int warpgroup, int2 at, int part, int &step)
{
    typedef mtt__tile_types<E> S;
    const int lane = threadIdx.x & 31, warp = mtt__uniform((int)threadIdx.x / 32) % 4;
    const int row0 = at.x + warpgroup * 64;
    const int slot = step % MTT__SIDE_SLOTS, column = at.y + part * 32 + warp * 8 + lane * 2;
    const uint32_t one = mtt__pack_pair(1.0f, 1.0f, E()), ones[4] = {one, one, one, one};
    const uint32_t dx_smem = side + slot * S::SLOT + warpgroup * MTT__SIDE_PART;
    const uint32_t lane_smem = dx_smem + warp * 16 * 64 + mtt__lane_a<32>(lane);
    float sum[4] = {};
    mtt__barrier_wait(&barriers->side_full[slot], step / MTT__SIDE_SLOTS & 1);
    MTT__UNROLL for (int n = 0; n < 4; n += 2) {
        uint32_t pre[4], dx[4];
        mtt__load_matrices(pre, mtt__advance<32>(lane_smem, n));
        MTT__UNROLL for (int e = 0; e < 4; e++) {
            const float2 x = mtt__unpack_pair(pre[e], E());
            const float2 dy = mtt__unpack_pair(held[part * 4 + n + e / 2][e % 2], E());
            dx[e] = mtt__pack_pair(dy.x * mtt__gelu_slope<E>(x.x), dy.y * mtt__gelu_slope<E>(x.y), E());
        }
        mtt__store_matrices(mtt__advance<32>(lane_smem, n), &dx[0], &dx[2]);
    }
    mtt__wgmma_publish();
    /* the warpgroup's dx is written before it is stored and summed */
    asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
    if (threadIdx.x % 128 == 0) {
        mtt__tensor_store(&o.out, dx_smem, at.y + part * 32, row0);
        mtt__tensor_commit();
    }
    MTT__UNROLL for (int row = 0; row < 64; row += 32) {
        uint32_t b[4];
        mtt__load_transposed(b, dx_smem + mtt__chunk<32>(row + lane, warp));
        mtt__mma(sum, ones, b[0], b[1], E());
        mtt__mma(sum, ones, b[2], b[3], E());
    }
    if (o.sums && lane < 4 && column < o.n && row0 < o.rows)
        *(float2 *)(o.sums + (int64_t)(row0 / 64) * o.n + column) = make_float2(sum[0], sum[1]);
    if (threadIdx.x % 128 == 0) mtt__tensor_wait<0>();
    __syncwarp(); /* the warp and its store have read dx */
    if (lane == 0) mtt__barrier_arrive(&barriers->side_empty[slot]);
    step++;
}

#ifndef MTT_NO_FP8
/* ---- the same with operands in 8 bits: parts of 64 columns ---- */

/* Stores a warp's 16 rows of 32 columns in 8 bits. Of each 8 columns the lane has a word: two of one row,
   then the same two of the eighth row after it. A quad's words make 32 bytes of both rows. */
MTT__DEVICE void mtt__tile_store_eight(const uint32_t words[4], const mtt__tile_arguments &o, int row0,
                                       int column)
{
    const int lane = threadIdx.x & 31, quad = lane & 3, row = row0 + lane / 4;
    uint32_t v[4] = {words[0], words[1], words[2], words[3]};
    uint8_t *const to = (uint8_t *)o.dx.data + (int64_t)row * o.n + column + quad * 8;
    mtt__transpose_quad(v, quad);
    if (column + quad * 8 >= o.n) return;
    if (row < o.rows)
        *(uint2 *)to = make_uint2(__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[2], v[3], 0x5410));
    if (row + 8 < o.rows)
        *(uint2 *)(to + 8 * (int64_t)o.n) =
            make_uint2(__byte_perm(v[0], v[1], 0x7632), __byte_perm(v[2], v[3], 0x7632));
}

/* Four matrices of 8 x 8 16-bit elements, each transposed. */
MTT__DEVICE void mtt__store_transposed(uint32_t to_smem, const uint32_t r[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(to_smem), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

/* A part of dx in e5m2 and of GELU(pre) in e4m3, both transposed, dx also as it is. Transposes pass through
   the two slots of pre: 64 bytes for each of 64 columns, in the first slot of dx, in the other one of GELU. A
   warp's 16 rows are 16 bytes of a column. They come in pairs of a row and the eighth after it, which the
   reader puts in order. */
MTT__DEVICE void mtt__tile_gelu_backward_eight(const mtt__tile_types<mtt__eights>::held &held,
                                               const mtt__tile_arguments &o, mtt__tile_barriers *barriers,
                                               uint32_t side, int warpgroup, int2 at, int part, int &step)
{
    typedef mtt__tile_types<mtt__eights> S;
    typedef S::R R;
    const int lane = threadIdx.x & 31, warp = mtt__uniform((int)threadIdx.x / 32) % 4;
    const int row0 = at.x + warpgroup * 64, column = at.y + part * 64, slot = step % MTT__SIDE_SLOTS;
    const uint32_t smem = side + slot * S::SLOT + warpgroup * MTT__SIDE_PART;
    const float scale = mtt__scale_of(o.gelu_t);
    uint32_t words[2][8]; /* of dx, of GELU */
    /* dx and GELU in 8 bits */
    MTT__UNROLL for (int n = 0; n < 8; n += 2) {
        const uint32_t from = smem + n / 4 * S::SLOT + warp * 16 * 64 + mtt__lane_a<32>(lane);
        uint32_t pre[4];
        float v[8], u[8];
        if (n % 4 == 0)
            mtt__barrier_wait(&barriers->side_full[slot + n / 4], step / MTT__SIDE_SLOTS & 1);
        mtt__load_matrices(pre, mtt__advance<32>(from, n % 4));
        MTT__UNROLL for (int e = 0; e < 4; e++) {
            const float2 x = mtt__unpack_pair(pre[e], R());
            const float2 dy = mtt__unpack_pair(held[part * 8 + n + e / 2][e % 2], R());
            const float s = mtt__gelu_gate<R>(x.x), t = mtt__gelu_gate<R>(x.y);
            v[2 * e] = dy.x * mtt__gelu_slope_of(x.x, s);
            v[2 * e + 1] = dy.y * mtt__gelu_slope_of(x.y, t);
            u[2 * e] = x.x * s;
            u[2 * e + 1] = x.y * t;
        }
        const uint2 dx = mtt__pack_eight<mtt__e5m2>(v, 1.0f), gelu = mtt__pack_eight<mtt__e4m3>(u, scale);
        words[0][n] = dx.x, words[0][n + 1] = dx.y;
        words[1][n] = gelu.x, words[1][n + 1] = gelu.y;
    }
    /* store rows of dx */
    mtt__tile_store_eight(words[0], o, row0 + warp * 16, column);
    mtt__tile_store_eight(words[0] + 4, o, row0 + warp * 16, column + 32);
    /* store columns of both, through shared memory */
    MTT__UNROLL for (int n = 0; n < 16; n++)
        words[n / 8][n % 8] = __byte_perm(words[n / 8][n % 8], 0, 0x3120);
    asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory"); /* all warps have read pre */
    MTT__UNROLL for (int i = 0; i < 4; i++)
        mtt__store_transposed(smem + i / 2 * S::SLOT + (lane + i % 2 * 32) * 64 +
                                  (warp ^ (lane >> 1 & 3)) * 16, words[i / 2] + i % 2 * 4);
    asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory"); /* both transposes are there */
    const int chunk = threadIdx.x & 3, row = row0 + chunk * 16;
    MTT__UNROLL for (int i = 0; i < 4; i++) {
        const int j = threadIdx.x % 128 / 4 + i % 2 * 32;
        const uint32_t from = smem + i / 2 * S::SLOT + j * 64 + (chunk ^ (j >> 1 & 3)) * 16;
        uint8_t *const out = (uint8_t *)(i / 2 ? o.gelu_t : o.dx_t).data;
        uint32_t w[4];
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(from) : "memory");
        if (out && column + j < o.n && row < o.padded)
            *(uint4 *)(out + (int64_t)(column + j) * o.padded + row) =
                make_uint4(__byte_perm(w[0], w[1], 0x6420), __byte_perm(w[2], w[3], 0x6420),
                           __byte_perm(w[0], w[1], 0x7531), __byte_perm(w[2], w[3], 0x7531));
    }
    mtt__wgmma_publish(); /* before the copy engine writes the slots again */
    __syncwarp(); /* the warp has read its part */
    if (lane == 0) {
        mtt__barrier_arrive(&barriers->side_empty[slot]);
        mtt__barrier_arrive(&barriers->side_empty[slot + 1]);
    }
    step += 2;
}
#endif /* MTT_NO_FP8 */

#endif

/* Math:        forward: pre = x W + b, y = GELU(pre) if wanted. Backward: dx = (dy W^T) GELU'(pre), sums_i =
                sum of dx over 64 rows from row 64 i. Backward with operands in 8 bits: dx in e5m2, and dx and
                GELU(pre), in e4m3, transposed; no sums
   Shapes:      x [rows, k], W [k, n], b [n], pre, y [rows, n]; dy [rows, k], W [n, k], dx [rows, n], sums
                [rows / 64 rounded up, n] float; transposes [n, padded]
   Launch:      a block of three warpgroups a processor, which works on tile after tile. Two warpgroups,
                in 8 bits three, multiply 64 rows each, while they compute the epilogue of the tile before.
                Two threads of another one feed them. mtt__tile_types::SHARED bytes
   Requires:    code for sm_90a (otherwise the kernel is empty and has no static shared memory); n and k
                multiples of 8, in 8 bits of 16, 16-byte aligned matrices; results do not overlap operands
   Traffic:     A and W once a tile from L2; pre and y written once, or pre read and dx written once
   Determinism: k in order, one writer of each result, sums in a fixed order
   Reference:   mtt__cpu_linear_gelu, mtt__cpu_linear_backward_gelu */
template <typename E, bool BACKWARD>
static __global__ void __launch_bounds__(mtt__tile_types<E>::THREADS, 1)
    mtt_k_linear_gelu(const __grid_constant__ mtt__tile_arguments o)
{
#if MTT__HOPPER
    typedef mtt__tile_types<E> S;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ mtt__tile_barriers barriers;
    const uint32_t smem = (mtt__smem(shared) + 1023) & ~1023u, side = smem + S::SIDE_AT;
    const int warpgroup = mtt__uniform((int)threadIdx.x / 128), warp = mtt__uniform((int)threadIdx.x / 32);
    int step = 0, side_step = 0;
    int2 at = make_int2(0, 0);
    typename S::held held;
    /* set the barriers up */
    if (threadIdx.x == 0) {
        for (int i = 0; i < MTT__TILE_STAGES; i++) {
            mtt__barrier_init(&barriers.full[i], 1);
            mtt__barrier_init(&barriers.empty[i], S::GROUPS); /* a thread of each warpgroup */
        }
        for (int i = 0; i < MTT__SIDE_SLOTS; i++) {
            mtt__barrier_init(&barriers.side_full[i], 1);
            mtt__barrier_init(&barriers.side_empty[i], 4 * S::GROUPS); /* a thread of each warp */
        }
        asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
    }
    __syncthreads(); /* barriers are ready */
    /* producers */
    if (warpgroup == S::GROUPS) {
        /* 24 registers leave most to the others, which need 128 for a tile and 64 for the one before, or 64
           and 32 */
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == S::GROUPS * 128) mtt__tile_feed<E, BACKWARD>(o, &barriers, smem);
        if (threadIdx.x == S::GROUPS * 128 + 32) {
            if (BACKWARD) mtt__tile_feed_pre<S>(o, &barriers, side);
            else mtt__tile_feed_bias<S>(o, &barriers, smem);
        }
        return;
    }
    /* consumers: the product of a tile, under it the epilogue of the tile before */
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::REGISTERS));
    for (int tile = blockIdx.x, tiles = 0;; tile += gridDim.x, tiles++) {
        const int stages = tile < mtt__tile_count<S>(o) ? (o.k + S::K - 1) / S::K : 0;
        typename S::sums c;
        int k = 0;
        MTT__UNROLL for (int part = 0; part < S::PARTS; part++) { /* of the tile before */
            #pragma unroll 1
            for (; k * S::PARTS < stages * (part + 1); k++)
                mtt__tile_multiply<E, BACKWARD>(c, &barriers, smem, warpgroup, k, step);
            if (tiles == 0) continue;
            if constexpr (BACKWARD && S::EIGHT) {
                MTT_IF_EIGHT(
                    mtt__tile_gelu_backward_eight(held, o, &barriers, side, warpgroup, at, part, side_step);)
            } else if constexpr (BACKWARD)
                mtt__tile_gelu_backward<E>(held, o, &barriers, side, warpgroup, at, part, side_step);
            else mtt__tile_gelu<E>(held, o, side, warp, at, part);
        }
        mtt__wgmma_wait();
        mtt__wgmma_hold(c);
        if (stages == 0) break;
        if (threadIdx.x % 128 == 0) mtt__barrier_arrive(&barriers.empty[(step - 1) % MTT__TILE_STAGES]);
        mtt__tile_hold<E, BACKWARD>(held, c, o, &barriers, smem, tiles);
        at = mtt__tile_place<S>(o, tile);
    }
    if ((threadIdx.x & 31) == 0) mtt__tensor_wait<0>(); /* shared memory stays until it is read */
#endif
}

/* The tensor map of a row-major matrix in boxes of 128 bytes, for wgmma, or of 64. */
static mtt_status mtt__tile_map(mtt__cuda *c, CUtensorMap *map, const mtt_tensor *t, int64_t first_row,
                                int64_t rows, int box_columns, int box_rows)
{
    const int bytes = mtt__element_bytes(t->dtype);
    const cuuint64_t shape[2] = {(cuuint64_t)mtt__width(t), (cuuint64_t)rows};
    const cuuint64_t stride[1] = {shape[0] * (cuuint64_t)bytes};
    const cuuint32_t box[2] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows}, steps[2] = {1, 1};
    char *const data = (char *)t->data + (size_t)first_row * stride[0];
    const CUtensorMapDataType type = bytes == 1                 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                     : t->dtype == MTT_F16_BITS ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const CUtensorMapSwizzle swizzle =
        box_columns * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
    const CUresult error =
        c->encode(map, type, 2, data, shape, stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (error == CUDA_SUCCESS) return MTT_OK;
    return mtt__cuda_fail(c->env, MTT_E_DEVICE, "CUDA device %d: no tensor map of %s (error %d)", c->device,
                          t->name, (int)error);
}

/* `rows` rows from `first_row`; sums of 64 rows each. */
template <typename E, bool BACKWARD>
static mtt_status mtt__launch_tiles(mtt__cuda *c, const mtt_tensor *a, const mtt_tensor *w,
                                    const mtt_tensor *bias, const mtt_tensor *pre, const mtt_tensor *y,
                                    int64_t first_row, int64_t rows, float *sums,
                                    const mtt_tensor *dx_t = NULL, const mtt_tensor *gelu_t = NULL)
{
    typedef mtt__tile_types<E> S;
    const mtt_tensor *out = y ? y : pre;
    mtt__tile_arguments o;
    mtt_status status;
    int64_t tiles;
    memset(&o, 0, sizeof(o));
    if (S::EIGHT) {
        MTT_IF_EIGHT(o.a_scale = mtt__inverse_of(a), o.w_scale = mtt__inverse_of(w);)
        o.dx = mtt__eight_of(y), o.dx_t = mtt__eight_of(dx_t), o.gelu_t = mtt__eight_of(gelu_t);
        o.padded = dx_t ? mtt__width(dx_t) : 0;
    }
    o.bias = bias ? bias->data : NULL;
    o.has_y = y != NULL;
    o.sums = sums;
    o.rows = (int)rows;
    o.n = (int)mtt__width(out);
    o.k = (int)mtt__width(a);
    tiles = (int64_t)mtt__blocks(rows, S::M) * mtt__blocks(o.n, S::N);
    status = mtt__tile_map(c, &o.a, a, first_row, rows, S::K, S::M);
    if (status == MTT_OK)
        status = mtt__tile_map(c, &o.w, w, 0, mtt__rows(w), S::K, BACKWARD ? S::N : S::K);
    if (status == MTT_OK) status = mtt__tile_map(c, &o.pre, pre, first_row, rows, 32, BACKWARD ? 64 : 16);
    if (status == MTT_OK && !S::EIGHT)
        status = mtt__tile_map(c, &o.out, out, first_row, rows, 32, BACKWARD ? 64 : 16);
    if (status != MTT_OK) return status;
    return mtt__launch_shared(c, BACKWARD ? "linear_backward_gelu" : "linear_gelu",
                              mtt_k_linear_gelu<E, BACKWARD>, (unsigned)mtt__min(tiles, c->processors),
                              S::THREADS, S::SHARED, o);
}

/* In slabs of rows whose sums the workspace holds. */
template <typename E> static mtt_status mtt__linear_backward_gelu(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_linear_backward_gelu *o = MTT_OPERANDS_OF(linear_backward_gelu, op);
    const int64_t n = mtt__width(o->dx), rows = mtt__rows(o->dx), pair = (int64_t)mtt__op_scratch(op);
    const int64_t fit = pair ? (int64_t)op->workspace->bytes / pair * mtt__tile_types<E>::M : rows;
    const int64_t slab = mtt__min(rows, fit);
    void *scratch = NULL;
    mtt_status status = pair ? mtt__scratch(c, op, (size_t)pair, &scratch) : MTT_OK;
    for (int64_t first = 0; first < rows && status == MTT_OK; first += slab) {
        const int64_t count = mtt__min(slab, rows - first), slices = (count + 63) / 64;
        status = mtt__launch_tiles<E, true>(c, o->dy, o->weight, NULL, o->pre, o->dx, first, count,
                                            (float *)scratch);
        if (status == MTT_OK && o->d_bias)
            status = mtt__sum_slices<float>(c, scratch, slices, n, 1, slices, mtt__at<float>(o->d_bias),
                                            first > 0);
    }
    return status;
}

/* The kernel always adds a bias. For models without one it gets zeros. */
static mtt_status mtt__hopper_linear_gelu(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_linear_gelu *o = MTT_OPERANDS_OF(linear_gelu, op);
    const int64_t rows = mtt__rows(o->pre);
    mtt_tensor bias = o->bias ? *o->bias : *op->workspace;
    if (!o->bias) {
        mtt_status status = mtt__scratch(c, op, mtt__op_scratch(op), &bias.data);
        if (status == MTT_OK)
            status = mtt__checked(c, cudaMemsetAsync(bias.data, 0, mtt__op_scratch(op), c->stream), "memset");
        if (status != MTT_OK) return status;
    }
    return mtt__by_16_bits(c, o->x, [&](auto zero) {
        typedef decltype(zero) E;
        return mtt__launch_tiles<E, false>(c, o->x, o->weight, &bias, o->pre, o->y, 0, rows, NULL);
    });
}

static mtt_status mtt__hopper_linear_backward_gelu(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_linear_backward_gelu *o = MTT_OPERANDS_OF(linear_backward_gelu, op);
    MTT_IF_EIGHT(if (o->dx_t) return mtt__launch_tiles<mtt__eights, true>(
        c, o->dy, o->weight, NULL, o->pre, o->dx, 0, mtt__rows(o->dx), NULL, o->dx_t, o->y_t);)
    return mtt__by_16_bits(c, o->dy,
                           [&](auto zero) { return mtt__linear_backward_gelu<decltype(zero)>(c, op); });
}

/* ---- the loss in one pass: a row of logits in the shared memory of a cluster ---- */

/* Blocks of a cluster read and write each other's shared memory. Before sm_90 a block is alone. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
MTT__DEVICE int mtt__cluster_blocks(void)
{
    int blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}

MTT__DEVICE int mtt__cluster_rank(void)
{
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* Stores into block `rank`, at the place that `at` has here. */
MTT__DEVICE void mtt__cluster_store(float2 *at, int rank, float2 value)
{
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(mtt__smem(at)), "r"(rank));
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};"
                 ::"r"(there), "f"(value.x), "f"(value.y) : "memory");
}

/* The two halves of a barrier of all threads of a cluster: who has waited sees what all stored before they
   arrived. */
MTT__DEVICE void mtt__cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

MTT__DEVICE void mtt__cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#else
MTT__DEVICE int mtt__cluster_blocks(void) { return 1; }
MTT__DEVICE int mtt__cluster_rank(void) { return 0; }
MTT__DEVICE void mtt__cluster_store(float2 *at, int, float2 value) { *at = value; }
MTT__DEVICE void mtt__cluster_arrive(void) {}
MTT__DEVICE void mtt__cluster_wait(void) { __syncthreads(); }
#endif

/* The largest of eight logits. */
MTT__DEVICE float mtt__vector_max(const mtt__vector<float> &x)
{
    float most = x.v[0];
    MTT__UNROLL for (int k = 1; k < 8; k++) most = fmaxf(most, x.v[k]);
    return most;
}

MTT__DEVICE float mtt__vector_max(const mtt__vector<__nv_bfloat16> &x)
{
#if MTT__TURING
    return mtt__to_float(x.v[0]); /* never runs; CUDA 12.1 has no __hmax2 for BF16 there */
#else
    const __nv_bfloat162 *pairs = reinterpret_cast<const __nv_bfloat162 *>(&x);
    float2 most = __bfloat1622float2(__hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3])));
    return fmaxf(most.x, most.y);
#endif
}

#ifndef MTT_NO_FP16
MTT__DEVICE float mtt__vector_max(const mtt__vector<__half> &x)
{
    const __half2 *pairs = reinterpret_cast<const __half2 *>(&x);
    float2 most = __half22float2(__hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3])));
    return fmaxf(most.x, most.y);
}
#endif

/* Threads of a block, packs of 8 logits that a thread has of a row at most, rows in shared memory, and blocks
   of a cluster at most. */
enum { MTT__LOSS_THREADS = 640, MTT__LOSS_PACKS = 5, MTT__LOSS_STAGES = 3, MTT__CLUSTER = 8 };

/* Math:        lse = log sum e^x over V classes, out = {lse - x[target], x[target] is the largest, lse}, then
                x = (e^(x - lse) - [j = target]) factor; sums[c][j] = sum of cluster c's gradients of column
                j, if sums are wanted
   Shapes:      x [rows, Vp] T; targets [rows] int32; out [rows, 3] float; sums [clusters, Vp] float
   Launch:      a cluster of 1 to 8 blocks of 640 threads has rows c, c + clusters, ... and divides them by
                columns. A block's part of three rows is in shared memory, its columns' sums are in registers.
                A row is copied while the two before it are computed. Blocks exchange its largest logit and
                sum of powers while they write the gradients of the row before
   Requires:    Vp a multiple of 8, at most 25,600 times the blocks of a cluster; more than one block from
                sm_90 up
   Traffic:     x read and written once
   Determinism: rows of a cluster in order; (largest, sum) of all warps joined in a fixed order
   Reference:   mtt__row_loss, mtt__row_gradient */
template <class T>
static __global__ void __launch_bounds__(MTT__LOSS_THREADS, 1)
    mtt_k_loss_rows(T *logits, const int32_t *targets, float *out, float *sums, const mtt_control *control,
                    const mtt_counters *counters, int classes, int width, int rows)
{
    enum { WARPS = MTT__LOSS_THREADS / 32 };
    extern __shared__ uint4 staged[];
    /* of even and odd rows: largest logit, sum of e^(logit - largest) */
    __shared__ float2 warp_parts[2][MTT__CLUSTER * WARPS];
    const int blocks = mtt__cluster_blocks(), rank = mtt__cluster_rank(), lane = threadIdx.x % 32;
    const int packs_per_block = (width / 8 + blocks - 1) / blocks, first_pack = rank * packs_per_block;
    const int packs_here = min(packs_per_block, width / 8 - first_pack); /* none or less in the last block */
    const int clusters = gridDim.x / blocks, cluster = blockIdx.x / blocks;
    const int count = (rows - cluster + clusters - 1) / clusters;
    const float factor = mtt__loss_factor(control, counters);
    const int64_t next = (int64_t)clusters * width;
    float column[MTT__LOSS_PACKS][8] = {};
    T *x = logits + (int64_t)cluster * width + first_pack * 8, *smem = reinterpret_cast<T *>(staged);
    int target = targets[cluster], target_ahead = target, last_pack = -1;
#define MTT__EACH_PACK                                                                                      \
    _Pragma("unroll") for (int p = 0, pack = threadIdx.x; p < MTT__LOSS_PACKS && pack < packs_here;         \
                           p++, pack += MTT__LOSS_THREADS)
    MTT__EACH_PACK
        if ((first_pack + pack) * 8 + 8 > classes) last_pack = pack; /* with padding: one a thread at most */
    /* Each thread reads only its own copies, so stages need no barrier. */
    auto copy = [&](int i) {
        T *row = smem + i % MTT__LOSS_STAGES * packs_per_block * 8;
        if (i < count) MTT__EACH_PACK
            for (int part = 0; part < 8; part += 16 / sizeof(T))
                mtt__copy_async(mtt__smem(row + pack * 8 + part), x + i * next + pack * 8 + part, true);
        mtt__copy_commit();
    };
    auto measure = [&](int i) { /* this warp's part of row i, stored in all blocks */
        T *row = smem + i % MTT__LOSS_STAGES * packs_per_block * 8;
        float v[8], most = -3.4e38f, sum = 0;
        for (int j = last_pack * 8; last_pack >= 0 && j < last_pack * 8 + 8; j++)
            if (first_pack * 8 + j >= classes) row[j] = mtt__from_float<T>(-INFINITY); /* its power is 0 */
        MTT__EACH_PACK most = fmaxf(most, mtt__vector_max(mtt__load_vector(row + pack * 8)));
        most = mtt__reduce<mtt__maximum, 32>(most, (float *)NULL);
        MTT__EACH_PACK {
            mtt__read_floats(row + pack * 8, v);
            MTT__UNROLL for (int k = 0; k < 8; k++) sum += mtt__exp_from<T>(v[k], most, 1.0f);
        }
        sum = mtt__reduce<mtt__plus, 32>(sum, (float *)NULL);
        if (!(most > -3.4e38f)) sum = 0.0f; /* a warp without a class */
        float2 *const part = &warp_parts[i % 2][rank * WARPS + threadIdx.x / 32];
        if (lane < blocks) mtt__cluster_store(part, lane, make_float2(most, sum));
        mtt__cluster_arrive();
    };
    mtt__cluster_arrive();
    copy(0);
    copy(1);
    mtt__cluster_wait(); /* all blocks have begun before one stores into another */
    mtt__copy_wait<1>();
    measure(0);
    for (int i = 0; i < count; i++, target = target_ahead) {
        const T *from = smem + i % MTT__LOSS_STAGES * packs_per_block * 8;
        const float2 *parts = warp_parts[i % 2];
        T *to = x + i * next;
        float most = -3.4e38f, sum = 0, lse, v[8], *row_out = out + 3 * (cluster + (int64_t)i * clusters);
        if (i + 1 < count) target_ahead = targets[cluster + (i + 1) * clusters];
        copy(i + 2);
        mtt__cluster_wait(); /* warps' parts of row i are stored, those of row i - 1 have been read by all */
        /* join the parts of row i, and measure row i + 1 */
        for (int q = lane; q < blocks * WARPS; q += 32) most = fmaxf(most, parts[q].x);
        most = mtt__reduce<mtt__maximum, 32>(most, (float *)NULL);
        for (int q = lane; q < blocks * WARPS; q += 32) sum += parts[q].y * expf(parts[q].x - most);
        lse = most + logf(mtt__reduce<mtt__plus, 32>(sum, (float *)NULL));
        mtt__copy_wait<1>();
        if (i + 1 < count) measure(i + 1);
        /* store the gradients of row i */
        if (target < 0) {
            for (int k = 0; k < 8; k++) v[k] = 0;
            MTT__EACH_PACK mtt__store_floats(to + pack * 8, v);
            if (rank == 0 && threadIdx.x < 3) row_out[threadIdx.x] = 0;
            continue;
        }
        MTT__EACH_PACK {
            mtt__read_floats(from + pack * 8, v);
            MTT__UNROLL for (int k = 0; k < 8; k++) v[k] = mtt__exp_from<T>(v[k], lse, factor);
            if (target / 8 == first_pack + pack) {
                const float at = mtt__to_float(from[target - first_pack * 8]);
                const float gradient = (expf(at - lse) - 1.0f) * factor;
                MTT__UNROLL for (int k = 0; k < 8; k++) v[k] = k == target % 8 ? gradient : v[k];
                row_out[0] = lse - at;
                row_out[1] = at >= most ? 1.0f : 0.0f;
                row_out[2] = lse;
            }
            mtt__store_floats(to + pack * 8, v);
            MTT__UNROLL for (int k = 0; k < 8; k++) column[p][k] += v[k];
        }
    }
    if (sums) sums += (int64_t)cluster * width + first_pack * 8;
    if (sums) MTT__EACH_PACK mtt__store_floats(sums + pack * 8, column[p]);
#undef MTT__EACH_PACK
}

/* The least number of blocks that hold a row in mtt_k_loss_rows; 0 = the row is too long. */
static int mtt__loss_cluster(const mtt__cuda *c, int64_t width, size_t *bytes)
{
    for (int blocks = 1; blocks <= c->cluster; blocks *= 2) {
        const int64_t packs = mtt__ceil_div(width / 8, blocks);
        const int element = c->precision == MTT_FP32 || c->precision == MTT_TF32 ? 4 : 2;
        *bytes = MTT__LOSS_STAGES * (size_t)packs * 8 * element;
        if (packs > MTT__LOSS_THREADS * MTT__LOSS_PACKS) continue;
        if (*bytes + (4 << 10) <= (size_t)c->shared_bytes) return blocks;
    }
    return 0;
}

/* Runs as many clusters as the device holds at a time: another one would wait for these. If it holds none, or
   the workspace holds the sums of none, the rows take two passes. */
template <class T>
static mtt_status mtt__fused_gradient_of(mtt__cuda *c, const mtt_op *op, const mtt__loss_rows &r,
                                         const mtt_tensor *db, int add)
{
    const int64_t width = mtt__width(r.logits);
    float *sums = db ? mtt__at<float>(op->workspace) : NULL;
    size_t bytes = 0;
    int blocks = mtt__loss_cluster(c, width, &bytes), clusters = c->processors;
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t launch = {};
    const auto kernel = mtt_k_loss_rows<T>;
    cudaError_t error;
    mtt_status status;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = (unsigned)blocks;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    launch.gridDim = dim3((unsigned)blocks);
    launch.blockDim = dim3(MTT__LOSS_THREADS);
    launch.dynamicSmemBytes = bytes;
    launch.stream = c->stream;
    launch.attrs = &cluster;
    launch.numAttrs = blocks > 1;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (error) return mtt__checked(c, error, "cross_entropy");
    if (blocks > 1 && cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch)) clusters = 0;
    cudaGetLastError(); /* a device may have clusters, but no room for these */
    clusters = (int)mtt__min(clusters, r.rows);
    if (db) clusters = (int)mtt__min(clusters, (int64_t)op->workspace->bytes / (4 * width));
    if (!clusters) return mtt__rows_gradient(c, op, r, db, add);
    launch.gridDim = dim3((unsigned)(clusters * blocks));
    error = cudaLaunchKernelEx(&launch, kernel, mtt__at<T>(r.logits), r.targets, r.losses, sums,
                               mtt__at<const mtt_control>(r.control), mtt__at<const mtt_counters>(r.counters),
                               op->shape->vocab, (int)width, (int)r.rows);
    status = mtt__checked(c, error, "cross_entropy");
    if (status != MTT_OK || !db) return status;
    return mtt__sum_slices<float>(c, sums, clusters, width, 1, clusters, mtt__at<float>(db), add);
}

static mtt_status mtt__chunk_in_one_pass(mtt__cuda *c, const mtt_op *op, const mtt__loss_rows &r,
                                         int64_t first)
{
    const mtt_tensor *db = MTT_OPERANDS_OF(chunked_loss, op)->d_bias;
    mtt_status status = mtt__by_type(c, r.logits, [&](auto zero) {
        return mtt__fused_gradient_of<decltype(zero)>(c, op, r, db, first > 0);
    });
    return status == MTT_OK ? mtt__chunk_products(c, op, first, r.rows) : status;
}

static mtt_status mtt__hopper_chunked_loss(mtt__cuda *c, const mtt_op *op)
{
    return mtt__chunked_loss_by(c, op, mtt__chunk_in_one_pass);
}

/* ---- which operations run here ---- */

/* 16 bits, head widths that fill tiles of 64 or 128 columns. */
static bool mtt__hopper_takes_flash(const mtt_op *op, const mtt_tensor *qkv)
{
    const int D = op->shape->d_head;
    return mtt__flash_takes(op->shape) && qkv->dtype != MTT_F32 &&
           ((D > 32 && D <= 64) || (D > 96 && D <= 128));
}

/* Not FP32, W [k, n], rows that an int counts, and a driver that makes tensor maps. */
static bool mtt__hopper_takes_tiles(const mtt__cuda *c, const mtt_op *op, const mtt_tensor *weight)
{
    return weight->dtype != MTT_F32 && !weight->transposed && op->shape->rows < (int64_t)1 << 31 && c->encode;
}

/* Up to so many rows, as in generation, a tile is mostly empty: GELU after the product takes 6 us for GPT-2's
   768 > 3,072 columns, a tile 14. */
static bool mtt__leaves_tiles_empty(const mtt_op *op) { return op->shape->rows <= 128; }

/* Rows that a cluster holds, or a single block on devices without clusters. */
static bool mtt__hopper_takes_loss(const mtt__cuda *c, const mtt_op_chunked_loss *o)
{
    size_t bytes;
    return o->dx && !o->d_logits && mtt__loss_cluster(c, mtt__width(o->logits), &bytes);
}

static mtt__function mtt__hopper_function(const mtt__cuda *c, const mtt_op *op)
{
    if (op->kind == MTT_OP_chunked_loss && mtt__hopper_takes_loss(c, MTT_OPERANDS_OF(chunked_loss, op)))
        return mtt__hopper_chunked_loss;
    if (!c->hopper) return NULL;
    switch (op->kind) {
    case MTT_OP_flash:
        if (mtt__hopper_takes_flash(op, MTT_OPERANDS_OF(flash, op)->qkv)) return mtt__hopper_flash;
        break;
    case MTT_OP_flash_backward:
        if (mtt__hopper_takes_flash(op, MTT_OPERANDS_OF(flash_backward, op)->qkv))
            return mtt__hopper_flash_backward;
        break;
    case MTT_OP_linear_gelu:
        if (!mtt__leaves_tiles_empty(op) &&
            mtt__hopper_takes_tiles(c, op, MTT_OPERANDS_OF(linear_gelu, op)->weight))
            return mtt__hopper_linear_gelu;
        break;
    case MTT_OP_linear_backward_gelu:
        if (mtt__hopper_takes_tiles(c, op, MTT_OPERANDS_OF(linear_backward_gelu, op)->weight))
            return mtt__hopper_linear_backward_gelu;
        break;
    default: break;
    }
    return NULL;
}

/* Sets c->hopper if the loaded code is for sm_90a: otherwise the warpgroups' kernels are empty and have no
   static shared memory. Sets c->encode if the driver makes tensor maps. Sets c->cluster: clusters of several
   blocks need a device that has them and code for sm_90 or later. */
static mtt_status mtt__find_hopper(mtt__cuda *c)
{
    cudaFuncAttributes tiles = {}, loss = {};
    int has_clusters = 0, major = 0;
    cudaError_t error = cudaFuncGetAttributes(&tiles, mtt_k_linear_gelu<__nv_bfloat16, false>);
    if (!error) error = cudaFuncGetAttributes(&loss, mtt_k_loss_rows<__nv_bfloat16>);
    if (!error) error = cudaDeviceGetAttribute(&has_clusters, cudaDevAttrClusterLaunch, c->device);
    if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, c->device);
    if (error) return mtt__checked(c, error, "reading its code");
    c->hopper = tiles.sharedSizeBytes > 0;
    if (major == 9 && !c->hopper && c->backend.note)
        c->backend.note(c->backend.user, "mtt_kernels.cu was compiled without sm_90a, so attention and GELU "
                        "run slower: compile it with -gencode=arch=compute_90a,code=sm_90a");
    c->cluster = has_clusters && loss.ptxVersion >= 90 ? MTT__CLUSTER : 1;
    /* An older driver has none: GELU then runs after the product. */
    c->encode = (PFN_cuTensorMapEncodeTiled_v12000)mtt__driver_function("cuTensorMapEncodeTiled", 12000);
    return MTT_OK;
}

#else
static mtt_status mtt__find_hopper(mtt__cuda *) { return MTT_OK; }
static mtt__function mtt__hopper_function(const mtt__cuda *, const mtt_op *) { return NULL; }
#endif /* MTT_NO_HOPPER */

/* ----------------------------------------------------------------------------------------------------------
   >>compact state   AdamW with moments of 8 bits and 16-bit weights with a byte more
   -------------------------------------------------------------------------------------------------------- */

struct mtt__compact_update : mtt__update {
    int64_t elements; /* of m: scales follow this many codes */
    uint64_t site;    /* in the stream of random numbers */
};

/* The special function unit's root, good to 2 ulp like mtt__reciprocal. 8-bit codes do not show such an
   error. In a weight it is small, because an update changes it by a small part. */
MTT__DEVICE float mtt__root(float x)
{
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Encodes a thread's 8 of the 32 moments of a group, which it shares with its neighbours. Second moments are
   encoded by their roots. A second moment of 1e-60 and more gets at least one unit. */
template <bool SECOND>
MTT__DEVICE uint16_t mtt__encode_moments(const float *x, const uint32_t *random, uint8_t *codes)
{
    const float ONE = 65536.0f;
    float largest = 0;
    MTT__UNROLL for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(x[k]));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    uint16_t scale = mtt__to_scale(largest, __shfl_sync(0xffffffffu, random[0], threadIdx.x & 28) & 0xffffu);
    float unit = mtt__from_scale(scale), inverse = scale ? mtt__reciprocal(unit) : 0.0f;
    MTT__UNROLL for (int k = 0; k < 8; k++) {
        float y = SECOND ? x[k] * (255.0f * ONE * inverse)
                         : 254.0f * ONE * x[k] * mtt__reciprocal(unit + fabsf(x[k]));
        if (SECOND) y = fmaxf(y, ONE * __saturatef(1e30f * x[k]));
        codes[k] = mtt__round_moment(y, SECOND, mtt__draw_bits(random, k));
    }
    return scale;
}

/* Math:        mtt__adamw_element of decoded weights and moments, which are then encoded again
   Shapes:      all parameters: gradient float or 16-bit; m, v: codes of all groups of 32, then their 16-bit
                scales; weight W, 16-bit with a byte of rest
   Launch:      MTT__RANGE_BLOCKS blocks of 256 threads for each entry of ranges, 8 elements at a time: a draw
                of Philox for each 8, a group for each 4 threads
   Requires:    counts multiples of 8; mtt_k_grad_norm before it
   Traffic:     12.25 bytes a parameter, 14.25 with FP32 gradients, 16.25 with FP32 weights
   Determinism: elementwise; rounds by (seed, update, parameter, element)
   Reference:   mtt__cpu_adamw */
template <class W>
static __global__ void __launch_bounds__(MTT__BOUNDS(256, 5)) mtt_k_adamw_compact(const mtt__compact_update u)
{
    if (u.counters->skipped) return;
    const mtt_range &r = u.ranges[blockIdx.x / MTT__RANGE_BLOCKS];
    if (u.mine && !mtt__is_mine(r)) return;
    const mtt_update_rates rates = mtt__update_rates(u.control, u.counters, r.group);
    constexpr bool FP16 = std::is_same<W, __half>::value, FP32 = std::is_same<W, float>::value;
    const int count = (int)mtt__min(mtt__range_count(r), MTT__RANGE_BLOCK);
    const int64_t begin = mtt__range_begin(r), first = r.first + begin;
    const uint64_t update = mtt__stream_step((uint64_t)u.counters->updates);
    const uint64_t stream = u.site | (uint64_t)r.parameter << 40 | update;
    uint8_t *const m_codes = (uint8_t *)u.m + first, *const v_codes = (uint8_t *)u.v + first;
    uint8_t *const rests = (uint8_t *)u.master + first;
    uint16_t *const m_scales = (uint16_t *)((uint8_t *)u.m + u.elements) + first / MTT__GROUP;
    uint16_t *const v_scales = (uint16_t *)((uint8_t *)u.v + u.elements) + first / MTT__GROUP;
    for (int i = 0; i < count; i += 2048) {
        const int at = i + threadIdx.x * 8;
        const bool inside = at < count; /* other lanes still take part in the group's shuffle */
        float g[8] = {}, m[8] = {}, v[8] = {}, w[8] = {};
        mtt__vector<uint8_t> m_code, v_code, rest;
        mtt__vector<uint16_t> weight;
        /* decode, and update */
        if (inside) {
            float m_scale = mtt__from_scale(m_scales[at / 32]);
            float v_scale = mtt__from_scale(v_scales[at / 32]) * (1.0f / 255.0f);
            mtt__read_gradient(r, begin + at, g);
            m_code = mtt__load_vector(m_codes + at);
            v_code = mtt__load_vector(v_codes + at);
            if (FP32) mtt__read_floats((const float *)mtt__global(r.weight) + begin + at, w);
            else {
                weight = mtt__load_vector((const uint16_t *)mtt__global(r.weight) + begin + at);
                rest = mtt__load_vector(rests + at);
            }
            MTT__UNROLL for (int k = 0; k < 8; k++) {
                float d = g[k] * rates.scale, root = v_scale * (float)v_code.v[k];
                float code = (float)(int8_t)m_code.v[k];
                float old = m_scale * code * mtt__reciprocal(254.0f - fabsf(code));
                if (!FP32) w[k] = mtt__join_weight(weight.v[k], rest.v[k], FP16);
                m[k] = rates.b1 * old + (1.0f - rates.b1) * d;
                v[k] = mtt__root(rates.b2 * (root * root) + (1.0f - rates.b2) * d * d); /* the stored root */
                w[k] = rates.keep * w[k] -
                       rates.step * m[k] * mtt__reciprocal(v[k] * rates.correction + rates.eps);
            }
        }
        /* encode the moments, and store */
        const mtt_draw draw = mtt__draw(u.control->seed, (uint64_t)(begin + at) >> 3, stream);
        uint16_t m_scale = mtt__encode_moments<false>(m, draw.word, m_code.v);
        uint16_t v_scale = mtt__encode_moments<true>(v, draw.word, v_code.v);
        if (!inside) continue;
        *(mtt__vector<uint8_t> *)(m_codes + at) = m_code;
        *(mtt__vector<uint8_t> *)(v_codes + at) = v_code;
        if (at % 32 == 0) {
            m_scales[at / 32] = m_scale;
            v_scales[at / 32] = v_scale;
        }
        /* store the weights */
        if (FP32) mtt__store_floats((float *)mtt__global(r.weight) + begin + at, w);
        else {
            MTT__UNROLL for (int k = 0; k < 8; k++)
                mtt__split_weight(w[k], FP16, mtt__draw_bits(draw.word, k), &weight.v[k], &rest.v[k]);
            *(mtt__vector<uint16_t> *)((uint16_t *)mtt__global(r.weight) + begin + at) = weight;
            *(mtt__vector<uint8_t> *)(rests + at) = rest;
        }
    }
}

static mtt_status mtt__compact_adamw(mtt__cuda *c, const mtt_op *op)
{
    mtt__compact_update u = {mtt__update_of(op)};
    u.elements = MTT__GROUP * MTT_OPERANDS_OF(adamw, op)->m->shape[0];
    u.site = mtt__stream(op->site, 0, 0);
    return mtt__by_type(c, op->weights[0], [&](auto zero) {
        return mtt__launch(c, "adamw", mtt_k_adamw_compact<decltype(zero)>, mtt__range_blocks(op), 256, u);
    });
}

/* The function of this room that runs an operation; NULL = none. */
static mtt__function mtt__compact_function(const mtt_op *op)
{
    const bool compact = op->kind == MTT_OP_adamw && MTT_OPERANDS_OF(adamw, op)->m->dtype == MTT_U8;
    return compact ? mtt__compact_adamw : NULL;
}

/* ----------------------------------------------------------------------------------------------------------
   >>trials   which of cuBLASLt's algorithms is the fastest
   -------------------------------------------------------------------------------------------------------- */

/* Math:        sums[0] += the bits of x, each word mixed with its index; sums[1] += words that are neither 0
                nor NaN nor infinite. `exponent` masks the exponents of one number, or of two of 16 bits
   Shapes:      x [words] uint32
   Launch:      256 threads a block, in strides
   Requires:    sums begin at 0
   Traffic:     x read once
   Determinism: sums of integers
   Reference:   - */
static __global__ void __launch_bounds__(256)
    mtt_k_checksum(const uint32_t *x, int64_t words, uint32_t exponent, unsigned long long *sums)
{
    const uint32_t high = exponent & 0xffff0000u, low = exponent & 0xffffu;
    unsigned long long sum = 0, telling = 0;
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < words; i += (int64_t)gridDim.x * 256) {
        unsigned long long word = (x[i] ^ (unsigned long long)i << 32) * 0x9e3779b97f4a7c15ull;
        sum += word ^ word >> 29;
        telling += (x[i] & 0x7fffffffu) && (x[i] & high) != high && (!low || (x[i] & low) != low);
    }
    atomicAdd(&sums[0], sum);
    atomicAdd(&sums[1], telling);
}

/* Milliseconds that an algorithm takes, or -1 if its bits are not those of *sum. Algorithm 0 sets *sum. It
   fails if most results are 0, NaN or infinite (FP16 has overflowed): equal bits would then prove nothing. */
static float mtt__try(mtt__cuda *c, const mtt_op *op, const mtt__product_plan *p, int algorithm,
                      const mtt__blas_product &g, cudaEvent_t *marks, unsigned long long *sum)
{
    enum { TIMES = 4 };
    const int out = p->key.out;
    const uint32_t exponent = out == MTT_F32 ? 0x7f800000u : out == MTT_BF16_BITS ? 0x7f807f80u : 0x7c007c00u;
    const int64_t words = p->key.m * p->key.n * (out == MTT_F32 ? 4 : 2) / 4;
    unsigned long long *sums = (unsigned long long *)op->workspace->data, own[2] = {0, 0};
    float ms = -1;
    if (mtt__blas_run(c, op, p, algorithm, g, 0.0f)) return -1;
    if (cudaMemsetAsync(sums, 0, sizeof(own), c->stream))
        return -1; /* the product no longer needs the workspace */
    if (mtt__launch(c, "checksum", mtt_k_checksum, 4 * c->processors, 256, (const uint32_t *)g.c.data, words,
                    exponent, sums) != MTT_OK)
        return -1;
    if (cudaMemcpyAsync(own, sums, sizeof(own), cudaMemcpyDeviceToHost, c->stream)) return -1;
    if (cudaStreamSynchronize(c->stream)) return -1;
    if (algorithm == 0 && 2 * own[1] < (unsigned long long)words) return -1;
    if (algorithm == 0) *sum = own[0];
    if (own[0] != *sum) return -1;
    if (cudaEventRecord(marks[0], c->stream)) return -1;
    for (int i = 0; i < TIMES; i++)
        if (mtt__blas_run(c, op, p, algorithm, g, 0.0f)) return -1;
    if (cudaEventRecord(marks[1], c->stream) || cudaEventSynchronize(marks[1])) return -1;
    if (cudaEventElapsedTime(&ms, marks[0], marks[1])) return -1;
    return ms / TIMES;
}

/* Whether to try algorithms: the product is large, its output may be overwritten, and one checksum covers it.
   Products of one byte an element are not tried. Their sums are often exact, so algorithms that round in
   different places have equal bits in most steps. Two GPUs with different micro-batches would then choose
   differently. */
static bool mtt__may_tune(mtt__cuda *c, const mtt_op *op, const mtt__product_plan *p, int adds)
{
    const mtt__product_key *k = &p->key;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusActive;
    bool large = (double)k->m * (double)k->n * (double)k->k >= 1 << 30; /* 3 us and more */
    bool whole = k->batch == 1 && k->ldc == k->n && k->align_c == 16;
    if (p->candidates < 2 || adds || !large || !whole || op->workspace->bytes < 16) return false;
    if (mtt__element_bytes(k->in_a) == 1) return false;
    return !cudaStreamIsCapturing(c->stream, &capture) && capture == cudaStreamCaptureStatusNone;
}

/* Puts the fastest of a plan's algorithms first, among those that give the bits of cuBLASLt's own choice. So
   timing noise changes no result. cuBLASLt's choice is up to 16 % slower than the best. */
static void mtt__tune(mtt__cuda *c, const mtt_op *op, mtt__product_plan *p, const mtt__blas_product &g)
{
    cudaEvent_t marks[2] = {NULL, NULL};
    unsigned long long sum = 0;
    float best = -1;
    int chosen = 0;
    if (!mtt__may_tune(c, op, p, g.adds)) return;
    if (!cudaEventCreate(&marks[0]) && !cudaEventCreate(&marks[1]))
        for (int i = 0; i < p->candidates; i++) {
            float ms = mtt__try(c, op, p, i, g, marks, &sum);
            if (i == 0 && ms < 0) break;
            if (ms < 0 || (i > 0 && ms >= best)) continue;
            best = ms;
            chosen = i;
        }
    for (int i = 0; i < 2; i++)
        if (marks[i]) cudaEventDestroy(marks[i]);
    cudaGetLastError(); /* an algorithm that fails is not taken; if the first one fails, its run reports it */
    p->found[0] = p->found[chosen];
    p->candidates = 1;
}

/* ----------------------------------------------------------------------------------------------------------
   >>ranks
   -------------------------------------------------------------------------------------------------------- */

#ifndef MTT_NO_RANKS
/* GPUs of one host copy from each other's memory. If they cannot, or if there are several hosts, NCCL moves
   the bytes. Both work in a stream of their own, `wires`, which waits for other ranks without a limit. So the
   host watches the ranks' sockets, and ends these waits if a rank is lost: see mtt__wait_for_ranks. */

/* An all-gather by the ranks' sockets. `all` has `bytes` for each rank; the caller has filled in its own. */
static mtt_status mtt__exchange_all(mtt__cuda *c, void *all, size_t bytes)
{
    mtt_transfer *const list = (mtt_transfer *)mtt__host_alloc(c->env, (size_t)c->ranks * sizeof(*list));
    char *const at = (char *)all;
    mtt_status status;
    int k = 0;
    if (!list)
        return mtt__cuda_fail(c->env, MTT_E_MEMORY, "out of host memory: no room for %d ranks", c->ranks);
    for (int peer = 0; peer < c->ranks; peer++)
        if (peer != c->rank)
            list[k++] = {peer, at + (size_t)c->rank * bytes, bytes, at + (size_t)peer * bytes, bytes};
    status = c->backend.exchange(c->backend.ranks, list, k);
    mtt__host_free(c->env, list);
    return status;
}

/* `wires` has the higher priority, because operations wait for transfers. */
static mtt_status mtt__open_wires(mtt__cuda *c)
{
    int least = 0, greatest = 0;
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (!error) error = cudaStreamCreateWithPriority(&c->wires, cudaStreamNonBlocking, greatest);
    if (!error) error = cudaEventCreateWithFlags(&c->ready, cudaEventDisableTiming);
    if (!error) error = cudaEventCreateWithFlags(&c->arrived, cudaEventDisableTiming);
    return mtt__checked(c, error, "opening it for several ranks");
}

/* ---- copies between GPUs of one host ---- */

/* Copy engines move the bytes, so all multiprocessors stay free for operations. NCCL's kernels occupy some. A
   product with one block for each multiprocessor then ends only after them.

   Ranks signal each other by words in device memory. A word has one writer, which sets it to 1 in the memory
   of its one reader. The reader waits for the 1 and sets the word back to 0, so that a captured graph can be
   replayed. A transfer has a slot of two words for each pair of ranks:
     READY  the writer's data is complete. A rank says it to all others. When all have said it, it copies.
     TAKEN  the writer has copied. A rank waits for it before operations that may overwrite what it sent.
   So transfers follow each other without waiting for TAKEN. A rank uses a slot again only after TAKEN of all
   others. Each of them has then reset READY, which it saw before.

   Updated weights arrive late: during the next forward pass, in which an operation waits only for its own
   weights. A rank says UPDATED once, after all updates, because each wait for a word delays short kernels of
   other streams by some 50 us. TAKEN is not needed. A rank says READY for its next transfer only after all
   weights have arrived, and nobody updates weights before it has heard that READY. */
enum { MTT__COPY_RANKS = 16, MTT__SLOTS = 32 };
enum { MTT__READY = 0, MTT__TAKEN = MTT__SLOTS, MTT__UPDATED = 2 * MTT__SLOTS, MTT__WORDS };

/* An address in the memory of a rank, as other processes can use it. */
struct mtt__remote_address {
    cudaIpcMemHandle_t block;
    uint64_t offset;
};

/* A block of another rank that this process has mapped. */
struct mtt__window {
    mtt__window *next;
    int peer;
    cudaIpcMemHandle_t block;
    char *data;
};

/* The source addresses of a list of transfers, found when the list first runs. */
struct mtt__route {
    mtt__route *next;
    const mtt_transfer *transfers;
    const char **from;
};

/* Weights that one operation gathers, which arrive late. */
struct mtt__late_weights {
    mtt__late_weights *next;
    const mtt_op *op; /* which another schedule may have freed */
    cudaEvent_t arrived;
    int waited;       /* 1 = `stream` already waits for `arrived` */
    int count;
    mtt_tensor *weights;
};

struct mtt__copies {
    PFN_cuStreamBatchMemOp_v11070 run_words;
    PFN_cuMemGetAddressRange_v3020 find_block;
    uint32_t *words[MTT__COPY_RANKS]; /* of each reader, in its memory: [MTT__WORDS, writers] */
    cudaStream_t signals;             /* says READY and UPDATED while `wires` still copies */
    cudaEvent_t signalled;            /* `signals` has said all */
    cudaStream_t rescue;              /* sets the words of a lost rank, so that waits for them end */
    int shared;                       /* 1 = other ranks may have memory of this one open */
    int open;                         /* slots in use: transfers whose TAKEN was not waited for */
    mtt__late_weights *late;          /* the newest entry first */
    int late_count;
    mtt__window *windows;
    mtt__route *routes;
};

/* The address of a word from rank `from` in the memory of rank `to`. */
static CUdeviceptr mtt__word_at(const mtt__cuda *c, int word, int from, int to)
{
    return (CUdeviceptr)(c->copies->words[to] + word * c->ranks + from);
}

static const char MTT__BY_NCCL[] = "Set the policy's nccl (--nccl), so that NCCL moves the bytes";

/* The driver's errors have other names than those of CUDA's runtime. */
static mtt_status mtt__driver_checked(mtt__cuda *c, CUresult result, const char *what)
{
    const char *name = NULL;
    if (result == CUDA_SUCCESS) return MTT_OK;
    void *const find = mtt__driver_function("cuGetErrorName", 6000);
    if (find) ((PFN_cuGetErrorName_v6000)find)(result, &name);
    return mtt__cuda_fail(c->env, MTT_E_DEVICE, "CUDA device %d, %s: the driver's error %d (%s). %s",
                          c->device, what, (int)result, name ? name : "unknown", MTT__BY_NCCL);
}

/* Says a word to all other ranks. */
static mtt_status mtt__tell(mtt__cuda *c, cudaStream_t stream, int word)
{
    CUstreamBatchMemOpParams list[MTT__COPY_RANKS] = {};
    unsigned k = 0;
    for (int peer = 0; peer < c->ranks; peer++) {
        if (peer == c->rank) continue;
        auto &write = list[k++].writeValue;
        write.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        write.address = mtt__word_at(c, word, c->rank, peer);
        write.value = 1;
    }
    return mtt__driver_checked(c, c->copies->run_words(stream, k, list, 0), "telling other ranks");
}

/* Waits in `wires` until all other ranks have said a word. */
static mtt_status mtt__hear(mtt__cuda *c, int word)
{
    CUstreamBatchMemOpParams list[2 * MTT__COPY_RANKS] = {};
    unsigned k = 0;
    for (int peer = 0; peer < c->ranks; peer++) {
        if (peer == c->rank) continue;
        auto &wait = list[k++].waitValue;
        auto &write = list[k++].writeValue;
        wait.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
        write.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        write.address = wait.address = mtt__word_at(c, word, peer, c->rank);
        wait.value = 1;
        wait.flags = CU_STREAM_WAIT_VALUE_GEQ;
    }
    return mtt__driver_checked(c, c->copies->run_words(c->wires, k, list, 0), "hearing other ranks");
}

static mtt_status mtt__open_window(mtt__cuda *c, int peer, const cudaIpcMemHandle_t *block, char **data)
{
    mtt__window *w = c->copies->windows;
    void *opened = NULL;
    mtt_status status;
    while (w && (w->peer != peer || memcmp(&w->block, block, sizeof(*block)))) w = w->next;
    if (!w) {
        status = mtt__checked(c, cudaIpcOpenMemHandle(&opened, *block, cudaIpcMemLazyEnablePeerAccess),
                              "opening the memory of another rank", MTT__BY_NCCL);
        if (status != MTT_OK) return status;
        w = (mtt__window *)mtt__host_alloc(c->env, sizeof(*w));
        if (!w) {
            cudaIpcCloseMemHandle(opened);
            return mtt__cuda_fail(c->env, MTT_E_MEMORY, "out of host memory: %zu bytes", sizeof(*w));
        }
        *w = {c->copies->windows, peer, *block, (char *)opened};
        c->copies->windows = w;
    }
    *data = w->data;
    return MTT_OK;
}

/* Describes an address for other ranks. */
static mtt_status mtt__remote_address_of(mtt__cuda *c, const void *at, mtt__remote_address *place)
{
    CUdeviceptr base = 0;
    const CUresult found = c->copies->find_block(&base, NULL, (CUdeviceptr)at);
    place->offset = (CUdeviceptr)at - base;
    if (found != CUDA_SUCCESS) return mtt__driver_checked(c, found, "finding memory to share");
    return mtt__checked(c, cudaIpcGetMemHandle(&place->block, (void *)base), "sharing memory", MTT__BY_NCCL);
}

/* Exchanges source addresses with the other ranks, whose lists of transfers match this one. */
static mtt_status mtt__make_route(mtt__cuda *c, const mtt_transfer *transfers, int count, mtt__route **made)
{
    const size_t n = (size_t)count;
    const size_t bytes = 2 * n * sizeof(mtt__remote_address) + 1;
    mtt__remote_address *const places = (mtt__remote_address *)mtt__host_alloc(c->env, bytes);
    mtt_transfer *const list = (mtt_transfer *)mtt__host_alloc(c->env, n * sizeof(*list) + 1);
    mtt__route *const route = (mtt__route *)mtt__host_alloc(c->env, sizeof(*route) + n * sizeof(char *));
    mtt_status status = MTT_OK;
    if (!places || !list || !route)
        status = mtt__cuda_fail(c->env, MTT_E_MEMORY, "out of host memory: no room for %d transfers", count);
    for (int i = 0; i < count && status == MTT_OK; i++) {
        list[i] = {transfers[i].peer, &places[i], sizeof(*places), &places[n + i], sizeof(*places)};
        if (transfers[i].send_bytes) status = mtt__remote_address_of(c, transfers[i].send, &places[i]);
    }
    if (status == MTT_OK) status = c->backend.exchange(c->backend.ranks, list, count);
    if (status == MTT_OK) route->from = (const char **)(route + 1);
    for (int i = 0; i < count && status == MTT_OK; i++) {
        char *block = NULL;
        if (!transfers[i].receive_bytes) continue;
        status = mtt__open_window(c, transfers[i].peer, &places[n + i].block, &block);
        route->from[i] = block + places[n + i].offset;
    }
    if (status == MTT_OK) {
        route->transfers = transfers;
        route->next = c->copies->routes;
        *made = c->copies->routes = route;
    } else mtt__host_free(c->env, route);
    mtt__host_free(c->env, places);
    mtt__host_free(c->env, list);
    return status;
}

/* Waits in `wires` until the others have copied all that this rank has sent. Frees all slots. */
static mtt_status mtt__end_copies(mtt__cuda *c)
{
    mtt__copies *const x = c->copies;
    cudaError_t error = cudaEventRecord(x->signalled, x->signals);
    if (!error) error = cudaStreamWaitEvent(c->wires, x->signalled, 0);
    mtt_status status = mtt__checked(c, error, "telling other ranks");
    for (int slot = 0; slot < x->open && status == MTT_OK; slot++) status = mtt__hear(c, MTT__TAKEN + slot);
    x->open = 0;
    return status;
}

/* After event `ready`, says a word to all other ranks. `wires` waits until they have said it, too. */
static mtt_status mtt__meet(mtt__cuda *c, int word)
{
    cudaError_t error = cudaStreamWaitEvent(c->copies->signals, c->ready, 0);
    mtt_status status = mtt__checked(c, error, "telling other ranks");
    if (status == MTT_OK) status = mtt__tell(c, c->copies->signals, word);
    return status == MTT_OK ? mtt__hear(c, word) : status;
}

static mtt_status mtt__find_route(mtt__cuda *c, const mtt_transfer *transfers, int count, mtt__route **route)
{
    mtt__route *known = c->copies->routes;
    while (known && known->transfers != transfers) known = known->next;
    *route = known;
    return known ? MTT_OK : mtt__make_route(c, transfers, count, route);
}

/* The number of transfers from the first on that are rows of one copy: as many bytes from the same rank, at
   equal distances. So are the squares of equal layers, where a copy takes 6 us, however small. */
static int mtt__rows_of_copy(const mtt_transfer *t, const char *const *from, int count, size_t *to_next,
                             size_t *from_next)
{
    int rows = 1;
    *to_next = count > 1 ? (uintptr_t)t[1].receive - (uintptr_t)t->receive : 0;
    *from_next = count > 1 ? (uintptr_t)from[1] - (uintptr_t)*from : 0;
    if (t->receive_bytes > 1 << 16 || *to_next < t->receive_bytes || *from_next < t->receive_bytes ||
        *to_next > 1 << 30 || *from_next > 1 << 30)
        return 1;
    while (rows < count && t[rows].peer == t->peer && t[rows].receive_bytes == t->receive_bytes &&
           (char *)t[rows].receive == (char *)t->receive + (size_t)rows * *to_next &&
           from[rows] == *from + (size_t)rows * *from_next)
        rows++;
    return rows;
}

static mtt_status mtt__copy_list(mtt__cuda *c, const mtt_transfer *transfers, int count)
{
    mtt__route *route = NULL;
    mtt_status status = mtt__find_route(c, transfers, count, &route);
    for (int i = 0, rows = 1; i < count && status == MTT_OK; i += rows) {
        const mtt_transfer *const t = &transfers[i];
        const char *const *const from = &route->from[i];
        size_t to_next, from_next;
        rows = mtt__rows_of_copy(t, from, count - i, &to_next, &from_next);
        if (!t->receive_bytes) continue;
        cudaError_t error =
            rows > 1 ? cudaMemcpy2DAsync(t->receive, to_next, *from, from_next, t->receive_bytes,
                                         (size_t)rows, cudaMemcpyDefault, c->wires)
                     : cudaMemcpyAsync(t->receive, *from, t->receive_bytes, cudaMemcpyDefault, c->wires);
        status = mtt__checked(c, error, "copying from another rank", MTT__BY_NCCL);
    }
    return status;
}

static mtt_status mtt__copy_all(mtt__cuda *c, const mtt_transfer *transfers, int count)
{
    mtt__copies *const x = c->copies;
    mtt_status status = MTT_OK;
    if (x->open == MTT__SLOTS) { /* READY of a slot is said again only after the others' TAKEN */
        status = mtt__end_copies(c);
        cudaError_t error = cudaEventRecord(c->ready, c->wires);
        if (status == MTT_OK) status = mtt__checked(c, error, "waiting for other ranks");
    }
    if (status == MTT_OK) status = mtt__meet(c, MTT__READY + x->open);
    if (status == MTT_OK) status = mtt__copy_list(c, transfers, count);
    return status == MTT_OK ? mtt__tell(c, c->wires, MTT__TAKEN + x->open++) : status;
}

/* The entry of weights that an operation gathers, made at the first call. */
static mtt_status mtt__find_late(mtt__cuda *c, const mtt_op *op, mtt__late_weights **found)
{
    mtt__copies *const x = c->copies;
    mtt__late_weights *late = x->late;
    cudaError_t error;
    while (late && late->op != op) late = late->next;
    if (!late) {
        const size_t bytes = sizeof(*late) + (size_t)op->parameters * sizeof(*late->weights);
        late = (mtt__late_weights *)mtt__host_alloc(c->env, bytes);
        if (!late) return mtt__cuda_fail(c->env, MTT_E_MEMORY, "out of host memory: %zu bytes", bytes);
        error = cudaEventCreateWithFlags(&late->arrived, cudaEventDisableTiming);
        late->next = x->late, late->op = op, late->count = op->parameters;
        late->weights = (mtt_tensor *)(late + 1);
        for (int p = 0; p < op->parameters; p++) late->weights[p] = *op->weights[p];
        x->late = late;
        x->late_count++;
        if (error) return mtt__checked(c, error, "gathering weights");
    }
    *found = late;
    return MTT_OK;
}

static int mtt__has_late(const mtt_op *op, const mtt__late_weights *w)
{
    for (int i = 0; i < op->inputs + op->outputs; i++)
        for (int p = 0; p < w->count && op->operands[i]; p++)
            if (op->operands[i]->data == w->weights[p].data) return 1;
    return 0;
}

/* Whether an address lies in weights that arrive late. */
static int mtt__is_late(const mtt__cuda *c, const void *at)
{
    for (const mtt__late_weights *w = c->copies ? c->copies->late : NULL; w; w = w->next)
        for (const mtt_tensor *t = w->weights; t < w->weights + w->count; t++)
            if ((uintptr_t)at - (uintptr_t)t->data < t->bytes) return 1;
    return 0;
}

/* Lets `stream` wait for the late weights that an operation uses. Transfers wait for all, as does NULL. */
static mtt_status mtt__await_weights(mtt__cuda *c, const mtt_op *op)
{
    cudaError_t error = cudaSuccess;
    for (mtt__late_weights *w = c->copies ? c->copies->late : NULL; w && !error; w = w->next) {
        if (w->waited || (op && !mtt__is_transfer(op) && !mtt__has_late(op, w))) continue;
        w->waited = 1;
        error = cudaStreamWaitEvent(c->stream, w->arrived, c->capturing ? cudaEventWaitExternal : 0);
    }
    return mtt__checked(c, error, "waiting for weights");
}

/* Operations wait again for all late weights. Returns the number of operations that bring them. */
static int mtt__forget_waits(mtt__cuda *c)
{
    if (!c->copies) return 0;
    for (mtt__late_weights *w = c->copies->late; w; w = w->next) w->waited = 0;
    return c->copies->late_count;
}

/* Frees routes, and the blocks that were mapped for them. */
static void mtt__forget_routes(mtt__cuda *c)
{
    mtt__copies *const x = c->copies;
    while (mtt__window *const w = x->windows) {
        x->windows = w->next;
        cudaIpcCloseMemHandle(w->data);
        mtt__host_free(c->env, w);
    }
    while (mtt__route *const r = x->routes) {
        x->routes = r->next;
        mtt__host_free(c->env, r);
    }
}

/* Unmaps other ranks' memory, and waits until they have unmapped this one's. CUDA does not allow a block to
   be freed before that. If a rank is lost, this one waits for nobody. */
static void mtt__end_sharing(mtt__cuda *c)
{
    mtt__copies *const x = c->copies;
    char closed[MTT__COPY_RANKS];
    if (!x || !x->shared) return;
    x->shared = 0;
    mtt__forget_routes(c);
    for (int peer = 0; peer < c->ranks; peer++)
        if (peer != c->rank && x->words[peer]) cudaIpcCloseMemHandle(x->words[peer]);
    cudaGetLastError();
    memset(closed, 1, sizeof(closed));
    if (!c->lost) mtt__exchange_all(c, closed, 1);
}

static void mtt__close_copies(mtt__cuda *c)
{
    mtt__copies *const x = c->copies;
    if (!x) return;
    mtt__end_sharing(c);
    if (x->signals) cudaStreamDestroy(x->signals);
    if (x->signalled) cudaEventDestroy(x->signalled);
    if (x->rescue) cudaStreamDestroy(x->rescue);
    cudaFree(x->words[c->rank]);
    cudaGetLastError();
    mtt__host_free(c->env, x);
    c->copies = NULL;
}

/* What each rank tells the others about copies. */
struct mtt__offer {
    char host[64];             /* Linux's boot id, which no two hosts share; empty: unknown */
    cudaIpcMemHandle_t words;  /* its own */
    int able;                  /* 1 = it can copy, as far as it knows */
};

/* Makes the words of this rank, and finds the driver's functions. */
static void mtt__offer_copies(mtt__cuda *c, int nccl, mtt__offer *own)
{
    mtt__copies *const x = c->copies;
    const size_t bytes = sizeof(uint32_t) * MTT__WORDS * (size_t)c->ranks;
    FILE *const file = fopen("/proc/sys/kernel/random/boot_id", "r");
    void *const run_words = mtt__driver_function("cuStreamBatchMemOp", 11070);
    void *const find_block = mtt__driver_function("cuMemGetAddressRange", 3020);
    void *words = NULL;
    if (file) own->host[fread(own->host, 1, sizeof(own->host) - 1, file)] = 0, fclose(file);
    cudaError_t error = cudaStreamCreateWithFlags(&x->rescue, cudaStreamNonBlocking);
    if (!error) error = cudaStreamCreateWithFlags(&x->signals, cudaStreamNonBlocking);
    if (!error) error = cudaEventCreateWithFlags(&x->signalled, cudaEventDisableTiming);
    if (!error) error = cudaMalloc(&words, bytes);
    x->run_words = (PFN_cuStreamBatchMemOp_v11070)run_words;
    x->find_block = (PFN_cuMemGetAddressRange_v3020)find_block;
    x->words[c->rank] = (uint32_t *)words;
    if (!error) error = cudaMemsetAsync(words, 0, bytes, x->rescue);
    if (!error) error = cudaStreamSynchronize(x->rescue);
    if (!error) error = cudaIpcGetMemHandle(&own->words, words);
    own->able = !error && run_words && find_block && *own->host && !c->backend.device_alloc && !nccl;
}

/* Leaves c->copies NULL unless all ranks are on one host, can map each other's memory, and do not ask for
   NCCL. Memory of a caller's own allocator is not tried: it may be of a kind that cannot be shared. */
static mtt_status mtt__open_copies(mtt__cuda *c, int nccl)
{
    mtt__offer offers[MTT__COPY_RANKS] = {}, *const own = &offers[c->rank];
    char able[MTT__COPY_RANKS] = {};
    mtt_status status;
    if (c->ranks > MTT__COPY_RANKS) return MTT_OK;
    c->copies = (mtt__copies *)mtt__host_alloc(c->env, sizeof(*c->copies));
    if (!c->copies) return mtt__cuda_fail(c->env, MTT_E_MEMORY, "out of host memory: no room for copies");
    mtt__offer_copies(c, nccl, own);
    status = mtt__exchange_all(c, offers, sizeof(*offers));
    c->copies->shared = status == MTT_OK;
    able[c->rank] = 1;
    for (int i = 0; i < c->ranks && status == MTT_OK && able[c->rank]; i++) {
        void *words = NULL;
        int right = offers[i].able && !memcmp(offers[i].host, own->host, sizeof(own->host));
        if (right && i != c->rank) {
            right = !cudaIpcOpenMemHandle(&words, offers[i].words, cudaIpcMemLazyEnablePeerAccess);
            c->copies->words[i] = (uint32_t *)words;
        }
        able[c->rank] = (char)right;
    }
    cudaGetLastError(); /* what failed is no fault of later operations */
    if (status == MTT_OK) status = mtt__exchange_all(c, able, 1);
    if (status != MTT_OK || memchr(able, 0, (size_t)c->ranks)) mtt__close_copies(c);
    return status;
}

/* ---- NCCL ---- */

/* NCCL's functions are found when the program runs, so a build needs no NCCL. They return 0, or a number that
   error_string explains. */
struct mtt__nccl_id {
    char bytes[128];
};

struct mtt__nccl {
    void *library, *comm;
    const char *(*error_string)(int result);
    int (*make_id)(mtt__nccl_id *id);
    int (*join)(void **comm, int ranks, mtt__nccl_id id, int rank);
    int (*leave)(void *comm);
    int (*abort)(void *comm);
    int (*state)(void *comm, int *result);
    int (*begin)(void);
    int (*end)(void);
    int (*send)(const void *data, size_t count, int type, int peer, void *comm, cudaStream_t stream);
    int (*receive)(void *data, size_t count, int type, int peer, void *comm, cudaStream_t stream);
};
enum { MTT__NCCL_BYTE = 1, MTT__NCCL_IN_PROGRESS = 7 };

static mtt_status mtt__nccl_checked(mtt__cuda *c, int result, const char *what)
{
    if (!result) return MTT_OK;
    return mtt__cuda_fail(c->env, MTT_E_DEVICE,
                          "NCCL, %s: %s. Each rank needs a GPU of its own", what,
                          c->nccl->error_string(result));
}

/* Loads NCCL. NCCL_NVLS_ENABLE=0 saves the memory that it sets aside for NVLink multicast, which sends and
   receives do not use. */
static mtt_status mtt__find_nccl(mtt__cuda *c, mtt__nccl *n)
{
    const struct {
        const char *name;
        void *function;
    } functions[] = {
        {"ncclGetErrorString", &n->error_string}, {"ncclGetUniqueId", &n->make_id},
        {"ncclCommInitRank", &n->join},           {"ncclCommDestroy", &n->leave},
        {"ncclCommAbort", &n->abort},             {"ncclCommGetAsyncError", &n->state},
        {"ncclGroupStart", &n->begin},            {"ncclGroupEnd", &n->end},
        {"ncclSend", &n->send},                   {"ncclRecv", &n->receive}};
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    n->library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!n->library)
        return mtt__cuda_fail(c->env, MTT_E_DEVICE,
                              "GPUs that cannot copy from each other's memory need NCCL, but %s: install "
                              "libnccl2, or nvidia-nccl-cu12 with pip, and set LD_LIBRARY_PATH to the folder "
                              "of libnccl.so.2", dlerror());
    for (const auto &f : functions) {
        void *const found = dlsym(n->library, f.name);
        if (!found)
            return mtt__cuda_fail(c->env, MTT_E_DEVICE, "libnccl.so.2 has no %s: install NCCL 2.7 or later",
                                  f.name);
        memcpy(f.function, &found, sizeof(found));
    }
    return MTT_OK;
}

/* All ranks exchange identifiers and use that of rank 0. So all have come this far before any waits inside
   NCCL, where a rank that has failed would not be noticed. */
static mtt_status mtt__open_nccl(mtt__cuda *c)
{
    mtt__nccl_id *const ids = (mtt__nccl_id *)mtt__host_alloc(c->env, (size_t)c->ranks * sizeof(*ids));
    mtt__nccl *const n = c->nccl = (mtt__nccl *)mtt__host_alloc(c->env, sizeof(*n));
    mtt_status status = MTT_OK;
    if (!ids || !n) status = mtt__cuda_fail(c->env, MTT_E_MEMORY, "out of host memory: no room for NCCL");
    if (status == MTT_OK) status = mtt__find_nccl(c, n);
    if (status == MTT_OK && c->rank == 0)
        status = mtt__nccl_checked(c, n->make_id(&ids[0]), "making an identifier");
    if (status == MTT_OK) status = mtt__exchange_all(c, ids, sizeof(*ids));
    if (status == MTT_OK)
        status = mtt__nccl_checked(c, n->join(&n->comm, c->ranks, ids[0], c->rank), "connecting the ranks");
    mtt__host_free(c->env, ids);
    return status;
}

static mtt_status mtt__send_all(mtt__cuda *c, const mtt_transfer *transfers, int count)
{
    const mtt__nccl *const n = c->nccl;
    int result = n->begin(), last;
    for (const mtt_transfer *t = transfers; t < transfers + count && !result; t++) {
        if (t->send_bytes)
            result = n->send(t->send, t->send_bytes, MTT__NCCL_BYTE, t->peer, n->comm, c->wires);
        if (t->receive_bytes && !result)
            result = n->receive(t->receive, t->receive_bytes, MTT__NCCL_BYTE, t->peer, n->comm, c->wires);
    }
    last = n->end();
    return mtt__nccl_checked(c, result ? result : last, "sending and receiving");
}

/* ---- either way ---- */

/* Lets `wires` wait for all operations so far. */
static mtt_status mtt__follow(mtt__cuda *c)
{
    cudaError_t error = cudaEventRecord(c->ready, c->stream);
    if (!error) error = cudaStreamWaitEvent(c->wires, c->ready, 0);
    if (error) return mtt__checked(c, error, "starting transfers");
    if (c->lost) return mtt__cuda_fail(c->env, MTT_E_RANK, "another rank is lost: no transfers");
    return MTT_OK;
}

/* Starts transfers. They begin when all operations so far have ended. */
static mtt_status mtt__start_transfers(mtt__cuda *c, const mtt_transfer *transfers, int count)
{
    mtt_status status = mtt__follow(c);
    if (status != MTT_OK) return status;
    c->travelling = 1;
    return c->copies ? mtt__copy_all(c, transfers, count) : mtt__send_all(c, transfers, count);
}

static int mtt__gathers_late(const mtt__cuda *c, const mtt_op *op)
{
    return c->copies && op->kind == MTT_OP_gather_weights;
}

/* Starts all late gathers of a list of operations. */
static mtt_status mtt__gather_weights(mtt__cuda *c, const mtt_op *ops, int count)
{
    mtt_status status = mtt__follow(c);
    if (status == MTT_OK) status = mtt__meet(c, MTT__UPDATED);
    for (int i = 0; i < count && status == MTT_OK; i++) {
        mtt__late_weights *late = NULL;
        if (!mtt__gathers_late(c, &ops[i])) continue;
        status = mtt__find_late(c, &ops[i], &late);
        if (status == MTT_OK) status = mtt__copy_list(c, ops[i].transfers, ops[i].transfer_count);
        if (status != MTT_OK) break;
        late->waited = 0;
        status = mtt__checked(c, cudaEventRecord(late->arrived, c->wires), "gathering weights");
    }
    if (status != MTT_OK) c->travelling = 1; /* mtt__join_transfers then waits for those that have begun */
    return status;
}

/* Lets operations from now on wait for all transfers, but not for late weights. */
static mtt_status mtt__join_transfers(mtt__cuda *c)
{
    if (!c->travelling) return MTT_OK;
    c->travelling = 0;
    mtt_status status = c->copies ? mtt__end_copies(c) : MTT_OK;
    cudaError_t error = cudaEventRecord(c->arrived, c->wires);
    if (!error) error = cudaStreamWaitEvent(c->stream, c->arrived, 0);
    return status != MTT_OK ? status : mtt__checked(c, error, "waiting for transfers");
}

static void *mtt__abort_nccl(void *nccl)
{
    mtt__nccl *const n = (mtt__nccl *)nccl;
    n->abort(n->comm);
    return NULL;
}

/* A rank is lost: ends all waits for it. Each wait resets its word, so words are set again until no stream is
   left waiting. ncclCommAbort ends NCCL's kernels at once, but returns only when no graph is left that has
   transfers, and a graph is freed only after it has run: so a thread calls it. */
static void mtt__abandon(mtt__cuda *c)
{
    const timespec pause = {0, 100000};
    mtt__copies *const x = c->copies;
    pthread_t aborting;
    int joins = 0;
    c->lost = 1;
    if (c->nccl && c->nccl->comm) {
        joins = !pthread_create(&aborting, NULL, mtt__abort_nccl, c->nccl);
        if (!joins) mtt__forget_graphs(c), mtt__abort_nccl(c->nccl);
    }
    while (cudaStreamQuery(c->wires) == cudaErrorNotReady ||
           cudaStreamQuery(c->stream) == cudaErrorNotReady) {
        if (x && cudaMemsetAsync(x->words[c->rank], 1, sizeof(uint32_t) * MTT__WORDS * (size_t)c->ranks,
                                 x->rescue)) break;
        if (x) cudaStreamSynchronize(x->rescue);
        else nanosleep(&pause, NULL);
    }
    mtt__forget_graphs(c);
    if (joins) pthread_join(aborting, NULL);
    if (c->nccl) c->nccl->comm = NULL;
}

/* Waits for all that was run, while the other ranks live. */
static mtt_status mtt__wait_for_ranks(mtt__cuda *c)
{
    const timespec pause = {0, 100000};
    mtt_status status = MTT_OK;
    cudaError_t error;
    int64_t turns;
    for (turns = 0; (error = cudaStreamQuery(c->stream)) == cudaErrorNotReady; turns++) {
        int result = 0;
        if (turns > 20000) nanosleep(&pause, NULL); /* busy waiting covers a short step */
        if (turns && turns % (turns > 20000 ? 10 : 500)) continue;
        status = c->backend.watch(c->backend.ranks, turns == 0);
        if (status == MTT_OK && c->nccl && c->nccl->comm) c->nccl->state(c->nccl->comm, &result);
        if (result && result != MTT__NCCL_IN_PROGRESS)
            status = mtt__nccl_checked(c, result, "sending and receiving");
        if (status == MTT_OK) continue;
        mtt__abandon(c);
        cudaStreamSynchronize(c->stream);
        break;
    }
    cudaGetLastError(); /* "not ready" is none */
    c->expecting = 0;
    return status != MTT_OK ? status : mtt__checked(c, error, "waiting for operations");
}

/* Sends a byte to all ranks and checks what arrives. NCCL takes memory for a connection at its first use: it
   does so here, before free memory is measured. */
static mtt_status mtt__try_transfers(mtt__cuda *c)
{
    const size_t ranks = (size_t)c->ranks;
    mtt_transfer *const list = (mtt_transfer *)mtt__host_alloc(c->env, ranks * (sizeof(*list) + 1));
    char *bytes = NULL, *const arrived = (char *)(list + ranks);
    int k = 0;
    mtt_status joined, ended;
    mtt_status status = mtt__checked(c, cudaMalloc((void **)&bytes, 2 * ranks), "taking memory");
    if (!list) status = mtt__cuda_fail(c->env, MTT_E_MEMORY, "out of host memory: %d ranks", c->ranks);
    if (status == MTT_OK)
        status = mtt__checked(c, cudaMemsetAsync(bytes, c->rank, 2 * ranks, c->stream), "writing memory");
    for (int peer = 0; peer < c->ranks && status == MTT_OK; peer++)
        if (peer != c->rank) list[k++] = {peer, bytes + peer, 1, bytes + ranks + peer, 1};
    if (status == MTT_OK) status = mtt__start_transfers(c, list, k);
    joined = mtt__join_transfers(c); /* after a failure, too: cudaFree waits for what has begun, for ever */
    ended = mtt__wait_for_ranks(c);
    if (status == MTT_OK) status = joined != MTT_OK ? joined : ended;
    if (status == MTT_OK)
        status = mtt__checked(c, cudaMemcpyAsync(arrived, bytes + ranks, ranks, cudaMemcpyDeviceToHost,
                                                 c->stream), "reading memory");
    if (status == MTT_OK) status = mtt__checked(c, cudaStreamSynchronize(c->stream), "reading memory");
    for (int peer = 0; peer < c->ranks && status == MTT_OK; peer++)
        if (arrived[peer] != (char)peer)
            status = mtt__cuda_fail(c->env, MTT_E_DEVICE,
                                    "what rank %d sends arrives changed: transfers between these GPUs do not "
                                    "work%s", peer, c->copies ? "; set the policy's nccl (--nccl)" : "");
    if (c->copies) mtt__forget_routes(c);
    if (c->copies && status == MTT_OK) status = mtt__exchange_all(c, arrived, 1);
    cudaFree(bytes); /* all have closed it */
    mtt__host_free(c->env, list);
    return status;
}

static mtt_status mtt__join_ranks(mtt__cuda *c, const mtt_policy *policy)
{
    mtt_status status;
    c->rank = policy->rank;
    c->ranks = policy->ranks;
    if (c->ranks == 1) return MTT_OK;
    if (!c->backend.exchange || !c->backend.watch)
        return mtt__cuda_fail(c->env, MTT_E_ARGUMENT, "several ranks need the backend's exchange and watch");
    status = mtt__open_wires(c);
    if (status == MTT_OK) status = mtt__open_copies(c, policy->nccl);
    if (status == MTT_OK && !c->copies) status = mtt__open_nccl(c);
    return status == MTT_OK ? mtt__try_transfers(c) : status;
}

static void mtt__leave_ranks(mtt__cuda *c)
{
    mtt__nccl *const n = c->nccl;
    if (n && n->comm) (c->lost || c->backend.watch(c->backend.ranks, 1) ? n->abort : n->leave)(n->comm);
    mtt__close_copies(c);
    if (c->arrived) cudaEventDestroy(c->arrived);
    if (c->ready) cudaEventDestroy(c->ready);
    if (c->wires) cudaStreamDestroy(c->wires);
    mtt__host_free(c->env, c->nccl); /* the library stays: its threads may still run */
}

static int mtt__late_count(const mtt__cuda *c) { return c->copies ? c->copies->late_count : 0; }

/* The host then waits for the transfers among these operations. */
static void mtt__expect_transfers(mtt__cuda *c, const mtt_op *ops, int count)
{
    for (int i = 0; i < count && c->wires; i++) c->expecting |= mtt__is_transfer(&ops[i]);
}

/* Waits for what an operation needs of other ranks. */
static mtt_status mtt__await_ranks(mtt__cuda *c, const mtt_op *op)
{
    const mtt_status status = mtt__await_weights(c, op);
    return status == MTT_OK && mtt__needs_transfers(op) ? mtt__join_transfers(c) : status;
}

static void mtt__forget_late(mtt__cuda *c)
{
    mtt__copies *const x = c->copies;
    if (!x) return;
    while (mtt__late_weights *const w = x->late) {
        x->late = w->next;
        cudaEventDestroy(w->arrived);
        mtt__host_free(c->env, w);
    }
    x->late_count = 0;
    mtt__forget_routes(c);
}

/* ---- operations ---- */

/* Math:        counters.loss and hits: the sums of all ranks' counts, and of those of earlier micro-batches
   Shapes:      counts [ranks]
   Launch:      one thread
   Requires:    -
   Traffic:     -
   Determinism: in the order of ranks
   Reference:   mtt__cpu_add_counts */
static __global__ void mtt_k_add_counts(const mtt_count *own, const mtt_count *counts, mtt_counters *counters,
                                        int rank, int ranks, int later)
{
    for (int i = 0; i < ranks; i++) mtt__add_count(counters, i == rank ? own : &counts[i], !later && i == 0);
}

static mtt_status mtt__cuda_add_counts(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_add_counts *o = MTT_OPERANDS_OF(add_counts, op);
    return mtt__launch(c, "add_counts", mtt_k_add_counts, 1, 1, mtt__at<const mtt_count>(o->count),
                       mtt__at<const mtt_count>(o->counts), mtt__at<mtt_counters>(o->counters),
                       op->shape->rank, op->shape->ranks, op->later);
}

static mtt_status mtt__cuda_sum_squares(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_sum_squares *o = MTT_OPERANDS_OF(sum_squares, op);
    return mtt__sum_squares(c, op, o->ranges, o->squares->data, 1);
}

#ifndef MTT_NO_FP8
/* Math:        mtt__merge_record of what each other rank has recorded
   Shapes:      scales [count]; rows [ranks, count]
   Launch:      a thread for each scale
   Requires:    -
   Traffic:     rows read once
   Determinism: largest values, and sums of integers
   Reference:   mtt__cpu_merge_records */
static __global__ void __launch_bounds__(256)
    mtt_k_merge_records(const mtt_scale *rows, mtt_scale *scales, int64_t count, int rank, int ranks)
{
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    for (int other = 0; other < ranks && i < count; other++)
        if (other != rank) mtt__merge_record(&scales[i], &rows[other * count + i]);
}

static mtt_status mtt__cuda_merge_records(mtt__cuda *c, const mtt_op *op)
{
    const mtt_op_merge_records *o = MTT_OPERANDS_OF(merge_records, op);
    const int64_t count = o->scales->shape[0];
    return mtt__launch(c, "merge_records", mtt_k_merge_records, mtt__blocks(count, 256), 256,
                       mtt__at<const mtt_scale>(o->rows), mtt__at<mtt_scale>(o->scales), count,
                       op->shape->rank, op->shape->ranks);
}
#endif

static mtt_status mtt__cuda_all_to_all(mtt__cuda *c, const mtt_op *op)
{
    return mtt__start_transfers(c, op->transfers, op->transfer_count);
}

static mtt_status mtt__cuda_all_gather(mtt__cuda *c, const mtt_op *op)
{
    return mtt__cuda_all_to_all(c, op);
}

static mtt_status mtt__cuda_gather_squares(mtt__cuda *c, const mtt_op *op)
{
    return mtt__cuda_all_to_all(c, op);
}

static mtt_status mtt__cuda_gather_sums(mtt__cuda *c, const mtt_op *op)
{
    return mtt__cuda_all_to_all(c, op);
}

static mtt_status mtt__cuda_gather_weights(mtt__cuda *c, const mtt_op *op)
{
    return mtt__cuda_all_to_all(c, op);
}

#else /* one rank */
static mtt_status mtt__join_ranks(mtt__cuda *, const mtt_policy *) { return MTT_OK; }
static void mtt__leave_ranks(mtt__cuda *) {}
static void mtt__end_sharing(mtt__cuda *) {}
static void mtt__expect_transfers(mtt__cuda *, const mtt_op *, int) {}
static mtt_status mtt__await_ranks(mtt__cuda *, const mtt_op *) { return MTT_OK; }
static mtt_status mtt__join_transfers(mtt__cuda *) { return MTT_OK; }
static mtt_status mtt__wait_for_ranks(mtt__cuda *) { return MTT_OK; }
static int mtt__gathers_late(const mtt__cuda *, const mtt_op *) { return 0; }
static mtt_status mtt__gather_weights(mtt__cuda *, const mtt_op *, int) { return MTT_OK; }
static mtt_status mtt__await_weights(mtt__cuda *, const mtt_op *) { return MTT_OK; }
static int mtt__is_late(const mtt__cuda *, const void *) { return 0; }
static int mtt__late_count(const mtt__cuda *) { return 0; }
static int mtt__forget_waits(mtt__cuda *) { return 0; }
static void mtt__forget_late(mtt__cuda *) {}
#endif /* MTT_NO_RANKS */

/* ----------------------------------------------------------------------------------------------------------
   >>backend
   -------------------------------------------------------------------------------------------------------- */

#define MTT__CUDA_FUNCTION(name, inputs, operands, flops, bytes, scratch) mtt__cuda_##name,
static const mtt__function mtt__cuda_functions[] = {MTT_OPS(MTT__CUDA_FUNCTION)};

/* The function that runs an operation: that of the fastest wing that takes it, else that of the lesson. */
static mtt__function mtt__function_of(const mtt__cuda *c, const mtt_op *op)
{
    mtt__function run = mtt__hopper_function(c, op);
    if (!run) run = mtt__tensor_function(op);
    if (!run) run = mtt__eight_function(op);
    if (!run) run = mtt__compact_function(op);
    return run ? run : mtt__cuda_functions[op->kind];
}

/* Waits for all that was run. The staging buffer is empty then; after a failure copies may still use it. */
static mtt_status mtt__wait(mtt__cuda *c)
{
    mtt_status status = mtt__await_weights(c, NULL);
    if (status == MTT_OK && c->expecting) status = mtt__wait_for_ranks(c);
    else if (status == MTT_OK)
        status = mtt__checked(c, cudaStreamSynchronize(c->stream), "waiting for operations");
    if (status == MTT_OK) c->staging_used = 0;
    return status;
}

/* Graphs, late weights and routes are found by the addresses of lists. */
static void mtt__forget_lists(mtt__cuda *c)
{
    mtt__forget_graphs(c);
    mtt__forget_late(c);
}

static void mtt__cuda_close(void *context)
{
    mtt__cuda *c = (mtt__cuda *)context;
    mtt_env *env = c->env;
    cudaSetDevice(c->device);
    if (c->stream) mtt__wait(c);
    mtt__forget_lists(c);
    mtt__leave_ranks(c);
    mtt__forget_plans(c);
    mtt__host_free(env, c->plans);
    if (c->blas) cublasLtDestroy(c->blas);
    if (c->staging) cudaFreeHost(c->staging);
    if (c->stream && !c->backend.stream) cudaStreamDestroy(c->stream);
    cudaGetLastError();
    mtt__host_free(env, c);
}

static mtt_status mtt__open_device(mtt__cuda *c)
{
    static const char *const names[] = {"fp32", "tf32", "bf16", "fp16", "fp8"};
    static const int needed[] = MTT_CUDA_CAPABILITIES; /* in the same order */
    int major = 0, minor = 0;
    cudaFuncAttributes code = {};
    cudaError_t error = cudaSetDevice(c->device);
    if (!error) error = cudaDeviceGetAttribute(&c->processors, cudaDevAttrMultiProcessorCount, c->device);
    if (!error)
        error = cudaDeviceGetAttribute(&c->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, c->device);
    if (!error)
        error = cudaDeviceGetAttribute(&c->processor_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                       c->device);
    if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, c->device);
    if (!error) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, c->device);
    if (!error) error = cudaFuncGetAttributes(&code, mtt_k_spread_bias<float>);
    if (error) return mtt__checked(c, error, "opening it");
    if (code.ptxVersion < needed[c->precision] || 10 * major + minor < needed[c->precision])
        return mtt__cuda_fail(c->env, MTT_E_ARGUMENT,
                              "precision %s needs compute capability %d.%d or later, and code for it: CUDA "
                              "device %d has %d.%d, mtt_kernels.cu was compiled for %d.%d: %s%s",
                              names[c->precision], needed[c->precision] / 10, needed[c->precision] % 10,
                              c->device, major, minor, code.ptxVersion / 10, code.ptxVersion % 10,
                              10 * major + minor < needed[c->precision] ? "take " : "compile it with "
                              "-arch=native, or take ",
                              c->precision == MTT_TF32 ? "fp32" : code.ptxVersion < 80 ? "fp16" : "bf16");
    /* Code for 7.5 keeps to its 64 KB on all devices: so a newer one tests what a T4 runs. */
    if (code.ptxVersion < 80) c->shared_bytes = c->processor_bytes = 64 << 10;
#ifdef MTT_NO_FP16
    if (c->precision == MTT_FP16)
        return mtt__cuda_fail(c->env, MTT_E_ARGUMENT, "mtt_kernels.cu was compiled with -DMTT_NO_FP16: "
                              "compile it without, or take bf16");
#endif
    if (!c->stream) error = cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking);
    if (!error) error = cudaMallocHost((void **)&c->staging, MTT__STAGING_BYTES);
    return mtt__checked(c, error, "opening it");
}

static mtt_status mtt__cuda_open(mtt_env *env, const mtt_backend *backend, const mtt_policy *policy,
                                 void **context)
{
    mtt__cuda *c = (mtt__cuda *)mtt__host_alloc(env, sizeof(*c));
    mtt_status status = MTT_OK;
    *context = NULL;
    if (!c) return mtt__cuda_fail(env, MTT_E_MEMORY, "out of host memory: %zu bytes are needed", sizeof(*c));
    c->env = env;
    if (!backend->device_alloc != !backend->device_free)
        status = mtt__cuda_fail(env, MTT_E_ARGUMENT, "device_alloc and device_free are set both or neither");
    c->backend = *backend;
    c->device = backend->index;
    c->stream = (cudaStream_t)backend->stream;
    c->precision = policy->precision;
    c->types[MTT_F32] = CUDA_R_32F;
    c->types[MTT_BF16_BITS] = CUDA_R_16BF, c->types[MTT_F16_BITS] = CUDA_R_16F;
    MTT_IF_EIGHT(c->types[MTT_F8_E4M3] = CUDA_R_8F_E4M3, c->types[MTT_F8_E5M2] = CUDA_R_8F_E5M2;)
    c->plans = (mtt__product_plan *)mtt__host_alloc(env, MTT__PLANS * sizeof(*c->plans));
    if (!c->plans)
        status = mtt__cuda_fail(env, MTT_E_MEMORY, "out of host memory: no room for plans of products");
    if (status == MTT_OK) status = mtt__open_device(c);
    if (status == MTT_OK) status = mtt__find_hopper(c);
    if (status == MTT_OK && cublasLtCreate(&c->blas) != CUBLAS_STATUS_SUCCESS) {
        c->blas = NULL;
        status = mtt__cuda_fail(env, MTT_E_DEVICE,
                                "cuBLASLt could not start on CUDA device %d: is its memory full?", c->device);
    }
    if (status == MTT_OK) status = mtt__join_ranks(c, policy);
    if (status == MTT_OK) *context = c;
    else {
        c->lost = 1; /* the others may be in the midst of opening: they are not waited for */
        mtt__cuda_close(c);
    }
    return status;
}

static mtt_status mtt__cuda_memory(void *context, size_t *free_bytes, size_t *all_bytes)
{
    mtt__cuda *c = (mtt__cuda *)context;
    mtt_status status = mtt__checked(c, cudaSetDevice(c->device), "selecting it");
    *free_bytes = *all_bytes = 0;
    if (status != MTT_OK) return status;
    return mtt__checked(c, cudaMemGetInfo(free_bytes, all_bytes), "asking for its memory");
}

/* Takes pinned memory of the host, so that the device copies it without staging and beside operations. */
static mtt_status mtt__alloc_pinned(mtt__cuda *c, size_t bytes, void **block)
{
    const cudaError_t error = cudaMallocHost(block, bytes);
    if (error == cudaSuccess) return MTT_OK;
    *block = NULL;
    cudaGetLastError(); /* a failed allocation is no fault of later operations */
    if (error != cudaErrorMemoryAllocation && error != cudaErrorInvalidValue) /* the latter of huge sizes */
        return mtt__checked(c, error, "taking pinned memory");
    return mtt__cuda_fail(c->env, MTT_E_MEMORY,
                          "%zu bytes (%.1f GiB) of the host's memory cannot be pinned: keep more on CUDA "
                          "device %d, end other programs, or raise the limit of locked memory (ulimit -l)",
                          bytes, (double)bytes / 1073741824, c->device);
}

static mtt_status mtt__cuda_alloc(void *context, mtt_place place, size_t bytes, void **block)
{
    mtt__cuda *c = (mtt__cuda *)context;
    size_t free_bytes = 0, all_bytes = 0;
    cudaError_t error = cudaSetDevice(c->device);
    *block = NULL;
    if (error == cudaSuccess && place == MTT_HOST) return mtt__alloc_pinned(c, bytes, block);
    if (c->backend.device_alloc) {
        *block = c->backend.device_alloc(c->backend.user, bytes);
        error = *block ? cudaSuccess : cudaErrorMemoryAllocation;
    } else if (error == cudaSuccess) error = cudaMalloc(block, bytes);
    if (error == cudaSuccess && (uintptr_t)*block % 256 == 0) return MTT_OK;
    if (error == cudaSuccess)
        return mtt__cuda_fail(c->env, MTT_E_ARGUMENT,
                              "device_alloc returned an address that is no multiple of 256: align it");
    *block = NULL;
    cudaGetLastError(); /* a failed allocation is no fault of later operations */
    if (error != cudaErrorMemoryAllocation) return mtt__checked(c, error, "taking memory");
    cudaMemGetInfo(&free_bytes, &all_bytes);
    return mtt__cuda_fail(c->env, MTT_E_BUDGET, "CUDA device %d has %zu of %zu bytes free and %zu are needed",
                          c->device, free_bytes, all_bytes, bytes);
}

/* The caller may then free lists with tensors in the block, and make others at their addresses. */
static void mtt__cuda_release(void *context, mtt_place place, void *block)
{
    mtt__cuda *c = (mtt__cuda *)context;
    if (!block) return;
    cudaSetDevice(c->device);
    mtt__wait(c); /* the caller's allocator may hand it out again at once */
    mtt__forget_lists(c);
    mtt__end_sharing(c);
    if (place == MTT_HOST) cudaFreeHost(block);
    else if (c->backend.device_free) c->backend.device_free(c->backend.user, block);
    else cudaFree(block);
}

static mtt_status mtt__cuda_upload(void *context, void *to, const void *from, size_t bytes)
{
    mtt__cuda *c = (mtt__cuda *)context;
    mtt_status status = mtt__checked(c, cudaSetDevice(c->device), "selecting it");
    if (status == MTT_OK && mtt__is_late(c, to)) status = mtt__await_weights(c, NULL);
    for (size_t at = 0; at < bytes && status == MTT_OK;) {
        size_t n = bytes - at < MTT__STAGING_BYTES ? bytes - at : MTT__STAGING_BYTES;
        if (c->staging_used + n > MTT__STAGING_BYTES) status = mtt__wait(c);
        if (status != MTT_OK) break;
        memcpy(c->staging + c->staging_used, (const char *)from + at, n);
        cudaError_t error = cudaMemcpyAsync((char *)to + at, c->staging + c->staging_used, n,
                                            cudaMemcpyDefault, c->stream);
        status = mtt__checked(c, error, "an upload");
        c->staging_used += (size_t)mtt__round_up((int64_t)n, 64);
        at += n;
    }
    return status;
}

static mtt_status mtt__cuda_download(void *context, void *to, const void *from, size_t bytes)
{
    mtt__cuda *c = (mtt__cuda *)context;
    mtt_status status = mtt__checked(c, cudaSetDevice(c->device), "selecting it");
    if (status == MTT_OK) status = mtt__wait(c);
    for (size_t at = 0; at < bytes && status == MTT_OK; at += MTT__STAGING_BYTES) {
        size_t n = bytes - at < MTT__STAGING_BYTES ? bytes - at : MTT__STAGING_BYTES;
        c->staging_used = MTT__STAGING_BYTES; /* until the wait: an upload must not write into it */
        cudaError_t error = cudaMemcpyAsync(c->staging, (const char *)from + at, n, cudaMemcpyDefault,
                                            c->stream);
        status = mtt__checked(c, error, "a download");
        if (status == MTT_OK) status = mtt__wait(c);
        if (status == MTT_OK) memcpy((char *)to + at, c->staging, n);
    }
    return status;
}

static mtt_status mtt__run_each(mtt__cuda *c, const mtt_op *ops, int count)
{
    mtt_status status = MTT_OK, joined;
    int late = 0;
    for (int i = 0; i < count && status == MTT_OK; i++) {
        if (mtt__gathers_late(c, &ops[i])) {
            late = 1;
            continue;
        }
        status = mtt__await_ranks(c, &ops[i]);
        if (status == MTT_OK) status = mtt__function_of(c, &ops[i])(c, &ops[i]);
    }
    if (status == MTT_OK && late) status = mtt__gather_weights(c, ops, count);
    joined = mtt__join_transfers(c); /* after a failure, too: mtt__wait must see transfers that have begun */
    return status != MTT_OK ? status : joined;
}

/* The entry of a list of operations; NULL if the list is short or all entries are taken. Lists and the
   addresses of their tensors do not change until a block is released; what changes is in device memory. */
static mtt__graph *mtt__find_graph(mtt__cuda *c, const mtt_op *ops, int count)
{
    mtt__graph *g = c->graphs, *end = c->graphs + c->graph_count;
    while (g < end && (g->ops != ops || g->count != count)) g++;
    if (g < end) return g;
    if (count < MTT__GRAPH_OPS || c->graph_count == MTT__GRAPHS) return NULL;
    c->graph_count++;
    g->ops = ops;
    g->count = count;
    return g;
}

/* Records the operations into a graph instead of running them. If that fails, or the graph would be too
   large, they continue to be launched one by one. */
static void mtt__capture(mtt__cuda *c, mtt__graph *g)
{
    cudaGraph_t graph = NULL;
    size_t nodes = 0;
    cudaError_t error = cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal);
    if (error == cudaSuccess) {
        g->late = mtt__forget_waits(c);
        c->capturing = 1;
        mtt_status status = mtt__run_each(c, g->ops, g->count);
        c->capturing = 0;
        error = cudaStreamEndCapture(c->stream, &graph);
        if (error == cudaSuccess) error = cudaGraphGetNodes(graph, NULL, &nodes);
        if (error == cudaSuccess && status == MTT_OK && nodes <= MTT__GRAPH_NODES)
            error = cudaGraphInstantiate(&g->exec, graph, 0);
    }
    if (error != cudaSuccess) {
        g->exec = NULL;
        cudaGetLastError(); /* errors of operations are reported when they run */
    }
    if (!g->exec) mtt__forget_waits(c);
    if (graph) cudaGraphDestroy(graph);
}

/* Operations from the first one on that gathers weights are launched one by one: a graph would wait for what
   arrives late. */
static mtt_status mtt__cuda_run(void *context, const mtt_op *ops, int count)
{
    mtt__cuda *c = (mtt__cuda *)context;
    mtt_status status = mtt__checked(c, cudaSetDevice(c->device), "selecting it");
    mtt__graph *g;
    int first = 0;
    if (status != MTT_OK) return status;
    mtt__expect_transfers(c, ops, count);
    while (first < count && !mtt__gathers_late(c, &ops[first])) first++;
    g = mtt__find_graph(c, ops, first);
    if (g && ++g->runs == 2) mtt__capture(c, g); /* the first run has chosen algorithms and loaded kernels */
    if (!g || !g->exec) return mtt__run_each(c, ops, count);
    if (g->late < mtt__late_count(c)) status = mtt__await_weights(c, NULL);
    if (status == MTT_OK)
        status = mtt__checked(c, cudaGraphLaunch(g->exec, c->stream), "a graph of operations");
    return status == MTT_OK ? mtt__run_each(c, ops + first, count - first) : status;
}

/* Refuses variables of the environment by which cuBLAS computes in another precision than the policy says. */
static mtt_status mtt__check_environment(mtt_env *env)
{
    static const struct {
        const char *name, *harmless; /* a value without effect, or NULL */
        const char *effect;
    } variables[] = {
        {"NVIDIA_TF32_OVERRIDE", NULL, "makes FP32 products TF32, or TF32 ones FP32"},
        {"CUBLAS_EMULATE_SINGLE_PRECISION", "0", "makes FP32 products of BF16 parts"},
    };
    for (size_t i = 0; i < sizeof(variables) / sizeof(*variables); i++) {
        const char *value = getenv(variables[i].name), *harmless = variables[i].harmless;
        if (value && !(harmless && !strcmp(value, harmless)))
            return mtt__cuda_fail(env, MTT_E_DEVICE, "%s is set to \"%.40s\", which %s: unset %s",
                                  variables[i].name, value, variables[i].effect, variables[i].name);
    }
    return MTT_OK;
}

/* Fills in the backend of a CUDA device, counted from 0. Refuses a device older than compute capability 7.5,
   and an environment that changes the precision. */
extern "C" mtt_status mtt_cuda_backend(mtt_env *env, int device, mtt_backend *backend)
{
    int count = 0, major = 0, minor = 0;
    cudaError_t error;
    memset(backend, 0, sizeof(*backend));
    if (mtt__check_environment(env)) return MTT_E_DEVICE;
    error = cudaGetDeviceCount(&count);
    if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (!error) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaGetLastError(); /* reported here: the next launch must not take it for its own */
    if (error)
        return mtt__cuda_fail(env, MTT_E_DEVICE,
                              "there is no CUDA device %d among %d that can be used (%s): "
                              "use the CPU backend", device, count, cudaGetErrorString(error));
    if (10 * major + minor < 75)
        return mtt__cuda_fail(env, MTT_E_DEVICE,
                              "CUDA device %d (compute capability %d.%d) is older than 7.5: use the CPU",
                              device, major, minor);
    backend->name = "cuda";
    backend->device = MTT_DEVICE_CUDA;
    backend->index = device;
    backend->open = mtt__cuda_open;
    backend->close = mtt__cuda_close;
    backend->alloc = mtt__cuda_alloc;
    backend->release = mtt__cuda_release;
    backend->memory = mtt__cuda_memory;
    backend->upload = mtt__cuda_upload;
    backend->download = mtt__cuda_download;
    backend->run = mtt__cuda_run;
    return MTT_OK;
}
