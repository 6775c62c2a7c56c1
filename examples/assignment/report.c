/* report.c - compares the runs in a folder: tables, and an analysis made from their numbers.

   cc -O2 examples/assignment/report.c -o report -lm && ./report --results-dir results/a

   Reads what train and experiments.sh left: *_metrics.json, *_memory.json, the logs, and if there is one
   experiment_summary.json. A run that the summary does not name belongs to the group `batch`. Writes
   comparison_report.txt and comparison.md, a narrow table to paste into a report as table.md, table.csv and
   table.tex, and for the plots results.csv and timeline.csv. --brief prints a
   table for a terminal and a few sentences instead of the report. Where a suite timed its techniques in
   rounds (groups round1, round2, ...), these show how much times differ by chance. Then no smaller difference
   is reported.

   Files may come from strangers. So their names must be names (result_is_name), a damaged run is reported and
   left out, and a damaged summary ends the program: without its groups, runs of different work would be
   compared.
   Exit codes: 0; 2 wrong call; 3 no run, a damaged file, or no place to write. */
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include "../../tools/options.h"
#include "../../tools/results.h"
#include <ctype.h>
#include <stdarg.h>

/* What a run has besides RESULTS. The first rows are in the summary, the next three in the timeline and the
   log. The last ones are computed here. WORDS are a name, a LINE is any text. */
#define OTHERS(X)                                                                                            \
    X(WORDS, name, 256)                                                                                      \
    X(WORDS, group, 32)                                                                                      \
    X(WORDS, status, 16)                                                                                     \
    X(LINE, message, 600)                                                                                    \
    X(LINE, suite, 16)                                                                                       \
    X(WORDS, device, 8)                                                                                      \
    X(WORDS, budget, 32)                                                                                     \
    X(WORDS, baseline, 16)                                                                                   \
    X(NUMBER, vocabulary, "")                                                                                \
    X(NUMBER, original_vocabulary, "")                                                                       \
    X(NUMBER, largest_batch, "")                                                                             \
    X(WORDS, phase, 16)                                                                                      \
    X(NUMBER, layer, "")                                                                                     \
    X(NUMBER, ms, "")                                                                                        \
    X(NUMBER, ms_median, "")                                                                                 \
    X(NUMBER, layers, "")                                                                                    \
    X(NUMBER, memory, "") /* of the baseline's */                                                            \
    X(NUMBER, speed, "")                                                                                     \
    X(NUMBER, pareto, "")                                                                                    \
    X(NUMBER, recomputed, "") /* of an operation */                                                          \
    X(NUMBER, rounds, "")                                                                                    \
    X(NUMBER, spread, "") /* of the speed: its largest minus its smallest round */                           \
    X(NUMBER, step, "")                                                                                      \
    X(NUMBER, loss, "")

#define RESULT_LINE_MEMBER RESULT_WORDS_MEMBER
typedef struct run {
    RESULTS(RESULT_MEMBER)            /* a number is 0 if it is unknown */
    OTHERS(RESULT_MEMBER)
    int diverged;                     /* its perplexity is null */
    double bytes[MTT_CATEGORY_COUNT]; /* at the peak */
    const struct run *base;           /* the baseline that it is compared with */
} run;

/* The JSON keys of a run; size 0 is a number. */
#define KEY_WORDS(name, size) {#name, offsetof(run, name), size, 0},
#define KEY_LINE(name, size) {#name, offsetof(run, name), size, 1},
#define KEY_NUMBER(name, format) {#name, offsetof(run, name), 0, 0},
#define KEY(kind, name, how) KEY_##kind(name, how)
static const struct key {
    const char *name;
    size_t at, size;
    int is_line;
} keys[] = {RESULTS(KEY) OTHERS(KEY)};

enum { MOST_ROUNDS = 9 };

#define EACH(r) for (run *r = runs; r && r < runs + run_count; r++)
static run *runs, head; /* `head`: what the summary says of the whole suite */
static int run_count, damaged; /* `damaged`: files */
static char budget[64] = "the budget"; /* in words */
static const char *results = "results", *experiments, *dataset;
static int brief;

static const option options[] = {
    TITLE("usage: report [option...]"),
    TEXT("results-dir", &results, "folder of the runs"),
    TEXT("experiments", &experiments, "compare only these: names or techniques, separated by commas"),
    TEXT("dataset", &dataset, "compare the runs of this dataset; needed if there are several and no suite"),
    FLAG("brief", &brief, 1, "print a small table and a few sentences; the whole report is in comparison.md"),
};

/* ---- reading ---- */

static void out_of_memory(void)
{
    fprintf(stderr, "report: out of memory: compare fewer runs with --experiments\n");
    exit(EXIT_MEMORY);
}

static void *grow(void *block, size_t bytes)
{
    void *larger = realloc(block, bytes);
    if (!larger) out_of_memory();
    return larger;
}

/* The path of a file in the folder; main has checked that it fits. */
static const char *path_of(const char *name)
{
    static char path[1024];
    snprintf(path, sizeof(path), "%s/%s", results, name);
    return path;
}

/* Reports a fault in a file. Control characters of foreign names do not reach the terminal. */
static void complain(const char *path, int line, const char *fault)
{
    char text[2048], *c;
    snprintf(text, sizeof(text), line ? "%s: %s in line %d" : "%s: %s", path, fault, line);
    for (c = text; *c; c++)
        if ((*c > 0 && *c < ' ') || *c == 127) *c = '?';
    fprintf(stderr, "report: %s\n", text);
}

static const struct key *find_key(mtt_slice name)
{
    const struct key *k = keys;
    while (k < keys + LENGTH(keys) && !mtt_slice_is(name, k->name)) k++;
    return k < keys + LENGTH(keys) ? k : NULL;
}

static double *number_at(const run *r, size_t at)
{
    return (double *)(void *)((char *)r + at);
}

static void refuse_value(mtt_json *j, const struct key *k, const char *why)
{
    static char fault[200];
    snprintf(fault, sizeof(fault), "%s %s", k->name, why);
    j->fault = fault;
}

/* 1 = as "a, small". */
static int is_suite(mtt_slice text)
{
    size_t i;
    for (i = 0; i < text.size; i++)
        if (!text.at[i] || !strchr(RESULT_LETTERS ", ", text.at[i])) return 0;
    return 1;
}

/* 1 = a run is known by it. */
static int is_needed(const struct key *k)
{
    return !strcmp(k->name, "dataset") || !strcmp(k->name, "technique") || !strcmp(k->name, "name");
}

static void put_words(mtt_json *j, run *r, mtt_slice key, mtt_slice value)
{
    static char fault[400];
    char *at, plain[2048];
    const struct key *k = find_key(key);
    size_t most = k && k->is_line ? sizeof(plain) : k ? k->size : 0;
    if (!k) return;
    if (!most) {
        refuse_value(j, k, "must be a number");
        return;
    }
    if (mtt_slice_is(key, "suite") && !is_suite(value)) {
        refuse_value(j, k, "has characters other than A-Za-z0-9_.-, commas and blanks");
        return;
    }
    if (value.size >= most ||
        (!k->is_line && (value.size || is_needed(k)) && !result_is_name(value.at, value.size))) {
        snprintf(fault, sizeof(fault), "\"%.*s\" is no %s: a name has up to %d of A-Za-z0-9_.- and does not "
                 "begin with - or .", (int)fmin(200, (double)value.size), value.at, k->name, (int)most - 1);
        j->fault = fault;
        return;
    }
    value.size = mtt_json_unescape(value, plain);
    snprintf((char *)r + k->at, k->size, "%.*s", (int)value.size, plain);
    for (at = (char *)r + k->at; *at; at++)
        if (iscntrl((unsigned char)*at)) *at = ' ';
}

/* Numbers are bounded, so that no product or quotient of them overflows. */
static void put_number(mtt_json *j, run *r, mtt_slice key, double value)
{
    const struct key *k = find_key(key);
    int i;
    if (fabs(value) < 1e-9) value = 0;
    if (k && k->size) refuse_value(j, k, "must be a text");
    else if (k && value < 0 && strcmp(k->name, "layer")) refuse_value(j, k, "is below 0"); /* -1: none */
    else if (k && fabs(value) > 1e18) j->fault = "a number beyond 1e18";
    else if (k) *number_at(r, k->at) = value;
    for (i = 0; i < MTT_CATEGORY_COUNT; i++)
        if (mtt_slice_is(key, mtt_category_name((mtt_category)i))) {
            r->bytes[i] = value;
            if (value < 0) j->fault = "bytes below 0";
        }
}

/* Reads an object into a run, and gives each item of an array to `item`. What is in "plan" and "bytes" counts
   as the object's own. Skips what a run does not have. */
typedef void (*item_fn)(mtt_json *j, run *r, FILE *to);
static void read_object(mtt_json *j, run *r, item_fn item, FILE *to)
{
    mtt_slice key, value;
    double number;
    int mark, depth = mtt_json_begin(j, '{');
    while (depth) {
        if (!mtt_json_key(j, &key)) {
            depth--;
            continue;
        }
        mark = mtt_json_peek(j);
        if (mark == '"' && mtt_json_string(j, &value)) put_words(j, r, key, value);
        else if (mark == '{' && (mtt_slice_is(key, "plan") || mtt_slice_is(key, "bytes")))
            depth += mtt_json_begin(j, '{');
        else if (mark == '[' && item)
            for (mtt_json_begin(j, '['); mtt_json_item(j);) item(j, r, to);
        else if (mark == '-' || (mark >= '0' && mark <= '9')) {
            if (mtt_json_number(j, &number)) put_number(j, r, key, number);
        } else if (mtt_json_skip(j)) {
            if (mark != 'n' && find_key(key)) refuse_value(j, find_key(key), "must be a number or a text");
            r->diverged |= mark == 'n' && mtt_slice_is(key, "perplexity");
        }
    }
}

/* The text of a file; NULL if there is none. A fault if it cannot be read: a pipe may never end. */
static char *load(const char *path, size_t *size, const char **fault)
{
    struct stat info;
    FILE *f = NULL;
    char *text = NULL;
    if (stat(path, &info)) *fault = errno == ENOENT ? NULL : strerror(errno);
    else if (!S_ISREG(info.st_mode) || info.st_size >= 1 << 30) *fault = "expected a file of up to 1 GiB";
    else if (!(f = fopen(path, "rb"))) *fault = strerror(errno);
    else {
        text = grow(NULL, (size_t)info.st_size + 1);
        *size = fread(text, 1, (size_t)info.st_size, f);
    }
    if (text && *size < (size_t)info.st_size) *fault = "it cannot be read to its end";
    if (f) fclose(f);
    return text;
}

/* Reads a file of one object. Returns 0 if there is no such file, or it is damaged. With `lines` each line is
   an object for `item`, and only lines that are not JSON are left out: earlier versions wrote inf and nan. */
static int read_file(const char *path, run *r, item_fn item, FILE *to, int lines)
{
    size_t size = 0;
    const char *fault = NULL;
    char *text = load(path, &size, &fault), *at = text, *end;
    int line = 0, bad = 0, found = text && !fault;
    mtt_json j;
    if (fault) complain(path, 0, fault);
    while (found && (at < text + size || !line)) {
        end = lines ? memchr(at, '\n', (size_t)(text + size - at)) : NULL;
        if (!end) end = text + size;
        mtt_json_init(&j, at, (size_t)(end - at));
        line++;
        if (lines) item(&j, r, to);
        else read_object(&j, r, item, to);
        if (!mtt_json_end(&j) && !bad++) complain(path, lines ? line : 0, j.fault);
        at = end + 1;
    }
    damaged += fault || (bad && !lines);
    free(text);
    return found && !bad;
}

/* The run of a name; NULL makes a new one. */
static run *add_run(const char *name)
{
    EACH(r)
        if (name && !strcmp(r->name, name)) return r;
    runs = grow(runs, (size_t)(run_count + 1) * sizeof(*runs));
    memset(&runs[run_count], 0, sizeof(*runs));
    if (name) snprintf(runs[run_count].name, sizeof(runs->name), "%s", name);
    return &runs[run_count++];
}

static void on_experiment(mtt_json *j, run *r, FILE *to)
{
    (void)r;
    (void)to;
    read_object(j, add_run(NULL), NULL, NULL);
}

/* An operation of the timeline. The highest layer gives the number of layers. With `to` it is a line for the
   plots. */
static void on_operation(mtt_json *j, run *r, FILE *to)
{
    run op = {0};
    int k;
    read_object(j, &op, NULL, NULL);
    if (op.layer >= r->layers) r->layers = op.layer + 1;
    if (!to || j->fault) return;
    fprintf(to, "\n%s,%s", r->technique, op.phase);
    for (k = 0; k < MTT_CATEGORY_COUNT; k++) fprintf(to, ",%.0f", op.bytes[k]);
    fprintf(to, ",%.0f,%.0f", op.layer, op.recomputed);
}

static double *times;
static int time_count;

static void on_step(mtt_json *j, run *r, FILE *to)
{
    run step = {0};
    (void)r;
    (void)to;
    read_object(j, &step, NULL, NULL);
    if (step.ms <= 0 || j->fault) return;
    times = grow(times, (size_t)(time_count + 1) * sizeof(*times));
    times[time_count++] = step.ms;
}

static int compare_numbers(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of some numbers, which it sorts, and if `spread` is given their largest minus their smallest. */
static double median(double *numbers, int count, double *spread)
{
    qsort(numbers, (size_t)count, sizeof(*numbers), compare_numbers);
    if (spread) *spread = numbers[count - 1] - numbers[0];
    return (numbers[(count - 1) / 2] + numbers[count / 2]) / 2;
}

/* The median step of a run is its speed, so that first and disturbed steps do not count. */
static void find_median(run *r)
{
    double tokens = r->tokens_per_s * r->ms_per_step; /* of a step, accumulation included, times 1000 */
    time_count = 0;
    if (!r->ms_median) read_file(result_path(results, r->name, RESULT_LOG), NULL, on_step, NULL, 1);
    if (time_count) r->ms_median = median(times, time_count, NULL);
    if (!r->ms_median) r->ms_median = r->ms_per_step;
    if (r->ms_median > 0) r->tokens_per_s = tokens / r->ms_median;
}

static void set_status(run *r, const char *status, const char *message)
{
    snprintf(r->status, sizeof(r->status), "%s", status);
    snprintf(r->message, sizeof(r->message), "%s", message);
}

static void read_run(run *r)
{
    char technique[256], *batch;
    int before = damaged;
    snprintf(technique, sizeof(technique), "%s", r->technique);
    if (!read_file(result_path(results, r->name, RESULT_METRICS), r, NULL, NULL, 0)) {
        if (damaged > before) set_status(r, "lost", "its metrics are damaged");
        else if (!strcmp(r->status, "done")) set_status(r, "lost", "its metrics are gone");
        return;
    }
    if (!r->technique[0] || !r->dataset[0]) {
        complain(result_path(results, r->name, RESULT_METRICS), 0, "it names no technique or no dataset");
        set_status(r, "lost", "its metrics are damaged");
        damaged++;
        return;
    }
    if (r->diverged) set_status(r, "diverged", "its perplexity is not finite");
    else set_status(r, "done", "");
    batch = strstr(r->technique, "_bs");
    if (technique[0]) memcpy(r->technique, technique, sizeof(technique)); /* the summary's has no batch */
    else if (batch) *batch = 0;
    if (!r->group[0]) snprintf(r->group, sizeof(r->group), "batch");
    if (!r->device_bytes) r->device_bytes = r->arena_bytes;
    if (!read_file(result_path(results, r->name, RESULT_MEMORY), r, on_operation, NULL, 0)) r->layers = 0;
    find_median(r);
}

static int is_listed(const char *name)
{
    size_t size = strlen(name);
    const char *at = experiments;
    for (; at; at = strchr(at, ','), at += at != NULL)
        if (strcspn(at, ",") == size && !memcmp(at, name, size)) return 1;
    return 0;
}

/* 1 = --experiments names a run: by its whole name, its technique, or technique and batch. */
static int is_named(const run *r)
{
    char with_batch[300];
    snprintf(with_batch, sizeof(with_batch), "%s_bs%.0f", r->technique, r->batch_size);
    return !experiments || is_listed(r->name) || is_listed(r->technique) || is_listed(with_batch);
}

/* Adds the run of a metrics file. */
static void on_file(const char *name)
{
    static const char ending[] = "_metrics.json";
    char run_name[256];
    size_t size = strlen(name), end = sizeof(ending) - 1;
    if (size < end || strcmp(name + size - end, ending)) return;
    snprintf(run_name, sizeof(run_name), "%.*s", (int)(size - end), name);
    if (result_is_name(run_name, size - end)) add_run(run_name);
    else {
        complain(path_of(name), 0, "its name has characters other than A-Za-z0-9_.-, or begins with - or .");
        damaged++;
    }
}

/* Returns 0 if the folder or its summary cannot be read. */
static int read_results(void)
{
    struct dirent **files;
    int i, kept = 0, damaged_summary, count = scandir(results, &files, NULL, alphasort);
    if (count < 0) complain(results, 0, strerror(errno));
    else read_file(path_of("experiment_summary.json"), &head, on_experiment, NULL, 0);
    damaged_summary = damaged;
    if (count < 0) return 0;
    for (i = 0; i < count; i++) {
        if (!damaged_summary) on_file(files[i]->d_name);
        free(files[i]);
    }
    free(files);
    if (damaged_summary) return 0;
    EACH(r) {
        read_run(r);
        if (is_named(r) && (!dataset || !strcmp(r->dataset, dataset))) runs[kept++] = *r;
    }
    run_count = kept;
    return 1;
}

/* ---- comparing ---- */

static int is_done(const run *r)
{
    return !strcmp(r->status, "done");
}

/* The letter of a suite that reproduces an experiment; 0 for the demo, and without a suite. */
static char suite_letter(void)
{
    return head.suite[0] && strchr(",", head.suite[1]) ? head.suite[0] : 0;
}

static int is_plain(const run *r)
{
    return !strcmp(r->technique, "fp32") || !strcmp(r->technique, "tf32");
}

static const char *window_of(const run *r)
{
    return strstr(r->technique, "_window");
}

/* 1 = the runs do the same work, and differ in technique alone. */
static int is_same(const run *a, const run *b)
{
    return is_done(a) && is_done(b) && !strcmp(a->group, b->group) && a->batch_size == b->batch_size &&
           a->seq_len == b->seq_len && a->parameters == b->parameters;
}

/* Losses of two texts cannot be compared. The datasets of a suite are variants of one text. */
static void check_dataset(void)
{
    const run *first = NULL;
    EACH(r) {
        if (head.suite[0] || !is_done(r)) continue;
        if (!first) first = r;
        if (!strcmp(r->dataset, first->dataset)) continue;
        fprintf(stderr, "report: %s has runs of %s and of %s: choose one with --dataset\n", results,
                first->dataset, r->dataset);
        exit(EXIT_USAGE);
    }
}

/* The run of the same technique and work in a round; NULL if there is none. */
static const run *in_round(const run *like, int round)
{
    char group[32];
    snprintf(group, sizeof(group), "round%d", round);
    EACH(r)
        if (is_done(r) && !strcmp(r->group, group) && !strcmp(r->technique, like->technique) &&
            r->batch_size == like->batch_size && r->seq_len == like->seq_len && r->ms_median > 0)
            return r;
    return NULL;
}

/* How many times as fast as b a is. A load on the machine that lasts for a round slows both down, so each
   round gives a ratio, and their median counts. Without rounds the spread is 0. */
static double times_as_fast(const run *a, const run *b, double *spread)
{
    double ratios[MOST_ROUNDS];
    int count = 0, k;
    for (k = 1; k <= MOST_ROUNDS; k++) {
        const run *x = in_round(a, k), *y = in_round(b, k);
        if (x && y) ratios[count++] = y->ms_median / x->ms_median;
    }
    *spread = 0;
    if (count > 1) return median(ratios, count, spread);
    return b->tokens_per_s > 0 ? a->tokens_per_s / b->tokens_per_s : 0;
}

/* 1: a is faster than b, -1: slower, 0: by no more than the rounds differ among themselves. Three rounds may
   agree by chance, so LEAST_SPREAD does not count either. */
#define LEAST_SPREAD 0.03
static int compare_speed(const run *a, const run *b)
{
    double spread, speed = times_as_fast(a, b, &spread), noise = fmax(spread, LEAST_SPREAD);
    if (!a->rounds) return (a->ms_median < b->ms_median) - (a->ms_median > b->ms_median);
    return (speed > 1 + noise) - (speed < 1 - noise);
}

/* The time of a step is the median of the rounds, if there are any. */
static void use_rounds(run *r)
{
    double ms[MOST_ROUNDS], tokens = r->tokens_per_s * r->ms_median;
    int count = 0, k;
    for (k = 1; k <= MOST_ROUNDS; k++)
        if (in_round(r, k)) ms[count++] = in_round(r, k)->ms_median;
    if (count < 2) return; /* one round does not show what chance does */
    r->rounds = count;
    r->ms_median = median(ms, count, NULL);
    r->tokens_per_s = tokens / r->ms_median;
}

/* 1 = a needs no more memory and no more time than b, and less of one. */
static int beats(const run *a, const run *b)
{
    int faster = compare_speed(a, b);
    if (a->device_bytes > b->device_bytes || faster < 0) return 0;
    return a->device_bytes < b->device_bytes || faster > 0;
}

/* The baseline has plain attention in FP32 or TF32 and recomputes nothing. It is the one of the same work, or
   else the first one of the group with the same model and length of sequences. */
static void compare(void)
{
    EACH(r)
        if (is_done(r) && strncmp(r->group, "round", 5)) use_rounds(r);
    EACH(r) {
        if (!is_done(r)) continue;
        r->pareto = 1;
        EACH(b) {
            if (!is_done(b) || strcmp(b->group, r->group) || b->parameters != r->parameters) continue;
            if (b->seq_len != r->seq_len) continue;
            if (is_plain(b) && (!r->base || (is_same(b, r) && !is_same(r->base, r)))) r->base = b;
            if (is_same(b, r) && beats(b, r)) r->pareto = 0;
        }
        if (!r->base) continue;
        if (r->base->device_bytes > 0) r->memory = r->device_bytes / r->base->device_bytes;
        r->speed = times_as_fast(r, r->base, &r->spread);
    }
}

/* ---- tables ---- */

#define MIB 1048576.0
#define AT(name) offsetof(run, name)

static const struct column {
    const char *title;
    size_t at;
    int digits;
    double unit;
    const char *sign;
} columns[] = {
    {"batch", AT(batch_size), 0, 1, ""},
    {"length", AT(seq_len), 0, 1, ""},
    {"layers", AT(layers), 0, 1, ""},
    {"steps", AT(steps), 0, 1, ""},
    {"perplexity", AT(perplexity), 2, 1, ""},
    {"bits/byte", AT(bits_per_byte), 4, 1, ""},
    {"accuracy", AT(accuracy), 2, 0.01, " %"},
    {"MiB forward", AT(peak_forward_bytes), 1, MIB, ""},
    {"backward", AT(peak_backward_bytes), 1, MIB, ""},
    {"allocated", AT(peak_bytes), 1, MIB, ""},
    {"reserved", AT(arena_bytes), 1, MIB, ""},
    {"device", AT(device_bytes), 1, MIB, ""},
    {"largest batch", AT(largest_batch), 0, 1, ""},
    {"ms/step", AT(ms_median), 1, 1, ""},
    {"total s", AT(training_time), 1, 1, ""},
    {"tokens/s", AT(tokens_per_s), 0, 1, ""},
    {"memory", AT(memory), 0, 0.01, " %"},
    {"speed", AT(speed), 2, 1, "x"},
    {"spread", AT(spread), 2, 1, "x"},
};
enum { COLUMNS = sizeof(columns) / sizeof(columns[0]) };

/* What the experiments of a group vary besides the technique. A sweep has few steps: too few for quality. */
typedef struct group {
    const char *name, *title;
    size_t axis;
    const char *axis_name;
    int sweep;
} group;

static group groups[] = {
    {"batch", "Techniques at the same batch", AT(batch_size), "batch", 0}, /* a sweep in suite e */
    {"largest", "Each technique at its own largest batch", AT(batch_size), "batch", 0},
    {"optimizations", "Optimizations at the same batch", AT(batch_size), "batch", 1},
    {"quality", "Quality of the precisions", AT(batch_size), "batch", 0},
    {"length", "Over sequence length", AT(seq_len), "length", 1},
    {"depth", "Over depth", AT(layers), "layers", 1},
};

static FILE *out; /* the report in the making */

static int is_in(const run *r, const group *g)
{
    return is_done(r) && !strcmp(r->group, g->name);
}

/* 1 = times are left out. A CPU's say nothing about techniques on a GPU; those of rounds at least compare the
   techniques on this CPU. */
static int hides_speed(void)
{
    if (strcmp(head.device, "cpu")) return 0;
    EACH(r)
        if (r->rounds) return 0;
    return 1;
}

/* 1 = a column says something about a group. */
static int is_shown(const struct column *c, const group *g)
{
    double low = INFINITY, high = 0, gap = 0;
    if (hides_speed() && (c->at == AT(ms_median) || c->at == AT(tokens_per_s) || c->at == AT(speed) ||
                          c->at == AT(training_time))) return 0;
    EACH(r) {
        if (!is_in(r, g)) continue;
        low = fmin(low, *number_at(r, c->at));
        high = fmax(high, *number_at(r, c->at));
        gap = fmax(gap, fabs(r->device_bytes - r->arena_bytes));
    }
    if (c->at == AT(device_bytes)) return gap > 0;
    if (c->at == AT(seq_len) || c->at == AT(layers) || c->at == AT(steps)) return high > low;
    if (c->at == AT(perplexity) || c->at == AT(bits_per_byte) || c->at == AT(accuracy))
        return high > 0 && !g->sweep;
    return high > 0;
}

static void print_cell(const struct column *c, int width, double value)
{
    int digits_width = width - (int)strlen(c->sign);
    if (value > 0) fprintf(out, " %*s%s |", digits_width, result_digits(c->digits, value / c->unit), c->sign);
    else fprintf(out, " %*s |", width, "-");
}

static void print_table(const group *g)
{
    static const char dashes[] = "----------------------------------------------------------------";
    int wide = 10, width[COLUMNS], shown[COLUMNS], k;
    EACH(r)
        if (is_in(r, g)) wide = (int)fmax(wide, (double)strlen(r->technique));
    fprintf(out, "## %s\n\n| %-*s |", g->title, wide, "technique");
    for (k = 0; k < COLUMNS; k++) {
        shown[k] = is_shown(&columns[k], g);
        width[k] = (int)fmax(8, (double)strlen(columns[k].title));
        if (shown[k]) fprintf(out, " %*s |", width[k], columns[k].title);
    }
    fprintf(out, "\n|:%.*s-|", wide, dashes);
    for (k = 0; k < COLUMNS; k++)
        if (shown[k]) fprintf(out, "-%.*s:|", width[k], dashes);
    EACH(r) {
        if (!is_in(r, g)) continue;
        fprintf(out, "\n| %-*s |", wide, r->technique);
        for (k = 0; k < COLUMNS; k++)
            if (shown[k]) print_cell(&columns[k], width[k], *number_at(r, columns[k].at));
    }
    fprintf(out, "\n\n");
}

/* ---- analysis: every sentence is made from the numbers ---- */

/* The best run of the same work as `like`, by a number; sign 1: the largest, -1: the smallest. */
static const run *best(const run *like, size_t at, int sign)
{
    const run *found = NULL;
    EACH(r) {
        double value = *number_at(r, at);
        if (!is_same(r, like) || value <= 0) continue;
        if (!found || sign * value > sign * *number_at(found, at)) found = r;
    }
    return found;
}

/* The fastest run, and those that may be as fast. */
static void print_fastest(const run *top)
{
    const char *as_fast = "; as fast, as far as the rounds can tell:";
    if (!top) return;
    fprintf(out, "- fastest: %s, %.1f ms a step, %.0f tokens/s", top->technique, top->ms_median,
            top->tokens_per_s);
    EACH(r) {
        if (r == top || !r->rounds || !is_same(r, top) || compare_speed(top, r)) continue;
        fprintf(out, "%s %s, %.1f ms", as_fast, r->technique, r->ms_median);
        as_fast = ",";
    }
    fprintf(out, "\n");
}

static void print_best(const run *like, const group *g)
{
    const run *r = g->sweep ? NULL : best(like, AT(perplexity), -1);
    int some = 0;
    if (r)
        fprintf(out, "- lowest perplexity after %.0f steps: %s, %s\n", r->steps, r->technique,
                result_digits(2, r->perplexity));
    r = best(like, AT(device_bytes), -1);
    if (r) fprintf(out, "- least memory: %s, %.1f MiB\n", r->technique, r->device_bytes / MIB);
    if (!hides_speed()) print_fastest(best(like, AT(tokens_per_s), 1));
    r = best(like, AT(largest_batch), 1);
    if (r)
        fprintf(out, "- largest batch in %s: %s, %.0f sequences\n", budget, r->technique, r->largest_batch);
    if (hides_speed()) return;
    fprintf(out, "- Pareto-optimal, nothing being both smaller and faster:");
    EACH(p)
        if (is_same(p, like) && p->pareto)
            fprintf(out, "%s %s (%.1f MiB, %.1f ms)", some++ ? "," : "", p->technique, p->device_bytes / MIB,
                    p->ms_median);
    fprintf(out, "\n");
}

/* What each run saved against its baseline, and in which categories of the peak. */
static void print_saved(const run *like)
{
    const run *b = like->base;
    int k, some = 0;
    if (!b || !b->peak_bytes) return;
    fprintf(out, "- where the peak of %s goes:", b->technique);
    for (k = 0; k < MTT_CATEGORY_COUNT; k++)
        if (b->bytes[k] > 0.005 * b->peak_bytes)
            fprintf(out, "%s %s %.0f %%", some++ ? "," : "", mtt_category_name((mtt_category)k),
                    100 * b->bytes[k] / b->peak_bytes);
    fprintf(out, "\n");
    EACH(r) {
        if (!is_same(r, like) || r == b) continue;
        fprintf(out, "- %s: %.1f MiB or %.0f %% %s memory", r->technique,
                fabs(b->device_bytes - r->device_bytes) / MIB, 100 * fabs(1 - r->memory),
                r->memory > 1 ? "more" : "less");
        if (r->rounds && !compare_speed(r, b)) fprintf(out, ", the same speed");
        else if (!hides_speed()) fprintf(out, ", %.2f times the speed", r->speed);
        for (k = some = 0; k < MTT_CATEGORY_COUNT; k++)
            if (fabs(r->bytes[k] - b->bytes[k]) > 0.01 * b->peak_bytes)
                fprintf(out, "%s %s %+.1f", some++ ? "," : "; at the peak, in MiB:",
                        mtt_category_name((mtt_category)k), (r->bytes[k] - b->bytes[k]) / MIB);
        fprintf(out, "\n");
    }
}

/* Without a window a technique computes the function of the baseline: only rounding differs, which
   changes the perplexity by less than this. */
#define ROUNDING 0.005
static void print_exact(const group *g)
{
    const run *worst = NULL;
    double far = 0;
    int exact = 0, off = 0;
    EACH(r) {
        const run *b = r->base;
        double distance;
        if (!is_in(r, g) || g->sweep || window_of(r) || !b || b == r || !is_same(r, b)) continue;
        if (b->steps != r->steps || r->perplexity <= 0 || b->perplexity <= 0) continue;
        distance = fabs(r->perplexity / b->perplexity - 1);
        exact++;
        off += distance > ROUNDING;
        if (worst && distance <= far) continue;
        far = distance;
        worst = r;
    }
    if (!worst) return;
    fprintf(out, "- techniques that compute the baseline's function: ");
    fprintf(out, "%d of %d runs within %.1f %% of its perplexity; ", exact - off, exact, 100 * ROUNDING);
    fprintf(out, "farthest %s at batch %.0f, %s %% (%s against %s after %.0f steps)\n",
            worst->technique, worst->batch_size, result_digits(2, 100 * far),
            result_digits(2, worst->perplexity), result_digits(2, worst->base->perplexity), worst->steps);
}

/* A time or a ratio with three digits, or all before the point, in static storage that the fourth call after
   this one takes. */
static const char *digits(double x)
{
    static char texts[4][400];
    static int next;
    char *text = texts[next++ % 4];
    snprintf(text, sizeof(texts[0]), x < 999.5 ? "%.3g" : "%.0f", x);
    return text;
}

/* How memory and speed of each technique grow along a sweep. */
static void print_growth(const group *g)
{
    EACH(first) {
        const run *low = first, *high = first;
        double from, to;
        EACH(r) {
            if (!is_in(r, g) || !is_in(first, g) || strcmp(r->technique, first->technique)) continue;
            if (*number_at(r, g->axis) < *number_at(low, g->axis)) low = r;
            if (*number_at(r, g->axis) > *number_at(high, g->axis)) high = r;
        }
        if (low != first || high == low) continue;
        from = *number_at(low, g->axis);
        to = *number_at(high, g->axis);
        fprintf(out, "- %s: %s %.0f to %.0f (%s times): ", low->technique, g->axis_name, from, to,
                digits(to / from));
        fprintf(out, "memory %s times", digits(high->device_bytes / low->device_bytes));
        if (!hides_speed())
            fprintf(out, ", a step's time %s times, tokens/s %s times",
                    digits(high->ms_median / low->ms_median), digits(high->tokens_per_s / low->tokens_per_s));
        fprintf(out, "\n");
    }
}

/* What the experiments measured that the suites reproduce, relative to the baseline: memory, time of a step,
   largest batch; 0 = unknown. A technique that begins with _ continues the name of the baseline. */
static const struct finding {
    char suite;
    const char *group, *technique;
    double memory, time, batch;
} findings[] = {
    {'a', "batch", "bf16", 0.567, 0.738, 0},
    {'a', "batch", "bf16_flash", 0.473, 0.499, 0},
    {'a', "batch", "bf16_window16", 0.473, 0.482, 0},
    {'a', "batch", "bf16_window32", 0.473, 0.483, 0},
    {'a', "batch", "_checkpointing", 0.768, 1.167, 0},
    {'c', "batch", "bf16", 1.022, 0.763, 0},
    {'c', "batch", "bf16_flash", 0.963, 0.550, 0},
    {'c', "batch", "bf16_window64", 0.963, 0.538, 0},
    {'c', "batch", "bf16_checkpointing", 0.923, 0.888, 0},
    {'d', "batch", "bf16", 1.075, 0.983, 0},
    {'d', "batch", "bf16_flash", 0.451, 0.509, 0},
    {'d', "batch", "bf16_window128", 0.451, 0.504, 0},
    {'d', "batch", "bf16_window256", 0.451, 0.496, 0},
    {'d', "batch", "_checkpointing", 0.242, 1.132, 0},
    {'d', "largest", "bf16_flash", 0, 0, 2.45},
    {'d', "largest", "bf16_window128", 0, 0, 2.45},
    {'d', "largest", "bf16_window256", 0, 0, 2.45},
    {'d', "largest", "_checkpointing", 0, 0, 4.40},
    {'d', "largest", "bf16_flash_checkpointing", 0, 0, 4.40},
    {'e', "batch", "fp16", 0.70, 0.333, 0},
    {'e', "optimizations", "_checkpointing", 0.731, 1.196, 0},
    {'e', "optimizations", "_flash", 0.885, 0.933, 0},
};

/* A gain, a loss, or neither: within 3 %. */
static int direction(double ratio)
{
    return (ratio > 1.03) - (ratio < 0.97);
}

static void print_finding(const run *r, const char *what, double theirs, double ours)
{
    const char *verdict = fabs(theirs / ours - 1) < 0.1 ? "the same" : "the same direction";
    if (theirs <= 0 || ours <= 0) return;
    if (direction(theirs) != direction(ours)) verdict = "another result";
    fprintf(out, "- %s: %.2f of the baseline's %s in the original experiment, %.2f here: %s\n", r->technique,
            theirs, what, ours, verdict);
}

/* Compared with full flash attention, a window saves work but no memory: neither keeps T x T. */
static void print_window(const run *w, const run *full)
{
    const char *digits = window_of(w);
    double memory = w->device_bytes / full->device_bytes;
    if (!digits || digits[7 + strspn(digits + 7, "0123456789")]) return;
    if (!is_same(full, w) || strcmp(full->technique, "bf16_flash")) return;
    fprintf(out, "- %s against full flash attention: %.2f of the memory%s", w->technique, memory,
            fabs(memory - 1) < 0.01 ? " (neither keeps T x T: a window saves only work)" : "");
    if (w->rounds && !compare_speed(w, full)) fprintf(out, ", the same time");
    else if (!hides_speed()) fprintf(out, ", %.2f of the time", w->ms_median / full->ms_median);
    fprintf(out, "\n");
}

/* Names techniques with a window as long as the sequences: two rows of the table are then one experiment. */
static void print_equal(const run *like)
{
    EACH(r) {
        const char *window = window_of(r);
        char full[256];
        size_t before = window ? (size_t)(window - r->technique) : 0;
        if (!window || !is_same(r, like) || strtod(window + 7, NULL) < r->seq_len) continue;
        window += 7 + strspn(window + 7, "0123456789");
        snprintf(full, sizeof(full), "%.*s_flash%.200s", before < 40 ? (int)before : 40, r->technique,
                 window);
        fprintf(out, "- %s is full attention here: no sequence is longer than the window. It equals %s, but "
                "for rounding and chance\n", r->technique, full);
    }
}

static void print_vocabulary(const run *b)
{
    double logits = b->bytes[MTT_LOGITS] / b->peak_bytes, scores = b->bytes[MTT_SCORES] / b->peak_bytes;
    fprintf(out, "- at the baseline's peak logits take %.0f %% and attention's T x T matrices %.0f %%: ",
            100 * logits, 100 * scores);
    fprintf(out, "%s is the larger part", logits > scores ? "the vocabulary side" : "attention");
    if (suite_letter() == 'a')
        fprintf(out, ", %s in the original experiment", logits > scores ? "as" : "unlike");
    fprintf(out, "\n");
}

static void print_findings(const run *like, const group *g)
{
    const struct finding *f;
    char technique[300];
    for (f = findings; f < findings + LENGTH(findings); f++)
        EACH(r) {
            if (f->suite != suite_letter() || strcmp(f->group, g->name) || !is_in(r, g) || !r->base) continue;
            snprintf(technique, sizeof(technique), "%s%s",
                     f->technique[0] == '_' ? r->base->technique : "", f->technique);
            if (strcmp(technique, r->technique) || (!f->batch && !is_same(r, like))) continue;
            print_finding(r, "memory", f->memory, r->memory);
            if (!strcmp(head.device, "cuda")) print_finding(r, "time", f->time, 1 / r->speed);
            print_finding(r, "batch", f->batch, r->batch_size / r->base->batch_size);
        }
    if (like->base && like->base->bytes[MTT_LOGITS] > 0 && (suite_letter() == 'a' || suite_letter() == 'b'))
        print_vocabulary(like->base);
    EACH(w)
        EACH(full)
            if (is_same(w, like)) print_window(w, full);
}

/* The largest work of a group, which the analysis is about. */
static const run *largest_of(const group *g)
{
    const run *top = NULL;
    double most = -1;
    EACH(r) {
        double work = r->batch_size * r->seq_len * r->layers;
        if (!is_in(r, g) || work <= most) continue;
        most = work;
        top = r;
    }
    return top;
}

static void print_group(const group *g)
{
    const run *top = largest_of(g);
    if (!top) return;
    print_table(g);
    if (strcmp(g->name, "largest")) {
        fprintf(out, "At batch %.0f and sequences of %.0f:\n\n", top->batch_size, top->seq_len);
        print_best(top, g);
        print_saved(top);
        print_exact(g);
        print_equal(top);
    }
    if (g->sweep) print_growth(g);
    if (head.suite[0]) print_findings(top, g);
    fprintf(out, "\n");
}

/* What a suite at the size of a CPU hides. */
static void print_small(void)
{
    const run *top = largest_of(&groups[0]);
    if (!suite_letter() || !head.suite[1]) return;
    if (head.vocabulary > 0 && head.vocabulary < head.original_vocabulary)
        fprintf(out, "The vocabulary has %.0f ids here, %.0f in the original experiment. So logits are a "
                "smaller part of the peak here, and the chunked loss saves less.\n", head.vocabulary,
                head.original_vocabulary);
    if (top && top->seq_len < 512)
        fprintf(out, "Scores take T x T: to see what flash attention saves, train longer sequences. Add "
                "--results-dir results512 -- --seq-len 512 to the command.\n");
    if (top && top->batch_size * top->seq_len < 4096)
        fprintf(out, "A chunk of the loss has 1,024 tokens: with no more in a batch it saves nothing.\n");
}

static void print_report(void)
{
    const group *g;
    int some = 0;
    fprintf(out, "# Comparison of %s%s\n\n", head.suite[0] ? "suite " : "the runs", head.suite);
    for (g = groups; g < groups + LENGTH(groups); g++) print_group(g);
    EACH(r) {
        if (is_done(r) || !r->message[0]) continue;
        fprintf(out, "%s- %s %s: %s\n", some++ ? "" : "## Not in the tables\n\n", r->name, r->status,
                r->message);
    }
    if (some) fprintf(out, "\n");
    fprintf(out, "Allocated: bytes in use at the peak. Reserved: the arena that holds them. ");
    if (head.budget[0]) fprintf(out, "Largest batch: in %s, by the plan. ", budget);
    if (!hides_speed()) fprintf(out, "ms/step: the\nmedian. Total s: training without evaluation. ");
    fprintf(out, "Memory and speed are relative to the baseline of the same work, plain attention in FP32 or "
            "TF32.\n");
    if (hides_speed())
        fprintf(out, "Times are left out: a CPU has no fast 16-bit or 8-bit arithmetic, so they say nothing "
                "about techniques on a GPU. results.csv has them.\n");
    else if (strcmp(head.device, "cuda"))
        fprintf(out, "Ignore the speed columns on a CPU: it has no fast 16-bit or 8-bit arithmetic. A GPU "
                "does.\n");
    print_small();
}

/* ---- the brief report: a table and sentences of at most SCREEN columns ---- */

enum { SCREEN = 100, NAME_COLUMN = 35 };

/* After the demo's few steps, two roundings of one run were up to 1.1 % apart in perplexity. */
#define EARLY_ROUNDING 0.02

static const struct {
    const char *word, *does;
} explained[] = {
    {"fp32", "keeps all: the baseline"},     {"tf32", "keeps all: the baseline"},
    {"bf16", "16-bit, not 32-bit numbers"},  {"fp16", "16-bit, not 32-bit numbers"},
    {"fp8", "products in 8 bits"},           {"flash", "attention tile by tile"},
    {"window", "attention to near tokens"},  {"chunked", "loss piece by piece"},
    {"selective", "recomputes cheap steps"}, {"checkpointing", "recomputes layers"},
    {"segments", "recomputes half layers"},  {"budget", "recomputes what it must"},
    {"compact", "optimizer state in 8 bits"}, {"recursive", "recomputes by halves"},
};

/* What the last word of a technique does, the digits of a window left out; of fp8_flash, what FP8 does. */
static const char *explain(const char *technique)
{
    const char *last = strrchr(technique, '_');
    int i;
    last = last && strncmp(technique, "fp8", 3) ? last + 1 : technique;
    for (i = 0; i < LENGTH(explained); i++)
        if (!strncmp(last, explained[i].word, strlen(explained[i].word))) return explained[i].does;
    return "";
}

/* Prints a sentence, broken into lines that begin with `indent` spaces, but for the first one. */
static void say(int indent, const char *format, ...)
{
    char text[2048], *at = text;
    size_t size, width = SCREEN;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    while (strlen(at) > width) {
        for (size = width; size && at[size] != ' '; size--) {}
        if (!size) size = width - 1; /* a word wider than the screen is cut */
        fprintf(out, "%.*s\n%*s", (int)size, at, indent, "");
        at += size + (at[size] == ' ');
        width = (size_t)(SCREEN - indent);
    }
    fprintf(out, "%s\n", at);
}

/* 1 = the perplexity is the baseline's, but for rounding. */
static int learns_the_same(const run *r)
{
    double theirs = r->base ? r->base->perplexity : 0;
    return theirs > 0 && fabs(r->perplexity / theirs - 1) <= EARLY_ROUNDING;
}

static void print_line(const run *r)
{
    char speed[16] = "-", perplexity[32];
    if (r->rounds && r != r->base && !compare_speed(r, r->base)) snprintf(speed, sizeof(speed), "same");
    else if (r->rounds) snprintf(speed, sizeof(speed), "%.2fx", fmin(r->speed, 99));
    snprintf(perplexity, sizeof(perplexity), "%.1f", fmin(r->perplexity, 1e6));
    if (r != r->base && learns_the_same(r)) snprintf(perplexity, sizeof(perplexity), "same");
    fprintf(out, "%-*.*s  %s%-*s %6.1f %3.0f %% %5.0f %5s %10s\n", NAME_COLUMN, NAME_COLUMN, r->technique,
            strchr(r->technique, '_') ? "+ " : "", strchr(r->technique, '_') ? 25 : 27,
            explain(r->technique), fmin(r->device_bytes / MIB, 999999), fmin(100 * r->memory, 999),
            fmin(r->largest_batch, 99999), speed, perplexity);
}

static void print_small_table(const run *top)
{
    const run *b = top->base;
    fprintf(out, "%-*s  %-27s %6s %5s %5s %5s %10s\n", NAME_COLUMN, "technique", "what it does", "MiB",
            "share", "batch", "speed", "perplexity");
    EACH(r)
        if (is_same(r, top)) print_line(r);
    say(0, "\nMiB         memory of a training step, known before it starts; share: of the baseline's");
    say(12, "batch       the largest that fits %s; here all train at %.0f", budget, top->batch_size);
    if (b->rounds)
        say(12, "speed       times the baseline's, the median of %.0f rounds in which all take turns; same: "
            "it differs by no more than the rounds do, or by less than %.0f %%",
            b->rounds, 100 * LEAST_SPREAD);
    say(12, "perplexity  on text kept out of the training, less is better; same: within %.0f %%, as two "
        "roundings of one run are\n", 100 * EARLY_ROUNDING);
}

static void say_memory(const run *b)
{
    const run *least = best(b, AT(device_bytes), -1);
    if (least == b || least->memory <= 0) return;
    say(2, "- %s trains the same model in %.0f of %.0f MiB. Where the baseline fits a batch of %.0f, it fits "
        "%.0f.", least->technique, least->device_bytes / MIB, b->device_bytes / MIB, b->largest_batch,
        least->largest_batch);
}

static void say_quality(const run *b)
{
    int same = 0, others = 0, ahead = 0;
    EACH(r) {
        if (r == b || !is_same(r, b)) continue;
        others++;
        same += learns_the_same(r);
        ahead += strstr(r->technique, "window") && !learns_the_same(r) && r->perplexity < b->perplexity;
    }
    if (!others) return;
    say(2, "- %d of the %d other techniques learn as well as the baseline, but for rounding.%s", same, others,
        ahead ? " A window is easier to learn, so it is ahead at first. That does not last." : "");
}

static void say_speed(const run *b)
{
    double ms[MOST_ROUNDS], spread, middle;
    int count = 0, k, others = 0, faster = 0, slower = 0, slow_16 = 0, slow_8 = 0;
    for (k = 1; k <= MOST_ROUNDS; k++)
        if (in_round(b, k)) ms[count++] = in_round(b, k)->ms_median;
    EACH(r) {
        if (r == b || !is_same(r, b)) continue;
        others++;
        faster += compare_speed(r, b) > 0;
        slower += compare_speed(r, b) < 0;
        slow_16 += compare_speed(r, b) < 0 && strstr(r->technique, "16") == r->technique + 2;
        slow_8 += compare_speed(r, b) < 0 && !strncmp(r->technique, "fp8", 3);
    }
    if (count < 2 || !others) return;
    middle = median(ms, count, &spread);
    say(2, "- A step of the baseline took %s to %s ms, %.0f %% apart by chance. Beyond that, %d of the "
        "%d others are faster, %d slower.", digits(ms[0]), digits(ms[count - 1]), 100 * spread / middle,
        faster, others, slower);
    if (slow_16 && strcmp(head.device, "cuda"))
        say(2, "- Some 16-bit techniques are slower here: recomputation takes time, and a CPU without "
            "AVX512-BF16 computes 16-bit numbers in 32 bits.");
    if (slow_8 && strcmp(head.device, "cuda"))
        say(2, "- FP8 is slower here: a CPU decodes 8-bit numbers before it multiplies them.");
}

/* A point of the learning curve, as words. */
static void on_point(mtt_json *j, run *r, FILE *to)
{
    run point = {0};
    (void)r;
    read_object(j, &point, NULL, NULL);
    if (j->fault) return;
    if (point.step == 1 && point.loss > 0) fprintf(to, "%.0f at the start", exp(fmin(point.loss, 20)));
    if (point.val_loss > 0) fprintf(to, ", %.0f after %.0f", exp(fmin(point.val_loss, 20)), point.step);
}

static void say_learning(void)
{
    EACH(r) {
        char *text = NULL;
        size_t size = 0;
        FILE *to;
        if (!is_done(r) || strcmp(r->group, "learning")) continue;
        to = open_memstream(&text, &size);
        if (!to) out_of_memory();
        read_file(result_path(results, r->name, RESULT_LOG), NULL, on_point, to, 1);
        if (fclose(to)) out_of_memory();
        say(2, "- %s then learned for %.0f steps. Its perplexity was %s.", r->technique, r->steps, text);
        free(text);
    }
}

/* The first runs that failed: the others often have the same reason. */
static void say_missing(void)
{
    int count = 0;
    EACH(r)
        if (!is_done(r) && r->message[0] && count++ < 3)
            say(2, "%s %s: %s", r->name, r->status, r->message);
    if (count > 3) say(2, "... and %d more, in comparison.md", count - 3);
    if (count) fprintf(out, "\n");
}

static void print_brief(void)
{
    const run *top = largest_of(&groups[0]);
    fprintf(out, "\n");
    if (top && top->base) {
        print_small_table(top);
        say_memory(top->base);
        say_quality(top->base);
        say_speed(top->base);
    } else fprintf(out, "There is no baseline to compare with: see comparison.md.\n");
    say_learning();
    fprintf(out, "\n");
    say_missing();
}

/* Files of the folder are replaced whole. A link is not followed: in a stranger's folder it could name any
   file. */
static FILE *create(const char *name)
{
    return result_create(result_path(results, name, ".tmp"));
}

static int commit(FILE *f, const char *name)
{
    return result_commit(f, result_path(results, name, ".tmp"), path_of(name));
}

/* For the plots: a line for each run, and the timelines of the largest work. Returns 1 if all is written. */
static int write_tables(void)
{
    FILE *table = create("results.csv"), *lines = create("timeline.csv");
    const group *g = groups;
    const struct key *key;
    int i;
    if (table && lines) {
        fprintf(table, "name,group,technique");
        for (key = keys; key < keys + LENGTH(keys); key++)
            if (!key->size) fprintf(table, ",%s", key->name);
        fprintf(lines, "technique,phase");
        for (i = 0; i < MTT_CATEGORY_COUNT; i++) fprintf(lines, ",%s", mtt_category_name((mtt_category)i));
        fprintf(lines, ",layer,recomputed");
        while (strcmp(g->name, suite_letter() == 'e' ? "optimizations" : "batch")) g++;
        EACH(r) {
            if (!is_done(r)) continue;
            r->vocabulary = head.vocabulary, r->original_vocabulary = head.original_vocabulary;
            fprintf(table, "\n%s,%s,%s", r->name, r->group, r->technique);
            for (key = keys; key < keys + LENGTH(keys); key++)
                if (!key->size) fprintf(table, ",%.12g", *number_at(r, key->at));
            if (r->layers && is_in(r, g) && is_same(r, largest_of(g)))
                read_file(result_path(results, r->name, RESULT_MEMORY), r, on_operation, lines, 0);
        }
        fputc('\n', table);
        fputc('\n', lines);
    }
    return commit(table, "results.csv") & commit(lines, "timeline.csv");
}

/* ---- a narrow table, to paste into a report ---- */

static const struct column narrow[] = {
    {"batch", AT(batch_size), 0, 1, ""},         {"length", AT(seq_len), 0, 1, ""},
    {"layers", AT(layers), 0, 1, ""},            {"steps", AT(steps), 0, 1, ""},
    {"peak MiB", AT(device_bytes), 1, MIB, ""},  {"% of baseline", AT(memory), 0, 0.01, ""},
    {"largest batch", AT(largest_batch), 0, 1, ""},
    {"s/step", AT(ms_median), 4, 1000, ""},      {"total s", AT(training_time), 1, 1, ""},
    {"perplexity", AT(perplexity), 2, 1, ""},
};

/* How a format writes a table. %s: its title; %d: how many columns follow the technique's. */
static const struct format {
    const char *file, *begin, *end, *first, *between, *last;
    int escapes; /* 1 = LaTeX's underscores and per cents */
} formats[] = {
    {"table.md", "\n## %s\n\n", "", "| ", " | ", " |\n", 0},
    {"table.csv", "", "", "", ",", "\n", 0},
    {"table.tex", "\\begin{table}\n\\caption{%s}\n\\begin{tabular}{l*{%d}{r}}\n\\hline\n",
     "\\hline\n\\end{tabular}\n\\end{table}\n\n", "", " & ", " \\\\\n", 1},
};

static int is_narrow(int column, const group *g)
{
    return narrow[column].at == AT(device_bytes) || is_shown(&narrow[column], g);
}

static void write_words(FILE *f, const struct format *to, const char *text)
{
    for (; *text; text++) fprintf(f, to->escapes && strchr("_%", *text) ? "\\%c" : "%c", *text);
}

/* A line of a table: a run, or for NULL the columns' titles. CSV has all columns, and the group first. */
static void write_line(FILE *f, const struct format *to, const group *g, const run *r)
{
    const int csv = to == &formats[1];
    int k;
    fputs(to->first, f);
    if (csv) fprintf(f, "%s,", r ? r->group : "group");
    write_words(f, to, r ? r->technique : "technique");
    for (k = 0; k < LENGTH(narrow); k++) {
        const double value = r ? *number_at(r, narrow[k].at) : 1;
        if (!csv && !is_narrow(k, g)) continue;
        fputs(to->between, f);
        if (!r) write_words(f, to, narrow[k].title);
        else if (value > 0) fputs(result_digits(narrow[k].digits, value / narrow[k].unit), f);
        else if (!csv) fputc('-', f);
    }
    fputs(to->last, f);
}

/* Returns 1 if all is written. */
static int write_narrow(const struct format *to)
{
    FILE *f = create(to->file);
    const group *g;
    int k, shown, csv = to == &formats[1];
    if (f && csv) write_line(f, to, NULL, NULL);
    for (g = groups; f && g < groups + LENGTH(groups); g++) {
        if (!largest_of(g)) continue;
        for (k = shown = 0; k < LENGTH(narrow); k++) shown += is_narrow(k, g);
        fprintf(f, to->begin, g->title, shown);
        if (!csv) write_line(f, to, g, NULL);
        if (to == &formats[0]) fprintf(f, "|:--|");
        for (k = 0; to == &formats[0] && k < LENGTH(narrow); k++)
            if (is_narrow(k, g)) fprintf(f, "--:|");
        if (!csv) fprintf(f, to->escapes ? "\\hline\n" : "\n");
        EACH(r)
            if (is_in(r, g)) write_line(f, to, g, r);
        fputs(to->end, f);
    }
    return commit(f, to->file);
}

static int write_file(const char *name, const char *text)
{
    FILE *f = create(name);
    if (f) fputs(text, f);
    return commit(f, name);
}

/* Compares the runs; returns 1 if all files are written. */
static int report(void)
{
    char *text = NULL, *unit;
    size_t size = 0;
    double bytes = strtod(head.budget, &unit);
    int written, k;
    if (head.budget[0])
        snprintf(budget, sizeof(budget), *unit ? "%.0f %.1siB" : bytes < 1e13 ? "%.4g GB" : "%.0f GB",
                 *unit ? bytes : bytes * 1e-9, unit);
    groups[0].sweep = suite_letter() == 'e';
    check_dataset();
    compare();
    out = open_memstream(&text, &size);
    if (!out) out_of_memory();
    print_report();
    if (fclose(out)) out_of_memory();
    out = stdout;
    if (brief) print_brief();
    else fputs(text, out);
    written = write_file("comparison_report.txt", text) & write_file("comparison.md", text);
    written &= write_tables();
    for (k = 0; k < LENGTH(formats); k++) written &= write_narrow(&formats[k]);
    if (!written) fprintf(stderr, "report: cannot write to %s: check the folder and its disk\n", results);
    free(text);
    return written;
}

int main(int argc, char **argv)
{
    int known = 0, whole, written, code = option_parse(options, LENGTH(options), argc, argv);
    if (code) return code == OPTION_HELP ? 0 : code;
    if (!*results || strlen(results) > 700) return option_fail("--results-dir: expected 1 to 700 bytes");
    whole = read_results();
    EACH(r) known += is_done(r) || r->message[0];
    if (damaged) fprintf(stderr, "report: remove damaged files, or train their runs again\n");
    if (whole && !known)
        fprintf(stderr, "report: no complete run%s in %s\n",
                experiments ? " that --experiments names" : "", results);
    written = whole && known && report();
    free(runs);
    free(times);
    return option_close_output(written && !damaged ? 0 : EXIT_DATA);
}
