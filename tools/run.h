/* run.h - what guards the files of a training run: its folder, a lock, its log, and checkpoints by step.

   Include it after mtt.h, options.h and results.h. A run is {dataset}_{technique}. In its folder it has the
   files of results.h, checkpoints {run}_step{N}.safetensors, and the best one so far by validation loss,
   {run}_best.safetensors. If asked for, it has the log's numbers as {run}.csv, or for TensorBoard in the
   folder {run}_tensorboard. A run that starts over moves the earlier one's files into the folder {run}.old.
   Functions return a status, with the reason in env->error.

   A run may be several processes. All of them make the same calls, but rank 0 alone writes and speaks. What
   would fail alike on all ranks it does first, so that a user reads one message. */
#ifndef RUN_H_INCLUDED
#define RUN_H_INCLUDED

#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include "curves.h"
#include "failure.h"
#include "folder.h"
#include "launch.h"
#include "peft.h"
#include "posix.h"

enum { RUN_NAME = 200 }; /* letters: with an ending, a name in a folder has at most 255 */

typedef struct run {
    mtt_env *env;
    mtt_ranks *ranks; /* NULL: one process */
    float timeout;    /* seconds that a rank waits for another one; 0 = mtt.h's default */
    int local;        /* this rank's number on its host */
    int first;        /* 1 = it speaks for its host */
    int vocab;        /* ids of the model */
    int has_adapters; /* 1 = the run trains adapters alone */
    int stopped;      /* 1 = all ranks know that the run shall end */
    const mtt_optim_desc *optim;
    const char *init; /* a checkpoint or folder with the first weights; NULL: random ones */
    mtt_model *model; /* opened, */
    folder notes;     /* and what it says beside its weights */
    const char *folder;
    char dataset[RUN_NAME + 1], name[512];
    int keep;         /* checkpoints by step that stay */
    int lock;         /* the folder's file .lock */
    int unlocked;     /* 1 = its disk has no locks */
    int unwritten;    /* errno of the first line of the log that could not be written */
    int curves;       /* CURVES_NONE, or the kind of the file `rows` */
    FILE *rows;       /* one for each line of the log */
    int64_t saved;    /* step of the newest checkpoint that is whole; -1 = none yet */
    FILE *log;        /* what it holds in all, also of sessions before this one: */
    double ms;        /* sum of the steps' times */
    double loss, lr;  /* of the last step */
    double best;      /* least validation loss */
    double evaluated; /* step of the last evaluation */
    int64_t steps;
} run;

/* This process's rank. Rank 0 alone writes files and prints. */
static int run_rank;

/* The prefix of a message: empty on rank 0, "rank N: " on the others. */
static const char *run_who(void)
{
    static char text[32];
    if (run_rank) snprintf(text, sizeof(text), "rank %d: ", run_rank);
    return text;
}

/* Says something on standard error. */
static void run_say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (!run_rank) vfprintf(stderr, format, arguments);
    va_end(arguments);
}

/* Told by a backend when it opens. */
static void run_note(void *user, const char *text)
{
    (void)user;
    run_say("note: %s\n", text);
}

/* Prints why a call failed, if it did, and returns the exit code. Rank 0 alone prints what all ranks know.
   A rank that was turned away has no handle, and says why. That another rank has stopped is printed once on
   each host, which may have a log of its own. After a rank is lost every call fails in the same words. */
static int run_tell(run *r, mtt_status status)
{
    static char last[sizeof(r->env->error)];
    const char *error = r->env->error;
    int known = run_rank && r->ranks && (status == MTT_E_NUMBERS || status == MTT_E_MISMATCH);
    if (!status) return 0;
    if (!known && (status != MTT_E_STOPPED || r->first) && (!*error || strcmp(error, last)))
        fprintf(stderr, "train: %s%s%s\n", run_who(), *error ? error : mtt_status_string(status),
                status != MTT_E_MEMORY || strstr(error, "OMP_NUM_THREADS") ? "" :
                ": --find-max-batch --memory-budget 8G prints the batch that fits 8 GiB");
    memcpy(last, error, sizeof(last));
    return option_exit_code(status);
}

static mtt_status run_cannot(run *r, const char *verb, const char *path)
{
    return failure(r->env, MTT_E_FILE, "cannot %s %s: %s: check that --results-dir is yours and its disk is "
                   "not full", verb, path, strerror(errno));
}

static const char *run_path(const run *r, const char *ending)
{
    return result_path(r->folder, r->name, ending);
}

static const char *run_checkpoint(const run *r, long long step)
{
    char ending[64];
    snprintf(ending, sizeof(ending), "_step%lld.safetensors", step);
    return run_path(r, ending);
}

/* ---- signals ---- */

static volatile sig_atomic_t run_stop; /* 1 = the run shall end after this step */

/* Prints a text, in the one way that a handler may. */
static void run_cry(const char *text)
{
    int before = errno; /* of the call that was interrupted */
    ssize_t written = run_rank ? 0 : write(2, text, strlen(text));
    (void)written;
    errno = before;
}

static void run_on_signal(int number)
{
    run_cry("\nstopping after this step ... (again: at once, without a checkpoint)\n");
    run_stop = 1;
    signal(number, SIG_DFL);
}

static void run_on_warning(int number)
{
    (void)number;
    if (!run_stop) run_cry("\nstopping after this step, before the time limit ...\n");
    run_stop = 1;
}

/* 1: the first SIGINT, SIGTERM or SIGHUP sets run_stop, the second one ends the program. 0: the first one
   does. SIGUSR1, SIGUSR2 (batch systems send one of them before the time limit) and SIGXCPU (a limit of CPU
   time; the kernel repeats it each second) set run_stop, however often they come, and afterwards do nothing:
   the limit itself ends the program. What the parent ignores stays ignored, as SIGHUP under nohup. */
static void run_obey_signals(int gently)
{
    static const int warnings[] = {SIGUSR1, SIGUSR2, SIGXCPU};
    int i;
    signal(SIGINT, gently ? run_on_signal : SIG_DFL);
    signal(SIGTERM, gently ? run_on_signal : SIG_DFL);
    if (signal(SIGHUP, SIG_IGN) != SIG_IGN) signal(SIGHUP, gently ? run_on_signal : SIG_DFL);
    for (i = 0; i < LENGTH(warnings); i++)
        if (signal(warnings[i], SIG_IGN) != SIG_IGN && gently) signal(warnings[i], run_on_warning);
}

/* Before the first file. A limit on file sizes and a closed pipe fail the write, not the run: Ctrl-C also
   ends the `tee` that reads its messages. A standard stream that is closed becomes /dev/null, so that no file
   of the run takes its number and gets its text. */
static void run_guard_streams(void)
{
    int fd;
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    do fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    while (fd >= 0 && fd < 3);
    if (fd >= 0) close(fd);
}

/* ---- ranks ---- */

/* Joins the processes that a launcher has started, or makes policy->ranks of this one; 0 and 1 mean no more
   than there are. Then the policy has their count and this rank. */
static mtt_status run_join(run *r, mtt_env *env, mtt_policy *policy)
{
    launch here;
    mtt_status status = launch_find(env, &here);
    int ranks = policy->ranks, launched = here.desc.ranks;
    r->env = env;
    run_guard_streams();
    r->has_adapters = policy->lora_rank > 0;
    here.desc.timeout = (double)r->timeout;
    if (!status && launched > 1 && ranks && ranks != launched)
        return failure(r->env, MTT_E_ARGUMENT, "--ranks is %d, but the launcher has started %d: leave it out",
                       ranks, launched);
    fflush(NULL);
    if (!status && launched > 1) status = mtt_ranks_connect(env, &here.desc, &r->ranks);
    else if (!status && ranks > 1) status = mtt_ranks_fork(env, ranks, (double)r->timeout, &r->ranks);
    policy->ranks = mtt_ranks_count(r->ranks);
    policy->rank = run_rank = mtt_ranks_rank(r->ranks);
    r->local = launched > 1 && here.local >= 0 ? here.local : run_rank;
    if (!r->ranks && launched > 1) run_rank = here.desc.rank; /* it could not connect */
    r->first = !run_rank || (launched > 1 && here.local <= 0);
    if (!run_rank) option_note_threads();
    return status;
}

/* Ranks of a host take its GPUs in turn. A launcher may show each rank one of its own. */
static mtt_status run_find_device(run *r, mtt_backend *backend)
{
    int count = 0;
    mtt_status status;
    while (count <= r->local && !mtt_cuda_backend(r->env, count, backend)) count++;
    status = mtt_cuda_backend(r->env, count ? r->local % count : 0, backend);
    backend->note = run_note;
    return status;
}

/* The free memory of a GPU, which is said, as the budget of --find-max-batch without --memory-budget. Returns
   an exit code. */
static int run_free_memory(run *r, const mtt_policy *policy, size_t *free_bytes)
{
    mtt_policy alone = *policy; /* ranks would wait for each other */
    mtt_backend backend;
    size_t all_bytes;
    void *context;
    mtt_status status = MTT_E_DEVICE;
    alone.ranks = 1;
    if (policy->device == MTT_DEVICE_CUDA) status = run_find_device(r, &backend);
    if (!status) status = (backend.open)(r->env, &backend, &alone, &context); /* open is posix.h's macro */
    if (!status) {
        status = backend.memory(context, free_bytes, &all_bytes);
        backend.close(context);
    }
    if (!status)
        run_say("the device has %.1f MiB free of %.1f MiB\n", (double)*free_bytes / 1048576,
                (double)all_bytes / 1048576);
    else
        run_say("train: --find-max-batch needs a budget, for example --memory-budget 24G%s%s\n",
                *r->env->error ? ": " : "", r->env->error);
    return status ? EXIT_USAGE : 0;
}

/* All ranks wait until each of them is here, and for rank 0 as long as it takes. Rank 0 goes ahead: it calls
   this after a part of the work, and the others before. */
static mtt_status run_meet(run *r)
{
    int nothing = 0;
    return mtt_ranks_any(r->ranks, &nothing);
}

/* Gives all ranks the decision of rank 0. */
static mtt_status run_decide(run *r, int *yes)
{
    *yes = *yes && !run_rank;
    return mtt_ranks_any(r->ranks, yes);
}

/* Sets r->stopped if a signal has come to any rank. */
static mtt_status run_look_for_signals(run *r)
{
    r->stopped = run_stop;
    return mtt_ranks_any(r->ranks, &r->stopped);
}

/* ---- folder and locks ---- */

static mtt_status run_make_folder(run *r)
{
    char part[RESULT_FOLDER + 1];
    size_t i;
    for (i = 1; i <= strlen(r->folder); i++) {
        if (r->folder[i] && !strchr(POSIX_SEPARATORS, r->folder[i])) continue;
        snprintf(part, sizeof(part), "%.*s", (int)i, r->folder);
        if (mkdir(part, 0777) && errno != EEXIST) return run_cannot(r, "make the folder", part);
    }
    if (!access(result_path(r->folder, "", "."), W_OK | X_OK)) return MTT_OK; /* a file has no /. */
    return run_cannot(r, "write to the folder", r->folder);
}

/* Names the run. The dataset is `chosen`, or the data's file name with _ for letters that names must not
   have. */
static mtt_status run_set_name(run *r, const char *data, const char *chosen, const char *technique)
{
    const char *slash = posix_slash(data), *name = chosen;
    char *at;
    if (chosen && !result_is_name(chosen, strlen(chosen)))
        return failure(r->env, MTT_E_ARGUMENT, "--dataset %.100s: a name consists of letters, digits, _ . - "
                       "and does not begin with . or -", chosen);
    if (!chosen) name = slash ? slash + 1 : strcmp(data, "-") ? data : "stdin";
    if (strlen(name) + strlen(technique) + 1 > RUN_NAME)
        return failure(r->env, MTT_E_ARGUMENT, "the name %.60s... is too long: name and technique together "
                       "have at most %d letters: give a shorter one with --dataset", name, RUN_NAME);
    snprintf(r->dataset, sizeof(r->dataset), "%s", name);
    for (at = r->dataset; *at; at++)
        if (!strchr(RESULT_LETTERS, *at) || (at == r->dataset && strchr(".-", *at))) *at = '_';
    snprintf(r->name, sizeof(r->name), "%s_%s", r->dataset, technique);
    return MTT_OK;
}

/* 1 = a lock failed since the disk has none: Lustre without flock, FUSE, NFS without a lock service. Old NFS
   has none so far behind the beginning of a file: EOVERFLOW. */
static int run_lacks_locks(int error)
{
    return error == ENOSYS || error == ENOLCK || error == EOPNOTSUPP || error == ENOTSUP || error == EINVAL ||
           error == EOVERFLOW;
}

/* Locks or unlocks the run's name or the dataset's: a byte of the folder's file .lock, by the name's hash
   (FNV-1a). The lock ends with the process. `action`: F_SETLK fails if another process has it, F_SETLKW waits
   for it. */
static mtt_status run_lock(run *r, const char *name, int action, short type)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_len = 1};
    uint64_t hash = 14695981039346656037u;
    const char *at;
    for (at = name; *at; at++) hash = (hash ^ (unsigned char)*at) * 1099511628211u;
    lock.l_start = (off_t)(hash >> 3) * 2 + (name == r->dataset);
    if (fcntl(r->lock, action, &lock) == 0) return MTT_OK;
    if (run_lacks_locks(errno)) {
        if (!r->unlocked) run_say("note: this disk has no locks: do not start two runs of one name\n");
        r->unlocked = 1;
        return MTT_OK;
    }
    if (errno != EACCES && errno != EAGAIN) return run_cannot(r, "lock", result_path(r->folder, name, ""));
    return failure(r->env, MTT_E_FILE, "another process writes %s/%s: wait until it ends, or choose another "
                   "--dataset", r->folder, name);
}

/* Names the run, makes its folder, and locks the run and its dataset. Runs of one dataset wait here while one
   of them prepares it. */
static mtt_status run_open(run *r, mtt_env *env, const char *folder, const char *data, const char *dataset,
                           const char *technique)
{
    mtt_status status;
    r->env = env;
    r->folder = folder;
    r->best = HUGE_VAL;
    r->saved = -1;
    if (!*folder || strlen(folder) > RESULT_FOLDER)
        return failure(r->env, MTT_E_ARGUMENT, "--results-dir takes 1 to %d letters, for example "
                       "--results-dir results", RESULT_FOLDER);
    status = run_set_name(r, data, dataset, technique);
    if (run_rank || status) return status;
    status = mtt_ranks_busy(r->ranks);
    if (!status) status = run_make_folder(r);
    if (status) return status;
    r->lock = open(result_path(folder, "", ".lock"), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (r->lock < 0) return run_cannot(r, "make", result_path(folder, "", ".lock"));
    status = run_lock(r, r->name, F_SETLK, F_WRLCK);
    return status ? status : run_lock(r, r->dataset, F_SETLKW, F_WRLCK);
}

/* The dataset is prepared: other runs may use it. */
static mtt_status run_share_dataset(run *r)
{
    return run_rank ? MTT_OK : run_lock(r, r->dataset, F_SETLK, F_UNLCK);
}

/* All ranks must have opened the same files. */
static mtt_status run_check_dataset(run *r, const mtt_dataset *data)
{
    mtt_status status = mtt_ranks_agree(r->ranks, "the training text", mtt_tokens_crc32(data->train));
    return status ? status : mtt_ranks_agree(r->ranks, "the validation text", mtt_tokens_crc32(data->valid));
}

/* All ranks must make the same calls. What other settings they need alike, the trainer compares. */
static mtt_status run_check_settings(run *r, int eval_every, int eval_batches, int save_every, int resume)
{
    mtt_status status = mtt_ranks_agree(r->ranks, "--init", r->init != NULL);
    if (!status) status = mtt_ranks_agree(r->ranks, "--resume", (uint64_t)resume);
    if (!status) status = mtt_ranks_agree(r->ranks, "--no-checkpoint", save_every < 0);
    if (!status) status = mtt_ranks_agree(r->ranks, "--save-every", (uint64_t)save_every);
    if (!status) status = mtt_ranks_agree(r->ranks, "--eval-every", (uint64_t)eval_every);
    return status ? status : mtt_ranks_agree(r->ranks, "--eval-batches", (uint64_t)eval_batches);
}

/* ---- the first weights ---- */

/* Opens the model of --init, whose description and tokenizer the run takes. Prepared data has a tokenizer. */
static mtt_status run_open_init(run *r, mtt_model_desc *model, const char *data, const char **tokenizer)
{
    mtt_model_desc fixed;
    const char *other, *found;
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    mtt_tokenizer *loaded = NULL;
    mtt_status status = r->init ? mtt_model_open(r->env, r->init, &r->model) : MTT_OK;
    if (!r->model) return status;
    if (option_all.model) return failure(r->env, MTT_E_ARGUMENT, "--init has its own model: leave out "
                                         "--model");
    status = folder_open(r->env, r->init, r->model, &r->notes);
    if (status) return status;
    fixed = *mtt_model_describe(r->model);
    fixed.dropout = model->dropout;
    if (fixed.positions != MTT_POSITIONS_LEARNED) fixed.max_seq = model->max_seq;
    other = option_contradicted(model, &fixed);
    if (other)
        return failure(r->env, MTT_E_ARGUMENT, "--%s has another value than the model in %s: leave it out",
                       other, r->init);
    *model = fixed;
    found = result_tokenizer_of(r->model, r->init);
    if (!*tokenizer && data && !result_is_prefix(data) && !(*tokenizer = found))
        return failure(r->env, MTT_E_ARGUMENT, "there is no tokenizer beside %s: pass --tokenizer", r->init);
    if (*tokenizer && data && !result_is_prefix(data)) /* before the text is encoded, which takes long */
        status = result_load_tokenizer(r->env, *tokenizer, &kind, r->model, &loaded);
    mtt_tokenizer_destroy(loaded);
    if (status) return status;
    run_say("train: model and first weights of %s%s%s\n", r->init, *tokenizer ? ", tokenizer " : "",
            *tokenizer ? *tokenizer : "");
    return MTT_OK;
}

/* 1 = the model of --init has another tokenizer than the run, so that its ids mean other texts. */
static int run_has_other_tokenizer(run *r, const mtt_tokenizer *tokenizer)
{
    const char *path = result_tokenizer_of(r->model, r->init);
    int differ;
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    mtt_tokenizer *other = NULL;
    if (!path) return 0;
    if (mtt_tokenizer_load(r->env, path, &kind, &other)) return 1;
    differ = result_tokenizer_hash(tokenizer) != result_tokenizer_hash(other);
    mtt_tokenizer_destroy(other);
    return differ;
}

/* Checkpoints carry what the model of --init says beside its weights. What they cannot carry is said. */
static mtt_status run_carry_notes(run *r, mtt_trainer *t, const mtt_tokenizer *tokenizer)
{
    char *text = NULL;
    int i;
    mtt_status status = folder_note(r->env, &r->notes, r->vocab, &text);
    for (i = 0; i < r->notes.end_count; i++)
        if (r->notes.ends[i] >= r->vocab)
            run_say("note: eos_token_id of %s has %d, which is left out: the model's ids end at %d\n",
                    r->init, (int)r->notes.ends[i], r->vocab - 1);
    if (text && run_has_other_tokenizer(r, tokenizer))
        status = failure(r->env, MTT_E_ARGUMENT, "the run has another tokenizer");
    else if (text) status = mtt_trainer_set_note(t, text);
    free(text);
    if (status != MTT_E_FORMAT && status != MTT_E_ARGUMENT) return status;
    run_say("note: checkpoints are without the chat template, the ids of ends and the settings of generation "
            "of %s: %s\n", r->init, r->env->error);
    return MTT_OK;
}

/* ---- files ---- */

static mtt_status run_commit(run *r, FILE *f, const char *temporary, const char *path)
{
    return result_commit(f, temporary, path) ? MTT_OK : run_cannot(r, "write", path);
}

static mtt_status run_write_metrics(run *r, const result *metrics)
{
    const char *temporary = run_path(r, RESULT_METRICS ".tmp");
    FILE *f = result_create(temporary);
    if (f) result_print(f, metrics);
    return run_commit(r, f, temporary, run_path(r, RESULT_METRICS));
}

static mtt_status run_write_memory(run *r, const mtt_schedule *schedule)
{
    const char *temporary = run_path(r, RESULT_MEMORY ".tmp");
    FILE *f = result_create(temporary);
    if (f) mtt_schedule_json(schedule, result_write_text, f);
    return run_commit(r, f, temporary, run_path(r, RESULT_MEMORY));
}

/* Names what is wrong with the model or the technique before the text is tokenized, which can take minutes
   and replaces earlier tokens. It plans few ids: the budget is judged when their number is known. */
static mtt_status run_check_model(run *r, const mtt_model_desc *model, const mtt_policy *policy, int batch,
                                  int seq_len)
{
    mtt_model_desc least = *model;
    mtt_plan_report plan;
    mtt_status status;
    if (!least.vocab) least.vocab = 256;
    status = mtt_plan(r->env, &least, policy, batch, seq_len, &plan);
    return status == MTT_E_BUDGET ? MTT_OK : status;
}

/* A sequence must fit into the validation split, which is a tenth of the text. The model gets the data's
   vocabulary; that of --init must have all of it. */
static mtt_status run_check_text(run *r, const char *text, const mtt_dataset *data, int seq_len,
                                 mtt_model_desc *model)
{
    unsigned long long tokens = mtt_tokens_count(data->valid);
    int vocab = mtt_tokens_vocab(data->train);
    char shorter[64] = "";
    if (!r->model) model->vocab = vocab;
    r->vocab = model->vocab;
    if (vocab > model->vocab)
        return failure(r->env, MTT_E_MISMATCH, "%s has %d ids, but the model in %s %d: use its tokenizer",
                       text, vocab, r->init, model->vocab);
    if (tokens > (unsigned long long)seq_len) return MTT_OK;
    if (tokens > 1) snprintf(shorter, sizeof(shorter), ", or --seq-len %llu", tokens - 1);
    return failure(r->env, MTT_E_DATA, "%s is too short: a tenth of its documents is for validation, which "
                   "has %llu tokens, and a sequence has %d: give more text%s", text, tokens, seq_len,
                   shorter);
}

/* ---- log ---- */

/* The number after a key in a line of the log; NAN if there is none. */
static double run_field(const char *line, const char *key)
{
    const char *at = strstr(line, key);
    char *end;
    double value = at ? strtod(at + strlen(key), &end) : NAN;
    return at && end != at + strlen(key) ? value : NAN;
}

static void run_count(run *r, const char *line)
{
    double ms = run_field(line, "\"ms\": "), quality = run_field(line, "\"val_loss\": ");
    if (!isnan(ms)) {
        r->loss = run_field(line, "\"loss\": ");
        r->lr = run_field(line, "\"lr\": ");
        r->ms += ms;
        r->steps++;
    }
    if (strstr(line, "\"val_loss\"")) r->evaluated = run_field(line, "\"step\": ");
    if (quality < r->best) r->best = quality;
}

static void run_log_line(run *r, const char *line)
{
    double values[CURVE_COUNT], seconds = run_field(line, "\"time\": ");
    long long step = 0;
    int k;
    if (r->log) fputs(line, r->log); /* rank 0 alone has it */
    run_count(r, line);
    if (!r->rows || sscanf(line, "{\"step\": %18lld", &step) != 1) return;
    for (k = 0; k < CURVE_COUNT; k++) values[k] = run_field(line, curve_keys[k]);
    curves_row(r->rows, r->curves, isnan(seconds) ? 0 : seconds, step, values);
}

/* Seconds since 1970. */
static double run_time(void)
{
    struct timespec now = {0, 0};
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The file of the curves, or the folder for TensorBoard. */
static const char *run_curves_ending(const run *r)
{
    return r->curves == CURVES_CSV ? ".csv" : "_tensorboard";
}

/* Makes the file of the curves, which begins with the rows of the log that is continued. So it has each step
   once. TensorBoard looks for new names, not for new contents: its file gets a new one, and older ones go. */
static mtt_status run_open_curves(run *r)
{
    const char *path = run_path(r, run_curves_ending(r));
    double now = run_time();
    char ending[300];
    struct dirent *e;
    DIR *list;
    if (r->curves == CURVES_TENSORBOARD) {
        if (mkdir(path, 0777) && errno != EEXIST) return run_cannot(r, "make the folder", path);
        list = opendir(path);
        while (list && (e = readdir(list))) {
            snprintf(ending, sizeof(ending), "_tensorboard/%.255s", e->d_name);
            if (!strncmp(e->d_name, "events.out.tfevents.", 20)) unlink(run_path(r, ending));
        }
        if (list) closedir(list);
        snprintf(ending, sizeof(ending), "_tensorboard/events.out.tfevents.%.6f.mtt", now);
        path = run_path(r, ending);
    }
    r->rows = result_create(path);
    if (!r->rows) return run_cannot(r, "make", path);
    curves_begin(r->rows, r->curves, now);
    return MTT_OK;
}

/* Opens rank 0's log. A resumed run continues it after the lines up to its step. */
static mtt_status run_open_log(run *r, long long step)
{
    mtt_status status = r->curves && !run_rank ? run_open_curves(r) : MTT_OK;
    const char *path = run_path(r, RESULT_LOG), *temporary = run_path(r, RESULT_LOG ".tmp");
    char line[512];
    FILE *in = step && !run_rank ? fopen(path, "r") : NULL;
    long long at;
    int lost = step && !in && errno != ENOENT;
    if (run_rank) return MTT_OK;
    if (lost || status) return status ? status : run_cannot(r, "read", path);
    r->log = result_create(temporary);
    while (in && r->log && fgets(line, sizeof(line), in))
        if (sscanf(line, "{\"step\": %18lld", &at) == 1 && at <= step && strchr(line, '\n'))
            run_log_line(r, line);
    if (in) {
        lost = ferror(in);
        fclose(in);
    }
    if (!lost && r->log && !fflush(r->log) && !rename(temporary, path)) return MTT_OK;
    run_cannot(r, lost ? "read" : "write", path);
    if (r->log) fclose(r->log);
    r->log = NULL;
    unlink(temporary);
    return MTT_E_FILE;
}

/* Logs a line and flushes it, so that programs that watch the files see it. */
static void run_log_now(run *r, const char *line)
{
    run_log_line(r, line);
    if (r->log && fflush(r->log) && !r->unwritten) r->unwritten = errno;
    if (r->rows && fflush(r->rows) && !r->unwritten) r->unwritten = errno;
}

/* Logs a step. `tokens`: tokens in it. */
static void run_log_step(run *r, const mtt_step_info *info, double tokens)
{
    char line[3 * RESULT_NUMBER + 1200], loss[RESULT_NUMBER], norm[RESULT_NUMBER], clipped[64] = "";
    if (info->clipped) snprintf(clipped, sizeof(clipped), "\"clipped\": %lld, ", (long long)info->clipped);
    snprintf(line, sizeof(line), "{\"step\": %lld, \"loss\": %s, \"lr\": %.8g, \"grad_norm\": %s, "
             "%s\"ms\": %.3f, \"tokens_per_s\": %.1f, \"time\": %.3f}\n", (long long)info->step,
             result_number(loss, "%.6f", info->loss), (double)info->lr,
             result_number(norm, "%.6g", (double)info->grad_norm), clipped, info->ms,
             tokens / fmax(info->ms, 1e-6) * 1e3, run_time()); /* 1 ns: a clock may stand still */
    run_log_now(r, line);
}

/* A run that is resumed at its end evaluates again: the log has that line already. */
static void run_log_quality(run *r, long long step, const mtt_quality *q)
{
    char line[1024], loss[RESULT_NUMBER], bits[RESULT_NUMBER];
    if (r->evaluated == (double)step) return;
    snprintf(line, sizeof(line), "{\"step\": %lld, \"val_loss\": %s, \"bits_per_byte\": %s, \"accuracy\": "
             "%.5f, \"time\": %.3f}\n", step, result_number(loss, "%.6f", q->loss),
             result_number(bits, "%.5f", q->bits_per_byte), q->accuracy, run_time());
    run_log_now(r, line);
}

/* Closes a file that run_log_now may have failed to write; errno then says why. 1 = all of it was written. */
static int run_close(const run *r, FILE *f)
{
    int whole = result_close(f);
    if (r->unwritten) errno = r->unwritten;
    return whole;
}

static mtt_status run_close_log(run *r)
{
    FILE *log = r->log, *rows = r->rows;
    mtt_status status = MTT_OK;
    r->log = r->rows = NULL;
    if (rows && !run_close(r, rows)) status = run_cannot(r, "write", run_path(r, run_curves_ending(r)));
    if (log && !run_close(r, log)) status = run_cannot(r, "write", run_path(r, RESULT_LOG));
    return status;
}

/* Sets the names and every number that the run, its trainer and an evaluation know. */
static void run_fill(const run *r, result *metrics, const mtt_trainer *t, const mtt_quality *q)
{
    mtt_plan_report plan;
    mtt_schedule_report(mtt_trainer_schedule(t), &plan);
    snprintf(metrics->dataset, sizeof(metrics->dataset), "%s", r->dataset);
    snprintf(metrics->technique, sizeof(metrics->technique), "%.255s", r->name + strlen(r->dataset) + 1);
    metrics->steps = (double)mtt_trainer_step(t);
    metrics->train_loss = r->loss;
    metrics->training_time = r->ms * 1e-3;
    metrics->ms_per_step = r->ms / (double)r->steps;
    metrics->val_loss = q->loss;
    metrics->perplexity = q->perplexity;
    metrics->bits_per_byte = q->bits_per_byte;
    metrics->accuracy = q->accuracy;
    metrics->parameters = (double)plan.parameters;
    metrics->ranks = mtt_ranks_count(r->ranks);
    metrics->arena_bytes = (double)plan.arena_bytes;
    metrics->device_bytes = (double)mtt_trainer_device_bytes(t);
    metrics->peak_bytes = (double)plan.peak_bytes;
    metrics->peak_forward_bytes = (double)plan.phase_peak_bytes[MTT_FORWARD];
    metrics->peak_backward_bytes = (double)plan.phase_peak_bytes[MTT_BACKWARD];
}

/* ---- checkpoints ---- */

/* The step of a checkpoint's file name; -1 = it is not a checkpoint by step of this run. */
static long long run_step_of(const run *r, const char *file)
{
    size_t size = strlen(r->name);
    long long step;
    int end = 0;
    if (strncmp(file, r->name, size) || strncmp(file + size, "_step", 5)) return -1;
    file += size + 5;
    if (*file < '0' || *file > '9' || sscanf(file, "%18lld%n", &step, &end) != 1) return -1;
    return strcmp(file + end, ".safetensors") ? -1 : step;
}

/* The newest checkpoint before step `before`, by its step; -1 = none. With `any`, also folders, pipes and
   broken links that have such a name. */
static long long run_newest(const run *r, long long before, int any)
{
    long long newest = -1, step;
    DIR *folder = opendir(r->folder);
    struct dirent *e;
    struct stat info;
    while (folder && (e = readdir(folder))) {
        step = run_step_of(r, e->d_name);
        if (step >= before || step <= newest) continue;
        if (any || (!stat(result_path(r->folder, e->d_name, ""), &info) && S_ISREG(info.st_mode)))
            newest = step;
    }
    if (folder) closedir(folder);
    return newest;
}

/* Room for the checkpoints that will be there at once; those of a run that is resumed are there already. */
static mtt_status run_check_room(run *r, uint64_t bytes, int often, int resumed)
{
    uint64_t count = often ? (uint64_t)r->keep + 2 : 1, room;
    long long step = LLONG_MAX;
    struct statvfs disk;
    if (run_rank) return MTT_OK;
    while (resumed && count > 1 && (step = run_newest(r, step, 0)) >= 0) count--;
    if (statvfs(r->folder, &disk)) return run_cannot(r, "look at", r->folder);
    room = (uint64_t)disk.f_bavail * disk.f_frsize;
    if (room / count >= bytes) return MTT_OK;
    return failure(r->env, MTT_E_FILE, "%s has %.1f MiB free, too few for %d checkpoint%s of %.1f MiB: free "
                   "some space, or use another --results-dir, a lower --keep, or --no-checkpoint", r->folder,
                   (double)room / 1048576, (int)count, count > 1 ? "s" : "", (double)bytes / 1048576);
}

/* For --resume, before anything is prepared. */
static mtt_status run_check_resume(run *r)
{
    long long other = run_newest(r, LLONG_MAX, 1);
    if (run_rank || run_newest(r, LLONG_MAX, 0) >= 0) return MTT_OK;
    if (other >= 0)
        return failure(r->env, MTT_E_FILE, "%s is no file: start without --resume", run_checkpoint(r, other));
    return failure(r->env, MTT_E_FILE, "nothing to resume: there is no %s: start without --resume",
                   run_path(r, "_step*.safetensors"));
}

/* Continues from the newest checkpoint that is whole. */
static mtt_status run_resume(run *r, mtt_trainer *t, mtt_batches *batches)
{
    long long step = run_newest(r, LLONG_MAX, 0), other = LLONG_MAX, before;
    mtt_status status;
    while ((other = run_newest(r, other, 1)) > step)
        run_say("note: %s is no file: it is passed over\n", run_checkpoint(r, other));
    status = mtt_ranks_agree(r->ranks, "the step of the newest checkpoint (0: there is none)",
                             step < 0 ? 0 : (uint64_t)step);
    for (; !status; step = before) {
        status = mtt_resume(t, run_checkpoint(r, step), batches);
        before = run_newest(r, step, 0);
        if (!status) r->saved = step;
        if (status != MTT_E_FORMAT || before < 0) return status;
        run_say("train: %s; continuing from step %lld\n", r->env->error, before);
        status = MTT_OK;
    }
    return status;
}

/* Saves the step, then removes older checkpoints but for `keep`. */
static mtt_status run_save(run *r, mtt_trainer *t, const mtt_batches *batches)
{
    long long step = mtt_trainer_step(t);
    mtt_status status = mtt_save(t, run_checkpoint(r, step), batches);
    int kept = 0;
    if (!status) r->saved = step;
    while (!status && !run_rank && (step = run_newest(r, step, 0)) >= 0)
        if (++kept >= r->keep) unlink(run_checkpoint(r, step));
    return status;
}

/* Saves the best weights of a run with adapters for other programs: merged, and where PEFT has such a model
   the adapters in a folder. */
static mtt_status run_save_adapters(run *r, mtt_trainer *t)
{
    mtt_status status = mtt_save_merged(t, run_path(r, "_merged.safetensors"));
    if (status) return status;
    status = peft_save(r->env, r->ranks, t, run_path(r, "_adapter"));
    return status == MTT_E_ARGUMENT ? MTT_OK : status; /* PEFT has no such model */
}

/* Saves the best checkpoint: a second name of the step's file, if this run has saved or loaded that. */
static mtt_status run_save_best(run *r, mtt_trainer *t, const mtt_batches *batches)
{
    const char *best = run_path(r, "_best.safetensors"), *temporary = run_path(r, "_best.safetensors.tmp");
    int linked = 0;
    mtt_status status;
    if (!run_rank) {
        mtt_ranks_busy(r->ranks); /* a network's disk may take long; a failure comes back from run_decide */
        unlink(temporary);
        linked = r->saved == mtt_trainer_step(t) && !link(run_checkpoint(r, r->saved), temporary) &&
                 !rename(temporary, best);
        unlink(temporary); /* a rename to another name of the same file does nothing */
    }
    status = run_decide(r, &linked);
    if (!status && !linked) status = mtt_save(t, best, batches);
    return status || !r->has_adapters ? status : run_save_adapters(r, t);
}

/* Saves after the last step. If the folder cannot take the file, another may: hours of training are in it. */
static mtt_status run_save_last(run *r, mtt_trainer *t, const mtt_batches *batches)
{
    const char *const folders[] = {".", getenv("TMPDIR") ? getenv("TMPDIR") : ".", "/tmp"};
    mtt_status status = r->saved == mtt_trainer_step(t) ? MTT_OK : run_save(r, t, batches);
    char reason[sizeof(r->env->error)], path[4096];
    int i;
    if (!status) return status;
    memcpy(reason, r->env->error, sizeof(reason));
    for (i = 0; i < 3; i++) {
        snprintf(path, sizeof(path), "%.3000s/%s_step%lld.safetensors", folders[i], r->name,
                 (long long)mtt_trainer_step(t));
        if (mtt_save(t, path, batches)) continue;
        return failure(r->env, status, "%.700s; saved as %.1000s: move it to %.500s, then --resume", reason,
                       path, r->folder);
    }
    return failure(r->env, status, "%s", reason);
}

/* ---- settings ---- */

/* Options that change what a run computes, with the tokens in a step, which have several. */
static const char *const run_settings[] = {
    "tokens in a step", "layers", "heads", "heads-kv", "d-head", "d-model", "d-ff", "norm", "norm-eps",
    "norm-place", "mlp", "no-biases", "vocab-size", "positions", "rotary-theta", "rotary-interleaved",
    "rotary-factor", "qk-norm", "max-seq", "head", "no-head-bias", "dropout", "seq-len", "precision",
    "fp8-products", "window-size", "state", "early-update", "lora-rank", "lora-alpha", "optimizer", "lr",
    "lr-schedule", "warmup-steps", "min-lr", "weight-decay", "clip", "beta1", "beta2", "eps", "loss-scale",
    "seed", "eval-batches"};

/* A setting of this session. */
static const char *run_setting(const char *name, double tokens, char words[64])
{
    const option *o = option_find(option_all.list, option_all.count, name, strlen(name));
    if (o) return option_words(o, words);
    snprintf(words, 64, "%.0f", tokens);
    return words;
}

/* Lists the settings that an earlier session of this name had otherwise, each as ", --lr 0.1 (was 0.2)". */
static void run_list_changes(run *r, double tokens, char *list, size_t size)
{
    char line[256], here[64], key[64];
    FILE *f = run_rank ? NULL : fopen(run_path(r, RESULT_SETTINGS), "r");
    size_t used = 0;
    int k;
    *list = 0;
    while (f && fgets(line, sizeof(line), f))
        for (k = 0; k < LENGTH(run_settings); k++) {
            const char *value = line + 1 + snprintf(key, sizeof(key), "\"%s\": \"", run_settings[k]);
            if (strncmp(line + 1, key, strlen(key)) || used >= size) continue;
            line[strcspn(line, "\r\n")] = 0;
            line[(size_t)(value - line) + strcspn(value, "\"")] = 0;
            if (!strcmp(value, run_setting(run_settings[k], tokens, here))) continue;
            used += (size_t)snprintf(list + used, size - used, "%s%s%s %s (was %.60s)", used ? ", " : "",
                                     k ? "--" : "", run_settings[k], here, value);
        }
    if (f) fclose(f);
}

static mtt_status run_write_settings(run *r, double tokens)
{
    const char *temporary = run_path(r, RESULT_SETTINGS ".tmp");
    FILE *f = result_create(temporary);
    char words[64];
    int k;
    for (k = 0; f && k < LENGTH(run_settings); k++)
        fprintf(f, "%c\"%s\": \"%s\"%s\n", k ? ' ' : '{', run_settings[k],
                run_setting(run_settings[k], tokens, words), k + 1 < LENGTH(run_settings) ? "," : "}");
    return run_commit(r, f, temporary, run_path(r, RESULT_SETTINGS));
}

/* Says if the learning rate does not go on as the log has it. */
static void run_note_lr(run *r, int64_t step)
{
    mtt_optim_desc o;
    double as_now;
    if (!step || step >= r->optim->total_steps || mtt_optim_resolve(NULL, r->optim, &o)) return;
    as_now = (double)mtt_learning_rate(&o, step - 1);
    if (fabs(as_now - r->lr) > 1e-6 * fmax(as_now, r->lr))
        run_say("note: lr goes on at %.3g; the run before ended at %.3g\n",
                (double)mtt_learning_rate(&o, step), r->lr);
}

/* A preset's warmup is meant for more steps than some runs have. A schedule that ends with the run must be
   longer than its warmup, which is then shortened. A constant rate keeps its warmup: so a run that is resumed
   with more --steps has the bits of one that had them from the beginning. */
static void run_choose_warmup(mtt_optim_desc *optim, int steps)
{
    if (option_given("warmup-steps") || optim->warmup_steps < steps) return;
    if (optim->lr_schedule != MTT_LR_CONSTANT) optim->warmup_steps = steps / 10;
    else
        run_say("note: the preset's warmup has %lld steps, the run %d: --warmup-steps 0 begins at the whole "
                "--lr\n", (long long)optim->warmup_steps, steps);
}

/* ---- a run that starts over ---- */

static int run_has_file(const run *r, const char *file)
{
    static const char *const endings[] = {RESULT_METRICS, RESULT_MEMORY, RESULT_LOG, RESULT_TOKENIZER,
                                          RESULT_SETTINGS, "_best.safetensors", "_merged.safetensors", ".csv",
                                          "_tensorboard", "_adapter"};
    size_t size = strlen(r->name), i;
    if (run_step_of(r, file) >= 0) return 1;
    for (i = 0; i < sizeof(endings) / sizeof(endings[0]); i++)
        if (!strncmp(file, r->name, size) && !strcmp(file + size, endings[i])) return 1;
    return 0;
}

/* Moves the files of an earlier run of this name into {run}.old; if that is there, into {run}.old2 and so
   on. So a forgotten --resume costs nothing. `changes`: settings that the earlier run had otherwise. */
static mtt_status run_set_aside(run *r, const char *changes)
{
    char old[RESULT_FOLDER + 512] = "", ending[16] = ".old";
    DIR *folder = run_rank ? NULL : opendir(r->folder);
    struct dirent *e;
    mtt_status status = folder || run_rank ? MTT_OK : run_cannot(r, "read", r->folder);
    int k;
    while (!status && folder && (e = readdir(folder))) {
        const char *from, *to;
        if (!run_has_file(r, e->d_name)) continue;
        for (k = 2; !*old && !status; k++) {
            to = run_path(r, ending);
            if (!mkdir(to, 0777)) snprintf(old, sizeof(old), "%s", to);
            else if (errno != EEXIST) status = run_cannot(r, "make the folder", to);
            snprintf(ending, sizeof(ending), ".old%d", k);
        }
        from = result_path(r->folder, e->d_name, "");
        to = result_path(old, e->d_name, "");
        if (!status && rename(from, to)) status = run_cannot(r, "move", from);
    }
    if (folder) closedir(folder);
    if (*old && *changes)
        run_say("train: the earlier run had other settings, and is kept in %s; here: %s. With --dataset NAME "
                "each has its own files\n", old, changes);
    else if (*old) run_say("train: the earlier run is kept in %s: --resume would have continued it\n", old);
    return status;
}

/* Removes what a killed process left of a checkpoint that it was writing: the folder is locked. */
static void run_sweep(const run *r)
{
    DIR *folder = run_rank ? NULL : opendir(r->folder);
    struct dirent *e;
    while (folder && (e = readdir(folder))) {
        char name[sizeof(e->d_name)];
        size_t size = strlen(e->d_name);
        if (size < 5 || e->d_name[0] != '.' || strcmp(e->d_name + size - 4, ".tmp")) continue;
        snprintf(name, sizeof(name), "%.*s", (int)size - 5, e->d_name + 1);
        if (run_step_of(r, name) >= 0) unlink(result_path(r->folder, e->d_name, ""));
    }
    if (folder) closedir(folder);
}

/* Continues the run, or starts it and keeps an earlier one's files. What can fail later is tried now.
   `often`: steps between checkpoints; 0 = one at the end; less = none. */
static mtt_status run_begin(run *r, mtt_trainer *t, mtt_batches *batches, const mtt_tokenizer *tokenizer,
                            int often, int resume)
{
    mtt_status status = r->model && !run_rank ? run_carry_notes(r, t, tokenizer) : MTT_OK;
    const option *accumulate = option_find(option_all.list, option_all.count, "accumulate", 10);
    double rows = (double)batches->batch * batches->ranks * fmax(1, option_value(accumulate));
    double tokens = rows * batches->seq_len;
    char changes[2048];
    int evaluated;
    run_list_changes(r, tokens, changes, sizeof(changes));
    run_sweep(r);
    if (!status && often >= 0) status = run_check_room(r, mtt_checkpoint_bytes(t), often, resume);
    if (!status) status = resume ? run_resume(r, t, batches) : run_set_aside(r, changes);
    if (!status && !resume && r->model) status = mtt_trainer_load(t, r->model);
    if (!status && !resume && !r->model && r->has_adapters)
        run_say("note: --lora-rank without --init trains adapters of random weights, which stay random\n");
    mtt_model_close(r->model);
    folder_close(&r->notes);
    r->model = NULL;
    if (!status && !run_rank) status = mtt_ranks_busy(r->ranks);
    if (!status && !run_rank && often >= 0)
        status = mtt_tokenizer_save(tokenizer, run_path(r, RESULT_TOKENIZER));
    if (!status && !run_rank) status = run_write_settings(r, tokens);
    if (!status) status = run_open_log(r, mtt_trainer_step(t));
    if (!status && resume && *changes) run_say("note: other settings than before: %s\n", changes);
    if (!status && resume) run_note_lr(r, mtt_trainer_step(t));
    evaluated = r->evaluated == (double)mtt_trainer_step(t); /* by rank 0's log */
    if (!status) status = run_decide(r, &evaluated);
    if (evaluated) r->evaluated = (double)mtt_trainer_step(t);
    return status;
}

/* ---- steps and evaluations ---- */

/* As many steps as `epochs` passes take, each of `accumulate` micro-batches on every rank. */
static mtt_status run_count_steps(run *r, const mtt_batches *batches, int accumulate, int epochs, int *steps)
{
    uint64_t in_step = (uint64_t)batches->batch * (uint64_t)accumulate * (uint64_t)batches->ranks;
    uint64_t count = batches->sequences * (uint64_t)epochs / in_step;
    *steps = (int)(count > INT_MAX ? INT_MAX : count);
    if (count > INT_MAX) return failure(r->env, MTT_E_ARGUMENT, "--epochs: more than 2^31 - 1 steps");
    if (count) return MTT_OK;
    return failure(r->env, MTT_E_DATA, "the text has only %llu sequences, but a step takes %llu: lower "
                   "--batch-size, give more text, or set --steps", (unsigned long long)batches->sequences,
                   (unsigned long long)in_step);
}

/* The validation split's quality. `better`: it is the best so far. A signal ends it and sets r->stopped; then
   nothing is evaluated. */
static mtt_status run_evaluate(run *r, mtt_trainer *t, const mtt_dataset *data, int batches, mtt_quality *q,
                               int *better)
{
    mtt_status status = mtt_evaluate_tokens(t, data->valid, data->tokenizer, batches, &run_stop, q);
    r->stopped = status == MTT_END;
    *better = !status && q->loss < r->best;
    if (status) return r->stopped ? MTT_OK : status;
    return run_decide(r, better);
}
#endif
