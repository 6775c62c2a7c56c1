/* test.h - what every test program shares: checks that count, the closing line, and the data beside the checkout. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int passed, failed;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3), unused))
#endif
static void check(int ok, const char *format, ...)
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

#if defined(__GNUC__)
__attribute__((unused))
#endif
static int finish(void)
{
    printf("%d passed, %d failed\n", passed, failed);
    return failed || !passed;
}

/* The path of a file in the folder shared/data beside the checkout; NULL, said once per name, where it is absent. */
#if defined(__GNUC__)
__attribute__((unused))
#endif
static const char *shared_data(const char *name)
{
    static char path[4][512];
    static int turn;
    char *at = path[turn++ % 4];
    snprintf(at, sizeof(path[0]), "../shared/data/%s", name);
    if (access(at, R_OK) == 0) return at;
    printf("skipped: %s is absent\n", at);
    return NULL;
}
