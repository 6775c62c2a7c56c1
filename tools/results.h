/* results.h - the files that a run of train leaves in its folder, for the programs that write and read them.
   Include it after mtt.h. */
#ifndef RESULTS_H_INCLUDED
#define RESULTS_H_INCLUDED

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "failure.h"
#include "posix.h"

/* Files of a run: {folder}/{run}{ending}; a run is {dataset}_{technique}. */
#define RESULT_METRICS "_metrics.json"     /* one object with the keys of RESULTS */
#define RESULT_MEMORY "_memory.json"       /* plan and timeline, by mtt_schedule_json */
#define RESULT_LOG ".jsonl"                /* an object for each step and each evaluation */
#define RESULT_TOKENIZER "_tokenizer.json" /* that of the dataset may change with the next run */
#define RESULT_SETTINGS "_settings.json"   /* options that change what the run computes, one on each line */

/* Names of datasets and techniques go to file names, JSON, awk and gnuplot, so they have these letters alone,
   and do not begin with a dot or a dash. */
#define RESULT_LETTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-"
enum { RESULT_FOLDER = 1500, RESULT_NUMBER = 352 }; /* longest folder; size of a number as text */

/* Keys of the metrics: kind, name, and the size of a text or the format of a number. */
#define RESULTS(X)                                                                                           \
    X(WORDS, dataset, 256)                                                                                   \
    X(WORDS, technique, 256)                                                                                 \
    X(NUMBER, parameters, "%.0f")                                                                            \
    X(NUMBER, batch_size, "%.0f")                                                                            \
    X(NUMBER, seq_len, "%.0f")                                                                               \
    X(NUMBER, ranks, "%.0f")                                                                                 \
    X(NUMBER, steps, "%.0f")                                                                                 \
    X(NUMBER, train_loss, "%.6f")                                                                            \
    X(NUMBER, val_loss, "%.6f")                                                                              \
    X(NUMBER, perplexity, "%.4f")                                                                            \
    X(NUMBER, bits_per_byte, "%.5f")                                                                         \
    X(NUMBER, accuracy, "%.5f")                                                                              \
    X(NUMBER, training_time, "%.3f") /* seconds */                                                           \
    X(NUMBER, ms_per_step, "%.3f")                                                                           \
    X(NUMBER, tokens_per_s, "%.1f")                                                                          \
    X(NUMBER, arena_bytes, "%.0f")                                                                           \
    X(NUMBER, device_bytes, "%.0f")                                                                          \
    X(NUMBER, peak_bytes, "%.0f")                                                                            \
    X(NUMBER, peak_forward_bytes, "%.0f")                                                                    \
    X(NUMBER, peak_backward_bytes, "%.0f")

#define RESULT_WORDS_MEMBER(name, size) char name[size];
#define RESULT_NUMBER_MEMBER(name, format) double name;
#define RESULT_MEMBER(kind, name, how) RESULT_##kind##_MEMBER(name, how)

typedef struct result { RESULTS(RESULT_MEMBER) } result;

static inline int result_is_name(const char *name, size_t size)
{
    size_t i;
    for (i = 0; i < size; i++)
        if (!name[i] || !strchr(RESULT_LETTERS, name[i])) return 0;
    return size && *name != '.' && *name != '-';
}

/* The path of a file, in static storage that the fourth call after this one takes. */
static inline const char *result_path(const char *folder, const char *run, const char *ending)
{
    static char paths[4][RESULT_FOLDER + 1024];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof(paths[0]), "%s/%s%s", folder, run, ending);
    return path;
}

/* A number with digits behind the point; a very large one, such as the perplexity of a run that goes wrong,
   with an exponent. In static storage that the fourth call after this one takes. */
static inline const char *result_digits(int digits, double value)
{
    static char texts[4][64];
    static int next;
    char *text = texts[next++ % 4];
    if (fabs(value) < 1e9) snprintf(text, sizeof(texts[0]), "%.*f", digits, value);
    else snprintf(text, sizeof(texts[0]), "%.6g", value);
    return text;
}

/* FNV-1a of a tokenizer's text: equal for those that encode alike. */
static inline void result_hash(void *hash, const char *text, size_t bytes)
{
    uint64_t h = *(uint64_t *)hash;
    for (; bytes; bytes--, text++) h = (h ^ (unsigned char)*text) * 1099511628211u;
    *(uint64_t *)hash = h;
}

static inline uint64_t result_tokenizer_hash(const mtt_tokenizer *t)
{
    uint64_t hash = 14695981039346656037u;
    mtt_tokenizer_print(t, result_hash, &hash);
    return hash;
}

/* A number as JSON has it: null if it is not finite. */
static inline const char *result_number(char text[RESULT_NUMBER], const char *format, double value)
{
    if (fabs(value) >= 1e15) format = "%.9g";
    snprintf(text, RESULT_NUMBER, isfinite(value) ? format : "null", value);
    return text;
}

#define RESULT_WORDS_PRINT(name, size) fprintf(f, "%s\"" #name "\": \"%s\"", before, r->name);
#define RESULT_NUMBER_PRINT(name, format) \
    fprintf(f, "%s\"" #name "\": %s", before, result_number(text, format, r->name));
#define RESULT_PRINT(kind, name, how)                                                                        \
    RESULT_##kind##_PRINT(name, how)                                                                         \
    before = ", ";

/* Writes a result as one line of JSON. */
static inline void result_print(FILE *f, const result *r)
{
    const char *before = "{";
    char text[RESULT_NUMBER];
    RESULTS(RESULT_PRINT)
    fprintf(f, "}\n");
}

/* 1 = a prefix has token files. */
static inline int result_has_tokens(const char *prefix)
{
    char path[4096];
    int size = snprintf(path, sizeof(path), "%s.train.tokens", prefix);
    return size < (int)sizeof(path) && access(path, F_OK) == 0;
}

/* 1 = token files have this prefix, and it is not itself a text beside them. */
static inline int result_is_prefix(const char *path)
{
    struct stat info;
    return (stat(path, &info) || S_ISDIR(info.st_mode)) && result_has_tokens(path);
}

/* The tokenizer of a checkpoint {dataset}_{technique}_best.safetensors, in static storage: beside it that of
   the run, or else {dataset}.tokenizer.json. NULL if there is none. */
static inline const char *result_find_tokenizer(const char *checkpoint)
{
    static char found[RESULT_FOLDER + 1024];
    const char *slash = posix_slash(checkpoint);
    size_t folder = slash ? (size_t)(slash + 1 - checkpoint) : 0, size = strlen(checkpoint);
    for (; size > folder && size < RESULT_FOLDER; size--) {
        if (!strchr("_.", checkpoint[size])) continue;
        snprintf(found, sizeof(found), "%.*s" RESULT_TOKENIZER, (int)size, checkpoint);
        if (!access(found, R_OK)) return found;
        snprintf(found, sizeof(found), "%.*s.tokenizer.json", (int)size, checkpoint);
        if (!access(found, R_OK)) return found;
    }
    return NULL;
}

/* The tokenizer in a model's folder, or else beside the model; NULL if there is none. */
static inline const char *result_tokenizer_of(const mtt_model *model, const char *path)
{
    const char *own = mtt_model_tokenizer(model);
    return own ? own : result_find_tokenizer(path);
}

/* Loads the tokenizer of a model, at a path or NULL, and refuses one that has more ids than the model. */
static inline mtt_status result_load_tokenizer(mtt_env *env, const char *path, const mtt_tokenizer_kind *kind,
                                               const mtt_model *model, mtt_tokenizer **out)
{
    const int vocab = mtt_model_describe(model)->vocab;
    int ids;
    mtt_status status;
    if (!path) return failure(env, MTT_E_FILE, "there is no tokenizer beside the model: pass --tokenizer");
    status = mtt_tokenizer_load(env, path, kind, out);
    if (status || (ids = mtt_tokenizer_vocab(*out)) <= vocab) return status;
    mtt_tokenizer_destroy(*out);
    *out = NULL;
    return failure(env, MTT_E_MISMATCH, "%.200s has %d ids, but the model %d: use the model's tokenizer",
                   path, ids, vocab);
}

/* The kind of a text that was prepared, with its number of documents as `count`. */
static inline const char *result_documents(const mtt_prepare_desc *job, const mtt_prepare_report *made,
                                           const char *count)
{
    static char text[512];
    const char *many = strcmp(count, "1") ? "s" : "", *field = job->field ? job->field : "text";
    int size = made->jsonl
        ? snprintf(text, sizeof(text), "%s JSONL document%s, field %.300s", count, many, field)
        : snprintf(text, sizeof(text), "plain text, %s document%s", count, many);
    if (made->jsonl && made->dropped)
        snprintf(text + size, sizeof(text) - (size_t)size, ", without %s at their ends", made->end_of_text);
    else if (made->separated)
        snprintf(text + size, sizeof(text) - (size_t)size, ", separated by %s%s", made->end_of_text,
                 made->separated == 2 ? " and, as there are few, by blank lines" : "");
    return text;
}

/* A warning about bytes that are not UTF-8; NULL if there are none. Another encoding is proposed only where
   the other characters are not UTF-8, and bytes 0x80 to 0x9F tell which: ISO-8859-2 has no letters there, and
   Windows-1250 none at 0x81, 0x83, 0x88, 0x90 and 0x98. */
static inline const char *result_invalid(const mtt_prepare_desc *job, const mtt_prepare_report *made)
{
    static char text[4096];
    const char *input = strcmp(job->input, "-") ? job->input : "standard input";
    const char *coding = made->controls & 0x0101010au ? "CP852"
        : made->controls ? "WINDOWS-1250" : "ISO-8859-2";
    const char *advice = "if it is in another encoding, convert it, perhaps by iconv -f";
    if (made->wide > made->invalid / 10) {
        advice = "the other characters are UTF-8, so repair the text, or remove these bytes by iconv -c -f";
        coding = "UTF-8";
    }
    snprintf(text, sizeof(text), "warning: %.1800s: %llu byte%s not UTF-8, the first at byte %llu (from 0): "
             "%s %s -t UTF-8 %.1800s > NEW.txt", input, (unsigned long long)made->invalid,
             made->invalid == 1 ? " is" : "s are", (unsigned long long)made->first_invalid, advice, coding,
             job->input);
    return made->invalid ? text : NULL;
}

/* A note about ends of text that are ordinary text; NULL if there are none. */
static inline const char *result_inside(const mtt_prepare_desc *job, const mtt_prepare_report *made)
{
    static char text[4096];
    const char *input = strcmp(job->input, "-") ? job->input : "standard input", *mark = made->inside_text;
    int size = snprintf(text, sizeof(text), "note: %.1800s: %s is ordinary text %llu time%s: ", input, mark,
                        (unsigned long long)made->inside, made->inside == 1 ? "" : "s");
    if (made->jsonl)
        snprintf(text + size, sizeof(text) - (size_t)size, "if it separates documents, give each a line of "
                 "its own");
    else
        snprintf(text + size, sizeof(text) - (size_t)size, "documents end at lines that are only %s: if it "
                 "separates them, convert it, perhaps by sed 's:%s%s:\\n%s\\n:g' %.1800s > NEW.txt",
                 made->end_of_text, *mark == '[' ? "\\" : "", mark, made->end_of_text, job->input);
    return made->inside ? text : NULL;
}

/* Closes a file; 1 = all of it was written. */
static inline int result_close(FILE *f)
{
    int whole = f && !ferror(f);
    return f && fclose(f) == 0 && whole;
}

/* Makes a temporary beside a result; never follows a link that is there. */
static inline FILE *result_create(const char *temporary)
{
    unlink(temporary);
    return fopen(temporary, "wx");
}

/* Closes a temporary, and gives it the result's name if all of it was written; 1 = it was. Otherwise errno
   says why, and an earlier result stays. */
static inline int result_commit(FILE *f, const char *temporary, const char *path)
{
    int error;
    if (result_close(f) && !rename(temporary, path)) return 1;
    error = errno;
    unlink(temporary);
    errno = error;
    return 0;
}

static inline void result_write_text(void *file, const char *text, size_t bytes)
{
    static char character[5]; /* the part of it that has come */
    static int size;
    if (!isatty(fileno((FILE *)file))) {
        fwrite(text, 1, bytes, (FILE *)file);
        return;
    }
    for (; bytes; bytes--, text++) {
        const unsigned char *first = (const unsigned char *)character;
        if (size && (*text & 0xc0) != 0x80) fputc('?', (FILE *)file), size = 0; /* the rest will not come */
        character[size++] = *text;
        character[size] = 0;
        if (size < (*first >= 0xf0 ? 4 : *first >= 0xe0 ? 3 : *first >= 0xc0 ? 2 : 1)) continue;
        if (*first != '\n' && *first != '\t') mtt_make_printable(character);
        fputs(character, (FILE *)file);
        size = 0;
    }
}

/* The write function of a generation: prints its text to a FILE. */
static inline int result_write_token(void *file, int prompt, int32_t id, const char *text, size_t bytes)
{
    (void)prompt, (void)id;
    result_write_text(file, text, bytes);
    fflush((FILE *)file);
    return 0;
}
#endif
