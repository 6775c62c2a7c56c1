/* test_generate.c - generation with a cache gives, bit for bit, the logits and the text of full forward
   passes with flash attention: for all options of the model, and however rows meet in a pass. Sampling, stop
   strings, failures. */
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include "../test.h"

/* The environment counts blocks, and fails the one that `fails_at` says. The backend counts its bytes. */
static int live_blocks, allocations, fails_at = -1;
static size_t taken_bytes;
static mtt_backend backend;

static mtt_status counted_arena(void *context, mtt_place place, size_t bytes, void **block)
{
    taken_bytes += bytes;
    return mtt_cpu_backend()->alloc(context, place, bytes, block);
}

static void *counted_alloc(void *user, size_t bytes)
{
    (void)user;
    if (allocations++ == fails_at) return NULL;
    live_blocks++;
    return malloc(bytes);
}

static void counted_free(void *user, void *block)
{
    (void)user;
    live_blocks -= block != NULL;
    free(block);
}

static mtt_env env = {counted_alloc, counted_free, NULL, ""};

#define must(call)                                                                                \
    do {                                                                                          \
        mtt_status must_status = (call);                                                          \
        check(!must_status, "%s: %s", #call, env.error);                                          \
        if (must_status) exit(finish());                                                          \
    } while (0)

static void refused(mtt_status status, const char *text)
{
    check(status == MTT_E_ARGUMENT && strstr(env.error, text), "\"%s\", and not \"%s\"", env.error, text);
}

/* A model of any options. */
static mtt_model_desc draw_model(void)
{
    static const int groups[] = {1, 2, 3};
    int kv = 1 + below(3), group = groups[below(3)];
    mtt_model_desc m = {.layers = 1 + below(3), .vocab = 40 + below(200), .max_seq = 512};
    m.heads = kv * group;
    m.heads_kv = kv;
    m.d_head = 8 * (1 + below(5));
    m.d_model = 8 * (2 + below(10));
    m.d_ff = 8 * (1 + below(20));
    m.norm = (mtt_norm_form)below(2);
    m.norm_place = (mtt_norm_place)below(3);
    m.mlp = (mtt_mlp)below(4);
    m.no_biases = below(2);
    m.positions = (mtt_positions)below(4);
    m.rotary_interleaved = below(2);
    m.rotary_factor = (float)(1 + below(2) * below(32));
    m.qk_norm = below(2);
    m.tied_head = below(2);
    m.no_head_bias = below(2);
    m.dropout = below(2) ? 0.1f : 0;
    return m;
}

/* A trainer with drawn weights, large enough to make a text of many ids, and a generator with the same. */
static void make_pair(const mtt_model_desc *model, const mtt_generator_desc *desc, mtt_trainer **trainer,
                      mtt_generator **generator)
{
    mtt_policy policy = {desc->precision, .attention = MTT_ATTENTION_FLASH, .window = desc->window};
    int eights = !(model->d_model % 16 || model->d_ff % 16 || model->heads_kv * model->d_head % 16);
    mtt_optim_desc optim = {.seed = random_bits()};
    int64_t shape[2], i;
    if (desc->precision == MTT_BF16 && eights) policy.precision = MTT_FP8; /* which evaluates as BF16 */
    must(mtt_trainer_create(&env, model, &policy, &optim, mtt_cpu_backend(), 1, desc->context, trainer));
    taken_bytes = 0;
    must(mtt_generator_create(&env, model, desc, &backend, generator));
    for (int k = 0; mtt_parameter(*trainer, k, shape); k++) {
        int64_t count = shape[0] * (shape[1] ? shape[1] : 1);
        float *values = (float *)malloc((size_t)count * sizeof(float));
        must(mtt_parameter_get(*trainer, k, values));
        for (i = 0; i < count; i++) values[i] = values[i] * 6 + (float)(below(2001) - 1000) * 2e-4f;
        must(mtt_parameter_set(*trainer, k, values));
        check(!strcmp(mtt_parameter(mtt_generator_trainer(*generator), k, shape),
                      mtt_parameter(*trainer, k, shape)),
              "parameter %d has two names", k);
        must(mtt_parameter_set(mtt_generator_trainer(*generator), k, values));
        free(values);
    }
}

/* Tokens come in pieces of any length, to some sequences at a time. */
static void test_logits(int number)
{
    enum { BATCH = 4, CONTEXT = 90 };
    mtt_model_desc model = draw_model();
    mtt_generator_desc desc = {.precision = number % 3 ? MTT_FP32 : MTT_BF16,
                               .window = below(2) ? 1 + below(CONTEXT) : 0,
                               .batch = 1 + below(BATCH),
                               .context = 1 + below(CONTEXT),
                               .chunk = 1 + below(below(2) ? 8 : CONTEXT)};
    if (number % 8 == 0) model.d_model *= 6, model.d_ff *= 4;
    int32_t ids[BATCH][CONTEXT];
    const int32_t *tokens[BATCH];
    int known[BATCH] = {0}, counts[BATCH], vocab = model.vocab, calls = 0;
    float *logits = (float *)malloc(sizeof(float) * BATCH * (size_t)vocab);
    float *expected = (float *)malloc(sizeof(float) * (size_t)vocab);
    mtt_plan_report plan;
    mtt_trainer *trainer;
    mtt_generator *generator;
    make_pair(&model, &desc, &trainer, &generator);
    must(mtt_generator_plan(&env, &model, &desc, &plan));
    check(MTT__SEPARATE || plan.arena_bytes == taken_bytes, "model %d: %zu planned, %zu taken", number,
          plan.arena_bytes, taken_bytes);
    for (int i = 0; i < BATCH; i++)
        for (int k = 0; k < CONTEXT; k++) ids[i][k] = below(vocab);
    for (int done = 0; done < desc.batch && calls < 40; calls++) {
        for (int i = done = 0; i < desc.batch; i++) {
            int room = desc.context - known[i], most = below(3) ? 1 : 1 + below(30);
            counts[i] = below(4) ? most < room ? most : room : 0;
            tokens[i] = ids[i] + known[i];
            done += room == 0;
        }
        must(mtt_generator_append(generator, tokens, counts, logits));
        for (int i = 0; i < desc.batch; i++) {
            known[i] += counts[i];
            if (!counts[i]) continue;
            must(mtt_next_logits(trainer, ids[i], known[i], expected));
            check(!memcmp(expected, logits + (size_t)i * (size_t)vocab, sizeof(float) * (size_t)vocab),
                  "model %d: sequence %d: other logits after %d tokens", number, i, known[i]);
        }
        if (below(10)) continue;
        known[0] = below(known[0] + 1);
        must(mtt_generator_cut(generator, 0, known[0]));
    }
    free(logits);
    free(expected);
    mtt_trainer_destroy(trainer);
    mtt_generator_destroy(generator);
}

/* Plain attention rounds scores and probabilities to BF16, and a cache, like flash attention, does not: other
   bits, but no larger error. The reference is an FP32 trainer with the same weights, which BF16 can hold. */
static void test_plain(void)
{
    enum { CONTEXT = 64 };
    double squares[2] = {0, 0}; /* of errors: with plain attention, and with a cache */
    int same = 0;
    for (int i = 0; i < 12; i++) {
        mtt_model_desc model = draw_model();
        mtt_generator_desc desc = {.precision = MTT_BF16, .batch = 1, .context = CONTEXT, .chunk = 16};
        mtt_policy kinds[] = {{.precision = MTT_FP32}, {.precision = MTT_BF16}};
        mtt_optim_desc optim = {.seed = 1};
        mtt_trainer *trainer[2];
        mtt_generator *generator;
        int32_t ids[CONTEXT];
        const int32_t *tokens = ids;
        int count = 1 + below(CONTEXT);
        int64_t shape[2];
        float *logits = (float *)malloc(3 * sizeof(float) * (size_t)model.vocab);
        for (int k = 0; k < 2; k++)
            must(mtt_trainer_create(&env, &model, &kinds[k], &optim, mtt_cpu_backend(), 1, CONTEXT,
                                    &trainer[k]));
        must(mtt_generator_create(&env, &model, &desc, &backend, &generator));
        for (int k = 0; mtt_parameter(trainer[0], k, shape); k++) {
            int64_t size = shape[0] * (shape[1] ? shape[1] : 1);
            float *values = (float *)malloc((size_t)size * sizeof(float));
            must(mtt_parameter_get(trainer[0], k, values));
            for (int64_t v = 0; v < size; v++)
                values[v] = mtt__bits_float(mtt__float_bits(values[v] * 4) & 0xffff0000u);
            for (int r = 0; r < 2; r++) must(mtt_parameter_set(trainer[r], k, values));
            must(mtt_parameter_set(mtt_generator_trainer(generator), k, values));
            free(values);
        }
        for (int k = 0; k < CONTEXT; k++) ids[k] = below(model.vocab);
        for (int k = 0; k < 2; k++) must(mtt_next_logits(trainer[k], ids, count, logits + k * model.vocab));
        must(mtt_generator_append(generator, &tokens, &count, logits + 2 * model.vocab));
        for (int v = 0; v < model.vocab; v++)
            for (int k = 0; k < 2; k++)
                squares[k] += pow((double)logits[(k + 1) * model.vocab + v] - (double)logits[v], 2);
        same += !memcmp(logits + model.vocab, logits + 2 * model.vocab, sizeof(float) * (size_t)model.vocab);
        free(logits);
        for (int k = 0; k < 2; k++) mtt_trainer_destroy(trainer[k]);
        mtt_generator_destroy(generator);
    }
    check(same < 12, "plain attention has the bits of a cache");
    check(squares[1] <= 1.5 * squares[0] && squares[0] > 0, "errors of a cache are %.2f times those of plain "
          "attention", sqrt(squares[1] / squares[0]));
}

/* ---- text ---- */

enum { PROMPTS = 7, COUNT = 500 };

/* What each prompt has received. */
typedef struct received {
    int32_t ids[COUNT];
    char text[COUNT * 32];
    size_t bytes;
    int count, ends;
} received;
static received got[PROMPTS];

static int receive(void *user, int prompt, int32_t id, const char *text, size_t bytes)
{
    received *r = (received *)user + prompt;
    memcpy(r->text + r->bytes, text, bytes);
    r->bytes += bytes;
    if (id < 0) r->ends++;
    else r->ids[r->count++] = id;
    return 0;
}

/* A tokenizer of words and pieces of words, so that strings begin and end within tokens. */
static mtt_tokenizer *make_tokenizer(int vocab)
{
    static const char text[] = "the cat sat on the mat and that was that; then another cat came to the mat ";
    mtt_vocab_trainer *trainer;
    mtt_tokenizer *tokenizer;
    must(mtt_vocab_trainer_create(&env, NULL, &trainer));
    must(mtt_vocab_trainer_add(trainer, text, sizeof(text) - 1));
    must(mtt_vocab_trainer_finish(trainer, vocab, &tokenizer));
    mtt_vocab_trainer_destroy(trainer);
    return tokenizer;
}

/* The largest logit that a naive penalty leaves, or a draw. */
static int32_t next_id(const mtt_sampling *s, float *logits, int vocab, const int32_t *ids, int known,
                       int drawn)
{
    float penalty = s->repetition_penalty;
    for (int v = 0; v < vocab && penalty > 0; v++)
        for (int k = 0; k < known; k++)
            if (ids[k] == v) {
                logits[v] = logits[v] > 0 ? logits[v] / penalty : logits[v] * penalty;
                break;
            }
    return mtt_sample(logits, vocab, s, (uint64_t)drawn);
}

/* Ends the text before the first stop string in it. */
static int cut_at_stop(const mtt_generation *g, received *r)
{
    for (size_t at = 0; at < r->bytes; at++)
        for (int k = 0; k < g->stop_count; k++)
            if (r->bytes - at >= strlen(g->stops[k]) &&
                !memcmp(r->text + at, g->stops[k], strlen(g->stops[k]))) {
                r->bytes = at;
                return 1;
            }
    return 0;
}

/* 1 = an id ends a sequence, and is no part of it. */
static int is_end(const mtt_generation *g, const mtt_tokenizer *tokenizer, int32_t id)
{
    int ends = id == mtt_tokenizer_end_of_text(tokenizer);
    for (int k = 0; k < g->stop_id_count; k++) ends |= id == g->stop_ids[k];
    return ends;
}

/* The text of prompt number `number` by full passes over what the context has then: all, or after it was full
   the last half and what was drawn since. */
static void reference(mtt_trainer *trainer, const mtt_tokenizer *tokenizer, const mtt_generation *g,
                      int vocab, int context, int number, received *r)
{
    static int32_t ids[COUNT + 1000];
    int known = g->sizes[number], first = known > context ? known - context : 0;
    float *logits = (float *)malloc(sizeof(float) * (size_t)vocab);
    mtt_sampling s = g->sampling;
    s.seed += (uint64_t)number;
    memcpy(ids, g->prompts[number], sizeof(*ids) * (size_t)known);
    memset(r, 0, sizeof(*r));
    while (r->count < g->count) {
        size_t bytes;
        const char *text;
        if (known - first > context && g->full_context == MTT_CONTEXT_STOP) break;
        if (known - first > context) first = known - (context > 1 ? context / 2 : 1);
        must(mtt_next_logits(trainer, ids + first, known - first, logits));
        ids[known] = next_id(&s, logits, vocab, ids, known, r->count);
        if (is_end(g, tokenizer, ids[known])) break;
        text = mtt_tokenizer_bytes(tokenizer, ids[known], &bytes);
        if (text) memcpy(r->text + r->bytes, text, bytes), r->bytes += bytes;
        r->ids[r->count++] = ids[known++];
        if (cut_at_stop(g, r)) break;
    }
    free(logits);
}

/* Text of two letters, in tokens of up to 3, ends before the first stop string that is there in whole, also
   inside of what may become another. What waits is always the beginning of a stop string. */
static void test_stops(void)
{
    enum { LETTERS = 24, STOPS = 3 };
    int stopped_inside = 0;
    for (int i = 0; i < 2000; i++) {
        char text[LETTERS + 4], room[LETTERS + 4], stops[STOPS][8];
        const char *list[STOPS] = {stops[0], stops[1], stops[2]};
        received want = {.bytes = 0};
        mtt_generation g = {.stops = list, .stop_count = 1 + below(STOPS), .write = receive, .user = got};
        mtt__sequence q = {.number = 0};
        int stopped = 0, expected = 0, inside = 0;
        q.text = room;
        memset(got, 0, sizeof(*got));
        for (int k = 0; k < g.stop_count; k++) {
            int size = 1 + below(6);
            for (int l = 0; l < size; l++) stops[k][l] = (char)('a' + below(2));
            stops[k][size] = 0;
        }
        for (int known = 0; known < LETTERS && !stopped && !expected;) {
            int token = 1 + below(3);
            for (int l = 0; l < token; l++) text[known + l] = (char)('a' + below(2));
            memcpy(want.text, text, want.bytes = (size_t)(known + token));
            expected = cut_at_stop(&g, &want);
            memcpy(room + q.held, text + known, (size_t)token);
            q.held += (size_t)token;
            known += token;
            must(mtt__hand_out(&g, &q, 1, &stopped));
            for (int k = 0; expected && k < g.stop_count; k++)
                for (size_t at = got->bytes - (got->bytes < 6 ? got->bytes : 6); at < got->bytes; at++)
                    inside |= known - (int)at < (int)strlen(stops[k]) &&
                              !memcmp(text + at, stops[k], (size_t)known - at);
            for (int k = 0, waits = !q.held || stopped; !waits; k++) {
                check(k < g.stop_count, "stops %d: \"%.*s\" waits for nothing", i, (int)q.held, room);
                waits = k >= g.stop_count || (q.held < strlen(stops[k]) && !memcmp(room, stops[k], q.held));
            }
        }
        if (!expected) memcpy(got->text + got->bytes, room, q.held), got->bytes += q.held;
        check(stopped == expected && got->bytes == want.bytes && !memcmp(got->text, want.text, want.bytes),
              "stops %d: \"%.*s\", and not \"%.*s\"", i, (int)got->bytes, got->text, (int)want.bytes,
              want.text);
        stopped_inside += inside;
    }
    check(stopped_inside > 50, "%d texts end inside of a longer stop string", stopped_inside);
}

static void test_text(int number)
{
    static received expected;
    static const char *const stops[] = {"at th", "e m", "zz"};
    mtt_model_desc model = draw_model();
    mtt_generator_desc desc = {.precision = number % 4 ? MTT_FP32 : MTT_BF16,
                               .window = below(3) ? 0 : 1 + below(60),
                               .batch = 1 + below(PROMPTS),
                               .context = 1 + below(100),
                               .chunk = 1 + below(40)};
    mtt_tokenizer *tokenizer = make_tokenizer(model.vocab = 280);
    mtt_generation g = {.prompt_count = PROMPTS, .count = number < 2 ? COUNT : 1 + below(150)};
    int32_t ids[PROMPTS][200];
    const int32_t *prompts[PROMPTS];
    int sizes[PROMPTS], longest = 0;
    mtt_trainer *trainer;
    mtt_generator *generator;
    model.vocab = mtt_tokenizer_vocab(tokenizer);
    make_pair(&model, &desc, &trainer, &generator);
    for (int i = 0; i < PROMPTS; i++) {
        prompts[i] = ids[i];
        sizes[i] = 1 + below(below(2) ? 10 : 150);
        if (sizes[i] > longest) longest = sizes[i];
        for (int k = 0; k < sizes[i]; k++) ids[i][k] = below(model.vocab);
    }
    g.prompts = prompts;
    g.sizes = sizes;
    g.full_context = longest > desc.context ? MTT_CONTEXT_SLIDE : (mtt_full_context)below(2);
    g.stops = stops;
    g.stop_count = below(2) ? (int)(sizeof(stops) / sizeof(*stops)) : 0;
    g.stop_ids = (const int32_t[]){below(model.vocab), below(model.vocab), 1 << 30, -1};
    g.stop_id_count = below(2) ? 4 : 0;
    g.write = receive;
    g.user = got;
    if (number % 3) {
        g.sampling = (mtt_sampling){.temperature = 0.5f + (float)below(10) * 0.1f, .seed = random_bits()};
        if (below(2)) g.sampling.top_k = 1 + below(50);
        if (below(2)) g.sampling.min_p = (float)below(100) * 0.01f;
    }
    if (number % 2) g.sampling.repetition_penalty = 0.8f + (float)below(10) * 0.1f;
    memset(got, 0, sizeof(got));
    must(mtt_generator_run(generator, tokenizer, &g));
    for (int i = 0; i < PROMPTS; i++) {
        received *r = &got[i];
        reference(trainer, tokenizer, &g, model.vocab, desc.context, i, &expected);
        check(r->count == expected.count && !memcmp(r->ids, expected.ids, sizeof(*r->ids) * (size_t)r->count),
              "text %d, prompt %d: %d ids, and not the %d expected", number, i, r->count, expected.count);
        check(r->bytes == expected.bytes && !memcmp(r->text, expected.text, r->bytes),
              "text %d, prompt %d: \"%.*s\", and not \"%.*s\"", number, i, (int)r->bytes, r->text,
              (int)expected.bytes, expected.text);
        check(r->ends == 1, "text %d, prompt %d ends %d times", number, i, r->ends);
    }
    mtt_tokenizer_destroy(tokenizer);
    mtt_trainer_destroy(trainer);
    mtt_generator_destroy(generator);
}

/* A model may have more ids than the tokenizer, as padded ones have: those are never drawn. A tokenizer with
   more ids than the model is refused before anything is written. */
static void test_other_vocabulary(void)
{
    mtt_tokenizer *tokenizer = make_tokenizer(280);
    int vocab = mtt_tokenizer_vocab(tokenizer), beyond = 0;
    mtt_model_desc model = {.layers = 1, .heads = 2, .d_model = 16};
    mtt_generator_desc desc = {.context = 40};
    int32_t ids[] = {5, 6, 7};
    const int32_t *prompts[] = {ids};
    int sizes[] = {3};
    mtt_generation g = {.prompts = prompts, .sizes = sizes, .prompt_count = 1, .count = COUNT,
                        .sampling = {.temperature = 2, .seed = 5}, .write = receive, .user = got};
    for (int padding = 200; padding >= -1; padding -= 201) {
        mtt_trainer *trainer;
        mtt_generator *generator;
        model.vocab = vocab + padding;
        make_pair(&model, &desc, &trainer, &generator);
        memset(got, 0, sizeof(got));
        mtt_status status = mtt_generator_run(generator, tokenizer, &g);
        for (int k = 0; k < got[0].count; k++) beyond += got[0].ids[k] >= vocab;
        if (padding > 0)
            check(!status && got[0].count && !beyond, "%d ids have no text: %s", beyond, env.error);
        else {
            check(status == MTT_E_ARGUMENT && strstr(env.error, "ids of the tokenizer") && !got[0].count,
                  "more ids than the model: %s", env.error);
            check(mtt_generate(trainer, tokenizer, &g) == MTT_E_ARGUMENT &&
                      strstr(env.error, "ids of the tokenizer"),
                  "more ids than the trainer's model: %s", env.error);
        }
        mtt_trainer_destroy(trainer);
        mtt_generator_destroy(generator);
    }
    mtt_tokenizer_destroy(tokenizer);
}

/* Ends a generation after some tokens. */
typedef struct quitter {
    int left, calls;
} quitter;

static int quit(void *user, int prompt, int32_t id, const char *text, size_t bytes)
{
    quitter *q = (quitter *)user;
    (void)prompt, (void)id, (void)text, (void)bytes;
    q->calls++;
    return --q->left == 0;
}

/* Prompts that are texts give what their ids give, with the cache and without it, up to stop strings and to
   the end of the context, and stop when the caller says so. */
static void test_texts(int number)
{
    static received of[4][PROMPTS];
    static const char *const texts[] = {"the cat", "", "another mat sat"}, *const stops[] = {"at th", "zz"};
    mtt_tokenizer *tokenizer = make_tokenizer(280);
    mtt_model_desc model = draw_model();
    mtt_generator_desc desc = {.batch = 1 + below(3), .context = 30};
    mtt_generation g = {.texts = texts, .prompt_count = 3, .count = 40, .write = receive, .stops = stops,
                        .stop_count = below(3), .full_context = MTT_CONTEXT_STOP};
    int32_t ids[3][60];
    const int32_t *prompts[] = {ids[0], ids[1], ids[2]};
    int sizes[3];
    size_t count;
    mtt_trainer *trainer;
    mtt_generator *generator;
    model.vocab = mtt_tokenizer_vocab(tokenizer);
    make_pair(&model, &desc, &trainer, &generator);
    g.sampling = (mtt_sampling){.temperature = 1, .seed = random_bits()};
    for (int i = 0; i < 3; i++) {
        must(mtt_encode_prompt(tokenizer, texts[i], strlen(texts[i]), ids[i], 60, &count));
        sizes[i] = (int)count;
    }
    memset(of, 0, sizeof(of));
    for (int k = 0; k < 4; k++) {
        if (k == 2) g.texts = NULL, g.prompts = prompts, g.sizes = sizes;
        g.user = of[k];
        must(k % 2 ? mtt_generate(trainer, tokenizer, &g) : mtt_generator_run(generator, tokenizer, &g));
        check(!memcmp(of[k], of[0], sizeof(of[0])), "texts %d: way %d writes something else", number, k);
    }
    check(of[0][0].count > 0 && of[0][2].ends == 1, "texts %d: nothing is written", number);
    g.write = quit;
    g.stop_count = 0;
    for (int k = 0; k < 2; k++) {
        quitter q = {1 + below(3), 0};
        int want = q.left;
        g.user = &q;
        mtt_status status = k ? mtt_generate(trainer, tokenizer, &g)
                              : mtt_generator_run(generator, tokenizer, &g);
        check(status == MTT_END && q.calls == want, "texts %d: stopped after %d calls, not %d: %s", number,
              q.calls, want, mtt_status_string(status));
    }
    g.texts = texts;
    refused(mtt_generate(trainer, NULL, &g), "need a tokenizer");
    g.texts = NULL;
    g.sizes = (const int[]){31, 1, 1};
    g.prompts = (const int32_t *const[]){(const int32_t[31]){0}, ids[1], ids[2]};
    refused(mtt_generate(trainer, tokenizer, &g), "or let it slide");
    mtt_tokenizer_destroy(tokenizer);
    mtt_trainer_destroy(trainer);
    mtt_generator_destroy(generator);
}

/* ---- products of few rows ---- */

/* Tiles for all threads, which operations that no backend runs need. */
static const mtt_tensor *tiles(void)
{
    static mtt__cpu cpu;
    check(!mtt__cpu_tiles(&cpu), "no memory for tiles");
    return &cpu.tiles;
}

/* Up to MTT__FEW_ROWS rows of a product have the bits that they have among more rows, of which tiles are
   made. */
static void test_few_rows(int number)
{
    enum { ROWS = MTT__FEW_ROWS + 3 };
    mtt_dtype dtype = number % 2 ? MTT_BF16_BITS : MTT_F32;
    int transposed = number / 2 % 2, few = 1 + below(MTT__FEW_ROWS), first = below(ROWS - few + 1);
    mtt_op op = {.workspace = tiles()};
    int64_t k = 8 * (1 + below(50)), n = transposed ? 128 * (1 + below(4)) : 8 * (1 + below(70));
    mtt_tensor x = {.dtype = dtype, .dims = 2, .shape = {ROWS, k}}, y = x, w = x, b = x, part;
    float *values = (float *)malloc(sizeof(float) * (size_t)(k * n));
    char *all = (char *)malloc(4 * ROWS * (size_t)n);
    w.shape[0] = transposed ? n : k, w.shape[1] = transposed ? k : n;
    b.shape[0] = b.shape[1] = n, b.dims = 1;
    y.shape[1] = n;
    x.bytes = mtt__bytes_of(dtype, ROWS * (size_t)k);
    y.bytes = mtt__bytes_of(dtype, ROWS * (size_t)n);
    x.data = malloc(x.bytes), w.data = malloc(4 * (size_t)(k * n)), b.data = malloc(4 * (size_t)n);
    y.data = all;
    for (int64_t i = 0; i < k * n; i++) values[i] = (float)(below(2001) - 1000) * 1e-3f;
    mtt__store(&w, 0, k * n, values);
    mtt__store(&b, 0, n, values);
    for (int64_t i = 0; i < ROWS * k; i++) {
        float value = (float)(below(2001) - 1000) * 1e-3f;
        mtt__store(&x, i, 1, &value);
    }
    mtt__gemm(&op, mtt__matrix(&x, 0), mtt__matrix(&w, transposed), mtt__matrix(&y, 0),
              number % 3 ? &b : NULL, 0, 1);
    x = mtt__row_range(&x, first, few);
    part = mtt__row_range(&y, first, few);
    y = part;
    y.data = malloc(y.bytes);
    mtt__gemm(&op, mtt__matrix(&x, 0), mtt__matrix(&w, transposed), mtt__matrix(&y, 0),
              number % 3 ? &b : NULL, 0, 1);
    check(!memcmp(y.data, part.data, y.bytes), "product %d: %d of %d rows, %d x %d%s, have other bits",
          number, few, ROWS, (int)k, (int)n, transposed ? " transposed" : "");
    free((char *)x.data - (size_t)first * (x.bytes / (size_t)few));
    free(w.data);
    free(b.data);
    free(y.data);
    free(all);
    free(values);
}

/* ---- sampling ---- */

/* Ids below min_p's floor are never drawn; all others are, as often as their share of the rest says. */
static void test_min_p(int number)
{
    enum { V = 12, DRAWS = 4000 };
    float logits[V], min_p = (float)(1 + below(60)) * 0.01f, temperature = 0.5f + (float)below(20) * 0.1f;
    double p[V], most = 0, sum = 0;
    int count[V] = {0};
    mtt_sampling s = {.temperature = temperature, .seed = random_bits(), .min_p = min_p};
    for (int v = 0; v < V; v++) logits[v] = (float)below(8000) * 1e-3f;
    for (int v = 0; v < V; v++) p[v] = exp((double)logits[v] / (double)temperature);
    for (int v = 0; v < V; v++) most = p[v] > most ? p[v] : most;
    for (int v = 0; v < V; v++) p[v] = p[v] >= (double)min_p * most * (1 - 1e-6) ? p[v] : 0, sum += p[v];
    for (int k = 0; k < DRAWS; k++) count[mtt_sample(logits, V, &s, (uint64_t)k)]++;
    for (int v = 0; v < V; v++) {
        double share = p[v] / sum, deviation = sqrt(share * (1 - share) * DRAWS);
        check(fabs(count[v] - share * DRAWS) <= 6 * deviation, "min_p %d: id %d is drawn %d times, not %.0f",
              number, v, count[v], share * DRAWS);
    }
}

/* The last place that keeps the top_k largest, or a share of the weights, by sorting. */
static int by_size(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* An id that choose_id takes is one of those that a sorted list allows, of 32 or 16 bits, in a row of any
   tensor. Weights are those of e^x. A NaN is taken only if it comes first, the largest logit of equal ones is
   the first, and an infinite one is taken whatever the temperature, so that it is noticed. */
static void test_choice(int number)
{
    enum { MOST = 3000 };
    static float logits[2 * MOST], sorted[MOST];
    int count = 1 + below(below(4) ? 40 : MOST), start = below(MOST), i, k, kept;
    mtt_tensor row = {.dtype = MTT_F32, .data = logits};
    mtt_sampling s = {.temperature = below(3) ? 0.2f + 0.01f * (float)below(200) : 0,
                      .top_k = below(2) ? 1 + below(count) : 0,
                      .top_p = below(2) ? 0.01f * (float)(1 + below(99)) : 0, .seed = random_bits()};
    mtt_choice choice = mtt__choice(&s, count, (uint64_t)number);
    mtt_chosen chosen;
    double all = 0, above = 0;
    for (i = 0; i < 2 * MOST; i++)
        logits[i] = below(2) ? (float)(below(9) - 4) : (float)below(8001) * 1e-3f - 4;
    memcpy(sorted, logits + start, (size_t)count * sizeof(float));
    qsort(sorted, (size_t)count, sizeof(float), by_size);
    chosen = mtt__choose_in_row(&row, start, &choice);
    check(chosen.id >= 0 && chosen.id < count && chosen.logit == logits[start + chosen.id],
          "choice %d: id %d of %d", number, chosen.id, count);
    for (kept = s.top_k && s.top_k < count ? s.top_k : count; kept < count; kept++)
        if (sorted[kept] < sorted[kept - 1]) break;
    for (k = 0; k < kept; k++) all += exp((double)(sorted[k] - sorted[0]) / (double)s.temperature);
    for (k = 0; k < kept && sorted[k] > chosen.logit; k++)
        above += exp((double)(sorted[k] - sorted[0]) / (double)s.temperature);
    if (s.temperature > 0)
        check(chosen.logit >= sorted[kept - 1] &&
                  (!(s.top_p > 0) || above < (double)s.top_p * all * (1 + 1e-6)),
              "choice %d: logit %g is none of the top %d, or has %g of %g above", number,
              (double)chosen.logit, s.top_k, above, all);
    else {
        for (i = 0; logits[start + i] < sorted[0]; i++) {}
        check(chosen.id == i, "choice %d: id %d, not the first of the largest, %d", number, chosen.id, i);
    }
    check(mtt_sample(logits + start, count, &s, (uint64_t)number) == chosen.id, "choice %d: other samples",
          number);
    i = below(count);
    logits[start + i] = NAN;
    chosen = mtt__choose_in_row(&row, start, &choice);
    check(i && count > 1 ? chosen.id != i && mtt__finite((double)chosen.logit)
                         : chosen.id == 0 && !mtt__finite((double)chosen.logit),
          "choice %d: id %d where %d is NaN", number, chosen.id, i);
    i = count - 1;
    if (i) logits[start] = 0, logits[start + i] = INFINITY;
    chosen = mtt__choose_in_row(&row, start, &choice);
    check(chosen.id == i && !mtt__finite((double)chosen.logit), "choice %d: id %d, not the infinite %d",
          number, chosen.id, i);
    choice.count = 0;
    check(mtt__choose_in_row(&row, start, &choice).id == -1, "choice %d: an id of none", number);
}

/* Weights are exact to 1e-8 of the largest, and to 4e-6 of their own size, where they are above 1; larger
   logits have no smaller ones. */
static void test_weights(void)
{
    float scale = mtt__choice(&(mtt_sampling){.temperature = 1}, 1, 0).scale;
    uint32_t before = 1u << 31;
    for (int i = 0; i <= 30000; i++) {
        float x = 3 - (float)i * 1e-3f;
        uint32_t weight = mtt__choice_weight(3, x, scale);
        double exact = 2147483648.0 * exp((double)(x - 3));
        check(fabs(weight - exact) <= 4e-6 * exact + 1 && weight <= before, "e^%g: weight %u, not %.1f",
              (double)(x - 3), weight, exact);
        before = weight;
    }
}

/* A generator of several sequences takes the ids that each takes alone, and stops at weights that are not
   finite, wherever the ids are chosen. */
static void test_batch(int number)
{
    static received together[PROMPTS], alone[PROMPTS];
    mtt_model_desc model = draw_model();
    mtt_generator_desc desc = {.precision = number % 2 ? MTT_BF16 : MTT_FP32, .batch = PROMPTS, .context = 60,
                               .chunk = 1 + below(20)}, single = desc;
    mtt_generation g = {.prompt_count = PROMPTS, .count = 40, .write = receive, .user = together};
    int32_t ids[PROMPTS][9];
    const int32_t *prompts[PROMPTS];
    int sizes[PROMPTS];
    int64_t shape[2];
    mtt_trainer *trainer, *other;
    mtt_generator *all, *one;
    uint64_t state = random_state;
    single.batch = 1;
    make_pair(&model, &desc, &trainer, &all);
    random_state = state;
    make_pair(&model, &single, &other, &one);
    for (int i = 0; i < PROMPTS; i++) {
        prompts[i] = ids[i];
        sizes[i] = 1 + below(9);
        for (int k = 0; k < sizes[i]; k++) ids[i][k] = below(model.vocab);
    }
    g.prompts = prompts, g.sizes = sizes;
    g.sampling = (mtt_sampling){.temperature = number % 3 ? 1 : 0, .top_p = 0.9f, .seed = random_bits()};
    if (number % 4 == 3) g.sampling.repetition_penalty = 1.2f;
    memset(together, 0, sizeof(together));
    memset(alone, 0, sizeof(alone));
    must(mtt_generator_run(all, NULL, &g));
    g.user = alone;
    must(mtt_generator_run(one, NULL, &g));
    check(!memcmp(together, alone, sizeof(alone)) && alone[0].count == 40, "batch %d: other ids than alone",
          number);
    mtt_parameter(mtt_generator_trainer(all), 0, shape);
    float *values = (float *)malloc((size_t)(shape[0] * (shape[1] ? shape[1] : 1)) * sizeof(float));
    for (int64_t i = 0; i < shape[0] * (shape[1] ? shape[1] : 1); i++) values[i] = NAN;
    must(mtt_parameter_set(mtt_generator_trainer(all), 0, values));
    check(mtt_generator_run(all, NULL, &g) == MTT_E_NUMBERS && strstr(env.error, "is NaN"),
          "batch %d: weights that are NaN: %s", number, env.error);
    free(values);
    mtt_trainer_destroy(trainer), mtt_trainer_destroy(other);
    mtt_generator_destroy(all), mtt_generator_destroy(one);
}

/* ---- failures ---- */

static mtt_status run_all(void)
{
    mtt_model_desc model = {.layers = 2, .heads = 2, .d_model = 16, .vocab = 300};
    mtt_generator_desc desc = {.batch = 2, .context = 8, .chunk = 4};
    int32_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    const int32_t *prompts[] = {ids, ids + 2, ids};
    int sizes[] = {10, 5, 1};
    mtt_generation g = {.prompts = prompts, .sizes = sizes, .prompt_count = 3, .count = 12,
                        .sampling = {.repetition_penalty = 1.1f}, .write = receive, .user = got};
    mtt_generator *generator = NULL;
    mtt_status status = mtt_generator_create(&env, &model, &desc, mtt_cpu_backend(), &generator);
    memset(got, 0, sizeof(got));
    if (!status) status = mtt_generator_run(generator, NULL, &g);
    else check(!generator, "a generator that was not made");
    mtt_generator_destroy(generator);
    return status;
}

/* Each allocation fails once. */
static void test_memory(void)
{
    int blocks = live_blocks, all;
    allocations = 0;
    must(run_all());
    all = allocations;
    check(all > 30, "%d allocations", all);
    for (int k = 0; k < all; k++) {
        mtt_status status;
        allocations = 0;
        fails_at = k;
        status = run_all();
        fails_at = -1;
        check(status == MTT_E_MEMORY, "allocation %d of %d fails: %s", k, all, mtt_status_string(status));
        check(live_blocks == blocks, "allocation %d of %d fails: %d blocks are left", k, all,
              live_blocks - blocks);
    }
}

static void test_refusals(void)
{
    mtt_model_desc model = {.layers = 1, .heads = 2, .d_model = 16, .vocab = 50, .max_seq = 20,
                            .positions = MTT_POSITIONS_LEARNED};
    mtt_generator_desc desc = {.batch = 2, .context = 8};
    mtt_plan_report plan;
    int32_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 50};
    const int32_t *prompts[] = {ids, ids};
    float logits[100];
    int sizes[] = {9, 1};
    mtt_generation g = {.prompts = prompts, .sizes = sizes, .prompt_count = 2, .count = 2, .write = receive,
                        .user = got};
    mtt_generator *generator;
    for (int p = 0; p <= MTT_FP8; p++) {
        desc.precision = (mtt_precision)p;
        if (p == MTT_FP32 || p == MTT_BF16) must(mtt_generator_plan(&env, &model, &desc, &plan));
        else refused(mtt_generator_plan(&env, &model, &desc, &plan), "take bf16");
    }
    desc = (mtt_generator_desc){.context = 21};
    refused(mtt_generator_plan(&env, &model, &desc, &plan), "max_seq 20");
    desc = (mtt_generator_desc){.context = -3};
    refused(mtt_generator_plan(&env, &model, &desc, &plan), "context is -3");
    desc = (mtt_generator_desc){.context = (1 << 20) + 1};
    refused(mtt_generator_plan(&env, &model, &desc, &plan), "context is 1048577");
    desc = (mtt_generator_desc){.chunk = -1};
    refused(mtt_generator_plan(&env, &model, &desc, &plan), "chunk is -1");
    desc = (mtt_generator_desc){.batch = -1};
    refused(mtt_generator_plan(&env, &model, &desc, &plan), "batch is -1");
    desc = (mtt_generator_desc){.batch = 2, .context = 8};
    must(mtt_generator_create(&env, &model, &desc, mtt_cpu_backend(), &generator));
    refused(mtt_generator_append(generator, prompts, sizes, logits), "9 tokens for sequence 0");
    prompts[0] = ids + 9;
    sizes[0] = 1;
    refused(mtt_generator_append(generator, prompts, sizes, logits), "is 50");
    refused(mtt_generator_run(generator, NULL, &g), "has id 50");
    refused(mtt_generator_cut(generator, 2, 0), "sequences are 0 to 1");
    prompts[0] = ids;
    sizes[0] = 9;
    g.full_context = MTT_CONTEXT_STOP;
    refused(mtt_generator_run(generator, NULL, &g), "or let it slide");
    sizes[0] = 1, sizes[1] = 9; /* behind one that is in order, of which nothing is written */
    memset(got, 0, sizeof(got));
    desc.batch = 1;
    mtt_generator *alone;
    must(mtt_generator_create(&env, &model, &desc, mtt_cpu_backend(), &alone));
    refused(mtt_generator_run(alone, NULL, &g), "prompt 1 has 9 ids");
    check(!got[0].count, "%d ids are written before the refusal", got[0].count);
    mtt_generator_destroy(alone);
    sizes[1] = 1;
    g.count = -1;
    refused(mtt_generator_run(generator, NULL, &g), "count is -1");
    g.count = INT_MIN; /* the number that has no positive one: under a sanitizer, its text is what fails */
    refused(mtt_generator_run(generator, NULL, &g), "count is -2147483648");
    refused(mtt_generator_cut(generator, INT_MIN, INT_MIN), "sequence -2147483648 to -2147483648");
    char least[64];
    mtt__format(least, sizeof(least), "%d %lld", INT_MIN, (long long)INT64_MIN);
    check(!strcmp(least, "-2147483648 -9223372036854775808"), "least numbers: %s", least);
    g.count = 2, g.prompt_count = -1;
    refused(mtt_generator_run(generator, NULL, &g), "prompt_count -1");
    g.prompt_count = 2, g.stop_count = -1;
    refused(mtt_generator_run(generator, NULL, &g), "stop_count -1");
    g.stop_count = 0, g.stop_id_count = -1;
    refused(mtt_generator_run(generator, NULL, &g), "stop_id_count -1");
    g.stop_id_count = 0;
    g.full_context = (mtt_full_context)7;
    refused(mtt_generator_run(generator, NULL, &g), "full_context is 7");
    g.full_context = MTT_CONTEXT_SLIDE;
    g.sampling.repetition_penalty = 1e-10f;
    refused(mtt_generator_run(generator, NULL, &g), "repetition_penalty is 1e-10");
    g.sampling.repetition_penalty = -1;
    refused(mtt_generator_run(generator, NULL, &g), "repetition_penalty is -1");
    g.sampling.repetition_penalty = 0;
    sizes[0] = 0;
    refused(mtt_generator_run(generator, NULL, &g), "prompt 0 has 0 ids");
    g.stops = (const char *const[]){""};
    g.stop_count = 1;
    refused(mtt_generator_run(generator, NULL, &g), "need a tokenizer");
    g.stop_count = 0;
    g.sampling.min_p = 1.5f;
    refused(mtt_generator_run(generator, NULL, &g), "min_p is 1.5");
    mtt_trainer *trainer = mtt_generator_trainer(generator);
    refused(mtt_parameter_set(trainer, 1000, logits), "no parameter 1000");
    refused(mtt_train_step(trainer, ids, ids, NULL), "weights alone");
    refused(mtt_evaluate(trainer, ids, ids, NULL), "weights alone");
    refused(mtt_next_logits(trainer, ids, 1, logits), "weights alone");
    refused(mtt_save(trainer, "build/none.safetensors", NULL), "weights alone");
    refused(mtt_save_merged(trainer, "build/none.safetensors"), "weights alone");
    refused(mtt_resume(trainer, "build/none.safetensors", NULL), "weights alone");
    check(mtt_checkpoint_bytes(trainer) == 0, "a generator's checkpoint has bytes");
    check(mtt_gradient_get(trainer, 0, logits) != MTT_OK, "a generator has a gradient");
    mtt_generator_destroy(generator);
}

int main(int argc, char **argv)
{
    mtt_wait_passively(argv);
    backend = *mtt_cpu_backend();
    backend.alloc = counted_arena;
    quick = argc > 1 && !strcmp(argv[1], "quick");
    for (int k = 0; k < 150; k += each(), new_case()) test_logits(k);
    test_plain();
    new_case();
    test_stops();
    for (int k = 0; k < 60; k += each(), new_case()) test_text(k);
    for (int k = 0; k < 60; k += each(), new_case()) test_min_p(k);
    for (int k = 0; k < 2000; k += each(), new_case()) test_choice(k);
    for (int k = 0; k < 20; k += each(), new_case()) test_batch(k);
    test_weights();
    for (int k = 0; k < 300; k += each(), new_case()) test_few_rows(k);
    for (int k = 0; k < 10; k += each(), new_case()) test_texts(k);
    test_other_vocabulary();
    test_refusals();
    test_memory();
    check(live_blocks == 0, "%d blocks are left", live_blocks);
    return finish();
}
