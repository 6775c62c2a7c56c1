/* convert_logits.c - writes a checkpoint's logits after 1, 2, ... ids, in FP32, for oracle_convert.py.

   convert_logits CHECKPOINT IDS OUT      IDS: int32 numbers; OUT: a row of floats for each */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "../tools/weights.h"

enum { MOST = 4096 };

int main(int argc, char **argv)
{
    static mtt_env env;
    static weights w;
    static int32_t ids[MOST];
    mtt_policy policy = {.precision = MTT_FP32};
    mtt_optim_desc optim = {.seed = 0};
    mtt_trainer *t;
    FILE *in = argc == 4 ? fopen(argv[2], "rb") : NULL, *out = in ? fopen(argv[3], "wb") : NULL;
    int count = in ? (int)fread(ids, sizeof(*ids), MOST, in) : 0, i, ok;
    float *logits;
    if (!out || !count) return puts("usage: convert_logits CHECKPOINT IDS OUT"), 2;
    if (!weights_open(&w, argv[1])) return puts(w.error), 1;
    logits = malloc((size_t)w.model.vocab * sizeof(*logits));
    ok = logits && !mtt_trainer_create(&env, &w.model, &policy, &optim, mtt_cpu_backend(), 1, count, &t);
    ok = ok && !mtt_resume(t, argv[1], NULL);
    for (i = 1; i <= count && ok; i++)
        ok = !mtt_next_logits(t, ids, i, logits) &&
             fwrite(logits, sizeof(*logits), (size_t)w.model.vocab, out) == (size_t)w.model.vocab;
    return fclose(out) || !ok ? puts(env.error), 1 : 0;
}
