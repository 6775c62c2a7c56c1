/* mtt.h 2.0 - memory-efficient Transformer training in two files - MIT or public domain (see the end)

   Quick start:
      cc -O3 -march=native -fopenmp hello.c -o hello -lm
      nvcc -O3 -arch=native -DMTT_CUDA hello.c mtt_kernels.cu -lcublasLt -o hello      (with mtt_cuda_backend)

   #define MTT_IMPLEMENTATION
   #include "mtt.h"
   #include <stdio.h>
   int main(void)
   {
       static int32_t tokens[8 * 64], targets[8 * 64];
       mtt_env env = {0};
       mtt_model_desc model = {.layers = 2, .heads = 4, .d_model = 64, .vocab = 256};
       mtt_policy policy = {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH};
       mtt_optim_desc optim = {.lr = 1e-3f};
       mtt_trainer *trainer;
       mtt_step_info info;
       for (int i = 0; i < 8 * 64; i++) tokens[i] = i * 7 % 256, targets[i] = (i + 1) * 7 % 256;
       if (mtt_trainer_create(&env, &model, &policy, &optim, mtt_cpu_backend(), 8, 64, &trainer))
           return puts(env.error), 1;
       for (int step = 0; step < 20; step++) {
           if (mtt_train_step(trainer, tokens, targets, &info)) return puts(env.error), 1;
           printf("step %d, loss %.4f, %zu bytes\n", step, info.loss, info.arena_bytes);
       }
       mtt_trainer_destroy(trainer);
   }

   Contents. The manual: what it does, words, how to use it, memory, numbers, options, failures. Then the
   interface. Then the implementation, in rooms; a room uses only the rooms above it. Search for a room's tag:

   >>base       text, failures, blocks       >>trainer     arena, steps, evaluation
   >>numbers    16-bit floats, randomness    >>tokenizer   Unicode classes, BPE
   >>json       a pull reader                >>data        corpora, splits, token files
   >>files      atomic writing               >>batches     datasets and batches
   >>config     fields, defaults, checks     >>checkpoint  safetensors, save and resume
   >>tensors    tables of parameters and     >>report      listings, JSON and tables
                activations                  >>public      evaluation, sampling, profiling
   >>schedule   the program of a step
   >>plan       bytes, offsets, budgets
   >>cpu        every operation in plain C

   WHAT IT DOES
   mtt trains GPT-like decoders on your text. The field's memory techniques are settings: BF16 and FP16,
   FlashAttention, windowed attention, gradient checkpointing, chunked loss, compact optimizer state, gradient
   accumulation. A model, a policy and a batch are compiled into a schedule: one flat list of operations over
   named tensors. It holds the forward pass, the backward pass, recomputation, loss and optimizer. Memory is
   arithmetic on that list, so mtt knows every byte before it allocates anything.

   WHAT IT DOES NOT DO
   No automatic differentiation, no other architectures, one GPU only, no fine-tuning of foreign models, no
   network access. It runs on POSIX systems with little-endian processors.

   WORDS
   token         an integer id that the tokenizer makes of a piece of text
   micro-batch   `batch` sequences of `seq_len` tokens
   step          one update of the weights from `accumulate` micro-batches
   model         the network
   policy        how the model is held in memory and computed
   schedule      the operations of a micro-batch and of a step, in order
   plan          bytes, offsets and timeline of a schedule
   arena         the one block of memory that a plan fills
   backend       runs the operations: the CPU here, a CUDA device in mtt_kernels.cu
   state         tensors that live from step to step: weights, moments, counters
   recompute     run a forward operation again in the backward pass instead of keeping its result;
                 also called gradient checkpointing

   HOW TO USE IT
   Each level works without the ones after it.
   1. Text and tokens: mtt_prepare makes a tokenizer and token files from text. mtt_dataset_open and
      mtt_batches_init read them.
   2. The plan: mtt_plan, mtt_plan_max_batch and mtt_policy_fit answer without a device.
      mtt_schedule_print shows the program.
   3. The trainer: mtt_trainer_create, mtt_train_step, mtt_evaluate_tokens, mtt_generate, mtt_save,
      mtt_resume.
   Descriptors are structs in which zero means the default. mtt_*_resolve fills the defaults in. Functions
   return a status; the environment's `error` then says what is wrong and how to fix it. examples/hello.c is
   the shortest whole program, examples/train.c a full trainer.

   MEMORY
   Let P be the number of parameters, R = batch * seq_len rows, L layers of width C, an MLP of width F = 4C, H
   heads, a vocabulary of V, and s bytes an element (4, or 2 under BF16 and FP16). When the backward pass
   begins, memory holds
      state        P (4 + 8) bytes in FP32; P (2 + 4 + 8) with 16-bit weights, FP32 masters and moments;
                   P (2 + 3.125) compact
      activations  R L s (8C + 2F) with nothing recomputed; selective keeps 6C + F, layer C alone
      scores       L batch H seq_len^2 s, or 0 with flash attention
      logits       R V s, or a chunk of 1024 rows, 2048 on CUDA
   Gradients (4 bytes each, fewer under MTT_STATE_COMPACT) live until the step. These formulas are for
   orientation: the plan adds up the schedule.

   ATTENTION AND WINDOWS
   Query i attends keys max(0, i - W + 1) .. i. W counts the query itself: W = 1 attends nothing else.
   W >= seq_len, or 0, is full causal attention. With W = 2 and four tokens, a row for each query:
      1 0 0 0 / 1 1 0 0 / 0 1 1 0 / 0 0 1 1

   NUMBERS
   Sums, softmax, statistics of norms, losses, weight gradients, moments and masters are FP32. Sums over whole
   tensors are double. 16-bit stores round to nearest even; the compact state rounds stochastically.
   Recomputation never changes a bit. Flash attention, windows of full length and the chunked loss change only
   the order of sums. Dropout is a function of (seed, micro-batch, site, layer, element), so recomputation
   replays it. The same seed, build and machine give the same bits, on the CPU for any number of threads
   unless a BLAS is in use.
   FP16 scales the loss: a step that overflows is skipped and halves the scale, 2000
   good steps double it.

   OPTIONS, defined before the include. "here": only where MTT_IMPLEMENTATION is; "everywhere": in every file
      MTT_IMPLEMENTATION    here        compile the implementation; include mtt.h first, it asks for POSIX
      MTT_STATIC            everywhere  make all functions static, so that two files can hold implementations
      MTTDEF                everywhere  the text before each function's declaration, default extern
      MTT_CBLAS             here        FP32 products through cblas.h; use a BLAS with OpenMP threads
      MTT_CUDA              everywhere  mtt_kernels.cu is linked, with -lcublasLt: mtt_cuda_backend works
      MTT_SEPARATE_ALLOCS   here        a block for each tensor instead of the arena, for sanitizers
      MTT_DOCUMENT_BYTES    here        least bytes of a document cut from plain text, default 4096
      MTT_DOCUMENT_LIMIT    here        most bytes of a line of JSONL, default 2^30
   -fopenmp makes it parallel. stb_sprintf.h must be found, as stb_sprintf.h or stb/stb_sprintf.h; it stays
   private.

   FAILURES
   Nothing exits, aborts or prints. A failed call leaves its object as it was. Every field of a file is
   checked. Files are replaced by writing a temporary beside them, syncing and renaming it. All size
   arithmetic is checked. */
#ifndef MTT_H_INCLUDED
#define MTT_H_INCLUDED
#define MTT_VERSION 20000 /* major * 10000 + minor * 100 + patch */

#if defined(MTT_IMPLEMENTATION) && !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#define _POSIX_C_SOURCE 200809L /* mmap, fsync and clock_gettime under -std=c99 */
#endif
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __GNUC__
#define MTT__UNUSED __attribute__((unused))
#else
#define MTT__UNUSED
#endif

#ifndef MTTDEF
#ifdef MTT_STATIC
#define MTTDEF static MTT__UNUSED
#else
#define MTTDEF extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------------------------------- status ---- */

/* Every function that can fail returns a status. The environment then holds the reason and the remedy. */
#define MTT_STATUSES(X)                                                                 \
    X(MTT_OK, "ok")                                                                     \
    X(MTT_END, "nothing is left to read")                                               \
    X(MTT_E_ARGUMENT, "an argument or a combination of settings is invalid")            \
    X(MTT_E_MEMORY, "out of host memory")                                               \
    X(MTT_E_BUDGET, "does not fit the memory budget or the device")                     \
    X(MTT_E_FILE, "a file could not be opened, read or written")                        \
    X(MTT_E_FORMAT, "a file is malformed")                                              \
    X(MTT_E_MISMATCH, "a file belongs to another configuration")                        \
    X(MTT_E_DATA, "too little data")                                                    \
    X(MTT_E_NUMBERS, "the loss is no longer a finite number")                           \
    X(MTT_E_DEVICE, "the device reported an error")

#define MTT__ENUM(name, text) name,
typedef enum mtt_status { MTT_STATUSES(MTT__ENUM) MTT_STATUS_COUNT } mtt_status;

/* The text of a status, in static storage. */
MTTDEF const char *mtt_status_string(mtt_status status);

/* Source of host memory, and place of the last error. Zero it, then set what you want to change. One
   environment serves one thread at a time and must outlive every object made with it. Functions accept NULL
   instead. */
typedef struct mtt_env {
    void *(*alloc)(void *user, size_t bytes); /* default malloc; returns NULL when out of memory */
    void (*free)(void *user, void *block);    /* default free; set both or neither */
    void *user;                               /* passed to both */
    char error[1024];                         /* the last failure in words, and its remedy */
} mtt_env;

/* Receives text. `user` is the caller's. */
typedef void (*mtt_write_fn)(void *user, const char *text, size_t bytes);

/* ---------------------------------------------------------------------------------- model and policy ---- */

typedef enum mtt_positions { MTT_POSITIONS_SINUSOIDAL, MTT_POSITIONS_LEARNED } mtt_positions;

/* The network: a pre-norm decoder. Zero means the default; there are no hidden settings. */
typedef struct mtt_model_desc {
    int layers;              /* transformer blocks, 1..1024, default 4 */
    int heads;               /* attention heads, 1..1024, default 8 */
    int d_model;             /* width, 8..16384, a multiple of 8 * heads, default 256; a head is 8..256 */
    int d_ff;                /* width inside the MLP, 8..131072, a multiple of 8, default 4 * d_model */
    int vocab;               /* ids, 1..2^24, default 10000 */
    int max_seq;             /* longest sequence, 1..2^20, default 1024; sizes the learned positions only */
    mtt_positions positions; /* default sinusoidal, 0.02 times sin and cos: no parameters */
    int tied_head;           /* 1 = the head is the token embedding; default 0, a matrix of its own */
    int no_head_bias;        /* 1 = logits without a bias; default 0 */
    float dropout;           /* probability 0..0.9, at embedding, attention and both branches; default 0 */
} mtt_model_desc;

/* FP32: everything in 32 bits. TF32: the same in memory; products round their operands to 10 bits of mantissa
   where the device can (the CPU computes them in FP32). BF16, FP16: activations, their gradients and the
   weights in use are 16 bits; master weights, moments, weight gradients, statistics and sums are FP32. FP16
   scales the loss dynamically. */
typedef enum mtt_precision { MTT_FP32, MTT_TF32, MTT_BF16, MTT_FP16 } mtt_precision;

/* Plain: scores and probabilities are in memory, T x T each. Flash: tiles and an online softmax (Dao et al.
   2022). */
typedef enum mtt_attention { MTT_ATTENTION_PLAIN, MTT_ATTENTION_FLASH } mtt_attention;

/* What the backward pass recomputes instead of keeping it (Chen et al. 2016; Korthikanti et al. 2022):
      none
      selective   norms, GELU and plain attention's probabilities
      layer       everything but each layer's input
      segments    everything but the input of every `segment`th layer, half a layer at a time, much of it more
                  than once: the least memory
      budget      layer for the first layers, selective for the next, none for the rest: the cheapest such
                  choice that fits `budget_bytes`
   Layer and segments keep more in the last layers, which the backward pass needs first, as far as that takes
   no more memory. Recomputation never changes a bit of the result. */
typedef enum mtt_recompute {
    MTT_RECOMPUTE_NONE,
    MTT_RECOMPUTE_SELECTIVE,
    MTT_RECOMPUTE_LAYER,
    MTT_RECOMPUTE_SEGMENTS,
    MTT_RECOMPUTE_BUDGET
} mtt_recompute;

/* Full: the logits of all tokens are in memory. Chunked: those of a few rows at a time; their gradients are
   made at once. */
typedef enum mtt_loss { MTT_LOSS_FULL, MTT_LOSS_CHUNKED } mtt_loss;

/* State of the optimizer. Full: FP32 moments, and an FP32 master for a 16-bit weight. Compact, after
   FlashOptim (arXiv 2602.23349): a 16-bit weight gets 8 more mantissa bits, and moments are 8 bits in groups
   of 32 with a 16-bit scale. That is 5.125 bytes a parameter instead of 14; under FP32 and TF32, whose
   weights stay, 6.125 instead of 12. Rounding is stochastic, a function of (seed, update, parameter,
   element). If nothing adds to them (accumulate is 1), gradients of the layers' matrices are as wide as the
   weights. */
typedef enum mtt_state { MTT_STATE_FULL, MTT_STATE_COMPACT } mtt_state;

typedef enum mtt_device { MTT_DEVICE_CPU, MTT_DEVICE_CUDA } mtt_device;

/* How the model is held in memory and computed. */
typedef struct mtt_policy {
    mtt_precision precision; /* default FP32 */
    mtt_attention attention; /* default plain */
    int window;              /* keys that a query attends, itself counted; default 0, all up to it. Saves
                                memory and time with flash attention alone: plain attention keeps T x T */
    mtt_recompute recompute; /* default none */
    int segment;             /* layers per segment, 1..1024, default the square root of layers, rounded up */
    mtt_loss loss;           /* default full */
    int loss_chunk_rows;     /* tokens of a chunk of logits, 1..2^24, default 1024, on CUDA 2048 */
    mtt_state state;         /* default full */
    int accumulate;          /* micro-batches per step, 1..2^20, default 1; above 1, gradients are kept */
    size_t budget_bytes;     /* for MTT_RECOMPUTE_BUDGET, required there */
    int split;               /* 1 = a budget may cut the batch into equal micro-batches where that is faster
                                than recomputation: same mean loss, other sums and dropout; default 0 */
    mtt_device device;       /* target of the plan, default the CPU; a trainer takes its backend's */
    size_t workspace_bytes;  /* scratch of products on CUDA, default 32 MiB; raised where an op needs more */
} mtt_policy;

typedef enum mtt_lr_schedule { MTT_LR_CONSTANT, MTT_LR_LINEAR, MTT_LR_COSINE } mtt_lr_schedule;

/* AdamW with decoupled decay (Loshchilov & Hutter 2019) on matrices only. Zero means the default; where the
   default is not zero, a negative number means none. */
typedef struct mtt_optim_desc {
    float lr;                    /* peak learning rate, above 0, at most 100, default 3e-4 */
    float beta1, beta2;          /* below 1, default 0.9 and 0.999 */
    float eps;                   /* at most 1, default 1e-8 */
    float weight_decay;          /* at most 100, default 0.01 */
    float clip;                  /* largest global norm of the gradient, default 1 */
    mtt_lr_schedule lr_schedule; /* after the warmup, default constant */
    int64_t warmup_steps;        /* W: step k, from 0, has (k + 1) / W of the rate; default 0 */
    int64_t total_steps;         /* end of linear and cosine; required for them */
    float min_lr;                /* learning rate at the end, default 0 */
    float loss_scale;            /* FP16's first loss scale, default 65536 */
    uint64_t seed;               /* of weights and dropout, default 0 */
} mtt_optim_desc;

/* The descriptors with every default filled in. A fault of any field is reported, all faults at once, each
   with its remedy. mtt_policy_resolve takes a resolved model. */
MTTDEF mtt_status mtt_model_resolve(mtt_env *env, const mtt_model_desc *model, mtt_model_desc *resolved);
MTTDEF mtt_status mtt_policy_resolve(mtt_env *env, const mtt_policy *policy, const mtt_model_desc *model,
                                     int batch, int seq_len, mtt_policy *resolved);
MTTDEF mtt_status mtt_optim_resolve(mtt_env *env, const mtt_optim_desc *optim, mtt_optim_desc *resolved);

/* The learning rate of a step, counted from 0. */
MTTDEF float mtt_learning_rate(const mtt_optim_desc *resolved, int64_t step);

/* A technique in words joined by _, for example bf16_flash_window16. The words: fp32 tf32 bf16 fp16, flash,
   windowN (with flash), selective checkpointing segments budget, chunked, compact, split. mtt_policy_parse
   sets what the words say and leaves the rest of `policy`; bsN sets *batch, and is refused where `batch` is
   NULL. mtt_policy_name writes the words of a policy, cut at the capacity, and returns their length. */
MTTDEF mtt_status mtt_policy_parse(mtt_env *env, const char *words, mtt_policy *policy, int *batch);
MTTDEF size_t mtt_policy_name(const mtt_policy *policy, char *text, size_t capacity);

/* The fields of a descriptor, for programs that make command lines, forms or files of them. */
typedef enum mtt_field_kind {
    MTT_FIELD_INT,
    MTT_FIELD_INT64,
    MTT_FIELD_BYTES, /* size_t */
    MTT_FIELD_FLOAT,
    MTT_FIELD_CHOICE, /* an enum */
    MTT_FIELD_FLAG    /* an int, 0 or 1 */
} mtt_field_kind;

typedef struct mtt_field {
    const char *name;         /* as in the struct */
    mtt_field_kind kind;
    size_t offset;            /* in the struct */
    double fallback;          /* the default; 0 where it depends on other fields, which `help` then says */
    double low, high;         /* range */
    const char *choices;      /* names of an enum's values, joined by |; NULL for other kinds */
    const char *help;
} mtt_field;
MTTDEF const mtt_field *mtt_model_fields(int *count);
MTTDEF const mtt_field *mtt_policy_fields(int *count);
MTTDEF const mtt_field *mtt_optim_fields(int *count);

/* ---------------------------------------------------------------------------------------------- plan ---- */

/* What memory is spent on. */
#define MTT_CATEGORIES(X)                                                                              \
    X(MTT_WEIGHTS, "weights")         /* parameters in the precision of the computation */             \
    X(MTT_OPTIMIZER, "optimizer")     /* moments, and FP32 masters or 8 more bits of 16-bit weights */ \
    X(MTT_GRADIENTS, "gradients")     /* of parameters, until the step */                              \
    X(MTT_ACTIVATIONS, "activations") /* of the layers, and their gradients */                         \
    X(MTT_SCORES, "scores")           /* plain attention's T x T matrices and their gradients */       \
    X(MTT_LOGITS, "logits")           /* of the head; their gradients take the same place */           \
    X(MTT_WORKSPACE, "workspace")     /* scratch of operations */                                      \
    X(MTT_DATA, "data")               /* tokens, targets, row losses, position table, counters */
typedef enum mtt_category { MTT_CATEGORIES(MTT__ENUM) MTT_CATEGORY_COUNT } mtt_category;

typedef enum mtt_phase { MTT_FORWARD, MTT_BACKWARD, MTT_STEP, MTT_PHASE_COUNT } mtt_phase;

MTTDEF const char *mtt_category_name(mtt_category category);
MTTDEF const char *mtt_phase_name(mtt_phase phase);

/* Results of arithmetic on the schedule: no device, no allocation of the model's size. */
typedef struct mtt_plan_report {
    int64_t parameters;                /* without the padding of the vocabulary */
    size_t arena_bytes;                /* the one allocation, exactly */
    size_t peak_bytes;                 /* most bytes live at once; packing makes the arena of it */
    size_t phase_peak_bytes[MTT_PHASE_COUNT];
    size_t bytes[MTT_CATEGORY_COUNT];  /* at the peak; they add up to peak_bytes */
    size_t state_bytes;                /* what lives from step to step */
    int peak_op;                       /* index of the operation at the peak */
    int ops, tensors;
    int recompute_layers, recompute_selective; /* layers recomputed whole and in part */
    int micro_batches;                 /* parts of the batch: 1, or more where the policy has `split` */
    double flops, recompute_flops;     /* of one micro-batch and the step; the second is part of the first */
    double traffic_bytes;              /* read and written by all operations; in-place changes count twice */
} mtt_plan_report;

/* The plan of a step: micro-batches of `batch` sequences of `seq_len` tokens. MTT_E_BUDGET: larger than
   memory can be. */
MTTDEF mtt_status mtt_plan(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy, int batch,
                           int seq_len, mtt_plan_report *report);
/* The largest batch, not split, whose arena is at most `budget_bytes`; at most 2^20. MTT_E_BUDGET: not even
   one sequence fits; the error says what it needs. */
MTTDEF mtt_status mtt_plan_max_batch(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                     int seq_len, size_t budget_bytes, int *batch);
/* The fastest policy, by the schedule's FLOPs and traffic, whose arena is at most `budget_bytes`. It varies
   what leaves the result the same: recomputation, loss, attention, and micro-batches if the policy has
   `split`. MTT_E_BUDGET: none fits; the error says by how much the smallest misses. */
MTTDEF mtt_status mtt_policy_fit(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                 int batch, int seq_len, size_t budget_bytes, mtt_policy *fit);
/* One JSON object. Returns the length of the text, which is cut at the capacity. */
MTTDEF size_t mtt_plan_json(const mtt_plan_report *report, char *text, size_t capacity);
/* The same as a table for people, in MiB (2^20 bytes). */
MTTDEF void mtt_plan_print(const mtt_plan_report *report, mtt_write_fn write, void *user);

/* The schedule: every operation of a step, in order, with its cost and what lives while it runs. */
typedef struct mtt_schedule mtt_schedule;

typedef struct mtt_op_info {
    const char *name;                 /* as mtt_schedule_print shows it */
    mtt_phase phase;
    int layer;                        /* -1 outside the layers */
    int recomputed;                   /* 1 = run again for the backward pass */
    double flops, traffic_bytes;
    int64_t width_in, width_out;      /* last dimension of the first input and of the first output */
    size_t live_bytes;                /* during the operation */
    size_t bytes[MTT_CATEGORY_COUNT]; /* the same by category */
} mtt_op_info;

MTTDEF mtt_status mtt_schedule_create(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                      int batch, int seq_len, mtt_schedule **out);
MTTDEF void mtt_schedule_destroy(mtt_schedule *schedule);
MTTDEF void mtt_schedule_report(const mtt_schedule *schedule, mtt_plan_report *report);
MTTDEF int mtt_schedule_op(const mtt_schedule *schedule, int index, mtt_op_info *info); /* 0 past the end */
/* One line for each operation: shows what gradient checkpointing, flash attention or a chunked loss really
   do. */
MTTDEF void mtt_schedule_print(const mtt_schedule *schedule, mtt_write_fn write, void *user);
/* The plan and the timeline of memory as one JSON object: {"plan": ..., "timeline": [{"op", "phase", "layer",
   "recomputed", "live_bytes", "flops", "traffic_bytes", "bytes": {"weights", ...}}, ...]}. */
MTTDEF void mtt_schedule_json(const mtt_schedule *schedule, mtt_write_fn write, void *user);

/* ------------------------------------------------------------------------------------------- trainer ---- */

/* Text, the subject of the sections after this one. */
typedef struct mtt_tokenizer mtt_tokenizer;
typedef struct mtt_tokens mtt_tokens;
typedef struct mtt_batches mtt_batches;

/* Runs the operations: the CPU here, a CUDA device in mtt_kernels.cu. */
typedef struct mtt_backend mtt_backend;
MTTDEF const mtt_backend *mtt_cpu_backend(void);
/* Fills in the backend of a CUDA device, counted from 0. MTT_E_DEVICE: there is none, or the build has no
   MTT_CUDA. With MTT_CUDA the function is in mtt_kernels.cu. */
#ifdef MTT_CUDA
mtt_status mtt_cuda_backend(mtt_env *env, int device, mtt_backend *backend);
#else
MTTDEF mtt_status mtt_cuda_backend(mtt_env *env, int device, mtt_backend *backend);
#endif

typedef struct mtt_trainer mtt_trainer;

typedef struct mtt_step_info {
    int64_t step;     /* steps done, this one included */
    double loss;      /* mean cross entropy over the targets that count, in nats */
    int64_t targets;  /* targets that count */
    int64_t hits;     /* targets with the largest logit */
    float grad_norm;  /* global, before clipping */
    float lr;
    float loss_scale; /* 1 except under FP16 */
    int skipped;      /* 1 = FP16 overflow: nothing was updated, the loss scale was halved */
    double ms;        /* wall clock */
    size_t arena_bytes;
} mtt_step_info;

/* Builds the schedule, takes the arena from the backend in one allocation and fills it with initial weights.
   */
MTTDEF mtt_status mtt_trainer_create(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                     const mtt_optim_desc *optim, const mtt_backend *backend, int batch,
                                     int seq_len, mtt_trainer **out);
MTTDEF void mtt_trainer_destroy(mtt_trainer *trainer);
/* One optimizer step over accumulate * batch * seq_len tokens and targets, which are copied before it
   returns. A target of -1 does not count. MTT_E_NUMBERS: the loss or the gradient is not finite; the weights
   are as before the step. Where `info` is NULL the call does not wait for a device; the next call with `info`
   then reports a failure, and the weights are as before the first step that failed. */
MTTDEF mtt_status mtt_train_step(mtt_trainer *trainer, const int32_t *tokens, const int32_t *targets,
                                 mtt_step_info *info);
/* Loss of batch * seq_len tokens without dropout. Changes nothing. Sets loss, targets, hits, ms. */
MTTDEF mtt_status mtt_evaluate(mtt_trainer *trainer, const int32_t *tokens, const int32_t *targets,
                               mtt_step_info *info);
/* Quality over a whole token file, in order: the trainer's batch and sequence length, at most `batches` of
   them (0 = all). The tokenizer says how many bytes of text the targets are; without one bits_per_byte is 0.
   */
typedef struct mtt_quality {
    double loss, perplexity; /* mean cross entropy in nats, and e to the power of it */
    double bits_per_byte;    /* comparable between vocabularies, unlike perplexity */
    double accuracy;         /* share of targets with the largest logit */
    int64_t targets;
} mtt_quality;
MTTDEF mtt_status mtt_evaluate_tokens(mtt_trainer *trainer, const mtt_tokens *tokens,
                                      const mtt_tokenizer *tokenizer, int batches, mtt_quality *quality);
/* The `vocab` logits of the token after `count` tokens; the model sees the last seq_len of them. */
MTTDEF mtt_status mtt_next_logits(mtt_trainer *trainer, const int32_t *tokens, int count, float *logits);
/* Draws an id at a temperature (0 = the largest logit) from the top_k largest (0 = all); a function of (seed,
   index). */
MTTDEF int32_t mtt_sample(const float *logits, int vocab, float temperature, int top_k, uint64_t seed,
                          uint64_t index);

/* Continues a prompt by `count` tokens and writes them one by one, without the prompt. Stops at
   <|endoftext|>. */
MTTDEF mtt_status mtt_generate(mtt_trainer *trainer, mtt_tokenizer *tokenizer, const char *prompt, int count,
                               float temperature, int top_k, uint64_t seed, mtt_write_fn write, void *user);

/* Steps done; without info, steps handed to the device. */
MTTDEF int64_t mtt_trainer_step(const mtt_trainer *trainer);
/* Bytes by which the device's free memory has shrunk since just before the arena was taken, by any process.
   The CPU does not count and answers the arena. On CUDA it is the arena rounded up to pages of 2 MiB. A
   process's first trainer of its kind takes 2 to 18 MiB more, for the driver's graphs and the code of kernels
   (measured on an H200). */
MTTDEF size_t mtt_trainer_device_bytes(const mtt_trainer *trainer);
MTTDEF const mtt_schedule *mtt_trainer_schedule(const mtt_trainer *trainer);
/* Mean time in ms of operation `index` of the schedule, run `times` times on the operands of the last step.
   The trainer cannot go on training afterwards: it updates weights if `index` is the update. */
MTTDEF mtt_status mtt_profile(mtt_trainer *trainer, int index, int times, double *ms);

/* Parameters by number, from 0, in Hugging Face's GPT-2 names; NULL past the last. shape[2] is rows and
   columns, or elements and 0. */
MTTDEF const char *mtt_parameter(const mtt_trainer *trainer, int index, int64_t shape[2]);
/* Copies a parameter's FP32 values out or in: masters and 16-bit copies alike, rounded in the compact state.
   Gradients are those of the last step. They can be read when the policy accumulates (accumulate > 1), since
   they stay in memory then. */
MTTDEF mtt_status mtt_parameter_get(mtt_trainer *trainer, int index, float *values);
MTTDEF mtt_status mtt_parameter_set(mtt_trainer *trainer, int index, const float *values);
MTTDEF mtt_status mtt_gradient_get(mtt_trainer *trainer, int index, float *values);

/* One safetensors file: weights, moments, step, loss scale, seed, the loader's cursor and the configuration,
   with a checksum for each tensor. At any instant the path holds the old checkpoint or the new one. `batches`
   may be NULL. */
MTTDEF mtt_status mtt_save(mtt_trainer *trainer, const char *path, const mtt_batches *batches);
/* Continues exactly where mtt_save stopped. The model must be the same, or MTT_E_MISMATCH names the
   difference. Policy, batch, backend and learning rate may differ; the seed is the file's. The file holds
   FP32 in either state: the compact state's values exactly, and a compact trainer rounds those of a full one.
   A damaged file is refused before anything changes. */
MTTDEF mtt_status mtt_resume(mtt_trainer *trainer, const char *path, mtt_batches *batches);

/* ------------------------------------------------------------------------------------------------- tokenizer ---- */

/* Byte-level BPE with GPT-2's pre-tokenizer (Radford et al. 2019): decode(encode(x)) == x for every byte string. Or BERT's
   WordPiece (Devlin et al. 2019), which is not lossless: line ends and other blanks become single spaces, punctuation stands
   alone, a word that the pieces cannot spell or of over 100 characters is [UNK]. Both give the ids of Hugging Face's
   tokenizers. One tokenizer serves one thread at a time, since encoding keeps a cache of words. */
typedef struct mtt_bpe_trainer mtt_bpe_trainer;
typedef enum mtt_tokenizer_kind { MTT_BPE, MTT_WORDPIECE } mtt_tokenizer_kind;

/* What is done to a text before its words are cut. The defaults keep Polish as it is; BERT's uncased models want 1, 1, 0, 0. */
typedef struct mtt_wordpiece {
    int lowercase;     /* default 0 */
    int strip_accents; /* e with an ogonek becomes e, l with a stroke stays: it has no accent; default 0 */
    int keep_controls; /* control characters are text; default 0, they are dropped */
    int keep_cjk;      /* default 0, each Chinese character is a word of its own */
} mtt_wordpiece;

/* Trains a tokenizer: create, add each document, finish, destroy. Pairs are counted in 64 bits, ties go to the pair
   with the smallest ids, and the result depends on neither the number of threads nor the order of the documents.
   Ids: 0 is <|endoftext|>, 1..256 the bytes in GPT-2's alphabet order, then one merge each. WordPiece is trained alike: 0..4
   are [PAD] [UNK] [CLS] [SEP] [MASK], then the 1,000 most frequent characters by code point, ##characters by code point, and
   merges of pairs that occur twice or more. */
MTTDEF mtt_status mtt_bpe_trainer_create(mtt_env *env, mtt_bpe_trainer **out);
MTTDEF mtt_status mtt_wordpiece_trainer_create(mtt_env *env, const mtt_wordpiece *options /* or NULL */, mtt_bpe_trainer **out);
MTTDEF mtt_status mtt_bpe_trainer_add(mtt_bpe_trainer *trainer, const char *text, size_t bytes);
/* vocab: 257 and up (for WordPiece, what holds the characters), default 10,000 when 0; fewer result when the text has no more
   pairs. The trainer can be added to and finished again. */
MTTDEF mtt_status mtt_bpe_trainer_finish(mtt_bpe_trainer *trainer, int vocab, mtt_tokenizer **out);
MTTDEF void mtt_bpe_trainer_destroy(mtt_bpe_trainer *trainer);

/* GPT-2's tokenizer (50,257 ids) from its merge list `vocab.bpe` alone. */
MTTDEF mtt_status mtt_tokenizer_gpt2(mtt_env *env, const char *path, mtt_tokenizer **out);
/* BERT's from its `vocab.txt`, a piece a line, [UNK] and [SEP] among them. */
MTTDEF mtt_status mtt_tokenizer_wordpiece(mtt_env *env, const char *path, const mtt_wordpiece *options /* or NULL */,
                                          mtt_tokenizer **out);
/* Saves and loads Hugging Face's tokenizer.json, restricted to byte-level BPE and BERT's WordPiece; a load refuses anything
   else by name. [CLS] and [SEP] are not put around a text. */
MTTDEF mtt_status mtt_tokenizer_save(const mtt_tokenizer *tokenizer, const char *path);
MTTDEF mtt_status mtt_tokenizer_load(mtt_env *env, const char *path, mtt_tokenizer **out);
MTTDEF void mtt_tokenizer_destroy(mtt_tokenizer *tokenizer);

MTTDEF int mtt_tokenizer_vocab(const mtt_tokenizer *tokenizer);       /* number of ids */
MTTDEF int mtt_tokenizer_end_of_text(const mtt_tokenizer *tokenizer); /* id that separates documents; [SEP] */
/* The bytes that mtt_decode writes for an id: nothing for <|endoftext|>, [PAD], [CLS], [SEP] and [MASK]; a WordPiece that
   begins a word brings a space with it. Bits per byte are of these bytes. Valid as long as the tokenizer; NULL for an id
   outside the vocabulary. */
MTTDEF const char *mtt_tokenizer_bytes(const mtt_tokenizer *tokenizer, int id, size_t *bytes);

/* Encodes text to at most `capacity` ids; *count is the number that the whole text needs, so capacity `bytes` is always
   enough, and a smaller one is refused with *count set. Special tokens in the text are ordinary text. Bytes that are not
   UTF-8 pass through BPE unharmed and are dropped by WordPiece. */
MTTDEF mtt_status mtt_encode(mtt_tokenizer *tokenizer, const char *text, size_t bytes, int32_t *ids, size_t capacity, size_t *count);
/* Decodes ids to at most `capacity` bytes, not terminated; *bytes is what the whole needs. */
MTTDEF mtt_status mtt_decode(const mtt_tokenizer *tokenizer, const int32_t *ids, size_t count, char *text, size_t capacity, size_t *bytes);

/* ------------------------------------------------------------------------------------------------------ data ---- */

/* Reads documents one after another from plain text, JSONL or standard input ("-"); never holds a file whole.
   JSONL is told by its first byte, '{', '"' or '['; its documents are the named field of each line, a string or a list of
   strings (joined by a blank line), or lines that are bare strings. Plain text is cut at blank lines into documents of
   4 KiB or more (MTT_DOCUMENT_BYTES), so that a split has something to divide. Windows line ends pass as they are. */
typedef struct mtt_corpus mtt_corpus;
MTTDEF mtt_status mtt_corpus_open(mtt_env *env, const char *path, const char *field /* default "text" */, mtt_corpus **out);
/* The next document, valid until the next call; MTT_END after the last. Errors name the line. */
MTTDEF mtt_status mtt_corpus_next(mtt_corpus *corpus, const char **text, size_t *bytes);
MTTDEF void mtt_corpus_close(mtt_corpus *corpus);

/* The three parts of a corpus. Of every 20 documents in a row, 17 go to train, 2 to valid and 1 to test (85 / 10 / 5 %);
   which ones depends on the seed alone. */
typedef enum mtt_split { MTT_TRAIN, MTT_VALID, MTT_TEST, MTT_SPLIT_COUNT } mtt_split;
MTTDEF mtt_split mtt_split_of(uint64_t seed, uint64_t document);

/* Text in, token files out: reads `input`, loads or trains a tokenizer, and writes {output}.tokenizer.json and
   {output}.train.tokens, .valid.tokens and .test.tokens, each by way of a temporary file. Documents are closed by
   <|endoftext|> or [SEP]. The tokenizer is trained on the train split alone. */
typedef struct mtt_prepare_desc {
    const char *input;     /* required: a file, or "-" for standard input, which is spooled beside the output */
    const char *output;    /* required: the prefix of the files written */
    const char *field;     /* JSONL field, default "text" */
    const char *tokenizer; /* tokenizer.json, GPT-2's vocab.bpe or BERT's vocab.txt; default: train one */
    int vocab;             /* ids of the trained tokenizer, default 10,000 */
    uint64_t seed;         /* of the split, default 0 */
    mtt_tokenizer_kind kind; /* what to train, default MTT_BPE */
    mtt_wordpiece wordpiece; /* how, and how to read with a vocab.txt */
} mtt_prepare_desc;

typedef struct mtt_prepare_report {
    uint64_t documents[MTT_SPLIT_COUNT], bytes[MTT_SPLIT_COUNT], tokens[MTT_SPLIT_COUNT];
    int vocab;
} mtt_prepare_report;

MTTDEF mtt_status mtt_prepare(mtt_env *env, const mtt_prepare_desc *desc, mtt_prepare_report *report);

/* A token file: a 64-byte header, then ids of 16 bits (vocabularies up to 65,536) or 32. Mapped, never loaded whole. */
MTTDEF mtt_status mtt_tokens_open(mtt_env *env, const char *path, mtt_tokens **out);
MTTDEF void mtt_tokens_close(mtt_tokens *tokens);
MTTDEF uint64_t mtt_tokens_count(const mtt_tokens *tokens);
MTTDEF int mtt_tokens_vocab(const mtt_tokens *tokens); /* ids are below this */
/* Copies `count` ids from `first` on; refuses a range outside the file and an id outside the vocabulary. */
MTTDEF mtt_status mtt_tokens_read(const mtt_tokens *tokens, uint64_t first, size_t count, int32_t *ids);

/* Batches of B sequences of T tokens. Sequence k holds ids kT .. kT+T of the file, targets one ahead of tokens. Shuffled
   batches run through a new permutation of the sequences each epoch, a function of (seed, epoch) alone; the cursor is a
   count of sequences, so a loader resumes anywhere. */
struct mtt_batches {
    const mtt_tokens *tokens;
    int batch, seq_len;
    uint64_t seed;
    int sequential;     /* 0 = shuffled without end; 1 = in order, once, the last batch filled up with targets -1 */
    uint64_t sequences; /* in the file */
    uint64_t cursor;    /* sequences handed out so far */
};

/* Refuses, before any work, a file that is shorter than a sequence. */
MTTDEF mtt_status mtt_batches_init(mtt_env *env, mtt_batches *batches, const mtt_tokens *tokens, int batch, int seq_len, uint64_t seed, int sequential);
/* Writes batch * seq_len tokens and as many targets; MTT_END when a sequential loader is through. */
MTTDEF mtt_status mtt_batches_next(mtt_batches *batches, int32_t *tokens, int32_t *targets);

/* ------------------------------------------------------------------------------------------- backend ---- */
/* For authors of a backend. Users of the library need nothing below this line. */

/* Type, bytes of an element, name in a safetensors file. */
#define MTT_DTYPES(X)                                                                   \
    X(MTT_F32, 4, "F32")                                                                \
    X(MTT_BF16_BITS, 2, "BF16")                                                         \
    X(MTT_F16_BITS, 2, "F16")                                                           \
    X(MTT_I32, 4, "I32")                                                                \
    X(MTT_U8, 1, "U8")
#define MTT__DTYPE_ENUM(dtype, bytes, name) dtype,
typedef enum mtt_dtype { MTT_DTYPES(MTT__DTYPE_ENUM) MTT_DTYPE_COUNT } mtt_dtype;

typedef struct mtt_tensor {
    char name[40];
    mtt_dtype dtype;
    mtt_category category;
    int rank;
    int64_t shape[4];
    size_t bytes;    /* of its elements; its slot in the arena is rounded up to 256 */
    size_t offset;   /* in the arena */
    void *data;      /* address; set once the arena exists */
    int first, last; /* operations between which it lives; state lives through all of them */
    int persistent;  /* 1 = state: the same place in every program */
    int role, layer; /* its row in the table of activations, and its layer; -1 = not an activation */
    int parameter;   /* the number of the parameter that it holds; -1 = none */
} mtt_tensor;

/* The numbers that a model, a batch and a policy fix for every operation. */
typedef struct mtt_shape {
    int batch, seq_len, layers, d_model, heads, heads_kv, head_dim, d_ff, vocab, vocab_padded;
    int window;    /* keys that a query attends; 0 = all up to it */
    int64_t rows;  /* batch * seq_len */
    float dropout; /* 0 in evaluation */
} mtt_shape;

/* Operations. A row: name; number of inputs; operands, inputs first; FLOPs; bytes moved; bytes of scratch on
   CUDA. A row makes `struct mtt_<name>` with its operands as members. An operand that is both input and
   output changes in place. Some operands may be absent (NULL): biases, positions' gradients, `joined`, the
   `y` of linear_gelu, the gradients of chunked_loss, `master`, and `ranges` on the CPU. grad_norm and adamw
   work on all parameters besides, mtt_op's `gradients` and `weights`. o: the row's struct. N: elements, W:
   width, B: bytes of a tensor. MOVED: each operand once, twice where it is read and written. cuBLASLt's
   scratch is not in the last column: it takes what mtt_policy.workspace_bytes gives. */
#define MTT_OPERANDS(...) mtt_tensor __VA_ARGS__;
#define MTT_OPS(X)                                                                                           \
    X(embed, 4, MTT_OPERANDS(*tokens, *wte, *positions, *control, *x),                                       \
      N(o->x), 3 * B(o->x), 0)                                                                               \
    X(norm, 3, MTT_OPERANDS(*x, *gain, *shift, *y, *stats),                                                  \
      8 * N(o->x), MOVED, 0)                                                                                 \
    X(linear, 3, MTT_OPERANDS(*x, *weight, *bias, *y),                                                       \
      2 * N(o->y) * W(o->x), MOVED, 0)                                                                       \
    X(gelu, 1, MTT_OPERANDS(*x, *y),                                                                         \
      12 * N(o->y), MOVED, 0)                                                                                \
    X(linear_gelu, 3, MTT_OPERANDS(*x, *weight, *bias, *pre, *y),                                            \
      (2 * W(o->x) + (o->y ? 12 : 0)) * N(o->pre), MOVED, 0)                                                 \
    X(residual, 3, MTT_OPERANDS(*x, *branch, *control, *sum),                                                \
      N(o->sum), MOVED, 0)                                                                                   \
    X(residual_norm, 5, MTT_OPERANDS(*x, *branch, *control, *gain, *shift, *sum, *y, *stats),                \
      9 * N(o->sum), MOVED, 0)                                                                               \
    X(attention_scores, 1, MTT_OPERANDS(*qkv, *scores),                                                      \
      2 * N(o->scores) * d->head_dim, MOVED, 0)                                                              \
    X(softmax, 1, MTT_OPERANDS(*scores, *probs),                                                             \
      5 * N(o->probs), MOVED, 0)                                                                             \
    X(dropout_scores, 2, MTT_OPERANDS(*probs, *control, *dropped),                                           \
      N(o->dropped), MOVED, 0)                                                                               \
    X(attention_values, 2, MTT_OPERANDS(*probs, *qkv, *out),                                                 \
      2 * N(o->probs) * d->head_dim, MOVED, 0)                                                               \
    X(flash, 2, MTT_OPERANDS(*qkv, *control, *out, *lse),                                                    \
      4 * mtt__attention_pairs(d) * d->head_dim, MOVED, 0)                                                   \
    X(pick_row, 2, MTT_OPERANDS(*x, *control, *row),                                                         \
      N(o->row), 2 * B(o->row), 0)                                                                           \
    X(cross_entropy, 2, MTT_OPERANDS(*logits, *targets, *losses),                                            \
      4 * N(o->logits), MOVED, 0)                                                                            \
    X(chunked_loss, 6, MTT_OPERANDS(*x, *weight, *bias, *targets, *control, *counters, *losses, *logits, *dx,\
      *d_weight, *d_bias),                                                                                   \
      (o->dx ? 6 : 2) * N(o->x) * d->vocab_padded, mtt__chunked_bytes(op), 0)                                \
    X(sum_loss, 2, MTT_OPERANDS(*losses, *control, *counters),                                               \
      N(o->losses), MOVED, 0)                                                                                \
    X(cross_entropy_backward, 5, MTT_OPERANDS(*logits, *losses, *targets, *control, *counters, *d_logits),   \
      4 * N(o->d_logits), MOVED, 0)                                                                          \
    X(linear_backward_weight, 2, MTT_OPERANDS(*x, *dy, *d_weight, *d_bias),                                  \
      2 * N(o->d_weight) * (N(o->x) / W(o->x)), MOVED, 0)                                                    \
    X(linear_backward_input, 2, MTT_OPERANDS(*dy, *weight, *dx),                                             \
      2 * N(o->dx) * W(o->dy), MOVED, 0)                                                                     \
    X(norm_backward, 5, MTT_OPERANDS(*dy, *x, *stats, *gain, *joined, *dx, *d_gain, *d_shift),               \
      14 * N(o->dx), MOVED, 8 * mtt__width(o->dx))                                                           \
    X(dropout_backward, 2, MTT_OPERANDS(*dy, *control, *dx),                                                 \
      N(o->dx), MOVED, 0)                                                                                    \
    X(gelu_backward, 2, MTT_OPERANDS(*dy, *x, *dx),                                                          \
      21 * N(o->dx), MOVED, 0)                                                                               \
    X(linear_backward_gelu, 3, MTT_OPERANDS(*dy, *weight, *pre, *dx, *d_bias),                               \
      2 * N(o->dx) * W(o->dy) + 21 * N(o->dx), MOVED, o->d_bias ? 8 * mtt__width(o->dx) : 0)                 \
    X(attention_values_backward, 3, MTT_OPERANDS(*d_out, *probs, *qkv, *d_probs, *d_qkv),                    \
      4 * N(o->d_probs) * d->head_dim, MOVED, 0)                                                             \
    X(softmax_backward, 3, MTT_OPERANDS(*d_probs, *probs, *control, *d_scores),                              \
      5 * N(o->d_scores), MOVED, 0)                                                                          \
    X(attention_scores_backward, 2, MTT_OPERANDS(*d_scores, *qkv, *d_qkv),                                   \
      4 * N(o->d_scores) * d->head_dim, MOVED, 0)                                                            \
    X(flash_backward, 5, MTT_OPERANDS(*d_out, *qkv, *out, *lse, *control, *d_qkv),                           \
      10 * mtt__attention_pairs(d) * d->head_dim, MOVED, mtt__flash_scratch(d, o->qkv->dtype, 2))            \
    X(embed_backward, 3, MTT_OPERANDS(*dx, *tokens, *control, *d_wte, *d_wpe),                               \
      N(o->dx), 3 * B(o->dx), mtt__sort_scratch(mtt__min(d->rows, MTT__SORT_LEAST), d->d_model))             \
    X(grad_norm, 2, MTT_OPERANDS(*control, *ranges, *counters),                                              \
      2 * PARAMETERS, MOVED, o->ranges ? 8 * mtt__range_blocks(o->ranges) : 0)                               \
    X(adamw, 3, MTT_OPERANDS(*control, *counters, *ranges, *master, *m, *v),                                 \
      16 * PARAMETERS, MOVED, 8)
#define MTT__OP_ENUM(name, inputs, operands, flops, bytes, scratch) MTT_OP_##name,
typedef enum mtt_op_kind { MTT_OPS(MTT__OP_ENUM) MTT_OP_KIND_COUNT } mtt_op_kind;
#define MTT__OP_STRUCT(name, inputs, operands, flops, bytes, scratch)                   \
    typedef struct mtt_##name { operands } mtt_##name;
MTT_OPS(MTT__OP_STRUCT)

typedef struct mtt_op {
    mtt_op_kind kind;
    mtt_phase phase;
    int layer;      /* -1 outside the layers */
    int site;       /* of its dropout or rounding */
    int recomputed; /* 1 = run again for the backward pass */
    int adds;       /* 1 = adds to the gradient of its first parameter, of which another op has made a part */
    int later;      /* 1 = of a micro-batch after the first one of a step; then `adds` is 1, too */
    int transposed; /* linear: the weight is [out, in], as the head's, and not [in, out] */
    int inputs, outputs;
    mtt_tensor **operands;             /* as in the row, inputs first: see MTT_OPERANDS_OF */
    mtt_tensor **gradients, **weights; /* grad_norm, adamw: of each parameter, in their order */
    int parameters;                    /* the number of these */
    const mtt_tensor *workspace;       /* scratch */
    const mtt_shape *shape;
    size_t live_bytes;                 /* during the operation, state included */
} mtt_op;

/* The operands by name: const mtt_norm *o = MTT_OPERANDS_OF(norm, op); then o->x, o->gain, ... */
#define MTT_OPERANDS_OF(name, op) ((const mtt_##name *)(const void *)(op)->operands)

/* What changes from micro-batch to micro-batch: a tensor, so that a captured graph can be replayed. */
typedef struct mtt_control {
    uint64_t seed, micro_batch; /* dropout is a function of both, the site, the layer and the element */
    float lr, beta1, beta2, eps, weight_decay, clip;
    int64_t targets;            /* that count, in all micro-batches of the step */
    int32_t scaling;            /* 1 = FP16: scale the loss, skip steps that overflow */
    int32_t row;                /* the row that pick_row takes */
} mtt_control;

/* What the device counts; the host reads it after a step. */
typedef struct mtt_counters {
    double loss, grad_norm;
    int64_t targets, hits, updates, steps; /* updates: steps that changed the weights */
    float loss_scale, step_scale;          /* of the next step; of the gradients in memory */
    float gradient_scale;                  /* undoes step_scale and clips */
    int32_t good_steps, skipped;           /* skipped: 1 = overflow under FP16; 2 = not finite in another
                                              precision, until the host resets it */
} mtt_counters;

struct mtt_backend {
    const char *name;
    mtt_device device;
    int index;
    mtt_status (*open)(mtt_env *env, const mtt_backend *backend, const mtt_policy *policy, void **context);
    void (*close)(void *context);
    mtt_status (*alloc)(void *context, size_t bytes, void **block);
    void (*release)(void *context, void *block);
    /* Of the device; both 0 if unknown. */
    mtt_status (*memory)(void *context, size_t *free_bytes, size_t *all_bytes);
    /* An upload is done when it returns. A download waits for all that was run. */
    mtt_status (*upload)(void *context, void *to, const void *from, size_t bytes);
    mtt_status (*download)(void *context, void *to, const void *from, size_t bytes);
    /* Runs the operations in order; may return before they are done. The list and its tensors stay where they
       are while the context is open, so it may be captured once and replayed. */
    mtt_status (*run)(void *context, const mtt_op *ops, int count);
    /* Set by a caller of mtt_cuda_backend who has his own: a cudaStream_t on which all work is ordered, and
       an allocator of device memory, aligned to 256 bytes (NULL = out of memory). Zero: a stream of its own,
       cudaMalloc and cudaFree. */
    void *stream;
    void *(*device_alloc)(void *user, size_t bytes);
    void (*device_free)(void *user, void *block);
    void *user;
};

/* ---- numbers that every backend computes alike: compiled for host and device ---- */

#ifdef __CUDACC__
#define MTT__BOTH static __host__ __device__ __forceinline__
#define MTT__UNROLL _Pragma("unroll")
#else
#define MTT__BOTH static inline MTT__UNUSED
#define MTT__UNROLL
#endif

MTT__BOTH int64_t mtt__min(int64_t a, int64_t b) { return a < b ? a : b; }
MTT__BOTH int64_t mtt__ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }
MTT__BOTH int64_t mtt__round_up(int64_t value, int64_t to) { return mtt__ceil_div(value, to) * to; }

MTT__BOTH int64_t mtt__elements(const mtt_tensor *t)
{
    int64_t product = 1;
    int i;
    for (i = 0; i < t->rank; i++) product *= t->shape[i];
    return product;
}

/* The last dimension, and the number of rows of that width. */
MTT__BOTH int64_t mtt__width(const mtt_tensor *t) { return t->shape[t->rank - 1]; }
MTT__BOTH int64_t mtt__rows(const mtt_tensor *t) { return mtt__elements(t) / mtt__width(t); }

MTT__BOTH uint32_t mtt__float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

MTT__BOTH float mtt__bits_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The upper 32 bits of a product. A device has an instruction for them. */
MTT__BOTH uint32_t mtt__multiply_high(uint32_t a, uint32_t b)
{
#ifdef __CUDA_ARCH__
    return __umulhi(a, b);
#else
    return (uint32_t)((uint64_t)a * b >> 32);
#endif
}

/* 128 random bits, returned as a value: a kernel keeps them in registers. */
typedef struct mtt_draw {
    uint32_t word[4];
} mtt_draw;

/* Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): 128 random bits as a
   function of a 128-bit counter and a 64-bit key, with no state to carry from one element to the next. */
MTT__BOTH mtt_draw mtt__draw(uint64_t key, uint64_t low, uint64_t high)
{
    uint32_t c0 = (uint32_t)low, c1 = (uint32_t)(low >> 32), c2 = (uint32_t)high, c3 = (uint32_t)(high >> 32);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    mtt_draw draw;
    int round;
    MTT__UNROLL
    for (round = 0; round < 10; round++) {
        uint32_t p_low = 0xd2511f53u * c0, p_high = mtt__multiply_high(0xd2511f53u, c0);
        uint32_t q_low = 0xcd9e8d57u * c2, q_high = mtt__multiply_high(0xcd9e8d57u, c2);
        c0 = q_high ^ c1 ^ k0;
        c1 = q_low;
        c2 = p_high ^ c3 ^ k1;
        c3 = p_low;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    draw.word[0] = c0;
    draw.word[1] = c1;
    draw.word[2] = c2;
    draw.word[3] = c3;
    return draw;
}

MTT__BOTH void mtt__philox(uint64_t key, uint64_t low, uint64_t high, uint32_t out[4])
{
    mtt_draw draw = mtt__draw(key, low, high);
    memcpy(out, draw.word, sizeof(draw.word));
}

/* The upper half of a counter: which site, which layer or tensor, and which micro-batch, update or epoch (its
   lower 40 bits). Streams of different sites never meet. The part of the step may be added later: stream |
   mtt__stream_step. */
MTT__BOTH uint64_t mtt__stream_step(uint64_t step) { return step & 0xffffffffffu; }
MTT__BOTH uint64_t mtt__stream(int site, int layer, uint64_t step)
{
    return (uint64_t)site << 56 | (uint64_t)layer << 40 | mtt__stream_step(step);
}

/* Of an operation's dropout; the micro-batch is added when it runs. */
MTT__BOTH uint64_t mtt__op_stream(const mtt_op *op)
{
    return mtt__stream(op->site, op->layer < 0 ? 0 : op->layer, 0);
}

/* 8 elements share a draw: element k of a draw has 16 bits of it. */
MTT__BOTH uint32_t mtt__draw_bits(const uint32_t draw[4], int k)
{
    return draw[k >> 1] >> (k & 1) * 16 & 0xffffu;
}

/* An element whose 16 bits are below the threshold is dropped; the others are multiplied by the scale. */
MTT__BOTH uint32_t mtt__dropout_threshold(float p) { return (uint32_t)(p * 65536.0f + 0.5f); }
MTT__BOTH float mtt__dropout_scale(uint32_t threshold) { return 65536.0f / (float)(65536u - threshold); }

/* The first key that a query attends; the last one is the query itself. */
MTT__BOTH int64_t mtt__first_key(int window, int64_t query)
{
    return window && query >= window ? query - window + 1 : 0;
}

/* 1 = every query attends one key, itself. Its weight is 1 whatever q and k are, so their gradients are 0.
   Computed, they would be rounding errors, of which AdamW makes full updates. */
MTT__BOTH int mtt__attends_one(const mtt_shape *d) { return d->window == 1 || d->seq_len == 1; }

/* Where q, k and v of a head are in rows of qkv: parts 0, 1, 2. Heads of q may share a head of k and v. */
typedef struct mtt_qkv {
    int heads, heads_kv, head_dim;
    int64_t row; /* elements between two tokens */
} mtt_qkv;

MTT__BOTH mtt_qkv mtt_qkv_of(const mtt_shape *d)
{
    mtt_qkv v;
    v.heads = d->heads;
    v.heads_kv = d->heads_kv;
    v.head_dim = d->head_dim;
    v.row = (int64_t)(d->heads + 2 * d->heads_kv) * d->head_dim;
    return v;
}

/* The first column of a query head's part. */
MTT__BOTH int64_t mtt_qkv_column(const mtt_qkv *v, int part, int head)
{
    int kv = head / (v->heads / v->heads_kv);
    return (int64_t)(part == 0 ? head : v->heads + (part - 1) * v->heads_kv + kv) * v->head_dim;
}

/* ---- compact state ---- */

/* Each store takes 16 random bits, as a number in [0, 1) that is added to the part cut off. MTT__NEAREST, a
   half, rounds to nearest. Decoding and encoding again gives the same bits. Rounding to nearest would freeze
   v: a step changes it by 0.1 %, but codes are 0.4 % apart. Measured after 1,000 steps of a small model,
   against the full state: roots of the head's v are 18 % off (standard deviation) and weights 7e-3 (root mean
   square); stochastically, 4 % and 1e-3. */
enum { MTT__GROUP = 32, MTT__NEAREST = 0x8000 };

/* A weight and its byte are the upper 24 bits of a float; for FP16 the float is multiplied by 2^-112, which
   gives it a half's exponent. The 16-bit weight is rounded to nearest, so the byte is the signed distance
   from it, in 256ths of its last place. */
MTT__BOTH void mtt__split_weight(float x, int fp16, uint32_t random, uint16_t *weight, uint8_t *rest)
{
    uint32_t bits = mtt__float_bits(fp16 ? x * 1.925929944387236e-34f : x);
    uint32_t top = fp16 ? 0x0f800000u : 0x7f800000u;
    uint32_t magnitude = (bits & 0x7fffffffu) < top ? bits & 0x7fffffffu : top;
    uint32_t code = fp16 ? (magnitude + (random >> 11)) >> 5 : (magnitude + (random >> 8)) >> 8;
    *weight = (uint16_t)((code + 128) >> 8 | (bits >> 16 & 0x8000u));
    *rest = (uint8_t)code;
}

MTT__BOTH float mtt__join_weight(uint16_t weight, uint8_t rest, int fp16)
{
    uint32_t code = ((weight & 0x7fffu) << 8) + rest - (uint32_t)(rest & 128u) * 2;
    uint32_t sign = (uint32_t)(weight & 0x8000u) << 16;
    if (fp16) return mtt__bits_float(code << 5 | sign) * 5.192296858534828e33f;
    return mtt__bits_float(code << 8 | sign);
}

/* The scale of a group: a float without sign, 6 bits of exponent and 10 of mantissa, 2^-47 to 2^17. A half
   would end at 6e-8, and moments of large models begin there. */
MTT__BOTH uint16_t mtt__to_scale(float x, uint32_t random)
{
    uint32_t code = (mtt__float_bits(x) + (random >> 3)) >> 13;
    code = code > 80u << 10 ? code - (80u << 10) : 0;
    return (uint16_t)(code < 65535 ? code : 65535);
}

MTT__BOTH float mtt__from_scale(uint16_t scale)
{
    return scale ? mtt__bits_float(((uint32_t)scale + (80u << 10)) << 13) : 0.0f;
}

/* The code of a moment over its scale, from `y`, which is 65536 times the code before rounding. A first
   moment r in [-1, 1] has the code 127 * 2r / (1 + |r|), finer where r is small. A second moment is stored by
   its root r in [0, 1], as 255 r, at least 1 where r > 0: m over a root of 0 would be a jump. Values within
   half a unit of the top are stored as the top, so decoding and encoding again gives the same scale. */
MTT__BOTH uint8_t mtt__round_moment(float y, int second, uint32_t random)
{
    float top = (second ? 255.0f : 127.0f) * 65536.0f;
    if (fabsf(y) > top - 32768.0f) y = y < 0 ? -top : top;
    return (uint8_t)(((uint32_t)(int32_t)y + random) >> 16);
}

/* ---- loss and update ---- */

/* d loss / d logit = loss scale / targets that count in the whole step */
MTT__BOTH float mtt__loss_factor(const mtt_control *control, const mtt_counters *counters)
{
    return (float)((double)counters->loss_scale / (double)(control->targets ? control->targets : 1));
}

/* Global norm, clipping and dynamic loss scaling (Micikevicius et al. 2018) from the sum of squares of all
   gradients: after an overflow the step is skipped and the scale halves; after 2000 good steps it doubles. */
MTT__BOTH void mtt__scale_gradients(const mtt_control *control, mtt_counters *counters, double sum)
{
    double clip = control->clip, norm = sqrt(sum) / (double)counters->loss_scale;
    if (counters->skipped == 2) return;
    counters->grad_norm = norm;
    counters->step_scale = counters->loss_scale;
    counters->gradient_scale = 1.0f / counters->loss_scale;
    if (clip > 0 && norm > clip) counters->gradient_scale *= (float)(clip / norm);
    counters->skipped = sum <= 1.7e308 ? 0 : control->scaling ? 1 : 2;
    counters->updates += !counters->skipped;
    counters->steps += counters->skipped != 2;
    if (!control->scaling) return;
    if (counters->skipped) {
        counters->loss_scale *= 0.5f;
        counters->good_steps = 0;
    } else if (++counters->good_steps == 2000) {
        if (counters->loss_scale < 1e37f) counters->loss_scale *= 2.0f;
        counters->good_steps = 0;
    }
}

/* What AdamW computes once for a parameter. */
typedef struct mtt_adamw_rates {
    float step;       /* lr / (1 - b1^t) */
    float correction; /* 1 / sqrt(1 - b2^t) */
    float keep;       /* 1 - lr * decay for a matrix, 1 for a vector */
    float scale, b1, b2, eps;
} mtt_adamw_rates;

/* step and correction are powers in double; a device computes them once. */
MTT__BOTH float mtt__adamw_step(const mtt_control *c, const mtt_counters *counters)
{
    return (float)((double)c->lr / (1.0 - pow((double)c->beta1, (double)counters->updates)));
}

MTT__BOTH float mtt__adamw_correction(const mtt_control *c, const mtt_counters *counters)
{
    return (float)(1.0 / sqrt(1.0 - pow((double)c->beta2, (double)counters->updates)));
}

MTT__BOTH mtt_adamw_rates mtt__adamw_rates(const mtt_control *c, const mtt_counters *counters, int decays,
                                           float step, float correction)
{
    mtt_adamw_rates r;
    r.step = step;
    r.correction = correction;
    r.keep = decays ? 1.0f - c->lr * c->weight_decay : 1.0f;
    r.scale = counters->gradient_scale;
    r.b1 = c->beta1;
    r.b2 = c->beta2;
    r.eps = c->eps;
    return r;
}

/* m = b1 m + (1-b1) g, v = b2 v + (1-b2) g^2, w -= lr (m / (1-b1^t) / (sqrt(v / (1-b2^t)) + eps) + decay w)
   */
MTT__BOTH void mtt__adamw_element(const mtt_adamw_rates *r, float g, float *m, float *v, float *w)
{
    float d = g * r->scale;
    *m = r->b1 * *m + (1.0f - r->b1) * d;
    *v = r->b2 * *v + (1.0f - r->b2) * d * d;
    *w = r->keep * *w - r->step * *m / (sqrtf(*v) * r->correction + r->eps);
}

/* master, m and v are one tensor each. A parameter is a range of them that begins at a multiple of MTT__PART
   elements. */
enum { MTT__PART = 64 };
MTT__BOTH int64_t mtt__part_elements(const mtt_tensor *parameter)
{
    return mtt__round_up(mtt__elements(parameter), MTT__PART);
}

/* On a device one kernel updates all parameters: entries of `ranges` are pieces of up to MTT__RANGE elements
   of one parameter, each for MTT__RANGE_BLOCKS blocks of threads. */
enum { MTT__RANGE = 65536, MTT__RANGE_BLOCKS = 8, MTT__RANGE_BLOCK = MTT__RANGE / MTT__RANGE_BLOCKS };
typedef struct mtt_range {
    const void *gradient;  /* of the whole parameter, as `weight` */
    void *weight;
    int64_t first;         /* where the parameter begins in master, m and v */
    int64_t begin;         /* the piece: elements of the parameter from here */
    int32_t count;         /* and as many */
    int32_t block;         /* blocks with elements in all entries before */
    int32_t parameter;     /* its number */
    uint8_t decays, gradient_dtype, unused[2];
} mtt_range;

/* The blocks of a table of ranges, a tensor of bytes. */
MTT__BOTH int64_t mtt__range_blocks(const mtt_tensor *ranges)
{
    return (int64_t)(ranges->bytes / sizeof(mtt_range)) * MTT__RANGE_BLOCKS;
}

/* ---- scratch of operations on CUDA ---- */

/* The width of a head's tiles: 16, 32, 64, 96, 128 or 256. */
MTT__BOTH int mtt__flash_width(int head_dim)
{
    int width = 16;
    while (width < head_dim) width = width == 64 ? 96 : width == 96 ? 128 : 2 * width;
    return width;
}

/* Flash attention's backward pass keeps for each head of a group: under 16 bits the running sums of dQ, in
   tiles of 64 rows, and two statistics of each token. A header of 256 bytes comes first. */
MTT__BOTH size_t mtt__flash_sums(const mtt_shape *d, mtt_dtype dtype)
{
    size_t tokens = (size_t)mtt__round_up(d->seq_len, 64);
    return dtype == MTT_F32 ? 0 : 4 * tokens * (size_t)mtt__flash_width(d->head_dim);
}

MTT__BOTH size_t mtt__flash_scratch(const mtt_shape *d, mtt_dtype dtype, int heads)
{
    return 256 + (size_t)heads * (mtt__flash_sums(d, dtype) + 8 * (size_t)mtt__round_up(d->seq_len, 64));
}

/* The gradient of the embedding sorts the tokens of a slab of rows: keys and values before and after, scratch
   of the sort, and one row of sums at least. A slab has MTT__SORT_LEAST rows or more, or all. */
enum { MTT__SORT_LEAST = 2048 };
MTT__BOTH size_t mtt__sort_scratch(int64_t rows, int64_t width)
{
    return 4 * (size_t)mtt__round_up(4 * rows, 256) + 65536 + (size_t)(rows / 2) + 4 * (size_t)width;
}

/* Evaluates the last column of an operation's row. */
static inline MTT__UNUSED size_t mtt__op_scratch(const mtt_op *op)
{
    const mtt_shape *d = op->shape;
    (void)d;
    switch (op->kind) {
#define MTT__OP_SCRATCH(name, inputs, operands_, flops, bytes, scratch)                 \
    case MTT_OP_##name: {                                                               \
        const mtt_##name *o = MTT_OPERANDS_OF(name, op);                                \
        return o ? (size_t)(scratch) : 0;                                               \
    }
        MTT_OPS(MTT__OP_SCRATCH)
    case MTT_OP_KIND_COUNT: break;
    }
    return 0;
}

/* The name of an operation, as in its row. */
MTTDEF const char *mtt_op_name(mtt_op_kind kind);

#ifdef __cplusplus
}
#endif

#endif /* MTT_H_INCLUDED */

#ifdef MTT_IMPLEMENTATION
#ifndef MTT_IMPLEMENTATION_DONE
#define MTT_IMPLEMENTATION_DONE

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>
#ifdef MTT_CBLAS
#include <cblas.h>
#endif

/* stb_sprintf, private to this file: its functions are static here, and its warnings are off. */
#ifndef STB_SPRINTF_H_INCLUDE
#ifdef __GNUC__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wpedantic"
#pragma GCC diagnostic ignored "-Wimplicit-fallthrough"
#endif
#define STB_SPRINTF_STATIC
#define STB_SPRINTF_NOUNALIGNED
#define STB_SPRINTF_IMPLEMENTATION
#if defined(__has_include)
#if __has_include("stb_sprintf.h")
#include "stb_sprintf.h"
#else
#include "stb/stb_sprintf.h"
#endif
#else
#include "stb_sprintf.h"
#endif
#undef STB_SPRINTF_IMPLEMENTATION
#undef STB_SPRINTF_STATIC
#ifdef __GNUC__
#pragma GCC diagnostic pop
#endif
#endif

/* ----------------------------------------------------------------------------------------------------------
   >>base
   ---------------------------------------------------------------------------------------------------------- */

#define MTT__LENGTH(array) (sizeof(array) / sizeof((array)[0]))

#ifdef __GNUC__
#define MTT__PRINTF(text, args) __attribute__((format(printf, text, args)))
#else
#define MTT__PRINTF(text, args)
#endif
#define MTT__INLINE static inline

#ifdef _OPENMP
#define MTT__OMP(directive) _Pragma(#directive)
#else
#define MTT__OMP(directive)
#endif

#define MTT__STRING(name, text) text,
static const char *const mtt__status_text[] = {MTT_STATUSES(MTT__STRING)};

MTTDEF const char *mtt_status_string(mtt_status status)
{
    return (unsigned)status < MTT_STATUS_COUNT ? mtt__status_text[status] : "unknown status";
}

/* A bounded text under construction: cut at the capacity, always terminated. */
typedef struct mtt__text {
    char *at;
    size_t size, capacity;
} mtt__text;

static void mtt__text_init(mtt__text *text, char *at, size_t capacity)
{
    text->at = at;
    text->size = 0;
    text->capacity = capacity;
    if (capacity) at[0] = 0;
}

static void mtt__print_va(mtt__text *text, const char *format, va_list args)
{
    size_t room = text->capacity - text->size;
    int wrote;
    if (room < 2) return;
    wrote = stbsp_vsnprintf(text->at + text->size, (int)(room < 1u << 30 ? room : 1u << 30), format, args);
    if (wrote > 0) text->size += (size_t)wrote < room ? (size_t)wrote : room - 1;
}

/* Appends to the text. */
MTT__PRINTF(2, 3) static void mtt__print(mtt__text *text, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    mtt__print_va(text, format, args);
    va_end(args);
}

/* Records what went wrong and the remedy. Returns the status, so that callers can write `return
   mtt__fail(...)`. */
MTT__PRINTF(3, 4) static mtt_status mtt__fail(mtt_env *env, mtt_status status, const char *format, ...)
{
    if (env) {
        mtt__text text;
        va_list args;
        va_start(args, format);
        mtt__text_init(&text, env->error, sizeof(env->error));
        mtt__print_va(&text, format, args);
        va_end(args);
    }
    return status;
}

/* Sums and products of sizes saturate at SIZE_MAX. No allocation can satisfy that, so an overflow ends as
   "out of memory". */
static size_t mtt__add(size_t a, size_t b)
{
    return a > SIZE_MAX - b ? SIZE_MAX : a + b;
}

static size_t mtt__mul(size_t a, size_t b)
{
    return b && a > SIZE_MAX / b ? SIZE_MAX : a * b;
}

static void *mtt__alloc_raw(mtt_env *env, size_t bytes)
{
    void *block = bytes > SIZE_MAX / 2 ? NULL : env && env->alloc ? env->alloc(env->user, bytes) : malloc(bytes);
    if (!block) mtt__fail(env, MTT_E_MEMORY, "out of host memory: cannot allocate %zu bytes", bytes);
    return block;
}

/* `count` zeroed elements of `size` bytes, at least one byte; NULL with the error recorded. */
static void *mtt__alloc(mtt_env *env, size_t count, size_t size)
{
    size_t bytes = mtt__mul(count, size);
    void *block = mtt__alloc_raw(env, bytes ? bytes : 1);
    if (block) memset(block, 0, bytes);
    return block;
}

static void mtt__free(mtt_env *env, void *block)
{
    if (!block) return;
    if (env && env->alloc) env->free(env->user, block);
    else free(block);
}

/* Makes room for `count` elements in a growing array. On failure the array is as it was. */
static mtt_status mtt__reserve(mtt_env *env, void **array, size_t *capacity, size_t count, size_t size)
{
    size_t wanted = *capacity < 16 ? 16 : *capacity;
    void *block;
    if (count <= *capacity) return MTT_OK;
    while (wanted < count) wanted = mtt__mul(wanted, 2);
    block = mtt__alloc_raw(env, mtt__mul(wanted, size));
    if (!block) return MTT_E_MEMORY;
    if (*capacity) memcpy(block, *array, *capacity * size);
    mtt__free(env, *array);
    *array = block;
    *capacity = wanted;
    return MTT_OK;
}

/* Zeroed memory in large blocks that are freed together. Addresses stay what they are. */
typedef struct mtt__pool_block {
    struct mtt__pool_block *next;
    size_t used, size;
} mtt__pool_block;

typedef struct mtt__pool {
    mtt__pool_block *first;
} mtt__pool;

static void *mtt__pool_take(mtt_env *env, mtt__pool *pool, size_t bytes)
{
    enum { BLOCK = 65536, ALIGN = 16, HEADER = 32 };
    mtt__pool_block *b = pool->first;
    bytes = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    if (!b || b->size - b->used < bytes) {
        size_t size = bytes > BLOCK ? bytes : (size_t)BLOCK;
        b = (mtt__pool_block *)mtt__alloc(env, 1, HEADER + size);
        if (!b) return NULL;
        b->size = size;
        b->next = pool->first;
        pool->first = b;
    }
    b->used += bytes;
    return (char *)b + HEADER + b->used - bytes;
}

static void mtt__pool_free(mtt_env *env, mtt__pool *pool)
{
    while (pool->first) {
        mtt__pool_block *next = pool->first->next;
        mtt__free(env, pool->first);
        pool->first = next;
    }
}

/* A binary heap, the least (key, tie) on top. */
typedef struct mtt__ranked {
    uint64_t key, tie;
} mtt__ranked;

typedef struct mtt__heap {
    mtt__ranked *at;
    size_t count, capacity;
} mtt__heap;

MTT__INLINE int mtt__before(mtt__ranked a, mtt__ranked b)
{
    return a.key < b.key || (a.key == b.key && a.tie < b.tie);
}

static mtt_status mtt__heap_push(mtt_env *env, mtt__heap *heap, uint64_t key, uint64_t tie)
{
    mtt__ranked entry;
    size_t i = heap->count;
    entry.key = key;
    entry.tie = tie;
    if (mtt__reserve(env, (void **)&heap->at, &heap->capacity, i + 1, sizeof(entry)) != MTT_OK) return MTT_E_MEMORY;
    heap->count++;
    for (; i && mtt__before(entry, heap->at[(i - 1) / 2]); i = (i - 1) / 2) heap->at[i] = heap->at[(i - 1) / 2];
    heap->at[i] = entry;
    return MTT_OK;
}

static int mtt__heap_pop(mtt__heap *heap, mtt__ranked *out)
{
    mtt__ranked last;
    size_t i = 0, child;
    if (!heap->count) return 0;
    *out = heap->at[0];
    last = heap->at[--heap->count];
    while ((child = 2 * i + 1) < heap->count) {
        if (child + 1 < heap->count && mtt__before(heap->at[child + 1], heap->at[child])) child++;
        if (!mtt__before(heap->at[child], last)) break;
        heap->at[i] = heap->at[child];
        i = child;
    }
    heap->at[i] = last;
    return 1;
}

/* ----------------------------------------------------------------------------------------------------------
   >>numbers
   ---------------------------------------------------------------------------------------------------------- */

#define MTT__DTYPE_BYTES(dtype, bytes, name) bytes,
#define MTT__DTYPE_NAME(dtype, bytes, name) name,
static const size_t mtt__dtype_bytes[] = {MTT_DTYPES(MTT__DTYPE_BYTES)};
static const char *const mtt__dtype_name[] = {MTT_DTYPES(MTT__DTYPE_NAME)};

MTT__INLINE float mtt__from_bf16(uint16_t h)
{
    return mtt__bits_float((uint32_t)h << 16);
}

/* Rounds to nearest, ties to even. A NaN stays a NaN. */
MTT__INLINE uint16_t mtt__to_bf16(float x)
{
    uint32_t bits = mtt__float_bits(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

/* Shifted into place, a half is a float that is 2^112 too small. One product corrects that, subnormals
   included. */
MTT__INLINE float mtt__from_fp16(uint16_t h)
{
    uint32_t magnitude = (uint32_t)(h & 0x7fffu) << 13;
    float scaled = mtt__bits_float(magnitude) * 5.192296858534828e33f;
    uint32_t bits = (h & 0x7c00u) == 0x7c00u ? magnitude | 0x7f800000u : mtt__float_bits(scaled);
    return mtt__bits_float(bits | (uint32_t)(h & 0x8000u) << 16);
}

/* Rounds to nearest, ties to even; to infinity from 65520 up. A NaN stays a NaN. Below 2^-14, adding 0.5
   aligns the mantissa so that the addition itself rounds to a multiple of 2^-24, the spacing of half
   subnormals. */
MTT__INLINE uint16_t mtt__to_fp16(float x)
{
    uint32_t bits = mtt__float_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t small = mtt__float_bits(mtt__bits_float(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? small : normal;
    if (magnitude >= 0x477ff000u) half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

/* ---- arrays of the compact state; `random` has 16 bits for each element, NULL rounds to nearest ---- */

MTT__INLINE uint32_t mtt__random_at(const uint16_t *random, int64_t i)
{
    if (!random) return MTT__NEAREST;
    return random[i];
}

static void mtt__split_weights(const float *x, int64_t count, int fp16, const uint16_t *random, uint16_t *weights,
                               uint8_t *rest)
{
    int64_t i;
    for (i = 0; i < count; i++)
        mtt__split_weight(x[i], fp16, mtt__random_at(random, i), weights + i, rest + i);
}

static void mtt__join_weights(const uint16_t *weights, const uint8_t *rest, int64_t count, int fp16, float *x)
{
    int64_t i;
    for (i = 0; i < count; i++) x[i] = mtt__join_weight(weights[i], rest[i], fp16);
}

/* Moments to codes, and a scale for each group: its largest absolute value, of second moments their largest
   root. */
static void mtt__pack_moments(const float *x, int64_t count, int second, const uint16_t *random, uint8_t *codes,
                              uint16_t *scales)
{
    int64_t i, k, n;
    for (i = 0; i < count; i += n, scales++) {
        float y[MTT__GROUP], largest = 0, scale;
        n = mtt__min(MTT__GROUP, count - i);
        for (k = 0; k < n; k++) y[k] = second ? sqrtf(x[i + k]) : x[i + k];
        for (k = 0; k < n; k++) largest = fabsf(y[k]) > largest ? fabsf(y[k]) : largest;
        *scales = mtt__to_scale(largest, mtt__random_at(random, i));
        scale = *scales ? 1.0f / mtt__from_scale(*scales) : 0.0f;
        for (k = 0; k < n; k++) {
            float r = y[k] * scale, code = second ? 255.0f * r : 254.0f * r / (1.0f + fabsf(r));
            if (second && r > 0 && code < 1) code = 1;
            codes[i + k] = mtt__round_moment(code * 65536.0f, second, mtt__random_at(random, i + k));
        }
    }
}

static float mtt__moment(uint8_t code, int second)
{
    float y = (float)(second ? code : code - (code & 128) * 2);
    return second ? y * (1.0f / 255.0f) : y / (254.0f - fabsf(y));
}

static void mtt__unpack_moments(const uint8_t *codes, const uint16_t *scales, int64_t count, int second, float *x)
{
    int64_t i;
    for (i = 0; i < count; i++) {
        x[i] = mtt__from_scale(scales[i / MTT__GROUP]) * mtt__moment(codes[i], second);
        if (second) x[i] *= x[i];
    }
}

/* ---- randomness ---- */

/* What a random number is for. */
enum {
    MTT__SITE_INIT,
    MTT__SITE_SHUFFLE,
    MTT__SITE_SPLIT,
    MTT__SITE_SAMPLE,
    MTT__SITE_EMBED,
    MTT__SITE_ATTENTION,
    MTT__SITE_PROJ,
    MTT__SITE_MLP,
    MTT__SITE_ROUND
};

/* A uniform integer below `bound` (at most 2^32): the remainder of 64 bits, whose bias is below 2^-32. */
static uint64_t mtt__random_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t bound)
{
    uint32_t r[4];
    mtt__philox(seed, index, stream, r);
    return ((uint64_t)r[1] << 32 | r[0]) % bound;
}

/* Uniform in (0, 1). */
static double mtt__random_uniform(uint64_t seed, uint64_t stream, uint64_t index)
{
    uint32_t r[4];
    mtt__philox(seed, index, stream, r);
    return ((double)((uint64_t)r[1] << 20 ^ r[0] >> 12) + 0.5) * (1.0 / 4503599627370496.0);
}

/* Element `index` of a stream of normal numbers (Box & Muller 1958): two of them share a draw. */
static float mtt__random_normal(uint64_t seed, uint64_t stream, int64_t index)
{
    uint32_t r[4];
    double radius, angle;
    mtt__philox(seed, (uint64_t)index >> 1, stream, r);
    radius = sqrt(-2.0 * log(((double)r[0] + 0.5) / 4294967296.0));
    angle = 6.28318530717958647692 * ((double)r[1] + 0.5) / 4294967296.0;
    return (float)(radius * (index & 1 ? sin(angle) : cos(angle)));
}

/* ------------------------------------------------------------------------------------------------------------------
   >>json
   ---------------------------------------------------------------------------------------------------------------- */

/* A pull reader over a range of bytes: no allocation, no recursion on input beyond MTT__JSON_DEPTH. The first fault
   sticks: every later call answers 0, so a caller may check `fault` once at the end. */
enum { MTT__JSON_DEPTH = 16 };

typedef struct mtt__json {
    const char *begin, *at, *end;
    const char *fault; /* NULL, or what is wrong at `at` */
} mtt__json;

/* A string as it stands in the text, between its quotes and still escaped. Checked: its escapes are well formed. */
typedef struct mtt__slice {
    const char *at;
    size_t size;
} mtt__slice;

static void mtt__json_init(mtt__json *j, const char *text, size_t bytes)
{
    j->begin = j->at = text;
    j->end = text + bytes;
    j->fault = NULL;
}

static int mtt__json_fail(mtt__json *j, const char *fault)
{
    if (!j->fault) j->fault = fault;
    return 0;
}

/* The first byte of the next value or mark; 0 at the end and after a fault. */
static int mtt__json_peek(mtt__json *j)
{
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\t' || *j->at == '\n' || *j->at == '\r')) j->at++;
    return j->fault || j->at == j->end ? 0 : (unsigned char)*j->at;
}

static int mtt__json_take(mtt__json *j, int mark)
{
    if (mtt__json_peek(j) != mark) return 0;
    j->at++;
    return 1;
}

static int mtt__json_begin(mtt__json *j, int mark)
{
    return mtt__json_take(j, mark) || mtt__json_fail(j, mark == '{' ? "an object was expected" : "an array was expected");
}

static int mtt__hex(const char *at, unsigned *out)
{
    unsigned value = 0;
    int i;
    for (i = 0; i < 4; i++) {
        int c = (unsigned char)at[i];
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) return 0;
        value = value * 16 + (unsigned)digit;
    }
    *out = value;
    return 1;
}

static int mtt__json_string(mtt__json *j, mtt__slice *out)
{
    unsigned unused;
    if (!mtt__json_take(j, '"')) return mtt__json_fail(j, "a string was expected");
    out->at = j->at;
    for (; j->at < j->end && *j->at != '"'; j->at++) {
        if ((unsigned char)*j->at < 0x20) return mtt__json_fail(j, "a control character stands unescaped in a string");
        if (*j->at != '\\') continue;
        if (++j->at == j->end) break;
        if (*j->at == 'u' ? j->end - j->at < 5 || !mtt__hex(j->at + 1, &unused) : !strchr("\"\\/bfnrt", *j->at) || !*j->at)
            return mtt__json_fail(j, "an escape is malformed");
    }
    if (j->at >= j->end) return mtt__json_fail(j, "a string does not end");
    out->size = (size_t)(j->at++ - out->at);
    return 1;
}

static size_t mtt__utf8_put(uint32_t c, char *out)
{
    if (c < 0x80) return out[0] = (char)c, 1;
    if (c < 0x800) return out[0] = (char)(0xc0 | c >> 6), out[1] = (char)(0x80 | (c & 63)), 2;
    if (c < 0x10000)
        return out[0] = (char)(0xe0 | c >> 12), out[1] = (char)(0x80 | (c >> 6 & 63)), out[2] = (char)(0x80 | (c & 63)), 3;
    out[0] = (char)(0xf0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 63));
    out[2] = (char)(0x80 | (c >> 6 & 63));
    out[3] = (char)(0x80 | (c & 63));
    return 4;
}

/* Undoes the escapes of a checked string; `out` needs `in.size` bytes at most, and may be `in.at` itself. A lone
   surrogate, which no UTF-8 can hold, becomes U+FFFD. */
static size_t mtt__json_unescape(mtt__slice in, char *out)
{
    size_t i = 0, n = 0;
    while (i < in.size) {
        static const char from[] = "bfnrt", to[] = "\b\f\n\r\t";
        const char *plain;
        unsigned c = 0, low = 0;
        if (in.at[i] != '\\') {
            out[n++] = in.at[i++];
            continue;
        }
        if (in.at[i + 1] != 'u') {
            plain = strchr(from, in.at[i + 1]);
            out[n++] = plain ? to[plain - from] : in.at[i + 1];
            i += 2;
            continue;
        }
        mtt__hex(in.at + i + 2, &c);
        i += 6;
        if (c >= 0xd800 && c < 0xe000) {
            int paired = c < 0xdc00 && i + 6 <= in.size && in.at[i] == '\\' && in.at[i + 1] == 'u' &&
                         mtt__hex(in.at + i + 2, &low) && low >= 0xdc00 && low < 0xe000;
            if (paired) {
                c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
                i += 6;
            } else c = 0xfffd;
        }
        n += mtt__utf8_put(c, out + n);
    }
    return n;
}

/* Inside an object: 1 and the next key, its value standing next; 0 at the object's end and after a fault. `first`
   starts at 1 and belongs to the caller. */
static int mtt__json_key(mtt__json *j, int *first, mtt__slice *key)
{
    if (mtt__json_take(j, '}')) {
        return 0;
    }
    if (!*first && !mtt__json_take(j, ',')) return mtt__json_fail(j, "a comma or } was expected");
    *first = 0;
    return mtt__json_string(j, key) && (mtt__json_take(j, ':') || mtt__json_fail(j, "a colon was expected"));
}

/* Inside an array: 1 if an item stands next; 0 at the array's end and after a fault. */
static int mtt__json_item(mtt__json *j, int *first)
{
    if (mtt__json_take(j, ']')) return 0;
    if (!*first && !mtt__json_take(j, ',')) return mtt__json_fail(j, "a comma or ] was expected");
    *first = 0;
    return mtt__json_peek(j) ? 1 : mtt__json_fail(j, "the text ends inside an array");
}

/* A whole number from 0 to 2^64-1, without sign, fraction, exponent or leading zero. */
static int mtt__json_u64(mtt__json *j, uint64_t *out)
{
    const char *start;
    uint64_t value = 0;
    mtt__json_peek(j);
    if (j->fault) return 0;
    for (start = j->at; j->at < j->end && *j->at >= '0' && *j->at <= '9'; j->at++) {
        unsigned digit = (unsigned)(*j->at - '0');
        if (value > (UINT64_MAX - digit) / 10) return mtt__json_fail(j, "a number is above 2^64-1");
        value = value * 10 + digit;
    }
    if (j->at == start || (*start == '0' && j->at - start > 1) || (j->at < j->end && strchr(".eE-+", *j->at) && *j->at))
        return mtt__json_fail(j, "a whole number from 0 up was expected");
    *out = value;
    return 1;
}

/* Passes over a number by the grammar of RFC 8259. */
static int mtt__json_skip_number(mtt__json *j)
{
    const char *digits;
    if (j->at < j->end && *j->at == '-') j->at++;
    digits = j->at;
    while (j->at < j->end && *j->at >= '0' && *j->at <= '9') j->at++;
    if (j->at == digits || (*digits == '0' && j->at - digits > 1)) return mtt__json_fail(j, "a value was expected");
    if (j->at < j->end && *j->at == '.') {
        for (digits = ++j->at; j->at < j->end && *j->at >= '0' && *j->at <= '9';) j->at++;
        if (j->at == digits) return mtt__json_fail(j, "a fraction has no digits");
    }
    if (j->at < j->end && (*j->at == 'e' || *j->at == 'E')) {
        j->at++;
        if (j->at < j->end && (*j->at == '+' || *j->at == '-')) j->at++;
        for (digits = j->at; j->at < j->end && *j->at >= '0' && *j->at <= '9';) j->at++;
        if (j->at == digits) return mtt__json_fail(j, "an exponent has no digits");
    }
    return 1;
}

static int mtt__json_word(mtt__json *j, const char *word)
{
    size_t size = strlen(word);
    if ((size_t)(j->end - j->at) < size || memcmp(j->at, word, size) != 0) return mtt__json_fail(j, "a value was expected");
    j->at += size;
    return 1;
}

/* Passes over one value of any kind, checking that it is well formed. */
static int mtt__json_skip(mtt__json *j)
{
    char marks[MTT__JSON_DEPTH];
    int first[MTT__JSON_DEPTH], depth = 0;
    mtt__slice text;
    for (;;) {
        int c = mtt__json_peek(j);
        if (c == '{' || c == '[') {
            if (depth == MTT__JSON_DEPTH) return mtt__json_fail(j, "values are nested too deep");
            j->at++;
            marks[depth] = (char)c;
            first[depth++] = 1;
        } else if (c == '"') mtt__json_string(j, &text);
        else if (c == 't') mtt__json_word(j, "true");
        else if (c == 'f') mtt__json_word(j, "false");
        else if (c == 'n') mtt__json_word(j, "null");
        else mtt__json_skip_number(j);
        while (depth && !j->fault) {
            if (marks[depth - 1] == '{' ? mtt__json_key(j, &first[depth - 1], &text) : mtt__json_item(j, &first[depth - 1])) break;
            depth--;
        }
        if (j->fault) return 0;
        if (!depth) return 1;
    }
}

static int mtt__slice_is(mtt__slice slice, const char *text)
{
    return slice.size == strlen(text) && memcmp(slice.at, text, slice.size) == 0;
}

/* Writes `bytes` of text as a JSON string, its quotes left out or not. Bytes from 0x80 up pass as they are. */
static void mtt__print_json_string(mtt__text *out, const char *quote, const char *at, size_t bytes)
{
    size_t i;
    mtt__print(out, "%s", quote);
    for (i = 0; i < bytes; i++) {
        int c = (unsigned char)at[i];
        if (c == '"' || c == '\\') mtt__print(out, "\\%c", c);
        else if (c < 0x20) mtt__print(out, "\\u%04x", c);
        else mtt__print(out, "%c", c);
    }
    mtt__print(out, "%s", quote);
}
/* ------------------------------------------------------------------------------------------------------------------
   >>files
   ---------------------------------------------------------------------------------------------------------------- */

/* The calls that fail on a sick disk; tests put their own in place, all of them together. */
#ifndef MTT__SYS_OPEN
#define MTT__SYS_OPEN open
#define MTT__SYS_READ read
#define MTT__SYS_PWRITE pwrite
#define MTT__SYS_FSYNC fsync
#define MTT__SYS_CLOSE close
#define MTT__SYS_RENAME rename
#endif

static mtt_status mtt__file_fail(mtt_env *env, const char *path, const char *verb, int error)
{
    const char *remedy = error == ENOENT || error == ENOTDIR || error == ENAMETOOLONG ? "check the path"
                         : error == EACCES || error == EPERM || error == EROFS        ? "check the permissions of the folder"
                         : error == ENOSPC || error == EDQUOT                         ? "make room or use another folder"
                                                                                      : "check the disk and try again";
    return mtt__fail(env, MTT_E_FILE, "%s: cannot %s: %s; %s", path, verb, strerror(error), remedy);
}

static int mtt__open_retry(const char *path, int flags)
{
    int fd;
    do fd = MTT__SYS_OPEN(path, flags | O_CLOEXEC, 0644);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* A regular file seen as memory. An empty one has no data. With PROT_WRITE the memory can be changed, not the file. */
typedef struct mtt__map {
    char *data;
    size_t bytes;
} mtt__map;

static mtt_status mtt__map_open(mtt_env *env, const char *path, int protection, mtt__map *map)
{
    int fd = mtt__open_retry(path, O_RDONLY | O_NONBLOCK); /* a named pipe is refused instead of waited for */
    struct stat info;
    void *data = NULL;
    int error = fd < 0 || fstat(fd, &info) ? errno : 0, regular = !error && S_ISREG(info.st_mode);
    map->bytes = regular && (uint64_t)info.st_size < SIZE_MAX / 2 ? (size_t)info.st_size : 0;
    if (map->bytes) data = mmap(NULL, map->bytes, protection, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) error = errno;
    map->data = error ? NULL : (char *)data;
    if (fd >= 0) MTT__SYS_CLOSE(fd);
    if (error) return mtt__file_fail(env, path, "read it", error);
    return regular ? MTT_OK : mtt__fail(env, MTT_E_FILE, "%s is a folder, a device or a pipe: name a regular file", path);
}

static void mtt__map_close(mtt__map *map)
{
    if (map->data) munmap(map->data, map->bytes);
    memset(map, 0, sizeof(*map));
}

/* Replaces a file so that death at any moment leaves the old one or the new one, whole: everything goes to .NAME.tmp in
   the same folder, which is synced, then renamed (Pillai et al. 2014, "All file systems are not created equal"). The
   temporary is locked: what a dead writer left is taken over, what a living one writes is not touched. A failure removes
   the temporary and sticks. A zeroed writer is a closed one. */
typedef struct mtt__writer {
    mtt_env *env;
    int fd, live;
    mtt_status status;
    uint64_t written, expected; /* bytes put so far, and in the end if known */
    size_t pending;             /* of those put, in the buffer */
    char path[2048], folder[2052], temporary[4096];
    unsigned char buffer[65536];
} mtt__writer;

/* Removes before it closes: without the lock the name may be another writer's. */
static void mtt__writer_abort(mtt__writer *w)
{
    if (!w->live) return;
    unlink(w->temporary);
    MTT__SYS_CLOSE(w->fd);
    w->live = 0;
}

static mtt_status mtt__writer_fail(mtt__writer *w, const char *verb, int error)
{
    uint64_t wanted = w->expected > w->written ? w->expected : w->written;
    mtt__writer_abort(w);
    w->status = mtt__file_fail(w->env, w->path, verb, error);
    return error != ENOSPC ? w->status
                           : mtt__fail(w->env, w->status, "%s: cannot %s: %s; %llu bytes are needed: make room", w->path, verb,
                                       strerror(error), (unsigned long long)wanted);
}

static mtt_status mtt__writer_open(mtt_env *env, const char *path, mtt__writer *w)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    struct stat mine, named;
    mtt__text text;
    memset(w, 0, offsetof(mtt__writer, path));
    w->env = env;
    w->status = MTT_E_FILE;
    if (strlen(path) >= sizeof(w->path) || !*name || (stat(path, &named) == 0 && !S_ISREG(named.st_mode)))
        return mtt__fail(env, MTT_E_FILE, "%s: the name of a regular file is needed, below %zu bytes", path, sizeof(w->path));
    memcpy(w->path, path, strlen(path) + 1);
    mtt__text_init(&text, w->folder, sizeof(w->folder));
    mtt__print(&text, "%.*s.", (int)(name - path), path);
    mtt__text_init(&text, w->temporary, sizeof(w->temporary));
    mtt__print(&text, "%s%s.tmp", w->folder, name);
    w->fd = mtt__open_retry(w->temporary, O_WRONLY | O_CREAT | O_NOFOLLOW);
    if (w->fd < 0) return mtt__file_fail(env, w->temporary, "create it", errno);
    /* A writer that finished since renamed the file that was opened here. Some file systems have no locks at all. */
    if ((flock(w->fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK) || fstat(w->fd, &mine) || stat(w->temporary, &named) ||
        mine.st_ino != named.st_ino) {
        MTT__SYS_CLOSE(w->fd);
        return mtt__fail(env, MTT_E_FILE, "%s is being written by another process: wait for its end", path);
    }
    w->live = 1;
    return w->status = ftruncate(w->fd, 0) ? mtt__writer_fail(w, "empty its temporary", errno) : MTT_OK;
}

/* Tells how many bytes will come, so that a full disk is known before the work. */
static mtt_status mtt__writer_expect(mtt__writer *w, uint64_t bytes)
{
    struct statvfs info;
    int known = statvfs(w->folder, &info) == 0 && info.f_blocks;
    w->expected = bytes;
    return known && bytes / info.f_frsize >= info.f_bavail && !w->status ? mtt__writer_fail(w, "write it", ENOSPC) : w->status;
}

static mtt_status mtt__writer_out(mtt__writer *w, uint64_t offset, const void *data, size_t bytes)
{
    const char *at = (const char *)data;
    while (bytes && !w->status) {
        ptrdiff_t n = MTT__SYS_PWRITE(w->fd, at, bytes < 1u << 30 ? bytes : 1u << 30, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return mtt__writer_fail(w, "write it", n ? errno : EIO);
        at += n;
        bytes -= (size_t)n;
        offset += (uint64_t)n;
    }
    return w->status;
}

static mtt_status mtt__writer_flush(mtt__writer *w)
{
    size_t pending = w->pending;
    w->pending = 0;
    return mtt__writer_out(w, w->written - pending, w->buffer, pending);
}

static mtt_status mtt__writer_put(mtt__writer *w, const void *data, size_t bytes)
{
    if (bytes > sizeof(w->buffer) - w->pending) mtt__writer_flush(w);
    if (bytes > sizeof(w->buffer)) mtt__writer_out(w, w->written, data, bytes);
    else if (bytes) memcpy(w->buffer + w->pending, data, bytes), w->pending += bytes;
    w->written += bytes;
    return w->status;
}

/* Overwrites bytes that were put before. */
static mtt_status mtt__writer_patch(mtt__writer *w, uint64_t offset, const void *data, size_t bytes)
{
    return mtt__writer_flush(w) ? w->status : mtt__writer_out(w, offset, data, bytes);
}

static int mtt__sync(int fd)
{
    int result;
    do result = MTT__SYS_FSYNC(fd);
    while (result && errno == EINTR);
    return result ? errno : 0;
}

/* What close says is of no weight: the data is synced, and the lock has to last until the new name stands. */
static mtt_status mtt__writer_commit(mtt__writer *w)
{
    int folder, error;
    if (mtt__writer_flush(w)) return w->status;
    error = mtt__sync(w->fd);
    if (error) return mtt__writer_fail(w, "sync it", error);
    if (MTT__SYS_RENAME(w->temporary, w->path)) return mtt__writer_fail(w, "rename the temporary to it", errno);
    folder = mtt__open_retry(w->folder, O_RDONLY);
    error = folder < 0 ? errno : mtt__sync(folder);
    if (folder >= 0) MTT__SYS_CLOSE(folder);
    MTT__SYS_CLOSE(w->fd);
    w->live = 0;
    w->status = MTT_E_FILE; /* of whatever is put after this */
    if (!error || error == EACCES || error == EINVAL) return MTT_OK; /* a folder that cannot be read or synced */
    return mtt__file_fail(w->env, w->path, "sync the folder of the new file", error);
}

static mtt_status mtt__file_replace(mtt_env *env, const char *path, const void *data, size_t bytes)
{
    mtt__writer w;
    mtt_status status = mtt__writer_open(env, path, &w);
    if (!status) status = mtt__writer_put(&w, data, bytes);
    return status ? status : mtt__writer_commit(&w);
}

/* CRC-32 of IEEE 802.3, eight bytes a step by eight tables (Kounavis and Berry 2005). */
typedef struct mtt__crc_table {
    uint32_t at[8][256];
} mtt__crc_table;

static void mtt__crc_init(mtt__crc_table *table)
{
    uint32_t i, k;
    for (i = 0; i < 256; i++)
        for (table->at[0][i] = i, k = 0; k < 8; k++)
            table->at[0][i] = table->at[0][i] >> 1 ^ (table->at[0][i] & 1 ? 0xedb88320u : 0);
    for (k = 1; k < 8; k++)
        for (i = 0; i < 256; i++) table->at[k][i] = table->at[k - 1][i] >> 8 ^ table->at[0][table->at[k - 1][i] & 255];
}

/* Continues `crc`, which starts at 0; equal to zlib's crc32. */
static uint32_t mtt__crc32(const mtt__crc_table *table, uint32_t crc, const void *data, size_t bytes)
{
    const uint32_t(*t)[256] = table->at;
    const unsigned char *at = (const unsigned char *)data;
    uint32_t a, b;
    crc = ~crc;
    for (; bytes >= 8; bytes -= 8, at += 8) {
        memcpy(&a, at, 4);
        memcpy(&b, at + 4, 4);
        a ^= crc;
        crc = t[7][a & 255] ^ t[6][a >> 8 & 255] ^ t[5][a >> 16 & 255] ^ t[4][a >> 24];
        crc ^= t[3][b & 255] ^ t[2][b >> 8 & 255] ^ t[1][b >> 16 & 255] ^ t[0][b >> 24];
    }
    for (; bytes; bytes--) crc = crc >> 8 ^ t[0][(crc ^ *at++) & 255];
    return ~crc;
}

/* ----------------------------------------------------------------------------------------------------------
   >>config
   ---------------------------------------------------------------------------------------------------------- */

static const char *const mtt__category_text[] = {MTT_CATEGORIES(MTT__STRING)};
static const char *const mtt__phase_text[] = {"forward", "backward", "step"};
#define MTT__PRECISIONS "fp32|tf32|bf16|fp16"
static const char *const mtt__precision_name[] = {"fp32", "tf32", "bf16", "fp16"};

MTTDEF const char *mtt_category_name(mtt_category category)
{
    return (unsigned)category < MTT_CATEGORY_COUNT ? mtt__category_text[category] : "unknown";
}

MTTDEF const char *mtt_phase_name(mtt_phase phase)
{
    return (unsigned)phase < MTT_PHASE_COUNT ? mtt__phase_text[phase] : "unknown";
}

/* ---- fields: one row for defaults, validation, checkpoints and the programs' options ---- */

/* Name, kind, default (0 = it depends, see mtt_*_resolve), range, names of values, help. */
#define MTT__MODEL_FIELDS(X)                                                                     \
    X(layers, INT, 4, 1, 1024, NULL, "transformer blocks")                                       \
    X(heads, INT, 8, 1, 1024, NULL, "attention heads")                                           \
    X(d_model, INT, 256, 8, 16384, NULL, "width")                                                \
    X(d_ff, INT, 0, 8, 131072, NULL, "width of the MLP (default 4 * d_model)")                   \
    X(vocab, INT, 10000, 1, 1 << 24, NULL, "ids of the vocabulary")                              \
    X(max_seq, INT, 1024, 1, 1 << 20, NULL, "longest sequence of learned positions")             \
    X(positions, CHOICE, 0, 0, MTT_POSITIONS_LEARNED, "sinusoidal|learned", "position encoding") \
    X(tied_head, FLAG, 0, 0, 1, NULL, "the embedding is the output matrix")                      \
    X(no_head_bias, FLAG, 0, 0, 1, NULL, "logits without a bias")                                \
    X(dropout, FLOAT, 0, 0, 0.9, NULL, "dropout probability")
#define MTT__POLICY_FIELDS(X)                                                                      \
    X(precision, CHOICE, 0, 0, MTT_FP16, MTT__PRECISIONS, "precision")                             \
    X(attention, CHOICE, 0, 0, MTT_ATTENTION_FLASH, "plain|flash", "attention")                    \
    X(window, INT, 0, 0, INT_MAX, NULL, "keys that a query attends, itself counted; 0: all")       \
    X(recompute, CHOICE, 0, 0, MTT_RECOMPUTE_BUDGET, "none|selective|layer|segments|budget",       \
      "what the backward pass recomputes")                                                         \
    X(segment, INT, 0, 1, 1024, NULL, "layers in a segment (default the root of layers)")          \
    X(loss, CHOICE, 0, 0, MTT_LOSS_CHUNKED, "full|chunked", "logits of all tokens or of a chunk")  \
    X(loss_chunk_rows, INT, 0, 1, 1 << 24, NULL, "tokens of a chunk (default 1024, on CUDA 2048)") \
    X(state, CHOICE, 0, 0, MTT_STATE_COMPACT, "full|compact", "optimizer state")                   \
    X(accumulate, INT, 1, 1, 1 << 20, NULL, "micro-batches in a step")                             \
    X(budget_bytes, BYTES, 0, 0, 9e18, NULL, "memory for recompute budget")                        \
    X(split, FLAG, 0, 0, 1, NULL, "a budget may cut the batch into micro-batches")                 \
    X(device, CHOICE, 0, 0, MTT_DEVICE_CUDA, "cpu|cuda", "device")                                 \
    X(workspace_bytes, BYTES, 0, 0, 9e18, NULL, "scratch of products on CUDA (default 32 MiB)")
#define MTT__OPTIM_FIELDS(X)                                                                                \
    X(lr, FLOAT, 3e-4, 1e-30, 100, NULL, "peak learning rate")                                              \
    X(beta1, FLOAT, 0.9, 0, 1, NULL, "decay of the first moment")                                           \
    X(beta2, FLOAT, 0.999, 0, 1, NULL, "decay of the second moment")                                        \
    X(eps, FLOAT, 1e-8, 0, 1, NULL, "added to the root of the second moment")                               \
    X(weight_decay, FLOAT, 0.01, 0, 100, NULL, "decoupled decay of matrices")                               \
    X(clip, FLOAT, 1, 0, 1e30, NULL, "largest norm of the gradient")                                        \
    X(lr_schedule, CHOICE, 0, 0, MTT_LR_COSINE, "constant|linear|cosine", "learning rate after the warmup") \
    X(warmup_steps, INT64, 0, 0, INT32_MAX, NULL, "steps of linear warmup")                                 \
    X(total_steps, INT64, 0, 0, 9e18, NULL, "end of the linear or cosine schedule")                         \
    X(min_lr, FLOAT, 0, 0, 100, NULL, "learning rate at that end")                                          \
    X(loss_scale, FLOAT, 65536, 1e-30, 1e38, NULL, "first loss scale of fp16")

#define MTT__FIELD_OF(desc, name, kind, fallback, low, high, choices, help)             \
    {#name, MTT_FIELD_##kind, offsetof(desc, name), fallback, low, high, choices, help},
#define MTT__MODEL_FIELD(name, kind, fallback, low, high, choices, help)                \
    MTT__FIELD_OF(mtt_model_desc, name, kind, fallback, low, high, choices, help)
#define MTT__POLICY_FIELD(name, kind, fallback, low, high, choices, help)               \
    MTT__FIELD_OF(mtt_policy, name, kind, fallback, low, high, choices, help)
#define MTT__OPTIM_FIELD(name, kind, fallback, low, high, choices, help)                \
    MTT__FIELD_OF(mtt_optim_desc, name, kind, fallback, low, high, choices, help)
static const mtt_field mtt__model_field[] = {MTT__MODEL_FIELDS(MTT__MODEL_FIELD)};
static const mtt_field mtt__policy_field[] = {MTT__POLICY_FIELDS(MTT__POLICY_FIELD)};
static const mtt_field mtt__optim_field[] = {MTT__OPTIM_FIELDS(MTT__OPTIM_FIELD)};

MTTDEF const mtt_field *mtt_model_fields(int *count)
{
    *count = (int)MTT__LENGTH(mtt__model_field);
    return mtt__model_field;
}

MTTDEF const mtt_field *mtt_policy_fields(int *count)
{
    *count = (int)MTT__LENGTH(mtt__policy_field);
    return mtt__policy_field;
}

MTTDEF const mtt_field *mtt_optim_fields(int *count)
{
    *count = (int)MTT__LENGTH(mtt__optim_field);
    return mtt__optim_field;
}

static double mtt__field_get(const void *desc, const mtt_field *field)
{
    const void *at = (const char *)desc + field->offset;
    switch (field->kind) {
    case MTT_FIELD_FLOAT: return (double)*(const float *)at;
    case MTT_FIELD_INT64: return (double)*(const int64_t *)at;
    case MTT_FIELD_BYTES: return (double)*(const size_t *)at;
    default: return *(const int *)at;
    }
}

static void mtt__field_set(void *desc, const mtt_field *field, double value)
{
    void *at = (char *)desc + field->offset;
    switch (field->kind) {
    case MTT_FIELD_FLOAT: *(float *)at = (float)value; break;
    case MTT_FIELD_INT64: *(int64_t *)at = (int64_t)value; break;
    case MTT_FIELD_BYTES: *(size_t *)at = (size_t)value; break;
    default: *(int *)at = (int)value;
    }
}

/* ---- validation ---- */

/* Collects every fault of a descriptor in the environment's text. */
typedef struct mtt__faults {
    mtt__text text;
    char discarded[256]; /* takes the text if there is no environment */
    int count;
} mtt__faults;

static void mtt__faults_init(mtt__faults *faults, mtt_env *env)
{
    faults->count = 0;
    if (env) mtt__text_init(&faults->text, env->error, sizeof(env->error));
    else mtt__text_init(&faults->text, faults->discarded, sizeof(faults->discarded));
}

MTT__PRINTF(3, 4) static int mtt__require(mtt__faults *faults, int holds, const char *format, ...)
{
    va_list args;
    if (holds) return 1;
    mtt__print(&faults->text, "%s", faults->count++ ? "; " : "");
    va_start(args, format);
    mtt__print_va(&faults->text, format, args);
    va_end(args);
    return 0;
}

static int mtt__in_range(mtt__faults *faults, const char *name, double value, double low, double high)
{
    return mtt__require(faults, value >= low && value <= high, "%s is %.10g, it must be %.10g to %.10g", name, value, low, high);
}

/* Fills in the defaults. For settings of the optimizer, a negative number means none. */
static void mtt__apply_defaults(void *desc, const mtt_field *fields, size_t count, int negative_is_none)
{
    size_t i;
    for (i = 0; i < count; i++) {
        const mtt_field *f = &fields[i];
        double value = mtt__field_get(desc, f);
        if (value == 0) mtt__field_set(desc, f, f->fallback);
        else if (value < 0 && negative_is_none && f->kind == MTT_FIELD_FLOAT && f->low == 0) mtt__field_set(desc, f, 0);
    }
}

static void mtt__check_fields(mtt__faults *faults, const void *desc, const mtt_field *fields, size_t count)
{
    size_t i;
    for (i = 0; i < count; i++)
        if (fields[i].kind != MTT_FIELD_FLAG)
            mtt__in_range(faults, fields[i].name, mtt__field_get(desc, &fields[i]), fields[i].low, fields[i].high);
}

MTTDEF mtt_status mtt_model_resolve(mtt_env *env, const mtt_model_desc *model, mtt_model_desc *resolved)
{
    mtt__faults faults;
    mtt_model_desc m = *model;
    mtt__faults_init(&faults, env);
    mtt__apply_defaults(&m, mtt__model_field, MTT__LENGTH(mtt__model_field), 0);
    if (!m.d_ff) m.d_ff = m.d_model > 0 && m.d_model <= 16384 ? 4 * m.d_model : 1024;
    mtt__check_fields(&faults, &m, mtt__model_field, MTT__LENGTH(mtt__model_field));
    mtt__require(&faults, m.d_ff < 8 || m.d_ff % 8 == 0, "d_ff is %d, it must be a multiple of 8", m.d_ff);
    if (m.heads >= 1 && m.heads <= 1024 && m.d_model >= 8 && m.d_model <= 16384) {
        if (mtt__require(&faults, m.d_model % m.heads == 0, "d_model %d does not divide into %d heads: take a multiple of %d",
                         m.d_model, m.heads, 8 * m.heads))
            mtt__require(&faults, m.d_model / m.heads % 8 == 0 && m.d_model / m.heads <= 256,
                         "a head is %d wide (d_model / heads), it must be a multiple of 8 up to 256", m.d_model / m.heads);
    }
    if (faults.count) return MTT_E_ARGUMENT;
    *resolved = m;
    return MTT_OK;
}

MTTDEF mtt_status mtt_policy_resolve(mtt_env *env, const mtt_policy *policy, const mtt_model_desc *model, int batch, int seq_len,
                                     mtt_policy *resolved)
{
    mtt__faults faults;
    mtt_policy p = *policy;
    mtt__faults_init(&faults, env);
    mtt__apply_defaults(&p, mtt__policy_field, MTT__LENGTH(mtt__policy_field), 0);
    if (!p.segment)
        while (p.segment * p.segment < model->layers) p.segment++;
    if (!p.loss_chunk_rows) p.loss_chunk_rows = p.device == MTT_DEVICE_CUDA ? 2048 : 1024;
    if (!p.workspace_bytes) p.workspace_bytes = (size_t)32 << 20;
    if (p.window >= seq_len) p.window = 0;
    mtt__in_range(&faults, "batch", batch, 1, 1 << 20);
    mtt__in_range(&faults, "seq_len", seq_len, 1, 1 << 20);
    mtt__require(&faults, seq_len <= model->max_seq || model->positions == MTT_POSITIONS_SINUSOIDAL,
                 "seq_len is %d but the learned positions end at max_seq %d: raise max_seq", seq_len, model->max_seq);
    mtt__check_fields(&faults, &p, mtt__policy_field, MTT__LENGTH(mtt__policy_field));
    mtt__require(&faults, p.recompute != MTT_RECOMPUTE_BUDGET || p.budget_bytes, "recompute is budget: set budget_bytes");
    if (faults.count) return MTT_E_ARGUMENT;
    *resolved = p;
    return MTT_OK;
}

MTTDEF mtt_status mtt_optim_resolve(mtt_env *env, const mtt_optim_desc *optim, mtt_optim_desc *resolved)
{
    mtt__faults faults;
    mtt_optim_desc o = *optim;
    mtt__faults_init(&faults, env);
    mtt__apply_defaults(&o, mtt__optim_field, MTT__LENGTH(mtt__optim_field), 1);
    mtt__check_fields(&faults, &o, mtt__optim_field, MTT__LENGTH(mtt__optim_field));
    mtt__require(&faults, o.beta1 != 1 && o.beta2 != 1, "beta1 and beta2 must be below 1");
    mtt__require(&faults, o.min_lr <= o.lr, "min_lr is %g, it must not be above lr", (double)o.min_lr);
    mtt__require(&faults, o.lr_schedule == MTT_LR_CONSTANT || o.total_steps > o.warmup_steps,
                 "total_steps is %lld, a linear or cosine schedule needs more than the %lld of the warmup",
                 (long long)o.total_steps, (long long)o.warmup_steps);
    if (faults.count) return MTT_E_ARGUMENT;
    *resolved = o;
    return MTT_OK;
}

MTTDEF float mtt_learning_rate(const mtt_optim_desc *o, int64_t step)
{
    double progress, share;
    if (step < o->warmup_steps) return (float)(o->lr * (double)(step + 1) / (double)o->warmup_steps);
    if (o->lr_schedule == MTT_LR_CONSTANT) return o->lr;
    progress = (double)(step - o->warmup_steps) / (double)(o->total_steps - o->warmup_steps);
    if (progress > 1) progress = 1;
    share = o->lr_schedule == MTT_LR_LINEAR ? 1 - progress : 0.5 * (1 + cos(3.14159265358979323846 * progress));
    return (float)(o->min_lr + (o->lr - o->min_lr) * share);
}

/* ---- techniques ---- */

/* The words of a technique, in the order of its name. */
static const struct {
    const char *word;
    size_t offset;
    int value;
} mtt__technique[] = {
    {"fp32", offsetof(mtt_policy, precision), MTT_FP32},
    {"tf32", offsetof(mtt_policy, precision), MTT_TF32},
    {"bf16", offsetof(mtt_policy, precision), MTT_BF16},
    {"fp16", offsetof(mtt_policy, precision), MTT_FP16},
    {"flash", offsetof(mtt_policy, attention), MTT_ATTENTION_FLASH},
    {"selective", offsetof(mtt_policy, recompute), MTT_RECOMPUTE_SELECTIVE},
    {"checkpointing", offsetof(mtt_policy, recompute), MTT_RECOMPUTE_LAYER},
    {"segments", offsetof(mtt_policy, recompute), MTT_RECOMPUTE_SEGMENTS},
    {"budget", offsetof(mtt_policy, recompute), MTT_RECOMPUTE_BUDGET},
    {"chunked", offsetof(mtt_policy, loss), MTT_LOSS_CHUNKED},
    {"compact", offsetof(mtt_policy, state), MTT_STATE_COMPACT},
    {"split", offsetof(mtt_policy, split), 1},
};

/* The number behind `prefix` if that is all of the word, 1 to 2^30; otherwise 0. */
static int mtt__word_number(const char *word, size_t size, const char *prefix)
{
    size_t i = strlen(prefix);
    int64_t number = 0;
    if (size <= i || memcmp(word, prefix, i) != 0) return 0;
    for (; i < size && word[i] >= '0' && word[i] <= '9' && number < 1 << 30; i++) number = 10 * number + (word[i] - '0');
    return i == size && number <= 1 << 30 ? (int)number : 0;
}

MTTDEF mtt_status mtt_policy_parse(mtt_env *env, const char *words, mtt_policy *policy, int *batch)
{
    mtt_policy p = *policy;
    const char *at = words;
    int new_batch = 0;
    for (;; at++) {
        size_t size = strcspn(at, "_"), k;
        int number = 0;
        for (k = 0; k < MTT__LENGTH(mtt__technique); k++)
            if (strlen(mtt__technique[k].word) == size && memcmp(at, mtt__technique[k].word, size) == 0) break;
        if (k < MTT__LENGTH(mtt__technique)) *(int *)(void *)((char *)&p + mtt__technique[k].offset) = mtt__technique[k].value;
        else if ((number = mtt__word_number(at, size, "window")) != 0) {
            p.attention = MTT_ATTENTION_FLASH;
            p.window = number;
        } else if (batch && (number = mtt__word_number(at, size, "bs")) != 0) new_batch = number;
        else
            return mtt__fail(env, MTT_E_ARGUMENT, "\"%.*s\" in \"%.200s\" is no technique: fp32 tf32 bf16 fp16 flash windowN "
                             "selective checkpointing segments budget chunked compact split%s, joined by _",
                             (int)(size < 60 ? size : 60), at, words, batch ? " bsN" : "");
        at += size;
        if (!*at) break;
    }
    *policy = p;
    if (new_batch) *batch = new_batch;
    return MTT_OK;
}

MTTDEF size_t mtt_policy_name(const mtt_policy *policy, char *text, size_t capacity)
{
    mtt__text out;
    size_t k;
    mtt__text_init(&out, text, capacity);
    for (k = 0; k < MTT__LENGTH(mtt__technique); k++)
        if (*(const int *)(const void *)((const char *)policy + mtt__technique[k].offset) == mtt__technique[k].value)
            mtt__print(&out, "%s%s", out.size ? "_" : "", mtt__technique[k].word);
    if (policy->window) mtt__print(&out, "_window%d", policy->window);
    return out.size;
}

/* ----------------------------------------------------------------------------------------------------------
   >>tensors
   ---------------------------------------------------------------------------------------------------------- */

/* Of each precision: type of activations and weights in use, whether the loss is scaled, and FLOP/s of
   products on an H200, to compare policies by. With 16 bits 500e12 are measured (779e12 in a product of 8192
   x 8192 x 8192, less at a model's widths); the others are estimates. */
static const struct {
    mtt_dtype dtype;
    int scaled;
    double rate;
} mtt__precisions[] = {{MTT_F32, 0, 50e12}, {MTT_F32, 0, 250e12}, {MTT_BF16_BITS, 0, 500e12}, {MTT_F16_BITS, 1, 500e12}};

enum { MTT__BEFORE, MTT__LAYER, MTT__AFTER }; /* place of a parameter in the model */
enum { MTT__ZEROS, MTT__ONES, MTT__NORMAL, MTT__NORMAL_RESIDUAL }; /* N(0, 0.02); the last over sqrt(2 * layers) */

/* Every parameter: kind, name, place, rows, columns (0 = a vector), initial values, exists if. Matrices are
   [in, out] as GPT-2's, embedding and head [vocab, d_model]. Only matrices decay. Rows of VOCAB are padded in
   memory. */
#define MTT__PARAMETERS(X)                                                                              \
    X(WTE, "wte.weight", BEFORE, VOCAB, m->d_model, NORMAL, 1)                                          \
    X(WPE, "wpe.weight", BEFORE, m->max_seq, m->d_model, NORMAL, m->positions == MTT_POSITIONS_LEARNED) \
    X(LN_1_WEIGHT, "h.%d.ln_1.weight", LAYER, m->d_model, 0, ONES, 1)                                   \
    X(LN_1_BIAS, "h.%d.ln_1.bias", LAYER, m->d_model, 0, ZEROS, 1)                                      \
    X(QKV_WEIGHT, "h.%d.attn.c_attn.weight", LAYER, m->d_model, 3 * m->d_model, NORMAL, 1)              \
    X(QKV_BIAS, "h.%d.attn.c_attn.bias", LAYER, 3 * m->d_model, 0, ZEROS, 1)                            \
    X(PROJ_WEIGHT, "h.%d.attn.c_proj.weight", LAYER, m->d_model, m->d_model, NORMAL_RESIDUAL, 1)        \
    X(PROJ_BIAS, "h.%d.attn.c_proj.bias", LAYER, m->d_model, 0, ZEROS, 1)                               \
    X(LN_2_WEIGHT, "h.%d.ln_2.weight", LAYER, m->d_model, 0, ONES, 1)                                   \
    X(LN_2_BIAS, "h.%d.ln_2.bias", LAYER, m->d_model, 0, ZEROS, 1)                                      \
    X(FC_WEIGHT, "h.%d.mlp.c_fc.weight", LAYER, m->d_model, m->d_ff, NORMAL, 1)                         \
    X(FC_BIAS, "h.%d.mlp.c_fc.bias", LAYER, m->d_ff, 0, ZEROS, 1)                                       \
    X(MLP_WEIGHT, "h.%d.mlp.c_proj.weight", LAYER, m->d_ff, m->d_model, NORMAL_RESIDUAL, 1)             \
    X(MLP_BIAS, "h.%d.mlp.c_proj.bias", LAYER, m->d_model, 0, ZEROS, 1)                                 \
    X(LN_F_WEIGHT, "ln_f.weight", AFTER, m->d_model, 0, ONES, 1)                                        \
    X(LN_F_BIAS, "ln_f.bias", AFTER, m->d_model, 0, ZEROS, 1)                                           \
    X(HEAD_WEIGHT, "lm_head.weight", AFTER, VOCAB, m->d_model, NORMAL, !m->tied_head)                   \
    X(HEAD_BIAS, "lm_head.bias", AFTER, VOCAB, 0, ZEROS, !m->no_head_bias)

#define MTT__PARAMETER_ENUM(kind, name, place, rows, columns, init, exists) MTT__##kind,
enum { MTT__PARAMETERS(MTT__PARAMETER_ENUM) MTT__PARAMETER_KINDS };
#define MTT__PARAMETER_ROW(kind, name, place, rows, columns, init, exists) {name, MTT__##place, MTT__##init},
static const struct {
    const char *name;
    int place, init;
} mtt__parameter_row[] = {MTT__PARAMETERS(MTT__PARAMETER_ROW)};

/* The shape of a parameter whose rows of VOCAB count `VOCAB`; 0 if the model has no such parameter. */
static int mtt__parameter_shape(const mtt_model_desc *m, int kind, int64_t VOCAB, int64_t shape[2])
{
    switch (kind) {
#define MTT__PARAMETER_SHAPE(kind, name, place, rows, columns, init, exists)            \
    case MTT__##kind: shape[0] = rows; shape[1] = columns; return exists;
        MTT__PARAMETERS(MTT__PARAMETER_SHAPE)
    }
    return 0;
}

/* What the optimizer keeps of each parameter, in one tensor for all: kind, name, prefix of the parameter's
   name in a checkpoint, exists if. A master is the weight as exactly as it is kept: FP32, or 8 more bits in
   the compact state. Moments are FP32, or 8-bit codes with the scales of their groups behind them. */
#define MTT__KEPT(X)                                                                    \
    X(MASTER, "master", "", dtype != MTT_F32)                                           \
    X(FIRST, "m", "optim.m.", 1)                                                        \
    X(SECOND, "v", "optim.v.", 1)
#define MTT__KEPT_ENUM(kind, name, prefix, exists) MTT__##kind,
enum { MTT__KEPT(MTT__KEPT_ENUM) MTT__KEPT_KINDS };

/* When an activation is dropped after the forward pass: if the recompute level of its layer is at least this.
   */
enum { MTT__BY_SELECTIVE = 1, MTT__BY_LAYER, MTT__BY_SEGMENT, MTT__BY_NOTHING };

/* Every activation of a layer: role, name, shape (0 = no such dimension), 1 = 32 bits in every precision,
   category, dropped by, frees. Layer number `layers` holds the final norm and the head. Frees, for segments:
   once the backward pass is through with the operation that makes this activation, it drops what the layer
   made before that other one. */
#define MTT__ACTIVATIONS(X)                                                                           \
    X(RESIDUAL, "x", d->batch, d->seq_len, d->d_model, 0, MTT_ACTIVATIONS, MTT__BY_SEGMENT, RESIDUAL) \
    X(LN_1, "ln_1", d->rows, d->d_model, 0, 0, MTT_ACTIVATIONS, MTT__BY_SELECTIVE, NONE)              \
    X(LN_1_STATS, "ln_1.stats", d->rows, 2, 0, 1, MTT_ACTIVATIONS, MTT__BY_LAYER, NONE)               \
    X(QKV, "attn.qkv", d->rows, qkv.row, 0, 0, MTT_ACTIVATIONS, MTT__BY_LAYER, NONE)                  \
    X(SCORES, "attn.scores", heads, d->seq_len, d->seq_len, 0, MTT_SCORES, MTT__BY_SELECTIVE, NONE)   \
    X(PROBS, "attn.probs", heads, d->seq_len, d->seq_len, 0, MTT_SCORES, MTT__BY_SELECTIVE, NONE)     \
    X(DROPPED, "attn.dropped", heads, d->seq_len, d->seq_len, 0, MTT_SCORES, MTT__BY_SELECTIVE, NONE) \
    X(LSE, "attn.lse", heads, d->seq_len, 0, 1, MTT_ACTIVATIONS, MTT__BY_LAYER, NONE)                 \
    X(ATTENDED, "attn.out", d->rows, d->d_model, 0, 0, MTT_ACTIVATIONS, MTT__BY_LAYER, NONE)          \
    X(PROJ, "attn.proj", d->rows, d->d_model, 0, 0, MTT_ACTIVATIONS, MTT__BY_LAYER, QKV)              \
    X(MIDDLE, "x_mid", d->rows, d->d_model, 0, 0, MTT_ACTIVATIONS, MTT__BY_LAYER, NONE)               \
    X(LN_2, "ln_2", d->rows, d->d_model, 0, 0, MTT_ACTIVATIONS, MTT__BY_SELECTIVE, LN_2)              \
    X(LN_2_STATS, "ln_2.stats", d->rows, 2, 0, 1, MTT_ACTIVATIONS, MTT__BY_LAYER, NONE)               \
    X(FC, "mlp.fc", d->rows, d->d_ff, 0, 0, MTT_ACTIVATIONS, MTT__BY_LAYER, NONE)                     \
    X(GELU, "mlp.gelu", d->rows, d->d_ff, 0, 0, MTT_ACTIVATIONS, MTT__BY_SELECTIVE, NONE)             \
    X(MLP, "mlp.proj", d->rows, d->d_model, 0, 0, MTT_ACTIVATIONS, MTT__BY_LAYER, FC)                 \
    X(LAST_ROW, "last_row", 1, d->d_model, 0, 0, MTT_ACTIVATIONS, MTT__BY_NOTHING, NONE)              \
    X(LN_F, "ln_f", b->head_rows, d->d_model, 0, 0, MTT_ACTIVATIONS, MTT__BY_NOTHING, NONE)           \
    X(LN_F_STATS, "ln_f.stats", b->head_rows, 2, 0, 1, MTT_ACTIVATIONS, MTT__BY_NOTHING, NONE)        \
    X(LOGITS, "logits", b->head_rows, d->vocab_padded, 0, 0, MTT_LOGITS, MTT__BY_NOTHING, NONE)       \
    X(ROW_LOSS, "row_loss", d->rows, 3, 0, 1, MTT_DATA, MTT__BY_NOTHING, NONE)

#define MTT__ROLE_ENUM(role, name, a, b, c, wide, category, dropped_by, frees) MTT__A_##role,
enum { MTT__A_NONE = -1, MTT__ACTIVATIONS(MTT__ROLE_ENUM) MTT__ROLES };
#define MTT__ROLE_ROW(role, name, a, b, c, wide, category, dropped_by, frees) {name, dropped_by, MTT__A_##frees},
static const struct {
    const char *name;
    int dropped_by, frees;
} mtt__role[] = {MTT__ACTIVATIONS(MTT__ROLE_ROW)};

typedef struct mtt__parameter {
    int kind, layer;  /* layer -1 outside the layers */
    int64_t shape[2]; /* without padding; shape[1] is 0 for a vector */
    int64_t first;    /* element where it begins in the tensors that the optimizer keeps */
    mtt_tensor *weight, *gradient;
} mtt__parameter;

/* A training step, an evaluation, or the logits of one token: operations over tensors that share one arena.
   State comes first and has the same offsets in all programs of a schedule. */
typedef struct mtt__program {
    mtt__pool pool; /* of everything that the pointers below lead to */
    mtt_shape shape;
    mtt_tensor **tensors;
    mtt_op *ops, *later_ops; /* the second list is for micro-batches after the first; NULL if there are none */
    mtt__parameter *parameters;
    int tensor_count, op_count, parameter_count;
    int step_begin; /* the forward and backward pass end here */
    mtt_tensor *kept[MTT__KEPT_KINDS];
    mtt_tensor *positions, *tokens, *targets, *control, *counters, *ranges, *workspace, *output;
    size_t (*bytes)[MTT_CATEGORY_COUNT]; /* alive during each operation */
    size_t arena_bytes;
} mtt__program;

enum { MTT__TRAIN, MTT__EVALUATE, MTT__NEXT, MTT__PROGRAMS };

struct mtt_schedule {
    mtt_env *env;
    mtt_model_desc model;
    mtt_policy policy;
    int recompute_layers, recompute_selective; /* of the first layers recomputed whole, of the next in part */
    int split;                                 /* micro-batches in a batch; the policy's `accumulate` counts them */
    size_t least;                              /* bytes of the smallest plan that was tried for a budget */
    mtt__program programs[MTT__PROGRAMS];
};

static int64_t mtt__parameter_elements(const mtt__parameter *q)
{
    return q->shape[0] * (q->shape[1] ? q->shape[1] : 1);
}

/* ----------------------------------------------------------------------------------------------------------
   >>schedule
   ---------------------------------------------------------------------------------------------------------- */

#define MTT__OP_ROW(name, inputs, operands, flops, bytes, scratch)                      \
    {#name, inputs, (int)(sizeof(mtt_##name) / sizeof(mtt_tensor *))},
static const struct {
    const char *name;
    int inputs, operands;
} mtt__op_row[] = {MTT_OPS(MTT__OP_ROW)};

/* The operands of any operation. */
#define MTT__OP_MEMBER(name, inputs, operands, flops, bytes, scratch) mtt_##name name;
typedef union mtt__operands {
    MTT_OPS(MTT__OP_MEMBER)
} mtt__operands;
enum { MTT__MOST_OPERANDS = sizeof(mtt__operands) / sizeof(mtt_tensor *) };

/* Panels of A, B and C in FP32, through which the CPU's matrix products pass: 256 x 512, 512 x 512 and 256 x 512. */
enum {
    MTT__PANEL_M = 256,
    MTT__PANEL_N = 512,
    MTT__PANEL_K = 512,
    MTT__CPU_WORKSPACE = 4 * (MTT__PANEL_M * MTT__PANEL_K + MTT__PANEL_K * MTT__PANEL_N + MTT__PANEL_M * MTT__PANEL_N)
};

MTTDEF const char *mtt_op_name(mtt_op_kind kind)
{
    return (unsigned)kind < MTT_OP_KIND_COUNT ? mtt__op_row[kind].name : "unknown";
}

/* Builds one program. After the first failure everything does nothing; `nothing` and `no_op` then take what
   is written. */
typedef struct mtt__builder {
    mtt_env *env;
    const mtt_schedule *schedule;
    mtt__program *program;
    mtt_tensor **current;  /* [role][layer]: holds the activation now; NULL = dropped or not made yet */
    mtt_tensor **gradient; /* [role][layer]: holds its gradient */
    int *maker;            /* [role][layer]: the operation that made it in the forward pass */
    int *parameter;        /* [kind][layer]: index of the parameter, -1 = the model has none */
    int *written;          /* of each parameter: 1 = an operation has written its gradient */
    size_t tensor_capacity, op_capacity, parameter_capacity;
    int64_t head_rows;     /* rows that reach the final norm and the head */
    mtt_phase phase;
    int recomputing;
    mtt_status status;
    mtt_op *op;            /* the last one */
    mtt_tensor nothing;
    mtt_op no_op;
    mtt__operands no_operands;
} mtt__builder;

static mtt_dtype mtt__dtype(const mtt__builder *b)
{
    return mtt__precisions[b->schedule->policy.precision].dtype;
}

static size_t mtt__slot(const mtt__builder *b, int row, int layer)
{
    return (size_t)row * (size_t)(b->program->shape.layers + 1) + (size_t)(layer < 0 ? 0 : layer);
}

static mtt_tensor *mtt__add_tensor(mtt__builder *b, mtt_dtype dtype, mtt_category category, int layer, const char *name,
                                   int64_t s0, int64_t s1, int64_t s2)
{
    mtt__program *p = b->program;
    mtt_tensor *t = NULL;
    mtt__text text;
    size_t rows = (size_t)(s1 ? s1 : 1), columns = (size_t)(s2 ? s2 : 1);
    if (!b->status)
        b->status = mtt__reserve(b->env, (void **)&p->tensors, &b->tensor_capacity, (size_t)p->tensor_count + 1, sizeof(t));
    if (!b->status && !(t = (mtt_tensor *)mtt__pool_take(b->env, &p->pool, sizeof(*t)))) b->status = MTT_E_MEMORY;
    if (b->status) return &b->nothing;
    mtt__text_init(&text, t->name, sizeof(t->name));
    if (layer >= 0 && layer < p->shape.layers) mtt__print(&text, "h.%d.", layer);
    mtt__print(&text, "%s", name);
    t->dtype = dtype;
    t->category = category;
    t->shape[0] = s0;
    t->shape[1] = s1;
    t->shape[2] = s2;
    t->rank = s2 ? 3 : s1 ? 2 : 1;
    t->bytes = mtt__mul(mtt__mul((size_t)s0, rows), mtt__mul(columns, mtt__dtype_bytes[dtype]));
    t->role = t->layer = t->parameter = t->first = t->last = -1;
    return p->tensors[p->tensor_count++] = t;
}

static mtt_tensor *mtt__add_state(mtt__builder *b, mtt_dtype dtype, mtt_category category, const char *name, int64_t s0,
                                  int64_t s1)
{
    mtt_tensor *t = mtt__add_tensor(b, dtype, category, -1, name, s0, s1, 0);
    t->persistent = 1;
    return t;
}

/* A new tensor for an activation, from now on its current one. */
static mtt_tensor *mtt__make(mtt__builder *b, int role, int layer)
{
    const mtt_shape *d = &b->program->shape;
    mtt_qkv qkv = mtt_qkv_of(d);
    int64_t heads = (int64_t)d->batch * d->heads;
    mtt_tensor *t = &b->nothing;
    switch (role) {
#define MTT__MAKE(role, name, s0, s1, s2, wide, category, dropped_by, frees)                       \
    case MTT__A_##role:                                                                            \
        t = mtt__add_tensor(b, wide ? MTT_F32 : mtt__dtype(b), category, layer, name, s0, s1, s2); \
        break;
        MTT__ACTIVATIONS(MTT__MAKE)
    }
    t->role = role;
    t->layer = layer;
    if (!b->status) b->current[mtt__slot(b, role, layer)] = t;
    return t;
}

/* Appends an operation. `operands` is its row's struct. The result is valid until the next operation. */
static mtt_op *mtt__emit(mtt__builder *b, mtt_op_kind kind, int layer, int site, const void *operands)
{
    mtt__program *p = b->program;
    size_t bytes = (size_t)mtt__op_row[kind].operands * sizeof(mtt_tensor *);
    mtt_tensor **copy = NULL;
    mtt_op *op;
    int k;
    if (!b->status)
        b->status = mtt__reserve(b->env, (void **)&p->ops, &b->op_capacity, (size_t)p->op_count + 1, sizeof(*op));
    if (!b->status && !(copy = (mtt_tensor **)mtt__pool_take(b->env, &p->pool, bytes))) b->status = MTT_E_MEMORY;
    if (b->status) return &b->no_op;
    memcpy(copy, operands, bytes);
    op = &p->ops[p->op_count];
    memset(op, 0, sizeof(*op));
    op->kind = kind;
    op->phase = b->phase;
    op->layer = layer;
    op->site = site;
    op->recomputed = b->recomputing;
    op->operands = copy;
    op->inputs = mtt__op_row[kind].inputs;
    op->outputs = mtt__op_row[kind].operands - op->inputs;
    for (k = op->inputs; k < op->inputs + op->outputs && b->phase == MTT_FORWARD; k++)
        if (copy[k] && copy[k]->role >= 0) b->maker[mtt__slot(b, copy[k]->role, copy[k]->layer)] = p->op_count;
    p->op_count++;
    return op;
}

/* MTT__EMIT(b, layer, site, norm, x, gain, shift, y, stats); b->op is the new operation. */
#define MTT__EMIT(b, layer, site, name, ...)                                            \
    do {                                                                                \
        mtt_##name mtt__row = {__VA_ARGS__};                                       \
        b->op = mtt__emit(b, MTT_OP_##name, layer, site, &mtt__row);               \
    } while (0)

/* ---- recomputation ---- */

/* Recompute level of a layer: 0 keeps all, then as in the table of activations. */
static int mtt__recompute_level(const mtt_schedule *s, int layer)
{
    if (layer >= s->recompute_layers + s->recompute_selective) return 0;
    if (layer >= s->recompute_layers) return MTT__BY_SELECTIVE;
    return s->policy.recompute == MTT_RECOMPUTE_SEGMENTS && layer % s->policy.segment ? MTT__BY_SEGMENT : MTT__BY_LAYER;
}

/* The tensor that holds an activation. If it was dropped, the operation that made it is emitted again, after
   what that operation needs in its turn. This is all there is to recomputation. */
static mtt_tensor *mtt__need(mtt__builder *b, mtt_tensor *t)
{
    mtt_tensor *operands[MTT__MOST_OPERANDS], *now;
    mtt_op source, *again;
    int k, count;
    if (!t || t->role < 0 || b->status) return t;
    now = b->current[mtt__slot(b, t->role, t->layer)];
    if (now) return now;
    source = b->program->ops[b->maker[mtt__slot(b, t->role, t->layer)]];
    count = source.inputs + source.outputs;
    for (k = 0; k < source.inputs; k++) mtt__need(b, source.operands[k]);
    for (k = 0; k < count && !b->status; k++) {
        operands[k] = source.operands[k];
        if (!operands[k] || operands[k]->role < 0) continue;
        now = b->current[mtt__slot(b, operands[k]->role, operands[k]->layer)];
        operands[k] = now ? now : mtt__make(b, operands[k]->role, operands[k]->layer);
    }
    if (b->status) return t;
    b->recomputing = 1;
    again = mtt__emit(b, source.kind, source.layer, source.site, operands);
    b->recomputing = 0;
    again->transposed = source.transposed;
    return b->current[mtt__slot(b, t->role, t->layer)];
}

/* What the recompute levels drop after the forward pass. Under segments the first layer's input goes, too:
   embedding again costs next to nothing. */
static void mtt__drop_activations(mtt__builder *b)
{
    int layer, role;
    for (layer = 0; layer <= b->program->shape.layers; layer++)
        for (role = 0; role < MTT__ROLES; role++)
            if (mtt__role[role].dropped_by <= mtt__recompute_level(b->schedule, layer))
                b->current[mtt__slot(b, role, layer)] = NULL;
    if (b->schedule->policy.recompute == MTT_RECOMPUTE_SEGMENTS && mtt__recompute_level(b->schedule, 0) >= MTT__BY_LAYER)
        b->current[mtt__slot(b, MTT__A_RESIDUAL, 0)] = NULL;
}

/* Segments drop recomputed activations as soon as half a layer is done; the other half recomputes them if it
   must. So at most half a layer, attention or MLP, is in memory at a time. Layers' inputs stay. */
static void mtt__free_half(mtt__builder *b, const mtt_op *op)
{
    const mtt_tensor *made = op->operands[op->inputs];
    int frees = made->role < 0 ? MTT__A_NONE : mtt__role[made->role].frees, boundary, role;
    if (frees < 0 || op->layer < 0 || b->schedule->policy.recompute != MTT_RECOMPUTE_SEGMENTS ||
        mtt__recompute_level(b->schedule, op->layer) < MTT__BY_LAYER)
        return;
    boundary = b->maker[mtt__slot(b, frees, made->layer)];
    for (role = 0; role < MTT__ROLES; role++)
        if (role != MTT__A_RESIDUAL && b->maker[mtt__slot(b, role, op->layer)] < boundary)
            b->current[mtt__slot(b, role, op->layer)] = NULL;
}

/* ---- the forward pass ---- */

static mtt_tensor *mtt__weight(mtt__builder *b, int kind, int layer)
{
    int i = b->parameter[mtt__slot(b, kind, layer)];
    return i < 0 || b->status ? NULL : b->program->parameters[i].weight;
}

/* y = x W + b */
static mtt_tensor *mtt__linear(mtt__builder *b, int layer, mtt_tensor *x, int weight, int bias, int y_role)
{
    mtt_tensor *y = mtt__make(b, y_role, layer);
    MTT__EMIT(b, layer, 0, linear, x, mtt__weight(b, weight, layer), mtt__weight(b, bias, layer), y);
    return y;
}

static mtt_tensor *mtt__norm(mtt__builder *b, int layer, mtt_tensor *x, int gain, int shift, int y_role, int stats_role)
{
    int at = gain == MTT__LN_F_WEIGHT ? -1 : layer; /* the final norm is the model's, not a layer's */
    mtt_tensor *y = mtt__make(b, y_role, layer), *stats = mtt__make(b, stats_role, layer);
    MTT__EMIT(b, at, 0, norm, x, mtt__weight(b, gain, at), mtt__weight(b, shift, at), y, stats);
    return y;
}

static mtt_tensor *mtt__attention(mtt__builder *b, int layer, mtt_tensor *qkv)
{
    mtt_tensor *control = b->program->control, *scores, *probs, *out, *lse;
    if (b->schedule->policy.attention == MTT_ATTENTION_FLASH) {
        lse = mtt__make(b, MTT__A_LSE, layer);
        out = mtt__make(b, MTT__A_ATTENDED, layer);
        MTT__EMIT(b, layer, MTT__SITE_ATTENTION, flash, qkv, control, out, lse);
        return out;
    }
    scores = mtt__make(b, MTT__A_SCORES, layer);
    MTT__EMIT(b, layer, 0, attention_scores, qkv, scores);
    probs = mtt__make(b, MTT__A_PROBS, layer);
    MTT__EMIT(b, layer, 0, softmax, scores, probs);
    if (b->program->shape.dropout > 0) {
        mtt_tensor *dropped = mtt__make(b, MTT__A_DROPPED, layer);
        MTT__EMIT(b, layer, MTT__SITE_ATTENTION, dropout_scores, probs, control, dropped);
        probs = dropped;
    }
    out = mtt__make(b, MTT__A_ATTENDED, layer);
    MTT__EMIT(b, layer, 0, attention_values, probs, qkv, out);
    return out;
}

static mtt_tensor *mtt__residual(mtt__builder *b, int layer, mtt_tensor *x, mtt_tensor *branch, int site, mtt_tensor *sum)
{
    MTT__EMIT(b, layer, site, residual, x, branch, b->program->control, sum);
    return sum;
}

/* Embedding and layers, up to the last residual stream. */
static mtt_tensor *mtt__emit_layers(mtt__builder *b)
{
    mtt__program *p = b->program;
    mtt_tensor *x = mtt__make(b, MTT__A_RESIDUAL, 0), *h, *gelu;
    int i;
    MTT__EMIT(b, -1, MTT__SITE_EMBED, embed, p->tokens, mtt__weight(b, MTT__WTE, -1), p->positions, p->control, x);
    for (i = 0; i < p->shape.layers; i++) {
        h = mtt__norm(b, i, x, MTT__LN_1_WEIGHT, MTT__LN_1_BIAS, MTT__A_LN_1, MTT__A_LN_1_STATS);
        h = mtt__linear(b, i, h, MTT__QKV_WEIGHT, MTT__QKV_BIAS, MTT__A_QKV);
        h = mtt__attention(b, i, h);
        h = mtt__linear(b, i, h, MTT__PROJ_WEIGHT, MTT__PROJ_BIAS, MTT__A_PROJ);
        x = mtt__residual(b, i, x, h, MTT__SITE_PROJ, mtt__make(b, MTT__A_MIDDLE, i));
        h = mtt__norm(b, i, x, MTT__LN_2_WEIGHT, MTT__LN_2_BIAS, MTT__A_LN_2, MTT__A_LN_2_STATS);
        h = mtt__linear(b, i, h, MTT__FC_WEIGHT, MTT__FC_BIAS, MTT__A_FC);
        gelu = mtt__make(b, MTT__A_GELU, i);
        MTT__EMIT(b, i, 0, gelu, h, gelu);
        h = mtt__linear(b, i, gelu, MTT__MLP_WEIGHT, MTT__MLP_BIAS, MTT__A_MLP);
        x = mtt__residual(b, i, x, h, MTT__SITE_MLP, mtt__make(b, MTT__A_RESIDUAL, i + 1));
    }
    return x;
}

/* ---- the backward pass ---- */

/* The gradient of a parameter, made when it is first asked for unless it is state. Sets *adds if an operation
   has written it before. In the compact state, gradients of the layers' matrices are written exactly once a
   step if it has one micro-batch, so 16 bits lose nothing by adding. */
static mtt_tensor *mtt__parameter_gradient(mtt__builder *b, const mtt_tensor *weight, int *adds)
{
    const mtt_policy *policy = &b->schedule->policy;
    mtt__parameter *q;
    char name[sizeof(weight->name)];
    mtt__text text;
    if (!weight || weight->parameter < 0 || b->status) return NULL;
    q = &b->program->parameters[weight->parameter];
    if (adds) *adds = b->written[weight->parameter]++ > 0;
    if (!q->gradient) {
        int written_once = policy->state == MTT_STATE_COMPACT && policy->accumulate == 1 && q->layer >= 0 && weight->rank > 1;
        mtt__text_init(&text, name, sizeof(name));
        mtt__print(&text, "d_%s", weight->name);
        q->gradient = mtt__add_tensor(b, written_once ? weight->dtype : MTT_F32, MTT_GRADIENTS, -1, name, weight->shape[0],
                                      weight->shape[1], 0);
    }
    return q->gradient;
}

/* The current gradient of an activation; NULL if there is none yet. */
static mtt_tensor **mtt__gradient(mtt__builder *b, const mtt_tensor *t)
{
    return &b->gradient[mtt__slot(b, t->role, t->layer)];
}

/* A new tensor for the gradient of an activation. The residual stream's is one tensor all the way down. */
static mtt_tensor *mtt__make_gradient(mtt__builder *b, const mtt_tensor *t)
{
    char name[sizeof(t->name)];
    mtt__text text;
    int layer = t->role == MTT__A_RESIDUAL ? -1 : t->layer;
    if (b->status) return &b->nothing;
    mtt__text_init(&text, name, sizeof(name));
    mtt__print(&text, "d_%s", mtt__role[t->role].name);
    return *mtt__gradient(b, t) =
               mtt__add_tensor(b, mtt__dtype(b), t->category, layer, name, t->shape[0], t->shape[1], t->shape[2]);
}

/* An adjoint emits the backward operations of a forward operation: it takes the gradient of what the
   operation made, and leaves the gradients of its inputs. Activations may have been dropped: mtt__need brings
   them back. */

static void mtt__adjoint_embed(mtt__builder *b, const mtt_op *op)
{
    const mtt_embed *f = MTT_OPERANDS_OF(embed, op);
    int adds = 0; /* 1 = a tied head has written its share */
    mtt_tensor *d_wte = mtt__parameter_gradient(b, f->wte, &adds), *d_wpe = mtt__parameter_gradient(b, f->positions, NULL);
    MTT__EMIT(b, -1, op->site, embed_backward, *mtt__gradient(b, f->x), f->tokens, f->control, d_wte, d_wpe);
    b->op->adds = adds;
}

/* The branch's gradient passes the norm and joins the residual stream's, in place. */
static void mtt__adjoint_norm(mtt__builder *b, const mtt_op *op)
{
    const mtt_norm *f = MTT_OPERANDS_OF(norm, op);
    mtt_tensor *x = mtt__need(b, f->x), *stats = mtt__need(b, f->stats), *joined = *mtt__gradient(b, f->x);
    mtt_tensor *dx = joined ? joined : mtt__make_gradient(b, f->x), *d_gain, *d_shift;
    int adds = 0;
    d_gain = mtt__parameter_gradient(b, f->gain, &adds);
    d_shift = mtt__parameter_gradient(b, f->shift, NULL);
    MTT__EMIT(b, op->layer, 0, norm_backward, *mtt__gradient(b, f->y), x, stats, f->gain, joined, dx, d_gain, d_shift);
    b->op->adds = adds;
}

/* The weight's gradient first: after it x may die. */
static void mtt__adjoint_linear(mtt__builder *b, const mtt_op *op)
{
    const mtt_linear *f = MTT_OPERANDS_OF(linear, op);
    mtt_tensor *x = mtt__need(b, f->x), *dy = *mtt__gradient(b, f->y), *dx, *d_weight, *d_bias;
    int adds = 0;
    d_weight = mtt__parameter_gradient(b, f->weight, &adds);
    d_bias = mtt__parameter_gradient(b, f->bias, NULL);
    MTT__EMIT(b, op->layer, 0, linear_backward_weight, x, dy, d_weight, d_bias);
    b->op->transposed = op->transposed;
    b->op->adds = adds;
    dx = mtt__make_gradient(b, f->x);
    MTT__EMIT(b, op->layer, 0, linear_backward_input, dy, f->weight, dx);
    b->op->transposed = op->transposed;
}

static void mtt__adjoint_gelu(mtt__builder *b, const mtt_op *op)
{
    const mtt_gelu *f = MTT_OPERANDS_OF(gelu, op);
    mtt_tensor *x = mtt__need(b, f->x), *dy = *mtt__gradient(b, f->y);
    MTT__EMIT(b, op->layer, 0, gelu_backward, dy, x, dy);
    *mtt__gradient(b, f->x) = dy;
}

/* The gradient of the sum is that of both: of the branch without what dropout dropped. */
static void mtt__adjoint_residual(mtt__builder *b, const mtt_op *op)
{
    const mtt_residual *f = MTT_OPERANDS_OF(residual, op);
    mtt_tensor *dy = *mtt__gradient(b, f->sum);
    *mtt__gradient(b, f->x) = *mtt__gradient(b, f->branch) = dy;
    if (b->program->shape.dropout > 0)
        MTT__EMIT(b, op->layer, op->site, dropout_backward, dy, f->control, mtt__make_gradient(b, f->branch));
}

static void mtt__adjoint_attention_scores(mtt__builder *b, const mtt_op *op)
{
    const mtt_attention_scores *f = MTT_OPERANDS_OF(attention_scores, op);
    mtt_tensor *qkv = mtt__need(b, f->qkv);
    MTT__EMIT(b, op->layer, 0, attention_scores_backward, *mtt__gradient(b, f->scores), qkv, *mtt__gradient(b, f->qkv));
}

static void mtt__adjoint_softmax(mtt__builder *b, const mtt_op *op)
{
    const mtt_softmax *f = MTT_OPERANDS_OF(softmax, op);
    mtt_tensor *probs = mtt__need(b, f->probs), *d = *mtt__gradient(b, f->probs);
    MTT__EMIT(b, op->layer, MTT__SITE_ATTENTION, softmax_backward, d, probs, b->program->control, d);
    *mtt__gradient(b, f->scores) = d;
}

/* softmax_backward applies the mask. */
static void mtt__adjoint_dropout_scores(mtt__builder *b, const mtt_op *op)
{
    const mtt_dropout_scores *f = MTT_OPERANDS_OF(dropout_scores, op);
    *mtt__gradient(b, f->probs) = *mtt__gradient(b, f->dropped);
}

/* Makes the part of V in d_qkv; attention_scores_backward adds those of Q and K. */
static void mtt__adjoint_attention_values(mtt__builder *b, const mtt_op *op)
{
    const mtt_attention_values *f = MTT_OPERANDS_OF(attention_values, op);
    mtt_tensor *qkv = mtt__need(b, f->qkv), *probs = mtt__need(b, f->probs);
    mtt_tensor *d_probs = mtt__make_gradient(b, f->probs), *d_qkv = mtt__make_gradient(b, f->qkv);
    MTT__EMIT(b, op->layer, 0, attention_values_backward, *mtt__gradient(b, f->out), probs, qkv, d_probs, d_qkv);
}

static void mtt__adjoint_flash(mtt__builder *b, const mtt_op *op)
{
    const mtt_flash *f = MTT_OPERANDS_OF(flash, op);
    mtt_tensor *qkv = mtt__need(b, f->qkv), *out = mtt__need(b, f->out), *lse = mtt__need(b, f->lse);
    mtt_tensor *d_qkv = mtt__make_gradient(b, f->qkv);
    MTT__EMIT(b, op->layer, op->site, flash_backward, *mtt__gradient(b, f->out), qkv, out, lse, f->control, d_qkv);
}

/* The gradients take the logits' place. */
static void mtt__adjoint_cross_entropy(mtt__builder *b, const mtt_op *op)
{
    const mtt_cross_entropy *f = MTT_OPERANDS_OF(cross_entropy, op);
    mtt__program *p = b->program;
    MTT__EMIT(b, -1, 0, cross_entropy_backward, f->logits, f->losses, f->targets, p->control, p->counters, f->logits);
    *mtt__gradient(b, f->logits) = f->logits;
}

/* The backward pass: the forward list in reverse. chunked_loss has made its gradients in the forward pass. */
static void mtt__emit_backward(mtt__builder *b)
{
    int i;
    b->phase = MTT_BACKWARD;
    if (!b->status) mtt__drop_activations(b);
    for (i = b->program->op_count; i-- > 0 && !b->status;) {
        mtt_op op = b->program->ops[i];
        switch (op.kind) {
#define MTT__ADJOINT(name)                                                              \
    case MTT_OP_##name: mtt__adjoint_##name(b, &op); break;
            MTT__ADJOINT(embed) MTT__ADJOINT(norm) MTT__ADJOINT(linear) MTT__ADJOINT(gelu) MTT__ADJOINT(residual)
            MTT__ADJOINT(attention_scores) MTT__ADJOINT(softmax) MTT__ADJOINT(dropout_scores)
            MTT__ADJOINT(attention_values) MTT__ADJOINT(flash) MTT__ADJOINT(cross_entropy)
        default: break;
        }
        if (!b->status) mtt__free_half(b, &op);
    }
}

/* ---- head, loss and step ---- */

static mtt_tensor *mtt__head_weight(mtt__builder *b)
{
    return mtt__weight(b, b->schedule->model.tied_head ? MTT__WTE : MTT__HEAD_WEIGHT, -1);
}

static mtt_tensor *mtt__emit_logits(mtt__builder *b, mtt_tensor *normed)
{
    mtt_tensor *logits = mtt__make(b, MTT__A_LOGITS, b->program->shape.layers);
    MTT__EMIT(b, -1, 0, linear, normed, mtt__head_weight(b), mtt__weight(b, MTT__HEAD_BIAS, -1), logits);
    b->op->transposed = 1;
    return logits;
}

/* The loss of every row and their sum. The chunked loss is one operation with the head, and makes the
   gradients that are wanted, chunk by chunk. */
static void mtt__emit_loss(mtt__builder *b, mtt_tensor *normed, int gradients)
{
    mtt__program *p = b->program;
    const mtt_shape *d = &p->shape;
    mtt_tensor *losses = mtt__make(b, MTT__A_ROW_LOSS, d->layers), *logits;
    if (b->schedule->policy.loss == MTT_LOSS_CHUNKED) {
        mtt_tensor *weight = mtt__head_weight(b), *bias = mtt__weight(b, MTT__HEAD_BIAS, -1);
        mtt_tensor *dx = NULL, *d_weight = NULL, *d_bias = NULL;
        int64_t chunk = mtt__min(b->schedule->policy.loss_chunk_rows, d->rows);
        int adds = 0;
        logits = mtt__add_tensor(b, mtt__dtype(b), MTT_LOGITS, -1, "logits.chunk", chunk, d->vocab_padded, 0);
        if (gradients) {
            dx = mtt__make_gradient(b, normed);
            d_weight = mtt__parameter_gradient(b, weight, &adds);
            d_bias = mtt__parameter_gradient(b, bias, NULL);
        }
        MTT__EMIT(b, -1, 0, chunked_loss, normed, weight, bias, p->targets, p->control, p->counters, losses, logits, dx,
                  d_weight, d_bias);
        b->op->transposed = 1;
    } else {
        logits = mtt__emit_logits(b, normed);
        MTT__EMIT(b, -1, 0, cross_entropy, logits, p->targets, losses);
    }
    MTT__EMIT(b, -1, 0, sum_loss, losses, p->control, p->counters);
}

/* The gradient's norm over all parameters, then the update. */
static void mtt__emit_step(mtt__builder *b)
{
    mtt__program *p = b->program;
    mtt_tensor **lists = NULL;
    int i, n = p->parameter_count;
    b->phase = MTT_STEP;
    if (!b->status) lists = (mtt_tensor **)mtt__pool_take(b->env, &p->pool, 2 * (size_t)n * sizeof(*lists));
    if (!lists) {
        b->status = b->status ? b->status : MTT_E_MEMORY;
        return;
    }
    for (i = 0; i < n; i++) {
        lists[i] = p->parameters[i].gradient;
        lists[n + i] = p->parameters[i].weight;
    }
    MTT__EMIT(b, -1, 0, grad_norm, p->control, p->ranges, p->counters);
    b->op->gradients = lists;
    b->op->parameters = n;
    MTT__EMIT(b, -1, MTT__SITE_ROUND, adamw, p->control, p->counters, p->ranges, p->kept[MTT__MASTER], p->kept[MTT__FIRST],
              p->kept[MTT__SECOND]);
    b->op->gradients = lists;
    b->op->weights = lists + n;
    b->op->parameters = n;
}

/* ---- state ---- */

static void mtt__add_parameter(mtt__builder *b, int kind, int layer)
{
    mtt__program *p = b->program;
    mtt__parameter *q;
    int64_t shape[2], stored[2];
    char name[40];
    mtt__text text;
    if (!mtt__parameter_shape(&b->schedule->model, kind, p->shape.vocab, shape) || b->status) return;
    mtt__parameter_shape(&b->schedule->model, kind, p->shape.vocab_padded, stored);
    b->status = mtt__reserve(b->env, (void **)&p->parameters, &b->parameter_capacity, (size_t)p->parameter_count + 1, sizeof(*q));
    if (b->status) return;
    q = &p->parameters[p->parameter_count];
    memset(q, 0, sizeof(*q));
    mtt__text_init(&text, name, sizeof(name));
    mtt__print(&text, mtt__parameter_row[kind].name, layer);
    q->kind = kind;
    q->layer = layer;
    q->shape[0] = shape[0];
    q->shape[1] = shape[1];
    q->first = p->parameter_count ? q[-1].first + mtt__part_elements(q[-1].weight) : 0;
    q->weight = mtt__add_state(b, mtt__dtype(b), MTT_WEIGHTS, name, stored[0], stored[1]);
    q->weight->parameter = p->parameter_count;
    b->parameter[mtt__slot(b, kind, layer)] = p->parameter_count++;
}

/* The tensors that the optimizer keeps, and on a device the table that its kernels work through. */
static void mtt__add_kept(mtt__builder *b)
{
    mtt__program *p = b->program;
    const mtt__parameter *last;
    mtt_dtype dtype = mtt__dtype(b);
    int compact = b->schedule->policy.state == MTT_STATE_COMPACT, i;
    int64_t elements, ranges = 0;
    if (b->status) return;
    last = &p->parameters[p->parameter_count - 1];
    elements = last->first + mtt__part_elements(last->weight);
#define MTT__ADD_KEPT(kind, name, prefix, exists)                                                            \
    if (exists) {                                                                                            \
        int moment = compact && MTT__##kind != MTT__MASTER; /* codes of all groups, then their scales */     \
        p->kept[MTT__##kind] = mtt__add_state(b, compact ? MTT_U8 : MTT_F32, MTT_OPTIMIZER, name,            \
                                              moment ? elements / MTT__GROUP : elements, moment ? MTT__GROUP + 2 : 0);\
    }
    MTT__KEPT(MTT__ADD_KEPT)
    for (i = 0; i < p->parameter_count; i++) ranges += mtt__ceil_div(mtt__elements(p->parameters[i].weight), MTT__RANGE);
    if (b->schedule->policy.device == MTT_DEVICE_CUDA)
        p->ranges = mtt__add_state(b, MTT_U8, MTT_DATA, "ranges", ranges * (int64_t)sizeof(mtt_range), 0);
}

/* Everything that lives from step to step, in one order for all programs. The workspace comes last: its size
   is known when the operations are. */
static void mtt__add_all_state(mtt__builder *b)
{
    const mtt_shape *train = &b->schedule->programs[MTT__TRAIN].shape;
    mtt__program *p = b->program;
    int place, layer, kind, i;
    for (place = MTT__BEFORE; place <= MTT__AFTER; place++)
        for (layer = 0; layer < (place == MTT__LAYER ? p->shape.layers : 1); layer++)
            for (kind = 0; kind < MTT__PARAMETER_KINDS; kind++)
                if (mtt__parameter_row[kind].place == place) mtt__add_parameter(b, kind, place == MTT__LAYER ? layer : -1);
    mtt__add_kept(b);
    for (i = 0; i < p->parameter_count && b->schedule->policy.accumulate > 1 && !b->status; i++)
        mtt__parameter_gradient(b, p->parameters[i].weight, NULL)->persistent = 1;
    p->positions = mtt__weight(b, MTT__WPE, -1);
    if (!p->positions)
        p->positions = mtt__add_state(b, mtt__dtype(b), MTT_DATA, "positions", train->seq_len, p->shape.d_model);
    p->tokens = mtt__add_state(b, MTT_I32, MTT_DATA, "tokens", train->rows, 0);
    p->targets = mtt__add_state(b, MTT_I32, MTT_DATA, "targets", train->rows, 0);
    p->control = mtt__add_state(b, MTT_U8, MTT_DATA, "control", (int64_t)sizeof(mtt_control), 0);
    p->counters = mtt__add_state(b, MTT_U8, MTT_DATA, "counters", (int64_t)sizeof(mtt_counters), 0);
    p->workspace = mtt__add_state(b, MTT_U8, MTT_WORKSPACE, "workspace", 0, 0);
}

/* ---- fusions: one pass that joins neighbours by their operands ---- */

static void *mtt__fused(mtt__builder *b, mtt_op *op, mtt_op_kind kind)
{
    op->kind = kind;
    op->inputs = mtt__op_row[kind].inputs;
    op->outputs = mtt__op_row[kind].operands - op->inputs;
    op->operands = (mtt_tensor **)mtt__pool_take(b->env, &b->program->pool, sizeof(mtt_tensor *) * MTT__MOST_OPERANDS);
    if (!op->operands) b->status = MTT_E_MEMORY;
    return op->operands ? (void *)op->operands : (void *)&b->no_operands;
}

/* residual, norm: one pass over the row. */
static int mtt__fuse_residual_norm(mtt__builder *b, mtt_op *op, const mtt_op *next)
{
    const mtt_residual *r = MTT_OPERANDS_OF(residual, op);
    const mtt_norm *n = MTT_OPERANDS_OF(norm, next);
    mtt_residual_norm *f;
    if (op->kind != MTT_OP_residual || next->kind != MTT_OP_norm || n->x != r->sum) return 0;
    f = (mtt_residual_norm *)mtt__fused(b, op, MTT_OP_residual_norm);
    f->x = r->x, f->branch = r->branch, f->control = r->control, f->sum = r->sum;
    f->gain = n->gain, f->shift = n->shift, f->y = n->y, f->stats = n->stats;
    return 1;
}

/* linear, gelu: in 16 bits a product leaves time for GELU in its epilogue. Then the product's input, its
   result and GELU's are in memory at once. Segments cannot afford that: they leave GELU apart, but make the
   product by the same kernel, since its bits must be the same. */
static int mtt__fuse_linear_gelu(mtt__builder *b, mtt_op *op, const mtt_op *next)
{
    const mtt_linear *l = MTT_OPERANDS_OF(linear, op);
    const mtt_gelu *g = MTT_OPERANDS_OF(gelu, next);
    int apart = b->schedule->policy.recompute == MTT_RECOMPUTE_SEGMENTS;
    mtt_linear_gelu *f;
    if (op->kind != MTT_OP_linear || next->kind != MTT_OP_gelu || g->x != l->y || mtt__dtype(b) == MTT_F32) return 0;
    f = (mtt_linear_gelu *)mtt__fused(b, op, MTT_OP_linear_gelu);
    f->x = l->x, f->weight = l->weight, f->bias = l->bias, f->pre = l->y;
    f->y = apart ? NULL : g->y;
    return !apart;
}

/* linear_backward_input, gelu_backward: as above. The product's epilogue also sums the bias's gradient, which
   linear_backward_weight would make: that is among the next operations. */
static int mtt__fuse_linear_backward_gelu(mtt__builder *b, mtt_op *op, mtt_op *next, const mtt_op *end)
{
    const mtt_linear_backward_input *l = MTT_OPERANDS_OF(linear_backward_input, op);
    const mtt_gelu_backward *g = MTT_OPERANDS_OF(gelu_backward, next);
    mtt_linear_backward_gelu *f;
    mtt_op *at = next;
    if (op->kind != MTT_OP_linear_backward_input || next->kind != MTT_OP_gelu_backward || g->dy != l->dx ||
        mtt__dtype(b) == MTT_F32)
        return 0;
    f = (mtt_linear_backward_gelu *)mtt__fused(b, op, MTT_OP_linear_backward_gelu);
    f->dy = l->dy, f->weight = l->weight, f->pre = g->x, f->dx = g->dx;
    f->d_bias = NULL;
    while (at < end && (at->kind != MTT_OP_linear_backward_weight || MTT_OPERANDS_OF(linear_backward_weight, at)->dy != g->dx)) at++;
    if (at == end) return 1;
    op->adds = at->adds;
    f->d_bias = MTT_OPERANDS_OF(linear_backward_weight, at)->d_bias;
    ((mtt_linear_backward_weight *)(void *)at->operands)->d_bias = NULL;
    return 1;
}

static void mtt__fuse(mtt__builder *b)
{
    mtt__program *p = b->program;
    int count = 0, i;
    for (i = 0; i < p->op_count && !b->status; i++, count++) {
        mtt_op *op = &p->ops[count], *next = &p->ops[i + 1], *end = &p->ops[p->op_count];
        *op = p->ops[i];
        if (next < end && (mtt__fuse_residual_norm(b, op, next) || mtt__fuse_linear_gelu(b, op, next) ||
                           mtt__fuse_linear_backward_gelu(b, op, next, end)))
            i++;
    }
    p->op_count = count;
}

/* ---- programs ---- */

static void mtt__use(mtt_tensor *t, int op)
{
    if (!t) return;
    if (t->first < 0) t->first = op;
    t->last = op;
}

/* Sizes the workspace, finds out when each tensor lives, and copies the list for later micro-batches. */
static void mtt__close_program(mtt__builder *b)
{
    const mtt_policy *policy = &b->schedule->policy;
    mtt__program *p = b->program;
    size_t scratch = policy->device == MTT_DEVICE_CUDA ? policy->workspace_bytes : (size_t)MTT__CPU_WORKSPACE;
    int i, k;
    for (i = 0; i < p->op_count; i++) {
        mtt_op *op = &p->ops[i];
        op->shape = &p->shape;
        op->workspace = p->workspace;
        for (k = 0; k < op->inputs + op->outputs; k++) mtt__use(op->operands[k], i);
        for (k = 0; k < op->parameters; k++) mtt__use(op->gradients[k], i);
        if (policy->device == MTT_DEVICE_CUDA && mtt__op_scratch(op) > scratch) scratch = mtt__op_scratch(op);
    }
    if (p != &b->schedule->programs[MTT__TRAIN]) scratch = b->schedule->programs[MTT__TRAIN].workspace->bytes;
    p->workspace->shape[0] = (int64_t)scratch;
    p->workspace->bytes = scratch;
    for (i = 0; i < p->tensor_count; i++)
        if (p->tensors[i]->persistent) p->tensors[i]->first = 0, p->tensors[i]->last = p->op_count - 1;
    if (policy->accumulate == 1) return;
    p->later_ops = (mtt_op *)mtt__pool_take(b->env, &p->pool, (size_t)p->step_begin * sizeof(mtt_op));
    if (!p->later_ops) b->status = MTT_E_MEMORY;
    for (i = 0; i < p->step_begin && !b->status; i++) {
        p->later_ops[i] = p->ops[i];
        p->later_ops[i].adds = p->later_ops[i].later = 1;
    }
}

static void mtt__set_shape(mtt_shape *d, const mtt_model_desc *m, const mtt_policy *policy, int batch, int seq_len)
{
    d->batch = batch;
    d->seq_len = seq_len;
    d->layers = m->layers;
    d->d_model = m->d_model;
    d->heads = d->heads_kv = m->heads;
    d->head_dim = m->d_model / m->heads;
    d->d_ff = m->d_ff;
    d->vocab = m->vocab;
    d->vocab_padded = (int)mtt__round_up(m->vocab, 128);
    d->window = policy->window;
    d->rows = (int64_t)batch * seq_len;
    d->dropout = m->dropout;
}

static void mtt__emit_program(mtt__builder *b, int which)
{
    mtt__program *p = b->program;
    int layers = p->shape.layers;
    mtt_tensor *x, *row;
    mtt__add_all_state(b);
    x = mtt__emit_layers(b);
    if (which == MTT__NEXT) {
        row = mtt__make(b, MTT__A_LAST_ROW, layers);
        MTT__EMIT(b, -1, 0, pick_row, x, p->control, row);
        x = row;
    }
    x = mtt__norm(b, layers, x, MTT__LN_F_WEIGHT, MTT__LN_F_BIAS, MTT__A_LN_F, MTT__A_LN_F_STATS);
    if (which == MTT__NEXT) p->output = mtt__emit_logits(b, x);
    else mtt__emit_loss(b, x, which == MTT__TRAIN);
    if (which == MTT__TRAIN) mtt__emit_backward(b);
    mtt__fuse(b);
    p->step_begin = p->op_count;
    if (which == MTT__TRAIN) mtt__emit_step(b);
    if (!b->status) mtt__close_program(b);
}

static mtt_status mtt__build_program(mtt_schedule *s, int which, int batch, int seq_len)
{
    mtt__program *p = &s->programs[which];
    size_t layers = (size_t)s->model.layers + 1, slots = MTT__ROLES * layers, kinds = MTT__PARAMETER_KINDS * layers, i;
    mtt__builder b;
    mtt__pool pool = {NULL};
    memset(&b, 0, sizeof(b));
    b.env = s->env;
    b.schedule = s;
    b.program = p;
    mtt__set_shape(&p->shape, &s->model, &s->policy, which == MTT__NEXT ? 1 : batch, seq_len);
    if (which != MTT__TRAIN) p->shape.dropout = 0;
    b.head_rows = which == MTT__NEXT ? 1 : p->shape.rows;
    b.current = (mtt_tensor **)mtt__pool_take(s->env, &pool, slots * sizeof(*b.current));
    b.gradient = (mtt_tensor **)mtt__pool_take(s->env, &pool, slots * sizeof(*b.gradient));
    b.maker = (int *)mtt__pool_take(s->env, &pool, slots * sizeof(int));
    b.parameter = (int *)mtt__pool_take(s->env, &pool, kinds * sizeof(int));
    b.written = (int *)mtt__pool_take(s->env, &pool, kinds * sizeof(int));
    if (!b.current || !b.gradient || !b.maker || !b.parameter || !b.written) b.status = MTT_E_MEMORY;
    for (i = 0; i < kinds && !b.status; i++) b.parameter[i] = -1;
    if (!b.status) mtt__emit_program(&b, which);
    mtt__pool_free(s->env, &pool);
    return b.status;
}

/* ----------------------------------------------------------------------------------------------------------
   >>plan
   ---------------------------------------------------------------------------------------------------------- */

enum { MTT__ALIGN = 256 }; /* of every tensor in the arena, as cudaMalloc aligns */

static size_t mtt__slot_bytes(const mtt_tensor *t)
{
    return mtt__add(t->bytes, MTT__ALIGN - 1) / MTT__ALIGN * MTT__ALIGN;
}

/* Bytes alive during each operation, by category: changes at the first and after the last operation of each
   tensor, then running sums. Refuses what size_t cannot hold. */
static mtt_status mtt__measure(mtt_env *env, mtt__program *p)
{
    size_t all = 0, now[MTT_CATEGORY_COUNT] = {0};
    int i, c;
    p->bytes = (size_t(*)[MTT_CATEGORY_COUNT])mtt__pool_take(env, &p->pool,
                                                             ((size_t)p->op_count + 1) * sizeof(*p->bytes));
    if (!p->bytes) return MTT_E_MEMORY;
    for (i = 0; i < p->tensor_count; i++) {
        const mtt_tensor *t = p->tensors[i];
        all = mtt__add(all, mtt__slot_bytes(t));
        p->bytes[t->first][t->category] += mtt__slot_bytes(t);
        p->bytes[t->last + 1][t->category] -= mtt__slot_bytes(t);
    }
    if (all > SIZE_MAX / 2)
        return mtt__fail(env, MTT_E_BUDGET, "the tensors of this plan take more than %zu bytes, the most that can "
                         "be addressed: lower the batch, seq_len or the model", SIZE_MAX / 2);
    for (i = 0; i < p->op_count; i++)
        for (c = 0; c < MTT_CATEGORY_COUNT; c++) {
            now[c] += p->bytes[i][c]; /* a decrease wraps around, and back with the sum */
            p->bytes[i][c] = now[c];
            p->ops[i].live_bytes += now[c];
        }
    return MTT_OK;
}

/* ---- packing ---- */

/* A tensor that waits for its place. The larger its key, the earlier its turn; `rank` counts the turns. */
typedef struct mtt__waiting {
    mtt_tensor *tensor;
    size_t best; /* its offset in the best try */
    double key;
    int made, leaf, rank; /* order of creation; place among the leaves of the tree; order of turns */
} mtt__waiting;

/* A node of a k-d tree over the waiting tensors, by their first and last operation: the bounds of both, and
   the least rank that still waits, INT_MAX if none does. */
typedef struct mtt__box {
    int first_low, first_high, last_low, last_high, rank;
} mtt__box;

/* Places tensors into the arena. The operations are a line, a tensor an interval of it. At a level (an
   offset) the operations whose tensors all end there or below are free. They form free intervals. */
typedef struct mtt__packer {
    mtt_env *env;
    mtt__waiting *waiting, *by_rank;
    mtt__box *boxes;       /* of the tree: children of node k are 2k + 1 and 2k + 2, each of half of its tensors */
    int *free_end;         /* at the first operation of a free interval its last one; elsewhere -1 */
    int *free_begin;       /* and the reverse */
    mtt__heap placed;      /* tensors by their ends: when the level reaches one, its interval is free again */
    size_t level, arena;
    int count, ops;
    mtt_status status;
} mtt__packer;

static int mtt__coordinate(const mtt__waiting *w, int axis)
{
    return axis ? w->tensor->last : w->tensor->first;
}

/* Moves the tensors of [low, high) that belong before place `middle` along an axis before it (Hoare's
   selection). */
static void mtt__select(mtt__waiting *w, int low, int middle, int high, int axis)
{
    while (high - low > 1) {
        int pivot = mtt__coordinate(&w[low + (high - low) / 2], axis), i = low, j = high - 1;
        while (i <= j) {
            while (mtt__coordinate(&w[i], axis) < pivot) i++;
            while (mtt__coordinate(&w[j], axis) > pivot) j--;
            if (i <= j) {
                mtt__waiting swap = w[i];
                w[i++] = w[j];
                w[j--] = swap;
            }
        }
        if (middle <= j) high = j + 1;
        else if (middle >= i) low = i;
        else return;
    }
}

/* Builds the tree over waiting [low, high), halved by first and by last operation in turn. */
static void mtt__tree_build(mtt__packer *p, int node, int low, int high, int axis)
{
    mtt__box *box = &p->boxes[node];
    const mtt__box *a = box, *b = box;
    int middle = low + (high - low) / 2;
    if (high - low == 1) {
        box->first_low = box->first_high = p->waiting[low].tensor->first;
        box->last_low = box->last_high = p->waiting[low].tensor->last;
        return;
    }
    mtt__select(p->waiting, low, middle, high, axis);
    mtt__tree_build(p, 2 * node + 1, low, middle, !axis);
    mtt__tree_build(p, 2 * node + 2, middle, high, !axis);
    a = &p->boxes[2 * node + 1];
    b = &p->boxes[2 * node + 2];
    box->first_low = a->first_low < b->first_low ? a->first_low : b->first_low;
    box->first_high = a->first_high > b->first_high ? a->first_high : b->first_high;
    box->last_low = a->last_low < b->last_low ? a->last_low : b->last_low;
    box->last_high = a->last_high > b->last_high ? a->last_high : b->last_high;
}

/* Fills in the ranks of the tree: of all tensors, or along the way to one (`only`, else -1) whose rank
   changed. */
static int mtt__tree_rank(mtt__packer *p, int node, int low, int high, int only)
{
    int middle = low + (high - low) / 2, a, b;
    if (only >= 0 && (only < low || only >= high)) return p->boxes[node].rank;
    if (high - low == 1) return p->boxes[node].rank = p->waiting[low].rank;
    a = mtt__tree_rank(p, 2 * node + 1, low, middle, only);
    b = mtt__tree_rank(p, 2 * node + 2, middle, high, only);
    return p->boxes[node].rank = a < b ? a : b;
}

/* The least rank, below `best`, of the tensors that live within operations x to y. */
static int mtt__tree_first(const mtt__packer *p, int node, int x, int y, int best)
{
    const mtt__box *box = &p->boxes[node];
    if (box->rank >= best || box->first_high < x || box->last_low > y) return best;
    if (box->first_low >= x && box->last_high <= y) return box->rank;
    best = mtt__tree_first(p, 2 * node + 1, x, y, best);
    return mtt__tree_first(p, 2 * node + 2, x, y, best);
}

static void mtt__place(mtt__packer *p, int rank)
{
    mtt_tensor *t = p->by_rank[rank].tensor;
    int leaf = p->by_rank[rank].leaf;
    size_t end = mtt__add(p->level, mtt__slot_bytes(t));
    t->offset = p->level;
    if (end > p->arena) p->arena = end;
    p->waiting[leaf].rank = INT_MAX;
    mtt__tree_rank(p, 0, 0, p->count, leaf);
    p->status = mtt__heap_push(p->env, &p->placed, end, (uint64_t)t->first << 32 | (uint32_t)t->last);
}

/* Places, at this level, the tensors of a free interval, in the order of their ranks; then no other fits
   there. The smaller rest of the interval recurs, so the depth is a logarithm. */
static void mtt__fill(mtt__packer *p, int x, int y)
{
    while (x <= y && !p->status) {
        int rank = mtt__tree_first(p, 0, x, y, INT_MAX), first, last;
        if (rank == INT_MAX) {
            p->free_end[x] = y;
            p->free_begin[y] = x;
            return;
        }
        mtt__place(p, rank);
        first = p->by_rank[rank].tensor->first;
        last = p->by_rank[rank].tensor->last;
        if (first - x < y - last) {
            mtt__fill(p, x, first - 1);
            x = last + 1;
        } else {
            mtt__fill(p, last + 1, y);
            y = first - 1;
        }
    }
}

/* Frees the intervals of all tensors that end at the lowest end, joins each with its free neighbours, and
   fills them. */
static void mtt__raise_level(mtt__packer *p)
{
    mtt__ranked next;
    int x = -1, y = -2; /* the interval in hand; none yet */
    mtt__heap_pop(&p->placed, &next);
    for (p->level = (size_t)next.key;;) {
        int first = (int)(next.tie >> 32), last = (int)(uint32_t)next.tie;
        if (first != y + 1) {
            if (x >= 0) mtt__fill(p, x, y);
            x = first > 0 && p->free_begin[first - 1] >= 0 ? p->free_begin[first - 1] : first;
            p->free_end[x] = -1;
            if (first > 0) p->free_begin[first - 1] = -1;
        }
        y = last + 1 < p->ops && p->free_end[last + 1] >= 0 ? p->free_end[last + 1] : last;
        p->free_begin[y] = -1;
        if (last + 1 < p->ops) p->free_end[last + 1] = -1;
        if (!p->placed.count || p->placed.at[0].key != p->level || !mtt__heap_pop(&p->placed, &next)) break;
    }
    mtt__fill(p, x, y);
}

static int mtt__by_key(const void *a, const void *b)
{
    const mtt__waiting *p = (const mtt__waiting *)a, *q = (const mtt__waiting *)b;
    if (p->key != q->key) return p->key < q->key ? 1 : -1;
    return p->made - q->made;
}

/* Fills the arena from below, with the tensors ranked by their keys. Of the tensors that can go lowest, above
   all placed ones that live with them, the first in rank goes first. */
static void mtt__place_all(mtt__packer *p, size_t state)
{
    int i;
    for (i = 0; i < p->count; i++) {
        p->by_rank[i] = p->waiting[i];
        p->by_rank[i].leaf = i;
    }
    qsort(p->by_rank, (size_t)p->count, sizeof(*p->by_rank), mtt__by_key);
    for (i = 0; i < p->count; i++) p->waiting[p->by_rank[i].leaf].rank = i;
    mtt__tree_rank(p, 0, 0, p->count, -1);
    for (i = 0; i < p->ops; i++) p->free_end[i] = p->free_begin[i] = -1;
    p->level = p->arena = state;
    p->placed.count = 0;
    mtt__fill(p, 0, p->ops - 1);
    while (p->placed.count && !p->status) mtt__raise_level(p);
}

/* Three rules for the key, in their order until no gap is left: most bytes times life (after Sekiyama et al.
   2018), made first, last used last. After each try the tensors that end highest get the first ranks of the
   next, eight times a rule. Of GAPS. */
static mtt_status mtt__pack_tensors(mtt__packer *p, mtt__program *program, size_t state, size_t peak)
{
    enum { RULES = 3, TRIES = 9 };
    int try_, i;
    mtt__tree_build(p, 0, 0, p->count, 0);
    program->arena_bytes = SIZE_MAX;
    for (try_ = 0; try_ < RULES * TRIES && program->arena_bytes > peak && !p->status; try_++) {
        for (i = 0; i < p->count; i++) {
            mtt__waiting *w = &p->waiting[i];
            double bytes = (double)mtt__slot_bytes(w->tensor), first = w->tensor->first, last = w->tensor->last;
            if (try_ % TRIES == 0)
                w->key = try_ == 0 ? bytes * (last - first + 1) : try_ == TRIES ? -first : last;
            else if (w->tensor->offset + mtt__slot_bytes(w->tensor) == p->arena) w->key = 1e30 * try_;
        }
        mtt__place_all(p, state);
        if (p->arena >= program->arena_bytes) continue;
        program->arena_bytes = p->arena;
        for (i = 0; i < p->count; i++) p->waiting[i].best = p->waiting[i].tensor->offset;
    }
    for (i = 0; i < p->count && !p->status; i++) p->waiting[i].tensor->offset = p->waiting[i].best;
    return p->status;
}

/* State comes first, in order. A plan whose peak exceeds `limit` is not packed, because packing is most of a
   plan's time; arena_bytes is then the peak. */
static mtt_status mtt__pack(mtt_env *env, mtt__program *program, size_t limit)
{
    size_t state = 0, peak = 0, n = (size_t)program->tensor_count, ops = (size_t)program->op_count;
    mtt__pool pool = {NULL};
    mtt__packer p;
    int i;
    for (i = 0; i < program->op_count; i++)
        if (program->ops[i].live_bytes > peak) peak = program->ops[i].live_bytes;
    program->arena_bytes = peak;
    if (peak > limit) return MTT_OK;
    memset(&p, 0, sizeof(p));
    p.env = env;
    p.ops = program->op_count;
    p.waiting = (mtt__waiting *)mtt__pool_take(env, &pool, n * sizeof(*p.waiting));
    p.by_rank = (mtt__waiting *)mtt__pool_take(env, &pool, n * sizeof(*p.by_rank));
    p.boxes = (mtt__box *)mtt__pool_take(env, &pool, 4 * n * sizeof(*p.boxes));
    p.free_end = (int *)mtt__pool_take(env, &pool, ops * sizeof(int));
    p.free_begin = (int *)mtt__pool_take(env, &pool, ops * sizeof(int));
    if (!p.waiting || !p.by_rank || !p.boxes || !p.free_end || !p.free_begin) p.status = MTT_E_MEMORY;
    for (i = 0; i < program->tensor_count && !p.status; i++) {
        mtt_tensor *t = program->tensors[i];
        t->offset = state;
        if (t->persistent) {
            state = mtt__add(state, mtt__slot_bytes(t));
            continue;
        }
        p.waiting[p.count].tensor = t;
        p.waiting[p.count].made = p.count;
        p.count++;
    }
    if (!p.status && p.count) mtt__pack_tensors(&p, program, state, peak);
    mtt__pool_free(env, &pool);
    mtt__free(env, p.placed.at);
    return p.status;
}

/* ---- costs ---- */

/* Elements as a number that cannot overflow, however large the tensor. */
static double mtt__count(const mtt_tensor *t)
{
    return (double)t->bytes / (double)mtt__dtype_bytes[t->dtype];
}

static double mtt__tensor_traffic(const mtt_tensor *t, int written, int copies)
{
    int twice = t->category == MTT_OPTIMIZER || (written && t->category == MTT_WEIGHTS && !copies) ||
                (written && t->category == MTT_GRADIENTS && t->persistent);
    return (double)t->bytes * (1 + twice);
}

/* Bytes of the operands: once where an operation reads or writes them, twice where it does both. AdamW does
   so with all its state, but only writes 16-bit copies of FP32 masters; a gradient that stays for the next
   micro-batch is read by what adds to it. */
static double mtt__op_bytes(const mtt_op *op)
{
    const mtt_tensor *master = op->kind == MTT_OP_adamw ? MTT_OPERANDS_OF(adamw, op)->master : NULL;
    int copies = master && master->dtype == MTT_F32, i;
    double bytes = 0;
    for (i = 0; i < op->inputs + op->outputs; i++)
        if (op->operands[i]) bytes += mtt__tensor_traffic(op->operands[i], i >= op->inputs, copies);
    for (i = 0; i < op->parameters; i++) bytes += mtt__tensor_traffic(op->gradients[i], 0, copies);
    for (i = 0; i < op->parameters && op->weights; i++) bytes += mtt__tensor_traffic(op->weights[i], 1, copies);
    return bytes;
}

/* A chunked loss reads the head's weights once a chunk, with gradients for two products, and its gradients
   are added to by each chunk but the first. It passes the logits of all chunks five times, without gradients
   twice: made, turned into gradients in place, read by two products. */
static double mtt__chunked_bytes(const mtt_op *op)
{
    const mtt_chunked_loss *o = MTT_OPERANDS_OF(chunked_loss, op);
    double share = (double)op->shape->rows / (double)o->logits->shape[0], chunks = ceil(share), bytes = mtt__op_bytes(op);
    double reads = o->dx ? 2 * chunks - 1 : chunks - 1;
    bytes += ((o->dx ? 5 : 2) * share - 1) * (double)o->logits->bytes + reads * (double)o->weight->bytes;
    if (o->bias) bytes += reads * (double)o->bias->bytes;
    if (o->d_weight) bytes += 2 * (chunks - 1) * (double)o->d_weight->bytes;
    if (o->d_bias) bytes += 2 * (chunks - 1) * (double)o->d_bias->bytes;
    return bytes;
}

/* Pairs of a query and a key that it attends: T(T+1)/2 a head, or what the window leaves of it. */
static double mtt__attention_pairs(const mtt_shape *d)
{
    double T = d->seq_len, W = d->window ? d->window : d->seq_len;
    return (double)d->batch * d->heads * (W * (W + 1) / 2 + (T - W) * W);
}

/* Evaluates an operation's row: FLOPs and bytes moved. */
static void mtt__op_cost(const mtt_op *op, double *flops, double *traffic)
{
    const mtt_shape *d = op->shape;
    double MOVED = mtt__op_bytes(op), PARAMETERS = 0;
    int i;
    for (i = 0; i < op->parameters; i++) PARAMETERS += mtt__count(op->gradients[i]);
#define N(tensor) mtt__count(tensor)
#define W(tensor) ((double)mtt__width(tensor))
#define B(tensor) ((double)(tensor)->bytes)
#define MTT__OP_COST(name, inputs, operands_, flops_of, traffic_of, scratch)            \
    case MTT_OP_##name: {                                                               \
        const mtt_##name *o = MTT_OPERANDS_OF(name, op);                                \
        (void)o;                                                                        \
        *flops = flops_of;                                                              \
        *traffic = traffic_of;                                                          \
        break;                                                                          \
    }
    switch (op->kind) {
        MTT_OPS(MTT__OP_COST)
    case MTT_OP_KIND_COUNT: break;
    }
#undef N
#undef W
#undef B
}

/* Seconds of a batch and the step, to compare policies by: an operation takes as long as its arithmetic or
   its traffic, whichever is longer (the roofline, Williams et al. 2009), and 4 us to begin and end. An H200
   moves 4.2 TB/s (measured); a CPU's 250 GFLOP/s and 10 GB/s are estimates. */
static double mtt__plan_cost(const mtt_schedule *s)
{
    const mtt__program *p = &s->programs[MTT__TRAIN];
    int cuda = s->policy.device == MTT_DEVICE_CUDA, i;
    double rate = cuda ? mtt__precisions[s->policy.precision].rate : 250e9;
    double cost = 0, flops = 0, traffic = 0;
    for (i = 0; i < p->op_count; i++) {
        mtt__op_cost(&p->ops[i], &flops, &traffic);
        flops /= rate;
        traffic /= cuda ? 4.2e12 : 10e9;
        cost += (4e-6 + (flops > traffic ? flops : traffic)) * (p->ops[i].phase == MTT_STEP ? 1 : s->split);
    }
    return cost;
}

/* ---- schedules and budgets ---- */

static void mtt__release_program(mtt_schedule *s, int which)
{
    mtt__program *p = &s->programs[which];
    mtt__free(s->env, p->tensors);
    mtt__free(s->env, p->ops);
    mtt__free(s->env, p->parameters);
    mtt__pool_free(s->env, &p->pool);
    memset(p, 0, sizeof(*p));
}

static void mtt__release_programs(mtt_schedule *s)
{
    int i;
    for (i = 0; i < MTT__PROGRAMS; i++) mtt__release_program(s, i);
}

static size_t mtt__arena_bytes(const mtt_schedule *s)
{
    size_t most = 0;
    int i;
    for (i = 0; i < MTT__PROGRAMS; i++)
        if (s->programs[i].arena_bytes > most) most = s->programs[i].arena_bytes;
    return most;
}

/* Builds the programs, with so many layers recomputed whole and in part. Only the training step depends on
   these: the others stay once they are built. Ends at the first program that takes more than `limit` bytes.
   */
static mtt_status mtt__build(mtt_schedule *s, int batch, int seq_len, int whole, int partial, size_t limit)
{
    int i;
    mtt__release_program(s, MTT__TRAIN);
    s->recompute_layers = whole;
    s->recompute_selective = partial;
    for (i = 0; i < MTT__PROGRAMS; i++) {
        mtt_status status = MTT_OK;
        if (i == MTT__TRAIN || !s->programs[i].op_count) {
            status = mtt__build_program(s, i, batch, seq_len);
            if (!status) status = mtt__measure(s->env, &s->programs[i]);
            if (!status) status = mtt__pack(s->env, &s->programs[i], i == MTT__TRAIN ? limit : SIZE_MAX);
        }
        if (status || s->programs[i].arena_bytes > limit) return status;
    }
    return MTT_OK;
}

/* The least k up to n for which the training step takes no more than `budget` bytes, with whole + k * whole_by
   layers recomputed whole and partial + k * partial_by in part. n itself is known to fit. */
static mtt_status mtt__fewest(mtt_schedule *s, int batch, int seq_len, size_t budget, int packed, int whole,
                              int whole_by, int partial, int partial_by, int n, int *fewest)
{
    int low = 0, high = n;
    while (low < high) {
        int k = low + (high - low) / 2;
        mtt_status status = mtt__build(s, batch, seq_len, whole + k * whole_by, partial + k * partial_by,
                                       packed ? budget : 0);
        if (status) return status;
        if (s->programs[MTT__TRAIN].arena_bytes <= budget) high = k;
        else low = k + 1;
    }
    *fewest = low;
    return MTT_OK;
}

/* Chooses how many layers to recompute whole and how many in part. More recomputation takes less memory, and
   both memory and cost are close to linear in the two numbers. So the cheapest choice that fits is at an end
   of the edge: at A, with as few whole as possible and of the others as few in part, or at B, none in part.

      in part  | \
               | # A
               | . # \          # fits, . does not
               | . . # \
               | . . . B \
               +------------ whole

   Where `packed` is 0, peaks stand for arenas. */
static mtt_status mtt__choose(mtt_schedule *s, int batch, int seq_len, size_t budget, int packed, int *whole,
                              int *partial)
{
    int layers = s->model.layers, w = 0;
    double cost;
    mtt_status status = mtt__fewest(s, batch, seq_len, budget, packed, 0, 1, layers, -1, layers, whole);
    if (!status)
        status = mtt__fewest(s, batch, seq_len, budget, packed, *whole, 0, 0, 1, layers - *whole, partial);
    if (!status) status = mtt__build(s, batch, seq_len, *whole, *partial, 0);
    if (status || !*partial) return status;
    cost = mtt__plan_cost(s);
    status = mtt__fewest(s, batch, seq_len, budget, packed, 0, 1, 0, 0, layers, &w);
    if (!status) status = mtt__build(s, batch, seq_len, w, 0, 0);
    if (status || mtt__plan_cost(s) >= cost) return status;
    *whole = w;
    *partial = 0;
    return MTT_OK;
}

/* Recomputes so many layers that the plan fits the budget. Without one, the plan with all layers whole says how
   much memory there is, and the search uses what is left of it. Packing takes longer than building, so a first
   search does without; if its result has gaps and misses the budget, a second one packs every candidate. */
static mtt_status mtt__fit_budget(mtt_schedule *s, int batch, int seq_len)
{
    int whole = s->model.layers, partial = 0, packed;
    mtt_status status = mtt__build(s, batch, seq_len, whole, partial, SIZE_MAX);
    size_t budget = s->policy.recompute == MTT_RECOMPUTE_BUDGET ? s->policy.budget_bytes : mtt__arena_bytes(s);
    s->least = mtt__arena_bytes(s);
    if (!status && s->least > budget)
        return mtt__fail(s->env, MTT_E_BUDGET, "the budget is %zu bytes, the smallest plan takes %zu: %zu too many; lower the "
                         "batch or seq_len, or use the chunked loss and flash attention", budget, s->least,
                         s->least - budget);
    for (packed = 0; packed < 2 && !status; packed++) {
        status = mtt__choose(s, batch, seq_len, budget, packed, &whole, &partial);
        if (!status) status = mtt__build(s, batch, seq_len, whole, partial, SIZE_MAX);
        if (mtt__arena_bytes(s) <= budget) break;
    }
    return status;
}

/* Recomputes what the policy says. A budget with room for everything needs no search. */
static mtt_status mtt__build_policy(mtt_schedule *s, int batch, int seq_len)
{
    mtt_recompute how = s->policy.recompute;
    int partial = how == MTT_RECOMPUTE_SELECTIVE ? s->model.layers : 0;
    size_t limit = how == MTT_RECOMPUTE_BUDGET ? s->policy.budget_bytes : SIZE_MAX;
    mtt_status status;
    mtt__release_programs(s);
    if (how == MTT_RECOMPUTE_LAYER || how == MTT_RECOMPUTE_SEGMENTS) return mtt__fit_budget(s, batch, seq_len);
    status = mtt__build(s, batch, seq_len, 0, partial, limit);
    return status || mtt__arena_bytes(s) <= limit ? status : mtt__fit_budget(s, batch, seq_len);
}

/* Cuts the batch into the cheapest number of micro-batches. Once nothing is recomputed any more, more of them
   only cost. */
static mtt_status mtt__fit_split(mtt_schedule *s, int batch, int seq_len)
{
    int accumulate = s->policy.accumulate, best = 0, last = 0, split;
    double best_cost = 0;
    mtt_status status = MTT_OK;
    for (split = 1; split <= batch && split <= (1 << 20) / accumulate && !last; split++) {
        if (batch % split) continue;
        s->split = split;
        s->policy.accumulate = accumulate * split;
        status = mtt__build_policy(s, batch / split, seq_len);
        if (status == MTT_E_BUDGET) continue;
        if (status) return status;
        last = s->recompute_layers + s->recompute_selective == 0;
        if (best && mtt__plan_cost(s) >= best_cost) continue;
        best = split;
        best_cost = mtt__plan_cost(s);
    }
    if (!best || best == s->split) return status;
    s->split = best;
    s->policy.accumulate = accumulate * best;
    return mtt__build_policy(s, batch / best, seq_len);
}

static mtt_status mtt__schedule_init(mtt_schedule *s, mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                     int batch, int seq_len)
{
    mtt_status status;
    memset(s, 0, sizeof(*s));
    s->env = env;
    status = mtt_model_resolve(env, model, &s->model);
    if (!status) status = mtt_policy_resolve(env, policy, &s->model, batch, seq_len, &s->policy);
    if (status) return status;
    s->split = 1;
    if (s->policy.split && s->policy.recompute == MTT_RECOMPUTE_BUDGET) status = mtt__fit_split(s, batch, seq_len);
    else status = mtt__build_policy(s, batch, seq_len);
    if (status) mtt__release_programs(s);
    return status;
}

MTTDEF mtt_status mtt_schedule_create(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy, int batch,
                                      int seq_len, mtt_schedule **out)
{
    mtt_schedule *s = (mtt_schedule *)mtt__alloc(env, 1, sizeof(*s));
    mtt_status status;
    *out = NULL;
    if (!s) return MTT_E_MEMORY;
    status = mtt__schedule_init(s, env, model, policy, batch, seq_len);
    if (!status) *out = s;
    else mtt__free(env, s);
    return status;
}

MTTDEF void mtt_schedule_destroy(mtt_schedule *s)
{
    if (!s) return;
    mtt__release_programs(s);
    mtt__free(s->env, s);
}

MTTDEF void mtt_schedule_report(const mtt_schedule *s, mtt_plan_report *r)
{
    const mtt__program *p = &s->programs[MTT__TRAIN];
    double flops = 0, traffic = 0;
    int i;
    memset(r, 0, sizeof(*r));
    for (i = 0; i < p->parameter_count; i++) r->parameters += mtt__parameter_elements(&p->parameters[i]);
    for (i = 0; i < p->tensor_count; i++)
        if (p->tensors[i]->persistent) r->state_bytes += mtt__slot_bytes(p->tensors[i]);
    for (i = 0; i < p->op_count; i++) {
        const mtt_op *op = &p->ops[i];
        if (op->live_bytes > r->phase_peak_bytes[op->phase]) r->phase_peak_bytes[op->phase] = op->live_bytes;
        if (op->live_bytes > r->peak_bytes) {
            r->peak_bytes = op->live_bytes;
            r->peak_op = i;
        }
        mtt__op_cost(op, &flops, &traffic);
        r->flops += flops;
        r->traffic_bytes += traffic;
        if (op->recomputed) r->recompute_flops += flops;
    }
    memcpy(r->bytes, p->bytes[r->peak_op], sizeof(r->bytes));
    r->arena_bytes = mtt__arena_bytes(s);
    r->micro_batches = s->split;
    r->ops = p->op_count;
    r->tensors = p->tensor_count;
    for (i = 0; i < s->model.layers; i++) {
        r->recompute_layers += mtt__recompute_level(s, i) >= MTT__BY_LAYER;
        r->recompute_selective += mtt__recompute_level(s, i) == MTT__BY_SELECTIVE;
    }
}

MTTDEF int mtt_schedule_op(const mtt_schedule *s, int index, mtt_op_info *info)
{
    const mtt__program *p = &s->programs[MTT__TRAIN];
    const mtt_op *op;
    if (index < 0 || index >= p->op_count) return 0;
    op = &p->ops[index];
    info->name = mtt_op_name(op->kind);
    info->phase = op->phase;
    info->layer = op->layer;
    info->recomputed = op->recomputed;
    info->width_in = mtt__width(op->operands[0]);
    info->width_out = mtt__width(op->operands[op->inputs]);
    info->live_bytes = op->live_bytes;
    mtt__op_cost(op, &info->flops, &info->traffic_bytes);
    memcpy(info->bytes, p->bytes[index], sizeof(info->bytes));
    return 1;
}

MTTDEF mtt_status mtt_plan(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy, int batch, int seq_len,
                           mtt_plan_report *report)
{
    mtt_schedule s;
    mtt_status status = mtt__schedule_init(&s, env, model, policy, batch, seq_len);
    if (status) return status;
    mtt_schedule_report(&s, report);
    mtt__release_programs(&s);
    return MTT_OK;
}

MTTDEF mtt_status mtt_plan_max_batch(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy, int seq_len,
                                     size_t budget_bytes, int *batch)
{
    mtt_policy p = *policy;
    mtt_plan_report report;
    int low = 0, high = 1 << 20, next = 1; /* low fits, high + 1 does not */
    p.budget_bytes = budget_bytes;
    p.split = 0;
    *batch = 0;
    while (low < high) {
        mtt_status status = mtt_plan(env, model, &p, next, seq_len, &report);
        if (status && status != MTT_E_BUDGET) return status;
        if (!status && report.arena_bytes <= budget_bytes) low = next;
        else {
            if (next == 1 && status) return status;
            if (next == 1)
                return mtt__fail(env, MTT_E_BUDGET, "the budget is %zu bytes, a batch of one sequence takes %zu", budget_bytes,
                                 report.arena_bytes);
            high = next - 1;
        }
        next = high == 1 << 20 && low < 1 << 19 ? 2 * low : low + (high - low + 1) / 2;
    }
    *batch = low;
    return MTT_OK;
}

MTTDEF mtt_status mtt_policy_fit(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy, int batch, int seq_len,
                                 size_t budget_bytes, mtt_policy *fit)
{
    double best = 0;
    size_t least = SIZE_MAX;
    int found = 0, choice;
    for (choice = 0; choice < 4; choice++) {
        mtt_policy p = *policy;
        mtt_schedule s;
        mtt_status status;
        double cost;
        p.attention = choice & 1 ? MTT_ATTENTION_PLAIN : MTT_ATTENTION_FLASH;
        p.loss = choice & 2 ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL;
        p.recompute = MTT_RECOMPUTE_BUDGET;
        p.budget_bytes = budget_bytes;
        status = mtt__schedule_init(&s, env, model, &p, batch, seq_len);
        if (status == MTT_E_BUDGET && s.least < least) least = s.least;
        if (status == MTT_E_BUDGET) continue;
        if (status) return status;
        cost = mtt__plan_cost(&s);
        if (s.recompute_layers + s.recompute_selective == 0 && s.split == 1) p.recompute = MTT_RECOMPUTE_NONE;
        mtt__release_programs(&s);
        if (found && cost >= best) continue;
        found = 1;
        best = cost;
        *fit = p;
    }
    if (found) return MTT_OK;
    return mtt__fail(env, MTT_E_BUDGET, "the budget is %zu bytes, the smallest policy takes %zu: %zu too many; lower the batch",
                     budget_bytes, least, least > budget_bytes ? least - budget_bytes : 0);
}

/* ----------------------------------------------------------------------------------------------------------
   >>cpu
   ---------------------------------------------------------------------------------------------------------- */

/* Every operation in plain C, beside its formula. Tensors are read and written as floats, so one text serves
   all precisions. Sums have an order that does not depend on the number of threads. */

/* Below this many elements an operation stays on one thread: waking the others takes longer, much longer on a
   busy machine. */
enum { MTT__ALONE = 32768 };
enum { MTT__BLOCK = 1024, MTT__MAX_WIDTH = 16384, MTT__TILE = 64, MTT__MAX_HEAD = 256 };

static void mtt__load(const mtt_tensor *t, int64_t first, int64_t count, float *out)
{
    const uint16_t *half = (const uint16_t *)t->data + first;
    int64_t i;
    if (t->dtype == MTT_F32) memcpy(out, (const float *)t->data + first, (size_t)count * sizeof(float));
    else if (t->dtype == MTT_BF16_BITS)
        for (i = 0; i < count; i++) out[i] = mtt__from_bf16(half[i]);
    else
        for (i = 0; i < count; i++) out[i] = mtt__from_fp16(half[i]);
}

static void mtt__store(const mtt_tensor *t, int64_t first, int64_t count, const float *values)
{
    uint16_t *half = (uint16_t *)t->data + first;
    int64_t i;
    if (t->dtype == MTT_F32) {
        float *at = (float *)t->data + first;
        if (at != values) memcpy(at, values, (size_t)count * sizeof(float));
    } else if (t->dtype == MTT_BF16_BITS)
        for (i = 0; i < count; i++) half[i] = mtt__to_bf16(values[i]);
    else
        for (i = 0; i < count; i++) half[i] = mtt__to_fp16(values[i]);
}

/* The values themselves if they are floats, otherwise a copy in `buffer`. */
static const float *mtt__read(const mtt_tensor *t, int64_t first, int64_t count, float *buffer)
{
    if (t->dtype == MTT_F32) return (const float *)t->data + first;
    mtt__load(t, first, count, buffer);
    return buffer;
}

static const mtt_control *mtt__control(const mtt_tensor *t)
{
    return (const mtt_control *)t->data;
}

static mtt_counters *mtt__counters(const mtt_tensor *t)
{
    return (mtt_counters *)t->data;
}

/* e^x within 2 ulp, without a branch or a call, so that loops over it become vectors: 2^n times a polynomial
   on [-ln2/2, ln2/2] (Cephes' expf). Saturates near 0 below -87 and near FLT_MAX above 88. */
MTT__INLINE float mtt__exp(float x)
{
    float clamped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x, shifted = clamped * 1.44269504f + 12582912.0f;
    float n = shifted - 12582912.0f, r = clamped - n * 0.693359375f + n * 2.12194440e-4f, y;
    y = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
         1.6666665459e-1f) * r + 5.0000001201e-1f;
    return (y * r * r + r + 1.0f) * mtt__bits_float((mtt__float_bits(shifted) + 127u) << 23);
}

/* Sums and largest values in 16 lanes: one order for every build, and vectors without licence to reorder. */
enum { MTT__LANES = 16 };

static float mtt__sum_lanes(const float *lane)
{
    float sum = 0;
    int l;
    for (l = 0; l < MTT__LANES; l++) sum += lane[l];
    return sum;
}

static float mtt__sum(const float *x, int64_t n)
{
    float lane[MTT__LANES] = {0};
    int64_t i;
    int l;
    for (i = 0; i + MTT__LANES <= n; i += MTT__LANES)
        for (l = 0; l < MTT__LANES; l++) lane[l] += x[i + l];
    for (l = 0; i < n; i++, l++) lane[l] += x[i];
    return mtt__sum_lanes(lane);
}

static float mtt__dot(const float *x, const float *y, int64_t n)
{
    float lane[MTT__LANES] = {0};
    int64_t i;
    int l;
    for (i = 0; i + MTT__LANES <= n; i += MTT__LANES)
        for (l = 0; l < MTT__LANES; l++) lane[l] += x[i + l] * y[i + l];
    for (l = 0; i < n; i++, l++) lane[l] += x[i] * y[i];
    return mtt__sum_lanes(lane);
}

static float mtt__largest(const float *x, int64_t n)
{
    float lane[MTT__LANES], best;
    int64_t i;
    int l;
    for (l = 0; l < MTT__LANES; l++) lane[l] = -3.4e38f;
    for (i = 0; i + MTT__LANES <= n; i += MTT__LANES)
        for (l = 0; l < MTT__LANES; l++) lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
    for (l = 0; i < n; i++, l++) lane[l] = x[i] > lane[l] ? x[i] : lane[l];
    for (best = lane[0], l = 1; l < MTT__LANES; l++) best = lane[l] > best ? lane[l] : best;
    return best;
}

/* Multiplies `count` values, elements from `first` on, by their masks: 0 or 1 / (1 - p). */
static void mtt__drop(const mtt_op *op, const mtt_tensor *control, int64_t first, int64_t count, float *values)
{
    const mtt_control *c = mtt__control(control);
    uint32_t threshold = mtt__dropout_threshold(op->shape->dropout), draw[4] = {0, 0, 0, 0};
    uint64_t stream = mtt__op_stream(op) | mtt__stream_step(c->micro_batch);
    float scale = mtt__dropout_scale(threshold);
    int64_t i;
    for (i = 0; i < count && op->shape->dropout > 0; i++) {
        uint64_t element = (uint64_t)(first + i);
        if (i == 0 || (element & 7) == 0) mtt__philox(c->seed, element >> 3, stream, draw);
        values[i] *= mtt__draw_bits(draw, (int)(element & 7)) >= threshold ? scale : 0.0f;
    }
}

/* The masks themselves. */
static void mtt__dropout_mask(const mtt_op *op, const mtt_tensor *control, int64_t first, int64_t count, float *mask)
{
    int64_t i;
    for (i = 0; i < count; i++) mask[i] = 1.0f;
    mtt__drop(op, control, first, count, mask);
}

/* ---- matrix products ---- */

/* A matrix inside a tensor: element (i, j) is at offset + i * row + j * column, and one of the steps is 1. */
typedef struct mtt__view {
    const mtt_tensor *t;
    int64_t offset, row, column;
} mtt__view;

static mtt__view mtt__matrix_at(const mtt_tensor *t, int64_t offset, int transposed)
{
    mtt__view v;
    v.t = t;
    v.offset = offset;
    v.row = transposed ? 1 : mtt__width(t);
    v.column = transposed ? mtt__width(t) : 1;
    return v;
}

static mtt__view mtt__matrix(const mtt_tensor *t, int transposed)
{
    return mtt__matrix_at(t, 0, transposed);
}

static mtt__view mtt__transposed(mtt__view v)
{
    int64_t row = v.row;
    v.row = v.column;
    v.column = row;
    return v;
}

/* Rows i0 up and columns j0 up of a view, as an m x n block of floats. Where columns are contiguous in
   memory, 16 of them are read and then written side by side, a cache line at a time. */
static void mtt__load_block(mtt__view v, int64_t i0, int64_t m, int64_t j0, int64_t n, float *out, int64_t stride)
{
    enum { W = 16 };
    float columns[W][MTT__PANEL_K];
    int64_t i, j, l, w;
    if (v.column == 1) {
        for (i = 0; i < m; i++) mtt__load(v.t, v.offset + (i0 + i) * v.row + j0, n, out + i * stride);
        return;
    }
    for (j = 0; j < n; j += W) {
        w = mtt__min(W, n - j);
        for (l = 0; l < w; l++) mtt__load(v.t, v.offset + i0 + (j0 + j + l) * v.column, m, columns[l]);
        for (i = 0; i < m; i++)
            for (l = 0; l < w; l++) out[i * stride + j + l] = columns[l][i];
    }
}

/* C += A B for an m x k and a k x n block. m is even and k a multiple of 4: blocks are padded to that with
   zeros. Rows of B and C have room up to the next multiple of 16, where what is computed is never read. The
   two local rows tell the compiler that nothing overlaps, so it vectorizes the loops even at -O2: 56 GFLOP/s
   a core instead of 10. */
static void mtt__multiply_block(int64_t m, int64_t n, int64_t k, const float *a, int64_t lda, const float *b,
                                int64_t ldb, float *c, int64_t ldc)
{
    enum { W = 16 };
    int64_t i, j, p;
    int l;
    for (i = 0; i < m; i += 2)
        for (p = 0; p < k; p += 4) {
            const float *x = a + i * lda + p, *y = x + lda;
            const float *b0 = b + p * ldb, *b1 = b0 + ldb, *b2 = b1 + ldb, *b3 = b2 + ldb;
            float x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3], y0 = y[0], y1 = y[1], y2 = y[2], y3 = y[3];
            float *c0 = c + i * ldc, *c1 = c0 + ldc;
            for (j = 0; j < n; j += W) {
                float u[W], v[W];
                for (l = 0; l < W; l++)
                    u[l] = c0[j + l] + (x0 * b0[j + l] + x1 * b1[j + l] + x2 * b2[j + l] + x3 * b3[j + l]);
                for (l = 0; l < W; l++)
                    v[l] = c1[j + l] + (y0 * b0[j + l] + y1 * b1[j + l] + y2 * b2[j + l] + y3 * b3[j + l]);
                memcpy(c0 + j, u, sizeof(u));
                memcpy(c1 + j, v, sizeof(v));
            }
        }
}

/* C += A B for panels, on all threads. */
static void mtt__multiply_panel(int64_t m, int64_t n, int64_t k, const float *a, const float *b, float *c)
{
#ifdef MTT_CBLAS
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)m, (int)n, (int)k, 1.0f, a, MTT__PANEL_K, b,
                MTT__PANEL_N, 1.0f, c, MTT__PANEL_N);
#else
    int64_t columns = mtt__ceil_div(n, MTT__TILE), tiles = mtt__ceil_div(m, MTT__TILE) * columns, tile;
    MTT__OMP(omp parallel for schedule(static) if (m * n * k > MTT__ALONE))
    for (tile = 0; tile < tiles; tile++) {
        int64_t i = tile / columns * MTT__TILE, j = tile % columns * MTT__TILE;
        mtt__multiply_block(mtt__min(MTT__TILE, m - i), mtt__min(MTT__TILE, n - j), k, a + i * MTT__PANEL_K,
                            MTT__PANEL_K, b + j, MTT__PANEL_N, c + i * MTT__PANEL_N + j, MTT__PANEL_N);
    }
#endif
}

/* Fills a panel with a block of a view, padded with zeros to whole steps of the inner loops. */
static void mtt__load_panel(mtt__view v, int64_t i0, int64_t m, int64_t j0, int64_t n, float *panel, int64_t stride,
                            int64_t padded_m, int64_t padded_n)
{
    int64_t i;
    MTT__OMP(omp parallel for schedule(static) if (padded_m * padded_n > MTT__ALONE))
    for (i = 0; i < padded_m; i += MTT__TILE) {
        int64_t rows = mtt__min(MTT__TILE, m - i), all = mtt__min(MTT__TILE, padded_m - i), k;
        if (rows > 0) mtt__load_block(v, i0 + i, rows, j0, n, panel + i * stride, stride);
        for (k = 0; k < all; k++) {
            float *row = panel + (i + k) * stride;
            if (k >= rows) memset(row, 0, (size_t)padded_n * sizeof(float));
            else memset(row + n, 0, (size_t)(padded_n - n) * sizeof(float));
        }
    }
}

/* C (m x n) = A (m x k) B (k x n) + bias, or + C where `add` is set. C's columns are contiguous. */
static void mtt__gemm(const mtt_op *op, int64_t m, int64_t n, int64_t k, mtt__view a, mtt__view b, mtt__view c,
                      const mtt_tensor *bias, int add)
{
    float *pa = (float *)op->workspace->data, *pb = pa + MTT__PANEL_M * MTT__PANEL_K;
    float *pc = pb + MTT__PANEL_K * MTT__PANEL_N;
    int64_t i, j, p, r;
#ifdef MTT_CBLAS
    if (a.t->dtype == MTT_F32 && b.t->dtype == MTT_F32 && c.t->dtype == MTT_F32 && m <= INT_MAX && n <= INT_MAX &&
        k <= INT_MAX) {
        float *out = (float *)c.t->data + c.offset;
        MTT__OMP(omp parallel for schedule(static) if (m * n > MTT__ALONE))
        for (r = 0; r < (bias ? m : 0); r++) memcpy(out + r * c.row, bias->data, (size_t)n * sizeof(float));
        cblas_sgemm(CblasRowMajor, a.column == 1 ? CblasNoTrans : CblasTrans, b.column == 1 ? CblasNoTrans : CblasTrans,
                    (int)m, (int)n, (int)k, 1.0f, (const float *)a.t->data + a.offset,
                    (int)(a.column == 1 ? a.row : a.column), (const float *)b.t->data + b.offset,
                    (int)(b.column == 1 ? b.row : b.column), bias || add ? 1.0f : 0.0f, out, (int)c.row);
        return;
    }
#endif
    for (j = 0; j < n; j += MTT__PANEL_N)
        for (i = 0; i < m; i += MTT__PANEL_M) {
            int64_t cm = mtt__min(MTT__PANEL_M, m - i), cn = mtt__min(MTT__PANEL_N, n - j), even = mtt__round_up(cm, 2);
            memset(pc, 0, (size_t)(even * MTT__PANEL_N) * sizeof(float));
            for (p = 0; p < k; p += MTT__PANEL_K) {
                int64_t ck = mtt__min(MTT__PANEL_K, k - p), whole = mtt__round_up(ck, 4);
                mtt__load_panel(a, i, cm, p, ck, pa, MTT__PANEL_K, even, whole);
                mtt__load_panel(b, p, ck, j, cn, pb, MTT__PANEL_N, whole, cn);
                mtt__multiply_panel(even, cn, whole, pa, pb, pc);
            }
            MTT__OMP(omp parallel for schedule(static) if (m * n > MTT__ALONE))
            for (r = 0; r < cm; r++) {
                float buffer[MTT__PANEL_N], *row = pc + r * MTT__PANEL_N;
                const float *more = add    ? mtt__read(c.t, c.offset + (i + r) * c.row + j, cn, buffer)
                                    : bias ? mtt__read(bias, j, cn, buffer)
                                           : NULL;
                int64_t l;
                for (l = 0; more && l < cn; l++) row[l] += more[l];
                mtt__store(c.t, c.offset + (i + r) * c.row + j, cn, row);
            }
        }
}

/* Sums of columns, each in the order of the rows; added to what is there where `add` is set. */
static void mtt__column_sums(const mtt_tensor *x, int64_t rows, float *sums, int add)
{
    enum { STRIPE = 64 };
    int64_t n = mtt__width(x), stripe;
    MTT__OMP(omp parallel for schedule(static) if (rows * n > MTT__ALONE))
    for (stripe = 0; stripe < n; stripe += STRIPE) {
        float buffer[STRIPE], sum[STRIPE] = {0};
        int64_t width = mtt__min(STRIPE, n - stripe), r, k;
        for (r = 0; r < rows; r++) {
            const float *values = mtt__read(x, r * n + stripe, width, buffer);
            for (k = 0; k < width; k++) sum[k] += values[k];
        }
        for (k = 0; k < width; k++) sums[stripe + k] = sum[k] + (add ? sums[stripe + k] : 0.0f);
    }
}

/* ---- embedding ---- */

/* x = dropout(wte[token] + position) */
static void mtt__cpu_embed(const mtt_op *op)
{
    const mtt_embed *o = MTT_OPERANDS_OF(embed, op);
    const int32_t *tokens = (const int32_t *)o->tokens->data;
    int64_t C = op->shape->d_model, row;
    MTT__OMP(omp parallel for schedule(static) if (op->shape->rows * C > MTT__ALONE))
    for (row = 0; row < op->shape->rows; row++) {
        float x[MTT__MAX_WIDTH], buffer[MTT__MAX_WIDTH];
        const float *position;
        int64_t k;
        mtt__load(o->wte, tokens[row] * C, C, x);
        position = mtt__read(o->positions, row % op->shape->seq_len * C, C, buffer);
        for (k = 0; k < C; k++) x[k] += position[k];
        mtt__drop(op, o->control, row * C, C, x);
        mtt__store(o->x, row * C, C, x);
    }
}

/* d_wte[token] += mask * dx and d_wpe[t] += mask * dx, row after row within a stripe of columns. */
static void mtt__cpu_embed_backward(const mtt_op *op)
{
    enum { STRIPE = 32 };
    const mtt_embed_backward *o = MTT_OPERANDS_OF(embed_backward, op);
    const int32_t *tokens = (const int32_t *)o->tokens->data;
    float *d_wte = (float *)o->d_wte->data, *d_wpe = o->d_wpe ? (float *)o->d_wpe->data : NULL;
    int64_t C = op->shape->d_model, stripe;
    if (!op->adds) memset(d_wte, 0, o->d_wte->bytes);
    if (d_wpe && !op->later) memset(d_wpe, 0, o->d_wpe->bytes);
    MTT__OMP(omp parallel for schedule(static) if (op->shape->rows * C > MTT__ALONE))
    for (stripe = 0; stripe < C; stripe += STRIPE) {
        int64_t n = mtt__min(STRIPE, C - stripe), row, k;
        for (row = 0; row < op->shape->rows; row++) {
            float buffer[STRIPE], mask[STRIPE];
            const float *dx = mtt__read(o->dx, row * C + stripe, n, buffer);
            float *word = d_wte + tokens[row] * C + stripe;
            float *position = d_wpe ? d_wpe + row % op->shape->seq_len * C + stripe : NULL;
            mtt__dropout_mask(op, o->control, row * C + stripe, n, mask);
            for (k = 0; k < n; k++) word[k] += mask[k] * dx[k];
            for (k = 0; position && k < n; k++) position[k] += mask[k] * dx[k];
        }
    }
}

static void mtt__cpu_pick_row(const mtt_op *op)
{
    const mtt_pick_row *o = MTT_OPERANDS_OF(pick_row, op);
    size_t row = (size_t)mtt__control(o->control)->row;
    memcpy(o->row->data, (const char *)o->x->data + row * o->row->bytes, o->row->bytes);
}

/* ---- norms ---- */

/* y = (x - mean) / sqrt(var + 1e-5) * gain + shift, with the biased variance, in two passes; keeps mean and
   1 / deviation. */
static void mtt__norm_rows(const mtt_tensor *x_in, const mtt_tensor *gain_in, const mtt_tensor *shift_in,
                           const mtt_tensor *y_out, const mtt_tensor *stats_out)
{
    int64_t C = mtt__width(y_out), rows = mtt__rows(y_out), row;
    float *stats = (float *)stats_out->data;
    MTT__OMP(omp parallel for schedule(static) if (rows * C > MTT__ALONE))
    for (row = 0; row < rows; row++) {
        float xs[MTT__MAX_WIDTH], gains[MTT__MAX_WIDTH], shifts[MTT__MAX_WIDTH], y[MTT__MAX_WIDTH];
        const float *x = mtt__read(x_in, row * C, C, xs), *gain = mtt__read(gain_in, 0, C, gains);
        const float *shift = mtt__read(shift_in, 0, C, shifts);
        float mean = mtt__sum(x, C) / (float)C, lane[MTT__LANES] = {0}, rstd;
        int64_t i, k;
        for (i = 0; i < C; i += 8)
            for (k = 0; k < 8; k++) lane[k] += (x[i + k] - mean) * (x[i + k] - mean);
        rstd = 1.0f / sqrtf(mtt__sum_lanes(lane) / (float)C + 1e-5f);
        stats[2 * row] = mean;
        stats[2 * row + 1] = rstd;
        for (k = 0; k < C; k++) y[k] = (x[k] - mean) * rstd * gain[k] + shift[k];
        mtt__store(y_out, row * C, C, y);
    }
}

static void mtt__cpu_norm(const mtt_op *op)
{
    const mtt_norm *o = MTT_OPERANDS_OF(norm, op);
    mtt__norm_rows(o->x, o->gain, o->shift, o->y, o->stats);
}

/* y = a + dropout(b); without an `a`, y = dropout(b), which is dropout's own gradient. */
static void mtt__masked_sum(const mtt_op *op, const mtt_tensor *a, const mtt_tensor *b, const mtt_tensor *control,
                            const mtt_tensor *y)
{
    int64_t count = mtt__elements(y), i;
    MTT__OMP(omp parallel for schedule(static) if (count > MTT__ALONE))
    for (i = 0; i < count; i += MTT__BLOCK) {
        float buffer[MTT__BLOCK], sum[MTT__BLOCK];
        int64_t n = mtt__min(MTT__BLOCK, count - i), k;
        mtt__load(b, i, n, sum);
        mtt__drop(op, control, i, n, sum);
        if (a) {
            const float *x = mtt__read(a, i, n, buffer);
            for (k = 0; k < n; k++) sum[k] += x[k];
        }
        mtt__store(y, i, n, sum);
    }
}

static void mtt__cpu_residual(const mtt_op *op)
{
    const mtt_residual *o = MTT_OPERANDS_OF(residual, op);
    mtt__masked_sum(op, o->x, o->branch, o->control, o->sum);
}

static void mtt__cpu_residual_norm(const mtt_op *op)
{
    const mtt_residual_norm *o = MTT_OPERANDS_OF(residual_norm, op);
    mtt__masked_sum(op, o->x, o->branch, o->control, o->sum);
    mtt__norm_rows(o->sum, o->gain, o->shift, o->y, o->stats);
}

static void mtt__cpu_dropout_backward(const mtt_op *op)
{
    const mtt_dropout_backward *o = MTT_OPERANDS_OF(dropout_backward, op);
    mtt__masked_sum(op, NULL, o->dy, o->control, o->dx);
}

/* With xhat = (x - mean) rstd: d_gain = sum over rows of dy xhat, d_shift = sum over rows of dy. */
static void mtt__norm_parameter_gradients(const mtt_norm_backward *o, int add)
{
    enum { STRIPE = 32 };
    const float *stats = (const float *)o->stats->data;
    float *d_gain = (float *)o->d_gain->data, *d_shift = (float *)o->d_shift->data;
    int64_t C = mtt__width(o->dy), rows = mtt__rows(o->dy), stripe;
    MTT__OMP(omp parallel for schedule(static) if (rows * C > MTT__ALONE))
    for (stripe = 0; stripe < C; stripe += STRIPE) {
        float gs[STRIPE], xs[STRIPE], gain[STRIPE] = {0}, shift[STRIPE] = {0};
        int64_t n = mtt__min(STRIPE, C - stripe), r, k;
        for (r = 0; r < rows; r++) {
            const float *g = mtt__read(o->dy, r * C + stripe, n, gs), *x = mtt__read(o->x, r * C + stripe, n, xs);
            for (k = 0; k < n; k++) gain[k] += g[k] * (x[k] - stats[2 * r]) * stats[2 * r + 1];
            for (k = 0; k < n; k++) shift[k] += g[k];
        }
        for (k = 0; k < n; k++) d_gain[stripe + k] = gain[k] + (add ? d_gain[stripe + k] : 0.0f);
        for (k = 0; k < n; k++) d_shift[stripe + k] = shift[k] + (add ? d_shift[stripe + k] : 0.0f);
    }
}

/* With g = dy gain: dx = rstd (g - mean(g) - xhat mean(g xhat)) [+ joined, the residual's gradient] */
static void mtt__cpu_norm_backward(const mtt_op *op)
{
    const mtt_norm_backward *o = MTT_OPERANDS_OF(norm_backward, op);
    const float *stats = (const float *)o->stats->data;
    int64_t C = mtt__width(o->dy), rows = mtt__rows(o->dy), row;
    mtt__norm_parameter_gradients(o, op->adds);
    MTT__OMP(omp parallel for schedule(static) if (rows * C > MTT__ALONE))
    for (row = 0; row < rows; row++) {
        float g[MTT__MAX_WIDTH], xhat[MTT__MAX_WIDTH], buffer[MTT__MAX_WIDTH], mean_g, mean_gx;
        const float mean = stats[2 * row], rstd = stats[2 * row + 1], *gain = mtt__read(o->gain, 0, C, buffer);
        int64_t k;
        mtt__load(o->dy, row * C, C, g);
        mtt__load(o->x, row * C, C, xhat);
        for (k = 0; k < C; k++) g[k] *= gain[k];
        for (k = 0; k < C; k++) xhat[k] = (xhat[k] - mean) * rstd;
        mean_g = mtt__sum(g, C) / (float)C;
        mean_gx = mtt__dot(g, xhat, C) / (float)C;
        for (k = 0; k < C; k++) g[k] = rstd * (g[k] - mean_g - xhat[k] * mean_gx);
        if (o->joined) {
            const float *joined = mtt__read(o->joined, row * C, C, xhat);
            for (k = 0; k < C; k++) g[k] += joined[k];
        }
        mtt__store(o->dx, row * C, C, g);
    }
}

/* ---- GELU ---- */

/* s = 1 / (1 + exp(-2u)) with u = sqrt(2/pi) (x + 0.044715 x^3): GELU's tanh form is x s, free of
   cancellation. */
MTT__INLINE float mtt__gelu_sigmoid(float x)
{
    return 1.0f / (1.0f + mtt__exp(-1.5957691216f * (x + 0.044715f * x * x * x)));
}

/* y = GELU(x) */
static void mtt__gelu_elements(const mtt_tensor *x_in, const mtt_tensor *y_out)
{
    int64_t count = mtt__elements(y_out), i;
    MTT__OMP(omp parallel for schedule(static) if (count > MTT__ALONE))
    for (i = 0; i < count; i += MTT__BLOCK) {
        float buffer[MTT__BLOCK], y[MTT__BLOCK];
        int64_t n = mtt__min(MTT__BLOCK, count - i), k;
        const float *x = mtt__read(x_in, i, n, buffer);
        for (k = 0; k < n; k++) y[k] = x[k] * mtt__gelu_sigmoid(x[k]);
        mtt__store(y_out, i, n, y);
    }
}

static void mtt__cpu_gelu(const mtt_op *op)
{
    const mtt_gelu *o = MTT_OPERANDS_OF(gelu, op);
    mtt__gelu_elements(o->x, o->y);
}

/* dx = dy (s + x s (1 - s) 2u') */
static void mtt__gelu_gradients(const mtt_tensor *dy, const mtt_tensor *x_in, const mtt_tensor *dx)
{
    int64_t count = mtt__elements(dx), i;
    MTT__OMP(omp parallel for schedule(static) if (count > MTT__ALONE))
    for (i = 0; i < count; i += MTT__BLOCK) {
        float buffer[MTT__BLOCK], g[MTT__BLOCK];
        int64_t n = mtt__min(MTT__BLOCK, count - i), k;
        const float *x = mtt__read(x_in, i, n, buffer);
        mtt__load(dy, i, n, g);
        for (k = 0; k < n; k++) {
            float s = mtt__gelu_sigmoid(x[k]), slope = 1.5957691216f * (1.0f + 0.134145f * x[k] * x[k]);
            g[k] *= s + x[k] * s * (1.0f - s) * slope;
        }
        mtt__store(dx, i, n, g);
    }
}

static void mtt__cpu_gelu_backward(const mtt_op *op)
{
    const mtt_gelu_backward *o = MTT_OPERANDS_OF(gelu_backward, op);
    mtt__gelu_gradients(o->dy, o->x, o->dx);
}

/* ---- linear layers ---- */

/* y = x W + b, or x W^T + b where the weight is transposed: forward, and with dy for x backward. */
static void mtt__multiply(const mtt_op *op, const mtt_tensor *x, const mtt_tensor *weight, int transposed,
                          const mtt_tensor *bias, const mtt_tensor *y)
{
    mtt__gemm(op, mtt__rows(y), mtt__width(y), mtt__width(x), mtt__matrix(x, 0), mtt__matrix(weight, transposed),
              mtt__matrix(y, 0), bias, 0);
}

static void mtt__cpu_linear(const mtt_op *op)
{
    const mtt_linear *o = MTT_OPERANDS_OF(linear, op);
    mtt__multiply(op, o->x, o->weight, op->transposed, o->bias, o->y);
}

/* dx = dy W^T */
static void mtt__cpu_linear_backward_input(const mtt_op *op)
{
    const mtt_linear_backward_input *o = MTT_OPERANDS_OF(linear_backward_input, op);
    mtt__multiply(op, o->dy, o->weight, !op->transposed, NULL, o->dx);
}

/* pre = x W + b, y = GELU(pre) if there is a y */
static void mtt__cpu_linear_gelu(const mtt_op *op)
{
    const mtt_linear_gelu *o = MTT_OPERANDS_OF(linear_gelu, op);
    mtt__multiply(op, o->x, o->weight, op->transposed, o->bias, o->pre);
    if (o->y) mtt__gelu_elements(o->pre, o->y);
}

/* dx = (dy W^T) GELU'(pre); d_bias (+)= sum over rows of dx as it is stored */
static void mtt__cpu_linear_backward_gelu(const mtt_op *op)
{
    const mtt_linear_backward_gelu *o = MTT_OPERANDS_OF(linear_backward_gelu, op);
    mtt__multiply(op, o->dy, o->weight, !op->transposed, NULL, o->dx);
    mtt__gelu_gradients(o->dx, o->pre, o->dx);
    if (o->d_bias) mtt__column_sums(o->dx, mtt__rows(o->dx), (float *)o->d_bias->data, op->adds);
}

/* d_weight (+)= x^T dy, or dy^T x for a transposed weight; d_bias (+)= sum over rows of dy. x begins at row
   `first`. */
static void mtt__weight_gradient(const mtt_op *op, const mtt_tensor *x, int64_t first, const mtt_tensor *dy, int64_t rows,
                                 const mtt_tensor *d_weight, const mtt_tensor *d_bias, int add)
{
    int64_t k = mtt__width(x), n = mtt__width(dy);
    mtt__view left = mtt__matrix_at(x, first * k, !op->transposed), right = mtt__matrix(dy, op->transposed);
    if (op->transposed) mtt__gemm(op, n, k, rows, right, left, mtt__matrix(d_weight, 0), NULL, add);
    else mtt__gemm(op, k, n, rows, left, right, mtt__matrix(d_weight, 0), NULL, add);
    if (d_bias) mtt__column_sums(dy, rows, (float *)d_bias->data, add);
}

static void mtt__cpu_linear_backward_weight(const mtt_op *op)
{
    const mtt_linear_backward_weight *o = MTT_OPERANDS_OF(linear_backward_weight, op);
    mtt__weight_gradient(op, o->x, 0, o->dy, mtt__rows(o->dy), o->d_weight, o->d_bias, op->adds);
}

/* ---- plain attention ---- */

/* One head of one sequence: its q, k and v, and its part of the output. */
typedef struct mtt__head {
    mtt__view q, k, v;
    int64_t out;   /* offset of its output, rows d_model apart */
    int64_t index; /* of the head in the batch: its scores are rows index * T up */
    float scale;   /* 1 / sqrt(head_dim) */
} mtt__head;

static mtt__head mtt__head_at(const mtt_op *op, const mtt_tensor *qkv, int64_t index)
{
    const mtt_shape *d = op->shape;
    mtt_qkv parts = mtt_qkv_of(d);
    int64_t tokens = index / d->heads * d->seq_len;
    int h = (int)(index % d->heads);
    mtt__head head;
    head.q = mtt__matrix_at(qkv, tokens * parts.row + mtt_qkv_column(&parts, 0, h), 0);
    head.k = mtt__matrix_at(qkv, tokens * parts.row + mtt_qkv_column(&parts, 1, h), 0);
    head.v = mtt__matrix_at(qkv, tokens * parts.row + mtt_qkv_column(&parts, 2, h), 0);
    head.out = tokens * d->d_model + h * d->head_dim;
    head.index = index;
    head.scale = 1.0f / sqrtf((float)d->head_dim);
    return head;
}

static int64_t mtt__heads(const mtt_op *op)
{
    return (int64_t)op->shape->batch * op->shape->heads;
}

/* The T x T matrix of a head. */
static mtt__view mtt__square(const mtt_op *op, const mtt_tensor *t, int64_t head, int transposed)
{
    return mtt__matrix_at(t, head * op->shape->seq_len * op->shape->seq_len, transposed);
}

/* C = alpha A B by blocks on one thread: the products of plain attention, of which each head has its own. */
static void mtt__head_gemm(int64_t m, int64_t n, int64_t k, mtt__view a, mtt__view b, mtt__view c, float alpha)
{
    enum { S = MTT__TILE };
    float ta[S * S], tb[S * S], tc[S * S];
    int64_t i, j, p, r, l;
    for (i = 0; i < m; i += S)
        for (j = 0; j < n; j += S) {
            int64_t cm = mtt__min(S, m - i), cn = mtt__min(S, n - j);
            memset(tc, 0, sizeof(tc));
            for (p = 0; p < k; p += S) {
                int64_t ck = mtt__min(S, k - p);
                if (cm < S || ck < S) memset(ta, 0, sizeof(ta));
                if (ck < S) memset(tb, 0, sizeof(tb));
                mtt__load_block(a, i, cm, p, ck, ta, S);
                mtt__load_block(b, p, ck, j, cn, tb, S);
                mtt__multiply_block(mtt__round_up(cm, 2), cn, mtt__round_up(ck, 4), ta, S, tb, S, tc, S);
            }
            for (r = 0; r < cm; r++) {
                for (l = 0; l < cn; l++) tc[r * S + l] *= alpha;
                mtt__store(c.t, c.offset + (i + r) * c.row + j, cn, tc + r * S);
            }
        }
}

/* S = Q K^T / sqrt(head_dim), the whole square */
static void mtt__cpu_attention_scores(const mtt_op *op)
{
    const mtt_attention_scores *o = MTT_OPERANDS_OF(attention_scores, op);
    int64_t T = op->shape->seq_len, D = op->shape->head_dim, i;
    MTT__OMP(omp parallel for schedule(static) if (mtt__heads(op) * T * T > MTT__ALONE))
    for (i = 0; i < mtt__heads(op); i++) {
        mtt__head h = mtt__head_at(op, o->qkv, i);
        mtt__head_gemm(T, T, D, h.q, mtt__transposed(h.k), mtt__square(op, o->scores, i, 0), h.scale);
    }
}

/* P = softmax of the keys that each query attends, 0 elsewhere */
static void mtt__cpu_softmax(const mtt_op *op)
{
    const mtt_softmax *o = MTT_OPERANDS_OF(softmax, op);
    int64_t T = op->shape->seq_len, rows = mtt__rows(o->scores), row;
    MTT__OMP(omp parallel for schedule(static) if (rows * T > MTT__ALONE))
    for (row = 0; row < rows; row++) {
        float xs[MTT__BLOCK], ys[MTT__BLOCK], most = -3.4e38f, sum = 0;
        int64_t query = row % T, low = mtt__first_key(op->shape->window, query), j, n, k;
        const float *x;
        for (j = low; j <= query; j += MTT__BLOCK) {
            n = mtt__min(MTT__BLOCK, query + 1 - j);
            most = fmaxf(most, mtt__largest(mtt__read(o->scores, row * T + j, n, xs), n));
        }
        for (j = low; j <= query; j += MTT__BLOCK) {
            n = mtt__min(MTT__BLOCK, query + 1 - j);
            x = mtt__read(o->scores, row * T + j, n, xs);
            for (k = 0; k < n; k++) ys[k] = mtt__exp(x[k] - most);
            sum += mtt__sum(ys, n);
        }
        for (j = 0; j < T; j += n) {
            n = mtt__min(MTT__BLOCK, T - j);
            x = mtt__read(o->scores, row * T + j, n, xs);
            for (k = 0; k < n; k++) ys[k] = j + k < low || j + k > query ? 0.0f : mtt__exp(x[k] - most) / sum;
            mtt__store(o->probs, row * T + j, n, ys);
        }
    }
}

static void mtt__cpu_dropout_scores(const mtt_op *op)
{
    const mtt_dropout_scores *o = MTT_OPERANDS_OF(dropout_scores, op);
    mtt__masked_sum(op, NULL, o->probs, o->control, o->dropped);
}

/* O = P V */
static void mtt__cpu_attention_values(const mtt_op *op)
{
    const mtt_attention_values *o = MTT_OPERANDS_OF(attention_values, op);
    int64_t T = op->shape->seq_len, D = op->shape->head_dim, i;
    MTT__OMP(omp parallel for schedule(static) if (mtt__heads(op) * T * T > MTT__ALONE))
    for (i = 0; i < mtt__heads(op); i++) {
        mtt__head h = mtt__head_at(op, o->qkv, i);
        mtt__head_gemm(T, D, T, mtt__square(op, o->probs, i, 0), h.v, mtt__matrix_at(o->out, h.out, 0), 1.0f);
    }
}

/* dP = dO V^T, dV = P^T dO */
static void mtt__cpu_attention_values_backward(const mtt_op *op)
{
    const mtt_attention_values_backward *o = MTT_OPERANDS_OF(attention_values_backward, op);
    int64_t T = op->shape->seq_len, D = op->shape->head_dim, i;
    MTT__OMP(omp parallel for schedule(static) if (mtt__heads(op) * T * T > MTT__ALONE))
    for (i = 0; i < mtt__heads(op); i++) {
        mtt__head h = mtt__head_at(op, o->qkv, i), grad = mtt__head_at(op, o->d_qkv, i);
        mtt__view d_out = mtt__matrix_at(o->d_out, h.out, 0);
        mtt__head_gemm(T, T, D, d_out, mtt__transposed(h.v), mtt__square(op, o->d_probs, i, 0), 1.0f);
        mtt__head_gemm(T, D, T, mtt__square(op, o->probs, i, 1), d_out, grad.v, 1.0f);
    }
}

/* dS = P (mask dP - sum(mask dP P)), in place */
static void mtt__cpu_softmax_backward(const mtt_op *op)
{
    const mtt_softmax_backward *o = MTT_OPERANDS_OF(softmax_backward, op);
    int64_t T = op->shape->seq_len, rows = mtt__rows(o->d_probs), row;
    MTT__OMP(omp parallel for schedule(static) if (rows * T > MTT__ALONE))
    for (row = 0; row < rows; row++) {
        float g[MTT__BLOCK], buffer[MTT__BLOCK], sum = 0;
        int64_t j, n, k, pass;
        for (pass = 0; pass < 2; pass++)
            for (j = 0; j < T; j += n) {
                const float *p;
                n = mtt__min(MTT__BLOCK, T - j);
                mtt__load(o->d_probs, row * T + j, n, g);
                p = mtt__read(o->probs, row * T + j, n, buffer);
                mtt__drop(op, o->control, row * T + j, n, g);
                if (pass == 0) {
                    sum += mtt__dot(g, p, n);
                    continue;
                }
                for (k = 0; k < n; k++) g[k] = p[k] * (g[k] - sum);
                mtt__store(o->d_scores, row * T + j, n, g);
            }
    }
}

/* dQ = dS K / sqrt(head_dim), dK = dS^T Q / sqrt(head_dim) */
static void mtt__cpu_attention_scores_backward(const mtt_op *op)
{
    const mtt_attention_scores_backward *o = MTT_OPERANDS_OF(attention_scores_backward, op);
    int64_t T = op->shape->seq_len, D = op->shape->head_dim, i;
    MTT__OMP(omp parallel for schedule(static) if (mtt__heads(op) * T * T > MTT__ALONE))
    for (i = 0; i < mtt__heads(op); i++) {
        mtt__head h = mtt__head_at(op, o->qkv, i), grad = mtt__head_at(op, o->d_qkv, i);
        mtt__head_gemm(T, D, T, mtt__square(op, o->d_scores, i, 0), h.k, grad.q, h.scale);
        mtt__head_gemm(T, D, T, mtt__square(op, o->d_scores, i, 1), h.q, grad.k, h.scale);
    }
}

/* ---- flash attention: tiles of 64 queries and 64 keys, 0.3 to 0.5 MB of stack a thread ---- */

/* A tile of queries or keys, rows MTT__MAX_HEAD apart; the same transposed; a tile of scores. */
typedef float mtt__rows_tile[MTT__TILE * MTT__MAX_HEAD];
typedef float mtt__columns_tile[MTT__MAX_HEAD * MTT__TILE];
typedef float mtt__score_tile[MTT__TILE * MTT__TILE];

/* Rows i0 up of a view, `rows` rounded up to 4 by zeros, which add nothing to any product. */
static void mtt__load_rows(mtt__view v, int64_t i0, int64_t rows, int64_t width, float *out)
{
    int64_t i;
    mtt__load_block(v, i0, rows, 0, width, out, MTT__MAX_HEAD);
    for (i = rows; i < mtt__round_up(rows, 4); i++) memset(out + i * MTT__MAX_HEAD, 0, (size_t)width * sizeof(float));
}

static void mtt__store_rows(mtt__view v, int64_t i0, int64_t rows, int64_t width, const float *values)
{
    int64_t i;
    for (i = 0; i < rows; i++) mtt__store(v.t, v.offset + (i0 + i) * v.row, width, values + i * MTT__MAX_HEAD);
}

/* The keys of a tile of `n` from j0 that a query attends: [*low, *high) of the tile, empty if low == high. */
static void mtt__attended(const mtt_shape *d, int64_t query, int64_t j0, int64_t n, int64_t *low, int64_t *high)
{
    int64_t first = mtt__first_key(d->window, query) - j0;
    *low = first > 0 ? first : 0;
    *high = mtt__min(n, query - j0 + 1);
    if (*high < *low) *high = *low = 0;
}

/* Element 0 of a row of masks: dropout counts the scores of the whole batch. */
static int64_t mtt__score_element(const mtt_shape *d, const mtt__head *h, int64_t query, int64_t key)
{
    return (h->index * d->seq_len + query) * d->seq_len + key;
}

/* FlashAttention, forward (Dao et al. 2022, algorithm 1, queries outside). For a tile of queries, tiles of keys pass by,
   while a running maximum m and sum l keep O = softmax(S) V exact:
     m' = max(m, rowmax S), O = e^(m - m') O + e^(S - m') V, l = e^(m - m') l + rowsum e^(S - m'); at the end O / l.
   Keeps lse = m + log l, from which the backward pass recomputes P. */
static void mtt__flash_tile(const mtt_op *op, mtt__head h, int64_t i0)
{
    enum { S = MTT__TILE };
    const mtt_flash *f = MTT_OPERANDS_OF(flash, op);
    const mtt_shape *d = op->shape;
    mtt__rows_tile q, v, o;
    mtt__columns_tile kt;
    mtt__score_tile s;
    float row_max[S], row_sum[S];
    int64_t D = d->head_dim, m = mtt__min(S, d->seq_len - i0), j0, i, j;
    mtt__load_rows(h.q, i0, m, D, q);
    memset(o, 0, sizeof(o));
    for (i = 0; i < S; i++) row_max[i] = -3.4e38f, row_sum[i] = 0;
    for (j0 = mtt__first_key(d->window, i0) / S * S; j0 < i0 + m; j0 += S) {
        int64_t n = mtt__min(S, d->seq_len - j0), low, high;
        mtt__load_block(mtt__transposed(h.k), 0, D, j0, n, kt, S);
        mtt__load_rows(h.v, j0, n, D, v);
        memset(s, 0, sizeof(s));
        mtt__multiply_block(mtt__round_up(m, 2), n, D, q, MTT__MAX_HEAD, kt, S, s, S);
        for (i = 0; i < m; i++) {
            float *p = s + i * S, *out = o + i * MTT__MAX_HEAD, most, rescale;
            mtt__attended(d, i0 + i, j0, n, &low, &high);
            for (j = 0; j < low; j++) p[j] = 0;
            for (j = high; j < S; j++) p[j] = 0;
            if (low == high) continue;
            for (j = low; j < high; j++) p[j] *= h.scale;
            most = fmaxf(row_max[i], mtt__largest(p + low, high - low));
            rescale = mtt__exp(row_max[i] - most);
            for (j = low; j < high; j++) p[j] = mtt__exp(p[j] - most);
            row_sum[i] = row_sum[i] * rescale + mtt__sum(p + low, high - low);
            row_max[i] = most;
            for (j = 0; j < D; j++) out[j] *= rescale;
            mtt__drop(op, f->control, mtt__score_element(d, &h, i0 + i, j0), n, p);
        }
        mtt__multiply_block(mtt__round_up(m, 2), D, mtt__round_up(n, 4), s, S, v, MTT__MAX_HEAD, o, MTT__MAX_HEAD);
    }
    for (i = 0; i < m; i++) {
        for (j = 0; j < D; j++) o[i * MTT__MAX_HEAD + j] /= row_sum[i];
        ((float *)f->lse->data)[h.index * d->seq_len + i0 + i] = row_max[i] + logf(row_sum[i]);
    }
    mtt__store_rows(mtt__matrix_at(f->out, h.out, 0), i0, m, D, o);
}

static void mtt__cpu_flash(const mtt_op *op)
{
    const mtt_flash *f = MTT_OPERANDS_OF(flash, op);
    int64_t tiles = mtt__ceil_div(op->shape->seq_len, MTT__TILE), jobs = tiles * mtt__heads(op), i;
    MTT__OMP(omp parallel for schedule(dynamic, 1) if (jobs * MTT__TILE * MTT__TILE > MTT__ALONE))
    for (i = 0; i < jobs; i++) mtt__flash_tile(op, mtt__head_at(op, f->qkv, i / tiles), i % tiles * MTT__TILE);
}

/* A tile of queries in the backward pass. */
typedef struct mtt__queries {
    int64_t i0, count;
    mtt__rows_tile q, d_out;
    float delta[MTT__TILE]; /* rowsum(dO O) */
} mtt__queries;

static void mtt__load_queries(const mtt_op *op, const mtt__head *h, int64_t i0, mtt__queries *t)
{
    const mtt_flash_backward *f = MTT_OPERANDS_OF(flash_backward, op);
    const mtt_shape *d = op->shape;
    float out[MTT__MAX_HEAD];
    int64_t i;
    t->i0 = i0;
    t->count = mtt__min(MTT__TILE, d->seq_len - i0);
    mtt__load_rows(h->q, i0, t->count, d->head_dim, t->q);
    mtt__load_rows(mtt__matrix_at(f->d_out, h->out, 0), i0, t->count, d->head_dim, t->d_out);
    for (i = 0; i < t->count; i++) {
        mtt__load(f->out, h->out + (i0 + i) * d->d_model, d->head_dim, out);
        t->delta[i] = mtt__dot(t->d_out + i * MTT__MAX_HEAD, out, d->head_dim);
    }
}

/* A tile of n keys from j0, transposed. */
typedef struct mtt__keys {
    int64_t j0, count;
    mtt__columns_tile k, v;
} mtt__keys;

static void mtt__load_keys(const mtt_op *op, const mtt__head *h, int64_t j0, mtt__keys *t)
{
    t->j0 = j0;
    t->count = mtt__min(MTT__TILE, op->shape->seq_len - j0);
    mtt__load_block(mtt__transposed(h->k), 0, op->shape->head_dim, j0, t->count, t->k, MTT__TILE);
    mtt__load_block(mtt__transposed(h->v), 0, op->shape->head_dim, j0, t->count, t->v, MTT__TILE);
}

/* For a tile of queries and one of keys: P = mask e^(S - lse), dS = e^(S - lse) (mask dP - delta) /
   sqrt(head_dim) with dP = dO V^T. */
static void mtt__flash_gradients(const mtt_op *op, const mtt__head *h, const mtt__queries *q, const mtt__keys *k, float *p,
                                 float *ds)
{
    enum { S = MTT__TILE };
    const mtt_flash_backward *f = MTT_OPERANDS_OF(flash_backward, op);
    const mtt_shape *d = op->shape;
    const float *lse = (const float *)f->lse->data + h->index * d->seq_len + q->i0;
    float mask[S], scale = mtt__attends_one(d) ? 0.0f : h->scale;
    int64_t rows = mtt__round_up(q->count, 2), i, j, low, high;
    memset(p, 0, sizeof(mtt__score_tile));
    memset(ds, 0, sizeof(mtt__score_tile));
    mtt__multiply_block(rows, k->count, d->head_dim, q->q, MTT__MAX_HEAD, k->k, S, p, S);
    mtt__multiply_block(rows, k->count, d->head_dim, q->d_out, MTT__MAX_HEAD, k->v, S, ds, S);
    for (i = 0; i < q->count; i++) {
        float *ps = p + i * S, *gs = ds + i * S;
        mtt__attended(d, q->i0 + i, k->j0, k->count, &low, &high);
        mtt__dropout_mask(op, f->control, mtt__score_element(d, h, q->i0 + i, k->j0), k->count, mask);
        for (j = 0; j < low; j++) ps[j] = gs[j] = 0;
        for (j = low; j < high; j++) {
            float e = mtt__exp(ps[j] * h->scale - lse[i]);
            ps[j] = e * mask[j];
            gs[j] = e * (mask[j] * gs[j] - q->delta[i]) * scale;
        }
        for (j = high; j < S; j++) ps[j] = gs[j] = 0;
    }
}

static void mtt__transpose_tile(const float *in, float *out)
{
    int i, j;
    for (i = 0; i < MTT__TILE; i++)
        for (j = 0; j < MTT__TILE; j++) out[j * MTT__TILE + i] = in[i * MTT__TILE + j];
}

/* dV = P^T dO and dK = dS^T Q of one tile of keys, over the tiles of queries that attend it. */
static void mtt__flash_backward_keys(const mtt_op *op, mtt__head h, int64_t j0)
{
    enum { S = MTT__TILE };
    const mtt_shape *d = op->shape;
    mtt__head grad = mtt__head_at(op, MTT_OPERANDS_OF(flash_backward, op)->d_qkv, h.index);
    mtt__rows_tile dk, dv;
    mtt__score_tile p, ds, transposed;
    mtt__queries q;
    mtt__keys k;
    int64_t D = d->head_dim, i0, rows, end;
    mtt__load_keys(op, &h, j0, &k);
    rows = mtt__round_up(k.count, 2);
    end = d->window ? mtt__min(d->seq_len, j0 + k.count - 1 + d->window) : d->seq_len;
    memset(dk, 0, sizeof(dk));
    memset(dv, 0, sizeof(dv));
    for (i0 = j0; i0 < end; i0 += S) {
        int64_t queries;
        mtt__load_queries(op, &h, i0, &q);
        queries = mtt__round_up(q.count, 4);
        mtt__flash_gradients(op, &h, &q, &k, p, ds);
        mtt__transpose_tile(p, transposed);
        mtt__multiply_block(rows, D, queries, transposed, S, q.d_out, MTT__MAX_HEAD, dv, MTT__MAX_HEAD);
        mtt__transpose_tile(ds, transposed);
        mtt__multiply_block(rows, D, queries, transposed, S, q.q, MTT__MAX_HEAD, dk, MTT__MAX_HEAD);
    }
    mtt__store_rows(grad.k, j0, k.count, D, dk);
    mtt__store_rows(grad.v, j0, k.count, D, dv);
}

/* dQ = dS K of one tile of queries. Computing dS twice costs two products of seven, and saves an accumulator
   of dQ. */
static void mtt__flash_backward_queries(const mtt_op *op, mtt__head h, int64_t i0)
{
    enum { S = MTT__TILE };
    const mtt_shape *d = op->shape;
    mtt__head grad = mtt__head_at(op, MTT_OPERANDS_OF(flash_backward, op)->d_qkv, h.index);
    mtt__rows_tile dq, rows;
    mtt__score_tile p, ds;
    mtt__queries q;
    mtt__keys k;
    int64_t j0;
    mtt__load_queries(op, &h, i0, &q);
    memset(dq, 0, sizeof(dq));
    for (j0 = mtt__first_key(d->window, i0) / S * S; j0 < i0 + q.count; j0 += S) {
        mtt__load_keys(op, &h, j0, &k);
        mtt__load_rows(h.k, j0, k.count, d->head_dim, rows);
        mtt__flash_gradients(op, &h, &q, &k, p, ds);
        mtt__multiply_block(mtt__round_up(q.count, 2), d->head_dim, mtt__round_up(k.count, 4), ds, S, rows, MTT__MAX_HEAD, dq,
                            MTT__MAX_HEAD);
    }
    mtt__store_rows(grad.q, i0, q.count, d->head_dim, dq);
}

static void mtt__cpu_flash_backward(const mtt_op *op)
{
    const mtt_flash_backward *f = MTT_OPERANDS_OF(flash_backward, op);
    int64_t tiles = mtt__ceil_div(op->shape->seq_len, MTT__TILE), jobs = tiles * mtt__heads(op), i;
    MTT__OMP(omp parallel for schedule(dynamic, 1) if (jobs * MTT__TILE * MTT__TILE > MTT__ALONE))
    for (i = 0; i < 2 * jobs; i++) {
        mtt__head h = mtt__head_at(op, f->qkv, i / 2 / tiles);
        if (i % 2) mtt__flash_backward_queries(op, h, i / 2 % tiles * MTT__TILE);
        else mtt__flash_backward_keys(op, h, i / 2 % tiles * MTT__TILE);
    }
}

/* ---- loss ---- */

/* Loss, hit and logsumexp of one row of logits: out = {lse - x[target], x[target] is the largest, lse}. */
static void mtt__row_loss(const mtt_tensor *logits, int64_t row, int64_t classes, int32_t target, float *out)
{
    float xs[MTT__BLOCK], es[MTT__BLOCK], most = -3.4e38f, at, lse;
    double sum = 0;
    int64_t first = row * mtt__width(logits), j, n, k;
    memset(out, 0, 3 * sizeof(float));
    if (target < 0) return;
    for (j = 0; j < classes; j += n) {
        n = mtt__min(MTT__BLOCK, classes - j);
        most = fmaxf(most, mtt__largest(mtt__read(logits, first + j, n, xs), n));
    }
    for (j = 0; j < classes; j += n) {
        const float *x;
        n = mtt__min(MTT__BLOCK, classes - j);
        x = mtt__read(logits, first + j, n, xs);
        for (k = 0; k < n; k++) es[k] = mtt__exp(x[k] - most);
        sum += mtt__sum(es, n);
    }
    mtt__load(logits, first + target, 1, &at);
    lse = most + (float)log(sum);
    out[0] = lse - at;
    out[1] = at >= most;
    out[2] = lse;
}

/* A row of logits becomes its gradient: (softmax - [j = target]) * factor, 0 in the padding and where nothing
   counts. */
static void mtt__row_gradient(const mtt_tensor *logits, int64_t row, int64_t classes, int32_t target, float lse, float factor)
{
    float xs[MTT__BLOCK];
    int64_t width = mtt__width(logits), j, n, k;
    for (j = 0; j < width; j += n) {
        int64_t live = target < 0 ? 0 : classes - j;
        n = mtt__min(MTT__BLOCK, width - j);
        live = live < 0 ? 0 : mtt__min(live, n);
        mtt__load(logits, row * width + j, n, xs);
        for (k = 0; k < live; k++) xs[k] = mtt__exp(xs[k] - lse) * factor;
        for (k = live; k < n; k++) xs[k] = 0;
        if (target >= j && target < j + n) xs[target - j] -= factor;
        mtt__store(logits, row * width + j, n, xs);
    }
}

static void mtt__cpu_cross_entropy(const mtt_op *op)
{
    const mtt_cross_entropy *o = MTT_OPERANDS_OF(cross_entropy, op);
    const int32_t *targets = (const int32_t *)o->targets->data;
    float *losses = (float *)o->losses->data;
    int64_t V = op->shape->vocab, i;
    MTT__OMP(omp parallel for schedule(static) if (op->shape->rows * V > MTT__ALONE))
    for (i = 0; i < op->shape->rows; i++) mtt__row_loss(o->logits, i, V, targets[i], losses + 3 * i);
}

static void mtt__cpu_cross_entropy_backward(const mtt_op *op)
{
    const mtt_cross_entropy_backward *o = MTT_OPERANDS_OF(cross_entropy_backward, op);
    const float *losses = (const float *)o->losses->data;
    const int32_t *targets = (const int32_t *)o->targets->data;
    float factor = mtt__loss_factor(mtt__control(o->control), mtt__counters(o->counters));
    int64_t V = op->shape->vocab, i;
    MTT__OMP(omp parallel for schedule(static) if (op->shape->rows * V > MTT__ALONE))
    for (i = 0; i < op->shape->rows; i++) mtt__row_gradient(o->d_logits, i, V, targets[i], losses[3 * i + 2], factor);
}

/* Head, loss and their gradients for a few rows at a time: the logits of a chunk become their gradients in
   place, and feed both products before the next chunk overwrites them. The weight's gradient adds up in FP32.
   */
static void mtt__cpu_chunked_loss(const mtt_op *op)
{
    const mtt_chunked_loss *o = MTT_OPERANDS_OF(chunked_loss, op);
    const int32_t *targets = (const int32_t *)o->targets->data;
    float factor = mtt__loss_factor(mtt__control(o->control), mtt__counters(o->counters));
    float *losses = (float *)o->losses->data;
    int64_t C = mtt__width(o->x), Vp = mtt__width(o->logits), V = op->shape->vocab, first, count, i;
    for (first = 0; first < op->shape->rows; first += count) {
        count = mtt__min(o->logits->shape[0], op->shape->rows - first);
        mtt__gemm(op, count, Vp, C, mtt__matrix_at(o->x, first * C, 0), mtt__matrix(o->weight, 1), mtt__matrix(o->logits, 0),
                  o->bias, 0);
        MTT__OMP(omp parallel for schedule(static) if (count * Vp > MTT__ALONE))
        for (i = 0; i < count; i++) {
            float *row = losses + 3 * (first + i);
            mtt__row_loss(o->logits, i, V, targets[first + i], row);
            if (o->dx) mtt__row_gradient(o->logits, i, V, targets[first + i], row[2], factor);
        }
        if (!o->dx) continue;
        mtt__gemm(op, count, C, Vp, mtt__matrix(o->logits, 0), mtt__matrix(o->weight, 0), mtt__matrix_at(o->dx, first * C, 0),
                  NULL, 0);
        mtt__weight_gradient(op, o->x, first, o->logits, count, o->d_weight, o->d_bias, first > 0 || op->adds);
    }
}

/* Adds the rows to the sums of the step, which the first micro-batch begins. */
static void mtt__cpu_sum_loss(const mtt_op *op)
{
    const mtt_sum_loss *o = MTT_OPERANDS_OF(sum_loss, op);
    const float *losses = (const float *)o->losses->data;
    mtt_counters *counters = mtt__counters(o->counters);
    int64_t i;
    if (!op->later) {
        counters->loss = 0;
        counters->hits = 0;
    }
    for (i = 0; i < op->shape->rows; i++) {
        counters->loss += (double)losses[3 * i];
        counters->hits += losses[3 * i + 1] > 0;
    }
    counters->targets = mtt__control(o->control)->targets;
}

/* ---- step ---- */

/* Sum of squares of a tensor, in 64 pieces of fixed bounds that threads share. */
static double mtt__sum_squares(const mtt_tensor *t)
{
    enum { PIECES = 64 };
    int64_t count = mtt__elements(t), piece, size = mtt__ceil_div(count, PIECES);
    double sums[PIECES] = {0}, sum = 0;
    MTT__OMP(omp parallel for schedule(static) if (count > MTT__ALONE))
    for (piece = 0; piece < PIECES; piece++) {
        int64_t at = mtt__min(piece * size, count), end = mtt__min(at + size, count), n;
        for (; at < end; at += n) {
            float buffer[MTT__BLOCK];
            const float *x;
            n = mtt__min(MTT__BLOCK, end - at);
            x = mtt__read(t, at, n, buffer);
            sums[piece] += (double)mtt__dot(x, x, n);
        }
    }
    for (piece = 0; piece < PIECES; piece++) sum += sums[piece];
    return sum;
}

static void mtt__cpu_grad_norm(const mtt_op *op)
{
    const mtt_grad_norm *o = MTT_OPERANDS_OF(grad_norm, op);
    double sum = 0;
    int i;
    for (i = 0; i < op->parameters; i++) sum += mtt__sum_squares(op->gradients[i]);
    mtt__scale_gradients(mtt__control(o->control), mtt__counters(o->counters), sum);
}

/* Codes of compact moments from element `first` on. The scales of all groups are behind the codes of all. */
static uint8_t *mtt__codes(const mtt_tensor *moments, int64_t first)
{
    return (uint8_t *)moments->data + first;
}

static uint16_t *mtt__scales(const mtt_tensor *moments, int64_t first)
{
    return (uint16_t *)(void *)((uint8_t *)moments->data + MTT__GROUP * moments->shape[0]) + first / MTT__GROUP;
}

/* A block of the compact state: decoded, updated and encoded. `at` counts elements of the parameter, `first`
   of the kept tensors. */
static void mtt__adamw_compact(const mtt_adamw *o, const mtt_adamw_rates *r, uint64_t stream, const mtt_tensor *weight,
                               int64_t at, int64_t first, int64_t count, const float *g)
{
    float m[MTT__BLOCK], v[MTT__BLOCK], joined[MTT__BLOCK], *w = o->master ? joined : (float *)weight->data + at;
    uint16_t random[MTT__BLOCK], *weights = (uint16_t *)weight->data + at;
    uint8_t *rest = o->master ? (uint8_t *)o->master->data + first : NULL;
    int fp16 = weight->dtype == MTT_F16_BITS;
    int64_t k;
    for (k = 0; k < count; k += 8) {
        uint32_t draw[4];
        int i;
        mtt__philox(mtt__control(o->control)->seed, (uint64_t)(at + k) >> 3, stream, draw);
        for (i = 0; i < 8; i++) random[k + i] = (uint16_t)mtt__draw_bits(draw, i);
    }
    mtt__unpack_moments(mtt__codes(o->m, first), mtt__scales(o->m, first), count, 0, m);
    mtt__unpack_moments(mtt__codes(o->v, first), mtt__scales(o->v, first), count, 1, v);
    if (rest) mtt__join_weights(weights, rest, count, fp16, w);
    for (k = 0; k < count; k++) mtt__adamw_element(r, g[k], &m[k], &v[k], &w[k]);
    mtt__pack_moments(m, count, 0, random, mtt__codes(o->m, first), mtt__scales(o->m, first));
    mtt__pack_moments(v, count, 1, random, mtt__codes(o->v, first), mtt__scales(o->v, first));
    if (rest) mtt__split_weights(w, count, fp16, random, weights, rest);
}

static void mtt__adamw_full(const mtt_adamw *o, const mtt_adamw_rates *r, const mtt_tensor *weight, int64_t at, int64_t first,
                            int64_t count, const float *g)
{
    float *w = o->master ? (float *)o->master->data + first : (float *)weight->data + at;
    float *m = (float *)o->m->data + first, *v = (float *)o->v->data + first;
    int64_t k;
    for (k = 0; k < count; k++) mtt__adamw_element(r, g[k], &m[k], &v[k], &w[k]);
    if (o->master) mtt__store(weight, at, count, w);
}

/* Updates one parameter, whose part of the kept tensors begins at `first`. */
static void mtt__update_parameter(const mtt_op *op, int parameter, int64_t first)
{
    const mtt_adamw *o = MTT_OPERANDS_OF(adamw, op);
    const mtt_control *c = mtt__control(o->control);
    const mtt_counters *counters = mtt__counters(o->counters);
    const mtt_tensor *gradient = op->gradients[parameter], *weight = op->weights[parameter];
    uint64_t stream = mtt__stream(op->site, parameter, (uint64_t)counters->updates);
    int64_t count = mtt__elements(weight), i;
    mtt_adamw_rates r = mtt__adamw_rates(c, counters, weight->rank > 1, mtt__adamw_step(c, counters),
                                         mtt__adamw_correction(c, counters));
    MTT__OMP(omp parallel for schedule(static) if (count > MTT__ALONE))
    for (i = 0; i < count; i += MTT__BLOCK) {
        int64_t n = mtt__min(MTT__BLOCK, count - i);
        float buffer[MTT__BLOCK];
        const float *g = mtt__read(gradient, i, n, buffer);
        if (o->m->dtype == MTT_U8) mtt__adamw_compact(o, &r, stream, weight, i, first + i, n, g);
        else mtt__adamw_full(o, &r, weight, i, first + i, n, g);
    }
}

static void mtt__cpu_adamw(const mtt_op *op)
{
    int64_t first = 0;
    int i;
    if (mtt__counters(MTT_OPERANDS_OF(adamw, op)->counters)->skipped) return;
    for (i = 0; i < op->parameters; i++) {
        mtt__update_parameter(op, i, first);
        first += mtt__part_elements(op->weights[i]);
    }
}

/* ---- backend ---- */

#define MTT__CPU_FUNCTION(name, inputs, operands, flops, bytes, scratch) mtt__cpu_##name,
static void (*const mtt__cpu_functions[])(const mtt_op *op) = {MTT_OPS(MTT__CPU_FUNCTION)};

static mtt_status mtt__cpu_open(mtt_env *env, const mtt_backend *backend, const mtt_policy *policy, void **context)
{
    (void)backend;
    (void)policy;
    *context = env; /* the CPU needs only a source of memory */
    return MTT_OK;
}

static void mtt__cpu_close(void *context)
{
    (void)context;
}

static mtt_status mtt__cpu_alloc(void *context, size_t bytes, void **block)
{
    *block = mtt__alloc_raw((mtt_env *)context, bytes);
    return *block ? MTT_OK : MTT_E_MEMORY;
}

static void mtt__cpu_release(void *context, void *block)
{
    mtt__free((mtt_env *)context, block);
}

/* Unknown: hosts overcommit. */
static mtt_status mtt__cpu_memory(void *context, size_t *free_bytes, size_t *all_bytes)
{
    (void)context;
    *free_bytes = *all_bytes = 0;
    return MTT_OK;
}

static mtt_status mtt__cpu_copy(void *context, void *to, const void *from, size_t bytes)
{
    (void)context;
    memcpy(to, from, bytes);
    return MTT_OK;
}

static mtt_status mtt__cpu_run(void *context, const mtt_op *ops, int count)
{
    int i;
    (void)context;
    for (i = 0; i < count; i++) mtt__cpu_functions[ops[i].kind](&ops[i]);
    return MTT_OK;
}

static const mtt_backend mtt__cpu_table = {
    "cpu", MTT_DEVICE_CPU, 0,
    mtt__cpu_open, mtt__cpu_close, mtt__cpu_alloc, mtt__cpu_release, mtt__cpu_memory,
    mtt__cpu_copy, mtt__cpu_copy, /* upload and download */
    mtt__cpu_run,
    NULL, NULL, NULL, NULL        /* stream and memory, a CUDA device's */
};

MTTDEF const mtt_backend *mtt_cpu_backend(void)
{
    return &mtt__cpu_table;
}

#ifndef MTT_CUDA
MTTDEF mtt_status mtt_cuda_backend(mtt_env *env, int device, mtt_backend *backend)
{
    memset(backend, 0, sizeof(*backend));
    return mtt__fail(env, MTT_E_DEVICE, "CUDA device %d cannot be used: this build has no CUDA; compile with -DMTT_CUDA and "
                     "mtt_kernels.cu", device);
}
#endif

/* ----------------------------------------------------------------------------------------------------------
   >>trainer
   ---------------------------------------------------------------------------------------------------------- */

enum { MTT__STAGING = 65536 }; /* elements that pass between host and device at a time; whole groups of the compact state */

struct mtt_trainer {
    mtt_env *env;
    mtt_backend backend;
    void *context;
    mtt_schedule *schedule;
    mtt_optim_desc optim;
    void *arena;
    float *staging;     /* MTT__STAGING floats, then as many 16-bit values */
    int64_t step, micro_batch;
    int opened;         /* 1 = the backend's context exists */
    size_t free_before; /* the device's free bytes before the arena was taken */
};

static double mtt__now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* ---- values in and out ---- */

/* A piece of a tensor on the host, its elements in the staging buffer. */
static mtt_tensor mtt__staged(const mtt_trainer *t, const mtt_tensor *tensor)
{
    mtt_tensor piece = *tensor;
    piece.data = tensor->dtype == MTT_F32 ? t->staging : t->staging + MTT__STAGING;
    return piece;
}

/* Copies floats into a tensor, rounded to its precision. */
static mtt_status mtt__put(mtt_trainer *t, const mtt_tensor *tensor, int64_t first, int64_t count, const float *values)
{
    mtt_tensor piece = mtt__staged(t, tensor);
    size_t size = mtt__dtype_bytes[tensor->dtype];
    mtt_status status = MTT_OK;
    int64_t i, n;
    for (i = 0; i < count && !status; i += n) {
        n = mtt__min(MTT__STAGING, count - i);
        mtt__store(&piece, 0, n, values + i);
        status = t->backend.upload(t->context, (char *)tensor->data + (size_t)(first + i) * size, piece.data, (size_t)n * size);
    }
    return status;
}

static mtt_status mtt__get(mtt_trainer *t, const mtt_tensor *tensor, int64_t first, int64_t count, float *values)
{
    mtt_tensor piece = mtt__staged(t, tensor);
    size_t size = mtt__dtype_bytes[tensor->dtype];
    mtt_status status = MTT_OK;
    int64_t i, n;
    for (i = 0; i < count && !status; i += n) {
        n = mtt__min(MTT__STAGING, count - i);
        status = t->backend.download(t->context, piece.data, (char *)tensor->data + (size_t)(first + i) * size,
                                     (size_t)n * size);
        mtt__load(&piece, 0, n, values + i);
    }
    return status;
}

/* A part of the compact state on the device, and its copy in the staging buffer: bytes and 16-bit numbers. Of
   a master these are the rest and the weight in use, of moments codes and scales. */
typedef struct mtt__compact {
    uint8_t *bytes, *bytes_at;
    uint16_t *halves, *halves_at;
    size_t count, half_bytes;
    int fp16;
} mtt__compact;

static mtt__compact mtt__compact_at(const mtt_trainer *t, const mtt__parameter *q, int kind, int64_t at, int64_t count)
{
    const mtt_tensor *kept = t->schedule->programs[MTT__TRAIN].kept[kind];
    int master = kind == MTT__MASTER;
    mtt__compact c;
    c.halves = (uint16_t *)(void *)t->staging;
    c.bytes = (uint8_t *)(c.halves + MTT__STAGING);
    c.bytes_at = mtt__codes(kept, q->first + at);
    c.halves_at = master ? (uint16_t *)q->weight->data + at : mtt__scales(kept, q->first + at);
    c.count = (size_t)count;
    c.half_bytes = sizeof(uint16_t) * (size_t)(master ? count : mtt__ceil_div(count, MTT__GROUP));
    c.fp16 = q->weight->dtype == MTT_F16_BITS;
    return c;
}

static mtt_status mtt__get_compact(mtt_trainer *t, const mtt__parameter *q, int kind, int64_t at, int64_t count, float *to)
{
    mtt_status status = MTT_OK;
    int64_t i, n;
    for (i = 0; i < count && !status; i += n) {
        mtt__compact c;
        n = mtt__min(MTT__STAGING, count - i);
        c = mtt__compact_at(t, q, kind, at + i, n);
        status = t->backend.download(t->context, c.bytes, c.bytes_at, c.count);
        if (!status) status = t->backend.download(t->context, c.halves, c.halves_at, c.half_bytes);
        if (kind == MTT__MASTER) mtt__join_weights(c.halves, c.bytes, n, c.fp16, to + i);
        else mtt__unpack_moments(c.bytes, c.halves, n, kind == MTT__SECOND, to + i);
    }
    return status;
}

static mtt_status mtt__put_compact(mtt_trainer *t, const mtt__parameter *q, int kind, int64_t at, int64_t count,
                                   const float *from)
{
    mtt_status status = MTT_OK;
    int64_t i, n;
    for (i = 0; i < count && !status; i += n) {
        mtt__compact c;
        n = mtt__min(MTT__STAGING, count - i);
        c = mtt__compact_at(t, q, kind, at + i, n);
        if (kind == MTT__MASTER) mtt__split_weights(from + i, n, c.fp16, NULL, c.halves, c.bytes);
        else mtt__pack_moments(from + i, n, kind == MTT__SECOND, NULL, c.bytes, c.halves);
        status = t->backend.upload(t->context, c.bytes_at, c.bytes, c.count);
        if (!status) status = t->backend.upload(t->context, c.halves_at, c.halves, c.half_bytes);
    }
    return status;
}

/* FP32 values that the optimizer keeps of a parameter, elements `at` up. `at` is a multiple of MTT__GROUP.
   Without a master the weight itself is kept. */
static mtt_status mtt__get_kept(mtt_trainer *t, const mtt__parameter *q, int kind, int64_t at, int64_t count, float *values)
{
    const mtt_tensor *kept = t->schedule->programs[MTT__TRAIN].kept[kind];
    if (!kept) return mtt__get(t, q->weight, at, count, values);
    if (kept->dtype == MTT_U8) return mtt__get_compact(t, q, kind, at, count, values);
    return t->backend.download(t->context, values, (const float *)kept->data + q->first + at, (size_t)count * sizeof(float));
}

/* A weight in use is its master rounded. */
static mtt_status mtt__put_kept(mtt_trainer *t, const mtt__parameter *q, int kind, int64_t at, int64_t count,
                                const float *values)
{
    const mtt_tensor *kept = t->schedule->programs[MTT__TRAIN].kept[kind];
    mtt_status status;
    if (!kept) return mtt__put(t, q->weight, at, count, values);
    if (kept->dtype == MTT_U8) return mtt__put_compact(t, q, kind, at, count, values);
    status = mtt__put(t, kept, q->first + at, count, values);
    return status || kind != MTT__MASTER ? status : mtt__put(t, q->weight, at, count, values);
}

/* ---- initial state ---- */

/* Initial values, as GPT-2's: N(0, 0.02), for projections into the residual stream over sqrt(2 * layers). */
static void mtt__initial_values(const mtt_trainer *t, int parameter, int64_t first, int64_t count, float *out)
{
    int init = mtt__parameter_row[t->schedule->programs[MTT__TRAIN].parameters[parameter].kind].init;
    uint64_t stream = mtt__stream(MTT__SITE_INIT, 0, (uint64_t)parameter);
    float deviation = 0.02f;
    int64_t i;
    if (init == MTT__NORMAL_RESIDUAL) deviation /= sqrtf(2.0f * (float)t->schedule->model.layers);
    MTT__OMP(omp parallel for schedule(static) if (count > MTT__ALONE))
    for (i = 0; i < count; i++) {
        if (init == MTT__ZEROS) out[i] = 0.0f;
        else if (init == MTT__ONES) out[i] = 1.0f;
        else out[i] = deviation * mtt__random_normal(t->optim.seed, stream, first + i);
    }
}

/* pe[t][2i] = 0.02 sin(t / 10000^(2i / C)), pe[t][2i + 1] = 0.02 cos of the same (Vaswani et al. 2017). They
   scale the embedding up to the sines; this scales the sines down to the embedding. Unscaled, positions drown
   the words: a small model stays at a perplexity of 1100 where it reaches 363 with the factor. */
static mtt_status mtt__fill_positions(mtt_trainer *t, const mtt_tensor *table)
{
    int64_t T = table->shape[0], C = table->shape[1], row, i;
    float *values = (float *)mtt__alloc(t->env, (size_t)C, sizeof(float));
    mtt_status status = values ? MTT_OK : MTT_E_MEMORY;
    for (row = 0; row < T && !status; row++) {
        for (i = 0; i < C; i++) {
            double angle = (double)row * pow(10000.0, -(double)(i / 2 * 2) / (double)C);
            values[i] = (float)(0.02 * (i % 2 ? cos(angle) : sin(angle)));
        }
        status = mtt__put(t, table, row * C, C, values);
    }
    mtt__free(t->env, values);
    return status;
}

/* The device's work list for the update: see mtt_range. */
static mtt_status mtt__fill_ranges(mtt_trainer *t)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    mtt_range *all = (mtt_range *)mtt__alloc(t->env, p->ranges->bytes, 1), *r = all;
    mtt_status status = all ? MTT_OK : MTT_E_MEMORY;
    int32_t block = 0;
    int i;
    for (i = 0; i < p->parameter_count && all; i++) {
        const mtt__parameter *q = &p->parameters[i];
        int64_t count = mtt__elements(q->weight), begin;
        for (begin = 0; begin < count; begin += MTT__RANGE, r++) {
            r->gradient = q->gradient->data;
            r->weight = q->weight->data;
            r->first = q->first;
            r->begin = begin;
            r->count = (int32_t)mtt__min(MTT__RANGE, count - begin);
            r->block = block;
            r->parameter = i;
            r->decays = q->weight->rank > 1;
            r->gradient_dtype = (uint8_t)q->gradient->dtype;
            block += (int32_t)mtt__ceil_div(r->count, MTT__RANGE_BLOCK);
        }
    }
    if (all) status = t->backend.upload(t->context, p->ranges->data, all, p->ranges->bytes);
    mtt__free(t->env, all);
    return status;
}

static mtt_status mtt__fill_zeros(mtt_trainer *t, const mtt_tensor *tensor)
{
    size_t at, n, most = MTT__STAGING * sizeof(float);
    mtt_status status = MTT_OK;
    memset(t->staging, 0, most);
    for (at = 0; at < tensor->bytes && !status; at += n) {
        n = tensor->bytes - at < most ? tensor->bytes - at : most;
        status = t->backend.upload(t->context, (char *)tensor->data + at, t->staging, n);
    }
    return status;
}

static mtt_status mtt__fill_state(mtt_trainer *t)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    float *values = (float *)mtt__alloc(t->env, MTT__STAGING, sizeof(float));
    mtt_status status = values ? MTT_OK : MTT_E_MEMORY;
    mtt_counters counters;
    int i;
    for (i = 0; i < p->tensor_count && !status; i++)
        if (p->tensors[i]->persistent && p->tensors[i] != p->workspace) status = mtt__fill_zeros(t, p->tensors[i]);
    for (i = 0; i < p->parameter_count && !status; i++) {
        int64_t count = mtt__parameter_elements(&p->parameters[i]), at, n;
        for (at = 0; at < count && !status; at += n) {
            n = mtt__min(MTT__STAGING, count - at);
            mtt__initial_values(t, i, at, n, values);
            status = mtt__put_kept(t, &p->parameters[i], MTT__MASTER, at, n, values);
        }
    }
    mtt__free(t->env, values);
    if (!status && p->positions->category == MTT_DATA) status = mtt__fill_positions(t, p->positions);
    if (!status && p->ranges) status = mtt__fill_ranges(t);
    memset(&counters, 0, sizeof(counters));
    counters.loss_scale = mtt__precisions[t->schedule->policy.precision].scaled ? t->optim.loss_scale : 1.0f;
    counters.step_scale = counters.loss_scale;
    if (!status) status = t->backend.upload(t->context, p->counters->data, &counters, sizeof(counters));
    return status;
}

/* ---- memory ---- */

#ifndef MTT_SEPARATE_ALLOCS
/* The arena did not fit: says what takes most, and which batch would fit. */
static mtt_status mtt__refuse_memory(mtt_trainer *t, const mtt_policy *policy, size_t free_bytes)
{
    const mtt_schedule *s = t->schedule;
    const mtt__program *p = &s->programs[MTT__TRAIN];
    const mtt_tensor *most[3] = {NULL, NULL, NULL}, *tensor;
    char reason[512];
    mtt__text text;
    int i, k, batch = 0;
    mtt__text_init(&text, reason, sizeof(reason));
    mtt__print(&text, "%.300s; the largest tensors:", t->env ? t->env->error : "");
    for (i = 0; i < p->tensor_count; i++)
        for (k = 0, tensor = p->tensors[i]; k < 3 && tensor; k++)
            if (!most[k] || tensor->bytes > most[k]->bytes) {
                const mtt_tensor *smaller = most[k];
                most[k] = tensor;
                tensor = smaller;
            }
    for (k = 0; k < 3 && most[k]; k++)
        mtt__print(&text, "%s %s (%s) %.1f MiB", k ? "," : "", most[k]->name, mtt_category_name(most[k]->category),
                   (double)most[k]->bytes / 1048576);
    mtt_plan_max_batch(t->env, &s->model, policy, p->shape.seq_len, free_bytes, &batch);
    return mtt__fail(t->env, MTT_E_BUDGET, "%s; the largest batch that fits is %d of sequences of %d tokens: lower batch or "
                     "seq_len, recompute more, or use the chunked loss", reason, batch, p->shape.seq_len);
}
#endif

/* Gives every tensor its address: in the arena, or under MTT_SEPARATE_ALLOCS in a block of its own, where a
   sanitizer sees overruns. The programs share the state. */
static mtt_status mtt__bind(mtt_trainer *t, const mtt_policy *policy)
{
    mtt_schedule *s = t->schedule;
    int which, i;
    size_t all_bytes;
    mtt_status status = t->backend.memory(t->context, &t->free_before, &all_bytes);
    if (status) return status;
#ifndef MTT_SEPARATE_ALLOCS
    status = t->backend.alloc(t->context, mtt__arena_bytes(s), &t->arena);
    if (status == MTT_E_BUDGET) return mtt__refuse_memory(t, policy, t->free_before);
    if (status) return status;
#endif
    for (which = 0; which < MTT__PROGRAMS; which++)
        for (i = 0; i < s->programs[which].tensor_count; i++) {
            mtt_tensor *tensor = s->programs[which].tensors[i];
#ifndef MTT_SEPARATE_ALLOCS
            tensor->data = (char *)t->arena + tensor->offset;
#else
            if (tensor->persistent && which > 0) tensor->data = s->programs[0].tensors[i]->data;
            else status = t->backend.alloc(t->context, tensor->bytes ? tensor->bytes : 1, &tensor->data);
            if (status) return status;
            (void)policy;
#endif
        }
    return MTT_OK;
}

static void mtt__unbind(mtt_trainer *t)
{
#ifndef MTT_SEPARATE_ALLOCS
    if (t->arena) t->backend.release(t->context, t->arena);
#else
    int which, i;
    for (which = 0; t->schedule && which < MTT__PROGRAMS; which++)
        for (i = 0; i < t->schedule->programs[which].tensor_count; i++) {
            mtt_tensor *tensor = t->schedule->programs[which].tensors[i];
            if (tensor->data && (which == 0 || !tensor->persistent)) t->backend.release(t->context, tensor->data);
        }
#endif
}

MTTDEF void mtt_trainer_destroy(mtt_trainer *t)
{
    if (!t) return;
    if (t->opened) {
        mtt__unbind(t);
        t->backend.close(t->context);
    }
    mtt_schedule_destroy(t->schedule);
    mtt__free(t->env, t->staging);
    mtt__free(t->env, t);
}

MTTDEF mtt_status mtt_trainer_create(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                     const mtt_optim_desc *optim, const mtt_backend *backend, int batch, int seq_len,
                                     mtt_trainer **out)
{
    mtt_trainer *t = (mtt_trainer *)mtt__alloc(env, 1, sizeof(*t));
    mtt_policy p = *policy;
    mtt_status status;
    *out = NULL;
    if (!t) return MTT_E_MEMORY;
    t->env = env;
    t->backend = *backend;
    p.device = backend->device;
    status = mtt_optim_resolve(env, optim, &t->optim);
    if (!status) status = mtt_schedule_create(env, model, &p, batch, seq_len, &t->schedule);
    if (!status) {
        t->staging = (float *)mtt__alloc(env, MTT__STAGING, sizeof(float) + sizeof(uint16_t));
        status = t->staging ? backend->open(env, backend, &t->schedule->policy, &t->context) : MTT_E_MEMORY;
    }
    t->opened = !status;
    if (!status) status = mtt__bind(t, &p);
    if (!status) status = mtt__fill_state(t);
    if (!status) *out = t;
    else mtt_trainer_destroy(t);
    return status;
}

/* ---- steps ---- */

/* Refuses ids outside the vocabulary, which would read and write outside the embedding. */
static mtt_status mtt__check_ids(const mtt_trainer *t, const int32_t *ids, int64_t count, int32_t low, const char *what)
{
    int64_t i;
    for (i = 0; i < count; i++)
        if (ids[i] < low || ids[i] >= t->schedule->model.vocab)
            return mtt__fail(t->env, MTT_E_ARGUMENT, "%s %lld is %d, but the vocabulary has ids 0 to %d: was the text encoded "
                             "with another tokenizer?", what, (long long)i, (int)ids[i], t->schedule->model.vocab - 1);
    return MTT_OK;
}

static int64_t mtt__count_targets(const int32_t *targets, int64_t count)
{
    int64_t i, counted = 0;
    for (i = 0; i < count; i++) counted += targets[i] >= 0;
    return counted;
}

/* Sends what an execution of a program reads besides state. Targets may be NULL; `counted` are those of the
   whole step. */
static mtt_status mtt__send(mtt_trainer *t, const mtt__program *p, const int32_t *tokens, const int32_t *targets,
                            int64_t counted, int row)
{
    const mtt_optim_desc *o = &t->optim;
    size_t bytes = (size_t)p->shape.rows * sizeof(int32_t);
    mtt_control control;
    mtt_status status;
    memset(&control, 0, sizeof(control));
    control.seed = o->seed;
    control.micro_batch = (uint64_t)t->micro_batch;
    control.lr = mtt_learning_rate(o, t->step);
    control.beta1 = o->beta1;
    control.beta2 = o->beta2;
    control.eps = o->eps;
    control.weight_decay = o->weight_decay;
    control.clip = o->clip;
    control.targets = counted;
    control.scaling = mtt__precisions[t->schedule->policy.precision].scaled;
    control.row = row;
    status = t->backend.upload(t->context, p->tokens->data, tokens, bytes);
    if (!status && targets) status = t->backend.upload(t->context, p->targets->data, targets, bytes);
    if (!status) status = t->backend.upload(t->context, p->control->data, &control, sizeof(control));
    return status;
}

/* Runs a program's forward and backward pass over micro-batches. */
static mtt_status mtt__run_micro_batches(mtt_trainer *t, const mtt__program *p, const int32_t *tokens, const int32_t *targets,
                                         int micro_batches, int training)
{
    int64_t rows = p->shape.rows, counted;
    mtt_status status = mtt__check_ids(t, tokens, rows * micro_batches, 0, "token");
    int i;
    if (!status) status = mtt__check_ids(t, targets, rows * micro_batches, -1, "target");
    if (status) return status;
    counted = mtt__count_targets(targets, rows * micro_batches);
    for (i = 0; i < micro_batches && !status; i++) {
        status = mtt__send(t, p, tokens + i * rows, targets + i * rows, counted, 0);
        if (!status) status = t->backend.run(t->context, i ? p->later_ops : p->ops, p->step_begin);
        if (!status) t->micro_batch += training;
    }
    return status;
}

/* Waits for what was run and reads the counters into `info`. The device's count of steps is the true one: it
   stops at a failure, which the host may learn some steps later. */
static mtt_status mtt__receive(mtt_trainer *t, const mtt__program *p, mtt_counters *counters, mtt_step_info *info)
{
    mtt_status status = t->backend.download(t->context, counters, p->counters->data, sizeof(*counters));
    if (status) return status;
    info->step = t->step = counters->steps;
    info->targets = counters->targets;
    info->hits = counters->hits;
    info->loss = counters->targets ? counters->loss / (double)counters->targets : 0.0;
    info->arena_bytes = mtt__arena_bytes(t->schedule);
    return MTT_OK;
}

/* A loss or gradient that is not finite stops the device's updates until the caller knows. */
static mtt_status mtt__numbers_failed(mtt_trainer *t, const mtt__program *p, mtt_counters *counters, double loss)
{
    mtt_status status;
    counters->steps -= counters->skipped == 1; /* FP16 took it for an overflow, but a smaller scale does not help */
    counters->skipped = 0;
    t->step = counters->steps;
    status = t->backend.upload(t->context, p->counters->data, counters, sizeof(*counters));
    if (status) return status;
    return mtt__fail(t->env, MTT_E_NUMBERS, "after step %lld the loss is %g and the gradient's norm %g; the weights are as "
                     "before: lower lr, lengthen the warmup, or check the data", (long long)t->step, loss,
                     counters->grad_norm);
}

MTTDEF mtt_status mtt_train_step(mtt_trainer *t, const int32_t *tokens, const int32_t *targets, mtt_step_info *info)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    double start = mtt__now_ms();
    mtt_counters counters;
    mtt_status status = mtt__run_micro_batches(t, p, tokens, targets, t->schedule->policy.accumulate, 1);
    if (!status) status = t->backend.run(t->context, p->ops + p->step_begin, p->op_count - p->step_begin);
    if (status) return status;
    t->step++;
    if (!info) return MTT_OK;
    memset(info, 0, sizeof(*info));
    info->lr = mtt_learning_rate(&t->optim, t->step - 1);
    status = mtt__receive(t, p, &counters, info);
    if (status) return status;
    info->loss_scale = counters.step_scale;
    info->grad_norm = (float)counters.grad_norm;
    info->skipped = counters.skipped != 0;
    info->ms = mtt__now_ms() - start;
    if (counters.skipped == 2 || !(fabs(info->loss) < 1e30)) return mtt__numbers_failed(t, p, &counters, info->loss);
    return MTT_OK;
}

MTTDEF mtt_status mtt_evaluate(mtt_trainer *t, const int32_t *tokens, const int32_t *targets, mtt_step_info *info)
{
    const mtt__program *p = &t->schedule->programs[MTT__EVALUATE];
    double start = mtt__now_ms();
    mtt_counters counters;
    mtt_step_info discarded;
    mtt_status status = mtt__run_micro_batches(t, p, tokens, targets, t->schedule->split, 0);
    if (status) return status;
    if (!info) info = &discarded;
    memset(info, 0, sizeof(*info));
    status = mtt__receive(t, p, &counters, info);
    if (status) return status;
    info->loss_scale = counters.loss_scale;
    info->ms = mtt__now_ms() - start;
    return MTT_OK;
}

MTTDEF mtt_status mtt_next_logits(mtt_trainer *t, const int32_t *tokens, int count, float *logits)
{
    const mtt__program *p = &t->schedule->programs[MTT__NEXT];
    int seen = (int)mtt__min(count, p->shape.seq_len);
    int32_t *padded;
    mtt_status status;
    if (count < 1) return mtt__fail(t->env, MTT_E_ARGUMENT, "count is %d: the next token needs at least one before it", count);
    status = mtt__check_ids(t, tokens, count, 0, "token");
    if (status) return status;
    padded = (int32_t *)mtt__alloc(t->env, (size_t)p->shape.seq_len, sizeof(*padded));
    if (!padded) return MTT_E_MEMORY;
    memcpy(padded, tokens + count - seen, (size_t)seen * sizeof(*padded));
    status = mtt__send(t, p, padded, NULL, 0, seen - 1);
    mtt__free(t->env, padded);
    if (!status) status = t->backend.run(t->context, p->ops, p->op_count);
    if (!status) status = mtt__get(t, p->output, 0, t->schedule->model.vocab, logits);
    return status;
}

/* ---- a trainer's properties and parameters ---- */

MTTDEF int64_t mtt_trainer_step(const mtt_trainer *t)
{
    return t->step;
}

MTTDEF size_t mtt_trainer_device_bytes(const mtt_trainer *t)
{
    size_t free_bytes, all_bytes;
    if (t->backend.memory(t->context, &free_bytes, &all_bytes) || !all_bytes) return mtt__arena_bytes(t->schedule);
    return t->free_before > free_bytes ? t->free_before - free_bytes : 0;
}

MTTDEF const mtt_schedule *mtt_trainer_schedule(const mtt_trainer *t)
{
    return t->schedule;
}

MTTDEF const char *mtt_parameter(const mtt_trainer *t, int index, int64_t shape[2])
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    if (index < 0 || index >= p->parameter_count) return NULL;
    shape[0] = p->parameters[index].shape[0];
    shape[1] = p->parameters[index].shape[1];
    return p->parameters[index].weight->name;
}

/* The parameter of that number, or NULL with the error recorded. */
static const mtt__parameter *mtt__parameter_at(const mtt_trainer *t, int index)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    if (index >= 0 && index < p->parameter_count) return &p->parameters[index];
    mtt__fail(t->env, MTT_E_ARGUMENT, "there is no parameter %d: take 0 to %d", index, p->parameter_count - 1);
    return NULL;
}

MTTDEF mtt_status mtt_parameter_get(mtt_trainer *t, int index, float *values)
{
    const mtt__parameter *q = mtt__parameter_at(t, index);
    return q ? mtt__get_kept(t, q, MTT__MASTER, 0, mtt__parameter_elements(q), values) : MTT_E_ARGUMENT;
}

MTTDEF mtt_status mtt_parameter_set(mtt_trainer *t, int index, const float *values)
{
    const mtt__parameter *q = mtt__parameter_at(t, index);
    return q ? mtt__put_kept(t, q, MTT__MASTER, 0, mtt__parameter_elements(q), values) : MTT_E_ARGUMENT;
}

MTTDEF mtt_status mtt_gradient_get(mtt_trainer *t, int index, float *values)
{
    const mtt__parameter *q = mtt__parameter_at(t, index);
    mtt_counters counters;
    int64_t i, count;
    mtt_status status;
    if (!q) return MTT_E_ARGUMENT;
    if (!q->gradient->persistent)
        return mtt__fail(t->env, MTT_E_ARGUMENT, "gradients share their memory with activations: set accumulate above 1 to "
                         "keep them");
    count = mtt__parameter_elements(q);
    status = t->backend.download(t->context, &counters, t->schedule->programs[MTT__TRAIN].counters->data, sizeof(counters));
    if (!status) status = mtt__get(t, q->gradient, 0, count, values);
    for (i = 0; i < count && !status; i++) values[i] /= counters.step_scale;
    return status;
}

/* ------------------------------------------------------------------------------------------------------------------
   >>tokenizer
   ---------------------------------------------------------------------------------------------------------------- */

/* The classes that GPT-2's pre-tokenizer tells apart, as runs over the code points from 0 up: length * 4 + class. */
enum { MTT__OTHER, MTT__LETTER, MTT__NUMBER, MTT__SPACE };

/* tools/make_unicode.py writes GPT-2's from here */
/* Unicode 18.0.0 by Python's regex 2026.11.15: 158,172 of \p{L}, 2,247 of \p{N}, 25 of \s. */
enum { MTT__UNICODE_END = 0x3fc40 }; /* code points from here up are of class other */
static const uint16_t mtt__unicode_runs[] = {
36,23,72,7,60,42,28,105,24,105,40,7,104,7,36,5,28,10,4,5,12,6,5,4,14,4,93,4,125,4,1833,16,49,56,21,28,5,4,5,516,21,4,9,
8,17,4,5,24,5,4,13,4,5,4,81,4,333,4,557,32,665,4,153,4,9,24,165,8,9,268,109,16,17,180,173,84,42,16,9,4,397,4,5,60,9,28,
9,42,13,8,5,64,5,4,121,116,357,44,5,56,42,133,36,9,16,5,20,89,16,5,36,5,12,5,92,101,28,45,20,97,4,29,64,169,232,217,12,
5,72,5,28,41,16,42,4,65,16,33,8,9,8,89,4,29,4,5,12,17,12,5,64,5,52,9,4,13,16,42,9,8,26,8,5,32,25,16,9,8,89,4,29,4,9,4,9,
4,9,124,17,4,5,28,42,8,13,64,37,4,13,4,89,4,29,4,9,4,21,12,5,72,5,60,9,16,42,36,5,44,33,8,9,8,89,4,29,4,9,4,21,12,5,120,
9,4,13,16,42,4,5,26,44,5,4,25,12,13,4,17,12,9,4,5,4,9,12,9,12,13,12,49,88,5,84,54,72,33,4,13,4,93,4,65,12,5,104,13,4,9,
8,9,16,42,32,30,4,5,16,33,4,13,4,93,4,41,4,21,12,5,120,13,4,9,16,42,4,9,68,37,4,13,4,165,8,5,64,5,20,13,4,30,13,16,78,4,
25,20,73,12,97,4,37,4,5,8,29,124,42,68,193,4,9,48,29,36,42,156,9,4,5,4,21,4,97,4,5,4,41,4,9,36,5,8,21,4,5,36,42,8,17,
128,5,124,82,48,33,4,145,108,21,460,173,80,5,42,24,25,16,17,12,5,12,9,28,13,16,53,48,5,4,42,24,153,4,5,20,5,8,173,4,
1333,4,17,8,29,4,5,4,17,8,165,4,17,8,133,4,17,8,29,4,5,4,17,8,61,4,229,4,17,8,269,56,82,12,65,64,345,8,25,12,2481,8,69,
7,105,20,301,12,14,33,28,73,52,77,56,73,56,53,4,13,60,209,140,5,16,5,12,42,24,42,88,42,24,357,28,21,8,137,4,5,20,281,40,
125,156,42,121,8,21,44,177,16,105,24,46,148,93,36,213,172,42,24,42,52,5,372,189,68,33,12,42,164,121,52,9,42,177,104,145,
112,42,12,13,42,145,8,45,20,173,8,13,164,17,4,25,4,9,12,5,20,769,256,1113,8,25,8,153,8,25,8,33,4,5,4,5,4,5,4,125,8,213,
4,29,4,5,12,13,4,29,12,17,8,25,16,53,20,13,4,29,12,47,116,11,20,7,188,7,64,6,5,8,26,20,5,42,20,69,392,5,16,5,8,41,4,5,
12,21,24,5,4,5,4,5,4,17,4,45,8,17,20,21,16,5,4,206,9,22,2904,242,312,90,2520,122,4528,917,24,17,12,9,36,6,8,153,4,5,20,
5,8,225,28,5,64,93,36,29,4,29,4,29,4,29,4,29,4,29,4,29,4,29,320,5,1856,7,16,9,6,100,38,28,21,8,14,9,16,345,24,13,4,361,
4,17,20,173,4,377,12,18,40,129,192,65,128,42,120,34,4,62,128,42,156,62,1280,26369,256,65533,23097,268,185,8,1077,12,65,
42,9,80,189,64,125,8,281,42,156,37,8,413,8,333,16,5,56,69,4,13,4,17,4,93,52,26,40,209,56,201,112,42,96,25,12,5,4,9,4,42,
113,40,93,100,117,28,189,112,5,42,24,21,4,41,42,21,4,165,92,13,4,33,16,42,24,93,12,5,12,201,4,5,12,9,8,21,8,5,4,5,96,13,
8,45,28,13,48,25,8,25,8,25,36,29,4,29,4,173,4,57,8,9,8,461,52,42,24,44689,48,93,16,197,33808,1465,8,425,152,29,48,21,20,
5,4,41,4,53,4,21,4,5,4,9,4,9,4,433,132,1453,72,257,8,217,160,49,464,21,4,541,76,42,28,105,24,105,44,357,12,25,8,25,8,25,
8,13,140,49,4,105,4,77,4,9,4,61,8,57,136,493,48,182,48,230,68,10,976,117,12,197,64,110,16,129,18,36,81,6,33,6,20,153,40,
121,8,145,16,33,4,22,168,633,8,42,24,145,16,145,16,161,32,209,48,45,4,61,4,29,4,9,4,45,4,61,4,29,4,9,12,209,48,1245,36,
89,40,33,96,25,4,169,4,57,256,25,8,5,4,177,4,9,12,5,8,93,8,34,93,8,30,125,32,38,192,77,4,9,20,22,89,26,16,105,24,105,
152,225,16,10,9,66,8,186,5,60,17,4,13,4,117,40,38,92,117,10,4,117,14,128,33,4,113,24,22,64,217,40,89,8,34,77,20,34,73,
92,30,320,293,220,205,52,205,28,26,145,48,42,24,42,113,36,93,872,126,4,169,24,9,64,25,68,89,68,117,42,5,32,89,44,18,108,
73,184,85,30,80,93,48,213,104,122,4,9,8,5,52,181,128,101,28,42,36,145,60,42,16,5,8,5,32,141,12,5,48,193,56,17,44,42,5,4,
5,16,82,44,73,4,101,76,9,252,29,4,5,4,17,4,61,4,41,28,189,68,42,44,33,8,9,8,89,4,29,4,9,4,21,12,5,72,5,48,21,120,41,4,5,
8,5,4,153,4,5,100,5,4,5,176,213,72,17,20,42,20,13,120,193,80,9,4,5,32,42,664,189,164,17,144,193,80,5,44,42,152,173,52,5,
28,42,24,82,112,109,84,50,16,29,740,177,464,257,78,48,33,8,5,8,33,4,9,4,97,60,5,4,5,56,42,280,33,8,157,64,5,4,5,112,5,
40,161,28,5,84,5,44,185,76,5,72,293,68,5,724,133,60,42,24,37,4,149,68,5,60,118,20,121,448,29,4,9,4,153,84,5,36,42,24,25,
4,9,4,129,56,5,28,42,24,177,16,42,28,5,952,77,60,5,4,53,4,137,112,42,344,5,60,86,172,3689,408,450,20,46,785,48,1246,
9252,389,60,4289,68,25,100,15981,20,2333,27364,121,72,42,6936,2277,28,125,4,42,24,317,4,42,24,121,72,193,64,17,48,42,4,
30,4,85,20,77,1728,181,12,42,792,257,94,36,101,8,101,176,301,20,5,264,53,256,9,4,5,56,9,14,36,29549,144,137,380,461,52,
3657,56,205,30836,17,4,29,4,9,4,1189,36,5,116,13,8,5,56,21,28,1585,9232,429,20,53,12,37,28,41,16728,42,5912,82,48,82,
432,102,540,341,4,285,4,9,8,5,8,9,8,17,4,49,4,5,4,29,4,261,4,17,8,33,4,29,4,113,4,17,4,21,4,5,12,29,4,1365,4,101,4,101,
4,125,4,101,4,125,4,101,4,125,4,101,4,125,4,101,4,33,8,202,7168,521,56,29,216,205,192,249,584,181,40,29,8,42,16,5,1284,
121,72,177,16,42,1880,113,16,42,856,121,8,5,42,788,125,4,13,4,9,4,29,8,21,36,9,896,29,4,17,4,9,4,61,4,789,8,38,192,273,
28,5,16,42,3164,238,4,14,4,18,304,182,4,62,776,17,4,109,4,9,4,5,8,5,4,41,4,17,4,5,4,5,24,5,16,5,4,5,4,5,4,13,4,9,4,5,8,
5,4,5,4,5,4,5,4,5,4,9,4,5,8,17,4,29,4,17,4,17,4,5,4,41,4,69,20,13,4,21,4,69,2320,54,11148,42,4120,65533,65533,39817,128,
17533,4,23097,8,29893,60,2489,9864,2169,6024,19757,20,33961,65532,65532,28192,45313,
};
/* to here */

#define MTT__NONE UINT32_MAX
#define MTT__END_OF_TEXT "<|endoftext|>"
enum {
    MTT__ALPHABET_END = 0x144, /* GPT-2's printable alphabet for the 256 bytes lies below this code point */
    MTT__GPT2_MERGES = 50000,
    MTT__WORD_CACHE_BITS = 16, /* the cache holds 2^16 words of 128 bytes: 8 MiB */
    MTT__WORD_BYTES = 42,      /* longest pre-token that is cached, and merged by the quadratic loop, the faster for short ones */
    MTT__WORD_IDS = 21
};

/* Multiplicative hash of a byte string, whose upper bits are the good ones. The last load overlaps the one before. */
static uint64_t mtt__hash(const char *at, size_t size)
{
    const uint64_t k = 0x9e3779b97f4a7c15u;
    uint64_t h = size * k, x = 0;
    const char *end = at + size;
    for (; end - at > 8; at += 8) {
        memcpy(&x, at, 8);
        h = (h ^ x) * k;
        h ^= h >> 32;
    }
    if (size >= 8) memcpy(&x, end - 8, 8);
    else
        for (; at < end; at++) x = x << 8 | (unsigned char)*at;
    h = (h ^ x) * k;
    return (h ^ h >> 32) * k;
}

/* A map from 64-bit keys to numbers by open addressing, at most half full. */
typedef struct mtt__cell {
    uint64_t key;
    uint32_t value; /* MTT__NONE in an empty slot */
} mtt__cell;

typedef struct mtt__table {
    mtt__cell *cells;
    size_t count, mask;
} mtt__table;

/* The slot that holds the key, or the empty one where it belongs. */
MTT__INLINE mtt__cell *mtt__table_find(const mtt__table *table, uint64_t key)
{
    uint64_t hash = key * 0x9e3779b97f4a7c15u;
    size_t i = (size_t)(hash >> 32 ^ hash >> 51) & table->mask;
    while (table->cells[i].value != MTT__NONE && table->cells[i].key != key) i = (i + 1) & table->mask;
    return &table->cells[i];
}

/* Makes room for one more key; the first call makes the table. */
static mtt_status mtt__table_grow(mtt_env *env, mtt__table *table)
{
    mtt__table old = *table;
    size_t i, size = old.cells ? (old.mask + 1) * 2 : 1024;
    if (old.cells && old.count * 2 <= old.mask) return MTT_OK;
    table->cells = (mtt__cell *)mtt__alloc(env, size, sizeof(*old.cells));
    if (!table->cells) return *table = old, MTT_E_MEMORY;
    table->mask = size - 1;
    for (i = 0; i < size; i++) table->cells[i].value = MTT__NONE;
    for (i = 0; i * 2 < size && old.cells; i++)
        if (old.cells[i].value != MTT__NONE) *mtt__table_find(table, old.cells[i].key) = old.cells[i];
    mtt__free(env, old.cells);
    return MTT_OK;
}

static mtt_status mtt__table_put(mtt_env *env, mtt__table *table, uint64_t key, uint32_t value)
{
    mtt__cell *cell;
    if (mtt__table_grow(env, table) != MTT_OK) return MTT_E_MEMORY;
    cell = mtt__table_find(table, key);
    table->count += cell->value == MTT__NONE;
    cell->key = key;
    cell->value = value;
    return MTT_OK;
}

/* Distinct byte strings, numbered as they come: the words of a text with their counts, the pieces of a vocabulary. */
typedef struct mtt__string {
    size_t at, size;
    uint64_t count;
} mtt__string;

typedef struct mtt__strings {
    mtt_env *env;
    char *bytes;
    mtt__string *items;
    mtt__table table; /* keyed by hash */
    size_t bytes_size, bytes_capacity, count, capacity;
} mtt__strings;

static void mtt__strings_free(mtt__strings *s)
{
    mtt__free(s->env, s->bytes);
    mtt__free(s->env, s->items);
    mtt__free(s->env, s->table.cells);
}

/* The number of a string or MTT__NONE, and the key under which it stands or belongs: its hash, or, where others have that,
   the next one. The table has to be made. */
static uint32_t mtt__strings_find(const mtt__strings *s, const char *at, size_t size, uint64_t *key)
{
    for (*key = mtt__hash(at, size);; ++*key) {
        uint32_t i = mtt__table_find(&s->table, *key)->value;
        if (i == MTT__NONE || (s->items[i].size == size && (!size || memcmp(s->bytes + s->items[i].at, at, size) == 0))) return i;
    }
}

/* Finds or appends; a string is new when *index is the count from before. `at` may be the unused end of s->bytes. */
static mtt_status mtt__strings_add(mtt__strings *s, const char *at, size_t size, uint32_t *index)
{
    uint64_t key;
    mtt__string *item;
    if (mtt__table_grow(s->env, &s->table) != MTT_OK) return MTT_E_MEMORY;
    *index = mtt__strings_find(s, at, size, &key);
    if (*index != MTT__NONE) return MTT_OK;
    if (s->count >= INT32_MAX)
        return mtt__fail(s->env, MTT_E_MEMORY, "more than 2^31 distinct words: use a smaller sample of the text");
    if (mtt__reserve(s->env, (void **)&s->bytes, &s->bytes_capacity, mtt__add(s->bytes_size, size), 1) != MTT_OK ||
        mtt__reserve(s->env, (void **)&s->items, &s->capacity, s->count + 1, sizeof(*s->items)) != MTT_OK)
        return MTT_E_MEMORY;
    if (size) memmove(s->bytes + s->bytes_size, at, size);
    item = &s->items[s->count];
    item->at = s->bytes_size;
    item->size = size;
    item->count = 0;
    s->bytes_size += size;
    *index = (uint32_t)s->count++;
    return mtt__table_put(s->env, &s->table, key, *index);
}

MTT__INLINE uint64_t mtt__pair_key(uint32_t left, uint32_t right)
{
    return (uint64_t)left << 32 | right;
}

/* ---- pre-tokens */

/* Two bits for each code point below MTT__UNICODE_END. */
static unsigned char *mtt__classes_create(mtt_env *env)
{
    unsigned char *classes = (unsigned char *)mtt__alloc(env, MTT__UNICODE_END / 4 + 1, 1);
    size_t run, c = 0, end;
    if (!classes) return NULL;
    for (run = 0; run < MTT__LENGTH(mtt__unicode_runs); run++)
        for (end = c + mtt__unicode_runs[run] / 4; c < end; c++)
            classes[c / 4] = (unsigned char)(classes[c / 4] | (mtt__unicode_runs[run] & 3) << c % 4 * 2);
    return classes;
}

/* The code point of a UTF-8 sequence of two bytes or more, MTT__NONE if it is malformed: overlong, a surrogate, cut. */
static uint32_t mtt__utf8_get(const unsigned char *at, const unsigned char *end, int *size)
{
    uint32_t c = at[0];
    int i, n = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : 2;
    if (c < 0xc2 || c > 0xf4 || end - at < n) return MTT__NONE;
    c &= 0x7fu >> n;
    for (i = 1; i < n; i++) {
        if ((at[i] & 0xc0) != 0x80) return MTT__NONE;
        c = c << 6 | (at[i] & 0x3fu);
    }
    if (c < (n == 4 ? 0x10000u : n == 3 ? 0x800u : 0x80u) || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
        return MTT__NONE;
    *size = n;
    return c;
}

/* The class of the symbol at `at`, and its size. A byte outside well-formed UTF-8 is a symbol of class other. */
MTT__INLINE int mtt__symbol(const unsigned char *classes, const unsigned char *at, const unsigned char *end, int *size)
{
    uint32_t c = at[0];
    *size = 1;
    if (c >= 0x80) c = mtt__utf8_get(at, end, size);
    return c < MTT__UNICODE_END ? classes[c / 4] >> c % 4 * 2 & 3 : MTT__OTHER;
}

/* The length of the first pre-token of a text that is not empty, by GPT-2's expression
   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static size_t mtt__pretoken(const unsigned char *classes, const unsigned char *text, size_t bytes)
{
    const unsigned char *at = text, *end = text + bytes, *last = text;
    int size, kind = mtt__symbol(classes, at, end, &size);
    if (*at == '\'' && bytes > 1) {
        int a = at[1], b = bytes > 2 ? at[2] : 0;
        if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
        if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
    }
    if (*at == ' ' && bytes > 1) {
        int next_size, next = mtt__symbol(classes, at + 1, end, &next_size);
        if (next != MTT__SPACE) {
            kind = next;
            size = 1 + next_size;
        }
    }
    for (at += size; at < end && mtt__symbol(classes, at, end, &size) == kind; at += size) last = at;
    /* A run of spaces leaves its last symbol to the word that follows, unless it would be left empty itself. */
    return (size_t)((kind == MTT__SPACE && at < end && last > text ? last : at) - text);
}

/* ---- BERT's normaliser */

/* Runs of code points, a string for each kind. Numbers have digits of base 64, five bits each, the lowest first; a sixth bit
   tells that more follow; where they have a sign, it is the last bit. A run is the gap since the one before and a length. A
   case (BY_TWO: of every second code point) adds the way to lower case, a base for each code point its letter without accents,
   less that of the last but one. A pair is a gap and the two that a code point falls into, less itself. A control may also be
   a blank, if it is not dropped; a mark is an accent by itself. */
enum {
    MTT__CONTROL = 1, MTT__CONTROL_BLANK, MTT__BLANK, MTT__PUNCTUATION, MTT__MARK, MTT__CJK,
    MTT__CASE, MTT__CASE_BY_TWO, MTT__BASE, MTT__BASE_OF_CJK, MTT__PAIR
};
/* tools/make_unicode.py writes BERT's from here */
/* As Hugging Face's tokenizers 0.23.3 do it. */
static const char *const mtt__bert_runs[] = {
"AJFS/CGBaNByqBGWBgGBxBB+nEB8/BFaFxBFBKw8vBgoG/vBB5HDBB/lEBi/qBEvmFIm0rYBegDg8/B+//BC+//B",
"LC4DB",
"JCCBSB/DB/uFB/rCLdCFBvBBg9DB",
"hBPKHaGaEiBBFBDBKCDBDB+VBIByOGpBCzBBBBCBCBsBCUCBCNBCCqCEmDBrBOpHD2BPfBlICKB/LBjYB6CBKCoFPBBlBEnCBqCFECvDGrFBkTJ3EBsT"
"CsBCuCDnCC9EDBDlBL5JC4GCgEHBGsFH7EE7BF+BCgCILB8ZYIUBNBMeCOC5TEdC9hBOvCCfKzMW/BEgBC7XEBCwDBvEvBBT+NDEKCMQBMBiDB6CBigd"
"CtIDjDBKBzDG8LE2CCoBDBBxBCvBBhDNQC8DE+DCQC5HByqUCwGKWjBBOBBEBBC1EDBGBEKCDCaDBBbBBBBH6MD8UBwBB+MBnXBnGBfBwIJmBBwDHiCH"
"5CEqlBHtDCBE+DEwBCvCFDBNBBD4CGrDB8QB6HXpDD4HDxpDF5vRClEBhCFIB6qUBnvHF",
"gYwDzIFpItBBBBCBCBBoCLwBVQBlDHCGCCBEjBBeb7CL6BJiBEBJBDBFrBDnEgB3BBBBEIEBDHKCdB6BBEEIBUCdC5BBECECCDDBeCDBLC5BBEFBCEBU"
"CdB6BBCBBEIBIBLCeB9BBMByBB9BDFDBEHCLCdB6BBCBGBFCUCdB/BEIBUCmDBHDBB6CBCHMIiDBCGBCLGqCCbBBBBB3BOBFBCFLBkBJBmDEBGBCCCZC"
"EDQENBCCGBPB/VDydDdDdCeCgCCBHIBCLJBtBD7EB2DDECJBGD7GCCB6BBBHBBBBCIGKCBwBOiCEwBBBFBBFBoBJMCgBECCBD4BBBCDBBD6BICC4EDBN"
"BHEBGBDCmG2BGEwWNEBDM+/CDtEBgDgBqRErDC0udBEKgBCwCCwIBDBEBZC9EBbS0BIZLuBDwBBCECBoBBjCGCCCCMBIBvBBzBBBDCCFCBBqBCIBuHBC"
"BEBw5TBhXQQQteBiHB1EFm0BDBCFEoBDEBlFC6oBB2BP4BDxBECClCDkBFBI+BBMC0BJLDiDDCBBCnFBDIVC6BBDBlBHDF+JGBBECBCuHEGCBCbC1CIC"
"BBCqDBBBCGBBlDDCEBFk+UF7BH4iBEqoTComFDRICHeE0ED79B3BEyBIBOBWFBPgxDHphmYwH",
"ggNguGgCgwUgoWgQgohCg3pBgBgpEgIwsFwqKgR",
"hCagClDWgCDGgCxCBtMnCBxHIBkNEB8MABCBC6MABCCB+EAB0MAB2MABCBB6MAB+MBBmNABiNABCDBmNABqNBBsNGB0NABCBB0NCBCBB0NABCBCyNEB2"
"NABCDBCHBEABCBBEABCBBEmBBEEBhGABvDoBBjIZB2iVABCBBlKABwiVCBCBBlMABqEABuEwJBCIBoHGBsCBDqCBBgEBC+DBQgCDIgCjBBQkBB3DCBCB"
"BNABCCDjIAQgFAgBgCwEBewDmBgDp6ClBgmOIBgmOyWwCg9rCAGQzkCBCGrB/7FCD/7F+OB97OpDIPIGPKIPIIPIGPaIPYIPIIPIIPICPACzEABRLErF"
"ABRLCPACnGMCPAC/GABNLC/HAC7HABRpJB51ODB9rQABrkQGB4BtBQgBTBCyZa0Bw5BwBgDwBBCBBt/UABruHABt+UIB3hVAB5/UAB9hVAB7hVBBCCBC"
"IC9jVyDBCq0eBnglCNBCBBvyyCcBn0yCAB90yCAB10yCABh0yCABn0yCBBjxyCABzyyCABpxyCABg6BQB/CABl0yCABvjlCEBt2yCQBhkzCYBCr5VagC"
"lmBoBwCoEkBwC8EKuCDNuCDFuCDBuCq3BzBgE9EWgC65CgBgCgsVgBgCgCZ2BnyeiBkC",
"2GCgCnBYCDDCCICCXCCDCECCbDCOCCVJCCJCDCCDUCDJCTFChJCCuBCgC0BMCxDRCJbCCHCCwBC28CCgmO4pDrCCLwBC6CEPnoDDCUyBCICCyqeXCTOC"
"nEHCDfCKCCCFCJCCDKCLICECCCIC/sXCuCNCuCFCuC",
"gGGiEiEAAAABJEIEAAIIAABGKMCAAACFMMAAICGYQAAAABJEIEAAIIAABGKMCAAACFMMAAIBRIvDvBAAAAEEAAAAAACCCUCCAAAAAAAAEEAAAAAACCCJ"
"CCAAAAAAADE9BiCCCBGCCAAAAEGEEAAAADGCCAAAACSGGAAAACCAAAAAACCAACXCCAAAAAAAAAAEEEEA9BiCAAAAhBCVVNCMMcQnBnBQQMMMMAAAAAAA"
"ABGnBnBAAqIqICL9H9HIIIIAAwWmiB5UDC1kBFCkBOOZZqIqIkBkBtJtJAAIIAAIIAAMMAAGGAAGGAADDCCCCXXGONNIIUUAAAAAAUUgKBgmBJB7DGGh"
"hBs1BeIguBIBBQBDYUoBZHfnBwBgBMIcZFAAMAUECaSrBCmEmEBBDDBdEDOkBSKBAfBqBWC6BFBBDDBiCEDO7BSXC4DkDpCC7F9DNELLAACCKKCGmMoK"
"jMlKCCCGCCAAMMCM0M2K1L3JTTAAAAIICCIIoJF4f4diCAE5EB8KBBuHQBF1SBumBHB8lBCBWjBI1B5BEMUMUa8DCsHmHBBczCBgJCByIiBD3BhCMCBo"
"BpHB2STCsPpCiLBobGCmbCBBlBvIBmQoLBgoBJBmXEBeEBUEBUMBrB8FB0M04CBq/FBBgxFFBA8V6EnvNntNCCAAAACCCCAAAAAAAACCAAAAAAAACCCC"
"CCAAAAAAAACCAAEEAAAACCAAAAAACCAAAACCAAAAAACCAAAAAACCAAEEAAAAAACCAAAAAAAACCAAAAAACCAAAAAAAACCAACCAAAAAAAACCAACCCCAAAA"
"cLeKBBwQE6CvD7RAAAAAAAAAAAAAAAAAAAAAAIIAAAAAAAAAAAAAAIIAAMMAAAAAAAAAAAAAAAAAAAAAAMMAAAAAAAAAAAAIIAAAAAAGWw1BwzBAAAAA"
"A/B/BAAAAAAoCoCAAAACG/B/BAAAACmBkCkCAAAAAA/B/BAAAAAAkCkCAAAAAA/B/BAAAAAAsCsCAAAACG/B/BAAAACIsCsCAAAAAABB/BBB/BBBABfA"
"oCoCAAAAAA/B/BAAAAAAQQIIEEEEMMMMIIC1BvBvBAAAAAA/B/BAAAAAAsCsCAAAAAA/B/BAAAAAAkDkDAAAAAA/B/BAAAAAAQQAAABHAA/B/BAAABBw"
"CCExuBD+wBABOAAjCjCEEAwiOwiOArgOrgOAACGAA/B/BAABTqmOqmOAxjOxjOAAHHII/B/BAAH5vBxvBvECDiyBy2BABIAAzCzCUUApvBCCylO+0PkJ"
"BxlODCv7Pv2BuDCq0Qi1QSBIeD8DgEE0BB+CEBsDCBQXB2BBB0BaByBCB8BCBSBBKWBvgRBByBKFghRpiR9gRwiRuiRCCccCCIIGCIICCQQCCIIiBE4B"
"iCOGwBE5C7CqBqBGEiCiCEE7BCo1Go1Gx9BB1yCvrBBkEBBg3CBBIBBIBBIBBIBBIBBIBBIBBIBBIBBICBKBBKBBIGCSOBCGGBCGGBCGGBCGGWBpDJBk"
"CNBqGBBgBBBIBBIBBIBBIBBIBBIBBIBBIBBIBBICBKBBKBBIGCSOBCGGBCGGBCGGBCGGWBpDCEoB0EEEDBY+wyBBxxVBB1wVKNgBRAAxBxBACEEEEEBF"
"GGEEEBBGBCIGBCGGBJGGEEEnBxBMmBrqFB8rlEBBurlEOBYvgBB8hC",
"go+BuIwkmCovzBkoBo9Sx/Prpf3uN02oBu7lB1kjB18Gz8Bxoc+mGiyO+4Os9HqjEyrBqtErvPn3RutDmsDo2J44Oo7KvuhB3njBkoOsqPyyNmgW5tUl"
"jX6nUy3MnwR34Ds1S7wRvwQgqHq+Fo2Rr3Rtxfw1B6wJq/L40GohGi/G+xH2lDy+DstIg4GwsDluR1nSoxC0kFo2KsrN7iE/5iBj9Vi4R03Q7/En7Dgm"
"N6iPz+Zppd2zIw3I4vCq1HwyH4xMp2V/7KrP9rXgkUk/Vq9EurM+4Dr6Z73Q+iUx8NtxXy9Ig6L81K/mQ24Bv1Bj1MjbmyG22LslIp7InsS8zR2+Vy6J"
"9oMswC8MjrW6lLkK/3GjvK3/R2xBwxL8xV8+M2+Gg2H59b54e8nD0qFklGkxIq2J+6Sg0Q0uEomC3/lBvgc4tM4pUlwGj9W44B0wBmyG+qGs2CioE22E"
"qqDkzI+nC6P4lH3gftqgBsqBqiPqgak+Mx/UprVkrCy7FmsMu8Dz1W3nOmwGisDqjCw/K6kKw+F69F0pJgrLoxCkS57jBzmPyihB0wOltYjjkBtgIw2G"
"q2F26Em8GqjGgkG8yJ0jNipNn/U91E9/JlrX02Ks8CyqDwsD6rDkmCu7Dm/Pl6V/ib2wiBlgJ91c+7OihZ9lHr+W4oEmkJ+mX71QtnhB4jFogJyuFqpB"
"u5C81F6vEm3F6uJw2E6vEigH5ofviU8NsxB2nQ0iK2gR6lL4/D/rantYilNgwGvsDuc/lEx/FwpMx9QjiE03B9yY4mG4sIgjP70Dv7H+yF6hRw5QkxD+"
"Tz3b1kclxECB0xDBBorICK3nDsrG4uSkhDopByCiDi/O+yBx5LBBo1EBB2zFCCsiFqgDDkCurE+/DyDwrCzkE5vD/ygB/8iB+ZkeuZwIyrBqrB2M0jBg"
"kBoiCs8BgjC0vC0P0Ii8Bg/BkUmqBsuDq5C2ao1BywBorBsmD4xCwLUOcauDiDmLmPgYm3BykB6EyWoc2nBonB4I8dupD+zCifmakd+cmuBgzB6yDu8D"
"wVz4bmr1Gm6QCqDvs6HlmYk0BpjBlCggBkY0XstB2lBH6IisBitB0OiK8RodgnCi7BuJoN+WiagDgEwFoGoNkdwe8I0TkiBicuK+D8lComCwciyB0YuE"
"mV4kBy4DuMvvCqPkc4d0MuRoO6K4L0C+G4EkYi3BovB0c2ZyXmeihBohC0+BuiCk1C6gBqFyTkWYSmDnB2D6J+c86B02BimBogBmuC6mC0NwPyKgD4Du"
"wBi2DwzmGwqkG24Ftq2H575H4pCijpIupuI0oW54+Gp0vHmp/D+QrwoBr1oBI0u5G+Rn34G2FoF+LuJ6GsDxkO226G+qOru6GuBmCw75G7rOp75GotOo"
"+5GUt65G1sBQyuBmjgJgE39/IrxOwDu2OuDiD51OgFo7O6BiDiCYkBmE0DiBkCmCYEA6q7GivOjm7GhpOy57GYj37G2B6KkDrFgD0F8I8G6FmFiDiCqB"
"uC0BuBmWoEC2ElKzkC0nBu8CzP+DxGqCsK0Hmr+GsE5+9GoBmC4BwEs4+Gw4+G3r+G9s+G2DlE+DzuRz2R0hSkkSsD0o/GqI/++GoC2Biz/GYjx/Go1B"
"4Bj9T8D6uSgG+BoygHsLE2C1ngHcsHsGj7S2By/SgEiE19S0xhH0BlthHujTMuB4tiJoDhmgCmjiH/ywG9giH9tR1lTs5pHmx0Ir1pH9mhI9nT+C0uT6"
"D4C0K9rTp2T01Tw72HmD34iHqIMA4CkEwDsBF0DmEwB8BqC6EsJuH+JwjkHlB/gkH2CuI4H8mkH8D3ikHxHt5UgMglVoDNhjVwNgwV2rlHuHjxkHsG99"
"VwEhB56V0oLirL82KuwK66MlsRr5Mk0RUmEkDqmmHzgWx8lH4jWwFgQ2hmHS7kmHsIjoW8CsgXwKqQyrmHmD1o9HsE+o+HmDxl+H8Bi1XwE4BmtnHg14"
"G6G5r4GkciH9+nHvFyEuNiGGbuD4Bs6nHhF9unH0T3vY6Fo5YsgoH7Ml2nHq2oHgioHv5nHp1nHwF7BvoZ+CuuZ6CgD8qqGwJ8zeuFwU4Ir3oHwCm9pH"
"gDl3pHqrqH+3qH17pHxoqH7sa0BY5ua+4ao6a0CyCyFz2a0F2xmI0B4FkDlvVgKkgXw6sHmK37nI3joIwvb2uoI8/sHsCiE1/sHnhtHC2CrubiEapvbu"
"9pIw7bh5tH8Hx6b01uHmncoH+2uH1wuHztuH/lcqF2xcekzvHwlwH2Sx7vHpqsI6rwHo8cj+vH95curwH2qd/9sIsBmkdwBmqxHmGpouIoGiwd8H7sdm"
"+xHmxvI9svIkJiieqG2Bn0xHgHguyH8xyHznyHqIgBxkZ1pe5q5G8yetqe2D0qLymzHgwmInhaxhaj54Gv54G65Gx5e5wGgifYv9XoBggYYmD+n0HB9h"
"0H8HgJ/DgBoM0JnJ5IyHkB0m0H+40H+J/j0In+zHw8fqCut3H8E7pCtggB180Iol1Ii31Irk1Ijo1HivgBuBakE+BqG0F2GsEb8Fn5gB2F0ihBv+gB+F"
"0mhBug3HoHx42HjqhB4Bz3Io73H2qiJ/+4I9p5Ik+hBsiiB0OwW8x4HsFt+3HgHsLoh5H6o9Fn24Hvk9FqCky9FoOr68F8v7Hqr7H7z6H3v6H6H6j7HU"
"rv6H4bgK1FiSyZig8HsXpmhJ4Ck+hJh9lBnr7H48JgGm55Iuv9HttjJn6jJk3mBo5kJ7ymB4Iy1mB1o+H8B26+HyLlolJuEonnByJuFn/mBkzgIo0nB/"
"u/H2ej3nB/goBypoBi+pJ9moBuDsxqJ4Yl1hI1zqJ8Dw6oBYiBiB4C0ujI",
"ruCHZAJW+LHZAJWnCDmE1BHXAHZALW+HRU+DHXAHZALWvEFZAHbAJCnpDB+CBB6CBB2CBByCBBuCDBmCtBDVADXpg+BHZAJWvLFXBJB7HDVADXi9uBNO"
"ANMABcADcAFcAHcAJc2CDrFADtFAD9EAD/EAH/EAHhF",
};
/* to here */

typedef struct mtt__bert {
    mtt_env *env;
    mtt_wordpiece options;
    unsigned char *kinds; /* of all code points; NULL in byte-level BPE */
    mtt__table map;       /* (MTT__CASE, letter) to lower case, (MTT__BASE, letter) to base, (MTT__PAIR, letter) to its second */
} mtt__bert;

static uint32_t mtt__letter(const mtt__bert *b, uint32_t kind, uint32_t c, uint32_t otherwise)
{
    uint32_t letter = mtt__table_find(&b->map, mtt__pair_key(kind, c))->value;
    return letter == MTT__NONE ? otherwise : letter;
}

static uint32_t mtt__run_number(const char **at, int with_sign)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint32_t value = 0, digit = 32;
    int shift;
    for (shift = 0; digit & 32; shift += 5) {
        digit = (uint32_t)(strchr(digits, *(*at)++) - digits);
        value |= (digit & 31) << shift;
    }
    return !with_sign ? value : value & 1 ? ~(value >> 1) : value >> 1;
}

static mtt_status mtt__bert_init(mtt_env *env, mtt__bert *b, const mtt_wordpiece *options)
{
    mtt_status status = mtt__table_grow(env, &b->map);
    uint32_t kind, c, n, way = 0, letter, before, value, step;
    b->env = env;
    if (options) b->options = *options;
    b->kinds = (unsigned char *)mtt__alloc(env, 0x110000, 1);
    if (!b->kinds) return MTT_E_MEMORY;
    for (kind = MTT__CONTROL; kind <= MTT__PAIR; kind++) {
        const char *at = mtt__bert_runs[kind - 1];
        const uint32_t cases = kind == MTT__CASE || kind == MTT__CASE_BY_TWO, bases = kind == MTT__BASE || kind == MTT__BASE_OF_CJK;
        for (c = letter = before = 0, step = kind == MTT__CASE_BY_TWO ? 2 : 1; *at && status == MTT_OK; c -= step - 1) {
            c += mtt__run_number(&at, 0);
            n = kind == MTT__PAIR ? 1 : mtt__run_number(&at, 0);
            if (cases || kind == MTT__PAIR) way = mtt__run_number(&at, 1);
            for (; n && status == MTT_OK; n--, c += step) {
                value = bases ? before + mtt__run_number(&at, 1) : c + way;
                if (bases) before = letter, letter = value;
                if (kind <= MTT__CJK) b->kinds[c] = (unsigned char)kind;
                else status = mtt__table_put(env, &b->map, mtt__pair_key(cases ? MTT__CASE : MTT__BASE, c), value);
                if (kind == MTT__PAIR && status == MTT_OK)
                    status = mtt__table_put(env, &b->map, mtt__pair_key(kind, c), c + mtt__run_number(&at, 1));
            }
        }
    }
    return status;
}

static void mtt__bert_free(mtt__bert *b)
{
    mtt__free(b->env, b->kinds);
    mtt__free(b->env, b->map.cells);
}

/* A letter without accents, of up to four parts (Unicode's NFD without Mn; Hangul by its formula). */
static int mtt__bert_strip(const mtt__bert *b, uint32_t c, uint32_t out[4])
{
    uint32_t parts[4], second, hangul = c - 0xac00;
    int n = 0, count = 0;
    if (b->kinds[c] == MTT__MARK) return 0;
    if (c >= 0xac00 && c < 0xd7a4) {
        out[0] = 0x1100 + hangul / 588;
        out[1] = 0x1161 + hangul % 588 / 28;
        out[2] = 0x11a7 + hangul % 28;
        return 2 + (hangul % 28 > 0);
    }
    for (; (second = mtt__letter(b, MTT__PAIR, c, 0)) != 0; c = mtt__letter(b, MTT__BASE, c, c)) parts[n++] = second;
    for (out[count++] = mtt__letter(b, MTT__BASE, c, c); n; n--) out[count++] = parts[n - 1];
    return count;
}

/* A word on its way from a text: a space and its normalised characters. A longer one than 100 is not looked at. */
enum { MTT__WORD_CHARACTERS = 100 };
typedef struct mtt__spelling {
    mtt_status (*use)(void *user, const char *word, size_t size); /* size 1 if it is too long */
    void *user;
    mtt_status status;
    size_t size, count; /* bytes and characters */
    char word[MTT__WORD_CHARACTERS * 4 + 1];
} mtt__spelling;

static void mtt__spell_end(mtt__spelling *s)
{
    if (s->count && s->status == MTT_OK) s->status = s->use(s->user, s->word, s->count > MTT__WORD_CHARACTERS ? 1 : s->size);
    s->count = 0;
    s->size = 1;
}

static void mtt__spell(const mtt__bert *b, mtt__spelling *s, uint32_t c)
{
    int kind = b->kinds[c], blank = kind == MTT__BLANK || kind == MTT__CONTROL_BLANK;
    if (blank || kind == MTT__PUNCTUATION) mtt__spell_end(s);
    if (!blank && s->count++ < MTT__WORD_CHARACTERS) s->size += mtt__utf8_put(c, s->word + s->size);
    if (kind == MTT__PUNCTUATION) mtt__spell_end(s);
}

/* Cuts a text into words as BertNormalizer and BertPreTokenizer do, one after the other. */
static mtt_status mtt__bert_words(const mtt__bert *b, const unsigned char *at, size_t bytes,
                                  mtt_status (*use)(void *user, const char *word, size_t size), void *user)
{
    const unsigned char *end = at + bytes;
    const mtt_wordpiece *o = &b->options;
    mtt__spelling s;
    int size, i, n;
    s.use = use;
    s.user = user;
    s.status = MTT_OK;
    s.count = 0;
    s.word[0] = ' ';
    for (s.size = 1; at < end && s.status == MTT_OK; at += size) {
        uint32_t c = at[0], letters[4];
        int kind, alone;
        size = 1;
        if (c >= 0x80) c = mtt__utf8_get(at, end, &size);
        if (c == MTT__NONE) c = 0xfffd; /* which is a control, too */
        kind = b->kinds[c];
        alone = kind == MTT__CJK && !o->keep_cjk;
        if (!o->keep_controls && (kind == MTT__CONTROL || kind == MTT__CONTROL_BLANK)) continue;
        if (alone) mtt__spell_end(&s);
        letters[0] = c;
        n = o->strip_accents && c >= 0x80 ? mtt__bert_strip(b, c, letters) : 1;
        for (i = 0; i < n; i++) {
            mtt__spell(b, &s, o->lowercase ? mtt__letter(b, MTT__CASE, letters[i], letters[i]) : letters[i]);
            if (o->lowercase && letters[i] == 0x130) mtt__spell(b, &s, 0x307); /* the only one that becomes two */
        }
        if (alone) mtt__spell_end(&s);
    }
    mtt__spell_end(&s);
    return s.status;
}

/* ---- vocabulary */

typedef struct mtt__merge {
    uint32_t left, right, id;
} mtt__merge;

typedef struct mtt__word {
    uint8_t size, count;
    char text[MTT__WORD_BYTES];
    int32_t ids[MTT__WORD_IDS];
} mtt__word;

/* Where ids go: all are counted, those that fit are written. */
typedef struct mtt__ids {
    int32_t *at;
    size_t count, capacity;
} mtt__ids;

struct mtt_tokenizer {
    mtt_env *env;
    unsigned char *classes;
    mtt__strings pieces; /* item i holds the bytes of id i */
    uint32_t byte_id[256], end_of_text;
    mtt__merge *merges; /* by rank */
    size_t merge_count, merge_capacity;
    mtt__table ranks; /* of pairs */
    mtt__word *cache; /* each word has one place, where the latest stays */
    mtt__bert bert;   /* of WordPiece, whose pieces stand as they decode: " the", "ing"; those that decode to nothing count 1 */
    uint32_t unknown; /* MTT__NONE in BPE */
    size_t longest;   /* bytes of a piece of WordPiece */
    mtt__ids *found;  /* where mtt__match puts its ids */
};

static mtt_status mtt__tokenizer_new(mtt_env *env, mtt_tokenizer **out)
{
    mtt_tokenizer *t = *out = (mtt_tokenizer *)mtt__alloc(env, 1, sizeof(*t));
    if (!t) return MTT_E_MEMORY;
    t->env = t->pieces.env = env;
    t->unknown = MTT__NONE;
    t->classes = mtt__classes_create(env);
    t->cache = (mtt__word *)mtt__alloc(env, (size_t)1 << MTT__WORD_CACHE_BITS, sizeof(*t->cache));
    if (!t->classes || !t->cache || mtt__table_grow(env, &t->ranks) != MTT_OK) return MTT_E_MEMORY;
    return mtt__table_grow(env, &t->pieces.table);
}

MTTDEF void mtt_tokenizer_destroy(mtt_tokenizer *t)
{
    if (!t) return;
    mtt__strings_free(&t->pieces);
    mtt__free(t->env, t->classes);
    mtt__free(t->env, t->merges);
    mtt__free(t->env, t->ranks.cells);
    mtt__free(t->env, t->cache);
    mtt__bert_free(&t->bert);
    mtt__free(t->env, t);
}

/* Hands a finished tokenizer out, or frees an unfinished one. */
static mtt_status mtt__tokenizer_done(mtt_status status, mtt_tokenizer *t, mtt_tokenizer **out)
{
    if (status != MTT_OK) mtt_tokenizer_destroy(t);
    *out = status == MTT_OK ? t : NULL;
    return status;
}

/* GPT-2's printable alphabet: bytes 21-7E, A1-AC and AE-FF stand for themselves, the others, in order, for U+0100 and up. */
static uint32_t mtt__byte_code(int byte)
{
    int code = byte <= 0x20 ? 0x100 + byte : byte >= 0x7f && byte <= 0xa0 ? 0xa2 + byte : byte == 0xad ? 0x143 : byte;
    return (uint32_t)code;
}

/* The byte that a code point stands for, -1 for none. */
static int mtt__code_byte(uint32_t code)
{
    int byte = (int)(code < 0x100 ? code : code <= 0x120 ? code - 0x100 : code < 0x143 ? code - 0xa2 : 0xad);
    return code < MTT__ALPHABET_END && mtt__byte_code(byte) == code ? byte : -1;
}

/* Appends the 256 bytes in the order of the alphabet's code points. */
static mtt_status mtt__tokenizer_add_bytes(mtt_tokenizer *t)
{
    uint32_t code;
    for (code = 0; code < MTT__ALPHABET_END; code++) {
        int byte = mtt__code_byte(code);
        char text = (char)byte;
        if (byte >= 0 && mtt__strings_add(&t->pieces, &text, 1, &t->byte_id[byte]) != MTT_OK) return MTT_E_MEMORY;
    }
    return MTT_OK;
}

/* Appends a WordPiece as it stands in a vocabulary. */
static mtt_status mtt__wordpiece_add(mtt_tokenizer *t, const char *at, size_t size, uint32_t *id)
{
    static const char *const silent[] = {"[PAD]", "[CLS]", "[SEP]", "[MASK]"};
    mtt__strings *s = &t->pieces;
    size_t i, end = s->bytes_size, skip = size > 2 && memcmp(at, "##", 2) == 0 ? 3 : 0;
    mtt_status status;
    for (i = 0; i < MTT__LENGTH(silent); i++)
        if (size == strlen(silent[i]) && memcmp(at, silent[i], size) == 0) skip = 1;
    if (mtt__reserve(t->env, (void **)&s->bytes, &s->bytes_capacity, mtt__add(end, size + 1), 1) != MTT_OK) return MTT_E_MEMORY;
    s->bytes[end] = ' ';
    memcpy(s->bytes + end + 1, at, size);
    status = mtt__strings_add(s, s->bytes + end + skip, size + 1 - skip, id);
    if (status == MTT_OK && skip == 1) s->items[*id].count = 1;
    return status;
}

/* NULL, or what a vocabulary of WordPieces lacks. */
static const char *mtt__wordpiece_finish(mtt_tokenizer *t)
{
    uint64_t key;
    size_t i;
    for (i = 0; i < t->pieces.count; i++)
        if (t->longest < t->pieces.items[i].size) t->longest = t->pieces.items[i].size;
    t->unknown = mtt__strings_find(&t->pieces, " [UNK]", 6, &key);
    t->end_of_text = mtt__strings_find(&t->pieces, "[SEP]", 5, &key);
    return t->unknown != MTT__NONE && t->end_of_text != MTT__NONE ? NULL : "[UNK] or [SEP] is not in the vocabulary";
}

MTT__INLINE uint32_t mtt__rank(const mtt_tokenizer *t, int32_t left, int32_t right)
{
    return mtt__table_find(&t->ranks, mtt__pair_key((uint32_t)left, (uint32_t)right))->value;
}

/* Appends the merge of next lower precedence, unless it is there already, and the piece that it makes, joined at the unused
   end of the pieces' bytes. A piece of the same bytes may exist by another way: it then keeps its id. */
static mtt_status mtt__tokenizer_merge(mtt_tokenizer *t, uint32_t left, uint32_t right, uint32_t *id)
{
    mtt__strings *s = &t->pieces;
    const mtt__string a = s->items[left], b = s->items[right];
    const size_t n = t->merge_count, end = s->bytes_size, size = mtt__add(a.size, b.size);
    uint32_t rank = mtt__rank(t, (int32_t)left, (int32_t)right);
    if (rank != MTT__NONE) return *id = t->merges[rank].id, MTT_OK;
    if (mtt__reserve(t->env, (void **)&t->merges, &t->merge_capacity, n + 1, sizeof(*t->merges)) != MTT_OK ||
        mtt__reserve(t->env, (void **)&s->bytes, &s->bytes_capacity, mtt__add(end, size), 1) != MTT_OK)
        return MTT_E_MEMORY;
    memcpy(s->bytes + end, s->bytes + a.at, a.size);
    memcpy(s->bytes + end + a.size, s->bytes + b.at, b.size);
    if (mtt__strings_add(s, s->bytes + end, size, id) != MTT_OK) return MTT_E_MEMORY;
    t->merges[n].left = left;
    t->merges[n].right = right;
    t->merges[n].id = *id;
    t->merge_count++;
    return mtt__table_put(t->env, &t->ranks, mtt__pair_key(left, right), (uint32_t)n);
}

MTTDEF int mtt_tokenizer_vocab(const mtt_tokenizer *t)
{
    return (int)t->pieces.count;
}

MTTDEF int mtt_tokenizer_end_of_text(const mtt_tokenizer *t)
{
    return (int)t->end_of_text;
}

MTTDEF const char *mtt_tokenizer_bytes(const mtt_tokenizer *t, int id, size_t *bytes)
{
    int known = id >= 0 && (size_t)id < t->pieces.count;
    *bytes = known && !t->pieces.items[id].count ? t->pieces.items[id].size : 0;
    return known ? t->pieces.bytes + t->pieces.items[id].at : NULL;
}

/* ---- encoding */

static void mtt__ids_put(mtt__ids *out, const int32_t *ids, size_t count)
{
    size_t i, room = out->count < out->capacity ? out->capacity - out->count : 0;
    for (i = 0; i < count && i < room; i++) out->at[out->count + i] = ids[i];
    out->count += count;
}

/* Merges the pair of lowest rank, leftmost first, until none is left. Returns the number of ids. */
static size_t mtt__merge_short(const mtt_tokenizer *t, const unsigned char *at, size_t n, int32_t ids[MTT__WORD_BYTES])
{
    uint32_t rank[MTT__WORD_BYTES];
    size_t i, best;
    for (i = 0; i < n; i++) ids[i] = (int32_t)t->byte_id[at[i]];
    for (i = 0; i + 1 < n; i++) rank[i] = mtt__rank(t, ids[i], ids[i + 1]);
    for (; n > 1; n--) {
        for (best = 0, i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == MTT__NONE) break;
        ids[best] = (int32_t)t->merges[rank[best]].id;
        for (i = best + 1; i + 1 < n; i++) {
            ids[i] = ids[i + 1];
            rank[i] = i + 2 < n ? rank[i + 1] : MTT__NONE;
        }
        if (best) rank[best - 1] = mtt__rank(t, ids[best - 1], ids[best]);
        rank[best] = best + 2 < n ? mtt__rank(t, ids[best], ids[best + 1]) : MTT__NONE;
    }
    return n;
}

typedef struct mtt__node {
    uint32_t previous, next, rank; /* rank of the pair with the next node; MTT__NONE also in nodes merged away */
    int32_t id;
} mtt__node;

static mtt_status mtt__node_rank(const mtt_tokenizer *t, mtt__node *nodes, uint32_t i, mtt__heap *heap)
{
    uint32_t next = nodes[i].next;
    nodes[i].rank = next == MTT__NONE ? MTT__NONE : mtt__rank(t, nodes[i].id, nodes[next].id);
    return nodes[i].rank == MTT__NONE ? MTT_OK : mtt__heap_push(t->env, heap, nodes[i].rank, i);
}

/* The same in O(n log n): a linked list, and a heap of (rank, place) whose stale entries are passed over. */
static mtt_status mtt__merge_long(const mtt_tokenizer *t, const unsigned char *at, size_t n, mtt__ids *out)
{
    mtt__node *nodes = (mtt__node *)mtt__alloc(t->env, n < MTT__NONE ? n : SIZE_MAX, sizeof(*nodes));
    mtt_status status = nodes ? MTT_OK : MTT_E_MEMORY;
    mtt__heap heap = {NULL, 0, 0};
    mtt__ranked top;
    uint32_t i;
    for (i = 0; i < n && nodes; i++) {
        nodes[i].id = (int32_t)t->byte_id[at[i]];
        nodes[i].previous = i - 1;
        nodes[i].next = i + 1 < n ? i + 1 : MTT__NONE;
    }
    for (i = 0; i < n && status == MTT_OK; i++) status = mtt__node_rank(t, nodes, i, &heap);
    while (status == MTT_OK && mtt__heap_pop(&heap, &top)) {
        uint32_t here = (uint32_t)top.tie, gone = nodes[here].next, after;
        if (nodes[here].rank != top.key) continue;
        after = nodes[gone].next;
        nodes[here].id = (int32_t)t->merges[top.key].id;
        nodes[gone].rank = MTT__NONE;
        nodes[here].next = after;
        if (after != MTT__NONE) nodes[after].previous = here;
        status = mtt__node_rank(t, nodes, here, &heap);
        if (status == MTT_OK && here) status = mtt__node_rank(t, nodes, nodes[here].previous, &heap);
    }
    for (i = 0; i != MTT__NONE && status == MTT_OK; i = nodes[i].next) mtt__ids_put(out, &nodes[i].id, 1);
    mtt__free(t->env, nodes);
    mtt__free(t->env, heap.at);
    return status;
}

/* The longest piece that fits from the left, again and again; [UNK] for a word of which a part fits none. */
static mtt_status mtt__match(void *user, const char *word, size_t size)
{
    const mtt_tokenizer *t = (const mtt_tokenizer *)user;
    int32_t ids[MTT__WORD_CHARACTERS];
    size_t from = 0, end, count = 0;
    uint32_t id = size > 1 ? 0 : MTT__NONE;
    uint64_t key;
    for (; from < size && id != MTT__NONE; from = end) {
        end = t->longest < size - from ? from + t->longest : size;
        for (id = MTT__NONE; end > from; end--)
            if (end == size || (word[end] & 0xc0) != 0x80) {
                id = mtt__strings_find(&t->pieces, word + from, end - from, &key);
                if (id != MTT__NONE) break;
            }
        ids[count++] = (int32_t)id;
    }
    ids[0] = id == MTT__NONE ? (int32_t)t->unknown : ids[0];
    mtt__ids_put(t->found, ids, id == MTT__NONE ? 1 : count);
    return MTT_OK;
}

/* The length of a pre-token: in WordPiece, of what stands up to the next of the blanks that end a word under all options. */
static size_t mtt__pretoken_of(const mtt_tokenizer *t, const unsigned char *at, size_t bytes)
{
    size_t n = 1;
    if (!t->bert.kinds) return mtt__pretoken(t->classes, at, bytes);
    while (n < bytes && !memchr(" \n\r\t", at[n], 4)) n++;
    return n;
}

static void mtt__merge_cached(mtt_tokenizer *t, const unsigned char *at, size_t n, mtt__ids *out)
{
    mtt__word *word = &t->cache[mtt__hash((const char *)at, n) >> (64 - MTT__WORD_CACHE_BITS)];
    if (word->size != n || memcmp(word->text, at, n) != 0) {
        int32_t ids[MTT__WORD_BYTES];
        mtt__ids found = {ids, 0, MTT__WORD_BYTES};
        size_t count;
        t->found = &found;
        if (t->bert.kinds) mtt__bert_words(&t->bert, at, n, mtt__match, t);
        count = t->bert.kinds ? found.count : mtt__merge_short(t, at, n, ids);
        mtt__ids_put(out, ids, count);
        if (count > MTT__WORD_IDS) return;
        word->size = (uint8_t)n;
        word->count = (uint8_t)count;
        memcpy(word->text, at, n);
        memcpy(word->ids, ids, count * sizeof(*ids));
    } else mtt__ids_put(out, word->ids, word->count);
}

MTTDEF mtt_status mtt_encode(mtt_tokenizer *t, const char *text, size_t bytes, int32_t *ids, size_t capacity, size_t *count)
{
    const unsigned char *at = (const unsigned char *)text;
    size_t left = bytes, n;
    mtt_status status = MTT_OK;
    mtt__ids out;
    out.at = ids;
    out.count = 0;
    out.capacity = capacity;
    for (; left && status == MTT_OK; at += n, left -= n) {
        n = mtt__pretoken_of(t, at, left);
        t->found = &out;
        if (n <= MTT__WORD_BYTES) mtt__merge_cached(t, at, n, &out);
        else if (t->bert.kinds) mtt__bert_words(&t->bert, at, n, mtt__match, t);
        else status = mtt__merge_long(t, at, n, &out);
    }
    *count = status == MTT_OK ? out.count : 0;
    if (*count <= capacity) return status;
    return mtt__fail(t->env, MTT_E_ARGUMENT, "the text has %zu tokens, and there is room for %zu: make room", *count, capacity);
}

MTTDEF mtt_status mtt_decode(const mtt_tokenizer *t, const int32_t *ids, size_t count, char *text, size_t capacity, size_t *bytes)
{
    size_t i, size, filled = 0;
    *bytes = 0;
    for (i = 0; i < count; i++) {
        const char *piece = mtt_tokenizer_bytes(t, ids[i], &size);
        if (!piece)
            return mtt__fail(t->env, MTT_E_ARGUMENT, "token %zu is %d, outside the %zu ids: take its own tokenizer", i,
                             (int)ids[i], t->pieces.count);
        if (size && filled == *bytes && size <= capacity - filled) memcpy(text + filled, piece, size), filled += size;
        *bytes += size;
    }
    if (*bytes == filled) return MTT_OK;
    return mtt__fail(t->env, MTT_E_ARGUMENT, "the text has %zu bytes, and there is room for %zu: make room", *bytes, capacity);
}

/* ---- training */

struct mtt_bpe_trainer {
    mtt_env *env;
    unsigned char *classes;
    mtt__strings words;
    mtt__bert bert;
};

MTTDEF mtt_status mtt_bpe_trainer_create(mtt_env *env, mtt_bpe_trainer **out)
{
    mtt_bpe_trainer *trainer = (mtt_bpe_trainer *)mtt__alloc(env, 1, sizeof(*trainer));
    *out = NULL;
    if (!trainer) return MTT_E_MEMORY;
    trainer->env = trainer->words.env = env;
    trainer->classes = mtt__classes_create(env);
    if (trainer->classes) *out = trainer;
    else mtt_bpe_trainer_destroy(trainer);
    return *out ? MTT_OK : MTT_E_MEMORY;
}

MTTDEF mtt_status mtt_wordpiece_trainer_create(mtt_env *env, const mtt_wordpiece *options, mtt_bpe_trainer **out)
{
    mtt_status status = mtt_bpe_trainer_create(env, out);
    if (status == MTT_OK) status = mtt__bert_init(env, &(*out)->bert, options);
    if (status == MTT_OK || !*out) return status;
    mtt_bpe_trainer_destroy(*out);
    *out = NULL;
    return status;
}

MTTDEF void mtt_bpe_trainer_destroy(mtt_bpe_trainer *trainer)
{
    if (!trainer) return;
    mtt__strings_free(&trainer->words);
    mtt__bert_free(&trainer->bert);
    mtt__free(trainer->env, trainer->classes);
    mtt__free(trainer->env, trainer);
}

static mtt_status mtt__trainer_word(mtt_bpe_trainer *trainer, const char *at, size_t size, uint64_t count)
{
    uint32_t word;
    if (mtt__strings_add(&trainer->words, at, size, &word) != MTT_OK) return MTT_E_MEMORY;
    trainer->words.items[word].count += count;
    return MTT_OK;
}

static mtt_status mtt__trainer_count(void *user, const char *word, size_t size)
{
    return size > 1 ? mtt__trainer_word((mtt_bpe_trainer *)user, word, size, 1) : MTT_OK;
}

MTTDEF mtt_status mtt_bpe_trainer_add(mtt_bpe_trainer *trainer, const char *text, size_t bytes)
{
    size_t n;
    mtt_status status = MTT_OK;
    if (trainer->bert.kinds)
        return mtt__bert_words(&trainer->bert, (const unsigned char *)text, bytes, mtt__trainer_count, trainer);
    for (; bytes && status == MTT_OK; text += n, bytes -= n) {
        n = mtt__pretoken(trainer->classes, (const unsigned char *)text, bytes);
        status = mtt__trainer_word(trainer, text, n, 1);
    }
    return status;
}

typedef struct mtt__bpe_pair {
    uint64_t key, count;
    uint32_t first; /* of its places: a linked list of the words that may hold the pair */
} mtt__bpe_pair;

typedef struct mtt__bpe_place {
    uint32_t word, next;
} mtt__bpe_place;

/* The heap has the highest count on top, then the smallest ids. Counts that fell since are put right on top; one that
   rises is pushed again. */
typedef struct mtt__bpe {
    mtt_env *env;
    const mtt__strings *words;
    uint32_t *symbols; /* of a word: from the place of its bytes on */
    size_t *lengths;   /* symbols in each word */
    mtt__table index;  /* of pairs */
    mtt__bpe_pair *pairs;
    mtt__bpe_place *places;
    size_t pair_count, pair_capacity, place_count, place_capacity;
    size_t pushed; /* pairs that have been in the heap; the others wait until the merge in hand is through */
    mtt__heap heap;
    uint64_t least; /* count of a pair that is merged */
} mtt__bpe;

static mtt_status mtt__bpe_push(mtt__bpe *b, const mtt__bpe_pair *pair)
{
    return pair->count ? mtt__heap_push(b->env, &b->heap, ~pair->count, pair->key) : MTT_OK;
}

static mtt_status mtt__bpe_push_new(mtt__bpe *b)
{
    mtt_status status = MTT_OK;
    while (b->pushed < b->pair_count && status == MTT_OK) status = mtt__bpe_push(b, &b->pairs[b->pushed++]);
    return status;
}

static void mtt__bpe_fall(mtt__bpe *b, uint32_t left, uint32_t right, uint64_t count)
{
    b->pairs[mtt__table_find(&b->index, mtt__pair_key(left, right))->value].count -= count;
}

/* Counts `count` more of a pair, all in one word. */
static mtt_status mtt__bpe_rise(mtt__bpe *b, uint32_t left, uint32_t right, uint32_t word, uint64_t count)
{
    uint64_t key = mtt__pair_key(left, right);
    uint32_t i = mtt__table_find(&b->index, key)->value;
    mtt__bpe_pair *pair;
    if (mtt__reserve(b->env, (void **)&b->pairs, &b->pair_capacity, b->pair_count + 1, sizeof(*pair)) != MTT_OK ||
        mtt__reserve(b->env, (void **)&b->places, &b->place_capacity, b->place_count + 1, sizeof(*b->places)) != MTT_OK)
        return MTT_E_MEMORY;
    if (i == MTT__NONE) {
        i = (uint32_t)b->pair_count++;
        b->pairs[i].key = key;
        b->pairs[i].count = 0;
        b->pairs[i].first = MTT__NONE;
        if (mtt__table_put(b->env, &b->index, key, i) != MTT_OK) return MTT_E_MEMORY;
    }
    pair = &b->pairs[i];
    pair->count += count;
    if (pair->first == MTT__NONE || b->places[pair->first].word != word) {
        if (b->place_count >= MTT__NONE)
            return mtt__fail(b->env, MTT_E_MEMORY, "more than 2^32 places of pairs: train on a smaller sample");
        b->places[b->place_count].word = word;
        b->places[b->place_count].next = pair->first;
        pair->first = (uint32_t)b->place_count++;
    }
    return i < b->pushed ? mtt__bpe_push(b, pair) : MTT_OK;
}

/* Replaces the pair by `id` in one word, from left to right; the counts follow what each replacement changes. */
static mtt_status mtt__bpe_replace(mtt__bpe *b, uint32_t word, uint32_t left, uint32_t right, uint32_t id)
{
    uint32_t *s = b->symbols + b->words->items[word].at;
    uint64_t count = b->words->items[word].count;
    size_t i, n = 0, length = b->lengths[word];
    mtt_status status = MTT_OK;
    for (i = 0; i < length && status == MTT_OK; i++) {
        if (i + 1 < length && s[i] == left && s[i + 1] == right) {
            if (n) mtt__bpe_fall(b, s[n - 1], left, count);
            if (n) status = mtt__bpe_rise(b, s[n - 1], id, word, count);
            i++;
            if (i + 1 < length) mtt__bpe_fall(b, right, s[i + 1], count);
            if (i + 1 < length && status == MTT_OK) status = mtt__bpe_rise(b, id, s[i + 1], word, count);
            s[n++] = id;
        } else s[n++] = s[i];
    }
    b->lengths[word] = n;
    return status;
}

/* What training begins with: a byte, or a character of WordPiece, with the space before it; MTT__NONE if it is too rare. */
static size_t mtt__bpe_symbol(const mtt_tokenizer *t, const char *at, size_t size, uint32_t *id)
{
    size_t n = 1u + (*at == ' ');
    uint64_t key;
    *id = t->byte_id[(unsigned char)*at];
    if (!t->bert.kinds) return 1;
    while (n < size && (at[n] & 0xc0) == 0x80) n++;
    *id = mtt__strings_find(&t->pieces, at, n, &key);
    return n;
}

/* Appends what WordPiece's vocabulary begins with. */
static mtt_status mtt__wordpiece_alphabet(mtt__bpe *b, mtt_tokenizer *t)
{
    static const char *const special[] = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};
    enum { LETTERS = 1000, ENDS = 0x110000, INNER = 1, CHOSEN = 2, ONE = 4 };
    uint64_t *counts = (uint64_t *)mtt__alloc(b->env, ENDS, sizeof(*counts));
    mtt_status status = counts ? MTT_OK : MTT_E_MEMORY;
    mtt__heap heap = {NULL, 0, 0};
    mtt__ranked top;
    size_t i, word;
    uint32_t id;
    int inner, size = 1;
    for (word = 0; word < b->words->count && counts; word++) {
        const mtt__string *item = &b->words->items[word];
        const unsigned char *at = (const unsigned char *)b->words->bytes + item->at, *end = at + item->size;
        for (at++, inner = 0; at < end; at += size, inner = INNER) {
            uint32_t c = *at;
            size = 1;
            if (c >= 0x80) c = mtt__utf8_get(at, end, &size);
            counts[c] = (counts[c] | (uint64_t)inner) + ONE * item->count;
        }
    }
    for (i = 0; i < ENDS && status == MTT_OK; i++)
        if (counts[i]) status = mtt__heap_push(b->env, &heap, ~(counts[i] / ONE), i);
    for (i = 0; status == MTT_OK && i < LETTERS && mtt__heap_pop(&heap, &top); i++) counts[top.tie] |= CHOSEN;
    for (i = 0; i < MTT__LENGTH(special) && status == MTT_OK; i++)
        status = mtt__wordpiece_add(t, special[i], strlen(special[i]), &id);
    for (i = 0; i < 2 * ENDS && status == MTT_OK; i++) {
        char text[8] = "##";
        size_t head = i < ENDS ? 0 : 2;
        uint64_t wanted = i < ENDS ? CHOSEN : CHOSEN | INNER;
        if ((counts[i % ENDS] & wanted) != wanted) continue;
        head += mtt__utf8_put((uint32_t)(i % ENDS), text + head);
        status = mtt__wordpiece_add(t, text, head, &id);
    }
    mtt__free(b->env, counts);
    mtt__free(b->env, heap.at);
    return status;
}

static mtt_status mtt__bpe_start(mtt__bpe *b, const mtt_tokenizer *t)
{
    uint32_t word;
    size_t i, size;
    b->symbols = (uint32_t *)mtt__alloc(b->env, b->words->bytes_size, sizeof(*b->symbols));
    b->lengths = (size_t *)mtt__alloc(b->env, b->words->count, sizeof(*b->lengths));
    if (!b->symbols || !b->lengths || mtt__table_grow(b->env, &b->index) != MTT_OK) return MTT_E_MEMORY;
    for (word = 0; word < b->words->count; word++) {
        const mtt__string *item = &b->words->items[word];
        uint32_t *s = b->symbols + item->at, id;
        size_t n = 0;
        for (i = 0; i < item->size; i += size) {
            size = mtt__bpe_symbol(t, b->words->bytes + item->at + i, item->size - i, &id);
            if (id == MTT__NONE) continue;
            if (n && mtt__bpe_rise(b, s[n - 1], id, word, item->count) != MTT_OK) return MTT_E_MEMORY;
            s[n++] = id;
        }
        b->lengths[word] = n;
    }
    return mtt__bpe_push_new(b);
}

/* Merges pair `i` everywhere. */
static mtt_status mtt__bpe_merge(mtt__bpe *b, mtt_tokenizer *t, uint32_t i)
{
    uint32_t left = (uint32_t)(b->pairs[i].key >> 32), right = (uint32_t)b->pairs[i].key, place = b->pairs[i].first, id;
    mtt_status status = mtt__tokenizer_merge(t, left, right, &id);
    b->pairs[i].first = MTT__NONE;
    for (; place != MTT__NONE && status == MTT_OK; place = b->places[place].next)
        status = mtt__bpe_replace(b, b->places[place].word, left, right, id);
    b->pairs[i].count = 0;
    return status == MTT_OK ? mtt__bpe_push_new(b) : status;
}

static mtt_status mtt__bpe_train(mtt__bpe *b, mtt_tokenizer *t, size_t vocab)
{
    mtt_status status = mtt__bpe_start(b, t);
    mtt__ranked top;
    while (status == MTT_OK && t->pieces.count < vocab && mtt__heap_pop(&b->heap, &top)) {
        uint32_t i = mtt__table_find(&b->index, top.tie)->value;
        if (~top.key < b->least) break;
        status = b->pairs[i].count == ~top.key ? mtt__bpe_merge(b, t, i) : mtt__bpe_push(b, &b->pairs[i]);
    }
    return status;
}

MTTDEF mtt_status mtt_bpe_trainer_finish(mtt_bpe_trainer *trainer, int vocab, mtt_tokenizer **out)
{
    mtt__bpe b;
    mtt_tokenizer *t = NULL;
    mtt_status status;
    *out = NULL;
    if (!vocab) vocab = 10000;
    if (vocab < 257 && !trainer->bert.kinds)
        return mtt__fail(trainer->env, MTT_E_ARGUMENT, "%d ids cannot hold <|endoftext|> and the 256 bytes: ask for 257 or more",
                         vocab);
    memset(&b, 0, sizeof(b));
    b.env = trainer->env;
    b.words = &trainer->words;
    status = mtt__tokenizer_new(trainer->env, &t);
    if (status == MTT_OK && trainer->bert.kinds) {
        b.least = 2;
        status = mtt__bert_init(b.env, &t->bert, &trainer->bert.options);
        if (status == MTT_OK) status = mtt__wordpiece_alphabet(&b, t);
        if (status == MTT_OK && (size_t)vocab < t->pieces.count)
            status = mtt__fail(b.env, MTT_E_ARGUMENT, "%d ids cannot hold the characters of the text and five special ones: ask for "
                               "%zu or more", vocab, t->pieces.count);
    } else if (status == MTT_OK) {
        status = mtt__strings_add(&t->pieces, "", 0, &t->end_of_text);
        if (status == MTT_OK) status = mtt__tokenizer_add_bytes(t);
    }
    if (status == MTT_OK) status = mtt__bpe_train(&b, t, (size_t)vocab);
    if (status == MTT_OK && trainer->bert.kinds) t->merge_count = 0, mtt__wordpiece_finish(t);
    mtt__free(b.env, b.symbols);
    mtt__free(b.env, b.lengths);
    mtt__free(b.env, b.index.cells);
    mtt__free(b.env, b.pairs);
    mtt__free(b.env, b.places);
    mtt__free(b.env, b.heap.at);
    return mtt__tokenizer_done(status, t, out);
}

/* ---- files */

/* What a tokenizer.json may say, value by value as it stands in the text, of BPE and of WordPiece: one of the alternatives
   between blanks, where { is an object, [ an array, * anything, and nothing, before a blank, that the key may be absent. Keys
   that change no ids are not listed, or NULL, and pass. */
enum { MTT__HF_TYPE, MTT__HF_ID, MTT__HF_VOCAB, MTT__HF_MERGES, MTT__HF_CLEAN, MTT__HF_CJK, MTT__HF_STRIP, MTT__HF_LOWER };
static const char *const mtt__hf_rules[][3] = {
    {"model.type", " \"BPE\"", "\"WordPiece\""},
    {"added_tokens.id", "*", "*"},
    {"model.vocab", "{", "{"},
    {"model.merges", "[", NULL},
    {"normalizer.clean_text", NULL, "true false"},
    {"normalizer.handle_chinese_chars", NULL, "true false"},
    {"normalizer.strip_accents", NULL, "null true false"},
    {"normalizer.lowercase", NULL, "true false"},
    {"version", "\"1.0\"", "\"1.0\""},
    {"truncation", " null", " null"},
    {"padding", " null", " null"},
    {"normalizer", " null", "{"},
    {"normalizer.type", NULL, "\"BertNormalizer\""},
    {"added_tokens.content", "\"" MTT__END_OF_TEXT "\"", NULL},
    {"added_tokens.special", "true", "true"},
    {"pre_tokenizer.type", "\"ByteLevel\"", "\"BertPreTokenizer\""},
    {"pre_tokenizer.add_prefix_space", "false", NULL},
    {"pre_tokenizer.use_regex", " true", NULL},
    {"post_processor", " null {", " null {"},
    {"post_processor.type", " \"ByteLevel\"", " \"BertProcessing\" \"TemplateProcessing\""},
    {"decoder.type", "\"ByteLevel\"", " \"WordPiece\""},
    {"model.dropout", " null", NULL},
    {"model.continuing_subword_prefix", " null \"\"", "\"##\""},
    {"model.end_of_word_suffix", " null \"\"", NULL},
    {"model.byte_fallback", " false", NULL},
    {"model.ignore_merges", " false", NULL},
    {"model.unk_token", NULL, "\"[UNK]\""},
    {"model.max_input_chars_per_word", NULL, "100"},
};

/* A tokenizer under construction from a file, whose text is changed where it stands: pieces only become shorter. */
typedef struct mtt__reader {
    mtt_env *env;
    const char *path;
    const mtt_wordpiece *options; /* to read with a vocab.txt */
    mtt_tokenizer *t;
    mtt__json j;
    mtt__slice value[MTT__LENGTH(mtt__hf_rules)];
    int wordpiece;
} mtt__reader;

static mtt_status mtt__reader_fail(mtt__reader *r, const char *what)
{
    return mtt__fail(r->env, MTT_E_FORMAT, "%s byte %zu: %s; get or save the tokenizer again, as byte-level BPE or WordPiece", r->path,
                     (size_t)(r->j.at - r->j.begin), r->j.fault ? r->j.fault : what);
}

/* Takes a string or a list of strings, undoes the escapes in place and joins what is in a list. Between two strings of a
   list stand three bytes at least, so a joint of up to three fits. */
static int mtt__json_text(mtt__json *j, const char *joint, mtt__slice *out)
{
    size_t parts = 0, size = strlen(joint);
    int first = 1, mark = mtt__json_peek(j);
    char *text = (char *)j->at;
    mtt__slice part;
    out->at = text;
    out->size = 0;
    if (mark != '"' && !mtt__json_take(j, '[')) return mtt__json_fail(j, "a string or a list of strings was expected");
    while ((mark == '"' ? !parts : mtt__json_item(j, &first)) && mtt__json_string(j, &part)) {
        if (parts++) memcpy(text + out->size, joint, size), out->size += size;
        out->size += mtt__json_unescape(part, text + out->size);
    }
    return !j->fault;
}

/* Turns a piece from the alphabet into bytes, in place; 0 if it is empty or holds a symbol of no byte. */
static int mtt__piece_bytes(mtt__slice *piece)
{
    char *out = (char *)piece->at;
    size_t i, n = 0;
    for (i = 0; i < piece->size; i++) {
        unsigned c = (unsigned char)piece->at[i], low = i + 1 < piece->size ? (unsigned char)piece->at[i + 1] : 0;
        if (c >= 0x80) {
            if (c < 0xc2 || c > 0xc5 || (low & 0xc0) != 0x80) return 0;
            c = (c & 31) << 6 | (low & 63);
            i++;
        }
        if (mtt__code_byte(c) < 0) return 0;
        out[n++] = (char)mtt__code_byte(c);
    }
    piece->size = n;
    return n > 0;
}

/* Appends the merge "A B" of two pieces, which make a piece that is new (`fresh`) or known. */
static mtt_status mtt__read_merge(mtt__reader *r, mtt__slice a, int fresh)
{
    const mtt__strings *s = &r->t->pieces;
    const size_t pieces = s->count, merges = r->t->merge_count;
    const char *space = a.size ? (const char *)memchr(a.at, ' ', a.size) : NULL;
    mtt__slice b = a;
    uint64_t key;
    uint32_t left, right, id;
    if (!space) return mtt__reader_fail(r, "a merge is not two pieces with a space between");
    a.size = (size_t)(space - a.at);
    b.at = space + 1;
    b.size -= a.size + 1;
    if (!mtt__piece_bytes(&a) || !mtt__piece_bytes(&b)) return mtt__reader_fail(r, "a merge is not two pieces of the alphabet");
    left = mtt__strings_find(s, a.at, a.size, &key);
    right = mtt__strings_find(s, b.at, b.size, &key);
    if (left == MTT__NONE || right == MTT__NONE) return mtt__reader_fail(r, "a merge has a part that is not known by then");
    if (mtt__tokenizer_merge(r->t, left, right, &id) != MTT_OK) return MTT_E_MEMORY;
    if (r->t->merge_count == merges) return mtt__reader_fail(r, "a merge is there twice");
    if (fresh == (s->count > pieces)) return MTT_OK;
    return mtt__reader_fail(r, fresh ? "a merge makes a piece that exists" : "a merge makes a piece not in the vocabulary");
}

static mtt_status mtt__gpt2_read(mtt__reader *r)
{
    static const char head[] = "#version: 0.2\n";
    mtt__json *j = &r->j;
    mtt_status status = mtt__tokenizer_add_bytes(r->t);
    if ((size_t)(j->end - j->at) < sizeof(head) - 1 || memcmp(j->at, head, sizeof(head) - 1) != 0)
        return mtt__reader_fail(r, "the first line is not \"#version: 0.2\"");
    j->at += sizeof(head) - 1;
    while (j->at < j->end && status == MTT_OK) {
        const char *stop = (const char *)memchr(j->at, '\n', (size_t)(j->end - j->at));
        mtt__slice line;
        if (!stop || r->t->merge_count == MTT__GPT2_MERGES)
            return mtt__reader_fail(r, stop ? "a line follows the last merge" : "the line has no end");
        line.at = j->at;
        line.size = (size_t)(stop - j->at);
        status = mtt__read_merge(r, line, 1);
        j->at = stop + 1;
    }
    if (status != MTT_OK) return status;
    if (r->t->merge_count != MTT__GPT2_MERGES) return mtt__reader_fail(r, "the file ends before merge 50,000");
    return mtt__strings_add(&r->t->pieces, "", 0, &r->t->end_of_text);
}

/* Appends a WordPiece that has to be UTF-8 and new; returns NULL or its fault. */
static const char *mtt__read_wordpiece(mtt__reader *r, mtt__slice piece, uint64_t id, mtt_status *status)
{
    const unsigned char *at = (const unsigned char *)piece.at, *end = at + piece.size;
    uint32_t index;
    int size = 1;
    for (; at < end; at += size, size = 1)
        if (*at >= 0x80 && mtt__utf8_get(at, end, &size) == MTT__NONE) break;
    if (at < end || !piece.size) return "a piece is empty or not UTF-8";
    *status = mtt__wordpiece_add(r->t, piece.at, piece.size, &index);
    if (*status != MTT_OK || (id == index && id + 1 == r->t->pieces.count)) return NULL;
    return "a piece is there twice, or its id is not the next";
}

/* A piece a line, whose number from 0 is its id. Blanks at the end of a line, a Windows line end among them, do not count. */
static mtt_status mtt__vocab_read(mtt__reader *r)
{
    mtt__json *j = &r->j;
    const char *fault = NULL;
    mtt_status status = mtt__bert_init(r->env, &r->t->bert, r->options);
    uint32_t line = 0;
    while (status == MTT_OK && !fault && j->at < j->end) {
        const char *stop = (const char *)memchr(j->at, '\n', (size_t)(j->end - j->at));
        mtt__slice piece;
        piece.at = j->at;
        piece.size = (size_t)((stop ? stop : j->end) - j->at);
        while (piece.size && memchr(" \t\r", piece.at[piece.size - 1], 3)) piece.size--;
        j->at = stop ? stop + 1 : j->end;
        fault = mtt__read_wordpiece(r, piece, line++, &status);
    }
    if (status == MTT_OK && !fault) fault = mtt__wordpiece_finish(r->t);
    if (status != MTT_OK || !fault) return status;
    return mtt__fail(r->env, MTT_E_FORMAT, "%s:%u: %s; get the vocab.txt of a BERT again", r->path, line, fault);
}

static int mtt__hf_allows(const char *allowed, mtt__slice value)
{
    size_t size;
    for (;; allowed += size + 1) {
        size = strcspn(allowed, " ");
        if (size == 1 && value.size && (*allowed == '*' || *allowed == value.at[0])) return 1;
        if (size == value.size && (!size || memcmp(allowed, value.at, size) == 0)) return 1;
        if (!allowed[size]) return 0;
    }
}

/* Finds the value of every key that has a rule, at the top and one object deep, and checks it. */
static mtt_status mtt__hf_check(mtt__reader *r)
{
    mtt__json *j = &r->j;
    mtt__slice key, part = {NULL, 0}, value;
    int first[2] = {1, 1}, depth = 0, added = 0;
    char path[80];
    mtt__text text;
    size_t i;
    for (mtt__json_begin(j, '{'); depth >= 0 && !j->fault;) {
        if (!mtt__json_key(j, &first[depth], &key)) {
            if (depth && mtt__slice_is(part, "added_tokens") && !mtt__json_take(j, ']')) {
                if (mtt__json_take(j, ',')) mtt__json_begin(j, '{');
                else mtt__json_fail(j, "a comma or ] was expected");
                first[1] = added = 1;
            } else depth--;
            continue;
        }
        mtt__text_init(&text, path, sizeof(path));
        key.size = key.size < 32 ? key.size : 32; /* longer than those of the rules */
        mtt__print(&text, "%.*s%s%.*s", depth ? (int)part.size : 0, part.at, depth ? "." : "", (int)key.size, key.at);
        if (!depth && mtt__slice_is(key, "added_tokens")) mtt__json_take(j, '[');
        mtt__json_peek(j);
        value.at = j->at;
        if (!depth && mtt__json_take(j, '{')) part = key, first[depth = 1] = 1;
        else mtt__json_skip(j);
        value.size = (size_t)(j->at - value.at);
        for (i = 0; i < MTT__LENGTH(mtt__hf_rules); i++) {
            if (strcmp(mtt__hf_rules[i][0], path) != 0) continue;
            if (r->value[i].at && !(depth && added && mtt__slice_is(part, "added_tokens"))) mtt__json_fail(j, "a key is there twice");
            if (!added || !r->value[i].at || mtt__slice_is(r->value[i], "true")) r->value[i] = value; /* a false one stays */
        }
    }
    if (j->fault || mtt__json_peek(j)) return mtt__reader_fail(r, "something follows the end");
    r->wordpiece = r->value[MTT__HF_TYPE].at && mtt__slice_is(r->value[MTT__HF_TYPE], "\"WordPiece\"");
    for (i = 0; i < MTT__LENGTH(mtt__hf_rules); i++) {
        const char *at = r->value[i].at ? r->value[i].at : "missing", *allowed = mtt__hf_rules[i][1 + r->wordpiece];
        size_t left = r->value[i].at ? (size_t)(j->end - at) : 7;
        if (!allowed || mtt__hf_allows(allowed, r->value[i])) continue;
        return mtt__fail(r->env, MTT_E_FORMAT, "%s: %s is %.*s, and has to be %s: save a byte-level BPE or a WordPiece", r->path,
                         mtt__hf_rules[i][0], (int)(left < 40 ? left : 40), at, allowed);
    }
    return added && !r->wordpiece ? mtt__reader_fail(r, "a second token is added") : MTT_OK;
}

/* Appends the pieces, which have to stand in order of their ids; <|endoftext|> may be left to the added tokens. */
static mtt_status mtt__hf_vocab(mtt__reader *r)
{
    mtt__json *j = &r->j;
    mtt_tokenizer *t = r->t;
    mtt__slice piece;
    uint64_t id;
    uint32_t index;
    int first = 1, i;
    mtt_status status = MTT_OK;
    mtt__json_begin(j, '{');
    while (status == MTT_OK && mtt__json_key(j, &first, &piece) && mtt__json_u64(j, &id)) {
        int special;
        piece.size = mtt__json_unescape(piece, (char *)piece.at);
        if (r->wordpiece) {
            const char *fault = mtt__read_wordpiece(r, piece, id, &status);
            if (fault) mtt__json_fail(j, fault);
            continue;
        }
        special = mtt__slice_is(piece, MTT__END_OF_TEXT);
        if (special) piece.size = 0;
        else if (!mtt__piece_bytes(&piece)) mtt__json_fail(j, "a piece is not of GPT-2's alphabet");
        else if (t->pieces.count == t->end_of_text) status = mtt__strings_add(&t->pieces, "", 0, &index);
        if (status == MTT_OK) status = mtt__strings_add(&t->pieces, piece.at, piece.size, &index);
        if (special && id != t->end_of_text) mtt__json_fail(j, MTT__END_OF_TEXT " has two ids");
        if (id != index || id + 1 != t->pieces.count) mtt__json_fail(j, "the ids are not 0, 1, 2 and so on, of different pieces");
    }
    if (r->wordpiece) {
        const char *fault = mtt__wordpiece_finish(t);
        if (fault) mtt__json_fail(j, fault);
        return status == MTT_OK && j->fault ? mtt__reader_fail(r, NULL) : status;
    }
    if (status == MTT_OK && t->pieces.count == t->end_of_text) status = mtt__strings_add(&t->pieces, "", 0, &index);
    if (t->pieces.count <= t->end_of_text) mtt__json_fail(j, MTT__END_OF_TEXT " has an id above all others");
    for (i = 0; i < 256; i++) {
        char byte = (char)i;
        t->byte_id[i] = mtt__strings_find(&t->pieces, &byte, 1, &id);
        if (t->byte_id[i] == MTT__NONE) mtt__json_fail(j, "the vocabulary lacks one of the 256 bytes");
    }
    return status == MTT_OK && j->fault ? mtt__reader_fail(r, NULL) : status;
}

static mtt_status mtt__hf_read(mtt__reader *r)
{
    mtt__json *j = &r->j;
    mtt__slice line;
    uint64_t id;
    int first = 1;
    mtt_status status = mtt__hf_check(r);
    if (status != MTT_OK) return status;
    if (r->wordpiece) {
        mtt_wordpiece options;
        options.lowercase = mtt__slice_is(r->value[MTT__HF_LOWER], "true");
        options.keep_controls = mtt__slice_is(r->value[MTT__HF_CLEAN], "false");
        options.keep_cjk = mtt__slice_is(r->value[MTT__HF_CJK], "false");
        options.strip_accents = mtt__slice_is(r->value[MTT__HF_STRIP], options.lowercase ? "null" : "true") ||
                                mtt__slice_is(r->value[MTT__HF_STRIP], "true");
        j->at = r->value[MTT__HF_VOCAB].at;
        status = mtt__bert_init(r->env, &r->t->bert, &options);
        return status == MTT_OK ? mtt__hf_vocab(r) : status;
    }
    j->at = r->value[MTT__HF_ID].at;
    if (!mtt__json_u64(j, &id) || id > INT32_MAX) return mtt__reader_fail(r, "no id below 2^31");
    r->t->end_of_text = (uint32_t)id;
    j->at = r->value[MTT__HF_VOCAB].at;
    status = mtt__hf_vocab(r);
    j->at = r->value[MTT__HF_MERGES].at;
    if (status == MTT_OK) mtt__json_begin(j, '[');
    while (status == MTT_OK && mtt__json_item(j, &first) && mtt__json_text(j, " ", &line)) status = mtt__read_merge(r, line, 0);
    return status == MTT_OK && j->fault ? mtt__reader_fail(r, NULL) : status;
}

static mtt_status mtt__tokenizer_read(mtt_env *env, const char *path, const mtt_wordpiece *options, mtt_tokenizer **out,
                                      mtt_status (*read)(mtt__reader *))
{
    mtt__reader r;
    mtt__map map;
    mtt_status status;
    memset(&r, 0, sizeof(r));
    r.env = env;
    r.path = path;
    r.options = options;
    status = mtt__tokenizer_new(env, &r.t);
    if (status == MTT_OK) status = mtt__map_open(env, path, PROT_READ | PROT_WRITE, &map);
    if (status != MTT_OK) return mtt__tokenizer_done(status, r.t, out);
    mtt__json_init(&r.j, map.data ? map.data : "", map.bytes);
    status = read(&r);
    mtt__map_close(&map);
    return mtt__tokenizer_done(status, r.t, out);
}

MTTDEF mtt_status mtt_tokenizer_gpt2(mtt_env *env, const char *path, mtt_tokenizer **out)
{
    return mtt__tokenizer_read(env, path, NULL, out, mtt__gpt2_read);
}

MTTDEF mtt_status mtt_tokenizer_wordpiece(mtt_env *env, const char *path, const mtt_wordpiece *options, mtt_tokenizer **out)
{
    return mtt__tokenizer_read(env, path, options, out, mtt__vocab_read);
}

MTTDEF mtt_status mtt_tokenizer_load(mtt_env *env, const char *path, mtt_tokenizer **out)
{
    return mtt__tokenizer_read(env, path, NULL, out, mtt__hf_read);
}

static void mtt__print_piece(mtt__text *out, const mtt_tokenizer *t, uint32_t id)
{
    const mtt__string *piece = &t->pieces.items[id];
    const char *at = t->pieces.bytes + piece->at;
    size_t i, skip = t->bert.kinds && *at == ' ';
    if (t->bert.kinds) {
        mtt__print(out, skip || piece->count ? "" : "##");
        mtt__print_json_string(out, "", at + skip, piece->size - skip);
        return;
    }
    if (id == t->end_of_text) mtt__print(out, MTT__END_OF_TEXT);
    for (i = 0; i < piece->size; i++) {
        char symbol[5] = {'\\', 0, 0, 0, 0};
        uint32_t c = mtt__byte_code((unsigned char)at[i]);
        mtt__utf8_put(c, symbol + 1);
        mtt__print(out, "%s", symbol + (c != '"' && c != '\\'));
    }
}

MTTDEF mtt_status mtt_tokenizer_save(const mtt_tokenizer *t, const char *path)
{
    static const char added[] =
        "\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}";
    static const char bpe[] =
        "],\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,%s},"
        "\"post_processor\":null,\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true,%s},"
        "\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,\"continuing_subword_prefix\":null,"
        "\"end_of_word_suffix\":null,\"fuse_unk\":false,\"byte_fallback\":false,\"ignore_merges\":false,\"vocab\":{";
    static const char level[] = "\"trim_offsets\":true,\"use_regex\":true";
    static const char wordpiece[] =
        "],\"normalizer\":{\"type\":\"BertNormalizer\",\"clean_text\":%s,\"handle_chinese_chars\":%s,\"strip_accents\":%s,"
        "\"lowercase\":%s},\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"},\"post_processor\":null,"
        "\"decoder\":{\"type\":\"WordPiece\",\"prefix\":\"##\",\"cleanup\":false},\"model\":{\"type\":\"WordPiece\","
        "\"unk_token\":\"[UNK]\",\"continuing_subword_prefix\":\"##\",\"max_input_chars_per_word\":%d,\"vocab\":{";
    static const char *const truth[] = {"false", "true"};
    const mtt_wordpiece *o = &t->bert.options;
    size_t capacity = 4096;
    uint32_t i, specials = 0;
    mtt__text out;
    char *text;
    mtt_status status;
    /* In BPE a byte takes two at most, and a piece of n bytes stands here once, and twice more for each merge at most; in
       WordPiece a byte takes up to six. */
    for (i = 0; i < t->pieces.count; i++)
        capacity = mtt__add(capacity, mtt__add(mtt__mul(t->pieces.items[i].size, t->bert.kinds ? 6 : 2), 24));
    for (i = 0; i < t->merge_count; i++)
        capacity = mtt__add(capacity, mtt__add(mtt__mul(t->pieces.items[t->merges[i].id].size, 2), 4));
    text = (char *)mtt__alloc(t->env, capacity, 1);
    if (!text) return MTT_E_MEMORY;
    mtt__text_init(&out, text, capacity);
    mtt__print(&out, "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[");
    for (i = 0; i < t->pieces.count; i++) {
        if (i != t->end_of_text && i != t->unknown && !t->pieces.items[i].count) continue;
        mtt__print(&out, "%s{\"id\":%u,\"content\":\"", specials++ ? "," : "", i);
        mtt__print_piece(&out, t, i);
        mtt__print(&out, "%s", added);
    }
    if (t->bert.kinds)
        mtt__print(&out, wordpiece, truth[!o->keep_controls], truth[!o->keep_cjk], truth[!!o->strip_accents],
                   truth[!!o->lowercase], MTT__WORD_CHARACTERS);
    else mtt__print(&out, bpe, level, level);
    for (i = 0; i < t->pieces.count; i++) {
        mtt__print(&out, i ? ",\"" : "\"");
        mtt__print_piece(&out, t, i);
        mtt__print(&out, "\":%u", i);
    }
    mtt__print(&out, t->bert.kinds ? "}" : "},\"merges\":[");
    for (i = 0; i < t->merge_count; i++) {
        mtt__print(&out, i ? ",\"" : "\"");
        mtt__print_piece(&out, t, t->merges[i].left);
        mtt__print(&out, " ");
        mtt__print_piece(&out, t, t->merges[i].right);
        mtt__print(&out, "\"");
    }
    mtt__print(&out, t->bert.kinds ? "}}\n" : "]}}\n");
    status = mtt__file_replace(t->env, path, text, out.size);
    mtt__free(t->env, text);
    return status;
}
/* ------------------------------------------------------------------------------------------------------------------
   >>data
   ---------------------------------------------------------------------------------------------------------------- */

/* A plain text is cut at the first blank line from this many bytes on, at a line end from 16 times as many on, and
   anywhere between two characters at 64 times as many. */
#ifndef MTT_DOCUMENT_BYTES
#define MTT_DOCUMENT_BYTES 4096
#endif
#ifndef MTT_DOCUMENT_LIMIT /* the longest line of a JSONL file */
#define MTT_DOCUMENT_LIMIT ((size_t)1 << 30)
#endif

struct mtt_corpus {
    mtt_env *env;
    const char *path, *name, *field; /* the name is for messages */
    int fd, jsonl, ended;            /* ended: the file is read to its end */
    char *buffer;
    size_t capacity, start, size; /* bytes [start, size) wait in the buffer */
    uint64_t line;
};

/* Reads on until `bytes` wait in the buffer or the file ends. */
static mtt_status mtt__corpus_need(mtt_corpus *c, size_t bytes)
{
    while (!c->ended && c->size - c->start < bytes) {
        ptrdiff_t got;
        if (c->start && c->size == c->capacity) {
            memmove(c->buffer, c->buffer + c->start, c->size -= c->start);
            c->start = 0;
        }
        if (c->size - c->start > MTT_DOCUMENT_LIMIT)
            return mtt__fail(c->env, MTT_E_FORMAT, "%s:%llu: a line is longer than %llu bytes: split it", c->name,
                             (unsigned long long)c->line + 1, (unsigned long long)MTT_DOCUMENT_LIMIT);
        if (mtt__reserve(c->env, (void **)&c->buffer, &c->capacity, c->size + 1, 1) != MTT_OK) return MTT_E_MEMORY;
        got = MTT__SYS_READ(c->fd, c->buffer + c->size, c->capacity - c->size);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return mtt__file_fail(c->env, c->name, "read it", errno);
        c->ended = got == 0;
        c->size += (size_t)got;
    }
    return MTT_OK;
}

/* Tells JSONL from plain text by the first byte, and refuses what is neither. */
static mtt_status mtt__corpus_detect(mtt_corpus *c)
{
    static const char *const packed[][2] = {
        {"\x1f\x8b", "gzip -dc"},
        {"\x28\xb5\x2f\xfd", "zstd -dc"},
        {"\xfd" "7zXZ", "xz -dc"},
        {"\xff\xfe", "iconv -f UTF-16 -t UTF-8"},
        {"\xfe\xff", "iconv -f UTF-16 -t UTF-8"},
        {"PAR1", "python3 -c \"import pandas, sys; print(pandas.read_parquet(sys.argv[1]).to_json(orient='records', lines=1))\""},
    };
    mtt_status status = mtt__corpus_need(c, 4096);
    size_t i, size = c->size < 4096 ? c->size : 4096;
    const char *command = !status && size && memchr(c->buffer, 0, size) ? "iconv -f UTF-16LE -t UTF-8" : NULL;
    for (i = 0; i < MTT__LENGTH(packed); i++)
        if (size >= strlen(packed[i][0]) && memcmp(c->buffer, packed[i][0], strlen(packed[i][0])) == 0) command = packed[i][1];
    if (command && !status)
        return mtt__fail(c->env, MTT_E_FORMAT, "%s is not UTF-8 text: convert it, likely with %s %s | ... -", c->name, command,
                         c->path);
    if (size >= 3 && memcmp(c->buffer, "\xef\xbb\xbf", 3) == 0) c->start = 3;
    c->jsonl = size > c->start && strchr("{\"[", c->buffer[c->start]) != NULL;
    return status;
}

MTTDEF mtt_status mtt_corpus_open(mtt_env *env, const char *path, const char *field, mtt_corpus **out)
{
    size_t path_size = strlen(path) + 1, field_size = strlen(field ? field : "text") + 1;
    mtt_corpus *c = (mtt_corpus *)mtt__alloc(env, 1, mtt__add(sizeof(*c), path_size + field_size));
    char *names = (char *)(c + 1);
    mtt_status status = MTT_OK;
    struct stat info;
    *out = NULL;
    if (!c) return MTT_E_MEMORY;
    c->env = env;
    c->path = (const char *)memcpy(names, path, path_size);
    c->field = (const char *)memcpy(names + path_size, field ? field : "text", field_size);
    c->name = strcmp(path, "-") == 0 ? "standard input" : c->path;
    c->fd = c->name == c->path ? mtt__open_retry(path, O_RDONLY) : 0;
    if (c->fd < 0) status = mtt__file_fail(env, path, "open it", errno);
    else if (fstat(c->fd, &info) == 0 && S_ISDIR(info.st_mode))
        status = mtt__fail(env, MTT_E_FILE, "%s is a folder: name a file in it", path);
    if (!status) status = mtt__reserve(env, (void **)&c->buffer, &c->capacity, (size_t)1 << 20, 1);
    if (!status) status = mtt__corpus_detect(c);
    if (status) mtt_corpus_close(c);
    else *out = c;
    return status;
}

MTTDEF void mtt_corpus_close(mtt_corpus *c)
{
    if (!c) return;
    if (c->fd > 0) MTT__SYS_CLOSE(c->fd);
    mtt__free(c->env, c->buffer);
    mtt__free(c->env, c);
}

/* The text of one line of JSONL, undone where it stands. Of a key that comes twice the last counts. */
static mtt_status mtt__corpus_parse(mtt_corpus *c, const char *line, size_t size, const char **text, size_t *bytes)
{
    const char *hint = c->line > 1 ? "" : "; plain text that begins with a quote or bracket needs an empty first line";
    mtt__json j;
    mtt__slice key, found = {NULL, 0};
    int first = 1;
    mtt__json_init(&j, line, size);
    if (!mtt__json_take(&j, '{')) mtt__json_text(&j, "\n\n", &found);
    else
        while (mtt__json_key(&j, &first, &key)) {
            key.size = mtt__json_unescape(key, (char *)key.at);
            if (mtt__slice_is(key, c->field)) mtt__json_text(&j, "\n\n", &found);
            else mtt__json_skip(&j);
        }
    mtt__json_peek(&j);
    if (j.at != j.end) mtt__json_fail(&j, "something follows the value");
    if (j.fault)
        return mtt__fail(c->env, MTT_E_FORMAT, "%s:%llu: byte %zu: %s: every line must be one JSON value%s", c->name,
                         (unsigned long long)c->line, (size_t)(j.at - j.begin) + 1, j.fault, hint);
    if (!found.at)
        return mtt__fail(c->env, MTT_E_FORMAT, "%s:%llu: there is no field \"%s\": name the one with the text", c->name,
                         (unsigned long long)c->line, c->field);
    *text = found.at;
    *bytes = found.size;
    return MTT_OK;
}

static mtt_status mtt__corpus_next_line(mtt_corpus *c, const char **text, size_t *bytes)
{
    size_t scanned = 0, size, blank;
    for (;;) {
        const char *at = c->buffer + c->start;
        size_t waiting = c->size - c->start;
        const char *end = (const char *)memchr(at + scanned, '\n', waiting - scanned);
        if (!end && !c->ended) {
            mtt_status status = mtt__corpus_need(c, waiting + 1);
            if (status) return status;
            scanned = waiting;
            continue;
        }
        if (!waiting) return MTT_END;
        size = end ? (size_t)(end - at) : waiting;
        c->start += size + (end != NULL);
        c->line++;
        scanned = 0;
        for (blank = 0; blank < size && memchr(" \t\r", at[blank], 3);) blank++;
        if (blank < size) return mtt__corpus_parse(c, at, size, text, bytes);
    }
}

static mtt_status mtt__corpus_next_piece(mtt_corpus *c, const char **text, size_t *bytes)
{
    const size_t least = MTT_DOCUMENT_BYTES, most = least * 64;
    mtt_status status = mtt__corpus_need(c, most + 1);
    const char *at = c->buffer + c->start;
    size_t waiting = c->size - c->start, limit = waiting < most ? waiting : most, cut = 0, line = 0, blank;
    if (status || !waiting) return status ? status : MTT_END;
    while (!cut && line < limit) {
        const char *end = (const char *)memchr(at + line, '\n', limit - line);
        size_t next = end ? (size_t)(end - at) + 1 : limit;
        for (blank = line; blank < next && memchr(" \t\r\n", at[blank], 4); blank++) {}
        if (end && ((next >= least && blank == next) || next >= least * 16)) cut = next;
        line = next;
    }
    if (!cut)
        for (cut = limit; cut < waiting && cut + 3 > limit && ((unsigned char)at[cut] & 0xc0) == 0x80; cut--) {}
    c->start += cut;
    *text = at;
    *bytes = cut;
    return MTT_OK;
}

MTTDEF mtt_status mtt_corpus_next(mtt_corpus *c, const char **text, size_t *bytes)
{
    return c->jsonl ? mtt__corpus_next_line(c, text, bytes) : mtt__corpus_next_piece(c, text, bytes);
}

/* Three different places of every 20 are drawn: the first two are valid's, the third is test's. */
MTTDEF mtt_split mtt_split_of(uint64_t seed, uint64_t document)
{
    uint64_t stream = mtt__stream(MTT__SITE_SPLIT, 0, 0), draw = document / 20 * 3, place = document % 20;
    uint64_t first = mtt__random_below(seed, stream, draw, 20);
    uint64_t second = (first + 1 + mtt__random_below(seed, stream, draw + 1, 19)) % 20;
    uint64_t low = first < second ? first : second, high = first + second - low;
    uint64_t third = mtt__random_below(seed, stream, draw + 2, 18);
    third += third >= low;
    third += third >= high;
    return place == first || place == second ? MTT_VALID : place == third ? MTT_TEST : MTT_TRAIN;
}

static const char *const mtt__split_name[] = {"train", "valid", "test"};

/* The header of a token file; the checksum is of the ids. */
typedef struct mtt__token_header {
    char magic[8];
    uint32_t version, bits;
    uint64_t count, vocab;
    uint32_t crc, rest[7];
} mtt__token_header;

typedef struct mtt__prepare {
    mtt_env *env;
    const mtt_prepare_desc *desc;
    mtt_prepare_report report;
    const char *input; /* desc->input or its spool */
    char path[2048], spool_path[2048];
    mtt_tokenizer *tokenizer;
    mtt_bpe_trainer *trainer;
    mtt__crc_table crc;
    mtt__token_header header[MTT_SPLIT_COUNT];
    mtt__writer writer[MTT_SPLIT_COUNT], spool;
    int32_t *ids;
    size_t capacity;
} mtt__prepare;

typedef mtt_status (*mtt__document_fn)(mtt__prepare *p, mtt_split split, const char *text, size_t bytes);

static mtt_status mtt__prepare_train(mtt__prepare *p, mtt_split split, const char *text, size_t bytes)
{
    return split == MTT_TRAIN ? mtt_bpe_trainer_add(p->trainer, text, bytes) : MTT_OK;
}

static mtt_status mtt__prepare_encode(mtt__prepare *p, mtt_split split, const char *text, size_t bytes)
{
    mtt__token_header *header = &p->header[split];
    size_t i, count, width = header->bits / 8;
    mtt_status status = mtt__reserve(p->env, (void **)&p->ids, &p->capacity, mtt__add(bytes, 1), sizeof(*p->ids));
    if (!status) status = mtt_encode(p->tokenizer, text, bytes, p->ids, bytes, &count);
    if (status) return status;
    p->ids[count++] = mtt_tokenizer_end_of_text(p->tokenizer);
    for (i = 0; i < count && width == 2; i++) {
        uint16_t narrow = (uint16_t)p->ids[i];
        memcpy((char *)p->ids + 2 * i, &narrow, 2);
    }
    header->crc = mtt__crc32(&p->crc, header->crc, p->ids, count * width);
    header->count += count;
    p->report.documents[split]++;
    p->report.bytes[split] += bytes;
    return mtt__writer_put(&p->writer[split], p->ids, count * width);
}

static mtt_status mtt__prepare_pass(mtt__prepare *p, mtt__document_fn use)
{
    const char *text;
    size_t bytes;
    uint64_t document = 0;
    mtt_corpus *corpus;
    mtt_status status = mtt_corpus_open(p->env, p->input, p->desc->field, &corpus);
    if (!status && p->input == p->spool_path) corpus->name = strcmp(p->desc->input, "-") ? p->desc->input : "standard input";
    while (!status) {
        status = mtt_corpus_next(corpus, &text, &bytes);
        if (!status) status = use(p, mtt_split_of(p->desc->seed, document++), text, bytes);
    }
    mtt_corpus_close(corpus);
    if (status != MTT_END) return status;
    return document ? MTT_OK : mtt__fail(p->env, MTT_E_DATA, "%s has no text: give a file with some", p->input);
}

/* Loads the tokenizer, told by its first byte, or trains one. */
static mtt_status mtt__prepare_tokenizer(mtt__prepare *p)
{
    const char *path = p->desc->tokenizer;
    mtt__map map;
    mtt_status status;
    int first;
    if (!path) {
        status = p->desc->kind == MTT_BPE ? mtt_bpe_trainer_create(p->env, &p->trainer)
                                          : mtt_wordpiece_trainer_create(p->env, &p->desc->wordpiece, &p->trainer);
        if (!status) status = mtt__prepare_pass(p, mtt__prepare_train);
        return status ? status : mtt_bpe_trainer_finish(p->trainer, p->desc->vocab, &p->tokenizer);
    }
    status = mtt__map_open(p->env, path, PROT_READ, &map);
    if (status) return status;
    first = map.bytes ? map.data[0] : 0;
    mtt__map_close(&map);
    if (first == '#') return mtt_tokenizer_gpt2(p->env, path, &p->tokenizer);
    if (first == '[') return mtt_tokenizer_wordpiece(p->env, path, &p->desc->wordpiece, &p->tokenizer);
    return mtt_tokenizer_load(p->env, path, &p->tokenizer);
}

/* What is read once only is kept, as it comes, for the second pass. */
static mtt_status mtt__prepare_input(mtt__prepare *p)
{
    struct stat info;
    mtt__text name;
    mtt_corpus *c = NULL;
    mtt_status status;
    p->input = p->desc->input;
    if (p->desc->tokenizer) return MTT_OK;
    if (strcmp(p->input, "-") != 0 && (stat(p->input, &info) != 0 || S_ISREG(info.st_mode))) return MTT_OK;
    mtt__text_init(&name, p->spool_path, sizeof(p->spool_path));
    mtt__print(&name, "%s.spool", p->desc->output);
    status = mtt__writer_open(p->env, p->spool_path, &p->spool);
    if (!status) status = mtt_corpus_open(p->env, p->input, NULL, &c);
    for (p->input = p->spool_path; !status && c->size;) {
        status = mtt__writer_put(&p->spool, c->buffer, c->size);
        c->start = c->size = 0;
        if (!status) status = mtt__corpus_need(c, 1);
    }
    mtt_corpus_close(c);
    return status ? status : mtt__writer_commit(&p->spool);
}

/* The path of an output, valid until the next call. */
static const char *mtt__prepare_path(mtt__prepare *p, const char *part, const char *kind)
{
    mtt__text name;
    mtt__text_init(&name, p->path, sizeof(p->path));
    mtt__print(&name, "%s.%s%s", p->desc->output, part, kind);
    return p->path;
}

static mtt_status mtt__prepare_run(mtt__prepare *p)
{
    mtt_status status = MTT_OK;
    int i, vocab;
    for (i = 0; i < MTT_SPLIT_COUNT && !status; i++) {
        status = mtt__writer_open(p->env, mtt__prepare_path(p, mtt__split_name[i], ".tokens"), &p->writer[i]);
        if (!status) status = mtt__writer_put(&p->writer[i], &p->header[i], sizeof(p->header[i]));
    }
    if (!status) status = mtt__prepare_input(p);
    if (!status) status = mtt__prepare_tokenizer(p);
    if (status) return status;
    p->report.vocab = vocab = mtt_tokenizer_vocab(p->tokenizer);
    for (i = 0; i < MTT_SPLIT_COUNT; i++) {
        memcpy(p->header[i].magic, "MTTTOKEN", 8);
        p->header[i].version = 1;
        p->header[i].bits = vocab <= 65536 ? 16 : 32;
        p->header[i].vocab = (uint64_t)vocab;
    }
    status = mtt__prepare_pass(p, mtt__prepare_encode);
    if (!status && !p->report.documents[MTT_TRAIN])
        status = mtt__fail(p->env, MTT_E_DATA, "%s has %llu documents, none of which fell to the train split: give "
                           "more text or another seed", p->desc->input,
                           (unsigned long long)(p->report.documents[MTT_VALID] + p->report.documents[MTT_TEST]));
    if (!status) status = mtt_tokenizer_save(p->tokenizer, mtt__prepare_path(p, "tokenizer", ".json"));
    for (i = 0; i < MTT_SPLIT_COUNT && !status; i++) {
        p->report.tokens[i] = p->header[i].count;
        status = mtt__writer_patch(&p->writer[i], 0, &p->header[i], sizeof(p->header[i]));
        if (!status) status = mtt__writer_commit(&p->writer[i]);
    }
    return status;
}

MTTDEF mtt_status mtt_prepare(mtt_env *env, const mtt_prepare_desc *desc, mtt_prepare_report *report)
{
    mtt__prepare *p;
    mtt_status status;
    int i;
    if (report) memset(report, 0, sizeof(*report));
    if (!desc || !desc->input || !desc->output || !*desc->output || strlen(desc->output) > 2000)
        return mtt__fail(env, MTT_E_ARGUMENT, "an input and a prefix of 1 to 2000 bytes for the output are needed");
    p = (mtt__prepare *)mtt__alloc(env, 1, sizeof(*p));
    if (!p) return MTT_E_MEMORY;
    p->env = env;
    p->desc = desc;
    mtt__crc_init(&p->crc);
    status = mtt__prepare_run(p);
    for (i = 0; i < MTT_SPLIT_COUNT; i++) mtt__writer_abort(&p->writer[i]);
    mtt__writer_abort(&p->spool);
    if (p->input == p->spool_path) unlink(p->spool_path);
    mtt_bpe_trainer_destroy(p->trainer);
    mtt_tokenizer_destroy(p->tokenizer);
    if (report && !status) *report = p->report;
    mtt__free(env, p->ids);
    mtt__free(env, p);
    return status;
}

/* ------------------------------------------------------------------------------------------------------------------
   >>batches
   ---------------------------------------------------------------------------------------------------------------- */

struct mtt_tokens {
    mtt_env *env;
    mtt__map map;
    const char *ids;
    uint64_t count;
    int vocab, width;
    char *path;
};

static mtt_status mtt__tokens_parse(mtt_tokens *t)
{
    static const uint32_t zero[7] = {0};
    mtt__token_header h;
    const char *fault = NULL;
    memset(&h, 0, sizeof(h));
    if (t->map.bytes >= sizeof(h)) memcpy(&h, t->map.data, sizeof(h));
    if (t->map.bytes < sizeof(h)) fault = "is shorter than the header of a token file";
    else if (memcmp(h.magic, "MTTTOKEN", 8) != 0) fault = "has not the mark of a token file";
    else if (h.version != 1 || memcmp(h.rest, zero, sizeof(zero)) != 0) fault = "is a token file of an unknown version";
    else if (h.bits != 16 && h.bits != 32) fault = "has ids of neither 16 nor 32 bits";
    else if (!h.vocab || h.vocab > (h.bits == 16 ? 65536 : INT32_MAX)) fault = "has an impossible vocabulary";
    else if (h.count != (t->map.bytes - sizeof(h)) / (h.bits / 8) || (t->map.bytes - sizeof(h)) % (h.bits / 8))
        fault = "has not the size that its header tells";
    if (fault) return mtt__fail(t->env, MTT_E_FORMAT, "%s %s: prepare it from text", t->path, fault);
    t->ids = t->map.data + sizeof(h);
    t->count = h.count;
    t->vocab = (int)h.vocab;
    t->width = (int)h.bits / 8;
    return MTT_OK;
}

MTTDEF mtt_status mtt_tokens_open(mtt_env *env, const char *path, mtt_tokens **out)
{
    size_t size = strlen(path) + 1;
    mtt_tokens *t = (mtt_tokens *)mtt__alloc(env, 1, mtt__add(sizeof(*t), size));
    mtt_status status;
    *out = NULL;
    if (!t) return MTT_E_MEMORY;
    t->env = env;
    t->path = (char *)memcpy(t + 1, path, size);
    status = mtt__map_open(env, path, PROT_READ, &t->map);
    if (!status) status = mtt__tokens_parse(t);
    if (status) mtt_tokens_close(t);
    else *out = t;
    return status;
}

MTTDEF void mtt_tokens_close(mtt_tokens *t)
{
    if (!t) return;
    mtt__map_close(&t->map);
    mtt__free(t->env, t);
}

MTTDEF uint64_t mtt_tokens_count(const mtt_tokens *t)
{
    return t->count;
}

MTTDEF int mtt_tokens_vocab(const mtt_tokens *t)
{
    return t->vocab;
}

MTTDEF mtt_status mtt_tokens_read(const mtt_tokens *t, uint64_t first, size_t count, int32_t *ids)
{
    size_t i;
    if (first > t->count || count > t->count - first)
        return mtt__fail(t->env, MTT_E_ARGUMENT, "%s has %llu tokens, and %zu from %llu on were wanted: read fewer",
                         t->path, (unsigned long long)t->count, count, (unsigned long long)first);
    for (i = 0; i < count; i++) {
        uint32_t id = 0;
        memcpy(&id, t->ids + (first + i) * (uint64_t)t->width, (size_t)t->width);
        if (id >= (uint32_t)t->vocab)
            return mtt__fail(t->env, MTT_E_FORMAT, "%s: token %llu is %u, outside the vocabulary of %d: prepare again",
                             t->path, (unsigned long long)(first + i), (unsigned)id, t->vocab);
        ids[i] = (int32_t)id;
    }
    return MTT_OK;
}

MTTDEF mtt_status mtt_batches_init(mtt_env *env, mtt_batches *batches, const mtt_tokens *tokens, int batch, int seq_len,
                                   uint64_t seed, int sequential)
{
    memset(batches, 0, sizeof(*batches));
    if (!tokens || batch < 1 || seq_len < 1 || batch > INT_MAX / seq_len)
        return mtt__fail(env, MTT_E_ARGUMENT, "%d sequences of %d tokens are no batch: both must be 1 or more, and their product "
                         "below 2^31", batch, seq_len);
    if (tokens->count <= (uint64_t)seq_len)
        return mtt__fail(env, MTT_E_DATA, "%s has %llu tokens, a sequence of %d needs at least %llu: lower --seq-len or "
                         "give more text", tokens->path, (unsigned long long)tokens->count, seq_len,
                         (unsigned long long)seq_len + 1);
    batches->tokens = tokens;
    batches->batch = batch;
    batches->seq_len = seq_len;
    batches->seed = seed;
    batches->sequential = sequential;
    batches->sequences = (tokens->count - 1) / (uint64_t)seq_len;
    return MTT_OK;
}

/* Place `index` of the permutation of 0..n-1 that (seed, epoch) gives, in constant memory: a Feistel network on the
   next even number of bits (Luby and Rackoff 1988), walked until it comes back below n (Black and Rogaway 2002). */
static uint64_t mtt__permute(uint64_t seed, uint64_t epoch, uint64_t index, uint64_t n)
{
    uint64_t stream = mtt__stream(MTT__SITE_SHUFFLE, 0, epoch), round;
    unsigned half = 1;
    while (half < 32 && n > (uint64_t)1 << half * 2) half++;
    do {
        uint64_t mask = ((uint64_t)1 << half) - 1, left = index >> half, right = index & mask;
        for (round = 0; round < 6; round++) {
            uint64_t mixed = left ^ mtt__random_below(seed, stream, right | round << 32, mask + 1);
            left = right;
            right = mixed;
        }
        index = left << half | right;
    } while (index >= n);
    return index;
}

MTTDEF mtt_status mtt_batches_next(mtt_batches *b, int32_t *tokens, int32_t *targets)
{
    uint64_t cursor = b->cursor, sequence;
    size_t row, i, length = (size_t)b->seq_len;
    mtt_status status = MTT_OK;
    if (b->sequential && cursor >= b->sequences) return MTT_END;
    for (row = 0; row < (size_t)b->batch && !status; row++, tokens += length, targets += length) {
        if (b->sequential && cursor >= b->sequences) {
            for (i = 0; i < length; i++) tokens[i] = 0, targets[i] = -1;
            continue;
        }
        sequence = cursor % b->sequences;
        if (!b->sequential) sequence = mtt__permute(b->seed, cursor / b->sequences, sequence, b->sequences);
        status = mtt_tokens_read(b->tokens, sequence * length, length, tokens);
        if (!status) status = mtt_tokens_read(b->tokens, sequence * length + 1, length, targets);
        cursor++;
    }
    if (!status) b->cursor = cursor;
    return status;
}
/* ------------------------------------------------------------------------------------------------------------------
   >>checkpoint
   ---------------------------------------------------------------------------------------------------------------- */

/* safetensors: a length of 8 bytes, that many bytes of JSON, the data of the tensors one after another without gaps.
   Everything that the reference reader of Hugging Face refuses is refused here, and duplicates and excess with it. */
enum {
    MTT__ST_HEADER = 16 << 20, /* bytes of JSON */
    MTT__ST_ENTRIES = 1 << 17, /* tensors, and as many pairs of metadata */
    MTT__ST_NAME = 512,
    MTT__ST_RANK = 8
};

/* A tensor of a file by its name, or, with its value alone, a pair of the metadata. */
typedef struct mtt__st_entry {
    mtt__slice key, value;
    int dtype, rank;
    uint64_t shape[MTT__ST_RANK], begin, end;
    const unsigned char *data;
    size_t bytes;
} mtt__st_entry;

typedef struct mtt__st {
    mtt_env *env;
    const char *path; /* the caller's */
    mtt__map map;
    const unsigned char *data;
    char *header; /* a copy, its escapes undone */
    mtt__st_entry *entries, *pairs; /* by key */
    size_t count, capacity, pair_count, pair_capacity;
} mtt__st;

#define MTT__ST_REMEDY "the file is damaged or cut off: copy or save it again"

/* 1 if the bytes are UTF-8: no surrogates, nothing overlong, nothing above U+10FFFF. */
static int mtt__utf8_valid(const char *text, size_t bytes)
{
    const unsigned char *at = (const unsigned char *)text, *end = at + bytes;
    int size;
    for (; at < end; at += size) {
        size = 1;
        if (*at >= 0x80 && mtt__utf8_get(at, end, &size) == MTT__NONE) return 0;
    }
    return 1;
}

static int mtt__st_by_key(const void *a, const void *b)
{
    const mtt__slice *x = &((const mtt__st_entry *)a)->key, *y = &((const mtt__st_entry *)b)->key;
    int order = memcmp(x->at, y->at, x->size < y->size ? x->size : y->size);
    return order ? order : (x->size > y->size) - (x->size < y->size);
}

static int mtt__st_by_place(const void *a, const void *b)
{
    const mtt__st_entry *x = (const mtt__st_entry *)a, *y = (const mtt__st_entry *)b;
    return x->begin != y->begin ? (x->begin > y->begin) - (x->begin < y->begin) : (x->end > y->end) - (x->end < y->end);
}

static const mtt__st_entry *mtt__st_search(const mtt__st_entry *entries, size_t count, const char *name, size_t size)
{
    mtt__st_entry key;
    key.key.at = name;
    key.key.size = size;
    return count ? (const mtt__st_entry *)bsearch(&key, entries, count, sizeof(key), mtt__st_by_key) : NULL;
}

/* A fault of the header: the first one sticks, and `at` is where it is. */
static void mtt__st_fault(mtt__json *j, const char *at, const char *what)
{
    if (!j->fault) j->at = at;
    mtt__json_fail(j, what);
}

static int mtt__st_string(mtt__json *j, mtt__slice *out)
{
    int ok = mtt__json_string(j, out);
    if (ok) out->size = mtt__json_unescape(*out, (char *)out->at);
    return ok;
}

static int mtt__st_key(mtt__json *j, int *first, mtt__slice *key)
{
    int ok = mtt__json_key(j, first, key);
    if (ok) key->size = mtt__json_unescape(*key, (char *)key->at);
    return ok;
}

static int mtt__st_numbers(mtt__json *j, uint64_t *out, int capacity)
{
    int first = 1, count = 0;
    mtt__json_begin(j, '[');
    while (mtt__json_item(j, &first)) {
        if (count == capacity) return mtt__json_fail(j, "a shape above rank 8 or more than two offsets");
        if (!mtt__json_u64(j, &out[count++])) return 0;
    }
    return count;
}

/* {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}; unknown fields are passed over. */
static void mtt__st_tensor_info(mtt__json *j, mtt__st_entry *e)
{
    static const char *const fields[] = {"dtype", "shape", "data_offsets"};
    uint64_t offsets[2] = {0, 0};
    mtt__slice key, text;
    int first = 1, seen = 0, two = 0, field;
    mtt__json_begin(j, '{');
    while (mtt__st_key(j, &first, &key)) {
        for (field = 0; field < 3 && !mtt__slice_is(key, fields[field]);) field++;
        if (field < 3 && seen & 1 << field) mtt__json_fail(j, "a field of a tensor that comes twice");
        seen |= 1 << field;
        if (field == 0 && mtt__st_string(j, &text)) {
            for (e->dtype = 0; e->dtype < (int)MTT__LENGTH(mtt__dtype_name); e->dtype++)
                if (mtt__slice_is(text, mtt__dtype_name[e->dtype])) break;
            if (e->dtype == (int)MTT__LENGTH(mtt__dtype_name))
                mtt__st_fault(j, text.at, "a dtype that is none of F32, BF16, F16, I32, U8");
        } else if (field == 1) e->rank = mtt__st_numbers(j, e->shape, MTT__ST_RANK);
        else if (field == 2) two = mtt__st_numbers(j, offsets, 2);
        else if (field == 3) mtt__json_skip(j);
    }
    if ((seen & 7) != 7 || two != 2) mtt__json_fail(j, "a tensor without dtype, shape or two data_offsets");
    e->begin = offsets[0];
    e->end = offsets[1];
}

/* Appends an entry to an array of them; NULL when it cannot be had. */
static mtt__st_entry *mtt__st_add(mtt__st *st, mtt__json *j, mtt__slice key, mtt__st_entry **array, size_t *count, size_t *room)
{
    mtt__st_entry *e;
    if (*count == MTT__ST_ENTRIES) mtt__json_fail(j, "more than 131072 tensors or entries of metadata");
    if (mtt__reserve(st->env, (void **)array, room, *count + 1, sizeof(*e)) != MTT_OK) return NULL;
    e = *array + (*count)++;
    memset(e, 0, sizeof(*e));
    e->key = key;
    return e;
}

static mtt_status mtt__st_metadata_in(mtt__st *st, mtt__json *j)
{
    int first = 1;
    mtt__slice key;
    mtt__json_begin(j, '{');
    while (mtt__st_key(j, &first, &key)) {
        mtt__st_entry *e = mtt__st_add(st, j, key, &st->pairs, &st->pair_count, &st->pair_capacity);
        if (!e) return MTT_E_MEMORY;
        mtt__st_string(j, &e->value);
    }
    return MTT_OK;
}

/* Tensors lie in the data one after another from 0 to the end, each as large as its shape says. */
static void mtt__st_layout(mtt__st *st, mtt__json *j, uint64_t data_bytes)
{
    uint64_t end = 0;
    size_t i;
    int k;
    if (st->count) qsort(st->entries, st->count, sizeof(*st->entries), mtt__st_by_place);
    for (i = 0; i < st->count && !j->fault; i++) {
        mtt__st_entry *e = &st->entries[i];
        uint64_t size = mtt__dtype_bytes[e->dtype];
        for (k = 0; k < e->rank; k++) {
            if (e->shape[k] && size > UINT64_MAX / e->shape[k]) mtt__st_fault(j, e->key.at, "a size that overflows");
            size *= e->shape[k];
        }
        if (e->end < e->begin) mtt__st_fault(j, e->key.at, "an end before its begin");
        if (e->begin != end) mtt__st_fault(j, e->key.at, "a hole or an overlap in the data");
        if (e->end - e->begin != size) mtt__st_fault(j, e->key.at, "data_offsets that do not fit the shape");
        if (e->end > data_bytes) mtt__st_fault(j, e->key.at, "data that is missing at the end of the file");
        e->bytes = (size_t)size;
        if (st->data && !j->fault) e->data = st->data + e->begin;
        end = e->end;
    }
    if (end != data_bytes) mtt__json_fail(j, "tensors that end before the file: extra bytes follow");
}

static void mtt__st_index(mtt__json *j, mtt__st_entry *entries, size_t count)
{
    size_t i;
    if (count) qsort(entries, count, sizeof(*entries), mtt__st_by_key);
    for (i = 1; i < count; i++)
        if (!mtt__st_by_key(&entries[i - 1], &entries[i])) mtt__st_fault(j, entries[i].key.at, "a name that comes twice");
}

/* Reads a header, which changes where it stands. Faults of every kind are told here, with a glance at the place. */
static mtt_status mtt__st_parse(mtt__st *st, char *header, size_t size, uint64_t data_bytes)
{
    mtt__json j;
    mtt__slice key;
    int first = 1, metadata = 0;
    mtt__json_init(&j, header, size);
    if (size > MTT__ST_HEADER) mtt__json_fail(&j, "a header above 16 MiB");
    if (!mtt__utf8_valid(header, size)) mtt__json_fail(&j, "a header that is not UTF-8");
    mtt__json_begin(&j, '{');
    while (mtt__st_key(&j, &first, &key)) {
        mtt__st_entry *e;
        if (mtt__slice_is(key, "__metadata__")) {
            if (metadata++) mtt__json_fail(&j, "__metadata__ comes twice");
            if (mtt__st_metadata_in(st, &j)) return MTT_E_MEMORY;
            continue;
        }
        e = mtt__st_add(st, &j, key, &st->entries, &st->count, &st->capacity);
        if (!e) return MTT_E_MEMORY;
        if (e->key.size > MTT__ST_NAME) mtt__json_fail(&j, "a name above 512 bytes");
        mtt__st_tensor_info(&j, e);
    }
    mtt__json_peek(&j);
    if (j.at != j.end) mtt__json_fail(&j, "something after the header's object");
    if (!j.fault) mtt__st_layout(st, &j, data_bytes);
    if (!j.fault) mtt__st_index(&j, st->entries, st->count);
    if (!j.fault) mtt__st_index(&j, st->pairs, st->pair_count);
    if (!j.fault) return MTT_OK;
    return mtt__fail(st->env, MTT_E_FORMAT, "%s: byte %zu: %s (at \"%.*s\"); " MTT__ST_REMEDY, st->path,
                     (size_t)(j.at - j.begin) + 8, j.fault, (int)(j.end - j.at < 80 ? j.end - j.at : 80), j.at);
}

static void mtt__st_close(mtt__st *st)
{
    mtt__free(st->env, st->header);
    mtt__free(st->env, st->entries);
    mtt__free(st->env, st->pairs);
    mtt__map_close(&st->map);
    memset(st, 0, sizeof(*st));
}

static mtt_status mtt__st_open(mtt_env *env, const char *path, mtt__st *st)
{
    mtt_status status;
    uint64_t size = 0;
    memset(st, 0, sizeof(*st));
    st->env = env;
    st->path = path;
    status = mtt__map_open(env, path, PROT_READ, &st->map);
    if (status) return status;
    if (st->map.bytes >= 8) memcpy(&size, st->map.data, 8);
    if (st->map.bytes < 8 || size > st->map.bytes - 8)
        status = mtt__fail(env, MTT_E_FORMAT, "%s: a header of %llu bytes does not fit a file of %zu; " MTT__ST_REMEDY, path,
                           (unsigned long long)size, st->map.bytes);
    if (!status && (st->header = (char *)mtt__alloc_raw(env, (size_t)size + 1)) == NULL) status = MTT_E_MEMORY;
    if (!status) {
        st->data = (const unsigned char *)st->map.data + 8 + size;
        memcpy(st->header, st->map.data + 8, (size_t)size);
        status = mtt__st_parse(st, st->header, (size_t)size, st->map.bytes - 8 - size);
    }
    if (status) mtt__st_close(st);
    return status;
}

/* NULL if there is no tensor of that name. */
static const mtt__st_entry *mtt__st_find(const mtt__st *st, const char *name)
{
    return mtt__st_search(st->entries, st->count, name, strlen(name));
}

static int mtt__st_metadata(const mtt__st *st, const char *name, mtt__slice *value)
{
    const mtt__st_entry *e = mtt__st_search(st->pairs, st->pair_count, name, strlen(name));
    if (e) *value = e->value;
    return e != NULL;
}

/* Compares every tensor with its checksum, eight hexadecimal digits under "crc32." and its name in the metadata. A file
   without any, as other programs write, passes. */
static mtt_status mtt__st_verify(mtt_env *env, const mtt__st *st)
{
    mtt__crc_table table;
    size_t i, found = 0;
    mtt__crc_init(&table);
    for (i = 0; i < st->count; i++) {
        const mtt__st_entry *e = &st->entries[i], *sum;
        char key[MTT__ST_NAME + 8] = "crc32.";
        unsigned high = 0, low = 0;
        memcpy(key + 6, e->key.at, e->key.size);
        sum = mtt__st_search(st->pairs, st->pair_count, key, e->key.size + 6);
        if (!sum && !found) continue;
        if (sum && found++ == i && sum->value.size == 8 && mtt__hex(sum->value.at, &high) && mtt__hex(sum->value.at + 4, &low) &&
            (high << 16 | low) == mtt__crc32(&table, 0, e->data, e->bytes))
            continue;
        return mtt__fail(env, MTT_E_FORMAT, "%s: tensor %.*s or the one before does not fit its checksum; " MTT__ST_REMEDY,
                         st->path, (int)e->key.size, e->key.at);
    }
    return MTT_OK;
}

/* What is written, in this order, so wide types should come first, to be aligned. `read` gives `bytes` bytes from `offset`
   on of the tensor at that place of the list. */
typedef struct mtt__st_tensor {
    const char *name;
    int dtype, rank;
    uint64_t shape[MTT__ST_RANK];
} mtt__st_tensor;

typedef struct mtt__st_text {
    const char *key, *value;
} mtt__st_text;

typedef mtt_status (*mtt__st_read_fn)(void *user, size_t tensor, size_t offset, void *buffer, size_t bytes);

typedef struct mtt__st_saving {
    const mtt__st_tensor *tensors;
    const mtt__st_text *metadata;
    size_t count, pairs, header_bytes, total; /* bytes of header and data */
    char *header;
    uint32_t *sums; /* checksums of the tensors */
    mtt__crc_table crc;
    mtt__writer writer;
    float chunk[1 << 18]; /* of any type, aligned for the widest */
} mtt__st_saving;

static size_t mtt__st_tensor_bytes(const mtt__st_tensor *t)
{
    size_t bytes = mtt__dtype_bytes[t->dtype];
    int k;
    for (k = 0; k < t->rank; k++) bytes = mtt__mul(bytes, t->shape[k]);
    return bytes;
}

/* The header, its length before it, blanks behind it so that the data is aligned. */
static void mtt__st_print_header(mtt__st_saving *s, size_t room)
{
    char name[MTT__ST_NAME + 8];
    uint64_t size;
    size_t i, begin = 0, end;
    int k;
    mtt__text text, key;
    mtt__text_init(&text, s->header + 8, room - 8);
    mtt__print(&text, "{\"__metadata__\":{\"format\":\"pt\"");
    for (i = 0; i < s->pairs; i++) {
        mtt__print(&text, ",");
        mtt__print_json_string(&text, "\"", s->metadata[i].key, strlen(s->metadata[i].key));
        mtt__print(&text, ":");
        mtt__print_json_string(&text, "\"", s->metadata[i].value, strlen(s->metadata[i].value));
    }
    for (i = 0; i < s->count; i++) {
        mtt__text_init(&key, name, sizeof(name));
        mtt__print(&key, "crc32.%s", s->tensors[i].name);
        mtt__print(&text, ",");
        mtt__print_json_string(&text, "\"", name, key.size);
        mtt__print(&text, ":\"%08x\"", (unsigned)s->sums[i]);
    }
    mtt__print(&text, "}");
    for (i = 0; i < s->count; i++, begin = end) {
        const mtt__st_tensor *t = &s->tensors[i];
        end = mtt__add(begin, mtt__st_tensor_bytes(t));
        mtt__print(&text, ",");
        mtt__print_json_string(&text, "\"", t->name, strlen(t->name));
        mtt__print(&text, ":{\"dtype\":\"%s\",\"shape\":[", mtt__dtype_name[t->dtype]);
        for (k = 0; k < t->rank; k++) mtt__print(&text, "%s%llu", k ? "," : "", (unsigned long long)t->shape[k]);
        mtt__print(&text, "],\"data_offsets\":[%zu,%zu]}", begin, end);
    }
    mtt__print(&text, "}");
    while ((text.size + 8) % 64) mtt__print(&text, " ");
    size = text.size;
    memcpy(s->header, &size, 8);
    s->header_bytes = text.size + 8;
    s->total = begin;
}

/* Copies the data, then writes the header a second time, with the checksums. */
static mtt_status mtt__st_write(mtt__st_saving *s, size_t room, mtt__st_read_fn read, void *user)
{
    mtt_status status = mtt__writer_put(&s->writer, s->header, s->header_bytes);
    size_t i, done, part;
    for (i = 0; i < s->count && !status; i++) {
        size_t bytes = mtt__st_tensor_bytes(&s->tensors[i]);
        for (done = 0; done < bytes && !status; done += part) {
            part = bytes - done < sizeof(s->chunk) ? bytes - done : sizeof(s->chunk);
            status = read(user, i, done, s->chunk, part);
            if (status) break;
            s->sums[i] = mtt__crc32(&s->crc, s->sums[i], s->chunk, part);
            status = mtt__writer_put(&s->writer, s->chunk, part);
        }
    }
    mtt__st_print_header(s, room);
    if (!status) status = mtt__writer_patch(&s->writer, 0, s->header, s->header_bytes);
    return status ? status : mtt__writer_commit(&s->writer);
}

/* Replaces the file. The header is given to the reader before anything is written: what cannot be loaded is not saved.
   `metadata` needs no "format"; that is written for the sake of Python. */
static mtt_status mtt__st_save(mtt_env *env, const char *path, const mtt__st_tensor *tensors, size_t count, mtt__st_read_fn read,
                               void *user, const mtt__st_text *metadata, size_t pairs)
{
    mtt__st_saving *s = (mtt__st_saving *)mtt__alloc(env, 1, sizeof(*s));
    mtt_status status = MTT_OK;
    mtt__st check;
    size_t i, room = 256;
    if (!s) return MTT_E_MEMORY;
    memset(&check, 0, sizeof(check));
    check.env = env;
    check.path = path;
    mtt__crc_init(&s->crc);
    s->tensors = tensors;
    s->metadata = metadata;
    s->count = count;
    s->pairs = pairs;
    for (i = 0; i < count; i++) {
        int dtype = tensors[i].dtype, rank = tensors[i].rank;
        if (dtype < 0 || dtype >= (int)MTT__LENGTH(mtt__dtype_name) || rank < 0 || rank > MTT__ST_RANK) status = MTT_E_FORMAT;
        room += 12 * strlen(tensors[i].name) + 320;
    }
    for (i = 0; i < pairs; i++) room += 6 * (strlen(metadata[i].key) + strlen(metadata[i].value)) + 8;
    s->header = (char *)mtt__alloc_raw(env, room);
    s->sums = (uint32_t *)mtt__alloc(env, count, sizeof(*s->sums));
    if (!s->header || !s->sums) status = MTT_E_MEMORY;
    if (!status) {
        mtt__st_print_header(s, room);
        status = mtt__st_parse(&check, s->header + 8, s->header_bytes - 8, s->total);
        mtt__st_close(&check);
        mtt__st_print_header(s, room);
    }
    if (status == MTT_E_FORMAT)
        status = mtt__fail(env, MTT_E_ARGUMENT, "%s: tensors and metadata need different names in UTF-8, of at most 512 bytes, "
                           "known dtypes, ranks up to 8, 16 MiB of header at most and sizes below 2^64", path);
    if (!status) status = mtt__writer_open(env, path, &s->writer);
    if (!status) status = mtt__writer_expect(&s->writer, s->header_bytes + s->total);
    if (!status) status = mtt__st_write(s, room, read, user);
    mtt__writer_abort(&s->writer);
    mtt__free(env, s->header);
    mtt__free(env, s->sums);
    mtt__free(env, s);
    return status;
}

/* ---- a trainer's checkpoint ---- */

/* The whole numbers of a checkpoint's metadata besides the model's fields: member, name, largest value, 1 =
   the loader's. */
#define MTT__CHECKPOINT_NUMBERS(X)                                                                       \
    X(step, "step", INT64_MAX, 0)                                                                        \
    X(micro_batch, "micro_batch", INT64_MAX, 0)                                                          \
    X(updates, "updates", INT64_MAX, 0)                                                                  \
    X(good_steps, "good_steps", INT32_MAX, 0)                                                            \
    X(loss_scale_bits, "loss_scale_bits", 0x7f7fffff, 0)                                                 \
    X(seed, "seed", UINT64_MAX, 0)                                                                       \
    X(cursor, "batches.cursor", UINT64_MAX, 1)                                                           \
    X(batches_seed, "batches.seed", UINT64_MAX, 1)                                                       \
    X(seq_len, "batches.seq_len", UINT64_MAX, 1)                                                         \
    X(sequences, "batches.sequences", UINT64_MAX, 1)
#define MTT__NUMBER_MEMBER(member, name, most, loader) uint64_t member;
typedef struct mtt__checkpoint_numbers {
    MTT__CHECKPOINT_NUMBERS(MTT__NUMBER_MEMBER)
} mtt__checkpoint_numbers;

enum { MTT__CHECKPOINT_PAIRS = 32, MTT__CHECKPOINT_NAME = 56 };

typedef struct mtt__checkpoint {
    mtt_trainer *t;
    mtt__st_tensor *tensors; /* of each parameter in turn what the optimizer keeps: see MTT__KEPT */
    char (*names)[MTT__CHECKPOINT_NAME];
    mtt__st_text pairs[MTT__CHECKPOINT_PAIRS];
    char values[MTT__CHECKPOINT_PAIRS][40];
    size_t tensor_count, pair_count;
} mtt__checkpoint;

/* A piece of the file's tensor of that number. The file has FP32 of every state: what the compact one decodes
   to encodes to the same bits, and any other state can take it over. */
static mtt_status mtt__checkpoint_read(void *user, size_t index, size_t offset, void *buffer, size_t bytes)
{
    mtt_trainer *t = ((mtt__checkpoint *)user)->t;
    const mtt__parameter *q = &t->schedule->programs[MTT__TRAIN].parameters[index / MTT__KEPT_KINDS];
    return mtt__get_kept(t, q, (int)(index % MTT__KEPT_KINDS), (int64_t)(offset / sizeof(float)),
                         (int64_t)(bytes / sizeof(float)), (float *)buffer);
}

MTT__PRINTF(3, 4) static void mtt__checkpoint_pair(mtt__checkpoint *c, const char *key, const char *format, ...)
{
    mtt__text text;
    va_list args;
    mtt__text_init(&text, c->values[c->pair_count], sizeof(c->values[0]));
    va_start(args, format);
    mtt__print_va(&text, format, args);
    va_end(args);
    c->pairs[c->pair_count].key = key;
    c->pairs[c->pair_count].value = c->values[c->pair_count];
    c->pair_count++;
}

/* A checksum of one pair. Those of all pairs are combined by exclusive or, since a reader sorts them. */
static uint32_t mtt__pair_crc(const mtt__crc_table *table, const char *key, size_t key_size, const char *value, size_t size)
{
    return mtt__crc32(table, mtt__crc32(table, (uint32_t)key_size, key, key_size), value, size);
}

/* Appends the checksum of the pairs so far. */
static void mtt__checkpoint_seal(mtt__checkpoint *c)
{
    mtt__crc_table table;
    uint32_t crc = 0;
    size_t i;
    mtt__crc_init(&table);
    for (i = 0; i < c->pair_count; i++)
        crc ^= mtt__pair_crc(&table, c->pairs[i].key, strlen(c->pairs[i].key), c->pairs[i].value, strlen(c->pairs[i].value));
    mtt__checkpoint_pair(c, "crc32", "%08x", (unsigned)crc);
}

/* Names and shapes of the tensors that a checkpoint holds. */
static mtt_status mtt__checkpoint_list(mtt__checkpoint *c, mtt_trainer *t)
{
#define MTT__KEPT_PREFIX(kind, name, prefix, exists) prefix,
    static const char *const prefixes[] = {MTT__KEPT(MTT__KEPT_PREFIX)};
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    size_t i;
    memset(c, 0, sizeof(*c));
    c->t = t;
    c->tensor_count = MTT__KEPT_KINDS * (size_t)p->parameter_count;
    c->tensors = (mtt__st_tensor *)mtt__alloc(t->env, c->tensor_count, sizeof(*c->tensors));
    c->names = (char(*)[MTT__CHECKPOINT_NAME])mtt__alloc(t->env, c->tensor_count, sizeof(*c->names));
    if (!c->tensors || !c->names) return MTT_E_MEMORY;
    for (i = 0; i < c->tensor_count; i++) {
        const mtt__parameter *q = &p->parameters[i / MTT__KEPT_KINDS];
        mtt__text text;
        mtt__text_init(&text, c->names[i], MTT__CHECKPOINT_NAME);
        mtt__print(&text, "%s%s", prefixes[i % MTT__KEPT_KINDS], q->weight->name);
        c->tensors[i].name = c->names[i];
        c->tensors[i].dtype = MTT_F32;
        c->tensors[i].rank = q->shape[1] ? 2 : 1;
        c->tensors[i].shape[0] = (uint64_t)q->shape[0];
        c->tensors[i].shape[1] = (uint64_t)q->shape[1];
    }
    return MTT_OK;
}

static void mtt__checkpoint_release(mtt__checkpoint *c)
{
    mtt__free(c->t->env, c->tensors);
    mtt__free(c->t->env, c->names);
}

/* A model's field as a checkpoint has it: -1 for those that may differ. */
static int mtt__checkpoint_field(const mtt_model_desc *m, const mtt_field *f)
{
    if (f->offset == offsetof(mtt_model_desc, dropout)) return -1;
    if (f->offset == offsetof(mtt_model_desc, max_seq) && m->positions != MTT_POSITIONS_LEARNED) return 0;
    return (int)mtt__field_get(m, f);
}

static void mtt__checkpoint_metadata(mtt__checkpoint *c, const mtt_counters *counters, const mtt_batches *batches)
{
    const mtt_trainer *t = c->t;
    const mtt_model_desc *m = &t->schedule->model;
    mtt__checkpoint_numbers n;
    size_t i;
    memset(&n, 0, sizeof(n));
    n.step = (uint64_t)counters->steps;
    n.micro_batch = (uint64_t)t->micro_batch;
    n.updates = (uint64_t)counters->updates;
    n.good_steps = (uint64_t)counters->good_steps;
    n.loss_scale_bits = mtt__float_bits(counters->loss_scale);
    n.seed = t->optim.seed;
    if (batches) {
        n.cursor = batches->cursor;
        n.batches_seed = batches->seed;
        n.seq_len = (uint64_t)batches->seq_len;
        n.sequences = batches->sequences;
    }
    for (i = 0; i < MTT__LENGTH(mtt__model_field); i++) {
        int value = mtt__checkpoint_field(m, &mtt__model_field[i]);
        if (value >= 0) mtt__checkpoint_pair(c, mtt__model_field[i].name, "%d", value);
    }
#define MTT__NUMBER_PAIR(member, name, most, loader) \
    if (!loader || batches) mtt__checkpoint_pair(c, name, "%llu", (unsigned long long)n.member);
    MTT__CHECKPOINT_NUMBERS(MTT__NUMBER_PAIR)
    mtt__checkpoint_pair(c, "precision", "%s", mtt__precision_name[t->schedule->policy.precision]);
    mtt__checkpoint_seal(c);
}

MTTDEF mtt_status mtt_save(mtt_trainer *t, const char *path, const mtt_batches *batches)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    mtt__checkpoint c;
    mtt_counters counters;
    mtt_status status = mtt__checkpoint_list(&c, t);
    if (!status) status = t->backend.download(t->context, &counters, p->counters->data, sizeof(counters));
    if (!status) {
        mtt__checkpoint_metadata(&c, &counters, batches);
        status = mtt__st_save(t->env, path, c.tensors, c.tensor_count, mtt__checkpoint_read, &c, c.pairs, c.pair_count);
    }
    mtt__checkpoint_release(&c);
    return status;
}

/* A whole number among the metadata. */
static mtt_status mtt__checkpoint_number(mtt_env *env, const mtt__st *st, const char *key, uint64_t most, uint64_t *value)
{
    mtt__slice text;
    mtt__json j;
    if (!mtt__st_metadata(st, key, &text))
        return mtt__fail(env, MTT_E_MISMATCH, "%s has no \"%s\" in its metadata: it is not a checkpoint of mtt_save", st->path,
                         key);
    mtt__json_init(&j, text.at, text.size);
    if (!mtt__json_u64(&j, value) || j.at != j.end)
        return mtt__fail(env, MTT_E_FORMAT, "%s: \"%s\" in the metadata is not a whole number", st->path, key);
    if (*value <= most) return MTT_OK;
    return mtt__fail(env, MTT_E_FORMAT, "%s: \"%s\" in the metadata is out of range", st->path, key);
}

/* Compares the metadata with their checksum. Pairs that belong to tensors or to the format are not part of
   it. */
static mtt_status mtt__checkpoint_check_pairs(mtt_env *env, const mtt__st *st)
{
    mtt__crc_table table;
    mtt__slice sealed;
    uint32_t crc = 0;
    char expected[16];
    mtt__text text;
    size_t i;
    mtt__crc_init(&table);
    for (i = 0; i < st->pair_count; i++) {
        mtt__slice key = st->pairs[i].key, value = st->pairs[i].value;
        if ((key.size >= 5 && !memcmp(key.at, "crc32", 5)) || mtt__slice_is(key, "format")) continue;
        crc ^= mtt__pair_crc(&table, key.at, key.size, value.at, value.size);
    }
    mtt__text_init(&text, expected, sizeof(expected));
    mtt__print(&text, "%08x", (unsigned)crc);
    if (mtt__st_metadata(st, "crc32", &sealed) && mtt__slice_is(sealed, expected)) return MTT_OK;
    return mtt__fail(env, MTT_E_FORMAT, "%s: the metadata do not match their checksum; " MTT__ST_REMEDY, st->path);
}

static mtt_status mtt__checkpoint_check_model(const mtt_trainer *t, const mtt__st *st)
{
    size_t i;
    for (i = 0; i < MTT__LENGTH(mtt__model_field); i++) {
        const char *name = mtt__model_field[i].name;
        int expected = mtt__checkpoint_field(&t->schedule->model, &mtt__model_field[i]);
        uint64_t value;
        mtt_status status = expected < 0 ? MTT_OK : mtt__checkpoint_number(t->env, st, name, UINT64_MAX, &value);
        if (status) return status;
        if (expected >= 0 && value != (uint64_t)expected)
            return mtt__fail(t->env, MTT_E_MISMATCH, "%s has %s %llu, the model here %d: make them the same", st->path, name,
                             (unsigned long long)value, expected);
    }
    return MTT_OK;
}

static mtt_status mtt__checkpoint_check_tensors(const mtt__checkpoint *c, const mtt__st *st)
{
    size_t i;
    for (i = 0; i < c->tensor_count; i++) {
        const mtt__st_tensor *want = &c->tensors[i];
        const mtt__st_entry *e = mtt__st_find(st, want->name);
        int aligned = e && (uintptr_t)e->data % sizeof(float) == 0;
        if (!aligned || e->dtype != want->dtype || e->rank != want->rank || e->shape[0] != want->shape[0] ||
            (e->rank > 1 && e->shape[1] != want->shape[1]))
            return mtt__fail(c->t->env, MTT_E_MISMATCH, "%s: tensor %s is %s", st->path, want->name,
                             e ? "of another shape, type or alignment than the model's" : "missing");
    }
    return MTT_OK;
}

static mtt_status mtt__checkpoint_read_numbers(const mtt_trainer *t, const mtt__st *st, const mtt_batches *batches,
                                               mtt__checkpoint_numbers *n)
{
    mtt_status status = MTT_OK;
#define MTT__NUMBER_READ(member, name, most, loader) \
    if (!status && (!loader || batches)) status = mtt__checkpoint_number(t->env, st, name, most, &n->member);
    MTT__CHECKPOINT_NUMBERS(MTT__NUMBER_READ)
    if (!status && !n->loss_scale_bits)
        status = mtt__fail(t->env, MTT_E_FORMAT, "%s: the loss scale in the metadata is 0; " MTT__ST_REMEDY, st->path);
    if (!status && batches && (n->seq_len != (uint64_t)batches->seq_len || n->sequences != batches->sequences))
        status = mtt__fail(t->env, MTT_E_MISMATCH, "%s was trained on %llu sequences of %llu tokens, the data here has %llu of "
                           "%d: give the same token file and seq_len, or no batches", st->path,
                           (unsigned long long)n->sequences, (unsigned long long)n->seq_len,
                           (unsigned long long)batches->sequences, batches->seq_len);
    return status;
}

/* Takes over a checkpoint that is known to fit. */
static mtt_status mtt__checkpoint_load(mtt__checkpoint *c, const mtt__st *st, const mtt__checkpoint_numbers *n)
{
    mtt_trainer *t = c->t;
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    mtt_status status = MTT_OK;
    mtt_counters counters;
    size_t i;
    for (i = 0; i < c->tensor_count && !status; i++) {
        const mtt__st_entry *e = mtt__st_find(st, c->tensors[i].name);
        status = mtt__put_kept(t, &p->parameters[i / MTT__KEPT_KINDS], (int)(i % MTT__KEPT_KINDS), 0,
                               (int64_t)(e->bytes / sizeof(float)), (const float *)(const void *)e->data);
    }
    if (status) return status;
    memset(&counters, 0, sizeof(counters));
    counters.updates = (int64_t)n->updates;
    counters.good_steps = (int32_t)n->good_steps;
    counters.loss_scale = 1.0f;
    if (mtt__precisions[t->schedule->policy.precision].scaled)
        counters.loss_scale = mtt__bits_float((uint32_t)n->loss_scale_bits);
    t->step = counters.steps = (int64_t)n->step;
    t->micro_batch = (int64_t)n->micro_batch;
    t->optim.seed = n->seed;
    return t->backend.upload(t->context, p->counters->data, &counters, sizeof(counters));
}

MTTDEF mtt_status mtt_resume(mtt_trainer *t, const char *path, mtt_batches *batches)
{
    mtt__st st;
    mtt__checkpoint c;
    mtt__checkpoint_numbers n;
    mtt_status status = mtt__st_open(t->env, path, &st);
    if (status) return status;
    memset(&n, 0, sizeof(n));
    status = mtt__checkpoint_list(&c, t);
    if (!status) status = mtt__checkpoint_check_model(t, &st);
    if (!status) status = mtt__checkpoint_check_tensors(&c, &st);
    if (!status) status = mtt__checkpoint_read_numbers(t, &st, batches, &n);
    if (!status) status = mtt__checkpoint_check_pairs(t->env, &st);
    if (!status) status = mtt__st_verify(t->env, &st);
    if (!status) status = mtt__checkpoint_load(&c, &st, &n);
    if (!status && batches) {
        batches->cursor = n.cursor;
        batches->seed = n.batches_seed;
    }
    mtt__checkpoint_release(&c);
    mtt__st_close(&st);
    return status;
}

/* ----------------------------------------------------------------------------------------------------------
   >>report
   ---------------------------------------------------------------------------------------------------------- */

/* Names of operands, without the small state that most operations read. */
static void mtt__print_operands(mtt__text *text, mtt_tensor *const *tensors, int count)
{
    int i, shown = 0;
    for (i = 0; i < count; i++) {
        const char *name = tensors[i] ? tensors[i]->name : "control";
        if (!strcmp(name, "control") || !strcmp(name, "counters") || !strcmp(name, "ranges")) continue;
        mtt__print(text, "%s%s", shown++ ? " " : "", name);
    }
}

MTTDEF void mtt_schedule_print(const mtt_schedule *s, mtt_write_fn write, void *user)
{
    const mtt__program *p = &s->programs[MTT__TRAIN];
    char line[1024];
    int i;
    for (i = 0; i < p->op_count; i++) {
        const mtt_op *op = &p->ops[i];
        mtt__text text;
        mtt__text_init(&text, line, sizeof(line) - 1);
        mtt__print(&text, "%4d %-9s%-6s %9.2f MiB  %-25s ", i, mtt_phase_name(op->phase), op->recomputed ? "again" : "",
                   (double)op->live_bytes / 1048576, mtt_op_name(op->kind));
        mtt__print_operands(&text, op->operands, op->inputs);
        if (op->parameters) mtt__print(&text, "%s%d gradients", op->inputs ? " " : "", op->parameters);
        mtt__print(&text, " -> ");
        mtt__print_operands(&text, op->operands + op->inputs, op->outputs);
        if (op->weights) mtt__print(&text, " %d weights", op->parameters);
        line[text.size] = '\n';
        write(user, line, text.size + 1);
    }
}

static void mtt__print_categories(mtt__text *text, const size_t *bytes)
{
    int i;
    for (i = 0; i < MTT_CATEGORY_COUNT; i++)
        mtt__print(text, "%s\"%s\": %zu", i ? ", " : "{", mtt__category_text[i], bytes[i]);
    mtt__print(text, "}");
}

MTTDEF size_t mtt_plan_json(const mtt_plan_report *r, char *at, size_t capacity)
{
    mtt__text text;
    int i;
    mtt__text_init(&text, at, capacity);
    mtt__print(&text, "{\"parameters\": %lld, \"arena_bytes\": %zu, \"peak_bytes\": %zu", (long long)r->parameters,
               r->arena_bytes, r->peak_bytes);
    for (i = 0; i < MTT_PHASE_COUNT; i++)
        mtt__print(&text, ", \"peak_%s_bytes\": %zu", mtt__phase_text[i], r->phase_peak_bytes[i]);
    mtt__print(&text, ", \"state_bytes\": %zu, \"bytes\": ", r->state_bytes);
    mtt__print_categories(&text, r->bytes);
    mtt__print(&text, ", \"ops\": %d, \"tensors\": %d, \"recompute_layers\": %d", r->ops, r->tensors, r->recompute_layers);
    mtt__print(&text, ", \"recompute_selective\": %d, \"micro_batches\": %d", r->recompute_selective, r->micro_batches);
    mtt__print(&text, ", \"flops\": %.0f, \"recompute_flops\": %.0f, \"traffic_bytes\": %.0f}", r->flops, r->recompute_flops,
               r->traffic_bytes);
    return text.size;
}

MTTDEF void mtt_plan_print(const mtt_plan_report *r, mtt_write_fn write, void *user)
{
    char at[2048];
    mtt__text text;
    int i;
    mtt__text_init(&text, at, sizeof(at));
    mtt__print(&text, "parameters %lld, arena %zu bytes = %.2f MiB\n", (long long)r->parameters, r->arena_bytes,
               (double)r->arena_bytes / 1048576);
    mtt__print(&text, "peak  ");
    for (i = 0; i < MTT_PHASE_COUNT; i++)
        mtt__print(&text, "%s %.2f MiB%s", mtt__phase_text[i], (double)r->phase_peak_bytes[i] / 1048576, i < 2 ? ", " : "\n");
    for (i = 0; i < MTT_CATEGORY_COUNT; i++)
        if (r->bytes[i])
            mtt__print(&text, "  %-12s %10.2f MiB\n", mtt__category_text[i], (double)r->bytes[i] / 1048576);
    mtt__print(&text, "%.2f GFLOP a step, %.1f %% of them recomputed\n", r->flops * 1e-9,
               100 * r->recompute_flops / r->flops);
    write(user, at, text.size);
}

MTTDEF void mtt_schedule_json(const mtt_schedule *s, mtt_write_fn write, void *user)
{
    mtt_plan_report plan;
    mtt_op_info op;
    char at[2048];
    mtt__text text;
    int i;
    mtt_schedule_report(s, &plan);
    write(user, "{\"plan\": ", 9);
    write(user, at, mtt_plan_json(&plan, at, sizeof(at)));
    for (i = 0; mtt_schedule_op(s, i, &op); i++) {
        mtt__text_init(&text, at, sizeof(at));
        mtt__print(&text, "%s\n{\"op\": \"%s\", \"phase\": \"%s\", \"layer\": %d, \"recomputed\": %d", i ? "," : ",\n\"timeline\": [",
                   op.name, mtt_phase_name(op.phase), op.layer, op.recomputed);
        mtt__print(&text, ", \"live_bytes\": %zu, \"flops\": %.0f, \"traffic_bytes\": %.0f, \"bytes\": ", op.live_bytes, op.flops,
                   op.traffic_bytes);
        mtt__print_categories(&text, op.bytes);
        mtt__print(&text, "}");
        write(user, at, text.size);
    }
    write(user, "\n]}\n", 4);
}

/* ----------------------------------------------------------------------------------------------------------
   >>public
   ---------------------------------------------------------------------------------------------------------- */

MTTDEF mtt_status mtt_evaluate_tokens(mtt_trainer *trainer, const mtt_tokens *tokens, const mtt_tokenizer *tokenizer,
                                      int batches, mtt_quality *q)
{
    const mtt_shape *d = &trainer->schedule->programs[MTT__EVALUATE].shape;
    mtt_env *env = trainer->env;
    mtt_batches order;
    mtt_step_info info;
    double loss = 0, hits = 0, bytes = 0;
    int64_t rows = d->rows * trainer->schedule->split, i;
    int done, batch = d->batch * trainer->schedule->split;
    int32_t *x = (int32_t *)mtt__alloc(env, 2 * (size_t)rows, sizeof(*x)), *y = x + rows;
    mtt_status status = x ? mtt_batches_init(env, &order, tokens, batch, d->seq_len, 0, 1) : MTT_E_MEMORY;
    memset(q, 0, sizeof(*q));
    for (done = 0; !status && (!batches || done < batches); done++) {
        status = mtt_batches_next(&order, x, y);
        if (!status) status = mtt_evaluate(trainer, x, y, &info);
        if (status) break;
        loss += info.loss * (double)info.targets;
        hits += (double)info.hits;
        q->targets += info.targets;
        for (i = 0; tokenizer && i < rows; i++) {
            size_t size = 0;
            if (y[i] >= 0 && mtt_tokenizer_bytes(tokenizer, y[i], &size)) bytes += (double)size;
        }
    }
    mtt__free(env, x);
    if (status && status != MTT_END) return status;
    q->loss = q->targets ? loss / (double)q->targets : 0;
    q->perplexity = exp(q->loss);
    q->accuracy = q->targets ? hits / (double)q->targets : 0;
    q->bits_per_byte = bytes > 0 ? loss / log(2.0) / bytes : 0;
    return MTT_OK;
}

/* The k-th largest value, nearly: bisection on the value, which needs no memory. */
static float mtt__top_k_threshold(const float *x, int n, int k)
{
    float low = 3.4e38f, high = -3.4e38f;
    int i, round, above;
    for (i = 0; i < n; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    if (k <= 0 || k >= n) return low;
    for (round = 0; round < 64 && low < high; round++) {
        float middle = low + (high - low) * 0.5f;
        for (above = 0, i = 0; i < n; i++) above += x[i] >= middle;
        if (above < k) high = middle;
        else if (low >= middle) break;
        else low = middle;
    }
    return low;
}

MTTDEF int32_t mtt_sample(const float *logits, int vocab, float temperature, int top_k, uint64_t seed, uint64_t index)
{
    float most = logits[0], threshold = temperature > 0 ? mtt__top_k_threshold(logits, vocab, top_k) : 0;
    double sum = 0, left;
    int32_t i, best = 0, last = 0;
    for (i = 1; i < vocab; i++)
        if (logits[i] > most) {
            most = logits[i];
            best = i;
        }
    if (!(temperature > 0)) return best;
    for (i = 0; i < vocab; i++)
        if (logits[i] >= threshold) sum += exp((double)(logits[i] - most) / (double)temperature);
    left = sum * mtt__random_uniform(seed, mtt__stream(MTT__SITE_SAMPLE, 0, 0), index);
    for (i = 0; i < vocab && left >= 0; i++)
        if (logits[i] >= threshold) {
            left -= exp((double)(logits[i] - most) / (double)temperature);
            last = i;
        }
    return last;
}

MTTDEF mtt_status mtt_generate(mtt_trainer *trainer, mtt_tokenizer *tokenizer, const char *prompt, int count,
                               float temperature, int top_k, uint64_t seed, mtt_write_fn write, void *user)
{
    mtt_env *env = trainer->env;
    int vocab = trainer->schedule->model.vocab, i;
    size_t size = strlen(prompt), known = 0, bytes;
    int32_t *ids = (int32_t *)mtt__alloc(env, mtt__add(size + 1, (size_t)(count > 0 ? count : 0)), sizeof(*ids));
    float *logits = (float *)mtt__alloc(env, (size_t)vocab, sizeof(*logits));
    mtt_status status = ids && logits ? mtt_encode(tokenizer, prompt, size, ids, size, &known) : MTT_E_MEMORY;
    if (!status && !known) ids[known++] = mtt_tokenizer_end_of_text(tokenizer);
    for (i = 0; i < count && !status; i++) {
        const char *text;
        status = mtt_next_logits(trainer, ids, (int)known, logits);
        if (status) break;
        ids[known] = mtt_sample(logits, vocab, temperature, top_k, seed, (uint64_t)i);
        if (ids[known] == mtt_tokenizer_end_of_text(tokenizer)) break;
        text = mtt_tokenizer_bytes(tokenizer, ids[known++], &bytes);
        if (text) write(user, text, bytes);
    }
    mtt__free(env, ids);
    mtt__free(env, logits);
    return status;
}

/* The operations before it have just run, so its operands are as in a step. What it changes in place is put
   back: the speed of a product depends on its numbers. On what a whole step leaves in their memory, products
   of the backward pass take more than a third longer. A download waits for the device. */
MTTDEF mtt_status mtt_profile(mtt_trainer *t, int index, int times, double *ms)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    const mtt_tensor *both = NULL;
    mtt_counters counters;
    const mtt_op *op;
    void *before = NULL;
    double start = 0;
    mtt_status status = MTT_OK;
    int i, k;
    if (index < 0 || index >= p->op_count || times < 1)
        return mtt__fail(t->env, MTT_E_ARGUMENT, "operation %d, %d times: take 0 to %d, at least once", index, times,
                         p->op_count - 1);
    op = &p->ops[index];
    for (i = 0; i < op->inputs; i++)
        for (k = op->inputs; k < op->inputs + op->outputs; k++)
            if (op->operands[i] && op->operands[i] == op->operands[k]) both = op->operands[i];
    if (both && !(before = mtt__alloc_raw(t->env, both->bytes))) return MTT_E_MEMORY;
    if (both) status = t->backend.download(t->context, before, both->data, both->bytes);
    for (i = -1; i < times && !status; i++) {
        status = t->backend.run(t->context, op, 1);
        if (i >= 0 || status) continue;
        status = t->backend.download(t->context, &counters, p->counters->data, sizeof(counters));
        start = mtt__now_ms();
    }
    if (!status) status = t->backend.download(t->context, &counters, p->counters->data, sizeof(counters));
    *ms = (mtt__now_ms() - start) / times;
    if (!status && both) status = t->backend.upload(t->context, both->data, before, both->bytes);
    if (!status && both) status = t->backend.run(t->context, op, 1);
    mtt__free(t->env, before);
    return status;
}

#endif /* MTT_IMPLEMENTATION_DONE */
#endif /* MTT_IMPLEMENTATION */

/* This software is available under two licences: take the one you prefer.

   A - MIT
   Copyright (c) 2026 the mtt authors
   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation
   files (the "Software"), to deal in the Software without restriction, including without limitation the rights to use, copy,
   modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
   Software is furnished to do so, subject to the following conditions: The above copyright notice and this permission notice
   shall be included in all copies or substantial portions of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY
   OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR
   PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
   LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR
   THE USE OR OTHER DEALINGS IN THE SOFTWARE.

   B - Public domain (www.unlicense.org)
   This is free and unencumbered software released into the public domain. Anyone is free to copy, modify, publish, use,
   compile, sell, or distribute this software, either in source code form or as a compiled binary, for any purpose, commercial
   or non-commercial, and by any means. In jurisdictions that recognize copyright laws, the author or authors of this software
   dedicate any and all copyright interest in the software to the public domain. We make this dedication for the benefit of
   the public at large and to the detriment of our heirs and successors. We intend this dedication to be an overt act of
   relinquishment in perpetuity of all present and future rights to this software under copyright law. THE SOFTWARE IS
   PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF
   MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS BE LIABLE FOR ANY
   CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
   CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. */
