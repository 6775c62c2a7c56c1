/* planner.c - mtt's plan inside a page of a browser, compiled to WebAssembly: tools/planner/make.sh.

   The page writes a command line to planner_input, calls planner_plan, and reads the JSON or the message from
   planner_text. Sizes have 64 bits. */
#define MTT_IMPLEMENTATION
#define MTT_STATIC
#define MTT_PORTABLE
#define MTT_BACKEND_API
#define MTT_NO_SOCKETS
#define MTT_NO_TEXT
#define MTT_NO_MODELS
#include "../../mtt.h"
#include "libc.h"
#include "../options.h"
#include "../explorer.h"
#include "../quiz.h"

#define EXPORT(name) __attribute__((export_name(#name)))

enum { PLANNER_BYTES = 1 << 16, PLANNER_WORDS = PLANNER_BYTES / 2 };
static mtt_model_desc model;
static mtt_policy policy;
static int batch, seq_len;
static char input[PLANNER_BYTES], text[PLANNER_BYTES];
static stream answer;
static FILE *const answers = (FILE *)(void *)&answer;

static const option options[] = {
    INT("batch-size", &batch, 1, "sequences"),
    INT("seq-len", &seq_len, 1, "tokens in a sequence"),
    FIELDS("Model:", mtt_model_fields, &model),
    FIELDS("Technique:", mtt_policy_fields, &policy),
};

/* Reads the options in `input`, words with blanks between them. Defaults are those of build/schedule. */
static int planner_read(void)
{
    static char program[] = "planner";
    static char *words[PLANNER_WORDS + 1];
    static const mtt_model_desc small = {.layers = 2, .heads = 4, .d_model = 128, .vocab = 1000};
    char *at;
    int count = 1;
    stream_empty(&answer);
    stream_empty(&stream_errors);
    memset(&option_all, 0, sizeof(option_all));
    memset(&policy, 0, sizeof(policy));
    model = small;
    batch = 32, seq_len = 128;
    words[0] = program;
    memcpy(text, input, sizeof(text));
    text[sizeof(text) - 1] = 0;
    for (at = text + strspn(text, " "); *at && count < PLANNER_WORDS; at += strspn(at, " ")) {
        words[count++] = at;
        at += strcspn(at, " ");
        if (*at) *at++ = 0;
    }
    words[count] = NULL;
    return option_parse(options, LENGTH(options), count, words);
}

static int planner_fail(mtt_env *env, mtt_status status)
{
    if (status) fprintf(stderr, "%s", env->error);
    return status != MTT_OK;
}

EXPORT(planner_input) char *planner_input(void)
{
    return input;
}

EXPORT(planner_input_size) int planner_input_size(void)
{
    return (int)sizeof(input);
}

EXPORT(planner_text) const char *planner_text(int failed)
{
    return failed ? stream_errors.text : answer.text;
}

EXPORT(planner_bytes) int planner_bytes(int failed)
{
    return (int)(failed ? stream_errors.bytes : answer.bytes);
}

/* Answers with the plan as JSON. Returns 0, or 1 after a message. */
EXPORT(planner_plan) int planner_plan(void)
{
    static mtt_env env;
    explorer_plan plan;
    if (planner_read()) return 1;
    if (planner_fail(&env, explorer_open(&env, &model, &policy, batch, seq_len, option_technique(), &plan)))
        return 1;
    explorer_json(answers, &plan);
    explorer_close(&plan);
    return answer.failed;
}

/* Answers with the largest batch whose plan takes at most so many bytes, as a number. */
EXPORT(planner_largest) int planner_largest(double budget)
{
    static mtt_env env;
    int most = 0;
    if (planner_read()) return 1;
    if (planner_fail(&env, mtt_plan_max_batch(&env, &model, &policy, seq_len, (size_t)budget, &most)))
        return 1;
    fprintf(answers, "%d", most);
    return 0;
}

/* Answers with what a GPU of this compute capability, times 10, lacks, and the technique to take instead;
   with nothing if it has the precision. */
EXPORT(planner_lacks) int planner_lacks(int capability)
{
    static const int needed[] = MTT_CUDA_CAPABILITIES;
    static const char *const names[] = {"FP32", "TF32", "BF16", "FP16", "FP8"};
    static const mtt_precision others[] = {MTT_BF16, MTT_FP16, MTT_FP32};
    mtt_policy other;
    mtt_plan_report report;
    char words[256];
    int i;
    if (planner_read()) return 1;
    if (policy.device != MTT_DEVICE_CUDA || needed[policy.precision] <= capability) return 0;
    fprintf(answers, "no %s", names[policy.precision]);
    for (i = policy.precision == MTT_TF32 ? 2 : 0; i < LENGTH(others); i++) {
        other = policy;
        other.precision = others[i];
        other.fp8_products = MTT_FP8_ALL;
        if (needed[others[i]] > capability) continue;
        if (mtt_plan(NULL, &model, &other, batch, seq_len, &report)) continue;
        mtt_policy_name(&other, words, sizeof(words));
        return fprintf(answers, ": take %s", words), 0;
    }
    return 0;
}

static void planner_write(void *file, const char *words, size_t bytes)
{
    stream_put(file, words, bytes);
}

/* Answers with the list of operations after the first `passes` passes. */
EXPORT(planner_list) int planner_list(int passes)
{
    static mtt_env env;
    explorer_plan plan;
    mtt_status status;
    if (planner_read()) return 1;
    if (planner_fail(&env, explorer_open(&env, &model, &policy, batch, seq_len, "", &plan))) return 1;
    status = mtt_schedule_print_passes(plan.schedule, passes, planner_write, &answer);
    explorer_close(&plan);
    return planner_fail(&env, status);
}

/* Answers with a question: its text, its unit, and its plan as a link of the page. */
EXPORT(planner_question) int planner_question(int number)
{
    const quiz *q = &quizzes[number];
    stream_empty(&answer);
    fprintf(answers, "{\"text\": \"%s\", \"unit\": \"%s\", \"link\": \"layers=%d&heads=%d&d-model=%d"
            "&vocab-size=%d&batch-size=%d&seq-len=%d&technique=%s%s%s\"}", q->text, q->unit,
            q->of.layers, q->of.heads, q->of.width, q->of.vocab, q->of.batch, q->of.seq_len, q->of.technique,
            q->less.technique ? "&compare=" : "", q->less.technique ? q->less.technique : "");
    return answer.failed;
}

/* Answers with a judgement of an answer to a question. */
EXPORT(planner_grade) int planner_grade(int number, double given)
{
    static mtt_env env;
    char words[512] = "";
    int right;
    stream_empty(&answer);
    stream_empty(&stream_errors);
    if (planner_fail(&env, quiz_grade(&env, &quizzes[number], given, &right, words, sizeof(words)))) return 1;
    fprintf(answers, "%s", words);
    return 0;
}

/* Answers with what the page's lists are made of: names of passes, and models with their options. */
EXPORT(planner_names) int planner_names(void)
{
    int i;
    stream_empty(&answer);
    fprintf(answers, "{\"passes\": [");
    for (i = 0; mtt_schedule_pass(i); i++) fprintf(answers, "%s\"%s\"", i ? ", " : "", mtt_schedule_pass(i));
    fprintf(answers, "], \"models\": {");
    for (i = 0; option_models[i].name; i++)
        fprintf(answers, "%s\"%s\": \"%s\"", i ? ", " : "", option_models[i].name, option_models[i].options);
    fprintf(answers, "}, \"questions\": %d}", QUIZ_COUNT);
    return answer.failed;
}
