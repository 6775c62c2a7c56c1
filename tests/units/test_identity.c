/* test_identity.c - the programs of a redesign are those of before, operation for operation.

     test_identity                 compares 10,000 random configurations with tests/identity.txt; so does
                                   `quick`, since that takes seconds
     test_identity record          prints what belongs into that file
     test_identity hashes          prints a line for each configuration: to compare two versions with diff
     test_identity show NUMBER     prints all that is hashed of one of them

   A line of identity.txt: the first of 100 configurations; the hash of their programs (operands, phases,
   costs, lifetimes, lists of parameters, refusals); that of their arenas' bytes. Another header is tested
   with -DMTT_H='"path"'. A change of the programs that is intended is recorded again, and its commit says
   why. */
#define MTT_IMPLEMENTATION
#ifndef MTT_H
#define MTT_H "../../mtt.h"
#endif
#include MTT_H
#include "../test.h"

enum { CONFIGURATIONS = 10000, SCHEDULES = 8000, GROUP = 100 };
typedef enum mode { COMPARE, RECORD, HASHES, SHOW } mode;

static uint64_t programs, arenas; /* hashes */
static int verbose, schedules;

static void put(const char *format, ...)
{
    char text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (verbose) fputs(text, stdout);
    programs = mtt__hash(programs, text, strlen(text));
}

/* 1 in one of n cases. */
static int one_in(int n)
{
    return below(n) == 0;
}

static void put_tensor(const mtt_tensor *t)
{
    if (!t) {
        put(" -");
        return;
    }
    put(" %s:%d:%d:", t->name, t->dtype, t->category);
    for (int i = 0; i < t->dims; i++) put("%lldx", (long long)t->shape[i]);
    put("%zu[%d,%d]%d p%d l%d e%d r%d", t->bytes, t->first, t->last, t->persistent, t->parameter, t->layer,
        t->entry, t->recorded);
}

/* 1 = the weight that an operation reads, or its gradient, is [out, in]; of one without, the head's. */
static int transposed(const mtt_op *op)
{
    switch (op->kind) {
    case MTT_OP_linear:
    case MTT_OP_linear_gelu:
    case MTT_OP_linear_rotary:
    case MTT_OP_linear_adapted:
    case MTT_OP_linear_backward_gelu:
    case MTT_OP_linear_backward_input: return op->operands[1]->transposed;
    case MTT_OP_linear_backward_weight: return op->operands[2] ? op->operands[2]->transposed : op->layer < 0;
    case MTT_OP_chunked_loss: return op->operands[2]->transposed;
    case MTT_OP_quantize_weights: return op->operands[op->inputs]->transposed;
    default: return 0;
    }
}

static void put_parameters(const mtt_op *op)
{
    for (int i = 0; i < op->parameters; i++) {
        const mtt_part *part = &op->parts[i];
        put("\n  |");
        put_tensor(op->gradients ? op->gradients[i] : NULL);
        put_tensor(op->sums ? op->sums[i] : NULL);
        put_tensor(op->weights ? op->weights[i] : NULL);
        put(" %d %lld+%lld at %lld", part->number, (long long)part->begin, (long long)part->count,
            (long long)part->first);
    }
}

static void put_program(const mtt__program *p)
{
    put("program: %d operations, %d tensors, step %d\n", p->op_count, p->tensor_count, p->step_begin);
    arenas = mtt__hash(arenas, (const char *)&p->arena_bytes, sizeof(p->arena_bytes));
    if (verbose) printf("arena %zu bytes\n", p->arena_bytes);
    for (int i = 0; i < p->op_count; i++) {
        const mtt_op *op = &p->ops[i];
        put("%d %s ph%d l%d s%d%s%s%s x%g t%d p%d r%d+%d", i, mtt_op_name(op->kind), op->phase, op->layer,
            op->site, op->recomputed ? " again" : "", op->adds ? " adds" : "", op->later ? " later" : "",
            (double)op->scale, transposed(op), op->parameters, op->first_range, op->range_count);
        for (int k = 0; k < op->inputs + op->outputs; k++) put_tensor(op->operands[k]);
        put_parameters(op);
        if (op->workspace) put(" w%zu", op->workspace->bytes);
        put(" %.0f %.0f %zu\n", op->flops, op->traffic_bytes, op->live_bytes);
        if (p->later_ops && i < p->step_begin) put("later %d\n", p->later_ops[i].later);
    }
}

/* A model, its fields drawn with those that change the program often. */
static mtt_model_desc draw_model(void)
{
    mtt_model_desc m;
    memset(&m, 0, sizeof(m));
    m.layers = 1 + below(one_in(8) ? 12 : 4);
    m.heads = 4;
    m.heads_kv = one_in(3) ? 2 : 4;
    m.d_head = one_in(4) ? 8 << below(3) : 0;
    m.d_model = 64;
    m.d_ff = one_in(3) ? 96 + 32 * below(4) : 0;
    m.norm = (mtt_norm_form)below(2);
    m.norm_place = (mtt_norm_place)(one_in(2) ? below(3) : 0);
    m.mlp = (mtt_mlp)(one_in(2) ? below(4) : 0);
    m.no_biases = one_in(4);
    m.vocab = 300 + 100 * below(4);
    m.max_seq = 128;
    m.positions = (mtt_positions)below(4);
    m.rotary_interleaved = one_in(3);
    m.qk_norm = one_in(4);
    m.tied_head = below(2);
    m.no_head_bias = below(2);
    m.dropout = one_in(3) ? 0.1f : 0;
    return m;
}

/* Several processes, frozen parameters or adapters. */
static void draw_training(mtt_policy *p)
{
    static const char *const FROZEN[] = {"wte.*", "h.0.*", "*.attn.*", "h.0.*, h.1.*, wte.*", "*.mlp.c_fc.*",
                                         "lm_head.*", "*.ln_*", "*.bias", "h.1.attn.c_attn.weight"};
    static const char *const TARGETS[] = {NULL, "*", "attn.c_proj, mlp.c_fc", "h.0.mlp.c_proj"};
    p->accumulate = one_in(3) ? 3 : 1;
    p->early_update = one_in(4);
    if (p->early_update) {
        p->accumulate = 1;
        if (!one_in(4)) p->precision = MTT_BF16;
    } else if (one_in(3)) {
        p->ranks = 2 + below(3);
        p->rank = below(2);
        p->shard = (mtt_shard)below(3);
        p->nccl = one_in(4);
    }
    if (one_in(4)) {
        p->lora_rank = 8;
        p->lora_targets = TARGETS[below(4)];
        if (p->precision == MTT_FP8) p->precision = MTT_BF16;
    }
    if (one_in(3)) p->freeze = FROZEN[below((int)MTT__LENGTH(FROZEN))];
    p->keep_gradients = !p->early_update && p->shard != MTT_SHARD_GRADIENTS && one_in(6);
}

static mtt_policy draw_policy(void)
{
    mtt_policy p;
    memset(&p, 0, sizeof(p));
    p.precision = (mtt_precision)(one_in(2) ? MTT_FP8 : below(5));
    p.fp8_products = (mtt_fp8_products)below(2);
    p.attention = (mtt_attention)below(2);
    p.window = one_in(4) ? 1 + below(20) : 0;
    p.recompute = (mtt_recompute)(one_in(8) ? MTT_RECOMPUTE_BUDGET : below(4));
    p.segment = below(3);
    if (p.recompute == MTT_RECOMPUTE_LAYER) p.segment = 0;
    if (p.recompute == MTT_RECOMPUTE_BUDGET) {
        p.budget_bytes = (size_t)(4 + below(8)) << 18;
        p.workspace_bytes = 1 << 16;
        p.split = one_in(3);
    }
    p.loss = (mtt_loss)(1 + below(2));
    p.loss_chunk_rows = one_in(3) ? 16 : 0;
    p.state = (mtt_state)below(2);
    p.device = (mtt_device)below(2);
    draw_training(&p);
    return p;
}

/* Hashes the programs of a configuration: of a generator; or of training, evaluation and the next token. */
static void configure(int number)
{
    mtt_env env;
    mtt_model_desc model;
    mtt_schedule *s = NULL;
    mtt_status status;
    int batch, seq_len, k;
    memset(&env, 0, sizeof(env));
    random_state = (uint64_t)number * 7919 + 17;
    model = draw_model();
    batch = 1 + below(3);
    seq_len = 16 * (1 + below(3)) + (one_in(4) ? 3 : 0);
    if (one_in(12)) {
        mtt_generator_desc g;
        mtt_schedule generates;
        memset(&g, 0, sizeof(g));
        g.precision = one_in(2) ? MTT_BF16 : MTT_FP32;
        g.batch = batch;
        g.context = seq_len;
        g.window = one_in(3) ? 8 : 0;
        status = mtt__generation_init(&generates, &env, &model, &g, (mtt_device)below(2));
        if (!status)
            for (k = 0; k < 2; k++) put_program(&generates.programs[k]);
        mtt__release_programs(&generates);
    } else {
        mtt_policy policy = draw_policy();
        status = mtt_schedule_create(&env, &model, &policy, batch, seq_len, &s);
        for (k = 0; s && k < MTT__PROGRAMS; k++) put_program(&s->programs[k]);
        if (s) put("layers %d %d, split %d\n", s->recompute_layers, s->recompute_selective, s->split);
        mtt_schedule_destroy(s);
    }
    schedules += !status;
    if (status) put("refused: %s\n", mtt_status_string(status));
    if (status && verbose) puts(env.error);
}

int main(int argc, char **argv)
{
    const char first = argc < 2 ? 'q' : argv[1][0];
    const mode how = first == 'q' ? COMPARE : first == 'r' ? RECORD : first == 'h' ? HASHES : SHOW;
    const int only = how == SHOW && argc > 2 ? atoi(argv[2]) : -1;
    FILE *file = how == COMPARE ? fopen("tests/identity.txt", "r") : NULL;
    uint64_t of_group[2] = {0, 0};
    check(how != COMPARE || file, "tests/identity.txt cannot be opened");
    for (int i = only < 0 ? 0 : only; i < (only < 0 ? CONFIGURATIONS : only + 1); i++) {
        programs = arenas = 0;
        verbose = how == SHOW;
        configure(i);
        if (how == HASHES)
            printf("%d %016llx %016llx\n", i, (unsigned long long)programs, (unsigned long long)arenas);
        of_group[0] = mtt__hash(of_group[0], (const char *)&programs, sizeof(programs));
        of_group[1] = mtt__hash(of_group[1], (const char *)&arenas, sizeof(arenas));
        if (i % GROUP < GROUP - 1) continue;
        if (how == RECORD)
            printf("%d %016llx %016llx\n", i + 1 - GROUP, (unsigned long long)of_group[0],
                   (unsigned long long)of_group[1]);
        if (file) {
            int begin;
            unsigned long long hash, bytes;
            new_case();
            check(fscanf(file, "%d %llx %llx", &begin, &hash, &bytes) == 3 && begin == i + 1 - GROUP,
                  "tests/identity.txt has no line for %d", i + 1 - GROUP);
            check(hash == of_group[0], "configurations %d to %d: other programs; see `test_identity hashes`",
                  begin, i);
            check(bytes == of_group[1], "configurations %d to %d: other arenas", begin, i);
        }
        of_group[0] = of_group[1] = 0;
    }
    if (file) fclose(file);
    check(how == SHOW || schedules >= SCHEDULES, "%d configurations have a schedule, too few", schedules);
    return how == COMPARE ? finish() : 0;
}
