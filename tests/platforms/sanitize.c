/* sanitize.c - lets one allocation or fopen of a program fail, for tests/sanitize.sh. The program is linked
   with this file, and with -Wl,--wrap=NAME for each function below.

   FAIL_AT     the number of the call that fails, from 1; without it none fails
   FAIL_MARK   a file that is then made */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* 1 = this call fails. */
static int fails(void)
{
    static long calls;
    const char *at = getenv("FAIL_AT"), *mark = getenv("FAIL_MARK");
    if (!at || !mark || ++calls != atol(at)) return 0;
    close(open(mark, O_WRONLY | O_CREAT, 0644));
    errno = ENOMEM;
    return 1;
}

#define WRAP(type, name, parameters, arguments)                        \
    type __real_##name parameters;                                     \
    type __wrap_##name parameters;                                     \
    type __wrap_##name parameters                                      \
    {                                                                  \
        return fails() ? NULL : __real_##name arguments;               \
    }
WRAP(void *, malloc, (size_t bytes), (bytes))
WRAP(void *, calloc, (size_t count, size_t bytes), (count, bytes))
WRAP(void *, realloc, (void *block, size_t bytes), (block, bytes))
WRAP(FILE *, fopen, (const char *path, const char *mode), (path, mode))
WRAP(FILE *, open_memstream, (char **text, size_t *size), (text, size))
