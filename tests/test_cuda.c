/* test_cuda.c - the CUDA backend against the CPU's: every operation of random schedules in lock-step on the same operands,
   whole models, and what the manual promises about bits. Links mtt_kernels.o; passes with a word where no GPU is there.
   `test_cuda speed [B T [plain [full]]]` times every kind of operation of a GPT-2 small instead, `test_cuda operations N` tries N schedules. */
#define MTT_CUDA
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "test.h"


static mtt_env env;
static mtt_backend cuda;
static int flash_works;
static const char *const PRECISIONS[] = {"FP32", "TF32", "BF16", "FP16"};
static const double FLOOR[] = {1e-5, 2e-3, 1e-3, 2e-4}; /* of one operation: sums in another order, roundings that tip over */

/* -------------------------------------------------------------------------------------------------- randomness ---- */

static uint64_t random_state = 1;

static uint64_t random_bits(void) /* splitmix64 (Steele et al. 2014) */
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int below(int bound)
{
    return (int)(random_bits() % (uint64_t)bound);
}

/* Mean 0 and deviation 1, a triangle: cheap, since weights are many. */
static float noise(void)
{
    uint64_t z = random_bits();
    return ((float)(z >> 40) + (float)(z >> 16 & 0xffffff) - 16777215.0f) * (2.449490f / 16777216.0f);
}

typedef struct setup {
    mtt_model_desc model;
    mtt_policy policy;
    mtt_optim_desc optim;
    int batch, seq_len;
} setup;

/* Awkward shapes first, each with what else may vary. */
static setup random_setup(int number)
{
    static const int widths[][2] = {{8, 1}, {24, 3}, {256, 8}, {40, 1}, {64, 2}, {512, 8}, {24, 1}, {768, 12}, {264, 3}, {1032, 43}};
    static const int lengths[] = {1, 31, 33, 97, 64, 8, 129}, vocabs[] = {7, 129, 1003, 256, 1, 2049};
    setup s;
    memset(&s, 0, sizeof(s));
    s.model.d_model = widths[number % 10][0];
    s.model.heads = widths[number % 10][1];
    s.model.layers = s.model.d_model > 400 ? 1 : 1 + below(2);
    s.model.d_ff = below(2) ? 0 : 8 * (1 + below(s.model.d_model / 2));
    s.model.vocab = vocabs[below(6)];
    s.seq_len = lengths[number % 7];
    s.batch = 1 + below(s.model.d_model > 400 ? 1 : 4);
    s.model.max_seq = s.seq_len + below(9);
    s.model.positions = below(2) ? MTT_POSITIONS_LEARNED : MTT_POSITIONS_SINUSOIDAL;
    s.model.tied_head = below(2);
    s.model.no_head_bias = below(3) == 0;
    s.model.dropout = below(2) ? 0.1f + 0.1f * (float)below(5) : 0;
    s.policy.precision = (mtt_precision)(number % 4);
    s.policy.loss = below(2) ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL;
    s.policy.loss_chunk_rows = 1 + below(s.batch * s.seq_len + 5);
    s.policy.attention = flash_works && below(2) ? MTT_ATTENTION_FLASH : MTT_ATTENTION_PLAIN;
    s.policy.window = below(2) ? 0 : 1 + below(s.seq_len + 2);
    s.policy.accumulate = 2;
    s.optim.lr = 1e-3f;
    s.optim.seed = 12345;
    s.optim.loss_scale = 1024;
    return s;
}

static const char *describe(const setup *s)
{
    static char text[256];
    snprintf(text, sizeof(text), "%s, C %d, H %d, F %d, V %d, B %d, T %d, W %d, dropout %g, %s attention, %s loss",
             PRECISIONS[s->policy.precision], s->model.d_model, s->model.heads, s->model.d_ff, s->model.vocab, s->batch, s->seq_len,
             s->policy.window, (double)s->model.dropout, s->policy.attention ? "flash" : "plain", s->policy.loss ? "chunked" : "full");
    return text;
}

static void random_tokens(const setup *s, int32_t *tokens, int32_t *targets, int count)
{
    int i, common = below(s->model.vocab); /* half of all are one token, as in text */
    for (i = 0; i < count; i++) {
        tokens[i] = below(2) ? common : below(s->model.vocab);
        targets[i] = below(8) ? below(s->model.vocab) : -1;
    }
}

/* ||a - b|| / ||b||; NaN where one of them is and the other is not. Pairs of NaN are what no operation has written. */
static double relative_error(const float *a, const float *b, size_t count)
{
    double difference = 0, size = 0;
    size_t i;
    for (i = 0; i < count; i++) {
        double d = (double)a[i] - (double)b[i];
        if (isnan(a[i]) && isnan(b[i])) continue;
        if (isinf(a[i]) && a[i] == b[i]) continue;
        if (isnan(d)) return d;
        difference += d * d;
        size += (double)b[i] * (double)b[i];
    }
    return size > 0 ? sqrt(difference / size) : difference > 0 ? 1e9 : 0;
}

/* --------------------------------------------------------------------------------------- operations, in lock-step ---- */

typedef struct lock_step {
    mtt_schedule *host, *device;
    char *host_arena, *device_arena;
    void *context;
} lock_step;

static int tried[MTT_OP_KIND_COUNT];
static double worst[MTT_OP_KIND_COUNT][4];

static void bind_arena(mtt_schedule *s, char *arena)
{
    int which, i;
    for (which = 0; which < MTT__PROGRAMS; which++)
        for (i = 0; i < s->programs[which].tensor_count; i++)
            s->programs[which].tensors[i].data = arena + s->programs[which].tensors[i].offset;
}

static void fill_tensor(const mtt_tensor *t, float scale, float shift)
{
    float values[256];
    int64_t count = mtt__elements(t), i, k, n;
    for (i = 0; i < count; i += n) {
        n = count - i < 256 ? count - i : 256;
        for (k = 0; k < n; k++) values[k] = scale * noise() + shift;
        mtt__store(t, i, n, values);
    }
}

static void fill_state(const setup *s, const mtt__program *p, int accumulate)
{
    mtt_control *control = (mtt_control *)p->tensors[p->control].data;
    mtt_counters *counters = (mtt_counters *)p->tensors[p->counters].data;
    int32_t *tokens = (int32_t *)p->tensors[p->tokens].data, *targets = (int32_t *)p->tensors[p->targets].data;
    int i;
    for (i = 0; i < p->tensor_count; i++) {
        const mtt_tensor *t = &p->tensors[i];
        if (!t->persistent) continue;
        if (t->category == MTT_WEIGHTS || i == p->positions) fill_tensor(t, t->rank > 1 ? 0.05f : 0.3f, t->rank > 1 ? 0 : 0.7f);
        else memset(t->data, 0, t->bytes);
        if (t->category == MTT_GRADIENTS) fill_tensor(t, 0.1f, 0);
    }
    random_tokens(s, tokens, targets, (int)p->shape.rows);
    control->seed = random_bits();
    control->micro_batch = random_bits();
    control->lr = 1e-2f;
    control->beta1 = 0.9f;
    control->beta2 = 0.99f;
    control->eps = 1e-8f;
    control->weight_decay = 0.1f;
    control->clip = below(2) ? 1.0f : 0;
    control->accumulate = accumulate;
    control->targets = p->shape.rows;
    control->scaling = s->policy.precision == MTT_FP16;
    control->row = (int32_t)(p->shape.rows - 1);
    counters->loss_scale = control->scaling ? 1024.0f : 1.0f;
    counters->loss = 3.5;
    counters->hits = 2;
    counters->updates = below(3);
}

static void compare_counters(const mtt_counters *a, const mtt_counters *b, const char *what)
{
    check(fabs(a->loss - b->loss) <= 1e-6 * fabs(b->loss) && fabs(a->grad_norm - b->grad_norm) <= 1e-5 * fabs(b->grad_norm) &&
          a->targets == b->targets && a->hits == b->hits && a->updates == b->updates && a->loss_scale == b->loss_scale &&
          a->skipped == b->skipped && a->good_steps == b->good_steps &&
          fabsf(a->gradient_scale - b->gradient_scale) <= 1e-5f * b->gradient_scale, "counters, %s: loss %.9g %.9g, norm %.9g %.9g",
          what, a->loss, b->loss, a->grad_norm, b->grad_norm);
}

/* What the device made of an output against what the CPU made of it. */
static void compare_output(lock_step *l, const setup *s, const mtt_op *op, const mtt_tensor *host, const mtt_tensor *device)
{
    size_t count = (size_t)mtt__elements(host);
    void *copy = malloc(host->bytes);
    float *a = malloc(count * sizeof(float)), *b = malloc(count * sizeof(float));
    mtt_tensor t = *host;
    double error, allowed = host->dtype == MTT_F32 && s->policy.precision != MTT_TF32 ? 1e-5 : FLOOR[s->policy.precision];
    int exact = op->kind == MTT_OP_EMBED || op->kind == MTT_OP_PICK_ROW || op->kind == MTT_OP_DROPOUT_SCORES ||
                op->kind == MTT_OP_DROPOUT_BACKWARD;
    if (host->dtype != MTT_F32 && (op->kind == MTT_OP_FLASH || op->kind == MTT_OP_FLASH_BACKWARD))
        allowed = 5 * FLOOR[s->policy.precision]; /* P and dS enter tensor cores rounded, on the CPU they stay FP32 */
    if (op->kind == MTT_OP_CHUNKED_LOSS) allowed = 10 * FLOOR[s->policy.precision]; /* several products in a row */
    check(cuda.download(l->context, copy, device->data, host->bytes) == MTT_OK, "download: %s", env.error);
    t.data = copy;
    if (host->dtype == MTT_U8) compare_counters((mtt_counters *)copy, (mtt_counters *)host->data, describe(s));
    else {
        mtt__load(&t, 0, (int64_t)count, a);
        mtt__load(host, 0, (int64_t)count, b);
        error = relative_error(a, b, count);
        check(exact ? !memcmp(copy, host->data, host->bytes) : error <= allowed, "%s of %s: error %.3g, at most %.3g (%s)", host->name,
              mtt__op_name[op->kind], error, exact ? 0 : allowed, describe(s));
        if (error > worst[op->kind][s->policy.precision]) worst[op->kind][s->policy.precision] = error;
    }
    free(copy);
    free(a);
    free(b);
}

static void step_op(lock_step *l, const setup *s, int which, int i)
{
    mtt_op *host = &l->host->programs[which].ops[i], *device = &l->device->programs[which].ops[i];
    mtt_status status;
    int o;
    for (o = 0; o < host->inputs + host->outputs; o++) {
        if (!host->in[o]) continue;
        if (o >= host->inputs && host->in[o]->first == i && !host->in[o]->persistent) memset(host->in[o]->data, 0xff, host->in[o]->bytes);
        cuda.upload(l->context, device->in[o]->data, host->in[o]->data, host->in[o]->bytes);
    }
    status = cuda.run(l->context, device, 1, mtt__control(&l->host->programs[which].tensors[l->host->programs[which].control])->accumulate);
    check(status == MTT_OK, "%s: %s (%s)", mtt__op_name[host->kind], env.error, describe(s));
    mtt__cpu_functions[host->kind](host);
    for (o = 0; o < host->outputs && status == MTT_OK; o++)
        if (host->out[o]) compare_output(l, s, host, host->out[o], device->out[o]);
    tried[host->kind]++;
}

static void operations(int setups)
{
    int number, which, i;
    for (number = 0; number < setups; number++) {
        setup s = random_setup(number);
        lock_step l;
        memset(&l, 0, sizeof(l));
        s.policy.device = MTT_DEVICE_CUDA;
        s.policy.accumulate = 1 + below(2);
        check(mtt_schedule_create(&env, &s.model, &s.policy, s.batch, s.seq_len, &l.host) == MTT_OK &&
              mtt_schedule_create(&env, &s.model, &s.policy, s.batch, s.seq_len, &l.device) == MTT_OK, "schedule: %s", env.error);
        l.host_arena = calloc(1, mtt__arena_bytes(l.host));
        check(cuda.open(&env, &cuda, &l.host->policy, &l.context) == MTT_OK, "open: %s", env.error);
        check(cuda.alloc(l.context, mtt__arena_bytes(l.host), (void **)&l.device_arena) == MTT_OK, "alloc: %s", env.error);
        bind_arena(l.host, l.host_arena);
        bind_arena(l.device, l.device_arena);
        for (which = 0; which < MTT__PROGRAMS; which++) {
            fill_state(&s, &l.host->programs[which], which == MTT__TRAIN && s.policy.accumulate > 1 && below(2));
            for (i = 0; i < l.host->programs[which].op_count; i++) step_op(&l, &s, which, i);
        }
        cuda.release(l.context, l.device_arena);
        cuda.close(l.context);
        mtt_schedule_destroy(l.host);
        mtt_schedule_destroy(l.device);
        free(l.host_arena);
    }
    printf("%-26s %5s %10s %10s %10s %10s\n", "operation", "times", "FP32", "TF32", "BF16", "FP16");
    for (i = 0; i < MTT_OP_KIND_COUNT; i++) {
        printf("%-26s %5d %10.2g %10.2g %10.2g %10.2g\n", mtt__op_name[i], tried[i], worst[i][0], worst[i][1], worst[i][2], worst[i][3]);
        check(tried[i] >= 20 || setups < 80 || ((i == MTT_OP_FLASH || i == MTT_OP_FLASH_BACKWARD) && !flash_works), "%s was tried %d times",
              mtt__op_name[i], tried[i]);
    }
}

/* --------------------------------------------------------------------------------------------------- whole models ---- */

static mtt_trainer *open_trainer(const setup *s, const mtt_backend *backend, mtt_precision precision)
{
    mtt_policy policy = s->policy;
    mtt_trainer *t = NULL;
    policy.precision = precision;
    check(mtt_trainer_create(&env, &s->model, &policy, &s->optim, backend, s->batch, s->seq_len, &t) == MTT_OK, "trainer: %s (%s)",
          env.error, describe(s));
    return t;
}

static size_t parameter_count(const mtt_trainer *t)
{
    size_t count = 0;
    int64_t shape[2];
    int i;
    for (i = 0; mtt_parameter(t, i, shape); i++) count += (size_t)(shape[0] * (shape[1] ? shape[1] : 1));
    return count;
}

typedef mtt_status (*getter)(mtt_trainer *, int, float *);

static float *read_all(mtt_trainer *t, getter get)
{
    float *all = malloc(parameter_count(t) * sizeof(float)), *at = all;
    int64_t shape[2];
    int i;
    for (i = 0; mtt_parameter(t, i, shape); i++, at += shape[0] * (shape[1] ? shape[1] : 1))
        check(get(t, i, at) == MTT_OK, "reading parameter %d: %s", i, env.error);
    return all;
}

/* Gains and biases away from 1 and 0, so that their places in the formulas are seen. */
static void disturb(mtt_trainer *t, uint64_t seed)
{
    int64_t shape[2], k;
    int i;
    random_state = seed;
    for (i = 0; mtt_parameter(t, i, shape); i++) {
        float *values = malloc((size_t)(shape[0] * (shape[1] ? shape[1] : 1)) * sizeof(float));
        if (!shape[1] && mtt_parameter_get(t, i, values) == MTT_OK) {
            for (k = 0; k < shape[0]; k++) values[k] += 0.1f * noise();
            mtt_parameter_set(t, i, values);
        }
        free(values);
    }
}

static double worst_gradient[4], worst_loss[4], worst_logits[4];

/* FP32 on the CPU is the truth; the same precision on the CPU says what error is fair. */
static void whole_model(int number)
{
    setup s = random_setup(number);
    mtt_precision precision = s.policy.precision;
    int all = 2 * s.batch * s.seq_len, step, i;
    int32_t *tokens = malloc((size_t)all * sizeof(int32_t)), *targets = malloc((size_t)all * sizeof(int32_t));
    float *logits[3], *gradients[3];
    double floor = 1e-5, fair, error, slack = precision == MTT_TF32 ? 5e-3 : precision == MTT_BF16 ? 4e-3 : precision == MTT_FP16 ? 1e-3 : 1e-5;
    mtt_trainer *t[3];
    mtt_step_info info[3];
    if (precision == MTT_TF32) floor = 5e-3;
    random_tokens(&s, tokens, targets, all);
    targets[0] = 0;
    for (i = 0; i < 3; i++) {
        t[i] = open_trainer(&s, i == 2 ? &cuda : mtt_cpu_backend(), i == 0 ? MTT_FP32 : precision);
        if (!t[i]) return;
        disturb(t[i], (uint64_t)number);
    }
    for (step = 0; step < 5; step++) {
        for (i = 0; i < 3; i++)
            check(mtt_train_step(t[i], tokens, targets, &info[i]) == MTT_OK, "step: %s (%s)", env.error, describe(&s));
        error = fabs(info[2].loss - info[0].loss) / info[0].loss;
        if (!(info[0].loss > 1e-4)) error = fabs(info[2].loss - info[0].loss);
        fair = fabs(info[1].loss - info[0].loss) / (info[0].loss > 1e-4 ? info[0].loss : 1);
        check(error <= 2 * fair + slack && info[2].targets == info[0].targets, "loss of step %d: %.8g, on the CPU %.8g, in FP32 %.8g (%s)",
              step, info[2].loss, info[1].loss, info[0].loss, describe(&s));
        if (error > worst_loss[precision]) worst_loss[precision] = error;
        if (step) continue;
        for (i = 0; i < 3; i++) gradients[i] = read_all(t[i], mtt_gradient_get);
        fair = relative_error(gradients[1], gradients[0], parameter_count(t[0]));
        error = relative_error(gradients[2], gradients[0], parameter_count(t[0]));
        check(error <= 2 * fair + floor, "gradient: error %.3g, the CPU's %.3g (%s)", error, fair, describe(&s));
        if (error / (2 * fair + floor) > worst_gradient[precision]) worst_gradient[precision] = error / (2 * fair + floor);
        for (i = 0; i < 3; i++) free(gradients[i]);
    }
    for (i = 0; i < 3; i++) {
        check(mtt_evaluate(t[i], tokens, targets, &info[i]) == MTT_OK, "evaluate: %s (%s)", env.error, describe(&s));
        logits[i] = malloc((size_t)s.model.vocab * sizeof(float));
        check(mtt_next_logits(t[i], tokens, 1 + (s.seq_len - 1) / 2, logits[i]) == MTT_OK, "next: %s (%s)", env.error, describe(&s));
    }
    fair = fabs(info[1].loss - info[0].loss);
    check(fabs(info[2].loss - info[0].loss) <= 2 * fair + slack * (1 + info[0].loss), "evaluation: %.8g, on the CPU %.8g, in FP32 %.8g (%s)",
          info[2].loss, info[1].loss, info[0].loss, describe(&s));
    fair = relative_error(logits[1], logits[0], (size_t)s.model.vocab);
    error = relative_error(logits[2], logits[0], (size_t)s.model.vocab);
    check(error <= 2 * fair + 4 * slack, "next logits: error %.3g, the CPU's %.3g (%s)", error, fair, describe(&s));
    if (error > worst_logits[precision]) worst_logits[precision] = error;
    for (i = 0; i < 3; i++) {
        free(logits[i]);
        mtt_trainer_destroy(t[i]);
    }
    free(tokens);
    free(targets);
}

static void whole_models(int setups)
{
    int number, p;
    for (number = 0; number < setups; number++) whole_model(number + 100 + number / 20);
    for (p = 0; p < 4; p++)
        printf("%s: gradient error at most %.2f of what is allowed, loss within %.2g, next logits within %.2g\n", PRECISIONS[p],
               worst_gradient[p], worst_loss[p], worst_logits[p]);
}

/* ---------------------------------------------------------------------------------------------------------- bits ---- */

static float *trained(const setup *s, double *loss)
{
    mtt_trainer *t = open_trainer(s, &cuda, s->policy.precision);
    int all = s->policy.accumulate * s->batch * s->seq_len, step;
    int32_t *tokens = malloc((size_t)all * sizeof(int32_t)), *targets = malloc((size_t)all * sizeof(int32_t));
    float *result;
    mtt_step_info info;
    random_state = 99;
    random_tokens(s, tokens, targets, all);
    for (step = 0; step < 3; step++) {
        check(mtt_train_step(t, tokens, targets, &info) == MTT_OK, "step: %s", env.error);
        loss[step] = info.loss;
    }
    result = read_all(t, mtt_parameter_get);
    loss[3] = (double)parameter_count(t);
    mtt_trainer_destroy(t);
    free(tokens);
    free(targets);
    return result;
}

/* Recomputation and repetition change no bit, in any precision, with either attention, with dropout. */
static void bits(void)
{
    int precision, attention, loss, way;
    for (precision = 0; precision < 4; precision++)
        for (attention = 0; attention <= flash_works; attention++)
            for (loss = 0; loss < 2; loss++) {
                setup s = random_setup(2);
                float *first = NULL;
                double losses[2][4];
                s.model.layers = 4;
                s.model.d_ff = 0;
                s.model.vocab = 1003;
                s.model.dropout = 0.1f;
                s.batch = 8;
                s.seq_len = 200;
                s.model.max_seq = 256;
                s.policy.precision = (mtt_precision)precision;
                s.policy.attention = (mtt_attention)attention;
                s.policy.loss = (mtt_loss)loss;
                s.policy.loss_chunk_rows = 300;
                s.policy.window = attention ? 50 : 0;
                for (way = 0; way < 6; way++) {
                    float *again;
                    s.policy.recompute = (mtt_recompute)(way % 4);
                    again = trained(&s, losses[way > 0]);
                    if (first) {
                        check(!memcmp(first, again, (size_t)losses[0][3] * sizeof(float)) && !memcmp(losses[0], losses[1], sizeof(losses[0])),
                              "other bits with recompute %d (%s)", way % 4, describe(&s));
                        free(again);
                    } else first = again;
                }
                free(first);
            }
}

/* FP16 skips what overflows and halves the scale, on the device alone. */
static void overflow(void)
{
    setup s = random_setup(2);
    mtt_trainer *t;
    int32_t tokens[64], targets[64];
    mtt_step_info info;
    float *before, *after;
    int step, skipped = 0;
    s.model.vocab = 129;
    s.batch = 1;
    s.seq_len = 32;
    s.model.max_seq = 32;
    s.policy.precision = MTT_FP16;
    s.optim.loss_scale = 0x1p30f;
    random_tokens(&s, tokens, targets, 64);
    t = open_trainer(&s, &cuda, MTT_FP16);
    before = read_all(t, mtt_parameter_get);
    for (step = 0; step < 30; step++) {
        check(mtt_train_step(t, tokens, targets, &info) == MTT_OK, "step: %s", env.error);
        if (step == 0) {
            after = read_all(t, mtt_parameter_get);
            check(info.skipped && !memcmp(before, after, parameter_count(t) * sizeof(float)), "a step that overflows changes nothing");
            free(after);
        }
        if (info.skipped) check(info.loss_scale == 0x1p30f / (float)(1u << skipped++), "the loss scale halves: %g", (double)info.loss_scale);
    }
    check(skipped > 0 && skipped < 30, "%d of 30 steps skipped", skipped);
    free(before);
    mtt_trainer_destroy(t);
}

/* What does not fit is refused in words, and the process goes on. */
static void too_large(void)
{
    setup s = random_setup(2);
    mtt_trainer *t = NULL;
    s.model.d_model = 16384;
    s.model.heads = 64;
    s.model.layers = 512;
    check(mtt_trainer_create(&env, &s.model, &s.policy, &s.optim, &cuda, 1, 1, &t) == MTT_E_BUDGET && !t, "too large a model: %s",
          env.error);
    printf("%s\n", env.error);
    s = random_setup(2);
    mtt_trainer_destroy(open_trainer(&s, &cuda, MTT_BF16));
}

/* --------------------------------------------------------------------------------------------------------- speed ---- */

/* Repeats each operation of a step on its own and adds up kinds. */
static int speed(int batch, int seq_len, int attention, int precision, int loss)
{
    mtt_model_desc model;
    mtt_policy policy;
    mtt_optim_desc optim;
    mtt_trainer *t;
    mtt_step_info info;
    double ms[MTT_OP_KIND_COUNT] = {0}, bytes[MTT_OP_KIND_COUNT] = {0}, flops[MTT_OP_KIND_COUNT] = {0}, total = 0, best = 1e9;
    int count[MTT_OP_KIND_COUNT] = {0}, i, k;
    int32_t *tokens = malloc((size_t)(batch * seq_len) * sizeof(int32_t)), *targets = malloc((size_t)(batch * seq_len) * sizeof(int32_t));
    memset(&model, 0, sizeof(model));
    memset(&policy, 0, sizeof(policy));
    memset(&optim, 0, sizeof(optim));
    model.layers = 12;
    model.heads = 12;
    model.d_model = 768;
    model.vocab = 50257;
    model.max_seq = seq_len;
    model.positions = MTT_POSITIONS_LEARNED;
    model.tied_head = model.no_head_bias = 1;
    policy.precision = (mtt_precision)precision;
    policy.attention = (mtt_attention)attention;
    policy.loss = (mtt_loss)loss;
    for (i = 0; i < batch * seq_len; i++) {
        double u = (double)(random_bits() >> 11) * 0x1p-53;
        tokens[i] = (int32_t)(50000 * u * u * u * u); /* few tokens are frequent */
        targets[i] = below(50257);
    }
    if (mtt_trainer_create(&env, &model, &policy, &optim, &cuda, batch, seq_len, &t) != MTT_OK) return printf("%s\n", env.error), 1;
    for (i = 0; i < 8; i++) {
        if (mtt_train_step(t, tokens, targets, &info) != MTT_OK) return printf("%s\n", env.error), 1;
        if (info.ms < best) best = info.ms;
    }
    printf("%s, GPT-2 small, B %d, T %d, %s: %.2f ms a step, %.0f tokens/s, loss %.4f, arena %.2f GiB\n", PRECISIONS[precision], batch,
           seq_len, attention ? "flash" : "plain", best, batch * seq_len / best * 1e3, info.loss, (double)info.arena_bytes / 0x1p30);
    for (i = 0; i < t->schedule->programs[0].op_count; i++) {
        mtt_op *op = &t->schedule->programs[0].ops[i];
        mtt_op_info about;
        mtt_counters counters;
        double start, once;
        mtt_schedule_op(t->schedule, i, &about);
        cuda.run(t->context, op, 1, 0);
        cuda.download(t->context, &counters, op->workspace->data, sizeof(counters));
        start = mtt__now_ms();
        for (k = 0; k < 5; k++) cuda.run(t->context, op, 1, 0);
        cuda.download(t->context, &counters, op->workspace->data, sizeof(counters));
        once = (mtt__now_ms() - start) / 5;
        ms[op->kind] += once;
        bytes[op->kind] += about.traffic_bytes;
        flops[op->kind] += about.flops;
        count[op->kind]++;
        total += once;
    }
    for (i = 0; i < MTT_OP_KIND_COUNT; i++)
        if (count[i])
            printf("  %-26s %4d x %9.4f ms = %8.2f ms  %7.0f GB/s %7.1f TFLOP/s\n", mtt__op_name[i], count[i], ms[i] / count[i], ms[i],
                   bytes[i] / ms[i] * 1e-6, flops[i] / ms[i] * 1e-9);
    printf("  %-26s %33.2f ms\n", "alone, one after the other", total);
    mtt_trainer_destroy(t);
    free(tokens);
    free(targets);
    return 0;
}

/* Whether this build has flash attention at all. */
static int try_flash(void)
{
    setup s = random_setup(2);
    mtt_trainer *t;
    int32_t tokens[64], targets[64];
    mtt_status status;
    s.batch = 1;
    s.seq_len = s.model.max_seq = 32;
    s.policy.attention = MTT_ATTENTION_FLASH;
    random_tokens(&s, tokens, targets, 64);
    t = open_trainer(&s, &cuda, MTT_BF16);
    if (!t) return 0;
    status = mtt_train_step(t, tokens, targets, NULL);
    mtt_trainer_destroy(t);
    if (status != MTT_OK) printf("without flash attention: %s\n", env.error);
    return status == MTT_OK;
}

int main(int argc, char **argv)
{
    double start = mtt__now_ms();
    int scale = argc > 1 && atoi(argv[1]) > 0 ? atoi(argv[1]) : 1;
    if (mtt_cuda_backend(&env, 0, &cuda) != MTT_OK) {
        printf("skipped: %s\n", env.error);
        check(env.error[0], "a reason is given");
        return finish();
    }
    flash_works = try_flash();
    if (argc > 1 && !strcmp(argv[1], "speed"))
        return speed(argc > 2 ? atoi(argv[2]) : 8, argc > 3 ? atoi(argv[3]) : 1024, flash_works && argc < 5, MTT_BF16,
                     argc < 6 ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL);
    if (argc > 2 && !strcmp(argv[1], "operations")) { /* for sanitizers */
        operations(atoi(argv[2]));
        return finish();
    }
    operations(80 * scale);
    printf("operations: %.1f s\n", (mtt__now_ms() - start) * 1e-3);
    bits();
    printf("bits: %.1f s\n", (mtt__now_ms() - start) * 1e-3);
    overflow();
    too_large();
    whole_models(40 * scale);
    printf("all: %.1f s\n", (mtt__now_ms() - start) * 1e-3);
    return finish();
}
