/* options.h - the command line of a program: one table makes its parser and its usage text.

   Include it after mtt.h. A row of the table is an option of the program, a title in the usage text, or all
   fields of one of the library's descriptors:

      static const option options[] = {
          TITLE("usage: program --data FILE [option...]"),
          TEXT("data", &data, "a text file"),
          FIELDS("Model:", mtt_model_fields, &model),
      };

   The option of a field has the field's name with - for _, unless option_names has another. A program's own
   row replaces a field of the same name. The fields of a model bring --preset, a row of option_presets,
   and --model, a row of option_models.
   Those of a policy bring --technique, words joined by _, of which bsN sets the option batch-size. Each word
   alone is an option as well: --bf16, --flash, --window16. Options override a technique, which overrides
   --model, which overrides --preset, in any order. */
#ifndef OPTIONS_H_INCLUDED
#define OPTIONS_H_INCLUDED

#include <ctype.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "posix.h"
#include "processor.h"
#include "quota.h"
#ifdef _OPENMP
#include <omp.h>
#endif

enum { OPTION_TEXT = MTT_FIELD_TEXT, OPTION_TITLE, OPTION_FIELDS }; /* besides mtt_field_kind */
enum { OPTION_HELP = -1, OPTION_MOST = 128 };

/* Exit codes. A run that a signal stops gently ends with 130, as a shell reports Ctrl-C. */
enum { EXIT_USAGE = 2, EXIT_DATA, EXIT_MEMORY, EXIT_DIVERGED, EXIT_DEVICE, EXIT_RANK };
enum { EXIT_INTERRUPTED = 130 };

typedef struct option {
    const char *name;           /* without --; the text of a title */
    int kind;
    void *at;                   /* the value: int, int64_t, size_t, float, const char *; or a descriptor */
    const char *help, *choices; /* choices are separated by | */
    int value;                  /* what a flag sets */
    double low, high, fallback; /* range of a number; the library's default, which is stored as 0 */
    const mtt_field *(*fields)(void);
} option;

#define OPTION(name, kind, at, value, low, high, help) {name, kind, at, help, NULL, value, low, high, 0, NULL}
#define TITLE(text) OPTION(text, OPTION_TITLE, NULL, 0, 0, 0, "")
#define TEXT(name, at, help) OPTION(name, OPTION_TEXT, at, 0, 0, 0, help)
#define FLAG(name, at, value, help) OPTION(name, MTT_FIELD_FLAG, at, value, 0, 1, help)
#define INT(name, at, low, help) OPTION(name, MTT_FIELD_INT, at, 0, low, INT_MAX, help)
#define REAL(name, at, low, help) OPTION(name, MTT_FIELD_FLOAT, at, 0, low, 1e30, help)
#define CHOICE(name, at, choices, help) {name, MTT_FIELD_CHOICE, at, help, choices, 0, 0, 0, 0, NULL}
#define FIELDS(title, fields, at) {title, OPTION_FIELDS, at, "", NULL, 0, 0, 0, 0, fields}
#define LENGTH(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* Fields whose option has another name. NULL: no option, the program sets the field. */
static const struct {
    const char *field, *name, *choices;
} option_names[] = {
    {"vocab", "vocab-size", NULL},           {"tied_head", "head", "untied|tied"},
    {"window", "window-size", NULL},         {"loss_chunk_rows", "chunk-rows", NULL},
    {"budget_bytes", "memory-budget", NULL}, {"total_steps", NULL, NULL},
    {"keep_gradients", NULL, NULL},
};

/* Names that options have in other programs. */
static const struct {
    const char *name, *theirs; /* with a blank on both sides of each */
} option_aliases[] = {
    {"lr", " learning-rate max-lr peak-lr base-lr "},
    {"min-lr", " min-learning-rate lr-min "},
    {"lr-schedule", " learning-rate-schedule lr-scheduler lr-scheduler-type lr-decay-style scheduler "},
    {"warmup-steps", " warmup warmup-iters num-warmup-steps lr-warmup-steps "},
    {"weight-decay", " wd "},
    {"clip", " grad-clip clip-grad max-grad-norm gradient-clipping grad-norm-clip "},
    {"beta1", " adam-beta1 "},
    {"beta2", " adam-beta2 "},
    {"eps", " adam-epsilon adam-eps epsilon "},
    {"epochs", " epoch num-epochs n-epochs num-train-epochs "},
    {"steps", " max-steps num-steps n-steps iters max-iters train-iters iterations num-iterations "},
    {"batch-size", " bs batch micro-batch-size device-batch-size per-device-train-batch-size "},
    {"accumulate", " grad-accum grad-accum-steps gradient-accumulation gradient-accumulation-steps "},
    {"seq-len", " block-size seq-length sequence-length max-length max-seq-length context-length n-ctx "},
    {"context", " context-length ctx-size ctx-len n-ctx max-length "},
    {"layers", " n-layer n-layers num-layers num-hidden-layers depth "},
    {"heads", " n-head n-heads num-heads num-attention-heads "},
    {"heads-kv", " n-kv-heads num-kv-heads num-key-value-heads "},
    {"d-model", " n-embd dim hidden-size hidden-dim embed-dim embedding-dim width "},
    {"d-head", " head-dim head-size "},
    {"d-ff", " intermediate-size ffn-hidden-size ffn-dim n-inner "},
    {"rotary-theta", " rope-theta rope-base "},
    {"window-size", " sliding-window attention-window window "},
    {"precision", " dtype amp mixed-precision "},
    {"recompute", " kept8 kept-inputs "},
    {"fp8-products", " forward8 "},
    {"sample", " max-new-tokens max-tokens num-tokens "},
    {"count", " max-new-tokens max-tokens num-tokens n-predict length "},
    {"temperature", " temp "},
    {"repetition-penalty", " repeat-penalty "},
    {"results-dir", " output-dir out-dir output save-dir "},
    {"data", " input train-file train-data dataset-path text corpus file "},
    {"init", " model-name-or-path pretrained init-from checkpoint load "},
    {"save-every", " save-steps save-interval checkpoint-every "},
    {"keep", " save-total-limit "},
    {"eval-every", " eval-steps eval-interval "},
    {"eval-batches", " eval-iters "},
    {"resume", " resume-from-checkpoint continue "},
    {"lora-rank", " lora-r "},
    {"lora-targets", " target-modules lora-target-modules "},
    {"ranks", " world-size num-processes nproc-per-node gpus "},
};

/* Values of options. A program skips options that it does not have. tiny and small suit a CPU, and other
   programs can have them: those have no bias in the head. a to d are the models of
   examples/assignment/suites.sh. */
typedef struct option_recipe {
    const char *name, *options;
} option_recipe;

static const option_recipe option_presets[] = {
    {"tiny", "layers=2 heads=2 d-model=64 no-head-bias seq-len=64 batch-size=16 vocab-size=512 steps=400 "
             "lr=3e-3 lr-schedule=cosine warmup-steps=20 sample=200"},
    {"small", "layers=4 heads=4 d-model=128 no-head-bias seq-len=64 batch-size=16 vocab-size=1024 steps=600 "
              "lr=3e-3 lr-schedule=cosine warmup-steps=20 sample=200"},
    {"a", "layers=4 heads=8 d-model=256 d-ff=1024 seq-len=256 batch-size=32 lr=1e-3 warmup-steps=50"},
    {"b", "layers=6 heads=8 d-model=512 d-ff=2048 seq-len=512 batch-size=32 lr=1e-4 warmup-steps=100"},
    {"c", "layers=4 heads=8 d-model=256 d-ff=1024 seq-len=256 batch-size=64 positions=learned max-seq=512 "
          "dropout=0.1 lr=3e-4 warmup-steps=200 clip=1"},
    {"d", "layers=12 heads=12 d-model=768 d-ff=3072 seq-len=1024 batch-size=4 dropout=0.1 lr=1e-4 "
          "warmup-steps=100 weight-decay=-1 clip=1"},
    {"gpt2", "layers=12 heads=12 d-model=768 seq-len=1024 batch-size=4 vocab-size=50257 positions=learned "
             "head=tied no-head-bias lr=6e-4 warmup-steps=100"},
    {"gpt2-medium", "layers=24 heads=16 d-model=1024 seq-len=1024 batch-size=4 vocab-size=50257 "
                    "positions=learned head=tied no-head-bias lr=3e-4 warmup-steps=100"},
    {NULL, NULL},
};

/* Published networks, with their numbers of parameters. Those of 1,024 and 2,048 tokens bring this length;
   others reach 131,072, which nobody means. llama-tiny and cs336-... are those of Stanford's course CS336, of
   its first and second assignment. */
#define OPTION_GPT2 "seq-len=1024 vocab-size=50257 positions=learned head=tied no-head-bias "
#define OPTION_LLAMA "norm=rms mlp=swiglu positions=rotary no-biases "
#define OPTION_CS336 OPTION_LLAMA "rotary-interleaved vocab-size=10000 "
static const option_recipe option_models[] = {
    {"gpt2", OPTION_GPT2 "layers=12 heads=12 d-model=768"},          /* 124,439,808 */
    {"gpt2-medium", OPTION_GPT2 "layers=24 heads=16 d-model=1024"},  /* 354,823,168 */
    {"gpt2-large", OPTION_GPT2 "layers=36 heads=20 d-model=1280"},   /* 774,030,080 */
    {"gpt2-xl", OPTION_GPT2 "layers=48 heads=25 d-model=1600"},      /* 1,557,611,200 */
    {"llama-tiny", OPTION_LLAMA "layers=4 heads=16 d-model=512 d-ff=1344 vocab-size=10000 "
                   "rotary-interleaved"},                            /* 22,696,448 */
    {"cs336-small", OPTION_CS336 "layers=12 heads=12 d-model=768 d-ff=3072"},   /* 128,625,408 */
    {"cs336-medium", OPTION_CS336 "layers=24 heads=16 d-model=1024 d-ff=4096"}, /* 423,183,360 */
    {"cs336-large", OPTION_CS336 "layers=36 heads=20 d-model=1280 d-ff=5120"},  /* 969,411,840 */
    {"cs336-xl", OPTION_CS336 "layers=32 heads=32 d-model=2560 d-ff=10240"},    /* 3,406,809,600 */
    {"cs336-10b", OPTION_CS336 "layers=50 heads=36 d-model=4608 d-ff=12288"},   /* 12,832,823,808 */
    {"smollm-135m", OPTION_LLAMA "layers=30 heads=9 heads-kv=3 d-model=576 d-ff=1536 vocab-size=49152 "
                    "head=tied max-seq=2048 seq-len=2048"},          /* 134,515,008 */
    {"llama3.2-1b", OPTION_LLAMA "layers=16 heads=32 heads-kv=8 d-model=2048 d-ff=8192 vocab-size=128256 "
                    "head=tied rotary-theta=500000 rotary-factor=32"}, /* 1,235,814,400 */
    {"qwen3-0.6b", OPTION_LLAMA "layers=28 heads=16 heads-kv=8 d-head=128 d-model=1024 d-ff=3072 "
                   "vocab-size=151936 head=tied rotary-theta=1000000 norm-eps=1e-6 qk-norm"},
                                                                     /* 596,049,920 */
    {NULL, NULL},
};

/* The program's table, with the fields of descriptors in it. */
static struct {
    const char *program, *technique, *preset, *model;
    const char *fallback; /* preset on a CPU where the command line names no size of the model; or NULL */
    mtt_policy *policy;   /* changed by words of a technique; NULL if there is none */
    option list[OPTION_MOST];
    char names[OPTION_MOST][32], given[OPTION_MOST];
    int count;
    int threads; /* those of OpenMP, where a container's quota is below them; else 0 */
} option_all;

/* The exit code of a program that ends with this status. */
static inline int option_exit_code(mtt_status status)
{
    static const int codes[MTT_STATUS_COUNT] = {
        [MTT_E_ARGUMENT] = EXIT_USAGE, [MTT_E_MEMORY] = EXIT_MEMORY, [MTT_E_BUDGET] = EXIT_MEMORY,
        [MTT_E_NUMBERS] = EXIT_DIVERGED, [MTT_E_DEVICE] = EXIT_DEVICE, [MTT_E_RANK] = EXIT_RANK,
        [MTT_E_STOPPED] = EXIT_RANK};
    return !status || codes[status] ? codes[status] : EXIT_DATA;
}

/* Says why a program fails, if it does. Returns its exit code. */
static inline int option_tell(const mtt_env *env, mtt_status status)
{
    const char *reason = env->error[0] ? env->error : mtt_status_string(status);
    if (status) fprintf(stderr, "%s: %s\n", option_all.program, reason);
    return option_exit_code(status);
}

/* The exit code of a program at its end: `code`, or EXIT_DATA after a message if that is 0, but standard
   output did not take everything, as on a full disk. */
static int option_close_output(int code)
{
    if (code || (!fflush(stdout) && !ferror(stdout))) return code;
    fprintf(stderr, "%s: cannot write all of standard output: check where it goes\n", option_all.program);
    return EXIT_DATA;
}

/* Prints a message, in which what was given cannot command a terminal; returns the exit code of a wrong
   command line. */
static int option_fail(const char *message)
{
    char text[1400];
    snprintf(text, sizeof(text), "%s", message);
    mtt_make_printable(text);
    fprintf(stderr, "%s: %s\n", option_all.program, text);
    return EXIT_USAGE;
}

/* ---- the table ---- */

static const option *option_find(const option *table, int count, const char *name, size_t size)
{
    const option *o;
    for (o = table; o < table + count; o++)
        if (o->kind < OPTION_TITLE && strlen(o->name) == size && !memcmp(o->name, name, size)) return o;
    return NULL;
}

static void option_add(option o)
{
    if (option_all.count < OPTION_MOST) option_all.list[option_all.count++] = o;
}

static void option_add_field(const option *table, int count, char *desc, const mtt_field *f)
{
    char *name = option_all.names[option_all.count % OPTION_MOST];
    option o = OPTION(name, (int)f->kind, desc + f->offset, 1, f->low, f->high, f->help);
    int k;
    snprintf(name, sizeof(option_all.names[0]), "%s", f->name);
    for (; (name = strchr(name, '_')); name++) *name = '-';
    o.choices = f->choices;
    o.fallback = f->fallback;
    if (o.kind == MTT_FIELD_BYTES) o.high = 1e18; /* fits 63 bits */
    for (k = 0; k < LENGTH(option_names); k++) {
        if (strcmp(option_names[k].field, f->name)) continue;
        o.name = option_names[k].name;
        if (!option_names[k].choices) continue;
        o.kind = MTT_FIELD_CHOICE;
        o.choices = option_names[k].choices;
    }
    if (o.name && !option_find(table, count, o.name, strlen(o.name))) option_add(o);
}

static void option_add_words(mtt_policy *policy)
{
    const option words[] = {
        TEXT("technique", &option_all.technique, "words joined by _, as in bf16_flash_window16_chunked"),
        FLAG("flash-attn", &policy->attention, MTT_ATTENTION_FLASH, "as --flash"),
        FLAG("gradient-checkpointing", &policy->recompute, MTT_RECOMPUTE_LAYER, "as --checkpointing"),
    };
    int k;
    for (k = 0; k < LENGTH(words); k++) option_add(words[k]);
    option_all.policy = policy;
}

static void option_add_fields(const option *table, int count, const option *group)
{
    option title = TITLE(group->name);
    option preset = TEXT("preset", &option_all.preset, "a set of options, which other options override:");
    option model = TEXT("model", &option_all.model, "a published network, which other options change:");
    const mtt_field *f;
    option_add(title);
    for (f = group->fields(); f->name; f++) option_add_field(table, count, (char *)group->at, f);
    if (group->fields == mtt_policy_fields) option_add_words((mtt_policy *)group->at);
    if (group->fields == mtt_model_fields) option_add(model), option_add(preset);
}

/* 1 = the command line has the option. */
static inline int option_given(const char *name)
{
    const option *o = option_find(option_all.list, option_all.count, name, strlen(name));
    return o && option_all.given[o - option_all.list];
}

/* The option that gave a field of `model` another value than `fixed` has; NULL if there is none. */
static inline const char *option_contradicted(const mtt_model_desc *model, const mtt_model_desc *fixed)
{
    const mtt_field *f;
    const option *o;
    for (f = mtt_model_fields(); f->name; f++)
        for (o = option_all.list; o < option_all.list + option_all.count; o++)
            if (o->at == (const char *)model + f->offset && option_all.given[o - option_all.list] &&
                memcmp(o->at, (const char *)fixed + f->offset, sizeof(int)))
                return o->name;
    return NULL;
}

/* ---- values ---- */

/* Choices are enums, which an int * must not reach: clang drops such a store at -O2. */
static int option_get_int(const option *o)
{
    int value;
    memcpy(&value, o->at, sizeof(value));
    return value;
}

static void option_set_int(const option *o, int value)
{
    memcpy(o->at, &value, sizeof(value));
}

/* ---- threads ---- */

/* OpenMP starts as many threads as a container's quota allows, unless its user chose a number. Returns 0, or
   EXIT_USAGE after a message where that is above what a machine has. */
static int option_limit_threads(void)
{
#ifdef _OPENMP
    char message[256];
    const char *chosen = getenv("OMP_NUM_THREADS");
    double cpus = ceil(quota_cpus());
    /* The text alone is asked: OpenMP must not begin before ranks are forked. */
    if (chosen && strtol(chosen, NULL, 10) > 4096) {
        snprintf(message, sizeof(message), "OMP_NUM_THREADS is %.40s, but 4096 threads are the most: set it "
                 "to the number of cores", chosen);
        return option_fail(message);
    }
    if ((chosen && *chosen) || cpus >= omp_get_max_threads()) return 0;
    option_all.threads = cpus < 1 ? 1 : (int)cpus;
    omp_set_num_threads(option_all.threads);
#endif
    return 0;
}

/* Says so. */
static inline void option_note_threads(void)
{
    if (option_all.threads)
        fprintf(stderr, "note: %d thread%s, as the quota of this container allows; OMP_NUM_THREADS overrides "
                "it\n", option_all.threads, option_all.threads > 1 ? "s" : "");
}

/* ---- usage ---- */

static double option_value(const option *o)
{
    switch (o->kind) {
    case MTT_FIELD_INT:
    case MTT_FIELD_CHOICE: return option_get_int(o);
    case MTT_FIELD_INT64: return (double)*(int64_t *)o->at;
    case MTT_FIELD_BYTES: return (double)*(size_t *)o->at;
    case MTT_FIELD_FLOAT: return (double)*(float *)o->at;
    default: return 0;
    }
}

/* The value of an option in words, with the default of one that is not given. */
static inline const char *option_words(const option *o, char words[64])
{
    const char *at = o->choices;
    double value = option_value(o);
    int left = (int)value;
    for (; at && left > 0; left--) at = strchr(at, '|') + 1;
    if (value == 0) value = o->fallback;
    if (at) snprintf(words, 64, "%.*s", (int)strcspn(at, "|"), at);
    else snprintf(words, 64, "%.*g", o->kind == MTT_FIELD_FLOAT ? 7 : 17, value < 0 ? 0 : value);
    return words;
}

/* An option, its help, and in brackets its default: the program's, else the library's. */
static void option_print(const option *o)
{
    static const char *const kinds[] = {" N", " N", " SIZE", " X", " NAME", "", " TEXT"};
    const char *text = o->kind == OPTION_TEXT ? *(const char **)o->at : NULL, *choice = o->choices;
    double value = option_value(o);
    const option_recipe *r = o->at == &option_all.preset ? option_presets : option_models;
    int left = choice ? (int)value : 0;
    printf("  --%s%-*s %s", o->name, 25 - (int)strlen(o->name), kinds[o->kind], o->help);
    if (choice) printf(": %s", choice);
    for (; choice && left > 0; left--) choice = strchr(choice, '|') + 1;
    if (choice && value > 0) printf(" (%.*s)", (int)strcspn(choice, "|"), choice);
    if (value == 0) value = o->fallback;
    if (!choice && value > 0) printf(" (%.6g)", value);
    if (text && *text > ' ') printf(" (%s)", text);
    putchar('\n');
    for (; (o->at == &option_all.preset || o->at == &option_all.model) && r->name; r++)
        printf("    %-12s %s\n", r->name, r->options);
}

static int option_usage(void)
{
    int i;
    for (i = 0; i < option_all.count; i++)
        if (option_all.list[i].kind != OPTION_TITLE) option_print(&option_all.list[i]);
        else printf("%s%s\n", i ? "\n" : "", option_all.list[i].name);
    return option_close_output(0) ? EXIT_DATA : OPTION_HELP;
}

/* ---- parser ---- */

/* How many letters two names share from the front and from the back. */
static size_t option_likeness(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b), front = 0, back = 0;
    while (front < n && front < m && a[front] == b[front]) front++;
    while (back < n - front && back < m - front && a[n - 1 - back] == b[m - 1 - back]) back++;
    return front + back;
}

/* The option that a wrong name may mean: the one that other programs call so, or the one that shares most
   letters with it, if that are at least half. NULL: there is none. */
static const option *option_near(const char *wrong)
{
    const option *o, *near = NULL, *end = option_all.list + option_all.count;
    char name[64] = " ";
    size_t size = 1, best, k;
    for (; *wrong && *wrong != '=' && size < sizeof(name) - 2; wrong++)
        name[size++] = *wrong == '_' ? '-' : (char)tolower((unsigned char)*wrong);
    name[size] = ' ';
    for (k = 0; k < LENGTH(option_aliases) && !near; k++)
        if (strstr(option_aliases[k].theirs, name))
            near = option_find(option_all.list, option_all.count, option_aliases[k].name,
                               strlen(option_aliases[k].name));
    if (near) return near;
    name[size] = 0;
    best = size / 2;
    for (o = option_all.list; o < end; o++)
        if (o->kind != OPTION_TITLE && option_likeness(o->name, name + 1) >= best + (near != NULL)) {
            best = option_likeness(o->name, name + 1);
            near = o;
        }
    return near;
}

/* Names the nearest option. For a value without an option it names the first one that takes a text. */
static int option_unknown(const char *argument)
{
    const option *near = NULL, *o;
    const char *name = argument + strspn(argument, "-");
    int bare = name == argument;
    char message[512];
    for (o = option_all.list; o < option_all.list + option_all.count && bare && !near; o++)
        if (o->kind == OPTION_TEXT) near = o;
    if (!bare) near = option_near(name);
    if (near)
        snprintf(message, sizeof(message),
                 "there is no option %.100s: did you mean --%s%s%.100s? (--help lists all)", argument,
                 near->name, bare ? " " : "", bare ? argument : "");
    else snprintf(message, sizeof(message), "there is no option %.100s (--help lists all)", argument);
    return option_fail(message);
}

/* The row of `r`, a preset or model; NULL after a message if there is none. */
static const option_recipe *option_row(const char *what, const option_recipe *r, const char *name)
{
    char message[512];
    size_t used = (size_t)snprintf(message, sizeof(message), "--%s %.100s: expected ", what, name);
    for (; r->name && strcmp(r->name, name); r++)
        used += (size_t)snprintf(message + used, sizeof(message) - used, "%s|", r->name);
    message[used - 1] = 0;
    if (r->name) return r;
    option_fail(message);
    return NULL;
}

/* Checks a name among the texts, also one that a later one replaces. Returns 0, or EXIT_USAGE after a
   message. */
static int option_check_name(const option *o, const char *name)
{
    static mtt_env env;
    mtt_policy policy;
    int batch = 1, sized;
    if (o->at == &option_all.preset) return option_row("preset", option_presets, name) ? 0 : EXIT_USAGE;
    if (o->at == &option_all.model) return option_row("model", option_models, name) ? 0 : EXIT_USAGE;
    if (o->at != &option_all.technique) return 0;
    policy = *option_all.policy;
    sized = option_find(option_all.list, option_all.count, "batch-size", 10) != NULL;
    return mtt_policy_parse(&env, name, &policy, sized ? &batch : NULL) ? option_fail(env.error) : 0;
}

/* Sets an option. Returns 0, or EXIT_USAGE after a message. */
static int option_set(const option *o, const char *value)
{
    mtt_env env = {0};
    char message[sizeof(env.error) + 200];
    mtt_field field;
    memset(&field, 0, sizeof(field));
    field.name = o->name;
    field.kind = (mtt_field_kind)o->kind; /* OPTION_TEXT is MTT_FIELD_TEXT */
    field.low = o->low, field.high = o->high, field.fallback = o->fallback;
    field.choices = o->choices, field.help = o->help;
    if (o->kind != MTT_FIELD_FLAG && !mtt_field_set(&env, &field, o->at, value))
        return o->kind == OPTION_TEXT ? option_check_name(o, value) : 0;
    snprintf(message, sizeof(message), "--%s %.100s: %s", o->name, value ? value : "", env.error);
    if (o->kind == MTT_FIELD_FLAG)
        snprintf(message, sizeof(message), "--%s takes no value: leave out what follows the name", o->name);
    return option_fail(message);
}

/* 1 = the name is a word of a technique, which then changes the policy. */
static int option_word(const char *name)
{
    return option_all.policy && !mtt_policy_parse(NULL, name, option_all.policy, NULL);
}

/* 1 = a list of patterns, of the policy, that has another value already. */
static int option_is_second(const option *o, const char *value)
{
    const char *const fields = (const char *)option_all.policy, *at = (const char *)o->at;
    return o->kind == OPTION_TEXT && fields && value && at >= fields &&
           at < fields + sizeof(*option_all.policy) && strcmp(*(const char **)o->at, value);
}

static int option_read(int argc, char **argv)
{
    char message[200];
    char seen[OPTION_MOST] = {0};
    int i;
    for (i = 1; i < argc; i++) {
        const char *name = argv[i] + strspn(argv[i], "-"), *value = strchr(name, '=');
        const option *o = option_find(option_all.list, option_all.count, name, strcspn(name, "="));
        if (!strcmp(name, "help") || !strcmp(name, "h")) return option_usage();
        if (name - argv[i] != 2) return option_unknown(argv[i]);
        if (!o && option_word(name)) continue;
        if (!o) return option_unknown(argv[i]);
        if (o->kind == MTT_FIELD_FLAG && value) return option_set(o, value);
        option_all.given[o - option_all.list] = 1;
        if (o->kind == MTT_FIELD_FLAG) option_set_int(o, o->value);
        else if (value) value++;
        else if (i + 1 < argc) value = argv[++i];
        if (seen[o - option_all.list] && option_is_second(o, value)) {
            snprintf(message, sizeof(message), "--%s is given twice: join its patterns by commas", o->name);
            return option_fail(message);
        }
        seen[o - option_all.list] = 1;
        if (o->kind != MTT_FIELD_FLAG && option_set(o, value)) return EXIT_USAGE;
    }
    return 0;
}

/* Sets the options of a row of `r`, a preset or model. Returns 0, or EXIT_USAGE after a message. */
static int option_use(const char *what, const option_recipe *r, const char *name)
{
    char message[512];
    const char *at, *value;
    size_t size;
    if (!(r = option_row(what, r, name))) return EXIT_USAGE;
    for (at = r->options; *at; at += strspn(at, " ")) {
        const option *o = option_find(option_all.list, option_all.count, at, strcspn(at, "= "));
        size = strcspn(at, " ");
        snprintf(message, sizeof(message), "%.*s", (int)size, at);
        value = strchr(message, '=');
        if (o && o->kind == MTT_FIELD_FLAG) option_set_int(o, o->value);
        else if (o && option_set(o, value + 1)) return EXIT_USAGE;
        at += size;
    }
    return 0;
}

/* Sets the words of the technique. Each of them alone must then change nothing: where it would, a later word
   contradicts it, as in bf16_fp16. Returns 0, or EXIT_USAGE after a message. */
static int option_use_technique(int *batch)
{
    static mtt_env env;
    const char *at = option_all.technique;
    char word[64], message[512];
    if (mtt_policy_parse(&env, at, option_all.policy, batch)) return option_fail(env.error);
    for (; *at; at += strcspn(at, "_"), at += *at == '_') {
        mtt_policy policy = *option_all.policy;
        int size = batch ? *batch : 0, same = size;
        snprintf(word, sizeof(word), "%.*s", (int)strcspn(at, "_"), at);
        mtt_policy_parse(NULL, word, &policy, batch ? &size : NULL);
        if (!memcmp(&policy, option_all.policy, sizeof(policy)) && size == same) continue;
        snprintf(message, sizeof(message), "--technique %.200s: a later word contradicts \"%s\": leave out "
                 "one of them", option_all.technique, word);
        return option_fail(message);
    }
    return 0;
}

/* Refuses options that would change nothing without others. */
static int option_check_policy(const mtt_policy *policy)
{
    if (policy->split && policy->recompute != MTT_RECOMPUTE_BUDGET)
        return option_fail("--split needs --recompute budget");
    if (!policy->lora_rank && (policy->lora_targets || policy->lora_alpha > 0))
        return option_fail("--lora-targets and --lora-alpha need a rank, for example --lora-rank 16");
    return 0;
}

/* A note about a window that has no effect, or NULL. */
static inline const char *option_window_note(const mtt_policy *policy, int seq_len)
{
    static char text[128];
    if (policy->window && policy->window >= seq_len)
        snprintf(text, sizeof(text), "note: --window-size %d changes nothing: --seq-len is %d",
                 policy->window, seq_len);
    else if (policy->window && policy->attention != MTT_ATTENTION_FLASH)
        return "note: --window-size saves no memory without --flash: plain attention keeps T x T";
    return *text ? text : NULL;
}

/* 0, EXIT_USAGE after a message that says what was expected, or OPTION_HELP after the usage, which is
   EXIT_DATA if it cannot be written. */
static int option_parse(const option *table, int count, int argc, char **argv)
{
    const option *batch = option_find(table, count, "batch-size", 10);
    int i, code;
    mtt_wait_passively(argv);
    posix_begin(argc, argv);
    option_all.program = posix_slash(argv[0]) ? posix_slash(argv[0]) + 1 : argv[0];
    if (option_limit_threads()) return EXIT_USAGE;
    for (i = 0; i < count; i++)
        if (table[i].kind == OPTION_FIELDS) option_add_fields(table, count, &table[i]);
        else option_add(table[i]);
    code = option_read(argc, argv);
    if (!option_all.preset && option_all.fallback && option_all.policy->device == MTT_DEVICE_CPU &&
        !option_all.model && !option_given("init") && !option_given("layers") && !option_given("heads") &&
        !option_given("d-model"))
        option_all.preset = option_all.fallback;
    if (!code && option_all.preset) code = option_use("preset", option_presets, option_all.preset);
    if (!code && option_all.model) code = option_use("model", option_models, option_all.model);
    if (!code && option_all.technique) code = option_use_technique(batch ? (int *)batch->at : NULL);
    if (!code) code = option_read(argc, argv); /* again: options override both */
    return code || !option_all.policy ? code : option_check_policy(option_all.policy);
}

/* The technique as it was given, or as the policy's words. */
static inline const char *option_technique(void)
{
    static char words[256];
    mtt_policy_name(option_all.policy, words, sizeof(words));
    return option_all.technique ? option_all.technique : words;
}

#endif
