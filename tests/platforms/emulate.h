/* emulate.h - runs the kernels of mtt_kernels.cu on the CPU. emulate.py makes C++ of that file;
   tests/emulate.sh compiles it with this header in front. CUDA's own headers give the types. emulate_hopper.h
   has what only the room >>hopper needs.

   A thread of a block is a fiber, a block's fibers share one thread of the CPU, and blocks run one after
   another, those of a cluster together. A fiber runs until it waits: at a barrier, or at a warp's collective
   for the lanes of its mask. What CUDA leaves undefined ends the program with a message:

   - a wait that never ends, such as for a collective or barrier that some threads do not reach,
   - a collective or barrier that threads reach in different lines,
   - a shared address outside the block's memory, or one that is not aligned,
   - a wait for another block that never ends.

   What CUDA leaves unset is NaN (all bits 1) here: device memory, the shared memory of each block, and the
   target of an asynchronous copy until the thread has waited for its group. Every other block runs its
   threads in reverse order. So a result that depends on a missing barrier or wait becomes NaN. */
#pragma once
#include <boost/context/fiber.hpp>
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <algorithm>
#include <functional>
#include <map>
#include <stdarg.h>
#include <stdio.h>
#include <string>
#include <string.h>
#include <sys/mman.h>
#include <type_traits>
#include <utility>
#include <vector>

#undef __shared__
#define __launch_bounds__(...)
#define __expf expf /* glibc has functions of these names */
#define __log2f log2f
#define __logf logf
#define fmaxf emulate_fmaxf
#define fminf emulate_fminf

static inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
static inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }

/* As on a device, also of a signaling NaN: glibc's return NaN for those. */
static inline float fmaxf(float x, float y) { return x != x ? y : y > x ? y : x; }
static inline float fminf(float x, float y) { return x != x ? y : y < x ? y : x; }

static dim3 gridDim, blockDim;

namespace emulate
{

/* ---- threads, warps and the block that runs ---- */

struct copy {
    char *to;
    const void *from;
    int bytes, from_bytes, group; /* the rest of `bytes` becomes zeros */
};

/* Counts arrivals, and bytes on their way. A phase ends when none is missing. An mbarrier is one of these in
   shared memory. */
struct barrier {
    uint64_t phase : 16, count : 13, missing : 13;
    int64_t bytes : 22;
};

enum state { READY, AT_BARRIER, AT_COLLECTIVE, RETURNED };

struct thread {
    boost::context::fiber fiber;
    uint3 index;
    int number, line; /* line: where it waits */
    enum state state;
    const barrier *at; /* where it waits for the end of `phase` */
    unsigned phase;
    unsigned mask;  /* of the collective */
    void *operands; /* of the collective */
    std::vector<copy> copies;
    int groups, polls; /* groups of copies so far, loads of another block's results */
    int products;      /* of its warpgroup that it has issued */
    int pending;       /* work of emulate_hopper.h that must end before the thread does */
};

struct warp {
    unsigned ready, waiting; /* lanes that may run, lanes at a collective */
};

/* Offsets in a block's shared memory, which are its 32-bit addresses: first of dynamic shared memory (0 is no
   address), then of static variables. Addresses in wgmma's descriptors have 18 bits. */
enum { DYNAMIC_AT = 1024, STATIC_AT = 229 << 10, SHARED_BYTES = 256 << 10, BARRIERS = 16, MOST_BLOCKS = 8 };

struct block_state {
    uint3 index;
    thread *threads;
    warp warps[32];
    struct barrier barriers[BARRIERS], warpgroups[8];
    int lines[BARRIERS]; /* where its threads wait */
    int products[8];     /* of each warpgroup: those that one of its threads has issued */
    bool begun;
    int returned; /* threads */
    char *shared;
};

static block_state cluster[MOST_BLOCKS], *block = cluster; /* blocks that run together; the one that runs */
static int cluster_blocks;
static struct barrier cluster_barrier;
alignas(1024) static char cluster_shared[MOST_BLOCKS][SHARED_BYTES];
static std::vector<thread> &threads = *new std::vector<thread>; /* never destroyed: fibers stay as they are */
static thread *self;
static boost::context::fiber scheduler, *left; /* left: where the fiber goes that another one follows */
static bool reversed;                          /* the order of the block's threads */
static const std::function<void()> *body;
static const char *kernel_name = "none";
static std::vector<std::pair<const void *, uint32_t>> statics; /* of the kernel: key and offset */
static uint32_t static_bytes;
static size_t shared_bytes;
static int launches;
/* Work of the copy engine, and its block. It is done when no thread can go on: at the latest time. */
static std::vector<std::pair<block_state *, std::function<void()>>> engine;

[[noreturn]] static void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void fail(const char *format, ...)
{
    va_list args;
    fprintf(stderr, "FAILED: emulator, kernel %s, block (%u, %u, %u)", kernel_name, block->index.x,
            block->index.y, block->index.z);
    if (self) fprintf(stderr, ", thread %d", self->number);
    fputs(": ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    fflush(NULL);
    _Exit(1);
}

/* Goes on with another thread, or with the scheduler, until one comes back to this one. */
static void leave_for(boost::context::fiber *next, boost::context::fiber *own)
{
    left = own;
    boost::context::fiber from = std::move(*next).resume();
    *left = std::move(from); /* `left` is now that of the one who came back */
}

/* Lanes of a warp follow each other. Where none may run, the scheduler goes on to the next warp. */
static void wait(enum state state, int line)
{
    thread *const own = self;
    warp *w = &block->warps[own->number / 32];
    own->state = state;
    own->line = line;
    if (!w->ready) {
        leave_for(&scheduler, &own->fiber);
        return;
    }
    const int lane = reversed ? 31 - __builtin_clz(w->ready) : __builtin_ctz(w->ready);
    w->ready &= ~(1u << lane);
    self = &block->threads[own->number / 32 * 32 + lane];
    self->state = READY;
    leave_for(&self->fiber, &own->fiber);
}

/* Stacks whose tops share no lines of the cache: at equal places of pages they would evict each other. A page
   that cannot be touched lies below each. */
struct stacks {
    enum { BYTES = 128 << 10, PAGE = 4096, LINES = 17 * 64 };
    boost::context::stack_context allocate(void)
    {
        static int count;
        boost::context::stack_context stack;
        char *const at =
            (char *)mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mprotect(at, PAGE, PROT_NONE);
        stack.size = BYTES - (size_t)(count++ % 32 * LINES);
        stack.sp = at + stack.size;
        return stack;
    }
    void deallocate(boost::context::stack_context &) {}
};

static void grow(size_t count)
{
    while (threads.size() < count) {
        threads.emplace_back();
        threads.back().fiber =
            boost::context::fiber(std::allocator_arg, stacks(), [](boost::context::fiber &&from) {
                *left = std::move(from);
                for (;;) {
                    (*body)();
                    if (self->pending) fail("it returns before its asynchronous work is done");
                    block->returned++;
                    wait(RETURNED, 0);
                }
                return std::move(scheduler);
            });
    }
}

/* ---- barriers ---- */

static void change(barrier *b, int arrivals, int bytes)
{
    if (b->count == 0x1fff) fail("a barrier in shared memory is not initialized");
    if (arrivals > (int)b->missing) fail("more threads arrive at a barrier than it counts");
    b->missing -= (unsigned)arrivals;
    b->bytes += bytes;
    if (b->missing || b->bytes) return;
    b->phase++;
    b->missing = b->count;
}

/* Waits for the end of a phase. */
static void await(const barrier *b, unsigned phase, int line)
{
    self->at = b;
    self->phase = phase;
    wait(AT_BARRIER, line);
}

static void meet(barrier *b, int line)
{
    const unsigned phase = b->phase;
    change(b, 1, 0);
    await(b, phase, line);
}

/* Waits for `count` threads of the block. */
static void meet_at(int number, unsigned count, int line)
{
    barrier *b = &block->barriers[number];
    if (b->missing == b->count) { /* the first one */
        *b = {b->phase, count, count, 0};
        block->lines[number] = line;
    }
    if (block->lines[number] != line || b->count != count)
        fail("threads wait for one barrier in lines %d and %d, for %d and %u threads", block->lines[number],
             line, (int)b->count, count);
    meet(b, line);
}

/* ---- blocks ---- */

/* The number of threads of the block, of those from `from` to `to`, that may go on now. */
static int wake(int from, int to)
{
    int woken = 0;
    for (int i = from; i < to; i++) {
        const thread *t = &block->threads[i];
        if (t->state != AT_BARRIER || t->at->phase == t->phase) continue;
        block->warps[i / 32].ready |= 1u << i % 32;
        woken++;
    }
    return woken;
}

/* Runs four warps of the block until all of their threads wait for others, or have returned. So warpgroups
   get as far ahead of each other as barriers let them. */
static void run_warpgroup(int number, int count)
{
    const int from = number * 128, to = std::min(from + 128, count), warps = (to - from + 31) / 32;
    do
        for (int i = 0; i < warps; i++) {
            const int at = from / 32 + (reversed ? warps - 1 - i : i);
            warp *w = &block->warps[at];
            while (w->ready) {
                const int lane = reversed ? 31 - __builtin_clz(w->ready) : __builtin_ctz(w->ready);
                w->ready &= ~(1u << lane);
                self = &block->threads[at * 32 + lane];
                self->state = READY;
                leave_for(&self->fiber, &scheduler);
                self = NULL;
            }
        }
    while (wake(from, to));
}

/* Threads wait that nothing wakes. */
[[noreturn]] static void fail_stuck(int count)
{
    std::map<std::pair<enum state, int>, int> places;
    for (int i = 0; i < count; i++) places[{threads[i].state, threads[i].line}]++;
    std::string text;
    for (const auto &place : places) {
        static const char *const WHERE[] = {"run", "wait at a barrier", "wait at a collective",
                                            "have returned"};
        text += (text.empty() ? "" : ", ") + std::to_string(place.second) + " " + WHERE[place.first.first];
        if (place.first.second) text += " in line " + std::to_string(place.first.second);
    }
    fail("some threads wait for others in vain: %s", text.c_str());
}

static void begin_block(uint3 first, int rank, int count)
{
    block = &cluster[rank];
    *block = {};
    block->index = first;
    block->index.x += (unsigned)rank;
    block->threads = &threads[rank * count];
    block->shared = cluster_shared[rank];
    memset(block->shared + DYNAMIC_AT, 0xff, std::min<size_t>(shared_bytes + 1024, STATIC_AT - DYNAMIC_AT));
    memset(block->shared + STATIC_AT, 0xff, static_bytes);
    for (barrier &b : block->warpgroups) b = {0, 128, 128, 0};
    for (int i = 0; i < count; i++) {
        thread *t = &block->threads[i];
        t->index =
            make_uint3(i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y));
        t->number = i;
        t->copies.clear();
        t->groups = t->polls = t->products = 0;
        block->warps[i / 32].ready |= 1u << i % 32;
    }
}

static int wake_all(int count)
{
    int woken = 0;
    for (block = cluster; block < cluster + cluster_blocks; block++) woken += wake(0, count);
    return woken;
}

/* Runs the blocks of a cluster together. */
static void run_cluster(uint3 first)
{
    const int count = (int)(blockDim.x * blockDim.y * blockDim.z), all = count * cluster_blocks;
    const int groups = (count + 127) / 128;
    cluster_barrier = {0, (unsigned)all, (unsigned)all, 0};
    for (int rank = 0; rank < cluster_blocks; rank++) begin_block(first, rank, count);
    for (int woken = 1; woken;) {
        for (block = cluster; block < cluster + cluster_blocks; block++) {
            block->begun = true;
            for (int i = 0; i < groups; i++) run_warpgroup(reversed ? groups - 1 - i : i, count);
        }
        while (!(woken = wake_all(count)) && !engine.empty()) {
            const auto at = reversed ? engine.end() - 1 : engine.begin();
            const auto work = std::move(at->second);
            block = at->first;
            engine.erase(at);
            work();
        }
    }
    block = cluster;
    for (int i = 0; i < all; i++)
        if (threads[i].state != RETURNED) fail_stuck(all);
}

/* `blocks` of a cluster, in the first dimension. */
static void run_grid(const char *name, dim3 grid, dim3 threads_of_block, size_t bytes,
                     const std::function<void()> &kernel, int blocks)
{
    uint3 at;
    kernel_name = name;
    gridDim = grid;
    blockDim = threads_of_block;
    shared_bytes = bytes;
    statics.clear();
    static_bytes = 0;
    cluster_blocks = blocks;
    body = &kernel;
    grow(blockDim.x * blockDim.y * blockDim.z * (unsigned)blocks);
    launches++;
    for (at.z = 0; at.z < grid.z; at.z++)
        for (at.y = 0; at.y < grid.y; at.y++)
            for (at.x = 0; at.x < grid.x; at.x += (unsigned)blocks)
                reversed = (at.x + at.y + at.z + (unsigned)launches) % 2, run_cluster(at);
    kernel_name = "none";
}

/* ---- collectives of a warp ---- */

/* Waits for all lanes of `mask`. The last one computes: all[lane] are the operands of each. */
template <class OPERANDS, class COMPUTE>
void collective(unsigned mask, int line, OPERANDS &operands, COMPUTE compute)
{
    thread *const first = &block->threads[self->number & ~31];
    warp *w = &block->warps[self->number / 32];
    const unsigned own = 1u << (self->number & 31);
    OPERANDS *all[32] = {};
    if (!(mask & own)) fail("the mask %08x in line %d lacks the lane that uses it", mask, line);
    self->operands = &operands;
    self->mask = mask;
    w->waiting |= own;
    if ((w->waiting & mask) != mask) {
        wait(AT_COLLECTIVE, line);
        return;
    }
    self->line = line;
    for (unsigned left = mask; left; left &= left - 1) {
        thread *const t = first + __builtin_ctz(left);
        if (t->line != line || t->mask != mask)
            fail("lanes of one mask are in lines %d and %d, with masks %08x and %08x", line, t->line, mask,
                 t->mask);
        all[__builtin_ctz(left)] = (OPERANDS *)t->operands;
    }
    compute(all);
    w->waiting &= ~mask;
    w->ready |= mask & ~own;
}

template <class T> struct shuffled {
    T value, result;
    unsigned source;
};

template <class T> T shuffle(unsigned mask, T value, unsigned source, int line)
{
    shuffled<T> s = {value, value, source & 31};
    collective(mask, line, s, [&](shuffled<T> **all) {
        for (int lane = 0; lane < 32; lane++) {
            if (!all[lane]) continue;
            if (!all[all[lane]->source]) fail("line %d shuffles from a lane outside of its mask", line);
            all[lane]->result = all[all[lane]->source]->value;
        }
    });
    return s.result;
}

/* Joins the values of all lanes: every one of them gets the result. */
template <class T, class JOIN> T reduce(unsigned mask, T value, int line, JOIN join)
{
    collective(mask, line, value, [&](T **all) {
        const T *first = NULL;
        T result = T();
        for (int lane = 0; lane < 32; lane++)
            if (all[lane]) result = first ? join(result, *all[lane]) : *all[lane], first = all[lane];
        for (int lane = 0; lane < 32; lane++)
            if (all[lane]) *all[lane] = result;
    });
    return value;
}

/* ---- memory ---- */

/* A static variable in shared memory, at the same offset in all blocks of a kernel. Unset at first. */
template <class T> T &static_shared(const void *key)
{
    for (const auto &known : statics)
        if (known.first == key) return *(T *)(block->shared + known.second);
    const uint32_t at = STATIC_AT + static_bytes;
    static_bytes += (sizeof(T) + 15) / 16 * 16;
    if (STATIC_AT + static_bytes > SHARED_BYTES) fail("too much static shared memory");
    statics.push_back({key, at});
    for (int rank = 0; rank < cluster_blocks; rank++) memset(cluster_shared[rank] + at, 0xff, sizeof(T));
    return *(T *)(block->shared + at);
}

static char *shared_at(uint32_t address, uint32_t bytes)
{
    const bool is_static = address >= STATIC_AT;
    const uint32_t at = address - (is_static ? STATIC_AT : DYNAMIC_AT);
    const size_t all = is_static ? static_bytes : shared_bytes;
    if (at >= all || at + bytes > all)
        fail("address %u is outside of the %zu bytes of shared memory", at, all);
    if (at % bytes) fail("address %u of shared memory is no multiple of %u", at, bytes);
    return block->shared + address;
}

template <class T> T &shared_as(uint32_t address) { return *(T *)shared_at(address, sizeof(T)); }

/* ---- instructions, by their names in PTX ---- */

typedef uint16_t b16;
typedef uint64_t b64;
struct b128 {
    b64 low, high;
};

static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
static inline void ex2_approx_ftz_f32(float &y, float x) { y = flushed(exp2f(flushed(x))); }
static inline void rcp_approx_ftz_f32(float &y, float x) { y = flushed(1 / flushed(x)); }
static inline void sqrt_approx_ftz_f32(float &y, float x) { y = flushed(sqrtf(flushed(x))); }

static b16 eights(float high, float low, __nv_fp8_interpretation_t kind)
{
    return (b16)(__nv_cvt_float_to_fp8(high, __NV_SATFINITE, kind) << 8 |
                 __nv_cvt_float_to_fp8(low, __NV_SATFINITE, kind));
}
static inline void cvt_rn_satfinite_e4m3x2_f32(b16 &y, float high, float low)
{
    y = eights(high, low, __NV_E4M3);
}
static inline void cvt_rn_satfinite_e5m2x2_f32(b16 &y, float high, float low)
{
    y = eights(high, low, __NV_E5M2);
}

static inline void mov_b32(uint32_t &y, b16 low, b16 high) { y = low | (uint32_t)high << 16; }
static inline void mov_b64(b64 &y, uint32_t low, uint32_t high) { y = low | (b64)high << 32; }
static inline void mov_b64(float &low, float &high, b64 x)
{
    memcpy(&low, &x, 4);
    memcpy(&high, (char *)&x + 4, 4);
}
static inline void mov_b128(b128 &y, b64 low, b64 high) { y = {low, high}; }
static inline void mov_b128(b64 &low, b64 &high, b128 x) { low = x.low, high = x.high; }

static inline void st_shared_b32(uint32_t to, uint32_t x) { shared_as<uint32_t>(to) = x; }
static inline void st_shared_v2_b32(uint32_t to, uint32_t a, uint32_t b) { shared_as<uint2>(to) = {a, b}; }
static inline void st_shared_v4_b32(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    shared_as<uint4>(to) = {a, b, c, d};
}
static inline void ld_shared_v4_f32(float &a, float &b, float &c, float &d, uint32_t from)
{
    const float4 v = shared_as<float4>(from);
    a = v.x, b = v.y, c = v.z, d = v.w;
}

/* Blocks run in order, so what another block writes is there, or will never be. */
static inline void ld_relaxed_gpu_global_b128(b128 &y, const void *from)
{
    if (++self->polls > 1000000) fail("a wait for another block does not end");
    y = *(const b128 *)from;
}
static inline void st_relaxed_gpu_global_b128(void *to, b128 x) { *(b128 *)to = x; }

/* A copy may arrive at any time until it is waited for: NaN at first, the data at the latest time. */
static void start_copy(uint32_t to, const void *from, int bytes, int from_bytes)
{
    char *const at = shared_at(to, (uint32_t)bytes);
    if (from_bytes && (uintptr_t)from % (unsigned)bytes)
        fail("an asynchronous copy from %p of %d bytes", from, bytes);
    memset(at, 0xff, (size_t)bytes);
    self->copies.push_back({at, from, bytes, from_bytes, self->groups});
}
static inline void cp_async_cg_shared_global(uint32_t to, const void *from, int bytes, int from_bytes)
{
    start_copy(to, from, bytes, from_bytes);
}
static inline void cp_async_ca_shared_global(uint32_t to, const void *from, int bytes, int from_bytes)
{
    start_copy(to, from, bytes, from_bytes);
}
static inline void cp_async_commit_group(void) { self->groups++; }
static inline void cp_async_wait_group(int pending)
{
    size_t done = 0;
    for (; done < self->copies.size() && self->copies[done].group < self->groups - pending; done++) {
        const copy &c = self->copies[done];
        memset(c.to, 0, (size_t)c.bytes);
        if (c.from_bytes) memcpy(c.to, c.from, (size_t)c.from_bytes);
    }
    self->copies.erase(self->copies.begin(), self->copies.begin() + (long)done);
}

/* Matrices of 8 x 8 elements of 16 bits: lane l points to row l % 8 of matrix l / 8. Of each matrix it has
   elements 2 (l % 4) and the next of row l / 4. */
struct matrices {
    uint32_t address, r[4];
};

static void load_matrices(uint32_t r[4], uint32_t from, bool transposed, int line)
{
    matrices own = {from, {}};
    collective(~0u, line, own, [&](matrices **all) {
        for (int m = 0; m < 4; m++) {
            const uint16_t *rows[8];
            for (int i = 0; i < 8; i++) rows[i] = (uint16_t *)shared_at(all[m * 8 + i]->address, 16);
            for (int lane = 0; lane < 32; lane++) {
                const int i = lane / 4, j = lane % 4 * 2;
                all[lane]->r[m] = transposed ? rows[j][i] | (uint32_t)rows[j + 1][i] << 16
                                             : rows[i][j] | (uint32_t)rows[i][j + 1] << 16;
            }
        }
    });
    memcpy(r, own.r, sizeof(own.r));
}
static inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t &a, uint32_t &b, uint32_t &c,
                                                            uint32_t &d, uint32_t from,
                                                            int line = __builtin_LINE())
{
    uint32_t r[4];
    load_matrices(r, from, false, line);
    a = r[0], b = r[1], c = r[2], d = r[3];
}
static inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t &a, uint32_t &b, uint32_t &c,
                                                                  uint32_t &d, uint32_t from,
                                                                  int line = __builtin_LINE())
{
    uint32_t r[4];
    load_matrices(r, from, true, line);
    a = r[0], b = r[1], c = r[2], d = r[3];
}
static inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                                            uint32_t d, int line = __builtin_LINE())
{
    matrices own = {to, {a, b, c, d}};
    collective(~0u, line, own, [&](matrices **all) {
        for (int m = 0; m < 4; m++)
            for (int lane = 0; lane < 32; lane++)
                ((uint32_t *)shared_at(all[m * 8 + lane / 4]->address, 16))[lane % 4] = all[lane]->r[m];
    });
}
static inline void movmatrix_sync_aligned_m8n8_trans_b16(uint32_t &y, uint32_t x, int line = __builtin_LINE())
{
    shuffled<uint32_t> own = {x, 0, 0};
    collective(~0u, line, own, [&](shuffled<uint32_t> **all) {
        const auto element = [&](int i, int j) { return all[i * 4 + j / 2]->value >> j % 2 * 16 & 0xffffu; };
        for (int lane = 0; lane < 32; lane++) {
            const int i = lane / 4, j = lane % 4 * 2;
            all[lane]->result = element(j, i) | element(j + 1, i) << 16;
        }
    });
    y = own.result;
}

/* C (16 x 8) += A (16 x 16) B (16 x 8): products are exact, the sum goes from the first to the last in FP32.
   Lane l, with g = l / 4 and t = l % 4, holds

       C   rows g: c0, c1 and g + 8: c2, c3; columns 2t and the next
       A   rows g: a0, a2 and g + 8: a1, a3; columns 2t and the next: a0, a1, 8 further: a2, a3
       B   rows 2t and the next: b0, 8 further: b1; column g */
struct fragments {
    float c[4];
    uint32_t a[4], b[2];
};

static float half_of(uint32_t pair, int which, bool bf16)
{
    const uint16_t bits = (uint16_t)(pair >> 16 * which);
    _Float16 x;
    if (bf16) return __uint_as_float((unsigned)bits << 16);
    memcpy(&x, &bits, 2);
    return (float)x;
}

static void multiply_fragments(fragments **all, bool bf16)
{
    float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < 32; lane++)
        for (int e = 0; e < 2; e++) {
            const int g = lane / 4, t = lane % 4 * 2 + e;
            const fragments &f = *all[lane];
            c[g][t] = f.c[e], c[g + 8][t] = f.c[2 + e];
            a[g][t] = half_of(f.a[0], e, bf16), a[g + 8][t] = half_of(f.a[1], e, bf16);
            a[g][t + 8] = half_of(f.a[2], e, bf16), a[g + 8][t + 8] = half_of(f.a[3], e, bf16);
            b[t][g] = half_of(f.b[0], e, bf16), b[t + 8][g] = half_of(f.b[1], e, bf16);
        }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
    for (int lane = 0; lane < 32; lane++)
        for (int e = 0; e < 2; e++) {
            const int g = lane / 4, t = lane % 4 * 2 + e;
            all[lane]->c[e] = c[g][t], all[lane]->c[2 + e] = c[g + 8][t];
        }
}

static void multiply(float &d0, float &d1, float &d2, float &d3, fragments own, bool bf16, int line)
{
    collective(~0u, line, own, [&](fragments **all) { multiply_fragments(all, bf16); });
    d0 = own.c[0], d1 = own.c[1], d2 = own.c[2], d3 = own.c[3];
}
static inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float &d0, float &d1, float &d2, float &d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
    uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3, int line = __builtin_LINE())
{
    multiply(d0, d1, d2, d3, {{c0, c1, c2, c3}, {a0, a1, a2, a3}, {b0, b1}}, true, line);
}
static inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float &d0, float &d1, float &d2, float &d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
    uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3, int line = __builtin_LINE())
{
    multiply(d0, d1, d2, d3, {{c0, c1, c2, c3}, {a0, a1, a2, a3}, {b0, b1}}, false, line);
}
/* The same over 8 of k. */
static inline void mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32(
    float &d0, float &d1, float &d2, float &d3, uint32_t a0, uint32_t a1, uint32_t b0, float c0, float c1,
    float c2, float c3, int line = __builtin_LINE())
{
    multiply(d0, d1, d2, d3, {{c0, c1, c2, c3}, {a0, a1, 0, 0}, {b0, 0}}, false, line);
}

} /* namespace emulate */

/* ---- CUDA's names ---- */

#define threadIdx (emulate::self->index)
#define blockIdx (emulate::block->index)
#define __builtin_assume(condition) ((void)0)

#define EMULATE_LINE int line = __builtin_LINE()
static inline void __syncthreads(EMULATE_LINE)
{
    emulate::meet_at(0, blockDim.x * blockDim.y * blockDim.z, line);
}
static inline void __syncwarp(unsigned mask = ~0u, EMULATE_LINE)
{
    emulate::reduce(mask, 0, line, [](int a, int) { return a; });
}
template <class T> T __shfl_sync(unsigned mask, T x, int source, EMULATE_LINE)
{
    return emulate::shuffle(mask, x, (unsigned)source, line);
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int with, EMULATE_LINE)
{
    return emulate::shuffle(mask, x, (unsigned)(emulate::self->number ^ with), line);
}
/* Lanes without a source keep their value. */
template <class T> T __shfl_up_sync(unsigned mask, T x, unsigned by, EMULATE_LINE)
{
    const unsigned lane = emulate::self->number & 31;
    return emulate::shuffle(mask, x, lane < by ? lane : lane - by, line);
}
template <class T> T __shfl_down_sync(unsigned mask, T x, unsigned by, EMULATE_LINE)
{
    const unsigned lane = emulate::self->number & 31;
    return emulate::shuffle(mask, x, lane + by > 31 ? lane : lane + by, line);
}
template <class T> T __reduce_max_sync(unsigned mask, T x, EMULATE_LINE)
{
    return emulate::reduce(mask, x, line, [](T a, T b) { return a < b ? b : a; });
}
template <class T> T __reduce_min_sync(unsigned mask, T x, EMULATE_LINE)
{
    return emulate::reduce(mask, x, line, [](T a, T b) { return b < a ? b : a; });
}
template <class T> T __reduce_add_sync(unsigned mask, T x, EMULATE_LINE)
{
    return emulate::reduce(mask, x, line, [](T a, T b) { return a + b; });
}
static inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATE_LINE)
{
    const unsigned own = predicate ? 1u << (emulate::self->number & 31) : 0;
    return emulate::reduce(mask, own, line, [](unsigned a, unsigned b) { return a | b; });
}
static inline int __any_sync(unsigned mask, int predicate, EMULATE_LINE)
{
    return __ballot_sync(mask, predicate, line) != 0;
}
static inline int __all_sync(unsigned mask, int predicate, EMULATE_LINE)
{
    return __ballot_sync(mask, predicate, line) == mask;
}
#undef EMULATE_LINE

static inline size_t __cvta_generic_to_shared(const void *p)
{
    const size_t at = (size_t)((const char *)p - emulate::block->shared);
    if (at >= emulate::SHARED_BYTES) emulate::fail("an address in shared memory is asked of something else");
    return at;
}

static inline void __threadfence() {} /* threads of all blocks take turns */
template <class T> T atomicAdd(T *at, std::common_type_t<T> x)
{
    const T before = *at;
    *at += x;
    return before;
}
template <class T> T atomicMax(T *at, std::common_type_t<T> x)
{
    const T before = *at;
    if (before < x) *at = x;
    return before;
}

template <class A, class B> std::common_type_t<A, B> min(A a, B b)
{
    const std::common_type_t<A, B> x = a, y = b;
    return y < x ? y : x;
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b)
{
    const std::common_type_t<A, B> x = a, y = b;
    return x < y ? y : x;
}

static inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
static inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __saturatef(float x) { return fminf(fmaxf(x, 0), 1); } /* 0 of a NaN */
static inline float __fdividef(float a, float b) { return a / b; }
template <class T> T __ldcg(const T *at) { return *at; }
template <class T> T __ldg(const T *at) { return *at; }
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by)
{
    return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31));
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors)
{
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned y = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned s = selectors >> 4 * i & 15, byte = (unsigned)(bytes >> 8 * (s & 7) & 255);
        y |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return y;
}
