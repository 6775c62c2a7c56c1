/* emulate_hopper.h - what the >>hopper room of mtt_kernels.cu needs beyond emulate.h: warpgroup products, the
   copy engine, barriers in shared memory, clusters.

   Asynchronous work is done at the latest time that PTX allows, and its results are NaN until then:

   - A product is computed when all threads of its warpgroup wait for it.
   - The copy engine loads a tile when no thread of the cluster can go on. It stores one when the thread that
     issued the store waits for it.

   From the time of issue until then, operands and stored tiles must not change. So an operand that is written
   too late or overwritten too early ends the program, and a result that is read too early is NaN. Fences of
   the asynchronous proxy do nothing here: a missing one does not show. */
#pragma once
#include <cuda.h>

namespace emulate
{

/* ---- what a thread has under way ---- */

enum element { BF16, FP16, EIGHT /* A in e5m2, B in e4m3 */ };

/* C (64 x n) = A B, or C += A B if `adds`, as one thread of a warpgroup issues it. */
struct warpgroup_product {
    float *c;                    /* the thread's part */
    const uint32_t *a_registers; /* or NULL: A is in shared memory, too */
    uint64_t a, b;               /* descriptors */
    int n, adds, transposed_a, transposed_b, group;
    enum element type;
    bool first;   /* of the warpgroup's threads to issue it */
    uint64_t sum; /* checksum of A's registers and, in the first thread, of operands in shared memory */
};

/* Registers of C, which are NaN until the thread has waited for all products that use them. */
struct accumulators {
    float *at;
    int count, products; /* products that are not computed */
    float values[128];
};

struct store {
    int group;
    std::function<void()> work;
};

struct asynchronous {
    std::vector<warpgroup_product> products;
    std::vector<accumulators> sums;
    std::vector<store> stores;
    int product_groups, store_groups; /* so far */
    bool fenced; /* wgmma.fence since the last wait */
    unsigned cluster_phase;
};

static asynchronous &of_thread(const thread *t)
{
    static std::vector<asynchronous> &all = *new std::vector<asynchronous>;
    if (all.size() < threads.size()) all.resize(threads.size());
    return all[(size_t)(t - threads.data())];
}

static accumulators *sums_at(asynchronous &own, const float *c)
{
    for (accumulators &sums : own.sums)
        if (sums.at == c) return &sums;
    return NULL;
}

/* ---- operands of products ---- */

/* Rows of `width` bytes, 128, 64 or 32: address bits 7 and up are XORed into bits 4 and up. */
static uint32_t swizzled(uint32_t address, uint32_t width) { return address ^ (address >> 3 & (width - 16)); }

/* A checksum of what came before and of 16 bytes. */
static uint64_t joined(uint64_t sum, const void *at)
{
    uint64_t x[2];
    memcpy(x, at, sizeof(x));
    return ((sum ^ x[0]) * 0x9e3779b97f4a7c15 ^ x[1]) * 0xbf58476d1ce4e5b9;
}

/* An operand of 32 bytes of k in shared memory: visit(row, k, 16 bytes) of the elements from there on, in k,
   or, if transposed, in rows. The descriptor has the distance to the next 8 rows of memory (stride) and, if
   transposed, to the next `width` bytes of a row (leading). */
template <class VISIT>
void each_part(uint64_t descriptor, bool transposed, int rows, int element_bytes, const VISIT &visit)
{
    const uint32_t start = (descriptor & 0x3fff) * 16, leading = (descriptor >> 16 & 0x3fff) * 16;
    const uint32_t stride = (descriptor >> 32 & 0x3fff) * 16, width = 256u >> (descriptor >> 62);
    const auto part = [&](uint32_t at) { return shared_at(swizzled(start + at, width), 16); };
    const int together = 16 / element_bytes;
    if (width == 256 || descriptor >> 49 & 7) fail("a descriptor without a swizzle, or with a base offset");
    if (!transposed)
        for (int i = 0; i < rows; i++)
            for (int k = 0; k < 2; k++)
                visit(i, k * together, part(i / 8 * stride + i % 8 * width + k * 16));
    else
        for (int k = 0; k < 2 * together; k++)
            for (int i = 0; i < rows; i += together) {
                const uint32_t at = (uint32_t)(i * element_bytes);
                visit(i, k, part(at / width * leading + k / 8 * stride + k % 8 * width + at % width));
            }
}

template <class ELEMENT, class PUT>
void read_operand(uint64_t descriptor, bool transposed, int rows, const PUT &put)
{
    each_part(descriptor, transposed, rows, sizeof(ELEMENT), [&](int i, int k, const char *at) {
        for (int j = 0; j < (int)(16 / sizeof(ELEMENT)); j++)
            put(transposed ? i + j : i, transposed ? k : k + j, ((const ELEMENT *)at)[j]);
    });
}

static uint64_t sum_of(const warpgroup_product &p)
{
    uint64_t sum = 1;
    const auto add = [&](int, int, const char *at) { sum = joined(sum, at); };
    const int bytes = p.type == EIGHT ? 1 : 2;
    if (p.a_registers) sum = joined(sum, p.a_registers);
    if (!p.first) return sum;
    if (!p.a_registers) each_part(p.a, p.transposed_a, 64, bytes, add);
    each_part(p.b, p.transposed_b, p.n, bytes, add);
    return sum;
}

static float tile_a[64][32], tile_b[32][256], tile_c[64][256];

static void read_operands(const warpgroup_product &p, asynchronous *const of[128], size_t number)
{
    const auto put_a = [](int i, int k, float x) { tile_a[i][k] = x; };
    const auto put_b = [](int j, int k, float x) { tile_b[k][j] = x; };
    const auto eight = [](uint8_t x, __nv_fp8_interpretation_t kind) {
        return __half2float(__nv_cvt_fp8_to_halfraw(x, kind));
    };
    if (p.type == EIGHT) {
        read_operand<uint8_t>(p.a, false, 64,
                              [&](int i, int k, uint8_t x) { put_a(i, k, eight(x, __NV_E5M2)); });
        read_operand<uint8_t>(p.b, false, p.n,
                              [&](int j, int k, uint8_t x) { put_b(j, k, eight(x, __NV_E4M3)); });
        return;
    }
    const bool bf16 = p.type == BF16;
    read_operand<uint16_t>(p.b, p.transposed_b, p.n,
                           [&](int j, int k, uint16_t x) { put_b(j, k, half_of(x, 0, bf16)); });
    if (!p.a_registers) {
        read_operand<uint16_t>(p.a, p.transposed_a, 64,
                               [&](int i, int k, uint16_t x) { put_a(i, k, half_of(x, 0, bf16)); });
        return;
    }
    for (int t = 0; t < 128; t++) /* as A of multiply_fragments, each warp its 16 rows */
        for (int r = 0; r < 8; r++)
            put_a(t / 32 * 16 + t % 32 / 4 + r / 2 % 2 * 8, t % 4 * 2 + r / 4 * 8 + r % 2,
                  half_of(of[t]->products[number].a_registers[r / 2], r % 2, bf16));
}

/* ---- products ---- */

/* Copies between tile_c and the threads' parts: of each 8 columns, each warp's 16 rows are as C of
   multiply_fragments. */
static void move_sums(asynchronous *const of[128], size_t number, bool to_threads)
{
    for (int t = 0; t < 128; t++) {
        const warpgroup_product &p = of[t]->products[number];
        accumulators *own = sums_at(*of[t], p.c);
        for (int r = 0; r < p.n / 2; r++) {
            float *x = &tile_c[t / 32 * 16 + t % 32 / 4 + r / 2 % 2 * 8][r / 4 * 8 + t % 4 * 2 + r % 2];
            if (to_threads) own->values[r] = *x;
            else *x = own->values[r];
        }
    }
}

/* The one of this number, of `count` that are computed now. */
static void compute(asynchronous *const of[128], size_t number, size_t count)
{
    const std::vector<warpgroup_product> &all = of[0]->products;
    const warpgroup_product &p = all[number];
    for (int t = 0; t < 128; t++) {
        const warpgroup_product &q = of[t]->products[number];
        if (q.a != p.a || q.b != p.b || q.n != p.n || q.adds != p.adds || q.type != p.type)
            fail("threads of a warpgroup issue different products");
        if (q.sum != sum_of(q)) fail("an operand of a product changes after the product has been issued");
        sums_at(*of[t], q.c)->products--;
    }
    if (number == 0 || all[number - 1].c != p.c) move_sums(of, number, false);
    read_operands(p, of, number);
    for (int i = 0; i < 64; i++) {
        float *c = tile_c[i];
        if (!p.adds) memset(c, 0, sizeof(tile_c[i]));
        for (int k = 0; k < (p.type == EIGHT ? 32 : 16); k++) {
            const float a = tile_a[i][k], *b = tile_b[k];
            for (int j = 0; j < p.n; j++) c[j] += a * b[j];
        }
    }
    if (number + 1 == count || all[number + 1].c != p.c) move_sums(of, number, true);
}

static void issue(warpgroup_product p)
{
    asynchronous &own = of_thread(self);
    if (!own.fenced) fail("wgmma without a fence after the last wait");
    int &issued = block->products[self->number / 128];
    p.group = own.product_groups;
    p.first = self->products++ == issued;
    issued += p.first;
    p.sum = sum_of(p);
    own.products.push_back(p);
    accumulators *sums = sums_at(own, p.c);
    if (!sums) {
        own.sums.push_back({p.c, p.n / 2, 0, {}});
        sums = &own.sums.back();
        memcpy(sums->values, p.c, (size_t)p.n / 2 * 4);
        memset(p.c, 0xff, (size_t)p.n / 2 * 4);
        self->pending++;
    }
    sums->products++;
}

static inline void wgmma_fence_sync_aligned(void) { of_thread(self).fenced = true; }
static inline void wgmma_commit_group_sync_aligned(void) { of_thread(self).product_groups++; }

static inline void wgmma_wait_group_sync_aligned(int pending, int line = __builtin_LINE())
{
    asynchronous &own = of_thread(self);
    barrier *b = &block->warpgroups[self->number / 128];
    own.fenced = false;
    if (b->missing == 1) { /* all others wait */
        asynchronous *of[128];
        size_t count = 0;
        const auto done = [&](const asynchronous &a) {
            size_t n = 0;
            while (n < a.products.size() && a.products[n].group < a.product_groups - pending) n++;
            return n;
        };
        for (int t = 0; t < 128; t++) {
            of[t] = &of_thread(block->threads + self->number / 128 * 128 + t);
            count = t ? count : done(*of[0]);
            if (done(*of[t]) != count) fail("threads of a warpgroup wait for different products");
        }
        for (size_t number = 0; number < count; number++) compute(of, number, count);
        for (asynchronous *a : of) a->products.erase(a->products.begin(), a->products.begin() + (long)count);
    }
    meet(b, line);
    for (size_t i = 0; i < own.sums.size(); i++) {
        const accumulators &sums = own.sums[i];
        if (sums.products) continue;
        for (int r = 0; r < sums.count; r++)
            if (__float_as_uint(sums.at[r]) != ~0u) fail("an accumulator is written while a product uses it");
        memcpy(sums.at, sums.values, (size_t)sums.count * 4);
        own.sums.erase(own.sums.begin() + (long)i--);
        self->pending--;
    }
}

/* Operands in PTX's order: accumulators; A and B, or four registers of A and B; whether it adds; two signs;
   what is transposed, which A in registers and 8 bits cannot be. */
template <int N, enum element TYPE, class... OPERANDS> void wgmma(OPERANDS &...operands)
{
    enum { C = N / 2, REGISTERS = sizeof...(OPERANDS) == C + 9, B = C + (REGISTERS ? 4 : 1) };
    const auto all = std::forward_as_tuple(operands...);
    const void *const at[] = {&operands...};
    warpgroup_product p = {};
    p.c = (float *)at[0], p.n = N, p.type = TYPE, p.b = std::get<B>(all), p.adds = std::get<B + 1>(all);
    for (int i = 0; i < C; i++)
        if (at[i] != p.c + i) fail("the accumulators of a product are not an array");
    if (std::get<B + 2>(all) != 1 || std::get<B + 3>(all) != 1) fail("a product with a negative operand");
    if constexpr (REGISTERS) {
        p.a_registers = (const uint32_t *)at[C];
        for (int i = 0; i < 4; i++)
            if (at[C + i] != p.a_registers + i) fail("the registers of A are not an array");
        p.transposed_b = std::get<B + 4>(all);
    } else {
        p.a = std::get<C>(all);
        if constexpr (TYPE != EIGHT) {
            p.transposed_a = std::get<B + 4>(all);
            p.transposed_b = std::get<B + 5>(all);
        }
    }
    issue(p);
}

#define EMULATE_WGMMA(N, K, TYPES, TYPE)                                                       \
    template <class... OPERANDS>                                                               \
    void wgmma_mma_async_sync_aligned_m64n##N##k##K##_f32_##TYPES(OPERANDS &&...operands)       \
    {                                                                                          \
        wgmma<N, TYPE>(operands...);                                                           \
    }
EMULATE_WGMMA(32, 16, bf16_bf16, BF16)
EMULATE_WGMMA(64, 16, bf16_bf16, BF16)
EMULATE_WGMMA(128, 16, bf16_bf16, BF16)
EMULATE_WGMMA(256, 16, bf16_bf16, BF16)
EMULATE_WGMMA(32, 16, f16_f16, FP16)
EMULATE_WGMMA(64, 16, f16_f16, FP16)
EMULATE_WGMMA(128, 16, f16_f16, FP16)
EMULATE_WGMMA(256, 16, f16_f16, FP16)
EMULATE_WGMMA(128, 32, e5m2_e4m3, EIGHT)
#undef EMULATE_WGMMA

/* ---- barriers in shared memory ---- */

static inline void mbarrier_init_shared_cta_b64(uint32_t at, unsigned count)
{
    shared_as<barrier>(at) = {0, count, count, 0};
}
static inline void mbarrier_arrive_shared_cta_b64(uint32_t at) { change(&shared_as<barrier>(at), 1, 0); }
static inline void mbarrier_arrive_expect_tx_shared_cta_b64(uint32_t at, int bytes)
{
    barrier &b = shared_as<barrier>(at);
    b.bytes += bytes;
    change(&b, 1, 0);
}
/* Waits for the end of the current phase if it has this parity. */
static inline void mbarrier_try_wait_parity_shared_cta_b64(bool &done, uint32_t at, unsigned parity,
                                                           int line = __builtin_LINE())
{
    const barrier &b = shared_as<barrier>(at);
    done = true;
    if (b.phase % 2 == parity) await(&b, b.phase, line);
}
static inline void bar_sync(int number, unsigned count, int line = __builtin_LINE())
{
    meet_at(number, count, line);
}

/* ---- the copy engine ---- */

/* A matrix, in the place of what a driver writes. */
struct tensor_map {
    char *data;
    int64_t columns, rows, stride;    /* columns and stride in bytes */
    int bytes, box_columns, box_rows; /* of an element; columns in bytes: the width of the swizzle */
};

static CUresult encode_tiled(CUtensorMap *to, CUtensorMapDataType type, cuuint32_t dimensions, void *data,
                             const cuuint64_t *shape, const cuuint64_t *stride, const cuuint32_t *box,
                             const cuuint32_t *steps, CUtensorMapInterleave interleave,
                             CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill)
{
    const int bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
    const tensor_map map = {(char *)data, (int64_t)shape[0] * bytes, (int64_t)shape[1], (int64_t)stride[0],
                            bytes, (int)box[0] * bytes, (int)box[1]};
    const bool right = dimensions == 2 && (uintptr_t)data % 16 == 0 && (uintptr_t)to % 64 == 0 && shape[0] &&
                       shape[1] && stride[0] % 16 == 0 && map.stride >= map.columns && box[1] &&
                       box[1] <= 256 && steps[0] == 1 && steps[1] == 1 && swizzle &&
                       interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && map.box_columns == 16 << swizzle;
    if (!right) return CUDA_ERROR_INVALID_VALUE;
    memcpy(to, &map, sizeof(map));
    return CUDA_SUCCESS;
}

/* Calls move(shared memory, matrix, bytes) for each 16 bytes of a box; `bytes` of them are in the matrix. */
template <class MOVE>
void each_chunk(const tensor_map &map, uint32_t smem, int64_t column, int64_t row, const MOVE &move)
{
    for (int i = 0; i < map.box_rows; i++)
        for (int at = 0; at < map.box_columns; at += 16) {
            const int64_t left = row + i < map.rows ? map.columns - column - at : 0;
            const uint32_t address = swizzled(smem + (uint32_t)(i * map.box_columns + at), map.box_columns);
            move(shared_at(address, 16), map.data + (row + i) * map.stride + column + at,
                 (size_t)std::clamp<int64_t>(left, 0, 16));
        }
}

static tensor_map map_at(const void *at, uint32_t smem, int column, int row)
{
    tensor_map map;
    memcpy(&map, at, sizeof(map));
    if (smem % 128 || column < 0 || row < 0) fail("a box at (%d, %d), address %u", column, row, smem);
    return map;
}

static inline void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes(
    uint32_t to, const void *map_from, int column, int row, uint32_t barrier_at)
{
    const tensor_map map = map_at(map_from, to, column, row);
    const int64_t in_bytes = column * (int64_t)map.bytes;
    barrier *const arrival = &shared_as<barrier>(barrier_at);
    each_chunk(map, to, in_bytes, row, [](char *smem, const char *, size_t) { memset(smem, 0xff, 16); });
    engine.push_back({block, [=] {
        each_chunk(map, to, in_bytes, row, [](char *smem, const char *gmem, size_t bytes) {
            memset(smem, 0, 16);
            memcpy(smem, gmem, bytes);
        });
        change(arrival, 0, -map.box_rows * map.box_columns);
    }});
}

static inline void cp_async_bulk_tensor_2d_global_shared_cta_bulk_group(const void *map_from, int column,
                                                                        int row, uint32_t from)
{
    const tensor_map map = map_at(map_from, from, column, row);
    const int64_t in_bytes = column * (int64_t)map.bytes;
    asynchronous &own = of_thread(self);
    uint64_t then = 1;
    each_chunk(map, from, in_bytes, row,
               [&](const char *smem, char *, size_t) { then = joined(then, smem); });
    own.stores.push_back({own.store_groups, [=] {
        uint64_t now = 1;
        each_chunk(map, from, in_bytes, row, [&](const char *smem, char *gmem, size_t bytes) {
            now = joined(now, smem);
            memcpy(gmem, smem, bytes);
        });
        if (now != then) fail("a tile changes after its store has been issued");
    }});
    self->pending++;
}

static inline void cp_async_bulk_commit_group(void) { of_thread(self).store_groups++; }
static inline void cp_async_bulk_wait_group_read(int pending)
{
    asynchronous &own = of_thread(self);
    while (!own.stores.empty() && own.stores[0].group < own.store_groups - pending) {
        own.stores[0].work();
        own.stores.erase(own.stores.begin());
        self->pending--;
    }
}

static inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(
    uint32_t to, const void *from, int bytes, uint32_t barrier_at)
{
    barrier *const arrival = &shared_as<barrier>(barrier_at);
    if (bytes % 16 || (uintptr_t)from % 16) fail("a copy of %d bytes from %p", bytes, from);
    for (int i = 0; i < bytes; i += 16) memset(shared_at(to + i, 16), 0xff, 16);
    engine.push_back({block, [=] {
        memcpy(shared_at(to, 16), from, (size_t)bytes);
        change(arrival, 0, -bytes);
    }});
}

/* ---- clusters: an address in another block has its rank in the upper 8 bits ---- */

static inline int cluster_ctarank(void) { return (int)(block - cluster); }
static inline int cluster_nctarank(void) { return cluster_blocks; }
static inline void mov_u32(int &y, int x) { y = x; }
static inline void mapa_shared_cluster_u32(uint32_t &there, uint32_t at, int rank)
{
    there = at | (uint32_t)rank << 24;
}
static inline void st_shared_cluster_v2_f32(uint32_t to, float x, float y)
{
    block_state *const own = block, *const there = &cluster[to >> 24];
    if (there >= cluster + cluster_blocks || !there->begun || there->returned)
        fail("a store into block %d of a cluster, which has not begun or has returned", (int)(to >> 24));
    block = there;
    shared_as<float2>(to & 0xffffff) = make_float2(x, y);
    block = own;
}
static inline void barrier_cluster_arrive_release_aligned(void)
{
    of_thread(self).cluster_phase = cluster_barrier.phase;
    change(&cluster_barrier, 1, 0);
}
static inline void barrier_cluster_wait_acquire_aligned(int line = __builtin_LINE())
{
    const unsigned phase = of_thread(self).cluster_phase;
    if (cluster_barrier.phase == phase) await(&cluster_barrier, phase, line);
}

/* ---- more instructions ---- */

typedef bool pred;
static inline void setp_ne_b32(bool &p, int x, int y) { p = x != y; }
static inline void setmaxnreg_dec_sync_aligned_u32(int) {}
static inline void setmaxnreg_inc_sync_aligned_u32(int) {}
static inline void fence_proxy_async(void) {}
static inline void fence_proxy_async_shared_cta(void) {}
static inline void fence_mbarrier_init_release_cluster(void) {}

static inline void ld_shared_b32(uint32_t &y, uint32_t from) { y = shared_as<uint32_t>(from); }
static inline void ld_shared_v2_f32(float &a, float &b, uint32_t from)
{
    const float2 v = shared_as<float2>(from);
    a = v.x, b = v.y;
}
static inline void ld_shared_v4_b32(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d, uint32_t from)
{
    const uint4 v = shared_as<uint4>(from);
    a = v.x, b = v.y, c = v.z, d = v.w;
}
static inline void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t to, uint32_t a, uint32_t b,
                                                                  uint32_t c, uint32_t d,
                                                                  int line = __builtin_LINE())
{
    matrices own = {to, {a, b, c, d}};
    collective(~0u, line, own, [&](matrices **all) {
        for (int m = 0; m < 4; m++)
            for (int i = 0; i < 64; i++) /* element i of the matrix, as the lanes have it, by rows */
                ((uint16_t *)shared_at(all[m * 8 + i % 8]->address, 16))[i / 8] =
                    (uint16_t)(all[i / 2]->r[m] >> i % 2 * 16);
    });
}

} /* namespace emulate */
