/* test_memory.c - a process grows by what the plan says. Each technique runs in a process of its own, which
   compares its peak of resident memory (VmHWM) with the arena and with the bounds that mtt_plan_print prints.

   The bounds in MiB, and what was measured with 1, 2 and 8 threads:
      3         staging 0.5, lists of a model of one layer 0.2, code of mtt and of gcc's OpenMP 0.3 to 0.6;
                LLVM's OpenMP takes 1.5 more
      a thread  0.5: a stack with the tiles of flash attention, 0.43
      a layer   0.0625: its operations and tensors, 0.03, or 0.055 if recomputed and accumulated
      OpenBLAS  2: 1,024 rows of A, at most 512 columns deep. 1.25 a thread: a block of B that fits the cache,
                0.8 (640 x 320) on Skylake-X and 1.125 (768 x 384) on Haswell
   The vocabulary makes the gradient of the head a product of 20,096 rows. One call for all of them would take
   20 MiB more.

      build/test_memory                         all techniques
      build/test_memory bf16_flash_chunked      one, with its figures */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "test.h"
#include <sys/wait.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

enum { BATCH = 8, SEQ = 128, MAX_ROWS = 2500 };

static const struct {
    const char *technique, *threads;
} RUNS[] = {
    {"fp32", "2"},
    {"fp32_flash", "2"},
    {"fp32_flash_checkpointing_chunked", "2"},
    {"bf16_flash_chunked", "2"},
    {"bf16_flash_segments_chunked_compact", "2"},
    {"bf16_flash_segments_compact_early", "2"},
    {"bf16_window16_selective", "2"},
    {"fp32", "8"},
    {"fp32_flash", "8"},
};

static mtt_env env;

/* ------------------------------------------------------------------------------------------- products --- */

/* Rows that a product of FP32 hands to a BLAS in several calls, and one that takes a single call. */
static void product(int64_t m, int64_t n, int64_t k, int a_transposed, int b_transposed, int bias, int add)
{
    static float a[MAX_ROWS * 11], b[13 * 11], c[MAX_ROWS * 13], before[MAX_ROWS * 13], shift[13];
    mtt_tensor ta = {.rank = 2, .shape = {m, k}, .data = a}, tb = {.rank = 2, .shape = {k, n}, .data = b};
    mtt_tensor tc = {.rank = 2, .shape = {m, n}, .data = c}, ts = {.rank = 1, .shape = {n}, .data = shift};
    double worst = 0;
    if (a_transposed) ta.shape[0] = k, ta.shape[1] = m;
    if (b_transposed) tb.shape[0] = n, tb.shape[1] = k;
    for (int64_t i = 0; i < m * k; i++) a[i] = (float)below(2001) / 1000 - 1;
    for (int64_t i = 0; i < k * n; i++) b[i] = (float)below(2001) / 1000 - 1;
    for (int64_t i = 0; i < n; i++) shift[i] = (float)below(2001) / 1000 - 1;
    for (int64_t i = 0; i < m * n; i++) c[i] = before[i] = (float)below(2001) / 1000 - 1;
    mtt__gemm(mtt__matrix(&ta, a_transposed), mtt__matrix(&tb, b_transposed), mtt__matrix(&tc, 0),
              bias ? &ts : NULL, add, 1);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = add ? before[i * n + j] : bias ? shift[j] : 0;
            for (int64_t p = 0; p < k; p++)
                sum += (double)a[a_transposed ? p * m + i : i * k + p] *
                       b[b_transposed ? j * k + p : p * n + j];
            worst = fmax(worst, fabs(c[i * n + j] - sum));
        }
    /* k + 1 terms of at most 1 each: k + 1 roundings of at most 2^-24 (k + 1) */
    check(worst <= ldexp((double)((k + 1) * (k + 1)), -24), "%lld x %lld x %lld%s%s%s%s: an error of %g",
          (long long)m, (long long)n, (long long)k, a_transposed ? ", A transposed" : "",
          b_transposed ? ", B transposed" : "", bias ? ", bias" : "", add ? ", added" : "", worst);
}

static void products(void)
{
    static const int64_t ROWS[] = {3, 1023, 1024, 1025, 2048, MAX_ROWS};
    for (size_t i = 0; i < sizeof(ROWS) / sizeof(ROWS[0]); i++)
        for (int way = 0; way < 12; way++)
            product(ROWS[i], 13, 11, way & 1, way >> 1 & 1, way >> 2 == 1, way >> 2 == 2);
}

/* --------------------------------------------------------------------------------------------- memory --- */

/* Peak of resident memory in MiB, 0 where the system does not say. */
static double peak(void)
{
    size_t bytes;
    char *status = read_file("/proc/self/status", &bytes), *line = status ? strstr(status, "VmHWM:") : NULL;
    double mib = line ? strtod(line + 6, NULL) / 1024 : 0;
    free(status);
    return mib;
}

static void append(void *text, const char *piece, size_t bytes)
{
    strncat((char *)text, piece, bytes);
}

/* MiB outside the arena at most, by the plan, whose words say the same. */
static double outside(const mtt_plan_report *plan, int threads)
{
    char text[4096] = "";
    const char *line;
    double most = 0, bytes = (double)plan->outside_bytes / 1048576;
    int with = 0;
    mtt_plan_print(plan, append, text);
    line = strstr(text, "outside the arena");
    check(line && sscanf(line, "outside the arena: at most %lf MiB with %d threads", &most, &with) == 2,
          "the plan does not say what lies outside the arena: %s", text);
    check(most > bytes - 0.051 && most < bytes + 0.051 && with == threads,
          "%.2f MiB outside the arena with %d threads, but the text says %.1f with %d", bytes, threads, most,
          with);
    return bytes;
}

/* Three steps of a technique in this process. */
static int measure(const char *technique)
{
    mtt_model_desc model = {.layers = 2, .heads = 2, .d_model = 64, .vocab = 20000};
    mtt_policy policy = {.accumulate = 1};
    mtt_optim_desc optim = {.lr = 1e-3f, .clip = -1};
    mtt_plan_report plan;
    mtt_step_info first, last;
    mtt_trainer *trainer;
    static int32_t ids[BATCH * SEQ + 1];
    int threads = getenv("OMP_NUM_THREADS") ? atoi(getenv("OMP_NUM_THREADS")) : 2;
    double before, grown, arena, bound;
#ifdef __linux__
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0); /* huge pages would round each buffer up to 2 MiB */
#endif
    for (int i = 0; i <= BATCH * SEQ; i++) ids[i] = below(model.vocab);
    check(!mtt_policy_parse(&env, technique, &policy, NULL), "%s: %s", technique, env.error);
    before = peak();
    if (mtt_trainer_create(&env, &model, &policy, &optim, mtt_cpu_backend(), BATCH, SEQ, &trainer)) return 1;
    for (int step = 0; step < 3; step++)
        if (mtt_train_step(trainer, ids, ids + 1, step ? &last : &first)) return 1;
    grown = peak() - before;
    mtt_schedule_report(mtt_trainer_schedule(trainer), &plan);
    mtt_trainer_destroy(trainer);
    arena = (double)plan.arena_bytes / 1048576;
    bound = outside(&plan, threads);
    check(last.loss < first.loss, "%s: the loss goes from %g to %g", technique, first.loss, last.loss);
    check(grown <= arena + bound, "%s, %d threads: %.2f MiB taken, %.2f planned, %.2f outside at most",
          technique, threads, grown, arena, bound);
    /* every byte of the arena is written */
    check(grown >= arena, "%s, %d threads: %.2f MiB taken, %.2f planned", technique, threads, grown, arena);
    printf("%-36s %d threads: planned %6.2f MiB, taken %+5.2f, at most %+5.2f\n", technique, threads, arena,
           grown - arena, bound);
    return failed || !passed;
}

/* The same in a fresh process. */
static void fresh_process(const char *self, const char *technique, const char *threads)
{
    int status = -1;
    pid_t child;
    fflush(stdout);
    child = fork();
    if (child == 0) {
        setenv("OMP_NUM_THREADS", threads, 1);
        execl(self, self, technique, (char *)NULL);
        _exit(127);
    }
    if (child > 0) waitpid(child, &status, 0);
    check(status == 0, "%s with %s threads: status %d", technique, threads, status);
}

int main(int argc, char **argv)
{
    if (argc > 1) return measure(argv[1]);
    if (peak() == 0) skip("the system has no /proc/self/status with VmHWM");
    for (size_t i = 0; i < sizeof(RUNS) / sizeof(RUNS[0]) && peak() > 0; i++)
        fresh_process(argv[0], RUNS[i].technique, RUNS[i].threads);
    products();
    return finish();
}
