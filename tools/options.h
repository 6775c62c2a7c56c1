/* options.h - one table makes a program's command-line parser and its usage text. For the example and the tools. */
#ifndef OPTIONS_H_INCLUDED
#define OPTIONS_H_INCLUDED

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* An option --name VALUE or --name=VALUE. FLAG takes no value and sets `value` in an int; INT, TEXT (const char *), REAL
   (float) and SIZE (double, with K, M or G for powers of 1024) set what `at` points to, CHOICE an int or enum to the place
   of the value in `choices`, which are separated by |. */
typedef struct {
    const char *name;
    enum { FLAG, INT, REAL, SIZE, TEXT, CHOICE } kind;
    void *at;
    const char *help, *choices;
    int value;
} option;

enum { OPTION_ERROR = 2, OPTION_HELP = -1 };

static int option_fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    return OPTION_ERROR;
}

static void option_usage(const option *table, int count)
{
    const option *o;
    for (o = table; o < table + count; o++)
        printf("  --%-23s %s%s%s\n", o->name, o->help, o->choices ? ": " : "", o->choices ? o->choices : "");
}

/* How many letters two names share from the front and from the back. */
static size_t option_likeness(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b), front = 0, back = 0;
    while (front < n && front < m && a[front] == b[front]) front++;
    while (back < n - front && back < m - front && a[n - 1 - back] == b[m - 1 - back]) back++;
    return front + back;
}

/* 1 if the option is a flag and `word` one of the words of its name, which are joined by -. */
static inline int option_is_flag(const option *o, const char *word)
{
    const char *at = strstr(o->name, word);
    return o->kind == FLAG && at && (at == o->name || at[-1] == '-') && strchr("-", at[strlen(word)]);
}

static int option_set(const option *o, const char *value)
{
    char *end = NULL;
    double number = strtod(value, &end);
    const char *at = o->choices, *units = "KMG", *unit;
    int i;
    if (o->kind == TEXT) return *(const char **)o->at = value, 1;
    for (i = 0; at && *at; i++, at += strcspn(at, "|"), at += *at == '|')
        if (strlen(value) == strcspn(at, "|") && !strncmp(at, value, strlen(value))) return *(int *)o->at = i, 1;
    if (o->kind == CHOICE || end == value) return 0;
    if (o->kind == SIZE && *end && (unit = strchr(units, *end))) number = ldexp(number, 10 * (int)(unit - units + 1)), end++;
    if (*end || (o->kind == INT && (number < 0 || number > INT_MAX || number != floor(number)))) return 0;
    if (o->kind == SIZE && !(number >= 0 && number <= 1e18)) return 0;
    if (o->kind == REAL) *(float *)o->at = (float)number;
    else if (o->kind == SIZE) *(double *)o->at = number;
    else *(int *)o->at = (int)number;
    return 1;
}

/* 0, OPTION_ERROR after a message that names the nearest option or the values expected, or OPTION_HELP after the usage. */
static int option_parse(const option *table, int count, int argc, char **argv)
{
    static const char *const expected[] = {[FLAG] = "", [INT] = "a whole number, 0 or more: ", [REAL] = "a number: ",
                                           [SIZE] = "bytes, as in 24G or 512M: ", [TEXT] = "", [CHOICE] = ""};
    char text[512];
    int i, k;
    for (i = 1; i < argc; i++) {
        const char *name = argv[i] + strspn(argv[i], "-"), *value = strchr(name, '=');
        int size = value ? (int)(value - name) : (int)strlen(name);
        const option *near = table, *o = NULL;
        if (!strcmp(name, "help") || !strcmp(name, "h")) return option_usage(table, count), OPTION_HELP;
        for (k = 0; k < count; k++) {
            if ((int)strlen(table[k].name) == size && !strncmp(table[k].name, name, (size_t)size)) o = &table[k];
            if (option_likeness(table[k].name, name) > option_likeness(near->name, name)) near = &table[k];
        }
        snprintf(text, sizeof(text), "there is no option %s: did you mean --%s? (--help lists all)", argv[i], near->name);
        if (!o || name - argv[i] != 2) return option_fail(text);
        snprintf(text, sizeof(text), "--%s takes no value, but is there or not", o->name);
        if (o->kind == FLAG && value) return option_fail(text);
        if (o->kind == FLAG) *(int *)o->at = o->value;
        else if (value) value++;
        else if (i + 1 < argc) value = argv[++i];
        snprintf(text, sizeof(text), "--%s %s: expected %s%s", o->name, value ? value : "", expected[o->kind],
                 o->choices ? o->choices : o->help);
        if (o->kind != FLAG && (!value || !option_set(o, value))) return option_fail(text);
    }
    return 0;
}

#endif
