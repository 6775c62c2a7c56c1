/* faults_cuda.c [TECHNIQUE...] - each CUDA and cuBLASLt call of a trainer's life fails once. The trainer is
   created, runs steps one by one, captures and runs a graph, evaluates, saves, and is destroyed. After each
   failure there must be a status and a reason, or the results of a life without failures. All memory must be
   freed. The next trainer must give the bits of one without failures.

   tests/faults_gpu.sh builds it: each call in the tables below is wrapped by the linker's --wrap. A call that
   frees, ends or destroys is made, and then says that it failed. */
#define MTT_CUDA
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include "../techniques.h"
#include "../test.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

static long calls, fail_at; /* 0 = none fails */
static const char *failed_call = "none";
static cudaError_t last_error; /* CUDA keeps the error of any call until cudaGetLastError takes it */

static int fault(const char *name)
{
    if (!fail_at || ++calls != fail_at) return 0;
    failed_call = name;
    return 1;
}

#define FAULTY(type, failed, name, parameters, arguments)                                                    \
    type __real_##name parameters;                                                                           \
    type __wrap_##name parameters { return fault(#name) ? failed : __real_##name arguments; }
#define FAULTY_END(type, failed, name, parameters, arguments)                                                \
    type __real_##name parameters;                                                                           \
    type __wrap_##name parameters                                                                            \
    {                                                                                                        \
        type result = __real_##name arguments;                                                               \
        return fault(#name) ? failed : result;                                                               \
    }
#define CALL(name, parameters, arguments)                                                                    \
    FAULTY(cudaError_t, (last_error = cudaErrorUnknown), name, parameters, arguments)
#define CALL_MEMORY(name, parameters, arguments)                                                             \
    FAULTY(cudaError_t, (last_error = cudaErrorMemoryAllocation), name, parameters, arguments)
#define CALL_BLAS(name, parameters, arguments)                                                               \
    FAULTY(cublasStatus_t, CUBLAS_STATUS_INTERNAL_ERROR, name, parameters, arguments)
#define CALL_END(name, parameters, arguments)                                                                \
    FAULTY_END(cudaError_t, (last_error = cudaErrorUnknown), name, parameters, arguments)
#define CALL_BLAS_END(name, parameters, arguments)                                                           \
    FAULTY_END(cublasStatus_t, CUBLAS_STATUS_INTERNAL_ERROR, name, parameters, arguments)

/* A table's rows begin their lines, where tests/faults_gpu.sh finds the names. */
CALL(cudaGetDeviceCount, (int *count), (count))
CALL(cudaSetDevice, (int device), (device))
CALL(cudaGetDevice, (int *device), (device))
CALL(cudaMemGetInfo, (size_t *free_bytes, size_t *all_bytes), (free_bytes, all_bytes))
CALL(cudaGetDriverEntryPointByVersion,
     (const char *symbol, void **function, unsigned version, unsigned long long flags,
      enum cudaDriverEntryPointQueryResult *found),
     (symbol, function, version, flags, found))
CALL(cudaFuncGetAttributes, (struct cudaFuncAttributes *attributes, const void *function),
     (attributes, function))
CALL(cudaFuncSetAttribute, (const void *function, enum cudaFuncAttribute attribute, int value),
     (function, attribute, value))
CALL(cudaOccupancyMaxActiveClusters, (int *count, const void *function, const cudaLaunchConfig_t *launch),
     (count, function, launch))
CALL(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
     (int *count, const void *function, int block, size_t shared, unsigned flags),
     (count, function, block, shared, flags))
CALL_MEMORY(cudaMalloc, (void **block, size_t bytes), (block, bytes))
CALL_MEMORY(cudaMallocHost, (void **block, size_t bytes), (block, bytes))
CALL_MEMORY(cudaStreamCreateWithFlags, (cudaStream_t *stream, unsigned flags), (stream, flags))
CALL_MEMORY(cudaStreamCreateWithPriority, (cudaStream_t *stream, unsigned flags, int priority),
            (stream, flags, priority))
CALL_MEMORY(cudaEventCreate, (cudaEvent_t *event), (event))
CALL_MEMORY(cudaEventCreateWithFlags, (cudaEvent_t *event, unsigned flags), (event, flags))
CALL(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest), (least, greatest))
CALL_MEMORY(cudaGraphInstantiate, (cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags),
     (exec, graph, flags))
CALL(cudaMemcpyAsync,
     (void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream),
     (to, from, bytes, kind, stream))
CALL(cudaMemcpy2DAsync,
     (void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t bytes, size_t rows,
      enum cudaMemcpyKind kind, cudaStream_t stream),
     (to, to_pitch, from, from_pitch, bytes, rows, kind, stream))
CALL(cudaIpcGetMemHandle, (cudaIpcMemHandle_t *handle, void *block), (handle, block))
CALL(cudaIpcOpenMemHandle, (void **block, cudaIpcMemHandle_t handle, unsigned flags), (block, handle, flags))
CALL(cudaMemsetAsync, (void *to, int value, size_t bytes, cudaStream_t stream), (to, value, bytes, stream))
CALL(cudaStreamSynchronize, (cudaStream_t stream), (stream))
CALL(cudaStreamQuery, (cudaStream_t stream), (stream))
CALL(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags), (stream, event, flags))
CALL(cudaStreamIsCapturing, (cudaStream_t stream, enum cudaStreamCaptureStatus *status), (stream, status))
CALL(cudaStreamBeginCapture, (cudaStream_t stream, enum cudaStreamCaptureMode mode), (stream, mode))
CALL(cudaGraphGetNodes, (cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count), (graph, nodes, count))
CALL(cudaGraphLaunch, (cudaGraphExec_t exec, cudaStream_t stream), (exec, stream))
CALL(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), (event, stream))
CALL(cudaEventSynchronize, (cudaEvent_t event), (event))
CALL(cudaEventElapsedTime, (float *ms, cudaEvent_t from, cudaEvent_t to), (ms, from, to))
CALL(__cudaLaunchKernel,
     (cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream),
     (kernel, grid, block, arguments, shared, stream))
CALL(cudaLaunchKernelExC, (const cudaLaunchConfig_t *launch, const void *function, void **arguments),
     (launch, function, arguments))
CALL_BLAS(cublasLtCreate, (cublasLtHandle_t *blas), (blas))
CALL_BLAS(cublasLtMatmulDescCreate,
     (cublasLtMatmulDesc_t *desc, cublasComputeType_t compute, cudaDataType_t scale), (desc, compute, scale))
CALL_BLAS(cublasLtMatmulDescSetAttribute,
     (cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes),
     (desc, attribute, value, bytes))
CALL_BLAS(cublasLtMatrixLayoutCreate,
     (cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows, uint64_t columns, int64_t ld),
     (layout, type, rows, columns, ld))
CALL_BLAS(cublasLtMatrixLayoutSetAttribute,
     (cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const void *value,
      size_t bytes),
     (layout, attribute, value, bytes))
CALL_BLAS(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t *wish), (wish))
CALL_BLAS(cublasLtMatmulPreferenceSetAttribute,
     (cublasLtMatmulPreference_t wish, cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
      size_t bytes),
     (wish, attribute, value, bytes))
CALL_BLAS(cublasLtMatmulAlgoGetHeuristic,
     (cublasLtHandle_t blas, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
      cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t wish, int most,
      cublasLtMatmulHeuristicResult_t found[], int *count),
     (blas, desc, a, b, c, d, wish, most, found, count))
CALL_BLAS(cublasLtMatmul,
     (cublasLtHandle_t blas, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
      cublasLtMatrixLayout_t in_a, const void *b, cublasLtMatrixLayout_t in_b, const void *beta,
      const void *c, cublasLtMatrixLayout_t in_c, void *d, cublasLtMatrixLayout_t in_d,
      const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t bytes, cudaStream_t stream),
     (blas, desc, alpha, a, in_a, b, in_b, beta, c, in_c, d, in_d, algorithm, workspace, bytes, stream))
CALL_END(cudaFree, (void *block), (block))
CALL_END(cudaFreeHost, (void *block), (block))
CALL_END(cudaIpcCloseMemHandle, (void *block), (block))
CALL_END(cudaEventDestroy, (cudaEvent_t event), (event))
CALL_END(cudaGraphDestroy, (cudaGraph_t graph), (graph))
CALL_END(cudaGraphExecDestroy, (cudaGraphExec_t exec), (exec))
CALL_END(cudaStreamDestroy, (cudaStream_t stream), (stream))
CALL_BLAS_END(cublasLtDestroy, (cublasLtHandle_t blas), (blas))
CALL_BLAS_END(cublasLtMatmulDescDestroy,
     (cublasLtMatmulDesc_t desc), (desc))
CALL_BLAS_END(cublasLtMatrixLayoutDestroy,
     (cublasLtMatrixLayout_t layout), (layout))
CALL_BLAS_END(cublasLtMatmulPreferenceDestroy,
     (cublasLtMatmulPreference_t wish), (wish))

/* A capture that failed has no graph. */
cudaError_t __real_cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t __wrap_cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    cudaError_t error = __real_cudaStreamEndCapture(stream, graph);
    if (!fault("cudaStreamEndCapture")) return error;
    if (*graph) __real_cudaGraphDestroy(*graph);
    *graph = NULL;
    return last_error = cudaErrorStreamCaptureInvalidated;
}

/* While `ampere` is set, the device says that it has compute capability 8.0. */
static int ampere;
cudaError_t __real_cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device);
cudaError_t __wrap_cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    if (fault("cudaDeviceGetAttribute")) return last_error = cudaErrorUnknown;
    if (ampere && attribute == cudaDevAttrComputeCapabilityMajor) return *value = 8, cudaSuccess;
    if (ampere && attribute == cudaDevAttrComputeCapabilityMinor) return *value = 0, cudaSuccess;
    return __real_cudaDeviceGetAttribute(value, attribute, device);
}

cudaError_t __real_cudaGetLastError(void);
cudaError_t __wrap_cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error ? error : __real_cudaGetLastError();
}
cudaError_t __real_cudaPeekAtLastError(void);
cudaError_t __wrap_cudaPeekAtLastError(void)
{
    return last_error ? last_error : __real_cudaPeekAtLastError();
}

/* ---- a trainer's life ---- */

enum { BATCH = 64, LONGEST = 300, VOCAB = 1024, STEPS = 3 }; /* the head's product is tuned at length 300 */
static const size_t SLACK = 2 << 20; /* bytes: the driver takes pages of its own */

static mtt_env env;
static int32_t tokens[2 * BATCH * LONGEST], targets[2 * BATCH * LONGEST];
static const char *stage;              /* of a life */
static char reason[sizeof(env.error)]; /* of its first failure */

/* 1 = the call succeeded. A failure must say why; the first one stays in *first. */
static int succeeds(mtt_status status, mtt_status *first)
{
    if (!status) return 1;
    check(env.error[0], "%s fails while %s: no reason is given", failed_call, stage);
    if (!*first) {
        *first = status;
        memcpy(reason, env.error, sizeof(reason));
    }
    env.error[0] = 0;
    return 0;
}

/* Returns the first failure. Goes on after it, as a program might. */
static mtt_status life(const technique *k, double *loss)
{
    int seq_len = k->seq_len ? k->seq_len : 40, step;
    mtt_model_desc model = {.layers = k->policy.recompute ? 2 : 1, /* the last layer may be kept */
                            .heads = k->heads ? k->heads : 2,
                            .d_model = 64,
                            .vocab = VOCAB,
                            .max_seq = LONGEST,
                            .dropout = k->dropout};
    mtt_optim_desc optim = {0};
    mtt_backend backend;
    mtt_trainer *t = NULL;
    mtt_step_info info = {0};
    mtt_status first = MTT_OK;
    env.error[0] = 0;
    stage = "it is created";
    if (succeeds(mtt_cuda_backend(&env, 0, &backend), &first) &&
        succeeds(mtt_trainer_create(&env, &model, &k->policy, &optim, &backend, BATCH, seq_len, &t),
                 &first)) {
        stage = "it makes steps";
        for (step = 0; step < STEPS; step++) succeeds(mtt_train_step(t, tokens, targets, &info), &first);
        stage = "it evaluates";
        succeeds(mtt_evaluate(t, tokens, targets, &info), &first);
        stage = "it saves";
        succeeds(mtt_save(t, in("checkpoint"), NULL), &first);
        stage = "it is destroyed";
    } else check(!t, "%s fails: a trainer that was not created has an address", failed_call);
    mtt_trainer_destroy(t);
    *loss = info.loss;
    return first;
}

static size_t free_bytes(void)
{
    size_t left = 0, all;
    cudaDeviceSynchronize();
    check(__real_cudaMemGetInfo(&left, &all) == cudaSuccess, "the device is lost after %s", failed_call);
    return left;
}

/* Each call of a life fails. Returns how many there are. */
static long fail_each(const technique *k)
{
    double expected, loss;
    size_t before, after, start;
    long n;
    int count;
    for (count = 0; count < 2; count++) /* the first one loads kernels */
        check(life(k, &expected) == MTT_OK, "%s: %s", k->name, env.error);
    start = free_bytes();
    for (n = 1;; n++) {
        mtt_status status;
        before = free_bytes();
        calls = 0, fail_at = n;
        status = life(k, &loss);
        fail_at = 0;
        if (calls < n) break;
        check(!status || strcmp(failed_call, "cudaOccupancyMaxActiveClusters"),
              "%s: without a number of clusters the loss does not take two passes: %s", k->name, reason);
        check(status || fabs(loss / expected - 1) < 0.01, "%s: %s fails while %s: no status, loss %g for %g",
              k->name, failed_call, stage, loss, expected);
        after = free_bytes();
        check(after + SLACK >= before, "%s: %s fails while %s: %zu bytes are lost", k->name, failed_call,
              stage, before - after);
        check(life(k, &loss) == MTT_OK && loss == expected, "%s after %s: loss %.9g for %.9g, %s", k->name,
              failed_call, loss, expected, env.error);
        cudaGetLastError();
    }
    check(free_bytes() + 8 * SLACK >= start, "%s: memory is lost with time", k->name);
    return n - 1;
}

/* A device without products in 8 bits refuses FP8, and says why; it runs BF16. */
static void old_device(void)
{
    const technique fp8 = {"fp8", {.precision = MTT_FP8}, .dropout = 0};
    const technique bf16 = {"bf16", {.precision = MTT_BF16}, .dropout = 0};
    double loss;
    size_t before;
    check(life(&bf16, &loss) == MTT_OK, "bf16: %s", env.error); /* loads kernels */
    before = free_bytes();
    ampere = 1;
    check(life(&fp8, &loss) == MTT_E_ARGUMENT, "fp8 on a device of compute capability 8.0 is not refused");
    check(strstr(reason, "8.9") && strstr(reason, "8.0") && strstr(reason, "bf16"), "the refusal says: %s",
          reason);
    check(free_bytes() + SLACK >= before, "the refusal loses memory");
    check(life(&bf16, &loss) == MTT_OK, "bf16 on a device of compute capability 8.0: %s", env.error);
    ampere = 0;
}

int main(int argc, char **argv)
{
    static const char *const usual[] = {"fp32_checkpointing", "bf16_flash_wide_head",
                                        "bf16_flash_compact_dropout", "fp8"};
    long failures = 0, n;
    int i, k, devices = 0;
    if (cudaGetDeviceCount(&devices) || !devices) {
        printf("skipped: no CUDA device\n0 passed, 0 failed, 1 skipped\n");
        return 0;
    }
    for (i = 0; i < 2 * BATCH * LONGEST; i++) {
        tokens[i] = i * 7 % VOCAB;
        targets[i] = i % 9 ? (i + 1) * 7 % VOCAB : -1;
    }
    if (!open_folder()) return 1;
    old_device();
    for (i = 0; i < (argc > 1 ? argc - 1 : (int)MTT__LENGTH(usual)); i++)
        for (k = 0; k < TECHNIQUE_COUNT; k++) {
            if (strcmp(TECHNIQUES[k].name, argc > 1 ? argv[i + 1] : usual[i])) continue;
            n = fail_each(&TECHNIQUES[k]);
            printf("%s: %ld calls\n", TECHNIQUES[k].name, n);
            fflush(stdout); /* before a crash or a time limit */
            failures += n;
        }
    close_folder();
    printf("%ld calls failed, %d wrong outcomes\n", failures, failed);
    return finish() || failures < 100;
}
