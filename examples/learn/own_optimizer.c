/* own_optimizer.c - an optimizer of your own on the public interface: Lion (arXiv 2302.06675) beside AdamW.
   cc -O3 -march=native -fopenmp examples/learn/own_optimizer.c -o own_optimizer -lm
   ./own_optimizer my_text.txt    prints the losses of both, from the same weights and on the same batches */
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 8, SEQ_LEN = 64, STEPS = 60, MOST = 1 << 14 };
static mtt_env env;
static float *memory[MOST]; /* of each parameter: m, w, g */

static void check(int ok) { if (!ok) fprintf(stderr, "own_optimizer: %s\n", env.error), exit(1); }

/* Your rule goes here: w are weights, g their gradients, m what the optimizer keeps of each. */
static void update(float *w, const float *g, float *m, int64_t count, float lr)
{
    for (int64_t i = 0; i < count; i++) {
        const float mean = 0.9f * m[i] + 0.1f * g[i];
        w[i] -= lr * ((float)((mean > 0) - (mean < 0)) + 0.01f * w[i]);
        m[i] = 0.99f * m[i] + 0.01f * g[i];
    }
}

/* Trains, by `update` if `own` is 1, else by AdamW. */
static void train(const mtt_dataset *data, int own)
{
    mtt_model_desc model = {.layers = 2, .heads = 4, .d_model = 64};
    mtt_policy policy = {.attention = MTT_ATTENTION_FLASH, .keep_gradients = own};
    mtt_optim_desc optim = {.lr = 3e-3f};
    int32_t tokens[BATCH * SEQ_LEN], targets[BATCH * SEQ_LEN];
    int64_t shape[2];
    mtt_trainer *t;
    mtt_batches batches;
    mtt_step_info info;
    model.vocab = mtt_tokenizer_vocab(data->tokenizer);
    check(!mtt_batches_init(&env, &batches, data->train, BATCH, SEQ_LEN, 1, 0));
    check(!mtt_trainer_create(&env, &model, &policy, &optim, mtt_cpu_backend(), BATCH, SEQ_LEN, &t));
    if (own) check(!mtt_trainer_set_lr(t, 0)); /* AdamW then leaves the weights as they are */
    while (mtt_trainer_step(t) < STEPS) {
        check(!mtt_batches_next(&batches, tokens, targets) && !mtt_train_step(t, tokens, targets, &info));
        for (int i = 0; own && mtt_parameter(t, i, shape); i++) {
            const int64_t count = shape[0] * (shape[1] ? shape[1] : 1);
            float *m = memory[i] ? memory[i] : calloc((size_t)count, 3 * sizeof(float));
            float *w = m + count, *g = w + count;
            check((memory[i] = m) != NULL && !mtt_gradient_get(t, i, g) && !mtt_parameter_get(t, i, w));
            update(w, g, m, count, 1e-3f);
            check(!mtt_parameter_set(t, i, w));
        }
        if (info.step % 20) continue;
        printf("%-5s step %d, loss %.3f\n", own ? "Lion" : "AdamW", (int)info.step, info.loss);
    }
    for (int i = 0; i < MOST; i++) free(memory[i]);
    mtt_trainer_destroy(t);
}

int main(int argc, char **argv)
{
    mtt_prepare_desc text = {.input = argv[argc - 1], .output = "own", .vocab = 512};
    mtt_dataset data;
    mtt_wait_passively(argv);
    if (argc != 2) return fprintf(stderr, "usage: own_optimizer TEXT_FILE\n"), 2;
    check(!mtt_prepare(&env, &text, NULL) && !mtt_dataset_open(&env, "own", NULL, &data));
    train(&data, 0), train(&data, 1);
    mtt_dataset_close(&data);
}
