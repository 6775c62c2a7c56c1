/* test_ranks.c - ranks: exchanges by fork and by TCP, deaths, silence, last words, strangers, secrets,
   launchers. Each rank is a process; it leaves its result in shared memory, and the parent checks it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include "../test.h"

/* Call number fault_at of fork or socketpair fails. With `rough` set, sends and receives are interrupted and
   cut short. The first receive of a frame waits for `first_receive` ms. The next poll takes `sleep_in_poll`
   ms and finds nothing, as in a process that is stopped and continued. */
static int fault_at, fault_calls, rough, first_receive, sleep_in_poll;

static int fault(void)
{
    if (!fault_at || ++fault_calls != fault_at) return 0;
    errno = EAGAIN;
    return 1;
}
static pid_t faulty_fork(void)
{
    return fault() ? -1 : fork();
}
static int faulty_socketpair(int domain, int type, int protocol, int *pair)
{
    return fault() ? -1 : socketpair(domain, type, protocol, pair);
}
static size_t cut(size_t bytes)
{
    static uint64_t own = 1; /* ranks must not differ in what else they draw */
    uint64_t common = random_state;
    size_t some = bytes;
    random_state = own;
    if (rough && below(3) == 0) some = 0, errno = EINTR;
    else if (rough && below(2)) some = 1 + (size_t)below(5000);
    own = random_state;
    random_state = common;
    return some < bytes ? some : bytes;
}
static ssize_t rough_send(int fd, const void *at, size_t bytes, int flags)
{
    size_t some = cut(bytes);
    return some || !bytes ? send(fd, at, some, flags) : -1;
}
static ssize_t rough_recv(int fd, void *at, size_t bytes, int flags)
{
    size_t some = cut(bytes);
    int ms = bytes == 16 ? first_receive : 0; /* the head of a frame: after the hellos */
    if (ms) first_receive = 0, poll(NULL, 0, ms);
    return some || !bytes ? recv(fd, at, some, flags) : -1;
}
static int sleepy_poll(struct pollfd *fds, nfds_t count, int ms)
{
    int sleep_ms = sleep_in_poll;
    sleep_in_poll = 0;
    return sleep_ms ? poll(NULL, 0, sleep_ms) : poll(fds, count, ms);
}

static int noted_listen(int fd, int backlog);

#define fork() faulty_fork()
#define socketpair(domain, type, protocol, pair) faulty_socketpair(domain, type, protocol, pair)
#define send(fd, at, bytes, flags) rough_send(fd, at, bytes, flags)
#define recv(fd, at, bytes, flags) rough_recv(fd, at, bytes, flags)
#define poll(fds, count, ms) sleepy_poll(fds, count, ms)
#define listen(fd, backlog) noted_listen(fd, backlog)
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#undef listen
#undef fork
#undef socketpair
#undef send
#undef recv
#undef poll
#include "../../tools/launch.h"

enum { MOST = 5 };
static mtt_env env;

/* What the ranks leave. `step` counts up to let one wait for another. `place` is where they listen. */
typedef struct result {
    pid_t pid;
    mtt_status status;
    double ms;
    char error[1024];
    char address[64];
    volatile int port;
} result;
static struct {
    result rank[MOST];
    volatile int step, victim;
    double killed;
} *shared;

static int listener; /* the rank of this process, for noted_listen */

static int noted_listen(int fd, int backlog)
{
    struct sockaddr_storage name;
    socklen_t bytes = sizeof(name);
    char port[16] = "0";
    result *mine = &shared->rank[listener];
    int failed = listen(fd, backlog);
    if (failed || getsockname(fd, (struct sockaddr *)&name, &bytes)) return failed;
    getnameinfo((struct sockaddr *)&name, bytes, mine->address, sizeof(mine->address), port, sizeof(port),
                NI_NUMERICHOST | NI_NUMERICSERV);
    mine->port = atoi(port);
    return failed;
}

static int open_files(void)
{
    int fd, count = 0;
    for (fd = 0; fd < 256; fd++) count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static void pause_ms(int ms)
{
    poll(NULL, 0, ms);
}

static int next_port(void)
{
    static int port;
    if (!port) port = 20000 + getpid() % 150 * 60; /* fewer than 60 a process */
    return ++port;
}

/* A run: `ranks` processes do `body`. The ranks of a TCP run are all children of the test. */
typedef mtt_status (*body_fn)(mtt_ranks *r);
static int late = -1, late_ms = 300; /* a rank that comes late */
static const char *secret; /* of the ranks of a run */
static int slow = -1; /* a rank that has connected to rank 0, and reads late what that says */
static double patience; /* the timeout of a run's exchanges; ranks have 10 seconds to connect */

static void leave(int rank, mtt_status status)
{
    shared->rank[rank].status = status;
    shared->rank[rank].ms = mtt__now_ms();
    memcpy(shared->rank[rank].error, env.error, sizeof(env.error));
}

static void one_rank(mtt_ranks *r, double seconds, body_fn body)
{
    int rank = mtt_ranks_rank(r);
    mtt_status status;
    alarm(60);
    rough = 0;
    r->timeout = seconds * 1e3;
    shared->rank[rank].pid = getpid();
    status = body(r);
    leave(rank, status);
    rough = 0;
    if (status) mtt_ranks_fail(r, env.error);
    mtt_ranks_close(r);
}

static pid_t start_rank(const mtt_ranks_desc *desc, body_fn body)
{
    pid_t child = fork();
    mtt_ranks *r;
    mtt_status status;
    if (child) return child;
    alarm(60);
    listener = desc->rank;
    if (desc->rank == late) pause_ms(late_ms);
    if (desc->rank == slow) first_receive = 300;
    rough = 1;
    status = mtt_ranks_connect(&env, desc, &r);
    if (status) leave(desc->rank, status);
    else one_rank(r, patience, body);
    _exit(0);
}

static mtt_ranks_desc describe(int rank, int ranks, int port, double seconds)
{
    mtt_ranks_desc desc;
    memset(&desc, 0, sizeof(desc));
    desc.rank = rank;
    desc.ranks = ranks;
    desc.port = port;
    desc.timeout = seconds;
    desc.run = "test";
    desc.secret = secret;
    return desc;
}

static void reset(void)
{
    memset((void *)shared, 0, sizeof(*shared));
    shared->victim = -1;
    env.error[0] = 0;
}

static void run(int tcp, int ranks, double seconds, body_fn body)
{
    int i, before = open_files(), port = next_port();
    pid_t child[MOST];
    reset();
    patience = seconds;
    if (tcp) {
        for (i = 0; i < ranks; i++) {
            mtt_ranks_desc desc = describe(i, ranks, port, 10);
            child[i] = start_rank(&desc, body);
        }
        for (i = 0; i < ranks; i++)
            if (i != shared->victim) waitpid(child[i], NULL, 0);
        for (i = 0; i < ranks; i++) kill(child[i], SIGKILL), waitpid(child[i], NULL, 0);
    } else {
        mtt_ranks *r;
        mtt_status status = mtt_ranks_fork(&env, ranks, 0, &r);
        check(!status, "fork: %s", env.error);
        if (status) return;
        i = r->rank;
        one_rank(r, seconds, body);
        if (i) _exit(0);
    }
    check(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD, "a child is left");
    check(open_files() == before, "%d open files are left", open_files() - before);
}

/* Every rank but one has this status and this text. */
static void all_say(int ranks, int except, mtt_status status, const char *text, const char *what)
{
    int i;
    for (i = 0; i < ranks; i++)
        if (i != except)
            check(shared->rank[i].status == status && strstr(shared->rank[i].error, text),
                  "%s: rank %d: status %d, not %d; \"%s\" misses \"%s\"", what, i, shared->rank[i].status,
                  status, shared->rank[i].error, text);
    new_case();
}

/* ---- exchanges ---- */

static int largest;

static unsigned char pattern(uint64_t seed, size_t i)
{
    return (unsigned char)((seed + i * 2654435761u) >> 13);
}

static size_t draw_size(void)
{
    switch (below(6)) {
    case 0: return 0;
    case 1: return (size_t)below(9);
    case 2: return (size_t)below(largest) + 1;
    default: return (size_t)below(20000);
    }
}

/* All ranks draw the same sizes: three from each to each. The order of peers is a rank's own. */
static mtt_status random_exchange(mtt_ranks *r)
{
    enum { EACH = 3 };
    size_t size[MOST][MOST][EACH];
    mtt_transfer list[MOST * EACH];
    int from, to, k, count = 0, next[MOST] = {0}, n = r->count, me = r->rank;
    uint64_t salt = random_bits(), common;
    mtt_status status;
    memset(list, 0, sizeof(list));
    for (from = 0; from < n; from++)
        for (to = 0; to < n; to++)
            for (k = 0; k < EACH; k++) size[from][to][k] = from == to ? 0 : draw_size();
    common = random_state;
    random_state += (uint64_t)me;
    while (count < (n - 1) * EACH) {
        int peer = below(n), k = next[peer];
        mtt_transfer *t = &list[count];
        unsigned char *out;
        size_t i;
        if (peer == me || k == EACH) continue;
        next[peer]++;
        count++;
        t->peer = peer;
        t->send_bytes = size[me][peer][k];
        t->receive_bytes = size[peer][me][k];
        t->send = out = (unsigned char *)malloc(t->send_bytes + 1);
        t->receive = calloc(1, t->receive_bytes + 1);
        for (i = 0; i < t->send_bytes; i++) out[i] = pattern(salt + (uint64_t)(me * 64 + peer * 8 + k), i);
    }
    status = mtt__exchange(r, list, count);
    memset(next, 0, sizeof(next));
    for (k = 0; k < count; k++) {
        const mtt_transfer *t = &list[k];
        const unsigned char *in = (const unsigned char *)t->receive;
        uint64_t seed = salt + (uint64_t)(t->peer * 64 + me * 8 + next[t->peer]++);
        size_t i;
        for (i = 0; i < t->receive_bytes && !status; i++)
            if (in[i] != pattern(seed, i)) status = mtt__fail(&env, MTT_E_DATA, "byte %zu is wrong", i);
        free((void *)t->send);
        free(t->receive);
    }
    random_state = common;
    return status;
}

static mtt_status exchanges(mtt_ranks *r)
{
    mtt_status status = MTT_OK;
    int i;
    for (i = 0; i < 40 && !status; i++) {
        largest = i == 5 || i == 6 ? 8 << 20 : 100000;
        rough = i % 4 == 3;
        status = random_exchange(r);
    }
    return status;
}

static mtt_status agreements(mtt_ranks *r)
{
    int i, flag;
    for (i = 0; i < 50; i++) {
        flag = i % 3 == 0 && i % r->count == r->rank;
        if (mtt_ranks_agree(r, "the step", 1ull << 60 | (uint64_t)i)) return r->status;
        if (mtt_ranks_any(r, &flag)) return r->status;
        if (flag != (i % 3 == 0)) return mtt__fail(&env, MTT_E_DATA, "flag %d in round %d", flag, i);
        if (i % 10 == 0 && mtt_ranks_busy(r)) return r->status;
    }
    return MTT_OK;
}

static void test_exchanges(void)
{
    int tcp, n;
    for (tcp = 0; tcp < 2; tcp++)
        for (n = quick ? 3 : 1; n <= 4; n++) {
            run(tcp, n, 20, exchanges);
            all_say(n, -1, MTT_OK, "", "exchanges");
            run(tcp, n, 20, agreements);
            all_say(n, -1, MTT_OK, "", "agreements");
        }
    int flag = 2;
    check(!mtt_ranks_rank(NULL) && mtt_ranks_count(NULL) == 1, "no ranks");
    check(!mtt_ranks_agree(NULL, "x", 1) && !mtt_ranks_any(NULL, &flag) && flag == 1, "one rank agrees");
    check(!mtt_ranks_busy(NULL), "one rank is busy");
    mtt_ranks_fail(NULL, "why");
    mtt_ranks_close(NULL);
}

static mtt_status sockets_are_closed_on_exec(mtt_ranks *r)
{
    int i;
    mtt_status status = mtt_ranks_agree(r, "it", 1);
    for (i = 0; i < r->count; i++)
        if (r->peers[i].fd >= 0 && fcntl(r->peers[i].fd, F_GETFD) != FD_CLOEXEC) return MTT_E_DATA;
    return status;
}

/* ---- disagreement ---- */

static mtt_status disagree(mtt_ranks *r)
{
    mtt_status status = mtt_ranks_agree(r, "the seed", r->rank == 2 ? 7 : 5);
    char first[1024];
    int flag = 0;
    memcpy(first, env.error, sizeof(first));
    if (mtt_ranks_any(r, &flag) != status || strcmp(first, env.error)) return MTT_E_DATA;
    return status;
}

static mtt_status other_calls(mtt_ranks *r)
{
    int flag = 0;
    return r->rank == 1 ? mtt_ranks_any(r, &flag) : mtt_ranks_agree(r, "it", 1);
}

static mtt_status other_size(mtt_ranks *r)
{
    char data[16] = "";
    mtt_transfer t = {1 - r->rank, data, r->rank ? 8u : 0u, data, r->rank ? 0u : 12u};
    mtt_status status = r->rank > 1 ? MTT_OK : mtt__exchange(r, &t, 1);
    return status ? status : mtt_ranks_agree(r, "it", 1);
}

static mtt_status other_version(mtt_ranks *r)
{
    if (r->rank == 1 && send(r->peers[0].fd, "GET / HTTP/1.1\r\n\r\n", 18, 0) != 18) return MTT_E_DATA;
    return mtt_ranks_agree(r, "it", 1) ? r->status : mtt_ranks_agree(r, "that", 1);
}

static void test_disagreement(void)
{
    int tcp;
    for (tcp = 0; tcp < 2; tcp++) {
        run(tcp, 3, 5, sockets_are_closed_on_exec);
        all_say(3, -1, MTT_OK, "", "sockets");
        run(tcp, 4, 5, disagree);
        all_say(4, -1, MTT_E_MISMATCH, "in the seed: 7, not 5", "disagree");
        all_say(4, -1, MTT_E_MISMATCH, "rank 2 (host ", "disagree");
        run(tcp, 2, 5, other_calls);
        all_say(2, -1, MTT_E_MISMATCH, "bytes, but rank ", "other calls");
        run(tcp, 2, 5, other_size);
        all_say(2, -1, MTT_E_MISMATCH, "sends 8 bytes, but rank 0 expects 12", "other size");
        run(tcp, 3, 5, other_size);
        all_say(3, -1, MTT_E_MISMATCH, "sends 8 bytes, but rank 0 expects 12", "other size");
        run(tcp, 3, 5, other_version);
        all_say(3, -1, MTT_E_MISMATCH, "rank 1 (host ", "other version");
    }
}

/* ---- deaths, silence, last words ---- */

static int kill_after, kill_victim;

/* A rank that still waits for others to connect cannot read why a peer ended, if data came first. It names
   the peer. So all are connected before the first death, unless that is meant to be at the start. */
static mtt_status until_killed(mtt_ranks *r)
{
    mtt_status status = kill_after < 0 ? MTT_OK : mtt_ranks_agree(r, "start", 1);
    double end = mtt__now_ms() + kill_after;
    largest = 300000;
    while (!status) {
        if (r->rank == kill_victim && mtt__now_ms() > end) {
            shared->victim = kill_victim;
            shared->killed = mtt__now_ms();
            raise(SIGKILL);
        }
        status = random_exchange(r);
    }
    return status;
}

static void test_kills(void)
{
    int i, k;
    char name[32];
    for (i = 0; i < 20; i += each()) {
        int tcp = i % 2, n = 2 + below(3);
        kill_after = below(60);
        kill_victim = tcp ? below(n) : 1 + below(n - 1);
        snprintf(name, sizeof(name), "rank %d (host", kill_victim);
        run(tcp, n, 20, until_killed);
        all_say(n, kill_victim, MTT_E_RANK, name, "kill");
        all_say(n, kill_victim, MTT_E_RANK, ") ended", "kill");
        for (k = 0; k < n; k++)
            check(k == kill_victim || shared->rank[k].ms - shared->killed < 3000, "rank %d took %.0f ms", k,
                  shared->rank[k].ms - shared->killed);
    }
}

/* Rank 0 dies as soon as all have connected to it, while rank 1 waits for rank 2, and rank 3 for them. */
static void test_kill_at_start(void)
{
    int k;
    kill_after = -1;
    kill_victim = 0;
    slow = 2;
    run(1, 4, 20, until_killed);
    slow = -1;
    all_say(4, 0, MTT_E_RANK, "rank ", "kill at the start");
    all_say(4, 0, MTT_E_RANK, ") ended", "kill at the start");
    for (k = 1; k < 4; k++)
        check(shared->rank[k].ms - shared->killed < 3000, "rank %d took %.0f ms", k,
              shared->rank[k].ms - shared->killed);
}

/* Each rank waits for the next one; the last one stops. All must name it. */
static mtt_status chain(mtt_ranks *r)
{
    char byte = 0;
    mtt_transfer t[2] = {{r->rank + 1, NULL, 0, &byte, 1}, {r->rank - 1, &byte, 1, NULL, 0}};
    mtt_status status = mtt_ranks_agree(r, "the begin", 1);
    if (r->rank == r->count - 1) {
        shared->victim = r->rank;
        raise(SIGSTOP);
    }
    if (!status && r->rank < r->count - 1) status = mtt__exchange(r, t, 1);
    if (!status && r->rank) status = mtt__exchange(r, t + 1, 1);
    return status;
}

/* The same, but the last one says that it is busy, for longer than twice the timeout. */
static mtt_status busy_chain(mtt_ranks *r)
{
    char byte = 0;
    mtt_transfer t[2] = {{r->rank + 1, NULL, 0, &byte, 1}, {r->rank - 1, &byte, 1, NULL, 0}};
    mtt_status status = mtt_ranks_agree(r, "the begin", 1);
    if (r->rank == r->count - 1) {
        if (!status) status = mtt_ranks_busy(r);
        pause_ms(1200);
    }
    if (!status && r->rank < r->count - 1) status = mtt__exchange(r, t, 1);
    if (!status && r->rank) status = mtt__exchange(r, t + 1, 1);
    return status ? status : mtt_ranks_agree(r, "the end", 2);
}

/* A rank that was busy and takes part again has a limit again, even if it sends nothing. */
static mtt_status busy_once(mtt_ranks *r)
{
    char byte = 0;
    mtt_transfer t = {1 - r->rank, &byte, 1, &byte, 1};
    mtt_status status = MTT_OK;
    if (r->rank) {
        t.send_bytes = 0;
        status = mtt_ranks_busy(r);
        pause_ms(800);
        if (!status) status = mtt__exchange(r, &t, 1);
        shared->victim = 1;
        raise(SIGSTOP);
    }
    t.receive_bytes = 0;
    if (!status) status = mtt__exchange(r, &t, 1);
    return status ? status : mtt_ranks_agree(r, "it", 1);
}

/* The last rank stops after the word that it waits. The others do not give it twice the time. */
static mtt_status stop_waiting(mtt_ranks *r)
{
    mtt_status status = mtt_ranks_agree(r, "the begin", 1);
    if (r->rank == r->count - 1) {
        mtt__note_all(r, MTT__FRAME_WAITING);
        if (!status) status = mtt__exchange(r, NULL, 0);
        shared->victim = r->rank;
        raise(SIGSTOP);
    }
    return status ? status : mtt_ranks_agree(r, "it", 1);
}

static mtt_status wait_for_each_other(mtt_ranks *r)
{
    char byte;
    mtt_transfer t = {1 - r->rank, NULL, 0, &byte, 1};
    return mtt__exchange(r, &t, 1);
}

/* The last rank is stopped while it waits, and continued after the others have given up. It says their words
   and does not blame them. */
static mtt_status stopped_once(mtt_ranks *r)
{
    char byte;
    int last = r->rank == r->count - 1;
    mtt_transfer t = {last ? 0 : r->count - 1, NULL, 0, &byte, 1};
    mtt_status status = mtt_ranks_agree(r, "the begin", 1);
    if (last) sleep_in_poll = 800;
    return status ? status : mtt__exchange(r, &t, 1);
}

/* Rank 2 stops while the others are in an exchange without it. */
static mtt_status last_words(mtt_ranks *r)
{
    char byte = 0;
    mtt_transfer t = {1 - r->rank, &byte, 1, &byte, 1};
    mtt_status status = mtt_ranks_agree(r, "it", 1);
    if (r->rank == 2) {
        snprintf(env.error, sizeof(env.error), "out of memory, %0200d", 0);
        return status ? status : MTT_E_MEMORY;
    }
    while (!status) status = mtt__exchange(r, &t, 1);
    return status;
}

/* Rank 3 computes, and finds rank 1's fault and rank 2's reason later. */
static mtt_status late_words(mtt_ranks *r)
{
    mtt_status status = mtt_ranks_agree(r, "it", 1);
    if (r->rank == 1) return snprintf(env.error, sizeof(env.error), "the disk is full"), MTT_E_FILE;
    if (r->rank == 3) pause_ms(150);
    return status ? status : mtt_ranks_agree(r, "it", 1);
}

/* The device of the others waits for rank 1, which has come to a normal end, for so many timeouts. */
static double waits;
static mtt_status end_while_devices_wait(mtt_ranks *r)
{
    double end = mtt__now_ms() + waits * r->timeout;
    mtt_status status = MTT_OK;
    int begins;
    if (r->rank == 1) return MTT_OK;
    for (begins = 1; !status && mtt__now_ms() < end; begins = 0) {
        status = mtt__watch(r, begins);
        pause_ms(2);
    }
    return status;
}

static mtt_status early_end(mtt_ranks *r)
{
    return r->rank == 1 ? MTT_OK : mtt_ranks_agree(r, "it", 1);
}

static void test_silence(void)
{
    int tcp;
    for (tcp = 0; tcp < 2; tcp++) {
        run(tcp, 4, 0.5, chain);
        all_say(4, 3, MTT_E_RANK, "rank 3 (host ", "chain");
        all_say(4, 3, MTT_E_RANK, ") has been silent for 0.5 seconds", "chain");
        run(tcp, 3, 0.5, stop_waiting);
        all_say(3, 2, MTT_E_RANK, ") has been silent for 0.5 seconds", "stop waiting");
        run(tcp, 3, 0.3, stopped_once);
        all_say(3, -1, MTT_E_RANK, "rank 2 (host ", "stopped once");
        run(tcp, 4, 0.5, busy_chain);
        all_say(4, -1, MTT_OK, "", "busy");
        run(tcp, 2, 0.5, busy_once);
        all_say(2, 1, MTT_E_RANK, ") has been silent", "busy once");
        run(tcp, 2, 0.3, wait_for_each_other);
        all_say(2, -1, MTT_E_RANK, ") has been silent for 0.6 seconds", "deadlock");
        run(tcp, 3, 5, last_words);
        all_say(3, 2, MTT_E_STOPPED, "rank 2 (host ", "last words");
        all_say(3, 2, MTT_E_STOPPED, ") stopped: out of memory, 0000", "last words");
        run(tcp, 4, 5, late_words);
        all_say(4, 1, MTT_E_STOPPED, "rank 1 (host ", "late words");
        all_say(4, 1, MTT_E_STOPPED, ") stopped: the disk is full", "late words");
        run(tcp, 3, 5, early_end);
        all_say(3, 1, MTT_E_RANK, "rank 1 (host ", "early end");
        all_say(3, 1, MTT_E_RANK, ") has ended its run", "early end");
        waits = 20;
        run(tcp, 3, 0.5, end_while_devices_wait);
        all_say(3, 1, MTT_E_RANK, ") has ended its run", "an end while devices wait");
        waits = 0.1;
        run(tcp, 3, 5, end_while_devices_wait);
        all_say(3, -1, MTT_OK, "", "an end shortly before that of the others");
    }
}

/* ---- failures of fork ---- */

static long allocs, alloc_at;
static void *failing_alloc(void *user, size_t bytes)
{
    (void)user;
    return ++allocs == alloc_at ? NULL : malloc(bytes);
}
static void plain_free(void *user, void *block)
{
    (void)user;
    free(block);
}

static void test_fork_faults(void)
{
    mtt_env counting = {failing_alloc, plain_free, NULL, ""};
    int before = open_files(), at;
    mtt_status status = MTT_E_ARGUMENT;
    mtt_ranks *r;
    fflush(stdout);
    for (at = 1; at < 30 && status == MTT_E_ARGUMENT; at++) {
        fault_calls = 0;
        fault_at = at;
        status = mtt_ranks_fork(&env, 4, 0, &r);
        fault_at = 0;
        if (!status && r->rank) mtt_ranks_close(r), _exit(0);
        if (!status) mtt_ranks_close(r);
        check(!status || strstr(env.error, "cannot start rank "), "fault %d: %s", at, env.error);
        check(waitpid(-1, NULL, WNOHANG) < 0 && open_files() == before, "fault %d leaves something", at);
        new_case();
    }
    check(at == 11 && !status, "%d calls can fail", at - 2);
    for (alloc_at = 1, status = MTT_E_MEMORY; alloc_at < 20 && status; alloc_at++) {
        allocs = 0;
        status = mtt_ranks_fork(&counting, 2, 0, &r);
        if (!status && r->rank) mtt_ranks_close(r), _exit(0);
        if (!status) mtt_ranks_close(r);
        check(!status || status == MTT_E_MEMORY, "allocation %ld: %s", alloc_at, counting.error);
        check(waitpid(-1, NULL, WNOHANG) < 0 && open_files() == before, "it leaves something");
        new_case();
    }
    check(!status && alloc_at > 3, "every allocation");
    check(mtt_ranks_fork(&env, 0, 0, &r) == MTT_E_ARGUMENT && !r, "0 ranks");
    check(mtt_ranks_fork(&env, 1025, 0, &r) == MTT_E_ARGUMENT && strstr(env.error, "1..1024"), "1025 ranks");
    check(mtt_ranks_fork(&env, 2, NAN, &r) == MTT_E_ARGUMENT && strstr(env.error, "86400"), "no timeout");
    check(mtt_ranks_fork(&env, 2, 86401, &r) == MTT_E_ARGUMENT, "a long timeout");
}

/* ---- strangers at the port ---- */

static int connect_plain(int port)
{
    struct sockaddr_in at;
    int fd = -1, tries;
    memset(&at, 0, sizeof(at));
    at.sin_family = AF_INET;
    at.sin_port = htons((uint16_t)port);
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (tries = 0; tries < 200; tries++) {
        fd = socket(AF_INET, SOCK_STREAM, 0);
        if (!connect(fd, (struct sockaddr *)&at, sizeof(at))) break;
        close(fd);
        fd = -1;
        pause_ms(10);
    }
    return fd;
}

/* Garbage, silence and halves, more of them than there are places; they hold their connections. */
static pid_t start_strangers(int port)
{
    pid_t child = fork();
    char garbage[4096];
    size_t i;
    int k;
    if (child) return child;
    alarm(60);
    signal(SIGPIPE, SIG_IGN);
    for (i = 0; i < sizeof(garbage); i++) garbage[i] = (char)random_bits();
    for (k = 0; k < 70; k++) {
        int fd = connect_plain(port);
        if (fd < 0) break;
        if (k % 3 == 1 && write(fd, garbage, sizeof(garbage)) < 0) k += 0;
        if (k % 3 == 2 && write(fd, "mttrank1", 8) < 0) k += 0;
        if (k == 20) shared->step = 1;
        if (k == 30) close(fd);
    }
    for (;;) pause();
}

static void test_strangers(void)
{
    int port = next_port(), i, before = open_files();
    pid_t child[3], strangers, other;
    mtt_ranks_desc desc = describe(0, 3, port, 3);
    reset();
    patience = 10;
    child[0] = start_rank(&desc, agreements);
    strangers = start_strangers(port);
    while (!shared->step) pause_ms(5);
    desc = describe(3, 5, port, 3); /* other numbers of ranks, runs and ranks: results at 3 and 4 */
    waitpid(other = start_rank(&desc, agreements), NULL, 0);
    check(shared->rank[3].status == MTT_E_MISMATCH &&
          strstr(shared->rank[3].error, "start all with the same number of ranks"), "ranks: %s",
          shared->rank[3].error);
    desc = describe(4, 5, port, 3);
    desc.run = "another";
    waitpid(start_rank(&desc, agreements), NULL, 0);
    check(shared->rank[4].status == MTT_E_MISMATCH && strstr(shared->rank[4].error, "run \"another\"") &&
          strstr(shared->rank[4].error, "run \"test\""), "runs: %s", shared->rank[4].error);
    for (i = 1; i < 3; i++) {
        desc = describe(i, 3, port, 3);
        child[i] = start_rank(&desc, agreements);
        pause_ms(i == 1 ? 300 : 0);
        if (i == 1) {
            waitpid(start_rank(&desc, agreements), NULL, 0);
            check(shared->rank[1].status == MTT_E_MISMATCH &&
                  strstr(shared->rank[1].error, "two processes are the first, the other one on host "),
                  "twins: %s", shared->rank[1].error);
        }
    }
    for (i = 0; i < 3; i++) waitpid(child[i], NULL, 0);
    all_say(3, -1, MTT_OK, "", "beside strangers");
    kill(strangers, SIGKILL);
    waitpid(strangers, NULL, 0);
    check(open_files() == before, "open files");
}

/* Listens at a port of the loopback address of one family; -1: it cannot. */
static int listen_plain(int v6, int port)
{
    struct sockaddr_in at4;
    struct sockaddr_in6 at6;
    int on = 1, fd = socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM, 0);
    memset(&at4, 0, sizeof(at4));
    memset(&at6, 0, sizeof(at6));
    at4.sin_family = AF_INET;
    at6.sin6_family = AF_INET6;
    at4.sin_port = at6.sin6_port = htons((uint16_t)port);
    at4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    at6.sin6_addr = in6addr_loopback;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (!bind(fd, v6 ? (struct sockaddr *)&at6 : (struct sockaddr *)&at4, v6 ? sizeof(at6) : sizeof(at4)) &&
        !listen(fd, 1000)) return fd;
    close(fd);
    return -1;
}

/* ---- floods ---- */

enum { IDLE, SLOW, CHURN, STALL }; /* says nothing; says a byte every 0.3 s; ends and comes again; stops after
                                      a hello that fits, and comes again */

/* A hello as of a rank of the run "test". */
static mtt__hello hello_of(int rank, int ranks)
{
    mtt__hello h;
    memset(&h, 0, sizeof(h));
    memcpy(h.magic, "mttrank2", sizeof(h.magic));
    h.rank = rank;
    h.ranks = ranks;
    h.sealed = secret != NULL;
    strcpy(h.run, "test");
    strcpy(h.host, "elsewhere");
    return h;
}

/* Holds `count` connections to a port as long as it lives. Sets `step` when it has had them all. */
static pid_t start_flood(int port, int kind, int count, int ranks)
{
    enum { MOST_STRANGERS = 900 };
    static int fd[MOST_STRANGERS];
    struct rlimit files;
    mtt__hello hello = hello_of(ranks - 1, ranks);
    char byte;
    int i, round;
    pid_t child = fork();
    if (child) return child;
    alarm(60);
    signal(SIGPIPE, SIG_IGN);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    for (i = 0; i < count; i++) fd[i] = -1;
    for (round = 0;; round++) {
        for (i = 0; i < count; i++) {
            int comes = fd[i] < 0 && (!round || kind >= CHURN);
            if (comes) fd[i] = connect_plain(port);
            if (fd[i] < 0) continue;
            if (kind == SLOW && round < 300) send(fd[i], (char *)&hello + round, 1, MSG_NOSIGNAL);
            if (kind == STALL && comes) send(fd[i], &hello, sizeof(hello), MSG_NOSIGNAL);
            if (kind == CHURN || (kind == STALL && recv(fd[i], &byte, 1, MSG_DONTWAIT) == 0))
                close(fd[i]), fd[i] = -1;
        }
        shared->step = 1;
        pause_ms(kind == SLOW ? 300 : 5);
    }
}

/* Strangers at the port of rank 0 or 1, before the last rank comes. The others must meet as usual: where
   strangers hold all places, they do not within their timeout. */
static void flood(const char *name, int of, int kind, int count)
{
    int port = next_port(), i;
    pid_t child[3], strangers = 0;
    reset();
    patience = 10;
    for (i = 0; i < 3; i++) {
        mtt_ranks_desc desc = describe(i, 3, port, 10);
        if (i == 2) { /* the last one */
            while (!shared->rank[of].port) pause_ms(2);
            strangers = start_flood(shared->rank[of].port, kind, count, 3);
            while (!shared->step) pause_ms(2);
        }
        child[i] = start_rank(&desc, agreements);
    }
    for (i = 0; i < 3; i++) waitpid(child[i], NULL, 0);
    kill(strangers, SIGKILL);
    waitpid(strangers, NULL, 0);
    all_say(3, -1, MTT_OK, "", name);
}

static void test_floods(void)
{
    int i, port = next_port(), before = open_files();
    pid_t child, strangers;
    mtt_ranks_desc desc;
    struct rlimit files, few;
    for (i = 0; i < 2; i++) { /* without and with a secret */
        secret = i ? "a secret of 27 letters, yes" : NULL;
        flood("256 idle strangers", 0, IDLE, 256);
        flood("900 idle strangers", 0, IDLE, 900);
        flood("900 idle strangers at rank 1", 1, IDLE, 900);
        flood("slow strangers", 0, SLOW, 300);
        flood("strangers who come again", 0, CHURN, 50);
        flood("strangers who stop halfway", 0, STALL, 200);
        flood("strangers who stop halfway at rank 1", 1, STALL, 200);
    }
    secret = NULL;
    getrlimit(RLIMIT_NOFILE, &files);
    few = files;
    few.rlim_cur = (rlim_t)before + 30;
    setrlimit(RLIMIT_NOFILE, &few);
    flood("strangers who take all files", 0, IDLE, 25);
    setrlimit(RLIMIT_NOFILE, &files);
    reset();
    desc = describe(0, 2, port, 1);
    child = start_rank(&desc, agreements);
    while (!shared->rank[0].port) pause_ms(2);
    strangers = start_flood(port, IDLE, 5, 2);
    waitpid(child, NULL, 0);
    kill(strangers, SIGKILL);
    waitpid(strangers, NULL, 0);
    check(shared->rank[0].status == MTT_E_RANK && strstr(shared->rank[0].error, "others: 5"), "count: %s",
          shared->rank[0].error);
    check(open_files() == before, "open files");
}

/* ---- secrets ---- */

static void test_hmac(void)
{
    static const struct {
        int key, key_bytes; /* a byte, and how often; 0: the text below */
        const char *key_text, *data, *hash;
    } cases[] = { /* RFC 4231, then Python's hmac: around the end of a block */
        {0x0b, 20, "", "Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
        {0, 4, "Jefe", "what do ya want for nothing?",
         "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
        {0xaa, 131, "", "Test Using Larger Than Block-Size Key - Hash Key First",
         "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
        {0xaa, 131, "", "This is a test using a larger than block-size key and a larger than block-size "
         "data. The key needs to be hashed before being used by the HMAC algorithm.",
         "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
        {0, 0, "", "", "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad"},
    };
    static const char sums[] = "4f1eebc258bb9fa976499d5d66380ee05a661cf4a375adbd7d7c22da4ae86dac";
    unsigned char hash[32], key[200], data[200], all[200 * 32];
    char text[65];
    size_t i, k;
    for (i = 0; i < MTT__LENGTH(cases); i++) {
        memset(key, cases[i].key, sizeof(key));
        memcpy(key, cases[i].key_text, strlen(cases[i].key_text));
        mtt__hmac(key, (size_t)cases[i].key_bytes, cases[i].data, strlen(cases[i].data), hash);
        for (k = 0; k < 32; k++) snprintf(text + 2 * k, 3, "%02x", hash[k]);
        check(!strcmp(text, cases[i].hash), "hash %zu: %s", i, text);
        new_case();
    }
    for (i = 0; i < 200; i++) { /* all lengths, with a key of that length: the hash of their hashes */
        for (k = 0; k < i; k++) key[k] = (unsigned char)(k * 7), data[k] = (unsigned char)(k * 13 + i);
        mtt__hmac(key, i, data, i, all + 32 * i);
    }
    mtt__hmac("", 0, all, sizeof(all), hash);
    for (k = 0; k < 32; k++) snprintf(text + 2 * k, 3, "%02x", hash[k]);
    check(!strcmp(text, sums), "all lengths: %s", text);
}

static int receive_all(int fd, void *data, size_t bytes) /* 1 = all of them */
{
    size_t got = 0;
    ptrdiff_t n = 1;
    for (; got < bytes && n > 0; got += n > 0 ? (size_t)n : 0)
        n = recv(fd, (char *)data + got, bytes - got, 0);
    return got == bytes;
}

/* A stranger says two hellos, or the second time what it has heard. Returns 1 if it was refused after it was
   answered twice, 2 if it is still connected, 0 if it was not answered. */
static int intrude(int port, const mtt__hello *said, int reflects)
{
    mtt__hello heard;
    int i, end, fd = connect_plain(port);
    for (i = 0; i < 2; i++) {
        const mtt__hello *mine = i && reflects ? &heard : &said[i];
        if (send(fd, mine, sizeof(*mine), MSG_NOSIGNAL) < 0 || !receive_all(fd, &heard, sizeof(heard))) break;
    }
    pause_ms(20);
    end = recv(fd, &heard, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
    close(fd);
    return i < 2 ? 0 : 1 + end;
}

/* Those who come as the last rank to rank 0 of 2 or rank 1 of 3. Exits with the number of the first who is
   not refused. `kept` is what the true one has said before. */
static pid_t start_intruders(int of, const mtt__hello *kept)
{
    pid_t child = fork();
    mtt_ranks stranger;
    mtt__hello said[2];
    struct {
        mtt__frame head;
        char text[8];
    } stop;
    char byte;
    int port = shared->rank[of].port, fd;
    if (child) return child;
    alarm(60);
    memset(&stop, 0, sizeof(stop));
    stop.head.kind = MTT__FRAME_STOP;
    stop.head.bytes = sizeof(stop.text);
    fd = connect_plain(port);
    send(fd, &stop, sizeof(stop), MSG_NOSIGNAL);
    if (recv(fd, &byte, 1, 0) > 0) _exit(5); /* the last word of nobody */
    close(fd);
    memset(&stranger, 0, sizeof(stranger));
    said[0] = said[1] = hello_of(of + 1, of + 2);
    if (intrude(port, said, 0) != 1) _exit(1); /* without a proof */
    if (intrude(port, said, 1) != 1) _exit(2); /* with the host's words */
    stranger.secret = "hunter";
    mtt__prove(&stranger, &said[1], &said[0], 0);
    if (intrude(port, said, 0) != 1) _exit(3); /* a proof of another secret */
    if (!of && intrude(port, kept, 0) != 1) _exit(4); /* a replay */
    _exit(0);
}

/* Passes on what a guest and a host say, and keeps what the guest says. */
static pid_t start_tap(int from, int to, mtt__hello *kept)
{
    pid_t child = fork();
    int door, guest, host;
    size_t got = 0;
    if (child) return child;
    alarm(60);
    door = listen_plain(0, from);
    guest = accept(door, NULL, NULL);
    host = connect_plain(to);
    for (;;) {
        char bytes[4096];
        struct pollfd polls[2] = {{guest, POLLIN, 0}, {host, POLLIN, 0}};
        int k;
        poll(polls, 2, -1);
        for (k = 0; k < 2; k++) {
            ptrdiff_t n = polls[k].revents ? recv(k ? host : guest, bytes, sizeof(bytes), 0) : -1;
            if (n == 0) _exit(0);
            if (n < 0) continue;
            if (!k && got + (size_t)n <= 2 * sizeof(*kept)) memcpy((char *)kept + got, bytes, (size_t)n);
            if (!k) got += (size_t)n;
            if (send(k ? guest : host, bytes, (size_t)n, MSG_NOSIGNAL) < 0) _exit(0);
        }
    }
}

static pid_t start_echo(int port)
{
    pid_t child = fork();
    char bytes[4096];
    int door, fd;
    if (child) return child;
    alarm(60);
    door = listen_plain(0, port);
    while ((fd = accept(door, NULL, NULL)) >= 0) {
        ptrdiff_t n;
        while ((n = recv(fd, bytes, sizeof(bytes), 0)) > 0)
            if (send(fd, bytes, (size_t)n, MSG_NOSIGNAL) < 0) break;
        close(fd);
    }
    _exit(0);
}

/* One who has another secret, or none, comes first as the last rank. It hears why, and the run starts. */
static void impostor(const char *name, const char *right, const char *wrong, const char *told)
{
    int port = next_port(), i;
    pid_t child[3];
    mtt_ranks_desc desc;
    reset();
    patience = 10;
    for (i = 0; i < 3; i++) {
        secret = right;
        desc = describe(i, 3, port, 10);
        if (i == 2) {
            secret = wrong;
            desc = describe(2, 3, port, 10);
            waitpid(start_rank(&desc, agreements), NULL, 0);
            check(shared->rank[2].status == MTT_E_MISMATCH && strstr(shared->rank[2].error, told) &&
                  strstr(shared->rank[2].error, "rank 2 of 3") &&
                  strstr(shared->rank[2].error, "rank 0 of 3"),
                  "%s: status %d, %s", name, shared->rank[2].status, shared->rank[2].error);
            for (i = 0; i < 3; i++)
                check(!strstr(shared->rank[i].error, "hunter"), "%s: the secret is told: %s", name,
                      shared->rank[i].error);
            secret = right;
            desc = describe(i = 2, 3, port, 10);
        }
        child[i] = start_rank(&desc, agreements);
    }
    for (i = 0; i < 3; i++) waitpid(child[i], NULL, 0);
    all_say(3, -1, MTT_OK, "", name);
    secret = NULL;
}

static void test_secrets(void)
{
    static const char right[] = "hunter2hunter2hunter2";
    static const char longest[] = "hunter hunter hunter hunter hunter hunter hunter hunter hunter hunter";
    mtt__hello *kept = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int port = next_port(), tapped = next_port(), i, k, intruded = 0, before = open_files();
    pid_t child[3], tap;
    mtt_ranks_desc desc;
    impostor("the right secret comes second", right, "hunter2hunter2hunter3", "they have different secrets");
    impostor("a long secret", longest, "hunter hunter hunter", "they have different secrets");
    impostor("the start of the secret", right, "hunter2hunter2hunter", "they have different secrets");
    impostor("no secret", right, NULL, "the first has no MTT_SECRET, the second has one");
    impostor("a secret too many", NULL, right, "the second has no MTT_SECRET, the first has one");
    for (i = 1; i < 18; i++) { /* a short one can be guessed */
        const int words = i < 16;
        mtt_ranks *alone = NULL;
        mtt_env env = {0};
        mtt_ranks_desc one = {.ranks = 1, .secret = longest + strlen(longest) - i};
        mtt_status status = mtt_ranks_connect(&env, &one, &alone);
        check(status == (words ? MTT_E_ARGUMENT : MTT_OK) && !strstr(env.error, "hunter") &&
              !words == !strstr(env.error, "openssl rand -hex 16"), "a secret of %d bytes: %s", i, env.error);
        mtt_ranks_close(alone);
    }
    secret = right;
    reset();
    tap = start_tap(tapped, port, kept);
    for (i = 0; i < 2; i++) {
        desc = describe(i, 2, i ? tapped : port, 10);
        child[i] = start_rank(&desc, agreements);
    }
    for (i = 0; i < 2; i++) waitpid(child[i], NULL, 0);
    kill(tap, SIGKILL);
    waitpid(tap, NULL, 0);
    all_say(2, -1, MTT_OK, "", "with a tap");
    check(kept[1].rank == 1 && memcmp(kept[1].proof, kept[0].proof, 32), "a proof is kept");
    check(!memmem(kept, 2 * sizeof(*kept), "hunter", 6), "the secret is not sent");
    for (k = 0; k < 2; k++) { /* first rank 0 meets intruders, then rank 1 */
        reset();
        patience = 10;
        port = k ? next_port() : port;
        slow = k ? 2 : -1;
        for (i = 0; i < 2 + k; i++) {
            if (i == 1 + k) {
                while (!shared->rank[k].port) pause_ms(2);
                tap = start_intruders(k, kept);
                if (!k) waitpid(tap, &intruded, 0);
            }
            desc = describe(i, 2 + k, port, 10);
            child[i] = start_rank(&desc, agreements);
        }
        if (k) waitpid(tap, &intruded, 0);
        for (i = 0; i < 2 + k; i++) waitpid(child[i], NULL, 0);
        check(WIFEXITED(intruded) && !WEXITSTATUS(intruded), "rank %d met intruders: %d", k, intruded);
        all_say(2 + k, -1, MTT_OK, "", "after intruders");
    }
    slow = -1;
    reset();
    port = next_port();
    tap = start_echo(port);
    desc = describe(1, 2, port, 1);
    waitpid(start_rank(&desc, agreements), NULL, 0);
    kill(tap, SIGKILL);
    waitpid(tap, NULL, 0);
    check(shared->rank[1].status == MTT_E_RANK &&
          strstr(shared->rank[1].error, "another program or version answers"), "an echo as rank 0: %s",
          shared->rank[1].error);
    secret = NULL;
    munmap(kept, 4096);
    check(open_files() == before, "open files");
}

/* ---- texts of strangers ---- */

static void fails_as(const char *text, const char *wanted)
{
    check(mtt__fail(&env, MTT_E_DATA, "%s", text) == MTT_E_DATA && !strcmp(env.error, wanted),
          "\"%s\" for \"%s\"", env.error, wanted);
    new_case();
}

/* A stranger in a run without a secret joins as rank 1, with such a host and such last words. */
static pid_t start_rude_rank(int port, int stops)
{
    pid_t child = fork();
    mtt_ranks stranger;
    mtt__hello said[2], heard;
    struct {
        mtt__frame head;
        char text[40];
    } stop;
    int fd;
    if (child) return child;
    alarm(60);
    memset(&stranger, 0, sizeof(stranger));
    memset(&stop, 0, sizeof(stop));
    stranger.secret = "";
    said[0] = hello_of(1, 3);
    strcpy(said[0].host, "\033[2J\033]0;owned\a\n forged \xc2\x9b\xe2\x80\xae");
    said[1] = said[0];
    fd = connect_plain(port);
    if (send(fd, &said[0], sizeof(said[0]), 0) < 0 || !receive_all(fd, &heard, sizeof(heard))) _exit(1);
    mtt__prove(&stranger, &said[1], &heard, 0);
    if (send(fd, &said[1], sizeof(said[1]), 0) < 0 || !receive_all(fd, &heard, sizeof(heard))) _exit(1);
    strcpy(stop.text, "\033[31mall is well\r\n\x9b");
    stop.head.kind = MTT__FRAME_STOP;
    stop.head.bytes = strlen(stop.text);
    if (stops && send(fd, &stop, sizeof(stop.head) + (size_t)stop.head.bytes, 0) < 0) _exit(1);
    _exit(0);
}

static void test_texts(void)
{
    int stops;
    fails_as("text, \xc3\xa9 \xe6\xbc\xa2 \xf0\x9f\x98\x80", "text, \xc3\xa9 \xe6\xbc\xa2 \xf0\x9f\x98\x80");
    fails_as("\033[2J\033]0;owned\a", "?[2J?]0;owned?");
    fails_as("a\nb\rc\td\x7f" "e\b", "a?b?c?d?e?");
    fails_as("\xc2\x9b" "2J \xc2\x80 \xc2\xa0", "??2J ?? \xc2\xa0");
    fails_as("\xe2\x80\xae \xe2\x80\xaa \xe2\x81\xa6 \xe2\x81\xa9", "??? ??? ??? ???");
    fails_as("\xe2\x80\x8f \xd8\x9c \xe2\x80\xa8 \xe2\x80\x8d", "??? ?? ??? \xe2\x80\x8d");
    fails_as("\x9b \xff \xc0\x9b \xed\xa0\x80 \xe2\x80", "? ? ?? ??? ??");
    for (stops = 0; stops < 2; stops++) {
        int port = next_port(), status = 0;
        signed char *at;
        mtt_ranks_desc desc = describe(0, 3, port, 10);
        pid_t child;
        reset();
        patience = 10;
        child = start_rank(&desc, agreements);
        while (!shared->rank[0].port) pause_ms(2);
        waitpid(start_rude_rank(port, stops), &status, 0);
        waitpid(child, NULL, 0);
        for (at = (signed char *)shared->rank[0].error; *at >= 32 && *at < 127;) at++;
        check(!status && shared->rank[0].status == (stops ? MTT_E_STOPPED : MTT_E_RANK) && !*at &&
              strstr(shared->rank[0].error, "rank 1 (host ?[2J?]0;owned?? forged ") &&
              strstr(shared->rank[0].error, stops ? ") stopped: ?[31mall is well???" : ") ended"), "%s",
              shared->rank[0].error);
        new_case();
    }
}

/* ---- where ranks listen ---- */

static void listens(const char *address, const char *wanted)
{
    int port = next_port(), i;
    pid_t child[3];
    mtt_ranks_desc desc;
    reset();
    patience = 10;
    for (i = 0; i < 3; i++) {
        desc = describe(i, 3, port, 10);
        desc.address = i && !wanted ? "127.0.0.1" : address;
        child[i] = start_rank(&desc, agreements);
    }
    for (i = 0; i < 3; i++) waitpid(child[i], NULL, 0);
    all_say(3, -1, MTT_OK, "", address);
    for (i = 0; i < 3; i++)
        check(!strcmp(shared->rank[i].address, wanted ? wanted : i ? "127.0.0.1" : "::") ||
              (!wanted && !strcmp(shared->rank[i].address, "0.0.0.0")), "%s: rank %d listens at %s", address,
              i, shared->rank[i].address);
}

static void test_binding(void)
{
    struct ifaddrs *list = NULL, *at;
    char name[64] = "", other[64] = "";
    listens("127.0.0.1", "127.0.0.1");
    listens("localhost", "127.0.0.1");
    listens("192.0.2.77", NULL); /* of no host: a service that passes connections on */
    if (!getifaddrs(&list))
        for (at = list; at; at = at->ifa_next) {
            int family = at->ifa_addr ? at->ifa_addr->sa_family : 0;
            socklen_t bytes = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
            if (family != AF_INET && family != AF_INET6) continue;
            if (getnameinfo(at->ifa_addr, bytes, name, sizeof(name), NULL, 0, NI_NUMERICHOST)) continue;
            if (mtt__is_local(name) || strchr(name, '%')) continue;
            listens(name, name);
            strcpy(other, name);
        }
    freeifaddrs(list);
    if (!*other) skip("this host has no address but loopback");
}

static void test_rendezvous(void)
{
    int port = next_port(), i, k;
    pid_t child[3];
    char text[64], name[64] = "";
    struct rlimit files, full;
    const char *const pairs[4][2] = {
        {"0.0.0.0", "localhost"}, {"localhost", "127.0.0.1"}, {name, name}, {"::1", "::1"}};
    mtt_ranks *r;
    mtt_ranks_desc desc = describe(0, 2, port, 0.3);
    int fd = listen_plain(0, port);
    check(fd >= 0, "port %d", port);
    gethostname(name, sizeof(name) - 1);
    check(mtt_ranks_connect(&env, &desc, &r) == MTT_E_ARGUMENT && !r, "a port in use");
    snprintf(text, sizeof(text), "cannot listen at port %d", port);
    check(strstr(env.error, text) && strstr(env.error, "MASTER_PORT"), "%s", env.error);
    desc.rank = 1;
    check(mtt_ranks_connect(&env, &desc, &r) == MTT_E_RANK &&
          strstr(env.error, "within 0.3 seconds: it says nothing"), "it hangs: %s",
          env.error);
    close(fd);
    check(mtt_ranks_connect(&env, &desc, &r) == MTT_E_RANK && strstr(env.error, "not answer at 127.0.0.1"),
          "nobody there: %s", env.error);
    desc.address = "no such host";
    check(mtt_ranks_connect(&env, &desc, &r) == MTT_E_RANK && strstr(env.error, "no such host"), "%s",
          env.error);
    for (i = 0; i < 2; i++) desc = describe(i, 3, port, 0.6), child[i] = start_rank(&desc, agreements);
    for (i = 0; i < 2; i++) waitpid(child[i], NULL, 0);
    all_say(2, -1, MTT_E_RANK, "for 1 of 3 ranks: 2;", "rank 2 is absent");
    late = 0;
    run(1, 3, 5, agreements);
    all_say(3, -1, MTT_OK, "", "rank 0 comes late");
    late = 2;
    run(1, 3, 5, agreements);
    all_say(3, -1, MTT_OK, "", "rank 2 comes late");
    late = -1;
    for (k = 0; k < 4; k++) {
        struct addrinfo *list;
        int unknown = mtt__resolve(pairs[k][0], port, AF_UNSPEC, &list);
        if (!unknown) freeaddrinfo(list);
        if (unknown || (k == 3 && (fd = listen_plain(1, 0)) < 0)) {
            skip(k == 3 ? "this host has no IPv6" : "this host does not know its own name");
            continue;
        }
        if (k == 3) close(fd);
        reset();
        for (i = 0; i < 3; i++) {
            desc = describe(i, 3, port, 5);
            desc.address = pairs[k][i > 0];
            child[i] = start_rank(&desc, agreements);
        }
        for (i = 0; i < 3; i++) waitpid(child[i], NULL, 0);
        all_say(3, -1, MTT_OK, "", pairs[k][0]);
    }
    reset();
    desc = describe(0, 2, port, 2);
    getrlimit(RLIMIT_NOFILE, &files);
    full = files;
    close(fd = dup(0));
    full.rlim_cur = (rlim_t)fd + 1; /* enough to listen */
    setrlimit(RLIMIT_NOFILE, &full);
    child[0] = start_rank(&desc, agreements);
    setrlimit(RLIMIT_NOFILE, &files);
    desc.rank = 1;
    child[1] = start_rank(&desc, agreements);
    for (i = 0; i < 2; i++) waitpid(child[i], NULL, 0);
    check(shared->rank[0].status == MTT_E_ARGUMENT && strstr(shared->rank[0].error, "ulimit -n"), "%s",
          shared->rank[0].error);
    desc = describe(2, 2, port, 1);
    check(mtt_ranks_connect(&env, &desc, &r) == MTT_E_ARGUMENT && strstr(env.error, "rank 2 of 2"), "rank");
    desc = describe(0, 2, 70000, 1);
    check(mtt_ranks_connect(&env, &desc, &r) == MTT_E_ARGUMENT && strstr(env.error, "port 70000"), "port");
    desc = describe(0, 2, port, -1);
    check(mtt_ranks_connect(&env, &desc, &r) == MTT_E_ARGUMENT && strstr(env.error, "timeout -1"), "timeout");
#ifndef MTT_MPI
    desc = describe(0, 2, port, 1);
    desc.mpi = 1;
    check(mtt_ranks_connect(&env, &desc, &r) == MTT_E_ARGUMENT && strstr(env.error, "no MPI"), "no MPI");
#endif
}

/* ---- launchers ---- */

static void variables(const char *text) /* NAME=VALUE ..., and no others */
{
    static const char *const all[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
        "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS",
        "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE",
        "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MTT_SECRET"};
    char copy[512], *word, *rest = copy;
    size_t i;
    for (i = 0; i < MTT__LENGTH(all); i++) unsetenv(all[i]);
    snprintf(copy, sizeof(copy), "%s", text);
    while ((word = strtok_r(rest, " ", &rest))) {
        char *value = strchr(word, '=');
        *value++ = 0;
        setenv(word, value, 1);
    }
}

static void launched(const char *text, int rank, int ranks, int local, int port, const char *host,
                     const char *name)
{
    launch l;
    const mtt_ranks_desc *d = &l.desc;
    variables(text);
    check(!launch_find(&env, &l), "%s: %s", text, env.error);
    check(d->rank == rank && d->ranks == ranks && l.local == local && d->port == port &&
          !strcmp(d->address ? d->address : "", host) && !strcmp(d->run ? d->run : "", name),
          "%s: rank %d of %d, local %d, port %d, host %s, run %s", text, d->rank, d->ranks, l.local, d->port,
          d->address, d->run);
    new_case();
}

static void malformed(const char *text, const char *name)
{
    launch l;
    variables(text);
    check(launch_find(&env, &l) == MTT_E_ARGUMENT && !strncmp(env.error, name, strlen(name)),
          "%s: \"%s\" does not begin with %s", text, env.error, name);
    new_case();
}

static void test_launchers(void)
{
    launch l;
    launched("", 0, 1, 0, 0, "", "");
    launched("MASTER_ADDR=a", 0, 1, 0, 0, "", "");
    launched("RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=1234 "
             "TORCHELASTIC_RUN_ID=abc", 3, 8, 1, 1235, "node1", "abc");
    launched("RANK=0 WORLD_SIZE=1", 0, 1, 0, 0, "", "");
    launched("RANK=1 WORLD_SIZE=2 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1", 1, 2, -1, 0, "", "");
    launched("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
             "OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=p@1 SLURM_JOB_NODELIST=n[1-4]", 1, 4, 1, 0, "",
             "p@1");
    launched("OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 "
             "OMPI_COMM_WORLD_LOCAL_SIZE=4 SLURM_JOB_NODELIST=n[1-4] SLURM_STEP_ID=0 SLURM_PROCID=1 "
             "SLURM_NTASKS=1 SLURM_STEP_NODELIST=n2", 5, 8, 1, 0, "n1", "");
    launched("PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MASTER_ADDR=10.0.0.1", 2, 4, 0, 0, "10.0.0.1", "");
    launched("SLURM_PROCID=7 SLURM_NTASKS=16 SLURM_LOCALID=3 SLURM_JOB_ID=42 SLURM_STEP_ID=0 "
             "SLURM_STEP_NODELIST=rack[03-05,9]-gpu[1,2],other SLURM_JOB_NODELIST=x", 7, 16, 3, 0,
             "rack03-gpu1", "42");
    launched("SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_ID=1 SLURM_JOB_NODELIST=node7,node9", 0, 2, -1, 0,
             "node7", "");
    launched("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=42 SLURM_JOB_NODELIST=n[1-8]", 0, 1, 0, 0, "", "");
    malformed("RANK=0 WORLD_SIZE=2 MTT_SECRET=", "MTT_SECRET is empty");
    variables("RANK=0 WORLD_SIZE=2 MTT_SECRET=hunter2hunter2hunter2");
    check(!launch_find(&env, &l) && l.desc.secret && !strcmp(l.desc.secret, "hunter2hunter2hunter2"),
          "MTT_SECRET");
    malformed("RANK=1", "WORLD_SIZE is not set, but RANK is");
    malformed("WORLD_SIZE=2", "RANK is not set, but WORLD_SIZE is");
    malformed("RANK=2 WORLD_SIZE=2", "RANK=2: it must be a number of 0..1");
    malformed("RANK=x WORLD_SIZE=2", "RANK=x");
    malformed("RANK=-1 WORLD_SIZE=2", "RANK=-1");
    malformed("RANK= WORLD_SIZE=2", "RANK=:");
    malformed("RANK=0 WORLD_SIZE=2000", "WORLD_SIZE=2000");
    malformed("RANK=0 WORLD_SIZE=99999999999999999999", "WORLD_SIZE=9999");
    malformed("RANK=0 WORLD_SIZE=2 LOCAL_RANK=2", "LOCAL_RANK=2");
    malformed("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3", "LOCAL_WORLD_SIZE=3");
    malformed("RANK=0 WORLD_SIZE=2 MASTER_PORT=65535", "MASTER_PORT=65535");
    malformed("RANK=0 WORLD_SIZE=2 MASTER_ADDR=", "MASTER_ADDR=");
    malformed("PMI_RANK=0", "PMI_SIZE is not set");
    malformed("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_SIZE=4", "MASTER_ADDR");
    malformed("SLURM_STEP_ID=0 SLURM_PROCID=0", "SLURM_NTASKS is not set");
    malformed("SLURM_STEP_ID=0 SLURM_NTASKS=2", "SLURM_PROCID is not set");
    malformed("SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_JOB_NODELIST=n[1-2",
              "SLURM_JOB_NODELIST=n[1-2");
    malformed("SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_JOB_NODELIST=,a", "SLURM_JOB_NODELIST=,a");
    variables("");
}

int main(int argc, char **argv)
{
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(shared != MAP_FAILED, "shared memory");
    if (shared == MAP_FAILED) return finish();
    alarm(60);
    test_launchers();
    test_fork_faults();
    test_exchanges();
    test_disagreement();
    test_kills();
    test_kill_at_start();
    test_silence();
    test_strangers();
    test_rendezvous();
    alarm(120);
    test_hmac();
    test_texts();
    test_binding();
    test_secrets();
    test_floods();
    return finish();
}
