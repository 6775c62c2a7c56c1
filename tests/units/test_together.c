/* test_together.c - ranks train one model: the bits of one rank with all micro-batches, for every shard,
   precision and recomputation; checkpoints that do not know the number of ranks; failures of one that stop
   all. Each run is a process of its own, which forks its ranks. They leave results in shared memory.

      test_together [quick | emulated] [RANKS]

   Compiled with MTT_CUDA the ranks are on GPUs, RANKS of them at most (default: the number of GPUs). */
#define _GNU_SOURCE
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include "../test.h"

enum { MOST = 8, BATCH = 2, LENGTH = 32, STEPS = 5, MICRO_BATCHES = 24, TIMEOUT = 20 /* s */ };
static mtt_env env;
static int most_ranks = MOST, emulated;

/* emulate_host.h: a call fails once, after `after` successes. NULL on a device, and on a CPU. */
void emulate_fault(const char *call, int error, int after) __attribute__((weak));

/* A model and how it is trained. `ranks` * policy.accumulate is the number of micro-batches in a step. */
typedef struct job {
    mtt_model_desc model;
    mtt_policy policy;
    int ranks, steps;
    char save[300], resume[300], load[300]; /* after the last step; before the first, twice; "": not */
    char tokens[300];            /* a file to evaluate at the end */
    char other[300];             /* what the victim reads in the place of `resume` or `load` */
    int begin;                 /* step of the data */
    int poisoned;              /* 1 = operations run one by one, and find no workspace of the one before */
    int victim;                /* a rank that ... */
    enum { NOTHING, OTHER_SEED, OTHER_CHECKPOINT, OTHER_WEIGHTS, WRONG_TOKEN, DIES, WRONG_PLACE, NO_MEMORY,
           GIVES_UP, BREAKS, BREAKS_HALF_WAY, BREAKS_SILENTLY, CANNOT_COPY, CANNOT_SIGNAL } fate;
} job;

/* What a run leaves: of all ranks, the hash of losses, norms and weights, and the outcome. */
typedef struct outcome {
    mtt_status status;
    uint64_t hash;
    double loss, evaluated;
    double seconds;        /* from a failure to its trainer's end */
    size_t arena, planned; /* on a GPU, which ranks may share, arena is what the schedule says */
    char error[1024];
} outcome;
static outcome *outcomes;

static uint64_t mixed(uint64_t hash, const void *at, size_t size)
{
    return mtt__hash(hash, (const char *)at, size);
}

/* Token or target i of a step's micro-batches. */
static int32_t number(const job *j, int step, int i, int target)
{
    uint32_t z = (uint32_t)(step * 7919 + i) * 2654435761u + (uint32_t)target * 40503u;
    if (target && (z >> 8) % 11 == 0) return -1;
    return (int32_t)((z >> 9) % (uint32_t)j->model.vocab);
}

/* Step `step`, of this rank's micro-batches: numbers rank, ranks + rank, ... of all. */
static mtt_status train(const job *j, mtt_trainer *t, int rank, int step, outcome *o)
{
    int32_t tokens[MICRO_BATCHES * BATCH * LENGTH], targets[MICRO_BATCHES * BATCH * LENGTH];
    int all = j->policy.accumulate, size = BATCH * LENGTH, k, i;
    mtt_step_info info;
    mtt_status status;
    for (k = 0; k < all; k++)
        for (i = 0; i < size; i++) {
            int from = (k * j->ranks + rank) * size + i;
            tokens[k * size + i] = number(j, step, from, 0);
            targets[k * size + i] = number(j, step, from, 1);
        }
    if (j->fate == WRONG_TOKEN && rank == j->victim && step == 2) tokens[5] = j->model.vocab;
    if (j->fate == DIES && rank == j->victim && step == 2) raise(SIGKILL);
    if (j->fate == GIVES_UP && rank == j->victim && step == 2)
        return mtt__fail(&env, MTT_E_FILE, "its disk is full");
    status = mtt_train_step(t, tokens, targets, &info);
    if (status) return status;
    o->loss = info.loss;
    o->hash = mixed(o->hash, &info.loss, sizeof(info.loss));
    o->hash = mixed(o->hash, &info.grad_norm, sizeof(info.grad_norm));
    o->hash = mixed(o->hash, &info.targets, sizeof(info.targets));
    o->hash = mixed(o->hash, &info.hits, sizeof(info.hits));
    o->hash = mixed(o->hash, &info.clipped, sizeof(info.clipped));
    return MTT_OK;
}

static mtt_status hash_weights(mtt_trainer *t, outcome *o)
{
    int64_t shape[2];
    mtt_status status = MTT_OK;
    for (int i = 0; mtt_parameter(t, i, shape) && !status; i++) {
        size_t bytes = (size_t)(shape[0] * (shape[1] ? shape[1] : 1)) * sizeof(float);
        float *values = malloc(bytes);
        status = mtt_parameter_get(t, i, values);
        o->hash = mixed(o->hash, values, bytes);
        free(values);
    }
    return status;
}

/* At last one that the last rank stops: all end it after one batch each. */
static mtt_status evaluate(const job *j, mtt_trainer *t, int rank, outcome *o)
{
    volatile sig_atomic_t stop = rank == j->ranks - 1;
    mtt_tokens *tokens = NULL;
    mtt_quality q = {0};
    mtt_status status = mtt_tokens_open(&env, j->tokens, &tokens);
    if (!status) status = mtt_evaluate_tokens(t, tokens, NULL, 5, NULL, &q);
    if (!status) o->evaluated = q.loss, o->hash = mixed(o->hash, &q, sizeof(q));
    if (!status) status = mtt_evaluate_tokens(t, tokens, NULL, 0, NULL, &q);
    if (!status) o->hash = mixed(o->hash, &q, sizeof(q));
    if (!status) status = mtt_evaluate_tokens(t, tokens, NULL, 0, &stop, &q);
    mtt_tokens_close(tokens);
    return status == MTT_END && q.targets == j->ranks * BATCH * LENGTH ? MTT_OK : MTT_E_ARGUMENT;
}

static mtt_status no_memory(void *context, mtt_place place, size_t bytes, void **block)
{
    (void)context, (void)place;
    *block = NULL;
    return mtt__fail(&env, MTT_E_BUDGET, "no room for %zu bytes", bytes);
}

static mtt_status broken(void *context, const mtt_op *ops, int count)
{
    (void)context, (void)ops, (void)count;
    return mtt__fail(&env, MTT_E_DEVICE, "its device is broken");
}

static mtt_status (*run_list)(void *context, const mtt_op *ops, int count); /* the backend's own */
static mtt_status (*download)(void *context, void *to, const void *from, size_t bytes);
static mtt_status (*upload)(void *context, void *to, const void *from, size_t bytes);
static int calls_left; /* that succeed */

static mtt_status breaks_half_way(void *context, const mtt_op *ops, int count)
{
    if (calls_left-- > 0) return run_list(context, ops, count);
    run_list(context, ops, count / 2);
    return mtt__fail(&env, MTT_E_DEVICE, "its device is broken");
}

static mtt_status breaks_silently(void *context, void *to, const void *from, size_t bytes)
{
    if (calls_left-- > 0) return download(context, to, from, bytes);
    return mtt__fail(&env, MTT_E_DEVICE, "its device is broken");
}

static mtt_status one_by_one(void *context, const mtt_op *ops, int count)
{
    static char waste[1 << 20];
    mtt_status status = MTT_OK;
    memset(waste, 0xff, sizeof(waste));
    for (int i = 0; i < count && !status; i++) {
        const mtt_tensor *w = ops[i].workspace;
        if (w) status = upload(context, w->data, waste, w->bytes < sizeof(waste) ? w->bytes : sizeof(waste));
        if (!status) status = run_list(context, &ops[i], 1);
    }
    return status;
}

/* Lets a rank fail in the third step, or at its beginning, without a word of the program to the others. */
static void break_rank(const job *j, mtt_backend *backend)
{
    run_list = backend->run, download = backend->download, upload = backend->upload;
    calls_left = 4 + (int)j->policy.shard % 2;
    if (j->fate == BREAKS_HALF_WAY) backend->run = breaks_half_way;
    if (j->fate == BREAKS_SILENTLY) calls_left = 2, backend->download = breaks_silently;
    if (j->fate == CANNOT_COPY) emulate_fault("cudaIpcOpenMemHandle", 217, j->ranks - 1); /* no peer access */
    if (j->fate == CANNOT_SIGNAL) emulate_fault("cuStreamBatchMemOp", 801, 20); /* not supported */
}

static mtt_status run_rank(const job *j, mtt_backend *backend, outcome *o)
{
    double failed_at;
    mtt_optim_desc optim = {.lr = 1e-3f, .seed = 5};
    mtt_plan_report plan;
    mtt_policy policy = j->policy;
    mtt_trainer *t = NULL;
    mtt_model *model = NULL;
    int rank = mtt_ranks_rank(backend->ranks), i;
    mtt_status status;
    alarm(200); /* a rank that hangs is a failure, and not the end of the test */
    optim.seed += j->fate == OTHER_SEED && rank == j->victim;
    if (j->fate == NO_MEMORY && rank == j->victim) backend->alloc = no_memory;
    if (j->fate == BREAKS && rank == j->victim) backend->run = broken;
    if (j->fate > BREAKS && rank == j->victim) break_rank(j, backend);
    if (j->poisoned) run_list = backend->run, upload = backend->upload, backend->run = one_by_one;
    status = mtt_trainer_create(&env, &j->model, &policy, &optim, backend, BATCH, LENGTH, &t);
    if (!status && *j->resume)
        status = mtt_resume(t, j->fate == OTHER_CHECKPOINT && rank == j->victim ? j->other : j->resume, NULL);
    if (!status && *j->load)
        status = mtt_model_open(&env, j->fate == OTHER_WEIGHTS && rank == j->victim ? j->other : j->load,
                                &model);
    if (model) status = mtt_trainer_load(t, model);
    mtt_model_close(model);
    for (i = 0; i < j->steps && !status; i++) status = train(j, t, rank, j->begin + i, o);
    if (!status) status = hash_weights(t, o);
    if (!status && *j->tokens) status = evaluate(j, t, rank, o);
    if (!status && *j->save && j->policy.lora_rank) { /* merged, and then as it is: all ranks take part */
        char merged[320];
        snprintf(merged, sizeof(merged), "%s.merged", j->save);
        status = mtt_save_merged(t, merged);
    }
    if (!status && *j->save) status = mtt_save(t, j->save, NULL);
    policy.ranks = j->ranks;
    policy.rank = rank;
    policy.device = backend->device;
    if (!status) status = mtt_plan(&env, &j->model, &policy, BATCH, LENGTH, &plan);
    if (!status) {
        o->planned = plan.arena_bytes;
        mtt_schedule_report(mtt_trainer_schedule(t), &plan);
        o->arena = backend->device == MTT_DEVICE_CPU ? mtt_trainer_device_bytes(t) : plan.arena_bytes;
    }
    failed_at = mtt__now_ms();
    if ((j->fate == GIVES_UP || j->fate == BREAKS) && rank == j->victim)
        mtt_ranks_fail(backend->ranks, env.error);
    mtt_trainer_destroy(t);
    o->seconds = (mtt__now_ms() - failed_at) / 1e3;
    return status;
}

/* Ranks may share a GPU. */
static mtt_status open_device(int rank, mtt_backend *backend)
{
#ifdef MTT_CUDA
    mtt_status status = mtt_cuda_backend(&env, rank, backend);
    return status ? mtt_cuda_backend(&env, 0, backend) : MTT_OK;
#else
    (void)rank;
    *backend = *mtt_cpu_backend();
    return MTT_OK;
#endif
}

#ifdef MTT_CUDA
/* The number of GPUs, counted by a process of its own: CUDA does not survive fork. */
static int count_devices(void)
{
    int status = 0, count = 0;
    pid_t pid = fork();
    mtt_backend backend;
    if (pid == 0) {
        while (count < MOST && !mtt_cuda_backend(&env, count, &backend)) count++;
        _exit(count);
    }
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}
#endif

/* Runs a job in processes of its own. */
static void run(const job *j)
{
    pid_t pid;
    fflush(NULL);
    memset(outcomes, 0, MOST * sizeof(*outcomes));
    pid = fork();
    if (pid == 0) {
        mtt_backend backend;
        mtt_ranks *ranks = NULL;
        if (!j->policy.nccl) setenv("NCCL_FAKE_REFUSES", "1", 1); /* nccl_fake.c: they must copy */
        if (j->fate == OTHER_CHECKPOINT || j->fate == OTHER_WEIGHTS || j->fate == DIES ||
            j->fate >= GIVES_UP) /* after these no rank waits for others before it frees: emulate_host.h */
            setenv("EMULATE_LOST_RANK", "1", 1);
        outcome *o;
        if (j->ranks > 1 && mtt_ranks_fork(&env, j->ranks, TIMEOUT, &ranks)) {
            outcomes[0].status = MTT_E_RANK;
            _exit(1);
        }
        o = &outcomes[mtt_ranks_rank(ranks)];
        o->status = open_device(mtt_ranks_rank(ranks), &backend);
        backend.ranks = ranks;
        if (!o->status) {
            o->status = MTT_E_RANK; /* of a process that dies */
            o->status = run_rank(j, &backend, o);
        }
        if (o->status) snprintf(o->error, sizeof(o->error), "%s", env.error);
        mtt_ranks_close(ranks);
        _exit(0);
    }
    check(pid > 0 && waitpid(pid, NULL, 0) == pid, "a process does not start");
}

static const char *described(const job *j)
{
    static char text[300], technique[100];
    mtt_policy_name(&j->policy, technique, sizeof(technique));
    snprintf(text, sizeof(text), "%s, %d ranks, accumulate %d, dropout %g, tied %d", technique, j->ranks,
             j->policy.accumulate, (double)j->model.dropout, j->model.tied_head);
    return text;
}

static uint64_t file_hash(const char *path)
{
    size_t size;
    char *text = read_file(path, &size);
    uint64_t hash = text ? mtt__hash(1, text, size) : 0;
    free(text);
    return hash;
}

/* All ranks succeed and agree; planned is taken. Returns the hash. */
static uint64_t succeeded(const job *j)
{
    run(j);
    for (int rank = 0; rank < j->ranks; rank++) {
        const outcome *o = &outcomes[rank];
        check(!o->status, "%s: rank %d: %s", described(j), rank, o->error);
        check(o->hash == outcomes[0].hash, "%s: rank %d has other losses or weights than rank 0",
              described(j), rank);
        check(o->arena == o->planned && (o->arena || o->status), "%s: rank %d planned %zu bytes and took %zu",
              described(j), rank, o->planned, o->arena);
    }
    return outcomes[0].hash;
}

static void save_to(job *j, const char *name)
{
    snprintf(j->save, sizeof(j->save), "%s", in(name));
}

static job plain(int micro_batches)
{
    job j = {.model = {.layers = 3, .heads = 2, .d_model = 64, .vocab = 300}, .ranks = 1, .steps = STEPS};
    j.policy.accumulate = micro_batches;
    return j;
}

/* Ranks, accumulate and shard that must give the bits of one rank. */
static const struct {
    int ranks, accumulate;
    mtt_shard shard;
} SAME[] = {
    {2, 1, MTT_SHARD_NONE}, {2, 1, MTT_SHARD_OPTIMIZER}, {2, 1, MTT_SHARD_GRADIENTS},
    {3, 1, MTT_SHARD_NONE}, {3, 1, MTT_SHARD_OPTIMIZER}, {3, 1, MTT_SHARD_GRADIENTS},
    {4, 1, MTT_SHARD_NONE}, {4, 1, MTT_SHARD_OPTIMIZER}, {4, 1, MTT_SHARD_GRADIENTS},
    {2, 2, MTT_SHARD_GRADIENTS},
};

/* The same bits as one rank: losses, norms, weights, evaluations, and the file of a checkpoint. 16-bit
   gradients, which only the compact state with one micro-batch a rank has, are rounded before they are
   added: then all shards have the same bits. */
static void same_bits(void)
{
    for (int kind = emulated ? 9 : 0; kind < 24; kind += emulated ? 11 : quick ? 7 : 1) {
        uint64_t hashes[5] = {0}, files[5] = {0}, first[5] = {0}, whole[5] = {0};
        char merged[320];
        job j = plain(1);
        snprintf(j.tokens, sizeof(j.tokens), "%s", in("data.valid.tokens"));
        j.model.dropout = kind % 2 ? 0.1f : 0;
        j.model.tied_head = j.model.no_head_bias = kind / 2 % 2;
        j.model.positions = (mtt_positions)(kind / 2 % 4);
        j.model.heads_kv = kind % 3 ? 0 : 1;
        j.model.qk_norm = kind / 3 % 2;
        j.model.norm = (mtt_norm_form)(kind / 3 % 2);
        j.model.norm_place = (mtt_norm_place)(kind % 3);
        j.model.mlp = (mtt_mlp)(kind % 4);
        j.model.no_biases = kind / 7 % 2;
        j.policy.precision = (mtt_precision)(kind % 5);
        j.policy.attention = (mtt_attention)(kind / 3 % 2);
        j.policy.recompute = kind % 5 == 4 ? MTT_RECOMPUTE_RECURSIVE : (mtt_recompute)(kind % 4);
        j.policy.loss = (mtt_loss)(1 + kind / 5 % 2);
        j.policy.loss_chunk_rows = 48;
        j.policy.state = (mtt_state)(kind / 4 % 3 == 2);
        j.policy.fp8_products = (mtt_fp8_products)(kind / 5 % 2);
        j.policy.freeze = kind % 2 == 0 ? NULL : kind % 3 ? "wte.weight,h.1.*" : "h.*.weight";
        if (kind % 7 == 0 && kind % 5 < 4) j.policy.lora_rank = 8, j.policy.lora_targets = "*";
        if (emulated) j.steps = 3; /* the second one is captured, the third replayed */
        for (int n = 2; n <= 4; n++) {
            job one = j;
            one.policy.accumulate = n;
            save_to(&one, "one.safetensors");
            hashes[n] = succeeded(&one);
            files[n] = file_hash(one.save);
            snprintf(merged, sizeof(merged), "%s.merged", one.save);
            if (j.policy.lora_rank) whole[n] = file_hash(merged);
        }
        for (size_t i = 0; i < MTT__LENGTH(SAME); i++) {
            int n = SAME[i].ranks * SAME[i].accumulate, narrow;
            job many = j;
            if (SAME[i].ranks > most_ranks || (emulated && i % 4 && i != 9)) continue;
            new_case();
            many.ranks = SAME[i].ranks;
            many.policy.accumulate = SAME[i].accumulate;
            many.policy.shard = SAME[i].shard;
            many.policy.nccl = i % 3 == 1; /* on GPUs; the others copy */
            many.policy.exchange = (mtt_exchange)((i + (size_t)kind) % 3);
            if (many.policy.accumulate > 1 && many.policy.exchange == MTT_EXCHANGE_FLAT)
                many.policy.exchange = MTT_EXCHANGE_NAIVE; /* a flat one adds up micro-batches first */
            many.poisoned = emulated && kind == 9 && many.policy.nccl;
            save_to(&many, "many.safetensors");
            uint64_t hash = succeeded(&many);
            narrow = j.policy.state == MTT_STATE_COMPACT && j.policy.precision >= MTT_BF16 && n == many.ranks;
            if (narrow && !first[n]) first[n] = hash;
            check(hash == (narrow ? first[n] : hashes[n]), "%s: other bits than those of one rank",
                  described(&many));
            check(narrow || file_hash(many.save) == files[n], "%s: another checkpoint than that of one rank",
                  described(&many));
            snprintf(merged, sizeof(merged), "%s.merged", many.save);
            check(narrow || !j.policy.lora_rank || file_hash(merged) == whole[n], "%s: merged otherwise",
                  described(&many));
        }
    }
}

/* 5 to 8 ranks, of sizes that few of them divide: 5 heads of 16, 307 ids. */
static void many_ranks(void)
{
    for (int ranks = 5; ranks <= MOST && ranks <= most_ranks; ranks++)
        for (int kind = 0; kind < 5; kind++) {
            job one = plain(ranks);
            if (quick && kind != ranks - 5) continue;
            one.model = (mtt_model_desc){.layers = 2, .heads = 5, .d_model = 80, .d_ff = 176, .vocab = 307};
            one.model.dropout = kind % 2 ? 0.1f : 0;
            one.model.tied_head = one.model.no_head_bias = kind % 3 == 0;
            one.model.positions = kind % 2 ? MTT_POSITIONS_ROTARY : MTT_POSITIONS_LEARNED;
            one.policy.precision = (mtt_precision)kind;
            one.policy.attention = kind ? MTT_ATTENTION_FLASH : MTT_ATTENTION_PLAIN;
            one.policy.recompute = (mtt_recompute)(kind % 4);
            one.steps = 3;
            save_to(&one, "one.safetensors");
            uint64_t hash = succeeded(&one), file = file_hash(one.save);
            for (int shard = 0; shard < 3; shard++) {
                job many = one;
                new_case();
                many.ranks = ranks;
                many.policy.accumulate = 1;
                many.policy.shard = (mtt_shard)shard;
                many.policy.nccl = shard == 1;
                many.policy.exchange = (mtt_exchange)((shard + kind) % 3);
                save_to(&many, "many.safetensors");
                check(succeeded(&many) == hash, "%s: other bits than those of one rank", described(&many));
                check(file_hash(many.save) == file, "%s: another checkpoint than that of one rank",
                      described(&many));
            }
        }
}

/* Ranks that add up their own micro-batches first have sums of their own: the same for both shards, and close
   to those of one rank. */
static void sums_of_ranks(void)
{
    for (int kind = 0; kind < 4; kind++) {
        job j = plain(6);
        double one;
        uint64_t none;
        new_case();
        j.policy.precision = kind % 2 ? MTT_BF16 : MTT_FP32;
        j.model.dropout = kind / 2 ? 0.1f : 0;
        succeeded(&j);
        one = outcomes[0].loss;
        j.ranks = most_ranks < 3 ? 2 : 3;
        j.policy.accumulate = 6 / j.ranks;
        none = succeeded(&j);
        check(fabs(outcomes[0].loss / one - 1) < 1e-4, "%s: loss %.9g, one rank's %.9g", described(&j),
              outcomes[0].loss, one);
        j.policy.shard = MTT_SHARD_OPTIMIZER;
        check(succeeded(&j) == none, "%s: other bits than without shards", described(&j));
    }
}

/* A run goes on with another number of ranks and another shard: the bits of one that was not interrupted. */
static void resumed(void)
{
    static const struct { int ranks; mtt_shard shard; } WAYS[] = {
        {1, MTT_SHARD_NONE}, {4, MTT_SHARD_GRADIENTS}, {3, MTT_SHARD_GRADIENTS}, {2, MTT_SHARD_GRADIENTS},
        {8, MTT_SHARD_GRADIENTS}, {3, MTT_SHARD_GRADIENTS}};
    for (int kind = 0; kind < 3; kind++) {
        job j = plain(MICRO_BATCHES), part;
        uint64_t whole;
        new_case();
        j.model.dropout = 0.1f;
        j.model.layers = 2;
        j.policy.precision = kind == 0 ? MTT_FP32 : kind == 1 ? MTT_FP16 : MTT_FP8;
        j.policy.state = (mtt_state)(kind == 1);
        j.steps = MTT__LENGTH(WAYS);
        save_to(&j, "whole.safetensors");
        succeeded(&j);
        whole = file_hash(j.save);
        for (size_t i = 0; i < MTT__LENGTH(WAYS); i++) {
            part = j;
            part.begin = (int)i;
            part.steps = 1;
            part.ranks = WAYS[i].ranks <= most_ranks ? WAYS[i].ranks : 2;
            part.policy.accumulate = MICRO_BATCHES / part.ranks;
            part.policy.shard = WAYS[i].shard;
            save_to(&part, "part.safetensors");
            if (i) memcpy(part.resume, part.save, sizeof(part.save));
            succeeded(&part);
        }
        check(file_hash(part.save) == whole, "%s: resumed with other numbers of ranks, another checkpoint",
              described(&j));
    }
}

/* First weights of a checkpoint: the same for every number of ranks, with and without steps after them. */
static void loaded(void)
{
    for (int kind = 0; kind < 2; kind++) {
        job first = plain(2);
        first.policy.precision = kind ? MTT_BF16 : MTT_FP32;
        first.policy.state = (mtt_state)kind;
        save_to(&first, "first.safetensors");
        succeeded(&first);
        for (int steps = 0; steps < 3; steps += 2) {
            uint64_t hash = 0;
            new_case();
            for (int ranks = 1; ranks <= most_ranks; ranks++) {
                job j = first;
                if (MICRO_BATCHES % ranks) continue;
                j.ranks = ranks;
                j.steps = steps;
                j.policy.accumulate = MICRO_BATCHES / ranks;
                j.policy.shard = steps ? MTT_SHARD_GRADIENTS : (mtt_shard)(ranks % 3);
                memcpy(j.load, first.save, sizeof(j.load));
                *j.save = 0;
                succeeded(&j);
                if (ranks == 1) hash = outcomes[0].hash;
                check(outcomes[ranks - 1].hash == hash, "%s: other weights were loaded", described(&j));
            }
        }
    }
}

/* One rank fails: the others end with its words, and what was saved stays whole. */
static void failures(void)
{
    static const struct { int fate; mtt_status own, others; const char *words; } CASES[] = {
        {OTHER_SEED, MTT_E_MISMATCH, MTT_E_MISMATCH, "seed"},
        {OTHER_CHECKPOINT, MTT_E_MISMATCH, MTT_E_MISMATCH, ") in the checkpoint: "},
        {OTHER_WEIGHTS, MTT_E_MISMATCH, MTT_E_MISMATCH, ") in the first weights: "},
        {WRONG_TOKEN, MTT_E_ARGUMENT, MTT_E_STOPPED, "the vocabulary has ids"},
        {DIES, MTT_E_RANK, MTT_E_RANK, "rank 1"},
        {WRONG_PLACE, MTT_E_FILE, MTT_E_STOPPED, "missing/folder"},
        {NO_MEMORY, MTT_E_BUDGET, MTT_E_STOPPED, "no room for"},
        {GIVES_UP, MTT_E_FILE, MTT_E_STOPPED, "its disk is full"},
        {BREAKS, MTT_E_DEVICE, MTT_E_STOPPED, "its device is broken"}, /* the others begin a step */
        {BREAKS_HALF_WAY, MTT_E_DEVICE, MTT_E_STOPPED, "its device is broken"},
        {BREAKS_SILENTLY, MTT_E_DEVICE, MTT_E_STOPPED, "its device is broken"},
        {CANNOT_COPY, MTT_E_DEVICE, MTT_E_STOPPED, "Set the policy's nccl (--nccl)"},
        {CANNOT_SIGNAL, MTT_E_DEVICE, MTT_E_STOPPED, "driver's error 801 (the driver's name)"},
    };
    job one = plain(1), two = plain(1);
    one.steps = two.steps = 1;
    two.begin = 1; /* other text: the checkpoint differs in its tensors alone */
    save_to(&one, "one.safetensors");
    save_to(&two, "two.safetensors");
    succeeded(&one);
    succeeded(&two);
    for (size_t i = 0; i < MTT__LENGTH(CASES); i++)
        for (int shard = 0; shard < 3; shard++) {
            job j = plain(1);
            if (emulated && shard != (int)i % 3) continue;
            if (CASES[i].fate >= CANNOT_COPY && !emulate_fault) continue;
            new_case();
            j.ranks = most_ranks < 3 ? 2 : 3;
            j.policy.shard = (mtt_shard)shard;
            j.policy.nccl = CASES[i].fate < CANNOT_COPY && (i + (size_t)shard) % 2;
            j.fate = CASES[i].fate;
            j.victim = 1;
            save_to(&j, j.fate == WRONG_PLACE ? "missing/folder/x.safetensors" : "failures.safetensors");
            if (j.fate == WRONG_PLACE) j.victim = 0;
            if (j.fate == OTHER_CHECKPOINT) memcpy(j.resume, one.save, sizeof(j.resume));
            if (j.fate == OTHER_WEIGHTS) memcpy(j.load, one.save, sizeof(j.load));
            memcpy(j.other, two.save, sizeof(j.other));
            run(&j);
            for (int rank = 0; rank < j.ranks; rank++) {
                const outcome *o = &outcomes[rank];
                int own = rank == j.victim;
                /* The victim may free its memory before another rank has opened it, which then says so. */
                int same = j.fate == CANNOT_COPY && o->status == MTT_E_DEVICE;
                check(same || o->status == (own ? CASES[i].own : CASES[i].others),
                      "fate %d, shard %d: rank %d ends with \"%s\": %s", j.fate, shard, rank,
                      mtt_status_string(o->status), o->error);
                check(o->seconds < TIMEOUT, "fate %d, shard %d: rank %d ends after %.1f s", j.fate, shard,
                      rank, o->seconds);
                check(!own || j.fate < BREAKS || !strstr(o->error, "stopped"),
                      "fate %d: its own error is \"%s\"", j.fate, o->error);
                check((own && j.fate == DIES) || strstr(o->error, CASES[i].words),
                      "fate %d, shard %d: rank %d: \"%s\" has not \"%s\"", j.fate, shard, rank, o->error,
                      CASES[i].words);
            }
        }
    job j = plain(1);
    mtt_backend backend = *mtt_cpu_backend();
    mtt_optim_desc optim = {0};
    mtt_trainer *t = NULL;
    j.policy.ranks = 2;
    mtt_status status = mtt_trainer_create(&env, &j.model, &j.policy, &optim, &backend, BATCH, LENGTH, &t);
    check(status == MTT_E_ARGUMENT && strstr(env.error, "2 ranks"), "a policy of two ranks runs alone: %s",
          env.error);
    mtt_trainer_destroy(t);
}

/* A file of tokens, written by a process of its own: OpenMP's threads do not survive fork. */
static void write_tokens(const char *text, const char *prefix)
{
    pid_t pid = fork();
    int status = 1;
    if (pid == 0) {
        mtt_prepare_desc desc = {.input = text, .output = prefix, .vocab = 300};
        mtt_prepare_report report;
        FILE *file = fopen(text, "w");
        for (int i = 0; i < 4000; i++)
            fprintf(file, "word%d is %d%s", i % 97, i * i % 1013, i % 20 ? " " : "\n\n");
        fclose(file);
        _exit(mtt_prepare(&env, &desc, &report) != MTT_OK);
    }
    check(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0, "no tokens");
}

int main(int argc, char **argv)
{
    emulated = argc > 1 && strcmp(argv[1], "emulated") == 0;
    quick = emulated || (argc > 1 && strcmp(argv[1], "quick") == 0);
    mtt_wait_passively(argv);
#ifdef MTT_CUDA
    most_ranks = argc > 2 ? atoi(argv[2]) : count_devices();
    if (most_ranks < 2) {
        printf("skipped: ranks on GPUs: %d of 2 CUDA devices\n0 passed, 0 failed, 1 skipped\n", most_ranks);
        return 0;
    }
#endif
    outcomes = (outcome *)mmap(NULL, MOST * sizeof(*outcomes), PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (outcomes == MAP_FAILED) return 1;
    if (!open_folder()) return finish();
    write_tokens(in("text.txt"), in("data"));
    same_bits();
    if (!emulated) many_ranks(), sums_of_ranks(), resumed(), loaded();
    failures();
    close_folder();
    return finish();
}
