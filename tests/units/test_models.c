/* test_models.c - models in files: folders as transformers writes them, written here by a second, naive table
   of names, and checkpoints. What is read must be what was written, and loads into every kind of trainer.
   Settings and tensors that do not belong to mtt's models are refused by name; damage is an error.

      test_models [quick] */
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include "../test.h"

enum { VOCAB = 19, MOST = 1 << 17, BATCH = 2, LENGTH = 8 };
static mtt_env env;

static const mtt_model_desc GPT2 = {.layers = 2, .heads = 2, .d_model = 16, .d_ff = 40, .vocab = VOCAB,
                                    .max_seq = 12, .positions = MTT_POSITIONS_LEARNED, .tied_head = 1,
                                    .no_head_bias = 1};
static const mtt_model_desc LLAMA = {.layers = 2, .heads = 4, .heads_kv = 2, .d_model = 32, .d_ff = 24,
                                     .vocab = VOCAB, .max_seq = 12, .positions = MTT_POSITIONS_ROTARY,
                                     .norm = MTT_NORM_RMS, .norm_eps = 1e-6f, .mlp = MTT_MLP_SWIGLU,
                                     .rotary_theta = 5e5f, .no_biases = 1};
static const char *const CONFIGS[] = {
    "{'model_type': 'gpt2', 'vocab_size': 19, 'n_positions': 12, 'n_embd': 16, 'n_layer': 2, 'n_head': 2, "
    "'n_inner': 40, 'layer_norm_epsilon': 1e-05, 'activation_function': 'gelu_new', 'unknown': [{}]}",
    "{'model_type': 'llama', 'vocab_size': 19, 'max_position_embeddings': 12, 'hidden_size': 32, "
    "'intermediate_size': 24, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2, "
    "'head_dim': null, 'rms_norm_eps': 1e-06, 'hidden_act': 'silu', 'attention_bias': false, 'mlp_bias': "
    "false, 'rope_scaling': null, 'rope_theta': 500000.0, 'tie_word_embeddings': false}",
    "{'model_type': 'qwen3', 'vocab_size': 19, 'max_position_embeddings': 12, 'hidden_size': 32, "
    "'intermediate_size': 24, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2, "
    "'head_dim': 16, 'rms_norm_eps': 1e-06, 'hidden_act': 'silu', 'layer_types': ['full_attention', "
    "'full_attention'], 'use_sliding_window': false, 'tie_word_embeddings': true, "
    "'rope_parameters': {'rope_type': 'default', 'rope_theta': 500000.0}}",
};

/* Family 0, 1 or 2. */
static mtt_model_desc model_of(int family)
{
    mtt_model_desc m = family ? LLAMA : GPT2;
    if (family == 2) m.qk_norm = m.tied_head = 1, m.d_head = 16;
    return m;
}

static mtt_trainer *make(const mtt_model_desc *model, mtt_policy policy, uint64_t seed)
{
    mtt_optim_desc optim = {.lr = 1e-2f, .seed = seed};
    mtt_trainer *t = NULL;
    check(!mtt_trainer_create(&env, model, &policy, &optim, mtt_cpu_backend(), BATCH, LENGTH, &t), "%s",
          env.error);
    return t;
}

static void step(mtt_trainer *t)
{
    int32_t tokens[2 * BATCH * LENGTH]; /* two micro-batches at most */
    int i;
    for (i = 0; i < 2 * BATCH * LENGTH; i++) tokens[i] = i * 5 % VOCAB;
    check(!mtt_train_step(t, tokens, tokens, NULL), "%s", env.error);
}

/* ---- a writer of folders ---- */

typedef struct tensor {
    char name[100];
    const char *dtype; /* NULL: left out */
    int rank;
    long long shape[2];
    float *values;
} tensor;

static tensor tensors[64];
static int tensor_count;
static const char *dtype = "F32", *prefix = "", *metadata = "";
static int bits = 32; /* of an element of another dtype than F32, F16 and BF16; such data is 0 */

static void put_text(const char *path, const char *text)
{
    char quoted[4096], *c;
    snprintf(quoted, sizeof(quoted), "%s", text);
    for (c = quoted; *c; c++)
        if (*c == '\'') *c = '"';
    write_file(path, quoted, strlen(quoted));
}

/* Columns `first` to `first` + `count` of a matrix, or of a vector that has no rows. */
static void add(const char *name, const float *values, long long rows, long long width, long long first,
                long long count, int transposed)
{
    tensor *t = &tensors[tensor_count++];
    long long lines = rows ? rows : 1, r, c;
    snprintf(t->name, sizeof(t->name), "%s%s", strncmp(name, "lm_head", 7) ? prefix : "", name);
    t->dtype = dtype;
    t->rank = rows ? 2 : 1;
    t->shape[0] = !rows || transposed ? count : rows;
    t->shape[1] = transposed ? rows : count;
    t->values = (float *)malloc((size_t)(lines * count) * sizeof(float));
    for (r = 0; r < lines; r++)
        for (c = 0; c < count; c++)
            t->values[transposed ? c * lines + r : r * count + c] = values[r * width + first + c];
}

/* A parameter under its names in transformers. */
static void add_parameter(const mtt_model_desc *m, const char *name, const float *v, const int64_t shape[2])
{
    static const struct { const char *ours, *theirs; } names[] = {
        {"ln_1", "input_layernorm"},          {"ln_2", "post_attention_layernorm"},
        {"attn.c_proj", "self_attn.o_proj"},  {"mlp.c_proj", "mlp.down_proj"},
        {"attn.q_norm", "self_attn.q_norm"},  {"attn.k_norm", "self_attn.k_norm"}};
    const char *last = strrchr(name, '.');
    long long rows = shape[1] ? shape[0] : 0, width = shape[1] ? shape[1] : shape[0];
    long long head = m->d_head ? m->d_head : m->d_model / m->heads, q = m->heads * head;
    long long kv = m->heads_kv * head;
    char stem[64], full[100];
    int layer = -1, k;
    if (m->positions == MTT_POSITIONS_LEARNED || !strcmp(name, "lm_head.weight")) {
        add(name, v, rows, width, 0, width, 0);
        return;
    }
    if (!strcmp(name, "wte.weight")) add("embed_tokens.weight", v, rows, width, 0, width, 0);
    if (!strcmp(name, "ln_f.weight")) add("norm.weight", v, rows, width, 0, width, 0);
    if (sscanf(name, "h.%d.%60s", &layer, stem) < 2) return;
    stem[strlen(stem) - strlen(last)] = 0;
#define ADD(theirs, first, count)                                                       \
    snprintf(full, sizeof(full), "layers.%d.%s%s", layer, theirs, last);                \
    add(full, v, rows, width, first, count, rows > 0)
    for (k = 0; k < 6; k++)
        if (!strcmp(stem, names[k].ours)) {
            ADD(names[k].theirs, 0, width);
        }
    if (!strcmp(stem, "attn.c_attn")) {
        ADD("self_attn.q_proj", 0, q);
        ADD("self_attn.k_proj", q, kv);
        ADD("self_attn.v_proj", q + kv, kv);
    }
    if (!strcmp(stem, "mlp.c_fc")) {
        ADD("mlp.gate_proj", 0, m->d_ff);
        ADD("mlp.up_proj", m->d_ff, m->d_ff);
    }
}

static size_t size_of(const tensor *t)
{
    return (size_t)(t->shape[0] * (t->rank > 1 ? t->shape[1] : 1));
}

static size_t bytes_of(const tensor *t)
{
    return size_of(t) * (size_t)(strstr(t->dtype, "F16") ? 16 : strcmp(t->dtype, "F32") ? bits : 32) / 8;
}

/* Every `every`th tensor from `first` on. */
static void put_tensors(const char *path, int first, int every)
{
    char text[16384];
    size_t n = 9, at = 0;
    uint64_t header;
    FILE *file = fopen(path, "wb");
    int i;
    size_t k;
    text[8] = '{';
    for (i = first; i < tensor_count; i += every) {
        const tensor *t = &tensors[i];
        size_t bytes = t->dtype ? bytes_of(t) : 0;
        if (!t->dtype) continue;
        n += (size_t)sprintf(text + n, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%lld", at ? "," : metadata,
                             t->name, t->dtype, t->shape[0]);
        if (t->rank > 1) n += (size_t)sprintf(text + n, ",%lld", t->shape[1]);
        n += (size_t)sprintf(text + n, "],\"data_offsets\":[%zu,%zu]}", at, at + bytes);
        at += bytes;
    }
    n += (size_t)sprintf(text + n, "}");
    header = n - 8;
    memcpy(text, &header, 8);
    fwrite(text, 1, n, file);
    for (i = first; i < tensor_count; i += every)
        for (k = 0; tensors[i].dtype && k < bytes_of(&tensors[i]); k++) {
            const char *type = tensors[i].dtype;
            int wide = !strcmp(type, "F32"), half = strstr(type, "F16") != NULL;
            double twice = strcmp(type, "F64") ? 0 : (double)tensors[i].values[k / 8 % size_of(&tensors[i])];
            float x = wide || half ? tensors[i].values[k / (wide ? 4 : 2)] : 0;
            uint16_t code = *type == 'F' ? mtt__to_fp16(x) : mtt__to_bf16(x);
            fputc(twice != 0 ? ((unsigned char *)&twice)[k % 8]
                  : wide     ? ((unsigned char *)&x)[k % 4]
                             : ((unsigned char *)&code)[k % 2],
                  file);
        }
    check(!fclose(file), "%s cannot be written", path);
}

static void forget(void)
{
    while (tensor_count) free(tensors[--tensor_count].values);
    unlink(in("model.safetensors"));
    unlink(in("model.safetensors.index.json"));
}

/* Makes the folder's tensors of a trainer's weights, not yet in a file. */
static void list(mtt_trainer *t, const mtt_model_desc *m)
{
    static float values[MOST];
    int64_t shape[2];
    const char *name;
    int i;
    forget();
    for (i = 0; (name = mtt_parameter(t, i, shape)); i++) {
        check(!mtt_parameter_get(t, i, values), "%s", env.error);
        add_parameter(m, name, values, shape);
    }
}

/* Lists the tensors of a family's model, `untied` with a head of its own, and returns the model's fields. */
static mtt_model_desc list_family(int family, int untied)
{
    mtt_model_desc m = model_of(family);
    mtt_trainer *t;
    if (untied) m.tied_head = 0;
    t = make(&m, (mtt_policy){0}, 3);
    mtt_model_resolve(&env, &m, &m);
    list(t, &m);
    mtt_trainer_destroy(t);
    return m;
}

/* Makes the folder of a family's model, with `to` in place of `from` in its config.json. */
static mtt_model_desc put_family(int family, const char *from, const char *to)
{
    char text[4096];
    const char *config = CONFIGS[family], *at = strstr(config, from);
    mtt_model_desc m = list_family(family, 0);
    put_tensors(in("model.safetensors"), 0, 1);
    snprintf(text, sizeof(text), "%.*s%s%s", (int)(at - config), config, to, at + strlen(from));
    put_text(in("config.json"), text);
    return m;
}

/* Lists the tensors of a model with a head of its own, which its config.json ties to the embedding. */
static void list_tied(int family, tensor **head, tensor **table)
{
    char text[2048], *tied;
    int i;
    list_family(family, 1);
    for (i = 0; i < tensor_count; i++) {
        const char *name = tensors[i].name;
        if (strstr(name, "lm_head")) *head = &tensors[i];
        if (strstr(name, "wte.") || strstr(name, "embed_tokens.")) *table = &tensors[i];
    }
    snprintf(text, sizeof(text), "%s", CONFIGS[family]);
    if ((tied = strstr(text, "embeddings': false")) != NULL) memcpy(tied, "embeddings': true ", 18);
    put_text(in("config.json"), text);
}

/* ---- what is read ---- */

/* All weights of a trainer are those of a model, rounded to `type`. */
static void same(mtt_trainer *t, mtt_model *m, const char *type, const char *what)
{
    static float ours[MOST], theirs[MOST];
    int64_t shape[2], k;
    const char *name;
    int i;
    for (i = 0; (name = mtt_parameter(t, i, shape)); i++) {
        check(!mtt_parameter_get(t, i, ours) && !mtt_model_read(m, name, theirs), "%s", env.error);
        for (k = 0; k < shape[0] * (shape[1] ? shape[1] : 1); k++) {
            float x = ours[k];
            if (!strcmp(type, "F16")) x = mtt__from_fp16(mtt__to_fp16(x));
            if (!strcmp(type, "BF16")) x = mtt__from_bf16(mtt__to_bf16(x));
            if (x != theirs[k]) break;
        }
        check(k == shape[0] * (shape[1] ? shape[1] : 1), "%s: element %lld of %s", what, (long long)k, name);
    }
}

/* An environment's functions that count bytes in *user. */
static void *count_alloc(void *user, size_t bytes)
{
    *(size_t *)user += bytes;
    return malloc(bytes);
}

static void count_free(void *user, void *block)
{
    (void)user;
    free(block);
}

/* Trainers of a model have equal weights after `steps`, 0 or 1, more steps. */
static void alike(mtt_trainer *a, mtt_trainer *b, int steps, const char *what)
{
    static float values[MOST], others[MOST];
    int64_t shape[2];
    int i;
    if (steps) step(a), step(b);
    for (i = 0; mtt_parameter(a, i, shape); i++) {
        size_t bytes = (size_t)(shape[0] * (shape[1] ? shape[1] : 1)) * sizeof(float);
        check(!mtt_parameter_get(a, i, values) && !mtt_parameter_get(b, i, others), "%s", env.error);
        check(!memcmp(values, others, bytes), "%s: parameter %d after %d steps", what, i, steps);
    }
}

/* Loading gives the weights that mtt_parameter_set gives, and forgets the training before. It takes no host
   memory beyond a kilobyte. So do trainers whose weights began as zeros, and generators. */
static void loads(mtt_model *m, mtt_policy policy)
{
    static float values[MOST];
    mtt_trainer *used = make(mtt_model_describe(m), policy, 7), *set = make(mtt_model_describe(m), policy, 7);
    mtt_optim_desc zero = {.lr = 1e-2f, .seed = 7, .zero_weights = 1};
    mtt_generator_desc desc = {.context = LENGTH};
    mtt_generator *generator = NULL;
    mtt_trainer *zeros = NULL;
    size_t taken = 0;
    const char *name;
    int i;
    step(used);
    check(!mtt_trainer_create(&env, mtt_model_describe(m), &policy, &zero, mtt_cpu_backend(), BATCH, LENGTH,
                              &zeros) &&
              !mtt_parameter_get(zeros, 0, values) && values[0] == 0 &&
              !mtt_generator_create(&env, mtt_model_describe(m), &desc, mtt_cpu_backend(), &generator), "%s",
          env.error);
    env.alloc = count_alloc, env.free = count_free, env.user = &taken;
    check(!mtt_trainer_load(used, m) && !mtt_trainer_load(zeros, m) &&
              !mtt_trainer_load(mtt_generator_trainer(generator), m),
          "%s", env.error);
    env.alloc = NULL, env.free = NULL;
    check(taken <= 1024 && mtt_trainer_step(used) == 0, "a load takes %zu bytes of the host", taken);
    for (i = 0; (name = mtt_parameter(set, i, NULL)); i++)
        check(!mtt_model_read(m, name, values) && !mtt_parameter_set(set, i, values), "%s", env.error);
    alike(used, set, 0, "loaded");
    alike(zeros, set, 0, "loaded to zeros");
    if (policy.precision == MTT_FP32) alike(&generator->trainer, set, 0, "a generator");
    alike(used, set, 1, "loaded");
    step(zeros);
    alike(zeros, set, 0, "loaded to zeros, a step later");
    mtt_generator_destroy(generator);
    mtt_trainer_destroy(zeros);
    mtt_trainer_destroy(used);
    mtt_trainer_destroy(set);
}

static void folders(void)
{
    static const char *const types[] = {"F32", "F16", "BF16"};
    static const char *const prefixes[][2] = {{"", "transformer."}, {"", "model."}, {"", "model."}};
    const mtt_policy policies[] = {{0}, {.precision = MTT_BF16}, {.precision = MTT_FP16, .accumulate = 2},
                                   {.precision = MTT_BF16, .state = MTT_STATE_COMPACT},
                                   {.state = MTT_STATE_COMPACT}};
    int family, type, i, k;
    for (family = 0; family < 3; family++)
        for (type = 0; type < 3; type++)
            for (i = 0; i < 2; i++, new_case()) {
                mtt_model_desc m = model_of(family), resolved;
                mtt_trainer *t = make(&m, policies[0], 3);
                mtt_model *model = NULL;
                int shards = i ? 3 : 1;
                char index[4096] = "{'metadata': {}, 'weight_map': {";
                mtt_model_resolve(&env, &m, &resolved);
                step(t);
                dtype = types[type];
                prefix = prefixes[family][i];
                list(t, &resolved);
                put_text(in("config.json"), CONFIGS[family]);
                for (k = 0; k < shards; k++) {
                    char name[40];
                    snprintf(name, sizeof(name), shards > 1 ? "shard%d.safetensors" : "model.safetensors", k);
                    put_tensors(in(name), k, shards);
                    snprintf(index + strlen(index), 200, "%s'%.99s': '%s'", k ? ", " : "", tensors[k].name,
                             name);
                }
                strcat(index, "}}");
                if (shards > 1) put_text(in("model.safetensors.index.json"), index);
                check(!mtt_model_open(&env, folder, &model), "family %d: %s", family, env.error);
                check(!memcmp(mtt_model_describe(model), &resolved, sizeof(resolved)), "family %d", family);
                same(t, model, types[type], "a folder");
                check(!mtt_model_tokenizer(model), "a tokenizer");
                if (!type)
                    for (k = 0; k < (int)MTT__LENGTH(policies); k++) loads(model, policies[k]);
                check(mtt_model_read(model, "h.2.ln_1.weight", NULL) == MTT_E_ARGUMENT &&
                      strstr(env.error, "no parameter h.2"), "%s", env.error);
                mtt_model_close(model);
                mtt_trainer_destroy(t);
            }
    dtype = "F32";
    prefix = "";
}

/* Parameters of more than a piece, whose rows pieces cut. */
static void pieces(void)
{
    static const char *const LARGE[] = {
        "{'model_type': 'gpt2', 'vocab_size': 1000, 'n_positions': 12, 'n_embd': 72, 'n_layer': 1, 'n_head': "
        "3, 'n_inner': 1000}",
        "{'model_type': 'llama', 'vocab_size': 1000, 'max_position_embeddings': 12, 'hidden_size': 72, "
        "'intermediate_size': 504, 'num_hidden_layers': 1, 'num_attention_heads': 3, '"
        "num_key_value_heads': 1}"};
    const mtt_policy compact = {.precision = MTT_BF16, .state = MTT_STATE_COMPACT}, plain = {0};
    int family;
    for (family = 0; family < 2; family++, new_case()) {
        mtt_model_desc m = model_of(family), resolved;
        mtt_model *model = NULL;
        mtt_trainer *t;
        m.layers = 1, m.heads = 3, m.heads_kv = family ? 1 : 3, m.d_model = 72, m.vocab = 1000;
        m.d_ff = family ? 504 : 1000;
        t = make(&m, plain, 3);
        mtt_model_resolve(&env, &m, &resolved);
        list(t, &resolved);
        put_text(in("config.json"), LARGE[family]);
        put_tensors(in("model.safetensors"), 0, 1);
        check(!mtt_model_open(&env, folder, &model), "%s", env.error);
        same(t, model, "F32", "a large folder");
        loads(model, plain);
        loads(model, compact);
        mtt_model_close(model);
        mtt_trainer_destroy(t);
    }
}

static void checkpoints(void)
{
    int k;
    for (k = 0; k < 4; k++, new_case()) {
        mtt_model_desc m = model_of(k % 3), other;
        mtt_policy policy = {.precision = MTT_BF16, .window = 5, .state = k % 2 ? MTT_STATE_COMPACT : 0};
        mtt_model *model = NULL;
        mtt_trainer *t;
        int window, seq_len;
        if (k == 3) m.norm_place = MTT_NORM_POST, m.rotary_interleaved = 1, m.no_biases = 0;
        other = m;
        t = make(&m, policy, 3);
        step(t);
        check(!mtt_save(t, in("c.safetensors"), NULL), "%s", env.error);
        check(!mtt_model_open(&env, in("c.safetensors"), &model), "%s", env.error);
        same(t, model, "F32", "a checkpoint");
        mtt_model_training(model, &window, &seq_len);
        check(window == 5 && seq_len == 0 && !mtt_model_tokenizer(model), "window %d, %d", window, seq_len);
        loads(model, policy);
        mtt_trainer_destroy(t);
        other.d_ff += 8;
        t = make(&other, policy, 3);
        check(mtt_trainer_load(t, model) == MTT_E_MISMATCH && strstr(env.error, "d_ff is "), "%s", env.error);
        mtt_trainer_destroy(t);
        mtt_model_close(model);
    }
}

/* ---- settings ---- */

#define LLAMA3 "'rope_type': 'llama3', 'low_freq_factor': 1, 'high_freq_factor': 4"

static void refused(int family, const char *path, const char *words)
{
    mtt_model *model = NULL;
    mtt_status status;
    *env.error = 0;
    status = mtt_model_open(&env, path, &model);
    check(status && status != MTT_E_ARGUMENT && !model && strstr(env.error, words),
          "family %d: \"%s\" (%d) has not \"%s\"", family, env.error, (int)status, words);
    if (model) mtt_model_close(model);
    new_case();
}

static void refusals(void)
{
    static const struct { int family; const char *from, *to, *words; } CASES[] = {
        {1, "'llama'", "'mistral'", "model_type is \"mistral\", but must be \"gpt2\""},
        {1, "'model_type'", "'type'", "model_type is missing"},
        {1, "'silu'", "'gelu'", "hidden_act is \"gelu\""},
        {0, "gelu_new", "relu", "activation_function is \"relu\""},
        {1, "'rope_scaling': null", "'rope_scaling': {'type': 'linear'}", "rope_scaling.type is \"linear\""},
        {1, "'rope_scaling': null", "'rope_parameters': {'type': 'linear', 'factor': 4}",
         "rope_parameters.type is \"linear\""},
        {2, "'rope_type': 'default'", "'type': 'dynamic'", "rope_parameters.type is \"dynamic\""},
        {1, "'rope_scaling': null", "'rope_scaling': {'rope_type': null, 'type': 'llama3'}",
         "rope_scaling.rope_type is null"},
        {1, "'rope_scaling': null", "'rope_scaling': 'linear'", "rope_scaling is \"linear\""},
        {1, "'rope_scaling': null", "'rope_parameters': []", "rope_parameters is []"},
        {1, "'rope_scaling': null", "'\\u0072ope_scaling': {'t\\u0079pe': 'yarn'}", "type is \"yarn\""},
        {1, "'rope_scaling': null", "'rope_scaling': {'rope_type': 'llama3'}",
         "rope_scaling.factor is missing, but must be a number from 1 to 1000"},
        {1, "'rope_scaling': null", "'rope_scaling': {" LLAMA3 ", 'factor': null}", ".factor is null"},
        {1, "'rope_scaling': null", "'rope_scaling': {" LLAMA3 ", 'factor': 0.5}", ".factor is 0.5"},
        {1, "'rope_scaling': null", "'rope_scaling': {'type': 'llama3', 'factor': 8, 'low_freq_factor': 1}",
         "rope_scaling.high_freq_factor is missing"},
        {2, "'rope_type': 'default'", LLAMA3 ", 'factor': '8'", "rope_parameters.factor is \"8\""},
        {2, "'rope_type': 'default'", LLAMA3 ", 'factor': 8, 'original_max_position_embeddings': null",
         "original_max_position_embeddings is null"},
        {1, "'rope_scaling': null",
         "'rope_scaling': {'type': 'llama3', 'factor': 8, 'low_freq_factor': 4, 'high_freq_factor': 4}",
         "rotary_high high_freq_factor"},
        {1, "500000.0", "null", "rope_theta is null"},
        {2, "500000.0", "null", "rope_parameters.rope_theta is null"},
        {1, "'rope_scaling': null", "'partial_rotary_factor': 1.5", "partial_rotary_factor is 1.5"},
        {2, "'rope_type': 'default'", "'full_attention': {'rope_theta': 1e4}", ".full_attention is {"},
        {2, "'default'", "'yarn'", "rope_parameters.rope_type is \"yarn\""},
        {2, "'rope_type': 'default'", "'partial_rotary_factor': 0.5", "partial_rotary_factor is 0.5"},
        {2, "'use_sliding_window': false", "'use_sliding_window': true", "use_sliding_window is true"},
        {2, "'use_sliding_window': false", "'use_sliding_window': null", "use_sliding_window is null"},
        {2, "'full_attention']", "'sliding_attention']", "layer_types must be full_attention in 2"},
        {2, ", 'full_attention']", "]", "layer_types must"},
        {2, "'full_attention']", "'full_attention', 1]", "layer_types must"},
        {1, "'silu'", "'silu', 'layer_types': ['full_attention', 'sliding_attention']", "layer_types must"},
        {1, "'silu'", "'silu', 'sliding_window': 8", "sliding_window is 8"},
        {1, "'silu'", "'silu', 'is_causal': false", "is_causal is false"},
        {0, "'gelu_new'", "'gelu_new', 'is_causal': null", "is_causal is null"},
        {0, "'gelu_new'", "'gelu_new', 'per_layer_config': {'1': {'n_inner': 80}}", "per_layer_config is {"},
        {0, "'gelu_new'", "'gelu_new', 'transformers_weights': 'x.st'", "transformers_weights is \"x"},
        {0, "'gelu_new'", "'gelu_new', 'scale_attn_weights': null", "scale_attn_weights is null"},
        {0, "'gelu_new'", "'gelu_new', 'tie_word_embeddings': null", "tie_word_embeddings is null"},
        {0, "'gelu_new'", "'gelu_new', 'hidden_size': 32", "wte.weight is of another shape"},
        {2, "'silu'", "'silu', 'attention_bias': true", "attention_bias is true"},
        {1, "'attention_bias': false", "'attention_bias': true", "attention_bias and mlp_bias differ"},
        {1, "'mlp_bias': false", "'mlp_bias': true", "attention_bias and mlp_bias differ"},
        {1, "'silu'", "'silu', 'quantization_config': {}", "quantization_config is {}"},
        {1, "'hidden_size': 32", "'width': 32", "a head is 1024 wide"},
        {2, "'head_dim': 16", "'dim': 16", "of another shape, expected are 512 x 32"},
        {2, "'head_dim': 16", "'head_dim': null", "head_dim is null, but must be an integer from 8 to 256"},
        {2, "'num_key_value_heads': 2", "'kv': 2", "heads_kv num_key_value_heads"},
        {1, "'hidden_size': 32", "'hidden_size': null", "hidden_size is null, but must be an integer"},
        {1, "'hidden_size': 32", "'hidden_size': 32.0", "hidden_size is 32.0, but must be an integer"},
        {1, "4, 'num_key_value_heads': 2, 'head_dim': null", "3, 'num_key_value_heads': 3, 'head_dim': 8",
         "hidden_size is 32, but must be a multiple of 3 heads"},
        {0, "'n_head': 2", "'n_head': 3", "n_embd is 16, but must be a multiple of 3 heads"},
        {1, "'hidden_size': 32", "'hidden_size': '32'", "hidden_size is \"32\""},
        {1, "'hidden_size': 32", "'hidden_size': 32.5", "hidden_size is 32.5"},
        {1, "'hidden_size': 32", "'hidden_size': -32", "hidden_size is -32"},
        {1, "'hidden_size': 32", "'hidden_size': 1e999", "hidden_size is 1e999"},
        {1, "'hidden_size': 32", "'hidden_size': 4294967328", "hidden_size is 4294967328"},
        {1, "'hidden_size': 32", "'hidden_size': 36", "must be a multiple of 8"},
        {1, "'intermediate_size': 24", "'intermediate_size': 20", "d_ff is 20"},
        {1, "'hidden_size': 32", "'hidden_size': 64", "model.embed_tokens.weight is of another shape"},
        {0, "'n_layer': 2", "'n_layer': 3", "transformer.h.2.ln_1.weight is missing"},
        {0, "'n_layer': 2", "'n_layer': 1", "no tensor h.1."},
        {0, "'n_layer': 2", "'n_layer': 2, 'n_layer': 2", "a key occurs twice"},
        {0, "[{}]}", "[{}]", "expected a comma or }"},
        {0, "[{}]}", "[{}]} x", "something follows"},
        {0, "{'model_type'", "[{'model_type'", "expected one object"},
        {2, "'tie_word_embeddings': true", "'tie_word_embeddings': false", "lm_head.weight is missing"},
    };
    size_t i;
    for (i = 0; i < MTT__LENGTH(CASES); i++) {
        put_family(CASES[i].family, CASES[i].from, CASES[i].to);
        refused(CASES[i].family, folder, CASES[i].words);
    }
}

/* Settings that transformers reads in several places and spellings, with its defaults: the fields that differ
   from the family's model. */
static void variants(void)
{
    static const struct { int family; const char *from, *to, *fields; } CASES[] = {
        {1, "'rope_scaling': null", "'rope_scaling': {" LLAMA3 ", 'factor': 8}",
         "rotary_factor 8 rotary_original 12"},
        {1, "'rope_scaling': null", "'rope_scaling': {'type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.5"
         ", 'high_freq_factor': 3, 'original_max_position_embeddings': 4096.0}",
         "rotary_factor 8 rotary_low 1.5 rotary_high 3 rotary_original 4096"},
        {1, "'rope_scaling': null", "'rope_parameters': {" LLAMA3 ", 'factor': 2, 'rope_theta': 1e4}",
         "rotary_factor 2 rotary_original 12 rotary_theta 10000"},
        {2, "'rope_type': 'default'", LLAMA3 ", 'factor': 4, 'original_max_position_embeddings': 64",
         "rotary_factor 4 rotary_original 64"},
        {2, "'rope_type': 'default'", "'type': 'llama3', 'rope_type': 'default', 'factor': 'x'", ""},
        {2, "'rope_parameters'", "'rope_scaling': {" LLAMA3 ", 'factor': 4}, 'rope_parameters'",
         "rotary_factor 4 rotary_original 12 rotary_theta 10000"},
        {2, "'rope_parameters'", "'rope_scaling': {}, 'rope_theta': 1, 'rope_parameters'", ""},
        {1, "'rope_scaling': null", "'rope_scaling': {" LLAMA3 ", 'factor': 8, "
         "'original_max_position_embeddings': 64}, 'original_max_position_embeddings': 32",
         "rotary_factor 8 rotary_original 32"},
        {1, "'rms_norm_eps': 1e-06, ", "", ""},
        {2, "'max_position_embeddings': 12, ", "", "max_seq 32768"},
        {1, "'max_position_embeddings': 12, ", "", "max_seq 2048"},
        {1, "'rope_theta': 500000.0, ", "", "rotary_theta 10000"},
        {1, "'hidden_act': 'silu', ", "", ""},
        {0, "'layer_norm_epsilon': 1e-05, ", "", ""},
        {0, "'n_layer': 2", "'num_hidden_layers': 2, 'n_layer': 5", ""},
    };
    char fields[200], *name, *value;
    size_t i;
    for (i = 0; i < MTT__LENGTH(CASES); i++) {
        mtt_model_desc m = model_of(CASES[i].family), resolved;
        mtt_model *model = NULL;
        put_family(CASES[i].family, CASES[i].from, CASES[i].to);
        snprintf(fields, sizeof(fields), "%s", CASES[i].fields);
        for (name = strtok(fields, " "); name && (value = strtok(NULL, " ")); name = strtok(NULL, " ")) {
            const mtt_field *f = mtt_model_fields();
            while (strcmp(f->name, name)) f++;
            mtt__field_set(&m, f, atof(value));
        }
        mtt_model_resolve(&env, &m, &resolved);
        check(!mtt_model_open(&env, folder, &model), "%s: %s", CASES[i].to, env.error);
        check(!model || !mtt__model_compare(&env, mtt_model_describe(model), &resolved, "the test", ""),
              "%s: %s", CASES[i].to, env.error);
        check(!model || mtt_model_describe(model)->max_seq == resolved.max_seq, "max_seq of %s", CASES[i].to);
        mtt_model_close(model);
        new_case();
    }
}

/* A head in the file beside a tied embedding: a copy is tied, another one is not, and none is dropped. */
static void heads(void)
{
    int family, k;
    for (family = 0; family < 3; family++)
        for (k = 0; k < 4; k++) {
            mtt_model *model = NULL;
            tensor *head = NULL, *table = NULL;
            float values[MOST];
            list_tied(family, &head, &table);
            if (k != 1) memcpy(head->values, table->values, size_of(table) * sizeof(float));
            if (k == 2) head->values[size_of(table) - 1] += 0.125f;
            if (k == 3) head->dtype = "I64", bits = 64;
            put_tensors(in("model.safetensors"), 0, 1);
            if (k == 3) refused(family, folder, "lm_head.weight has the type I64");
            else {
                check(!mtt_model_open(&env, folder, &model), "%s", env.error);
                check(mtt_model_describe(model)->tied_head == !k, "family %d, head %d", family, k);
                if (k)
                    check(!mtt_model_read(model, "lm_head.weight", values) &&
                          !memcmp(values, head->values, size_of(table) * sizeof(float)), "another head");
                mtt_model_close(model);
            }
            bits = 32;
            new_case();
        }
}

/* A head that config.json ties has the embedding's values in another type, in one file or several; -0 is 0.
   The same values in F64 are tied, too, though no weight may have that type. Another last value is another
   head. */
static void tied_by_value(void)
{
    static const char *const TYPES[][2] = {{"F32", "F16"},  {"F32", "BF16"}, {"F16", "F32"}, {"BF16", "F32"},
                                           {"F16", "BF16"}, {"F32", "F32"},  {"F32", "F64"}, {"BF16", "F64"}};
    int family, k, other, shards;
    for (family = 0; family < 3; family++)
        for (k = 0; k < (int)MTT__LENGTH(TYPES); k++)
            for (other = 0; other < 3; other++) {
                mtt_model *model = NULL;
                tensor *head = NULL, *table = NULL;
                char index[1000], name[40];
                size_t i, count;
                int n, wide = !strcmp(TYPES[k][1], "F64");
                list_tied(family, &head, &table);
                count = size_of(table);
                for (i = 0; i < count; i++) /* exact in all types */
                    head->values[i] = table->values[i] = (float)below(255) / 128 - 1;
                table->values[0] = 0, head->values[0] = -0.0f;
                if (other == 1) head->values[count - 1] += 0.25f;
                table->dtype = TYPES[k][0], head->dtype = TYPES[k][1];
                bits = wide ? 64 : 32;
                for (shards = other < 2 ? 1 : 2; shards > 1 && (head - table) % shards == 0;) shards++;
                snprintf(index, sizeof(index), "{'weight_map': {");
                for (n = 0; n < shards; n++) { /* one file, or the two tensors in different ones */
                    snprintf(name, sizeof(name), shards > 1 ? "shard%d.safetensors" : "model.safetensors", n);
                    put_tensors(in(name), n, shards);
                    snprintf(index + strlen(index), 60, "%s'%d': '%s'", n ? ", " : "", n, name);
                }
                strcat(index, "}}");
                if (shards > 1) put_text(in("model.safetensors.index.json"), index);
                if (wide && other == 1) refused(family, folder, "lm_head.weight has the type F64");
                else
                    check(!mtt_model_open(&env, folder, &model) &&
                              mtt_model_describe(model)->tied_head == (other != 1),
                          "family %d, %s and %s, other %d: %s", family, TYPES[k][0], TYPES[k][1], other,
                          env.error);
                mtt_model_close(model);
                bits = 32;
                new_case();
            }
}

/* Tensors of any dtype that are not used; the same dtypes as weights are refused. */
static void dtypes(void)
{
    static const struct { const char *name; int bits; } DTYPES[] = {
        {"BOOL", 8}, {"U8", 8}, {"I8", 8}, {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
        {"F8_E5M2FNUZ", 8}, {"I16", 16}, {"U16", 16}, {"I32", 32}, {"U32", 32}, {"C64", 64}, {"F64", 64},
        {"I64", 64}, {"U64", 64}, {"F4", 4}, {"F6_E2M3", 6}, {"F6_E3M2", 6}};
    mtt_model *model = NULL;
    float mask[64] = {0};
    char words[80];
    size_t i;
    int wrong;
    put_text(in("config.json"), CONFIGS[0]);
    for (i = 0; i < MTT__LENGTH(DTYPES); i++)
        for (wrong = 0; wrong < 3; wrong++) {
            list_family(0, 0);
            bits = DTYPES[i].bits;
            add("h.0.attn.bias", mask, 8, 8, 0, 8, 0);
            tensors[tensor_count - 1].dtype = DTYPES[i].name;
            if (wrong == 1) bits += 2;                                     /* offsets do not match */
            if (wrong == 2) tensors[tensor_count - 2].dtype = DTYPES[i].name; /* a weight */
            put_tensors(in("model.safetensors"), 0, 1);
            snprintf(words, sizeof(words), "%s has the type %s: save", tensors[tensor_count - 2].name,
                     DTYPES[i].name);
            if (wrong) refused(0, folder, wrong > 1 ? words : "data_offsets that do not match");
            else check(!mtt_model_open(&env, folder, &model), "%s: %s", DTYPES[i].name, env.error);
            if (!wrong) mtt_model_close(model);
        }
    list_family(0, 0);
    add("rotary_emb.inv_freq", mask, 0, 8, 0, 8, 0); /* transformer.: of no layer */
    put_tensors(in("model.safetensors"), 0, 1);
    check(!mtt_model_open(&env, folder, &model), "frequencies of all layers: %s", env.error);
    mtt_model_close(model);
    list_family(0, 0);
    metadata = "\"__metadata__\":null,";
    put_tensors(in("model.safetensors"), 0, 1);
    check(!mtt_model_open(&env, folder, &model), "metadata null: %s", env.error);
    mtt_model_close(model);
    metadata = "";
    bits = 32;
}

/* Objects that no setting is in may be of any size, and as deep as the reader goes. */
static void large_objects(void)
{
    mtt_model *model = NULL;
    char *text = (char *)malloc(1 << 20);
    size_t n = (size_t)sprintf(text, "{\"id2label\": {\"0\": \"a\""), i;
    for (i = 1; i < 20000; i++) n += (size_t)sprintf(text + n, ", \"%zu\": \"LABEL_%zu\"", i, i);
    n += (size_t)sprintf(text + n, "}, \"task_specific_params\": {\"a\": {\"n_layer\": 9}}");
    for (i = 0; i < 300; i++) n += (size_t)sprintf(text + n, ", \"key%zu\": {\"model_type\": 1}", i);
    n += (size_t)sprintf(text + n, ", %s", CONFIGS[0] + 1);
    for (i = 0; i < n; i++)
        if (text[i] == '\'') text[i] = '"';
    write_file(in("config.json"), text, n);
    list_family(0, 0);
    put_tensors(in("model.safetensors"), 0, 1);
    check(!mtt_model_open(&env, folder, &model), "%s", env.error);
    mtt_model_close(model);
    free(text);
    new_case();
}

/* Faults of tensors, of the index and of paths, in a Llama's folder. */
static void wrong_files(void)
{
    static const struct { const char *map, *words; } INDEXES[] = {
        {"{'weight_map': {'a': '../model.safetensors'}}", "no / and no . in front"},
        {"{'weight_map': {'a': '/etc/passwd'}}", "no / and no . in front"},
        {"{'weight_map': {'a': ''}}", "1 to 255 bytes"},
        {"{'weight_map': {'a': 'x\\u0000y'}}", "1 to 255 bytes"},
        {"{'weight_map': {'a': 'absent.safetensors'}}", "absent.safetensors: cannot read it"},
        {"{'weight_map': {'a': 'one.safetensors', 'b': 'two.safetensors'}}", "comes twice"},
        {"{'weight_map': {'a': 'one.safetensors'", "expected a comma or }"},
        {"{'weight_map': ['one.safetensors']}", "expected an object"},
        {"{}", "model.embed_tokens.weight is missing"},
    };
    mtt_model_desc m = model_of(1), resolved;
    mtt_trainer *t = make(&m, (mtt_policy){0}, 3), *twin = make(&m, (mtt_policy){0}, 3);
    mtt_model *model = NULL;
    static float values[MOST];
    float *kept;
    size_t i;
    mtt_model_resolve(&env, &m, &resolved);
    put_text(in("config.json"), CONFIGS[1]);
    for (i = 0; i < 6; i++) {
        list(t, &resolved);
        kept = tensors[3].values;
        if (i == 0) tensors[3].dtype = NULL;
        if (i == 1) tensors[3].dtype = "I32";
        if (i == 2) tensors[3].shape[0] /= 2, tensors[3].shape[1] *= 2;
        if (i == 3) strcpy(tensors[3].name, "layers.0.self_attn.rotary_emb.other");
        if (i == 4) snprintf(tensors[4].name, 100, "model.%.90s", tensors[3].name);
        if (i == 5) kept[1] = NAN;
        put_tensors(in("model.safetensors"), 0, 1);
        if (i == 0 || i == 3) refused(1, folder, "layers.0.self_attn.k_proj.weight is missing");
        if (i == 1) refused(1, folder, "layers.0.self_attn.k_proj.weight has the type I32");
        if (i == 2) refused(1, folder, "layers.0.self_attn.k_proj.weight is of another shape");
        if (i == 4) refused(1, folder, "layers.0.self_attn.k_proj.weight comes twice");
        if (i < 5) continue;
        check(!mtt_model_open(&env, folder, &model), "%s", env.error);
        check(mtt_model_read(model, "h.0.attn.c_attn.weight", values) == MTT_E_FORMAT &&
              strstr(env.error, "not finite"), "%s", env.error);
        step(t), step(twin);
        check(mtt_trainer_load(t, model) == MTT_E_FORMAT && mtt_trainer_step(t) == 1, "a load of NaN");
        alike(t, twin, 0, "a refused load");
        alike(t, twin, 1, "a refused load");
        mtt_model_close(model);
    }
    list(t, &resolved);
    put_tensors(in("one.safetensors"), 0, 1);
    put_tensors(in("two.safetensors"), 1, 2);
    for (i = 0; i < MTT__LENGTH(INDEXES); i++) {
        put_text(in("model.safetensors.index.json"), INDEXES[i].map);
        refused(1, folder, INDEXES[i].words);
    }
    unlink(in("model.safetensors.index.json"));
    strcpy(tensors[3].name, "base_model.model.layers.0.self_attn.q_proj.lora_A.weight");
    put_tensors(in("adapter_model.safetensors"), 0, 1);
    refused(1, in("adapter_model.safetensors"), "is an adapter, without the weights of its model");
    put_text(in("adapter_config.json"), "{'base_model_name_or_path': null}");
    refused(1, folder, "has neither"); /* config.json is there */
    unlink(in("config.json"));
    refused(1, folder, "is an adapter, without the weights of its model: give the merged file");
    unlink(in("adapter_config.json"));
    refused(1, folder, "config.json: cannot read it");
    put_text(in("config.json"), CONFIGS[1]);
    refused(1, folder, "has neither model.safetensors nor");
    refused(1, in("one.safetensors"), "give a checkpoint of mtt_save, or a folder");
    refused(1, in("absent"), "cannot open it");
    refused(1, "", "cannot open it");
    mtt_trainer_destroy(twin);
    mtt_trainer_destroy(t);
}

/* Changed bytes: an error that says why, or a model that can be read. */
static void damage(void)
{
    static const char *const files[] = {"config.json", "model.safetensors.index.json", "shard0.safetensors",
                                        "c.safetensors"};
    static float values[MOST];
    mtt_form_tensor f;
    int turn, opened = 0;
    for (turn = 0; turn < 2000; turn += each()) {
        const char *path = in(files[turn % 4]);
        size_t bytes, at, header = 8;
        char *whole = read_file(path, &bytes), *bad = (char *)malloc(bytes);
        mtt_model *model = NULL;
        int64_t cursor = 0;
        memcpy(bad, whole, bytes);
        if (turn % 4 > 1) memcpy(&header, whole, 8), header += 8;
        else header = bytes;
        at = (size_t)below((int)header);
        bad[at] = (char)(below(2) ? below(256) : "0123456789\"{}[],:"[below(17)]);
        write_file(path, bad, below(20) ? bytes : at);
        *env.error = 0;
        if (mtt_model_open(&env, turn % 4 == 3 ? path : folder, &model))
            check(*env.error && !model, "%s, byte %zu: no reason", path, at);
        else {
            opened++;
            while (mtt_form_next(mtt_model_describe(model), MTT_FORM_MTT, &cursor, &f))
                check(!mtt_model_read(model, f.parameter, values) || *env.error, "no reason");
            mtt_model_close(model);
        }
        write_file(path, whole, bytes);
        free(whole);
        free(bad);
    }
    check(opened > 0, "no change was harmless");
}

/* Llama 3.2's turns, as transformers has them. */
static void scaled(void)
{
    static const struct { int pair; double step; } CASES[] = {
        {0, 1}, {5, 0.128687382}, {14, 0.00321144611}, {15, 0.00129054801},
        {16, 0.000429556705}, {17, 9.70828623e-05}, {18, 1.94616387e-05},
        {20, 8.57025589e-06}, {31, 9.41830649e-08}};
    mtt_model_desc m = {.d_model = 512, .rotary_theta = 5e5f, .rotary_factor = 32};
    size_t i;
    check(!mtt_model_resolve(&env, &m, &m), "%s", env.error);
    for (i = 0; i < MTT__LENGTH(CASES); i++)
        check(fabs(mtt_rotary_step(&m, CASES[i].pair) / CASES[i].step - 1) < 1e-6, "pair %d: %.9g",
              CASES[i].pair, mtt_rotary_step(&m, CASES[i].pair));
}

/* The folder of a sharded Llama that damage() changes. */
static void leave_folder(void)
{
    list_family(1, 0);
    put_text(in("config.json"), CONFIGS[1]);
    put_tensors(in("shard0.safetensors"), 0, 2);
    put_tensors(in("shard1.safetensors"), 1, 2);
    put_text(in("model.safetensors.index.json"),
             "{'weight_map': {'a': 'shard0.safetensors', 'b': 'shard1.safetensors'}}");
}

int main(int argc, char **argv)
{
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    mtt_wait_passively(argv);
    if (!open_folder()) return finish();
    folders();
    pieces();
    checkpoints();
    refusals();
    variants();
    heads();
    tied_by_value();
    dtypes();
    large_objects();
    wrong_files();
    scaled();
    leave_folder();
    damage();
    forget();
    close_folder();
    return finish();
}
