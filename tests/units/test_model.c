/* test_model.c - the model, its training and its checkpoints against an oracle that shares nothing with the
   library: a naive forward pass in double precision and central differences of its loss. The promises of the
   manual follow. `test_model speed [B T steps]` times a step of a small GPT instead. */
#define MTT_IMPLEMENTATION
#define MTT__EXTRA_PASSES(EMIT, RULE) RULE(away, sends_away)
#include "../../mtt.h"
#include "../away.h"
#include "../test.h"

#ifdef _OPENMP
#include <omp.h>
#endif

/* Operations on tensors this small gain nothing from threads, and on a busy machine lose much at their
   barriers. */
static void use_threads(int count)
{
#ifdef _OPENMP
    omp_set_num_threads(count ? count : omp_get_num_procs());
#else
    (void)count;
#endif
}

/* BLAS changes FP32 products alone: its build tests all products, and a share of what uses them. */
#ifdef MTT_CBLAS
enum { BLAS = 1 };
#else
enum { BLAS = 0 };
#endif

static mtt_env env;
static const uint64_t SEED = 0x123456789abcdefu;

static mtt__cpu cpu; /* for operations of no schedule */

/* Tiles for all threads, which products that no backend runs need. */
static const mtt_tensor *tiles(void)
{
    check(!mtt__cpu_tiles(&cpu), "no memory for tiles");
    return &cpu.tiles;
}

/* Runs an operation. NULL: it has its operands. */
static void run_op(mtt_op_kind kind, const mtt_op *op, const void *operands)
{
    mtt_op run = *op;
    run.kind = kind;
    if (operands) run.operands = (mtt_tensor **)(uintptr_t)operands;
    check(!mtt__cpu_run(&cpu, &run, 1), "operation %d does not run", (int)kind);
}

/* ---------------------------------------------------------------------------------------- randomness ---- */

static double uniform(void)
{
    return (double)(random_bits() >> 11) * (1.0 / 9007199254740992.0);
}

static double normal(void)
{
    double radius = sqrt(-2 * log(1 - uniform()));
    return radius * cos(6.283185307179586 * uniform());
}

/* Philox4x32, from the paper and not from the library. */
static void philox(uint64_t key, uint64_t low, uint64_t high, int rounds, uint32_t x[4])
{
    uint32_t k[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
    x[0] = (uint32_t)low, x[1] = (uint32_t)(low >> 32), x[2] = (uint32_t)high, x[3] = (uint32_t)(high >> 32);
    for (int round = 0; round < rounds; round++, k[0] += 0x9E3779B9, k[1] += 0xBB67AE85) {
        uint64_t a = (uint64_t)0xD2511F53 * x[0], b = (uint64_t)0xCD9E8D57 * x[2];
        uint32_t y[4] = {(uint32_t)(b >> 32) ^ x[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ x[3] ^ k[1],
                         (uint32_t)a};
        memcpy(x, y, sizeof(y));
    }
}

/* Factors of dropout: 0, or what keeps the expectation. Eight elements share a Philox block, 16 bits each; in
   attention 16, 8 bits each, and the block has seven rounds. */
static void dropout_mask(double *mask, size_t count, float p, uint64_t seed, int site, int layer,
                         uint64_t micro)
{
    int attention = site == MTT__SITE_ATTENTION;
    uint32_t word[4] = {0, 0, 0, 0}, all = attention ? 256 : 65536;
    uint32_t threshold = (uint32_t)floor((double)p * all + 0.5), number;
    uint64_t stream = (uint64_t)site << 56 | (uint64_t)layer << 40 | micro;
    if (attention && p > 0 && threshold == 0) threshold = 1;
    for (size_t e = 0; e < count; e++) {
        if (!attention && e % 8 == 0) philox(seed, e / 8, stream, 10, word);
        if (attention && e % 16 == 0) philox(seed, e / 16, stream, 7, word);
        if (attention) number = word[e % 16 / 4] >> (e % 4 * 8) & 0xff;
        else number = word[e % 8 / 2] >> (e % 2 * 16) & 0xffff;
        mask[e] = number >= threshold ? (double)all / (all - threshold) : 0;
    }
}

/* -------------------------------------------------------------------------- the model, naive, double ---- */

enum {
    LN1_W,
    LN1_B,
    ATTN_W,
    ATTN_B,
    PROJ_W,
    PROJ_B,
    LN2_W,
    LN2_B,
    FC_W,
    FC_B,
    OUT_W,
    OUT_B,
    LAYER_PARAMETERS
};
enum { MAX_PARAMETERS = 64 };

typedef struct parameter {
    char name[48];
    int rows, cols; /* cols 0: a vector */
    size_t first, count;
    int from; /* the first layer whose output depends on it; -1: the embedding's; layers: the head's */
    int stage; /* the first that depends on it */
} parameter;

typedef struct reference {
    mtt_model_desc model;
    int window, batch, seq_len, parameters, layer_first, head_first;
    int at[8][LAYER_PARAMETERS]; /* of each layer's, its place below; -1: the model has none */
    int gains_first; /* of q and k, two in a layer */
    parameter parameter[MAX_PARAMETERS];
    size_t weights;
} reference;

/* One micro-batch; masks: embedding, then attention, projection and MLP of each layer. */
typedef struct micro_batch {
    const int32_t *tokens, *targets;
    double *masks;
} micro_batch;

static void add_parameter(reference *r, int from, int rows, int cols, const char *format, int layer)
{
    parameter *p = &r->parameter[r->parameters++];
    snprintf(p->name, sizeof(p->name), format, layer);
    p->rows = rows;
    p->cols = cols;
    p->first = r->weights;
    p->count = (size_t)rows * (size_t)(cols ? cols : 1);
    p->from = from;
    p->stage = 2 * from + 1 > 0 ? 2 * from + 1 : 0;
    r->weights += p->count;
}

static void reference_init(reference *r, const mtt_model_desc *m, int window, int batch, int seq_len)
{
    int C = m->d_model, F = m->d_ff, gated = mtt__is_gated(m->mlp), layers = m->layers;
    int normed = m->norm_place != MTT_NORM_NONE, shifted = normed && m->norm == MTT_NORM_LAYER;
    int wide = m->heads * m->d_head, row = wide + 2 * m->heads_kv * m->d_head;
    memset(r, 0, sizeof(*r));
    r->model = *m;
    r->window = window;
    r->batch = batch;
    r->seq_len = seq_len;
    add_parameter(r, -1, m->vocab, C, "wte.weight", 0);
    if (m->positions == MTT_POSITIONS_LEARNED) add_parameter(r, -1, m->max_seq, C, "wpe.weight", 0);
    r->layer_first = r->parameters;
    for (int l = 0; l < layers; l++) {
        const struct { int rows, cols, there; const char *format; } of_layer[LAYER_PARAMETERS] = {
            {C, 0, normed, "h.%d.ln_1.weight"},
            {C, 0, shifted, "h.%d.ln_1.bias"},
            {C, row, 1, "h.%d.attn.c_attn.weight"},
            {row, 0, !m->no_biases, "h.%d.attn.c_attn.bias"},
            {wide, C, 1, "h.%d.attn.c_proj.weight"},
            {C, 0, !m->no_biases, "h.%d.attn.c_proj.bias"},
            {C, 0, normed, "h.%d.ln_2.weight"},
            {C, 0, shifted, "h.%d.ln_2.bias"},
            {C, F << gated, 1, "h.%d.mlp.c_fc.weight"},
            {F << gated, 0, !m->no_biases, "h.%d.mlp.c_fc.bias"},
            {F, C, 1, "h.%d.mlp.c_proj.weight"},
            {C, 0, !m->no_biases, "h.%d.mlp.c_proj.bias"}};
        for (int k = 0; k < LAYER_PARAMETERS; k++) {
            r->at[l][k] = of_layer[k].there ? r->parameters : -1;
            if (!of_layer[k].there) continue;
            add_parameter(r, l, of_layer[k].rows, of_layer[k].cols, of_layer[k].format, l);
            r->parameter[r->parameters - 1].stage += k >= LN2_W;
        }
    }
    r->head_first = r->parameters;
    if (m->norm_place == MTT_NORM_PRE) add_parameter(r, layers, C, 0, "ln_f.weight", 0);
    if (m->norm_place == MTT_NORM_PRE && shifted) add_parameter(r, layers, C, 0, "ln_f.bias", 0);
    if (!m->tied_head) add_parameter(r, layers, m->vocab, C, "lm_head.weight", 0);
    if (!m->no_head_bias && !m->no_biases) add_parameter(r, layers, m->vocab, 0, "lm_head.bias", 0);
    r->gains_first = r->parameters;
    for (int l = 0; l < (m->qk_norm ? m->layers : 0); l++) {
        add_parameter(r, l, m->d_head, 0, "h.%d.attn.q_norm.weight", l);
        add_parameter(r, l, m->d_head, 0, "h.%d.attn.k_norm.weight", l);
    }
}

static size_t mask_count(const reference *r)
{
    size_t rows = (size_t)(r->batch * r->seq_len), width = rows * (size_t)r->model.d_model;
    return width + (size_t)r->model.layers * (2 * width + rows * (size_t)(r->model.heads * r->seq_len));
}

static double *make_masks(const reference *r, float p, uint64_t seed, uint64_t micro)
{
    size_t width = (size_t)(r->batch * r->seq_len * r->model.d_model);
    size_t scores = (size_t)(r->batch * r->model.heads * r->seq_len * r->seq_len);
    double *masks = malloc(mask_count(r) * sizeof(double)), *at = masks + width;
    dropout_mask(masks, width, p, seed, MTT__SITE_EMBED, 0, micro);
    for (int l = 0; l < r->model.layers; l++, at += scores + 2 * width) {
        dropout_mask(at, scores, p, seed, MTT__SITE_ATTENTION, l, micro);
        dropout_mask(at + scores, width, p, seed, MTT__SITE_PROJ, l, micro);
        dropout_mask(at + scores + width, width, p, seed, MTT__SITE_MLP, l, micro);
    }
    return masks;
}

/* Where it is set, the forward pass notes there the largest magnitude of each layer's inputs of products, in
   their order, and of the head's. */
static double *peaks;

static void note_peak(int at, const double *x, size_t count)
{
    for (size_t i = 0; peaks && i < count; i++) peaks[at] = fmax(peaks[at], fabs(x[i]));
}

static double norm_eps(const reference *r)
{
    return r->model.norm_eps > 0 ? (double)r->model.norm_eps : 1e-5;
}

/* Without `bias` RMSNorm, where the model has that. */
static void norm(const reference *r, double *y, const double *x, const double *gain, const double *bias)
{
    int width = r->model.d_model, rms = r->model.norm == MTT_NORM_RMS;
    double eps = norm_eps(r);
    for (int row = 0; row < r->batch * r->seq_len; row++, x += width, y += width) {
        double mean = 0, variance = 0;
        for (int i = 0; i < width && !rms; i++) mean += x[i] / width;
        for (int i = 0; i < width; i++) variance += (x[i] - mean) * (x[i] - mean) / width;
        for (int i = 0; i < width; i++)
            y[i] = (x[i] - mean) / sqrt(variance + eps) * gain[i] + (rms ? 0 : bias[i]);
    }
}

static void linear(double *restrict y, const double *restrict x, const double *restrict w, const double *bias,
                   int rows, int in, int out)
{
    for (int r = 0; r < rows; r++, x += in, y += out) {
        for (int o = 0; o < out; o++) y[o] = bias ? bias[o] : 0;
        for (int i = 0; i < in; i++)
            for (int o = 0; o < out; o += 8) /* all widths are multiples of 8 */
                for (int k = 0; k < 8; k++) y[o + k] += x[i] * w[i * out + o + k];
    }
}

/* y [F] of a row of f, [F] or with a gate [2 F] */
static void activate(const mtt_model_desc *m, const double *f, double *y)
{
    int F = m->d_ff;
    for (int i = 0; i < F; i++) {
        double x = f[i], silu = x / (1 + exp(-x));
        switch (m->mlp) {
        case MTT_MLP_GELU:
            y[i] = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
            break;
        case MTT_MLP_SWIGLU: y[i] = silu * f[F + i]; break;
        case MTT_MLP_RELU2: y[i] = x > 0 ? x * x : 0; break;
        case MTT_MLP_SILU: y[i] = silu; break;
        default: y[i] = NAN; /* a form without a case must not pass for another */
        }
    }
}

/* Radians that pair i turns from one position to the next. Llama 3 divides them by rotary_factor if the pair
   turns less than `low` times in so many positions, keeps them above `high` times, and mixes both between. */
static double turn(const mtt_model_desc *m, int i)
{
    double low = m->rotary_low, high = m->rotary_high, fast = pow(m->rotary_theta, -2.0 * i / m->d_head);
    double kept = fmin(1, fmax(0, (m->rotary_original * fast / (2 * acos(-1)) - low) / (high - low)));
    return fast * (kept + (1 - kept) / (double)m->rotary_factor);
}

/* Normalizes the heads of q and k, where the model says so, and rotates their pairs by complex numbers. */
static void turn_heads(const reference *r, const double *w, int layer, double *qkv)
{
    const mtt_model_desc *m = &r->model;
    int D = m->d_head, heads = m->heads + m->heads_kv, width = (heads + m->heads_kv) * D;
    for (int row = 0; row < r->batch * r->seq_len; row++)
        for (int h = 0; h < heads; h++) {
            const parameter *gain = r->parameter + r->gains_first + 2 * layer + (h >= m->heads);
            double *x = qkv + row * width + h * D, squares = 0;
            for (int d = 0; d < D; d++) squares += x[d] * x[d] / D;
            for (int d = 0; d < D && m->qk_norm; d++)
                x[d] *= w[gain->first + (size_t)d] / sqrt(squares + norm_eps(r));
            for (int i = 0; i < D / 2 && m->positions == MTT_POSITIONS_ROTARY; i++) {
                double angle = row % r->seq_len * turn(m, i);
                double *a = m->rotary_interleaved ? x + 2 * i : x + i;
                double *b = m->rotary_interleaved ? x + 2 * i + 1 : x + i + D / 2, old = *a;
                *a = old * cos(angle) - *b * sin(angle);
                *b = old * sin(angle) + *b * cos(angle);
            }
        }
}

static void attend(double *y, const double *qkv, const double *mask, const reference *r)
{
    int T = r->seq_len, H = r->model.heads, K = r->model.heads_kv, D = r->model.d_head;
    int wide = (H + 2 * K) * D;
    double *p = malloc((size_t)T * sizeof(double));
    for (int row = 0; row < r->batch * H * T; row++) {
        int b = row / (H * T), h = row / T % H, i = row % T,
            lo = r->window && i >= r->window ? i - r->window + 1 : 0;
        const double *of_b = qkv + b * T * wide, *q = of_b + i * wide + h * D;
        const double *k = of_b + (H + h / (H / K)) * D, *v = k + K * D;
        double *out = y + (b * T + i) * H * D + h * D, largest = -1e300, sum = 0;
        for (int j = lo; j <= i; j++) {
            p[j] = 0;
            for (int d = 0; d < D; d++) p[j] += q[d] * k[j * wide + d] / sqrt(D);
            if (p[j] > largest) largest = p[j];
        }
        for (int j = lo; j <= i; j++) sum += p[j] = exp(p[j] - largest);
        for (int d = 0; d < D; d++) out[d] = 0;
        for (int j = lo; j <= i; j++)
            for (int d = 0; d < D; d++) out[d] += p[j] / sum * mask[row * T + j] * v[j * wide + d];
    }
    free(p);
}

/* A parameter of a layer; NULL where the model has none. */
static const double *weight_of(const reference *r, const double *w, int layer, int k)
{
    int at = r->at[layer][k];
    return at < 0 ? NULL : w + r->parameter[at].first;
}

#define WEIGHT(k) weight_of(r, w, layer, k)
static void attention_half(const reference *r, const double *w, const double *masks, int layer,
                           const double *x, double *y)
{
    int C = r->model.d_model, rows = r->batch * r->seq_len;
    size_t width = (size_t)(rows * C), scores = (size_t)(r->batch * r->model.heads * r->seq_len * r->seq_len);
    const double *mask = masks + width + (size_t)layer * (scores + 2 * width);
    int out = r->model.heads * r->model.d_head, wide = out + 2 * r->model.heads_kv * r->model.d_head;
    size_t most = (size_t)rows * (size_t)(out > C ? out : C);
    double *n = malloc((2 * most + (size_t)(rows * wide)) * sizeof(double)), *o = n + most, *qkv = o + most;
    if (r->model.norm_place == MTT_NORM_PRE) norm(r, n, x, WEIGHT(LN1_W), WEIGHT(LN1_B));
    else memcpy(n, x, width * sizeof(double));
    note_peak(4 * layer, n, width);
    linear(qkv, n, WEIGHT(ATTN_W), WEIGHT(ATTN_B), rows, C, wide);
    turn_heads(r, w, layer, qkv);
    attend(n, qkv, mask, r);
    note_peak(4 * layer + 1, n, (size_t)(rows * out));
    linear(o, n, WEIGHT(PROJ_W), WEIGHT(PROJ_B), rows, out, C);
    for (size_t i = 0; i < width; i++) y[i] = x[i] + o[i] * mask[scores + i];
    if (r->model.norm_place == MTT_NORM_POST) norm(r, y, y, WEIGHT(LN1_W), WEIGHT(LN1_B));
    free(n);
}

static void mlp_half(const reference *r, const double *w, const double *masks, int layer, const double *x,
                     double *y)
{
    int C = r->model.d_model, F = r->model.d_ff, rows = r->batch * r->seq_len;
    int fc = F << mtt__is_gated(r->model.mlp);
    size_t width = (size_t)(rows * C), scores = (size_t)(r->batch * r->model.heads * r->seq_len * r->seq_len);
    const double *mask = masks + width + (size_t)layer * (scores + 2 * width) + scores + width;
    double *n = malloc((2 * width + (size_t)(rows * (F + fc))) * sizeof(double)), *o = n + width,
           *f = o + width, *g = f + rows * fc;
    if (r->model.norm_place == MTT_NORM_PRE) norm(r, n, x, WEIGHT(LN2_W), WEIGHT(LN2_B));
    else memcpy(n, x, width * sizeof(double));
    note_peak(4 * layer + 2, n, width);
    linear(f, n, WEIGHT(FC_W), WEIGHT(FC_B), rows, C, fc);
    for (int i = 0; i < rows; i++) activate(&r->model, f + i * fc, g + i * F);
    note_peak(4 * layer + 3, g, (size_t)(rows * F));
    linear(o, g, WEIGHT(OUT_W), WEIGHT(OUT_B), rows, F, C);
    for (size_t i = 0; i < width; i++) y[i] = x[i] + o[i] * mask[i];
    if (r->model.norm_place == MTT_NORM_POST) norm(r, y, y, WEIGHT(LN2_W), WEIGHT(LN2_B));
    free(n);
}

static void embed(const reference *r, const double *w, const micro_batch *mb, double *x)
{
    int C = r->model.d_model;
    for (int row = 0; row < r->batch * r->seq_len; row++) {
        int t = row % r->seq_len;
        for (int c = 0; c < C; c++) {
            double angle = t / pow(10000, c / 2 * 2 / (double)C),
                   position = 0.02 * (c % 2 ? cos(angle) : sin(angle));
            if (r->model.positions > MTT_POSITIONS_LEARNED) position = 0;
            if (r->model.positions == MTT_POSITIONS_LEARNED)
                position = w[r->parameter[1].first + (size_t)(t * C + c)];
            x[row * C + c] = (w[mb->tokens[row] * C + c] + position) * mb->masks[row * C + c];
        }
    }
}

static void head(const reference *r, const double *w, const double *x, double *logits)
{
    int C = r->model.d_model, V = r->model.vocab, rows = r->batch * r->seq_len;
    const parameter *p = r->parameter + r->head_first;
    int norms = r->model.norm_place != MTT_NORM_PRE ? 0 : r->model.norm == MTT_NORM_RMS ? 1 : 2;
    const double *matrix = r->model.tied_head ? w : w + p[norms].first;
    const double *bias = r->model.no_head_bias || r->model.no_biases
                             ? NULL : w + p[norms + !r->model.tied_head].first;
    double *n = malloc((size_t)(rows * C) * sizeof(double));
    if (norms) norm(r, n, x, w + p[0].first, w + p[norms - 1].first);
    else memcpy(n, x, (size_t)(rows * C) * sizeof(double));
    note_peak(4 * r->model.layers, n, (size_t)(rows * C));
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < V; v++) {
            double sum = bias ? bias[v] : 0;
            for (int c = 0; c < C; c++) sum += n[row * C + c] * matrix[v * C + c];
            logits[row * V + v] = sum;
        }
    free(n);
}

static double cross_entropy(const reference *r, const double *logits, const int32_t *targets)
{
    int V = r->model.vocab, counted = 0;
    double loss = 0;
    for (int row = 0; row < r->batch * r->seq_len; row++) {
        const double *z = logits + row * V;
        double largest = z[0], sum = 0;
        if (targets[row] < 0) continue;
        for (int v = 1; v < V; v++) largest = z[v] > largest ? z[v] : largest;
        for (int v = 0; v < V; v++) sum += exp(z[v] - largest);
        loss += largest + log(sum) - z[targets[row]];
        counted++;
    }
    return counted ? loss / counted : 0;
}

/* Stages of the forward pass: the embedding, attention and MLP of each layer, then the head, which returns
   the mean cross entropy. From x [rows, C] to y, the head's: logits. */
static double run_stage(const reference *r, const double *w, const micro_batch *mb, int stage,
                        const double *x, double *y)
{
    if (stage == 2 * r->model.layers + 1) return head(r, w, x, y), cross_entropy(r, y, mb->targets);
    if (!stage) embed(r, w, mb, y);
    else if (stage % 2) attention_half(r, w, mb->masks, stage / 2, x, y);
    else mlp_half(r, w, mb->masks, stage / 2 - 1, x, y);
    return 0;
}

/* `stream` gets what each stage but the head hands on. */
static double forward(const reference *r, const double *w, const micro_batch *mb, double *stream,
                      double *logits)
{
    size_t width = (size_t)(r->batch * r->seq_len * r->model.d_model);
    int last = 2 * r->model.layers + 1;
    for (int s = 0; s < last; s++, stream += width) run_stage(r, w, mb, s, s ? stream - width : NULL, stream);
    return run_stage(r, w, mb, last, stream - width, logits);
}

static size_t stream_count(const reference *r)
{
    return (size_t)(2 * r->model.layers + 1) * (size_t)(r->batch * r->seq_len * r->model.d_model);
}

static double *new_logits(const reference *r)
{
    return malloc((size_t)(r->batch * r->seq_len * r->model.vocab) * sizeof(double));
}

/* Loss of the mean of `count` micro-batches. */
static double reference_loss(const reference *r, const double *w, const micro_batch *mb, int count)
{
    double *stream = malloc(stream_count(r) * sizeof(double)), *logits = new_logits(r), loss = 0;
    for (int m = 0; m < count; m++) loss += forward(r, w, mb + m, stream, logits) / count;
    free(stream);
    free(logits);
    return loss;
}

/* What the model makes of targets, added up: losses, targets that count, and those with the largest logit. */
typedef struct answer {
    double loss;
    int targets, hits;
} answer;

static void reference_answer(const reference *r, const double *w, const micro_batch *mb, answer *sum)
{
    double *stream = malloc(stream_count(r) * sizeof(double)), *logits = new_logits(r);
    int V = r->model.vocab, counted = 0;
    double loss = forward(r, w, mb, stream, logits);
    for (int row = 0; row < r->batch * r->seq_len; row++) {
        int best = 0;
        for (int v = 1; v < V; v++)
            if (logits[row * V + v] > logits[row * V + best]) best = v;
        counted += mb->targets[row] >= 0;
        sum->hits += mb->targets[row] == best;
    }
    sum->loss += loss * counted;
    sum->targets += counted;
    free(stream);
    free(logits);
}

/* A stage of a micro-batch, for differences: weights and input that may be changed for a moment, room for an
   output, the gradient of the loss by the output (the head needs none). */
typedef struct experiment {
    const micro_batch *mb;
    double *w, *x, *y;
    const double *slope;
} experiment;

/* The derivative of the loss by a weight or an input of the stage, as a central difference. Its error is
   eps^2/6 times the third derivative plus about 2^-52 |loss| / eps from rounding: at 1e-5 both are near
   1e-10, far below the precision of float32. */
static double derivative(const reference *r, const experiment *e, int stage, double *at)
{
    const double eps = 1e-5, was = *at;
    int outputs = stage > 2 * r->model.layers ? 0 : r->batch * r->seq_len * r->model.d_model;
    double difference = 0;
    for (int side = -1; side <= 1; side += 2) {
        *at = was + side * eps;
        double sum = run_stage(r, e->w, e->mb, stage, e->x, e->y);
        for (int i = 0; i < outputs; i++) sum += e->y[i] * e->slope[i];
        difference += side * sum;
    }
    *at = was;
    return difference / (2 * eps);
}

/* The gradient of that loss, element by element; of parameters with a 1 in `of` alone, if that is not NULL.
   Differences of one stage at a time, from the last to the first: what a stage's output does to the loss is
   known by then. A tied weight is used by two. */
static void central_differences(const reference *r, const double *weights, const micro_batch *mb, int count,
                                const char *of, double *gradient)
{
    int last = 2 * r->model.layers + 1, rows = r->batch * r->seq_len;
    size_t width = (size_t)(rows * r->model.d_model);
    double *base = malloc(stream_count(r) * sizeof(double)), *logits = new_logits(r);
    double *slope[2] = {malloc(width * sizeof(double)), malloc(width * sizeof(double))};
    memset(gradient, 0, r->weights * sizeof(double));
    use_threads(0);
    for (int m = 0; m < count; m++) {
        forward(r, weights, mb + m, base, logits);
        for (int s = last; s >= 0; s--) {
            int inputs = s ? (int)width : 0;
#ifdef _OPENMP
#pragma omp parallel
#endif
            {
                experiment e = {mb + m, malloc(r->weights * sizeof(double)), malloc(width * sizeof(double)),
                                s == last ? new_logits(r) : malloc(width * sizeof(double)), slope[s % 2]};
                memcpy(e.w, weights, r->weights * sizeof(double));
                if (s) memcpy(e.x, base + (size_t)(s - 1) * width, width * sizeof(double));
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 16)
#endif
                for (int i = 0; i < inputs + (int)r->weights; i++) {
                    const parameter *p = r->parameter;
                    int k = i - inputs;
                    if (k < 0) {
                        slope[1 - s % 2][i] = derivative(r, &e, s, e.x + i);
                        continue;
                    }
                    while ((size_t)k >= p->first + p->count) p++;
                    if (of && !of[p - r->parameter]) continue;
                    if (s == p->stage || (s == last && r->model.tied_head && p == r->parameter))
                        gradient[k] += derivative(r, &e, s, e.w + k) / count;
                }
                free(e.w), free(e.x), free(e.y);
            }
        }
    }
    use_threads(1);
    free(base), free(logits), free(slope[0]), free(slope[1]);
}

/* ------------------------------------------------------------------------------- driving the library ---- */

/* What most tests share: a small model in a policy, and its batch. */
static setup small_setup(void)
{
    setup s = {.model = {.layers = 2, .heads = 2, .d_model = 16, .d_ff = 32, .vocab = 32, .max_seq = 11},
               .policy = {.loss_chunk_rows = 3, .accumulate = 2},
               .optim = {.lr = 1e-3f, .seed = SEED},
               .batch = 2,
               .seq_len = 8};
    return s;
}

/* A new trainer is a new case. */
static mtt_trainer *open_trainer(const setup *s)
{
    mtt_trainer *trainer = NULL;
    new_case();
    mtt_status status = mtt_trainer_create(&env, &s->model, &s->policy, &s->optim, mtt_cpu_backend(),
                                           s->batch, s->seq_len, &trainer);
    if (status) {
        check(0, "a trainer could not be made: %s: %s", mtt_status_string(status), env.error);
        exit(finish()); /* nothing below makes sense without */
    }
    return trainer;
}

static reference reference_of(const setup *s)
{
    reference r;
    mtt_model_desc m = s->model;
    mtt_model_resolve(&env, &s->model, &m);
    reference_init(&r, &m, s->policy.window, s->batch, s->seq_len);
    return r;
}

static mtt_counters *counters_of(const mtt_trainer *trainer)
{
    return trainer->schedule->programs[MTT__TRAIN].counters->data;
}

static mtt_scale *scales_of(const mtt_trainer *trainer)
{
    return trainer->schedule->programs[MTT__TRAIN].scales->data;
}

static int find_parameter(const mtt_trainer *trainer, const char *name)
{
    int64_t shape[2];
    for (int i = 0; mtt_parameter(trainer, i, shape); i++)
        if (strcmp(mtt_parameter(trainer, i, shape), name) == 0) return i;
    return -1;
}

typedef mtt_status (*getter)(mtt_trainer *, int, float *);

/* All parameters or gradients, in the order of the reference. */
static void read_all(mtt_trainer *trainer, const reference *r, getter get, float *values)
{
    for (int i = 0; i < r->parameters; i++)
        if (get(trainer, find_parameter(trainer, r->parameter[i].name), values + r->parameter[i].first))
            check(0, "%s could not be read: %s", r->parameter[i].name, env.error);
}

static float *parameters_of(mtt_trainer *trainer, const reference *r)
{
    float *values = malloc(r->weights * sizeof(float));
    read_all(trainer, r, mtt_parameter_get, values);
    return values;
}

static void write_all(mtt_trainer *trainer, const reference *r, const float *values)
{
    for (int i = 0; i < r->parameters; i++)
        if (mtt_parameter_set(trainer, find_parameter(trainer, r->parameter[i].name),
                              values + r->parameter[i].first))
            check(0, "%s could not be set: %s", r->parameter[i].name, env.error);
}

/* Weights large enough for gradients of order one: gains about 1, matrices 1/sqrt(inputs), embeddings 1/2.
   All are exact in BF16, so that every precision computes the same function. */
static float *random_weights(const reference *r)
{
    float *w = malloc(r->weights * sizeof(float));
    for (int i = 0; i < r->parameters; i++) {
        const parameter *p = r->parameter + i;
        int gain = !p->cols && strstr(p->name, ".weight") != NULL;
        double scale = !p->cols ? 0.1 : p->name[0] == 'h' ? 1 / sqrt(p->rows) : 0.5;
        for (size_t e = 0; e < p->count; e++)
            w[p->first + e] = mtt__from_bf16(mtt__to_bf16((float)(gain + scale * normal())));
    }
    return w;
}

/* `ignored` targets of each micro-batch become -1. */
static void random_tokens(const setup *s, int micro_batches, int ignored, int32_t *tokens, int32_t *targets)
{
    int rows = s->batch * s->seq_len;
    for (int i = 0; i < rows * micro_batches; i++)
        tokens[i] = below(s->model.vocab), targets[i] = below(s->model.vocab);
    for (int m = 0; m < micro_batches; m++)
        for (int i = 0; i < ignored; i++) targets[m * rows + (i * 5 + m) % rows] = -1;
}

static double largest_of(const double *x, size_t count)
{
    double largest = 0;
    for (size_t i = 0; i < count; i++) largest = fabs(x[i]) > largest ? fabs(x[i]) : largest;
    return largest;
}

/* |a - b| / |b| over whole vectors. */
static double relative_error(const float *a, const double *b, size_t count)
{
    double difference = 0, size = 0;
    for (size_t i = 0; i < count; i++) difference += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i];
    return sqrt(difference / size);
}

static double relative_difference(const float *a, const float *b, size_t count)
{
    double difference = 0, size = 0;
    for (size_t i = 0; i < count; i++)
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]), size += (double)b[i] * b[i];
    return sqrt(difference / (size > 0 ? size : 1));
}

/* One step from given weights; gradients come back where the policy accumulates. */
static mtt_step_info one_step(const setup *s, const float *w, const int32_t *tokens, const int32_t *targets,
                              float *gradients)
{
    mtt_step_info info;
    reference r = reference_of(s);
    mtt_trainer *trainer = open_trainer(s);
    memset(&info, 0, sizeof(info));
    write_all(trainer, &r, w);
    mtt_status status = mtt_train_step(trainer, tokens, targets, &info);
    check(!status, "a step failed: %s", env.error);
    if (gradients) read_all(trainer, &r, mtt_gradient_get, gradients);
    mtt_trainer_destroy(trainer);
    return info;
}

static const char *const PRECISIONS[] = {"FP32", "TF32", "BF16", "FP16", "FP8"};
static const char *const RECOMPUTES[] = {"none",          "selective",     "layer",
                                         "segments of 1", "segments of 2", "budget",
                                         "recursive",     "every 2nd layer"};
enum { WAYS = 8 };

static size_t arena_of(const setup *s)
{
    mtt_plan_report report;
    memset(&report, 0, sizeof(report));
    mtt_status status = mtt_plan(&env, &s->model, &s->policy, s->batch, s->seq_len, &report);
    check(!status, "a plan failed: %s", env.error);
    return report.arena_bytes;
}

/* The ways to recompute; the budget lies between what layer and none need. */
static void set_recompute(setup *s, int way)
{
    static const mtt_recompute HOW[WAYS] = {
        MTT_RECOMPUTE_NONE,     MTT_RECOMPUTE_SELECTIVE, MTT_RECOMPUTE_LAYER,     MTT_RECOMPUTE_SEGMENTS,
        MTT_RECOMPUTE_SEGMENTS, MTT_RECOMPUTE_BUDGET,    MTT_RECOMPUTE_RECURSIVE, MTT_RECOMPUTE_LAYER};
    s->policy.recompute = HOW[way];
    s->policy.segment = way == 3 ? 1 : way == 4 || way == 7 ? 2 : 0;
    if (way == 5) {
        setup none = *s, layer = *s;
        none.policy.recompute = MTT_RECOMPUTE_NONE;
        layer.policy.recompute = MTT_RECOMPUTE_LAYER;
        s->policy.budget_bytes = (arena_of(&none) + arena_of(&layer)) / 2;
        if (s->policy.budget_bytes < arena_of(&layer)) s->policy.budget_bytes = arena_of(&layer);
    }
}

/* ------------------------------------------------------------------------------------ gradient check ---- */

static void check_parameters(const setup *s)
{
    reference r = reference_of(s);
    mtt_trainer *trainer = open_trainer(s);
    int64_t shape[2] = {0, 0};
    int count = 0;
    while (mtt_parameter(trainer, count, shape)) count++;
    check(count == r.parameters, "%d parameters instead of %d", count, r.parameters);
    for (int i = 0; i < r.parameters; i++) {
        const parameter *p = r.parameter + i;
        int at = find_parameter(trainer, p->name);
        check(at >= 0, "there is no parameter %s", p->name);
        if (at < 0) exit(finish());
        mtt_parameter(trainer, at, shape);
        check(shape[0] == p->rows && shape[1] == p->cols, "%s is %d x %d, not %d x %d", p->name,
              (int)shape[0], (int)shape[1], p->rows, p->cols);
    }
    mtt_trainer_destroy(trainer);
}

/* Rounding in float32 is 6e-8 a term. Through sums of 16 to 100 terms and a few layers the gradients come out
   within a quarter of what is allowed here. Returns the largest error as a part of it. */
static double check_gradient(const reference *r, const float *gradient, const double *wanted,
                             const char *what)
{
    double worst = 0;
    for (int i = 0; i < r->parameters; i++) {
        const parameter *p = r->parameter + i;
        double scale = largest_of(wanted + p->first, p->count);
        for (size_t e = p->first; e < p->first + p->count; e++) {
            double part =
                fabs(gradient[e] - wanted[e]) / (8e-7 * (scale > 1 ? scale : 1) + 8e-5 * fabs(wanted[e]));
            check(part <= 1, "%s: gradient of %s[%d] is %.9g, central differences say %.9g", what, p->name,
                  (int)(e - p->first), (double)gradient[e], wanted[e]);
            if (!(part <= 1)) return part;
            worst = part > worst ? part : worst;
        }
    }
    return worst;
}

/* A seed under which some element of the embedding draws the very number where dropping ends. */
static uint64_t seed_at_the_edge(const reference *r, float p)
{
    uint64_t seed = SEED;
    uint32_t word[4], threshold = (uint32_t)floor((double)p * 65536 + 0.5);
    for (int e = 0;; e += 8) {
        if (e == r->batch * r->seq_len * r->model.d_model) e = 0, seed++;
        philox(seed, (uint64_t)e / 8, (uint64_t)MTT__SITE_EMBED << 56, 10, word);
        for (int k = 0; k < 8; k++)
            if ((word[k / 2] >> (k % 2 * 16) & 0xffff) == threshold) return seed;
    }
}

/* Probabilities are rounded to what the bits of an element can say; attention's do not vanish. */
static void dropout_probabilities(void)
{
    static const struct { float p; int bits; uint32_t threshold; } CASES[] = {
        {0, 8, 0}, {1e-6f, 8, 1}, {0.1f, 8, 26}, {0.9f, 8, 230},
        {0, 16, 0}, {1e-6f, 16, 0}, {0.1f, 16, 6554}, {0.9f, 16, 58982}};
    for (size_t i = 0; i < MTT__LENGTH(CASES); i++) {
        int bits = CASES[i].bits;
        uint32_t threshold = mtt__dropout_threshold(CASES[i].p, bits);
        double kept = 1 - ldexp(threshold, -bits), scale = mtt__dropout_scale(threshold, bits);
        check(threshold == CASES[i].threshold, "dropout %g of %d bits: threshold %u", (double)CASES[i].p,
              bits, threshold);
        check(fabs(scale * kept - 1) < 1e-7, "dropout %g of %d bits: scale %g", (double)CASES[i].p, bits,
              scale);
    }
}

static double worst_gradient, worst_loss, worst_half[5], worst_half_loss[5];

static void check_execution(const setup *s, const reference *r, const float *w, const int32_t *tokens,
                            const int32_t *targets, double loss, const double *gradient, const char *what)
{
    float *g = malloc(r->weights * sizeof(float));
    mtt_step_info info = one_step(s, w, tokens, targets, g);
    double norm = 0, error = fabs(info.loss / loss - 1), difference = relative_error(g, gradient, r->weights);
    int half = s->policy.precision >= MTT_BF16;
    for (size_t i = 0; i < r->weights; i++) norm += (double)g[i] * g[i];
    check(fabs(sqrt(norm) / info.grad_norm - 1) < 1e-5, "%s: gradient norm %g, but %g is reported", what,
          sqrt(norm), (double)info.grad_norm);
    if (!half) {
        double part = check_gradient(r, g, gradient, what);
        check(error < 2e-7, "%s: loss %.9g, the reference says %.9g", what, info.loss, loss);
        worst_gradient = part > worst_gradient ? part : worst_gradient;
        worst_loss = error > worst_loss ? error : worst_loss;
    } else {
        /* Every activation and its gradient is rounded to 8 bits of mantissa (BF16) or 11 (FP16). A plain
           model in JAX with such activations and weights like these is off by 1.0e-2 to 1.9e-2 and 1.1e-3 to
           2.4e-3 of the whole gradient; less than twice that passes. FP8 rounds operands to 4 bits (e4m3) and
           3 (e5m2) where BF16 has 8: to units that are 16 and 32 times as large. In a loss, errors cancel by
           chance, so it may be off by twice as much as its 16. */
        static const double GRADIENT[] = {0, 0, 3e-2, 4e-3}, LOSS[] = {0, 0, 5e-3, 6e-4};
        int precision = (int)s->policy.precision, fp8 = precision == MTT_FP8;
        double most = fp8 ? 32 * worst_half[MTT_BF16] : GRADIENT[precision];
        double most_loss = fp8 ? 2 * 16 * worst_half_loss[MTT_BF16] : LOSS[precision];
        check(difference < most, "%s: the gradient is off by %g, not %g", what, difference, most);
        check(error < most_loss, "%s: loss %.9g, the reference says %.9g", what, info.loss, loss);
        check(difference > 1e-5, "%s: the gradient is as exact as FP32's (%g): nothing was rounded", what,
              difference);
        check(!fp8 || difference > worst_half[MTT_BF16], "%s: the gradient is as exact as BF16's (%g)", what,
              difference);
        worst_half[precision] = fmax(worst_half[precision], difference);
        worst_half_loss[precision] = fmax(worst_half_loss[precision], error);
    }
    free(g);
}

/* Draws two micro-batches. Returns their gradient by central differences, to be freed, and their loss. */
static double *reference_gradient(const setup *s, const reference *r, const float *w, int ignored,
                                  int32_t *tokens, int32_t *targets, double *loss)
{
    double *wide = malloc(r->weights * sizeof(double)), *gradient = malloc(r->weights * sizeof(double));
    for (size_t i = 0; i < r->weights; i++) wide[i] = w[i];
    random_tokens(s, 2, ignored, tokens, targets);
    micro_batch mb[2] = {{tokens, targets, make_masks(r, s->model.dropout, s->optim.seed, 0)},
                         {tokens + 16, targets + 16, make_masks(r, s->model.dropout, s->optim.seed, 1)}};
    *loss = reference_loss(r, wide, mb, 2);
    central_differences(r, wide, mb, 2, NULL, gradient);
    free(wide);
    free(mb[0].masks);
    free(mb[1].masks);
    return gradient;
}

static void gradients(void)
{
    static const struct { int window, tied, no_bias, learned, ignored, vocab; float dropout; } FUNCTIONS[] = {
        {0, 0, 0, 0, 0, 32, 0}, {1, 1, 0, 1, 3, 37, 0.2f}, {2, 0, 1, 1, 0, 32, 0}, {3, 1, 1, 0, 3, 29, 0.2f},
        {8, 0, 0, 0, 5, 130, 0.2f}};
    for (size_t f = 0; f < MTT__LENGTH(FUNCTIONS); f += quick ? 3 : 1) {
        setup s = small_setup();
        s.policy.window = FUNCTIONS[f].window;
        s.model.tied_head = FUNCTIONS[f].tied;
        s.model.no_head_bias = FUNCTIONS[f].no_bias;
        s.model.positions = FUNCTIONS[f].learned ? MTT_POSITIONS_LEARNED : MTT_POSITIONS_SINUSOIDAL;
        s.model.vocab = FUNCTIONS[f].vocab;
        s.model.dropout = FUNCTIONS[f].dropout;
        check_parameters(&s);

        int32_t tokens[32], targets[32];
        reference r = reference_of(&s);
        float *w = random_weights(&r);
        if (s.model.dropout > 0) s.optim.seed = seed_at_the_edge(&r, s.model.dropout);
        /* embeddings so small that the norm's epsilon counts, and gradients too large for 65,536 */
        if (f == 2) {
            for (size_t i = 0; i < r.parameter[2].first; i++) w[i] /= 16;
            s.optim.loss_scale = 1024;
        }
        double loss, *gradient = reference_gradient(&s, &r, w, FUNCTIONS[f].ignored, tokens, targets, &loss);

        for (int i = 0; i < 6 * 2 * 2 * WAYS; i += quick ? 5 : 1) { /* the last two: products of FP8 */
            int way = i % WAYS, kind = i / WAYS / 4;
            char what[120];
            s.policy.precision = (mtt_precision)(kind < MTT_FP8 ? kind : MTT_FP8);
            s.policy.fp8_products = (mtt_fp8_products)(kind < MTT_FP8 ? 0 : kind - MTT_FP8);
            s.policy.attention = (mtt_attention)(i / WAYS % 2);
            s.policy.loss = (mtt_loss)(1 + i / WAYS / 2 % 2);
            if (way && s.policy.precision != MTT_FP32) continue;
            set_recompute(&s, way);
            snprintf(what, sizeof(what), "function %d, %s, %s, %s, recompute %s", (int)f,
                     PRECISIONS[s.policy.precision], s.policy.attention ? "flash" : "plain",
                     s.policy.loss == MTT_LOSS_CHUNKED ? "chunked" : "full", RECOMPUTES[way]);
            check_execution(&s, &r, w, tokens, targets, loss, gradient, what);
        }
        free(w);
        free(gradient);
    }
    printf("gradients: largest error %.3f of the tolerance in FP32, %.1e, %.1e and %.1e of the whole in "
           "BF16, FP16 and FP8; loss %.1e\n",
           worst_gradient, worst_half[MTT_BF16], worst_half[MTT_FP16], worst_half[MTT_FP8], worst_loss);
}

/* ---- norms, MLPs and biases ---- */

/* The first cases have one option each, or the defaults; the others are drawn. */
static void draw_options(mtt_model_desc *m, int number)
{
    int drawn = number >= 10;
    m->norm = (mtt_norm_form)(drawn ? below(2) : number == 1 || number == 2);
    m->norm_eps = number == 2 || (drawn && below(3) == 0) ? 0.05f : 0;
    m->norm_place = (mtt_norm_place)(drawn ? below(3) : number == 3 || number == 4 ? number - 2 : 0);
    m->mlp = (mtt_mlp)(drawn ? below(mlp_forms()) : number >= 5 && number <= 7 ? number - 4 : 0);
    m->no_biases = drawn ? below(2) : number == 8;
    if (!drawn) return;
    m->tied_head = below(2);
    m->no_head_bias = below(2);
    m->positions = (mtt_positions)below(4);
    m->rotary_interleaved = below(2);
    m->rotary_factor = below(2) ? 1 : (float)(2 + below(31));
    if (m->rotary_factor > 1 && below(2)) m->rotary_low = 0.5f, m->rotary_high = 2, m->rotary_original = 20;
    m->qk_norm = below(2);
    if (below(2)) m->heads_kv = 1, m->d_head = 16;
    m->dropout = below(3) ? 0 : 0.2f;
}

/* The first `precisions` in turn. */
static void draw_model_and_policy(setup *s, int number, int precisions)
{
    draw_options(&s->model, 10 + number);
    s->policy.precision = (mtt_precision)(number % precisions);
    s->policy.state = (mtt_state)below(2);
    s->policy.loss = (mtt_loss)(1 + below(2));
    s->policy.attention = (mtt_attention)below(2);
}

/* The gradient of one step in a policy: for FP32 that of the central differences, and the same bits with
   every recomputation. In 8 bits a kept input has 4 bits of mantissa, as FP8's operands. */
static void check_options(setup *s, const reference *r, const float *w, const int32_t *tokens,
                          const int32_t *targets, double loss, const double *gradient, const char *what)
{
    static const double MOST[] = {0, 0, 6e-2, 8e-3, 1, 1};
    size_t bytes = r->weights * sizeof(float);
    float *g = malloc(bytes), *again = malloc(bytes);
    for (int kind = 0; kind < MTT_FP8 + 2; kind++) {
        int fp8 = kind >= MTT_FP8;
        s->policy.precision = (mtt_precision)(fp8 ? MTT_FP8 : kind);
        s->policy.fp8_products = (mtt_fp8_products)(fp8 ? kind - MTT_FP8 : 0);
        s->policy.attention = (mtt_attention)below(2);
        s->policy.loss = (mtt_loss)(1 + below(2));
        set_recompute(s, 0);
        mtt_step_info info = one_step(s, w, tokens, targets, g), other;
        double difference = relative_error(g, gradient, r->weights);
        if (kind < MTT_BF16) check_gradient(r, g, gradient, what);
        else
            check(difference > 1e-5 && difference < MOST[kind],
                  "%s, precision %d: the gradient is off by %g", what, kind, difference);
        check(fabs(info.loss / loss - 1) < (kind < MTT_BF16 ? 3e-7 : fp8 ? 0.1 : 1e-2),
              "%s, precision %d: loss %.9g, the reference says %.9g", what, kind, info.loss, loss);
        for (int way = 1; way < WAYS; way++) {
            set_recompute(s, way);
            other = one_step(s, w, tokens, targets, again);
            check(other.loss == info.loss && !memcmp(g, again, bytes),
                  "%s, precision %d: other bits with recompute %s", what, kind, RECOMPUTES[way]);
        }
    }
    free(g);
    free(again);
}

static void model_options(void)
{
    for (int number = 0; number < (quick ? 7 : 34); number++) {
        setup s = small_setup();
        int32_t tokens[32], targets[32];
        char what[160];
        draw_options(&s.model, number);
        s.policy.window = below(2) * 3;
        s.policy.state = (mtt_state)below(2);
        snprintf(what, sizeof(what), "norm %d, eps %g, place %d, MLP %d, no biases %d, tied %d, dropout %g, "
                 "positions %d, norm of q %d, %d heads of keys", (int)s.model.norm, (double)s.model.norm_eps,
                 (int)s.model.norm_place, (int)s.model.mlp, s.model.no_biases, s.model.tied_head,
                 (double)s.model.dropout, (int)s.model.positions, s.model.qk_norm, s.model.heads_kv);
        check_parameters(&s);
        reference r = reference_of(&s);
        float *w = random_weights(&r);
        if (s.model.norm_place == MTT_NORM_NONE) { /* activations grow from layer to layer */
            for (int i = r.layer_first; i < r.head_first; i++)
                for (size_t e = 0; e < r.parameter[i].count; e++) w[r.parameter[i].first + e] /= 2;
            s.optim.loss_scale = 1024;
        }
        double loss, *gradient = reference_gradient(&s, &r, w, below(4), tokens, targets, &loss);
        check_options(&s, &r, w, tokens, targets, loss, gradient, what);
        free(w);
        free(gradient);
    }
}

/* ---- frozen parameters ---- */

/* Draws what is frozen: names, or patterns of them; some are left. */
static void draw_frozen(const reference *r, char *patterns, size_t capacity, int *frozen)
{
    static const char *const PATTERNS[] = {"wte.*,h.0.*", "*.weight", "h.*", "*.c_fc.*,*mlp.c_proj.w*",
                                           "w*,*c_*", "h.0.*,h.1.a*n.c_attn.*,wte.weight"};
    int left = 0, number = below(4), which = below((int)MTT__LENGTH(PATTERNS)), only = below(r->parameters);
    snprintf(patterns, capacity, "%s", number ? "" : PATTERNS[which]);
    for (int i = 0; i < r->parameters; i++) {
        const char *name = r->parameter[i].name;
        if (number == 3) frozen[i] = i != only;
        else if (number) frozen[i] = below(4) >= number;
        else if (which == 0) frozen[i] = !strncmp(name, "wte", 3) || !strncmp(name, "h.0", 3);
        else if (which == 1) frozen[i] = strstr(name, ".weight") != NULL;
        else if (which == 2) frozen[i] = name[0] == 'h';
        else if (which == 3) frozen[i] = strstr(name, ".c_fc.") || strstr(name, "mlp.c_proj.w");
        else if (which == 4) frozen[i] = name[0] == 'w' || strstr(name, "c_");
        else frozen[i] = !strncmp(name, "h.0", 3) || strstr(name, "h.1.attn.c_attn.") || name[1] == 't';
        if (number && frozen[i])
            snprintf(patterns + strlen(patterns), capacity - strlen(patterns), "%s%s", *patterns ? "," : "",
                     name);
        left += !frozen[i];
    }
    if (!left || left == r->parameters) draw_frozen(r, patterns, capacity, frozen);
}

/* What a schedule must not have: tensors for gradients of what is frozen, a backward pass below the lowest
   layer with something to train. The optimizer's state has the trained elements alone. */
static void check_frozen_plan(const mtt_schedule *schedule, const reference *r, const int *frozen,
                              const char *what)
{
    int count, lowest = r->model.layers, trained = 0;
    const mtt_tensor *const *tensors = mtt_schedule_tensors(schedule, &count);
    for (int i = 0; i < count; i++)
        for (int k = 0; k < r->parameters; k++) {
            const char *name = tensors[i]->name;
            int gradient = !strncmp(name, "d_", 2) ? 2 : !strncmp(name, "sum_", 4) ? 4 : 0;
            check(!gradient || !frozen[k] || strcmp(name + gradient, r->parameter[k].name),
                  "%s: %s is planned", what, name);
        }
    for (int k = 0; k < r->parameters; k++)
        if (!frozen[k] && r->parameter[k].from < lowest) lowest = r->parameter[k].from;
    for (int k = 0; k < r->parameters; k++)
        trained += frozen[k] ? 0 : (int)(r->parameter[k].count + 63) / 64 * 64;
    if (r->model.tied_head && !frozen[0]) lowest = -1;
    const mtt_op *ops = mtt_schedule_ops(schedule, &count);
    for (int i = 0; i < count; i++) {
        const mtt_op *op = ops + i;
        int outside = op->layer < 0 && op->kind != MTT_OP_embed_backward; /* the head */
        check(op->phase != MTT_BACKWARD || outside || op->recomputed || op->layer >= lowest,
              "%s: %s in layer %d, below layer %d",
              what, mtt_op_name(op->kind), op->layer, lowest);
        if (op->kind == MTT_OP_linear_backward_weight) {
            const mtt_op_linear_backward_weight *o = MTT_OPERANDS_OF(linear_backward_weight, op);
            check(o->d_weight || o->d_bias, "%s: a linear_backward_weight for nothing", what);
        }
    }
    for (int i = 0; i < count; i++)
        if (ops[i].kind == MTT_OP_adamw) {
            const mtt_tensor *m = MTT_OPERANDS_OF(adamw, &ops[i])->m;
            int64_t padded = (int64_t)(r->model.vocab + 127) / 128 * 128 * (r->model.d_model + 1) * 2;
            int64_t kept = m->shape[0] * (m->dtype == MTT_U8 ? 32 : 1);
            check(kept >= trained && kept <= trained + padded, "%s: state of %d elements for %d", what,
                  (int)kept, trained);
        }
}

/* The mlp.c_proj.weight that ends the backward pass, since nothing that its input depends on is trained; or
   -1. A post-norm ln_2 comes after it. */
static int last_projection(const reference *r, const int *frozen)
{
    enum { LN_2 = 6, LN_2_BIAS, MLP_PROJ = 10 };
    int layer = r->model.layers;
    for (int k = 0; k < r->parameters; k++)
        if (!frozen[k] && r->parameter[k].from < layer) layer = r->parameter[k].from;
    if (layer < 0 || layer == r->model.layers || frozen[r->at[layer][MLP_PROJ]]) return -1;
    const int *at = r->at[layer], post = r->model.norm_place == MTT_NORM_POST;
    for (int k = 0; k < r->parameters; k++) {
        int after = k > at[MLP_PROJ] && k < r->gains_first;
        if (post && (k == at[LN_2] || k == at[LN_2_BIAS])) after = 1;
        if (!frozen[k] && r->parameter[k].from == layer && k != at[MLP_PROJ] && !after) return -1;
    }
    return at[MLP_PROJ];
}

/* The first step from the same weights gives the bits of a model without frozen parameters: loss, gradients,
   updates. Frozen ones stay as they are. A checkpoint goes on to the bit, and not where others are frozen. */
static void frozen_parameters(void)
{
    for (int number = 0; number < (quick ? 60 : 600); number++) {
        setup s = small_setup(), whole;
        int32_t tokens[32], targets[32];
        int frozen[MAX_PARAMETERS];
        char what[1600], patterns[1500];
        draw_options(&s.model, 10 + number);
        s.policy.precision = (mtt_precision)(number % 5);
        s.policy.fp8_products = (mtt_fp8_products)below(2);
        s.policy.state = (mtt_state)below(2);
        s.policy.loss = (mtt_loss)(1 + below(2));
        s.policy.attention = (mtt_attention)below(2);
        s.policy.accumulate = 1 + below(2);
        s.policy.keep_gradients = below(2);
        s.optim.clip = -1; /* the norm is that of what is trained */
        s.optim.weight_decay = 0.3f;
        s.optim.loss_scale = 1024;
        whole = s;
        set_recompute(&s, below(5));
        reference r = reference_of(&s);
        draw_frozen(&r, patterns, sizeof(patterns), frozen);
        s.policy.freeze = patterns;
        snprintf(what, sizeof(what), "%s %d, recompute %d, freeze %.1400s", PRECISIONS[s.policy.precision],
                 s.policy.fp8_products, s.policy.recompute, patterns);
        float *w = random_weights(&r), *a[6];
        for (int i = 0; i < 6; i++) a[i] = calloc(r.weights, sizeof(float));
        random_tokens(&s, 2, below(4), tokens, targets);
        mtt_trainer *t[2] = {open_trainer(&whole), open_trainer(&s)};
        mtt_step_info info[2];
        check_frozen_plan(mtt_trainer_schedule(t[1]), &r, frozen, what);
        for (int i = 0; i < 2; i++) {
            write_all(t[i], &r, w);
            read_all(t[i], &r, mtt_parameter_get, a[i]);
            check(!mtt_train_step(t[i], tokens, targets, &info[i]), "%s: %s", what, env.error);
            read_all(t[i], &r, mtt_parameter_get, a[2 + i]);
        }
        check(info[0].loss == info[1].loss, "%s: loss %.9g, not %.9g", what, info[1].loss, info[0].loss);
        /* FP8's backward products: an activation's backward pass rounds the activation once, to 8 bits.
           Without one it is rounded to 16 bits before, which may give a neighbour of e4m3: up to an eighth
           away. */
        int eight = s.policy.precision == MTT_FP8;
        int lowest = eight ? last_projection(&r, frozen) : -1;
        check(info[1].arena_bytes <= info[0].arena_bytes || s.policy.recompute, "%s: more memory", what);
        for (int i = 0; i < r.parameters; i++) {
            const parameter *p = &r.parameter[i];
            size_t bytes = p->count * sizeof(float);
            int at = find_parameter(t[1], p->name);
            check(i == lowest || !memcmp(a[3] + p->first, a[frozen[i] ? 1 : 2] + p->first, bytes),
                  "%s: %s %s", what, p->name, frozen[i] ? "has changed" : "is updated otherwise");
            mtt_status got = mtt_gradient_get(t[1], at, a[5] + p->first);
            check((got == MTT_OK) == (!frozen[i] && (s.policy.accumulate > 1 || s.policy.keep_gradients)),
                  "%s: the gradient of %s: %s", what, p->name, mtt_status_string(got));
            if (got) continue;
            mtt_gradient_get(t[0], at, a[4] + p->first);
            check(i == lowest ? relative_difference(a[5] + p->first, a[4] + p->first, p->count) < 0.125
                              : !memcmp(a[4] + p->first, a[5] + p->first, bytes),
                  "%s: another gradient of %s", what, p->name);
        }
        if (number % 4 == 0) {
            check(!mtt_save(t[1], in("frozen"), NULL), "%s: %s", what, env.error);
            size_t bytes = 0;
            free(read_file(in("frozen"), &bytes));
            check(bytes == mtt_checkpoint_bytes(t[1]), "%s: a file of %zu bytes, not %d", what, bytes,
                  (int)mtt_checkpoint_bytes(t[1]));
            check(mtt_resume(t[0], in("frozen"), NULL) == MTT_E_MISMATCH &&
                  strstr(env.error, "is frozen there"), "%s: a frozen run goes on with all: %s", what,
                  env.error);
            check(!mtt_save(t[0], in("whole"), NULL), "%s: %s", what, env.error);
            check(mtt_resume(t[1], in("whole"), NULL) == MTT_E_MISMATCH &&
                  strstr(env.error, "is trained there"), "%s: a run of all goes on frozen: %s", what,
                  env.error);
            check(!mtt_train_step(t[1], tokens, targets, &info[1]), "%s: %s", what, env.error);
            read_all(t[1], &r, mtt_parameter_get, a[4]);
            mtt_trainer_destroy(t[0]);
            t[0] = open_trainer(&s);
            check(!mtt_resume(t[0], in("frozen"), NULL), "%s: %s", what, env.error);
            check(!mtt_train_step(t[0], tokens, targets, &info[0]), "%s: %s", what, env.error);
            read_all(t[0], &r, mtt_parameter_get, a[5]);
            check(info[0].loss == info[1].loss && !memcmp(a[4], a[5], r.weights * sizeof(float)),
                  "%s: resumed, the run differs", what);
        }
        for (int i = 0; i < 2; i++) mtt_trainer_destroy(t[i]);
        for (int i = 0; i < 6; i++) free(a[i]);
        free(w);
    }
}

/* ---- adapters ---- */

typedef struct adapter {
    int weight;         /* its place in the reference */
    float *a, *b;       /* [rows, RANK], [RANK, columns] */
    double *d_a, *d_b;  /* their gradients */
} adapter;
enum { RANK = 8 };

static int is_target(const char *name, int which)
{
    if (!strstr(name, "c_") || !strstr(name, ".weight")) return 0;
    return which == 0 ? strstr(name, "attn.c_attn") != NULL : which == 1 ? 1 : which == 2 ? name[2] == '1'
           : strstr(name, "mlp.") || strstr(name, "attn.c_proj");
}

/* Reads or writes the adapters' parameters or gradients, `values` for A and then B of each. */
static void move_adapters(mtt_trainer *t, const reference *r, const adapter *x, int count, getter get,
                          float *values)
{
    for (int i = 0; i < count; i++)
        for (int of_b = 0; of_b < 2; of_b++) {
            const parameter *p = &r->parameter[x[i].weight];
            char name[60];
            int64_t shape[2] = {0, 0};
            snprintf(name, sizeof(name), "%.*s.lora_%c", (int)(strlen(p->name) - strlen(".weight")), p->name,
                     "AB"[of_b]);
            int at = mtt_parameter_find(t, name);
            check(mtt_parameter(t, at, shape) && shape[0] == (of_b ? RANK : p->rows) &&
                  shape[1] == (of_b ? p->cols : RANK), "there is no %s of that shape", name);
            if (get) check(!get(t, at, values), "%s: %s", name, env.error);
            else check(!mtt_parameter_set(t, at, of_b ? x[i].b : x[i].a), "%s: %s", name, env.error);
            values += get ? shape[0] * shape[1] : 0;
        }
}

/* Adapters against the reference: its model with merged weights W + s A B has the same loss, and if D is the
   gradient of the merged weight, those of A and B are s D B^T and s A^T D. */
static void adapters(void)
{
    static const char *const TARGETS[] = {NULL, "*", "h.1.*", "mlp.*,attn.c_proj"};
    static const double MOST[] = {1e-5, 1e-5, 6e-2, 8e-3};
    for (int number = 0; number < (quick ? 8 : 80); number++) {
        setup s = small_setup();
        int32_t tokens[32], targets[32];
        int which = number / 4 % 4, count = 0;
        adapter x[8];
        char what[100];
        draw_model_and_policy(&s, number, 4);
        s.policy.accumulate = 1 + below(2);
        s.policy.keep_gradients = 1;
        s.policy.lora_rank = RANK;
        s.policy.lora_alpha = number % 3 == 0 ? 0 : number % 3 == 1 ? 16 : 12;
        s.policy.lora_targets = TARGETS[which];
        s.optim.loss_scale = 1024;
        double scale = number % 3 == 0 ? 1 : number % 3 == 1 ? 2 : 1.5, loss;
        snprintf(what, sizeof(what), "adapters %d, %s", number, PRECISIONS[s.policy.precision]);
        reference r = reference_of(&s);
        float *w = random_weights(&r);
        double *wide = malloc(r.weights * sizeof(double)), *gradient = malloc(r.weights * sizeof(double));
        for (size_t i = 0; i < r.weights; i++) {
            if (s.model.norm_place == MTT_NORM_NONE && (int)i >= 0) w[i] /= 2;
            wide[i] = w[i];
        }
        size_t values = 0;
        char of[MAX_PARAMETERS];
        for (int k = 0; k < r.parameters; k++) {
            const parameter *p = &r.parameter[k];
            of[k] = (char)is_target(p->name, which);
            if (!of[k]) continue;
            adapter *at = &x[count++];
            at->weight = k;
            at->a = malloc((size_t)p->rows * RANK * sizeof(float));
            at->b = malloc((size_t)p->cols * RANK * sizeof(float));
            at->d_a = calloc((size_t)p->rows * RANK, sizeof(double));
            at->d_b = calloc((size_t)p->cols * RANK, sizeof(double));
            for (int i = 0; i < p->rows * RANK; i++)
                at->a[i] = mtt__from_bf16(mtt__to_bf16((float)(normal() / sqrt(p->rows))));
            for (int i = 0; i < p->cols * RANK; i++)
                at->b[i] = mtt__from_bf16(mtt__to_bf16((float)(0.2 * normal())));
            for (int i = 0; i < p->rows; i++)
                for (int j = 0; j < p->cols; j++)
                    for (int c = 0; c < RANK; c++)
                        wide[p->first + (size_t)(i * p->cols + j)] +=
                            scale * (double)at->a[i * RANK + c] * (double)at->b[c * p->cols + j];
            values += (size_t)(p->rows + p->cols) * RANK;
        }
        random_tokens(&s, 2, below(4), tokens, targets);
        if (s.policy.accumulate == 1) s.batch = 2;
        micro_batch mb[2] = {{tokens, targets, make_masks(&r, s.model.dropout, s.optim.seed, 0)},
                             {tokens + 16, targets + 16, make_masks(&r, s.model.dropout, s.optim.seed, 1)}};
        loss = reference_loss(&r, wide, mb, s.policy.accumulate);
        central_differences(&r, wide, mb, s.policy.accumulate, of, gradient);
        double *wanted = malloc(values * sizeof(double)), *to = wanted;
        for (int k = 0; k < count; k++) {
            const parameter *p = &r.parameter[x[k].weight];
            for (int i = 0; i < p->rows; i++)
                for (int j = 0; j < p->cols; j++)
                    for (int c = 0; c < RANK; c++) {
                        double d = scale * gradient[p->first + (size_t)(i * p->cols + j)];
                        x[k].d_a[i * RANK + c] += d * (double)x[k].b[c * p->cols + j];
                        x[k].d_b[c * p->cols + j] += d * (double)x[k].a[i * RANK + c];
                    }
            for (int i = 0; i < p->rows * RANK; i++) *to++ = x[k].d_a[i];
            for (int i = 0; i < p->cols * RANK; i++) *to++ = x[k].d_b[i];
        }
        float *got = malloc(values * sizeof(float)), *first = malloc(values * sizeof(float));
        float *final[2], *kept = malloc(r.weights * sizeof(float));
        float *after = malloc(r.weights * sizeof(float));
        mtt_step_info info[2];
        final[0] = malloc(values * sizeof(float)), final[1] = malloc(values * sizeof(float));
        for (int way = 0; way < WAYS; way++) {
            set_recompute(&s, way);
            mtt_trainer *t = open_trainer(&s);
            write_all(t, &r, w);
            move_adapters(t, &r, x, count, NULL, NULL);
            read_all(t, &r, mtt_parameter_get, kept);
            check(!mtt_train_step(t, tokens, targets, &info[way > 0]), "%s: %s", what, env.error);
            move_adapters(t, &r, x, count, mtt_gradient_get, way ? got : first);
            move_adapters(t, &r, x, count, mtt_parameter_get, final[way > 0]);
            read_all(t, &r, mtt_parameter_get, after);
            check(!memcmp(kept, after, r.weights * sizeof(float)), "%s: a frozen weight has changed", what);
            check(!way || (info[0].loss == info[1].loss && !memcmp(got, first, values * sizeof(float)) &&
                           !memcmp(final[0], final[1], values * sizeof(float))),
                  "%s: other bits with recompute %s", what, RECOMPUTES[way]);
            if (way == 0 && number % 2 == 0) { /* saved and resumed; merged */
                mtt__st st;
                check(!mtt_save(t, in("lora"), NULL) && !mtt_save_merged(t, in("merged")), "%s: %s", what,
                      env.error);
                move_adapters(t, &r, x, count, mtt_parameter_get, got);
                check(!mtt_train_step(t, tokens, targets, &info[1]), "%s: %s", what, env.error);
                move_adapters(t, &r, x, count, mtt_parameter_get, final[1]);
                mtt_trainer_destroy(t);
                t = open_trainer(&s);
                check(!mtt_resume(t, in("lora"), NULL), "%s: %s", what, env.error);
                check(!mtt_train_step(t, tokens, targets, &info[1]), "%s: %s", what, env.error);
                float *again = malloc(values * sizeof(float));
                move_adapters(t, &r, x, count, mtt_parameter_get, again);
                check(!memcmp(again, final[1], values * sizeof(float)), "%s: resumed, it differs", what);
                check(!mtt__st_open(&env, in("merged"), &st) && !mtt__st_verify(&st) &&
                      (int)st.tensors.count == r.parameters, "%s: %s", what, env.error);
                const float *at = got;
                for (int k = 0; k < count; k++) {
                    const parameter *p = &r.parameter[x[k].weight];
                    const mtt__st_entry *e = mtt__st_find(&st.tensors, p->name);
                    const float *a = at, *b = a + p->rows * RANK, *m = (const float *)(uintptr_t)e->data;
                    double worst = 0;
                    at = b + p->cols * RANK;
                    for (int i = 0; i < p->rows; i++)
                        for (int j = 0; j < p->cols; j++) {
                            double sum = kept[p->first + (size_t)(i * p->cols + j)];
                            for (int c = 0; c < RANK; c++)
                                sum += scale * (double)a[i * RANK + c] * (double)b[c * p->cols + j];
                            worst = fmax(worst, fabs(sum - (double)m[i * p->cols + j]));
                        }
                    check(worst < 1e-6, "%s: merged %s is off by %g", what, p->name, worst);
                }
                mtt__st_close(&st);
                check(mtt_resume(t, in("merged"), NULL) == MTT_E_MISMATCH, "%s: a merged file goes on", what);
                setup other = s;
                other.policy.lora_alpha = 40;
                mtt_trainer *u = open_trainer(&other);
                check(mtt_resume(u, in("lora"), NULL) == MTT_E_MISMATCH && strstr(env.error, "lora_alpha"),
                      "%s: another alpha: %s", what, env.error);
                mtt_trainer_destroy(u);
                other.policy.lora_rank = 0;
                u = open_trainer(&other);
                check(mtt_resume(u, in("lora"), NULL) == MTT_E_MISMATCH && strstr(env.error, "lora_rank"),
                      "%s: without adapters: %s", what, env.error);
                check(!mtt_save(u, in("plain"), NULL), "%s", env.error);
                check(mtt_resume(t, in("plain"), NULL) == MTT_E_MISMATCH && strstr(env.error, "lora_rank"),
                      "%s: with adapters: %s", what, env.error);
                mtt_trainer_destroy(u);
                free(again);
            }
            mtt_trainer_destroy(t);
        }
        double error = relative_error(first, wanted, values);
        int half = s.policy.precision >= MTT_BF16;
        check(error < MOST[s.policy.precision] && (!half || error > 1e-5), "%s: gradients are off by %g",
              what, error);
        check(fabs(info[0].loss / loss - 1) < (half ? 1e-2 : 3e-7), "%s: loss %.9g, the reference says %.9g",
              what, info[0].loss, loss);
        for (int k = 0; k < count; k++) free(x[k].a), free(x[k].b), free(x[k].d_a), free(x[k].d_b);
        for (int k = 0; k < 2; k++) free(final[k]), free(mb[k].masks);
        free(w), free(wide), free(gradient), free(wanted), free(got), free(first), free(kept), free(after);
    }
}

/* Initial adapters as PEFT's: A uniform up to 1 / sqrt(in), B zero, so that the model is what it was. */
static void new_adapters(void)
{
    setup s = small_setup();
    float a[16 * 8], b[8 * 48], largest = 0, sum = 0;
    s.policy.lora_rank = 8;
    mtt_trainer *t = open_trainer(&s);
    check(!mtt_parameter_get(t, mtt_parameter_find(t, "h.1.attn.c_attn.lora_A"), a) &&
          !mtt_parameter_get(t, mtt_parameter_find(t, "h.1.attn.c_attn.lora_B"), b), "%s", env.error);
    for (int i = 0; i < 8 * 48; i++) check(b[i] == 0, "B begins with %g", (double)b[i]);
    for (int i = 0; i < 16 * 8; i++) largest = fmaxf(largest, fabsf(a[i])), sum += a[i] * a[i];
    check(largest <= 0.25f && largest > 0.23f && fabsf(sum / 128 - 1.0f / 48) < 0.006f,
          "A begins with up to %g, mean square %g", (double)largest, (double)sum / 128);
    mtt_trainer_destroy(t);
    for (int i = 0; i < 4; i++) {
        static const char *const WORDS[] = {"multiple of 8", "fp8", "lora_targets", "lora_rank is 1032"};
        mtt_plan_report report;
        s.policy = (mtt_policy){.lora_rank = i == 0 ? 12 : i == 3 ? 1032 : 8};
        if (i == 1) s.policy.precision = MTT_FP8;
        if (i == 2) s.policy.lora_targets = "c_attn";
        mtt_status status = mtt_plan(&env, &s.model, &s.policy, s.batch, s.seq_len, &report);
        check(status == MTT_E_ARGUMENT && strstr(env.error, WORDS[i]), "case %d: %s", i, env.error);
    }
}

/* Each pattern of a list must fit something, whatever the others fit. The error has the one that does not. */
static void odd_patterns(void)
{
    static const struct {
        const char *list, *layers, *odd; /* of freeze, or of lora_targets */
    } cases[] = {
        {"wte.*,nosuch", NULL, "named \"nosuch\""},
        {"nosuch,wte.*", NULL, "named \"nosuch\""},
        {"wte.* nosuch h.0.*", NULL, "named \"nosuch\""},
        {"wte.*, h.9.* ", NULL, "named \"h.9.*\""},
        {"wte.*,,h.0.*", NULL, "named \"\""},
        {"wte.*,", NULL, "named \"\""},
        {",wte.*", NULL, "named \"\""},
        {"wte.* , , h.0.*", NULL, "named \"\""},
        {"wte.*,wte.weight\th.0.*", NULL, "named \"wte.weight?h.0.*\""}, /* a tab */
        {"wte.*,h.0.attn.c_attn", NULL, "named \"h.0.attn.c_attn\""},
        {NULL, "attn.c_attn,nosuch", "named \"nosuch\""},
        {NULL, "mlp.c_fcc,attn.c_attn", "named \"mlp.c_fcc\""},
        {NULL, "attn.c_attn,ln_1", "named \"ln_1\""},
        {NULL, "attn.c_attn,wte", "named \"wte\""},
        {NULL, "attn.c_attn,lm_head", "named \"lm_head\""},
        {NULL, "attn.c_attn,attn.c_attn.weight", "named \"attn.c_attn.weight\""},
        {NULL, "attn.c_attn,h.9.mlp.c_fc", "named \"h.9.mlp.c_fc\""},
        {NULL, "attn.c_attn,", "named \"\""},
        {NULL, "", "named \"\""},
        {"wte.*,lora_A", "*", "named \"lora_A\""},
        {"*", "*", "every adapter"},
        {"wte.*,h.0.*", NULL, NULL},
        {" wte.* , h.0.*,wte.weight ", NULL, NULL},
        {NULL, "attn.*, h.1.mlp.c_fc *", NULL},
        {"*.lora_A,wte.weight", "attn.c_attn", NULL},
    };
    for (size_t i = 0; i < MTT__LENGTH(cases); i++) {
        setup s = small_setup();
        mtt_plan_report report;
        s.policy.freeze = cases[i].list;
        s.policy.lora_targets = cases[i].layers;
        s.policy.lora_rank = cases[i].layers ? 8 : 0;
        mtt_status status = mtt_plan(&env, &s.model, &s.policy, s.batch, s.seq_len, &report);
        if (!cases[i].odd) check(!status, "patterns, case %d: %s", (int)i, env.error);
        else check(status == MTT_E_ARGUMENT && strstr(env.error, cases[i].odd), "patterns, case %d: %s: %s",
                   (int)i, mtt_status_string(status), env.error);
    }
}

/* An activation that has no code must not pass for another one. */
static void forgotten_activation(void)
{
    const mtt_mlp after = (mtt_mlp)mlp_forms();
    float x[3] = {-1, 0.5f, 2}, up[3] = {1, 1, 1}, y[3] = {0}, g[3] = {1, 1, 1};
    mtt__activation_block(after, x, up, y, 3);
    mtt__slope_block(after, x, up, g, 3);
    for (int i = 0; i < 3; i++)
        check(isnan(y[i]) && isnan(g[i]),
              "mtt_mlp has a value above %d with code: raise the highest one in mtt__model_field", after - 1);
}

/* Patterns that freeze everything or nothing are mistakes. */
static void frozen_misuse(void)
{
    static const char *const WRONG[] = {"*", "wte", "",  "h.9.*",    "wte.*,h.*,ln_f.*,lm_head.*",
                                        "*.*", ",", "wte.weigh"};
    for (size_t i = 0; i < MTT__LENGTH(WRONG); i++) {
        setup s = small_setup();
        mtt_plan_report report;
        s.policy.freeze = WRONG[i];
        mtt_status status = mtt_plan(&env, &s.model, &s.policy, s.batch, s.seq_len, &report);
        check(status == MTT_E_ARGUMENT && strstr(env.error, "freeze is"), "freeze \"%s\": %s: %s", WRONG[i],
              mtt_status_string(status), env.error);
    }
}

/* Spaces after the commas of patterns do not count. */
static void frozen_spaces(void)
{
    static const char *const SAME[] = {"wte.*,h.1.*", "wte.* ,  h.1.* "};
    int tensors[2];
    for (int i = 0; i < 2; i++) {
        setup s = small_setup();
        mtt_plan_report report = {.tensors = -1 - i};
        s.policy.freeze = SAME[i];
        check(!mtt_plan(&env, &s.model, &s.policy, s.batch, s.seq_len, &report), "%s", env.error);
        tensors[i] = report.tensors;
    }
    check(tensors[0] == tensors[1], "\"%s\" is not \"%s\"", SAME[1], SAME[0]);
}

/* Early updates give the bits of late ones without clipping, in no more memory, and know no norm. */
static void early_updates(void)
{
    for (int number = 0; number < (quick ? 40 : 300); number++) {
        setup s = small_setup();
        int32_t tokens[16], targets[16];
        mtt_step_info info[2];
        draw_model_and_policy(&s, number, 3);
        s.policy.freeze = below(3) ? NULL : below(2) ? "h.1.*" : "w*,h.0.attn.c_proj.*";
        if (below(4) == 0) s.policy.lora_rank = 8, s.policy.freeze = NULL;
        s.policy.accumulate = 1;
        s.optim.clip = -1;
        s.optim.weight_decay = 0.3f;
        set_recompute(&s, below(5));
        mtt_trainer *late = open_trainer(&s), *early;
        s.policy.early_update = 1;
        early = open_trainer(&s);
        for (int step = 0; step < 3; step++) {
            random_tokens(&s, 1, below(4), tokens, targets);
            check(!mtt_train_step(late, tokens, targets, &info[0]), "a late step: %s", env.error);
            check(!mtt_train_step(early, tokens, targets, &info[1]), "an early step: %s", env.error);
            check(info[0].loss == info[1].loss && info[1].grad_norm == 0,
                  "early updates %d: loss %.9g, late %.9g; norm %g", number, info[1].loss, info[0].loss,
                  (double)info[1].grad_norm);
        }
        check(info[1].arena_bytes <= info[0].arena_bytes, "early updates %d take more memory", number);
        for (int i = 0; i < late->schedule->programs[MTT__TRAIN].parameter_count; i++) {
            const mtt_tensor *a = late->schedule->programs[MTT__TRAIN].parameters[i].weight;
            const mtt_tensor *b = early->schedule->programs[MTT__TRAIN].parameters[i].weight;
            check(!memcmp(a->data, b->data, a->bytes), "early updates %d give another %s", number, a->name);
        }
        for (int kind = 0; kind < MTT__OPTIM_KINDS; kind++) {
            const mtt_tensor *a = late->schedule->programs[MTT__TRAIN].optim[kind];
            const mtt_tensor *b = early->schedule->programs[MTT__TRAIN].optim[kind];
            check(!a || !memcmp(a->data, b->data, a->bytes), "early updates %d give another %s", number,
                  a ? a->name : "");
        }
        mtt_trainer_destroy(late);
        mtt_trainer_destroy(early);
    }
}

static void early_misuse(void)
{
    static const char *const WORDS[] = {"set clip to -1", "take bf16", "take bf16", "set accumulate",
                                        "set keep_gradients", "split to 0", "ranks to 1"};
    for (int i = 0; i < (int)MTT__LENGTH(WORDS); i++) {
        setup s = small_setup();
        mtt_trainer *trainer;
        s.policy.accumulate = 1 + (i == 3);
        s.policy.early_update = 1;
        s.optim.clip = i ? -1 : 0; /* 0: the default, 1 */
        s.policy.precision = i == 1 ? MTT_FP16 : i == 2 ? MTT_FP8 : MTT_FP32;
        s.policy.keep_gradients = i == 4;
        s.policy.split = i == 5;
        s.policy.ranks = 1 + (i == 6);
        mtt_plan_report report;
        mtt_status status = i ? mtt_plan(&env, &s.model, &s.policy, s.batch, s.seq_len, &report)
                              : mtt_trainer_create(&env, &s.model, &s.policy, &s.optim, mtt_cpu_backend(),
                                                   s.batch, s.seq_len, &trainer);
        check(status == MTT_E_ARGUMENT && strstr(env.error, WORDS[i]), "early update, kind %d: %s: %s", i,
              mtt_status_string(status), env.error);
    }
}

/* Grouped heads, widths of heads, rotary positions and norms of q and k: each option alone, then at random.
   Central differences say what the gradient is; recomputation changes no bit of it; memory is as planned. */
static void attention_options(void)
{
    typedef struct options {
        int heads, heads_kv, d_head, positions, interleaved, qk_norm;
        float theta, factor;
    } options;
    static const options ALONE[] = {
        {4, 1, 0, 0, 0, 0, 0, 0},  {4, 2, 0, 1, 0, 0, 0, 0}, {2, 0, 16, 0, 0, 0, 0, 0},
        {3, 0, 24, 3, 0, 0, 0, 0}, {2, 0, 0, 2, 0, 0, 0, 0}, {2, 0, 0, 2, 1, 0, 3, 0},
        {2, 0, 0, 0, 0, 1, 0, 0},  {2, 0, 8, 2, 0, 0, 10000, 1000}, {2, 0, 0, 2, 0, 1, 100, 0},
        {4, 2, 16, 2, 0, 1, 5, 0}, {6, 2, 8, 2, 1, 0, 0, 0}, {2, 0, 24, 2, 1, 0, 3e5f, 8}};
    enum { FIXED = (int)(sizeof(ALONE) / sizeof(ALONE[0])), CASES = FIXED + 20 };
    for (int n = 0; n < CASES; n += quick ? 7 : 1) {
        setup s = small_setup();
        options o = ALONE[n % FIXED];
        int32_t tokens[32], targets[32];
        if (n >= FIXED) {
            static const int GROUPS[] = {1, 2, 3, 4, 8};
            int group = GROUPS[below(5)];
            o.heads_kv = 1 + below(group > 3 ? 1 : 2);
            o = (options){group * o.heads_kv, o.heads_kv, 8 * (1 + below(3)), below(4), below(2), below(2),
                          (float)(1 + below(200)), (float)(1 + below(2) * below(32))};
            if (o.factor > 1) o.theta *= 500; /* else all pairs turn too fast for it */
            s.policy.window = below(2) * (1 + below(9));
            s.model.dropout = below(3) ? 0 : 0.2f;
            s.model.tied_head = below(2);
        }
        s.model.heads = o.heads, s.model.heads_kv = o.heads_kv, s.model.d_head = o.d_head;
        if (!o.d_head && o.heads == 4) s.model.d_model = 32;
        s.model.positions = (mtt_positions)o.positions, s.model.rotary_theta = o.theta;
        s.model.rotary_interleaved = o.interleaved, s.model.qk_norm = o.qk_norm;
        s.model.rotary_factor = o.factor;
        check_parameters(&s);
        reference r = reference_of(&s);
        float *w = random_weights(&r), *first = malloc(r.weights * sizeof(float));
        float *g = malloc(r.weights * sizeof(float));
        double loss, *gradient = reference_gradient(&s, &r, w, n % 3, tokens, targets, &loss);
        for (int i = 0; i < 4 * 2; i++) {
            static const int KINDS[] = {MTT_FP32, MTT_BF16, MTT_FP16, MTT_FP8};
            char what[160];
            s.policy.precision = (mtt_precision)KINDS[i / 2];
            s.policy.attention = (mtt_attention)(i % 2);
            s.policy.fp8_products = (mtt_fp8_products)(n % 2);
            if (s.policy.precision == MTT_FP8 && r.model.heads_kv * r.model.d_head % 16) continue;
            snprintf(what, sizeof(what),
                     "%d:%d heads of %d, positions %d by %g, interleaved %d, norm %d, %s, %s, window %d",
                     r.model.heads, r.model.heads_kv, r.model.d_head, o.positions, (double)o.factor,
                     o.interleaved, o.qk_norm,
                     PRECISIONS[s.policy.precision], i % 2 ? "flash" : "plain", s.policy.window);
            set_recompute(&s, 0);
            if (s.policy.precision == MTT_FP32) {
                check_execution(&s, &r, w, tokens, targets, loss, gradient, what);
            } else {
                float *rounded = malloc(r.weights * sizeof(float));
                mtt_step_info info = one_step(&s, w, tokens, targets, rounded);
                static const double MOST[] = {0, 0, 6e-2, 8e-3, 0.6}; /* twice those of check_execution */
                double most = MOST[s.policy.precision];
                double difference = relative_error(rounded, gradient, r.weights);
                check(difference < most && difference > 1e-5, "%s: the gradient is off by %g", what,
                      difference);
                check(fabs(info.loss / loss - 1) < most / 4, "%s: loss %g, not %g", what, info.loss, loss);
                free(rounded);
            }
            for (int way = 0; way < WAYS; way++) {
                mtt_plan_report report = {.ops = 0};
                set_recompute(&s, way);
                mtt_step_info info = one_step(&s, w, tokens, targets, way ? g : first);
                check(!way || !memcmp(first, g, r.weights * sizeof(float)),
                      "%s: recompute %s changes the gradient", what, RECOMPUTES[way]);
                check(!mtt_plan(&env, &s.model, &s.policy, s.batch, s.seq_len, &report), "a plan failed: %s",
                      env.error);
                check(report.arena_bytes == info.arena_bytes, "%s: %zu bytes planned, %zu taken", what,
                      report.arena_bytes, info.arena_bytes);
            }
        }
        free(w), free(first), free(g), free(gradient);
    }
}

/* Angles at the largest position, against long double. */
static void angles(void)
{
    enum { D = 16, T = 1 << 20 };
    mtt_model_desc model = {.layers = 1, .heads = 1, .d_head = D, .d_model = 8, .d_ff = 8, .vocab = 8,
                            .positions = MTT_POSITIONS_ROTARY, .rotary_theta = 10000};
    mtt_policy policy = {.attention = MTT_ATTENTION_FLASH, .window = 1, .loss = MTT_LOSS_CHUNKED,
                         .recompute = MTT_RECOMPUTE_LAYER};
    setup s = {.model = model, .policy = policy, .optim = {.lr = 1e-3f}, .batch = 1, .seq_len = T};
    mtt_trainer *trainer = open_trainer(&s);
    const float *table = trainer->schedule->programs[MTT__TRAIN].angles->data;
    double worst = 0;
    for (int t = T - 1000; t < T; t++)
        for (int i = 0; i < D / 2; i++) {
            long double angle = t * powl(10000, -2.0L * i / D);
            double c = fabs((double)(table[t * D + 2 * i] - cosl(angle)));
            double e = fabs((double)(table[t * D + 2 * i + 1] - sinl(angle)));
            worst = fmax(worst, fmax(c, e));
        }
    check(worst < 3.1e-8, "cosines and sines are off by %g", worst); /* half a unit: 2.98e-8, and double's */
    printf("angles: off by %.2e at most\n", worst);
    mtt_trainer_destroy(trainer);
}

/* ------------------------------------------------------------------------ formulas, one at a time ---- */

/* GELU's tanh form and its derivative, against both in double. */
static void gelu_curve(void)
{
    enum { POINTS = 4001 };
    static float x[POINTS], y[POINTS], slope[POINTS];
    mtt_shape shape = {.rows = POINTS, .mlp = MTT_MLP_GELU};
    mtt_op op = {.shape = &shape};
    mtt_tensor of_x = {.dtype = MTT_F32, .dims = 1, .shape = {POINTS}, .bytes = sizeof(x), .data = x};
    mtt_tensor of_y = of_x, of_slope = of_x;
    of_y.data = y;
    of_slope.data = slope;
    for (int i = 0; i < POINTS; i++) x[i] = (float)(i - 2000) / 200, slope[i] = 1;
    mtt_op_activation forward_ = {&of_x, &of_y};
    mtt_op_activation_backward backward = {&of_slope, &of_x, &of_slope, NULL, NULL};
    run_op(MTT_OP_activation, &op, &forward_);
    run_op(MTT_OP_activation_backward, &op, &backward);
    double worst[2] = {0, 0};
    for (int i = 0; i < POINTS; i++) {
        double v = x[i], t = tanh(0.7978845608028654 * (v + 0.044715 * v * v * v));
        double derivative =
            0.5 * (1 + t) + 0.5 * v * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * v * v);
        worst[0] = fmax(worst[0], fabs(y[i] - 0.5 * v * (1 + t)));
        worst[1] = fmax(worst[1], fabs(slope[i] - derivative));
    }
    check(worst[0] < 1e-6 && worst[1] < 4e-6, "GELU is off by %g, its derivative by %g", worst[0], worst[1]);
}

/* Position t has 0.02 sin(t / 10000^(2i/C)) and 0.02 cos of the same, in turns. */
static void sinusoids(void)
{
    setup s = small_setup();
    s.seq_len = 500;
    s.batch = 1;
    s.model.d_model = 64;
    mtt_trainer *trainer = open_trainer(&s);
    const float *table = mtt_trainer_schedule(trainer)->programs[MTT__TRAIN].positions->data;
    for (int t = 0; t < 500; t++)
        for (int c = 0; c < 64; c++) {
            double angle = t / pow(10000, (c - c % 2) / 64.0), got = table[t * 64 + c],
                   wanted = 0.02 * (c % 2 ? cos(angle) : sin(angle));
            check(fabs(got - wanted) < 2e-9, "position %d, column %d: %.9g, not %.9g", t, c, got, wanted);
        }
    mtt_trainer_destroy(trainer);
}

/* Numbers that should be drawn from N(0, 1): mean, variance, neighbours and tails, each within five standard
   deviations of its estimate. */
static void check_normal(const double *z, size_t count, const char *what)
{
    static const double BEYOND[] = {0.31731051, 0.04550026, 0.00269980}; /* 1, 2 and 3 deviations */
    double n = (double)count, mean = 0, variance = 0, neighbours = 0, share[3] = {0, 0, 0};
    for (size_t i = 0; i < count; i++) {
        mean += z[i] / n;
        variance += z[i] * z[i] / n;
        neighbours += i ? z[i] * z[i - 1] / n : 0;
        for (int k = 0; k < 3; k++) share[k] += (fabs(z[i]) > k + 1) / n;
    }
    check(fabs(mean) < 5 / sqrt(n), "%s: a mean of %g deviations", what, mean);
    check(fabs(variance - 1) < 5 * sqrt(2 / n), "%s: %g of the variance", what, variance);
    check(fabs(neighbours) < 5 / sqrt(n), "%s: neighbours correlate by %g", what, neighbours);
    for (int k = 0; k < 3; k++)
        check(fabs(share[k] - BEYOND[k]) < 5 * sqrt(BEYOND[k] * (1 - BEYOND[k]) / n),
              "%s: a share of %g is beyond %d deviations, not %g", what, share[k], k + 1, BEYOND[k]);
}

/* Initial weights: gains 1, biases 0, matrices N(0, 0.02), projections into the residual stream N(0, 0.02 /
   sqrt(2 layers)), none like another. */
static void initial_weights(void)
{
    setup s = small_setup(), other;
    s.model = (mtt_model_desc){.layers = 3, .heads = 2, .d_model = 64, .vocab = 2000, .max_seq = 100,
                               .positions = MTT_POSITIONS_LEARNED};
    other = s;
    other.optim.seed++;
    reference r = reference_of(&s);
    mtt_trainer *trainer = open_trainer(&s), *twin = open_trainer(&other);
    float *w = parameters_of(trainer, &r), *v = parameters_of(twin, &r);
    double *z = malloc(r.weights * sizeof(double)), product[2] = {0, 0};
    const parameter *first = r.parameter + r.layer_first, *second = first + LAYER_PARAMETERS;
    size_t all = 0;
    for (const parameter *p = r.parameter; p < r.parameter + r.parameters; p++) {
        int gain = !p->cols && strstr(p->name, ".weight") != NULL;
        double deviation = strstr(p->name, "c_proj.weight") ? 0.02 / sqrt(6) : 0.02;
        for (size_t i = p->first; i < p->first + p->count; i++) {
            if (p->cols) z[all++] = w[i] / deviation;
            else check(w[i] == (float)gain, "%s begins at %g", p->name, (double)w[i]);
        }
        if (p->cols) check_normal(z + all - p->count, p->count, p->name);
        new_case();
    }
    check_normal(z, all, "all matrices");
    for (size_t i = 0; i < second[FC_W].count; i++) {
        const float *a = w + first[FC_W].first + i, *b = w + second[FC_W].first + i;
        product[0] += *a * *b / 0.0004;
        product[1] += *a * v[first[FC_W].first + i] / 0.0004;
    }
    double limit = 5 * sqrt((double)second[FC_W].count);
    check(fabs(product[0]) < limit, "weights of two layers correlate");
    check(fabs(product[1]) < limit, "weights of two seeds correlate");
    mtt_trainer_destroy(trainer);
    mtt_trainer_destroy(twin);
    free(w);
    free(v);
    free(z);
}

static void formulas(void)
{
    gelu_curve();
    sinusoids();
    initial_weights();
}

/* Micro-batches with unequal counts: the loss is the mean over all targets that count, and the gradient is
   its. */
static void uneven_targets(void)
{
    setup s = small_setup(), whole = s;
    int32_t tokens[64], targets[64];
    reference r = reference_of(&s);
    float *w = random_weights(&r), *a = malloc(r.weights * sizeof(float)),
          *b = malloc(r.weights * sizeof(float));
    whole.batch = 4;
    random_tokens(&s, 2, 0, tokens, targets);
    for (int i = 0; i < 11; i++) targets[i] = -1;
    memcpy(tokens + 32, tokens, 32 * sizeof(int32_t));
    memcpy(targets + 32, targets, 32 * sizeof(int32_t));
    for (int way = 0; way < 4; way++) {
        s.policy.loss = whole.policy.loss = (mtt_loss)(1 + way % 2);
        s.policy.precision = whole.policy.precision = way / 2 ? MTT_FP16 : MTT_FP32;
        mtt_step_info parts = one_step(&s, w, tokens, targets, a),
                      all = one_step(&whole, w, tokens, targets, b);
        double limit = way / 2 ? 5e-3 : 1e-5;
        check(parts.targets == 21 && all.targets == 42,
              "uneven: %d and %d targets count instead of 21 and 42", (int)parts.targets, (int)all.targets);
        check(fabs(parts.loss / all.loss - 1) < limit, "uneven: loss %.9g in two parts, %.9g whole",
              parts.loss, all.loss);
        double difference = relative_difference(a, b, r.weights);
        check(difference < limit, "uneven: accumulated gradients differ by %g", difference);
    }
    for (int i = 0; i < 32; i++) targets[i] = -1;
    mtt_trainer *trainer = open_trainer(&s);
    mtt_step_info info;
    mtt_status status = mtt_evaluate(trainer, tokens, targets, &info);
    check(!status && info.targets == 0 && info.loss == 0, "no target counts: status %s, loss %g, %d targets",
          mtt_status_string(status), info.loss, (int)info.targets);
    mtt_trainer_destroy(trainer);
    free(w);
    free(a);
    free(b);
}

/* A batch that a budget splits is still one batch: the same loss, counts and gradient, in training and in
   evaluation. */
static void split_batches(void)
{
    for (int way = 0; way < 8; way++) {
        setup s = small_setup(), part;
        int32_t tokens[8 * 32 * 2], targets[8 * 32 * 2];
        mtt_step_info info[2], seen[2];
        mtt_plan_report report;
        float *g[2];
        s.batch = 8;
        s.seq_len = 32;
        s.policy.accumulate = 1 + way % 2;
        s.policy.loss = (mtt_loss)(1 + way / 2 % 2);
        s.policy.attention = (mtt_attention)(way / 4);
        s.policy.loss_chunk_rows = 40;
        part = s;
        part.batch = 2;
        part.policy.accumulate *= 4;
        part.policy.budget_bytes = arena_of(&part);
        part.batch = 8;
        part.policy.accumulate = s.policy.accumulate;
        part.policy.recompute = MTT_RECOMPUTE_BUDGET;
        part.policy.split = 1;
        memset(&report, 0, sizeof(report));
        check(!mtt_plan(&env, &part.model, &part.policy, 8, 32, &report) && report.micro_batches > 1,
              "%d micro-batches in %zu bytes", report.micro_batches, part.policy.budget_bytes);
        reference r = reference_of(&s);
        float *w = random_weights(&r);
        random_tokens(&s, s.policy.accumulate, 0, tokens, targets);
        for (int i = 0; i < 50; i++) targets[i] = -1; /* of the first micro-batch, most */
        for (int k = 0; k < 2; k++) {
            mtt_trainer *trainer = open_trainer(k ? &part : &s);
            g[k] = calloc(r.weights, sizeof(float));
            write_all(trainer, &r, w);
            mtt_status status = mtt_evaluate(trainer, tokens, targets, &seen[k]);
            if (!status) status = mtt_train_step(trainer, tokens, targets, &info[k]);
            check(!status, "a step or evaluation of a split batch: %s", env.error);
            if (s.policy.accumulate > 1) read_all(trainer, &r, mtt_gradient_get, g[k]);
            mtt_trainer_destroy(trainer);
        }
        check(seen[0].targets == seen[1].targets && seen[0].hits == seen[1].hits &&
                  info[0].targets == info[1].targets && seen[0].targets == 8 * 32 - 50,
              "split: %d and %d targets", (int)seen[1].targets, (int)info[1].targets);
        check(fabs(seen[1].loss / seen[0].loss - 1) < 1e-6 && fabs(info[1].loss / info[0].loss - 1) < 1e-6,
              "split: losses %.9g and %.9g, whole %.9g and %.9g", seen[1].loss, info[1].loss, seen[0].loss,
              info[0].loss);
        check(fabs(info[1].grad_norm / info[0].grad_norm - 1) < 1e-5 &&
                  relative_difference(g[1], g[0], r.weights) < 1e-5,
              "split: the gradient differs by %g", relative_difference(g[1], g[0], r.weights));
        free(g[0]);
        free(g[1]);
        free(w);
    }
}

/* ----------------------------------------------------------------------- policies against each other ---- */

/* Trains on random tokens that depend on the step alone; writes a loss each, and the final parameters. */
static void train(const setup *s, int steps, double *losses, float *final)
{
    reference r = reference_of(s);
    mtt_trainer *trainer = open_trainer(s);
    int micro_batches = s->policy.accumulate ? s->policy.accumulate : 1,
        count = s->batch * s->seq_len * micro_batches;
    int32_t *tokens = malloc((size_t)count * 2 * sizeof(int32_t)), *targets = tokens + count;
    random_state = 77;
    for (int i = 0; i < steps; i++) {
        mtt_step_info info;
        random_tokens(s, micro_batches, 0, tokens, targets);
        mtt_status status = mtt_train_step(trainer, tokens, targets, &info);
        losses[i] = status ? NAN : info.loss;
        if (status) check(0, "step %d failed: %s", i, env.error);
    }
    if (final) read_all(trainer, &r, mtt_parameter_get, final);
    free(tokens);
    mtt_trainer_destroy(trainer);
}

static void recompute_bits(void)
{
    enum { STEPS = 100 };
    int steps = STEPS / each();
    double losses[WAYS][STEPS] = {{0}}, last[3][2];
    int again[WAYS] = {0};
    setup s = small_setup();
    s.model.layers = 4;
    s.model.dropout = 0.1f;
    s.seq_len = 11;
    s.batch = 4; /* with fewer activations nothing is saved by recomputing, and nothing recomputed */
    s.policy.accumulate = 1;
    s.policy.loss_chunk_rows = 8;
    reference r = reference_of(&s);
    float *first = malloc(r.weights * sizeof(float)), *other = malloc(r.weights * sizeof(float));
    for (int kind = 0; kind < 6; kind++) { /* the last two in the compact state */
        s.policy.attention = (mtt_attention)(kind % 2);
        s.policy.precision = kind / 2 ? MTT_BF16 : MTT_FP32;
        s.policy.loss = kind == 1 || kind == 2 ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL;
        s.policy.state = (mtt_state)(kind / 4);
        for (int way = 0; way < WAYS; way += 1 + kind / 4) {
            mtt_plan_report report = {.ops = 0};
            set_recompute(&s, way);
            check(!mtt_plan(&env, &s.model, &s.policy, s.batch, s.seq_len, &report), "a plan failed: %s",
                  env.error);
            check((report.recompute_flops > 0) == (way > 0), "recompute %s makes %g FLOPs again",
                  RECOMPUTES[way], report.recompute_flops);
            again[way] += report.recompute_layers;
            train(&s, steps, losses[way], way ? other : first);
            int same = memcmp(losses[0], losses[way], sizeof(losses[0])) == 0;
            check(same, "recompute %s, %s, %s: losses differ from none's", RECOMPUTES[way],
                  PRECISIONS[s.policy.precision], kind % 2 ? "flash" : "plain");
            if (way) same = memcmp(first, other, r.weights * sizeof(float)) == 0;
            check(same, "recompute %s, %s, %s: parameters differ from none's", RECOMPUTES[way],
                  PRECISIONS[s.policy.precision], kind % 2 ? "flash" : "plain");
        }
        last[kind / 2][kind % 2] = losses[0][steps - 1];
    }
    check(fabs(last[0][0] - last[0][1]) < 1e-4, "after %d steps plain's loss is %.9g, flash's %.9g",
          steps, last[0][0], last[0][1]);
    for (int way = 2; way < WAYS; way++)
        check(way == 5 || again[way], "recompute %s recomputes no layer whole", RECOMPUTES[way]);
    printf("recompute: after %d steps flash's loss differs from plain's by %.1e\n", steps,
           fabs(last[0][0] - last[0][1]));
    free(first);
    free(other);
}

static size_t taken[MTT_PLACE_COUNT];

static mtt_status taking_alloc(void *context, mtt_place place, size_t bytes, void **block)
{
    taken[place] += bytes;
    return mtt_cpu_backend()->alloc(context, place, bytes, block);
}

static void append_text(void *text, const char *piece, size_t bytes)
{
    mtt__print((mtt__text *)text, "%.*s", (int)bytes, piece);
}

/* The largest activation of each layer waits for the backward pass on the host: no bit changes, the card's
   arena shrinks by it, and the host's is as large as planned. */
static void activations_on_the_host(void)
{
    enum { STEPS = 3 };
    static const mtt_precision SOME[] = {MTT_FP32, MTT_BF16, MTT_FP8};
    static char text[400000];
    for (int kind = 0; kind < WAYS * (int)MTT__LENGTH(SOME); kind += each()) {
        int way = kind % WAYS;
        size_t most;
        double losses[2][STEPS];
        mtt_plan_report report[2];
        mtt_backend backend = *mtt_cpu_backend();
        mtt_trainer *trainer = NULL;
        mtt__text list;
        setup s = small_setup();
        s.model.layers = 4;
        s.model.dropout = 0.1f;
        s.model.vocab = 24;
        s.batch = 16;
        s.seq_len = 32; /* every activation has a multiple of 256 bytes */
        s.policy.accumulate = 1 + (kind + kind / WAYS) % 2;
        s.policy.precision = SOME[kind / WAYS];
        s.policy.attention = MTT_ATTENTION_FLASH;
        s.policy.loss = MTT_LOSS_CHUNKED;
        s.policy.loss_chunk_rows = 16;
        set_recompute(&s, way);
        reference r = reference_of(&s);
        float *w[2] = {malloc(r.weights * sizeof(float)), malloc(r.weights * sizeof(float))};
        for (away = 0; away < 2; away++) {
            check(!mtt_plan(&env, &s.model, &s.policy, s.batch, s.seq_len, &report[away]), "%s", env.error);
            train(&s, STEPS, losses[away], w[away]);
        }
        away = 1;
        memset(taken, 0, sizeof(taken));
        backend.alloc = taking_alloc;
        mtt_status status =
            mtt_trainer_create(&env, &s.model, &s.policy, &s.optim, &backend, s.batch, s.seq_len, &trainer);
        check(!status, "%s", env.error);
        mtt__text_init(&list, text, sizeof(text));
        mtt_schedule_print(mtt_trainer_schedule(trainer), append_text, &list);
        mtt_plan_print(&report[1], append_text, &list);
        mtt_schedule_json(mtt_trainer_schedule(trainer), append_text, &list);
        mtt_trainer_destroy(trainer);
        away = 0;
        check(!memcmp(losses[0], losses[1], sizeof(losses[0])) &&
                  !memcmp(w[0], w[1], r.weights * sizeof(float)),
              "recompute %s, %s: the host changes bits: loss %.9g, not %.9g", RECOMPUTES[way],
              PRECISIONS[s.policy.precision], losses[1][STEPS - 1], losses[0][STEPS - 1]);
        check(report[1].host_bytes && report[1].host_bytes == taken[MTT_HOST] && !report[0].host_bytes,
              "recompute %s, %s: %zu bytes planned on the host, %zu taken", RECOMPUTES[way],
              PRECISIONS[s.policy.precision], report[1].host_bytes, taken[MTT_HOST]);
        check(MTT__SEPARATE || report[1].arena_bytes == taken[MTT_CARD], "%zu bytes planned, %zu taken",
              report[1].arena_bytes, taken[MTT_CARD]);
        /* Segments of 2 and recursion keep but one input, which is back at the peak. */
        most = way == 5 ? s.policy.budget_bytes : report[0].arena_bytes - (way != 4 && way != 6);
        check(report[1].arena_bytes <= most, "recompute %s, %s: %zu bytes with the host, %zu without",
              RECOMPUTES[way], PRECISIONS[s.policy.precision], report[1].arena_bytes, report[0].arena_bytes);
        check(report[1].to_host_bytes == (double)report[1].host_bytes * s.policy.accumulate &&
                  report[1].from_host_bytes == report[1].to_host_bytes, "%.0f bytes to the host, %.0f back",
              report[1].to_host_bytes, report[1].from_host_bytes);
        check(report[1].flops - report[1].recompute_flops == report[0].flops - report[0].recompute_flops &&
                  report[1].state_bytes == report[0].state_bytes, "moves are counted as arithmetic or state");
        check(strstr(text, "move ") && strstr(text, ".gone@host ") && strstr(text, "  host 0.") &&
                  strstr(text, "host, pinned: ") && strstr(text, "\"to_host_bytes\"") &&
                  strstr(text, ", \"host_bytes\""), "lists and tables do not show moves: %s", text);
        free(w[0]);
        free(w[1]);
    }
}

/* Where activations take most of the memory, each stronger way to recompute takes less of it, and computes
   the same. */
static void recompute_peaks(void)
{
    static const mtt_model_desc MODEL = {.layers = 4,
                                         .heads = 4,
                                         .d_model = 64,
                                         .vocab = 64,
                                         .dropout = 0.1f};
    setup s = {.model = MODEL, .policy = {.loss = MTT_LOSS_CHUNKED, .loss_chunk_rows = 64}, .seq_len = 64};
    for (int kind = 0; kind < 4; kind += each()) {
        mtt_plan_report report[WAYS];
        double losses[WAYS][2];
        s.policy.attention = (mtt_attention)(kind % 2);
        s.policy.precision = kind / 2 ? MTT_BF16 : MTT_FP32;
        for (int way = 0; way < WAYS; way++) {
            s.batch = 2;
            set_recompute(&s, way);
            train(&s, 2, losses[way], NULL);
            check(memcmp(losses[0], losses[way], sizeof(losses[0])) == 0, "recompute %s changes the loss",
                  RECOMPUTES[way]);
            s.batch = 8;
            set_recompute(&s, way);
            check(!mtt_plan(&env, &s.model, &s.policy, s.batch, s.seq_len, &report[way]), "a plan failed: %s",
                  env.error);
        }
        check(report[0].peak_bytes > report[1].peak_bytes && report[1].peak_bytes > report[2].peak_bytes,
              "%s, %s: peaks of none, selective, layer are %zu, %zu, %zu", PRECISIONS[s.policy.precision],
              kind % 2 ? "flash" : "plain", report[0].peak_bytes, report[1].peak_bytes, report[2].peak_bytes);
        check(report[3].peak_bytes < report[0].peak_bytes && report[4].peak_bytes < report[0].peak_bytes,
              "peaks of segments 1 and 2 are %zu and %zu, none's %zu", report[3].peak_bytes,
              report[4].peak_bytes, report[0].peak_bytes);
        check(report[5].arena_bytes <= s.policy.budget_bytes, "a budget of %zu bytes became %zu",
              s.policy.budget_bytes, report[5].arena_bytes);
        check(report[5].recompute_flops <= report[2].recompute_flops, "a budget costs more than layer");
    }
}

/* Largest difference of two gradients within a parameter, against the largest element of all of them. */
static void check_close(const float *a, const float *b, double loss_a, double loss_b, size_t count,
                        double *worst, const char *what)
{
    double difference = relative_difference(a, b, count), loss = fabs(loss_a / loss_b - 1);
    check(difference < 1e-5 && loss < 1e-5, "%s: gradients differ by %g, losses by %g", what, difference,
          loss);
    *worst = fmax(*worst, fmax(difference, loss));
}

static void attention_shape(setup *s, const int *windows, int window_count, double *worst)
{
    reference r = reference_of(s);
    int32_t tokens[2 * 130], targets[2 * 130];
    float *w = random_weights(&r), *g[3];
    mtt_step_info info[3], full_info[2];
    float *full[2];
    for (int i = 0; i < 3; i++) g[i] = malloc(r.weights * sizeof(float));
    for (int i = 0; i < 2; i++) full[i] = malloc(r.weights * sizeof(float));
    random_tokens(s, 2, 0, tokens, targets);
    for (int i = 0; i < window_count; i++) {
        char what[100];
        snprintf(what, sizeof(what), "T %d, window %d, head width %d", s->seq_len, windows[i],
                 s->model.d_model / s->model.heads);
        s->policy.window = windows[i];
        for (int kind = 0; kind < 3; kind++) { /* plain, flash, flash with the chunked loss */
            s->policy.attention = kind ? MTT_ATTENTION_FLASH : MTT_ATTENTION_PLAIN;
            s->policy.loss = kind == 2 ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL;
            info[kind] = one_step(s, w, tokens, targets, g[kind]);
            if (kind == 2) break;
            if (i == 0) full_info[kind] = info[kind], memcpy(full[kind], g[kind], r.weights * sizeof(float));
            if (windows[i] >= s->seq_len)
                check(memcmp(full[kind], g[kind], r.weights * sizeof(float)) == 0 &&
                          full_info[kind].loss == info[kind].loss,
                      "%s: %s is not bit-identical to no window", what, kind ? "flash" : "plain");
        }
        check_close(g[1], g[0], info[1].loss, info[0].loss, r.weights, worst, what);
        check_close(g[2], g[1], info[2].loss, info[1].loss, r.weights, worst + 1, what);
    }
    for (int i = 0; i < 3; i++) free(g[i]);
    for (int i = 0; i < 2; i++) free(full[i]);
    free(w);
}

/* If every query attends only its own key, that key's weight is 1 for all q and k. So the gradients of q and
   k are exactly 0, without rounding errors. Those of v are not 0. */
static void single_key(void)
{
    for (int kind = 0; kind < 4 * 2 * 2 * 2; kind++) {
        int32_t tokens[32], targets[32];
        setup s = small_setup();
        s.policy.precision = (mtt_precision)(kind % 4);
        s.policy.attention = (mtt_attention)(kind / 4 % 2);
        s.model.dropout = kind / 8 % 2 ? 0.1f : 0;
        if (kind / 16) s.policy.window = 1;
        else s.seq_len = 1;
        random_tokens(&s, 2, 0, tokens, targets);
        mtt_trainer *trainer = open_trainer(&s);
        mtt_step_info info;
        float g[16 * 48];
        int zero[3] = {0, 0, 0};
        check(!mtt_train_step(trainer, tokens, targets, &info), "a step of single keys: %s", env.error);
        check(!mtt_gradient_get(trainer, find_parameter(trainer, "h.1.attn.c_attn.weight"), g),
              "no gradient: %s", env.error);
        for (int i = 0; i < 16 * 48; i++) zero[i % 48 / 16] += g[i] == 0;
        check(zero[0] == 256 && zero[1] == 256 && zero[2] < 256,
              "%s, %s, %s: of 256 gradients of q, k and v %d, %d and %d are 0",
              PRECISIONS[s.policy.precision], kind / 4 % 2 ? "flash" : "plain",
              kind / 16 ? "a window of 1" : "one token", zero[0], zero[1], zero[2]);
        mtt_trainer_destroy(trainer);
    }
}

/* Scores of hundreds: their exponentials overflow unless the largest score is subtracted first. Where keys
   equal queries, the largest is a token's score for itself, the last one that it attends. */
static void large_scores(void)
{
    for (int kind = 0; kind < 4; kind++) {
        int32_t tokens[32], targets[32];
        answer wanted = {0, 0, 0};
        setup s = small_setup();
        s.policy.attention = (mtt_attention)(kind % 2);
        s.policy.accumulate = 1;
        reference r = reference_of(&s);
        float *w = random_weights(&r);
        double *wide = malloc(r.weights * sizeof(double));
        const parameter *p = r.parameter + r.layer_first + ATTN_W;
        size_t C = (size_t)s.model.d_model;
        for (size_t i = 0; i < p->count; i++) {
            w[p->first + i] *= 16;
            if (kind / 2 && i / C % 3 == 1) w[p->first + i] = w[p->first + i - C];
        }
        for (size_t i = 0; i < r.weights; i++) wide[i] = w[i];
        random_tokens(&s, 1, 0, tokens, targets);
        micro_batch mb = {tokens, targets, make_masks(&r, 0, 0, 0)};
        reference_answer(&r, wide, &mb, &wanted);
        mtt_step_info info = one_step(&s, w, tokens, targets, NULL);
        check(fabs(info.loss * wanted.targets / wanted.loss - 1) < 1e-5, "%s: loss %.9g, not %.9g",
              kind % 2 ? "flash" : "plain", info.loss, wanted.loss / wanted.targets);
        free(mb.masks);
        free(w);
        free(wide);
    }
}

static void attention_kinds(void)
{
    static const int LENGTHS[] = {1, 7, 31, 33, 64, 97, 130}, WIDTHS[] = {8, 16, 24, 40, 64};
    double worst[2] = {0, 0};
    for (size_t d = 0; d < MTT__LENGTH(WIDTHS); d++)
        for (size_t t = 0; t < MTT__LENGTH(LENGTHS); t++) {
            if (quick && (t + d) % 7 != 5) continue;
            int T = LENGTHS[t], windows[] = {0, 1, 2, T - 1, T, T + 5};
            setup s = small_setup();
            s.batch = 1;
            s.seq_len = T;
            s.model.layers = 1;
            s.model.d_model = 2 * WIDTHS[d];
            s.model.d_ff = 24;
            s.model.dropout = d == 1 ? 0.1f : 0;
            s.policy.loss_chunk_rows = d % 2 ? 16 : 1000;
            attention_shape(&s, windows, 6, worst);
        }
    printf("attention: flash differs from plain by %.1e, chunked loss from full by %.1e\n", worst[0],
           worst[1]);
}

/* -------------------------------------------------------------------------------- 16-bit conversions ---- */

/* The nearest number with `mantissa` bits after the leading one and exponents from `lowest` up; ties to
   even. */
static double round_to(double x, int mantissa, int lowest, double overflow)
{
    int exponent;
    frexp(x, &exponent);
    double unit = ldexp(1, (exponent - 1 < lowest ? lowest : exponent - 1) - mantissa),
           rounded = nearbyint(x / unit) * unit;
    return fabs(rounded) >= overflow ? copysign(INFINITY, x) : rounded;
}

static double value_of_bits(int h, int exponent_bits, int mantissa_bits)
{
    int sign = h >> 15 & 1, e = h >> mantissa_bits & ((1 << exponent_bits) - 1),
        m = h & ((1 << mantissa_bits) - 1);
    int bias = (1 << (exponent_bits - 1)) - 1;
    double value =
        e ? ldexp((1 << mantissa_bits) + m, e - bias - mantissa_bits) : ldexp(m, 1 - bias - mantissa_bits);
    if (e == (1 << exponent_bits) - 1) value = m ? NAN : INFINITY;
    return sign ? -value : value;
}

static int same_number(double a, double b)
{
    return a != a ? b != b : a == b && !signbit(a) == !signbit(b);
}

/* ----------------------------------------------------------------------------------------- products ---- */

/* A matrix inside a larger tensor, every element of which is NaN outside the matrix: a product that reads one
   is NaN itself. `at` counts elements from the tensor's start to the matrix. */
typedef struct operand {
    mtt_tensor tensor;
    mtt__view view;
    float *values; /* as they are stored, row by row of the view */
    int64_t count; /* elements of the tensor */
} operand;

static void make_operand(operand *x, mtt_dtype dtype, int64_t m, int64_t n, int transposed, int64_t at)
{
    int64_t rows = transposed ? n : m, columns = transposed ? m : n, width = columns + at + (at > 1), i, j;
    x->tensor = (mtt_tensor){.dtype = dtype, .dims = 2, .shape = {rows + 1, width}};
    x->count = (rows + 1) * width;
    x->tensor.data = malloc((size_t)x->count * sizeof(float));
    x->values = malloc((size_t)(m * n) * sizeof(float));
    x->view = mtt__matrix_at(&x->tensor, at, rows, columns, transposed);
    for (i = 0; i < x->count; i++) mtt__store(&x->tensor, i, 1, &(float){NAN});
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            float *value = &x->values[i * n + j];
            int64_t place = at + (transposed ? j * width + i : i * width + j);
            *value = (float)(2 * uniform() - 1);
            mtt__store(&x->tensor, place, 1, value);
            mtt__load(&x->tensor, place, 1, value);
        }
}

static void free_operand(operand *x)
{
    free(x->tensor.data);
    free(x->values);
}

typedef struct product_case {
    int64_t m, n, k;
    mtt_dtype a, b, c;
    int a_transposed, b_transposed, at; /* at: where matrices begin; 6 makes odd rows of even ones */
    int start, portable;                /* start: 0 = from zero, 1 = from a bias, 2 = adds to C */
} product_case;

/* Runs the product into `c`, as mtt__gemm does without a BLAS; 1 = by words of two BF16 values. */
static int run_product(const product_case *p, const operand *a, const operand *b, const operand *c,
                       const mtt_tensor *bias)
{
    mtt__product g;
    mtt_op op = {.workspace = tiles()};
    mtt__product_of(&g, &op, a->view, b->view, c->view);
    if (p->portable) g.pairs = 0, g.a = mtt__transposed(a->view), g.b = b->view;
    g.bias = p->start == 1 ? bias : NULL;
    g.add = p->start == 2;
    if (!p->start) g.scale = 0.5f;
    for (int64_t tile = 0; tile < g.tiles; tile++) mtt__product_tile(&g, tile);
    return g.pairs;
}

/* Against double precision. A sum of k + 1 terms has k roundings, each of at most 2^-24 of the magnitudes, or
   fewer where words are multiplied. Stored in 16 bits, a value is rounded once more. Returns whether words
   were multiplied. */
static int check_product(const product_case *p)
{
    operand a, b, c, bias;
    make_operand(&a, p->a, p->m, p->k, p->a_transposed, p->at);
    make_operand(&b, p->b, p->k, p->n, p->b_transposed, p->at);
    make_operand(&c, p->c, p->m, p->n, 0, p->at);
    make_operand(&bias, MTT_F32, 1, p->n, 0, 0);
    int pairs = run_product(p, &a, &b, &c, &bias.tensor), outside = 0;
    double worst = 0, step = p->c == MTT_F32 ? 0 : p->c == MTT_BF16_BITS ? 0x1p-8 : 0x1p-10;
    for (int64_t i = 0; i < c.count; i++) {
        int64_t row = (i - p->at) / c.tensor.shape[1], column = (i - p->at) % c.tensor.shape[1];
        double sum = 0, size = 0;
        float got;
        mtt__load(&c.tensor, i, 1, &got);
        if (i < p->at || row >= p->m || column >= p->n) {
            outside += !isnan(got);
            continue;
        }
        for (int64_t l = 0; l < p->k; l++) {
            double term = (double)a.values[row * p->k + l] * b.values[l * p->n + column];
            sum += term;
            size += fabs(term);
        }
        if (!p->start) sum *= 0.5, size *= 0.5;
        if (p->start == 1) sum += bias.values[column], size += fabs(bias.values[column]);
        if (p->start == 2) sum += c.values[row * p->n + column], size += fabs(c.values[row * p->n + column]);
        double limit = size * (double)(p->k + 1) * 0x1p-24 + fabs(sum) * step + 0x1p-24;
        worst = fmax(worst, isnan(got) ? 1e9 : fabs(got - sum) / limit);
    }
    check(worst <= 1 && !outside,
          "%lld x %lld x %lld%s%s from element %d, dtypes %d %d %d, start %d%s: %.3g times the bound, %d "
          "elements beside C written", (long long)p->m, (long long)p->n, (long long)p->k,
          p->a_transposed ? ", A transposed" : "", p->b_transposed ? ", B transposed" : "", p->at, (int)p->a,
          (int)p->b, (int)p->c, p->start, p->portable ? ", portable" : "", worst, outside);
    free_operand(&a), free_operand(&b), free_operand(&c), free_operand(&bias);
    return pairs;
}

/* Every tail of tiles, stripes and registers, every orientation, dtype and start, by both kernels. */
static void products(void)
{
    static const int64_t SIZES[][3] = {{1, 1, 1},    {3, 17, 65},   {17, 3, 64},    {8, 32, 2},
                                       {33, 65, 130}, {64, 64, 128}, {65, 129, 258}, {130, 31, 257},
                                       {1, 70, 100}, {70, 1, 300}};
    static const mtt_dtype DTYPES[][3] = {{MTT_F32, MTT_F32, MTT_F32},
                                          {MTT_BF16_BITS, MTT_BF16_BITS, MTT_BF16_BITS},
                                          {MTT_BF16_BITS, MTT_BF16_BITS, MTT_F32},
                                          {MTT_F16_BITS, MTT_F16_BITS, MTT_F16_BITS},
                                          {MTT_F32, MTT_BF16_BITS, MTT_BF16_BITS},
                                          {MTT_F8_E4M3, MTT_F8_E4M3, MTT_BF16_BITS},
                                          {MTT_F8_E5M2, MTT_F8_E4M3, MTT_BF16_BITS},
                                          {MTT_F8_E4M3, MTT_F8_E5M2, MTT_F32}};
    int words = 0;
    for (int i = 0; i < (int)(MTT__LENGTH(SIZES) * MTT__LENGTH(DTYPES)) * 48; i += BLAS ? 1 : each()) {
        const int64_t *size = SIZES[i / 48 % (int)MTT__LENGTH(SIZES)];
        const mtt_dtype *dtype = DTYPES[i / 48 / (int)MTT__LENGTH(SIZES)];
        product_case p = {size[0],  size[1],   size[2],   dtype[0],   dtype[1],  dtype[2],
                          i & 1,    i >> 1 & 1, i / 4 % 2 ? 6 : i / 16 % 2, i / 8 % 6 % 3, i / 24 % 2};
        new_case();
        words += check_product(&p);
    }
    if (!mtt__has_pairs()) skip("this processor has no products of pairs in BF16");
    else check(words > 0, "no product in BF16 used AVX512-BF16");
}

/* Enough work for several threads and tiles of both sides: the number of threads changes no bit. */
static void product_threads(void)
{
    static const int64_t SIZES[][3] = {{600, 520, 40}, {100, 150, 600}};
    mtt_op op = {.scale = 0};
    for (int i = 0; i < 4; i++) {
        const int64_t *size = SIZES[i / 2];
        mtt_dtype dtype = i % 2 ? MTT_BF16_BITS : MTT_F32;
        operand a, b, c[2];
        make_operand(&a, dtype, size[0], size[2], 0, 0);
        make_operand(&b, dtype, size[2], size[1], 1, 0);
        for (int run = 0; run < 2; run++) {
            make_operand(&c[run], MTT_F32, size[0], size[1], 0, 0);
            use_threads(run ? 3 : 1);
            op.workspace = tiles();
            mtt__gemm(&op, a.view, b.view, c[run].view, NULL, 0, 1);
        }
        use_threads(1);
        check(memcmp(c[0].tensor.data, c[1].tensor.data, (size_t)(size[0] * size[1]) * sizeof(float)) == 0,
              "%lld x %lld x %lld, dtype %d: three threads make other bits than one", (long long)size[0],
              (long long)size[1], (long long)size[2], (int)dtype);
        free_operand(&a), free_operand(&b), free_operand(&c[0]), free_operand(&c[1]);
    }
}

static void conversions(void)
{
    int wrong_bf16 = 0, wrong_fp16 = 0, wrong_rounding[2] = {0, 0};
    for (int h = 0; h < 65536; h++) {
        float b = mtt__from_bf16((uint16_t)h), f = mtt__from_fp16((uint16_t)h);
        int back_b = mtt__to_bf16(b), back_f = mtt__to_fp16(f);
        wrong_bf16 += !same_number(value_of_bits(h, 8, 7), b) ||
                      (b == b ? back_b != h : value_of_bits(back_b, 8, 7) == 0);
        wrong_fp16 += !same_number(value_of_bits(h, 5, 10), f) ||
                      (f == f ? back_f != h : value_of_bits(back_f, 5, 10) == 0);
        if (b != b) wrong_bf16 += mtt__from_bf16((uint16_t)back_b) == mtt__from_bf16((uint16_t)back_b);
        if (f != f) wrong_fp16 += mtt__from_fp16((uint16_t)back_f) == mtt__from_fp16((uint16_t)back_f);
    }
    check(!wrong_bf16 && !wrong_fp16, "%d BF16 and %d FP16 values do not survive a round trip", wrong_bf16,
          wrong_fp16);
    /* any bits; bits near the range of halves; ties and their neighbours */
    for (int i = 0; i < 2000000; i++) {
        uint32_t bits = (uint32_t)random_bits();
        if (i % 4 == 1) bits = (bits & 0x807fffffu) | (uint32_t)(100 + below(45)) << 23;
        if (i % 4 == 2)
            bits = ((bits & 0x807fe000u) | (uint32_t)(100 + below(45)) << 23) + 0xfffu + (uint32_t)below(3);
        if (i % 4 == 3) bits = (bits & 0xffff0000u) + 0x7fffu + (uint32_t)below(3);
        float x;
        memcpy(&x, &bits, 4);
        double bf16 =
            x == x && x - x == 0 ? round_to(x, 7, -126, 3.3961775292304601e38) : x; /* 2^128 - 2^119 */
        double fp16 = x == x && x - x == 0 ? round_to(x, 10, -14, 65520) : x;
        wrong_rounding[0] += !same_number(bf16, mtt__from_bf16(mtt__to_bf16(x)));
        wrong_rounding[1] += !same_number(fp16, mtt__from_fp16(mtt__to_fp16(x)));
    }
    check(!wrong_rounding[0], "%d floats round wrongly to BF16", wrong_rounding[0]);
    check(!wrong_rounding[1], "%d floats round wrongly to FP16", wrong_rounding[1]);
}

/* Half a unit of the last of 16 (BF16) or 19 (FP16, fewer below 2^-14) significant bits of x. */
static double half_unit(double x, int fp16)
{
    int exponent;
    frexp(x, &exponent);
    if (fp16 && exponent < -13) exponent = -13;
    return ldexp(1, exponent - (fp16 ? 20 : 17));
}

/* By how much a moment of ratio r to its scale may be off when its code is off by `units`: r = y / (2 - y)
   grows by at most 2 / (2 - y)^2 of what y grows, and is the scale's at the top. */
static double moment_error(double r, int second, double units)
{
    double y = second ? r : 2 * r / (1 + r), next = fmin(1, y + units / 127);
    return second ? units / 255 : units / 127 * 2 / ((2 - next) * (2 - next));
}

/* What the compact state stores: as near as its bits allow, without bias where the rounding is random, and
   the same again when what was read is stored. */
static void compact_codes(void)
{
    int off[2] = {0, 0}, far[2] = {0, 0}, changed[2] = {0, 0}, wrong = 0, moved = 0, biased = 0;
    for (int i = 0; i < 1000000; i++) {
        int fp16 = i % 2, exponent = fp16 ? below(45) - 30 : below(250) - 124;
        double sign = below(2) ? 1 : -1;
        float x = (float)ldexp(sign * (1 + uniform()), exponent);
        uint16_t weight, again;
        uint8_t rest, rest_again;
        mtt__split_weight(x, fp16, MTT__NEAREST, &weight, &rest);
        float y = mtt__join_weight(weight, rest, fp16),
              w = fp16 ? mtt__from_fp16(weight) : mtt__from_bf16(weight);
        float nearest = fp16 ? mtt__from_fp16(mtt__to_fp16(y)) : mtt__from_bf16(mtt__to_bf16(y));
        off[fp16] +=
            !(fabs((double)y - x) <=
              half_unit(x, fp16) * (fp16 && fabs(x) < 6.2e-5 ? 1.04 : 1)); /* 2^-112 x is rounded too */
        far[fp16] += !(fabs((double)y - w) <= fabs((double)y - nearest));
        mtt__split_weight(y, fp16, (uint32_t)below(65536), &again, &rest_again);
        changed[fp16] += again != weight || rest_again != rest;
    }
    check(!off[0] && !off[1], "%d BF16 and %d FP16 weights are off by more than half a unit of their rests",
          off[0], off[1]);
    check(!far[0] && !far[1], "%d BF16 and %d FP16 weights are not the nearest without their rests", far[0],
          far[1]);
    check(!changed[0] && !changed[1], "%d BF16 and %d FP16 weights are other bits when split again",
          changed[0], changed[1]);
    /* groups of 1 to 32, from 2^-46 to 2^14, of which some are far below the largest */
    for (int i = 0; i < 20000; i++) {
        float x[32], y[32], largest = 0;
        uint16_t scale, scale_again, random[32];
        uint8_t codes[32], again[32];
        int count = 1 + below(32), second = i % 2, size = below(60) - 46;
        for (int k = 0; k < count; k++) {
            x[k] =
                (float)ldexp((second || below(2) ? 1 : -1) * (k ? uniform() : 1), size - (k ? below(13) : 0));
            random[k] = (uint16_t)below(65536);
            largest = fmaxf(largest, fabsf(x[k]));
            if (second) x[k] *= x[k];
        }
        for (int way = 0; way < 2; way++) { /* to nearest, and at random */
            mtt__pack_moments(x, count, second, way ? random : NULL, codes, &scale);
            mtt__unpack_moments(codes, &scale, count, second, y);
            double unit = largest * ldexp(1, way ? -10 : -11); /* of the scale */
            check(fabs(mtt__from_scale(scale) - largest) <= unit, "a scale of %g is %g", (double)largest,
                  (double)mtt__from_scale(scale));
            for (int k = 0; k < count; k++) {
                double a = second ? sqrt(x[k]) : x[k], b = second ? sqrt(y[k]) : y[k];
                double limit =
                    moment_error(fabs(a) / largest, second, way || second ? 1 : 0.5); /* 1 where at least 1 */
                wrong +=
                    !(fabs(a - b) <= limit * largest * 1.00001 + unit) || (x[k] > 0 && second && !(y[k] > 0));
            }
            mtt__pack_moments(y, count, second, NULL, again, &scale_again);
            moved += scale_again != scale || memcmp(codes, again, (size_t)count);
        }
    }
    check(!wrong, "%d moments are off by more than a unit", wrong);
    check(!moved, "%d groups are other bits when encoded again", moved);
    /* over all random numbers the mean is the number itself, moments' between 1 and the top */
    for (int i = 0; i < 200; i++) {
        float x = (float)(0.01 + 0.98 * uniform());
        double mean[4] = {0, 0, 0, 0};
        for (uint32_t random = 0; random < 65536; random++) {
            uint16_t weight;
            uint8_t rest;
            for (int fp16 = 0; fp16 < 2; fp16++) {
                mtt__split_weight(x, fp16, random, &weight, &rest);
                mean[fp16] += mtt__join_weight(weight, rest, fp16) / 65536.0;
            }
            mean[2] += mtt__round_moment(254 * x / (1 + x) * 65536, 0, random) / 65536.0;
            mean[3] += mtt__round_moment(255 * x * 65536, 1, random) / 65536.0;
        }
        biased += fabs(mean[0] - x) > 1e-12 || fabs(mean[1] - x) > 1e-12;
        biased += fabs(mean[2] - 127 * 2 * x / (1 + x)) > 0.5 * (2 * x / (1 + x) > 126.5 / 127) + 1e-4;
        biased += fabs(mean[3] - 255 * x) > 1e-4;
    }
    check(!biased, "%d of 800 means of randomly rounded numbers are not the numbers", biased);
    check(mtt__to_scale(0, 65535) == 0 && mtt__from_scale(0) == 0 && mtt__to_scale(1e30f, 0) == 65535,
          "the ends of the scales");
}

/* ----------------------------------------------------------------------------- 8 bits, one at a time ---- */

/* A code of the OCP 8-bit floating point specification. e5m2 is a small IEEE format; e4m3 has no infinities,
   and its only NaN has all bits set. */
static double value_of_eight(int code, int e4m3)
{
    int bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, e = code >> bits & (e4m3 ? 15 : 31),
        m = code & ((1 << bits) - 1);
    double value = ldexp(m + (e ? 1 << bits : 0), (e ? e : 1) - bias - bits);
    if (e4m3 && (code & 127) == 127) value = NAN;
    if (!e4m3 && e == 31) value = m ? NAN : INFINITY;
    return code & 128 ? -value : value;
}

/* The nearest code, of two the even one, found by comparing. e4m3 ends at 448, e5m2 at infinity. */
static int nearest_eight(double x, int e4m3)
{
    int code = 0, top = e4m3 ? 126 : 123, sign = signbit(x) ? 128 : 0;
    double size = fabs(x), end = value_of_eight(top, e4m3), unit = end - value_of_eight(top - 1, e4m3);
    if (x != x) return sign | 127;
    if (size >= end) return sign | (e4m3 || size < end + unit / 2 ? top : top + 1);
    while (value_of_eight(code + 1, e4m3) <= size) code++;
    double below_by = size - value_of_eight(code, e4m3), above_by = value_of_eight(code + 1, e4m3) - size;
    return sign | (code + (above_by < below_by || (above_by == below_by && code % 2)));
}

static int wrong_eight(float x, int e4m3)
{
    int got = e4m3 ? mtt__to_e4m3(x) : mtt__to_e5m2(x), want = nearest_eight(x, e4m3);
    return x != x ? value_of_eight(got, e4m3) == value_of_eight(got, e4m3) : got != want;
}

static void eight_conversions(void)
{
    static const float ENDS[] = {448,        464,   463.99997f, 480,        57344,  61440,
                                 61439.996f, 65536, INFINITY,   3.4028e38f, 1e-45f, 1e-38f,
                                 0,          NAN,   0x1p-10f,   0x1p-17f};
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        int wrong = 0, wrong_rounding = 0;
        for (int code = 0; code < 256; code++) {
            float got = e4m3 ? mtt__from_e4m3((uint8_t)code) : mtt__from_e5m2((uint8_t)code);
            double want = value_of_eight(code, e4m3), next = value_of_eight(code + 1, e4m3);
            float middle = (float)((want + next) / 2); /* exact */
            wrong += !same_number(want, got) || wrong_eight(got, e4m3);
            for (int side = -1; side <= 1; side++) {
                float away = side < 0 ? -INFINITY : INFINITY;
                wrong_rounding += wrong_eight(side ? nextafterf(got, away) : got, e4m3);
                wrong_rounding += wrong_eight(side ? nextafterf(middle, away) : middle, e4m3);
            }
        }
        for (size_t i = 0; i < MTT__LENGTH(ENDS); i++)
            wrong_rounding += wrong_eight(ENDS[i], e4m3) + wrong_eight(-ENDS[i], e4m3);
        for (int i = 0; i < 500000; i++) { /* any bits, and bits of a size that the formats hold */
            uint32_t bits = (uint32_t)random_bits();
            if (i % 2) bits = (bits & 0x807fffffu) | (uint32_t)(105 + below(40)) << 23;
            wrong_rounding += wrong_eight(mtt__bits_float(bits), e4m3);
        }
        check(!wrong, "%d codes of %s are other numbers", wrong, e4m3 ? "e4m3" : "e5m2");
        check(!wrong_rounding, "%d floats round wrongly to %s", wrong_rounding, e4m3 ? "e4m3" : "e5m2");
    }
}

/* Rounded by every byte, a half is on average what it was, and never further away than the next code. */
static void eight_by_bytes(void)
{
    int wrong = 0;
    for (int half = 0; half < 0x7b00; half++)
        for (int sign = 0; sign < 2; sign++) {
            float x = mtt__from_fp16((uint16_t)(half | sign << 15));
            double sum = 0;
            for (uint32_t byte = 0; byte < 256; byte++) {
                int code = mtt__to_e5m2_by(x, byte);
                sum += value_of_eight(code, 0);
                wrong += (code & 0x7f) != half >> 8 && (code & 0x7f) != (half >> 8) + 1;
            }
            wrong += sum != 256 * (double)x;
        }
    check(!wrong, "%d halves are other numbers in e5m2, on average over all bytes", wrong);
    for (uint32_t byte = 0; byte < 256; byte++)
        wrong += mtt__to_e5m2_by(INFINITY, byte) != 0x7c || (mtt__to_e5m2_by(-NAN, byte) & 0x7f) < 0x7d;
    check(!wrong, "infinity or NaN does not stay one in e5m2 with %d bytes", wrong);
}

static mtt_tensor new_tensor(mtt_dtype dtype, int rows, int width, mtt_scale *scale)
{
    mtt_tensor t = {.dtype = dtype, .dims = 2, .shape = {rows, width}, .entry = -1, .scale = scale};
    t.bytes = mtt__bytes_of(dtype, (size_t)rows * (size_t)width);
    t.data = calloc(t.bytes, 1);
    return t;
}

/* Element `at` of a tensor: of 8 bits by the decoder above. */
static double element(const mtt_tensor *t, int row, int column)
{
    int64_t at = (int64_t)row * mtt__width(t) + column;
    float value;
    if (t->dtype == MTT_F8_E4M3 || t->dtype == MTT_F8_E5M2)
        return value_of_eight(((const uint8_t *)t->data)[at], t->dtype == MTT_F8_E4M3) /
               (t->scale ? t->scale->scale : 1);
    mtt__load(t, at, 1, &value);
    return value;
}

/* Numbers of very different sizes, or codes that are finite. */
static void fill(const mtt_tensor *t, double size)
{
    uint8_t *codes = t->data;
    for (int64_t i = 0; i < mtt__elements(t); i++) {
        float x = (float)(size * ldexp(normal(), -below(7)));
        if (t->dtype == MTT_F8_E4M3 || t->dtype == MTT_F8_E5M2)
            codes[i] = (uint8_t)nearest_eight(x * (t->scale ? t->scale->scale : 1), t->dtype == MTT_F8_E4M3);
        else
            mtt__store(t, i, 1, &x);
    }
}

/* The transpose of a tensor in 8 bits: 1 = `t` is that, with zeros where rows are padded. */
static int is_transpose(const mtt_tensor *t, const mtt_tensor *of)
{
    int rows = (int)mtt__rows(of), width = (int)mtt__width(of), padded = (int)mtt__width(t), wrong = 0;
    for (int c = 0; c < width; c++)
        for (int row = 0; row < padded; row++)
            wrong += ((const uint8_t *)t->data)[c * padded + row] !=
                     (row < rows ? ((const uint8_t *)of->data)[row * width + c] : 0);
    return !wrong && mtt__rows(t) == width && padded == (rows + 15) / 16 * 16;
}

static mtt_tensor new_transpose(const mtt_tensor *of, int filled)
{
    int rows = (int)mtt__rows(of), width = (int)mtt__width(of), padded = (rows + 15) / 16 * 16;
    mtt_tensor t = new_tensor(of->dtype, width, padded, of->scale);
    memset(t.data, filled ? 0 : 0x55, t.bytes);
    for (int i = 0; filled && i < rows * width; i++)
        ((uint8_t *)t.data)[i % width * padded + i / width] = ((const uint8_t *)of->data)[i];
    return t;
}

/* How far a value may be from its rounding: half the spacing at its magnitude. */
static double half_spacing(double x, int e4m3)
{
    int exponent;
    frexp(x, &exponent);
    exponent = exponent - 1 < (e4m3 ? -6 : -14) ? (e4m3 ? -6 : -14) : exponent - 1;
    return ldexp(1, exponent - (e4m3 ? 4 : 3));
}

/* quantize with and without a norm: every code, both orders, the padding, and what is recorded. */
static void quantized(void)
{
    static const int ROWS[] = {1, 5, 16, 37}, WIDTHS[] = {16, 1040};
    for (int kind = 0; kind < 4 * 2 * 2 * 3; kind++) {
        int rows = ROWS[kind % 4], width = WIDTHS[kind / 4 % 2], normed = kind / 8 % 2, order = kind / 16;
        mtt_scale scale = {.scale = (float)ldexp(1, below(12)), .largest = 0}, twin;
        mtt_tensor x = new_tensor(MTT_BF16_BITS, rows, width, NULL),
                   gain = new_tensor(MTT_F32, 1, width, NULL), shift = new_tensor(MTT_F32, 1, width, NULL),
                   stats = new_tensor(MTT_F32, rows, 2, NULL),
                   y = new_tensor(MTT_F8_E4M3, rows, width, &scale), y_t = new_transpose(&y, 0);
        mtt_op_quantize o = {&x,
                          normed ? &stats : NULL,
                          normed ? &gain : NULL,
                          normed ? &shift : NULL,
                          order != 1 ? &y : NULL,
                          order ? &y_t : NULL};
        mtt_op op = {.kind = MTT_OP_quantize};
        int64_t clipped = 0;
        int wrong = 0;
        double largest = 0;
        new_case();
        scale.inverse = 1 / scale.scale;
        y.recorded = order != 1;
        y_t.recorded = order == 1;
        fill(&x, 3);
        fill(&gain, 2), fill(&shift, 1);
        for (int i = 0; i < rows; i++)
            ((float *)stats.data)[2 * i] = 0.5f, ((float *)stats.data)[2 * i + 1] = 3;
        run_op(MTT_OP_quantize, &op, &o);
        twin = scale;
        if (order == 1) { /* the other order, to compare with */
            y.recorded = 0;
            o.y = &y, o.y_t = NULL;
            run_op(MTT_OP_quantize, &op, &o);
        }
        for (int row = 0; row < rows; row++)
            for (int c = 0; c < width; c++) {
                double v = element(&x, row, c), slack = 0;
                if (normed) {
                    slack = 4 * 0x1p-24 *
                            (fabs((v - 0.5) * 3 * element(&gain, 0, c)) + fabs(element(&shift, 0, c)));
                    v = (v - 0.5) * 3 * element(&gain, 0, c) + element(&shift, 0, c);
                }
                double most = 448 / scale.scale, kept = fmax(-most, fmin(most, v));
                double far = fabs(element(&y, row, c) - kept);
                wrong +=
                    far > half_spacing(kept * scale.scale, 1) / scale.scale * (1 + 1e-6) + slack ||
                    (!normed && ((uint8_t *)y.data)[row * width + c] != nearest_eight(v * scale.scale, 1));
                clipped += fabs(v) > most;
                largest = fmax(largest, fabs(v));
            }
        check(!wrong, "quantize, case %d: %d elements are wrong", kind, wrong);
        check(!order || is_transpose(&y_t, &y), "quantize, case %d: the transpose is another", kind);
        check(memcmp(&twin, &scale, sizeof(twin)) == 0, "quantize records without leave");
        check(scale.clipped == clipped &&
                  fabs(mtt__bits_float(scale.largest) / largest - 1) < (normed ? 1e-6 : 0x1p-24),
              "quantize, case %d: %u clipped and a largest value of %g are recorded, not %d and %g", kind,
              scale.clipped, (double)mtt__bits_float(scale.largest), (int)clipped, largest);
        free(x.data), free(gain.data), free(shift.data), free(stats.data), free(y.data), free(y_t.data);
    }
}

static void quantized_weights(void)
{
    static const int SHAPES[4][2] = {{32, 96}, {32, 32}, {32, 48}, {48, 32}};
    for (int transposed = 0; transposed < 2; transposed++) {
        mtt_scale scale[4];
        mtt_tensor w[4], eight[4], *operands[8];
        mtt_op op = {.kind = MTT_OP_quantize_weights, .operands = operands};
        for (int i = 0; i < 4; i++) {
            scale[i] = (mtt_scale){.scale = (float)(16 << i), .inverse = 1.0f / (float)(16 << i)};
            w[i] = new_tensor(MTT_BF16_BITS, SHAPES[i][0], SHAPES[i][1], NULL);
            eight[i] = new_tensor(MTT_F8_E4M3, SHAPES[i][transposed], SHAPES[i][!transposed], &scale[i]);
            eight[i].transposed = transposed;
            operands[i] = &w[i], operands[4 + i] = &eight[i];
            fill(&w[i], 1);
        }
        run_op(MTT_OP_quantize_weights, &op, NULL);
        for (int i = 0; i < 4; i++) {
            int wrong = 0;
            for (int k = 0; k < SHAPES[i][0] * SHAPES[i][1]; k++) {
                int row = k / SHAPES[i][1], c = k % SHAPES[i][1];
                wrong += ((uint8_t *)eight[i].data)[transposed ? c * SHAPES[i][0] + row : k] !=
                         nearest_eight(element(&w[i], row, c) * scale[i].scale, 1);
            }
            check(!wrong && !scale[i].largest, "%d elements of weight %d are wrong", wrong, i);
            free(w[i].data), free(eight[i].data);
        }
    }
}

/* The three results of GELU's backward pass, as far off as 8 bits and the plain operation may be. */
static void gelu_eight(void)
{
    for (int rows = 1; rows < 40; rows += 18) {
        enum { WIDTH = 1040 };
        mtt_scale scale = {.scale = 64, .inverse = 1.0f / 64};
        mtt_tensor dy = new_tensor(MTT_BF16_BITS, rows, WIDTH, NULL),
                   x = new_tensor(MTT_BF16_BITS, rows, WIDTH, NULL),
                   dx = new_tensor(MTT_F8_E5M2, rows, WIDTH, NULL),
                   y = new_tensor(MTT_F8_E4M3, rows, WIDTH, &scale), dx_t = new_transpose(&dx, 0),
                   y_t = new_transpose(&y, 0);
        mtt_op_activation_backward o = {&dy, &x, &dx, &dx_t, &y_t};
        mtt_shape shape = {.mlp = MTT_MLP_GELU};
        mtt_op op = {.kind = MTT_OP_activation_backward, .shape = &shape};
        int wrong[2] = {0, 0}, padding = 0;
        fill(&dy, 100), fill(&x, 3);
        run_op(MTT_OP_activation_backward, &op, &o);
        for (int row = 0; row < mtt__width(&y_t); row++)
            for (int c = 0; c < WIDTH; c++) {
                if (row >= rows) {
                    padding += element(&y_t, c, row) != 0;
                    continue;
                }
                double v = element(&x, row, c), t = tanh(0.7978845608028654 * (v + 0.044715 * v * v * v));
                double slope =
                    0.5 * (1 + t) + 0.5 * v * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * v * v);
                double d = element(&dy, row, c) * slope, g = fmin(0.5 * v * (1 + t), 7);
                wrong[0] += fabs(element(&dx, row, c) - d) >
                            half_spacing(d, 0) * (1 + 1e-5) + 4e-6 * fabs(element(&dy, row, c));
                wrong[1] +=
                    fabs(element(&y_t, c, row) - g) > half_spacing(g * 64, 1) / 64 * (1 + 1e-5) + 1e-6;
            }
        check(!wrong[0] && !wrong[1] && !padding,
              "%d gradients, %d values of GELU and %d zeros are wrong in 8 bits", wrong[0], wrong[1],
              padding);
        check(is_transpose(&dx_t, &dx), "the gradient of GELU is transposed to another");
        free(dy.data), free(x.data), free(dx.data), free(y.data), free(dx_t.data), free(y_t.data);
    }
}

/* The 8-bit results of a norm's backward pass, each alone and both: the gradient as stored, rounded; the norm
   again, with the bits of quantize. The other results keep their bits. */
static void norm_eight(void)
{
    static const int ROWS[] = {1, 15, 16, 37}, WIDTHS[] = {16, 1040};
    for (int kind = 0; kind < 4 * 2 * 2 * 3; kind++) {
        int rows = ROWS[kind % 4], width = WIDTHS[kind / 4 % 2], joins = kind / 8 % 2, of = kind / 16 + 1;
        mtt_scale scale = {.scale = 64, .inverse = 1.0f / 64}, twin = scale;
        mtt_shape shape = {.rows = rows, .d_model = width};
        mtt_tensor dy = new_tensor(MTT_BF16_BITS, rows, width, NULL),
                   x = new_tensor(MTT_BF16_BITS, rows, width, NULL),
                   gain = new_tensor(MTT_BF16_BITS, 1, width, NULL),
                   shift = new_tensor(MTT_BF16_BITS, 1, width, NULL),
                   stats = new_tensor(MTT_F32, rows, 2, NULL), dx[2], sums[2][2],
                   dx_8 = new_tensor(MTT_F8_E5M2, rows, width, NULL), dx_t = new_transpose(&dx_8, 0),
                   y = new_tensor(MTT_F8_E4M3, rows, width, &scale), y_t = new_transpose(&y, 0);
        mtt_op_quantize again = {&x, &stats, &gain, &shift, &y, NULL};
        mtt_op op = {.kind = MTT_OP_norm_backward, .shape = &shape};
        int wrong = 0;
        new_case();
        fill(&dy, 1000), fill(&x, 3), fill(&gain, 2), fill(&shift, 1);
        for (int i = 0; i < rows; i++)
            ((float *)stats.data)[2 * i] = 0.5f, ((float *)stats.data)[2 * i + 1] = 3;
        for (int i = 0; i < 2; i++) {
            dx[i] = new_tensor(MTT_BF16_BITS, rows, width, NULL);
            if (i) memcpy(dx[1].data, dx[0].data, dx[0].bytes);
            else fill(&dx[0], 1000);
            for (int k = 0; k < 2; k++) sums[i][k] = new_tensor(MTT_F32, 1, width, NULL);
        }
        for (int i = 0; i < 2; i++) {
            mtt_op_norm_backward o = {&dy, &x, &stats, &gain, NULL, joins ? &dx[i] : NULL, &dx[i],
                                   NULL, NULL, NULL, &sums[i][0], &sums[i][1], NULL};
            if (i && of & 1) o.dx_8 = &dx_8, o.dx_t = &dx_t;
            if (i && of & 2) o.shift = &shift, o.y_t = &y_t;
            run_op(MTT_OP_norm_backward, &op, &o);
        }
        run_op(MTT_OP_quantize, &op, &again);
        for (int row = 0; row < rows && of & 1; row++)
            for (int c = 0; c < width; c++)
                wrong +=
                    ((uint8_t *)dx_8.data)[row * width + c] != nearest_eight(element(&dx[0], row, c), 0);
        check(!wrong, "norm_backward, case %d: %d of its gradients are wrong in 8 bits", kind, wrong);
        check(!(of & 1) || is_transpose(&dx_t, &dx_8), "norm_backward, case %d: another dx_t", kind);
        check(!(of & 2) || is_transpose(&y_t, &y), "norm_backward, case %d: another y_t", kind);
        check(!memcmp(dx[0].data, dx[1].data, dx[0].bytes) &&
                  !memcmp(sums[0][0].data, sums[1][0].data, sums[0][0].bytes) &&
                  !memcmp(sums[0][1].data, sums[1][1].data, sums[0][1].bytes),
              "norm_backward, case %d: other bits beside 8-bit results", kind);
        check(!memcmp(&scale, &twin, sizeof(twin)), "norm_backward, case %d: records a range", kind);
        for (int i = 0; i < 2; i++) free(dx[i].data), free(sums[i][0].data), free(sums[i][1].data);
        free(dy.data), free(x.data), free(gain.data), free(shift.data), free(stats.data);
        free(dx_8.data), free(dx_t.data), free(y.data), free(y_t.data);
    }
}

/* Attention's results in 8 bits are those of quantize after it, bit for bit: its output with what that
   records, and the gradients of q, k and v, some too large for e5m2, with their transpose. */
static void attention_eight(void)
{
    enum { B = 2, H = 2 };
    static const int LENGTHS[] = {1, 37, 16, 80, 128}, WIDTHS[] = {8, 40, 64, 80};
    for (int kind = 0; kind < 5 * 4 * 2; kind++) {
        int T = LENGTHS[kind % 5], D = WIDTHS[kind / 5 % 4], R = B * T, C = H * D, infinite = 0;
        mtt_scale scales[2] = {{.scale = 512, .inverse = 1.0f / 512}};
        mtt_shape shape = {.batch = B, .seq_len = T, .heads = H, .heads_kv = H, .d_head = D, .rows = R,
                           .d_model = C, .window = kind / 20 ? 1 + below(T) : 0,
                           .dropout = kind % 3 ? 0 : 0.2f};
        mtt_control control = {.seed = 7};
        mtt_op op = {.shape = &shape};
        mtt_tensor of_control = {.data = &control}, lse = new_tensor(MTT_F32, B * H, T, NULL),
                   qkv = new_tensor(MTT_BF16_BITS, R, 3 * C, NULL),
                   out = new_tensor(MTT_BF16_BITS, R, C, NULL), out_2 = new_tensor(MTT_BF16_BITS, R, C, NULL),
                   out_8 = new_tensor(MTT_F8_E4M3, R, C, &scales[0]),
                   wanted = new_tensor(MTT_F8_E4M3, R, C, &scales[1]),
                   d_out = new_tensor(MTT_BF16_BITS, R, C, NULL),
                   d_16 = new_tensor(MTT_BF16_BITS, R, 3 * C, NULL),
                   d_8 = new_tensor(MTT_F8_E5M2, R, 3 * C, NULL),
                   d_wanted = new_tensor(MTT_F8_E5M2, R, 3 * C, NULL), d_t = new_transpose(&d_8, 0);
        mtt_op_flash both = {&qkv, &of_control, &out, &lse, &out_8},
                  alone = {&qkv, &of_control, &out_2, &lse, NULL};
        mtt_op_quantize then = {&out_2, NULL, NULL, NULL, &wanted, NULL},
                     d_then = {&d_16, NULL, NULL, NULL, &d_wanted, NULL};
        mtt_op_flash_backward d_alone = {&d_out, &qkv, &out, &lse, &of_control, &d_16, NULL},
                           d_both = {&d_out, &qkv, &out, &lse, &of_control, &d_8, &d_t};
        new_case();
        scales[1] = scales[0];
        out_8.recorded = wanted.recorded = 1;
        fill(&qkv, 3), fill(&d_out, 4e4);
        run_op(MTT_OP_flash, &op, &both);
        run_op(MTT_OP_flash, &op, &alone);
        run_op(MTT_OP_quantize, &op, &then);
        check(!memcmp(out.data, out_2.data, out.bytes) && !memcmp(out_8.data, wanted.data, wanted.bytes) &&
                  !memcmp(&scales[0], &scales[1], sizeof(mtt_scale)) && scales[0].clipped > 0,
              "attention of %d tokens, heads of %d: 8 bits are not those of quantize", T, D);
        if (T % 16 == 0) {
            run_op(MTT_OP_flash_backward, &op, &d_alone);
            run_op(MTT_OP_quantize, &op, &d_then);
            run_op(MTT_OP_flash_backward, &op, &d_both);
            for (int i = 0; i < R * 3 * C; i++) infinite += (((uint8_t *)d_8.data)[i] & 0x7f) == 0x7c;
            check(!memcmp(d_8.data, d_wanted.data, d_8.bytes) && is_transpose(&d_t, &d_8) && infinite,
                  "attention backward of %d tokens, heads of %d: 8 bits are not those of quantize", T, D);
        }
        free(lse.data), free(qkv.data), free(out.data), free(out_2.data), free(out_8.data), free(wanted.data);
        free(d_out.data), free(d_16.data), free(d_8.data), free(d_wanted.data), free(d_t.data);
    }
}

/* Gradients of q and k, rotated back and rounded to 8 bits at once, are those of quantize after rotation. */
static void rotary_eight(void)
{
    enum { B = 2, H = 4, KV = 2, T = 9, R = B * T };
    static const int WIDTHS[] = {8, 24, 64};
    for (int kind = 0; kind < 3 * 2; kind++) {
        int D = WIDTHS[kind / 2], C = (H + 2 * KV) * D, infinite = 0;
        mtt_shape shape = {.batch = B, .seq_len = T, .heads = H, .heads_kv = KV, .d_head = D, .rows = R,
                           .rotary_interleaved = kind % 2};
        mtt_op op = {.shape = &shape, .workspace = tiles()};
        mtt_tensor dy = new_tensor(MTT_BF16_BITS, R, C, NULL), before = new_tensor(MTT_BF16_BITS, R, C, NULL),
                   angles = new_tensor(MTT_F32, T, D, NULL),
                   dx = new_tensor(MTT_F8_E5M2, R, C, NULL), wanted = new_tensor(MTT_F8_E5M2, R, C, NULL),
                   dx_t = new_transpose(&dx, 0);
        mtt_op_rotary_backward both = {&dy, NULL, &angles, NULL, NULL, &dx, NULL, NULL, &dx_t},
                               alone = {&dy, NULL, &angles, NULL, NULL, &dy, NULL, NULL, NULL};
        mtt_op_quantize then = {&dy, NULL, NULL, NULL, &wanted, NULL};
        new_case();
        fill(&dy, 6e4), fill(&angles, 1);
        memcpy(before.data, dy.data, dy.bytes);
        run_op(MTT_OP_rotary_backward, &op, &both);
        check(!memcmp(before.data, dy.data, dy.bytes), "rotary backward to 8 bits changes what it reads");
        run_op(MTT_OP_rotary_backward, &op, &alone);
        run_op(MTT_OP_quantize, &op, &then);
        for (int i = 0; i < R * C; i++) infinite += (((uint8_t *)dx.data)[i] & 0x7f) == 0x7c;
        check(!memcmp(dx.data, wanted.data, dx.bytes) && is_transpose(&dx_t, &dx) && infinite,
              "rotary backward, heads of %d: 8 bits are not those of quantize", D);
        free(dy.data), free(before.data), free(angles.data);
        free(dx.data), free(wanted.data), free(dx_t.data);
    }
}

/* c[i][j] = the sum of a[i][k] b[k][j]; A and B are read where a tensor is transposed, too. A sum of n terms
   has n roundings in FP32, and c one more if it is in 16 bits. */
static void check_sums(const mtt_tensor *c, const mtt_tensor *a, int a_t, const mtt_tensor *b, int b_t, int n,
                       const mtt_tensor *bias, const double *before, const char *what)
{
    double worst = 0;
    for (int i = 0; i < mtt__rows(c); i++)
        for (int j = 0; j < mtt__width(c); j++) {
            double sum = bias     ? element(bias, 0, j)
                         : before ? before[i * mtt__width(c) + j]
                                  : 0,
                   size = fabs(sum);
            for (int k = 0; k < n; k++) {
                double term =
                    (a_t ? element(a, k, i) : element(a, i, k)) * (b_t ? element(b, j, k) : element(b, k, j));
                sum += term, size += fabs(term);
            }
            double limit = size * (n + 1) * 0x1p-24 + (c->dtype == MTT_F32 ? 0 : fabs(sum) * 0x1p-8);
            worst = fmax(worst, fabs(element(c, i, j) - sum) / (limit + 1e-30));
        }
    check(worst <= 1, "%s in 8 bits: %g times the bound", what, worst);
}

/* The four products of a linear layer on 8-bit operands, which count as exact. */
static void linear_eight(void)
{
    enum { IN = 48, OUT = 32 };
    for (int kind = 0; kind < 8; kind++) {
        static const int ROWS[] = {1, 15, 16, 33};
        int rows = ROWS[kind % 4], adds = kind / 4;
        mtt_scale of_x = {.scale = 8, .inverse = 0.125f}, of_w = {.scale = 64, .inverse = 1.0f / 64};
        mtt_tensor x = new_tensor(MTT_F8_E4M3, rows, IN, &of_x), w = new_tensor(MTT_F8_E4M3, IN, OUT, &of_w),
                   dy = new_tensor(MTT_F8_E5M2, rows, OUT, NULL),
                   bias = new_tensor(MTT_BF16_BITS, 1, OUT, NULL),
                   y = new_tensor(MTT_BF16_BITS, rows, OUT, NULL),
                   dx = new_tensor(MTT_BF16_BITS, rows, IN, NULL),
                   d_weight = new_tensor(MTT_F32, IN, OUT, NULL), d_bias = new_tensor(MTT_F32, 1, OUT, NULL);
        double before[IN * OUT], bias_before[OUT];
        fill(&x, 3), fill(&w, 0.5), fill(&dy, 20), fill(&bias, 1), fill(&d_weight, 10), fill(&d_bias, 10);
        mtt_tensor x_t = new_transpose(&x, 1), dy_t = new_transpose(&dy, 1), w_t = new_transpose(&w, 1);
        mtt_tensor ones = new_tensor(MTT_F32, 1, rows, NULL);
        mtt_op_linear forward_ = {&x, &w_t, &bias, &y};
        mtt_op_linear_backward_input input = {&dy, &w, &dx};
        mtt_op_linear_backward_weight weight = {&x_t, &dy_t, &d_weight, &d_bias};
        mtt_op op = {.adds = adds};
        w_t.transposed = 1;
        new_case();
        for (int i = 0; i < rows; i++) ((float *)ones.data)[i] = 1;
        for (int i = 0; i < IN * OUT; i++) before[i] = adds ? ((float *)d_weight.data)[i] : 0;
        for (int i = 0; i < OUT; i++) bias_before[i] = adds ? ((float *)d_bias.data)[i] : 0;
        run_op(MTT_OP_linear, &op, &forward_);
        run_op(MTT_OP_linear_backward_input, &op, &input);
        run_op(MTT_OP_linear_backward_weight, &op, &weight);
        check_sums(&y, &x, 0, &w, 0, IN, &bias, NULL, "linear");
        check_sums(&dx, &dy, 0, &w, 1, OUT, NULL, NULL, "linear_backward_input");
        check_sums(&d_weight, &x, 1, &dy, 0, rows, NULL, before, "linear_backward_weight");
        check_sums(&d_bias, &ones, 0, &dy, 0, rows, NULL, bias_before, "the gradient of a bias");
        free(x.data), free(w.data), free(dy.data), free(bias.data), free(y.data), free(dx.data),
            free(ones.data);
        free(d_weight.data), free(d_bias.data), free(x_t.data), free(dy_t.data), free(w_t.data);
    }
}

/* The chunked loss on 8-bit operands, 21 rows in chunks of 16. Logits are rounded to BF16, which moves a
   probability by a factor of at most exp(2 e), e the largest error of the row's logits; a gradient of them to
   one of the two nearest e5m2. The results' errors are sums of these. */
static void loss_eight(void)
{
    enum { R = 21, C = 16, V = 37, WIDE = 128, CHUNK = 16 };
    for (int kind = 0; kind < 4; kind++) {
        int ignored = kind % 2, adds = kind / 2;
        mtt_scale of_x = {.scale = 16, .inverse = 1.0f / 16}, of_w = {.scale = 128, .inverse = 1.0f / 128},
                  of_d = {.scale = 0};
        mtt_control control = {.targets = 60};
        mtt_counters counters = {.loss_scale = 512};
        mtt_tensor x = new_tensor(MTT_F8_E4M3, R, C, &of_x), w = new_tensor(MTT_F8_E4M3, WIDE, C, &of_w),
                   bias = new_tensor(MTT_BF16_BITS, 1, WIDE, NULL), targets = new_tensor(MTT_I32, R, 1, NULL),
                   losses = new_tensor(MTT_F32, R, 3, NULL),
                   logits = new_tensor(MTT_BF16_BITS, CHUNK, WIDE, NULL),
                   d = new_tensor(MTT_F8_E5M2, CHUNK, WIDE, &of_d), d_t = new_transpose(&d, 0),
                   dx = new_tensor(MTT_BF16_BITS, R, C, NULL), d_weight = new_tensor(MTT_F32, WIDE, C, NULL),
                   d_bias = new_tensor(MTT_F32, 1, WIDE, NULL), of_control = {.data = &control},
                   of_counters = {.data = &counters};
        mtt_shape shape = {.rows = R, .vocab = V, .vocab_padded = WIDE, .d_model = C};
        mtt_op op = {.shape = &shape, .adds = adds};
        w.transposed = d_weight.transposed = 1;
        fill(&x, 2), fill(&w, 0.5), fill(&bias, 0.5), fill(&d_weight, 5), fill(&d_bias, 5);
        for (int i = V; i < WIDE; i++) memset((uint8_t *)w.data + i * C, 0, C);
        mtt_tensor x_t = new_transpose(&x, 1), w_t = new_transpose(&w, 1);
        for (int i = 0; i < R; i++) ((int32_t *)targets.data)[i] = ignored && i % 4 == 1 ? -1 : below(V);
        static double want[WIDE * (C + 1)], bound[WIDE * (C + 1)];
        for (int v = 0; v < WIDE; v++)
            for (int c = 0; c <= C; c++) {
                double old = !adds ? 0 : c < C ? element(&d_weight, v, c) : element(&d_bias, 0, v);
                want[v * (C + 1) + c] = old, bound[v * (C + 1) + c] = fabs(old) * 1e-5;
            }
        mtt_op_chunked_loss o = {&x,      &x_t,    &w, &w_t, &bias, &targets,  &of_control, &of_counters,
                              &losses, &logits, &d, &d_t, &dx,   &d_weight, &d_bias};
        new_case();
        run_op(MTT_OP_chunked_loss, &op, &o);
        double factor = 512.0 / 60, scale = ldexp(1, (int)floor(log2(32768 / factor))), worst[3] = {0, 0, 0};
        check(of_d.scale == scale && of_d.inverse == 1 / scale,
              "gradients of logits up to %g have a scale of %g", factor, (double)of_d.scale);
        for (int i = 0; i < R; i++) {
            double z[V], top = -1e30, sum = 0, off = 0, to_x[C] = {0}, limit[C] = {0};
            int target = ((int32_t *)targets.data)[i];
            for (int v = 0; v < V; v++) {
                double size = fabs(element(&bias, 0, v));
                z[v] = element(&bias, 0, v);
                for (int c = 0; c < C; c++)
                    z[v] += element(&x, i, c) * element(&w, v, c),
                        size += fabs(element(&x, i, c) * element(&w, v, c));
                int exponent;
                frexp(z[v], &exponent); /* BF16 has 8 bits, the first of which is worth half of 2^exponent */
                off = fmax(off, ldexp(1, exponent - 9) + size * (C + 2) * 0x1p-24);
                top = fmax(top, z[v]);
            }
            for (int v = 0; v < V; v++) sum += exp(z[v] - top);
            double loss = target < 0 ? 0 : top + log(sum) - z[target];
            worst[0] = fmax(worst[0], fabs(element(&losses, i, 0) - loss) / (2 * off + 1e-5));
            for (int v = 0; v < V && target >= 0; v++) {
                double p = exp(z[v] - top) / sum, slope = factor * (p - (v == target));
                double far = factor * p * (expm1(2 * off) + 1e-5);
                far += 2 * half_spacing((fabs(slope) + far) * scale, 0) / scale + fabs(slope) * 0x1p-11;
                for (int c = 0; c <= C; c++) {
                    double at = c < C ? element(&x, i, c) : 1;
                    want[v * (C + 1) + c] += slope * at;
                    bound[v * (C + 1) + c] += (far + fabs(slope) * 1e-5) * fabs(at);
                    if (c == C) break;
                    to_x[c] += slope * element(&w, v, c);
                    limit[c] += (far + fabs(slope) * 1e-5) * fabs(element(&w, v, c));
                }
            }
            for (int c = 0; c < C; c++)
                worst[1] = fmax(worst[1], fabs(element(&dx, i, c) - to_x[c]) /
                                              (limit[c] + (fabs(to_x[c]) + limit[c]) * 0x1p-8 + 1e-30));
        }
        for (int i = 0; i < WIDE * (C + 1); i++) {
            double got = i % (C + 1) < C ? element(&d_weight, i / (C + 1), i % (C + 1))
                                         : element(&d_bias, 0, i / (C + 1));
            worst[2] = fmax(worst[2], fabs(got - want[i]) / (bound[i] + 1e-30));
        }
        check(worst[0] <= 1 && worst[1] <= 1 && worst[2] <= 1,
              "the loss in 8 bits: losses and gradients of x and weights are %g, %g, %g times the bound off",
              worst[0], worst[1], worst[2]);
        free(x.data), free(w.data), free(bias.data), free(targets.data), free(losses.data), free(logits.data);
        free(d.data), free(d_t.data), free(dx.data), free(d_weight.data), free(d_bias.data), free(x_t.data),
            free(w_t.data);
    }
}

static void eight_operations(void)
{
    quantized();
    quantized_weights();
    gelu_eight();
    norm_eight();
    attention_eight();
    rotary_eight();
    linear_eight();
    loss_eight();
}

/* ------------------------------------------------------------------------------------------ training ---- */

static void overfit(void)
{
    int32_t tokens[32], targets[32];
    setup s = small_setup();
    s.model.d_model = 32;
    s.model.d_ff = 64;
    s.seq_len = 16;
    s.policy.accumulate = 1;
    s.optim.lr = 3e-3f;
    random_tokens(&s, 1, 0, tokens, targets);
    printf("overfit: steps to a loss of 0.01:");
    for (int kind = 0; kind < 8; kind += each()) {
        static const mtt_precision PRECISION[] = {MTT_FP32, MTT_BF16, MTT_FP16, MTT_FP8};
        mtt_step_info info = {.loss = 100};
        int step = 0;
        s.policy.precision = PRECISION[kind / 2];
        s.policy.attention = (mtt_attention)(kind % 2);
        mtt_trainer *trainer = open_trainer(&s);
        while (step < 300 && info.loss >= 0.01)
            if (mtt_train_step(trainer, tokens, targets, &info)) break;
            else step++;
        check(info.loss < 0.01, "%s, %s: loss %g after %d steps on one batch", PRECISIONS[s.policy.precision],
              kind % 2 ? "flash" : "plain", info.loss, step);
        check(info.step == step && mtt_trainer_step(trainer) == step, "%d steps are counted as %d", step,
              (int)info.step);
        check(info.targets == 32 && info.hits == 32, "%d of %d targets hit at loss %g", (int)info.hits,
              (int)info.targets, info.loss);
        printf(" %d", step);
        mtt_trainer_destroy(trainer);
    }
    printf("\n");
}

static void overflow_in(mtt_precision precision, mtt_state state)
{
    int32_t tokens[32], targets[32];
    float huge = precision == MTT_FP8 ? 0x1p60f : 1e30f; /* FP8's are powers of two up to 2^60 */
    setup s = small_setup();
    s.policy.precision = precision;
    s.policy.state = state;
    s.policy.accumulate = 1;
    s.optim.loss_scale = 1e30f;
    reference r = reference_of(&s);
    mtt_trainer *trainer = open_trainer(&s);
    float *before = parameters_of(trainer, &r), *after;
    mtt_step_info info;
    double first = 0, last = 0;
    int skipped = 0, done = 0;
    random_tokens(&s, 1, 0, tokens, targets);
    for (int i = 0; i < 150; i++) {
        mtt_status status = mtt_train_step(trainer, tokens, targets, &info);
        check(!status, "step %d under a huge loss scale failed: %s", i, env.error);
        if (status) break;
        if (info.skipped) {
            check(!done, "a step was skipped again after %d good ones", done);
            skipped++;
            double halved = ldexp(huge, -skipped), told = info.loss_scale;
            check(told == (float)halved || told == (float)(2 * halved), "the loss scale is %g after %d skips",
                  told, skipped);
        } else if (!done++) {
            after = parameters_of(trainer, &r);
            check(memcmp(before, after, r.weights * sizeof(float)) != 0,
                  "a step that was not skipped changed nothing");
            first = info.loss;
            free(after);
        }
        if (skipped == 3 && !done) {
            after = parameters_of(trainer, &r);
            check(memcmp(before, after, r.weights * sizeof(float)) == 0,
                  "a skipped step changed the weights");
            free(after);
        }
        last = info.loss;
    }
    check(skipped > 30 && done > 20, "%s: %d steps were skipped and %d done under a huge loss scale",
          PRECISIONS[precision], skipped, done);
    check(last < first, "training does not go on after overflows: loss %g, then %g", first, last);
    mtt_trainer_destroy(trainer);
    free(before);
}

/* Adds `steps` steps to the counters, with this sum of squares of the gradients. */
static void add_steps(mtt_counters *counters, const mtt_control *control, int steps, double sum)
{
    while (steps--) mtt__scale_gradients(control, counters, sum);
}

/* The scale of the loss doubles after 2000 good steps and halves after a bad one, from which they are counted
   again; up to 1e37. */
static void loss_scale(void)
{
    mtt_control control = {.clip = 2, .scaling = 1};
    mtt_counters c = {.loss_scale = 64};
    add_steps(&c, &control, 1999, 4096 * 9.0);
    check(c.loss_scale == 64 && fabs(c.grad_norm - 3) < 1e-6, "scale %g, norm %g after 1999 good steps",
          (double)c.loss_scale, c.grad_norm);
    check(fabs((double)c.gradient_scale * 64 * 3 / 2 - 1) < 1e-6, "gradients of norm 3 are scaled by %g",
          (double)c.gradient_scale);
    add_steps(&c, &control, 1, 1);
    check(c.loss_scale == 128, "scale %g after 2000 good steps", (double)c.loss_scale);
    add_steps(&c, &control, 2000, 1);
    check(c.loss_scale == 256, "scale %g after 4000 good steps", (double)c.loss_scale);
    add_steps(&c, &control, 1500, 1);
    add_steps(&c, &control, 1, INFINITY);
    check(c.loss_scale == 128 && c.updates == 5500 && c.steps == 5501, "scale %g, %lld updates, %lld steps",
          (double)c.loss_scale, (long long)c.updates, (long long)c.steps);
    add_steps(&c, &control, 1999, 1);
    check(c.loss_scale == 128, "a bad step does not count good ones again: scale %g", (double)c.loss_scale);
    add_steps(&c, &control, 1, 1);
    check(c.loss_scale == 256, "scale %g after a bad step and 2000 good ones", (double)c.loss_scale);
    c.loss_scale = 1e37f;
    add_steps(&c, &control, 2000, 1);
    check(c.loss_scale == 1e37f, "the scale rises to %g", (double)c.loss_scale);
}

static void overflow(void)
{
    loss_scale();
    overflow_in(MTT_FP16, MTT_STATE_FULL);
    overflow_in(MTT_FP16, MTT_STATE_COMPACT);
    overflow_in(MTT_FP8, MTT_STATE_FULL);
}

/* A number that is not finite stops the step, changes nothing, and once it is mended all is as if it never
   was. */
static void not_finite(void)
{
    static const char *const NAMES[] = {"wte.weight", "h.1.mlp.c_fc.weight", "ln_f.bias", "lm_head.weight"};
    int32_t tokens[64], targets[64];
    for (int kind = 0; kind < 5 * 4 * 2; kind++) {
        setup s = small_setup();
        int scaled = kind % 5 >= MTT_FP16, infinite = kind >= 20;
        s.policy.precision = (mtt_precision)(kind % 5);
        s.policy.accumulate = infinite ? 2 : 1;
        s.policy.attention = (mtt_attention)(kind / 5 % 2);
        s.policy.loss = (mtt_loss)(1 + kind / 10 % 2);
        if (kind % 5 == MTT_FP8) infinite = 0; /* which it clips and counts */
        s.policy.early_update = !scaled && !infinite && kind / 5 % 2;
        s.optim.clip = s.policy.early_update ? -1 : 0;
        reference r = reference_of(&s);
        mtt_trainer *trainer = open_trainer(&s), *twin = open_trainer(&s);
        mtt_step_info info, twin_info;
        random_tokens(&s, 2, 0, tokens, targets);
        mtt_train_step(trainer, tokens, targets, NULL);
        mtt_train_step(twin, tokens, targets, NULL);
        float *good = parameters_of(trainer, &r), *bad = parameters_of(trainer, &r), *after;
        const parameter *p = r.parameter;
        while (strcmp(p->name, NAMES[kind / 5 % 4]) != 0) p++;
        bad[p->first + (size_t)(p->cols ? tokens[0] * p->cols : 0) % p->count] = infinite ? INFINITY : NAN;
        write_all(trainer, &r, bad);
        env.error[0] = 0;
        mtt_status status = mtt_train_step(trainer, tokens, targets, NULL);
        check(status == MTT_OK, "a step that is not waited for returns %s", mtt_status_string(status));
        status = mtt_train_step(trainer, tokens, targets, &info);
        check(mtt_trainer_step(trainer) == (scaled ? 2 : 1),
              "%s: %d steps are counted after a failed one", PRECISIONS[s.policy.precision],
              (int)mtt_trainer_step(trainer));
        check(status == MTT_E_NUMBERS && env.error[0], "%s, %s in %s: a step returns %s, \"%s\"",
              PRECISIONS[s.policy.precision], infinite ? "infinity" : "NaN", p->name,
              mtt_status_string(status), env.error);
        after = parameters_of(trainer, &r);
        check(memcmp(bad, after, r.weights * sizeof(float)) == 0,
              "%s: a step that failed on %s changed the weights", PRECISIONS[s.policy.precision], p->name);
        free(after);
        write_all(trainer, &r, good);
        check(!mtt_train_step(trainer, tokens, targets, &info), "mended, a step still fails: %s", env.error);
        /* two steps that FP16 and FP8 took for overflows have halved the loss scale */
        if (scaled) counters_of(twin)->loss_scale /= 4;
        /* as in dropout, what is random has gone on */
        twin->micro_batch = trainer->micro_batch - s.policy.accumulate;
        check(!mtt_train_step(twin, tokens, targets, &twin_info), "a step fails: %s", env.error);
        after = parameters_of(trainer, &r);
        read_all(twin, &r, mtt_parameter_get, bad);
        double traces = relative_difference(after, bad, r.weights);
        check(info.loss == twin_info.loss && traces == 0,
              "%s: a failed step left traces: loss %.9g instead of %.9g, weights off by %g",
              PRECISIONS[s.policy.precision], info.loss, twin_info.loss, traces);
        mtt_trainer_destroy(trainer);
        mtt_trainer_destroy(twin);
        free(good);
        free(bad);
        free(after);
    }
}

/* A failure that no one has read yet holds up the steps after it, although their numbers would be finite. */
static void unread_failure(void)
{
    setup s = small_setup();
    int32_t tokens[32], targets[32];
    mtt_step_info info;
    s.policy.accumulate = 1;
    reference r = reference_of(&s);
    mtt_trainer *trainer = open_trainer(&s);
    float *good = parameters_of(trainer, &r), *bad = parameters_of(trainer, &r), *after;
    random_tokens(&s, 1, 0, tokens, targets);
    bad[0] = bad[r.weights - 1] = NAN;
    write_all(trainer, &r, bad);
    check(!mtt_train_step(trainer, tokens, targets, NULL), "a step that is not waited for fails");
    write_all(trainer, &r, good);
    check(!mtt_train_step(trainer, tokens, targets, NULL), "a step that is not waited for fails");
    check(mtt_train_step(trainer, tokens, targets, &info) == MTT_E_NUMBERS, "no failure is reported");
    after = parameters_of(trainer, &r);
    check(memcmp(good, after, r.weights * sizeof(float)) == 0, "steps after a failure change weights");
    check(!mtt_train_step(trainer, tokens, targets, &info) && info.step == 1, "once read, it is not over: %s",
          env.error);
    mtt_trainer_destroy(trainer);
    free(good);
    free(bad);
    free(after);
}

/* A device whose memory is full. */
static mtt_status full_alloc(void *context, mtt_place place, size_t bytes, void **block)
{
    (void)place, (void)bytes;
    *block = NULL;
    snprintf(((mtt__cpu *)context)->env->error, sizeof(env.error), "the device has 4000000 bytes free");
    return MTT_E_BUDGET;
}

static mtt_status full_memory(void *context, size_t *free_bytes, size_t *all_bytes)
{
    (void)context;
    *free_bytes = 4000000;
    *all_bytes = 8000000;
    return MTT_OK;
}

static size_t free_now;

static mtt_status shrinking_memory(void *context, size_t *free_bytes, size_t *all_bytes)
{
    (void)context;
    *free_bytes = free_now;
    *all_bytes = 8000000;
    return MTT_OK;
}

/* A device's bytes are those by which its free memory shrinks; where it grows, none. */
static void device_bytes(void)
{
    setup s = small_setup();
    mtt_backend backend = *mtt_cpu_backend();
    mtt_trainer *trainer = NULL;
    backend.memory = shrinking_memory;
    free_now = 5000000;
    check(!mtt_trainer_create(&env, &s.model, &s.policy, &s.optim, &backend, 2, s.seq_len, &trainer), "%s",
          env.error);
    free_now = 3000000;
    check(mtt_trainer_device_bytes(trainer) == 2000000, "5 MB free, then 3, are not 2");
    free_now = 6000000;
    check(mtt_trainer_device_bytes(trainer) == 0, "5 MB free, then 6, are not 0");
    mtt_trainer_destroy(trainer);
}

/* An arena that does not fit is refused with what takes most, and with the batch that fits. */
static void full_device(void)
{
    setup s = small_setup();
    mtt_backend backend = *mtt_cpu_backend();
    mtt_trainer *trainer;
    mtt_plan_report report;
    const char *fits;
    int batch = 0;
    backend.alloc = full_alloc;
    backend.memory = full_memory;
    s.model.vocab = 1001;
    mtt_status status =
        mtt_trainer_create(&env, &s.model, &s.policy, &s.optim, &backend, 500, s.seq_len, &trainer);
#ifdef MTT_SEPARATE_ALLOCS
    check(status == MTT_E_BUDGET && !trainer && strstr(env.error, "4000000 bytes free"),
          "a full device is reported as %s, \"%s\"", mtt_status_string(status), env.error);
    return; /* without an arena there is no one size that did not fit */
#endif
    fits = strstr(env.error, "largest batch that fits is ");
    check(status == MTT_E_BUDGET && !trainer && strstr(env.error, "4000000 bytes free") &&
              strstr(env.error, "logits") && fits,
          "a full device is reported as %s, \"%s\"", mtt_status_string(status), env.error);
    if (fits) batch = atoi(fits + strlen("largest batch that fits is "));
    check(!mtt_plan(&env, &s.model, &s.policy, batch, s.seq_len, &report) && report.arena_bytes <= 4000000 &&
          !mtt_plan(&env, &s.model, &s.policy, batch + 1, s.seq_len, &report) && report.arena_bytes > 4000000,
          "%d is not the largest batch in 4000000 bytes", batch);
}

/* The factor of the learning rate and the decay of a parameter in the groups of the test below. */
static double group_rate(const parameter *p, int grouped, double *decay)
{
    *decay = p->cols ? 0.3f : 0;
    if (!grouped) return 1;
    if (!strncmp(p->name, "h.0.", 4)) *decay = 0.1f;
    else if (strstr(p->name, "c_proj") || !strcmp(p->name, "wte.weight")) return 0.5;
    else if (strstr(p->name, "ln_")) *decay = 0;
    else if (!strncmp(p->name, "lm_head", 7)) return 0;
    return !strncmp(p->name, "h.0.", 4) ? 2 : 1;
}

/* AdamW in double from the gradients that the library reports, with its learning rates; clipped and not; in
   groups, with rates set by the caller, and gradients that nothing accumulates. */
static void optimizer(void)
{
    static const mtt_group GROUPS[] = {{"h.0.*", 2, 0.1f}, {"*c_proj*,wte.weight", 0.5f, 0}, {"*ln_*", 0, -1},
                                       {"lm_head*", -1, 0}, {"*", 0, 0}};
    int32_t tokens[32], targets[32];
    double worst = 0;
    for (int way = 0; way < 6; way++) {
        int clipped = way % 2, grouped = way > 1;
        setup s = small_setup();
        s.optim = (mtt_optim_desc){.lr = 0.02f,
                                   .beta1 = 0.8f,
                                   .beta2 = 0.95f,
                                   .eps = 1e-3f,
                                   .weight_decay = 0.3f,
                                   .clip = clipped ? 0.05f : -1,
                                   .lr_schedule = MTT_LR_COSINE,
                                   .warmup_steps = 2,
                                   .total_steps = 8,
                                   .min_lr = 1e-3f,
                                   .seed = SEED};
        if (grouped) s.optim.groups = GROUPS, s.optim.group_count = MTT__LENGTH(GROUPS);
        if (way > 3) s.policy.accumulate = 1, s.policy.keep_gradients = 1, s.batch = 4;
        reference r = reference_of(&s);
        mtt_optim_desc resolved;
        mtt_optim_resolve(&env, &s.optim, &resolved);
        mtt_trainer *trainer = open_trainer(&s);
        float *w = random_weights(&r), *g = malloc(r.weights * sizeof(float));
        double *wide = malloc(3 * r.weights * sizeof(double)), *m = wide + r.weights, *v = m + r.weights,
               beta1 = 1, beta2 = 1;
        write_all(trainer, &r, w);
        for (size_t i = 0; i < r.weights; i++) wide[i] = w[i], m[i] = v[i] = 0;
        for (int step = 0; step < 6; step++) {
            mtt_step_info info;
            float set = step < 3 ? 0 : 0.005f * (float)step;
            random_tokens(&s, s.policy.accumulate, 0, tokens, targets);
            if (grouped && step > 2) check(!mtt_trainer_set_lr(trainer, step < 5 ? set : -1), "no rate");
            check(!mtt_train_step(trainer, tokens, targets, &info), "a step failed: %s", env.error);
            read_all(trainer, &r, mtt_gradient_get, g);
            read_all(trainer, &r, mtt_parameter_get, w);
            double rate = mtt_learning_rate(&resolved, step), norm = 0;
            if (grouped && step > 2 && step < 5) rate = set;
            for (size_t i = 0; i < r.weights; i++) norm += (double)g[i] * g[i];
            double scale = clipped ? 0.05 / sqrt(norm) : 1;
            check(info.lr == (float)rate, "step %d ran at a learning rate of %g instead of %g", step,
                  (double)info.lr, rate);
            check(!clipped || info.grad_norm > 0.05f, "the gradient norm of %g is that after clipping",
                  (double)info.grad_norm);
            beta1 *= 0.8f;
            beta2 *= 0.95f;
            for (int p = 0; p < r.parameters; p++)
                for (size_t i = r.parameter[p].first; i < r.parameter[p].first + r.parameter[p].count; i++) {
                    double gradient = g[i] * scale, decay;
                    double own = rate * group_rate(&r.parameter[p], grouped, &decay);
                    m[i] = 0.8f * m[i] + (1 - 0.8f) * gradient;
                    v[i] = 0.95f * v[i] + (1 - 0.95f) * gradient * gradient;
                    wide[i] -=
                        own * (m[i] / (1 - beta1) / (sqrt(v[i] / (1 - beta2)) + 1e-3f) + decay * wide[i]);
                    double error = fabs(wide[i] - w[i]);
                    worst = fmax(worst, error);
                    if (error > 2e-5) {
                        check(0, "%s, step %d: %s[%d] is %.9g, AdamW says %.9g",
                              clipped ? "clipped" : "not clipped", step, r.parameter[p].name,
                              (int)(i - r.parameter[p].first), (double)w[i], wide[i]);
                        step = 6, p = r.parameters - 1;
                        break;
                    }
                }
        }
        mtt_trainer_destroy(trainer);
        free(w);
        free(g);
        free(wide);
    }
    check(1, "AdamW");
    printf("optimizer: largest difference from AdamW in double %.1e\n", worst);
}

/* Refusals of groups and rates; a checkpoint goes on with the groups of its run alone. */
static void groups(void)
{
    mtt_group group = {"h.*", 0.5f, 0}, many[MTT_MOST_GROUPS + 1];
    mtt_optim_desc resolved;
    setup s = small_setup(), grouped = s, other;
    for (size_t i = 0; i < MTT__LENGTH(many); i++) many[i] = group;
    s.optim.groups = many, s.optim.group_count = MTT_MOST_GROUPS;
    check(!mtt_optim_resolve(&env, &s.optim, &resolved), "%d groups: %s", MTT_MOST_GROUPS, env.error);
    s.optim.group_count++;
    check(mtt_optim_resolve(&env, &s.optim, &resolved) == MTT_E_ARGUMENT, "too many groups");
    s.optim.group_count = 2;
    many[1].lr_scale = 1001;
    check(mtt_optim_resolve(&env, &s.optim, &resolved) == MTT_E_ARGUMENT && strstr(env.error, "group 1"),
          "%s", env.error);
    many[1] = (mtt_group){NULL, 0, NAN};
    check(mtt_optim_resolve(&env, &s.optim, &resolved) == MTT_E_ARGUMENT && strstr(env.error, "no names") &&
          strstr(env.error, "weight_decay NaN"), "%s", env.error);
    s.optim.group_count = 0;
    grouped.optim.groups = &group, grouped.optim.group_count = 1;
    mtt_trainer *trainer = open_trainer(&grouped);
    check(!mtt_save(trainer, in("grouped"), NULL), "%s", env.error);
    check(!mtt_resume(trainer, in("grouped"), NULL), "%s", env.error);
    check(mtt_trainer_set_lr(trainer, NAN) == MTT_E_ARGUMENT && mtt_trainer_set_lr(trainer, 101) &&
          !mtt_trainer_set_lr(trainer, 0), "a learning rate");
    check(mtt_parameter_find(trainer, "wte.weight") == 0 && mtt_parameter_find(trainer, "wte") == -1 &&
          mtt_parameter_find(trainer, "h.1.ln_1.bias") > 9, "parameters by name");
    mtt_trainer_destroy(trainer);
    for (int i = 0; i < 4; i++) {
        mtt_group changed = group;
        other = grouped;
        other.optim.groups = &changed;
        if (i == 0) changed.names = "h.0.*";
        if (i == 1) changed.lr_scale = 0.6f;
        if (i == 2) changed.weight_decay = -1;
        if (i == 3) other.optim.group_count = 0;
        trainer = open_trainer(&other);
        check(mtt_resume(trainer, in("grouped"), NULL) == MTT_E_MISMATCH && strstr(env.error, "groups"),
              "change %d: %s", i, env.error);
        check(!mtt_save(trainer, in("plain"), NULL), "%s", env.error);
        mtt_trainer_destroy(trainer);
    }
    trainer = open_trainer(&grouped); /* saved without groups */
    check(mtt_resume(trainer, in("plain"), NULL) == MTT_E_MISMATCH && strstr(env.error, "groups"), "%s",
          env.error);
    mtt_trainer_destroy(trainer);
}

/* All of a parameter's weights, first or second moments in FP32. */
static void read_kept(mtt_trainer *trainer, const reference *r, int what, float *values)
{
    for (int i = 0; i < r->parameters; i++) {
        const mtt__parameter *q = mtt__parameter_at(trainer, find_parameter(trainer, r->parameter[i].name));
        check(!mtt__move_optim(trainer, MTT__GET, q, what, 0, (int64_t)r->parameter[i].count,
                              values + r->parameter[i].first),
              "no state");
    }
}

/* A step in the compact state against AdamW in double, from the same state. They differ by at most one unit
   of the stored format, plus the rounding of FP32 arithmetic. */
static void compact_update(void)
{
    int32_t tokens[32], targets[32];
    for (int precision = 0; precision < 4; precision++) {
        setup s = small_setup();
        double worst[3] = {0, 0, 0}, beta1 = 1, beta2 = 1;
        s.policy.precision = (mtt_precision)precision;
        s.policy.state = MTT_STATE_COMPACT;
        s.optim = (mtt_optim_desc){.lr = 0.02f,
                                   .beta1 = 0.8f,
                                   .beta2 = 0.95f,
                                   .eps = 1e-3f,
                                   .weight_decay = 0.3f,
                                   .clip = -1,
                                   .seed = SEED};
        reference r = reference_of(&s);
        mtt_trainer *trainer = open_trainer(&s);
        float *w = random_weights(&r), *g = malloc(7 * r.weights * sizeof(float)), *before = g + r.weights,
              *after = before + 3 * r.weights;
        write_all(trainer, &r, w);
        for (int step = 0; step < 8; step++) {
            random_tokens(&s, 2, 0, tokens, targets);
            for (int what = 0; what < 3; what++)
                read_kept(trainer, &r, what, before + (size_t)what * r.weights);
            check(!mtt_train_step(trainer, tokens, targets, NULL), "a step failed: %s", env.error);
            for (int what = 0; what < 3; what++)
                read_kept(trainer, &r, what, after + (size_t)what * r.weights);
            read_all(trainer, &r, mtt_gradient_get, g);
            beta1 *= 0.8f;
            beta2 *= 0.95f;
            for (int p = 0; p < r.parameters; p++)
                for (size_t i = 0; i < r.parameter[p].count; i += 32) {
                    double exact[3][32], scale[3] = {0, 0, 0};
                    size_t n = r.parameter[p].count - i < 32 ? r.parameter[p].count - i : 32,
                           at = r.parameter[p].first + i;
                    for (size_t k = 0; k < n; k++) {
                        double gradient = g[at + k], decay = r.parameter[p].cols ? 0.3f : 0,
                               old = before[at + k];
                        double m = 0.8f * before[r.weights + at + k] + (1 - 0.8f) * gradient;
                        double v = 0.95f * before[2 * r.weights + at + k] + (1 - 0.95f) * gradient * gradient;
                        double rate = 0.02f / (1 - beta1) / (sqrt(v / (1 - beta2)) + 1e-3f),
                               exactly = old - rate * m - 0.02f * decay * old;
                        double terms = fabs(old) + rate * (fabs(before[r.weights + at + k]) + fabs(gradient));
                        double limit =
                            (precision >= MTT_BF16 ? 2 * half_unit(exactly, precision == MTT_FP16) : 0) +
                            1e-6 * terms;
                        worst[0] = fmax(worst[0], fabs(after[at + k] - exactly) / limit);
                        exact[1][k] = m;
                        exact[2][k] = sqrt(v);
                        for (int what = 1; what < 3; what++)
                            scale[what] = fmax(scale[what], fabs(exact[what][k]));
                    }
                    for (size_t k = 0; k < n; k++)
                        for (int what = 1; what < 3; what++) {
                            double now = after[(size_t)what * r.weights + at + k], was = exact[what][k];
                            double limit =
                                (moment_error(fabs(was) / scale[what], what == 2, 1) + ldexp(1, -10) + 1e-5) *
                                scale[what];
                            if (scale[what] > 0)
                                worst[what] =
                                    fmax(worst[what], fabs((what == 2 ? sqrt(now) : now) - was) / limit);
                        }
                }
        }
        check(worst[0] <= 1 && worst[1] <= 1 && worst[2] <= 1,
              "%s, compact: weights, m, v are off by %g, %g, %g of what they may", PRECISIONS[precision],
              worst[0], worst[1], worst[2]);
        mtt_trainer_destroy(trainer);
        free(w);
        free(g);
    }
}

/* A task that can be learned: three times of four a token decides the next one. With `scale`, that is the
   loss scale of each step, and none is skipped. */
static setup task(mtt_precision precision)
{
    setup s = small_setup();
    s.model.d_model = 32;
    s.seq_len = 11;
    s.policy.accumulate = 1;
    s.policy.precision = precision;
    return s;
}

static void learn_task(const setup *s, int steps, double scale, double *losses)
{
    mtt_trainer *trainer = open_trainer(s);
    random_state = 5;
    for (int step = 0; step < steps; step++) {
        int32_t tokens[22], targets[22];
        mtt_step_info info = {.loss = NAN};
        for (int i = 0; i < 22; i++)
            tokens[i] = below(32), targets[i] = below(4) ? (3 * tokens[i] + 1) % 32 : below(32);
        check(!mtt_train_step(trainer, tokens, targets, &info), "step %d failed: %s", step, env.error);
        check(!scale || (!info.skipped && info.loss_scale == scale), "step %d has a loss scale of %g%s", step,
              (double)info.loss_scale, info.skipped ? " and is skipped" : "");
        losses[step] = info.loss;
    }
    mtt_trainer_destroy(trainer);
}

/* The compact state learns which token follows which as fast as the full state. The loss of a step differs by
   at most four times the difference between BF16 and FP32. The mean of a hundred steps differs by at most
   that difference. */
static void compact_loss(void)
{
    enum { STEPS = 300, LAST = 100, KINDS = 5 };
    static const mtt_precision PRECISION[KINDS] = {MTT_FP32, MTT_BF16, MTT_FP32, MTT_BF16, MTT_FP16};
    double losses[KINDS][STEPS], gap[KINDS] = {0}, mean[KINDS] = {0};
    for (int kind = 0; kind < KINDS; kind++) {
        setup s = task(PRECISION[kind]);
        s.policy.state = kind < 2 ? MTT_STATE_FULL : MTT_STATE_COMPACT;
        learn_task(&s, STEPS, 0, losses[kind]);
        for (int step = STEPS - LAST; step < STEPS; step++) {
            mean[kind] += losses[kind][step] / LAST;
            gap[kind] += fabs(losses[kind][step] - losses[kind < 2 ? 0 : kind == 2 ? 0 : 1][step]) / LAST;
        }
    }
    printf("compact state: mean losses %.5f, %.5f, %.5f, full %.5f, %.5f; mean gaps %.1e, %.1e, %.1e, BF16's "
           "to FP32 %.1e\n",
           mean[2], mean[3], mean[4], mean[0], mean[1], gap[2], gap[3], gap[4], gap[1]);
    for (int kind = 2; kind < KINDS; kind++)
        check(gap[kind] <= 4 * gap[1] && fabs(mean[kind] - mean[kind == 2 ? 0 : 1]) <= gap[1],
              "%s, compact: mean loss %.6f, full %.6f, mean gap %g, BF16's to FP32 %g",
              PRECISIONS[PRECISION[kind]], mean[kind], mean[kind == 2 ? 0 : 1], gap[kind], gap[1]);
}

static void learning_rates(void)
{
    for (int kind = 0; kind < 3; kind++) {
        new_case();
        mtt_optim_desc desc = {.lr = 1,
                               .lr_schedule = (mtt_lr_schedule)kind,
                               .warmup_steps = 100,
                               .total_steps = 1100,
                               .min_lr = 0.1f},
                       resolved;
        check(!mtt_optim_resolve(&env, &desc, &resolved), "a schedule is refused: %s", env.error);
        for (int step = 0; step < 1200; step++) {
            double part = step < 1100 ? (step - 100) / 1000.0 : 1, wanted = 1;
            if (kind == MTT_LR_LINEAR) wanted = 1 - 0.9 * part;
            if (kind == MTT_LR_COSINE) wanted = 0.1 + 0.9 * (0.5 + 0.5 * cos(3.141592653589793 * part));
            if (step < 100) wanted = (step + 1) / 100.0;
            check(fabs(mtt_learning_rate(&resolved, step) - wanted) < 1e-7,
                  "schedule %d: the rate of step %d is %.9g instead of %.9g", kind, step,
                  (double)mtt_learning_rate(&resolved, step), wanted);
        }
        check(fabs(mtt_learning_rate(&resolved, 5000) - (kind ? 0.1 : 1)) < 1e-6, "schedule %d ends at %g",
              kind, (double)mtt_learning_rate(&resolved, 5000));
    }
    mtt_optim_desc zero = {.seed = 1}, resolved;
    check(!mtt_optim_resolve(NULL, &zero, &resolved) && resolved.lr == 3e-4f && resolved.beta1 == 0.9f &&
              resolved.beta2 == 0.999f && resolved.eps == 1e-8f && resolved.weight_decay == 0.01f &&
              resolved.clip == 1 && resolved.loss_scale == 65536,
          "the optimizer's defaults are not those of the manual");
}

/* Two micro-batches of 2 make the step of one batch of 4. */
static void accumulation(void)
{
    setup parts = small_setup(), whole = parts;
    whole.batch = 4;
    whole.policy.accumulate = 1;
    for (int kind = 0; kind < 4; kind++) {
        double a[4], b[4];
        reference r = reference_of(&parts);
        float *x = malloc(r.weights * sizeof(float)), *y = malloc(r.weights * sizeof(float));
        parts.policy.attention = whole.policy.attention = (mtt_attention)(kind % 2);
        parts.policy.loss = whole.policy.loss = (mtt_loss)(1 + kind / 2);
        parts.optim.eps = whole.optim.eps =
            1e-3f; /* where a gradient is noise alone, Adam's quotient is not */
        train(&parts, 4, a, x);
        train(&whole, 4, b, y);
        for (int i = 0; i < 4; i++)
            check(fabs(a[i] / b[i] - 1) < 1e-5, "accumulated, step %d: loss %.9g, not %.9g", i, a[i], b[i]);
        check(relative_difference(x, y, r.weights) < 1e-5, "accumulated parameters differ by %g",
              relative_difference(x, y, r.weights));
        free(x);
        free(y);
    }
}

/* The same seed makes the same bits, whatever the number of threads; another seed does not. */
static void repeatable(void)
{
    setup s = small_setup();
    s.model.dropout = 0.1f;
    s.model.vocab = 300;
    s.seq_len = 33;
    s.policy.accumulate = 1;
    /* two in the compact state, with tensors that threads share out, as those of FP8 */
    for (int kind = 0; kind < 10; kind++) {
        double losses[4][3];
        if (kind >= 4) s.model.vocab = 3000;
        s.policy.state = kind / 2 == 2 ? MTT_STATE_COMPACT : MTT_STATE_FULL;
        if (kind == 8) { /* of today's form, so large that threads share each operation */
            s.model = (mtt_model_desc){.layers = 1, .heads = 4, .heads_kv = 2, .d_model = 64, .vocab = 300,
                                       .norm = MTT_NORM_RMS, .mlp = MTT_MLP_SWIGLU, .no_biases = 1,
                                       .positions = MTT_POSITIONS_ROTARY, .qk_norm = 1};
            s.batch = 11;
        }
        reference r = reference_of(&s);
        float *first = malloc(r.weights * sizeof(float)), *other = malloc(r.weights * sizeof(float));
        s.policy.attention = (mtt_attention)(kind % 2);
        s.policy.precision = kind / 2 == 3 ? MTT_FP8 : kind / 2 ? MTT_FP16 : MTT_FP32;
        s.policy.loss = kind % 3 ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL;
        for (int run = 0; run < 4; run++) {
            static const int THREADS[] = {2, 2, 1, 3};
            use_threads(THREADS[run]);
            train(&s, 3, losses[run], run ? other : first);
            check(memcmp(losses[0], losses[run], sizeof(losses[0])) == 0 &&
                      (!run || memcmp(first, other, r.weights * sizeof(float)) == 0),
                  "run %d of the same seed differs (kind %d)", run, kind);
        }
        use_threads(1);
        setup another = s;
        another.optim.seed++;
        train(&another, 3, losses[1], other);
        check(memcmp(losses[0], losses[1], sizeof(losses[0])) != 0, "another seed makes the same losses");
        free(first);
        free(other);
    }
}

/* An evaluation is without dropout, changes nothing, and does not disturb the training around it. Its
   products are never in 8 bits: FP8's is BF16's. */
static void evaluation(void)
{
    int32_t tokens[64], targets[64];
    for (int kind = 0; kind < 20; kind++) {
        setup s = small_setup();
        s.policy.precision = (mtt_precision)(kind % 5);
        s.policy.attention = (mtt_attention)(kind / 5 % 2);
        s.policy.loss = (mtt_loss)(1 + kind / 10);
        s.policy.accumulate = 1;
        random_tokens(&s, 1, 4, tokens, targets);
        setup wide = s;
        if (s.policy.precision == MTT_FP8)
            wide.policy.precision = MTT_BF16, wide.policy.loss = MTT_LOSS_CHUNKED;
        mtt_trainer *plain = open_trainer(&s), *stepper = open_trainer(&wide);
        mtt_step_info evaluated, trained;
        check(!mtt_evaluate(plain, tokens, targets, &evaluated), "an evaluation failed: %s", env.error);
        check(!mtt_train_step(stepper, tokens, targets, &trained), "a step failed: %s", env.error);
        check(evaluated.loss == trained.loss && evaluated.targets == 12 && evaluated.hits == trained.hits,
              "%s: an evaluation says %.9g and %d hits, the step %.9g and %d", PRECISIONS[kind % 5],
              evaluated.loss, (int)evaluated.hits, trained.loss, (int)trained.hits);
        mtt_trainer_destroy(plain);
        mtt_trainer_destroy(stepper);

        s.model.dropout = 0.3f;
        mtt_trainer *trainer = open_trainer(&s), *twin = open_trainer(&s);
        reference r = reference_of(&s);
        float *before = NULL, *after = NULL;
        double last[2] = {0, 0};
        for (int step = 0; step < 3; step++) {
            mtt_step_info info;
            before = parameters_of(trainer, &r);
            check(!mtt_evaluate(trainer, tokens, targets, &info), "an evaluation failed: %s", env.error);
            after = parameters_of(trainer, &r);
            check(memcmp(before, after, r.weights * sizeof(float)) == 0, "an evaluation changed the weights");
            if (s.policy.precision < MTT_BF16) {
                double *wide = malloc(r.weights * sizeof(double));
                for (size_t i = 0; i < r.weights; i++) wide[i] = after[i];
                micro_batch mb = {tokens, targets, make_masks(&r, 0, 0, 0)};
                answer wanted = {0, 0, 0};
                reference_answer(&r, wide, &mb, &wanted);
                check(fabs(info.loss * (double)info.targets / wanted.loss - 1) < 2e-7 &&
                          info.targets == wanted.targets && info.hits == wanted.hits,
                      "an evaluation says %.9g and %d of %d, the reference %.9g and %d of %d", info.loss,
                      (int)info.hits, (int)info.targets, wanted.loss / wanted.targets, wanted.hits,
                      wanted.targets);
                free(wide);
                free(mb.masks);
            }
            free(before);
            free(after);
            mtt_train_step(trainer, tokens, targets, &info), last[0] = info.loss;
            mtt_train_step(twin, tokens, targets, &info), last[1] = info.loss;
        }
        before = parameters_of(trainer, &r);
        after = parameters_of(twin, &r);
        check(last[0] == last[1] && memcmp(before, after, r.weights * sizeof(float)) == 0,
              "evaluations disturb the training");
        check(mtt_trainer_step(trainer) == 3, "evaluations count as steps");
        free(before);
        free(after);
        mtt_trainer_destroy(trainer);
        mtt_trainer_destroy(twin);
    }
}

static void next_logits(void)
{
    static const int COUNTS[] = {1, 3, 7, 8, 9, 20};
    for (int kind = 0; kind < 8; kind++) {
        setup s = small_setup();
        s.model.vocab = 37;
        s.model.dropout = 0.2f;
        s.model.positions = (mtt_positions)(kind % 2);
        s.policy.attention = (mtt_attention)(kind / 2 % 2);
        s.policy.window = kind & 4 ? 3 : 0;
        s.policy.loss = (mtt_loss)(1 + kind / 2 % 2);
        mtt_trainer *trainer = open_trainer(&s);
        reference r = reference_of(&s);
        float *w = random_weights(&r), logits[37];
        double *wide = malloc(r.weights * sizeof(double)),
               *stream = malloc(stream_count(&r) * sizeof(double));
        double *wanted = new_logits(&r);
        int32_t tokens[20], window[16] = {0}, targets[16] = {0};
        write_all(trainer, &r, w);
        for (size_t i = 0; i < r.weights; i++) wide[i] = w[i];
        for (int i = 0; i < 20; i++) tokens[i] = below(37);
        for (size_t c = 0; c < MTT__LENGTH(COUNTS); c++) {
            int count = COUNTS[c], seen = count < 8 ? count : 8;
            memcpy(window, tokens + count - seen, (size_t)seen * sizeof(int32_t));
            micro_batch mb = {window, targets, make_masks(&r, 0, 0, 0)};
            forward(&r, wide, &mb, stream, wanted);
            free(mb.masks);
            check(!mtt_next_logits(trainer, tokens, count, logits), "no logits: %s", env.error);
            double error = relative_error(logits, wanted + (seen - 1) * 37, 37);
            check(error < 1e-5, "logits after %d tokens differ from the reference's by %g", count, error);
        }
        check(mtt_next_logits(trainer, tokens, 0, logits) == MTT_E_ARGUMENT, "logits after no token at all");
        tokens[0] = 37;
        check(mtt_next_logits(trainer, tokens, 1, logits) == MTT_E_ARGUMENT,
              "an id outside the vocabulary passes");
        mtt_trainer_destroy(trainer);
        free(w);
        free(wide);
        free(stream);
        free(wanted);
    }
}

/* What a caller can get wrong is refused in words and changes nothing. */
static void misuse(void)
{
    setup s = small_setup();
    int32_t tokens[32], targets[32];
    float values[512];
    s.policy.accumulate = 1;
    random_tokens(&s, 1, 0, tokens, targets);
    mtt_trainer *trainer = open_trainer(&s), *twin = open_trainer(&s);
    mtt_step_info info, twin_info;
    check(!mtt_parameter(trainer, -1, NULL) && !mtt_parameter(trainer, 1000, NULL), "parameters have no end");
    for (int kind = 0; kind < 9; kind++) {
        mtt_status status = MTT_OK;
        int32_t token = tokens[5], target = targets[5];
        env.error[0] = 0;
        if (kind == 0 || kind == 7) tokens[5] = 32;
        if (kind == 1) tokens[5] = -1;
        if (kind == 2 || kind == 8) targets[5] = 32;
        if (kind == 3) targets[5] = -2;
        if (kind < 4) status = mtt_train_step(trainer, tokens, targets, &info);
        if (kind == 4) status = mtt_parameter_get(trainer, 1000, values);
        if (kind == 5) status = mtt_parameter_set(trainer, -1, values);
        if (kind == 6) status = mtt_gradient_get(trainer, 0, values);
        if (kind >= 7) status = mtt_evaluate(trainer, tokens, targets, &info);
        check(status == MTT_E_ARGUMENT && env.error[0], "misuse %d: %s, \"%s\"", kind,
              mtt_status_string(status), env.error);
        if (kind < 4 || kind >= 7) /* targets may be -1, tokens not */
            check(strstr(env.error, "has ids 0 to 31") &&
                      !strstr(env.error, "ids 0 to 31, or -1 for none:") == (kind < 2 || kind == 7),
                  "misuse %d: \"%s\"", kind, env.error);
        tokens[5] = token, targets[5] = target;
    }
    mtt_train_step(trainer, tokens, targets, &info);
    mtt_train_step(twin, tokens, targets, &twin_info);
    check(info.loss == twin_info.loss && info.step == 1 && info.grad_norm == twin_info.grad_norm,
          "misuse left traces");
    mtt_trainer_destroy(trainer);
    mtt_trainer_destroy(twin);
    mtt_trainer_destroy(NULL);
}

static int ignore_token(void *user, int prompt, int32_t id, const char *text, size_t bytes)
{
    (void)user, (void)prompt, (void)id, (void)text, (void)bytes;
    return 0;
}

/* A message has the least int as it is. Only a sanitizer sees what -INT_MIN would do. */
static void least_numbers(void)
{
    setup s = small_setup();
    const int32_t token = 1, *tokens = &token;
    const mtt_generator_desc desc = {.context = 8, .batch = 1};
    const int least = INT_MIN;
    mtt_generation job = {.prompts = &tokens, .sizes = &least, .prompt_count = 1, .write = ignore_token};
    mtt_ranks_desc rank = {.rank = INT_MIN, .ranks = INT_MIN}, port = {.ranks = 2, .port = INT_MIN};
    mtt_policy member = {.ranks = 2, .rank = INT_MIN};
    mtt_generator_desc chunk = desc;
    mtt_trainer *trainer = open_trainer(&s);
    mtt_generator *generator = NULL, *none = NULL;
    mtt_ranks *ranks = NULL;
    mtt_backend backend;
    mtt_plan_report plan;
    float values[64];
    double ms;
    chunk.chunk = INT_MIN;
    check(!mtt_generator_create(&env, &s.model, &desc, mtt_cpu_backend(), &generator), "%s", env.error);
    for (int kind = 0; kind < 16; kind++) {
        mtt_status status = MTT_OK;
        env.error[0] = 0;
        switch (kind) {
        case 0: status = mtt_parameter_get(trainer, INT_MIN, values); break;
        case 1: status = mtt_next_logits(trainer, &token, INT_MIN, values); break;
        case 2: status = mtt_profile(trainer, INT_MIN, 1, &ms); break;
        case 3: status = mtt_profile(trainer, 0, INT_MIN, &ms); break;
        case 4: status = mtt_generator_cut(generator, INT_MIN, 0); break;
        case 5: status = mtt_generator_cut(generator, 0, INT_MIN); break;
        case 6: status = mtt_generator_append(generator, &tokens, &least, values); break;
        case 7: status = mtt_generator_run(generator, NULL, &job); break;
        case 8: job.count = INT_MIN; status = mtt_generator_run(generator, NULL, &job); break;
        case 9: job.count = 0, job.prompt_count = INT_MIN; status = mtt_generator_run(generator, NULL, &job);
            break;
        case 10: status = mtt_generator_create(&env, &s.model, &chunk, mtt_cpu_backend(), &none); break;
        case 11: status = mtt_ranks_fork(&env, INT_MIN, 0, &ranks); break;
        case 12: status = mtt_ranks_connect(&env, &rank, &ranks); break;
        case 13: status = mtt_ranks_connect(&env, &port, &ranks); break;
        case 14: status = mtt_cuda_backend(&env, INT_MIN, &backend); break;
        default: status = mtt_plan(&env, &s.model, &member, 2, 8, &plan);
        }
        check(status && strstr(env.error, "-2147483648"), "number %d: %s, \"%s\"", kind,
              mtt_status_string(status), env.error);
    }
    check(mtt_parameter_get(trainer, INT_MAX, values) == MTT_E_ARGUMENT &&
              mtt_parameter_set(trainer, INT_MAX, values) == MTT_E_ARGUMENT &&
              mtt_gradient_get(trainer, INT_MAX, values) == MTT_E_ARGUMENT &&
              mtt_gradient_get(trainer, INT_MIN, values) == MTT_E_ARGUMENT,
          "a parameter past the last has values");
    mtt_generator_destroy(generator);
    mtt_trainer_destroy(trainer);
}

/* Parameters move in pieces of 65,536 elements. Those of 8 bits and a power of two fit all formats. */
static void long_parameters(void)
{
    enum { VOCAB = 5000, WIDTH = 32 };
    float *values = malloc(VOCAB * WIDTH * sizeof(float)), *read = malloc(VOCAB * WIDTH * sizeof(float));
    random_state = 1717;
    for (int i = 0; i < VOCAB * WIDTH; i++) values[i] = ldexpf((float)(below(257) - 128), -below(12));
    for (int kind = 0; kind < 8; kind++) {
        setup s = small_setup();
        s.model.vocab = VOCAB;
        s.model.d_model = WIDTH;
        s.policy.precision = (mtt_precision)(kind % 4);
        s.policy.state = kind / 4 ? MTT_STATE_COMPACT : MTT_STATE_FULL;
        mtt_trainer *trainer = open_trainer(&s);
        int index = find_parameter(trainer, "wte.weight"), wrong = 0;
        check(!mtt_parameter_set(trainer, index, values), "%s", env.error);
        check(!mtt_parameter_get(trainer, index, read), "%s", env.error);
        for (int i = 0; i < VOCAB * WIDTH; i++) wrong += read[i] != values[i];
        check(!wrong, "%s, %s: of 160,000 elements %d come back changed", PRECISIONS[kind % 4],
              kind / 4 ? "compact" : "full", wrong);
        mtt_trainer_destroy(trainer);
    }
    free(values);
    free(read);
}

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* Steps and operations take some time, and no more than passes around them. */
static void times(void)
{
    int32_t tokens[32], targets[32];
    setup s = small_setup();
    s.policy.accumulate = 1;
    random_tokens(&s, 1, 0, tokens, targets);
    mtt_trainer *trainer = open_trainer(&s);
    for (int i = 0; i < 3; i++) {
        mtt_step_info info;
        double ms = 0, before = now_ms(), around;
        check(!mtt_train_step(trainer, tokens, targets, &info), "%s", env.error);
        around = now_ms() - before;
        check(info.ms > 0 && info.ms <= around, "a step of %g ms within %g", info.ms, around);
        before = now_ms();
        check(!mtt_profile(trainer, i, 5, &ms), "%s", env.error);
        around = now_ms() - before;
        check(ms > 0 && 5 * ms <= around, "an operation of 5 times %g ms within %g", ms, around);
    }
    mtt_trainer_destroy(trainer);
}

/* Operations run three times each, in their order, leave the gradients of a step, also those that have their
   result in place of an operand. */
static void profiled(void)
{
    setup s = small_setup();
    int32_t tokens[32], targets[32];
    double sums[2][64] = {{0}}, ms; /* of a gradient's squares */
    mtt_step_info info;
    int64_t shape[2];
    s.policy.accumulate = 1, s.policy.keep_gradients = 1;
    random_tokens(&s, 1, 0, tokens, targets);
    mtt_trainer *t = open_trainer(&s);
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    check(!mtt_trainer_set_lr(t, 0) && !mtt_train_step(t, tokens, targets, &info), "%s", env.error);
    for (int round = 0; round < 2; round++) {
        for (int k = 0; k < 64 && mtt_parameter(t, k, shape); k++) {
            const int64_t count = shape[0] * (shape[1] ? shape[1] : 1);
            float *g = malloc((size_t)count * sizeof(float));
            check(!mtt_gradient_get(t, k, g), "%s", env.error);
            for (int64_t i = 0; i < count; i++) sums[round][k] += (double)g[i] * (double)g[i];
            free(g);
        }
        for (int i = 0; i < p->op_count && !round; i++)
            if (p->ops[i].phase < MTT_STEP) check(!mtt_profile(t, i, 3, &ms), "%s", env.error);
    }
    check(sums[0][0] > 0 && !memcmp(sums[0], sums[1], sizeof(sums[0])), "profiling leaves other gradients");
    mtt_trainer_destroy(t);
}

static int drawn(const float *logits, int vocab, float temperature, int top_k, uint64_t seed, int index)
{
    mtt_sampling sampling = {.temperature = temperature, .top_k = top_k, .seed = seed};
    return mtt_sample(logits, vocab, &sampling, (uint64_t)index);
}

/* The probability of the ids that are likelier than v, as a share of that of the `top_k` likeliest (0 = all).
   2: v is none of these. */
static double likelier(const double *p, int n, int v, int top_k)
{
    double all = 0, above = 0;
    int rank = 0;
    for (int i = 0; i < n; i++) {
        int before = 0;
        for (int k = 0; k < n; k++) before += p[k] > p[i];
        if (!top_k || before < top_k) all += p[i];
        if (p[i] > p[v]) above += p[i], rank++;
    }
    return top_k && rank >= top_k ? 2 : above / all;
}

/* An id is in the nucleus if the likelier ids have less than top_p. Draws follow the distribution of the ids
   in it, and no other id is ever drawn. */
static void nucleus(void)
{
    enum { IDS = 50, DRAWS = 4000 };
    static const float shares[] = {1e-6f, 0.1f, 0.5f, 0.9f, 0.97f, 0.9999f};
    static const int tops[] = {0, 1, 3, 20, IDS, 1000};
    for (int n = 0; n < 60; n++) {
        float logits[IDS];
        double p[IDS], inside = 0;
        int counts[IDS] = {0};
        mtt_sampling s = {n % 3 ? 1 : 0.4f, tops[n % 7 % 6], shares[n % 6], .seed = (uint64_t)n};
        for (int v = 0; v < IDS; v++) {
            logits[v] = (float)(below(2000) - 1000) / 250 + (v % 10 ? 0 : 3); /* some of them equal */
            p[v] = exp(logits[v] / (double)s.temperature);
        }
        for (int v = 0; v < IDS; v++)
            if (likelier(p, IDS, v, s.top_k) < (double)s.top_p) inside += p[v];
        for (int i = 0; i < DRAWS; i++) {
            int id = mtt_sample(logits, IDS, &s, (uint64_t)i);
            check(id >= 0 && id < IDS, "draw %d: %d", i, id);
            if (id >= 0 && id < IDS) counts[id]++;
        }
        for (int v = 0; v < IDS; v++) { /* five standard deviations */
            double q = likelier(p, IDS, v, s.top_k) < (double)s.top_p ? p[v] / inside : 0;
            check(fabs(counts[v] - DRAWS * q) <= 5 * sqrt(DRAWS * q * (1 - q)) + 1e-9,
                  "top_k %d, top_p %g: id %d was drawn %d times, not %.1f", s.top_k, (double)s.top_p, v,
                  counts[v], DRAWS * q);
        }
        s.top_p = 1;
        for (int i = 0; i < 50; i++)
            check(mtt_sample(logits, IDS, &s, (uint64_t)i) ==
                      drawn(logits, IDS, s.temperature, s.top_k, (uint64_t)n, i),
                  "top_p 1 draws as top_p 0");
    }
}

static void sampling(void)
{
    enum { DRAWS = 40000 };
    float logits[8] = {0.3f, -1, 2, 1.5f, -3, 0, 2.2f, 1};
    int counts[8] = {0}, top[8] = {0}, cold[8] = {0}, different = 0;
    double sum = 0, cold_sum = 0;
    for (int v = 0; v < 8; v++) sum += exp(logits[v]), cold_sum += exp(logits[v] / 0.5);
    for (int i = 0; i < DRAWS; i++) {
        int a = drawn(logits, 8, 1, 0, 5, i), b = drawn(logits, 8, 1, 0, 5, i);
        int t = drawn(logits, 8, 1, 3, 5, i), c = drawn(logits, 8, 0.5f, 0, 6, i);
        check(a == b && a >= 0 && a < 8 && t >= 0 && t < 8 && c >= 0 && c < 8, "draw %d: %d, %d, %d, %d", i,
              a, b, t, c);
        if ((a | t | c) & ~7) return;
        counts[a]++, top[t]++, cold[c]++;
        different += a != drawn(logits, 8, 1, 0, 7, i);
    }
    double top_sum = exp(logits[2]) + exp(logits[6]) + exp(logits[3]);
    for (int v = 0; v < 8; v++) { /* five standard deviations */
        double p = exp(logits[v]) / sum, q = exp(logits[v] / 0.5) / cold_sum,
               t = v == 2 || v == 6 || v == 3 ? exp(logits[v]) / top_sum : 0;
        check(fabs(counts[v] - DRAWS * p) <= 5 * sqrt(DRAWS * p * (1 - p)),
              "id %d was drawn %d times, not %.0f", v, counts[v], DRAWS * p);
        check(fabs(cold[v] - DRAWS * q) <= 5 * sqrt(DRAWS * q * (1 - q)),
              "at temperature 0.5 id %d was drawn %d times, not %.0f", v, cold[v], DRAWS * q);
        check(fabs(top[v] - DRAWS * t) <= 5 * sqrt(DRAWS * t * (1 - t)),
              "of the top 3, id %d was drawn %d times, not %.0f", v, top[v], DRAWS * t);
    }
    check(different > DRAWS / 4, "another seed draws the same ids");
    check(drawn(logits, 8, 0, 0, 1, 1) == 6 && drawn(logits, 8, 1, 1, 1, 1) == 6,
          "the coldest draw is not the largest logit");
}

/* ---------------------------------------------------------------------------- quality, generation ---- */

/* A token file of a few thousand ids, made from invented text. */
static mtt_tokens *make_tokens(void)
{
    mtt_tokens *tokens = NULL;
    mtt_prepare_report report;
    char input[400], output[400];
    snprintf(input, sizeof(input), "%s", in("words.txt"));
    snprintf(output, sizeof(output), "%s", in("words"));
    FILE *file = fopen(input, "wb");
    for (int i = 0; i < 20000 && file; i++)
        fprintf(file, "%c%c%c%s", 'a' + below(5), 'a' + below(4), 'k' + below(9), i % 40 ? " " : "\n\n");
    if (file) fclose(file);
    mtt_prepare_desc desc = {.input = input, .output = output, .vocab = 280};
    check(!mtt_prepare(&env, &desc, &report), "text could not be prepared: %s", env.error);
    check(!mtt_tokens_open(&env, in("words.train.tokens"), &tokens), "no token file: %s", env.error);
    return tokens;
}

/* A trainer with random weights and a head that prefers what is frequent in the file, so that there are hits;
   its weights in double, too. */
static mtt_trainer *open_reader(const setup *s, const reference *r, const int32_t *ids, size_t count,
                                double *wide)
{
    mtt_trainer *trainer = open_trainer(s);
    float *w = random_weights(r), *bias = w + r->parameter[r->parameters - 1].first;
    for (size_t i = 0; i < count; i++) bias[ids[i]] += 0.02f;
    write_all(trainer, r, w);
    for (size_t i = 0; i < r->weights; i++) wide[i] = w[i];
    free(w);
    return trainer;
}

/* Loss, perplexity, bits per byte and accuracy of a token file against sums over a naive model's answers to
   its sequences, one by one. The last sequence is shorter, and the last batch is not full. */
static void quality(const mtt_tokens *tokens, const mtt_tokenizer *tokenizer)
{
    setup s = small_setup(), one;
    size_t count = (size_t)mtt_tokens_count(tokens), most = 100000, bytes = 0;
    int sequences = (int)(count + 6) / 8, last = (int)(count - 1) % 8;
    int32_t *ids = malloc(count * sizeof(int32_t));
    char *text = malloc(most);
    s.model.vocab = 280;
    s.batch = sequences % 2 ? 2 : sequences % 3 ? 3 : sequences % 5 ? 5 : 7;
    one = s;
    one.batch = 1;
    reference r = reference_of(&one);
    double *wide = malloc(r.weights * sizeof(double)), *ones = make_masks(&r, 0, 0, 0);
    check(!mtt_tokens_read(tokens, 0, count, ids) && sequences > 50 && sequences % s.batch && last,
          "%d sequences of a file, the last of %d: %s", sequences, last, env.error);
    mtt_trainer *trainer = open_reader(&s, &r, ids, count, wide);
    for (int batches = 0; batches < 3; batches++) {
        int done = batches ? batches * s.batch : sequences, targets = batches ? 8 * done : (int)count - 1;
        mtt_quality q, bare;
        volatile sig_atomic_t stop = 0;
        answer wanted = {0, 0, 0};
        new_case();
        for (int k = 0; k < done; k++) {
            int32_t x[8] = {0}, y[8];
            micro_batch mb = {x, y, ones};
            for (int i = 0; i < 8; i++) {
                int there = 8 * k + i < (int)count - 1;
                if (there) x[i] = ids[8 * k + i];
                y[i] = there ? ids[8 * k + i + 1] : -1;
            }
            reference_answer(&r, wide, &mb, &wanted);
        }
        check(!mtt_decode(tokenizer, ids + 1, (size_t)targets, text, most, &bytes), "no text: %s",
              env.error);
        check(!mtt_evaluate_tokens(trainer, tokens, tokenizer, batches, &stop, &q), "no quality: %s",
              env.error);
        check(!mtt_evaluate_tokens(trainer, tokens, NULL, batches, NULL, &bare), "no quality: %s", env.error);
        check(q.targets == targets && wanted.targets == targets, "%d targets, not %d", (int)q.targets,
              targets);
        check(fabs(q.loss * targets / wanted.loss - 1) < 2e-7, "a loss of %.9g, not %.9g", q.loss,
              wanted.loss / targets);
        check(fabs(q.perplexity / exp(wanted.loss / targets) - 1) < 2e-6, "a perplexity of %.9g, not %.9g",
              q.perplexity, exp(wanted.loss / targets));
        check(fabs(q.bits_per_byte * (double)bytes * 0.69314718055994531 / wanted.loss - 1) < 2e-7,
              "%.9g bits per byte, not %.9g", q.bits_per_byte,
              wanted.loss / 0.69314718055994531 / (double)bytes);
        check(q.accuracy == (double)wanted.hits / targets && (wanted.hits > 0 || batches),
              "an accuracy of %g, not %d of %d", q.accuracy, wanted.hits, targets);
        check(bare.bits_per_byte == 0 && bare.loss == q.loss && bare.perplexity == q.perplexity &&
                  bare.accuracy == q.accuracy,
              "without a tokenizer: %g bits per byte, a loss of %g", bare.bits_per_byte, bare.loss);
        stop = 1;
        check(mtt_evaluate_tokens(trainer, tokens, NULL, 0, &stop, &bare) == MTT_END &&
                  bare.targets == 8 * s.batch, "stopped after %d targets", (int)bare.targets);
        check(batches != 1 || bare.loss == q.loss, "stopped with a loss of %g, not %g", bare.loss, q.loss);
    }
    mtt_quality none;
    check(mtt_evaluate_tokens(trainer, NULL, NULL, 0, NULL, &none) == MTT_E_ARGUMENT &&
          strstr(env.error, "tokens is NULL"), "no tokens: %s", env.error);
    check(mtt_evaluate_tokens(trainer, tokens, NULL, -1, NULL, &none) == MTT_E_ARGUMENT &&
          strstr(env.error, "batches is -1"), "-1 batches: %s", env.error);
    mtt_trainer_destroy(trainer);
    free(ids);
    free(text);
    free(wide);
    free(ones);
}

static int collect(void *user, int prompt, int32_t id, const char *text, size_t bytes)
{
    mtt__text *out = user;
    (void)prompt, (void)id;
    for (size_t i = 0; i < bytes && out->size + 1 < out->capacity; i++) out->at[out->size++] = text[i];
    out->at[out->size] = 0;
    return 0;
}

enum { GENERATED = 40 };

/* The text that mtt_generate writes. */
static void generated(mtt_trainer *trainer, mtt_tokenizer *tokenizer, const char *prompt, float temperature,
                      int top_k, uint64_t seed, char text[1000])
{
    mtt__text out;
    mtt_generation job = {.texts = &prompt, .prompt_count = 1, .count = GENERATED, .write = collect,
                          .user = &out, .sampling = {temperature, .top_k = top_k, .seed = seed}};
    mtt__text_init(&out, text, 1000);
    check(!mtt_generate(trainer, tokenizer, &job), "no text: %s", env.error);
}

/* What it should write: a naive model's logits after the last 8 tokens, of which the largest is taken, or one
   drawn under (seed, position) from them. Returns the number of tokens; an end of text is the last. */
static int wanted_text(const reference *r, const double *wide, mtt_tokenizer *tokenizer, const char *prompt,
                        float temperature, int top_k, uint64_t seed, char text[1000])
{
    int32_t ids[100], targets[8] = {0};
    size_t known = 0, prompted, bytes = 0;
    double *stream = malloc(stream_count(r) * sizeof(double)), *logits = new_logits(r), *ones;
    float row[280];
    ones = make_masks(r, 0, 0, 0);
    check(!mtt_encode(tokenizer, prompt, strlen(prompt), ids, 50, &known), "%s", env.error);
    if (!known) ids[known++] = mtt_tokenizer_end_of_text(tokenizer);
    prompted = known;
    for (int i = 0; i < GENERATED; i++) {
        int32_t window[8] = {0};
        size_t seen = known < 8 ? known : 8;
        memcpy(window, ids + known - seen, seen * sizeof(int32_t));
        micro_batch mb = {window, targets, ones};
        forward(r, wide, &mb, stream, logits);
        for (int v = 0; v < 280; v++) row[v] = (float)logits[(seen - 1) * 280 + (size_t)v];
        ids[known] = 0;
        for (int v = 1; v < 280; v++)
            if (row[v] > row[ids[known]]) ids[known] = v;
        if (temperature > 0) ids[known] = drawn(row, 280, temperature, top_k, seed, i);
        if (ids[known++] == mtt_tokenizer_end_of_text(tokenizer)) break;
    }
    check(!mtt_decode(tokenizer, ids + prompted, known - prompted, text, 999, &bytes), "%s", env.error);
    text[bytes] = 0;
    free(stream);
    free(logits);
    free(ones);
    return (int)(known - prompted);
}

static void generation(const mtt_tokens *tokens, mtt_tokenizer *tokenizer)
{
    static const char *const PROMPTS[] = {"", "abk", "abk bcl acm bbn aak cdo dap ebq"};
    static const char *const words[] = {"temperature is -1", "temperature is NaN", "temperature is Inf",
                                        "temperature is 1.1e+30, it must be 0 to 1e+30", "top_p is 1.1, it",
                                        "top_k is -1", "top_p is -0.5, it must be 0 to 1", "top_p is 1.5",
                                        "top_p is NaN",
                                        "min_p is -0.1", "min_p is 1.5", "repetition_penalty is -1",
                                        "repetition_penalty is NaN"};
    const mtt_sampling bad[] = {{.temperature = -1}, {.temperature = NAN}, {.temperature = INFINITY},
                                {.temperature = 1.1e30f}, {.top_p = 1.1f},
                                {.top_k = -1}, {.top_p = -0.5f}, {.top_p = 1.5f}, {.top_p = NAN},
                                {.min_p = -0.1f}, {.min_p = 1.5f}, {.repetition_penalty = -1},
                                {.repetition_penalty = NAN}};
    mtt_generation job = {.texts = (const char *[]){"abk"}, .prompt_count = 1, .count = 5,
                          .write = ignore_token};
    setup s = small_setup(), one;
    char text[1000], wanted[1000], other[1000];
    int32_t id = 0;
    s.model.vocab = 280;
    one = s;
    one.batch = 1;
    reference r = reference_of(&one);
    double *wide = malloc(r.weights * sizeof(double));
    check(!mtt_tokens_read(tokens, 7, 1, &id), "%s", env.error);
    mtt_trainer *trainer = open_reader(&s, &r, &id, 1, wide);
    for (size_t i = 0; i < 3; i++) {
        new_case();
        wanted_text(&r, wide, tokenizer, PROMPTS[i], 0, 0, 1, wanted);
        generated(trainer, tokenizer, PROMPTS[i], 0, 0, 1, text);
        check(strcmp(text, wanted) == 0 && *text, "greedy: \"%s\", not \"%s\"", text, wanted);
        generated(trainer, tokenizer, PROMPTS[i], 2, 1, 9, other);
        check(strcmp(text, other) == 0, "the top 1 is not the greedy choice: \"%s\", \"%s\"", other, text);
        wanted_text(&r, wide, tokenizer, PROMPTS[i], 0.7f, 20, 5, wanted);
        generated(trainer, tokenizer, PROMPTS[i], 0.7f, 20, 5, other);
        check(strcmp(other, wanted) == 0 && strcmp(other, text) != 0, "drawn: \"%s\", not \"%s\"", other,
              wanted);
        generated(trainer, tokenizer, PROMPTS[i], 0.7f, 20, 6, text);
        check(strcmp(other, text) != 0, "another seed writes the same");
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        job.sampling = bad[i];
        check(mtt_generate(trainer, tokenizer, &job) == MTT_E_ARGUMENT && strstr(env.error, words[i]),
              "a wrong sampling, %s: %s", words[i], env.error);
    }
    job.sampling = (mtt_sampling){0};
    /* an end of text in every tenth place or so */
    size_t end = r.parameter[r.parameters - 1].first + (size_t)mtt_tokenizer_end_of_text(tokenizer);
    float *w = parameters_of(trainer, &r);
    w[end] = 5;
    wide[end] = 5;
    write_all(trainer, &r, w);
    int count = wanted_text(&r, wide, tokenizer, "abk", 1, 0, 1, wanted);
    generated(trainer, tokenizer, "abk", 1, 0, 1, text);
    check(strcmp(text, wanted) == 0 && *text && count < GENERATED, "a text that ends: \"%s\", not \"%s\"",
          text, wanted);
    for (size_t i = 0; i < r.weights; i++) w[i] = NAN;
    write_all(trainer, &r, w);
    check(mtt_generate(trainer, tokenizer, &job) == MTT_E_NUMBERS && strstr(env.error, "is NaN"),
          "weights that are not finite: %s", env.error);
    mtt_trainer_destroy(trainer);
    free(w);
    free(wide);
}

/* --------------------------------------------------------------------------------------- checkpoints ---- */

static setup checkpoint_setup(int precision)
{
    setup s = small_setup();
    s.model.vocab = 280;
    s.model.dropout = 0.1f;
    s.policy.precision = (mtt_precision)precision;
    s.optim.lr_schedule = MTT_LR_COSINE;
    s.optim.warmup_steps = 3;
    s.optim.total_steps = 10;
    return s;
}

/* Steps up to number `end`, reading from the loader. */
static void run_on(mtt_trainer *trainer, mtt_batches *batches, int end, double *losses)
{
    int32_t tokens[32], targets[32];
    while (mtt_trainer_step(trainer) < end) {
        mtt_step_info info;
        int64_t step = mtt_trainer_step(trainer);
        mtt_status status = mtt_batches_next(batches, tokens, targets);
        if (!status) status = mtt_batches_next(batches, tokens + 16, targets + 16);
        if (!status) status = mtt_train_step(trainer, tokens, targets, &info);
        if (status) {
            check(0, "step %d failed: %s", (int)step, env.error);
            return;
        }
        losses[step] = info.loss;
    }
}

static void resume_bits(const mtt_tokens *tokens)
{
    static const int STOPS[] = {0, 1, 5};
    for (int kind = 0; kind < 10; kind += each()) {
        int precision = kind % 5;
        setup s = checkpoint_setup(precision);
        s.policy.state = (mtt_state)(kind / 5);
        reference r = reference_of(&s);
        double whole[10], parts[10];
        mtt_batches batches, loader;
        mtt_trainer *trainer = open_trainer(&s);
        check(!mtt_batches_init(&env, &batches, tokens, 2, 8, 3, 0), "no batches: %s", env.error);
        for (int i = 0; i < 3; i++) {
            char name[20];
            snprintf(name, sizeof(name), "at%d", STOPS[i]);
            run_on(trainer, &batches, STOPS[i], whole);
            check(!mtt_save(trainer, in(name), &batches), "a checkpoint could not be saved: %s", env.error);
        }
        run_on(trainer, &batches, 10, whole);
        float *final = parameters_of(trainer, &r);
        mtt_trainer_destroy(trainer);
        for (int i = 0; i < 6; i++) { /* the same policy and another, that changes no bit */
            setup other = s;
            char name[20];
            snprintf(name, sizeof(name), "at%d", STOPS[i / 2]);
            if (i % 2) other.policy.recompute = i / 2 ? MTT_RECOMPUTE_LAYER : MTT_RECOMPUTE_SELECTIVE;
            trainer = open_trainer(&other);
            mtt_batches_init(&env, &loader, tokens, 2, 8, 3, 0);
            if (i % 4 == 1)
                memset(parts, 0, sizeof(parts)), run_on(trainer, &loader, 2, parts); /* into a used trainer */
            check(!mtt_resume(trainer, in(name), &loader), "%s: no resume at %d: %s", PRECISIONS[precision],
                  STOPS[i / 2], env.error);
            check(mtt_trainer_step(trainer) == STOPS[i / 2], "resumed at step %d, not %d",
                  (int)mtt_trainer_step(trainer), STOPS[i / 2]);
            check(loader.cursor == (uint64_t)(STOPS[i / 2] * 4), "the loader resumes at %d",
                  (int)loader.cursor);
            memcpy(parts, whole, sizeof(parts));
            for (int k = STOPS[i / 2]; k < 10; k++) parts[k] = 0;
            run_on(trainer, &loader, 10, parts);
            float *values = parameters_of(trainer, &r);
            check(memcmp(parts, whole, sizeof(parts)) == 0 &&
                      memcmp(values, final, r.weights * sizeof(float)) == 0,
                  "%s: resumed at step %d%s, the run differs", PRECISIONS[precision], STOPS[i / 2],
                  i % 2 ? ", recomputing" : "");
            free(values);
            mtt_trainer_destroy(trainer);
        }
        free(final);
    }
}

/* A checkpoint serves any precision, state and batch: its master weights arrive as they were, or rounded
   where fewer bits are kept, and the run goes on. */
static void resume_elsewhere(const mtt_tokens *tokens)
{
    for (int kind = 0; kind < 75; kind += each()) {
        setup s = checkpoint_setup(kind / 5 % 5), other = checkpoint_setup(kind % 5);
        s.policy.state = kind / 25 == 1 ? MTT_STATE_COMPACT : MTT_STATE_FULL;
        other.policy.state = kind / 25 == 2 ? MTT_STATE_COMPACT : MTT_STATE_FULL;
        reference r = reference_of(&s);
        double losses[10];
        mtt_batches batches;
        mtt_trainer *from = open_trainer(&s);
        mtt_batches_init(&env, &batches, tokens, 2, 8, 3, 0);
        run_on(from, &batches, 5, losses);
        check(!mtt_save(from, in("elsewhere"), &batches), "a checkpoint could not be saved: %s", env.error);
        other.policy.attention = MTT_ATTENTION_FLASH;
        other.policy.loss = MTT_LOSS_CHUNKED;
        other.policy.accumulate = 1;
        other.batch = 4;
        mtt_trainer *to = open_trainer(&other);
        mtt_batches_init(&env, &batches, tokens, 4, 8, 3, 0);
        check(!mtt_resume(to, in("elsewhere"), &batches), "%s does not resume as %s: %s",
              PRECISIONS[kind / 5 % 5], PRECISIONS[kind % 5], env.error);
        float *a = parameters_of(from, &r), *b = parameters_of(to, &r);
        for (size_t i = 0; kind / 25 == 2 && kind % 5 >= MTT_BF16 && i < r.weights; i++) {
            uint16_t weight;
            uint8_t rest;
            mtt__split_weight(a[i], kind % 5 == MTT_FP16, MTT__NEAREST, &weight, &rest);
            a[i] = mtt__join_weight(weight, rest, kind % 5 == MTT_FP16);
        }
        check(memcmp(a, b, r.weights * sizeof(float)) == 0 && batches.cursor == 20,
              "%s resumed as %s has other weights", PRECISIONS[kind / 5 % 5], PRECISIONS[kind % 5]);
        int32_t ids[32], targets[32];
        mtt_step_info info = {.loss = 0};
        check(!mtt_batches_next(&batches, ids, targets) && !mtt_train_step(to, ids, targets, &info) &&
                  info.step == 6 && fabs(info.loss / losses[4] - 1) < 0.2,
              "%s resumed as %s goes on at a loss of %g after %g: %s", PRECISIONS[kind / 5 % 5],
              PRECISIONS[kind % 5], info.loss, losses[4], env.error);
        free(a);
        free(b);
        mtt_trainer_destroy(from);
        mtt_trainer_destroy(to);
    }
}

static void expect_refusal(const setup *s, const char *path, mtt_status wanted, const char *name,
                           const char *what)
{
    reference r = reference_of(s);
    mtt_trainer *trainer = open_trainer(s);
    float *before = parameters_of(trainer, &r);
    env.error[0] = 0;
    mtt_status status = mtt_resume(trainer, path, NULL);
    check(status && (wanted == MTT_OK || status == wanted), "%s: resume returns %s", what,
          mtt_status_string(status));
    check(strstr(env.error, name) != NULL, "%s: \"%s\" does not name %s", what, env.error, name);
    float *after = parameters_of(trainer, &r);
    check(memcmp(before, after, r.weights * sizeof(float)) == 0 && mtt_trainer_step(trainer) == 0,
          "%s: a refused file changed the trainer", what);
    free(before);
    free(after);
    mtt_trainer_destroy(trainer);
}

static void mismatches(void)
{
    setup s = checkpoint_setup(0);
    double losses[10];
    train(&s, 2, losses, NULL);
    mtt_trainer *trainer = open_trainer(&s);
    check(!mtt_save(trainer, in("model"), NULL), "a checkpoint could not be saved: %s", env.error);
    mtt_trainer_destroy(trainer);
    for (int field = 0; field < 18; field++) {
        static const char *const NAMES[] = {"layers",       "heads",     "d_model",      "d_ff",    "vocab",
                                            "max_seq",      "positions", "tied_head",    "no_head_bias",
                                            "heads_kv",     "d_head",    "rotary_theta", "rotary_interleaved",
                                            "qk_norm",      "rotary_factor", "rotary_low", "rotary_high",
                                            "rotary_original"};
        setup other = s, learned = s;
        if (field == 0) other.model.layers = 3;
        if (field == 1) other.model.heads = 1;
        if (field == 2) other.model.d_model = 32;
        if (field == 3) other.model.d_ff = 40;
        if (field == 4) other.model.vocab = 281;
        if (field == 6) other.model.positions = MTT_POSITIONS_LEARNED;
        if (field == 7) other.model.tied_head = 1;
        if (field == 8) other.model.no_head_bias = 1;
        if (field == 9) other.model.heads_kv = 1;
        if (field == 10) other.model.d_head = 24;
        if (field == 11) other.model.rotary_theta = 10000.5f;
        if (field == 12) other.model.rotary_interleaved = 1;
        if (field == 13) other.model.qk_norm = 1;
        if (field == 14) other.model.rotary_factor = 2;
        if (field == 15) other.model.rotary_low = 2;
        if (field == 16) other.model.rotary_high = 5;
        if (field == 17) other.model.rotary_original = 4096;
        if (field == 5) { /* of learned positions, whose table it sizes */
            learned.model.positions = other.model.positions = MTT_POSITIONS_LEARNED;
            other.model.max_seq = 13;
            trainer = open_trainer(&learned);
            check(!mtt_save(trainer, in("learned"), NULL), "a checkpoint could not be saved: %s", env.error);
            mtt_trainer_destroy(trainer);
        }
        expect_refusal(&other, in(field == 5 ? "learned" : "model"), MTT_E_MISMATCH, NAMES[field],
                       NAMES[field]);
        if (field < 9) continue;
        trainer = open_trainer(&other); /* and the other way around; with itself it goes on */
        check(!mtt_save(trainer, in("other"), NULL), "a checkpoint could not be saved: %s", env.error);
        check(!mtt_resume(trainer, in("other"), NULL), "%s: %s", NAMES[field], env.error);
        mtt_trainer_destroy(trainer);
        expect_refusal(&s, in("other"), MTT_E_MISMATCH, NAMES[field], NAMES[field]);
    }
    for (int field = 0; field < 5; field++) { /* written where they are not the default */
        static const char *const NAMES[] = {"norm", "norm_eps", "norm_place", "mlp", "no_biases"};
        setup other = s;
        if (field == 0) other.model.norm = MTT_NORM_RMS;
        if (field == 1) other.model.norm_eps = 1e-6f;
        if (field == 2) other.model.norm_place = MTT_NORM_POST;
        if (field == 3) other.model.mlp = MTT_MLP_RELU2;
        if (field == 4) other.model.no_biases = other.model.no_head_bias = 1;
        setup twin = other;
        if (field == 4) other.model.no_biases = 0; /* the head's alone */
        else other.model = s.model;
        expect_refusal(&twin, in("model"), MTT_E_MISMATCH, NAMES[field], NAMES[field]);
        trainer = open_trainer(&twin);
        check(!mtt_save(trainer, in("option"), NULL) && !mtt_resume(trainer, in("option"), NULL),
              "a checkpoint with %s does not go on: %s", NAMES[field], env.error);
        mtt_trainer_destroy(trainer);
        expect_refusal(&other, in("option"), MTT_E_MISMATCH, NAMES[field], NAMES[field]);
    }
    size_t bytes = 0;
    char *data = read_file(in("model"), &bytes);
    for (int i = 0; i < 40; i++) { /* one byte flipped: half of them anywhere, the others near the ends */
        size_t at = i < 20   ? (size_t)random_bits() % bytes
                    : i < 30 ? bytes - 1 - (size_t)i
                             : (size_t)(i - 30) * 37;
        char *copy = malloc(bytes), what[60];
        memcpy(copy, data, bytes);
        copy[at] ^= (char)(1 << below(8));
        write_file(in("damaged"), copy, bytes);
        snprintf(what, sizeof(what), "byte %zu of %zu flipped", at, bytes);
        expect_refusal(&s, in("damaged"), MTT_OK, "", what);
        free(copy);
    }
    size_t cuts[] = {0, 7, 8, 100, bytes / 2, bytes - 1};
    for (int i = 0; i < 6; i++) {
        char what[60];
        write_file(in("damaged"), data, cuts[i]);
        snprintf(what, sizeof(what), "cut to %zu of %zu bytes", cuts[i], bytes);
        expect_refusal(&s, in("damaged"), MTT_E_FORMAT, "", what);
    }
    expect_refusal(&s, in("absent"), MTT_E_FILE, "absent", "an absent file");
    free(data);
}

/* ----------------------------------------------------------------------------------- training in FP8 ---- */

/* Steps on random tokens. Before step 2 some weights grow, so that their scales are too small once. Writes
   losses, the values that were clipped, and the final parameters. */
static void train_eight(const setup *s, int steps, double *losses, int64_t *clipped, float *final)
{
    reference r = reference_of(s);
    mtt_trainer *trainer = open_trainer(s);
    int32_t tokens[64], targets[64];
    mtt_step_info info;
    random_state = 78;
    for (int i = 0; i < steps; i++) {
        random_tokens(s, s->policy.accumulate, 0, tokens, targets);
        if (i == 2) {
            const parameter *p = r.parameter + r.layer_first + LAYER_PARAMETERS; /* of the second layer */
            read_all(trainer, &r, mtt_parameter_get, final);
            for (size_t k = 0; k < p[FC_W].count; k += 3) final[p[FC_W].first + k] *= 16;
            for (size_t k = 0; k < p[LN1_W].count; k += 2) final[p[LN1_W].first + k] *= 16;
            write_all(trainer, &r, final);
        }
        check(!mtt_train_step(trainer, tokens, targets, &info), "step %d in FP8 failed: %s", i, env.error);
        losses[i] = info.loss;
        clipped[i] = info.clipped;
    }
    read_all(trainer, &r, mtt_parameter_get, final);
    mtt_trainer_destroy(trainer);
}

/* FP8 with every other choice: no way to recompute, no number of threads and no second run changes a bit, nor
   the count of clipped values. */
static void eight_bits_agree(void)
{
    enum { STEPS = 4, RUNS = WAYS + 2 };
    int recomputed = 0;
    for (int kind = 0; kind < 36; kind += each()) {
        static const int BATCH[][2] = {{3, 5}, {1, 1}, {2, 8}, {1, 11}};
        setup s = small_setup();
        double losses[RUNS][STEPS];
        int64_t clipped[RUNS][STEPS];
        s.batch = BATCH[kind % 4][0], s.seq_len = BATCH[kind % 4][1];
        s.model.layers = 3;
        s.model.d_ff = 48;
        s.model.vocab = kind % 5 ? 37 : 131;
        s.model.tied_head = kind / 2 % 2;
        s.model.no_head_bias = kind / 3 % 2;
        s.model.dropout = kind % 3 == 1 ? 0.1f : 0;
        s.policy = (mtt_policy){.precision = MTT_FP8,
                                .fp8_products = (mtt_fp8_products)(kind / 4 % 2),
                                .attention = (mtt_attention)(kind / 12 % 2),
                                .window = kind % 7 == 3 ? 3 : 0,
                                .loss = (mtt_loss)(1 + kind / 6 % 2),
                                .loss_chunk_rows = kind % 3 ? 1 : 20,
                                .state = kind % 5 == 2 ? MTT_STATE_COMPACT : MTT_STATE_FULL,
                                .accumulate = kind / 5 % 2 ? 3 : 1};
        reference r = reference_of(&s);
        float *first = malloc(r.weights * sizeof(float)), *other = malloc(r.weights * sizeof(float));
        for (int run = 0; run < RUNS; run++) {
            mtt_plan_report report = {.ops = 0};
            set_recompute(&s, run % WAYS);
            use_threads(run == WAYS ? 3 : 1);
            check(!mtt_plan(&env, &s.model, &s.policy, s.batch, s.seq_len, &report), "a plan failed: %s",
                  env.error);
            recomputed += report.recompute_flops > 0;
            train_eight(&s, STEPS, losses[run], clipped[run], run ? other : first);
            check(memcmp(losses[0], losses[run], sizeof(losses[0])) == 0 &&
                      memcmp(clipped[0], clipped[run], sizeof(clipped[0])) == 0 &&
                      (!run || memcmp(first, other, r.weights * sizeof(float)) == 0),
                  "FP8, case %d, recompute %s%s: other bits than without", kind, RECOMPUTES[run % WAYS],
                  run == WAYS ? ", 3 threads" : "");
        }
        use_threads(1);
        check(clipped[0][2] > 0 && clipped[0][3] < clipped[0][2],
              "FP8, case %d: %d values are clipped after weights grew, then %d", kind, (int)clipped[0][2],
              (int)clipped[0][3]);
        free(first);
        free(other);
    }
    check(recomputed > 0, "nothing was recomputed");
}

/* Losses of a task that can be learned, against FP32: FP8's are off by at most 16 times BF16's error, since
   units of e4m3 are 16 times as large as BF16's. */
static void eight_bits_learn(void)
{
    enum { STEPS = 200, LAST = 50, KINDS = 4 };
    double losses[KINDS][STEPS], gap[KINDS] = {0}, mean[KINDS] = {0};
    for (int kind = 0; kind < KINDS; kind++) {
        setup s = task(kind ? kind > 1 ? MTT_FP8 : MTT_BF16 : MTT_FP32);
        s.policy.fp8_products = (mtt_fp8_products)(kind > 1 ? kind - 2 : 0);
        s.optim.lr = 3e-3f;
        learn_task(&s, STEPS, kind < 2 ? 1 : 64, losses[kind]);
        for (int step = STEPS - LAST; step < STEPS; step++) {
            mean[kind] += losses[kind][step] / LAST;
            gap[kind] += fabs(losses[kind][step] - losses[0][step]) / LAST;
        }
    }
    printf("FP8: mean losses %.4f, %.4f, FP32's %.4f; mean gaps %.1e, %.1e, BF16's %.1e\n", mean[2], mean[3],
           mean[0], gap[2], gap[3], gap[1]);
    for (int kind = 2; kind < KINDS; kind++)
        check(gap[kind] <= 16 * gap[1] && mean[kind] < 0.6 * log(32),
              "FP8 of products %d: mean loss %g, FP32's %g, mean gap %g, BF16's %g", kind - 2, mean[kind],
              mean[0], gap[kind], gap[1]);
}

/* A backend that notes the scales as the forward passes left them, before the step makes the next ones. */
static mtt_scale noted[64];
static int note_count;

static mtt_status noting_run(void *context, const mtt_op *ops, int count)
{
    const mtt_op *last = &ops[count - 1];
    mtt_status status;
    if (last->kind != MTT_OP_rescale) return mtt_cpu_backend()->run(context, ops, count);
    status = count > 1 ? mtt_cpu_backend()->run(context, ops, count - 1) : MTT_OK;
    memcpy(noted, MTT_OPERANDS_OF(rescale, last)->scales->data, (size_t)note_count * sizeof(noted[0]));
    return status ? status : mtt_cpu_backend()->run(context, last, 1);
}

/* The largest power of two that leaves half of 448. */
static double scale_for(double largest)
{
    int exponent;
    frexp(224 / largest, &exponent);
    return ldexp(1, exponent - 1);
}

/* Of a tensor of 16-bit weights, largest or more than `limit`. */
static double largest_weight(const float *w, const parameter *p, double limit, int64_t *above)
{
    double largest = 0;
    for (size_t i = p->first; i < p->first + p->count; i++) {
        double x = fabs(value_of_bits(mtt__to_bf16(w[i]), 8, 7));
        largest = fmax(largest, x);
        if (above) *above += x > limit;
    }
    return largest;
}

/* The scales before the first step are those of its inputs, which a naive model in double measures; each step
   then makes them of the largest values that it rounded, weights' to the bit, and counts what it clipped. */
static void eight_bit_scales(void)
{
    static const int MATRICES[] = {ATTN_W, PROJ_W, FC_W, OUT_W};
    for (int kind = 0; kind < 12; kind++) {
        setup s = small_setup();
        int32_t tokens[48], targets[48];
        double found[9] = {0};
        s.batch = 3, s.seq_len = 5;
        s.policy.precision = MTT_FP8;
        s.policy.fp8_products = (mtt_fp8_products)(kind % 2);
        s.policy.accumulate = kind / 2 % 2 ? 3 : 1;
        s.policy.recompute = kind / 6 ? MTT_RECOMPUTE_LAYER : MTT_RECOMPUTE_NONE;
        s.model.tied_head = kind / 4 % 2;
        reference r = reference_of(&s);
        const parameter *in_head = s.model.tied_head ? r.parameter : r.parameter + r.head_first + 2;
        mtt_trainer *trainer = NULL;
        mtt_backend backend = *mtt_cpu_backend();
        mtt_step_info info;
        float *w = random_weights(&r);
        double *wide = malloc(r.weights * sizeof(double)),
               *stream = malloc(stream_count(&r) * sizeof(double)), *logits = new_logits(&r);
        int heads = s.policy.fp8_products == MTT_FP8_ALL, scales = 8 * s.model.layers + 3;
        new_case();
        note_count = scales;
        backend.run = noting_run;
        mtt_status made = mtt_trainer_create(&env, &s.model, &s.policy, &s.optim, &backend, s.batch,
                                             s.seq_len, &trainer);
        check(!made, "a trainer could not be made: %s", env.error);
        write_all(trainer, &r, w);
        random_tokens(&s, s.policy.accumulate, 0, tokens, targets);
        for (size_t i = 0; i < r.weights; i++) wide[i] = w[i];
        micro_batch mb = {tokens, targets, make_masks(&r, 0, 0, 0)};
        peaks = found;
        forward(&r, wide, &mb, stream, logits);
        peaks = NULL;
        check(!mtt__measure_scales(trainer, tokens, targets, 15), "no scales: %s", env.error);
        const mtt_scale *scale = scales_of(trainer);
        for (int i = 0; i < 8 * s.model.layers + 2 * heads; i++) {
            int layer = i / 8, is_head = layer == s.model.layers, weight = is_head ? i % 8 : i % 8 >= 4;
            const parameter *p =
                is_head ? in_head : r.parameter + r.layer_first + layer * LAYER_PARAMETERS + MATRICES[i % 4];
            double largest =
                weight ? largest_weight(w, p, 0, NULL) : found[is_head ? 4 * layer : 4 * layer + i % 4];
            double fills = scale[i].scale * largest;
            /* 16 and 8 bits before it move the largest activation, by up to a tenth */
            check(weight ? scale[i].scale == scale_for(largest) : fills > 112 / 1.1 && fills < 224 * 1.1,
                  "products %d: the first scale %d is %g, the largest value %g", kind % 2, i,
                  (double)scale[i].scale, largest);
        }
        for (int step = 0; step < 4; step++) {
            int64_t clipped = 0, too_large = 0;
            const parameter *p = r.parameter + r.layer_first + FC_W;
            mtt_scale before[64];
            read_all(trainer, &r, mtt_parameter_get, w);
            for (size_t i = 0; step == 2 && i < p->count; i += 5) w[p->first + i] *= 64;
            write_all(trainer, &r, w);
            memcpy(before, scale, (size_t)scales * sizeof(*scale));
            check(!mtt_train_step(trainer, tokens, targets, &info), "a step failed: %s", env.error);
            for (int i = 0; i < scales; i++) {
                double next =
                    noted[i].largest ? scale_for(mtt__bits_float(noted[i].largest)) : noted[i].scale;
                check(scale[i].scale == next && scale[i].inverse == 1 / next && !scale[i].largest &&
                          !scale[i].clipped,
                      "step %d: scale %d is %g after a largest value of %g", step, i, (double)scale[i].scale,
                      (double)mtt__bits_float(noted[i].largest));
                check(noted[i].largest || i >= scales - (heads ? 1 : 3),
                      "step %d records nothing of tensor %d", step, i);
                clipped += noted[i].clipped;
            }
            for (int i = 0; i < 4 * s.model.layers; i++) {
                const parameter *q = r.parameter + r.layer_first + i / 4 * LAYER_PARAMETERS + MATRICES[i % 4];
                check(mtt__bits_float(noted[i / 4 * 8 + 4 + i % 4].largest) == largest_weight(w, q, 0, NULL),
                      "step %d: the largest of %s is recorded as %g", step, q->name,
                      (double)mtt__bits_float(noted[i / 4 * 8 + 4 + i % 4].largest));
            }
            largest_weight(w, p, 448 / before[6].scale, &too_large);
            check(info.clipped == clipped && noted[6].clipped == too_large * s.policy.accumulate &&
                      (too_large > 0) == (step == 2),
                  "step %d: %d values are clipped, %d of %d weights, %d are reported", step, (int)clipped,
                  (int)noted[6].clipped, (int)too_large, (int)info.clipped);
            double steepest = (double)info.loss_scale / (double)info.targets;
            check(!heads || scale[scales - 1].scale == ldexp(1, (int)floor(log2(32768 / steepest))),
                  "gradients of logits have a scale of %g", (double)scale[scales - 1].scale);
        }
        mtt_trainer_destroy(trainer);
        free(w), free(wide), free(stream), free(logits), free(mb.masks);
    }
}

/* Evaluations and logits, before the first step and between steps, change neither weights nor scales. */
static void eight_bits_undisturbed(void)
{
    for (int kind = 0; kind < 6; kind++) {
        setup s = small_setup();
        int32_t tokens[32], targets[32];
        float logits[32];
        s.model.dropout = 0.1f;
        s.policy.precision = MTT_FP8;
        s.policy.fp8_products = (mtt_fp8_products)(kind % 2);
        s.policy.recompute = kind / 3 ? MTT_RECOMPUTE_SEGMENTS : MTT_RECOMPUTE_NONE;
        reference r = reference_of(&s);
        mtt_trainer *trainer = open_trainer(&s), *twin = open_trainer(&s);
        size_t bytes = (size_t)(8 * s.model.layers + 3) * sizeof(mtt_scale);
        for (int step = 0; step < 3; step++) {
            mtt_step_info info[2];
            random_tokens(&s, 2, 2, tokens, targets);
            check(!mtt_next_logits(trainer, tokens, 1 + 4 * step, logits) &&
                      !mtt_evaluate(trainer, tokens + 16, tokens, &info[0]) &&
                      !mtt_next_logits(trainer, tokens + 3, 11, logits),
                  "no logits or evaluation: %s", env.error);
            check(!mtt_train_step(trainer, tokens, targets, &info[0]) &&
                      !mtt_train_step(twin, tokens, targets, &info[1]),
                  "a step failed: %s", env.error);
            check(info[0].loss == info[1].loss && info[0].grad_norm == info[1].grad_norm &&
                      info[0].clipped == info[1].clipped,
                  "logits before step %d disturb it: loss %.9g, not %.9g", step, info[0].loss, info[1].loss);
            check(memcmp(scales_of(trainer), scales_of(twin), bytes) == 0,
                  "logits before step %d disturb scales", step);
        }
        float *a = parameters_of(trainer, &r), *b = parameters_of(twin, &r);
        check(memcmp(a, b, r.weights * sizeof(float)) == 0, "logits disturb the weights");
        free(a), free(b);
        mtt_trainer_destroy(trainer);
        mtt_trainer_destroy(twin);
    }
}

/* Forged scales are refused. A checkpoint of another precision has none: FP8 then measures them, and takes
   the loss scale of a new run if that precision had none. A loss scale of 1 is kept, too. */
static void eight_bit_checkpoints(void)
{
    static const struct {
        int at;
        float value;
    } FORGED[] = {{0, 0},   {3, 0},        {1, -4},       {5, 3},        {2, NAN},
                  {0, NAN}, {7, INFINITY}, {4, 0x1p100f}, {6, 0x1p-100f}};
    setup s = small_setup(), other = s;
    int32_t tokens[32], targets[32];
    mtt_step_info info;
    mtt__checkpoint c;
    s.policy.precision = MTT_FP8;
    mtt_trainer *trainer = open_trainer(&s), *to;
    random_tokens(&s, 2, 0, tokens, targets);
    check(!mtt_train_step(trainer, tokens, targets, NULL), "a step failed: %s", env.error);
    for (size_t i = 0; i < MTT__LENGTH(FORGED); i++) {
        mtt_scale *scale = scales_of(trainer) + FORGED[i].at, good = *scale;
        char what[60];
        scale->scale = FORGED[i].value;
        check(!mtt_save(trainer, in("forged"), NULL), "a checkpoint could not be saved: %s", env.error);
        *scale = good;
        snprintf(what, sizeof(what), "scale %d is %g", FORGED[i].at, (double)FORGED[i].value);
        expect_refusal(&s, in("forged"), MTT_E_FORMAT, "fp8.scales", what);
    }
    check(!mtt__checkpoint_init(&c, trainer, NULL, 0), "no checkpoint");
    c.tensors[c.count - 1].shape[0]--;
    check(!mtt__checkpoint_write(&c, in("forged"), mtt__checkpoint_read, &c),
          "a checkpoint could not be saved: %s", env.error);
    mtt__free(&env, c.tensors);
    expect_refusal(&s, in("forged"), MTT_OK, "", "a scale is missing");

    for (int precision = MTT_FP32; precision <= MTT_FP8; precision++) { /* through another one and back */
        float scale = counters_of(trainer)->loss_scale;
        int scaled = precision >= MTT_FP16;
        other.policy.precision = (mtt_precision)precision;
        check(!mtt_save(trainer, in("eight"), NULL), "a checkpoint could not be saved: %s", env.error);
        to = open_trainer(&other);
        check(!mtt_resume(to, in("eight"), NULL) && counters_of(to)->loss_scale == (scaled ? scale : 1),
              "FP8 as %s: a loss scale of %g, %s", PRECISIONS[precision], (double)counters_of(to)->loss_scale,
              env.error);
        if (precision == MTT_FP16) counters_of(to)->loss_scale = 1; /* after many overflows */
        check(!mtt_save(to, in("other"), NULL), "a checkpoint could not be saved: %s", env.error);
        check(!mtt_resume(to, in("other"), NULL) &&
                  counters_of(to)->loss_scale == (precision == MTT_FP8 ? scale : 1),
              "%s goes on with a loss scale of %g: %s", PRECISIONS[precision],
              (double)counters_of(to)->loss_scale, env.error);
        mtt_trainer_destroy(to);
        to = open_trainer(&s);
        check(!mtt_train_step(to, targets, tokens, NULL) && !mtt_resume(to, in("other"), NULL) &&
                  counters_of(to)->loss_scale == (precision == MTT_FP16 ? 1 : 128), /* 65536 * 32 / 16384 */
              "%s as FP8: a loss scale of %g, %s", PRECISIONS[precision], (double)counters_of(to)->loss_scale,
              env.error);
        check(to->measured == (precision == MTT_FP8), "%s as FP8: scales are measured: %d",
              PRECISIONS[precision], to->measured);
        check(!mtt_train_step(to, tokens, targets, &info) && !info.skipped && !info.clipped,
              "%s as FP8: %d values are clipped: %s", PRECISIONS[precision], (int)info.clipped, env.error);
        mtt_trainer_destroy(to);
    }
    mtt_trainer_destroy(trainer);
}

static void eight_bits(void)
{
    eight_bit_scales();
    eight_bits_undisturbed();
    eight_bit_checkpoints();
    eight_bits_learn();
    eight_bits_agree();
}

/* -------------------------------------------------------------------------------- failing allocation ---- */

typedef struct ledger {
    long calls, live, fail_at, persistent; /* fail_at 0: never */
    size_t bytes;
} ledger;

static void *ledger_alloc(void *user, size_t bytes)
{
    ledger *l = user;
    l->calls++;
    if (l->fail_at && (l->persistent ? l->calls >= l->fail_at : l->calls == l->fail_at)) return NULL;
    size_t *block = malloc(bytes + 16);
    if (!block) return NULL;
    *block = bytes;
    l->live++;
    l->bytes += bytes;
    return block + 2;
}

static void ledger_free(void *user, void *block)
{
    ledger *l = user;
    if (!block) return;
    l->live--;
    l->bytes -= ((size_t *)block)[-2];
    free((size_t *)block - 2);
}

static mtt_status life_of_a_trainer(mtt_env *e, const setup *s, const int32_t *tokens, const int32_t *targets,
                                    const char **stage)
{
    mtt_trainer *trainer = NULL;
    mtt_step_info info;
    float logits[32];
    *stage = "create";
    mtt_status status = mtt_trainer_create(e, &s->model, &s->policy, &s->optim, mtt_cpu_backend(), s->batch,
                                           s->seq_len, &trainer);
    if (!status) *stage = "first logits", status = mtt_next_logits(trainer, tokens, 3, logits);
    if (!status) *stage = "step", status = mtt_train_step(trainer, tokens, targets, NULL);
    if (!status) *stage = "evaluate", status = mtt_evaluate(trainer, tokens, targets, &info);
    if (!status) *stage = "logits", status = mtt_next_logits(trainer, tokens, 3, logits);
    if (!status) *stage = "save", status = mtt_save(trainer, in("life"), NULL);
    if (!status) *stage = "resume", status = mtt_resume(trainer, in("life"), NULL);
    mtt_trainer_destroy(trainer);
    return status;
}

static void failing_allocations(void)
{
    ledger book = {0, 0, 0, 0, 0};
    mtt_env counted = {.alloc = ledger_alloc, .free = ledger_free, .user = &book};
    setup s = small_setup();
    int32_t tokens[32], targets[32];
    const char *stage;
    size_t bytes = 0, now;
    random_tokens(&s, 2, 0, tokens, targets);
    s.policy.recompute = MTT_RECOMPUTE_SELECTIVE;
    s.policy.precision = MTT_FP8; /* before the first step, logits measure scales */
    mtt_status status = life_of_a_trainer(&counted, &s, tokens, targets, &stage);
    check(!status && book.live == 0, "%s: %s, %ld blocks left", stage, counted.error, book.live);
    long total = book.calls;
    char *old = read_file(in("life"), &bytes);
    int files = count_files("");
    for (int persistent = 0; persistent < 2; persistent++)
        for (long n = 1; n <= total; n++) {
            book = (ledger){0, 0, n, persistent, 0};
            new_case();
            counted.error[0] = 0;
            status = life_of_a_trainer(&counted, &s, tokens, targets, &stage);
            check((status == MTT_E_MEMORY || status == MTT_E_BUDGET) && counted.error[0],
                  "allocation %ld of %ld failed (%s): %s, \"%s\"", n, total, stage, mtt_status_string(status),
                  counted.error);
            check(book.live == 0, "allocation %ld of %ld failed (%s): %ld blocks are left", n, total, stage,
                  book.live);
            char *kept = read_file(in("life"), &now);
            check(kept && now == bytes && memcmp(kept, old, bytes) == 0,
                  "allocation %ld failed (%s): the old checkpoint is gone", n, stage);
            check(count_files("") == files, "allocation %ld failed (%s): a file is left over", n, stage);
            free(kept);
        }
    free(old);

    /* In the steady state nothing is taken from the host, and all of it comes back. */
    mtt_trainer *trainer = NULL;
    book = (ledger){0, 0, 0, 0, 0};
    for (int i = 0; i < 20; i++) {
        mtt_trainer_create(&counted, &s.model, &s.policy, &s.optim, mtt_cpu_backend(), s.batch, s.seq_len,
                           &trainer);
        mtt_train_step(trainer, tokens, targets, NULL);
        size_t live = book.bytes;
        for (int k = 0; k < 20; k++) mtt_train_step(trainer, tokens, targets, NULL);
        check(book.bytes == live, "20 steps took %ld bytes from the host", (long)book.bytes - (long)live);
        mtt_trainer_destroy(trainer);
        check(book.live == 0, "%ld blocks are left", book.live);
    }
    printf("out of memory: clean refusal when any of %ld allocations fails\n", total);
}

/* --------------------------------------------------------------------------------------------- speed ---- */

static int speed(int batch, int seq_len, int steps)
{
    size_t count = (size_t)batch * (size_t)seq_len;
    int32_t *tokens = malloc(2 * count * sizeof(int32_t));
    for (size_t i = 0; i < 2 * count; i++) tokens[i] = below(50257);
    for (int kind = 0; kind < 3; kind++) {
        setup s = {.model = {.layers = 4, .heads = 8, .d_model = 256, .d_ff = 1024, .vocab = 50257},
                   .policy = {.attention = kind ? MTT_ATTENTION_FLASH : MTT_ATTENTION_PLAIN,
                              .loss = kind == 2 ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL},
                   .batch = batch, .seq_len = seq_len};
        mtt_trainer *trainer = open_trainer(&s);
        mtt_step_info info = {.ms = 0};
        double best = 1e300, sum = 0;
        for (int i = 0; i < steps; i++) {
            if (mtt_train_step(trainer, tokens, tokens + count, &info)) return puts(env.error), 1;
            best = fmin(best, info.ms);
            sum += info.ms;
        }
        printf("%s attention, %s loss: %.1f ms a step (best %.1f), %.0f tokens/s, %.1f MiB, loss %.4f\n",
               kind ? "flash" : "plain", kind == 2 ? "chunked" : "full", sum / steps, best,
               (double)count * 1000 * steps / sum, (double)info.arena_bytes / 1048576, info.loss);
        mtt_trainer_destroy(trainer);
    }
    free(tokens);
    return 0;
}

/* A test's random numbers do not depend on the tests before it. */
static void timed(const char *name, void (*test)(void))
{
    struct timespec from, to;
    random_state = 1;
    clock_gettime(CLOCK_MONOTONIC, &from);
    test();
    clock_gettime(CLOCK_MONOTONIC, &to);
    if (getenv("TIMES"))
        printf("%-16s %6.2f s\n", name,
               (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec));
}

static void quality_and_text(void)
{
    mtt_tokens *tokens = make_tokens(), *valid = NULL;
    mtt_tokenizer *tokenizer = NULL;
    check(!mtt_tokens_open(&env, in("words.valid.tokens"), &valid), "no token file: %s", env.error);
    check(!mtt_tokenizer_load(&env, in("words.tokenizer.json"), NULL, &tokenizer), "no tokenizer: %s",
          env.error);
    if (valid && tokenizer) quality(valid, tokenizer);
    if (tokens && tokenizer) generation(tokens, tokenizer);
    mtt_tokenizer_destroy(tokenizer);
    mtt_tokens_close(valid);
    mtt_tokens_close(tokens);
}

static void checkpoints(void)
{
    mtt_tokens *tokens = make_tokens();
    if (!tokens) return;
    resume_bits(tokens);
    resume_elsewhere(tokens);
    mismatches();
    mtt_tokens_close(tokens);
}

/* The cheapest first, since a run may end at the first failure. Where they run: in a subset that the command
   line names; not with a BLAS; not in quick mode. */
enum { OPTIONS = 1, PRODUCTS = 2, NO_BLAS = 4, FULL = 8 };

static const struct { const char *name; void (*test)(void); int where; } TESTS[] = {
    {"conversions", conversions, 0},
    {"8 bits", eight_conversions, 0},
    {"8 bits at random", eight_by_bytes, 0},
    {"8-bit operations", eight_operations, 0},
    {"compact codes", compact_codes, 0},
    {"formulas", formulas, 0},
    {"forgotten activation", forgotten_activation, 0},
    {"odd patterns", odd_patterns, OPTIONS},
    {"products", products, PRODUCTS},
    {"threads", product_threads, PRODUCTS},
    {"learning rates", learning_rates, 0},
    {"optimizer", optimizer, 0},
    {"groups", groups, 0},
    {"compact update", compact_update, 0},
    {"uneven targets", uneven_targets, 0},
    {"single key", single_key, 0},
    {"accumulation", accumulation, 0},
    {"next logits", next_logits, PRODUCTS},
    {"misuse", misuse, 0},
    {"least numbers", least_numbers, 0},
    {"long parameters", long_parameters, 0},
    {"times", times, 0},
    {"profiled", profiled, 0},
    {"sampling", sampling, 0},
    {"nucleus", nucleus, 0},
    {"evaluation", evaluation, 0},
    {"quality, text", quality_and_text, 0},
    {"full device", full_device, 0},
    {"device bytes", device_bytes, 0},
    {"large scores", large_scores, 0},
    {"split", split_batches, 0},
    {"overflow", overflow, 0},
    {"not finite", not_finite, 0},
    {"unread failure", unread_failure, 0},
    {"overfit", overfit, 0},
    {"allocations", failing_allocations, 0},
    {"attention", attention_kinds, 0},
    {"dropout probabilities", dropout_probabilities, 0},
    {"angles", angles, PRODUCTS},
    {"gradients", gradients, PRODUCTS},
    {"model options", model_options, OPTIONS | NO_BLAS},
    {"attention options", attention_options, NO_BLAS},
    {"frozen", frozen_parameters, OPTIONS | NO_BLAS},
    {"frozen misuse", frozen_misuse, OPTIONS | NO_BLAS},
    {"frozen spaces", frozen_spaces, OPTIONS | NO_BLAS},
    {"early updates", early_updates, OPTIONS | NO_BLAS},
    {"early misuse", early_misuse, OPTIONS | NO_BLAS},
    {"adapters", adapters, OPTIONS | NO_BLAS},
    {"new adapters", new_adapters, OPTIONS | NO_BLAS},
    {"checkpoints", checkpoints, 0},
    {"FP8", eight_bits, 0},
    {"repeatable", repeatable, 0},
    {"recompute", recompute_bits, 0},
    {"peaks", recompute_peaks, 0},
    {"host", activations_on_the_host, 0},
    {"compact loss", compact_loss, FULL},
};

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    int subset = !strcmp(mode, "options") ? OPTIONS : !strcmp(mode, "products") ? PRODUCTS : 0;
    if (!strcmp(mode, "speed"))
        return speed(argc > 2 ? atoi(argv[2]) : 4, argc > 3 ? atoi(argv[3]) : 256,
                     argc > 4 ? atoi(argv[4]) : 5);
    quick = BLAS || !strcmp(mode, "quick");
    use_threads(1);
    if (!open_folder()) return finish();
    for (size_t i = 0; i < MTT__LENGTH(TESTS); i++) {
        int where = TESTS[i].where, left_out = (BLAS ? NO_BLAS : 0) | (quick ? FULL : 0);
        if (subset ? where & subset : !(where & left_out)) timed(TESTS[i].name, TESTS[i].test);
    }
    close_folder();
    return finish();
}
