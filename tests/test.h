/* test.h - what the test programs share: checks that count, the closing line, random numbers, a scratch
   folder, and the data beside the checkout. */
#include <dirent.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef _WIN32
#undef near /* windows.h takes these words */
#undef IN
#undef OUT
#undef far
#endif

static int passed, failed, skipped, case_number = 1;
static int quick; /* 1 = every seventh case: enough to notice most mutants */

/* What follows is another case: the checks before it count again. */
static inline void new_case(void)
{
    case_number++;
}

/* A headline of elements would hide how much is proven, so a check that passes counts once in a case, however
   many elements it goes through. One that fails always counts and says which element. With TEST_STOP set, the
   first failure ends the program. */
#define check(...)                             \
    __extension__({                            \
        static int check_counted;              \
        check_in(&check_counted, __VA_ARGS__); \
    })

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static inline void check_in(int *counted, int ok, const char *format, ...)
{
    va_list args;
    if (ok) {
        passed += *counted != case_number;
        *counted = case_number;
        return;
    }
    failed++;
    fputs("FAILED: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    if (getenv("TEST_STOP")) exit(1);
}

/* Says what this machine cannot test, and why. */
static inline void skip(const char *reason)
{
    printf("skipped: %s\n", reason);
    skipped++;
}

static inline int finish(void)
{
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed || !passed;
}

/* The step of a loop over cases. In quick mode a seventh of them, of every kind: kinds come in twos, threes
   and fives. */
static inline int each(void)
{
    return quick ? 7 : 1;
}

static uint64_t random_state = 1;

static inline uint64_t random_bits(void) /* splitmix64 (Steele et al. 2014) */
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline int below(int bound)
{
    return (int)(random_bits() % (uint64_t)bound);
}

#ifdef MTT_H_INCLUDED
/* What a trainer is made of. */
typedef struct setup {
    mtt_model_desc model;
    mtt_policy policy;
    mtt_optim_desc optim;
    int batch, seq_len;
} setup;

/* How many activations there are, so that one which is new is drawn, too. */
static inline int mlp_forms(void)
{
    const mtt_field *f = mtt_model_fields();
    while (strcmp(f->name, "mlp")) f++;
    return (int)f->high + 1;
}
#endif

/* The folder of this run; close_folder removes it with its files. */
static char folder[200];

static inline int open_folder(void)
{
    const char *at = getenv("TMPDIR");
    snprintf(folder, sizeof(folder), "%s/mtt_test_XXXXXX", at && *at ? at : "/tmp");
#ifdef _WIN32
    int made = _mktemp(folder) && !mkdir(folder);
#else
    int made = mkdtemp(folder) != NULL;
#endif
    check(made, "%s cannot be made", folder);
    return made;
}

/* The path of a file in it; the last eight stay valid. */
static inline const char *in(const char *name)
{
    static char path[8][512];
    static int turn;
    char *at = path[turn++ % 8];
    snprintf(at, sizeof(path[0]), "%s/%s", folder, name);
    return at;
}

/* Files in it whose names begin so. */
static inline int count_files(const char *begin)
{
    int count = 0;
    struct dirent *entry;
    DIR *all = opendir(folder);
    while (all && (entry = readdir(all)))
        count += !strncmp(entry->d_name, begin, strlen(begin)) && strcmp(entry->d_name, ".") &&
                 strcmp(entry->d_name, "..");
    if (all) closedir(all);
    return count;
}

static inline void close_folder(void)
{
    struct dirent *entry;
    DIR *all = opendir(folder);
    while (all && (entry = readdir(all))) unlink(in(entry->d_name));
    if (all) closedir(all);
    check(rmdir(folder) == 0, "%s is not empty", folder);
}

/* All of a file, or of a pipe, and a 0 after it; NULL where it cannot be opened. */
static inline char *read_file(const char *path, size_t *bytes)
{
    FILE *file = strcmp(path, "-") ? fopen(path, "rb") : stdin;
    size_t capacity = 1 << 16, got;
    char *data;
    *bytes = 0;
    if (!file) return NULL;
    data = (char *)malloc(capacity + 1);
    while ((got = fread(data + *bytes, 1, capacity - *bytes, file)) > 0)
        if ((*bytes += got) == capacity) data = (char *)realloc(data, (capacity *= 2) + 1);
    if (file != stdin) fclose(file);
    data[*bytes] = 0;
    return data;
}

static inline void write_file(const char *path, const void *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    check(file && fwrite(data, 1, bytes, file) == bytes && !fclose(file), "%s cannot be written", path);
}

/* The path of a file: in data/, where tools/get_data.sh GET puts it, or in the folder shared/data beside the
   checkout. Where it is absent, NULL, and a skip that names the command; `get` is NULL if there is none. */
static inline const char *shared_data(const char *name, const char *get)
{
    static char path[4][512], reason[1200];
    static int turn;
    char *at = path[turn++ % 4];
    const char *slash = get ? strrchr(get, '/') : NULL, *file = slash ? slash + 1 : get;
    if (get) snprintf(at, sizeof(path[0]), "data/%.*s", (int)strcspn(file, "#"), file);
    if (get && access(at, R_OK) == 0) return at;
    snprintf(at, sizeof(path[0]), "../shared/data/%s", name);
    if (access(at, R_OK) == 0) return at;
    if (get) snprintf(reason, sizeof(reason), "%s is absent: tools/get_data.sh '%s' gets it", name, get);
    else snprintf(reason, sizeof(reason), "%s is absent", at);
    skip(reason);
    return NULL;
}
