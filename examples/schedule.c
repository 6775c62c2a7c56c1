/* schedule.c - shows the operations of a training step, and what a technique does to them and to memory.

   cc examples/schedule.c -o schedule -lm
   ./schedule                        the baseline: two layers, everything kept
   ./schedule --recompute layer      gradient checkpointing: `again` marks what is recomputed
   ./schedule --html memory.html --compare fp32_checkpointing      both as a page for a browser

   A line is an operation: its number, its phase, the bytes in memory while it runs, its name, what it
   reads -> writes, and the tensors that it frees, because no later operation uses them. */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "../tools/explorer.h"
#include "../tools/options.h"

static mtt_model_desc model = {.layers = 2, .heads = 4, .d_model = 128, .vocab = 1000};
static mtt_policy policy;
static int batch = 32, seq_len = 128, json;
static const char *html, *compare;

static const option options[] = {
    TITLE("usage: schedule [option...]"),
    TEXT("html", &html, "write a page for a browser to this file: memory during each operation"),
    TEXT("compare", &compare, "a second technique on the page; all other options apply to both"),
    FLAG("json", &json, 1, "print plan and timeline as JSON"),
    INT("batch-size", &batch, 1, "sequences"),
    INT("seq-len", &seq_len, 1, "tokens in a sequence"),
    FIELDS("Model:", mtt_model_fields, &model),
    FIELDS("Technique; its words are also options, as in --flash --chunked:", mtt_policy_fields, &policy),
};

static void print(void *file, const char *text, size_t bytes)
{
    fwrite(text, 1, bytes, (FILE *)file);
}

/* The policy of --compare. Its words say all that the words of a technique can say. */
static mtt_status parse_second(mtt_env *env, mtt_policy *second, int *second_batch)
{
    *second = policy;
    *second_batch = batch;
    second->precision = MTT_FP32;
    second->attention = MTT_ATTENTION_PLAIN;
    second->recompute = MTT_RECOMPUTE_NONE;
    second->loss = MTT_LOSS_FULL;
    second->state = MTT_STATE_FULL;
    second->window = second->split = 0;
    return mtt_policy_parse(env, compare, second, second_batch);
}

static mtt_status write_page(mtt_env *env, const explorer_plan *first)
{
    explorer_plan plans[2];
    mtt_policy second;
    int second_batch, count = compare ? 2 : 1;
    mtt_status status = MTT_OK;
    plans[0] = *first;
    if (compare) status = parse_second(env, &second, &second_batch);
    if (compare && !status)
        status = explorer_open(env, &model, &second, second_batch, seq_len, compare, &plans[1]);
    if (status) return status;
    status = explorer_save(env, html, plans, count);
    if (compare) explorer_close(&plans[1]);
    if (!status) printf("wrote %s: open it in a browser\n", html);
    return status;
}

int main(int argc, char **argv)
{
    mtt_env env = {0};
    explorer_plan plan;
    mtt_plan_report report;
    mtt_status status;
    int code = option_parse(options, LENGTH(options), argc, argv);
    if (code) return code == OPTION_HELP ? 0 : code;
    if (compare && !html) return option_fail("--compare needs a page: add --html memory.html");
    status = explorer_open(&env, &model, &policy, batch, seq_len, option_technique(), &plan);
    if (!status && html) status = write_page(&env, &plan);
    else if (!status && json) mtt_schedule_json(plan.schedule, print, stdout);
    else if (!status) {
        mtt_schedule_print(plan.schedule, print, stdout);
        mtt_schedule_report(plan.schedule, &report);
        mtt_plan_print(&report, print, stdout);
    }
    explorer_close(&plan);
    return option_close_output(option_tell(&env, status));
}
