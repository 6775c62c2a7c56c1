/* test_files.c - JSON, files, corpora, token files, batches and safetensors: what must hold, every refusal,
   every fault of the disk and of memory, and a death at every change of a file. usage: test_files |
   test_files dump FILE.safetensors | test_files write FILE.safetensors | test_files corpus FILE FIELD */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include "../test.h"

enum { ON_OPEN, ON_READ, ON_PREAD, ON_PWRITE, ON_FSYNC, ON_CLOSE, ON_RENAME, ON_COUNT };
static const char *const on_name[] = {"open", "read", "pread", "pwrite", "fsync", "close", "rename"};
static int fault_on = -1, fault_at, fault_errno, fault_calls, one_byte;

static int fault(int kind)
{
    if (kind != fault_on || ++fault_calls != fault_at) return 0;
    errno = fault_errno;
    return 1;
}
/* The process kills itself at change number die_at of a file: before the call, or after half of it. */
static int die_at, die_half, changes;
static int dies_here(void)
{
    if (++changes != die_at) return 0;
    if (!die_half) raise(SIGKILL);
    return 1;
}
/* A text that changes before it is opened for the second time. */
static const char *changing;
static int changing_opens;
static int sys_open(const char *path, int flags, int mode)
{
    if (changing && strcmp(path, changing) == 0 && ++changing_opens == 2)
        write_file(path, "{\"text\":\"new\"}\n", 15);
    if (flags & O_CREAT && dies_here()) open(path, flags, mode), raise(SIGKILL);
    return fault(ON_OPEN) ? -1 : open(path, flags, mode);
}
static size_t some(size_t n) /* of a large piece half, of a small one a byte */
{
    return !one_byte || !n ? n : n > 2000 ? n / 2 : 1;
}
static ssize_t sys_read(int fd, void *data, size_t n)
{
    return fault(ON_READ) ? -1 : read(fd, data, some(n));
}
static ssize_t sys_pread(int fd, void *data, size_t n, off_t at)
{
    return fault(ON_PREAD) ? -1 : pread(fd, data, some(n), at);
}
static ssize_t sys_pwrite(int fd, const void *data, size_t n, off_t at)
{
    if (dies_here() && pwrite(fd, data, n / 2, at) >= 0) raise(SIGKILL);
    return fault(ON_PWRITE) ? -1 : pwrite(fd, data, some(n), at);
}
static int sys_fsync(int fd)
{
    if (dies_here() && !fsync(fd)) raise(SIGKILL);
    return fault(ON_FSYNC) ? -1 : fsync(fd);
}
static int sys_close(int fd) /* the descriptor is gone in any case, as on Linux */
{
    int failed = fault(ON_CLOSE), error = errno, result = close(fd);
    errno = failed ? error : errno;
    return failed ? -1 : result;
}
static int sys_rename(const char *from, const char *to)
{
    if (dies_here() && !rename(from, to)) raise(SIGKILL);
    return fault(ON_RENAME) ? -1 : rename(from, to);
}
static int sys_unlink(const char *path)
{
    if (dies_here() && !unlink(path)) raise(SIGKILL);
    return unlink(path);
}

#define MTT__SYS_OPEN sys_open
#define MTT__SYS_READ sys_read
#define MTT__SYS_PREAD sys_pread
#define MTT__SYS_PWRITE sys_pwrite
#define MTT__SYS_FSYNC sys_fsync
#define MTT__SYS_CLOSE sys_close
#define MTT__SYS_RENAME sys_rename
#define unlink sys_unlink
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include "../../tools/wordpiece.h"
#define END_OF_TEXT ((mtt_slice){"<|endoftext|>", 13})
#undef unlink

static mtt_env env;

/* ---- helpers: files, a counting allocator ---- */

static mtt_status get_file(const char *path, char **data, size_t *bytes)
{
    mtt__map map;
    mtt_status status = mtt__map_open(&env, path, &map);
    *bytes = map.bytes;
    *data = status ? NULL : (char *)malloc(map.bytes + 1);
    if (map.bytes) memcpy(*data, map.data, map.bytes);
    mtt__map_close(&map);
    return status;
}

static mtt_status replace_file(const char *path, const void *data, size_t bytes)
{
    mtt_writer w;
    mtt_status status = mtt__writer_open(&env, path, &w);
    if (!status) status = mtt_writer_put(&w, data, bytes);
    return status ? status : mtt_writer_commit(&w);
}

static int file_is(const char *path, const void *data, size_t bytes)
{
    char *got;
    size_t size;
    int same =
        get_file(path, &got, &size) == MTT_OK && size == bytes && (!bytes || memcmp(got, data, bytes) == 0);
    free(got);
    return same;
}

static void refused(mtt_status got, mtt_status want, const char *word, const char *what)
{
    check(got == want && strstr(env.error, word), "%s: status %d, not %d; \"%s\" misses \"%s\"", what, got,
          want, env.error, word);
}

static long alloc_calls, alloc_at, alloc_live;
static void *count_alloc(void *user, size_t bytes)
{
    void *block = ++alloc_calls == alloc_at ? NULL : malloc(bytes);
    (void)user;
    alloc_live += block != NULL;
    return block;
}
static void count_free(void *user, void *block)
{
    (void)user;
    alloc_live--;
    free(block);
}

/* Lets the k-th allocation of an action fail, for every k until it succeeds. */
static void every_allocation(mtt_status (*action)(mtt_env *), const char *what)
{
    mtt_env e;
    mtt_status status = MTT_E_MEMORY;
    long k;
    memset(&e, 0, sizeof(e));
    e.alloc = count_alloc;
    e.free = count_free;
    for (k = 1; status && k < 100000; k++) {
        alloc_calls = alloc_live = 0;
        alloc_at = k;
        status = action(&e);
        check(status == MTT_OK || status == MTT_E_MEMORY, "%s, allocation %ld fails: status %d, %s", what, k,
              status, e.error);
        check(alloc_live == 0, "%s, allocation %ld fails: %ld blocks are left", what, k, alloc_live);
        check(count_files(".") == 0, "%s, allocation %ld fails: a temporary is left", what, k);
    }
    check(status == MTT_OK && k > 2, "%s never succeeds", what);
    printf("%s: clean refusal when any of %ld allocations fails\n", what, k - 2);
}

/* ---- JSON ---- */

static int json_good(const char *text, size_t bytes)
{
    mtt_json j;
    mtt_json_init(&j, text, bytes);
    return mtt_json_skip(&j) && mtt_json_end(&j);
}

static void test_json(void)
{
    static const struct {
        const char *text;
        int ok;
        uint64_t value;
    } numbers[] = {
        {"0", 1, 0}, {"1", 1, 1}, {"2147483647", 1, 2147483647}, {"2147483648", 1, 2147483648u},
        {"4294967296", 1, 4294967296u}, {"9007199254740993", 1, 9007199254740993u},
        {"9223372036854775807", 1, INT64_MAX}, {"9223372036854775808", 1, 9223372036854775808u},
        {"18446744073709551615", 1, UINT64_MAX}, {"18446744073709551616", 0, 0},
        {"99999999999999999999999", 0, 0},
        {"-1", 0, 0}, {"1e3", 0, 0}, {"1.0", 0, 0}, {"01", 0, 0}, {"00", 0, 0}, {"+1", 0, 0}, {"", 0, 0},
        {"x", 0, 0},
        {"-0", 0, 0}
    };
    static const char *const good[] = {
        "0", "-0", "1e5", "-1.5E+10", "\"\"", "[]", "{}", " [1 , 2]\r\n", "{\"a\":{\"b\":[null,true,false]}}",
        "\"\\u0000\\ud800\"", "1E-2", "[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]"
    };
    static const char *const bad[] = {"",
                                      " ",
                                      "{",
                                      "}",
                                      "[",
                                      "]",
                                      "{]",
                                      "[}",
                                      "[1,]",
                                      "{\"a\":1,}",
                                      "[,1]",
                                      "{,}",
                                      "[1 2]",
                                      "{\"a\" 1}",
                                      "{\"a\":}",
                                      "{a:1}",
                                      "{1:1}",
                                      "nul",
                                      "nulL",
                                      "True",
                                      "tru",
                                      "falsee",
                                      "nulll",
                                      "1 2",
                                      "[] []",
                                      "'a'",
                                      "\"",
                                      "\"a",
                                      "\"\\\"",
                                      "\"\\x\"",
                                      "\"\\u12\"",
                                      "\"\\u12g4\"",
                                      "\"\\u\"",
                                      "\"\n\"",
                                      "\"\t\"",
                                      "\"\x1f\"",
                                      "01",
                                      "-",
                                      "-01",
                                      "+1",
                                      ".5",
                                      "1.",
                                      "1.e1",
                                      "1e",
                                      "1e+",
                                      "0x10",
                                      "1_000",
                                      "NaN",
                                      "Infinity",
                                      "-Infinity",
                                      "{\"a\":1 \"b\":2}",
                                      "{\"a\":1,,\"b\":2}",
                                      "[1,,2]",
                                      "//",
                                      "[1]//",
                                      "/**/1",
                                      "[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]",
                                      "{\"a\"}",
                                      "{\"a\":1:2}",
                                      "[\"a\":1]",
                                      "\\u0031",
                                      "[\"\\",
                                      "\"\\u",
                                      "{\"\\u\":1}",
                                      "\xef\xbb\xbf[]",
                                      "[1]]",
                                      "{}}",
                                      "--1",
                                      "1-",
                                      "1e1.5",
                                      "[1}",
                                      "{\"a\":[1}]",
                                      "[true false]",
                                      "\"a\"\"b\""};
    static const char whole[] = "{\"name\": [\"\\ud83d\\ude00 \\\"x\\\\\", -1.25e-7, {\"deep\": [true, "
                                "false, null, "
                                "{}], \"e\": []}], \"shape\": "
                                "[18446744073709551615, 0], \"__metadata__\": {\"format\": \"pt\", \"text\": "
                                "\"za\xc5\xbc\xc3\xb3\xc5\x82\xc4\x87\"}, "
                                "\"data_offsets\": [0, 4294967296], \"unknown\": 3.5}";
    char text[64], out[64];
    mtt_slice slice;
    mtt_json j;
    size_t i, malformed = 0;
    for (i = 0; i < MTT__LENGTH(numbers); i++) {
        uint64_t value = 0;
        mtt_json_init(&j, numbers[i].text, strlen(numbers[i].text));
        check(mtt_json_u64(&j, &value) == numbers[i].ok && (!numbers[i].ok || value == numbers[i].value),
              "number %s", numbers[i].text);
    }
    for (i = 0; i < MTT__LENGTH(good); i++)
        check(json_good(good[i], strlen(good[i])), "well formed, refused: %s", good[i]);
    for (i = 0; i < MTT__LENGTH(bad); i++, malformed++)
        check(!json_good(bad[i], strlen(bad[i])), "malformed, passed: %s", bad[i]);
    check(json_good(whole, sizeof(whole) - 1), "the long text is refused");
    for (i = 0; i + 1 < sizeof(whole); i++, malformed++) check(!json_good(whole, i), "cut at %zu, passed", i);
    check(!json_good("1\0", 2) && !json_good("\0", 1) && !json_good("\"\\\0\"", 4), "a NUL byte passes");
    check(malformed >= 300, "only %zu malformed texts", malformed);
    strcpy(text, "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u017c\\u20AC\\uD83D\\uDE00\"");
    mtt_json_init(&j, text, strlen(text));
    check(mtt_json_string(&j, &slice), "a string with every escape is refused");
    i = mtt_json_unescape(slice, out);
    check(i == 18 && memcmp(out, "\"\\/\b\f\n\r\tA\xc5\xbc\xe2\x82\xac\xf0\x9f\x98\x80", 18) == 0,
          "escapes: %.*s", (int)i, out);
    strcpy(text, "\"\\ud800x\\udc00\\ud800\\ud83d\\ude00\\ud800\\u0041\\udbff\"");
    mtt_json_init(&j, text, strlen(text));
    check(mtt_json_string(&j, &slice), "a string of lone surrogates is refused");
    i = mtt_json_unescape(slice, (char *)slice.at);
    check(i == 21 && memcmp(slice.at,
                            "\xef\xbf\xbdx\xef\xbf\xbd\xef\xbf\xbd\xf0\x9f\x98\x80\xef\xbf\xbd"
                            "A\xef\xbf\xbd",
                            21) == 0,
          "lone surrogates");
}

static void test_json_values(void)
{
    static const struct {
        const char *text;
        double value;
    } numbers[] = {{"0", 0}, {"-0.5", -0.5}, {"12.25", 12.25}, {"1e3", 1000}, {"-2.5E-3", -0.0025},
                   {"5.123456", 5.123456}, {"1.00000000000000000000", 1}, {"123456789012", 123456789012.0},
                   {"0e999", 0}, {"1e-999", 0}, {"6.02e+23", 6.02e23}, {" 7", 7}};
    static const char *const wrong[] = {"", "-", "x", "01", "1.", "1e", "\"1\"", "inf", "NaN"};
    static const char text[] = "{\"a\": {}, \"b\": [], \"c\": [[], {}, [1]], \"d\": {\"e\": 5}, \"f\": 6}";
    mtt_slice slice = {text, 3};
    mtt_json j;
    double value, d = 0, f = 0;
    uint64_t whole = 9;
    size_t i;
    int keys = 0, items = 0;
    for (i = 0; i < MTT__LENGTH(numbers); i++) {
        mtt_json_init(&j, numbers[i].text, strlen(numbers[i].text));
        check(mtt_json_number(&j, &value) && mtt_json_end(&j) &&
                  fabs(value - numbers[i].value) <= 1e-15 * fabs(numbers[i].value),
              "number %s: %g", numbers[i].text, value);
    }
    for (i = 0; i < MTT__LENGTH(wrong); i++) {
        value = 9;
        mtt_json_init(&j, wrong[i], strlen(wrong[i]));
        check(!(mtt_json_number(&j, &value) && mtt_json_end(&j)) && (value == 0 || j.at > j.begin),
              "no number, read: %s", wrong[i]);
    }
    mtt_json_init(&j, "nothing", 7);
    check(!mtt_json_u64(&j, &whole) && !whole && !mtt_json_string(&j, &slice) && !slice.size,
          "values after a fault");
    mtt_json_init(&j, text, sizeof(text) - 1);
    for (mtt_json_begin(&j, '{'); mtt_json_key(&j, &slice); keys++) {
        if (mtt_slice_is(slice, "f")) mtt_json_number(&j, &f);
        else if (mtt_slice_is(slice, "d"))
            for (mtt_json_begin(&j, '{'); mtt_json_key(&j, &slice);) mtt_json_number(&j, &d);
        else if (mtt_json_peek(&j) == '[')
            for (mtt_json_begin(&j, '['); mtt_json_item(&j); items++) mtt_json_skip(&j);
        else mtt_json_skip(&j);
    }
    check(mtt_json_end(&j) && keys == 5 && items == 3 && d == 5 && f == 6, "%d keys, %d items", keys, items);
    for (i = 0; i + 1 < sizeof(text); i++) { /* an element behind an empty one needs its comma */
        char cut[sizeof(text)];
        if (text[i] != ',') continue;
        memcpy(cut, text, sizeof(text));
        cut[i] = ' ';
        check(!json_good(cut, sizeof(text) - 1), "no comma at %zu", i);
    }
    mtt_json_init(&j, "1\0", 2);
    check(mtt_json_skip(&j) && !mtt_json_end(&j) && j.fault, "a NUL byte after a value");
}

/* ---- files ---- */

static void test_files_plain(void)
{
    mtt__crc_table table;
    mtt__map map;
    mtt_writer w;
    char *data;
    size_t bytes, i;
    uint32_t crc;
    unsigned char bulk[300];
    mtt__crc_init(&table);
    check(mtt__crc32(&table, 0, "123456789", 9) == 0xcbf43926u, "crc of 123456789");
    for (i = 0; i < sizeof(bulk); i++) bulk[i] = (unsigned char)below(256);
    crc = mtt__crc32(&table, 0, bulk, sizeof(bulk));
    for (i = 0; i <= sizeof(bulk); i++)
        check(mtt__crc32(&table, mtt__crc32(&table, 0, bulk, i), bulk + i, sizeof(bulk) - i) == crc,
              "crc in two parts at %zu", i);
    refused(get_file(in("missing"), &data, &bytes), MTT_E_FILE, "No such file", "missing file");
    refused(get_file(folder, &data, &bytes), MTT_E_FILE, "folder", "folder read");
    check(mkfifo(in("pipe"), 0600) == 0, "no pipe");
    refused(get_file(in("pipe"), &data, &bytes), MTT_E_FILE, "pipe", "pipe read");
    refused(mtt__writer_open(&env, in("pipe"), &w), MTT_E_FILE, "regular file", "pipe replaced");
    refused(mtt__writer_open(&env, folder, &w), MTT_E_FILE, "regular file", "folder replaced");
    refused(mtt__writer_open(&env, in("none/x"), &w), MTT_E_FILE, "No such file", "write into no folder");
    refused(mtt__writer_open(&env, in(""), &w), MTT_E_FILE, "regular file", "write to no name");
    unlink(in("pipe"));
    write_file(in("empty"), "", 0);
    check(mtt__map_open(&env, in("empty"), &map) == MTT_OK && !map.bytes, "empty map: %s",
          env.error);
    mtt__map_close(&map);
    check(file_is(in("empty"), "", 0), "empty file");
    check(replace_file(in("empty"), bulk, sizeof(bulk)) == MTT_OK &&
              file_is(in("empty"), bulk, sizeof(bulk)),
          "replace");
    if (chdir(folder) == 0)
        check(replace_file("plain", "x", 1) == MTT_OK && file_is(in("plain"), "x", 1),
              "name without folder");
    write_file(in(".plain.tmp"), "left by the dead", 16);
    check(replace_file(in("plain"), "y", 1) == MTT_OK && file_is(in("plain"), "y", 1) &&
              !count_files(".plain"),
          "a stale one in the way: %s", env.error);
    for (i = 0; i < 4; i++) { /* put there by others: a second name, links, a pipe */
        char name[400];
        write_file(in("victim"), "mine", 4);
        snprintf(name, sizeof(name), "%s", in(".plain.tmp"));
        if (i < 3) check(!(i ? symlink : link)(in(i < 2 ? "victim" : "nowhere"), name), "no link %zu", i);
        else check(!mkfifo(name, 0600), "no pipe");
        check(replace_file(in("plain"), "y", 1) == MTT_OK && file_is(in("plain"), "y", 1) &&
                  file_is(in("victim"), "mine", 4) && access(in("nowhere"), F_OK),
              "temporary %zu of somebody else: %s", i, env.error);
    }
    check(mtt__writer_open(&env, in("plain"), &w) == MTT_OK, "first writer");
    check(!unlink(in(".plain.tmp")) && mtt_writer_put(&w, "x", 1) == MTT_OK, "its temporary is removed");
    write_file(in(".plain.tmp"), "other", 5);
    check(mtt_writer_commit(&w) == MTT_E_FILE && file_is(in("plain"), "y", 1) &&
              file_is(in(".plain.tmp"), "other", 5),
          "the temporary of somebody else takes the place: %s", env.error);
    {
        mtt_writer *a, *b, *c;
        check(!mtt_writer_open(&env, in("one"), 3, &a) && !mtt_writer_open(&env, in("two"), 0, &b),
              "two files: %s", env.error);
        refused(mtt_writer_open(&env, in("one"), 0, &c), MTT_E_FILE, "another process", "one of them again");
        check(!c, "a writer that was refused");
        refused(mtt_writer_open(&env, in("huge"), (uint64_t)1 << 60, &c), MTT_E_FILE, "bytes are needed",
                "a disk");
        check(!count_files(".huge"), "its temporary stays");
        check(!mtt_writer_put(a, "abc", 3) && !mtt_writer_put(b, "de", 2) && !mtt_writer_finish(a) &&
                  !mtt_writer_patch(a, 1, "x", 1) && !mtt_writer_finish(b),
              "two files are written: %s", env.error);
        check(access(in("one"), F_OK) && access(in("two"), F_OK), "a file takes its place before the commit");
        check(!mtt_writer_commit(a) && file_is(in("one"), "axc", 3), "commit after finish");
        mtt_writer_close(a);
        mtt_writer_close(b);
        mtt_writer_close(NULL);
        check(file_is(in("one"), "axc", 3) && access(in("two"), F_OK) && !count_files(".two"),
              "close without commit leaves nothing");
    }
    check(mtt__writer_open(&env, in("plain"), &w) == MTT_OK, "first writer");
    {
        mtt_writer second;
        refused(mtt__writer_open(&env, in("plain"), &second), MTT_E_FILE, "another process",
                "two writers of one file");
        check(mtt_writer_put(&w, "z", 1) == MTT_OK && mtt_writer_commit(&w) == MTT_OK &&
                  file_is(in("plain"), "z", 1),
              "the first one wins");
        check(mtt_writer_put(&w, "z", 1) != MTT_OK, "put after commit");
    }
}

static unsigned char *old_data, *new_data;
enum { SAVED = 140000 };

static mtt_status save_in_pieces(mtt_env *e)
{
    mtt_writer w;
    mtt_status status = mtt__writer_open(e, in("saved"), &w);
    size_t at, part;
    for (at = 0; at < SAVED; at += part) {
        part = at % 3 ? 70001 : 1000;
        part = SAVED - at < part ? SAVED - at : part;
        mtt_writer_put(&w, at ? new_data + at : old_data, part);
    }
    status = status ? status : mtt_writer_patch(&w, 0, new_data, 1000);
    return status ? status : mtt_writer_commit(&w);
}

static void test_write_faults(void)
{
    static const int errors[] = {EIO, ENOSPC, EDQUOT, EINTR};
    size_t i, e, cases = 0;
    int kind, k;
    old_data = (unsigned char *)malloc(SAVED);
    new_data = (unsigned char *)malloc(SAVED);
    for (i = 0; i < SAVED; i++)
        old_data[i] = (unsigned char)below(256), new_data[i] = (unsigned char)below(256);
    for (one_byte = 0; one_byte < 2; one_byte++)
        for (kind = 0; kind < ON_COUNT; kind++)
            for (e = 0; e < MTT__LENGTH(errors); e++)
                for (k = 1;; k += one_byte && k > 2 ? 499 : 1, cases++) {
                    mtt_status status;
                    int fresh, stale;
                    write_file(in("saved"), old_data, SAVED);
                    fault_on = kind, fault_at = k, fault_errno = errors[e], fault_calls = 0;
                    status = save_in_pieces(&env);
                    fault_on = -1;
                    fresh = file_is(in("saved"), new_data, SAVED),
                    stale = file_is(in("saved"), old_data, SAVED);
                    check(status ? stale || (k == (kind == ON_FSYNC ? 2 : kind == ON_OPEN ? 3 : 0) && fresh)
                                 : fresh,
                          "%s %d, errno %d: status %d, %s", on_name[kind], k, errors[e], status, env.error);
                    check(count_files(".saved") == 0, "%s %d, errno %d: a temporary is left", on_name[kind],
                          k, errors[e]);
                    if (status)
                        check(strstr(env.error, "saved") && strstr(env.error, strerror(errors[e])) &&
                                  (errors[e] != ENOSPC || kind == ON_OPEN ||
                                   strstr(env.error, "bytes are needed") || fresh),
                              "%s %d: %s", on_name[kind], k, env.error);
                    if (errors[e] == EINTR && kind != ON_RENAME)
                        check(!status, "%s %d interrupted: %s", on_name[kind], k, env.error);
                    if (fault_calls < k) break;
                }
    one_byte = 0;
    printf("failed writes: %zu cases handled\n", cases);
    free(old_data);
    free(new_data);
}

/* ---- corpora ---- */

typedef struct documents {
    char *text;
    size_t size[4096], count, bytes;
} documents;

static mtt_status collect(mtt_env *e, const char *path, const char *field, documents *d)
{
    mtt__corpus *c;
    const char *text;
    size_t bytes;
    mtt_status status = mtt__corpus_open(e, path, field, END_OF_TEXT, &c);
    d->count = d->bytes = 0;
    while (!status) {
        status = mtt__corpus_next(c, &text, &bytes);
        if (status || d->count == 4096) break;
        d->text = (char *)realloc(d->text, d->bytes + bytes + 1);
        memcpy(d->text + d->bytes, text, bytes);
        d->bytes += d->size[d->count++] = bytes;
        d->text[d->bytes] = 0;
    }
    mtt__corpus_close(c);
    return status;
}

static documents docs;

static mtt_status collect_text(const void *text, size_t bytes, const char *field)
{
    write_file(in("corpus"), text, bytes);
    return collect(&env, in("corpus"), field, &docs);
}

#define collect_string(text, field) collect_text(text, sizeof(text) - 1, field)

static void test_jsonl(void)
{
    static const char *const bad[][3] = {{"{\"text\":\"a\"}\n{\"text\":\n", ":2: ", "value"},
                                         {"{\"text\":\"a\"}\n\n{\"text\":\"b\"} x\n", ":3: ", "follows"},
                                         {"{\"text\":1}", ":1: ", "list of strings"},
                                         {"{\"text\":null}", ":1: ", "list of strings"},
                                         {"{\"text\":[1]}", ":1: ", "string"},
                                         {"{\"text\":{\"a\":1}}", ":1: ", "list of strings"},
                                         {"{\"id\":1,\"content\":\"x\"}", ":1: ", "no field"},
                                         {"{}", ":1: ", "no field"},
                                         {"\"Well\", he said.\nAnd went.\n", ":1: ", "plain text"},
                                         {"[\n{\"text\":\"a\"}]", ":1: ", "array"},
                                         {"{\"text\":\"a\tb\"}", ":1: ", "control"},
                                         {"{\"text\":\"a\"}\n{\"text\":\"\\u12\"}", ":2: ", "escape"},
                                         {"\"a\"\n17\n", ":2: ", "list of strings"},
                                         {"{\"text\":\"a\"", ":1: ", "comma"}};
    size_t i, n;
    char *big;
    check(collect_string("{\"text\":\"a\\n\\u017c\\ud83d\\ude00\\/\",\"meta\":{\"x\":[1,2.5]}}\r\n\r\n  "
                         "\n\"bare\"\r\n{\"id\":7,\"text\":[\"p1\",\"\",\"p3\\t\"]}\n"
                         "[\"x\",\"y\"]\n{\"text\":\"first\",\"text\":\"last\"}\n{\"t\\u0065xt\":\"key\"}\n"
                         "{\"text\":"
                         "\"\"}\n{\"text\":[]}\n{\"text\":[\"\",\"\"]}",
                         NULL) == MTT_END,
          "JSONL: %s", env.error);
    check(docs.count == 9 && docs.bytes == 35 &&
              strcmp(docs.text, "a\n\xc5\xbc\xf0\x9f\x98\x80/barep1\n\n\n\np3\tx\n\nylastkey\n\n") == 0,
          "JSONL: %zu documents, %zu bytes: %s", docs.count, docs.bytes, docs.text);
    check(collect_string("\xef\xbb\xbf{\"body\":\"b\"}\n", "body") == MTT_END && docs.count == 1 &&
              docs.bytes == 1,
          "BOM and field");
    for (i = 0; i < MTT__LENGTH(bad); i++) {
        refused(collect_text(bad[i][0], strlen(bad[i][0]), NULL), MTT_E_FORMAT, bad[i][1], bad[i][0]);
        refused(MTT_E_FORMAT, MTT_E_FORMAT, bad[i][2], bad[i][0]);
    }
    n = (size_t)5 << 20; /* a line of 5 MiB between short ones */
    big = (char *)malloc(n + 64);
    strcpy(big, "{\"text\":\"s\"}\n{\"text\":\"");
    i = strlen(big);
    memset(big + i, 'x', n);
    strcpy(big + i + n, "\"}\n\"e\"");
    check(collect_text(big, strlen(big), NULL) == MTT_END && docs.count == 3 && docs.size[1] == n &&
              docs.bytes == n + 2,
          "long line: %s", env.error);
    free(big);
}

/* What comes before the first record, or between records, does not hide that a file is JSONL. Plain text may
   begin with a mark of JSON behind an empty line. */
static void test_blanks(void)
{
    static const char *const before[] = {"", "\n", " ", "\r\n\t \r\n", "\xef\xbb\xbf", "\xef\xbb\xbf\n\n",
                                         "\n\xef\xbb\xbf", "\f\n", "\v\f \n\n"};
    static const char *const plain[] = {"\n\"Well\", he said.\nAnd went.\n", " {a} b\n",
                                        "\n\n[Scene: a room]\n", "\n\"I was walking\nhome.\"\n",
                                        "Words first\n{\"text\":\"a\"}\n"};
    static const char *const records[] = {"{\"text\":\"a\"}", "\"a\"", "[\"a\"]"};
    char text[256];
    size_t i, k;
    for (i = 0; i < MTT__LENGTH(before); i++)
        for (k = 0; k < MTT__LENGTH(records); k++) {
            const char *record = records[k];
            sprintf(text, "%s%s\n%s%s\r\n%s\n%s", before[i], record, before[i], record, before[i], record);
            check(collect_text(text, strlen(text), NULL) == MTT_END && docs.count == 3 &&
                      !strcmp(docs.text, "aaa"),
                  "blanks %zu before record %zu: %zu documents, %s: %s", i, k, docs.count, docs.text,
                  env.error);
        }
    for (i = 0; i < MTT__LENGTH(plain); i++) {
        check(collect_text(plain[i], strlen(plain[i]), NULL) == MTT_END && docs.bytes == strlen(plain[i]) &&
                  !strcmp(docs.text, plain[i]),
              "plain text %zu: %s", i, env.error);
        refused(collect_text(plain[i], strlen(plain[i]), "text"), i < 4 ? MTT_E_FORMAT : MTT_E_ARGUMENT,
                i < 4 ? "one JSON value" : "is plain text, which has no field \"text\"",
                "a field of plain text");
    }
    check(collect_text("", 0, "text") == MTT_END && docs.count == 0, "a field of nothing: %s", env.error);
}

/* Plain text comes back whole in pieces, wherever a read of 256 KiB ends. The text has no blank lines and no
   newline at its end. Behind its end the buffer has bytes of earlier text. */
static void test_pieces(void)
{
    enum { MOST = 1 << 20 };
    char *text = (char *)malloc(MOST);
    random_state = 12;
    for (int i = 0; i < 24; i++) {
        size_t bytes = MOST / 2 + (size_t)below(MOST / 2), at, next = 0;
        for (at = 0; at < bytes; at++) {
            text[at] = at == next ? '\n' : (char)('a' + at % 26);
            if (at == next) next += 2 + (size_t)below(i % 3 ? 3000 : 60);
        }
        text[bytes - 1] = 'z';
        check(collect_text(text, bytes, NULL) == MTT_END && docs.bytes == bytes &&
                  !memcmp(docs.text, text, bytes),
              "text of %zu bytes comes back as %zu in %zu pieces: %s", bytes, docs.bytes, docs.count,
              env.error);
    }
    for (int i = 0; i < 2; i++) { /* no cut in a long line or a short text is before an accent */
        static const char *const letters[] = {"e\xcc\x81", "\xe3\x81\x8b\xe3\x82\x99", "a"};
        size_t bytes = 0, most = i ? 900 : MOST - 8, at, k;
        for (; bytes < most; bytes += strlen(letters[k])) {
            k = (size_t)below(3);
            memcpy(text + bytes, letters[k], strlen(letters[k]));
        }
        check(collect_text(text, bytes, NULL) == MTT_END && docs.bytes == bytes &&
                  !memcmp(docs.text, text, bytes) && docs.count > 3, "%zu pieces of one line", docs.count);
        for (at = k = 0; k < docs.count; at += docs.size[k++])
            check(text[at] == 'e' || text[at] == 'a' || !k, "piece %zu begins with an accent", k);
    }
    free(text);
}

static void test_refusals(void)
{
    static const struct {
        const char *bytes;
        size_t size;
        const char *word;
    } packed[] = {
        {"\x1f\x8b\x08xxxx", 7, "gzip -dc"}, {"\x28\xb5\x2f\xfdxxxx", 8, "zstd -dc"},
        {"\xfd" "7zXZ\0xx", 8, "xz -dc"},
        {"PAR1xxxx", 8, "read_parquet"}, {"\xff\xfeh\0i\0", 6, "iconv -f UTF-16"},
        {"\xfe\xff\0h\0i", 6, "iconv -f UTF-16"}, {"h\0i\0", 4, "iconv -f UTF-16LE"},
        {"\0h\0i", 4, "iconv -f UTF-16BE"}, {"\xff\xfe\0\0h\0\0\0i\0\0\0", 12, "iconv -f UTF-32"},
        {"BZh91AY&SY", 10, "bzip2 -dc"}, {"PK\3\4xx", 6, "unzip -p"},
        {"\x7f" "ELF\0\0", 6, "is not text, it has NUL bytes: give a UTF-8 text"}, {"\0", 1, "is not text"}
    };
    mtt__corpus *c;
    size_t i;
    for (i = 0; i < MTT__LENGTH(packed); i++)
        refused(collect_text(packed[i].bytes, packed[i].size, NULL), MTT_E_FORMAT, packed[i].word,
                packed[i].word);
    refused(mtt__corpus_open(&env, in("missing"), NULL, END_OF_TEXT, &c), MTT_E_FILE, "No such file",
            "missing corpus");
    refused(mtt__corpus_open(&env, folder, NULL, END_OF_TEXT, &c), MTT_E_FILE, "folder", "folder as corpus");
    check(collect_text("", 0, NULL) == MTT_END && docs.count == 0, "empty corpus");
    check(collect_string("\xef\xbb\xbf", NULL) == MTT_END && docs.count == 0, "only a BOM");
}

/* Writes all of it into a pipe that becomes standard input; a child does the writing. */
static pid_t feed_stdin(const char *text, size_t bytes)
{
    int ends[2];
    pid_t child;
    check(pipe(ends) == 0, "no pipe");
    child = fork();
    if (child == 0) {
        size_t done = 0, part;
        close(ends[0]);
        for (; done < bytes; done += part) {
            part = bytes - done < 777 ? bytes - done : 777;
            if (write(ends[1], text + done, part) < 0) break;
        }
        _exit(0);
    }
    close(ends[1]);
    dup2(ends[0], 0);
    close(ends[0]);
    return child;
}

/* A device is refused at once: its text may never end. */
static void test_devices(void)
{
    static const char *const devices[] = {"/dev/zero", "/dev/urandom", "/dev/null", "-"};
    mtt_prepare_desc desc;
    mtt__corpus *c;
    size_t i;
    int zero = open("/dev/zero", O_RDONLY);
    check(zero >= 0 && dup2(zero, 0) == 0, "standard input");
    close(zero);
    for (i = 0; i < MTT__LENGTH(devices); i++) {
        refused(mtt__corpus_open(&env, devices[i], NULL, END_OF_TEXT, &c), MTT_E_FILE,
                "a device: name a file or a pipe",
                devices[i]);
        memset(&desc, 0, sizeof(desc));
        desc.input = devices[i];
        desc.output = in("device");
        refused(mtt_prepare(&env, &desc, NULL), MTT_E_FILE, "a device", devices[i]);
        check(count_files("device") == 0 && count_files(".") == 0, "%s leaves files", devices[i]);
    }
}

static void test_plain(void)
{
    size_t i, k, n = 3000000, at;
    char *text = (char *)malloc(n);
    documents piped;
    int state;
    pid_t child;
    memset(&piped, 0, sizeof(piped));
    for (i = 0; i < n; i++) text[i] = below(40) ? (char)('a' + below(26)) : below(4) ? '\n' : '\r';
    for (i = 0; i < 700; i++) {
        k = below(n - 3);
        memcpy(text + k, below(2) ? "\n\n" : "\n\r\n", 2);
    }
    check(collect_text(text, n, NULL) == MTT_END && docs.bytes == n && memcmp(docs.text, text, n) == 0,
          "plain text comes back whole");
    for (i = at = 0; i + 1 < docs.count; at += docs.size[i++]) {
        size_t end = at + docs.size[i] - 1;
        check(docs.size[i] >= MTT_DOCUMENT_BYTES && docs.size[i] <= 64 * MTT_DOCUMENT_BYTES &&
                  text[end] == '\n',
              "document %zu: %zu bytes", i, docs.size[i]);
        while (end > at && memchr(" \t\r", text[end - 1], 3)) end--;
        check(docs.size[i] >= 16 * MTT_DOCUMENT_BYTES || text[end - 1] == '\n',
              "document %zu does not end at a blank line", i);
    }
    child = feed_stdin(text, n);
    check(collect(&env, "-", NULL, &piped) == MTT_END && piped.count == docs.count &&
              memcmp(piped.size, docs.size, docs.count * sizeof(size_t)) == 0 &&
              memcmp(piped.text, text, n) == 0,
          "standard input: %zu documents, not %zu; %s", piped.count, docs.count, env.error);
    waitpid(child, &state, 0);
    free(piped.text);
    for (i = 0; i < n; i++) text[i] = i % 81 == 80 ? '\n' : 'x'; /* no blank lines */
    check(collect_text(text, n, NULL) == MTT_END && docs.bytes == n &&
              docs.size[0] == (16 * MTT_DOCUMENT_BYTES + 80) / 81 * 81,
          "no blank line: %zu", docs.size[0]);
    n = 6000000;
    text = (char *)realloc(text, n);
    for (i = 0; i < n; i += 3)
        memcpy(text + i, "\xe2\x82\xac", 3); /* no line ends: 262,144 = 3 * 87,381 + 1 */
    check(collect_text(text, n, NULL) == MTT_END && docs.bytes == n && docs.size[0] == 262143 &&
              docs.size[1] == 262143 && memcmp(docs.text, text, n) == 0,
          "no line end: %zu", docs.size[0]);
    memset(text, 0x80, n); /* not UTF-8 at all */
    check(collect_text(text, n, NULL) == MTT_END && docs.bytes == n && docs.count == 23,
          "continuation bytes alone: %zu documents", docs.count);
    free(text);
    check(collect_string("one\r\n\r\ntwo\r\n", NULL) == MTT_END && docs.count == 1 && docs.bytes == 12,
          "CRLF passes");
}

/* Texts of kind 0: one line of words; 1: lines; 2: paragraphs; 3: characters of 3 bytes alone. */
static void short_text(char *text, size_t bytes, int kind)
{
    size_t i;
    for (i = 0; i < bytes; i++) {
        text[i] = below(6) ? (char)('a' + below(26)) : ' ';
        if (kind && i % 61 == 60) text[i] = '\n';
        if (kind == 2 && i % 305 == 303) text[i] = '\n', text[i - 1] = 'x';
        if (kind == 3) text[i] = "\xe2\x82\xac"[i % 3];
    }
}

/* A text of fewer than 20 documents becomes 20 to 42 pieces. They end where a text of its kind can be cut,
   and join to the text. From a pipe and behind a BOM they are the same. */
static void test_short_texts(void)
{
    static const size_t sizes[] = {320, 999, 1000, 4095, 30000, 65536, 262144, 262145, 900000};
    char *text = (char *)malloc(1000003);
    size_t i, k, n, at;
    documents other;
    memset(&other, 0, sizeof(other));
    memcpy(text, "\xef\xbb\xbf", 3);
    for (i = 0; i < 4 * MTT__LENGTH(sizes); i++) {
        const int kind = (int)(i % 4);
        int state, bad = 0;
        pid_t child;
        n = sizes[i / 4];
        short_text(text + 3, n, kind);
        if (kind == 2 && n > 90000) continue; /* documents of 4 KiB are enough */
        check(collect_text(text + 3, n, NULL) == MTT_END && docs.count >= 20 && docs.count <= 42 &&
                  docs.bytes == n && !memcmp(docs.text, text + 3, n),
              "kind %d: %zu bytes, %zu documents of %zu: %s", kind, n, docs.count, docs.bytes, env.error);
        for (k = at = 0; k + 1 < docs.count && n >= 30000; k++) {
            const char *end = docs.text + (at += docs.size[k]);
            bad += docs.size[k] > n / 20 || docs.size[k] + 3 < n / 40;
            bad += kind == 0   ? end[-1] != ' '
                   : kind == 1 ? end[-1] != '\n'
                   : kind == 2 ? end[-1] != '\n' || end[-2] != '\n'
                               : (*end & 0xc0) == 0x80;
        }
        check(!bad, "kind %d of %zu bytes: %d wrong cuts", kind, n, bad);
        child = feed_stdin(text, n + 3);
        check(collect(&env, "-", NULL, &other) == MTT_END && other.count == docs.count &&
                  !memcmp(other.size, docs.size, docs.count * sizeof(size_t)) && other.bytes == n &&
                  !memcmp(other.text, docs.text, n),
              "a pipe gives other documents of %zu bytes: %zu", n, other.count);
        waitpid(child, &state, 0);
    }
    for (n = 1; n < 400; n++) { /* the shortest texts lose nothing, either */
        short_text(text, n, (int)(n % 4));
        check(collect_text(text, n, NULL) == MTT_END && docs.bytes == n && !memcmp(docs.text, text, n) &&
                  docs.count <= 42 && (n < 320 || docs.count >= 20),
              "%zu bytes give %zu documents of %zu", n, docs.count, docs.bytes);
    }
    for (i = 0; i < 2; i++) { /* 20 documents of 5,000 bytes stay, 19 are cut again */
        n = i ? 100000 : 95000;
        for (k = 0; k < n; k++) text[k] = k % 5000 > 4997 ? '\n' : 'x';
        check(collect_text(text, n, NULL) == MTT_END && docs.bytes == n && (docs.size[0] == 5000) == (int)i,
              "%zu bytes: %zu documents, the first one of %zu", n, docs.count, docs.size[0]);
    }
    free(other.text);
    free(text);
}

static void test_speakleash(void)
{
    const char *path = shared_data("speakleash_sample.jsonl.zst", NULL);
    char command[700], *text = NULL;
    size_t n = 0, got = 1;
    FILE *pipe_in;
    if (!path) return;
    snprintf(command, sizeof(command), "zstd -dcq %s 2>/dev/null", path);
    pipe_in = popen(command, "r");
    for (; pipe_in && got; n += got) {
        text = (char *)realloc(text, n + 65536);
        got = fread(text + n, 1, 65536, pipe_in);
    }
    if (!pipe_in || pclose(pipe_in) || !n) skip("zstd cannot be run");
    else {
        check(collect_text(text, n, NULL) == MTT_END && docs.count == 200, "Speakleash: %zu documents, %s",
              docs.count, env.error);
        check(mtt_utf8_valid(docs.text, docs.bytes), "Speakleash: the text is not UTF-8");
    }
    free(text);
    refused(collect(&env, path, NULL, &docs), MTT_E_FORMAT, "zstd -dc", "Speakleash as it comes");
}

/* ---- token files and batches ---- */

static size_t token_file(unsigned char *out, uint32_t version, uint32_t bits, uint64_t count, uint64_t vocab,
                         size_t payload)
{
    memset(out, 0, 64 + payload);
    memcpy(out, "MTTTOKEN", 8);
    memcpy(out + 8, &version, 4);
    memcpy(out + 12, &bits, 4);
    memcpy(out + 16, &count, 8);
    memcpy(out + 24, &vocab, 8);
    return 64 + payload;
}

/* Writes a token file with the checksum of its ids. */
static void write_tokens(const char *name, unsigned char *file, size_t bytes)
{
    mtt__crc_table table;
    uint32_t crc;
    mtt__crc_init(&table);
    crc = mtt__crc32(&table, 0, file + 64, bytes - 64);
    memcpy(file + 32, &crc, 4);
    write_file(in(name), file, bytes);
}

static mtt_tokens *counting_tokens(const char *name, uint64_t count)
{
    unsigned char *file = (unsigned char *)malloc(64 + 4 * (size_t)count);
    mtt_tokens *t = NULL;
    uint32_t i;
    size_t size = token_file(file, 1, 32, count, 1000000, 4 * (size_t)count);
    for (i = 0; i < count; i++) memcpy(file + 64 + 4 * (size_t)i, &i, 4);
    write_tokens(name, file, size);
    free(file);
    check(mtt_tokens_open(&env, in(name), &t) == MTT_OK, "%s: %s", name, env.error);
    return t;
}

/* Ids in memory are read as those of a file. */
static void test_tokens_copy(void)
{
    mtt_tokens *file = counting_tokens("t", 1000), *copy;
    int32_t ids[1000], got[2][8], wrong[2] = {5, 7};
    mtt_batches batches[2];
    for (int i = 0; i < 1000; i++) ids[i] = i;
    check(mtt_tokens_copy(&env, ids, 1000, 1000000, &copy) == MTT_OK, "%s", env.error);
    memset(ids, 0, sizeof(ids));
    check(mtt_tokens_count(copy) == 1000 && mtt_tokens_vocab(copy) == 1000000 &&
              mtt_tokens_crc32(copy) == mtt_tokens_crc32(file),
          "ids in memory differ from those of a file");
    for (int k = 0; k < 2; k++)
        check(!mtt_batches_init(&env, &batches[k], k ? copy : file, 2, 4, 3, 0), "%s", env.error);
    for (int i = 0; i < 100; i++) {
        for (int k = 0; k < 2; k++)
            check(!mtt_batches_next(&batches[k], got[k], ids), "%s", env.error);
        check(!memcmp(got[0], got[1], sizeof(got[0])), "batch %d differs", i);
    }
    refused(mtt_tokens_read(copy, 999, 2, ids), MTT_E_ARGUMENT, "1000", "ids past the last");
    mtt_tokens_close(copy);
    mtt_tokens_close(file);
    for (int vocab = 7; vocab > -8; vocab -= 7) {
        refused(mtt_tokens_copy(&env, wrong, 2, vocab, &copy), MTT_E_ARGUMENT,
                vocab > 0 ? "id 1 is 7" : "vocab", "an id that is no id");
        check(!copy, "tokens that were not made");
    }
    wrong[0] = -1;
    refused(mtt_tokens_copy(&env, wrong, 2, 8, &copy), MTT_E_ARGUMENT, "id 0 is -1", "a negative id");
    check(mtt_tokens_copy(&env, NULL, 0, 8, &copy) == MTT_OK && !mtt_tokens_count(copy), "no ids: %s",
          env.error);
    mtt_tokens_close(copy);
}

static void test_tokens(void)
{
    static const struct {
        uint32_t version, bits;
        uint64_t count, vocab;
        size_t payload;
        const char *word;
    } bad[] = {
        {2, 16, 4, 100, 8, "version"}, {0, 16, 4, 100, 8, "version"}, {1, 8, 8, 100, 8, "bits"},
        {1, 0, 4, 100, 8, "bits"}, {1, 16, 4, 0, 8, "vocabulary"}, {1, 16, 4, 65537, 8, "vocabulary"},
        {1, 32, 2, 2147483648u, 8, "vocabulary"}, {1, 16, 4, UINT64_MAX, 8, "vocabulary"},
        {1, 16, 5, 100, 8, "size"},
        {1, 16, 3, 100, 8, "size"}, {1, 16, 4, 100, 9, "size"}, {1, 16, 4, 100, 7, "size"},
        {1, 32, 4, 100, 8, "size"},
        {1, 16, UINT64_MAX, 100, 8, "size"}, {1, 16, (uint64_t)1 << 63, 100, 0, "size"},
        {1, 32, ((uint64_t)1 << 62) + 2, 100, 8, "size"}
    };
    unsigned char file[4096];
    mtt_tokens *t;
    int32_t ids[8];
    size_t i, size;
    for (i = 0; i < MTT__LENGTH(bad); i++) {
        write_file(in("t"), file,
                 token_file(file, bad[i].version, bad[i].bits, bad[i].count, bad[i].vocab, bad[i].payload));
        refused(mtt_tokens_open(&env, in("t"), &t), MTT_E_FORMAT, bad[i].word, "token file");
    }
    for (i = 0; i < 64; i++) {
        write_file(in("t"), file, token_file(file, 1, 16, 0, 100, 0) - 64 + i);
        refused(mtt_tokens_open(&env, in("t"), &t), MTT_E_FORMAT, "shorter", "short token file");
    }
    for (i = 36; i < 64; i++) { /* of the origin, all or nothing: bytes 36..39 say that there is one */
        token_file(file, 1, 16, 0, 100, 0);
        file[i] = 1;
        write_file(in("t"), file, 64);
        if (i >= 40)
            refused(mtt_tokens_open(&env, in("t"), &t), MTT_E_FORMAT, "version",
                    "byte of an unknown version");
        else
            check(mtt_tokens_open(&env, in("t"), &t) == MTT_OK, "an origin: %s", env.error),
                mtt_tokens_close(t);
    }
    token_file(file, 1, 16, 0, 100, 0);
    file[3] = 'x';
    write_file(in("t"), file, 64);
    refused(mtt_tokens_open(&env, in("t"), &t), MTT_E_FORMAT, "does not begin", "file of another kind");
    size = token_file(file, 1, 16, 4, 100, 8);
    memcpy(file + 64, "\x01\0\x63\0\x64\0\x05\0", 8);
    write_tokens("t", file, size);
    refused(mtt_tokens_open(&env, in("t"), &t), MTT_E_FORMAT, "has the token 100,", "a large id");
    file[68] = 0x62;
    write_file(in("t"), file, size);
    refused(mtt_tokens_open(&env, in("t"), &t), MTT_E_FORMAT, "checksum", "an id that was changed");
    write_tokens("t", file, size);
    check(mtt_tokens_open(&env, in("t"), &t) == MTT_OK && mtt_tokens_count(t) == 4 &&
              mtt_tokens_vocab(t) == 100,
          "token file: %s", env.error);
    check(mtt_tokens_read(t, 0, 2, ids) == MTT_OK && ids[0] == 1 && ids[1] == 99 &&
              mtt_tokens_read(t, 3, 1, ids) == MTT_OK && ids[0] == 5,
          "ids");
    check(mtt_tokens_read(t, 4, 0, ids) == MTT_OK, "nothing at the end");
    refused(mtt_tokens_read(t, 3, 2, ids), MTT_E_ARGUMENT, "4 tokens", "range");
    refused(mtt_tokens_read(t, UINT64_MAX, 2, ids), MTT_E_ARGUMENT, "4 tokens", "range that wraps");
    refused(mtt_tokens_read(t, 1, SIZE_MAX, ids), MTT_E_ARGUMENT, "4 tokens", "count that wraps");
    mtt_tokens_close(t);
    write_file(in("t"), file, token_file(file, 1, 16, 0, 65536, 0));
    check(mtt_tokens_open(&env, in("t"), &t) == MTT_OK && mtt_tokens_count(t) == 0, "no tokens at all: %s",
          env.error);
    mtt_tokens_close(t);
}

/* Every flip of a bit of the ids is found, in 16 and in 32 bits, over several pieces of a check. */
static void test_token_damage(void)
{
    enum { COUNT = 20000 };
    unsigned char *file = (unsigned char *)malloc(64 + 4 * COUNT);
    int32_t *ids = (int32_t *)malloc(4 * COUNT);
    mtt_tokens *t;
    size_t i, size;
    uint32_t bits, id;
    for (bits = 16; bits <= 32; bits += 16) {
        size = token_file(file, 1, bits, COUNT, bits == 16 ? 65536 : 1u << 20, COUNT * bits / 8);
        for (i = 0; i < COUNT; i++) id = (uint32_t)i * 3, memcpy(file + 64 + i * bits / 8, &id, bits / 8);
        write_tokens("t", file, size);
        for (one_byte = 0; one_byte < 2; one_byte++) {
            int same = mtt_tokens_open(&env, in("t"), &t) == MTT_OK &&
                       mtt_tokens_read(t, 0, COUNT, ids) == MTT_OK;
            for (i = 0; i < COUNT && same; i++) same = ids[i] == (int32_t)i * 3;
            check(same, "%u bits, reads cut %d: %s", (unsigned)bits, one_byte, env.error);
            mtt_tokens_close(t);
        }
        one_byte = 0;
        for (i = 0; i < 200; i++) {
            size_t bytes = size - 64, at = 64;
            unsigned char old;
            at += i < 100 ? (size_t)below((int)bytes) : i < 150 ? i - 100 : bytes - 1 - (i - 150);
            old = file[at];
            file[at] ^= (unsigned char)(1 << below(8));
            write_file(in("t"), file, size);
            check(mtt_tokens_open(&env, in("t"), &t) == MTT_E_FORMAT && !t, "byte %zu: a flip passes", at);
            file[at] = old;
        }
    }
    free(file);
    free(ids);
}

/* A file that is cut or written while it is in use: an error, and never a signal or other data. */
static void test_tokens_in_use(void)
{
    static const struct timespec past[2] = {{1000000000, 0}, {1000000000, 0}};
    static const off_t cuts[] = {0, 63, 64, 1064};
    int32_t ids[500], again[500];
    mtt_tokens *t;
    size_t i;
    int fd;
    for (i = 0; i < MTT__LENGTH(cuts); i++) {
        t = counting_tokens("used", 500);
        check(truncate(in("used"), cuts[i]) == 0, "cut");
        refused(mtt_tokens_read(t, 0, 500, ids), MTT_E_FILE, "changed while it was in use", "a cut file");
        mtt_tokens_close(t);
    }
    mtt_tokens_close(counting_tokens("used", 500));
    fd = open(in("used"), O_RDWR);
    check(futimens(fd, past) == 0 && mtt_tokens_open(&env, in("used"), &t) == MTT_OK, "%s", env.error);
    check(mtt_tokens_read(t, 0, 500, ids) == MTT_OK && pwrite(fd, "\5", 1, 64 + 4 * 7) == 1, "%s", env.error);
    refused(mtt_tokens_read(t, 0, 500, again), MTT_E_FILE, "used changed while it was in use",
            "an id that changes");
    check(pwrite(fd, "\7", 1, 64 + 4 * 7) == 1 && futimens(fd, past) == 0, "restored");
    check(unlink(in("used")) == 0 && mtt_tokens_read(t, 0, 500, again) == MTT_OK &&
              memcmp(ids, again, sizeof(ids)) == 0,
          "a file that is replaced stays readable: %s", env.error);
    fault_on = ON_PREAD, fault_at = 1, fault_errno = EINTR, fault_calls = 0;
    check(mtt_tokens_read(t, 0, 500, again) == MTT_OK, "an interrupted read: %s", env.error);
    fault_on = ON_PREAD, fault_at = 1, fault_errno = EIO, fault_calls = 0;
    refused(mtt_tokens_read(t, 0, 500, again), MTT_E_FILE, strerror(EIO), "a read that fails");
    fault_on = -1;
    mtt_tokens_close(t);
    close(fd);
}

static void test_split(void)
{
    uint64_t seed, block, k, document = 0;
    int places[3][20] = {{0}}, differ = 0, i;
    for (seed = 0; seed < 40; seed++)
        for (block = 0; block < 100; block++) {
            int count[3] = {0};
            for (k = 0; k < 20; k++, document++) {
                mtt_split s = mtt__split_of(seed, block * 20 + k);
                count[s]++;
                places[s][k]++;
                differ += s != mtt__split_of(seed + 1, block * 20 + k);
            }
            check(count[0] == 17 && count[1] == 2 && count[2] == 1, "block %d: %d, %d, %d", (int)block,
                  count[0], count[1], count[2]);
        }
    for (i = 0; i < 20; i++)
        check(places[1][i] > 300 && places[1][i] < 500 && places[2][i] > 130 && places[2][i] < 270,
              "place %d: valid %d, test %d", i, places[1][i], places[2][i]);
    check(differ > 10000, "the seed changes %d of 80000", differ);
}

static void test_batches(void)
{
    static const int sizes[] = {1,  2,   3,   4,   5,   15,   16,   17,   63,   64,
                                65, 100, 255, 256, 257, 1000, 1023, 1024, 1025, 4097};
    unsigned char *seen = (unsigned char *)malloc(5000);
    int32_t a[3 * 5], b[3 * 5], c[3 * 5], d[3 * 5];
    uint64_t n, k, epoch, moved;
    size_t i;
    mtt_batches whole, resumed;
    mtt_tokens *t;
    for (i = 0; i < MTT__LENGTH(sizes); i++)
        for (epoch = 0; epoch < 4; epoch++) {
            n = (uint64_t)sizes[i];
            memset(seen, 0, 5000);
            for (k = moved = 0; k < n; k++) {
                uint64_t at = mtt__permute(3, epoch, k, n);
                check(at < n && !seen[at]++, "permutation of %d: %d", (int)n, (int)at);
                moved += at != mtt__permute(3, epoch + 1, k, n);
            }
            check(n < 15 || moved > n / 2, "epochs of %d are alike", (int)n);
        }
    for (n = ((uint64_t)1 << 40) + 12345, k = 0; k < 1000; k++)
        check(mtt__permute(1, 2, k, n) < n, "large permutation");
    free(seen);
    t = counting_tokens("x.valid.tokens", 514);
    refused(mtt_batches_init(&env, &whole, t, 2, 1024, 0, 0), MTT_E_DATA, "valid.tokens has 514",
            "too few tokens");
    refused(MTT_E_DATA, MTT_E_DATA, "has 514 tokens, but a sequence of 1024 needs 1025: lower seq_len",
            "too few tokens");
    refused(mtt_batches_init(&env, &whole, t, 2, 514, 0, 0), MTT_E_DATA, "514", "one too few");
    check(mtt_batches_init(&env, &whole, t, 2, 513, 0, 0) == MTT_OK && whole.sequences == 1, "just enough");
    refused(mtt_batches_init(&env, &whole, t, 0, 8, 0, 0), MTT_E_ARGUMENT, "1 or more", "batch 0");
    refused(mtt_batches_init(&env, &whole, t, 1, -1, 0, 0), MTT_E_ARGUMENT, "1 or more", "length -1");
    refused(mtt_batches_init(&env, &whole, t, INT_MIN, 1, 0, 0), MTT_E_ARGUMENT, "of -2147483648 sequences",
            "a batch of INT_MIN");
    refused(mtt_batches_init(&env, &whole, t, 65536, 65536, 0, 0), MTT_E_ARGUMENT, "2^31", "2^32 tokens");
    mtt_tokens_close(t);
    t = counting_tokens("tokens", 5 * 7 + 3); /* 7 sequences of 5, in batches of 3 */
    check(mtt_batches_init(&env, &whole, t, 3, 5, 42, 0) == MTT_OK && whole.sequences == 7, "batches: %s",
          env.error);
    {
        int count[4][7] = {{0}}, first = 1;
        for (k = 0; k < 28; k += 3) {
            resumed = whole; /* nothing but the cursor is carried over */
            check(mtt_batches_init(&env, &resumed, t, 3, 5, 42, 0) == MTT_OK, "again");
            resumed.cursor = k;
            check(mtt_batches_next(&whole, a, b) == MTT_OK && mtt_batches_next(&resumed, c, d) == MTT_OK &&
                      !memcmp(a, c, sizeof(a)) && !memcmp(b, d, sizeof(b)),
                  "resumed at %d", (int)k);
            for (i = 0; i < 3 && k + i < 28; i++) {
                count[(k + i) / 7][a[i * 5] / 5]++;
                check(a[i * 5] % 5 == 0 && a[i * 5 + 4] == a[i * 5] + 4 && b[i * 5] == a[i * 5] + 1 &&
                          b[i * 5 + 4] == a[i * 5] + 5,
                      "targets are one ahead");
            }
        }
        for (k = 0; k < 28; k++) first &= count[k / 7][k % 7] == 1;
        check(first, "an epoch misses a sequence");
    }
    check(mtt_batches_init(&env, &whole, t, 3, 5, 0, 1) == MTT_OK && whole.sequences == 8, "sequential");
    for (k = 0; k < 8; k++) {
        if (k % 3 == 0) check(mtt_batches_next(&whole, a, b) == MTT_OK, "sequential batch");
        for (i = 0; i < 5; i++) {
            int32_t id = (int32_t)(k * 5 + i), there = id < 5 * 7 + 2; /* the last token is a target alone */
            check(a[k % 3 * 5 + i] == (there ? id : 0) && b[k % 3 * 5 + i] == (there ? id + 1 : -1),
                  "in order, then padding, at %d", id);
        }
    }
    for (i = 10; i < 15; i++) check(a[i] == 0 && b[i] == -1, "padding at %zu", i);
    check(mtt_batches_next(&whole, a, b) == MTT_END && whole.cursor == 8, "the end");
    whole.rank = 5, whole.ranks = 2;
    refused(mtt_batches_next(&whole, a, b), MTT_E_ARGUMENT, "rank 5 of 2", "a rank that is not there");
    mtt_tokens_close(t);
    for (n = 1; n <= 12; n++) { /* files of few tokens: each target once */
        int targets = 0, batches = 0;
        t = counting_tokens("few", (int)n);
        if (n == 1) {
            refused(mtt_batches_init(&env, &whole, t, 3, 5, 0, 1), MTT_E_DATA,
                    "has 1 tokens, but a sequence of 1 needs 2", "one token");
        } else {
            check(mtt_batches_init(&env, &whole, t, 1, 5, 0, 1) == MTT_OK, "%d tokens", (int)n);
            for (; mtt_batches_next(&whole, a, b) == MTT_OK; batches++)
                for (i = 0; i < 5; i++) {
                    targets += b[i] >= 0;
                    check(b[i] < 0 || b[i] == a[i] + 1, "one ahead");
                }
            check(targets == (int)n - 1 && batches == ((int)n + 3) / 5, "%d tokens: %d targets in %d batches",
                  (int)n, targets, batches);
        }
        mtt_tokens_close(t);
    }
}

/* ---- prepare ---- */

static mtt_status prepare_from(mtt_env *e, const char *input, const char *output, const char *tokenizer,
                               mtt_prepare_report *r)
{
    mtt_prepare_desc desc;
    memset(&desc, 0, sizeof(desc));
    desc.input = input;
    desc.output = output;
    desc.tokenizer = tokenizer;
    desc.vocab = 300;
    desc.seed = 5;
    return mtt_prepare(e, &desc, r);
}

static mtt_status prepare_small(mtt_env *e)
{
    return prepare_from(e, in("small.jsonl"), in("small"), NULL, NULL);
}

static mtt_status prepare_words(mtt_env *e)
{
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    mtt_prepare_desc desc;
    memset(&desc, 0, sizeof(desc));
    desc.input = in("small.jsonl");
    desc.output = in("words");
    desc.vocab = 60;
    desc.kind = &kind;
    return mtt_prepare(e, &desc, NULL);
}

static int same_files(const char *a, const char *b)
{
    char *data;
    size_t bytes;
    int same = get_file(a, &data, &bytes) == MTT_OK && file_is(b, data, bytes);
    free(data);
    return same;
}

static const char *const parts[] = {"train.tokens", "valid.tokens", "test.tokens", "tokenizer.json"};

/* Whether a tokenizer was given is in the header, at byte 36. */
static void forget_options(const char *path)
{
    int fd = open(path, O_WRONLY);
    check(!strstr(path, ".tokens") || pwrite(fd, "\0\0\0\1", 4, 36) == 4, "options");
    close(fd);
}

/* 90 documents in p.jsonl, the first 24 in small.jsonl. Returns the text, which the caller frees. */
static char *write_text(size_t *size)
{
    static const char *const words[] = {"the cat", "sat", "za\\u017c\\u00f3\\u0142\\u0107", "the cat"};
    char *text = (char *)malloc(400000), *at = text;
    int i, k;
    for (i = 0; i < 90; i++) {
        at += sprintf(at, "{\"text\": \"document %d\\n", i);
        for (k = 0; k < 50 + i; k++) at += sprintf(at, "%s ", words[below(4)]);
        at += sprintf(at, "\"}\n");
        if (i == 23) write_file(in("small.jsonl"), text, (size_t)(at - text));
    }
    *size = (size_t)(at - text);
    write_file(in("p.jsonl"), text, *size);
    return text;
}

/* A token file gives back the documents of its split, which `docs` holds with the others. */
static void gives_back(const mtt_tokenizer *tokenizer, const mtt_prepare_report *r, int split)
{
    char name[64], *back = (char *)malloc(400000);
    mtt_tokens *t = NULL;
    int32_t *ids;
    size_t bytes = 0, doc, from = 0, to = 0, count;
    snprintf(name, sizeof(name), "p.%s", parts[split]);
    check(mtt_tokens_open(&env, in(name), &t) == MTT_OK && mtt_tokens_count(t) == r->tokens[split] &&
              mtt_tokens_vocab(t) == r->vocab,
          "%s: %s", name, env.error);
    count = (size_t)mtt_tokens_count(t);
    ids = (int32_t *)malloc(4 * count);
    check(mtt_tokens_read(t, 0, count, ids) == MTT_OK &&
              mtt_decode(tokenizer, ids, count, back, 400000, &bytes) == MTT_OK,
          "%s: %s", name, env.error);
    check(count && ids[count - 1] == mtt_tokenizer_end_of_text(tokenizer) && bytes == r->bytes[split],
          "%s: %zu bytes", name, bytes);
    for (doc = 0; doc < docs.count; from += docs.size[doc++]) {
        if (mtt__split_of(5, doc) != (mtt_split)split) continue;
        check(to + docs.size[doc] <= bytes && memcmp(back + to, docs.text + from, docs.size[doc]) == 0,
              "%s: document %zu", name, doc);
        to += docs.size[doc];
    }
    mtt_tokens_close(t);
    free(ids);
    free(back);
}

/* A child writes a text into a named pipe. */
static pid_t feed_pipe(const char *name, const char *text, size_t bytes)
{
    pid_t child = fork();
    if (child == 0) {
        int fd = open(in(name), O_WRONLY);
        ssize_t n = 1;
        for (; bytes && n > 0; text += n, bytes -= (size_t)n) n = write(fd, text, bytes);
        _exit(bytes != 0);
    }
    return child;
}

static void test_prepare(void)
{
    size_t size;
    char *text = write_text(&size), name[3][64];
    const char *gpt2 = shared_data("vocab.bpe", "vocab.bpe");
    mtt_prepare_report r, piped, again;
    mtt_tokenizer *tokenizer = NULL;
    pid_t child;
    int k, state;
    check(prepare_from(&env, in("p.jsonl"), in("p"), NULL, &r) == MTT_OK, "prepare: %s", env.error);
    check(r.documents[0] + r.documents[1] + r.documents[2] == 90 && r.documents[0] >= 68 + 7 &&
              r.documents[1] >= 8 && r.vocab > 257 && r.vocab <= 300,
          "report");
    check(mtt_tokenizer_load(&env, in("p.tokenizer.json"), NULL, &tokenizer) == MTT_OK, "its tokenizer: %s",
          env.error);
    collect(&env, in("p.jsonl"), NULL, &docs);
    for (k = 0; k < 3 && tokenizer; k++) gives_back(tokenizer, &r, k);
    mtt_tokenizer_destroy(tokenizer);
    child = feed_stdin(text, size);
    check(prepare_from(&env, "-", in("q"), NULL, &piped) == MTT_OK && memcmp(&r, &piped, sizeof(r)) == 0,
          "prepare from standard input: %s", env.error);
    waitpid(child, NULL, 0);
    check(mkfifo(in("named"), 0600) == 0, "no pipe");
    for (k = 0; k < 2; k++) { /* opened and read once, each time */
        child = feed_pipe("named", text, size);
        check(prepare_from(&env, in("named"), in("n"), k ? in("p.tokenizer.json") : NULL, &piped) == MTT_OK &&
                  memcmp(&r, &piped, sizeof(r)) == 0,
              "prepare from a named pipe: %s", env.error);
        waitpid(child, &state, 0);
        check(state == 0, "the named pipe is not read to its end");
    }
    check(same_files(in("p.train.tokens"), in("q.train.tokens")), "a named pipe gives other tokens");
    check(prepare_from(&env, in("p.jsonl"), in("r"), in("p.tokenizer.json"), &again) == MTT_OK &&
              memcmp(&r, &again, sizeof(r)) == 0,
          "its own tokenizer: %s", env.error);
    for (k = 0; k < 4; k++) {
        snprintf(name[0], 64, "p.%s", parts[k]);
        snprintf(name[1], 64, "q.%s", parts[k]);
        snprintf(name[2], 64, "r.%s", parts[k]);
        check(same_files(in(name[0]), in(name[1])), "%s of standard input differs", parts[k]);
        forget_options(in(name[0]));
        forget_options(in(name[2]));
        check(same_files(in(name[0]), in(name[2])), "%s with its own tokenizer differs", parts[k]);
    }
    check(count_files("q.spool") == 0 && count_files(".") == 0, "spool or temporary left");
    if (gpt2)
        check(prepare_from(&env, in("p.jsonl"), in("r"), gpt2, &again) == MTT_OK && again.vocab == 50257,
              "GPT-2: %s", env.error);
    free(text);
}

/* Bytes that are not UTF-8 are counted with their place, also where a read ends; NUL bytes are refused
   wherever they are. */
static void test_encodings(void)
{
    enum { SIZE = 700000, READ = 1 << 18 };
    static const size_t places[] = {0, 1, 4095, 4096, READ - 2, READ - 1, READ, 2 * READ - 1, SIZE - 1};
    char *text = (char *)malloc(SIZE), word[64];
    mtt_prepare_report r;
    size_t i, k, bad;
    for (i = 0; i < MTT__LENGTH(places); i++) {
        for (k = 0; k < SIZE; k++) text[k] = k % 61 == 60 ? '\n' : "z\xc5\xbc "[k % 61 % 4];
        for (k = bad = places[i]; k < SIZE && k < bad + 3; k++) text[k] = 'x';
        for (k = bad; k && (text[k - 1] & 0xc0) == 0x80; k--) text[k - 1] = text[k - 2] = 'x';
        if (bad && text[bad - 1] == '\xc5') text[bad - 1] = 'x';
        if (bad + 3 < SIZE && (text[bad + 3] & 0xc0) == 0x80) text[bad + 3] = 'x';
        text[SIZE - 1] = 'x';
        for (k = 0; k < SIZE; k++)
            if ((text[k] == '\xc5') != (k + 1 < SIZE && text[k + 1] == '\xbc')) text[k] = 'x';
        text[bad] = '\xb3';
        if (bad + 2 < SIZE) text[bad + 2] = '\xe6';
        write_file(in("bytes.txt"), text, SIZE);
        check(!prepare_from(&env, in("bytes.txt"), in("bytes"), NULL, &r) && !r.jsonl &&
                  r.invalid == 1 + (bad + 2 < SIZE) && r.first_invalid == bad,
              "bad bytes at %zu: %llu, the first at %llu: %s", bad, (unsigned long long)r.invalid,
              (unsigned long long)r.first_invalid, env.error);
        text[bad] = 0;
        sprintf(word, "the first is at byte %zu)", bad);
        refused(collect_text(text, SIZE, NULL), MTT_E_FORMAT, word, "a NUL byte");
    }
    for (strcpy(text, "\n{\"text\":\"za\xbf\xf3\xb3\xe6\"}\n"), i = 0; i < 40; i++)
        strcat(text, "{\"text\":\"a \\ud800 \\u0000\"}\n");
    write_file(in("bytes.jsonl"), text, strlen(text));
    check(!prepare_from(&env, in("bytes.jsonl"), in("bytes"), NULL, &r) && r.jsonl && r.invalid == 4 &&
              r.first_invalid == 12,
          "bad bytes in JSONL: %llu, the first at %llu: %s", (unsigned long long)r.invalid,
          (unsigned long long)r.first_invalid, env.error);
    refused(collect_text("{\"text\":\"a\"}\n\0\0\n", 17, NULL), MTT_E_FORMAT, "the first is at byte 13)",
            "a hole");
    for (k = 0; k < 2; k++)
        for (i = 0; i < 40; i++) { /* UTF-16 and UTF-32 without a mark */
            memset(text + 4 * i, 0, 4);
            text[4 * i + (k ? 3 : 0)] = (char)("Za\xf3 "[i % 4]);
            text[4 * i + 200 + (size_t)k] = text[4 * i + 202 + (size_t)k] = (char)('a' + i % 26);
            text[4 * i + 201 - (size_t)k] = text[4 * i + 203 - (size_t)k] = 0;
            if (i < 39) continue;
            refused(collect_text(text, 160, NULL), MTT_E_FORMAT, k ? "-f UTF-32BE" : "-f UTF-32LE", "UTF-32");
            refused(collect_text(text + 200, 160, NULL), MTT_E_FORMAT, k ? "-f UTF-16BE" : "-f UTF-16LE",
                    "UTF-16");
        }
    free(text);
}

/* A preparation that fails leaves nothing. */
static void test_prepare_failures(void)
{
    static const struct {
        const char *input, *tokenizer, *word;
        mtt_status status;
    } cases[] = {{"missing", NULL, "No such file", MTT_E_FILE},
                 {"none.txt", NULL, "no text", MTT_E_DATA},
                 {"empties.jsonl", NULL, "has no text", MTT_E_DATA},
                 {"p.jsonl", "bad.json", "neither", MTT_E_FORMAT},
                 {"one.txt", NULL, "another seed", MTT_E_DATA}};
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    mtt_prepare_desc desc;
    mtt_prepare_report r;
    pid_t child;
    size_t i;
    write_file(in("none.txt"), "", 0);
    write_file(in("empties.jsonl"), "{\"text\":\"\"}\n\"\"\n[]\n{\"text\":[\"\"]}\n", 32);
    write_file(in("bad.json"), "hello", 5);
    write_file(in("one.txt"), "one", 3);
    for (i = 0; i < MTT__LENGTH(cases); i++) {
        memset(&desc, 0, sizeof(desc));
        desc.input = in(cases[i].input);
        desc.output = in("f");
        desc.tokenizer = cases[i].tokenizer ? in(cases[i].tokenizer) : NULL;
        while (mtt__split_of(desc.seed, 0) == MTT_TRAIN) desc.seed++;
        refused(mtt_prepare(&env, &desc, &r), cases[i].status, cases[i].word, "prepare");
        check(count_files("f.") == 0 && count_files(".") == 0, "a failed prepare leaves files");
    }
    refused(prepare_from(&env, in("one.txt"), in("nosuch/f"), NULL, &r), MTT_E_FILE,
            "nosuch/: cannot find this folder: No such file", "no folder");
    refused(prepare_from(&env, in("one.txt"), in("one.txt/f"), NULL, &r), MTT_E_FILE,
            "one.txt/: cannot find this folder: Not a directory", "no folder");
    check(!strstr(env.error, ".tmp"), "a hidden file is named: %s", env.error);
    child = feed_stdin("{\"text\":\"a\"}\n{\"x\":1}\n", 21);
    refused(prepare_from(&env, "-", in("f"), NULL, &r), MTT_E_FORMAT, "standard input:2: ",
            "bad line from standard input");
    waitpid(child, NULL, 0);
    check(count_files("f.") == 0 && count_files(".") == 0, "a failed spool leaves files");
    every_allocation(prepare_small, "prepare");
    every_allocation(prepare_words, "prepare, WordPiece");
    write_file(in("vocab.txt"), "[PAD]\n[UNK]\n[SEP]\nthe\ncat\nsat\n", 30);
    refused(prepare_from(&env, in("small.jsonl"), in("r"), in("vocab.txt"), &r), MTT_E_FORMAT,
            "include tools/wordpiece.h", "vocab.txt without its kind");
    memset(&desc, 0, sizeof(desc));
    desc.input = in("small.jsonl");
    desc.output = in("r");
    desc.tokenizer = in("vocab.txt");
    desc.kind = &kind;
    check(mtt_prepare(&env, &desc, &r) == MTT_OK && r.vocab == 6, "a vocab.txt is known by its content: %s",
          env.error);
}

/* ---- datasets: what is reused, and what is prepared again ---- */

/* JSONL documents with two texts each, in which one letter can be chosen. */
static void write_documents(const char *name, char letter)
{
    char text[40000], *at = text;
    int i, k;
    random_state = 3;
    for (i = 0; i < 40; i++) {
        at += sprintf(at, "{\"text\": \"%c%d", i == 30 ? letter : 'a', i);
        for (k = 0; k < 20; k++) at += sprintf(at, below(2) ? " the cat" : " sat on");
        at += sprintf(at, "\", \"body\": \"another %d\"}\n", i);
    }
    write_file(in(name), text, (size_t)(at - text));
}

typedef struct snapshot {
    char *data[4];
    size_t bytes[4];
} snapshot;

static const char *part_of(const char *prefix, int part)
{
    char name[64];
    snprintf(name, sizeof(name), "%s.%s", prefix, parts[part]);
    return in(name);
}

static snapshot take(const char *prefix)
{
    snapshot s;
    int i;
    for (i = 0; i < 4; i++)
        check(get_file(part_of(prefix, i), &s.data[i], &s.bytes[i]) == MTT_OK, "%s", env.error);
    return s;
}

static void put_back(const char *prefix, const snapshot *s)
{
    int i;
    for (i = 0; i < 4; i++) write_file(part_of(prefix, i), s->data[i], s->bytes[i]);
}

static int is_there(const char *prefix, const snapshot *s)
{
    int i, same = 1;
    for (i = 0; i < 4; i++) same = same && file_is(part_of(prefix, i), s->data[i], s->bytes[i]);
    return same;
}

static void drop(snapshot *s)
{
    int i;
    for (i = 0; i < 4; i++) free(s->data[i]);
}

static char dataset_input[400], dataset_output[400];

static mtt_prepare_desc dataset_desc(void)
{
    mtt_prepare_desc d;
    memset(&d, 0, sizeof(d));
    d.input = strcpy(dataset_input, in("d.jsonl"));
    d.output = strcpy(dataset_output, in("d"));
    d.vocab = 275;
    d.seed = 5;
    return d;
}

/* Prepares twice: the first time makes the dataset, the second reuses it and reports the same. */
static void made_then_reused(const mtt_prepare_desc *d, const char *what)
{
    mtt_prepare_report made, reused;
    snapshot s;
    struct stat before, after;
    check(mtt_prepare(&env, d, &made) == MTT_OK && !made.reused, "%s: is not made again: %s", what,
          env.error);
    s = take("d");
    stat(part_of("d", 0), &before);
    check(mtt_prepare(&env, d, &reused) == MTT_OK && reused.reused, "%s: is not reused: %s", what, env.error);
    stat(part_of("d", 0), &after);
    check(is_there("d", &s) && before.st_ino == after.st_ino, "%s: a reused dataset changes", what);
    check(count_files(".") == 0, "%s: a temporary is left", what);
    made.reused = 1;
    check(memcmp(&made, &reused, sizeof(made)) == 0, "%s: the reports differ", what);
    drop(&s);
}

static void made_again(const mtt_prepare_desc *d, const snapshot *want, const char *what)
{
    mtt_prepare_report r;
    check(mtt_prepare(&env, d, &r) == MTT_OK && !r.reused && is_there("d", want), "%s: %s", what, env.error);
}

/* ---- ends of text ---- */

enum { STORIES = 3000 };
static char *stories[STORIES]; /* texts that end with a line end, most with a blank line inside */

static void write_stories(int largest)
{
    int i, k;
    char *at;
    for (i = 0; i < STORIES; i++) {
        int lines = i == 700 ? largest : 1 + (int)below(9);
        at = stories[i] = (char *)malloc((size_t)lines * 64 + 64);
        for (k = 0; k < lines; k++) {
            at += sprintf(at, "Story %d has %u lamps, %.*s", i, (unsigned)below(1000), (int)below(20),
                          "boats and a bridge.");
            at += sprintf(at, below(3) ? "\n" : "\n\n");
        }
    }
}

static void free_stories(void)
{
    int i;
    for (i = 0; i < STORIES; i++) free(stories[i]);
}

/* Joins the first `count` stories by a separator, which may also be first and last. */
static size_t join(char **text, int count, const char *separator, int around)
{
    size_t bytes = 1, size = strlen(separator);
    char *at;
    int i;
    for (i = 0; i < count; i++) bytes += strlen(stories[i]) + size;
    at = *text = (char *)malloc(bytes + size);
    if (around) at = strcpy(at, separator) + size;
    for (i = 0; i < count; i++)
        at += sprintf(at, "%s%s", stories[i], i + 1 < count || around ? separator : "");
    return (size_t)(at - *text);
}

/* A document is a story, wherever a read ends: ends of text alone separate them, and not the blank lines
   inside them. There are no empty documents. */
static void test_ends_of_text(void)
{
    static const char *const separators[] = {
        "<|endoftext|>\n", "<|endoftext|>\r\n", "  <|endoftext|>\t \n", "<|endoftext|>\n<|endoftext|>\n",
        "<|endoftext|><|endoftext|> <|endoftext|>\n", "<|endoftext|>\n\n \r\n\n<|endoftext|>\n"};
    char *text, *joined;
    size_t i, k, bytes, at, all;
    mtt__corpus *c;
    for (i = 0; i < 2 * MTT__LENGTH(separators); i++) {
        const char *separator = separators[i / 2];
        random_state = 77 + i;
        write_stories(i % 2 ? 20000 : 9); /* one of about 600 KB */
        bytes = join(&text, STORIES, separator, i % 2);
        if (i % 2) bytes -= strcspn(separator, "\n") + 1 < strlen(separator) ? 0 : 1; /* no last line end */
        check(collect_text(text, bytes, NULL) == MTT_END && docs.count == STORIES,
              "separator %zu: %zu documents: %s", i, docs.count, env.error);
        for (k = at = 0; k < docs.count; at += docs.size[k++])
            check(docs.size[k] == strlen(stories[k]) && !memcmp(docs.text + at, stories[k], docs.size[k]),
                  "separator %zu: story %zu is another", i, k);
        free(text);
        free_stories();
    }
    random_state = 5;
    write_stories(9);
    for (i = 1; i < 30; i++) { /* few documents: they are cut further, but none goes past an end of text */
        bytes = join(&text, (int)i, separators[0], (int)i % 2);
        check(collect_text(text, bytes, NULL) == MTT_END && (i < 20 ? docs.count >= 18 : docs.count == i),
              "%zu stories: %zu documents", i, docs.count);
        for (k = at = all = 0; k < docs.count; at += docs.size[k++]) { /* blanks before an end may be lost */
            char *doc = strndup(docs.text + at, docs.size[k]);
            const char *found = strstr(stories[all], doc);
            if (!found && all + 1 < i) found = strstr(stories[++all], doc);
            check(found != NULL, "%zu stories: document %zu is in none: %s", i, k, doc);
            free(doc);
        }
        check(all + 1 == i, "%zu stories: there are %zu", i, all + 1);
        free(text);
    }
    bytes = join(&text, STORIES, "The token <|endoftext|>, or <|endoftext|>x\n<|endoftext|> and <|endo\n"
                 "<|endoftext|\n", 0);
    check(collect_text(text, bytes, NULL) == MTT_END && docs.bytes == bytes &&
              !memcmp(docs.text, text, bytes) && docs.count < 400,
          "within a line: %zu documents", docs.count);
    free(text);
    free_stories();
    bytes = (size_t)40 << 20; /* no document fills the memory */
    text = (char *)malloc(bytes);
    for (i = 0; i < bytes; i++) text[i] = i % 64 == 63 ? '\n' : 'y';
    for (i = 0; i < 30; i++) memcpy(text + i * 640, "<|endoftext|>\n", 14);
    write_file(in("corpus"), text, bytes);
    check(mtt__corpus_open(&env, in("corpus"), NULL, END_OF_TEXT, &c) == MTT_OK, "%s", env.error);
    for (i = all = 0; mtt__corpus_next(c, (const char **)&joined, &k) == MTT_OK; i++, all += k)
        check(k <= (size_t)17 << 20, "a document of %zu bytes", k);
    check(i == 32 && all == bytes - 30 * 14 && c->capacity < (size_t)40 << 20,
          "a long document: %zu documents, %zu bytes, a buffer of %zu", i, all, c->capacity);
    mtt__corpus_close(c);
    free(text);
    check(collect_string("<|endoftext|>\n\n<|endoftext|>", NULL) == MTT_END && docs.count == 0, "only ends");
    check(collect_string("<|endoftext|>\na\n<|endoftext|>", NULL) == MTT_END && docs.count == 1 &&
              docs.bytes == 2, "around a document: %zu", docs.count);
}

/* Fields lose the ends of text that exporters add, but keep those within. */
static void test_ends_of_fields(void)
{
    check(collect_string("{\"text\":\"a<|endoftext|>\"}\n\"b\\n<|endoftext|>\\n <|endoftext|>\\n\"\n"
                         "\"c<|endoftext|>d\"\n[\"e\",\"<|endoftext|>\"]\n\"f \\n\"\n\"<|endoftext|>g\"\n",
                         NULL) == MTT_END && docs.count == 6 &&
              !strcmp(docs.text, "ab\nc<|endoftext|>de\n\nf \n<|endoftext|>g"),
          "fields: %zu documents: %s", docs.count, docs.text);
    check(collect_string("\x1e{\"text\":\"a\"}\n\x1e{\"text\":\"b\"}\n\x1e\"c\"\n", NULL) == MTT_END &&
              docs.count == 3 && !strcmp(docs.text, "abc"), "a JSON text sequence: %s", docs.text);
    check(collect_string("\xef\xbb\xbf\n\x1e\n\x1e{\"body\":\"a\"}\r\n\x1e \n", "body") == MTT_END &&
              docs.count == 1 && docs.bytes == 1, "blanks in a JSON text sequence: %zu", docs.count);
    refused(collect_string("\x1e{\n  \"text\": \"a\"\n}\n", NULL), MTT_E_FORMAT, "one JSON value",
            "a record of several lines");
}

/* 1 = the same ids, and the same tokenizer. */
static int same_dataset(const char *a, const char *b)
{
    snapshot s = take(a), t = take(b);
    int i, same = s.bytes[3] == t.bytes[3] && !memcmp(s.data[3], t.data[3], s.bytes[3]);
    for (i = 0; i < 3; i++)
        same &= s.bytes[i] == t.bytes[i] && !memcmp(s.data[i] + 64, t.data[i] + 64, s.bytes[i] - 64);
    drop(&s);
    drop(&t);
    return same;
}

/* A dataset of stories with ends of text is that of the same stories as JSONL, also through a pipe. The end
   of text is that of the tokenizer; others are noted. An older dataset is made again, but a run goes on. */
static void test_prepare_ends(void)
{
    static const char *const ends[] = {"<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]"};
    mtt_tokenizer_kind words = mtt_wordpiece(NULL);
    mtt_prepare_desc d;
    mtt_prepare_report r;
    char *text, *json, *at, line[64], *file;
    size_t bytes, size;
    snapshot s;
    pid_t child;
    int i, k, fd;
    random_state = 9;
    write_stories(9);
    json = at = (char *)malloc(1 << 21);
    for (i = 0; i < STORIES; i++) {
        at += sprintf(at, "{\"text\": \"");
        for (k = 0; stories[i][k]; k++)
            if (stories[i][k] == '\n') at += sprintf(at, "\\n");
            else *at++ = stories[i][k];
        at += sprintf(at, "\"}\n");
    }
    write_file(in("ends.jsonl"), json, (size_t)(at - json));
    check(!prepare_from(&env, in("ends.jsonl"), in("ends_json"), NULL, &r) && !r.separated && !r.dropped,
          "%s", env.error);
    bytes = join(&text, STORIES, "<|endoftext|>\n", 1);
    write_file(in("ends.txt"), text, bytes);
    check(!prepare_from(&env, in("ends.txt"), in("ends"), NULL, &r) && r.separated == 1 && !r.inside &&
              r.dropped == STORIES + 1 && !strcmp(r.end_of_text, "<|endoftext|>") &&
              same_dataset("ends", "ends_json"),
          "stories: %d, %llu dropped: %s", r.separated, (unsigned long long)r.dropped, env.error);
    child = feed_stdin(text, bytes);
    check(!prepare_from(&env, "-", in("ends_pipe"), NULL, &r) && r.separated == 1 &&
              same_dataset("ends_pipe", "ends_json"), "stories from a pipe: %s", env.error);
    waitpid(child, NULL, 0);
    check(!prepare_from(&env, in("ends.txt"), in("ends"), NULL, &r) && r.reused && r.separated == 1,
          "stories are not reused: %s", env.error);

    s = take("ends"); /* as made before ends of text ended documents: byte 36, bit 2 */
    fd = open(in("ends.train.tokens"), O_RDWR);
    for (i = 0; i < 3; i++) {
        fd = open(part_of("ends", i), O_RDWR);
        s.data[i][36] &= ~2;
        check(pwrite(fd, s.data[i] + 36, 1, 36) == 1, "options");
        close(fd);
    }
    memset(&d, 0, sizeof(d));
    d.input = strcpy(dataset_input, in("ends.txt"));
    d.output = strcpy(dataset_output, in("ends"));
    d.vocab = 300, d.seed = 5, d.reuse_only = 1;
    check(!mtt_prepare(&env, &d, &r) && r.reused && is_there("ends", &s), "an older run: %s", env.error);
    d.reuse_only = 0;
    check(!mtt_prepare(&env, &d, &r) && !r.reused && same_dataset("ends", "ends_json"),
          "an older dataset: %s", env.error);
    drop(&s);

    get_file(in("ends.tokenizer.json"), &file, &size);
    file = (char *)realloc(file, size + 1);
    file[size] = 0;
    for (i = 0; i < 4; i++) /* i: end of text of the tokenizer; k: that in the text */
        for (k = 0; k < 4; k++) {
            const char *own = ends[i];
            unsigned long long inside = i == k || k > 1 ? 0 : STORIES - 1;
            free(text);
            sprintf(line, "%s\n", ends[k]);
            bytes = join(&text, STORIES, line, 0);
            write_file(in("ends.txt"), text, bytes);
            memset(&d, 0, sizeof(d));
            d.input = strcpy(dataset_input, in("ends.txt"));
            d.output = strcpy(dataset_output, in("other"));
            d.vocab = 300;
            if (i == 3) d.kind = &words;
            else if (i) {
                char *copy = (char *)malloc(2 * size), *from = file, *to = copy, *found;
                for (; (found = strstr(from, ends[0])) != NULL; from = found + strlen(ends[0]))
                    to += sprintf(to, "%.*s%s", (int)(found - from), from, own);
                to += sprintf(to, "%s", from);
                write_file(in("other.json"), copy, (size_t)(to - copy));
                free(copy);
                d.tokenizer = in("other.json");
            }
            check(!mtt_prepare(&env, &d, &r) && r.separated == (i == k) && !strcmp(r.end_of_text, own) &&
                      r.inside == inside && !strcmp(r.inside_text, inside ? ends[k] : ""),
                  "%s in a text for %s: %d, %llu of %s: %s", ends[k], own, r.separated,
                  (unsigned long long)r.inside, r.inside_text, env.error);
            check((r.documents[0] + r.documents[1] + r.documents[2] == STORIES) == (i == k),
                  "%s in a text for %s: other documents", ends[k], own);
        }
    free(file);
    free(text);
    free(json);
    free_stories();
}

/* ---- datasets that cannot be reused ---- */

static void not_reusable(mtt_prepare_desc d, const char *word, const char *what)
{
    snapshot s;
    memset(&s, 0, sizeof(s));
    if (count_files("d.t") + count_files("d.v") == 4) s = take("d");
    d.reuse_only = 1;
    refused(mtt_prepare(&env, &d, NULL), MTT_E_MISMATCH, word, what);
    check(count_files(".") == 0 && (!s.data[0] || is_there("d", &s)), "%s: reuse_only changes files", what);
    drop(&s);
}

/* Every option that decides the files, and every file that it reads. */
static void test_stale_options(void)
{
    mtt_wordpiece_options lower = {1, 0, 0, 0};
    mtt_tokenizer_kind words = mtt_wordpiece(NULL), lower_words = mtt_wordpiece(&lower);
    mtt_prepare_desc base = dataset_desc(), d;
    char other[400];
    write_documents("d.jsonl", 'a');
    made_then_reused(&base, "a new dataset");
    write_documents("d.jsonl", 'b');
    not_reusable(base, "was made of another text, field or seed", "another text");
    made_then_reused(&base, "another text");
    write_documents("d.jsonl", 'a');
    made_then_reused(&base, "the first text");
    d = base;
    d.field = "body";
    not_reusable(d, "was made of another text, field or seed", "another field");
    made_then_reused(&d, "another field");
    d = base;
    d.field = "text";
    made_then_reused(&d, "the first field");
    check(mtt_prepare(&env, &base, NULL) == MTT_OK, "the default field");
    d = base;
    d.seed++;
    not_reusable(d, "was made of another text, field or seed", "another seed");
    made_then_reused(&d, "another seed");
    made_then_reused(&base, "the first seed");
    d = base;
    d.vocab--;
    not_reusable(d, "was made with another tokenizer or vocabulary size", "another vocabulary size");
    made_then_reused(&d, "another vocabulary size");
    d.vocab = 0; /* reuse_only then takes any */
    d.reuse_only = 1;
    check(mtt_prepare(&env, &d, NULL) == MTT_OK, "options that are not given are compared: %s", env.error);
    made_then_reused(&base, "the first vocabulary size");
    d = base;
    d.kind = &words;
    not_reusable(d, "was made with another tokenizer", "another kind");
    made_then_reused(&d, "another kind");
    d.kind = &lower_words;
    not_reusable(d, "was made with another tokenizer", "another option of the kind");
    made_then_reused(&d, "another option of the kind");
    made_then_reused(&base, "the first kind");
    check(rename(part_of("d", 3), in("wide.json")) == 0, "a tokenizer");
    base.vocab--;
    made_then_reused(&base, "one id fewer");
    check(rename(part_of("d", 3), strcpy(other, in("other.json"))) == 0, "another tokenizer");
    d = base;
    d.tokenizer = other;
    made_then_reused(&d, "a tokenizer that is given");
    d.vocab = 280; /* of no effect then */
    d.reuse_only = 1;
    check(mtt_prepare(&env, &d, NULL) == MTT_OK, "vocab beside a tokenizer: %s", env.error);
    d.reuse_only = 0;
    check(rename(in("wide.json"), other) == 0, "another tokenizer");
    made_then_reused(&d, "another tokenizer under the same path");
    made_then_reused(&base, "a tokenizer that is trained again");
    unlink(other);
    refused(mtt_prepare(&env, &d, NULL), MTT_E_FILE, "other.json", "a tokenizer that is absent");
}

/* Every file absent, cut, longer, of another dataset, or without its origin. */
static void test_stale_files(void)
{
    mtt_prepare_desc base = dataset_desc(), d = base;
    snapshot first, other;
    char zero[28] = {0}, prefix[400];
    int i, fd;
    write_documents("d.jsonl", 'a');
    check(mtt_prepare(&env, &base, NULL) == MTT_OK, "%s", env.error);
    first = take("d");
    d.output = strcpy(prefix, in("e"));
    d.seed++;
    d.vocab--;
    check(mtt_prepare(&env, &d, NULL) == MTT_OK, "%s", env.error);
    other = take("e");
    for (i = 0; i < 4; i++) {
        unlink(part_of("d", i));
        not_reusable(base, i == 2 ? "is incomplete" : parts[i], "a file is absent");
        made_again(&base, &first, "a file is absent");
        check(truncate(part_of("d", i), (off_t)first.bytes[i] - 2) == 0, "cut");
        not_reusable(base, parts[i], "a file is cut");
        made_again(&base, &first, "a file is cut");
        check(truncate(part_of("d", i), (off_t)first.bytes[i] + 1) == 0, "longer");
        not_reusable(base, parts[i], "a file is longer");
        made_again(&base, &first, "a file is longer");
        write_file(part_of("d", i), other.data[i], other.bytes[i]);
        not_reusable(base, "", "a file of another dataset");
        made_again(&base, &first, "a file of another dataset");
        if (i == 3) break;
        fd = open(part_of("d", i), O_WRONLY);
        check(pwrite(fd, zero, 28, 36) == 28, "no origin");
        close(fd);
        not_reusable(base, "was not made together with", "a file without its origin");
        made_again(&base, &first, "a file without its origin");
    }
    put_back("d", &first);
    write_file(part_of("d", 2), other.data[2], other.bytes[2]);
    check(pwrite(fd = open(part_of("d", 2), O_WRONLY), first.data[2] + 48, 4, 48) == 4,
          "the tokenizer's checksum");
    close(fd);
    not_reusable(base, "was not made together with", "a split of another text with the same tokenizer");
    made_again(&base, &first, "a split of another text with the same tokenizer");
    for (i = 0; i < 4; i++) unlink(part_of("d", i));
    not_reusable(base, "d.tokenizer.json", "nothing is there");
    check(count_files("d.t") == 0, "reuse_only makes files");
    for (i = 0; i < 4; i++) {
        d = base;
        if (i == 1) d.input = NULL;
        if (i == 2) d.output = NULL;
        if (i == 3) d.output = "";
        refused(mtt_prepare(&env, i ? &d : NULL, NULL), MTT_E_ARGUMENT, "an input, and an output", "a NULL");
    }
    d = base;
    d.input = in("absent");
    refused(mtt_prepare(&env, &d, NULL), MTT_E_FILE, "absent", "no text");
    put_back("d", &first);
    refused(mtt_prepare(&env, &d, NULL), MTT_E_FILE, "absent", "no text any more");
    check(is_there("d", &first), "a text that cannot be read leaves the dataset");
    d.input = "-";
    not_reusable(d, "cannot be compared with standard input", "standard input");
    drop(&first);
    drop(&other);
}

/* What the caller of mtt_prepare has heard, and when it ends the work; 0 = never. */
typedef struct listener {
    int calls, ends_at;
    uint64_t bytes;
} listener;

static int listen_to(void *user, uint64_t bytes)
{
    listener *l = (listener *)user;
    check(bytes >= l->bytes + (1 << 20), "told %llu bytes after %llu", (unsigned long long)bytes,
          (unsigned long long)l->bytes);
    l->bytes = bytes;
    return ++l->calls == l->ends_at;
}

/* The caller hears of each MiB, and can end the work at any of them; the dataset that is there stays. */
static void test_progress(void)
{
    enum { BYTES = 5 << 20 };
    char *text = (char *)malloc(BYTES), input[400], output[400];
    listener l = {0, 0, 0};
    mtt_prepare_desc d = {.input = strcpy(input, in("long")), .output = strcpy(output, in("d")),
                          .vocab = 300, .progress = listen_to, .user = &l};
    snapshot s;
    int all;
    for (int i = 0; i < BYTES; i++) text[i] = "the cat sat on a mat\n\n"[i % 22];
    write_file(in("long"), text, BYTES);
    check(mtt_prepare(&env, &d, NULL) == MTT_OK, "%s", env.error);
    all = l.calls;
    check(all >= 8 && l.bytes <= 2 * BYTES, "%d calls, %llu bytes", all, (unsigned long long)l.bytes);
    s = take("d");
    d.seed = 1; /* another dataset */
    for (int k = 1; k <= all; k++) {
        l = (listener){0, k, 0};
        check(mtt_prepare(&env, &d, NULL) == MTT_END && l.calls == k, "stopped at call %d: %d", k, l.calls);
        check(is_there("d", &s) && !count_files("."), "stopped at call %d: files change", k);
    }
    drop(&s);
    free(text);
}

/* A dataset that is neither the one nor the other is not opened and not reused. */
static void consistent(const snapshot *a, const snapshot *b, const mtt_prepare_desc *of_a,
                       const mtt_prepare_desc *of_b, int k)
{
    mtt_prepare_desc d;
    mtt_dataset set;
    int is_a = is_there("d", a), is_b = is_there("d", b);
    mtt_status status = mtt_dataset_open(&env, dataset_output, NULL, &set);
    check(status || is_a || is_b, "change %d: a mixed dataset is opened", k);
    check(!status || !(is_a || is_b), "change %d: a whole dataset is refused: %s", k, env.error);
    if (!status) mtt_dataset_close(&set);
    d = *of_a;
    d.reuse_only = 1;
    status = mtt_prepare(&env, &d, NULL);
    check(status == MTT_E_MISMATCH || (!status && is_a), "change %d: status %d, not the first", k, status);
    d = *of_b;
    d.reuse_only = 1;
    status = mtt_prepare(&env, &d, NULL);
    check(status == MTT_E_MISMATCH || (!status && is_b), "change %d: status %d, not the second", k, status);
}

/* Two datasets of different texts and tokenizers, but as many ids. The old one may not say what it was made
   of. */
static void two_datasets(mtt_prepare_desc *a, mtt_prepare_desc *b, snapshot *old, snapshot *fresh, int origin)
{
    int i, fd;
    *a = dataset_desc();
    a->vocab = 262;
    *b = *a;
    b->field = "body";
    write_documents("d.jsonl", 'a');
    check(mtt_prepare(&env, b, NULL) == MTT_OK, "%s", env.error);
    *fresh = take("d");
    check(mtt_prepare(&env, a, NULL) == MTT_OK, "%s", env.error);
    for (i = 0; i < 3 && !origin; i++) {
        fd = open(part_of("d", i), O_WRONLY);
        check(pwrite(fd, "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 28, 36) == 28,
              "no origin");
        close(fd);
    }
    *old = take("d");
    check(old->data[0][24] == fresh->data[0][24] &&
              !file_is(part_of("d", 3), fresh->data[3], fresh->bytes[3]),
          "the tokenizers must differ in all but the number of ids");
}

/* Whatever happened to the preparation of `b`, nothing stale is used, and the next one is as if it was the
   first. */
static void check_dataset(const mtt_prepare_desc *a, const mtt_prepare_desc *b, const snapshot *old,
                          const snapshot *fresh, int origin, int k)
{
    mtt_prepare_report r;
    if (origin || is_there("d", fresh)) consistent(old, fresh, a, b, k);
    else {
        mtt_dataset set;
        mtt_status status = mtt_dataset_open(&env, dataset_output, NULL, &set);
        check((status == MTT_OK) == is_there("d", old), "change %d: a dataset without origin: %s", k,
              env.error);
        if (!status) mtt_dataset_close(&set);
    }
    check(mtt_prepare(&env, b, &r) == MTT_OK && is_there("d", fresh) && (r.reused || count_files(".") == 0),
          "change %d: prepared again: %s", k, env.error);
}

/* Forks a process that prepares and dies at change number `at`. Returns 1 if it lived to the end. */
static int prepare_and_die(const mtt_prepare_desc *d, int at, int half)
{
    int state = 0;
    pid_t child = fork();
    if (child == 0) {
        die_at = at, die_half = half, changes = 0;
        _exit(mtt_prepare(&env, d, NULL) != MTT_OK);
    }
    check(child > 0 && waitpid(child, &state, 0) == child &&
              (WIFEXITED(state) ? !WEXITSTATUS(state) : WTERMSIG(state) == SIGKILL),
          "change %d: the child ends with %d", at, state);
    return WIFEXITED(state);
}

/* A process dies at every open, write, sync, rename and unlink, before it or after half of it. */
static void test_deaths(int origin, int piped)
{
    mtt_prepare_desc a, b, run;
    snapshot old, fresh;
    char *text;
    size_t bytes;
    int k, half, done;
    two_datasets(&a, &b, &old, &fresh, origin);
    check(get_file(b.input, &text, &bytes) == MTT_OK, "%s", env.error);
    run = b;
    if (piped) run.input = "-";
    for (half = 0; half < 2; half++) {
        for (done = 0, k = 1; !done && k < 100; k++) {
            pid_t feeder = piped ? feed_stdin(text, bytes) : -1;
            put_back("d", &old);
            done = prepare_and_die(&run, k, half);
            if (piped) waitpid(feeder, NULL, 0);
            unlink(in("d.spool"));
            unlink(in(".d.spool.tmp"));
            check_dataset(&a, &b, &old, &fresh, origin, k);
        }
        check(done && k > 20, "only %d changes of files", k - 2);
    }
    free(text);
    drop(&old);
    drop(&fresh);
}

/* Every system call fails once. */
static void test_prepare_faults(void)
{
    mtt_prepare_desc a, b;
    snapshot old, fresh;
    int kind, k;
    two_datasets(&a, &b, &old, &fresh, 1);
    for (kind = 0; kind < ON_COUNT; kind++)
        for (k = 1;; k++) {
            mtt_status status;
            put_back("d", &old);
            fault_on = kind, fault_at = k, fault_errno = EIO, fault_calls = 0;
            status = mtt_prepare(&env, &b, NULL);
            fault_on = -1;
            check(count_files(".") == 0, "%s %d: a temporary is left", on_name[kind], k);
            check(status ? strstr(env.error, strerror(EIO)) != NULL : is_there("d", &fresh),
                  "%s %d: status %d, %s", on_name[kind], k, status, env.error);
            check_dataset(&a, &b, &old, &fresh, 1, k);
            if (fault_calls < k) break;
        }
    drop(&old);
    drop(&fresh);
}

static mtt_status reuse_dataset(mtt_env *e)
{
    mtt_prepare_desc d = dataset_desc();
    mtt_prepare_report r;
    mtt_status status = mtt_prepare(e, &d, &r);
    check(status || r.reused, "a failed allocation makes a dataset again");
    return status;
}

static mtt_status open_dataset(mtt_env *e)
{
    mtt_dataset set;
    mtt_status status = mtt_dataset_open(e, dataset_output, NULL, &set);
    if (!status) mtt_dataset_close(&set);
    else check(!set.train && !set.valid && !set.test && !set.tokenizer, "a failed open leaves pointers");
    return status;
}

static void dataset_refused(mtt_status want, const char *word, const char *what)
{
    mtt_dataset set;
    refused(mtt_dataset_open(&env, dataset_output, NULL, &set), want, word, what);
}

/* Files of an older version, which do not say what they were made of. */
static void test_old_dataset(void)
{
    mtt_prepare_desc base = dataset_desc(), d = base;
    mtt_dataset set;
    snapshot first, wider;
    char prefix[400];
    int i;
    check(mtt_prepare(&env, &base, NULL) == MTT_OK, "%s", env.error);
    first = take("d");
    d.output = strcpy(prefix, in("e"));
    d.vocab = 270;
    check(mtt_prepare(&env, &d, NULL) == MTT_OK, "%s", env.error);
    wider = take("e");
    first.data[3][first.bytes[3] - 1] = ' '; /* the same tokenizer in other bytes */
    write_file(part_of("d", 3), first.data[3], first.bytes[3]);
    dataset_refused(MTT_E_MISMATCH, "d.tokenizer.json is not the tokenizer of", "a changed tokenizer");
    for (i = 0; i < 3; i++) memset(first.data[i] + 36, 0, 28);
    put_back("d", &first);
    check(mtt_dataset_open(&env, dataset_output, NULL, &set) == MTT_OK, "files of an older version: %s",
          env.error);
    mtt_dataset_close(&set);
    memset(wider.data[1] + 36, 0, 28);
    write_file(part_of("d", 1), wider.data[1], wider.bytes[1]);
    dataset_refused(MTT_E_MISMATCH, "d.valid.tokens", "an older file of another vocabulary");
    drop(&first);
    drop(&wider);
    check(access("tests/golden/files", F_OK) ||
              (!mtt_dataset_open(&env, "tests/golden/files/bpe", NULL, &set) && set.test),
          "the golden files: %s", env.error);
    if (set.train) mtt_dataset_close(&set);
}

static void test_dataset(void)
{
    static const char *const word[] = {"d.train.tokens", "d.valid.tokens", "d.test.tokens",
                                       "d.tokenizer.json"};
    mtt_prepare_desc base = dataset_desc(), d = base;
    mtt_tokenizer_kind words = mtt_wordpiece(NULL);
    mtt_dataset set;
    snapshot first, wider;
    char prefix[400], longest[2100];
    int i;
    write_documents("d.jsonl", 'a');
    check(mtt_prepare(&env, &base, NULL) == MTT_OK, "%s", env.error);
    first = take("d");
    check(mtt_dataset_open(&env, dataset_output, NULL, &set) == MTT_OK && set.test &&
              mtt_tokens_count(set.train) > 100 && mtt_tokens_count(set.valid) > 10 &&
              mtt_tokenizer_vocab(set.tokenizer) == 275,
          "dataset: %s", env.error);
    mtt_dataset_close(&set);
    check(!set.train && !set.tokenizer, "a closed dataset has pointers");
    mtt_dataset_close(&set);
    every_allocation(open_dataset, "dataset");
    every_allocation(reuse_dataset, "a reused dataset");
    d.output = strcpy(prefix, in("e"));
    d.vocab = 270;
    check(mtt_prepare(&env, &d, NULL) == MTT_OK, "%s", env.error);
    wider = take("e");
    for (i = 0; i < 4; i++) {
        put_back("d", &first);
        write_file(part_of("d", i), wider.data[i], wider.bytes[i]);
        dataset_refused(MTT_E_MISMATCH, "d.tokenizer.json is not the tokenizer of",
                        "parts of two vocabularies");
        check(i == 3 || strstr(env.error, word[i]), "which part: %s", env.error);
        write_file(part_of("d", i), first.data[i], 63);
        dataset_refused(MTT_E_FORMAT, word[i], "a damaged part");
        unlink(part_of("d", i));
        if (i != 2) dataset_refused(MTT_E_FILE, word[i], "a part that is absent");
        else
            check(mtt_dataset_open(&env, dataset_output, NULL, &set) == MTT_OK && !set.test, "no test: %s",
                  env.error);
        if (i == 2) mtt_dataset_close(&set);
    }
    put_back("d", &first);
    base.kind = &words;
    base.vocab = 90;
    check(mtt_prepare(&env, &base, NULL) == MTT_OK, "%s", env.error);
    dataset_refused(MTT_E_FORMAT, "include tools/wordpiece.h", "a WordPiece without its kind");
    check(mtt_dataset_open(&env, dataset_output, &words, &set) == MTT_OK, "a WordPiece: %s", env.error);
    mtt_dataset_close(&set);
    memset(longest, 'x', sizeof(longest));
    longest[2001] = 0;
    refused(mtt_dataset_open(&env, longest, NULL, &set), MTT_E_ARGUMENT, "2000 bytes", "a long prefix");
    d.output = longest;
    refused(mtt_prepare(&env, &d, NULL), MTT_E_ARGUMENT, "2000 bytes", "a long prefix");
    longest[2000] = 0;
    check(mtt_prepare(&env, &d, NULL) == MTT_E_FILE, "a prefix of 2000 bytes: %s", env.error);
    drop(&first);
    drop(&wider);
}

static void test_changing_text(void)
{
    mtt_prepare_desc d = dataset_desc();
    write_documents("d.jsonl", 'a');
    d.seed = 77;
    changing = dataset_input, changing_opens = 0;
    refused(mtt_prepare(&env, &d, NULL), MTT_E_FILE, "changed while it was read", "a text that changes");
    changing = NULL;
    check(count_files(".") == 0, "a temporary is left");
}

/* ---- safetensors ---- */

#define TENSOR(n, d, r, ...) {.name = n, .dtype = d, .rank = r, .shape = {__VA_ARGS__}}
static mtt__st_entry three[] = {TENSOR("we\"ight\xc5\xbc", 0, 2, 3, 4), TENSOR("scalar", 0, 0, 0),
                                TENSOR("nothing", MTT_I32, 3, 2, 0, 4),
                                TENSOR("half", MTT_BF16_BITS, 2, 2, 3), TENSOR("bytes", MTT_U8, 1, 5)};
static const char notes[] = ",\"step\":\"120\",\"te\\nxt\":\"a \\\"b\\\" \xc3\xb3\"";

static mtt_status byte_pattern(void *user, size_t tensor, size_t offset, void *buffer, size_t bytes)
{
    size_t i;
    (void)user;
    for (i = 0; i < bytes; i++)
        ((unsigned char *)buffer)[i] = (unsigned char)((offset + i) * 7 + tensor * 31 + 1);
    return MTT_OK;
}

static mtt_status failing_read(void *user, size_t tensor, size_t offset, void *buffer, size_t bytes)
{
    (void)offset, (void)buffer, (void)bytes;
    return tensor == 3 ? mtt__fail((mtt_env *)user, MTT_E_DEVICE, "the device is gone")
                       : byte_pattern(user, tensor, offset, buffer, bytes);
}

static mtt_status save_three(mtt_env *e)
{
    return mtt__st_save(e, in("three"), three, 5, notes, byte_pattern, NULL);
}

static mtt_status save_and_load(mtt_env *e)
{
    mtt__st st;
    mtt_status status = save_three(e);
    if (!status) status = mtt__st_open(e, in("three"), &st);
    if (status) return status;
    status = mtt__st_verify(&st);
    mtt__st_close(&st);
    return status;
}

static mtt_status read_corpus(mtt_env *e)
{
    return collect(e, in("corpus"), NULL, &docs) == MTT_END ? MTT_OK : MTT_E_MEMORY;
}

static mtt_status open_tokens(mtt_env *e)
{
    mtt_tokens *t;
    mtt_status status = mtt_tokens_open(e, in("tokens"), &t);
    if (!status) mtt_tokens_close(t);
    return status;
}

static int pair_is(const mtt__st *st, const char *key, const char *value)
{
    const mtt__st_entry *e = mtt__st_find(&st->metadata, key);
    return e && !strcmp(e->value, value);
}

static void test_round_trip(void)
{
    unsigned char want[64];
    mtt__st st;
    size_t i;
    check(save_three(&env) == MTT_OK && mtt__st_open(&env, in("three"), &st) == MTT_OK, "round trip: %s",
          env.error);
    check(st.tensors.count == 5 && ((const char *)st.data - st.map.data) % 64 == 0 &&
              mtt__st_verify(&st) == MTT_OK,
          "round trip: %s", env.error);
    for (i = 0; i < 5; i++) {
        const mtt__st_entry *e = mtt__st_find(&st.tensors, three[i].name);
        byte_pattern(NULL, i, 0, want, sizeof(want));
        check(e && e->dtype == three[i].dtype && e->rank == three[i].rank &&
                  !memcmp(e->shape, three[i].shape, sizeof(uint64_t) * (size_t)e->rank) && e->bytes <= 64 &&
                  memcmp(e->data, want, e->bytes) == 0,
              "tensor %s", three[i].name);
        check(!e || !e->bytes || (size_t)(e->data - st.data) % mtt__bytes_of((mtt_dtype)e->dtype, 1) == 0,
              "tensor %s is not aligned", three[i].name);
    }
    check(!mtt__st_find(&st.tensors, "halff") && !mtt__st_find(&st.tensors, "hal") &&
              !mtt__st_find(&st.tensors, ""),
          "a tensor that is not there");
    check(pair_is(&st, "format", "pt") && pair_is(&st, "te\nxt", "a \"b\" \xc3\xb3") &&
              strlen(mtt__st_find(&st.metadata, "crc32.half")->value) == 8 &&
              !mtt__st_find(&st.metadata, "stepp"),
          "metadata");
    mtt__st_close(&st);
    check(mtt__st_save(&env, in("none.st"), NULL, 0, "", byte_pattern, NULL) == MTT_OK &&
              mtt__st_open(&env, in("none.st"), &st) == MTT_OK && !st.tensors.count,
          "no tensors");
    mtt__st_close(&st);
    {
        static mtt__st_entry twice[] = {TENSOR("a", 0, 1, 2), TENSOR("a", MTT_U8, 1, 3)},
                             utf8[] = {TENSOR("\xff", 0, 1, 2)}, high[] = {TENSOR("a", 0, 9, 1)},
                             dtype[] = {TENSOR("a", MTT__ST_DTYPES, 1, 1)},
                             huge[] = {TENSOR("a", 0, 2, 1u << 31, 1ull << 33)},
                             meta[] = {TENSOR("__metadata__", 0, 1, 1)};
        static const char format[] = ",\"format\":\"np\"";
        check(mtt__st_save(&env, in("three"), twice, 2, "", byte_pattern, NULL) == MTT_E_ARGUMENT,
              "saves a name twice");
        check(mtt__st_save(&env, in("three"), utf8, 1, "", byte_pattern, NULL) == MTT_E_ARGUMENT,
              "saves a name that is not UTF-8");
        check(mtt__st_save(&env, in("three"), high, 1, "", byte_pattern, NULL) == MTT_E_ARGUMENT,
              "saves rank 9");
        check(mtt__st_save(&env, in("three"), dtype, 1, "", byte_pattern, NULL) == MTT_E_ARGUMENT,
              "saves a dtype that is none");
        check(mtt__st_save(&env, in("three"), huge, 1, "", byte_pattern, NULL) == MTT_E_ARGUMENT,
              "saves 2^66 bytes");
        check(mtt__st_save(&env, in("three"), meta, 1, "", byte_pattern, NULL) == MTT_E_ARGUMENT,
              "saves a tensor __metadata__");
        check(mtt__st_save(&env, in("three"), three, 5, format, byte_pattern, NULL) == MTT_E_ARGUMENT,
              "saves format twice");
        refused(mtt__st_save(&env, in("three"), three, 5, "", failing_read, &env), MTT_E_DEVICE, "gone",
                "failing source");
    }
    check(mtt__st_open(&env, in("three"), &st) == MTT_OK && mtt__st_verify(&st) == MTT_OK &&
              count_files(".") == 0,
          "refused saves leave the old file");
    mtt__st_close(&st);
}

static void st_refused(uint64_t n, const char *header, size_t size, size_t data, const char *word)
{
    char *file = (char *)calloc(1, 8 + size + data);
    mtt__st st;
    memcpy(file, &n, 8);
    memcpy(file + 8, header, size);
    write_file(in("bad.st"), file, 8 + size + data);
    refused(mtt__st_open(&env, in("bad.st"), &st), MTT_E_FORMAT, word, size < 200 ? header : "long header");
    free(file);
}

#define T(name, dtype, shape, offsets) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
static void test_st_rejections(void)
{
    static const struct {
        const char *header;
        size_t data;
        const char *word;
    } bad[] = {{"", 0, "object"},
               {"[]", 0, "object"},
               {"{", 0, "string"},
               {"{} x", 0, "something after"},
               {"{\"a\\u0000\":1}", 0, "NUL"},
               {"{\"__metadata__\":{\"a\":\"\\u0000b\"}}", 0, "NUL"},
               {"{\"a\xff\":1}", 0, "UTF-8"},
               {"{\"a\xed\xa0\x80\":1}", 0, "UTF-8"},
               {"{\"\xc0\xaf\":1}", 0, "UTF-8"},
               {"{\"\xf4\x90\x80\x80\":1}", 0, "UTF-8"},
               {"{\"a\":1}", 0, "object"},
               {"{\"a\":{}}", 0, "without dtype"},
               {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "without dtype"},
               {"{" T("a", "F32", "[1]", "[0]") "}", 4, "two data_offsets"},
               {"{" T("a", "F32", "[1]", "[0,4,4]") "}", 4, "two offsets"},
               {"{" T("a", "F32", "[-1]", "[0,4]") "}", 4, "whole number"},
               {"{" T("a", "F32", "[1.0]", "[0,4]") "}", 4, "whole number"},
               {"{" T("a", "F32", "[1e0]", "[0,4]") "}", 4, "whole number"},
               {"{" T("a", "F32", "[18446744073709551616]", "[0,4]") "}", 4, "2^64-1"},
               {"{" T("a", "F32", "[\"1\"]", "[0,4]") "}", 4, "whole number"},
               {"{" T("a", "F32", "[01]", "[0,4]") "}", 4, "whole number"},
               {"{" T("a", "F32", "1", "[0,4]") "}", 4, "array"},
               {"{" T("a", "F128", "[1]", "[0,16]") "}", 16, "F128"},
               {"{" T("a", "I64", "[1]", "[0,4]") "}", 4, "do not match"},
               {"{" T("a", "F4", "[1]", "[0,1]") "}", 1, "part of a byte"},
               {"{" T("a", "F6_E2M3", "[2]", "[0,2]") "}", 2, "part of a byte"},
               {"{" T("a", "F6_E3M2", "[4]", "[0,4]") "}", 4, "do not match"},
               {"{\"__metadata__\":nul}", 0, "value"},
               {"{\"__metadata__\":null,\"__metadata__\":{}}", 0, "twice"},
               {"{" T("a", "f32", "[1]", "[0,4]") "}", 4, "f32"},
               {"{\"a\":{\"dtype\":5,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "string"},
               {"{\"__metadata__\":{\"a\":1}}", 0, "string"},
               {"{\"__metadata__\":[]}", 0, "object"},
               {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "twice"},
               {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "twice"},
               {"{" T("a", "U8", "[1]", "[0,1]") "," T("a", "U8", "[1]", "[1,2]") "}", 2, "twice"},
               {"{" T("a", "U8", "[1]", "[0,1]") "," T("\\u0061", "U8", "[1]", "[1,2]") "}", 2, "twice"},
               {"{" T("a", "U8", "[0]", "[0,0]") "," T("a", "U8", "[0]", "[0,0]") "}", 0, "twice"},
               {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
                "twice"},
               {"{" T("a", "U8", "[1]", "[1,2]") "}", 2, "hole"},
               {"{" T("a", "U8", "[2]", "[0,2]") "," T("b", "U8", "[2]", "[3,5]") "}", 5, "hole"},
               {"{" T("a", "U8", "[2]", "[0,2]") "," T("b", "U8", "[2]", "[1,3]") "}", 3, "overlap"},
               {"{" T("a", "U8", "[2]", "[0,2]") "," T("b", "U8", "[2]", "[0,2]") "}", 2, "overlap"},
               {"{" T("a", "U8", "[2]", "[0,2]") "," T("b", "U8", "[1]", "[2,1]") "}", 2, "before its begin"},
               {"{" T("a", "F32", "[4294967296,4294967296]", "[0,4]") "}", 4, "overflows"},
               {"{" T("a", "U8", "[9223372036854775808,2,0]", "[0,0]") "}", 0, "overflows"},
               {"{" T("a", "F32", "[4611686018427387904]", "[0,0]") "}", 0, "overflows"},
               {"{" T("a", "F32", "[2]", "[0,4]") "}", 4, "shape"},
               {"{" T("a", "F32", "[1]", "[0,8]") "}", 8, "shape"},
               {"{" T("a", "U8", "[3]", "[0,3]") "}", 2, "missing"},
               {"{" T("a", "U8", "[3]", "[0,3]") "}", 4, "extra bytes"},
               {"{}", 1, "extra"},
               {"{" T("a", "U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]") "}", 1, "rank 8"},
               {"{" T("a", "U8", "[18446744073709551615]", "[0,18446744073709551615]") "}", 8, "missing"}};
    static const char *const good[] = {"{}", "  {}  ", "{\"__metadata__\":{}}", "{\"__metadata__\":null}",
                                       "{" T("a", "F4", "[0,3]", "[0,0]") "}",
                                       "\n\t{" T("a", "U8", "[0]", "[0,0]") "}\r\n"};
    mtt__st st;
    char *header, *at;
    size_t i;
    for (i = 0; i < 8; i++) {
        write_file(in("bad.st"), "\0\0\0\0\0\0\0", i);
        refused(mtt__st_open(&env, in("bad.st"), &st), MTT_E_FORMAT, "does not fit", "short file");
    }
    st_refused((16u << 20) + 1, "{}", 2, 0, "does not fit");
    st_refused(UINT64_MAX, "{}", 2, 0, "does not fit");
    st_refused(3, "{}", 2, 0, "does not fit");
    st_refused(100000001, "{}", 2, 0, "does not fit");
    for (i = 0; i < MTT__LENGTH(bad); i++)
        st_refused(strlen(bad[i].header), bad[i].header, strlen(bad[i].header), bad[i].data, bad[i].word);
    for (i = 0; i < MTT__LENGTH(good); i++) {
        char file[200];
        uint64_t n = strlen(good[i]);
        memcpy(file, &n, 8);
        memcpy(file + 8, good[i], (size_t)n);
        write_file(in("good.st"), file, 8 + (size_t)n);
        check(mtt__st_open(&env, in("good.st"), &st) == MTT_OK, "%s: %s", good[i], env.error);
        check(mtt__st_verify(&st) == MTT_E_FORMAT, "%s: verified without checksums", good[i]);
        mtt__st_close(&st);
    }
    header = (char *)malloc(9 << 20);
    at = header + sprintf(header, "{\"");
    memset(at, 'n', 513);
    strcpy(at + 513, "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}");
    st_refused(strlen(header), header, strlen(header), 1, "512 bytes");
    memmove(at, at + 1, strlen(at));
    {
        char *file = (char *)malloc(8 + strlen(header) + 1);
        uint64_t n = strlen(header);
        memcpy(file, &n, 8);
        memcpy(file + 8, header, (size_t)n);
        file[8 + n] = 0;
        write_file(in("good.st"), file, 9 + (size_t)n);
        check(mtt__st_open(&env, in("good.st"), &st) == MTT_OK && strlen(st.tensors.at[0].name) == 512,
              "a name of 512 bytes: %s", env.error);
        mtt__st_close(&st);
        free(file);
    }
    for (at = header + sprintf(header, "{"), i = 0; i <= 131072; i++)
        at += sprintf(at, "%s\"%x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}", i ? "," : "",
                      (unsigned)i);
    strcpy(at, "}");
    st_refused(strlen(header), header, strlen(header), 0, "131072");
    free(header);
}

static void test_st_damage(void)
{
    char *file = NULL, extra[16] = {0};
    size_t bytes = 0, i, data_at, accepted = 0, flips = 0, found = 0;
    mtt__st st;
    int fd;
    check(save_three(&env) == MTT_OK && get_file(in("three"), &file, &bytes) == MTT_OK,
          "no file to damage");
    check(mtt__st_open(&env, in("three"), &st) == MTT_OK, "%s", env.error);
    data_at = (size_t)((const char *)st.data - st.map.data);
    mtt__st_close(&st);
    write_file(in("damaged"), file, bytes);
    fd = open(in("damaged"), O_RDWR);
    for (i = bytes; i-- > 0;) {
        check(ftruncate(fd, (off_t)i) == 0 && mtt__st_open(&env, in("damaged"), &st) == MTT_E_FORMAT,
              "cut at %zu, passes", i);
    }
    check(pwrite(fd, file, bytes, 0) == (ssize_t)bytes, "restored");
    for (i = 1; i <= 16; i++)
        check(pwrite(fd, extra, i, (off_t)bytes) == (ssize_t)i &&
                  mtt__st_open(&env, in("damaged"), &st) == MTT_E_FORMAT,
              "%zu bytes more, passes", i);
    check(ftruncate(fd, (off_t)bytes) == 0, "restored");
    for (i = data_at * 8; i < bytes * 8; i++, flips++) {
        char flipped = (char)(file[i / 8] ^ 1 << i % 8);
        check(pwrite(fd, &flipped, 1, (off_t)(i / 8)) == 1, "flip");
        check(mtt__st_open(&env, in("damaged"), &st) == MTT_OK,
              "a flip of data is no fault of the format: %s", env.error);
        found += mtt__st_verify(&st) == MTT_E_FORMAT;
        mtt__st_close(&st);
        check(pwrite(fd, file + i / 8, 1, (off_t)(i / 8)) == 1, "restored");
    }
    check(found == flips, "%zu of %zu data flips found", found, flips);
    for (i = 0; memcmp(file + i, "\"120\"", 5) != 0; i++) {
    }
    check(pwrite(fd, "121", 3, (off_t)i + 1) == 3 && mtt__st_open(&env, in("damaged"), &st) == MTT_OK, "%s",
          env.error);
    refused(mtt__st_verify(&st), MTT_E_FORMAT, "the metadata", "a step that was changed");
    mtt__st_close(&st);
    check(pwrite(fd, file + i, 5, (off_t)i) == 5, "restored");
    for (i = 0; i < 20000; i++) {
        size_t at = (size_t)below((int)bytes);
        char byte = (char)below(256);
        if (pwrite(fd, &byte, 1, (off_t)at) != 1) break;
        if (mtt__st_open(&env, in("damaged"), &st) == MTT_OK) {
            accepted += mtt__st_verify(&st) == MTT_OK;
            mtt__st_close(&st);
        }
        if (pwrite(fd, file + at, 1, (off_t)at) != 1) break;
    }
    check(i == 20000, "mutations stopped at %zu", i);
    printf("safetensors: all %zu data flips found; %zu of 20000 mutations are harmless (names, text)\n",
           found, accepted);
    close(fd);
    free(file);
}

/* ---- a trainer's checkpoint ---- */

typedef struct small_run {
    mtt_model_desc model;
    mtt_policy policy;
    mtt_trainer *trainer;
    mtt_batches batches;
} small_run;

/* A trainer after two steps, with a loader of the file `tokens`. */
static small_run open_run(mtt_precision precision, mtt_state kept, int other_model, const mtt_tokens *tokens)
{
    small_run r;
    mtt_optim_desc optim;
    int32_t ids[2 * 8], targets[2 * 8];
    int i;
    memset(&r, 0, sizeof(r));
    memset(&optim, 0, sizeof(optim));
    r.model.layers = r.model.heads = 1;
    r.model.d_model = 16;
    r.model.vocab = 60 + 943 * other_model;
    r.model.positions = other_model ? MTT_POSITIONS_LEARNED : MTT_POSITIONS_SINUSOIDAL;
    r.model.tied_head = other_model;
    r.policy.precision = precision;
    r.policy.state = kept;
    check(mtt_trainer_create(&env, &r.model, &r.policy, &optim, mtt_cpu_backend(), 2, 8, &r.trainer) ==
              MTT_OK && mtt_batches_init(&env, &r.batches, tokens, 2, 8, 0, 0) == MTT_OK,
          "%s", env.error);
    for (i = 0; i < 2; i++)
        check(mtt_batches_next(&r.batches, ids, targets) == MTT_OK &&
                  mtt_train_step(r.trainer, ids, targets, NULL) == MTT_OK,
              "%s", env.error);
    return r;
}

/* A token file whose ids lie below 60. */
static mtt_tokens *small_tokens(const char *name, unsigned first)
{
    unsigned char file[64 + 2 * 500];
    mtt_tokens *t = NULL;
    size_t i, size = token_file(file, 1, 16, 500, 60, 2 * 500);
    for (i = 0; i < 500; i++) file[64 + 2 * i] = (unsigned char)((first + i * 7) % 60);
    write_tokens(name, file, size);
    check(mtt_tokens_open(&env, in(name), &t) == MTT_OK, "%s", env.error);
    return t;
}

/* mtt_checkpoint_bytes is the size of the file, whatever the policy, the step and the batches. */
static void test_checkpoint_bytes(const mtt_tokens *tokens)
{
    struct stat info;
    int i, k;
    for (i = 0; i < 12; i++) {
        small_run r = open_run((mtt_precision)(i % 4), (mtt_state)(i / 4 % 2), i / 8, tokens);
        uint64_t want = mtt_checkpoint_bytes(r.trainer);
        for (k = 0; k < 3; k++) {
            if (k == 2) r.trainer->step = r.trainer->micro_batch = (int64_t)1 << 62;
            if (k == 2) r.trainer->optim.seed = UINT64_MAX;
            check(mtt_save(r.trainer, in("sized"), k ? &r.batches : NULL) == MTT_OK &&
                      stat(in("sized"), &info) == 0 && (uint64_t)info.st_size == want &&
                      mtt_checkpoint_bytes(r.trainer) == want && want > 1000,
                  "policy %d, %d: %lld bytes, not %lld: %s", i, k, (long long)info.st_size, (long long)want,
                  env.error);
        }
        mtt_trainer_destroy(r.trainer);
    }
}

/* The checksum behind the text `key` of a header becomes that of the data or of the metadata. */
static void seal(char *file, size_t bytes, const char *key)
{
    mtt__st st;
    const mtt__st_entry *e;
    char text[64], hex[9], *at;
    write_file(in("forged"), file, bytes);
    check(mtt__st_open(&env, in("forged"), &st) == MTT_OK, "forged: %s", env.error);
    e = mtt__st_find(&st.tensors, key);
    snprintf(text, sizeof(text), e ? "\"crc32.%s\":\"" : "\"crc32\":\"", key);
    at = strstr(file + 8, text);
    snprintf(hex, sizeof(hex), "%08x",
             (unsigned)(e ? mtt__crc32(&st.crc, 0, e->data, e->bytes) : st.metadata_crc));
    memcpy(at + strlen(text), hex, 8);
    mtt__st_close(&st);
    write_file(in("forged"), file, bytes);
}

/* A pair of the metadata gets another value, or comes to it; blanks behind the metadata give the room. */
static void forge_pair(const char *key, const char *value)
{
    ptrdiff_t grow;
    size_t bytes;
    char text[64], *file = read_file(in("good"), &bytes), *at, *end, *blanks;
    snprintf(text, sizeof(text), "\"%s\":\"", key);
    at = strstr(file + 8, text);
    if (!at) {
        at = strstr(file + 8, "    ");
        *at++ = ',';
        memcpy(at, text, strlen(text));
        at[strlen(text)] = '"';
    }
    at += strlen(text);
    end = strchr(at, '"');
    blanks = strstr(end, "    ");
    grow = (ptrdiff_t)strlen(value) - (end - at);
    memmove(end + grow, end, (size_t)(blanks - end));
    if (grow < 0) memset(blanks + grow, ' ', (size_t)-grow);
    memcpy(at, value, strlen(value));
    seal(file, bytes, "");
    free(file);
}

static void forge_value(const char *tensor, size_t element, float value)
{
    size_t bytes;
    char *file = read_file(in("good"), &bytes);
    mtt__st st;
    const unsigned char *data;
    check(mtt__st_open(&env, in("good"), &st) == MTT_OK, "%s", env.error);
    data = mtt__st_find(&st.tensors, tensor)->data;
    memcpy(file + ((const char *)data - st.map.data) + 4 * element, &value, 4);
    mtt__st_close(&st);
    seal(file, bytes, tensor);
    free(file);
}

static void not_resumed(small_run *r, const char *path, mtt_status want, const char *word, const char *what)
{
    float before[60 * 16], after[60 * 16];
    mtt_parameter_get(r->trainer, 0, before);
    refused(mtt_resume(r->trainer, in(path), &r->batches), want, word, what);
    mtt_parameter_get(r->trainer, 0, after);
    check(memcmp(before, after, sizeof(before)) == 0 && mtt_trainer_step(r->trainer) == 2,
          "%s: a refused file changes the trainer", what);
}

/* Files with the right checksums whose numbers no run has left. */
static void test_forged(const mtt_tokens *tokens)
{
    static const char *const pairs[][3] = {
        {"step", "4611686018427387904", "4611686018427387905"},
        {"micro_batch", "4611686018427387904", "9223372036854775807"},
        {"updates", "4611686018427387904", "9223372036854775807"},
        {"good_steps", "1073741824", "2147483647"},
        {"batches.cursor", "4611686018427387904", "18446744073709551615"},
        {"loss_scale_bits", "1065353216", "2139095040"},
    };
    static const struct {
        const char *tensor;
        size_t element;
        float value;
        const char *word;
    } values[] = {
        {"wte.weight", 7, NAN, "element 7 of wte.weight is NaN"},
        {"wte.weight", 959, INFINITY, "element 959 of wte.weight is Inf"},
        {"ln_f.bias", 0, -INFINITY, "element 0 of ln_f.bias is -Inf"},
        {"optim.m.ln_f.bias", 15, NAN, "element 15 of optim.m.ln_f.bias"},
        {"optim.v.wte.weight", 3, -1e-30f, "element 3 of optim.v.wte.weight is -"},
        {"optim.v.ln_f.bias", 2, INFINITY, "element 2 of optim.v.ln_f.bias is Inf"},
    };
    small_run r = open_run(MTT_FP32, MTT_STATE_FULL, 0, tokens);
    size_t i, bytes;
    char *file, *at;
    check(mtt_save(r.trainer, in("good"), &r.batches) == MTT_OK, "%s", env.error);
    for (i = 0; i < MTT__LENGTH(pairs); i++) {
        forge_pair(pairs[i][0], pairs[i][2]);
        not_resumed(&r, "forged", MTT_E_FORMAT, pairs[i][0], pairs[i][0]);
    }
    for (i = 0; i < MTT__LENGTH(values); i++) {
        forge_value(values[i].tensor, values[i].element, values[i].value);
        not_resumed(&r, "forged", MTT_E_FORMAT, values[i].word, values[i].tensor);
    }
    forge_value("wte.weight", 7, 0.5f);
    check(mtt_resume(r.trainer, in("forged"), &r.batches) == MTT_OK, "a value in range: %s", env.error);
    file = read_file(in("good"), &bytes); /* as other programs write it: without checksums */
    while ((at = strstr(file + 8, ",\"crc32."))) memset(at, ' ', strcspn(at + 1, ",}") + 1);
    write_file(in("forged"), file, bytes);
    not_resumed(&r, "forged", MTT_E_FORMAT, "has no checksum", "a file without checksums");
    free(file);
    for (i = 0; i < MTT__LENGTH(pairs); i++) { /* the largest numbers from which training continues */
        int32_t ids[2 * 8], targets[2 * 8];
        mtt_step_info info;
        forge_pair(pairs[i][0], pairs[i][1]);
        check(mtt_resume(r.trainer, in("forged"), &r.batches) == MTT_OK &&
                  mtt_batches_next(&r.batches, ids, targets) == MTT_OK &&
                  mtt_train_step(r.trainer, ids, targets, &info) == MTT_OK && info.step > 2,
              "%s %s: %s", pairs[i][0], pairs[i][1], env.error);
    }
    mtt_trainer_destroy(r.trainer);
}

/* A checkpoint goes on with its optimizer alone, and names any but AdamW. */
static void test_optimizers(const mtt_tokens *tokens)
{
    small_run r = open_run(MTT_FP32, MTT_STATE_FULL, 0, tokens);
    mtt_optimizer *other = &r.trainer->schedule->policy.optimizer;
    const int number = 1; /* of no optimizer yet */
    check(mtt_save(r.trainer, in("good"), &r.batches) == MTT_OK, "%s", env.error);
    forge_pair("optimizer", "lion");
    not_resumed(&r, "forged", MTT_E_MISMATCH, "has optimizer lion, here it is adamw: use its run's", "Lion");
    forge_pair("optimizer", "adamw");
    check(mtt_resume(r.trainer, in("forged"), &r.batches) == MTT_OK, "AdamW by name: %s", env.error);
    memcpy(other, &number, sizeof(number));
    not_resumed(&r, "good", MTT_E_MISMATCH, "has optimizer adamw, here it is 1", "AdamW without a name");
    check(mtt_save(r.trainer, in("other"), &r.batches) == MTT_OK &&
              mtt_resume(r.trainer, in("other"), &r.batches) == MTT_OK, "%s", env.error);
    *other = MTT_ADAMW;
    not_resumed(&r, "other", MTT_E_MISMATCH, "has optimizer 1, here it is adamw", "another optimizer");
    mtt_trainer_destroy(r.trainer);
}

/* A number that a file may lack is refused by its key if it is there and no number in range. No reader takes
   a default in its place. */
static void test_optional_numbers(const mtt_tokens *tokens)
{
    static const char *const wrong[] = {"", "one", "yes", "5x", "-1", "1.5", "99999999999",
                                        "18446744073709551616"};
    static const struct {
        const char *key, *right, *wrong;
        int readers; /* 1 = mtt_model_open, 2 = mtt_resume */
    } more[] = {
        {"window", "2147483647", "2147483648", 3},   {"context", "1048576", "1048577", 3},
        {"batches.seq_len", NULL, "2147483647", 3},  {"batches.seq_len", NULL, "0", 3},
        {"context", "8", "0", 3},                    {"qk_norm", "0", "2", 3},
        {"no_biases", "0", "2", 3},                  {"mlp", "0", "4", 3},
        {"heads_kv", "1", "1025", 3},                {"heads_kv", "1", "0", 3},
        {"groups", NULL, "x", 2},                    {"lora_rank", NULL, "x", 2},
        {"lora_alpha_bits", NULL, "x", 2},           {"batches.crc32", NULL, "x", 2},
        {"norm_eps_bits", "925353388", "4286578688", 3}, /* 1e-5 and -Inf */
        {"norm_eps_bits", "925353388", "2139095040", 3}, /* Inf */
        {"norm_eps_bits", "925353388", "2143289344", 3}, /* NaN */
        {"norm_eps_bits", "925353388", "0", 3},      {"norm_eps_bits", "925353388", "1", 3},
        {"rotary_theta_bits", "1176256512", "0", 3}, {"rotary_theta_bits", "1176256512", "2139095040", 3},
        {"rotary_factor_bits", "1065353216", "0", 3}, {"rotary_low_bits", "1065353216", "2143289344", 3},
        {"rotary_high_bits", "1082130432", "4294967295", 3},
        {"rotary_original_bits", "1174405120", "3212836864", 3},
    };
    small_run r = open_run(MTT_FP32, MTT_STATE_FULL, 0, tokens);
    const mtt_field *f;
    mtt_model *model = NULL;
    mtt_status status;
    char name[48];
    size_t i;
    check(mtt_save(r.trainer, in("good"), &r.batches) == MTT_OK, "%s", env.error);
    for (f = mtt_model_fields(); f->name; f++)
        for (i = 0; i < MTT__LENGTH(wrong); i++) {
            char key[48];
            snprintf(key, sizeof(key), f->kind == MTT_FIELD_FLOAT ? "%s_bits" : "%s", f->name);
            forge_pair(key, wrong[i]);
            refused(mtt_model_open(&env, in("forged"), &model), MTT_E_FORMAT, key, wrong[i]);
            if (strcmp(key, "dropout_bits") == 0) continue; /* it may differ on resume */
            *env.error = 0;
            status = mtt_resume(r.trainer, in("forged"), &r.batches);
            check((status == MTT_E_FORMAT || (i > 5 && status == MTT_E_MISMATCH)) &&
                      strstr(env.error, f->name), "resumed: %s \"%s\": %s", key, wrong[i], env.error);
        }
    for (i = 0; i < MTT__LENGTH(more); i++) {
        if (more[i].right) {
            forge_pair(more[i].key, more[i].right);
            check(mtt_model_open(&env, in("forged"), &model) == MTT_OK &&
                      mtt_resume(r.trainer, in("forged"), &r.batches) == MTT_OK,
                  "%s %s: %s", more[i].key, more[i].right, env.error);
            mtt_model_close(model);
        }
        forge_pair(more[i].key, more[i].wrong);
        if (more[i].readers & 1)
            refused(mtt_model_open(&env, in("forged"), &model), MTT_E_FORMAT, more[i].key, more[i].wrong);
        *env.error = 0;
        status = mtt_resume(r.trainer, in("forged"), &r.batches);
        check(status == MTT_E_FORMAT || status == MTT_E_MISMATCH, "resumed: %s", more[i].key);
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(more[i].key, "_"), more[i].key);
        check(strstr(env.error, name) != NULL, "%s: %s", more[i].key, env.error);
    }
    mtt_trainer_destroy(r.trainer);
}

/* A note travels with checkpoints and merged files, and changes nothing else of them. */
static void test_notes(const mtt_tokens *tokens)
{
    static const char text[] = "{\"chat\": \"\\\" za\xc5\xbc\xc3\xb3\xc5\x82\xc4\x87\n\t\x01/\"}";
    small_run r = open_run(MTT_FP32, MTT_STATE_FULL, 0, tokens), s = open_run(MTT_BF16, MTT_STATE_COMPACT, 0,
                                                                              tokens);
    mtt_model *model = NULL;
    struct stat info;
    char *plain, *again, *large = (char *)malloc(4 << 20);
    size_t sizes[2];
    check(!mtt_save(r.trainer, in("good"), &r.batches) && !mtt_model_open(&env, in("good"), &model) &&
              !mtt_model_note(model), "without a note: %s", env.error);
    mtt_model_close(model);
    check(!mtt_trainer_set_note(r.trainer, text) && !mtt_save(r.trainer, in("noted"), &r.batches) &&
              !stat(in("noted"), &info) && (uint64_t)info.st_size == mtt_checkpoint_bytes(r.trainer),
          "its size is known: %s", env.error);
    check(!mtt_resume(s.trainer, in("noted"), &s.batches) && !mtt_save_merged(s.trainer, in("merged")) &&
              !mtt_model_open(&env, in("merged"), &model) && mtt_model_note(model) &&
              !strcmp(mtt_model_note(model), text), "saved, resumed, merged: %s", env.error);
    mtt_model_close(model);
    check(!mtt_resume(s.trainer, in("good"), &s.batches) && !mtt_save(s.trainer, in("merged"), NULL) &&
              !mtt_model_open(&env, in("merged"), &model) && mtt_model_note(model),
          "a file without one leaves it: %s", env.error);
    mtt_model_close(model);
    memset(large, 'a', 4 << 20);
    large[(4 << 20) - 10] = 0; /* ,"note":"" around it */
    refused(mtt_trainer_set_note(r.trainer, large), MTT_E_ARGUMENT, "at most 4 MiB", "too long a note");
    large[(4 << 20) - 11] = 0;
    check(!mtt_trainer_set_note(r.trainer, large) && !mtt_save(r.trainer, in("noted"), &r.batches) &&
              !mtt_model_open(&env, in("noted"), &model) && !strcmp(mtt_model_note(model), large),
          "the longest note: %s", env.error);
    mtt_model_close(model);
    refused(mtt_trainer_set_note(r.trainer, "a\xff"), MTT_E_ARGUMENT, "must be UTF-8", "bytes that are none");
    check(!mtt_trainer_set_note(r.trainer, NULL) && !mtt_save(r.trainer, in("noted"), &r.batches), "%s",
          env.error);
    plain = read_file(in("good"), &sizes[0]), again = read_file(in("noted"), &sizes[1]);
    check(sizes[0] == sizes[1] && !memcmp(plain, again, sizes[0]), "no note: other bytes");
    free(plain), free(again), free(large);
    mtt_trainer_destroy(r.trainer);
    mtt_trainer_destroy(s.trainer);
}

/* A pair of the metadata goes, as in a file of a version that did not have it. */
static void drop_pair(const char *key)
{
    size_t bytes;
    char text[64], *file = read_file(in("good"), &bytes), *at;
    snprintf(text, sizeof(text), ",\"%s\":\"", key);
    at = strstr(file + 8, text);
    memset(at, ' ', strcspn(at + 1, ",}") + 1);
    seal(file, bytes, "");
    free(file);
}

/* A file without a field that came later means its default. Sizes and counters are in every file. */
static void test_older_checkpoints(const mtt_tokens *tokens)
{
    static const char *const always[] = {"layers",    "heads",       "d_model",        "d_ff",
                                         "vocab",     "max_seq",     "step",           "updates",
                                         "seed",      "micro_batch", "batches.cursor", "batches.seq_len"};
    static const char *const later[] = {"positions", "tied_head", "no_head_bias"};
    small_run r = open_run(MTT_FP32, MTT_STATE_FULL, 0, tokens);
    small_run other = open_run(MTT_FP32, MTT_STATE_FULL, 1, tokens); /* learned positions, tied head */
    size_t i;
    check(mtt_save(r.trainer, in("good"), &r.batches) == MTT_OK, "%s", env.error);
    for (i = 0; i < MTT__LENGTH(always); i++) {
        drop_pair(always[i]);
        not_resumed(&r, "forged", MTT_E_MISMATCH, always[i], always[i]);
        refused(MTT_E_MISMATCH, MTT_E_MISMATCH, "give a checkpoint of mtt_save", always[i]);
    }
    for (i = 0; i < MTT__LENGTH(later); i++) {
        drop_pair(later[i]);
        check(mtt_resume(r.trainer, in("forged"), &r.batches) == MTT_OK, "no %s: %s", later[i], env.error);
    }
    check(mtt_save(other.trainer, in("good"), &other.batches) == MTT_OK, "%s", env.error);
    for (i = 0; i < MTT__LENGTH(later); i++) {
        mtt_status status;
        drop_pair(later[i]);
        status = mtt_resume(other.trainer, in("forged"), &other.batches);
        if (i == 2) check(status == MTT_OK, "no %s: %s", later[i], env.error);
        else refused(status, MTT_E_MISMATCH, later[i], "not the default");
    }
    mtt_trainer_destroy(r.trainer);
    mtt_trainer_destroy(other.trainer);
}

/* A checkpoint does not continue with other data of the same length. */
static void test_other_data(const mtt_tokens *tokens)
{
    mtt_tokens *other = small_tokens("other", 1);
    small_run r = open_run(MTT_FP32, MTT_STATE_FULL, 0, tokens);
    small_run s = open_run(MTT_FP32, MTT_STATE_FULL, 0, other);
    check(mtt_save(r.trainer, in("good"), &r.batches) == MTT_OK, "%s", env.error);
    not_resumed(&s, "good", MTT_E_MISMATCH, "batches.crc32", "other data");
    refused(MTT_E_MISMATCH, MTT_E_MISMATCH, "use the model and the data of its run", "other data");
    check(mtt_resume(s.trainer, in("good"), &r.batches) == MTT_OK, "its own data: %s", env.error);
    check(mtt_resume(s.trainer, in("good"), NULL) == MTT_OK, "no data: %s", env.error);
    mtt_trainer_destroy(r.trainer);
    mtt_trainer_destroy(s.trainer);
    mtt_tokens_close(other);
}

/* Settings that differ are shown as numbers, choices in words. */
static void test_other_settings(const mtt_tokens *tokens)
{
    static const mtt_optim_desc optim = {0};
    small_run r = open_run(MTT_FP32, MTT_STATE_FULL, 0, tokens), s = r;
    const mtt_policy adapters[] = {{.lora_rank = 8, .lora_alpha = 10}, {.lora_rank = 8, .lora_alpha = 20.5f}};
    mtt_trainer *two[2];
    int i;
    s.model.norm_eps = 2e-5f;
    check(!mtt_trainer_create(&env, &s.model, &s.policy, &optim, mtt_cpu_backend(), 2, 8, &s.trainer) &&
              !mtt_save(s.trainer, in("good"), NULL), "%s", env.error);
    not_resumed(&r, "good", MTT_E_MISMATCH, "has norm_eps 2e-05, here it is 1e-05", "another eps");
    mtt_trainer_destroy(s.trainer);
    s.model.norm_eps = r.model.norm_eps;
    s.model.norm_place = MTT_NORM_POST;
    check(!mtt_trainer_create(&env, &s.model, &s.policy, &optim, mtt_cpu_backend(), 2, 8, &s.trainer) &&
              !mtt_save(s.trainer, in("good"), NULL), "%s", env.error);
    not_resumed(&r, "good", MTT_E_MISMATCH, "has norm_place post, here it is pre: use its run's",
                "another place");
    for (i = 0; i < 2; i++)
        check(!mtt_trainer_create(&env, &r.model, &adapters[i], &optim, mtt_cpu_backend(), 2, 8, &two[i]),
              "%s", env.error);
    check(!mtt_save(two[0], in("good"), NULL), "%s", env.error);
    refused(mtt_resume(two[1], in("good"), NULL), MTT_E_MISMATCH, "has lora_alpha 10, here it is 20.5",
            "another alpha");
    for (i = 0; i < 2; i++) mtt_trainer_destroy(two[i]);
    mtt_trainer_destroy(r.trainer);
    mtt_trainer_destroy(s.trainer);
}

/* An optimizer that keeps no second moment: a checkpoint has none, and no other tensor in its place. */
static void test_fewer_kept(const mtt_tokens *tokens)
{
    small_run r = open_run(MTT_FP32, MTT_STATE_FULL, 0, tokens);
    mtt_tensor **kept = r.trainer->schedule->programs[MTT__TRAIN].optim, *second = kept[MTT__SECOND];
    mtt__st st;
    kept[MTT__SECOND] = NULL;
    check(!mtt_save(r.trainer, in("fewer"), NULL) && !mtt__st_open(&env, in("fewer"), &st), "%s", env.error);
    check(mtt__st_find(&st.tensors, "optim.m.wte.weight") && !mtt__st_find(&st.tensors, "optim.v.wte.weight"),
          "a tensor that does not exist is in the checkpoint");
    mtt__st_close(&st);
    check(!mtt_resume(r.trainer, in("fewer"), NULL), "a checkpoint without second moments: %s", env.error);
    kept[MTT__SECOND] = second;
    mtt_trainer_destroy(r.trainer);
}

static void test_checkpoints(void)
{
    mtt_tokens *tokens = small_tokens("tokens", 0);
    test_other_settings(tokens);
    test_fewer_kept(tokens);
    test_checkpoint_bytes(tokens);
    test_forged(tokens);
    test_optimizers(tokens);
    test_optional_numbers(tokens);
    test_notes(tokens);
    test_older_checkpoints(tokens);
    test_other_data(tokens);
    mtt_tokens_close(tokens);
}

/* ---- death in the middle of a save ---- */

enum { KILLED_WORDS = 1 << 19 };

static mtt_status generation(void *user, size_t tensor, size_t offset, void *buffer, size_t bytes)
{
    uint32_t value = *(uint32_t *)user;
    size_t i;
    (void)tensor, (void)offset;
    for (i = 0; i < bytes; i += 4) memcpy((char *)buffer + i, &value, 4);
    return MTT_OK;
}

static mtt_status save_generation(uint32_t value)
{
    mtt__st_entry two[] = {TENSOR("a", 0, 1, KILLED_WORDS), TENSOR("b", 0, 1, KILLED_WORDS)};
    return mtt__st_save(&env, in("killed"), two, 2, "", generation, &value);
}

/* The generation that the file holds, or -1 if it is not whole. */
static int64_t generation_there(void)
{
    mtt__st st;
    uint32_t first = 0, word;
    size_t i;
    int whole;
    if (mtt__st_open(&env, in("killed"), &st)) return -1;
    memcpy(&first, st.data, 4);
    whole = mtt__st_verify(&st) == MTT_OK && st.tensors.count == 2;
    for (i = 0; i < 2 * KILLED_WORDS && whole; i++) {
        memcpy(&word, st.data + 4 * i, 4);
        whole = word == first;
    }
    mtt__st_close(&st);
    return whole ? (int64_t)first : -1;
}

/* A process is killed at every change of a save, before the call or after half of it. The moment does not
   depend on time. */
static void test_kills(void)
{
    int k, half, state, kills = 0, olds = 0, news = 0;
    check(save_generation(1) == MTT_OK, "first save: %s", env.error);
    for (half = 0; half < 2; half++)
        for (k = 1, state = -1; state && k < 100; k++) {
            int64_t before = generation_there(), after;
            pid_t child = fork();
            if (child == 0) {
                die_at = k, die_half = half, changes = 0;
                _exit(save_generation((uint32_t)before + 1) != MTT_OK);
            }
            check(waitpid(child, &state, 0) == child && (!state || WTERMSIG(state) == SIGKILL), "child");
            after = generation_there();
            check(before > 0 && (after == before + 1 || (state && after == before)),
                  "change %d: generation %d after %d", k, (int)after, (int)before);
            kills += state != 0;
            olds += state && after == before;
            news += state && after > before;
        }
    check(save_generation(1) == MTT_OK && count_files(".killed") == 0, "what the dead left is still there");
    check(olds >= 16 && news >= 2, "%d kills before the rename, %d after it", olds, news);
    printf("killed %d times while saving 4 MiB: %d times the old file was whole, %d times the new one\n",
           kills, olds, news);
}

/* ---- modes for the Python check ---- */

static int dump(const char *path)
{
    mtt__crc_table table;
    mtt__st st;
    size_t i;
    int k;
    if (mtt__st_open(&env, path, &st) || (mtt__st_find(&st.metadata, "crc32") && mtt__st_verify(&st)))
        return printf("refused: %s\n", env.error), 1;
    mtt__crc_init(&table);
    for (i = 0; i < st.tensors.count; i++) {
        const mtt__st_entry *e = &st.tensors.at[i];
        for (k = 0; e->name[k]; k++) printf("%02x", (unsigned char)e->name[k]);
        printf(" %s [", mtt__st_dtype[e->dtype].name);
        for (k = 0; k < e->rank; k++) printf("%s%llu", k ? "," : "", (unsigned long long)e->shape[k]);
        printf("] %08x\n", (unsigned)mtt__crc32(&table, 0, e->data, e->bytes));
    }
    mtt__st_close(&st);
    return 0;
}

static int dump_corpus(const char *path, const char *field)
{
    mtt__crc_table table;
    mtt__corpus *c;
    const char *text;
    size_t bytes;
    mtt_status status = mtt__corpus_open(&env, path, field, END_OF_TEXT, &c);
    mtt__crc_init(&table);
    while (!status) {
        status = mtt__corpus_next(c, &text, &bytes);
        if (!status) printf("%zu %08x\n", bytes, (unsigned)mtt__crc32(&table, 0, text, bytes));
    }
    mtt__corpus_close(c);
    if (status != MTT_END) printf("refused: %s\n", env.error);
    return status != MTT_END;
}

int main(int argc, char **argv)
{
    int home = open(".", O_RDONLY);
    if (argc == 3 && !strcmp(argv[1], "dump")) return dump(argv[2]);
    if (argc == 4 && !strcmp(argv[1], "corpus")) return dump_corpus(argv[2], argv[3]);
    if (argc == 3 && !strcmp(argv[1], "write"))
        return mtt__st_save(&env, argv[2], three, 5, notes, byte_pattern, NULL) != MTT_OK;
    if (!open_folder()) return finish();
    test_json();
    test_json_values();
    test_files_plain();
    check(fchdir(home) == 0, "back");
    test_write_faults();
    test_jsonl();
    test_blanks();
    test_pieces();
    test_refusals();
    test_devices();
    test_plain();
    test_short_texts();
    test_speakleash();
    test_tokens();
    test_tokens_copy();
    test_token_damage();
    test_tokens_in_use();
    test_split();
    test_batches();
    test_prepare();
    test_encodings();
    test_ends_of_text();
    test_ends_of_fields();
    test_prepare_ends();
    test_prepare_failures();
    test_stale_options();
    test_stale_files();
    test_deaths(1, 0);
    test_deaths(0, 0);
    test_deaths(1, 1);
    test_prepare_faults();
    test_dataset();
    test_progress();
    test_old_dataset();
    test_changing_text();
    test_round_trip();
    test_st_rejections();
    test_st_damage();
    test_checkpoints();
    every_allocation(save_and_load, "safetensors");
    write_file(in("corpus"), "{\"text\":\"a\"}\n", 13);
    every_allocation(read_corpus, "corpus");
    every_allocation(open_tokens, "token file");
    test_kills();
    check(count_files(".") == 0, "temporaries are left at the end");
    mtt_dataset_close(NULL);
    close_folder();
    free(docs.text);
    close(home);
    return finish();
}
