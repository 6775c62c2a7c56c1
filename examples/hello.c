/* hello.c - the shortest complete program: reads a text, trains a small GPT on it, writes a sample.
   cc -O3 -march=native -fopenmp examples/hello.c -o hello -lm && ./hello my_text.txt
   About a minute on a CPU. `tools/get_data.sh tinyshakespeare.txt` downloads a text. Writes hello.* here. */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 16, SEQ_LEN = 64, STEPS = 600 };
static mtt_env env; /* holds the text of the last error */

static void check(mtt_status status)
{
    if (status != MTT_OK) fprintf(stderr, "hello: %s\n", env.error), exit(1);
}

static void print(void *user, const char *text, size_t bytes)
{
    fwrite(text, 1, bytes, (FILE *)user);
}

static int print_token(void *user, int prompt, int32_t id, const char *text, size_t bytes)
{
    return (void)prompt, (void)id, print(user, text, bytes), 0; /* not 0 would stop it */
}

int main(int argc, char **argv)
{
    mtt_prepare_desc text = {.input = argv[argc - 1], .output = "hello", .vocab = 512}; /* 0 = default */
    mtt_model_desc model = {.layers = 3, .heads = 4, .d_model = 96};
    mtt_policy policy = {.attention = MTT_ATTENTION_FLASH}; /* also .precision, .recompute, .loss */
    mtt_optim_desc optim = {.lr = 3e-3f, .lr_schedule = MTT_LR_COSINE, .total_steps = STEPS};
    mtt_generation sample = {.texts = (const char *[]){"\n"}, .prompt_count = 1, .count = 200, .user = stdout,
                             .write = print_token, .sampling = {.temperature = 0.8f, .top_k = 50}};
    static int32_t tokens[BATCH * SEQ_LEN], targets[BATCH * SEQ_LEN]; /* a target is the next token */
    mtt_dataset data;
    mtt_batches batches;
    mtt_plan_report plan;
    mtt_trainer *trainer;
    mtt_step_info info;
    mtt_wait_passively(argv); /* OpenMP's threads; else they are slow beside other work */
    if (argc != 2) return fprintf(stderr, "usage: hello TEXT_FILE\n"), 2;
    /* Trains a tokenizer of 512 ids, and turns the text into tokens. A second run reuses the files. */
    check(mtt_prepare(&env, &text, NULL));
    check(mtt_dataset_open(&env, "hello", NULL, &data));
    check(mtt_batches_init(&env, &batches, data.train, BATCH, SEQ_LEN, 1, 0));
    model.vocab = mtt_tokenizer_vocab(data.tokenizer);
    check(mtt_plan(&env, &model, &policy, BATCH, SEQ_LEN, &plan));
    mtt_plan_print(&plan, print, stderr); /* the exact memory use, before anything is allocated */
    /* A step lets the model guess the next tokens of a batch, and corrects the weights by its errors. */
    check(mtt_trainer_create(&env, &model, &policy, &optim, mtt_cpu_backend(), BATCH, SEQ_LEN, &trainer));
    while (mtt_trainer_step(trainer) < STEPS) {
        check(mtt_batches_next(&batches, tokens, targets));
        check(mtt_train_step(trainer, tokens, targets, &info));
        if (info.step % 20 == 0) fprintf(stderr, "step %d/%d, loss %.3f\n", (int)info.step, STEPS, info.loss);
    }
    check(mtt_generate(trainer, data.tokenizer, &sample));
    puts("");
    mtt_trainer_destroy(trainer), mtt_dataset_close(&data);
}
