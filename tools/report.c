/* report.c - compares the runs that train and experiments.sh left in a folder: tables, and an analysis from their numbers.

   cc -O2 tools/report.c -o report -lm && ./report --results-dir results/a

   Reads *_metrics.json, *_memory.json, the logs and experiment_summary.json, where that is; a run without a summary counts
   as one of the group `batch`. Writes comparison_report.txt, comparison.md, results.tsv and timeline.tsv, the last two for plots. */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "options.h"

#include <dirent.h>


/* What is known of a run: texts and numbers by their names in JSON; the last four numbers are computed here. */
#define TEXTS(X)                                                                                                          \
    X(name, 256) X(group, 32) X(technique, 128) X(status, 16) X(message, 600) X(phase, 16) X(suite, 16) X(device, 8) X(budget, 32) \
    X(baseline, 16) X(dataset, 256)
#define NUMBERS(X)                                                                                                        \
    X(BATCH, batch_size) X(SEQ_LEN, seq_len) X(STEPS, steps) X(LARGEST, largest_batch) X(PERPLEXITY, perplexity)          \
    X(BITS, bits_per_byte) X(ACCURACY, accuracy) X(FORWARD, peak_forward_bytes) X(BACKWARD, peak_backward_bytes)          \
    X(PEAK, peak_bytes) X(ARENA, arena_bytes) X(DEVICE, device_bytes) X(MS, ms_median) X(MEAN_MS, ms_per_step)            \
    X(TOKENS, tokens_per_s) X(LAYER, layer) X(STEP_MS, ms) X(PARAMETERS, parameters) X(LAYERS, layers) X(MEMORY, memory)  \
    X(SPEED, speed) X(PARETO, pareto)
#define TEXT_FIELD(name, room) char name[room];
#define TEXT_ROW(name, room) {#name, offsetof(run, name), room},
#define NUMBER_ID(id, name) id,
#define NUMBER_NAME(id, name) #name,
enum { NUMBERS(NUMBER_ID) NUMBER_COUNT };

typedef struct run {
    TEXTS(TEXT_FIELD)
    double v[NUMBER_COUNT];           /* 0 = unknown */
    double bytes[MTT_CATEGORY_COUNT]; /* at the peak */
    const struct run *base;           /* the baseline that it is compared with */
} run;

static const struct { const char *name; size_t at, room; } text_rows[] = {TEXTS(TEXT_ROW)};
static const char *const number_name[] = {NUMBERS(NUMBER_NAME)};

#define EACH(r) for (run *r = runs; r < runs + run_count; r++)
static run *runs, head; /* `head`: what the summary says of the whole suite */
static int run_count;
static char budget[64] = "the budget"; /* in words */
static const char *results = "results", *experiments, *dataset;

static const option options[] = {
    TITLE("usage: report [option...]"),
    TEXT("results-dir", &results, "folder of the runs"),
    TEXT("experiments", &experiments, "compare only these: names or techniques, separated by commas"),
    TEXT("dataset", &dataset, "compare the runs of this dataset; needed if there are several and no suite"),
};

/* ---- reading ---- */

static void out_of_memory(void)
{
    fprintf(stderr, "report: out of memory: compare fewer runs with --experiments\n");
    exit(1);
}

static const char *path_of(const char *name, const char *ending)
{
    static char path[1024];
    snprintf(path, sizeof(path), "%s/%s%s", results, name, ending);
    return path;
}

static void put_text(run *r, mtt_slice key, mtt_slice value)
{
    char plain[2048];
    size_t k, size = value.size < sizeof(plain) ? mtt_json_unescape(value, plain) : 0;
    for (k = 0; k < LENGTH(text_rows); k++)
        if (mtt_slice_is(key, text_rows[k].name)) snprintf((char *)r + text_rows[k].at, text_rows[k].room, "%.*s", (int)size, plain);
}

static void put_number(run *r, mtt_slice key, double value)
{
    int k;
    for (k = 0; k < NUMBER_COUNT; k++) if (mtt_slice_is(key, number_name[k])) r->v[k] = value;
    for (k = 0; k < MTT_CATEGORY_COUNT; k++) if (mtt_slice_is(key, mtt_category_name((mtt_category)k))) r->bytes[k] = value;
}

/* Reads an object into a run and gives each item of an array to `item`; passes over what a run does not know. */
typedef void (*item_fn)(mtt_json *j, run *r, FILE *to);
static void read_object(mtt_json *j, run *r, item_fn item, FILE *to)
{
    mtt_slice key, value;
    for (mtt_json_begin(j, '{'); mtt_json_key(j, &key);) {
        int mark = mtt_json_peek(j);
        if (mark == '"' && mtt_json_string(j, &value)) put_text(r, key, value);
        else if (mtt_slice_is(key, "plan") || mtt_slice_is(key, "bytes")) read_object(j, r, NULL, NULL);
        else if (mark == '[' && item)
            for (mtt_json_begin(j, '['); mtt_json_item(j);) item(j, r, to);
        else {
            if (mark == '-' || (mark >= '0' && mark <= '9')) put_number(r, key, strtod(j->at, NULL));
            mtt_json_skip(j);
        }
    }
}

/* Reads a file of one object, or of one a line into `item`; 0 if there is none. */
static int read_file(const char *path, run *r, item_fn item, FILE *to, int lines)
{
    FILE *f = fopen(path, "rb");
    size_t size = 0, room = 1 << 16, got;
    char *text = f ? malloc(room) : NULL;
    mtt_json j;
    while (text && (got = fread(text + size, 1, room - 1 - size, f)) > 0)
        if ((size += got) == room - 1 && !(text = realloc(text, room *= 2))) out_of_memory();
    if (f) fclose(f);
    if (!text) return 0;
    text[size] = 0;
    mtt_json_init(&j, text, size);
    if (!lines) read_object(&j, r, item, to);
    else while (mtt_json_peek(&j)) item(&j, r, to);
    if (j.fault) fprintf(stderr, "report: %s: %s\n", path, j.fault);
    free(text);
    return !j.fault;
}

static run *add_run(const char *name)
{
    EACH(r) if (name && !strcmp(r->name, name)) return r;
    if (!(runs = realloc(runs, (size_t)(run_count + 1) * sizeof(*runs)))) out_of_memory();
    memset(&runs[run_count], 0, sizeof(*runs));
    return &runs[run_count++];
}

static void on_experiment(mtt_json *j, run *r, FILE *to)
{
    (void)r, (void)to;
    read_object(j, add_run(NULL), NULL, NULL);
}

/* An operation of the timeline: its layer says how many there are, and with `to` it becomes a line for the plots. */
static void on_operation(mtt_json *j, run *r, FILE *to)
{
    run op = {0};
    int k;
    read_object(j, &op, NULL, NULL);
    if (op.v[LAYER] >= r->v[LAYERS]) r->v[LAYERS] = op.v[LAYER] + 1;
    if (!to) return;
    fprintf(to, "\n%s\t%s", r->technique, op.phase);
    for (k = 0; k < MTT_CATEGORY_COUNT; k++) fprintf(to, "\t%.0f", op.bytes[k]);
}

static double *times;
static int time_count;

static void on_step(mtt_json *j, run *r, FILE *to)
{
    run step = {0};
    (void)r, (void)to;
    read_object(j, &step, NULL, NULL);
    if (step.v[STEP_MS] <= 0) return;
    if (!(times = realloc(times, (size_t)(time_count + 1) * sizeof(*times)))) out_of_memory();
    times[time_count++] = step.v[STEP_MS];
}

static int compare_numbers(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

/* What a run left. The median of its steps' times stands for its speed: first steps and disturbed ones do not count. */
static void read_run(run *r)
{
    char technique[128], *end;
    double tokens;
    snprintf(technique, sizeof(technique), "%s", r->technique);
    if (!read_file(path_of(r->name, "_metrics.json"), r, NULL, NULL, 0)) {
        if (!strcmp(r->status, "done")) snprintf(r->status, sizeof(r->status), "lost"), snprintf(r->message, sizeof(r->message), "its metrics are gone");
        return;
    }
    snprintf(r->status, sizeof(r->status), "done");
    if (technique[0]) snprintf(r->technique, sizeof(r->technique), "%s", technique); /* the summary's is without the batch */
    else if ((end = strstr(r->technique, "_bs"))) *end = 0;
    if (!r->group[0]) snprintf(r->group, sizeof(r->group), "batch");
    read_file(path_of(r->name, "_memory.json"), r, on_operation, NULL, 0);
    tokens = r->v[TOKENS] * r->v[MEAN_MS]; /* of a step, accumulation included, times 1000 */
    time_count = 0;
    if (!r->v[MS] && read_file(path_of(r->name, ".jsonl"), NULL, on_step, NULL, 1) && time_count) {
        qsort(times, (size_t)time_count, sizeof(*times), compare_numbers);
        r->v[MS] = (times[(time_count - 1) / 2] + times[time_count / 2]) / 2;
    }
    if (!r->v[MS]) r->v[MS] = r->v[MEAN_MS];
    if (r->v[MS] > 0) r->v[TOKENS] = tokens / r->v[MS];
    if (!r->v[DEVICE]) r->v[DEVICE] = r->v[ARENA];
}

/* Whether --experiments names a run: by its whole name, its technique, or that with the batch. */
static int named(const run *r)
{
    char list[4096], names[3][300];
    snprintf(list, sizeof(list), ",%s,", experiments ? experiments : "");
    snprintf(names[0], sizeof(names[0]), ",%s,", r->name);
    snprintf(names[1], sizeof(names[1]), ",%s,", r->technique);
    snprintf(names[2], sizeof(names[2]), ",%s_bs%.0f,", r->technique, r->v[BATCH]);
    return !experiments || strstr(list, names[0]) || strstr(list, names[1]) || strstr(list, names[2]);
}

static void read_results(void)
{
    struct dirent **files;
    char name[256], *end;
    int i, kept = 0, count = scandir(results, &files, NULL, alphasort);
    read_file(path_of("experiment_summary", ".json"), &head, on_experiment, NULL, 0);
    for (i = 0; i < count; free(files[i++])) {
        snprintf(name, sizeof(name), "%s", files[i]->d_name);
        if ((end = strstr(name, "_metrics.json"))) *end = 0, snprintf(add_run(name)->name, sizeof(name), "%s", name);
    }
    if (count >= 0) free(files);
    EACH(r) {
        read_run(r);
        if (named(r) && (!dataset || !strcmp(r->dataset, dataset))) runs[kept++] = *r;
    }
    run_count = kept;
}

/* ---- comparing ---- */

static int is_done(const run *r) { return !strcmp(r->status, "done"); }
static int is_plain(const run *r) { return !strcmp(r->technique, "fp32") || !strcmp(r->technique, "tf32"); }
static const char *window_of(const run *r) { return strstr(r->technique, "_window"); }

/* Runs of the same work, which a technique alone tells apart. */
static int is_same(const run *a, const run *b)
{
    return is_done(a) && is_done(b) && !strcmp(a->group, b->group) && a->v[BATCH] == b->v[BATCH] &&
           a->v[SEQ_LEN] == b->v[SEQ_LEN] && a->v[PARAMETERS] == b->v[PARAMETERS];
}

/* Losses of two texts are not to be compared; the datasets of a suite are one text's variants. */
static void check_dataset(void)
{
    const run *first = NULL;
    EACH(r) {
        if (head.suite[0] || !is_done(r)) continue;
        if (!first) first = r;
        if (!strcmp(r->dataset, first->dataset)) continue;
        fprintf(stderr, "report: %s has runs of %s and of %s: choose one with --dataset\n", results, first->dataset, r->dataset);
        exit(2);
    }
}

/* The baseline is plain attention in FP32 or TF32 with nothing recomputed: of the same work, or else the group's first of that model. */
static void compare(void)
{
    EACH(r) {
        if (!is_done(r)) continue;
        r->v[PARETO] = 1;
        EACH(b) {
            if (!is_done(b) || strcmp(b->group, r->group) || b->v[PARAMETERS] != r->v[PARAMETERS]) continue;
            if (is_plain(b) && (!r->base || (is_same(b, r) && !is_same(r->base, r)))) r->base = b;
            if (is_same(b, r) && b->v[DEVICE] <= r->v[DEVICE] && b->v[MS] <= r->v[MS] && (b->v[DEVICE] < r->v[DEVICE] || b->v[MS] < r->v[MS]))
                r->v[PARETO] = 0;
        }
        if (!r->base) continue;
        r->v[MEMORY] = r->v[DEVICE] / r->base->v[DEVICE];
        r->v[SPEED] = r->v[TOKENS] / r->base->v[TOKENS];
    }
}

/* ---- tables ---- */

#define MIB 1048576.0
static const struct column { const char *title; int number, digits; double unit; const char *sign; } columns[] = {
    {"batch", BATCH, 0, 1, ""}, {"length", SEQ_LEN, 0, 1, ""}, {"layers", LAYERS, 0, 1, ""}, {"perplexity", PERPLEXITY, 2, 1, ""},
    {"bits/byte", BITS, 4, 1, ""}, {"accuracy", ACCURACY, 2, 0.01, " %"}, {"MiB forward", FORWARD, 1, MIB, ""},
    {"backward", BACKWARD, 1, MIB, ""}, {"allocated", PEAK, 1, MIB, ""}, {"reserved", ARENA, 1, MIB, ""}, {"device", DEVICE, 1, MIB, ""},
    {"largest batch", LARGEST, 0, 1, ""}, {"ms/step", MS, 1, 1, ""}, {"tokens/s", TOKENS, 0, 1, ""}, {"memory", MEMORY, 0, 0.01, " %"},
    {"speed", SPEED, 2, 1, "x"}};
enum { COLUMNS = sizeof(columns) / sizeof(columns[0]) };

/* What the experiments of a group vary beside the technique; a sweep's few steps say nothing of quality. */
typedef struct group { const char *name, *title; int axis; const char *axis_name; int sweep; } group;
static group groups[] = { /* the first is a sweep too in suite e */
    {"batch", "Techniques at the same batch", BATCH, "batch", 0}, {"largest", "Each technique at its own largest batch", BATCH, "batch", 0},
    {"optimizations", "Optimizations at the same batch", BATCH, "batch", 1}, {"quality", "Quality of the precisions", BATCH, "batch", 0},
    {"length", "Over sequence length", SEQ_LEN, "length", 1}, {"depth", "Over depth", LAYERS, "layers", 1}};
enum { GROUPS = sizeof(groups) / sizeof(groups[0]) };

static FILE *out; /* the report under construction */

static int is_in(const run *r, const group *g) { return is_done(r) && !strcmp(r->group, g->name); }

/* Whether a column says anything about a group. */
static int is_shown(const struct column *c, const group *g)
{
    double low = INFINITY, high = 0, gap = 0;
    EACH(r) {
        if (!is_in(r, g)) continue;
        low = fmin(low, r->v[c->number]), high = fmax(high, r->v[c->number]);
        gap = fmax(gap, fabs(r->v[DEVICE] - r->v[ARENA]));
    }
    if (c->number == PERPLEXITY || c->number == BITS || c->number == ACCURACY) return high > 0 && !g->sweep;
    return c->number == DEVICE ? gap > 0 : c->number == SEQ_LEN || c->number == LAYERS ? high > low : high > 0;
}

static void print_table(const group *g)
{
    static const char dashes[] = "----------------------------------------------------------------";
    int wide = 10, width[COLUMNS], shown[COLUMNS], k;
    EACH(r) if (is_in(r, g) && (int)strlen(r->technique) > wide) wide = (int)strlen(r->technique);
    fprintf(out, "## %s\n\n| %-*s |", g->title, wide, "technique");
    for (k = 0; k < COLUMNS; k++) {
        shown[k] = is_shown(&columns[k], g);
        width[k] = (int)fmax(8, (double)strlen(columns[k].title));
        if (shown[k]) fprintf(out, " %*s |", width[k], columns[k].title);
    }
    fprintf(out, "\n|:%.*s-|", wide, dashes);
    for (k = 0; k < COLUMNS; k++) if (shown[k]) fprintf(out, "-%.*s:|", width[k], dashes);
    EACH(r) {
        if (!is_in(r, g)) continue;
        fprintf(out, "\n| %-*s |", wide, r->technique);
        for (k = 0; k < COLUMNS; k++) {
            const struct column *c = &columns[k];
            if (shown[k] && r->v[c->number] > 0) fprintf(out, " %*.*f%s |", width[k] - (int)strlen(c->sign), c->digits, r->v[c->number] / c->unit, c->sign);
            else if (shown[k]) fprintf(out, " %*s |", width[k], "-");
        }
    }
    fprintf(out, "\n\n");
}

/* ---- analysis: every sentence is made from the numbers ---- */

/* The best of the runs that do the same work as `like`, by a number; `sign` 1 looks for the largest. */
static const run *best(const run *like, int number, int sign)
{
    const run *found = NULL;
    EACH(r) if (is_same(r, like) && r->v[number] > 0 && (!found || sign * r->v[number] > sign * found->v[number])) found = r;
    return found;
}

static void print_best(const run *like, const group *g)
{
    const run *r;
    int some = 0;
    if (!g->sweep && (r = best(like, PERPLEXITY, -1))) fprintf(out, "- lowest perplexity: %s, %.2f\n", r->technique, r->v[PERPLEXITY]);
    if ((r = best(like, DEVICE, -1))) fprintf(out, "- least memory: %s, %.1f MiB\n", r->technique, r->v[DEVICE] / MIB);
    if ((r = best(like, TOKENS, 1))) fprintf(out, "- fastest: %s, %.1f ms a step, %.0f tokens/s\n", r->technique, r->v[MS], r->v[TOKENS]);
    if ((r = best(like, LARGEST, 1))) fprintf(out, "- largest batch in %s: %s, %.0f sequences\n", budget, r->technique, r->v[LARGEST]);
    fprintf(out, "- Pareto-optimal, nothing being both smaller and faster:");
    EACH(p)
        if (is_same(p, like) && p->v[PARETO]) fprintf(out, "%s %s (%.1f MiB, %.1f ms)", some++ ? "," : "", p->technique, p->v[DEVICE] / MIB, p->v[MS]);
    fprintf(out, "\n");
}

/* What each run saved against its baseline, and which categories of the peak that came from. */
static void print_saved(const run *like)
{
    const run *b = like->base;
    int k, some = 0;
    if (!b || !b->v[PEAK]) return;
    fprintf(out, "- where the peak of %s goes:", b->technique);
    for (k = 0; k < MTT_CATEGORY_COUNT; k++)
        if (b->bytes[k] > 0.005 * b->v[PEAK]) fprintf(out, "%s %s %.0f %%", some++ ? "," : "", mtt_category_name((mtt_category)k), 100 * b->bytes[k] / b->v[PEAK]);
    fprintf(out, "\n");
    EACH(r) {
        if (!is_same(r, like) || r == b) continue;
        fprintf(out, "- %s: %.1f MiB or %.0f %% %s memory, %.2f times the speed", r->technique, fabs(b->v[DEVICE] - r->v[DEVICE]) / MIB,
                100 * fabs(1 - r->v[MEMORY]), r->v[MEMORY] > 1 ? "more" : "less", r->v[SPEED]);
        for (k = some = 0; k < MTT_CATEGORY_COUNT; k++)
            if (fabs(r->bytes[k] - b->bytes[k]) > 0.01 * b->v[PEAK])
                fprintf(out, "%s %s %+.1f", some++ ? "," : "; at the peak, in MiB:", mtt_category_name((mtt_category)k), (r->bytes[k] - b->bytes[k]) / MIB);
        fprintf(out, "\n");
    }
}

/* Techniques without a window compute the function of the baseline: only the order and the width of sums differ. */
static void print_exact(const group *g)
{
    const run *worst = NULL;
    double limit = 0.005, far = 0, d;
    int exact = 0, off = 0;
    EACH(r) {
        const run *b = r->base;
        if (!is_in(r, g) || g->sweep || !b || b == r || !is_same(r, b) || b->v[STEPS] != r->v[STEPS] || window_of(r)) continue;
        if (r->v[PERPLEXITY] <= 0 || b->v[PERPLEXITY] <= 0) continue;
        d = fabs(r->v[PERPLEXITY] / b->v[PERPLEXITY] - 1);
        exact++, off += d > limit;
        if (!worst || d > far) far = d, worst = r;
    }
    if (!worst) return;
    fprintf(out, "- techniques that compute the baseline's function: %d of %d runs within %.1f %% of its perplexity; ", exact - off, exact, 100 * limit);
    fprintf(out, "farthest %s at batch %.0f, %.2f %% (%.2f against %.2f after %.0f steps)\n", worst->technique, worst->v[BATCH], 100 * far,
            worst->v[PERPLEXITY], worst->base->v[PERPLEXITY], worst->v[STEPS]);
}

/* How memory and speed of each technique grow along a sweep. */
static void print_growth(const group *g)
{
    EACH(first) {
        const run *low = first, *high = first;
        EACH(r) {
            if (!is_in(r, g) || !is_in(first, g) || strcmp(r->technique, first->technique)) continue;
            if (r->v[g->axis] < low->v[g->axis]) low = r;
            if (r->v[g->axis] > high->v[g->axis]) high = r;
        }
        if (low != first || high == low) continue;
        fprintf(out, "- %s: %s %.0f to %.0f (%.3g times): memory %.3g times, a step's time %.3g times, tokens/s %.3g times\n", low->technique,
                g->axis_name, low->v[g->axis], high->v[g->axis], high->v[g->axis] / low->v[g->axis], high->v[DEVICE] / low->v[DEVICE],
                high->v[MS] / low->v[MS], high->v[TOKENS] / low->v[TOKENS]);
    }
}

/* What the write-ups measured, each technique relative to its baseline: memory, time of a step, largest batch; 0 = not told.
   A technique that starts with _ continues the baseline's name. */
static const struct finding { char suite; const char *group, *technique; double memory, time, batch; } findings[] = {
    {'a', "batch", "bf16", 0.567, 0.738, 0}, {'a', "batch", "bf16_flash", 0.473, 0.499, 0}, {'a', "batch", "bf16_window16", 0.473, 0.482, 0},
    {'a', "batch", "bf16_window32", 0.473, 0.483, 0}, {'a', "batch", "_checkpointing", 0.768, 1.167, 0},
    {'c', "batch", "bf16", 1.022, 0.763, 0}, {'c', "batch", "bf16_flash", 0.963, 0.550, 0}, {'c', "batch", "bf16_window64", 0.963, 0.538, 0},
    {'c', "batch", "bf16_checkpointing", 0.923, 0.888, 0}, {'d', "batch", "bf16", 1.075, 0.983, 0}, {'d', "batch", "bf16_flash", 0.451, 0.509, 0},
    {'d', "batch", "bf16_window128", 0.451, 0.504, 0}, {'d', "batch", "bf16_window256", 0.451, 0.496, 0},
    {'d', "batch", "_checkpointing", 0.242, 1.132, 0}, {'d', "largest", "bf16_flash", 0, 0, 2.45}, {'d', "largest", "bf16_window128", 0, 0, 2.45},
    {'d', "largest", "bf16_window256", 0, 0, 2.45}, {'d', "largest", "_checkpointing", 0, 0, 4.40},
    {'d', "largest", "bf16_flash_checkpointing", 0, 0, 4.40}, {'e', "batch", "fp16", 0.70, 0.333, 0},
    {'e', "optimizations", "_checkpointing", 0.731, 1.196, 0}, {'e', "optimizations", "_flash", 0.885, 0.933, 0}};

static void print_finding(const run *r, const char *what, double theirs, double ours)
{
    double near = 0.03; /* of 1: neither a gain nor a loss */
    int a = theirs > 1 + near ? 1 : theirs < 1 - near ? -1 : 0, b = ours > 1 + near ? 1 : ours < 1 - near ? -1 : 0;
    if (theirs <= 0 || ours <= 0) return;
    fprintf(out, "- %s: %.2f of the baseline's %s in the write-up, %.2f here: %s\n", r->technique, theirs, what, ours,
            a != b ? "another result" : fabs(theirs / ours - 1) < 0.1 ? "the same" : "the same direction");
}

static void print_findings(const run *like, const group *g)
{
    const struct finding *f;
    const run *b = like->base;
    char technique[160];
    for (f = findings; f < findings + LENGTH(findings); f++) EACH(r) {
        if (f->suite != head.suite[0] || strcmp(f->group, g->name) || !is_in(r, g) || !r->base) continue;
        snprintf(technique, sizeof(technique), "%s%s", f->technique[0] == '_' ? r->base->technique : "", f->technique);
        if (strcmp(technique, r->technique) || (!f->batch && !is_same(r, like))) continue;
        print_finding(r, "memory", f->memory, r->v[MEMORY]);
        if (!strcmp(head.device, "cuda")) print_finding(r, "time", f->time, 1 / r->v[SPEED]);
        print_finding(r, "batch", f->batch, r->v[BATCH] / r->base->v[BATCH]);
    }
    if (b && (head.suite[0] == 'a' || head.suite[0] == 'b')) {
        int vocabulary = b->bytes[MTT_LOGITS] > b->bytes[MTT_SCORES];
        fprintf(out, "- at the baseline's peak logits take %.0f %% and attention's T x T matrices %.0f %%: %s is the larger part", 100 * b->bytes[MTT_LOGITS] / b->v[PEAK],
                100 * b->bytes[MTT_SCORES] / b->v[PEAK], vocabulary ? "the vocabulary side" : "attention");
        fprintf(out, "%s\n", head.suite[0] != 'a' ? "" : vocabulary ? ", as in the write-up" : ", unlike in the write-up");
    }
    EACH(w) EACH(full) {
        const char *digits = window_of(w);
        if (!digits || digits[7 + strspn(digits + 7, "0123456789")] || !is_same(w, like) || !is_same(full, w) || strcmp(full->technique, "bf16_flash")) continue;
        fprintf(out, "- %s against full flash attention: %.2f of the memory%s, %.2f of the time\n", w->technique, w->v[DEVICE] / full->v[DEVICE],
                fabs(w->v[DEVICE] / full->v[DEVICE] - 1) < 0.01 ? " (neither keeps T x T: a window saves work alone)" : "", w->v[MS] / full->v[MS]);
    }
}

/* The largest work of a group, of which the analysis speaks. */
static const run *largest_of(const group *g)
{
    const run *top = NULL;
    EACH(r) if (is_in(r, g) && (!top || r->v[BATCH] * r->v[SEQ_LEN] * r->v[LAYERS] > top->v[BATCH] * top->v[SEQ_LEN] * top->v[LAYERS])) top = r;
    return top;
}

static void print_report(void)
{
    group *g;
    int some = 0;
    fprintf(out, "# Comparison of %s%s\n\n", head.suite[0] ? "suite " : "the runs", head.suite);
    for (g = groups; g < groups + GROUPS; g++) {
        const run *top = largest_of(g);
        if (!top) continue;
        print_table(g);
        if (strcmp(g->name, "largest")) {
            fprintf(out, "At batch %.0f and sequences of %.0f:\n\n", top->v[BATCH], top->v[SEQ_LEN]);
            print_best(top, g);
            print_saved(top);
            print_exact(g);
        }
        if (g->sweep) print_growth(g);
        if (head.suite[0]) print_findings(top, g);
        fprintf(out, "\n");
    }
    EACH(r) if (!is_done(r) && r->message[0]) fprintf(out, "%s- %s %s: %s\n", some++ ? "" : "## Not trained\n\n", r->name, r->status, r->message);
    fprintf(out, "%sAllocated: bytes alive at the peak. Reserved: the arena that holds them. ", some ? "\n" : "");
    if (head.budget[0]) fprintf(out, "Largest batch: in %s, by the plan. ", budget);
    fprintf(out, "ms/step: the\nmedian. Memory and speed are relative to the baseline of the same work, plain attention in FP32 or TF32.\n%s",
            strcmp(head.device, "cuda") ? "On a CPU speed says little: it computes 16-bit products in FP32.\n" : "");
}

/* One line a run, and the timelines of the largest work, for the plots. */
static void write_tables(void)
{
    FILE *table = fopen(path_of("results", ".tsv"), "w"), *lines = fopen(path_of("timeline", ".tsv"), "w");
    const group *g = groups;
    int k;
    if (!table || !lines) return;
    fprintf(table, "name\tgroup\ttechnique");
    for (k = 0; k < NUMBER_COUNT; k++) fprintf(table, "\t%s", number_name[k]);
    fprintf(lines, "technique\tphase");
    for (k = 0; k < MTT_CATEGORY_COUNT; k++) fprintf(lines, "\t%s", mtt_category_name((mtt_category)k));
    while (strcmp(g->name, head.suite[0] == 'e' ? "optimizations" : "batch")) g++;
    EACH(r) {
        if (!is_done(r)) continue;
        fprintf(table, "\n%s\t%s\t%s", r->name, r->group, r->technique);
        for (k = 0; k < NUMBER_COUNT; k++) fprintf(table, "\t%.10g", r->v[k]);
        if (is_in(r, g) && is_same(r, largest_of(g))) read_file(path_of(r->name, "_memory.json"), r, on_operation, lines, 0);
    }
    fputc('\n', table), fclose(table);
    fputc('\n', lines), fclose(lines);
}

int main(int argc, char **argv)
{
    char *text = NULL, *unit;
    size_t size = 0;
    double bytes;
    FILE *report, *table;
    int done = 0, code = option_parse(options, LENGTH(options), argc, argv);
    if (code) return code == OPTION_HELP ? 0 : code;
    read_results();
    EACH(r) done += is_done(r);
    if (!done) return fprintf(stderr, "report: no run in %s is complete%s\n", results, experiments ? " and named by --experiments" : ""), 3;
    bytes = strtod(head.budget, &unit);
    if (head.budget[0]) snprintf(budget, sizeof(budget), *unit ? "%.0f%s" : "%.4g GB", *unit ? bytes : bytes * 1e-9, unit);
    groups[0].sweep = head.suite[0] == 'e';
    check_dataset();
    compare();
    if (!(out = open_memstream(&text, &size))) return 1;
    print_report();
    fclose(out);
    fputs(text, stdout);
    report = fopen(path_of("comparison_report", ".txt"), "w"), table = fopen(path_of("comparison", ".md"), "w");
    if (report) fputs(text, report), fclose(report);
    if (table) fputs(text, table), fclose(table);
    write_tables();
    free(text), free(runs), free(times);
    return report && table ? 0 : (fprintf(stderr, "report: cannot write to %s\n", results), 3);
}
