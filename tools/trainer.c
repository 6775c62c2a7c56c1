/* trainer.c - trains a small GPT on your text with any memory technique of mtt.h, and measures what it saves.
   examples/train.c is its core; here are presets, adapters, ranks, kept checkpoints and curves.
   cc -O3 -march=native -fopenmp tools/trainer.c -o train -lm             (faster: -DMTT_CBLAS -lopenblas)
   nvcc -O3 -arch=native -DMTT_CUDA tools/trainer.c mtt_kernels.cu -lcublasLt -o train    (then --device cuda)
   ./train --data my_text.txt            (--ranks 4: four processes; or torchrun, mpirun, srun start them)

   It uses nothing but the public interface. Results go to stdout, progress to stderr, files to --results-dir.
   The training loop is in train(). main() has what comes before: options, data, plan, trainer. */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "wordpiece.h"
#include "options.h"
#include "results.h"
#include "run.h"
#include "speak.h"

static struct {
    mtt_model_desc model;
    mtt_policy policy;
    mtt_optim_desc optim;
    mtt_sampling sampling;
    int batch, seq_len, steps, epochs, seed, eval_every, eval_batches, save_every, resume, sample;
    int dry_run, find_max, json, no_memory;
    const char *data, *field, *tokenizer, *dataset, *prompt, *results;
} set = {.batch = 32, .seq_len = 256, .epochs = 1, .optim = {.lr = 1e-3f}, .policy = {.accumulate = 1},
         .sampling = {.temperature = 0.8f, .top_k = 200}, .prompt = "\n", .results = "results"};

static mtt_env env;
static run files = {.env = &env, .keep = 2, .optim = &set.optim};
static speaker session;
static const option options[] = {
    TITLE("usage: train --data FILE [option...]\n\n"
          "  train --data my_text.txt                a small model; it takes a minute or two on a CPU\n"
          "  train --data my_text.txt --preset a --technique bf16_flash --eval-every 100 --sample 200\n"
          "  train --dry-run --preset gpt2 --technique bf16_flash_checkpointing      memory, without data\n\n"
          "Data and results:"),
    TEXT("data", &set.data, "text, JSONL, - for standard input, or the prefix of prepared token files"),
    TEXT("field", &set.field, "field of the JSONL documents, default text"),
    TEXT("tokenizer", &set.tokenizer, "tokenizer.json, vocab.bpe or vocab.txt; default: train a BPE"),
    TEXT("init", &files.init, "first weights: a checkpoint, or a folder of Hugging Face's"),
    TEXT("dataset", &set.dataset, "name of the result files, default the name of the data file"),
    TEXT("results-dir", &set.results, "folder of metrics, logs, checkpoints and token files"),
    CHOICE("log", &files.curves, "none|csv|tensorboard", "write the log as a table, too, or for TensorBoard"),
    TITLE("Training:"),
    INT("batch-size", &set.batch, 0, "sequences in a micro-batch"),
    INT("seq-len", &set.seq_len, 0, "tokens in a sequence"),
    INT("steps", &set.steps, 0, "optimizer steps, default those of --epochs"),
    INT("epochs", &set.epochs, 1, "passes over the data"),
    INT("seed", &set.seed, 0, "seed of weights, dropout, data split and data order"),
    TITLE("Evaluations and checkpoints:"),
    INT("eval-every", &set.eval_every, 0, "steps between evaluations; 0: only at the end"),
    INT("eval-batches", &set.eval_batches, 0, "batches of an evaluation; 0: the whole split"),
    INT("save-every", &set.save_every, 0, "steps between checkpoints; 0: only at the end"),
    INT("keep", &files.keep, 1, "newest checkpoints to keep, besides the best by validation"),
    FLAG("no-checkpoint", &set.save_every, -1, "save no checkpoints"),
    FLAG("resume", &set.resume, 1, "continue from the checkpoint of this dataset and technique"),
    TITLE("Sample:"),
    INT("sample", &set.sample, 0, "tokens to write at the end"),
    TEXT("prompt", &set.prompt, "text to continue, default a new line"),
    REAL("temperature", &set.sampling.temperature, 0, "0: always the most likely token"),
    INT("top-k", &set.sampling.top_k, 0, "draw from the N most likely tokens; 0: all"),
    OPTION("top-p", MTT_FIELD_FLOAT, &set.sampling.top_p, 0, 1e-30, 1,
           "draw from the top X of probability; 1: all"),
    TITLE("Memory:"),
    FLAG("dry-run", &set.dry_run, 1, "print the plan and stop; needs neither data nor a device"),
    FLAG("find-max-batch", &set.find_max, 1, "print the largest batch under --memory-budget, or on the GPU"),
    FLAG("json", &set.json, 1, "the plan as one JSON object"),
    FLAG("no-memory-profiling", &set.no_memory, 1, "do not write the memory file"),
    OPTION("memory-budget", MTT_FIELD_BYTES, &set.policy.budget_bytes, 0, 0, 1e18,
           "refuse a plan that needs more; --recompute budget fits it (24G = 24GiB, 24GB, 512M)"),
    FIELDS("Technique; its words are also options: --bf16 --flash ...", mtt_policy_fields, &set.policy),
    OPTION("rank-timeout", MTT_FIELD_FLOAT, &files.timeout, 0, 0, 86400, "seconds to wait for a rank (20)"),
    FIELDS("Model; small on a CPU without --layers, --heads or --d-model:", mtt_model_fields, &set.model),
    FIELDS("Optimizer:", mtt_optim_fields, &set.optim),
};

/* After a failure that ends the run, of which other ranks may not know. Returns the exit code. */
static int report(mtt_status status)
{
    int code = run_tell(&files, status);
    if (code && status != MTT_E_NUMBERS) mtt_ranks_fail(files.ranks, env.error);
    return code;
}

static int read_options(int argc, char **argv)
{
    const mtt_policy *policy = &set.policy;
    int code;
    option_all.fallback = "small";
    code = option_parse(options, LENGTH(options), argc, argv);
    if (code) return code;
    set.dry_run |= set.find_max;
    if (!set.data && !set.dry_run)
        return option_fail("--data is missing, for example --data my_text.txt (--help lists all options)");
    if (policy->recompute == MTT_RECOMPUTE_BUDGET && !policy->budget_bytes)
        return option_fail("--recompute budget needs a budget, for example --memory-budget 8G");
    if (set.seq_len > 1024 && !set.model.max_seq) set.model.max_seq = set.seq_len;
    return 0;
}

/* Opens the dataset that --data names. Rank 0 makes it of the text, unless an earlier run has. */
static mtt_status open_data(mtt_dataset *data, mtt_batches *batches)
{
    mtt_status status = run_open(&files, &env, set.results, set.data, set.dataset, option_technique());
    int prepared = result_is_prefix(set.data), vocab;
    const char *prefix = prepared ? set.data : result_path(set.results, files.dataset, "");
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    mtt_prepare_desc job = {.input = set.data, .output = prefix, .field = set.field, .vocab = set.model.vocab,
                            .tokenizer = set.tokenizer, .seed = (uint64_t)set.seed};
    if (!status && set.resume) status = run_check_resume(&files);
    if (set.tokenizer) job.kind = &kind;
    job.reuse_only = set.resume && strcmp(set.data, "-") && result_has_tokens(prefix);
    if (job.reuse_only && !option_given("vocab-size")) job.vocab = 0; /* whatever the run has */
    if (!status && !prepared && !run_rank) status = speak_prepare(&env, &job);
    if (!status) status = run_share_dataset(&files);
    if (!status) status = mtt_dataset_open(&env, prefix, &kind, data);
    if (status) return status;
    vocab = mtt_tokens_vocab(data->train);
    if (prepared && (set.tokenizer || (option_given("vocab-size") && set.model.vocab != vocab)))
        return failure(files.env, MTT_E_ARGUMENT, "%s has its own tokenizer: leave out --tokenizer and "
                       "--vocab-size, or give the text", prefix);
    status = run_check_text(&files, set.data, data, set.seq_len, &set.model);
    if (!status)
        status = mtt_batches_init(&env, batches, data->train, set.batch, set.seq_len, (uint64_t)set.seed, 0);
    batches->rank = run_rank;
    batches->ranks = mtt_ranks_count(files.ranks);
    return status;
}

/* Steps and warm-up, unless they are given. */
static mtt_status choose_steps(const mtt_batches *batches)
{
    mtt_status status = MTT_OK;
    if (!set.steps || (option_given("epochs") && !option_given("steps"))) /* --epochs before the preset's */
        status = run_count_steps(&files, batches, set.policy.accumulate, set.epochs, &set.steps);
    if (!status) run_choose_warmup(&set.optim, set.steps);
    return status;
}

/* Writes the metrics to their file and to stdout, but in words to a terminal; and the memory file. */
static mtt_status write_results(mtt_trainer *t, const mtt_quality *q)
{
    result r = {.batch_size = set.batch, .seq_len = set.seq_len,
                .tokens_per_s = session.tokens * (double)files.steps / files.ms * 1e3};
    mtt_status status;
    run_fill(&files, &r, t, q);
    status = run_write_metrics(&files, &r);
    if (!status && !set.no_memory) status = run_write_memory(&files, mtt_trainer_schedule(t));
    if (!status) speak_summary(&files, &r, !set.no_memory);
    if (!isatty(1)) result_print(stdout, &r);
    fflush(stdout);
    return status;
}

/* Evaluates, unless it is interrupted. The best checkpoint is kept. */
static mtt_status evaluate(mtt_trainer *t, const mtt_batches *batches, const mtt_dataset *data,
                           mtt_quality *q)
{
    int better;
    mtt_status status = run_evaluate(&files, t, data, set.eval_batches, q, &better);
    if (status || files.stopped) return status;
    if (mtt_trainer_step(t) < set.steps) speak_quality(q); /* after the last step the summary has it */
    if (better && set.save_every >= 0) run_tell(&files, run_save_best(&files, t, batches));
    run_log_quality(&files, mtt_trainer_step(t), q); /* after the save: who dies between does both again */
    return MTT_OK;
}

/* Steps until the last one, a signal or a failure. A checkpoint that cannot be written does not end the run:
   the next one may be. A resumed run first evaluates its step, if a signal kept it from that. */
static mtt_status train(mtt_trainer *t, mtt_batches *batches, const mtt_dataset *data)
{
    size_t part = (size_t)set.batch * (size_t)set.seq_len, all = part * (size_t)set.policy.accumulate, i;
    int32_t *tokens = malloc(2 * all * sizeof(*tokens)), *targets = tokens ? tokens + all : NULL;
    mtt_status status = tokens ? MTT_OK : MTT_E_MEMORY;
    mtt_step_info info = {.step = mtt_trainer_step(t)};
    mtt_quality q;
    while (!status && info.step < set.steps && !files.stopped) {
        if (set.eval_every && info.step % set.eval_every == 0 && files.evaluated != (double)info.step)
            status = evaluate(t, batches, data, &q);
        if (!status && !files.stopped) status = run_look_for_signals(&files);
        if (files.stopped) break;
        for (i = 0; i < all && !status; i += part)
            status = mtt_batches_next(batches, tokens + i, targets + i);
        if (!status) status = mtt_train_step(t, tokens, targets, &info);
        if (status) break;
        run_log_step(&files, &info, session.tokens);
        speak_step(&session, &info);
        if (set.save_every > 0 && info.step % set.save_every == 0 && info.step < set.steps)
            run_tell(&files, run_save(&files, t, batches));
    }
    free(tokens);
    return status;
}

/* Everything after the last step is tried, whatever fails before it. Returns an exit code. */
static int finish(mtt_status status, mtt_trainer *t, mtt_batches *batches, const mtt_dataset *data)
{
    mtt_quality q = {NAN, NAN, NAN, NAN, 0};
    int code = report(status), saved = 0, results = 0, log;
    if (!status && set.save_every >= 0) saved = run_tell(&files, run_save_last(&files, t, batches));
    if (!status && !files.stopped) code = report(evaluate(t, batches, data, &q));
    if (!code && files.stopped) {
        run_say("train: stopped after step %lld%s\n", (long long)mtt_trainer_step(t),
                set.save_every >= 0 && !saved ? ": --resume continues from there" : ", without a checkpoint");
        code = EXIT_INTERRUPTED;
    }
    if (!code && !isfinite(q.perplexity)) {
        run_say("train: the run diverged, its validation loss is %g: lower --lr\n", q.loss);
        code = EXIT_DIVERGED;
    }
    if ((!code || code == EXIT_DIVERGED) && !run_rank) results = report(write_results(t, &q));
    log = report(run_close_log(&files));
    return code ? code : saved ? saved : results ? results : log;
}

/* Data and plan. Rank 0 goes ahead. Returns an exit code. */
static int prepare(mtt_dataset *data, mtt_batches *batches)
{
    int max_batch = 0;
    size_t budget = set.policy.budget_bytes;
    mtt_plan_report plan;
    mtt_status status = run_rank ? run_meet(&files) : MTT_OK;
    if (option_window_note(&set.policy, set.seq_len))
        run_say("%s\n", option_window_note(&set.policy, set.seq_len));
    if (!status) status = run_open_init(&files, &set.model, set.data, &set.tokenizer);
    if (!status && !set.dry_run)
        status = run_check_model(&files, &set.model, &set.policy, set.batch, set.seq_len);
    if (!status && !set.dry_run) status = open_data(data, batches);
    if (!status && !set.find_max)
        status = mtt_plan(&env, &set.model, &set.policy, set.batch, set.seq_len, &plan);
    if (!status && set.find_max && !budget && run_free_memory(&files, &set.policy, &budget))
        return EXIT_USAGE;
    if (!status && budget)
        status = mtt_plan_max_batch(&env, &set.model, &set.policy, set.seq_len, budget, &max_batch);
    if (status) return report(status);
    if (set.find_max) return speak_largest(max_batch, set.seq_len, set.policy.budget_bytes);
    speak_plan(&plan, set.dry_run, set.json, max_batch);
    if (max_batch && plan.arena_bytes > budget)
        return report(failure(files.env, MTT_E_BUDGET, "a batch of %d does not fit --memory-budget, %d does; "
                              "or pass --recompute budget%s", set.batch, max_batch,
                              speak_split(&set.policy)));
    if (set.dry_run) return 0;
    status = choose_steps(batches);
    if (!status && !run_rank) status = run_meet(&files);
    return report(status ? status : run_check_dataset(&files, data));
}

/* From the first step to the sample. Returns an exit code. */
static int execute(mtt_backend *backend, mtt_batches *batches, const mtt_dataset *data)
{
    mtt_trainer *t = NULL;
    mtt_status status;
    int code;
    mtt_generation job = {.texts = &set.prompt, .prompt_count = 1, .count = set.sample,
                          .write = result_write_token, .user = stdout};
    set.optim.seed = set.sampling.seed = (uint64_t)set.seed;
    job.sampling = set.sampling;
    set.optim.zero_weights = set.resume || files.model; /* they are loaded */
    set.optim.total_steps = set.steps;
    status = run_check_settings(&files, set.eval_every, set.eval_batches, set.save_every, set.resume);
    if (!status)
        status = mtt_trainer_create(&env, &set.model, &set.policy, &set.optim, backend, set.batch,
                                    set.seq_len, &t);
    if (!status) status = run_begin(&files, t, batches, data->tokenizer, set.save_every, set.resume);
    if (!status) speak_begin(&session, batches, mtt_trainer_step(t), set.steps, set.policy.accumulate);
    code = report(status);
    run_obey_signals(1);
    if (!status) code = finish(train(t, batches, data), t, batches, data);
    run_obey_signals(0); /* all is saved */
    if (!code && set.sample && !run_rank) {
        mtt_ranks_busy(files.ranks); /* the others wait to end */
        fprintf(stderr, "\na sample of %d tokens:\n", set.sample);
        fputs(set.prompt, stdout);
        code = report(mtt_generate(t, data->tokenizer, &job));
        putchar('\n');
    }
    mtt_trainer_destroy(t);
    return code;
}

int main(int argc, char **argv)
{
    mtt_backend backend = *mtt_cpu_backend();
    mtt_dataset data = {0};
    mtt_batches batches = {0};
    int code = read_options(argc, argv);
    if (code) return code == OPTION_HELP ? 0 : code;
    if (!set.dry_run) code = report(run_join(&files, &env, &set.policy));
    if (!code && !set.dry_run && set.policy.device == MTT_DEVICE_CUDA)
        code = report(run_find_device(&files, &backend));
    backend.ranks = files.ranks;
    if (!code) code = prepare(&data, &batches);
    if (!code && !set.dry_run) code = execute(&backend, &batches, &data);
    if (!run_rank) code = option_close_output(code);
    mtt_dataset_close(&data);
    mtt_ranks_close(files.ranks);
    return code;
}
