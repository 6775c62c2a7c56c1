/* speak.h - what a training run says on standard error: its data, its steps, its evaluations, its end.

   Include it after mtt.h, results.h and run.h. A terminal gets one line of progress, which is rewritten. A
   file or a pipe gets a line for each tenth of the steps, and for the next step when 10 s have passed. */
#ifndef SPEAK_H_INCLUDED
#define SPEAK_H_INCLUDED

#include "posix.h"

/* A session: a run, or its part from --resume to its end. */
typedef struct speaker {
    int64_t first, steps; /* steps done before it, and at the end */
    double tokens;        /* of a step */
    double begun, said;   /* seconds: the end of its first step, and its last line of progress */
} speaker;

static double speak_now(void)
{
    struct timespec now = {0, 0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* A whole number with commas, in static storage that the eighth call after this one takes. */
static const char *speak_count(uint64_t number)
{
    static char texts[8][32];
    static int next;
    char *at = texts[next++ % 8] + 31;
    int digits = 0;
    for (*at = 0; number || !digits; number /= 10) {
        if (digits && digits % 3 == 0) *--at = ',';
        *--at = (char)('0' + number % 10);
        digits++;
    }
    return at;
}

/* A duration in words, as speak_count. */
static const char *speak_time(double seconds)
{
    static char texts[2][48];
    static int next;
    char *text = texts[next++ % 2];
    double minutes = floor(seconds / 60), hours = floor(minutes / 60);
    if (seconds < 60) snprintf(text, sizeof(texts[0]), "%.0f s", seconds);
    else if (hours < 1)
        snprintf(text, sizeof(texts[0]), "%.0f min %02.0f s", minutes, floor(seconds - minutes * 60));
    else snprintf(text, sizeof(texts[0]), "%.0f h %02.0f min", hours, minutes - hours * 60);
    return text;
}

/* ---- before the first step ---- */

static const char *speak_input(const mtt_prepare_desc *job)
{
    return strcmp(job->input, "-") ? job->input : "standard input";
}

static void speak_preparing(const mtt_prepare_desc *job)
{
    int vocab = job->vocab ? job->vocab : 10000;
    if (strcmp(job->input, "-") && access(job->input, R_OK)) return; /* the error says why */
    if (result_has_tokens(job->output))
        run_say("comparing %s with the tokens of an earlier run ...\n", speak_input(job));
    else if (job->tokenizer)
        run_say("encoding %s with the tokenizer %s ...\n", speak_input(job), job->tokenizer);
    else
        run_say("training a BPE tokenizer, %s ids, on %s ...\n", speak_count((uint64_t)vocab),
                speak_input(job));
}

static void speak_dataset(const mtt_prepare_desc *job, const mtt_prepare_report *made)
{
    static const char *const names[] = {"train", "validation", "test"};
    const uint64_t *documents = made->documents, *bytes = made->bytes;
    const char *all = speak_count(documents[MTT_TRAIN] + documents[MTT_VALID] + documents[MTT_TEST]);
    const char *warning = result_invalid(job, made), *note = result_inside(job, made);
    int k;
    if (made->reused) run_say("the tokens of %s are reused from an earlier run\n", speak_input(job));
    if (warning) run_say("%s\n", warning);
    if (note) run_say("%s\n", note);
    run_say("%s: %s, %s bytes, %s ids\n", speak_input(job), result_documents(job, made, all),
            speak_count(bytes[MTT_TRAIN] + bytes[MTT_VALID] + bytes[MTT_TEST]),
            speak_count((uint64_t)made->vocab));
    for (k = 0; k < MTT_SPLIT_COUNT; k++)
        run_say("  %-10s %6s documents %12s tokens\n", names[k], speak_count(documents[k]),
                speak_count(made->tokens[k]));
    if (!job->tokenizer && made->vocab < job->vocab)
        run_say("note: the text has too few pairs for %s ids: the vocabulary has %s\n",
                speak_count((uint64_t)job->vocab), speak_count((uint64_t)made->vocab));
}

/* Makes a dataset, which can take minutes. */
static mtt_status speak_prepare(mtt_env *env, const mtt_prepare_desc *job)
{
    mtt_prepare_report made;
    mtt_status status;
    speak_preparing(job);
    status = mtt_prepare(env, job, &made);
    if (!status) speak_dataset(job, &made);
    return status;
}

/* The plan in two lines. */
static void speak_plan_briefly(const mtt_plan_report *plan)
{
    const char *before = ": ";
    int k;
    run_say("model: %s parameters\nmemory: %.1f MiB for %d sequence%s of %d token%s",
            speak_count((uint64_t)plan->parameters), (double)plan->arena_bytes / 1048576, plan->batch,
            plan->batch > 1 ? "s" : "", plan->seq_len, plan->seq_len > 1 ? "s" : "");
    for (k = 0; k < MTT_CATEGORY_COUNT; k++) {
        if (plan->bytes[k] < 104858) continue; /* 0.1 MiB */
        run_say("%s%s %.1f", before, mtt_category_name((mtt_category)k),
                (double)plan->bytes[k] / 1048576);
        before = ", ";
    }
    run_say("\n");
}

/* Answers --find-max-batch. Returns an exit code. */
static int speak_largest(int batch, int seq_len, size_t budget)
{
    fprintf(stderr, "sequences of %d token%s in the largest batch %s:\n", seq_len, seq_len > 1 ? "s" : "",
            budget ? "under --memory-budget" : "in the free memory");
    printf("%d\n", batch);
    return 0;
}

/* What helps a budget beside recomputation, where the policy may have it. */
static const char *speak_split(const mtt_policy *policy)
{
    return policy->early_update ? "" : " --split";
}

/* The plan in full for a dry run, as one JSON object, or in two lines. Then the largest batch that a budget
   has room for; 0 = there is no budget. */
static void speak_plan(const mtt_plan_report *plan, int dry_run, int as_json, int max_batch)
{
    FILE *out = dry_run ? stdout : stderr;
    char json[2048];
    json[mtt_plan_json(plan, json, sizeof(json)) - 1] = 0; /* no closing brace: another field may follow */
    if (run_rank) return;
    if (!as_json && dry_run) mtt_plan_print(plan, result_write_text, out);
    else if (!as_json) speak_plan_briefly(plan);
    else if (max_batch) fprintf(out, "%s, \"max_batch\": %d}\n", json, max_batch);
    else fprintf(out, "%s}\n", json);
    if (max_batch && !as_json) fprintf(out, "largest batch under the budget: %d\n", max_batch);
}

/* Begins a session. */
static void speak_begin(speaker *s, const mtt_batches *batches, int64_t first, int steps, int accumulate)
{
    double epoch = (double)batches->sequences * batches->seq_len;
    char ranks[40] = "";
    s->first = first;
    s->steps = steps;
    s->tokens = (double)batches->batch * batches->seq_len * accumulate * batches->ranks;
    s->begun = s->said = speak_now();
    if (first >= steps) return;
    if (batches->ranks > 1) snprintf(ranks, sizeof(ranks), " on %d ranks", batches->ranks);
    run_say("training%s: steps %s to %s of %s tokens each: %.2f epochs of %s tokens\n", ranks,
            speak_count((uint64_t)s->first + 1), speak_count((uint64_t)s->steps),
            speak_count((uint64_t)s->tokens),
            (double)(s->steps - s->first) * s->tokens / epoch, speak_count((uint64_t)epoch));
}

/* ---- steps and evaluations ---- */

static void speak_step(speaker *s, const mtt_step_info *info)
{
    int terminal = isatty(2), last = info->step == s->steps;
    int64_t done = info->step - s->first, tenth = s->steps < 10 ? 1 : s->steps / 10;
    double now = speak_now(), timed = (double)(done > 1 ? done - 1 : 1);
    double left = (now - s->begun) / timed * (double)(s->steps - info->step);
    if (done == 1) s->begun = now; /* the first step also wakes threads and fills caches: not counted later */
    if (!terminal && !last && info->step % tenth && now - s->said < 10 && done > 2) return;
    s->said = now;
    run_say("%sstep %lld/%lld %lld%% | loss %.4f | %s tokens/s", terminal ? "\r" : "",
            (long long)info->step, (long long)s->steps, (long long)(100 * info->step / s->steps), info->loss,
            speak_count((uint64_t)(s->tokens / fmax(info->ms, 1e-6) * 1e3)));
    if (info->clipped) run_say(" | %s values clipped", speak_count((uint64_t)info->clipped));
    if (!last) run_say(" | %s left", speak_time(left));
    run_say(terminal && !last ? "\033[K" : "\n");
    if (done == 2 && !last)
        run_say("%sthe remaining %s steps take about %s\n", terminal ? "\n" : "",
                speak_count((uint64_t)(s->steps - info->step)), speak_time(left));
}

static void speak_quality(const mtt_quality *q)
{
    run_say("%svalidation loss %.4f, perplexity %s, %.3f bits per byte\n", isatty(2) ? "\n" : "",
            q->loss, result_digits(2, q->perplexity), q->bits_per_byte);
}

/* ---- the end ---- */

static void speak_summary(const run *r, const result *m, int memory_file)
{
    run_say("\nvalidation  perplexity %s, %.3f bits per byte, loss %.4f, accuracy %.1f %%\n",
            result_digits(2, m->perplexity), m->bits_per_byte, m->val_loss, 100 * m->accuracy);
    if (m->perplexity > r->vocab)
        run_say("            worse than guessing among the %d ids of the vocabulary\n", r->vocab);
    run_say("speed       %s tokens/s, %.0f steps in %s\n", speak_count((uint64_t)m->tokens_per_s),
            m->steps, speak_time(m->training_time));
    run_say("memory      %.1f MiB planned", m->arena_bytes / 1048576);
    if (m->device_bytes != m->arena_bytes) run_say(", %.1f MiB taken", m->device_bytes / 1048576);
    run_say("\nmetrics     %s\n", run_path(r, RESULT_METRICS));
    run_say("log         %s\n", run_path(r, RESULT_LOG));
    if (r->curves) run_say("curves      %s", run_path(r, run_curves_ending(r)));
    if (r->curves == CURVES_TENSORBOARD) run_say(", shown by tensorboard --logdir %s", r->folder);
    if (r->curves) run_say("\n");
    if (memory_file) run_say("timeline    %s\n", run_path(r, RESULT_MEMORY));
    if (r->saved < 0) return;
    run_say("checkpoint  %s\n", run_checkpoint(r, r->saved));
    run_say("best        %s, by validation loss\n", run_path(r, "_best.safetensors"));
}
#endif
