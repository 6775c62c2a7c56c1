/* dump.h - writes every tensor of a training step to one safetensors file: golden values for your own code,
   which takes the weights and the tokens from it, too.

   Include it after mtt.h, with MTT_BACKEND_API. Names in the file:
      NAME           a parameter before the step, in FP32; the tokens; whatever else no operation writes
      NAME           what an operation writes, in its own type, as build/schedule lists it
      d_NAME         the gradient of NAME, complete
      NAME@NUMBER    what operation NUMBER writes to the same tensor besides: again (recomputed), a part of a
                     gradient, or the gradient of another tensor in its place
      NAME.scale     of a tensor in 8 bits: its values are its numbers times this
      after.NAME     a parameter after the step
      loss           the mean loss of the step
   Of a gradient that several operations make together, the last one completes it: attention_scores_backward,
   embed_backward of a tied head, `add`. A sum of two gradients has the name of the second. d_x is that of the
   residual stream: of x, then by each norm_backward of what that norm reads. Gradients are those of the mean
   loss, times the loss scale under FP16 and FP8. A vocabulary is padded, so the last columns of logits belong
   to no id. Metadata: the optimizer's settings, and for each operation its line of the listing. Of several
   micro-batches the file has the first. */
#ifndef DUMP_H_INCLUDED
#define DUMP_H_INCLUDED

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "failure.h"

enum { DUMP_BEFORE = -1, DUMP_AFTER = -2 }; /* the step; an operation has its number */

/* A tensor of the file. */
typedef struct dump_entry {
    char name[96];
    const char *type;         /* as safetensors names it */
    int dims;
    int64_t shape[4];
    size_t bytes;
    int when, input;          /* 1 = it is taken before operation `when`, which reads it */
    int parameter, scale;     /* a parameter's number, or -1; 1 = the tensor's scale */
    const mtt_tensor *tensor; /* of the schedule */
} dump_entry;

typedef struct dump {
    mtt_env *env;
    mtt_trainer *trainer;
    mtt_optim_desc optim;
    const mtt_op *ops;
    int op_count, next_op, count, capacity, next; /* `next` is the first entry that is not yet written */
    dump_entry *entries;
    mtt_backend device; /* it does the work */
    mtt_writer *file;
    size_t header;      /* its bytes */
    void *room;         /* for the largest tensor */
    double loss;
} dump;

static dump *dump_now; /* a backend's `run` does not know its caller */

/* ---- what is in the file ---- */

static int dump_has(const dump *d, const char *name)
{
    int i;
    for (i = 0; i < d->count; i++)
        if (!strcmp(d->entries[i].name, name)) return 1;
    return 0;
}

/* Appends an entry; NULL if there is no memory. Not `plain`: its name gets the operation's number. */
static dump_entry *dump_add(dump *d, const char *name, int plain, const char *type, size_t bytes, int when)
{
    dump_entry *e;
    if (d->count == d->capacity) {
        int capacity = 2 * d->capacity + 256;
        dump_entry *more = realloc(d->entries, (size_t)capacity * sizeof(*more));
        if (!more) return NULL;
        d->entries = more, d->capacity = capacity;
    }
    e = &d->entries[d->count];
    memset(e, 0, sizeof(*e));
    snprintf(e->name, sizeof(e->name), plain ? "%s" : "%s@%d", name, when);
    e->type = type, e->bytes = bytes, e->when = when, e->parameter = -1;
    d->count++;
    return e;
}

static int dump_parameters(dump *d, const char *prefix, int when)
{
    const char *parameter;
    char name[80];
    int i;
    for (i = 0; (parameter = mtt_parameter(d->trainer, i, NULL)) != NULL; i++) {
        dump_entry *e;
        snprintf(name, sizeof(name), "%s%s", prefix, parameter);
        if (!(e = dump_add(d, name, 1, "F32", 0, when))) return 0;
        mtt_parameter(d->trainer, i, e->shape);
        e->dims = 1 + (e->shape[1] > 0);
        e->bytes = 4 * (size_t)(e->shape[0] * (e->shape[1] ? e->shape[1] : 1));
        e->parameter = i;
    }
    return 1;
}

static int dump_tensor(dump *d, const mtt_tensor *t, const char *called, int plain, int op, int input)
{
    char name[80];
    dump_entry *e = dump_add(d, called, plain, mtt_dtype_name(t->dtype), t->bytes, op);
    if (!e) return 0;
    e->dims = t->dims, e->tensor = t, e->input = input;
    memcpy(e->shape, t->shape, sizeof(e->shape));
    if (t->entry < 0) return 1;
    snprintf(name, sizeof(name), "%.60s.scale", e->name);
    if (!(e = dump_add(d, name, 1, "F32", 4, op))) return 0;
    e->tensor = t, e->input = input, e->scale = 1;
    return 1;
}

/* The name of what an operation writes to `t`. */
static const char *dump_name(const mtt_op *op, const mtt_tensor *t)
{
    return op->kind == MTT_OP_add ? MTT_OPERANDS_OF(add, op)->b->name : t->name;
}

/* 1 = operation `op` leaves in `t` a part of the gradient, which a later one completes. */
static int dump_part(const dump *d, int op, const mtt_tensor *t)
{
    const char *name = dump_name(&d->ops[op], t);
    int k;
    while (++op < d->op_count) {
        const mtt_op *o = &d->ops[op];
        for (k = 0; k < o->inputs + o->outputs; k++) {
            if (o->operands[k] != t) continue;
            if (o->kind == MTT_OP_add && !strcmp(dump_name(o, t), name)) return 1;
            if (k >= o->inputs) return o->kind == MTT_OP_attention_scores_backward || o->adds;
        }
    }
    return 0;
}

/* 1 = an operation before `op` writes it. */
static int dump_written(const dump *d, int op, const mtt_tensor *t)
{
    int k;
    while (op-- > 0)
        for (k = d->ops[op].inputs; k < d->ops[op].inputs + d->ops[op].outputs; k++)
            if (d->ops[op].operands[k] == t) return 1;
    return 0;
}

/* Takes a tensor that operation `i` reads and none has written. */
static int dump_input(dump *d, int i, const mtt_tensor *t)
{
    return dump_has(d, t->name) || dump_written(d, i, t) || dump_tensor(d, t, t->name, 1, i, 1);
}

/* Takes what operation `i` writes. */
static int dump_output(dump *d, int i, const mtt_tensor *t)
{
    const mtt_op *op = &d->ops[i];
    const char *name = dump_name(op, t);
    int plain = !dump_has(d, name) && !dump_part(d, i, t);
    /* In 16 bits, the gradient of GELU's input is where that of its output would be. */
    if (op->kind == MTT_OP_linear_backward_gelu && t == MTT_OPERANDS_OF(linear_backward_gelu, op)->dx)
        plain &= t->entry >= 0;
    return dump_tensor(d, t, name, plain, i, 0);
}

/* Parameters and moments are not taken from operands: the arena has them rounded, and in its own order. */
static int dump_wants(const mtt_tensor *t)
{
    return t && t->dtype != MTT_U8 && t->category != MTT_WEIGHTS && t->category != MTT_OPTIMIZER;
}

static mtt_status dump_list(dump *d)
{
    int i, k, ok = dump_parameters(d, "", DUMP_BEFORE);
    for (i = 0; i < d->op_count; i++) {
        const mtt_op *op = &d->ops[i];
        for (k = 0; k < op->inputs + op->outputs && ok; k++) {
            const mtt_tensor *t = op->operands[k];
            if (dump_wants(t)) ok = k < op->inputs ? dump_input(d, i, t) : dump_output(d, i, t);
        }
    }
    if (ok) ok = dump_parameters(d, "after.", DUMP_AFTER);
    if (ok) ok = dump_add(d, "loss", 1, "F64", 8, DUMP_AFTER) != NULL;
    return ok ? MTT_OK : failure(d->env, MTT_E_MEMORY, "no memory for a list of all tensors");
}

/* ---- the header ---- */

static void dump_put(dump *d, const char *text, size_t bytes)
{
    mtt_writer_put(d->file, text, bytes);
    d->header += bytes;
}

static void dump_print(dump *d, const char *format, ...)
{
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    dump_put(d, line, strlen(line));
}

/* Takes a line of the listing, which has nothing to escape, as a member of the metadata. */
static void dump_line(void *user, const char *line, size_t bytes)
{
    dump_print(user, ",\"operation %d\":\"", atoi(line));
    dump_put(user, line, bytes - 1);
    dump_put(user, "\"", 1);
}

static void dump_header(dump *d)
{
    mtt_optim_desc optim;
    uint64_t begin = 0, size;
    int i, k;
    mtt_optim_resolve(d->env, &d->optim, &optim);
    dump_put(d, "        ", 8); /* the size of the rest */
    dump_print(d, "{\"__metadata__\":{\"format\":\"pt\",\"optimizer\":\"AdamW: lr %g, beta1 %g, beta2 %g, "
               "eps %g, weight decay %g of matrices, gradient clipped to a norm of %g (0: it is not)\"",
               (double)optim.lr, (double)optim.beta1, (double)optim.beta2, (double)optim.eps,
               (double)optim.weight_decay, (double)optim.clip);
    mtt_schedule_print(mtt_trainer_schedule(d->trainer), dump_line, d);
    dump_print(d, "}");
    for (i = 0; i < d->count; begin += d->entries[i++].bytes) {
        const dump_entry *e = &d->entries[i];
        dump_print(d, ",\n\"%s\":{\"dtype\":\"%s\",\"shape\":[", e->name, e->type);
        for (k = 0; k < e->dims; k++) dump_print(d, "%s%lld", k ? "," : "", (long long)e->shape[k]);
        dump_print(d, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin,
                   (unsigned long long)(begin + e->bytes));
    }
    dump_print(d, "}");
    while (d->header % 8) dump_put(d, " ", 1);
    size = d->header - 8;
    mtt_writer_patch(d->file, 0, &size, 8); /* little-endian, as all processors that mtt runs on */
}

/* ---- the data ---- */

/* Writes the entries of a moment, in their order. */
static mtt_status dump_write(dump *d, void *context, int when, int input)
{
    mtt_status status = MTT_OK;
    for (; d->next < d->count && !status; d->next++) {
        const dump_entry *e = &d->entries[d->next];
        if (e->when != when || e->input != input) break;
        if (e->parameter >= 0) status = mtt_parameter_get(d->trainer, e->parameter, d->room);
        else if (!e->tensor) memcpy(d->room, &d->loss, sizeof(d->loss));
        else if (e->scale) status = d->device.download(context, d->room, e->tensor->scale, e->bytes);
        else status = d->device.download(context, d->room, e->tensor->data, e->bytes);
        if (!status) status = mtt_writer_put(d->file, d->room, e->bytes);
    }
    return status;
}

/* Runs operations one by one. Those that the step has not yet run leave what they read and write. A forward
   pass alone is not the step's: before the first one it measures the scales of FP8. */
static mtt_status dump_run(void *context, const mtt_op *ops, int count)
{
    dump *d = dump_now;
    mtt_status status = MTT_OK;
    int i;
    for (i = 0; i < count && !status; i++) {
        const int wanted = d->file && d->next_op < d->op_count && &ops[i] == &d->ops[d->next_op] &&
                           ops[count - 1].phase != MTT_FORWARD;
        if (wanted) status = dump_write(d, context, d->next_op, 1);
        if (!status) status = d->device.run(context, &ops[i], 1);
        if (wanted && !status) status = dump_write(d, context, d->next_op++, 0);
    }
    return status;
}

static mtt_status dump_open(dump *d, const char *path)
{
    size_t most = sizeof(double), sum = 0;
    mtt_status status = dump_list(d);
    int i;
    if (status) return status;
    for (i = 0; i < d->count; i++) {
        if (d->entries[i].bytes > most) most = d->entries[i].bytes;
        sum += d->entries[i].bytes;
    }
    if (!(d->room = malloc(most))) status = failure(d->env, MTT_E_MEMORY, "no memory for a list of all "
                                                    "tensors");
    if (!status) status = mtt_writer_open(d->env, path, sum, &d->file); /* and the header, of some KB */
    if (!status) dump_header(d);
    return status;
}

/* The policy with which a trainer makes the same schedule. That of the schedule counts the parts of a split
   batch as micro-batches. */
static mtt_policy dump_policy(const mtt_schedule *schedule)
{
    mtt_policy policy = *mtt_schedule_policy(schedule);
    mtt_plan_report report;
    mtt_schedule_report(schedule, &report);
    policy.accumulate /= report.micro_batches;
    return policy;
}

/* Trains a step and writes its tensors. `tokens`, `targets`: of all micro-batches. `model`: weights of it;
   NULL: initial ones. A failure leaves the path as it was. */
static mtt_status dump_save(mtt_env *env, const char *path, const mtt_schedule *schedule, int batch,
                            int seq_len, const mtt_backend *device, mtt_model *model, const int32_t *tokens,
                            const int32_t *targets)
{
    const mtt_policy policy = dump_policy(schedule);
    mtt_backend watched = *device;
    mtt_step_info info;
    dump d;
    mtt_status status;
    memset(&d, 0, sizeof(d));
    d.env = env, d.device = *device;
    d.optim.zero_weights = model != NULL; /* they are loaded */
    if (policy.early_update) d.optim.clip = -1; /* all gradients are never known at once */
    dump_now = &d;
    watched.run = dump_run;
    status = mtt_trainer_create(env, mtt_schedule_model(schedule), &policy, &d.optim, &watched, batch,
                                seq_len, &d.trainer);
    if (!status && model) status = mtt_trainer_load(d.trainer, model);
    if (!status) d.ops = mtt_schedule_ops(mtt_trainer_schedule(d.trainer), &d.op_count);
    if (!status) status = dump_open(&d, path);
    if (!status) status = dump_write(&d, NULL, DUMP_BEFORE, 0);
    if (!status) status = mtt_train_step(d.trainer, tokens, targets, &info);
    if (!status) d.loss = info.loss;
    if (!status) status = dump_write(&d, NULL, DUMP_AFTER, 0);
    if (!status) status = mtt_writer_commit(d.file);
    mtt_writer_close(d.file);
    mtt_trainer_destroy(d.trainer);
    free(d.room), free(d.entries);
    return status;
}

#endif
