/* nccl_fake.c - a stand-in for libnccl.so.2: the functions that mtt_kernels.cu calls, for ranks of one host
   that may share a GPU, which NCCL refuses. Bytes go through the host: they are copied to it, sent by a
   function of the stream, and copied to the other device. So transfers are work of their stream, in captured
   graphs too, and one whose peer has died waits until ncclCommAbort, as NCCL's do. With NCCL_FAKE_REFUSES in
   the environment nobody is connected: what works then works without NCCL. NCCL's communicators end only
   after all graphs that captured their transfers, and wait for these for ever; here for 10 seconds.

      gcc -O2 -shared -fPIC -I/usr/local/cuda/include tests/platforms/nccl_fake.c -o libnccl.so.2 \
          -L/usr/local/cuda/lib64 -lcudart_static -ldl -lrt -lpthread -lm */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 16, LIST = 4096, BUFFER = 64 << 20, BYTE = 1 };
enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE };

typedef struct id {
    char name[128];
} id;

/* One send or receive, by way of the host's buffer. */
typedef struct piece {
    void *device;
    char *host;
    size_t bytes;
    int peer, sends;
} piece;

struct group;
typedef struct comm {
    int rank, ranks;
    int sockets[RANKS];
    char *buffer; /* of all groups: they come one after another on their stream */
    size_t used;
    atomic_int aborted, graphs; /* graphs: those that hold its transfers */
    struct group *groups;
} comm;

/* What lies between ncclGroupStart and ncclGroupEnd. It stays, since graphs replay it. */
typedef struct group {
    comm *c;
    int count;
    struct group *next;
    piece pieces[];
} group;

static struct {
    comm *c;
    cudaStream_t stream;
    int count;
    piece pieces[LIST];
} open_group;

const char *ncclGetErrorString(int result)
{
    static const char *const texts[] = {"no error", "a CUDA call failed", "a system call failed",
                                        "internal error", "invalid argument", "invalid usage"};
    return result >= 0 && result <= INVALID_USAGE ? texts[result] : "unknown error";
}

int ncclGetUniqueId(id *out)
{
    struct timespec now;
    memset(out, 0, sizeof(*out));
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(out->name, sizeof(out->name), "nccl-fake-%d-%lld-%ld", (int)getpid(), (long long)now.tv_sec,
             now.tv_nsec);
    return SUCCESS;
}

/* A rank's address: a name of Linux's that is no file. */
static socklen_t address_of(const id *name, int rank, struct sockaddr_un *address)
{
    memset(address, 0, sizeof(*address));
    address->sun_family = AF_UNIX;
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
                       (size_t)snprintf(address->sun_path + 1, 100, "%.80s-%d", name->name, rank));
}

static int whole(int fd, void *data, size_t bytes, int sends)
{
    for (size_t at = 0; at < bytes;) {
        ssize_t n = sends ? send(fd, (char *)data + at, bytes - at, MSG_NOSIGNAL)
                          : recv(fd, (char *)data + at, bytes - at, 0);
        if (n <= 0 && errno != EINTR) return 0;
        if (n > 0) at += (size_t)n;
    }
    return 1;
}

/* Connects to lower ranks, and accepts higher ones. */
int ncclCommInitRank(comm **out, int ranks, id name, int rank)
{
    struct sockaddr_un address;
    socklen_t bytes = address_of(&name, rank, &address);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), right;
    comm *c = calloc(1, sizeof(*c));
    *out = NULL;
    if (getenv("NCCL_FAKE_REFUSES")) return INVALID_USAGE;
    if (!c || listener < 0 || ranks > RANKS || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    right = !bind(listener, (struct sockaddr *)&address, bytes) && !listen(listener, RANKS);
    c->rank = rank;
    c->ranks = ranks;
    for (int i = 0; i < rank && right; i++) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), tries = 0;
        bytes = address_of(&name, i, &address);
        while (connect(fd, (struct sockaddr *)&address, bytes) && tries++ < 3000) usleep(10000);
        right = whole(fd, &rank, sizeof(rank), 1);
        c->sockets[i] = fd;
    }
    for (int i = rank + 1; i < ranks && right; i++) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC), other = 0;
        right = fd >= 0 && whole(fd, &other, sizeof(other), 0) && other > rank && other < ranks;
        if (right) c->sockets[other] = fd;
    }
    close(listener);
    for (int i = 0; i < ranks && right; i++)
        if (i != rank) fcntl(c->sockets[i], F_SETFL, O_NONBLOCK);
    if (!right) return SYSTEM_ERROR;
    if (cudaMallocHost((void **)&c->buffer, BUFFER)) return CUDA_ERROR;
    *out = c;
    return SUCCESS;
}

int ncclCommGetAsyncError(comm *c, int *result)
{
    (void)c;
    *result = SUCCESS;
    return SUCCESS;
}

static void wait_for_graphs(comm *c)
{
    for (int ms = 0; atomic_load(&c->graphs); ms++, usleep(1000)) {
        if (ms < 10000) continue;
        fprintf(stderr, "nccl_fake.c: a communicator ends before the graphs that use it: NCCL would hang\n");
        abort();
    }
}

static void end_graph(void *c)
{
    atomic_fetch_sub(&((comm *)c)->graphs, 1);
}

/* Counts a graph that is being captured. */
static int hold(comm *c, cudaStream_t stream)
{
    enum cudaStreamCaptureStatus status;
    cudaGraph_t graph = NULL;
    cudaUserObject_t object;
#if CUDART_VERSION >= 13000
    int error = cudaStreamGetCaptureInfo(stream, &status, NULL, &graph, NULL, NULL, NULL);
#else
    int error = cudaStreamGetCaptureInfo_v2(stream, &status, NULL, &graph, NULL, NULL);
#endif
    if (error || status != cudaStreamCaptureStatusActive) return error;
    error = cudaUserObjectCreate(&object, c, end_graph, 1, cudaUserObjectNoDestructorSync);
    if (error) return error;
    atomic_fetch_add(&c->graphs, 1);
    return cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
}

int ncclCommAbort(comm *c)
{
    atomic_store(&c->aborted, 1); /* the stream may still be at work with it: nothing is given back */
    wait_for_graphs(c);
    return SUCCESS;
}

int ncclCommDestroy(comm *c)
{
    wait_for_graphs(c);
    for (int i = 0; i < c->ranks; i++)
        if (i != c->rank) close(c->sockets[i]);
    for (group *g = c->groups, *next; g; g = next) next = g->next, free(g);
    cudaFreeHost(c->buffer);
    free(c);
    return SUCCESS;
}

/* Moves what a socket takes of the piece. Returns its rest, or -1: the peer is gone. */
static ssize_t move(comm *c, const piece *p, size_t *done)
{
    const int fd = c->sockets[p->peer];
    ssize_t n = p->sends ? send(fd, p->host + *done, p->bytes - *done, MSG_NOSIGNAL)
                         : recv(fd, p->host + *done, p->bytes - *done, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return -1;
    if (n > 0) *done += (size_t)n;
    return (ssize_t)(p->bytes - *done);
}

/* Runs in the stream. Pieces of one peer and direction go in order. After a peer's death it waits to be
   aborted; for 3 seconds at most, since where a CPU runs the kernels nobody could abort it. */
static void exchange(void *data)
{
    group *g = data;
    size_t done[LIST] = {0};
    int lost = 0, left = g->count;
    for (int waited = 0; left && !atomic_load(&g->c->aborted) && waited < 3000;) {
        int begun[2][RANKS] = {{0}}, moved = 0;
        for (int i = 0; i < g->count && !lost; i++) {
            const piece *p = &g->pieces[i];
            size_t before = done[i];
            if (done[i] == p->bytes || begun[p->sends][p->peer]) continue;
            begun[p->sends][p->peer] = 1;
            if (move(g->c, p, &done[i]) < 0) lost = 1;
            if (done[i] == p->bytes) left--;
            moved |= done[i] > before;
        }
        if (lost) usleep(1000), waited++;
        else if (!moved) usleep(20);
    }
}

int ncclGroupStart(void)
{
    open_group.count = 0;
    open_group.c = NULL;
    return SUCCESS;
}

static int add(void *device, size_t bytes, int type, int peer, comm *c, cudaStream_t stream, int sends)
{
    if (type != BYTE || peer < 0 || peer >= c->ranks || peer == c->rank || !bytes) return INVALID_ARGUMENT;
    if (open_group.count == LIST) return INTERNAL_ERROR;
    if (!open_group.c) c->used = 0;
    if (c->used + bytes > BUFFER) return INTERNAL_ERROR;
    open_group.pieces[open_group.count++] = (piece){device, c->buffer + c->used, bytes, peer, sends};
    c->used += (bytes + 63) / 64 * 64;
    open_group.c = c;
    open_group.stream = stream;
    return SUCCESS;
}

int ncclSend(const void *data, size_t bytes, int type, int peer, comm *c, cudaStream_t stream)
{
    return add((void *)data, bytes, type, peer, c, stream, 1);
}

int ncclRecv(void *data, size_t bytes, int type, int peer, comm *c, cudaStream_t stream)
{
    return add(data, bytes, type, peer, c, stream, 0);
}

int ncclGroupEnd(void)
{
    comm *c = open_group.c;
    group *g;
    int error = c ? hold(c, open_group.stream) : 0;
    if (!c) return SUCCESS; /* nothing to send */
    g = malloc(sizeof(*g) + (size_t)open_group.count * sizeof(piece));
    if (!g) return SYSTEM_ERROR;
    g->c = c;
    g->count = open_group.count;
    g->next = c->groups;
    c->groups = g;
    memcpy(g->pieces, open_group.pieces, (size_t)g->count * sizeof(piece));
    for (piece *p = g->pieces; p < g->pieces + g->count && !error; p++)
        if (p->sends)
            error = cudaMemcpyAsync(p->host, p->device, p->bytes, cudaMemcpyDeviceToHost, open_group.stream);
    if (!error) error = cudaLaunchHostFunc(open_group.stream, exchange, g);
    for (piece *p = g->pieces; p < g->pieces + g->count && !error; p++)
        if (!p->sends)
            error = cudaMemcpyAsync(p->device, p->host, p->bytes, cudaMemcpyHostToDevice, open_group.stream);
    return error ? CUDA_ERROR : SUCCESS;
}
