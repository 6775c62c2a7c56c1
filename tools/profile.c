/* profile.c - what each operation of a training step takes: ms, TFLOP/s, GB/s, and its share of what the device could do.

   make profile ARGS="--layers 12 --heads 12 --d-model 768 --batch-size 16 --seq-len 1024 --flash-attn --chunked"
   nvcc -O3 -arch=native -DMTT_CUDA tools/profile.c mtt_kernels.cu -lcublasLt -o profile                  (the same program)

   Operations with the same FLOPs and bytes are one line. Each is run alone, in the order of a step and several times in a row:
   what fits the cache is faster here than in a step, launches that hide behind others are slower. The floor of an operation is
   the larger of its FLOPs at the peak rate of products and its bytes at the peak rate of copies. The time of a step is the mean of
   the second half of the steps, with the copy of each batch to the device; no step's loss is waited for but the last one's. */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "options.h"
#include <time.h>

enum { REPEATS = 10 };

static struct {
    mtt_model_desc model;
    mtt_policy policy;
    int batch, seq_len, steps, only_step;
    float tflops, gbs;
} set = {.model = {.layers = 4, .heads = 8, .d_model = 256, .vocab = 50257}, .policy = {.precision = MTT_BF16, .device = MTT_DEVICE_CUDA},
         .batch = 128, .seq_len = 256, .steps = 40, .tflops = 779, .gbs = 4220};

static const option options[] = {
    {"layers", INT, &set.model.layers, "transformer blocks (4)", 0, 0},
    {"heads", INT, &set.model.heads, "attention heads (8)", 0, 0},
    {"d-model", INT, &set.model.d_model, "width (256)", 0, 0},
    {"d-ff", INT, &set.model.d_ff, "width of the MLP (4 * d-model)", 0, 0},
    {"vocab-size", INT, &set.model.vocab, "ids (50257)", 0, 0},
    {"positions", CHOICE, &set.model.positions, "position encoding", "sinusoidal|learned", 0},
    {"head", CHOICE, &set.model.tied_head, "output matrix: its own, or the embedding", "untied|tied", 0},
    {"no-head-bias", FLAG, &set.model.no_head_bias, "logits without a bias", 0, 1},
    {"dropout", REAL, &set.model.dropout, "dropout probability (0)", 0, 0},
    {"batch-size", INT, &set.batch, "sequences in a micro-batch (128)", 0, 0},
    {"seq-len", INT, &set.seq_len, "tokens in a sequence (256)", 0, 0},
    {"precision", CHOICE, &set.policy.precision, "precision (bf16)", "fp32|tf32|bf16|fp16", 0},
    {"attention", CHOICE, &set.policy.attention, "attention", "plain|flash", 0},
    {"flash-attn", FLAG, &set.policy.attention, "the same as --attention flash", 0, MTT_ATTENTION_FLASH},
    {"window-size", INT, &set.policy.window, "keys that a query sees (0: all), with --flash-attn", 0, 0},
    {"recompute", CHOICE, &set.policy.recompute, "what the backward pass makes again", "none|selective|layer|segments", 0},
    {"loss", CHOICE, &set.policy.loss, "logits of all tokens or of a chunk in memory", "full|chunked", 0},
    {"chunked", FLAG, &set.policy.loss, "the same as --loss chunked", 0, MTT_LOSS_CHUNKED},
    {"chunk-rows", INT, &set.policy.loss_chunk_rows, "tokens of a chunk (the library's default)", 0, 0},
    {"compact", FLAG, &set.policy.state, "the compact optimizer state", 0, MTT_STATE_COMPACT},
    {"device", CHOICE, &set.policy.device, "who computes (cuda)", "cpu|cuda", 0},
    {"steps", INT, &set.steps, "steps, of which the first half warms up; 2 or more (40)", 0, 0},
    {"only-step", FLAG, &set.only_step, "no operations: a step's time and memory as one line of JSON", 0, 1},
    {"peak-tflops", REAL, &set.tflops, "rate of large products (779: BF16 on an H200)", 0, 0},
    {"peak-gbs", REAL, &set.gbs, "rate of large copies, read and written (4220: an H200)", 0, 0},
};

/* Operations that cost the same. */
typedef struct {
    mtt_op_info about;
    int count;
    double ms;
} line;

static int fail(const mtt_env *env)
{
    fprintf(stderr, "profile: %s\n", env->error);
    return 1;
}

/* ms since some moment. */
static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

static int by_time(const void *a, const void *b)
{
    double x = ((const line *)a)->ms, y = ((const line *)b)->ms;
    return (x < y) - (x > y);
}

/* Uniform in [0, 1), by Knuth's linear congruential generator. */
static double uniform(void)
{
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-53;
}

/* Text-like tokens: few of them are frequent. */
static void fill_tokens(int32_t *tokens, int32_t *targets, int count)
{
    int i;
    for (i = 0; i < count; i++) {
        double u = uniform();
        tokens[i] = (int32_t)(set.model.vocab * u * u * u * u);
        targets[i] = (int32_t)(set.model.vocab * uniform());
    }
}

int main(int argc, char **argv)
{
    static line lines[256];
    mtt_env env = {0};
    mtt_optim_desc optim = {0};
    mtt_backend backend = *mtt_cpu_backend();
    mtt_trainer *t;
    mtt_step_info info;
    mtt_op_info about;
    int code = option_parse(options, sizeof(options) / sizeof(options[0]), argc, argv), half = set.steps / 2, count = 0;
    int tokens_count, i, k;
    int32_t *tokens;
    double total = 0, floor_total = 0, start = 0, step_ms, ms;
    if (code) return code == OPTION_HELP ? 0 : code;
    if (set.steps < 2) return option_fail("profile: --steps must be 2 or more");
    if (set.seq_len > 1024) set.model.max_seq = set.seq_len;
    tokens_count = set.batch * set.seq_len;
    tokens = malloc(2 * sizeof(*tokens) * (size_t)tokens_count);
    if (!tokens) return fprintf(stderr, "profile: no memory for %d tokens\n", tokens_count), 1;
    fill_tokens(tokens, tokens + tokens_count, tokens_count);
    if (set.policy.device == MTT_DEVICE_CUDA && mtt_cuda_backend(&env, 0, &backend)) return fail(&env);
    if (mtt_trainer_create(&env, &set.model, &set.policy, &optim, &backend, set.batch, set.seq_len, &t)) return fail(&env);
    for (i = 1; i <= set.steps; i++) {
        if (mtt_train_step(t, tokens, tokens + tokens_count, i == half || i == set.steps ? &info : NULL)) return fail(&env);
        if (i == half) start = now_ms();
    }
    step_ms = (now_ms() - start) / (set.steps - half);
    if (set.only_step) {
        printf("{\"ms\": %.4f, \"tokens_per_s\": %.1f, \"arena_bytes\": %zu, \"loss\": %.5f}\n", step_ms, tokens_count / step_ms * 1e3,
               info.arena_bytes, info.loss);
        return mtt_trainer_destroy(t), free(tokens), 0;
    }
    for (i = 0; mtt_schedule_op(mtt_trainer_schedule(t), i, &about); i++) {
        for (k = 0; k < count; k++)
            if (!strcmp(lines[k].about.name, about.name) && lines[k].about.flops == about.flops &&
                lines[k].about.traffic_bytes == about.traffic_bytes) break;
        if (k == 256) return fprintf(stderr, "profile: more than 256 different operations\n"), 1;
        if (k == count) lines[count++].about = about;
        lines[k].count++;
        if (mtt_profile(t, i, REPEATS, &ms)) return fail(&env);
        lines[k].ms += ms;
    }
    qsort(lines, (size_t)count, sizeof(*lines), by_time);
    printf("| operation | widths | times | ms | TFLOP/s | GB/s | share of the peak |\n|:--|:--|--:|--:|--:|--:|--:|\n");
    for (k = 0; k < count; k++) {
        double flops = lines[k].about.flops * lines[k].count, bytes = lines[k].about.traffic_bytes * lines[k].count;
        double floor_ms = fmax(flops / ((double)set.tflops * 1e9), bytes / ((double)set.gbs * 1e6));
        total += lines[k].ms;
        floor_total += floor_ms;
        printf("| %s | %lld > %lld | %d | %.3f | %.1f | %.0f | %.0f %% |\n", lines[k].about.name,
               (long long)lines[k].about.width_in, (long long)lines[k].about.width_out,
               lines[k].count, lines[k].ms, flops / lines[k].ms * 1e-9, bytes / lines[k].ms * 1e-6, 100 * floor_ms / lines[k].ms);
    }
    printf("\noperations %.3f ms, their floors %.3f ms; a step %.3f ms, %.0f tokens/s; arena %.1f MiB\n", total, floor_total,
           step_ms, tokens_count / step_ms * 1e3, (double)info.arena_bytes / 1048576);
    mtt_trainer_destroy(t);
    free(tokens);
    return 0;
}
