/* train.c - trains a small GPT on your text with any of the memory techniques of mtt.h, and measures what they save.

   cc -O3 -march=native -fopenmp examples/train.c -o train -lm            (add -DMTT_CBLAS -lopenblas for speed)
   nvcc -O3 -arch=native -DMTT_CUDA examples/train.c mtt_kernels.cu -lcublasLt -o train        (then --device cuda)
   ./train --data my_text.txt --technique bf16_flash --steps 500 --sample 200
   Uses nothing but the public interface. Results on stdout, progress on stderr, files under --results-dir. */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "../tools/wordpiece.h"
#include "../tools/options.h"
#include <signal.h>

enum { EXIT_USAGE = 2, EXIT_DATA = 3, EXIT_MEMORY = 4, EXIT_NUMBERS = 5, EXIT_DEVICE = 6, EXIT_INTERRUPTED = 130 };

static struct {
    mtt_model_desc model;
    mtt_policy policy;
    mtt_optim_desc optim;
    int batch, seq_len, steps, epochs, warmup, seed, no_memory, resume, dry_run, json, find_max, sample, eval_every;
    int eval_batches, save_every;
    float temperature;
    double budget;
    const char *data, *field, *dataset, *technique, *tokenizer, *prompt, *results;
} set = {.batch = 32, .seq_len = 256, .epochs = 1, .temperature = 0.8f, .prompt = "\n", .results = "results",
         .optim = {.lr = 1e-3f, .weight_decay = 0.01f, .clip = 1}};

/* Parser and usage text are made from this one table. */
static const option options[] = {
    {"data", TEXT, &set.data, "text, JSONL, - for standard input, or the prefix of prepared token files", 0, 0},
    {"field", TEXT, &set.field, "field of the JSONL documents (text)", 0, 0},
    {"tokenizer", TEXT, &set.tokenizer, "tokenizer.json, vocab.bpe or vocab.txt to use (a BPE is trained)", 0, 0},
    {"vocab-size", INT, &set.model.vocab, "ids of the trained BPE (10000)", 0, 0},
    {"dataset", TEXT, &set.dataset, "name in the results (the data's file name)", 0, 0},
    {"technique", TEXT, &set.technique, "flags below, windowN and bsN joined by _: bf16_flash_bs32 (named by the flags)", 0, 0},
    {"precision", CHOICE, &set.policy.precision, "precision", "fp32|tf32|bf16|fp16", 0},
    {"attention", CHOICE, &set.policy.attention, "attention", "plain|flash", 0},
    {"recompute", CHOICE, &set.policy.recompute, "what the backward pass makes again", "none|selective|layer|segments|budget", 0},
    {"loss", CHOICE, &set.policy.loss, "logits of all tokens or of a chunk in memory", "full|chunked", 0},
    {"fp32", FLAG, &set.policy.precision, "the same as --precision fp32", 0, MTT_FP32},
    {"tf32", FLAG, &set.policy.precision, "the same as --precision tf32", 0, MTT_TF32},
    {"bf16", FLAG, &set.policy.precision, "the same as --precision bf16", 0, MTT_BF16},
    {"fp16", FLAG, &set.policy.precision, "the same as --precision fp16", 0, MTT_FP16},
    {"flash-attn", FLAG, &set.policy.attention, "the same as --attention flash", 0, MTT_ATTENTION_FLASH},
    {"gradient-checkpointing", FLAG, &set.policy.recompute, "the same as --recompute layer", 0, MTT_RECOMPUTE_LAYER},
    {"selective", FLAG, &set.policy.recompute, "the same as --recompute selective", 0, MTT_RECOMPUTE_SELECTIVE},
    {"segments", FLAG, &set.policy.recompute, "the same as --recompute segments", 0, MTT_RECOMPUTE_SEGMENTS},
    {"chunked", FLAG, &set.policy.loss, "the same as --loss chunked", 0, MTT_LOSS_CHUNKED},
    {"compact", FLAG, &set.policy.state, "moments of 8 bits, weights of 24: 5 bytes a parameter for 14", 0, MTT_STATE_COMPACT},
    {"window-size", INT, &set.policy.window, "keys that a query sees, itself counted (0: all)", 0, 0},
    {"memory-budget", SIZE, &set.budget, "refuse what takes more, and with --recompute budget fit it; 24G, 512M (none)", 0, 0},
    {"split", FLAG, &set.policy.split, "with --recompute budget: cut the batch into micro-batches where that is faster", 0, 1},
    {"layers", INT, &set.model.layers, "transformer blocks (4)", 0, 0},
    {"heads", INT, &set.model.heads, "attention heads (8)", 0, 0},
    {"d-model", INT, &set.model.d_model, "width (256)", 0, 0},
    {"d-ff", INT, &set.model.d_ff, "width of the MLP (4 * d-model)", 0, 0},
    {"seq-len", INT, &set.seq_len, "tokens in a sequence (256)", 0, 0},
    {"max-seq", INT, &set.model.max_seq, "positions of the model (1024, or seq-len)", 0, 0},
    {"dropout", REAL, &set.model.dropout, "dropout probability (0)", 0, 0},
    {"positions", CHOICE, &set.model.positions, "position encoding", "sinusoidal|learned", 0},
    {"head", CHOICE, &set.model.tied_head, "output matrix: its own, or the embedding", "untied|tied", 0},
    {"no-head-bias", FLAG, &set.model.no_head_bias, "logits without a bias", 0, 1},
    {"batch-size", INT, &set.batch, "sequences in a micro-batch (32)", 0, 0},
    {"accumulate", INT, &set.policy.accumulate, "micro-batches in a step (1)", 0, 0},
    {"steps", INT, &set.steps, "optimizer steps (one epoch)", 0, 0},
    {"epochs", INT, &set.epochs, "passes over the data where --steps is not given (1)", 0, 0},
    {"lr", REAL, &set.optim.lr, "peak learning rate (0.001)", 0, 0},
    {"lr-schedule", CHOICE, &set.optim.lr_schedule, "after the warmup", "constant|linear|cosine", 0},
    {"warmup-steps", INT, &set.warmup, "steps of linear warmup (0)", 0, 0},
    {"weight-decay", REAL, &set.optim.weight_decay, "decoupled decay of matrices (0.01)", 0, 0},
    {"clip", REAL, &set.optim.clip, "largest norm of the gradient (1; 0: any)", 0, 0},
    {"seed", INT, &set.seed, "seed of weights, dropout, split and order (0)", 0, 0},
    {"eval-every", INT, &set.eval_every, "steps between evaluations (0: at the end only)", 0, 0},
    {"eval-batches", INT, &set.eval_batches, "batches of an evaluation (0: the whole split)", 0, 0},
    {"save-every", INT, &set.save_every, "steps between checkpoints (0: at the end only)", 0, 0},
    {"no-checkpoint", FLAG, &set.save_every, "do not save at all", 0, -1},
    {"resume", FLAG, &set.resume, "continue from the checkpoint of this dataset and technique", 0, 1},
    {"sample", INT, &set.sample, "tokens to write at the end (0)", 0, 0},
    {"prompt", TEXT, &set.prompt, "what they continue (a new line)", 0, 0},
    {"temperature", REAL, &set.temperature, "of the sample (0.8)", 0, 0},
    {"device", CHOICE, &set.policy.device, "who computes", "cpu|cuda", 0},
    {"results-dir", TEXT, &set.results, "folder of metrics, logs, checkpoints and token files (results)", 0, 0},
    {"dry-run", FLAG, &set.dry_run, "print the plan and stop; needs no data and no device (the ids: --vocab-size)", 0, 1},
    {"find-max-batch", FLAG, &set.find_max, "print the largest batch under --memory-budget and stop", 0, 1},
    {"json", FLAG, &set.json, "the plan as one JSON object", 0, 1},
    {"no-memory-profiling", FLAG, &set.no_memory, "do not write the memory file", 0, 1},
};
enum { OPTIONS = sizeof(options) / sizeof(options[0]) };

static mtt_env env;
static volatile sig_atomic_t interrupted;

static void on_signal(int number)
{
    interrupted = 1;
    signal(number, SIG_DFL); /* a second one ends the program at once */
}

/* Tells why a call failed; returns the exit code. */
static int report(mtt_status status)
{
    static const int codes[MTT_STATUS_COUNT] = {[MTT_E_ARGUMENT] = EXIT_USAGE, [MTT_E_MEMORY] = EXIT_MEMORY,
                                                [MTT_E_BUDGET] = EXIT_MEMORY, [MTT_E_NUMBERS] = EXIT_NUMBERS,
                                                [MTT_E_DEVICE] = EXIT_DEVICE};
    fprintf(stderr, "train: %s%s\n", env.error[0] ? env.error : mtt_status_string(status),
            status == MTT_E_MEMORY ? ": --find-max-batch --memory-budget 8G prints the batch that fits 8 GiB" : "");
    return codes[status] ? codes[status] : EXIT_DATA;
}

/* A technique is a word, or several joined by _, as the assignment names them: flags that set a part of the policy, by one
   word of their names, and numbers behind `window`, which comes with flash attention, and `bs`. */
static int apply_technique(void)
{
    char words[128], text[256], *word, end, *policy = (char *)&set.policy;
    int k, n;
    if (!set.technique) return 0;
    if (strlen(set.technique) >= sizeof(words)) return option_fail("--technique: longer than 127 letters");
    strcpy(words, set.technique);
    for (word = strtok(words, "_"); word; word = strtok(NULL, "_")) {
        for (k = 0; k < OPTIONS; k++) {
            char *at = (char *)options[k].at;
            if (option_is_flag(&options[k], word) && at >= policy && at < policy + sizeof(set.policy)) break;
        }
        if (k < OPTIONS) *(int *)options[k].at = options[k].value;
        else if (sscanf(word, "window%9d%c", &n, &end) == 1) set.policy.attention = MTT_ATTENTION_FLASH, set.policy.window = n;
        else if (sscanf(word, "bs%9d%c", &n, &end) == 1) set.batch = n;
        else {
            snprintf(text, sizeof(text), "--technique: %s is no flag of --help, nor windowN, nor bsN", word);
            return option_fail(text);
        }
    }
    return 0;
}

/* What a run without --technique is called: the longest words of the flags that it has, such as bf16_flash. */
static void name_technique(void)
{
    static char name[256];
    char *policy = (char *)&set.policy;
    size_t used = 0;
    int k;
    for (k = 0; k < OPTIONS; k++) {
        const option *o = &options[k];
        const char *rest = strchr(o->name, '-'), *word = rest && strlen(rest + 1) > (size_t)(rest - o->name) ? rest + 1 : o->name;
        if (o->kind != FLAG || (char *)o->at < policy || (char *)o->at >= policy + sizeof(set.policy) || *(int *)o->at != o->value) continue;
        used += (size_t)snprintf(name + used, sizeof(name) - used, "%s%.*s", used ? "_" : "", (int)strcspn(word, "-"), word);
    }
    if (set.policy.recompute == MTT_RECOMPUTE_BUDGET) used += (size_t)snprintf(name + used, sizeof(name) - used, "_budget");
    if (set.policy.window) snprintf(name + used, sizeof(name) - used, "_window%d", set.policy.window);
    set.technique = name;
}

static void write_text(void *file, const char *text, size_t bytes)
{
    fwrite(text, 1, bytes, (FILE *)file);
}

/* A file among the results: {results}/{dataset}_{technique}{ending}. */
static char *result_path(const char *ending)
{
    static char path[4][512];
    static int turn;
    snprintf(path[++turn % 4], sizeof(path[0]), "%s/%s_%s%s", set.results, set.dataset, set.technique, ending);
    return path[turn % 4];
}

static mtt_status cannot_write(const char *path)
{
    snprintf(env.error, sizeof(env.error), "%s cannot be written: is --results-dir a folder of yours, and its disk not full?", path);
    return MTT_E_FILE;
}

/* Closes a file of results; tells if it could not be opened, or is not whole. */
static mtt_status close_file(FILE *f, const char *path)
{
    int whole = f && !ferror(f);
    return f && fclose(f) == 0 && whole ? MTT_OK : cannot_write(path);
}

/* The log of a resumed run goes on where the checkpoint stood: what came after it is cut off. */
static FILE *open_log(int64_t step)
{
    char line[512], *kept = result_path(".jsonl.tmp"), *path = result_path(".jsonl");
    FILE *in = step ? fopen(path, "r") : NULL, *out = fopen(kept, "w");
    long long at;
    while (in && out && fgets(line, sizeof(line), in))
        if (sscanf(line, "{\"step\": %lld", &at) == 1 && at <= step) fputs(line, out);
    if (in) fclose(in);
    if (out && !fflush(out) && !rename(kept, path)) return out;
    if (out) fclose(out);
    remove(kept);
    cannot_write(path);
    return NULL;
}

static void progress(const mtt_step_info *info, double tokens, int64_t steps, double seconds, int64_t begun)
{
    int terminal = isatty(2);
    double left = seconds / (double)(info->step - begun) * (double)(steps - info->step);
    if (!terminal && info->step % 10 && info->step != steps) return;
    fprintf(stderr, "%sstep %lld/%lld %lld%% | loss %.4f | ppl %.2f | lr %.2e | gnorm %.3f", terminal ? "\r" : "",
            (long long)info->step, (long long)steps, (long long)(100 * info->step / steps), info->loss, exp(info->loss),
            (double)info->lr, (double)info->grad_norm);
    fprintf(stderr, " | %.1f ms | %.0f tok/s | mem %.1f MiB | eta %dm%02ds%s", info->ms, tokens / info->ms * 1e3,
            (double)info->arena_bytes / 1048576, (int)left / 60, (int)left % 60, terminal && info->step != steps ? "\033[K" : "\n");
}

static void write_metrics(FILE *f, mtt_trainer *t, const mtt_quality *q, double train_loss, double seconds, int64_t steps)
{
    mtt_plan_report plan;
    double tokens = (double)set.batch * set.seq_len * set.policy.accumulate * (double)steps;
    mtt_schedule_report(mtt_trainer_schedule(t), &plan);
    fprintf(f, "{\"dataset\": \"%s\", \"technique\": \"%s\", \"parameters\": %lld", set.dataset, set.technique, (long long)plan.parameters);
    fprintf(f, ", \"batch_size\": %d, \"seq_len\": %d, \"steps\": %lld", set.batch, set.seq_len, (long long)mtt_trainer_step(t));
    fprintf(f, ", \"train_loss\": %.6f, \"val_loss\": %.6f, \"perplexity\": %.4f", train_loss, q->loss, q->perplexity);
    fprintf(f, ", \"bits_per_byte\": %.5f, \"accuracy\": %.5f, \"training_time\": %.3f", q->bits_per_byte, q->accuracy, seconds);
    fprintf(f, ", \"ms_per_step\": %.3f, \"tokens_per_s\": %.1f", steps ? seconds * 1e3 / (double)steps : 0,
            seconds > 0 ? tokens / seconds : 0);
    fprintf(f, ", \"arena_bytes\": %zu, \"device_bytes\": %zu", plan.arena_bytes, mtt_trainer_device_bytes(t));
    fprintf(f, ", \"peak_bytes\": %zu, \"peak_forward_bytes\": %zu, \"peak_backward_bytes\": %zu}\n", plan.peak_bytes,
            plan.phase_peak_bytes[MTT_FORWARD], plan.phase_peak_bytes[MTT_BACKWARD]);
}

/* A run that begins anew takes nothing away: an earlier checkpoint and its log are renamed. */
static void keep_old(void)
{
    char old[520];
    snprintf(old, sizeof(old), "%s.old", result_path(".safetensors"));
    if (rename(result_path(".safetensors"), old)) return;
    fprintf(stderr, "train: the earlier checkpoint is now %s; --resume would have gone on from it\n", old);
    snprintf(old, sizeof(old), "%s.old", result_path(".jsonl"));
    rename(result_path(".jsonl"), old);
}

/* Steps from where the trainer stands to the end, a signal or a failure. */
static mtt_status train(mtt_trainer *t, mtt_batches *batches, const mtt_tokens *valid, const mtt_tokenizer *tokenizer,
                        int64_t steps)
{
    size_t rows = (size_t)set.batch * (size_t)set.seq_len, micro = (size_t)set.policy.accumulate, i;
    int32_t *x = malloc(2 * micro * rows * sizeof(*x)), *y = x + micro * rows;
    int64_t begun = mtt_trainer_step(t);
    FILE *log = open_log(begun), *f;
    mtt_status status = !log ? MTT_E_FILE : x ? MTT_OK : MTT_E_MEMORY;
    mtt_quality q;
    mtt_step_info info = {0};
    double seconds = 0;
    while (!status && mtt_trainer_step(t) < steps && !interrupted) {
        for (i = 0; i < micro && !status; i++) status = mtt_batches_next(batches, x + i * rows, y + i * rows);
        if (!status) status = mtt_train_step(t, x, y, &info);
        if (status) break;
        seconds += info.ms * 1e-3;
        progress(&info, (double)(micro * rows), steps, seconds, begun);
        fprintf(log, "{\"step\": %lld, \"loss\": %.6f, \"lr\": %.8g, \"grad_norm\": %.6g, \"ms\": %.3f}\n", (long long)info.step,
                info.loss, (double)info.lr, (double)info.grad_norm, info.ms);
        fflush(log);
        if (set.eval_every && info.step % set.eval_every == 0 && info.step < steps) {
            if ((status = mtt_evaluate_tokens(t, valid, tokenizer, set.eval_batches, &q))) break;
            fprintf(log, "{\"step\": %lld, \"val_loss\": %.6f, \"bits_per_byte\": %.5f}\n", (long long)info.step, q.loss,
                    q.bits_per_byte);
        }
        if (set.save_every > 0 && info.step % set.save_every == 0) status = mtt_save(t, result_path(".safetensors"), batches);
    }
    if (!status && set.save_every >= 0) status = mtt_save(t, result_path(".safetensors"), batches);
    if (!status && interrupted)
        fprintf(stderr, "\ntrain: stopped after step %lld%s\n", (long long)mtt_trainer_step(t),
                set.save_every >= 0 ? ": --resume goes on from there" : ", without a checkpoint");
    if (!status && !interrupted) status = mtt_evaluate_tokens(t, valid, tokenizer, set.eval_batches, &q);
    if (!status && !interrupted && steps > begun) {
        write_metrics(stdout, t, &q, info.loss, seconds, steps - begun);
        f = fopen(result_path("_metrics.json"), "w");
        if (f) write_metrics(f, t, &q, info.loss, seconds, steps - begun);
        status = close_file(f, result_path("_metrics.json"));
        f = set.no_memory || status ? NULL : fopen(result_path("_memory.json"), "w");
        if (f) mtt_schedule_json(mtt_trainer_schedule(t), write_text, f);
        if (!set.no_memory && !status) status = close_file(f, result_path("_memory.json"));
    }
    if (log && close_file(log, result_path(".jsonl")) && !status) status = MTT_E_FILE;
    free(x);
    return status;
}

/* What token files are made of: the text, by its bytes (FNV-1a), and options; empty for standard input. */
static void describe_data(char *is, size_t room)
{
    char block[65536];
    uint64_t hash = 0xcbf29ce484222325u;
    size_t got, i;
    FILE *f = fopen(set.data, "rb");
    is[0] = 0;
    if (!f) return;
    while ((got = fread(block, 1, sizeof(block), f)) > 0)
        for (i = 0; i < got; i++) hash = (hash ^ (unsigned char)block[i]) * 0x100000001b3u;
    fclose(f);
    snprintf(is, room, "text %016llx, field %s, seed %d; vocab %d, tokenizer %s\n", (unsigned long long)hash,
             set.field ? set.field : "text", set.seed, set.model.vocab, set.tokenizer ? set.tokenizer : "trained");
}

/* Whether {prefix}.made, which is written with the token files, says the same. A resumed run need not say again which tokenizer it had. */
static int is_made_of(const char *prefix, const char *is)
{
    char path[512], was[1024] = "";
    FILE *f;
    snprintf(path, sizeof(path), "%s.made", prefix);
    if ((f = fopen(path, "r"))) {
        if (!fgets(was, sizeof(was), f)) was[0] = 0;
        fclose(f);
    }
    return *is && !strncmp(is, was, set.resume && !set.model.vocab && !set.tokenizer ? strcspn(is, ";") + 1 : sizeof(was));
}

/* Token files and tokenizer of a prefix. */
static mtt_status open_files(const char *prefix, mtt_tokens **data, mtt_tokens **valid, mtt_tokenizer **tokenizer)
{
    char path[512];
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    mtt_status status;
    snprintf(path, sizeof(path), "%s.train.tokens", prefix);
    status = mtt_tokens_open(&env, path, data);
    snprintf(path, sizeof(path), "%s.valid.tokens", prefix);
    if (!status) status = mtt_tokens_open(&env, path, valid);
    snprintf(path, sizeof(path), "%s.tokenizer.json", prefix);
    if (!status) status = mtt_tokenizer_load(&env, path, &kind, tokenizer);
    if (status || mtt_tokenizer_vocab(*tokenizer) == mtt_tokens_vocab(*data)) return status;
    snprintf(env.error, sizeof(env.error), "%s is not the tokenizer of %s.train.tokens: prepare both from the text", path, prefix);
    return MTT_E_DATA;
}

/* Those of a text: made before of the same, or else, or where they cannot be read, now. */
static mtt_status open_text(mtt_tokens **data, mtt_tokens **valid, mtt_tokenizer **tokenizer)
{
    char prefix[480], path[512], is[1024];
    struct stat info;
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    mtt_prepare_desc desc = {.input = set.data, .field = set.field, .output = prefix, .tokenizer = set.tokenizer,
                             .kind = set.tokenizer ? &kind : NULL, .vocab = set.model.vocab, .seed = (uint64_t)set.seed};
    mtt_status status;
    int there, made;
    FILE *f;
    describe_data(is, sizeof(is));
    snprintf(prefix, sizeof(prefix), "%s/%s", set.results, set.dataset);
    snprintf(path, sizeof(path), "%s.train.tokens", prefix);
    there = *is && !stat(path, &info);
    made = there && is_made_of(prefix, is);
    if (made && !(status = open_files(prefix, data, valid, tokenizer))) {
        fprintf(stderr, "train: the tokens of %s are there from an earlier run\n", set.data);
        return MTT_OK;
    }
    if (there && set.resume) {
        if (!made) snprintf(env.error, sizeof(env.error), "%s was made of another text, seed, field or tokenizer: --resume needs those of "
                            "the run", path);
        return MTT_E_DATA;
    }
    mtt_tokens_close(*data), mtt_tokens_close(*valid), mtt_tokenizer_destroy(*tokenizer);
    *data = *valid = NULL, *tokenizer = NULL;
    status = mtt_prepare(&env, &desc, &(mtt_prepare_report){0});
    if (status) return status;
    snprintf(path, sizeof(path), "%s.made", prefix);
    if ((f = fopen(path, "w"))) fputs(is, f), fclose(f); /* where that is not whole, a later run makes them again */
    return open_files(prefix, data, valid, tokenizer);
}

/* Those of a prefix, which bring their tokenizer. */
static mtt_status open_prepared(mtt_tokens **data, mtt_tokens **valid, mtt_tokenizer **tokenizer)
{
    mtt_status status = open_files(set.data, data, valid, tokenizer);
    if (status || (!set.tokenizer && (!set.model.vocab || set.model.vocab == mtt_tokens_vocab(*data)))) return status;
    snprintf(env.error, sizeof(env.error), "%s is prepared, with %d ids: leave out --tokenizer and --vocab-size, or give the text", set.data,
             mtt_tokens_vocab(*data));
    return MTT_E_ARGUMENT;
}

static mtt_status open_data(mtt_tokens **data, mtt_tokens **valid, mtt_tokenizer **tokenizer, mtt_batches *batches)
{
    char path[512];
    struct stat info;
    mtt_status status;
    snprintf(path, sizeof(path), "%s.train.tokens", set.data);
    status = stat(path, &info) ? open_text(data, valid, tokenizer) : open_prepared(data, valid, tokenizer);
    if (!status && mtt_tokens_count(*valid) == 0) {
        snprintf(env.error, sizeof(env.error), "%s is too short: of its documents, which end at blank lines, none is left to validate: give "
                 "more text, blank lines in it, or another --seed", set.data);
        return MTT_E_DATA;
    }
    if (!status) status = mtt_batches_init(&env, batches, *valid, set.batch, set.seq_len, 0, 1); /* long enough? */
    if (!status) status = mtt_batches_init(&env, batches, *data, set.batch, set.seq_len, (uint64_t)set.seed, 0);
    if (!status) set.model.vocab = mtt_tokens_vocab(*data);
    return status;
}

/* Prints the plan; returns EXIT_MEMORY if it does not fit the budget, and 0 otherwise. */
static int show_plan(const mtt_plan_report *plan, int max_batch)
{
    FILE *out = set.dry_run ? stdout : stderr;
    char json[2048];
    json[mtt_plan_json(plan, json, sizeof(json)) - 1] = 0; /* its closing brace gives way to one more field */
    if (!set.json) mtt_plan_print(plan, write_text, out);
    else if (max_batch) fprintf(out, "%s, \"max_batch\": %d}\n", json, max_batch);
    else fprintf(out, "%s}\n", json);
    if (max_batch && !set.json) fprintf(out, "largest batch under the budget: %d\n", max_batch);
    if (!max_batch || (double)plan->arena_bytes <= set.budget) return 0;
    fprintf(stderr, "train: a batch of %d does not fit --memory-budget, %d does\n", set.batch, max_batch);
    return EXIT_MEMORY;
}

int main(int argc, char **argv)
{
    mtt_plan_report plan;
    mtt_tokens *data = NULL, *valid = NULL;
    mtt_tokenizer *tokenizer = NULL;
    mtt_trainer *t = NULL;
    mtt_batches batches = {0};
    mtt_backend backend = *mtt_cpu_backend();
    mtt_status status = MTT_OK;
    struct stat info;
    uint64_t steps;
    char *name;
    int code = option_parse(options, OPTIONS, argc, argv), max_batch = 0;
    if (!code) code = apply_technique();
    if (!code) code = option_parse(options, OPTIONS, argc, argv); /* once more: single options go before the technique's */
    if (code) return code == OPTION_HELP ? 0 : code;
    if (!set.technique) name_technique();
    if (!(set.optim.lr > 0)) return option_fail("--lr has to be above 0");
    if (set.optim.weight_decay == 0) set.optim.weight_decay = -1; /* the library takes 0 for its default */
    if (set.optim.clip == 0) set.optim.clip = -1;
    if (!set.epochs) return option_fail("--epochs has to be 1 or more");
    if (set.policy.split && set.policy.recompute != MTT_RECOMPUTE_BUDGET) return option_fail("--split needs --recompute budget");
    if (set.policy.recompute == MTT_RECOMPUTE_BUDGET) set.policy.budget_bytes = (size_t)set.budget;
    if (set.seq_len > 1024 && !set.model.max_seq) set.model.max_seq = set.seq_len;
    if (set.policy.recompute == MTT_RECOMPUTE_BUDGET && !set.budget)
        return option_fail("--recompute budget needs one, for example --memory-budget 8G");
    if (set.find_max && !set.budget) return option_fail("--find-max-batch needs a budget, for example --memory-budget 24G");
    if (!set.dry_run && !set.find_max) {
        if (!set.data) return option_fail("--data is missing, for example --data my_text.txt (--help lists all options)");
        if (!set.dataset) set.dataset = strrchr(set.data, '/') ? strrchr(set.data, '/') + 1 : set.data;
        set.dataset = name = strdup(strcmp(set.dataset, "-") ? set.dataset : "stdin");
        for (; name && *name; name++) if (strchr("/\"\\", *name) || (*name > 0 && *name < ' ')) *name = '_'; /* fit for files and JSON */
        mkdir(set.results, 0777);
        if (set.policy.device == MTT_DEVICE_CUDA) status = mtt_cuda_backend(&env, 0, &backend);
        if (!status) status = open_data(&data, &valid, &tokenizer, &batches);
    }
    if (!status && set.budget > 0)
        status = mtt_plan_max_batch(&env, &set.model, &set.policy, set.seq_len, (size_t)set.budget, &max_batch);
    if (!status && set.find_max) return printf("%d\n", max_batch), 0;
    if (!status) status = mtt_plan(&env, &set.model, &set.policy, set.batch, set.seq_len, &plan);
    if (status) return report(status);
    code = show_plan(&plan, max_batch);
    if (code || set.dry_run) return code;
    if (!set.policy.accumulate) set.policy.accumulate = 1;
    steps = set.steps ? (uint64_t)set.steps : batches.sequences * (uint64_t)set.epochs / (uint64_t)(set.batch * set.policy.accumulate);
    if (steps > INT_MAX) return option_fail("--epochs: more than 2^31 - 1 steps");
    if (!(set.steps = (int)steps)) {
        fprintf(stderr, "train: the text has %llu sequences, a step takes %d: lower --batch-size, give more text, or --steps\n",
                (unsigned long long)batches.sequences * (unsigned)set.epochs, set.batch * set.policy.accumulate);
        return EXIT_DATA;
    }
    set.optim.seed = (uint64_t)set.seed, set.optim.warmup_steps = set.warmup, set.optim.total_steps = set.steps;
    status = mtt_trainer_create(&env, &set.model, &set.policy, &set.optim, &backend, set.batch, set.seq_len, &t);
    if (!status && set.resume) status = mtt_resume(t, result_path(".safetensors"), &batches);
    if (status == MTT_E_FILE && set.resume && stat(result_path(".safetensors"), &info))
        fprintf(stderr, "train: nothing to resume: start without --resume\n");
    if (!status && !set.resume) keep_old();
    if (!status && mtt_trainer_step(t) >= set.steps) fprintf(stderr, "train: all steps are done: raise --steps to go on\n");
    signal(SIGINT, on_signal), signal(SIGTERM, on_signal);
    if (!status) status = train(t, &batches, valid, tokenizer, set.steps);
    if (!status && set.sample && !interrupted) {
        fputs(set.prompt, stdout);
        status = mtt_generate(t, tokenizer, set.prompt, set.sample, set.temperature, 200, (uint64_t)set.seed, write_text, stdout);
        putchar('\n');
    }
    code = status ? report(status) : interrupted ? EXIT_INTERRUPTED : 0;
    mtt_trainer_destroy(t);
    mtt_tokenizer_destroy(tokenizer);
    mtt_tokens_close(data);
    mtt_tokens_close(valid);
    return code;
}
