/* emulate_host.h - what emulate.h needs around its kernels: CUDA's runtime, cuBLASLt and CUB, as far as
   mtt_kernels.cu uses them. Work is done when it is launched, or recorded while a stream is captured. Copies
   from and to the host are done at the latest time: before the next work, or when somebody waits. What is
   asked for but not here is a link error, or "not supported". */
#pragma once
#include "emulate.h"
#include "emulate_hopper.h"
#include <cudaTypedefs.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace emulate
{

/* ---- launches, and graphs of them ---- */

struct graph : std::vector<std::function<void()>> {
    std::vector<std::shared_ptr<void>> objects; /* of the caller: they end with the last copy of the graph */
};

static graph *captured; /* where launches go; NULL: they run */
static graph copies;    /* not yet done */
static cudaError_t last_error;
static std::map<const void *, int> most_shared; /* bytes that kernels have asked for */
static const char *faulty;                      /* the call that fails next; NULL: none */
static int fault_error, fault_after;

static cudaError_t answer(bool right, cudaError_t error)
{
    if (!right) last_error = error;
    return right ? cudaSuccess : error;
}

/* The error of a call that emulate_fault has named; 0: it succeeds. */
static int fault(const char *call)
{
    if (!faulty || strcmp(faulty, call) || fault_after--) return 0;
    faulty = NULL;
    return fault_error;
}

static void end_copies(void)
{
    for (const auto &copy : std::exchange(copies, {})) copy();
}

static cudaError_t enqueue(std::function<void()> work)
{
    if (captured) captured->push_back(std::move(work));
    else end_copies(), work();
    return cudaSuccess;
}

static void launch(const char *name, const void *kernel, dim3 grid, dim3 threads, size_t bytes,
                   std::function<void()> call, int blocks = 1)
{
    const unsigned count = threads.x * threads.y * threads.z;
    const bool right = grid.x && grid.y && grid.z && grid.y < 65536 && count && count <= 1024 &&
                       bytes <= (size_t)std::max(48 << 10, most_shared[kernel]);
    const int error = fault("launch");
    if (answer(!error && right, error ? (cudaError_t)error : cudaErrorInvalidConfiguration) == cudaSuccess)
        enqueue([=] { run_grid(name, grid, threads, bytes, call, blocks); });
}

/* ---- device memory: ends before a page that cannot be touched ---- */

static const size_t MEMORY_BYTES = (size_t)16 << 30, PAGE = 4096;
static size_t used_bytes;
static std::map<void *, std::pair<void *, size_t>> blocks; /* of an address: its pages and their size */

struct shared_block {
    pid_t owner;
    int file;
    size_t bytes, begin; /* of the file, and where the block begins in it */
};

static std::map<void *, shared_block> shared_blocks; /* this process's own that others may open, */
static std::map<void *, shared_block> windows;       /* and others' */
static std::vector<pollfd> owners;                          /* of those */

static size_t whole(size_t bytes, size_t of) { return (bytes + of - 1) / of * of; }

} /* namespace emulate */

cudaError_t cudaMalloc(void **at, size_t bytes)
{
    using namespace emulate;
    const size_t all = whole(bytes, PAGE) + PAGE;
    *at = NULL;
    if (used_bytes + whole(bytes, 2 << 20) > MEMORY_BYTES) return answer(false, cudaErrorMemoryAllocation);
    char *const pages = (char *)mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return answer(false, cudaErrorMemoryAllocation);
    mprotect(pages + all - PAGE, PAGE, PROT_NONE);
    *at = pages + all - PAGE - whole(bytes, 256);
    memset(*at, 0xff, bytes);
    used_bytes += whole(bytes, 2 << 20);
    blocks[*at] = {pages, bytes};
    return cudaSuccess;
}

cudaError_t cudaFree(void *at)
{
    using namespace emulate;
    if (!at) return cudaSuccess;
    end_copies();
    const auto found = blocks.find(at);
    if (found == blocks.end()) return answer(false, cudaErrorInvalidValue);
    munmap(found->second.first, whole(found->second.second, PAGE) + PAGE);
    used_bytes -= whole(found->second.second, 2 << 20);
    blocks.erase(found);
    if (shared_blocks.count(at)) {
        const int file = shared_blocks[at].file;
        /* See cudaIpcCloseMemHandle. After a failure others may still copy from it, and to read behind the
           end of a file kills a process. A driver keeps memory that is open elsewhere. */
        if (!getenv("EMULATE_LOST_RANK") && ftruncate(file, 0)) abort();
        close(file);
        shared_blocks.erase(at);
    }
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *all)
{
    *all = emulate::MEMORY_BYTES, *free = *all - emulate::used_bytes;
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **at, size_t bytes)
{
    *at = malloc(bytes);
    return emulate::answer(*at != NULL, cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *at)
{
    free(at);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t)
{
    const auto copy = [=] { memcpy(to, from, bytes); };
    if (emulate::captured) return emulate::enqueue(copy);
    emulate::copies.push_back(copy);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t bytes,
                              size_t rows, cudaMemcpyKind, cudaStream_t)
{
    return emulate::enqueue([=] {
        for (size_t i = 0; i < rows; i++)
            memcpy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, bytes);
    });
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t)
{
    return emulate::enqueue([=] { memset(to, value, bytes); });
}

/* ---- memory of other processes: a block that is shared becomes a file in memory where it is ---- */

namespace emulate
{

static CUresult error_name(CUresult, const char **name)
{
    *name = "the driver's name";
    return CUDA_SUCCESS;
}

static CUresult find_block(CUdeviceptr *base, size_t *, CUdeviceptr at)
{
    const auto next = blocks.upper_bound((void *)at);
    if (next == blocks.begin()) return CUDA_ERROR_INVALID_VALUE;
    *base = (CUdeviceptr)std::prev(next)->first;
    return CUDA_SUCCESS;
}

/* A wait ends if a process ends that shares its memory: nobody could say its word. */
static CUresult run_words(CUstream, unsigned count, CUstreamBatchMemOpParams *list, unsigned)
{
    if (const int error = fault("cuStreamBatchMemOp")) return (CUresult)error;
    for (unsigned i = 0; i < count; i++) {
        const auto word = list[i].waitValue; /* a write has the same members */
        int32_t *const at = (int32_t *)word.address;
        const int32_t value = (int32_t)word.value;
        if (word.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32)
            enqueue([=] { __atomic_store_n(at, value, __ATOMIC_SEQ_CST); });
        else
            enqueue([=] {
                while (__atomic_load_n(at, __ATOMIC_SEQ_CST) < value &&
                       !poll(owners.data(), owners.size(), 0))
                    usleep(20);
            });
    }
    return CUDA_SUCCESS;
}

} /* namespace emulate */

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *at)
{
    using namespace emulate;
    const auto found = blocks.find(at);
    if (found == blocks.end()) return answer(false, cudaErrorInvalidValue);
    if (!shared_blocks.count(at)) {
        char *const pages = (char *)found->second.first;
        const size_t bytes = whole(found->second.second, PAGE);
        const int file = memfd_create("block", MFD_CLOEXEC);
        if (write(file, pages, bytes) != (ssize_t)bytes ||
            mmap(pages, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
            return answer(false, cudaErrorMemoryAllocation);
        shared_blocks[at] = {getpid(), file, bytes, (size_t)((char *)at - pages)};
    }
    memset(handle, 0, sizeof(*handle));
    memcpy(handle, &shared_blocks[at], sizeof(shared_block));
    return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void **at, cudaIpcMemHandle_t handle, unsigned)
{
    using namespace emulate;
    shared_block s;
    char name[64];
    if (const int error = fault("cudaIpcOpenMemHandle")) return answer(false, (cudaError_t)error);
    memcpy(&s, &handle, sizeof(s));
    snprintf(name, sizeof(name), "/proc/%d/fd/%d", (int)s.owner, s.file);
    const int file = open(name, O_RDWR | O_CLOEXEC);
    void *const pages = mmap(NULL, s.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (pages == MAP_FAILED) return answer(false, cudaErrorInvalidValue);
    owners.push_back({(int)syscall(SYS_pidfd_open, s.owner, 0), POLLIN, 0});
    *at = (char *)pages + s.begin;
    windows[*at] = {s.owner, file, s.bytes, s.begin};
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *at)
{
    using namespace emulate;
    const auto found = windows.find(at);
    struct stat now;
    if (found == windows.end()) return answer(false, cudaErrorInvalidValue);
    if (!getenv("EMULATE_LOST_RANK") && (fstat(found->second.file, &now) || !now.st_size)) {
        fprintf(stderr, "memory was freed while another process had it open\n");
        abort();
    }
    munmap((char *)at - found->second.begin, found->second.bytes);
    close(found->second.file);
    windows.erase(found);
    return cudaSuccess;
}

/* ---- the device, streams, events, graphs ---- */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return emulate::answer(device == 0, cudaErrorInvalidDevice); }

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)
{
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = EMULATE_ARCH / 100; break;
    case cudaDevAttrComputeCapabilityMinor: *value = EMULATE_ARCH / 10 % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrClusterLaunch: *value = EMULATE_ARCH >= 900; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = (EMULATE_ARCH < 800 ? 64 : EMULATE_ARCH == 800 ? 163 : EMULATE_ARCH < 900 ? 99 : 227) << 10;
        break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = (EMULATE_ARCH < 800 ? 64 : EMULATE_ARCH == 800 ? 164 : EMULATE_ARCH < 900 ? 100 : 228) << 10;
        break;
    default: return emulate::answer(false, cudaErrorInvalidValue);
    }
    return cudaSetDevice(device);
}

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value)
{
    int most = 0;
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
    if (const int error = emulate::fault("cudaFuncSetAttribute"))
        return emulate::answer(false, (cudaError_t)error);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > most)
        return emulate::answer(false, cudaErrorInvalidValue);
    emulate::most_shared[kernel] = value;
    return cudaSuccess;
}

template <class KERNEL>
cudaError_t cudaFuncSetAttribute(KERNEL *kernel, cudaFuncAttribute attribute, int value)
{
    return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}

template <class KERNEL> struct arguments_of;
template <class... P> struct arguments_of<void(P...)> {
    static constexpr int COUNT = sizeof...(P);
};

/* Whether a kernel has static shared memory is asked of one that has some in code for sm_90a only. Its
   arguments are one struct. */
template <class KERNEL> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, KERNEL *)
{
    const int error = emulate::fault("cudaFuncGetAttributes");
    const bool tiles = arguments_of<KERNEL>::COUNT == 1;
    *attributes = {};
    attributes->sharedSizeBytes = EMULATE_ARCH == 900 && tiles && !emulate::fault("sm_90a");
    attributes->ptxVersion = emulate::fault("compute_80") ? 80 : EMULATE_ARCH / 10;
    attributes->binaryVersion = EMULATE_ARCH / 10;
    return emulate::answer(!error, (cudaError_t)error);
}

cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *, const cudaLaunchConfig_t *)
{
    const int error = emulate::fault("cudaOccupancyMaxActiveClusters");
    *clusters = 2;
    return emulate::answer(!error, (cudaError_t)error);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found)
{
    const std::map<std::string, void *> functions = {
        {"cuTensorMapEncodeTiled", (void *)emulate::encode_tiled},
        {"cuStreamBatchMemOp", (void *)emulate::run_words},
        {"cuGetErrorName", (void *)emulate::error_name},
        {"cuMemGetAddressRange", (void *)emulate::find_block}};
    const bool known = functions.count(name);
    *function = known ? functions.at(name) : NULL;
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return emulate::answer(known, cudaErrorSymbolNotFound);
}

namespace emulate
{
template <class... P, class... A>
cudaError_t launch_cluster(const cudaLaunchConfig_t *launched, void (*kernel)(P...), A... arguments)
{
    const unsigned blocks = launched->numAttrs ? launched->attrs[0].val.clusterDim.x : 1;
    const bool right = blocks >= 1 && blocks <= MOST_BLOCKS && launched->gridDim.x % blocks == 0;
    if (answer(right, cudaErrorInvalidConfiguration) != cudaSuccess) return last_error;
    launch("in clusters", (const void *)kernel, launched->gridDim, launched->blockDim,
           launched->dynamicSmemBytes, [=] { kernel(static_cast<P>(arguments)...); }, (int)blocks);
    return cudaGetLastError();
}
} /* namespace emulate */
#define cudaLaunchKernelEx emulate::launch_cluster

/* For tests: after `after` more successes, `call` fails once with this error. "launch" is every kernel's,
   "sm_90a" says that the code was made without it. */
extern "C" void emulate_fault(const char *call, int error, int after)
{
    emulate::faulty = call, emulate::fault_error = error, emulate::fault_after = after;
}

cudaError_t cudaGetLastError(void) { return std::exchange(emulate::last_error, cudaSuccess); }
const char *cudaGetErrorName(cudaError_t error) { return error ? "an error" : "cudaSuccess"; }
const char *cudaGetErrorString(cudaError_t error)
{
    static char text[32];
    snprintf(text, sizeof(text), "CUDA error %d", (int)error);
    return text;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    *stream = (cudaStream_t)malloc(1);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int)
{
    return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = *greatest = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaFreeHost(stream); }
cudaError_t cudaStreamQuery(cudaStream_t)
{
    if (!emulate::captured) emulate::end_copies();
    return emulate::answer(!emulate::captured, cudaErrorStreamCaptureUnsupported);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    const int error = emulate::fault("cudaStreamSynchronize");
    return error ? emulate::answer(false, (cudaError_t)error) : cudaStreamQuery(stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data)
{
    return emulate::enqueue([=] { function(data); });
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    *event = (cudaEvent_t)malloc(1);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaFreeHost(event); }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaStreamQuery(NULL); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t)
{
    *ms = 1;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status)
{
    *status = emulate::captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                     unsigned long long *, cudaGraph_t *graph, const cudaGraphNode_t **,
                                     const cudaGraphEdgeData **, size_t *)
{
    *graph = (cudaGraph_t)emulate::captured;
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *user, cudaHostFn_t end, unsigned, unsigned)
{
    *object = (cudaUserObject_t) new std::shared_ptr<void>(user, end);
    return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned, unsigned)
{
    std::shared_ptr<void> *const moved = (std::shared_ptr<void> *)object;
    ((emulate::graph *)graph)->objects.push_back(*moved);
    delete moved;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode)
{
    emulate::captured = new emulate::graph;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph)
{
    *graph = (cudaGraph_t)std::exchange(emulate::captured, nullptr);
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count)
{
    *count = ((emulate::graph *)graph)->size();
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long)
{
    *exec = (cudaGraphExec_t) new emulate::graph(*(emulate::graph *)graph);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete (emulate::graph *)graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return cudaGraphDestroy((cudaGraph_t)exec); }
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t)
{
    emulate::end_copies();
    for (const auto &work : *(emulate::graph *)exec) work();
    return cudaSuccess;
}

/* ---- cuBLASLt: D = alpha op(A) op(B) + beta C + bias, all by columns, sums in FP32 ---- */

namespace emulate
{

struct layout {
    cudaDataType type;
    int64_t rows, columns, ld, stride;
    int batch;
};

struct product {
    cublasComputeType_t compute;
    cublasOperation_t transposed[2];
    cublasLtEpilogue_t epilogue;
    const void *bias;
    const float *scale[2];
};

static float number_of(const void *data, int64_t at, cudaDataType type)
{
    switch (type) {
    case CUDA_R_32F: return ((const float *)data)[at];
    case CUDA_R_16BF: return __bfloat162float(((const __nv_bfloat16 *)data)[at]);
    case CUDA_R_16F: return (float)((const _Float16 *)data)[at];
    default: {
        const auto kind = type == CUDA_R_8F_E4M3 ? __NV_E4M3 : __NV_E5M2;
        return __half2float(__nv_cvt_fp8_to_halfraw(((const uint8_t *)data)[at], kind));
    }
    }
}

static void put_number(void *data, int64_t at, cudaDataType type, float x)
{
    if (type == CUDA_R_32F) ((float *)data)[at] = x;
    else if (type == CUDA_R_16BF) ((__nv_bfloat16 *)data)[at] = __float2bfloat16_rn(x);
    else ((__half *)data)[at] = __float2half_rn(x);
}

/* 10 bits of mantissa, to nearest, ties to even. */
static float to_tf32(float x)
{
    const unsigned bits = __float_as_uint(x);
    return isfinite(x) ? __uint_as_float((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu) : x;
}

/* op(A) or the transpose of op(B), one k after another. */
static std::vector<float> operand(const void *data, const layout &l, bool k_is_column, bool tf32,
                                  int64_t matrix)
{
    const int64_t k = k_is_column ? l.columns : l.rows, n = k_is_column ? l.rows : l.columns;
    std::vector<float> all((size_t)(k * n));
    for (int64_t p = 0; p < k; p++)
        for (int64_t i = 0; i < n; i++) {
            const int64_t at = matrix * l.stride + (k_is_column ? p * l.ld + i : i * l.ld + p);
            const float x = number_of(data, at, l.type);
            all[(size_t)(p * n + i)] = tf32 ? to_tf32(x) : x;
        }
    return all;
}

static void multiply(const product &p, float alpha, const void *a, const layout &la, const void *b,
                     const layout &lb, float beta, const void *c, void *d, const layout &ld)
{
    const bool tf32 = p.compute == CUBLAS_COMPUTE_32F_FAST_TF32 && la.type == CUDA_R_32F;
    const int64_t m = ld.rows, n = ld.columns;
    for (int side = 0; side < 2; side++)
        if (p.scale[side]) alpha *= *p.scale[side];
    for (int matrix = 0; matrix < ld.batch; matrix++) {
        const std::vector<float> left = operand(a, la, p.transposed[0] == CUBLAS_OP_N, tf32, matrix);
        const std::vector<float> right = operand(b, lb, p.transposed[1] != CUBLAS_OP_N, tf32, matrix);
        const int64_t k = (int64_t)left.size() / m;
#pragma omp parallel for if (m * n * k > 100000)
        for (int64_t j = 0; j < n; j++) {
            std::vector<float> sums((size_t)m);
            for (int64_t q = 0; q < k; q++) {
                const float factor = right[(size_t)(q * n + j)], *const column = &left[(size_t)(q * m)];
                for (int64_t i = 0; i < m; i++) sums[(size_t)i] += factor * column[i];
            }
            for (int64_t i = 0; i < m; i++) {
                const int64_t at = matrix * ld.stride + j * ld.ld + i;
                float x = alpha * sums[(size_t)i];
                if (beta != 0) x += beta * number_of(c, at, ld.type);
                if (p.epilogue == CUBLASLT_EPILOGUE_BIAS) x += number_of(p.bias, i, ld.type);
                put_number(d, at, ld.type, x);
            }
        }
    }
}

template <class T> cublasStatus_t set(T &field, const void *value, size_t bytes)
{
    if (bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

/* What cuBLASLt takes on Ada and Hopper: in 8 bits op(A) transposed, op(B) not, and rows of whole 16 bytes.
   Here, no bias beside rows that are no multiple of 16, so that the caller's own way is tried, too. */
static bool supported(const product &p, const layout &a, const layout &b, const layout &d)
{
    const bool eight = a.type == CUDA_R_8F_E4M3 || a.type == CUDA_R_8F_E5M2;
    if (p.epilogue == CUBLASLT_EPILOGUE_BIAS && d.rows % 16) return false;
    return !eight || (EMULATE_ARCH >= 890 && p.transposed[0] == CUBLAS_OP_T &&
                      p.transposed[1] == CUBLAS_OP_N && a.ld % 16 == 0 && b.ld % 16 == 0 && a.rows % 16 == 0);
}

} /* namespace emulate */

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    *handle = (cublasLtHandle_t)malloc(1);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}
const char *cublasLtGetStatusString(cublasStatus_t status) { return status ? "not supported" : "success"; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t)
{
    *desc = (cublasLtMatmulDesc_t) new emulate::product{
        compute, {CUBLAS_OP_N, CUBLAS_OP_N}, CUBLASLT_EPILOGUE_DEFAULT, NULL, {NULL, NULL}};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    delete (emulate::product *)desc;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute, const void *value,
                                              size_t bytes)
{
    emulate::product *p = (emulate::product *)desc;
    int8_t fast;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return emulate::set(p->transposed[0], value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return emulate::set(p->transposed[1], value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return emulate::set(p->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return emulate::set(p->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return emulate::set(p->scale[0], value, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return emulate::set(p->scale[1], value, bytes);
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM: return emulate::set(fast, value, bytes);
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t ld)
{
    *out = (cublasLtMatrixLayout_t) new emulate::layout{type, (int64_t)rows, (int64_t)columns, ld, 0, 1};
    return ld >= (int64_t)rows ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    delete (emulate::layout *)layout;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void *value,
                                                size_t bytes)
{
    emulate::layout *l = (emulate::layout *)layout;
    switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return emulate::set(l->batch, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return emulate::set(l->stride, value, bytes);
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

/* Wishes change nothing here. */
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *wish)
{
    *wish = (cublasLtMatmulPreference_t)malloc(1);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t wish)
{
    free(wish);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t, const void *,
                                                    size_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t results[], int *count)
{
    static const size_t NEEDS[] = {0, 4, 64}; /* the second is refused without a workspace */
    const size_t needs = NEEDS[((emulate::layout *)d)->columns % 3];
    *count = emulate::supported(*(emulate::product *)desc, *(emulate::layout *)a, *(emulate::layout *)b,
                                *(emulate::layout *)d);
    memset(results, 0, sizeof(*results));
    results->workspaceSize = results->algo.data[0] = needs;
    return *count ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                              const void *beta, const void *c, cublasLtMatrixLayout_t, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algorithm,
                              void *workspace, size_t workspace_bytes, cudaStream_t)
{
    if (workspace_bytes < algorithm->data[0]) return CUBLAS_STATUS_INVALID_VALUE;
    const emulate::product p = *(emulate::product *)desc;
    const emulate::layout la = *(emulate::layout *)a_layout, lb = *(emulate::layout *)b_layout,
                          ld = *(emulate::layout *)d_layout;
    const float factor = *(const float *)alpha, added = *(const float *)beta;
    emulate::enqueue([=] {
        if (workspace) memset(workspace, 0xff, workspace_bytes); /* a product may write all of it */
        emulate::multiply(p, factor, a, la, b, lb, added, c, d, ld);
    });
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- CUB: a stable sort ---- */

namespace cub
{

template <class T> struct DoubleBuffer {
    T *d_buffers[2] = {NULL, NULL};
    int selector = 0;
    DoubleBuffer() = default;
    DoubleBuffer(T *current, T *alternate) : d_buffers{current, alternate} {}
    T *Current() { return d_buffers[selector]; }
    T *Alternate() { return d_buffers[selector ^ 1]; }
};

struct DeviceRadixSort {
    template <class K, class V>
    static cudaError_t SortPairs(void *scratch, size_t &bytes, DoubleBuffer<K> &keys, DoubleBuffer<V> &values,
                                 int n, int begin, int end, cudaStream_t)
    {
        if (!scratch) {
            bytes = 1024 * emulate::whole((size_t)n, 4096) / 4096 + 4096;
            return cudaSuccess;
        }
        K *const k = keys.Current(), *const k_out = keys.Alternate();
        V *const v = values.Current(), *const v_out = values.Alternate();
        const size_t all = bytes;
        keys.selector ^= 1, values.selector ^= 1;
        return emulate::enqueue([=] {
            const auto digits = [=](int i) {
                return ((uint64_t)k[i] >> begin) & (((uint64_t)1 << (end - begin)) - 1);
            };
            std::vector<int> order((size_t)n);
            for (int i = 0; i < n; i++) order[(size_t)i] = i;
            std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return digits(i) < digits(j); });
            for (int i = 0; i < n; i++) k_out[i] = k[order[(size_t)i]], v_out[i] = v[order[(size_t)i]];
            memset(k, 0xff, (size_t)n * sizeof(K));
            memset(v, 0xff, (size_t)n * sizeof(V));
            memset(scratch, 0xff, all);
        });
    }
};

} /* namespace cub */
