/* libc.h - what the planner asks of a C library, where there is none: in a page of a browser.

   Headers are those of a Linux of 64 bits. Calls that the planner never reaches are not here, and the linker
   leaves out what would make them. Streams are texts in memory: stdout, stderr, or any other FILE. Numbers
   are printed by stb_sprintf, which mtt.h has in the same file. Include it after mtt.h. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- memory: blocks of powers of two, each with its power before it; freed ones wait in lists ---- */

extern char __heap_base[];
static char *heap_free;
static void *heap_lists[48];

void *malloc(size_t bytes)
{
    int power = 5;
    char *block;
    while (((size_t)1 << power) < bytes + 16) power++;
    block = (char *)heap_lists[power];
    if (block) memcpy(&heap_lists[power], block + 16, sizeof(void *));
    else {
        size_t end, size = (size_t)1 << power;
        if (!heap_free) heap_free = (char *)(((uintptr_t)__heap_base + 15) & ~(uintptr_t)15);
        block = heap_free;
        end = (size_t)(block + size);
        if (end > __builtin_wasm_memory_size(0) << 16 &&
            __builtin_wasm_memory_grow(0, (end + 65535 - (__builtin_wasm_memory_size(0) << 16)) >> 16) ==
                (size_t)-1)
            return NULL;
        heap_free = block + size;
    }
    *(int *)(void *)block = power;
    return block + 16;
}

void free(void *at)
{
    char *block = (char *)at - 16;
    if (!at) return;
    memcpy(at, &heap_lists[*(int *)(void *)block], sizeof(void *));
    heap_lists[*(int *)(void *)block] = block;
}

/* ---- text ---- */

typedef struct stream {
    char *text; /* ends with 0; NULL: nothing was written */
    size_t bytes, capacity;
    int failed;
} stream;
static stream stream_out, stream_errors;
FILE *const stdout = (FILE *)(void *)&stream_out, *const stderr = (FILE *)(void *)&stream_errors;

static void stream_put(void *file, const char *text, size_t bytes)
{
    stream *f = (stream *)file;
    if (f->bytes + bytes + 1 > f->capacity) {
        size_t capacity = 2 * (f->bytes + bytes) + 4096;
        char *more = (char *)malloc(capacity);
        if (!more) {
            f->failed = 1;
            return;
        }
        if (f->bytes) memcpy(more, f->text, f->bytes);
        free(f->text);
        f->text = more;
        f->capacity = capacity;
    }
    memcpy(f->text + f->bytes, text, bytes);
    f->text[f->bytes += bytes] = 0;
}

static void stream_empty(stream *f)
{
    free(f->text);
    memset(f, 0, sizeof(*f));
}

static char *stream_piece(const char *text, void *file, int bytes)
{
    stream_put(file, text, (size_t)bytes);
    return (char *)(uintptr_t)text;
}

static int stream_print(FILE *f, const char *format, va_list list)
{
    char piece[STB_SPRINTF_MIN];
    return stbsp_vsprintfcb(stream_piece, f, piece, format, list);
}

int fprintf(FILE *f, const char *format, ...)
{
    va_list list;
    int count;
    va_start(list, format);
    count = stream_print(f, format, list);
    va_end(list);
    return count;
}

int printf(const char *format, ...)
{
    va_list list;
    int count;
    va_start(list, format);
    count = stream_print(stdout, format, list);
    va_end(list);
    return count;
}

int snprintf(char *out, size_t capacity, const char *format, ...)
{
    va_list list;
    int count;
    va_start(list, format);
    count = stbsp_vsnprintf(out, (int)capacity, format, list);
    va_end(list);
    return count;
}

int fputc(int c, FILE *f)
{
    char one = (char)c;
    stream_put(f, &one, 1);
    return c;
}

int putchar(int c) { return fputc(c, stdout); }
int fputs(const char *text, FILE *f) { return stream_put(f, text, strlen(text)), 0; }
int ferror(FILE *f) { return ((stream *)(void *)f)->failed; }
int fflush(FILE *f) { return (void)f, 0; }

int clock_gettime(clockid_t clock, struct timespec *now)
{
    (void)clock;
    memset(now, 0, sizeof(*now));
    return 0;
}

/* Each is an instruction of the machine, by -mbulk-memory. */
void *memset(void *to, int value, size_t n) { return __builtin_memset(to, value, n); }
void *memcpy(void *restrict to, const void *restrict from, size_t n) { return __builtin_memcpy(to, from, n); }

int memcmp(const void *a, const void *b, size_t n)
{
    const unsigned char *p = (const unsigned char *)a, *q = (const unsigned char *)b;
    for (; n; n--, p++, q++)
        if (*p != *q) return *p - *q;
    return 0;
}

size_t strlen(const char *s)
{
    const char *at = s;
    while (*at) at++;
    return (size_t)(at - s);
}

char *strchr(const char *s, int c)
{
    for (; *s != (char)c; s++)
        if (!*s) return NULL;
    return (char *)(uintptr_t)s;
}

int strncmp(const char *a, const char *b, size_t n)
{
    for (; n && *a && *a == *b; n--) a++, b++;
    return n ? (unsigned char)*a - (unsigned char)*b : 0;
}

int strcmp(const char *a, const char *b) { return strncmp(a, b, SIZE_MAX); }

size_t strspn(const char *s, const char *set)
{
    size_t n = 0;
    while (s[n] && strchr(set, s[n])) n++;
    return n;
}

size_t strcspn(const char *s, const char *set)
{
    size_t n = 0;
    while (s[n] && !strchr(set, s[n])) n++;
    return n;
}

char *strstr(const char *s, const char *part)
{
    for (; *s && strncmp(s, part, strlen(part)); s++) {}
    return *s || !*part ? (char *)(uintptr_t)s : NULL;
}

int tolower(int c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; }

/* ---- numbers ---- */

double fabs(double x) { return __builtin_fabs(x); }
double floor(double x) { return __builtin_floor(x); }
double ceil(double x) { return __builtin_ceil(x); }

double ldexp(double x, int power)
{
    for (; power > 0; power--) x *= 2;
    for (; power < 0; power++) x /= 2;
    return x;
}

/* Decimal numbers; exact for up to 15 digits and powers of 10 up to 22, as doubles hold them. */
double strtod(const char *text, char **end)
{
    const char *at = text + strspn(text, " ");
    int negative = *at == '-', power = 0, digits = 0, point = 0, shift = 0, sign = 1;
    double value = 0, tens = 1;
    at += *at == '-' || *at == '+';
    for (; (*at >= '0' && *at <= '9') || (*at == '.' && !point); at++) {
        if (*at == '.') point = 1;
        else value = 10 * value + (*at - '0'), power -= point, digits++;
    }
    if (digits && (*at == 'e' || *at == 'E')) {
        const char *number = at + 1 + (at[1] == '-' || at[1] == '+');
        if (at[1] == '-') sign = -1;
        if (*number >= '0' && *number <= '9') {
            for (at = number; *at >= '0' && *at <= '9'; at++)
                if (shift < 400) shift = 10 * shift + *at - '0';
            power += sign * shift;
        }
    }
    for (shift = power < 0 ? -power : power; shift > 0; shift--) tens *= 10;
    value = power < 0 ? value / tens : value * tens;
    if (end) *end = (char *)(uintptr_t)(digits ? at : text);
    return negative ? -value : value;
}

/* The product of two numbers of 128 bits, which the compiler calls for. */
__int128 __multi3(__int128 a, __int128 b)
{
    const uint64_t low = (uint64_t)a, other = (uint64_t)b, half = 0xffffffff;
    const uint64_t ll = (low & half) * (other & half), lh = (low & half) * (other >> 32);
    const uint64_t hl = (low >> 32) * (other & half), middle = (ll >> 32) + (lh & half) + (hl & half);
    const uint64_t high = (low >> 32) * (other >> 32) + (lh >> 32) + (hl >> 32) + (middle >> 32);
    const uint64_t rest = (uint64_t)(a >> 64) * other + low * (uint64_t)(b >> 64);
    return (__int128)((unsigned __int128)(high + rest) << 64 | (middle << 32 | (ll & half)));
}
