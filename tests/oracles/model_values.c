/* model_values.c - what mtt computes with a model in files, in FP32, for oracle_models.py, oracle_config.py
   and oracle_convert.py.

   model_values MODEL
   Prints the fields of the description, and how far each rotary pair turns from token to token.

   model_values MODEL IDS OUT
   IDS has int32 numbers. OUT gets a row of logits after the first id, the first two and so on, without the
   last one; then the gradient of each parameter, of the mean loss in predicting each id from those before.
   Prints the loss, and the name, rows and columns of each parameter. */
#define MTT_IMPLEMENTATION
#include "../../mtt.h"

enum { MOST = 4096 };

static int describe(const char *path)
{
    static mtt_env env;
    mtt_model *model = NULL;
    const mtt_model_desc *m;
    const mtt_field *f;
    int i;
    if (mtt_model_open(&env, path, &model)) return puts(env.error), 1;
    m = mtt_model_describe(model);
    for (f = mtt_model_fields(); f->name; f++) printf("%s %.17g\n", f->name, mtt__field_get(m, f));
    for (i = 0; i < m->d_head / 2; i++) printf("step%d %.17g\n", i, mtt_rotary_step(m, i));
    mtt_model_close(model);
    return 0;
}

int main(int argc, char **argv)
{
    static mtt_env env;
    static int32_t ids[MOST], twice[2][2 * MOST];
    mtt_policy policy = {.accumulate = 2}; /* keeps gradients; both micro-batches are the same */
    mtt_optim_desc optim = {.zero_weights = 1};
    mtt_model *model = NULL;
    mtt_trainer *t = NULL;
    mtt_step_info info;
    FILE *in = argc == 4 ? fopen(argv[2], "rb") : NULL, *out = in ? fopen(argv[3], "wb") : NULL;
    int count = in ? (int)fread(ids, sizeof(*ids), MOST, in) - 1 : 0, vocab, i, ok;
    int64_t shape[2], most;
    const char *name;
    float *values;
    if (argc == 2) return describe(argv[1]);
    if (!out || count < 1) return puts("usage: model_values MODEL IDS OUT"), 2;
    if (mtt_model_open(&env, argv[1], &model)) return puts(env.error), 1;
    ok = !mtt_trainer_create(&env, mtt_model_describe(model), &policy, &optim, mtt_cpu_backend(), 1, count,
                             &t);
    ok = ok && !mtt_trainer_load(t, model);
    most = vocab = mtt_model_describe(model)->vocab;
    for (i = 0; ok && mtt_parameter(t, i, shape); i++)
        if (most < shape[0] * (shape[1] ? shape[1] : 1)) most = shape[0] * (shape[1] ? shape[1] : 1);
    values = malloc((size_t)most * sizeof(*values));
    for (i = 1; i <= count && ok; i++)
        ok = !mtt_next_logits(t, ids, i, values) && fwrite(values, 4, (size_t)vocab, out) == (size_t)vocab;
    for (i = 0; i < 2 * count; i++) twice[0][i] = ids[i % count], twice[1][i] = ids[i % count + 1];
    ok = ok && !mtt_train_step(t, twice[0], twice[1], &info);
    if (ok) printf("%.17g\n", info.loss);
    for (i = 0; ok && (name = mtt_parameter(t, i, shape)); i++) {
        size_t n = (size_t)(shape[0] * (shape[1] ? shape[1] : 1));
        ok = !mtt_gradient_get(t, i, values) && fwrite(values, 4, n, out) == n;
        printf("%s %lld %lld\n", name, (long long)shape[0], (long long)shape[1]);
    }
    mtt_trainer_destroy(t);
    mtt_model_close(model);
    return fclose(out) || !ok ? puts(env.error), 1 : 0;
}
