/* options.h - the command line of a program: parser and usage text from one table. For examples and tools.

   Include it after mtt.h. A row of the table is an option of the program's own, a title of the usage text, or all
   fields of one of the library's descriptors:

      static const option options[] = {
          TITLE("usage: program --data FILE [option...]"),
          TEXT("data", &data, "a text file"),
          FIELDS("Model:", mtt_model_fields, &model),
      };

   A field's option is the field's name with - for _, unless option_names has another. A row of the program's own
   replaces a field of the same name. With the fields of a policy, the words of a technique are options as well:
   --bf16, --flash. */
#ifndef OPTIONS_H_INCLUDED
#define OPTIONS_H_INCLUDED

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPTION_TEXT = MTT_FIELD_FLAG + 1, OPTION_WORD, OPTION_TITLE, OPTION_FIELDS }; /* beside kinds of fields */
enum { OPTION_ERROR = 2, OPTION_HELP = -1, OPTION_MOST = 128 };

typedef struct option {
    const char *name;           /* without --; the text of a title */
    int kind;
    void *at;                   /* the value: int, int64_t, size_t, float, const char *; or a descriptor */
    const char *help, *choices; /* choices are separated by | */
    int value;                  /* what a flag sets */
    double low, high, fallback; /* range of a number; the default of a field, which is stored as 0 */
    const mtt_field *(*fields)(void);
} option;

#define OPTION(name, kind, at, value, low, high, help) {name, kind, at, help, NULL, value, low, high, 0, NULL}
#define TITLE(text) OPTION(text, OPTION_TITLE, NULL, 0, 0, 0, "")
#define TEXT(name, at, help) OPTION(name, OPTION_TEXT, at, 0, 0, 0, help)
#define FLAG(name, at, value, help) OPTION(name, MTT_FIELD_FLAG, at, value, 0, 1, help)
#define INT(name, at, low, help) OPTION(name, MTT_FIELD_INT, at, 0, low, INT_MAX, help)
#define REAL(name, at, low, help) OPTION(name, MTT_FIELD_FLOAT, at, 0, low, 1e30, help)
#define FIELDS(title, fields, at) {title, OPTION_FIELDS, at, "", NULL, 0, 0, 0, 0, fields}
#define OPTION_COUNT(table) ((int)(sizeof(table) / sizeof((table)[0])))

static const char *const option_words[] = {"fp32", "tf32", "bf16", "fp16", "flash", "selective", "checkpointing",
                                           "segments", "budget", "chunked", "compact"};

/* Fields whose option has another name. NULL: the program sets the field itself. */
static const struct {
    const char *field, *name, *choices;
} option_names[] = {
    {"vocab", "vocab-size", NULL},           {"tied_head", "head", "untied|tied"},
    {"window", "window-size", NULL},         {"loss_chunk_rows", "chunk-rows", NULL},
    {"budget_bytes", "memory-budget", NULL}, {"total_steps", NULL, NULL},
};

/* The program's table, with fields in the place of FIELDS. */
static struct {
    const char *program;
    option list[OPTION_MOST];
    char names[OPTION_MOST][32];
    int count;
} option_all;

static int option_fail(const char *message)
{
    fprintf(stderr, "%s: %s\n", option_all.program, message);
    return OPTION_ERROR;
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

/* Adds the option of a field, unless the program has one of that name. */
static void option_add_field(const option *table, int count, char *desc, const mtt_field *f)
{
    char *name = option_all.names[option_all.count % OPTION_MOST];
    option o = OPTION(name, (int)f->kind, desc + f->offset, 1, f->low, f->high, f->help);
    int k;
    snprintf(name, sizeof(option_all.names[0]), "%s", f->name);
    for (; (name = strchr(name, '_')); name++) *name = '-';
    o.choices = f->choices;
    o.fallback = f->fallback;
    if (o.kind == MTT_FIELD_BYTES) o.high = 1e18; /* so that it fits 63 bits */
    for (k = 0; k < OPTION_COUNT(option_names); k++)
        if (!strcmp(option_names[k].field, f->name)) {
            o.name = option_names[k].name;
            if (option_names[k].choices) o.kind = MTT_FIELD_CHOICE;
            if (option_names[k].choices) o.choices = option_names[k].choices;
        }
    if (o.name && !option_find(table, count, o.name, strlen(o.name))) option_add(o);
}

static void option_add_fields(const option *table, int count, const option *group)
{
    option title = TITLE(group->name);
    const mtt_field *f;
    int k;
    option_add(title);
    for (f = group->fields(); f->name; f++) option_add_field(table, count, (char *)group->at, f);
    for (k = 0; k < OPTION_COUNT(option_words) && group->fields == mtt_policy_fields; k++) {
        option word = OPTION(option_words[k], OPTION_WORD, group->at, 0, 0, 0, "a word of --technique");
        option_add(word);
    }
}

/* ---- usage ---- */

static double option_value(const option *o)
{
    switch (o->kind) {
    case MTT_FIELD_INT: return *(int *)o->at;
    case MTT_FIELD_INT64: return (double)*(int64_t *)o->at;
    case MTT_FIELD_BYTES: return (double)*(size_t *)o->at;
    case MTT_FIELD_FLOAT: return (double)*(float *)o->at;
    case MTT_FIELD_CHOICE: return *(int *)o->at;
    default: return 0;
    }
}

static void option_usage(void)
{
    static const char *const kinds[] = {" N", " N", " SIZE", " X", " NAME", "", " TEXT", ""};
    const option *o;
    for (o = option_all.list; o < option_all.list + option_all.count; o++) {
        double value = option_value(o);
        const char *text = o->kind == OPTION_TEXT ? *(const char **)o->at : NULL, *choice = o->choices;
        int left = (int)value;
        if (o->kind == OPTION_TITLE) {
            printf("%s%s\n", o == option_all.list ? "" : "\n", o->name);
            continue;
        }
        printf("  --%s%-*s %s", o->name, 26 - (int)strlen(o->name), kinds[o->kind], o->help);
        if (choice) printf(": %s", choice);
        for (; choice && left > 0; left--) choice = strchr(choice, '|') + 1;
        if (choice && value > 0) printf(" (%.*s)", (int)strcspn(choice, "|"), choice);
        if (value == 0) value = o->fallback;
        if (!choice && value > 0) printf(" (%.6g)", value);
        if (text && *text > ' ') printf(" (%s)", text);
        putchar('\n');
    }
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

/* Names the nearest option, or for a value without its option the first one that takes a text. */
static int option_unknown(const char *argument)
{
    const option *o, *end = option_all.list + option_all.count, *near = NULL;
    const char *name = argument + strspn(argument, "-"), *value = name == argument ? argument : "";
    char message[512];
    for (o = option_all.list; o < end; o++) {
        if (*value && o->kind != OPTION_TEXT) continue;
        if (o->kind == OPTION_TITLE || (near && *value)) continue;
        if (!near || option_likeness(o->name, name) > option_likeness(near->name, name)) near = o;
    }
    snprintf(message, sizeof(message), "there is no option %.100s: did you mean --%s%s%.100s? (--help lists all)",
             argument, near ? near->name : "help", near && *value ? " " : "", near ? value : "");
    return option_fail(message);
}

static int option_set_choice(const option *o, const char *value)
{
    const char *at = o->choices;
    size_t size = strlen(value);
    int i;
    for (i = 0; at; i++, at = strchr(at, '|'), at += at != NULL)
        if (strcspn(at, "|") == size && !memcmp(at, value, size)) {
            *(int *)o->at = i;
            return 1;
        }
    return 0;
}

static int option_set_number(const option *o, const char *value)
{
    const char *units = "KMG", *unit = NULL;
    char *end;
    double number = strtod(value, &end);
    if (end != value && *end && o->kind == MTT_FIELD_BYTES) unit = strchr(units, *end);
    if (unit) {
        number = ldexp(number, 10 * (int)(unit - units + 1));
        end++;
    }
    if (end == value || *end) return 0;
    /* The library takes 0 for the default. It takes a negative number for 0 if the default is another. */
    if (o->low == 0 && o->fallback != 0 && number <= 0) number = -1;
    else if (!(number >= o->low && number <= o->high)) return 0;
    if (o->kind != MTT_FIELD_FLOAT && o->kind != MTT_FIELD_BYTES && number != floor(number)) return 0;
    switch (o->kind) {
    case MTT_FIELD_FLOAT: *(float *)o->at = (float)number; break;
    case MTT_FIELD_INT64: *(int64_t *)o->at = (int64_t)number; break;
    case MTT_FIELD_BYTES: *(size_t *)o->at = (size_t)number; break;
    default: *(int *)o->at = (int)number;
    }
    return 1;
}

/* 1 = the option took the value. */
static int option_set(const option *o, const char *value)
{
    if (o->kind == MTT_FIELD_CHOICE) return option_set_choice(o, value);
    if (o->kind != OPTION_TEXT) return option_set_number(o, value);
    *(const char **)o->at = value;
    return 1;
}

static int option_fail_flag(const option *o)
{
    char message[128];
    snprintf(message, sizeof(message), "--%s takes no value: leave out what follows the name", o->name);
    return option_fail(message);
}

static int option_expected(const option *o, const char *value)
{
    const char *number = o->kind == MTT_FIELD_FLOAT ? "a number" : "a whole number";
    char range[64] = "", message[512];
    if (o->low > 0 && o->low < 1e-20) snprintf(range, sizeof(range), "%s above 0", number);
    else if (o->high >= INT_MAX) snprintf(range, sizeof(range), "%s, %g or more", number, o->low);
    else snprintf(range, sizeof(range), "%s from %g to %g", number, o->low, o->high);
    if (o->kind == MTT_FIELD_BYTES) snprintf(range, sizeof(range), "bytes, as in 24G or 512M");
    if (o->kind == OPTION_TEXT) snprintf(range, sizeof(range), "a text");
    snprintf(message, sizeof(message), "--%s %.100s: expected %s (%s)", o->name, value ? value : "",
             o->choices ? o->choices : range, o->help);
    return option_fail(message);
}

/* 0, OPTION_ERROR after a message that says what was expected, or OPTION_HELP after the usage. */
static int option_parse(const option *table, int count, int argc, char **argv)
{
    int i;
    option_all.program = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
    option_all.count = 0;
    for (i = 0; i < count; i++)
        if (table[i].kind == OPTION_FIELDS) option_add_fields(table, count, &table[i]);
        else option_add(table[i]);
    for (i = 1; i < argc; i++) {
        const char *name = argv[i] + strspn(argv[i], "-"), *value = strchr(name, '=');
        const option *o = option_find(option_all.list, option_all.count, name, strcspn(name, "="));
        if (!strcmp(name, "help") || !strcmp(name, "h")) {
            option_usage();
            return OPTION_HELP;
        }
        if (!o || name - argv[i] != 2) return option_unknown(argv[i]);
        if (o->kind == OPTION_WORD || o->kind == MTT_FIELD_FLAG) {
            if (value) return option_fail_flag(o);
            if (o->kind == OPTION_WORD) mtt_policy_parse(NULL, o->name, (mtt_policy *)o->at, NULL);
            else *(int *)o->at = o->value;
            continue;
        }
        if (value) value++;
        else if (i + 1 < argc) value = argv[++i];
        if (!value || !option_set(o, value)) return option_expected(o, value);
    }
    return 0;
}

#endif
