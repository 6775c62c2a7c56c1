/* schedule.c - shows the operations of a training step, and what a technique does to them and to memory.

   cc tools/schedule.c -o schedule -lm
   ./schedule                        the baseline: two layers, everything kept
   ./schedule --recompute layer      gradient checkpointing: `again` marks what is recomputed
   ./schedule --html memory.html --compare fp32_checkpointing      both as a page for a browser
   ./schedule --fp8 --before eight --after eight                   what a pass does to the list, side by side
   ./schedule --quiz 1 --answer 20                                 a question about memory, of ten
   ./schedule --kept                 what each layer keeps for the backward pass
   ./schedule --dump step.safetensors                              runs the step: all its tensors, in a file
   ./schedule --memory-viz plan.pickle                             for https://pytorch.org/memory_viz

   A line is an operation: its number, its phase, the bytes in memory while it runs, its name, what it
   reads -> writes, and the tensors that it frees, because no later operation uses them. */
#define MTT_IMPLEMENTATION
#define MTT_BACKEND_API /* its operations and tensors */
#include "../mtt.h"
#include "options.h"
#include "dump.h"
#include "explorer.h"
#include "kept.h"
#include "memory_viz.h"
#include "quiz.h"

static mtt_model_desc model = {.layers = 2, .heads = 4, .d_model = 128, .vocab = 1000};
static mtt_policy policy;
static int batch = 32, seq_len = 128, json, kept, question;
static const char *html, *compare, *before, *after, *dump_path, *init, *viz;
static float answer;

static const option options[] = {
    TITLE("usage: schedule [option...]"),
    TEXT("html", &html, "write a page for a browser to this file: memory during each operation"),
    TEXT("compare", &compare, "a second technique on the page; all other options apply to both"),
    TEXT("before", &before, "print the list of operations before this pass; with --after both, side by side"),
    TEXT("after", &after, "the same after this pass: forward, adjoints, ...; a wrong name lists them"),
    FLAG("json", &json, 1, "print plan and timeline as JSON"),
    FLAG("kept", &kept, 1, "print what each layer keeps for the backward pass"),
    TEXT("dump", &dump_path, "run the step on random tokens; write its tensors to this .safetensors file"),
    TEXT("init", &init, "the model and its weights, for --dump: a checkpoint or a Hugging Face folder"),
    TEXT("memory-viz", &viz, "write the plan as a memory snapshot of PyTorch to this .pickle file"),
    INT("quiz", &question, 1, "ask a question about memory, 1 to 10"),
    REAL("answer", &answer, -1e30, "judge an answer to it; a right one explains"),
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
    second->loss = MTT_LOSS_AUTO;
    second->state = MTT_STATE_FULL;
    second->window = second->split = 0;
    return mtt_policy_parse(env, compare, second, second_batch);
}

/* The options of the page's planner: those of the command line, but for what else this program writes, and
   the model of --init in numbers. NULL: there is no memory. */
static char *join_words(int argc, char **argv)
{
    const option *const all = option_all.list, *o;
    const option *const shared = option_find(all, option_all.count, "batch-size", 10);
    size_t room = 1 + (size_t)option_all.count * 128;
    char *words, *at, value[64];
    int i;
    for (i = 1; i < argc; i++) room += 3 * strlen(argv[i]) + 2;
    if (!(words = at = malloc(room))) return NULL;
    for (*at = 0, i = 1; i < argc; i++) {
        const char *name = argv[i] + 2;
        int last = i;
        o = option_find(all, option_all.count, name, strcspn(name, "="));
        if (o && o->kind != MTT_FIELD_FLAG && !name[strcspn(name, "=")]) last++;
        for (; i < last; i++)
            if (o >= shared || o->at == &compare) at = explorer_word(at, argv[i]);
        if (!o || o >= shared || o->at == &compare) at = explorer_word(at, argv[i]);
    }
    for (o = all; init && o < all + option_all.count; o++) {
        const char *const field = o->at, *const first = (const char *)&model;
        if (field < first || field >= first + sizeof(model) || option_value(o) <= 0) continue;
        snprintf(value, sizeof(value), "--%s", o->name);
        if (o->kind == MTT_FIELD_FLAG && option_get_int(o) == o->value) at = explorer_word(at, value);
        if (o->kind == MTT_FIELD_FLAG) continue;
        at = explorer_word(at, value);
        at = explorer_word(at, option_words(o, value));
    }
    return words;
}

static mtt_status write_page(mtt_env *env, const explorer_plan *first, const char *words)
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
    status = explorer_save(env, html, "examples/learn/memory.html", words, plans, count);
    if (compare) explorer_close(&plans[1]);
    if (!status) printf("wrote %s: open it in a browser\n", html);
    return status;
}

/* ---- lists between passes ---- */

/* A list as text, and its lines. */
typedef struct list {
    char *text, **lines;
    size_t bytes;
    int count, failed;
} list;

static void keep(void *user, const char *text, size_t bytes)
{
    list *l = user;
    char *more = l->failed ? NULL : realloc(l->text, l->bytes + bytes + 1);
    if (!more) {
        l->failed = 1;
        return;
    }
    memcpy(more + l->bytes, text, bytes);
    l->text = more;
    l->text[l->bytes += bytes] = 0;
    l->count++;
}

/* Lists the operations after the first `passes` passes. */
static mtt_status make_list(const mtt_schedule *schedule, int passes, list *l)
{
    mtt_status status = mtt_schedule_print_passes(schedule, passes, keep, l);
    char *at = l->text;
    int i;
    if (!status && !l->failed) l->lines = malloc(((size_t)l->count + 1) * sizeof(char *));
    if (!status && !l->lines) return MTT_E_MEMORY;
    for (i = 0; i < l->count && !status; i++) {
        l->lines[i] = at;
        at += strcspn(at, "\n");
        *at++ = 0;
    }
    return status;
}

/* Prints two lines side by side, each broken at blanks where its column ends; `mark` is between them. */
static void print_row(const char *left, const char *right, char mark)
{
    enum { WIDTH = 76 };
    const char *sides[2];
    size_t sizes[2];
    int k;
    sides[0] = left, sides[1] = right;
    do {
        for (k = 0; k < 2; k++) {
            size_t size = strlen(sides[k]);
            if (size > WIDTH)
                for (size = WIDTH; size > WIDTH / 2 && sides[k][size] != ' ';) size--;
            sizes[k] = size;
        }
        printf("%-*.*s %c %.*s\n", WIDTH, (int)sizes[0], sides[0], mark, (int)sizes[1], sides[1]);
        for (k = 0; k < 2; k++) sides[k] += sizes[k];
    } while (*sides[0] || *sides[1]);
}

/* Two lists side by side: = the same, < only left, > only right. After a difference they go on at the nearest
   lines that are the same. */
static void print_sides(const list *a, const list *b)
{
    int i = 0, j = 0, skip, k, same = 0;
    while (i < a->count || j < b->count) {
        for (skip = 0; skip <= a->count - i + b->count - j; skip++) {
            for (k = 0, same = 0; k <= skip && !same; k++)
                same = i + k < a->count && j + skip - k < b->count &&
                       !strcmp(a->lines[i + k], b->lines[j + skip - k]);
            if (same) break;
        }
        k = same ? k - 1 : a->count - i;
        skip = same ? skip - k : b->count - j;
        for (; k > 0; k--) print_row(a->lines[i++], "", '<');
        for (; skip > 0; skip--) print_row("", b->lines[j++], '>');
        if (same) print_row(a->lines[i++], b->lines[j++], '=');
    }
}

/* The number of a pass. */
static mtt_status find_pass(mtt_env *env, const char *name, int *number)
{
    const char *pass;
    size_t used;
    for (*number = 0; (pass = mtt_schedule_pass(*number)) != NULL; ++*number)
        if (!strcmp(pass, name)) return MTT_OK;
    used = (size_t)snprintf(env->error, sizeof(env->error), "there is no pass %.60s: take", name);
    for (*number = 0; (pass = mtt_schedule_pass(*number)) != NULL; ++*number)
        used += (size_t)snprintf(env->error + used, sizeof(env->error) - used, " %s", pass);
    return MTT_E_ARGUMENT;
}

static mtt_status print_lists(mtt_env *env, const mtt_schedule *schedule)
{
    list lists[2];
    int numbers[2] = {0, 0}, i;
    mtt_status status = MTT_OK;
    memset(lists, 0, sizeof(lists));
    if (before) status = find_pass(env, before, &numbers[0]);
    if (!status && after) status = find_pass(env, after, &numbers[1]);
    if (!status && before) status = make_list(schedule, numbers[0], &lists[0]);
    if (!status && after) status = make_list(schedule, numbers[1] + 1, &lists[1]);
    if (!status && before && after) print_sides(&lists[0], &lists[1]);
    else if (!status)
        for (i = 0; i < lists[after != NULL].count; i++) puts(lists[after != NULL].lines[i]);
    for (i = 0; i < 2; i++) free(lists[i].text), free(lists[i].lines);
    return status;
}

/* ---- questions ---- */

/* Prints a question, or what there is to say to an answer. *code: 1 = it is wrong. */
static mtt_status ask(mtt_env *env, int *code)
{
    char text[512];
    int right = 1;
    mtt_status status = MTT_OK;
    if (question > QUIZ_COUNT) {
        snprintf(env->error, sizeof(env->error), "there are questions 1 to %d", QUIZ_COUNT);
        return MTT_E_ARGUMENT;
    }
    if (!option_given("answer")) return puts(quizzes[question - 1].text), MTT_OK;
    status = quiz_grade(env, &quizzes[question - 1], (double)answer, &right, text, sizeof(text));
    if (!status) puts(text);
    *code = !right;
    return status;
}

/* ---- the step itself ---- */

/* Opens the model of --init and takes its description. */
static mtt_status open_weights(mtt_env *env, mtt_model **weights)
{
    mtt_status status = mtt_model_open(env, init, weights);
    mtt_model_desc fixed;
    const char *other;
    if (status) return status;
    fixed = *mtt_model_describe(*weights);
    fixed.dropout = model.dropout;
    if (fixed.positions != MTT_POSITIONS_LEARNED) fixed.max_seq = model.max_seq;
    other = option_contradicted(&model, &fixed);
    model = fixed;
    if (!other) return MTT_OK;
    snprintf(env->error, sizeof(env->error), "--%s has another value than the model in %.500s: leave it out",
             other, init);
    return MTT_E_ARGUMENT;
}

/* Runs the step on random tokens, each the target of the one before it. */
static mtt_status dump_step(mtt_env *env, const mtt_schedule *schedule, mtt_model *weights)
{
    const mtt_policy p = dump_policy(schedule);
    const int64_t count = (int64_t)p.accumulate * batch * seq_len;
    int32_t *tokens = malloc(((size_t)count + 1) * sizeof(*tokens));
    mtt_backend backend = *mtt_cpu_backend();
    uint64_t state = 1;
    struct stat file;
    mtt_status status = MTT_OK;
    int64_t i;
    if (!tokens) return failure(env, MTT_E_MEMORY, "no memory for a list of all tensors");
    for (i = 0; i <= count; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u; /* Knuth's generator */
        tokens[i] = (int32_t)((state >> 33) % (uint64_t)mtt_schedule_model(schedule)->vocab);
    }
    if (p.device == MTT_DEVICE_CUDA) status = mtt_cuda_backend(env, 0, &backend);
    if (!status)
        status = dump_save(env, dump_path, schedule, batch, seq_len, &backend, weights, tokens, tokens + 1);
    if (!status && !stat(dump_path, &file))
        printf("wrote %s, %.1f MB\n", dump_path, (double)file.st_size / 1e6);
    free(tokens);
    return status;
}

/* What the options ask for. */
static mtt_status show(mtt_env *env, const explorer_plan *plan, mtt_model *weights, const char *words)
{
    mtt_plan_report report;
    mtt_status status = MTT_OK;
    if (html) status = write_page(env, plan, words);
    if (viz && !status) status = viz_save(env, viz, plan->schedule);
    if (viz && !status) printf("wrote %s: open it at https://pytorch.org/memory_viz\n", viz);
    if (dump_path && !status) status = dump_step(env, plan->schedule, weights);
    if (kept && !status) kept_print(plan->schedule);
    if (status || html || viz || dump_path || kept) return status;
    if (before || after) return print_lists(env, plan->schedule);
    if (json) return mtt_schedule_json(plan->schedule, print, stdout), MTT_OK;
    mtt_schedule_print(plan->schedule, print, stdout);
    mtt_schedule_report(plan->schedule, &report);
    mtt_plan_print(&report, print, stdout);
    return MTT_OK;
}

int main(int argc, char **argv)
{
    mtt_env env = {0};
    char *words;
    explorer_plan plan;
    mtt_model *weights = NULL;
    mtt_status status = MTT_OK;
    int code = option_parse(options, LENGTH(options), argc, argv);
    if (code) return code == OPTION_HELP ? 0 : code;
    memset(&plan, 0, sizeof(plan));
    if (compare && !html) return option_fail("--compare needs a page: add --html memory.html");
    if (option_given("answer") && !question) return option_fail("--answer needs a question: add --quiz 1");
    if (question) return (status = ask(&env, &code)) ? option_tell(&env, status) : option_close_output(code);
    if (json && kept) return option_fail("--json and --kept print different things: leave out one");
    if ((before || after) && (html || json || kept || dump_path || viz))
        return option_fail("--before and --after print lists: leave out the other outputs");
    if (init && !dump_path) return option_fail("--init is for --dump: add --dump step.safetensors");
    if (option_window_note(&policy, seq_len)) fprintf(stderr, "%s\n", option_window_note(&policy, seq_len));
    if (init) status = open_weights(&env, &weights);
    if (!status) status = explorer_open(&env, &model, &policy, batch, seq_len, option_technique(), &plan);
    words = join_words(argc, argv);
    if (!status) status = words ? show(&env, &plan, weights, words) : MTT_E_MEMORY;
    free(words);
    explorer_close(&plan);
    mtt_model_close(weights);
    return option_close_output(option_tell(&env, status));
}
