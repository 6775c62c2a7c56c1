/* sanitize_cuda.c - a small step and an evaluation of one technique, for compute-sanitizer: every tensor has a block of its own,
   every operation is launched on its own. tests/sanitize_gpu.sh builds it and runs it under all four tools.

   initcheck does not see what cuBLASLt's kernels write by way of the tensor memory accelerator: what products are about to
   write is cleared first, so that its readers can be checked. */
#define MTT_CUDA
#define MTT_SEPARATE_ALLOCS
#define MTT_IMPLEMENTATION
#include "../mtt.h"

#include <cuda_runtime_api.h>

typedef struct technique {
    const char *name;
    mtt_policy policy;
    float dropout;
} technique;

static const technique TECHNIQUES[] = {
    {"fp32", {.precision = MTT_FP32}, 0},
    {"tf32", {.precision = MTT_TF32}, 0},
    {"bf16", {.precision = MTT_BF16}, 0},
    {"fp16", {.precision = MTT_FP16}, 0},
    {"bf16_flash", {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH}, 0},
    {"fp32_flash", {.precision = MTT_FP32, .attention = MTT_ATTENTION_FLASH}, 0},
    {"bf16_window16", {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH, .window = 16}, 0},
    {"fp32_checkpointing", {.precision = MTT_FP32, .recompute = MTT_RECOMPUTE_LAYER}, 0},
    {"bf16_selective", {.precision = MTT_BF16, .recompute = MTT_RECOMPUTE_SELECTIVE}, 0},
    {"bf16_flash_chunked", {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH, .loss = MTT_LOSS_CHUNKED, .loss_chunk_rows = 50}, 0},
    {"bf16_dropout", {.precision = MTT_BF16}, 0.1f},
    {"bf16_flash_dropout", {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH}, 0.1f},
    {"bf16_accumulate", {.precision = MTT_BF16, .accumulate = 2}, 0},
};
enum { TECHNIQUE_COUNT = sizeof(TECHNIQUES) / sizeof(TECHNIQUES[0]), BATCH = 2, SEQ_LEN = 40, VOCAB = 200 };

static mtt_backend cuda;

static int is_product(mtt_op_kind kind)
{
    switch (kind) {
    case MTT_OP_LINEAR:
    case MTT_OP_ATTENTION_SCORES:
    case MTT_OP_ATTENTION_VALUES:
    case MTT_OP_CHUNKED_LOSS:
    case MTT_OP_LINEAR_BACKWARD_WEIGHT:
    case MTT_OP_LINEAR_BACKWARD_INPUT:
    case MTT_OP_ATTENTION_VALUES_BACKWARD:
    case MTT_OP_ATTENTION_SCORES_BACKWARD: return 1;
    default: return 0;
    }
}

/* Clears what a product writes without having read it. */
static void clear_results(const mtt_op *op, int accumulate)
{
    int o, i;
    for (o = 0; o < op->outputs; o++) {
        const mtt_tensor *t = op->out[o];
        for (i = 0; t && i < op->inputs; i++)
            if (op->in[i] == t) t = NULL;
        if (t && !(t->category == MTT_GRADIENTS && (accumulate || op->accumulate))) cudaMemset(t->data, 0, t->bytes);
    }
    if (op->workspace) cudaMemset(op->workspace->data, 0, op->workspace->bytes);
    cudaDeviceSynchronize(); /* cudaMemset runs on another stream than the operations */
}

static mtt_status run_singly(void *context, const mtt_op *ops, int count, int accumulate)
{
    mtt_status status = MTT_OK;
    int i;
    for (i = 0; i < count && status == MTT_OK; i++) {
        if (is_product(ops[i].kind)) clear_results(&ops[i], accumulate);
        status = cuda.run(context, &ops[i], 1, accumulate);
        cudaDeviceSynchronize();
    }
    return status;
}

static int step(const technique *k)
{
    static int32_t tokens[2 * BATCH * SEQ_LEN], targets[2 * BATCH * SEQ_LEN];
    mtt_env env = {0};
    mtt_model_desc model = {.layers = 1, .heads = 2, .d_model = 64, .vocab = VOCAB, .max_seq = SEQ_LEN, .dropout = k->dropout};
    mtt_policy policy = k->policy;
    mtt_optim_desc optim = {0};
    mtt_backend backend;
    mtt_trainer *t = NULL;
    mtt_step_info info;
    int i;
    for (i = 0; i < 2 * BATCH * SEQ_LEN; i++) {
        tokens[i] = i * 7 % VOCAB;
        targets[i] = i % 9 ? (i + 1) * 7 % VOCAB : -1;
    }
    policy.workspace_bytes = 2 << 20; /* the less is there, the less a tool has to watch */
    if (mtt_cuda_backend(&env, 0, &cuda)) return printf("%s\n", env.error), 2;
    backend = cuda;
    backend.run = run_singly;
    if (mtt_trainer_create(&env, &model, &policy, &optim, &backend, BATCH, SEQ_LEN, &t) ||
        mtt_train_step(t, tokens, targets, &info) || mtt_evaluate(t, tokens, targets, &info))
        return printf("%s\n", env.error), 1;
    printf("%s: loss %.4f\n", k->name, info.loss);
    mtt_trainer_destroy(t);
    return 0;
}

int main(int argc, char **argv)
{
    int i;
    for (i = 0; i < TECHNIQUE_COUNT; i++)
        if (argc > 1 && !strcmp(argv[1], TECHNIQUES[i].name)) return step(&TECHNIQUES[i]);
    for (i = 0; i < TECHNIQUE_COUNT; i++) printf("%s ", TECHNIQUES[i].name); /* without a name: which there are */
    printf("\n");
    return argc > 1;
}
