/* test.h - what the test programs share: checks that count, the closing line, random numbers, a scratch
   folder, and the data beside the checkout. */
#include <dirent.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int passed, failed;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static inline void check(int ok, const char *format, ...)
{
    va_list args;
    if (ok) {
        passed++;
        return;
    }
    failed++;
    fputs("FAILED: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

static inline int finish(void)
{
    printf("%d passed, %d failed\n", passed, failed);
    return failed || !passed;
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

/* The folder of this run; close_folder removes it with its files. */
static char folder[] = "/tmp/mtt_test_XXXXXX";

static inline int open_folder(void)
{
    int made = mkdtemp(folder) != NULL;
    check(made, "no place for files in /tmp");
    return made;
}

/* The path of a file in it; the last eight stay valid. */
static inline const char *in(const char *name)
{
    static char path[8][400];
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
   checkout. Where it is absent, NULL, and the command is said; `get` is NULL if there is none. */
static inline const char *shared_data(const char *name, const char *get)
{
    static char path[4][512];
    static int turn;
    char *at = path[turn++ % 4];
    const char *slash = get ? strrchr(get, '/') : NULL, *file = slash ? slash + 1 : get;
    if (get) snprintf(at, sizeof(path[0]), "data/%.*s", (int)strcspn(file, "#"), file);
    if (get && access(at, R_OK) == 0) return at;
    snprintf(at, sizeof(path[0]), "../shared/data/%s", name);
    if (access(at, R_OK) == 0) return at;
    if (get) printf("skipped: %s is absent: get it with tools/get_data.sh '%s'\n", name, get);
    else printf("skipped: %s is absent\n", at);
    return NULL;
}
