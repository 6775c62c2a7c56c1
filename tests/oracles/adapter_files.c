/* adapter_files.c - makes what oracle_adapter.py compares: small models with adapters, a few steps trained.

   adapter_files FOLDER      writes the checkpoint FOLDER/NAME.safetensors, FOLDER/NAME.merged.safetensors,
                             the adapter's folder FOLDER/NAME, and FOLDER/NAME.logits after 1, 2, ... ids */
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include "../../tools/peft.h"

enum { LENGTH = 24, VOCAB = 96 };
static mtt_env env;

static const struct {
    const char *name;
    mtt_model_desc model;
    const char *targets;
} MODELS[] = {
    {"gpt2", {.layers = 2, .heads = 4, .d_model = 32, .vocab = VOCAB, .max_seq = LENGTH,
              .positions = MTT_POSITIONS_LEARNED, .no_head_bias = 1}, NULL},
    {"gpt2_all", {.layers = 2, .heads = 2, .d_model = 32, .d_ff = 72, .vocab = VOCAB, .max_seq = LENGTH,
                  .positions = MTT_POSITIONS_LEARNED, .no_head_bias = 1, .tied_head = 1}, "*"},
    {"llama", {.layers = 3, .heads = 4, .heads_kv = 2, .d_model = 32, .d_ff = 64, .vocab = VOCAB,
               .norm = MTT_NORM_RMS, .mlp = MTT_MLP_SWIGLU, .positions = MTT_POSITIONS_ROTARY,
               .no_biases = 1}, "*"},
    {"llama_pairs", {.layers = 2, .heads = 4, .heads_kv = 1, .d_model = 64, .d_ff = 64, .vocab = VOCAB,
                     .norm = MTT_NORM_RMS, .mlp = MTT_MLP_SWIGLU, .positions = MTT_POSITIONS_ROTARY,
                     .rotary_interleaved = 1, .no_biases = 1}, "h.1.*,attn.c_attn"},
};

static int fail(const char *what)
{
    return printf("%s: %s\n", what, env.error), 1;
}

static int make(int number, const char *folder)
{
    mtt_policy policy = {.lora_rank = 8, .lora_alpha = 12, .lora_targets = MODELS[number].targets};
    mtt_optim_desc optim = {.lr = 0.05f, .seed = (uint64_t)number};
    const char *name = MODELS[number].name;
    int32_t tokens[2 * LENGTH], targets[2 * LENGTH];
    float logits[VOCAB];
    char path[1000];
    FILE *out;
    mtt_trainer *t;
    int i;
    if (mtt_trainer_create(&env, &MODELS[number].model, &policy, &optim, mtt_cpu_backend(), 2, LENGTH, &t))
        return fail(name);
    for (i = 0; i < 2 * LENGTH; i++) tokens[i] = i * 31 % VOCAB, targets[i] = (i * i + 7) % VOCAB;
    for (i = 0; i < 8; i++)
        if (mtt_train_step(t, tokens, targets, NULL)) return fail(name);
    snprintf(path, sizeof(path), "%s/%s.safetensors", folder, name);
    if (mtt_save(t, path, NULL)) return fail(path);
    snprintf(path, sizeof(path), "%s/%s.merged.safetensors", folder, name);
    if (mtt_save_merged(t, path)) return fail(path);
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    if (peft_save(&env, NULL, t, path)) return fail(path);
    snprintf(path, sizeof(path), "%s/%s.logits", folder, name);
    out = fopen(path, "wb");
    for (i = 1; i <= LENGTH && out; i++)
        if (mtt_next_logits(t, tokens, i, logits) || fwrite(logits, sizeof(logits), 1, out) != 1)
            return fail(path);
    mtt_trainer_destroy(t);
    return !out || fclose(out);
}

int main(int argc, char **argv)
{
    int i, failed = argc != 2;
    if (failed) puts("usage: adapter_files FOLDER");
    for (i = 0; i < (int)(sizeof(MODELS) / sizeof(MODELS[0])) && !failed; i++) failed = make(i, argv[1]);
    return failed;
}
