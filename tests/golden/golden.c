/* golden.c - prints checksums that a change of structure must not change. Compare its output with golden.txt.

      golden runs [cpu|cuda]   5 training steps of each configuration: losses, gradient norms, weights,
                               evaluation, logits
      golden plans             arena bytes of 200 plans, on a CPU and on a CUDA device
      golden files FOLDER      old files must load: tokenizers, token files, and a checkpoint from which
                               training goes on to the bit
      golden make FOLDER       writes those files again

   It uses only the public interface. Its CPU sums are the same for any number of threads. They depend on the
   compiler's choice of fused multiply-adds and on the processor's BF16, so golden.txt holds for a build with
   -std=c99 -O2 -DMTT_PORTABLE and without -march. */
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include "../../tools/wordpiece.h"
#include "../test.h"

static mtt_env env;

static uint64_t checksum(uint64_t hash, const void *data, size_t bytes) /* FNV-1a */
{
    const unsigned char *at = (const unsigned char *)data;
    for (; bytes; bytes--) hash = (hash ^ *at++) * 0x100000001b3u;
    return hash;
}

enum { HASH_START = 1469598103 };

static void *take(size_t bytes)
{
    void *block = malloc(bytes);
    if (!block) {
        fprintf(stderr, "golden: out of memory\n");
        exit(1);
    }
    return block;
}

static void fail(const char *what)
{
    fprintf(stderr, "golden: %s: %s\n", what, env.error);
    exit(1);
}

/* ---- training runs ---- */

/* Every precision, attention, window, recomputation, loss, state, dropout, accumulation, positions and head,
   with odd shapes. */
static setup run_setup(int number)
{
    static const int widths[][2] = {{32, 2}, {24, 3}, {40, 1}, {64, 2}, {48, 2}, {128, 1}, {88, 1}, {16, 2}};
    static const int lengths[] = {17, 33, 64, 1, 40, 97, 8, 130}, vocabs[] = {130, 61, 256, 300, 7};
    setup s;
    random_state = (uint64_t)number * 977 + 5;
    memset(&s, 0, sizeof(s));
    s.model.d_model = widths[number % 8][0];
    s.model.heads = widths[number % 8][1];
    s.model.layers = 1 + number / 4 % 5;
    s.model.d_ff = number % 3 ? 0 : 8 * (3 + below(20));
    s.model.vocab = vocabs[number % 5];
    s.seq_len = lengths[(number + number / 8) % 8];
    s.batch = s.seq_len > 90 ? 2 : 3;
    s.model.max_seq = s.seq_len + 3;
    s.model.positions = number / 2 % 2 ? MTT_POSITIONS_LEARNED : MTT_POSITIONS_SINUSOIDAL;
    s.model.tied_head = number / 3 % 2;
    s.model.no_head_bias = number % 7 == 2;
    s.model.dropout = number / 5 % 3 == 1 ? 0.1f : 0;
    s.policy.precision = (mtt_precision)(number % 4);
    s.policy.attention = number / 4 % 2 ? MTT_ATTENTION_FLASH : MTT_ATTENTION_PLAIN;
    s.policy.window = number % 5 == 3 ? 1 + below(s.seq_len) : 0;
    s.policy.recompute = (mtt_recompute)((number / 6 + number) % 4);
    s.policy.segment = number % 11 == 5 ? 2 : 0;
    s.policy.loss = number / 7 % 2 ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL;
    s.policy.loss_chunk_rows = 1 + below(s.batch * s.seq_len + 5);
    s.policy.state = number / 9 % 3 == 1 ? MTT_STATE_COMPACT : MTT_STATE_FULL;
    s.policy.accumulate = number % 6 == 4 ? 2 : 1;
    s.optim.lr = 3e-3f;
    s.optim.weight_decay = 0.1f;
    s.optim.clip = number % 2 ? 1.0f : 0.05f;
    s.optim.seed = (uint64_t)number;
    s.optim.loss_scale = number % 8 == 3 ? 1e9f : 1024.0f; /* the first overflows under FP16 */
    s.optim.lr_schedule = (mtt_lr_schedule)(number % 3);
    s.optim.warmup_steps = number % 2 * 2;
    s.optim.total_steps = 9;
    return s;
}

/* Shapes of write-up size, for a device: products, attention tiles and losses take other kernels there. */
static setup large_setup(int number)
{
    static const int widths[][2] = {{768, 12}, {256, 8}, {1024, 8}, {512, 8}, {384, 4}, {1032, 43}};
    setup s = run_setup(number);
    s.model.d_model = widths[number % 6][0];
    s.model.heads = widths[number % 6][1];
    s.model.layers = 2;
    s.model.d_ff = 0;
    s.model.vocab = number % 2 ? 5003 : 50257;
    s.seq_len = s.model.max_seq = number % 3 ? 512 : 1024;
    s.batch = 4;
    s.policy.loss_chunk_rows = 0;
    s.policy.window = number % 4 == 3 ? 100 : 0;
    s.policy.segment = 0;
    return s;
}

static uint64_t weights_checksum(mtt_trainer *t)
{
    uint64_t hash = HASH_START;
    int64_t shape[2];
    int i;
    for (i = 0; mtt_parameter(t, i, shape); i++) {
        size_t count = (size_t)(shape[0] * (shape[1] ? shape[1] : 1));
        float *values = (float *)take(count * sizeof(float));
        if (mtt_parameter_get(t, i, values)) fail("parameter");
        hash = checksum(hash, values, count * sizeof(float));
        free(values);
    }
    return hash;
}

static void fill_tokens(const setup *s, int32_t *tokens, int32_t *targets, int count)
{
    int i;
    for (i = 0; i < count; i++) {
        tokens[i] = below(3) ? below(s->model.vocab) : below(s->model.vocab < 4 ? s->model.vocab : 4);
        targets[i] = below(9) ? below(s->model.vocab) : -1;
    }
}

static void run(const char *name, int number, setup s, const mtt_backend *backend)
{
    int count = s.batch * s.seq_len * s.policy.accumulate, step;
    int32_t *tokens = (int32_t *)take(2 * (size_t)count * sizeof(int32_t)), *targets = tokens + count;
    float *logits = (float *)take((size_t)s.model.vocab * sizeof(float));
    uint64_t losses = HASH_START, norms = HASH_START, evaluation = HASH_START;
    mtt_trainer *t;
    mtt_step_info info;
    if (mtt_trainer_create(&env, &s.model, &s.policy, &s.optim, backend, s.batch, s.seq_len, &t))
        fail("trainer");
    random_state = (uint64_t)number + 1;
    for (step = 0; step < 5; step++) {
        fill_tokens(&s, tokens, targets, count);
        if (mtt_train_step(t, tokens, targets, &info)) fail("step");
        losses = checksum(losses, &info.loss, sizeof(info.loss));
        norms = checksum(norms, &info.grad_norm, sizeof(info.grad_norm));
        norms = checksum(norms, &info.skipped, sizeof(info.skipped));
    }
    if (mtt_evaluate(t, tokens, targets, &info)) fail("evaluate");
    evaluation = checksum(evaluation, &info.loss, sizeof(info.loss));
    evaluation = checksum(evaluation, &info.hits, sizeof(info.hits));
    if (mtt_next_logits(t, tokens, 1 + s.seq_len / 2, logits)) fail("logits");
    evaluation = checksum(evaluation, logits, (size_t)s.model.vocab * sizeof(float));
    printf("%s %02d losses %016llx norms %016llx weights %016llx evaluation %016llx\n", name, number,
           (unsigned long long)losses, (unsigned long long)norms, (unsigned long long)weights_checksum(t),
           (unsigned long long)evaluation);
    fflush(stdout);
    mtt_trainer_destroy(t);
    free(tokens);
    free(logits);
}

static int runs(int cuda)
{
    mtt_backend backend = *mtt_cpu_backend();
    int number;
    if (cuda && mtt_cuda_backend(&env, 0, &backend)) fail("device");
    for (number = 0; number < 84; number++) run("run", number, run_setup(number), &backend);
    for (number = 0; cuda && number < 24; number++) run("large", number, large_setup(number), &backend);
    return 0;
}

/* ---- plans ---- */

static setup plan_setup(int number)
{
    static const struct {
        int layers, heads, d_model, vocab, batch, seq_len, tied, learned;
    } models[] = {{4, 8, 256, 50257, 128, 256, 0, 0},   {6, 8, 512, 10000, 64, 512, 0, 0},
                  {4, 8, 256, 50257, 64, 256, 0, 1},    {12, 12, 768, 30000, 32, 1024, 0, 0},
                  {12, 12, 768, 50304, 16, 1024, 1, 1}, {24, 16, 1024, 50304, 16, 1024, 1, 1},
                  {12, 12, 768, 50304, 1, 32768, 1, 1}, {2, 4, 128, 1000, 8, 128, 0, 0},
                  {3, 2, 48, 61, 3, 33, 1, 1},          {36, 20, 1280, 50257, 4, 1024, 1, 1},
                  {8, 1, 64, 300, 2, 2048, 0, 0},       {1, 1, 8, 5, 1, 1, 0, 0}};
    setup s = run_setup(number);
    int m = number % 12;
    s.model.layers = models[m].layers;
    s.model.heads = models[m].heads;
    s.model.d_model = models[m].d_model;
    s.model.d_ff = 0;
    s.model.vocab = models[m].vocab;
    s.model.tied_head = models[m].tied;
    s.model.positions = models[m].learned ? MTT_POSITIONS_LEARNED : MTT_POSITIONS_SINUSOIDAL;
    s.seq_len = s.model.max_seq = models[m].seq_len;
    s.batch = models[m].batch;
    s.policy.precision = (mtt_precision)(number / 12 % 4);
    s.policy.attention = number / 5 % 4 ? MTT_ATTENTION_FLASH : MTT_ATTENTION_PLAIN;
    s.policy.window = number % 7 == 1 ? 64 : 0;
    s.policy.recompute = (mtt_recompute)(number / 3 % 4);
    s.policy.loss = number / 12 % 3 ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL;
    s.policy.loss_chunk_rows = 0;
    s.policy.segment = 0;
    s.policy.state = number / 7 % 3 == 2 ? MTT_STATE_COMPACT : MTT_STATE_FULL;
    s.policy.accumulate = number % 10 == 7 ? 2 : 1;
    s.policy.device = number % 2 ? MTT_DEVICE_CUDA : MTT_DEVICE_CPU;
    return s;
}

static void plan(int number, setup s, const char *how)
{
    mtt_plan_report report;
    if (mtt_plan(&env, &s.model, &s.policy, s.batch, s.seq_len, &report)) fail("plan");
    printf("plan %03d%s %zu ops %d flops %.0f recomputed %.0f\n", number, how, report.arena_bytes, report.ops,
           report.flops, report.recompute_flops);
}

/* The last 20 fit half of what they would take, by recomputation and, every other one, by micro-batches. */
static int plans(void)
{
    int number;
    for (number = 0; number < 180; number++) plan(number, plan_setup(number), "");
    for (; number < 200; number++) {
        setup s = plan_setup(number);
        mtt_plan_report whole, least;
        s.policy.attention = MTT_ATTENTION_FLASH;
        s.policy.recompute = MTT_RECOMPUTE_NONE;
        if (mtt_plan(&env, &s.model, &s.policy, s.batch, s.seq_len, &whole)) fail("plan");
        s.policy.recompute = MTT_RECOMPUTE_LAYER;
        if (mtt_plan(&env, &s.model, &s.policy, s.batch, s.seq_len, &least)) fail("plan");
        s.policy.recompute = MTT_RECOMPUTE_BUDGET;
        s.policy.budget_bytes = least.arena_bytes + (whole.arena_bytes - least.arena_bytes) / 3;
        s.policy.split = number % 4 == 3;
        plan(number, s, s.policy.split ? " split" : " budget");
    }
    return 0;
}

/* ---- files ---- */

static const char *const sample =
    "The quick brown fox jumps over the lazy dog. It's 1,234 o'clock; "
    "\xc5\xbc\xc3\xb3\xc5\x82w & \xe4\xb8\xad\xe6\x96\x87!\n";

static setup checkpoint_setup(int compact)
{
    setup s = run_setup(5);
    s.model.vocab = 300;
    s.model.layers = 1;
    s.model.heads = 2;
    s.model.d_model = 16;
    s.model.tied_head = 1;
    s.seq_len = 16;
    s.model.max_seq = 16;
    s.batch = 2;
    s.policy = (mtt_policy){.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH};
    s.policy.state = compact ? MTT_STATE_COMPACT : MTT_STATE_FULL;
    s.optim.lr = 1e-2f;
    return s;
}

/* Two steps with the loader's batches. */
static void go_on(const char *what, mtt_trainer *t, mtt_batches *batches)
{
    int32_t tokens[64], targets[64];
    uint64_t losses = HASH_START;
    mtt_step_info info;
    int step;
    for (step = 0; step < 2; step++) {
        if (mtt_batches_next(batches, tokens, targets) || mtt_train_step(t, tokens, targets, &info))
            fail(what);
        losses = checksum(losses, &info.loss, sizeof(info.loss));
    }
    printf("file %s step %lld losses %016llx weights %016llx\n", what, (long long)info.step,
           (unsigned long long)losses, (unsigned long long)weights_checksum(t));
}

static void checkpoint(int compact, int make)
{
    setup s = checkpoint_setup(compact);
    const char *file = in(compact ? "compact.safetensors" : "full.safetensors");
    mtt_tokens *tokens;
    mtt_batches batches;
    mtt_trainer *t;
    if (mtt_tokens_open(&env, in("bpe.train.tokens"), &tokens)) fail("tokens");
    if (mtt_batches_init(&env, &batches, tokens, s.batch, s.seq_len, 3, 0)) fail("batches");
    if (mtt_trainer_create(&env, &s.model, &s.policy, &s.optim, mtt_cpu_backend(), s.batch, s.seq_len, &t))
        fail("trainer");
    if (make) {
        go_on("before the checkpoint", t, &batches);
        if (mtt_save(t, file, &batches)) fail("save");
    } else {
        if (mtt_resume(t, file, &batches)) fail("resume");
        go_on(compact ? "compact checkpoint" : "checkpoint", t, &batches);
    }
    mtt_trainer_destroy(t);
    mtt_tokens_close(tokens);
}

static void tokenizer(const char *name)
{
    int32_t ids[512];
    size_t count, i, bytes = 0, size;
    uint64_t pieces = HASH_START;
    mtt_tokenizer *t;
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    if (mtt_tokenizer_load(&env, in(name), &kind, &t)) fail(name);
    if (mtt_encode(t, sample, strlen(sample), ids, 512, &count)) fail(name);
    for (i = 0; i < (size_t)mtt_tokenizer_vocab(t); i++) {
        const char *piece = mtt_tokenizer_bytes(t, (int)i, &size);
        pieces = checksum(pieces, piece, size);
        bytes += size;
    }
    printf("file %s ids %d end %d sample %zu %016llx pieces %zu %016llx\n", name, mtt_tokenizer_vocab(t),
           mtt_tokenizer_end_of_text(t), count,
           (unsigned long long)checksum(HASH_START, ids, count * sizeof(ids[0])), bytes,
           (unsigned long long)pieces);
    mtt_tokenizer_destroy(t);
}

static void token_file(const char *name)
{
    mtt_tokens *tokens;
    int32_t ids[20000];
    uint64_t count;
    if (mtt_tokens_open(&env, in(name), &tokens)) fail(name);
    count = mtt_tokens_count(tokens);
    if (count > 20000 || mtt_tokens_read(tokens, 0, (size_t)count, ids)) fail(name);
    printf("file %s tokens %llu vocabulary %d %016llx\n", name, (unsigned long long)count,
           mtt_tokens_vocab(tokens),
           (unsigned long long)checksum(HASH_START, ids, (size_t)count * sizeof(ids[0])));
    mtt_tokens_close(tokens);
}

/* Text of 60 short documents, from a dozen words. */
static void write_text(const char *name)
{
    static const char *const words[] = {"ala",    "kot",   "\xc5\xbc\xc3\xb3\xc5\x82w",
                                        "memory", "byte",  "Training",
                                        "the",    "model", "42",
                                        "learns", "a",     "plan,"};
    FILE *f = fopen(name, "wb");
    int document, i;
    random_state = 11;
    if (!f) fail(name);
    for (document = 0; document < 60; document++) {
        for (i = 0; i < 40; i++)
            fprintf(f, "%s%s", i ? " " : "{\"text\": \"", words[below(12) * below(2) + below(1)]);
        fprintf(f, "\"}\n");
    }
    fclose(f);
}

static int files(int make)
{
    mtt_prepare_desc desc;
    mtt_wordpiece_options options = {.lowercase = 1, .strip_accents = 1};
    mtt_tokenizer_kind kind = mtt_wordpiece(&options);
    memset(&desc, 0, sizeof(desc));
    if (make) {
        write_text(in("text.jsonl"));
        desc.input = in("text.jsonl");
        desc.vocab = 300;
        desc.output = in("bpe");
        if (mtt_prepare(&env, &desc, NULL)) fail("prepare");
        desc.kind = &kind;
        desc.vocab = 60;
        desc.output = in("wordpiece");
        if (mtt_prepare(&env, &desc, NULL)) fail("prepare");
        checkpoint(0, 1);
        checkpoint(1, 1);
    }
    tokenizer("bpe.tokenizer.json");
    tokenizer("wordpiece.tokenizer.json");
    token_file("bpe.train.tokens");
    token_file("bpe.valid.tokens");
    token_file("wordpiece.train.tokens");
    checkpoint(0, 0);
    checkpoint(1, 0);
    return 0;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "", *more = argc > 2 ? argv[2] : "";
    snprintf(folder, sizeof(folder), "%s", more);
    if (!strcmp(what, "runs")) return runs(!strcmp(more, "cuda"));
    if (!strcmp(what, "plans")) return plans();
    if (argc > 2 && !strcmp(what, "files")) return files(0);
    if (argc > 2 && !strcmp(what, "make")) return files(1);
    fprintf(stderr, "golden runs [cpu|cuda] | plans | files FOLDER | make FOLDER\n");
    return 2;
}
