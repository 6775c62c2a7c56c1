/* own_optimizer.c - an optimizer of your own, on the public interface alone: here Lion (arXiv 2302.06675).
   cc -O3 -march=native -fopenmp examples/learn/own_optimizer.c -o own_optimizer -lm
   ./own_optimizer my_text.txt
   Prints the losses of mtt's AdamW and of Lion from the same weights, on the same batches: some seconds. */
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 8, SEQ_LEN = 64, STEPS = 60 };
static mtt_env env;

static void check(mtt_status status)
{
    if (status != MTT_OK) fprintf(stderr, "own_optimizer: %s\n", env.error), exit(1);
}

/* Moves the weights of a parameter by the sign of a mean of its gradients. Put your own rule here. */
static void update(float *w, const float *g, float *m, int64_t count, float lr)
{
    int64_t i;
    for (i = 0; i < count; i++) {
        const float mean = 0.9f * m[i] + 0.1f * g[i];
        w[i] -= lr * ((float)((mean > 0) - (mean < 0)) + 0.01f * w[i]);
        m[i] = 0.99f * m[i] + 0.01f * g[i];
    }
}

static int64_t elements(const mtt_trainer *t, int index)
{
    int64_t shape[2];
    mtt_parameter(t, index, shape);
    return shape[0] * (shape[1] ? shape[1] : 1);
}

/* Updates all parameters: gets gradient and weights, sets the weights. `m` has a mean for each element. */
static void step(mtt_trainer *t, float **m, float lr)
{
    int i;
    for (i = 0; mtt_parameter(t, i, NULL); i++) {
        const int64_t count = elements(t, i);
        float *w = malloc((size_t)count * sizeof(float)), *g = malloc((size_t)count * sizeof(float));
        if (!m[i]) m[i] = calloc((size_t)count, sizeof(float));
        if (!w || !g || !m[i]) exit(1);
        check(mtt_gradient_get(t, i, g));
        check(mtt_parameter_get(t, i, w));
        update(w, g, m[i], count, lr);
        check(mtt_parameter_set(t, i, w));
        free(w), free(g);
    }
}

/* Trains, by `update` if `own` is set, else by AdamW. */
static void train(const mtt_dataset *data, int own)
{
    mtt_model_desc model = {.layers = 2, .heads = 4, .d_model = 64};
    mtt_policy policy = {.attention = MTT_ATTENTION_FLASH, .keep_gradients = own};
    mtt_optim_desc optim = {.lr = 3e-3f};
    static int32_t tokens[BATCH * SEQ_LEN], targets[BATCH * SEQ_LEN];
    static float *m[256];
    mtt_trainer *t;
    mtt_batches batches;
    mtt_step_info info;
    int i;
    model.vocab = mtt_tokenizer_vocab(data->tokenizer);
    check(mtt_batches_init(&env, &batches, data->train, BATCH, SEQ_LEN, 1, 0));
    check(mtt_trainer_create(&env, &model, &policy, &optim, mtt_cpu_backend(), BATCH, SEQ_LEN, &t));
    if (own) check(mtt_trainer_set_lr(t, 0)); /* AdamW then leaves the weights as they are */
    while (mtt_trainer_step(t) < STEPS) {
        check(mtt_batches_next(&batches, tokens, targets));
        check(mtt_train_step(t, tokens, targets, &info));
        if (own) step(t, m, 1e-3f);
        if (info.step % 20) continue;
        printf("%-5s step %d, loss %.3f\n", own ? "Lion" : "AdamW", (int)info.step, info.loss);
    }
    for (i = 0; i < 256; i++) free(m[i]), m[i] = NULL;
    mtt_trainer_destroy(t);
}

int main(int argc, char **argv)
{
    mtt_prepare_desc text = {.input = argv[argc - 1], .output = "own", .vocab = 512};
    mtt_dataset data;
    mtt_wait_passively(argv);
    if (argc != 2) return fprintf(stderr, "usage: own_optimizer TEXT_FILE\n"), 2;
    check(mtt_prepare(&env, &text, NULL));
    check(mtt_dataset_open(&env, "own", NULL, &data));
    train(&data, 0);
    train(&data, 1);
    mtt_dataset_close(&data);
}
