/* test_structs.c - structs that a caller fills in: each member NULL, half of a pair, out of range, negative,
   huge, NaN or infinite is refused by name or taken, and nothing crashes. The table below has each member of
   each such struct in mtt.h, and mtt_sizeof knows each struct. */
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include "../test.h"
#include <ctype.h>

static mtt_env env, used; /* `used` is the one that is filled in */
static mtt_model_desc model;
static mtt_policy policy;
static mtt_group group;
static mtt_optim_desc optim;
static mtt_backend backend;
static mtt_field field;
static mtt_bpe_options bpe;
static mtt_tokenizer_kind kind;
static mtt_prepare_desc prepared;
static mtt_batches batches;
static mtt_sampling sampling;
static mtt_generation generation;
static mtt_generator_desc generator_desc;
static mtt_ranks_desc rank;

static mtt_trainer *trainer;
static mtt_generator *generator;
static mtt_tokenizer *tokenizer;
static mtt_tokens *tokens;

/* ---- functions that take the structs; each gives back what it makes ---- */

static mtt_status take_env(void)
{
    mtt_plan_report report;
    mtt_status status = mtt_plan(&used, &model, &policy, 1, 8, &report);
    memcpy(env.error, used.error, sizeof(env.error));
    return status;
}

static mtt_status take_plan(void)
{
    mtt_plan_report report;
    mtt_policy fit;
    int batch;
    mtt_status status = mtt_plan(&env, &model, &policy, 1, 8, &report);
    if (status) { /* the others refuse it, too */
        static char words[sizeof(env.error)];
        memcpy(words, env.error, sizeof(words));
        check(mtt_policy_fit(&env, &model, &policy, 1, 8, 1 << 30, &fit), "the fit is not \"%s\"", words);
        check(mtt_plan_max_batch(&env, &model, &policy, 8, 1 << 20, &batch), "largest batch: not %s", words);
        memcpy(env.error, words, sizeof(words));
    }
    return status;
}

static mtt_status take_optim(void)
{
    mtt_optim_desc resolved;
    return mtt_optim_resolve(&env, &optim, &resolved);
}

static mtt_status take_backend(void)
{
    mtt_generator *g;
    mtt_trainer *t;
    mtt_status status = mtt_trainer_create(&env, &model, &policy, &optim, &backend, 1, 8, &t), other;
    check(!status == !!t, "a trainer, and %s", mtt_status_string(status));
    mtt_trainer_destroy(t);
    other = mtt_generator_create(&env, &model, &generator_desc, &backend, &g);
    check(other == status && !status == !!g, "the generator says \"%s\", not %d", env.error, (int)status);
    mtt_generator_destroy(g);
    return status;
}

static mtt_status take_field(void)
{
    mtt_policy p = {.window = 0};
    return mtt_field_set(&env, &field, &p, "none");
}

static mtt_status take_bpe(void)
{
    mtt_tokenizer_kind chosen = mtt_bpe(&bpe);
    mtt_vocab_trainer *t;
    mtt_status status = mtt_vocab_trainer_create(&env, &chosen, &t);
    mtt_vocab_trainer_destroy(t);
    return status;
}

static mtt_status take_prepare(void)
{
    return mtt_prepare(&env, &prepared, NULL);
}

static mtt_status take_kind(void)
{
    mtt_vocab_trainer *t;
    mtt_tokenizer *loaded;
    mtt_dataset set;
    mtt_status status = mtt_vocab_trainer_create(&env, &kind, &t);
    mtt_vocab_trainer_destroy(t);
    if (!status) return status;
    prepared.kind = &kind;
    check(take_prepare() == status, "mtt_prepare: %s", env.error);
    prepared.kind = NULL;
    check(mtt_dataset_open(&env, prepared.output, &kind, &set) == status, "mtt_dataset_open: %s", env.error);
    check(mtt_tokenizer_load(&env, "absent", &kind, &loaded) == status, "mtt_tokenizer_load: %s", env.error);
    return status;
}

static mtt_status take_batches(void)
{
    int32_t x[16], y[16];
    return mtt_batches_next(&batches, x, y);
}

static mtt_status take_generation(void)
{
    static char words[sizeof(env.error)];
    mtt_status status = mtt_generate(trainer, tokenizer, &generation);
    memcpy(words, env.error, sizeof(words));
    check(mtt_generator_run(generator, tokenizer, &generation) == status,
          "mtt_generator_run says \"%s\", mtt_generate \"%s\"", env.error, words);
    return status;
}

static mtt_status take_sampling(void)
{
    float logits[64] = {0};
    mtt_generation old = generation;
    mtt_status status;
    check(mtt_sample(logits, 64, &sampling, 3) < 64, "an id beyond the logits");
    generation.sampling = sampling;
    status = take_generation();
    generation = old;
    return status;
}

static mtt_status take_generator(void)
{
    mtt_plan_report report;
    return mtt_generator_plan(&env, &model, &generator_desc, &report);
}

static mtt_status take_ranks(void)
{
    mtt_ranks *r;
    mtt_status status = mtt_ranks_connect(&env, &rank, &r);
    mtt_ranks_close(r);
    return status;
}

/* ---- members, and which of their wrong values must be refused ---- */

/* A number of a kind is set to each of: INTs -1, INT_MIN, INT_MAX; FLOATs and DOUBLEs NaN, infinity, minus
   infinity, -1; INT64s and SIZEs the largest and the smallest; POINTERs NULL. ENUMs have -1, INT_MAX, and the
   first number that is none of theirs. `refused` has a letter for each of these, in order: x = must be
   refused, with `word` in the error; . = refused or taken. */
enum { INT, ENUM, FLOAT, DOUBLE, INT64, SIZE, POINTER, TEXT };

typedef struct row {
    const char *owner, *member;
    void *object;
    size_t offset;
    int type;
    const char *refused, *word;
    mtt_status (*take)(void);
    int beyond; /* the first number that is no value of an ENUM */
} row;

#define ROW(type, object, member, kind, refused, word, take, beyond) \
    {#type, #member, &object, offsetof(type, member), kind, refused, word, take, beyond}
#define NAMED(type, object, member, kind, refused, take) \
    ROW(type, object, member, kind, refused, #member, take, 0)
static const row ROWS[] = {
    NAMED(mtt_env, used, alloc, POINTER, "x", take_env),
    NAMED(mtt_env, used, free, POINTER, "x", take_env),
    NAMED(mtt_env, used, user, POINTER, ".", take_env),
    NAMED(mtt_env, used, error, TEXT, "", take_env),
    NAMED(mtt_policy, policy, rank, INT, "xxx", take_plan),
    NAMED(mtt_group, group, names, POINTER, "x", take_optim),
    NAMED(mtt_group, group, lr_scale, FLOAT, "xx..", take_optim),
    NAMED(mtt_group, group, weight_decay, FLOAT, "xx..", take_optim),
    NAMED(mtt_optim_desc, optim, seed, INT64, "..", take_optim),
    NAMED(mtt_optim_desc, optim, zero_weights, INT, "...", take_optim),
    NAMED(mtt_optim_desc, optim, groups, POINTER, "x", take_optim),
    NAMED(mtt_optim_desc, optim, group_count, INT, "xxx", take_optim),
    ROW(mtt_field, field, name, POINTER, "x", "without a name", take_field, 0),
    ROW(mtt_field, field, kind, ENUM, "xxx", "a kind", take_field, MTT_FIELD_TEXT + 1),
    NAMED(mtt_field, field, fallback, DOUBLE, "....", take_field),
    NAMED(mtt_field, field, low, DOUBLE, "....", take_field),
    NAMED(mtt_field, field, high, DOUBLE, "....", take_field),
    NAMED(mtt_field, field, choices, POINTER, ".", take_field),
    NAMED(mtt_field, field, help, POINTER, ".", take_field),
    NAMED(mtt_field, field, offset, TEXT, "", take_field), /* a place in any struct: it cannot be checked */
    NAMED(mtt_backend, backend, name, POINTER, ".", take_backend),
    ROW(mtt_backend, backend, device, ENUM, "xxx", "device", take_backend, MTT_DEVICE_CUDA + 1),
    NAMED(mtt_backend, backend, index, INT, "...", take_backend),
    NAMED(mtt_backend, backend, open, POINTER, "x", take_backend),
    NAMED(mtt_backend, backend, close, POINTER, "x", take_backend),
    NAMED(mtt_backend, backend, alloc, POINTER, "x", take_backend),
    NAMED(mtt_backend, backend, release, POINTER, "x", take_backend),
    NAMED(mtt_backend, backend, memory, POINTER, "x", take_backend),
    NAMED(mtt_backend, backend, upload, POINTER, "x", take_backend),
    NAMED(mtt_backend, backend, download, POINTER, "x", take_backend),
    NAMED(mtt_backend, backend, run, POINTER, "x", take_backend),
    NAMED(mtt_backend, backend, stream, POINTER, ".", take_backend),
    NAMED(mtt_backend, backend, device_alloc, POINTER, "x", take_backend),
    NAMED(mtt_backend, backend, device_free, POINTER, "x", take_backend),
    NAMED(mtt_backend, backend, note, POINTER, ".", take_backend),
    NAMED(mtt_backend, backend, user, POINTER, ".", take_backend),
    NAMED(mtt_backend, backend, ranks, POINTER, ".", take_backend),
    NAMED(mtt_backend, backend, exchange, POINTER, ".", take_backend), /* these two are mtt's to set */
    NAMED(mtt_backend, backend, watch, POINTER, ".", take_backend),
    ROW(mtt_bpe_options, bpe, pattern, ENUM, "xxx", "pattern", take_bpe, MTT_PATTERN_COUNT),
    NAMED(mtt_tokenizer_kind, kind, name, POINTER, "x", take_kind),
    NAMED(mtt_tokenizer_kind, kind, options, POINTER, ".", take_kind),
    NAMED(mtt_tokenizer_kind, kind, options_bytes, SIZE, "..", take_kind), /* no options: not read */
    NAMED(mtt_tokenizer_kind, kind, create, POINTER, "x", take_kind),
    NAMED(mtt_tokenizer_kind, kind, destroy, POINTER, "x", take_kind),
    NAMED(mtt_tokenizer_kind, kind, load, POINTER, "x", take_kind),
    NAMED(mtt_tokenizer_kind, kind, learn, POINTER, "x", take_kind),
    NAMED(mtt_tokenizer_kind, kind, cut, POINTER, "x", take_kind),
    NAMED(mtt_tokenizer_kind, kind, spell, POINTER, "x", take_kind),
    NAMED(mtt_tokenizer_kind, kind, print, POINTER, "x", take_kind),
    NAMED(mtt_tokenizer_kind, kind, end_of_text, POINTER, ".", take_kind),
    NAMED(mtt_prepare_desc, prepared, input, POINTER, "x", take_prepare),
    NAMED(mtt_prepare_desc, prepared, output, POINTER, "x", take_prepare),
    NAMED(mtt_prepare_desc, prepared, field, POINTER, ".", take_prepare),
    NAMED(mtt_prepare_desc, prepared, tokenizer, POINTER, ".", take_prepare),
    NAMED(mtt_prepare_desc, prepared, kind, POINTER, ".", take_prepare),
    ROW(mtt_prepare_desc, prepared, vocab, INT, "xx.", "ids", take_prepare, 0), /* it is the most */
    NAMED(mtt_prepare_desc, prepared, seed, INT64, "..", take_prepare),
    NAMED(mtt_prepare_desc, prepared, reuse_only, INT, "...", take_prepare),
    NAMED(mtt_prepare_desc, prepared, progress, POINTER, ".", take_prepare),
    NAMED(mtt_prepare_desc, prepared, user, POINTER, ".", take_prepare),
    ROW(mtt_batches, batches, tokens, POINTER, "x", "", take_batches, 0), /* no environment */
    NAMED(mtt_batches, batches, batch, INT, "xx", take_batches), /* arrays may be as large */
    NAMED(mtt_batches, batches, seq_len, INT, "xx", take_batches),
    NAMED(mtt_batches, batches, seed, INT64, "..", take_batches),
    NAMED(mtt_batches, batches, sequential, INT, "...", take_batches),
    NAMED(mtt_batches, batches, sequences, INT64, "..", take_batches),
    NAMED(mtt_batches, batches, cursor, INT64, "..", take_batches),
    NAMED(mtt_batches, batches, rank, INT, "xxx", take_batches),
    NAMED(mtt_batches, batches, ranks, INT, "...", take_batches),
    ROW(mtt_batches, batches, crc32, INT, "...", "crc32", take_batches, 0),
    NAMED(mtt_sampling, sampling, temperature, FLOAT, "xxxx", take_sampling),
    NAMED(mtt_sampling, sampling, top_k, INT, "xx.", take_sampling),
    NAMED(mtt_sampling, sampling, top_p, FLOAT, "xxxx", take_sampling),
    NAMED(mtt_sampling, sampling, min_p, FLOAT, "xxxx", take_sampling),
    NAMED(mtt_sampling, sampling, repetition_penalty, FLOAT, "xxxx", take_sampling),
    NAMED(mtt_sampling, sampling, seed, INT64, "..", take_sampling),
    ROW(mtt_generation, generation, texts, POINTER, "x", "texts and no prompts", take_generation, 0),
    NAMED(mtt_generation, generation, prompts, POINTER, ".", take_generation),
    NAMED(mtt_generation, generation, sizes, POINTER, ".", take_generation),
    NAMED(mtt_generation, generation, prompt_count, INT, "xx", take_generation),
    NAMED(mtt_generation, generation, count, INT, "xx", take_generation),
    NAMED(mtt_generation, generation, sampling, TEXT, "", take_generation), /* the rows above */
    NAMED(mtt_generation, generation, stops, POINTER, "x", take_generation),
    NAMED(mtt_generation, generation, stop_count, INT, "xx", take_generation),
    NAMED(mtt_generation, generation, stop_ids, POINTER, "x", take_generation),
    NAMED(mtt_generation, generation, stop_id_count, INT, "xx", take_generation),
    ROW(mtt_generation, generation, full_context, ENUM, "xxx", "full_context", take_generation, 2),
    NAMED(mtt_generation, generation, write, POINTER, "x", take_generation),
    NAMED(mtt_generation, generation, user, POINTER, ".", take_generation),
    ROW(mtt_generator_desc, generator_desc, precision, ENUM, "xxx", "precision", take_generator, MTT_FP8 + 1),
    NAMED(mtt_generator_desc, generator_desc, window, INT, "xx.", take_generator),
    NAMED(mtt_generator_desc, generator_desc, batch, INT, "xxx", take_generator),
    NAMED(mtt_generator_desc, generator_desc, context, INT, "xxx", take_generator),
    NAMED(mtt_generator_desc, generator_desc, chunk, INT, "xxx", take_generator),
    ROW(mtt_generator_desc, generator_desc, device, ENUM, "xxx", "device", take_generator, 2),
    NAMED(mtt_ranks_desc, rank, rank, INT, "xxx", take_ranks),
    NAMED(mtt_ranks_desc, rank, ranks, INT, "xxx", take_ranks),
    NAMED(mtt_ranks_desc, rank, address, POINTER, ".", take_ranks),
    NAMED(mtt_ranks_desc, rank, port, INT, "xxx", take_ranks),
    NAMED(mtt_ranks_desc, rank, run, POINTER, ".", take_ranks),
    NAMED(mtt_ranks_desc, rank, secret, POINTER, ".", take_ranks),
    NAMED(mtt_ranks_desc, rank, timeout, DOUBLE, "xxxx", take_ranks),
    NAMED(mtt_ranks_desc, rank, mpi, INT, "...", take_ranks),
};

static int tried, members_tried;

/* Sets the member to wrong value number `which`. Returns 0 past the last. */
static int set_wrong(const row *r, int which)
{
    static const int ints[] = {-1, INT_MIN, INT_MAX};
    static const int64_t wide[] = {INT64_MAX, INT64_MIN};
    const double reals[] = {(double)NAN, HUGE_VAL, -HUGE_VAL, -1};
    char *at = (char *)r->object + r->offset;
    const float real = which < 4 ? (float)reals[which] : 0;
    const int choices[] = {-1, INT_MAX, r->beyond};
    const void *null = NULL;
    if (which >= (int)strlen(r->refused)) return 0;
    switch (r->type) {
    case INT: memcpy(at, &ints[which], sizeof(int)); break;
    case ENUM: memcpy(at, &choices[which], sizeof(int)); break;
    case FLOAT: memcpy(at, &real, sizeof(real)); break;
    case DOUBLE: memcpy(at, &reals[which], sizeof(double)); break;
    case INT64: memcpy(at, &wide[which], sizeof(int64_t)); break;
    case SIZE: memcpy(at, &wide[which], sizeof(size_t)); break;
    case POINTER: memcpy(at, &null, sizeof(null)); break;
    default: return 0;
    }
    return 1;
}

static void try_row(const row *r)
{
    char old[sizeof(env)];
    size_t bytes = mtt_sizeof(r->owner);
    members_tried++;
    memcpy(old, r->object, bytes);
    for (int which = 0; set_wrong(r, which); which++) {
        mtt_status status;
        new_case();
        tried++;
        env.error[0] = 0;
        status = r->take();
        if (r->refused[which] == 'x')
            check(status && status != MTT_END && strstr(env.error, r->word), "%s.%s, value %d: %s, \"%s\"",
                  r->owner, r->member, which, mtt_status_string(status), env.error);
        memcpy(r->object, old, bytes);
    }
}

/* Members that have a row in a table of fields: its kind and range say what must be refused. */
static void try_fields(const char *owner, void *object, const mtt_field *f, mtt_status (*take)(void))
{
    for (; f->name; f++) {
        char refused[8] = "";
        row r = {owner, f->name, object, f->offset, INT, refused, f->name, take, (int)fmin(f->high, 1e9) + 1};
        int none = f->low == 0 && f->fallback != 0;
        if (f->kind == MTT_FIELD_INT) strcpy(refused, f->high < INT_MAX ? "xxx" : "xx.");
        if (f->kind == MTT_FIELD_CHOICE) r.type = ENUM, strcpy(refused, "xxx");
        if (f->kind == MTT_FIELD_FLOAT) r.type = FLOAT, strcpy(refused, none ? "xx.." : "xxxx");
        if (f->kind == MTT_FIELD_INT64) r.type = INT64, strcpy(refused, "xx");
        if (f->kind == MTT_FIELD_BYTES) r.type = SIZE, strcpy(refused, "..");
        if (f->kind == MTT_FIELD_FLAG) strcpy(refused, "...");
        if (f->kind == MTT_FIELD_TEXT) r.type = POINTER, strcpy(refused, ".");
        try_row(&r);
    }
}

/* ---- no struct and no member is missing above ---- */

static int has_row(const char *owner, const char *member, size_t size)
{
    const mtt_field *f = !strcmp(owner, "mtt_model_desc")   ? mtt_model_fields()
                         : !strcmp(owner, "mtt_policy")     ? mtt_policy_fields()
                         : !strcmp(owner, "mtt_optim_desc") ? mtt_optim_fields()
                                                            : NULL;
    for (; f && f->name; f++)
        if (strlen(f->name) == size && !strncmp(f->name, member, size)) return 1;
    for (size_t i = 0; i < MTT__LENGTH(ROWS); i++)
        if (!strcmp(ROWS[i].owner, owner) && strlen(ROWS[i].member) == size &&
            !strncmp(ROWS[i].member, member, size))
            return 1;
    return 0;
}

/* Goes through the members of a struct in the header's text: names before , ; or [ and, of functions, those
   in (* ). Returns how many there are. */
static int members_of(const char *owner, char *at)
{
    int count = 0, depth = 0;
    char *name = NULL;
    size_t size = 0;
    for (; *at != '}'; at++) {
        if (at[0] == '/' && at[1] == '*') at = strstr(at, "*/") + 1;
        else if (*at == '(' && at[1] == '*' && !depth) name = at + 2, size = strcspn(name, ")"), depth = -1;
        else if (*at == '(') depth += depth >= 0;
        else if (*at == ')') depth -= depth > 0;
        else if ((*at == ',' && !depth) || *at == ';') {
            check(name && has_row(owner, name, size), "%s.%.*s is in no row", owner, (int)size,
                  name ? name : "");
            count++, depth = 0, name = NULL;
        } else if (*at == '[') at += strcspn(at, "]");
        else if (!depth && (isalpha((unsigned char)*at) || *at == '_')) {
            name = at, size = strspn(at, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789");
            at += size - 1;
        }
    }
    return count;
}

/* Those that mtt fills in, for the caller or for a backend to read. */
static const char *const FILLED_IN[] = {
    "mtt_plan_report", "mtt_step_info",   "mtt_prepare_report", "mtt_dataset",  "mtt_quality",
    "mtt_form_tensor", "mtt_json",        "mtt_slice",          "mtt_scale",    "mtt_tensor",
    "mtt_shape",       "mtt_transfer",    "mtt_op",             "mtt_rate",     "mtt_control",
    "mtt_counters",    "mtt_choice",      "mtt_chosen",         "mtt_draw",     "mtt_qkv",
    "mtt_update_rates", "mtt_range",       "mtt_part",           "mtt_count",
};

static void every_member(void)
{
#define SIZED(type) {#type, sizeof(type)},
    static const struct { const char *name; size_t bytes; } sizes[] = {MTT__STRUCTS(SIZED)};
    size_t bytes, structs = 0, known = 0, members = 0;
    char *text = read_file("mtt.h", &bytes);
    char *end = text ? strstr(text, "\n#ifdef MTT_IMPLEMENTATION\n") : NULL;
    check(end != NULL, "mtt.h cannot be read: run this in the folder with mtt.h");
    if (!end) return;
    for (char *at = text; (at = strstr(at, "struct mtt_")) != NULL && at < end; at++) {
        char name[64] = "";
        size_t size = strcspn(at + 7, " ;*,)"), filled = 0, k;
        if ((at[-1] != '\n' && strncmp(at - 8, "typedef ", 8)) || size >= sizeof(name) ||
            strncmp(at + 7 + size, " {\n", 3))
            continue;
        memcpy(name, at + 7, size);
        structs++;
        for (k = 0; k < MTT__LENGTH(sizes); k++)
            if (!strcmp(sizes[k].name, name) && mtt_sizeof(name) == sizes[k].bytes && sizes[k].bytes) known++;
        check(mtt_sizeof(name) > 0, "mtt_sizeof does not know %s", name);
        for (k = 0; k < MTT__LENGTH(FILLED_IN); k++) filled |= !strcmp(FILLED_IN[k], name);
        if (!filled) members += (size_t)members_of(name, at + 7 + size + 2);
    }
    check(structs == MTT__LENGTH(sizes) && known == structs, "%zu structs, %zu known, %zu in the list",
          structs, known, MTT__LENGTH(sizes));
    check((int)members == members_tried, "%zu members in mtt.h, %d tried", members, members_tried);
    check(!mtt_sizeof("mtt_polic") && !mtt_sizeof(""), "a struct that is none has a size");
    printf("%zu structs; %d members of those that a caller fills in, %d wrong values\n", structs,
           members_tried, tried);
    free(text);
}

/* ---- */

static void *get(void *user, size_t bytes)
{
    (void)user;
    return malloc(bytes);
}

static void put_back(void *user, void *block)
{
    (void)user;
    free(block);
}

static int receive(void *user, int prompt, int32_t id, const char *text, size_t bytes)
{
    (void)user, (void)prompt, (void)id, (void)text, (void)bytes;
    return 0;
}

static void good_structs(void)
{
    static const char *const texts[] = {"the cat"}, *const stops[] = {"zzz"};
    static const int32_t stop_ids[] = {5};
    static int32_t stream[64];
    const mtt_field *f = mtt_policy_fields();
    mtt_vocab_trainer *words;
    used.alloc = get, used.free = put_back;
    model = (mtt_model_desc){.layers = 1, .heads = 1, .d_model = 8, .d_ff = 8, .vocab = 300, .max_seq = 16};
    group = (mtt_group){.names = "wte.*", .lr_scale = 0.5f};
    optim = (mtt_optim_desc){.groups = &group, .group_count = 1};
    backend = *mtt_cpu_backend();
    backend.device_alloc = get, backend.device_free = put_back;
    for (field = *mtt_policy_fields(); strcmp(field.name, "recompute"); field = *++f) {}
    kind = mtt_bpe(NULL);
    prepared = (mtt_prepare_desc){.input = in("text.txt"), .output = in("set")};
    rank = (mtt_ranks_desc){.rank = 0, .ranks = 1, .timeout = 1};
    generator_desc = (mtt_generator_desc){.batch = 1, .context = 8, .chunk = 4};
    check(!mtt_vocab_trainer_create(&env, NULL, &words) && !mtt_vocab_trainer_add(words, "the cat the", 11) &&
              !mtt_vocab_trainer_finish(words, 260, &tokenizer), "no tokenizer: %s", env.error);
    mtt_vocab_trainer_destroy(words);
    check(!mtt_trainer_create(&env, &model, &policy, &optim, mtt_cpu_backend(), 1, 8, &trainer) &&
              !mtt_generator_create(&env, &model, &generator_desc, mtt_cpu_backend(), &generator) &&
              !mtt_tokens_copy(&env, stream, 64, 300, &tokens) &&
              !mtt_batches_init(&env, &batches, tokens, 2, 8, 1, 0), "%s", env.error);
    sampling = (mtt_sampling){.temperature = 1};
    generation = (mtt_generation){.texts = texts, .prompt_count = 1, .count = 2, .sampling = sampling,
                                  .stops = stops, .stop_count = 1, .stop_ids = stop_ids, .stop_id_count = 1,
                                  .write = receive};
}

/* Prompts that are ids, and arrays of which an entry is NULL. */
static void entries(void)
{
    static const int32_t ids[] = {1, 2, 3}, *const prompts[] = {ids}, *const none[] = {NULL};
    static const char *const no_text[] = {NULL};
    static const int sizes[] = {3}, less[] = {-1};
    const mtt_generation texts = generation, good = {.prompts = prompts, .sizes = sizes, .prompt_count = 1,
                                                     .count = 2, .write = receive};
    const struct { mtt_generation g; const char *word; } wrong[] = {
        {{.texts = no_text, .prompt_count = 1, .count = 2, .write = receive}, "texts has no text 0"},
        {{.prompts = none, .sizes = sizes, .prompt_count = 1, .count = 2, .write = receive}, "no prompt 0"},
        {{.prompts = prompts, .prompt_count = 1, .count = 2, .write = receive}, "sizes"},
        {{.prompts = prompts, .sizes = less, .prompt_count = 1, .count = 2, .write = receive}, "-1 ids"},
        {{.sizes = sizes, .prompt_count = 1, .count = 2, .write = receive}, "no prompts"},
    };
    generation = good;
    check(!take_generation(), "prompts that are ids: %s", env.error);
    for (size_t i = 0; i < MTT__LENGTH(wrong); i++) {
        generation = wrong[i].g;
        check(take_generation() == MTT_E_ARGUMENT && strstr(env.error, wrong[i].word), "not \"%s\": %s",
              wrong[i].word, env.error);
    }
    generation = good;
    generation.count = 0, generation.write = NULL;
    check(!take_generation(), "without ids to draw, write is never called: %s", env.error);
    generation = texts;
}

int main(void)
{
    static mtt_status (*const good[])(void) = {take_env,      take_plan,    take_optim,   take_backend,
                                               take_field,    take_bpe,     take_prepare, take_kind,
                                               take_batches,  take_sampling, take_generation,
                                               take_generator, take_ranks};
    char text[4000] = "";
    if (!open_folder()) return finish();
    for (int i = 0; i < 40; i++) strcat(text, "The cat sat on the mat, and that was it.\n\n");
    write_file(in("text.txt"), text, strlen(text));
    good_structs();
    for (size_t i = 0; i < MTT__LENGTH(good); i++)
        check(!good[i](), "what is right is refused, number %zu: %s", i, env.error);
    try_fields("mtt_model_desc", &model, mtt_model_fields(), take_plan);
    try_fields("mtt_policy", &policy, mtt_policy_fields(), take_plan);
    try_fields("mtt_optim_desc", &optim, mtt_optim_fields(), take_optim);
    for (size_t i = 0; i < MTT__LENGTH(ROWS); i++) try_row(&ROWS[i]);
    every_member();
    entries();
    mtt_generator_destroy(generator);
    mtt_trainer_destroy(trainer);
    mtt_tokenizer_destroy(tokenizer);
    mtt_tokens_close(tokens);
    close_folder();
    return finish();
}
