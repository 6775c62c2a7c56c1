/* fuzz.c - targets of libFuzzer for every reader of foreign bytes.

   tests/fuzz.sh builds it for the library, and with -DFUZZ_TRAIN or -DFUZZ_REPORT for a program. The
   environment variable FUZZ_TARGET names a target. Files are made in the current folder. A finding is a
   crash, a report of a sanitizer, a leak, too much time or memory, or a MUST that does not hold. */
#define _POSIX_C_SOURCE 200809L
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#define MTT_DOCUMENT_BYTES 64 /* small inputs have several documents */
#define MTT_IMPLEMENTATION
#include "../../mtt.h"

#define MUST(holds) ((holds) ? (void)0 : broken(#holds, __LINE__))
static void broken(const char *text, int line)
{
    fprintf(stderr, "fuzz.c:%d: does not hold: %s\n", line, text);
    abort();
}

/* A failure must say why. */
static MTT__UNUSED int succeeds(mtt_status status, const mtt_env *e)
{
    MUST(!status || status == MTT_END || e->error[0]);
    return !status;
}

/* Syncing would take most of the time. */
int fsync(int fd)
{
    (void)fd;
    return 0;
}

static void put(const char *path, const void *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    MUST(file && fwrite(data, 1, bytes, file) == bytes && !fclose(file));
}

/* Cuts the next part off an input, up to a byte `mark`. NULL: nothing is left. */
static MTT__UNUSED char *next_part(const char **at, const char *end, char mark, size_t *bytes)
{
    const char *stop;
    char *part;
    if (*at >= end) return NULL;
    stop = (const char *)memchr(*at, mark, (size_t)(end - *at));
    *bytes = (size_t)((stop ? stop : end) - *at);
    part = (char *)calloc(1, *bytes + 1);
    MUST(part != NULL);
    memcpy(part, *at, *bytes);
    *at += *bytes + 1;
    return part;
}

#if defined(FUZZ_TRAIN)

#define main train_main
#include "../../tools/trainer.c"
#undef main

/* An argument on each line. Names of files get harmless letters. A plan of many layers takes seconds. */
static void fuzz_options(const char *data, size_t size)
{
    static __typeof__(set) fresh;
    static int used;
    char *argv[64] = {(char *)"train"};
    const char *at = data;
    mtt_plan_report plan;
    run r = {.env = &env};
    size_t bytes;
    int argc = 1, k, code;
    if (!used++) fresh = set;
    set = fresh;
    files.init = NULL; /* as in a new process */
    memset(&option_all, 0, sizeof(option_all));
    while (argc < 63 && (argv[argc] = next_part(&at, data + size, '\n', &bytes))) argc++;
    code = read_options(argc, argv);
    if (!code && succeeds(run_set_name(&r, set.data ? set.data : "", set.dataset, option_technique()), &env))
        MUST(result_is_name(r.name, strlen(r.name)));
    if (!code && set.model.layers <= 24 &&
        succeeds(mtt_plan(&env, &set.model, &set.policy, set.batch, set.seq_len, &plan), &env))
        speak_plan(&plan, set.dry_run, set.json, 0);
    for (k = 1; k < argc; k++) free(argv[k]);
}

/* The log that --resume continues. */
static void fuzz_log(const char *data, size_t size)
{
    run r = {.env = &env, .folder = ".", .name = "r"};
    put("r" RESULT_LOG, data, size);
    MUST(succeeds(run_open_log(&r, 3), &env));
    fclose(r.log);
}

#elif defined(FUZZ_REPORT)

#include <sanitizer/lsan_interface.h>

static jmp_buf left;
static void leave(int code)
{
    longjmp(left, code + 1);
}

/* It runs many times in one process: it must not exit, and what it freed must be NULL afterwards. What it
   holds where it would exit is no leak. tests/sanitize.sh looks for leaks of a run to the end. */
#define main report_main
#define exit leave
#define free(block) (free(block), (block) = NULL)
#include "../../examples/assignment/report.c"
#undef main
#undef exit
#undef free

/* The files of a folder, a NUL between two. The first byte says whether --experiments is given. */
static void fuzz_report(const char *data, size_t size)
{
    static const char *const names[] = {"a_metrics.json", "a_memory.json", "a.jsonl", "b_metrics.json",
                                        "experiment_summary.json"};
    char *argv[] = {(char *)"report", (char *)"--results-dir", (char *)".", (char *)"--experiments",
                    (char *)"fp32,bf16_bs2"};
    const char *at = data + 1;
    size_t bytes;
    int k;
    if (!size) return;
    for (k = 0; k < LENGTH(names); k++) {
        char *part = next_part(&at, data + size, 0, &bytes);
        remove(names[k]);
        if (part && bytes) put(names[k], part, bytes);
        free(part);
    }
    memset(&option_all, 0, sizeof(option_all));
    memset(&head, 0, sizeof(head));
    experiments = dataset = NULL;
    run_count = time_count = 0;
    __lsan_disable();
    if (!setjmp(left)) report_main(*data % 2 ? 5 : 3, argv);
    __lsan_enable();
    free(runs);
    free(times);
    runs = NULL;
    times = NULL;
}

#else

#include "../../tools/wordpiece.h"
#define END_OF_TEXT ((mtt_slice){"<|endoftext|>", 13})

static mtt_env env;

/* ---- JSON ---- */

static int deepest;

static void walk(mtt_json *j, int depth)
{
    int mark = mtt_json_peek(j);
    mtt_slice key, text;
    double number;
    uint64_t whole;
    if (depth > deepest) deepest = depth;
    if (depth == 64) mtt_json_skip(j);
    else if (mark == '{')
        for (mtt_json_begin(j, '{'); mtt_json_key(j, &key);) walk(j, depth + 1);
    else if (mark == '[')
        for (mtt_json_begin(j, '['); mtt_json_item(j);) walk(j, depth + 1);
    else if (mark == '"' && mtt_json_string(j, &text)) {
        char *plain = (char *)malloc(text.size + 1);
        MUST(plain && mtt_json_unescape(text, plain) <= text.size);
        free(plain);
    } else if (mark == '7') mtt_json_u64(j, &whole);
    else if (mark == '-' || (mark >= '0' && mark <= '9')) mtt_json_number(j, &number);
    else mtt_json_skip(j);
}

/* What can be read value by value can be skipped at once, to a depth of 16. */
static void fuzz_json(const char *data, size_t size)
{
    char *copy = (char *)malloc(size ? size : 1); /* a read past its end is a finding */
    mtt_json j;
    int whole;
    MUST(copy != NULL);
    memcpy(copy, data, size);
    mtt_json_init(&j, copy, size);
    deepest = 0;
    walk(&j, 0);
    whole = mtt_json_end(&j);
    mtt_json_init(&j, copy, size);
    mtt_json_skip(&j);
    MUST(!whole || deepest > 15 || mtt_json_end(&j));
    free(copy);
}

/* ---- tokenizers ---- */

enum { IDS = 4096 };

/* Encodes a text; BPE must give its bytes back, in form NFC if so asked. Returns the number of ids. */
static size_t encode(mtt_tokenizer *t, const char *text, size_t bytes, int32_t *ids)
{
    static char back[IDS * 64];
    static int32_t again[IDS];
    size_t count = 0, size = 0;
    int32_t i;
    bytes = bytes < IDS ? bytes : IDS;
    if (!succeeds(mtt_encode(t, text, bytes, ids, IDS, &count), &env)) return 0;
    for (i = 0; i < (int32_t)count; i++) MUST(ids[i] >= 0 && ids[i] < mtt_tokenizer_vocab(t));
    if (!succeeds(mtt_decode(t, ids, count, back, sizeof(back), &size), &env)) return count;
    if (t->nfc) {
        MUST(succeeds(mtt_encode(t, back, size, again, IDS, &size), &env));
        MUST(size == count && !memcmp(ids, again, count * sizeof(*ids)));
    } else MUST(strcmp(t->kind.name, "BPE") || (size == bytes && !memcmp(back, text, bytes)));
    return count;
}

/* With special tokens there are no more ids than bytes, or 3 times as many, but for the first. */
static void encode_prompt(mtt_tokenizer *t, const char *text, size_t bytes)
{
    static int32_t ids[3 * IDS + 1];
    size_t count = 0, i;
    bytes = bytes < IDS ? bytes : IDS;
    MUST(succeeds(mtt_encode_prompt(t, text, bytes, ids, (t->nfc ? 3 * bytes : bytes) + 1, &count), &env));
    for (i = 0; i < count; i++) MUST(ids[i] >= 0 && ids[i] < mtt_tokenizer_vocab(t));
}

/* A tokenizer.json, a vocab.bpe, a vocab.txt or a .tiktoken file. What is saved must load and give the same
   ids. */
static void fuzz_kind(const char *data, size_t size, mtt_tokenizer_kind kind)
{
    static int32_t ids[IDS], again[IDS];
    mtt_tokenizer *t, *saved;
    size_t count;
    put("vocabulary", data, size);
    if (!succeeds(mtt_tokenizer_load(&env, "vocabulary", &kind, &t), &env)) return;
    count = encode(t, data, size, ids);
    if (!strcmp(t->kind.name, "BPE")) encode_prompt(t, data, size);
    MUST(succeeds(mtt_tokenizer_save(t, "saved"), &env));
    MUST(succeeds(mtt_tokenizer_load(&env, "saved", &kind, &saved), &env));
    MUST(encode(saved, data, size, again) == count && !memcmp(ids, again, count * sizeof(*ids)));
    mtt_tokenizer_destroy(saved);
    mtt_tokenizer_destroy(t);
}

static void fuzz_tokenizer(const char *data, size_t size)
{
    fuzz_kind(data, size, mtt_wordpiece(NULL));
}

/* The 256 bytes do not have to be in the input, which is the lines after them. */
static void fuzz_tiktoken(const char *data, size_t size)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char *file = (char *)malloc(size + 256 * 9);
    size_t at = 0;
    mtt_bpe_options options = {(mtt_pattern)(size % MTT_PATTERN_COUNT)};
    int id;
    MUST(file != NULL);
    for (id = 0; id < 256; id++)
        at += (size_t)sprintf(file + at, "%c%c== %d\n", digits[id >> 2], digits[(id & 3) << 4], id);
    memcpy(file + at, data, size);
    fuzz_kind(file, at + size, mtt_bpe(&options));
    free(file);
}

/* Decomposes a text by hand, with an insertion sort of its marks. Returns the number of code points; a byte
   that is not UTF-8 is a code point above all others. */
static size_t decompose(const mtt__normal *n, mtt_slice text, uint32_t *out)
{
    const unsigned char *at = (const unsigned char *)text.at, *end = at + text.size;
    size_t count = 0, i, k;
    int size;
    for (; at < end; at += size) {
        uint32_t c = mtt__utf8_get(at, end, &size), parts[4] = {0x110000u + *at}, swap;
        size_t many = c == MTT__NONE ? 1 : mtt__normal_parts(n, c, parts);
        for (i = 0; i < many; i++) {
            const unsigned class_ = mtt__normal_kind(n, parts[i]) % MTT__JOINS;
            out[count] = parts[i];
            for (k = count++; class_ && k && mtt__normal_kind(n, out[k - 1]) % MTT__JOINS > class_; k--)
                swap = out[k], out[k] = out[k - 1], out[k - 1] = swap;
        }
    }
    return count;
}

/* Form NFC decomposes to what the text does, does not change again, and has at most 3 times the bytes. */
static void fuzz_nfc(const char *data, size_t size)
{
    static mtt__normal *n;
    static uint32_t before[1 << 16], after[1 << 16];
    mtt_slice text = {data, size}, once = text, twice;
    char *out = NULL, *again;
    size_t count;
    if (!n) MUST(!mtt__normal_make(&env, &n));
    MUST(size <= 1 << 14 && !mtt__normalize(&env, n, &once, &out));
    twice = once;
    MUST(!mtt__normalize(&env, n, &twice, &again));
    MUST(once.size <= 3 * size && once.size == twice.size && !memcmp(once.at, twice.at, once.size));
    count = decompose(n, text, before);
    MUST(count == decompose(n, once, after) && !memcmp(before, after, count * sizeof(*before)));
    mtt__free(&env, out);
    mtt__free(&env, again);
}

static void seed_tokenizer(const char *path)
{
    static const char text[] = "A tokenizer of few merges: the thing, the thin, the then; tea, ten, tent.";
    mtt_vocab_trainer *v;
    mtt_tokenizer *t;
    MUST(succeeds(mtt_vocab_trainer_create(&env, NULL, &v), &env));
    MUST(succeeds(mtt_vocab_trainer_add(v, text, sizeof(text) - 1), &env));
    MUST(succeeds(mtt_vocab_trainer_finish(v, 264, &t), &env));
    MUST(succeeds(mtt_tokenizer_save(t, path), &env));
    mtt_tokenizer_destroy(t);
    mtt_vocab_trainer_destroy(v);
}

/* ---- texts and tokens ---- */

static void fuzz_corpus(const char *data, size_t size)
{
    mtt__corpus *c;
    const char *text;
    size_t bytes, all = 0;
    put("corpus", data, size);
    if (!succeeds(mtt__corpus_open(&env, "corpus", NULL, END_OF_TEXT, &c), &env)) return;
    while (succeeds(mtt__corpus_next(c, &text, &bytes), &env)) all += bytes;
    MUST(all <= 2 * size); /* a joint of two strings is as long as what it replaces; a lone surrogate, too */
    mtt__corpus_close(c);
}

static void read_batches(const mtt_tokens *t, int sequential)
{
    int32_t tokens[15], targets[15];
    mtt_batches b;
    int k, i;
    if (!succeeds(mtt_batches_init(&env, &b, t, 3, 5, 1, sequential), &env)) return;
    for (k = 0; k < 40 && succeeds(mtt_batches_next(&b, tokens, targets), &env); k++)
        for (i = 0; i < 15; i++) MUST(tokens[i] >= 0 && tokens[i] < mtt_tokens_vocab(t));
}

/* As it is, and with the right checksum. */
static void fuzz_tokens(const char *data, size_t size)
{
    char *file = (char *)malloc(size ? size : 1);
    mtt__crc_table table;
    uint32_t crc;
    mtt_tokens *t;
    int sealed;
    MUST(file != NULL);
    memcpy(file, data, size);
    mtt__crc_init(&table);
    for (sealed = 0; sealed < 2; sealed++) {
        if (sealed && size >= sizeof(mtt__token_header)) {
            crc = mtt__crc32(&table, 0, file + sizeof(mtt__token_header), size - sizeof(mtt__token_header));
            memcpy(file + offsetof(mtt__token_header, crc), &crc, sizeof(crc));
        }
        put("tokens", file, size);
        if (!succeeds(mtt_tokens_open(&env, "tokens", &t), &env)) continue;
        read_batches(t, 0);
        read_batches(t, 1);
        mtt_tokens_close(t);
    }
    free(file);
}

/* The first byte chooses options. What was prepared must open, and is up to date. */
static void fuzz_prepare(const char *data, size_t size)
{
    static const char *const files[] = {"d.tokenizer.json", "d.train.tokens", "d.valid.tokens",
                                        "d.test.tokens"};
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    mtt_prepare_desc job = {.input = "text", .output = "d"};
    mtt_prepare_report report;
    mtt_dataset set;
    int k;
    if (!size) return;
    for (k = 0; k < 4; k++) remove(files[k]);
    if (*data & 1) job.kind = &kind;
    if (*data & 2) job.field = "\"";
    job.vocab = *data & 4 ? 300 : 258;
    job.seed = (uint64_t)(*data >> 3 & 3);
    put("text", data + 1, size - 1);
    if (!succeeds(mtt_prepare(&env, &job, &report), &env)) return;
    MUST(succeeds(mtt_dataset_open(&env, "d", &kind, &set), &env));
    mtt_dataset_close(&set);
    job.reuse_only = 1;
    MUST(succeeds(mtt_prepare(&env, &job, &report), &env) && report.reused);
}

static void seed_tokens(const char *path)
{
    char text[2048];
    mtt_prepare_desc job = {.input = "text", .output = "d", .vocab = 258};
    size_t i;
    for (i = 0; i < sizeof(text); i++) text[i] = i % 80 < 78 ? (char)('a' + i * i % 7) : '\n';
    put("text", text, sizeof(text));
    MUST(succeeds(mtt_prepare(&env, &job, NULL), &env) && !rename("d.train.tokens", path));
}

/* ---- checkpoints ---- */

enum { BATCH = 2, LENGTH = 4, VOCAB = 16 };
static const int32_t some_tokens[BATCH * LENGTH] = {1, 2, 3, 4, 5, 6, 7, 8};

static mtt_trainer *make_trainer(void)
{
    mtt_model_desc model = {.layers = 1, .heads = 1, .d_model = 8, .d_ff = 8, .vocab = VOCAB, .max_seq = 8};
    mtt_policy policy = {.precision = MTT_BF16};
    mtt_optim_desc optim = {0};
    mtt_trainer *t;
    MUST(succeeds(mtt_trainer_create(&env, &model, &policy, &optim, mtt_cpu_backend(), BATCH, LENGTH, &t),
                  &env));
    return t;
}

/* A hash of the steps and the weights. */
static uint64_t state_of(mtt_trainer *t)
{
    uint64_t hash = (uint64_t)mtt_trainer_step(t);
    int64_t shape[2];
    int k;
    for (k = 0; mtt_parameter(t, k, shape); k++) {
        float values[8 * VOCAB * 4];
        size_t i, count = (size_t)(shape[0] * (shape[1] ? shape[1] : 1));
        uint32_t bits[8 * VOCAB * 4];
        MUST(count <= 8 * VOCAB * 4 && succeeds(mtt_parameter_get(t, k, values), &env));
        memcpy(bits, values, count * sizeof(*bits));
        for (i = 0; i < count; i++) hash = (hash ^ bits[i]) * 0x100000001b3u;
    }
    return hash;
}

static void put_hex(FILE *file, const mtt__st *st, const mtt__st_entry *pair, uint32_t crc)
{
    fseek(file, 8 + (long)(pair->value - st->header), SEEK_SET);
    fprintf(file, "%08x", crc);
}

/* Puts the right checksums into a file, where there is a place for them. */
static void seal(const char *path)
{
    mtt__st st;
    FILE *file;
    size_t i;
    if (mtt__st_open(&env, path, &st)) return;
    file = fopen(path, "r+b");
    MUST(file != NULL);
    for (i = 0; i < st.metadata.count; i++) {
        const mtt__st_entry *pair = &st.metadata.at[i], *e;
        if (strlen(pair->value) != 8 || strncmp(pair->name, "crc32", 5)) continue;
        if (!pair->name[5]) put_hex(file, &st, pair, st.metadata_crc);
        else if ((e = mtt__st_find(&st.tensors, pair->name + 6)))
            put_hex(file, &st, pair, mtt__crc32(&st.crc, 0, e->data, e->bytes));
    }
    fclose(file);
    mtt__st_close(&st);
}

/* As it is, and with the right checksums. A refusal changes nothing. After a resume a step and a save must
   work, unless the numbers are not finite. */
static void fuzz_checkpoint(const char *data, size_t size)
{
    mtt_trainer *t = make_trainer();
    mtt_step_info info;
    uint64_t before = state_of(t);
    int sealed;
    put("checkpoint", data, size);
    for (sealed = 0; sealed < 2; sealed++) {
        if (sealed) seal("checkpoint");
        if (!succeeds(mtt_resume(t, "checkpoint", NULL), &env)) {
            MUST(state_of(t) == before);
            continue;
        }
        if (succeeds(mtt_train_step(t, some_tokens, some_tokens, &info), &env))
            MUST(succeeds(mtt_save(t, "next", NULL), &env));
        before = state_of(t);
    }
    mtt_trainer_destroy(t);
}

static void seed_checkpoint(const char *path)
{
    mtt_trainer *t = make_trainer();
    MUST(succeeds(mtt_train_step(t, some_tokens, some_tokens, NULL), &env));
    MUST(succeeds(mtt_save(t, path, NULL), &env));
    mtt_trainer_destroy(t);
}

/* ---- models ---- */

/* A folder: config.json, the index and one of its files, a NUL between two. */
static void fuzz_model(const char *data, size_t size)
{
    static float values[1 << 16];
    const char *at = data, *const names[] = {"config.json", "model.safetensors.index.json"};
    mtt_model *m;
    mtt_form_tensor t;
    int64_t cursor = 0;
    size_t bytes, k;
    for (k = 0; k < 2; k++) {
        char *part = next_part(&at, data + size, 0, &bytes);
        put(names[k], part ? part : "", part ? bytes : 0);
        free(part);
    }
    put("a", at < data + size ? at : "", at < data + size ? (size_t)(data + size - at) : 0);
    if (!succeeds(mtt_model_open(&env, ".", &m), &env)) return;
    while (mtt_form_next(mtt_model_describe(m), MTT_FORM_MTT, &cursor, &t))
        if (t.rows * t.width <= 1 << 16) succeeds(mtt_model_read(m, t.parameter, values), &env);
    mtt_model_close(m);
}

static void seed_model(const char *path)
{
    static const char config[] = "{\"model_type\":\"qwen3\",\"vocab_size\":5,\"max_position_embeddings\":8,"
        "\"hidden_size\":8,\"intermediate_size\":8,\"num_hidden_layers\":1,\"num_attention_heads\":1,"
        "\"rms_norm_eps\":1e-6,\"layer_types\":[\"full_attention\"],\"tie_word_embeddings\":true,"
        "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":1e4},\"head_dim\":null}";
    static const char index[] = "{\"metadata\":{},\"weight_map\":{\"embed_tokens.weight\":\"a\"}}";
    mtt_model_desc model = {.layers = 1, .heads = 1, .d_model = 8, .d_ff = 8, .vocab = 5, .tied_head = 1,
                            .norm = MTT_NORM_RMS, .mlp = MTT_MLP_SWIGLU, .positions = MTT_POSITIONS_ROTARY,
                            .qk_norm = 1, .no_biases = 1};
    mtt_form_tensor t;
    char header[8192];
    size_t n = 8, end = 0, k;
    uint64_t size;
    int64_t cursor = 0;
    FILE *file = fopen(path, "wb");
    MUST(file && succeeds(mtt_model_resolve(&env, &model, &model), &env));
    while (mtt_form_next(&model, MTT_FORM_HUGGING_FACE, &cursor, &t)) {
        long long rows = t.transposed ? t.columns : t.rows, columns = t.transposed ? t.rows : t.columns;
        size_t bytes = (size_t)(rows * columns) * 2;
        n += (size_t)sprintf(header + n, "%c\"%s\":{\"dtype\":\"BF16\",\"shape\":[", end ? ',' : '{', t.name);
        if (!t.vector) n += (size_t)sprintf(header + n, "%lld,", rows);
        n += (size_t)sprintf(header + n, "%lld],\"data_offsets\":[%zu,%zu]}", columns, end, end + bytes);
        end += bytes;
    }
    header[n++] = '}';
    size = n - 8;
    memcpy(header, &size, 8);
    MUST(fwrite(config, sizeof(config), 1, file) && fwrite(index, sizeof(index), 1, file) &&
         fwrite(header, n, 1, file));
    for (k = 0; k < end; k++) fputc(0, file);
    MUST(!fclose(file));
}

#endif

static const struct target {
    const char *name;
    void (*run)(const char *data, size_t size);
    void (*seed)(const char *path); /* makes an input that cannot be written by hand; or NULL */
} TARGETS[] = {
#if defined(FUZZ_TRAIN)
    {"options", fuzz_options, NULL},
    {"log", fuzz_log, NULL},
#elif defined(FUZZ_REPORT)
    {"report", fuzz_report, NULL},
#else
    {"json", fuzz_json, NULL},
    {"tokenizer", fuzz_tokenizer, seed_tokenizer},
    {"vocab_bpe", fuzz_tokenizer, NULL},
    {"vocab_txt", fuzz_tokenizer, NULL},
    {"tiktoken", fuzz_tiktoken, NULL},
    {"nfc", fuzz_nfc, NULL},
    {"corpus", fuzz_corpus, NULL},
    {"tokens", fuzz_tokens, seed_tokens},
    {"prepare", fuzz_prepare, NULL},
    {"checkpoint", fuzz_checkpoint, seed_checkpoint},
    {"model", fuzz_model, seed_model},
#endif
};
enum { TARGET_COUNT = sizeof(TARGETS) / sizeof(TARGETS[0]) };

static const struct target *target;

/* Without FUZZ_TARGET: prints the names of the targets. */
int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    const char *name = getenv("FUZZ_TARGET"), *path = getenv("FUZZ_SEED");
    int k;
    (void)argc;
    (void)argv;
    setenv("OMP_WAIT_POLICY", "passive", 1); /* else the programs start again */
    for (k = 0; k < TARGET_COUNT; k++)
        if (!name || !*name) puts(TARGETS[k].name);
        else if (!strcmp(name, TARGETS[k].name)) target = &TARGETS[k];
    if (!target) exit(name && *name);
    if (path && target->seed) target->seed(path);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    target->run((const char *)data, size);
    return 0;
}
