/* test_cuda.c - the CUDA backend against the textbook and against the CPU, operation by operation on the same
   operands; whole models; bits; bytes. Links mtt_kernels.o. Without a GPU it says so and passes.

   Every operation of random schedules runs on the device, on the CPU, and twice from the textbook: once all
   in double, which is the truth, and once as a simple reference in the policy's precision. Device and CPU
   may each have twice the error of the plain one, in the mean and at worst, and a few roundings of the sum of
   the terms' magnitudes (slack()). Operations that only move or drop elements must give the CPU's bits. Each
   kind is tried over at least 500 shapes, counted and asserted.

   Under FP8, operands in 8 bits are exact. A result in 8 bits is the rounding of the textbook's value, or of
   one as near to it as FP32 arithmetic or a 16-bit intermediate result allows.

   test_cuda [SCALE]                        all of it, with SCALE times the random schedules and models
   test_cuda operations LARGE [SMALL]       only LARGE random schedules and SMALL small ones
   test_cuda attention                      only flash attention's tiles, slices and windows
   test_cuda fp8 [SCHEDULES]                only FP8, with so many random schedules (default 600)
   test_cuda failures                       only what happens around a failure; most of it needs
                                            tests/emulate.sh, where single calls can fail
   test_cuda quick TEST...                  one of the tests above with a tenth of their fixed cases, and
                                            without recomputation, ways to run and large products: for
                                            tests/emulate.sh
   test_cuda part I N [TEST...]             the I-th of N parts of that: the first has what needs the device
                                            alone, the others share out the rest, side by side if need be. All
                                            count the shapes of all. I = 0 runs nothing, but counts
   test_cuda textbook [SCHEDULES]           FP8's operations with the CPU in place of the device, no models:
                                            tests the CPU's and the textbook, needs no GPU */
#define MTT_CUDA
#define MTT_IMPLEMENTATION
#define MTT__EXTRA_PASSES(EMIT, RULE) RULE(away, sends_away)
#include "../mtt.h"
#include "away.h"
#include "test.h"
#include "techniques.h"

#include <cuda_runtime_api.h>
#include <malloc.h>

static mtt_env env;
static mtt_backend cuda;
static const char *const PRECISIONS[] = {"FP32", "TF32", "BF16", "FP16", "FP8"};
enum { PRECISION_COUNT = 5 };

/* ------------------------------------------------------------------------------------ parts of a run ---- */

static int part = 1, parts = 1;

/* Whether this part runs what counts the device's free memory, which nothing else may use meanwhile. */
static int alone(void) { return part == 1; }

/* Whether this part runs the next case. The first of several parts runs none. Each other one gets its share
   of every stretch of cases. */
static int mine(void)
{
    static uint32_t number;
    if (parts == 1) return part == 1;
    return (int)((uint64_t)(number++ * 2654435769u) * (uint32_t)(parts - 1) >> 32) == part - 2;
}

/* ---------------------------------------------------------------------------------------- randomness ---- */

/* Mean 0 and deviation 1, a triangle: cheap, since weights are many. */
static float noise(void)
{
    uint64_t z = random_bits();
    return ((float)(z >> 40) + (float)(z >> 16 & 0xffffff) - 16777215.0f) * (2.449490f / 16777216.0f);
}

/* 1 = the device multiplies in 8 bits: FP8 is tested. */
static int eight = 1;

/* 1 = the code is for compute capability 7.5, which has FP32 and FP16, and flash attention for heads of up to
   128. In tests these take the place of what it refuses. */
static int turing;

static int is_taken(int precision)
{
    if (precision == MTT_FP8) return eight;
    return !turing || precision == MTT_FP32 || precision == MTT_FP16;
}

static mtt_precision taken(int precision)
{
    if (is_taken(precision)) return (mtt_precision)precision;
    return precision == MTT_TF32 ? MTT_FP32 : MTT_FP16;
}

static mtt_attention flash_of(int d_head)
{
    return turing && d_head > 128 ? MTT_ATTENTION_PLAIN : MTT_ATTENTION_FLASH;
}

/* Half of the setups have other norms, MLPs or biases than the default, in all combinations. */
static void set_options(mtt_model_desc *m, int number)
{
    int way = number / 2 % 2 ? number / 4 : 0, mlps = mlp_forms();
    m->norm = (mtt_norm_form)(way % 2);
    m->norm_place = (mtt_norm_place)(way / 2 % 3);
    m->mlp = (mtt_mlp)((way + way / mlps) % mlps);
    m->no_biases = way / 6 % 2;
    m->norm_eps = way % 5 == 1 ? 0.01f : 0;
}

/* Awkward shapes first, each with what else may vary. Setups follow from their numbers alone. */
static setup random_setup(int number)
{
    static const int widths[][2] = {{8, 1},   {24, 3}, {256, 8},  {40, 1},  {64, 2},
                                    {512, 8}, {24, 1}, {768, 12}, {264, 3}, {1032, 43}};
    static const int lengths[] = {1, 31, 33, 97, 64, 8, 129}, vocabs[] = {7, 129, 1003, 256, 1, 2049};
    setup s;
    random_state = (uint64_t)number;
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
    s.policy.precision = taken(number % 4);
    s.policy.loss = below(2) ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL;
    s.policy.loss_chunk_rows = 1 + below(s.batch * s.seq_len + 5);
    s.policy.attention = below(2) ? MTT_ATTENTION_FLASH : MTT_ATTENTION_PLAIN;
    s.policy.window = below(2) ? 0 : 1 + below(s.seq_len + 2);
    s.policy.state = (mtt_state)(number / 4 % 2);
    s.policy.accumulate = 2;
    s.optim.lr = 1e-3f;
    s.optim.seed = 12345;
    s.optim.loss_scale = 1024;
    return s;
}

static const char *describe(const setup *s)
{
    static char text[256];
    snprintf(text, sizeof(text),
             "%s%s, C %d, H %d:%d of %d, positions %d%s%s, F %d, V %d, B %d, T %d, W %d, dropout %g, "
             "%s attention, %s loss, norm %d of place %d, MLP %d%s",
             PRECISIONS[s->policy.precision], s->policy.state ? " compact" : "", s->model.d_model,
             s->model.heads, s->model.heads_kv, s->model.d_head, s->model.positions,
             s->model.rotary_interleaved ? " interleaved" : "", s->model.qk_norm ? " norm" : "",
             s->model.d_ff, s->model.vocab, s->batch, s->seq_len, s->policy.window,
             (double)s->model.dropout, s->policy.attention ? "flash" : "plain",
             s->policy.loss == MTT_LOSS_CHUNKED ? "chunked" : "full", (int)s->model.norm,
             (int)s->model.norm_place, (int)s->model.mlp, s->model.no_biases ? ", no biases" : "");
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

/* ||a - b|| / ||b||; NaN where one of them is and the other is not. Pairs of NaN are what no operation has
   written. */
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

/* -------------------------------------------------------------------------------------- the textbook ---- */

/* Each operation once more, straight from its formula, on copies of its operands in double. `exact`: all of
   it in double, which is the truth. It also computes a magnitude for each result: the sum of the absolute
   values of the terms that were added, where a term that is itself a sum counts with its own magnitude.
   Otherwise: as a simple reference in the policy's precision computes it. Every sum is one FP32
   accumulator from the first term to the last; products under TF32, BF16 and FP16 are added as tensor cores
   add them; every result is FP32; what is stored in memory or enters a second product is rounded to the
   precision. */
typedef struct textbook {
    const mtt_op *op;
    double **values;               /* of the operands, in their order; NULL: absent, or not numbers */
    double **magnitudes;           /* of the outputs; exact alone */
    double **gradients, **weights; /* grad_norm and adamw: of each parameter */
    double **weight_magnitudes;
    double **given;                /* or NULL: of the outputs, as the device or the CPU has stored them. FP8's
                                      textbooks take intermediate results from there, and so judge each step
                                      of an operation by itself */
    mtt_precision precision;       /* of products and of what is stored; BF16 under FP8 */
    int exact;
    int eight, fast;               /* 1 = operands in 8 bits; and sums that never leave the tensor cores */
} textbook;

/* The operands' numbers by name: numbers_norm has double *x, *gain, *shift, *y, *stats. */
#undef MTT_OPERANDS
#define MTT_OPERANDS(...) double __VA_ARGS__;
#define NUMBERS(name, inputs, operands, flops, bytes, scratch)                                               \
    typedef struct numbers_##name { operands } numbers_##name;
MTT_OPS(NUMBERS)
#define VALUES(name, t) ((const numbers_##name *)(const void *)(t)->values)
#define MAGNITUDES(name, t) ((const numbers_##name *)(const void *)(t)->magnitudes)
#define GIVEN(name, t) ((const numbers_##name *)(const void *)(t)->given)

static int tf32_truncates; /* 1 = this device's products drop the last 13 bits of TF32 operands unrounded */
static int eight_bits = 13; /* bits behind the first one that sums of 8-bit products keep: see probe_eight */

static double fp32(const textbook *t, double x)
{
    return t->exact ? x : (double)(float)x;
}

/* As it is stored in memory, or enters a product of 16-bit operands. */
static double stored(const textbook *t, double x)
{
    if (t->exact) return x;
    if (t->precision == MTT_BF16) return (double)mtt__from_bf16(mtt__to_bf16((float)x));
    if (t->precision == MTT_FP16) return (double)mtt__from_fp16(mtt__to_fp16((float)x));
    return (double)(float)x;
}

/* 10 bits of mantissa, to nearest, ties to even; or cut off, if the device's plainest product does that. */
static float to_tf32(double x)
{
    uint32_t bits = mtt__float_bits((float)x);
    return mtt__bits_float((bits + (tf32_truncates ? 0 : 0xfffu + (bits >> 13 & 1u))) & ~0x1fffu);
}

/* The code of the 8-bit float nearest to x, ties to even, with the sign of x: a larger number has a larger
   code. e4m3 ends at 448, e5m2 becomes infinite (0x7c) from halfway between its largest, 57344, and 65536. */
static int to_eight(double x, mtt_dtype dtype)
{
    int e4m3 = dtype == MTT_F8_E4M3, mantissa = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, most = e4m3 ? 0x7e : 0x7c;
    int exponent = fabs(x) < 0x1p-40 ? 1 - bias : ilogb(x), code;
    if (isnan(x)) return 0x7f;
    if (exponent > 20) exponent = 20;
    if (exponent < 1 - bias) exponent = 1 - bias;
    code = ((exponent + bias - 1) << mantissa) + (int)fmin(rint(ldexp(fabs(x), mantissa - exponent)), 1000);
    if (code > most) code = most;
    return x < 0 ? -code : code;
}

/* A code in memory as to_eight has it; -0 is 0. */
static int signed_code(uint8_t code)
{
    return code & 0x80 ? -(code & 0x7f) : code;
}

/* The code of e5m2 at or below |x|, rounded to a half, or the one above where what is cut off and the byte
   make 256 together, with the sign of x. */
static int dithered(double x, uint32_t byte)
{
    int exponent = fabs(x) < 0x1p-40 ? -14 : ilogb(x), code;
    if (isnan(x)) return 0x7f;
    if (exponent > 20) exponent = 20;
    if (exponent < -14) exponent = -14;
    code = ((exponent + 14) << 2) + (int)((fmin(rint(ldexp(fabs(x), 10 - exponent)), 1e6) + byte) / 256);
    if (code > 0x7c) code = 0x7c;
    return x < 0 ? -code : code;
}

/* As an element of a chunked loss' gradients of logits is rounded, `i` rows from the micro-batch's first. */
static int logit_code(const mtt_op *op, double x, int64_t i, int64_t j)
{
    const mtt_op_chunked_loss *o = MTT_OPERANDS_OF(chunked_loss, op);
    const mtt_control *c = mtt__control(o->control);
    uint64_t stream = mtt__op_stream(op) | mtt__stream_step(c->micro_batch);
    mtt_draw draw = mtt__logits_draw(c->seed, stream, i, j, op->shape->vocab_padded);
    int place = (int)(i % 2 * 8 + j % 8);
    return dithered(x * (double)o->d_logits->scale->scale, draw.word[place / 4] >> place % 4 * 8 & 255);
}

/* The number of that code. */
static double dithered_logit(const mtt_op *op, double x, int64_t i, int64_t j)
{
    int code = logit_code(op, x, i, j);
    return copysign((double)mtt__from_e5m2((uint8_t)abs(code)), code) *
           (double)MTT_OPERANDS_OF(chunked_loss, op)->d_logits->scale->inverse;
}

/* Dropout's factors. The operations that only drop are held to the CPU's bits, so the masks are right. */
static void mask_of(const textbook *t, const mtt_tensor *control, int64_t first, int64_t count, float *mask)
{
    int64_t i;
    for (i = 0; i < count; i++) mask[i] = 1.0f;
    mtt__drop(t->op, control, first, count, mask);
}

/* Element (i, j) is at[i * row + j * column]. */
typedef struct matrix {
    double *at;
    int64_t row, column;
} matrix;

static matrix rows_of(double *at, int64_t width)
{
    matrix m = {at, width, 1};
    return m;
}

static matrix transposed(matrix m)
{
    matrix r = {m.at, m.column, m.row};
    return r;
}

/* C = A B with sums of one type, each from the first product to the last. C's columns are contiguous. */
#define TEXTBOOK_PRODUCT(name, real, OPERAND)                                                                \
    static void name(int64_t m, int64_t n, int64_t k, matrix a, matrix b, matrix c)                          \
    {                                                                                                        \
        real *right = malloc((size_t)(k * n) * sizeof(real));                                                \
        int64_t i, p;                                                                                        \
        MTT__OMP(omp parallel for if (n * k > 10000))                                                        \
        for (p = 0; p < k; p++) {                                                                            \
            int64_t j;                                                                                       \
            for (j = 0; j < n; j++) right[p * n + j] = (real)OPERAND(b.at[p * b.row + j * b.column]);        \
        }                                                                                                    \
        MTT__OMP(omp parallel for if (m * n * k > 100000))                                                   \
        for (i = 0; i < m; i++) {                                                                            \
            real *sum = calloc((size_t)n, sizeof(real));                                                     \
            int64_t q, j;                                                                                    \
            for (q = 0; q < k; q++) {                                                                        \
                real x = (real)OPERAND(a.at[i * a.row + q * a.column]);                                      \
                for (j = 0; j < n; j++) sum[j] += x * right[q * n + j];                                      \
            }                                                                                                \
            for (j = 0; j < n; j++) c.at[i * c.row + j] = (double)sum[j];                                    \
            free(sum);                                                                                       \
        }                                                                                                    \
        free(right);                                                                                         \
    }
TEXTBOOK_PRODUCT(product_exact, double, )
TEXTBOOK_PRODUCT(product_fp32, float, )
TEXTBOOK_PRODUCT(product_magnitude, float, fabs)

/* How tensor cores add: so many terms at a time, aligned to the largest, with `bits` behind its first one;
   the sum keeps `kept`. After `promoted` terms it is added to a sum in FP32; 0 = never. */
typedef struct sums {
    int terms, bits, kept;
    int64_t promoted;
} sums;

/* Tensor cores' sums of `terms` products and what was summed before, for 16 columns: all are aligned to the
   largest, cut off (not rounded), added, and the sum is cut off. FP32 holds the product of two operands of up
   to 11 bits. 2^-100 and below count as nothing. */
static void add_as_tensor_cores(sums how, float *sum, int64_t terms, const float *left, const float *right,
                                int64_t ld)
{
    float largest[16], per_unit[16]; /* a unit: the last bit that is kept */
    const uint64_t cut = ~(((uint64_t)1 << (52 - how.kept)) - 1);
    int32_t total[16];
    int64_t q;
    int j;
    for (j = 0; j < 16; j++) largest[j] = fabsf(sum[j]) > 0x1p-100f ? fabsf(sum[j]) : 0x1p-100f;
    for (q = 0; q < terms; q++)
        for (j = 0; j < 16; j++) {
            float x = fabsf(left[q] * right[q * ld + j]);
            largest[j] = x > largest[j] ? x : largest[j];
        }
    for (j = 0; j < 16; j++) {
        /* 2^bits / 2^exponent */
        per_unit[j] = mtt__bits_float((2 * 127 + (uint32_t)how.bits - (mtt__float_bits(largest[j]) >> 23))
                                      << 23);
        total[j] = (int32_t)(sum[j] * per_unit[j]);
    }
    for (q = 0; q < terms; q++)
        for (j = 0; j < 16; j++) total[j] += (int32_t)(left[q] * right[q * ld + j] * per_unit[j]);
    for (j = 0; j < 16; j++) {
        double x = (double)total[j] / (double)per_unit[j];
        uint64_t bits;
        memcpy(&bits, &x, sizeof(bits));
        bits &= cut;
        memcpy(&x, &bits, sizeof(bits));
        sum[j] = (float)x;
    }
}

static void product_tensor(sums how, int64_t m, int64_t n, int64_t k, matrix a, matrix b, matrix c, int tf32)
{
    enum { MOST = 32 };
    int64_t ld = (n + 15) / 16 * 16, i, p;
    float *right = calloc((size_t)(k * ld), sizeof(float));
    MTT__OMP(omp parallel for if (n * k > 10000))
    for (p = 0; p < k; p++) {
        int64_t j;
        for (j = 0; j < n; j++) {
            double x = b.at[p * b.row + j * b.column];
            right[p * ld + j] = tf32 ? to_tf32(x) : (float)x;
        }
    }
    MTT__OMP(omp parallel for if (m * n * k > 20000))
    for (i = 0; i < m; i++) {
        float *sum = calloc((size_t)ld, sizeof(float)), *whole = calloc((size_t)ld, sizeof(float)),
            left[MOST];
        int64_t q, r, j;
        for (q = 0; q < k; q += how.terms) {
            int64_t count = k - q < how.terms ? k - q : how.terms;
            for (r = 0; r < count; r++) {
                double x = a.at[i * a.row + (q + r) * a.column];
                left[r] = tf32 ? to_tf32(x) : (float)x;
            }
            for (j = 0; j < n; j += 16)
                add_as_tensor_cores(how, sum + j, count, left, right + q * ld + j, ld);
            if (!how.promoted || (q + how.terms) % how.promoted) continue;
            for (j = 0; j < n; j++) whole[j] += sum[j], sum[j] = 0;
        }
        for (j = 0; j < n; j++) c.at[i * c.row + j] = (double)(whole[j] + sum[j]);
        free(sum);
        free(whole);
    }
    free(right);
}

/* 16 bits and TF32: 2 bits below FP32's last place (Fasi et al. 2021: 8 terms of 16 bits or 4 of TF32 at a
   time on an A100; an H100 takes more at once, and so cuts off less often). 8 bits: what probe_eight
   measures, 32 terms at a time. Forward products leave it at that; in others 128 terms are added to a sum in
   FP32. */
static void product(const textbook *t, int64_t m, int64_t n, int64_t k, matrix a, matrix b, matrix c)
{
    const sums half = {8, 25, 23, 0}, tf32 = {4, 25, 23, 0},
               eight = {32, eight_bits, eight_bits, t->fast ? 0 : 128};
    int flash = t->op->kind == MTT_OP_flash || t->op->kind == MTT_OP_flash_backward; /* FP32 under TF32 too */
    if (t->exact) product_exact(m, n, k, a, b, c);
    else if (t->precision == MTT_FP32 || (t->precision == MTT_TF32 && flash)) product_fp32(m, n, k, a, b, c);
    else if (t->eight) product_tensor(eight, m, n, k, a, b, c, 0);
    else if (t->precision == MTT_TF32) product_tensor(tf32, m, n, k, a, b, c, 1);
    else product_tensor(half, m, n, k, a, b, c, 0);
}

/* C = alpha A B */
static void scaled_product(const textbook *t, int64_t m, int64_t n, int64_t k, double alpha, matrix a,
                           matrix b, matrix c)
{
    int64_t i, j;
    product(t, m, n, k, a, b, c);
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) c.at[i * c.row + j] = fp32(t, c.at[i * c.row + j] * alpha);
}

/* The magnitudes of it. */
static void scaled_magnitude(int64_t m, int64_t n, int64_t k, double alpha, matrix a, matrix b, matrix c)
{
    int64_t i, j;
    product_magnitude(m, n, k, a, b, c);
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) c.at[i * c.row + j] *= alpha;
}

/* y = x W + bias, W [k, n] or transposed, and its magnitudes where they are wanted. */
static void biased_product(const textbook *t, int64_t m, int64_t n, int64_t k, double *x, double *weight,
                           int is_transposed, const double *bias, double *y, double *magnitude)
{
    matrix w = rows_of(weight, is_transposed ? k : n);
    int64_t i;
    if (is_transposed) w = transposed(w);
    product(t, m, n, k, rows_of(x, k), w, rows_of(y, n));
    MTT__OMP(omp parallel for if (m * n > 10000))
    for (i = 0; i < m * n; i++)
        if (bias) y[i] = fp32(t, y[i] + bias[i % n]);
    if (!t->exact) return;
    product_magnitude(m, n, k, rows_of(x, k), w, rows_of(magnitude, n));
    MTT__OMP(omp parallel for if (m * n > 10000))
    for (i = 0; i < m * n; i++)
        if (bias) magnitude[i] += fabs(bias[i % n]);
}

/* Multiplies what a product has made by the operation's scale. */
static void scale_product(const textbook *t, int64_t count, double *y, double *size)
{
    double scale = (double)mtt__op_scale(t->op);
    int64_t i;
    for (i = 0; i < count && scale != 1; i++) {
        y[i] = fp32(t, y[i] * scale);
        if (t->exact) size[i] *= scale;
    }
}

static void textbook_linear(const textbook *t)
{
    const mtt_op_linear *o = MTT_OPERANDS_OF(linear, t->op);
    const numbers_linear *v = VALUES(linear, t), *magnitude = MAGNITUDES(linear, t);
    biased_product(t, mtt__rows(o->y), mtt__width(o->y), mtt__width(o->x), v->x, v->weight,
                   o->weight->transposed, v->bias, v->y, magnitude->y);
    scale_product(t, mtt__elements(o->y), v->y, magnitude->y);
}

/* The layer's product is stored before the adapter's is added. */
static void textbook_linear_adapted(const textbook *t)
{
    const mtt_op_linear_adapted *o = MTT_OPERANDS_OF(linear_adapted, t->op);
    const numbers_linear_adapted *v = VALUES(linear_adapted, t), *magnitude = MAGNITUDES(linear_adapted, t);
    int64_t rows = mtt__rows(o->y), n = mtt__width(o->y), i;
    double *sum = malloc((size_t)(rows * n) * sizeof(double));
    double *size = malloc((size_t)(rows * n) * sizeof(double));
    biased_product(t, rows, n, mtt__width(o->x), v->x, v->weight, 0, v->bias, v->y, magnitude->y);
    biased_product(t, rows, n, mtt__width(o->xa), v->xa, v->lora_b, 0, NULL, sum, size);
    for (i = 0; i < rows * n; i++) {
        v->y[i] = fp32(t, stored(t, v->y[i]) + sum[i]);
        if (t->exact) magnitude->y[i] += size[i];
    }
    free(sum);
    free(size);
}

static void textbook_linear_backward_input(const textbook *t)
{
    const mtt_op_linear_backward_input *o = MTT_OPERANDS_OF(linear_backward_input, t->op);
    const numbers_linear_backward_input *v = VALUES(linear_backward_input, t);
    biased_product(t, mtt__rows(o->dx), mtt__width(o->dx), mtt__width(o->dy), v->dy, v->weight,
                   !o->weight->transposed, NULL, v->dx, MAGNITUDES(linear_backward_input, t)->dx);
    scale_product(t, mtt__elements(o->dx), v->dx, MAGNITUDES(linear_backward_input, t)->dx);
}

/* The transpose of `rows` rows, in rows of `padded` elements, zeros at the end. */
static double *turned(const double *x, int64_t rows, int64_t width, int64_t padded)
{
    double *to = calloc((size_t)(width * padded), sizeof(double));
    int64_t i, j;
    for (i = 0; i < rows; i++)
        for (j = 0; j < width; j++) to[j * padded + i] = x[i * width + j];
    return to;
}

/* The same to a given place. */
static void turn(const double *x, int64_t rows, int64_t width, int64_t padded, double *to)
{
    double *turned_x = turned(x, rows, width, padded);
    memcpy(to, turned_x, (size_t)(width * padded) * sizeof(double));
    free(turned_x);
}

/* sums (+)= sums of columns; `from`: magnitudes of x, or NULL for |x|. */
static void column_sums(const textbook *t, const double *x, const double *from, int64_t rows, int64_t width,
                        double *sums, double *magnitude)
{
    int64_t i;
    MTT__OMP(omp parallel for if (rows * width > 10000))
    for (i = 0; i < width; i++) {
        double sum = 0, size = t->op->adds ? fabs(sums[i]) : 0;
        int64_t r;
        for (r = 0; r < rows; r++) {
            sum = fp32(t, sum + x[r * width + i]);
            size += from ? from[r * width + i] : fabs(x[r * width + i]);
        }
        sums[i] = t->op->adds ? fp32(t, sums[i] + sum) : sum;
        if (t->exact) magnitude[i] = size;
    }
}

/* d_weight (+)= x^T dy, or dy^T x for a transposed weight; dy_size: magnitudes of dy, or NULL for |dy|. */
static void weight_gradient(const textbook *t, double *x, int64_t k, double *dy, double *dy_size, int64_t n,
                            int64_t rows, int is_transposed, double *d_weight, double *magnitude)
{
    matrix left = transposed(rows_of(x, k)), right = rows_of(dy, n),
           sizes = rows_of(dy_size ? dy_size : dy, n);
    double *sums = malloc((size_t)(k * n) * sizeof(double));
    int64_t height = is_transposed ? n : k, width = is_transposed ? k : n, i;
    if (is_transposed) product(t, n, k, rows, transposed(right), transposed(left), rows_of(sums, k));
    else product(t, k, n, rows, left, right, rows_of(sums, n));
    if (t->exact && is_transposed)
        product_magnitude(n, k, rows, transposed(sizes), transposed(left), rows_of(magnitude, k));
    else if (t->exact) product_magnitude(k, n, rows, left, sizes, rows_of(magnitude, n));
    MTT__OMP(omp parallel for if (height * width > 10000))
    for (i = 0; i < height * width; i++) {
        if (t->exact && t->op->adds) magnitude[i] += fabs(d_weight[i]);
        d_weight[i] = t->op->adds ? fp32(t, d_weight[i] + sums[i]) : sums[i];
    }
    free(sums);
}

static void textbook_linear_backward_weight(const textbook *t)
{
    const mtt_op_linear_backward_weight *o = MTT_OPERANDS_OF(linear_backward_weight, t->op);
    const numbers_linear_backward_weight *v = VALUES(linear_backward_weight, t);
    const numbers_linear_backward_weight *magnitude = MAGNITUDES(linear_backward_weight, t);
    int64_t k = o->x ? mtt__width(o->x) : 0, n = mtt__width(o->dy), rows = mtt__rows(o->dy);
    double *x = v->x, *dy = v->dy;
    if (t->eight) { /* both are transposed */
        k = o->x ? mtt__rows(o->x) : 0, n = mtt__rows(o->dy), rows = mtt__width(o->dy);
        x = o->x ? turned(v->x, k, rows, k) : NULL, dy = turned(v->dy, n, rows, n);
    }
    if (v->d_weight)
        weight_gradient(t, x, k, dy, NULL, n, rows, o->d_weight->transposed, v->d_weight,
                        magnitude->d_weight);
    if (v->d_bias) column_sums(t, dy, NULL, rows, n, v->d_bias, magnitude->d_bias);
    if (t->eight) free(x), free(dy);
}

/* y = (x - mean) rstd gain + shift, for RMSNorm without mean and shift. What is off in x - mean, whose terms
   are x and the mean, is off in the variance as well. */
static void norm_rows(const textbook *t, const mtt_tensor *y_out, const double *x, const double *gain,
                      const double *shift, double *y, double *stats, double *y_size, double *stats_size)
{
    int64_t C = mtt__width(y_out), rows = mtt__rows(y_out), r;
    const double eps = (double)t->op->shape->norm_eps;
    MTT__OMP(omp parallel for if (rows * C > 10000))
    for (r = 0; r < rows; r++) {
        const double *in = x + r * C;
        double mean = 0, squares = 0, rstd, size = 0, doubt = 0;
        int64_t i;
        for (i = 0; i < C && shift; i++) mean = fp32(t, mean + in[i]);
        mean = fp32(t, mean / (double)C);
        for (i = 0; i < C; i++)
            squares = fp32(t, squares + fp32(t, fp32(t, in[i] - mean) * fp32(t, in[i] - mean)));
        rstd = fp32(t, 1 / fp32(t, sqrt(fp32(t, squares / (double)C + eps))));
        for (i = 0; i < C; i++)
            y[r * C + i] =
                fp32(t, fp32(t, fp32(t, fp32(t, in[i] - mean) * rstd) * gain[i]) + (shift ? shift[i] : 0));
        stats[2 * r] = mean;
        stats[2 * r + 1] = rstd;
        if (!t->exact) continue;
        for (i = 0; i < C; i++) size += fabs(in[i]) / (double)C;
        for (i = 0; i < C; i++) doubt += fabs(in[i] - mean) * (fabs(in[i]) + size) / (double)C;
        doubt = 1 + doubt * rstd * rstd; /* relative, of rstd */
        for (i = 0; i < C; i++)
            y_size[r * C + i] =
                (fabs(in[i]) + size + fabs(in[i] - mean) * doubt) * rstd * fabs(gain[i]) +
                (shift ? fabs(shift[i]) : 0);
        stats_size[2 * r] = size;
        stats_size[2 * r + 1] = rstd * doubt;
    }
}

static void textbook_norm(const textbook *t)
{
    const numbers_norm *v = VALUES(norm, t), *magnitude = MAGNITUDES(norm, t);
    norm_rows(t, MTT_OPERANDS_OF(norm, t->op)->y, v->x, v->gain, v->shift, v->y, v->stats, magnitude->y,
              magnitude->stats);
}

/* x normalized by given statistics, and the magnitudes. */
static void normalize(const textbook *t, const double *x, const double *stats, const double *gain,
                      const double *shift, int64_t rows, int64_t width, double *y, double *size)
{
    int64_t r;
    MTT__OMP(omp parallel for if (rows * width > 10000))
    for (r = 0; r < rows; r++) {
        double mean = stats[2 * r], rstd = stats[2 * r + 1];
        int64_t at = r * width, i;
        for (i = 0; i < width; i++, at++) {
            double shifted = shift ? shift[i] : 0;
            y[at] = fp32(t, fp32(t, fp32(t, fp32(t, x[at] - mean) * rstd) * gain[i]) + shifted);
            size[at] = (fabs(x[at]) + fabs(mean)) * rstd * fabs(gain[i]) + fabs(shifted);
        }
    }
}

/* In 8 bits: dx as it is stored, and the norm, transposed. */
static void norm_backward_eight(const textbook *t, const mtt_op_norm_backward *o)
{
    const numbers_norm_backward *v = VALUES(norm_backward, t), *magnitude = MAGNITUDES(norm_backward, t);
    int64_t rows = mtt__rows(o->x), width = mtt__width(o->x);
    size_t bytes = (size_t)(rows * width) * sizeof(double);
    double *y = malloc(bytes), *size = malloc(bytes);
    if (o->dx_8) memcpy(v->dx_8, GIVEN(norm_backward, t)->dx, bytes);
    if (o->dx_8 && t->exact) memset(magnitude->dx_8, 0, bytes);
    if (o->y_t) {
        normalize(t, v->x, v->stats, v->gain, v->shift, rows, width, y, size);
        turn(y, rows, width, mtt__width(o->y_t), v->y_t);
        if (t->exact) turn(size, rows, width, mtt__width(o->y_t), magnitude->y_t);
    }
    free(y);
    free(size);
}

static void textbook_norm_backward(const textbook *t)
{
    const mtt_op_norm_backward *o = MTT_OPERANDS_OF(norm_backward, t->op);
    const numbers_norm_backward *v = VALUES(norm_backward, t), *magnitude = MAGNITUDES(norm_backward, t);
    const double *dy = v->dy, *x = v->x, *stats = v->stats, *w = v->gain;
    int64_t C = mtt__width(o->dy), rows = mtt__rows(o->dy), r, c;
    int add = t->op->adds;
#define XHAT(r, i) fp32(t, fp32(t, x[(r) * C + (i)] - stats[2 * (r)]) * stats[2 * (r) + 1])
#define XHAT_SIZE(r, i) ((fabs(x[(r) * C + (i)]) + fabs(stats[2 * (r)])) * stats[2 * (r) + 1])
    MTT__OMP(omp parallel for if (rows * C > 10000))
    for (r = 0; r < rows; r++) {
        double sum = 0, dot = 0, value, sum_size = 0, dot_size = 0;
        int64_t i;
        for (i = 0; i < C; i++) {
            double g = fp32(t, dy[r * C + i] * w[i]);
            sum = fp32(t, sum + g);
            dot = fp32(t, dot + fp32(t, g * XHAT(r, i)));
            sum_size += fabs(g) / (double)C;
            dot_size += fabs(g) * XHAT_SIZE(r, i) / (double)C;
        }
        sum = t->op->shape->norm == MTT_NORM_LAYER ? fp32(t, sum / (double)C) : 0;
        dot = fp32(t, dot / (double)C);
        for (i = 0; i < C; i++) {
            value = fp32(t, fp32(t, fp32(t, dy[r * C + i] * w[i]) - sum) - fp32(t, XHAT(r, i) * dot));
            value = fp32(t, value * stats[2 * r + 1]);
            if (t->exact)
                magnitude->dx[r * C + i] =
                    (fabs(dy[r * C + i] * w[i]) + sum_size + XHAT_SIZE(r, i) * dot_size) * stats[2 * r + 1] +
                    (v->joined ? fabs(v->joined[r * C + i]) : 0);
            v->dx[r * C + i] = v->joined ? fp32(t, value + v->joined[r * C + i]) : value;
        }
    }
    MTT__OMP(omp parallel for if (rows * C > 10000))
    for (c = 0; c < C; c++) {
        double dw = 0, db = 0, dw_size = add && v->d_gain ? fabs(v->d_gain[c]) : 0,
               db_size = add && v->d_shift ? fabs(v->d_shift[c]) : 0;
        int64_t i;
        for (i = 0; i < rows; i++) {
            dw = fp32(t, dw + fp32(t, dy[i * C + c] * XHAT(i, c)));
            db = fp32(t, db + dy[i * C + c]);
            dw_size += fabs(dy[i * C + c]) * XHAT_SIZE(i, c);
            db_size += fabs(dy[i * C + c]);
        }
        if (v->d_gain) v->d_gain[c] = fp32(t, dw + (add ? v->d_gain[c] : 0));
        if (v->d_gain && t->exact) magnitude->d_gain[c] = dw_size;
        if (!v->d_shift) continue;
        v->d_shift[c] = fp32(t, db + (add ? v->d_shift[c] : 0));
        if (t->exact) magnitude->d_shift[c] = db_size;
    }
    if (v->d_bias) column_sums(t, v->dx, magnitude->dx, rows, C, v->d_bias, magnitude->d_bias);
    if (o->dx_t || o->y_t) norm_backward_eight(t, o);
#undef XHAT
#undef XHAT_SIZE
}

/* x, or x normalized by given statistics. What is as it was has no error, and so no magnitude. */
static void textbook_quantize(const textbook *t)
{
    const mtt_op_quantize *o = MTT_OPERANDS_OF(quantize, t->op);
    const numbers_quantize *v = VALUES(quantize, t), *magnitude = MAGNITUDES(quantize, t);
    int64_t width = mtt__width(o->x), rows = mtt__rows(o->x);
    double *y = malloc((size_t)(rows * width) * sizeof(double));
    double *size = calloc((size_t)(rows * width), sizeof(double));
    if (o->stats) normalize(t, v->x, v->stats, v->gain, v->shift, rows, width, y, size);
    else memcpy(y, v->x, (size_t)(rows * width) * sizeof(double));
    if (o->y) memcpy(v->y, y, (size_t)(rows * width) * sizeof(double));
    if (o->y && t->exact) memcpy(magnitude->y, size, (size_t)(rows * width) * sizeof(double));
    if (o->y_t) turn(y, rows, width, mtt__width(o->y_t), v->y_t);
    if (o->y_t && t->exact) turn(size, rows, width, mtt__width(o->y_t), magnitude->y_t);
    free(y);
    free(size);
}

static void textbook_quantize_weights(const textbook *t)
{
    int i;
    for (i = 0; i < 4; i++) {
        const mtt_tensor *x = t->op->operands[i];
        size_t bytes = (size_t)mtt__elements(x) * sizeof(double);
        if (t->op->operands[4 + i]->transposed)
            turn(t->values[i], mtt__rows(x), mtt__width(x), mtt__rows(x), t->values[4 + i]);
        else memcpy(t->values[4 + i], t->values[i], bytes);
        if (t->exact) memset(t->magnitudes[4 + i], 0, bytes);
    }
}

/* s of GELU(x) = x s. */
static double gelu_sigmoid(const textbook *t, double x)
{
    double cubic = fp32(t, x + fp32(t, 0.044715 * fp32(t, fp32(t, x * x) * x)));
    return fp32(t, 1 / fp32(t, 1 + fp32(t, exp(fp32(t, -1.5957691216057308 * cubic)))));
}

/* x_size: magnitudes of x, or NULL for |x|. GELU's slope is at most 1.13. */
static void gelu_elements(const textbook *t, const double *x, const double *x_size, int64_t count, double *y,
                          double *y_size)
{
    int64_t i;
    MTT__OMP(omp parallel for if (count > 10000))
    for (i = 0; i < count; i++) {
        y[i] = fp32(t, x[i] * gelu_sigmoid(t, x[i]));
        if (t->exact) y_size[i] = x_size ? x_size[i] : fabs(x[i]);
    }
}

/* dx = dy (s + x s (1 - s) 2u'); dy_size: magnitudes of dy, or NULL for |dy|. They may be where dx's go. */
static void gelu_gradients(const textbook *t, const double *dy, const double *dy_size, const double *x_at,
                           int64_t count, double *dx, double *dx_size)
{
    int64_t i;
    MTT__OMP(omp parallel for if (count > 10000))
    for (i = 0; i < count; i++) {
        double x = x_at[i], s = gelu_sigmoid(t, x), size = dy_size ? dy_size[i] : fabs(dy[i]);
        double slope = fp32(t, 1.5957691216057308 * fp32(t, 1 + fp32(t, fp32(t, 0.134145 * x) * x)));
        double inner = fp32(t, fp32(t, fp32(t, x * s) * fp32(t, 1 - s)) * slope);
        dx[i] = stored(t, dy[i] * fp32(t, s + inner));
        if (t->exact) dx_size[i] = size * (s + fabs(inner));
    }
}

/* GELU(x), transposed. */
static void gelu_turned(const textbook *t, const mtt_tensor *x_in, const double *x, const mtt_tensor *y_out,
                        double *y_t, double *sizes)
{
    int64_t rows = mtt__rows(x_in), width = mtt__width(x_in), padded = mtt__width(y_out);
    double *y = malloc((size_t)(rows * width) * sizeof(double)),
           *size = malloc((size_t)(rows * width) * sizeof(double));
    gelu_elements(t, x, NULL, rows * width, y, size);
    turn(y, rows, width, padded, y_t);
    if (t->exact) turn(size, rows, width, padded, sizes);
    free(y);
    free(size);
}

/* y = max(x, 0)^2, or x s with s = 1 / (1 + e^-x), which SwiGLU multiplies by the second half of a row. */
static void activation_elements(const textbook *t, const double *x, int64_t rows, int64_t F, double *y,
                                double *y_size)
{
    mtt_mlp mlp = t->op->shape->mlp;
    int64_t pitch = mtt__is_gated(mlp) ? 2 * F : F, i;
    MTT__OMP(omp parallel for if (rows * F > 10000))
    for (i = 0; i < rows * F; i++) {
        const double *at = x + i / F * pitch + i % F;
        double s = fp32(t, 1 / fp32(t, 1 + fp32(t, exp(-*at)))), positive = *at > 0 ? *at : 0, size;
        switch (mlp) {
        case MTT_MLP_RELU2: y[i] = size = fp32(t, positive * positive); break;
        case MTT_MLP_SILU: y[i] = fp32(t, *at * s), size = fabs(*at); break;
        case MTT_MLP_SWIGLU: y[i] = fp32(t, fp32(t, *at * s) * at[F]), size = fabs(*at * at[F]); break;
        default: y[i] = size = NAN; /* a form without a formula here is found wrong */
        }
        if (t->exact) y_size[i] = size;
    }
}

static void textbook_activation(const textbook *t)
{
    const mtt_op_activation *o = MTT_OPERANDS_OF(activation, t->op);
    const numbers_activation *v = VALUES(activation, t);
    double *sizes = MAGNITUDES(activation, t)->y;
    if (t->op->shape->mlp == MTT_MLP_GELU) gelu_elements(t, v->x, NULL, mtt__elements(o->y), v->y, sizes);
    else activation_elements(t, v->x, mtt__rows(o->y), mtt__width(o->y), v->y, sizes);
}

/* dx = dy 2 max(x, 0), or dy (s + x s (1 - s)) [up]; d_up = dy x s */
static void textbook_activation_backward(const textbook *t)
{
    const mtt_op_activation_backward *o = MTT_OPERANDS_OF(activation_backward, t->op);
    const numbers_activation_backward *v = VALUES(activation_backward, t);
    const numbers_activation_backward *magnitude = MAGNITUDES(activation_backward, t);
    mtt_mlp mlp = t->op->shape->mlp;
    int64_t F = mtt__width(o->dy), rows = mtt__rows(o->dy), pitch = mtt__width(o->x), i;
    double *y, *size;
    if (mlp == MTT_MLP_GELU) {
        gelu_gradients(t, v->dy, NULL, v->x, rows * F, v->dx, magnitude->dx);
        if (o->y_t) gelu_turned(t, o->x, v->x, o->y_t, v->y_t, magnitude->y_t);
        return;
    }
    y = malloc((size_t)(rows * F) * sizeof(double));
    size = malloc((size_t)(rows * F) * sizeof(double));
    MTT__OMP(omp parallel for if (rows * F > 10000))
    for (i = 0; i < rows * F; i++) {
        int64_t at = i / F * pitch + i % F;
        double x = v->x[at], dy = v->dy[i], s = fp32(t, 1 / fp32(t, 1 + fp32(t, exp(-x))));
        double inner = fp32(t, fp32(t, x * s) * fp32(t, 1 - s)), slope = fp32(t, s + inner);
        double slope_size = s + fabs(inner);
        switch (mlp) {
        case MTT_MLP_RELU2: slope = slope_size = x > 0 ? 2 * x : 0; break;
        case MTT_MLP_SILU: break;
        case MTT_MLP_SWIGLU:
            v->dx[at + F] = fp32(t, dy * fp32(t, x * s));
            if (t->exact) magnitude->dx[at + F] = fabs(dy * x);
            slope = fp32(t, slope * v->x[at + F]), slope_size *= fabs(v->x[at + F]);
            break;
        default: slope = slope_size = NAN;
        }
        v->dx[at] = fp32(t, dy * slope);
        if (t->exact) magnitude->dx[at] = fabs(dy) * slope_size;
    }
    if (o->y_t) {
        activation_elements(t, v->x, rows, F, y, size);
        turn(y, rows, F, mtt__width(o->y_t), v->y_t);
        if (t->exact) turn(size, rows, F, mtt__width(o->y_t), magnitude->y_t);
    }
    free(y);
    free(size);
}

static void textbook_add(const textbook *t)
{
    const mtt_op_add *o = MTT_OPERANDS_OF(add, t->op);
    const numbers_add *v = VALUES(add, t);
    int64_t i;
    for (i = 0; i < mtt__elements(o->sum); i++) {
        double a = v->a[i], b = v->b[i];
        v->sum[i] = fp32(t, a + b);
        if (t->exact) MAGNITUDES(add, t)->sum[i] = fabs(a) + fabs(b);
    }
}

/* Results of the first of two operations are stored before the second one reads them. */
static void store_all(const textbook *t, const mtt_tensor *tensor, double *values)
{
    int64_t count = mtt__elements(tensor), i;
    MTT__OMP(omp parallel for if (count > 10000))
    for (i = 0; i < count; i++) values[i] = stored(t, values[i]);
}

static void textbook_linear_gelu(const textbook *t)
{
    const mtt_op_linear_gelu *o = MTT_OPERANDS_OF(linear_gelu, t->op);
    const numbers_linear_gelu *v = VALUES(linear_gelu, t), *magnitude = MAGNITUDES(linear_gelu, t);
    biased_product(t, mtt__rows(o->pre), mtt__width(o->pre), mtt__width(o->x), v->x, v->weight,
                   o->weight->transposed, v->bias, v->pre, magnitude->pre);
    if (!o->y) return;
    store_all(t, o->pre, v->pre);
    gelu_elements(t, v->pre, magnitude->pre, mtt__elements(o->pre), v->y, magnitude->y);
}

/* The bias's gradient sums dx as it is stored. */
static void textbook_linear_backward_gelu(const textbook *t)
{
    const mtt_op_linear_backward_gelu *o = MTT_OPERANDS_OF(linear_backward_gelu, t->op);
    const numbers_linear_backward_gelu *v = VALUES(linear_backward_gelu, t);
    const numbers_linear_backward_gelu *magnitude = MAGNITUDES(linear_backward_gelu, t);
    int64_t rows = mtt__rows(o->dx), n = mtt__width(o->dx);
    biased_product(t, rows, n, mtt__width(o->dy), v->dy, v->weight, !o->weight->transposed, NULL, v->dx,
                   magnitude->dx);
    store_all(t, o->dx, v->dx);
    gelu_gradients(t, v->dx, magnitude->dx, v->pre, rows * n, v->dx, magnitude->dx);
    if (v->d_bias) column_sums(t, v->dx, magnitude->dx, rows, n, v->d_bias, magnitude->d_bias);
    if (o->y_t) gelu_turned(t, o->pre, v->pre, o->y_t, v->y_t, magnitude->y_t);
}

static void masked_sum(const textbook *t, const mtt_tensor *control, const double *x, const double *branch,
                       int64_t count, double *sum, double *size)
{
    float *mask = malloc((size_t)count * sizeof(float));
    int64_t i;
    mask_of(t, control, 0, count, mask);
    MTT__OMP(omp parallel for if (count > 10000))
    for (i = 0; i < count; i++) {
        double dropped = fp32(t, branch[i] * (double)mask[i]);
        if (t->exact) size[i] = fabs(x[i]) + fabs(dropped);
        sum[i] = fp32(t, x[i] + dropped);
    }
    free(mask);
}

static void textbook_residual(const textbook *t)
{
    const mtt_op_residual *o = MTT_OPERANDS_OF(residual, t->op);
    const numbers_residual *v = VALUES(residual, t);
    masked_sum(t, o->control, v->x, v->branch, mtt__elements(o->sum), v->sum, MAGNITUDES(residual, t)->sum);
}

/* The norm reads the sum as it is stored, in double too. */
static void textbook_residual_norm(const textbook *t)
{
    const mtt_op_residual_norm *o = MTT_OPERANDS_OF(residual_norm, t->op);
    const numbers_residual_norm *v = VALUES(residual_norm, t), *magnitude = MAGNITUDES(residual_norm, t);
    int64_t count = mtt__elements(o->sum), i;
    double *sum = malloc((size_t)count * sizeof(double));
    textbook plain = *t;
    plain.exact = 0;
    masked_sum(&plain, o->control, v->x, v->branch, count, sum, NULL);
    for (i = 0; i < count; i++) sum[i] = stored(&plain, sum[i]);
    masked_sum(t, o->control, v->x, v->branch, count, v->sum, magnitude->sum);
    norm_rows(t, o->y, sum, v->gain, v->shift, v->y, v->stats, magnitude->y, magnitude->stats);
    free(sum);
}

/* d_wte[token] and d_wpe[position], row after row. */
static void textbook_embed_backward(const textbook *t)
{
    const mtt_op_embed_backward *o = MTT_OPERANDS_OF(embed_backward, t->op);
    const numbers_embed_backward *v = VALUES(embed_backward, t), *magnitude = MAGNITUDES(embed_backward, t);
    const mtt_shape *d = t->op->shape;
    const int32_t *tokens = (const int32_t *)o->tokens->data;
    int64_t C = d->d_model, count = d->rows * C, words = o->d_wte ? mtt__elements(o->d_wte) : 0, c;
    int64_t positions = o->d_wpe ? mtt__elements(o->d_wpe) : 0;
    float *mask = malloc((size_t)count * sizeof(float));
    mask_of(t, o->control, 0, count, mask);
    if (words && !t->op->adds) memset(v->d_wte, 0, (size_t)words * sizeof(double));
    if (positions) memset(v->d_wpe, 0, (size_t)positions * sizeof(double));
    for (c = 0; c < words && t->exact; c++) magnitude->d_wte[c] = fabs(v->d_wte[c]);
    for (c = 0; c < positions && t->exact; c++) magnitude->d_wpe[c] = fabs(v->d_wpe[c]);
    MTT__OMP(omp parallel for if (count > 10000))
    for (c = 0; c < C; c++) {
        int64_t r;
        for (r = 0; r < d->rows; r++) {
            double dx = fp32(t, v->dx[r * C + c] * (double)mask[r * C + c]);
            int64_t word = tokens[r] * C + c, position = r % d->seq_len * C + c;
            if (words) v->d_wte[word] = fp32(t, v->d_wte[word] + dx);
            if (positions) v->d_wpe[position] = fp32(t, v->d_wpe[position] + dx);
            if (t->exact && words) magnitude->d_wte[word] += fabs(dx);
            if (t->exact && positions) magnitude->d_wpe[position] += fabs(dx);
        }
    }
    free(mask);
}

/* One head's q, k, v (or their gradients) in rows of qkv, and its output in rows of d_model. */
static matrix part_of(const textbook *t, double *qkv, int64_t head, int part)
{
    const mtt_shape *d = t->op->shape;
    mtt_qkv parts = mtt_qkv_of(d);
    return rows_of(qkv + head / d->heads * d->seq_len * parts.row +
                       mtt_qkv_column(&parts, part, (int)(head % d->heads)), parts.row);
}

static matrix output_of(const textbook *t, double *out, int64_t head)
{
    const mtt_shape *d = t->op->shape;
    int64_t width = (int64_t)d->heads * d->d_head;
    return rows_of(out + head / d->heads * d->seq_len * width + head % d->heads * d->d_head, width);
}

/* Gradients of q, k and v of each query head, as if none shared k and v: rows of three times the output's
   width. NULL without magnitudes. */
static double *new_gradients(const textbook *t, int exists)
{
    const mtt_shape *d = t->op->shape;
    return exists ? calloc((size_t)(d->rows * 3 * d->heads * d->d_head), sizeof(double)) : NULL;
}

static matrix gradient_of(const textbook *t, double *gradients, int64_t head, int part)
{
    const mtt_shape *d = t->op->shape;
    int64_t width = (int64_t)d->heads * d->d_head;
    return rows_of(gradients + head / d->heads * d->seq_len * 3 * width + part * width +
                       head % d->heads * d->d_head, 3 * width);
}

/* Parts `from` to `to` of d_qkv: those of heads that share k and v are added up, one after another. */
static void join_gradients(const textbook *t, double *gradients, int from, int to, double *d_qkv)
{
    const mtt_shape *d = t->op->shape;
    int64_t head, row, i, group = d->heads / d->heads_kv;
    int part;
    for (part = from; part <= to && gradients; part++)
        for (head = 0; head < (int64_t)d->batch * d->heads; head++) {
            matrix source = gradient_of(t, gradients, head, part), sum = part_of(t, d_qkv, head, part);
            for (row = 0; row < d->seq_len; row++)
                for (i = 0; i < d->d_head; i++) {
                    double *at = sum.at + row * sum.row + i, term = source.at[row * source.row + i];
                    *at = part && head % group ? fp32(t, *at + term) : term;
                }
        }
    free(gradients);
}

/* Probabilities of a query's scores over the keys that it attends, 0 elsewhere; returns log sum e^score. */
static double softmax_row(const textbook *t, const double *s, int64_t query, double *p)
{
    int64_t low = mtt__first_key(t->op->shape->window, query), j;
    double most = s[low], sum = 0;
    for (j = low; j <= query; j++) most = s[j] > most ? s[j] : most;
    memset(p, 0, (size_t)t->op->shape->seq_len * sizeof(double));
    for (j = low; j <= query; j++) {
        p[j] = fp32(t, exp(fp32(t, s[j] - most)));
        sum = fp32(t, sum + p[j]);
    }
    for (j = low; j <= query; j++) p[j] = fp32(t, p[j] / sum);
    return fp32(t, most + fp32(t, log(sum)));
}

/* All heads, each with its T x T squares. */
#define FOR_EACH_HEAD(head)                                                                                  \
    int64_t T = t->op->shape->seq_len, D = t->op->shape->d_head;                                             \
    int64_t heads = (int64_t)t->op->shape->batch * t->op->shape->heads, head;                                \
    double scale = fp32(t, 1 / sqrt((double)D));                                                             \
    (void)scale;                                                                                             \
    MTT__OMP(omp parallel for if (heads > 1 && heads * T * T > 1000))                                        \
    for (head = 0; head < heads; head++)

static void textbook_attention_scores(const textbook *t)
{
    const numbers_attention_scores *v = VALUES(attention_scores, t),
                                   *magnitude = MAGNITUDES(attention_scores, t);
    FOR_EACH_HEAD(h) {
        matrix q = part_of(t, v->qkv, h, 0), k = transposed(part_of(t, v->qkv, h, 1));
        scaled_product(t, T, T, D, scale, q, k, rows_of(v->scores + h * T * T, T));
        if (t->exact) scaled_magnitude(T, T, D, scale, q, k, rows_of(magnitude->scores + h * T * T, T));
    }
}

/* e^x is off by x units of its last place: a score counts with its distance from lse. */
static void textbook_softmax(const textbook *t)
{
    const numbers_softmax *v = VALUES(softmax, t), *magnitude = MAGNITUDES(softmax, t);
    FOR_EACH_HEAD(h) {
        int64_t i, j;
        for (i = h * T; i < (h + 1) * T; i++) {
            double *p = v->probs + i * T, lse = softmax_row(t, v->scores + i * T, i % T, p);
            for (j = 0; j < T && t->exact; j++)
                magnitude->probs[i * T + j] = p[j] > 0 ? p[j] * (1 + fabs(v->scores[i * T + j] - lse)) : 0;
        }
    }
}

static void textbook_attention_values(const textbook *t)
{
    const numbers_attention_values *v = VALUES(attention_values, t),
                                   *magnitude = MAGNITUDES(attention_values, t);
    FOR_EACH_HEAD(h) {
        matrix p = rows_of(v->probs + h * T * T, T), values = part_of(t, v->qkv, h, 2);
        product(t, T, D, T, p, values, output_of(t, v->out, h));
        if (t->exact) product_magnitude(T, D, T, p, values, output_of(t, magnitude->out, h));
    }
}

static void textbook_attention_values_backward(const textbook *t)
{
    const numbers_attention_values_backward *v = VALUES(attention_values_backward, t);
    const numbers_attention_values_backward *magnitude = MAGNITUDES(attention_values_backward, t);
    double *gradients = new_gradients(t, 1), *sizes = new_gradients(t, t->exact);
    FOR_EACH_HEAD(h) {
        matrix d_out = output_of(t, v->d_out, h), p = transposed(rows_of(v->probs + h * T * T, T));
        matrix values = transposed(part_of(t, v->qkv, h, 2));
        product(t, T, T, D, d_out, values, rows_of(v->d_probs + h * T * T, T));
        product(t, T, D, T, p, d_out, gradient_of(t, gradients, h, 2));
        if (!t->exact) continue;
        product_magnitude(T, T, D, d_out, values, rows_of(magnitude->d_probs + h * T * T, T));
        product_magnitude(T, D, T, p, d_out, gradient_of(t, sizes, h, 2));
    }
    join_gradients(t, gradients, 2, 2, v->d_qkv);
    join_gradients(t, sizes, 2, 2, magnitude->d_qkv);
}

/* dS = P (mask dP - sum of mask dP P) of a row. */
static void softmax_backward_row(const textbook *t, const double *dp, const double *p, const float *mask,
                                 double *ds, double *ds_size)
{
    int64_t T = t->op->shape->seq_len, j;
    double sum = 0, size = 0;
    for (j = 0; j < T; j++) {
        double term = p[j] == 0 ? 0 : fp32(t, fp32(t, dp[j] * (double)mask[j]) * p[j]);
        sum = fp32(t, sum + term);
        size += fabs(term);
    }
    for (j = 0; j < T; j++) {
        if (t->exact) ds_size[j] = p[j] == 0 ? 0 : p[j] * (fabs(dp[j] * (double)mask[j]) + size);
        ds[j] = p[j] == 0 ? 0 : fp32(t, p[j] * fp32(t, fp32(t, dp[j] * (double)mask[j]) - sum));
    }
}

static void textbook_softmax_backward(const textbook *t)
{
    const mtt_op_softmax_backward *o = MTT_OPERANDS_OF(softmax_backward, t->op);
    const numbers_softmax_backward *v = VALUES(softmax_backward, t),
                                   *magnitude = MAGNITUDES(softmax_backward, t);
    FOR_EACH_HEAD(h) {
        float *mask = malloc((size_t)T * sizeof(float));
        int64_t i;
        for (i = h * T; i < (h + 1) * T; i++) {
            mask_of(t, o->control, i * T, T, mask);
            softmax_backward_row(t, v->d_probs + i * T, v->probs + i * T, mask, v->d_scores + i * T,
                                 t->exact ? magnitude->d_scores + i * T : NULL);
        }
        free(mask);
    }
}

/* dQ = scale dS K, dK = scale dS^T Q; of magnitudes, the same from those of dS. */
static void query_and_key_gradients(const textbook *t, double *ds, double *ds_size, double scale, double *qkv,
                                    int64_t h, double *gradients, double *sizes)
{
    int64_t T = t->op->shape->seq_len, D = t->op->shape->d_head;
    matrix q = part_of(t, qkv, h, 0), k = part_of(t, qkv, h, 1);
    scaled_product(t, T, D, T, scale, rows_of(ds, T), k, gradient_of(t, gradients, h, 0));
    scaled_product(t, T, D, T, scale, transposed(rows_of(ds, T)), q, gradient_of(t, gradients, h, 1));
    if (!t->exact) return;
    scaled_magnitude(T, D, T, scale, rows_of(ds_size, T), k, gradient_of(t, sizes, h, 0));
    scaled_magnitude(T, D, T, scale, transposed(rows_of(ds_size, T)), q, gradient_of(t, sizes, h, 1));
}

static void textbook_attention_scores_backward(const textbook *t)
{
    const numbers_attention_scores_backward *v = VALUES(attention_scores_backward, t);
    const numbers_attention_scores_backward *magnitude = MAGNITUDES(attention_scores_backward, t);
    double *gradients = new_gradients(t, 1), *sizes = new_gradients(t, t->exact);
    FOR_EACH_HEAD(h) {
        double *ds = v->d_scores + h * T * T;
        query_and_key_gradients(t, ds, ds, scale, v->qkv, h, gradients, sizes);
    }
    join_gradients(t, gradients, 0, 1, v->d_qkv);
    join_gradients(t, sizes, 0, 1, magnitude->d_qkv);
}

static double *new_square(int64_t T)
{
    return malloc((size_t)(T * T) * sizeof(double));
}

/* Plain attention whose scores stay FP32: only the probabilities are rounded, on their way into the second
   product. What is off in a score is off in its probability, relative to it, and in the sum of all. Values in
   8 bits are those that the operation has stored in 16. */
/* Of each row and head, over the places of its sequence in the cache. */
static void textbook_cached_attention(const textbook *t)
{
    const mtt_op_cached_attention *o = MTT_OPERANDS_OF(cached_attention, t->op);
    const numbers_cached_attention *v = VALUES(cached_attention, t);
    const mtt_shape *d = t->op->shape;
    const int32_t *sequences = (const int32_t *)o->sequences->data;
    const int32_t *places = (const int32_t *)o->places->data;
    mtt_qkv qkv = mtt_qkv_of(d);
    int64_t D = d->d_head, context = o->keys->shape[1], C = d->heads * D, r, j, k;
    double *s = malloc((size_t)context * sizeof(double)), scale = 1 / sqrt((double)D);
    for (r = 0; r < d->rows; r++)
        for (j = 0; j < 2 * d->heads_kv && places[r] >= 0; j++) {
            double *to = j < d->heads_kv ? v->keys : v->values;
            int64_t kv = sequences[r] * d->heads_kv + j % d->heads_kv;
            memcpy(to + (kv * context + places[r]) * D, v->qkv + r * qkv.row + (d->heads + j) * D,
                   (size_t)D * sizeof(double));
        }
    if (t->exact) memset(MAGNITUDES(cached_attention, t)->keys, 0, mtt__elements(o->keys) * sizeof(double));
    if (t->exact) memset(MAGNITUDES(cached_attention, t)->values, 0, mtt__elements(o->keys) * sizeof(double));
    for (r = 0; r < d->rows * d->heads; r++) {
        int64_t row = r / d->heads, head = r % d->heads, place = places[row];
        int64_t first = ((sequences[row] * d->heads_kv + head / (d->heads / d->heads_kv)) * context) * D;
        int64_t low = place < 0 ? 0 : mtt__first_key(d->window, place);
        double *out = v->out + row * C + head * D, sum = 0, doubt = 0, most = -1e300;
        double *size = t->exact ? MAGNITUDES(cached_attention, t)->out + row * C + head * D : NULL;
        double *sizes = calloc((size_t)context, sizeof(double));
        memset(out, 0, (size_t)D * sizeof(double));
        if (t->exact) memset(size, 0, (size_t)D * sizeof(double));
        for (j = low; j <= place; j++) {
            for (k = 0, s[j] = 0; k < D; k++) {
                double term = v->qkv[row * qkv.row + head * D + k] * v->keys[first + j * D + k];
                s[j] = fp32(t, s[j] + term);
                sizes[j] += fabs(term) * scale;
            }
            s[j] = fp32(t, s[j] * scale);
            most = fmax(most, s[j]);
        }
        for (j = low; j <= place; j++) sum = fp32(t, sum + (s[j] = fp32(t, exp(fp32(t, s[j] - most)))));
        for (j = low; j <= place; j++) doubt += s[j] / sum * sizes[j];
        for (j = low; j <= place; j++)
            for (k = 0; k < D; k++) {
                double p = stored(t, fp32(t, s[j] / sum)), term = p * v->values[first + j * D + k];
                out[k] = fp32(t, out[k] + term);
                if (t->exact) size[k] += fabs(term) * (1 + sizes[j] + doubt);
            }
        free(sizes);
    }
    free(s);
}

static void textbook_flash(const textbook *t)
{
    const mtt_op_flash *o = MTT_OPERANDS_OF(flash, t->op);
    const numbers_flash *v = VALUES(flash, t), *magnitude = MAGNITUDES(flash, t);
    if (o->out_8) {
        size_t bytes = (size_t)mtt__elements(o->out_8) * sizeof(double);
        memcpy(v->out_8, GIVEN(flash, t)->out, bytes);
        if (t->exact) memset(magnitude->out_8, 0, bytes);
    }
    FOR_EACH_HEAD(h) {
        double *s = new_square(T), *p = new_square(T), *sizes = new_square(T);
        float *mask = malloc((size_t)T * sizeof(float));
        matrix q = part_of(t, v->qkv, h, 0), k = transposed(part_of(t, v->qkv, h, 1)),
               values = part_of(t, v->qkv, h, 2);
        int64_t i, j;
        scaled_product(t, T, T, D, scale, q, k, rows_of(s, T));
        if (t->exact) scaled_magnitude(T, T, D, scale, q, k, rows_of(sizes, T));
        for (i = 0; i < T; i++) {
            double lse = v->lse[h * T + i] = softmax_row(t, s + i * T, i, p + i * T), doubt = 0;
            for (j = 0; j <= i && t->exact; j++) doubt += p[i * T + j] * sizes[i * T + j];
            if (t->exact) magnitude->lse[h * T + i] = 1 + fabs(lse) + doubt;
            mask_of(t, o->control, (h * T + i) * T, T, mask);
            for (j = 0; j < T; j++) {
                p[i * T + j] = stored(t, fp32(t, p[i * T + j] * (double)mask[j]));
                if (t->exact) sizes[i * T + j] = p[i * T + j] * (1 + sizes[i * T + j] + doubt);
            }
        }
        product(t, T, D, T, rows_of(p, T), values, output_of(t, v->out, h));
        if (t->exact) product_magnitude(T, D, T, rows_of(sizes, T), values, output_of(t, magnitude->out, h));
        free(s);
        free(p);
        free(sizes);
        free(mask);
    }
}

/* P and dS are rounded where they enter the products of dV, dQ and dK. Dropout's factor of what it keeps
   comes after these products, where the kernels have it too: of two equally good places to round a
   probability, before and after that factor, one may well have twice the other's largest error (2 of 1,500
   draws with 61 tokens). Where each query attends one key, dS is 0 and so are dQ and dK. */
static void textbook_flash_backward(const textbook *t)
{
    const mtt_op_flash_backward *o = MTT_OPERANDS_OF(flash_backward, t->op);
    const numbers_flash_backward *v = VALUES(flash_backward, t), *magnitude = MAGNITUDES(flash_backward, t);
    double *gradients = new_gradients(t, 1), *sizes = new_gradients(t, t->exact);
    FOR_EACH_HEAD(h) {
        double *s = new_square(T), *dp = new_square(T), *s_size = new_square(T), *dp_size = new_square(T);
        double kept = mtt__dropout_scale(mtt__dropout_threshold(t->op->shape->dropout, 8), 8);
        float *mask = malloc((size_t)T * sizeof(float));
        matrix d_out = output_of(t, v->d_out, h), out = output_of(t, v->out, h),
               dv = gradient_of(t, gradients, h, 2);
        matrix q = part_of(t, v->qkv, h, 0), k = transposed(part_of(t, v->qkv, h, 1));
        matrix values = transposed(part_of(t, v->qkv, h, 2));
        int64_t i, j;
        scaled_product(t, T, T, D, scale, q, k, rows_of(s, T));
        product(t, T, T, D, d_out, values, rows_of(dp, T));
        if (t->exact) scaled_magnitude(T, T, D, scale, q, k, rows_of(s_size, T));
        if (t->exact) product_magnitude(T, T, D, d_out, values, rows_of(dp_size, T));
        for (i = 0; i < T; i++) {
            double delta = 0, delta_size = 0, lse = v->lse[h * T + i];
            for (j = 0; j < D; j++) {
                double term = fp32(t, d_out.at[i * d_out.row + j] * out.at[i * out.row + j]);
                delta = fp32(t, delta + term);
                delta_size += fabs(term);
            }
            mask_of(t, o->control, (h * T + i) * T, T, mask);
            for (j = 0; j < T; j++) {
                int64_t at = i * T + j;
                int attends = j >= mtt__first_key(t->op->shape->window, i) && j <= i;
                double p = attends ? fp32(t, exp(fp32(t, s[at] - lse))) : 0;
                double ds = fp32(t, fp32(t, dp[at] * (double)mask[j]) - delta);
                if (t->exact) {
                    double doubt = 1 + s_size[at] + fabs(lse); /* relative, of p */
                    dp_size[at] = p / kept * ((double)mask[j] * dp_size[at] + delta_size + fabs(ds) * doubt);
                    s_size[at] = p * doubt * (double)mask[j];
                }
                s[at] = stored(t, mask[j] > 0 ? p : 0);
                dp[at] = mtt__attends_one(t->op->shape) ? 0 : stored(t, p * ds / kept);
            }
        }
        scaled_product(t, T, D, T, kept, transposed(rows_of(s, T)), d_out, dv);
        if (t->exact)
            product_magnitude(T, D, T, transposed(rows_of(s_size, T)), d_out, gradient_of(t, sizes, h, 2));
        query_and_key_gradients(t, dp, dp_size, scale * kept, v->qkv, h, gradients, sizes);
        free(s);
        free(dp);
        free(s_size);
        free(dp_size);
        free(mask);
    }
    join_gradients(t, gradients, 0, 2, v->d_qkv);
    join_gradients(t, sizes, 0, 2, magnitude->d_qkv);
}

/* A head of q or k: x / sqrt(mean x^2 + eps), whose error grows with those of all x. */
static void normalize_head(const textbook *t, const double *gain, double *x, double *size)
{
    int64_t D = t->op->shape->d_head, i;
    double squares = 0, doubt = 0, rstd;
    for (i = 0; i < D; i++) squares = fp32(t, squares + fp32(t, x[i] * x[i]));
    rstd = fp32(t, 1 / fp32(t, sqrt(fp32(t, fp32(t, squares / (double)D) + (double)t->op->shape->norm_eps))));
    for (i = 0; i < D; i++) doubt += fabs(x[i]) * size[i] / (double)D * rstd * rstd;
    for (i = 0; i < D; i++) {
        size[i] = (size[i] + fabs(x[i]) * doubt) * rstd * fabs(gain ? gain[i] : 1);
        x[i] = fp32(t, fp32(t, x[i] * rstd) * (gain ? gain[i] : 1));
    }
}

/* Pairs of a head as complex numbers, times e^(i angle), or backward e^(-i angle). */
static void rotate_head(const textbook *t, const double *angles, int backward, double *x, double *size)
{
    int64_t D = t->op->shape->d_head, i, apart = t->op->shape->rotary_interleaved ? 1 : D / 2;
    for (i = 0; i < D / 2 && angles; i++) {
        int64_t a = apart == 1 ? 2 * i : i, b = a + apart;
        double c = angles[2 * i], e = backward ? -angles[2 * i + 1] : angles[2 * i + 1];
        double x_a = x[a], x_b = x[b], size_a = size[a], size_b = size[b];
        x[a] = fp32(t, fp32(t, x_a * c) - fp32(t, x_b * e));
        x[b] = fp32(t, fp32(t, x_b * c) + fp32(t, x_a * e));
        size[a] = size_a * fabs(c) + size_b * fabs(e);
        size[b] = size_b * fabs(c) + size_a * fabs(e);
    }
}

/* Rows of q, k and v, in place, with their magnitudes. */
static void turn_rows(const textbook *t, const double *angles, const double *q_gain, const double *k_gain,
                      double *y, double *y_size)
{
    const mtt_shape *d = t->op->shape;
    int64_t D = d->d_head, width = mtt_qkv_of(d).row, row, head;
    for (row = 0; row < d->rows; row++)
        for (head = 0; head < d->heads + d->heads_kv; head++) {
            double *x = y + row * width + head * D, *size = y_size + row * width + head * D;
            if (q_gain) normalize_head(t, head < d->heads ? q_gain : k_gain, x, size);
            rotate_head(t, angles ? angles + row % d->seq_len * D : NULL, 0, x, size);
        }
}

static void textbook_rotary(const textbook *t)
{
    const mtt_op_rotary *o = MTT_OPERANDS_OF(rotary, t->op);
    const numbers_rotary *v = VALUES(rotary, t);
    int64_t count = mtt__elements(o->y), width = mtt__width(o->y), v_width = 0, i;
    double *size = malloc((size_t)count * sizeof(double));
    v_width = (int64_t)t->op->shape->heads_kv * t->op->shape->d_head;
    memcpy(v->y, v->qkv, (size_t)count * sizeof(double));
    for (i = 0; i < count; i++) size[i] = i % width < width - v_width ? fabs(v->y[i]) : 0;
    turn_rows(t, v->angles, v->q_gain, v->k_gain, v->y, size);
    if (t->exact) memcpy(MAGNITUDES(rotary, t)->y, size, (size_t)count * sizeof(double));
    free(size);
}

/* The product is stored before its heads are normalized and rotated. */
static void textbook_linear_rotary(const textbook *t)
{
    const mtt_op_linear_rotary *o = MTT_OPERANDS_OF(linear_rotary, t->op);
    const numbers_linear_rotary *v = VALUES(linear_rotary, t);
    int64_t count = mtt__elements(o->y);
    double *size = calloc((size_t)count, sizeof(double));
    biased_product(t, mtt__rows(o->y), mtt__width(o->y), mtt__width(o->x), v->x, v->weight,
                   o->weight->transposed, v->bias, v->y, size);
    if (!t->exact) store_all(t, o->y, v->y);
    turn_rows(t, v->angles, v->q_gain, v->k_gain, v->y, size);
    if (t->exact) memcpy(MAGNITUDES(linear_rotary, t)->y, size, (size_t)count * sizeof(double));
    free(size);
}

static void textbook_rotary_backward(const textbook *t)
{
    const mtt_op_rotary_backward *o = MTT_OPERANDS_OF(rotary_backward, t->op);
    const numbers_rotary_backward *v = VALUES(rotary_backward, t),
                                  *magnitude = MAGNITUDES(rotary_backward, t);
    const mtt_shape *d = t->op->shape;
    int64_t D = d->d_head, width = mtt__width(o->dx), row, head, i;
    double *gradients[2] = {v->d_q_gain, v->d_k_gain}, *sizes[2] = {magnitude->d_q_gain, magnitude->d_k_gain};
    for (i = 0; i < (o->q_gain ? 2 * D : 0); i++) {
        if (!gradients[i / D]) continue;
        gradients[i / D][i % D] = 0;
        if (t->exact) sizes[i / D][i % D] = 0;
    }
    for (i = 0; i < d->rows * width && t->exact; i++) magnitude->dx[i] = 0;
    if (o->dx_t) memcpy(v->dx, v->dy, (size_t)(d->rows * width) * sizeof(double)); /* v, too */
    for (row = 0; row < d->rows; row++)
        for (head = 0; head < d->heads + d->heads_kv; head++) {
            int64_t at = row * width + head * D, of_k = head >= d->heads;
            double g[256], size[256], x[256], x_size[256], mean = 0, mean_size = 0, squares = 0, rstd;
            for (i = 0; i < D; i++) g[i] = v->dy[at + i], size[i] = fabs(g[i]);
            rotate_head(t, v->angles ? v->angles + row % d->seq_len * D : NULL, 1, g, size);
            if (o->q_gain) {
                const double *gain = of_k ? v->k_gain : v->q_gain;
                for (i = 0; i < D; i++) x[i] = v->qkv[at + i], x_size[i] = fabs(x[i]), squares += x[i] * x[i];
                rstd = fp32(t, 1 / sqrt(squares / (double)D + (double)t->op->shape->norm_eps));
                normalize_head(t, NULL, x, x_size);
                for (i = 0; i < D; i++) {
                    double *gradient = gradients[of_k];
                    if (gradient) gradient[i] = fp32(t, gradient[i] + fp32(t, g[i] * x[i]));
                    if (gradient && t->exact) sizes[of_k][i] += size[i] * x_size[i];
                    g[i] = fp32(t, g[i] * gain[i]);
                    size[i] *= fabs(gain[i]);
                    mean = fp32(t, mean + fp32(t, g[i] * x[i]));
                    mean_size += size[i] * x_size[i] / (double)D;
                }
                mean = fp32(t, mean / (double)D);
                for (i = 0; i < D; i++) {
                    g[i] = fp32(t, rstd * fp32(t, g[i] - fp32(t, x[i] * mean)));
                    size[i] = rstd * (2 * size[i] + 2 * x_size[i] * mean_size);
                }
            }
            for (i = 0; i < D; i++) {
                v->dx[at + i] = g[i];
                if (t->exact) magnitude->dx[at + i] = size[i];
            }
        }
}

/* {loss, hit, log sum e^x} of a row of logits; x_size: magnitudes of the logits, or NULL for 0. */
static void loss_row(const textbook *t, const double *x, const double *x_size, int32_t target, double *out,
                     double *out_size)
{
    double most = x[0], sum = 0, doubt = 0;
    int j, classes = t->op->shape->vocab;
    out[0] = out[1] = out[2] = 0;
    if (t->exact) out_size[0] = out_size[1] = out_size[2] = 0;
    if (target < 0) return;
    for (j = 1; j < classes; j++) most = x[j] > most ? x[j] : most;
    for (j = 0; j < classes; j++) sum = fp32(t, sum + fp32(t, exp(fp32(t, x[j] - most))));
    out[2] = fp32(t, most + fp32(t, log(sum)));
    out[0] = fp32(t, out[2] - x[target]);
    out[1] = x[target] >= most;
    if (!t->exact) return;
    for (j = 0; j < classes; j++)
        doubt += exp(x[j] - out[2]) * (1 + fabs(x[j] - out[2]) + (x_size ? x_size[j] : 0));
    out_size[2] = fabs(most) + log(sum) + doubt;
    out_size[0] = out_size[2] + fabs(x[target]) + (x_size ? x_size[target] : 0);
}

/* `doubt`: the magnitude of lse. x, x_size and the results may be in one place each. */
static void gradient_row(const textbook *t, double factor, const double *x, const double *x_size,
                         int32_t target, double lse, double doubt, double *out, double *out_size)
{
    int j;
    for (j = 0; j < t->op->shape->vocab_padded; j++) {
        int counts = target >= 0 && j < t->op->shape->vocab;
        double p = counts ? fp32(t, exp(fp32(t, x[j] - lse))) : 0;
        if (t->exact)
            out_size[j] =
                counts ? (p * (1 + fabs(x[j]) + (x_size ? x_size[j] : 0) + doubt) + (j == target)) * factor
                       : 0;
        out[j] = counts ? fp32(t, fp32(t, p - (j == target)) * factor) : 0;
    }
}

static double loss_factor(const textbook *t, const mtt_tensor *control, const mtt_tensor *counters)
{
    int64_t targets = mtt__control(control)->targets;
    return fp32(t, (double)mtt__counters(counters)->loss_scale / (double)(targets ? targets : 1));
}

static void textbook_cross_entropy(const textbook *t)
{
    const numbers_cross_entropy *v = VALUES(cross_entropy, t), *magnitude = MAGNITUDES(cross_entropy, t);
    const int32_t *targets = (const int32_t *)MTT_OPERANDS_OF(cross_entropy, t->op)->targets->data;
    int64_t width = t->op->shape->vocab_padded, i;
    MTT__OMP(omp parallel for if (t->op->shape->rows * width > 10000))
    for (i = 0; i < t->op->shape->rows; i++)
        loss_row(t, v->logits + i * width, NULL, targets[i], v->losses + 3 * i,
                 t->exact ? magnitude->losses + 3 * i : NULL);
}

static void textbook_cross_entropy_backward(const textbook *t)
{
    const mtt_op_cross_entropy_backward *o = MTT_OPERANDS_OF(cross_entropy_backward, t->op);
    const numbers_cross_entropy_backward *v = VALUES(cross_entropy_backward, t);
    const numbers_cross_entropy_backward *magnitude = MAGNITUDES(cross_entropy_backward, t);
    const int32_t *targets = (const int32_t *)o->targets->data;
    int64_t width = t->op->shape->vocab_padded, i;
    double factor = loss_factor(t, o->control, o->counters);
    MTT__OMP(omp parallel for if (t->op->shape->rows * width > 10000))
    for (i = 0; i < t->op->shape->rows; i++) {
        double lse = v->losses[3 * i + 2];
        gradient_row(t, factor, v->logits + i * width, NULL, targets[i], lse, fabs(lse),
                     v->d_logits + i * width, t->exact ? magnitude->d_logits + i * width : NULL);
    }
}

/* In 8 bits, gradients of logits lie beside them. Where one chunk has all rows, each step takes what the one
   before has stored. Otherwise only the last chunk is there to be seen, and gradients of logits are rounded
   here: one that lies near the middle of two numbers may then become the other one. */
static void textbook_chunked_loss_eight(const textbook *t)
{
    const mtt_op_chunked_loss *o = MTT_OPERANDS_OF(chunked_loss, t->op);
    const numbers_chunked_loss *v = VALUES(chunked_loss, t), *magnitude = MAGNITUDES(chunked_loss, t);
    const int32_t *targets = (const int32_t *)o->targets->data;
    int64_t rows = t->op->shape->rows, width = t->op->shape->vocab_padded, C = t->op->shape->d_model, i, j;
    int64_t chunk = o->logits->shape[0];
    const numbers_chunked_loss *given = chunk < rows ? NULL : GIVEN(chunked_loss, t);
    size_t bytes = (size_t)(rows * width) * sizeof(double);
    double *logits = malloc(bytes), *sizes = malloc(bytes), *gradients = malloc(bytes), *x;
    double factor = loss_factor(t, o->control, o->counters);
    textbook back = *t;
    back.fast = 0;
    biased_product(t, rows, width, C, v->x, v->weight, 1, v->bias, logits, sizes);
    for (i = 0; i < rows; i++) {
        size_t row_bytes = (size_t)width * sizeof(double);
        memcpy(v->logits + i % chunk * width, logits + i * width, row_bytes);
        if (t->exact) memcpy(magnitude->logits + i % chunk * width, sizes + i * width, row_bytes);
    }
    for (i = 0; i < rows * width; i++) logits[i] = given ? given->logits[i] : stored(t, logits[i]);
    MTT__OMP(omp parallel for if (rows * width > 10000))
    for (i = 0; i < rows; i++) {
        double *size = sizes + i * width, row_size[3];
        loss_row(t, logits + i * width, given ? NULL : size, targets[i], v->losses + 3 * i, row_size);
        if (t->exact) memcpy(magnitude->losses + 3 * i, row_size, sizeof(row_size));
        if (o->dx)
            gradient_row(t, factor, logits + i * width, given ? NULL : size, targets[i],
                         v->losses[3 * i + 2], row_size[2], gradients + i * width, size);
    }
    for (i = 0; i < rows && o->dx; i++)
        for (j = 0; j < width; j++) {
            double *at = &gradients[i * width + j];
            int64_t place = i % chunk * width + j;
            v->d_logits[place] = *at;
            if (t->exact) magnitude->d_logits[place] = sizes[i * width + j];
            *at = given ? given->d_logits[place] : dithered_logit(t->op, *at, i, j);
        }
    if (o->dx) {
        product(&back, rows, C, width, rows_of(gradients, width), transposed(rows_of(v->weight_t, width)),
                rows_of(v->dx, C));
        if (t->exact)
            product_magnitude(rows, C, width, rows_of(gradients, width),
                              transposed(rows_of(v->weight_t, width)), rows_of(magnitude->dx, C));
        x = o->x_t ? turned(v->x_t, C, mtt__width(o->x_t), C) : NULL;
        if (v->d_weight)
            weight_gradient(&back, x, C, gradients, NULL, width, rows, 1, v->d_weight,
                            t->exact ? magnitude->d_weight : NULL);
        if (v->d_bias)
            column_sums(t, gradients, NULL, rows, width, v->d_bias, t->exact ? magnitude->d_bias : NULL);
        free(x);
    }
    free(logits);
    free(sizes);
    free(gradients);
}

/* The full loss's four operations, logits and their gradients stored in between. */
static void textbook_chunked_loss(const textbook *t)
{
    const mtt_op_chunked_loss *o = MTT_OPERANDS_OF(chunked_loss, t->op);
    const numbers_chunked_loss *v = VALUES(chunked_loss, t), *magnitude = MAGNITUDES(chunked_loss, t);
    const int32_t *targets = (const int32_t *)o->targets->data;
    int64_t rows = t->op->shape->rows, width = t->op->shape->vocab_padded, C = t->op->shape->d_model, i;
    int64_t chunk = o->logits->shape[0];
    double *logits, *sizes, factor = loss_factor(t, o->control, o->counters);
    matrix weight, all, all_sizes;
    if (t->eight) {
        textbook_chunked_loss_eight(t);
        return;
    }
    logits = malloc((size_t)(rows * width) * sizeof(double));
    sizes = malloc((size_t)(rows * width) * sizeof(double));
    weight = rows_of(v->weight, C), all = rows_of(logits, width), all_sizes = rows_of(sizes, width);
    biased_product(t, rows, width, C, v->x, v->weight, 1, v->bias, logits, sizes);
    MTT__OMP(omp parallel for if (rows * width > 10000))
    for (i = 0; i < rows; i++) {
        double *x = logits + i * width, *size = sizes + i * width, row_size[3];
        int64_t j;
        for (j = 0; j < width; j++) x[j] = stored(t, x[j]);
        loss_row(t, x, size, targets[i], v->losses + 3 * i, row_size);
        if (t->exact) memcpy(magnitude->losses + 3 * i, row_size, sizeof(row_size));
        if (o->dx) gradient_row(t, factor, x, size, targets[i], v->losses[3 * i + 2], row_size[2], x, size);
        for (j = 0; j < width; j++) x[j] = stored(t, x[j]);
    }
    for (i = 0; i < rows; i++) {
        memcpy(v->logits + i % chunk * width, logits + i * width, (size_t)width * sizeof(double));
        if (t->exact)
            memcpy(magnitude->logits + i % chunk * width, sizes + i * width, (size_t)width * sizeof(double));
    }
    if (o->dx) {
        product(t, rows, C, width, all, weight, rows_of(v->dx, C));
        if (t->exact) product_magnitude(rows, C, width, all_sizes, weight, rows_of(magnitude->dx, C));
        if (v->d_weight)
            weight_gradient(t, v->x, C, logits, sizes, width, rows, 1, v->d_weight,
                            t->exact ? magnitude->d_weight : NULL);
        if (v->d_bias)
            column_sums(t, logits, sizes, rows, width, v->d_bias, t->exact ? magnitude->d_bias : NULL);
    }
    free(logits);
    free(sizes);
}

static void textbook_adamw(const textbook *t)
{
    const mtt_op_adamw *o = MTT_OPERANDS_OF(adamw, t->op);
    const numbers_adamw *v = VALUES(adamw, t), *magnitude = MAGNITUDES(adamw, t);
    const mtt_control *c = mtt__control(o->control);
    const mtt_counters *counters = mtt__counters(o->counters);
    double b1 = (double)c->beta1, b2 = (double)c->beta2, updates = (double)counters->updates;
    double all = fp32(t, (double)c->lr / (1 - pow(b1, updates))),
           correction = fp32(t, 1 / sqrt(1 - pow(b2, updates)));
    int p;
    for (p = 0; p < t->op->parameters && !counters->skipped; p++) {
        int64_t first = t->op->parts[p].first;
        double *weight = t->weights[p], *m = v->m + first, *second = v->v + first;
        double *master = v->master ? v->master + first : NULL, *kept = master ? master : weight;
        const mtt_rate rate = c->rates[t->op->parts[p].group];
        double keep = fp32(t, 1 - fp32(t, (double)c->lr * (double)rate.lr) * (double)rate.decay);
        double step = fp32(t, all * (double)rate.lr);
        int64_t count = mtt__elements(t->op->weights[p]), i;
        MTT__OMP(omp parallel for if (count > 10000))
        for (i = 0; i < count; i++) {
            double g = fp32(t, t->gradients[p][i] * (double)counters->gradient_scale), old = m[i], root,
                   change;
            m[i] = fp32(t, fp32(t, b1 * m[i]) + fp32(t, (1 - b1) * g));
            second[i] = fp32(t, fp32(t, b2 * second[i]) + fp32(t, fp32(t, (1 - b2) * g) * g));
            root = fp32(t, fp32(t, fp32(t, sqrt(second[i])) * correction) + (double)c->eps);
            change = fp32(t, fp32(t, step * m[i]) / root);
            if (t->exact) {
                double m_size = fabs(b1 * old) + fabs((1 - b1) * g),
                       size = fabs(keep * kept[i]) + step * m_size / root;
                magnitude->m[first + i] = m_size;
                magnitude->v[first + i] = second[i];
                t->weight_magnitudes[p][i] = size;
                if (master) magnitude->master[first + i] = size;
            }
            weight[i] = fp32(t, fp32(t, keep * kept[i]) - change);
            if (master) master[i] = weight[i];
        }
    }
}

/* NULL: compared bit for bit with the CPU's, or counters. */
static void (*const TEXTBOOK[MTT_OP_KIND_COUNT])(const textbook *t) = {
    [MTT_OP_quantize] = textbook_quantize,
    [MTT_OP_quantize_weights] = textbook_quantize_weights,
    [MTT_OP_norm] = textbook_norm,
    [MTT_OP_linear] = textbook_linear,
    [MTT_OP_linear_gelu] = textbook_linear_gelu,
    [MTT_OP_rotary] = textbook_rotary,
    [MTT_OP_linear_rotary] = textbook_linear_rotary,
    [MTT_OP_rotary_backward] = textbook_rotary_backward,
    [MTT_OP_residual] = textbook_residual,
    [MTT_OP_residual_norm] = textbook_residual_norm,
    [MTT_OP_attention_scores] = textbook_attention_scores,
    [MTT_OP_softmax] = textbook_softmax,
    [MTT_OP_attention_values] = textbook_attention_values,
    [MTT_OP_flash] = textbook_flash,
    [MTT_OP_cached_attention] = textbook_cached_attention,
    [MTT_OP_cross_entropy] = textbook_cross_entropy,
    [MTT_OP_chunked_loss] = textbook_chunked_loss,
    [MTT_OP_cross_entropy_backward] = textbook_cross_entropy_backward,
    [MTT_OP_linear_backward_weight] = textbook_linear_backward_weight,
    [MTT_OP_linear_adapted] = textbook_linear_adapted,
    [MTT_OP_linear_backward_input] = textbook_linear_backward_input,
    [MTT_OP_norm_backward] = textbook_norm_backward,
    [MTT_OP_activation] = textbook_activation,
    [MTT_OP_activation_backward] = textbook_activation_backward,
    [MTT_OP_add] = textbook_add,
    [MTT_OP_linear_backward_gelu] = textbook_linear_backward_gelu,
    [MTT_OP_attention_values_backward] = textbook_attention_values_backward,
    [MTT_OP_softmax_backward] = textbook_softmax_backward,
    [MTT_OP_attention_scores_backward] = textbook_attention_scores_backward,
    [MTT_OP_flash_backward] = textbook_flash_backward,
    [MTT_OP_embed_backward] = textbook_embed_backward,
    [MTT_OP_adamw] = textbook_adamw,
};

/* -------------------------------------------------------------------------- operations, in lock-step ---- */

typedef struct lock_step {
    setup s;
    mtt_schedule *host, *device;
    char *host_arena, *device_arena;
    void *context;
    int once; /* 1 = no shape is tried again */
} lock_step;

enum { TRIES = 500 };                      /* of every kind, each over another shape */
static int tried[MTT_OP_KIND_COUNT], distinct[MTT_OP_KIND_COUNT];
static double worst[MTT_OP_KIND_COUNT][PRECISION_COUNT]; /* error over the allowed error */
static int64_t eights[MTT_OP_KIND_COUNT], neighbours[MTT_OP_KIND_COUNT]; /* in 8 bits, see compare_eight */
static void *contexts[PRECISION_COUNT]; /* one for each precision, open until all operations are done */

/* Whether the device takes a precision: it says what to take in its place. */
static int takes(mtt_precision precision)
{
    const mtt_model_desc desc = {.d_model = 16, .heads = 1};
    mtt_policy policy = {.precision = precision, .device = MTT_DEVICE_CUDA};
    mtt_model_desc model;
    void *context;
    check(mtt_model_resolve(&env, &desc, &model) == MTT_OK &&
              mtt_policy_resolve(&env, &policy, &model, 1, 1, &policy) == MTT_OK,
          "%s", env.error);
    if (cuda.open(&env, &cuda, &policy, &context) != MTT_OK) return 0;
    cuda.close(context);
    return 1;
}

static void *context_of(const mtt_policy *policy)
{
    void **context = &contexts[policy->precision];
    if (!*context) check(cuda.open(&env, &cuda, policy, context) == MTT_OK, "open: %s", env.error);
    return *context;
}

static void close_contexts(void)
{
    int i;
    for (i = 0; i < PRECISION_COUNT; i++)
        if (contexts[i]) cuda.close(contexts[i]);
}

static void bind_arena(mtt_schedule *s, char *arena)
{
    int which, i;
    for (which = 0; which < MTT__PROGRAMS; which++)
        for (i = 0; i < s->programs[which].tensor_count; i++)
            s->programs[which].tensors[i]->data = arena + s->programs[which].tensors[i]->offset;
    for (which = 0; which < MTT__PROGRAMS; which++)
        for (i = 0; i < s->programs[which].tensor_count; i++) {
            mtt_tensor *t = s->programs[which].tensors[i];
            if (t->entry >= 0) t->scale = (mtt_scale *)s->programs[which].scales->data + t->entry;
        }
}

/* Two schedules that are the same, on the host and on the device. */
static lock_step bind_lock_step(const setup *s, mtt_schedule *host, mtt_schedule *device)
{
    lock_step l;
    new_case();
    memset(&l, 0, sizeof(l));
    l.s = *s;
    l.host = host;
    l.device = device;
    l.host_arena = calloc(1, mtt__arena_bytes(l.host));
    l.context = context_of(&l.host->policy);
    check(cuda.alloc(l.context, MTT_CARD, mtt__arena_bytes(l.host), (void **)&l.device_arena) == MTT_OK,
          "alloc: %s", env.error);
    bind_arena(l.host, l.host_arena);
    bind_arena(l.device, l.device_arena);
    return l;
}

/* Patterns that fit no parameter are refused: leaves out those of norms that the model lacks. */
static void freeze_what_is_there(setup *s)
{
    const char *at = s->policy.freeze;
    if (at && !strcmp(at, "*ln_1.*,*q_norm*,wte.*") && !s->model.qk_norm) at = "*ln_1.*,wte.*";
    if (at && !strncmp(at, "*ln_", 4) && s->model.norm_place == MTT_NORM_NONE) at = strchr(at, ',') + 1;
    s->policy.freeze = at;
}

static lock_step open_lock_step(const setup *s)
{
    mtt_schedule *host, *device;
    setup d = *s;
    d.policy.device = MTT_DEVICE_CUDA;
    freeze_what_is_there(&d);
    check(mtt_schedule_create(&env, &s->model, &d.policy, s->batch, s->seq_len, &host) == MTT_OK &&
              mtt_schedule_create(&env, &s->model, &d.policy, s->batch, s->seq_len, &device) == MTT_OK,
          "schedule: %s", env.error);
    return bind_lock_step(&d, host, device);
}

static void close_lock_step(lock_step *l)
{
    cuda.release(l->context, MTT_CARD, l->device_arena);
    mtt_schedule_destroy(l->host);
    mtt_schedule_destroy(l->device);
    free(l->host_arena);
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

/* Weights with their rests, first moments of the size of gradients and second ones of their squares, each
   group in two sizes. */
static void fill_compact(const setup *s, const mtt__program *p)
{
    const mtt_tensor *master = p->optim[MTT__MASTER], *m = p->optim[MTT__FIRST], *v = p->optim[MTT__SECOND];
    int i;
    for (i = 0; i < p->parameter_count; i++) {
        const mtt__parameter *q = &p->parameters[i];
        int64_t count = q->part.elements, first = q->part.first, k; /* none if it is frozen */
        float *values = malloc((size_t)count * sizeof(float));
        for (k = 0; k < count; k++) values[k] = q->weight->dims > 1 ? 0.05f * noise() : 0.7f + 0.3f * noise();
        if (master)
            mtt__split_weights(values, count, s->policy.precision == MTT_FP16, NULL,
                               (uint16_t *)q->weight->data, (uint8_t *)master->data + first);
        for (k = 0; k < count; k++) values[k] = (below(3) ? 1e-3f : 1e-4f) * noise();
        mtt__pack_moments(values, count, 0, NULL, mtt__codes(m, first), mtt__group_scales(m, first));
        for (k = 0; k < count; k++) values[k] *= values[k];
        mtt__pack_moments(values, count, 1, NULL, mtt__codes(v, first), mtt__group_scales(v, first));
        free(values);
    }
}

/* Scales with which a part of the values are clipped, or many become subnormal. */
static void fill_scales(const mtt_tensor *scales)
{
    int64_t i;
    for (i = 0; i < scales->shape[0]; i++) {
        mtt_scale *scale = (mtt_scale *)scales->data + i;
        int weight = i % MTT__LAYER_SCALES >= MTT__LAYER_SCALES / 2 ||
                     i + MTT__MODEL_SCALES > scales->shape[0];
        scale->scale = ldexpf(weight ? 256 : 16, below(2) ? 1 + below(2) : below(6) - 2);
        scale->inverse = 1 / scale->scale;
    }
}

/* Some parameters are in groups. */
static void set_groups(mtt_schedule *s)
{
    mtt__program *p = &s->programs[MTT__TRAIN];
    int i, k;
    for (i = 1; i < p->parameter_count; i += 2) p->parameters[i].part.group = i % (2 * MTT_MOST_GROUPS + 2);
    for (i = 0; i < p->op_count; i++)
        for (k = 0; k < p->ops[i].parameters; k++)
            p->ops[i].parts[k].group = p->parameters[p->ops[i].parts[k].number].part.group;
}

static void fill_state(const lock_step *l, int which)
{
    const setup *s = &l->s;
    const mtt__program *p = &l->host->programs[which];
    mtt_control *control = (mtt_control *)p->control->data;
    mtt_counters *counters = (mtt_counters *)p->counters->data;
    int i;
    for (i = 0; i < p->tensor_count; i++) {
        const mtt_tensor *t = p->tensors[i];
        if (!t->persistent || t == p->workspace) continue;
        if (t == p->angles) {
            int64_t k;
            for (k = 0; k < mtt__elements(t); k += 2) {
                double angle = 6.283185307179586 * (double)below(1 << 20) / (1 << 20);
                ((float *)t->data)[k] = (float)cos(angle), ((float *)t->data)[k + 1] = (float)sin(angle);
            }
        } else if (t->category == MTT_WEIGHTS || t == p->positions)
            fill_tensor(t, t->dims > 1 ? 0.05f : 0.3f, t->dims > 1 ? 0 : 0.7f);
        else memset(t->data, 0, t->bytes);
        if (t->category == MTT_GRADIENTS) fill_tensor(t, 0.1f, 0);
    }
    if (s->policy.state == MTT_STATE_COMPACT) fill_compact(s, p);
    set_groups(l->host);
    set_groups(l->device);
    mtt__list_ranges(&l->device->programs[which], (mtt_range *)p->ranges->data);
    random_tokens(s, (int32_t *)p->tokens->data, (int32_t *)p->targets->data, (int)p->shape.rows);
    control->seed = random_bits();
    control->micro_batch = random_bits();
    control->lr = 1e-2f;
    control->beta1 = 0.9f;
    control->beta2 = 0.99f;
    control->eps = 1e-8f;
    for (i = 0; i < 2 * MTT_MOST_GROUPS + 2; i++) {
        control->rates[i].lr = i < 2 ? 1 : 0.5f + (float)i / 4;
        control->rates[i].decay = i % 2 ? 0 : i < 2 ? 0.1f : 0.3f;
    }
    control->clip = below(2) ? 1.0f : 0;
    control->targets = p->shape.rows;
    control->scaling = mtt__precisions[s->policy.precision].scaled;
    if (p->scales) fill_scales(p->scales);
    control->row = (int32_t)(p->shape.rows - 1);
    counters->loss_scale = control->scaling ? 1024.0f : 1.0f;
    counters->loss = 3.5;
    counters->hits = 2;
    counters->updates = below(3);
}

static double *widen(const mtt_tensor *t)
{
    int64_t count = mtt__elements(t), i;
    double *wide = malloc((size_t)count * sizeof(double));
    MTT__OMP(omp parallel for if (count > 10000))
    for (i = 0; i < count; i += 256) {
        float values[256];
        int64_t n = count - i < 256 ? count - i : 256, k;
        mtt__load(t, i, n, values);
        for (k = 0; k < n; k++) wide[i + k] = (double)values[k];
    }
    return wide;
}

/* Operands' numbers before the operation runs, from operand `first` on; outputs too, since it may add to them
   or leave some of them alone. */
static double **widen_all(mtt_tensor **tensors, int first, int count)
{
    double **wide = calloc((size_t)count + 1, sizeof(*wide));
    int i;
    for (i = first; i < count && tensors; i++)
        if (tensors[i] && tensors[i]->dtype != MTT_I32 && tensors[i]->dtype != MTT_U8)
            wide[i] = widen(tensors[i]);
    return wide;
}

static void free_all(double **wide, int count)
{
    int i;
    for (i = 0; i < count; i++) free(wide[i]);
    free(wide);
}

static int is_8_bit(const mtt_tensor *t)
{
    return t && (t->dtype == MTT_F8_E4M3 || t->dtype == MTT_F8_E5M2);
}

/* Whether an operation reads or makes 8 bits. */
static int has_eight(const mtt_op *op)
{
    int i, found = op->kind == MTT_OP_rescale;
    for (i = 0; i < op->inputs + op->outputs; i++) found |= is_8_bit(op->operands[i]);
    return found;
}

static textbook open_textbook(const lock_step *l, const mtt_op *op, int exact)
{
    int operands = op->inputs + op->outputs;
    textbook t = {.op = op, .precision = l->s.policy.precision, .exact = exact};
    t.eight = is_8_bit(op->operands[op->kind == MTT_OP_linear_backward_weight]); /* x may be absent */
    if (t.precision == MTT_FP8) t.precision = MTT_BF16;
    t.fast = op->kind != MTT_OP_linear_backward_input && op->kind != MTT_OP_linear_backward_weight;
    t.values = widen_all(op->operands, 0, operands);
    t.magnitudes = widen_all(op->operands, exact ? op->inputs : operands, operands);
    t.gradients = widen_all(op->gradients, 0, op->parameters);
    t.weights = widen_all(op->weights, 0, op->parameters);
    t.weight_magnitudes = widen_all(exact ? op->weights : NULL, 0, op->parameters);
    return t;
}

static void close_textbook(textbook *t)
{
    int operands = t->op->inputs + t->op->outputs;
    free_all(t->values, operands);
    free_all(t->magnitudes, operands);
    free_all(t->gradients, t->op->parameters);
    free_all(t->weights, t->op->parameters);
    free_all(t->weight_magnitudes, t->op->parameters);
}

typedef struct size_of_error {
    double mean, largest; /* mean: root of the mean square */
} size_of_error;

/* Of the differences in one of `parts` groups of columns, from b or, without one, from 0. NaN where one of
   them is and the other is not; pairs of NaN are what no operation has written. */
static size_of_error difference(const double *a, const double *b, int64_t count, int64_t width, int parts,
                                int part)
{
    int64_t columns = width / parts, compared = 0, undefined = 0, row;
    double squares = 0, largest = 0;
    MTT__OMP(omp parallel for reduction(+ : squares, compared, undefined) reduction(max : largest) \
             if (count > 10000))
    for (row = 0; row < count; row += width) {
        int64_t i;
        for (i = row + part * columns; i < row + (part + 1) * columns; i++) {
            double d = b ? a[i] - b[i] : a[i];
            if (isnan(d) && isnan(a[i]) && (!b || isnan(b[i]))) continue;
            compared++;
            if (b && a[i] == b[i]) continue;
            squares += d * d;
            undefined += isnan(d);
            if (fabs(d) > largest) largest = fabs(d);
        }
    }
    return (size_of_error){compared ? sqrt(squares / (double)compared) : 0, undefined ? NAN : largest};
}

static int is_16_bit(const mtt_tensor *t)
{
    return t->dtype == MTT_BF16_BITS || t->dtype == MTT_F16_BITS;
}

/* Whether tensor cores or cuBLAS have a part in it. */
static int is_product(const mtt_op *op)
{
    switch (op->kind) {
    case MTT_OP_linear:
    case MTT_OP_linear_gelu:
    case MTT_OP_linear_rotary:
    case MTT_OP_linear_adapted:
    case MTT_OP_linear_backward_input:
    case MTT_OP_linear_backward_gelu:
    case MTT_OP_linear_backward_weight:
    case MTT_OP_chunked_loss:
    case MTT_OP_attention_scores:
    case MTT_OP_attention_values:
    case MTT_OP_attention_values_backward:
    case MTT_OP_attention_scores_backward:
    case MTT_OP_flash:
    case MTT_OP_flash_backward: return 1;
    default: return 0;
    }
}

/* The tolerance. A device's error and the CPU's may each be twice that of the simple reference, in the
   mean and at worst. Where the plain one happens to round well, or adds in an order in which errors cancel,
   that would be too little: besides, SLACK units of the last place of FP32 (2^-23) of the result's magnitude
   are allowed, the sum of the absolute values of the terms that were added. A sum's error is proportional to
   its magnitude, not to its value: where a gradient is exactly 0, one order of adding may give 0 and another
   1e-8. Luck also decides the error of a few elements. Where an output has fewer than FEW, the plain error
   counts as no less than a unit roundoff (half a unit of the last place) of the coarsest rounding on the way
   to it, times the magnitude. Nothing here depends on a value that can cancel to zero, or on the GPU. */
enum { SLACK = 4, FEW = 4096 };

static const double UNIT[PRECISION_COUNT] = {0x1p-24, 0x1p-11, 0x1p-9, 0x1p-12, 0x1p-9};

static double least_plain_error(const mtt_op *op, const mtt_tensor *out, int64_t elements,
                                mtt_precision precision)
{
    int between = op->kind == MTT_OP_chunked_loss || op->kind == MTT_OP_linear_backward_gelu || /* summed */
                  (op->kind == MTT_OP_norm_backward && out == MTT_OPERANDS_OF(norm_backward, op)->d_bias);
    int rounded =
        is_16_bit(out) || (between && precision != MTT_FP32) || (precision == MTT_TF32 && is_product(op));
    int chunks = op->kind == MTT_OP_chunked_loss && has_eight(op) && out->role != MTT__A_ROW_LOSS &&
                 mtt__rows(MTT_OPERANDS_OF(chunked_loss, op)->logits) < op->shape->rows;
    /* a gradient of logits that is rounded to the other number moves a row of each result */
    if (chunks) elements = mtt__min(elements, (int64_t)op->shape->rows * op->shape->vocab);
    if (elements >= FEW) return 0;
    if (op->kind == MTT_OP_chunked_loss && has_eight(op) && out->role != MTT__A_ROW_LOSS)
        return chunks ? 0x1p-3 : 0x1p-9;
    if (is_product(op) && is_8_bit(op->operands[0]) && !is_16_bit(out)) return ldexp(1, -eight_bits);
    return UNIT[rounded ? precision : MTT_FP32];
}

/* Groups of columns that are numbers of different kinds and sizes. */
static int parts_of(const mtt_op *op, const mtt_tensor *out)
{
    int gradients = op->kind == MTT_OP_flash_backward || op->kind == MTT_OP_attention_values_backward ||
                    op->kind == MTT_OP_attention_scores_backward;
    if (out->role == MTT__A_ROW_LOSS) return 3;
    if (out->role == MTT__A_LN_1_STATS || out->role == MTT__A_LN_2_STATS || out->role == MTT__A_LN_F_STATS)
        return 2;
    if (!gradients || out->dims != 2) return 1;
    return op->shape->heads_kv == op->shape->heads ? 3 : op->shape->heads + 2 * op->shape->heads_kv;
}

static void judge(const setup *s, const mtt_op *op, const mtt_tensor *out, const char *whose,
                  size_of_error error, size_of_error plain, size_of_error magnitude, double least)
{
    double mean = 2 * fmax(plain.mean, least * magnitude.mean) + SLACK * 0x1p-23 * magnitude.mean;
    /* rounded twice: luck decides whether one of the few largest elements meets both roundings */
    double twice = op->kind == MTT_OP_linear_adapted && is_16_bit(out) ? UNIT[s->policy.precision] : 0;
    double largest = 2 * fmax(plain.largest, fmax(least, twice) * magnitude.largest) +
                     SLACK * 0x1p-23 * magnitude.largest;
    double share;
    check(error.mean <= mean && error.largest <= largest,
          "%s of %s, %s: error %.3g (largest %.3g), plain %.3g (%.3g), allowed %.3g (%.3g), "
          "magnitude %.3g (%s)",
        out->name, mtt_op_name(op->kind), whose, error.mean, error.largest, plain.mean, plain.largest, mean,
        largest, magnitude.mean, describe(s));
    share = fmax(mean > 0 ? error.mean / mean : 0, largest > 0 ? error.largest / largest : 0);
    if (!strcmp(whose, "CUDA") && !(share <= worst[op->kind][s->policy.precision]))
        worst[op->kind][s->policy.precision] = share;
}

/* Numbers of the device and of the CPU, with the textbook's values and magnitudes. */
typedef struct compared {
    const mtt_tensor *host, *device; /* the device's are on the host by now */
    const double *exact, *plain, *magnitude;
    const double *exact_cpu; /* NULL: as the device's. Where they differ, each is of what the operation itself
                                has stored before */
} compared;

/* Whether a part must be 0: the gradients of q and k where every query attends one key. */
static int is_zero(const mtt_op *op, int part)
{
    const mtt_shape *d = op->shape;
    int first_v = d->heads_kv == d->heads ? 2 : d->heads + d->heads_kv;
    return op->kind == MTT_OP_flash_backward && part < first_v && mtt__attends_one(d);
}

static void compare_numbers(const setup *s, const mtt_op *op, compared c)
{
    int64_t count = mtt__elements(c.host), width = mtt__width(c.host), i;
    int parts = parts_of(op, c.host), part;
    mtt_tensor rounded = *c.host;
    float *values = malloc((size_t)count * sizeof(float));
    double *cpu = widen(c.host), *gpu = widen(c.device), *fair;
    rounded.data = malloc(c.host->bytes);
    for (i = 0; i < count; i++) values[i] = (float)c.plain[i];
    mtt__store(&rounded, 0, count, values);
    fair = widen(&rounded);
    for (part = 0; part < parts; part++) {
        size_of_error magnitude = difference(c.magnitude, NULL, count, width, parts, part);
        size_of_error plain = difference(fair, c.exact, count, width, parts, part);
        size_of_error of_cpu =
            difference(cpu, c.exact_cpu ? c.exact_cpu : c.exact, count, width, parts, part);
        size_of_error of_gpu = difference(gpu, c.exact, count, width, parts, part);
        double least = least_plain_error(op, c.host, count / parts, s->policy.precision);
        /* whether a target is the largest may turn on the last bit of two logits that this operation has
           made */
        if (op->kind == MTT_OP_chunked_loss && c.host->role == MTT__A_ROW_LOSS && part == 1) continue;
        if (is_zero(op, part)) {
            check(of_cpu.largest == 0 && of_gpu.largest == 0,
                  "%s of %s: %g and on the CPU %g where 0 is exact (%s)", c.host->name, mtt_op_name(op->kind),
                  of_gpu.largest, of_cpu.largest, describe(s));
            continue;
        }
        judge(s, op, c.host, "CPU", of_cpu, plain, magnitude, least);
        judge(s, op, c.host, "CUDA", of_gpu, plain, magnitude, least);
    }
    free(values);
    free(cpu);
    free(gpu);
    free(fair);
    free(rounded.data);
}

/* Sums in double agree to their last bits; the norm's squares are FP32 sums of a few numbers each, compared
   with the sum in double. */
static void compare_counters(const setup *s, const mtt_op *op, const mtt_counters *a, const mtt_counters *b,
                             double **gradients)
{
    double norm = 0, fair, error;
    int64_t k;
    int i;
    check(fabs(a->loss - b->loss) <= 1e-13 * fabs(b->loss) && a->targets == b->targets &&
              a->hits == b->hits && a->updates == b->updates && a->steps == b->steps &&
              a->loss_scale == b->loss_scale && a->step_scale == b->step_scale && a->skipped == b->skipped &&
              a->good_steps == b->good_steps && a->clipped == b->clipped &&
              fabsf(a->update_step - b->update_step) <= 0x1p-22f * fabsf(b->update_step) &&
              fabsf(a->update_correction - b->update_correction) <= 0x1p-22f * b->update_correction,
          "counters, loss %.17g, on the CPU %.17g (%s)", a->loss, b->loss, describe(s));
    if (op->kind != MTT_OP_grad_norm) return;
    for (i = 0; i < op->parameters; i++)
        for (k = 0; k < mtt__elements(op->gradients[i]); k++) norm += gradients[i][k] * gradients[i][k];
    norm = sqrt(norm) / (double)a->step_scale;
    fair = fabs(b->grad_norm - norm);
    error = fabs(a->grad_norm - norm);
    check(error <= 2 * fair + SLACK * 0x1p-23 * norm,
          "gradient norm %.9g, on the CPU %.9g, exactly %.9g (%s)", a->grad_norm, b->grad_norm, norm,
          describe(s));
    check(fabs((double)a->gradient_scale - (double)b->gradient_scale) <=
              (norm > 0 ? (error + fair) / norm + SLACK * 0x1p-23 : 0) * (double)b->gradient_scale,
          "gradient scale %.9g, on the CPU %.9g (%s)", (double)a->gradient_scale, (double)b->gradient_scale,
          describe(s));
}

/* The device's numbers on the host. */
static mtt_tensor downloaded(const lock_step *l, const mtt_tensor *device)
{
    mtt_tensor copy = *device;
    copy.data = malloc(device->bytes);
    check(cuda.download(l->context, copy.data, device->data, device->bytes) == MTT_OK, "download: %s",
          env.error);
    return copy;
}

/* The part of a tensor that the optimizer keeps for all parameters, as a tensor like the parameter's
   weight. */
static mtt_tensor part_of_kept(const mtt_tensor *kept, const mtt_tensor *weight, int64_t first)
{
    mtt_tensor part = *weight;
    part.dtype = kept->dtype;
    part.bytes = mtt__bytes_of(kept->dtype, (size_t)mtt__elements(weight));
    part.data = (char *)kept->data + mtt__bytes_of(kept->dtype, (size_t)first);
    memcpy(part.name, kept->name, sizeof(part.name));
    return part;
}

/* Weights, moments and masters after the update, parameter by parameter. */
static void compare_update(lock_step *l, const mtt_op *op, const mtt_op *device, const textbook *exact,
                           const textbook *plain)
{
    int i, k;
    mtt_tensor kept[3];
    for (k = 0; k < 3; k++)
        if (op->operands[op->inputs + k]) kept[k] = downloaded(l, device->operands[op->inputs + k]);
    for (i = 0; i < op->parameters; i++) {
        int64_t first = op->parts[i].first;
        mtt_tensor weight = downloaded(l, device->weights[i]);
        compare_numbers(&l->s, op, (compared){op->weights[i], &weight, exact->weights[i], plain->weights[i],
                                              exact->weight_magnitudes[i], NULL});
        free(weight.data);
        for (k = 0; k < 3; k++) {
            int operand = op->inputs + k;
            mtt_tensor host_part, part;
            if (!op->operands[operand]) continue;
            host_part = part_of_kept(op->operands[operand], op->weights[i], first);
            part = part_of_kept(&kept[k], op->weights[i], first);
            compare_numbers(&l->s, op,
                            (compared){&host_part, &part, exact->values[operand] + first,
                                       plain->values[operand] + first, exact->magnitudes[operand] + first,
                                       NULL});
        }
    }
    for (k = 0; k < 3; k++)
        if (op->operands[op->inputs + k]) free(kept[k].data);
}

static int64_t compact_numbers,
    compact_others; /* numbers of the compact state, and those rounded otherwise */

/* How many moments of a parameter are neither the CPU's nor next to them: a unit of the code apart, and what
   a scale's unit and the arithmetic add. */
static int wrong_moments(const mtt_tensor *host, const mtt_tensor *device, int64_t first, int64_t count,
                         int second)
{
    const uint8_t *code = mtt__codes(host, first), *device_code = mtt__codes(device, first);
    const uint16_t *scales = mtt__group_scales(host, first);
    const uint16_t *device_scales = mtt__group_scales(device, first);
    float *ours = malloc((size_t)count * sizeof(float)), *cpus = malloc((size_t)count * sizeof(float));
    int64_t i;
    int wrong = 0;
    mtt__unpack_moments(code, scales, count, second, cpus);
    mtt__unpack_moments(device_code, device_scales, count, second, ours);
    for (i = 0; i < count; i++) {
        double scale = (double)mtt__from_scale(scales[i / MTT__GROUP]), a = second ? sqrt(ours[i]) : ours[i];
        double b = second ? sqrt(cpus[i]) : cpus[i], r = fabs(b) / scale,
               y = fmin(1, 2 * r / (1 + r) + 1.0 / 127);
        double unit = second ? 1.0 / 255 : 2 / ((2 - y) * (2 - y)) / 127;
        int scale_off = scales[i / MTT__GROUP] - device_scales[i / MTT__GROUP];
        wrong += !(abs(scale_off) <= 1) || (scale > 0 && !(fabs(a - b) <= (unit + 0x1p-10) * 1.0001 * scale));
        compact_others += code[i] != device_code[i];
    }
    free(ours);
    free(cpus);
    return wrong;
}

/* The same for the weights with their rests, or in FP32. lr is 0.01, and m over the root of v below 10. */
static int wrong_weights(const mtt_tensor *host, const mtt_tensor *device, const uint8_t *rest,
                         const uint8_t *device_rest, int64_t count)
{
    float *ours = malloc((size_t)count * sizeof(float)), *cpus = malloc((size_t)count * sizeof(float));
    int fp16 = host->dtype == MTT_F16_BITS, wrong = 0, exponent;
    int64_t i;
    if (rest) {
        mtt__join_weights((const uint16_t *)host->data, rest, count, fp16, cpus);
        mtt__join_weights((const uint16_t *)device->data, device_rest, count, fp16, ours);
    } else {
        memcpy(cpus, host->data, host->bytes);
        memcpy(ours, device->data, host->bytes);
    }
    for (i = 0; i < count; i++) {
        double unit;
        frexp((double)cpus[i], &exponent);
        unit = rest ? ldexp(1, (fp16 && exponent < -13 ? -13 : exponent) - (fp16 ? 19 : 16)) : 0;
        wrong += !(fabs((double)ours[i] - (double)cpus[i]) <= unit + 0x1p-21 * (fabs((double)cpus[i]) + 0.1));
        compact_others += rest && ours[i] != cpus[i];
    }
    compact_numbers += (rest ? 3 : 2) * count;
    free(ours);
    free(cpus);
    return wrong;
}

/* The compact state after the update, the device's beside the CPU's, which test_model.c compares with AdamW
   in double. Both round with the same random bits what FP32 arithmetic left a little different, so few
   numbers differ, and those are neighbours. */
static void compare_compact(lock_step *l, const mtt_op *op, const mtt_op *device)
{
    const mtt_op_adamw *o = MTT_OPERANDS_OF(adamw, op), *d = MTT_OPERANDS_OF(adamw, device);
    mtt_tensor m = downloaded(l, d->m), v = downloaded(l, d->v), master = {.data = NULL};
    int i;
    if (o->master) master = downloaded(l, d->master);
    for (i = 0; i < op->parameters; i++) {
        int64_t first = op->parts[i].first;
        int64_t count = mtt__elements(op->weights[i]);
        mtt_tensor weight = downloaded(l, device->weights[i]);
        int wrong = wrong_moments(o->m, &m, first, count, 0) + wrong_moments(o->v, &v, first, count, 1);
        wrong += wrong_weights(op->weights[i], &weight,
                               o->master ? (const uint8_t *)o->master->data + first : NULL,
                               o->master ? (const uint8_t *)master.data + first : NULL, count);
        check(!wrong, "%d numbers of %s in the compact state are not the CPU's nor next to them (%s)", wrong,
              op->weights[i]->name, describe(&l->s));
        free(weight.data);
    }
    free(m.data);
    free(v.data);
    free(master.data);
}

/* One addition an element leaves nothing to the order. */
static void compare_sums(const lock_step *l, const mtt_op *host, const mtt_op *device)
{
    int i;
    for (i = 0; i < host->parameters; i++) {
        mtt_tensor copy = downloaded(l, device->sums[i]);
        check(!memcmp(copy.data, host->sums[i]->data, copy.bytes), "%s: other bits than the CPU's (%s)",
              host->sums[i]->name, describe(&l->s));
        free(copy.data);
    }
}

static void compare_output(lock_step *l, const mtt_op *op, int operand, const mtt_tensor *device,
                           const textbook *exact, const textbook *plain)
{
    const mtt_tensor *host = op->operands[operand];
    mtt_tensor copy = downloaded(l, device);
    if (host->dtype == MTT_U8 && op->kind != MTT_OP_choose_id)
        compare_counters(&l->s, op, (const mtt_counters *)copy.data, (const mtt_counters *)host->data,
                         exact->gradients);
    else if (TEXTBOOK[op->kind])
        compare_numbers(&l->s, op, (compared){host, &copy, exact->values[operand], plain->values[operand],
                                              exact->magnitudes[operand], NULL});
    else
        check(!memcmp(copy.data, host->data, host->bytes), "%s of %s: other bits than the CPU's (%s)",
              host->name, mtt_op_name(op->kind), describe(&l->s));
    free(copy.data);
}

/* Whether no other of its kind had the same operands' shapes and types, batch, heads and settings; counts it
   if so. Of a kind with many shapes, such as the 33,000 of linear, ever fewer are taken: one in two after
   4,000, one in three after 6,000. */
static int is_new(const mtt_op *op)
{
    enum { SLOTS = 1 << 18, MANY = 4 * TRIES };
    static uint64_t seen[SLOTS];
    static int met[MTT_OP_KIND_COUNT];
    const mtt_shape *d = op->shape;
    uint64_t hash = 1469598103934665603u;
    int64_t key[] = {op->kind,  d->batch,       d->seq_len,     d->heads, d->heads_kv, d->rotary_interleaved,
                     d->window, d->dropout > 0, op->adds};
    int i, k;
#define MIX(x) hash = (hash ^ (uint64_t)(x)) * 1099511628211u, hash ^= hash >> 29
    for (i = 0; i < (int)MTT__LENGTH(key); i++) MIX(key[i]);
    for (i = 0; i < op->inputs + op->outputs; i++) {
        MIX(op->operands[i] ? 1 + op->operands[i]->transposed : 0);
        for (k = 0; op->operands[i] && k < op->operands[i]->dims; k++)
            MIX(op->operands[i]->shape[k] * 8 + op->operands[i]->dtype);
    }
    for (i = 0; i < op->parameters && op->sums; i++) MIX(mtt__elements(op->sums[i]));
#undef MIX
    for (i = (int)(hash % SLOTS); seen[i] && seen[i] != hash; i = (i + 1) % SLOTS) {}
    if (seen[i]) return 0;
    seen[i] = hash;
    if (++met[op->kind] > MANY && hash / SLOTS % (uint64_t)(met[op->kind] / MANY)) return 0;
    distinct[op->kind]++;
    return 1;
}

/* Sends all operands to the device. Those that the operation begins to write hold NaN. */
static void upload_operands(lock_step *l, const mtt_op *host, const mtt_op *device, int i)
{
    int o;
    for (o = 0; o < host->inputs + host->outputs; o++) {
        mtt_tensor *t = host->operands[o];
        if (!t) continue;
        if (o >= host->inputs && t->first == i && !t->persistent) memset(t->data, 0xff, t->bytes);
        cuda.upload(l->context, device->operands[o]->data, t->data, t->bytes);
    }
    for (o = 0; o < host->parameters; o++)
        cuda.upload(l->context, device->gradients[o]->data, host->gradients[o]->data,
                    host->gradients[o]->bytes);
    for (o = 0; o < host->parameters && host->weights; o++)
        cuda.upload(l->context, device->weights[o]->data, host->weights[o]->data, host->weights[o]->bytes);
    for (o = 0; o < host->parameters && host->sums; o++) {
        if (!host->later) memset(host->sums[o]->data, 0xff, host->sums[o]->bytes);
        cuda.upload(l->context, device->sums[o]->data, host->sums[o]->data, host->sums[o]->bytes);
    }
}

/* The i-th operation of a program's list, of a later micro-batch's where `later` is set. */
static mtt_op *op_at(const mtt_schedule *s, int which, int i, int later)
{
    const mtt__program *p = &s->programs[which];
    return later && i < p->step_begin ? &p->later_ops[i] : &p->ops[i];
}

static mtt__cpu host_cpu; /* the context of a CPU's operations */

/* The host's result. A CPU does not fuse linear_backward_gelu in 8 bits, so here a tensor in BF16 lies
   between its parts. */
static void run_on_host(mtt_op *op)
{
    const mtt_op_linear_backward_gelu *o = MTT_OPERANDS_OF(linear_backward_gelu, op);
    mtt_op part = *op;
    mtt_tensor between;
    mtt_op_linear_backward_input product = {NULL, NULL, &between};
    mtt_op_activation_backward gelu = {&between, NULL, NULL, NULL, NULL};
    if (op->kind != MTT_OP_linear_backward_gelu || !o->dx_t) {
        mtt__cpu_run(&host_cpu, op, 1);
        return;
    }
    product.dy = o->dy, product.weight = o->weight;
    gelu.x = o->pre, gelu.dx = o->dx, gelu.dx_t = o->dx_t, gelu.y_t = o->y_t;
    between = *o->pre;
    between.data = malloc(between.bytes);
    part.kind = MTT_OP_linear_backward_input, part.inputs = 2, part.outputs = 1;
    part.operands = (mtt_tensor **)(void *)&product;
    mtt__cpu_run(&host_cpu, &part, 1);
    part.kind = MTT_OP_activation_backward, part.inputs = 2, part.outputs = 3;
    part.operands = (mtt_tensor **)(void *)&gelu;
    mtt__cpu_run(&host_cpu, &part, 1);
    free(between.data);
}

/* What a tensor may record of the largest value and of clipped ones, given the error of each value. */
typedef struct range_of_records {
    double least, most;
    int64_t least_clipped, most_clipped;
} range_of_records;

/* The code of x as element i of a result. Gradients of logits are those of the last chunk, and beyond its
   rows those of the chunk before. */
static int rounded_code(const mtt_op *op, const mtt_tensor *out, double x, int64_t i)
{
    int64_t width = mtt__width(out), chunk = mtt__rows(out), row = i / width;
    int64_t first = (op->shape->rows - 1) / chunk * chunk;
    if (op->kind != MTT_OP_chunked_loss)
        return to_eight(x * (out->scale ? (double)out->scale->scale : 1), out->dtype);
    return logit_code(op, x, row + first < op->shape->rows ? row + first : row + first - chunk, i % width);
}

/* Results in 8 bits, with the textbook's values before they are rounded. A value may be off by what FP32 is
   off (twice the simple reference's error and SLACK units, by the value's own magnitude); gradients of
   logits also by 2^-9 of their size, since their exponential is an approximation that only 16 bits have;
   attention's and rotary's by half a unit of BF16's last place, to which they are rounded first, and terms of
   attention as in least_plain_error. The result must be the rounding of such a value. Returns what it may
   have recorded. */
static range_of_records compare_eight(const setup *s, const mtt_op *op, const char *whose,
                                      const mtt_tensor *out,
                                      const double *exact, const double *plain, const double *magnitude)
{
    const uint8_t *codes = (const uint8_t *)out->data;
    double scale = out->scale ? (double)out->scale->scale : 1, ratio = 0;
    int attention = op->kind == MTT_OP_flash_backward;
    int twice = attention || op->kind == MTT_OP_rotary_backward;
    double unit = op->kind == MTT_OP_chunked_loss ? 0x1p-9 : 0;
    int64_t count = mtt__elements(out), wrong = 0, other = 0, example = 0, i;
    range_of_records r = {0, 0, 0, 0};
    for (i = 0; i < count; i++)
        if (magnitude[i] > 0) ratio = fmax(ratio, fabs(plain[i] - exact[i]) / magnitude[i]);
    if (attention && count < 3 * FEW) ratio = fmax(ratio, 0x1p-9);
    for (i = 0; i < count; i++) {
        double size = fabs(exact[i]);
        double rounded = twice && size > 0 ? ldexp(0.5, ilogb(size) - 7) : unit * size;
        double error = (2 * ratio + SLACK * 0x1p-23) * magnitude[i] + rounded;
        int code = signed_code(codes[i]);
        if (isnan(exact[i])) { /* no operation has written it: the device neither */
            wrong += codes[i] != 0xff;
            continue;
        }
        if (code < rounded_code(op, out, exact[i] - error, i) ||
            code > rounded_code(op, out, exact[i] + error, i))
            example = i, wrong++;
        other += code != rounded_code(op, out, exact[i], i);
        r.least = fmax(r.least, size - error);
        r.most = fmax(r.most, size + error);
        r.least_clipped += (size - error) * scale > 448;
        r.most_clipped += (size + error) * scale > 448;
    }
    check(!wrong, "%s of %s, %s: %lld of %lld results are not the rounding of the textbook's; number %lld is "
          "0x%02x for %g times %g, magnitude %g, error of the plain one %.3g (%s)", out->name,
          mtt_op_name(op->kind), whose, (long long)wrong, (long long)count, (long long)example,
          codes[example], exact[example], scale, magnitude[example], ratio, describe(s));
    if (!strcmp(whose, "CUDA")) eights[op->kind] += count, neighbours[op->kind] += other;
    return r;
}

/* y_t is y's transpose, byte for byte, and its padding is 0. y may be absent. */
static void check_transpose(const setup *s, const mtt_op *op, const char *whose, const mtt_tensor *y,
                            const mtt_tensor *y_t, int64_t rows)
{
    const uint8_t *row_major = y ? (const uint8_t *)y->data : NULL;
    const uint8_t *turned_codes = (const uint8_t *)y_t->data;
    int64_t width = mtt__rows(y_t), padded = mtt__width(y_t), wrong = 0, i, j;
    for (j = 0; j < width; j++)
        for (i = row_major ? 0 : rows; i < mtt__round_up(rows, 16); i++)
            wrong += turned_codes[j * padded + i] != (i < rows ? row_major[i * width + j] : 0);
    check(!wrong, "%s of %s, %s: %lld codes are not those of the transpose, or of its padding (%s)",
          y_t->name, mtt_op_name(op->kind), whose, (long long)wrong, describe(s));
}

/* The transposes of an operation, among its outputs `out` on the host. */
static void check_transposes(const setup *s, const mtt_op *op, const char *whose, mtt_tensor **out)
{
    const mtt_op stored_op = {.operands = out};
    int64_t rows = op->shape->rows, chunk;
    if (op->kind == MTT_OP_quantize) {
        const mtt_op_quantize *o = MTT_OPERANDS_OF(quantize, &stored_op);
        if (o->y_t) check_transpose(s, op, whose, o->y, o->y_t, mtt__rows(o->x));
    } else if (op->kind == MTT_OP_norm_backward) {
        const mtt_op_norm_backward *o = MTT_OPERANDS_OF(norm_backward, &stored_op);
        if (o->dx_t) check_transpose(s, op, whose, o->dx_8, o->dx_t, rows);
        if (o->y_t) check_transpose(s, op, whose, NULL, o->y_t, rows);
    } else if (op->kind == MTT_OP_flash_backward) {
        const mtt_op_flash_backward *o = MTT_OPERANDS_OF(flash_backward, &stored_op);
        check_transpose(s, op, whose, o->d_qkv, o->d_qkv_t, rows);
    } else if (op->kind == MTT_OP_rotary_backward) {
        const mtt_op_rotary_backward *o = MTT_OPERANDS_OF(rotary_backward, &stored_op);
        if (o->dx_t) check_transpose(s, op, whose, o->dx, o->dx_t, rows);
    } else if (op->kind == MTT_OP_activation_backward) {
        const mtt_op_activation_backward *o = MTT_OPERANDS_OF(activation_backward, &stored_op);
        if (!o->dx_t) return;
        check_transpose(s, op, whose, o->dx, o->dx_t, rows);
        if (o->y_t) check_transpose(s, op, whose, NULL, o->y_t, rows);
    } else if (op->kind == MTT_OP_linear_backward_gelu) {
        const mtt_op_linear_backward_gelu *o = MTT_OPERANDS_OF(linear_backward_gelu, &stored_op);
        check_transpose(s, op, whose, o->dx, o->dx_t, rows);
        if (o->y_t) check_transpose(s, op, whose, NULL, o->y_t, rows);
    } else if (op->kind == MTT_OP_chunked_loss) {
        const mtt_op_chunked_loss *o = MTT_OPERANDS_OF(chunked_loss, &stored_op);
        if (!o->d_logits) return;
        chunk = mtt__rows(o->logits);
        check_transpose(s, op, whose, o->d_logits, o->d_logits_t, rows % chunk ? rows % chunk : chunk);
    }
}

static int is_transpose(const mtt_op *op, int operand)
{
    const mtt_tensor *t = op->operands[operand];
    if (op->kind == MTT_OP_norm_backward) return t == MTT_OPERANDS_OF(norm_backward, op)->dx_t;
    if (op->kind == MTT_OP_flash_backward) return t == MTT_OPERANDS_OF(flash_backward, op)->d_qkv_t;
    if (op->kind == MTT_OP_rotary_backward) return t && t == MTT_OPERANDS_OF(rotary_backward, op)->dx_t;
    if (op->kind == MTT_OP_activation_backward)
        return t && t == MTT_OPERANDS_OF(activation_backward, op)->dx_t;
    if (op->kind == MTT_OP_linear_backward_gelu) return t == MTT_OPERANDS_OF(linear_backward_gelu, op)->dx_t;
    return op->kind == MTT_OP_chunked_loss && t == MTT_OPERANDS_OF(chunked_loss, op)->d_logits_t;
}

/* The table of scales after an operation. What it records joins what was there; other entries stay. */
static void compare_records(const setup *s, const mtt_op *op, const char *whose, const mtt_scale *before,
                            const mtt_scale *after, int64_t count, const range_of_records *ranges)
{
    int *recorded = calloc((size_t)count, sizeof(int)), i;
    const mtt_op_chunked_loss *loss = MTT_OPERANDS_OF(chunked_loss, op);
    int64_t entry;
    for (i = op->inputs; i < op->inputs + op->outputs; i++) {
        const mtt_tensor *t = op->operands[i];
        const range_of_records *r = &ranges[i];
        double largest, old;
        if (!is_8_bit(t) || !t->recorded) continue;
        recorded[t->entry] = 1;
        largest = (double)mtt__bits_float(after[t->entry].largest);
        old = (double)mtt__bits_float(before[t->entry].largest);
        check(largest >= fmax(old, (double)(float)r->least) && largest <= fmax(old, r->most) &&
                  after[t->entry].clipped >= before[t->entry].clipped + (uint64_t)r->least_clipped &&
                  after[t->entry].clipped <= before[t->entry].clipped + (uint64_t)r->most_clipped &&
                  after[t->entry].scale == before[t->entry].scale &&
                  after[t->entry].inverse == before[t->entry].inverse,
              "%s of %s, %s: records %.9g and %u clipped, after %.9g and %u; wanted %.9g to %.9g and %lld to "
              "%lld more (%s)", t->name, mtt_op_name(op->kind), whose, largest, after[t->entry].clipped, old,
              before[t->entry].clipped, r->least, r->most, (long long)r->least_clipped,
              (long long)r->most_clipped, describe(s));
    }
    for (entry = 0; entry < count; entry++) {
        mtt_scale wanted = before[entry];
        if (recorded[entry]) continue;
        if (op->kind == MTT_OP_chunked_loss && loss->d_logits && entry == loss->d_logits->entry) {
            double factor = (double)mtt__counters(loss->counters)->loss_scale /
                            (double)mtt__control(loss->control)->targets;
            wanted.scale = (float)ldexp(1, ilogb(32768 / factor));
            wanted.inverse = 1 / wanted.scale;
        }
        check(!memcmp(&after[entry], &wanted, sizeof(wanted)),
              "scale %lld after %s, %s: %g, largest %g, %u clipped; wanted %g, %g, %u (%s)", (long long)entry,
              mtt_op_name(op->kind), whose, (double)after[entry].scale,
              (double)mtt__bits_float(after[entry].largest), after[entry].clipped, (double)wanted.scale,
              (double)mtt__bits_float(wanted.largest), wanted.clipped, describe(s));
    }
    free(recorded);
}

/* The next scale is the largest power of two with which the largest value is at most 224, within 2^-60 and
   2^60; it stays where that is 0 or not finite, and after a skipped step. */
static void compare_rescale(const setup *s, const char *whose, const mtt_scale *before,
                            const mtt_scale *after, int64_t count, const mtt_counters *counters)
{
    int64_t clipped = 0, i;
    for (i = 0; i < count; i++) {
        double largest = (double)mtt__bits_float(before[i].largest), scale = (double)before[i].scale;
        if (largest > 0 && largest < 3e38 && !counters->skipped)
            scale = ldexp(1, (int)fmax(-60, fmin(60, ilogb((double)(224 / (float)largest)))));
        clipped += before[i].clipped;
        check((double)after[i].scale == scale && (double)after[i].inverse == 1 / scale && !after[i].largest &&
                  !after[i].clipped,
              "rescale, %s: %g for the largest %g, wanted %g (%s)", whose, (double)after[i].scale, largest,
              scale, describe(s));
    }
    check(counters->clipped == clipped, "rescale, %s: %lld clipped, wanted %lld (%s)", whose,
          (long long)counters->clipped, (long long)clipped, describe(s));
}

/* What was recorded before the operation: nothing, something, or what no step should leave. */
static void scatter_records(mtt_scale *scales, int64_t count, int anything)
{
    static const float odd[] = {0, INFINITY, NAN, 1e-38f, 1e-42f, 3.4e38f, 224, 223.99998f, 448};
    int64_t i;
    for (i = 0; i < count; i++) {
        float largest = below(2) ? 0 : fabsf(noise());
        if (anything && below(2)) largest = odd[below((int)MTT__LENGTH(odd))];
        scales[i].largest = mtt__float_bits(largest);
        scales[i].clipped = below(2) ? 0 : (uint32_t)below(1000);
    }
}

/* One operation with 8 bits, on operands that are on the device already. The device and the CPU share a
   textbook unless it takes what each of them has stored. */
static void step_eight(lock_step *l, mtt_op *host, const mtt_op *device, const mtt__program *host_program,
                       const mtt__program *device_program)
{
    enum { MOST = 16, CPU = 0, CUDA = 1 };
    static const char *const WHOSE[] = {"CPU", "CUDA"};
    mtt_scale *table = (mtt_scale *)host_program->scales->data;
    size_t bytes = host_program->scales->bytes;
    int64_t scales = host_program->scales->shape[0];
    int operands = host->inputs + host->outputs, o, who;
    int many = host->kind == MTT_OP_chunked_loss || host->kind == MTT_OP_norm_backward ||
               host->kind == MTT_OP_flash;
    int first = many ? CPU : CUDA;
    mtt_tensor copies[MOST], *theirs[MOST];
    mtt_scale *before = malloc(bytes), *after[2] = {table, malloc(bytes)};
    range_of_records ranges[2][MOST];
    textbook exact[2], plain[2];
    mtt_status status;
    new_case();
    tried[host->kind]++;
    scatter_records(table, scales, host->kind == MTT_OP_rescale);
    if (host->kind == MTT_OP_rescale) {
        mtt__counters(host->operands[1])->skipped = below(3) == 0;
        cuda.upload(l->context, device->operands[1]->data, host->operands[1]->data, host->operands[1]->bytes);
    }
    memcpy(before, table, bytes);
    cuda.upload(l->context, device_program->scales->data, table, bytes);
    for (who = first; who <= CUDA; who++) {
        exact[who] = open_textbook(l, host, 1);
        plain[who] = open_textbook(l, host, 0);
    }
    status = cuda.run(l->context, device, 1);
    check(status == MTT_OK &&
              cuda.download(l->context, after[CUDA], device_program->scales->data, bytes) == MTT_OK,
          "%s: %s (%s)", mtt_op_name(host->kind), env.error, describe(&l->s));
    run_on_host(host);
    for (o = 0; o < operands; o++) {
        theirs[o] = host->operands[o];
        if (!theirs[o] || o < host->inputs) continue;
        copies[o] = downloaded(l, device->operands[o]);
        copies[o].scale = host->operands[o]->scale;
        theirs[o] = &copies[o];
    }
    if (host->kind == MTT_OP_rescale) {
        for (who = CPU; who <= CUDA; who++)
            compare_rescale(&l->s, WHOSE[who], before, after[who], scales,
                            mtt__counters(who ? theirs[1] : host->operands[1]));
    } else if (status == MTT_OK) {
        for (who = first; who <= CUDA; who++) {
            exact[who].given = plain[who].given =
                widen_all(who ? theirs : host->operands, host->inputs, operands);
            TEXTBOOK[host->kind](&exact[who]);
            TEXTBOOK[host->kind](&plain[who]);
        }
        for (o = host->inputs; o < operands; o++)
            if (is_8_bit(host->operands[o]))
                for (who = CPU; who <= CUDA && !is_transpose(host, o); who++) {
                    int by = who < first ? first : who;
                    ranges[who][o] = compare_eight(&l->s, host, WHOSE[who],
                                                   who ? theirs[o] : host->operands[o],
                                                   exact[by].values[o], plain[by].values[o],
                                                   exact[by].magnitudes[o]);
                }
            else if (host->operands[o])
                compare_numbers(&l->s, host, (compared){host->operands[o], theirs[o], exact[CUDA].values[o],
                                                        plain[CUDA].values[o], exact[CUDA].magnitudes[o],
                                                        exact[first].values[o]});
        for (who = CPU; who <= CUDA; who++) {
            check_transposes(&l->s, host, WHOSE[who], who ? theirs : host->operands);
            compare_records(&l->s, host, WHOSE[who], before, after[who], scales, ranges[who]);
        }
        for (who = first; who <= CUDA; who++) free_all(exact[who].given, operands);
    }
    for (o = host->inputs; o < operands; o++)
        if (host->operands[o]) free(copies[o].data);
    for (who = first; who <= CUDA; who++) {
        close_textbook(&exact[who]);
        close_textbook(&plain[who]);
    }
    free(before);
    free(after[CUDA]);
}

static void step_op(lock_step *l, int which, int i, int later)
{
    mtt_op *host = op_at(l->host, which, i, later), *device = op_at(l->device, which, i, later);
    int compact = host->kind == MTT_OP_adamw && MTT_OPERANDS_OF(adamw, host)->m->dtype == MTT_U8, o;
    textbook exact, plain;
    mtt_status status;
    if (!is_new(host) && l->once) {
        run_on_host(host); /* for those that need its results */
        return;
    }
    upload_operands(l, host, device, i);
    if (has_eight(host)) {
        step_eight(l, host, device, &l->host->programs[which], &l->device->programs[which]);
        return;
    }
    new_case();
    exact = open_textbook(l, host, 1);
    plain = open_textbook(l, host, 0);
    status = cuda.run(l->context, device, 1);
    check(status == MTT_OK, "%s: %s (%s)", mtt_op_name(host->kind), env.error, describe(&l->s));
    if (TEXTBOOK[host->kind] && !compact) {
        TEXTBOOK[host->kind](&exact);
        TEXTBOOK[host->kind](&plain);
    }
    mtt__cpu_run(&host_cpu, host, 1);
    if (status == MTT_OK && compact) compare_compact(l, host, device);
    else if (status == MTT_OK && host->kind == MTT_OP_adamw) compare_update(l, host, device, &exact, &plain);
    else if (status == MTT_OK && host->sums) compare_sums(l, host, device);
    else
        for (o = host->inputs; o < host->inputs + host->outputs && status == MTT_OK; o++)
            if (host->operands[o]) compare_output(l, host, o, device->operands[o], &exact, &plain);
    close_textbook(&exact);
    close_textbook(&plain);
    tried[host->kind]++;
}

/* The shapes of a schedule that another part runs. */
static void count_shapes(setup s, int later)
{
    mtt_schedule *all = NULL;
    int which, i;
    s.policy.device = MTT_DEVICE_CUDA;
    freeze_what_is_there(&s);
    check(mtt_schedule_create(&env, &s.model, &s.policy, s.batch, s.seq_len, &all) == MTT_OK, "schedule: %s",
          env.error);
    for (which = 0; which < MTT__PROGRAMS; which++)
        for (i = 0; i < all->programs[which].op_count; i++)
            is_new(op_at(all, which, i, later && which == MTT__TRAIN));
    mtt_schedule_destroy(all);
}

static void step_schedule(const setup *s, int once)
{
    int later = s->policy.accumulate > 1 && below(2), which, i;
    lock_step l;
    if (!mine()) {
        count_shapes(*s, later);
        return;
    }
    l = open_lock_step(s);
    l.once = once;
    for (which = 0; which < MTT__PROGRAMS; which++) {
        fill_state(&l, which);
        for (i = 0; i < l.host->programs[which].op_count; i++)
            step_op(&l, which, i, later && which == MTT__TRAIN);
    }
    close_lock_step(&l);
}

enum { SMALL_SETUPS = 1280 };

/* One layer. Even numbers: flash attention with every head width, with and without dropout and window, in
   each precision; odd numbers: plain attention. Every 29th pair has 1,025 tokens, more than any tile or block
   of threads holds. */
static setup small_setup(int number)
{
    static const char *const frozen[] = {NULL, "wte.*", NULL, "*c_*.weight", "h.0.*", NULL,
                                         "*ln_*,w*", "*ln_1.*,*q_norm*,wte.*", "*c_attn*,wte.*", NULL,
                                         "*ln_*.weight,w*"};
    static const int lengths[] = {1, 31, 33, 97};
    setup s = random_setup(number);
    int pair = number / 2, flash = number % 2 == 0;
    s.seq_len = pair % 29 == 7 ? 1025 : below(3) == 0 ? lengths[below(4)] : 1 + below(130);
    s.batch = s.seq_len > 1000 ? 1 : 1 + below(3);
    s.model.heads = s.seq_len > 1000 || (flash && pair % 32 > 7) ? 1 : 1 + below(3);
    s.model.d_model = s.model.heads * 8 * (flash ? 1 + pair % 32 : 1 + below(6));
    s.model.layers = 1;
    s.model.d_ff = 8 * (1 + below(12));
    s.model.vocab = 1 + below(260);
    s.model.max_seq = s.seq_len + below(9);
    s.model.dropout = (flash ? pair / 32 % 2 : pair % 32) ? 0.1f + 0.1f * (float)below(5) : 0;
    s.policy.precision = taken((flash ? pair / 128 : pair / 4) % 4);
    s.policy.attention = flash ? flash_of(s.model.d_model / s.model.heads) : MTT_ATTENTION_PLAIN;
    s.policy.loss = pair / 2 % 4 == 0 ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL;
    s.policy.loss_chunk_rows = 1 + below(s.batch * s.seq_len + 5);
    s.policy.window = 0;
    if ((flash ? pair / 64 : pair / 2) % 2) {
        const int windows[] = {1, 2, s.seq_len - 1, s.seq_len, s.seq_len + 3, 1 + below(s.seq_len)};
        s.policy.window = windows[below(6)];
    }
    s.policy.workspace_bytes =
        below(3) ? 0 : (size_t)2 << 20; /* the CPU's need; less of it than usual means more turns */
    s.policy.recompute = pair % 8 == 5 ? MTT_RECOMPUTE_SEGMENTS
                                       : MTT_RECOMPUTE_NONE; /* which make GELU apart from its product */
    s.policy.freeze = frozen[number % (int)MTT__LENGTH(frozen)];
    if (number % 11 == 5) s.policy.lora_rank = 8, s.policy.lora_alpha = 12, s.policy.lora_targets = "*";
    set_options(&s.model, number);
    return s;
}

enum { OPTION_SETUPS = 1600 };

/* Options of attention: groups of heads, every width of a head, positions, norms of q and k. */
static setup option_setup(int number)
{
    static const int GROUPS[] = {1, 2, 3, 4, 8};
    setup s = small_setup(4 * number + number * 7 / 5 % 4);
    int group = GROUPS[number % 5], width = number * 7 % 32 + 1;
    s.model.heads_kv = number % 5 > 2 ? 1 : 1 + below(2);
    s.model.heads = s.model.heads_kv * group;
    s.model.d_head = 8 * width;
    s.model.d_model = 8 * (1 + below(12));
    s.seq_len = number % 37 == 11 ? 300 + below(200) : 1 + below(s.model.heads * width > 60 ? 70 : 130);
    s.batch = s.seq_len > 200 ? 1 : 1 + below(2);
    s.model.max_seq = s.seq_len;
    s.model.positions = (mtt_positions)(number / 2 % 4);
    s.model.rotary_interleaved = below(2);
    s.model.rotary_factor = (float)(1 + number % 3 * 16);
    s.model.qk_norm = below(2);
    s.model.dropout = below(3) ? 0 : 0.1f + 0.1f * (float)below(5);
    s.policy.attention = number % 4 == 3 ? MTT_ATTENTION_PLAIN : flash_of(s.model.d_head);
    s.policy.precision = taken(number / 3 % 4);
    s.policy.window = below(3) ? 0 : 1 + below(s.seq_len);
    s.policy.recompute = (mtt_recompute)below(4);
    if (number % 5 == 4) s.policy.recompute = MTT_RECOMPUTE_RECURSIVE;
    return s;
}

/* Chunked losses alone: rows of logits as long as a block takes in 16 bits, as clusters of 2, 4 and 8 blocks
   take, and longer, each with more rows than the device has such clusters. */
static void long_rows(void)
{
    static const int vocabs[] = {25600, 25601, 51201, 102401, 204801}, rows[] = {140, 140, 70, 40, 10};
    static const mtt_precision precisions[] = {MTT_FP32, MTT_BF16, MTT_FP16};
    int number, which, i;
    for (number = 0; number < 15; number += each()) {
        setup s = random_setup(number);
        lock_step l;
        if (!mine()) continue;
        s.model.vocab = vocabs[number / 3];
        s.model.d_model = 8;
        s.model.heads = s.model.layers = s.batch = 1;
        s.model.d_ff = 8;
        s.model.no_head_bias = 0;
        s.seq_len = s.model.max_seq = rows[number / 3];
        s.policy.precision = taken(precisions[number % 3]);
        s.policy.loss = MTT_LOSS_CHUNKED;
        s.policy.loss_chunk_rows =
            s.seq_len - 1; /* a second chunk, of one row, adds to the first one's gradients */
        s.policy.window = 0;
        l = open_lock_step(&s);
        for (which = 0; which < MTT__PROGRAMS; which++) {
            fill_state(&l, which);
            for (i = 0; i < l.host->programs[which].op_count; i++)
                if (l.host->programs[which].ops[i].kind == MTT_OP_chunked_loss) step_op(&l, which, i, 0);
        }
        close_lock_step(&l);
    }
}

/* One model's operations of two kinds; the others are made by the host, for those that need their results. */
static void step_two(const setup *s, mtt_op_kind forward, mtt_op_kind backward, int later)
{
    lock_step l;
    const mtt__program *p;
    int i;
    if (!mine()) return;
    l = open_lock_step(s);
    p = &l.host->programs[MTT__TRAIN];
    fill_state(&l, MTT__TRAIN);
    for (i = 0; i < p->step_begin; i++)
        if (p->ops[i].kind == forward || p->ops[i].kind == backward) step_op(&l, MTT__TRAIN, i, later);
        else run_on_host(&p->ops[i]);
    close_lock_step(&l);
}

/* Attention backward with too little room for all heads' dQ: heads take turns, in places of the ring and, in
   the cases with a batch, in slices. */
static void turns_of_heads(void)
{
    static const struct {
        int seq_len, heads, heads_kv, width, batch, window;
        float dropout;
    } cases[] = {{1025, 12, 12, 64, 1, 0, 0},      {1025, 8, 8, 128, 1, 0, 0},
                 {1025, 12, 12, 64, 1, 200, 0},    {600, 12, 12, 96, 1, 0, 0},
                 {257, 4, 4, 64, 30, 0, 0},        {1024, 8, 8, 128, 1, 0, 0.1f},
                 {1024, 12, 12, 64, 1, 0, 0.5f},   {1025, 12, 12, 64, 1, 0, 0.1f},
                 {1025, 8, 8, 128, 1, 0, 0.2f},    {1024, 12, 12, 64, 1, 200, 0.1f},
                 {1024, 8, 8, 128, 1, 20, 0.2f},   {264, 4, 4, 64, 30, 0, 0.8f},
                 {257, 4, 4, 128, 30, 0, 0.3f}, /* blocks of heads that share keys hand over dK and dV: */
                 {1345, 4, 2, 64, 1, 0, 0},        {1290, 3, 1, 64, 1, 300, 0},
                 {650, 6, 2, 128, 3, 0, 0},        {645, 3, 1, 104, 7, 100, 0},
                 {650, 4, 1, 64, 2, 0, 0.2f},      {700, 4, 2, 128, 1, 0, 0.4f},
                 {700, 4, 2, 32, 2, 0, 0},         {1025, 12, 4, 64, 1, 0, 0}};
    int number;
    for (number = 0; number < (int)MTT__LENGTH(cases); number += each()) {
        setup s = random_setup(number);
        s.seq_len = s.model.max_seq = cases[number].seq_len;
        s.batch = cases[number].batch;
        s.model.layers = 1;
        s.model.heads = cases[number].heads;
        s.model.heads_kv = cases[number].heads_kv;
        s.model.d_model = s.model.heads * cases[number].width;
        s.model.d_ff = s.model.vocab = 8;
        s.model.dropout = cases[number].dropout;
        s.policy = (mtt_policy){.precision = taken(number % 2 ? MTT_FP16 : MTT_BF16),
                                .attention = MTT_ATTENTION_FLASH,
                                .window = cases[number].window,
                                .workspace_bytes = (size_t)2 << 20};
        step_two(&s, MTT_OP_flash, MTT_OP_flash_backward, 0);
    }
}

/* Attention at the edges of its tiles, of the widths that Hopper's warpgroups take, without dropout and with
   it. */
static void edges_of_tiles(void)
{
    static const int lengths[] = {1, 63, 65, 128, 129, 193, 256, 385, 640}, widths[] = {40, 64, 104, 128};
    int number;
    for (number = 0; number < 2 * 4 * 9 * 3; number += each()) {
        setup s = random_setup(number);
        s.seq_len = s.model.max_seq = lengths[number / 8 % 9];
        s.batch = 1 + below(2);
        s.model.layers = 1;
        s.model.heads = 1 + below(3);
        s.model.d_model = s.model.heads * widths[number / 2 % 4];
        s.model.d_ff = s.model.vocab = 8;
        s.model.dropout = number / 72 ? 0.1f + 0.1f * (float)below(8) : 0;
        s.policy.precision = taken(number % 2 ? MTT_FP16 : MTT_BF16);
        s.policy.attention = MTT_ATTENTION_FLASH;
        s.policy.loss = MTT_LOSS_FULL;
        s.policy.window = number / 72 == 2 ? 1 + below(s.seq_len) : 0;
        s.policy.workspace_bytes = below(2) ? 0 : (size_t)2 << 20;
        step_two(&s, MTT_OP_flash, MTT_OP_flash_backward, 0);
    }
}

/* Products with GELU behind them, of up to 6 x 3 tiles of 128 x 256 and of what does not fill one; every
   fourth model makes GELU apart, as segments do. The last has 35 x 32 tiles, many for each block, and more
   rows than the workspace holds sums of. */
static void products_with_gelu(void)
{
    int number;
    for (number = 0; number <= 64; number += each()) {
        setup s = random_setup(number);
        s.model.layers = s.batch = 1;
        s.model.heads = 1 + below(2);
        s.model.d_model = s.model.heads * 8 * (1 + below(19));
        s.model.d_ff = number % 3 ? 8 * (1 + below(90)) : 256 * (1 + below(3));
        s.model.vocab = 8;
        s.seq_len = s.model.max_seq = number % 5 ? 1 + below(710) : 128 * (1 + below(6));
        s.policy.precision = taken(number % 2 ? MTT_FP16 : MTT_BF16);
        s.policy.attention = MTT_ATTENTION_FLASH;
        s.policy.loss = MTT_LOSS_FULL;
        s.policy.window = 0;
        s.policy.accumulate = 1 + below(2);
        s.policy.recompute = number / 2 % 4 == 3 ? MTT_RECOMPUTE_SEGMENTS : MTT_RECOMPUTE_NONE;
        s.policy.workspace_bytes = below(2) ? 0 : (size_t)2 << 20;
        if (number == 64) {
            s.model.heads = 1, s.model.d_model = 8, s.model.d_ff = 8192;
            s.batch = 8, s.seq_len = s.model.max_seq = 550;
            s.policy.workspace_bytes = (size_t)2 << 20;
        }
        step_two(&s, MTT_OP_linear_gelu, MTT_OP_linear_backward_gelu, s.policy.accumulate > 1 && below(2));
    }
}

/* Models of FP8: widths from 16 up in steps of 16, one in 256 of 1,600; rows that fill no tile; every third
   loss in several chunks, the last one smaller; all of fp8_products and ways to recompute. One in 128 has
   more rows than a block sums at a time. */
static setup eight_setup(int number)
{
    setup s = small_setup(number);
    s.model.heads = 1 + number % 2;
    s.model.d_model = 16 * (1 + below(number % 4 ? 5 : 12));
    s.model.d_ff = number % 16 == 3 ? 512 : 16 * (1 + below(number % 4 ? 8 : 24));
    s.seq_len = number % 16 == 5 ? 129 + below(300) : 1 + below(130);
    if (number % 3 == 1) s.seq_len = (s.seq_len + 15) / 16 * 16; /* attention's gradients in 8 bits */
    if (number % 256 == 17) s.model.heads = 25, s.model.d_model = 1600, s.seq_len = 33;
    if (number % 128 == 10) s.batch = 100, s.seq_len = 96, s.model.d_ff = 32, s.model.vocab = 8;
    s.model.max_seq = s.seq_len + below(9);
    if (s.seq_len > 130) s.batch = 1;
    s.policy.precision = MTT_FP8;
    s.policy.lora_rank = 0;
    s.policy.fp8_products = (mtt_fp8_products)(number % 5 > 2 ? MTT_FP8_LAYERS : MTT_FP8_ALL);
    s.policy.loss = below(2) ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL;
    s.policy.loss_chunk_rows = number % 3 ? 0 : 16 * (1 + below(s.batch * s.seq_len / 16 + 1));
    s.policy.recompute = number % 8 == 5   ? MTT_RECOMPUTE_SEGMENTS
                         : number % 8 == 6 ? MTT_RECOMPUTE_LAYER
                                           : MTT_RECOMPUTE_NONE;
    s.policy.window = below(2) ? 0 : 1 + below(s.seq_len);
    s.policy.accumulate = 1 + below(2);
    if (number % 7 == 6) { /* options of attention */
        s.model.heads_kv = 1 + below(2);
        s.model.heads = s.model.heads_kv * (1 + below(4));
        s.model.d_head = 16 * (1 + below(8));
        s.model.positions = (mtt_positions)below(4);
        s.model.rotary_interleaved = below(2);
        s.model.rotary_factor = (float)(1 + number % 3 * 16);
        s.model.qk_norm = below(2);
    }
    return s;
}

/* An operation on tensors of the caller's, on the device. */
static void run_alone(void *context, mtt_op_kind kind, int inputs, int outputs, const void *operands,
                      mtt_shape *shape)
{
    mtt_op op;
    memset(&op, 0, sizeof(op));
    op.kind = kind;
    op.layer = -1;
    op.inputs = inputs, op.outputs = outputs;
    op.operands = (mtt_tensor **)(void *)(uintptr_t)operands;
    op.shape = shape;
    check(cuda.run(context, &op, 1) == MTT_OK, "%s: %s", mtt_op_name(kind), env.error);
}

/* A matrix on the device, uninitialized. */
static mtt_tensor matrix_on_device(void *context, mtt_dtype dtype, int64_t rows, int64_t width)
{
    mtt_tensor t;
    memset(&t, 0, sizeof(t));
    strcpy(t.name, "alone");
    t.dtype = dtype;
    t.shape[0] = rows, t.shape[1] = width;
    t.dims = 2;
    t.entry = -1;
    t.bytes = mtt__bytes_of(dtype, (size_t)(rows * width));
    check(cuda.alloc(context, MTT_CARD, t.bytes, &t.data) == MTT_OK, "alloc: %s", env.error);
    return t;
}

/* GELU(pre), which a fused operation makes again and transposes, has the bits of GELU alone. */
static void same_gelu(lock_step *l, const mtt_op *op)
{
    const mtt_op_linear_backward_gelu *o = MTT_OPERANDS_OF(linear_backward_gelu, op);
    mtt_shape shape = *op->shape;
    mtt_tensor alone = matrix_on_device(l->context, MTT_F8_E4M3, mtt__rows(o->pre), mtt__width(o->pre)),
        ours, theirs;
    mtt_op_activation gelu = {o->pre, &alone};
    alone.scale = o->y_t->scale;
    run_alone(l->context, MTT_OP_activation, 1, 1, &gelu, &shape);
    ours = downloaded(l, &alone);
    theirs = downloaded(l, o->y_t);
    check_transpose(&l->s, op, "CUDA beside GELU alone", &ours, &theirs, mtt__rows(o->pre));
    free(ours.data);
    free(theirs.data);
    cuda.release(l->context, MTT_CARD, alone.data);
}

/* GELU's gradient in 8 bits, which CUDA's schedules always fuse, on the operands of a fused operation;
   gradients of the given size. */
static void gelu_backward_alone(lock_step *l, int i, float size)
{
    mtt_op host = *op_at(l->host, MTT__TRAIN, i, 0), device = *op_at(l->device, MTT__TRAIN, i, 0);
    const mtt_op_linear_backward_gelu *h = MTT_OPERANDS_OF(linear_backward_gelu, &host);
    const mtt_op_linear_backward_gelu *d = MTT_OPERANDS_OF(linear_backward_gelu, &device);
    mtt_tensor dy = *h->pre, device_dy = *d->pre;
    mtt_op_activation_backward row = {&dy, h->pre, h->dx, h->dx_t, h->y_t};
    mtt_op_activation_backward device_row = {&device_dy, d->pre, d->dx, d->dx_t, d->y_t};
    dy.data = malloc(dy.bytes);
    fill_tensor(&dy, size, 0);
    check(cuda.alloc(l->context, MTT_CARD, dy.bytes, &device_dy.data) == MTT_OK, "alloc: %s", env.error);
    host.kind = device.kind = MTT_OP_activation_backward;
    host.inputs = device.inputs = 2, host.outputs = device.outputs = 3;
    host.operands = (mtt_tensor **)(void *)&row, device.operands = (mtt_tensor **)(void *)&device_row;
    is_new(&host);
    upload_operands(l, &host, &device, -1);
    step_eight(l, &host, &device, &l->host->programs[MTT__TRAIN], &l->device->programs[MTT__TRAIN]);
    cuda.release(l->context, MTT_CARD, device_dy.data);
    free(dy.data);
}

/* FP8's products with GELU's gradient behind them, of up to 6 x 3 tiles of 128 x 256, with up to 1,600 terms;
   in every fourth, gradients are so large that some become infinite. The last has 18 x 16 tiles, two and more
   for each block. */
static void eight_products_with_gelu(void)
{
    enum { LAST = 24 };
    int number, i;
    for (number = 0; number <= LAST; number += quick ? 11 : 1) {
        setup s = eight_setup(0);
        lock_step l;
        mtt__program *p;
        if (!mine()) continue;
        s.model.layers = s.batch = s.model.heads = 1;
        s.model.d_model = number % 16 == 6 ? 1600 : 16 * (1 + below(15));
        s.model.heads = number % 16 == 6 ? 25 : 1;
        s.model.d_ff = number % 3 ? 16 * (1 + below(45)) : 256 * (1 + below(3));
        s.seq_len = number % 5 ? 1 + below(number % 16 == 6 ? 200 : 710) : 128 * (1 + below(6));
        if (number == LAST) s.model.d_model = 16, s.model.d_ff = 4096, s.batch = 4, s.seq_len = 550;
        s.model.vocab = 8;
        s.model.max_seq = s.seq_len;
        s.policy.attention = MTT_ATTENTION_FLASH;
        s.policy.recompute = number / 2 % 4 == 3 ? MTT_RECOMPUTE_SEGMENTS : MTT_RECOMPUTE_NONE;
        s.policy.workspace_bytes = number == LAST || below(2) ? (size_t)2 << 20 : 0;
        l = open_lock_step(&s);
        p = &l.host->programs[MTT__TRAIN];
        fill_state(&l, MTT__TRAIN);
        for (i = 0; i < p->step_begin; i++) {
            mtt_op_kind kind = p->ops[i].kind;
            if (number % 4 == 2 && kind == MTT_OP_linear_backward_gelu)
                fill_tensor(MTT_OPERANDS_OF(linear_backward_gelu, &p->ops[i])->dy, 20000, 0);
            if (kind == MTT_OP_linear_backward_gelu) {
                step_op(&l, MTT__TRAIN, i, 0);
                same_gelu(&l, op_at(l.device, MTT__TRAIN, i, 0));
                gelu_backward_alone(&l, i, number % 4 == 2 ? 40000 : 1);
            } else run_on_host(&p->ops[i]);
        }
        close_lock_step(&l);
    }
}

/* Attention's results in 8 bits have the bits of quantize after attention in 16 bits. */
static void same_attention(lock_step *l, const mtt_op *device)
{
    const mtt_op_flash *f = MTT_OPERANDS_OF(flash, device);
    const mtt_op_flash_backward *g = MTT_OPERANDS_OF(flash_backward, device);
    int backward = device->kind == MTT_OP_flash_backward, i;
    const mtt_tensor *wanted[2] = {backward ? g->d_qkv : f->out_8, backward ? g->d_qkv_t : NULL};
    const mtt_tensor *usual = backward ? g->d_qkv : f->out;
    mtt_tensor alone = matrix_on_device(l->context, MTT_BF16_BITS, mtt__rows(usual), mtt__width(usual));
    mtt_tensor eight[2] = {*wanted[0], *(backward ? wanted[1] : wanted[0])};
    mtt_op_quantize then = {&alone, NULL, NULL, NULL, &eight[0], backward ? &eight[1] : NULL};
    mtt_op_flash forward_row = {f->qkv, f->control, &alone, f->lse, NULL};
    mtt_op_flash_backward backward_row = {g->d_out, g->qkv, g->out, g->lse, g->control, &alone, NULL};
    mtt_shape shape = *device->shape;
    mtt_op op = *device;
    op.operands = backward ? (mtt_tensor **)(void *)&backward_row : (mtt_tensor **)(void *)&forward_row;
    check(cuda.run(l->context, &op, 1) == MTT_OK, "attention alone: %s", env.error);
    for (i = 0; i < 1 + backward; i++) {
        check(cuda.alloc(l->context, MTT_CARD, eight[i].bytes, &eight[i].data) == MTT_OK, "alloc: %s",
              env.error);
        eight[i].recorded = 0;
    }
    run_alone(l->context, MTT_OP_quantize, 4, 2, &then, &shape);
    for (i = 0; i < 1 + backward; i++) {
        mtt_tensor ours = downloaded(l, wanted[i]), theirs = downloaded(l, &eight[i]);
        check(!memcmp(ours.data, theirs.data, ours.bytes), "%s of %s has other bits than quantize makes (%s)",
              ours.name, mtt_op_name(device->kind), describe(&l->s));
        free(ours.data);
        free(theirs.data);
        cuda.release(l->context, MTT_CARD, eight[i].data);
    }
    if (!backward) {
        mtt_tensor ours = downloaded(l, f->out), theirs = downloaded(l, &alone);
        check(!memcmp(ours.data, theirs.data, ours.bytes), "%s has other bits beside 8 bits (%s)", ours.name,
              describe(&l->s));
        free(ours.data);
        free(theirs.data);
    }
    cuda.release(l->context, MTT_CARD, alone.data);
}

/* Attention of FP8: heads that fill their tiles and others, of every kernel's width; sequences of a few tiles
   and parts of tiles, and some that begin anywhere in a row of 16; windows and dropout. In every fourth, some
   gradients become infinite. */
static void attention_in_eight(void)
{
    static const int lengths[] = {16, 48, 80, 112, 272, 33, 640};
    static const int widths[] = {8, 32, 40, 64, 80, 96, 128, 256};
    int number, i;
    for (number = 0; number < 7 * 8 * 4; number += quick ? 11 : 1) { /* not 7: there are 7 lengths */
        setup s = eight_setup(0);
        lock_step l;
        mtt__program *p;
        if (!mine()) continue;
        s.seq_len = s.model.max_seq = lengths[number % 7];
        s.batch = s.seq_len > 200 ? 1 : 1 + below(3);
        s.model.layers = 1;
        s.model.heads = 2;
        s.model.d_model = 2 * widths[number / 7 % 8];
        s.model.d_ff = 16, s.model.vocab = 8;
        s.model.dropout = number / 112 ? 0.1f + 0.1f * (float)below(8) : 0;
        s.policy.attention = MTT_ATTENTION_FLASH;
        s.policy.fp8_products = MTT_FP8_LAYERS;
        s.policy.loss = MTT_LOSS_FULL;
        s.policy.window = number / 56 % 2 ? 1 + below(s.seq_len) : 0;
        s.policy.accumulate = 1;
        l = open_lock_step(&s);
        p = &l.host->programs[MTT__TRAIN];
        fill_state(&l, MTT__TRAIN);
        for (i = 0; i < p->step_begin; i++) {
            mtt_op_kind kind = p->ops[i].kind;
            if (kind != MTT_OP_flash && kind != MTT_OP_flash_backward) {
                run_on_host(&p->ops[i]);
                continue;
            }
            if (number % 4 == 2 && kind == MTT_OP_flash_backward)
                fill_tensor(MTT_OPERANDS_OF(flash_backward, &p->ops[i])->d_out, 20000, 0);
            step_op(&l, MTT__TRAIN, i, 0);
            if (has_eight(&p->ops[i])) same_attention(&l, op_at(l.device, MTT__TRAIN, i, 0));
        }
        close_lock_step(&l);
    }
}

/* All 65,536 numbers of BF16, in 8 bits and transposed, infinities and NaN among them. The records join what
   is there; without `recorded` there are none. */
static void every_number(void *context)
{
    enum { ROWS = 517, WIDTH = 128, PADDED = 528, COUNT = ROWS * WIDTH };
    static uint16_t x_bits[COUNT];
    static uint8_t codes[COUNT], turned_codes[WIDTH * PADDED];
    static const int exponents[] = {-9, 0, 6, 30};
    setup s = eight_setup(0);
    mtt_op op = {.kind = MTT_OP_quantize};
    mtt_shape shape = {.rows = ROWS};
    mtt_tensor x = matrix_on_device(context, MTT_BF16_BITS, ROWS, WIDTH), copy, copy_t;
    mtt_tensor y = matrix_on_device(context, MTT_F8_E4M3, ROWS, WIDTH), table = y;
    mtt_tensor y_t = matrix_on_device(context, MTT_F8_E4M3, WIDTH, PADDED);
    int number, i;
    table = matrix_on_device(context, MTT_F32, 4, 1);
    for (i = 0; i < COUNT; i++) x_bits[i] = (uint16_t)i;
    cuda.upload(context, x.data, x_bits, x.bytes);
    for (number = 0; number < 16; number += each()) {
        int e4m3 = number < 12, alone = number % 3 == 2, wrong = 0, clipped = 0;
        double scale = e4m3 ? ldexp(1, exponents[number / 3]) : 1;
        mtt_scale scales = {(float)(1 / scale), (float)scale, mtt__float_bits(0.5f), 7}, after;
        mtt_op_quantize row = {&x, NULL, NULL, NULL, alone ? NULL : &y, number % 3 ? &y_t : NULL};
        new_case();
        y.dtype = y_t.dtype = e4m3 ? MTT_F8_E4M3 : MTT_F8_E5M2;
        y.scale = y_t.scale = e4m3 ? (mtt_scale *)table.data : NULL;
        y.recorded = e4m3 && !alone;
        y_t.recorded = e4m3 && alone && number % 2;
        memset(codes, 0xa5, sizeof(codes));
        memset(turned_codes, 0xa5, sizeof(turned_codes));
        cuda.upload(context, table.data, &scales, sizeof(scales));
        cuda.upload(context, y.data, codes, y.bytes);
        cuda.upload(context, y_t.data, turned_codes, y_t.bytes);
        run_alone(context, MTT_OP_quantize, 4, 2, &row, &shape);
        cuda.download(context, codes, y.data, y.bytes);
        cuda.download(context, turned_codes, y_t.data, y_t.bytes);
        cuda.download(context, &after, table.data, sizeof(after));
        copy = y, copy_t = y_t;
        copy.data = codes, copy_t.data = turned_codes;
        if (row.y_t) check_transpose(&s, &op, "every number", row.y ? &copy : NULL, &copy_t, ROWS);
        for (i = 0; i < COUNT; i++) {
            double value = (double)mtt__from_bf16(x_bits[i]) * scale;
            uint8_t code = row.y ? codes[i] : turned_codes[i % WIDTH * PADDED + i / WIDTH];
            int is_nan = e4m3 ? (code & 0x7f) == 0x7f : (code & 0x7f) > 0x7c;
            clipped += fabs(value) > 448;
            if (isnan(value)) wrong += !is_nan;
            else wrong += signed_code(code) != to_eight(value, y.dtype) || code >> 7 != x_bits[i] >> 15;
        }
        check(!wrong, "%d of %d numbers times %g are rounded to others in %s", wrong, COUNT, scale,
              e4m3 ? "e4m3" : "e5m2");
        if (y.recorded || y_t.recorded) {
            scales.largest = mtt__float_bits(INFINITY);
            scales.clipped += (uint32_t)clipped;
        }
        check(!memcmp(&after, &scales, sizeof(after)), "every number times %g: records %g, %u, wanted %g, %u",
              scale, (double)mtt__bits_float(after.largest), after.clipped,
              (double)mtt__bits_float(scales.largest), scales.clipped);
    }
    cuda.release(context, MTT_CARD, x.data);
    cuda.release(context, MTT_CARD, y.data);
    cuda.release(context, MTT_CARD, y_t.data);
    cuda.release(context, MTT_CARD, table.data);
}

/* Whether two tensors on the device have the same bytes. */
static int same_on_device(void *context, const mtt_tensor *a, const mtt_tensor *b)
{
    char *left = malloc(a->bytes), *right = malloc(a->bytes);
    int same;
    cuda.download(context, left, a->data, a->bytes);
    cuda.download(context, right, b->data, a->bytes);
    same = !memcmp(left, right, a->bytes);
    free(left);
    free(right);
    return same;
}

/* Gradients of q and k that are rotated and rounded in one pass have the bits of two passes. Heads are parts
   of a tile, lie across two, or fill several. Some gradients become infinite. */
static void rotary_in_eight(void *context)
{
    static const int WIDTHS[] = {8, 24, 32, 40, 64, 80, 96, 128, 256}, LENGTHS[] = {1, 16, 33, 130};
    int number, i;
    for (number = 0; number < 9 * 4 * 2 * 2; number += each()) {
        const int D = WIDTHS[number % 9], T = LENGTHS[number / 9 % 4], kv = 1 + number / 36 % 2, rows = 2 * T;
        const int width = 2 * (1 + kv) * D, padded = (rows + 15) / 16 * 16;
        mtt_shape shape = {.batch = 2, .seq_len = T, .heads = 2, .heads_kv = kv, .d_head = D, .rows = rows,
                           .rotary_interleaved = number / 72};
        mtt_tensor t[6], host[2];
        mtt_op_rotary_backward both = {&t[0], NULL, &t[1], NULL, NULL, &t[2], NULL, NULL, &t[3]};
        mtt_op_rotary_backward alone = {&t[0], NULL, &t[1], NULL, NULL, &t[0], NULL, NULL, NULL};
        mtt_op_quantize then = {&t[0], NULL, NULL, NULL, &t[4], &t[5]};
        if (!mine()) continue;
        new_case();
        t[0] = matrix_on_device(context, MTT_BF16_BITS, rows, width);
        t[1] = matrix_on_device(context, MTT_F32, T, D);
        for (i = 2; i < 6; i += 2) {
            t[i] = matrix_on_device(context, MTT_F8_E5M2, rows, width);
            t[i + 1] = matrix_on_device(context, MTT_F8_E5M2, width, padded);
        }
        for (i = 0; i < 2; i++) {
            host[i] = t[i];
            host[i].data = malloc(t[i].bytes);
            fill_tensor(&host[i], i ? 1 : number % 4 ? 1 : 40000, 0);
            cuda.upload(context, t[i].data, host[i].data, t[i].bytes);
            free(host[i].data);
        }
        run_alone(context, MTT_OP_rotary_backward, 5, 4, &both, &shape);
        run_alone(context, MTT_OP_rotary_backward, 5, 4, &alone, &shape);
        run_alone(context, MTT_OP_quantize, 4, 2, &then, &shape);
        for (i = 2; i < 4; i++)
            check(same_on_device(context, &t[i], &t[i + 2]),
                  "rotary_backward, case %d, heads of %d, %d rows: other bits than those of quantize in %s",
                  number, D, rows, i == 2 ? "dx" : "dx_t");
        for (i = 0; i < 6; i++) cuda.release(context, MTT_CARD, t[i].data);
    }
}

/* What a norm's backward pass makes in 8 bits has the bits of quantize after the pass without these results.
   It then adds columns up in another order, the same for each choice of results. On an H200 one kernel makes
   all results for widths up to 3,040. Rows fill no tile, one, and more than all blocks have. */
static void norms_eight(void *context)
{
    enum { DY, X, STATS, GAIN, SHIFT, DX, DX_8, DX_T, Y_T, D_GAIN, D_SHIFT, KINDS };
    enum { BOTH, GRADIENT, NORM, APART, WAYS }; /* which results the pass makes in 8 bits */
    static const int WIDTHS[] = {16, 48, 768, 896, 912, 1024, 1040, 1600, 2048, 2064, 3040, 3056, 8208};
    static const int ROWS[] = {1, 7, 15, 16, 17, 31, 32, 33, 48, 49, 260, 20011};
    static const int COUNT = (int)(MTT__LENGTH(WIDTHS) * MTT__LENGTH(ROWS));
    const mtt_scale scale = {1.0f / 32, 32, 0, 0};
    mtt_tensor table = matrix_on_device(context, MTT_F32, 4, 1), workspace;
    int number;
    workspace = matrix_on_device(context, MTT_F32, 1 << 21, 1);
    cuda.upload(context, table.data, &scale, sizeof(scale));
    for (number = 0; number < COUNT; number += each()) {
        const int width = WIDTHS[number % (int)MTT__LENGTH(WIDTHS)];
        const int rows = ROWS[number / (int)MTT__LENGTH(WIDTHS)], padded = (rows + 15) / 16 * 16;
        const struct { mtt_dtype dtype; int rows, width; } KIND[KINDS] = {
            {MTT_BF16_BITS, rows, width}, {MTT_BF16_BITS, rows, width}, {MTT_F32, rows, 2},
            {MTT_BF16_BITS, 1, width},    {MTT_BF16_BITS, 1, width},    {MTT_BF16_BITS, rows, width},
            {MTT_F8_E5M2, rows, width},   {MTT_F8_E5M2, width, padded}, {MTT_F8_E4M3, width, padded},
            {MTT_F32, 1, width},          {MTT_F32, 1, width}};
        mtt_tensor t[WAYS][KINDS];
        mtt_shape shape = {.rows = rows, .d_model = width};
        int way, k;
        if ((rows > 1000 && width > 1040) || !mine()) continue;
        new_case();
        for (k = 0; k < KINDS; k++) {
            mtt_tensor host;
            for (way = 0; way < WAYS; way++)
                t[way][k] = matrix_on_device(context, KIND[k].dtype, KIND[k].rows, KIND[k].width);
            host = t[0][k];
            host.data = malloc(host.bytes);
            memset(host.data, 0xa5, host.bytes);
            if (k <= DX) fill_tensor(&host, k == DY && number % 5 == 4 ? 40000 : 1, k == STATS ? 1.5f : 0);
            for (way = 0; way < WAYS; way++) cuda.upload(context, t[way][k].data, host.data, host.bytes);
            free(host.data);
        }
        for (way = 0; way < WAYS; way++) {
            mtt_tensor *u = t[way];
            mtt_op_norm_backward row = {&u[DY], &u[X], &u[STATS], &u[GAIN], NULL, NULL, &u[DX],
                                     NULL,   NULL,  NULL,      &u[D_GAIN], &u[D_SHIFT], NULL};
            mtt_op_quantize gradient = {&u[DX], NULL, NULL, NULL, &u[DX_8], &u[DX_T]};
            mtt_op_quantize norm = {&u[X], &u[STATS], &u[GAIN], &u[SHIFT], NULL, &u[Y_T]};
            mtt_op op = {.kind = MTT_OP_norm_backward, .layer = -1, .inputs = 6, .outputs = 7,
                         .shape = &shape, .operands = (mtt_tensor **)(void *)&row, .workspace = &workspace};
            if (number % 3) row.joined = &u[DX];
            u[Y_T].scale = (mtt_scale *)table.data;
            if (way == BOTH || way == GRADIENT) row.dx_8 = &u[DX_8], row.dx_t = &u[DX_T];
            if (way == BOTH || way == NORM) row.shift = &u[SHIFT], row.y_t = &u[Y_T];
            check(cuda.run(context, &op, 1) == MTT_OK, "norm_backward: %s", env.error);
            if (way != APART) continue;
            run_alone(context, MTT_OP_quantize, 4, 2, &gradient, &shape);
            run_alone(context, MTT_OP_quantize, 4, 2, &norm, &shape);
        }
        for (k = DX; k < KINDS; k++)
            for (way = GRADIENT; way < WAYS; way++) {
                if (way == (k == Y_T ? GRADIENT : k == DX_8 || k == DX_T ? NORM : k >= D_GAIN ? APART : WAYS))
                    continue; /* not made, or added in the other order */
                check(same_on_device(context, &t[BOTH][k], &t[way][k]),
                      "norm_backward of %d x %d: other bits in result %d of way %d", rows, width, k, way);
            }
        for (way = 0; way < WAYS; way++)
            for (k = 0; k < KINDS; k++) cuda.release(context, MTT_CARD, t[way][k].data);
    }
    cuda.release(context, MTT_CARD, table.data);
    cuda.release(context, MTT_CARD, workspace.data);
}

/* The sum of dx that norm_backward makes, in its kernel (LayerNorm in 16 bits, up to 4,096 columns) or after
   it, is that of dx as it is stored. The other results are those without it, but for the order of sums. Rows
   are fewer than a block takes at once, and more than all blocks do. */
static void norms_with_sums(void)
{
    enum { DY, X, STATS, GAIN, DX, D_GAIN, D_SHIFT, D_BIAS, KINDS };
    static const int WIDTHS[] = {8, 504, 512, 520, 768, 1024, 1032, 2056, 4096, 4104};
    static const int ROWS[] = {1, 3, 37, 2300};
    static const struct { mtt_precision precision; mtt_dtype dtype; } KIND[] = {
        {MTT_BF16, MTT_BF16_BITS}, {MTT_FP16, MTT_F16_BITS}, {MTT_FP32, MTT_F32}};
    int number;
    for (number = 0; number < 10 * 4 * 3 * 2; number += each()) {
        const int width = WIDTHS[number % 10], rows = ROWS[number / 10 % 4], count = rows * width;
        setup s = random_setup(number);
        mtt_policy policy;
        mtt_shape shape = {.rows = rows, .d_model = width};
        mtt_tensor workspace;
        const mtt_dtype dtype = KIND[number / 40 % 3].dtype;
        mtt_tensor t[KINDS];
        float *dx[2], *sums[2]; /* without d_bias and with it: d_gain, d_shift, d_bias */
        void *context;
        int with, k, wrong[3] = {0};
        shape.norm = number / 120 ? MTT_NORM_RMS : MTT_NORM_LAYER;
        s.policy.precision = KIND[number / 40 % 3].precision;
        s.policy.device = MTT_DEVICE_CUDA;
        if (!is_taken((int)s.policy.precision) || !mine()) continue;
        new_case();
        check(!mtt_policy_resolve(&env, &s.policy, &s.model, s.batch, s.seq_len, &policy), "%s", env.error);
        context = context_of(&policy);
        workspace = matrix_on_device(context, MTT_F32, 3 * width, number % 2 ? 600 : 1);
        for (k = 0; k < KINDS; k++)
            t[k] = matrix_on_device(context, k == STATS || k >= D_GAIN ? MTT_F32 : dtype,
                                    k == GAIN || k >= D_GAIN ? 1 : rows, k == STATS ? 2 : width);
        for (with = 0; with < 2; with++) {
            mtt_op_norm_backward row = {&t[DY], &t[X], &t[STATS], &t[GAIN], NULL,
                                        number % 3 ? &t[DX] : NULL, &t[DX], NULL, NULL, NULL, &t[D_GAIN],
                                        shape.norm ? NULL : &t[D_SHIFT], with ? &t[D_BIAS] : NULL};
            mtt_op op = {.kind = MTT_OP_norm_backward, .layer = -1, .inputs = 6, .outputs = 7,
                         .shape = &shape, .operands = (mtt_tensor **)(void *)&row, .workspace = &workspace};
            mtt_tensor host;
            random_state = (uint64_t)number;
            for (k = 0; k < KINDS; k++) {
                host = t[k];
                host.data = malloc(host.bytes);
                fill_tensor(&host, 1, k == STATS ? 1.5f : 0);
                cuda.upload(context, t[k].data, host.data, host.bytes);
                if (k != DX) free(host.data);
                else dx[with] = (float *)host.data;
            }
            check(cuda.run(context, &op, 1) == MTT_OK, "norm_backward: %s", env.error);
            host = t[DX];
            host.data = dx[with];
            cuda.download(context, host.data, t[DX].data, host.bytes);
            dx[with] = malloc((size_t)count * sizeof(float));
            mtt__load(&host, 0, count, dx[with]);
            free(host.data);
            sums[with] = malloc(3 * (size_t)width * sizeof(float));
            for (k = 0; k < 3; k++)
                cuda.download(context, sums[with] + k * width, t[D_GAIN + k].data, t[D_GAIN + k].bytes);
        }
        for (k = 0; k < count; k++)
            wrong[0] += fabs(dx[1][k] - dx[0][k]) > 0x1p-7 * fabs(dx[0][k]) + 1e-5;
        for (k = 0; k < 2 * width; k++) wrong[1] += fabs(sums[1][k] - sums[0][k]) > 16 * 0x1p-23 * rows;
        for (k = 0; k < width; k++) {
            double sum = 0, size = 0;
            int r;
            for (r = 0; r < rows; r++) sum += dx[1][r * width + k], size += fabs(dx[1][r * width + k]);
            wrong[2] += fabs(sums[1][2 * width + k] - sum) > 4 * 0x1p-23 * size;
        }
        check(!wrong[0] && !wrong[1] && !wrong[2],
              "norm_backward %d of %d x %d: %d of dx, %d sums of parameters, %d of dx are wrong", number,
              rows, width, wrong[0], wrong[1], wrong[2]);
        for (k = 0; k < KINDS; k++) cuda.release(context, MTT_CARD, t[k].data);
        cuda.release(context, MTT_CARD, workspace.data);
        for (with = 0; with < 2; with++) free(dx[with]), free(sums[with]);
    }
}

/* Bits that sums of forward products keep. The product of row r and column c adds 1, 2^-(r + c) and -1: the
   result is 2^-(r + c), or 0 where that is cut off. The last term is among the first 32, or among the next,
   to which only the sum of the first ones comes. */
static void probe_eight(void *context)
{
    enum { ROWS = 16, TERMS = 64 };
    mtt_shape shape = {.rows = ROWS};
    mtt_tensor x = matrix_on_device(context, MTT_F8_E4M3, ROWS, TERMS);
    mtt_tensor weight = matrix_on_device(context, MTT_F8_E4M3, ROWS, TERMS), scales, workspace;
    mtt_tensor y = matrix_on_device(context, MTT_BF16_BITS, ROWS, ROWS);
    mtt_op_linear linear = {&x, &weight, NULL, &y};
    const mtt_scale one = {1, 1, 0, 0};
    int kept[2] = {0, 0}, later, r, c;
    scales = matrix_on_device(context, MTT_F32, 4, 1);
    workspace = matrix_on_device(context, MTT_F32, 1 << 20, 1);
    cuda.upload(context, scales.data, &one, sizeof(one));
    x.scale = weight.scale = (mtt_scale *)scales.data;
    weight.transposed = 1;
    for (later = 0; later < 2; later++) {
        uint8_t left[ROWS][TERMS], right[ROWS][TERMS];
        uint16_t result[ROWS][ROWS];
        mtt_op op = {.kind = MTT_OP_linear, .inputs = 3, .outputs = 1, .shape = &shape,
                     .operands = (mtt_tensor **)(void *)&linear, .workspace = &workspace};
        memset(left, 0, sizeof(left));
        memset(right, 0, sizeof(right));
        for (r = 0; r < ROWS; r++) {
            int last = later ? 40 : 2;
            left[r][0] = right[r][0] = right[r][last] = mtt__to_e4m3(1);
            left[r][last] = mtt__to_e4m3(-1);
            left[r][1] = right[r][1] = mtt__to_e4m3(ldexpf(1, -r)); /* 0 from 2^-10 down */
        }
        cuda.upload(context, x.data, left, sizeof(left));
        cuda.upload(context, weight.data, right, sizeof(right));
        check(cuda.run(context, &op, 1) == MTT_OK, "%s", env.error);
        cuda.download(context, result, y.data, y.bytes);
        for (r = 0; r < 10; r++)
            for (c = 0; c < 10; c++)
                if (mtt__from_bf16(result[r][c]) > 0 && r + c > kept[later]) kept[later] = r + c;
    }
    check(kept[0] >= 8 && kept[1] >= 8, "sums of 8-bit products keep %d and %d bits behind the first",
          kept[0], kept[1]);
    eight_bits = kept[0] < kept[1] ? kept[0] : kept[1];
    printf("forward products in 8 bits keep %s%d bits behind the largest term's first one, %s%d of a sum\n",
           kept[0] == 18 ? "at least " : "", kept[0], kept[1] == 18 ? "at least " : "", kept[1]);
    cuda.release(context, MTT_CARD, x.data);
    cuda.release(context, MTT_CARD, weight.data);
    cuda.release(context, MTT_CARD, y.data);
    cuda.release(context, MTT_CARD, scales.data);
    cuda.release(context, MTT_CARD, workspace.data);
}

enum { EIGHT_SETUPS = 600 };

/* FP8, operation by operation. */
static void eight_operations(int setups)
{
    setup s = eight_setup(0);
    mtt_policy policy;
    int number, i;
    s.policy.device = MTT_DEVICE_CUDA;
    check(mtt_policy_resolve(&env, &s.policy, &s.model, s.batch, s.seq_len, &policy) == MTT_OK, "%s",
          env.error);
    probe_eight(context_of(&policy));
    every_number(context_of(&policy));
    norms_eight(context_of(&policy));
    eight_products_with_gelu();
    attention_in_eight();
    rotary_in_eight(context_of(&policy));
    for (number = 0; number < setups; number++) {
        s = eight_setup(number);
        step_schedule(&s, 1);
    }
    for (i = 0; i < MTT_OP_KIND_COUNT; i++)
        if (eights[i])
            printf("%-26s %9lld results in 8 bits, %lld are the textbook's neighbours\n",
                   mtt_op_name((mtt_op_kind)i), (long long)eights[i], (long long)neighbours[i]);
}

/* ---- generation ---- */

/* Choices of every kind, from all ids or some of them. */
static void fill_choices(const mtt_schedule *s, const mtt__program *p)
{
    int i;
    for (i = 0; i < s->batch; i++) {
        mtt_sampling sampling = {.temperature = below(4) ? 0.1f + 0.01f * (float)below(300) : 0,
                                 .top_k = below(2) ? below(s->model.vocab + 9) : 0,
                                 .top_p = below(2) ? 0.01f * (float)below(101) : 0,
                                 .min_p = below(2) ? 0.01f * (float)below(101) : 0, .seed = random_bits()};
        int count = below(8) ? s->model.vocab : below(s->model.vocab + 1);
        if (!below(20)) sampling.temperature = below(2) ? 1e-30f : 1e30f;
        ((mtt_choice *)p->choices->data)[i] = mtt__choice(&sampling, count, (uint64_t)i);
    }
}

/* Logits some of which are equal, zeros of both signs, infinite or NaN. */
static void roughen(const mtt_tensor *logits)
{
    static const float special[] = {0, -0.0f, INFINITY, -INFINITY, NAN, -NAN};
    int64_t count = mtt__elements(logits), i;
    int most = below(3) ? 2 : 6, one_in = 1 + below(below(2) ? 5 : 1000);
    for (i = 0; i < count; i++) {
        float value = below(2) ? (float)(below(9) - 4) : special[below(most)];
        if (!below(one_in)) mtt__store(logits, i, 1, &value);
    }
}

/* Rows of one sequence after the other, at places from any one up, and rows without a place between them. */
static void fill_rows(const mtt_schedule *s, mtt__program *p)
{
    int32_t *tokens = (int32_t *)p->tokens->data, *sequences = (int32_t *)p->sequences->data;
    int32_t *places = (int32_t *)p->places->data, *last = (int32_t *)p->last->data;
    int row = 0, i, rows = (int)p->shape.rows;
    for (i = 0; i < rows; i++) tokens[i] = below(s->model.vocab), sequences[i] = 0, places[i] = -1;
    for (i = 0; i < s->batch; i++) {
        int count = p == &s->programs[MTT__TOKEN] ? 1 : 1 + below(rows), place = below(s->seq_len);
        last[i] = below(3) ? below(rows) : -1;
        row += below(2) && rows > s->batch;
        for (; count-- && row < rows && place < s->seq_len; row++) {
            sequences[row] = i;
            places[row] = below(8) || rows > s->batch ? place++ : -1;
        }
    }
}

enum { GENERATION_SETUPS = 600 };

/* The programs of a generator, operation by operation: groups, every width of a head, windows. */
static void generation(int setups)
{
    static const int GROUPS[] = {1, 2, 3, 8};
    for (int number = 0; number < setups; number++) {
        setup s = random_setup(number);
        mtt_generator_desc desc = {number % 3 && !turing ? MTT_BF16 : MTT_FP32, .batch = 1 + below(9),
                                   .chunk = 1 + below(40), .context = 1 + below(number % 5 ? 150 : 700)};
        mtt_schedule *both[2];
        lock_step l;
        int k, which, i;
        s.model.heads_kv = 1 + below(2);
        s.model.heads = s.model.heads_kv * GROUPS[number % 4];
        s.model.d_head = 8 * (1 + number % 32);
        s.model.d_model = 16 * (1 + below(6));
        s.model.layers = 1;
        s.model.max_seq = desc.context;
        s.model.positions = (mtt_positions)below(4);
        s.model.qk_norm = below(2);
        s.policy.precision = desc.precision;
        s.policy.state = MTT_STATE_FULL;
        s.policy.device = MTT_DEVICE_CUDA;
        s.policy.window = desc.window = below(2) ? 1 + below(desc.context) : 0;
        s.batch = desc.batch, s.seq_len = desc.context;
        set_options(&s.model, number);
        for (k = 0; k < 2; k++) {
            both[k] = calloc(1, sizeof(**both));
            check(!mtt__generation_init(both[k], &env, &s.model, &desc, MTT_DEVICE_CUDA), "%s", env.error);
        }
        if (!mine()) { /* only its shapes */
            for (which = MTT__CHUNK; which <= MTT__TOKEN; which++)
                for (i = 0; i < both[1]->programs[which].op_count; i++) is_new(op_at(both[1], which, i, 0));
            for (k = 0; k < 2; k++) mtt_schedule_destroy(both[k]);
            continue;
        }
        l = bind_lock_step(&s, both[0], both[1]);
        l.once = 1;
        for (which = MTT__CHUNK; which <= MTT__TOKEN; which++) {
            mtt__program *p = &l.host->programs[which];
            for (i = 0; i < p->tensor_count; i++)
                if (p->tensors[i]->persistent && p->tensors[i] != p->workspace && which == MTT__CHUNK) {
                    mtt_tensor *t = p->tensors[i];
                    if (t->category == MTT_ACTIVATIONS) fill_tensor(t, 1, 0); /* the cache */
                    else if (t->dtype != MTT_I32 && t->dtype != MTT_U8)
                        fill_tensor(t, 0.3f, t->dims > 1 ? 0 : 0.7f);
                }
            fill_rows(l.host, p);
            fill_choices(l.host, p);
            for (i = 0; i < p->op_count; i++) {
                if (p->ops[i].kind == MTT_OP_choose_id && below(2)) roughen(p->output);
                step_op(&l, which, i, 0);
            }
        }
        close_lock_step(&l);
    }
}

/* The truth of a whole generator: a backend that runs lists on the CPU and, beside it, by the textbook in
   double. The doubles are kept by the address of their tensor. */
typedef struct wide_tensor {
    const void *at;
    double *values; /* NULL behind the last one */
    int64_t count;
} wide_tensor;
static wide_tensor wide_tensors[256], *last_wide;

static wide_tensor *find_wide(const mtt_tensor *t)
{
    wide_tensor *w = wide_tensors;
    while (w->values && w->at != t->data) w++;
    check(w < wide_tensors + MTT__LENGTH(wide_tensors) - 1, "a generator has few tensors");
    return w;
}

static void keep_wide(const mtt_tensor *t, double *values)
{
    last_wide = find_wide(t);
    free(last_wide->values);
    *last_wide = (wide_tensor){t->data, values, mtt__elements(t)};
}

static mtt_status run_in_double(void *context, const mtt_op *ops, int count)
{
    (void)context;
    for (int i = 0; i < count; i++) {
        mtt_op op = ops[i];
        const mtt_op_gather *gather = MTT_OPERANDS_OF(gather, &op);
        textbook t = {.op = &op, .exact = 1};
        int operands = op.inputs + op.outputs;
        if (op.kind == MTT_OP_choose_id) continue; /* the test reads the logits before it */
        t.values = widen_all(op.operands, 0, operands);
        t.magnitudes = widen_all(op.operands, op.inputs, operands);
        for (int o = 0; o < operands; o++) { /* an output, too: the cache is added to */
            const wide_tensor *w = t.values[o] ? find_wide(op.operands[o]) : NULL;
            if (!w || !w->values) continue;
            if (w->count == mtt__elements(op.operands[o]))
                memcpy(t.values[o], w->values, (size_t)w->count * sizeof(double));
            else check(o >= op.inputs, "%s is read in part", op.operands[o]->name);
        }
        run_on_host(&op);
        if (TEXTBOOK[op.kind]) TEXTBOOK[op.kind](&t);
        for (int o = op.inputs; o < operands; o++) {
            double *values = t.values[o];
            if (!values) continue;
            if (!TEXTBOOK[op.kind]) { /* embed, whose sum has one rounding */
                free(values);
                values = widen(op.operands[o]);
            }
            for (int64_t k = 0; op.kind == MTT_OP_gather && k < mtt__elements(gather->y); k++) {
                int64_t width = mtt__elements(gather->y) / gather->y->shape[0];
                int row = ((const int32_t *)gather->index->data)[k / width];
                if (row >= 0) values[k] = t.values[0][row * width + k % width];
            }
            keep_wide(op.operands[o], values);
            t.values[o] = NULL;
        }
        close_textbook(&t);
    }
    return MTT_OK;
}

/* Of the logits, which the last operation in double makes. */
static mtt_status download_of_double(void *context, void *to, const void *from, size_t bytes)
{
    const wide_tensor *w = last_wide;
    ptrdiff_t first = w ? (const float *)from - (const float *)w->at : -1;
    (void)context;
    check(first >= 0 && first + (ptrdiff_t)(bytes / sizeof(float)) <= w->count, "only logits are read");
    for (size_t i = 0; first >= 0 && i < bytes / sizeof(float); i++)
        ((float *)to)[i] = (float)w->values[(size_t)first + i];
    return MTT_OK;
}

enum { DRAWN = 6 };

static int keep_id(void *user, int prompt, int32_t id, const char *text, size_t bytes)
{
    int32_t *kept = (int32_t *)user + prompt * (DRAWN + 1);
    (void)text, (void)bytes;
    if (id >= 0 && kept[0] < DRAWN) kept[1 + kept[0]++] = id;
    return 0;
}

/* The device draws the ids of two sequences as mtt_sample draws them from its logits. */
static void chosen_ids(mtt_generator *g, int vocab, int number)
{
    int32_t first[2][3] = {{1, 2, 3}, {4}}, kept[2][DRAWN + 1] = {{0}}, next[2];
    const int32_t *tokens[2] = {first[0], first[1]};
    int counts[2] = {3, 1}, step, i;
    mtt_generation job = {.prompts = tokens, .sizes = counts, .prompt_count = 2, .count = DRAWN,
                          .sampling = {.temperature = number % 4 ? 0.9f : 0, .top_k = number % 3 ? 20 : 0,
                                       .top_p = number % 2 ? 0.9f : 0, .seed = (uint64_t)number},
                          .write = keep_id, .user = kept};
    float *logits = malloc(2 * (size_t)vocab * sizeof(float));
    check(!mtt_generator_run(g, NULL, &job), "generator %d: %s", number, env.error);
    for (i = 0; i < 2; i++) check(!mtt_generator_cut(g, i, 0), "%s", env.error);
    for (step = 0; step < DRAWN; step++) {
        check(!mtt_generator_append(g, tokens, counts, logits), "generator %d: %s", number, env.error);
        for (i = 0; i < 2; i++) {
            mtt_sampling s = job.sampling;
            s.seed += (uint64_t)i;
            next[i] = mtt_sample(logits + i * vocab, vocab, &s, (uint64_t)step);
            check(next[i] == kept[i][1 + step], "generator %d: sequence %d, step %d: id %d, not %d", number,
                  i, step, (int)kept[i][1 + step], (int)next[i]);
            tokens[i] = &next[i], counts[i] = 1;
        }
    }
    free(logits);
}

/* A whole generator beside the CPU's: prompts in chunks, then steps, which replay a graph from the second one
   on. Its logits may have twice the error of the CPU's, and SLACK units of FP32. The same tokens once more
   give the same bits. */
static void generators(int count)
{
    enum { STEPS = 6, MOST = 40, VOCAB = 130 };
    for (int number = 0; number < count; number++) {
        mtt_model_desc model = {.layers = 2, .heads = 4, .heads_kv = 1 << below(3), .d_model = 64,
                                .vocab = VOCAB, .max_seq = 64, .positions = (mtt_positions)(number % 4),
                                .qk_norm = below(2), .tied_head = below(2)};
        mtt_generator_desc desc = {number % 2 && !turing ? MTT_BF16 : MTT_FP32,
                                   .window = below(2) ? 5 : 0, .batch = 2,
                                   .context = MOST + STEPS, .chunk = 1 + below(20)};
        float logits[4][2 * VOCAB];
        mtt_generator *g[3];
        mtt_backend exact = *mtt_cpu_backend();
        mtt_generator_desc exact_desc = desc;
        int64_t shape[2];
        int32_t ids[2][MOST + STEPS];
        mtt_plan_report plan;
        if (!mine()) continue;
        new_case();
        set_options(&model, number);
        exact.run = run_in_double;
        exact.download = download_of_double;
        exact_desc.precision = MTT_FP32;
        for (int i = 0; i < 2 * (MOST + STEPS); i++) ids[i % 2][i / 2] = below(VOCAB);
        desc.device = MTT_DEVICE_CUDA;
        mtt_status status = mtt_generator_create(&env, &model, &desc, mtt_cpu_backend(), &g[0]);
        if (!status) status = mtt_generator_create(&env, &model, &desc, &cuda, &g[1]);
        if (!status) status = mtt_generator_create(&env, &model, &exact_desc, &exact, &g[2]);
        check(!status && !mtt_generator_plan(&env, &model, &desc, &plan), "generator %d: %s", number,
              env.error);
        if (status) return;
        for (int k = 0; mtt_parameter(mtt_generator_trainer(g[0]), k, shape); k++) {
            int64_t elements = shape[0] * (shape[1] ? shape[1] : 1), i;
            float *values = malloc((size_t)elements * sizeof(float));
            for (i = 0; i < elements; i++) values[i] = shape[1] ? 0.1f * noise() : 0.7f + 0.3f * noise();
            for (i = 0; i < 3; i++)
                check(!mtt_parameter_set(mtt_generator_trainer(g[i]), k, values), "generator %d: %s", number,
                      env.error);
            free(values);
        }
        for (int round = 0; round < 4; round++) { /* the CPU, the device, the device again, the truth */
            mtt_generator *of_round = g[(round + 1) / 2];
            int known[2] = {0, 0}, counts[2];
            uint64_t before = random_state;
            random_state = 77 + (uint64_t)number;
            for (int i = 0; i < 2; i++) {
                counts[i] = 1 + below(MOST);
                check(!mtt_generator_cut(of_round, i, 0), "%s", env.error);
            }
            for (int step = 0; step <= STEPS; step++) {
                const int32_t *tokens[2] = {ids[0] + known[0], ids[1] + known[1]};
                status = mtt_generator_append(of_round, tokens, counts, logits[round]);
                check(!status, "generator %d: %s", number, env.error);
                for (int i = 0; i < 2; i++) known[i] += counts[i], counts[i] = 1;
            }
            random_state = before;
        }
        double error = relative_error(logits[1], logits[3], 2 * VOCAB);
        double fair = relative_error(logits[0], logits[3], 2 * VOCAB);
        check(error <= 2 * fair + SLACK * 0x1p-23, "generator %d: error %g, the CPU's %g", number, error,
              fair);
        check(!memcmp(logits[1], logits[2], sizeof(logits[1])), "generator %d: other bits again", number);
        chosen_ids(g[1], VOCAB, number);
        for (int i = 0; i < 3; i++) mtt_generator_destroy(g[i]);
        for (wide_tensor *w = wide_tensors; w->values; w++) free(w->values), w->values = NULL;
    }
}

static void print_worst(int all)
{
    int i, k;
    printf("largest error, 1 = twice the simple reference's and the slack\n");
    printf("%-26s %6s %7s %8s %8s %8s %8s %8s\n", "operation", "tries", "shapes", "FP32", "TF32", "BF16",
           "FP16", "FP8");
    for (i = 0; i < MTT_OP_all_to_all; i++) { /* the first of those between ranks, which no GPU runs */
        printf("%-26s %6d %7d", mtt_op_name((mtt_op_kind)i), tried[i], distinct[i]);
        for (k = 0; k < PRECISION_COUNT && TEXTBOOK[i]; k++) printf(" %8.2f", worst[i][k]);
        printf("%s\n", TEXTBOOK[i]                                          ? ""
                       : i == MTT_OP_sum_loss || i == MTT_OP_grad_norm ? " counters"
                       : i == MTT_OP_rescale                           ? " scales"
                                                                       : " the CPU's bits");
        check(distinct[i] >= TRIES || !all, "%s was tried over %d shapes, %d are wanted",
              mtt_op_name((mtt_op_kind)i), distinct[i], TRIES);
    }
}

/* What a model's first product with a bias makes of rows of x of `first`, `second` and zeros, weights of 1
   and biases of `bias`. */
static float small_linear(setup s, float first, float second, float bias)
{
    lock_step l;
    mtt_op *op, *device;
    mtt_tensor y;
    double *results;
    float result;
    int64_t i;
    int o;
    s.model.no_biases = 0;
    l = open_lock_step(&s);
    for (i = 0; l.host->programs[MTT__EVALUATE].ops[i].kind != MTT_OP_linear; i++) {}
    op = &l.host->programs[MTT__EVALUATE].ops[i];
    device = &l.device->programs[MTT__EVALUATE].ops[i];
    for (o = 0; o < op->inputs; o++) { /* x, weight, bias */
        for (i = 0; i < mtt__elements(op->operands[o]); i++) {
            int64_t column = i % mtt__width(op->operands[o]);
            float value = o ? o == 1 ? 1 : bias : column == 0 ? first : column == 1 ? second : 0;
            mtt__store(op->operands[o], i, 1, &value);
        }
        cuda.upload(l.context, device->operands[o]->data, op->operands[o]->data, op->operands[o]->bytes);
    }
    check(cuda.run(l.context, device, 1) == MTT_OK, "linear: %s", env.error);
    y = downloaded(&l, MTT_OPERANDS_OF(linear, device)->y);
    results = widen(&y);
    result = (float)results[0];
    for (i = 0; i < mtt__elements(&y) && results[i] == results[0]; i++) {}
    check(i == mtt__elements(&y), "equal rows and columns give different results (%s)", describe(&s));
    free(results);
    free(y.data);
    close_lock_step(&l);
    return result;
}

/* Which of two simple references of TF32 the device's is: 1 + 2^-11 + 2^-12 becomes 1 + 2^-10 if rounded,
   1 if cut off. */
static void probe_tf32(void)
{
    setup s = random_setup(2);
    float y;
    s.model.vocab = 129;
    s.batch = 1;
    s.seq_len = s.model.max_seq = 128;
    s.policy.precision = MTT_TF32;
    y = small_linear(s, 1 + 0x1p-11f + 0x1p-12f, 0, 0);
    tf32_truncates = y < 1 + 0x1p-12f;
    printf("TF32 operands are %s by this device (1 + 2^-11 + 2^-12 is to it 1 + %g * 2^-10)\n",
           tf32_truncates ? "cut off" : y == 1 + 0x1p-10f ? "rounded" : "kept", ((double)y - 1) * 1024);
}

/* A bias is added before the result is rounded, also to a product that has no algorithm for it, as those of 8
   and 24 columns in tests/emulate.sh: in 16 bits, 1 + 2^-12 would be 1, and less 1 it would be 0. */
static void bias_cancels(void)
{
    int number;
    for (number = 0; number < 4; number++) {
        setup s = random_setup(2);
        float y;
        s.model.d_model = number % 2 ? 16 : 8;
        s.model.heads = 1;
        s.policy.precision = taken(number / 2 ? MTT_FP16 : MTT_BF16);
        y = small_linear(s, 1, 0x1p-12f, -1);
        check(y == 0x1p-12f, "1 + 2^-12 - 1 is %g (%s)", (double)y, describe(&s));
    }
}

/* Tensors of 1 to TRIES numbers go from the device to pinned memory and back. */
static void moves(void)
{
    static float sent[TRIES], back[TRIES];
    mtt_policy policy = {.precision = MTT_FP32, .ranks = 1}; /* as a resolved one has */
    mtt_shape shape = {.batch = 1};
    void *context = context_of(&policy);
    mtt_tensor x = matrix_on_device(context, MTT_F32, 1, TRIES), pinned = x;
    mtt_tensor y = matrix_on_device(context, MTT_F32, 1, TRIES);
    mtt_op_move away_row = {&x, &pinned}, home_row = {&pinned, &y};
    pinned.place = MTT_HOST;
    check(cuda.alloc(context, MTT_HOST, x.bytes, &pinned.data) == MTT_OK, "pinned memory: %s", env.error);
    for (int count = 1; count <= TRIES && pinned.data; count++) {
        mtt_op op = {.kind = MTT_OP_move, .inputs = 1, .outputs = 1, .shape = &shape};
        op.operands = (mtt_tensor **)(void *)&away_row;
        x.shape[1] = y.shape[1] = pinned.shape[1] = count;
        x.bytes = y.bytes = pinned.bytes = (size_t)count * sizeof(float);
        new_case();
        is_new(&op);
        if (!mine()) continue;
        tried[MTT_OP_move] += 2;
        for (int i = 0; i < count; i++) sent[i] = noise();
        memset(back, 0xff, sizeof(back));
        cuda.upload(context, pinned.data, back, x.bytes);
        cuda.upload(context, y.data, back, x.bytes);
        cuda.upload(context, x.data, sent, x.bytes);
        run_alone(context, MTT_OP_move, 1, 1, &away_row, &shape);
        cuda.upload(context, x.data, back, x.bytes);
        run_alone(context, MTT_OP_move, 1, 1, &home_row, &shape);
        check(cuda.download(context, back, y.data, x.bytes) == MTT_OK && !memcmp(back, sent, x.bytes) &&
                  !memcmp(pinned.data, sent, x.bytes),
              "%d numbers come back from the host as others", count);
        check(cuda.download(context, back, pinned.data, x.bytes) == MTT_OK && !memcmp(back, sent, x.bytes),
              "%d numbers on the host are read as others", count);
    }
    cuda.release(context, MTT_HOST, pinned.data);
    cuda.release(context, MTT_CARD, x.data);
    cuda.release(context, MTT_CARD, y.data);
}

static void operations(int large, int small)
{
    int number;
    if (!turing) probe_tf32();
    bias_cancels();
    long_rows();
    edges_of_tiles();
    turns_of_heads();
    products_with_gelu();
    norms_with_sums();
    for (number = 0; number < large; number++) {
        setup s = random_setup(number);
        s.policy.accumulate = 1 + below(2);
        step_schedule(&s, 0);
    }
    for (number = 0; number < small; number++) {
        setup s = small_setup(number);
        s.policy.accumulate = 1 + below(2);
        s.policy.early_update = s.policy.accumulate == 1 && s.policy.precision < MTT_FP16 && number % 3 == 0;
        step_schedule(&s, 1);
    }
    for (number = 0; number < (small < SMALL_SETUPS ? small : OPTION_SETUPS); number++) {
        setup s = option_setup(number);
        s.policy.accumulate = 1 + below(2);
        step_schedule(&s, 1);
    }
    generation(small < SMALL_SETUPS ? small : GENERATION_SETUPS);
    generators(small < SMALL_SETUPS ? 8 : 40);
    moves();
    if (eight) eight_operations(small < SMALL_SETUPS ? small / 2 : EIGHT_SETUPS);
    print_worst(eight && small >= SMALL_SETUPS);
    printf("compact state: %lld of %lld numbers are not the CPU's but next to them\n",
           (long long)compact_others, (long long)compact_numbers);
    check(compact_others <= compact_numbers / 50, "too many numbers of the compact state are not the CPU's");
}

/* Runs the flash operations of a layer with a window; the first time keeps the results, after that compares
   them. */
static void flash_with_window(lock_step *l, mtt_op *ops[2], int window, char *results[3])
{
    const mtt_op_flash *forward = MTT_OPERANDS_OF(flash, ops[0]);
    const mtt_tensor *outputs[3] = {forward->out, forward->lse,
                                    MTT_OPERANDS_OF(flash_backward, ops[1])->d_qkv};
    mtt_shape shape = *ops[0]->shape;
    int i;
    shape.window = window;
    for (i = 0; i < 2; i++) {
        mtt_op op = *ops[i];
        op.shape = &shape;
        check(cuda.run(l->context, &op, 1) == MTT_OK, "flash: %s", env.error);
    }
    for (i = 0; i < 3; i++) {
        mtt_tensor now = downloaded(l, outputs[i]);
        if (results[i]) {
            check(!memcmp(now.data, results[i], now.bytes), "%s: other bits with a window of %d (%s)",
                  now.name, window, describe(&l->s));
            free(now.data);
        } else results[i] = (char *)now.data;
    }
}

/* A window that sees all is no window, to the kernels themselves: mtt_policy_resolve would make it 0 before
   they hear of it. */
static void full_windows(void)
{
    static const int lengths[] = {1, 31, 33, 97, 257, 1024, 1025}, widths[] = {8, 40, 64, 96, 128, 256};
    int number;
    for (number = 0; number < 4 * 7 * 6; number += quick ? 11 : 1) { /* not 7: there are 7 lengths */
        setup s = random_setup(number);
        lock_step l;
        mtt_op *ops[2] = {NULL, NULL};
        char *results[3] = {NULL, NULL, NULL};
        int i, T = lengths[number / 4 % 7];
        if (flash_of(widths[number / 28]) == MTT_ATTENTION_PLAIN || !mine()) continue;
        s.seq_len = s.model.max_seq = T;
        s.batch = s.model.layers = 1;
        s.model.heads = 2;
        s.model.d_model = 2 * widths[number / 28];
        s.model.d_ff = s.model.vocab = 8; /* the flash operations alone are run */
        s.model.dropout = number / 2 % 2 ? 0.2f : 0;
        s.policy.attention = MTT_ATTENTION_FLASH;
        s.policy.window = 0;
        l = open_lock_step(&s);
        fill_state(&l, MTT__TRAIN);
        for (i = 0; i < l.host->programs[MTT__TRAIN].op_count; i++) {
            mtt_op *host = &l.host->programs[MTT__TRAIN].ops[i],
                   *device = &l.device->programs[MTT__TRAIN].ops[i];
            int o, which = host->kind == MTT_OP_flash_backward;
            if (host->kind != MTT_OP_flash && !which) continue;
            ops[which] = device;
            for (o = 0; o < host->inputs; o++) {
                if (which && o > 0 && o < 4) continue; /* qkv, out and lse are the forward operation's */
                if (host->operands[o]->dtype != MTT_U8) fill_tensor(host->operands[o], 1, 0);
                cuda.upload(l.context, device->operands[o]->data, host->operands[o]->data,
                            host->operands[o]->bytes);
            }
        }
        flash_with_window(&l, ops, 0, results);
        flash_with_window(&l, ops, T, results);
        flash_with_window(&l, ops, T + 1, results);
        flash_with_window(&l, ops, 3 * T + 64, results);
        for (i = 0; i < 3; i++) free(results[i]);
        close_lock_step(&l);
    }
}

/* -------------------------------------------------------------------------------------- whole models ---- */

static mtt_trainer *open_trainer(const setup *s, const mtt_backend *backend, mtt_precision precision)
{
    mtt_policy policy = s->policy;
    mtt_trainer *t = NULL;
    policy.precision = precision;
    new_case();
    check(mtt_trainer_create(&env, &s->model, &policy, &s->optim, backend, s->batch, s->seq_len, &t) ==
              MTT_OK,
          "trainer: %s (%s)", env.error, describe(s));
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
static void disturb(mtt_trainer *t, uint64_t seed, int nudged)
{
    int64_t shape[2], k;
    int i;
    random_state = seed;
    for (i = 0; mtt_parameter(t, i, shape); i++) {
        float *values = malloc((size_t)(shape[0] * (shape[1] ? shape[1] : 1)) * sizeof(float));
        if (!shape[1] && mtt_parameter_get(t, i, values) == MTT_OK) {
            for (k = 0; k < shape[0]; k++) {
                values[k] += 0.1f * noise();
                if (nudged) values[k] = nextafterf(values[k], k % 2 ? INFINITY : -INFINITY);
            }
            mtt_parameter_set(t, i, values);
        }
        free(values);
    }
}

static double worst_gradient[PRECISION_COUNT], worst_loss[PRECISION_COUNT], worst_logits[PRECISION_COUNT];

/* FP32 on the CPU is the truth; the same precision on the CPU says what error is fair. For FP32 it is the
   error of a model with gains and biases moved to the next number: steps enlarge a rounding. */
static void whole_model(setup s, int number)
{
    mtt_precision precision = s.policy.precision;
    int all = 2 * s.batch * s.seq_len, step, i;
    int32_t *tokens = malloc((size_t)all * sizeof(int32_t)), *targets = malloc((size_t)all * sizeof(int32_t));
    float *logits[3], *gradients[3];
    double floor = 1e-5, fair, error,
           slack = precision == MTT_TF32   ? 5e-3
                   : precision == MTT_BF16 ? 2e-3
                   : precision == MTT_FP8  ? 4e-3
                   : precision == MTT_FP16 ? 5e-4
                                           : 1e-5;
    mtt_trainer *t[3];
    mtt_step_info info[3];
    if (!mine()) {
        free(tokens);
        free(targets);
        return;
    }
    if (precision == MTT_TF32) floor = 5e-3;
    s.policy.freeze = NULL, s.policy.lora_rank = 0; /* all gradients are read */
    random_tokens(&s, tokens, targets, all);
    targets[0] = 0;
    for (i = 0; i < 3; i++) {
        t[i] = open_trainer(&s, i == 2 ? &cuda : mtt_cpu_backend(), i == 0 ? MTT_FP32 : precision);
        if (!t[i]) return;
        disturb(t[i], (uint64_t)number, i == 1 && precision == MTT_FP32);
    }
    for (step = 0; step < 5; step++) {
        for (i = 0; i < 3; i++)
            check(mtt_train_step(t[i], tokens, targets, &info[i]) == MTT_OK, "step: %s (%s)", env.error,
                  describe(&s));
        error = fabs(info[2].loss - info[0].loss) /
                fmax(info[0].loss, 1); /* a loss learnt by heart stays absolute */
        fair = fabs(info[1].loss - info[0].loss) / fmax(info[0].loss, 1);
        check(error <= 2 * fair + slack && info[2].targets == info[0].targets,
              "loss of step %d: %.8g, on the CPU %.8g, in FP32 %.8g (%s)", step, info[2].loss, info[1].loss,
              info[0].loss, describe(&s));
        if (error > worst_loss[precision]) worst_loss[precision] = error;
        if (step) continue;
        for (i = 0; i < 3; i++) gradients[i] = read_all(t[i], mtt_gradient_get);
        fair = relative_error(gradients[1], gradients[0], parameter_count(t[0]));
        error = relative_error(gradients[2], gradients[0], parameter_count(t[0]));
        check(error <= 2 * fair + floor, "gradient: error %.3g, the CPU's %.3g (%s)", error, fair,
              describe(&s));
        if (error / (2 * fair + floor) > worst_gradient[precision])
            worst_gradient[precision] = error / (2 * fair + floor);
        for (i = 0; i < 3; i++) free(gradients[i]);
    }
    for (i = 0; i < 3; i++) {
        check(mtt_evaluate(t[i], tokens, targets, &info[i]) == MTT_OK, "evaluate: %s (%s)", env.error,
              describe(&s));
        logits[i] = malloc((size_t)s.model.vocab * sizeof(float));
        check(mtt_next_logits(t[i], tokens, 1 + (s.seq_len - 1) / 2, logits[i]) == MTT_OK, "next: %s (%s)",
              env.error, describe(&s));
    }
    fair = fabs(info[1].loss - info[0].loss);
    check(fabs(info[2].loss - info[0].loss) <= 2 * fair + slack * (1 + info[0].loss),
          "evaluation: %.8g, on the CPU %.8g, in FP32 %.8g (%s)", info[2].loss, info[1].loss, info[0].loss,
          describe(&s));
    fair = relative_error(logits[1], logits[0], (size_t)s.model.vocab);
    error = relative_error(logits[2], logits[0], (size_t)s.model.vocab);
    check(error <= 2 * fair + 4 * slack, "next logits: error %.3g, the CPU's %.3g (%s)", error, fair,
          describe(&s));
    if (error > worst_logits[precision]) worst_logits[precision] = error;
    for (i = 0; i < 3; i++) {
        free(logits[i]);
        mtt_trainer_destroy(t[i]);
    }
    free(tokens);
    free(targets);
}

static void whole_models(int setups, mtt_precision from)
{
    int number, p;
    for (number = 0; number < setups && from == MTT_FP32; number++) {
        setup s = random_setup(number + 100 + number / 20);
        if (number % 3 == 1) s.model.positions = MTT_POSITIONS_ROTARY, s.model.rotary_interleaved = below(2);
        /* With eps 1e-8 the first steps follow signs, which roundings flip where gradients are small. By
           chance FP16 is then up to 0.7 % from FP32 after five steps, on a CPU, too; so 0.001 % as a rule. */
        s.optim.eps = 1e-3f;
        whole_model(s, number + 100 + number / 20);
    }
    for (number = 0; number < setups / 2 && eight; number++) {
        setup s = eight_setup(number);
        s.policy.accumulate = 2;
        s.optim.lr = 1e-4f; /* Adam's first steps follow signs, which 8 bits flip where gradients are small */
        s.optim.loss_scale = 0;
        whole_model(s, number);
    }
    for (p = (int)from; p < PRECISION_COUNT; p++)
        printf(
            "%s: gradient error at most %.2f of what is allowed, loss within %.2g, next logits within %.2g\n",
            PRECISIONS[p], worst_gradient[p], worst_loss[p], worst_logits[p]);
}

/* ---------------------------------------------------------------------------------------------- bits ---- */

static setup technique_setup(const technique *t, int layers)
{
    setup s;
    memset(&s, 0, sizeof(s));
    s.model.layers = layers;
    s.model.d_model = 64;
    s.model.heads = t->heads ? t->heads : 2;
    s.model.heads_kv = t->heads_kv, s.model.d_head = t->d_head;
    s.model.qk_norm = t->qk_norm, s.model.positions = t->positions;
    s.model.vocab = 200;
    s.model.max_seq = s.seq_len = t->seq_len ? t->seq_len : 40;
    s.model.dropout = t->dropout;
    s.batch = 2;
    s.policy = t->policy;
    if (!s.policy.accumulate) s.policy.accumulate = 1;
    s.optim.lr = 1e-3f;
    s.optim.seed = 12345;
    s.optim.loss_scale = 1024;
    if (s.policy.early_update) s.optim.clip = -1;
    return s;
}

typedef struct history {
    double loss[8];
    float *weights;
    size_t count;
} history;

/* Leaves no trace in the trainer. */
static void look_at(mtt_trainer *t, const setup *s, const int32_t *tokens, const int32_t *targets)
{
    float *logits = malloc((size_t)s->model.vocab * sizeof(float));
    mtt_step_info info;
    check(mtt_next_logits(t, tokens, 1 + s->seq_len / 2, logits) == MTT_OK &&
              mtt_evaluate(t, tokens, targets, &info) == MTT_OK,
          "evaluation: %s (%s)", env.error, describe(s));
    free(logits);
}

/* Trains from the seed. At step `stop` (0 = nowhere) it saves, and goes on in another trainer that knows only
   the file. With `looks` it evaluates before each step. */
static history trained_with(const setup *s, int steps, int stop, int looks)
{
    mtt_trainer *t = open_trainer(s, &cuda, s->policy.precision);
    int all = s->policy.accumulate * s->batch * s->seq_len, step;
    int32_t *tokens = malloc((size_t)all * sizeof(int32_t)), *targets = malloc((size_t)all * sizeof(int32_t));
    char path[64];
    history h;
    memset(&h, 0, sizeof(h));
    snprintf(path, sizeof(path), "/tmp/mtt_test_cuda_%d.safetensors", (int)getpid());
    random_state = 99;
    for (step = 0; step < steps && t; step++) {
        mtt_step_info info;
        if (stop && step == stop) {
            check(mtt_save(t, path, NULL) == MTT_OK, "save: %s", env.error);
            mtt_trainer_destroy(t);
            t = open_trainer(s, &cuda, s->policy.precision);
            if (!t) break;
            check(mtt_resume(t, path, NULL) == MTT_OK, "resume: %s", env.error);
            unlink(path);
        }
        random_tokens(s, tokens, targets, all);
        if (looks) look_at(t, s, tokens, targets);
        check(mtt_train_step(t, tokens, targets, &info) == MTT_OK, "step: %s (%s)", env.error, describe(s));
        h.loss[step] = info.loss;
    }
    if (t) {
        h.weights = read_all(t, mtt_parameter_get);
        h.count = parameter_count(t);
    }
    mtt_trainer_destroy(t);
    free(tokens);
    free(targets);
    return h;
}

static history trained(const setup *s, int steps, int stop)
{
    return trained_with(s, steps, stop, 0);
}

/* Compares a history bit for bit with the first one and lets go of it. */
static void same_history(const history *first, history again, const char *what, const setup *s)
{
    check(first->weights && again.weights && first->count == again.count &&
              !memcmp(first->loss, again.loss, sizeof(first->loss)) &&
              !memcmp(first->weights, again.weights, first->count * sizeof(float)),
          "other bits %s (%s)", what, describe(s));
    free(again.weights);
}

/* Twenty runs from one seed, one that is interrupted, and one that looks at itself. Precisions `from` up. */
static void repetition(mtt_precision from)
{
    enum { RUNS = 20, STEPS = 6, STOP = 3 };
    int i, run;
    for (i = 0; i < TECHNIQUE_COUNT; i += each()) {
        setup s = technique_setup(&TECHNIQUES[i], 2);
        history first;
        if (s.policy.precision < from || !is_taken(s.policy.precision) || !mine()) continue;
        first = trained(&s, STEPS, 0);
        for (run = 1; run < RUNS / each(); run++)
            same_history(&first, trained(&s, STEPS, 0), "from the same seed", &s);
        same_history(&first, trained(&s, STEPS, STOP), "after a resume", &s);
        same_history(&first, trained_with(&s, STEPS, 0, 1), "with evaluations in between", &s);
        free(first.weights);
    }
    if (quick) return;
    /* products so large that the backend times its algorithms: no matter which of them wins */
    for (i = (int)from; i < PRECISION_COUNT; i++) {
        setup s = random_setup(2);
        history first;
        s.model.d_model = 768;
        s.model.heads = 12;
        s.model.d_ff = 3072;
        s.model.vocab = 5003;
        s.model.layers = 1;
        s.batch = 4;
        s.seq_len = s.model.max_seq = 512;
        s.policy.precision = (mtt_precision)i;
        s.policy.accumulate = 1;
        if (!is_taken(i) || !mine()) continue;
        first = trained(&s, 2, 0);
        for (run = 1; run < 8; run++)
            same_history(&first, trained(&s, 2, 0), "from the same seed, with large products", &s);
        free(first.weights);
    }
}

static mtt_status (*run_list)(void *context, const mtt_op *ops, int count);

/* As the backend runs a list, but without graphs. */
static mtt_status run_singly(void *context, const mtt_op *ops, int count)
{
    mtt_status status = MTT_OK;
    int i;
    for (i = 0; i < count && status == MTT_OK; i++) status = run_list(context, &ops[i], 1);
    return status;
}

static void *own_alloc(void *blocks, size_t bytes)
{
    void *block = NULL;
    if (cudaMalloc(&block, bytes) == cudaSuccess) ++*(int *)blocks;
    return block;
}

static void own_free(void *blocks, void *block)
{
    if (cudaFree(block) == cudaSuccess) --*(int *)blocks;
}

/* Weights after so many steps, of which only the last is waited for, or all of them. */
static float *hurried(const setup *s, int steps, int wait, size_t *count)
{
    mtt_trainer *t = open_trainer(s, &cuda, s->policy.precision);
    int all = s->policy.accumulate * s->batch * s->seq_len, step;
    int32_t *tokens = malloc((size_t)all * sizeof(int32_t)), *targets = malloc((size_t)all * sizeof(int32_t));
    float *weights;
    mtt_step_info info;
    random_state = 77;
    for (step = 0; step < steps; step++) {
        random_tokens(s, tokens, targets, all);
        check(mtt_train_step(t, tokens, targets, wait || step + 1 == steps ? &info : NULL) == MTT_OK,
              "step: %s", env.error);
    }
    check(info.step == steps, "%d steps are counted as %d", steps, (int)info.step);
    weights = read_all(t, mtt_parameter_get);
    *count = parameter_count(t);
    mtt_trainer_destroy(t);
    free(tokens);
    free(targets);
    return weights;
}

/* The same bits from single operations, on a caller's stream and memory, and where nobody waits for a step:
   600 of them send more than the staging buffer holds. */
static void ways_to_run(mtt_precision from)
{
    int precision, blocks = 0;
    for (precision = (int)from; precision < PRECISION_COUNT; precision++) {
        setup s = random_setup(2);
        history first;
        float *weights[2];
        size_t count;
        cudaStream_t stream = NULL;
        if (!is_taken(precision) || !mine()) continue;
        s.model.layers = 3;
        s.model.d_ff = 0;
        s.model.dropout = 0.1f;
        s.batch = 8;
        s.seq_len = 128;
        s.model.max_seq = 128;
        s.policy.precision = (mtt_precision)precision;
        s.policy.attention = MTT_ATTENTION_FLASH;
        s.policy.recompute = precision % 2 ? MTT_RECOMPUTE_LAYER : MTT_RECOMPUTE_NONE;
        first = trained(&s, 4, 0);
        run_list = cuda.run;
        cuda.run = run_singly;
        same_history(&first, trained(&s, 4, 0), "one operation at a time", &s);
        cuda.run = run_list;
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "no stream");
        cuda.stream = stream;
        cuda.device_alloc = own_alloc;
        cuda.device_free = own_free;
        cuda.user = &blocks;
        same_history(&first, trained(&s, 4, 0), "on a caller's stream and memory", &s);
        check(blocks == 0, "%d blocks of the caller's are not given back", blocks);
        cuda.stream = cuda.user = NULL;
        cuda.device_alloc = NULL;
        cuda.device_free = NULL;
        check(cudaStreamDestroy(stream) == cudaSuccess, "the caller's stream does not close");
        weights[0] = hurried(&s, 600, 1, &count);
        weights[1] = hurried(&s, 600, 0, &count);
        check(!memcmp(weights[0], weights[1], count * sizeof(float)), "other bits where nobody waits (%s)",
              describe(&s));
        free(weights[0]);
        free(weights[1]);
        free(first.weights);
    }
}

/* Recomputation changes no bit, in any precision, with either attention, with dropout. Under FP8 the loss is
   the full one where the head's product is not in 8 bits. */
static void recomputation(mtt_precision from)
{
    int precision, attention, loss, way;
    for (precision = (int)from; precision < PRECISION_COUNT; precision++)
        for (attention = 0; attention < 2; attention++)
            for (loss = 0; loss < 2; loss++) {
                setup s = random_setup(2);
                history first;
                if (!is_taken(precision) || !mine()) continue;
                s.model.layers = 4;
                s.model.d_ff = 0;
                s.model.vocab = 1003;
                s.model.dropout = 0.1f;
                s.batch = 8;
                s.seq_len = 200;
                s.model.max_seq = 256;
                s.policy.precision = (mtt_precision)precision;
                s.policy.attention = (mtt_attention)attention;
                s.policy.loss = (mtt_loss)(1 + loss);
                s.policy.loss_chunk_rows = 300;
                s.policy.window = attention ? 50 : 0;
                s.policy.fp8_products = loss ? MTT_FP8_ALL : MTT_FP8_LAYERS;
                first = trained(&s, 3, 0);
                for (way = 0; way < 5; way++) {
                    static const char *const WAYS[] = {"a second time", "with recompute selective",
                                                       "with recompute layer", "with recompute segments",
                                                       "with recompute recursive"};
                    s.policy.recompute = way == 4 ? MTT_RECOMPUTE_RECURSIVE : (mtt_recompute)way;
                    same_history(&first, trained(&s, 3, 0), WAYS[way], &s);
                }
                free(first.weights);
            }
}

/* -------------------------------------------------------------------------------------------- memory ---- */

/* The model of the write-up's suite a. */
static setup suite_setup(const technique *t, int batch)
{
    setup s = technique_setup(t, 4);
    s.model.d_model = 256;
    s.model.heads = 8;
    s.model.vocab = 50257;
    s.model.positions = MTT_POSITIONS_SINUSOIDAL;
    s.model.max_seq = s.seq_len = 256;
    s.batch = batch;
    return s;
}

static mtt_policy on_cuda(mtt_policy policy)
{
    policy.device = MTT_DEVICE_CUDA;
    policy.ranks = 1; /* as a resolved one has, which opening takes */
    return policy;
}

/* A trainer of the given setup from creation to its third step, by when its graphs stand; returns how many
   bytes of the device it took meanwhile. `context` only asks. */
static int64_t bytes_taken(const setup *s, void *context, const int32_t *tokens, size_t planned)
{
    size_t before = 0, after = 0, all = 0;
    mtt_trainer *t;
    mtt_step_info info;
    int step;
    check(cuda.memory(context, &before, &all) == MTT_OK, "memory: %s", env.error);
    t = open_trainer(s, &cuda, s->policy.precision);
    for (step = 0; step < 3 && t; step++) {
        check(mtt_train_step(t, tokens, tokens, &info) == MTT_OK, "step: %s (%s)", env.error, describe(s));
        check(info.arena_bytes == planned, "the plan says %zu bytes, the trainer %zu", planned,
              info.arena_bytes);
    }
    check(cuda.memory(context, &after, &all) == MTT_OK, "memory: %s", env.error);
    mtt_trainer_destroy(t);
    return (int64_t)before - (int64_t)after;
}

/* The write-up's 18 experiments, each twice. What is planned is what the trainer says it took, and what the
   device then lacks is that in pages of 2 MiB, the smallest that cudaMalloc gives, and not a byte more. In an
   experiment's first run the driver also loads the code of kernels that no trainer has run before, 2 to 4 MiB
   that stay, and takes memory for graphs, about 2.4 KB a node. So that the first run is that of a fresh
   process, no kernel may run before. */
static void planned_bytes(void)
{
    enum { LONGEST = 128 * 256, PAGE = 2 << 20 };
    enum {
        FIRST_RUN_PAGES = 4
    }; /* two of code, one of graphs, and one because what is taken apart rounds up apart */
    static const technique EXPERIMENTS[] =
        {{"fp32", {.precision = MTT_FP32}, .dropout = 0},
         {"bf16", {.precision = MTT_BF16}, .dropout = 0},
         {"bf16_flash", {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH}, .dropout = 0},
         {"bf16_window16",
          {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH, .window = 16},
          .dropout = 0},
         {"bf16_window32",
          {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH, .window = 32},
          .dropout = 0},
         {"checkpointing", {.precision = MTT_FP32, .recompute = MTT_RECOMPUTE_LAYER}, .dropout = 0}};
    int32_t *tokens = malloc(LONGEST * sizeof(int32_t));
    int i, batch;
    for (i = 0; i < LONGEST; i++) tokens[i] = i * 7919 % 50257;
    for (i = 0; i < (int)MTT__LENGTH(EXPERIMENTS); i++)
        for (batch = is_taken(EXPERIMENTS[i].policy.precision) ? 32 : INT_MAX; batch <= 128; batch *= 2) {
            setup s = suite_setup(&EXPERIMENTS[i], batch);
            mtt_policy policy = on_cuda(s.policy);
            mtt_plan_report plan;
            void *context = NULL;
            int64_t first, second, pages;
            check(mtt_plan(&env, &s.model, &policy, batch, s.seq_len, &plan) == MTT_OK, "plan: %s",
                  env.error);
            check(plan.parameters == 28941393, "%lld parameters", (long long)plan.parameters);
            check(cuda.open(&env, &cuda, &policy, &context) == MTT_OK, "open: %s", env.error);
            if (!context) continue;
            pages = (int64_t)((plan.arena_bytes + PAGE - 1) / PAGE) * PAGE;
            first = bytes_taken(&s, context, tokens, plan.arena_bytes) - pages;
            second = bytes_taken(&s, context, tokens, plan.arena_bytes) - pages;
            cuda.close(context);
            printf("%-14s batch %3d: planned %11zu bytes, %5lld pages of 2 MiB, beside them %8lld bytes in "
                   "the first run, %lld in the second\n",
                EXPERIMENTS[i].name, batch, plan.arena_bytes, (long long)pages / PAGE, (long long)first,
                (long long)second);
            check(first >= 0 && first <= FIRST_RUN_PAGES * PAGE,
                  "the first run took %lld bytes beside the arena (%s)", (long long)first, describe(&s));
            check(second == 0, "the second run took %lld bytes beside the arena (%s)", (long long)second,
                  describe(&s));
        }
    free(tokens);
}

/* Whether a text has a number within one of the given: the device's free bytes vary by a page. */
static int names_about(const char *text, int number)
{
    for (; *text; text++) {
        char *end;
        if (*text < '0' || *text > '9') continue;
        if (labs(strtol(text, &end, 10) - number) <= 1) return 1;
        text = end - 1;
    }
    return 0;
}

/* What does not fit is refused with what was needed, what is free, what is largest and which batch would fit;
   the process goes on. */
static void out_of_memory(void)
{
    setup s = suite_setup(&TECHNIQUES[0], 1 << 17), small = technique_setup(&TECHNIQUES[0], 1);
    mtt_trainer *t = NULL;
    mtt_policy policy = on_cuda(s.policy);
    mtt_plan_report plan;
    void *context = NULL;
    size_t free_bytes = 0, all_bytes = 0;
    char needed[32];
    int fits = 0;
    int32_t tokens[80] = {0};
    check(mtt_plan(&env, &s.model, &policy, s.batch, s.seq_len, &plan) == MTT_OK, "plan: %s", env.error);
    snprintf(needed, sizeof(needed), "%zu", plan.arena_bytes);
    check(cuda.open(&env, &cuda, &policy, &context) == MTT_OK &&
              cuda.memory(context, &free_bytes, &all_bytes) == MTT_OK,
          "memory: %s", env.error);
    if (context) cuda.close(context);
    check(free_bytes > 0 && free_bytes <= all_bytes, "%zu of %zu bytes are free", free_bytes, all_bytes);
    check(mtt_plan_max_batch(&env, &s.model, &policy, s.seq_len, free_bytes, &fits) == MTT_OK &&
              fits < s.batch,
          "largest batch: %s", env.error);
    check(mtt_trainer_create(&env, &s.model, &s.policy, &s.optim, &cuda, s.batch, s.seq_len, &t) ==
                  MTT_E_BUDGET &&
              !t,
          "a batch of %d: %s", s.batch, env.error);
    printf("%s\n", env.error);
    check(strstr(env.error, needed) && strstr(env.error, "largest") && strstr(env.error, "logits") &&
              names_about(env.error, fits),
          "the text lacks what is needed (%s), the largest tensors or the batch that fits (%d): %s", needed,
          fits, env.error);
    t = open_trainer(&small, &cuda, MTT_FP32);
    check(t && mtt_train_step(t, tokens, tokens, NULL) == MTT_OK, "a smaller model after that: %s",
          env.error);
    mtt_trainer_destroy(t);
}

/* FP16 and FP8 skip what overflows and halve the scale, on the device alone. */
static void overflow(mtt_precision precision)
{
    setup s = random_setup(2);
    mtt_trainer *t;
    int32_t tokens[64], targets[64];
    mtt_step_info info;
    float *before, *after;
    float loss_scale = 0;
    int step, skipped = 0;
    s.model.d_ff = 0;
    s.model.vocab = 129;
    s.batch = 1;
    s.seq_len = 32;
    s.model.max_seq = 32;
    s.policy.precision = precision;
    s.optim.loss_scale = precision == MTT_FP8 ? 0x1p38f : 0x1p30f; /* of 64 tokens it is 2^30 as well */
    random_tokens(&s, tokens, targets, 64);
    t = open_trainer(&s, &cuda, precision);
    before = read_all(t, mtt_parameter_get);
    for (step = 0; step < 30; step++) {
        check(mtt_train_step(t, tokens, targets, &info) == MTT_OK, "step: %s", env.error);
        if (step == 0) {
            loss_scale = info.loss_scale;
            check(loss_scale == 0x1p30f, "the first loss scale is %g", (double)loss_scale);
            after = read_all(t, mtt_parameter_get);
            check(info.skipped && !memcmp(before, after, parameter_count(t) * sizeof(float)),
                  "a step that overflows changes nothing");
            free(after);
        }
        if (info.skipped)
            check(info.loss_scale == loss_scale / (float)(1u << skipped++), "the loss scale halves: %g",
                  (double)info.loss_scale);
    }
    check(skipped > 0 && skipped < 30, "%d of 30 steps skipped", skipped);
    free(before);
    mtt_trainer_destroy(t);
}

/* A model of which not even one token fits. */
static void too_large(void)
{
    setup s = random_setup(2);
    mtt_trainer *t = NULL;
    s.model.d_model = 16384;
    s.model.heads = 64;
    s.model.layers = 512;
    check(mtt_trainer_create(&env, &s.model, &s.policy, &s.optim, &cuda, 1, 1, &t) == MTT_E_BUDGET && !t,
          "too large a model: %s", env.error);
    printf("%s\n", env.error);
}

/* A's model under 24 GB: the largest batch takes a step, and one sequence more would need more. */
static void largest_batch(void)
{
    static const technique CASES[] = {{"tf32", {.precision = MTT_TF32}, .dropout = 0},
                                      {"bf16_flash",
                                       {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH},
                                       .dropout = 0},
                                      {"bf16_flash_checkpointing_chunked",
                                       {.precision = MTT_BF16,
                                        .attention = MTT_ATTENTION_FLASH,
                                        .recompute = MTT_RECOMPUTE_LAYER,
                                        .loss = MTT_LOSS_CHUNKED},
                                       .dropout = 0}};
    const size_t budget = (size_t)24 * 1000 * 1000 * 1000;
    int i, batch = 0;
    for (i = 0; i < (int)MTT__LENGTH(CASES); i++) {
        setup s = suite_setup(&CASES[i], 1);
        if (!is_taken(s.policy.precision)) continue;
        mtt_policy policy = on_cuda(s.policy);
        mtt_plan_report plan = {0}, more = {0};
        mtt_step_info info = {0};
        mtt_trainer *t;
        int32_t *tokens;
        int count;
        check(mtt_plan_max_batch(&env, &s.model, &policy, s.seq_len, budget, &batch) == MTT_OK,
              "largest batch: %s", env.error);
        s.batch = batch;
        check(mtt_plan(&env, &s.model, &policy, batch, s.seq_len, &plan) == MTT_OK &&
                  plan.arena_bytes <= budget &&
                  mtt_plan(&env, &s.model, &policy, batch + 1, s.seq_len, &more) == MTT_OK &&
                  more.arena_bytes > budget,
              "%d sequences take %zu bytes, one more takes %zu", batch, plan.arena_bytes, more.arena_bytes);
        count = batch * s.seq_len;
        tokens = malloc(2 * (size_t)count * sizeof(int32_t));
        random_tokens(&s, tokens, tokens + count, count);
        t = open_trainer(&s, &cuda, s.policy.precision);
        check(t && mtt_train_step(t, tokens, tokens + count, &info) == MTT_OK && isfinite(info.loss) &&
                  info.arena_bytes == plan.arena_bytes,
              "a step of %d sequences: %s", batch, env.error);
        printf("under 24 GB, %s: %d sequences, %zu bytes; one more takes %zu\n", CASES[i].name, batch,
               plan.arena_bytes, more.arena_bytes);
        mtt_trainer_destroy(t);
        free(tokens);
    }
}

/* ---------------------------------------------------------------------------------- around a failure ---- */

/* tests/platforms/emulate_host.h: a call fails once, after `after` successes. NULL on a device. */
void emulate_fault(const char *call, int error, int after) __attribute__((weak));

static setup failing_setup(void)
{
    setup s = {.model = {.layers = 1, .heads = 2, .d_model = 32, .vocab = 50}, .batch = 1, .seq_len = 32};
    return s;
}

/* Trains some steps. Returns the last loss, 0 after a failure. */
static double loss_after(mtt_trainer *t, const setup *s, int steps)
{
    int32_t tokens[64], targets[64];
    mtt_step_info info = {0};
    random_state = 5;
    random_tokens(s, tokens, targets, s->batch * s->seq_len);
    while (steps-- && mtt_train_step(t, tokens, targets, &info) == MTT_OK) {}
    return steps < 0 ? info.loss : 0;
}

/* An upload's bytes lie in the staging buffer until the device has copied them: a wait that fails has not
   shown that. Nor has one that a download failed in, and the device may still write there. */
static void staging_after_a_failed_wait(int downloads)
{
    enum { SIZE = 3 << 20 }; /* two of them fill the staging buffer */
    mtt_policy policy = {.ranks = 1};
    char *first = malloc(SIZE), *second = malloc(SIZE), *back = malloc(SIZE);
    void *context = NULL, *block = NULL;
    new_case();
    memset(first, 1, SIZE);
    memset(second, 2, SIZE);
    check(cuda.open(&env, &cuda, &policy, &context) == MTT_OK &&
              cuda.alloc(context, MTT_CARD, 2 * SIZE, &block) == MTT_OK, "opening: %s", env.error);
    check(cuda.upload(context, block, first, SIZE) == MTT_OK, "the first upload: %s", env.error);
    emulate_fault("cudaStreamSynchronize", cudaErrorUnknown, downloads);
    check((downloads ? cuda.download(context, back, block, SIZE)
                     : cuda.upload(context, (char *)block + SIZE, second, SIZE)) == MTT_E_DEVICE,
          "a wait that fails is not reported");
    check(cuda.upload(context, (char *)block + SIZE, second, SIZE) == MTT_OK, "after a failed wait: %s",
          env.error);
    check(cuda.download(context, back, block, SIZE) == MTT_OK && !memcmp(back, first, SIZE),
          "the upload before a failed wait has arrived changed");
    check(cuda.download(context, back, (char *)block + SIZE, SIZE) == MTT_OK && !memcmp(back, second, SIZE),
          "the upload after a failed wait has arrived changed");
    if (block) cuda.release(context, MTT_CARD, block);
    if (context) cuda.close(context);
    free(first), free(second), free(back);
}

/* A device that says it has clusters, but cannot tell how many it holds: the loss takes two passes. */
static void clusters_unknown(void)
{
    setup s = failing_setup();
    double expected;
    mtt_trainer *t;
    s.model.d_model = 8, s.model.heads = 1;
    s.model.vocab = 120000; /* a row needs several blocks */
    s.policy.loss = MTT_LOSS_CHUNKED;
    t = open_trainer(&s, &cuda, MTT_FP32);
    expected = loss_after(t, &s, 1);
    mtt_trainer_destroy(t);
    t = open_trainer(&s, &cuda, MTT_FP32);
    emulate_fault("cudaOccupancyMaxActiveClusters", cudaErrorNotSupported, 0);
    check(fabs(loss_after(t, &s, 1) / expected - 1) < 1e-6, "without a number of clusters: %s", env.error);
    emulate_fault("none", 0, 0);
    mtt_trainer_destroy(t);
}

/* Each call that can find no code for the device says what to do about it, and nothing else. */
static void remedies(void)
{
    static const char *const CALLS[] = {"launch", "cudaFuncSetAttribute", "cudaFuncGetAttributes"};
    static const struct { int error; const char *words[2]; } CASES[] = {
        {cudaErrorNoKernelImageForDevice, {"-arch=native", "use the CPU"}},
        {cudaErrorInvalidDeviceFunction, {"-arch=native", "use the CPU"}},
        {cudaErrorUnsupportedPtxVersion, {"river", "nvidia-smi"}},
        {cudaErrorMemoryAllocation, {"other programs", "batch"}},
        {cudaErrorIllegalAddress, {"again", "smaller model"}},
        {cudaErrorUnknown, {"smaller model", "driver"}}};
    setup s = failing_setup();
    s.model.heads = 1;
    s.model.d_model = turing ? 128 : 256; /* attention in more than 48 KB of shared memory */
    s.policy.attention = MTT_ATTENTION_FLASH;
    for (size_t i = 0; i < MTT__LENGTH(CALLS) * MTT__LENGTH(CASES); i++) {
        const char *call = CALLS[i % MTT__LENGTH(CALLS)], *const *words = CASES[i / MTT__LENGTH(CALLS)].words;
        mtt_trainer *t = NULL;
        new_case();
        s.policy.precision = taken(MTT_BF16);
        env.error[0] = 0;
        emulate_fault(call, CASES[i / MTT__LENGTH(CALLS)].error, 0);
        if (mtt_trainer_create(&env, &s.model, &s.policy, &s.optim, &cuda, s.batch, s.seq_len, &t) == MTT_OK)
            check(loss_after(t, &s, 1) == 0, "%s does not fail", call);
        check(strstr(env.error, words[0]) && strstr(env.error, words[1]), "%s fails: \"%s\" lacks %s or %s",
              call, env.error, words[0], words[1]);
        check((words[1][0] == 's' || words[0][0] == 's') == !!strstr(env.error, "smaller model"),
              "%s fails: %s", call, env.error);
        mtt_trainer_destroy(t);
    }
}

/* A fast device with code for all devices of its kind: the user is told what is missing, and nobody else. */
static void keep_note(void *user, const char *text) { *(const char **)user = text; }

static void slow_code(void)
{
    setup s = failing_setup();
    for (int without = 0; without < 2; without++) {
        mtt_backend backend = cuda;
        const char *note = "";
        int major = 0;
        new_case();
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
        if (without) emulate_fault("sm_90a", 1, 0);
        backend.note = keep_note, backend.user = &note;
        mtt_trainer_destroy(open_trainer(&s, &backend, MTT_FP32));
        check(without && major == 9 ? !!strstr(note, "code=sm_90a") : !*note, "%s sm_90a the note is \"%s\"",
              without ? "without" : "with", note);
    }
    emulate_fault("none", 0, 0);
}

/* Code for older devices than this one lacks the numbers of 8 bits, and says how to have them. */
static void older_code(void)
{
    if (!eight) return;
    emulate_fault("compute_80", 1, 0);
    check(!takes(MTT_FP8) && strstr(env.error, "-arch=native, or take bf16"), "FP8 by code for 8.0: %s",
          env.error);
    check(takes(MTT_FP8), "FP8 by its own code: %s", env.error);
}

/* An activation that has no kernel is refused. */
static void unknown_activation(mtt_precision precision)
{
    setup s = failing_setup();
    mtt_trainer *t;
    s.model.mlp = MTT_MLP_SILU;
    t = open_trainer(&s, &cuda, precision);
    for (int i = 0; t && i < MTT__PROGRAMS; i++) t->schedule->programs[i].shape.mlp = (mtt_mlp)77;
    check(t && loss_after(t, &s, 1) == 0 && strstr(env.error, "mlp 77"), "an unknown activation: %s",
          env.error);
    mtt_trainer_destroy(t);
}

/* What Turing lacks is refused by name, with what to take in its place. */
static void refusals(void)
{
    setup s = failing_setup();
    mtt_trainer *t;
    const char *word[] = {NULL, "fp32", "fp16", NULL, "fp16"};
    for (int i = 0; i < PRECISION_COUNT; i++)
        check(takes((mtt_precision)i) == !word[i] && (!word[i] || strstr(env.error, word[i])), "%s: %s",
              PRECISIONS[i], env.error);
    s.model.heads = 1;
    s.policy.attention = MTT_ATTENTION_FLASH;
    for (int i = 0; i < 2; i++) {
        s.model.d_model = i ? 136 : 256;
        t = open_trainer(&s, &cuda, i ? MTT_FP16 : MTT_FP32);
        check(t && loss_after(t, &s, 1) == 0 && strstr(env.error, "narrower heads"), "heads of %d: %s",
              s.model.d_model, env.error);
        mtt_trainer_destroy(t);
    }
}

/* A backend that stays open: what one trainer opens, the next finds open. */
static void *kept_context;

static mtt_status open_kept(mtt_env *unused, const mtt_backend *backend, const mtt_policy *policy,
                            void **context)
{
    (void)unused;
    mtt_status status = kept_context ? MTT_OK : cuda.open(&env, backend, policy, &kept_context);
    *context = kept_context;
    return status;
}

static void close_kept(void *context) { (void)context; }

/* Memory that is handed out in order, and again from its beginning. */
static char *pile;
static size_t piled;

static void *alloc_from_pile(void *user, size_t bytes)
{
    void *block = pile + piled;
    (void)user;
    piled += (bytes + 63) / 64 * 64;
    return block;
}

static void free_from_pile(void *user, void *block) { (void)user, (void)block; }

/* Two schedules in turn on one open backend. The second one's lists lie where the first one's were freed, and
   must not run as these. */
static void lists_at_one_address(void)
{
    setup s = failing_setup();
    mtt_env piling = {.alloc = alloc_from_pile, .free = free_from_pile};
    mtt_backend kept = cuda;
    const mtt_op *ops[2] = {NULL, NULL};
    kept.open = open_kept, kept.close = close_kept;
    pile = malloc((size_t)64 << 20);
    new_case();
    for (int i = 0; i < 2; i++) {
        mtt_trainer *t = NULL;
        double alone, loss;
        s.model.dropout = i ? 0.5f : 0.0625f;
        t = open_trainer(&s, &cuda, MTT_FP32);
        alone = loss_after(t, &s, 4);
        mtt_trainer_destroy(t);
        piled = 0;
        check(mtt_trainer_create(&piling, &s.model, &s.policy, &s.optim, &kept, s.batch, s.seq_len, &t) ==
                  MTT_OK, "a trainer: %s", piling.error);
        ops[i] = t->schedule->programs[MTT__TRAIN].ops;
        loss = loss_after(t, &s, 4); /* the second step is captured */
        check(loss == alone, "schedule %d on an open backend: loss %.9g, alone %.9g", i, loss, alone);
        mtt_trainer_destroy(t);
    }
    check(ops[0] == ops[1], "the lists have different addresses: nothing was tested");
    cuda.close(kept_context);
    kept_context = NULL;
    free(pile);
}

/* Activations that wait on the host leave a trainer's bits, in graphs, too. More memory than a host has is
   refused with its size and a remedy, and nothing is left of the failure. */
static void host_memory(void)
{
    setup s = failing_setup();
    s.model.layers = 3;
    s.batch = 2;
    for (int kind = 0; kind < 3 * 2; kind++) {
        const mtt_precision precision = kind / 2 == 2 ? MTT_FP8 : kind / 2 ? taken(MTT_BF16) : MTT_FP32;
        double loss[2];
        mtt_plan_report plan[2];
        if (precision == MTT_FP8 && !eight) continue;
        s.policy.recompute = kind % 2 ? MTT_RECOMPUTE_LAYER : MTT_RECOMPUTE_NONE;
        for (away = 0; away < 2; away++) {
            mtt_trainer *t = open_trainer(&s, &cuda, precision);
            loss[away] = loss_after(t, &s, 4); /* the second step is captured */
            mtt_schedule_report(mtt_trainer_schedule(t), &plan[away]);
            mtt_trainer_destroy(t);
        }
        away = 0;
        check(loss[0] > 0 && loss[0] == loss[1], "%s: loss %.9g with the host, %.9g without",
              PRECISIONS[precision], loss[1], loss[0]);
        check(!plan[0].host_bytes && plan[1].host_bytes && plan[1].arena_bytes < plan[0].arena_bytes,
              "%zu bytes on the host, %zu and not %zu on the card", plan[1].host_bytes, plan[1].arena_bytes,
              plan[0].arena_bytes);
    }
    mtt_policy policy = {.ranks = 1};
    void *context = NULL, *block = &s;
    new_case();
    check(cuda.open(&env, &cuda, &policy, &context) == MTT_OK, "opening: %s", env.error);
    if (!context) return;
    check(cuda.alloc(context, MTT_HOST, (size_t)1 << 50, &block) == MTT_E_MEMORY && !block &&
              strstr(env.error, "1125899906842624 bytes") && strstr(env.error, "ulimit -l"),
          "2^50 bytes of pinned memory: %s", env.error);
    check(cuda.alloc(context, MTT_HOST, 1 << 20, &block) == MTT_OK && block, "after that: %s", env.error);
    cuda.release(context, MTT_HOST, block);
    cuda.close(context);
}

/* Variables by which cuBLAS computes in another precision are refused by name; others are not. */
static void environment(void)
{
    static const struct { const char *name, *value; int refused; } CASES[] = {
        {"NVIDIA_TF32_OVERRIDE", "1", 1}, {"NVIDIA_TF32_OVERRIDE", "0", 1}, {"NVIDIA_TF32_OVERRIDE", "", 1},
        {"CUBLAS_EMULATE_SINGLE_PRECISION", "1", 1}, {"CUBLAS_EMULATE_SINGLE_PRECISION", "0", 0},
        {"CUBLASLT_LOG_LEVEL", "0", 0},
    };
    for (size_t i = 0; i < MTT__LENGTH(CASES); i++) {
        char *before = getenv(CASES[i].name), word[100];
        mtt_backend backend;
        before = before ? strdup(before) : NULL;
        setenv(CASES[i].name, CASES[i].value, 1);
        env.error[0] = 0;
        mtt_status status = mtt_cuda_backend(&env, 0, &backend);
        snprintf(word, sizeof(word), ": unset %s", CASES[i].name);
        check(CASES[i].refused ? status == MTT_E_DEVICE && strstr(env.error, word) && !backend.open
                               : status == MTT_OK, "%s=%s: status %d, %s", CASES[i].name, CASES[i].value,
              (int)status, env.error);
        if (before) setenv(CASES[i].name, before, 1);
        else unsetenv(CASES[i].name);
        free(before);
    }
}

static void failures(void)
{
    environment();
    lists_at_one_address();
    host_memory();
    if (turing) refusals();
    unknown_activation(taken(MTT_BF16));
    if (eight) unknown_activation(MTT_FP8);
    if (!emulate_fault) return; /* tests/faults_gpu.sh makes calls of a device fail */
    staging_after_a_failed_wait(0);
    staging_after_a_failed_wait(1);
    clusters_unknown();
    remedies();
    slow_code();
    older_code();
}

/* The CPU in place of the device. */
static mtt_status run_list_on_host(void *context, const mtt_op *ops, int count)
{
    int i;
    (void)context;
    for (i = 0; i < count; i++) {
        mtt_op op = ops[i];
        run_on_host(&op);
    }
    return MTT_OK;
}

static void told(const char *what, double start)
{
    printf("%s: at %.1f s\n", what, (mtt__now_ms() - start) * 1e-3);
    fflush(stdout);
}

/* Whole programs in the precisions from `from` up. */
static void programs(int models, mtt_precision from, double start)
{
    repetition(from);
    told("repetition and resume", start);
    if (quick) skip("recomputation, ways to run, large products: too long for quick");
    else recomputation(from), ways_to_run(from);
    told("recomputation and ways to run", start);
    if (from <= MTT_FP16 && mine()) overflow(MTT_FP16);
    if (eight && mine()) overflow(MTT_FP8);
    whole_models(models / each(), from);
    told("whole models", start);
}

int main(int argc, char **argv)
{
    double start = mtt__now_ms();
    int scale, all;
    setvbuf(stdout, NULL, _IOLBF, 0); /* a run that is ended keeps its lines */
    quick = argc > 1 && !strcmp(argv[1], "quick");
    argc -= quick, argv += quick;
    if (argc > 3 && !strcmp(argv[1], "part")) {
        part = atoi(argv[2]), parts = atoi(argv[3]);
        argc -= 3, argv += 3;
    }
    scale = argc > 1 && atoi(argv[1]) > 0 ? atoi(argv[1]) : 1;
    mallopt(M_MMAP_MAX, 0); /* large blocks are used again: the kernel need not clear their pages each time */
    mallopt(M_TRIM_THRESHOLD, INT_MAX);
    if (argc > 1 && !strcmp(argv[1], "textbook")) {
        cuda = *mtt_cpu_backend();
        cuda.run = run_list_on_host;
        eight_operations(argc > 2 ? atoi(argv[2]) : EIGHT_SETUPS);
        print_worst(0);
        close_contexts();
        return finish();
    }
    if (mtt_cuda_backend(&env, 0, &cuda) != MTT_OK) {
        skip(env.error);
        check(env.error[0], "a reason is given");
        return finish();
    }
    all = argc < 2 || atoi(argv[1]) > 0;
    turing = !takes(MTT_BF16);
    if (turing) skip(env.error);
    eight = takes(MTT_FP8);
    if (!eight) skip(env.error);
    if (all && alone()) planned_bytes(), told("planned bytes", start);
    if (argc > 1 && !strcmp(argv[1], "fp8")) {
        if (!eight) return finish();
        eight_operations(argc > 2 ? atoi(argv[2]) : EIGHT_SETUPS);
        print_worst(0);
        told("operations", start);
        close_contexts();
        programs(40, MTT_FP8, start);
        return finish();
    }
    if (argc > 1 && !strcmp(argv[1], "failures")) {
        failures();
        return finish();
    }
    if (argc > 2 && !strcmp(argv[1], "operations")) {
        operations(atoi(argv[2]), argc > 3 ? atoi(argv[3]) : 0);
        return finish();
    }
    if (argc > 1 && !strcmp(argv[1], "attention")) {
        edges_of_tiles();
        told("edges of tiles", start);
        turns_of_heads();
        told("turns of heads", start);
        full_windows();
        told("full windows", start);
        return finish();
    }
    operations(80 * scale, SMALL_SETUPS * scale);
    told("operations", start);
    full_windows();
    told("full windows", start);
    close_contexts();
    programs(40 * scale, MTT_FP32, start);
    if (alone()) {
        out_of_memory();
        too_large();
        largest_batch();
        failures();
    }
    told("all", start);
    return finish();
}
