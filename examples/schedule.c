/* schedule.c - prints the operations of a training step, so that one sees what a technique does to them.

   cc examples/schedule.c -o schedule -lm
   ./schedule                        the baseline: two layers, everything kept
   ./schedule --recompute layer      gradient checkpointing: what is made `again`

   A line is an operation: its number, its phase, the bytes that live while it runs, its name, what it reads -> writes. */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "../tools/options.h"

static mtt_model_desc model = {.layers = 2, .heads = 4, .d_model = 128, .vocab = 1000};
static mtt_policy policy;
static int batch = 32, seq_len = 128;

static const option options[] = {
    {"precision", CHOICE, &policy.precision, "precision", "fp32|tf32|bf16|fp16", 0},
    {"attention", CHOICE, &policy.attention, "attention", "plain|flash", 0},
    {"window-size", INT, &policy.window, "keys that a query sees (0: all), with --attention flash", 0, 0},
    {"recompute", CHOICE, &policy.recompute, "what the backward pass makes again", "none|selective|layer|segments", 0},
    {"loss", CHOICE, &policy.loss, "logits of all tokens or of a chunk in memory", "full|chunked", 0},
    {"state", CHOICE, &policy.state, "optimizer state", "full|compact", 0},
    {"layers", INT, &model.layers, "transformer blocks (2)", 0, 0},
    {"d-model", INT, &model.d_model, "width (128)", 0, 0},
    {"vocab-size", INT, &model.vocab, "ids (1000)", 0, 0},
    {"batch-size", INT, &batch, "sequences (32)", 0, 0},
    {"seq-len", INT, &seq_len, "tokens in a sequence (128)", 0, 0},
};

static void print(void *file, const char *text, size_t bytes)
{
    fwrite(text, 1, bytes, (FILE *)file);
}

int main(int argc, char **argv)
{
    mtt_env env = {0};
    mtt_schedule *schedule;
    mtt_plan_report plan;
    int code = option_parse(options, sizeof(options) / sizeof(options[0]), argc, argv);
    if (code) return code == OPTION_HELP ? 0 : code;
    if (mtt_schedule_create(&env, &model, &policy, batch, seq_len, &schedule)) return fprintf(stderr, "schedule: %s\n", env.error), 1;
    mtt_schedule_print(schedule, print, stdout);
    mtt_schedule_report(schedule, &plan);
    mtt_plan_print(&plan, print, stdout);
    mtt_schedule_destroy(schedule);
    return 0;
}
