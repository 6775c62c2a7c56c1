/* results.h - the files that a run of train leaves in its folder, for the programs that write and read them.
   Include it after mtt.h. */
#ifndef RESULTS_H_INCLUDED
#define RESULTS_H_INCLUDED

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Files of a run: {folder}/{run}{ending}; a run is {dataset}_{technique}. */
#define RESULT_FILES(X)                                                                                      \
    X(METRICS, "_metrics.json")   /* one object with the keys of RESULTS */                                  \
    X(MEMORY, "_memory.json")     /* plan and timeline, by mtt_schedule_json */                              \
    X(LOG, ".jsonl")              /* an object for each step and each evaluation */                          \
    X(CHECKPOINT, ".safetensors") /* by mtt_save */

/* Keys of the metrics: kind, name, and the size of a text or the format of a number. */
#define RESULTS(X)                                                                                           \
    X(WORDS, dataset, 256)                                                                                   \
    X(WORDS, technique, 256)                                                                                 \
    X(NUMBER, parameters, "%.0f")                                                                            \
    X(NUMBER, batch_size, "%.0f")                                                                            \
    X(NUMBER, seq_len, "%.0f")                                                                               \
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
#define RESULT_FILE_ID(id, ending) RESULT_##id,
#define RESULT_FILE_ENDING(id, ending) ending,

typedef enum result_file { RESULT_FILES(RESULT_FILE_ID) RESULT_FILE_COUNT } result_file;
typedef struct result { RESULTS(RESULT_MEMBER) } result;

/* The path of a file, in static storage that the fourth call after this one takes. */
static inline const char *result_path(const char *folder, const char *run, result_file file)
{
    static const char *const endings[] = {RESULT_FILES(RESULT_FILE_ENDING)};
    static char paths[4][1024];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof(paths[0]), "%s/%s%s", folder, run, endings[file]);
    return path;
}

#define RESULT_WORDS_PRINT(name, size) fprintf(f, "%s\"" #name "\": \"%s\"", before, r->name);
#define RESULT_NUMBER_PRINT(name, format) fprintf(f, "%s\"" #name "\": " format, before, r->name);
#define RESULT_PRINT(kind, name, how)                                                                        \
    RESULT_##kind##_PRINT(name, how)                                                                         \
    before = ", ";

/* Writes a result as one line of JSON. Its texts must not have quotes, backslashes or control characters. */
static inline void result_print(FILE *f, const result *r)
{
    const char *before = "{";
    RESULTS(RESULT_PRINT)
    fprintf(f, "}\n");
}

/* Sets the names, and the numbers that a trainer knows. */
static inline void result_fill(result *r, const char *dataset, const char *technique, const mtt_trainer *t)
{
    mtt_plan_report plan;
    mtt_schedule_report(mtt_trainer_schedule(t), &plan);
    snprintf(r->dataset, sizeof(r->dataset), "%s", dataset);
    snprintf(r->technique, sizeof(r->technique), "%s", technique);
    r->steps = (double)mtt_trainer_step(t);
    r->parameters = (double)plan.parameters;
    r->arena_bytes = (double)plan.arena_bytes;
    r->device_bytes = (double)mtt_trainer_device_bytes(t);
    r->peak_bytes = (double)plan.peak_bytes;
    r->peak_forward_bytes = (double)plan.phase_peak_bytes[MTT_FORWARD];
    r->peak_backward_bytes = (double)plan.phase_peak_bytes[MTT_BACKWARD];
}

/* Names the dataset of a file, or gives a chosen name a form that files and JSON can hold. */
static inline void result_name(char *name, size_t size, const char *path, const char *chosen)
{
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    snprintf(name, size, "%s", chosen ? chosen : strcmp(path, "-") ? base : "stdin");
    for (; *name; name++)
        if (strchr("/\"\\", *name) || (*name > 0 && *name < ' ')) *name = '_';
}

/* Makes a folder and those above it. */
static inline void result_make_folder(const char *path)
{
    char part[1024], *at = part;
    snprintf(part, sizeof(part), "%s", path);
    while (*at && (at = strchr(at + 1, '/'))) {
        *at = 0;
        mkdir(part, 0777);
        *at = '/';
    }
    mkdir(path, 0777);
}

/* 1 = a prefix has token files. */
static inline int result_has_tokens(const char *prefix)
{
    char path[1100];
    snprintf(path, sizeof(path), "%s.train.tokens", prefix);
    return access(path, F_OK) == 0;
}

/* Opens the log of a run. A resumed run continues it after the lines up to its step. */
static inline FILE *result_open_log(const char *path, long long step)
{
    char line[512], kept[1100];
    FILE *in = step ? fopen(path, "r") : NULL, *out;
    long long at;
    snprintf(kept, sizeof(kept), "%s.tmp", path);
    out = fopen(kept, "w");
    while (in && out && fgets(line, sizeof(line), in))
        if (sscanf(line, "{\"step\": %lld", &at) == 1 && at <= step) fputs(line, out);
    if (in) fclose(in);
    if (out && !fflush(out) && !rename(kept, path)) return out;
    if (out) fclose(out);
    remove(kept);
    return NULL;
}

static inline void result_log_step(FILE *log, const mtt_step_info *info)
{
    fprintf(log, "{\"step\": %lld, \"loss\": %.6f, \"lr\": %.8g, \"grad_norm\": %.6g, \"ms\": %.3f}\n",
            (long long)info->step, info->loss, (double)info->lr, (double)info->grad_norm, info->ms);
    fflush(log);
}

static inline void result_log_quality(FILE *log, long long step, const mtt_quality *q)
{
    fprintf(log, "{\"step\": %lld, \"val_loss\": %.6f, \"bits_per_byte\": %.5f}\n", step, q->loss,
            q->bits_per_byte);
}

/* Closes a file; 1 = all of it was written. */
static inline int result_close(FILE *f)
{
    int whole = f && !ferror(f);
    return f && fclose(f) == 0 && whole;
}

/* Writes the metrics file; 1 = done. */
static inline int result_save(const char *path, const result *r)
{
    FILE *f = fopen(path, "w");
    if (f) result_print(f, r);
    return result_close(f);
}

static inline void result_write_text(void *file, const char *text, size_t bytes)
{
    fwrite(text, 1, bytes, (FILE *)file);
}

/* Writes the memory file; 1 = done. */
static inline int result_save_memory(const char *path, const mtt_schedule *schedule)
{
    FILE *f = fopen(path, "w");
    if (f) mtt_schedule_json(schedule, result_write_text, f);
    return result_close(f);
}

/* Renames a checkpoint and its log to .old; 1 = there was one. */
static inline int result_keep_old(const char *checkpoint, const char *log)
{
    char old[1100];
    snprintf(old, sizeof(old), "%s.old", checkpoint);
    if (rename(checkpoint, old)) return 0;
    snprintf(old, sizeof(old), "%s.old", log);
    rename(log, old);
    return 1;
}

#endif
