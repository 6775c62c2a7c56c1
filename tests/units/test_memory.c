/* test_memory.c - a process grows by what the plan says, and a stack of 128 KB is enough. Each technique runs
   in a process of its own, which compares its peak of resident memory (VmHWM) with the arena and with the
   bounds that mtt_plan_print prints.

   The bounds in MiB, and what was measured with 1, 2 and 8 threads:
      3         staging 0.5, lists of a model of one layer 0.2, code of mtt and of gcc's OpenMP 0.3 to 0.6;
                LLVM's OpenMP takes 1.5 more
      a thread  0.5: tiles, 0.47, and a stack
      a layer   0.0625: its operations and tensors, 0.03, or 0.055 if recomputed and accumulated
      OpenBLAS  2: 1,024 rows of A, at most 512 columns deep. 1.25 a thread: a block of B that fits the cache,
                0.8 (640 x 320) on Skylake-X and 1.125 (768 x 384) on Haswell
   The vocabulary makes the gradient of the head a product of 20,096 rows. One call for all of them would take
   20 MiB more.

      build/test_memory                         all techniques
      build/test_memory bf16_flash_chunked      one, with its figures
      build/test_memory load                    a generator's weights from a file; resume: a trainer's
      build/test_memory stack                   threads with stacks of 128 KB, the default of musl */
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include "../test.h"
#include <pthread.h>
#include <sys/wait.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __linux__
#include <sys/prctl.h>
#endif

enum { BATCH = 8, SEQ = 128, MAX_ROWS = 2500 };

static const struct {
    const char *technique, *threads, *limit, *value; /* a variable of the environment besides, or NULL */
} RUNS[] = {
    {"fp32", "2", NULL, NULL},
    {"fp32_flash", "2", NULL, NULL},
    {"fp32_flash_checkpointing_chunked", "2", NULL, NULL},
    {"bf16_flash_chunked", "2", NULL, NULL},
    {"bf16_flash_segments_chunked_compact", "2", NULL, NULL},
    {"bf16_flash_segments_compact_early", "2", NULL, NULL},
    {"bf16_flash_recursive_compact_early", "2", NULL, NULL},
    {"bf16_window16_selective", "2", NULL, NULL},
    {"fp32", "8", NULL, NULL},
    {"fp32_flash", "8", NULL, NULL},
    {"load", "2", NULL, NULL},
    {"resume", "2", NULL, NULL},
    {"stack", "2", NULL, NULL},
    /* OpenBLAS must not wait for threads that OpenMP does not start. */
    {"stack", "4", "OMP_THREAD_LIMIT", "1"},
    {"stack", "4", "OMP_DYNAMIC", "true"},
    {"stack", "2", "OMP_MAX_ACTIVE_LEVELS", "0"},
};

static mtt_env env;

/* ------------------------------------------------------------------------------------------- products --- */

/* Tiles for all threads, which operations that no backend runs need. */
static const mtt_tensor *tiles(void)
{
    static mtt__cpu cpu;
    check(!mtt__cpu_tiles(&cpu), "no memory for tiles");
    return &cpu.tiles;
}

/* Rows that a product of FP32 hands to a BLAS in several calls, and one that takes a single call. */
static void product(int64_t m, int64_t n, int64_t k, int a_transposed, int b_transposed, int bias, int add)
{
    static float a[MAX_ROWS * 11], b[13 * 11], c[MAX_ROWS * 13], before[MAX_ROWS * 13], shift[13];
    mtt_tensor ta = {.dims = 2, .shape = {m, k}, .data = a}, tb = {.dims = 2, .shape = {k, n}, .data = b};
    mtt_tensor tc = {.dims = 2, .shape = {m, n}, .data = c}, ts = {.dims = 1, .shape = {n}, .data = shift};
    mtt_op op = {.workspace = tiles()};
    double worst = 0;
    if (a_transposed) ta.shape[0] = k, ta.shape[1] = m;
    if (b_transposed) tb.shape[0] = n, tb.shape[1] = k;
    for (int64_t i = 0; i < m * k; i++) a[i] = (float)below(2001) / 1000 - 1;
    for (int64_t i = 0; i < k * n; i++) b[i] = (float)below(2001) / 1000 - 1;
    for (int64_t i = 0; i < n; i++) shift[i] = (float)below(2001) / 1000 - 1;
    for (int64_t i = 0; i < m * n; i++) c[i] = before[i] = (float)below(2001) / 1000 - 1;
    mtt__gemm(&op, mtt__matrix(&ta, a_transposed), mtt__matrix(&tb, b_transposed), mtt__matrix(&tc, 0),
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

/* A caller's settings of OpenMP leave fewer threads than omp_get_max_threads says, and change no bit. */
static void limited_products(void)
{
#ifdef _OPENMP
    enum { M = 300, N = 40, K = 200 };
    static float a[M * K], b[K * N], c[4][M * N];
    mtt_tensor ta = {.dims = 2, .shape = {M, K}, .data = a}, tb = {.dims = 2, .shape = {K, N}, .data = b};
    mtt_op op = {.workspace = tiles()};
    int levels = omp_get_max_active_levels(), threads = omp_get_max_threads();
    for (int i = 0; i < M * K; i++) a[i] = (float)below(2001) / 1000 - 1;
    for (int i = 0; i < K * N; i++) b[i] = (float)below(2001) / 1000 - 1;
    for (int way = 0; way < 4; way++) {
        mtt_tensor tc = {.dims = 2, .shape = {M, N}, .data = c[way]};
        mtt__view va = mtt__matrix(&ta, 0), vb = mtt__matrix(&tb, 0), vc = mtt__matrix(&tc, 0);
        if (way == 1) omp_set_max_active_levels(0);
        if (way == 2) omp_set_num_threads(threads + 3), omp_set_dynamic(1);
        alarm(600); /* ends a product that hangs */
        op.workspace = tiles();
#pragma omp parallel if (way == 3)
#pragma omp single
        mtt__gemm(&op, va, vb, vc, NULL, 0, 1);
        alarm(0);
        check(!memcmp(c[way], c[0], sizeof(c[0])), "limit %d of OpenMP changes a product", way);
        check(omp_get_max_threads() == threads + (way == 2 ? 3 : 0), "it changes the number of threads");
        omp_set_max_active_levels(levels), omp_set_num_threads(threads), omp_set_dynamic(0);
    }
#endif
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

static void must(mtt_status status, const char *what)
{
    check(!status, "%s: %s", what, env.error);
}

/* Weights from a file that a process before has written take a tenth of the arena at most besides it: neither
   the file stays in memory, nor is there a copy of the weights. */
static int load(int resumes)
{
    const mtt_model_desc model = {.layers = 1, .heads = 2, .d_model = 64, .vocab = 50000};
    const mtt_policy policy = {.loss = MTT_LOSS_CHUNKED, .loss_chunk_rows = 16};
    const mtt_generator_desc desc = {.precision = MTT_BF16, .context = 16, .chunk = 16};
    const mtt_backend *cpu = mtt_cpu_backend();
    mtt_optim_desc optim = {.zero_weights = 0};
    mtt_plan_report plan = {0};
    mtt_model *file = NULL;
    mtt_trainer *trainer = NULL;
    mtt_generator *generator = NULL;
    double before, grown, arena;
    int status = -1;
    pid_t child;
    if (!open_folder()) return 1;
    child = fork();
    if (child == 0)
        _exit(mtt_trainer_create(&env, &model, &policy, &optim, cpu, 1, 16, &trainer) ||
              mtt_save(trainer, in("saved"), NULL));
    if (child > 0) waitpid(child, &status, 0);
    check(!status, "no checkpoint: status %d", status);
    before = peak();
    optim.zero_weights = 1;
    if (resumes) {
        must(mtt_trainer_create(&env, &model, &policy, &optim, cpu, 1, 16, &trainer), "a trainer");
        must(mtt_resume(trainer, in("saved"), NULL), "resume");
        mtt_schedule_report(mtt_trainer_schedule(trainer), &plan);
    } else {
        must(mtt_model_open(&env, in("saved"), &file), "a model");
        must(mtt_generator_plan(&env, mtt_model_describe(file), &desc, &plan), "a plan");
        must(mtt_generator_create(&env, mtt_model_describe(file), &desc, cpu, &generator), "a generator");
        must(mtt_generator_load(generator, file), "load");
    }
    grown = peak() - before;
    arena = (double)plan.arena_bytes / 1048576;
    check(grown <= 1.1 * arena + (double)plan.outside_bytes / 1048576 && arena > 10,
          "%.2f MiB taken, %.2f planned", grown, arena);
    printf("%-36s 2 threads: planned %6.2f MiB, taken %+5.2f\n", resumes ? "resume" : "load", arena,
           grown - arena);
    mtt_generator_destroy(generator);
    mtt_trainer_destroy(trainer);
    mtt_model_close(file);
    close_folder();
    return failed || !passed;
}

/* --------------------------------------------------------------------------------------------- stacks --- */

/* A technique and, beside two heads of 32, its model. */
static const struct {
    const char *technique;
    mtt_model_desc model;
} STACKED[] = {
    {"fp32", {.heads = 2}},
    {"tf32_selective", {.norm = MTT_NORM_RMS, .mlp = MTT_MLP_SWIGLU, .qk_norm = 1, .heads_kv = 1}},
    {"fp32_flash_checkpointing", {.d_head = 256, .positions = MTT_POSITIONS_ROTARY, .qk_norm = 1}},
    {"bf16", {.tied_head = 1, .dropout = 0.1f}},
    {"bf16_flash_window16_chunked", {.positions = MTT_POSITIONS_LEARNED, .dropout = 0.1f}},
    {"bf16_flash_segments_compact", {.heads_kv = 1}},
    {"bf16_flash_compact_early", {.norm_place = MTT_NORM_POST}},
    {"bf16_flash_selective", {.mlp = MTT_MLP_RELU2}},
    {"fp16_compact_checkpointing", {.mlp = MTT_MLP_SILU}},
    {"fp8", {.heads = 2}},
    {"fp8_flash", {.d_head = 32, .heads_kv = 1, .qk_norm = 1, .positions = MTT_POSITIONS_ROTARY}},
    {"fp32", {.d_model = 2048, .d_head = 32, .d_ff = 64, .layers = 1}},
    {"fp32_lora", {.heads = 2}},
};

static int discard_token(void *user, int prompt, int32_t id, const char *text, size_t bytes)
{
    (void)user, (void)prompt, (void)id, (void)text, (void)bytes;
    return 0;
}

static void stacked(size_t number, mtt_dataset *data)
{
    enum { B = 2, T = 96 };
    static int32_t ids[B * T], targets[B * T];
    const char *name = STACKED[number].technique, *lora = strstr(name, "_lora");
    const char *path = in("model.safetensors");
    mtt_model_desc model = STACKED[number].model;
    mtt_policy policy = {.lora_rank = lora ? 8 : 0};
    mtt_optim_desc optim = {.lr = 1e-3f, .clip = -1};
    mtt_generation text = {.texts = (const char *[]){"a"}, .prompt_count = 1, .count = 5,
                           .sampling = {.temperature = 1, .top_k = 5, .top_p = 0.9f}, .write = discard_token};
    mtt_batches batches;
    mtt_quality quality;
    mtt_step_info info;
    mtt_trainer *trainer;
    char words[64];
    snprintf(words, sizeof(words), "%.*s", lora ? (int)(lora - name) : 60, name);
    model.vocab = mtt_tokens_vocab(data->train);
    if (!model.heads) model.heads = 2;
    if (!model.d_model) model.d_model = 64;
    if (!model.layers) model.layers = 2;
    must(mtt_policy_parse(&env, words, &policy, NULL), name);
    must(mtt_batches_init(&env, &batches, data->train, B, T, 1, 0), name);
    must(mtt_trainer_create(&env, &model, &policy, &optim, mtt_cpu_backend(), B, T, &trainer), name);
    if (!trainer) return;
    for (int step = 0; step < 2; step++) {
        must(mtt_batches_next(&batches, ids, targets), name);
        must(mtt_train_step(trainer, ids, targets, &info), name);
    }
    check(info.loss > 1 && info.loss < 10, "%s: a loss of %g", name, info.loss);
    must(mtt_evaluate_tokens(trainer, data->valid, data->tokenizer, 1, NULL, &quality), name);
    must(mtt_generate(trainer, data->tokenizer, &text), name);
    must(mtt_save(trainer, path, &batches), name);
    must(mtt_resume(trainer, path, &batches), name);
    if (lora) must(mtt_save_merged(trainer, path), name);
    mtt_trainer_destroy(trainer);
}

/* A text becomes tokens, models and again text. */
static void *on_a_small_stack(void *unused)
{
    const char *prefix = in("data");
    mtt_prepare_desc desc = {.input = in("text.txt"), .output = prefix, .vocab = 300};
    mtt_dataset data = {NULL, NULL, NULL, NULL};
    mtt_generator_desc of = {.precision = MTT_BF16, .batch = 2, .context = 200};
    mtt_generator *generator = NULL;
    mtt_model *model = NULL;
    const int32_t prompt[70] = {1, 2, 3}, *prompts[2] = {prompt, prompt};
    const int sizes[2] = {70, 1};
    mtt_generation g = {.prompts = prompts, .sizes = sizes, .prompt_count = 2, .count = 80,
                        .write = discard_token};
    must(mtt_prepare(&env, &desc, NULL), "prepare");
    must(mtt_dataset_open(&env, prefix, NULL, &data), "dataset");
    for (size_t i = 0; data.train && i < MTT__LENGTH(STACKED); i++) stacked(i, &data);
    mtt_dataset_close(&data);
    must(mtt_model_open(&env, in("model.safetensors"), &model), "model");
    if (model) must(mtt_generator_create(&env, mtt_model_describe(model), &of, mtt_cpu_backend(), &generator),
                    "generator");
    if (generator) must(mtt_trainer_load(mtt_generator_trainer(generator), model), "weights");
    if (generator) must(mtt_generator_run(generator, NULL, &g), "text");
    mtt_generator_destroy(generator);
    mtt_model_close(model);
    return unused;
}

/* Runs every part of a program in a thread with a stack of 128 KB. OpenMP's threads have the same. */
/* More threads than any machine has are refused by name, before memory is taken for them. */
static void too_many_threads(void)
{
#ifdef _OPENMP
    static const int COUNTS[] = {4097, 99999, INT_MAX};
    const int threads = omp_get_max_threads();
    mtt_model_desc model = {.layers = 1, .d_model = 32, .heads = 2, .vocab = 64};
    mtt_policy policy = {.accumulate = 1};
    mtt_optim_desc optim = {0};
    for (size_t i = 0; i < MTT__LENGTH(COUNTS); i++) {
        mtt_trainer *t = NULL;
        omp_set_num_threads(COUNTS[i]);
        mtt_status status = mtt_trainer_create(&env, &model, &policy, &optim, mtt_cpu_backend(), 1, 8, &t);
        omp_set_num_threads(threads);
        check(status == MTT_E_ARGUMENT && !t && strstr(env.error, "set OMP_NUM_THREADS"), "%d threads: %s",
              COUNTS[i], env.error);
        mtt_trainer_destroy(t);
    }
#endif
}

static int small_stacks(void)
{
    static char text[60000];
    pthread_attr_t small;
    pthread_t thread;
    int made;
    for (size_t i = 0; i < sizeof(text); i++)
        text[i] = i % 997 < 2 ? '\n' : below(6) ? (char)('a' + below(9)) : ' ';
    if (!open_folder()) return 1;
    write_file(in("text.txt"), text, sizeof(text));
    made = !pthread_attr_init(&small) && !pthread_attr_setstacksize(&small, 128 << 10) &&
           !pthread_create(&thread, &small, on_a_small_stack, NULL);
    check(made, "no thread has a stack of 128 KB");
    if (made) pthread_join(thread, NULL);
    close_folder();
    return failed || !passed;
}

/* The same in a fresh process. */
static void fresh_process(const char *self, const char *technique, const char *threads, const char *limit,
                          const char *value)
{
    int status = -1;
    pid_t child;
    fflush(stdout);
    child = fork();
    if (child == 0) {
        setenv("OMP_NUM_THREADS", threads, 1);
        setenv("OMP_STACKSIZE", "128K", 1);
        if (limit) setenv(limit, value, 1);
        alarm(600); /* ends one that hangs */
        execl(self, self, technique, (char *)NULL);
        _exit(127);
    }
    if (child > 0) waitpid(child, &status, 0);
    check(status == 0, "%s with %s threads%s%s: status %d", technique, threads, limit ? ", " : "",
          limit ? limit : "", status);
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "stack")) return small_stacks();
    if (argc > 1 && (!strcmp(argv[1], "load") || !strcmp(argv[1], "resume"))) return load(*argv[1] == 'r');
    if (argc > 1) return measure(argv[1]);
    if (peak() == 0) skip("the system has no /proc/self/status with VmHWM");
    for (size_t i = 0; i < sizeof(RUNS) / sizeof(RUNS[0]) && peak() > 0; i++)
        fresh_process(argv[0], RUNS[i].technique, RUNS[i].threads, RUNS[i].limit, RUNS[i].value);
    products();
    limited_products();
    too_many_threads();
    return finish();
}
