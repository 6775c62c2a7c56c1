/* profile.c - measures each operation of a training step: ms, TFLOP/s, GB/s, its share of the device's peak.

   make profile ARGS="gpt2_16 gpt2_64"      (tools/profile.sh: BF16 and FP8 side by side)
   make profile ARGS="--layers 12 --heads 12 --d-model 768 --batch-size 16 --seq-len 1024 --flash --chunked"
   nvcc -O3 -arch=native -DMTT_CUDA tools/profile.c mtt_kernels.cu -lcublasLt -o profile   (the same program)

   Operations with the same FLOPs and bytes share a line. Each operation is run alone, several times in a row,
   in the order of a step. Operands that fit the cache make it faster here than in a step. A launch that a
   step hides behind other work makes it slower. The floor of an operation is the larger of two times: its
   FLOPs at the peak rate of products, and its bytes at the peak rate of copies. The time of a step is the
   mean over the second half of the steps. It includes the copy of each batch to the device. The host waits
   only after the middle and the last step.
   A second table has forward pass, backward pass and optimizer: mean and standard deviation of 10 steps after
   5 others, each phase with a wait at its end, which a step does not have. Phases and operations are NVTX
   ranges: nsys profile build/profile ... shows them. A third table has the FLOPs of each component.
   --only flash reports the sum of all operations whose names begin so: attention without the rest of a layer.
   --generate N reports the time of a generated token instead, for a generator with random weights.
   With --ranks 2, two processes with a GPU each train together. Each first trains alone, because GPUs of one
   host differ by a few per cent: the step of all ranks cannot be shorter than that of the slowest. */
#define MTT_IMPLEMENTATION
#define MTT_BACKEND_API /* its operations and tensors */
#include "../mtt.h"
#include "alone.h"
#include "options.h"
#include <time.h>
#if defined(MTT_CUDA) && defined(__has_include)
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define BEGIN_RANGE(name) nvtxRangePushA(name)
#define END_RANGE() nvtxRangePop()
#endif
#endif
#ifndef BEGIN_RANGE
#define BEGIN_RANGE(name) (void)(name)
#define END_RANGE() (void)0
#endif

enum { REPEATS = 10, LINES = 256, PROMPT = 16, WARMUP = 5, COMPONENTS = 9 };

static struct {
    mtt_model_desc model;
    mtt_policy policy;
    int batch, seq_len, steps, only_step, generate;
    const char *only;
    float tflops, gbs;
} set = {.model = {.layers = 4, .heads = 8, .d_model = 256, .vocab = 50257},
         .policy = {.precision = MTT_BF16, .device = MTT_DEVICE_CUDA},
         .batch = 128, .seq_len = 256, .steps = 40, .tflops = 779, .gbs = 4220};

static const option options[] = {
    TITLE("usage: profile [option...]"),
    INT("batch-size", &set.batch, 1, "sequences in a micro-batch"),
    INT("seq-len", &set.seq_len, 1, "tokens in a sequence"),
    INT("steps", &set.steps, 2, "steps; the first half is a warmup and is not timed"),
    FLAG("only-step", &set.only_step, 1, "print only time and memory of a step, as one line of JSON"),
    TEXT("only", &set.only, "print only the time of operations whose names begin so, as one line of JSON"),
    INT("generate", &set.generate, 1, "time this many new tokens for each of batch-size prompts of 16"),
    REAL("peak-tflops", &set.tflops, 1e-30, "peak rate of products; default: an H200, BF16"),
    REAL("peak-gbs", &set.gbs, 1e-30, "peak rate of copies, reads plus writes; default: an H200"),
    FIELDS("Model:", mtt_model_fields, &set.model),
    FIELDS("Technique; its words are also options, as in --flash --chunked:", mtt_policy_fields, &set.policy),
};

/* Operations that cost the same. */
typedef struct line {
    const mtt_op *op; /* the first of them */
    int count;
    double ms;
} line;

static line lines[LINES];
static int line_count;

/* Phases of steps, which `run_phases` times. */
static struct {
    mtt_backend device;    /* it does the work */
    const mtt_tensor *any; /* a download from it waits for the device */
    int on, step;
    double ms[REPEATS + WARMUP][MTT_PHASE_COUNT];
} phases;

/* FLOPs of a part of the network. */
typedef struct component {
    const char *name;
    double flops[MTT_PHASE_COUNT], again;
} component;

static mtt_env env;

/* ms since some moment. */
static double now_ms(void)
{
    struct timespec now = {0, 0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* Uniform in [0, 1), from Knuth's linear congruential generator. */
static double uniform(void)
{
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-53;
}

/* Few tokens are frequent, as in text. */
static void fill_tokens(int32_t *tokens, int32_t *targets, int count)
{
    int i;
    for (i = 0; i < count; i++) {
        double u = uniform();
        tokens[i] = (int32_t)(set.model.vocab * u * u * u * u);
        targets[i] = (int32_t)(set.model.vocab * uniform());
    }
}

/* The line of an operation; NULL if there is no room for another one. */
static line *find_line(const mtt_op *op)
{
    line *l;
    for (l = lines; l < lines + line_count; l++)
        if (l->op->kind == op->kind && l->op->flops == op->flops &&
            l->op->traffic_bytes == op->traffic_bytes) return l;
    if (line_count == LINES) return NULL;
    l = &lines[line_count++];
    l->op = op;
    return l;
}

static int by_time(const void *a, const void *b)
{
    double x = ((const line *)a)->ms, y = ((const line *)b)->ms;
    return (x < y) - (x > y);
}

/* Trains with the backend's ranks, or alone. `ms`: of a step. */
static mtt_status train(const mtt_backend *backend, const int32_t *tokens, const int32_t *targets,
                        mtt_trainer **t, double *ms, mtt_step_info *info)
{
    const mtt_optim_desc optim = {.clip = set.policy.early_update ? -1.0f : 0};
    const int half = set.steps / 2;
    mtt_status status;
    double start = 0;
    int i;
    set.policy.ranks = mtt_ranks_count(backend->ranks);
    status = mtt_trainer_create(&env, &set.model, &set.policy, &optim, backend, set.batch, set.seq_len, t);
    for (i = 1; i <= set.steps && !status; i++) {
        status = mtt_train_step(*t, tokens, targets, i == half || i == set.steps ? info : NULL);
        if (i == half) start = now_ms();
    }
    *ms = (now_ms() - start) / (set.steps - half);
    return status;
}

static mtt_status measure(mtt_trainer *t)
{
    int i, count;
    const mtt_op *ops = mtt_schedule_ops(mtt_trainer_schedule(t), &count);
    mtt_status status = MTT_OK;
    for (i = 0; !status && i < count; i++) {
        line *l = find_line(&ops[i]);
        double ms;
        if (!l) {
            snprintf(env.error, sizeof(env.error), "there are more than %d different operations", LINES);
            return MTT_E_ARGUMENT;
        }
        BEGIN_RANGE(mtt_op_name(ops[i].kind));
        status = mtt_profile(t, i, REPEATS, &ms);
        END_RANGE();
        l->count++;
        l->ms += ms;
    }
    qsort(lines, (size_t)line_count, sizeof(*lines), by_time);
    return status;
}

/* ---- phases ---- */

/* Early updates belong to the optimizer, too. */
static mtt_phase phase_of(const mtt_op *op) { return MTT_IS_UPDATE(op) ? MTT_STEP : op->phase; }

/* Runs operations; with phases.on, those of a phase at a time, and waits for them. */
static mtt_status run_phases(void *context, const mtt_op *ops, int count)
{
    mtt_status status = MTT_OK;
    int from, to;
    if (!phases.on) return phases.device.run(context, ops, count);
    for (from = 0; from < count && !status; from = to) {
        const mtt_phase phase = phase_of(&ops[from]);
        const double start = now_ms();
        char byte;
        for (to = from + 1; to < count && phase_of(&ops[to]) == phase; to++) continue;
        BEGIN_RANGE(mtt_phase_name(phase));
        status = phases.device.run(context, ops + from, to - from);
        if (!status) status = phases.device.download(context, &byte, phases.any->data, 1);
        END_RANGE();
        phases.ms[phases.step][phase] += now_ms() - start;
    }
    return status;
}

static mtt_status measure_phases(mtt_trainer *t, const int32_t *tokens, const int32_t *targets)
{
    mtt_status status = MTT_OK;
    mtt_step_info info;
    int count;
    const mtt_tensor *const *any = mtt_schedule_tensors(mtt_trainer_schedule(t), &count);
    while (!(*any)->data) any++;
    phases.any = *any;
    phases.on = 1;
    for (phases.step = 0; phases.step < WARMUP + REPEATS && !status; phases.step++)
        status = mtt_train_step(t, tokens, targets, &info);
    phases.on = 0;
    return status;
}

static void print_phases(const mtt_schedule *schedule)
{
    static const char *const names[] = {"forward", "backward", "optimizer"};
    double flops[MTT_PHASE_COUNT] = {0};
    int count, i, phase;
    const mtt_op *ops = mtt_schedule_ops(schedule, &count);
    const int micro_batches = mtt_schedule_policy(schedule)->accumulate;
    for (i = 0; i < count; i++)
        flops[phase_of(&ops[i])] += ops[i].flops * (ops[i].phase == MTT_STEP ? 1 : micro_batches);
    printf("\n| phase | ms | deviation | GFLOP | TFLOP/s |\n|:--|--:|--:|--:|--:|\n");
    for (phase = 0; phase < MTT_PHASE_COUNT; phase++) {
        double mean = 0, square = 0;
        for (i = WARMUP; i < WARMUP + REPEATS; i++) mean += phases.ms[i][phase] / REPEATS;
        for (i = WARMUP; i < WARMUP + REPEATS; i++)
            square += pow(phases.ms[i][phase] - mean, 2) / (REPEATS - 1);
        printf("| %s | %.3f | %.3f | %.3f | %.2f |\n", names[phase], mean, sqrt(square), flops[phase] * 1e-9,
               mean > 0 ? flops[phase] / mean * 1e-9 : 0);
    }
}

/* ---- components ---- */

/* The part of the network that an operation computes: the parameter of a product, else its kind. */
static const char *component_of(const mtt_op *op)
{
    static const char *const products[] = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"};
    const char *kind = mtt_op_name(op->kind);
    int i, k;
    if (!strncmp(kind, "linear", 6)) {
        for (k = 0; k < op->inputs + op->outputs; k++)
            for (i = 0; i < LENGTH(products); i++)
                if (op->operands[k] && strstr(op->operands[k]->name, products[i])) return products[i];
        return "head";
    }
    if (phase_of(op) == MTT_STEP) return "optimizer";
    if (op->kind == MTT_OP_chunked_loss) return "head and loss";
    if (strstr(kind, "loss") || strstr(kind, "cross_entropy")) return "loss";
    if (strstr(kind, "flash") || strstr(kind, "attention") || strstr(kind, "softmax") ||
        strstr(kind, "scores"))
        return "attention: scores, softmax, values";
    return "norms, activations, residuals, embedding";
}

static void print_components(const mtt_schedule *schedule)
{
    component list[COMPONENTS];
    double all = 0;
    int count, used = 0, i, k;
    const mtt_op *ops = mtt_schedule_ops(schedule, &count);
    memset(list, 0, sizeof(list));
    for (i = 0; i < count; i++) {
        const char *name = component_of(&ops[i]);
        for (k = 0; k < used && strcmp(list[k].name, name); k++) continue;
        if (k == used) list[used++].name = name;
        if (ops[i].recomputed) list[k].again += ops[i].flops;
        else list[k].flops[phase_of(&ops[i])] += ops[i].flops;
        all += ops[i].flops;
    }
    printf("\nof a micro-batch and the optimizer's step, GFLOP\n\n"
           "| component | forward | recomputed | backward | step | share |\n|:--|--:|--:|--:|--:|--:|\n");
    for (k = 0; k < used; k++) {
        const component *c = &list[k];
        const double sum = c->flops[0] + c->flops[1] + c->flops[2] + c->again;
        printf("| %s | %.3f | %.3f | %.3f | %.3f | %.1f %% |\n", c->name, c->flops[MTT_FORWARD] * 1e-9,
               c->again * 1e-9, c->flops[MTT_BACKWARD] * 1e-9, c->flops[MTT_STEP] * 1e-9, 100 * sum / all);
    }
}

/* ---- operations ---- */

/* The last dimension; 0 if there is no tensor. */
static int64_t width(const mtt_tensor *tensor)
{
    return tensor ? tensor->shape[tensor->dims - 1] : 0;
}

/* The width of what an operation reads. FP8 makes a weight's gradient of transposed tensors, so there the
   gradient's own width counts. */
static int64_t width_read(const mtt_op *op)
{
    if (op->kind == MTT_OP_linear_backward_weight) return op->operands[op->inputs]->shape[0];
    return width(op->operands[0]);
}

static void print_lines(void)
{
    double total = 0, floor_total = 0;
    const int known = set.policy.device == MTT_DEVICE_CUDA || option_given("peak-tflops"); /* peak rates */
    const line *l;
    printf("| operation | widths | times | ms | TFLOP/s | GB/s | share of the peak |\n");
    printf("|:--|:--|--:|--:|--:|--:|--:|\n");
    for (l = lines; l < lines + line_count; l++) {
        const mtt_op *op = l->op;
        double flops = op->flops * l->count, bytes = op->traffic_bytes * l->count;
        double floor_ms = fmax(flops / ((double)set.tflops * 1e9), bytes / ((double)set.gbs * 1e6));
        total += l->ms;
        floor_total += floor_ms;
        printf("| %s | %lld > %lld | %d | %.3f |", mtt_op_name(op->kind),
               (long long)width_read(op), (long long)width(op->operands[op->inputs]), l->count, l->ms);
        printf(" %.2f | %.1f |", flops / l->ms * 1e-9, bytes / l->ms * 1e-6);
        if (known) printf(" %.0f %% |\n", 100 * floor_ms / l->ms);
        else printf(" - |\n");
    }
    printf("\noperations %.3f ms", total);
    if (known) printf(", at peak rates %.3f ms", floor_total);
    printf("; ");
}

/* ms of all operations whose names begin with --only. */
static double sum_of_only(void)
{
    const line *l;
    double sum = 0;
    for (l = lines; l < lines + line_count; l++)
        if (!strncmp(mtt_op_name(l->op->kind), set.only, strlen(set.only))) sum += l->ms;
    return sum;
}

/* Matrices get small random values, so that no step works on zeros. Gains and biases are 1. */
static mtt_status fill_weights(mtt_generator *g)
{
    mtt_status status = MTT_OK;
    int64_t shape[2], k;
    int i;
    for (i = 0; !status && mtt_parameter(mtt_generator_trainer(g), i, shape); i++) {
        int64_t count = shape[0] * (shape[1] ? shape[1] : 1);
        float *values = malloc((size_t)count * sizeof(*values));
        if (!values) return MTT_E_MEMORY;
        for (k = 0; k < count; k++) values[k] = shape[1] ? (float)(0.07 * uniform() - 0.035) : 1;
        status = mtt_parameter_set(mtt_generator_trainer(g), i, values);
        free(values);
    }
    return status;
}

static int ignore_token(void *user, int prompt, int32_t id, const char *text, size_t bytes)
{
    (void)user, (void)prompt, (void)id, (void)text, (void)bytes;
    return 0;
}

/* Continues batch-size prompts, which are at `tokens`. The cache has places for what is wanted, no more. */
static mtt_status generate(const mtt_backend *backend, const int32_t *tokens)
{
    const int most = PROMPT + set.generate, context = set.seq_len < most ? set.seq_len : most;
    const mtt_generator_desc desc = {.precision = set.policy.precision, .window = set.policy.window,
                                     .batch = set.batch, .context = context};
    mtt_generation job = {.prompt_count = set.batch, .write = ignore_token};
    const int32_t **prompts = malloc((size_t)set.batch * sizeof(*prompts));
    int *sizes = malloc((size_t)set.batch * sizeof(*sizes)), i;
    mtt_generator *g = NULL;
    double start = 0, ms;
    mtt_status status = prompts && sizes ? MTT_OK : MTT_E_MEMORY;
    for (i = 0; !status && i < set.batch; i++) {
        prompts[i] = tokens + i * set.seq_len;
        sizes[i] = set.seq_len < PROMPT ? set.seq_len : PROMPT;
    }
    job.prompts = prompts, job.sizes = sizes;
    if (!status) status = mtt_generator_create(&env, &set.model, &desc, backend, &g);
    if (!status) status = fill_weights(g);
    for (i = 0; !status && i < 2; i++) { /* the first run warms up */
        job.count = i ? set.generate : 8;
        start = now_ms();
        status = mtt_generator_run(g, NULL, &job);
    }
    ms = (now_ms() - start) / set.generate;
    if (!status)
        printf("{\"ms\": %.4f, \"tokens_per_s\": %.1f, \"arena_bytes\": %zu}\n", ms, set.batch * 1e3 / ms,
               mtt_trainer_device_bytes(mtt_generator_trainer(g)));
    mtt_generator_destroy(g);
    free(sizes);
    free(prompts);
    return status;
}

/* Told by the backend, once for each trainer. */
static void print_note(void *told, const char *text)
{
    if (!*(int *)told) fprintf(stderr, "note: %s\n", text);
    *(int *)told = 1;
}

static void print_results(const mtt_trainer *t, const mtt_step_info *info, double ms, double tokens_per_s)
{
    const mtt_schedule *schedule = mtt_trainer_schedule(t);
    if (set.only) printf("{\"ms\": %.4f}\n", sum_of_only());
    else if (set.only_step)
        printf("{\"ms\": %.4f, \"tokens_per_s\": %.1f, \"arena_bytes\": %zu, \"loss\": %.5f}\n", ms,
               tokens_per_s, info->arena_bytes, info->loss);
    else {
        print_lines();
        printf("a step %.3f ms, %.0f tokens/s; arena %.1f MiB\n", ms, tokens_per_s,
               (double)info->arena_bytes / 1048576);
        print_phases(schedule);
        print_components(schedule);
    }
}

/* Measures this rank alone, if there are several, then all. `count`: tokens of a rank's step. */
static mtt_status profile(mtt_backend *backend, mtt_ranks *ranks, const int32_t *tokens, int count,
                          mtt_trainer **t)
{
    int rank = mtt_ranks_rank(ranks);
    mtt_step_info info;
    mtt_status status = MTT_OK;
    double ms = 0;
    if (ranks) {
        status = train(backend, tokens, tokens + count, t, &ms, &info);
        if (status) return status;
        fprintf(stderr, "rank %d alone: a step %.3f ms\n", rank, ms);
        mtt_trainer_destroy(*t);
    }
    backend->ranks = ranks;
    status = train(backend, tokens, tokens + count, t, &ms, &info);
    if (!status && !set.only_step && !set.only) status = measure_phases(*t, tokens, tokens + count);
    if (!status && (!set.only_step || set.only)) status = measure(*t);
    if (!status && !rank) print_results(*t, &info, ms, 1e3 * count * mtt_ranks_count(ranks) / ms);
    return status;
}

int main(int argc, char **argv)
{
    mtt_backend backend = *mtt_cpu_backend();
    mtt_ranks *ranks = NULL;
    mtt_trainer *t = NULL;
    mtt_status status = MTT_OK;
    int code = option_parse(options, LENGTH(options), argc, argv), count, told;
    int32_t *tokens;
    if (code) return code == OPTION_HELP ? 0 : code;
    if (option_window_note(&set.policy, set.seq_len))
        fprintf(stderr, "%s\n", option_window_note(&set.policy, set.seq_len));
    if (set.seq_len > 1024) set.model.max_seq = set.seq_len;
    if (!set.policy.accumulate) set.policy.accumulate = 1;
    if ((int64_t)set.batch * set.seq_len > INT_MAX / set.policy.accumulate)
        return option_fail("--batch-size * --seq-len * --accumulate is more than 2^31 - 1 tokens: lower one");
    count = set.batch * set.seq_len * set.policy.accumulate;
    tokens = malloc(2 * sizeof(*tokens) * (size_t)count);
    if (!tokens) {
        fprintf(stderr, "profile: no memory for %d tokens: lower --batch-size\n", count);
        return EXIT_MEMORY;
    }
    fill_tokens(tokens, tokens + count, count);
    if (set.policy.ranks > 1) status = mtt_ranks_fork(&env, set.policy.ranks, 0, &ranks);
    if (!status && set.policy.device == MTT_DEVICE_CUDA)
        status = mtt_cuda_backend(&env, mtt_ranks_rank(ranks), &backend);
    told = mtt_ranks_rank(ranks) > 0;
    backend.note = print_note, backend.user = &told;
    phases.device = backend;
    if (!set.only_step && !set.only && !set.generate) backend.run = run_phases;
    if (!status && set.generate) status = generate(&backend, tokens);
    else if (!status) status = profile(&backend, ranks, tokens, count, &t);
    code = option_tell(&env, status);
    if (status) mtt_ranks_fail(ranks, env.error);
    mtt_trainer_destroy(t);
    mtt_ranks_close(ranks);
    free(tokens);
    return option_close_output(code);
}
