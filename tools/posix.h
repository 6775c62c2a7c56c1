/* posix.h - the headers of POSIX that programs use; on Windows their calls, by what Windows has.

   Include it after mtt.h, and call posix_begin first. On Windows paths and arguments are UTF-8, files have no
   \r, and a file can be renamed, replaced and removed while it is open. What a program does not need is not
   here: no processes, no permissions, no memory maps. */
#ifndef POSIX_H_INCLUDED
#define POSIX_H_INCLUDED
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifndef _WIN32
#include <dirent.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static inline void posix_begin(int argc, char **argv)
{
    (void)argc, (void)argv;
}

#define POSIX_SEPARATORS "/" /* of folders */
#else
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#include <direct.h>
#include <io.h>
#include <shellapi.h>
#include <stdint.h>
#undef near /* windows.h takes these words */
#undef far
#undef TEXT

#undef F_OK
#undef R_OK
#undef W_OK
#undef X_OK
#define F_OK 0
#define X_OK 0
#define W_OK 2
#define R_OK 4
#define POSIX_SEPARATORS "/\\:"
enum { POSIX_LETTERS = 4096, POSIX_SHARED = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE };

/* ---- paths and arguments ---- */

/* A path as Windows has it, in static storage that the second call after this one takes. One that is no path
   is that of no file. */
static inline const wchar_t *posix_wide(const char *path)
{
    static wchar_t wide[2][POSIX_LETTERS];
    static int turn;
    wchar_t *at = wide[turn ^= 1];
    if (!strcmp(path, "/dev/null")) path = "NUL";
    if (!MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, at, POSIX_LETTERS)) wcscpy(at, L"?");
    return at;
}

static inline void posix_narrow(const wchar_t *wide, char *text, int capacity)
{
    if (!WideCharToMultiByte(CP_UTF8, 0, wide, -1, text, capacity, NULL, NULL)) *text = 0;
}

/* 0, or -1 with errno by the last failure. */
static inline int posix_result(int done)
{
    if (done) return 0;
    switch (GetLastError()) {
    case ERROR_FILE_NOT_FOUND: case ERROR_PATH_NOT_FOUND: case ERROR_INVALID_NAME: errno = ENOENT; break;
    case ERROR_FILE_EXISTS: case ERROR_ALREADY_EXISTS: errno = EEXIST; break;
    case ERROR_DISK_FULL: case ERROR_HANDLE_DISK_FULL: errno = ENOSPC; break;
    case ERROR_ACCESS_DENIED: case ERROR_SHARING_VIOLATION: case ERROR_LOCK_VIOLATION: errno = EACCES; break;
    default: errno = EIO;
    }
    return -1;
}

/* Arguments come in the code page of the console: those of UTF-8 take their places, and stay. */
static inline void posix_begin(int argc, char **argv)
{
    int count = 0, i;
    wchar_t **wide = CommandLineToArgvW(GetCommandLineW(), &count);
    for (i = 0; wide && count == argc && i < argc; i++) {
        int size = WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, NULL, 0, NULL, NULL);
        char *text = size > 0 ? (char *)malloc((size_t)size) : NULL;
        if (!text) continue;
        posix_narrow(wide[i], text, size);
        argv[i] = text;
    }
    LocalFree(wide);
    SetConsoleOutputCP(CP_UTF8);
    _setmode(0, _O_BINARY);
    _setmode(1, _O_BINARY);
    _setmode(2, _O_BINARY);
}

/* ---- files ---- */

static inline int posix_create(const char *path, DWORD access, DWORD creation)
{
    HANDLE file = CreateFileW(posix_wide(path), access, POSIX_SHARED, NULL, creation, FILE_ATTRIBUTE_NORMAL,
                              NULL);
    int fd = file == INVALID_HANDLE_VALUE ? posix_result(0) : _open_osfhandle((intptr_t)file, _O_BINARY);
    if (fd < 0 && file != INVALID_HANDLE_VALUE) CloseHandle(file);
    return fd;
}

static inline int posix_open(const char *path, int flags)
{
    return posix_create(path, flags & _O_RDWR ? GENERIC_READ | GENERIC_WRITE : GENERIC_READ,
                        flags & _O_CREAT ? OPEN_ALWAYS : OPEN_EXISTING);
}

/* Nobody here appends. */
static inline FILE *posix_fopen(const char *path, const char *mode)
{
    int reads = *mode == 'r' || strchr(mode, '+'), writes = *mode != 'r' || strchr(mode, '+'), fd;
    fd = posix_create(path, (reads ? GENERIC_READ : 0) | (writes ? GENERIC_WRITE : 0),
                      strchr(mode, 'x') ? CREATE_NEW : *mode == 'w' ? CREATE_ALWAYS : OPEN_EXISTING);
    return fd < 0 ? NULL : _fdopen(fd, !reads ? "wb" : writes ? "r+b" : "rb");
}

static inline int posix_rename(const char *from, const char *to)
{
    return posix_result(MoveFileExW(posix_wide(from), posix_wide(to),
                                    MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH));
}

static inline int posix_unlink(const char *path)
{
    return posix_result(DeleteFileW(posix_wide(path)));
}

static inline int posix_link(const char *from, const char *to)
{
    return posix_result(CreateHardLinkW(posix_wide(to), posix_wide(from), NULL));
}

static inline int posix_mkdir(const char *path)
{
    if (*path && path[strlen(path) - 1] == ':') return errno = EEXIST, -1; /* a drive */
    return posix_result(CreateDirectoryW(posix_wide(path), NULL));
}

static inline int posix_access(const char *path, int mode)
{
    return _waccess(posix_wide(path), mode);
}

struct posix_stat {
    int st_mode; /* 1 = a regular file, 2 = a folder */
    int64_t st_size;
    uint64_t st_dev, st_ino;
};

static inline int posix_stat_by(const char *path, struct posix_stat *info, DWORD flags)
{
    BY_HANDLE_FILE_INFORMATION f;
    HANDLE file = CreateFileW(posix_wide(path), 0, POSIX_SHARED, NULL, OPEN_EXISTING,
                              FILE_FLAG_BACKUP_SEMANTICS | flags, NULL);
    memset(info, 0, sizeof(*info));
    if (file == INVALID_HANDLE_VALUE) return posix_result(0);
    if (GetFileType(file) == FILE_TYPE_DISK && GetFileInformationByHandle(file, &f)) {
        info->st_mode = f.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY ? 2 : 1;
        info->st_size = (int64_t)((uint64_t)f.nFileSizeHigh << 32 | f.nFileSizeLow);
        info->st_dev = f.dwVolumeSerialNumber;
        info->st_ino = (uint64_t)f.nFileIndexHigh << 32 | f.nFileIndexLow;
    }
    CloseHandle(file);
    return 0;
}

static inline int posix_stat(const char *path, struct posix_stat *info)
{
    return posix_stat_by(path, info, 0);
}

static inline int posix_lstat(const char *path, struct posix_stat *info)
{
    return posix_stat_by(path, info, FILE_FLAG_OPEN_REPARSE_POINT);
}

static inline char *posix_realpath(const char *path, char *whole)
{
    wchar_t wide[POSIX_LETTERS];
    char *at = whole;
    if (!GetFullPathNameW(posix_wide(path), POSIX_LETTERS, wide, NULL)) return NULL;
    posix_narrow(wide, whole, POSIX_LETTERS);
    while ((at = strchr(at, '\\'))) *at = '/';
    return whole;
}

struct statvfs {
    uint64_t f_bavail, f_frsize;
};

static inline int statvfs(const char *folder, struct statvfs *disk)
{
    ULARGE_INTEGER room;
    disk->f_bavail = 0, disk->f_frsize = 1;
    if (!GetDiskFreeSpaceExW(posix_wide(folder), &room, NULL, NULL)) return posix_result(0);
    disk->f_bavail = room.QuadPart;
    return 0;
}

/* Locks of bytes, which end with the process. */
enum { F_SETLK = 1, F_SETLKW, F_WRLCK, F_UNLCK };
struct flock {
    short l_type, l_whence;
    int64_t l_start, l_len;
};

static inline int fcntl(int fd, int action, const struct flock *lock)
{
    OVERLAPPED at;
    HANDLE file = (HANDLE)_get_osfhandle(fd);
    DWORD flags = LOCKFILE_EXCLUSIVE_LOCK | (action == F_SETLK ? LOCKFILE_FAIL_IMMEDIATELY : 0);
    memset(&at, 0, sizeof(at));
    at.Offset = (DWORD)lock->l_start, at.OffsetHigh = (DWORD)(lock->l_start >> 32);
    return posix_result(lock->l_type == F_UNLCK ? UnlockFileEx(file, 0, (DWORD)lock->l_len, 0, &at)
                                                : LockFileEx(file, flags, 0, (DWORD)lock->l_len, 0, &at));
}

/* ---- folders ---- */

struct dirent {
    char d_name[3 * MAX_PATH + 1];
};

typedef struct DIR {
    HANDLE search;
    int more; /* `found` is the next one */
    WIN32_FIND_DATAW found;
    struct dirent entry;
} DIR;

static inline DIR *opendir(const char *path)
{
    char all[POSIX_LETTERS];
    DIR *d = (DIR *)malloc(sizeof(*d));
    if (!d) return NULL;
    snprintf(all, sizeof(all), "%.4000s/*", path);
    d->search = FindFirstFileW(posix_wide(all), &d->found);
    d->more = d->search != INVALID_HANDLE_VALUE;
    if (d->more) return d;
    posix_result(0);
    free(d);
    return NULL;
}

static inline struct dirent *readdir(DIR *d)
{
    if (!d->more) return NULL;
    posix_narrow(d->found.cFileName, d->entry.d_name, sizeof(d->entry.d_name));
    d->more = FindNextFileW(d->search, &d->found);
    return &d->entry;
}

static inline void closedir(DIR *d)
{
    FindClose(d->search);
    free(d);
}

static inline int alphasort(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

/* Lists a folder. -1: errno says why. `filter` is not obeyed. */
static inline int scandir(const char *path, struct dirent ***list, void *filter,
                          int (*compare)(const struct dirent **, const struct dirent **))
{
    DIR *d = opendir(path);
    struct dirent *e, **all = NULL, **more;
    int count = 0;
    (void)filter;
    while (d && (e = readdir(d))) {
        more = (struct dirent **)realloc(all, (size_t)(count + 1) * sizeof(*all));
        if (!more) break;
        all = more;
        all[count] = (struct dirent *)malloc(sizeof(**all));
        if (!all[count]) break;
        *all[count++] = *e;
    }
    if (!d) return -1;
    closedir(d);
    qsort(all, (size_t)count, sizeof(*all), (int (*)(const void *, const void *))(void (*)(void))compare);
    *list = all;
    return count;
}

/* ---- a file in memory, one at a time: a temporary that is read when it is closed ---- */

static FILE *posix_memory;
static char **posix_memory_text;

static inline FILE *open_memstream(char **text, size_t *size)
{
    wchar_t folder[MAX_PATH + 1], path[MAX_PATH + 1];
    HANDLE file;
    int fd = -1;
    *text = NULL, *size = 0;
    if (posix_memory || !GetTempPathW(MAX_PATH, folder) || !GetTempFileNameW(folder, L"mtt", 0, path))
        return NULL;
    file = CreateFileW(path, GENERIC_READ | GENERIC_WRITE, 0, NULL, CREATE_ALWAYS,
                       FILE_ATTRIBUTE_TEMPORARY | FILE_FLAG_DELETE_ON_CLOSE, NULL);
    if (file != INVALID_HANDLE_VALUE) fd = _open_osfhandle((intptr_t)file, _O_BINARY);
    posix_memory = fd < 0 ? NULL : _fdopen(fd, "w+b");
    posix_memory_text = text;
    return posix_memory;
}

static inline int posix_fclose(FILE *f)
{
    long size;
    int whole = 1;
    char *text = NULL;
    if (f == posix_memory && f) {
        whole = !fseek(f, 0, SEEK_END) && (size = ftell(f)) >= 0 &&
                (text = (char *)malloc((size_t)size + 1)) != NULL && !fseek(f, 0, SEEK_SET) &&
                fread(text, 1, (size_t)size, f) == (size_t)size;
        if (whole) text[size] = 0;
        *posix_memory_text = text;
        posix_memory = NULL;
    }
    return fclose(f) || !whole ? EOF : 0;
}

/* ---- signals and clocks ---- */

/* nobody sends them */
enum { SIGHUP = 1, SIGUSR1 = 10, SIGUSR2 = 12, SIGPIPE = 13, SIGXCPU = 24, SIGXFSZ = 25 };

static inline void (*posix_signal(int number, void (*call)(int)))(int)
{
    return number == SIGINT || number == SIGTERM ? signal(number, call) : SIG_IGN;
}

enum { POSIX_REALTIME, POSIX_MONOTONIC };
static inline int posix_clock(int clock, struct timespec *now)
{
    LARGE_INTEGER count, second;
    FILETIME time;
    uint64_t ticks; /* of 100 ns, since 1601 */
    if (clock == POSIX_REALTIME) {
        GetSystemTimeAsFileTime(&time);
        ticks = ((uint64_t)time.dwHighDateTime << 32 | time.dwLowDateTime) - 116444736000000000u;
        now->tv_sec = (time_t)(ticks / 10000000), now->tv_nsec = (long)(ticks % 10000000 * 100);
        return 0;
    }
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&second);
    now->tv_sec = (time_t)(count.QuadPart / second.QuadPart);
    now->tv_nsec = (long)((double)(count.QuadPart % second.QuadPart) * 1e9 / (double)second.QuadPart);
    return 0;
}

#undef S_ISREG
#undef S_ISDIR
#undef CLOCK_REALTIME
#undef CLOCK_MONOTONIC
#undef PATH_MAX
#define PATH_MAX POSIX_LETTERS
#define S_ISREG(mode) ((mode) == 1)
#define S_ISDIR(mode) ((mode) == 2)
#define CLOCK_REALTIME POSIX_REALTIME
#define CLOCK_MONOTONIC POSIX_MONOTONIC
#define O_CLOEXEC 0
#define O_NOFOLLOW 0
#define off_t int64_t
#define open(path, flags, ...) posix_open(path, flags)
#define fopen posix_fopen
#define fclose posix_fclose
#define rename posix_rename
#define unlink posix_unlink
#define link posix_link
#define mkdir(path, mode) posix_mkdir(path)
#define access posix_access
#define stat posix_stat
#define lstat posix_lstat
#define realpath posix_realpath
#define signal posix_signal
#define clock_gettime posix_clock
#endif

/* The last separator of folders in a path; NULL if there is none. */
static inline const char *posix_slash(const char *path)
{
    const char *at = path + strlen(path);
    while (at > path && !strchr(POSIX_SEPARATORS, at[-1])) at--;
    return at > path ? at - 1 : NULL;
}
#endif
