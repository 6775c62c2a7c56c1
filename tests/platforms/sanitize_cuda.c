/* sanitize_cuda.c [TECHNIQUE [host]] - a small step and an evaluation of one technique, or `generate`, with a
   block for each tensor. tests/sanitize_gpu.sh builds it and runs it under the four tools of
   compute-sanitizer.

   With `host` the host makes the products. On Hopper, kernels of cuBLASLt and ours write through the tensor
   memory accelerator. initcheck does not see these writes, and reports the memory as unset. racecheck ends
   with an internal error when such a kernel is launched, even if it is excluded from the check. The backend
   avoids its own where the driver makes no tensor maps, so this program, linked with
   --wrap=cudaGetDriverEntryPointByVersion, answers that the driver makes none. */
#define _GNU_SOURCE /* RTLD_NEXT */
#define MTT_CUDA
#define MTT_SEPARATE_ALLOCS
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include "../techniques.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

enum { BATCH = 2, LONGEST = 300, VOCAB = 200 };

static int on_host;

/* `count` matrices, column by column, columns `ld` apart on the device, contiguous on the host. */
typedef struct matrix {
    uint32_t type; /* cudaDataType */
    uint64_t rows, columns;
    int64_t ld, stride;
    int32_t count;
    size_t size;     /* of an element */
    float scale;     /* of 8 bits */
    mtt_tensor host;
} matrix;

/* The matrix of a layout; 0 if all went well. */
static int describe(matrix *m, cublasLtMatrixLayout_t layout)
{
    int failed = 0;
    memset(m, 0, sizeof(*m));
#define READ(attribute, field)                                                                               \
    failed |= cublasLtMatrixLayoutGetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_##attribute, &m->field,        \
                                               sizeof(m->field), NULL)
    READ(TYPE, type);
    READ(ROWS, rows);
    READ(COLS, columns);
    READ(LD, ld);
    READ(BATCH_COUNT, count);
    READ(STRIDED_BATCH_OFFSET, stride);
#undef READ
    m->scale = 1;
    switch (m->type) {
    case CUDA_R_16BF: m->host.dtype = MTT_BF16_BITS; break;
    case CUDA_R_16F: m->host.dtype = MTT_F16_BITS; break;
    case CUDA_R_8F_E4M3: m->host.dtype = MTT_F8_E4M3; break;
    case CUDA_R_8F_E5M2: m->host.dtype = MTT_F8_E5M2; break;
    default: m->host.dtype = MTT_F32;
    }
    m->size = mtt__bytes_of(m->host.dtype, 1);
    m->host.data = malloc((size_t)m->count * m->rows * m->columns * m->size);
    return failed || !m->host.data;
}

/* Between the device and the host; 0 if all went well. */
static int copy(matrix *m, const void *device, enum cudaMemcpyKind kind)
{
    int failed = 0, i;
    for (i = 0; i < m->count; i++) {
        char *far = (char *)device + (size_t)(i * m->stride) * m->size;
        char *near = (char *)m->host.data + (size_t)i * m->rows * m->columns * m->size;
        if (kind == cudaMemcpyDeviceToHost)
            failed |= cudaMemcpy2D(near, m->rows * m->size, far, (size_t)m->ld * m->size, m->rows * m->size,
                                   m->columns, kind);
        else
            failed |= cudaMemcpy2D(far, (size_t)m->ld * m->size, near, m->rows * m->size, m->rows * m->size,
                                   m->columns, kind);
    }
    return failed;
}

/* The scale of an operand in 8 bits, if it has one; 0 if all went well. */
static int read_scale(matrix *m, cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute)
{
    const void *device = NULL;
    if (m->size != 1) return 0;
    if (cublasLtMatmulDescGetAttribute(desc, attribute, &device, sizeof(device), NULL)) return 1;
    return device && cudaMemcpy(&m->scale, device, sizeof(m->scale), cudaMemcpyDeviceToHost);
}

static float element(const matrix *m, int index, int64_t row, int64_t column)
{
    float x;
    mtt__load(&m->host, (index * (int64_t)m->columns + column) * (int64_t)m->rows + row, 1, &x);
    return x * m->scale;
}

/* D = alpha op(A) op(B) + beta C + bias: cuBLASLt's own, which the kernels' file calls, or the host in its
   place. D is C. */
cublasStatus_t cublasLtMatmul(cublasLtHandle_t blas, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t a_layout, const void *B,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c_layout, void *D, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes,
                              cudaStream_t stream)
{
    typedef cublasStatus_t matmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
                                  cublasLtMatrixLayout_t, const void *, cublasLtMatrixLayout_t, const void *,
                                  const void *, cublasLtMatrixLayout_t, void *, cublasLtMatrixLayout_t,
                                  const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t);
    union { void *symbol; matmul *call; } real;
    const float scale = *(const float *)alpha, kept = *(const float *)beta;
    int32_t transpose_a = 0, transpose_b = 0;
    uint32_t epilogue = 0;
    const void *bias = NULL;
    matrix a, b, c, biases;
    int64_t i, j, l, depth;
    int failed = 0, at;
    if (!on_host) {
        real.symbol = dlsym(RTLD_NEXT, "cublasLtMatmul");
        return real.call(blas, desc, alpha, A, a_layout, B, b_layout, beta, C, c_layout, D, d_layout, algo,
                         workspace, bytes, stream);
    }
    failed |= cublasLtMatmulDescGetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose_a,
                                             sizeof(transpose_a), NULL);
    failed |= cublasLtMatmulDescGetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &transpose_b,
                                             sizeof(transpose_b), NULL);
    failed |= cublasLtMatmulDescGetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue),
                                             NULL);
    if (epilogue == CUBLASLT_EPILOGUE_BIAS)
        failed |= cublasLtMatmulDescGetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias),
                                                 NULL);
    else failed |= epilogue != CUBLASLT_EPILOGUE_DEFAULT;
    failed |= describe(&a, a_layout) | describe(&b, b_layout) | describe(&c, c_layout) |
              describe(&biases, c_layout);
    biases.count = 1, biases.columns = 1; /* one for each row of the result, of its type */
    failed |= cudaStreamSynchronize(stream);
    if (!failed) failed |= copy(&a, A, cudaMemcpyDeviceToHost) | copy(&b, B, cudaMemcpyDeviceToHost);
    if (!failed)
        failed |= read_scale(&a, desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER) |
                  read_scale(&b, desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
    if (!failed && kept != 0) failed |= copy(&c, C, cudaMemcpyDeviceToHost);
    if (!failed && bias) failed |= copy(&biases, bias, cudaMemcpyDeviceToHost);
    depth = (int64_t)(transpose_a ? a.rows : a.columns);
    for (at = 0; at < c.count && !failed; at++)
        for (j = 0; j < (int64_t)c.columns; j++)
            for (i = 0; i < (int64_t)c.rows; i++) {
                float sum = 0;
                for (l = 0; l < depth; l++)
                    sum += (transpose_a ? element(&a, at, l, i) : element(&a, at, i, l)) *
                           (transpose_b ? element(&b, at, j, l) : element(&b, at, l, j));
                sum = scale * sum + (kept != 0 ? kept * element(&c, at, i, j) : 0) +
                      (bias ? element(&biases, 0, i, 0) : 0);
                mtt__store(&c.host, (at * (int64_t)c.columns + j) * (int64_t)c.rows + i, 1, &sum);
            }
    if (!failed) failed |= copy(&c, D, cudaMemcpyHostToDevice);
    free(a.host.data);
    free(b.host.data);
    free(c.host.data);
    free(biases.host.data);
    return failed ? CUBLAS_STATUS_INTERNAL_ERROR : CUBLAS_STATUS_SUCCESS;
}

cudaError_t __real_cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *found);

cudaError_t __wrap_cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *found)
{
    if (!on_host) return __real_cudaGetDriverEntryPointByVersion(symbol, function, version, flags, found);
    *found = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

static int step(const technique *k)
{
    static int32_t tokens[2 * BATCH * LONGEST], targets[2 * BATCH * LONGEST];
    mtt_env env = {0};
    int layers = k->policy.recompute == MTT_RECOMPUTE_LAYER ? 2 : 1; /* the last may stay */
    int heads = k->heads ? k->heads : 2, seq_len = k->seq_len ? k->seq_len : 40;
    mtt_model_desc model = {.layers = layers,
                            .heads = heads,
                            .heads_kv = k->heads_kv,
                            .d_head = k->d_head,
                            .qk_norm = k->qk_norm,
                            .positions = k->positions,
                            .d_model = 64,
                            .vocab = VOCAB,
                            .max_seq = seq_len,
                            .dropout = k->dropout};
    mtt_policy policy = k->policy;
    mtt_optim_desc optim = {.clip = policy.early_update ? -1 : 1};
    mtt_backend cuda;
    mtt_trainer *t = NULL;
    mtt_step_info info;
    int i;
    for (i = 0; i < 2 * BATCH * LONGEST; i++) {
        tokens[i] = i * 7 % VOCAB;
        targets[i] = i % 9 ? (i + 1) * 7 % VOCAB : -1;
    }
    policy.workspace_bytes = 2 << 20; /* the less is there, the less a tool has to watch */
    if (mtt_cuda_backend(&env, 0, &cuda)) return printf("%s\n", env.error), 2;
    if (mtt_trainer_create(&env, &model, &policy, &optim, &cuda, BATCH, seq_len, &t) ||
        mtt_train_step(t, tokens, targets, &info) || mtt_evaluate(t, tokens, targets, &info))
        return printf("%s\n", env.error), 1;
    printf("%s: loss %.4f\n", k->name, info.loss);
    mtt_trainer_destroy(t);
    return 0;
}

static int ignore(void *user, int prompt, int32_t id, const char *text, size_t bytes)
{
    (void)user, (void)prompt, (void)id, (void)text, (void)bytes;
    return 0;
}

/* Two ids for each of five prompts, the longest of three parts of attention. No list runs twice: it would be
   captured, without the host's products. */
static int generate(mtt_precision precision, mtt_sampling sampling)
{
    enum { PROMPTS = 5, WIDEST = VOCAB * 64 };
    static int32_t tokens[LONGEST];
    static float weights[WIDEST];
    const int32_t *prompts[PROMPTS] = {tokens, tokens, tokens, tokens, tokens};
    int sizes[PROMPTS] = {LONGEST - 2, 1, 200, 7, 128}, i;
    mtt_env env = {0};
    mtt_model_desc model = {.layers = 1, .heads = 2, .d_model = 64, .vocab = VOCAB, .max_seq = LONGEST};
    mtt_generator_desc desc = {.precision = precision, .batch = PROMPTS, .chunk = 1024};
    mtt_generation job = {.prompts = prompts, .sizes = sizes, .prompt_count = PROMPTS, .count = 2,
                          .sampling = sampling, .write = ignore};
    mtt_backend cuda;
    mtt_generator *g = NULL;
    int64_t shape[2];
    for (i = 0; i < LONGEST; i++) tokens[i] = i * 7 % VOCAB;
    for (i = 0; i < WIDEST; i++) weights[i] = (float)(i * 37 % 101 - 50) * 0.002f;
    if (mtt_cuda_backend(&env, 0, &cuda)) return printf("%s\n", env.error), 2;
    if (mtt_generator_create(&env, &model, &desc, &cuda, &g)) return printf("%s\n", env.error), 1;
    for (i = 0; mtt_parameter(mtt_generator_trainer(g), i, shape); i++)
        if (mtt_parameter_set(mtt_generator_trainer(g), i, weights)) return printf("%s\n", env.error), 1;
    if (mtt_generator_run(g, NULL, &job)) return printf("%s\n", env.error), 1;
    mtt_generator_destroy(g);
    return 0;
}

static int generations(void)
{
    const mtt_sampling greedy = {0}, penalty = {.repetition_penalty = 1.2f};
    const mtt_sampling drawn = {.temperature = 0.9f, .top_k = 40, .top_p = 0.9f, .min_p = 0.01f};
    return generate(MTT_BF16, greedy) || generate(MTT_FP32, drawn) || generate(MTT_BF16, drawn) ||
           generate(MTT_BF16, penalty);
}

int main(int argc, char **argv)
{
    int i;
    on_host = argc > 2 && !strcmp(argv[2], "host");
    for (i = 0; i < TECHNIQUE_COUNT; i++)
        if (argc > 1 && !strcmp(argv[1], TECHNIQUES[i].name)) return step(&TECHNIQUES[i]);
    if (argc > 1 && !strcmp(argv[1], "generate")) return generations();
    for (i = 0; i < TECHNIQUE_COUNT; i++)
        printf("%s ", TECHNIQUES[i].name); /* without a name: which there are */
    printf("generate\n");
    return argc > 1;
}
