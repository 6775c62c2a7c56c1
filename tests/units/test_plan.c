/* test_plan.c - the plan: the bytes of known models, planned = allocated, no overlap in the arena, the
   searches for a batch and a policy, and the messages of refusals. Needs no device and no file. */
#define MTT_IMPLEMENTATION
#define MTT__EXTRA_PASSES(EMIT, RULE) RULE(away, sends_away)
#include "../../mtt.h"
#include "../away.h"
#include "../test.h"

#ifdef _OPENMP
#include <omp.h>
#endif

static mtt_env env;

typedef struct configuration {
    mtt_model_desc model;
    mtt_policy policy;
    int batch, seq_len;
    char text[220];
} configuration;

static const char *const RECOMPUTES[] = {"none", "selective", "layer", "segments", "budget", "recursive"};

static int plan(const configuration *c, mtt_plan_report *report)
{
    mtt_status status = mtt_plan(&env, &c->model, &c->policy, c->batch, c->seq_len, report);
    check(!status, "%s: no plan: %s", c->text, env.error);
    return !status;
}

/* Puts a budget where it matters: between what recomputing every layer and recomputing nothing take. */
static void set_budget(configuration *c)
{
    mtt_plan_report none, layer;
    configuration other = *c;
    memset(&none, 0, sizeof(none));
    memset(&layer, 0, sizeof(layer));
    other.policy.recompute = MTT_RECOMPUTE_NONE;
    plan(&other, &none);
    other.policy.recompute = MTT_RECOMPUTE_LAYER;
    plan(&other, &layer);
    c->policy.budget_bytes = layer.arena_bytes;
    if (none.arena_bytes > layer.arena_bytes)
        c->policy.budget_bytes += (none.arena_bytes - layer.arena_bytes) / 2;
}

static void describe(configuration *c)
{
    const mtt_model_desc *m = &c->model;
    const mtt_policy *p = &c->policy;
    new_case();
    snprintf(
        c->text, sizeof(c->text),
        "layers %d heads %d d_model %d d_ff %d vocab %d tied %d dropout %g B %d T %d, "
        "precision %d products %d attention %d window %d recompute %s loss %d chunk %d state %d "
        "accumulate %d split %d early %d",
        m->layers, m->heads, m->d_model, m->d_ff, m->vocab, m->tied_head, (double)m->dropout, c->batch,
        c->seq_len, (int)p->precision, (int)p->fp8_products, (int)p->attention, p->window,
        RECOMPUTES[p->recompute], (int)p->loss, p->loss_chunk_rows, (int)p->state,
        p->accumulate, p->split, p->early_update);
}

static configuration random_configuration(void)
{
    configuration c;
    memset(&c, 0, sizeof(c));
    c.batch = 1 + below(4);
    c.seq_len = 1 + below(37);
    c.model.layers = 1 + below(5);
    c.model.heads = 1 + below(4);
    c.model.d_model = c.model.heads * 8 * (1 + below(4));
    c.model.d_ff = 8 * (1 + below(20));
    c.model.vocab = 1 + below(300);
    c.model.max_seq = c.seq_len + below(9);
    c.model.positions = (mtt_positions)below(2);
    c.model.tied_head = below(2);
    c.model.no_head_bias = below(2);
    c.model.dropout = below(2) ? 0.1f : 0;
    c.policy.precision = (mtt_precision)below(5);
    c.policy.fp8_products = (mtt_fp8_products)below(2);
    c.policy.attention = (mtt_attention)below(2);
    c.policy.window = below(2) ? 0 : 1 + below(40);
    c.policy.recompute = (mtt_recompute)below(5);
    if (c.policy.recompute == MTT_RECOMPUTE_SEGMENTS && c.model.layers % 2)
        c.policy.recompute = MTT_RECOMPUTE_RECURSIVE;
    c.policy.segment = below(2) ? 0 : 1 + below(6);
    c.policy.loss = (mtt_loss)(1 + below(2));
    c.policy.loss_chunk_rows = below(2) ? 0 : 1 + below(50);
    c.policy.state = (mtt_state)(c.model.d_ff / 8 % 2);
    c.policy.accumulate = 1 + below(3);
    c.policy.split = below(2);
    if (c.policy.precision == MTT_FP8) { /* both widths are multiples of 16 */
        if (c.model.d_model % 16) c.model.d_model += 8 * c.model.heads;
        c.model.d_ff = (c.model.d_ff + 15) / 16 * 16;
    }
    describe(&c);
    if (c.policy.recompute == MTT_RECOMPUTE_BUDGET) set_budget(&c);
    return c;
}

/* A, B and D of the coursework that the project reproduces, and GPT-2. */
static configuration known(char name, int batch)
{
    configuration c;
    memset(&c, 0, sizeof(c));
    c.model = (mtt_model_desc){.layers = 4,
                               .heads = 8,
                               .d_model = 256,
                               .d_ff = 1024,
                               .vocab = 50257,
                               .max_seq = 256};
    if (name == 'B')
        c.model = (mtt_model_desc){.layers = 6, .heads = 8, .d_model = 512, .d_ff = 2048, .vocab = 10000};
    if (name == 'D')
        c.model = (mtt_model_desc){
            .layers = 12, .heads = 12, .d_model = 768, .d_ff = 3072, .vocab = 30000, .dropout = 0.1f};
    if (name == 'G')
        c.model = (mtt_model_desc){.layers = 12, .heads = 12, .d_model = 768, .d_ff = 3072, .vocab = 50257,
                                   .positions = MTT_POSITIONS_LEARNED, .tied_head = 1, .no_head_bias = 1};
    c.batch = batch;
    c.seq_len = name == 'A' ? 256 : name == 'B' ? 512 : 1024;
    describe(&c);
    return c;
}

static void known_models(void)
{
    mtt_plan_report report;
    configuration a = known('A', 32), gpt2 = known('G', 4);
    if (plan(&a, &report))
        check(report.parameters == 28941393, "A has %lld parameters", (long long)report.parameters);
    if (plan(&gpt2, &report))
        check(report.parameters == 124439808, "GPT-2 has %lld parameters", (long long)report.parameters);

    /* Weights, moments and gradients are what arithmetic says, but for the padding of the vocabulary and of
       slots. */
    gpt2.policy.accumulate = 2;
    for (int kind = 0; kind < 10; kind++) {
        gpt2.policy.precision = (mtt_precision)(kind % 5);
        gpt2.policy.state = (mtt_state)(kind / 5);
        if (!plan(&gpt2, &report)) continue;
        double n = 124439808, weight = kind % 5 >= MTT_BF16 ? 2 : 4, state = kind % 5 >= MTT_BF16 ? 12 : 8;
        if (kind / 5) state = kind % 5 >= MTT_BF16 ? 3.125 : 2.125;
        /* at FP8's peak, the loss, the head is in 8 bits, too: as it is and transposed */
        double eight = kind % 5 == MTT_FP8 ? 2 * 50304 * 768 : 0;
        check(fabs((double)report.bytes[MTT_WEIGHTS] / (weight * n + eight) - 1) < 1e-3,
              "weights take %zu bytes", report.bytes[MTT_WEIGHTS]);
        check(fabs((double)report.bytes[MTT_OPTIMIZER] / (state * n) - 1) < 1e-3,
              "the optimizer takes %zu bytes", report.bytes[MTT_OPTIMIZER]);
        /* sums of all; at the peak, the loss, a micro-batch's gradient of the head, which is the embedding */
        check(fabs((double)report.bytes[MTT_GRADIENTS] / (4 * (n + 50304 * 768)) - 1) < 1e-3,
              "gradients take %zu bytes", report.bytes[MTT_GRADIENTS]);
        check(report.state_bytes <= report.peak_bytes &&
                  report.state_bytes > (size_t)((weight + state + 4) * n),
              "state takes %zu bytes", report.state_bytes);
    }
}

/* What the parameters leave for the next step, to the byte: 5 1/8 bytes an element under 16-bit precision, 6
   1/8 otherwise. Every parameter's part of the kept state begins at a multiple of 64 elements. And the
   gradients. */
static void compact_bytes(void)
{
    for (int i = 0; i < 100; i += each()) {
        configuration c = random_configuration();
        mtt_schedule *schedule = NULL;
        size_t kept = 0, parts = 0;
        c.policy.state = MTT_STATE_COMPACT;
        describe(&c);
        check(!mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &schedule), "%s: %s",
              c.text, env.error);
        if (!schedule) continue;
        const mtt__program *p = &schedule->programs[MTT__TRAIN];
        int halves = c.policy.precision >= MTT_BF16;
        for (int k = 0; k < p->parameter_count; k++) {
            const mtt__parameter *q = &p->parameters[k];
            size_t n = (size_t)mtt__elements(q->weight);
            check(q->part.first == (int64_t)parts, "%s: the state of %s begins at %lld", c.text,
                  q->weight->name, (long long)q->part.first);
            check(q->weight->bytes == (halves ? 2 : 4) * n, "%s: %s takes %zu bytes", c.text, q->weight->name,
                  q->weight->bytes);
            check(q->gradient->bytes ==
                      (halves && c.policy.accumulate == 1 && q->layer >= 0 && q->shape[1] ? 2 : 4) * n,
                  "%s: the gradient of %s takes %zu bytes", c.text, q->weight->name, q->gradient->bytes);
            parts += (n + 63) / 64 * 64;
        }
        for (int kind = 0; kind < MTT__OPTIM_KINDS; kind++)
            if (p->optim[kind]) kept += p->optim[kind]->bytes;
        check(kept == (halves ? parts : 0) + 2 * 34 * (parts / 32),
              "%s: the state of %zu elements takes %zu bytes", c.text, parts, kept);
        check(!p->optim[MTT__MASTER] == !halves, "%s: 8 bits beside each weight", c.text);
        mtt_schedule_destroy(schedule);
    }
}

/* ----------------------------------------------------------------------------- planned = allocated ---- */

static size_t device_allocations, device_bytes;

static mtt_status counting_alloc(void *context, mtt_place place, size_t bytes, void **block)
{
    device_allocations++;
    device_bytes += bytes;
    return mtt_cpu_backend()->alloc(context, place, bytes, block);
}

static void same_report(const mtt_schedule *schedule, const mtt_plan_report *planned, const char *text)
{
    mtt_plan_report report;
    mtt_schedule_report(schedule, &report);
    check(memcmp(&report, planned, sizeof(report)) == 0, "%s: the trainer's report is not the plan's", text);
}

static void planned_is_allocated(void)
{
    mtt_backend backend = *mtt_cpu_backend();
    mtt_optim_desc optim = {.seed = 1};
    backend.alloc = counting_alloc;
    random_state = 12345;
    for (int i = 0; i < 200; i += each()) {
        configuration c = random_configuration();
        mtt_plan_report report;
        mtt_trainer *trainer = NULL;
        mtt_step_info info = {.loss = 0};
        int count = c.batch * c.seq_len * c.policy.accumulate;
        int32_t tokens[4 * 37 * 3], targets[4 * 37 * 3];
        if (!plan(&c, &report)) continue;
        device_allocations = device_bytes = 0;
        mtt_status status =
            mtt_trainer_create(&env, &c.model, &c.policy, &optim, &backend, c.batch, c.seq_len, &trainer);
        check(!status, "%s: no trainer: %s", c.text, env.error);
        if (status) continue;
        int blocks =
            (int)device_allocations; /* MTT_SEPARATE_ALLOCS is for sanitizers and takes one a tensor */
#ifndef MTT_SEPARATE_ALLOCS
        check(device_allocations == 1 && device_bytes == report.arena_bytes,
              "%s: %zu bytes planned, %zu allocated in %zu pieces", c.text, report.arena_bytes, device_bytes,
              device_allocations);
#endif
        same_report(mtt_trainer_schedule(trainer), &report, c.text);
        for (int k = 0; k < count; k++) tokens[k] = below(c.model.vocab), targets[k] = below(c.model.vocab);
        status = mtt_train_step(trainer, tokens, targets, &info);
        check(!status && info.loss >= 0 && info.loss < 20 && info.arena_bytes == report.arena_bytes,
              "%s: a step: %s, loss %g", c.text, status ? env.error : "ok", info.loss);
        status = mtt_evaluate(trainer, tokens, targets, &info);
        check(!status && info.loss >= 0 && info.loss < 20, "%s: an evaluation: %s, loss %g", c.text,
              status ? env.error : "ok", info.loss);
        check((int)device_allocations == blocks, "%s: a step allocates on the device", c.text);
        mtt_trainer_destroy(trainer);
    }
}

/* --------------------------------------------------------------------------------------------- arena ---- */

/* The packing stays within 1 % of the most bytes that live at once, whatever the policy. */
static void packing(void)
{
    static const struct {
        char name;
        int batch;
    } CASES[] = {{'A', 32}, {'A', 64}, {'A', 128}, {'B', 32}, {'B', 64}, {'B', 128}, {'D', 8}, {'D', 32}};
    double worst = 0;
    char worst_text[sizeof(((configuration *)0)->text)] = "";
    for (size_t i = 0; i < MTT__LENGTH(CASES); i++)
        for (int kind = 0; kind < 6 * 2 * 2 * 5; kind += each()) {
            configuration c = known(CASES[i].name, CASES[i].batch);
            mtt_plan_report report;
            c.policy.recompute = (mtt_recompute)(kind % 6);
            c.policy.attention = (mtt_attention)(kind / 6 % 2);
            c.policy.loss = (mtt_loss)(1 + kind / 12 % 2);
            c.policy.precision = (mtt_precision)(kind / 24);
            describe(&c);
            if (c.policy.recompute == MTT_RECOMPUTE_BUDGET) {
                if (c.policy.precision == MTT_TF32 || c.policy.precision == MTT_FP16)
                    continue; /* as FP32 and BF16 */
                set_budget(&c);
            }
            if (!plan(&c, &report)) continue;
            double ratio = (double)report.arena_bytes / (double)report.peak_bytes;
            check(ratio >= 1 && ratio <= 1.01, "%s: the arena is %.4f of the peak", c.text, ratio);
            check(c.policy.recompute != MTT_RECOMPUTE_BUDGET || report.arena_bytes <= c.policy.budget_bytes,
                  "%s: a budget of %zu bytes became %zu", c.text, c.policy.budget_bytes, report.arena_bytes);
            if (ratio > worst) worst = ratio, memcpy(worst_text, c.text, sizeof(worst_text));
        }
    printf("packing: the arena is at most %.4f of the peak (%s)\n", worst, worst_text);
}

/* Plans that one try of each rule packs with gaps. A rank by last use closes the first one's, a rank by
   creation the second one's. */
static void packing_without_gaps(void)
{
    for (int kind = 0; kind < 2; kind++) {
        configuration c = known("AB"[kind], kind ? 32 : 64);
        mtt_plan_report report;
        c.policy.attention = kind ? MTT_ATTENTION_FLASH : MTT_ATTENTION_PLAIN;
        c.policy.recompute = kind ? MTT_RECOMPUTE_SEGMENTS : MTT_RECOMPUTE_LAYER;
        c.policy.loss = MTT_LOSS_CHUNKED;
        describe(&c);
        if (plan(&c, &report))
            check(report.arena_bytes == report.peak_bytes, "%s: the arena is %zu bytes, the peak %zu", c.text,
                  report.arena_bytes, report.peak_bytes);
    }
}

/* More than 10,000 tensors get fewer tries, and are packed well all the same. */
static void packing_deep_models(void)
{
    for (int flash = 0; flash < 2; flash++) {
        configuration c = known('B', 64);
        mtt_plan_report report;
        c.model.layers = 1024;
        c.policy.precision = MTT_BF16;
        c.policy.device = MTT_DEVICE_CUDA;
        c.policy.recompute = flash ? MTT_RECOMPUTE_LAYER : MTT_RECOMPUTE_SEGMENTS;
        c.policy.attention = flash ? MTT_ATTENTION_FLASH : MTT_ATTENTION_PLAIN;
        c.policy.loss = flash ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL;
        describe(&c);
        if (!plan(&c, &report)) continue;
        double ratio = (double)report.arena_bytes / (double)report.peak_bytes;
        check(report.tensors > 50000 && ratio >= 1 && ratio <= 1.0005,
              "%s: %d tensors, the arena is %.6f of the peak", c.text, report.tensors, ratio);
    }
}

/* Segments of any length take no more than layers, and what either keeps in the last layers no more than
   keeping nothing there. */
static void segments(void)
{
    static const int LAYERS[] = {1, 2, 3, 5, 7, 12};
    for (int kind = 0; kind < 3 * 6 * 2 * 2 * 2 * 2 * 2; kind += each()) {
        configuration c = known("ABD"[kind % 3], 32);
        size_t least = SIZE_MAX;
        c.model.layers = LAYERS[kind / 3 % 6];
        c.model.dropout = kind / 18 % 2 ? 0.1f : 0;
        c.model.tied_head = kind / 36 % 2;
        c.policy.attention = (mtt_attention)(kind / 72 % 2);
        c.policy.loss = (mtt_loss)(1 + kind / 144 % 2);
        c.policy.precision = kind / 288 % 2 ? MTT_BF16 : MTT_FP32;
        c.policy.window = c.model.tied_head ? 32 : 0;
        for (int way = 0; way < 6; way++) { /* layer, segments of default, 1, 2, all layers, recursive */
            mtt_schedule *s = NULL;
            mtt_plan_report chosen, whole;
            c.policy.recompute = way == 5 ? MTT_RECOMPUTE_RECURSIVE
                                 : way    ? MTT_RECOMPUTE_SEGMENTS
                                          : MTT_RECOMPUTE_LAYER;
            c.policy.segment = way < 2 || way == 5 ? 0 : way == 4 ? c.model.layers : way - 1;
            describe(&c);
            if (mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s)) {
                check(0, "%s: %s", c.text, env.error);
                continue;
            }
            mtt_schedule_report(s, &chosen);
            mtt__build(s, c.model.layers, 0, SIZE_MAX);
            mtt_schedule_report(s, &whole);
            mtt_schedule_destroy(s);
            check(chosen.arena_bytes <= whole.arena_bytes + whole.arena_bytes / 1024,
                  "%s: %zu bytes, all recomputed %zu", c.text, chosen.arena_bytes, whole.arena_bytes);
            if (!way) least = chosen.peak_bytes;
            check(chosen.peak_bytes <= least, "%s, %s of %d: a peak of %zu bytes, layers' is %zu", c.text,
                  RECOMPUTES[c.policy.recompute], c.policy.segment, chosen.peak_bytes, least);
        }
    }
}

/* What recursion takes beside weights and state grows by the logarithm of the depth, and with it how often a
   layer is computed. Segments take its square root, whatever their length. Layers' inputs of every k-th layer
   take as much, and k whole layers besides. */
static void deep_recursion(void)
{
    double before = 0;
    for (int layers = 8; layers <= (quick ? 32 : 256); layers *= 2) {
        configuration c = known('A', 64);
        mtt_plan_report none, recursive, other;
        int k, halvings = 0;
        c.model = (mtt_model_desc){.layers = layers, .heads = 4, .d_model = 64, .vocab = 256};
        c.policy.precision = MTT_BF16;
        c.policy.attention = MTT_ATTENTION_FLASH;
        c.policy.state = MTT_STATE_COMPACT;
        c.policy.early_update = 1;
        describe(&c);
        if (!plan(&c, &none)) continue;
        c.policy.recompute = MTT_RECOMPUTE_RECURSIVE;
        if (!plan(&c, &recursive)) continue;
        while (1 << halvings < layers) halvings++;
        for (k = 1; k <= layers; k = k < 4 ? k + 1 : 2 * k) {
            for (int how = MTT_RECOMPUTE_LAYER; how <= MTT_RECOMPUTE_SEGMENTS; how++) {
                c.policy.recompute = (mtt_recompute)how;
                c.policy.segment = k;
                if (plan(&c, &other))
                    check(recursive.arena_bytes <= other.arena_bytes && (layers < 16 || k == layers ||
                          recursive.arena_bytes < 0.95 * (double)other.arena_bytes),
                          "%d layers: recursion takes %zu bytes, %s of %d %zu", layers, recursive.arena_bytes,
                          RECOMPUTES[how], k, other.arena_bytes);
            }
        }
        /* an input for each halving, and what half a layer needs, each 2 MiB */
        double inputs = (double)(recursive.arena_bytes - recursive.state_bytes) / (64 * 256 * 64 * 2);
        check(layers < 16 || (inputs > before && inputs < before + 1.6),
              "%d layers: activations of %.2f inputs, %.2f with half the layers", layers, inputs, before);
        before = inputs;
        double times = (recursive.flops - none.flops) / (none.flops / 3);
        check(times > 1 && times < 1 + 0.6 * halvings, "%d layers: recursion costs %.2f forward passes",
              layers, times);
        printf("recursion: %d layers %.1f MiB, none %.1f; %.2f forward passes more\n", layers,
               (double)recursive.arena_bytes / 1048576, (double)none.arena_bytes / 1048576, times);
    }
}

static int overlap(const mtt_tensor *a, const mtt_tensor *b)
{
    int together = a->first <= b->last && b->first <= a->last;
    return together && a->bytes && b->bytes && a->offset < b->offset + b->bytes &&
           b->offset < a->offset + a->bytes;
}

static int is_among(const mtt_tensor *const *list, int count, const mtt_tensor *tensor)
{
    for (int i = 0; i < count; i++)
        if (list[i] == tensor) return 1;
    return 0;
}

/* No two tensors that live at the same time share a byte. Every tensor is written before it is read, and
   lives no longer than it is used. A tensor that is recomputed was freed before, and is read afterwards. */
static void check_program(const mtt__program *p, const char *text)
{
    const mtt_tensor **written =
        calloc((size_t)p->tensor_count + 1, sizeof(*written)); /* in the order of their first writing */
    size_t peak = 0;
    int writes = 0;
    for (int i = 0; i < p->tensor_count; i++) {
        const mtt_tensor *t = p->tensors[i];
        check(t->offset % 256 == 0 && t->offset + t->bytes <= p->arena_bytes, "%s: %s ends outside the arena",
              text, t->name);
        for (int k = 0; k < i; k++)
            if (overlap(t, p->tensors[k]))
                check(0, "%s: %s and %s overlap", text, t->name, p->tensors[k]->name);
        if (t->persistent) written[writes++] = t;
    }
    for (int i = 0; i < p->op_count; i++) {
        const mtt_op *op = &p->ops[i];
        size_t live = 0;
        int travels = i; /* the last operation that may run while what this one sends travels */
        while (mtt__is_transfer(op) && travels + 1 < p->op_count && travels + 1 != p->step_begin &&
               !mtt__needs_transfers(&p->ops[travels + 1]))
            travels++;
        int gone = !op->recomputed, read = !op->recomputed;
        int reads = op->inputs > 0 || op->gradients || op->kind == MTT_OP_rescale;
        check(reads && (op->outputs > 0 || op->sums || op->weights),
              "%s: operation %d reads or writes nothing", text, i); /* rescale reads what it writes */
        for (int k = op->inputs; k < op->inputs + op->outputs && op->recomputed; k++)
            if (op->operands[k]) gone |= op->operands[k]->first == i, read |= op->operands[k]->last > i;
        check(gone && read, "%s: operation %d makes again what %s", text, i,
              gone ? "nothing reads" : "is there");
        for (int k = 0; k < op->inputs + op->outputs + 3 * op->parameters; k++) {
            int parameter = k - op->inputs - op->outputs, n = op->parameters, list = n ? parameter / n : 0;
            mtt_tensor *const *lists[] = {op->gradients, op->weights, op->sums};
            const mtt_tensor *t = parameter < 0 ? op->operands[k]
                                  : lists[list] ? lists[list][parameter % n]
                                                : NULL;
            if (!t) continue;
            check(t->first <= i && travels <= t->last, "%s: operation %d uses %s outside its life", text, i,
                  t->name);
            if (parameter >= 0 && list == 2) {
                if (!is_among(written, writes, t)) written[writes++] = t;
            } else if (k < op->inputs || parameter >= 0)
                check(is_among(written, writes, t), "%s: operation %d reads %s before it is written", text, i,
                      t->name);
        }
        for (int k = op->inputs; k < op->inputs + op->outputs; k++)
            if (op->operands[k] && !is_among(written, writes, op->operands[k]))
                written[writes++] = op->operands[k];
        for (int n = 0; n < op->parameters && MTT_IS_UPDATE(op); n++)
            for (int later = i + 1; later < p->op_count; later++) {
                const mtt_op *other = &p->ops[later];
                for (int k = 0; k < other->inputs + other->outputs; k++)
                    check(other->operands[k] != op->weights[n], "%s: operation %d uses %s after its update",
                          text, later, op->weights[n]->name);
            }
        for (int k = 0; k < p->tensor_count; k++)
            if (p->tensors[k]->first <= i && i <= p->tensors[k]->last)
                live += (p->tensors[k]->bytes + 255) / 256 * 256;
        check(live == op->live_bytes, "%s: %zu bytes live during operation %d, not %zu", text, live, i,
              op->live_bytes);
        peak = live > peak ? live : peak;
    }
    for (int i = 0; i < p->tensor_count; i++)
        check(is_among(written, writes, p->tensors[i]), "%s: %s is never written", text, p->tensors[i]->name);
    check(p->arena_bytes >= peak, "%s: the arena is smaller than the peak", text);
    free(written);
}

static void nothing_overlaps(void)
{
    random_state = 999;
    for (int i = 0; i < 300; i += each()) {
        configuration c = random_configuration();
        mtt_schedule *s = NULL;
        c.policy.early_update = c.policy.precision < MTT_FP16 && i % 2;
        if (c.policy.early_update) c.policy.accumulate = 1, c.policy.split = 0;
        describe(&c);
        if (c.policy.recompute == MTT_RECOMPUTE_BUDGET) set_budget(&c);
        mtt_status status = mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s);
        check(!status, "%s: no schedule: %s", c.text, env.error);
        if (status) continue;
        for (int k = 0; k < MTT__PROGRAMS; k++) {
            const mtt__program *p = &s->programs[k], *first = &s->programs[0];
            check_program(p, c.text);
            for (int t = 0; t < first->tensor_count && first->tensors[t]->persistent; t++)
                check(p->tensors[t]->persistent && p->tensors[t]->offset == first->tensors[t]->offset &&
                          p->tensors[t]->bytes == first->tensors[t]->bytes,
                      "%s: %s moves between programs", c.text, p->tensors[t]->name);
        }
        mtt_schedule_destroy(s);
    }
}

static void reports_add_up(void)
{
    random_state = 4242;
    for (int i = 0; i < 100; i += each()) {
        configuration c = random_configuration();
        mtt_plan_report report;
        mtt_schedule *s = NULL;
        size_t sum = 0, peak = 0, phases[MTT_PHASE_COUNT] = {0};
        double flops = 0, again = 0, traffic = 0;
        int count, last_phase = 0;
        if (!plan(&c, &report)) continue;
        for (int k = 0; k < MTT_CATEGORY_COUNT; k++) sum += report.bytes[k];
        check(sum == report.peak_bytes, "%s: the categories add up to %zu, the peak is %zu", c.text, sum,
              report.peak_bytes);
        if (mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s)) continue;
        same_report(s, &report, c.text);
        const mtt_op *ops = mtt_schedule_ops(s, &count);
        for (int k = 0; k < count; k++) {
            const mtt_op *op = &ops[k];
            sum = 0;
            for (int category = 0; category < MTT_CATEGORY_COUNT; category++) sum += op->bytes[category];
            check(sum == op->live_bytes, "%s: operation %d: %zu bytes live, its categories say %zu", c.text,
                  k, op->live_bytes, sum);
            check((int)op->phase >= last_phase, "%s: operation %d goes back a phase", c.text, k);
            check(op->layer >= -1 && op->layer < c.model.layers, "%s: operation %d is in layer %d", c.text, k,
                  op->layer);
            check(op->flops >= 0 && op->traffic_bytes > 0, "%s: %s costs %g FLOPs, %g bytes", c.text,
                  mtt_op_name(op->kind), op->flops, op->traffic_bytes);
            check(k != report.peak_op || op->live_bytes == report.peak_bytes,
                  "%s: operation %d is not the peak", c.text, k);
            last_phase = (int)op->phase;
            phases[op->phase] = op->live_bytes > phases[op->phase] ? op->live_bytes : phases[op->phase];
            peak = op->live_bytes > peak ? op->live_bytes : peak;
            flops += op->flops;
            traffic += op->traffic_bytes;
            again += op->recomputed ? op->flops : 0;
        }
        check(count == report.ops && peak == report.peak_bytes &&
                  memcmp(phases, report.phase_peak_bytes, sizeof(phases)) == 0,
              "%s: the timeline does not give the peaks of the report", c.text);
        check(fabs(flops - report.flops) <= 1e-9 * flops &&
                  fabs(traffic - report.traffic_bytes) <= 1e-9 * traffic &&
                  fabs(again - report.recompute_flops) <= 1e-9 * flops,
              "%s: the timeline does not give the costs of the report", c.text);
        mtt_schedule_destroy(s);
    }
    check(mtt_category_name(MTT_SCORES) && strcmp(mtt_category_name(MTT_SCORES), "scores") == 0,
          "a category has no name");
}

/* Widths and counts that costs depend on, worked out here and not by the library. */
typedef struct sizes {
    double R, C, F, V, D, RC, RF, S; /* S: elements of the scores */
    double Q, RQ, RO;                /* Q: columns of q, k and v; RO: elements of attention's output */
    double pairs;                    /* of a query and a key that it attends */
    double E;                        /* bytes of an activation or a weight */
    double parameters, matrices;     /* padded; of the layers' matrices */
    double vectors, table;           /* other parameters of a layer; learned positions */
    double chunks, chunk, chunk_padded; /* of logits; rows of one, and of its transpose under FP8 */
} sizes;

static sizes sizes_of(const configuration *c)
{
    const mtt_model_desc *m = &c->model;
    double rows = c->policy.loss_chunk_rows, window = c->policy.window ? c->policy.window : c->seq_len;
    sizes z = {.R = c->batch * c->seq_len, .C = m->d_model, .F = m->d_ff, .V = (m->vocab + 127) / 128 * 128};
    z.D = m->d_head ? m->d_head : z.C / m->heads;
    z.Q = (m->heads + 2 * (m->heads_kv ? m->heads_kv : m->heads)) * z.D;
    z.RQ = z.R * z.Q;
    z.RO = z.R * m->heads * z.D;
    z.RC = z.R * z.C;
    z.RF = z.R * z.F;
    z.S = z.R * m->heads * c->seq_len;
    for (int i = 0; i < c->seq_len; i++) z.pairs += c->batch * m->heads * fmin(window, i + 1);
    z.E = c->policy.precision >= MTT_BF16 ? 2 : 4;
    z.matrices = m->layers * (z.C * z.Q + m->heads * z.D * z.C + 2 * z.C * z.F);
    z.vectors = z.Q + 6 * z.C + z.F + m->qk_norm * 2 * z.D;
    z.table = m->positions == MTT_POSITIONS_LEARNED ? m->max_seq * z.C : 0;
    z.parameters = z.matrices + m->layers * z.vectors + 2 * z.C + z.V * z.C * (m->tied_head ? 1 : 2) +
                   (m->no_head_bias ? 0 : z.V) + z.table;
    if (c->policy.precision == MTT_FP8) rows = ceil(rows / 16) * 16;
    z.chunks = ceil(z.R / rows);
    z.chunk = fmin(z.R, rows);
    z.chunk_padded = ceil(z.chunk / 16) * 16;
    return z;
}

/* Of an element; 0 = there is no tensor. */
static double bytes_of(const mtt_tensor *t)
{
    return t ? (double)mtt__bytes_of(t->dtype, 1) : 0;
}

/* FLOPs and bytes of an operation against a table of what its kernel must compute and move. A product of n
   rows of `in` numbers with `in` columns of `out` takes 2 n in out FLOPs; a norm 8 an element; GELU 12, its
   derivative 21; AdamW 16. What is read is counted once, and once more where it is written. */
static void check_cost(const configuration *c, const mtt_op *op, int which, const sizes *z, int *seen)
{
    const mtt_policy *p = &c->policy;
    const double R = z->R, C = z->C, F = z->F, V = z->V, D = z->D, RC = z->RC, RF = z->RF, S = z->S, E = z->E;
    const double G = 4, P = z->parameters, stats = 8 * R, lse = 4 * R * c->model.heads, chunks = z->chunks;
    const double RQ = z->RQ, RO = z->RO, q_gain = c->model.qk_norm, gains = q_gain * 2 * D;
    const double angles = c->model.positions == MTT_POSITIONS_ROTARY ? 4 * c->seq_len * D : 0;
    const double control = sizeof(mtt_control), counters = sizeof(mtt_counters);
    const int weight = op->kind == MTT_OP_linear_backward_weight, compact = p->state == MTT_STATE_COMPACT;
    const mtt_tensor *from = op->operands[0], *to = op->operands[weight ? 1 : op->inputs];
    /* Under FP8 a weight's gradient is of transposes, whose rows are padded to 16 elements. */
    const double X = bytes_of(from), W = bytes_of(op->operands[1]), Y = bytes_of(to);
    const double padded = ceil(R / 16) * 16;
    const double fused = op->kind == MTT_OP_linear_gelu      ? bytes_of(MTT_OPERANDS_OF(linear_gelu, op)->y)
                         : op->kind == MTT_OP_residual_norm ? bytes_of(MTT_OPERANDS_OF(residual_norm, op)->y)
                                                            : 0;
    const int eight = weight && X == 1;
    const double in = (double)(eight ? mtt__rows(from) : mtt__width(from)), T = eight ? padded : R;
    const double out = !to ? 0 : (double)(eight ? mtt__rows(to) : mtt__width(to));
    const double last = op->operands[op->inputs + op->outputs - 1] != NULL;
    const double bias = op->kind == MTT_OP_linear ? op->operands[2] != NULL : last, joined = op->layer >= 0;
    const double bias_of_head = V * !c->model.no_head_bias, head = V * C + bias_of_head;
    const double targets = 4 * R, losses = 12 * R, scales = 16 * (8 * c->model.layers + 3);
    const double N = (double)(mtt__rows(from) * mtt__width(from)), M = z->matrices / c->model.layers;
    const double N_t = ceil((double)mtt__rows(from) / 16) * 16 * in;
    /* A norm's backward pass rounds the gradient, unless dropout or the embedding takes it, and the norm. */
    const int rounds = p->precision == MTT_FP8;
    const int lowest = op->kind == MTT_OP_norm_backward &&
                       strstr(MTT_OPERANDS_OF(norm_backward, op)->gain->name, "h.0.ln_1");
    const double again = rounds && op->layer >= 0, next = rounds && c->model.dropout == 0 && !lowest;
    const int narrow = E == 2 && compact && p->accumulate == 1, train = which == MTT__TRAIN;
    const double wide = narrow && op->layer >= 0 ? 2 : G;
    const double state = compact ? 4 * 1.0625 + (E == 2 ? 4 + 2 : 8) : 16 + (E == 2 ? 8 + 2 : 8);
    const struct { const char *name; double flops, bytes; } WANTED[] = {
        {"embed", RC, 3 * E * RC},
        {"norm", 8 * RC, E * (RC + 2 * C) + Y * RC + stats},
        {"linear", 2 * R * in * out, X * R * in + W * in * out + E * (bias * out + R * out)},
        {"quantize", (W ? 5 : 1) * N, E * N + (W ? stats + E * 2 * C : 0) + Y * N + last * N_t},
        {"quantize_weights", M, (E + 1) * M},
        {"rescale", scales, scales + counters},
        {"activation", 12 * RF, (E + Y) * RF}, /* GELU */
        {"linear_gelu", (2 * C + 12 * last) * RF,
         X * RC + W * C * F + E * (F + RF) + fused * RF},
        {"residual", RC, E * 3 * RC + control},
        {"residual_norm", 9 * RC, E * (3 * RC + 2 * C) + fused * RC + stats + control},
        {"rotary", (q_gain ? 7 : 3) * RQ, E * 2 * RQ + angles + E * gains},
        {"linear_rotary", (2 * C + (q_gain ? 7 : 3)) * RQ,
         X * RC + W * C * z->Q + E * (z->Q + 3 * RQ) + angles + E * gains},
        {"rotary_backward", (q_gain ? 15 : 3) * RQ,
         last ? (E + 1) * RQ + padded * z->Q + angles : E * (2 + q_gain) * RQ + angles + (E + G) * gains},
        {"attention_scores", 2 * S * D, E * (RQ + S)},
        {"softmax", 5 * S, E * 2 * S},
        {"dropout_scores", S, E * 2 * S + control},
        {"attention_values", 2 * S * D, E * (S + RQ + RO)},
        {"flash", 4 * z->pairs * D, E * (RQ + RO) + last * RO + lse + control},
        {"pick_row", C, E * 2 * C},
        {"move", 0, X * N}, /* on the card */
        {"cross_entropy", 4 * R * V, E * R * V + targets + losses},
        {"chunked_loss", (train ? 6 : 2) * RC * V,
         (train && X == 1 ? RC + C * padded + E * RC + chunks * (2 * V * C + E * bias_of_head) +
                            (3 * E + 4) * R * V + V * (z->chunk_padded - z->chunk) +
                            (G + 8 * (chunks - 1)) * head
          : train ? E * (2 * RC + 2 * chunks * head + 5 * R * V) + (G + 8 * (chunks - 1)) * head
                  : X * (RC + chunks * V * C) + E * (chunks * bias_of_head + 2 * R * V)) +
             targets + losses + control + counters},
        {"sum_loss", 3 * R, losses + control + counters},
        {"cross_entropy_backward", 4 * R * V, E * 2 * R * V + targets + losses + control + counters},
        {"linear_backward_weight", 2 * R * in * out, X * T * (in + out) + wide * in * out + bias * G * out},
        {"linear_backward_input", 2 * R * in * out, X * R * in + W * in * out + E * R * out},
        {"norm_backward", (14 + next + 5 * again) * RC,
         E * (3 * RC + joined * RC + (1 + again) * C) + stats + (2 + last) * G * C + next * RC +
             (next + again) * C * padded},
        {"dropout_backward", RC, E * 2 * RC + control},
        {"activation_backward", 21 * RF, (2 * E + Y) * RF + last * 2 * F * padded},
        {"linear_backward_gelu", (2 * C + 21) * RF, E * (RC + C * F + 2 * RF) + last * G * F},
        {"attention_values_backward", 4 * S * D, E * (RO + S + RQ + S + RQ)},
        {"softmax_backward", 5 * S, E * 3 * S + control},
        {"attention_scores_backward", 4 * S * D, E * (S + RQ + RQ)},
        {"flash_backward", 10 * z->pairs * D,
         E * (RO + RQ + RO) + (last ? 2 : E) * RQ + lse + control},
        {"embed_backward", RC, 3 * E * RC},
        {"grad_norm", 2 * P, 4 * P - (narrow ? 2 * z->matrices : 0) + control + counters},
        {"adamw", 16 * P, (4 + state) * P - (narrow ? 2 * z->matrices : 0) + control + counters}};
    for (size_t i = 0; i < MTT__LENGTH(WANTED); i++) {
        if (strcmp(WANTED[i].name, mtt_op_name(op->kind)) != 0) continue;
        check(op->flops == WANTED[i].flops && op->traffic_bytes == WANTED[i].bytes,
              "%s: %s costs %.17g FLOPs and %.17g bytes instead of %.17g and %.17g", c->text, WANTED[i].name,
              op->flops, op->traffic_bytes, WANTED[i].flops, WANTED[i].bytes);
        seen[op->kind] = 1;
    }
}

/* A gradient is read, its sum read and written. */
static void check_sums(const configuration *c, const mtt_op *op, const sizes *z)
{
    const mtt_model_desc *m = &c->model;
    double head = z->V * (m->tied_head ? 0 : z->C) + z->V * !m->no_head_bias;
    double elements = z->matrices / m->layers + z->vectors;
    if (op->layer < 0)
        elements = strstr(op->sums[0]->name, "wte") ? z->V * z->C + z->table
                                                    : 2 * z->C + head;
    check(op->flops == elements && op->traffic_bytes == 12 * elements,
          "%s: adding gradients costs %g FLOPs and %g bytes for %g elements", c->text, op->flops,
          op->traffic_bytes, elements);
}

/* The operations of other MLPs than GELU's, and of norms in other places. A gate doubles the columns of x. */
static void option_costs(int *seen)
{
    for (int i = 0; i < 96; i += each()) {
        configuration c = random_configuration();
        mtt_schedule *s = NULL;
        c.model.norm = (mtt_norm_form)(i % 2);
        c.model.norm_place = (mtt_norm_place)(i / 2 % 3);
        c.model.mlp = (mtt_mlp)(i / 6 % 4);
        c.model.no_biases = i / 24 % 2;
        describe(&c);
        if (c.policy.recompute == MTT_RECOMPUTE_BUDGET) set_budget(&c);
        check(!mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s), "%s: %s", c.text,
              env.error);
        if (!s) continue;
        for (int k = 0; k < s->programs[MTT__TRAIN].op_count; k++) {
            const mtt_op *op = &s->programs[MTT__TRAIN].ops[k];
            const mtt_op_activation_backward *a = MTT_OPERANDS_OF(activation_backward, op);
            const sizes z = sizes_of(&c);
            const double padded = ceil(z.R / 16) * 16, X = z.F * (mtt__is_gated(c.model.mlp) ? 2 : 1);
            const double made = bytes_of(op->operands[op->inputs]);
            const int gelu = c.model.mlp == MTT_MLP_GELU;
            double flops, bytes;
            if (op->kind == MTT_OP_activation)
                flops = (gelu ? 12 : 10) * z.RF, bytes = z.R * (z.E * X + made * z.F);
            else if (op->kind == MTT_OP_add) flops = z.RC, bytes = 3 * z.E * z.RC;
            else if (op->kind == MTT_OP_activation_backward) {
                flops = (gelu ? 21 : 12) * z.R * X;
                bytes = z.R * (z.E * (z.F + X) + made * X) + (a->y_t ? (z.F + X) * padded : 0);
            } else continue;
            check(op->flops == flops && op->traffic_bytes == bytes,
                  "%s: %s costs %g FLOPs and %g bytes instead of %g and %g", c.text, mtt_op_name(op->kind),
                  op->flops, op->traffic_bytes, flops, bytes);
            seen[op->kind] = 1;
        }
        mtt_schedule_destroy(s);
    }
}

/* The operations of a generator, its cache and its weights, and that no two tensors overlap. */
static void generator_costs(int *seen)
{
    for (int i = 0; i < 60; i += each()) {
        configuration c = random_configuration();
        mtt_generator_desc desc = {below(2) ? MTT_BF16 : MTT_FP32, .batch = c.batch, .context = c.seq_len,
                                   .chunk = 1 + below(300)};
        const double E = desc.precision ? 2 : 4, chunk = desc.chunk > c.batch ? desc.chunk : c.batch;
        mtt_plan_report report = {0};
        mtt_schedule s;
        size_t most = 0, cache = 0;
        double token_flops = 0;
        describe(&c);
        mtt_status status = mtt__generation_init(&s, &env, &c.model, &desc, MTT_DEVICE_CPU);
        check(!status, "%s: %s", c.text, env.error);
        if (status) continue;
        for (int which = MTT__CHUNK; which <= MTT__TOKEN; which++) {
            const mtt__program *p = &s.programs[which];
            const double rows = which == MTT__CHUNK ? chunk : c.batch, D = s.model.d_head;
            check_program(p, c.text);
            if (p->arena_bytes > most) most = p->arena_bytes;
            for (int k = 0; k < p->op_count; k++) {
                const mtt_op *op = &p->ops[k];
                double flops = 4 * rows * s.model.heads * D * c.seq_len, bytes;
                double kept = 2.0 * c.batch * s.model.heads_kv * c.seq_len * D;
                bytes = E * (rows * (2 * s.model.heads + 2 * s.model.heads_kv) * D + kept) + 8 * chunk;
                if (op->kind == MTT_OP_gather) {
                    const mtt_tensor *y = MTT_OPERANDS_OF(gather, op)->y;
                    flops = (double)mtt__elements(y), bytes = 2 * (double)y->bytes;
                } else if (op->kind == MTT_OP_choose_id) {
                    flops = (double)c.batch * p->shape.vocab_padded;
                    bytes = E * flops + c.batch * (double)(sizeof(mtt_choice) + sizeof(mtt_chosen));
                } else if (op->kind != MTT_OP_cached_attention) continue;
                check(op->flops == flops && op->traffic_bytes == bytes,
                      "%s: %s costs %g FLOPs and %g bytes, not %g and %g", c.text, mtt_op_name(op->kind),
                      op->flops, op->traffic_bytes, flops, bytes);
                seen[op->kind] = 1;
            }
        }
        for (int k = 0; k < 2 * s.model.layers; k++) cache += s.programs[MTT__CHUNK].cache[k]->bytes;
        check((double)cache ==
                  2 * E * s.model.layers * c.batch * c.seq_len * s.model.heads_kv * s.model.d_head,
              "%s: the cache has %zu bytes", c.text, cache);
        check(!mtt_generator_plan(&env, &c.model, &desc, &report) && report.arena_bytes == most &&
                  report.bytes[MTT_ACTIVATIONS] >= cache && !report.bytes[MTT_OPTIMIZER] &&
                  !report.bytes[MTT_GRADIENTS],
              "%s: the plan has %zu bytes, its programs %zu", c.text, report.arena_bytes, most);
        for (int k = 0; k < s.programs[MTT__TOKEN].op_count; k++)
            token_flops += s.programs[MTT__TOKEN].ops[k].flops;
        check(report.token_flops == token_flops, "%s: %g FLOPs a token, not %g", c.text, report.token_flops,
              token_flops);
        mtt__release_programs(&s);
    }
}

/* A linear layer with an adapter: both products, and a result that is made, then read and written again. An
   adapter of 1.1 billion parameters takes less than 4 GB. */
static void adapter_costs(int *seen)
{
    mtt_model_desc model = {.layers = 1, .heads = 2, .d_model = 64, .vocab = 100};
    mtt_policy policy = {.precision = MTT_BF16, .lora_rank = 8};
    mtt_plan_report report = {.ops = 0};
    mtt_schedule *s = NULL;
    const double R = 2 * 16, C = 64, Q = 3 * C;
    check(!mtt_schedule_create(&env, &model, &policy, 2, 16, &s), "%s", env.error);
    for (int k = 0; s && k < s->programs[MTT__TRAIN].op_count; k++) {
        const mtt_op *op = &s->programs[MTT__TRAIN].ops[k];
        if (op->kind != MTT_OP_linear_adapted) continue;
        double bytes = 2 * (R * C + C * Q + Q + R * 8 + 8 * Q + 3 * R * Q);
        check(op->flops == 2 * R * Q * (C + 8) && op->traffic_bytes == bytes,
              "linear_adapted costs %g FLOPs and %g bytes", op->flops, op->traffic_bytes);
        seen[op->kind] = 1;
    }
    mtt_schedule_destroy(s);
    model = (mtt_model_desc){.layers = 22, .heads = 32, .heads_kv = 4, .d_model = 2048, .d_ff = 5632,
                             .vocab = 32000, .norm = MTT_NORM_RMS, .mlp = MTT_MLP_SWIGLU,
                             .positions = MTT_POSITIONS_ROTARY, .no_biases = 1};
    policy = (mtt_policy){.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH, .lora_rank = 16,
                          .recompute = MTT_RECOMPUTE_LAYER, .loss = MTT_LOSS_CHUNKED,
                          .state = MTT_STATE_COMPACT, .device = MTT_DEVICE_CUDA};
    check(!mtt_plan(&env, &model, &policy, 4, 2048, &report) && report.arena_bytes < 4000000000u, "%zu bytes",
          report.arena_bytes);
}

static void costs(void)
{
    int seen[MTT_OP_KIND_COUNT] = {0};
    random_state = 2718;
    for (int i = 0; i < 200; i += each()) {
        configuration c = random_configuration();
        mtt_schedule *s = NULL;
        c.model.heads = 2;
        c.model.d_model = 64;
        c.model.d_ff = 64 * (2 + below(3)); /* a parameter's state is whole groups */
        if (i / 4 % 2) {
            c.model.heads = 4, c.model.heads_kv = 1 << below(3), c.model.d_head = 64 * (1 + below(2));
            c.model.positions = (mtt_positions)(i / 8 % 4), c.model.qk_norm = below(2);
        }
        c.policy.state = (mtt_state)(i / 2 % 2);
        c.policy.recompute = (mtt_recompute)(i % 4);
        c.policy.split = 0;
        c.policy.loss_chunk_rows = 1 + below(c.batch * c.seq_len);
        describe(&c);
        away = i % 5 == 0;
        check(!mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s), "%s: %s", c.text,
              env.error);
        away = 0;
        if (!s) continue;
        for (int which = 0; which < MTT__PROGRAMS; which++) {
            configuration one = c;
            if (which == MTT__NEXT) one.batch = 1;
            sizes z = sizes_of(&one);
            for (int k = 0; k < s->programs[which].op_count; k++) {
                const mtt_op *op = &s->programs[which].ops[k];
                if (op->kind == MTT_OP_pick_row) z.R = 1, z.RC = z.C;
                seen[op->kind] |= op->kind == MTT_OP_sum_gradients;
                if (op->kind == MTT_OP_sum_gradients) check_sums(&c, op, &z);
                else check_cost(&c, op, which, &z, seen);
            }
        }
        mtt_schedule_destroy(s);
    }
    option_costs(seen);
    generator_costs(seen);
    adapter_costs(seen);
    for (int kind = 0; kind < MTT_OP_all_to_all; kind++) /* the first of those between ranks */
        check(seen[kind], "no schedule has %s", mtt_op_name((mtt_op_kind)kind));
}

/* What all ranks send, and what they hold, against arithmetic: every rank gets each of its shares from all
   others, and all others get what it makes of that share. No share is missing, and none is there twice. */
static void check_ranks(const configuration *c, mtt_shard shard, int ranks)
{
    configuration one = *c;
    int all = c->policy.accumulate, halves = c->policy.precision >= MTT_BF16;
    int narrow = halves && all == 1 && c->policy.state == MTT_STATE_COMPACT;
    double sent = 0, kept = 0, G = 4, E = halves ? 2 : 4, others = ranks - 1, blocks = 0;
    one.policy.ranks = ranks;
    one.policy.shard = shard;
    sizes z = sizes_of(&one);
    double P = z.parameters, gradients = G * P - (narrow ? 2 * z.matrices : 0), sums, wanted;
    for (int rank = 0; rank < ranks; rank++) {
        mtt_schedule *s = NULL;
        mtt_plan_report report;
        one.policy.rank = rank;
        check(!mtt_schedule_create(&env, &one.model, &one.policy, one.batch, one.seq_len, &s), "%s: %s",
              c->text, env.error);
        if (!s) return;
        const mtt__program *p = &s->programs[MTT__TRAIN];
        for (int k = 0; k < MTT__PROGRAMS; k++) check_program(&s->programs[k], c->text);
        mtt_schedule_report(s, &report);
        sent += report.wire_bytes;
        for (int i = 0; i < p->parameter_count; i++) {
            const mtt_part *part = &p->parameters[i].part;
            int64_t begin, next = 0;
            kept += (double)part->count;
            blocks += rank ? 0 : ceil((double)part->elements / 8192);
            for (int r = 0; r < ranks; r++) {
                int64_t count = mtt__share(part, r, &begin);
                check(!count || begin == next, "%s: the share of rank %d begins at %lld, not %lld", c->text,
                      r, (long long)begin, (long long)next);
                next += count;
            }
            check(next == part->elements, "%s: shares of %lld of %lld elements", c->text, (long long)next,
                  (long long)part->elements);
        }
        mtt_schedule_destroy(s);
    }
    check(kept == (shard ? P : ranks * P), "%s: %d ranks update %g of %g elements", c->text, ranks, kept, P);
    if (c->policy.exchange == MTT_EXCHANGE_FLAT) sums = 4 * P;
    else sums = shard == MTT_SHARD_GRADIENTS ? all * gradients : all == 1 ? gradients : 4 * P;
    wanted = others * (sums + (shard ? E * P + 8 * blocks : 4 * P) + ranks * all * 16.0);
    if (c->policy.precision == MTT_FP8) wanted += others * ranks * 16 * (8.0 * c->model.layers + 3);
    check(sent == wanted, "%s, shard %d: %d ranks send %.17g bytes, wanted %.17g", c->text, (int)shard, ranks,
          sent, wanted);
}

static void ranks(void)
{
    random_state = 1848;
    for (int i = 0; i < 120; i += each()) {
        configuration c = random_configuration();
        c.policy.split = 0;
        c.policy.state = (mtt_state)below(2);
        c.policy.exchange = (mtt_exchange)below(3);
        if (c.policy.recompute == MTT_RECOMPUTE_BUDGET) c.policy.recompute = MTT_RECOMPUTE_LAYER;
        if (i % 4 == 0) c.model.d_model = c.model.heads * 64, c.model.d_ff = 512; /* more than a block each */
        describe(&c);
        check_ranks(&c, (mtt_shard)(i % 3), 2 + below(i % 5 ? 4 : 40));
    }
    /* GPT-2 124M, BF16, compact: 2 bytes of weights and 3 1/8 of state a parameter, the latter in shares. */
    for (int n = 1; n <= 8; n *= 2) {
        configuration c = known('G', 4);
        mtt_plan_report report;
        c.policy.precision = MTT_BF16;
        c.policy.state = MTT_STATE_COMPACT;
        c.policy.ranks = n;
        c.policy.shard = MTT_SHARD_GRADIENTS;
        if (!plan(&c, &report)) continue;
        double bytes = 124439808 * (2 + 3.125 / n);
        check(fabs((double)(report.bytes[MTT_WEIGHTS] + report.bytes[MTT_OPTIMIZER]) / bytes - 1) < 2e-3,
              "%d ranks: %zu bytes of weights and state, wanted %g", n,
              report.bytes[MTT_WEIGHTS] + report.bytes[MTT_OPTIMIZER], bytes);
    }
    /* While nothing is computed travel only the gradients of the embeddings, which are made last, in FP32,
       the squares of all blocks, and the weights of the last norm. */
    double exposed = 0, blocks = 0, embeddings = (50304 + 1024) * 768.0;
    for (int rank = 0; rank < 3; rank++) {
        configuration c = known('G', 4);
        mtt_schedule *s = NULL;
        mtt_plan_report report;
        c.policy.precision = MTT_BF16;
        c.policy.state = MTT_STATE_COMPACT;
        c.policy.ranks = 3;
        c.policy.rank = rank;
        c.policy.shard = MTT_SHARD_GRADIENTS;
        c.policy.bandwidth = 100;
        c.policy.device = MTT_DEVICE_CPU;
        check(!mtt_plan(&env, &c.model, &c.policy, c.batch, c.seq_len, &report), "%s", env.error);
        check(report.exposed_bytes == report.wire_bytes, "a CPU waits for all transfers");
        c.policy.device = MTT_DEVICE_CUDA;
        check(!mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s), "%s", env.error);
        if (!s) return;
        mtt_schedule_report(s, &report);
        exposed += report.exposed_bytes;
        const mtt__program *p = &s->programs[MTT__TRAIN];
        const mtt_part *last = &p->parameters[p->parameter_count - 1].part;
        blocks = (double)(last->square + mtt__ceil_div(last->elements, MTT__RANGE_BLOCK));
        check(report.wire_ms == report.wire_bytes / (double)c.policy.bandwidth / 1e6 &&
                  report.exposed_ms == report.exposed_bytes / (double)c.policy.bandwidth / 1e6,
              "%.0f bytes at 100 GB/s take %g ms, %.0f exposed %g ms", report.wire_bytes, report.wire_ms,
              report.exposed_bytes, report.exposed_ms);
        mtt_schedule_destroy(s);
    }
    check(exposed == 2 * (4 * embeddings + 8 * blocks + 2 * 2 * 768),
          "three ranks wait for %.0f bytes, wanted %.0f", exposed,
          2 * (4 * embeddings + 8 * blocks + 2 * 2 * 768));
}

/* FLOPs of a model whose arithmetic is well known: 6 per parameter of the matrices and token, and
   attention. */
static void flops(void)
{
    configuration a = known('A', 32);
    mtt_plan_report none, layer, selective;
    a.model.no_head_bias = 1;
    a.policy.attention = MTT_ATTENTION_FLASH;
    double tokens = 32 * 256, matrices = 4 * 12 * 256 * 256 + 256 * 50304, sure = 6 * matrices * tokens;
    plan(&a, &none);
    check(none.flops > sure && none.flops < 1.15 * sure, "A's step is %g FLOPs, its matrices alone %g",
          none.flops, sure);
    check(none.recompute_flops == 0 && none.recompute_layers == 0, "nothing is recomputed, at %g FLOPs",
          none.recompute_flops);
    a.policy.recompute = MTT_RECOMPUTE_LAYER;
    plan(&a, &layer);
    double once = 2 * 4 * 12 * 256 * 256 * tokens;
    check(layer.recompute_layers == 4 && layer.recompute_flops > 0.7 * once &&
              layer.recompute_flops < 1.3 * once,
          "recomputing %d layers costs %g FLOPs, their matrices %g", layer.recompute_layers,
          layer.recompute_flops, once);
    a.policy.recompute = MTT_RECOMPUTE_SELECTIVE;
    plan(&a, &selective);
    check(selective.recompute_selective == 4 && selective.recompute_flops > 0 &&
              selective.recompute_flops < 0.1 * layer.recompute_flops,
          "selective recomputation costs %g FLOPs", selective.recompute_flops);
}

/* Bytes that operations of this name move. */
static double traffic(const configuration *c, const char *name)
{
    mtt_schedule *s = NULL;
    double bytes = 0;
    int count = 0;
    check(!mtt_schedule_create(&env, &c->model, &c->policy, c->batch, c->seq_len, &s), "%s: %s", c->text,
          env.error);
    const mtt_op *ops = s ? mtt_schedule_ops(s, &count) : NULL;
    for (int i = 0; i < count; i++)
        if (strcmp(mtt_op_name(ops[i].kind), name) == 0) bytes += ops[i].traffic_bytes;
    mtt_schedule_destroy(s);
    return bytes;
}

/* AdamW reads a gradient, reads and writes moments and masters, and writes 16-bit copies; the compact state
   is all read and written, 16-bit weights too. */
static void traffic_in_place(void)
{
    static const struct {
        mtt_precision precision;
        mtt_state state;
        int accumulate;
        double bytes; /* a parameter */
    } CASES[] = {{MTT_FP32, MTT_STATE_FULL, 1, 4 + 3 * 8},
                 {MTT_BF16, MTT_STATE_FULL, 1, 4 + 3 * 8 + 2},
                 {MTT_FP16, MTT_STATE_FULL, 2, 4 + 3 * 8 + 2},
                 {MTT_BF16, MTT_STATE_COMPACT, 2, 4 + 2 * 5.125},
                 {MTT_FP32, MTT_STATE_COMPACT, 2, 4 + 2 * 6.125}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        configuration c = known('A', 8);
        c.policy.precision = CASES[i].precision;
        c.policy.state = CASES[i].state;
        c.policy.accumulate = CASES[i].accumulate;
        double bytes = traffic(&c, "adamw") / (28941393 + 47 * 513); /* the vocabulary is padded by 47 */
        check(fabs(bytes / CASES[i].bytes - 1) < 1e-4,
              "AdamW moves %g bytes a parameter, state %d of precision %d has %g", bytes, (int)c.policy.state,
              (int)c.policy.precision, CASES[i].bytes);
    }
    /* With two micro-batches, each gradient is also read and added to a sum, which is read and written. A
       chunked loss reads the head's gradient in each chunk but the first. Each chunk also reads the head for
       two products, and passes over its logits five times. */
    configuration a = known('A', 8), twice = a;
    double rows = 8 * 256, head = 50304 * 256, sums;
    twice.policy.accumulate = 2;
    sums = traffic(&twice, "sum_gradients");
    check(traffic(&a, "sum_gradients") == 0 && sums == 12.0 * (28941393 + 47 * 513),
          "adding gradients moves %g bytes", sums);
    a.policy.precision = MTT_FP32;
    a.policy.loss = MTT_LOSS_CHUNKED;
    a.policy.loss_chunk_rows = 512;
    double loss = traffic(&a, "chunked_loss"),
           sure = 4 * (2 * 4 + 7) * (head + 50304) + 4 * 5 * rows * 50304 + 4 * rows * (2 * 256 + 4);
    check(fabs(loss / sure - 1) < 1e-4, "the chunked loss moves %g bytes, not %g", loss, sure);
}

/* ------------------------------------------------------------------------------------------ searches ---- */

/* Seconds of a batch and the step, from the schedule's listing: by operation the longer of arithmetic and
   traffic. */
static double roofline(const mtt_schedule *s)
{
    static const double CUDA[] = {50e12, 250e12, 500e12, 500e12, 900e12};
    int cuda = s->policy.device == MTT_DEVICE_CUDA;
    double seconds = 0, flops = cuda ? CUDA[s->policy.precision] : 250e9, bytes = cuda ? 4.2e12 : 10e9;
    mtt_plan_report report;
    int count;
    const mtt_op *ops = mtt_schedule_ops(s, &count);
    mtt_schedule_report(s, &report);
    for (int i = 0; i < count; i++)
        seconds += (ops[i].phase == MTT_STEP ? 1 : report.micro_batches) *
                   (4e-6 + fmax(ops[i].flops / flops, ops[i].traffic_bytes / bytes));
    return seconds;
}

/* Layer, segments and a budget choose the cheapest of all mixtures of recomputation that fit. For layer and
   segments, what fits is the memory of recomputing all layers whole, plus 0.1 %. The cost may be 1 % above
   the cheapest, because packing lets a few bytes decide. */
static void cheapest(const configuration *c)
{
    mtt_schedule *s = NULL;
    mtt_plan_report chosen, report;
    int layers = c->model.layers;
    char text[100];
    mtt_status status = mtt_schedule_create(&env, &c->model, &c->policy, c->batch, c->seq_len, &s);
    check(!status, "%s: no schedule: %s", c->text, env.error);
    if (status) return;
    mtt_schedule_report(s, &chosen);
    double cost = roofline(s), best = cost;
    size_t limit = c->policy.budget_bytes;
    check(fabs(mtt__plan_cost(s) / cost - 1) < 1e-9, "%s: the plan costs %g, its operations %g", c->text,
          mtt__plan_cost(s), cost);
    snprintf(text, sizeof(text), "%d whole, %d in part, %zu bytes", chosen.recompute_layers,
             chosen.recompute_selective, chosen.arena_bytes);
    for (int whole = layers; whole >= 0; whole--)
        for (int partial = 0; partial <= layers - whole; partial++) {
            if (mtt__build(s, whole, partial, SIZE_MAX)) continue;
            mtt_schedule_report(s, &report);
            if (whole == layers && c->policy.recompute != MTT_RECOMPUTE_BUDGET)
                limit = report.arena_bytes + report.arena_bytes / 1024;
            if (report.arena_bytes <= limit) best = fmin(best, roofline(s));
        }
    check(chosen.arena_bytes <= limit, "%s: %s, more than %zu", c->text, text, limit);
    check(cost <= 1.01 * best, "%s: %s cost %g, another mixture %g", c->text, text, cost, best);
    mtt_schedule_destroy(s);
}

/* What keeping the last layer's activations costs, to the byte: model B, batch 128, BF16, flash, 64 MiB for
   each C of width. Full logits are in memory together with all that is kept, so nothing of the last layer can
   stay. A chunk of logits is smaller than what the layer's backward pass needs beside these activations. */
static void last_layer(void)
{
    static const struct { char name; int batch, layers, whole, partial; } CHUNKED[] = {
        {'B', 128, 6, 5, 1}, {'D', 32, 12, 11, 1}, {'D', 8, 24, 20, 4}, {'A', 128, 4, 4, 0}};
    const size_t MIB = 1 << 20, whole = (15 * 64 + 3) * MIB, part = (9 * 64 + 3) * MIB; /* statistics: 3 */
    configuration b = known('B', 128);
    mtt_plan_report all, kept, partly, chosen;
    mtt_schedule *s = NULL;
    b.policy.precision = MTT_BF16;
    b.policy.attention = MTT_ATTENTION_FLASH;
    b.policy.recompute = MTT_RECOMPUTE_LAYER;
    if (mtt_schedule_create(&env, &b.model, &b.policy, b.batch, b.seq_len, &s))
        return check(0, "no schedule: %s", env.error);
    mtt_schedule_report(s, &chosen);
    mtt__build(s, 6, 0, SIZE_MAX);
    mtt_schedule_report(s, &all);
    mtt__build(s, 5, 0, SIZE_MAX);
    mtt_schedule_report(s, &kept);
    mtt__build(s, 5, 1, SIZE_MAX);
    mtt_schedule_report(s, &partly);
    mtt_schedule_destroy(s);
    check(chosen.recompute_layers == 6 && chosen.arena_bytes == all.arena_bytes,
          "full logits: %d of 6 layers are recomputed", chosen.recompute_layers);
    check(kept.arena_bytes - all.arena_bytes == whole && partly.arena_bytes - all.arena_bytes == part,
          "the last layer takes %zu bytes, in part %zu, instead of %zu and %zu",
          kept.arena_bytes - all.arena_bytes, partly.arena_bytes - all.arena_bytes, whole, part);
    check(fabs(kept.recompute_flops / all.recompute_flops - 5.0 / 6) < 1e-9,
          "the last of 6 layers was %g of the recomputation", 1 - kept.recompute_flops / all.recompute_flops);
    for (size_t i = 0; i < MTT__LENGTH(CHUNKED); i++) {
        configuration c = known(CHUNKED[i].name, CHUNKED[i].batch);
        c.model.layers = CHUNKED[i].layers;
        c.policy = b.policy;
        c.policy.loss = MTT_LOSS_CHUNKED;
        describe(&c);
        if (plan(&c, &chosen))
            check(chosen.recompute_layers == CHUNKED[i].whole &&
                      chosen.recompute_selective == CHUNKED[i].partial,
                  "%s: %d whole, %d in part", c.text, chosen.recompute_layers, chosen.recompute_selective);
    }
}

/* A batch that may be cut is cut into as many micro-batches as are cheapest; one that may not is left
   whole. */
static void splits(void)
{
    int cut = 0;
    random_state = 1606;
    for (int i = 0; i < 100; i += each()) {
        configuration c = random_configuration(), part;
        mtt_plan_report report;
        mtt_schedule *s = NULL;
        double best = INFINITY, chosen;
        int batch[2] = {0, 0};
        c.batch = 1 + below(12);
        c.policy.loss = (mtt_loss)below(3);
        c.seq_len *= 32;
        c.model.max_seq *= 32;
        c.model.d_model *= 8;
        c.model.d_ff *= 16;
        c.policy.recompute = MTT_RECOMPUTE_BUDGET;
        c.policy.split = 0;
        c.policy.device = (mtt_device)below(2);
        set_budget(&c);
        describe(&c);
        for (int k = 1; k <= c.batch; k++) {
            if (c.batch % k) continue;
            part = c;
            part.batch = c.batch / k;
            part.policy.accumulate = c.policy.accumulate * k;
            if (mtt_schedule_create(&env, &part.model, &part.policy, part.batch, part.seq_len, &s)) continue;
            s->split = k;
            best = fmin(best, roofline(s));
            mtt_schedule_destroy(s);
        }
        check(plan(&c, &report) && report.micro_batches == 1, "%s: cut without leave", c.text);
        for (int may = 0; may < 2; may++) {
            c.policy.split = may;
            mtt_plan_max_batch(&env, &c.model, &c.policy, c.seq_len, c.policy.budget_bytes, &batch[may]);
        }
        check(batch[0] == batch[1], "%s: the largest batch is %d, with leave to split %d", c.text, batch[0],
              batch[1]);
        if (mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s)) {
            check(0, "%s: no split fits: %s", c.text, env.error);
            continue;
        }
        mtt_schedule_report(s, &report);
        chosen = roofline(s);
        cut += report.micro_batches > 1;
        check(report.arena_bytes <= c.policy.budget_bytes && c.batch % report.micro_batches == 0,
              "%s: %d micro-batches in %zu bytes", c.text, report.micro_batches, report.arena_bytes);
        check(chosen <= best * 1.000001, "%s: %d micro-batches take %g s, another number %g", c.text,
              report.micro_batches, chosen, best);
        mtt_schedule_destroy(s);
    }
    check(cut * each() > 10, "%d of %d batches are split", cut, 100 / each());
}

/* With half the memory of batch 32, model D is trained in two halves, without recomputation. With less than
   one sequence takes, it is refused, and the text says what the smallest plan would take. */
static void known_splits(void)
{
    configuration d = known('D', 32), half = known('D', 16), one = known('D', 1);
    mtt_plan_report report, whole;
    mtt_policy fit;
    d.policy.precision = MTT_BF16;
    d.policy.attention = MTT_ATTENTION_FLASH;
    d.policy.loss = MTT_LOSS_CHUNKED;
    d.policy.device = MTT_DEVICE_CUDA;
    half.policy = one.policy = d.policy;
    half.policy.accumulate = 2;
    plan(&half, &whole);
    d.policy.recompute = MTT_RECOMPUTE_BUDGET;
    d.policy.budget_bytes = whole.arena_bytes;
    d.policy.split = 1;
    if (plan(&d, &report))
        check(report.micro_batches == 2 && report.arena_bytes == whole.arena_bytes &&
                  report.recompute_flops == 0,
              "D in %zu bytes: %d micro-batches, %zu bytes", whole.arena_bytes, report.micro_batches,
              report.arena_bytes);
    d.batch = 96, half.batch = 48; /* 16,384 rows of logits at a time, and 12,288 */
    d.policy.loss = half.policy.loss = MTT_LOSS_AUTO;
    plan(&half, &whole);
    d.policy.budget_bytes = whole.arena_bytes;
    if (plan(&d, &report))
        check(report.micro_batches == 2 && report.arena_bytes == whole.arena_bytes,
              "D's chosen loss: %d micro-batches, %zu bytes, not %zu", report.micro_batches,
              report.arena_bytes, whole.arena_bytes);
    d.batch = 32, half.batch = 16;
    d.policy.loss = half.policy.loss = MTT_LOSS_CHUNKED;
    plan(&half, &whole);
    if (!mtt_policy_fit(&env, &d.model, &d.policy, d.batch, d.seq_len, whole.arena_bytes, &fit))
        check(fit.recompute == MTT_RECOMPUTE_BUDGET && fit.split && fit.accumulate == 0,
              "the fit does not split");
    one.policy.accumulate = 32;
    one.policy.recompute = MTT_RECOMPUTE_LAYER;
    plan(&one, &whole);
    d.policy.budget_bytes = whole.arena_bytes / 2;
    char needed[32];
    snprintf(needed, sizeof(needed), "%zu", whole.arena_bytes);
    check(mtt_plan(&env, &d.model, &d.policy, 32, 1024, &report) == MTT_E_BUDGET && strstr(env.error, needed),
          "D in too few bytes, where %s would do: %s", needed, env.error);
    check(!strstr(env.error, "set split"), "split is set, and named as a remedy: %s", env.error);
    d.policy.split = 0;
    check(mtt_plan(&env, &d.model, &d.policy, 32, 1024, &report) == MTT_E_BUDGET &&
              strstr(env.error, "set split"), "split would help, and is not named: %s", env.error);
}

static void mixtures(void)
{
    random_state = 5150;
    for (int i = 0; i < 300; i += each()) {
        configuration c = random_configuration();
        c.policy.recompute = (mtt_recompute)(MTT_RECOMPUTE_LAYER + below(3));
        c.policy.device = (mtt_device)below(2);
        c.policy.budget_bytes = 0;
        c.policy.split = 0;
        if (c.policy.recompute == MTT_RECOMPUTE_BUDGET) set_budget(&c);
        describe(&c);
        cheapest(&c);
    }
}

/* In models of 8 layers the search is exact: of all mixtures that fit a budget it takes the cheapest. */
static void exact_budgets(void)
{
    enum { LAYERS = 8, BUDGETS = 60 };
    size_t bytes[LAYERS + 1][LAYERS + 1], whole = 0, none = 0;
    double costs[LAYERS + 1][LAYERS + 1];
    for (int flash = 0; flash < 2; flash++) {
        configuration c = {.batch = 16, .seq_len = 256};
        mtt_schedule *s = NULL;
        c.model = (mtt_model_desc){
            .layers = LAYERS, .heads = 4, .d_model = 256, .vocab = 10000, .max_seq = 256};
        c.policy = (mtt_policy){.precision = MTT_BF16,
                                .attention = flash ? MTT_ATTENTION_FLASH : MTT_ATTENTION_PLAIN,
                                .device = MTT_DEVICE_CUDA};
        check(!mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s), "%s", env.error);
        if (!s) continue;
        for (int w = 0; w <= LAYERS; w++)
            for (int p = 0; w + p <= LAYERS; p++) {
                check(!mtt__build(s, w, p, SIZE_MAX), "%s", env.error);
                bytes[w][p] = mtt__arena_bytes(s);
                costs[w][p] = roofline(s);
            }
        mtt_schedule_destroy(s);
        whole = bytes[LAYERS][0], none = bytes[0][0];
        c.policy.recompute = MTT_RECOMPUTE_BUDGET;
        for (int i = 0; i <= BUDGETS; i++) {
            double best = INFINITY, cost;
            c.policy.budget_bytes = whole + (none - whole) / BUDGETS * (size_t)i;
            for (int w = 0; w <= LAYERS; w++)
                for (int p = 0; w + p <= LAYERS; p++)
                    if (bytes[w][p] <= c.policy.budget_bytes) best = fmin(best, costs[w][p]);
            s = NULL;
            check(!mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s), "%s", env.error);
            if (!s) continue;
            cost = roofline(s);
            check(cost <= best * (1 + 1e-9), "within %zu bytes a plan costs %g, another mixture %g",
                  c.policy.budget_bytes, cost, best);
            mtt_schedule_destroy(s);
        }
    }
}

/* Checks a budget at the least that any mixture takes, and one byte below it, which the error answers with
   that least. In models of more than 8 layers, where not all are tried, packing may cost 0.1 %. Returns 1 if
   all layers whole take more. */
static int least_of_mixtures(configuration *c)
{
    mtt_schedule *s = NULL;
    mtt_plan_report report;
    size_t least = SIZE_MAX, whole = 0;
    char needed[32];
    int layers = c->model.layers;
    c->policy.recompute = MTT_RECOMPUTE_NONE;
    describe(c);
    check(!mtt_schedule_create(&env, &c->model, &c->policy, c->batch, c->seq_len, &s), "%s", env.error);
    if (!s) return 0;
    s->policy.recompute = MTT_RECOMPUTE_BUDGET;
    s->policy.segment = 1;
    for (int w = layers; w >= 0; w--)
        for (int p = 0; w + p <= layers; p++) {
            check(!mtt__build(s, w, p, SIZE_MAX), "%s: %s", c->text, env.error);
            if (w == layers) whole = mtt__arena_bytes(s);
            if (mtt__arena_bytes(s) < least) least = mtt__arena_bytes(s);
        }
    mtt_schedule_destroy(s);
    c->policy.recompute = MTT_RECOMPUTE_BUDGET;
    c->policy.budget_bytes = layers > 8 ? least + least / 1024 : least;
    check(plan(c, &report), "%s: %zu bytes are not enough", c->text, c->policy.budget_bytes);
    snprintf(needed, sizeof(needed), "takes %zu: 1 too", least);
    c->policy.budget_bytes = least - 1;
    check(mtt_plan(&env, &c->model, &c->policy, c->batch, c->seq_len, &report) == MTT_E_BUDGET &&
              (layers > 8 || strstr(env.error, needed)), "%s: not \"%s\": %s", c->text, needed, env.error);
    return whole > least;
}

/* A budget that one mixture of layers fits is met, though all layers whole would miss it. */
static void least_budgets(void)
{
    int mixed = 0;
    random_state = 8086;
    for (int i = 0; i < 60; i += each()) {
        configuration c = random_configuration();
        c.model.layers = 1 + below(i % 4 ? 8 : 14);
        c.policy.device = (mtt_device)below(2);
        c.policy.split = 0;
        mixed += least_of_mixtures(&c);
    }
    check(mixed * each() > 5, "%d of %d models take least with a mixture", mixed, 60 / each());
}

/* Where no split fits, the error names the least of all; a split's loss goes by the rows of its parts. */
static void least_splits(void)
{
    random_state = 90210;
    for (int i = 0; i < 40; i += each()) {
        configuration c = random_configuration(), part;
        mtt_plan_report report;
        size_t least = SIZE_MAX;
        char *at;
        c.batch = 1 + below(12);
        c.seq_len *= 8;
        c.model.max_seq *= 8;
        c.policy.recompute = MTT_RECOMPUTE_BUDGET;
        c.policy.device = (mtt_device)below(2);
        c.policy.loss = (mtt_loss)below(3);
        c.policy.budget_bytes = 1;
        describe(&c);
        for (int k = 1; k <= c.batch; k++) {
            if (c.batch % k) continue;
            part = c;
            part.batch = c.batch / k;
            part.policy.split = 0;
            part.policy.accumulate = c.policy.accumulate * k;
            if (mtt_plan(&env, &part.model, &part.policy, part.batch, part.seq_len, &report) != MTT_E_BUDGET)
                check(0, "%s: fits a byte", c.text);
            at = strstr(env.error, "takes ");
            if (at && strtoull(at + 6, NULL, 10) < least) least = (size_t)strtoull(at + 6, NULL, 10);
        }
        c.policy.split = 1;
        c.policy.budget_bytes = least - 1;
        check(mtt_plan(&env, &c.model, &c.policy, c.batch, c.seq_len, &report) == MTT_E_BUDGET, "%s: fits",
              c.text);
        at = strstr(env.error, "takes ");
        check(at && strtoull(at + 6, NULL, 10) == least, "%s: not %zu: %s", c.text, least, env.error);
        c.policy.budget_bytes = least;
        check(!mtt_plan(&env, &c.model, &c.policy, c.batch, c.seq_len, &report), "%s: %s", c.text, env.error);
    }
}

/* Ranks whose shares differ decide alike, from what the fullest can hold: the number of micro-batches, the
   largest batch, the policy that fits. */
static void ranks_decide_alike(void)
{
    int unequal = 0;
    random_state = 4004;
    for (int i = 0; i < 60; i += each()) {
        configuration c = random_configuration();
        mtt_plan_report own, first = {0};
        mtt_policy fit, fits;
        size_t low = SIZE_MAX, high = 0;
        int batch = 0, largest = 0;
        c.batch = 2 + 2 * below(6);
        c.model.d_model *= 2;
        c.policy.ranks = 2 + below(7);
        c.policy.shard = (mtt_shard)(MTT_SHARD_OPTIMIZER + below(2));
        for (c.policy.rank = 0; c.policy.rank < c.policy.ranks; c.policy.rank++) {
            c.policy.recompute = MTT_RECOMPUTE_LAYER;
            if (!plan(&c, &own)) continue;
            if (own.arena_bytes < low) low = own.arena_bytes;
            if (own.arena_bytes > high) high = own.arena_bytes;
        }
        unequal += low < high;
        c.policy.recompute = MTT_RECOMPUTE_BUDGET;
        c.policy.budget_bytes = low + (high - low) / 4 * (size_t)below(6);
        c.policy.split = 1;
        for (c.policy.rank = 0; c.policy.rank < c.policy.ranks; c.policy.rank++) {
            mtt_status status;
            describe(&c);
            status = mtt_plan(&env, &c.model, &c.policy, c.batch, c.seq_len, &own);
            if (!c.policy.rank) first = own, first.ops = (int)status;
            check(first.ops == (int)status && (status || own.micro_batches == first.micro_batches),
                  "%s: rank %d of %d: %d micro-batches, status %d; rank 0 %d and %d", c.text, c.policy.rank,
                  c.policy.ranks, own.micro_batches, (int)status, first.micro_batches, first.ops);
            check(status || own.arena_bytes <= c.policy.budget_bytes, "%s: over the budget", c.text);
            mtt_plan_max_batch(&env, &c.model, &c.policy, c.seq_len, high * 2, &batch);
            if (!c.policy.rank) largest = batch;
            check(batch == largest, "%s: rank %d has a batch of %d, rank 0 of %d", c.text, c.policy.rank,
                  batch, largest);
            memset(&fits, 0, sizeof(fits));
            mtt_policy_fit(&env, &c.model, &c.policy, c.batch, c.seq_len, high, &fits);
            check(fits.rank == c.policy.rank || !fits.ranks, "%s: the fit is of rank %d", c.text, fits.rank);
            fits.rank = 0;
            if (!c.policy.rank) fit = fits;
            check(!memcmp(&fit, &fits, sizeof(fit)), "%s: rank %d has another fit", c.text, c.policy.rank);
        }
        c.policy.recompute = MTT_RECOMPUTE_NONE;
        c.policy.split = 0;
        if (!mtt_plan_max_batch(&env, &c.model, &c.policy, c.seq_len, high * 2, &batch))
            for (c.policy.rank = 0; c.policy.rank < c.policy.ranks; c.policy.rank++)
                check(!mtt_plan(&env, &c.model, &c.policy, batch, c.seq_len, &own) &&
                          own.arena_bytes <= high * 2,
                      "%s: the largest batch is none of rank %d", c.text, c.policy.rank);
    }
    check(unequal * each() > 30, "%d of %d models have shares that differ", unequal, 60 / each());
}

/* Each word sets its field and no other; a policy's name is its words in the order of the fields. */
static void techniques(void)
{
    static const struct {
        const char *words, *name;
        mtt_policy policy;
        int batch;
    } GOOD[] = {
        {"fp32", "fp32", {.precision = MTT_FP32}, 7},
        {"tf32", "tf32", {.precision = MTT_TF32}, 7},
        {"bf16", "bf16", {.precision = MTT_BF16}, 7},
        {"fp16_bs12", "fp16", {.precision = MTT_FP16}, 12},
        {"fp8", "fp8", {.precision = MTT_FP8}, 7},
        {"fp8_flash_chunked", "fp8_flash_chunked",
         {.precision = MTT_FP8, .attention = MTT_ATTENTION_FLASH, .loss = MTT_LOSS_CHUNKED}, 7},
        {"layers8_fp8", "fp8_layers8", {.precision = MTT_FP8, .fp8_products = MTT_FP8_LAYERS}, 7},
        {"flash", "fp32_flash", {.attention = MTT_ATTENTION_FLASH}, 7},
        {"window30", "fp32_flash_window30", {.attention = MTT_ATTENTION_FLASH, .window = 30}, 7},
        {"selective", "fp32_selective", {.recompute = MTT_RECOMPUTE_SELECTIVE}, 7},
        {"checkpointing", "fp32_checkpointing", {.recompute = MTT_RECOMPUTE_LAYER}, 7},
        {"segments", "fp32_segments", {.recompute = MTT_RECOMPUTE_SEGMENTS}, 7},
        {"recursive", "fp32_recursive", {.recompute = MTT_RECOMPUTE_RECURSIVE}, 7},
        {"budget", "fp32_budget", {.recompute = MTT_RECOMPUTE_BUDGET}, 7},
        {"chunked", "fp32_chunked", {.loss = MTT_LOSS_CHUNKED}, 7},
        {"compact", "fp32_compact", {.state = MTT_STATE_COMPACT}, 7},
        {"early", "fp32_early", {.early_update = 1}, 7},
        {"split", "fp32_split", {.split = 1}, 7},
        {"compact_segments_window8_bs1_bf16",
         "bf16_flash_segments_compact_window8",
         {.precision = MTT_BF16,
          .attention = MTT_ATTENTION_FLASH,
          .window = 8,
          .recompute = MTT_RECOMPUTE_SEGMENTS,
          .state = MTT_STATE_COMPACT},
         1},
    };
    static const char *const BAD[] = {"",        "bf17",   "flashy", "flas",  "flash_",       "_flash",
                                      "window0", "window", "windo8", "bs0",   "flash__bf16",  "bs",
                                      "FLASH",   "bs8x",   "chunk",  "fp3 2", "window99999999999",
                                      "widows8", "bt8",    "sb8",    "fp8e4m3"};
    char name[200];
    for (size_t i = 0; i < MTT__LENGTH(GOOD); i++) {
        mtt_policy p = {.precision = MTT_FP32};
        const mtt_policy *want = &GOOD[i].policy;
        int batch = 7;
        mtt_status status = mtt_policy_parse(&env, GOOD[i].words, &p, &batch);
        check(!status && batch == GOOD[i].batch && p.precision == want->precision &&
                  p.attention == want->attention && p.window == want->window &&
                  p.recompute == want->recompute && p.loss == want->loss && p.state == want->state &&
                  p.split == want->split && p.early_update == want->early_update &&
                  p.fp8_products == want->fp8_products,
              "\"%s\" is read as something else: %s", GOOD[i].words, status ? env.error : "");
        check(mtt_policy_name(&p, name, sizeof(name)) == strlen(GOOD[i].name) && !strcmp(name, GOOD[i].name),
              "\"%s\" is named %s", GOOD[i].words, name);
    }
    for (size_t i = 0; i < MTT__LENGTH(BAD); i++) {
        mtt_policy p = {.window = 5};
        int batch = 7;
        check(mtt_policy_parse(&env, BAD[i], &p, &batch) == MTT_E_ARGUMENT &&
                  strstr(env.error, "no technique"),
              "\"%s\" is taken for a technique", BAD[i]);
        check(p.window == 5 && batch == 7, "\"%s\" is refused, but has changed the policy", BAD[i]);
    }
    mtt_policy p = {.window = 0};
    check(mtt_policy_parse(&env, "bs8", &p, NULL) == MTT_E_ARGUMENT, "a batch is read where none is wanted");
}

static size_t arena_at(const configuration *c, int batch)
{
    configuration other = *c;
    mtt_plan_report report;
    other.batch = batch;
    return plan(&other, &report) ? report.arena_bytes : 0;
}

static void largest_batch(void)
{
    random_state = 31;
    for (int i = 0; i < 50; i += each()) {
        configuration c = random_configuration();
        int batch = -1;
        if (c.policy.recompute == MTT_RECOMPUTE_BUDGET) c.policy.recompute = MTT_RECOMPUTE_NONE;
        size_t one = arena_at(&c, 1), budget = one + (size_t)below(1 << 22);
        mtt_status status = mtt_plan_max_batch(&env, &c.model, &c.policy, c.seq_len, budget, &batch);
        check(!status && batch >= 1 && arena_at(&c, batch) <= budget && arena_at(&c, batch + 1) > budget,
              "%s: %d is not the largest batch in %zu bytes: %s", c.text, batch, budget,
              status ? env.error : "ok");
        int same = 0;
        budget = arena_at(&c, batch);
        status = mtt_plan_max_batch(&env, &c.model, &c.policy, c.seq_len, budget, &same);
        check(!status && same == batch, "%s: %d, not %d, fit %zu bytes", c.text, same, batch, budget);
        char needed[32];
        snprintf(needed, sizeof(needed), "%zu", one);
        status = mtt_plan_max_batch(&env, &c.model, &c.policy, c.seq_len, one - 1, &batch);
        check(status == MTT_E_BUDGET && strstr(env.error, needed),
              "%s: %zu bytes are too few, but: %s, \"%s\"", c.text, one - 1, mtt_status_string(status),
              env.error);
    }
    configuration a = known('A', 1);
    int batch = 0;
    check(!mtt_plan_max_batch(&env, &a.model, &a.policy, 256, SIZE_MAX, &batch) && batch == 1 << 20,
          "memory without end takes %d", batch);
    a.policy.recompute = MTT_RECOMPUTE_BUDGET; /* the budget searched for is the budget kept to */
    a.policy.budget_bytes = 1;
    check(!mtt_plan_max_batch(&env, &a.model, &a.policy, 256, (size_t)8 << 30, &batch) && batch > 1,
          "no batch in 8 GiB: %s", env.error);
    a.policy.budget_bytes = (size_t)8 << 30;
    a.batch = batch;
    check(arena_at(&a, batch) <= (size_t)8 << 30, "the batch of 8 GiB takes %zu bytes", arena_at(&a, batch));
}

static int as_good(const configuration *c, const mtt_policy *fit, const mtt_plan_report *chosen,
                   size_t budget)
{
    for (int kind = 0; kind < 12; kind++) {
        configuration other = *c;
        mtt_plan_report report;
        other.policy = *fit;
        other.policy.attention = (mtt_attention)(kind % 2);
        other.policy.loss = kind / 2 % 2 ? MTT_LOSS_CHUNKED : MTT_LOSS_AUTO;
        other.policy.recompute = (mtt_recompute)(kind / 4);
        if (!plan(&other, &report) || report.arena_bytes > budget) continue;
        if (report.flops < 0.98 * chosen->flops && report.traffic_bytes < 0.98 * chosen->traffic_bytes)
            return 0;
    }
    return 1;
}

static void fitting_policy(void)
{
    random_state = 77;
    for (int i = 0; i < 50; i += each()) {
        configuration c = random_configuration();
        mtt_plan_report report;
        mtt_policy fit;
        if (c.policy.recompute == MTT_RECOMPUTE_BUDGET) c.policy.recompute = MTT_RECOMPUTE_NONE;
        memset(&fit, 0, sizeof(fit));
        mtt_status status =
            mtt_policy_fit(&env, &c.model, &c.policy, c.batch, c.seq_len, (size_t)1 << 40, &fit);
        check(!status && fit.recompute == MTT_RECOMPUTE_NONE, "%s: with memory to waste: %s, recompute %s",
              c.text, status ? env.error : "ok", RECOMPUTES[fit.recompute]);
        check(fit.precision == c.policy.precision && fit.window == c.policy.window &&
                  fit.accumulate == c.policy.accumulate,
              "%s: the fit changed the result", c.text);

        configuration least = c, most = c;
        least.policy.attention = MTT_ATTENTION_FLASH;
        least.policy.loss = MTT_LOSS_CHUNKED;
        least.policy.recompute = MTT_RECOMPUTE_LAYER;
        size_t low = arena_at(&least, c.batch), high = arena_at(&most, c.batch);
        size_t budget = low + (high > low ? (high - low) / 16 * (size_t)below(17) : 0);
        status = mtt_policy_fit(&env, &c.model, &c.policy, c.batch, c.seq_len, budget, &fit);
        check(!status, "%s: nothing fits %zu bytes, though %zu would do: %s", c.text, budget, low, env.error);
        configuration chosen = c;
        chosen.policy = fit;
        if (status || !plan(&chosen, &report)) continue;
        check(report.arena_bytes <= budget, "%s: the fit takes %zu of %zu bytes", c.text, report.arena_bytes,
              budget);
        check(as_good(&c, &fit, &report, budget), "%s: in %zu bytes another policy does with less of all",
              c.text, budget);
        status = mtt_policy_fit(&env, &c.model, &c.policy, c.batch, c.seq_len, 1000, &fit);
        check(status == MTT_E_BUDGET && strstr(env.error, "1000"), "%s: 1000 bytes: %s, \"%s\"", c.text,
              mtt_status_string(status), env.error);
    }
}

/* Any policy, of up to 12 layers. */
static configuration any_policy(void)
{
    configuration c = random_configuration();
    mtt_policy *p = &c.policy;
    c.model.layers = 1 + below(9);
    p->recompute = (mtt_recompute)below(6);
    p->segment = below(2) ? 0 : 1 + below(c.model.layers);
    p->loss = (mtt_loss)below(3);
    p->device = (mtt_device)below(2);
    p->workspace_bytes = below(2) ? 0 : 1 + (size_t)below(1 << 20);
    if (p->precision != MTT_FP8 && below(4) == 0) p->lora_rank = 8;
    else if (below(4) == 0) p->freeze = "wte.*, h.0.*";
    if (below(3) == 0 && p->recompute != MTT_RECOMPUTE_BUDGET) { /* a budget's plan is each rank's own */
        p->ranks = 1 + below(4);
        p->rank = below(p->ranks);
        p->shard = (mtt_shard)below(3);
        p->exchange = (mtt_exchange)below(3);
    } else if (p->precision < MTT_FP16 && below(3) == 0) p->early_update = p->accumulate = 1, p->split = 0;
    else p->keep_gradients = below(2);
    if (p->recompute == MTT_RECOMPUTE_BUDGET) set_budget(&c);
    describe(&c);
    return c;
}

/* A policy that takes no more memory than one that the caller has is found, and of the least that any takes
   not a byte can be spared. */
static void fitting_any_policy(void)
{
    int slow = 0;
    random_state = 2029;
    for (int i = 0; i < 200; i += each()) {
        configuration c = any_policy(), other = c;
        mtt_plan_report report;
        mtt_policy fit;
        size_t budget = 0, least = 0;
        for (other.policy.rank = 0; !budget || other.policy.rank < c.policy.ranks; other.policy.rank++) {
            if (!plan(&other, &report)) break;
            if (report.arena_bytes > budget) budget = report.arena_bytes;
        }
        mtt_status status = mtt_policy_fit(&env, &c.model, &c.policy, c.batch, c.seq_len, budget, &fit);
        check(!status, "%s, segment %d: its own %zu bytes fit no policy: %s", c.text, c.policy.segment,
              budget, env.error);
        if (status) continue;
        slow += fit.recompute > MTT_RECOMPUTE_BUDGET || fit.recompute == MTT_RECOMPUTE_SEGMENTS;
        other.policy = fit;
        if (plan(&other, &report))
            check(report.arena_bytes <= budget, "%s: the fit takes %zu of %zu bytes", c.text,
                  report.arena_bytes, budget);
        if (i % 28) continue;
        status = mtt_policy_fit(&env, &c.model, &c.policy, c.batch, c.seq_len, 1, &fit);
        const char *at = strstr(env.error, "takes ");
        if (status == MTT_E_BUDGET && at) least = (size_t)strtoull(at + 6, NULL, 10);
        check(least > 1 && least <= budget, "%s: the least is %zu: %s", c.text, least, env.error);
        status = mtt_policy_fit(&env, &c.model, &c.policy, c.batch, c.seq_len, least, &fit);
        check(!status, "%s: the least, %zu bytes, is too little: %s", c.text, least, env.error);
        status = mtt_policy_fit(&env, &c.model, &c.policy, c.batch, c.seq_len, least - 1, &fit);
        check(status == MTT_E_BUDGET, "%s: less than the least, %zu bytes, fits", c.text, least);
    }
    check(slow * each() > 10, "segments and recursion fit %d times alone", slow);
}

/* ------------------------------------------------------------------------------------------ refusals ---- */

static void refused(const configuration *c, const char *const *names, int count, const char *what)
{
    mtt_plan_report report;
    env.error[0] = 0;
    mtt_status status = mtt_plan(&env, &c->model, &c->policy, c->batch, c->seq_len, &report);
    check(status == MTT_E_ARGUMENT, "%s: %s", what, mtt_status_string(status));
    for (int i = 0; i < count; i++)
        check(strstr(env.error, names[i]) != NULL, "%s: \"%s\" does not name %s", what, env.error, names[i]);
}

#define REFUSED(change, ...) \
    do { \
        static const char *const names[] = {__VA_ARGS__}; \
        configuration c = good; \
        change; \
        refused(&c, names, (int)MTT__LENGTH(names), #change); \
    } while (0)

static void validation(void)
{
    configuration good = known('A', 4);
    mtt_plan_report report;
    check(plan(&good, &report), "A is refused");
    REFUSED(c.model.layers = -1, "layers", "-1");
    REFUSED(c.model.layers = 1025, "layers");
    REFUSED(c.model.heads = -8, "heads");
    REFUSED(c.model.heads = 2000, "heads");
    REFUSED(c.model.d_model = -256, "d_model");
    REFUSED(c.model.d_model = 1 << 20, "d_model");
    REFUSED(c.model.d_model = 260, "d_model", "heads");
    REFUSED(c.model.heads = 64, "head", "8");
    REFUSED(c.model.heads_kv = 3, "heads_kv", "8");
    REFUSED(c.model.heads_kv = -1, "heads_kv");
    REFUSED(c.model.heads_kv = 16, "heads_kv");
    REFUSED(c.model.d_head = 12, "d_head", "12");
    REFUSED(c.model.d_head = 264, "d_head");
    REFUSED((c.model.d_head = 16, c.model.d_model = 260), "d_model", "260");
    REFUSED(c.model.rotary_theta = 0.5f, "rotary_theta");
    REFUSED(c.model.rotary_theta = INFINITY, "rotary_theta");
    REFUSED((c.policy.precision = MTT_FP8, c.model.d_head = 8, c.model.heads_kv = 1), "heads_kv", "16");
    REFUSED((c.model.heads = 1, c.model.d_model = 264), "head", "256");
    REFUSED(c.model.d_ff = 7, "d_ff");
    REFUSED(c.model.d_ff = 1 << 20, "d_ff");
    REFUSED(c.model.norm = (mtt_norm_form)2, "norm");
    REFUSED(c.model.norm_eps = -1e-5f, "norm_eps");
    REFUSED(c.model.norm_eps = 2, "norm_eps");
    REFUSED(c.model.norm_place = (mtt_norm_place)3, "norm_place");
    const mtt_field *mlp = mtt_model_fields();
    while (strcmp(mlp->name, "mlp")) mlp++;
    REFUSED(c.model.mlp = (mtt_mlp)(mlp->high + 1), "mlp");
    REFUSED(c.model.vocab = -1, "vocab");
    REFUSED(c.model.vocab = (1 << 24) + 1, "vocab");
    REFUSED(c.model.max_seq = -1, "max_seq");
    REFUSED(c.model.positions = (mtt_positions)4, "positions");
    REFUSED(c.model.dropout = NAN, "dropout");
    REFUSED(c.model.dropout = -0.1f, "dropout");
    REFUSED(c.model.dropout = 0.95f, "dropout");
    REFUSED(c.model.dropout = INFINITY, "dropout");
    REFUSED(c.policy.window = -1, "window", "-1");
    REFUSED(c.policy.precision = (mtt_precision)5, "precision");
    REFUSED(c.policy.fp8_products = (mtt_fp8_products)2, "fp8_products");
    REFUSED((c.policy.precision = MTT_FP8, c.model.d_ff = 1032), "fp8", "d_ff 1032", "multiples of 16");
    REFUSED((c.policy.precision = MTT_FP8, c.model.heads = 3, c.model.d_model = 264), "fp8", "d_model 264",
            "multiples of 16");
    REFUSED(c.policy.attention = (mtt_attention)2, "attention");
    REFUSED(c.policy.recompute = (mtt_recompute)6, "recompute");
    REFUSED(c.policy.recompute = MTT_RECOMPUTE_BUDGET, "budget_bytes");
    REFUSED(c.policy.loss = (mtt_loss)-1, "loss");
    REFUSED(c.policy.state = (mtt_state)2, "state");
    REFUSED(c.policy.device = (mtt_device)2, "device");
    REFUSED(c.policy.segment = -1, "segment");
    REFUSED(c.policy.loss_chunk_rows = -1, "loss_chunk_rows");
    REFUSED(c.policy.accumulate = -1, "accumulate");
    REFUSED(c.batch = 0, "batch", "0");
    REFUSED(c.batch = -3, "batch");
    REFUSED(c.batch = (1 << 20) + 1, "batch");
    REFUSED(c.seq_len = 0, "seq_len");
    REFUSED((c.seq_len = 257, c.model.positions = MTT_POSITIONS_LEARNED), "seq_len", "max_seq", "256");
    REFUSED((c.model.layers = -1, c.model.vocab = -2, c.model.dropout = 2, c.model.d_ff = -4), "layers",
            "vocab", "dropout", "d_ff");
    REFUSED((c.batch = 0, c.seq_len = -1, c.policy.window = -5, c.policy.accumulate = -2), "batch", "seq_len",
            "window", "accumulate");

    good.policy.ranks = INT_MIN;
    check(mtt_plan(&env, &good.model, &good.policy, 1, 8, &report) == MTT_E_ARGUMENT &&
          strstr(env.error, "ranks is -2147483648") && !strstr(env.error, "rank is"), "%s", env.error);
    good.policy.ranks = 0;

    mtt_model_desc nothing = {.layers = 0}, resolved, narrow = {.norm_eps = 1e-12f};
    check(!mtt_model_resolve(&env, &narrow, &resolved), "the least norm_eps: %s", env.error);
    mtt_model_desc flags = {.tied_head = 2, .no_head_bias = -1}; /* a checkpoint has 0 or 1 */
    check(!mtt_model_resolve(&env, &flags, &resolved) && resolved.tied_head == 1 &&
          resolved.no_head_bias == 1 && !resolved.qk_norm, "flags are %d and %d", resolved.tied_head,
          resolved.no_head_bias);
    check(!mtt_model_resolve(NULL, &nothing, &resolved) && resolved.layers == 4 && resolved.heads == 8 &&
              resolved.d_model == 256 && resolved.d_ff == 1024 && resolved.vocab == 10000 &&
              resolved.max_seq == 1024,
          "the model's defaults are not the manual's");
    mtt_policy policy = {.window = 0}, p;
    check(!mtt_policy_resolve(NULL, &policy, &resolved, 1, 8, &p) && p.segment == 1 &&
              p.loss_chunk_rows == 1024 && p.accumulate == 1,
          "the policy's defaults are not the manual's");
    policy.recompute = MTT_RECOMPUTE_SEGMENTS;
    check(!mtt_policy_resolve(NULL, &policy, &resolved, 1, 8, &p) && p.segment == 2,
          "segments of %d of 4 layers", p.segment);
    for (int products = MTT_FP8_ALL; products <= MTT_FP8_LAYERS; products++) {
        mtt_policy eight = {.precision = MTT_FP8, .fp8_products = (mtt_fp8_products)products,
                            .loss_chunk_rows = 17};
        check(!mtt_policy_resolve(NULL, &eight, &resolved, 1, 8, &p) && p.loss_chunk_rows == 32 &&
                  p.loss == (products == MTT_FP8_ALL ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL),
              "FP8 of products %d has chunks of %d rows, loss %d", products, p.loss_chunk_rows, (int)p.loss);
    }
    const mtt_device CPU = MTT_DEVICE_CPU, CUDA = MTT_DEVICE_CUDA;
    const struct { mtt_policy given; int batch, rows; mtt_loss loss; } LOSSES[] = {
        {{.device = CPU}, 64, 1024, MTT_LOSS_FULL},
        {{.device = CUDA}, 1, 8192, MTT_LOSS_CHUNKED},
        {{.device = CUDA}, 33, 8448, MTT_LOSS_CHUNKED},
        {{.device = CUDA}, 64, 16384, MTT_LOSS_CHUNKED},
        {{.device = CUDA}, 1 << 20, 16384, MTT_LOSS_CHUNKED},
        {{.device = CUDA, .loss_chunk_rows = 100}, 64, 100, MTT_LOSS_CHUNKED},
        {{.device = CUDA, .loss = MTT_LOSS_CHUNKED}, 64, 2048, MTT_LOSS_CHUNKED},
        {{.device = CUDA, .loss = MTT_LOSS_FULL}, 64, 2048, MTT_LOSS_FULL},
        {{.device = CUDA, .precision = MTT_FP8, .loss = MTT_LOSS_FULL}, 64, 2048, MTT_LOSS_CHUNKED},
        {{.device = CUDA, .precision = MTT_FP8}, 64, 16384, MTT_LOSS_CHUNKED},
        {{.device = CPU, .precision = MTT_FP8}, 64, 1024, MTT_LOSS_CHUNKED},
    };
    for (size_t i = 0; i < sizeof(LOSSES) / sizeof(LOSSES[0]); i++)
        check(!mtt_policy_resolve(NULL, &LOSSES[i].given, &resolved, LOSSES[i].batch, 1024, &p) &&
                  p.loss_chunk_rows == LOSSES[i].rows && p.loss == LOSSES[i].loss,
              "loss %d: %d rows, loss %d", (int)i, p.loss_chunk_rows, (int)p.loss);
    policy.fp8_products = MTT_FP8_LAYERS; /* is ignored, as other fields that serve another choice */
    check(!mtt_policy_resolve(NULL, &policy, &resolved, 1, 8, &p) && p.loss == MTT_LOSS_FULL,
          "fp8_products matter without FP8");
    nothing.d_model = 128;
    check(!mtt_model_resolve(NULL, &nothing, &resolved) && resolved.d_ff == 512, "d_ff is %d by default",
          resolved.d_ff);
    check(mtt_plan(NULL, &good.model, &good.policy, 0, 8, &report) == MTT_E_ARGUMENT,
          "a plan without an environment");

    static const char *const OPTIM[] = {"lr",   "beta1",  "beta2",      "eps",          "weight_decay",
                                        "clip", "min_lr", "loss_scale", "warmup_steps", "total_steps"};
    for (int i = 0; i < 10; i++) {
        mtt_optim_desc o = {.seed = 1}, out;
        if (i == 0) o.lr = NAN;
        if (i == 1) o.beta1 = 1;
        if (i == 2) o.beta2 = 1.5f;
        if (i == 3) o.eps = NAN;
        if (i == 4) o.weight_decay = INFINITY;
        if (i == 5) o.clip = NAN;
        if (i == 6) o.min_lr = 1;
        if (i == 7) o.loss_scale = INFINITY;
        if (i == 8) o.warmup_steps = -1;
        if (i == 9) o.lr_schedule = MTT_LR_COSINE;
        mtt_status status = mtt_optim_resolve(&env, &o, &out);
        check(status == MTT_E_ARGUMENT && strstr(env.error, OPTIM[i]), "%s: %s, \"%s\"", OPTIM[i],
              mtt_status_string(status), env.error);
    }
    mtt_optim_desc wide = {.clip = 1e30f}, out;
    check(!mtt_optim_resolve(&env, &wide, &out), "the largest clip: %s", env.error);
    wide.group_count = 2;
    check(mtt_optim_resolve(&env, &wide, &out) == MTT_E_ARGUMENT && strstr(env.error, "groups is NULL"),
          "groups that are not there: %s", env.error);
}

/* On CUDA the workspace is what the policy says, or more if an operation needs more. Here these operations
   are flash attention's backward pass of two heads at 131,072 tokens, and the embedding's gradient. */
static void workspaces(void)
{
    static const struct { int seq_len; size_t asked, planned;
    } CASES[] = {{1024, 0, (size_t)32 << 20},
                 {1024, (size_t)64 << 20, (size_t)64 << 20},
                 {131071, 0, 256 + 2 * 131072 * (4 * 32 + 2 + 8)},
                 {131071, 1 << 20, 256 + 2 * 131072 * (4 * 32 + 2 + 8)}};
    for (size_t i = 0; i < MTT__LENGTH(CASES); i++) {
        configuration c = known('A', 1);
        mtt_schedule *s = NULL;
        c.seq_len = CASES[i].seq_len;
        c.policy = (mtt_policy){.precision = MTT_BF16,
                                .attention = MTT_ATTENTION_FLASH,
                                .device = MTT_DEVICE_CUDA,
                                .workspace_bytes = CASES[i].asked};
        check(!mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s), "%s", env.error);
        if (!s) continue;
        for (int k = 0; k < MTT__PROGRAMS; k++)
            check(s->programs[k].workspace->bytes == CASES[i].planned,
                  "%d tokens: a workspace of %zu bytes instead of %zu", c.seq_len,
                  s->programs[k].workspace->bytes, CASES[i].planned);
        mtt_schedule_destroy(s);
    }
    configuration c = known('A', 8);
    mtt_schedule *s = NULL;
    c.policy = (mtt_policy){.device = MTT_DEVICE_CUDA, .workspace_bytes = 1};
    check(!mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s), "%s", env.error);
    if (!s) return;
    const mtt__program *p = &s->programs[MTT__TRAIN];
    size_t most = 0;
    for (int i = 0; i < p->op_count; i++)
        most = mtt__op_scratch(&p->ops[i]) > most ? mtt__op_scratch(&p->ops[i]) : most;
    /* One update after another reads the counters alone: an operation between them may use the workspace. */
    for (int i = 0; i < p->op_count; i++)
        check(!MTT_IS_UPDATE(&p->ops[i]) || !mtt__op_scratch(&p->ops[i]), "an update has scratch");
    /* embed_backward's: four arrays of 2048 ids, CUB's 64 KiB and a byte for each two rows, a row of sums */
    check(most == 4 * 2048 * 4 + 65536 + 1024 + 4 * 256, "operations need %zu bytes", most);
    check(p->workspace->bytes == most && most > 2048 * 16, "a workspace of %zu bytes, operations need %zu",
          p->workspace->bytes, most);
    mtt_schedule_destroy(s);
}

/* The largest of everything must end in numbers or a refusal, not in an overflow. */
static void extremes(void)
{
    configuration c;
    mtt_plan_report report;
    memset(&c, 0, sizeof(c));
    c.model = (mtt_model_desc){.layers = 3,
                               .heads = 64,
                               .d_model = 16384,
                               .d_ff = 131072,
                               .vocab = 1 << 24,
                               .max_seq = 1 << 20,
                               .positions = MTT_POSITIONS_LEARNED};
    c.batch = c.seq_len = 1 << 20;
    for (int kind = 0; kind < 4; kind++) {
        c.policy.attention = (mtt_attention)(kind % 2);
        c.policy.loss = (mtt_loss)(1 + kind / 2);
        mtt_status status = mtt_plan(&env, &c.model, &c.policy, c.batch, c.seq_len, &report);
        check(status ? env.error[0] != 0
                     : report.arena_bytes >= report.peak_bytes && report.peak_bytes > (size_t)1 << 55,
              "the largest plan takes %zu bytes", report.peak_bytes);
#ifndef MTT_SEPARATE_ALLOCS /* no machine has 2^55 bytes in one piece, but some grant tensors one by one */
        mtt_optim_desc optim = {.seed = 1};
        mtt_trainer *trainer = NULL;
        status = mtt_trainer_create(&env, &c.model, &c.policy, &optim, mtt_cpu_backend(), c.batch, c.seq_len,
                                    &trainer);
        check((status == MTT_E_BUDGET || status == MTT_E_MEMORY) && !trainer && env.error[0],
              "a trainer of %zu bytes: %s", report.peak_bytes, mtt_status_string(status));
        mtt_trainer_destroy(trainer);
#endif
    }
}

/* ------------------------------------------------------------------------------------------ listings ---- */

static void append(void *user, const char *text, size_t bytes)
{
    mtt__text *out = user;
    for (size_t i = 0; i < bytes && out->size + 1 < out->capacity; i++) out->at[out->size++] = text[i];
    out->at[out->size] = 0;
}

static int count_of(const char *text, const char *word)
{
    int count = 0;
    for (; (text = strstr(text, word)); text += strlen(word)) count++;
    return count;
}

/* Every tensor but the state is freed once: in the line of its last operation, which has it as an operand. */
static void check_freed(const mtt_schedule *s, const char *line)
{
    int op_count, tensor_count;
    const mtt_op *ops = mtt_schedule_ops(s, &op_count);
    const mtt_tensor *const *tensors = mtt_schedule_tensors(s, &tensor_count);
    for (int i = 0; i < op_count; i++) {
        const char *end = strchr(line, '\n');
        int wanted = 0, gradients = 0, words = 0;
        char text[1024] = "", name[50];
        if (!end) return check(0, "the listing ends at operation %d", i);
        snprintf(text, sizeof(text), "%.*s ", (int)(end - line), line);
        const char *freed = strstr(text, "  frees ");
        for (int k = 0; k < tensor_count; k++) {
            const mtt_tensor *t = tensors[k];
            if (t->persistent || t->last != i) continue;
            snprintf(name, sizeof(name), " %s ", t->name);
            if (t->category == MTT_GRADIENTS && ops[i].phase == MTT_STEP) gradients++;
            else check(freed && strstr(freed, name), "operation %d does not free %s: %s", i, t->name, text);
            wanted++;
        }
        for (const char *at = freed ? freed + 7 : ""; *at; at++) words += *at == ' ' && at[1];
        snprintf(name, sizeof(name), "  frees %d gradients ", gradients);
        check(gradients ? freed && !strcmp(freed, name) : words == wanted,
              "operation %d frees %d tensors: %s", i, wanted, text);
        line = end + 1;
    }
}

/* The two lists are of one schedule: a tensor is where its index says, and lives from the first to the last
   operation that has it as an operand. */
static void lists(void)
{
    random_state = 31337;
    for (int i = 0; i < 100; i += each()) {
        configuration c = random_configuration();
        mtt_schedule *s = NULL;
        mtt_plan_report report;
        int op_count, tensor_count;
        check(!mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s), "%s: %s", c.text,
              env.error);
        if (!s) continue;
        const mtt_op *ops = mtt_schedule_ops(s, &op_count);
        const mtt_tensor *const *tensors = mtt_schedule_tensors(s, &tensor_count);
        mtt_schedule_report(s, &report);
        check(op_count == report.ops && tensor_count == report.tensors,
              "%s: %d operations and %d tensors, the report says %d and %d", c.text, op_count, tensor_count,
              report.ops, report.tensors);
        check(ops[report.peak_op].live_bytes == report.peak_bytes &&
                  !memcmp(ops[report.peak_op].bytes, report.bytes, sizeof(report.bytes)),
              "%s: operation %d is not the peak", c.text, report.peak_op);
        for (int k = 0; k < tensor_count; k++) {
            const mtt_tensor *t = tensors[k];
            int first = -1, last = -1;
            for (int n = 0; n < op_count && !t->persistent; n++)
                if (is_among((const mtt_tensor *const *)ops[n].operands, ops[n].inputs + ops[n].outputs, t) ||
                    is_among((const mtt_tensor *const *)ops[n].gradients, ops[n].parameters, t))
                    first = first < 0 ? n : first, last = n;
            check(t->index == k && !t->data, "%s: tensor %d, %s, has the index %d", c.text, k, t->name,
                  t->index);
            check(t->persistent ? t->first == 0 && t->last == op_count - 1
                                : t->first == first && t->last == last,
                  "%s: %s lives from %d to %d, it is used from %d to %d", c.text, t->name, t->first, t->last,
                  first, last);
            check(t->offset + t->bytes <= report.arena_bytes, "%s: %s is outside the arena", c.text, t->name);
        }
        mtt_schedule_destroy(s);
    }
}

static void listing(void)
{
    configuration c = known('A', 2);
    c.model.layers = 2;
    for (int attention = 0; attention < 2; attention++) {
        int again[3] = {0, 0, 0}, linear[3] = {0, 0, 0};
        for (int way = 0; way < 3; way++) {
            static char text[200000];
            mtt__text out;
            mtt_schedule *s = NULL;
            int count, softmax = 0, gelu = 0, norm = 0, flash = 0;
            c.policy.attention = (mtt_attention)attention;
            c.policy.recompute = (mtt_recompute)way;
            mtt__text_init(&out, text, sizeof(text));
            if (mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s)) continue;
            mtt_schedule_print(s, append, &out);
            const mtt_op *ops = mtt_schedule_ops(s, &count);
            for (const mtt_op *op = ops; op < ops + count; op++) {
                if (!op->recomputed) continue;
                again[way]++;
                linear[way] += op->kind == MTT_OP_linear;
                softmax += op->kind == MTT_OP_softmax;
                gelu += op->kind == MTT_OP_activation;
                norm += op->kind == MTT_OP_norm || op->kind == MTT_OP_residual_norm;
                flash += op->kind == MTT_OP_flash;
                check(op->phase == MTT_BACKWARD && op->layer >= 0 && op->layer < 2,
                      "%s is recomputed in phase %d, layer %d", mtt_op_name(op->kind), (int)op->phase,
                      op->layer);
            }
            check(count_of(text, "\n") == count, "%d lines list %d operations", count_of(text, "\n"), count);
            check_freed(s, text);
            check(count_of(text, " again ") == again[way] || count_of(text, "again") == again[way],
                  "recompute %s: %d lines say again, %d operations are", RECOMPUTES[way],
                  count_of(text, "again"), again[way]);
            check(count_of(text, "adamw") == 1 && count_of(text, "cross_entropy") >= 1 &&
                      count_of(text, attention ? "flash" : "softmax") >= 4,
                  "the listing misses operations");
            if (way)
                check(gelu == 2 && norm == 4, "recompute %s makes %d GELUs and %d norms again in two layers",
                      RECOMPUTES[way], gelu, norm);
            if (way)
                check(softmax == (attention ? 0 : 2), "recompute %s makes %d softmaxes again",
                      RECOMPUTES[way], softmax);
            check(way == 2 || (!linear[way] && !flash), "recompute %s makes products again", RECOMPUTES[way]);
            mtt_schedule_destroy(s);
        }
        check(again[0] == 0 && again[1] > 0 && again[2] > again[1] && linear[2] >= 4,
              "recomputed operations: %d, %d, %d", again[0], again[1], again[2]);
    }
}

/* Fields set by texts: what a text says, the ends of each range and what is beyond, and the field as it was
   after a refusal, which says what is expected. */
static void fields_by_text(void)
{
    static const struct { const char *field, *text; double value; int refused; } CASES[] = {
        {"layers", "12", 12, 0},           {"layers", "0", 0, 1},
        {"layers", "1.5", 0, 1},           {"layers", "12x", 0, 1},
        {"layers", "", 0, 1},              {"layers", "nan", 0, 1},
        {"layers", "1e300", 0, 1},         {"layers", "-3", 0, 1},
        {"dropout", "0.25", 0.25, 0},      {"dropout", "inf", 0, 1},
        {"mlp", "swiglu", 1, 0},           {"mlp", "swi", 0, 1},
        {"mlp", "swiglu|relu2", 0, 1},     {"mlp", "", 0, 1},
        {"tied_head", "1", 1, 0},          {"tied_head", "2", 0, 1},
        {"budget_bytes", "24G", 24.0 * 1073741824, 0}, {"budget_bytes", "1.5K", 1536, 0},
        {"budget_bytes", "24g", 24.0 * 1073741824, 0}, {"budget_bytes", "24GiB", 24.0 * 1073741824, 0},
        {"budget_bytes", "24 gib", 24.0 * 1073741824, 0}, {"budget_bytes", "24GB", 24e9, 0},
        {"budget_bytes", "1.5 MB", 1.5e6, 0}, {"budget_bytes", "3kb", 3000, 0},
        {"budget_bytes", "24Gi", 0, 1},    {"budget_bytes", "24GBs", 0, 1},
        {"budget_bytes", "24B", 0, 1},     {"budget_bytes", "24 ", 0, 1},
        {"layers", "1K", 0, 1},            {"budget_bytes", "GB", 0, 1},
        {"budget_bytes", "12T", 0, 1},     {"budget_bytes", "1e19", 0, 1},
        {"budget_bytes", "-1", 0, 1},      {"lr", "3e-4", (double)3e-4f, 0},
        {"lr", "0", 0, 1},                 {"beta1", "0", -1, 0},
        {"weight_decay", "-7", -1, 0},     {"total_steps", "9007199254740992", 9007199254740992.0, 0},
        {"window", "2147483647", 2147483647, 0}, {"window", "2147483648", 0, 1},
    };
    mtt_model_desc model;
    mtt_policy policy;
    mtt_optim_desc optim;
    const struct { const mtt_field *fields; void *desc; size_t bytes; } GROUPS[] = {
        {mtt_model_fields(), &model, sizeof(model)}, {mtt_policy_fields(), &policy, sizeof(policy)},
        {mtt_optim_fields(), &optim, sizeof(optim)}};
    size_t found = 0;
    for (int g = 0; g < 3; g++)
        for (const mtt_field *f = GROUPS[g].fields; f->name; f++) {
            char before[sizeof(mtt_policy) + sizeof(mtt_model_desc)];
            for (size_t i = 0; i < MTT__LENGTH(CASES); i++) {
                if (strcmp(CASES[i].field, f->name)) continue;
                found++;
                memset(GROUPS[g].desc, 0, GROUPS[g].bytes);
                memcpy(before, GROUPS[g].desc, GROUPS[g].bytes);
                env.error[0] = 0;
                mtt_status status = mtt_field_set(&env, f, GROUPS[g].desc, CASES[i].text);
                check(status == (CASES[i].refused ? MTT_E_ARGUMENT : MTT_OK), "%s \"%s\": status %d, %s",
                      f->name, CASES[i].text, (int)status, env.error);
                if (CASES[i].refused)
                    check(!memcmp(before, GROUPS[g].desc, GROUPS[g].bytes) &&
                              strstr(env.error, "expected ") == env.error && strstr(env.error, f->help),
                          "%s \"%s\": %s", f->name, CASES[i].text, env.error);
                else
                    check(mtt__field_get(GROUPS[g].desc, f) == CASES[i].value, "%s \"%s\" is %.17g", f->name,
                          CASES[i].text, mtt__field_get(GROUPS[g].desc, f));
            }
            check(mtt_field_set(&env, f, GROUPS[g].desc, NULL) == MTT_E_ARGUMENT, "%s without a text",
                  f->name);
            int names = f->kind == MTT_FIELD_CHOICE;
            for (const char *at = f->choices; at && (at = strchr(at, '|')) != NULL; at++) names++;
            check(f->kind != MTT_FIELD_CHOICE || names == f->high + 1, "%s has %d names and %g values",
                  f->name, names, f->high + 1);
            if (f->kind != MTT_FIELD_TEXT) continue;
            check(!mtt_field_set(&env, f, GROUPS[g].desc, "a text"), "%s: %s", f->name, env.error);
        }
    check(found == MTT__LENGTH(CASES), "%zu cases have a field", found);
    memset(&policy, 0, sizeof(policy));
    for (const mtt_field *f = mtt_policy_fields(); f->name; f++)
        if (!strcmp(f->name, "freeze")) mtt_field_set(&env, f, &policy, "wte.*");
    check(policy.freeze && !strcmp(policy.freeze, "wte.*"), "freeze is set by a text");
}

/* The list after each pass, in FP8, with adapters, ranks, early updates: the forward pass knows of none of
   them, each pass brings what it is for, and after the last one the list is the schedule's. */
static void lists_between_passes(void)
{
    static const struct { const char *word, *pass; mtt_policy policy; } CASES[] = {
        {"quantize", "eight", {.precision = MTT_FP8}},
        {".t8", "eight", {.precision = MTT_FP8, .fp8_products = MTT_FP8_LAYERS}},
        {"lora_B",
         "adapters",
         {.precision = MTT_BF16, .lora_rank = 8, .lora_alpha = 8, .lora_targets = "*"}},
        {"all_gather", "exchange", {.ranks = 2}},
        {"all_to_all",
         "exchange",
         {.ranks = 3, .rank = 1, .shard = MTT_SHARD_GRADIENTS, .accumulate = 2}},
        {"sum_gradients", "gradients", {.ranks = 2}},
        {"gather_weights", "exchange", {.ranks = 2, .shard = MTT_SHARD_OPTIMIZER}},
        {"adamw", "gradients", {.early_update = 1}},
        {"adamw", "step", {.state = MTT_STATE_COMPACT}},
        {"residual_norm", "fusions", {.precision = MTT_FP16}},
        {"norm_backward", "adjoints", {.recompute = MTT_RECOMPUTE_SEGMENTS}},
    };
    for (size_t i = 0; i < MTT__LENGTH(CASES); i++) {
        configuration c = known('A', 2);
        mtt_schedule *s = NULL;
        int count, passes = 0, brings = 0; /* passes up to the one that brings the word */
        c.policy = CASES[i].policy;
        check(!mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s), "%s", env.error);
        mtt_schedule_ops(s, &count);
        while (mtt_schedule_pass(passes))
            if (!strcmp(mtt_schedule_pass(passes++), CASES[i].pass)) brings = passes;
        check(brings && !mtt_schedule_pass(-1), "there is no pass %s", CASES[i].pass);
        for (int pass = 0; pass <= passes; pass++) {
            static char text[400000];
            mtt__text out;
            mtt__text_init(&out, text, sizeof(text));
            check(!mtt_schedule_print_passes(s, pass, append, &out), "after %d passes: %s", pass, env.error);
            check((count_of(text, CASES[i].word) > 0) == (pass >= brings), "%s after %d passes",
                  CASES[i].word, pass);
            check(pass || !out.size, "there is a list before the first pass");
            check(pass < passes || count_of(text, "\n") == count, "%d operations at the end, %d run",
                  count_of(text, "\n"), count);
        }
        check(mtt_schedule_print_passes(s, passes + 1, append, NULL) == MTT_E_ARGUMENT &&
                  mtt_schedule_print_passes(s, -1, append, NULL) == MTT_E_ARGUMENT, "passes that are none");
        mtt_schedule_destroy(s);
    }
}

/* Under FP8 flash attention makes the 8 bits that products read, and no others. Transposes of its gradients
   need sequences of whole 16 tokens: with others, gradients in 16 bits are quantized. With rotary positions
   the rotation back makes them, unless q and k have norms. */
static void attention_in_eight(void)
{
    for (int kind = 0; kind < 2 * 4 * 2 * 3; kind++) {
        configuration c = known('A', 32);
        int count, turned = kind / 16, fused = kind / 8 % 2 && !turned;
        mtt_schedule *s = NULL;
        c.model.vocab = 256; /* or the head alone would fix the peak, and layers recompute nothing */
        c.seq_len = kind / 8 % 2 ? 48 : 40;
        if (turned) c.model.positions = MTT_POSITIONS_ROTARY;
        c.model.qk_norm = turned == 2;
        c.policy.precision = MTT_FP8;
        c.policy.fp8_products = (mtt_fp8_products)(kind % 2);
        c.policy.attention = MTT_ATTENTION_FLASH;
        c.policy.recompute = (mtt_recompute)(kind / 2 % 4);
        describe(&c);
        check(!mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s), "%s", env.error);
        const mtt_op *ops = mtt_schedule_ops(s, &count);
        for (int i = 0; i < count; i++) {
            const mtt_op_flash *f = MTT_OPERANDS_OF(flash, &ops[i]);
            const mtt_op_flash_backward *g = MTT_OPERANDS_OF(flash_backward, &ops[i]);
            const mtt_op_rotary_backward *r = MTT_OPERANDS_OF(rotary_backward, &ops[i]);
            const mtt_op_quantize *q = MTT_OPERANDS_OF(quantize, &ops[i]);
            if (ops[i].kind == MTT_OP_rotary_backward)
                check(r->dx->dtype == (turned == 1 ? MTT_F8_E5M2 : MTT_BF16_BITS) &&
                          (turned == 1 ? r->dx_t->last > i && r->dx != r->dy : !r->dx_t && r->dx == r->dy),
                      "%s: rotated gradients are %s in 8 bits", c.text, turned == 1 ? "not" : "already");
            if (ops[i].kind == MTT_OP_flash)
                check(f->out_8 ? f->out_8->last > i : ops[i].recomputed, "%s: flash %d %s 8 bits", c.text, i,
                      f->out_8 ? "makes unused" : "makes no");
            if (ops[i].kind == MTT_OP_flash_backward)
                check(g->d_qkv->dtype == (fused ? MTT_F8_E5M2 : MTT_BF16_BITS) && !g->d_qkv_t == !fused &&
                          (!fused || (mtt__width(g->d_qkv_t) == c.batch * c.seq_len && g->d_qkv_t->last > i)),
                      "%s: gradients of attention are %s in 8 bits", c.text, fused ? "not" : "already");
            if (ops[i].kind == MTT_OP_quantize && q->y)
                check(q->x->role != MTT__A_ATTENDED, "%s: attention's output is quantized apart", c.text);
        }
        mtt_schedule_destroy(s);
    }
}

/* Whether a fused operation has the operands of both. `apart`: GELU is left out. */
static int merged_well(const mtt_op *op, int apart)
{
    const mtt_op_linear_gelu *f = MTT_OPERANDS_OF(linear_gelu, op);
    const mtt_op_linear_backward_gelu *g = MTT_OPERANDS_OF(linear_backward_gelu, op);
    char bias[64];
    snprintf(bias, sizeof(bias), "d_h.%d.mlp.c_fc.bias", op->layer);
    if (op->kind == MTT_OP_linear_gelu)
        return f->x->role == MTT__A_LN_2 && f->x->layer == op->layer && f->pre->role == MTT__A_FC &&
               f->pre->layer == op->layer &&
               (apart ? !f->y : f->y->role == MTT__A_GELU && f->y->layer == op->layer) &&
               strstr(f->weight->name, "mlp.c_fc.weight") && strstr(f->bias->name, "mlp.c_fc.bias");
    return op->phase == MTT_BACKWARD && !op->recomputed && strstr(g->weight->name, "mlp.c_proj.weight") &&
           g->pre->role == MTT__A_FC && g->pre->layer == op->layer && !strncmp(g->dx->name, "d_h.", 4) &&
           strstr(g->dx->name, ".mlp.gelu") && !strcmp(g->d_bias->name, bias);
}

/* Every residual that a norm of its sum follows is one operation with it; a residual alone is made where the
   norm is dropped. */
static void residual_norms(void)
{
    for (int way = 0; way < 2 * 4 * 4; way++) {
        configuration c = known('A', 8);
        mtt_schedule *s = NULL;
        int together = 0;
        c.policy.attention = (mtt_attention)(way % 2);
        c.policy.recompute = (mtt_recompute)(way / 2 % 4);
        c.policy.precision = (mtt_precision)(way / 8);
        describe(&c);
        if (mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s)) continue;
        const mtt__program *p = &s->programs[MTT__TRAIN];
        for (int i = 0; i < p->op_count; i++) {
            const mtt_op *op = &p->ops[i], *next = op + (i + 1 < p->op_count);
            const mtt_op_residual_norm *f = MTT_OPERANDS_OF(residual_norm, op);
            check(op->kind != MTT_OP_residual || next->kind != MTT_OP_norm ||
                      MTT_OPERANDS_OF(residual, op)->sum != MTT_OPERANDS_OF(norm, next)->x,
                  "%s: operation %d is apart", c.text, i);
            if (op->kind != MTT_OP_residual_norm) continue;
            together += op->phase == MTT_FORWARD;
            check(f->sum->first <= i && f->y->first == i && f->stats->first == i && f->x->last >= i &&
                      f->branch->last >= i && strstr(f->gain->name, "ln_") && strstr(f->shift->name, "ln_"),
                  "%s: operation %d has other operands than a residual and a norm", c.text, i);
        }
        check(together == 2 * c.model.layers, "%s: %d residuals with norms in the forward pass", c.text,
              together);
        mtt_schedule_destroy(s);
    }
}

/* Under FP8 the norms' backward passes make operands of the layers' products. quantize makes the others, two
   a layer, from attention's gradient and its result. With dropout it rounds two more gradients. */
static void norms_round(void)
{
    for (int way = 0; way < 2 * 2 * 4; way++) {
        configuration c = known('A', 8);
        mtt_schedule *s = NULL;
        int apart = 0;
        c.policy.precision = MTT_FP8;
        c.policy.fp8_products = (mtt_fp8_products)(way % 2);
        c.policy.recompute = (mtt_recompute)(way / 4);
        c.model.dropout = way / 2 % 2 ? 0.1f : 0;
        describe(&c);
        if (mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s)) continue;
        const mtt__program *p = &s->programs[MTT__TRAIN];
        for (int i = 0; i < p->op_count; i++) {
            const mtt_op *op = &p->ops[i], *next = op + (i + 1 < p->op_count);
            const mtt_op_norm_backward *n = MTT_OPERANDS_OF(norm_backward, op);
            const mtt_op_linear_backward_weight *w = MTT_OPERANDS_OF(linear_backward_weight, next);
            apart += op->kind == MTT_OP_quantize && op->phase == MTT_BACKWARD && !op->recomputed;
            if (op->kind != MTT_OP_norm_backward) continue;
            check(!n->dx_8 == !n->dx_t && (!n->dx_8 || (n->dx_8->last > i && n->dx_t->last > n->dx_8->first)),
                  "%s: operation %d makes a gradient that nobody reads", c.text, i);
            check(!n->y_t == (op->layer < 0) && (!n->y_t || (next->kind == MTT_OP_linear_backward_weight &&
                                                            w->x == n->y_t && w->dy->first < i)),
                  "%s: the norm of operation %d is not the input of the next one", c.text, i);
        }
        check(apart == (c.model.dropout > 0 ? 4 : 2) * c.model.layers, "%s: %d tensors are rounded apart",
              c.text, apart);
        mtt_schedule_destroy(s);
    }
}

/* In 16 bits, norms' backward passes sum the gradients of the biases below them, each before anything adds to
   dx, whatever is recomputed. With dropout, dx is not what the bias sums. */
static void norms_sum(void)
{
    for (int way = 0; way < 5 * 6 * 2 * 3; way++) {
        configuration c = known('A', 8);
        mtt_schedule *s = NULL;
        int sums = 0;
        c.policy.precision = (mtt_precision)(way % 5);
        c.policy.recompute = (mtt_recompute)(way / 5 % 6);
        c.policy.budget_bytes = c.policy.recompute == MTT_RECOMPUTE_BUDGET ? (size_t)200 << 20 : 0;
        c.model.dropout = way / 30 % 2 ? 0.1f : 0;
        c.model.norm_place = (mtt_norm_place)(way / 60);
        describe(&c);
        if (mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s)) continue;
        const mtt__program *p = &s->programs[MTT__TRAIN];
        for (int i = 0; i < p->op_count; i++) {
            const mtt_op_norm_backward *n = MTT_OPERANDS_OF(norm_backward, &p->ops[i]);
            const mtt_op_linear_backward_weight *w = NULL;
            int written = 0;
            if (p->ops[i].kind != MTT_OP_norm_backward || !n->d_bias) continue;
            for (int k = i + 1; k < p->op_count && !w && !written; k++) {
                const mtt_op *op = &p->ops[k];
                w = MTT_OPERANDS_OF(linear_backward_weight, op);
                if (op->kind != MTT_OP_linear_backward_weight || w->dy != n->dx) w = NULL;
                for (int o = op->inputs; o < op->inputs + op->outputs; o++)
                    written |= op->operands[o] == n->dx;
            }
            check(w && !w->d_bias && n->d_bias->first == i && strstr(n->d_bias->name, "c_proj.bias") &&
                      !strncmp(n->d_bias->name, w->d_weight->name, strlen(n->d_bias->name) - strlen("bias")),
                  "%s: operation %d sums the gradient of another bias", c.text, i);
            sums++;
        }
        const int all = (c.policy.precision == MTT_BF16 || c.policy.precision == MTT_FP16) &&
                        c.model.dropout == 0 && c.model.norm_place != MTT_NORM_NONE;
        check(sums == (all ? 2 * c.model.layers : 0), "%s: %d sums", c.text, sums);
        mtt_schedule_destroy(s);
    }
}

/* In 16 bits, a product and its GELU are one operation with the FLOPs of both. So are a product and GELU's
   gradient. They stay apart where GELU alone is recomputed, and in segments. All other operations stay
   the same. */
static void merged(void)
{
    configuration c = known('A', 8);
    for (int way = 0; way < 2 * 4; way++) {
        int count[4][MTT_OP_KIND_COUNT] = {{0}}, layers[4],
            alone = way / 2 == MTT_RECOMPUTE_SELECTIVE ? 4 : 0;
        int apart = way / 2 == MTT_RECOMPUTE_SEGMENTS;
        double flops[4];
        c.policy.attention = (mtt_attention)(way % 2);
        c.policy.recompute = (mtt_recompute)(way / 2);
        c.policy.loss = MTT_LOSS_CHUNKED;
        for (int precision = 0; precision < 4; precision++) {
            mtt_schedule *s = NULL;
            mtt_plan_report report;
            int *n = count[precision];
            c.policy.precision = (mtt_precision)precision;
            if (mtt_schedule_create(&env, &c.model, &c.policy, c.batch, c.seq_len, &s)) continue;
            mtt_schedule_report(s, &report);
            layers[precision] = report.recompute_layers;
            flops[precision] = report.flops;
            for (int which = 0; which < MTT__PROGRAMS; which++) {
                const mtt__program *p = &s->programs[which];
                for (int i = 0; i < p->op_count; i++) {
                    const mtt_op *op = &p->ops[i];
                    n[op->kind]++;
                    if (op->kind == MTT_OP_linear_gelu || op->kind == MTT_OP_linear_backward_gelu)
                        check(merged_well(op, apart), "operation %d, %s, has not the operands of both", i,
                              mtt_op_name(op->kind));
                }
                check(p->step_begin == p->op_count - (which == MTT__TRAIN ? 2 : 0),
                      "the step begins at operation %d of %d", p->step_begin, p->op_count);
            }
            mtt_schedule_destroy(s);
            check(layers[precision] == layers[0] && fabs(flops[precision] - flops[0]) <= 1e-9 * flops[0],
                  "%g FLOPs in precision %d, %g in FP32, recompute %s", flops[precision], precision, flops[0],
                  RECOMPUTES[way / 2]);
            check(n[MTT_OP_linear_gelu] == (precision < 2 ? 0 : count[0][MTT_OP_activation] - alone) &&
                      n[MTT_OP_linear_backward_gelu] == (precision < 2 ? 0 : 4),
                  "precision %d, recompute %s: %d linear_gelu, %d linear_backward_gelu", precision,
                  RECOMPUTES[way / 2], n[MTT_OP_linear_gelu], n[MTT_OP_linear_backward_gelu]);
            n[MTT_OP_linear] += n[MTT_OP_linear_gelu];
            if (!apart) n[MTT_OP_activation] += n[MTT_OP_linear_gelu];
            n[MTT_OP_linear_backward_input] += n[MTT_OP_linear_backward_gelu];
            n[MTT_OP_activation_backward] += n[MTT_OP_linear_backward_gelu];
            n[MTT_OP_linear_gelu] = n[MTT_OP_linear_backward_gelu] = 0;
            check(!memcmp(n, count[0], sizeof(count[0])),
                  "precision %d, recompute %s: other operations than in FP32", precision,
                  RECOMPUTES[way / 2]);
        }
    }
}

static void json(void)
{
    static const char *const KEYS[] = {"parameters",         "micro_batches",       "arena_bytes",
                                       "peak_forward_bytes", "peak_backward_bytes", "bytes",
                                       "peak_op"};
    configuration c = known('A', 32);
    mtt_plan_report report;
    char text[4096], small[16];
    int found = 0;
    mtt_json j;
    mtt_slice key;
    uint64_t value, sum = 0;
    plan(&c, &report);
    size_t length = mtt_plan_json(&report, text, sizeof(text));
    check(length == strlen(text) && length > 100, "the JSON of a plan is %zu long, it says %zu", strlen(text),
          length);
    mtt_json_init(&j, text, length);
    mtt_json_begin(&j, '{');
    while (mtt_json_key(&j, &key)) {
        for (size_t k = 0; k < MTT__LENGTH(KEYS); k++) found |= mtt_slice_is(key, KEYS[k]) << k;
        if (mtt_slice_is(key, "bytes")) {
            mtt_json_begin(&j, '{');
            while (mtt_json_key(&j, &key)) mtt_json_u64(&j, &value), sum += value;
        } else if (mtt_slice_is(key, "parameters"))
            mtt_json_u64(&j, &value), check(value == 28941393, "JSON says %d parameters", (int)value);
        else if (mtt_slice_is(key, "peak_op"))
            mtt_json_u64(&j, &value), check((int)value == report.peak_op, "JSON says another peak");
        else if (mtt_slice_is(key, "arena_bytes"))
            mtt_json_u64(&j, &value), check(value == report.arena_bytes, "JSON says another arena");
        else mtt_json_skip(&j);
    }
    check(!j.fault && mtt_json_peek(&j) == 0, "the JSON of a plan does not parse: %s",
          j.fault ? j.fault : "more follows");
    check(found == (1 << MTT__LENGTH(KEYS)) - 1, "the JSON of a plan lacks keys: %s", text);
    check(sum == report.peak_bytes, "the JSON's categories add up to %llu", (unsigned long long)sum);
    memset(small, 'x', sizeof(small));
    mtt_plan_json(&report, small, 8);
    check(strlen(small) < 8 && small[8] == 'x', "JSON runs over its room");
}

/* -------------------------------------------------------------------------------- failing allocation ---- */

static long calls, fail_at, live;

static void *failing_alloc(void *user, size_t bytes)
{
    (void)user;
    if (++calls == fail_at) return NULL;
    live++;
    return malloc(bytes);
}

static void counting_free(void *user, void *block)
{
    (void)user;
    live -= block != NULL;
    free(block);
}

static void failing_allocations(void)
{
    mtt_env failing = {.alloc = failing_alloc, .free = counting_free};
    configuration c = known('A', 4);
    mtt_plan_report report;
    mtt_policy fit;
    mtt_schedule *s;
    int batch;
    c.policy.recompute = MTT_RECOMPUTE_BUDGET;
    set_budget(&c);
    for (int kind = 0; kind < 4; kind++) {
        long total = 1;
        for (fail_at = 0; fail_at <= total; fail_at += fail_at < 100 ? 1 : 97 * each()) {
            new_case();
            mtt_status status = MTT_OK;
            calls = live = 0;
            s = NULL;
            failing.error[0] = 0;
            if (kind == 0) status = mtt_plan(&failing, &c.model, &c.policy, 4, 256, &report);
            if (kind == 1) status = mtt_schedule_create(&failing, &c.model, &c.policy, 4, 256, &s);
            if (kind == 2)
                status =
                    mtt_plan_max_batch(&failing, &c.model, &c.policy, 256, c.policy.budget_bytes, &batch);
            if (kind == 3)
                status = mtt_policy_fit(&failing, &c.model, &c.policy, 4, 256, c.policy.budget_bytes, &fit);
            mtt_schedule_destroy(s);
            check(fail_at ? status == MTT_E_MEMORY && failing.error[0] : !status,
                  "kind %d, allocation %ld: %s", kind, fail_at, mtt_status_string(status));
            check(live == 0, "kind %d, allocation %ld: %ld blocks are left", kind, fail_at, live);
            if (!fail_at) total = calls;
        }
    }
}

/* Bytes of elements, which saturate, and the types' names in files, of which each has as many bytes. */
static void types(void)
{
    for (int dtype = 0; dtype < MTT_DTYPE_COUNT; dtype++) {
        const size_t bytes = mtt__bytes_of((mtt_dtype)dtype, 1);
        const char *name = mtt_dtype_name((mtt_dtype)dtype), *digits = strpbrk(name, "1368");
        check(bytes && digits && atoi(digits) == 8 * (int)bytes, "type %d, %s, has %zu bytes", dtype, name,
              bytes);
        check(mtt__bytes_of((mtt_dtype)dtype, 1000) == 1000 * bytes && !mtt__bytes_of((mtt_dtype)dtype, 0) &&
                  mtt__bytes_of((mtt_dtype)dtype, SIZE_MAX) == SIZE_MAX, "bytes of %s", name);
    }
    check(!strcmp(mtt_dtype_name(MTT_BF16_BITS), "BF16") && !strcmp(mtt_dtype_name(MTT_F8_E5M2), "F8_E5M2") &&
              !strcmp(mtt_dtype_name(MTT_DTYPE_COUNT), "unknown"), "names of types");
}

/* What bindings of other languages ask first. */
static void versions(void)
{
    check(mtt_version() == MTT_VERSION, "version %d, not %d", mtt_version(), MTT_VERSION);
    check(mtt_sizeof("mtt_policy") == sizeof(mtt_policy) && mtt_sizeof("mtt_env") == sizeof(mtt_env) &&
              mtt_sizeof("mtt_generation") == sizeof(mtt_generation) && !mtt_sizeof("mtt_polic") &&
              !mtt_sizeof(""),
          "sizes of structs");
}

int main(int argc, char **argv)
{
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
#ifdef _OPENMP
    omp_set_num_threads(1); /* operations on tensors this small gain nothing from more */
#endif
    versions();
    types();
    known_models();
    compact_bytes();
    planned_is_allocated();
    packing();
    packing_without_gaps();
    packing_deep_models();
    segments();
    deep_recursion();
    nothing_overlaps();
    reports_add_up();
    costs();
    ranks();
    flops();
    traffic_in_place();
    mixtures();
    exact_budgets();
    least_budgets();
    least_splits();
    ranks_decide_alike();
    techniques();
    last_layer();
    splits();
    known_splits();
    largest_batch();
    fitting_policy();
    fitting_any_policy();
    validation();
    workspaces();
    extremes();
    lists();
    listing();
    fields_by_text();
    lists_between_passes();
    attention_in_eight();
    merged();
    residual_norms();
    norms_sum();
    norms_round();
    json();
    failing_allocations();
    return finish();
}
