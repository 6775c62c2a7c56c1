/* train.c - trains a small decoder with a memory technique, and measures memory, speed and perplexity.
   Copy mtt.h and stb_sprintf.h beside it, and for a GPU mtt_kernels.cu:

   cc -O3 -march=native -fopenmp train.c -o train -lm
   nvcc -O3 -arch=native -DMTT_CUDA train.c mtt_kernels.cu -lcublasLt -o train        then --device cuda
   ./train --data my_text.txt --technique bf16_flash --layers 4 --heads 8 --d-model 256 --sample 200
   ./train --data my_text.txt --bf16 --flash-attn --gradient-checkpointing --dry-run  memory, before anything

   --help lists all options. A run leaves {results-dir}/{dataset}_{technique}_metrics.json, _memory.json,
   .jsonl (each step) and .safetensors (for --resume). Read main first. The larger one is tools/trainer.c. */
#define MTT_IMPLEMENTATION
#if __has_include("mtt.h")
#include "mtt.h"
#else
#include "../mtt.h"
#endif
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef _WIN32
#define mkdir(path, mode) mkdir(path)
#endif

/* ---- options: fields of four structs, by their names ---- */

typedef struct settings {
    const char *data, *dataset, *technique, *results_dir;
    int batch_size, seq_len, steps, epochs, seed, eval_every, eval_batches, save_every, sample;
    int resume, no_checkpoint, no_memory_profiling, dry_run, json, find_max_batch;
} settings;

#define OWN(name, kind, low, help) \
    {#name, MTT_FIELD_##kind, offsetof(settings, name), 0, low, 1 << 30, NULL, help}
static const mtt_field own_fields[] = {
    OWN(data, TEXT, 0, "a text or JSONL, or the prefix of prepared token files"),
    OWN(dataset, TEXT, 0, "name of the result files (the data's)"),
    OWN(technique, TEXT, 0, "words joined by _, as in bf16_flash_window16_bs64; later options change it"),
    OWN(results_dir, TEXT, 0, "folder of all files (results)"),
    OWN(batch_size, INT, 1, "sequences in a batch (32)"),
    OWN(seq_len, INT, 1, "tokens in a sequence (256)"),
    OWN(steps, INT, 1, "optimizer steps (those of the epochs)"),
    OWN(epochs, INT, 1, "passes over the data (1)"),
    OWN(seed, INT, 0, "of weights, dropout, split and order (0)"),
    OWN(eval_every, INT, 0, "steps between evaluations (0: at the end)"),
    OWN(eval_batches, INT, 0, "batches of an evaluation (0: all)"),
    OWN(save_every, INT, 0, "steps between checkpoints (0: at the end)"),
    OWN(sample, INT, 0, "tokens to write at the end"),
    OWN(resume, FLAG, 0, "continue from the checkpoint of this dataset and technique"),
    OWN(no_checkpoint, FLAG, 0, "save none"),
    OWN(no_memory_profiling, FLAG, 0, "do not write the memory file"),
    OWN(dry_run, FLAG, 0, "print the plan and stop"),
    OWN(json, FLAG, 0, "print it as JSON"),
    OWN(find_max_batch, FLAG, 0, "print the largest batch under --memory-budget"),
    {NULL, MTT_FIELD_INT, 0, 0, 0, 0, NULL, NULL}};

static settings set = {.results_dir = "results", .batch_size = 32, .seq_len = 256, .epochs = 1};
static mtt_model_desc model;
static mtt_policy policy = {.accumulate = 1};
static mtt_optim_desc optim = {.lr = 1e-3f};
static mtt_env env; /* has the text of the last error */

/* Options, and the field or the word of a technique that they stand for. */
static const char *const other_names[][2] = {
    {"vocab_size", "vocab"}, {"window_size", "window"}, {"memory_budget", "budget_bytes"},
    {"flash_attn", "flash"}, {"gradient_checkpointing", "checkpointing"}};

#define STOP(code, ...) do { char fault[2400]; snprintf(fault, sizeof(fault), __VA_ARGS__); \
    mtt_make_printable(fault); fprintf(stderr, "train: %s\n", fault); exit(code); } while (0)

static void check(mtt_status status)
{
    int code = status == MTT_E_ARGUMENT ? 2 : status == MTT_E_MEMORY || status == MTT_E_BUDGET ? 4 : 3;
    if (status) STOP(code, "%s", *env.error ? env.error : mtt_status_string(status));
}

/* Sets the option `argument`, of which `value` is the next argument. Returns how many of both it took. */
static int set_option(const char *argument, const char *value)
{
    const struct { const mtt_field *fields; void *desc; } groups[] = {
        {own_fields, &set}, {mtt_model_fields(), &model}, {mtt_policy_fields(), &policy},
        {mtt_optim_fields(), &optim}};
    char name[64] = "", *at;
    const mtt_field *f;
    int help = !strcmp(argument, "--help");
    size_t i;
    if (!strncmp(argument, "--", 2)) snprintf(name, sizeof(name), "%s", argument + 2);
    for (at = name; (at = strchr(at, '-')) != NULL;) *at = '_';
    for (i = 0; i < sizeof(other_names) / sizeof(other_names[0]); i++)
        if (!strcmp(other_names[i][0], name)) strcpy(name, other_names[i][1]);
    for (i = 0; i < 4; i++)
        for (f = groups[i].fields; f->name; f++) {
            int flag = f->kind == MTT_FIELD_FLAG;
            if (help) printf("--%-22s %s %s\n", f->name, f->help, f->choices ? f->choices : "");
            if (strcmp(f->name, name)) continue;
            if (mtt_field_set(&env, f, groups[i].desc, flag ? "1" : value))
                STOP(2, "%.100s %.100s: %s", argument, value ? value : "", env.error);
            if (!strcmp(name, "technique")) check(mtt_policy_parse(&env, value, &policy, &set.batch_size));
            return flag ? 1 : 2;
        }
    if (help) exit(0);
    if (!*name || mtt_policy_parse(NULL, name, &policy, NULL))
        STOP(2, "there is no option %.100s: --help lists all", argument);
    return 1; /* a word of a technique */
}

/* ---- files ---- */

static char run[512]; /* {dataset}_{technique} */

/* A path, until the next call. */
static const char *path_of(const char *name, const char *ending)
{
    static char path[2100];
    snprintf(path, sizeof(path), "%.1500s/%.500s%.60s", set.results_dir, name, ending);
    return path;
}

static void print(void *file, const char *text, size_t bytes)
{
    fwrite(text, 1, bytes, (FILE *)file);
}

static int print_token(void *file, int prompt, int32_t id, const char *text, size_t bytes)
{
    return (void)prompt, (void)id, print(file, text, bytes), 0; /* not 0 would stop it */
}

/* ---- training ---- */

static FILE *steps_file; /* a line of JSON for each step and each evaluation */
static double total_ms, last_loss;
static int64_t evaluated = -1; /* the step of the last evaluation */
static mtt_quality quality;

/* The log of a run that continues keeps the lines up to its step; their times and the last loss count. */
static void open_log(int64_t step)
{
    const char *path = path_of(run, ".jsonl");
    char line[512];
    long at, end = 0;
    double loss, ms;
    steps_file = fopen(path, step && !access(path, F_OK) ? "r+b" : "w+b");
    if (!steps_file) STOP(3, "cannot write %s", path);
    while (fgets(line, sizeof(line), steps_file) && sscanf(line, "{\"step\": %ld", &at) == 1 && at <= step) {
        end = ftell(steps_file);
        if (sscanf(line, "{\"step\": %*d, \"loss\": %lf, \"ms\": %lf", &loss, &ms) == 2)
            total_ms += ms, last_loss = loss;
        else evaluated = at;
    }
    if (fseek(steps_file, end, SEEK_SET) || ftruncate(fileno(steps_file), end)) STOP(3, "cannot cut it");
}

/* The mean loss of the validation split, perplexity and accuracy. */
static void evaluate(mtt_trainer *trainer, const mtt_dataset *data)
{
    long long step = mtt_trainer_step(trainer);
    check(mtt_evaluate_tokens(trainer, data->valid, data->tokenizer, set.eval_batches, NULL, &quality));
    fprintf(stderr, "step %lld: validation loss %.4f\n", step, quality.loss);
    if (evaluated != step) fprintf(steps_file, "{\"step\": %lld, \"val_loss\": %.6f}\n", step, quality.loss);
    evaluated = step;
}

static void train(mtt_trainer *trainer, mtt_batches *batches, const mtt_dataset *data)
{
    size_t part = (size_t)set.batch_size * (size_t)set.seq_len, all = part * (size_t)policy.accumulate, i;
    int32_t *tokens = malloc(2 * all * sizeof(*tokens)), *targets = tokens + all;
    int step = (int)mtt_trainer_step(trainer), last;
    mtt_step_info info;
    if (!tokens) STOP(4, "out of memory for a batch");
    while (step < set.steps) {
        if (set.eval_every && step % set.eval_every == 0 && evaluated != step) evaluate(trainer, data);
        for (i = 0; i < all; i += part) check(mtt_batches_next(batches, tokens + i, targets + i));
        check(mtt_train_step(trainer, tokens, targets, &info));
        step = (int)info.step, last = step == set.steps;
        total_ms += info.ms, last_loss = info.loss;
        fprintf(steps_file, "{\"step\": %d, \"loss\": %.6f, \"ms\": %.3f}\n", step, info.loss, info.ms);
        if (step % 20 == 0 || last)
            fprintf(stderr, "step %d of %d: loss %.4f, %.1f ms, %.0f tokens/s\n", step, set.steps, info.loss,
                    info.ms, (double)all / info.ms * 1e3);
        if (set.no_checkpoint || !(last || (set.save_every && step % set.save_every == 0))) continue;
        fflush(steps_file); /* the log has what the checkpoint continues */
        check(mtt_save(trainer, path_of(run, ".safetensors"), batches));
    }
    free(tokens);
}

static void put(void *writer, const char *text, size_t bytes)
{
    mtt_writer_put((mtt_writer *)writer, text, bytes); /* the commit says if it failed; the old file stays */
}

/* One line of JSON, in which a number that is not finite is null; a summary to standard output. */
static void write_metrics(const mtt_trainer *trainer)
{
    double tokens = (double)set.batch_size * set.seq_len * policy.accumulate, ms = total_ms / set.steps;
    mtt_plan_report plan;
    mtt_writer *w;
    char text[1200];
    size_t i;
    check(mtt_writer_open(&env, path_of(run, "_metrics.json"), 0, &w));
    mtt_schedule_report(mtt_trainer_schedule(trainer), &plan);
    const struct { const char *format; double value; } numbers[] = {
        {"parameters\": %.0f", (double)plan.parameters}, {"batch_size\": %.0f", set.batch_size},
        {"seq_len\": %.0f", set.seq_len}, {"ranks\": %.0f", 1}, {"steps\": %.0f", set.steps},
        {"train_loss\": %.6f", last_loss}, {"val_loss\": %.6f", quality.loss},
        {quality.perplexity < 1e15 ? "perplexity\": %.4f" : "perplexity\": %.9g", quality.perplexity},
        {"bits_per_byte\": %.5f", quality.bits_per_byte}, {"accuracy\": %.5f", quality.accuracy},
        {"training_time\": %.3f", total_ms * 1e-3}, {"ms_per_step\": %.3f", ms},
        {"tokens_per_s\": %.1f", tokens / ms * 1e3}, {"arena_bytes\": %.0f", (double)plan.arena_bytes},
        {"peak_bytes\": %.0f", plan.peak_bytes}, {"device_bytes\": %.0f", mtt_trainer_device_bytes(trainer)},
        {"peak_forward_bytes\": %.0f", (double)plan.phase_peak_bytes[MTT_FORWARD]},
        {"peak_backward_bytes\": %.0f", (double)plan.phase_peak_bytes[MTT_BACKWARD]}};
    put(w, text, (size_t)snprintf(text, sizeof(text), "{\"dataset\": \"%.500s\", \"technique\": \"%.500s\"",
                                  set.dataset, set.technique));
    for (i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        snprintf(text, sizeof(text), numbers[i].format, numbers[i].value);
        if (!isfinite(numbers[i].value)) strcpy(strchr(text, ':'), ": null");
        put(w, ", \"", 3), put(w, text, strlen(text));
    }
    put(w, "}\n", 2), check(mtt_writer_commit(w)), mtt_writer_close(w);
    printf("%s: %.1f MiB, %.1f ms a step, perplexity %.6g; %s\n", set.technique,
           (double)plan.arena_bytes / 1048576, ms, quality.perplexity, path_of(run, "_metrics.json"));
    if (set.no_memory_profiling) return;
    check(mtt_writer_open(&env, path_of(run, "_memory.json"), 0, &w));
    mtt_schedule_json(mtt_trainer_schedule(trainer), put, w);
    check(mtt_writer_commit(w)), mtt_writer_close(w);
}

/* Opens the tokens of --data, which are made of it first if it is a text and they are not there yet. */
static void open_data(mtt_dataset *data, mtt_batches *batches)
{
    mtt_prepare_desc job = {.input = set.data, .vocab = model.vocab, .seed = (uint64_t)set.seed};
    char tokens[2100];
    uint64_t in_step = (uint64_t)set.batch_size * (uint64_t)policy.accumulate;
    if (!set.dataset) set.dataset = strrchr(set.data, '/') ? strrchr(set.data, '/') + 1 : set.data;
    if (strpbrk(set.dataset, "/\"\\")) STOP(2, "--dataset %s: leave out / \" \\", set.dataset);
    snprintf(run, sizeof(run), "%s_%s", set.dataset, set.technique);
    snprintf(tokens, sizeof(tokens), "%s.train.tokens", set.data);
    mkdir(set.results_dir, 0777);
    job.output = access(tokens, R_OK) ? path_of(set.dataset, "") : set.data;
    if (access(tokens, R_OK)) check(mtt_prepare(&env, &job, NULL));
    check(mtt_dataset_open(&env, job.output, NULL, data));
    check(mtt_batches_init(&env, batches, data->train, set.batch_size, set.seq_len, (uint64_t)set.seed, 0));
    model.vocab = mtt_tokens_vocab(data->train);
    if (!set.steps) set.steps = (int)(batches->sequences * (uint64_t)set.epochs / in_step);
    if (!set.steps || mtt_tokens_count(data->valid) <= (uint64_t)set.seq_len)
        STOP(3, "%s is too short: lower --batch-size or --seq-len", set.data);
}

/* Options, plan, data, trainer; then it trains, evaluates, writes metrics and a sample. */
int main(int argc, char **argv)
{
    mtt_backend backend = *mtt_cpu_backend();
    mtt_plan_report plan;
    mtt_trainer *trainer;
    mtt_dataset data;
    mtt_batches batches;
    char name[256], json[2048]; /* enough for both */
    int i;
    mtt_wait_passively(argv);
    for (i = 1; i < argc;) i += set_option(argv[i], argv[i + 1]);
    if (!set.data && !set.dry_run && !set.find_max_batch) STOP(2, "--data is missing: --data my_text.txt");
    if (set.find_max_batch) {
        check(mtt_plan_max_batch(&env, &model, &policy, set.seq_len, policy.budget_bytes, &i));
        return fprintf(stderr, "sequences of %d tokens, at most:\n", set.seq_len), printf("%d\n", i), 0;
    }
    mtt_policy_name(&policy, name, sizeof(name));
    if (!set.technique) set.technique = name;
    if (!set.dry_run) open_data(&data, &batches);
    check(mtt_plan(&env, &model, &policy, set.batch_size, set.seq_len, &plan));
    if (set.json) mtt_plan_json(&plan, json, sizeof(json)), puts(json);
    else mtt_plan_print(&plan, print, set.dry_run ? stdout : stderr);
    if (policy.budget_bytes && plan.arena_bytes > policy.budget_bytes)
        STOP(4, "the plan needs more than --memory-budget: lower --batch-size, or --recompute budget");
    if (set.dry_run) return 0;
    if (policy.device == MTT_DEVICE_CUDA) check(mtt_cuda_backend(&env, 0, &backend));
    optim.seed = (uint64_t)set.seed;
    optim.total_steps = set.steps;
    optim.zero_weights = set.resume; /* they are loaded */
    check(mtt_trainer_create(&env, &model, &policy, &optim, &backend, set.batch_size, set.seq_len, &trainer));
    if (set.resume) check(mtt_resume(trainer, path_of(run, ".safetensors"), &batches));
    else if (!set.no_checkpoint && !access(path_of(run, ".safetensors"), F_OK))
        STOP(3, "%s is there: --resume continues it, or move it away", path_of(run, ".safetensors"));
    open_log(mtt_trainer_step(trainer));
    train(trainer, &batches, &data);
    evaluate(trainer, &data);
    if (ferror(steps_file) + fclose(steps_file)) STOP(3, "cannot write the log of %s: full disk?", run);
    write_metrics(trainer);
    if (set.sample) {
        mtt_generation job = {.texts = (const char *[]){"\n"}, .prompt_count = 1, .count = set.sample,
                              .write = print_token, .user = stdout,
                              .sampling = {.temperature = 0.8f, .top_k = 200, .seed = (uint64_t)set.seed}};
        check(mtt_generate(trainer, data.tokenizer, &job)), putchar('\n');
    }
    mtt_trainer_destroy(trainer);
    mtt_dataset_close(&data);
    if (!isfinite(quality.perplexity)) STOP(5, "the run diverged: lower --lr");
    return 0;
}
