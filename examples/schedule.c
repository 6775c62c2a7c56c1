/* schedule.c - prints the operations of a training step, to show what a technique does to them.

   cc examples/schedule.c -o schedule -lm
   ./schedule                        the baseline: two layers, everything kept
   ./schedule --recompute layer      gradient checkpointing: `again` marks what is recomputed

   A line is an operation: its number, its phase, the bytes in memory while it runs, its name, and what it
   reads -> writes. */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "../tools/options.h"

static mtt_model_desc model = {.layers = 2, .heads = 4, .d_model = 128, .vocab = 1000};
static mtt_policy policy;
static int batch = 32, seq_len = 128;

static const option options[] = {
    TITLE("usage: schedule [option...]"),
    INT("batch-size", &batch, 1, "sequences"),
    INT("seq-len", &seq_len, 1, "tokens in a sequence"),
    FIELDS("Model:", mtt_model_fields, &model),
    FIELDS("Technique; its words are options, too, as in --flash --chunked:", mtt_policy_fields, &policy),
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
    int code = option_parse(options, LENGTH(options), argc, argv);
    if (code) return code == OPTION_HELP ? 0 : code;
    if (mtt_schedule_create(&env, &model, &policy, batch, seq_len, &schedule)) {
        fprintf(stderr, "schedule: %s\n", env.error);
        return 1;
    }
    mtt_schedule_print(schedule, print, stdout);
    mtt_schedule_report(schedule, &plan);
    mtt_plan_print(&plan, print, stdout);
    mtt_schedule_destroy(schedule);
    return 0;
}
