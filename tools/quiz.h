/* quiz.h - ten questions about the memory of a training step, whose answers the planner computes.

   Include it after explorer.h. */
#ifndef QUIZ_H_INCLUDED
#define QUIZ_H_INCLUDED

#include <math.h>

/* What of a plan is asked for. */
enum { QUIZ_PEAK_OP, QUIZ_STATE, QUIZ_ARENA, QUIZ_AGAIN, QUIZ_LOGITS_SHARE, QUIZ_LOGITS, QUIZ_MAX_BATCH };

typedef struct quiz_plan {
    int layers, heads, width, vocab, batch, seq_len;
    const char *technique; /* NULL: no plan */
} quiz_plan;

/* The answer is asked for of `of`, less that of `less`, over `per`. */
typedef struct quiz {
    const char *text, *unit, *why;
    int what;
    double per;
    quiz_plan of, less;
    size_t budget; /* for QUIZ_MAX_BATCH */
    double margin; /* an answer may be off by this share; 0: a count, which must be exact */
} quiz;

#define QUIZ_SMALL(technique) {2, 4, 128, 1000, 32, 128, technique}
#define QUIZ_GPT2(batch, technique) {12, 12, 768, 50257, batch, 1024, technique}
#define QUIZ_NONE {0, 0, 0, 0, 0, 0, NULL}
static const quiz quizzes[] = {
    {"Two layers of width 128 with 4 heads, 1,000 ids, 32 sequences of 128 tokens; FP32, all is kept "
     "(fp32). Which operation is the first with the most memory in use? Give its number.", "",
     "It makes the gradient of the head's weight: logits and all activations are still there.",
     QUIZ_PEAK_OP, 1, QUIZ_SMALL("fp32"), QUIZ_NONE, 0, 0},
    {"How many MiB of that arena stay from step to step? The model has 653,800 parameters, and 24 ids that "
     "nobody uses pad the vocabulary.", "MiB",
     "The weight and two moments, 12 bytes for each of 659,968 parameters with the padding; and the data.",
     QUIZ_STATE, 1048576, QUIZ_SMALL("fp32"), QUIZ_NONE, 0, .02},
    {"Flash attention does not store the T x T scores. How many MiB does it take off the arena (fp32_flash)?",
     "MiB", "Two layers of 32 x 4 x 128 x 128 probabilities, 8 MiB each, less one number a row and head.",
     QUIZ_ARENA, 1048576, QUIZ_SMALL("fp32"), QUIZ_SMALL("fp32_flash"), 0, .02},
    {"Checkpointing keeps the input of each layer alone, and more of the last layers where that does not "
     "raise the peak. How many operations does the backward pass repeat (fp32_checkpointing)?", "",
     "The first layer's, and of the last layer, whose backward pass comes first, those that save memory.",
     QUIZ_AGAIN, 1, QUIZ_SMALL("fp32_checkpointing"), QUIZ_NONE, 0, 0},
    {"With checkpointing, how many MiB does one more layer cost (take 16 layers and 8)?", "MiB",
     "Its input, 2 MiB, and 12 bytes for each of its 198,272 parameters.", QUIZ_ARENA, 8 * 1048576.,
     {16, 4, 128, 1000, 32, 128, "fp32_checkpointing"}, {8, 4, 128, 1000, 32, 128, "fp32_checkpointing"},
     0, .02},
    {"Give the two layers a real vocabulary, 50,257 ids. How many per cent of the peak are logits?", "%",
     "A token has 50,304 logits; a layer keeps 16 x 128 activations of it, and 512 probabilities.",
     QUIZ_LOGITS_SHARE, .01, {2, 4, 128, 50257, 32, 128, "fp32"}, QUIZ_NONE, 0, .02},
    {"The chunked loss computes some rows of logits at a time (fp32_chunked). How many MiB do they take "
     "with 50,257 ids?", "MiB", "1,024 rows of 50,304 numbers of 4 bytes: a quarter of the 4,096 rows.",
     QUIZ_LOGITS, 1048576, {2, 4, 128, 50257, 32, 128, "fp32_chunked"}, QUIZ_NONE, 0, .02},
    {"A GPT-2 of 12 layers and width 768 with an untied head trains 16 sequences of 1,024 tokens in FP32. "
     "How many GiB does the arena take?", "GiB",
     "Scores and logits grow with the length of sequences and with the vocabulary.",
     QUIZ_ARENA, 1073741824, QUIZ_GPT2(16, "fp32"), QUIZ_NONE, 0, .02},
    {"And with bf16_flash_chunked_checkpointing?", "GiB", "Most of what is left is the state of the model.",
     QUIZ_ARENA, 1073741824, QUIZ_GPT2(16, "bf16_flash_chunked_checkpointing"), QUIZ_NONE, 0, .02},
    {"How many sequences of that GPT-2 fit 14 GiB, what a T4 has left, with fp16_flash_selective_chunked?",
     "",
     "The state takes its part once; the rest is divided by what one sequence takes.",
     QUIZ_MAX_BATCH, 1, QUIZ_GPT2(1, "fp16_flash_selective_chunked"), QUIZ_NONE, (size_t)14 << 30, 0},
};
enum { QUIZ_COUNT = sizeof(quizzes) / sizeof(quizzes[0]) };

static double quiz_of_plan(const mtt_schedule *schedule, int what)
{
    mtt_plan_report report;
    const mtt_op *ops;
    double found = 0;
    int i, count;
    mtt_schedule_report(schedule, &report);
    ops = mtt_schedule_ops(schedule, &count);
    if (what == QUIZ_PEAK_OP) return report.peak_op;
    if (what == QUIZ_STATE) return (double)report.state_bytes;
    if (what == QUIZ_ARENA) return (double)report.arena_bytes;
    if (what == QUIZ_LOGITS_SHARE)
        return (double)ops[report.peak_op].bytes[MTT_LOGITS] / (double)report.peak_bytes;
    for (i = 0; i < count; i++)
        if (what == QUIZ_AGAIN) found += ops[i].recomputed;
        else if ((double)ops[i].bytes[MTT_LOGITS] > found) found = (double)ops[i].bytes[MTT_LOGITS];
    return found;
}

static mtt_status quiz_ask(mtt_env *env, const quiz *q, const quiz_plan *p, double *value)
{
    mtt_model_desc model;
    mtt_policy policy;
    explorer_plan plan;
    mtt_status status;
    int most = 0;
    *value = 0;
    if (!p->technique) return MTT_OK;
    memset(&model, 0, sizeof(model));
    memset(&policy, 0, sizeof(policy));
    model.layers = p->layers, model.heads = p->heads, model.d_model = p->width, model.vocab = p->vocab;
    status = mtt_policy_parse(env, p->technique, &policy, NULL);
    if (status) return status;
    if (q->what == QUIZ_MAX_BATCH) {
        status = mtt_plan_max_batch(env, &model, &policy, p->seq_len, q->budget, &most);
        *value = most;
        return status;
    }
    status = explorer_open(env, &model, &policy, p->batch, p->seq_len, p->technique, &plan);
    if (!status) *value = quiz_of_plan(plan.schedule, q->what);
    explorer_close(&plan);
    return status;
}

/* The answer, from plans. */
static mtt_status quiz_answer(mtt_env *env, const quiz *q, double *answer)
{
    double less;
    mtt_status status = quiz_ask(env, q, &q->of, answer);
    if (!status) status = quiz_ask(env, q, &q->less, &less);
    if (!status) *answer = (*answer - less) / q->per;
    return status;
}

/* Writes what there is to say to an answer. *right: 1 = it is the plan's. */
static mtt_status quiz_grade(mtt_env *env, const quiz *q, double given, int *right, char *text,
                             size_t capacity)
{
    double answer;
    mtt_status status = quiz_answer(env, q, &answer);
    if (status) return status;
    *right = fabs(given - answer) <= q->margin * fabs(answer) + 1e-9;
    if (*right)
        snprintf(text, capacity, "Right: %.*f%s%s. %s", q->margin > 0 ? 2 : 0, answer, *q->unit ? " " : "",
                 q->unit, q->why);
    else
        snprintf(text, capacity, "The plan says %s. Look at it: build/schedule --layers %d --heads %d "
                 "--d-model %d --vocab-size %d --batch-size %d --seq-len %d --technique %s",
                 given < answer ? "more" : "less", q->of.layers, q->of.heads, q->of.width, q->of.vocab,
                 q->of.batch, q->of.seq_len, q->of.technique);
    return MTT_OK;
}
#endif
