/* faults.c - a library for LD_PRELOAD that lets one call on a file fail, once. tests/faults.sh uses it.

   FAULT_FOLDER  calls on files in this folder count, by path or by descriptor
   FAULT_AT      the number of the call that fails, from 1: with ENOSPC if it takes room, else with EIO
   FAULT_MARK    a file that then gets the name of the call and of its file
   FAULT_KILL    if it is set, the process is killed in place of that call
   FAULT_SLOW    the name of a call that takes 50 ms longer
   FAULT_LOCK    errno of every lock of such a file, by fcntl and flock
   FAULT_LOCKED  so many locks do not fail

   glibc's streams write past the library, so fopen makes a stream that uses the functions here. A close that
   fails closes all the same, as on Linux. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* 1 = this call fails. */
static int fault(const char *call, const char *path, int error)
{
    static long calls;
    const char *folder = getenv("FAULT_FOLDER"), *at = getenv("FAULT_AT"), *mark = getenv("FAULT_MARK");
    char line[4200];
    const char *slow = getenv("FAULT_SLOW");
    long fd, size;
    if (!folder || strncmp(path, folder, strlen(folder))) return 0;
    if (slow && !strcmp(call, slow)) usleep(50000);
    if (!at || !mark || ++calls != atol(at)) return 0;
    size = snprintf(line, sizeof(line), "%s %s\n", call, path + strlen(folder));
    fd = syscall(SYS_openat, AT_FDCWD, mark, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (syscall(SYS_write, fd, line, size) != size) abort();
    syscall(SYS_close, fd);
    if (getenv("FAULT_KILL")) kill(getpid(), SIGKILL);
    errno = error;
    return 1;
}

static int fault_fd(const char *call, int fd, int error)
{
    char link[64], path[4096];
    ssize_t size;
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    size = readlink(link, path, sizeof(path) - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return fault(call, path, error);
}

static void *real(const char *name)
{
    void *symbol = dlsym(RTLD_NEXT, name);
    if (!symbol) abort();
    return symbol;
}

#define CALL(type, failed, name, parameters, arguments, is_fault)                                            \
    type name parameters                                                                                     \
    {                                                                                                        \
        type(*call) parameters;                                                                              \
        *(void **)&call = real(#name);                                                                       \
        return is_fault ? failed : call arguments;                                                           \
    }
#define CALL_FD(type, name, parameters, arguments, error)                                                    \
    CALL(type, -1, name, parameters, arguments, fault_fd(#name, fd, error))
#define CALL_PATH(name, parameters, arguments, error)                                                        \
    CALL(int, -1, name, parameters, arguments, fault(#name, path, error))

CALL_FD(ssize_t, read, (int fd, void *data, size_t n), (fd, data, n), EIO)
CALL_FD(ssize_t, pread, (int fd, void *data, size_t n, off_t at), (fd, data, n, at), EIO)
CALL_FD(ssize_t, write, (int fd, const void *data, size_t n), (fd, data, n), ENOSPC)
CALL_FD(ssize_t, pwrite, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at), ENOSPC)
CALL_FD(int, fsync, (int fd), (fd), EIO)
CALL_FD(int, ftruncate, (int fd, off_t size), (fd, size), EIO)
CALL_PATH(rename, (const char *path, const char *to), (path, to), EIO)
CALL_PATH(link, (const char *path, const char *to), (path, to), EIO)
CALL_PATH(unlink, (const char *path), (path), EIO)
CALL_PATH(remove, (const char *path), (path), EIO)
CALL_PATH(mkdir, (const char *path, mode_t mode), (path, mode), ENOSPC)
CALL(void *, MAP_FAILED, mmap, (void *near, size_t n, int protection, int flags, int fd, off_t at),
     (near, n, protection, flags, fd, at), fault_fd("mmap", fd, ENOMEM))

int open(const char *path, int flags, ...)
{
    int (*call)(const char *, int, ...);
    va_list more;
    mode_t mode = 0;
    va_start(more, flags);
    if (flags & O_CREAT) mode = va_arg(more, mode_t);
    va_end(more);
    *(void **)&call = real("open");
    return fault("open", path, flags & O_CREAT ? ENOSPC : EIO) ? -1 : call(path, flags, mode);
}

int close(int fd)
{
    int (*call)(int), failed = fault_fd("close", fd, EIO), result;
    *(void **)&call = real("close");
    result = call(fd);
    if (failed) errno = EIO;
    return failed ? -1 : result;
}

/* 1 = this lock fails. */
static int fault_lock(int fd)
{
    static long calls;
    const char *error = getenv("FAULT_LOCK"), *good = getenv("FAULT_LOCKED");
    const char *folder = getenv("FAULT_FOLDER");
    char link[64], path[4096];
    ssize_t size;
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    size = readlink(link, path, sizeof(path));
    if (!error || !folder || size < (ssize_t)strlen(folder)) return 0;
    if (strncmp(path, folder, strlen(folder))) return 0;
    if (good && calls++ < atol(good)) return 0;
    errno = atoi(error);
    return 1;
}

#define CALL_FCNTL(name)                                                                                     \
    int name(int fd, int action, ...)                                                                        \
    {                                                                                                        \
        int (*call)(int, int, void *);                                                                       \
        va_list more;                                                                                        \
        void *value;                                                                                         \
        va_start(more, action);                                                                              \
        value = va_arg(more, void *);                                                                        \
        va_end(more);                                                                                        \
        *(void **)&call = real(#name);                                                                       \
        return (action == F_SETLK || action == F_SETLKW) && fault_lock(fd) ? -1 : call(fd, action, value);   \
    }
CALL_FCNTL(fcntl)
CALL_FCNTL(fcntl64)
CALL(int, -1, flock, (int fd, int how), (fd, how), fault_lock(fd))

/* ---- streams ---- */

static FILE *streams[64]; /* by descriptor */

static ssize_t stream_read(void *fd, char *data, size_t n)
{
    return read((int)(long)fd, data, n);
}

static ssize_t stream_write(void *fd, const char *data, size_t n)
{
    ssize_t done = write((int)(long)fd, data, n);
    return done < 0 ? 0 : done; /* so a stream's function says that it failed */
}

static int stream_seek(void *fd, off64_t *at, int from)
{
    *at = lseek((int)(long)fd, *at, from);
    return *at < 0 ? -1 : 0;
}

static int stream_close(void *fd)
{
    streams[(long)fd % 64] = NULL;
    return close((int)(long)fd);
}

FILE *fopen(const char *path, const char *mode)
{
    const cookie_io_functions_t functions = {stream_read, stream_write, stream_seek, stream_close};
    int flags = strchr(mode, '+') ? O_RDWR : *mode == 'r' ? O_RDONLY : O_WRONLY, fd;
    if (*mode != 'r') flags |= O_CREAT | (*mode == 'w' ? O_TRUNC : O_APPEND);
    if (strchr(mode, 'x')) flags |= O_EXCL;
    fd = open(path, flags, 0666);
    return fd < 0 ? NULL : (streams[fd % 64] = fopencookie((void *)(long)fd, mode, functions));
}

int fileno(FILE *stream)
{
    int (*call)(FILE *), fd;
    for (fd = 0; fd < 64; fd++)
        if (streams[fd] == stream) return fd;
    *(void **)&call = real("fileno");
    return call(stream);
}
