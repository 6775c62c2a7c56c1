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
   interface. Then the implementation, in rooms; a room uses only the rooms above it. Search for a room's tag.
   The first, >>os, is what mtt asks of an operating system. The hall is what memory-efficient training needs,
   in the order in which to read it:

   >>base       text, failures, blocks            >>plan       bytes, offsets, budgets
   >>numbers    16-bit floats, randomness         >>cpu        every operation in plain C
   >>config     fields, defaults, checks          >>trainer    arena, steps, evaluation
   >>tensors    tables of parameters and          >>report     listings, JSON and tables
                activations
   >>schedule   the program of a step

   The wings stand behind it. Most of them can be left out, see OPTIONS. A wing that is a technique adds rows
   to tables of the hall, which stand with the operations in the interface:

   >>adapters   LoRA                              >>data       corpora, splits, datasets
   >>eight      FP8                               >>batches    shuffled sequences, evaluation
   >>exchange   many ranks: shares, transfers     >>checkpoint safetensors, save and resume
   >>json       a pull reader, UTF-8              >>models     files of other programs
   >>files      atomic writing, CRC-32            >>generator  generation, sampling, prompts
   >>tokenizer  Unicode classes, BPE              >>ranks      connections between ranks

   READING PATH
   How memory-efficient training works, in about 2,200 lines: of each room the parts that have these headings,
   one after the other. Read the opening of >>schedule first, and print a list of operations: make
   build/schedule && build/schedule. This shows what a pass does to it: build/schedule --flash --recompute
   layer --before adjoints --after adjoints.
   >>operations  tensors, operations
   >>tensors     all
   >>schedule    the opening, the builder, passes, recomputation, gradients of tensors, the forward pass,
                 adjoints, the backward pass, fusions, gradients of layers, the step, lives of tensors
   >>plan        memory during each operation, schedules
   >>cpu         views, flash attention
   >>trainer     steps

   WHAT IT DOES
   mtt trains GPT-like decoders on your text. The field's memory techniques are settings: BF16, FP16 and FP8,
   FlashAttention, windowed attention, gradient checkpointing, chunked loss, compact optimizer state, gradient
   accumulation. A model, a policy and a batch are compiled into a schedule: one flat list of operations over
   named tensors. It holds the forward pass, the backward pass, recomputation, loss and optimizer. Memory is
   arithmetic on that list, so mtt knows every byte of the arena before it allocates anything.
   Fine-tuning: the policy's `freeze` names parameters that stay as they are, `lora_rank` trains adapters
   alone. What is not trained has neither gradients nor optimizer state, and the backward pass ends at the
   lowest parameter that is. mtt_save_merged adds adapters to the weights; tools/peft.h writes them for
   Hugging Face's PEFT.

   WHAT IT DOES NOT DO
   No automatic differentiation, no other architectures, no network access except between ranks. It runs on
   POSIX systems and, without ranks, on Windows, on little-endian processors.

   WORDS
   token         an integer id that the tokenizer makes of a piece of text
   micro-batch   `batch` sequences of `seq_len` tokens
   step          one update of the weights from `accumulate` micro-batches
   model         the network
   policy        how the model is held in memory and computed
   schedule      the operations of a micro-batch and of a step, in order
   plan          bytes, offsets and timeline of a schedule
   place         the memory that a tensor lies in: the card's, or the host's, pinned
   arena         the one block of memory that a plan fills; those of the host have another
   backend       runs the operations: the CPU here, a CUDA device in mtt_kernels.cu
   rank          one of several processes that train one model together
   state         tensors that live from step to step: weights, moments, counters
   pass          one of the functions that write a schedule's list. In "forward pass" and "backward pass": the
                 part of a step
   product       a matrix product
   branch        attention or MLP of a layer, whose output is added to the residual stream x
   recompute     run a forward operation again in the backward pass instead of keeping its result;
                 also called gradient checkpointing
   role          which activation of a layer a tensor is: x, ln_1, qkv, ...
   site          where dropout or stochastic rounding draws: each has random numbers of its own
   adjoint       emits the backward operations of a forward operation
   share         the part of each parameter that a rank updates, in whole blocks of elements
   d_, .8, .t8   in names of tensors: a gradient; in 8 bits; in 8 bits and transposed

   HOW TO USE IT
   Each level works without the ones after it.
   1. Text and tokens: mtt_prepare makes a tokenizer and token files from text. mtt_dataset_open and
      mtt_batches_init read them.
   2. The plan: mtt_plan, mtt_plan_max_batch and mtt_policy_fit answer without a device.
      mtt_schedule_print shows the program, mtt_schedule_print_passes how it is made.
   3. The trainer: mtt_trainer_create, mtt_train_step, mtt_evaluate_tokens, mtt_generate, mtt_save,
      mtt_resume.
   4. The generator: mtt_generator_plan, mtt_generator_create, mtt_generator_run; mtt_trainer_load of its
      mtt_generator_trainer.
   Descriptors are structs in which zero means the default. mtt_*_resolve fills the defaults in. Calls copy
   descriptors, texts and arrays, so these may go afterwards, unless a comment says otherwise. Functions
   return a status; the environment's `error` then says what is wrong and how to fix it. examples/hello.c is
   the shortest whole program, examples/train.c a trainer on this header alone, tools/trainer.c one with ranks
   and adapters, examples/generate.c writes text.

   MEMORY
   Let P be the number of parameters, R = batch * seq_len rows, L layers of width C, an MLP of width F = 4C, H
   heads, a vocabulary of V, and s bytes an element (4, or 2 under BF16, FP16 and FP8). When the backward pass
   begins, memory holds
      state        P (4 + 8) bytes in FP32; P (2 + 4 + 8) with 16-bit weights, FP32 masters and moments;
                   P (2 + 3.125) compact
      activations  R L s (8C + 2F) with nothing recomputed; selective or FP8 R L s (6C + F); layer R L s C.
                   SwiGLU has F more. With K heads of keys, D wide, 4C + 2 (H + K) D takes the place of 8C.
      scores       L batch H seq_len^2 s, or 0 with flash attention
      logits       R V s, or a chunk of 1024 rows, 2048 on CUDA
   A generator holds P s bytes of weights, and for each token of its contexts a cache of 2 L K D s bytes.
   Gradients (4 bytes each, fewer under MTT_STATE_COMPACT) live until the step, or until the early update of
   their layer, or, if micro-batches accumulate, until they are added to sums of 4 bytes a parameter. These
   formulas are for orientation: the plan adds up the schedule. mtt_plan_print also says what is outside the
   arena at most.

   RANKS
   Several processes can train one model, on CPUs or each on a GPU of its own. mtt_ranks_fork makes them on
   one host, before any call to CUDA; mtt_ranks_connect joins those that a launcher has started. Put the
   handle into the backend's `ranks`. All ranks then make the same calls, each with micro-batches of its own:
   of all in a step, rank r of N has numbers r, N + r, 2N + r and so on. mtt_batches hands them out if its
   `rank` and `ranks` are set. GPUs of one host copy from each other's memory (CUDA IPC) if they can. Others
   exchange by NCCL 2.7 or later, which is loaded at run time.
   Losses, weights and checkpoints are, bit for bit, those of one rank with N times as many micro-batches, for
   every N and shard. So a run can go on with another number of ranks. There are two exceptions:
   - Ranks that do not divide gradients first add up their own micro-batches, if they have several.
   - 16-bit gradients (compact state, 16-bit precision, one micro-batch a rank) are rounded before they are
     added. All shards then have the same bits.
   The policy's `shard` says what ranks divide. The plan says what a rank holds, and what it sends. GPUs send
   the gradients of a layer while the backward pass goes on through the layer before it, and weights of a
   layer while the next one's are updated, or, by copies, while the next forward pass runs. On CPUs an
   exchange ends before the next operation. A rank that waits for its GPU still notices if another one is
   lost. Ranks on several hosts should have a secret, MTT_SECRET.

   ATTENTION AND WINDOWS
   Query i attends keys max(0, i - W + 1) .. i. W counts the query itself: W = 1 attends nothing else.
   W >= seq_len, or 0, is full causal attention. With W = 2 and four tokens, a row for each query:
      1 0 0 0 / 1 1 0 0 / 0 1 1 0 / 0 0 1 1

   NUMBERS
   Sums, softmax, statistics of norms, losses, weight gradients, moments and masters are FP32. Sums over whole
   tensors are double. 16-bit stores round to nearest even; the compact state and FP8's gradients
   of logits round stochastically.
   Recomputation never changes a bit. Flash attention, windows of full length and the chunked loss change only
   the order of sums. The gradient of a micro-batch is complete before it is added to the step's. Dropout and
   stochastic rounding are functions of (seed, micro-batch or update, site, layer, element), so recomputation
   replays them. The same seed, build and machine give the same bits, on the CPU for any number of threads.
   With MTT_CBLAS this holds if the BLAS has no threads inside OpenMP's, as OpenBLAS.
   FP16 and FP8 scale the loss: a step that overflows is skipped and halves the scale, 2000 good steps double
   it. FP8's other scales come from the largest values of the step before, with room for twice as much. Before
   the first step a forward pass over its first micro-batch measures them.

   OPTIONS, defined before the include. "here": only where MTT_IMPLEMENTATION is; "everywhere": in every file
      MTT_IMPLEMENTATION    here        compile the implementation; include mtt.h first, it asks for POSIX
      MTT_STATIC            everywhere  make all functions static, so that two files can hold implementations
      MTTDEF                everywhere  the text before each function's declaration, default extern
      MTT_CBLAS             here        FP32 products through cblas.h; of OpenBLAS, the build for OpenMP
      MTT_PORTABLE          here        the same bits on every x86-64: no use of AVX512-BF16 where it is found
      MTT_MPI               here        ranks that mpirun has started exchange by MPI 3; compile with mpicc
      MTT_CUDA              everywhere  mtt_kernels.cu is linked, with -lcublasLt: mtt_cuda_backend works
      MTT_SEPARATE_ALLOCS   here        a block for each tensor instead of the arena, for sanitizers
      MTT_NO_RANKS          everywhere  leave out ranks, and with them sockets;
      MTT_NO_SOCKETS        everywhere  connections between ranks, but not their plans; always on Windows;
      MTT_NO_TEXT           everywhere  tokenizers, datasets and batches, and with them the generator;
      MTT_NO_MODELS         everywhere  models in folders, and adapters' files;
      MTT_NO_GENERATOR      everywhere  sampling and generation;
      MTT_NO_ADAPTERS       everywhere  LoRA;
      MTT_NO_FP8            everywhere  FP8
      MTT_BACKEND_API       everywhere  declare operations and tensors, for backends and for programs that
                                        look into a schedule; MTT_IMPLEMENTATION does, too
      MTT_DOCUMENT_BYTES    here        least bytes of a document cut from plain text, default 4096
      MTT_DOCUMENT_LIMIT    here        most bytes of a line of JSONL, default 2^30
   The implementation takes 15 s to compile at -O3. A program of your own need not wait for it at each change:
   put the two lines above into mtt.c, compile it once (cc -O3 -march=native -fopenmp -c mtt.c), and link
   mtt.o.
   -fopenmp makes it parallel, with OMP_NUM_THREADS threads, else all; omp_set_num_threads changes that. They,
   and threads that call mtt, need a stack of 128 KB. An object is for one thread at a time, and so is an
   mtt_env; different objects with environments of their own are independent. Begin main with
   mtt_wait_passively(argv), which is much faster beside other work. It restarts the program once; `export
   OMP_WAIT_POLICY=passive` does the same from outside. -ffast-math and -Ofast are refused; linked with
   them, programs take subnormal numbers for 0: FP32 and BF16 then differ in last bits, and FP16 and FP8 are
   refused.
   It is C99 and C++11. In C++ write `mtt_policy p{};` and set members. Designators of C++20 work, too, in the
   order of declaration, but g++ -Wextra warns of each member left out.
   stb_sprintf.h must be found, as stb_sprintf.h or stb/stb_sprintf.h; it stays private.

   FAILURES
   Nothing exits, aborts or prints. A failed call leaves its object as it was; one that should make an object
   sets it to NULL. Pointers must not be NULL, unless a comment allows it. Functions that destroy or close
   accept NULL. Every field of a file is checked. Files are replaced by writing a temporary beside them,
   syncing and renaming it. All size arithmetic is checked. */
#ifndef MTT_H_INCLUDED
#define MTT_H_INCLUDED
#define MTT_VERSION 20000 /* major * 10000 + minor * 100 + patch */

#ifdef __linux__ /* elsewhere these would hide flock and O_NOFOLLOW */
#if (defined(__STRICT_ANSI__) || defined(_XOPEN_SOURCE)) && !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#define _POSIX_C_SOURCE 200809L /* mmap, fsync and clock_gettime, also where the implementation comes later */
#endif
#if defined(MTT_IMPLEMENTATION) && !defined(_FILE_OFFSET_BITS) && !defined(__LP64__)
#define _FILE_OFFSET_BITS 64 /* files of 2 GB and more on 32-bit systems */
#endif
#endif
#include <math.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if (defined(_WIN32) || defined(MTT_NO_RANKS)) && !defined(MTT_NO_SOCKETS)
#define MTT_NO_SOCKETS /* connections need fork and POSIX sockets */
#endif
#if defined(MTT_NO_TEXT) && !defined(MTT_NO_GENERATOR)
#define MTT_NO_GENERATOR /* it writes text */
#endif

/* Switches that leave out operations number the others otherwise. So they are part of the name by which files
   link: where two differ, the linker misses mtt_cuda_backend_NO_FP8, mtt_schedule_ops_NO_FP8 or the like. */
#ifdef MTT_NO_RANKS
#define MTT__RANKS_NAME _NO_RANKS
#else
#define MTT__RANKS_NAME
#endif
#ifdef MTT_NO_GENERATOR
#define MTT__GENERATOR_NAME _NO_GENERATOR
#else
#define MTT__GENERATOR_NAME
#endif
#ifdef MTT_NO_ADAPTERS
#define MTT__ADAPTERS_NAME _NO_ADAPTERS
#else
#define MTT__ADAPTERS_NAME
#endif
#ifdef MTT_NO_FP8
#define MTT__FP8_NAME _NO_FP8
#else
#define MTT__FP8_NAME
#endif
#define MTT__JOINED(a, b, c, d, e) a##b##c##d##e
#define MTT__EXPANDED(name, b, c, d, e) MTT__JOINED(name, b, c, d, e)
#define MTT__NAMED(name) \
    MTT__EXPANDED(name, MTT__RANKS_NAME, MTT__GENERATOR_NAME, MTT__ADAPTERS_NAME, MTT__FP8_NAME)

#if defined(__GNUC__) || defined(__clang__)
#define MTT__GNU /* attributes, vectors and atomics as GCC has them, also in clang for MSVC's programs */
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
    X(MTT_END, "nothing is left to read, or a callback has stopped the call")            \
    X(MTT_E_ARGUMENT, "an argument or a combination of settings is invalid")            \
    X(MTT_E_MEMORY, "out of host memory")                                               \
    X(MTT_E_BUDGET, "does not fit the memory budget or the device")                     \
    X(MTT_E_FILE, "a file could not be opened, read or written")                        \
    X(MTT_E_FORMAT, "a file is malformed")                                              \
    X(MTT_E_MISMATCH, "a file or another rank belongs to another configuration")        \
    X(MTT_E_DATA, "too little data")                                                    \
    X(MTT_E_NUMBERS, "the loss or a logit is no longer a finite number")                \
    X(MTT_E_DEVICE, "the device reported an error")                                     \
    X(MTT_E_RANK, "another rank is lost, or does not answer")                           \
    X(MTT_E_STOPPED, "another rank has stopped; its words are in the error")

#define MTT__ENUM(name, text) name,
typedef enum mtt_status { MTT_STATUSES(MTT__ENUM) MTT_STATUS_COUNT } mtt_status;

/* The text of a status, in static storage. */
MTTDEF const char *mtt_status_string(mtt_status status);

/* MTT_VERSION of the implementation, which a program with another header can compare with its own. */
MTTDEF int mtt_version(void);
/* For bindings of other languages, which repeat the structs of this interface: the bytes of one, by its name,
   such as "mtt_policy"; 0: there is none of that name. */
MTTDEF size_t mtt_sizeof(const char *name);

/* For the first line of main, with its argv: starts the program again, once, with OMP_WAIT_POLICY=passive.
   OpenMP reads that variable before main; a library without a main of its own says in its manual `export
   OMP_WAIT_POLICY=passive`. OpenMP's threads otherwise spin while they wait, and take the cores from
   whatever else runs. Does nothing if the environment has OMP_WAIT_POLICY or GOMP_SPINCOUNT, without OpenMP,
   or on systems without /proc. On two cores a step of `build/train --preset tiny` then takes 27 ms, not 50 to
   62; beside a busy process 26 to 128 ms, not 680 to 1,172. */
MTTDEF void mtt_wait_passively(char **argv);

/* Source of host memory, the CPU's arena included, and place of the last error. Zero it, then set what you
   want to change. One environment serves one thread at a time and must outlive every object made with it.
   Functions accept NULL instead. alloc and free are called by the thread that has called the library. */
typedef struct mtt_env {
    void *(*alloc)(void *user, size_t bytes); /* default malloc; aligned as malloc's, NULL = out of memory */
    void (*free)(void *user, void *block);    /* default free; set both or neither, or nothing is allocated */
    void *user;                               /* passed to both */
    char error[1024];                         /* the last failure in words, and its remedy */
} mtt_env;

/* Receives text. `user` is the caller's. It must return: exceptions and longjmp leak memory of mtt. */
typedef void (*mtt_write_fn)(void *user, const char *text, size_t bytes);

/* ---------------------------------------------------------------------------------- model and policy ---- */

typedef enum mtt_positions {
    MTT_POSITIONS_SINUSOIDAL, /* 0.02 times sin and cos, added to the embedding: no parameters */
    MTT_POSITIONS_LEARNED,    /* a table, added to the embedding */
    MTT_POSITIONS_ROTARY,     /* q and k are rotated by angles that grow with the position (Su et al. 2021) */
    MTT_POSITIONS_NONE
} mtt_positions;

/* LayerNorm (Ba et al. 2016): y = (x - mean) / sqrt(variance + eps) * gain + shift. RMSNorm (Zhang & Sennrich
   2019, arXiv 1910.07467): y = x / sqrt(mean of x^2 + eps) * gain. Checkpoints hold the numbers of a model's
   enums, so a new value comes last. */
typedef enum mtt_norm_form { MTT_NORM_LAYER, MTT_NORM_RMS } mtt_norm_form;

/* Pre: x + branch(norm(x)), and a final norm before the head. Post: norm(x + branch(x)), with no final norm
   (Vaswani et al. 2017). None: x + branch(x), no norm at all. */
typedef enum mtt_norm_place { MTT_NORM_PRE, MTT_NORM_POST, MTT_NORM_NONE } mtt_norm_place;

/* Between the two matrices of the MLP: GELU, in its tanh form; SwiGLU, silu(gate) * up (Shazeer 2020, arXiv
   2002.05202); max(x, 0)^2; SiLU, x / (1 + e^-x). SwiGLU's gate and up are one product: mlp.c_fc is a matrix
   of 2 * d_ff columns, d_ff of gate and then d_ff of up. */
typedef enum mtt_mlp { MTT_MLP_GELU, MTT_MLP_SWIGLU, MTT_MLP_RELU2, MTT_MLP_SILU } mtt_mlp;

/* The network: a decoder. Zero means the default; there are no hidden settings. */
typedef struct mtt_model_desc {
    int layers;              /* transformer blocks, 1..1024, default 4 */
    int heads;               /* attention heads, 1..1024, default 8 */
    int heads_kv;            /* heads of keys and values, a divisor of heads, default heads. With fewer, heads
                                / heads_kv query heads in a row share one (Ainslie et al. 2023) */
    int d_head;              /* width of a head, 8..256, a multiple of 8, default d_model / heads */
    int d_model;             /* width, 8..16384, a multiple of 8, default 256 */
    int d_ff;                /* width inside the MLP, 8..131072, a multiple of 8, default 4 * d_model */
    mtt_norm_form norm;      /* default LayerNorm */
    float norm_eps;          /* added under the norms' square root, 1e-12..1, default 1e-5 */
    mtt_norm_place norm_place; /* default pre */
    mtt_mlp mlp;             /* default GELU */
    int no_biases;           /* 1 = linear layers and head without biases, default 0; LayerNorm keeps its
                                shift */
    int vocab;               /* ids, 1..2^24, default 10000 */
    int max_seq;             /* longest sequence, 1..2^20, default 1024; sizes the learned positions only */
    mtt_positions positions; /* default sinusoidal */
    float rotary_theta;      /* 1..1e12, default 10000: position t rotates pair i of a head's columns by
                                t / theta^(2 i / d_head). Sines and cosines are rounded from double */
    int rotary_interleaved;  /* pair i is columns 2 i and 2 i + 1, as in Meta's weights. Default 0: i and
                                i + d_head / 2, as in Hugging Face's */
    float rotary_factor;     /* 1..1000, default 1. Above 1, as in Llama 3.1 and later: pairs that turn less
                                than rotary_low times in rotary_original tokens turn so many times slower,
                                those above rotary_high times stay, and those between are blended */
    float rotary_low, rotary_high, rotary_original; /* 0.001..1000, low < high; 1..1e9; default 1, 4, 8192 */
    int qk_norm;             /* 1 = RMSNorm of each head of q and k before the rotation, with norm_eps and
                                d_head gains for q and as many for k */
    int tied_head;           /* 1 = the head is the token embedding; default 0, a matrix of its own */
    int no_head_bias;        /* 1 = logits without a bias; default 0 */
    float dropout;           /* 0..0.9, at embedding, attention (in 256ths) and both branches; default 0 */
} mtt_model_desc;

/* FP32: everything in 32 bits. TF32: the same in memory; products round their operands to 10 bits of mantissa
   where the device can (the CPU computes them in FP32). BF16, FP16: activations, their gradients and the
   weights in use are 16 bits; master weights, moments, weight gradients, statistics and sums are FP32. FP16
   scales the loss dynamically. FP8: as BF16, but operands of linear layers are rounded to 8 bits just before
   they are multiplied: activations and weights to e4m3, each tensor with a power of two as its scale;
   gradients to e5m2, with the loss scaled as under FP16 (Micikevicius et al. 2022, arXiv 2209.05433),
   stochastically for logits. Evaluations and generation are those of BF16. For d_model, d_ff and heads_kv *
   d_head that are multiples of 16, on CUDA for compute capability 8.9 and later. */
typedef enum mtt_precision { MTT_FP32, MTT_TF32, MTT_BF16, MTT_FP16, MTT_FP8 } mtt_precision;

/* The products of FP8 that are in 8 bits: all, which implies the chunked loss; all but the head. */
typedef enum mtt_fp8_products { MTT_FP8_ALL, MTT_FP8_LAYERS } mtt_fp8_products;

/* Plain: scores and probabilities are in memory, T x T each. Flash: tiles and an online softmax (Dao et al.
   2022). */
typedef enum mtt_attention { MTT_ATTENTION_PLAIN, MTT_ATTENTION_FLASH } mtt_attention;

/* What the backward pass recomputes instead of keeping it (Chen et al. 2016; Korthikanti et al. 2022):
      none
      selective   norms of branches, GELU or its like, and plain attention's probabilities
      layer       all but each layer's input is dropped, or with `segment` = n all but every n-th layer's; n
                  layers are then recomputed at a time
      segments    all but the input of every `segment`th layer is dropped. At most half a layer is recomputed
                  at a time, much of it more than once: less memory, slower
      recursive   as segments, but the inputs that stay halve the layers that are left, again and again: about
                  log2(layers) of them. What lies between is recomputed about log2(layers) / 2 times: least
                  memory, slowest (Griewank 1992; Chen et al. 2016, section 4.4)
      budget      layer for the first layers, selective for the next, none for the rest: the cheapest such
                  choice that fits `budget_bytes`
   Layer, segments and recursive keep more in the last layers, which the backward pass needs first, as far as
   that takes at most 0.1 % more memory. Recomputation never changes a bit of the result. */
typedef enum mtt_recompute {
    MTT_RECOMPUTE_NONE,
    MTT_RECOMPUTE_SELECTIVE,
    MTT_RECOMPUTE_LAYER,
    MTT_RECOMPUTE_SEGMENTS,
    MTT_RECOMPUTE_BUDGET,
    MTT_RECOMPUTE_RECURSIVE
} mtt_recompute;

/* Full: the logits of all tokens are in memory. Chunked: those of a few rows at a time; their gradients are
   made at once, so that logits are read once. Auto: on CUDA in large chunks, which is fastest, and on a CPU
   full. */
typedef enum mtt_loss { MTT_LOSS_AUTO, MTT_LOSS_FULL, MTT_LOSS_CHUNKED } mtt_loss;

/* AdamW: decoupled decay (Loshchilov & Hutter 2019) on matrices only. Its constants are in mtt_optim_desc. */
typedef enum mtt_optimizer { MTT_ADAMW } mtt_optimizer;

/* State of the optimizer. Full: FP32 moments, and an FP32 master for a 16-bit weight. Compact, after
   FlashOptim (arXiv 2602.23349): a 16-bit weight gets 8 more mantissa bits, and moments are 8 bits in groups
   of 32 with a 16-bit scale. That is 5.125 bytes a parameter instead of 14; under FP32 and TF32, whose
   weights stay, 6.125 instead of 12. Rounding is stochastic, a function of (seed, update, parameter,
   element). If nothing adds to them (accumulate is 1), gradients of the layers' matrices are as wide as the
   weights. */
typedef enum mtt_state { MTT_STATE_FULL, MTT_STATE_COMPACT } mtt_state;

/* What ranks divide between them, each with a share of every layer ("ZeRO", Rajbhandari et al. 2019, arXiv
   1910.02054): nothing; the optimizer's state and the update (ZeRO-1); these and the gradients (ZeRO-2). With
   one micro-batch a step the second and the third are the same. With more, ranks that divide gradients
   exchange those of every micro-batch, and keep sums of a share alone. The others keep sums of all and
   exchange them once a step: fewer bytes between ranks, but sums in another order. */
typedef enum mtt_shard { MTT_SHARD_NONE, MTT_SHARD_OPTIMIZER, MTT_SHARD_GRADIENTS } mtt_shard;

/* When ranks exchange gradients. Overlapped: those of a layer travel while the backward pass goes on with the
   next one. Naive: it waits for each layer's. Flat: all of them once, after the backward pass; then shards of
   gradients keep sums of all. Overlapped is fastest, the others are here to be compared: they give the same
   bits, but for flat where shards of gradients meet several micro-batches. */
typedef enum mtt_exchange { MTT_EXCHANGE_OVERLAPPED, MTT_EXCHANGE_NAIVE, MTT_EXCHANGE_FLAT } mtt_exchange;

typedef enum mtt_device { MTT_DEVICE_CPU, MTT_DEVICE_CUDA } mtt_device;

/* How the model is held in memory and computed. */
typedef struct mtt_policy {
    mtt_precision precision; /* default FP32 */
    mtt_fp8_products fp8_products; /* default all; for FP8 */
    mtt_attention attention; /* default plain */
    int window;              /* keys that a query attends to, its own too; default 0, all up to it. Saves
                                memory and time with flash attention alone: plain attention keeps T x T */
    mtt_recompute recompute; /* default none */
    int segment;             /* for recompute layer and segments: layers per segment, 1..1024, default 1 and
                                the square root of layers, rounded up */
    mtt_loss loss;           /* default auto; FP8 whose products are all in 8 bits has no full loss */
    int loss_chunk_rows;     /* tokens of a chunk of logits, 1..2^24, for FP8 rounded up to a multiple of 16;
                                default 1024, on CUDA 2048, and under auto there a quarter of a
                                micro-batch's, from 8,192 to 16,384 */
    mtt_optimizer optimizer; /* default AdamW */
    mtt_state state;         /* default full */
    int accumulate;          /* micro-batches per step, 1..2^20, default 1; above 1, their gradients are
                                added up in FP32, in sums that stay in memory */
    int early_update;        /* 1 = the backward pass updates each layer once it is through with it, so that
                                at most a layer's gradients are in memory (Lv et al. 2023, arXiv 2306.09782).
                                The same bits as without, but the gradient's norm is not known: `clip` must be
                                off, mtt_step_info.grad_norm is 0, and only a loss that is not finite stops a
                                step. For one micro-batch a step, one rank, and no loss scale. Default 0 */
    const char *freeze;      /* parameters that stay as they are: patterns of names, joined by commas, in
                                which * is any text, as in "wte.*, h.0.*"; default none. Each of them must
                                fit a parameter. A frozen parameter has no gradient, no optimizer state and
                                no master: 16-bit weights are all there is of it. Below the lowest one that is
                                trained there is no backward pass. The text is read until the schedule or the
                                trainer has been created */
    int lora_rank;           /* 0..1024, a multiple of 8, default 0. Above 0 linear layers of the blocks get
                                adapters, which are trained alone ("LoRA", Hu et al. 2021, arXiv 2106.09685):
                                y = x W + b + (lora_alpha / lora_rank) (x A) B. The parameters lora_A and
                                lora_B of a layer, as in h.0.attn.c_attn.lora_A, are [in, rank] and [rank,
                                out]; A begins uniform, up to 1 / sqrt(in), and B with zeros, as PEFT's. Not
                                for FP8. All others are frozen; `freeze` may add some adapters */
    float lora_alpha;        /* above 0, up to 1e6, default lora_rank */
    const char *lora_targets; /* patterns, as above, of attn.c_attn, attn.c_proj, mlp.c_fc and mlp.c_proj, or
                                with h.N. before them; default attn.c_attn, as PEFT's for GPT-2: attention's
                                adapters take least memory. * are all, which learn more (Dettmers et al. 2023,
                                arXiv 2305.14314) */
    int keep_gradients;      /* 1 = mtt_gradient_get can read them even if nothing accumulates: they stay in
                                memory. Default 0. Ranks must not divide them */
    int ranks;               /* processes that train one model together, 1..1024, default 1; a trainer takes
                                its backend's */
    int rank;                /* whose plan it is, from 0, default 0; shares are blocks of 8,192 parameters,
                                and the last ranks may have fewer. A trainer takes its backend's */
    mtt_shard shard;         /* default none; one rank has nothing to divide */
    mtt_exchange exchange;   /* default overlapped */
    int nccl;                /* 1 = GPUs exchange by NCCL even where they could copy; same bits. Default 0 */
    float bandwidth;         /* GB/s at which a rank sends, for times in the plan; default 0 = unknown */
    size_t budget_bytes;     /* of a rank; for MTT_RECOMPUTE_BUDGET, required there */
    int split;               /* 1 = a budget may cut the batch into equal micro-batches where that is faster
                                than recomputation: same mean loss, other sums and dropout; default 0 */
    mtt_device device;       /* target of the plan, default the CPU; a trainer takes its backend's */
    size_t workspace_bytes;  /* scratch of products on CUDA, default 32 MiB; raised where an op needs more */
} mtt_policy;

typedef enum mtt_lr_schedule { MTT_LR_CONSTANT, MTT_LR_LINEAR, MTT_LR_COSINE } mtt_lr_schedule;

/* Parameters with rates of their own. Zero means the default, a negative number none. */
typedef struct mtt_group {
    const char *names;  /* required: patterns, as those of mtt_policy.freeze; they may fit nothing */
    float lr_scale;     /* multiplies the learning rate, at most 1000, default 1 */
    float weight_decay; /* of matrices and vectors, at most 100, default as without the group */
} mtt_group;
enum { MTT_MOST_GROUPS = 7 };

/* Rates and constants of the optimizer. Zero means the default; where the default is not zero, a negative
   number means none, but for lr and loss_scale. */
typedef struct mtt_optim_desc {
    float lr;                    /* peak learning rate, above 0, at most 100, default 3e-4 */
    float beta1, beta2;          /* below 1, default 0.9 and 0.999 */
    float eps;                   /* at most 1, default 1e-8 */
    float weight_decay;          /* at most 100, default 0.01 */
    float clip;                  /* largest global norm of the gradient, default 1 */
    mtt_lr_schedule lr_schedule; /* after the warmup, default constant */
    int64_t warmup_steps;        /* W: step k, from 0, has (k + 1) / W of the rate; below 2^31, default 0 */
    int64_t total_steps;         /* end of linear and cosine, above warmup_steps; required for them */
    float min_lr;                /* learning rate at the end, at most lr, default 0 */
    float loss_scale;            /* first loss scale, 1e-30..1e38, default 65536: FP16's; FP8's for 16,384
                                    tokens a step, in proportion for others */
    uint64_t seed;               /* of weights and dropout, default 0 */
    int zero_weights;            /* 1 = weights begin as zeros, but for adapters: to be set next, by
                                    mtt_trainer_load or mtt_resume. Saves drawing random ones. Default 0 */
    const mtt_group *groups;     /* the first with a parameter's name counts. They are read until the trainer
                                    has been created */
    int group_count;             /* at most 7, default 0 */
} mtt_optim_desc;

/* The descriptors with every default filled in. A fault of any field is reported, all faults at once, each
   with its remedy. mtt_policy_resolve takes a resolved model. Flags become 0 or 1. */
MTTDEF mtt_status mtt_model_resolve(mtt_env *env, const mtt_model_desc *model, mtt_model_desc *resolved);
MTTDEF mtt_status mtt_policy_resolve(mtt_env *env, const mtt_policy *policy, const mtt_model_desc *model,
                                     int batch, int seq_len, mtt_policy *resolved);
MTTDEF mtt_status mtt_optim_resolve(mtt_env *env, const mtt_optim_desc *optim, mtt_optim_desc *resolved);

/* The learning rate of a step, counted from 0, by a resolved descriptor. */
MTTDEF float mtt_learning_rate(const mtt_optim_desc *resolved, int64_t step);

/* A technique in words joined by _, for example bf16_flash_window16. The words: fp32 tf32 bf16 fp16 fp8,
   layers8 (FP8 products of the layers alone), flash, windowN (which implies flash), selective checkpointing
   segments recursive budget, chunked, compact, early, split, zero1 zero2 (shards of the optimizer, and of
   gradients, too). Of words for one field the last counts.
   mtt_policy_parse sets what the words say and leaves the rest of `policy`; bsN sets *batch, and is refused
   where `batch` is NULL. mtt_policy_name writes the words of a policy and a 0, cut at the capacity. It
   returns the length of what it wrote, without the 0. */
MTTDEF mtt_status mtt_policy_parse(mtt_env *env, const char *words, mtt_policy *policy, int *batch);
MTTDEF size_t mtt_policy_name(const mtt_policy *policy, char *text, size_t capacity);

/* The fields of a descriptor, for programs that make command lines, forms or files of them: all but rank,
   seed, zero_weights and groups. A field without a name ends a list. */
typedef enum mtt_field_kind {
    MTT_FIELD_INT,
    MTT_FIELD_INT64,
    MTT_FIELD_BYTES, /* size_t */
    MTT_FIELD_FLOAT,
    MTT_FIELD_CHOICE, /* an enum */
    MTT_FIELD_FLAG,   /* an int, 0 or 1 */
    MTT_FIELD_TEXT    /* const char *, NULL by default */
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
MTTDEF const mtt_field *mtt_model_fields(void);
MTTDEF const mtt_field *mtt_policy_fields(void);
MTTDEF const mtt_field *mtt_optim_fields(void);
/* Sets a field of `desc` to what a text says: a number; bytes, as in 24G or 24GiB (24 * 2^30) or
   24GB (24 * 10^9); the name of a choice; 0 or 1; or the text itself, which the caller keeps. Where the
   default is not 0, a text of 0 or less sets -1, which stands for 0. MTT_E_ARGUMENT: the error says what is
   expected, and the field is as it was. */
MTTDEF mtt_status mtt_field_set(mtt_env *env, const mtt_field *field, void *desc, const char *text);

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

/* Where a tensor lies: in the device's memory, or in the host's, pinned so that the device can copy it. */
typedef enum mtt_place { MTT_CARD, MTT_HOST, MTT_PLACE_COUNT } mtt_place;

MTTDEF const char *mtt_category_name(mtt_category category);
MTTDEF const char *mtt_phase_name(mtt_phase phase);

/* Results of arithmetic on the schedule: no device, no allocation of the model's size. A row: type, member,
   and 1 if mtt_plan_json has it, which may depend on the report r. */
typedef size_t mtt_phase_bytes[MTT_PHASE_COUNT];
typedef size_t mtt_category_bytes[MTT_CATEGORY_COUNT];
typedef double mtt_ms;
#define MTT_PLAN_FIELDS(X)                                                                                   \
    X(int64_t, parameters, 1)                  /* without the padding of the vocabulary */                   \
    X(size_t, arena_bytes, 1)                  /* the one allocation on the card, exactly */                 \
    X(size_t, host_bytes, r->host_bytes > 0)   /* the one on the host, pinned; 0 = none */                   \
    X(double, to_host_bytes, r->host_bytes > 0) /* to it in a step of all micro-batches, */                  \
    X(double, from_host_bytes, r->host_bytes > 0) /* and from it */                                          \
    X(size_t, peak_bytes, 1)                   /* most live at once there; packing makes the arena of it */  \
    X(mtt_phase_bytes, phase_peak_bytes, 1)    /* as peak_forward_bytes, ... */                              \
    X(size_t, state_bytes, 1)                  /* what lives there from step to step */                      \
    X(mtt_category_bytes, bytes, 1)            /* at the peak; they add up to peak_bytes */                  \
    X(int, peak_op, 1)                         /* index of the operation at the peak */                      \
    X(int, ops, 1)                                                                                           \
    X(int, tensors, 1)                                                                                       \
    X(int, recompute_layers, 1)                /* layers recomputed whole */                                 \
    X(int, recompute_selective, 1)             /* layers recomputed in part */                               \
    X(int, micro_batches, 1)                   /* parts of the batch: 1, or more with the policy's `split` */\
    X(double, flops, 1)                        /* of one micro-batch and the step */                         \
    X(double, recompute_flops, 1)              /* part of these */                                           \
    X(double, traffic_bytes, 1)                /* read and written; in-place changes count twice */          \
    X(double, token_flops, r->token_flops > 0) /* a generator's pass over a token of each sequence; else 0 */\
    X(double, wire_bytes, r->wire_bytes > 0)   /* this rank sends in a step of all micro-batches */          \
    X(double, exposed_bytes, r->wire_bytes > 0) /* those of them for which it can only wait */               \
    X(mtt_ms, wire_ms, r->wire_ms > 0)         /* the time of both at the policy's bandwidth; */             \
    X(mtt_ms, exposed_ms, r->wire_ms > 0)      /* 0 without one */                                           \
    X(int, batch, 0)                           /* that was planned */                                        \
    X(int, seq_len, 0)                         /* of a generator the tokens of a chunk */                    \
    X(size_t, outside_bytes, 0) /* most that is outside the arena, with OpenMP's threads as now */
#define MTT__PLAN_MEMBER(type, name, in_json) type name;
typedef struct mtt_plan_report {
    MTT_PLAN_FIELDS(MTT__PLAN_MEMBER)
} mtt_plan_report;

/* The plan of a step: micro-batches of `batch` sequences of `seq_len` tokens, both 1..2^20. MTT_E_BUDGET:
   larger than memory can be, or than the policy's budget. */
MTTDEF mtt_status mtt_plan(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy, int batch,
                           int seq_len, mtt_plan_report *report);
/* The largest batch, not split, whose arena is at most `budget_bytes`, on every rank; at most 2^20, or 0
   after a failure. It assumes that a larger batch takes a larger arena. Gaps between tensors break this
   slightly, so the true maximum may be 1 % higher.
   MTT_E_BUDGET: not even one sequence fits; the error says what it needs. */
MTTDEF mtt_status mtt_plan_max_batch(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                     int seq_len, size_t budget_bytes, int *batch);
/* The fastest policy, by the schedule's FLOPs and traffic, whose arena is at most `budget_bytes`, the same on
   every rank. It varies what leaves the result the same: attention, loss, recomputation by a budget, and
   micro-batches if the policy has `split`. Only if none of these fits, it also tries recursion, segments of
   several lengths, and chunks of logits that are an eighth as large. MTT_E_BUDGET: none fits; the error says
   by how much the smallest misses. */
MTTDEF mtt_status mtt_policy_fit(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                 int batch, int seq_len, size_t budget_bytes, mtt_policy *fit);
/* Writes one JSON object and a 0, cut at the capacity; 2048 bytes are enough. Returns the length of what it
   wrote, without the 0. */
MTTDEF size_t mtt_plan_json(const mtt_plan_report *report, char *text, size_t capacity);
/* The same as a table for people, in MiB (2^20 bytes), with the bounds of what lies outside the arena. */
MTTDEF void mtt_plan_print(const mtt_plan_report *report, mtt_write_fn write, void *user);

/* The schedule: every operation of a training step, in order, over named tensors that share the arena. */
typedef struct mtt_schedule mtt_schedule;
typedef struct mtt_op mtt_op; /* this and the next two: in the section on backends, with MTT_BACKEND_API */
typedef struct mtt_tensor mtt_tensor;
typedef struct mtt_transfer mtt_transfer;

MTTDEF mtt_status mtt_schedule_create(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                      int batch, int seq_len, mtt_schedule **out);
MTTDEF void mtt_schedule_destroy(mtt_schedule *schedule);
MTTDEF void mtt_schedule_report(const mtt_schedule *schedule, mtt_plan_report *report);
/* What a schedule was made of, with all defaults filled in. `accumulate` counts the parts of a batch that
   `split` has cut: it is the policy's times mtt_plan_report.micro_batches. */
MTTDEF const mtt_model_desc *mtt_schedule_model(const mtt_schedule *schedule);
MTTDEF const mtt_policy *mtt_schedule_policy(const mtt_schedule *schedule);
/* The operations in the order in which they run, and all tensors that they use. An operation has its
   operands, its cost and the bytes in memory while it runs. A tensor has its shape, its place in the arena,
   and the first and the last operation that uses it. Both lists belong to the schedule and live as long as it
   does. Tensors have `data` only in a trainer's schedule. */
#define mtt_schedule_ops MTT__NAMED(mtt_schedule_ops)
MTTDEF const mtt_op *mtt_schedule_ops(const mtt_schedule *schedule, int *count);
MTTDEF const mtt_tensor *const *mtt_schedule_tensors(const mtt_schedule *schedule, int *count);
/* One line for each operation: its number, its phase, the bytes in memory while it runs, its name, what it
   reads -> writes, and the tensors that it frees, because no later operation uses them. Shows what gradient
   checkpointing, flash attention or a chunked loss really do. */
MTTDEF void mtt_schedule_print(const mtt_schedule *schedule, mtt_write_fn write, void *user);
/* The passes that write the list of a training step, by number, from 0; NULL past the last. */
MTTDEF const char *mtt_schedule_pass(int number);
/* The list after the first `passes` of them, one line for each operation: its phase, its name, what it reads
   -> writes. Shows what a technique does to the list. MTT_E_ARGUMENT: there are not so many passes. */
MTTDEF mtt_status mtt_schedule_print_passes(const mtt_schedule *schedule, int passes, mtt_write_fn write,
                                            void *user);
/* The plan and the timeline of memory as one JSON object: {"plan": ..., "timeline": [{"op", "phase", "layer",
   "recomputed", "live_bytes", "flops", "traffic_bytes", "bytes": {"weights", ...}}, ...]}; while tensors lie
   on the host also "host_bytes". */
MTTDEF void mtt_schedule_json(const mtt_schedule *schedule, mtt_write_fn write, void *user);

/* ------------------------------------------------------------------------------------------- trainer ---- */

/* Subjects of the sections after this one. */
typedef struct mtt_tokenizer mtt_tokenizer;
typedef struct mtt_tokens mtt_tokens;
typedef struct mtt_batches mtt_batches;
typedef struct mtt_ranks mtt_ranks;

/* Runs the operations: the CPU here, a CUDA device in mtt_kernels.cu. A function that fails puts the reason
   and the remedy into the error of the environment that `open` got. */
typedef struct mtt_backend mtt_backend;
struct mtt_backend {
    const char *name;
    mtt_device device;
    int index;
    mtt_status (*open)(mtt_env *env, const mtt_backend *backend, const mtt_policy *policy, void **context);
    void (*close)(void *context);
    /* Memory of a place. A trainer takes one block of each, and releases it before its lists are freed. */
    mtt_status (*alloc)(void *context, mtt_place place, size_t bytes, void **block);
    void (*release)(void *context, mtt_place place, void *block);
    /* Of the device; both 0 if unknown. */
    mtt_status (*memory)(void *context, size_t *free_bytes, size_t *all_bytes);
    /* Into and out of blocks of any place. An upload is done when it returns. A download waits for all that
       was run. */
    mtt_status (*upload)(void *context, void *to, const void *from, size_t bytes);
    mtt_status (*download)(void *context, void *to, const void *from, size_t bytes);
    /* Runs the operations in order; may return before they are done. Lists and tensors stay where they are
       until a block is released, so a list may be captured once and replayed. */
    mtt_status (*run)(void *context, const mtt_op *ops, int count);
    /* Set by a caller of mtt_cuda_backend who has his own: a cudaStream_t on which all work is ordered, and
       an allocator of device memory, aligned to 256 bytes (NULL = out of memory). Zero: a stream of its own,
       cudaMalloc and cudaFree, and no notes. */
    void *stream;
    void *(*device_alloc)(void *user, size_t bytes);
    void (*device_free)(void *user, void *block);
    void (*note)(void *user, const char *text); /* told by open what slows the device down, and the remedy */
    void *user;
    mtt_ranks *ranks; /* those that train together; NULL, the default: this process alone */
    /* Set by mtt_trainer_create, since mtt_kernels.cu may not see this file's functions. exchange performs
       transfers of the host's memory. watch is called again and again while a backend waits for its device,
       `begins` = 1 at first. It fails if a rank is lost, stops or stays silent. */
    mtt_status (*exchange)(mtt_ranks *ranks, const mtt_transfer *transfers, int count);
    mtt_status (*watch)(mtt_ranks *ranks, int begins);
};
MTTDEF const mtt_backend *mtt_cpu_backend(void);
/* Fills in the backend of a CUDA device, counted from 0. MTT_E_DEVICE: there is none, or the build has no
   MTT_CUDA, or NVIDIA_TF32_OVERRIDE or CUBLAS_EMULATE_SINGLE_PRECISION is set, by which cuBLAS computes in
   another precision than the policy says. With MTT_CUDA the function is in mtt_kernels.cu, which has to be
   compiled with the same MTT_NO_RANKS, MTT_NO_GENERATOR, MTT_NO_ADAPTERS and MTT_NO_FP8. */
#define mtt_cuda_backend MTT__NAMED(mtt_cuda_backend)
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
    float grad_norm;  /* global, before clipping; 0 if updates are early */
    float lr;
    float loss_scale; /* 1 except under FP16 and FP8 */
    int skipped;      /* 1 = overflow under FP16 or FP8: nothing was updated, the loss scale was halved */
    int64_t clipped;  /* activations and weights that were too large for their FP8 scale, and were clipped;
                         weights are rounded, and counted, once a micro-batch */
    double ms;        /* wall clock */
    size_t arena_bytes;
} mtt_step_info;

/* Builds the schedule, takes the arena from the backend in one allocation and fills it with initial
   weights. Ranks first compare model, policy, optimizer and batch: MTT_E_MISMATCH names what differs. This
   function and those below are calls of all ranks, in one order, unless they say something else. */
MTTDEF mtt_status mtt_trainer_create(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                     const mtt_optim_desc *optim, const mtt_backend *backend, int batch,
                                     int seq_len, mtt_trainer **out);
/* GPUs of one host that copy from each other's memory wait here for the other ranks, up to their timeout. */
MTTDEF void mtt_trainer_destroy(mtt_trainer *trainer);
/* One optimizer step over accumulate * batch * seq_len tokens and targets, which are copied before it
   returns. A target of -1 does not count. MTT_E_NUMBERS: the loss or the gradient is not finite; the weights
   are as before the step. Where `info` is NULL the call does not wait for a device; the next call with `info`
   then reports a failure, and the weights are as before the first step that failed. With ranks, `info` counts
   all of them; one that refuses its tokens stops the others, with its words. */
MTTDEF mtt_status mtt_train_step(mtt_trainer *trainer, const int32_t *tokens, const int32_t *targets,
                                 mtt_step_info *info);
/* Loss of batch * seq_len tokens without dropout, on this rank alone. Changes nothing. Sets loss, targets,
   hits, step, loss_scale, ms and arena_bytes, and the rest of `info` to 0; `info` may be NULL. A loss that is
   not finite is no failure here. */
MTTDEF mtt_status mtt_evaluate(mtt_trainer *trainer, const int32_t *tokens, const int32_t *targets,
                               mtt_step_info *info);
/* The `vocab` logits of the token after `count` tokens, on this rank alone; the model sees the last seq_len
   of them. */
MTTDEF mtt_status mtt_next_logits(mtt_trainer *trainer, const int32_t *tokens, int count, float *logits);

/* Steps done; without info, steps handed to the device. */
MTTDEF int64_t mtt_trainer_step(const mtt_trainer *trainer);
/* The learning rate of the steps that follow, 0 to 100, in place of the schedule's; a negative one: the
   schedule's again. It is no part of a checkpoint. With 0 a step leaves the weights as they are, since weight
   decay is times the rate, too: that gives gradients without an update. Moments and the count of steps still
   change. */
MTTDEF mtt_status mtt_trainer_set_lr(mtt_trainer *trainer, float lr);
/* How much the device's free memory has dropped since just before the arena was allocated, by any process. On
   the CPU: the arena's size. On CUDA: the arena, rounded up to pages of 2 MiB. The first trainer of its kind
   in a process takes 2 to 18 MiB more, for the driver's graphs and the code of kernels (measured on an
   H200). */
MTTDEF size_t mtt_trainer_device_bytes(const mtt_trainer *trainer);
MTTDEF const mtt_schedule *mtt_trainer_schedule(const mtt_trainer *trainer);
/* Mean time in ms of operation `index` of the schedule, run `times` times on the operands of the last step.
   The trainer cannot go on training afterwards: it updates weights if `index` is the update. */
MTTDEF mtt_status mtt_profile(mtt_trainer *trainer, int index, int times, double *ms);

/* Parameters by number, from 0, in Hugging Face's GPT-2 names; NULL past the last. shape[2] is rows and
   columns, or elements and 0; 0 and 0 past the last. It may be NULL. */
MTTDEF const char *mtt_parameter(const mtt_trainer *trainer, int index, int64_t shape[2]);
MTTDEF int mtt_parameter_find(const mtt_trainer *trainer, const char *name); /* its number; -1: none */
/* Copies a parameter's FP32 values out or in: masters and 16-bit copies alike, rounded in the compact state.
   Set finite values: mtt_resume refuses a checkpoint with others.
   Gradients are those of the last step, of its mean loss: before clipping, and without the loss scale of FP16
   and FP8. They can be read when the policy accumulates (accumulate > 1), since
   they stay in memory then, or has keep_gradients, but not from ranks that divide them. All ranks call these,
   in one order. */
MTTDEF mtt_status mtt_parameter_get(mtt_trainer *trainer, int index, float *values);
MTTDEF mtt_status mtt_parameter_set(mtt_trainer *trainer, int index, const float *values);
MTTDEF mtt_status mtt_gradient_get(mtt_trainer *trainer, int index, float *values);

/* One safetensors file: weights, moments, step, loss scale, seed, the loader's cursor and the configuration,
   with a checksum for each tensor. At any instant the path holds the old checkpoint or the new one. `batches`
   may be NULL. The tokenizer is no part of it: keep its file, {output}.tokenizer.json of mtt_prepare, too. */
MTTDEF mtt_status mtt_save(mtt_trainer *trainer, const char *path, const mtt_batches *batches);
/* The same without moments, with the adapters added to the weights, W + (lora_alpha / lora_rank) A B: for
   programs that read weights, such as tools/convert. mtt_resume refuses it. */
MTTDEF mtt_status mtt_save_merged(mtt_trainer *trainer, const char *path);
/* Sets a text that all later checkpoints of the trainer carry, merged ones too, such as the chat template of
   the model: UTF-8, 4 MiB at most as a JSON string. It is copied; NULL or "": none. mtt_resume takes the
   file's, if it has one, and mtt_model_note reads it. Of several ranks, the text of rank 0 is saved. */
MTTDEF mtt_status mtt_trainer_set_note(mtt_trainer *trainer, const char *text);
/* Bytes of the file that mtt_save writes, at any step, with or without batches; 0 when out of host memory. */
MTTDEF uint64_t mtt_checkpoint_bytes(const mtt_trainer *trainer);
/* Continues exactly where mtt_save stopped. Model, token file, optimizer, what is frozen and the groups of
   parameters must be the same, or MTT_E_MISMATCH names the difference. The rest of the policy, batch, backend
   and learning rate may differ; the seed is the file's. A file that is older than a field of the model means
   its default. The file holds FP32 in either state: the compact state's values exactly, and a compact trainer
   rounds those of a full one. A file that is damaged, without checksums, or with weights or moments that are
   not finite is refused before anything changes, and so are different files on different ranks. */
MTTDEF mtt_status mtt_resume(mtt_trainer *trainer, const char *path, mtt_batches *batches);

#ifndef MTT_NO_TEXT
/* ----------------------------------------------------------------------------------------- tokenizer ---- */

/* Text to ids and back. mtt.h has byte-level BPE (Radford et al. 2019): the ids are those of Hugging Face's
   tokenizers, and decode(encode(x)) == x for every byte string. Another kind of tokenizer, such as
   tools/wordpiece.h, is a table of functions. The caller passes it to the functions that load or train a
   tokenizer; NULL means BPE with GPT-2's pattern. A tokenizer keeps a cache of words, so it serves one thread
   at a time. */
typedef struct mtt_tokenizer_kind mtt_tokenizer_kind;

/* How BPE cuts a text into words, before it merges bytes in each of them. The regular expressions of
      gpt2     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
      smollm   the same, but every digit is a word of its own, and a text ends before it
      llama3   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*
               |\s*[\r\n]+|\s+(?!\S)|\s+                     also that of GPT-4, cl100k_base
      qwen     llama3's with \p{N} instead of \p{N}{1,3}       Qwen 2, 2.5 and 3 */
typedef enum mtt_pattern {
    MTT_PATTERN_GPT2,
    MTT_PATTERN_SMOLLM,
    MTT_PATTERN_LLAMA3,
    MTT_PATTERN_QWEN,
    MTT_PATTERN_COUNT
} mtt_pattern;

/* For training, and for files that do not say their pattern: vocab.bpe and .tiktoken. */
typedef struct mtt_bpe_options {
    mtt_pattern pattern; /* default gpt2; without options that of a .tiktoken file is known, or required */
} mtt_bpe_options;

/* Trains a tokenizer: create, add each document, finish, destroy. The order of the documents does not matter.
   In BPE, id 0 is <|endoftext|>, 1..256 are the bytes in the order of GPT-2's alphabet, and each merge of the
   most frequent pair adds an id. Pairs are counted in 64 bits; of equal ones the smallest ids go first. */
typedef struct mtt_vocab_trainer mtt_vocab_trainer;
MTTDEF mtt_status mtt_vocab_trainer_create(mtt_env *env, const mtt_tokenizer_kind *kind,
                                           mtt_vocab_trainer **out);
MTTDEF mtt_status mtt_vocab_trainer_add(mtt_vocab_trainer *trainer, const char *text, size_t bytes);
/* `vocab` is the number of ids: 257 or more in BPE, 0 for the default of 10,000. A text with too few pairs
   gives fewer. The trainer then takes further documents and can be finished again. */
MTTDEF mtt_status mtt_vocab_trainer_finish(mtt_vocab_trainer *trainer, int vocab, mtt_tokenizer **out);
MTTDEF void mtt_vocab_trainer_destroy(mtt_vocab_trainer *trainer);

/* Loads a Hugging Face tokenizer.json (BPE with one of the patterns above), GPT-2's list of merges vocab.bpe
   (50,257 ids), a .tiktoken file (a token in base64, a space and its rank on each line), or the vocabulary
   file of `kind`. <|endoftext|> follows the last id of vocab.bpe and .tiktoken. mtt knows the .tiktoken files
   of GPT-2, Whisper, cl100k_base (end of text 100257), Llama 3 (128001) and Qwen; others need a `kind` with a
   pattern. A tokenizer.json must have <|endoftext|>, <|end_of_text|> or </s> among its added tokens: the
   first of these ends a document. Refuses a tokenizer.json that would not give the same ids here; the error
   names the key. Padding and truncation are ignored. If it asks for Unicode's form NFC, as Qwen's do, text is
   brought to that form, and mtt_decode gives that back. */
MTTDEF mtt_status mtt_tokenizer_load(mtt_env *env, const char *path, const mtt_tokenizer_kind *kind,
                                     mtt_tokenizer **out);
/* A tokenizer.json, in a file or as text. */
MTTDEF mtt_status mtt_tokenizer_save(const mtt_tokenizer *tokenizer, const char *path);
MTTDEF void mtt_tokenizer_print(const mtt_tokenizer *tokenizer, mtt_write_fn write, void *user);
MTTDEF void mtt_tokenizer_destroy(mtt_tokenizer *tokenizer);

MTTDEF int mtt_tokenizer_vocab(const mtt_tokenizer *tokenizer);       /* number of ids */
MTTDEF int mtt_tokenizer_end_of_text(const mtt_tokenizer *tokenizer); /* id that ends a document */
/* The id that the post-processor of a tokenizer.json puts before a text; -1 if there is none. */
MTTDEF int mtt_tokenizer_begin_of_text(const mtt_tokenizer *tokenizer);
/* The bytes that mtt_decode writes for an id: none for special tokens; NULL for an id outside the vocabulary.
   They are valid as long as the tokenizer. Bits per byte count these bytes. */
MTTDEF const char *mtt_tokenizer_bytes(const mtt_tokenizer *tokenizer, int id, size_t *bytes);

/* Encodes text to at most `capacity` ids. *count is the number that the text needs; the call fails if it is
   above the capacity. It is at most `bytes`, or 3 * bytes if the tokenizer asks for form NFC. Special tokens
   in the text are ordinary text; mtt_prepare drops those that only separate documents before it encodes.
   Added tokens that are not special, as Qwen's <think>, become their ids. */
MTTDEF mtt_status mtt_encode(mtt_tokenizer *tokenizer, const char *text, size_t bytes, int32_t *ids,
                             size_t capacity, size_t *count);
/* The same as transformers' tokenizer(text): special tokens in the text become their ids, too, and the text
   begins with mtt_tokenizer_begin_of_text, if there is one. *count is at most one more. */
MTTDEF mtt_status mtt_encode_prompt(mtt_tokenizer *tokenizer, const char *text, size_t bytes, int32_t *ids,
                                    size_t capacity, size_t *count);
/* Decodes ids to at most `capacity` bytes, not terminated. *bytes is the number that they need. */
MTTDEF mtt_status mtt_decode(const mtt_tokenizer *tokenizer, const int32_t *ids, size_t count, char *text,
                             size_t capacity, size_t *bytes);

/* A kind of tokenizer. Its functions use private structs, so they are compiled in the file with the
   implementation. mtt.h copies the table, and reads the options only while it makes a tokenizer. */
struct mtt__json_file;
struct mtt__strings;
struct mtt__ids;
struct mtt_tokenizer_kind {
    const char *name;     /* its model.type in a tokenizer.json */
    const void *options;  /* of a type that the kind knows, or NULL */
    size_t options_bytes; /* if these bytes change, mtt_prepare makes the dataset again */
    mtt_status (*create)(mtt_tokenizer *t);
    void (*destroy)(mtt_tokenizer *t);
    mtt_status (*load)(mtt_tokenizer *t, struct mtt__json_file *file);
    mtt_status (*learn)(mtt_tokenizer *t, int vocab, const struct mtt__strings *words); /* words and counts */
    size_t (*cut)(const mtt_tokenizer *t, const char *text, size_t bytes); /* length of the first word */
    mtt_status (*spell)(const mtt_tokenizer *t, const char *word, size_t bytes, struct mtt__ids *ids);
    void (*print)(const mtt_tokenizer *t, mtt_write_fn write, void *user); /* a tokenizer.json */
    const char *end_of_text; /* text of the id that ends a document, if the tokenizer is trained */
};

/* BPE as a kind. `options` may be NULL; they must stay until the tokenizer has been loaded or trained. */
MTTDEF mtt_tokenizer_kind mtt_bpe(const mtt_bpe_options *options);
/* ---------------------------------------------------------------------------------------------- data ---- */

/* The three parts of a corpus. Of every 20 documents in a row, 17 go to train, 2 to valid and 1 to test (85,
   10 and 5 %). The seed decides which. */
typedef enum mtt_split { MTT_TRAIN, MTT_VALID, MTT_TEST, MTT_SPLIT_COUNT } mtt_split;

/* mtt_prepare reads documents one after another from plain text, JSONL or standard input ("-"). It never
   holds a whole file. A file that begins with '{', '"' or '[' is JSONL: each document is the named field of a
   line, which is a string or a list of strings (joined by a blank line), or a line that is a string itself.
   Behind blank lines a JSON value is JSONL, too, and so are the records of a JSON text sequence (RFC 7464),
   one a line. Refuses NUL bytes, other encodings, and a field of plain text.
   Documents of plain text end at lines that are only the tokenizer's end of text, which are dropped, as it is
   at the end of a field. Within a line or a field it is ordinary text. Such documents are cut only at the
   first line end after 16 MiB. Where the first 5 MiB have fewer than 20, plain text is cut at the first blank
   line after 4 KiB (MTT_DOCUMENT_BYTES), line end after 64 KiB or character after 256 KiB, too. Where that
   gives fewer than 20 documents, which is too few to split, the text is cut into about 20 to 40 pieces, at
   blank lines, line ends or spaces if it has them. */

/* The input, the output and the options of mtt_prepare. Zero means the default. */
typedef struct mtt_prepare_desc {
    const char *input;     /* required: a file or a pipe, "-" is standard input; a pipe is copied to
                              {output}.spool */
    const char *output;    /* required: the prefix of the files, at most 2000 bytes */
    const char *field;     /* of JSONL documents, default "text" */
    const char *tokenizer; /* a file for mtt_tokenizer_load, default none: train one */
    const mtt_tokenizer_kind *kind; /* to train, or to load besides BPE; default BPE only */
    int vocab;             /* ids of the trained tokenizer, default 10,000 */
    uint64_t seed;         /* of the split, default 0 */
    int reuse_only;        /* 1 = write nothing: a dataset that is not up to date is MTT_E_MISMATCH, and the
                              error says why. Tokenizer and vocab are compared only if one of them is given */
    /* Called after about each MiB of text, with the bytes read so far; to train a tokenizer, the text is read
       twice. Returns 0, or another value to stop: MTT_END, and the old dataset stays. Default none. */
    int (*progress)(void *user, uint64_t bytes);
    void *user;
} mtt_prepare_desc;

typedef struct mtt_prepare_report {
    uint64_t documents[MTT_SPLIT_COUNT], bytes[MTT_SPLIT_COUNT], tokens[MTT_SPLIT_COUNT];
    uint64_t invalid, first_invalid; /* bytes that are not UTF-8 but are kept, and the place of the first */
    uint64_t wide;      /* characters of two bytes or more that have UTF-8's form, if not its values */
    uint32_t controls;  /* bit i: byte 0x80 + i is one of `invalid` */
    int vocab;
    int reused;         /* 1 = the dataset was up to date; nothing was counted within the text */
    int jsonl;          /* 1 = the text is JSONL; 0 = plain text */
    int separated;      /* 1 = documents of plain text end only at end_of_text; 2 = there and elsewhere */
    char end_of_text[48];     /* of the tokenizer, cut to 47 bytes */
    uint64_t dropped, inside; /* ends of text that separated documents; those that are ordinary text */
    char inside_text[48];     /* what `inside` counts: end_of_text or that of other tokenizers */
} mtt_prepare_report;

/* Makes a dataset from a text: {output}.tokenizer.json, {output}.train.tokens, .valid.tokens and
   .test.tokens. The tokenizer is trained on the train split only. Each document begins with the tokenizer's
   begin of text, if it has one, and ends with its end of text, such as <|endoftext|> or [SEP]. A dataset that
   was made from the same text, options and tokenizer is up to date and stays; the call then reads the text
   and the token files once. Standard input and pipes are read once and always prepared again; other devices
   are refused. New files are written beside the old ones, then renamed, the tokenizer last. A process that
   dies leaves the old dataset, the new one, or one that cannot be opened. `report` may be NULL. */
MTTDEF mtt_status mtt_prepare(mtt_env *env, const mtt_prepare_desc *desc, mtt_prepare_report *report);

/* Opens the files of a dataset. Fails if one is missing or damaged, or if they do not belong together. */
typedef struct mtt_dataset {
    mtt_tokens *train, *valid, *test; /* test is NULL if there is no such file */
    mtt_tokenizer *tokenizer;
} mtt_dataset;

MTTDEF mtt_status mtt_dataset_open(mtt_env *env, const char *prefix, const mtt_tokenizer_kind *kind,
                                   mtt_dataset *dataset);
MTTDEF void mtt_dataset_close(mtt_dataset *dataset);

/* A token file: a header of 64 bytes, then ids of 16 bits (vocabularies up to 65,536) or 32. A file may be
   larger than memory. Opening reads it once, to check every id and the checksum: about 1 s for 1 GB. */
MTTDEF mtt_status mtt_tokens_open(mtt_env *env, const char *path, mtt_tokens **out);
MTTDEF void mtt_tokens_close(mtt_tokens *tokens);
MTTDEF uint64_t mtt_tokens_count(const mtt_tokens *tokens);
MTTDEF int mtt_tokens_vocab(const mtt_tokens *tokens); /* ids are below this */
MTTDEF uint32_t mtt_tokens_crc32(const mtt_tokens *tokens); /* of the ids, so that ranks can compare files */
/* The same of ids in memory, 0 to vocab - 1, which are copied. For mtt_batches_init and
   mtt_evaluate_tokens. */
MTTDEF mtt_status mtt_tokens_copy(mtt_env *env, const int32_t *ids, size_t count, int vocab,
                                  mtt_tokens **out);
/* Copies `count` ids, starting at `first`. MTT_E_FILE: the file has changed since it was opened. */
MTTDEF mtt_status mtt_tokens_read(const mtt_tokens *tokens, uint64_t first, size_t count, int32_t *ids);

#endif /* MTT_NO_TEXT */

/* Batches of B sequences of T tokens. Sequence k holds ids kT .. kT+T of the file; targets are one ahead of
   tokens. Shuffled batches run through a new permutation of the sequences in each epoch, a function of (seed,
   epoch). The cursor counts sequences, so a loader can continue anywhere. */
struct mtt_batches {
    const mtt_tokens *tokens; /* must stay */
    int batch, seq_len;
    uint64_t seed;
    int sequential;     /* 0 = shuffled, without end; 1 = in order, once, with the shorter sequence at the
                           file's end; targets of -1 fill that sequence and the last batch */
    uint64_t sequences; /* in the file, the shorter one included if sequential */
    uint64_t cursor;    /* sequences handed out so far, to all ranks */
    int rank, ranks;    /* set by the caller: of each `ranks` batches in a row this loader hands out number
                           `rank`; 0 and 0, or 0 and 1: all */
    uint32_t crc32;     /* of the file's ids */
};

#ifndef MTT_NO_TEXT
/* Refuses a file that is shorter than a sequence, or than 2 tokens if sequential. A step refuses ids that are
   not below the model's vocabulary: compare mtt_tokens_vocab with it before. */
MTTDEF mtt_status mtt_batches_init(mtt_env *env, mtt_batches *batches, const mtt_tokens *tokens, int batch,
                                   int seq_len, uint64_t seed, int sequential);
/* Writes batch * seq_len tokens and as many targets; MTT_END after the last batch of a sequential loader. */
MTTDEF mtt_status mtt_batches_next(mtt_batches *batches, int32_t *tokens, int32_t *targets);

/* Quality over a whole token file, in order and to its last token: the trainer's batch and sequence length,
   at most `batches` of them (0 = all). The tokenizer says how many bytes of text the targets are; it may be
   NULL, and bits_per_byte is then 0. If `stop` is not NULL, a signal handler may set *stop: then the
   evaluation ends after the batch under way, on all ranks, with MTT_END and the quality so far. */
typedef struct mtt_quality {
    double loss, perplexity; /* mean cross entropy in nats, and e to the power of it */
    double bits_per_byte;    /* comparable between vocabularies, unlike perplexity */
    double accuracy;         /* share of targets with the largest logit */
    int64_t targets;
} mtt_quality;
MTTDEF mtt_status mtt_evaluate_tokens(mtt_trainer *trainer, const mtt_tokens *tokens,
                                      const mtt_tokenizer *tokenizer, int batches,
                                      const volatile sig_atomic_t *stop, mtt_quality *quality);
#endif /* MTT_NO_TEXT */

#ifndef MTT_NO_MODELS
/* -------------------------------------------------------------------------------------------- models ---- */

/* A model in files: a checkpoint of mtt_save, or a folder of Hugging Face's transformers. The folder has
   config.json, of model_type gpt2, llama or qwen3, and model.safetensors or the shards that
   model.safetensors.index.json lists, in F32, F16 or BF16. Settings and defaults are those of transformers 5:
   a lm_head.weight that differs from the embedding is not tied, for example. Opening checks every name, type
   and shape, and maps the files without reading the weights. MTT_E_FORMAT and MTT_E_MISMATCH name the setting
   that mtt lacks, or the first tensor that is missing, too many, or of another shape. */
typedef struct mtt_model mtt_model;
MTTDEF mtt_status mtt_model_open(mtt_env *env, const char *path, mtt_model **out);
MTTDEF void mtt_model_close(mtt_model *model);
/* Resolved. max_seq is max_position_embeddings of a folder; dropout is 0. */
MTTDEF const mtt_model_desc *mtt_model_describe(const mtt_model *model);
/* The path of the tokenizer.json in the folder; NULL if there is none. It lives as long as the model. */
MTTDEF const char *mtt_model_tokenizer(const mtt_model *model);
/* The text of mtt_trainer_set_note in a checkpoint; NULL if there is none. It lives as long as the model. */
MTTDEF const char *mtt_model_note(const mtt_model *model);
/* How a model was trained: the window, 0 = all keys, and the length of sequences, 0 = unknown, since it was
   saved without batches. A folder has max_position_embeddings, and what was trained from it at least that. */
MTTDEF void mtt_model_training(const mtt_model *model, int *window, int *seq_len);
/* A parameter by its name in mtt_parameter, in FP32 and in mtt's shape. Checks checksums, and that all values
   are finite. */
MTTDEF mtt_status mtt_model_read(mtt_model *model, const char *name, float *values);
/* Sets all weights of a trainer of the same description, dropout aside. Everything else is as after
   mtt_trainer_create: new adapters, no moments, step 0. MTT_E_MISMATCH names the field that differs. All
   ranks call it, with the same weights. */
MTTDEF mtt_status mtt_trainer_load(mtt_trainer *trainer, mtt_model *model);

/* Names and layouts of tensors in files: of mtt_save, of Hugging Face's safetensors, of llama.cpp's GGUF. */
typedef enum mtt_form { MTT_FORM_MTT, MTT_FORM_HUGGING_FACE, MTT_FORM_GGUF } mtt_form;

/* A tensor of a file: a parameter of mtt, or some of its columns. A vector is one row. */
typedef struct mtt_form_tensor {
    char name[96], parameter[64]; /* in the file, in mtt */
    int64_t rows, columns;        /* as mtt has them */
    int64_t first, width;         /* first column in the parameter, and the parameter's columns */
    int vector, transposed;       /* transposed: the file has `columns` rows */
    int pairs, d_head; /* columns of a head are in another order, see mtt_form_column: 1 = the file has rotary
                          pairs side by side, -1 = mtt has; 0 = the same order */
} mtt_form_tensor;

/* Lists the tensors of a resolved model; *cursor is 0 at first. Returns 0 past the last one. */
MTTDEF int mtt_form_next(const mtt_model_desc *model, mtt_form form, int64_t *cursor,
                         mtt_form_tensor *tensor);
/* The column of the parameter that is column i of the tensor. */
MTTDEF int64_t mtt_form_column(const mtt_form_tensor *tensor, int64_t i);
/* Radians by which pair i of a head turns from token to token, in a resolved model. */
MTTDEF double mtt_rotary_step(const mtt_model_desc *model, int pair);
/* The model_type in which other programs can have a resolved model: gpt2, llama or qwen3. MTT_E_MISMATCH:
   they cannot; the error names the first field in the way, and the value that it needs. */
MTTDEF mtt_status mtt_form_family(mtt_env *env, const mtt_model_desc *model, const char **family);
#endif /* MTT_NO_MODELS */

#ifndef MTT_NO_GENERATOR
/* ----------------------------------------------------------------------------------------- generator ---- */

/* How to draw an id from logits. Equal logits are in or out together. */
typedef struct mtt_sampling {
    float temperature; /* divides the logits; 0 = always the largest one */
    int top_k;         /* draw from this many of the most likely ids; 0 = all */
    float top_p;       /* and of these from the fewest of the most likely ones that have this share of their
                          probability (nucleus sampling, Holtzman et al. 2020); 0 or 1 = all */
    float min_p;       /* and of these those that have at least this share of the most likely one's
                          probability (Nguyen et al. 2024, arXiv 2407.01082); 0 = all */
    float repetition_penalty; /* before all this, logits of ids that the prompt or the text has already are
                                 divided by it if positive, else multiplied (Keskar et al. 2019, arXiv
                                 1909.05858), as in transformers; 1e-6 to 1e6, 0 or 1 = off. mtt_sample does
                                 not know these ids, and leaves it to mtt_generate and mtt_generator_run */
    uint64_t seed;
} mtt_sampling;

/* Draws an id, a function of (logits, sampling, index). */
MTTDEF int32_t mtt_sample(const float *logits, int vocab, const mtt_sampling *sampling, uint64_t index);

/* What happens when a sequence fills its context. Slide: its last half is kept and computed again, at places
   from 0. Keeping all but one token would cost a pass over the context for each token; this costs about two
   tokens' work for each. Of a prompt longer than the context the end is taken. Stop: the sequence ends, and a
   longer prompt is refused. */
typedef enum mtt_full_context { MTT_CONTEXT_SLIDE, MTT_CONTEXT_STOP } mtt_full_context;

/* Receives a drawn id and the text that is ready now, if any. Text that may begin a stop string waits. At the
   end of a sequence `id` is -1, and the text is what waited. `prompt` is the number of its prompt. Returns 0,
   or another value to end the generation, which then returns MTT_END. */
typedef int (*mtt_token_fn)(void *user, int prompt, int32_t id, const char *text, size_t bytes);

/* A task for mtt_generate or mtt_generator_run. */
typedef struct mtt_generation {
    const char *const *texts;      /* prompts, for mtt_encode_prompt; NULL: they are in the next two */
    const int32_t *const *prompts; /* ids; one of size 0 is the tokenizer's end of text */
    const int *sizes;              /* of each, in ids */
    int prompt_count;              /* any number: a generator has `batch` of them under way at a time */
    int count;                     /* ids to draw for each, at most; end of text ends a sequence before. 0:
                                      `write` is never called */
    mtt_sampling sampling;         /* of prompt number i, with seed + i: the same text alone or with others */
    const char *const *stops;      /* a sequence ends before the first of these strings in its text, */
    int stop_count;
    const int32_t *stop_ids;       /* or one of these ids, such as those that end a turn of a chat */
    int stop_id_count;
    mtt_full_context full_context;
    mtt_token_fn write;            /* required where `count` is above 0 */
    void *user;
} mtt_generation;

/* Continues prompts one after another, by full passes through the model, which sees the last seq_len ids: for
   samples during a training. mtt_generator_run is much faster. A call of one rank alone. `tokenizer` may be
   NULL: then there is no text, no end of text, no empty prompt and no stop string. Ids that it lacks are not
   drawn. MTT_E_ARGUMENT: no text came. */
MTTDEF mtt_status mtt_generate(mtt_trainer *trainer, mtt_tokenizer *tokenizer,
                               const mtt_generation *generation);

/* Generates text by weights alone, without gradients or an optimizer. A cache keeps the keys and values of
   the tokens before, so a step computes one token of each sequence. Prompts pass through in chunks of many
   rows, in which any sequences may meet. Everything is in one arena, which a plan knows to the byte before.
   FP32 and BF16. On a CPU without a BLAS the logits of a sequence are the same bits whatever is computed
   beside it, and those of mtt_next_logits with flash attention. On CUDA and with a BLAS, products of another
   size may round otherwise, and plain attention adds in another order and rounds its scores. */
typedef struct mtt_generator mtt_generator;

/* Zero means the default. */
typedef struct mtt_generator_desc {
    mtt_precision precision; /* of weights, activations and cache: FP32, the default, or BF16 */
    int window;              /* keys that a query attends to, its own too; default 0, all up to it */
    int batch;               /* sequences at a time, 1..2^20, default 1 */
    int context;             /* tokens of a sequence in the cache, 1..2^20, default the model's max_seq, which
                                also limits learned positions */
    int chunk;               /* tokens of prompts that pass at a time, 1..2^20, default 256; raised to batch
                                where it is lower */
    mtt_device device;       /* target of the plan, default the CPU; a generator takes its backend's */
} mtt_generator_desc;

/* The report describes one pass over `chunk` tokens of prompts. The cache counts as activations, and is part
   of the state. MTT_E_ARGUMENT: precision is neither FP32 nor BF16. */
MTTDEF mtt_status mtt_generator_plan(mtt_env *env, const mtt_model_desc *model,
                                     const mtt_generator_desc *desc, mtt_plan_report *report);
/* Takes the arena. Weights are 0 until they are set. MTT_E_BUDGET, MTT_E_MEMORY: the arena does not fit. */
MTTDEF mtt_status mtt_generator_create(mtt_env *env, const mtt_model_desc *model,
                                       const mtt_generator_desc *desc, const mtt_backend *backend,
                                       mtt_generator **out);
MTTDEF void mtt_generator_destroy(mtt_generator *generator);
/* A generator is a trainer that has weights alone. Take it for mtt_parameter, mtt_parameter_set,
   mtt_trainer_load, mtt_trainer_schedule, whose operations are those of a pass over a chunk, and
   mtt_trainer_device_bytes. Other calls refuse it. It belongs to the generator. */
MTTDEF mtt_trainer *mtt_generator_trainer(mtt_generator *generator);

/* Appends counts[i] tokens to sequence i of the cache, for each of the batch; 0 leaves it alone. `logits`, a
   row of `vocab` for each sequence, get those of the token after the last one; rows of sequences without new
   tokens stay. MTT_E_ARGUMENT: a sequence would be longer than the context; nothing has changed. */
MTTDEF mtt_status mtt_generator_append(mtt_generator *generator, const int32_t *const *tokens,
                                       const int *counts, float *logits);
/* Forgets all but the first `length` tokens of a sequence. */
MTTDEF mtt_status mtt_generator_cut(mtt_generator *generator, int sequence, int length);

/* As mtt_generate, by the cache. Forgets what it had. The device draws the ids. A repetition penalty takes
   longer: it brings the logits of all sequences to the host. */
MTTDEF mtt_status mtt_generator_run(mtt_generator *generator, mtt_tokenizer *tokenizer,
                                    const mtt_generation *generation);

#endif /* MTT_NO_GENERATOR */

#ifndef MTT_NO_SOCKETS
/* --------------------------------------------------------------------------------------------- ranks ---- */

/* A rank is one of several processes that train one model together, numbered from 0. This section connects
   them, each with every other. A collective is a call that all ranks make, in the same order. If a rank dies
   or stays silent, the calls of the others fail with MTT_E_RANK, and if it stops and says why, with
   MTT_E_STOPPED. The error names that rank. After a failure every later call on the handle fails in the same
   way. NULL is a valid handle: one rank.
   Ranks trust each other. A secret keeps out strangers who do not know it. Nothing is encrypted, and only
   TCP's checksum guards data after the start: who can change packets can read and change all. NCCL makes
   connections of its own, which know no secret. */


/* On one host: makes `ranks` processes, 1..1024, of the caller, which becomes rank 0. All of them return from
   the call, each with its own handle. They are connected before they start, so two runs cannot meet, and
   nothing is left on disk. Call it before OpenMP's first parallel region and before the first use of CUDA,
   which do not survive fork. Flush stdio before: each process would write what is in its buffers. A rank
   waits `timeout` seconds for another one, at most 86400; 0: 20 seconds. Each gets its share of OpenMP's
   threads, unless the environment has OMP_NUM_THREADS. */
MTTDEF mtt_status mtt_ranks_fork(mtt_env *env, int ranks, double timeout, mtt_ranks **out);

/* One rank of a run that a launcher has started, on one host or on several. Zero means the default. */
typedef struct mtt_ranks_desc {
    int rank, ranks;     /* this rank, below `ranks`; their number, 1..1024 */
    const char *address; /* of rank 0, a name or an IP address, default 127.0.0.1 */
    int port;            /* where rank 0 listens, default 29501: torchrun has 29500 itself */
    const char *run;     /* a name that the ranks of a run share, below 128 bytes, default "" */
    const char *secret;  /* of all ranks, default "" = none. They prove to know it, by keyed hashes of nonces;
                            who hears these can try guesses, so it has 16 random bytes or more */
    double timeout;      /* seconds, above 0, at most 86400, that a rank waits for another, default 20 */
    int mpi;             /* 1 = by MPI, whose ranks they are, and not by TCP; only with MTT_MPI */
} mtt_ranks_desc;

/* Connects the ranks by TCP. They meet at rank 0's address in any order, within the timeout. Whoever else
   comes to that port is turned away: another run, other programs, a second process of the same rank. Rank 0
   listens at its address alone, but at all of its host if the address is of no or several interfaces, or is a
   name, other than localhost, that means loopback there. The others listen at the address by which they reach
   rank 0, at ports that the system chooses: firewalls between the hosts must let them pass. With `mpi` the
   ranks are those of MPI_COMM_WORLD, and address, port, run and secret do not matter. MPI is started if
   nobody has done so, without a timeout, and then ended by mtt_ranks_close, unless ranks are lost. */
MTTDEF mtt_status mtt_ranks_connect(mtt_env *env, const mtt_ranks_desc *desc, mtt_ranks **out);

MTTDEF int mtt_ranks_rank(const mtt_ranks *ranks);  /* this one; 0 for NULL */
MTTDEF int mtt_ranks_count(const mtt_ranks *ranks); /* 1 for NULL */
/* Collective: fails everywhere with MTT_E_MISMATCH if the value differs between ranks. The error has `what`,
   both values, and the first rank that differs from rank 0. */
MTTDEF mtt_status mtt_ranks_agree(mtt_ranks *ranks, const char *what, uint64_t value);
/* Collective: *flag becomes 1 everywhere if it is not 0 on any rank, otherwise 0. For Ctrl-C. */
MTTDEF mtt_status mtt_ranks_any(mtt_ranks *ranks, int *flag);
/* Says to the others that this rank now does something long, such as writing a file. They wait for it without
   a limit until it takes part again. */
MTTDEF mtt_status mtt_ranks_busy(mtt_ranks *ranks);
/* Says to the others that this rank cannot go on, and why, in words for the errors of those who still need
   it. Call it before mtt_trainer_destroy if this rank has failed alone: the others may wait for it. A trainer
   calls it if its backend fails. Does nothing if the handle has failed before, so that all ranks name the
   same cause. Takes up to 2 seconds. */
MTTDEF void mtt_ranks_fail(mtt_ranks *ranks, const char *reason);
/* Takes leave of the others and frees the handle. Takes up to 2 seconds if other ranks are not at an end; by
   MPI up to twice the timeout, and longer for a busy one, since all ranks must end MPI. After mtt_ranks_fork,
   rank 0 then waits up to the timeout for its children to exit, or up to 5 seconds if the handle has failed,
   and kills those left. */
MTTDEF void mtt_ranks_close(mtt_ranks *ranks);
#endif

/* The structs of this interface, for mtt_sizeof. */
#ifdef MTT_NO_TEXT
#define MTT__TEXT_STRUCTS(X)
#else
#define MTT__TEXT_STRUCTS(X) X(mtt_tokenizer_kind) X(mtt_bpe_options) \
    X(mtt_prepare_desc) X(mtt_prepare_report) X(mtt_dataset) X(mtt_quality)
#endif
#ifdef MTT_NO_MODELS
#define MTT__MODELS_STRUCTS(X)
#else
#define MTT__MODELS_STRUCTS(X) X(mtt_form_tensor)
#endif
#ifdef MTT_NO_GENERATOR
#define MTT__GENERATOR_STRUCTS(X)
#else
#define MTT__GENERATOR_STRUCTS(X) X(mtt_sampling) X(mtt_generation) X(mtt_generator_desc) \
    X(mtt_choice) X(mtt_chosen)
#endif
#ifdef MTT_NO_SOCKETS
#define MTT__RANKS_STRUCTS(X)
#else
#define MTT__RANKS_STRUCTS(X) X(mtt_ranks_desc)
#endif
#define MTT__STRUCTS(X)                                                                                  \
    X(mtt_env) X(mtt_model_desc) X(mtt_policy) X(mtt_group) X(mtt_optim_desc) X(mtt_field)               \
    X(mtt_plan_report) X(mtt_backend) X(mtt_step_info) X(mtt_batches) X(mtt_json) X(mtt_slice)           \
    X(mtt_scale) X(mtt_tensor) X(mtt_shape) X(mtt_transfer) X(mtt_op) X(mtt_rate) X(mtt_control)         \
    X(mtt_counters) X(mtt_draw) X(mtt_qkv) X(mtt_update_rates) X(mtt_range)                             \
    X(mtt_part) X(mtt_count)                                                                             \
    MTT__TEXT_STRUCTS(X) MTT__MODELS_STRUCTS(X) MTT__GENERATOR_STRUCTS(X) MTT__RANKS_STRUCTS(X)

/* ---------------------------------------------------------------------------------------------- json ---- */

/* A reader for JSON in memory, such as the files that mtt writes. It allocates nothing and points into the
   caller's text, which must stay. The caller takes one value after another:

      for (mtt_json_begin(&j, '{'); mtt_json_key(&j, &key);)
          if (mtt_slice_is(key, "loss")) mtt_json_number(&j, &loss);
          else mtt_json_skip(&j);
      if (!mtt_json_end(&j)) printf("byte %zu: %s\n", (size_t)(j.at - j.begin), j.fault);

   Functions return 1, or 0 at an end or after a fault. The first fault stays: every later call returns 0, and
   gives an empty string or the number 0. So it is enough to look for a fault once. */
typedef struct mtt_json {
    const char *begin, *at, *end; /* the text, and the place in it */
    const char *fault;            /* NULL, or what is wrong at `at` */
    int first;                    /* private */
} mtt_json;

/* A string in the text, between its quotes and with its escapes. */
typedef struct mtt_slice {
    const char *at;
    size_t size;
} mtt_slice;

MTTDEF void mtt_json_init(mtt_json *j, const char *text, size_t bytes);
MTTDEF int mtt_json_peek(mtt_json *j);                /* first byte of the next value, 0 at the end */
MTTDEF int mtt_json_begin(mtt_json *j, int mark);     /* enters an object ('{') or an array ('[') */
MTTDEF int mtt_json_key(mtt_json *j, mtt_slice *key); /* in an object: takes a key; its value is next */
MTTDEF int mtt_json_item(mtt_json *j);                /* in an array: 1 = another item is next */
MTTDEF int mtt_json_string(mtt_json *j, mtt_slice *string);
MTTDEF int mtt_json_number(mtt_json *j, double *number); /* infinite if beyond a double */
MTTDEF int mtt_json_u64(mtt_json *j, uint64_t *number); /* a whole number from 0 to 2^64-1 */
MTTDEF int mtt_json_skip(mtt_json *j);                  /* any value, nested at most 16 deep */
MTTDEF int mtt_json_end(mtt_json *j);                   /* 1 = nothing follows and there was no fault */
/* Writes a string with its escapes undone and returns its size, at most string.size. `out` may be string.at
   itself. A lone surrogate becomes U+FFFD. */
MTTDEF size_t mtt_json_unescape(mtt_slice string, char *out);
MTTDEF int mtt_slice_is(mtt_slice string, const char *text); /* 1 = the bytes are the same */
MTTDEF int mtt_utf8_valid(const char *text, size_t bytes);   /* 1 = the bytes are well-formed UTF-8 */
/* Replaces by '?' what could command a terminal or reorder its text: control characters (also those of U+0080
   to U+009F), marks of direction, ends of line, malformed UTF-8. All texts of mtt_env.error are such. */
MTTDEF void mtt_make_printable(char *text);

/* --------------------------------------------------------------------------------------------- files ---- */

/* A file that is written beside its place and then takes it, so that at any instant the path has the old file
   or the new one. .NAME.tmp in the same folder is locked while it is written: a second writer of the path is
   refused. After a failure the temporary is gone, and further calls return the same status. To replace
   several files, finish all before the first is committed. */
typedef struct mtt_writer mtt_writer;
/* `bytes` is the size of the file if it is known, to find a full disk at once; else 0. The path names a
   regular file, a link that is then replaced, or nothing. */
MTTDEF mtt_status mtt_writer_open(mtt_env *env, const char *path, uint64_t bytes, mtt_writer **out);
MTTDEF mtt_status mtt_writer_put(mtt_writer *writer, const void *data, size_t bytes);
/* Overwrites bytes that were put before. */
MTTDEF mtt_status mtt_writer_patch(mtt_writer *writer, uint64_t offset, const void *data, size_t bytes);
MTTDEF mtt_status mtt_writer_finish(mtt_writer *writer); /* all bytes are on the disk, in the temporary */
MTTDEF mtt_status mtt_writer_commit(mtt_writer *writer); /* finishes, renames and syncs the folder; once */
MTTDEF void mtt_writer_close(mtt_writer *writer); /* without a commit, the path keeps what it has */

#ifdef __cplusplus
}
#endif

#endif /* MTT_H_INCLUDED */

#if (defined(MTT_BACKEND_API) || defined(MTT_IMPLEMENTATION)) && !defined(MTT_BACKEND_API_INCLUDED)
#define MTT_BACKEND_API_INCLUDED
#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------- backend ---- */
/* For authors of a backend, and for programs that look into a schedule: operations and tensors. */

/* The compute capability that a CUDA device needs for each mtt_precision, times 10. */
#define MTT_CUDA_CAPABILITIES {75, 80, 80, 75, 89}

/* ---- rows of wings ---- */

/* A wing is a technique that can be left out: its rows stand here, the rest of it in a room of
   its own behind the hall. MTT_IF_...(code) is code that only such a build has. */
#ifndef MTT_NO_RANKS
#define MTT_IF_RANKS(...) __VA_ARGS__

/* >>exchange: all_to_all sends each rank its share of the gradients, and receives this rank's share of
   theirs: first all of rank 0's, then those of rank 1, and so on, without this rank's own. sum_gradients then
   adds up the shares of all ranks in their order. all_gather sends `row` to all, and makes those `rows` that
   are of others. gather_squares, gather_sums and gather_weights send what this rank has made of `squares`, of
   mtt_op's `sums` and of its `weights`, and receive the rest. sum_squares makes a number of each block of the
   gradients of this rank's share, for grad_norm. sum_loss makes `count`, an mtt_count, and not the counters,
   where add_counts adds up those of all ranks. merge_records joins what all ranks have recorded in the table
   of scales.

   all_to_all and what gathers may end later than operations after them. These begin when they have ended:
   sum_gradients, add_counts, sum_squares, grad_norm, merge_records, operations that read gathered weights,
   and what follows in another list. */
#define MTT_RANK_OPS(X)                                                                                      \
    X(all_to_all, 0, MTT_OPERANDS(*received),                                                                \
      0, 2 * mtt__wire_bytes(op), 0)                                                                         \
    X(all_gather, 1, MTT_OPERANDS(*row, *rows),                                                              \
      0, 2 * mtt__wire_bytes(op), 0)                                                                         \
    X(gather_squares, 1, MTT_OPERANDS(*ranges, *squares),                                                    \
      0, 2 * mtt__wire_bytes(op), 0)                                                                         \
    X(gather_sums, 1, MTT_OPERANDS(*ranges),                                                                 \
      0, 2 * mtt__wire_bytes(op), 0)                                                                         \
    X(gather_weights, 1, MTT_OPERANDS(*ranges),                                                              \
      0, 2 * mtt__wire_bytes(op), 0)                                                                         \
    X(add_counts, 3, MTT_OPERANDS(*count, *counts, *control, *counters),                                     \
      mtt__count(o->counts), moved, 0)                                                                       \
    X(sum_squares, 1, MTT_OPERANDS(*ranges, *squares),                                                       \
      2 * parameters, moved, 0)                                                                              \
    MTT_IF_EIGHT(X(merge_records, 1, MTT_OPERANDS(*rows, *scales),                                           \
      mtt__count(o->rows), moved, 0))
#else
#define MTT_IF_RANKS(...)
#define MTT_RANK_OPS(X)
#endif /* MTT_NO_RANKS */

#ifndef MTT_NO_GENERATOR
#define MTT_IF_GENERATOR(...) __VA_ARGS__

/* >>generator: row i of gather's y is row index[i] of x, or zeros if that is negative. cached_attention takes
   rows of any sequences: row i is the token of sequence sequences[i] at place places[i], or none if that is
   negative; its output is then zeros. It writes k and v of its rows to the cache, [batch * heads_kv, context,
   d_head], and then attends to places up to each row's own. To all other operations of such a program, its
   rows are one sequence. choose_id takes an id from each row of logits, as that row's mtt_choice says, and
   makes an mtt_chosen. */
#define MTT_GENERATOR_OPS(X)                                                                                 \
    X(gather, 2, MTT_OPERANDS(*x, *index, *y),                                                               \
      mtt__count(o->y), 2 * (double)o->y->bytes, 0)                                                          \
    X(cached_attention, 3, MTT_OPERANDS(*qkv, *sequences, *places, *keys, *values, *out),                    \
      4 * mtt__count(o->out) * (double)o->keys->shape[1], moved, mtt__cached_scratch(d, o->keys->shape[1]))  \
    X(choose_id, 2, MTT_OPERANDS(*logits, *choices, *chosen),                                                \
      mtt__count(o->logits), moved, 0)

/* How choose_id takes an id from a row of logits. The ids in question are the top_k largest of the first
   `count`; of these the fewest of the largest that have a share top_p of all weights; of these those whose
   logit is the largest one minus `below`, or more. Equal logits are in or out together. */
typedef struct mtt_choice {
    double place;  /* in [0, 1): the id is the one at this part of the weights, laid side by side */
    float scale;   /* units of a logit, of which 2^24 halve a weight. 0 = take the largest logit, of equal
                      ones the first */
    float top_p;   /* 0, 1 = all */
    float below;
    int32_t top_k; /* 0 = all */
    int32_t count; /* 0 = take none */
    int32_t unused;
} mtt_choice;

/* What choose_id has taken. An id whose logit is not finite says that logits are wrong. */
typedef struct mtt_chosen {
    int32_t id; /* -1 = none */
    float logit;
} mtt_chosen;
#else
#define MTT_IF_GENERATOR(...)
#define MTT_GENERATOR_OPS(X)
#endif /* MTT_NO_GENERATOR */

#ifndef MTT_NO_ADAPTERS
#define MTT_IF_ADAPTERS(...) __VA_ARGS__

/* >>adapters: linear_adapted adds an adapter's (x A) B to a linear layer. The linear before it has made x A,
   times mtt_op's `scale`, by which linear_backward_input multiplies the gradient of x A. */
#define MTT_ADAPTERS_OPS(X)                                                                                  \
    X(linear_adapted, 5, MTT_OPERANDS(*x, *weight, *bias, *xa, *lora_b, *y),                                 \
      2 * mtt__count(o->y) * (mtt__columns(o->x) + mtt__columns(o->xa)), moved + 2 * (double)o->y->bytes, 0)
#define MTT__ADAPTERS_ADJOINTS(X) X(linear_adapted, linear_adapted)
/* A and B of each linear layer, in the order of mtt__linears, and x A. */
#define MTT__LORA (policy ? policy->lora_rank : 0)
#define MTT__ADAPTERS_PARAMETERS(X)                                                                          \
    X(QKV_A, "h.%d.attn.c_attn.lora_A", LAYER, m->d_model, MTT__LORA, UNIFORM, MTT__LORA)                    \
    X(QKV_B, "h.%d.attn.c_attn.lora_B", LAYER, MTT__LORA, qkv_width, ZEROS, MTT__LORA)                       \
    X(PROJ_A, "h.%d.attn.c_proj.lora_A", LAYER, m->heads * m->d_head, MTT__LORA, UNIFORM, MTT__LORA)         \
    X(PROJ_B, "h.%d.attn.c_proj.lora_B", LAYER, MTT__LORA, m->d_model, ZEROS, MTT__LORA)                     \
    X(FC_A, "h.%d.mlp.c_fc.lora_A", LAYER, m->d_model, MTT__LORA, UNIFORM, MTT__LORA)                        \
    X(FC_B, "h.%d.mlp.c_fc.lora_B", LAYER, MTT__LORA, mtt__fc_width(m), ZEROS, MTT__LORA)                    \
    X(MLP_A, "h.%d.mlp.c_proj.lora_A", LAYER, m->d_ff, MTT__LORA, UNIFORM, MTT__LORA)                        \
    X(MLP_B, "h.%d.mlp.c_proj.lora_B", LAYER, MTT__LORA, m->d_model, ZEROS, MTT__LORA)
#define MTT__ADAPTERS_ACTIVATIONS(X)                                                                         \
    X(QKV_XA, "attn.c_attn.xa", d->rows, b->policy->lora_rank, 0, USUAL, MTT_ACTIVATIONS, BY_LAYER, NONE)    \
    X(PROJ_XA, "attn.c_proj.xa", d->rows, b->policy->lora_rank, 0, USUAL, MTT_ACTIVATIONS, BY_LAYER, NONE)   \
    X(FC_XA, "mlp.c_fc.xa", d->rows, b->policy->lora_rank, 0, USUAL, MTT_ACTIVATIONS, BY_LAYER, NONE)        \
    X(MLP_XA, "mlp.c_proj.xa", d->rows, b->policy->lora_rank, 0, USUAL, MTT_ACTIVATIONS, BY_LAYER, NONE)
#else
#define MTT_IF_ADAPTERS(...)
#define MTT_ADAPTERS_OPS(X)
#define MTT__ADAPTERS_ADJOINTS(X)
#define MTT__ADAPTERS_PARAMETERS(X)
#define MTT__ADAPTERS_ACTIVATIONS(X)
#endif /* MTT_NO_ADAPTERS */

#ifndef MTT_NO_FP8
#define MTT_IF_EIGHT(...) __VA_ARGS__

/* >>eight: under FP8 a product sums along the rows of both operands, so some are needed transposed: `_t` is
   the transpose of a tensor in 8 bits, whose rows are padded to 16 elements. quantize rounds x, or x
   normalized where there are stats, and makes y, y_t or both. quantize_weights rounds a layer's weights, and
   transposes them where its results are `transposed`. linear and linear_backward_input take weights that are
   transposed where they need it; linear_backward_weight takes x_t and dy_t. activation_backward makes d_x,
   its transpose and the activation's result, transposed. norm_backward may also make dx in 8 bits, in both
   orders, and the norm's result, transposed, for which alone it has `shift`. out_8 is flash's output in 8
   bits, beside that in 16. With d_qkv_t, d_qkv is in 8 bits, too; seq_len is then a multiple of 16, since
   kernels write rows of d_qkv_t 16 tokens at a time. Both flash operations round to 16 bits first. rescale
   makes the scales of the next step. */
#define MTT_EIGHT_OPS(X)                                                                                     \
    X(quantize, 4, MTT_OPERANDS(*x, *stats, *gain, *shift, *y, *y_t),                                        \
      (o->stats ? 5 : 1) * mtt__count(o->x), moved, 0)                                                       \
    X(quantize_weights, 4, MTT_OPERANDS(*qkv, *proj, *fc, *mlp, *qkv_8, *proj_8, *fc_8, *mlp_8),             \
      mtt__count(o->qkv) + mtt__count(o->proj) + mtt__count(o->fc) + mtt__count(o->mlp), moved, 0)           \
    X(rescale, 0, MTT_OPERANDS(*scales, *counters),                                                          \
      mtt__count(o->scales), moved, 0)
#define MTT__EIGHT_ADJOINTS(X) X(quantize, quantize) X(quantize_weights, none)
/* The transposed weights, in the order of mtt__linears, and attention's output beside that in 16 bits. */
#define MTT__EIGHT MTT_F8_E4M3 /* the type of such a row */
#define MTT__EIGHT_ACTIVATIONS(X)                                                                            \
    X(QKV_EIGHT, "attn.c_attn.t8", qkv.row, d->d_model, 0, EIGHT, MTT_WEIGHTS, ALWAYS, NONE)                 \
    X(PROJ_EIGHT, "attn.c_proj.t8", d->d_model, wide, 0, EIGHT, MTT_WEIGHTS, ALWAYS, NONE)                   \
    X(FC_EIGHT, "mlp.c_fc.t8", d->d_fc, d->d_model, 0, EIGHT, MTT_WEIGHTS, ALWAYS, NONE)                     \
    X(MLP_EIGHT, "mlp.c_proj.t8", d->d_model, d->d_ff, 0, EIGHT, MTT_WEIGHTS, ALWAYS, NONE)                  \
    X(ATTENDED_EIGHT, "attn.out.8", d->rows, wide, 0, EIGHT, MTT_ACTIVATIONS, ONCE, NONE)
#else
#define MTT_IF_EIGHT(...)
#define MTT_EIGHT_OPS(X)
#define MTT__EIGHT_ADJOINTS(X)
#define MTT__EIGHT_ACTIVATIONS(X)
#endif /* MTT_NO_FP8 */

/* -----------------------------------------------------------------------------------------------------------
   >>operations
   -------------------------------------------------------------------------------------------------------- */

/* ---- tensors ---- */

/* Type, elements of a block, bytes of a block. */
#define MTT_DTYPES(X)                                                                   \
    X(MTT_F32, 1, 4)                                                                    \
    X(MTT_BF16_BITS, 1, 2)                                                              \
    X(MTT_F16_BITS, 1, 2)                                                               \
    X(MTT_F8_E4M3, 1, 1)                                                                \
    X(MTT_F8_E5M2, 1, 1)                                                                \
    X(MTT_I32, 1, 4)                                                                    \
    X(MTT_U8, 1, 1)
#define MTT__DTYPE_ENUM(dtype, block, bytes) dtype,
typedef enum mtt_dtype { MTT_DTYPES(MTT__DTYPE_ENUM) MTT_DTYPE_COUNT } mtt_dtype;

/* The scale of an 8-bit tensor, an entry of the state `scales`. The tensor holds its values times `scale`, a
   power of two. During a step, operations record the largest absolute value that they round; the operation
   rescale makes the next step's scale of it. e4m3 ends at 448: larger values are clipped and counted. */
typedef struct mtt_scale {
    float inverse, scale; /* inverse = 1 / scale, first: cuBLASLt refuses it if not aligned to 16 bytes */
    uint32_t largest;     /* the bits of a float, so that integers compare as these floats do */
    uint32_t clipped;     /* values, in this step */
} mtt_scale;

struct mtt_tensor {
    char name[40];
    mtt_dtype dtype;
    mtt_category category;
    int dims;        /* of its shape, 1 to 3 */
    int64_t shape[3];
    int transposed;  /* 1 = the weight of a linear layer, or its gradient, as [out, in], not [in, out] */
    mtt_place place; /* of the arena that it is in: the card's or the host's */
    size_t bytes;    /* of its elements; its slot in the arena is rounded up to 256 */
    size_t offset;   /* in the arena */
    void *data;      /* address; set once the arena exists */
    int first, last; /* operations between which it lives; state lives through all of them */
    int persistent;  /* 1 = state: the same place in every program */
    int role, layer; /* its row in the table of activations, and its layer; -1 = not an activation */
    int parameter;   /* the number of the parameter that it holds; -1 = none */
    int entry;       /* of an 8-bit tensor in the table of scales; -1 = none: its scale is 1 */
    mtt_scale *scale; /* the address of that entry, set with `data` */
    int recorded;    /* 1 = its largest value and what is clipped go into the entry */
    int index;       /* in mtt_schedule_tensors */
};

/* The numbers that a model, a batch and a policy fix for every operation. */
typedef struct mtt_shape {
    int batch, seq_len, layers, d_model, heads, heads_kv, d_head, d_ff, vocab, vocab_padded;
    int d_fc;      /* columns of the MLP's first matrix: d_ff, or 2 * d_ff with a gate */
    mtt_norm_form norm;
    float norm_eps;
    mtt_mlp mlp;
    int window;    /* keys that a query attends; 0 = all up to it */
    int rotary_interleaved;
    int64_t rows;  /* batch * seq_len */
    float dropout; /* 0 in evaluation */
    int ranks, rank;
} mtt_shape;

/* ---- operations ---- */

/* Operations. A row: name; number of inputs; operands, inputs first; and for the plan, which you may skip at
   first: FLOPs; bytes moved; bytes of scratch on CUDA. A row makes the struct mtt_op_<name>, whose members
   are the operands. An operand that is both input and output changes in place. An operand is absent (NULL)
   where the model, the policy or a frozen parameter has no use for it. sum_gradients, grad_norm and adamw
   work on the parameters in mtt_op's lists besides. In a row o is its struct, d the shape, `moved` the bytes
   of the operands on the card, twice where one is read and written, and `parameters` the elements of the
   gradients. cuBLASLt's scratch is not in the last column: it takes what mtt_policy.workspace_bytes gives.

   norm_backward's d_bias is the sum of the rows of dx, which is the gradient of the bias of the linear layer
   before the residual. Operands with _8 and _t are of FP8: see MTT_EIGHT_OPS.

   activation is the MLP's; x has 2 * d_ff columns with a gate. add joins the gradients of two uses of a
   tensor, where no norm's backward pass does. move copies x to y, in another place.

   rotary normalizes q and k, if there are gains, and rotates them, if there are angles: the cosine and the
   sine of each position and pair. linear_rotary does so in place, where the product is needed no further. The
   gradient of rotary is also made in place, or with dx_t in 8 bits; it is rounded to 16 bits first. */
#define MTT_OPERANDS(...) mtt_tensor __VA_ARGS__;
#define MTT_LOCAL_OPS(X)                                                                                     \
    X(embed, 4, MTT_OPERANDS(*tokens, *wte, *positions, *control, *x),                                       \
      mtt__count(o->x), 3 * (double)o->x->bytes, 0)                                                          \
    X(norm, 3, MTT_OPERANDS(*x, *gain, *shift, *y, *stats),                                                  \
      8 * mtt__count(o->x), moved, 0)                                                                        \
    X(linear, 3, MTT_OPERANDS(*x, *weight, *bias, *y),                                                       \
      2 * mtt__count(o->y) * mtt__columns(o->x), moved, 0)                                                   \
    X(activation, 1, MTT_OPERANDS(*x, *y),                                                                   \
      (mtt__ungated(d->mlp) == MTT_MLP_GELU ? 12 : 10) * mtt__count(o->y), moved, 0)                         \
    X(linear_gelu, 3, MTT_OPERANDS(*x, *weight, *bias, *pre, *y),                                            \
      (2 * mtt__columns(o->x) + (o->y ? 12 : 0)) * mtt__count(o->pre), moved,                                \
      o->bias ? 0 : 2 * mtt__width(o->pre))                                                                  \
    X(rotary, 4, MTT_OPERANDS(*qkv, *angles, *q_gain, *k_gain, *y),                                          \
      (o->q_gain ? 7 : 3) * mtt__count(o->y), moved, 0)                                                      \
    X(linear_rotary, 6, MTT_OPERANDS(*x, *weight, *bias, *angles, *q_gain, *k_gain, *y),                     \
      (2 * mtt__columns(o->x) + (o->q_gain ? 7 : 3)) * mtt__count(o->y), moved + 2 * (double)o->y->bytes, 0) \
    X(residual, 3, MTT_OPERANDS(*x, *branch, *control, *sum),                                                \
      mtt__count(o->sum), moved, 0)                                                                          \
    X(residual_norm, 5, MTT_OPERANDS(*x, *branch, *control, *gain, *shift, *sum, *y, *stats),                \
      9 * mtt__count(o->sum), moved, 0)                                                                      \
    X(attention_scores, 1, MTT_OPERANDS(*qkv, *scores),                                                      \
      2 * mtt__count(o->scores) * d->d_head, moved, 0)                                                       \
    X(softmax, 1, MTT_OPERANDS(*scores, *probs),                                                             \
      5 * mtt__count(o->probs), moved, 0)                                                                    \
    X(dropout_scores, 2, MTT_OPERANDS(*probs, *control, *dropped),                                           \
      mtt__count(o->dropped), moved, 0)                                                                      \
    X(attention_values, 2, MTT_OPERANDS(*probs, *qkv, *out),                                                 \
      2 * mtt__count(o->probs) * d->d_head, moved, 0)                                                        \
    X(flash, 2, MTT_OPERANDS(*qkv, *control, *out, *lse, *out_8),                                            \
      4 * mtt__attention_pairs(d) * d->d_head, moved, 0)                                                     \
    X(pick_row, 2, MTT_OPERANDS(*x, *control, *row),                                                         \
      mtt__count(o->row), 2 * (double)o->row->bytes, 0)                                                      \
    X(cross_entropy, 2, MTT_OPERANDS(*logits, *targets, *losses),                                            \
      4 * mtt__count(o->logits), moved, 0)                                                                   \
    X(chunked_loss, 8, MTT_OPERANDS(*x, *x_t, *weight, *weight_t, *bias, *targets, *control, *counters,      \
      *losses, *logits, *d_logits, *d_logits_t, *dx, *d_weight, *d_bias),                                    \
      (o->dx ? 6 : 2) * mtt__count(o->x) * d->vocab_padded, mtt__chunked_bytes(op),                          \
      o->d_logits && o->d_bias ? 4 * (size_t)d->vocab_padded : 0)                                            \
    X(sum_loss, 2, MTT_OPERANDS(*losses, *control, *counters, *count),                                       \
      mtt__count(o->losses), moved, 0)                                                                       \
    X(cross_entropy_backward, 5, MTT_OPERANDS(*logits, *losses, *targets, *control, *counters, *d_logits),   \
      4 * mtt__count(o->d_logits), moved, 0)                                                                 \
    X(linear_backward_weight, 2, MTT_OPERANDS(*x, *dy, *d_weight, *d_bias),                                  \
      o->d_weight ? 2 * mtt__count(o->d_weight) * (double)d->rows : mtt__count(o->dy), moved, 0)             \
    X(linear_backward_input, 2, MTT_OPERANDS(*dy, *weight, *dx),                                             \
      2 * mtt__count(o->dx) * mtt__columns(o->dy), moved, 0)                                                 \
    X(norm_backward, 6, MTT_OPERANDS(*dy, *x, *stats, *gain, *shift, *joined, *dx, *dx_8, *dx_t, *y_t,       \
      *d_gain, *d_shift, *d_bias),                                                                           \
      14 * mtt__count(o->dx) + (o->dx_t ? mtt__count(o->dx) : 0) + (o->y_t ? 5 * mtt__count(o->x) : 0),      \
      moved, (o->d_bias ? 12 : 8) * mtt__width(o->dx))                                                       \
    X(dropout_backward, 2, MTT_OPERANDS(*dy, *control, *dx),                                                 \
      mtt__count(o->dx), moved, 0)                                                                           \
    X(activation_backward, 2, MTT_OPERANDS(*dy, *x, *dx, *dx_t, *y_t),                                       \
      (mtt__ungated(d->mlp) == MTT_MLP_GELU ? 21 : 12) * mtt__count(o->x), moved, 0)                         \
    X(add, 2, MTT_OPERANDS(*a, *b, *sum),                                                                    \
      mtt__count(o->sum), moved, 0)                                                                          \
    X(linear_backward_gelu, 3, MTT_OPERANDS(*dy, *weight, *pre, *dx, *dx_t, *y_t, *d_bias),                  \
      2 * mtt__count(o->dx) * mtt__columns(o->dy) + 21 * mtt__count(o->dx), moved,                           \
      o->dx_t ? 512 * mtt__width(o->dx) + 512 : o->d_bias ? 8 * mtt__width(o->dx) : 0)                       \
    X(attention_values_backward, 3, MTT_OPERANDS(*d_out, *probs, *qkv, *d_probs, *d_qkv),                    \
      4 * mtt__count(o->d_probs) * d->d_head, moved, 0)                                                      \
    X(softmax_backward, 3, MTT_OPERANDS(*d_probs, *probs, *control, *d_scores),                              \
      5 * mtt__count(o->d_scores), moved, 0)                                                                 \
    X(attention_scores_backward, 2, MTT_OPERANDS(*d_scores, *qkv, *d_qkv),                                   \
      4 * mtt__count(o->d_scores) * d->d_head, moved, 0)                                                     \
    X(flash_backward, 5, MTT_OPERANDS(*d_out, *qkv, *out, *lse, *control, *d_qkv, *d_qkv_t),                 \
      10 * mtt__attention_pairs(d) * d->d_head, moved,                                                       \
      mtt__flash_scratch(d, o->qkv->dtype, 2 * (d->heads / d->heads_kv) + (d->heads > d->heads_kv)))         \
    X(rotary_backward, 5, MTT_OPERANDS(*dy, *qkv, *angles, *q_gain, *k_gain, *dx, *d_q_gain, *d_k_gain,      \
      *dx_t),                                                                                                \
      (o->q_gain ? 15 : 3) * mtt__count(o->dx), moved, o->q_gain ? mtt__rotary_scratch(d) : 0)               \
    X(embed_backward, 3, MTT_OPERANDS(*dx, *tokens, *control, *d_wte, *d_wpe),                               \
      mtt__count(o->dx), 3 * (double)o->dx->bytes,                                                           \
      mtt__sort_scratch(mtt__min(d->rows, MTT__SORT_LEAST), d->d_model))                                     \
    X(sum_gradients, 2, MTT_OPERANDS(*ranges, *received),                                                    \
      parameters, moved, 0)                                                                                  \
    X(grad_norm, 3, MTT_OPERANDS(*control, *ranges, *squares, *counters),                                    \
      2 * parameters, moved, o->ranges ? 8 * MTT__RANGE_BLOCKS * (size_t)op->range_count : 0)                \
    X(adamw, 3, MTT_OPERANDS(*control, *counters, *ranges, *master, *m, *v),                                 \
      16 * parameters, moved, 0)                                                                             \
    X(move, 1, MTT_OPERANDS(*x, *y),                                                                         \
      0, moved, 0)

#define MTT_WING_OPS(X) MTT_GENERATOR_OPS(X) MTT_ADAPTERS_OPS(X) MTT_EIGHT_OPS(X) MTT_RANK_OPS(X)
#define MTT_OPS(X) MTT_LOCAL_OPS(X) MTT_WING_OPS(X)
#define MTT__OP_ENUM(name, inputs, operands, flops, bytes, scratch) MTT_OP_##name,
typedef enum mtt_op_kind { MTT_OPS(MTT__OP_ENUM) MTT_OP_KIND_COUNT } mtt_op_kind;
#define MTT__OP_STRUCT(name, inputs, operands, flops, bytes, scratch)                   \
    typedef struct mtt_op_##name { operands } mtt_op_##name;
MTT_OPS(MTT__OP_STRUCT)

/* What goes to another rank and what comes from it. Either size may be 0, for nothing. */
struct mtt_transfer {
    int peer;
    const void *send;
    size_t send_bytes;
    void *receive;
    size_t receive_bytes;
};

struct mtt_op {
    mtt_op_kind kind;
    mtt_phase phase;
    int layer;      /* -1 outside the layers */
    int site;       /* of its dropout or rounding */
    int recomputed; /* 1 = run again for the backward pass */
    int adds;       /* 1 = adds to the gradient of its first parameter: embed_backward to a tied head's, a
                       chunk of a loss to those of the chunks before */
    int later;      /* sum_loss, sum_gradients: 1 = of a micro-batch after the first one of a step */
    float scale;    /* linear, linear_backward_input: multiplies the product; 0 = 1 */
    int inputs, outputs;
    mtt_tensor **operands;             /* as in the row, inputs first: see MTT_OPERANDS_OF */
    mtt_tensor **gradients;            /* sum_gradients, grad_norm, adamw: of some parameters, in order */
    mtt_tensor **sums, **weights;      /* sum_gradients: what they are added to; adamw: the parameters */
    struct mtt_part *parts;            /* which elements of each are this rank's */
    int parameters;                    /* how many these are */
    int first_range, range_count;      /* their entries in `ranges`, if there is one */
    const mtt_transfer *transfers;     /* all_to_all, all_gather: of the backend's memory. Those with one */
    int transfer_count;                /* peer are in the order of the peer's with this rank */
    const mtt_tensor *workspace;       /* scratch; on a CPU tiles of each thread, not in the arena */
    const mtt_shape *shape;
    size_t live_bytes, host_bytes;     /* on the card and on the host during the operation, with the state */
    size_t bytes[MTT_CATEGORY_COUNT];  /* those on the card by category */
    double flops, traffic_bytes;       /* as its row in the table says */
};

/* The operands by name: const mtt_op_norm *o = MTT_OPERANDS_OF(norm, op); then o->x, o->gain, ... */
#define MTT_OPERANDS_OF(name, op) ((const mtt_op_##name *)(const void *)(op)->operands)

/* 1 = the operation updates parameters, by whichever optimizer. */
#define MTT_IS_UPDATE(op) ((op)->gradients && (op)->weights)

/* ---- numbers of a step ---- */

/* The rates of some parameters: a factor of the learning rate, and the decay. */
typedef struct mtt_rate {
    float lr, decay;
} mtt_rate;

/* What changes from micro-batch to micro-batch: a tensor, so that a captured graph can be replayed. */
typedef struct mtt_control {
    uint64_t seed, micro_batch; /* random numbers are functions of both, site, layer and element */
    float lr, beta1, beta2, eps, clip;
    int64_t targets;            /* that count, in all micro-batches of the step */
    int32_t scaling;            /* 1 = FP16, FP8: scale the loss, skip steps that overflow */
    int32_t row;                /* the row that pick_row takes */
    mtt_rate rates[2 * MTT_MOST_GROUPS + 2]; /* of matrices and of vectors: without a group; of each group */
} mtt_control;

/* What the device counts; the host reads it after a step. */
typedef struct mtt_counters {
    double loss, grad_norm;
    int64_t targets, hits, updates, steps; /* updates: steps that changed the weights */
    int64_t clipped;                       /* values outside e4m3's range in the last step, under FP8 */
    float loss_scale, step_scale;          /* of the next step; of the gradients in memory */
    float gradient_scale;                  /* undoes step_scale and clips */
    float update_step, update_correction;    /* lr / (1 - beta1^updates), 1 / sqrt(1 - beta2^updates) */
    int32_t good_steps, skipped;           /* skipped: 1 = overflow, loss scaled; 2 = not finite in another
                                              precision, until the host resets it */
} mtt_counters;

/* ---- numbers that every backend computes alike: compiled for host and device ---- */

#ifdef __CUDACC__
#define MTT__BOTH static __host__ __device__ __forceinline__
#define MTT__UNROLL _Pragma("unroll")
#else
#define MTT__BOTH static inline MTT__UNUSED
#define MTT__UNROLL
#endif

#ifdef __cplusplus
#define MTT__CONSTANT constexpr MTT__BOTH /* of constants a constant */
#else
#define MTT__CONSTANT MTT__BOTH
#endif

MTT__BOTH int64_t mtt__min(int64_t a, int64_t b) { return a < b ? a : b; }
MTT__BOTH int64_t mtt__ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }
MTT__BOTH int64_t mtt__round_up(int64_t value, int64_t to) { return mtt__ceil_div(value, to) * to; }

/* Bytes of so many elements, in whole blocks; SIZE_MAX if they are more. */
MTT__BOTH size_t mtt__bytes_of(mtt_dtype dtype, size_t elements)
{
    size_t block = 1, bytes = 0;
    switch (dtype) {
#define MTT__DTYPE_BLOCK(dtype, block_of, bytes_of) case dtype: block = block_of, bytes = bytes_of; break;
        MTT_DTYPES(MTT__DTYPE_BLOCK)
    case MTT_DTYPE_COUNT: break;
    }
    elements = elements / block + (elements % block != 0);
    return bytes && elements > SIZE_MAX / bytes ? SIZE_MAX : elements * bytes;
}

MTT__BOTH int64_t mtt__elements(const mtt_tensor *t)
{
    int64_t product = 1;
    int i;
    for (i = 0; i < t->dims; i++) product *= t->shape[i];
    return product;
}

/* The last dimension, and the number of rows of that width. */
MTT__BOTH int64_t mtt__width(const mtt_tensor *t) { return t->shape[t->dims - 1]; }
MTT__BOTH int64_t mtt__rows(const mtt_tensor *t) { return mtt__elements(t) / mtt__width(t); }

/* An MLP's form without its gate. A gate's result is multiplied by `up`: the first matrix has d_ff columns of
   the gate, and then those of up. */
MTT__CONSTANT mtt_mlp mtt__ungated(mtt_mlp mlp) { return mlp == MTT_MLP_SWIGLU ? MTT_MLP_SILU : mlp; }
MTT__CONSTANT int mtt__is_gated(mtt_mlp mlp) { return mtt__ungated(mlp) != mlp; }

/* Neither infinite nor NaN, by its bits: options for fast arithmetic drop comparisons with either. */
MTT__BOTH int mtt__finite(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return (bits >> 52 & 0x7ff) != 0x7ff;
}

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

#ifndef MTT_NO_GENERATOR
/* A number in the order of floats, above 0. 0 and -0 have the same; a NaN has 0. */
MTT__BOTH uint32_t mtt__order(float x)
{
    uint32_t bits = mtt__float_bits(x), size = bits & 0x7fffffffu;
    uint32_t order = bits >> 31 && size ? ~bits : size | 0x80000000u;
    return size > 0x7f800000u ? 0 : order;
}

/* The weight of a logit x for choose_id: 2^31 for the largest one, halved for each 2^24 units below it.
   Weights are integers, so their sum is the same in any order, on every backend: threads may share it. The
   polynomial is within 7e-9 of 2^f, f in [0, 1), by the Chebyshev nodes of (2^f - 1) / f. */
MTT__BOTH uint32_t mtt__choice_weight(float most, float x, float scale)
{
    float distance = (most - x) * scale; /* no addition follows: a fused one would round otherwise */
    uint32_t units = distance < 536870912.0f ? (uint32_t)(int32_t)distance : 536870912u;
    uint32_t halvings = (units + 0xffffffu) >> 24, f = (0u - units) << 8, sum;
    sum = 2725622u + mtt__multiply_high(447061u, f);
    sum = 20727931u + mtt__multiply_high(sum, f);
    sum = 119176803u + mtt__multiply_high(sum, f);
    sum = 515883993u + mtt__multiply_high(sum, f);
    sum = 1488522215u + mtt__multiply_high(sum, f);
    sum = 2147483648u + mtt__multiply_high(sum, f);
    return halvings < 32 ? sum >> halvings : 0;
}
#endif /* MTT_NO_GENERATOR */

/* 128 random bits, returned as a value: a kernel keeps them in registers. */
typedef struct mtt_draw {
    uint32_t word[4];
} mtt_draw;

/* Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): 128 random bits as a
   function of a 128-bit counter and a 64-bit key, with no state to carry from one element to the next. */
MTT__BOTH mtt_draw mtt__draw_rounds(uint64_t key, uint64_t low, uint64_t high, int rounds)
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
        if (round + 1 == rounds) break; /* nvcc unrolls only a loop of constant length */
    }
    draw.word[0] = c0;
    draw.word[1] = c1;
    draw.word[2] = c2;
    draw.word[3] = c3;
    return draw;
}

/* Ten rounds are the authors' recommendation. */
MTT__BOTH mtt_draw mtt__draw(uint64_t key, uint64_t low, uint64_t high)
{
    return mtt__draw_rounds(key, low, high, 10);
}

MTT__BOTH void mtt__philox(uint64_t key, uint64_t low, uint64_t high, uint32_t out[4])
{
    mtt_draw draw = mtt__draw(key, low, high);
    memcpy(out, draw.word, sizeof(draw.word));
}

/* The site of a stream: the use of its numbers. */
enum {
    MTT__SITE_INIT, MTT__SITE_SHUFFLE, MTT__SITE_SPLIT, MTT__SITE_SAMPLE,
    MTT__SITE_EMBED, MTT__SITE_ATTENTION, MTT__SITE_PROJ, MTT__SITE_MLP, /* dropout */
    MTT__SITE_ROUND,                                                     /* of the compact state */
    MTT__SITE_LOGITS                                                     /* rounding of their gradients */
};

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

/* Random bits of an element of dropout, whose draw 128 / bits neighbours share. Attention has T elements for
   each head of a token, so there 16 share a draw. It has 7 rounds, the fewest that pass BigCrush (Salmon et
   al. 2011). Together that is a third of the work. */
MTT__BOTH int mtt__dropout_bits(const mtt_op *op) { return op->site == MTT__SITE_ATTENTION ? 8 : 16; }

MTT__BOTH mtt_draw mtt__dropout_draw(uint64_t seed, uint64_t index, uint64_t stream, int bits)
{
    return mtt__draw_rounds(seed, index, stream, bits == 8 ? 7 : 10);
}

MTT__BOTH uint32_t mtt__dropout_number(const uint32_t draw[4], int k, int bits)
{
    return draw[k * bits / 32] >> k * bits % 32 & ((1u << bits) - 1u);
}

/* Random bytes that round the gradients of logits: eight columns of two rows share a draw. Element (row,
   column) has byte row % 2 * 8 + column % 8. */
MTT__BOTH mtt_draw mtt__logits_draw(uint64_t seed, uint64_t stream, int64_t row, int64_t column,
                                    int64_t width)
{
    return mtt__dropout_draw(seed, (uint64_t)(row / 2 * (width / 8) + column / 8), stream, 8);
}

/* An element whose number is below the threshold is dropped; the others are multiplied by the scale. Of 8
   bits, a probability above 0 is at least 1/256. */
MTT__BOTH uint32_t mtt__dropout_threshold(float p, int bits)
{
    uint32_t threshold = (uint32_t)(p * (float)(1 << bits) + 0.5f);
    return threshold == 0 && p > 0 && bits == 8 ? 1u : threshold;
}

MTT__BOTH float mtt__dropout_scale(uint32_t threshold, int bits)
{
    uint32_t numbers = 1u << bits;
    return (float)numbers / (float)(numbers - threshold);
}

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
    int heads, heads_kv, d_head;
    int64_t row; /* elements between two tokens */
} mtt_qkv;

MTT__BOTH mtt_qkv mtt_qkv_of(const mtt_shape *d)
{
    mtt_qkv v;
    v.heads = d->heads;
    v.heads_kv = d->heads_kv;
    v.d_head = d->d_head;
    v.row = (int64_t)(d->heads + 2 * d->heads_kv) * d->d_head;
    return v;
}

/* The first column of a query head's part. */
MTT__BOTH int64_t mtt_qkv_column(const mtt_qkv *v, int part, int head)
{
    int kv = head / (v->heads / v->heads_kv);
    return (int64_t)(part == 0 ? head : v->heads + (part - 1) * v->heads_kv + kv) * v->d_head;
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

/* `yes` where the condition holds, otherwise `no`: by a mask, because GCC vectorizes no choice of which one
   side alone computes with floats. FP16 is then 10 times faster without AVX-512. */
MTT__BOTH uint32_t mtt__either(int condition, uint32_t yes, uint32_t no)
{
    uint32_t mask = 0u - (uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

/* ---- loss and update ---- */

/* The largest power of two up to x, from 2^-60 to 2^60. */
MTT__BOTH float mtt__power_of_two(float x)
{
    float low = 8.6736174e-19f, high = 1.1529215e18f;
    return mtt__bits_float(mtt__float_bits(x < low ? low : x > high ? high : x) & 0x7f800000u);
}

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
    /* the loss, too: early updates have no other sum */
    counters->skipped = mtt__finite(sum) && mtt__finite(counters->loss) ? 0 : control->scaling ? 1 : 2;
    counters->updates += !counters->skipped;
    counters->steps += counters->skipped != 2;
    if (!counters->skipped) { /* powers in double, once for all parameters */
        double updates = (double)counters->updates;
        counters->update_step = (float)((double)control->lr / (1.0 - pow((double)control->beta1, updates)));
        counters->update_correction = (float)(1.0 / sqrt(1.0 - pow((double)control->beta2, updates)));
    }
    if (!control->scaling) return;
    if (counters->skipped) {
        counters->loss_scale *= 0.5f;
        counters->good_steps = 0;
    } else if (++counters->good_steps == 2000) {
        if (counters->loss_scale < 1e37f) counters->loss_scale *= 2.0f;
        counters->good_steps = 0;
    }
}

/* What an update computes once for a parameter. */
typedef struct mtt_update_rates {
    float step;       /* lr / (1 - b1^t) */
    float correction; /* 1 / sqrt(1 - b2^t) */
    float keep;       /* 1 - lr * decay */
    float scale, b1, b2, eps;
} mtt_update_rates;

MTT__BOTH mtt_update_rates mtt__update_rates(const mtt_control *c, const mtt_counters *counters, int group)
{
    mtt_update_rates r;
    r.step = counters->update_step * c->rates[group].lr;
    r.correction = counters->update_correction;
    r.keep = 1.0f - c->lr * c->rates[group].lr * c->rates[group].decay;
    r.scale = counters->gradient_scale;
    r.b1 = c->beta1;
    r.b2 = c->beta2;
    r.eps = c->eps;
    return r;
}

/* m = b1 m + (1-b1) g, v = b2 v + (1-b2) g^2, w -= lr (m / (1-b1^t) / (sqrt(v / (1-b2^t)) + eps) + decay
   w) */
MTT__BOTH void mtt__adamw_element(const mtt_update_rates *r, float g, float *m, float *v, float *w)
{
    float d = g * r->scale;
    *m = r->b1 * *m + (1.0f - r->b1) * d;
    *v = r->b2 * *v + (1.0f - r->b2) * d * d;
    *w = r->keep * *w - r->step * *m / (sqrtf(*v) * r->correction + r->eps);
}

/* On a device one kernel updates all parameters: entries of `ranges` are pieces of up to MTT__RANGE elements
   of one parameter, each for MTT__RANGE_BLOCKS blocks of threads. */
enum { MTT__RANGE = 65536, MTT__RANGE_BLOCKS = 8, MTT__RANGE_BLOCK = MTT__RANGE / MTT__RANGE_BLOCKS };
typedef struct mtt_range {
    const void *made;      /* the gradient of a micro-batch. Of this and the next three, the address is where
                              element 0 of the parameter is, or would be */
    void *gradient;        /* that of the step: the same, or a sum in FP32 */
    const void *received;  /* of the first of the other ranks: see all_to_all */
    void *weight;
    int64_t first;         /* where element 0 of the parameter is, or would be, in master, m and v */
    int64_t mine, end;     /* elements of the parameter in this rank's share: from `mine`, below `end` */
    int64_t begin;         /* the piece: elements of the parameter from here */
    int32_t count;         /* and as many */
    int32_t block;         /* blocks with elements in all entries before */
    int32_t parameter;     /* its number */
    uint8_t group, made_dtype, gradient_dtype, unused; /* group: its entry in mtt_control.rates */
} mtt_range;

/* How a parameter is divided. The elements of a layer, and those before or after the layers, are blocks of
   MTT__RANGE_BLOCK of one parameter each. A rank's share is a run of them, up to `share` blocks. master, m
   and v are one tensor each, in which a parameter's part begins at a multiple of MTT__PART elements. */
enum { MTT__PART = 64 };
typedef struct mtt_part {
    int number, group;    /* of the parameter; its entry in mtt_control.rates */
    int64_t elements;     /* of the parameter, padded; 0 if it is frozen */
    int64_t block, share; /* its first block in the layer; blocks of a share */
    int64_t square;       /* its first block in the model */
    int64_t mine, end;    /* elements of this rank's share: from `mine`, below `end` */
    int64_t begin, count; /* those that it updates: its share, or all */
    int64_t first;        /* where they begin in master, m and v */
    int64_t base;         /* the element with which its sum begins: that of the share, or 0 */
} mtt_part;

/* What a rank counts in a micro-batch: the sum of losses, and the targets that have the largest logit. */
typedef struct mtt_count {
    double loss;
    int64_t hits;
} mtt_count;

/* Adds a micro-batch to the counters of the step. The first one starts them. */
MTT__BOTH void mtt__add_count(mtt_counters *counters, const mtt_count *count, int starts)
{
    if (starts) counters->loss = 0, counters->hits = 0;
    counters->loss += count->loss;
    counters->hits += count->hits;
}

MTT__BOTH float mtt__op_scale(const mtt_op *op) { return op->scale > 0 ? op->scale : 1.0f; }

#ifndef MTT_NO_RANKS
/* Operations between ranks, and those which begin when transfers have ended: see MTT_RANK_OPS. */
MTT__BOTH int mtt__is_transfer(const mtt_op *op)
{
    switch (op->kind) {
    case MTT_OP_all_to_all:
    case MTT_OP_all_gather:
    case MTT_OP_gather_squares:
    case MTT_OP_gather_sums:
    case MTT_OP_gather_weights: return 1;
    default: return 0;
    }
}

MTT__BOTH int mtt__needs_transfers(const mtt_op *op)
{
    return op->kind == MTT_OP_sum_gradients || op->kind == MTT_OP_add_counts ||
           op->kind == MTT_OP_sum_squares || op->kind == MTT_OP_grad_norm
           MTT_IF_EIGHT(|| op->kind == MTT_OP_merge_records);
}
#endif /* MTT_NO_RANKS */

/* ---- 8-bit floats ---- */

#ifndef MTT_NO_FP8
/* Rounds to nearest, ties to even. Values beyond 448 become 448; a NaN stays one. Below 2^-6, adding 2^14
   rounds to a multiple of 2^-9, the spacing of e4m3's subnormals. */
MTT__BOTH uint8_t mtt__to_e4m3(float x)
{
    uint32_t bits = mtt__float_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    uint32_t subnormal = mtt__float_bits(mtt__bits_float(magnitude) + 16384.0f) - 0x46800000u;
    uint32_t code = mtt__either(magnitude < 0x3c800000u, subnormal, normal);
    code = mtt__either(magnitude > 0x43e00000u, magnitude > 0x7f800000u ? 0x7fu : 0x7eu, code);
    return (uint8_t)(code | (bits >> 24 & 0x80u));
}

MTT__BOTH float mtt__from_e4m3(uint8_t code)
{
    uint32_t magnitude = (uint32_t)(code & 0x7fu) << 20;
    uint32_t bits = mtt__float_bits(mtt__bits_float(magnitude) * 1.329227995784916e36f); /* 2^120 */
    return mtt__bits_float(((code & 0x7fu) == 0x7fu ? 0x7fc00000u : bits) | (uint32_t)(code & 0x80u) << 24);
}

/* Takes the scale for the next step: half of e4m3's range, 448, is left for growth. The scale stays without a
   finite largest value, and after a skipped step. Returns the number of clipped values. */
MTT__BOTH uint32_t mtt__rescale(mtt_scale *s, int skipped)
{
    uint32_t clipped = s->clipped;
    float largest = mtt__bits_float(s->largest);
    if (!skipped && largest > 0 && largest < 3e38f) {
        s->scale = mtt__power_of_two(224.0f / largest);
        s->inverse = 1.0f / s->scale;
    }
    s->largest = s->clipped = 0;
    return clipped;
}

/* The scale of the logits' gradients in e5m2, which ends at 57344. They are at most mtt__loss_factor. */
MTT__BOTH void mtt__scale_logits(mtt_scale *s, const mtt_control *control, const mtt_counters *counters)
{
    s->scale = mtt__power_of_two(32768.0f / mtt__loss_factor(control, counters));
    s->inverse = 1.0f / s->scale;
}

#ifndef MTT_NO_RANKS
/* Joins what another rank has recorded of a tensor. Bits of positive floats are in their order. */
MTT__BOTH void mtt__merge_record(mtt_scale *s, const mtt_scale *other)
{
    if (other->largest > s->largest) s->largest = other->largest;
    s->clipped += other->clipped;
}
#endif
#endif /* MTT_NO_FP8 */

/* ---- scratch of operations on CUDA ---- */

/* The width of a head's tiles: 32, 64, 96, 128 or 256. */
MTT__BOTH int mtt__flash_width(int d_head)
{
    int width = 32;
    while (width < d_head) width = width == 64 ? 96 : width == 96 ? 128 : 2 * width;
    return width;
}

/* Scratch of flash attention's backward pass: a header of 256 bytes; then for each head of a group two
   statistics a token and, for 16-bit tensors, the running sums of dQ in tiles of 64 rows, with 64 bytes for
   each block of 32 keys or more. Heads that share keys need room for one head more: their blocks may hand
   over dK and dV. */
MTT__BOTH size_t mtt__flash_sums(const mtt_shape *d, mtt_dtype dtype)
{
    size_t tokens = (size_t)mtt__round_up(d->seq_len, 64);
    return dtype == MTT_F32 ? 0 : tokens * (4 * (size_t)mtt__flash_width(d->d_head) + 64 / 32);
}

MTT__BOTH size_t mtt__flash_scratch(const mtt_shape *d, mtt_dtype dtype, int heads)
{
    return 256 + (size_t)heads * (mtt__flash_sums(d, dtype) + 8 * (size_t)mtt__round_up(d->seq_len, 64));
}

/* The gradients of the gains of q and k: a row of sums for each block, of at least MTT__ROTARY_ROWS tokens.
   */
enum { MTT__ROTARY_ROWS = 32, MTT__ROTARY_BLOCKS = 1024 };
MTT__BOTH size_t mtt__rotary_scratch(const mtt_shape *d)
{
    int64_t blocks = mtt__min(mtt__ceil_div(d->rows, MTT__ROTARY_ROWS), MTT__ROTARY_BLOCKS);
    return 8 * (size_t)(blocks * d->d_head);
}

#ifndef MTT_NO_GENERATOR
/* Parts into which a row and head of cached_attention divides its places, at most: of 128 places or more
   each, if so few rows and heads leave a GPU empty. The number does not depend on how few, so that a row has
   the same bits among up to 256 / heads rows. Scratch: from each part its largest score, a sum and D columns;
   and a count of the parts of each row and head that are done. */
enum { MTT__CACHED_HEADS = 256, MTT__CACHED_PARTS = 16, MTT__CACHED_PLACES = 128 };
MTT__BOTH int mtt__cached_parts(const mtt_shape *d, int64_t context)
{
    if ((int64_t)d->rows * d->heads > MTT__CACHED_HEADS) return 1;
    return (int)mtt__min(MTT__CACHED_PARTS, mtt__ceil_div(context, MTT__CACHED_PLACES));
}

MTT__BOTH size_t mtt__cached_scratch(const mtt_shape *d, int64_t context)
{
    size_t parts = (size_t)mtt__cached_parts(d, context);
    return parts < 2 ? 0 : 4 * (size_t)(d->rows * d->heads) * (parts * (size_t)(d->d_head + 2) + 1);
}
#endif /* MTT_NO_GENERATOR */

/* The gradient of the embedding sorts the tokens of a slab of rows. Scratch: keys and values before and
   after, CUB's, and one row of sums at least. CUB needs 1 KiB for each 4,096 rows or more, and less than
   8 KiB for tables. A slab has MTT__SORT_LEAST rows or more, or all. */
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
        const mtt_op_##name *o = MTT_OPERANDS_OF(name, op);                                \
        return o ? (size_t)(scratch) : 0;                                               \
    }
        MTT_OPS(MTT__OP_SCRATCH)
    case MTT_OP_KIND_COUNT: break;
    }
    return 0;
}

/* The name of an operation, as in its row. */
MTTDEF const char *mtt_op_name(mtt_op_kind kind);
/* The name of a type in a safetensors file. */
MTTDEF const char *mtt_dtype_name(mtt_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif /* MTT_BACKEND_API */

#ifdef MTT_IMPLEMENTATION
#ifndef MTT_IMPLEMENTATION_DONE
#define MTT_IMPLEMENTATION_DONE

#include <errno.h>
#include <fcntl.h>
#if defined(__FAST_MATH__) || defined(_M_FP_FAST) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "mtt.h needs infinities and NaNs: compile without -ffast-math, -Ofast and -ffinite-math-only"
#elif defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "mtt.h runs on little-endian processors only: its files are in their byte order"
#elif !defined(O_CLOEXEC) && !defined(_WIN32)
#error "include mtt.h before other headers, or compile with -std=gnu99"
#else

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#ifdef _WIN32
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#include <io.h>
#else
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>
#ifdef __APPLE__
#include <mach-o/dyld.h>
#elif defined(__FreeBSD__) || defined(__NetBSD__)
#include <sys/types.h>
#include <sys/sysctl.h>
#endif
#endif
#ifndef MTT_NO_SOCKETS
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#ifdef MTT_MPI
#include <mpi.h>
#endif
#endif
#ifdef MTT_CBLAS
#include <cblas.h>
#endif
#if defined(__x86_64__) && defined(MTT__GNU)
#include <immintrin.h>
#if !defined(MTT_PORTABLE) && !defined(_MSC_VER) && (__GNUC__ >= 10 || __clang_major__ >= 9)
#define MTT__X86_BF16
#endif
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(MTT__GNU) && !defined(MTT_PORTABLE)
#include <arm_neon.h>
#define MTT__ARM_BF16
#endif

/* stb_sprintf, private to this file: its functions are static here, and its warnings are off. It negates the
   least int, which must wrap. */
#ifndef STB_SPRINTF_H_INCLUDE
#ifdef MTT__GNU
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wpedantic"
#pragma GCC diagnostic ignored "-Wimplicit-fallthrough"
#ifdef __clang__
#pragma clang attribute push(__attribute__((no_sanitize("signed-integer-overflow"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC optimize("wrapv")
#endif
#endif
#define STB_SPRINTF_STATIC
#define STB_SPRINTF_NOUNALIGNED
#define STB_SPRINTF_IMPLEMENTATION
#if defined(__has_include)
#if __has_include("stb_sprintf.h")
#include "stb_sprintf.h"
#elif __has_include("stb/stb_sprintf.h")
#include "stb/stb_sprintf.h"
#else
#error "mtt.h needs stb_sprintf.h: apt-get install libstb-dev, or put the file beside mtt.h"
#endif
#else
#include "stb_sprintf.h"
#endif
#undef STB_SPRINTF_IMPLEMENTATION
#undef STB_SPRINTF_STATIC
#ifdef __clang__
#pragma clang attribute pop
#pragma GCC diagnostic pop
#elif defined(MTT__GNU)
#pragma GCC pop_options
#pragma GCC diagnostic pop
#endif
#endif

/* -----------------------------------------------------------------------------------------------------------
   >>os
   -------------------------------------------------------------------------------------------------------- */

/* What mtt asks of an operating system, in one place; only >>ranks asks for more. Readers of the hall can go
   on with >>base. A call that fails returns -1 and sets errno. Interrupted calls are made again. */

#if defined(__linux__) && !defined(MADV_HUGEPAGE) /* without BSD's names, as under -std=c99 */
#define MADV_HUGEPAGE 14
#define MADV_DONTNEED 4
extern int madvise(void *block, size_t bytes, int advice);
#endif

/* Asks Linux for huge pages: a token of GPT-2 (124M) takes 10 % less time, because the processor looks up
   fewer addresses. */
static void mtt__os_huge_pages(void *block, size_t bytes)
{
#ifdef MADV_HUGEPAGE
    const uintptr_t page = 1 << 21, from = ((uintptr_t)block + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)block + bytes) / page * page;
    if (from < end) madvise((void *)from, end - from, MADV_HUGEPAGE); /* if it fails, pages are small */
#else
    (void)block, (void)bytes;
#endif
}

/* Gives back the memory of bytes `begin` to `end` of a part of a mapped file that was only read: the next use
   reads them again. Without it a file takes as much memory as the weights that are made of it. Pages come
   with their neighbours, so a MiB before `begin` goes, too. Windows has no such maps. */
static void mtt__os_forget(const void *part, size_t begin, size_t end)
{
#ifdef MADV_DONTNEED
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), before = begin < 1 << 20 ? begin : 1 << 20;
    const uintptr_t from = ((uintptr_t)part + begin - before) / page * page;
    madvise((void *)from, (uintptr_t)part + end - from, MADV_DONTNEED); /* if it fails, it stays in use */
#else
    (void)part, (void)begin, (void)end;
#endif
}

typedef enum mtt__file_kind { MTT__REGULAR, MTT__FOLDER, MTT__SPECIAL, MTT__STREAM } mtt__file_kind;

typedef struct mtt__file_info {
    mtt__file_kind kind; /* SPECIAL: a device; STREAM: a pipe or a socket */
    uint64_t bytes, device, number; /* device and number tell files apart */
    int64_t modified;
} mtt__file_info;

#ifndef _WIN32
/* System calls that fail when a disk is full or damaged. Tests define all seven to make them fail. */
#ifndef MTT__SYS_OPEN
#define MTT__SYS_OPEN open
#define MTT__SYS_READ read
#define MTT__SYS_PREAD pread
#define MTT__SYS_PWRITE pwrite
#define MTT__SYS_FSYNC fsync
#define MTT__SYS_CLOSE close
#define MTT__SYS_RENAME rename
#endif

/* Milliseconds of a clock that only goes forward. */
static double mtt__now_ms(void)
{
    struct timespec t = {0, 0};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* Starts this program again with a variable set. Comes back if that cannot be done. */
static MTT__UNUSED void mtt__os_restart(char **argv, const char *name, const char *value)
{
#ifdef __linux__
    const char *path = "/proc/self/exe";
#elif defined(__APPLE__)
    char path[4096] = "";
    uint32_t size = sizeof(path);
    if (_NSGetExecutablePath(path, &size)) return;
#elif defined(__FreeBSD__) || defined(__NetBSD__)
#ifdef __FreeBSD__
    int query[4] = {CTL_KERN, KERN_PROC, KERN_PROC_PATHNAME, -1};
#else
    int query[4] = {CTL_KERN, KERN_PROC_ARGS, -1, KERN_PROC_PATHNAME};
#endif
    char path[4096] = "";
    size_t size = sizeof(path);
    if (sysctl(query, 4, path, &size, NULL, 0)) return;
#else
    const char *path = argv[0]; /* no question has an answer there; a name without / is not searched for */
#endif
    if (!setenv(name, value, 1)) execv(path, argv);
    unsetenv(name);
}

/* How a file is opened. AT_ONCE does not wait for the writer of a named pipe, NO_LINK refuses a symbolic
   link, NEW makes the file and fails if there is one. */
enum {
    MTT__READ = O_RDONLY,
    MTT__READ_AT_ONCE = O_RDONLY | O_NONBLOCK,
    MTT__READ_NO_LINK = O_RDONLY | O_NONBLOCK | O_NOFOLLOW,
    MTT__WRITE_NEW = O_WRONLY | O_CREAT | O_EXCL
};
#define MTT__SEPARATORS "/" /* between folders in a path */

static int mtt__os_open(const char *path, int how)
{
    int fd;
    do fd = MTT__SYS_OPEN(path, how | O_CLOEXEC, 0666); /* the umask decides, as for every program's files */
    while (fd < 0 && errno == EINTR);
    return fd;
}

static void mtt__os_close(int fd)
{
    MTT__SYS_CLOSE(fd);
}

static mtt__file_info mtt__os_info_from(const struct stat *s)
{
    mtt__file_info info;
    info.kind = S_ISREG(s->st_mode) ? MTT__REGULAR : S_ISDIR(s->st_mode) ? MTT__FOLDER
              : S_ISCHR(s->st_mode) || S_ISBLK(s->st_mode) ? MTT__SPECIAL : MTT__STREAM;
    info.bytes = (uint64_t)s->st_size;
    info.device = (uint64_t)s->st_dev;
    info.number = (uint64_t)s->st_ino;
    info.modified = (int64_t)s->st_mtime;
    return info;
}

/* Tells what an open file is. */
static int mtt__os_info(int fd, mtt__file_info *info)
{
    struct stat s;
    int result = fstat(fd, &s);
    if (!result) *info = mtt__os_info_from(&s);
    return result;
}

/* Tells what a path names, behind links. */
static int mtt__os_find(const char *path, mtt__file_info *info)
{
    struct stat s;
    int result = stat(path, &s);
    if (!result) *info = mtt__os_info_from(&s);
    return result;
}

/* 1 = the path itself, and not a link, still names the open file. */
static int mtt__os_is_named(int fd, const char *path)
{
    struct stat mine, named;
    return !fstat(fd, &mine) && !lstat(path, &named) && mine.st_ino == named.st_ino &&
           mine.st_dev == named.st_dev;
}

/* 1 = there is a file that this process may read. */
static MTT__UNUSED int mtt__os_readable(const char *path)
{
    return !access(path, R_OK);
}

/* Reads up to `bytes` bytes, and at most 1 GiB. 0: the end. */
static MTT__UNUSED ptrdiff_t mtt__os_read(int fd, void *data, size_t bytes)
{
    ptrdiff_t n;
    do n = MTT__SYS_READ(fd, data, bytes < 1u << 30 ? bytes : 1u << 30);
    while (n < 0 && errno == EINTR);
    return n;
}

static MTT__UNUSED ptrdiff_t mtt__os_read_at(int fd, void *data, size_t bytes, uint64_t offset)
{
    ptrdiff_t n;
    do n = MTT__SYS_PREAD(fd, data, bytes < 1u << 30 ? bytes : 1u << 30, (off_t)offset);
    while (n < 0 && errno == EINTR);
    return n;
}

static ptrdiff_t mtt__os_write_at(int fd, const void *data, size_t bytes, uint64_t offset)
{
    ptrdiff_t n;
    do n = MTT__SYS_PWRITE(fd, data, bytes < 1u << 30 ? bytes : 1u << 30, (off_t)offset);
    while (n < 0 && errno == EINTR);
    return n;
}

/* macOS's fsync leaves the data in the disk's own memory. */
static int mtt__os_sync(int fd)
{
    int result;
#ifdef F_FULLFSYNC
    if (fcntl(fd, F_FULLFSYNC) != -1) return 0;
#endif
    do result = MTT__SYS_FSYNC(fd);
    while (result && errno == EINTR);
    return result;
}

/* Makes a rename in the folder last. Not every folder can be synced: that is no failure. */
static int mtt__os_sync_folder(const char *folder)
{
    int fd = mtt__os_open(folder, MTT__READ), error = fd < 0 || mtt__os_sync(fd) ? errno : 0;
    if (fd >= 0) mtt__os_close(fd);
    errno = error;
    return error && error != EACCES && error != EINVAL ? -1 : 0;
}

/* 0 = another process has locked the file. On a file system without locks nobody has. */
static int mtt__os_lock(int fd)
{
    return !flock(fd, LOCK_EX | LOCK_NB) || errno != EWOULDBLOCK;
}

static int mtt__os_rename(const char *from, const char *to)
{
    return MTT__SYS_RENAME(from, to);
}

static int mtt__os_remove(const char *path)
{
    return unlink(path);
}

/* 1 = the file system of an open file has room for so many bytes more, or does not say. */
static int mtt__os_has_room(int fd, uint64_t bytes)
{
    struct statvfs info;
    return fstatvfs(fd, &info) || !info.f_blocks || bytes / info.f_frsize < info.f_bavail;
}

/* Maps the first `bytes` bytes of a file, above 0, to memory. What is written there stays in memory. */
static int mtt__os_map(int fd, size_t bytes, char **data)
{
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    *data = map == MAP_FAILED ? NULL : (char *)map;
    return *data ? 0 : -1;
}

static void mtt__os_unmap(char *data, size_t bytes)
{
    munmap(data, bytes);
}

#else /* Windows */

enum { MTT__READ, MTT__READ_AT_ONCE, MTT__READ_NO_LINK, MTT__WRITE_NEW };
#define MTT__SEPARATORS "/\\:"
#ifndef EDQUOT
#define EDQUOT ENOSPC
#endif

/* The same functions for Windows. Paths are UTF-8. Locks there forbid reading, so a lock is on a byte far
   behind the end of a file. Nothing can be renamed over a file that is mapped, so files are read instead. All
   handles share their files, so that these can be renamed and removed while they are open. */
enum { MTT__SHARED = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, MTT__PATH_LETTERS = 4096 };

/* Sets errno by the last failure, and returns -1. */
static int mtt__os_fail(void)
{
    switch (GetLastError()) {
    case ERROR_FILE_NOT_FOUND: case ERROR_PATH_NOT_FOUND: case ERROR_INVALID_NAME: case ERROR_BAD_PATHNAME:
    case ERROR_INVALID_DRIVE: case ERROR_BAD_NETPATH: case ERROR_DIRECTORY: errno = ENOENT; break;
    case ERROR_FILENAME_EXCED_RANGE: case ERROR_INSUFFICIENT_BUFFER: errno = ENAMETOOLONG; break;
    case ERROR_NO_UNICODE_TRANSLATION: errno = EINVAL; break;
    case ERROR_ACCESS_DENIED: case ERROR_SHARING_VIOLATION: case ERROR_USER_MAPPED_FILE: errno = EACCES;
        break;
    case ERROR_LOCK_VIOLATION: errno = EWOULDBLOCK; break;
    case ERROR_WRITE_PROTECT: errno = EROFS; break;
    case ERROR_DISK_FULL: case ERROR_HANDLE_DISK_FULL: errno = ENOSPC; break;
    case ERROR_FILE_EXISTS: case ERROR_ALREADY_EXISTS: errno = EEXIST; break;
    case ERROR_NOT_ENOUGH_MEMORY: case ERROR_COMMITMENT_LIMIT: errno = ENOMEM; break;
    case ERROR_TOO_MANY_OPEN_FILES: errno = EMFILE; break;
    case ERROR_INVALID_HANDLE: errno = EBADF; break;
    default: errno = EIO;
    }
    return -1;
}

static double mtt__now_ms(void)
{
    LARGE_INTEGER count, second;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&second);
    return (double)count.QuadPart * 1e3 / (double)second.QuadPart;
}

static MTT__UNUSED void mtt__os_restart(char **argv, const char *name, const char *value)
{
    (void)argv, (void)name, (void)value; /* a console does not wait for a program that replaces another one */
}

static HANDLE mtt__os_handle(int fd)
{
    return (HANDLE)_get_osfhandle(fd);
}

/* 0: the last failure says why; a path is not UTF-8, or too long. */
static int mtt__os_wide(const char *path, wchar_t *wide)
{
    return MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, wide, MTT__PATH_LETTERS) > 0;
}

/* INVALID_HANDLE_VALUE: the last failure says why. */
static HANDLE mtt__os_create(const char *path, DWORD access, DWORD creation, DWORD flags)
{
    wchar_t wide[MTT__PATH_LETTERS];
    if (!mtt__os_wide(path, wide)) return INVALID_HANDLE_VALUE;
    return CreateFileW(wide, access, MTT__SHARED, NULL, creation, flags, NULL);
}

static void mtt__os_close(int fd)
{
    _close(fd);
}

static int mtt__os_info_from(HANDLE file, mtt__file_info *info)
{
    BY_HANDLE_FILE_INFORMATION f;
    DWORD type = GetFileType(file);
    memset(info, 0, sizeof(*info));
    info->kind = type == FILE_TYPE_CHAR ? MTT__SPECIAL : MTT__STREAM;
    if (type == FILE_TYPE_CHAR || type == FILE_TYPE_PIPE) return 0;
    if (!GetFileInformationByHandle(file, &f)) return mtt__os_fail();
    info->kind = f.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY ? MTT__FOLDER : MTT__REGULAR;
    info->bytes = (uint64_t)f.nFileSizeHigh << 32 | f.nFileSizeLow;
    info->device = f.dwVolumeSerialNumber;
    info->number = (uint64_t)f.nFileIndexHigh << 32 | f.nFileIndexLow;
    info->modified = (int64_t)f.ftLastWriteTime.dwHighDateTime << 32 | f.ftLastWriteTime.dwLowDateTime;
    return 0;
}

static int mtt__os_info(int fd, mtt__file_info *info)
{
    return mtt__os_info_from(mtt__os_handle(fd), info);
}

static int mtt__os_find_by(const char *path, DWORD flags, mtt__file_info *info)
{
    HANDLE file = mtt__os_create(path, 0, OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS | flags);
    int result = file == INVALID_HANDLE_VALUE ? mtt__os_fail() : mtt__os_info_from(file, info);
    if (file != INVALID_HANDLE_VALUE) CloseHandle(file);
    return result;
}

static int mtt__os_find(const char *path, mtt__file_info *info)
{
    return mtt__os_find_by(path, 0, info);
}

static int mtt__os_open(const char *path, int how)
{
    const DWORD flags = how == MTT__READ_NO_LINK ? FILE_FLAG_OPEN_REPARSE_POINT : FILE_ATTRIBUTE_NORMAL;
    const int writes = how == MTT__WRITE_NEW;
    HANDLE file = mtt__os_create(path, writes ? GENERIC_READ | GENERIC_WRITE : GENERIC_READ,
                                 writes ? CREATE_NEW : OPEN_EXISTING, flags);
    mtt__file_info info;
    int fd;
    if (file == INVALID_HANDLE_VALUE) {
        mtt__os_fail();
        if (errno == EACCES && !mtt__os_find(path, &info) && info.kind == MTT__FOLDER) errno = EISDIR;
        return -1;
    }
    fd = _open_osfhandle((intptr_t)file, _O_BINARY | _O_NOINHERIT);
    if (fd < 0) CloseHandle(file);
    return fd;
}

static int mtt__os_is_named(int fd, const char *path)
{
    mtt__file_info mine, named;
    return !mtt__os_info(fd, &mine) && !mtt__os_find_by(path, FILE_FLAG_OPEN_REPARSE_POINT, &named) &&
           mine.number == named.number && mine.device == named.device;
}

static MTT__UNUSED int mtt__os_readable(const char *path)
{
    int fd = mtt__os_open(path, MTT__READ);
    if (fd >= 0) mtt__os_close(fd);
    return fd >= 0;
}

static MTT__UNUSED ptrdiff_t mtt__os_read(int fd, void *data, size_t bytes)
{
    DWORD done = 0;
    if (ReadFile(mtt__os_handle(fd), data, (DWORD)(bytes < 1u << 30 ? bytes : 1u << 30), &done, NULL))
        return (ptrdiff_t)done;
    return GetLastError() == ERROR_BROKEN_PIPE ? 0 : mtt__os_fail();
}

static MTT__UNUSED ptrdiff_t mtt__os_read_at(int fd, void *data, size_t bytes, uint64_t offset)
{
    OVERLAPPED at;
    DWORD done = 0;
    memset(&at, 0, sizeof(at));
    at.Offset = (DWORD)offset, at.OffsetHigh = (DWORD)(offset >> 32);
    if (ReadFile(mtt__os_handle(fd), data, (DWORD)(bytes < 1u << 30 ? bytes : 1u << 30), &done, &at))
        return (ptrdiff_t)done;
    return GetLastError() == ERROR_HANDLE_EOF ? 0 : mtt__os_fail();
}

static ptrdiff_t mtt__os_write_at(int fd, const void *data, size_t bytes, uint64_t offset)
{
    OVERLAPPED at;
    DWORD done = 0;
    memset(&at, 0, sizeof(at));
    at.Offset = (DWORD)offset, at.OffsetHigh = (DWORD)(offset >> 32);
    if (WriteFile(mtt__os_handle(fd), data, (DWORD)(bytes < 1u << 30 ? bytes : 1u << 30), &done, &at))
        return (ptrdiff_t)done;
    return mtt__os_fail();
}

static int mtt__os_sync(int fd)
{
    return FlushFileBuffers(mtt__os_handle(fd)) ? 0 : mtt__os_fail();
}

static int mtt__os_sync_folder(const char *folder)
{
    (void)folder; /* mtt__os_rename writes through */
    return 0;
}

static int mtt__os_lock(int fd)
{
    OVERLAPPED at;
    memset(&at, 0, sizeof(at));
    at.OffsetHigh = 0x7fffffff;
    if (LockFileEx(mtt__os_handle(fd), LOCKFILE_EXCLUSIVE_LOCK | LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, &at))
        return 1;
    return GetLastError() != ERROR_LOCK_VIOLATION;
}

/* What is open can be replaced since Windows 10 (1709), if asked so. */
static int mtt__os_rename(const char *from, const char *to)
{
    struct {
        DWORD flags;
        HANDLE folder;
        DWORD bytes;
        wchar_t name[MTT__PATH_LETTERS];
    } info = {3, NULL, 0, {0}}; /* FILE_RENAME_INFO, with "replace" and "as POSIX" */
    wchar_t a[MTT__PATH_LETTERS], b[MTT__PATH_LETTERS];
    HANDLE file;
    if (!mtt__os_wide(from, a) || !mtt__os_wide(to, b)) return mtt__os_fail();
    if (MoveFileExW(a, b, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)) return 0;
    if (mtt__os_fail() && errno != EACCES) return -1;
    info.bytes = GetFullPathNameW(b, MTT__PATH_LETTERS, info.name, NULL) * (DWORD)sizeof(wchar_t);
    if (info.bytes >= sizeof(info.name)) return -1;
    file = mtt__os_create(from, DELETE | SYNCHRONIZE, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL);
    if (file == INVALID_HANDLE_VALUE) return -1;
    if (SetFileInformationByHandle(file, (FILE_INFO_BY_HANDLE_CLASS)22, &info, sizeof(info)))
        errno = 0; /* 22 is FileRenameInfoEx, which older headers lack */
    else if (GetFileAttributesW(b) != INVALID_FILE_ATTRIBUTES) errno = EBUSY;
    CloseHandle(file);
    return errno ? -1 : 0;
}

/* The name is free at once: a file that is open has another one until it is closed, and goes then. */
static int mtt__os_remove(const char *path)
{
    wchar_t wide[MTT__PATH_LETTERS], other[MTT__PATH_LETTERS + 64];
    size_t size;
    if (!mtt__os_wide(path, wide)) return mtt__os_fail();
    size = wcslen(wide);
    memcpy(other, wide, size * sizeof(*wide));
    wsprintfW(other + size, L".%lu.%lu.old", GetCurrentProcessId(), GetTickCount());
    return MoveFileExW(wide, other, 0) && DeleteFileW(other) ? 0 : DeleteFileW(wide) ? 0 : mtt__os_fail();
}

static int mtt__os_has_room(int fd, uint64_t bytes)
{
    wchar_t path[MTT__PATH_LETTERS], *end;
    ULARGE_INTEGER room;
    DWORD size = GetFinalPathNameByHandleW(mtt__os_handle(fd), path, MTT__PATH_LETTERS, 0);
    if (!size || size >= MTT__PATH_LETTERS || !(end = wcsrchr(path, L'\\'))) return 1;
    end[1] = 0;
    return !GetDiskFreeSpaceExW(path, &room, NULL, NULL) || bytes < room.QuadPart;
}

static void mtt__os_unmap(char *data, size_t bytes)
{
    (void)bytes;
    VirtualFree(data, 0, MEM_RELEASE);
}

static int mtt__os_map(int fd, size_t bytes, char **data)
{
    size_t done = 0;
    ptrdiff_t n = 1;
    *data = (char *)VirtualAlloc(NULL, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (!*data) return mtt__os_fail();
    while (done < bytes && (n = mtt__os_read_at(fd, *data + done, bytes - done, done)) > 0) done += (size_t)n;
    if (n >= 0) return 0; /* a file that was cut meanwhile ends in zeros */
    mtt__os_unmap(*data, bytes);
    *data = NULL;
    return -1;
}

#endif

/* The name of a file, behind its folders. */
static const char *mtt__os_name(const char *path)
{
    const char *name = path + strlen(path);
    while (name > path && !strchr(MTT__SEPARATORS, name[-1])) name--;
    return name;
}

/* -----------------------------------------------------------------------------------------------------------
   >>base
   -------------------------------------------------------------------------------------------------------- */

#define MTT__LENGTH(array) (sizeof(array) / sizeof((array)[0]))

#ifdef __MINGW32__
#define MTT__PRINTF(text, args) __attribute__((format(gnu_printf, text, args)))
#elif defined(MTT__GNU)
#define MTT__PRINTF(text, args) __attribute__((format(printf, text, args)))
#else
#define MTT__PRINTF(text, args)
#endif
#define MTT__INLINE static inline

#ifdef _OPENMP
#include <omp.h>
#if defined(_MSC_VER) && !defined(__clang__)
#define MTT__OMP(directive) __pragma(directive)
#else
#define MTT__OMP(directive) _Pragma(#directive)
#endif
/* OMP_NUM_THREADS of 2^31 and more is a number below 0. */
static int mtt__threads(void) { return omp_get_max_threads() < 1 ? INT_MAX : omp_get_max_threads(); }
static int mtt__thread(void) { return omp_get_thread_num(); }
static MTT__UNUSED void mtt__one_thread(void) { omp_set_num_threads(1); }
#else
#define MTT__OMP(directive)
static int mtt__threads(void) { return 1; }
static int mtt__thread(void) { return 0; }
static MTT__UNUSED void mtt__one_thread(void) {}
#endif

#define MTT__STRING(name, text) text,
static const char *const mtt__status_text[] = {MTT_STATUSES(MTT__STRING)};

MTTDEF int mtt_version(void)
{
    return MTT_VERSION;
}

MTTDEF size_t mtt_sizeof(const char *name)
{
#define MTT__NAME_AND_SIZE(type) {#type, sizeof(type)},
    static const struct {
        const char *name;
        size_t bytes;
    } structs[] = {MTT__STRUCTS(MTT__NAME_AND_SIZE)};
    size_t i = MTT__LENGTH(structs);
    while (i--)
        if (!strcmp(structs[i].name, name)) return structs[i].bytes;
    return 0;
}

MTTDEF void mtt_wait_passively(char **argv)
{
#ifdef _OPENMP
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    mtt__os_restart(argv, "OMP_WAIT_POLICY", "passive");
#else
    (void)argv;
#endif
}

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

/* Prints a text of its own. Returns `at`. */
MTT__PRINTF(3, 4) static char *mtt__format(char *at, size_t capacity, const char *format, ...)
{
    mtt__text text;
    va_list args;
    mtt__text_init(&text, at, capacity);
    va_start(args, format);
    mtt__print_va(&text, format, args);
    va_end(args);
    return at;
}

#define MTT__NONE UINT32_MAX /* no code point, no id, no place */

/* Returns the code point at `at`, and the size of its sequence. Where the bytes are malformed (overlong, a
   surrogate, cut short) it is MTT__NONE of size 1. */
MTT__INLINE uint32_t mtt__utf8_get(const unsigned char *at, const unsigned char *end, int *size)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    uint32_t c = at[0];
    int i, n = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : 2;
    *size = 1;
    if (c < 0x80) return c;
    if (c < 0xc0 || c > 0xf4 || end - at < n) return MTT__NONE;
    c &= 0x7fu >> n;
    for (i = 1; i < n; i++) {
        if ((at[i] & 0xc0) != 0x80) return MTT__NONE;
        c = c << 6 | (at[i] & 0x3fu);
    }
    if (c < least[n] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) return MTT__NONE;
    *size = n;
    return c;
}

MTTDEF void mtt_make_printable(char *text)
{
    unsigned char *at = (unsigned char *)text, *end = at + strlen(text);
    int size;
    for (; at < end; at += size) {
        uint32_t c = mtt__utf8_get(at, end, &size);
        if (c < 32 || (c >= 127 && c < 160) || c == 0x61c || c == 0x200e || c == 0x200f ||
            (c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069) || c == MTT__NONE)
            memset(at, '?', (size_t)size);
    }
}

/* Records what went wrong and the remedy, on one line: names and words in it may be a stranger's. Returns the
   status: callers write `return mtt__fail(...)`. */
MTT__PRINTF(3, 4) static mtt_status mtt__fail(mtt_env *env, mtt_status status, const char *format, ...)
{
    if (env) {
        mtt__text text;
        va_list args;
        va_start(args, format);
        mtt__text_init(&text, env->error, sizeof(env->error));
        mtt__print_va(&text, format, args);
        mtt_make_printable(env->error);
        va_end(args);
    }
    return status;
}

/* A member of a caller's struct that must be set. */
typedef struct mtt__member {
    const char *name;
    int is_set;
} mtt__member;
#define MTT__IS_SET(object, name) {#name, (object)->name != NULL}

static mtt_status mtt__require_members(mtt_env *env, const char *object, const mtt__member *m, size_t count)
{
    for (; count; count--, m++)
        if (!m->is_set) return mtt__fail(env, MTT_E_ARGUMENT, "%s has no %s: set it", object, m->name);
    return MTT_OK;
}

/* Sums and products of sizes saturate at SIZE_MAX, so an overflow ends as "out of memory". */
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
    void *block = NULL;
    if (env && !env->alloc != !env->free) {
        mtt__fail(env, MTT_E_MEMORY, "the environment has alloc or free alone: set both or neither");
        return NULL;
    }
    if (bytes <= SIZE_MAX / 2) block = env && env->alloc ? env->alloc(env->user, bytes) : malloc(bytes);
    if (!block) mtt__fail(env, MTT_E_MEMORY, "out of host memory: cannot allocate %zu bytes", bytes);
    return block;
}

/* Allocates `count` zeroed elements of `size` bytes, at least one byte; NULL with the error recorded. */
static void *mtt__alloc(mtt_env *env, size_t count, size_t size)
{
    size_t bytes = mtt__mul(count, size);
    void *block = mtt__alloc_raw(env, bytes ? bytes : 1);
    if (block && bytes <= SIZE_MAX / 2) memset(block, 0, bytes); /* which GCC would not know */
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
    enum { MTT__POOL_BLOCK = 65536, MTT__POOL_ALIGN = 16, MTT__POOL_HEADER = 32 };
    mtt__pool_block *b = pool->first;
    bytes = (bytes + MTT__POOL_ALIGN - 1) / MTT__POOL_ALIGN * MTT__POOL_ALIGN;
    if (!b || b->size - b->used < bytes) {
        size_t size = bytes > MTT__POOL_BLOCK ? bytes : (size_t)MTT__POOL_BLOCK;
        b = (mtt__pool_block *)mtt__alloc(env, 1, MTT__POOL_HEADER + size);
        if (!b) return NULL;
        b->size = size;
        b->next = pool->first;
        pool->first = b;
    }
    b->used += bytes;
    return (char *)b + MTT__POOL_HEADER + b->used - bytes;
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
    size_t i = heap->count, parent;
    entry.key = key;
    entry.tie = tie;
    if (mtt__reserve(env, (void **)&heap->at, &heap->capacity, i + 1, sizeof(entry))) return MTT_E_MEMORY;
    for (heap->count++; i && mtt__before(entry, heap->at[parent = (i - 1) / 2]); i = parent)
        heap->at[i] = heap->at[parent];
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

/* -----------------------------------------------------------------------------------------------------------
   >>numbers
   -------------------------------------------------------------------------------------------------------- */

/* The numbers of the library: 16-bit floats by bit operations, the arrays of the compact state, and random
   numbers. A random number is a function of (seed, stream, index), so that dropout can be replayed and a run
   resumed without any generator's state. */

MTT__INLINE float mtt__from_bf16(uint16_t h) { return mtt__bits_float((uint32_t)h << 16); }

/* Rounds to nearest, ties to even. A NaN stays a NaN. */
MTT__INLINE uint16_t mtt__to_bf16(float x)
{
    uint32_t bits = mtt__float_bits(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

/* Shifted into place, a half is a float that is 2^112 times too small. One product corrects that, for
   subnormals too. */
MTT__INLINE float mtt__from_fp16(uint16_t h)
{
    uint32_t magnitude = (uint32_t)(h & 0x7fffu) << 13;
    float scaled = mtt__bits_float(magnitude) * 5.192296858534828e33f;
    uint32_t infinite = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
    return mtt__bits_float(mtt__float_bits(scaled) | infinite | (uint32_t)(h & 0x8000u) << 16);
}

/* Rounds to nearest, ties to even; to infinity from 65520 up. A NaN stays a NaN. Below 2^-14, adding 0.5
   aligns the mantissa so that the addition itself rounds to a multiple of 2^-24, the spacing of half
   subnormals. */
MTT__INLINE uint16_t mtt__to_fp16(float x)
{
    uint32_t bits = mtt__float_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t subnormal = mtt__float_bits(mtt__bits_float(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = mtt__either(magnitude < 0x38800000u, subnormal, normal);
    half = mtt__either(magnitude >= 0x477ff000u, magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u, half);
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

/* ---- arrays of the compact state ---- */

static float mtt__largest_magnitude(const float *values, int64_t count)
{
    float largest = 0;
    int64_t i;
    for (i = 0; i < count; i++) largest = fabsf(values[i]) > largest ? fabsf(values[i]) : largest;
    return largest;
}

/* Arrays are rounded by 16 random bits an element, or to nearest if `random` is NULL. */
MTT__INLINE uint32_t mtt__random_at(const uint16_t *random, int64_t i)
{
    return random ? (uint32_t)random[i] : (uint32_t)MTT__NEAREST;
}

static void mtt__split_weights(const float *x, int64_t count, int fp16, const uint16_t *random,
                               uint16_t *weights, uint8_t *rest)
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

/* Moments to codes, and a scale for each group: the largest absolute value, or root of second moments. */
static void mtt__pack_moments(const float *x, int64_t count, int second, const uint16_t *random,
                              uint8_t *codes, uint16_t *scales)
{
    int64_t i, k, n;
    for (i = 0; i < count; i += n, scales++) {
        float y[MTT__GROUP], scale;
        n = mtt__min(MTT__GROUP, count - i);
        for (k = 0; k < n; k++) y[k] = second ? sqrtf(x[i + k]) : x[i + k];
        *scales = mtt__to_scale(mtt__largest_magnitude(y, n), mtt__random_at(random, i));
        scale = *scales ? 1.0f / mtt__from_scale(*scales) : 0.0f;
        for (k = 0; k < n; k++) {
            float r = y[k] * scale, code = second ? 255.0f * r : 254.0f * r / (1.0f + fabsf(r));
            if (second && r > 0 && code < 1) code = 1;
            codes[i + k] = mtt__round_moment(code * 65536.0f, second, mtt__random_at(random, i + k));
        }
    }
}

static void mtt__unpack_moments(const uint8_t *codes, const uint16_t *scales, int64_t count, int second,
                                float *x)
{
    int64_t i;
    for (i = 0; i < count; i++) {
        float scale = mtt__from_scale(scales[i / MTT__GROUP]);
        float code = (float)(second ? codes[i] : codes[i] - (codes[i] & 128) * 2);
        x[i] = scale * (second ? code * (1.0f / 255.0f) : code / (254.0f - fabsf(code)));
        if (second) x[i] *= x[i];
    }
}

/* ---- randomness ---- */

static uint64_t mtt__random_bits(uint64_t seed, uint64_t stream, uint64_t index)
{
    uint32_t r[4];
    mtt__philox(seed, index, stream, r);
    return (uint64_t)r[1] << 32 | r[0];
}

/* Draws a uniform integer below `bound` (at most 2^32): the remainder of 64 bits. Its bias is below 2^-32. */
static MTT__UNUSED uint64_t mtt__random_below(uint64_t seed, uint64_t stream, uint64_t index, uint64_t bound)
{
    return mtt__random_bits(seed, stream, index) % bound;
}

/* Draws uniformly from (0, 1), by the upper 52 bits. */
static double mtt__random_uniform(uint64_t seed, uint64_t stream, uint64_t index)
{
    return ((double)(mtt__random_bits(seed, stream, index) >> 12) + 0.5) * (1.0 / 4503599627370496.0);
}

/* Returns element `index` of a stream of normal numbers (Box & Muller 1958). Two of them share a draw. */
static float mtt__random_normal(uint64_t seed, uint64_t stream, int64_t index)
{
    uint64_t bits = mtt__random_bits(seed, stream, (uint64_t)index >> 1);
    double radius = sqrt(-2.0 * log(((double)(uint32_t)bits + 0.5) / 4294967296.0));
    double angle = 6.28318530717958647692 * ((double)(bits >> 32) + 0.5) / 4294967296.0;
    return (float)(radius * (index & 1 ? sin(angle) : cos(angle)));
}

/* Returns the exclusive or of the upper and the lower half of a product of 128 bits. */
static uint64_t mtt__fold(uint64_t a, uint64_t b)
{
    uint64_t a_low = (uint32_t)a, a_high = a >> 32, b_low = (uint32_t)b, b_high = b >> 32;
    uint64_t one = a_high * b_low + (a_low * b_low >> 32), two = a_low * b_high + (uint32_t)one;
    return (a_high * b_high + (one >> 32) + (two >> 32)) ^ a * b;
}

/* Hashes with a key: folded products, as in wyhash. The lower half of a product alone would carry a
   difference in the top bit through, whatever the key. The last load overlaps the one before. */
static uint64_t mtt__hash(uint64_t key, const char *at, size_t size)
{
    const uint64_t k = 0x9e3779b97f4a7c15u;
    uint64_t h = key ^ size * k, x = 0;
    const char *end = at + size;
    for (; end - at > 8; at += 8) {
        memcpy(&x, at, 8);
        h = mtt__fold(h ^ x, k);
    }
    if (size >= 8) memcpy(&x, end - 8, 8);
    else
        for (; at < end; at++) x = x << 8 | (unsigned char)*at;
    return mtt__fold(h ^ x, k);
}

/* -----------------------------------------------------------------------------------------------------------
   >>config
   -------------------------------------------------------------------------------------------------------- */

/* Descriptors: their fields, defaults, ranges and rules, and the names of techniques. A resolved descriptor
   has every field set and allowed; a refusal lists all faults at once. */

static const char *const mtt__category_text[] = {MTT_CATEGORIES(MTT__STRING)};
static const char *const mtt__phase_text[] = {"forward", "backward", "step"};

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
#define MTT__FIELD(name, kind, fallback, low, high, choices, help)                      \
    {#name, MTT_FIELD_##kind, offsetof(MTT__DESC, name), fallback, low, high, choices, help},
#define MTT__NO_FIELD {NULL, MTT_FIELD_INT, 0, 0, 0, 0, NULL, NULL}

static const mtt_field mtt__model_field[] = {
#define MTT__DESC mtt_model_desc
    MTT__FIELD(layers, INT, 4, 1, 1024, NULL, "transformer blocks")
    MTT__FIELD(heads, INT, 8, 1, 1024, NULL, "attention heads")
    MTT__FIELD(heads_kv, INT, 0, 1, 1024, NULL, "heads of keys and values (default heads)")
    MTT__FIELD(d_head, INT, 0, 8, 256, NULL, "width of a head (default d_model / heads)")
    MTT__FIELD(d_model, INT, 256, 8, 16384, NULL, "width")
    MTT__FIELD(d_ff, INT, 0, 8, 131072, NULL, "width of the MLP (default 4 * d_model)")
    MTT__FIELD(norm, CHOICE, 0, 0, MTT_NORM_RMS, "layer|rms", "LayerNorm or RMSNorm")
    MTT__FIELD(norm_eps, FLOAT, 1e-5, 1e-12, 1, NULL, "added under the norms' square root")
    MTT__FIELD(norm_place, CHOICE, 0, 0, MTT_NORM_NONE, "pre|post|none",
               "norms before branches, after their sums, or none")
    MTT__FIELD(mlp, CHOICE, 0, 0, MTT_MLP_SILU, "gelu|swiglu|relu2|silu", "activation of the MLP")
    MTT__FIELD(no_biases, FLAG, 0, 0, 1, NULL, "linear layers and head without biases")
    MTT__FIELD(vocab, INT, 10000, 1, 1 << 24, NULL, "ids of the vocabulary")
    MTT__FIELD(positions, CHOICE, 0, 0, MTT_POSITIONS_NONE, "sinusoidal|learned|rotary|none",
               "position encoding")
    MTT__FIELD(rotary_theta, FLOAT, 10000, 1, 1e12, NULL, "base of the angles of rotary positions")
    MTT__FIELD(rotary_interleaved, FLAG, 0, 0, 1, NULL, "rotary pairs are neighbouring columns")
    MTT__FIELD(rotary_factor, FLOAT, 1, 1, 1000, NULL, "Llama 3's scaling of slow rotary pairs")
    MTT__FIELD(rotary_low, FLOAT, 1, 0.001, 1000, NULL, "scaled pairs turn fewer times")
    MTT__FIELD(rotary_high, FLOAT, 4, 0.001, 1000, NULL, "pairs that turn more often are not scaled")
    MTT__FIELD(rotary_original, FLOAT, 8192, 1, 1e9, NULL, "tokens in which these turns are counted")
    MTT__FIELD(qk_norm, FLAG, 0, 0, 1, NULL, "RMSNorm of each head of q and k")
    MTT__FIELD(max_seq, INT, 1024, 1, 1 << 20, NULL, "longest sequence of learned positions")
    MTT__FIELD(tied_head, FLAG, 0, 0, 1, NULL, "the embedding is the output matrix")
    MTT__FIELD(no_head_bias, FLAG, 0, 0, 1, NULL, "logits without a bias")
    MTT__FIELD(dropout, FLOAT, 0, 0, 0.9, NULL, "dropout probability")
    MTT__NO_FIELD
#undef MTT__DESC
};

static const mtt_field mtt__policy_field[] = {
#define MTT__DESC mtt_policy
    MTT__FIELD(precision, CHOICE, 0, 0, MTT_FP8, "fp32|tf32|bf16|fp16|fp8", "precision")
    MTT__FIELD(fp8_products, CHOICE, 0, 0, MTT_FP8_LAYERS, "all|layers", "products in 8 bits")
    MTT__FIELD(attention, CHOICE, 0, 0, MTT_ATTENTION_FLASH, "plain|flash", "attention")
    MTT__FIELD(window, INT, 0, 0, INT_MAX, NULL, "keys that a query attends to, its own included; 0: all")
    MTT__FIELD(recompute, CHOICE, 0, 0, MTT_RECOMPUTE_RECURSIVE,
               "none|selective|layer|segments|budget|recursive", "what the backward pass recomputes")
    MTT__FIELD(segment, INT, 0, 1, 1024, NULL,
               "layers in a segment (default the square root of layers; with layer 1)")
    MTT__FIELD(loss, CHOICE, 0, 0, MTT_LOSS_CHUNKED, "auto|full|chunked",
               "logits of all tokens or of a chunk; auto: on CUDA of a large chunk")
    MTT__FIELD(loss_chunk_rows, INT, 0, 1, 1 << 24, NULL, "rows of logits in a chunk (1024, on CUDA 2048)")
    MTT__FIELD(optimizer, CHOICE, 0, 0, MTT_ADAMW, "adamw", "optimizer")
    MTT__FIELD(state, CHOICE, 0, 0, MTT_STATE_COMPACT, "full|compact", "optimizer state")
    MTT__FIELD(accumulate, INT, 1, 1, 1 << 20, NULL, "micro-batches in a step")
    MTT__FIELD(early_update, FLAG, 0, 0, 1, NULL, "layers are updated in the backward pass, without clipping")
    MTT__FIELD(freeze, TEXT, 0, 0, 0, NULL, "parameters that are not trained, as in wte.*,h.0.*")
    MTT__FIELD(lora_rank, INT, 0, 0, 1024, NULL, "rank of adapters, which are trained alone; 0: none")
    MTT__FIELD(lora_alpha, FLOAT, 0, 0, 1e6, NULL, "adapters are multiplied by alpha / rank (default rank)")
    MTT__FIELD(lora_targets, TEXT, 0, 0, 0, NULL, "layers with adapters (default attn.c_attn), * for all")
    MTT__FIELD(keep_gradients, FLAG, 0, 0, 1, NULL, "gradients stay in memory, to be read")
    MTT__FIELD(ranks, INT, 1, 1, 1024, NULL, "processes that train together")
    MTT__FIELD(shard, CHOICE, 0, 0, MTT_SHARD_GRADIENTS, "none|optimizer|gradients", "what ranks divide")
    MTT__FIELD(exchange, CHOICE, 0, 0, MTT_EXCHANGE_FLAT, "overlapped|naive|flat",
               "when ranks exchange gradients")
    MTT__FIELD(nccl, FLAG, 0, 0, 1, NULL, "GPUs of one host, too, exchange by NCCL, and do not copy")
    MTT__FIELD(bandwidth, FLOAT, 0, 0, 1e6, NULL, "GB/s of a rank to others, for times in the plan")
    MTT__FIELD(budget_bytes, BYTES, 0, 0, 1.9e19, NULL, "memory for recompute budget")
    MTT__FIELD(split, FLAG, 0, 0, 1, NULL, "a budget may cut the batch into micro-batches")
    MTT__FIELD(device, CHOICE, 0, 0, MTT_DEVICE_CUDA, "cpu|cuda", "device")
    MTT__FIELD(workspace_bytes, BYTES, 0, 0, 1.9e19, NULL, "scratch of products on CUDA (default 32 MiB)")
    MTT__NO_FIELD
#undef MTT__DESC
};

static const mtt_field mtt__optim_field[] = {
#define MTT__DESC mtt_optim_desc
    MTT__FIELD(lr, FLOAT, 3e-4, 1e-30, 100, NULL, "peak learning rate")
    MTT__FIELD(beta1, FLOAT, 0.9, 0, 1, NULL, "decay of the first moment")
    MTT__FIELD(beta2, FLOAT, 0.999, 0, 1, NULL, "decay of the second moment")
    MTT__FIELD(eps, FLOAT, 1e-8, 0, 1, NULL, "added to the square root of the second moment")
    MTT__FIELD(weight_decay, FLOAT, 0.01, 0, 100, NULL, "decoupled decay of matrices")
    MTT__FIELD(clip, FLOAT, 1, 0, 1e30, NULL, "largest norm of the gradient")
    MTT__FIELD(lr_schedule, CHOICE, 0, 0, MTT_LR_COSINE, "constant|linear|cosine",
               "learning rate after the warmup")
    MTT__FIELD(warmup_steps, INT64, 0, 0, INT32_MAX, NULL, "steps of linear warmup")
    MTT__FIELD(total_steps, INT64, 0, 0, 9e18, NULL, "end of the linear or cosine schedule")
    MTT__FIELD(min_lr, FLOAT, 0, 0, 100, NULL, "final learning rate")
    MTT__FIELD(loss_scale, FLOAT, 65536, 1e-30, 1e38, NULL, "first loss scale of fp16")
    MTT__NO_FIELD
#undef MTT__DESC
};

MTTDEF const mtt_field *mtt_model_fields(void)
{
    return mtt__model_field;
}

MTTDEF const mtt_field *mtt_policy_fields(void)
{
    return mtt__policy_field;
}

MTTDEF const mtt_field *mtt_optim_fields(void)
{
    return mtt__optim_field;
}

/* Tells what a field takes. */
static mtt_status mtt__field_expected(mtt_env *env, const mtt_field *f, double high, double number)
{
    const char *what = f->kind == MTT_FIELD_FLOAT ? "a number" : "a whole number";
    char range[64];
    if (f->kind == MTT_FIELD_TEXT) mtt__format(range, sizeof(range), "a text");
    else if (f->kind == MTT_FIELD_BYTES) mtt__format(range, sizeof(range), "bytes: 24G or 24GiB, 24GB, 512M");
    else if (f->low > 0 && f->low < 1e-20)
        mtt__format(range, sizeof(range), "%s above 0, at most %g", what, high);
    else if (high >= INT_MAX && !(number > high))
        mtt__format(range, sizeof(range), "%s, %g or more", what, f->low);
    else mtt__format(range, sizeof(range), "%s from %g to %.10g", what, f->low, high);
    return mtt__fail(env, MTT_E_ARGUMENT, "expected %s (%s)", f->choices ? f->choices : range, f->help);
}

/* Multiplies a number by the unit behind it, in capital or small letters: K, M, G, KiB, MiB and GiB are
   powers of 1024, KB, MB and GB of 1000. Returns the unit's length with the blanks before it; 0: none. */
static size_t mtt__field_unit(const char *text, double *number)
{
    static const char letters[] = "KkMmGg";
    const char *at = text + strspn(text, " "), *letter = *at ? strchr(letters, *at) : NULL;
    int power, binary = 1;
    if (!letter) return 0;
    at++;
    if (*at == 'B' || *at == 'b') at++, binary = 0;
    else if ((*at == 'i' || *at == 'I') && (at[1] == 'B' || at[1] == 'b')) at += 2;
    for (power = (int)(letter - letters) / 2; power >= 0; power--) *number *= binary ? 1024 : 1000;
    return (size_t)(at - text);
}

MTTDEF mtt_status mtt_field_set(mtt_env *env, const mtt_field *f, void *desc, const char *text)
{
    const char *choice = f->choices;
    char *at = (char *)desc + f->offset, *end;
    double number, high = f->kind == MTT_FIELD_BYTES && f->high > 1e18 ? 1e18 : f->high; /* fits 63 bits */
    float real;
    int64_t whole;
    size_t bytes;
    int value = 0;
    if (!f->name || (unsigned)f->kind > MTT_FIELD_TEXT)
        return mtt__fail(env, MTT_E_ARGUMENT, "a field without a name or a kind: it ends its list");
    if (!text) return mtt__field_expected(env, f, high, 0);
    if (f->kind == MTT_FIELD_TEXT) {
        memcpy(at, &text, sizeof(text));
        return MTT_OK;
    }
    for (; choice; choice = strchr(choice, '|'), value++) {
        choice += *choice == '|';
        if (strcspn(choice, "|") != strlen(text) || strncmp(choice, text, strlen(text))) continue;
        memcpy(at, &value, sizeof(value)); /* of an enum: clang drops stores through int * */
        return MTT_OK;
    }
    number = strtod(text, &end);
    if (end != text && f->kind == MTT_FIELD_BYTES) end += mtt__field_unit(end, &number);
    if (f->choices || end == text || *end) return mtt__field_expected(env, f, high, 0);
    if (f->low == 0 && f->fallback != 0 && number <= 0) number = -1;
    else if (!(number >= f->low && number <= high)) return mtt__field_expected(env, f, high, number);
    if (f->kind != MTT_FIELD_FLOAT && f->kind != MTT_FIELD_BYTES && number != floor(number))
        return mtt__field_expected(env, f, high, number);
    real = (float)number, whole = (int64_t)number, bytes = (size_t)(number < 0 ? 0 : number);
    value = f->kind == MTT_FIELD_INT || f->kind == MTT_FIELD_FLAG ? (int)number : 0;
    if (f->kind == MTT_FIELD_FLOAT) memcpy(at, &real, sizeof(real));
    else if (f->kind == MTT_FIELD_INT64) memcpy(at, &whole, sizeof(whole));
    else if (f->kind == MTT_FIELD_BYTES) memcpy(at, &bytes, sizeof(bytes));
    else memcpy(at, &value, sizeof(value));
    return MTT_OK;
}

static double mtt__field_get(const void *desc, const mtt_field *field)
{
    const void *at = (const char *)desc + field->offset;
    const char *s;
    int number;
    switch (field->kind) {
    case MTT_FIELD_FLOAT: return (double)*(const float *)at;
    case MTT_FIELD_INT64: return (double)*(const int64_t *)at;
    case MTT_FIELD_BYTES: return (double)*(const size_t *)at;
    case MTT_FIELD_TEXT: memcpy(&s, at, sizeof(s)); return s ? (double)mtt__hash(1, s, strlen(s)) : 0;
    default: memcpy(&number, at, sizeof(number)); return number; /* or an enum: see mtt__technique */
    }
}

static void mtt__field_set(void *desc, const mtt_field *field, double value)
{
    void *at = (char *)desc + field->offset;
    int number;
    switch (field->kind) {
    case MTT_FIELD_FLOAT: *(float *)at = (float)value; break;
    case MTT_FIELD_INT64: *(int64_t *)at = (int64_t)value; break;
    case MTT_FIELD_BYTES: *(size_t *)at = (size_t)value; break;
    case MTT_FIELD_TEXT: break;
    default: number = (int)value; memcpy(at, &number, sizeof(number));
    }
}

/* Puts a value of a field in words; a number that is no choice stays a number. */
static const char *mtt__field_words(const mtt_field *f, double value, char words[40])
{
    const char *at = f->choices;
    int left = (int)value;
    for (; at && left > 0; left--)
        if ((at = strchr(at, '|')) != NULL) at++;
    if (at) return mtt__format(words, 40, "%.*s", (int)strcspn(at, "|"), at);
    return mtt__format(words, 40, "%.9g", value);
}

/* ---- validation ---- */

/* Collects every fault of a descriptor in the environment's text. */
typedef struct mtt__faults {
    mtt__text text; /* of capacity 0 if there is no environment */
    int count;
} mtt__faults;

static void mtt__faults_init(mtt__faults *faults, mtt_env *env)
{
    faults->count = 0;
    mtt__text_init(&faults->text, env ? env->error : NULL, env ? sizeof(env->error) : 0);
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

/* A float may be a bound that it cannot hold: 1e-12f is below 1e-12, and 1e30f above 1e30. */
static int mtt__in_range(mtt__faults *faults, const char *name, double value, double low, double high)
{
    int bound = value == (double)(float)low || value == (double)(float)high;
    int digits = value == floor(value) && fabs(value) < 4294967296.0 ? 10 : 7;
    return mtt__require(faults, bound || (value >= low && value <= high), "%s is %.*g, it must be %.10g to "
                        "%.10g", name, digits, value, low, high);
}

/* Fills in the defaults, and makes flags 0 or 1. A negative number means none where the default is not 0. */
static void mtt__apply_defaults(void *desc, const mtt_field *f)
{
    for (; f->name; f++) {
        double value = mtt__field_get(desc, f);
        int none = value < 0 && f->kind == MTT_FIELD_FLOAT && f->low == 0 && f->fallback != 0;
        if (value == 0 || none) mtt__field_set(desc, f, none ? 0 : f->fallback);
        else if (f->kind == MTT_FIELD_FLAG) mtt__field_set(desc, f, 1);
    }
}

static void mtt__check_fields(mtt__faults *faults, const void *desc, const mtt_field *f)
{
    for (; f->name; f++) {
        if (f->kind != MTT_FIELD_FLAG && f->kind != MTT_FIELD_TEXT)
            mtt__in_range(faults, f->name, mtt__field_get(desc, f), f->low, f->high);
    }
}

/* ---- wings ---- */

/* A wing adds a technique: rows to the tables of the hall, and these functions, which the hall calls. Any may
   be NULL. Its room stands behind the hall. A list declares the functions that it names, so a wing may add to
   a list of the hall what its room defines. */
typedef struct mtt__builder mtt__builder;
enum { MTT__TRAINED, MTT__FROZEN, MTT__LEFT_OUT }; /* what becomes of a parameter */
typedef struct mtt__wing {
    void (*resolve)(mtt_policy *policy); /* fills in its defaults, and what follows from its fields */
    void (*checks)(mtt__faults *faults, const mtt_model_desc *model, const mtt_policy *policy);
    void (*parameter)(const mtt_policy *policy, int kind, const char *name, int *fate);
    void (*parameters)(mtt__builder *b); /* checks them */
    void (*state)(mtt__builder *b);      /* adds what else lives from step to step */
    int (*adjoint)(mtt__builder *b, const mtt_op *op); /* of an operation that the wing has changed; 0: it
                                                          has not, the hall's follows */
} mtt__wing; /* not what runs: a program that only plans is linked without it */
typedef const mtt__wing *mtt__wing_of(void); /* a function, since C++ cannot declare a constant ahead */
#define MTT__WINGS(X)                                                                   \
    MTT_IF_GENERATOR(X(generator)) MTT_IF_ADAPTERS(X(adapters)) MTT_IF_EIGHT(X(eight)) \
    MTT_IF_RANKS(X(exchange))
#define MTT__WING_DECLARED(name) static mtt__wing_of mtt__wing_##name;
MTT__WINGS(MTT__WING_DECLARED)
#define MTT__WING_ROW(name) mtt__wing_##name,
static mtt__wing_of *const mtt__wings[] = {MTT__WINGS(MTT__WING_ROW) NULL};

/* Calls a function of each wing that has it. */
#define MTT__EACH_WING(function, arguments)                                             \
    do {                                                                                \
        mtt__wing_of *const *mtt__next = mtt__wings;                                    \
        for (; *mtt__next; mtt__next++)                                                 \
            if ((*mtt__next)()->function) (*mtt__next)()->function arguments;           \
    } while (0)

MTTDEF mtt_status mtt_model_resolve(mtt_env *env, const mtt_model_desc *model, mtt_model_desc *resolved)
{
    mtt__faults faults;
    mtt_model_desc m = *model;
    int sized;
    mtt__faults_init(&faults, env);
    mtt__apply_defaults(&m, mtt__model_field);
    if (m.no_biases) m.no_head_bias = 1;
    sized = m.heads >= 1 && m.heads <= 1024 && m.d_model >= 8 && m.d_model <= 16384;
    if (!m.d_ff) m.d_ff = m.d_model > 0 && m.d_model <= 16384 ? 4 * m.d_model : 1024;
    if (!m.heads_kv) m.heads_kv = sized ? m.heads : 1;
    if (!m.d_head) m.d_head = 8;
    mtt__check_fields(&faults, &m, mtt__model_field);
    mtt__require(&faults, m.d_ff < 8 || m.d_ff % 8 == 0, "d_ff is %d, it must be a multiple of 8", m.d_ff);
    mtt__require(&faults, m.heads_kv < 1 || m.heads % m.heads_kv == 0,
                 "heads_kv is %d, it must divide the %d heads", m.heads_kv, m.heads);
    mtt__require(&faults, m.rotary_low < m.rotary_high, "rotary_low is %g, it must be below rotary_high %g",
                 (double)m.rotary_low, (double)m.rotary_high);
    if (model->d_head)
        mtt__require(&faults, m.d_head % 8 == 0 && m.d_model % 8 == 0,
                     "d_head is %d and d_model %d, they must be multiples of 8", m.d_head, m.d_model);
    else if (sized) {
        m.d_head = m.d_model / m.heads;
        if (mtt__require(&faults, m.d_model % m.heads == 0,
                         "d_model %d does not divide into %d heads: take a multiple of %d, or set d_head",
                         m.d_model, m.heads, 8 * m.heads))
            mtt__require(&faults, m.d_head % 8 == 0 && m.d_head <= 256,
                         "a head is %d wide (d_model / heads), it must be a multiple of 8 up to 256",
                         m.d_head);
    }
    if (faults.count) return MTT_E_ARGUMENT;
    *resolved = m;
    return MTT_OK;
}

/* Fills in how a micro-batch of `rows` tokens gets its loss. On CUDA large chunks read the logits once, and
   so are faster than all logits, by 1 to 14 % of a step. Small ones read and write the sums of the head's
   gradient too often: with 2,048 rows a step of GPT-2 takes 1 % longer than with all logits. */
static void mtt__resolve_loss(mtt_policy *p, int64_t rows)
{
    int cuda = p->device == MTT_DEVICE_CUDA;
    int64_t chunk = cuda ? 2048 : 1024;
    if (p->loss == MTT_LOSS_AUTO) {
        if (cuda) chunk = rows / 4 < 8192 ? 8192 : mtt__min(rows / 64 * 16, 16384);
        p->loss = cuda ? MTT_LOSS_CHUNKED : MTT_LOSS_FULL;
    }
    if (!p->loss_chunk_rows) p->loss_chunk_rows = (int)chunk;
    MTT__EACH_WING(resolve, (p));
}

MTTDEF mtt_status mtt_policy_resolve(mtt_env *env, const mtt_policy *policy, const mtt_model_desc *model,
                                     int batch, int seq_len, mtt_policy *resolved)
{
    mtt__faults faults;
    mtt_policy p = *policy;
    mtt__faults_init(&faults, env);
    mtt__apply_defaults(&p, mtt__policy_field);
    if (!p.segment && p.recompute == MTT_RECOMPUTE_SEGMENTS)
        while (p.segment * p.segment < model->layers) p.segment++;
    if (!p.segment || p.recompute == MTT_RECOMPUTE_BUDGET) p.segment = 1;
    mtt__resolve_loss(&p, (int64_t)batch * seq_len);
    if (!p.workspace_bytes) p.workspace_bytes = (size_t)32 << 20;
    if (p.window >= seq_len) p.window = 0;
#ifdef MTT_NO_FP8
    mtt__require(&faults, p.precision != MTT_FP8,
                 "precision is fp8, which MTT_NO_FP8 left out of this build: take bf16");
#endif
#ifdef MTT_NO_RANKS
    mtt__require(&faults, p.ranks < 2 && !p.rank,
                 "ranks and rank must be 1 and 0: MTT_NO_RANKS left ranks out of this build");
#endif
#ifdef MTT_NO_ADAPTERS
    mtt__require(&faults, !p.lora_rank, "lora_rank is %d, but MTT_NO_ADAPTERS left adapters out of this "
                 "build: set it to 0", p.lora_rank);
#endif
    MTT__EACH_WING(checks, (&faults, model, &p));
    mtt__in_range(&faults, "batch", batch, 1, 1 << 20);
    mtt__in_range(&faults, "seq_len", seq_len, 1, 1 << 20);
    mtt__require(&faults, seq_len <= model->max_seq || model->positions != MTT_POSITIONS_LEARNED,
                 "seq_len is %d but the learned positions end at max_seq %d: raise max_seq", seq_len,
                 model->max_seq);
    mtt__check_fields(&faults, &p, mtt__policy_field);
    mtt__require(&faults, !p.early_update || p.precision < MTT_FP16,
                 "early_update is 1, but fp16 and fp8 scale the loss, and skip a step by all gradients: take "
                 "bf16");
    mtt__require(&faults, !p.early_update || (p.accumulate == 1 && p.ranks == 1 && !p.split),
                 "early_update is 1: set accumulate and ranks to 1, and split to 0");
    mtt__require(&faults, !p.early_update || !p.keep_gradients,
                 "early_update is 1, which keeps no gradients: set keep_gradients to 0");
    mtt__require(&faults, p.recompute != MTT_RECOMPUTE_BUDGET || p.budget_bytes,
                 "recompute is budget: set budget_bytes");
    if (faults.count) return MTT_E_ARGUMENT;
    *resolved = p;
    return MTT_OK;
}

MTTDEF mtt_status mtt_optim_resolve(mtt_env *env, const mtt_optim_desc *optim, mtt_optim_desc *resolved)
{
    mtt__faults faults;
    mtt_optim_desc o = *optim;
    int i;
    mtt__faults_init(&faults, env);
    mtt__apply_defaults(&o, mtt__optim_field);
    mtt__check_fields(&faults, &o, mtt__optim_field);
    mtt__require(&faults, o.beta1 != 1 && o.beta2 != 1, "beta1 and beta2 must be below 1");
    mtt__require(&faults, o.groups || o.group_count <= 0, "group_count is %d, but groups is NULL",
                 o.group_count);
    for (i = 0; mtt__in_range(&faults, "group_count", o.group_count, 0, MTT_MOST_GROUPS) && o.groups &&
                i < o.group_count; i++) {
        const mtt_group *g = &o.groups[i];
        mtt__require(&faults, g->names != NULL, "group %d has no names", i);
        mtt__require(&faults, g->lr_scale <= 1000 && g->weight_decay <= 100,
                     "group %d has lr_scale %g and weight_decay %g, they must be at most 1000 and 100", i,
                     (double)g->lr_scale, (double)g->weight_decay);
    }
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
    share = 1 - progress;
    if (o->lr_schedule == MTT_LR_COSINE) share = 0.5 * (1 + cos(3.14159265358979323846 * progress));
    return (float)(o->min_lr + (o->lr - o->min_lr) * share);
}

/* 1 = one of the patterns, joined by commas and spaces, is the name; * is any text. */
static int mtt__matches(const char *patterns, const char *name)
{
    const char *p = patterns ? patterns : "", *n = name, *star = NULL, *tried = NULL;
    for (;;) {
        int ends = !*p || *p == ',' || *p == ' '; /* no name has a space */
        if (*p == '*') star = ++p, tried = n;
        else if (ends && !*n) return 1;
        else if (!ends && *p == *n) p++, n++;
        else if (star && *tried) p = star, n = ++tried;
        else {
            p += strcspn(p, ", ");
            if (!*p++) return 0;
            n = name, star = NULL;
        }
    }
}

/* ---- techniques ---- */

/* The words of a technique, in the order of its name. Fields are enums: clang drops stores through int *. */
static const struct {
    const char *word;
    size_t offset;
    int value;
} mtt__technique[] = {
    {"fp32", offsetof(mtt_policy, precision), MTT_FP32},
    {"tf32", offsetof(mtt_policy, precision), MTT_TF32},
    {"bf16", offsetof(mtt_policy, precision), MTT_BF16},
    {"fp16", offsetof(mtt_policy, precision), MTT_FP16},
    {"fp8", offsetof(mtt_policy, precision), MTT_FP8},
    {"layers8", offsetof(mtt_policy, fp8_products), MTT_FP8_LAYERS},
    {"flash", offsetof(mtt_policy, attention), MTT_ATTENTION_FLASH},
    {"selective", offsetof(mtt_policy, recompute), MTT_RECOMPUTE_SELECTIVE},
    {"checkpointing", offsetof(mtt_policy, recompute), MTT_RECOMPUTE_LAYER},
    {"segments", offsetof(mtt_policy, recompute), MTT_RECOMPUTE_SEGMENTS},
    {"recursive", offsetof(mtt_policy, recompute), MTT_RECOMPUTE_RECURSIVE},
    {"budget", offsetof(mtt_policy, recompute), MTT_RECOMPUTE_BUDGET},
    {"chunked", offsetof(mtt_policy, loss), MTT_LOSS_CHUNKED},
    {"compact", offsetof(mtt_policy, state), MTT_STATE_COMPACT},
    {"early", offsetof(mtt_policy, early_update), 1},
    {"split", offsetof(mtt_policy, split), 1},
    {"zero1", offsetof(mtt_policy, shard), MTT_SHARD_OPTIMIZER},
    {"zero2", offsetof(mtt_policy, shard), MTT_SHARD_GRADIENTS},
};

/* Words that were techniques once, and what serves in their place. */
static const struct { const char *word, *instead; } mtt__retired[] = {{"kept8", "selective"},
                                                                      {"forward8", "layers8"}};

/* Returns the number behind `prefix` if that is all of the word, 1 to 2^30; otherwise 0. */
static int mtt__word_number(const char *word, size_t size, const char *prefix)
{
    size_t i = strlen(prefix);
    int64_t number = 0;
    if (size <= i || memcmp(word, prefix, i) != 0) return 0;
    for (; i < size && word[i] >= '0' && word[i] <= '9' && number < 1 << 30; i++)
        number = 10 * number + (word[i] - '0');
    return i == size && number <= 1 << 30 ? (int)number : 0;
}

/* Refuses a word. */
static mtt_status mtt__no_technique(mtt_env *env, const char *words, const char *at, size_t size, int batches)
{
    char list[400];
    mtt__text text;
    size_t k;
    for (k = 0; k < MTT__LENGTH(mtt__retired); k++)
        if (strlen(mtt__retired[k].word) == size && memcmp(at, mtt__retired[k].word, size) == 0)
            return mtt__fail(env, MTT_E_ARGUMENT, "\"%s\" in \"%.200s\" is no technique any more: take %s",
                             mtt__retired[k].word, words, mtt__retired[k].instead);
    mtt__text_init(&text, list, sizeof(list));
    for (k = 0; k < MTT__LENGTH(mtt__technique); k++) mtt__print(&text, "%s ", mtt__technique[k].word);
    return mtt__fail(env, MTT_E_ARGUMENT, "\"%.*s\" in \"%.200s\" is no technique: %swindowN%s, joined by _",
                     (int)(size < 60 ? size : 60), at, words, list, batches ? " bsN" : "");
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
            if (strlen(mtt__technique[k].word) == size && memcmp(at, mtt__technique[k].word, size) == 0)
                break;
        if (k < MTT__LENGTH(mtt__technique))
            memcpy((char *)&p + mtt__technique[k].offset, &mtt__technique[k].value, sizeof(int));
        else if ((number = mtt__word_number(at, size, "window")) != 0) {
            p.attention = MTT_ATTENTION_FLASH;
            p.window = number;
        } else if (batch && (number = mtt__word_number(at, size, "bs")) != 0) new_batch = number;
        else return mtt__no_technique(env, words, at, size, batch != NULL);
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
        if (!memcmp((const char *)policy + mtt__technique[k].offset, &mtt__technique[k].value, sizeof(int)))
            mtt__print(&out, "%s%s", out.size ? "_" : "", mtt__technique[k].word);
    if (policy->window) mtt__print(&out, "_window%d", policy->window);
    return out.size;
}

/* -----------------------------------------------------------------------------------------------------------
   >>tensors
   -------------------------------------------------------------------------------------------------------- */

/* The tables that define the model: precisions, parameters, the optimizer's state and activations. The rooms
   below work through these rows. A new parameter or activation is a new row here. */

/* Of each precision: name, type of activations and weights in use, whether the loss is scaled (2: in
   proportion to the tokens of a step), and FLOP/s of products on an H200, to compare policies by. With 16
   bits 500e12 are measured (779e12 in a product of 8192 x 8192 x 8192, less at a model's widths); the others
   are estimates. */
static const struct {
    const char *name;
    mtt_dtype dtype;
    int scaled;
    double rate;
} mtt__precisions[] = {
    {"fp32", MTT_F32, 0, 50e12},
    {"tf32", MTT_F32, 0, 250e12},
    {"bf16", MTT_BF16_BITS, 0, 500e12},
    {"fp16", MTT_F16_BITS, 1, 500e12},
    {"fp8", MTT_BF16_BITS, 2, 900e12},
};

enum { MTT__BEFORE, MTT__LAYER, MTT__AFTER }; /* place of a parameter in the model */
/* Initial values. The last three: uniform up to 1 / sqrt(rows), N(0, 0.02), that over sqrt(2 * layers). */
enum { MTT__ZEROS, MTT__ONES, MTT__UNIFORM, MTT__NORMAL, MTT__NORMAL_RESIDUAL };

/* Columns of the MLP's first matrix. */
static int mtt__fc_width(const mtt_model_desc *m)
{
    return mtt__is_gated(m->mlp) ? 2 * m->d_ff : m->d_ff;
}

/* Every parameter: kind, name, place, rows, columns (0 = a vector), initial values, exists if. Matrices are
   [in, out] as GPT-2's, embedding and head [vocab, d_model]. Only matrices decay. A matrix of `vocab` rows
   is padded in memory. The other names in the columns are locals of mtt__parameter_shape. */
#define MTT__PARAMETERS(X)                                                                              \
    X(WTE, "wte.weight", BEFORE, vocab, m->d_model, NORMAL, 1)                                          \
    X(WPE, "wpe.weight", BEFORE, m->max_seq, m->d_model, NORMAL, m->positions == MTT_POSITIONS_LEARNED) \
    X(LN_1_WEIGHT, "h.%d.ln_1.weight", LAYER, m->d_model, 0, ONES, norms)                               \
    X(LN_1_BIAS, "h.%d.ln_1.bias", LAYER, m->d_model, 0, ZEROS, norms && shifts)                        \
    X(QKV_WEIGHT, "h.%d.attn.c_attn.weight", LAYER, m->d_model, qkv_width, NORMAL, 1)                   \
    X(QKV_BIAS, "h.%d.attn.c_attn.bias", LAYER, qkv_width, 0, ZEROS, !m->no_biases)                     \
    X(Q_NORM_WEIGHT, "h.%d.attn.q_norm.weight", LAYER, m->d_head, 0, ONES, m->qk_norm)                  \
    X(K_NORM_WEIGHT, "h.%d.attn.k_norm.weight", LAYER, m->d_head, 0, ONES, m->qk_norm)                  \
    X(PROJ_WEIGHT, "h.%d.attn.c_proj.weight", LAYER, m->heads * m->d_head, m->d_model, NORMAL_RESIDUAL, 1)\
    X(PROJ_BIAS, "h.%d.attn.c_proj.bias", LAYER, m->d_model, 0, ZEROS, !m->no_biases)                   \
    X(LN_2_WEIGHT, "h.%d.ln_2.weight", LAYER, m->d_model, 0, ONES, norms)                               \
    X(LN_2_BIAS, "h.%d.ln_2.bias", LAYER, m->d_model, 0, ZEROS, norms && shifts)                        \
    X(FC_WEIGHT, "h.%d.mlp.c_fc.weight", LAYER, m->d_model, mtt__fc_width(m), NORMAL, 1)                \
    X(FC_BIAS, "h.%d.mlp.c_fc.bias", LAYER, mtt__fc_width(m), 0, ZEROS, !m->no_biases)                  \
    X(MLP_WEIGHT, "h.%d.mlp.c_proj.weight", LAYER, m->d_ff, m->d_model, NORMAL_RESIDUAL, 1)             \
    X(MLP_BIAS, "h.%d.mlp.c_proj.bias", LAYER, m->d_model, 0, ZEROS, !m->no_biases)                     \
    X(LN_F_WEIGHT, "ln_f.weight", AFTER, m->d_model, 0, ONES, pre_norm)                                 \
    X(LN_F_BIAS, "ln_f.bias", AFTER, m->d_model, 0, ZEROS, pre_norm && shifts)                          \
    X(HEAD_WEIGHT, "lm_head.weight", AFTER, vocab, m->d_model, NORMAL, !m->tied_head)                   \
    X(HEAD_BIAS, "lm_head.bias", AFTER, vocab, 0, ZEROS, !m->no_head_bias)                              \
    MTT__ADAPTERS_PARAMETERS(X)

#define MTT__PARAMETER_ENUM(kind, name, place, rows, columns, init, exists) MTT__##kind,
enum { MTT__PARAMETERS(MTT__PARAMETER_ENUM) MTT__PARAMETER_KINDS };
#define MTT__PARAMETER_ROW(kind, name, place, rows, columns, init, exists) {name, MTT__##place, MTT__##init},
static const struct {
    const char *name;
    int place, init;
} mtt__parameter_row[] = {MTT__PARAMETERS(MTT__PARAMETER_ROW)};

/* 1 = the policy adds it to the model. */
static int mtt__is_added(int kind)
{
    return kind > MTT__HEAD_BIAS;
}

/* The shape of a parameter, with `vocab` rows of the vocabulary; 0: there is none. Without a policy those of
   the model alone exist. */
static int mtt__parameter_shape(const mtt_model_desc *m, const mtt_policy *policy, int kind, int64_t vocab,
                                int64_t shape[2])
{
    const int norms = m->norm_place != MTT_NORM_NONE, pre_norm = m->norm_place == MTT_NORM_PRE;
    const int shifts = m->norm == MTT_NORM_LAYER;
    int64_t qkv_width = (m->heads + 2 * m->heads_kv) * m->d_head;
    (void)policy; /* a wing's rows ask it */
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
#define MTT__OPTIM(X)                                                                   \
    X(MASTER, "master", "", dtype != MTT_F32)                                           \
    X(FIRST, "m", "optim.m.", 1)                                                        \
    X(SECOND, "v", "optim.v.", 1)
#define MTT__OPTIM_ENUM(kind, name, prefix, exists) MTT__##kind,
enum { MTT__OPTIM(MTT__OPTIM_ENUM) MTT__OPTIM_KINDS };

/* Levels of recomputation. A layer has one, and an activation is dropped at that of its row and above: ALWAYS
   and ONCE at every level. What is dropped ONCE has one reader in the forward pass, and is never made again.
   */
enum { MTT__ONCE = -1, MTT__ALWAYS, MTT__BY_SELECTIVE, MTT__BY_LAYER, MTT__BY_SEGMENT, MTT__BY_NOTHING };

/* Types of activations: the precision's own, or an mtt_dtype. */
enum { MTT__USUAL = -1, MTT__WIDE = MTT_F32 };

/* Every activation of a layer: role, name, shape (0 = no such dimension), type, category, dropped by, frees.
   Layer number `layers` holds the final norm and the head. QKV_RAW is there if q and k are rotated or
   normalized. In shapes, d is the mtt_shape, qkv.row the columns of q, k and v together, wide = heads *
   d_head, and heads = batch * heads: see mtt__make.

   GELU is the result of any form of the MLP's activation.

   Frees (segments and recursive): once the adjoint of the row's maker is done, everything that the layer made
   before the named activation is dropped, except x. LN_2 names itself: the MLP's half is done. PROJ names
   QKV: ln_1 goes. The next layer's x names itself: all that this layer made is dropped. */
#define MTT__ACTIVATIONS(X)                                                                              \
    X(RESIDUAL, "x", d->batch, d->seq_len, d->d_model, USUAL, MTT_ACTIVATIONS, BY_SEGMENT, RESIDUAL)     \
    X(LN_1, "ln_1", d->rows, d->d_model, 0, USUAL, MTT_ACTIVATIONS, BY_SELECTIVE, NONE)                  \
    X(LN_1_STATS, "ln_1.stats", d->rows, 2, 0, WIDE, MTT_ACTIVATIONS, BY_LAYER, NONE)                    \
    X(QKV_RAW, "attn.qkv.raw", d->rows, qkv.row, 0, USUAL, MTT_ACTIVATIONS, BY_LAYER, NONE)              \
    X(QKV, "attn.qkv", d->rows, qkv.row, 0, USUAL, MTT_ACTIVATIONS, BY_LAYER, NONE)                      \
    X(SCORES, "attn.scores", heads, d->seq_len, d->seq_len, USUAL, MTT_SCORES, BY_SELECTIVE, NONE)       \
    X(PROBS, "attn.probs", heads, d->seq_len, d->seq_len, USUAL, MTT_SCORES, BY_SELECTIVE, NONE)         \
    X(AFTER_DROPOUT, "attn.dropped", heads, d->seq_len, d->seq_len, USUAL, MTT_SCORES, BY_SELECTIVE, NONE)\
    X(LSE, "attn.lse", heads, d->seq_len, 0, WIDE, MTT_ACTIVATIONS, BY_LAYER, NONE)                      \
    X(ATTENDED, "attn.out", d->rows, wide, 0, USUAL, MTT_ACTIVATIONS, BY_LAYER, NONE)                    \
    X(PROJ, "attn.proj", d->rows, d->d_model, 0, USUAL, MTT_ACTIVATIONS, BY_LAYER, QKV)                  \
    X(SUM_1, "sum_1", d->rows, d->d_model, 0, USUAL, MTT_ACTIVATIONS, BY_LAYER, NONE)                    \
    X(MIDDLE, "x_mid", d->rows, d->d_model, 0, USUAL, MTT_ACTIVATIONS, BY_LAYER, NONE)                   \
    X(LN_2, "ln_2", d->rows, d->d_model, 0, USUAL, MTT_ACTIVATIONS, BY_SELECTIVE, LN_2)                  \
    X(LN_2_STATS, "ln_2.stats", d->rows, 2, 0, WIDE, MTT_ACTIVATIONS, BY_LAYER, NONE)                    \
    X(FC, "mlp.fc", d->rows, d->d_fc, 0, USUAL, MTT_ACTIVATIONS, BY_LAYER, NONE)                         \
    X(GELU, "mlp.gelu", d->rows, d->d_ff, 0, USUAL, MTT_ACTIVATIONS, BY_SELECTIVE, NONE)                 \
    X(MLP, "mlp.proj", d->rows, d->d_model, 0, USUAL, MTT_ACTIVATIONS, BY_LAYER, FC)                     \
    X(SUM_2, "sum_2", d->rows, d->d_model, 0, USUAL, MTT_ACTIVATIONS, BY_LAYER, NONE)                    \
    X(LAST_ROW, "last_row", b->head_rows, d->d_model, 0, USUAL, MTT_ACTIVATIONS, BY_NOTHING, NONE)       \
    X(LN_F, "ln_f", b->head_rows, d->d_model, 0, USUAL, MTT_ACTIVATIONS, BY_NOTHING, NONE)               \
    X(LN_F_STATS, "ln_f.stats", b->head_rows, 2, 0, WIDE, MTT_ACTIVATIONS, BY_NOTHING, NONE)             \
    X(LOGITS, "logits", b->head_rows, d->vocab_padded, 0, USUAL, MTT_LOGITS, BY_NOTHING, NONE)           \
    X(ROW_LOSS, "row_loss", d->rows, 3, 0, WIDE, MTT_DATA, BY_NOTHING, NONE)                             \
    MTT__ADAPTERS_ACTIVATIONS(X) MTT__EIGHT_ACTIVATIONS(X)

#define MTT__ROLE_ENUM(role, name, a, b, c, type, category, dropped_by, frees) MTT__A_##role,
enum { MTT__A_NONE = -1, MTT__ACTIVATIONS(MTT__ROLE_ENUM) MTT__ROLES };
#define MTT__ROLE_ROW(role, name, a, b, c, type, category, dropped_by, frees)                                \
    {name, MTT__##type, MTT__##dropped_by, MTT__A_##frees},
static const struct {
    const char *name;
    int type, dropped_by, frees;
} mtt__role[] = {MTT__ACTIVATIONS(MTT__ROLE_ROW)};

typedef struct mtt__parameter {
    int kind, layer;  /* layer -1 outside the layers */
    int frozen;       /* 1 = not trained: nothing below but its shape and weight */
    int64_t shape[2]; /* without padding; shape[1] is 0 for a vector */
    mtt_part part;
    int first_range;  /* its first entry in the table of ranges */
    mtt_tensor *weight, *gradient;
    mtt_tensor *sum;  /* of the gradients of all micro-batches; NULL if there is one */
    int64_t sum_shape[2]; /* that of the weight, or elements of a share; 0 = none */
    mtt_tensor *received; /* gradients of other ranks; NULL: no other ranks */
    int64_t received_at;  /* where its element 0 is, or would be, in a row of these, in bytes */
} mtt__parameter;

/* A training step, an evaluation, or the logits of one token: operations over tensors that share one arena in
   each place. State comes first and has the same offsets in all programs of a schedule. */
typedef struct mtt__program {
    mtt__pool pool; /* of the tensors, operands and parameters below */
    mtt_shape shape;
    mtt_tensor **tensors;
    mtt_op *ops, *later_ops; /* the second list: of micro-batches after the first; NULL if there are none */
    mtt__parameter *parameters;
    int tensor_count, op_count, parameter_count;
    int range_count; /* entries of the table of ranges */
    int64_t optim_elements; /* of master, m and v */
    int step_begin; /* the forward and backward pass end here */
    mtt_tensor *optim[MTT__OPTIM_KINDS]; /* what the optimizer keeps */
    mtt_tensor *positions, *angles; /* NULL: none */
    mtt_tensor *sequences, *places, *last, *choices, *chosen, **cache; /* of generation: see mtt_generator */
    mtt_tensor *tokens, *targets, *control, *counters, *ranges, *scales, *workspace, *output;
    size_t arena_bytes, host_bytes; /* of the card's arena and the host's */
} mtt__program;

/* A schedule trains, or else it generates: with a program for `chunk` rows of any sequences, and one for the
   next token of each. The first program of a schedule owns the state. */
enum { MTT__TRAIN, MTT__EVALUATE, MTT__NEXT, MTT__PROGRAMS };
enum { MTT__CHUNK, MTT__TOKEN };

struct mtt_schedule {
    mtt_env *env;
    mtt_model_desc model;
    mtt_policy policy;
    int batch, seq_len;                        /* of a micro-batch, or of the cache */
    int chunk;                                 /* rows of a pass over prompts; 0 = this schedule trains */
    int recompute_layers, recompute_selective; /* layers, from the first; then those in part */
    int split;    /* micro-batches in a batch; the policy's `accumulate` counts them */
    size_t least; /* bytes of the smallest plan that was tried for a budget */
    mtt__program programs[MTT__PROGRAMS];
};

static int64_t mtt__parameter_elements(const mtt__parameter *q)
{
    return q->shape[0] * (q->shape[1] ? q->shape[1] : 1);
}

/* -----------------------------------------------------------------------------------------------------------
   >>schedule
   -------------------------------------------------------------------------------------------------------- */

/* The program of a step is a list of operations over named tensors. Passes write it, one after the other, in
   this order. Those in brackets are of wings:
      forward     the model's operations, and the loss
      [generate]  generation: attention reads a cache of keys and values
      [adapters]  LoRA: linear layers get a second product
      [eight]     FP8: products take operands in 8 bits
      adjoints    the forward list in reverse; each operation's adjoint emits its backward operations, and
                  mtt__need emits again the forward operations whose results were dropped
      [absorb]    FP8: what makes a tensor also rounds it
      gradients   a layer's gradients of parameters are summed, or used at once
      fusions     neighbours that one kernel can do are joined
      step        the gradient's norm and the update
      [scales]    FP8: the scales of the next step
      [exchange]  ranks: they add up each other's gradients, and each may update a share of the weights
   mtt_schedule_print_passes shows the list between them. Offsets are not a concern here: mtt__close_program
   finds the first and the last use of every tensor, and the plan its place.

   To add a pass: a row of MTT__PASS_LIST, and its function. To add an operation: a row of MTT_LOCAL_OPS, its
   results in MTT__ACTIVATIONS, a pass that emits it, a row of MTT__ADJOINTS with its function,
   mtt__cpu_<name> and a kernel. To add a wing: its rows and MTT_IF_... in the interface, a row of MTT__WINGS,
   and its room. */

#define MTT__OP_ROW(name, inputs, operands, flops, bytes, scratch)                      \
    {#name, inputs, (int)(sizeof(mtt_op_##name) / sizeof(mtt_tensor *))},
static const struct {
    const char *name;
    int inputs, operands;
} mtt__op_row[] = {MTT_OPS(MTT__OP_ROW)};

/* The operands of any operation. */
#define MTT__OP_MEMBER(name, inputs, operands, flops, bytes, scratch) mtt_op_##name name;
typedef union mtt__operands {
    MTT_OPS(MTT__OP_MEMBER)
} mtt__operands;
enum { MTT__MOST_OPERANDS = sizeof(mtt__operands) / sizeof(mtt_tensor *) };

MTTDEF const char *mtt_op_name(mtt_op_kind kind)
{
    return (unsigned)kind < MTT_OP_KIND_COUNT ? mtt__op_row[kind].name : "unknown";
}

/* ---- the builder ---- */

/* An activation of a layer while a program is built. */
typedef struct mtt__activation {
    mtt_tensor *current;  /* the tensor that holds it; NULL = dropped or not made yet */
    mtt_tensor *gradient; /* the tensor that holds its gradient */
    int maker;            /* the operation that made it in the forward pass */
    int trains;           /* 1 = a parameter that is trained had a part in it: its gradient is wanted */
} mtt__activation;

/* Builds one program. After the first failure everything does nothing; `nothing`, `no_op` and `no_operands`
   then take what is written. */
struct mtt__builder {
    mtt_env *env;
    const mtt_schedule *schedule;
    const mtt_policy *policy;
    mtt__program *program;
    int trains;                      /* 1 = the program has a backward pass */
    int sums;                        /* 1 = a step adds up the gradients of several micro-batches */
    mtt__pool pool;                  /* of what the builder alone needs */
    mtt__activation *activations;    /* [role][layer] */
    mtt__parameter **parameters;     /* [kind][layer]; NULL = the model has none */
    size_t tensor_capacity, op_capacity;
    int64_t head_rows;               /* rows that reach the final norm and the head */
    int one_row, logits;             /* 1 = one row of x reaches the head; logits are made, and no loss */
    mtt_phase phase;
    int backward_at;                 /* the layer of the operation whose adjoint is being emitted */
    mtt_status status;
    mtt_op *op;                      /* the last one */
    void *own;                       /* memory of the pass: see mtt__own */
    int layer, layer_before;         /* of the operation that a rule is asked about, and of the one before it:
                                        -1 before the layers, their number after them, -2 at the end */
    mtt_tensor nothing;
    mtt_op no_op;
    mtt__operands no_operands;
};

static mtt_dtype mtt__dtype(const mtt__builder *b)
{
    return mtt__precisions[b->policy->precision].dtype;
}

static mtt_dtype mtt__role_dtype(const mtt__builder *b, int role)
{
    int type = mtt__role[role].type;
    return type == MTT__USUAL ? mtt__dtype(b) : (mtt_dtype)type;
}

static size_t mtt__slot(const mtt__builder *b, int row, int layer)
{
    return (size_t)row * (size_t)(b->program->shape.layers + 1) + (size_t)(layer < 0 ? 0 : layer);
}

static mtt__activation *mtt__activation_of(const mtt__builder *b, const mtt_tensor *t)
{
    return &b->activations[mtt__slot(b, t->role, t->layer)];
}

/* The operation that made an activation in the forward pass; a copy, since the list moves as it grows. */
static mtt_op mtt__maker(mtt__builder *b, const mtt_tensor *t)
{
    return b->program->ops[mtt__activation_of(b, t)->maker];
}

/* Memory that lives as long as the program. */
static void *mtt__take(mtt__builder *b, size_t bytes)
{
    void *block = b->status ? NULL : mtt__pool_take(b->env, &b->program->pool, bytes);
    if (!block && !b->status) b->status = MTT_E_MEMORY;
    return block;
}

/* A tensor of up to three dimensions (0 = no such one). Its name is the layer's, `prefix` and `name`. */
static mtt_tensor *mtt__add_tensor(mtt__builder *b, mtt_dtype dtype, mtt_category category, int layer,
                                   const char *prefix, const char *name, int64_t s0, int64_t s1, int64_t s2)
{
    mtt__program *p = b->program;
    mtt_tensor *t = (mtt_tensor *)mtt__take(b, sizeof(*t));
    size_t count = (size_t)p->tensor_count + 1, rows = (size_t)(s1 ? s1 : 1), columns = (size_t)(s2 ? s2 : 1);
    mtt__text text;
    if (t) b->status = mtt__reserve(b->env, (void **)&p->tensors, &b->tensor_capacity, count, sizeof(t));
    if (b->status) return &b->nothing;
    mtt__text_init(&text, t->name, sizeof(t->name));
    if (layer >= 0 && layer < p->shape.layers) mtt__print(&text, "h.%d.", layer);
    mtt__print(&text, "%s%s", prefix, name);
    t->dtype = dtype;
    t->category = category;
    t->shape[0] = s0;
    t->shape[1] = s1;
    t->shape[2] = s2;
    t->dims = s2 ? 3 : s1 ? 2 : 1;
    t->bytes = mtt__bytes_of(dtype, mtt__mul(mtt__mul((size_t)s0, rows), columns));
    t->role = t->layer = t->parameter = t->entry = t->first = t->last = -1;
    t->index = p->tensor_count;
    return p->tensors[p->tensor_count++] = t;
}

static mtt_tensor *mtt__add_state(mtt__builder *b, mtt_dtype dtype, mtt_category category, const char *name,
                                  int64_t s0, int64_t s1)
{
    mtt_tensor *t = mtt__add_tensor(b, dtype, category, -1, "", name, s0, s1, 0);
    t->persistent = 1;
    return t;
}

/* A new tensor for an activation, from now on its current one. */
static mtt_tensor *mtt__make(mtt__builder *b, int role_of, int layer)
{
    const mtt_shape *d = &b->program->shape;
    mtt_qkv qkv = mtt_qkv_of(d);
    int64_t heads = (int64_t)d->batch * d->heads, wide = (int64_t)d->heads * d->d_head;
    mtt_tensor *t = &b->nothing;
    switch (role_of) {
#define MTT__MAKE(role, name, s0, s1, s2, type, category, dropped_by, frees)            \
    case MTT__A_##role:                                                                 \
        t = mtt__add_tensor(b, mtt__role_dtype(b, role_of), category, layer, "", name, s0, s1, s2); \
        break;
        MTT__ACTIVATIONS(MTT__MAKE)
    }
    t->role = role_of;
    t->layer = layer;
    if (!b->status) mtt__activation_of(b, t)->current = t;
    return t;
}

/* 1 = the gradient of an operand is wanted. */
static int mtt__trains(const mtt__builder *b, const mtt_tensor *t)
{
    if (!t || b->status) return 0;
    if (t->parameter >= 0) return !b->program->parameters[t->parameter].frozen;
    return t->role >= 0 && mtt__activation_of(b, t)->trains;
}

/* 1 = the gradient of any operand in [k, end) is wanted. */
static int mtt__some_train(const mtt__builder *b, mtt_tensor **operands, int k, int end)
{
    while (k < end && !mtt__trains(b, operands[k])) k++;
    return k < end;
}

/* Appends an operation, and notes what it makes in the forward pass. The result is valid until the next
   operation. */
static mtt_op *mtt__append(mtt__builder *b, const mtt_op *op)
{
    mtt__program *p = b->program;
    size_t count = (size_t)p->op_count + 1;
    int k, trains;
    if (!b->status) b->status = mtt__reserve(b->env, (void **)&p->ops, &b->op_capacity, count, sizeof(*op));
    if (b->status) return &b->no_op;
    trains = mtt__some_train(b, op->operands, 0, op->inputs);
    for (k = op->inputs; k < op->inputs + op->outputs && op->phase == MTT_FORWARD; k++)
        if (op->operands[k] && op->operands[k]->role >= 0) {
            mtt__activation *a = mtt__activation_of(b, op->operands[k]);
            a->maker = p->op_count;
            a->trains = trains;
        }
    p->ops[p->op_count] = *op;
    return &p->ops[p->op_count++];
}

/* Appends a new operation. `operands` is its row's struct. */
static mtt_op *mtt__emit(mtt__builder *b, mtt_op_kind kind, int layer, int site, const void *operands)
{
    size_t bytes = (size_t)mtt__op_row[kind].operands * sizeof(mtt_tensor *);
    mtt_op op;
    memset(&op, 0, sizeof(op));
    op.operands = (mtt_tensor **)mtt__take(b, bytes);
    if (b->status) return &b->no_op;
    memcpy(op.operands, operands, bytes);
    op.kind = kind;
    op.phase = b->phase;
    op.layer = layer;
    op.site = site;
    op.inputs = mtt__op_row[kind].inputs;
    op.outputs = mtt__op_row[kind].operands - op.inputs;
    return mtt__append(b, &op);
}

/* MTT__EMIT(b, layer, site, norm, x, gain, shift, y, stats); b->op is the new operation. */
#define MTT__EMIT(b, layer, site, name, ...)                                            \
    do {                                                                                \
        mtt_op_##name mtt__row = {__VA_ARGS__};                                         \
        b->op = mtt__emit(b, MTT_OP_##name, layer, site, &mtt__row);                    \
    } while (0)

/* ---- passes ---- */

/* A rule of a pass: it emits what takes the place of the operation `op`, and returns how many of the list it
   has dealt with. With 0 the operation stays, with the operands that the rule has left it. The list ends at
   `end`, where the rule is asked once more. b->layer says which layer the operation is in, and b->phase its
   phase. */
typedef int mtt__rule(mtt__builder *b, mtt_op *op, const mtt_op *end);

typedef void mtt__pass_writer(mtt__builder *b);
typedef int mtt__condition(const mtt__builder *b);

#ifndef MTT__EXTRA_PASSES /* those of a test, which defines their rules after it includes this file */
#define MTT__EXTRA_PASSES(EMIT, RULE)
#endif

/* In their order: each writes on at the end of the list (EMIT), or writes the list again (RULE), where it
   applies. What changes which operation makes a value comes before the adjoints, so that recomputation makes
   it the same way; what only moves or joins comes after them. */
#define MTT__PASS_LIST(EMIT, RULE)                                                      \
    EMIT(forward, always)                                                               \
    MTT_IF_GENERATOR(RULE(generate, generates))                                         \
    MTT_IF_ADAPTERS(RULE(adapters, has_adapters))                                       \
    MTT_IF_EIGHT(RULE(eight, has_eight))                                                \
    EMIT(adjoints, has_backward)                                                        \
    MTT_IF_EIGHT(RULE(absorb, has_eight))                                               \
    RULE(gradients, has_backward)                                                       \
    RULE(fusions, always)                                                               \
    MTT__EXTRA_PASSES(EMIT, RULE)                                                       \
    EMIT(step, has_step)                                                                \
    MTT_IF_EIGHT(EMIT(scales, has_eight))                                               \
    MTT_IF_RANKS(RULE(exchange, has_ranks))

#define MTT__EMIT_DECLARED(name, applies)                                               \
    static mtt__pass_writer mtt__emit_##name;                                           \
    static mtt__condition mtt__##applies;
#define MTT__RULE_DECLARED(name, applies)                                               \
    static mtt__rule mtt__rule_##name;                                                  \
    static mtt__condition mtt__##applies;
MTT__PASS_LIST(MTT__EMIT_DECLARED, MTT__RULE_DECLARED)
#define MTT__EMIT_ROW(name, applies) {#name, mtt__emit_##name, NULL, mtt__##applies},
#define MTT__RULE_ROW(name, applies) {#name, NULL, mtt__rule_##name, mtt__##applies},
static const struct {
    const char *name;
    mtt__pass_writer *write;
    mtt__rule *rule;
    mtt__condition *applies;
} mtt__passes[] = {MTT__PASS_LIST(MTT__EMIT_ROW, MTT__RULE_ROW)};
enum { MTT__PASSES = MTT__LENGTH(mtt__passes) };

static int mtt__always(const mtt__builder *b)
{
    (void)b;
    return 1;
}

static int mtt__has_backward(const mtt__builder *b)
{
    return b->trains;
}

static int mtt__has_step(const mtt__builder *b)
{
    return b->trains && !b->policy->early_update;
}

/* Returns what a rule keeps from operation to operation: zeros at first. NULL: out of memory. */
static MTT__UNUSED void *mtt__own(mtt__builder *b, size_t bytes)
{
    if (!b->own && !b->status) b->own = mtt__pool_take(b->env, &b->pool, bytes);
    if (!b->own && !b->status) b->status = MTT_E_MEMORY;
    return b->own;
}

/* Finds the layer of an operation. A recomputed one counts to the layer of the next one that is not. Layer -1
   is before the layers or after them: the way that the list has come says which. */
static void mtt__enter_layer(mtt__builder *b, const mtt_op *op, const mtt_op *end)
{
    int layers = b->program->shape.layers;
    b->layer_before = b->layer;
    while (op < end && op->recomputed) op++;
    if (op == end) b->layer = -2;
    else if (op->layer >= 0) b->layer = op->layer;
    else if (op->phase == MTT_FORWARD ? b->layer_before >= 0 : b->layer_before == layers) b->layer = layers;
    else b->layer = -1;
}

/* Writes the list again by a rule. */
static void mtt__rewrite(mtt__builder *b, mtt__rule *rule)
{
    mtt_op *list = b->program->ops, *end = list + b->program->op_count, *op = list;
    b->program->ops = NULL;
    b->program->op_count = 0;
    b->op_capacity = 0;
    b->layer = -1;
    b->own = NULL;
    while (op < end && !b->status) {
        int done;
        b->phase = op->phase;
        mtt__enter_layer(b, op, end);
        done = rule(b, op, end);
        if (!done) mtt__append(b, op);
        op += done ? done : 1;
    }
    mtt__enter_layer(b, end, end);
    if (!b->status) rule(b, end, end);
    mtt__free(b->env, list);
}

/* ---- recomputation ---- */

/* A new tensor for the same activation, now its current one. It is not `recorded`: its largest value has
   been counted. */
static mtt_tensor *mtt__make_again(mtt__builder *b, const mtt_tensor *t)
{
    mtt_tensor *again = mtt__make(b, t->role, t->layer);
    again->dtype = t->dtype, again->bytes = t->bytes, again->entry = t->entry;
    again->transposed = t->transposed;
    return again;
}

/* Recursion: 1 = the input of a layer stays while the backward pass is at layer `at` of `layers`. Those stay
   that halve what is left up to `at`, again and again. Of 16 layers, at the last one: 0, 8, 12, 14, 15. As
   the backward pass goes down, none is asked for that was not kept. */
static int mtt__stays(int layers, int at, int layer)
{
    int low = 0, high = layers, middle;
    while (high - low > 1 && low != layer) {
        middle = low + (high - low) / 2;
        if (at < middle) high = middle;
        else low = middle;
    }
    return low == layer;
}

/* Recompute level of a layer, as in the table of activations; 0 drops only what is never kept.
   mtt__fit_budget chooses recompute_layers and recompute_selective for layer, segments, recursive and budget:
   the last layers keep more where that costs at most 0.1 % more memory. */
static int mtt__recompute_level(const mtt_schedule *s, int layer)
{
    mtt_recompute how = s->policy.recompute;
    int recomputed = s->recompute_layers;
    if (layer >= recomputed + s->recompute_selective) return 0;
    if (layer >= recomputed) return MTT__BY_SELECTIVE;
    if (how == MTT_RECOMPUTE_RECURSIVE ? !mtt__stays(recomputed, recomputed - 1, layer)
                                       : layer % s->policy.segment)
        return MTT__BY_SEGMENT;
    return MTT__BY_LAYER;
}

/* 1 = layers are recomputed by halves, attention and MLP. */
static int mtt__by_halves(const mtt_policy *p)
{
    return p->recompute == MTT_RECOMPUTE_SEGMENTS || p->recompute == MTT_RECOMPUTE_RECURSIVE;
}

/* Recursion passes through a layer many times on its way to a later one. So it forgets what the layer has
   made again as soon as the next one's input is there, and its own input, too, if that does not halve what is
   left. */
static void mtt__forget_layer(mtt__builder *b, int layer)
{
    const mtt_schedule *s = b->schedule;
    int role;
    if (s->policy.recompute != MTT_RECOMPUTE_RECURSIVE) return;
    for (role = 0; role < MTT__ROLES; role++)
        if (role != MTT__A_RESIDUAL || !mtt__stays(s->recompute_layers, b->backward_at, layer))
            b->activations[mtt__slot(b, role, layer)].current = NULL;
}

/* The tensor that holds an activation. If it was dropped, it is made again by the operation that made it,
   after what that operation needs in its turn. Recomputation is this, and mtt__drop_activations, which
   forgets what is not kept. No bit changes: the operation has the same inputs, layer, site and scale, so
   dropout draws the same numbers; `fusions` lets the same kernel make both; scales of FP8 change at the end
   of a step. */
static mtt_tensor *mtt__need(mtt__builder *b, mtt_tensor *t)
{
    mtt_tensor **made;
    mtt__activation *a;
    mtt_op again;
    int k, count;
    if (!t || t->role < 0 || b->status) return t;
    a = mtt__activation_of(b, t);
    if (a->current) return a->current;
    again = mtt__maker(b, t);
    count = again.inputs + again.outputs;
    for (k = 0; k < again.inputs; k++) mtt__need(b, again.operands[k]);
    made = (mtt_tensor **)mtt__take(b, (size_t)count * sizeof(*made));
    for (k = 0; k < count && !b->status; k++) {
        mtt_tensor *then = made[k] = again.operands[k];
        if (!then || then->role < 0) continue;
        made[k] = mtt__activation_of(b, then)->current;
        if (mtt__role[then->role].dropped_by == MTT__ONCE && then != t) continue; /* its reader is done */
        if (!made[k]) made[k] = mtt__make_again(b, then);
    }
    if (b->status) return t;
    again.operands = made;
    again.phase = b->phase;
    again.recomputed = 1;
    mtt__append(b, &again);
    if (t->role == MTT__A_RESIDUAL && t->layer > 0) mtt__forget_layer(b, t->layer - 1);
    return a->current;
}

/* 1 = the recompute levels drop it after the forward pass. By halves the first layer's input goes, too:
   embedding again costs next to nothing. */
static int mtt__is_dropped(const mtt_schedule *s, int role, int layer)
{
    int level = mtt__recompute_level(s, layer);
    if (role == MTT__A_RESIDUAL && layer == 0 && mtt__by_halves(&s->policy))
        return level >= MTT__BY_LAYER;
    if (role == MTT__A_QKV && s->model.qk_norm) return 1; /* the norms need QKV_RAW, which is kept instead */
    return mtt__role[role].dropped_by <= level;
}

/* Forgets what the backward pass makes again: later operations cannot name such a tensor, so its life ends
   with its last use in the forward pass. So does what has another type than its role, which the wing that
   gave it that type makes again in its own way. */
static void mtt__drop_activations(mtt__builder *b)
{
    int layer, role;
    for (layer = 0; layer <= b->program->shape.layers; layer++)
        for (role = 0; role < MTT__ROLES; role++) {
            mtt__activation *a = &b->activations[mtt__slot(b, role, layer)];
            int other = a->current && a->current->dtype != mtt__role_dtype(b, role);
            if (mtt__is_dropped(b->schedule, role, layer) || other) a->current = NULL;
        }
}

/* By halves, what was recomputed is dropped as soon as half a layer is done; the other half recomputes it if
   it must. So at most half a layer, attention or MLP, is in memory at a time. Layers' inputs stay. What was
   made may be the next layer's x: so its layer is not always the operation's. */
static void mtt__free_half(mtt__builder *b, const mtt_op *op)
{
    const mtt_tensor *made = op->operands[op->inputs]; /* absent where only its transpose is made */
    int frees = !made || made->role < 0 ? MTT__A_NONE : mtt__role[made->role].frees, boundary, role;
    if (frees < 0 || op->layer < 0 || !mtt__by_halves(b->policy) ||
        mtt__recompute_level(b->schedule, op->layer) < MTT__BY_LAYER)
        return;
    boundary = b->activations[mtt__slot(b, frees, made->layer)].maker;
    for (role = 0; role < MTT__ROLES; role++) {
        mtt__activation *a = &b->activations[mtt__slot(b, role, op->layer)];
        if (role != MTT__A_RESIDUAL && a->maker < boundary) a->current = NULL;
    }
}

/* ---- gradients of tensors ---- */

/* A micro-batch's gradient of a parameter, made when it is first asked for; NULL if that is frozen. In the
   compact state with one micro-batch a step nothing is added to those of the layers' matrices, so they may
   have the weights' type. */
static mtt_tensor *mtt__parameter_gradient(mtt__builder *b, const mtt_tensor *weight)
{
    const mtt_policy *policy = b->policy;
    mtt__parameter *q;
    int once;
    if (!weight || weight->parameter < 0 || !mtt__trains(b, weight)) return NULL;
    q = &b->program->parameters[weight->parameter];
    if (q->gradient) return q->gradient;
    weight = q->weight; /* and not a wing's copy of it */
    once = policy->state == MTT_STATE_COMPACT && policy->accumulate == 1 && q->layer >= 0 && q->shape[1];
    q->gradient = mtt__add_tensor(b, once ? weight->dtype : MTT_F32, MTT_GRADIENTS, -1, "d_", weight->name,
                                  weight->shape[0], weight->shape[1], 0);
    q->gradient->transposed = weight->transposed;
    return q->gradient;
}

/* Where the gradient of an activation is noted: NULL as long as there is none. */
static mtt_tensor **mtt__gradient(mtt__builder *b, const mtt_tensor *t)
{
    return &mtt__activation_of(b, t)->gradient;
}

/* A new tensor for the gradient of an activation. The residual stream's is one tensor all the way down. */
static mtt_tensor *mtt__make_gradient(mtt__builder *b, const mtt_tensor *t)
{
    const char *of = t->role == MTT__A_RESIDUAL ? mtt__role[t->role].name : t->name;
    mtt_tensor *d;
    if (b->status) return &b->nothing;
    d = mtt__add_tensor(b, mtt__dtype(b), t->category, -1, "d_", of, t->shape[0], t->shape[1], t->shape[2]);
    return *mtt__gradient(b, t) = d;
}

/* Adds the gradient of an activation to `earlier`, that of another use of it, and keeps the sum. NULL: there
   was no other use. */
static void mtt__join_gradient(mtt__builder *b, int layer, const mtt_tensor *t, mtt_tensor *earlier)
{
    mtt_tensor *d = *mtt__gradient(b, t);
    if (!earlier || b->status) return;
    MTT__EMIT(b, layer, 0, add, earlier, d, earlier);
    *mtt__gradient(b, t) = earlier;
}

/* ---- the forward pass ---- */

static mtt_tensor *mtt__weight(const mtt__builder *b, int kind, int layer)
{
    const mtt__parameter *q = b->parameters[mtt__slot(b, kind, layer)];
    return q ? q->weight : NULL;
}

/* y = x W + b */
#define MTT__LINEAR(b, layer, x, name, y_role)                                          \
    mtt__linear(b, layer, x, MTT__##name##_WEIGHT, MTT__##name##_BIAS, y_role)
static mtt_tensor *mtt__linear(mtt__builder *b, int layer, mtt_tensor *x, int weight, int bias, int y_role)
{
    mtt_tensor *y = mtt__make(b, y_role, layer);
    MTT__EMIT(b, layer, 0, linear, x, mtt__weight(b, weight, layer), mtt__weight(b, bias, layer), y);
    return y;
}

/* The norms of a layer, of attention and of the MLP, and the final one, which is the model's: its operation
   has layer -1. In a post-norm model x is a sum, which nothing else reads. */
enum { MTT__FIRST_NORM, MTT__SECOND_NORM, MTT__FINAL_NORM };
static const struct { int gain, shift, y, stats, sum; } mtt__norms[] = {
    {MTT__LN_1_WEIGHT, MTT__LN_1_BIAS, MTT__A_LN_1, MTT__A_LN_1_STATS, MTT__A_SUM_1},
    {MTT__LN_2_WEIGHT, MTT__LN_2_BIAS, MTT__A_LN_2, MTT__A_LN_2_STATS, MTT__A_SUM_2},
    {MTT__LN_F_WEIGHT, MTT__LN_F_BIAS, MTT__A_LN_F, MTT__A_LN_F_STATS, MTT__A_NONE},
};

static mtt_tensor *mtt__norm(mtt__builder *b, int layer, int which, mtt_tensor *x, mtt_tensor *y)
{
    int at = which == MTT__FINAL_NORM ? -1 : layer;
    mtt_tensor *stats = mtt__make(b, mtt__norms[which].stats, layer);
    MTT__EMIT(b, at, 0, norm, x, mtt__weight(b, mtt__norms[which].gain, at),
              mtt__weight(b, mtt__norms[which].shift, at), y, stats);
    return y;
}

/* The input of a branch's first product, or of the head: norm(x) in a pre-norm model, else x. */
static mtt_tensor *mtt__product_input(mtt__builder *b, int layer, int which, mtt_tensor *x)
{
    if (b->schedule->model.norm_place != MTT_NORM_PRE) return x;
    return mtt__norm(b, layer, which, x, mtt__make(b, mtt__norms[which].y, layer));
}

/* q, k and v of each head, as attention takes them. */
static mtt_tensor *mtt__qkv(mtt__builder *b, int layer, mtt_tensor *x)
{
    mtt_tensor *angles = b->program->angles, *q_gain = mtt__weight(b, MTT__Q_NORM_WEIGHT, layer), *raw, *y;
    if (!angles && !q_gain) return MTT__LINEAR(b, layer, x, QKV, MTT__A_QKV);
    raw = MTT__LINEAR(b, layer, x, QKV, MTT__A_QKV_RAW);
    y = mtt__make(b, MTT__A_QKV, layer);
    MTT__EMIT(b, layer, 0, rotary, raw, angles, q_gain, mtt__weight(b, MTT__K_NORM_WEIGHT, layer), y);
    return y;
}

static mtt_tensor *mtt__attention(mtt__builder *b, int layer, mtt_tensor *qkv)
{
    mtt_tensor *control = b->program->control, *scores, *probs, *dropped, *out, *lse;
    if (b->policy->attention == MTT_ATTENTION_FLASH) {
        lse = mtt__make(b, MTT__A_LSE, layer);
        out = mtt__make(b, MTT__A_ATTENDED, layer);
        MTT__EMIT(b, layer, MTT__SITE_ATTENTION, flash, qkv, control, out, lse, NULL);
        return out;
    }
    scores = mtt__make(b, MTT__A_SCORES, layer);
    MTT__EMIT(b, layer, 0, attention_scores, qkv, scores);
    probs = mtt__make(b, MTT__A_PROBS, layer);
    MTT__EMIT(b, layer, 0, softmax, scores, probs);
    if (b->program->shape.dropout > 0) {
        dropped = mtt__make(b, MTT__A_AFTER_DROPOUT, layer);
        MTT__EMIT(b, layer, MTT__SITE_ATTENTION, dropout_scores, probs, control, dropped);
        probs = dropped;
    }
    out = mtt__make(b, MTT__A_ATTENDED, layer);
    MTT__EMIT(b, layer, 0, attention_values, probs, qkv, out);
    return out;
}

/* x + dropout(branch), normalized in a post-norm model: the activation `role` of layer `to`. */
static mtt_tensor *mtt__residual(mtt__builder *b, int layer, int which, mtt_tensor *x, mtt_tensor *branch,
                                 int site, int role, int to)
{
    int post = b->schedule->model.norm_place == MTT_NORM_POST;
    mtt_tensor *sum = post ? mtt__make(b, mtt__norms[which].sum, layer) : mtt__make(b, role, to);
    MTT__EMIT(b, layer, site, residual, x, branch, b->program->control, sum);
    if (!post) return sum;
    return mtt__norm(b, layer, which, sum, mtt__make(b, role, to));
}

static mtt_tensor *mtt__activate(mtt__builder *b, int layer, mtt_tensor *x)
{
    mtt_tensor *y = mtt__make(b, MTT__A_GELU, layer);
    MTT__EMIT(b, layer, 0, activation, x, y);
    return y;
}

/* Embedding and layers, up to the last residual stream. */
static mtt_tensor *mtt__emit_layers(mtt__builder *b)
{
    mtt__program *p = b->program;
    mtt_tensor *x = mtt__make(b, MTT__A_RESIDUAL, 0), *wte = mtt__weight(b, MTT__WTE, -1), *h;
    int i;
    MTT__EMIT(b, -1, MTT__SITE_EMBED, embed, p->tokens, wte, p->positions, p->control, x);
    for (i = 0; i < p->shape.layers; i++) {
        h = mtt__product_input(b, i, MTT__FIRST_NORM, x);
        h = mtt__attention(b, i, mtt__qkv(b, i, h));
        h = MTT__LINEAR(b, i, h, PROJ, MTT__A_PROJ);
        x = mtt__residual(b, i, MTT__FIRST_NORM, x, h, MTT__SITE_PROJ, MTT__A_MIDDLE, i);
        h = mtt__product_input(b, i, MTT__SECOND_NORM, x);
        h = MTT__LINEAR(b, i, h, FC, MTT__A_FC);
        h = mtt__activate(b, i, h);
        h = MTT__LINEAR(b, i, h, MLP, MTT__A_MLP);
        x = mtt__residual(b, i, MTT__SECOND_NORM, x, h, MTT__SITE_MLP, MTT__A_RESIDUAL, i + 1);
    }
    return x;
}

static mtt_tensor *mtt__head_weight(mtt__builder *b)
{
    return mtt__weight(b, b->schedule->model.tied_head ? MTT__WTE : MTT__HEAD_WEIGHT, -1);
}

static mtt_tensor *mtt__emit_logits(mtt__builder *b, mtt_tensor *normed)
{
    mtt_tensor *logits = mtt__make(b, MTT__A_LOGITS, b->program->shape.layers);
    MTT__EMIT(b, -1, 0, linear, normed, mtt__head_weight(b), mtt__weight(b, MTT__HEAD_BIAS, -1), logits);
    return logits;
}

/* Head and loss in one operation, which makes the gradients that are wanted, chunk by chunk. */
static void mtt__emit_chunked_loss(mtt__builder *b, mtt_tensor *x, mtt_tensor *losses)
{
    mtt__program *p = b->program;
    mtt_tensor *weight = mtt__head_weight(b), *bias = mtt__weight(b, MTT__HEAD_BIAS, -1), *logits;
    mtt_tensor *dx = NULL, *d_weight = NULL, *d_bias = NULL;
    int64_t rows = mtt__min(b->policy->loss_chunk_rows, p->shape.rows), vocab = p->shape.vocab_padded;
    logits = mtt__add_tensor(b, mtt__dtype(b), MTT_LOGITS, -1, "", "logits.chunk", rows, vocab, 0);
    if (b->trains) {
        dx = mtt__make_gradient(b, x);
        d_weight = mtt__parameter_gradient(b, weight);
        d_bias = mtt__parameter_gradient(b, bias);
    }
    MTT__EMIT(b, -1, MTT__SITE_LOGITS, chunked_loss, x, NULL, weight, NULL, bias, p->targets, p->control,
              p->counters, losses, logits, NULL, NULL, dx, d_weight, d_bias);
}

/* The loss of every row and their sum. */
static void mtt__emit_loss(mtt__builder *b, mtt_tensor *x)
{
    mtt__program *p = b->program;
    mtt_tensor *losses = mtt__make(b, MTT__A_ROW_LOSS, p->shape.layers);
    if (b->policy->loss == MTT_LOSS_CHUNKED) mtt__emit_chunked_loss(b, x, losses);
    else MTT__EMIT(b, -1, 0, cross_entropy, mtt__emit_logits(b, x), p->targets, losses);
    MTT__EMIT(b, -1, 0, sum_loss, losses, p->control, p->counters, NULL);
}

/* The forward pass: of a training step, of an evaluation, or up to logits. */
static void mtt__emit_forward(mtt__builder *b)
{
    mtt__program *p = b->program;
    int layers = p->shape.layers;
    mtt_tensor *x = mtt__emit_layers(b), *row;
    if (b->one_row) {
        row = mtt__make(b, MTT__A_LAST_ROW, layers);
        MTT__EMIT(b, -1, 0, pick_row, x, p->control, row);
        x = row;
    }
    x = mtt__product_input(b, layers, MTT__FINAL_NORM, x);
    if (b->logits) p->output = mtt__emit_logits(b, x);
    else mtt__emit_loss(b, x);
}

/* ---- adjoints ---- */

/* An adjoint emits the backward operations of a forward operation: it takes the gradient of what the
   operation made, and leaves the gradients of its inputs. mtt__need brings dropped activations back. A row:
   the operation, and its adjoint; `none` emits nothing, since chunked_loss makes its gradients itself. */
#define MTT__ADJOINTS(X)                                                                                \
    X(embed, embed) X(norm, norm) X(linear, linear) X(rotary, rotary) X(residual, residual)             \
    X(attention_scores, attention_scores) X(softmax, softmax) X(dropout_scores, dropout_scores)         \
    X(attention_values, attention_values) X(flash, flash) X(activation, activation) \
    X(cross_entropy, cross_entropy) X(chunked_loss, none)                                               \
    MTT__ADAPTERS_ADJOINTS(X) MTT__EIGHT_ADJOINTS(X)

/* A list declares the functions that it names, so the room of a wing may stand behind the hall. */
typedef void mtt__adjoint(mtt__builder *b, const mtt_op *op);
#define MTT__ADJOINT_DECLARED(kind, name) static mtt__adjoint mtt__adjoint_##name;
MTT__ADJOINTS(MTT__ADJOINT_DECLARED)
#define MTT__ADJOINT_ROW(kind, name) {MTT_OP_##kind, mtt__adjoint_##name},
static const struct {
    mtt_op_kind kind;
    mtt__adjoint *emit;
} mtt__adjoints[] = {MTT__ADJOINTS(MTT__ADJOINT_ROW)};

static void mtt__adjoint_none(mtt__builder *b, const mtt_op *op)
{
    (void)b, (void)op;
}

static void mtt__adjoint_embed(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_embed *f = MTT_OPERANDS_OF(embed, op);
    mtt_tensor *dx = *mtt__gradient(b, f->x), *d_wte = mtt__parameter_gradient(b, f->wte);
    mtt_tensor *d_wpe = mtt__parameter_gradient(b, f->positions);
    MTT__EMIT(b, -1, op->site, embed_backward, dx, f->tokens, f->control, d_wte, d_wpe);
    b->op->adds = b->schedule->model.tied_head;
}

/* The branch's gradient passes the norm and joins the residual stream's, in place. */
static void mtt__adjoint_norm(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_norm *f = MTT_OPERANDS_OF(norm, op);
    mtt_tensor *x = mtt__need(b, f->x), *stats = mtt__need(b, f->stats), *dy = *mtt__gradient(b, f->y);
    mtt_tensor *joined = *mtt__gradient(b, f->x), *dx = joined ? joined : mtt__make_gradient(b, f->x);
    mtt_tensor *d_gain = mtt__parameter_gradient(b, f->gain), *d_shift = mtt__parameter_gradient(b, f->shift);
    MTT__EMIT(b, op->layer, 0, norm_backward, dy, x, stats, f->gain, NULL, joined, dx, NULL, NULL, NULL,
              d_gain, d_shift, NULL);
}

/* dW first: after it x is not needed. With a frozen weight there is no dW. If nothing below is trained, there
   is no dx. x and `weight` may be a wing's copies. */
static void mtt__linear_gradients(mtt__builder *b, const mtt_op *op, mtt_tensor *x, mtt_tensor *weight,
                                  mtt_tensor *dy)
{
    const mtt_op_linear *f = MTT_OPERANDS_OF(linear, op);
    mtt_tensor *d_weight = mtt__parameter_gradient(b, weight), *d_bias = mtt__parameter_gradient(b, f->bias);
    mtt_tensor *other = *mtt__gradient(b, f->x), *dx;
    if (d_weight || d_bias)
        MTT__EMIT(b, op->layer, 0, linear_backward_weight, d_weight ? x : NULL, dy, d_weight, d_bias);
    if (!mtt__trains(b, f->x)) return;
    dx = mtt__make_gradient(b, f->x);
    MTT__EMIT(b, op->layer, 0, linear_backward_input, dy, weight, dx);
    mtt__join_gradient(b, op->layer, f->x, other);
}

static void mtt__adjoint_linear(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_linear *f = MTT_OPERANDS_OF(linear, op);
    mtt_tensor *x;
    mtt_op maker;
    if (b->status) return;
    maker = mtt__maker(b, f->x);
    x = mtt__trains(b, f->weight) ? mtt__need(b, f->x) : NULL;
    if (maker.kind == MTT_OP_activation && mtt__trains(b, f->x))
        mtt__need(b, maker.operands[0]); /* later, it would stand between two that are fused */
    mtt__linear_gradients(b, op, x, f->weight, *mtt__gradient(b, f->y));
}

/* dx overwrites dy, or x if that has a gate's columns, since nothing reads x after it. */
static void mtt__adjoint_activation(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_activation *f = MTT_OPERANDS_OF(activation, op);
    mtt_tensor *x = mtt__need(b, f->x), *dy = *mtt__gradient(b, f->y), *dx;
    if (b->status) return;
    dx = *mtt__gradient(b, x) = mtt__width(x) > mtt__width(dy) ? x : dy;
    MTT__EMIT(b, op->layer, 0, activation_backward, dy, x, dx, NULL, NULL);
    mtt__activation_of(b, x)->current = NULL;
}

/* The gradient is rotated back in place. */
static void mtt__adjoint_rotary(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_rotary *f = MTT_OPERANDS_OF(rotary, op);
    mtt_tensor *d = *mtt__gradient(b, f->y), *raw = f->q_gain ? mtt__need(b, f->qkv) : NULL;
    mtt_tensor *d_q = mtt__parameter_gradient(b, f->q_gain), *d_k = mtt__parameter_gradient(b, f->k_gain);
    MTT__EMIT(b, op->layer, 0, rotary_backward, d, raw, f->angles, f->q_gain, f->k_gain, d, d_q, d_k,
              NULL);
    *mtt__gradient(b, f->qkv) = d;
}

/* Both inputs get the gradient of the sum, the same tensor: the branch's adjoints read it before its norm's
   adds to it in place. With dropout, the branch gets a masked copy. */
static void mtt__adjoint_residual(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_residual *f = MTT_OPERANDS_OF(residual, op);
    mtt_tensor *dy = *mtt__gradient(b, f->sum);
    *mtt__gradient(b, f->x) = *mtt__gradient(b, f->branch) = dy;
    if (b->program->shape.dropout > 0)
        MTT__EMIT(b, op->layer, op->site, dropout_backward, dy, f->control, mtt__make_gradient(b, f->branch));
}

static void mtt__adjoint_attention_scores(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_attention_scores *f = MTT_OPERANDS_OF(attention_scores, op);
    mtt_tensor *qkv = mtt__need(b, f->qkv), *d_scores = *mtt__gradient(b, f->scores);
    MTT__EMIT(b, op->layer, 0, attention_scores_backward, d_scores, qkv, *mtt__gradient(b, f->qkv));
}

static void mtt__adjoint_softmax(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_softmax *f = MTT_OPERANDS_OF(softmax, op);
    mtt_tensor *probs = mtt__need(b, f->probs), *d = *mtt__gradient(b, f->probs);
    MTT__EMIT(b, op->layer, MTT__SITE_ATTENTION, softmax_backward, d, probs, b->program->control, d);
    *mtt__gradient(b, f->scores) = d;
}

/* softmax_backward applies the mask. */
static void mtt__adjoint_dropout_scores(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_dropout_scores *f = MTT_OPERANDS_OF(dropout_scores, op);
    *mtt__gradient(b, f->probs) = *mtt__gradient(b, f->dropped);
}

/* Makes the part of V in d_qkv; attention_scores_backward adds those of Q and K. */
static void mtt__adjoint_attention_values(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_attention_values *f = MTT_OPERANDS_OF(attention_values, op);
    mtt_tensor *qkv = mtt__need(b, f->qkv), *probs = mtt__need(b, f->probs), *dy = *mtt__gradient(b, f->out);
    mtt_tensor *d_probs = mtt__make_gradient(b, f->probs), *d_qkv = mtt__make_gradient(b, f->qkv);
    MTT__EMIT(b, op->layer, 0, attention_values_backward, dy, probs, qkv, d_probs, d_qkv);
}

static void mtt__adjoint_flash(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_flash *f = MTT_OPERANDS_OF(flash, op);
    mtt_tensor *qkv = mtt__need(b, f->qkv), *out = mtt__need(b, f->out), *lse = mtt__need(b, f->lse);
    mtt_tensor *dy = *mtt__gradient(b, f->out), *d_qkv = mtt__make_gradient(b, f->qkv);
    MTT__EMIT(b, op->layer, op->site, flash_backward, dy, qkv, out, lse, f->control, d_qkv, NULL);
}

/* The gradients take the logits' place. */
static void mtt__adjoint_cross_entropy(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_cross_entropy *f = MTT_OPERANDS_OF(cross_entropy, op);
    mtt_tensor *control = b->program->control, *counters = b->program->counters, *x = f->logits;
    MTT__EMIT(b, -1, 0, cross_entropy_backward, x, f->losses, f->targets, control, counters, x);
    *mtt__gradient(b, x) = x;
}

/* ---- the backward pass ---- */

/* Emits the adjoint of an operation: a wing's where it has changed the operation, else that of its row. */
static void mtt__emit_adjoint(mtt__builder *b, const mtt_op *op)
{
    mtt__wing_of *const *wing = mtt__wings;
    size_t i = 0;
    for (; *wing; wing++)
        if ((*wing)()->adjoint && (*wing)()->adjoint(b, op)) return;
    while (i < MTT__LENGTH(mtt__adjoints) && mtt__adjoints[i].kind != op->kind) i++;
    if (i < MTT__LENGTH(mtt__adjoints)) mtt__adjoints[i].emit(b, op);
    else b->status = mtt__fail(b->env, MTT_E_ARGUMENT, "operation %s has no adjoint: add a row to "
                               "MTT__ADJOINTS, with `none` if it passes no gradient on",
                               mtt_op_name(op->kind));
}

/* The backward pass: the forward list in reverse, down to the lowest parameter that is trained. chunked_loss
   has made its gradients in the forward pass. */
static void mtt__emit_adjoints(mtt__builder *b)
{
    int i;
    b->phase = MTT_BACKWARD;
    if (!b->status) mtt__drop_activations(b);
    for (i = b->program->op_count; i-- > 0 && !b->status;) {
        mtt_op op = b->program->ops[i]; /* a copy, since the list moves as it grows */
        int trains = mtt__some_train(b, op.operands, op.inputs, op.inputs + op.outputs);
        if (op.layer >= 0) b->backward_at = op.layer;
        if (trains) mtt__emit_adjoint(b, &op);
        if (!b->status) mtt__free_half(b, &op);
    }
}

/* ---- fusions ---- */

/* 1 = an operation is followed by another one that reads the first tensor it makes. */
static int mtt__can_fuse(const mtt_op *op, const mtt_op *end, mtt_op_kind first, mtt_op_kind second)
{
    return op->kind == first && op + 1 < end && op[1].kind == second &&
           op[1].operands[0] == op->operands[op->inputs];
}

/* Makes one operation of two. Returns its operands. */
static void *mtt__fuse(mtt__builder *b, mtt_op *op, mtt_op_kind kind)
{
    op->kind = kind;
    op->inputs = mtt__op_row[kind].inputs;
    op->outputs = mtt__op_row[kind].operands - op->inputs;
    op->operands = (mtt_tensor **)mtt__take(b, sizeof(mtt__operands));
    return op->operands ? (void *)op->operands : (void *)&b->no_operands;
}

/* residual, norm: one pass over the row. */
static void mtt__fuse_residual_norm(mtt__builder *b, mtt_op *op)
{
    const mtt_op_residual *r = MTT_OPERANDS_OF(residual, op);
    const mtt_op_norm *n = MTT_OPERANDS_OF(norm, &op[1]);
    mtt_op_residual_norm *f = (mtt_op_residual_norm *)mtt__fuse(b, op, MTT_OP_residual_norm);
    f->x = r->x, f->branch = r->branch, f->control = r->control, f->sum = r->sum;
    f->gain = n->gain, f->shift = n->shift, f->y = n->y, f->stats = n->stats;
}

/* linear, rotary: in place, since nothing else reads the product. */
static void mtt__fuse_linear_rotary(mtt__builder *b, mtt_op *op)
{
    const mtt_op_linear *l = MTT_OPERANDS_OF(linear, op);
    const mtt_op_rotary *r = MTT_OPERANDS_OF(rotary, &op[1]);
    mtt_op_linear_rotary *f = (mtt_op_linear_rotary *)mtt__fuse(b, op, MTT_OP_linear_rotary);
    f->x = l->x, f->weight = l->weight, f->bias = l->bias, f->angles = r->angles;
    f->q_gain = r->q_gain, f->k_gain = r->k_gain, f->y = r->y;
}

/* linear, GELU: the product leaves time for GELU in its epilogue. Fused, the product's input, its result and
   GELU's are in memory at once. Halves of layers cannot afford that: they leave GELU apart, but make the
   product by the same kernel, since its bits must be the same. */
static int mtt__fuse_linear_gelu(mtt__builder *b, mtt_op *op)
{
    const mtt_op_linear *l = MTT_OPERANDS_OF(linear, op);
    const mtt_op_activation *g = MTT_OPERANDS_OF(activation, &op[1]);
    int apart = mtt__by_halves(b->policy);
    mtt_op_linear_gelu *f = (mtt_op_linear_gelu *)mtt__fuse(b, op, MTT_OP_linear_gelu);
    f->x = l->x, f->weight = l->weight, f->bias = l->bias, f->pre = l->y;
    f->y = apart ? NULL : g->y;
    return !apart;
}

/* Takes the gradient of a bias from the linear_backward_weight that would sum dy, which the operation before
   `op` has made. Recomputation may come between, but nothing that changes dy. */
static mtt_tensor *mtt__take_bias(const mtt_op *op, const mtt_op *end, const mtt_tensor *dy)
{
    int k;
    for (; op < end; op++) {
        mtt_op_linear_backward_weight *w = (mtt_op_linear_backward_weight *)(void *)op->operands;
        if (op->kind == MTT_OP_linear_backward_weight && w->dy == dy && w->d_weight && w->d_bias) {
            mtt_tensor *d_bias = w->d_bias;
            w->d_bias = NULL;
            return d_bias;
        }
        for (k = op->inputs; k < op->inputs + op->outputs; k++)
            if (op->operands[k] == dy) return NULL;
    }
    return NULL;
}

/* Joins linear_backward_input and GELU's gradient, for the reason given at mtt__fuse_linear_gelu. The
   product's epilogue also sums the bias's gradient, unless that is the sum of rows of dx_t. */
static void mtt__fuse_linear_backward_gelu(mtt__builder *b, mtt_op *op, const mtt_op *end)
{
    const mtt_op_linear_backward_input *l = MTT_OPERANDS_OF(linear_backward_input, op);
    const mtt_op_activation_backward *g = MTT_OPERANDS_OF(activation_backward, &op[1]);
    mtt_op_linear_backward_gelu *f;
    f = (mtt_op_linear_backward_gelu *)mtt__fuse(b, op, MTT_OP_linear_backward_gelu);
    f->dy = l->dy, f->weight = l->weight, f->pre = g->x, f->dx = g->dx;
    f->dx_t = g->dx_t, f->y_t = g->y_t;
    f->d_bias = g->dx_t ? NULL : mtt__take_bias(op + 2, end, g->dx);
}

/* norm_backward also sums dx, which is the gradient of the linear layer before the residual, for the bias of
   that layer. In 8 bits linear_backward_weight sums dx_t. */
static void mtt__fuse_norm_bias(mtt_op *op, const mtt_op *end)
{
    mtt_op_norm_backward *n = (mtt_op_norm_backward *)(void *)op->operands;
    if (!n->dx_t && !n->y_t) n->d_bias = mtt__take_bias(op + 1, end, n->dx);
}

/* Joins neighbours that one kernel can do.
   - Products take GELU in 16 bits alone. In FP32 and in 8 bits a step is no faster for it. Backward, a GPU
     joins them in 8 bits, too; a CPU has no place for what lies between the two.
   - Norms sum a bias's gradient in 16 bits alone.
   - With gains of q and k the backward pass needs the product before its norm. So linear and rotary stay
     apart, in the forward pass as in recomputation: one kernel, the same bits. */
static int mtt__rule_fusions(mtt__builder *b, mtt_op *op, const mtt_op *end)
{
    int half = mtt__dtype(b) != MTT_F32, gelu = half && b->schedule->model.mlp == MTT_MLP_GELU;
    if (op == end) return 0;
    if (mtt__can_fuse(op, end, MTT_OP_residual, MTT_OP_norm)) mtt__fuse_residual_norm(b, op);
    else if (mtt__can_fuse(op, end, MTT_OP_linear, MTT_OP_rotary)) {
        if (b->trains && MTT_OPERANDS_OF(rotary, &op[1])->q_gain) return 0;
        mtt__fuse_linear_rotary(b, op);
    } else if (gelu && mtt__can_fuse(op, end, MTT_OP_linear, MTT_OP_activation)) {
        if (op->operands[0]->dtype != mtt__dtype(b) || !mtt__fuse_linear_gelu(b, op)) return 0;
    } else if (gelu && mtt__can_fuse(op, end, MTT_OP_linear_backward_input, MTT_OP_activation_backward)) {
        const mtt_op_activation_backward *a = MTT_OPERANDS_OF(activation_backward, &op[1]);
        if (a->dx_t && b->policy->device == MTT_DEVICE_CPU) return 0;
        mtt__fuse_linear_backward_gelu(b, op, end);
    } else {
        if (half && op->kind == MTT_OP_norm_backward) mtt__fuse_norm_bias(op, end);
        return 0;
    }
    mtt__append(b, op);
    return 2;
}

/* ---- gradients of layers ---- */

/* Entries of parameters `first` to `end` - 1 in the table of ranges; 0: all of them are frozen. */
static int mtt__ranges_of(const mtt__program *p, int first, int end)
{
    return (end < p->parameter_count ? p->parameters[end].first_range : p->range_count) -
           p->parameters[first].first_range;
}

/* Lets the last operation work on these lists of parameters `first` to `end` - 1 without the frozen ones.
   In the step, `gradients` are the sums, if there are any. */
enum { MTT__GRADIENTS = 1, MTT__SUMS = 2, MTT__WEIGHTS = 4 };
static void mtt__use_parameters(mtt__builder *b, int first, int end, int lists)
{
    mtt__program *p = b->program;
    int sums = b->phase == MTT_STEP && b->sums;
    size_t count = (size_t)(end - first), i = 0;
    mtt_tensor **list = (mtt_tensor **)mtt__take(b, 3 * count * sizeof(*list));
    mtt_part *parts = (mtt_part *)mtt__take(b, count * sizeof(*parts));
    const mtt__parameter *q;
    if (b->status) return;
    for (q = p->parameters + first; q < p->parameters + end; q++) {
        if (q->frozen) continue;
        list[i] = sums ? q->sum : q->gradient;
        list[count + i] = q->sum;
        list[2 * count + i] = q->weight;
        parts[i++] = q->part;
    }
    b->op->gradients = lists & MTT__GRADIENTS ? list : NULL;
    b->op->sums = lists & MTT__SUMS ? list + count : NULL;
    b->op->weights = lists & MTT__WEIGHTS ? list + 2 * count : NULL;
    b->op->parts = parts;
    b->op->parameters = (int)i;
    b->op->first_range = p->parameters[first].first_range;
    b->op->range_count = mtt__ranges_of(p, first, end);
}

/* The end of the parameters that are with parameter `first` in a layer, or before or after the layers. */
static int mtt__layer_end(const mtt__program *p, int first)
{
    const mtt__parameter *q = &p->parameters[first];
    int end = first;
    while (end < p->parameter_count && p->parameters[end].layer == q->layer &&
           mtt__parameter_row[p->parameters[end].kind].place == mtt__parameter_row[q->kind].place)
        end++;
    return end;
}

/* The sum of a parameter's gradients. NULL if there is none. */
static mtt_tensor *mtt__add_sum(mtt__builder *b, const mtt__parameter *q)
{
    if (!q->sum_shape[0]) return NULL;
    return mtt__add_tensor(b, MTT_F32, MTT_GRADIENTS, -1, "sum_", q->weight->name, q->sum_shape[0],
                           q->sum_shape[1], 0);
}

/* Adds the gradients of parameters `first` to `end` - 1 to the sums of the step. Each is complete before it
   is added, so the sums do not depend on how many operations make a gradient. `received`: gradients of other
   ranks; NULL: none. */
static void mtt__emit_sums(mtt__builder *b, int first, int end, mtt_tensor *received)
{
    mtt__program *p = b->program;
    MTT__EMIT(b, p->parameters[first].layer, 0, sum_gradients, p->ranges, received);
    mtt__use_parameters(b, first, end, MTT__GRADIENTS | MTT__SUMS);
}

/* Updates parameters `first` to `end` - 1, which are with each other in a layer, or all of them. */
static void mtt__emit_update(mtt__builder *b, int first, int end, int layer)
{
    mtt__program *p = b->program;
    MTT__EMIT(b, layer, MTT__SITE_ROUND, adamw, p->control, p->counters, p->ranges, p->optim[MTT__MASTER],
              p->optim[MTT__FIRST], p->optim[MTT__SECOND]);
    mtt__use_parameters(b, first, end, MTT__GRADIENTS | MTT__WEIGHTS);
}

/* After the backward pass through a layer, or through what comes before or after the layers. */
static void mtt__end_layer(mtt__builder *b, int place, int layer)
{
    mtt__parameter *q = b->program->parameters;
    int first = 0, count = b->program->parameter_count, early = b->policy->early_update, end, i;
    if ((!b->sums && !early) || b->status) return;
    while (first < count && (mtt__parameter_row[q[first].kind].place != place || q[first].layer != layer))
        first++;
    if (first == count) return; /* a tied head without a bias and without a norm before it */
    end = mtt__layer_end(b->program, first);
    if (!mtt__ranges_of(b->program, first, end)) return;
    if (early) {
        mtt__emit_update(b, first, end, layer);
        return;
    }
    for (i = first; i < end; i++)
        if (!q[i].sum && !q[i].frozen) q[i].sum = mtt__add_sum(b, &q[i]);
    mtt__emit_sums(b, first, end, NULL);
}

/* After the backward pass through a layer, its gradients are added to sums, or used at once. For early
   updates grad_norm stands before the backward pass, without gradients: it counts the step and fixes its
   rates. */
static int mtt__rule_gradients(mtt__builder *b, mtt_op *op, const mtt_op *end)
{
    mtt__program *p = b->program;
    int layers = p->shape.layers, at;
    if (op < end && op->phase == MTT_FORWARD) {
        if (op->kind != MTT_OP_sum_loss || !b->policy->early_update) return 0;
        mtt__append(b, op);
        MTT__EMIT(b, -1, 0, grad_norm, p->control, p->ranges, NULL, p->counters);
        return 1;
    }
    b->phase = MTT_BACKWARD;
    for (at = b->layer_before; at > b->layer; at--) /* each layer that the list has left */
        if (at == layers) mtt__end_layer(b, MTT__AFTER, -1);
        else mtt__end_layer(b, at < 0 ? MTT__BEFORE : MTT__LAYER, at);
    return 0;
}

/* ---- the step ---- */

/* The gradient's norm over all parameters, then the update. */
static void mtt__emit_step(mtt__builder *b)
{
    mtt__program *p = b->program;
    b->phase = MTT_STEP;
    MTT__EMIT(b, -1, 0, grad_norm, p->control, p->ranges, NULL, p->counters);
    mtt__use_parameters(b, 0, p->parameter_count, MTT__GRADIENTS);
    mtt__emit_update(b, 0, p->parameter_count, -1);
}

/* ---- lives of tensors ---- */

/* Notes that an operation uses a tensor: the first use gives it its place in the table. */
static void mtt__use(mtt__program *p, mtt_tensor *t, int op)
{
    if (!t || t->persistent) return;
    if (t->first < 0) t->first = op, t->index = p->tensor_count, p->tensors[p->tensor_count++] = t;
    t->last = op;
}

/* Sizes the workspace, finds out when each tensor lives, and copies the forward and backward pass for later
   micro-batches, which add to the sums of gradients and losses that the first begins. The table of tensors is
   made again: what lives from step to step, in the order of creation, then the others by first use. A tensor
   that no operation uses any more is left out. */
static void mtt__close_program(mtt__builder *b)
{
    const mtt__program *first = b->schedule->programs;
    mtt__program *p = b->program;
    size_t scratch = b->policy->workspace_bytes;
    int count = p->tensor_count, i, k;
    for (i = p->tensor_count = 0; i < count; i++) {
        mtt_tensor *t = p->tensors[i];
        if (!t->persistent) continue;
        t->first = 0, t->last = p->op_count - 1;
        t->index = p->tensor_count;
        p->tensors[p->tensor_count++] = t;
    }
    for (p->step_begin = 0; p->step_begin < p->op_count; p->step_begin++)
        if (p->ops[p->step_begin].phase == MTT_STEP) break;
    for (i = 0; i < p->op_count; i++) {
        mtt_op *op = &p->ops[i];
        op->shape = &p->shape;
        op->workspace = p->workspace;
        for (k = 0; k < op->inputs + op->outputs; k++) mtt__use(p, op->operands[k], i);
        for (k = 0; k < op->parameters && op->gradients; k++) mtt__use(p, op->gradients[k], i);
        for (k = 0; k < op->parameters && op->sums; k++) mtt__use(p, op->sums[k], i);
        if (p->workspace && mtt__op_scratch(op) > scratch) scratch = mtt__op_scratch(op);
    }
    if (p->workspace) {
        p->workspace->bytes = p == first ? scratch : first->workspace->bytes;
        p->workspace->shape[0] = (int64_t)p->workspace->bytes;
    }
    if (b->policy->accumulate == 1) return;
    p->later_ops = (mtt_op *)mtt__take(b, (size_t)p->step_begin * sizeof(mtt_op));
    for (i = 0; i < p->step_begin && !b->status; i++) {
        p->later_ops[i] = p->ops[i];
        p->later_ops[i].later = 1;
    }
}

/* ---- state ---- */

static void mtt__add_parameter(mtt__builder *b, int kind, int layer)
{
    mtt__program *p = b->program;
    mtt__parameter *q = &p->parameters[p->parameter_count];
    int64_t stored[2];
    int fate = MTT__TRAINED;
    char name[40];
    if (!mtt__parameter_shape(&b->schedule->model, b->policy, kind, p->shape.vocab, q->shape)) return;
    mtt__parameter_shape(&b->schedule->model, b->policy, kind, p->shape.vocab_padded, stored);
    mtt__format(name, sizeof(name), mtt__parameter_row[kind].name, layer);
    MTT__EACH_WING(parameter, (b->policy, kind, name, &fate));
    if (fate == MTT__LEFT_OUT) return;
    q->kind = kind;
    q->layer = layer;
    q->weight = mtt__add_state(b, mtt__dtype(b), MTT_WEIGHTS, name, stored[0], stored[1]);
    q->weight->transposed = kind == MTT__WTE || kind == MTT__HEAD_WEIGHT;
    q->frozen = fate == MTT__FROZEN || mtt__matches(b->policy->freeze, name);
    q->first_range = p->range_count;
    if (!q->frozen) p->range_count += (int)mtt__ceil_div(mtt__elements(q->weight), MTT__RANGE);
    q->part.elements = q->part.end = q->part.count = q->frozen ? 0 : mtt__elements(q->weight);
    q->part.first = p->optim_elements;
    p->optim_elements += mtt__round_up(q->part.count, MTT__PART);
    memcpy(q->sum_shape, q->weight->shape, sizeof(q->sum_shape));
    q->part.group = q->weight->dims == 1; /* a trainer may have others */
    q->part.number = q->weight->parameter = p->parameter_count++;
    b->parameters[mtt__slot(b, kind, layer)] = q;
}

/* 1 = a pattern names a parameter. */
typedef int mtt__pattern_fits(const mtt__parameter *q, const char *pattern);
static int mtt__is_named(const mtt__parameter *q, const char *pattern)
{
    return mtt__matches(pattern, q->weight->name);
}

/* Refuses the first pattern of a list that fits no parameter; `none` says which names there are. */
static void mtt__check_patterns(mtt__builder *b, const char *list, const char *field, mtt__pattern_fits *fits,
                                const char *none)
{
    const mtt__program *p = b->program;
    const char *at;
    char one[100];
    int i;
    for (at = list; at && !b->status; at += *at == ',') {
        at += strspn(at, " ");
        mtt__format(one, sizeof(one), "%.*s", (int)strcspn(at, ", "), at);
        for (i = 0; i < p->parameter_count && !fits(&p->parameters[i], one);) i++;
        if (i == p->parameter_count)
            b->status = mtt__fail(b->env, MTT_E_ARGUMENT, "%s is %.200s: %s named \"%s\"", field, list, none,
                                  one);
        at += strcspn(at, ", ");
        at += strspn(at, " ");
        if (!*at) return;
    }
}

/* Compact moments are the codes of all groups, then the scales of all. */
static mtt_tensor *mtt__add_optim_tensor(mtt__builder *b, const char *name, int64_t elements, int compact,
                                        int kind)
{
    if (compact && kind != MTT__MASTER)
        return mtt__add_state(b, MTT_U8, MTT_OPTIMIZER, name, elements / MTT__GROUP, MTT__GROUP + 2);
    return mtt__add_state(b, compact ? MTT_U8 : MTT_F32, MTT_OPTIMIZER, name, elements, 0);
}

/* The tensors that the optimizer keeps, and on a device the table that its kernels work through. */
static void mtt__add_optim(mtt__builder *b)
{
    mtt__program *p = b->program;
    int64_t elements = p->optim_elements;
    mtt_dtype dtype = mtt__dtype(b);
    int compact = b->policy->state == MTT_STATE_COMPACT, i;
#define MTT__ADD_OPTIM(kind, name, prefix, exists)                                      \
    if (exists) p->optim[MTT__##kind] = mtt__add_optim_tensor(b, name, elements, compact, MTT__##kind);
    MTT__OPTIM(MTT__ADD_OPTIM)
    if (b->policy->device == MTT_DEVICE_CUDA)
        p->ranges = mtt__add_state(b, MTT_U8, MTT_DATA, "ranges", p->range_count * (int64_t)sizeof(mtt_range),
                                   0);
    if (b->policy->accumulate == 1 && !b->policy->keep_gradients) return;
    for (i = 0; i < p->parameter_count && !b->status; i++) {
        mtt__parameter *q = &p->parameters[i];
        mtt_tensor *kept = q->frozen ? NULL
                           : b->sums ? (q->sum = mtt__add_sum(b, q))
                                     : mtt__parameter_gradient(b, q->weight);
        if (kept) kept->persistent = 1;
    }
}

/* Everything that lives from step to step, in one order for all programs. The workspace comes last: its size
   is known when the operations are. */
static void mtt__add_all_state(mtt__builder *b)
{
    const mtt_shape *first = &b->schedule->programs[0].shape;
    mtt__program *p = b->program;
    mtt_dtype dtype = mtt__dtype(b);
    int place, layer, kind, frozen = 0, added = 0;
    for (place = MTT__BEFORE; place <= MTT__AFTER; place++)
        for (layer = 0; layer < (place == MTT__LAYER ? p->shape.layers : 1); layer++)
            for (kind = 0; kind < MTT__PARAMETER_KINDS && !b->status; kind++)
                if (mtt__parameter_row[kind].place == place)
                    mtt__add_parameter(b, kind, place == MTT__LAYER ? layer : -1);
    if (b->status) return;
    for (kind = 0; kind < p->parameter_count; kind++) {
        frozen += p->parameters[kind].frozen;
        added += mtt__is_added(p->parameters[kind].kind);
    }
    MTT__EACH_WING(parameters, (b));
    mtt__check_patterns(b, b->policy->freeze, "freeze", mtt__is_named,
                        "no parameter, as h.0.attn.c_attn.weight, is");
    if (!b->status && frozen == p->parameter_count)
        b->status = mtt__fail(b->env, MTT_E_ARGUMENT, "freeze is %.200s, which names every %s: leave some",
                              b->policy->freeze, added ? "adapter" : "parameter");
    if (b->status) return;
    if (!b->schedule->chunk) mtt__add_optim(b);
    p->positions = mtt__weight(b, MTT__WPE, -1);
    if (b->schedule->model.positions == MTT_POSITIONS_SINUSOIDAL)
        p->positions = mtt__add_state(b, dtype, MTT_DATA, "positions", b->schedule->seq_len,
                                      p->shape.d_model);
    if (b->schedule->model.positions == MTT_POSITIONS_ROTARY)
        p->angles = mtt__add_state(b, MTT_F32, MTT_DATA, "angles", b->schedule->seq_len, p->shape.d_head);
    p->tokens = mtt__add_state(b, MTT_I32, MTT_DATA, "tokens", first->rows, 0);
    MTT__EACH_WING(state, (b)); /* that of generation beside the tokens: a pass uploads all in one copy */
    p->control = mtt__add_state(b, MTT_U8, MTT_DATA, "control", (int64_t)sizeof(mtt_control), 0);
    if (!b->schedule->chunk) {
        p->targets = mtt__add_state(b, MTT_I32, MTT_DATA, "targets", first->rows, 0);
        p->counters = mtt__add_state(b, MTT_U8, MTT_DATA, "counters", (int64_t)sizeof(mtt_counters), 0);
    }
    if (b->policy->device == MTT_DEVICE_CUDA)
        p->workspace = mtt__add_state(b, MTT_U8, MTT_WORKSPACE, "workspace", 0, 0);
}

/* ---- programs ---- */

static void mtt__set_shape(mtt_shape *d, const mtt_schedule *s, int batch, int seq_len)
{
    const mtt_model_desc *m = &s->model;
    d->batch = batch;
    d->seq_len = seq_len;
    d->layers = m->layers;
    d->d_model = m->d_model;
    d->heads = m->heads;
    d->heads_kv = m->heads_kv;
    d->d_head = m->d_head;
    d->rotary_interleaved = m->rotary_interleaved;
    d->d_ff = m->d_ff;
    d->d_fc = mtt__fc_width(m);
    d->norm = m->norm;
    d->norm_eps = m->norm_eps;
    d->mlp = m->mlp;
    d->vocab = m->vocab;
    d->vocab_padded = (int)mtt__round_up(m->vocab, 128);
    d->window = s->policy.window;
    d->rows = (int64_t)batch * seq_len;
    d->dropout = m->dropout;
    d->ranks = s->policy.ranks, d->rank = s->policy.rank;
}

/* Writes a program by the first `passes` of the passes. */
static mtt_status mtt__build_program(mtt_schedule *s, int which, int passes)
{
    mtt__program *p = &s->programs[which];
    size_t layers = (size_t)s->model.layers + 1, kinds = MTT__PARAMETER_KINDS * layers;
    size_t roles = MTT__ROLES * layers;
    mtt__builder b;
    int i;
    memset(&b, 0, sizeof(b));
    b.env = s->env;
    b.schedule = s;
    b.policy = &s->policy;
    b.program = p;
    b.trains = which == MTT__TRAIN && !s->chunk;
    b.sums = s->policy.accumulate > 1 || s->policy.ranks > 1;
    if (s->chunk) mtt__set_shape(&p->shape, s, 1, which == MTT__CHUNK ? s->chunk : s->batch);
    else mtt__set_shape(&p->shape, s, which == MTT__NEXT ? 1 : s->batch, s->seq_len);
    if (!b.trains) p->shape.dropout = 0;
    b.one_row = which == (s->chunk ? (int)MTT__CHUNK : (int)MTT__NEXT);
    b.logits = s->chunk || which == MTT__NEXT;
    b.head_rows = s->chunk ? s->batch : which == MTT__NEXT ? 1 : p->shape.rows;
    p->parameters = (mtt__parameter *)mtt__take(&b, kinds * sizeof(*p->parameters));
    b.parameters = (mtt__parameter **)mtt__pool_take(s->env, &b.pool, kinds * sizeof(*b.parameters));
    b.activations = (mtt__activation *)mtt__pool_take(s->env, &b.pool, roles * sizeof(*b.activations));
    if (!b.parameters || !b.activations) b.status = MTT_E_MEMORY;
    if (!b.status) mtt__add_all_state(&b);
    for (i = 0; i < passes && !b.status; i++) {
        if (!mtt__passes[i].applies(&b)) continue;
        if (mtt__passes[i].write) mtt__passes[i].write(&b);
        if (mtt__passes[i].rule && !b.status) mtt__rewrite(&b, mtt__passes[i].rule);
    }
    if (!b.status) mtt__close_program(&b);
    mtt__pool_free(s->env, &b.pool);
    return b.status;
}

/* -----------------------------------------------------------------------------------------------------------
   >>plan
   -------------------------------------------------------------------------------------------------------- */

/* Memory and time of a schedule, by arithmetic: bytes alive at each operation, places in the arena, FLOPs and
   traffic of each operation, and the search for the recomputation that fits a budget. */

enum { MTT__ALIGN = 256 }; /* of every tensor in the arena, as cudaMalloc aligns */

static size_t mtt__slot_bytes(const mtt_tensor *t)
{
    return mtt__add(t->bytes, MTT__ALIGN - 1) / MTT__ALIGN * MTT__ALIGN;
}

/* ---- packing ---- */

/* A tensor that waits for its place. They are in the order of first use. */
typedef struct mtt__waiting {
    size_t bytes, offset, best; /* of its slot; offsets in this try and in the best one */
    int first, last;            /* operations between which it lives */
    int leaf;                   /* its leaf in the tree */
} mtt__waiting;

/* A node of a k-d tree over the waiting tensors, by their first and last operation: the bounds of both, and
   the least turn that still waits, INT_MAX if none does. */
typedef struct mtt__box {
    int first_low, first_high, last_low, last_high, turn;
} mtt__box;

enum { MTT__RULES = 3 };

/* Places tensors into the arena. The operations are a line, a tensor an interval of it. At a level (an
   offset) the operations whose tensors all end there or below are free. They form free intervals. */
typedef struct mtt__packer {
    mtt_env *env;
    mtt__waiting *waiting;
    mtt__box *boxes;        /* of the tree: root 1, children of k 2k and 2k + 1, leaves from `half` on */
    int *leaves;            /* the tensor of each leaf */
    int *order[MTT__RULES]; /* for each rule the tensors by turn; the least turn goes first */
    int *free_end;          /* at the first operation of a free interval its last one; elsewhere -1 */
    int *free_begin;        /* and the reverse */
    mtt__heap placed;       /* tensors by their ends: at that level the interval is free again */
    size_t level, arena;
    int count, half, ops;
    mtt_status status;
} mtt__packer;

static int mtt__coordinate(const mtt__packer *p, int leaf, int axis)
{
    const mtt__waiting *w = &p->waiting[p->leaves[leaf]];
    return axis ? w->last : w->first;
}

/* Hoare's selection: of leaves [low, high), those that belong before `middle` along an axis go there. */
static void mtt__select(mtt__packer *p, int low, int middle, int high, int axis)
{
    while (high - low > 1) {
        int pivot = mtt__coordinate(p, low + (high - low) / 2, axis), i = low, j = high - 1;
        while (i <= j) {
            while (mtt__coordinate(p, i, axis) < pivot) i++;
            while (mtt__coordinate(p, j, axis) > pivot) j--;
            if (i <= j) {
                int swap = p->leaves[i];
                p->leaves[i++] = p->leaves[j];
                p->leaves[j--] = swap;
            }
        }
        if (middle <= j) high = j + 1;
        else if (middle >= i) low = i;
        else return;
    }
}

/* Builds the tree: halves the tensors by first and by last operation in turn. */
static void mtt__tree_build(mtt__packer *p)
{
    const mtt__box none = {INT_MAX, -1, INT_MAX, -1, INT_MAX};
    int span, low, axis = 0, i;
    for (i = 0; i < p->count; i++) p->leaves[i] = i;
    for (span = p->half; span > 1; span /= 2, axis = !axis)
        for (low = 0; low + span / 2 < p->count; low += span)
            mtt__select(p, low, low + span / 2, (int)mtt__min(low + span, p->count), axis);
    for (i = 2 * p->half; --i;) {
        mtt__box *box = &p->boxes[i];
        *box = none;
        if (i < p->half) {
            const mtt__box *a = &p->boxes[2 * i], *b = a + 1;
            box->first_low = a->first_low < b->first_low ? a->first_low : b->first_low;
            box->first_high = a->first_high > b->first_high ? a->first_high : b->first_high;
            box->last_low = a->last_low < b->last_low ? a->last_low : b->last_low;
            box->last_high = a->last_high > b->last_high ? a->last_high : b->last_high;
        } else if (i - p->half < p->count) {
            mtt__waiting *w = &p->waiting[p->leaves[i - p->half]];
            box->first_low = box->first_high = w->first;
            box->last_low = box->last_high = w->last;
            w->leaf = i;
        }
    }
}

/* Updates the turn of an inner node from its children. Returns 1 if it has changed. */
static int mtt__tree_turn(mtt__packer *p, int node)
{
    int a = p->boxes[2 * node].turn, b = p->boxes[2 * node + 1].turn, least = a < b ? a : b;
    int changed = p->boxes[node].turn != least;
    p->boxes[node].turn = least;
    return changed;
}

/* Returns the least turn, below `best`, of the tensors that live within operations x to y. */
static int mtt__tree_first(const mtt__packer *p, int node, int x, int y, int best)
{
    const mtt__box *box = &p->boxes[node];
    if (box->turn >= best || box->first_high < x || box->last_low > y) return best;
    if (box->first_low >= x && box->last_high <= y) return box->turn;
    best = mtt__tree_first(p, 2 * node, x, y, best);
    return mtt__tree_first(p, 2 * node + 1, x, y, best);
}

static void mtt__place_tensor(mtt__packer *p, mtt__waiting *w)
{
    size_t end = mtt__add(p->level, w->bytes);
    int node = w->leaf;
    w->offset = p->level;
    if (end > p->arena) p->arena = end;
    p->boxes[node].turn = INT_MAX;
    while ((node /= 2) && mtt__tree_turn(p, node)) {}
    p->status = mtt__heap_push(p->env, &p->placed, end, (uint64_t)w->first << 32 | (uint32_t)w->last);
}

/* Places, at this level, the tensors of a free interval, in the order of their turns; then no other fits
   there. The smaller rest of the interval recurs, so the depth is a logarithm. */
static void mtt__fill(mtt__packer *p, const int *order, int x, int y)
{
    while (x <= y && !p->status) {
        int turn = mtt__tree_first(p, 1, x, y, INT_MAX);
        mtt__waiting *w;
        if (turn == INT_MAX) {
            p->free_end[x] = y;
            p->free_begin[y] = x;
            return;
        }
        w = &p->waiting[order[turn]];
        mtt__place_tensor(p, w);
        if (w->first - x < y - w->last) {
            mtt__fill(p, order, x, w->first - 1);
            x = w->last + 1;
        } else {
            mtt__fill(p, order, w->last + 1, y);
            y = w->first - 1;
        }
    }
}

/* Frees the intervals of all tensors that end lowest, joins them with free neighbours, and fills them. */
static void mtt__raise_level(mtt__packer *p, const int *order)
{
    mtt__ranked next;
    int x = -1, y = -2; /* the interval in hand; none yet */
    mtt__heap_pop(&p->placed, &next);
    for (p->level = (size_t)next.key;;) {
        int first = (int)(next.tie >> 32), last = (int)(uint32_t)next.tie;
        if (first != y + 1) {
            if (x >= 0) mtt__fill(p, order, x, y);
            x = first > 0 && p->free_begin[first - 1] >= 0 ? p->free_begin[first - 1] : first;
            p->free_end[x] = -1;
            if (first > 0) p->free_begin[first - 1] = -1;
        }
        y = last + 1 < p->ops && p->free_end[last + 1] >= 0 ? p->free_end[last + 1] : last;
        p->free_begin[y] = -1;
        if (last + 1 < p->ops) p->free_end[last + 1] = -1;
        if (!p->placed.count || p->placed.at[0].key != p->level || !mtt__heap_pop(&p->placed, &next)) break;
    }
    mtt__fill(p, order, x, y);
}

/* Fills the arena from below. Of the tensors that can go lowest, above all placed ones that live with them,
   the first in order goes first. */
static void mtt__place_all(mtt__packer *p, const int *order, size_t state)
{
    int i;
    for (i = 0; i < p->count; i++) p->boxes[p->waiting[order[i]].leaf].turn = i;
    for (i = p->half; --i;) mtt__tree_turn(p, i);
    for (i = 0; i < p->ops; i++) p->free_end[i] = p->free_begin[i] = -1;
    p->level = p->arena = state;
    p->placed.count = 0;
    mtt__fill(p, order, 0, p->ops - 1);
    while (p->placed.count && !p->status) mtt__raise_level(p, order);
}

/* Orders the tensors by a rule: most bytes times life (after Sekiyama et al. 2018), made first, last used
   last. Equals go in the order of first use. Positive doubles are in the order of their bits. */
static void mtt__order_by_rule(mtt__packer *p, int rule)
{
    mtt__ranked top;
    int i;
    for (i = 0; i < p->count && !p->status; i++) {
        const mtt__waiting *w = &p->waiting[i];
        double area = (double)w->bytes * ((double)w->last - w->first + 1);
        uint64_t key = (uint64_t)(rule == 1 ? w->first : w->last);
        if (rule == 0) memcpy(&key, &area, sizeof(key));
        p->status = mtt__heap_push(p->env, &p->placed, rule == 1 ? key : ~key, (uint64_t)i);
    }
    for (i = 0; mtt__heap_pop(&p->placed, &top); i++) p->order[rule][i] = (int)top.tie;
}

/* Moves the tensors that end highest to the front, for the next try. */
static void mtt__promote(mtt__packer *p, int *order)
{
    mtt__ranked top;
    int from = p->count, to = p->count;
    while (from--) {
        const mtt__waiting *w = &p->waiting[order[from]];
        if (w->offset + w->bytes < p->arena) order[--to] = order[from];
        else if (!p->status) p->status = mtt__heap_push(p->env, &p->placed, (uint64_t)order[from], 0);
    }
    for (from = 0; mtt__heap_pop(&p->placed, &top);) order[from++] = (int)top.key;
}

/* Tries the three rules in turn until no gap is left, 15 times each, with the tensors in front that ended
   highest in the rule's last try. Of 25,068 programs of random small models 363 keep gaps, 434 after nine
   tries each; of four known models under all policies none has more than 0.9 % of the peak, 1.2 after nine. A
   plan of more than 5,000 tensors (100 layers) gets fewer tries: 6 with 1,024 layers, in 0.15 s instead of
   0.7. Of three such plans one takes 16 KiB more. */
static void mtt__pack_tensors(mtt__packer *p, size_t *arena_bytes, size_t state, size_t peak)
{
    int tries = (int)mtt__min(15 * MTT__RULES, MTT__RULES + 240000 / p->count), i, k;
    mtt__tree_build(p);
    *arena_bytes = SIZE_MAX;
    for (i = 0; i < tries && *arena_bytes > peak; i++) {
        int rule = i % MTT__RULES;
        if (i == rule) mtt__order_by_rule(p, rule);
        if (!p->status) mtt__place_all(p, p->order[rule], state);
        if (!p->status) mtt__promote(p, p->order[rule]);
        if (p->status) return;
        if (p->arena >= *arena_bytes) continue;
        *arena_bytes = p->arena;
        for (k = 0; k < p->count; k++) p->waiting[k].best = p->waiting[k].offset;
    }
}

/* Packs the arena of a place. State comes first, in order. A plan whose peak exceeds `limit` is not packed,
   because packing is most of a plan's time; the arena's bytes are then the peak. */
static mtt_status mtt__pack(mtt_env *env, mtt__program *program, mtt_place place, size_t limit)
{
    size_t state = 0, peak = 0, n = (size_t)program->tensor_count, ops = (size_t)program->op_count;
    size_t *arena_bytes = place == MTT_CARD ? &program->arena_bytes : &program->host_bytes;
    mtt__pool pool = {NULL};
    mtt__packer p;
    int *ints, i;
    for (i = 0; i < program->op_count; i++) {
        size_t live = place == MTT_CARD ? program->ops[i].live_bytes : program->ops[i].host_bytes;
        if (live > peak) peak = live;
    }
    *arena_bytes = peak;
    if (!peak || peak > limit) return MTT_OK;
    memset(&p, 0, sizeof(p));
    p.env = env;
    p.ops = program->op_count;
    for (p.half = 1; (size_t)p.half < n;) p.half *= 2;
    p.waiting = (mtt__waiting *)mtt__pool_take(env, &pool, n * sizeof(*p.waiting));
    p.boxes = (mtt__box *)mtt__pool_take(env, &pool, 2 * (size_t)p.half * sizeof(*p.boxes));
    ints = (int *)mtt__pool_take(env, &pool, ((1 + MTT__RULES) * n + 2 * ops) * sizeof(int));
    if (!p.waiting || !p.boxes || !ints) p.status = MTT_E_MEMORY;
    for (i = 0; i < program->tensor_count && !p.status; i++) {
        mtt_tensor *t = program->tensors[i];
        if (t->place != place) continue;
        t->offset = state;
        if (t->persistent) {
            state = mtt__add(state, mtt__slot_bytes(t));
            continue;
        }
        p.waiting[p.count].bytes = mtt__slot_bytes(t);
        p.waiting[p.count].first = t->first;
        p.waiting[p.count++].last = t->last;
    }
    if (!p.status && p.count) {
        p.leaves = ints;
        for (i = 0; i < MTT__RULES; i++) p.order[i] = ints + (size_t)(1 + i) * n;
        p.free_end = ints + (1 + MTT__RULES) * n;
        p.free_begin = p.free_end + ops;
        mtt__pack_tensors(&p, arena_bytes, state, peak);
    }
    for (i = p.count = 0; i < program->tensor_count && !p.status; i++)
        if (program->tensors[i]->place == place && !program->tensors[i]->persistent)
            program->tensors[i]->offset = p.waiting[p.count++].best;
    mtt__pool_free(env, &pool);
    mtt__free(env, p.placed.at);
    return p.status;
}

/* ---- costs ---- */

/* Elements as a number that cannot overflow, however large the tensor. */
static double mtt__count(const mtt_tensor *t)
{
    double product = 1;
    int i;
    for (i = 0; i < t->dims; i++) product *= (double)t->shape[i];
    return product;
}

static double mtt__columns(const mtt_tensor *t)
{
    return (double)mtt__width(t);
}

static double mtt__tensor_traffic(const mtt_tensor *t, int written, int copies)
{
    int twice = t->category == MTT_OPTIMIZER ||
                (written && t->category == MTT_WEIGHTS && t->persistent && !copies);
    return t->place == MTT_CARD ? (double)t->bytes * (1 + twice) : 0;
}

/* Bytes of the operands: once where an operation reads or writes them, twice where it does both. AdamW does
   so with all its state, but only writes 16-bit copies of FP32 masters. What adds to sums also reads them. */
static double mtt__op_bytes(const mtt_op *op)
{
    const mtt_tensor *master = op->kind == MTT_OP_adamw ? MTT_OPERANDS_OF(adamw, op)->master : NULL;
    int copies = master && master->dtype == MTT_F32, i;
    double bytes = 0;
    for (i = 0; i < op->inputs + op->outputs; i++)
        if (op->operands[i]) bytes += mtt__tensor_traffic(op->operands[i], i >= op->inputs, copies);
    for (i = 0; i < op->parameters; i++) {
        if (op->gradients && op->gradients[i]) bytes += mtt__tensor_traffic(op->gradients[i], 0, copies);
        if (op->sums && op->sums[i]) bytes += (double)op->sums[i]->bytes * (1 + op->sums[i]->persistent);
        if (op->weights) bytes += mtt__tensor_traffic(op->weights[i], 1, copies);
    }
    return bytes;
}

/* A chunked loss reads the head's weights once a chunk, with gradients for two products, and its gradients
   are added to by each chunk but the first. It passes the logits of all chunks five times, without gradients
   twice: made, turned into gradients in place, read by two products. Under FP8 it passes them three times,
   and gradients of half their size, in both orders, twice. */
static double mtt__chunked_bytes(const mtt_op *op)
{
    const mtt_op_chunked_loss *o = MTT_OPERANDS_OF(chunked_loss, op);
    double share = (double)op->shape->rows / (double)o->logits->shape[0], chunks = ceil(share);
    double bytes = mtt__op_bytes(op);
    double reads = o->dx && !o->weight_t ? 2 * chunks - 1 : chunks - 1;
    double passes = o->d_logits ? 3 : o->dx ? 5 : 2;
    bytes += (passes * share - 1) * (double)o->logits->bytes + reads * (double)o->weight->bytes;
    if (o->d_logits) bytes += 2 * (2 * share - 1) * (double)o->d_logits->bytes;
    if (o->weight_t) bytes += reads * (double)o->weight_t->bytes;
    if (o->bias) bytes += reads * (double)o->bias->bytes;
    if (o->d_weight) bytes += 2 * (chunks - 1) * (double)o->d_weight->bytes;
    if (o->d_bias) bytes += 2 * (chunks - 1) * (double)o->d_bias->bytes;
    return bytes;
}

/* Pairs of a query and a key that it attends: T(T+1)/2 a head, or what the window leaves of it. */
static double mtt__attention_pairs(const mtt_shape *d)
{
    double seq = d->seq_len, window = d->window ? d->window : d->seq_len;
    return (double)d->batch * d->heads * (window * (window + 1) / 2 + (seq - window) * window);
}

/* What >>exchange adds to a plan. */
typedef double mtt__op_function(const mtt_op *op);
typedef void mtt__report_function(const mtt_schedule *s, mtt_plan_report *r);
typedef void mtt__print_function(mtt__text *text, const mtt_plan_report *r);
typedef mtt_status mtt__policy_function(mtt_env *env, const mtt_model_desc *m, int seq_len, mtt_policy *p);
MTT_IF_RANKS(static mtt__op_function mtt__wire_bytes; static mtt__policy_function mtt__take_fullest;)
MTT_IF_RANKS(static mtt__report_function mtt__report_wires; static mtt__print_function mtt__print_wires;)

/* Evaluates an operation's row: FLOPs and bytes moved. */
static void mtt__op_cost(const mtt_op *op, double *flops, double *traffic)
{
    const mtt_shape *d = op->shape;
    double moved = mtt__op_bytes(op), parameters = 0;
    int i;
    for (i = 0; i < op->parameters && op->gradients; i++)
        if (op->gradients[i]) parameters += mtt__count(op->gradients[i]);
#define MTT__OP_COST(name, inputs, operands_, flops_of, traffic_of, scratch)            \
    case MTT_OP_##name: {                                                               \
        const mtt_op_##name *o = MTT_OPERANDS_OF(name, op);                                \
        (void)o;                                                                        \
        *flops = flops_of;                                                              \
        *traffic = traffic_of;                                                          \
        break;                                                                          \
    }
    switch (op->kind) {
        MTT_OPS(MTT__OP_COST)
    case MTT_OP_KIND_COUNT: break;
    }
}

/* ---- the cost of a plan ---- */

/* Seconds of a batch and the step, to compare policies by: an operation takes as long as its arithmetic or
   its traffic, whichever is longer (the roofline, Williams et al. 2009), and 4 us to begin and end. An H200
   moves 4.2 TB/s (measured); a CPU's 250 GFLOP/s and 10 GB/s are estimates. */
static double mtt__plan_cost(const mtt_schedule *s)
{
    const mtt__program *p = &s->programs[MTT__TRAIN];
    int cuda = s->policy.device == MTT_DEVICE_CUDA, i;
    double rate = cuda ? mtt__precisions[s->policy.precision].rate : 250e9;
    double cost = 0;
    for (i = 0; i < p->op_count; i++) {
        double flops = p->ops[i].flops / rate, traffic = p->ops[i].traffic_bytes / (cuda ? 4.2e12 : 10e9);
        cost += (4e-6 + (flops > traffic ? flops : traffic)) * (p->ops[i].phase == MTT_STEP ? 1 : s->split);
    }
    return cost;
}

/* ---- memory during each operation ---- */

static size_t *mtt__alive(mtt_op *op, const mtt_tensor *t)
{
    return t->place == MTT_CARD ? &op->bytes[t->category] : &op->host_bytes;
}

/* Lists what each operation costs, and the bytes alive during it, by category: changes at the first and after
   the last operation of each tensor, then running sums. The peak is the largest of `live_bytes`; mtt__pack
   then gives each tensor its offset, so an arena is as large as the peak, or has gaps of about 1 % at most.
   Refuses what size_t cannot hold. */
static mtt_status mtt__measure(mtt_env *env, mtt__program *p)
{
    size_t all = 0, now[MTT_CATEGORY_COUNT] = {0}, host = 0;
    int i, c;
    for (i = 0; i < p->tensor_count; i++) {
        const mtt_tensor *t = p->tensors[i];
        all = mtt__add(all, mtt__slot_bytes(t));
        *mtt__alive(&p->ops[t->first], t) += mtt__slot_bytes(t);
        if (t->last + 1 < p->op_count) *mtt__alive(&p->ops[t->last + 1], t) -= mtt__slot_bytes(t);
    }
    if (all > SIZE_MAX / 2)
        return mtt__fail(env, MTT_E_BUDGET,
                         "the tensors of this plan take more than %zu bytes, the most that can "
                         "be addressed: lower the batch, seq_len or the model",
                         SIZE_MAX / 2);
    for (i = 0; i < p->op_count; i++) {
        mtt_op *op = &p->ops[i];
        mtt__op_cost(op, &op->flops, &op->traffic_bytes);
        for (c = 0; c < MTT_CATEGORY_COUNT; c++) {
            op->bytes[c] = now[c] += op->bytes[c]; /* a decrease wraps around, and back with the sum */
            op->live_bytes += now[c];
        }
        op->host_bytes = host += op->host_bytes;
    }
    return MTT_OK;
}

/* ---- schedules ---- */

static void mtt__release_program(mtt_schedule *s, int which)
{
    mtt__program *p = &s->programs[which];
    mtt__free(s->env, p->tensors);
    mtt__free(s->env, p->ops);
    mtt__pool_free(s->env, &p->pool);
    memset(p, 0, sizeof(*p));
}

static void mtt__release_programs(mtt_schedule *s)
{
    int i;
    for (i = 0; i < MTT__PROGRAMS; i++) mtt__release_program(s, i);
}

static size_t mtt__place_bytes(const mtt_schedule *s, mtt_place place)
{
    size_t most = 0;
    int i;
    for (i = 0; i < MTT__PROGRAMS; i++) {
        size_t bytes = place == MTT_CARD ? s->programs[i].arena_bytes : s->programs[i].host_bytes;
        if (bytes > most) most = bytes;
    }
    return most;
}

static size_t mtt__arena_bytes(const mtt_schedule *s)
{
    return mtt__place_bytes(s, MTT_CARD);
}

/* Builds the programs, with so many layers recomputed whole and in part. Only the training step depends on
   these: the others stay once they are built. Ends at the first program above `limit` bytes. `least` is the
   smallest arena of what was built to the end. */
static mtt_status mtt__build(mtt_schedule *s, int whole, int partial, size_t limit)
{
    int count = s->chunk ? MTT__TOKEN + 1 : MTT__PROGRAMS, i;
    mtt__release_program(s, MTT__TRAIN);
    s->recompute_layers = whole;
    s->recompute_selective = partial;
    for (i = 0; i < count; i++) {
        mtt_status status = MTT_OK;
        if (i == MTT__TRAIN || !s->programs[i].op_count) {
            status = mtt__build_program(s, i, MTT__PASSES);
            if (!status) status = mtt__measure(s->env, &s->programs[i]);
            if (!status)
                status = mtt__pack(s->env, &s->programs[i], MTT_CARD, i == MTT__TRAIN ? limit : SIZE_MAX);
            if (!status) status = mtt__pack(s->env, &s->programs[i], MTT_HOST, SIZE_MAX);
        }
        if (status || s->programs[i].arena_bytes > limit) return status;
    }
    s->least = mtt__arena_bytes(s) < s->least ? mtt__arena_bytes(s) : s->least;
    return MTT_OK;
}

/* ---- budgets ---- */

/* A search for the cheapest recomputation that fits a budget. Without `packed`, peaks stand for arenas. */
typedef struct mtt__search {
    mtt_schedule *schedule;
    size_t budget;
    int packed;
} mtt__search;

/* Finds the least k up to n for which the training step fits, with whole + k * whole_by layers recomputed
   whole and partial + k * partial_by in part. n itself is known to fit. */
static mtt_status mtt__fewest(const mtt__search *q, int whole, int whole_by, int partial, int partial_by,
                              int n, int *fewest)
{
    mtt_schedule *s = q->schedule;
    int low = 0, high = n;
    while (low < high) {
        int k = low + (high - low) / 2;
        size_t limit = q->packed ? q->budget : 0;
        mtt_status status = mtt__build(s, whole + k * whole_by, partial + k * partial_by, limit);
        if (status) return status;
        if (s->programs[MTT__TRAIN].arena_bytes <= q->budget) high = k;
        else low = k + 1;
    }
    *fewest = low;
    return MTT_OK;
}

enum { MTT__FEW_LAYERS = 8 };

/* Tries all mixtures and builds the cheapest that fits, or all layers whole if none does. With `packed`, the
   least that any of them takes is then known. */
static mtt_status mtt__choose_of_all(const mtt__search *q)
{
    mtt_schedule *s = q->schedule;
    int layers = s->model.layers, whole = layers, partial = 0, w, p;
    double best = HUGE_VAL;
    for (w = layers; w >= 0; w--)
        for (p = 0; p <= layers - w; p++) {
            size_t limit = q->budget > s->least ? q->budget : s->least;
            mtt_status status = mtt__build(s, w, p, q->packed ? limit : 0);
            if (status) return status;
            if (s->programs[MTT__TRAIN].arena_bytes > q->budget || mtt__plan_cost(s) >= best) continue;
            best = mtt__plan_cost(s), whole = w, partial = p;
        }
    return mtt__build(s, whole, partial, SIZE_MAX);
}

/* Chooses how many layers to recompute whole and how many in part, and builds that. More recomputation
   takes less memory, so what just fits is a staircase from A, as few whole as possible and the others in
   part, to B, none in part:

      in part  | \
               | A .
               | . # \          # fits, . does not
               | . # # \
               | . . . B \
               +------------ whole

   The search visits the ends: memory and cost are close to linear in the two numbers, so one of them is the
   cheapest. All layers whole is known to fit. */
static mtt_status mtt__choose(const mtt__search *q)
{
    mtt_schedule *s = q->schedule;
    int layers = s->model.layers, w = 0, p = 0, last = 0, whole = -1, partial = 0, step;
    double cost, best = 0;
    mtt_status status = mtt__fewest(q, 0, 1, layers, -1, layers, &w);
    if (!status) status = mtt__fewest(q, w, 1, 0, 0, layers - w, &last);
    last += w;
    step = 1 + (last - w) * layers / 256;
    for (; !status; w = (int)mtt__min(w + step, last)) {
        p = 0;
        if (w < last) status = mtt__fewest(q, w, 0, 0, 1, layers - w, &p);
        if (!status) status = mtt__build(s, w, p, 0);
        if (status) break;
        cost = mtt__plan_cost(s);
        if (whole < 0 || cost < best) best = cost, whole = w, partial = p;
        if (w == last) break;
    }
    return status ? status : mtt__build(s, whole, partial, SIZE_MAX);
}

/* Where all layers whole do not fit: as few as possible in part, if all in part do; or the last one in part
   or kept, or all kept but one. */
static mtt_status mtt__choose_less(const mtt__search *q)
{
    mtt_schedule *s = q->schedule;
    int layers = s->model.layers, fewest = 0, k;
    mtt_status status = mtt__build(s, 0, layers, SIZE_MAX);
    if (!status && mtt__arena_bytes(s) <= q->budget) {
        status = mtt__fewest(q, 0, 0, 0, 1, layers, &fewest);
        return status ? status : mtt__build(s, 0, fewest, SIZE_MAX);
    }
    for (k = 0; k < 3 && !status && mtt__arena_bytes(s) > q->budget; k++)
        status = mtt__build(s, k < 2 ? layers - 1 : 0, k != 1, SIZE_MAX);
    return status;
}

static mtt_status mtt__over_budget(const mtt_schedule *s, size_t budget)
{
    return mtt__fail(s->env, MTT_E_BUDGET,
                     "the budget is %zu bytes, the smallest plan takes %zu: %zu too many; %slower %s"
                     "seq_len, or use the chunked loss, flash attention, or segments", budget, s->least,
                     s->least - budget, s->batch == 1 || s->policy.split || s->policy.early_update ? "" :
                     "set split, ", s->batch == 1 ? "" : "the batch or ");
}

/* Recomputes so many layers that the plan fits the budget: without one, the plan with all layers whole and
   0.1 % (for 0.03 % GPT-2 with 32,768 tokens keeps its last layer and saves 2 % of the time). A first search
   does without packing, which takes long; if its result has gaps and misses the budget, a second one packs
   every candidate. A small model may need more memory where more is recomputed, beside a layer's gradients:
   there the search tries everything. */
static mtt_status mtt__fit_budget(mtt_schedule *s)
{
    int layers = s->model.layers;
    mtt_status status = mtt__build(s, layers, 0, SIZE_MAX);
    size_t arena = mtt__arena_bytes(s);
    mtt__search q = {s, arena + arena / 1024, 0};
    if (s->policy.recompute == MTT_RECOMPUTE_BUDGET) q.budget = s->policy.budget_bytes;
    for (q.packed = arena > q.budget; q.packed < 2 && !status; q.packed++) {
        if (layers <= MTT__FEW_LAYERS) status = mtt__choose_of_all(&q);
        else status = arena > q.budget ? mtt__choose_less(&q) : mtt__choose(&q);
        if (!status && mtt__arena_bytes(s) <= q.budget) return MTT_OK;
    }
    if (status || arena <= q.budget) return status ? status : mtt__build(s, layers, 0, SIZE_MAX);
    return mtt__over_budget(s, q.budget);
}

/* Recomputes what the policy says. A budget with room for everything needs no search. */
static mtt_status mtt__build_policy(mtt_schedule *s)
{
    mtt_recompute how = s->policy.recompute;
    int partial = how == MTT_RECOMPUTE_SELECTIVE ? s->model.layers : 0;
    size_t limit = how == MTT_RECOMPUTE_BUDGET ? s->policy.budget_bytes : SIZE_MAX;
    mtt_status status;
    mtt__release_programs(s);
    if (how == MTT_RECOMPUTE_LAYER || mtt__by_halves(&s->policy)) return mtt__fit_budget(s);
    status = mtt__build(s, 0, partial, limit);
    return status || mtt__arena_bytes(s) <= limit ? status : mtt__fit_budget(s);
}

/* Cuts the batch into `split` micro-batches. MTT_LOSS_AUTO of `asked` goes by their rows. */
static mtt_status mtt__build_split(mtt_schedule *s, const mtt_policy *asked, int batch, int accumulate,
                                   int split)
{
    s->split = split;
    s->batch = batch / split;
    s->policy.accumulate = accumulate * split;
    s->policy.loss = asked->loss;
    s->policy.loss_chunk_rows = asked->loss_chunk_rows;
    mtt__resolve_loss(&s->policy, (int64_t)s->batch * s->seq_len);
    return mtt__build_policy(s);
}

/* Takes the cheapest number of micro-batches, on all ranks the same. Once nothing is recomputed any more,
   more of them only cost. If none fits, the error is the last one's, with the least of all. */
static mtt_status mtt__fit_split(mtt_schedule *s, const mtt_policy *asked)
{
    int batch = s->batch, accumulate = s->policy.accumulate, best = 0, last = 0, split;
    double best_cost = 0;
    mtt_status status = MTT_OK;
    MTT_IF_RANKS(status = mtt__take_fullest(s->env, &s->model, s->seq_len, &s->policy);)
    if (status) return status;
    for (split = 1; split <= batch && split <= (1 << 20) / accumulate && !last; split++) {
        if (batch % split) continue;
        status = mtt__build_split(s, asked, batch, accumulate, split);
        if (status == MTT_E_BUDGET) continue;
        if (status) return status;
        last = s->recompute_layers + s->recompute_selective == 0;
        if (best && mtt__plan_cost(s) >= best_cost) continue;
        best = split;
        best_cost = mtt__plan_cost(s);
    }
    if (!best || (best == s->split && asked->rank == s->policy.rank)) return status;
    s->policy.rank = asked->rank;
    return mtt__build_split(s, asked, batch, accumulate, best);
}

static mtt_status mtt__schedule_init(mtt_schedule *s, mtt_env *env, const mtt_model_desc *model,
                                     const mtt_policy *policy, int batch, int seq_len)
{
    mtt_status status;
    memset(s, 0, sizeof(*s));
    s->env = env;
    s->batch = batch;
    s->seq_len = seq_len;
    s->split = 1;
    s->least = SIZE_MAX;
    status = mtt_model_resolve(env, model, &s->model);
    if (!status) status = mtt_policy_resolve(env, policy, &s->model, batch, seq_len, &s->policy);
    if (status) return status;
    if (s->policy.split && s->policy.recompute == MTT_RECOMPUTE_BUDGET) status = mtt__fit_split(s, policy);
    else status = mtt__build_policy(s);
    if (status) mtt__release_programs(s);
    return status;
}

MTTDEF mtt_status mtt_schedule_create(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                      int batch, int seq_len, mtt_schedule **out)
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

/* Counts what an operation reads and writes on the host: it passes the link between host and card. */
static void mtt__count_link(const mtt_op *op, int times, mtt_plan_report *r)
{
    int i;
    for (i = 0; i < op->inputs + op->outputs; i++) {
        const mtt_tensor *t = op->operands[i];
        double *sum = i < op->inputs ? &r->from_host_bytes : &r->to_host_bytes;
        if (t && t->place == MTT_HOST) *sum += times * (double)t->bytes;
    }
}

MTTDEF void mtt_schedule_report(const mtt_schedule *s, mtt_plan_report *r)
{
    const mtt__program *p = &s->programs[MTT__TRAIN];
    int i;
    memset(r, 0, sizeof(*r));
    for (i = 0; i < p->parameter_count; i++) r->parameters += mtt__parameter_elements(&p->parameters[i]);
    for (i = 0; i < p->tensor_count; i++)
        if (p->tensors[i]->persistent && p->tensors[i]->place == MTT_CARD)
            r->state_bytes += mtt__slot_bytes(p->tensors[i]);
    for (i = 0; i < p->op_count; i++) {
        const mtt_op *op = &p->ops[i];
        if (op->live_bytes > r->phase_peak_bytes[op->phase]) r->phase_peak_bytes[op->phase] = op->live_bytes;
        if (op->live_bytes > r->peak_bytes) {
            r->peak_bytes = op->live_bytes;
            r->peak_op = i;
        }
        r->flops += op->flops;
        r->traffic_bytes += op->traffic_bytes;
        if (op->recomputed) r->recompute_flops += op->flops;
        mtt__count_link(op, op->phase == MTT_STEP ? 1 : s->policy.accumulate, r);
    }
    for (i = 0; s->chunk && i < s->programs[MTT__TOKEN].op_count; i++)
        r->token_flops += s->programs[MTT__TOKEN].ops[i].flops;
    memcpy(r->bytes, p->ops[r->peak_op].bytes, sizeof(r->bytes));
    r->arena_bytes = mtt__arena_bytes(s);
    r->host_bytes = mtt__place_bytes(s, MTT_HOST);
    r->batch = p->shape.batch * s->split;
    r->seq_len = p->shape.seq_len;
    r->micro_batches = s->split;
    r->outside_bytes = 3145728 + 524288 * (size_t)mtt__threads() + 65536 * (size_t)s->model.layers;
    MTT_IF_RANKS(mtt__report_wires(s, r);)
#ifdef MTT_CBLAS
    r->outside_bytes += 2097152 + 1310720 * (size_t)mtt__threads();
#endif
    if (s->policy.device == MTT_DEVICE_CUDA) r->outside_bytes += 18874368; /* without NCCL's */
    r->ops = p->op_count;
    r->tensors = p->tensor_count;
    for (i = 0; i < s->model.layers; i++) {
        r->recompute_layers += mtt__recompute_level(s, i) >= MTT__BY_LAYER;
        r->recompute_selective += mtt__recompute_level(s, i) == MTT__BY_SELECTIVE;
    }
}

MTTDEF const mtt_model_desc *mtt_schedule_model(const mtt_schedule *s)
{
    return &s->model;
}

MTTDEF const mtt_policy *mtt_schedule_policy(const mtt_schedule *s)
{
    return &s->policy;
}

MTTDEF const mtt_op *mtt_schedule_ops(const mtt_schedule *s, int *count)
{
    *count = s->programs[MTT__TRAIN].op_count;
    return s->programs[MTT__TRAIN].ops;
}

MTTDEF const mtt_tensor *const *mtt_schedule_tensors(const mtt_schedule *s, int *count)
{
    *count = s->programs[MTT__TRAIN].tensor_count;
    return (const mtt_tensor *const *)s->programs[MTT__TRAIN].tensors;
}

MTTDEF mtt_status mtt_plan(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy, int batch,
                           int seq_len, mtt_plan_report *report)
{
    mtt_schedule s;
    mtt_status status = mtt__schedule_init(&s, env, model, policy, batch, seq_len);
    if (status) return status;
    mtt_schedule_report(&s, report);
    mtt__release_programs(&s);
    return MTT_OK;
}

MTTDEF mtt_status mtt_plan_max_batch(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                     int seq_len, size_t budget_bytes, int *batch)
{
    mtt_policy p = *policy;
    int low = 0, high = 1 << 20, next = 1; /* low fits, high + 1 does not */
    mtt_status status = MTT_OK;
    MTT_IF_RANKS(status = mtt__take_fullest(env, model, seq_len, &p);)
    p.budget_bytes = budget_bytes ? budget_bytes : 1;
    p.split = 0;
    *batch = 0;
    while (low < high && !status) {
        mtt_schedule s;
        mtt_status fits = mtt__schedule_init(&s, env, model, &p, next, seq_len);
        size_t arena = fits ? s.least : mtt__arena_bytes(&s);
        if (!fits) mtt__release_programs(&s);
        if (fits && (fits != MTT_E_BUDGET || (next == 1 && arena == SIZE_MAX))) return fits;
        if (!fits && arena <= budget_bytes) low = next;
        else if (next == 1)
            return mtt__fail(env, MTT_E_BUDGET,
                             "the budget is %zu bytes, a batch of one sequence takes %zu: raise it, shorten "
                             "the sequences or recompute more", budget_bytes, arena);
        else high = next - 1;
        next = high == 1 << 20 && low < 1 << 19 ? 2 * low : low + (high - low + 1) / 2;
    }
    *batch = low;
    return status;
}

/* The policies that mtt_policy_fit has tried: the cheapest that fits, and the least that any takes. */
typedef struct mtt__fitting {
    mtt_policy fit;
    double cost; /* HUGE_VAL: none fits */
    size_t budget, least;
} mtt__fitting;

static mtt_status mtt__try_policy(mtt__fitting *f, mtt_env *env, const mtt_model_desc *model,
                                  const mtt_policy *policy, int batch, int seq_len)
{
    mtt_schedule s;
    mtt_policy p = *policy;
    mtt_status status = mtt__schedule_init(&s, env, model, &p, batch, seq_len);
    size_t arena = status ? SIZE_MAX : mtt__arena_bytes(&s);
    if (status && p.recompute == MTT_RECOMPUTE_BUDGET) arena = s.least;
    if (arena < f->least) f->least = arena;
    if (status) return status == MTT_E_BUDGET ? MTT_OK : status;
    if (p.recompute == MTT_RECOMPUTE_BUDGET && !(s.recompute_layers + s.recompute_selective) && s.split == 1)
        p.recompute = MTT_RECOMPUTE_NONE;
    if (arena <= f->budget && mtt__plan_cost(&s) < f->cost) f->fit = p, f->cost = mtt__plan_cost(&s);
    mtt__release_programs(&s);
    return MTT_OK;
}

/* Where layers recomputed once do not fit, what takes less memory is tried, too: smaller chunks of logits,
   recursion, and segments of each length up to 9 and some above. With 12 layers on a CPU those are 4 plans,
   and 140 more. */
MTTDEF mtt_status mtt_policy_fit(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                 int batch, int seq_len, size_t budget_bytes, mtt_policy *fit)
{
    static const mtt_recompute kinds[] = {MTT_RECOMPUTE_BUDGET, MTT_RECOMPUTE_BUDGET, MTT_RECOMPUTE_RECURSIVE,
                                          MTT_RECOMPUTE_LAYER, MTT_RECOMPUTE_SEGMENTS};
    static const mtt_loss losses[] = {MTT_LOSS_AUTO, MTT_LOSS_FULL, MTT_LOSS_CHUNKED, MTT_LOSS_CHUNKED};
    int cuda = policy->device == MTT_DEVICE_CUDA, kind, segment, choice;
    int64_t rows = policy->loss_chunk_rows ? policy->loss_chunk_rows : cuda ? 2048 : 1024;
    mtt_policy p = *policy;
    mtt_model_desc m;
    mtt__fitting f;
    mtt_status status = mtt_model_resolve(env, model, &m);
    f.budget = p.budget_bytes = budget_bytes ? budget_bytes : 1;
    if (!status) status = mtt_policy_resolve(env, &p, &m, batch, seq_len, &f.fit);
    MTT_IF_RANKS(if (!status) status = mtt__take_fullest(env, model, seq_len, &p);)
    if (status) return status;
    f.least = SIZE_MAX;
    f.cost = HUGE_VAL;
    rows = mtt__min(rows, (int64_t)batch * seq_len) / 8;
    for (kind = 0; kind < 5 && (kind != 1 || f.cost == HUGE_VAL); kind++)
        for (segment = 0; segment <= (kind < 3 ? 0 : m.layers); segment += 1 + segment / 8)
            for (choice = 0; choice < 8 && !status; choice++) {
                int small = choice > 5;
                if ((losses[choice / 2] == MTT_LOSS_FULL && !cuda) || (kind < 2 && kind != small))
                    continue; /* on a CPU auto is full */
                p.recompute = kinds[kind];
                p.segment = segment ? segment : policy->segment;
                p.attention = choice % 2 ? MTT_ATTENTION_PLAIN : MTT_ATTENTION_FLASH;
                p.loss = losses[choice / 2];
                p.loss_chunk_rows = small && rows > 0 ? (int)rows : small ? 1 : policy->loss_chunk_rows;
                status = mtt__try_policy(&f, env, model, &p, batch, seq_len);
            }
    if (status || f.least == SIZE_MAX) return status ? status : MTT_E_BUDGET;
    if (f.cost == HUGE_VAL)
        return mtt__fail(env, MTT_E_BUDGET,
                         "the budget is %zu bytes, the smallest policy takes %zu: %zu too many; lower "
                         "%sseq_len", budget_bytes, f.least, f.least - budget_bytes,
                         batch == 1 ? "" : "the batch or ");
    *fit = f.fit;
    fit->rank = policy->rank;
    return MTT_OK;
}

/* -----------------------------------------------------------------------------------------------------------
   >>cpu
   -------------------------------------------------------------------------------------------------------- */

/* Every operation in plain C, beside its formula: mtt__cpu_norm(op, operands) runs the row `norm` of MTT_OPS.
   Tensors are read and written as floats, so one function serves all precisions. Threads share rows, columns,
   tiles or heads; one operation ends before the next begins. Every sum has a fixed order, so the number of
   threads changes no bit. First come the tools, then the operations in the order of a step, at the end the
   backend. */

enum {
    MTT__ALONE = 32768,    /* up to this many elements one thread is faster: waking others takes longer */
    MTT__BLOCK = 1024,     /* elements that are converted to floats at a time */
    MTT__TILE = 64,        /* queries and keys of a tile of flash attention */
    MTT__STRIPE = 32,      /* rows of A or columns of B that are packed together */
    MTT__DEPTH = 64,       /* terms of a product that are packed and summed at a time, before C adds them */
    MTT__SIDE = 128,       /* rows and columns of a tile of a product, at most */
    MTT__LANES = 16,       /* partial sums of a long sum */
    MTT__MAX_WIDTH = 16384,
    MTT__MAX_HEAD = 256
};
#define MTT__THREADS(elements) MTT__OMP(omp parallel for schedule(static) if ((elements) > MTT__ALONE))
/* A loop over [from, end) in blocks: `n` elements from `at` up. */
#define MTT__BLOCKS(at, n, from, end) for (at = from; (n = mtt__min(MTT__BLOCK, (end) - at)) > 0; at += n)

/* Returns the calling thread's tiles: a row of the workspace. Its stack may be of 128 KB. */
static float *mtt__tiles(const mtt_op *op)
{
    return (float *)op->workspace->data + mtt__thread() * mtt__width(op->workspace);
}

/* ---- reading and writing ---- */

/* Values of other types: a wing's. */
typedef void mtt__load_function(const mtt_tensor *t, int64_t first, int64_t count, float *out);
typedef void mtt__round_function(const mtt_tensor *t, int64_t count, const float *values, uint8_t *out);
MTT_IF_EIGHT(static mtt__load_function mtt__load_eight; static mtt__round_function mtt__round_eight;)

static void mtt__load(const mtt_tensor *t, int64_t first, int64_t count, float *out)
{
    const uint16_t *half = (const uint16_t *)t->data + first;
    int64_t i;
    switch (t->dtype) {
    case MTT_F32: memcpy(out, (const float *)t->data + first, (size_t)count * sizeof(float)); break;
    case MTT_BF16_BITS: for (i = 0; i < count; i++) out[i] = mtt__from_bf16(half[i]); break;
    case MTT_F16_BITS: for (i = 0; i < count; i++) out[i] = mtt__from_fp16(half[i]); break;
    default: MTT_IF_EIGHT(mtt__load_eight(t, first, count, out);) break;
    }
}

static void mtt__store(const mtt_tensor *t, int64_t first, int64_t count, const float *values)
{
    uint16_t *half = (uint16_t *)t->data + first;
    int64_t i;
    switch (t->dtype) {
    case MTT_F32: memcpy((float *)t->data + first, values, (size_t)count * sizeof(float)); break;
    case MTT_BF16_BITS: for (i = 0; i < count; i++) half[i] = mtt__to_bf16(values[i]); break;
    case MTT_F16_BITS: for (i = 0; i < count; i++) half[i] = mtt__to_fp16(values[i]); break;
    default: MTT_IF_EIGHT(mtt__round_eight(t, count, values, (uint8_t *)t->data + first);) break;
    }
}

/* Returns some rows of a tensor; those of the residual stream are tokens. */
static mtt_tensor mtt__row_range(const mtt_tensor *t, int64_t first, int64_t count)
{
    mtt_tensor part = *t;
    size_t row = t->bytes / (size_t)(t->dims == 3 ? t->shape[0] * t->shape[1] : t->shape[0]);
    if (t->dims == 3) part.dims = 2, part.shape[1] = t->shape[2];
    part.shape[0] = count;
    part.bytes = row * (size_t)count;
    part.data = (char *)t->data + row * (size_t)first;
    return part;
}

/* Returns the values themselves if they are floats, otherwise a copy in `buffer`. */
static const float *mtt__read(const mtt_tensor *t, int64_t first, int64_t count, float *buffer)
{
    if (t->dtype == MTT_F32) return (const float *)t->data + first;
    mtt__load(t, first, count, buffer);
    return buffer;
}

MTT__INLINE const mtt_control *mtt__control(const mtt_tensor *t) { return (const mtt_control *)t->data; }
MTT__INLINE mtt_counters *mtt__counters(const mtt_tensor *t) { return (mtt_counters *)t->data; }

/* ---- sums ---- */

/* Returns e^x within 2 ulp, without a branch or a call, so that loops over it become vectors: 2^n times a
   polynomial on [-ln2/2, ln2/2] (Cephes' expf). Saturates near 0 below -87 and near FLT_MAX above 88. Adding
   1.5 * 2^23 rounds to an integer. Setting bits that are set keeps compilers that reorder sums from
   cancelling it. */
MTT__INLINE float mtt__exp(float x)
{
    float clamped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float shifted = clamped * 1.44269504f + 12582912.0f;
    float n = mtt__bits_float(mtt__float_bits(shifted) | 0x4b000000u) - 12582912.0f, y;
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    y = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
         1.6666665459e-1f) * r + 5.0000001201e-1f;
    return (y * r * r + r + 1.0f) * mtt__bits_float((mtt__float_bits(shifted) + 127u) << 23);
}

/* Sums and largest values in lanes: lane l takes elements l, l + 16, ... So every build adds in one order,
   and the compiler can use vectors without permission to reorder. */
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

/* Returns, for a softmax of elements [first, end), the largest, and a block's part of the sum of e^(x -
   largest). */
static float mtt__row_largest(const mtt_tensor *t, int64_t first, int64_t end)
{
    float buffer[MTT__BLOCK], best = -3.4e38f;
    int64_t at, n;
    MTT__BLOCKS(at, n, first, end) best = fmaxf(best, mtt__largest(mtt__read(t, at, n, buffer), n));
    return best;
}

static float mtt__exp_sum(const float *x, int64_t n, float largest)
{
    float e[MTT__BLOCK];
    int64_t k;
    for (k = 0; k < n; k++) e[k] = mtt__exp(x[k] - largest);
    return mtt__sum(e, n);
}

/* ---- elementwise operations ---- */

/* Multiplies `count` values, for dropout, elements from `first` up, by their mask: 0, or 1 / (1 - p). */
static void mtt__drop(const mtt_op *op, const mtt_tensor *control, int64_t first, int64_t count,
                      float *values)
{
    const mtt_control *c = mtt__control(control);
    int bits = mtt__dropout_bits(op), sharers = 128 / bits;
    uint32_t threshold = mtt__dropout_threshold(op->shape->dropout, bits);
    uint64_t stream = mtt__op_stream(op) | mtt__stream_step(c->micro_batch);
    float scale = mtt__dropout_scale(threshold, bits);
    mtt_draw draw = {{0, 0, 0, 0}};
    int64_t i;
    for (i = 0; i < count && op->shape->dropout > 0; i++) {
        int64_t element = first + i;
        int k = (int)(element & (sharers - 1));
        if (i == 0 || k == 0) draw = mtt__dropout_draw(c->seed, (uint64_t)(element / sharers), stream, bits);
        values[i] *= mtt__dropout_number(draw.word, k, bits) >= threshold ? scale : 0.0f;
    }
}

/* out = f(a, dropout(b)): f changes a block of b in place. `control` (for dropout), `a` and f may be NULL. */
static void mtt__elementwise(const mtt_op *op, const mtt_tensor *control, const mtt_tensor *a,
                             const mtt_tensor *b, const mtt_tensor *out,
                             void (*f)(const float *a, float *b, int64_t n))
{
    int64_t count = mtt__elements(out), i;
    MTT__THREADS(count)
    for (i = 0; i < count; i += MTT__BLOCK) {
        float as[MTT__BLOCK], bs[MTT__BLOCK];
        int64_t n = mtt__min(MTT__BLOCK, count - i);
        mtt__load(b, i, n, bs);
        if (control) mtt__drop(op, control, i, n, bs);
        if (f) f(a ? mtt__read(a, i, n, as) : NULL, bs, n);
        mtt__store(out, i, n, bs);
    }
}

static void mtt__add_block(const float *a, float *b, int64_t n)
{
    int64_t k;
    for (k = 0; k < n; k++) b[k] += a[k];
}

/* sum = x + dropout(branch) */
static void mtt__cpu_residual(const mtt_op *op, const mtt_op_residual *o)
{
    mtt__elementwise(op, o->control, o->x, o->branch, o->sum, mtt__add_block);
}

static void mtt__cpu_add(const mtt_op *op, const mtt_op_add *o)
{
    mtt__elementwise(op, NULL, o->a, o->b, o->sum, mtt__add_block);
}

/* On a CPU both places are its memory. */
static void mtt__cpu_move(const mtt_op *op, const mtt_op_move *o)
{
    (void)op;
    memcpy(o->y->data, o->x->data, o->x->bytes);
}

static void mtt__cpu_dropout_scores(const mtt_op *op, const mtt_op_dropout_scores *o)
{
    mtt__elementwise(op, o->control, NULL, o->probs, o->dropped, NULL);
}

/* Dropout is its own gradient. */
static void mtt__cpu_dropout_backward(const mtt_op *op, const mtt_op_dropout_backward *o)
{
    mtt__elementwise(op, o->control, NULL, o->dy, o->dx, NULL);
}

/* s = 1 / (1 + exp(-2u)) with u = sqrt(2/pi) (x + 0.044715 x^3): GELU's tanh form is x s, free of
   cancellation. */
MTT__INLINE float mtt__gelu_sigmoid(float x)
{
    return 1.0f / (1.0f + mtt__exp(-1.5957691216f * (x + 0.044715f * x * x * x)));
}

/* y = f(x) of the MLP: GELU, max(x, 0)^2, or x s with s = 1 / (1 + e^-x), times `up` with a gate. */
static void mtt__activation_block(mtt_mlp mlp, const float *x, const float *up, float *y, int64_t n)
{
    int64_t k;
    switch (mtt__ungated(mlp)) {
    case MTT_MLP_GELU:
        for (k = 0; k < n; k++) y[k] = x[k] * mtt__gelu_sigmoid(x[k]);
        break;
    case MTT_MLP_RELU2:
        for (k = 0; k < n; k++) y[k] = x[k] > 0 ? x[k] * x[k] : 0.0f;
        break;
    case MTT_MLP_SILU:
        for (k = 0; k < n; k++) y[k] = x[k] / (1.0f + mtt__exp(-x[k]));
        break;
    default: for (k = 0; k < n; k++) y[k] = NAN; /* a form without a case must not pass for another */
    }
    for (k = 0; k < n && mtt__is_gated(mlp); k++) y[k] *= up[k];
}

/* The gradient g of y = x s [up] becomes that of x, by the slope of x s, and that of up takes its place. */
MTT__INLINE void mtt__slope(int gated, float x, float s, float slope, float *up, float *g)
{
    float dy = *g;
    if (gated) slope *= *up, *up = dy * x * s;
    *g = dy * slope;
}

/* Gradients: g, of y, becomes that of x, and `up` that of up. */
static void mtt__slope_block(mtt_mlp mlp, const float *x, float *up, float *g, int64_t n)
{
    const int gated = mtt__is_gated(mlp);
    int64_t k;
    switch (mtt__ungated(mlp)) {
    case MTT_MLP_GELU:
        for (k = 0; k < n; k++) {
            float s = mtt__gelu_sigmoid(x[k]), slope = 1.5957691216f * (1.0f + 0.134145f * x[k] * x[k]);
            mtt__slope(gated, x[k], s, s + x[k] * s * (1.0f - s) * slope, &up[k], &g[k]);
        }
        break;
    case MTT_MLP_RELU2:
        for (k = 0; k < n; k++) {
            float s = x[k] > 0 ? x[k] : 0.0f;
            mtt__slope(gated, x[k], s, 2 * s, &up[k], &g[k]);
        }
        break;
    case MTT_MLP_SILU:
        for (k = 0; k < n; k++) {
            float s = 1.0f / (1.0f + mtt__exp(-x[k]));
            mtt__slope(gated, x[k], s, s + x[k] * s * (1.0f - s), &up[k], &g[k]);
        }
        break;
    default: for (k = 0; k < n; k++) g[k] = NAN; /* as above */
    }
}

/* A row of x has a second half, `up`, with a gate alone. */
static void mtt__activate_rows(mtt_mlp mlp, const mtt_tensor *x_of, const mtt_tensor *y_of)
{
    int64_t n = mtt__width(y_of), pitch = mtt__width(x_of), rows = mtt__rows(y_of), row;
    MTT__THREADS(rows * n)
    for (row = 0; row < rows; row++) {
        float x[MTT__BLOCK], up[MTT__BLOCK], y[MTT__BLOCK];
        int64_t at, count;
        MTT__BLOCKS(at, count, 0, n) {
            mtt__load(x_of, row * pitch + at, count, x);
            if (pitch > n) mtt__load(x_of, row * pitch + n + at, count, up);
            mtt__activation_block(mlp, x, up, y, count);
            mtt__store(y_of, row * n + at, count, y);
        }
    }
}

static void mtt__cpu_activation(const mtt_op *op, const mtt_op_activation *o)
{
    mtt__activate_rows(op->shape->mlp, o->x, o->y);
}

/* dx = dy f'(x) */
static void mtt__slope_rows(mtt_mlp mlp, const mtt_op_activation_backward *o)
{
    int64_t n = mtt__width(o->dy), pitch = mtt__width(o->x), rows = mtt__rows(o->x), row;
    MTT__THREADS(rows * n)
    for (row = 0; row < rows; row++) {
        float g[MTT__BLOCK], x[MTT__BLOCK], up[MTT__BLOCK];
        int64_t at, count;
        MTT__BLOCKS(at, count, 0, n) {
            mtt__load(o->dy, row * n + at, count, g);
            mtt__load(o->x, row * pitch + at, count, x);
            if (pitch > n) mtt__load(o->x, row * pitch + n + at, count, up);
            mtt__slope_block(mlp, x, up, g, count);
            mtt__store(o->dx, row * pitch + at, count, g);
            if (pitch > n) mtt__store(o->dx, row * pitch + n + at, count, up);
        }
    }
}

static void mtt__cpu_activation_backward(const mtt_op *op, const mtt_op_activation_backward *o)
{
    mtt__slope_rows(op->shape->mlp, o);
}

/* ---- products of blocks ---- */

/* A vector register, and the rows of C whose sums, two vectors each, fit the registers. MTT__LOW and
   MTT__HIGH: the lanes of two vectors, halves of which alternate. */
#define MTT__LOW_4 0, 4, 1, 5
#define MTT__HIGH_4 2, 6, 3, 7
#define MTT__LOW_8 0, 8, 1, 9, 2, 10, 3, 11
#define MTT__HIGH_8 4, 12, 5, 13, 6, 14, 7, 15
#define MTT__LOW_16 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define MTT__HIGH_16 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define MTT__LOW_32 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, \
    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47
#define MTT__HIGH_32 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, \
    24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63
#if !defined(MTT__GNU)
typedef float mtt__vector;
enum { MTT__ROWS = 1 };
#elif defined(__AVX512F__)
typedef float mtt__vector __attribute__((vector_size(64)));
enum { MTT__ROWS = 8 };
#define MTT__LOW MTT__LOW_16
#define MTT__HIGH MTT__HIGH_16
#elif defined(__AVX__)
typedef float mtt__vector __attribute__((vector_size(32)));
enum { MTT__ROWS = 4 };
#define MTT__LOW MTT__LOW_8
#define MTT__HIGH MTT__HIGH_8
#else
typedef float mtt__vector __attribute__((vector_size(16)));
#ifdef __aarch64__ /* has 32 registers */
enum { MTT__ROWS = 8 };
#else
enum { MTT__ROWS = 4 };
#endif
#define MTT__LOW MTT__LOW_4
#define MTT__HIGH MTT__HIGH_4
#endif
#if defined(__GNUC__) && !defined(__clang__)
#define MTT__UNROLL_ROWS _Pragma("GCC unroll 8")
#else
#define MTT__UNROLL_ROWS
#endif

/* Keeps x and y in registers: for Zen, GCC loads them again for each row, and AVX2 makes 75 GFLOP/s instead
   of 110. */
#if defined(__x86_64__) && defined(MTT__GNU)
#define MTT__IN_REGISTERS(x, y) __asm__("" : "+v"(x), "+v"(y))
#else
#define MTT__IN_REGISTERS(x, y) ((void)0)
#endif

/* sum + x y for vectors `sum` and `y`, with one rounding if the build has FMA. Products must agree in that,
   whatever their shape, and compilers do not: GCC fuses it, but for Zen not in a single chain of sums. */
#if defined(__x86_64__) && defined(MTT__GNU) && defined(__FMA__) && defined(__AVX512F__)
#define MTT__MULTIPLY_ADD(sum, x, y)                                                                         \
    (mtt__vector) _mm512_fmadd_ps(_mm512_set1_ps(x), (__m512)(y), (__m512)(sum))
#elif defined(__x86_64__) && defined(MTT__GNU) && defined(__FMA__)
#define MTT__MULTIPLY_ADD(sum, x, y)                                                                         \
    (mtt__vector) _mm256_fmadd_ps(_mm256_set1_ps(x), (__m256)(y), (__m256)(sum))
#elif defined(__i386__) && defined(__GNUC__) && !defined(__AVX__) /* x87 makes x * y a long double */
#define MTT__MULTIPLY_ADD(sum, x, y)                                                                         \
    __extension__({ const float x_ = x; mtt__vector v_ = {x_, x_, x_, x_}; (sum) + v_ * (y); })
#else
#define MTT__MULTIPLY_ADD(sum, x, y) ((sum) + (x) * (y))
#endif

/* C += A B for an m x k and a k x n block, in whole multiples of 8 rows and 32 columns, as mtt__load_block
   pads them. `rows` of C, two vectors wide, are summed in registers over all of k: a term costs little more
   than its multiply-add: 115 GFLOP/s a core with AVX-512, where the peak is 118. */
typedef void mtt__multiplier(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row,
                             int64_t a_column, const float *b, int64_t ldb, float *c, int64_t ldc);
#define MTT__MULTIPLY(name, vector, rows, multiply_add)                                                      \
    static void name(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column,       \
                     const float *b, int64_t ldb, float *c, int64_t ldc)                                     \
    {                                                                                                        \
        enum { wide = sizeof(vector) / sizeof(float) };                                                      \
        int64_t i, j, p;                                                                                     \
        int r;                                                                                               \
        for (j = 0; j < n; j += 2 * wide)                                                                    \
            for (i = 0; i < m; i += rows) {                                                                  \
                vector left[rows], right[rows], u, v;                                                        \
                const float *x = a + i * a_row;                                                              \
                float *to = c + i * ldc + j;                                                                 \
                memset(left, 0, sizeof(left));                                                               \
                memset(right, 0, sizeof(right));                                                             \
                for (p = 0; p < k; p++, x += a_column) {                                                     \
                    memcpy(&u, b + p * ldb + j, sizeof(u));                                                  \
                    memcpy(&v, b + p * ldb + j + wide, sizeof(v));                                           \
                    MTT__IN_REGISTERS(u, v);                                                                 \
                    MTT__UNROLL_ROWS                                                                         \
                    for (r = 0; r < rows; r++) {                                                             \
                        left[r] = multiply_add(left[r], x[r * a_row], u);                                    \
                        right[r] = multiply_add(right[r], x[r * a_row], v);                                  \
                    }                                                                                        \
                }                                                                                            \
                MTT__UNROLL_ROWS                                                                             \
                for (r = 0; r < rows; r++, to += ldc) {                                                      \
                    memcpy(&u, to, sizeof(u));                                                               \
                    memcpy(&v, to + wide, sizeof(v));                                                        \
                    u += left[r];                                                                            \
                    v += right[r];                                                                           \
                    memcpy(to, &u, sizeof(u));                                                               \
                    memcpy(to + wide, &v, sizeof(v));                                                        \
                }                                                                                            \
            }                                                                                                \
    }
MTT__MULTIPLY(mtt__multiply_block, mtt__vector, MTT__ROWS, MTT__MULTIPLY_ADD)

/* The same for words of two BF16 values each, neighbours along k. One instruction of AVX512-BF16, or of
   Armv8.6-A where the build has it, multiplies both and adds the products to an FP32 sum: twice the speed of
   FP32. */
#ifdef MTT__X86_BF16
#define MTT__PAIRS_CODE __attribute__((target("avx512f,avx512bf16")))
#define MTT__PAIRS_WORDS(side) MTT__##side##_16
#define MTT__PAIRS_HALVES(side) MTT__##side##_32
typedef float mtt__pairs_vector __attribute__((vector_size(64)));
#define MTT__PAIRS_ADD(sum, x, y)                                                                            \
    (mtt__pairs_vector) _mm512_dpbf16_ps((__m512)(sum), (__m512bh)_mm512_set1_ps(x), (__m512bh)(y))
static int mtt__has_pairs(void) { return __builtin_cpu_supports("avx512bf16") != 0; }
#elif defined(MTT__ARM_BF16)
#define MTT__PAIRS_CODE
#define MTT__PAIRS_WORDS(side) MTT__##side##_4
#define MTT__PAIRS_HALVES(side) MTT__##side##_8
typedef mtt__vector mtt__pairs_vector;
#define MTT__PAIRS_ADD(sum, x, y)                                                                            \
    (mtt__vector) vbfdotq_f32((float32x4_t)(sum), vreinterpretq_bf16_f32(vdupq_n_f32(x)),                    \
                              vreinterpretq_bf16_f32((float32x4_t)(y)))
static int mtt__has_pairs(void) { return 1; }
#endif
#ifdef MTT__PAIRS_CODE
MTT__PAIRS_CODE MTT__MULTIPLY(mtt__multiply_pairs, mtt__pairs_vector, 8, MTT__PAIRS_ADD)
#else
#define mtt__multiply_pairs mtt__multiply_block
static int mtt__has_pairs(void) { return 0; }
#endif

/* ---- views ---- */

/* An m x n matrix inside a tensor: element (i, j) is at first + i * row + j * column. One step is 1. */
typedef struct mtt__view {
    const mtt_tensor *t;
    int64_t first, m, n, row, column;
} mtt__view;

static mtt__view mtt__matrix_at(const mtt_tensor *t, int64_t first, int64_t m, int64_t n, int transposed)
{
    mtt__view plain = {t, first, m, n, mtt__width(t), 1}, swapped = {t, first, n, m, 1, mtt__width(t)};
    return transposed ? swapped : plain;
}

static mtt__view mtt__matrix(const mtt_tensor *t, int transposed)
{
    return mtt__matrix_at(t, 0, mtt__rows(t), mtt__width(t), transposed);
}

static mtt__view mtt__transposed(mtt__view v)
{
    mtt__view swapped = {v.t, v.first, v.n, v.m, v.column, v.row};
    return swapped;
}

/* Rows i0 up and columns j0 up of a view, as an m x n block of floats, padded with zeros to multiples of 8
   rows and 32 columns. Where columns are contiguous in memory, 16 of them are read, then written side by
   side, a cache line at a time: an FP32 step is 20 % faster than by single elements. */
static void mtt__load_block(mtt__view v, int64_t i0, int64_t m, int64_t j0, int64_t n, float *out,
                            int64_t stride)
{
    enum { wide = 16 };
    float columns[wide][MTT__MAX_HEAD];
    int64_t i, j, l, w;
    for (i = 0; i < m && v.column == 1; i++)
        mtt__load(v.t, v.first + (i0 + i) * v.row + j0, n, out + i * stride);
    for (j = 0; j < n && v.column != 1; j += wide) {
        w = mtt__min(wide, n - j);
        for (l = 0; l < w; l++) mtt__load(v.t, v.first + i0 + (j0 + j + l) * v.column, m, columns[l]);
        for (i = 0; i < m; i++)
            for (l = 0; l < w; l++) out[i * stride + j + l] = columns[l][i];
    }
    for (i = 0; i < mtt__round_up(m, 8); i++)
        for (j = i < m ? n : 0; j < mtt__round_up(n, MTT__STRIPE); j++) out[i * stride + j] = 0;
}

/* Stores an m x n block of floats as rows i0 up and columns j0 up of a view. */
static void mtt__store_block(mtt__view v, int64_t i0, int64_t m, int64_t j0, int64_t n, const float *in,
                             int64_t stride)
{
    int64_t i;
    for (i = 0; i < m; i++) mtt__store(v.t, v.first + (i0 + i) * v.row + j0, n, in + i * stride);
}

/* Matrices of a head: T x d_head columns of qkv or of the output, or the T x T square of scores. */
enum { MTT__Q, MTT__K, MTT__V, MTT__OUT, MTT__SQUARE, MTT__TRANSPOSED = 8 };

static int64_t mtt__heads(const mtt_op *op) { return (int64_t)op->shape->batch * op->shape->heads; }

/* Returns the view of such a matrix. `index` counts heads through the batch, sequence after sequence. */
static mtt__view mtt__head(const mtt_op *op, const mtt_tensor *t, int part, int64_t index)
{
    const mtt_shape *d = op->shape;
    mtt_qkv qkv = mtt_qkv_of(d);
    int head = (int)(index % d->heads), transposed = part & MTT__TRANSPOSED, which = part & ~MTT__TRANSPOSED;
    int64_t seq = d->seq_len, dim = d->d_head, first = index / d->heads * seq * mtt__width(t);
    if (which == MTT__SQUARE) return mtt__matrix_at(t, index * seq * seq, seq, seq, transposed);
    first += which == MTT__OUT ? head * dim : mtt_qkv_column(&qkv, which, head);
    return mtt__matrix_at(t, first, seq, dim, transposed);
}

/* Scores are multiplied by this. */
static float mtt__score_scale(const mtt_op *op)
{
    return 1.0f / sqrtf((float)op->shape->d_head);
}

/* ---- flash attention (Dao et al. 2022) ---- */

/* Scores exist only for a tile of 64 queries by 64 keys at a time, so no T x T matrix is in memory. A tile of
   q, k, v or the output has its tokens as rows, MTT__MAX_HEAD apart, or, transposed, as columns. */
typedef float mtt__tile[MTT__TILE * MTT__MAX_HEAD];
typedef float mtt__score_tile[MTT__TILE * MTT__TILE];

/* Finds the keys [*low, *high) of a tile that a query attends, counted from the tile's first key j0. */
static void mtt__attended(const mtt_shape *d, int64_t query, int64_t j0, int64_t *low, int64_t *high)
{
    int64_t first = mtt__first_key(d->window, query) - j0;
    *high = mtt__min(MTT__TILE, query + 1 - j0);
    *low = mtt__min(first > 0 ? first : 0, *high);
}

/* A tile of queries, for mtt__attend. */
typedef struct mtt__attention_tile {
    mtt__view q, k_t, v, out;
    int64_t i0, m, place; /* rows of q from i0 up; the first one's place among the keys */
    int64_t keys;         /* of the sequence */
    const mtt_tensor *control; /* for dropout; NULL: none */
    int64_t element;           /* of the first row's scores */
    float *lse;                /* of the first row, or NULL */
} mtt__attention_tile;

/* Tiles that a thread works on: queries, keys, values, the sums of the output, and scores, [query][key]. */
typedef struct mtt__attention_tiles {
    mtt__tile q, k, v, o;
    mtt__score_tile s;
} mtt__attention_tiles;

/* The two products of a tile of queries and n keys from j0 up: s = q k^T, and o += s v. A cache has others.
   */
typedef void mtt__tile_product(const mtt__attention_tile *t, int64_t dim, int64_t j0, int64_t n,
                               mtt__attention_tiles *a);
static void mtt__tile_scores(const mtt__attention_tile *t, int64_t dim, int64_t j0, int64_t n,
                             mtt__attention_tiles *a)
{
    mtt__load_block(t->k_t, 0, dim, j0, n, a->k, MTT__TILE);
    mtt__multiply_block(t->m, n, dim, a->q, MTT__MAX_HEAD, 1, a->k, MTT__TILE, a->s, MTT__TILE);
}

static void mtt__tile_values(const mtt__attention_tile *t, int64_t dim, int64_t j0, int64_t n,
                             mtt__attention_tiles *a)
{
    mtt__load_block(t->v, j0, n, 0, dim, a->v, MTT__MAX_HEAD);
    mtt__multiply_block(t->m, dim, n, a->s, MTT__TILE, 1, a->v, MTT__MAX_HEAD, a->o, MTT__MAX_HEAD);
}

/* The forward pass of a tile of queries (algorithm 1 with queries in the outer loop), an online softmax. Each
   query has a running maximum M and a running sum L. Each tile of keys, with scores S = Q K^T / sqrt(D),
   updates both and rescales the output, so O = softmax(S) V is exact:
     M' = max(M, rowmax S)        P = e^(S - M')
     L' = e^(M - M') L + rowsum P
     O' = e^(M - M') O + mask P V
   At the end O is divided by L. Keeps lse = M + log L, from which the backward pass recomputes P. */
static void mtt__attend(const mtt_op *op, const mtt__attention_tile *t, mtt__tile_product *scores,
                        mtt__tile_product *values)
{
    enum { side = MTT__TILE, stride = MTT__MAX_HEAD };
    mtt__attention_tiles *a = (mtt__attention_tiles *)(void *)mtt__tiles(op);
    float row_max[side], row_sum[side], scale = mtt__score_scale(op);
    int64_t dim = op->shape->d_head, m = t->m, rows = mtt__round_up(m, 8), j0, i, j;
    mtt__load_block(t->q, t->i0, m, 0, dim, a->q, stride);
    memset(a->o, 0, (size_t)(rows * stride) * sizeof(float));
    for (i = 0; i < side; i++) row_max[i] = -3.4e38f, row_sum[i] = 0;
    for (j0 = mtt__first_key(op->shape->window, t->place) / side * side; j0 < t->place + m; j0 += side) {
        int64_t n = mtt__min(side, t->keys - j0), low, high;
        memset(a->s, 0, (size_t)(rows * side) * sizeof(float));
        scores(t, dim, j0, n, a);
        for (i = 0; i < m; i++) {
            float *p = a->s + i * side, *out = a->o + i * stride, most, rescale;
            mtt__attended(op->shape, t->place + i, j0, &low, &high);
            for (j = 0; j < side; j++) p[j] = j < low || j >= high ? 0.0f : p[j] * scale;
            most = fmaxf(row_max[i], mtt__largest(p + low, high - low));
            rescale = mtt__exp(row_max[i] - most);
            for (j = low; j < high; j++) p[j] = mtt__exp(p[j] - most);
            row_sum[i] = row_sum[i] * rescale + mtt__sum(p + low, high - low);
            for (j = 0; j < dim; j++) out[j] *= rescale;
            row_max[i] = most;
            if (t->control) mtt__drop(op, t->control, t->element + i * t->keys + j0, n, p);
        }
        values(t, dim, j0, n, a);
    }
    for (i = 0; i < m; i++) {
        for (j = 0; j < dim; j++) a->o[i * stride + j] /= row_sum[i];
        if (t->lse) t->lse[i] = row_max[i] + (float)log((double)row_sum[i]); /* systems' logf differ */
    }
    mtt__store_block(t->out, t->i0, m, 0, dim, a->o, stride);
}

static void mtt__flash_tile(const mtt_op *op, const mtt_op_flash *f, int64_t head, int64_t i0)
{
    int64_t seq = op->shape->seq_len, row = head * seq + i0;
    mtt__attention_tile t = {mtt__head(op, f->qkv, MTT__Q, head),
                             mtt__head(op, f->qkv, MTT__K | MTT__TRANSPOSED, head),
                             mtt__head(op, f->qkv, MTT__V, head), mtt__head(op, f->out, MTT__OUT, head),
                             i0, mtt__min(MTT__TILE, seq - i0), i0, seq,
                             f->control, row * seq, (float *)f->lse->data + row};
    mtt__attend(op, &t, mtt__tile_scores, mtt__tile_values);
}

static void mtt__cpu_flash(const mtt_op *op, const mtt_op_flash *f)
{
    int64_t tiles = mtt__ceil_div(op->shape->seq_len, MTT__TILE), jobs = tiles * mtt__heads(op), i;
    MTT__OMP(omp parallel for schedule(dynamic, 1) if (jobs * MTT__TILE * MTT__TILE > MTT__ALONE))
    for (i = 0; i < jobs; i++) mtt__flash_tile(op, f, i / tiles, i % tiles * MTT__TILE);
}

/* For the backward pass of a head: tiles of m queries from i0 up and n keys from j0 up, their P and dS. */
typedef struct mtt__flash_pair {
    int64_t head, i0, m, j0, n;
    mtt__tile q, d_out, k, k_t, v_t, dk, dv; /* dq is in dk's place */
    mtt__score_tile p, ds;
    float delta[MTT__TILE]; /* rowsum(dO O) */
} mtt__flash_pair;

static void mtt__load_queries(const mtt_op *op, const mtt_op_flash_backward *f, int64_t i0,
                              mtt__flash_pair *t)
{
    enum { stride = MTT__MAX_HEAD };
    int64_t dim = op->shape->d_head, m = mtt__min(MTT__TILE, op->shape->seq_len - i0), i;
    mtt__view o = mtt__head(op, f->out, MTT__OUT, t->head);
    float out[MTT__MAX_HEAD];
    t->i0 = i0;
    t->m = m;
    mtt__load_block(mtt__head(op, f->qkv, MTT__Q, t->head), i0, m, 0, dim, t->q, stride);
    mtt__load_block(mtt__head(op, f->d_out, MTT__OUT, t->head), i0, m, 0, dim, t->d_out, stride);
    for (i = 0; i < m; i++) {
        mtt__load(o.t, o.first + (i0 + i) * o.row, dim, out);
        t->delta[i] = mtt__dot(t->d_out + i * stride, out, dim);
    }
}

static void mtt__load_keys(const mtt_op *op, const mtt_op_flash_backward *f, int64_t j0, mtt__flash_pair *t)
{
    enum { side = MTT__TILE };
    int64_t dim = op->shape->d_head, n = mtt__min(side, op->shape->seq_len - j0);
    t->j0 = j0;
    t->n = n;
    mtt__load_block(mtt__head(op, f->qkv, MTT__K, t->head), j0, n, 0, dim, t->k, MTT__MAX_HEAD);
    mtt__load_block(mtt__head(op, f->qkv, MTT__K | MTT__TRANSPOSED, t->head), 0, dim, j0, n, t->k_t, side);
    mtt__load_block(mtt__head(op, f->qkv, MTT__V | MTT__TRANSPOSED, t->head), 0, dim, j0, n, t->v_t, side);
}

/* P = mask e^(S - lse) and dS = e^(S - lse) (mask dP - delta) / sqrt(d_head) with dP = dO V^T. With
   lse = m + log l, e^(S - lse) is divided by its row's sum already. */
static void mtt__flash_gradients(const mtt_op *op, const mtt_op_flash_backward *f, mtt__flash_pair *t)
{
    enum { side = MTT__TILE, stride = MTT__MAX_HEAD };
    const mtt_shape *d = op->shape;
    int64_t first = t->head * d->seq_len + t->i0, dim = d->d_head, i, j, low, high;
    float mask[side], scale = mtt__score_scale(op), d_scale = mtt__attends_one(d) ? 0.0f : scale;
    memset(t->p, 0, sizeof(t->p));
    memset(t->ds, 0, sizeof(t->ds));
    mtt__multiply_block(t->m, t->n, dim, t->q, stride, 1, t->k_t, side, t->p, side);
    mtt__multiply_block(t->m, t->n, dim, t->d_out, stride, 1, t->v_t, side, t->ds, side);
    for (i = 0; i < t->m; i++) {
        float *p = t->p + i * side, *ds = t->ds + i * side, lse = ((const float *)f->lse->data)[first + i];
        for (j = 0; j < t->n; j++) mask[j] = 1.0f;
        mtt__drop(op, f->control, (first + i) * d->seq_len + t->j0, t->n, mask);
        mtt__attended(d, t->i0 + i, t->j0, &low, &high);
        for (j = 0; j < side; j++)
            if (j < low || j >= high) p[j] = ds[j] = 0;
        for (j = low; j < high; j++) {
            float e = mtt__exp(p[j] * scale - lse);
            p[j] = e * mask[j];
            ds[j] = e * (mask[j] * ds[j] - t->delta[i]) * d_scale;
        }
    }
}

/* m tokens of a part of d_qkv, from a tile. Before 8 bits, they are rounded to 16. */
static void mtt__store_gradients(const mtt_op *op, const mtt_op_flash_backward *f, int part, int64_t head,
                                 int64_t i0, int64_t m, float *tile)
{
    enum { stride = MTT__MAX_HEAD };
    int64_t dim = op->shape->d_head, i, k;
    for (i = 0; i < m && f->d_qkv_t; i++)
        for (k = 0; k < dim; k++) tile[i * stride + k] = mtt__from_bf16(mtt__to_bf16(tile[i * stride + k]));
    mtt__store_block(mtt__head(op, f->d_qkv, part, head), i0, m, 0, dim, tile, stride);
}

/* Computes one tile of keys: dV = P^T dO and dK = dS^T Q, summed over the heads of queries that share it,
   from `head` up, and their tiles of queries that attend it. */
static void mtt__flash_backward_keys(const mtt_op *op, const mtt_op_flash_backward *f, int64_t head,
                                     int64_t j0)
{
    enum { side = MTT__TILE, stride = MTT__MAX_HEAD };
    const mtt_shape *d = op->shape;
    int64_t end = d->window ? mtt__min(d->seq_len, j0 + side - 1 + d->window) : d->seq_len, i0;
    mtt__flash_pair *t = (mtt__flash_pair *)(void *)mtt__tiles(op);
    t->head = head;
    mtt__load_keys(op, f, j0, t);
    memset(t->dk, 0, sizeof(t->dk));
    memset(t->dv, 0, sizeof(t->dv));
    for (; t->head < head + d->heads / d->heads_kv; t->head++)
        for (i0 = j0; i0 < end; i0 += side) {
            mtt__load_queries(op, f, i0, t);
            mtt__flash_gradients(op, f, t);
            mtt__multiply_block(t->n, d->d_head, t->m, t->p, 1, side, t->d_out, stride, t->dv, stride);
            mtt__multiply_block(t->n, d->d_head, t->m, t->ds, 1, side, t->q, stride, t->dk, stride);
        }
    mtt__store_gradients(op, f, MTT__K, head, j0, t->n, t->dk);
    mtt__store_gradients(op, f, MTT__V, head, j0, t->n, t->dv);
}

/* Computes one tile of queries: dQ = dS K, summed over the tiles of keys. It computes S and dP again: two
   more products besides five, instead of an FP32 accumulator for dQ. */
static void mtt__flash_backward_queries(const mtt_op *op, const mtt_op_flash_backward *f, int64_t head,
                                        int64_t i0)
{
    enum { side = MTT__TILE, stride = MTT__MAX_HEAD };
    mtt__flash_pair *t = (mtt__flash_pair *)(void *)mtt__tiles(op);
    float *dq = t->dk;
    int64_t j0;
    t->head = head;
    mtt__load_queries(op, f, i0, t);
    memset(dq, 0, sizeof(t->dk));
    for (j0 = mtt__first_key(op->shape->window, i0) / side * side; j0 < i0 + t->m; j0 += side) {
        mtt__load_keys(op, f, j0, t);
        mtt__flash_gradients(op, f, t);
        mtt__multiply_block(t->m, op->shape->d_head, t->n, t->ds, side, 1, t->k, stride, dq, stride);
    }
    mtt__store_gradients(op, f, MTT__Q, head, i0, t->m, dq);
}

/* A tile of keys gets dK and dV in a job of its own, once for the heads that share it, and a tile of queries
   dQ: so no two threads add to a sum. */
static void mtt__cpu_flash_backward(const mtt_op *op, const mtt_op_flash_backward *f)
{
    int64_t tiles = mtt__ceil_div(op->shape->seq_len, MTT__TILE), jobs = tiles * mtt__heads(op), i;
    int group = op->shape->heads / op->shape->heads_kv;
    MTT__OMP(omp parallel for schedule(dynamic, 1) if (jobs * MTT__TILE * MTT__TILE > MTT__ALONE))
    for (i = 0; i < 2 * jobs; i++) {
        int64_t head = i / 2 / tiles, first = i / 2 % tiles * MTT__TILE;
        if (i % 2) mtt__flash_backward_queries(op, f, head, first);
        else if (head % group == 0) mtt__flash_backward_keys(op, f, head, first);
    }
}

/* ---- matrix products ---- */

/* C = scale A B, or A B + bias, or C + A B where `add` is set. Or scale times the sum of `members` products,
   whose operands are a_next and b_next elements apart. `a` is A transposed, so both operands are k
   rows of vectors side by side. With `pairs`, rows hold words: two BF16 values, neighbours along k. */
typedef struct mtt__product {
    const mtt_op *op;
    mtt__view a, b, c;
    const mtt_tensor *bias;
    float scale;
    int add, pairs, members;
    int64_t a_next, b_next;
    int64_t side, down, tiles; /* of tiles of C: rows and columns, tiles in a column of tiles, all tiles */
    mtt_tensor words[2];       /* operands in BF16, as floats */
} mtt__product;

/* Views an operand in BF16 as rows of words. A vector that is contiguous in memory consists of words; of
   others mtt__load_stripe joins two rows. 0 = impossible: k is odd, or a vector begins within a word. */
static int mtt__view_words(mtt__view *v, mtt_tensor *words)
{
    if (v->t->dtype != MTT_BF16_BITS || v->m % 2) return 0;
    v->m /= 2;
    if (v->column == 1) return 1;
    if (v->first % 2 || v->column % 2) return 0;
    *words = *v->t;
    words->dtype = MTT_F32;
    v->t = words;
    v->first /= 2;
    v->column /= 2;
    return 1;
}

/* Tiles have 128 rows and columns, since smaller ones copy operands more often and 256 were 5 % slower. Where
   that makes few tiles, they have 64, to keep more threads busy. The side changes no bit of C. */
static void mtt__product_of(mtt__product *g, const mtt_op *op, mtt__view a, mtt__view b, mtt__view c)
{
    int64_t large = mtt__ceil_div(c.m, MTT__SIDE) * mtt__ceil_div(c.n, MTT__SIDE);
    memset(g, 0, sizeof(*g));
    g->op = op;
    g->scale = 1;
    g->members = 1;
    g->a = mtt__transposed(a);
    g->b = b;
    g->c = c;
    g->pairs = mtt__has_pairs() && mtt__view_words(&g->a, &g->words[0]) &&
               mtt__view_words(&g->b, &g->words[1]);
    if (!g->pairs) g->a = mtt__transposed(a), g->b = b;
    g->side = large < 16 ? MTT__SIDE / 2 : MTT__SIDE;
    g->down = mtt__ceil_div(c.m, g->side);
    g->tiles = g->down * mtt__ceil_div(c.n, g->side);
}

/* Packs k rows from p0 up of n vectors from j0 up. */
static void mtt__load_stripe(const mtt__product *g, mtt__view v, int64_t p0, int64_t k, int64_t j0,
                             int64_t n, float *out)
{
    int64_t p, j;
    if (!g->pairs || v.t->dtype == MTT_F32) {
        mtt__load_block(v, p0, k, j0, n, out, MTT__STRIPE);
        return;
    }
    for (p = 0; p < k; p++) {
        const uint16_t *low = (const uint16_t *)v.t->data + v.first + 2 * (p0 + p) * v.row + j0;
        uint32_t words[MTT__STRIPE] = {0};
        for (j = 0; j < n; j++) words[j] = (uint32_t)low[j] | (uint32_t)low[v.row + j] << 16;
        memcpy(out + p * MTT__STRIPE, words, sizeof(words));
    }
}

/* Sets what a tile's sums start from: C, the bias or 0. */
static void mtt__start_tile(const mtt__product *g, int64_t i, int64_t m, int64_t j, int64_t n, float *out)
{
    int64_t r;
    memset(out, 0, MTT__SIDE * MTT__SIDE * sizeof(float));
    for (r = 0; r < m && (g->add || g->bias); r++)
        if (g->add) mtt__load(g->c.t, g->c.first + (i + r) * g->c.row + j, n, out + r * MTT__SIDE);
        else mtt__load(g->bias, j, n, out + r * MTT__SIDE);
}

/* Adds MTT__DEPTH terms, from row p on, to a tile of C at row i and column j. It packs A's vectors, then B's,
   a stripe of 32 at a time, which stays in the L1 cache while A's pass by. */
static void mtt__add_terms(const mtt__product *g, mtt__view left, mtt__view right, int64_t i, int64_t m,
                           int64_t j, int64_t n, int64_t p, float *c)
{
    enum { stripe = MTT__STRIPE, side = MTT__SIDE, depth = MTT__DEPTH };
    float *a = c + side * side, *b = a + side * depth;
    mtt__multiplier *multiply = g->pairs ? mtt__multiply_pairs : mtt__multiply_block;
    int along = g->a.column != 1; /* A's vectors are contiguous, and stay so; B's are always side by side */
    int64_t k = mtt__min(depth, g->a.m - p), row = along ? depth : 1, column = along ? 1 : stripe, r, s;
    for (r = 0; r < m; r += stripe) {
        int64_t rows = mtt__min(stripe, m - r);
        if (along) mtt__load_block(mtt__transposed(left), i + r, rows, p, k, a + r * depth, depth);
        else mtt__load_stripe(g, left, p, k, i + r, rows, a + r * depth);
    }
    for (s = 0; s < n; s += stripe) {
        mtt__load_stripe(g, right, p, k, j + s, mtt__min(stripe, n - s), b);
        for (r = 0; r < m; r += stripe)
            multiply(mtt__min(stripe, m - r), stripe, k, a + r * depth, row, column, b, stripe,
                     c + r * side + s, side);
    }
}

/* Makes one tile of C, on one thread. The order of terms depends on k alone. A depth of 128 is 5 % faster in
   FP32, but makes the error of a sum of 256 terms a third larger. */
static void mtt__product_tile(const mtt__product *g, int64_t tile)
{
    float *c = mtt__tiles(g->op);
    int64_t i = tile % g->down * g->side, m = mtt__min(g->side, g->c.m - i), p, r;
    int64_t j = tile / g->down * g->side, n = mtt__min(g->side, g->c.n - j);
    mtt__view left = g->a, right = g->b;
    int member;
    mtt__start_tile(g, i, m, j, n, c);
    for (member = 0; member < g->members; member++) {
        for (p = 0; p < g->a.m; p += MTT__DEPTH) mtt__add_terms(g, left, right, i, m, j, n, p, c);
        left.first += g->a_next;
        right.first += g->b_next;
    }
    for (r = 0; r < m * MTT__SIDE && g->scale != 1; r++) c[r] *= g->scale;
    mtt__store_block(g->c, i, m, j, n, c, MTT__SIDE);
}

/* C = scale A B + bias, or C += scale A B where `add` is set, by a BLAS. 1 = done, 0 = not in FP32 or no
   BLAS. Each thread calls it for tiles of its own. It has no threads inside: OpenBLAS's sums, and thus the
   bits, would depend on their number. If OpenMP makes this region serial, OpenBLAS would wait for threads
   that it does not get, for ever, if omp_get_max_threads were not 1 in the region. */
static int mtt__blas_gemm(mtt__view a, mtt__view b, mtt__view c, const mtt_tensor *bias, int add, float scale)
{
#ifdef MTT_CBLAS
    enum { down_side = 128, across_side = 512 };
    int64_t across = mtt__ceil_div(c.n, across_side), tiles = mtt__ceil_div(c.m, down_side) * across, tile;
    if (a.t->dtype != MTT_F32 || b.t->dtype != MTT_F32 || c.t->dtype != MTT_F32) return 0;
    if (a.row * a.column > INT_MAX || b.row * b.column > INT_MAX) return 0;
    if (a.n > INT_MAX || c.row > INT_MAX) return 0;
    MTT__OMP(omp parallel for schedule(dynamic))
    for (tile = 0; tile < tiles; tile++) {
        int64_t i = tile / across * down_side, j = tile % across * across_side, r;
        int rows = (int)mtt__min(down_side, c.m - i), columns = (int)mtt__min(across_side, c.n - j);
        float *out = (float *)c.t->data + c.first + i * c.row + j;
        size_t bytes = (size_t)columns * sizeof(float);
        for (r = 0; r < (bias ? rows : 0); r++) memcpy(out + r * c.row, (float *)bias->data + j, bytes);
        mtt__one_thread();
        cblas_sgemm(CblasRowMajor, a.column == 1 ? CblasNoTrans : CblasTrans,
                    b.column == 1 ? CblasNoTrans : CblasTrans, rows, columns, (int)a.n, scale,
                    (const float *)a.t->data + a.first + i * a.row, (int)(a.row * a.column),
                    (const float *)b.t->data + b.first + j * b.column, (int)(b.row * b.column),
                    bias || add ? 1.0f : 0.0f, out, (int)c.row);
    }
    return 1;
#else
    (void)a, (void)b, (void)c, (void)bias, (void)add, (void)scale;
    return 0;
#endif
}

/* Computes a product in another way; 0: it does not take this one. */
typedef int mtt__product_function(const mtt__product *g);
MTT_IF_GENERATOR(static mtt__product_function mtt__few_rows;)

/* C = A B + bias, or C += A B where `add` is set, or C = scale A B: one parallel region, in which a late
   thread holds up no other. */
static void mtt__gemm(const mtt_op *op, mtt__view a, mtt__view b, mtt__view c, const mtt_tensor *bias,
                      int add, float scale)
{
    mtt__product g;
    int64_t tile;
    mtt__product_of(&g, op, a, b, c);
    g.bias = bias;
    g.add = add;
    g.scale = scale;
    if (MTT_IF_GENERATOR(mtt__few_rows(&g) ||) mtt__blas_gemm(a, b, c, bias, add, scale)) return;
    MTT__OMP(omp parallel for schedule(dynamic, 1) if (c.m * c.n * a.n > 32 * MTT__ALONE))
    for (tile = 0; tile < g.tiles; tile++) mtt__product_tile(&g, tile);
}

/* sums (+)= the sum over rows of dy, or of dy xhat if x and its statistics are given, with
   xhat = (x - mean) rstd. `add` decides whether earlier sums stay. */
static void mtt__sum_rows(const mtt_tensor *dy, const mtt_tensor *x, const mtt_tensor *stats,
                          const mtt_tensor *sums, int add)
{
    enum { strip = 64 };
    int64_t n = mtt__width(dy), rows = mtt__rows(dy), stripe;
    MTT__THREADS(rows * n)
    for (stripe = 0; stripe < n; stripe += strip) {
        float gs[strip], xs[strip], sum[strip] = {0}, *out = (float *)sums->data + stripe;
        int64_t width = mtt__min(strip, n - stripe), r, k;
        for (r = 0; r < rows; r++) {
            const float *g = mtt__read(dy, r * n + stripe, width, gs);
            if (x) {
                const float *v = mtt__read(x, r * n + stripe, width, xs),
                            *s = (const float *)stats->data + 2 * r;
                for (k = 0; k < width; k++) sum[k] += g[k] * (v[k] - s[0]) * s[1];
            } else
                for (k = 0; k < width; k++) sum[k] += g[k];
        }
        for (k = 0; k < width; k++) out[k] = sum[k] + (add ? out[k] : 0.0f);
    }
}

/* ---- embedding ---- */

/* x = dropout(wte[token] + position) */
static void mtt__cpu_embed(const mtt_op *op, const mtt_op_embed *o)
{
    const int32_t *tokens = (const int32_t *)o->tokens->data;
    int64_t width = op->shape->d_model, row;
    MTT__THREADS(op->shape->rows * width)
    for (row = 0; row < op->shape->rows; row++) {
        float *x = mtt__tiles(op), *buffer = x + width;
        int64_t place = row % op->shape->seq_len;
        mtt__load(o->wte, tokens[row] * width, width, x);
        if (o->positions)
            mtt__add_block(mtt__read(o->positions, place * width, width, buffer), x, width);
        mtt__drop(op, o->control, row * width, width, x);
        mtt__store(o->x, row * width, width, x);
    }
}

/* d_wte[token] += mask dx and d_wpe[t] += mask dx, row after row: a thread has a stripe of columns. */
static void mtt__cpu_embed_backward(const mtt_op *op, const mtt_op_embed_backward *o)
{
    enum { strip = 32 };
    const int32_t *tokens = (const int32_t *)o->tokens->data;
    float *d_wte = o->d_wte ? (float *)o->d_wte->data : NULL;
    float *d_wpe = o->d_wpe ? (float *)o->d_wpe->data : NULL;
    int64_t width = op->shape->d_model, stripe;
    if (d_wte && !op->adds) memset(d_wte, 0, o->d_wte->bytes);
    if (d_wpe) memset(d_wpe, 0, o->d_wpe->bytes);
    MTT__THREADS(op->shape->rows * width)
    for (stripe = 0; stripe < width; stripe += strip) {
        int64_t n = mtt__min(strip, width - stripe), row;
        for (row = 0; row < op->shape->rows; row++) {
            float dx[strip];
            mtt__load(o->dx, row * width + stripe, n, dx);
            mtt__drop(op, o->control, row * width + stripe, n, dx);
            if (d_wte) mtt__add_block(dx, d_wte + tokens[row] * width + stripe, n);
            if (d_wpe) mtt__add_block(dx, d_wpe + row % op->shape->seq_len * width + stripe, n);
        }
    }
}

static void mtt__cpu_pick_row(const mtt_op *op, const mtt_op_pick_row *o)
{
    size_t bytes = o->row->bytes;
    (void)op;
    memcpy(o->row->data, (const char *)o->x->data + (size_t)mtt__control(o->control)->row * bytes, bytes);
}

/* ---- norms ---- */

/* y = (x - mean) rstd gain + shift with rstd = 1 / sqrt(variance + eps). The variance is the biased one and
   takes a second pass. RMSNorm has 0 as its mean, and no shift. Keeps mean and rstd for the backward pass. */
static void mtt__cpu_norm(const mtt_op *op, const mtt_op_norm *o)
{
    int64_t width = op->shape->d_model, rows = mtt__rows(o->y), row;
    MTT__THREADS(rows * width)
    for (row = 0; row < rows; row++) {
        float *y = mtt__tiles(op), *xs = y + width, *gains = xs + width, *shifts = gains + width;
        const float *x = mtt__read(o->x, row * width, width, xs), *gain = mtt__read(o->gain, 0, width, gains);
        const float *shift = o->shift ? mtt__read(o->shift, 0, width, shifts) : NULL;
        float mean = shift ? mtt__sum(x, width) / (float)width : 0.0f, lane[MTT__LANES] = {0}, rstd,
              *stats = (float *)o->stats->data + 2 * row;
        int64_t i, k;
        for (i = 0; i < width; i += 8)
            for (k = 0; k < 8; k++) lane[k] += (x[i + k] - mean) * (x[i + k] - mean);
        rstd = 1.0f / sqrtf(mtt__sum_lanes(lane) / (float)width + op->shape->norm_eps);
        stats[0] = mean;
        stats[1] = rstd;
        for (k = 0; k < width && shift; k++) y[k] = (x[k] - mean) * rstd * gain[k] + shift[k];
        for (k = 0; k < width && !shift; k++) y[k] = x[k] * rstd * gain[k];
        mtt__store(o->y, row * width, width, y);
    }
}

/* A fused operation is its parts in order. */
static void mtt__cpu_residual_norm(const mtt_op *op, const mtt_op_residual_norm *o)
{
    mtt_op_residual residual = {o->x, o->branch, o->control, o->sum};
    mtt_op_norm norm = {o->sum, o->gain, o->shift, o->y, o->stats};
    mtt__cpu_residual(op, &residual);
    mtt__cpu_norm(op, &norm);
}

/* With xhat = (x - mean) rstd and g = dy gain: d_gain (+)= sum over rows of dy xhat, d_shift (+)= sum over
   rows of dy, dx = rstd (g - mean(g) - xhat mean(g xhat)) [+ joined, the residual's gradient], d_bias = sum
   over rows of dx as it is stored. RMSNorm: without mean(g) and d_shift. */
static void mtt__cpu_norm_backward(const mtt_op *op, const mtt_op_norm_backward *o)
{
    int64_t width = op->shape->d_model, rows = mtt__rows(o->dy), row;
    if (o->d_gain) mtt__sum_rows(o->dy, o->x, o->stats, o->d_gain, 0);
    if (o->d_shift) mtt__sum_rows(o->dy, NULL, NULL, o->d_shift, 0);
    MTT__THREADS(rows * width)
    for (row = 0; row < rows; row++) {
        float *g = mtt__tiles(op), *xhat = g + width, *buffer = xhat + width, mean_g, mean_gx;
        const float *stats = (const float *)o->stats->data + 2 * row,
                    *gain = mtt__read(o->gain, 0, width, buffer);
        const float mean = stats[0], rstd = stats[1];
        int64_t k;
        mtt__load(o->dy, row * width, width, g);
        mtt__load(o->x, row * width, width, xhat);
        for (k = 0; k < width; k++) g[k] *= gain[k];
        for (k = 0; k < width; k++) xhat[k] = (xhat[k] - mean) * rstd;
        mean_g = op->shape->norm == MTT_NORM_LAYER ? mtt__sum(g, width) / (float)width : 0.0f;
        mean_gx = mtt__dot(g, xhat, width) / (float)width;
        for (k = 0; k < width; k++) g[k] = rstd * (g[k] - mean_g - xhat[k] * mean_gx);
        if (o->joined) mtt__add_block(mtt__read(o->joined, row * width, width, xhat), g, width);
        mtt__store(o->dx, row * width, width, g);
    }
    if (o->d_bias) mtt__sum_rows(o->dx, NULL, NULL, o->d_bias, 0);
}

/* ---- linear layers ---- */

/* y = x W + b, or x W^T + b for a transposed weight; scale x W for an adapter's A */
static void mtt__cpu_linear(const mtt_op *op, const mtt_op_linear *o)
{
    mtt__gemm(op, mtt__matrix(o->x, 0), mtt__matrix(o->weight, o->weight->transposed), mtt__matrix(o->y, 0),
              o->bias, 0, mtt__op_scale(op));
}

/* dx = scale dy W^T */
static void mtt__cpu_linear_backward_input(const mtt_op *op, const mtt_op_linear_backward_input *o)
{
    mtt__gemm(op, mtt__matrix(o->dy, 0), mtt__matrix(o->weight, !o->weight->transposed),
              mtt__matrix(o->dx, 0), NULL, 0, mtt__op_scale(op));
}

/* d_weight (+)= x^T dy, or dy^T x for a transposed weight; d_bias (+)= sum over rows of dy */
static void mtt__cpu_linear_backward_weight(const mtt_op *op, const mtt_op_linear_backward_weight *o)
{
    int transposed = o->d_weight && o->d_weight->transposed;
    const mtt_tensor *left = transposed ? o->dy : o->x, *right = transposed ? o->x : o->dy;
    if (o->d_weight)
        mtt__gemm(op, mtt__matrix(left, 1), mtt__matrix(right, 0), mtt__matrix(o->d_weight, 0), NULL,
                  op->adds, 1);
    if (o->d_bias) mtt__sum_rows(o->dy, NULL, NULL, o->d_bias, op->adds);
}

/* pre = x W + b, y = GELU(pre) if there is a y */
static void mtt__cpu_linear_gelu(const mtt_op *op, const mtt_op_linear_gelu *o)
{
    mtt_op_linear linear = {o->x, o->weight, o->bias, o->pre};
    mtt__cpu_linear(op, &linear);
    if (o->y) mtt__activate_rows(MTT_MLP_GELU, o->pre, o->y);
}

/* dx = (dy W^T) GELU'(pre); d_bias (+)= sum over rows of dx as it is stored */
static void mtt__cpu_linear_backward_gelu(const mtt_op *op, const mtt_op_linear_backward_gelu *o)
{
    mtt_op_linear_backward_input linear = {o->dy, o->weight, o->dx};
    mtt_op_activation_backward gelu = {o->dx, o->pre, o->dx, NULL, NULL};
    mtt__cpu_linear_backward_input(op, &linear);
    mtt__slope_rows(MTT_MLP_GELU, &gelu);
    if (o->d_bias) mtt__sum_rows(o->dx, NULL, NULL, o->d_bias, 0);
}

/* ---- rotary positions, and norms of q and k ---- */

/* Rotates the pairs of a head's D columns: (a, b) becomes (a cos - b sin, b cos + a sin); backward = 1: by
   the negative angles. `angles` holds cos and sin of each pair. */
static void mtt__rotate(float *x, const float *angles, int64_t dim, int interleaved, int backward)
{
    int64_t i, step = interleaved ? 2 : 1, apart = interleaved ? 1 : dim / 2;
    for (i = 0; i < dim / 2; i++) {
        float a = x[step * i], b = x[step * i + apart], c = angles[2 * i];
        float s = backward ? -angles[2 * i + 1] : angles[2 * i + 1];
        x[step * i] = a * c - b * s;
        x[step * i + apart] = b * c + a * s;
    }
}

/* 1 / sqrt(mean x^2 + eps) */
static float mtt__head_rstd(const mtt_shape *d, const float *x)
{
    return 1.0f / sqrtf(mtt__dot(x, x, d->d_head) / (float)d->d_head + d->norm_eps);
}

/* y = qkv, in which each head x of q and k becomes x rstd gain, rotated; y may be qkv. */
static void mtt__cpu_rotary(const mtt_op *op, const mtt_op_rotary *o)
{
    const mtt_shape *d = op->shape;
    int64_t dim = d->d_head, heads = d->heads, turned = heads + d->heads_kv, row;
    MTT__THREADS(mtt__elements(o->y))
    for (row = 0; row < d->rows; row++) {
        float x[MTT__MAX_HEAD], gains[2][MTT__MAX_HEAD];
        int64_t head, at = row * mtt__width(o->y), k;
        if (o->q_gain) mtt__load(o->q_gain, 0, dim, gains[0]);
        if (o->k_gain) mtt__load(o->k_gain, 0, dim, gains[1]);
        for (head = 0; head < turned + d->heads_kv; head++, at += dim) {
            mtt__load(o->qkv, at, dim, x);
            if (head < turned && o->q_gain) {
                float rstd = mtt__head_rstd(d, x);
                for (k = 0; k < dim; k++) x[k] *= rstd * gains[head >= heads][k];
            }
            if (head < turned && o->angles)
                mtt__rotate(x, (const float *)o->angles->data + row % d->seq_len * dim, dim,
                            d->rotary_interleaved, 0);
            mtt__store(o->y, at, dim, x);
        }
    }
}

static void mtt__cpu_linear_rotary(const mtt_op *op, const mtt_op_linear_rotary *o)
{
    mtt_op_linear linear = {o->x, o->weight, o->bias, o->y};
    mtt_op_rotary rotary = {o->y, o->angles, o->q_gain, o->k_gain, o->y};
    mtt__cpu_linear(op, &linear);
    mtt__cpu_rotary(op, &rotary);
}

/* For each head of q and k of a row, with g = dy rotated back and xhat = x rstd: d_gain += g xhat and
   dx = rstd (g gain - xhat mean(g gain xhat)). Without gains dx = g. */
static void mtt__rotary_backward_row(const mtt_op *op, const mtt_op_rotary_backward *o, int64_t row,
                                     float sums[2][MTT__MAX_HEAD])
{
    const mtt_shape *d = op->shape;
    int64_t dim = d->d_head, head, at = row * mtt__width(o->dx), k;
    float g[MTT__MAX_HEAD], x[MTT__MAX_HEAD], gains[MTT__MAX_HEAD];
    for (head = 0; head < d->heads + d->heads_kv; head++, at += dim) {
        int of_k = head >= d->heads;
        mtt__load(o->dy, at, dim, g);
        if (o->angles)
            mtt__rotate(g, (const float *)o->angles->data + row % d->seq_len * dim, dim,
                        d->rotary_interleaved, 1);
        if (o->q_gain) {
            float rstd, mean;
            mtt__load(o->qkv, at, dim, x);
            mtt__load(of_k ? o->k_gain : o->q_gain, 0, dim, gains);
            rstd = mtt__head_rstd(d, x);
            for (k = 0; k < dim; k++) x[k] *= rstd;
            for (k = 0; k < dim; k++) sums[of_k][k] += g[k] * x[k];
            for (k = 0; k < dim; k++) g[k] *= gains[k];
            mean = mtt__dot(g, x, dim) / (float)dim;
            for (k = 0; k < dim; k++) g[k] = rstd * (g[k] - x[k] * mean);
        }
        mtt__store(o->dx, at, dim, g);
    }
}

/* In place: dx is dy. Sums are made of PIECES pieces of all rows, whatever the number of threads. */
static void mtt__cpu_rotary_backward(const mtt_op *op, const mtt_op_rotary_backward *o)
{
    enum { pieces = 64 };
    float (*sums)[2][MTT__MAX_HEAD] = (float (*)[2][MTT__MAX_HEAD])mtt__tiles(op);
    int64_t dim = op->shape->d_head, rows = op->shape->rows, piece, k;
    memset(sums, 0, pieces * sizeof(*sums));
    MTT__THREADS(mtt__elements(o->dx))
    for (piece = 0; piece < pieces; piece++) {
        int64_t row;
        for (row = piece * rows / pieces; row < (piece + 1) * rows / pieces; row++)
            mtt__rotary_backward_row(op, o, row, sums[piece]);
    }
    for (piece = 1; piece < pieces; piece++)
        for (k = 0; k < dim; k++) {
            sums[0][0][k] += sums[piece][0][k];
            sums[0][1][k] += sums[piece][1][k];
        }
    if (o->d_q_gain) memcpy(o->d_q_gain->data, sums[0][0], (size_t)dim * sizeof(float));
    if (o->d_k_gain) memcpy(o->d_k_gain->data, sums[0][1], (size_t)dim * sizeof(float));
}

/* ---- plain attention ---- */

/* C = scale A B for every head; the sum over the query heads that share it for a head of K or V */
static void mtt__heads_gemm(const mtt_op *op, float scale, const mtt_tensor *a, int a_part,
                            const mtt_tensor *b, int b_part, const mtt_tensor *c, int c_part)
{
    int group = op->shape->heads / op->shape->heads_kv;
    int members = c_part == MTT__K || c_part == MTT__V ? group : 1;
    int64_t i;
    MTT__THREADS(mtt__heads(op) * op->shape->seq_len * op->shape->seq_len)
    for (i = 0; i < mtt__heads(op); i += members) {
        mtt__view left = mtt__head(op, a, a_part, i), right = mtt__head(op, b, b_part, i);
        mtt__product g;
        int64_t tile;
        mtt__product_of(&g, op, left, right, mtt__head(op, c, c_part, i));
        g.scale = scale;
        g.members = members;
        g.a_next = mtt__head(op, a, a_part, i + 1).first - left.first;
        g.b_next = mtt__head(op, b, b_part, i + 1).first - right.first;
        for (tile = 0; tile < g.tiles; tile++) mtt__product_tile(&g, tile);
    }
}

/* S = Q K^T / sqrt(d_head), the whole square */
static void mtt__cpu_attention_scores(const mtt_op *op, const mtt_op_attention_scores *o)
{
    mtt__heads_gemm(op, mtt__score_scale(op), o->qkv, MTT__Q, o->qkv, MTT__K | MTT__TRANSPOSED, o->scores,
                    MTT__SQUARE);
}

/* P = softmax of the keys that each query attends, 0 elsewhere */
static void mtt__cpu_softmax(const mtt_op *op, const mtt_op_softmax *o)
{
    int64_t seq = op->shape->seq_len, rows = mtt__rows(o->scores), row;
    MTT__THREADS(rows * seq)
    for (row = 0; row < rows; row++) {
        float xs[MTT__BLOCK], p[MTT__BLOCK], sum = 0, most;
        int64_t first = row * seq, last = first + row % seq, at, n, k;
        int64_t low = first + mtt__first_key(op->shape->window, row % seq);
        most = mtt__row_largest(o->scores, low, last + 1);
        MTT__BLOCKS(at, n, low, last + 1) sum += mtt__exp_sum(mtt__read(o->scores, at, n, xs), n, most);
        MTT__BLOCKS(at, n, first, first + seq) {
            const float *x = mtt__read(o->scores, at, n, xs);
            for (k = 0; k < n; k++) p[k] = at + k < low || at + k > last ? 0.0f : mtt__exp(x[k] - most) / sum;
            mtt__store(o->probs, at, n, p);
        }
    }
}

/* O = P V */
static void mtt__cpu_attention_values(const mtt_op *op, const mtt_op_attention_values *o)
{
    mtt__heads_gemm(op, 1.0f, o->probs, MTT__SQUARE, o->qkv, MTT__V, o->out, MTT__OUT);
}

/* dP = dO V^T, dV = P^T dO */
static void mtt__cpu_attention_values_backward(const mtt_op *op, const mtt_op_attention_values_backward *o)
{
    mtt__heads_gemm(op, 1.0f, o->d_out, MTT__OUT, o->qkv, MTT__V | MTT__TRANSPOSED, o->d_probs, MTT__SQUARE);
    mtt__heads_gemm(op, 1.0f, o->probs, MTT__SQUARE | MTT__TRANSPOSED, o->d_out, MTT__OUT, o->d_qkv, MTT__V);
}

/* dS = P (mask dP - sum(mask dP P)), in place */
static void mtt__cpu_softmax_backward(const mtt_op *op, const mtt_op_softmax_backward *o)
{
    int64_t seq = op->shape->seq_len, rows = mtt__rows(o->d_probs), row;
    MTT__THREADS(rows * seq)
    for (row = 0; row < rows; row++) {
        float g[MTT__BLOCK], buffer[MTT__BLOCK], sum = 0;
        int64_t at, n, k, pass;
        for (pass = 0; pass < 2; pass++)
            MTT__BLOCKS(at, n, row * seq, (row + 1) * seq) {
                const float *p = mtt__read(o->probs, at, n, buffer);
                mtt__load(o->d_probs, at, n, g);
                mtt__drop(op, o->control, at, n, g);
                if (pass == 0) sum += mtt__dot(g, p, n);
                for (k = 0; k < n; k++) g[k] = p[k] * (g[k] - sum);
                if (pass == 1) mtt__store(o->d_scores, at, n, g);
            }
    }
}

/* dQ = dS K / sqrt(d_head), dK = dS^T Q / sqrt(d_head) */
static void mtt__cpu_attention_scores_backward(const mtt_op *op, const mtt_op_attention_scores_backward *o)
{
    float scale = mtt__score_scale(op);
    mtt__heads_gemm(op, scale, o->d_scores, MTT__SQUARE, o->qkv, MTT__K, o->d_qkv, MTT__Q);
    mtt__heads_gemm(op, scale, o->d_scores, MTT__SQUARE | MTT__TRANSPOSED, o->qkv, MTT__Q, o->d_qkv, MTT__K);
}

/* ---- loss ---- */

/* Three numbers for each row of logits, with lse = log(sum of e^x): the loss, which is lse - x[target]; 1 if
   x[target] is the largest; and lse. All are 0 where the target does not count. */
static void mtt__cpu_cross_entropy(const mtt_op *op, const mtt_op_cross_entropy *o)
{
    int64_t vocab = op->shape->vocab, rows = mtt__rows(o->losses), row;
    MTT__THREADS(rows * vocab)
    for (row = 0; row < rows; row++) {
        int32_t target = ((const int32_t *)o->targets->data)[row];
        int64_t first = row * mtt__width(o->logits), at, n;
        float buffer[MTT__BLOCK], *out = (float *)o->losses->data + 3 * row, most, x;
        double sum = 0;
        memset(out, 0, 3 * sizeof(float));
        if (target < 0) continue;
        most = mtt__row_largest(o->logits, first, first + vocab);
        MTT__BLOCKS(at, n, first, first + vocab)
            sum += mtt__exp_sum(mtt__read(o->logits, at, n, buffer), n, most);
        mtt__load(o->logits, first + target, 1, &x);
        out[2] = most + (float)log(sum);
        out[1] = x >= most;
        out[0] = out[2] - x;
    }
}

/* Computes the gradients of n logits of a row, from column j up: (softmax - [j = target]) * factor, 0 in the
   padding and where the target does not count. */
static void mtt__logit_block(const mtt_op *op, const mtt_op_cross_entropy_backward *o, float factor,
                             int64_t row, int64_t j, int64_t n, float *x)
{
    int32_t target = ((const int32_t *)o->targets->data)[row];
    float lse = ((const float *)o->losses->data)[3 * row + 2];
    int64_t live = mtt__min(n, (target < 0 ? 0 : op->shape->vocab) - j), k;
    mtt__load(o->logits, row * mtt__width(o->logits) + j, n, x);
    for (k = 0; k < live; k++) x[k] = mtt__exp(x[k] - lse) * factor;
    for (; k < n; k++) x[k] = 0;
    if (target >= j && target < j + n) x[target - j] -= factor;
}

static void mtt__cpu_cross_entropy_backward(const mtt_op *op, const mtt_op_cross_entropy_backward *o)
{
    float factor = mtt__loss_factor(mtt__control(o->control), mtt__counters(o->counters));
    int64_t rows = mtt__rows(o->losses), width = mtt__width(o->logits), row;
    MTT__THREADS(rows * width)
    for (row = 0; row < rows; row++) {
        float x[MTT__BLOCK];
        int64_t j, n;
        MTT__BLOCKS(j, n, 0, width) {
            mtt__logit_block(op, o, factor, row, j, n, x);
            mtt__store(o->d_logits, row * width + j, n, x);
        }
    }
}

/* The rows of a chunk, from row `first` of the micro-batch up. */
typedef struct mtt__loss_chunk {
    int64_t first;
    mtt_tensor x, targets, losses, logits, dx;
} mtt__loss_chunk;

/* Makes the gradients of a chunk's x, and of the head's weight and bias. Those of the logits take the logits'
   place. */
static void mtt__chunk_gradients(const mtt_op *op, const mtt_op_chunked_loss *o, mtt__loss_chunk *c)
{
    mtt_op_cross_entropy_backward d_loss = {&c->logits, &c->losses,  &c->targets,
                                            o->control, o->counters, &c->logits};
    mtt_op_linear_backward_input d_input = {&c->logits, o->weight, &c->dx};
    mtt_op_linear_backward_weight d_weight = {&c->x, &c->logits, o->d_weight, o->d_bias};
    mtt__cpu_cross_entropy_backward(op, &d_loss);
    mtt__cpu_linear_backward_input(op, &d_input);
    mtt__cpu_linear_backward_weight(op, &d_weight);
}

typedef void mtt__chunk_function(const mtt_op *op, const mtt_op_chunked_loss *o, mtt__loss_chunk *c);

/* Computes head, loss and their gradients for a few rows at a time, before the next chunk overwrites their
   logits. The weight's gradient adds up in FP32. */
static void mtt__loss_by_chunks(const mtt_op *op, const mtt_op_chunked_loss *o,
                                mtt__chunk_function *gradients)
{
    mtt_op part = *op;
    int64_t rows = op->shape->rows, first, count;
    for (first = 0; first < rows; first += count, part.adds = 1) {
        mtt__loss_chunk c;
        mtt_op_linear head = {&c.x, o->weight, o->bias, &c.logits};
        mtt_op_cross_entropy loss = {&c.logits, &c.targets, &c.losses};
        c.first = first;
        count = mtt__min(o->logits->shape[0], rows - first);
        c.x = mtt__row_range(o->x, first, count);
        c.targets = mtt__row_range(o->targets, first, count);
        c.losses = mtt__row_range(o->losses, first, count);
        c.logits = mtt__row_range(o->logits, 0, count);
        if (o->dx) c.dx = mtt__row_range(o->dx, first, count);
        mtt__cpu_linear(&part, &head);
        mtt__cpu_cross_entropy(&part, &loss);
        if (o->dx) gradients(&part, o, &c);
    }
}

static void mtt__cpu_chunked_loss(const mtt_op *op, const mtt_op_chunked_loss *o)
{
    mtt__loss_by_chunks(op, o, mtt__chunk_gradients);
}

/* Counts the rows. Alone, adds them to the counters. */
static void mtt__cpu_sum_loss(const mtt_op *op, const mtt_op_sum_loss *o)
{
    const float *losses = (const float *)o->losses->data;
    mtt_counters *counters = mtt__counters(o->counters);
    mtt_count count = {0, 0};
    int64_t i;
    for (i = 0; i < op->shape->rows; i++) {
        count.loss += (double)losses[3 * i];
        count.hits += losses[3 * i + 1] > 0;
    }
    if (o->count) memcpy(o->count->data, &count, sizeof(count));
    else mtt__add_count(counters, &count, !op->later);
    counters->targets = mtt__control(o->control)->targets;
}

/* ---- step ---- */

/* sum (+)= gradients; the first micro-batch starts the sum. */
static void mtt__cpu_sum_gradients(const mtt_op *op, const mtt_op_sum_gradients *o)
{
    int64_t i;
    int p;
    (void)o;
    for (p = 0; p < op->parameters; p++) {
        float *sum = (float *)op->sums[p]->data;
        MTT__THREADS(op->parts[p].elements)
        for (i = 0; i < op->parts[p].elements; i += MTT__BLOCK) {
            int64_t n = mtt__min(MTT__BLOCK, op->parts[p].elements - i);
            if (op->later) {
                float buffer[MTT__BLOCK];
                mtt__add_block(mtt__read(op->gradients[p], i, n, buffer), sum + i, n);
            } else mtt__load(op->gradients[p], i, n, sum + i);
        }
    }
}

/* Sums of squares of up to MTT__SQUARES blocks of the elements that are updated here, which threads share. */
enum { MTT__SQUARES = 64 };
static int mtt__block_squares(const mtt_op *op, int parameter, int64_t first, double *sums)
{
    const mtt_part *part = &op->parts[parameter];
    int64_t blocks = mtt__ceil_div(part->count, MTT__RANGE_BLOCK) - first, i;
    int count = (int)mtt__min(blocks, MTT__SQUARES);
    MTT__THREADS(count * MTT__RANGE_BLOCK)
    for (i = 0; i < count; i++) {
        float buffer[MTT__BLOCK];
        int64_t begin = (first + i) * MTT__RANGE_BLOCK, at, n;
        sums[i] = 0;
        MTT__BLOCKS(at, n, begin, mtt__min(begin + MTT__RANGE_BLOCK, part->count)) {
            const float *x = mtt__read(op->gradients[parameter], part->begin - part->base + at, n, buffer);
            sums[i] += (double)mtt__dot(x, x, n);
        }
    }
    return count;
}

/* Adds up all blocks in their order. */
static void mtt__cpu_grad_norm(const mtt_op *op, const mtt_op_grad_norm *o)
{
    double sum = 0, sums[MTT__SQUARES];
    int64_t first;
    int p, count, i;
    for (p = 0; p < op->parameters; p++)
        for (first = 0, count = MTT__SQUARES; count == MTT__SQUARES; first += count) {
            count = mtt__block_squares(op, p, first, sums);
            for (i = 0; i < count; i++) sum += sums[i];
        }
    mtt__scale_gradients(mtt__control(o->control), mtt__counters(o->counters), sum);
}

/* Codes and scales of compact moments from element `first` up. The scales of all groups follow all codes. */
static uint8_t *mtt__codes(const mtt_tensor *moments, int64_t first)
{
    return (uint8_t *)moments->data + first;
}

static uint16_t *mtt__group_scales(const mtt_tensor *moments, int64_t first)
{
    return (uint16_t *)(void *)((uint8_t *)moments->data + MTT__GROUP * moments->shape[0]) +
           first / MTT__GROUP;
}

/* Updates n elements of a parameter from `at` up. A compact state is decoded before and encoded after,
   rounded by 16 random bits an element. */
static void mtt__adamw_block(const mtt_op *op, const mtt_op_adamw *o, const mtt_update_rates *r,
                             uint64_t stream, int parameter, int64_t at, int64_t n)
{
    const mtt_part *part = &op->parts[parameter];
    const int64_t first = part->first + at - part->begin;
    const mtt_tensor *weight = op->weights[parameter];
    int compact = o->m->dtype == MTT_U8, joined = compact && o->master, fp16 = weight->dtype == MTT_F16_BITS;
    float gs[MTT__BLOCK], ms[MTT__BLOCK], vs[MTT__BLOCK], ws[MTT__BLOCK];
    const float *g = mtt__read(op->gradients[parameter], at - part->base, n, gs);
    float *m = compact ? ms : (float *)o->m->data + first, *v = compact ? vs : (float *)o->v->data + first;
    float *w = joined ? ws : o->master ? (float *)o->master->data + first : (float *)weight->data + at;
    uint16_t random[MTT__BLOCK], *weights = (uint16_t *)weight->data + at;
    int64_t k;
    for (k = 0; k < n && compact; k += 8) {
        uint32_t draw[4];
        int i;
        mtt__philox(mtt__control(o->control)->seed, (uint64_t)(at + k) >> 3, stream, draw);
        for (i = 0; i < 8; i++) random[k + i] = (uint16_t)mtt__draw_bits(draw, i);
    }
    if (compact) mtt__unpack_moments(mtt__codes(o->m, first), mtt__group_scales(o->m, first), n, 0, m);
    if (compact) mtt__unpack_moments(mtt__codes(o->v, first), mtt__group_scales(o->v, first), n, 1, v);
    if (joined) mtt__join_weights(weights, mtt__codes(o->master, first), n, fp16, w);
    for (k = 0; k < n; k++) mtt__adamw_element(r, g[k], &m[k], &v[k], &w[k]);
    if (compact) mtt__pack_moments(m, n, 0, random, mtt__codes(o->m, first), mtt__group_scales(o->m, first));
    if (compact) mtt__pack_moments(v, n, 1, random, mtt__codes(o->v, first), mtt__group_scales(o->v, first));
    if (joined) mtt__split_weights(w, n, fp16, random, weights, mtt__codes(o->master, first));
    else if (o->master) mtt__store(weight, at, n, w);
}

/* The weights do not change after an overflow. */
static void mtt__cpu_adamw(const mtt_op *op, const mtt_op_adamw *o)
{
    const mtt_control *c = mtt__control(o->control);
    const mtt_counters *counters = mtt__counters(o->counters);
    int p;
    for (p = 0; p < op->parameters && !counters->skipped; p++) {
        uint64_t stream = mtt__stream(op->site, op->parts[p].number, (uint64_t)counters->updates);
        mtt_update_rates r = mtt__update_rates(c, counters, op->parts[p].group);
        int64_t begin = op->parts[p].begin, count = op->parts[p].count, i;
        MTT__THREADS(count)
        for (i = 0; i < count; i += MTT__BLOCK)
            mtt__adamw_block(op, o, &r, stream, p, begin + i, mtt__min(MTT__BLOCK, count - i));
    }
}

/* ---- backend ---- */

/* A CPU needs a source of memory, and tiles for its threads: 0.5 MB each. */
typedef struct mtt__cpu {
    mtt_tensor tiles; /* in the block; its shape is a row, for one thread. It comes first: an operation, whose
                         workspace it is, finds this struct by it */
    mtt_env *env;
    mtt_backend backend;
    mtt_status status; /* of the operations so far */
    void *block;
} mtt__cpu;

/* More threads than any machine has are a mistake, which would take tiles of GB. */
enum { MTT__THREADS_MOST = 4096 };

/* Makes a row of tiles for each thread that OpenMP may start now. Rows begin with cache lines. */
static mtt_status mtt__cpu_tiles(mtt__cpu *c)
{
    const size_t line = 64, row = (sizeof(mtt__flash_pair) + line - 1) / line * line;
    const int threads = mtt__threads();
    const size_t bytes = (size_t)threads * row;
    if (threads > MTT__THREADS_MOST)
        return mtt__fail(c->env, MTT_E_ARGUMENT, "OpenMP would start %d threads or more, but %d is the most: "
                         "set OMP_NUM_THREADS to the number of cores", threads, MTT__THREADS_MOST);
    if (bytes <= c->tiles.bytes) return MTT_OK;
    mtt__free(c->env, c->block);
    c->block = mtt__alloc_raw(c->env, bytes + line);
    c->tiles.bytes = 0;
    if (!c->block)
        return mtt__fail(c->env, MTT_E_MEMORY, "out of host memory: cannot allocate %zu bytes for %d "
                         "threads: lower OMP_NUM_THREADS", bytes, threads);
    c->tiles.bytes = bytes;
    c->tiles.data = (char *)c->block + (line - (uintptr_t)c->block % line) % line;
    c->tiles.dims = 1;
    c->tiles.shape[0] = (int64_t)(row / sizeof(float));
    return MTT_OK;
}

static void mtt__cpu_close(void *context)
{
    mtt__cpu *c = (mtt__cpu *)context;
    mtt__free(c->env, c->block);
    mtt__free(c->env, c);
}

static mtt_status mtt__cpu_open(mtt_env *env, const mtt_backend *backend, const mtt_policy *policy,
                                void **context)
{
    volatile float least = 1.17549435e-38f, half = least * 0.5f; /* half is subnormal */
    mtt_status status;
    mtt__cpu *c;
    *context = NULL;
    if (half == 0 && policy->precision >= MTT_FP16)
        return mtt__fail(env, MTT_E_DEVICE, "this thread takes subnormal numbers for 0, and FP16 and FP8 "
                         "need them: link without -ffast-math, -Ofast and -funsafe-math-optimizations");
    c = (mtt__cpu *)mtt__alloc(env, 1, sizeof(*c));
    if (!c) return MTT_E_MEMORY;
    c->env = env;
    c->backend = *backend;
    status = mtt__cpu_tiles(c);
    if (!status) *context = c;
    else mtt__cpu_close(c);
    return status;
}

static mtt_status mtt__cpu_alloc(void *context, mtt_place place, size_t bytes, void **block)
{
    (void)place;
    *block = mtt__alloc_raw(((mtt__cpu *)context)->env, bytes);
    if (*block) mtt__os_huge_pages(*block, bytes);
    return *block ? MTT_OK : MTT_E_MEMORY;
}

static void mtt__cpu_release(void *context, mtt_place place, void *block)
{
    (void)place;
    mtt__free(((mtt__cpu *)context)->env, block);
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

/* Functions of wings. */
#define MTT__CPU_DECLARED(name, inputs, operands, flops, bytes, scratch)                \
    static void mtt__cpu_##name(const mtt_op *op, const mtt_op_##name *o);
MTT_WING_OPS(MTT__CPU_DECLARED)

/* Runs an operation that a wing has changed; 0: none has. */
typedef int mtt__run_function(const mtt_op *op);
MTT_IF_EIGHT(static mtt__run_function mtt__cpu_eight;)
MTT_IF_RANKS(static mtt__run_function mtt__cpu_received;)
static int mtt__cpu_wing(const mtt_op *op)
{
    (void)op;
    return MTT_IF_EIGHT(mtt__cpu_eight(op) ||) MTT_IF_RANKS(mtt__cpu_received(op) ||) 0;
}

static mtt_status mtt__cpu_run(void *context, const mtt_op *ops, int count)
{
    mtt__cpu *c = (mtt__cpu *)context;
    int i;
    c->status = mtt__cpu_tiles(c);
    for (i = 0; i < count && !c->status; i++) {
        mtt_op with_tiles = ops[i], *op = &with_tiles;
        op->workspace = &c->tiles;
        if (mtt__cpu_wing(op)) continue;
        switch (op->kind) {
#define MTT__CPU_RUN(name, inputs, operands, flops, bytes, scratch)                     \
        case MTT_OP_##name: mtt__cpu_##name(op, MTT_OPERANDS_OF(name, op)); break;
            MTT_OPS(MTT__CPU_RUN)
        case MTT_OP_KIND_COUNT: break;
        }
    }
    return c->status;
}

static const mtt_backend mtt__cpu_table = {
    "cpu", MTT_DEVICE_CPU, 0,
    mtt__cpu_open, mtt__cpu_close,
    mtt__cpu_alloc, mtt__cpu_release, mtt__cpu_memory,
    mtt__cpu_copy /* upload */, mtt__cpu_copy /* download */,
    mtt__cpu_run,
    NULL, NULL, NULL, NULL, NULL, /* a caller's stream, allocator and note, for CUDA only */
    NULL, NULL, NULL              /* ranks */
};

MTTDEF const mtt_backend *mtt_cpu_backend(void)
{
    return &mtt__cpu_table;
}

#ifndef MTT_CUDA
MTTDEF mtt_status mtt_cuda_backend(mtt_env *env, int device, mtt_backend *backend)
{
    memset(backend, 0, sizeof(*backend));
    return mtt__fail(env, MTT_E_DEVICE, "CUDA device %d cannot be used: this build has no CUDA; compile with "
                     "-DMTT_CUDA and mtt_kernels.cu", device);
}
#endif

/* -----------------------------------------------------------------------------------------------------------
   >>trainer
   -------------------------------------------------------------------------------------------------------- */

/* A trainer is a schedule, its arena on a backend, and the number of steps taken. mtt_trainer_create plans,
   allocates and fills the state. A step uploads tokens, targets and mtt_control for each micro-batch and lets
   the backend run the program's lists: forward and backward once a micro-batch, then the update. The CPU runs
   a list at once; CUDA queues it on a stream, from its second run on as one graph. The host reads only
   mtt_counters. Parameters, gradients and moments pass between host and device in pieces, as floats in every
   precision. */

/* Elements that pass at a time: whole groups of the compact state. */
enum { MTT__STAGING = 65536 };

struct mtt_trainer {
    mtt_env *env;
    mtt_backend backend;
    void *context;
    mtt_schedule *schedule;
    mtt_optim_desc optim;
    mtt_rate rates[2 * MTT_MOST_GROUPS + 2];
    uint64_t groups;    /* a hash of the optimizer's; 0 = none */
    float lr;           /* the caller's; negative: the schedule's */
    void *arenas[MTT_PLACE_COUNT];
    float *staging;     /* MTT__STAGING floats: a piece in the device's types */
    float *values;      /* as many floats: a piece of initial values */
    int64_t step, micro_batch;
    int opened;         /* 1 = the backend's context exists */
    int measured;       /* 1 = scales of 8-bit tensors are those of a step */
    int positions;      /* that the model it began as was made for; 0 = random weights */
    size_t free_before; /* the device's free bytes before the arena was taken */
    char *note;         /* the caller's, as a pair of a checkpoint's metadata in JSON; NULL: none */
};

/* ---- agreements: >>ranks and >>exchange make them for a trainer that has others beside it ---- */

typedef struct mtt__agreements {
    void (*join)(mtt_trainer *t, mtt_policy *p); /* sets their number, and what the backend calls */
    mtt_status (*start)(mtt_trainer *t);         /* refuses others that would train different models */
    mtt_status (*bind)(mtt_trainer *t);          /* lists transfers, once tensors have addresses */
    mtt_status (*move)(mtt_trainer *t, int way, const mtt__parameter *q, int kind, int64_t at, int64_t count,
                       float *values);
    mtt_status (*agree)(mtt_trainer *t, mtt_status status, int64_t *number);
    mtt_status (*spread)(mtt_trainer *t, int from, void *values, size_t bytes);
    mtt_status (*same)(mtt_ranks *ranks, const char *what, uint64_t value);
    mtt_status (*busy)(mtt_ranks *ranks);
    void (*fail)(mtt_ranks *ranks, const char *reason);
} mtt__agreements;

typedef mtt_status mtt__join_function(mtt_trainer *t, mtt_policy *p);
MTT_IF_RANKS(static mtt__join_function mtt__join_others;)

/* The backend's handle begins with their address. NULL: this process is alone. */
static const mtt__agreements *mtt__others(const mtt_trainer *t)
{
    return t->backend.ranks ? *(const mtt__agreements *const *)(const void *)t->backend.ranks : NULL;
}

/* Passes on the outcome of a call of the backend. A failure is this process's alone, and the others would
   wait for it: they are told why. */
static mtt_status mtt__told(mtt_trainer *t, mtt_status status)
{
    if (status && mtt__others(t))
        mtt__others(t)->fail(t->backend.ranks, t->env ? t->env->error : mtt_status_string(status));
    return status;
}

/* All go on, or none: where one has failed, the others fail with its words. *number, if there is one, becomes
   the sum of all. */
static mtt_status mtt__all_agree(mtt_trainer *t, mtt_status status, int64_t *number)
{
    return mtt__others(t) ? mtt__others(t)->agree(t, status, number) : status;
}

/* Fails everywhere if a value is not the same everywhere. */
static mtt_status mtt__all_same(mtt_trainer *t, const char *what, uint64_t value)
{
    return mtt__others(t) ? mtt__others(t)->same(t->backend.ranks, what, value) : MTT_OK;
}

/* Sends values to all others, or receives them from the one that has them. */
MTT__UNUSED static mtt_status mtt__spread(mtt_trainer *t, int from, void *values, size_t bytes)
{
    return mtt__others(t) ? mtt__others(t)->spread(t, from, values, bytes) : MTT_OK;
}

/* Says that this process does something long, such as writing a file. */
static mtt_status mtt__stay_busy(mtt_trainer *t)
{
    return mtt__others(t) ? mtt__others(t)->busy(t->backend.ranks) : MTT_OK;
}

/* ---- values in and out ---- */

enum { MTT__GET, MTT__PUT };

static mtt_status mtt__copy(mtt_trainer *t, int way, void *device, void *host, size_t bytes)
{
    if (way == MTT__PUT) return mtt__told(t, t->backend.upload(t->context, device, host, bytes));
    return mtt__told(t, t->backend.download(t->context, host, device, bytes));
}

/* The counters are state, so all programs share them. */
static mtt_status mtt__move_counters(mtt_trainer *t, int way, mtt_counters *counters)
{
    return mtt__copy(t, way, t->schedule->programs[MTT__TRAIN].counters->data, counters, sizeof(*counters));
}

/* Moves elements of a tensor from or to floats, rounded to its precision. */
static mtt_status mtt__move(mtt_trainer *t, int way, const mtt_tensor *tensor, int64_t first, int64_t count,
                            float *values)
{
    mtt_tensor piece = *tensor;
    mtt_status status = MTT_OK;
    int64_t i, n;
    piece.data = t->staging;
    for (i = 0; i < count && !status; i += n) {
        char *device = (char *)tensor->data + mtt__bytes_of(tensor->dtype, (size_t)(first + i));
        n = mtt__min(MTT__STAGING, count - i);
        if (way == MTT__PUT) mtt__store(&piece, 0, n, values + i);
        status = mtt__copy(t, way, device, t->staging, mtt__bytes_of(tensor->dtype, (size_t)n));
        if (way == MTT__GET) mtt__load(&piece, 0, n, values + i);
    }
    return status;
}

/* Does the same for the compact state, which has two parts: a master has the lower bits and the 16-bit weight
   in use, moments have codes and a scale for each group. */
static mtt_status mtt__move_compact(mtt_trainer *t, int way, const mtt__parameter *q, int kind, int64_t at,
                                    int64_t count, int mine, float *values)
{
    const mtt_tensor *kept = t->schedule->programs[MTT__TRAIN].optim[kind];
    int master = kind == MTT__MASTER, second = kind == MTT__SECOND, fp16 = q->weight->dtype == MTT_F16_BITS;
    uint16_t *halves = (uint16_t *)(void *)t->staging;
    uint8_t *bytes = (uint8_t *)(halves + MTT__STAGING);
    mtt_status status = MTT_OK;
    int64_t i, n;
    for (i = 0; i < count && !status; i += n) {
        int64_t first = q->part.first + at + i - q->part.begin;
        void *device = master ? (void *)((uint16_t *)q->weight->data + at + i)
                              : (void *)mtt__group_scales(kept, mine ? first : 0);
        size_t half_bytes;
        n = mtt__min(MTT__STAGING, count - i);
        half_bytes = sizeof(uint16_t) * (size_t)(master ? n : mtt__ceil_div(n, MTT__GROUP));
        if (way == MTT__PUT && master) mtt__split_weights(values + i, n, fp16, NULL, halves, bytes);
        if (way == MTT__PUT && !master) mtt__pack_moments(values + i, n, second, NULL, bytes, halves);
        if (mine) status = mtt__copy(t, way, mtt__codes(kept, first), bytes, (size_t)n);
        if (!status) status = mtt__copy(t, way, device, halves, half_bytes);
        if (way == MTT__GET && master) mtt__join_weights(halves, bytes, n, fp16, values + i);
        if (way == MTT__GET && !master) mtt__unpack_moments(bytes, halves, n, second, values + i);
    }
    return status;
}

/* Moves FP32 values that the optimizer keeps of a parameter, from element `at` up, which is a multiple of
   MTT__GROUP. Without a master the weight itself is kept; with an FP32 master it is the master rounded. The
   rest is here (`mine`), or elsewhere. */
static mtt_status mtt__move_mine(mtt_trainer *t, int way, const mtt__parameter *q, int kind, int64_t at,
                                 int64_t count, int mine, float *values)
{
    const mtt_tensor *kept = t->schedule->programs[MTT__TRAIN].optim[kind];
    mtt_status status = MTT_OK;
    if ((!kept || q->frozen) && kind == MTT__MASTER) return mtt__move(t, way, q->weight, at, count, values);
    if (!kept || q->frozen || (!mine && kind != MTT__MASTER)) return MTT_OK;
    if (kept->dtype == MTT_U8) return mtt__move_compact(t, way, q, kind, at, count, mine, values);
    if (mine) status = mtt__move(t, way, kept, q->part.first + at - q->part.begin, count, values);
    if (status || way == MTT__GET || kind != MTT__MASTER) return status;
    return mtt__move(t, way, q->weight, at, count, values);
}

/* Does the same wherever they are. */
static mtt_status mtt__move_optim(mtt_trainer *t, int way, const mtt__parameter *q, int kind, int64_t at,
                                 int64_t count, float *values)
{
    if (mtt__others(t)) return mtt__others(t)->move(t, way, q, kind, at, count, values);
    return mtt__move_mine(t, way, q, kind, at, count, 1, values);
}

/* ---- initial state ---- */

/* Draws the initial values of GPT-2: N(0, 0.02), divided by sqrt(2 layers) for projections into the residual
   stream. */
static mtt_status mtt__fill_parameter(mtt_trainer *t, int index)
{
    const mtt__parameter *q = &t->schedule->programs[MTT__TRAIN].parameters[index];
    int init = mtt__parameter_row[q->kind].init;
    uint64_t stream = mtt__stream(MTT__SITE_INIT, 0, (uint64_t)index);
    float mean = init == MTT__ONES ? 1.0f : 0.0f, deviation = init >= MTT__NORMAL ? 0.02f : 0.0f;
    float bound = 1.0f / sqrtf((float)q->shape[0]);
    int64_t count = mtt__parameter_elements(q), at, n, i;
    mtt_status status = MTT_OK;
    if (init == MTT__NORMAL_RESIDUAL) deviation /= sqrtf(2.0f * (float)t->schedule->model.layers);
    for (at = 0; at < count && !status; at += n) {
        n = mtt__min(MTT__STAGING, count - at);
        MTT__THREADS(n)
        for (i = 0; i < n; i++)
            t->values[i] = init == MTT__UNIFORM
                               ? bound * (float)(2 * mtt__random_uniform(t->optim.seed, stream,
                                                                         (uint64_t)(at + i)) - 1)
                               : mean + deviation * mtt__random_normal(t->optim.seed, stream, at + i);
        status = mtt__move_optim(t, MTT__PUT, q, MTT__MASTER, at, n, t->values);
    }
    return status;
}

MTTDEF double mtt_rotary_step(const mtt_model_desc *m, int pair)
{
    double step = pow((double)m->rotary_theta, -(double)(2 * pair) / (double)m->d_head), share;
    double turns = (double)m->rotary_original * step / 6.28318530717958647692, low = (double)m->rotary_low;
    double slow = step / (double)m->rotary_factor, high = (double)m->rotary_high;
    if (m->rotary_factor == 1 || turns > high) return step;
    share = (turns - low) / (high - low);
    return turns < low ? slow : (1 - share) * slow + share * step;
}

/* Fills a table of positions: for each pair i of columns of position t, 0.02 times sine and cosine of t /
   10000^(2i / width). Vaswani et al. (2017) scale the embedding up to the sines; this scales the sines down
   to the embedding. Without the factor, positions drown the words: a small model stays at a perplexity of
   1100 instead of reaching 363. Or, for rotary positions, cosine and sine of t times mtt_rotary_step. Rounded
   from double: at 2^20 positions a float's angle would be wrong by 0.06. */
static mtt_status mtt__fill_positions(mtt_trainer *t, const mtt_tensor *table, int rotary)
{
    int64_t width = table->shape[1], row, i;
    mtt_status status = MTT_OK;
    for (row = 0; row < table->shape[0] && !status; row++) {
        for (i = 0; i < width; i++) {
            double step = rotary ? mtt_rotary_step(&t->schedule->model, (int)(i / 2))
                                 : pow(10000.0, -(double)(i / 2 * 2) / (double)width);
            int sine = i % 2 == rotary;
            double wave = sine ? sin((double)row * step) : cos((double)row * step);
            t->values[i] = (float)(rotary ? wave : 0.02 * wave);
        }
        status = mtt__move(t, MTT__PUT, table, row * width, width, t->values);
    }
    return status;
}

/* Fills the fields that are the same in all ranges of a parameter. */
static mtt_range mtt__whole_range(const mtt__program *p, int index)
{
    const mtt__parameter *q = &p->parameters[index];
    const mtt_part *part = &q->part;
    mtt_range r;
    memset(&r, 0, sizeof(r));
    r.mine = part->mine, r.end = part->end;
    r.made = q->gradient ? q->gradient->data : NULL;
    r.gradient = q->sum ? (float *)q->sum->data - part->base : (void *)r.made;
    r.received = q->received ? (char *)q->received->data + q->received_at : NULL;
    r.weight = q->weight->data;
    r.first = part->first - part->begin;
    r.parameter = index;
    r.group = (uint8_t)part->group;
    r.made_dtype = (uint8_t)(q->gradient ? q->gradient->dtype : MTT_F32);
    r.gradient_dtype = q->sum ? (uint8_t)MTT_F32 : r.made_dtype;
    return r;
}

/* Makes the device's work list: see mtt_range. */
static void mtt__list_ranges(const mtt__program *p, mtt_range *r)
{
    int32_t block = 0;
    int i;
    for (i = 0; i < p->parameter_count; i++) {
        int64_t count = p->parameters[i].part.elements, begin;
        for (begin = 0; begin < count; begin += MTT__RANGE, r++) {
            *r = mtt__whole_range(p, i);
            r->begin = begin;
            r->count = (int32_t)mtt__min(MTT__RANGE, count - begin);
            r->block = block;
            block += (int32_t)mtt__ceil_div(r->count, MTT__RANGE_BLOCK);
        }
    }
}

static mtt_status mtt__fill_ranges(mtt_trainer *t)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    mtt_range *all = (mtt_range *)mtt__alloc(t->env, p->ranges->bytes, 1);
    mtt_status status = all ? MTT_OK : MTT_E_MEMORY;
    if (all) mtt__list_ranges(p, all);
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

/* Gradients of a mean over n tokens are in proportion to 1 / n. Where gradients have 8 bits, which reach less
   far below 1 than a half, the scale grows with n. */
static float mtt__first_loss_scale(const mtt_trainer *t)
{
    const mtt_schedule *s = t->schedule;
    double tokens = (double)s->programs[MTT__TRAIN].shape.rows * s->policy.accumulate * s->policy.ranks;
    if (!mtt__precisions[s->policy.precision].scaled) return 1.0f;
    if (mtt__precisions[s->policy.precision].scaled == 1) return t->optim.loss_scale;
    return mtt__power_of_two(t->optim.loss_scale * (float)(tokens / 16384));
}

/* Fills the state that training and generation have in common: tables of positions, and zeros elsewhere. */
static mtt_status mtt__fill_tables(mtt_trainer *t)
{
    const mtt__program *p = &t->schedule->programs[0];
    mtt_status status = MTT_OK;
    int i;
    for (i = 0; i < p->tensor_count && !status; i++)
        if (p->tensors[i]->persistent && p->tensors[i] != p->workspace)
            status = mtt__fill_zeros(t, p->tensors[i]);
    if (!status && t->schedule->model.positions == MTT_POSITIONS_SINUSOIDAL)
        status = mtt__fill_positions(t, p->positions, 0);
    if (!status && p->angles) status = mtt__fill_positions(t, p->angles, 1);
    return status;
}

/* With `zero_weights`, which are loaded next, only adapters are drawn. */
static mtt_status mtt__fill_state(mtt_trainer *t, int zero_weights)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    mtt_status status = mtt__fill_tables(t);
    mtt_counters counters;
    int i;
    for (i = 0; i < p->parameter_count && !status; i++)
        if (!zero_weights || mtt__is_added(p->parameters[i].kind)) status = mtt__fill_parameter(t, i);
    if (!status && p->ranges) status = mtt__fill_ranges(t);
    memset(&counters, 0, sizeof(counters));
    counters.loss_scale = mtt__first_loss_scale(t);
    counters.step_scale = counters.loss_scale;
    return status ? status : mtt__move_counters(t, MTT__PUT, &counters);
}

/* ---- memory ---- */

#ifdef MTT_SEPARATE_ALLOCS
enum { MTT__SEPARATE = 1 };
#else
enum { MTT__SEPARATE = 0 };
#endif

/* Gives every tensor an address: its offset in the arena of its place, or a block of its own, where a
   sanitizer sees overruns. All programs share the state. */
static mtt_status mtt__bind(mtt_trainer *t)
{
    mtt__program *first = t->schedule->programs, *p;
    mtt_status status = MTT_OK;
    int i;
    for (i = 0; i < MTT_PLACE_COUNT && !MTT__SEPARATE && !status; i++) {
        size_t bytes = mtt__place_bytes(t->schedule, (mtt_place)i);
        if (bytes) status = t->backend.alloc(t->context, (mtt_place)i, bytes, &t->arenas[i]);
    }
    for (p = first; p < first + MTT__PROGRAMS; p++)
        for (i = 0; i < p->tensor_count && !status; i++) {
            mtt_tensor *tensor = p->tensors[i];
            size_t bytes = tensor->bytes ? tensor->bytes : 1;
            if (!MTT__SEPARATE) tensor->data = (char *)t->arenas[tensor->place] + tensor->offset;
            else if (tensor->persistent && p > first) tensor->data = first->tensors[i]->data;
            else status = t->backend.alloc(t->context, tensor->place, bytes, &tensor->data);
            if (tensor->entry >= 0) tensor->scale = (mtt_scale *)first->scales->data + tensor->entry;
        }
    if (!status && mtt__others(t)) status = mtt__others(t)->bind(t);
    return status;
}

static void mtt__unbind(mtt_trainer *t)
{
    mtt__program *first = t->schedule->programs, *p;
    int i;
    for (i = 0; i < MTT_PLACE_COUNT; i++)
        if (t->arenas[i]) t->backend.release(t->context, (mtt_place)i, t->arenas[i]);
    for (p = first; MTT__SEPARATE && p < first + MTT__PROGRAMS; p++)
        for (i = 0; i < p->tensor_count; i++)
            if (p->tensors[i]->data && (p == first || !p->tensors[i]->persistent))
                t->backend.release(t->context, p->tensors[i]->place, p->tensors[i]->data);
}

/* Names the largest tensors of an arena that does not fit, and the batch that would fit. */
static mtt_status mtt__refuse_memory(mtt_trainer *t, const mtt_policy *policy)
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
        for (k = 0, tensor = p->tensors[i]; k < 3 && tensor && tensor->place == MTT_CARD; k++)
            if (!most[k] || tensor->bytes > most[k]->bytes) {
                const mtt_tensor *smaller = most[k];
                most[k] = tensor;
                tensor = smaller;
            }
    for (k = 0; k < 3 && most[k]; k++)
        mtt__print(&text, "%s %s (%s) %.1f MiB", k ? "," : "", most[k]->name,
                   mtt_category_name(most[k]->category), (double)most[k]->bytes / 1048576);
    if (policy->recompute == MTT_RECOMPUTE_BUDGET && policy->budget_bytes > t->free_before)
        return mtt__fail(t->env, MTT_E_BUDGET, "%s; lower budget_bytes from %zu to %zu, which the device has "
                         "free", reason, policy->budget_bytes, t->free_before);
    mtt_plan_max_batch(t->env, &s->model, policy, s->seq_len, t->free_before, &batch);
    return mtt__fail(t->env, MTT_E_BUDGET,
                     "%s; the largest batch that fits is %d of sequences of %d tokens: lower batch or "
                     "seq_len, recompute more, or use the chunked loss", reason, batch, s->seq_len);
}

/* Closing may fail, too, if others have. env->error stays that of the failure before, which says why. */
MTTDEF void mtt_trainer_destroy(mtt_trainer *t)
{
    char error[sizeof(t->env->error)];
    if (!t) return;
    if (t->env) memcpy(error, t->env->error, sizeof(error));
    if (t->opened) {
        mtt__unbind(t);
        t->backend.close(t->context);
    }
    if (t->env) memcpy(t->env->error, error, sizeof(error));
    mtt_schedule_destroy(t->schedule);
    mtt__free(t->env, t->staging);
    mtt__free(t->env, t->note);
    mtt__free(t->env, t);
}

/* Gives each parameter the rates of its group. */
static void mtt__assign_groups(mtt_trainer *t)
{
    mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    mtt_optim_desc *o = &t->optim;
    int i, k;
    for (i = 0; i < 2 * o->group_count + 2; i++) {
        const mtt_group *g = i > 1 ? &o->groups[i / 2 - 1] : NULL;
        float scale = g ? g->lr_scale : 0, decay = g ? g->weight_decay : 0;
        t->rates[i].lr = scale < 0 ? 0 : scale > 0 ? scale : 1;
        t->rates[i].decay = decay < 0 ? 0 : decay > 0 ? decay : i % 2 ? 0 : o->weight_decay;
        if (!g || i % 2) continue;
        t->groups = mtt__hash(t->groups, g->names, strlen(g->names) + 1);
        t->groups = mtt__hash(t->groups, (const char *)&t->rates[i].lr, sizeof(float));
        t->groups = mtt__hash(t->groups, (const char *)&g->weight_decay, sizeof(float));
    }
    for (i = 0; i < p->parameter_count; i++) {
        mtt__parameter *q = &p->parameters[i];
        for (k = 0; k < o->group_count && !mtt__matches(o->groups[k].names, q->weight->name);) k++;
        if (k < o->group_count) q->part.group += 2 * (k + 1);
    }
    for (i = 0; i < p->op_count; i++)
        for (k = 0; k < p->ops[i].parameters; k++)
            p->ops[i].parts[k].group = p->parameters[p->ops[i].parts[k].number].part.group;
    o->groups = NULL; /* the caller's */
}

static mtt_status mtt__check_backend(mtt_env *env, const mtt_backend *b)
{
    const mtt__member members[] = {MTT__IS_SET(b, open), MTT__IS_SET(b, close), MTT__IS_SET(b, alloc),
                                   MTT__IS_SET(b, release), MTT__IS_SET(b, memory), MTT__IS_SET(b, upload),
                                   MTT__IS_SET(b, download), MTT__IS_SET(b, run)};
    if (!b->device_alloc != !b->device_free)
        return mtt__fail(env, MTT_E_ARGUMENT, "the backend has device_alloc or device_free alone: set both "
                         "or neither");
    return mtt__require_members(env, "the backend", members, MTT__LENGTH(members));
}

MTTDEF mtt_status mtt_trainer_create(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                     const mtt_optim_desc *optim, const mtt_backend *backend, int batch,
                                     int seq_len, mtt_trainer **out)
{
    mtt_trainer *t = (mtt_trainer *)mtt__alloc(env, 1, sizeof(*t));
    mtt_policy p = *policy;
    size_t all_bytes;
    mtt_status status;
    *out = NULL;
    if (!t) return MTT_E_MEMORY;
    t->env = env;
    t->lr = -1;
    t->backend = *backend;
    p.device = backend->device;
    status = mtt__check_backend(env, backend);
    MTT_IF_RANKS(if (!status) status = mtt__join_others(t, &p);)
    if (!status) status = mtt_optim_resolve(env, optim, &t->optim);
    if (!status && policy->early_update && t->optim.clip > 0)
        status = mtt__fail(env, MTT_E_ARGUMENT, "early_update is 1, but to clip at %g needs the norm of all "
                           "gradients first: set clip to -1", (double)t->optim.clip);
    if (!status) status = mtt_schedule_create(env, model, &p, batch, seq_len, &t->schedule);
    if (!status && !(t->staging = (float *)mtt__alloc(env, 2 * MTT__STAGING, sizeof(float))))
        status = MTT_E_MEMORY;
    if (!status) t->values = t->staging + MTT__STAGING;
    if (!status) mtt__assign_groups(t);
    if (!status && mtt__others(t)) status = mtt__others(t)->start(t);
    if (!status) status = mtt__told(t, backend->open(env, &t->backend, &t->schedule->policy, &t->context));
    t->opened = !status;
    if (!status) status = backend->memory(t->context, &t->free_before, &all_bytes);
    if (!status) status = mtt__bind(t);
    if (status == MTT_E_BUDGET && t->opened) status = mtt__refuse_memory(t, &p);
    if (!status) status = mtt__fill_state(t, t->optim.zero_weights);
    if (t->opened) status = mtt__all_agree(t, status, NULL);
    if (!status) *out = t;
    else mtt_trainer_destroy(t);
    return status;
}

/* ---- steps ---- */

/* Refuses ids outside the vocabulary, which would read and write outside the embedding. */
static mtt_status mtt__check_ids(const mtt_trainer *t, const int32_t *ids, int64_t count, int32_t low,
                                 const char *what)
{
    int64_t i;
    for (i = 0; i < count; i++)
        if (ids[i] < low || ids[i] >= t->schedule->model.vocab)
            return mtt__fail(t->env, MTT_E_ARGUMENT,
                             "%s %lld is %lld, but the vocabulary has ids 0 to %d%s: was the text encoded "
                             "with another tokenizer?",
                             what, (long long)i, (long long)ids[i], t->schedule->model.vocab - 1,
                             low < 0 ? ", or -1 for none" : "");
    return MTT_OK;
}

/* Refuses the trainer of a generator, which has no gradients, targets and moments. */
static mtt_status mtt__must_train(const mtt_trainer *t)
{
    if (!t->schedule->chunk) return MTT_OK;
    return mtt__fail(t->env, MTT_E_ARGUMENT, "a generator's trainer has weights alone: make one that trains "
                     "by mtt_trainer_create");
}

static float mtt__lr(const mtt_trainer *t)
{
    return t->lr >= 0 ? t->lr : mtt_learning_rate(&t->optim, t->step);
}

/* Uploads tokens, targets, which may be NULL, and mtt_control. `counted` is the number of targets of the
   whole step, and `row` the one that pick_row takes. */
static mtt_status mtt__send(mtt_trainer *t, const mtt__program *p, const int32_t *tokens,
                            const int32_t *targets, int64_t counted, int row)
{
    const mtt_optim_desc *o = &t->optim;
    size_t bytes = (size_t)p->shape.rows * sizeof(int32_t);
    int scaling = mtt__precisions[t->schedule->policy.precision].scaled > 0;
    uint64_t micro_batch = (uint64_t)(t->micro_batch + t->schedule->policy.rank);
    mtt_control control = {o->seed, micro_batch, mtt__lr(t), o->beta1, o->beta2, o->eps, o->clip, counted,
                           scaling, row, {{0, 0}}};
    mtt_status status;
    memcpy(control.rates, t->rates, sizeof(control.rates));
    status = t->backend.upload(t->context, p->tokens->data, tokens, bytes);
    if (!status && targets) status = t->backend.upload(t->context, p->targets->data, targets, bytes);
    if (!status) status = t->backend.upload(t->context, p->control->data, &control, sizeof(control));
    return mtt__told(t, status);
}

MTT_IF_EIGHT(static mtt_status mtt__measure_scales(mtt_trainer *t, const int32_t *tokens,
                                                   const int32_t *targets, int64_t counted);)

/* Runs a program's forward and backward pass over micro-batches. */
static mtt_status mtt__run_micro_batches(mtt_trainer *t, const mtt__program *p, const int32_t *tokens,
                                         const int32_t *targets, int micro_batches, int training)
{
    int64_t rows = p->shape.rows, counted = 0, k;
    mtt_status status = mtt__must_train(t);
    int i;
    if (!status) status = mtt__check_ids(t, tokens, rows * micro_batches, 0, "token");
    if (!status) status = mtt__check_ids(t, targets, rows * micro_batches, -1, "target");
    for (k = 0; k < rows * micro_batches && !status; k++) counted += targets[k] >= 0;
    if (training) status = mtt__all_agree(t, status, &counted);
    MTT_IF_EIGHT(if (training && !status) status = mtt__measure_scales(t, tokens, targets, counted);)
    for (i = 0; i < micro_batches && !status; i++) {
        status = mtt__send(t, p, tokens + i * rows, targets + i * rows, counted, 0);
        if (!status)
            status = mtt__told(t, t->backend.run(t->context, i ? p->later_ops : p->ops, p->step_begin));
        if (!status && training) t->micro_batch += t->schedule->policy.ranks;
    }
    return status;
}

/* Waits for the device and reads the counters into `info`. The device's count of steps is the true one: it
   stops at a failure, which the host may learn some steps later. */
static mtt_status mtt__receive(mtt_trainer *t, mtt_counters *counters, mtt_step_info *info)
{
    mtt_status status = mtt__move_counters(t, MTT__GET, counters);
    if (status) return status;
    memset(info, 0, sizeof(*info));
    info->step = t->step = counters->steps;
    info->targets = counters->targets;
    info->hits = counters->hits;
    info->loss = counters->targets ? counters->loss / (double)counters->targets : 0.0;
    info->arena_bytes = mtt__arena_bytes(t->schedule);
    return MTT_OK;
}

/* Reports a loss or gradient that is not finite. It has stopped the device's updates, which go on now. */
static mtt_status mtt__numbers_failed(mtt_trainer *t, mtt_counters *counters, double loss)
{
    mtt_status status;
    counters->steps -= counters->skipped == 1; /* FP16 took it for an overflow; no smaller scale helps */
    counters->skipped = 0;
    t->step = counters->steps;
    status = mtt__move_counters(t, MTT__PUT, counters);
    if (status) return status;
    return mtt__fail(t->env, MTT_E_NUMBERS,
                     "after step %lld the loss is %g and the gradient's norm %g; the weights are as "
                     "before: lower lr, lengthen the warmup, or check the data",
                     (long long)t->step, loss, counters->grad_norm);
}

/* Without `info` nothing waits for the device; the next call with `info` then reports a failure. */
MTTDEF mtt_status mtt_train_step(mtt_trainer *t, const int32_t *tokens, const int32_t *targets,
                                 mtt_step_info *info)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    double start = mtt__now_ms();
    mtt_counters counters;
    float lr;
    mtt_status status = mtt__run_micro_batches(t, p, tokens, targets, t->schedule->policy.accumulate, 1);
    int begin = p->step_begin;
    if (!status) status = mtt__told(t, t->backend.run(t->context, p->ops + begin, p->op_count - begin));
    if (status) return status;
    lr = mtt__lr(t);
    t->step++;
    if (!info) return MTT_OK;
    status = mtt__receive(t, &counters, info);
    if (status) return status;
    info->lr = lr;
    info->loss_scale = counters.step_scale;
    info->grad_norm = (float)counters.grad_norm;
    info->skipped = counters.skipped != 0;
    info->clipped = counters.clipped;
    info->ms = mtt__now_ms() - start;
    if (counters.skipped == 2 || !mtt__finite(info->loss) || fabs(info->loss) >= 1e30)
        return mtt__numbers_failed(t, &counters, info->loss);
    return MTT_OK;
}

MTTDEF mtt_status mtt_evaluate(mtt_trainer *t, const int32_t *tokens, const int32_t *targets,
                               mtt_step_info *info)
{
    const mtt__program *p = &t->schedule->programs[MTT__EVALUATE];
    double start = mtt__now_ms();
    mtt_counters counters;
    mtt_step_info discarded;
    mtt_status status = mtt__run_micro_batches(t, p, tokens, targets, t->schedule->split, 0);
    if (!info) info = &discarded;
    if (!status) status = mtt__receive(t, &counters, info);
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
    mtt_status status = mtt__must_train(t);
    if (!status && count < 1)
        return mtt__fail(t->env, MTT_E_ARGUMENT, "count is %d: the next token needs at least one before it",
                         count);
    if (!status) status = mtt__check_ids(t, tokens, count, 0, "token");
    if (status) return status;
    padded = (int32_t *)mtt__alloc(t->env, (size_t)p->shape.seq_len, sizeof(*padded));
    if (!padded) return MTT_E_MEMORY;
    memcpy(padded, tokens + count - seen, (size_t)seen * sizeof(*padded));
    status = mtt__send(t, p, padded, NULL, 0, seen - 1);
    mtt__free(t->env, padded);
    if (!status) status = mtt__told(t, t->backend.run(t->context, p->ops, p->op_count));
    if (!status) status = mtt__move(t, MTT__GET, p->output, 0, t->schedule->model.vocab, logits);
    return status;
}

/* ---- properties and parameters ---- */

MTTDEF int64_t mtt_trainer_step(const mtt_trainer *t)
{
    return t->step;
}

MTTDEF mtt_status mtt_trainer_set_lr(mtt_trainer *t, float lr)
{
    if (lr <= 100) t->lr = lr;
    else return mtt__fail(t->env, MTT_E_ARGUMENT, "lr is %g, it must be at most 100", (double)lr);
    return MTT_OK;
}

MTTDEF size_t mtt_trainer_device_bytes(const mtt_trainer *t)
{
    size_t free_bytes, all_bytes;
    if (t->backend.memory(t->context, &free_bytes, &all_bytes) || !all_bytes)
        return mtt__arena_bytes(t->schedule);
    return t->free_before > free_bytes ? t->free_before - free_bytes : 0;
}

MTTDEF const mtt_schedule *mtt_trainer_schedule(const mtt_trainer *t)
{
    return t->schedule;
}

MTTDEF const char *mtt_parameter(const mtt_trainer *t, int index, int64_t shape[2])
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    int known = index >= 0 && index < p->parameter_count, k;
    for (k = 0; k < 2 && shape; k++) shape[k] = known ? p->parameters[index].shape[k] : 0;
    return known ? p->parameters[index].weight->name : NULL;
}

MTTDEF int mtt_parameter_find(const mtt_trainer *t, const char *name)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    int i = p->parameter_count;
    while (i-- && strcmp(p->parameters[i].weight->name, name)) {}
    return i;
}

/* NULL with the error recorded if there is no such parameter. */
static const mtt__parameter *mtt__parameter_at(const mtt_trainer *t, int index)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    if (index >= 0 && index < p->parameter_count) return &p->parameters[index];
    mtt__fail(t->env, MTT_E_ARGUMENT, "there is no parameter %d: take 0 to %d", index,
              p->parameter_count - 1);
    return NULL;
}

static mtt_status mtt__move_parameter(mtt_trainer *t, int way, int index, float *values)
{
    const mtt__parameter *q = mtt__parameter_at(t, index);
    if (!q) return MTT_E_ARGUMENT;
    return mtt__move_optim(t, way, q, MTT__MASTER, 0, mtt__parameter_elements(q), values);
}

MTTDEF mtt_status mtt_parameter_get(mtt_trainer *t, int index, float *values)
{
    return mtt__move_parameter(t, MTT__GET, index, values);
}

MTTDEF mtt_status mtt_parameter_set(mtt_trainer *t, int index, const float *values)
{
    return mtt__move_parameter(t, MTT__PUT, index, (float *)values);
}

MTTDEF mtt_status mtt_gradient_get(mtt_trainer *t, int index, float *values)
{
    const mtt__parameter *q = mtt__parameter_at(t, index);
    const mtt_tensor *kept;
    mtt_counters counters;
    int64_t i, count;
    mtt_status status;
    if (!q) return MTT_E_ARGUMENT;
    if (q->frozen)
        return mtt__fail(t->env, MTT_E_ARGUMENT, "%s is frozen and has no gradient", q->weight->name);
    kept = q->sum ? q->sum : q->gradient;
    if (!kept || !kept->persistent || mtt__elements(kept) != mtt__elements(q->weight))
        return mtt__fail(t->env, MTT_E_ARGUMENT,
                         "gradients share their memory with activations: set keep_gradients to 1, and no "
                         "shard of gradients");
    count = mtt__parameter_elements(q);
    status = mtt__move_counters(t, MTT__GET, &counters);
    if (!status) status = mtt__move(t, MTT__GET, kept, 0, count, values);
    for (i = 0; i < count && !status; i++) values[i] /= counters.step_scale;
    return status;
}

/* The operations before it have just run, so its operands are as in a step. An operand that it changes in
   place is put back, because the speed of a product depends on its numbers: on the operands that a whole step
   leaves behind, products of the backward pass take more than a third longer. A download waits for the
   device. */
MTTDEF mtt_status mtt_profile(mtt_trainer *t, int index, int times, double *ms)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    const mtt_tensor *both = NULL;
    const mtt_op *op;
    mtt_counters counters;
    void *before = NULL;
    double start;
    mtt_status status = MTT_OK;
    int i, k;
    if (index < 0 || index >= p->op_count || times < 1)
        return mtt__fail(t->env, MTT_E_ARGUMENT, "operation %d, %d times: take 0 to %d, at least once", index,
                         times, p->op_count - 1);
    op = &p->ops[index];
    for (i = 0; i < op->inputs; i++)
        for (k = op->inputs; k < op->inputs + op->outputs; k++)
            if (op->operands[i] && op->operands[i] == op->operands[k]) both = op->operands[i];
    if (both && !(before = mtt__alloc_raw(t->env, both->bytes))) return MTT_E_MEMORY;
    if (both) status = mtt__copy(t, MTT__GET, both->data, before, both->bytes);
    if (!status) status = t->backend.run(t->context, op, 1);
    if (!status) status = mtt__move_counters(t, MTT__GET, &counters);
    start = mtt__now_ms();
    for (i = 0; i < times && !status; i++) status = t->backend.run(t->context, op, 1);
    if (!status) status = mtt__move_counters(t, MTT__GET, &counters);
    *ms = (mtt__now_ms() - start) / times;
    if (!status && both) status = mtt__copy(t, MTT__PUT, both->data, before, both->bytes);
    if (!status && both) status = t->backend.run(t->context, op, 1);
    mtt__free(t->env, before);
    return status;
}

/* -----------------------------------------------------------------------------------------------------------
   >>report
   -------------------------------------------------------------------------------------------------------- */

/* A schedule as a listing, one line an operation, and a plan as a table. Both also as JSON, for programs. */

/* Names of operands, except for the small state that most operations read. */
static void mtt__print_operands(mtt__text *text, mtt_tensor *const *tensors, int count)
{
    int i, shown = 0;
    for (i = 0; i < count; i++) {
        const char *name = tensors[i] ? tensors[i]->name : "control";
        if (!strcmp(name, "control") || !strcmp(name, "counters") || !strcmp(name, "ranges")) continue;
        mtt__print(text, "%s%s%s", shown++ ? " " : "", name,
                   tensors[i] && tensors[i]->place == MTT_HOST ? "@host" : "");
    }
}

static int mtt__frees(const mtt_tensor *t, int op)
{
    return t && !t->persistent && t->last == op;
}

static void mtt__print_freed(mtt__text *text, const mtt_op *op, int index)
{
    const char *before = "  frees ";
    int i, gradients = 0;
    for (i = 0; i < op->inputs + op->outputs; i++) {
        if (!mtt__frees(op->operands[i], index)) continue;
        mtt__print(text, "%s%s", before, op->operands[i]->name);
        before = " ";
    }
    for (i = 0; i < op->parameters && op->gradients; i++) gradients += mtt__frees(op->gradients[i], index);
    if (gradients) mtt__print(text, "%s%d gradients", before, gradients);
}

/* What an operation reads -> writes. */
static void mtt__print_flow(mtt__text *text, const mtt_op *op)
{
    mtt__print_operands(text, op->operands, op->inputs);
    if (op->gradients) mtt__print(text, "%s%d gradients", op->inputs ? " " : "", op->parameters);
    mtt__print(text, " -> ");
    mtt__print_operands(text, op->operands + op->inputs, op->outputs);
    if (op->sums) mtt__print(text, "%d sums", op->parameters);
    if (op->weights) mtt__print(text, " %d weights", op->parameters);
}

/* One line for each operation; `planned`: with its number and with bytes. */
static void mtt__print_ops(const mtt__program *p, int planned, mtt_write_fn write, void *user)
{
    char line[1024];
    int i;
    for (i = 0; i < p->op_count; i++) {
        const mtt_op *op = &p->ops[i];
        const char *phase = mtt_phase_name(op->phase), *name = mtt_op_name(op->kind);
        mtt__text text;
        mtt__text_init(&text, line, sizeof(line) - 1);
        if (planned)
            mtt__print(&text, "%4d %-9s%-6s %9.2f MiB  %-25s ", i, phase, op->recomputed ? "again" : "",
                       (double)op->live_bytes / 1048576, name);
        else mtt__print(&text, "%-9s%s%s ", phase, name, op->recomputed ? " again:" : ":");
        mtt__print_flow(&text, op);
        if (planned) mtt__print_freed(&text, op, i);
        if (op->host_bytes) mtt__print(&text, "  host %.2f MiB", (double)op->host_bytes / 1048576);
        line[text.size] = '\n';
        write(user, line, text.size + 1);
    }
}

MTTDEF void mtt_schedule_print(const mtt_schedule *s, mtt_write_fn write, void *user)
{
    mtt__print_ops(&s->programs[MTT__TRAIN], 1, write, user);
}

MTTDEF const char *mtt_schedule_pass(int number)
{
    return number >= 0 && number < MTT__PASSES ? mtt__passes[number].name : NULL;
}

MTTDEF mtt_status mtt_schedule_print_passes(const mtt_schedule *schedule, int passes, mtt_write_fn write,
                                            void *user)
{
    mtt_schedule s = *schedule;
    mtt__program *p = &s.programs[MTT__TRAIN];
    mtt_status status;
    if (passes < 0 || passes > MTT__PASSES)
        return mtt__fail(s.env, MTT_E_ARGUMENT, "%d passes, they are 0 to %d", passes, MTT__PASSES);
    memset(p, 0, sizeof(*p));
    status = mtt__build_program(&s, MTT__TRAIN, passes);
    if (!status) mtt__print_ops(p, 0, write, user);
    mtt__release_program(&s, MTT__TRAIN);
    return status;
}

static void mtt__print_categories(mtt__text *text, const size_t *bytes)
{
    int i;
    for (i = 0; i < MTT_CATEGORY_COUNT; i++)
        mtt__print(text, "%s\"%s\": %zu", i ? ", " : "{", mtt__category_text[i], bytes[i]);
    mtt__print(text, "}");
}

/* A member of a plan's JSON, by its type. */
#define MTT__JSON_VALUE(name, form, value)                                              \
    mtt__print(&text, "%s\"" #name "\": " form, text.size ? ", " : "{", value)
#define MTT__JSON_int(name) MTT__JSON_VALUE(name, "%d", r->name)
#define MTT__JSON_int64_t(name) MTT__JSON_VALUE(name, "%lld", (long long)r->name)
#define MTT__JSON_size_t(name) MTT__JSON_VALUE(name, "%zu", r->name)
#define MTT__JSON_double(name) MTT__JSON_VALUE(name, "%.0f", r->name)
#define MTT__JSON_mtt_ms(name) MTT__JSON_VALUE(name, "%.4g", r->name)
#define MTT__JSON_mtt_category_bytes(name)                                              \
    MTT__JSON_VALUE(name, "%s", ""), mtt__print_categories(&text, r->name)
#define MTT__JSON_mtt_phase_bytes(name)                                                 \
    for (i = 0; i < MTT_PHASE_COUNT; i++)                                               \
        mtt__print(&text, ", \"peak_%s_bytes\": %zu", mtt__phase_text[i], r->name[i])

MTTDEF size_t mtt_plan_json(const mtt_plan_report *r, char *at, size_t capacity)
{
    mtt__text text;
    int i;
    mtt__text_init(&text, at, capacity);
#define MTT__PLAN_JSON(type, name, in_json) if (in_json) MTT__JSON_##type(name);
    MTT_PLAN_FIELDS(MTT__PLAN_JSON)
    mtt__print(&text, "}");
    return text.size;
}

MTTDEF void mtt_plan_print(const mtt_plan_report *r, mtt_write_fn write, void *user)
{
    char at[2048];
    mtt__text text;
    int i;
    mtt__text_init(&text, at, sizeof(at));
    mtt__print(&text, "parameters %lld, arena %zu bytes = %.2f MiB for %d sequence%s%s%d token%s\n",
               (long long)r->parameters, r->arena_bytes, (double)r->arena_bytes / 1048576, r->batch,
               r->batch == 1 ? "" : "s", r->token_flops > 0 ? ", in chunks of " : " of ", r->seq_len,
               r->seq_len == 1 ? "" : "s");
    mtt__print(&text, "peak  ");
    for (i = 0; i < MTT_PHASE_COUNT; i++)
        mtt__print(&text, "%s %.2f MiB%s", mtt__phase_text[i], (double)r->phase_peak_bytes[i] / 1048576,
                   i < 2 ? ", " : "\n");
    for (i = 0; i < MTT_CATEGORY_COUNT; i++)
        if (r->bytes[i])
            mtt__print(&text, "  %-12s %10.2f MiB\n", mtt__category_text[i], (double)r->bytes[i] / 1048576);
    if (r->host_bytes)
        mtt__print(&text, "host, pinned: %zu bytes = %.2f MiB; a step sends %.2f MiB there and %.2f back\n",
                   r->host_bytes, (double)r->host_bytes / 1048576, r->to_host_bytes / 1048576,
                   r->from_host_bytes / 1048576);
    mtt__print(&text, "outside the arena: at most %.1f MiB with %d threads%s\n",
               (double)r->outside_bytes / 1048576, mtt__threads(),
               MTT_IF_RANKS(r->wire_bytes > 0 ? ", and NCCL's" :) "");
    if (r->token_flops > 0)
        mtt__print(&text, "%.4f GFLOP a chunk of prompts, %.4f a token of each sequence\n", r->flops * 1e-9,
                   r->token_flops * 1e-9);
    else
        mtt__print(&text, "%.2f GFLOP a step, %.1f %% of them recomputed\n", r->flops * 1e-9,
                   100 * r->recompute_flops / r->flops);
    MTT_IF_RANKS(mtt__print_wires(&text, r);)
    write(user, at, text.size);
}

MTTDEF void mtt_schedule_json(const mtt_schedule *s, mtt_write_fn write, void *user)
{
    const mtt__program *p = &s->programs[MTT__TRAIN];
    mtt_plan_report plan;
    char at[2048];
    mtt__text text;
    int i;
    mtt_schedule_report(s, &plan);
    write(user, "{\"plan\": ", 9);
    write(user, at, mtt_plan_json(&plan, at, sizeof(at)));
    for (i = 0; i < p->op_count; i++) {
        const mtt_op *op = &p->ops[i];
        mtt__text_init(&text, at, sizeof(at));
        mtt__print(&text, "%s\n{\"op\": \"%s\", \"phase\": \"%s\", \"layer\": %d, \"recomputed\": %d",
                   i ? "," : ",\n\"timeline\": [", mtt_op_name(op->kind), mtt_phase_name(op->phase),
                   op->layer, op->recomputed);
        mtt__print(&text, ", \"live_bytes\": %zu, \"flops\": %.0f, \"traffic_bytes\": %.0f, \"bytes\": ",
                   op->live_bytes, op->flops, op->traffic_bytes);
        mtt__print_categories(&text, op->bytes);
        if (op->host_bytes) mtt__print(&text, ", \"host_bytes\": %zu", op->host_bytes);
        mtt__print(&text, "}");
        write(user, at, text.size);
    }
    write(user, "\n]}\n", 4);
}

/* -----------------------------------------------------------------------------------------------------------
   >>adapters
   -------------------------------------------------------------------------------------------------------- */

#if !defined(MTT_NO_ADAPTERS) || !defined(MTT_NO_FP8)
/* The linear layers of a layer, which two wings change. */
static const int mtt__linears[] = {MTT__QKV_WEIGHT, MTT__PROJ_WEIGHT, MTT__FC_WEIGHT, MTT__MLP_WEIGHT};

/* Which of these an operation is; -1: none. */
static int mtt__linear_number(const mtt__builder *b, const mtt_op *op)
{
    int k = 4;
    if (op->kind == MTT_OP_linear && op->layer >= 0)
        while (--k >= 0 && mtt__weight(b, mtt__linears[k], op->layer) != op->operands[1]) {}
    return k == 4 ? -1 : k;
}
#endif

#ifndef MTT_NO_ADAPTERS
/* LoRA (Hu et al. 2021, arXiv 2106.09685): a linear layer's weight W stays, and W + (alpha / rank) A B takes
   its place, of which A and B are trained. */

/* Rows of A, B and x A are found by the number of their linear layer. */
typedef char mtt__adapters_in_order[MTT__MLP_B == MTT__QKV_A + 7 ? 1 : -1];
typedef char mtt__inputs_in_order[MTT__A_MLP_XA == MTT__A_QKV_XA + 3 ? 1 : -1];

static int mtt__has_adapters(const mtt__builder *b)
{
    return b->policy->lora_rank > 0;
}

static void mtt__resolve_adapters(mtt_policy *p)
{
    if (p->lora_rank && p->lora_alpha == 0) p->lora_alpha = (float)p->lora_rank;
    if (p->lora_rank && !p->lora_targets) p->lora_targets = "attn.c_attn";
}

static void mtt__check_adapters(mtt__faults *faults, const mtt_model_desc *model, const mtt_policy *p)
{
    (void)model;
    mtt__require(faults, p->lora_rank % 8 == 0, "lora_rank is %d, it must be a multiple of 8", p->lora_rank);
}

/* 1 = a linear layer has an adapter, which `name` is a part of, as h.0.attn.c_attn.lora_A. */
static int mtt__is_target(const char *targets, const char *name)
{
    size_t size = strlen(name) - strlen(".lora_A");
    char layer[40] = "";
    memcpy(layer, name, size);
    return mtt__matches(targets, layer) || mtt__matches(targets, strchr(layer + 2, '.') + 1);
}

/* Adapters alone are trained, those of the targets. */
static void mtt__adapts(const mtt_policy *policy, int kind, const char *name, int *fate)
{
    if (policy->lora_rank && !mtt__is_added(kind)) *fate = MTT__FROZEN;
    if (mtt__is_added(kind) && !mtt__is_target(policy->lora_targets, name)) *fate = MTT__LEFT_OUT;
}

static int mtt__is_adapted(const mtt__parameter *q, const char *pattern)
{
    return mtt__is_added(q->kind) && mtt__is_target(pattern, q->weight->name);
}

static void mtt__check_targets(mtt__builder *b)
{
    if (mtt__has_adapters(b))
        mtt__check_patterns(b, b->policy->lora_targets, "lora_targets", mtt__is_adapted,
                            "none of attn.c_attn, attn.c_proj, mlp.c_fc and mlp.c_proj is");
}

/* An adapter's part in a product: alpha / rank. */
static float mtt__lora_scale(const mtt_policy *policy)
{
    return policy->lora_alpha / (float)policy->lora_rank;
}

/* y = x W + b becomes xa = scale x A, y = x W + b + xa B. */
static int mtt__rule_adapters(mtt__builder *b, mtt_op *op, const mtt_op *end)
{
    int which = op == end ? -1 : mtt__linear_number(b, op), kind = MTT__QKV_A + 2 * which;
    mtt_tensor *lora_a = which < 0 ? NULL : mtt__weight(b, kind, op->layer), *xa;
    const mtt_op_linear *f;
    if (!lora_a) return 0;
    f = MTT_OPERANDS_OF(linear, op);
    xa = mtt__make(b, MTT__A_QKV_XA + which, op->layer);
    MTT__EMIT(b, op->layer, 0, linear, f->x, lora_a, NULL, xa);
    b->op->scale = mtt__lora_scale(b->policy);
    MTT__EMIT(b, op->layer, 0, linear_adapted, f->x, f->weight, f->bias, xa,
              mtt__weight(b, kind + 1, op->layer), f->y);
    return 1;
}

/* The gradients of B and of x A, then those of the layer itself. */
static void mtt__adjoint_linear_adapted(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_linear_adapted *f = MTT_OPERANDS_OF(linear_adapted, op);
    mtt_op_linear linear = {f->x, f->weight, f->bias, f->y};
    mtt_tensor *dy = *mtt__gradient(b, f->y), *d_b = mtt__parameter_gradient(b, f->lora_b);
    mtt_op base = *op;
    if (d_b) {
        mtt_tensor *xa = mtt__need(b, f->xa);
        MTT__EMIT(b, op->layer, 0, linear_backward_weight, xa, dy, d_b, NULL);
    }
    if (mtt__trains(b, f->xa)) {
        MTT__EMIT(b, op->layer, 0, linear_backward_input, dy, f->lora_b, mtt__make_gradient(b, f->xa));
        b->op->scale = mtt__lora_scale(b->policy);
    }
    base.operands = (mtt_tensor **)(void *)&linear;
    mtt__adjoint_linear(b, &base);
}

/* y = x W + b, rounded; y += xa B */
static void mtt__cpu_linear_adapted(const mtt_op *op, const mtt_op_linear_adapted *o)
{
    mtt_op_linear linear = {o->x, o->weight, o->bias, o->y};
    mtt__cpu_linear(op, &linear);
    mtt__gemm(op, mtt__matrix(o->xa, 0), mtt__matrix(o->lora_b, 0), mtt__matrix(o->y, 0), NULL, 1, 1);
}

/* Returns the adapter of a weight, A or B; NULL: none. */
static const mtt__parameter *mtt__adapter(const mtt_trainer *t, const mtt__parameter *q, int of_b)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    int i, k = 0;
    while (k < (int)MTT__LENGTH(mtt__linears) && mtt__linears[k] != q->kind) k++;
    for (i = 0; i < p->parameter_count; i++)
        if (p->parameters[i].layer == q->layer && p->parameters[i].kind == MTT__QKV_A + 2 * k + of_b)
            return &p->parameters[i];
    return NULL;
}

/* Adds scale A B to elements of a weight. */
static mtt_status mtt__add_adapter(mtt_trainer *t, const mtt__parameter *q, int64_t at, int64_t count,
                                   float *values)
{
    const mtt__parameter *a = mtt__adapter(t, q, 0), *b = mtt__adapter(t, q, 1);
    const int64_t width = q->shape[1], rank = a ? a->shape[1] : 0, size = q->shape[0] * rank;
    mtt_status status;
    float *as, *bs;
    int64_t i, k;
    if (!a) return MTT_OK;
    as = (float *)mtt__alloc(t->env, (size_t)(size + rank * width), sizeof(float));
    if (!as) return MTT_E_MEMORY;
    bs = as + size;
    status = mtt__move_optim(t, MTT__GET, a, MTT__MASTER, 0, size, as);
    if (!status) status = mtt__move_optim(t, MTT__GET, b, MTT__MASTER, 0, rank * width, bs);
    for (i = 0; i < count && !status; i++) {
        int64_t row = (at + i) / width, column = (at + i) % width;
        double sum = 0;
        for (k = 0; k < rank; k++) sum += (double)as[row * rank + k] * (double)bs[k * width + column];
        values[i] += (float)((double)mtt__lora_scale(&t->schedule->policy) * sum);
    }
    mtt__free(t->env, as);
    return status;
}

static const mtt__wing *mtt__wing_adapters(void)
{
    static const mtt__wing wing = {mtt__resolve_adapters, mtt__check_adapters, mtt__adapts,
                                   mtt__check_targets, NULL, NULL};
    return &wing;
}
#endif /* MTT_NO_ADAPTERS */

#ifndef MTT_NO_FP8
/* -----------------------------------------------------------------------------------------------------------
   >>eight
   -------------------------------------------------------------------------------------------------------- */

/* A product of FP8 takes x and W in e4m3, each times a scale of its own, and the gradient dy in e5m2, at
   scale 1. It sums along the rows of both, so y = x W needs W transposed, and dW = x^T dy needs both
   transposed. So the weights of a layer are rounded twice, transposed before its forward pass and as they are
   before its backward pass, and dy at once in both orders. x is not kept: from what was kept its transpose is
   made again. What makes a tensor rounds it on its way where it can, `absorb`; else quantize does, an
   operation of its own. The comment at MTT_EIGHT_OPS has the operands. */

/* ---- checks ---- */

static void mtt__resolve_eight(mtt_policy *p)
{
    if (p->precision != MTT_FP8) return;
    if (p->fp8_products == MTT_FP8_ALL) p->loss = MTT_LOSS_CHUNKED;
    if (p->loss_chunk_rows > 0) p->loss_chunk_rows = (int)mtt__round_up(p->loss_chunk_rows, 16);
}

static void mtt__check_eight(mtt__faults *faults, const mtt_model_desc *model, const mtt_policy *p)
{
    int kv = model->heads_kv * model->d_head;
    if (p->precision != MTT_FP8) return;
    mtt__require(faults, model->d_model % 16 == 0 && model->d_ff % 16 == 0,
                 "precision is fp8: d_model %d and d_ff %d must be multiples of 16", model->d_model,
                 model->d_ff);
    mtt__require(faults, kv % 16 == 0,
                 "precision is fp8: heads_kv * d_head is %d, it must be a multiple of 16", kv);
    mtt__require(faults, !p->lora_rank,
                 "precision is fp8, which has no adapters: set it to bf16, or lora_rank to 0");
}

/* ---- the forward and the backward pass ---- */

/* 1 = products are in 8 bits: of the layers, of the head (`least` is MTT_FP8_ALL). Evaluations and generation
   have theirs in 16, for the weights as they are saved. */
static int mtt__in_eight(const mtt__builder *b, mtt_fp8_products least)
{
    return b->trains && b->policy->precision == MTT_FP8 && b->policy->fp8_products <= least;
}

/* Entries of the table of scales: those of each layer, in the order of its roles, then the model's. */
enum { MTT__LAYER_SCALES = 8, MTT__SCALE_LN_F = 0, MTT__SCALE_HEAD, MTT__SCALE_LOGITS, MTT__MODEL_SCALES };

/* The entry of an activation or a transposed weight in the table of scales. */
static int mtt__scale_entry(const mtt__builder *b, int role, int layer)
{
    static const int roles[MTT__LAYER_SCALES] = {MTT__A_LN_1, MTT__A_ATTENDED_EIGHT, MTT__A_LN_2, MTT__A_GELU,
                                                 MTT__A_QKV_EIGHT, MTT__A_PROJ_EIGHT, MTT__A_FC_EIGHT,
                                                 MTT__A_MLP_EIGHT};
    int i = 0;
    if (role == MTT__A_LN_F) return MTT__LAYER_SCALES * b->program->shape.layers + MTT__SCALE_LN_F;
    while (i < MTT__LAYER_SCALES - 1 && roles[i] != role) i++;
    return MTT__LAYER_SCALES * layer + i;
}

/* Makes an activation or a transposed weight that is in 8 bits. */
static mtt_tensor *mtt__make_eight(mtt__builder *b, int role, int layer)
{
    mtt_tensor *t = mtt__make(b, role, layer);
    if (b->status) return t;
    t->entry = mtt__scale_entry(b, role, layer);
    t->recorded = b->phase == MTT_FORWARD;
    return t;
}

/* An 8-bit tensor for the values of another, or their transpose, whose rows are padded to 16 elements.
   Without an entry it is a gradient in e5m2. */
static mtt_tensor *mtt__add_eight(mtt__builder *b, const mtt_tensor *t, int entry, int transposed)
{
    mtt_dtype dtype = entry < 0 ? MTT_F8_E5M2 : MTT_F8_E4M3;
    int64_t rows, width;
    mtt_tensor *eight;
    if (b->status) return &b->nothing;
    rows = mtt__rows(t), width = mtt__width(t);
    eight = mtt__add_tensor(b, dtype, t->category, -1, t->name, transposed ? ".t8" : ".8",
                            transposed ? width : rows, transposed ? mtt__round_up(rows, 16) : width, 0);
    eight->entry = entry;
    return eight;
}

/* A product's input, made again from what was kept: in 8 bits and transposed. */
static mtt_tensor *mtt__input_again(mtt__builder *b, int layer, const mtt_tensor *x)
{
    mtt_op maker = mtt__maker(b, x);
    const mtt_op_norm *n = MTT_OPERANDS_OF(norm, &maker);
    int attention = maker.kind == MTT_OP_flash; /* its output is there in 16 bits */
    mtt_tensor *from, *stats = NULL, *gain = NULL, *shift = NULL, *again;
    from = mtt__need(b, maker.operands[attention ? maker.inputs : 0]);
    if (maker.kind == MTT_OP_norm) stats = mtt__need(b, n->stats), gain = n->gain, shift = n->shift;
    if (maker.kind == MTT_OP_activation) { /* quantize can apply a norm on its way, but no activation */
        mtt_op_activation row = {from, mtt__add_tensor(b, mtt__dtype(b), x->category, -1, x->name, ".16",
                                                    mtt__rows(x), mtt__width(x), 0)};
        mtt__emit(b, maker.kind, layer, 0, &row)->recomputed = 1;
        from = row.y;
    }
    again = mtt__add_eight(b, x, x->entry, 1);
    MTT__EMIT(b, layer, 0, quantize, from, stats, gain, shift, NULL, again);
    return again;
}

/* From now on an activation is in 8 bits: what makes it rounds it. */
static mtt_tensor *mtt__narrow(mtt__builder *b, mtt_tensor *t)
{
    if (b->status) return t;
    t->dtype = MTT_F8_E4M3;
    t->bytes = (size_t)mtt__elements(t);
    t->entry = mtt__scale_entry(b, t->role, t->layer);
    t->recorded = 1;
    return t;
}

/* Returns the 8-bit input of a product: x itself, attention's output in 8 bits, or a copy as activation
   `role`. */
static mtt_tensor *mtt__eight_input(mtt__builder *b, int layer, mtt_tensor *x, int role)
{
    mtt_tensor *y;
    if (b->status || x->dtype == MTT_F8_E4M3) return x;
    if (x->role == MTT__A_ATTENDED)
        return b->activations[mtt__slot(b, MTT__A_ATTENDED_EIGHT, x->layer)].current;
    y = mtt__narrow(b, mtt__make(b, role, layer < 0 ? b->program->shape.layers : layer));
    MTT__EMIT(b, layer, 0, quantize, x, NULL, NULL, NULL, y, NULL);
    return y;
}

/* Rows of transposed weights are found by the number of their linear layer. */
typedef char mtt__eight_in_order[MTT__A_MLP_EIGHT - MTT__A_QKV_EIGHT == 3 ? 1 : -1];

/* The weights of a layer in 8 bits, transposed or as they are. */
static void mtt__emit_weights(mtt__builder *b, int layer, int transposed)
{
    mtt_tensor *operands[8];
    int i;
    for (i = 0; i < 4 && !b->status; i++) {
        mtt_tensor *w = operands[i] = mtt__weight(b, mtt__linears[i], layer);
        int role = MTT__A_QKV_EIGHT + i;
        operands[4 + i] = transposed ? mtt__make_eight(b, role, layer)
                                     : mtt__add_eight(b, w, mtt__scale_entry(b, role, layer), 0);
        operands[4 + i]->parameter = w->parameter;
        operands[4 + i]->transposed = transposed;
    }
    if (!b->status) mtt__emit(b, MTT_OP_quantize_weights, layer, 0, operands);
}

/* y = x W + b with x and W in 8 bits, and W transposed. A layer's weights are made before its first one. Only
   what no norm has made needs a copy, the input of attention and of the MLP: as that norm's output. */
static int mtt__eight_linear(mtt__builder *b, const mtt_op *op, int which)
{
    const mtt_op_linear *f = MTT_OPERANDS_OF(linear, op);
    mtt_tensor *x = mtt__eight_input(b, op->layer, f->x, which == 0 ? MTT__A_LN_1 : MTT__A_LN_2), *w;
    if (which == 0) mtt__emit_weights(b, op->layer, 1);
    w = b->activations[mtt__slot(b, MTT__A_QKV_EIGHT + which, op->layer)].current;
    MTT__EMIT(b, op->layer, 0, linear, x, w, f->bias, f->y);
    return 1;
}

/* The head's products, with its weight as it is and transposed. */
static int mtt__eight_loss(mtt__builder *b, const mtt_op *op)
{
    mtt_op_chunked_loss f = *MTT_OPERANDS_OF(chunked_loss, op);
    mtt_tensor *x = mtt__eight_input(b, -1, f.x, MTT__A_LN_F), *w = f.weight;
    int scales = MTT__LAYER_SCALES * b->program->shape.layers;
    int64_t rows, vocab = b->program->shape.vocab_padded;
    if (b->status) return 1;
    if (x != f.x) { /* a copy has the gradient now */
        *mtt__gradient(b, f.x) = NULL;
        f.dx = mtt__make_gradient(b, x);
    }
    f.weight = mtt__add_eight(b, w, scales + MTT__SCALE_HEAD, 0);
    f.weight_t = mtt__add_eight(b, w, scales + MTT__SCALE_HEAD, 1);
    f.weight->recorded = 1;
    f.weight->transposed = w->transposed; /* and weight_t is [in, out] */
    MTT__EMIT(b, -1, 0, quantize, w, NULL, NULL, NULL, f.weight, f.weight_t);
    if (f.d_weight) f.x_t = mtt__input_again(b, -1, x);
    f.x = x;
    if (b->status) return 1;
    rows = f.logits->shape[0];
    f.d_logits = mtt__add_tensor(b, MTT_F8_E5M2, MTT_LOGITS, -1, "", "d_logits.8", rows, vocab, 0);
    f.d_logits_t = mtt__add_tensor(b, MTT_F8_E5M2, MTT_LOGITS, -1, "", "d_logits.t8", vocab,
                                   mtt__round_up(rows, 16), 0);
    f.d_logits->entry = f.d_logits_t->entry = scales + MTT__SCALE_LOGITS;
    mtt__emit(b, MTT_OP_chunked_loss, -1, op->site, &f);
    return 1;
}

/* Products of the forward pass take 8 bits. What only they read is narrowed: a norm before a branch or the
   head, and an activation of the MLP. The backward pass reads attention's output in 16 bits, too: it gets a
   copy. */
static int mtt__rule_eight(mtt__builder *b, mtt_op *op, const mtt_op *end)
{
    int head = mtt__in_eight(b, MTT_FP8_ALL), pre = b->schedule->model.norm_place == MTT_NORM_PRE, which;
    mtt_tensor *made, *copy;
    if (op == end) return 0;
    which = mtt__linear_number(b, op);
    if (which >= 0) return mtt__eight_linear(b, op, which);
    made = op->operands[op->inputs]; /* every operation of the forward pass makes something */
    switch (op->kind) {
    case MTT_OP_norm:
        if (pre && (op->layer >= 0 || head)) mtt__narrow(b, made);
        return 0;
    case MTT_OP_activation: mtt__narrow(b, made); return 0;
    case MTT_OP_chunked_loss: return head && mtt__eight_loss(b, op);
    case MTT_OP_flash:
        ((mtt_op_flash *)(void *)op->operands)->out_8 = mtt__make_eight(b, MTT__A_ATTENDED_EIGHT, op->layer);
        return 0;
    case MTT_OP_attention_values:
        mtt__append(b, op);
        copy = mtt__make_eight(b, MTT__A_ATTENDED_EIGHT, op->layer);
        MTT__EMIT(b, op->layer, 0, quantize, made, NULL, NULL, NULL, copy, NULL);
        return 1;
    default: return 0;
    }
}

/* Makes an activation's gradient in 8 bits, as it is and transposed. */
static void mtt__gradient_eight(mtt__builder *b, const mtt_op *op, const mtt_tensor *t, mtt_tensor *made[2])
{
    mtt_tensor *gradient = *mtt__gradient(b, t);
    made[0] = mtt__add_eight(b, gradient, -1, 0);
    made[1] = mtt__add_eight(b, gradient, -1, 1);
    MTT__EMIT(b, op->layer, 0, quantize, gradient, NULL, NULL, NULL, made[0], made[1]);
}

/* Returns a weight's 8-bit copy for the backward pass. The first call for a layer rounds all four of its
   weights. */
static mtt_tensor *mtt__weight_eight(mtt__builder *b, int layer, const mtt_tensor *weight)
{
    const mtt_op *op = NULL;
    int i = b->program->op_count, k = 0;
    while (i-- > 0) {
        op = &b->program->ops[i];
        if (op->kind == MTT_OP_quantize_weights && !op->operands[op->inputs]->transposed)
            break; /* of this layer or one above */
    }
    if (i < 0 || op->layer != layer) mtt__emit_weights(b, layer, 0), i = b->program->op_count - 1;
    if (b->status) return NULL;
    op = &b->program->ops[i];
    while (op->operands[k] != weight) k++;
    return op->operands[op->inputs + k];
}

/* The gradient of x. An activation's input is made again before it, so that its backward pass can follow. */
static void mtt__input_gradient_eight(mtt__builder *b, const mtt_op *op, mtt_tensor *dy,
                                      const mtt_tensor *weight)
{
    const mtt_tensor *x = MTT_OPERANDS_OF(linear, op)->x;
    mtt_op maker = mtt__maker(b, x);
    mtt_tensor *eight;
    if (maker.kind == MTT_OP_activation) mtt__need(b, maker.operands[0]);
    eight = mtt__weight_eight(b, op->layer, weight);
    MTT__EMIT(b, op->layer, 0, linear_backward_input, dy, eight, mtt__make_gradient(b, x));
}

/* The weight's gradient comes first, but last where x is the result of a norm or of an activation, whose
   backward pass follows and can make x_t on its way. */
static void mtt__adjoint_linear_eight(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_linear *f = MTT_OPERANDS_OF(linear, op);
    mtt_tensor *weight = b->program->parameters[f->weight->parameter].weight, *x_t;
    mtt_tensor *d_weight = mtt__parameter_gradient(b, weight), *d_bias = mtt__parameter_gradient(b, f->bias);
    mtt_tensor *dy[2];
    mtt_op_kind maker = mtt__maker(b, f->x).kind;
    int trains = mtt__trains(b, f->x);
    int last = trains && d_weight && (maker == MTT_OP_norm || maker == MTT_OP_activation);
    mtt__gradient_eight(b, op, f->y, dy);
    if (last) mtt__input_gradient_eight(b, op, dy[0], weight);
    x_t = d_weight ? mtt__input_again(b, op->layer, f->x) : NULL;
    if (d_weight || d_bias)
        MTT__EMIT(b, op->layer, 0, linear_backward_weight, x_t, dy[1], d_weight, d_bias);
    if (trains && !last) mtt__input_gradient_eight(b, op, dy[0], weight);
}

/* Emits it not in place, since what it makes will be rounded. */
static void mtt__adjoint_activation_eight(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_activation *f = MTT_OPERANDS_OF(activation, op);
    mtt_tensor *x = mtt__need(b, f->x);
    mtt_op_activation_backward row = {*mtt__gradient(b, f->y), x, mtt__make_gradient(b, x), NULL, NULL};
    mtt__emit(b, MTT_OP_activation_backward, op->layer, 0, &row);
}

/* The gradient passes through, and joins that of another use. Weights' are made by their products, and
   transposes need none. */
static void mtt__adjoint_quantize(mtt__builder *b, const mtt_op *op)
{
    const mtt_op_quantize *f = MTT_OPERANDS_OF(quantize, op);
    mtt_tensor *other;
    if (f->x->role < 0 || !f->y || f->y->role < 0) return;
    other = *mtt__gradient(b, f->x);
    *mtt__gradient(b, f->x) = *mtt__gradient(b, f->y);
    mtt__join_gradient(b, op->layer, f->x, other);
}

/* Emits the adjoint of an operation on 8 bits. 0 = it is on none: its usual adjoint follows. */
static int mtt__adjoint_eight(mtt__builder *b, const mtt_op *op)
{
    int narrow = op->operands[op->kind == MTT_OP_activation ? op->inputs : 0]->dtype == MTT_F8_E4M3;
    const mtt_op_flash *f = MTT_OPERANDS_OF(flash, op);
    if (op->kind == MTT_OP_flash && f->out_8) *mtt__gradient(b, f->out) = *mtt__gradient(b, f->out_8);
    if (op->kind == MTT_OP_linear && narrow) mtt__adjoint_linear_eight(b, op);
    else if (op->kind == MTT_OP_activation && narrow) mtt__adjoint_activation_eight(b, op);
    else return 0;
    return 1;
}

/* The last operation that writes a tensor. */
static mtt_op *mtt__writer(const mtt__builder *b, const mtt_tensor *t)
{
    int i = b->program->op_count, k;
    while (i-- > 0) {
        mtt_op *op = &b->program->ops[i];
        for (k = op->inputs; k < op->inputs + op->outputs; k++)
            if (op->operands[k] == t) return op;
    }
    return NULL;
}

/* Lets the operation that makes a gradient round it, if it can. Attention can with sequences of whole 16
   tokens, and rotary where q and k have no norms. */
static int mtt__absorb_gradient(mtt__builder *b, const mtt_op_quantize *q)
{
    mtt_op *maker = mtt__writer(b, q->x);
    mtt_op_norm_backward *n = (mtt_op_norm_backward *)(void *)maker->operands;
    mtt_op_activation_backward *a = (mtt_op_activation_backward *)(void *)maker->operands;
    mtt_op_flash_backward *f = (mtt_op_flash_backward *)(void *)maker->operands;
    mtt_op_rotary_backward *r = (mtt_op_rotary_backward *)(void *)maker->operands;
    switch (maker->kind) {
    case MTT_OP_norm_backward: n->dx_8 = q->y, n->dx_t = q->y_t; return 1;
    case MTT_OP_activation_backward: a->dx = q->y, a->dx_t = q->y_t; return 1;
    case MTT_OP_flash_backward:
        if (b->program->shape.seq_len % 16) return 0;
        f->d_qkv = q->y, f->d_qkv_t = q->y_t;
        return 1;
    case MTT_OP_rotary_backward:
        if (r->q_gain) return 0;
        r->dx = q->y, r->dx_t = q->y_t;
        return 1;
    default: return 0;
    }
}

/* Matches [recomputed activation], quantize to x_t, linear_backward_weight, followed by `op`, the backward
   pass of x's maker. `op` can make x_t itself: quantize goes, and `op` moves before the weight's gradient. */
static int mtt__absorb_input(mtt__builder *b, mtt_op *op)
{
    mtt__program *p = b->program;
    mtt_op_norm_backward *n = (mtt_op_norm_backward *)(void *)op->operands;
    mtt_op_activation_backward *a = (mtt_op_activation_backward *)(void *)op->operands;
    int activation = op->kind != MTT_OP_norm_backward;
    const mtt_op_quantize *q;
    mtt_op weight;
    if (p->op_count < 3 || p->ops[p->op_count - 2].kind != MTT_OP_quantize) return 0;
    weight = p->ops[p->op_count - 1];
    q = MTT_OPERANDS_OF(quantize, &p->ops[p->op_count - 2]);
    if (weight.kind != MTT_OP_linear_backward_weight || q->y || q->y_t != weight.operands[0]) return 0;
    if (activation ? p->ops[p->op_count - 3].operands[0] != a->x : q->x != n->x) return 0;
    if (activation) a->y_t = q->y_t;
    else n->y_t = q->y_t, n->shift = q->shift;
    p->op_count -= 2 + activation;
    mtt__append(b, op);
    mtt__append(b, &weight);
    return 1;
}

/* What quantize would do in a pass of its own, the backward passes of norms, activations, attention and
   rotary do on their way. */
static int mtt__rule_absorb(mtt__builder *b, mtt_op *op, const mtt_op *end)
{
    const mtt_op_quantize *q;
    if (op == end || op->phase != MTT_BACKWARD) return 0;
    q = MTT_OPERANDS_OF(quantize, op);
    switch (op->kind) {
    case MTT_OP_quantize: return q->y && q->y_t && mtt__absorb_gradient(b, q);
    case MTT_OP_norm_backward:
    case MTT_OP_activation_backward: return mtt__absorb_input(b, op);
    default: return 0;
    }
}

static int mtt__has_eight(const mtt__builder *b)
{
    return mtt__in_eight(b, MTT_FP8_LAYERS);
}

/* ---- state ---- */

static void mtt__add_scales(mtt__builder *b)
{
    mtt__program *p = b->program;
    if (b->policy->precision == MTT_FP8)
        p->scales = mtt__add_state(b, MTT_U8, MTT_DATA, "scales",
                                   MTT__LAYER_SCALES * p->shape.layers + MTT__MODEL_SCALES,
                                   (int64_t)sizeof(mtt_scale));
}

/* The end of a step: scales for the next one. */
static void mtt__emit_scales(mtt__builder *b)
{
    b->phase = MTT_STEP;
    MTT__EMIT(b, -1, 0, rescale, b->program->scales, b->program->counters);
}

/* ---- numbers ---- */

/* e5m2 is the upper half of a half: it becomes infinite from 61440 up. */
MTT__INLINE uint8_t mtt__to_e5m2(float x)
{
    uint32_t bits = mtt__float_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - 0x38000000u + 0xfffffu + ((magnitude >> 21) & 1u)) >> 21;
    uint32_t subnormal = mtt__float_bits(mtt__bits_float(magnitude) + 128.0f) - 0x43000000u;
    uint32_t code = mtt__either(magnitude < 0x38800000u, subnormal, normal);
    code = mtt__either(magnitude >= 0x47700000u, magnitude > 0x7f800000u ? 0x7fu : 0x7cu, code);
    return (uint8_t)(code | (bits >> 24 & 0x80u));
}

/* Rounds to one of the two nearest e5m2. Over all bytes (0..255) the mean is x, rounded to a half. */
MTT__INLINE uint8_t mtt__to_e5m2_by(float x, uint32_t byte)
{
    return (uint8_t)((mtt__to_fp16(x) + byte) >> 8);
}

MTT__INLINE float mtt__from_e5m2(uint8_t code) { return mtt__from_fp16((uint16_t)(code << 8)); }

static void mtt__load_eight(const mtt_tensor *t, int64_t first, int64_t count, float *out)
{
    const uint8_t *eight = (const uint8_t *)t->data + first;
    float inverse = t->scale ? t->scale->inverse : 1.0f;
    int64_t i;
    if (t->dtype == MTT_F8_E4M3)
        for (i = 0; i < count; i++) out[i] = mtt__from_e4m3(eight[i]) * inverse;
    else
        for (i = 0; i < count; i++) out[i] = mtt__from_e5m2(eight[i]) * inverse;
}

/* Notes the largest absolute value and how many are clipped. The order of threads does not matter. */
static void mtt__record(mtt_scale *scale, const float *values, int64_t count)
{
    float largest = mtt__largest_magnitude(values, count), limit = 448.0f * scale->inverse;
    uint32_t clipped = 0, bits;
    int64_t i;
    for (i = 0; i < count && largest > limit; i++) clipped += fabsf(values[i]) > limit;
    bits = mtt__float_bits(largest);
#ifdef MTT__GNU
    {
        uint32_t seen = __atomic_load_n(&scale->largest, __ATOMIC_RELAXED);
        while (bits > seen && !__atomic_compare_exchange_n(&scale->largest, &seen, bits, 1, __ATOMIC_RELAXED,
                                                           __ATOMIC_RELAXED)) {}
        if (clipped) __atomic_fetch_add(&scale->clipped, clipped, __ATOMIC_RELAXED);
    }
#else /* MSVC's own, and others in one thread */
    MTT__OMP(omp critical(mtt__record))
    {
        if (bits > scale->largest) scale->largest = bits;
        scale->clipped += clipped;
    }
#endif
}

/* Rounds values to the 8 bits of a tensor. */
static void mtt__round_eight(const mtt_tensor *t, int64_t count, const float *values, uint8_t *out)
{
    float scale = t->scale ? t->scale->scale : 1.0f;
    int64_t i;
    if (t->dtype == MTT_F8_E4M3)
        for (i = 0; i < count; i++) out[i] = mtt__to_e4m3(values[i] * scale);
    else
        for (i = 0; i < count; i++) out[i] = mtt__to_e5m2(values[i] * scale);
    if (t->recorded) mtt__record(t->scale, values, count);
}

/* ---- operations ---- */

/* Stores a row of values as a column of a transposed tensor in 8 bits. */
static void mtt__store_column(const mtt_tensor *t, int64_t column, int64_t count, const float *values)
{
    uint8_t codes[MTT__BLOCK], *to = (uint8_t *)t->data + column;
    int64_t at, n, i;
    MTT__BLOCKS(at, n, 0, count) {
        mtt__round_eight(t, n, values + at, codes);
        for (i = 0; i < n; i++) to[(at + i) * mtt__width(t)] = codes[i];
    }
}

/* y and y_t = x, or (x - mean) rstd gain + shift, in 8 bits; zeros where y_t has no row of x */
static void mtt__cpu_quantize(const mtt_op *op, const mtt_op_quantize *o)
{
    int64_t n = mtt__width(o->x), rows = mtt__rows(o->x), row;
    (void)op;
    MTT__THREADS(rows * n)
    for (row = 0; row < (o->y_t ? mtt__width(o->y_t) : rows); row++) {
        float x[MTT__BLOCK], gain[MTT__BLOCK], shift[MTT__BLOCK];
        const float *stats = o->stats ? (const float *)o->stats->data + 2 * row : NULL;
        int64_t at, count, k;
        MTT__BLOCKS(at, count, 0, n) {
            memset(x, 0, sizeof(x));
            if (row < rows) mtt__load(o->x, row * n + at, count, x);
            if (row < rows && stats) {
                mtt__load(o->gain, at, count, gain);
                if (o->shift) mtt__load(o->shift, at, count, shift);
                else memset(shift, 0, sizeof(shift));
                for (k = 0; k < count; k++) x[k] = (x[k] - stats[0]) * stats[1] * gain[k] + shift[k];
            }
            if (row < rows && o->y) mtt__store(o->y, row * n + at, count, x);
            if (o->y_t) {
                mtt_tensor y_t = mtt__row_range(o->y_t, at, count);
                mtt__store_column(&y_t, row, count, x);
            }
        }
    }
}

static void mtt__cpu_quantize_weights(const mtt_op *op, const mtt_op_quantize_weights *o)
{
    int i;
    (void)o;
    for (i = 0; i < 4; i++) {
        mtt_op_quantize q = {op->operands[i], NULL, NULL, NULL, NULL, NULL};
        if (op->operands[4 + i]->transposed) q.y_t = op->operands[4 + i];
        else q.y = op->operands[4 + i];
        mtt__cpu_quantize(op, &q);
    }
}

/* Rounds what an operation has made to 8 bits: as it is, and transposed. Either may be absent. */
static void mtt__round_also(const mtt_op *op, mtt_tensor *x, mtt_tensor *x_8, mtt_tensor *x_t)
{
    mtt_op_quantize row = {x, NULL, NULL, NULL, x_8, x_t};
    if (x_8 || x_t) mtt__cpu_quantize(op, &row);
}

/* dx = dy in 8 bits, with q and k rotated back. Before 8 bits, they are rounded to 16. */
static void mtt__rotary_backward_eight(const mtt_op *op, const mtt_op_rotary_backward *o)
{
    const mtt_shape *d = op->shape;
    int64_t dim = d->d_head, turned = d->heads + d->heads_kv, row;
    MTT__THREADS(mtt__elements(o->dx))
    for (row = 0; row < d->rows; row++) {
        const float *angles = (const float *)o->angles->data + row % d->seq_len * dim;
        int64_t head, at = row * mtt__width(o->dx), k;
        float g[MTT__MAX_HEAD];
        for (head = 0; head < turned + d->heads_kv; head++, at += dim) {
            mtt__load(o->dy, at, dim, g);
            if (head < turned) mtt__rotate(g, angles, dim, d->rotary_interleaved, 1);
            for (k = 0; k < dim; k++) g[k] = mtt__from_bf16(mtt__to_bf16(g[k]));
            mtt__store(o->dx, at, dim, g);
        }
    }
}

/* y_t = the activation of x, transposed, and zeros where it has no row of x */
static void mtt__activation_transposed(mtt_mlp mlp, const mtt_tensor *x, const mtt_tensor *y_t)
{
    int64_t n = mtt__rows(y_t), pitch = mtt__width(x), rows = mtt__rows(x), row;
    MTT__THREADS(rows * n)
    for (row = 0; row < mtt__width(y_t); row++) {
        float values[MTT__BLOCK], up[MTT__BLOCK], y[MTT__BLOCK] = {0};
        int64_t at, count;
        MTT__BLOCKS(at, count, 0, n) {
            mtt_tensor columns = mtt__row_range(y_t, at, count);
            if (row < rows) {
                mtt__load(x, row * pitch + at, count, values);
                if (pitch > n) mtt__load(x, row * pitch + n + at, count, up);
                mtt__activation_block(mlp, values, up, y, count);
            }
            mtt__store_column(&columns, row, count, y);
        }
    }
}

/* sums (+)= the sums of the rows of dy_t */
static void mtt__sum_columns(const mtt_tensor *dy_t, const mtt_tensor *sums, int add)
{
    int64_t n = mtt__width(dy_t), rows = mtt__rows(dy_t), row;
    MTT__THREADS(rows * n)
    for (row = 0; row < rows; row++) {
        float buffer[MTT__BLOCK], *out = (float *)sums->data + row, sum = add ? *out : 0.0f;
        int64_t at, count;
        MTT__BLOCKS(at, count, 0, n) sum += mtt__sum(mtt__read(dy_t, row * n + at, count, buffer), count);
        *out = sum;
    }
}

/* d_weight (+)= x_t dy_t^T, or dy_t x_t^T for a transposed weight; d_bias (+)= sums of the rows of dy_t */
static void mtt__weight_gradients_eight(const mtt_op *op, const mtt_op_linear_backward_weight *o)
{
    int transposed = o->d_weight && o->d_weight->transposed;
    const mtt_tensor *left = transposed ? o->dy : o->x, *right = transposed ? o->x : o->dy;
    if (o->d_weight)
        mtt__gemm(op, mtt__matrix(left, 0), mtt__matrix(right, 1), mtt__matrix(o->d_weight, 0), NULL,
                  op->adds, 1);
    if (o->d_bias) mtt__sum_columns(o->dy, o->d_bias, op->adds);
}

/* Stores columns of a row of d_logits in e5m2. `row` counts from the micro-batch's first one. Rounded to
   nearest, a target's gradient would stay the same while its probability moves by up to 1/8. That raised a
   small model's perplexity by 1.4 % in 10,000 steps, random bytes by 0.2 to 0.5 % (tools/performance.md). */
static void mtt__store_logits_eight(const mtt_op *op, const mtt_op_cross_entropy_backward *o, int64_t row,
                                    int64_t column, int64_t n, const float *values, uint8_t *out)
{
    const mtt_control *c = mtt__control(o->control);
    uint64_t stream = mtt__op_stream(op) | mtt__stream_step(c->micro_batch);
    float scale = o->d_logits->scale->scale;
    int64_t i, k;
    for (i = 0; i < n; i += 8) {
        mtt_draw draw = mtt__logits_draw(c->seed, stream, row, column + i, mtt__width(o->d_logits));
        for (k = 0; k < 8; k++)
            out[i + k] = mtt__to_e5m2_by(values[i + k] * scale,
                                         mtt__dropout_number(draw.word, (int)(row % 2 * 8 + k), 8));
    }
}

/* Makes the same by gradients of logits in 8 bits, which lie beside the logits. */
static void mtt__chunk_gradients_eight(const mtt_op *op, const mtt_op_chunked_loss *o, mtt__loss_chunk *c)
{
    mtt_tensor d_logits = mtt__row_range(o->d_logits, 0, mtt__rows(&c->logits));
    mtt_op_cross_entropy_backward d_loss = {&c->logits, &c->losses,  &c->targets,
                                            o->control, o->counters, &d_logits};
    mtt_op_linear_backward_input d_input = {&d_logits, o->weight_t, &c->dx};
    float factor = mtt__loss_factor(mtt__control(o->control), mtt__counters(o->counters));
    int64_t rows = mtt__rows(&d_logits), width = mtt__width(&d_logits), row;
    MTT__THREADS(rows * width)
    for (row = 0; row < rows; row++) {
        float x[MTT__BLOCK];
        int64_t j, n;
        MTT__BLOCKS(j, n, 0, width) {
            mtt__logit_block(op, &d_loss, factor, row, j, n, x);
            mtt__store_logits_eight(op, &d_loss, c->first + row, j, n, x,
                                    (uint8_t *)d_logits.data + row * width + j);
        }
    }
    mtt__round_also(op, &d_logits, NULL, o->d_logits_t);
    mtt__cpu_linear_backward_input(op, &d_input);
    if (o->d_weight) {
        mtt__view left = mtt__matrix(o->d_logits_t, 0), right = mtt__matrix(o->x_t, 1);
        left.n = right.m = mtt__round_up(rows, 16);
        right.first += c->first;
        mtt__gemm(op, left, right, mtt__matrix(o->d_weight, 0), NULL, op->adds, 1);
    }
    if (o->d_bias) mtt__sum_columns(o->d_logits_t, o->d_bias, op->adds);
}

static void mtt__loss_eight(const mtt_op *op, const mtt_op_chunked_loss *o)
{
    mtt__scale_logits(o->d_logits->scale, mtt__control(o->control), mtt__counters(o->counters));
    mtt__loss_by_chunks(op, o, mtt__chunk_gradients_eight);
}

/* Scales of the next step, and what this one clipped */
static void mtt__cpu_rescale(const mtt_op *op, const mtt_op_rescale *o)
{
    mtt_scale *scales = (mtt_scale *)o->scales->data;
    mtt_counters *counters = mtt__counters(o->counters);
    int64_t i;
    (void)op;
    for (i = counters->clipped = 0; i < o->scales->shape[0]; i++)
        counters->clipped += mtt__rescale(&scales[i], counters->skipped);
}

/* Runs an operation that takes or makes tensors in 8 bits beside what it does without; 0 = it has none. */
static int mtt__cpu_eight(const mtt_op *op)
{
    const mtt_op_flash *f = MTT_OPERANDS_OF(flash, op);
    const mtt_op_flash_backward *df = MTT_OPERANDS_OF(flash_backward, op);
    const mtt_op_rotary_backward *r = MTT_OPERANDS_OF(rotary_backward, op);
    const mtt_op_norm_backward *n = MTT_OPERANDS_OF(norm_backward, op);
    const mtt_op_activation_backward *a = MTT_OPERANDS_OF(activation_backward, op);
    const mtt_op_linear_backward_weight *w = MTT_OPERANDS_OF(linear_backward_weight, op);
    const mtt_op_chunked_loss *loss = MTT_OPERANDS_OF(chunked_loss, op);
    switch (op->kind) {
    case MTT_OP_flash:
        if (!f->out_8) return 0;
        mtt__cpu_flash(op, f);
        mtt__round_also(op, f->out, f->out_8, NULL);
        return 1;
    case MTT_OP_flash_backward:
        if (!df->d_qkv_t) return 0;
        mtt__cpu_flash_backward(op, df);
        mtt__round_also(op, df->d_qkv, NULL, df->d_qkv_t);
        return 1;
    case MTT_OP_rotary_backward:
        if (!r->dx_t) return 0;
        mtt__rotary_backward_eight(op, r);
        mtt__round_also(op, r->dx, NULL, r->dx_t);
        return 1;
    case MTT_OP_norm_backward:
        if (!n->dx_t && !n->y_t) return 0;
        mtt__cpu_norm_backward(op, n);
        mtt__round_also(op, n->dx, n->dx_8, n->dx_t);
        if (n->y_t) {
            mtt_op_quantize y = {n->x, n->stats, n->gain, n->shift, NULL, n->y_t};
            mtt__cpu_quantize(op, &y);
        }
        return 1;
    case MTT_OP_activation_backward:
        if (!a->dx_t && !a->y_t) return 0;
        if (a->y_t) mtt__activation_transposed(op->shape->mlp, a->x, a->y_t);
        mtt__slope_rows(op->shape->mlp, a);
        mtt__round_also(op, a->dx, NULL, a->dx_t);
        return 1;
    case MTT_OP_linear_backward_weight:
        if (w->dy->dtype != MTT_F8_E5M2) return 0;
        mtt__weight_gradients_eight(op, w);
        return 1;
    case MTT_OP_chunked_loss:
        if (!loss->d_logits) return 0;
        mtt__loss_eight(op, loss);
        return 1;
    default: return 0;
    }
}

/* ---- a trainer's scales ---- */

/* Moves scales of 8-bit tensors, from entry `at` up, between host and device. */
static mtt_status mtt__move_scales(mtt_trainer *t, int way, int64_t at, int64_t count, float *values)
{
    mtt_scale *device = (mtt_scale *)t->schedule->programs[MTT__TRAIN].scales->data + at;
    mtt_scale scale = {0, 0, 0, 0};
    mtt_status status = MTT_OK;
    int64_t i;
    for (i = 0; i < count && !status; i++) {
        if (way == MTT__PUT) scale.scale = values[i], scale.inverse = 1.0f / values[i];
        status = mtt__copy(t, way, device + i, &scale, sizeof(scale));
        if (way == MTT__GET) values[i] = t->measured ? scale.scale : 0.0f;
    }
    return status;
}

/* Scales for the pass that measures them: 14 is then the largest value. */
static mtt_status mtt__fill_scales(mtt_trainer *t)
{
    int64_t count = t->schedule->programs[MTT__TRAIN].scales->shape[0], i;
    for (i = 0; i < count; i++) t->values[i] = 1.0f / 32;
    return mtt__move_scales(t, MTT__PUT, 0, count, t->values);
}

#ifndef MTT_NO_RANKS
/* Takes the scales of rank 0, whose micro-batch is the first. */
static mtt_status mtt__take_scales(mtt_trainer *t)
{
    const mtt_tensor *scales = t->schedule->programs[MTT__TRAIN].scales;
    mtt_status status = mtt__copy(t, MTT__GET, scales->data, t->staging, scales->bytes);
    if (!status) status = mtt__spread(t, 0, t->staging, scales->bytes);
    return status ? status : mtt__copy(t, MTT__PUT, scales->data, t->staging, scales->bytes);
}
#endif

/* Measures the scales of 8-bit tensors by the first step's forward pass. */
static mtt_status mtt__measure_scales(mtt_trainer *t, const int32_t *tokens, const int32_t *targets,
                                      int64_t counted)
{
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    int forward = 0;
    mtt_status status;
    if (!p->scales || t->measured) return MTT_OK;
    while (p->ops[forward].phase == MTT_FORWARD) forward++;
    status = mtt__fill_scales(t);
    if (!status) status = mtt__send(t, p, tokens, targets, counted, 0);
    if (!status) status = mtt__told(t, t->backend.run(t->context, p->ops, forward));
    if (!status) /* rescale, the last operation: FP8 has no early updates, so there is a step */
        status = mtt__told(t, t->backend.run(t->context, p->ops + p->op_count - 1, 1));
    MTT_IF_RANKS(if (!status && t->schedule->policy.ranks > 1) status = mtt__take_scales(t);)
    t->measured = !status;
    return status;
}

static const mtt__wing *mtt__wing_eight(void)
{
    static const mtt__wing wing = {mtt__resolve_eight, mtt__check_eight, NULL, NULL, mtt__add_scales,
                                   mtt__adjoint_eight};
    return &wing;
}
#endif /* MTT_NO_FP8 */

#ifndef MTT_NO_RANKS
/* -----------------------------------------------------------------------------------------------------------
   >>exchange
   -------------------------------------------------------------------------------------------------------- */

/* Ranks train as one rank does that has all their micro-batches. A pass writes its program again for many:
   gradients are exchanged as they are made, and added up in the order of the ranks. With shards ("ZeRO") each
   rank updates a share of the parameters, and sends the others the new weights. Here are the shares, the
   pass, the bytes sent, and the operations on a CPU. >>ranks moves the bytes. */

/* ---- shares ---- */

/* The elements of a parameter in a rank's share. Returns their number. */
static int64_t mtt__share(const mtt_part *part, int rank, int64_t *begin)
{
    int64_t end = ((rank + 1) * part->share - part->block) * MTT__RANGE_BLOCK;
    *begin = (rank * part->share - part->block) * MTT__RANGE_BLOCK;
    if (*begin < 0) *begin = 0;
    if (end > part->elements) end = part->elements;
    return end > *begin ? end - *begin : 0;
}

/* Ranks exchange gradients in the backward pass, unless they do it once, or first add up those of their
   micro-batches. */
static int mtt__exchanges_at_once(const mtt_policy *policy)
{
    return policy->exchange != MTT_EXCHANGE_FLAT &&
           (policy->accumulate == 1 || policy->shard == MTT_SHARD_GRADIENTS);
}

/* Divides the parameters: the blocks of each layer into as many runs as there are ranks. */
static void mtt__divide(mtt__builder *b)
{
    const mtt_policy *policy = b->policy;
    mtt__program *p = b->program;
    int shares = policy->shard != MTT_SHARD_NONE, first, end, i;
    int64_t before = 0, blocks, count;
    if (policy->ranks == 1) return;
    p->optim_elements = 0;
    for (first = 0; first < p->parameter_count; first = end, before += blocks) {
        end = mtt__layer_end(p, first);
        for (i = first, blocks = 0; i < end; i++) {
            mtt_part *part = &p->parameters[i].part;
            part->block = blocks;
            part->square = before + blocks;
            blocks += mtt__ceil_div(part->elements, MTT__RANGE_BLOCK);
        }
        for (i = first; i < end; i++) {
            mtt__parameter *q = &p->parameters[i];
            q->part.share = mtt__ceil_div(blocks, policy->ranks);
            count = mtt__share(&q->part, policy->rank, &q->part.mine);
            q->part.end = q->part.mine + count;
            if (shares) q->part.begin = q->part.mine, q->part.count = count;
            if (shares && mtt__exchanges_at_once(policy))
                q->part.base = q->part.mine, q->sum_shape[0] = count, q->sum_shape[1] = 0;
            q->part.first = p->optim_elements;
            p->optim_elements += mtt__round_up(q->part.count, MTT__PART);
        }
    }
    if (!p->optim_elements) p->optim_elements = MTT__PART; /* more ranks than blocks */
}

/* ---- the pass ---- */

/* What it keeps from operation to operation. */
typedef struct mtt__under_way {
    mtt_tensor *count, *counts; /* of the loss: this rank's, all ranks' */
    mtt_tensor *received;       /* gradients of parameters `first` to `end` - 1, to be added; NULL: none */
    int first, end;
} mtt__under_way;

static int mtt__has_ranks(const mtt__builder *b)
{
    return b->trains && b->policy->ranks > 1;
}

/* Ranks send each other their losses and hits. */
static int mtt__exchange_counts(mtt__builder *b, mtt__under_way *w, mtt_op *op)
{
    w->count = mtt__add_tensor(b, MTT_U8, MTT_DATA, -1, "", "count", (int64_t)sizeof(mtt_count), 0, 0);
    w->counts = mtt__add_tensor(b, MTT_U8, MTT_DATA, -1, "", "counts", b->policy->ranks,
                                (int64_t)sizeof(mtt_count), 0);
    ((mtt_op_sum_loss *)(void *)op->operands)->count = w->count;
    mtt__append(b, op);
    MTT__EMIT(b, -1, 0, all_gather, w->count, w->counts);
    return 1;
}

/* Adds up the gradients of the latest exchange, if they have not been added yet. */
static void mtt__emit_arrived(mtt__builder *b, mtt__under_way *w)
{
    if (!w->received) return;
    mtt__emit_sums(b, w->first, w->end, w->received);
    w->received = NULL;
    if (b->policy->shard != MTT_SHARD_NONE) return;
    MTT__EMIT(b, b->program->parameters[w->first].layer, 0, gather_sums, b->program->ranges);
    mtt__use_parameters(b, w->first, w->end, MTT__SUMS);
}

/* Sends gradients of parameters `first` to `end` - 1, mostly a layer's, to the other ranks. Between GPUs they
   travel while the backward pass goes on. Only after the next layer are they added up, and those of that
   layer sent; a naive exchange adds them up at once. */
static void mtt__emit_exchange(mtt__builder *b, mtt__under_way *w, int first, int end)
{
    mtt__program *p = b->program;
    int layer = p->parameters[first].layer, i;
    mtt_tensor *received;
    int64_t bytes = 0;
    for (i = first; i < end && !b->status; i++) {
        mtt__parameter *q = &p->parameters[i];
        mtt_dtype dtype = b->phase == MTT_STEP || q->frozen ? MTT_F32 : q->gradient->dtype;
        q->received_at = bytes - (int64_t)mtt__bytes_of(dtype, (size_t)q->part.mine);
        bytes += (int64_t)mtt__bytes_of(dtype, (size_t)(q->part.end - q->part.mine));
    }
    if (!bytes) bytes = 8; /* nothing of a small layer is mine, but its gradients live until they are sent */
    received = mtt__add_tensor(b, MTT_U8, MTT_GRADIENTS, layer, "", "received", b->policy->ranks - 1, bytes,
                               0);
    mtt__emit_arrived(b, w);
    MTT__EMIT(b, layer, 0, all_to_all, received);
    mtt__use_parameters(b, first, end, MTT__GRADIENTS);
    if (b->status) return;
    w->received = received;
    w->first = b->op->parts[0].number;
    w->end = b->op->parts[b->op->parameters - 1].number + 1;
    for (i = first; i < end; i++) p->parameters[i].received = received;
    if (b->policy->exchange == MTT_EXCHANGE_NAIVE) mtt__emit_arrived(b, w);
}

/* Before the gradient's norm: what is under way is added up, and gradients that were not exchanged at once
   are. Ranks that update a share each exchange sums of squares. */
static void mtt__emit_before_norm(mtt__builder *b, mtt__under_way *w, mtt_op *op)
{
    mtt__program *p = b->program;
    const mtt_part *last = &p->parameters[p->parameter_count - 1].part;
    int64_t blocks = last->square + mtt__ceil_div(last->elements, MTT__RANGE_BLOCK);
    mtt_tensor *squares;
    int flat = b->policy->exchange == MTT_EXCHANGE_FLAT, i, end;
    b->phase = MTT_BACKWARD;
    MTT__EMIT(b, -1, 0, add_counts, w->count, w->counts, p->control, p->counters);
    mtt__emit_arrived(b, w);
    b->phase = MTT_STEP;
    for (i = 0; i < p->parameter_count && !mtt__exchanges_at_once(b->policy) && !b->status; i = end) {
        end = flat ? p->parameter_count : mtt__layer_end(p, i);
        if (mtt__ranges_of(p, i, end)) mtt__emit_exchange(b, w, i, end);
    }
    mtt__emit_arrived(b, w);
    if (b->policy->shard == MTT_SHARD_NONE) return;
    squares = mtt__add_tensor(b, MTT_U8, MTT_DATA, -1, "", "squares", blocks, 8, 0);
    MTT__EMIT(b, -1, 0, sum_squares, p->ranges, squares);
    mtt__use_parameters(b, 0, p->parameter_count, MTT__GRADIENTS);
    MTT__EMIT(b, -1, 0, gather_squares, p->ranges, squares);
    mtt__use_parameters(b, 0, p->parameter_count, 0);
    ((mtt_op_grad_norm *)(void *)op->operands)->squares = squares;
}

/* Ranks that update a share each send the new weights of a layer while they update the next one. */
static int mtt__update_shares(mtt__builder *b)
{
    mtt__program *p = b->program;
    int i, end;
    if (b->policy->shard == MTT_SHARD_NONE) return 0;
    for (i = 0; i < p->parameter_count && !b->status; i = end) {
        end = mtt__layer_end(p, i);
        if (!mtt__ranges_of(p, i, end)) continue;
        mtt__emit_update(b, i, end, p->parameters[i].layer);
        MTT__EMIT(b, p->parameters[i].layer, 0, gather_weights, p->ranges);
        mtt__use_parameters(b, i, end, MTT__WEIGHTS);
    }
    return 1;
}

#ifndef MTT_NO_FP8
/* The next scales are those of what all ranks have recorded. */
static void mtt__exchange_records(mtt__builder *b)
{
    mtt_tensor *scales = b->program->scales;
    mtt_tensor *rows = mtt__add_tensor(b, MTT_U8, MTT_DATA, -1, "", "records", b->policy->ranks,
                                       (int64_t)scales->bytes, 0);
    MTT__EMIT(b, -1, 0, all_gather, scales, rows);
    MTT__EMIT(b, -1, 0, merge_records, rows, scales);
}
#endif

static int mtt__rule_exchange(mtt__builder *b, mtt_op *op, const mtt_op *end)
{
    mtt__under_way *w = (mtt__under_way *)mtt__own(b, sizeof(*w));
    if (op == end || !w) return 0;
    if (MTT_IS_UPDATE(op)) return mtt__update_shares(b);
    switch (op->kind) {
    case MTT_OP_sum_loss: return mtt__exchange_counts(b, w, op);
    case MTT_OP_sum_gradients:
        if (!mtt__exchanges_at_once(b->policy)) return 0;
        mtt__emit_exchange(b, w, op->parts[0].number, op->parts[op->parameters - 1].number + 1);
        return 1;
    case MTT_OP_grad_norm: mtt__emit_before_norm(b, w, op); return 0;
    MTT_IF_EIGHT(case MTT_OP_rescale: mtt__exchange_records(b); return 0;)
    default: return 0;
    }
}

/* ---- bytes and time ---- */

/* Bytes of an element of a parameter that is gathered, or of a block of squares. */
static int64_t mtt__gathered_bytes(const mtt_op *op, int parameter)
{
    if (op->kind == MTT_OP_gather_squares) return sizeof(double);
    return (int64_t)mtt__bytes_of(op->sums ? MTT_F32 : op->weights[parameter]->dtype, 1);
}

/* Elements of a rank's share that are gathered, or blocks of them; *begin is the first. */
static int64_t mtt__gathered(const mtt_op *op, int parameter, int rank, int64_t *begin)
{
    const mtt_part *part = &op->parts[parameter];
    int64_t count = mtt__share(part, rank, begin);
    if (op->kind != MTT_OP_gather_squares) return count;
    *begin = part->square + *begin / MTT__RANGE_BLOCK;
    return mtt__ceil_div(count, MTT__RANGE_BLOCK);
}

/* Counts what this rank sends to the others. */
static double mtt__wire_bytes(const mtt_op *op)
{
    double others = op->shape->ranks - 1, bytes = 0;
    int64_t begin;
    int i, peer, rank = op->shape->rank;
    if (op->kind == MTT_OP_all_gather) return others * (double)op->operands[0]->bytes;
    for (i = 0; i < op->parameters; i++) {
        if (op->kind != MTT_OP_all_to_all)
            bytes += others * (double)(mtt__gathered(op, i, rank, &begin) * mtt__gathered_bytes(op, i));
        for (peer = 0; peer < op->shape->ranks && op->kind == MTT_OP_all_to_all; peer++)
            if (peer != rank)
                bytes += (double)mtt__share(&op->parts[i], peer, &begin) *
                         (double)mtt__bytes_of(op->gradients[i]->dtype, 1);
    }
    return bytes;
}

/* Tells whether nothing is computed while transfer `i` is under way. */
static int mtt__is_exposed(const mtt__program *p, int i)
{
    while (++i < p->op_count && i != p->step_begin && mtt__is_transfer(&p->ops[i])) {}
    return i == p->op_count || i == p->step_begin || mtt__needs_transfers(&p->ops[i]);
}

/* What a step sends, and what a rank holds for that outside the arena. */
static void mtt__report_wires(const mtt_schedule *s, mtt_plan_report *r)
{
    const mtt__program *p = &s->programs[MTT__TRAIN];
    int i;
    for (i = 0; i < p->op_count; i++) {
        double wire;
        if (!mtt__is_transfer(&p->ops[i])) continue;
        wire = mtt__wire_bytes(&p->ops[i]) * (p->ops[i].phase == MTT_STEP ? 1 : s->policy.accumulate);
        r->wire_bytes += wire;
        if (s->policy.device == MTT_DEVICE_CPU || mtt__is_exposed(p, i)) r->exposed_bytes += wire;
    }
    if (s->policy.bandwidth > 0) {
        r->wire_ms = r->wire_bytes / (double)s->policy.bandwidth * 1e-6;
        r->exposed_ms = r->exposed_bytes / (double)s->policy.bandwidth * 1e-6;
    }
    r->outside_bytes += 2048 * (size_t)(s->policy.ranks - 1) * (size_t)(s->model.layers + 4); /* transfers */
}

static void mtt__print_wires(mtt__text *text, const mtt_plan_report *r)
{
    if (r->wire_bytes > 0)
        mtt__print(text, "%.2f MiB a step to other ranks, %.2f of them while nothing is computed",
                   r->wire_bytes / 1048576, r->exposed_bytes / 1048576);
    if (r->wire_ms > 0) mtt__print(text, ": %.2f and %.2f ms", r->wire_ms, r->exposed_ms);
    if (r->wire_bytes > 0) mtt__print(text, "\n");
}

/* Makes a policy that of the rank with the largest share, if ranks divide anything. What they must decide
   alike goes by what that one can hold. Shares are those of any batch. */
static mtt_status mtt__take_fullest(mtt_env *env, const mtt_model_desc *model, int seq_len, mtt_policy *p)
{
    mtt_policy any = *p;
    int64_t most = -1, begin;
    mtt_schedule s;
    mtt_status status;
    int rank, i;
    if (p->ranks < 2 || p->shard == MTT_SHARD_NONE) return MTT_OK;
    any.recompute = MTT_RECOMPUTE_NONE;
    status = mtt__schedule_init(&s, env, model, &any, 1, seq_len);
    for (rank = 0; rank < p->ranks && !status; rank++) {
        const mtt__program *program = &s.programs[MTT__TRAIN];
        int64_t share = 0;
        for (i = 0; i < program->parameter_count; i++)
            share += mtt__round_up(mtt__share(&program->parameters[i].part, rank, &begin), MTT__PART);
        if (share > most) most = share, p->rank = rank;
    }
    if (!status) mtt__release_programs(&s);
    return status;
}

/* ---- operations on a CPU ---- */

/* The functions of the rows that transfer. */
#define MTT__TRANSFERS(X) X(all_to_all) X(all_gather) X(gather_squares) X(gather_sums) X(gather_weights)
#define MTT__CPU_TRANSFER(name)                                                         \
    static void mtt__cpu_##name(const mtt_op *op, const mtt_op_##name *o)               \
    {                                                                                   \
        mtt__cpu *c = (mtt__cpu *)(void *)op->workspace;                                \
        (void)o;                                                                        \
        c->status = c->backend.exchange(c->backend.ranks, op->transfers, op->transfer_count); \
    }
MTT__TRANSFERS(MTT__CPU_TRANSFER)

static void mtt__cpu_add_counts(const mtt_op *op, const mtt_op_add_counts *o)
{
    const mtt_count *counts = (const mtt_count *)o->counts->data;
    int rank;
    for (rank = 0; rank < op->shape->ranks; rank++) {
        const mtt_count *count = rank == op->shape->rank ? (const mtt_count *)o->count->data : &counts[rank];
        mtt__add_count(mtt__counters(o->counters), count, !op->later && rank == 0);
    }
}

/* Adds the gradients of all ranks, in their order, to up to MTT__BLOCK elements of a sum from `at` up. Those
   of others are in `received`, a row for each, of which this parameter's begin `offset` bytes into a row. */
static void mtt__add_gradients(const mtt_op *op, const mtt_tensor *received, int parameter, int64_t offset,
                               int64_t at, int64_t n)
{
    const mtt_part *part = &op->parts[parameter];
    mtt_tensor gradient = *op->gradients[parameter];
    char *own = (char *)gradient.data, *rows = (char *)received->data + offset;
    float *sum = (float *)op->sums[parameter]->data + at - part->base;
    float buffer[MTT__BLOCK], total[MTT__BLOCK];
    int rank, me = op->shape->rank;
    if (op->later) memcpy(total, sum, (size_t)n * sizeof(float));
    for (rank = 0; rank < op->shape->ranks; rank++) {
        const float *from;
        gradient.data = rank == me ? own : rows + (rank - (rank > me)) * received->shape[1];
        from = mtt__read(&gradient, rank == me ? at : at - part->mine, n, buffer);
        if (rank || op->later) mtt__add_block(from, total, n);
        else memcpy(total, from, (size_t)n * sizeof(float));
    }
    memcpy(sum, total, (size_t)n * sizeof(float));
}

static void mtt__sum_received(const mtt_op *op, const mtt_tensor *received)
{
    int64_t offset = 0, i;
    int p;
    for (p = 0; p < op->parameters; p++) {
        int64_t begin = op->parts[p].mine, count = op->parts[p].end - begin;
        MTT__THREADS(count)
        for (i = 0; i < count; i += MTT__BLOCK)
            mtt__add_gradients(op, received, p, offset, begin + i, mtt__min(MTT__BLOCK, count - i));
        offset += (int64_t)mtt__bytes_of(op->gradients[p]->dtype, (size_t)count);
    }
}

static void mtt__cpu_sum_squares(const mtt_op *op, const mtt_op_sum_squares *o)
{
    double *squares = (double *)o->squares->data;
    int p;
    for (p = 0; p < op->parameters; p++) {
        const mtt_part *part = &op->parts[p];
        int64_t at = part->square + part->begin / MTT__RANGE_BLOCK, first;
        int count = MTT__SQUARES;
        for (first = 0; count == MTT__SQUARES; first += count)
            count = mtt__block_squares(op, p, first, squares + at + first);
    }
}

/* Runs operations of the hall that have operands from other ranks. */
static int mtt__cpu_received(const mtt_op *op)
{
    const mtt_op_sum_gradients *s = MTT_OPERANDS_OF(sum_gradients, op);
    const mtt_op_grad_norm *n = MTT_OPERANDS_OF(grad_norm, op);
    double sum = 0;
    int64_t i;
    if (op->kind == MTT_OP_sum_gradients && s->received) return mtt__sum_received(op, s->received), 1;
    if (op->kind != MTT_OP_grad_norm || !n->squares) return 0;
    for (i = 0; i < n->squares->shape[0]; i++) sum += ((const double *)n->squares->data)[i];
    mtt__scale_gradients(mtt__control(n->control), mtt__counters(n->counters), sum);
    return 1;
}

#ifndef MTT_NO_FP8
static void mtt__cpu_merge_records(const mtt_op *op, const mtt_op_merge_records *o)
{
    const mtt_scale *rows = (const mtt_scale *)o->rows->data;
    mtt_scale *scales = (mtt_scale *)o->scales->data;
    int64_t count = o->scales->shape[0], i;
    for (i = 0; i < op->shape->ranks * count; i++)
        if (i / count != op->shape->rank) mtt__merge_record(&scales[i % count], &rows[i]);
}
#endif

/* ---- what the hall asks ---- */

/* Takes the number of ranks, and of this one, from the backend. */
static mtt_status mtt__join_others(mtt_trainer *t, mtt_policy *p)
{
    int given = p->ranks;
    p->ranks = 1, p->rank = 0;
    if (mtt__others(t)) mtt__others(t)->join(t, p);
    if (given < 2 || given == p->ranks) return MTT_OK;
    return mtt__fail(t->env, MTT_E_ARGUMENT, "the policy has %d ranks, the backend %d: set its `ranks` to "
                     "what mtt_ranks_fork or mtt_ranks_connect gives", given, p->ranks);
}

static void mtt__check_ranks(mtt__faults *faults, const mtt_model_desc *model, const mtt_policy *p)
{
    (void)model;
    mtt__require(faults, p->ranks < 1 || (p->rank >= 0 && p->rank < p->ranks),
                 "rank is %d, it must be at least 0 and below ranks, %d", p->rank, p->ranks);
    mtt__require(faults, !p->keep_gradients || p->ranks == 1 || p->shard == MTT_SHARD_NONE,
                 "keep_gradients is 1: ranks must not divide gradients, set shard to none");
}

static const mtt__wing *mtt__wing_exchange(void)
{
    static const mtt__wing wing = {NULL, mtt__check_ranks, NULL, mtt__divide, NULL, NULL};
    return &wing;
}
#endif /* MTT_NO_RANKS */

/* -----------------------------------------------------------------------------------------------------------
   >>json
   -------------------------------------------------------------------------------------------------------- */

/* A pull reader for JSON (RFC 8259), and UTF-8. The reader builds no tree: the caller takes one value after
   another, and each call moves `at` forward. The reader keeps the first fault. mtt_json_peek then returns 0,
   so every later call fails too, and callers need no checks in between. Strings are checked when they are
   read. Their escapes are undone on request, in place if the caller likes: no escape is shorter than the
   UTF-8 that it becomes. */


MTTDEF void mtt_json_init(mtt_json *j, const char *text, size_t bytes)
{
    memset(j, 0, sizeof(*j));
    j->begin = j->at = text;
    j->end = text + bytes;
}

static int mtt__json_fail(mtt_json *j, const char *fault)
{
    if (!j->fault) j->fault = fault;
    return 0;
}

/* Returns the byte at `at`; 0 at the end. */
MTT__INLINE int mtt__json_byte(const mtt_json *j)
{
    return j->at < j->end ? (unsigned char)*j->at : 0;
}

MTTDEF int mtt_json_peek(mtt_json *j)
{
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\t' || *j->at == '\n' || *j->at == '\r')) j->at++;
    return j->fault ? 0 : mtt__json_byte(j);
}

/* Moves past `mark` if it is the next byte. */
static int mtt__json_pass(mtt_json *j, int mark)
{
    const int here = mtt__json_byte(j) == mark;
    j->at += here;
    return here;
}

/* Does the same after blanks, unless there was a fault. */
static int mtt__json_take(mtt_json *j, int mark)
{
    return mtt_json_peek(j) && mtt__json_pass(j, mark);
}

MTTDEF int mtt_json_begin(mtt_json *j, int mark)
{
    j->first = 1;
    if (mtt__json_take(j, mark)) return 1;
    return mtt__json_fail(j, mark == '{' ? "expected an object" : "expected an array");
}

/* Moves past the comma to the next element of an object or array; 0 at its end. */
static int mtt__json_next(mtt_json *j, int end, const char *fault)
{
    int first = j->first;
    j->first = 0;
    if (mtt__json_take(j, end)) return 0;
    return (first && !j->fault) || mtt__json_take(j, ',') || mtt__json_fail(j, fault);
}

/* Reads four hexadecimal digits. */
static int mtt__hex(const char *at, unsigned *out)
{
    static const char digits[] = "0123456789abcdefABCDEF";
    int i;
    for (*out = 0, i = 0; i < 4; i++) {
        const char *digit = at[i] ? strchr(digits, at[i]) : NULL;
        if (!digit) return 0;
        *out = *out * 16 + (unsigned)(digit - digits) - (digit - digits > 15 ? 6 : 0);
    }
    return 1;
}

MTTDEF int mtt_json_string(mtt_json *j, mtt_slice *string)
{
    unsigned unused;
    int begun = mtt__json_take(j, '"');
    string->at = j->at;
    string->size = 0;
    if (!begun) return mtt__json_fail(j, "expected a string");
    for (; j->at < j->end && *j->at != '"'; j->at++) {
        if ((unsigned char)*j->at < 0x20) return mtt__json_fail(j, "a string holds a control character");
        if (*j->at != '\\') continue;
        if (++j->at == j->end) break;
        if (*j->at == 'u' ? j->end - j->at < 5 || !mtt__hex(j->at + 1, &unused)
                          : !*j->at || !strchr("\"\\/bfnrt", *j->at))
            return mtt__json_fail(j, "malformed escape");
    }
    if (j->at >= j->end) return mtt__json_fail(j, "a string does not end");
    string->size = (size_t)(j->at++ - string->at);
    return 1;
}

MTTDEF int mtt_json_key(mtt_json *j, mtt_slice *key)
{
    return mtt__json_next(j, '}', "expected a comma or }") && mtt_json_string(j, key) &&
           (mtt__json_take(j, ':') || mtt__json_fail(j, "expected a colon"));
}

MTTDEF int mtt_json_item(mtt_json *j)
{
    return mtt__json_next(j, ']', "expected a comma or ]") &&
           (mtt_json_peek(j) || mtt__json_fail(j, "an array does not end"));
}

MTTDEF int mtt_json_u64(mtt_json *j, uint64_t *number)
{
    int zero = mtt_json_peek(j) == '0', digits = 0;
    uint64_t value = 0;
    unsigned digit;
    *number = 0;
    for (; !j->fault && (digit = (unsigned)mtt__json_byte(j) - '0') <= 9; j->at++, digits++) {
        if (value > (UINT64_MAX - digit) / 10) return mtt__json_fail(j, "a number is above 2^64-1");
        value = value * 10 + digit;
    }
    if (!digits || (zero && digits > 1) || (mtt__json_byte(j) && strchr(".eE-+", mtt__json_byte(j))))
        return mtt__json_fail(j, "expected a whole number, 0 or more");
    *number = value;
    return 1;
}

/* Moves past digits and appends them to `value`; returns how many. */
static int mtt__json_digits(mtt_json *j, double *value)
{
    int count = 0, c;
    for (; (c = mtt__json_byte(j)) >= '0' && c <= '9'; j->at++, count++) *value = *value * 10 + (c - '0');
    return count;
}

/* `number` may be NULL. */
MTTDEF int mtt_json_number(mtt_json *j, double *number)
{
    double value = 0, exponent = 0;
    int negative = mtt__json_take(j, '-'), zero = mtt__json_byte(j) == '0', minus = 0, places = 0;
    int digits = j->fault ? 0 : mtt__json_digits(j, &value);
    if (number) *number = 0;
    if (!digits || (zero && digits > 1)) return mtt__json_fail(j, "expected a value");
    if (mtt__json_pass(j, '.')) {
        places = mtt__json_digits(j, &value);
        if (!places) return mtt__json_fail(j, "a fraction has no digits");
    }
    if (mtt__json_pass(j, 'e') || mtt__json_pass(j, 'E')) {
        minus = mtt__json_pass(j, '-');
        if (!minus) mtt__json_pass(j, '+');
        if (!mtt__json_digits(j, &exponent)) return mtt__json_fail(j, "an exponent has no digits");
    }
    exponent = (minus ? -exponent : exponent) - places;
    if (value != 0) value = exponent < 0 ? value / pow(10, -exponent) : value * pow(10, exponent);
    if (number) *number = negative ? -value : value;
    return 1;
}

/* Nesting is recorded in `marks` instead of by recursion, so that no text can exhaust the C stack. */
MTTDEF int mtt_json_skip(mtt_json *j)
{
    char marks[16];
    size_t depth = 0;
    mtt_slice text;
    do {
        int c = mtt_json_peek(j);
        const char *word = c == 't' ? "true" : c == 'f' ? "false" : c == 'n' ? "null" : NULL;
        if (c == '{' || c == '[') {
            if (depth == MTT__LENGTH(marks)) return mtt__json_fail(j, "values are nested more than 16 deep");
            mtt_json_begin(j, c);
            marks[depth++] = (char)c;
        } else if (c == '"') mtt_json_string(j, &text);
        else if (!word) mtt_json_number(j, NULL);
        else if ((size_t)(j->end - j->at) < strlen(word) || memcmp(j->at, word, strlen(word)) != 0)
            mtt__json_fail(j, "expected a value");
        else j->at += strlen(word);
        while (depth && !j->fault && !(marks[depth - 1] == '{' ? mtt_json_key(j, &text) : mtt_json_item(j)))
            depth--;
    } while (depth && !j->fault);
    return !j->fault;
}

MTTDEF int mtt_json_end(mtt_json *j)
{
    mtt_json_peek(j);
    return (j->at == j->end && !j->fault) || mtt__json_fail(j, "something follows the value");
}

static int mtt__slice_same(mtt_slice a, mtt_slice b)
{
    return a.size == b.size && (!a.size || memcmp(a.at, b.at, a.size) == 0);
}

MTTDEF int mtt_slice_is(mtt_slice string, const char *text)
{
    const mtt_slice other = {text, strlen(text)};
    return mtt__slice_same(string, other);
}

static size_t mtt__utf8_put(uint32_t c, char *out)
{
    static const unsigned char marks[] = {0, 0, 0xc0, 0xe0, 0xf0};
    size_t size = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4, i;
    for (i = size - 1; i; i--, c >>= 6) out[i] = (char)(0x80 | (c & 63));
    out[0] = (char)(marks[size] | c);
    return size;
}

MTTDEF int mtt_utf8_valid(const char *text, size_t bytes)
{
    const unsigned char *at = (const unsigned char *)text, *end = at + bytes;
    int size;
    for (; at < end; at += size)
        if (mtt__utf8_get(at, end, &size) == MTT__NONE) return 0;
    return 1;
}

MTTDEF size_t mtt_json_unescape(mtt_slice string, char *out)
{
    static const char from[] = "bfnrt", to[] = "\b\f\n\r\t";
    const char *at = string.at, *end = at + string.size;
    size_t n = 0;
    while (at < end) {
        if (*at != '\\') out[n++] = *at++;
        else if (at[1] != 'u') {
            const char *plain = strchr(from, at[1]);
            out[n++] = plain ? to[plain - from] : at[1];
            at += 2;
        } else {
            unsigned c = 0, low = 0;
            mtt__hex(at + 2, &c);
            at += 6;
            if (c >= 0xd800 && c < 0xdc00 && end - at >= 6 && at[0] == '\\' && at[1] == 'u')
                mtt__hex(at + 2, &low);
            if (low >= 0xdc00 && low < 0xe000) {
                c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
                at += 6;
            } else if (c >= 0xd800 && c < 0xe000) c = 0xfffd;
            n += mtt__utf8_put(c, out + n);
        }
    }
    return n;
}

/* Reads a string or a list of strings. Undoes the escapes in the text itself, and joins the strings of a list
   there. A joint of up to three bytes fits, because at least the three bytes "," separate two strings. */
static MTT__UNUSED int mtt__json_text(mtt_json *j, const char *joint, mtt_slice *out)
{
    size_t parts = 0, size = strlen(joint);
    int mark = mtt_json_peek(j);
    char *text = (char *)j->at;
    mtt_slice part;
    out->at = text;
    out->size = 0;
    if (mark != '"' && mark != '[') return mtt__json_fail(j, "expected a string or a list of strings");
    if (mark == '[') mtt_json_begin(j, mark);
    while ((mark == '"' ? !parts : mtt_json_item(j)) && mtt_json_string(j, &part)) {
        if (parts++) memcpy(text + out->size, joint, size), out->size += size;
        out->size += mtt_json_unescape(part, text + out->size);
    }
    return !j->fault;
}

/* Writes a byte of a JSON string, escaped if it must be (never from 0x80 up), and returns the size. */
static size_t mtt__json_escape(char byte, char out[6])
{
    static const char digits[] = "0123456789abcdef";
    if (byte == '"' || byte == '\\') return out[0] = '\\', out[1] = byte, 2;
    if ((unsigned char)byte >= 0x20) return out[0] = byte, 1;
    memcpy(out, "\\u00", 4);
    out[4] = digits[byte >> 4];
    out[5] = digits[byte & 15];
    return 6;
}

static void mtt__print_json_string(mtt__text *out, const char *at, size_t bytes)
{
    char escaped[6];
    mtt__print(out, "\"");
    for (; bytes; bytes--, at++) mtt__print(out, "%.*s", (int)mtt__json_escape(*at, escaped), escaped);
    mtt__print(out, "\"");
}

/* ---- a file as a list of values ---- */

/* A key of a tokenizer.json, as "key" or "part.key", cut at 127 bytes, and its value as it is in the text.
   The key of an array's element is its index. */
typedef struct mtt__json_key {
    char path[128];
    mtt_slice value;
} mtt__json_key;

/* A tokenizer file in memory. Loaders undo escapes in its text, which makes pieces only shorter. */
typedef struct mtt__json_file {
    mtt_env *env;
    const char *path, *scope; /* scope: what mtt can read, for errors */
    mtt_json j;
    size_t key_count; /* 0 = not a tokenizer.json */
    mtt__json_key keys[192];
} mtt__json_file;

/* Returns the value of a key; its `at` is NULL if there is none. */
static mtt_slice mtt__json_value(const mtt__json_file *f, const char *path)
{
    const mtt_slice none = {NULL, 0};
    size_t i;
    for (i = 0; i < f->key_count; i++)
        if (strcmp(f->keys[i].path, path) == 0) return f->keys[i].value;
    return none;
}

/* A value must be one of the texts between bars: { is any object, [ any array, missing no value. Keys without
   a rule change no ids. */
typedef struct mtt__json_rule {
    const char *path, *allowed;
} mtt__json_rule;

static MTT__UNUSED mtt_status mtt__json_check(mtt__json_file *f, const mtt__json_rule *rules, size_t count)
{
    const mtt_slice missing = {"missing", 7};
    for (; count; count--, rules++) {
        const mtt_slice found = mtt__json_value(f, rules->path), value = found.at ? found : missing;
        const char *at = rules->allowed;
        size_t size;
        for (; *at; at += size + (at[size] == '|')) {
            size = strcspn(at, "|");
            if (strchr("{[", *at) ? *at == *value.at : size == value.size && memcmp(at, value.at, size) == 0)
                break;
        }
        if (*at) continue;
        return mtt__fail(f->env, MTT_E_FORMAT, "%s: %s is %.*s, but must be %s: %s", f->path, rules->path,
                         (int)(value.size < 40 ? value.size : 40), value.at, rules->allowed, f->scope);
    }
    return MTT_OK;
}

/* -----------------------------------------------------------------------------------------------------------
   >>files
   -------------------------------------------------------------------------------------------------------- */

/* Reading: a regular file becomes a block of memory (mtt__map). Writing: mtt_writer replaces a file
   atomically. CRC-32 finds damage. A failure is MTT_E_FILE, with the path, the reason and a remedy. */

static mtt_status mtt__file_fail(mtt_env *env, const char *path, const char *verb, int error)
{
    const char *remedy = "check the disk and try again";
    if (error == ENOENT || error == ENOTDIR || error == ENAMETOOLONG) remedy = "check the path";
    if (error == EACCES || error == EPERM || error == EROFS) remedy = "check the permissions of the folder";
    if (error == EBUSY) remedy = "close what has it open";
    if (error == ENOSPC || error == EDQUOT) remedy = "make room or use another folder";
    return mtt__fail(env, MTT_E_FILE, "%s: cannot %s: %s; %s", path, verb, strerror(error), remedy);
}

/* Opens a regular file for reading, and does not wait for the writer of a named pipe. */
static mtt_status mtt__open_regular(mtt_env *env, const char *path, int *fd, mtt__file_info *info)
{
    int error;
    memset(info, 0, sizeof(*info));
    *fd = mtt__os_open(path, MTT__READ_AT_ONCE);
    error = *fd < 0 || mtt__os_info(*fd, info) ? errno : 0;
    if (!error && info->kind == MTT__REGULAR) return MTT_OK;
    if (*fd >= 0) mtt__os_close(*fd);
    *fd = -1;
    if (error) return mtt__file_fail(env, path, "read it", error);
    return mtt__fail(env, MTT_E_FILE, "%s is a folder, a device or a pipe: name a regular file", path);
}

/* A regular file as memory; NULL if it is empty. The memory may change; the file does not. */
typedef struct mtt__map {
    char *data;
    size_t bytes;
} mtt__map;

static mtt_status mtt__map_open(mtt_env *env, const char *path, mtt__map *map)
{
    mtt__file_info info;
    int fd, error = 0;
    mtt_status status = mtt__open_regular(env, path, &fd, &info);
    memset(map, 0, sizeof(*map));
    if (status) return status;
    if (info.bytes < SIZE_MAX / 2) map->bytes = (size_t)info.bytes;
    if (map->bytes && mtt__os_map(fd, map->bytes, &map->data)) error = errno;
    mtt__os_close(fd);
    return error ? mtt__file_fail(env, path, "read it", error) : MTT_OK;
}

static void mtt__map_close(mtt__map *map)
{
    if (map->data) mtt__os_unmap(map->data, map->bytes);
    memset(map, 0, sizeof(*map));
}

/* Refuses packed files, UTF-16 and UTF-32 by their first bytes, and names a command that gives text. */
static MTT__UNUSED mtt_status mtt__refuse_packed(mtt_env *env, const char *name, const char *path,
                                                 const char *at, size_t bytes)
{
    /* how it begins; bits of the places 4n + k where bytes are NUL, which tell without a mark; command */
    static const char *const packed[][3] = {
        {"\x1f\x8b", "", "gzip -dc"}, {"BZh9", "", "bzip2 -dc"}, {"\x28\xb5\x2f\xfd", "", "zstd -dc"},
        {"\xfd" "7zXZ", "", "xz -dc"}, {"\4\"M\x18", "", "lz4 -dc"}, {"PK\3\4", "", "unzip -p"},
        {"PAR1", "", "python3 -c \"import pandas, sys; "
                     "print(pandas.read_parquet(sys.argv[1]).to_json(orient='records', lines=1))\""},
        {"", "\16", "iconv -f UTF-32LE -t UTF-8"}, {"", "\7", "iconv -f UTF-32BE -t UTF-8"},
        {"\xff\xfe", "\12", "iconv -f UTF-16LE -t UTF-8"}, {"\xfe\xff", "\5", "iconv -f UTF-16BE -t UTF-8"},
    };
    size_t i, size = bytes < 4096 ? bytes : 4096, nuls[4] = {0, 0, 0, 0}, most = size / 8, mask;
    for (i = 0; i < size; i++) nuls[i % 4] += !at[i];
    mask = (nuls[0] > most) + (nuls[1] > most) * 2u + (nuls[2] > most) * 4u + (nuls[3] > most) * 8u;
    for (i = 0; i < MTT__LENGTH(packed); i++) {
        const size_t mark = strlen(packed[i][0]);
        if ((mark && size >= mark && !memcmp(at, packed[i][0], mark)) ||
            (size > 3 && mask && mask == (size_t)*packed[i][1]))
            return mtt__fail(env, MTT_E_FORMAT, "%s is not UTF-8 text: convert it, perhaps by %s %s > "
                             "NEW.txt", name, packed[i][2], path);
    }
    return MTT_OK;
}

/* Replaces a file so that a crash at any moment leaves the old file or the new one, complete. All bytes go to
   .NAME.tmp in the same folder. That file is synced, then renamed (Pillai et al. 2014, "All file systems are
   not created equal"). It is locked while its process lives, so a temporary without a lock was left by a
   crash. A failure removes the temporary, and every later call returns the same status. A zeroed writer is
   closed. */
struct mtt_writer {
    mtt_env *env;
    int fd, live;
    mtt_status status;
    uint64_t written, expected; /* bytes put so far; bytes of the finished file, if known */
    size_t pending;             /* bytes in the buffer */
    size_t folder_size;         /* of `temporary`, which begins with FOLDER/. */
    char path[2048], temporary[4096];
    unsigned char buffer[32768];
};

/* Removes the file before it closes it: without the lock, the name may already belong to another writer. */
static void mtt__writer_abort(mtt_writer *w)
{
    if (!w->live) return;
    if (mtt__os_is_named(w->fd, w->temporary)) mtt__os_remove(w->temporary);
    mtt__os_close(w->fd);
    w->live = 0;
}

static mtt_status mtt__writer_fail(mtt_writer *w, const char *verb, int error)
{
    uint64_t bytes = w->expected > w->written ? w->expected : w->written;
    mtt__writer_abort(w);
    w->status = mtt__file_fail(w->env, w->path, verb, error);
    if (error == ENOSPC)
        mtt__fail(w->env, w->status, "%s: cannot %s: %s; %llu bytes are needed: make room", w->path, verb,
                  strerror(error), (unsigned long long)bytes);
    return w->status;
}

/* Locks an open file. Returns 0 if another process has the lock, or has already renamed or removed the
   file. */
static int mtt__writer_lock(int fd, const char *path)
{
    return mtt__os_lock(fd) && mtt__os_is_named(fd, path);
}

/* Creates the temporary and locks it. -1: errno is EWOULDBLOCK if another process is writing. What is there
   already, after a crash or put there by somebody else, may be a link or be open elsewhere, so it is removed
   and never written to. Its lock is held meanwhile, so that only one of two processes removes it. */
static int mtt__writer_create(const char *path)
{
    int old = mtt__os_open(path, MTT__READ_NO_LINK), fd = -1, error = EWOULDBLOCK;
    if (old < 0 && errno != ENOENT && errno != ELOOP && errno != ENXIO) error = errno;
    else if (old < 0 || mtt__writer_lock(old, path)) {
        if (old >= 0 || errno != ENOENT) mtt__os_remove(path); /* a link or a socket cannot be opened */
        fd = mtt__os_open(path, MTT__WRITE_NEW);
        if (errno != EEXIST) error = errno;
        if (fd >= 0 && !mtt__writer_lock(fd, path)) mtt__os_close(fd), fd = -1, error = EWOULDBLOCK;
    }
    if (old >= 0) mtt__os_close(old);
    errno = error;
    return fd;
}

static mtt_status mtt__writer_open(mtt_env *env, const char *path, mtt_writer *w)
{
    const char *name = mtt__os_name(path);
    mtt__file_info named;
    int missing;
    memset(w, 0, offsetof(mtt_writer, path));
    w->env = env;
    w->status = MTT_E_FILE;
    if (strlen(path) >= sizeof(w->path) || !*name ||
        (!mtt__os_find(path, &named) && named.kind != MTT__REGULAR))
        return mtt__fail(env, MTT_E_FILE, "%s: give the name of a regular file, below 2048 bytes", path);
    memcpy(w->path, path, strlen(path) + 1);
    w->folder_size = (size_t)(name - path) + 1;
    mtt__format(w->temporary, sizeof(w->temporary), "%.*s.%s.tmp", (int)(name - path), path, name);
    w->fd = mtt__writer_create(w->temporary);
    if (w->fd < 0 && errno == EWOULDBLOCK)
        return mtt__fail(env, MTT_E_FILE, "another process is writing %s: wait until it ends; if there is "
                         "none, remove %s", path, w->temporary);
    missing = w->fd < 0 && (errno == ENOENT || errno == ENOTDIR);
    if (missing) w->path[w->folder_size - 1] = 0;
    if (w->fd < 0) return mtt__file_fail(env, w->path, missing ? "find this folder" : "create it", errno);
    w->live = 1;
    return w->status = MTT_OK;
}

/* Announces the size of the finished file, so that a full disk is found before the work and not after it. */
static mtt_status mtt__writer_expect(mtt_writer *w, uint64_t bytes)
{
    w->expected = bytes;
    if (w->status || mtt__os_has_room(w->fd, bytes)) return w->status;
    return mtt__writer_fail(w, "write it", ENOSPC);
}

static mtt_status mtt__writer_out(mtt_writer *w, uint64_t offset, const void *data, size_t bytes)
{
    const char *at = (const char *)data;
    while (bytes && !w->status) {
        ptrdiff_t n = mtt__os_write_at(w->fd, at, bytes, offset);
        if (n <= 0) return mtt__writer_fail(w, "write it", n ? errno : EIO);
        at += n;
        bytes -= (size_t)n;
        offset += (uint64_t)n;
    }
    return w->status;
}

static mtt_status mtt__writer_flush(mtt_writer *w)
{
    size_t pending = w->pending;
    w->pending = 0;
    return mtt__writer_out(w, w->written - pending, w->buffer, pending);
}

MTTDEF mtt_status mtt_writer_put(mtt_writer *w, const void *data, size_t bytes)
{
    if (bytes > sizeof(w->buffer) - w->pending) mtt__writer_flush(w);
    if (bytes > sizeof(w->buffer)) mtt__writer_out(w, w->written, data, bytes);
    else if (bytes) memcpy(w->buffer + w->pending, data, bytes), w->pending += bytes;
    w->written += bytes;
    return w->status;
}

MTTDEF mtt_status mtt_writer_patch(mtt_writer *w, uint64_t offset, const void *data, size_t bytes)
{
    return mtt__writer_flush(w) ? w->status : mtt__writer_out(w, offset, data, bytes);
}

MTTDEF mtt_status mtt_writer_finish(mtt_writer *w)
{
    if (mtt__writer_flush(w)) return w->status;
    return mtt__os_sync(w->fd) ? mtt__writer_fail(w, "sync it", errno) : MTT_OK;
}

/* The result of close does not matter, because the data is synced. The file stays locked until the rename. */
MTTDEF mtt_status mtt_writer_commit(mtt_writer *w)
{
    int error;
    if (mtt_writer_finish(w)) return w->status;
    if (!mtt__os_is_named(w->fd, w->temporary)) return mtt__writer_fail(w, "find its temporary", ENOENT);
    if (mtt__os_rename(w->temporary, w->path)) return mtt__writer_fail(w, "rename its temporary", errno);
    w->temporary[w->folder_size] = 0;
    error = mtt__os_sync_folder(w->temporary) ? errno : 0;
    mtt__os_close(w->fd);
    w->live = 0;
    w->status = MTT_E_FILE; /* for later calls */
    return error ? mtt__file_fail(w->env, w->path, "sync its folder", error) : MTT_OK;
}

MTTDEF void mtt_writer_close(mtt_writer *w)
{
    if (!w) return;
    mtt__writer_abort(w);
    mtt__free(w->env, w);
}

MTTDEF mtt_status mtt_writer_open(mtt_env *env, const char *path, uint64_t bytes, mtt_writer **out)
{
    mtt_writer *w = (mtt_writer *)mtt__alloc_raw(env, sizeof(*w));
    mtt_status status = w ? mtt__writer_open(env, path, w) : MTT_E_MEMORY;
    if (!status) status = mtt__writer_expect(w, bytes);
    *out = status ? NULL : w;
    if (status) mtt_writer_close(w);
    return status;
}

/* CRC-32 of IEEE 802.3, eight bytes at a time with eight tables (Kounavis and Berry 2005): at[k][i] is the
   checksum of byte i followed by k zero bytes. */
typedef struct mtt__crc_table {
    uint32_t at[8][256];
} mtt__crc_table;

static void mtt__crc_init(mtt__crc_table *table)
{
    uint32_t i, k, crc;
    for (i = 0; i < 256; i++)
        for (crc = i, k = 0; k < 64; k++)
            table->at[k / 8][i] = crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1))); /* GCC 12 errs with ?: */
}

/* Continues `crc`, which starts at 0. Equal to zlib's crc32. */
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

/* Where text goes. */
typedef struct mtt__out {
    mtt_write_fn write;
    void *user;
} mtt__out;

/* Writes formatted JSON. Each ' in it becomes a ". */
MTT__PRINTF(2, 3) static MTT__UNUSED void mtt__put_json(const mtt__out *out, const char *format, ...)
{
    char line[1024];
    mtt__text text;
    va_list args;
    size_t i;
    mtt__text_init(&text, line, sizeof(line));
    va_start(args, format);
    mtt__print_va(&text, format, args);
    va_end(args);
    for (i = 0; i < text.size; i++)
        if (line[i] == '\'') line[i] = '"';
    out->write(out->user, line, text.size);
}

static MTT__UNUSED void mtt__writer_text(void *writer, const char *text, size_t bytes)
{
    mtt_writer_put((mtt_writer *)writer, text, bytes);
}

#ifndef MTT_NO_TEXT
/* -----------------------------------------------------------------------------------------------------------
   >>tokenizer
   ------------------------------------------------------------------------------------------------------- */

/* Text to ids and back. A tokenizer cuts a text into words and spells each word as ids. Both steps belong to
   its kind, a table of functions. The kind here is byte-level BPE: a pattern cuts the words;
   a word is its bytes at first, and then the pair of neighbours that was learned first is merged, again and
   again, until no pair in it was learned. Training counts the different words of a text and merges the most
   frequent pair of neighbours until there are enough ids. */

/* Unicode's tables are numbers for mtt__unicode_number. First come the classes of code points in GPT-2's
   expression: for each run from U+0000 up its length * 4 + class. */
enum { MTT__OTHER, MTT__LETTER, MTT__NUMBER, MTT__SPACE };

/* Then come the canonical decompositions. Each of the three sections begins with the number of its runs; a
   run with its distance from the last one, and its length.
      kinds     one number a run: its kind, as mtt__normal has it
      pairs     two numbers a code point: what it decomposes to, less what the last one did. An even n means
                n / 2, an odd n means -(n + 1) / 2
      singles   one number a code point: what it decomposes to */

/* written by tools/make_unicode.py: from here */
/* Unicode 18.0.0 by Python's regex 2026.11.19: 158,172 of \p{L}, 2,247 of \p{N}, 25 of \s. */
enum { MTT__UNICODE_END = 0x3fc40 }; /* code points from here up are of class other */
static const char *const mtt__unicode_runs[] = {
"A+:B3*B'A1A#C8;C8A/*C7*A+(A#-'(/)('1'C,'D0'AB03A8B#8A#('(R/8',+4'(;('0'('B<'K<'S<A'W8'E0',;E<+,I3C<34F/F(C#",
"A13,'N('(B',A#,A10+(B+('D,D'L8A3(B#A1D8A+,3(7C(3(A+(/(C+C4A#A47C0'A$B+F$H+G8/(B3(A#A03A1'B,3A(+,+C('A$'(/4/",
"(B+(A;,'03A1,+=+(A'<3,+C('A$',',',D/4'(A#A1+0B+A,'0'C('A$','8/(B3(B',3A1A+(A3A(+,+C('A$','8/(D+,'03A1'(=A3(",
"'</0'4/,'(',/,/0/A8C'(C#A=B3A('0'C,'B,/(C70',+,3A1A'A%'(3A('0'C,'A0'8/(D+0',3A1',B/A,'0'E<+(B+(70'A%03B9'<7",
"B4/C0'A,'(+A$D/A1B/F<',A7A$A+A1E3,'('8'C0'('A0',A+(+8'(A+A1+4D3(D/B=A7A('E(C;8P/F(B;(A1;<34/(/,A#03A<A7('A1",
";E0'(7(+F('o4'4+A$'('4+E<'4+D8'4+A$'('4+B('H('4+I4B#B=/B,B+L,+</AY4+B0*C87J8/1A(A#B4A;B8B#B4B#A<'0B'G0E#(3(",
"/A1;A1C'A1;L8A#8+D<'(7J$A/D0E3A1D,+8A3F,3C8;A5E+C,A+G4F'A1;A1A;(M+F8B/A(/A1E;D,A;,A1F,C7E(D#A1/0A1E(+A47F(+",
"0E;4'<',/(7[0I'g8+<+E0+<+A('('('('D0+G4'A$'(/0'A$/4+<3A<70'A$/A6D'.7*F7*B+)(+=7(A17B0N#(3(+A0'(/8;('('('4'",
"A4+4783('G-,9Ah7H5K'C)A[#D-Bc7`8;4/,A+)+E0'(7(+H$A#(B+C,A+A$'A$'A$'A$'A$'A$'A$'A$K/(AC+*3,)C3A-A#8+1,3L,;0'",
"L<'47F('M0/5A/D4F;B,D3A1D+A)'B)D3A1E3B)m7N{8I'rO,I3F4+f0/B,A1,B;F8B+D0+J$A1E3A,+N8+K<3(B#B0'0'4'C,A;=A/G0B#",
"G(D#A1C/</(','A1D$A/C,C3D(A#F8D#(A1;8'A0A18'E<C+0'A(3A1;C,/(/G('(/,+8+('(C/0+A4A#0A7<+<+<A+A$'A$'F('B$+,+P0",
"A;A1;YU$A7C,3G$SJ/t,+O(E/A$A787('A0'A<'8'(',','O0D7s<B3I(+G8E7A8P38'S,B7A1A#C8;C8A3L8/<+<+<+0E#A8'C8'B8','",
"B(+B$D;Q4A7F1A7H)B/-b;D(/G$B+C=3D45A+B<)A()7E0A/D,+E(3A('9F#V4+A1;E(3E(3E8A'G0A7A4'B('A$','A4'B('A$',/G0A7",
"l0A+C(A/A(C/<'F$'B$I'<+('F,',/(+C,+A)C,+A%D0A'A-F;B8',79C(=3C8;C8E/H$3-,B-+F5(B'4'0'D(A/A-C+D(-'D(1D3A('D$;",
"9B+G8A/C(+A)B87A)B4C+A%K/J0G;G,A;G,A#=E(A7A1;A1D$A+C,_'D1'F$;,B+<B/C(B/D(A1(A'C(A35C;B4F3C$A%B;C,A7G4C7D-',",
"+(A;F0D3C4A#A1A+E(B'A13(+(A'E$/(A7F<B#4A3A1('(3B=A3B4'C4B7,I#A$'('4'B('A0A#F8B/A1A3A(+,+C('A$','8/(B3(A78D+",
"A0'(+('E0'(C3('(F+G4B347A170D+F<B;,'(A'A1W7F8E;4E'F<B;(A3A1E/F(A;(A#A1;B=D#C<C#A93A$Z/F,P3I(B9A7A(+(+A(','",
"C0B'('(B#A1J#A(+E4B+('(D#(A/E8A#(C#(A3F4B7(B3J0B/(Y;D8B'A1;A,'E,B/(B'D)7D,P#A$','E0C#(A+A1;<','D4B#(A#A1;F,",
"3A1A#(b#B8B'('A<'D<D#A1L+(B'C%F'BE8N3P%7A5\\$A7l1EO/M<B'B[(B/<C3IC87AT,O`+D,B3A1Cz7AR,A#D0'A1;K,'A1;D,B3F<",
"B+4A7A1'A%'C$7B8}7F0/A1\\+I(C-A+C4+C4F+J87(I/A<I','(B#,1A+Po,E'D<M3P0A;BD4B#G,Q^+4'A$','j0A+(D'0+(B#8A#x4",
"EN7O,7A</A,A#A0I^/A1CV'B=A7B=O/C5S+L('J(',+(+,+4'A8'('A$'I,'4+A('A$'D$'4'8'(/A$'p8'C4'C4'D0'C4'D0'C4'D0'C4'",
"D0'C4'A(+G)DD#R4B#A$G7G,F;H<T;F0A/A$+A13(m;D,B3F,3A1AD'D$3A1^3D,+(A1\\'D0'0','A$+8A+,`#A$'4','B('\\(+A-F;I8",
"A#(3A1Ar#H1'1'5J;F1'B)[74'C<','(+('A0'4'('(;(3('('('0','(+('('('('(','(+4'A$'4'4'('A0'B070'8'B0AS;A=FT'A1",
"BU'Aav<D3I{('ME<+P{4B'AY<Ee+AN0CZ'KL47SO<A[Q7Yk,",
};
/* As Hugging Face's tokenizers 0.23.3 treat all code points. */
enum { MTT__NORMAL_END = 0x2fa1e };
static const char *const mtt__normal_table[] = {
"O-[/8H)#$H+#'G;#$H+#$G7#(G;#%G)#'G;#%G)#.G;#($#'G;#&H)#%I&#$H)#%I&#$H3#$H)#&G;#&H)#%G;$&H)#'G;#$H)#$H+#%G;#",
"$H)#$H,#%H-#$H,#%H-#$H,#0H)'$I&,$I&+$I&H>(H)I0$G;#'H)#$G;#&H)#$G=#$G;#)H)#)G;#%H)#$G;#%H)#$G=#$H'#$H)#$-#$.",
"#$/#$0#$1#$2#$3#$4#$5#%6#$7#$8#$9$$:$$;#$<$$H)#$G;$$5B3+H)#$A%#$A&#$A'A7$>#$A##$A$#$A%#$A&#$A'#$A(#$A)#%H)#",
"%G;#(H)#$G;#%H)#$G;3$A*C4*H)%'H)#$G;#$H)%%H)$$G;#%H)#$G;A*$A+A%$H)#$G;#%H)#$G;#%H)#&G;#$H)#%G;#$H)#$G;#&H)#",
"$G;#$H)#$G;#$H)#$G;#$H)#$G;#%H)E7*H)#$G;#$H)A)'H)$,H)$&H)$(H)A2&G;D+1H)$$G;#%H)#$G;#%H)#$G;#&H)#&G;#$>#$A##",
"$A$#&H)#$G;#%H)#%G;#(H)B'$*3$,&$H)#$G;#%H)&+I&C+$*$$I&1$,,$I&'%I&$$I&B>$I&%$I&($*3$,.&I&%$I&C,$*3$,C=$*$$I&",
"1$,+%I&'%I&C/$I&1$,,$I&D($,*$C##$C*C4$*($I&-$,*%I&C6$I&1$,,$I&D%$,'$I&2$I&C'%C6#$,0'C:C;%D)1'D-B7%G;>$G;$$",
"G;$$G7,$I&,$I&'$I&'$I&'$I&/$I&*$D4#$D5#$I&#$D7#%I&$$I&$'D5%$D5#$I&#%H)#$,$%H).$I&,$I&'$I&'$I&'$I&/$I&/$G;C6",
"$I&+$*$%,B=$G;G28I&A9>I&N5&H)a;$,A&$,E4$,-$H)G*$H'E&$G=#$H)#$G;G:$H)#$G;B2$,7+H)%$G;A7(H)#)G;#%H)#$G;D)$*#$",
"I&1$,A-$H)#$G;#*H)A=%,B%$*.%,B.$*E/&H)$$$#(G;#%H)#'G;#$H)$*$'$G;)$H)&%H)G%%H)#$G;#*H)#$G;#%H)#$H-#$G5#$G;#$",
"G)#A,H)($H)#$H,#$G;#$H)#$G;M($I&$$I&$$I&$$I&$$I&$$I&$$I&B($I&%$I&-$I&$$I&*$I&*$I&*$I&*$I&%%I&,$I&$$I&$$I&%%",
"I&G-%H)#%$#'H)#&$#%H)'$H)&%$#$H)#$G;#$H)#%$#'G;#$H)A<$I&&%I&R(%I&AG,$I&R=&H)E$$,C/A'H)S9$G9#$H'#$H+#$G=#%H#",
"C8%+QF+$H)'-H)A'%H)B;%H)I;$,F8$,>5H)B$&G;A,$,C.$*/$,H2$H)$%H)#$G;%%H)(%H)$$H)A;$,H9$,KK5I5I&%$I&$$I&%-I&$$",
"I&$$I&%%I&&B/I&%C9I&B.$I&#$=#$I&-0I&$(I&$$I&$%I&$%I&$,I&Y8*H)#*G;#%H)b8$G;H%$G;E,(H)|%$G;$$H)A/$H)#$$#$G;'$",
",E<$H)#$G;q&$,B#$,B$$,#$*B0&H)A+$I&.%,B)$*B7$,,$*C9$,#$*F-$*#$,B<$*$$I&1$,,$I&1*H)&(H)G,$,&$*C8$I&,$I&%$I&'",
"$,#$*H.$I&2$,#$*D1$,D)$,#$*D&$,n.$,KZ/($B&*H)Ks*$$C@6*I&#%G7#&$&$H%#(G7++G;%(H)#%G;A%'H)0)I&D4&H)A~2*H)$4H)",
"%*H)$%H)$(H)AP$*G;C<)H)#$*gR$S-I&H%F;)D5v;#%#%#%#-#'$,'B%'B8#%#%#/+2#%#%#/$)-,%(#%#%#%#-%(/2#%#%#/+0%)3$#%#",
"%#%#-#'$,'B%'B8#%#%#/+2#%#%#/$)-,%(#%#%#%#-%(/2#%#%#/+0$4#1C>*B+#B*'B+#B*B/B+#B&B8B+#B*%B+#B*-B+#B*-B+#B(#",
"B+#%7B(2B+#B*'B+#B*%B+#B*B-B+#B*A>B+#B&6B+#B*+B+#B*%B+#B*B+B+#B(B4B+#%,B(%B+#B*%B+#B*'B+#B*B/B+#B*B,&'%,B+#",
"B(B5B+#$)B(B6B+#B*B7B+#B*A<B+#')B&8B+#B*B7B+#B*A<B+#&)B(2B+#B*'B+#B*-B+#%5B$6B+#B*B7B+#B*A<B+#B(8B+#B*%B+#",
"B*B5B+#B*A<B+#B(A=B+#B*A<B+#%:B(4B+#B*%B+#B*'B+#B*+B+#B*%B+#B*B%B+#B&B6B+#B&#B+#B*/%0B+#B*/B+#B*-B+#A(%C$A%",
"B+#0%A:#B+#A#3C6A$B+#A6#B+#A:#B+#A:#B+#G-2B+#B*(B+#B*9B+#B*:B+#$)C>+B+#W##%#Y(#B+#%.K,3B+#A>#B+#A>B#B+#[%B2",
"%#C63O5#g.#&%B08B+#%A+A8$B+#F)%B+#B(#B+#>#B+#M$A#B+#B*'B+#A>&B+#B*'B+#A>&B+#B*'B+#A:&B+#B*'B+#B$&B+#B*'B+#",
"B$&B+#B*'B+#B.A1B+#B(#B+#%%C&A:B+#)1B8,B+#A>B+B+#H%B0B+#B,#B+#K:)B+#_=(%#a2#B+#I7$n9(B+%k.#u)#$&+#'#'#$$/#$",
"&/#+#B-#<*C01;#;0+#'#'#A+#<(A*1;#.0/#+#'%5##1A2%D92#3$$&0&$<1'&A/0&$9/-$8#A&$B+#9%(.#3$$&0&$B11'&A>0&$9/:%",
"C15%#B4%F84B+#0'B6#B+#B*'B+#%%A<&B+#%)K5'%#M<#B+#B(#B+#%)B(*B+#B*+B+#A:#B+#%/L'#%#M.#B+#B>*B+#B*+B+#B*)B+#",
"A>(B+#%%A>#B+#J3(b#|)#%B-#B,%B1$E0$I=#$$A.#3$A)#U,$j7u'*$3#%$)#A*+B&#%#%#-#-#%#5#+#C:%J;I+#A92%B6A<%#$$=#B>",
"$I-I'%$/#A)&B.#%#-#%$A%#H,$T+T'%%#A6#A92%B6A<%#A=$H#K%A<&C7A8%#$A9D.$I'I%D*$H5I%)%1##%$%#A.+A-D1&H;G1%#$A9",
"E$$J1H)$&#-),(A1L7$Y9a7,$7#'$-#'$-#'$-#/$A<&,$C1D8$%#'D5;$$%#+$D6#4$B-C=,$7#'$-#'$-#'$-#/$A<&C;$J5H5Ad.$CI;",
"CL5$$'#$$'#$$'#$$'#&$+#A/$B=#$$'#%%'#%#$$)#Y#E1Gt8F}>B+#B(B&B+#B*B#B+#B*A#B+#G)C.B+#K4/B+#B*B#B+#B*A#B+#B*6",
"B+#B*/B+#L/C(%#$%%#N6C'B+#B*)B+#`)B>%#b0%B+#B((B+#B()B+#B*B#B+#B*A<B+#B*B)B+#B*1B+#B('B+#G+C,B+#K6#B+#B*B/",
"B+#B*A#B+#B(>B+#Hh7B(%#Hk$C)B+#B**B+#B(C&B+#B*/B+#B*B#B+#B(A>B+#B*B#B+#B*A#B+#B**B+#G-C&B+#B*1B+#F)2%#$%%#",
"R$#B+#B*/B+#B&#B+#B*B#B+#Hj;B(%#Hm(C)B+#B(B>B+#B*B#B+#P1A>%#-#%#HZ-#%#Hm4#B+#B*B#B+#B*A#B+#B**B+#B(4B+#B*;",
"B+#B*(B+#Q-C&%#%1%#S8,B+#B*B+B+#B(B0B+#B*%B+#B*1B+#B*$B+#B*B#B+#B(A>B+#B*%B+#B($B+#B(,B+#B*B-B+#B*A#B+#A*#;",
"B<)''#$$R7('C)V6B#B+#B*A:B+#F=2B+#B*$B+#B*5B+#B*.B+#Hg;$%#He4$%#$$%#$5%#$.%#He1)%#Hs&B%B+#B*A:B+#B*.B+#G)&",
"B+#B*$B+#B*5B+#B*.B+#Hi#$%#Ht21B+#B*A;B+#A:#B+#B*A:B+#G)2B+#B*$B+#B*5B+#B*.B+#Hi7$%#H]0$%#$$%#$5%#$.%#$B+%#",
"W6#B+#B*A:B+#V/2%#$$%#$5%#$.%#$B+%#X0B0B+#B*B1B+#B*A:B+#B*.B+#)9z;A'#%Gz-A.%#$%%#$D5%#G|6C,#%G})A.%#$%%#$D5",
"%#Gz6C,#%G{)A.%#$%%#%)G}2A+#%G~%A.%#$%%#%A-G{6A+#%G|)A.%#$%%#$D5%#G~2C,#%H@%A.%#$%%#$D5%#G|6C,#%G})A.%#$%%#",
"$D5%#H@2C,#%HA%A.%#$%%#$D5%#G}.C,#%G}=A.%#$%%#%)HA*A+#%HA9A.%#$%%#%+G~&A+#%G~5A.%#$%%#$D5%#$$HA>C*$$HB3A.$$",
"#%$5#D5G~>C,#%H@1A.%#$%%#$D5%#HB:C,#%HC-A.%#$%%#$D5%#HB:D6$$+#$$'#$$'#$$/#$$/#$$+#&A<Gx5D=%#%#%#%#%#%#%#%#%",
"#%#%#%#%#%#%#A)#%#%#%#%#%#%#%#%#%#%#%#%#%#%#%#C1#%#%#%#%#%#%#%#%#%#%#%#%#%#%#%#HC*D0#&HC-D5HC,#,#$(-(HH-)",
"HJ4D0#&#*$$#D=''u((H{')HC(#4#$&5(HI%)HK0D<$$'#$*#D=HJ;D<#%#D5HH.D*#&A)*&(A(D7A)#C0D*#&#*%)HO)##%#D5HL$D*#&/",
"*$*6A-#%+C+/#B6D*#&#*$%*A/v,A.'&H{7D=HB0#-#$&,(HK))HN(D<$$7#$$#D=N8%Hj9<'#5$'#A%&D+#+#&#A;$C1#'$-#%$)#:$A7#",
"$$'#=$A5#%$1#%$'#$$)#9$Iw0#$$Iy+#-(A.#Iw<#'#Iy/#%#%%=#%#%%)#%#)%)#%#%%1#%#%%)#%#A)'A=#/#%#'#A7'C,#%#A/#%#)'",
"B+#%#%#%#AI1$BW'#q6$Ad+MJ9$$'#$$'#$$'#$$'#$$'#$$'#$$'#$$'#$$'#$$'#$$'#%$)#$$'#$$'#)%1##%$%)$#%$%)$#%$%)$#%$",
"%)$#%9$C8$,$F)#0$A##$$'#$$'#$$'#$$'#$$'#$$'#$$'#$$'#$$'#$$'#$$'#%$)#$$'#$$'#)%1##%$%)$#%$%)$#%$%)$#%$%)$#%9",
"$C8$%'E)#%#%#%#&$9#]T=$L`:L\\,$$A9)-047#%AHM;$#%AHO48#%#+%#%#%#%#%#%#$('#%#%#%#%#$$'#$%'#%#$%'#%#$,'#%#%#%#",
"%#A0(*/7#5#CE6$ANY=AN^=$$'#1$7#D5%J#G9%#S*%f%f)#A9M%%Z/Y-#6$$#=H>%R)Q+%#[N1*v\\7v^/%#15#%#%#%#%C%)F/<%#%5%#",
"$%%#A-]7%[/[0$$\\&A7$X<,$B&+$F2DC($a3$$a4$$a5$$a6$$b7$$b8$$b9B($`)%$b$-$`+$$`,*$`3*$`-*$a7*$`1%%`(C/,$`/$$",
"`2$$F/%%Dh5Dh6J/$a0&%B6G$R(%F}'F}(_B$I5TV3N{+Tm1T['PE(KU=LK$WJ+WJ+L|4UJ(LY>L|+NM5QK4R_<S^.Sk=Sw+T}6OX)Ot2",
"PW8Ps-SL$UF1VU0KX9LG$Oa/Pc*S]8V{5Mb'PO*SZ,S{'NU(Ru'So2Mo5N|2Ow-Pk+U@=Kb%Kv&LA5Ng+O_6Pb;QP&Rd,S\\-S_/Te6U{-",
"Vc&Vz-Q_'Qg:RN3SG<UU'W@&TI-Lx2Mq7RC'Rh9Pe9Qa-TZ=Uy*Lx+MY5OX:O{-PG.RJ2RS>Us&LA)Ri*Kw/Kv;Qm/RO5SI,Ut4TO/NU.",
"OX)TJ9KV(MU*M{-Pp*QB7LC6Qc&Kd&Mw4KT4Oq7Nm7RJ%LI:Ls=QQ$SL0TG9Og=Tu7Oo+NW%R~8N\\;QB,KZ-Ks,Kv8OJ0RG>Rz2TI)UJ&",
"LB0LN-L}:Mp;Np0PO=Qd9Um0VY9W@>WB=K~*Ny5Oe2Tr=Ml3NJ#NN#Ne9PH&P[8Py0Qj1RQ3Rh*Tp9SR-Ty:UW5Ky2K~2LR8PW'Su-TG9",
"Mo4Mz,N[2Og1RA=Po4K\\+Lg(MU*Me=M{7Pq9Px,R`5Rf9UM7Uy)U|'VD3Kb*Qi1UI'Uw#NC8KX=Kn)MU1MX.Nn<OX)P`1QJ)SR;T}#WI8",
"Nw/Ur%K}4OA&OE.Ou<PC+Pt<QA<Q]>RI/VG%Ks0NO5Ut7Kg>M`(O{=Tp=Mv2NG+OF6Pp*Uu)Kz(LL2MY8Ns*N~1OK;Or4Pt9QF9R_0Su:",
"Sv0UJ#Ux1LE&PD-LM$P`3Pz#S[=Uv*Vk.WA*OB&Oz:Ru7Qs6Qv7RD=Pi'PU0TN#K[#SB5Kz9Kx>Mn-NU2RG-MQ8Ot5Ny#Tq2Sq'Us(S|2",
"Mo>Kq;L\\#%$Ls9$$Nv7%-Kw1Pl=QO%Qe/Qf5Qf<Qh.U|5RF1Ra<$$S\\9$$TJ3%%Tz3UB4&B/VL*VL7VN+Vw;UA1Uv>Kc1Kn6Kr,L@<LA;",
"LE8LZ8L^1Lb#Lr;Lv3MY7MZ%NA#NH3NI=NM1Nl*Nq1Nw8OJ4Ow:O}5PH%P]%Pc:Pu9Q_,Qe1Qe<Qe;Qf'Qf-Qf4Qh,Qh-Qn7Qq$Q|/RQ3",
"RR,RT,R_)Rd0Ru<Rz<Rz<SL>Sx'S|=TJ<TL<T[2T]/Tu=Tz3Ux2VC6VE:M~<AUA%Rw/%C9KU1Kv$Ks+Ka;Kr$Kt'L@:LB5LZ8LX(LZ4L])",
"Ls9Lv>L|'L|7MG-MN/Mo=Mp(Mu,Mw8NC/NG5NE'NI=NH+NM1NO;N^'Na+Nc)Nl1Nv7N|2N|6N~9Oe4Og=Ou<PE2PD>PH%PQ%P]%QV>Pd(",
"Ph2Pl=Px4P}=Q@:QH<QH>QO%QO6QP3QS5QS+Qa/Qr8Q|/RD&RL&RQ3R]-Rd0SC5SI*Si4Sy<S|-S|=TH2TJ3TH>TJ<TJ9TJ(TL<TO9T]/",
"Tq/T|5UH(UP%Ut;Ux2U|5VB.VC6VD&VE:V_9WJ+AQI1AQI+ARt$Hi$IS#IT(AWO0AXp7A]l6WG&WI9AJx%S-KV,KV'KV0AK]1K`7Kc1Kc>",
"Kf1Kj9Kk<Kn6Km:Gh%ALM%Kr,Kr3Ks'Ks:ALB;Gi$Ks*Kt4ALD2Kt>Ku/K[/Ku7Kv$A`]:Kx,Kx:Gj.Kz:K{)K|9K|>Gl,L@:L@<LA;LB5",
"LC$LC%LC6LE0LE8LF%LF>LG,LG.LG.LG.ALq'PT#LJ%LJ:AL|*LK*LK0LL)LQ5LN#LN3LO7LQ9LT9LU7LX&LX6LY;LY;LZ4L[*L[2L\\%",
"Lh)L^1Lh*La(Lb/Kx>Ly%Ln9Lp'Lq$Ll.Lr-Lr,Lv7ANU'Ly)Ly.Ly=Lz5Lz=L})ANe+ANg5MC'MD:ME*MB/MG1G})G}7MM+MO)MO)AOB;",
"MS>MT7MU*MU6AON;MV&MV-Mt2MW-HC0MY3MZ%M]#M[(AOh/Ma6AOh1Mc)Mc&Mc7Mg,Mg-HI6Mh,Mi;Mj4Ml(HK1APJ2HL/Mn7Mn:Mn=Mo5",
"AcB5Mq1APY<APY<Rv4Mr9Mr9HO&ARi;AY_9Mu%Mu.HP&Mw%Mx<My*Mz0N@,HS)HR'NA#AP{'NB:NG/NG3NG5NG3NI)NI=NK)NJ7NK&NL9",
"NM1NM5NN3NN>NQ,NT,NU3NZ#AQb7NY,NW#NZ;N[:N_+AQj<Na1N^(N](H[=Nd$Nd9Ne<Nd2H^'Nl*Nm+ARQ-Nq2N{/Nu(Hd,Nw8Hc7Hb/",
"Kt9Kt<N{7Nx'Rj0Iu,N|2N|6N|<O@%N~6ARs.Hf$OE5OA0OH9OJ4ARy0OJ=OF>OO7Hi$OQ-OT:OW-O^'ASN6O_>Hm/Ob0ASa&Od+Ho-Oe-",
"Of>Og=Og>ASr0AO`6ASv-Om)ATG/Oq*Oq8On&Ot-Ou9Ow:Ou<Ow,Ow;Ox,ATJ=Ou/O~.PA5Hw2PD>PD:ATZ0O|0PJ9AT_1ATa)PM=PR$PQ%",
"PP>H{%PR5PT0PT*PV(ALC(P[4AT{&P^7AUG:Pc7Pd(Pe'AU]/Pf;Pg4AUh(AUp'Po9Pp.IF#Pq,IF/IF/Pw&Pw;Px4Py,P{9II>Q@#AVV=",
"Q@=AVZ)QB7APK2QH/AVv(AVw#AV|#IR#IR/QP3AWC*AWC)AWD4AWE2QR%QR&QR&QS5IT(QU>IT5IW1AW`(Q\\=Q_'Qa/IZ*AWr9Qf-AWv=",
"AWx0Qh.Qk6I\\>Qn7Qo%Qo*AXR+AX\\>AX\\>Qt=Id1AXf*Q|5Q|8Ie:AXm;RG)Ij'RH#RG:RH;AYJ1RL.Im4RO>RR%RT0Io/AYb3AYc6",
"Ip8AYh<R_1AYl1R`0Rd%Rd0AY{)AY}:Rg7AZC3Rh+ARo:Iu(Rj5Rm2Iw&Ro5MJ,AZU:AZV,ARq6ARr#Rv4Rv7Tu%Iz2R{8R{2R|(L@&R|<",
"R|>R},R~9AZv3R~8SA8SD*SF<SA>SG0SH>SL>SC6SG=SH#SH3A[@1A[K2A[F(JB.SR0SR2SS9A\\F9SV3A[[3JD(JD,A[`,A[j5JD6S_#",
"S_/S_:S_<Sb(Sa#Se9Sd)Si4Sf7Si&Sj%JH2Sm,Sn0JI8Sq;Sq>A\\^6Sv&Sv-JK<Sw-Gi&A\\s1A\\z%JP9JQ&TG/TJ(TO9TW$A]X;TZ&",
"TZ<T^&Ta.A]o>AL]/Td.Tc;Te7ALe)Tm;Tq/A^m5A^n4T};UB(UC,A^z%UC6UM;US2US3UP+U]<U^<A_f=Ul*Jj8Um:A_t2Jm5Uw.Me5Uz:",
"A`X,A`_=Jr1Jr9VB3A`q5Jt=A`v5VD&VD&VE(AaA=VK9Jy2VN,VR:VS9VU=K@%Aat#V_9Vj3Vq,KI)KJ,Vu&Abh-KJ7Abj,Abs9Abx0WB*",
"KN%WD0WD5WD<WE*WE1WF:AcX;",
};
/* to here */

#define MTT__END_OF_TEXT "<|endoftext|>"
enum {
    MTT__DEFAULT_VOCAB = 10000,
    MTT__ALPHABET_END = 0x144, /* GPT-2's printable alphabet for the 256 bytes lies below this code point */
    MTT__GPT2_MERGES = 50000,
    MTT__CACHE_BITS = 17, /* the cache of words has 2^17 entries of 64 bytes: 8 MiB */
    MTT__WORD_BYTES = 22, /* longer words, and those of more ids, are not cached */
    MTT__WORD_IDS = 10,
    MTT__ADDED_MOST = 4096, /* added tokens of a file */
    MTT__PARTS_BYTES = 1024 /* of a .tiktoken piece, at most */
};

/* ---- containers */

/* A map from 64-bit keys to numbers: open addressing with linear probing, at most half full. */
typedef struct mtt__cell {
    uint64_t key;
    uint32_t value; /* MTT__NONE in an empty cell */
} mtt__cell;

typedef struct mtt__table {
    mtt__cell *cells;
    size_t count, mask;
} mtt__table;

/* Returns the cell that holds the key, or the empty one where it belongs. */
MTT__INLINE mtt__cell *mtt__table_find(const mtt__table *table, uint64_t key)
{
    uint64_t hash = key * 0x9e3779b97f4a7c15u;
    size_t i = (size_t)(hash >> 32 ^ hash >> 51) & table->mask;
    while (table->cells[i].value != MTT__NONE && table->cells[i].key != key) i = (i + 1) & table->mask;
    return &table->cells[i];
}

/* Makes room for one more key. The first call makes the table. */
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
    if (mtt__table_grow(env, table)) return MTT_E_MEMORY;
    cell = mtt__table_find(table, key);
    table->count += cell->value == MTT__NONE;
    cell->key = key;
    cell->value = value;
    return MTT_OK;
}

MTT__INLINE uint64_t mtt__pair_key(uint32_t left, uint32_t right)
{
    return (uint64_t)left << 32 | right;
}

/* A set of byte strings, numbered in order of arrival: the words of a text, the pieces of a vocabulary. */
typedef struct mtt__string {
    size_t at, size;
    uint64_t count; /* of a word: how often it occurs */
    int silent;     /* of a piece: 1 = decodes to no bytes, as [CLS] */
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

/* Returns the number of a string, or MTT__NONE. Its key is its hash, or the next free number if other strings
   have that hash. The hash's own key is the address of the set, which the author of a text does not know:
   nobody can choose words that collide. The table must exist. */
static uint32_t mtt__strings_look(const mtt__strings *s, const char *at, size_t size, uint64_t *key)
{
    for (*key = mtt__hash((uint64_t)(uintptr_t)s, at, size);; ++*key) {
        const uint32_t i = mtt__table_find(&s->table, *key)->value;
        if (i == MTT__NONE) return i;
        if (s->items[i].size == size && (!size || memcmp(s->bytes + s->items[i].at, at, size) == 0)) return i;
    }
}

static uint32_t mtt__strings_find(const mtt__strings *s, const char *at, size_t size)
{
    uint64_t key;
    return mtt__strings_look(s, at, size, &key);
}

static mtt_status mtt__strings_reserve(mtt__strings *s, size_t size)
{
    return mtt__reserve(s->env, (void **)&s->bytes, &s->bytes_capacity, mtt__add(s->bytes_size, size), 1);
}

/* Appends a string that mtt__strings_find does not know. `at` may be the unused end of s->bytes. */
static mtt_status mtt__strings_append(mtt__strings *s, const char *at, size_t size, uint32_t *index)
{
    const mtt__string item = {s->bytes_size, size, 0, 0};
    if (s->count >= INT32_MAX)
        return mtt__fail(s->env, MTT_E_MEMORY, "more than 2^31 different words: use a sample of the text");
    if (mtt__strings_reserve(s, size) ||
        mtt__reserve(s->env, (void **)&s->items, &s->capacity, s->count + 1, sizeof(*s->items)))
        return MTT_E_MEMORY;
    if (size) memmove(s->bytes + s->bytes_size, at, size);
    s->bytes_size += size;
    *index = (uint32_t)s->count++;
    s->items[*index] = item;
    return MTT_OK;
}

/* Finds a string, or appends it as number s->count. */
static mtt_status mtt__strings_add(mtt__strings *s, const char *at, size_t size, uint32_t *index)
{
    uint64_t key;
    if (mtt__table_grow(s->env, &s->table)) return MTT_E_MEMORY;
    *index = mtt__strings_look(s, at, size, &key);
    if (*index != MTT__NONE) return MTT_OK;
    if (mtt__strings_append(s, at, size, index)) return MTT_E_MEMORY;
    return mtt__table_put(s->env, &s->table, key, *index);
}

/* Counts `count` more occurrences of a word. */
static mtt_status mtt__strings_count(mtt__strings *s, const char *at, size_t size, uint64_t count)
{
    uint32_t word;
    if (mtt__strings_add(s, at, size, &word)) return MTT_E_MEMORY;
    s->items[word].count += count;
    return MTT_OK;
}

/* ---- Unicode's form NFC (UAX #15) */

enum { MTT__JOINS = 255, MTT__POINT = 0x1fffff };

typedef struct mtt__normal {
    mtt__table parts; /* (0, c) and (1, c): what c decomposes to; these two: c */
    /* 0 = joins nothing before it, 1 to 240 = a mark's combining class, MTT__JOINS = no mark, but it may join
       what is before it, or its form NFC is another */
    unsigned char kind[MTT__NORMAL_END];
} mtt__normal;

/* Reads leading digits of base 63, from @ up, and a last one of base 28, from # up. No line cuts a number. */
static uint32_t mtt__unicode_number(const char *const **line, const char **at)
{
    uint32_t n = 0;
    if (!**at) *at = *++*line;
    for (; **at >= '@'; ++*at) n = n * 63 + (uint32_t)(**at - '@');
    return n * 28 + (uint32_t)(*(*at)++ - '#');
}

static mtt_status mtt__normal_make(mtt_env *env, mtt__normal **out)
{
    mtt__normal *n = *out = (mtt__normal *)mtt__alloc(env, 1, sizeof(*n));
    const char *const *line = mtt__normal_table, *at = *line;
    uint32_t section, runs, c, i, d, length, parts[2] = {0, 0};
    mtt_status status = n ? MTT_OK : MTT_E_MEMORY;
    for (section = 0; section < 3 && !status; section++)
        for (c = 0, runs = mtt__unicode_number(&line, &at); runs && !status; runs--) {
            c += mtt__unicode_number(&line, &at);
            length = mtt__unicode_number(&line, &at);
            if (section == 0) memset(n->kind + c, (int)mtt__unicode_number(&line, &at), length);
            for (; length && !status; length--, c++) {
                for (i = 0; section && i < 3 - section && !status; i++) {
                    d = mtt__unicode_number(&line, &at);
                    parts[i] = section == 2 ? d : parts[i] + (d >> 1 ^ (0 - (d & 1)));
                    status = mtt__table_put(env, &n->parts, mtt__pair_key(i, c), parts[i]);
                }
                if (section == 1 && !n->kind[c] && !status)
                    status = mtt__table_put(env, &n->parts, mtt__pair_key(parts[0], parts[1]), c);
            }
        }
    return status;
}

/* Decomposes a code point to at most four, and returns their number. */
static uint32_t mtt__normal_parts(const mtt__normal *n, uint32_t c, uint32_t out[4])
{
    const uint32_t hangul = c - 0xac00;
    uint32_t part = mtt__table_find(&n->parts, mtt__pair_key(0, c))->value, count;
    out[0] = c;
    if (hangul < 11172) {
        out[0] = 0x1100 + hangul / 588;
        out[1] = 0x1161 + hangul % 588 / 28;
        out[2] = 0x11a7 + hangul % 28;
        return 2 + (hangul % 28 > 0);
    }
    if (part == MTT__NONE) return 1;
    count = mtt__normal_parts(n, part, out);
    part = mtt__table_find(&n->parts, mtt__pair_key(1, c))->value;
    if (part != MTT__NONE) out[count++] = part;
    return count;
}

/* Returns the code point that two compose to, or MTT__NONE. */
static uint32_t mtt__normal_join(const mtt__normal *n, uint32_t a, uint32_t b)
{
    if (a - 0x1100 < 19 && b - 0x1161 < 21) return 0xac00 + ((a - 0x1100) * 21 + b - 0x1161) * 28;
    if (a - 0xac00 < 11172 && (a - 0xac00) % 28 == 0 && b - 0x11a8 < 27) return a + b - 0x11a7;
    return mtt__table_find(&n->parts, mtt__pair_key(a, b))->value;
}

static int mtt__normal_order(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Composes decomposed characters, class << 56 | place << 21 | code point each, and returns how many are left.
   First it sorts each run of marks by class; the place keeps the order within a class. */
static size_t mtt__normal_compose(const mtt__normal *n, uint64_t *items, size_t count)
{
    size_t i, from = 0, starter = count, kept = 0;
    for (i = 0; i <= count; i++) {
        if (i < count && items[i] >> 56) continue;
        if (i > from + 1) qsort(items + from, i - from, sizeof(*items), mtt__normal_order);
        from = i + 1;
    }
    for (i = 0; i < count; i++) {
        uint32_t both = MTT__NONE;
        if (starter < kept && (kept == starter + 1 || items[kept - 1] >> 56 < items[i] >> 56))
            both = mtt__normal_join(n, items[starter] & MTT__POINT, items[i] & MTT__POINT);
        if (both != MTT__NONE) items[starter] = both;
        else {
            if (!(items[i] >> 56)) starter = kept;
            items[kept++] = items[i];
        }
    }
    return kept;
}

MTT__INLINE unsigned mtt__normal_kind(const mtt__normal *n, uint32_t c)
{
    return c < MTT__NORMAL_END ? n->kind[c] : 0;
}

/* Brings a text to form NFC. The caller frees *out; it is NULL if the text stays where it is. Only characters
   whose kind is not 0 are decomposed and composed, with the one of kind 0 before them. */
static mtt_status mtt__normalize(mtt_env *env, const mtt__normal *n, mtt_slice *text, char **out)
{
    const unsigned char *at = (const unsigned char *)text->at, *end = at + text->size;
    const unsigned char *start = at, *done = at;
    size_t capacity = 0, size = 0, room = 0, count, k;
    uint64_t *items = NULL;
    uint32_t c, i, many, parts[4];
    mtt_status status = MTT_OK;
    int width;
    *out = NULL;
    while (at < end && !status) {
        c = mtt__utf8_get(at, end, &width);
        if (!mtt__normal_kind(n, c)) {
            start = c == MTT__NONE ? at + 1 : at;
            at += width;
            continue;
        }
        for (at = start, count = 0; at < end && !status; at += width) {
            c = mtt__utf8_get(at, end, &width);
            if (at > start && !mtt__normal_kind(n, c)) break;
            status = mtt__reserve(env, (void **)&items, &room, count + 4, sizeof(*items));
            many = status ? 0 : mtt__normal_parts(n, c, parts);
            for (i = 0; i < many; i++, count++) {
                const uint64_t class_ = mtt__normal_kind(n, parts[i]) % MTT__JOINS;
                items[count] = class_ << 56 | (uint64_t)count << 21 | parts[i];
            }
        }
        if (!status)
            status = mtt__reserve(env, (void **)out, &capacity, size + (size_t)(end - done) + 4 * count, 1);
        if (status) break;
        memcpy(*out + size, done, (size_t)(start - done));
        size += (size_t)(start - done);
        count = mtt__normal_compose(n, items, count);
        for (k = 0; k < count; k++) size += mtt__utf8_put(items[k] & MTT__POINT, *out + size);
        done = start = at;
    }
    mtt__free(env, items);
    if (!*out || status) return status;
    memcpy(*out + size, done, (size_t)(end - done));
    text->at = *out;
    text->size = size + (size_t)(end - done);
    return MTT_OK;
}

/* ---- parts common to all kinds */

/* An entry of the cache. A word can be in one entry only, and replaces the word that was there. */
typedef struct mtt__word {
    uint8_t size, count;
    char text[MTT__WORD_BYTES];
    int32_t ids[MTT__WORD_IDS];
} mtt__word;

/* A token that is looked for in a text before the text is cut into words. */
typedef struct mtt__added {
    uint32_t id, next; /* next: the next shorter one with the same first byte */
    int special;
    int normalized; /* 1 = it is looked for after the others, in what is between them */
    int listed;     /* 1 = it is also in the vocabulary of the model */
} mtt__added;

struct mtt_tokenizer {
    mtt_env *env;
    mtt_tokenizer_kind kind;
    void *own;           /* the kind's state */
    mtt__strings pieces; /* item i holds the bytes of id i */
    uint32_t end_of_text;
    mtt__strings added_texts;
    mtt__added *added; /* by rising ids */
    size_t added_capacity;
    uint32_t first[2][256]; /* first[normalized][byte]: the longest added token that begins so */
    size_t wanted[2][2];    /* wanted[normalized][special]: added tokens that a call looks for */
    int32_t begin_of_text;
    mtt__normal *normal; /* NULL if not needed */
    int nfc;             /* 1 = text is brought to form NFC before it is cut into words */
    mtt__word *cache;   /* NULL until the first mtt_encode */
    mtt__strings words; /* of the texts given to mtt_vocab_trainer_add */
};

MTTDEF void mtt_tokenizer_destroy(mtt_tokenizer *t)
{
    if (!t) return;
    if (t->own) t->kind.destroy(t);
    mtt__strings_free(&t->pieces);
    mtt__strings_free(&t->words);
    mtt__strings_free(&t->added_texts);
    if (t->normal) mtt__free(t->env, t->normal->parts.cells);
    mtt__free(t->env, t->normal);
    mtt__free(t->env, t->added);
    mtt__free(t->env, t->cache);
    mtt__free(t->env, t);
}

static mtt_status mtt__check_kind(mtt_env *env, const mtt_tokenizer_kind *k)
{
    const mtt__member members[] = {MTT__IS_SET(k, name), MTT__IS_SET(k, create), MTT__IS_SET(k, destroy),
                                   MTT__IS_SET(k, load), MTT__IS_SET(k, learn), MTT__IS_SET(k, cut),
                                   MTT__IS_SET(k, spell), MTT__IS_SET(k, print)};
    return mtt__require_members(env, "the kind of tokenizer", members, MTT__LENGTH(members));
}

/* Makes a tokenizer from a file or from words. With neither it has no pieces and can only count words. */
static mtt_status mtt__tokenizer_make(mtt_env *env, const mtt_tokenizer_kind *kind,
                                      struct mtt__json_file *file, const mtt__strings *words, int vocab,
                                      mtt_tokenizer **out)
{
    mtt_status status = mtt__check_kind(env, kind);
    mtt_tokenizer *t = *out = status ? NULL : (mtt_tokenizer *)mtt__alloc(env, 1, sizeof(*t));
    if (!t) return status ? status : MTT_E_MEMORY;
    t->env = t->pieces.env = t->words.env = t->added_texts.env = env;
    t->kind = *kind;
    t->begin_of_text = -1;
    memset(t->first, 0xff, sizeof(t->first));
    status = mtt__table_grow(env, &t->pieces.table);
    if (!status) status = mtt__table_grow(env, &t->added_texts.table);
    if (!status) status = kind->create(t);
    if (!status && file) status = kind->load(t, file);
    if (!status && words) status = kind->learn(t, vocab, words);
    if (!status) return MTT_OK;
    mtt_tokenizer_destroy(t);
    *out = NULL;
    return status;
}

MTTDEF int mtt_tokenizer_vocab(const mtt_tokenizer *t)
{
    return (int)t->pieces.count;
}

MTTDEF int mtt_tokenizer_end_of_text(const mtt_tokenizer *t)
{
    return (int)t->end_of_text;
}

MTTDEF int mtt_tokenizer_begin_of_text(const mtt_tokenizer *t)
{
    return (int)t->begin_of_text;
}

MTTDEF const char *mtt_tokenizer_bytes(const mtt_tokenizer *t, int id, size_t *bytes)
{
    const mtt__string *piece = id >= 0 && (size_t)id < t->pieces.count ? &t->pieces.items[id] : NULL;
    *bytes = piece && !piece->silent ? piece->size : 0;
    return piece ? t->pieces.bytes + piece->at : NULL;
}

/* Where ids go. All are counted; those that fit are written. */
typedef struct mtt__ids {
    int32_t *at;
    size_t count, capacity;
} mtt__ids;

static void mtt__ids_put(mtt__ids *out, const int32_t *ids, size_t count)
{
    size_t i, room = out->count < out->capacity ? out->capacity - out->count : 0;
    for (i = 0; i < count && i < room; i++) out->at[out->count + i] = ids[i];
    out->count += count;
}

/* Appends the ids of a short word, from the cache if it is there. */
MTT__INLINE mtt_status mtt__encode_word(const mtt_tokenizer *t, const char *at, size_t size, mtt__ids *out)
{
    mtt__word *word = &t->cache[mtt__hash(0, at, size) >> (64 - MTT__CACHE_BITS)];
    const size_t before = out->count;
    size_t count;
    mtt_status status;
    if (word->size == size && memcmp(word->text, at, size) == 0)
        return mtt__ids_put(out, word->ids, word->count), MTT_OK;
    status = t->kind.spell(t, at, size, out);
    count = out->count - before;
    if (status || count > MTT__WORD_IDS || out->count > out->capacity) return status;
    word->size = (uint8_t)size;
    word->count = (uint8_t)count;
    memcpy(word->text, at, size);
    if (count) memcpy(word->ids, out->at + before, count * sizeof(*word->ids));
    return MTT_OK;
}

/* Appends an added token. It must be new, not empty, and have the highest id. */
static mtt_status mtt__added_put(mtt_tokenizer *t, mtt_slice text, const mtt__added *token)
{
    uint32_t i, *link = &t->first[token->normalized][(unsigned char)*text.at];
    if (mtt__strings_add(&t->added_texts, text.at, text.size, &i) ||
        mtt__reserve(t->env, (void **)&t->added, &t->added_capacity, i + 1, sizeof(*t->added)))
        return MTT_E_MEMORY;
    while (*link != MTT__NONE && t->added_texts.items[*link].size > text.size) link = &t->added[*link].next;
    t->added[i] = *token;
    t->added[i].next = *link;
    *link = i;
    t->wanted[token->normalized][0] += !token->special;
    t->wanted[token->normalized][1]++;
    return MTT_OK;
}

/* Returns the number of bytes before the first added token, and which it is: of those that begin there, the
   longest. All of the text and MTT__NONE if there is none. A special token that is not wanted still hides
   those that begin within it, as it does in Hugging Face's tokenizers. */
static size_t mtt__added_find(const mtt_tokenizer *t, int normalized, int special, const char *text,
                              size_t bytes, uint32_t *found)
{
    size_t i;
    for (i = 0; i < bytes && t->wanted[normalized][special]; i++) {
        const mtt__string *item = NULL;
        uint32_t k = t->first[normalized][(unsigned char)text[i]];
        for (; k != MTT__NONE; k = t->added[k].next) {
            item = &t->added_texts.items[k];
            if (item->size <= bytes - i && !memcmp(t->added_texts.bytes + item->at, text + i, item->size))
                break;
        }
        if (k == MTT__NONE) continue;
        if (special || !t->added[k].special) return *found = k, i;
        i += item->size - 1;
    }
    return *found = MTT__NONE, bytes;
}

/* Looks for added tokens, then for normalized ones in what is between them, which may have to be in form NFC.
   Cuts the rest into words. */
static mtt_status mtt__encode_text(const mtt_tokenizer *t, int normalized, int special, const char *text,
                                   size_t bytes, mtt__ids *out)
{
    mtt_status status = MTT_OK;
    while (bytes && !status) {
        uint32_t found;
        size_t size, plain = mtt__added_find(t, normalized, special, text, bytes, &found);
        bytes -= plain;
        if (!normalized) {
            mtt_slice between = {text, plain};
            char *normal = NULL;
            if (t->nfc) status = mtt__normalize(t->env, t->normal, &between, &normal);
            if (!status) status = mtt__encode_text(t, 1, special, between.at, between.size, out);
            mtt__free(t->env, normal);
            text += plain;
        }
        for (; normalized && plain && !status; text += size, plain -= size) {
            size = t->kind.cut(t, text, plain);
            status = (size > MTT__WORD_BYTES ? t->kind.spell : mtt__encode_word)(t, text, size, out);
        }
        if (status || found == MTT__NONE) continue;
        mtt__ids_put(out, (const int32_t *)&t->added[found].id, 1);
        text += t->added_texts.items[found].size;
        bytes -= t->added_texts.items[found].size;
    }
    return status;
}

static mtt_status mtt__encode(mtt_tokenizer *t, int special, const char *text, size_t bytes, int32_t *ids,
                              size_t capacity, size_t *count)
{
    mtt__ids out = {ids, 0, capacity};
    mtt_status status;
    *count = 0;
    if (!t->cache) t->cache = (mtt__word *)mtt__alloc(t->env, 1u << MTT__CACHE_BITS, sizeof(*t->cache));
    if (!t->cache) return MTT_E_MEMORY;
    if (special && t->begin_of_text >= 0) mtt__ids_put(&out, &t->begin_of_text, 1);
    status = mtt__encode_text(t, 0, special, text, bytes, &out);
    if (status) return status;
    *count = out.count;
    if (out.count <= capacity) return MTT_OK;
    return mtt__fail(t->env, MTT_E_ARGUMENT, "%zu tokens do not fit an array of %zu: enlarge it", out.count,
                     capacity);
}

MTTDEF mtt_status mtt_encode(mtt_tokenizer *t, const char *text, size_t bytes, int32_t *ids, size_t capacity,
                             size_t *count)
{
    return mtt__encode(t, 0, text, bytes, ids, capacity, count);
}

MTTDEF mtt_status mtt_encode_prompt(mtt_tokenizer *t, const char *text, size_t bytes, int32_t *ids,
                                    size_t capacity, size_t *count)
{
    return mtt__encode(t, 1, text, bytes, ids, capacity, count);
}

MTTDEF mtt_status mtt_decode(const mtt_tokenizer *t, const int32_t *ids, size_t count, char *text,
                             size_t capacity, size_t *bytes)
{
    size_t i, size;
    *bytes = 0;
    for (i = 0; i < count; i++) {
        const char *piece = mtt_tokenizer_bytes(t, ids[i], &size);
        if (!piece)
            return mtt__fail(t->env, MTT_E_ARGUMENT, "token %zu is %lld, outside the vocabulary of %zu: use "
                             "the tokenizer that made it", i, (long long)ids[i], t->pieces.count);
        if (size && *bytes <= capacity && size <= capacity - *bytes) memcpy(text + *bytes, piece, size);
        *bytes += size;
    }
    if (*bytes <= capacity) return MTT_OK;
    return mtt__fail(t->env, MTT_E_ARGUMENT, "%zu bytes do not fit a buffer of %zu: enlarge it", *bytes,
                     capacity);
}

/* ---- byte-level BPE */

typedef struct mtt__merge {
    uint32_t left, right, id;
} mtt__merge;

/* Merges in order of their ranks, and the rank of each pair. */
typedef struct mtt__merges {
    mtt__merge *at;
    size_t count, capacity;
    mtt__table ranks;
} mtt__merges;

/* A pattern by its differences from GPT-2's, and its expression as a tokenizer.json has it. */
typedef struct mtt__pattern {
    int digits;        /* most digits of a word, without a space before them; 0 = any, and a space */
    int digits_end;    /* 1 = a text ends before a digit */
    int modern;        /* 1 = contractions in either case, any character before letters, line ends together */
    const char *regex; /* NULL = the pre-tokenizers Digits and ByteLevel have it */
} mtt__pattern;

#define MTT__NEITHER "[^\\\\s\\\\p{L}\\\\p{N}]+"
#define MTT__SPACES "\\\\s+(?!\\\\S)|\\\\s+"
#define MTT__MODERN(digits)                                                                  \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|"           \
    "\\\\p{N}" digits "| ?" MTT__NEITHER "[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|" MTT__SPACES
static const mtt__pattern mtt__patterns[MTT_PATTERN_COUNT + 1] = {
    {0, 0, 0, "'s|'t|'re|'ve|'m|'ll|'d| ?\\\\p{L}+| ?\\\\p{N}+| ?" MTT__NEITHER "|" MTT__SPACES},
    {1, 1, 0, NULL},
    {3, 0, 1, MTT__MODERN("{1,3}")},
    {1, 0, 1, MTT__MODERN("")},
    /* cl100k_base today: spaces that end a text are one word; Hugging Face reads {1,3}+ as any digits */
    {INT_MAX, 0, 2, "'(?i:[sdmt]|ll|ve|re)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?+\\\\p{L}++|\\\\p{N}{1,3}+| ?"
     "[^\\\\s\\\\p{L}\\\\p{N}]++[\\\\r\\\\n]*+|\\\\s++$|\\\\s*[\\\\r\\\\n]|\\\\s+(?!\\\\S)|\\\\s"},
};

typedef struct mtt__bpe {
    const mtt__pattern *pattern;
    int whole_words; /* 1 = a word that is a piece is not spelled: ignore_merges */
    char *finish;    /* the post-processor as the file has it, or NULL */
    size_t finish_bytes;
    unsigned char classes[MTT__UNICODE_END]; /* of the code points */
    uint16_t code[256];                      /* of each byte in GPT-2's printable alphabet */
    int16_t byte[MTT__ALPHABET_END];         /* of each code; -1 = none */
    uint32_t byte_id[256];
    mtt__merges merges;
} mtt__bpe;

static void mtt__bpe_destroy(mtt_tokenizer *t)
{
    mtt__bpe *b = (mtt__bpe *)t->own;
    mtt__free(t->env, b->merges.at);
    mtt__free(t->env, b->merges.ranks.cells);
    mtt__free(t->env, b->finish);
    mtt__free(t->env, b);
}

/* Bytes 21-7E, A1-AC and AE-FF are themselves in the alphabet; the others, in order, are U+0100 and up. */
static mtt_status mtt__bpe_create(mtt_tokenizer *t)
{
    const mtt_bpe_options *o = (const mtt_bpe_options *)t->kind.options;
    const int pattern = o ? (int)o->pattern : MTT_PATTERN_GPT2;
    mtt__bpe *b = (mtt__bpe *)mtt__alloc(t->env, 1, sizeof(*b));
    const char *const *line = mtt__unicode_runs, *at = *line;
    uint32_t run, c, other = 0x100;
    t->own = b;
    if (!b || mtt__table_grow(t->env, &b->merges.ranks)) return MTT_E_MEMORY;
    if (pattern < 0 || pattern >= MTT_PATTERN_COUNT)
        return mtt__fail(t->env, MTT_E_ARGUMENT, "pattern %lld: take one of mtt_pattern", (long long)pattern);
    b->pattern = &mtt__patterns[pattern];
    memset(b->byte, -1, sizeof(b->byte));
    for (c = 0; c < 256; c++) {
        b->code[c] = (uint16_t)(c <= 0x20 || (c >= 0x7f && c <= 0xa0) || c == 0xad ? other++ : c);
        b->byte[b->code[c]] = (int16_t)c;
    }
    for (c = 0; c < MTT__UNICODE_END; c += run / 4) {
        run = mtt__unicode_number(&line, &at);
        memset(b->classes + c, run & 3, run / 4);
    }
    return MTT_OK;
}

/* Returns the class and size of the character at `at`. A byte outside well-formed UTF-8 is one of class
   other. */
MTT__INLINE int mtt__symbol(const unsigned char *classes, const unsigned char *at, const unsigned char *end,
                            int *size)
{
    const uint32_t c = mtt__utf8_get(at, end, size);
    return c < MTT__UNICODE_END ? classes[c] : (int)MTT__OTHER;
}

/* Returns the size of 's, 't, 'm, 'd, 're, 've or 'll at the beginning of a text, or 0. If case does not
   matter, the long s of U+017F is an s, too. */
static size_t mtt__contraction(const unsigned char *at, size_t bytes, int any_case)
{
    int a = bytes > 1 ? at[1] : 0, b = bytes > 2 ? at[2] : 0;
    if (*at != '\'') return 0;
    if (any_case && a == 0xc5 && b == 0xbf) return 3;
    if (any_case && a >= 'A' && a <= 'Z') a += 'a' - 'A';
    if (any_case && b >= 'A' && b <= 'Z') b += 'a' - 'A';
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

MTT__INLINE int mtt__is_line_end(int byte)
{
    return byte == '\r' || byte == '\n';
}

/* Returns the length of the first word of a text that is not empty, by the pattern's regular expression. */
static size_t mtt__bpe_cut(const mtt_tokenizer *t, const char *text, size_t bytes)
{
    const unsigned char *classes = ((const mtt__bpe *)t->own)->classes;
    const mtt__pattern *p = ((const mtt__bpe *)t->own)->pattern;
    const unsigned char *begin = (const unsigned char *)text, *at = begin, *end = at + bytes, *last = at;
    const unsigned char *line = at; /* after the last line end */
    int size, kind = mtt__symbol(classes, at, end, &size), next, next_size, most, joins;
    size_t contraction = mtt__contraction(at, bytes, p->modern);
    if (contraction) return contraction;
    if ((kind == MTT__OTHER || kind == MTT__SPACE) && bytes > (size_t)size) {
        next = mtt__symbol(classes, at + size, end, &next_size);
        joins = *at == ' ' && next != MTT__SPACE && (next != MTT__NUMBER || !p->digits);
        joins |= p->modern && next == MTT__LETTER && !mtt__is_line_end(*at);
        if (joins) {
            kind = next;
            size += next_size;
        }
    }
    most = kind == MTT__NUMBER ? p->digits : 0;
    if (mtt__is_line_end(*at)) line = at + 1;
    for (at += size; at < end && mtt__symbol(classes, at, end, &size) == kind; at += size) {
        if (most && !--most) break;
        last = at;
        if (mtt__is_line_end(*at)) line = at + 1;
    }
    if (p->modern == 2 && kind == MTT__SPACE && at == end) return bytes;
    if (p->modern && kind == MTT__SPACE && line > begin) return (size_t)(line - begin);
    while (p->modern && kind == MTT__OTHER && at < end && mtt__is_line_end(*at)) at++;
    /* A run of spaces leaves its last one to the word that follows, unless it has only one. */
    if (kind != MTT__SPACE || at == end || last == begin) return (size_t)(at - begin);
    if (p->digits_end && mtt__symbol(classes, at, end, &size) == MTT__NUMBER) return (size_t)(at - begin);
    return (size_t)(last - begin);
}

MTT__INLINE uint32_t mtt__rank(const mtt__merges *merges, uint32_t left, uint32_t right)
{
    return mtt__table_find(&merges->ranks, mtt__pair_key(left, right))->value;
}

/* Appends the merge of two pieces, and the piece that it makes. Does nothing if the merge exists. If another
   merge has made the same bytes, their piece keeps its id. */
static mtt_status mtt__merges_add(mtt__merges *merges, mtt__strings *pieces, uint32_t left, uint32_t right,
                                  uint32_t *id)
{
    const mtt__string a = pieces->items[left], b = pieces->items[right];
    const size_t n = merges->count, size = mtt__add(a.size, b.size);
    uint32_t rank = mtt__rank(merges, left, right);
    char *end;
    if (rank != MTT__NONE) return *id = merges->at[rank].id, MTT_OK;
    if (mtt__reserve(pieces->env, (void **)&merges->at, &merges->capacity, n + 1, sizeof(*merges->at)) ||
        mtt__strings_reserve(pieces, size))
        return MTT_E_MEMORY;
    end = pieces->bytes + pieces->bytes_size;
    memcpy(end, pieces->bytes + a.at, a.size);
    memcpy(end + a.size, pieces->bytes + b.at, b.size);
    if (mtt__strings_add(pieces, end, size, id)) return MTT_E_MEMORY;
    merges->at[n].left = left;
    merges->at[n].right = right;
    merges->at[merges->count++].id = *id;
    return mtt__table_put(pieces->env, &merges->ranks, mtt__pair_key(left, right), (uint32_t)n);
}

typedef struct mtt__node {
    uint32_t id, next, previous;
} mtt__node;

/* Changes a leaf of the tree in mtt__bpe_spell, and the nodes above it. */
MTT__INLINE void mtt__tree_set(uint32_t *tree, size_t at, uint32_t rank)
{
    for (tree[at] = rank; at > 1; tree[at] = rank) {
        at /= 2;
        rank = tree[2 * at] < tree[2 * at + 1] ? tree[2 * at] : tree[2 * at + 1];
        if (tree[at] == rank) break;
    }
}

/* Merges the pair of the lowest rank, the leftmost of equals first, until none is left, in O(n log n). The
   symbols are a linked list. Leaf i of a binary tree is the rank of symbol i and its successor; a node is the
   lower of its two children, so the root is the lowest rank. Words of up to 32 bytes stay on the stack. */
static mtt_status mtt__bpe_spell(const mtt_tokenizer *t, const char *at, size_t size, mtt__ids *out)
{
    const mtt__bpe *b = (const mtt__bpe *)t->own;
    uint32_t few[64], *tree = few, n = (uint32_t)size, i, gone, after;
    mtt__node some[32], *nodes = some;
    size_t leaves = 1, k;
    i = b->whole_words ? mtt__strings_find(&t->pieces, at, size) : MTT__NONE;
    if (i != MTT__NONE) return mtt__ids_put(out, (const int32_t *)&i, 1), MTT_OK;
    while (leaves < size) leaves *= 2;
    if (leaves > 32) {
        tree = (uint32_t *)mtt__alloc_raw(t->env, size < MTT__NONE ? mtt__mul(leaves, 20) : SIZE_MAX);
        if (!tree) return MTT_E_MEMORY;
        nodes = (mtt__node *)(tree + 2 * leaves);
    }
    for (i = 0; i < n; i++) {
        nodes[i].id = b->byte_id[(unsigned char)at[i]];
        nodes[i].next = i + 1;
        nodes[i].previous = i - 1;
    }
    for (k = 0; k < leaves; k++)
        tree[leaves + k] = k + 1 < size ? mtt__rank(&b->merges, nodes[k].id, nodes[k + 1].id) : MTT__NONE;
    for (k = leaves - 1; k; k--) tree[k] = tree[2 * k] < tree[2 * k + 1] ? tree[2 * k] : tree[2 * k + 1];
    while (tree[1] != MTT__NONE) {
        for (k = 1; k < leaves;) k = 2 * k + (tree[2 * k] != tree[1]);
        i = (uint32_t)(k - leaves);
        gone = nodes[i].next;
        after = nodes[gone].next;
        nodes[i].id = b->merges.at[tree[1]].id;
        nodes[i].next = after;
        if (after < n) nodes[after].previous = i;
        mtt__tree_set(tree, leaves + gone, MTT__NONE);
        mtt__tree_set(tree, k, after < n ? mtt__rank(&b->merges, nodes[i].id, nodes[after].id) : MTT__NONE);
        if (!i) continue;
        after = nodes[i].previous;
        mtt__tree_set(tree, leaves + after, mtt__rank(&b->merges, nodes[after].id, nodes[i].id));
    }
    for (i = 0; i < n; i = nodes[i].next) mtt__ids_put(out, (const int32_t *)&nodes[i].id, 1);
    if (tree != few) mtt__free(t->env, tree);
    return MTT_OK;
}

/* ---- training: merges of the most frequent pairs */

typedef struct mtt__pair {
    uint64_t key, count;
    uint32_t first; /* of its places, a linked list of the words that may hold the pair */
} mtt__pair;

typedef struct mtt__place {
    uint32_t word, next;
} mtt__place;

/* The size and id of the first symbol at `at`. A symbol of id MTT__NONE is dropped. */
typedef size_t (*mtt__symbol_fn)(const mtt_tokenizer *t, const char *at, size_t size, uint32_t *id);

/* The heap has the highest count on top, and among equals the smallest ids. A pair whose count has fallen is
   corrected when it comes to the top. A pair whose count rises is pushed again. */
typedef struct mtt__learner {
    mtt_tokenizer *t;
    mtt__merges *merges;
    const mtt__strings *words;
    uint32_t *symbols; /* those of a word begin at the place of its bytes */
    size_t *lengths;   /* symbols in each word */
    mtt__table index;  /* of pairs */
    mtt__pair *pairs;
    mtt__place *places;
    size_t pair_count, pair_capacity, place_count, place_capacity;
    size_t pushed; /* pairs that have been in the heap; newer ones wait until the current merge is done */
    mtt__heap heap;
} mtt__learner;

static mtt_status mtt__learn_push(mtt__learner *l, size_t i)
{
    const mtt__pair *pair = &l->pairs[i];
    return pair->count ? mtt__heap_push(l->t->env, &l->heap, ~pair->count, pair->key) : MTT_OK;
}

/* Counts a pair once more in a word. */
static mtt_status mtt__learn_rise(mtt__learner *l, uint32_t left, uint32_t right, uint32_t word)
{
    mtt_env *env = l->t->env;
    const mtt__pair new_pair = {mtt__pair_key(left, right), 0, MTT__NONE};
    mtt__place place = {word, MTT__NONE};
    uint32_t i = mtt__table_find(&l->index, new_pair.key)->value;
    mtt__pair *pair;
    if (mtt__reserve(env, (void **)&l->pairs, &l->pair_capacity, l->pair_count + 1, sizeof(*pair)) ||
        mtt__reserve(env, (void **)&l->places, &l->place_capacity, l->place_count + 1, sizeof(*l->places)))
        return MTT_E_MEMORY;
    if (i == MTT__NONE) {
        i = (uint32_t)l->pair_count++;
        l->pairs[i] = new_pair;
        if (mtt__table_put(env, &l->index, new_pair.key, i)) return MTT_E_MEMORY;
    }
    pair = &l->pairs[i];
    pair->count += l->words->items[word].count;
    if (pair->first == MTT__NONE || l->places[pair->first].word != word) {
        if (l->place_count >= MTT__NONE)
            return mtt__fail(env, MTT_E_MEMORY, "more than 2^32 places of pairs: train on a smaller sample");
        place.next = pair->first;
        l->places[l->place_count] = place;
        pair->first = (uint32_t)l->place_count++;
    }
    return i < l->pushed ? mtt__learn_push(l, i) : MTT_OK;
}

static void mtt__learn_fall(mtt__learner *l, uint32_t left, uint32_t right, uint32_t word)
{
    const uint32_t i = mtt__table_find(&l->index, mtt__pair_key(left, right))->value;
    l->pairs[i].count -= l->words->items[word].count;
}

/* Replaces a pair by `id` in one word, from left to right, and updates the counts of the pairs around it. */
static mtt_status mtt__learn_replace(mtt__learner *l, uint32_t word, uint32_t left, uint32_t right,
                                     uint32_t id)
{
    uint32_t *s = l->symbols + l->words->items[word].at;
    size_t i, n = 0, length = l->lengths[word];
    mtt_status status = MTT_OK;
    for (i = 0; i < length && !status; s[n++] = s[i++]) {
        if (i + 1 == length || s[i] != left || s[i + 1] != right) continue;
        if (n) mtt__learn_fall(l, s[n - 1], left, word);
        if (n) status = mtt__learn_rise(l, s[n - 1], id, word);
        s[++i] = id;
        if (i + 1 == length || status) continue;
        mtt__learn_fall(l, right, s[i + 1], word);
        status = mtt__learn_rise(l, id, s[i + 1], word);
    }
    l->lengths[word] = n;
    return status;
}

/* Cuts the words into symbols and counts the first pairs. */
static mtt_status mtt__learn_start(mtt__learner *l, mtt__symbol_fn symbol)
{
    uint32_t word, id;
    l->symbols = (uint32_t *)mtt__alloc(l->t->env, l->words->bytes_size, sizeof(*l->symbols));
    l->lengths = (size_t *)mtt__alloc(l->t->env, l->words->count, sizeof(*l->lengths));
    if (!l->symbols || !l->lengths || mtt__table_grow(l->t->env, &l->index)) return MTT_E_MEMORY;
    for (word = 0; word < l->words->count; word++) {
        const mtt__string *item = &l->words->items[word];
        uint32_t *s = l->symbols + item->at;
        size_t n = 0, i, size;
        for (i = 0; i < item->size; i += size) {
            size = symbol(l->t, l->words->bytes + item->at + i, item->size - i, &id);
            if (id == MTT__NONE) continue;
            if (n && mtt__learn_rise(l, s[n - 1], id, word)) return MTT_E_MEMORY;
            s[n++] = id;
        }
        l->lengths[word] = n;
    }
    return MTT_OK;
}

/* Merges pair `i` everywhere. */
static mtt_status mtt__learn_merge(mtt__learner *l, uint32_t i)
{
    uint32_t left = (uint32_t)(l->pairs[i].key >> 32), right = (uint32_t)l->pairs[i].key;
    uint32_t place = l->pairs[i].first, id;
    mtt_status status = mtt__merges_add(l->merges, &l->t->pieces, left, right, &id);
    l->pairs[i].first = MTT__NONE;
    for (; place != MTT__NONE && !status; place = l->places[place].next)
        status = mtt__learn_replace(l, l->places[place].word, left, right, id);
    l->pairs[i].count = 0;
    return status;
}

/* Merges symbols of the words until the tokenizer has `vocab` pieces, or no pair occurs `least` times. */
static mtt_status mtt__learn(mtt_tokenizer *t, mtt__merges *merges, const mtt__strings *words,
                             mtt__symbol_fn symbol, uint64_t least, size_t vocab)
{
    mtt__learner l;
    mtt__ranked top;
    mtt_status status;
    memset(&l, 0, sizeof(l));
    l.t = t;
    l.merges = merges;
    l.words = words;
    status = mtt__learn_start(&l, symbol);
    while (!status) {
        uint32_t i;
        while (l.pushed < l.pair_count && !status) status = mtt__learn_push(&l, l.pushed++);
        if (status || t->pieces.count >= vocab || !mtt__heap_pop(&l.heap, &top) || ~top.key < least) break;
        i = mtt__table_find(&l.index, top.tie)->value;
        status = l.pairs[i].count == ~top.key ? mtt__learn_merge(&l, i) : mtt__learn_push(&l, i);
    }
    mtt__free(t->env, l.symbols);
    mtt__free(t->env, l.lengths);
    mtt__free(t->env, l.index.cells);
    mtt__free(t->env, l.pairs);
    mtt__free(t->env, l.places);
    mtt__free(t->env, l.heap.at);
    return status;
}

/* Appends a special token. The last one ends a document. */
static mtt_status mtt__bpe_add_special(mtt_tokenizer *t, const char *name)
{
    const mtt_slice text = {name, strlen(name)};
    mtt__added token = {0, 0, 1, 0, 1};
    if (mtt__strings_add(&t->pieces, text.at, text.size, &t->end_of_text)) return MTT_E_MEMORY;
    token.id = t->end_of_text;
    t->pieces.items[token.id].silent = 1;
    return mtt__added_put(t, text, &token);
}

/* Appends the 256 bytes in order of their codes. */
static mtt_status mtt__bpe_add_bytes(mtt_tokenizer *t)
{
    mtt__bpe *b = (mtt__bpe *)t->own;
    int code;
    for (code = 0; code < MTT__ALPHABET_END; code++) {
        char byte = (char)b->byte[code];
        if (b->byte[code] < 0) continue;
        if (mtt__strings_add(&t->pieces, &byte, 1, &b->byte_id[b->byte[code]])) return MTT_E_MEMORY;
    }
    return MTT_OK;
}

static size_t mtt__bpe_symbol(const mtt_tokenizer *t, const char *at, size_t size, uint32_t *id)
{
    (void)size;
    *id = ((const mtt__bpe *)t->own)->byte_id[(unsigned char)*at];
    return 1;
}

static mtt_status mtt__bpe_learn(mtt_tokenizer *t, int vocab, const mtt__strings *words)
{
    if (vocab < 257)
        return mtt__fail(t->env, MTT_E_ARGUMENT, "%lld ids cannot hold " MTT__END_OF_TEXT " and the 256 "
                         "bytes: ask for 257 or more", (long long)vocab);
    if (mtt__bpe_add_special(t, MTT__END_OF_TEXT) || mtt__bpe_add_bytes(t)) return MTT_E_MEMORY;
    return mtt__learn(t, &((mtt__bpe *)t->own)->merges, words, mtt__bpe_symbol, 0, (size_t)vocab);
}

/* ---- tokenizer files */

static mtt_status mtt__vocab_fail(mtt__json_file *f, const char *fault)
{
    int shown = 0;
    while (f->j.end - f->j.at > shown && shown < 24 && f->j.at[shown] > ' ' && f->j.at[shown] < 127) shown++;
    return mtt__fail(f->env, MTT_E_FORMAT, "%s: byte %zu: %s (at %.*s): get or save the file again", f->path,
                     (size_t)(f->j.at - f->j.begin), f->j.fault ? f->j.fault : fault, shown, f->j.at);
}

static int mtt__vocab_is(const mtt__json_file *f, const char *path, const char *value)
{
    return mtt_slice_is(mtt__json_value(f, path), value);
}

/* Lists the keys of the object at the top, whose `part` is "", and of the objects in it; all keys that are in
   its normalizer, pre-tokenizer and post-processor. */
static void mtt__vocab_keys(mtt__json_file *f, const char *part, int depth)
{
    mtt_json *j = &f->j;
    const int open = mtt_json_peek(j) == '{' ? '{' : '[';
    const int deep = *part && strchr("np", *part) && depth < 8;
    mtt__json_key k;
    mtt_slice key;
    int mark, index;
    mtt_json_begin(j, open);
    for (index = 0; open == '{' ? mtt_json_key(j, &key) : mtt_json_item(j); index++) {
        char name[128] = "";
        if (open == '[') mtt__format(name, sizeof(name), "%d", index);
        else if (key.size < sizeof(name)) name[mtt_json_unescape(key, name)] = 0;
        else memcpy(name, "(long)", 7);
        mtt__format(k.path, sizeof(k.path), "%s%s%s", part, *part ? "." : "", name);
        if (mtt__json_value(f, k.path).at) mtt__json_fail(j, "a key occurs twice");
        mark = mtt_json_peek(j);
        k.value.at = j->at;
        if (*k.path && ((mark == '{' && !*part) || (deep && (mark == '{' || mark == '['))))
            mtt__vocab_keys(f, k.path, depth + 1);
        else mtt_json_skip(j);
        k.value.size = (size_t)(j->at - k.value.at);
        if (f->key_count == MTT__LENGTH(f->keys))
            mtt__json_fail(j, *part ? "more than 192 keys" : "this is a vocabulary: pass vocab.bpe");
        else f->keys[f->key_count++] = k;
    }
}

/* Reads one of the added tokens of a file, and its text. */
static int mtt__vocab_added(mtt_json *j, mtt__added *token, mtt_slice *text)
{
    static const char *const keys[] = {"id", "content", "special", "normalized", "lstrip", "rstrip",
                                       "single_word"};
    int given[] = {0, 0, 0, 0, 0, 0, 0}; /* 2 = true */
    mtt_slice key;
    uint64_t id = 0;
    size_t k;
    memset(token, 0, sizeof(*token));
    mtt_json_begin(j, '{');
    while (mtt_json_key(j, &key)) {
        const int mark = mtt_json_peek(j);
        for (k = 0; k < MTT__LENGTH(keys) && !mtt_slice_is(key, keys[k]);) k++;
        if (k == MTT__LENGTH(keys)) j->at = key.at, mtt__json_fail(j, "an added token has an unknown key");
        else if (k < 2) given[k] = k ? mtt_json_string(j, text) : mtt_json_u64(j, &id);
        else if (mark != 't' && mark != 'f') mtt__json_fail(j, "expected true or false");
        else given[k] = mtt_json_skip(j) + (mark == 't');
    }
    token->id = (uint32_t)id;
    token->special = given[2] == 2;
    token->normalized = given[3] == 2;
    if (given[4] == 2 || given[5] == 2 || given[6] == 2)
        mtt__json_fail(j, "lstrip, rstrip and single_word of an added token must be false");
    if (given[0] && given[1] && given[2] && text->size && id <= INT32_MAX) return !j->fault;
    return mtt__json_fail(j, "an added token must have a content and an id, and special");
}

/* Turns a piece in the alphabet into bytes, in place; 0 if it is empty or has another symbol. */
static int mtt__piece_bytes(const mtt__bpe *b, mtt_slice *piece)
{
    const unsigned char *at = (const unsigned char *)piece->at, *end = at + piece->size;
    char *out = (char *)piece->at;
    int size;
    for (; at < end; at += size) {
        const uint32_t c = mtt__utf8_get(at, end, &size);
        if (c >= MTT__ALPHABET_END || b->byte[c] < 0) return 0;
        *out++ = (char)b->byte[c];
    }
    piece->size = (size_t)(out - piece->at);
    return piece->size > 0;
}

/* Appends the merge "A B". The piece that it makes must be new if `fresh`, and otherwise known. */
static mtt_status mtt__vocab_merge(mtt_tokenizer *t, mtt__json_file *f, mtt_slice a, int fresh)
{
    mtt__bpe *b = (mtt__bpe *)t->own;
    const size_t pieces = t->pieces.count, merges = b->merges.count;
    const char *space = a.size ? (const char *)memchr(a.at, ' ', a.size) : NULL;
    mtt_slice right;
    uint32_t ids[2], id;
    if (!space) return mtt__vocab_fail(f, "a merge must be two pieces with a space between them");
    right.at = space + 1;
    right.size = a.size - (size_t)(right.at - a.at);
    a.size = (size_t)(space - a.at);
    if (!mtt__piece_bytes(b, &a) || !mtt__piece_bytes(b, &right))
        return mtt__vocab_fail(f, "a merge must be two pieces of GPT-2's alphabet");
    ids[0] = mtt__strings_find(&t->pieces, a.at, a.size);
    ids[1] = mtt__strings_find(&t->pieces, right.at, right.size);
    if (ids[0] == MTT__NONE || ids[1] == MTT__NONE)
        return mtt__vocab_fail(f, "a merge uses a piece that is not known yet");
    if (mtt__merges_add(&b->merges, &t->pieces, ids[0], ids[1], &id)) return MTT_E_MEMORY;
    if (b->merges.count == merges) return mtt__vocab_fail(f, "a merge occurs twice");
    if (fresh == (t->pieces.count > pieces)) return MTT_OK;
    return mtt__vocab_fail(f, fresh ? "a merge makes a piece that exists"
                                    : "a merge makes a piece that is not in the vocabulary");
}

/* Reads GPT-2's vocab.bpe: its version, then a merge on each line. */
static mtt_status mtt__vocab_gpt2(mtt_tokenizer *t, mtt__json_file *f)
{
    const mtt__merges *merges = &((mtt__bpe *)t->own)->merges;
    mtt_json *j = &f->j;
    const char *stop;
    mtt_status status = mtt__bpe_add_bytes(t);
    for (; j->at < j->end && !status; j->at = stop + 1) {
        mtt_slice line = {j->at, 0};
        stop = (const char *)memchr(j->at, '\n', (size_t)(j->end - j->at));
        line.size = (size_t)((stop ? stop : j->end) - j->at);
        if (line.size && line.at[line.size - 1] == '\r') line.size--;
        if (j->at == j->begin && !mtt_slice_is(line, "#version: 0.2"))
            return mtt__vocab_fail(f, "the first line must be \"#version: 0.2\"");
        if (!stop) return mtt__vocab_fail(f, "the last line has no end");
        if (merges->count == MTT__GPT2_MERGES) return mtt__vocab_fail(f, "more than GPT-2's 50,000 merges");
        if (j->at > j->begin) status = mtt__vocab_merge(t, f, line, 1);
    }
    if (status) return status;
    if (merges->count != MTT__GPT2_MERGES) return mtt__vocab_fail(f, "the file ends before merge 50,000");
    return mtt__bpe_add_special(t, MTT__END_OF_TEXT);
}

/* Decodes base64 (RFC 4648) in place; 0 if it is malformed. */
static int mtt__base64(mtt_slice *text)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char *out = (char *)text->at;
    size_t i, n = text->size;
    uint32_t bits = 0;
    while (n && text->size - n < 2 && text->at[n - 1] == '=') n--;
    if (!n || text->size % 4) return 0;
    for (i = 0; i < n; i++) {
        const char *digit = text->at[i] ? strchr(digits, text->at[i]) : NULL;
        if (!digit) return 0;
        bits = bits << 6 | (uint32_t)(digit - digits);
        if (i % 4) *out++ = (char)(bits >> (6 - 2 * (i % 4)));
    }
    text->size = (size_t)(out - text->at);
    return 1;
}

/* Finds the two parts of a piece that come of merging its bytes as tiktoken does: of all neighbours whose
   bytes together are a piece, those of the lowest id, the leftmost first. 0 if more than two parts remain. */
static int mtt__piece_parts(const mtt__strings *s, const mtt__string *piece, uint32_t parts[2])
{
    uint16_t cut[MTT__PARTS_BYTES + 1];
    const char *at = s->bytes + piece->at;
    size_t n = piece->size, i, where = 0;
    for (i = 0; i <= n; i++) cut[i] = (uint16_t)i;
    for (; n > 2; n--) {
        uint32_t id, lowest = MTT__NONE;
        for (i = 0; i + 2 <= n; i++) {
            id = mtt__strings_find(s, at + cut[i], (size_t)(cut[i + 2] - cut[i]));
            if (id < lowest) lowest = id, where = i;
        }
        if (lowest == MTT__NONE) return 0;
        memmove(cut + where + 1, cut + where + 2, (n - where - 1) * sizeof(*cut));
    }
    parts[0] = mtt__strings_find(s, at, cut[1]);
    parts[1] = mtt__strings_find(s, at + cut[1], piece->size - cut[1]);
    return 1;
}

/* Adds the merge that makes a piece. tiktoken has no merges: it joins any neighbours that are a piece
   together. Within the bytes of a piece that does the same in every word, until the piece is made. So each
   piece is made of the same two, and they can be found by spelling it alone. A piece without two parts is
   made by no merge; only a whole word can be it. */
static mtt_status mtt__piece_merge(mtt_tokenizer *t, mtt__json_file *f, uint32_t id)
{
    const mtt__string piece = t->pieces.items[id];
    uint32_t parts[2];
    if (piece.size > MTT__PARTS_BYTES) return mtt__vocab_fail(f, "a token has more than 1024 bytes");
    if (piece.size < 2 || piece.silent || !mtt__piece_parts(&t->pieces, &piece, parts)) return MTT_OK;
    return mtt__merges_add(&((mtt__bpe *)t->own)->merges, &t->pieces, parts[0], parts[1], &id);
}

static void mtt__bpe_find_bytes(mtt_tokenizer *t, mtt_json *j)
{
    mtt__bpe *b = (mtt__bpe *)t->own;
    int i;
    for (i = 0; i < 256; i++) {
        char byte = (char)i;
        b->byte_id[i] = mtt__strings_find(&t->pieces, &byte, 1);
        if (b->byte_id[i] == MTT__NONE) mtt__json_fail(j, "the vocabulary lacks one of the 256 bytes");
    }
}

/* Reads a .tiktoken file: on each line a token in base64, a space and its id. The empty token, "=", is in no
   text. The file says neither how to cut words nor what ends a document. Published vocabularies are known by
   their number of tokens and CRC-32; MTT_PATTERN_COUNT means a pattern that mtt lacks. */
static mtt_status mtt__vocab_tiktoken(mtt_tokenizer *t, mtt__json_file *f)
{
    static const struct {
        uint32_t count, crc; /* 0 = any */
        int pattern;
        const char *first, *end; /* special tokens; NULL = none and <|endoftext|>. Or the name of a pattern */
    } all[] = {
        {50256, 0xf3e7b48d, MTT_PATTERN_GPT2, NULL, NULL}, {50257, 0xeee2539a, MTT_PATTERN_GPT2, NULL, NULL},
        {100256, 0x670626c2, MTT_PATTERN_LLAMA3, "<|unused|>", NULL}, /* above: GPT-2, Whisper; cl100k_base */
        {128000, 0x48279218, MTT_PATTERN_LLAMA3, "<|begin_of_text|>", "<|end_of_text|>"},
        {151643, 0xfbaa3095, MTT_PATTERN_QWEN, NULL, NULL}, {199998, 0, MTT_PATTERN_COUNT, "o200k", NULL},
        {200000, 0x082bee67, MTT_PATTERN_COUNT, "Llama 4", NULL},
        {248044, 0x68631d48, MTT_PATTERN_COUNT, "Qwen 3.6", NULL}, {0, 0, 0, NULL, NULL}};
    mtt_json *j = &f->j;
    mtt__crc_table table;
    mtt_status status = MTT_OK;
    uint32_t id = 0, crc, k = 0;
    uint64_t rank;
    for (; j->at < j->end && !j->fault && !status; j->at++) {
        mtt_slice piece = {j->at, 0};
        const char *space = (const char *)memchr(j->at, ' ', (size_t)(j->end - j->at));
        if (!space) return mtt__vocab_fail(f, "a line must be a token, a space and its rank");
        piece.size = (size_t)(space - j->at);
        if (mtt_slice_is(piece, "=")) status = mtt__bpe_add_special(t, "<|empty|>"), id = t->end_of_text;
        else if (!mtt__base64(&piece)) return mtt__vocab_fail(f, "a token is not base64");
        else status = mtt__strings_add(&t->pieces, piece.at, piece.size, &id);
        j->at = space + 1;
        if (mtt__json_byte(j) < '0' || !mtt_json_u64(j, &rank) || rank != id || id + 1 != t->pieces.count ||
            (mtt__json_pass(j, '\r'), j->at < j->end && *j->at != '\n'))
            mtt__json_fail(j, "the ranks must be 0, 1, 2 and so on, of different tokens");
    }
    mtt__bpe_find_bytes(t, j);
    if (!status && j->fault) return mtt__vocab_fail(f, NULL);
    for (id = 0; id < t->pieces.count && !status; id++) status = mtt__piece_merge(t, f, id);
    if (status) return status;
    mtt__crc_init(&table);
    crc = mtt__crc32(&table, 0, t->pieces.bytes, t->pieces.bytes_size);
    while (all[k].count && (all[k].count != t->pieces.count || (all[k].crc && all[k].crc != crc))) k++;
    if (all[k].pattern == MTT_PATTERN_COUNT)
        return mtt__fail(f->env, MTT_E_FORMAT, "%s is the vocabulary of %s, whose pattern mtt does not have: "
                         "take another tokenizer", f->path, all[k].first);
    if (!all[k].count && !t->kind.options)
        return mtt__fail(f->env, MTT_E_ARGUMENT, "%s does not name its pattern: pass gpt2, smollm, llama3 or "
                         "qwen (prepare --pattern, mtt_bpe_options)", f->path);
    if (!t->kind.options) ((mtt__bpe *)t->own)->pattern = &mtt__patterns[all[k].pattern];
    ((mtt__bpe *)t->own)->whole_words = 1;
    if (all[k].first && mtt__bpe_add_special(t, all[k].first)) return MTT_E_MEMORY;
    return mtt__bpe_add_special(t, all[k].end ? all[k].end : MTT__END_OF_TEXT);
}

/* Appends the added tokens from number *next on with ids below `id`. */
static mtt_status mtt__vocab_append(mtt_tokenizer *t, mtt_json *j, uint32_t *next, uint64_t id)
{
    uint32_t index = 0;
    for (; *next < t->added_texts.count && t->added[*next].id < id; ++*next) {
        const mtt__string *item = &t->added_texts.items[*next];
        if (mtt__strings_append(&t->pieces, t->added_texts.bytes + item->at, item->size, &index))
            return MTT_E_MEMORY;
        t->pieces.items[index].silent = t->added[*next].special;
        if (index == t->added[*next].id) continue;
        mtt__json_fail(j, "the id of an added token is not the next");
        break;
    }
    return MTT_OK;
}

/* Reads the pieces, which must be in order of their ids. Added tokens may be among them. */
static mtt_status mtt__vocab_pieces(mtt_tokenizer *t, mtt__json_file *f)
{
    mtt_json *j = &f->j;
    mtt__strings *s = &t->pieces;
    mtt_status status = MTT_OK;
    mtt_slice piece;
    uint64_t id;
    uint32_t index, next = 0, known;
    for (mtt_json_begin(j, '{'); !status && mtt_json_key(j, &piece) && mtt_json_u64(j, &id);) {
        piece.size = mtt_json_unescape(piece, (char *)piece.at);
        status = mtt__vocab_append(t, j, &next, id);
        known = mtt__strings_find(&t->added_texts, piece.at, piece.size);
        index = (uint32_t)s->count;
        if (known != MTT__NONE && t->added[known].id != id) mtt__json_fail(j, "an added token has two ids");
        if (status || j->fault) break;
        if (mtt__piece_bytes((mtt__bpe *)t->own, &piece))
            status = mtt__strings_add(s, piece.at, piece.size, &index);
        else if (known == MTT__NONE) mtt__json_fail(j, "a piece is not of GPT-2's alphabet");
        else status = mtt__vocab_append(t, j, &next, id + 1);
        if (id != index || id + 1 != s->count)
            mtt__json_fail(j, "the ids must be 0, 1, 2 and so on, of different pieces");
        if (status || j->fault || known == MTT__NONE) continue;
        t->added[known].listed = 1;
        s->items[index].silent = t->added[known].special;
        next = known + 1;
    }
    if (!status) status = mtt__vocab_append(t, j, &next, UINT64_MAX);
    mtt__bpe_find_bytes(t, j);
    return !status && j->fault ? mtt__vocab_fail(f, NULL) : status;
}

/* Reads the added tokens, which must be in order of their ids. */
static mtt_status mtt__vocab_tokens(mtt_tokenizer *t, mtt__json_file *f)
{
    static const char *const ends[] = {MTT__END_OF_TEXT, "<|end_of_text|>", "</s>"};
    mtt_json *j = &f->j;
    mtt_status status = MTT_OK;
    mtt__added token;
    mtt_slice text;
    size_t i, count = 0;
    uint32_t end = MTT__NONE;
    char *normal;
    j->at = mtt__json_value(f, "added_tokens").at;
    for (mtt_json_begin(j, '['); !status && mtt_json_item(j) && mtt__vocab_added(j, &token, &text); count++) {
        text.size = mtt_json_unescape(text, (char *)text.at);
        if (count == MTT__ADDED_MOST) mtt__json_fail(j, "more than 4096 added tokens");
        if (count && t->added[count - 1].id >= token.id)
            mtt__json_fail(j, "the added tokens must be in order of their ids");
        if (mtt__strings_find(&t->added_texts, text.at, text.size) != MTT__NONE)
            mtt__json_fail(j, "an added token has two ids");
        if (t->nfc && token.normalized) {
            mtt_slice nfc = text;
            status = mtt__normalize(t->env, t->normal, &nfc, &normal);
            if (!status && (nfc.size != text.size || memcmp(nfc.at, text.at, nfc.size)))
                mtt__json_fail(j, "the text of a normalized added token must be in form NFC");
            mtt__free(t->env, normal);
        }
        if (status || j->fault) break;
        status = mtt__added_put(t, text, &token);
    }
    if (status) return status;
    for (i = 0; i < MTT__LENGTH(ends) && end == MTT__NONE; i++)
        end = mtt__strings_find(&t->added_texts, ends[i], strlen(ends[i]));
    if (end == MTT__NONE)
        mtt__json_fail(j, "one of the added tokens must be <|endoftext|>, <|end_of_text|> or </s>");
    else t->end_of_text = t->added[end].id;
    return j->fault ? mtt__vocab_fail(f, NULL) : MTT_OK;
}

/* Returns the pattern of a tokenizer.json, or NULL. */
static const mtt__pattern *mtt__vocab_pattern(const mtt__json_file *f)
{
    const mtt_slice regex = mtt__json_value(f, "pre_tokenizer.pretokenizers.0.pattern.Regex");
    int i;
    if (mtt__vocab_is(f, "pre_tokenizer.type", "\"ByteLevel\"")) return mtt__patterns;
    if (!regex.at) return &mtt__patterns[MTT_PATTERN_SMOLLM];
    for (i = 0; i <= MTT_PATTERN_COUNT; i++) {
        const char *known = mtt__patterns[i].regex;
        if (known && regex.size == strlen(known) + 2 && !memcmp(regex.at + 1, known, regex.size - 2))
            return &mtt__patterns[i];
    }
    return NULL;
}

/* Finds the token that a TemplateProcessing, whose path is `part`, puts before a text. */
static mtt_status mtt__vocab_begin(mtt_tokenizer *t, mtt__json_file *f, const char *part)
{
    static const char *const keys[] = {".type", ".single.0.Sequence.id", ".single.0.SpecialToken.id",
                                       ".single.1.Sequence.id", ".single.1", ".single.2"};
    mtt_slice found[MTT__LENGTH(keys)], name, ids;
    char path[256];
    mtt_json j;
    uint64_t id = 0;
    uint32_t k;
    size_t i;
    for (i = 0; i < MTT__LENGTH(keys); i++)
        found[i] = mtt__json_value(f, mtt__format(path, sizeof(path), "%s%s", part, keys[i]));
    name = found[2];
    if (!mtt_slice_is(found[0], "\"TemplateProcessing\"")) return MTT_OK;
    if (mtt_slice_is(found[1], "\"A\"") && !found[4].at) return MTT_OK;
    if (name.size < 3 || name.size > 64 || !mtt_slice_is(found[3], "\"A\"") || found[5].at)
        return mtt__vocab_fail(f, "a TemplateProcessing must be a special token and the text A, or A alone");
    k = mtt__strings_find(&t->added_texts, name.at + 1, name.size - 2);
    mtt__format(path, sizeof(path), "%s.special_tokens.%.*s.ids", part, (int)name.size - 2, name.at + 1);
    ids = mtt__json_value(f, path);
    mtt_json_init(&j, ids.at ? ids.at : "", ids.size);
    if (!mtt_json_begin(&j, '[') || !mtt_json_item(&j) || !mtt_json_u64(&j, &id) ||
        mtt_json_item(&j) || k == MTT__NONE || t->added[k].id != id)
        return mtt__vocab_fail(f, "the special token of a TemplateProcessing must be an added token");
    t->begin_of_text = (int32_t)id;
    return MTT_OK;
}

static mtt_status mtt__bpe_load(mtt_tokenizer *t, mtt__json_file *f)
{
    static const mtt__json_rule rules[] = {
        {"version", "\"1.0\""}, {"added_tokens", "["},
        {"normalizer", "null|{"}, {"normalizer.type", "\"NFC\"|\"Sequence\"|missing"},
        {"normalizer.normalizers.0.type", "\"NFC\"|missing"}, {"normalizer.normalizers.1", "missing"},
        {"pre_tokenizer.type", "\"ByteLevel\"|\"Sequence\""}, {"post_processor", "null|{"},
        {"post_processor.type", "\"ByteLevel\"|\"TemplateProcessing\"|\"Sequence\"|missing"},
        {"post_processor.processors.0.type", "\"ByteLevel\"|\"TemplateProcessing\"|missing"},
        {"post_processor.processors.1.type", "\"ByteLevel\"|\"TemplateProcessing\"|missing"},
        {"post_processor.processors.2", "missing"}, {"decoder.type", "\"ByteLevel\""},
        {"model.dropout", "null|missing"}, {"model.continuing_subword_prefix", "null|\"\"|missing"},
        {"model.end_of_word_suffix", "null|\"\"|missing"}, {"model.byte_fallback", "false|missing"},
        {"model.ignore_merges", "false|true|missing"}, {"model.vocab", "{"}, {"model.merges", "["},
    };
#define MTT__PARTS "pre_tokenizer.pretokenizers."
    static const mtt__json_rule whole[] = {{"pre_tokenizer.add_prefix_space", "false"},
                                            {"pre_tokenizer.use_regex", "true|missing"}};
    static const mtt__json_rule parts[] = {
        {MTT__PARTS "0.type", "\"Split\"|\"Digits\""}, {MTT__PARTS "0.behavior", "\"Isolated\"|missing"},
        {MTT__PARTS "0.invert", "false|missing"}, {MTT__PARTS "0.individual_digits", "true|missing"},
        {MTT__PARTS "1.type", "\"ByteLevel\""}, {MTT__PARTS "1.add_prefix_space", "false"},
        {MTT__PARTS "2", "missing"}, {MTT__PARTS "1.use_regex", "false"} /* after Split */,
        {MTT__PARTS "1.use_regex", "true|missing"},
    };
    const mtt_slice finish = mtt__json_value(f, "post_processor");
    mtt__bpe *b = (mtt__bpe *)t->own;
    mtt_json *j = &f->j;
    mtt_status status;
    mtt_slice text;
    int split;
    if (!f->key_count) return *f->j.at == '#' ? mtt__vocab_gpt2(t, f) : mtt__vocab_tiktoken(t, f);
    status = mtt__json_check(f, rules, MTT__LENGTH(rules));
    if (status) return status;
    split = mtt__vocab_is(f, MTT__PARTS "0.type", "\"Split\"");
    b->pattern = mtt__vocab_pattern(f);
    if (!b->pattern || (split && !b->pattern->regex))
        return mtt__fail(f->env, MTT_E_FORMAT, "%s: pre_tokenizer.pretokenizers.0.pattern must be the Regex "
                         "of GPT-2, Llama 3 or Qwen: mtt has no other", f->path);
    if (!mtt__json_value(f, MTT__PARTS "0.type").at) status = mtt__json_check(f, whole, 2);
    else status = mtt__json_check(f, parts, 7);
    if (!status && b->pattern != mtt__patterns) status = mtt__json_check(f, &parts[8 - split], 1);
    b->whole_words = mtt__vocab_is(f, "model.ignore_merges", "true");
    t->nfc = mtt__vocab_is(f, "normalizer.type", "\"NFC\"") ||
             mtt__json_value(f, "normalizer.normalizers.0.type").at;
    if (!status && t->nfc) status = mtt__normal_make(t->env, &t->normal);
    if (!status) status = mtt__vocab_tokens(t, f);
    if (!status) status = mtt__vocab_begin(t, f, "post_processor");
    if (!status) status = mtt__vocab_begin(t, f, "post_processor.processors.0");
    if (!status) status = mtt__vocab_begin(t, f, "post_processor.processors.1");
    if (status) return status;
    if (finish.at && !(b->finish = (char *)mtt__alloc_raw(t->env, finish.size))) return MTT_E_MEMORY;
    if (finish.at) memcpy(b->finish, finish.at, b->finish_bytes = finish.size);
#undef MTT__PARTS
    j->at = mtt__json_value(f, "model.vocab").at;
    status = mtt__vocab_pieces(t, f);
    j->at = mtt__json_value(f, "model.merges").at;
    if (!status) mtt_json_begin(j, '[');
    while (!status && mtt_json_item(j) && mtt__json_text(j, " ", &text))
        status = mtt__vocab_merge(t, f, text, 0);
    return !status && j->fault ? mtt__vocab_fail(f, NULL) : status;
}

/* Writes a piece in the alphabet. */
static void mtt__put_piece(const mtt__out *out, const mtt_tokenizer *t, uint32_t id)
{
    const mtt__string *piece = &t->pieces.items[id];
    size_t i;
    for (i = 0; i < piece->size; i++) {
        uint32_t c = ((const mtt__bpe *)t->own)->code[(unsigned char)t->pieces.bytes[piece->at + i]];
        char symbol[5] = "\\";
        size_t plain = c != '"' && c != '\\', size = 1 + mtt__utf8_put(c, symbol + 1);
        out->write(out->user, symbol + plain, size - plain);
    }
}

static void mtt__put_added(const mtt__out *out, const mtt_tokenizer *t, uint32_t k)
{
    const char *at = t->added_texts.bytes + t->added_texts.items[k].at;
    size_t size = t->added_texts.items[k].size;
    char escaped[6];
    for (; size; size--, at++) out->write(out->user, escaped, mtt__json_escape(*at, escaped));
}

static void mtt__bpe_print(const mtt_tokenizer *t, mtt_write_fn write, void *user)
{
    static const char *const truth[] = {"false", "true"};
    const mtt__bpe *b = (const mtt__bpe *)t->own;
    const mtt__merges *merges = &b->merges;
    const mtt__out out = {write, user};
    const char *rest = "'trim_offsets':true,'use_regex':", *between = "";
    uint32_t i, k;
    mtt__put_json(&out, "{'version':'1.0','truncation':null,'padding':null,'added_tokens':[");
    for (k = 0; k < t->added_texts.count; k++) {
        mtt__put_json(&out, "%s{'id':%u,'content':'", k ? "," : "", (unsigned)t->added[k].id);
        mtt__put_added(&out, t, k);
        mtt__put_json(&out, "','single_word':false,'lstrip':false,'rstrip':false,'normalized':%s,"
                      "'special':%s}", truth[t->added[k].normalized], truth[t->added[k].special]);
    }
    mtt__put_json(&out, "],'normalizer':%s,'pre_tokenizer':", t->nfc ? "{'type':'NFC'}" : "null");
    if (b->pattern != mtt__patterns) {
        const char *regex = b->pattern->regex;
        mtt__put_json(&out, "{'type':'Sequence','pretokenizers':[{'type':'%s",
                      regex ? "Split','pattern':{'Regex':'" : "Digits','individual_digits':true},");
        if (regex) write(user, regex, strlen(regex));
        if (regex) mtt__put_json(&out, "'},'behavior':'Isolated','invert':false},");
    }
    mtt__put_json(&out, "{'type':'ByteLevel','add_prefix_space':false,%s%s}", rest,
                  truth[b->pattern == mtt__patterns || !b->pattern->regex]);
    mtt__put_json(&out, "%s,'post_processor':%s", b->pattern == mtt__patterns ? "" : "]}",
                  b->finish ? "" : "null");
    if (b->finish) write(user, b->finish, b->finish_bytes);
    mtt__put_json(&out,
                  ",'decoder':{'type':'ByteLevel','add_prefix_space':true,%strue},"
                  "'model':{'type':'BPE','dropout':null,'unk_token':null,'continuing_subword_prefix':null,"
                  "'end_of_word_suffix':null,'fuse_unk':false,'byte_fallback':false,'ignore_merges':%s,"
                  "'vocab':{", rest, truth[b->whole_words]);
    for (i = k = 0; i < t->pieces.count; i++) {
        const uint32_t added = k < t->added_texts.count && t->added[k].id == i;
        k += added;
        if (added && !t->added[k - 1].listed) continue;
        mtt__put_json(&out, "%s'", between);
        if (added) mtt__put_added(&out, t, k - 1);
        else mtt__put_piece(&out, t, i);
        mtt__put_json(&out, "':%u", (unsigned)i);
        between = ",";
    }
    mtt__put_json(&out, "},'merges':[");
    for (i = 0; i < merges->count; i++) {
        mtt__put_json(&out, i ? ",'" : "'");
        mtt__put_piece(&out, t, merges->at[i].left);
        mtt__put_json(&out, " ");
        mtt__put_piece(&out, t, merges->at[i].right);
        mtt__put_json(&out, "'");
    }
    mtt__put_json(&out, "]}}\n");
}

/* name, options and their bytes; create, destroy, load, learn, cut, spell, print */
static const mtt_tokenizer_kind mtt__bpe_kind = {
    "BPE", NULL, 0, mtt__bpe_create, mtt__bpe_destroy, mtt__bpe_load, mtt__bpe_learn, mtt__bpe_cut,
    mtt__bpe_spell, mtt__bpe_print, MTT__END_OF_TEXT,
};

MTTDEF mtt_tokenizer_kind mtt_bpe(const mtt_bpe_options *options)
{
    mtt_tokenizer_kind kind = mtt__bpe_kind;
    kind.options = options;
    kind.options_bytes = options ? sizeof(*options) : 0;
    return kind;
}

/* 1 = the first line is a word, a space and 0. */
static int mtt__is_tiktoken(const mtt_json *j)
{
    const char *at = j->at < j->end ? (const char *)memchr(j->at, ' ', (size_t)(j->end - j->at)) : NULL;
    return at && j->end - at > 2 && !memchr(j->at, '\n', (size_t)(at - j->at)) && at[1] == '0' &&
           (at[2] == '\n' || at[2] == '\r');
}

/* Chooses the kind that reads a file: BPE or the caller's, which may be NULL. */
static mtt_status mtt__vocab_kind(mtt__json_file *f, const mtt_tokenizer_kind **kind)
{
    const mtt_tokenizer_kind *other = *kind;
    const char *advice = "for BERT's WordPiece, include tools/wordpiece.h and pass mtt_wordpiece()";
    const mtt_tokenizer_kind *bpe = other && other->create == mtt__bpe_create ? other : &mtt__bpe_kind;
    int mark = mtt_json_peek(&f->j);
    mtt_slice type;
    f->j.at = f->j.begin;
    if (mark == '#' || mark == '{' || mtt__is_tiktoken(&f->j)) *kind = bpe;
    else if (!other || bpe == other)
        return mtt__fail(f->env, MTT_E_FORMAT, "%s is neither a tokenizer.json nor a vocab.bpe or .tiktoken "
                         "file: check the path; %s", f->path, advice);
    if (mark != '{') return MTT_OK;
    mtt__vocab_keys(f, "", 0);
    if (!mtt_json_end(&f->j)) return mtt__vocab_fail(f, NULL);
    type = mtt__json_value(f, "model.type");
    if (!type.at && mtt__json_value(f, "config.pattern").at)
        return mtt__fail(f->env, MTT_E_FORMAT, "%s is a tekken.json of Mistral, which mtt does not read: "
                         "take the tokenizer.json of the same model, or another tokenizer", f->path);
    if (!type.at || mtt_slice_is(type, "\"BPE\"")) return MTT_OK;
    *kind = other;
    if (other && type.size == strlen(other->name) + 2 && memcmp(type.at + 1, other->name, type.size - 2) == 0)
        return MTT_OK;
    return mtt__fail(f->env, MTT_E_FORMAT, "%s: model.type is %.*s, but must be \"BPE\": %s", f->path,
                     (int)(type.size < 40 ? type.size : 40), type.at, advice);
}

MTTDEF mtt_status mtt_tokenizer_load(mtt_env *env, const char *path, const mtt_tokenizer_kind *kind,
                                     mtt_tokenizer **out)
{
    mtt__json_file f;
    mtt__map map;
    mtt_status status = kind ? mtt__check_kind(env, kind) : MTT_OK;
    *out = NULL;
    if (!status) status = mtt__map_open(env, path, &map);
    if (status) return status;
    f.env = env;
    f.path = path;
    f.scope = "mtt reads only byte-level BPE and BERT's WordPiece";
    f.key_count = 0;
    mtt_json_init(&f.j, map.data ? map.data : "", map.bytes);
    if (map.bytes > 2 && !memcmp(map.data, "\xef\xbb\xbf", 3)) f.j.begin = f.j.at += 3;
    status = mtt__refuse_packed(env, path, path, f.j.at, (size_t)(f.j.end - f.j.at));
    if (!status) status = mtt__vocab_kind(&f, &kind);
    if (!status) status = mtt__tokenizer_make(env, kind, &f, NULL, 0, out);
    mtt__map_close(&map);
    return status;
}

MTTDEF void mtt_tokenizer_print(const mtt_tokenizer *t, mtt_write_fn write, void *user)
{
    t->kind.print(t, write, user);
}

MTTDEF mtt_status mtt_tokenizer_save(const mtt_tokenizer *t, const char *path)
{
    mtt_writer w;
    mtt_status status = mtt__writer_open(t->env, path, &w);
    if (status) return status;
    t->kind.print(t, mtt__writer_text, &w);
    return mtt_writer_commit(&w);
}

/* A tokenizer without ids, which counts words. */
struct mtt_vocab_trainer {
    mtt_tokenizer tokenizer;
};

MTTDEF mtt_status mtt_vocab_trainer_create(mtt_env *env, const mtt_tokenizer_kind *kind,
                                           mtt_vocab_trainer **out)
{
    mtt_tokenizer *t = NULL;
    mtt_status status = mtt__tokenizer_make(env, kind ? kind : &mtt__bpe_kind, NULL, NULL, 0, &t);
    *out = (mtt_vocab_trainer *)(void *)t;
    return status;
}

MTTDEF void mtt_vocab_trainer_destroy(mtt_vocab_trainer *trainer)
{
    mtt_tokenizer_destroy(trainer ? &trainer->tokenizer : NULL);
}

MTTDEF mtt_status mtt_vocab_trainer_add(mtt_vocab_trainer *trainer, const char *text, size_t bytes)
{
    mtt_tokenizer *t = &trainer->tokenizer;
    mtt_status status = MTT_OK;
    size_t size;
    for (; bytes && !status; text += size, bytes -= size) {
        size = t->kind.cut(t, text, bytes);
        status = mtt__strings_count(&t->words, text, size, 1);
    }
    return status;
}

MTTDEF mtt_status mtt_vocab_trainer_finish(mtt_vocab_trainer *trainer, int vocab, mtt_tokenizer **out)
{
    mtt_tokenizer *t = &trainer->tokenizer;
    return mtt__tokenizer_make(t->env, &t->kind, NULL, &t->words, vocab ? vocab : MTT__DEFAULT_VOCAB, out);
}

/* -----------------------------------------------------------------------------------------------------------
   >>data
   ------------------------------------------------------------------------------------------------------- */

/* From text to token files. A corpus hands out documents; mtt__split_of puts each into train, valid or test;
   mtt_prepare reads the text twice, once to train the tokenizer and once to encode. A token file is a header
   and an array of ids. Its header says what it was made of, so that mtt_prepare can tell whether a dataset
   is up to date, and mtt_dataset_open whether its files belong together. */

/* Plain text is cut at the first blank line after this many bytes, at a line end after 16 times as many, and
   between two characters at 64 times as many, but not before a combining mark if that can be helped; see
   mtt__corpus_measure for texts that are short or have ends of text. */
#ifndef MTT_DOCUMENT_BYTES
#define MTT_DOCUMENT_BYTES 4096
#endif
#ifndef MTT_DOCUMENT_LIMIT /* the longest line of a JSONL file */
#define MTT_DOCUMENT_LIMIT ((size_t)1 << 30)
#endif

typedef struct mtt__corpus {
    mtt_env *env;
    const char *path, *name, *field; /* `name` is for messages */
    int fd, jsonl, ended;            /* ended: the file has been read to its end */
    char *buffer;
    size_t capacity, start, size; /* bytes [start, size) of the buffer are still to be handed out */
    uint64_t line, hash;          /* hash: of all blocks read */
    uint64_t place, invalid, first_invalid; /* place: bytes of the file handed out so far */
    uint64_t wide, dropped, inside;         /* as in mtt_prepare_report, with the next four */
    uint32_t controls;
    int separated;
    mtt_slice end_of_text, inside_text;
    size_t blank, line_end, space, most; /* plain text: least bytes before a cut there, and most bytes */
    size_t unit;     /* of them, without ends of text: for mtt__prepare_hash */
    size_t skipped;  /* bytes of the end of text behind the document that was handed out */
    int broken;      /* 1 = that document ended within a line */
} mtt__corpus;

/* Reads blocks until `bytes` wait in the buffer or the file ends. */
static mtt_status mtt__corpus_need(mtt__corpus *c, size_t bytes)
{
    enum { block = 1 << 18 };
    while (!c->ended && c->size - c->start < bytes) {
        size_t got = 0;
        ptrdiff_t n = 1;
        if (c->start && c->capacity - c->size < block) {
            memmove(c->buffer, c->buffer + c->start, c->size -= c->start);
            c->start = 0;
        }
        if (c->size - c->start > MTT_DOCUMENT_LIMIT)
            return mtt__fail(c->env, MTT_E_FORMAT, "%s:%llu: a line is longer than %zu bytes: split it",
                             c->name, (unsigned long long)c->line + 1, (size_t)MTT_DOCUMENT_LIMIT);
        if (mtt__reserve(c->env, (void **)&c->buffer, &c->capacity, c->size + block, 1)) return MTT_E_MEMORY;
        while (got < block && n) {
            n = mtt__os_read(c->fd, c->buffer + c->size + got, block - got);
            if (n < 0) return mtt__file_fail(c->env, c->name, "read it", errno);
            got += (size_t)n;
        }
        c->hash = mtt__hash(c->hash, c->buffer + c->size, got);
        c->ended = got < block;
        c->size += got;
    }
    return MTT_OK;
}

/* Tells whether a byte is inside a character, or may begin one that form NFC joins to the one before it: 0
   for the letters below U+0300, most ideographs and Hangul's syllables. */
static int mtt__may_join(char byte)
{
    const unsigned b = (unsigned char)byte;
    return (b >= 0x80 && b < 0xc0) || (b >= 0xcc && b < 0xe4) || b == 0xea || b > 0xed;
}

/* Moves past blanks, line ends, byte order marks and the marks before records of a JSON text sequence. */
static const char *mtt__skip_blanks(const char *at, const char *end)
{
    while (at < end && (memchr(" \t\r\n\v\f\x1e", *at, 7) ||
                        (end - at > 2 && !memcmp(at, "\xef\xbb\xbf", 3))))
        at += *at == '\xef' ? 3 : 1;
    return at;
}

#define MTT__END_LINE ((size_t)1024) /* most bytes of a line that is only the end of text */

/* The size of a line of plain text with its line end, if it is only the end of text, once or several times;
   else 0. `line` is its place among the bytes that wait, which have all of it unless it is longer. */
static size_t mtt__corpus_end_line(const mtt__corpus *c, size_t line)
{
    const char *first = c->buffer + c->start + line, *at = first;
    const mtt_slice end = c->end_of_text;
    const size_t left = c->size - c->start - line, longest = MTT__END_LINE;
    const size_t most = left < longest ? left : longest;
    const char *stop = at + most;
    int found = 0;
    if (!end.size || (line ? first[-1] != '\n' : c->broken)) return 0;
    for (;; at += end.size, found = 1) {
        while (at < stop && memchr(" \t\r", *at, 3)) at++;
        if ((size_t)(stop - at) < end.size || memcmp(at, end.at, end.size)) break;
    }
    if (!found || (at < stop ? *at != '\n' : !c->ended || left > most)) return 0;
    return (size_t)(at - first) + (at < stop);
}

/* Hands out the text before the next end of text or cut. It may be blank. */
static mtt_status mtt__corpus_cut(mtt__corpus *c, const char **text, size_t *bytes)
{
    const char *at = NULL;
    size_t waiting = 0, limit = 0, cut = 0, line = 0;
    c->place += c->skipped;
    for (c->skipped = 0; !cut;) {
        size_t want = line + 64 * (size_t)MTT_DOCUMENT_BYTES < c->most ? line + 64 * MTT_DOCUMENT_BYTES
                                                                       : c->most;
        mtt_status status = mtt__corpus_need(c, want + MTT__END_LINE);
        const char *end;
        size_t next, blank = line;
        at = c->buffer + c->start;
        waiting = c->size - c->start;
        limit = waiting < c->most ? waiting : c->most;
        if (status || !waiting) return status ? status : MTT_END;
        if (line >= limit) break;
        c->skipped = mtt__corpus_end_line(c, line);
        if (c->skipped) break;
        end = (const char *)memchr(at + line, '\n', limit - line);
        next = end ? (size_t)(end - at) + 1 : limit;
        while (blank < next && memchr(" \t\r\n", at[blank], 4)) blank++;
        if (end && ((next >= c->blank && blank == next) || next >= c->line_end)) cut = next;
        line = next;
    }
    if (c->skipped) cut = line, c->dropped++;
    else if (!cut) {
        for (cut = limit; cut < waiting && cut > c->space && at[cut - 1] != ' ';) cut--;
        if (cut == c->space) {
            for (cut = limit; cut < waiting && cut > limit / 2 && mtt__may_join(at[cut]);) cut--;
            if (cut < waiting && mtt__may_join(at[cut])) cut = limit;
        }
        while (cut < waiting && cut + 3 > limit && (at[cut] & 0xc0) == 0x80) cut--;
    }
    c->broken = !c->skipped && at[cut - 1] != '\n';
    c->start += cut + c->skipped;
    *text = at;
    *bytes = cut;
    return MTT_OK;
}

/* Where a text has ends of text, there are no blank documents between them. */
static mtt_status mtt__corpus_next_piece(mtt__corpus *c, const char **text, size_t *bytes)
{
    for (;;) {
        mtt_status status = mtt__corpus_cut(c, text, bytes);
        if (status || !c->dropped || mtt__skip_blanks(*text, *text + *bytes) < *text + *bytes) return status;
        c->place += *bytes;
    }
}

/* Counts the documents in the buffer, up to 20. Tells in *ends whether ends of text are among them. */
static int mtt__corpus_count(mtt__corpus *c, int *ends)
{
    const mtt__corpus before = *c;
    const char *text;
    size_t size;
    int count = 0;
    c->ended = 1; /* reads nothing, so that the buffer stays */
    while (count < 20 && mtt__corpus_next_piece(c, &text, &size) == MTT_OK) count++;
    *ends = c->dropped > 0;
    *c = before;
    return count;
}

/* Sets the size of pieces of a text of fewer than 20 documents, since they would leave a split empty. Their
   text is so short that all of it is in the buffer. Pieces have 1/40 to 1/20 of its size, but 16 bytes or
   more, so that a cut can look back. Where ends of text alone give 20 documents, there are no other cuts
   before 16 MiB, which bound the buffer. */
static void mtt__corpus_measure(mtt__corpus *c, mtt_slice end_of_text)
{
    const size_t most = (c->size - c->start) / 20;
    mtt__corpus pieces;
    int ends;
    if (c->ended && mtt__corpus_count(c, &ends) < 20) {
        c->most = most > 16 ? most : 16;
        c->blank = c->most / 2;
        c->line_end = c->space = c->most - c->most / 4;
    }
    c->unit = c->most / 64;
    c->end_of_text = end_of_text;
    pieces = *c;
    c->blank = c->line_end = (size_t)MTT_DOCUMENT_BYTES * 4096;
    c->space = c->most = c->blank + c->blank / 16;
    if (mtt__corpus_count(c, &ends) == 20 && ends) {
        c->separated = 1;
        return;
    }
    *c = pieces;
    if (ends) c->separated = 2;
}

/* JSONL begins with a mark of JSON or of a JSON text sequence. Behind blanks the first line must be a JSON
   value, unless a field was named, so that an empty first line lets plain text begin with such a mark. */
static mtt_status mtt__corpus_detect(mtt__corpus *c, int field_named, mtt_slice end_of_text)
{
    mtt_status status = mtt__corpus_need(c, 20 * c->most); /* 20 documents, for mtt__corpus_measure */
    const char *end = c->buffer + c->size, *at, *stop;
    mtt_json j;
    if (!status) status = mtt__refuse_packed(c->env, c->name, c->path, c->buffer, c->size);
    if (c->size >= 3 && memcmp(c->buffer, "\xef\xbb\xbf", 3) == 0) c->place = c->start = 3;
    at = mtt__skip_blanks(c->buffer + c->start, end);
    stop = at < end ? (const char *)memchr(at, '\n', (size_t)(end - at)) : end;
    mtt_json_init(&j, at, (size_t)((stop ? stop : end) - at));
    c->jsonl = at < end && strchr("{\"[", *at) &&
               (at == c->buffer + c->start || at[-1] == '\x1e' || field_named ||
                (mtt_json_skip(&j) && mtt_json_end(&j)));
    if (!status && !c->jsonl && field_named && c->size > c->start)
        return mtt__fail(c->env, MTT_E_ARGUMENT, "%s is plain text, which has no field \"%s\": leave out the "
                         "field, or give JSONL", c->name, c->field);
    if (c->jsonl) c->end_of_text = end_of_text;
    else if (!status) mtt__corpus_measure(c, end_of_text);
    return status;
}

static void mtt__corpus_close(mtt__corpus *c)
{
    if (!c) return;
    if (c->fd > 0) mtt__os_close(c->fd);
    mtt__free(c->env, c->buffer);
    mtt__free(c->env, c);
}

/* `end_of_text` ends documents. It must stay until the corpus is closed. */
static mtt_status mtt__corpus_open(mtt_env *env, const char *path, const char *field, mtt_slice end_of_text,
                                   mtt__corpus **out)
{
    size_t path_size = strlen(path) + 1, field_size = strlen(field ? field : "text") + 1;
    mtt__corpus *c = (mtt__corpus *)mtt__alloc(env, 1, mtt__add(sizeof(*c), path_size + field_size));
    mtt_status status = MTT_OK;
    mtt__file_info info;
    *out = NULL;
    if (!c) return MTT_E_MEMORY;
    c->env = env;
    c->path = (const char *)memcpy(c + 1, path, path_size);
    c->blank = MTT_DOCUMENT_BYTES;
    c->line_end = c->blank * 16;
    c->space = c->most = c->blank * 64;
    c->unit = c->blank;
    c->field = (const char *)memcpy((char *)(c + 1) + path_size, field ? field : "text", field_size);
    c->name = strcmp(path, "-") == 0 ? "standard input" : c->path;
    c->fd = c->name == c->path ? mtt__os_open(path, MTT__READ) : 0;
    if (c->fd < 0 || mtt__os_info(c->fd, &info)) status = mtt__file_fail(env, c->name, "open it", errno);
    else if (info.kind == MTT__FOLDER)
        status = mtt__fail(env, MTT_E_FILE, "%s is a folder: name a file in it", path);
    else if (info.kind == MTT__SPECIAL)
        status = mtt__fail(env, MTT_E_FILE, "%s is a device: name a file or a pipe", c->name);
    if (!status) status = mtt__reserve(env, (void **)&c->buffer, &c->capacity, (size_t)1 << 20, 1);
    if (!status) status = mtt__corpus_detect(c, field != NULL, end_of_text);
    if (status) mtt__corpus_close(c);
    else *out = c;
    return status;
}

/* Reads the rest of the file, and copies all of it to `copy` unless that is NULL. */
static mtt_status mtt__corpus_drain(mtt__corpus *c, mtt_writer *copy)
{
    mtt_status status = MTT_OK;
    while (!status && c->size) {
        if (copy) status = mtt_writer_put(copy, c->buffer, c->size);
        c->start = c->size = 0;
        if (!status) status = mtt__corpus_need(c, 1);
    }
    return status;
}

/* 1 = a first byte and as many further ones as it asks for, as in CESU-8 and in forms that are too long. */
static int mtt__utf8_form(const unsigned char *at, const unsigned char *end)
{
    int more = *at < 0xc0 ? 0 : *at < 0xe0 ? 1 : *at < 0xf0 ? 2 : *at < 0xf8 ? 3 : 0, k;
    for (k = 1; k <= more && end - at > k && (at[k] & 0xc0) == 0x80;) k++;
    return more && k > more;
}

/* Refuses NUL bytes in what is handed out next, and counts the bytes that are not UTF-8. */
static mtt_status mtt__corpus_check(mtt__corpus *c, const char *text, size_t bytes)
{
    const unsigned char *at = (const unsigned char *)text, *end = at + bytes;
    const char *nul = (const char *)memchr(text, 0, bytes);
    int size;
    c->place += bytes;
    for (; at < end; at += size) {
        int invalid = mtt__utf8_get(at, end, &size) == MTT__NONE;
        c->wide += size > 1 || (invalid && mtt__utf8_form(at, end));
        if (invalid && !c->invalid++) c->first_invalid = c->place - (uint64_t)(end - at);
        if (invalid && *at < 0xa0) c->controls |= (uint32_t)1 << (*at & 31);
    }
    if (!nul) return MTT_OK;
    return mtt__fail(c->env, MTT_E_FORMAT, "%s is not text, it has NUL bytes: give a UTF-8 text file, or "
                     "remove them (the first is at byte %llu), perhaps by tr -d '\\000' < %s > NEW.txt",
                     c->name, (unsigned long long)c->place - bytes + (size_t)(nul - text), c->path);
}

/* The size of a field's text without the ends of text, and the blanks around them, that exporters add. */
static size_t mtt__corpus_trim(mtt__corpus *c, mtt_slice text)
{
    const size_t mark = c->end_of_text.size;
    size_t size = text.size;
    for (;;) {
        while (size && memchr(" \t\r\n", text.at[size - 1], 4)) size--;
        if (!mark || size < mark || memcmp(text.at + size - mark, c->end_of_text.at, mark)) return text.size;
        text.size = size -= mark;
        c->dropped++;
    }
}

/* Returns the text in a line of JSONL, its escapes undone in the buffer. Of equal keys the last one counts.
   */
static mtt_status mtt__corpus_parse(mtt__corpus *c, const char *line, size_t size, const char **text,
                                    size_t *bytes)
{
    const char *hint = "; plain text that begins with a quote or a bracket needs an empty first line";
    mtt_json j;
    mtt_slice key, found = {NULL, 0};
    mtt_json_init(&j, line, size);
    j.at = mtt__skip_blanks(line, line + size);
    if (mtt_json_peek(&j) != '{') mtt__json_text(&j, "\n\n", &found);
    else
        for (mtt_json_begin(&j, '{'); mtt_json_key(&j, &key);) {
            key.size = mtt_json_unescape(key, (char *)key.at);
            if (mtt_slice_is(key, c->field)) mtt__json_text(&j, "\n\n", &found);
            else mtt_json_skip(&j);
        }
    if (!mtt_json_end(&j))
        return mtt__fail(c->env, MTT_E_FORMAT, "%s:%llu: byte %zu: %s: each line must be one JSON value%s",
                         c->name, (unsigned long long)c->line, (size_t)(j.at - j.begin) + 1, j.fault,
                         c->line == 1 ? hint : "");
    if (!found.at)
        return mtt__fail(c->env, MTT_E_FORMAT, "%s:%llu: there is no field \"%s\": name the field with the "
                         "text", c->name, (unsigned long long)c->line, c->field);
    *text = found.at;
    *bytes = mtt__corpus_trim(c, found);
    return MTT_OK;
}

static mtt_status mtt__corpus_next_line(mtt__corpus *c, const char **text, size_t *bytes)
{
    size_t scanned = 0, size;
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
        if (mtt__corpus_check(c, at, size + (end != NULL))) return MTT_E_FORMAT;
        if (mtt__skip_blanks(at, at + size) < at + size) return mtt__corpus_parse(c, at, size, text, bytes);
    }
}

/* Counts the texts `end` in a document. Once one has been found, other ends of text are not counted. */
static void mtt__corpus_count_inside(mtt__corpus *c, mtt_slice end, const char *text, size_t bytes)
{
    const char *at = text, *stop = text + bytes;
    if (!end.size || (c->inside && !mtt__slice_same(c->inside_text, end))) return;
    while ((size_t)(stop - at) >= end.size && (at = (const char *)memchr(at, *end.at, (size_t)(stop - at)))) {
        if ((size_t)(stop - at) >= end.size && !memcmp(at, end.at, end.size)) {
            c->inside_text = end;
            c->inside++;
        }
        at++;
    }
}

/* Returns the next document, valid until the next call; MTT_END after the last. Errors name the line. The
   call after MTT_E_FORMAT goes on with the next line. */
static mtt_status mtt__corpus_next(mtt__corpus *c, const char **text, size_t *bytes)
{
    const mtt_slice ends[] = {c->end_of_text, {MTT__END_OF_TEXT, 13}, {"<|end_of_text|>", 15}};
    mtt_status status = (c->jsonl ? mtt__corpus_next_line : mtt__corpus_next_piece)(c, text, bytes);
    size_t i;
    if (!status && !c->jsonl) status = mtt__corpus_check(c, *text, *bytes);
    for (i = 0; i < MTT__LENGTH(ends) && !status; i++)
        if (!i || !mtt__slice_same(ends[i], *ends)) mtt__corpus_count_inside(c, ends[i], *text, *bytes);
    return status;
}

/* Draws three different places among every 20 documents: the first two go to valid, the third to test. */
static mtt_split mtt__split_of(uint64_t seed, uint64_t document)
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

/* ---- token files */

/* The header of a token file. The second half, 0 in old files, says what the file was made of. */
typedef struct mtt__token_header {
    char magic[8];
    uint32_t version, bits;
    uint64_t count, vocab;
    uint32_t crc;       /* CRC-32 of the ids */
    uint32_t options;   /* hash of the options and of the tokenizer that was given; never 0 */
    uint64_t text;      /* hash of the text, the field and the seed */
    uint32_t tokenizer; /* CRC-32 of the tokenizer.json made with it */
    uint32_t documents; /* in this split */
    uint64_t bytes;
} mtt__token_header;

struct mtt_tokens {
    mtt_env *env;
    int fd;             /* -1: the ids are in `memory` */
    const char *memory;
    int64_t modified;   /* when the file was checked */
    mtt__token_header header;
    const char *path;
};

/* Reads `bytes` bytes. The file must be as it was when it was checked: a map of a file that is cut would end
   the process with SIGBUS. */
static mtt_status mtt__tokens_fetch(const mtt_tokens *t, uint64_t offset, void *data, size_t bytes)
{
    char *at = (char *)data;
    ptrdiff_t n = 1;
    mtt__file_info info;
    if (t->fd < 0) return memcpy(data, t->memory + offset - sizeof(t->header), bytes), MTT_OK;
    while (bytes && n) {
        n = mtt__os_read_at(t->fd, at, bytes, offset);
        if (n < 0) return mtt__file_fail(t->env, t->path, "read it", errno);
        at += n, offset += (uint64_t)n, bytes -= (size_t)n;
    }
    if (!bytes && !mtt__os_info(t->fd, &info) && info.modified == t->modified) return MTT_OK;
    return mtt__fail(t->env, MTT_E_FILE, "%s changed while it was in use: prepare it again from the text",
                     t->path);
}

/* Copies ids, and continues the checksum of their bytes unless `table` is NULL. Ids of 16 bits are read into
   the second half of the array and widened from its front. */
static mtt_status mtt__tokens_copy(const mtt_tokens *t, uint64_t first, size_t count, int32_t *ids,
                                   const mtt__crc_table *table, uint32_t *crc)
{
    const size_t width = t->header.bits / 8;
    char *raw = (char *)ids + (sizeof(*ids) - width) * count;
    mtt_status status = mtt__tokens_fetch(t, sizeof(t->header) + first * width, raw, count * width);
    uint32_t worst = 0;
    size_t i;
    if (status) return status;
    if (table) *crc = mtt__crc32(table, *crc, raw, count * width);
    for (i = 0; i < count && width == 2; i++) {
        uint16_t id;
        memcpy(&id, raw + 2 * i, 2);
        ids[i] = id;
    }
    for (i = 0; i < count; i++) worst = (uint32_t)ids[i] > worst ? (uint32_t)ids[i] : worst;
    if (worst < t->header.vocab) return MTT_OK;
    return mtt__fail(t->env, MTT_E_FORMAT, "%s has the token %u, outside the vocabulary of %d: prepare it "
                     "again from the text", t->path, (unsigned)worst, mtt_tokens_vocab(t));
}

/* Returns NULL, or why this cannot be the header of a file with so many bytes behind it. */
static const char *mtt__token_fault(const mtt__token_header *h, uint64_t bytes)
{
    if (memcmp(h->magic, "MTTTOKEN", 8) != 0) return "does not begin as a token file does";
    if (h->version != 1 || (!h->options && (h->text || h->tokenizer || h->documents || h->bytes)))
        return "is a token file of an unknown version";
    if (h->bits != 16 && h->bits != 32) return "has ids of neither 16 nor 32 bits";
    if (!h->vocab || h->vocab > (h->bits == 16 ? 65536 : INT32_MAX)) return "has an impossible vocabulary";
    if (h->count == bytes / (h->bits / 8) && bytes % (h->bits / 8) == 0) return NULL;
    return "does not have the size that its header says";
}

/* Checks the header, then every id and the checksum. */
static mtt_status mtt__tokens_check(mtt_tokens *t, uint64_t bytes)
{
    const char *fault = bytes < sizeof(t->header) ? "is shorter than the header of a token file" : NULL;
    mtt_status status = fault ? MTT_OK : mtt__tokens_fetch(t, 0, &t->header, sizeof(t->header));
    mtt__crc_table table;
    int32_t ids[8192];
    uint32_t crc = 0;
    uint64_t at, left;
    mtt__crc_init(&table);
    if (!fault && !status) fault = mtt__token_fault(&t->header, bytes - sizeof(t->header));
    for (at = 0; !fault && !status && at < t->header.count; at += MTT__LENGTH(ids)) {
        left = t->header.count - at;
        left = left < MTT__LENGTH(ids) ? left : MTT__LENGTH(ids);
        status = mtt__tokens_copy(t, at, (size_t)left, ids, &table, &crc);
    }
    if (!fault && !status && crc != t->header.crc) fault = "does not match its checksum";
    if (!fault) return status;
    return mtt__fail(t->env, MTT_E_FORMAT, "%s %s: prepare it again from the text", t->path, fault);
}

MTTDEF mtt_status mtt_tokens_open(mtt_env *env, const char *path, mtt_tokens **out)
{
    size_t size = strlen(path) + 1;
    mtt_tokens *t = (mtt_tokens *)mtt__alloc(env, 1, mtt__add(sizeof(*t), size));
    mtt_status status;
    mtt__file_info info;
    *out = NULL;
    if (!t) return MTT_E_MEMORY;
    t->env = env;
    t->path = (char *)memcpy(t + 1, path, size);
    status = mtt__open_regular(env, path, &t->fd, &info);
    if (!status) {
        t->modified = info.modified;
        status = mtt__tokens_check(t, info.bytes);
    }
    if (status) mtt_tokens_close(t);
    else *out = t;
    return status;
}

MTTDEF mtt_status mtt_tokens_copy(mtt_env *env, const int32_t *ids, size_t count, int vocab, mtt_tokens **out)
{
    mtt_tokens *t;
    mtt__crc_table table;
    size_t i;
    *out = NULL;
    if (vocab < 1)
        return mtt__fail(env, MTT_E_ARGUMENT, "vocab is %lld, it must be above 0", (long long)vocab);
    for (i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= vocab)
            return mtt__fail(env, MTT_E_ARGUMENT, "id %zu is %lld, but the vocabulary has ids 0 to %d", i,
                             (long long)ids[i], vocab - 1);
    t = (mtt_tokens *)mtt__alloc(env, 1, mtt__add(sizeof(*t), mtt__mul(count, sizeof(*ids))));
    if (!t) return MTT_E_MEMORY;
    t->env = env;
    t->fd = -1;
    t->path = "the array of ids";
    t->memory = (const char *)(t + 1);
    if (count) memcpy(t + 1, ids, count * sizeof(*ids));
    t->header.bits = 32;
    t->header.vocab = (uint64_t)vocab;
    t->header.count = count;
    mtt__crc_init(&table);
    t->header.crc = mtt__crc32(&table, 0, t->memory, count * sizeof(*ids));
    *out = t;
    return MTT_OK;
}

MTTDEF void mtt_tokens_close(mtt_tokens *t)
{
    if (!t) return;
    if (t->fd >= 0) mtt__os_close(t->fd);
    mtt__free(t->env, t);
}

MTTDEF uint64_t mtt_tokens_count(const mtt_tokens *t)
{
    return t->header.count;
}

MTTDEF int mtt_tokens_vocab(const mtt_tokens *t)
{
    return (int)t->header.vocab;
}

MTTDEF uint32_t mtt_tokens_crc32(const mtt_tokens *t)
{
    return t->header.crc;
}

MTTDEF mtt_status mtt_tokens_read(const mtt_tokens *t, uint64_t first, size_t count, int32_t *ids)
{
    if (first <= t->header.count && count <= t->header.count - first)
        return mtt__tokens_copy(t, first, count, ids, NULL, NULL);
    return mtt__fail(t->env, MTT_E_ARGUMENT, "%s has %llu tokens, too few to read %zu from %llu on: read "
                     "fewer", t->path, (unsigned long long)t->header.count, count, (unsigned long long)first);
}

/* ---- datasets */

enum { MTT__TOKENIZER_PART = MTT_SPLIT_COUNT, MTT__PARTS, MTT__PREFIX_BYTES = 2000, MTT__PATH_BYTES = 2048 };

/* Makes the path of a part: of a split, or of the tokenizer. */
static const char *mtt__part_path(char path[MTT__PATH_BYTES], const char *prefix, int part)
{
    static const char *const names[] = {"train.tokens", "valid.tokens", "test.tokens", "tokenizer.json"};
    return mtt__format(path, MTT__PATH_BYTES, "%s.%s", prefix, names[part]);
}

static mtt_tokens **mtt__dataset_split(mtt_dataset *dataset, int split)
{
    return split == MTT_TRAIN ? &dataset->train : split == MTT_VALID ? &dataset->valid : &dataset->test;
}

/* Opens the token files, and checks that they were made together, with the tokenizer.json beside them, and
   have `vocab` ids, unless that is 0. */
static mtt_status mtt__dataset_files(mtt_env *env, const char *prefix, int vocab, mtt_dataset *dataset)
{
    char path[MTT__PATH_BYTES], tokenizer[MTT__PATH_BYTES];
    mtt__crc_table table;
    mtt__map map;
    mtt_status status;
    uint32_t crc;
    mtt__file_info info;
    int i;
    mtt__part_path(tokenizer, prefix, MTT__TOKENIZER_PART);
    status = mtt__map_open(env, tokenizer, &map);
    if (status) return status;
    mtt__crc_init(&table);
    crc = mtt__crc32(&table, 0, map.data, map.bytes);
    mtt__map_close(&map);
    for (i = 0; i < MTT_SPLIT_COUNT; i++) {
        mtt_tokens **tokens = mtt__dataset_split(dataset, i);
        const mtt__token_header *h;
        if (mtt__os_find(mtt__part_path(path, prefix, i), &info) && i == MTT_TEST) return MTT_OK;
        status = mtt_tokens_open(env, path, tokens);
        if (status) return status;
        h = &(*tokens)->header;
        if ((h->options && h->tokenizer != crc) || (vocab && mtt_tokens_vocab(*tokens) != vocab))
            return mtt__fail(env, MTT_E_MISMATCH, "%s is not the tokenizer of %s: prepare both again from "
                             "the text", tokenizer, path);
        if (h->text != dataset->train->header.text || h->options != dataset->train->header.options)
            return mtt__fail(env, MTT_E_MISMATCH, "%s was not made together with %s: prepare both again from "
                             "the text", path, dataset->train->path);
    }
    return MTT_OK;
}

MTTDEF mtt_status mtt_dataset_open(mtt_env *env, const char *prefix, const mtt_tokenizer_kind *kind,
                                   mtt_dataset *dataset)
{
    char path[MTT__PATH_BYTES];
    mtt_status status;
    memset(dataset, 0, sizeof(*dataset));
    if (strlen(prefix) > MTT__PREFIX_BYTES)
        return mtt__fail(env, MTT_E_ARGUMENT, "the prefix is longer than 2000 bytes: shorten the path");
    mtt__part_path(path, prefix, MTT__TOKENIZER_PART);
    status = mtt_tokenizer_load(env, path, kind, &dataset->tokenizer);
    if (!status) status = mtt__dataset_files(env, prefix, mtt_tokenizer_vocab(dataset->tokenizer), dataset);
    if (status) mtt_dataset_close(dataset);
    return status;
}

MTTDEF void mtt_dataset_close(mtt_dataset *dataset)
{
    int i;
    if (!dataset) return;
    for (i = 0; i < MTT_SPLIT_COUNT; i++) mtt_tokens_close(*mtt__dataset_split(dataset, i));
    mtt_tokenizer_destroy(dataset->tokenizer);
    memset(dataset, 0, sizeof(*dataset));
}

/* ---- prepare */

/* Bits of the options in headers: 1 = there are options, 2 = ends of text ended documents. */
enum { MTT__OPTIONS_MARK = 3 };

typedef struct mtt__prepare {
    mtt_env *env;
    const mtt_prepare_desc *desc;
    const char *input; /* desc->input or its spool */
    int piped;         /* the input can be read only once */
    uint32_t options;  /* for the headers */
    uint64_t text;     /* for the headers; 0 until the text has been read once */
    mtt__corpus *corpus;
    uint64_t document; /* of the corpus, from 0 */
    uint64_t read, told; /* bytes of text, in all passes; those at the last call of desc->progress */
    int stopped;       /* 1 = that call has ended the work */
    mtt_vocab_trainer *trainer;
    mtt_tokenizer *tokenizer;
    mtt_slice end_of_text; /* of the tokenizer, before it is trained, too */
    mtt__crc_table crc;
    mtt__token_header header[MTT_SPLIT_COUNT];
    mtt_writer writer[MTT__PARTS];
    char path[MTT__PATH_BYTES], spool_path[MTT__PATH_BYTES];
    int32_t *ids;
    size_t capacity;
} mtt__prepare;

/* Loads the tokenizer, unless it is to be trained, and hashes the options that decide it. */
static mtt_status mtt__prepare_options(mtt__prepare *p)
{
    const mtt_prepare_desc *d = p->desc;
    const mtt_tokenizer_kind *kind = d->kind ? d->kind : &mtt__bpe_kind;
    const mtt__string *end;
    uint64_t words[] = {(uint64_t)(d->vocab ? d->vocab : MTT__DEFAULT_VOCAB),
                        mtt__hash(0, kind->name, strlen(kind->name)),
                        kind->options ? mtt__hash(0, (const char *)kind->options, kind->options_bytes) : 0};
    mtt__map map;
    if (d->tokenizer) {
        mtt_status status = mtt__map_open(p->env, d->tokenizer, &map);
        if (status) return status;
        words[0] = map.bytes ? mtt__hash(0, map.data, map.bytes) : 0;
        words[1] = 0;
        mtt__map_close(&map);
        status = mtt_tokenizer_load(p->env, d->tokenizer, d->kind, &p->tokenizer);
        if (status) return status;
        end = &p->tokenizer->pieces.items[p->tokenizer->end_of_text];
        p->end_of_text.at = p->tokenizer->pieces.bytes + end->at;
        p->end_of_text.size = end->size;
    } else if (kind->end_of_text) {
        p->end_of_text.at = kind->end_of_text;
        p->end_of_text.size = strlen(kind->end_of_text);
    }
    p->options = (uint32_t)(mtt__hash(0, (const char *)words, sizeof(words)) >> 32) | MTT__OPTIONS_MARK;
    return MTT_OK;
}

static mtt_status mtt__prepare_open(mtt__prepare *p)
{
    mtt_status status;
    mtt__corpus_close(p->corpus);
    status = mtt__corpus_open(p->env, p->input, p->desc->field, p->end_of_text, &p->corpus);
    p->document = 0;
    if (!status && p->input == p->spool_path)
        p->corpus->name = strcmp(p->desc->input, "-") ? p->desc->input : "standard input";
    return status;
}

/* Hashes the text, once it has been read, and the options that decide documents and splits. */
static mtt_status mtt__prepare_hash(mtt__prepare *p)
{
    const mtt__corpus *c = p->corpus;
    const uint64_t before = p->text;
    const uint64_t words[] = {c->hash, mtt__hash(0, c->field, strlen(c->field)), p->desc->seed,
                              c->unit}; /* MTT_DOCUMENT_BYTES, less for a short text */
    p->text = mtt__hash(0, (const char *)words, sizeof(words)) | 1;
    if (!before || before == p->text) return MTT_OK;
    return mtt__fail(p->env, MTT_E_FILE, "%s changed while it was read: prepare it again", p->corpus->name);
}

typedef mtt_status (*mtt__document_fn)(mtt__prepare *p, mtt_split split, const char *text, size_t bytes);

/* Tells the caller about each MiB, who may stop the work. */
static mtt_status mtt__prepare_tell(mtt__prepare *p, size_t bytes)
{
    const mtt_prepare_desc *d = p->desc;
    p->read += bytes;
    if (!d->progress || p->read - p->told < 1 << 20) return MTT_OK;
    p->told = p->read;
    p->stopped = d->progress(d->user, p->read) != 0;
    return p->stopped ? MTT_END : MTT_OK;
}

/* Reads the text once and hands each document to `use`. */
static mtt_status mtt__prepare_each(mtt__prepare *p, mtt__document_fn use)
{
    const char *text;
    size_t bytes;
    uint64_t all = 0;
    mtt_status status = mtt__prepare_open(p);
    while (!status && (status = mtt__corpus_next(p->corpus, &text, &bytes)) == MTT_OK) {
        status = use(p, mtt__split_of(p->desc->seed, p->document++), text, bytes), all += bytes;
        if (!status) status = mtt__prepare_tell(p, bytes);
    }
    if (status != MTT_END || p->stopped) return status;
    if (all) return mtt__prepare_hash(p);
    return mtt__fail(p->env, MTT_E_DATA, "%s has no text: give a file with text", p->corpus->name);
}

/* Returns NULL, or why the dataset with these headers cannot be used. A run goes on with tokens that were
   made before ends of text ended documents; others are made again. */
static const char *mtt__prepare_fault(const mtt__prepare *p)
{
    const int any_options = p->desc->reuse_only && !p->desc->vocab && !p->desc->tokenizer;
    const mtt__token_header *h = p->header;
    int i;
    if (p->piped) return "cannot be compared with standard input or a pipe";
    for (i = 0; i < MTT_SPLIT_COUNT; i++)
        if (!h[i].options) return "is incomplete, or does not say what it was made of";
    if ((p->desc->reuse_only ? h->options | MTT__OPTIONS_MARK : h->options) != p->options && !any_options)
        return "was made with another tokenizer or vocabulary size";
    return p->text && h->text != p->text ? "was made of another text, field or seed" : NULL;
}

/* Returns MTT_OK if the dataset exists and was made of the same text, options and tokenizer, or
   MTT_E_MISMATCH. */
static mtt_status mtt__prepare_compare(mtt__prepare *p)
{
    mtt_dataset set = {NULL, NULL, NULL, NULL};
    const char *fault;
    mtt_status status = mtt__dataset_files(p->env, p->desc->output, 0, &set);
    int i;
    for (i = 0; i < MTT_SPLIT_COUNT && !status; i++)
        if (*mtt__dataset_split(&set, i)) p->header[i] = (*mtt__dataset_split(&set, i))->header;
    mtt_dataset_close(&set);
    if (status) return status == MTT_E_MEMORY ? status : MTT_E_MISMATCH;
    fault = mtt__prepare_fault(p);
    if (!fault) {
        status = mtt__prepare_open(p);
        if (!status) status = mtt__corpus_drain(p->corpus, NULL);
        if (!status) status = mtt__prepare_hash(p);
        fault = mtt__prepare_fault(p);
    }
    if (status || !fault) return status;
    return mtt__fail(p->env, MTT_E_MISMATCH, "the dataset %s %s: give what it was made of, or prepare it "
                     "again", p->desc->output, fault);
}

static mtt_status mtt__prepare_words(mtt__prepare *p, mtt_split split, const char *text, size_t bytes)
{
    return split == MTT_TRAIN ? mtt_vocab_trainer_add(p->trainer, text, bytes) : MTT_OK;
}

static mtt_status mtt__prepare_tokenizer(mtt__prepare *p)
{
    const mtt_prepare_desc *d = p->desc;
    mtt_status status;
    if (p->tokenizer) return MTT_OK;
    status = mtt_vocab_trainer_create(p->env, d->kind, &p->trainer);
    if (!status) status = mtt__prepare_each(p, mtt__prepare_words);
    return status ? status : mtt_vocab_trainer_finish(p->trainer, d->vocab, &p->tokenizer);
}

static mtt_status mtt__prepare_encode(mtt__prepare *p, mtt_split split, const char *text, size_t bytes)
{
    mtt__token_header *h = &p->header[split];
    size_t i, count, width = h->bits / 8, most = mtt__mul(bytes, p->tokenizer->nfc ? 3 : 1), begun;
    mtt_status status = mtt__reserve(p->env, (void **)&p->ids, &p->capacity, mtt__add(most, 2),
                                     sizeof(*p->ids));
    if (status) return status;
    p->ids[0] = mtt_tokenizer_begin_of_text(p->tokenizer);
    begun = p->ids[0] >= 0;
    status = mtt_encode(p->tokenizer, text, bytes, p->ids + begun, most, &count);
    if (status) return status;
    count += begun;
    p->ids[count++] = mtt_tokenizer_end_of_text(p->tokenizer);
    for (i = 0; i < count && width == 2; i++) {
        uint16_t narrow = (uint16_t)p->ids[i];
        memcpy((char *)p->ids + 2 * i, &narrow, 2);
    }
    h->crc = mtt__crc32(&p->crc, h->crc, p->ids, count * width);
    h->count += count;
    h->bytes += bytes;
    if (++h->documents == 0)
        return mtt__fail(p->env, MTT_E_DATA, "%s has 2^32 documents or more: join some", p->corpus->name);
    return mtt_writer_put(&p->writer[split], p->ids, count * width);
}

static mtt_status mtt__prepare_splits(mtt__prepare *p)
{
    mtt_status status;
    int i, vocab = mtt_tokenizer_vocab(p->tokenizer);
    for (i = 0; i < MTT_SPLIT_COUNT; i++) {
        memcpy(p->header[i].magic, "MTTTOKEN", 8);
        p->header[i].version = 1;
        p->header[i].bits = vocab <= 65536 ? 16 : 32;
        p->header[i].vocab = (uint64_t)vocab;
    }
    status = mtt__prepare_each(p, mtt__prepare_encode);
    if (status || p->header[MTT_TRAIN].count) return status;
    return mtt__fail(p->env, MTT_E_DATA, "%s has %llu documents, none of them in the train split: give more "
                     "text or another seed", p->corpus->name, (unsigned long long)p->document);
}

/* Copies an input that can be read only once to a file, for the second pass. */
static mtt_status mtt__prepare_spool(mtt__prepare *p)
{
    mtt_writer spool;
    mtt_status status;
    mtt__format(p->spool_path, sizeof(p->spool_path), "%s.spool", p->desc->output);
    status = mtt__writer_open(p->env, p->spool_path, &spool);
    if (!status) status = mtt__prepare_open(p);
    if (!status) status = mtt__corpus_drain(p->corpus, &spool);
    if (!status) status = mtt_writer_commit(&spool);
    mtt__writer_abort(&spool);
    p->input = p->spool_path;
    return status;
}

static void mtt__prepare_text(void *user, const char *text, size_t bytes)
{
    mtt__prepare *p = (mtt__prepare *)user;
    p->header->tokenizer = mtt__crc32(&p->crc, p->header->tokenizer, text, bytes);
    mtt_writer_put(&p->writer[MTT__TOKENIZER_PART], text, bytes);
}

/* Writes everything to temporary files and renames them, the tokenizer last. A process that dies at any
   moment leaves the old dataset, the new one, or parts of both, which mtt__dataset_files refuses: the headers
   differ, or the new ones name another tokenizer. */
static mtt_status mtt__prepare_run(mtt__prepare *p)
{
    mtt__token_header *h = p->header;
    mtt_status status = MTT_OK;
    int i;
    memset(p->header, 0, sizeof(p->header));
    for (i = 0; i < MTT__PARTS && !status; i++) {
        status = mtt__writer_open(p->env, mtt__part_path(p->path, p->desc->output, i), &p->writer[i]);
        if (!status && i < MTT_SPLIT_COUNT) status = mtt_writer_put(&p->writer[i], &h[i], sizeof(h[i]));
    }
    if (!status && p->piped && !p->desc->tokenizer) status = mtt__prepare_spool(p);
    if (!status) status = mtt__prepare_tokenizer(p);
    if (!status) status = mtt__prepare_splits(p);
    if (status) return status;
    p->tokenizer->kind.print(p->tokenizer, mtt__prepare_text, p);
    status = mtt__writer_flush(&p->writer[MTT__TOKENIZER_PART]);
    for (i = 0; i < MTT_SPLIT_COUNT && !status; i++) {
        h[i].options = p->options;
        h[i].text = p->text;
        h[i].tokenizer = h->tokenizer;
        status = mtt_writer_patch(&p->writer[i], 0, &h[i], sizeof(h[i]));
    }
    for (i = 0; i < MTT__PARTS && !status; i++) status = mtt_writer_commit(&p->writer[i]);
    return status;
}

/* Reports what the text was. */
static void mtt__prepare_describe(const mtt__prepare *p, mtt_prepare_report *r)
{
    const mtt__corpus *c = p->corpus;
    const mtt_slice end = c->end_of_text, inside = c->inside_text;
    r->jsonl = c->jsonl;
    r->separated = c->separated;
    r->invalid = c->invalid, r->first_invalid = c->first_invalid;
    r->wide = c->wide, r->controls = c->controls;
    r->dropped = c->dropped, r->inside = c->inside;
    mtt__format(r->end_of_text, sizeof(r->end_of_text), "%.*s", (int)end.size, end.at);
    mtt__format(r->inside_text, sizeof(r->inside_text), "%.*s", (int)inside.size, inside.at);
}

MTTDEF mtt_status mtt_prepare(mtt_env *env, const mtt_prepare_desc *desc, mtt_prepare_report *report)
{
    mtt_prepare_report unused, *r = report ? report : &unused;
    mtt__prepare *p;
    mtt__file_info info;
    mtt_status status;
    int i;
    memset(r, 0, sizeof(*r));
    if (!desc || !desc->input || !desc->output || !*desc->output || strlen(desc->output) > MTT__PREFIX_BYTES)
        return mtt__fail(env, MTT_E_ARGUMENT, "mtt_prepare needs an input, and an output of 1 to 2000 bytes");
    p = (mtt__prepare *)mtt__alloc(env, 1, sizeof(*p));
    if (!p) return MTT_E_MEMORY;
    p->env = env;
    p->desc = desc;
    p->input = desc->input;
    p->piped = strcmp(p->input, "-") == 0 || (!mtt__os_find(p->input, &info) && info.kind != MTT__REGULAR);
    mtt__crc_init(&p->crc);
    status = desc->kind ? mtt__check_kind(env, desc->kind) : MTT_OK;
    if (!status) status = mtt__prepare_options(p);
    if (!status) status = mtt__prepare_compare(p);
    r->reused = !status;
    if (status == MTT_E_MISMATCH && !desc->reuse_only) status = mtt__prepare_run(p);
    for (i = 0; i < MTT_SPLIT_COUNT && !status; i++) {
        r->documents[i] = p->header[i].documents;
        r->bytes[i] = p->header[i].bytes;
        r->tokens[i] = p->header[i].count;
        r->vocab = (int)p->header[i].vocab;
    }
    if (!status) mtt__prepare_describe(p, r);
    for (i = 0; i < MTT__PARTS; i++) mtt__writer_abort(&p->writer[i]);
    if (p->input == p->spool_path) mtt__os_remove(p->spool_path);
    mtt__corpus_close(p->corpus);
    mtt_vocab_trainer_destroy(p->trainer);
    mtt_tokenizer_destroy(p->tokenizer);
    mtt__free(env, p->ids);
    mtt__free(env, p);
    return status;
}

/* -----------------------------------------------------------------------------------------------------------
   >>batches
   ------------------------------------------------------------------------------------------------------- */

/* Batches of a token file. The file is cut into sequences of seq_len tokens. An epoch is a permutation of the
   sequences, computed place by place, so the cursor is all that must be saved to continue exactly. */

MTTDEF mtt_status mtt_batches_init(mtt_env *env, mtt_batches *batches, const mtt_tokens *tokens, int batch,
                                   int seq_len, uint64_t seed, int sequential)
{
    const uint64_t count = tokens ? mtt_tokens_count(tokens) : 0;
    const int least = sequential ? 1 : seq_len; /* targets */
    memset(batches, 0, sizeof(*batches));
    if (!tokens)
        return mtt__fail(env, MTT_E_ARGUMENT, "tokens is NULL, as a dataset's test is without such a file");
    if (batch < 1 || seq_len < 1 || batch > INT_MAX / seq_len)
        return mtt__fail(env, MTT_E_ARGUMENT, "a batch of %lld sequences of %lld tokens is impossible: both "
                         "must be 1 or more, and their product below 2^31", (long long)batch,
                         (long long)seq_len);
    if (count <= (uint64_t)least)
        return mtt__fail(env, MTT_E_DATA, "%s has %llu tokens, but a sequence of %d needs %lld: lower "
                         "seq_len or give more text", tokens->path, (unsigned long long)count, least,
                         (long long)least + 1);
    batches->tokens = tokens;
    batches->crc32 = mtt_tokens_crc32(tokens);
    batches->batch = batch;
    batches->seq_len = seq_len;
    batches->seed = seed;
    batches->sequential = sequential;
    batches->sequences = (count - 1 + (uint64_t)(sequential ? seq_len - 1 : 0)) / (uint64_t)seq_len;
    return MTT_OK;
}

/* Returns element `index` of the permutation of 0..n-1 for (seed, epoch). It is a Feistel network of six
   rounds on the next even number of bits, which permutes without a table (Luby and Rackoff 1988). The network
   is repeated until the result is below n, at most four times on average (Black and Rogaway 2002). */
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
    const uint64_t ranks = b->ranks > 1 ? (uint64_t)b->ranks : 1, batch = (uint64_t)b->batch;
    const uint64_t last = b->tokens ? mtt_tokens_count(b->tokens) - 1 : 0; /* it is a target alone */
    uint64_t cursor = b->cursor + (uint64_t)b->rank * batch, sequence;
    size_t row, i, length = (size_t)b->seq_len;
    mtt_status status = MTT_OK;
    if (!b->tokens || b->batch < 1 || b->seq_len < 1 || !b->sequences)
        return mtt__fail(b->tokens ? b->tokens->env : NULL, MTT_E_ARGUMENT, "tokens, batch, seq_len or "
                         "sequences of the batches are not what mtt_batches_init has set");
    if (b->rank < 0 || (uint64_t)b->rank >= ranks)
        return mtt__fail(b->tokens->env, MTT_E_ARGUMENT, "batches of rank %d of %d: rank must be below ranks",
                         b->rank, (int)ranks);
    if (b->sequential && b->cursor >= b->sequences) return MTT_END;
    for (row = 0; row < (size_t)b->batch && !status; row++, tokens += length, targets += length) {
        size_t there = length;
        if (b->sequential) {
            uint64_t begin = cursor * length;
            there = begin < last ? (size_t)(last - begin < length ? last - begin : length) : 0;
            for (i = there; i < length; i++) tokens[i] = 0, targets[i] = -1;
        }
        sequence = b->sequential ? cursor
                                 : mtt__permute(b->seed, cursor / b->sequences, cursor % b->sequences,
                                                b->sequences);
        if (there) status = mtt_tokens_read(b->tokens, sequence * length, there, tokens);
        if (there && !status) status = mtt_tokens_read(b->tokens, sequence * length + 1, there, targets);
        cursor++;
    }
    if (!status) b->cursor += ranks * batch;
    if (b->sequential && b->cursor > b->sequences) b->cursor = b->sequences;
    return status;
}

/* ---- evaluation ---- */

/* What a rank adds to an evaluation: the sum of a batch's losses, and the bytes of its targets. */
typedef struct mtt__evaluated {
    double loss;
    int64_t hits, targets, bytes;
} mtt__evaluated;

MTTDEF mtt_status mtt_evaluate_tokens(mtt_trainer *trainer, const mtt_tokens *tokens,
                                      const mtt_tokenizer *tokenizer, int batches,
                                      const volatile sig_atomic_t *stop, mtt_quality *q)
{
    const mtt_shape *d = &trainer->schedule->programs[MTT__EVALUATE].shape;
    mtt_env *env = trainer->env;
    mtt_batches order;
    mtt_step_info info;
    double loss = 0, hits = 0, bytes = 0;
    int64_t rows = d->rows * trainer->schedule->split, stopped = 0, i;
    int done, batch = d->batch * trainer->schedule->split;
    int32_t *x = (int32_t *)mtt__alloc(env, 2 * (size_t)rows, sizeof(*x)), *y = x ? x + rows : NULL;
    mtt_status status = x ? mtt_batches_init(env, &order, tokens, batch, d->seq_len, 0, 1) : MTT_E_MEMORY;
    memset(q, 0, sizeof(*q));
    if (!status && batches < 0)
        status = mtt__fail(env, MTT_E_ARGUMENT, "batches is %d, it must be 1 or more, or 0 for all", batches);
    order.rank = d->rank;
    order.ranks = d->ranks;
    for (done = 0; !status && (!batches || done < batches); done += d->ranks) {
        mtt__evaluated part = {0, 0, 0, 0}, all;
        int rank;
        status = mtt_batches_next(&order, x, y);
        if (!status && (!batches || done + d->rank < batches)) {
            status = mtt_evaluate(trainer, x, y, &info);
            part.loss = info.loss * (double)info.targets;
            part.hits = info.hits;
            part.targets = info.targets;
            for (i = 0; tokenizer && i < rows; i++) {
                size_t size = 0;
                if (y[i] >= 0 && mtt_tokenizer_bytes(tokenizer, y[i], &size)) part.bytes += (int64_t)size;
            }
        }
        stopped = stop && *stop;
        if (status != MTT_END) status = mtt__all_agree(trainer, status, &stopped);
        for (rank = 0; rank < d->ranks && !status; rank++) {
            all = part;
            if (d->ranks > 1) status = mtt__spread(trainer, rank, &all, sizeof(all));
            loss += all.loss;
            hits += (double)all.hits;
            bytes += (double)all.bytes;
            q->targets += all.targets;
        }
        if (!status && stopped) break;
    }
    mtt__free(env, x);
    if (status && status != MTT_END) return status;
    q->loss = q->targets ? loss / (double)q->targets : 0;
    q->perplexity = exp(q->loss);
    q->accuracy = q->targets ? hits / (double)q->targets : 0;
    q->bits_per_byte = bytes > 0 ? loss / log(2.0) / bytes : 0;
    return stopped ? MTT_END : MTT_OK;
}
#endif /* MTT_NO_TEXT */

/* -----------------------------------------------------------------------------------------------------------
   >>checkpoint
   -------------------------------------------------------------------------------------------------------- */

/* A checkpoint is one safetensors file: 8 bytes with the size of a header, the header in JSON, then the data
   of all tensors in one piece. The header of a model with one vector is

       {"__metadata__": {"step": "3"}, "ln_f.bias": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}

   The reader refuses everything that Hugging Face's refuses, and also duplicates and NUL bytes in strings. */
enum {
    MTT__ST_HEADER = 16 << 20, /* bytes of JSON */
    MTT__ST_CHUNK = 1 << 18,   /* floats that are copied at a time */
    MTT__ST_ENTRIES = 1 << 17, /* tensors, and as many pairs of metadata */
    MTT__ST_NAME = 512,
    MTT__ST_RANK = 8,
    MTT__CHECKPOINT_NAME = 56,
    MTT__CHECKPOINT_PAIRS = 1024, /* bytes of metadata: always as many, so that the file's size is known */
    MTT__CHECKPOINT_NOTE = 4 << 20 /* and of a note behind them, at most */
};

/* The dtypes of the format and their bits. The first are those of mtt_dtype, in its order; tensors of the
   others are listed and never used. */
static const struct {
    const char *name;
    int bits;
} mtt__st_dtype[] = {
    {"F32", 32},    {"BF16", 16}, {"F16", 16},   {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"I32", 32}, {"U8", 8},
    {"BOOL", 8},    {"I8", 8},   {"I16", 16},    {"U16", 16},    {"U32", 32},    {"I64", 64},
    {"U64", 64},    {"F64", 64}, {"C64", 64},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},
    {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}};
enum { MTT__ST_DTYPES = MTT__LENGTH(mtt__st_dtype) };

MTTDEF const char *mtt_dtype_name(mtt_dtype dtype)
{
    return (unsigned)dtype < MTT_DTYPE_COUNT ? mtt__st_dtype[dtype].name : "unknown";
}

/* A tensor of a file, or a name and a value of its metadata. */
typedef struct mtt__st_entry {
    const char *name, *value;    /* value of a model's tensor: its name in the file */
    const struct mtt__st *file;  /* of a model's tensor */
    int dtype, rank; /* dtype: a row of mtt__st_dtype */
    uint64_t shape[MTT__ST_RANK], begin, end; /* in the data */
    const unsigned char *data;
    size_t bytes;
    uint32_t crc;
    int used; /* of a model: the tensor is one of its weights */
} mtt__st_entry;

typedef struct mtt__st_list {
    mtt__st_entry *at; /* sorted by name */
    size_t count, capacity;
} mtt__st_list;

typedef struct mtt__st {
    mtt_env *env;
    const char *path; /* the caller's */
    mtt__map map;
    const unsigned char *data;
    char *header; /* a copy, in which strings lose their escapes and end with a NUL */
    mtt__st_list tensors, metadata;
    mtt__crc_table crc;
    uint32_t metadata_crc;
} mtt__st;

#define MTT__ST_REMEDY "the file is damaged or cut off: copy or save it again"

static int mtt__st_by_name(const void *a, const void *b)
{
    return strcmp(((const mtt__st_entry *)a)->name, ((const mtt__st_entry *)b)->name);
}

static int mtt__st_by_place(const void *a, const void *b)
{
    const mtt__st_entry *x = (const mtt__st_entry *)a, *y = (const mtt__st_entry *)b;
    int order = (x->begin > y->begin) - (x->begin < y->begin);
    return order ? order : (x->end > y->end) - (x->end < y->end);
}

/* Returns the list's entry of that name, or NULL. */
static const mtt__st_entry *mtt__st_find(const mtt__st_list *list, const char *name)
{
    mtt__st_entry key;
    key.name = name;
    if (!list->count) return NULL;
    return (const mtt__st_entry *)bsearch(&key, list->at, list->count, sizeof(key), mtt__st_by_name);
}

/* Computes the bytes of a tensor. Returns 0 if no tensor can have this dtype and shape. */
static int mtt__st_measure(mtt__st_entry *e)
{
    uint64_t size, unit; /* elements are counted in bits or, if they are whole, in bytes */
    int k;
    if (e->dtype < 0 || e->dtype >= MTT__ST_DTYPES || e->rank < 0 || e->rank > MTT__ST_RANK) return 0;
    unit = mtt__st_dtype[e->dtype].bits % 8 ? 8 : 1;
    for (size = (uint64_t)mtt__st_dtype[e->dtype].bits * unit / 8, k = 0; k < e->rank; k++) {
        if (e->shape[k] && size > SIZE_MAX / e->shape[k]) return 0;
        size *= e->shape[k];
    }
    e->bytes = (size_t)(size / unit);
    return size % unit == 0;
}

/* Records a fault that is not at the reader's place. The first fault counts. */
static void mtt__st_fault(mtt_json *j, const char *at, const char *fault)
{
    if (!j->fault) j->at = at;
    mtt__json_fail(j, fault);
}

/* Makes a string of the header a C string in place: a NUL replaces the closing quote. */
static int mtt__st_text(mtt_json *j, mtt_slice string, const char **out)
{
    char *text = (char *)string.at;
    size_t size = mtt_json_unescape(string, text);
    text[size] = 0;
    *out = text;
    return strlen(text) == size || mtt__json_fail(j, "a NUL byte in a string");
}

static int mtt__st_numbers(mtt_json *j, uint64_t *out, int capacity)
{
    int count = 0;
    mtt_json_begin(j, '[');
    while (mtt_json_item(j)) {
        if (count == capacity) return mtt__json_fail(j, "a shape above rank 8 or more than two offsets");
        if (!mtt_json_u64(j, &out[count++])) return 0;
    }
    return count;
}

/* {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}; other fields are skipped. */
static void mtt__st_describe(mtt_json *j, mtt__st_entry *e)
{
    uint64_t offsets[2] = {0, 0};
    mtt_slice key, text;
    const char *name, *dtype = "";
    int dtypes = 0, shapes = 0, places = 0, numbers = 0;
    mtt_json_begin(j, '{');
    while (mtt_json_key(j, &key) && mtt__st_text(j, key, &name)) {
        if (!strcmp(name, "dtype")) dtypes += mtt_json_string(j, &text) && mtt__st_text(j, text, &dtype);
        else if (!strcmp(name, "shape")) shapes++, e->rank = mtt__st_numbers(j, e->shape, MTT__ST_RANK);
        else if (!strcmp(name, "data_offsets")) places++, numbers = mtt__st_numbers(j, offsets, 2);
        else mtt_json_skip(j);
    }
    if (dtypes != 1 || shapes != 1 || places != 1 || numbers != 2)
        mtt__json_fail(j, "a tensor without dtype, shape or two data_offsets, or with one of them twice");
    while (e->dtype < MTT__ST_DTYPES && strcmp(dtype, mtt__st_dtype[e->dtype].name)) e->dtype++;
    if (e->dtype == MTT__ST_DTYPES) mtt__st_fault(j, dtype, "a dtype that safetensors lacks");
    e->begin = offsets[0];
    e->end = offsets[1];
}

/* mtt_save writes a CRC-32 of each tensor's data to the metadata, under "crc32.NAME". The one under "crc32"
   is of the other pairs: the exclusive or of their CRCs, so that their order does not matter. */
static void mtt__st_add_crc(mtt__st *st, const mtt__st_entry *pair)
{
    size_t size = strlen(pair->name);
    uint32_t crc = mtt__crc32(&st->crc, (uint32_t)size, pair->name, size);
    if (strncmp(pair->name, "crc32", 5) != 0 && strcmp(pair->name, "format") != 0)
        st->metadata_crc ^= mtt__crc32(&st->crc, crc, pair->value, strlen(pair->value));
}

/* Reads the header's object, or the metadata, which is an object in it. */
static mtt_status mtt__st_entries(mtt__st *st, mtt_json *j, mtt__st_list *list)
{
    mtt_slice key, text;
    const char *name;
    int metadata = 0;
    mtt_json_begin(j, '{');
    while (mtt_json_key(j, &key) && mtt__st_text(j, key, &name)) {
        mtt__st_entry *e;
        if (list == &st->tensors && !strcmp(name, "__metadata__")) {
            if (metadata++) mtt__json_fail(j, "__metadata__ comes twice");
            if (mtt_json_peek(j) == 'n') mtt_json_skip(j); /* null */
            else if (mtt__st_entries(st, j, &st->metadata)) return MTT_E_MEMORY;
            continue;
        }
        if (list->count == MTT__ST_ENTRIES) mtt__json_fail(j, "more than 131072 tensors or pairs");
        if (mtt__reserve(st->env, (void **)&list->at, &list->capacity, list->count + 1, sizeof(*e)))
            return MTT_E_MEMORY;
        e = &list->at[list->count++];
        memset(e, 0, sizeof(*e));
        e->name = name;
        if (list == &st->tensors) mtt__st_describe(j, e);
        else if (mtt_json_string(j, &text) && mtt__st_text(j, text, &e->value)) mtt__st_add_crc(st, e);
    }
    return MTT_OK;
}

static void mtt__st_sort(mtt_json *j, mtt__st_list *list)
{
    size_t i;
    if (list->count) qsort(list->at, list->count, sizeof(*list->at), mtt__st_by_name);
    for (i = 1; i < list->count; i++)
        if (!mtt__st_by_name(&list->at[i - 1], &list->at[i]))
            mtt__st_fault(j, list->at[i].name, "a name that comes twice");
}

/* Tensors lie in the data one after another from 0 to the end. Each is as large as its shape says. */
static void mtt__st_place(mtt__st *st, mtt_json *j, uint64_t data_bytes)
{
    mtt__st_list *list = &st->tensors;
    uint64_t end = 0;
    size_t i;
    if (list->count) qsort(list->at, list->count, sizeof(*list->at), mtt__st_by_place);
    for (i = 0; i < list->count && !j->fault; i++) {
        mtt__st_entry *e = &list->at[i];
        const char *fault = strlen(e->name) > MTT__ST_NAME  ? "a name above 512 bytes"
                            : !mtt__st_measure(e)           ? "a size that overflows, or a part of a byte"
                            : e->end < e->begin             ? "an end before its begin"
                            : e->begin != end               ? "a hole or an overlap in the data"
                            : e->end - e->begin != e->bytes ? "data_offsets that do not match the shape"
                            : e->end > data_bytes           ? "data that is missing at the end of the file"
                                                            : NULL;
        if (fault) mtt__st_fault(j, e->name, fault);
        else if (st->data) e->data = st->data + e->begin;
        end = e->end;
    }
    if (end != data_bytes) mtt__json_fail(j, "tensors that end before the file: extra bytes follow");
}

/* Parses a header, which it overwrites. The error shows the first fault and the text there. */
static mtt_status mtt__st_parse(mtt__st *st, char *header, size_t size, uint64_t data_bytes)
{
    mtt_json j;
    mtt_json_init(&j, header, size);
    if (size > MTT__ST_HEADER) mtt__json_fail(&j, "a header above 16 MiB");
    if (!mtt_utf8_valid(header, size)) mtt__json_fail(&j, "a header that is not UTF-8");
    if (mtt__st_entries(st, &j, &st->tensors)) return MTT_E_MEMORY;
    mtt_json_peek(&j);
    if (j.at != j.end) mtt__json_fail(&j, "something after the header's object");
    mtt__st_place(st, &j, data_bytes);
    mtt__st_sort(&j, &st->tensors);
    mtt__st_sort(&j, &st->metadata);
    if (!j.fault) return MTT_OK;
    size = (size_t)(j.end - j.at);
    return mtt__fail(st->env, MTT_E_FORMAT, "%s: byte %zu: %s (at \"%.*s\"); " MTT__ST_REMEDY, st->path,
                     (size_t)(j.at - j.begin) + 8, j.fault, size < 80 ? (int)size : 80, j.at);
}

static void mtt__st_init(mtt_env *env, const char *path, mtt__st *st)
{
    memset(st, 0, sizeof(*st));
    st->env = env;
    st->path = path;
    mtt__crc_init(&st->crc);
}

static void mtt__st_close(mtt__st *st)
{
    mtt__free(st->env, st->header);
    mtt__free(st->env, st->tensors.at);
    mtt__free(st->env, st->metadata.at);
    mtt__map_close(&st->map);
    memset(st, 0, sizeof(*st));
}

static mtt_status mtt__st_open(mtt_env *env, const char *path, mtt__st *st)
{
    mtt_status status;
    uint64_t size = 0;
    mtt__st_init(env, path, st);
    status = mtt__map_open(env, path, &st->map);
    if (status) return status;
    if (st->map.bytes >= 8) memcpy(&size, st->map.data, 8);
    if (st->map.bytes < 8 || size > st->map.bytes - 8)
        status = mtt__fail(env, MTT_E_FORMAT, "%s: a header of %llu bytes does not fit a file of %zu; it is "
                           "cut off (copy or save it again), or not safetensors: GGUF and PyTorch's .bin are "
                           "not read", path, (unsigned long long)size, st->map.bytes);
    else if ((st->header = (char *)mtt__alloc_raw(env, (size_t)size + 1)) == NULL) status = MTT_E_MEMORY;
    else {
        st->data = (const unsigned char *)st->map.data + 8 + size;
        memcpy(st->header, st->map.data + 8, (size_t)size);
        status = mtt__st_parse(st, st->header, (size_t)size, st->map.bytes - 8 - size);
    }
    if (status) mtt__st_close(st);
    return status;
}

/* Returns how many bytes of a tensor to read next, from `at` up; 0 at its end. Those before are forgotten. */
static size_t mtt__st_piece(const mtt__st_entry *e, size_t at)
{
    const size_t most = MTT__ST_CHUNK * sizeof(float);
    if (e->data && at) mtt__os_forget(e->data, (at - 1) / most * most, at);
    return e->bytes - at < most ? e->bytes - at : most;
}

static int mtt__st_crc_is(const mtt__st *st, const char *key, uint32_t crc)
{
    const mtt__st_entry *pair = mtt__st_find(&st->metadata, key);
    unsigned high = 0, low = 0;
    return pair && mtt__hex(pair->value, &high) && mtt__hex(pair->value + 4, &low) && !pair->value[8] &&
           (high << 16 | low) == crc;
}

/* 1 = the data of a tensor has its checksum. */
static int mtt__st_is_whole(const mtt__st *st, const mtt__st_entry *e, const char *name)
{
    char key[MTT__ST_NAME + 8];
    uint32_t crc = 0;
    size_t at, bytes;
    mtt__format(key, sizeof(key), "crc32.%s", name);
    for (at = 0; (bytes = mtt__st_piece(e, at)) > 0; at += bytes)
        crc = mtt__crc32(&st->crc, crc, e->data + at, bytes);
    return mtt__st_crc_is(st, key, crc);
}

/* Checks data and metadata. Refuses a file without checksums, such as other programs write. */
static mtt_status mtt__st_verify(const mtt__st *st)
{
    const char *wrong = mtt__st_crc_is(st, "crc32", st->metadata_crc) ? NULL : "the metadata";
    size_t i;
    for (i = 0; i < st->tensors.count && !wrong; i++)
        if (!mtt__st_is_whole(st, &st->tensors.at[i], st->tensors.at[i].name)) wrong = st->tensors.at[i].name;
    if (!wrong) return MTT_OK;
    return mtt__fail(st->env, MTT_E_FORMAT, "%s: %s has no checksum or another one; " MTT__ST_REMEDY,
                     st->path, wrong);
}

/* ---- writing ---- */

/* Copies `bytes` bytes of a tensor's data, from `offset` up, to the buffer. */
typedef mtt_status (*mtt__st_read_fn)(void *user, size_t tensor, size_t offset, void *buffer, size_t bytes);

typedef struct mtt__st_saving {
    mtt__st st; /* the header as a reader sees it */
    mtt__st_entry *tensors;
    const char *metadata;
    size_t count;
    mtt__text header;
    mtt_writer writer;
    float chunk[MTT__ST_CHUNK]; /* data of any type */
} mtt__st_saving;

/* Prints the size of the header and the header. Blanks at its end align the data to 64 bytes. */
static void mtt__st_print_header(mtt__st_saving *s)
{
    char name[MTT__ST_NAME + 8];
    const mtt__st_entry *e, *end = s->count ? s->tensors + s->count : s->tensors;
    uint64_t size;
    int k;
    mtt__text *text = &s->header, key;
    mtt__text_init(text, text->at, text->capacity);
    mtt__print(text, "%8s{\"__metadata__\":{\"format\":\"pt\"%s,\"crc32\":\"%08x\"", "", s->metadata,
               (unsigned)s->st.metadata_crc);
    for (e = s->tensors; e < end; e++) {
        mtt__text_init(&key, name, sizeof(name));
        mtt__print(&key, "crc32.%s", e->name);
        mtt__print(text, ",");
        mtt__print_json_string(text, name, key.size);
        mtt__print(text, ":\"%08x\"", (unsigned)e->crc);
    }
    mtt__print(text, "}");
    for (e = s->tensors; e < end; e++) {
        mtt__print(text, ",");
        mtt__print_json_string(text, e->name, strlen(e->name));
        mtt__print(text, ":{\"dtype\":\"%s\",\"shape\":[", mtt__st_dtype[e->dtype].name);
        for (k = 0; k < e->rank; k++)
            mtt__print(text, "%s%llu", k ? "," : "", (unsigned long long)e->shape[k]);
        mtt__print(text, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)e->begin,
                   (unsigned long long)e->end);
    }
    mtt__print(text, "}");
    while (text->size % 64) mtt__print(text, " ");
    size = text->size - 8;
    memcpy(text->at, &size, 8);
}

/* Leaves room for the header, copies the data, then writes the header with the checksums. */
static mtt_status mtt__st_write(mtt__st_saving *s, mtt__st_read_fn read, void *user)
{
    mtt_status status = mtt_writer_put(&s->writer, s->header.at, s->header.size);
    size_t i, done, part;
    for (i = 0; i < s->count; i++) {
        mtt__st_entry *e = &s->tensors[i];
        for (done = 0; !status && (part = mtt__st_piece(e, done)) > 0; done += part) {
            status = read(user, i, done, s->chunk, part);
            if (status) return status;
            e->crc = mtt__crc32(&s->st.crc, e->crc, s->chunk, part);
            status = mtt_writer_put(&s->writer, s->chunk, part);
        }
    }
    mtt__st_print_header(s);
    if (!status) status = mtt_writer_patch(&s->writer, 0, s->header.at, s->header.size);
    return status ? status : mtt_writer_commit(&s->writer);
}

/* Replaces the file, or, where `read` is NULL, only counts its bytes in *(uint64_t *)user. First the reader
   parses the header, so every file that is saved can be read. Data is written in the order of the list: wide
   types first keeps it aligned. `metadata` is JSON: pairs, each after a comma. */
static mtt_status mtt__st_save(mtt_env *env, const char *path, mtt__st_entry *tensors, size_t count,
                               const char *metadata, mtt__st_read_fn read, void *user)
{
    mtt_status status = MTT_OK;
    mtt__st_saving *s;
    uint64_t end = 0;
    size_t i, room = 256 + strlen(metadata);
    for (i = 0; i < count; i++) {
        if (!mtt__st_measure(&tensors[i])) status = MTT_E_FORMAT;
        tensors[i].crc = 0;
        tensors[i].begin = end;
        tensors[i].end = end += tensors[i].bytes;
        room += 12 * strlen(tensors[i].name) + 320; /* the name twice, 6 bytes an escape */
    }
    s = (mtt__st_saving *)mtt__alloc(env, 1, sizeof(*s) + room);
    if (!s) return MTT_E_MEMORY;
    mtt__st_init(env, path, &s->st);
    s->tensors = tensors;
    s->metadata = metadata;
    s->count = count;
    mtt__text_init(&s->header, (char *)(s + 1), room);
    if (!status) {
        mtt__st_print_header(s);
        status = mtt__st_parse(&s->st, s->header.at + 8, s->header.size - 8, end);
    }
    if (status == MTT_E_FORMAT)
        status = mtt__fail(env, MTT_E_ARGUMENT, "%s: tensors and metadata need different UTF-8 names, up to "
                           "512 bytes long, known dtypes, ranks up to 8 and sizes below 2^64", path);
    if (!read) *(uint64_t *)user = s->header.size + end;
    if (!status && read) status = mtt__writer_open(env, path, &s->writer);
    if (!status && read) status = mtt__writer_expect(&s->writer, s->header.size + end);
    if (!status && read) status = mtt__st_write(s, read, user);
    mtt__writer_abort(&s->writer);
    mtt__st_close(&s->st);
    mtt__free(env, s);
    return status;
}

/* ---- a trainer's checkpoint ---- */

/* The tensors are FP32: all that the optimizer keeps of each parameter (see MTT__OPTIM), and the scales
   of FP8, 0 before a step has measured them. A compact state encodes to the same bits again. The metadata has
   the model, the counters and the position in the data. */
typedef struct mtt__saved {
    const mtt__parameter *of; /* NULL: the scales, the last tensor of a file */
    int kind;                 /* of what the optimizer keeps */
} mtt__saved;

typedef struct mtt__checkpoint {
    mtt_trainer *t;
    const mtt__st *st; /* the file to read; NULL when saving */
    int merged;        /* 1 = weights alone, with adapters added to them */
    mtt_status status;
    mtt__st_entry *tensors;
    mtt__saved *saved; /* what each tensor has */
    size_t count;
    size_t read_tensors, read_bytes; /* when saving: tensors read, and bytes of the next one */
    mtt__text metadata;
    mtt_counters counters;
    int64_t micro_batch;
    uint64_t seed;
    mtt_batches batches; /* without tokens: none */
} mtt__checkpoint;

static mtt_status mtt__checkpoint_init(mtt__checkpoint *c, mtt_trainer *t, const mtt_batches *batches,
                                       int merged)
{
#define MTT__OPTIM_PREFIX(kind, name, prefix, exists) prefix,
    static const char *const prefixes[] = {MTT__OPTIM(MTT__OPTIM_PREFIX)};
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    const mtt__parameter *q, *end = p->parameters + p->parameter_count;
    const size_t most = MTT__OPTIM_KINDS * (size_t)p->parameter_count + 1;
    mtt__st_entry *e;
    char *name;
    int kind;
    memset(c, 0, sizeof(*c));
    if (mtt__must_train(t)) return MTT_E_ARGUMENT;
    c->t = t;
    c->merged = merged;
    c->micro_batch = t->micro_batch;
    c->seed = t->optim.seed;
    if (batches) c->batches = *batches;
    c->tensors = e = (mtt__st_entry *)mtt__alloc(t->env, most, sizeof(*e) + sizeof(*c->saved) +
                                                 MTT__CHECKPOINT_NAME);
    if (!e) return MTT_E_MEMORY;
    c->saved = (mtt__saved *)(void *)(e + most);
    name = (char *)(c->saved + most);
    for (q = p->parameters; q < end; q++)
        for (kind = 0; kind < MTT__OPTIM_KINDS; kind++) {
            if (merged ? kind != MTT__MASTER || mtt__is_added(q->kind)
                       : kind != MTT__MASTER && (q->frozen || !p->optim[kind]))
                continue; /* of a frozen parameter there is the weight alone */
            c->saved[c->count].of = q;
            c->saved[c->count++].kind = kind;
            e->name = mtt__format(name, MTT__CHECKPOINT_NAME, "%s%s", prefixes[kind], q->weight->name);
            e->dtype = MTT_F32;
            e->rank = q->shape[1] ? 2 : 1;
            memcpy(e++->shape, q->shape, sizeof(q->shape));
            name += MTT__CHECKPOINT_NAME;
        }
    if (!p->scales || merged) return MTT_OK;
    c->count++;
    e->name = "fp8.scales";
    e->dtype = MTT_F32;
    e->rank = 1;
    e->shape[0] = (uint64_t)p->scales->shape[0];
    return MTT_OK;
}

/* Reads a number of a file's metadata, up to `most`; 0 = there is none. */
static int mtt__st_number(const mtt__st *st, const char *name, uint64_t most, uint64_t *value)
{
    const mtt__st_entry *pair = mtt__st_find(&st->metadata, name);
    mtt_json j;
    if (pair) mtt_json_init(&j, pair->value, strlen(pair->value));
    return pair && mtt_json_u64(&j, value) && j.at == j.end && *value <= most;
}

#define MTT__NO_NUMBER "%s has no valid \"%s\" in its metadata: give a checkpoint of mtt_save"

/* Reads a number that a file may lack; then *value stays. A text that is no number from low to high is a
   fault of the file, and no default stands in for it. */
static mtt_status mtt__st_optional(const mtt__st *st, const char *name, uint64_t low, uint64_t high,
                                   int *value)
{
    uint64_t number;
    if (!mtt__st_find(&st->metadata, name)) return MTT_OK;
    if (!mtt__st_number(st, name, high, &number) || number < low)
        return mtt__fail(st->env, MTT_E_FORMAT, MTT__NO_NUMBER, st->path, name);
    *value = (int)number;
    return MTT_OK;
}

/* A SETTING is left out where it is 0, and in a merged file. DATA is there if batches are; files of older
   versions lack LATER. */
enum { MTT__NEEDED, MTT__SETTING, MTT__DATA, MTT__LATER };

/* Prints a number to the metadata, or reads it from a file. If high is 0, the file must have the same one. */
static void mtt__checkpoint_number(mtt__checkpoint *c, const char *name, void *number, size_t size,
                                   uint64_t low, uint64_t high, int kind)
{
    const mtt__st_entry *pair = c->st ? mtt__st_find(&c->st->metadata, name) : NULL;
    const char *bits = strstr(name, "_bits"), *path = c->st ? c->st->path : NULL;
    uint64_t here = 0, value;
    int number_there;
    memcpy(&here, number, size);
    if (c->status || (kind == MTT__SETTING && (c->merged || (!pair && !here))) ||
        (kind >= MTT__DATA && !c->batches.tokens) || (kind == MTT__LATER && c->st && !pair))
        return;
    if (!c->st) {
        mtt__print(&c->metadata, ",\"%s\":\"%llu\"", name, (unsigned long long)here);
        return;
    }
    if (!high) low = high = here;
    number_there = mtt__st_number(c->st, name, UINT64_MAX, &value);
    if (number_there && value >= low && value <= high) memcpy(number, &value, size);
    else if (!pair && kind == MTT__SETTING)
        c->status = mtt__fail(c->t->env, MTT_E_MISMATCH, "%s has no %s: use the settings of its run", path,
                              name);
    else if (!number_there || low < high)
        c->status = mtt__fail(c->t->env, pair ? MTT_E_FORMAT : MTT_E_MISMATCH, MTT__NO_NUMBER, path, name);
    else if (bits && value <= UINT32_MAX)
        c->status = mtt__fail(c->t->env, MTT_E_MISMATCH, "%s has %.*s %.7g, here it is %.7g: use its run's",
                              path, (int)(bits - name), name, (double)mtt__bits_float((uint32_t)value),
                              (double)mtt__bits_float((uint32_t)here));
    else
        c->status = mtt__fail(c->t->env, MTT_E_MISMATCH, "%s has %s %s, here it is %llu: use the model and "
                              "the data of its run", path, name, pair->value, (unsigned long long)here);
}

/* 1 = a checkpoint may be without this field, and then means its default. Every one has the sizes, and this
   version writes three more fields in any case. */
static int mtt__checkpoint_optional(const mtt_field *field, int writes)
{
#define MTT__SIZE(name) offsetof(mtt_model_desc, name)
    static const size_t always[] = {MTT__SIZE(layers),    MTT__SIZE(heads),     MTT__SIZE(d_model),
                                    MTT__SIZE(d_ff),      MTT__SIZE(vocab),     MTT__SIZE(max_seq),
                                    MTT__SIZE(positions), MTT__SIZE(tied_head), MTT__SIZE(no_head_bias)};
    size_t i;
    for (i = 0; i < MTT__LENGTH(always) - (writes ? 0 : 3); i++)
        if (field->offset == always[i]) return 0;
    return 1;
}

static int mtt__checkpoint_default(const mtt_model_desc *model, const mtt_field *field)
{
    mtt_model_desc m = *model;
    mtt__field_set(&m, field, 0);
    return !mtt_model_resolve(NULL, &m, &m) && mtt__field_get(&m, field) == mtt__field_get(model, field);
}

/* Writes the fields of the model, or compares them, except for dropout, and for max_seq without a table of
   positions. */
static void mtt__checkpoint_model(mtt__checkpoint *c)
{
    const mtt_model_desc *m = &c->t->schedule->model;
    const mtt_field *f;
    for (f = mtt__model_field; f->name && !c->status; f++) {
        int value = (int)mtt__field_get(m, f), learned = m->positions == MTT_POSITIONS_LEARNED;
        char name[40], words[2][40];
        uint64_t theirs;
        mtt__format(name, sizeof(name), f->kind == MTT_FIELD_FLOAT ? "%s_bits" : "%s", f->name);
        if (f->offset == offsetof(mtt_model_desc, dropout)) continue;
        if (f->offset == offsetof(mtt_model_desc, max_seq) && !learned) value = 0;
        if (f->kind == MTT_FIELD_FLOAT) memcpy(&value, (const char *)m + f->offset, sizeof(value));
        if (mtt__checkpoint_optional(f, !c->st) && !(c->st && mtt__st_find(&c->st->metadata, name))) {
            if (mtt__checkpoint_default(m, f)) continue;
            if (c->st)
                c->status = mtt__fail(c->t->env, MTT_E_MISMATCH, "%s says nothing of %s, which means the "
                                      "default: use the model of its run", c->st->path, f->name);
        }
        if (f->choices && c->st && mtt__st_number(c->st, name, INT_MAX, &theirs) && (int)theirs != value)
            c->status = mtt__fail(c->t->env, MTT_E_MISMATCH, "%s has %s %s, here it is %s: use its run's",
                                  c->st->path, name, mtt__field_words(f, (double)theirs, words[0]),
                                  mtt__field_words(f, value, words[1]));
        mtt__checkpoint_number(c, name, &value, sizeof(value), 0, 0, MTT__NEEDED);
    }
}

/* Writes the name of the optimizer, or compares it. AdamW's is left out, as in files of older versions. */
static void mtt__checkpoint_optimizer(mtt__checkpoint *c)
{
    const int optimizer = (int)c->t->schedule->policy.optimizer;
    const mtt__st_entry *pair = c->st ? mtt__st_find(&c->st->metadata, "optimizer") : NULL;
    const char *path = c->st ? c->st->path : NULL, *there = pair ? pair->value : "adamw";
    const mtt_field *f = mtt__policy_field;
    char here[40];
    while (f->offset != offsetof(mtt_policy, optimizer)) f++;
    mtt__field_words(f, optimizer, here);
    if (!path && optimizer && !c->merged) mtt__print(&c->metadata, ",\"optimizer\":\"%s\"", here);
    if (path && !c->status && strcmp(there, here) != 0)
        c->status = mtt__fail(c->t->env, MTT_E_MISMATCH, "%s has optimizer %.40s, here it is %s: use its "
                              "run's, or load the weights alone by mtt_trainer_load", path, there, here);
}

/* Numbers of a checkpoint: kind, name, member, range in a file. */
#define MTT__CHECKPOINT_NUMBERS(X)                                                      \
    X(SETTING, "groups", t->groups, 0, 0)                                               \
    X(SETTING, "lora_rank", t->schedule->policy.lora_rank, 0, 0)                        \
    X(SETTING, "lora_alpha_bits", t->schedule->policy.lora_alpha, 0, 0)                 \
    X(NEEDED, "step", counters.steps, 0, most)                                          \
    X(NEEDED, "micro_batch", micro_batch, 0, most)                                      \
    X(NEEDED, "updates", counters.updates, 0, most)                                     \
    X(NEEDED, "good_steps", counters.good_steps, 0, 1 << 30)                            \
    X(NEEDED, "loss_scale_bits", counters.loss_scale, 1, largest)                       \
    X(NEEDED, "seed", seed, 0, UINT64_MAX)                                              \
    X(DATA, "batches.cursor", batches.cursor, 0, most)                                  \
    X(DATA, "batches.seed", batches.seed, 0, UINT64_MAX)                                \
    X(DATA, "batches.seq_len", batches.seq_len, 0, 0)                                   \
    X(DATA, "batches.sequences", batches.sequences, 0, 0)                               \
    X(LATER, "batches.crc32", batches.crc32, 0, 0)

/* Writes the model, the optimizer and the numbers, or compares and reads them. */
static mtt_status mtt__checkpoint_numbers(mtt__checkpoint *c)
{
    const uint64_t most = (uint64_t)1 << 62, largest = 0x7f7fffff; /* no counter overflows; a finite float */
    mtt__checkpoint_model(c);
    mtt__checkpoint_optimizer(c);
#define MTT__NUMBER(kind, name, member, low, high)                                      \
    mtt__checkpoint_number(c, name, &c->member, sizeof(c->member), low, high, MTT__##kind);
    MTT__CHECKPOINT_NUMBERS(MTT__NUMBER)
    return c->status;
}

/* Moves a piece of a tensor. */
static mtt_status mtt__checkpoint_move(mtt__checkpoint *c, int way, size_t index, size_t offset,
                                       const void *values, size_t bytes)
{
    const mtt__saved *saved = &c->saved[index];
    const int64_t at = (int64_t)(offset / sizeof(float)), count = (int64_t)(bytes / sizeof(float));
    float *floats = (float *)(uintptr_t)values;
    MTT_IF_EIGHT(if (!saved->of && way == MTT__PUT && !c->t->measured) return MTT_OK;)
    MTT_IF_EIGHT(if (!saved->of) return mtt__move_scales(c->t, way, at, count, floats);)
    return mtt__move_optim(c->t, way, saved->of, saved->kind, at, count, floats);
}

/* Reads a piece of a tensor. Ranks that have a share of it send it to the others, so all must read it. */
static mtt_status mtt__checkpoint_read(void *user, size_t index, size_t offset, void *buffer, size_t bytes)
{
    mtt__checkpoint *c = (mtt__checkpoint *)user;
    mtt_status status = mtt__checkpoint_move(c, MTT__GET, index, offset, buffer, bytes);
    c->read_tensors = index;
    c->read_bytes = offset + bytes;
    MTT_IF_ADAPTERS(if (!status && c->merged)
        status = mtt__add_adapter(c->t, c->saved[index].of, (int64_t)(offset / sizeof(float)),
                                  (int64_t)(bytes / sizeof(float)), (float *)buffer);)
    if (!status && !c->t->schedule->policy.rank)
        status = mtt__stay_busy(c->t); /* it may take long before it reads on */
    return status;
}

/* Reads what the writer has not read, for other ranks: rank 0 after a failure, ranks that do not write. */
static mtt_status mtt__checkpoint_read_rest(mtt__checkpoint *c)
{
    float *buffer = (float *)mtt__alloc(c->t->env, MTT__ST_CHUNK, sizeof(float));
    size_t i = c->read_tensors, done = c->read_bytes, part;
    mtt_status status = buffer ? MTT_OK : MTT_E_MEMORY;
    for (; i < c->count; i++, done = 0) {
        mtt__st_measure(&c->tensors[i]);
        for (; !status && (part = mtt__st_piece(&c->tensors[i], done)) > 0; done += part)
            status = mtt__checkpoint_read(c, i, done, buffer, part);
    }
    mtt__free(c->t->env, buffer);
    return status;
}

MTTDEF mtt_status mtt_trainer_set_note(mtt_trainer *t, const char *text)
{
    size_t size = text ? strlen(text) : 0, room = sizeof(",\"note\":\"\""), i;
    char escaped[6], *pair = NULL;
    mtt__text out;
    for (i = 0; i < size; i++) room += mtt__json_escape(text[i], escaped);
    if (room > MTT__CHECKPOINT_NOTE || (size && !mtt_utf8_valid(text, size)))
        return mtt__fail(t->env, MTT_E_ARGUMENT, "a note must be UTF-8 and take at most 4 MiB as a JSON "
                         "string: this one takes %zu bytes", room);
    if (size && (pair = (char *)mtt__alloc(t->env, room, 1)) == NULL) return MTT_E_MEMORY;
    mtt__text_init(&out, pair, pair ? room : 0);
    mtt__print(&out, ",\"note\":");
    mtt__print_json_string(&out, text, size);
    mtt__free(t->env, t->note);
    t->note = pair;
    return MTT_OK;
}

/* Saves the tensors, or counts bytes where `read` is NULL. The metadata is followed by blanks and the note. A
   merged file has no length of batches. */
static mtt_status mtt__checkpoint_write(mtt__checkpoint *c, const char *path, mtt__st_read_fn read,
                                        void *user)
{
    const int seq_len = c->t->schedule->seq_len, context = c->t->positions;
    const char *note = c->t->note ? c->t->note : "";
    const size_t room = MTT__CHECKPOINT_PAIRS + strlen(note);
    char *metadata = (char *)mtt__alloc(c->t->env, room, 1);
    mtt_status status;
    if (!metadata) return MTT_E_MEMORY;
    mtt__text_init(&c->metadata, metadata, MTT__CHECKPOINT_PAIRS);
    mtt__checkpoint_numbers(c);
    mtt__print(&c->metadata, ",\"precision\":\"%s\",\"window\":\"%d\"",
               mtt__precisions[c->t->schedule->policy.precision].name, c->t->schedule->policy.window);
    if (context || c->merged)
        mtt__print(&c->metadata, ",\"context\":\"%d\"", context > seq_len ? context : seq_len);
    mtt__print(&c->metadata, "%*s", (int)(MTT__CHECKPOINT_PAIRS - 1 - c->metadata.size), "");
    memcpy(metadata + MTT__CHECKPOINT_PAIRS - 1, note, strlen(note) + 1);
    status = mtt__st_save(c->t->env, path, c->tensors, c->count, metadata, read, user);
    mtt__free(c->t->env, metadata);
    return status;
}

static mtt_status mtt__save(mtt_trainer *t, const char *path, const mtt_batches *batches, int merged)
{
    const mtt_policy *policy = &t->schedule->policy;
    mtt__checkpoint c;
    mtt_status status = mtt__checkpoint_init(&c, t, batches, merged), rest = MTT_OK;
    if (!status) status = mtt__move_counters(t, MTT__GET, &c.counters);
    if (!status && policy->rank == 0) status = mtt__stay_busy(t);
    if (!status && policy->rank == 0) status = mtt__checkpoint_write(&c, path, mtt__checkpoint_read, &c);
    if (policy->ranks > 1 && c.tensors && (policy->rank || status)) rest = mtt__checkpoint_read_rest(&c);
    mtt__free(t->env, c.tensors);
    return mtt__all_agree(t, status ? status : rest, NULL);
}

MTTDEF mtt_status mtt_save(mtt_trainer *t, const char *path, const mtt_batches *batches)
{
    return mtt__save(t, path, batches, 0);
}

MTTDEF mtt_status mtt_save_merged(mtt_trainer *t, const char *path)
{
    return mtt__save(t, path, NULL, 1);
}

MTTDEF uint64_t mtt_checkpoint_bytes(const mtt_trainer *trainer)
{
    mtt__checkpoint c;
    uint64_t bytes = 0;
    if (!mtt__checkpoint_init(&c, (mtt_trainer *)trainer, NULL, 0))
        mtt__checkpoint_write(&c, "", NULL, &bytes);
    mtt__free(trainer->env, c.tensors);
    return bytes;
}

/* Checks that what is frozen here is so in the file. The name of a first moment says it. */
static mtt_status mtt__checkpoint_frozen(const mtt__checkpoint *c)
{
    const mtt__program *p = &c->t->schedule->programs[MTT__TRAIN];
    int i;
    for (i = 0; i < p->parameter_count; i++) {
        char name[MTT__CHECKPOINT_NAME];
        mtt__format(name, sizeof(name), "optim.m.%s", p->parameters[i].weight->name);
        if ((mtt__st_find(&c->st->tensors, name) == NULL) != p->parameters[i].frozen)
            return mtt__fail(c->t->env, MTT_E_MISMATCH, "%s: %s is %s there, but not here: freeze what its "
                             "run froze, or take the weights alone by mtt_trainer_load, as of a merged file",
                             c->st->path, name + 8,
                             p->parameters[i].frozen ? "trained" : "frozen");
    }
    return MTT_OK;
}

static mtt_status mtt__checkpoint_find(mtt__checkpoint *c)
{
    size_t i;
    for (i = 0; i < c->count; i++) {
        mtt__st_entry *want = &c->tensors[i];
        const mtt__st_entry *e = mtt__st_find(&c->st->tensors, want->name);
        if (!e && !c->saved[i].of) { /* of a run in another precision */
            c->count = i;
            break;
        }
        if (!e && c->saved[i].kind == MTT__FIRST) break;
        if (!e || (uintptr_t)e->data % sizeof(float) || e->dtype != want->dtype || e->rank != want->rank ||
            memcmp(e->shape, want->shape, sizeof(e->shape)) != 0)
            return mtt__fail(c->t->env, MTT_E_MISMATCH, "%s: tensor %s is %s: use the checkpoint's model",
                             c->st->path, want->name, e ? "of another shape, type or alignment" : "missing");
        *want = *e;
    }
    return mtt__checkpoint_frozen(c);
}

/* Refuses numbers that no training leaves: a forged file has the right checksums. */
static mtt_status mtt__checkpoint_values(const mtt__checkpoint *c)
{
    size_t i, at, bytes, k;
    for (i = 0; i < c->count; i++) {
        const mtt__st_entry *e = &c->tensors[i];
        const float *x = (const float *)(uintptr_t)e->data;
        const int scales = !c->saved[i].of;
        const float least = scales || c->saved[i].kind == MTT__SECOND ? 0.0f : -INFINITY;
        for (at = 0; (bytes = mtt__st_piece(e, at)) > 0; at += bytes)
            for (k = at / sizeof(float); k < (at + bytes) / sizeof(float); k++)
                if (!mtt__finite((double)x[k]) || x[k] < least ||
                    (scales && x[k] != (x[0] > 0 ? mtt__power_of_two(x[k]) : 0.0f)))
                    return mtt__fail(c->t->env, MTT_E_FORMAT, "%s: element %zu of %s is %g: the run had "
                                     "diverged or the file is forged; use another checkpoint", c->st->path, k,
                                     e->name, (double)x[k]);
    }
    return MTT_OK;
}

MTTDEF mtt_status mtt_resume(mtt_trainer *t, const char *path, mtt_batches *batches)
{
    mtt__checkpoint c;
    mtt__st st;
    const mtt__st_entry *note;
    char *note_before = t->note;
    uint32_t crc = 0;
    size_t i, at, bytes;
    int window, context = 0;
    mtt_status status = mtt__checkpoint_init(&c, t, batches, 0);
    c.st = &st;
    memset(&st, 0, sizeof(st));
    if (!status) status = mtt__st_open(t->env, path, &st);
    if (!status) status = mtt__checkpoint_numbers(&c);
    if (!status) status = mtt__st_optional(&st, "window", 0, INT_MAX, &window); /* may differ here */
    if (!status) status = mtt__st_optional(&st, "context", 1, 1 << 20, &context);
    if (!status) status = mtt__checkpoint_find(&c);
    if (!status) status = mtt__st_verify(&st);
    if (!status) status = mtt__checkpoint_values(&c);
    note = status ? NULL : mtt__st_find(&st.metadata, "note");
    if (note) t->note = NULL, status = mtt_trainer_set_note(t, note->value);
    status = mtt__all_agree(t, status, NULL);
    for (i = 0; i < st.metadata.count && !status; i++) { /* among them are the checksums of all tensors */
        const mtt__st_entry *pair = &st.metadata.at[i];
        crc = mtt__crc32(&st.crc, crc, pair->name, strlen(pair->name) + 1);
        crc = mtt__crc32(&st.crc, crc, pair->value, strlen(pair->value) + 1);
    }
    if (!status) status = mtt__all_same(t, "the checkpoint", crc);
    if (note) {
        mtt__free(t->env, status ? t->note : note_before);
        if (status) t->note = note_before;
    }
    if (!status) { /* the trainer changes from here on */
        const mtt__st_entry *last = &c.tensors[c.count - 1];
        t->measured = !c.saved[c.count - 1].of && *(const float *)(uintptr_t)last->data > 0;
    }
    for (i = 0; i < c.count && !status; i++)
        for (at = 0; !status && (bytes = mtt__st_piece(&c.tensors[i], at)) > 0; at += bytes)
            status = mtt__checkpoint_move(&c, MTT__PUT, i, at, c.tensors[i].data + at, bytes);
    if (!status) {
        const mtt__st_entry *from = mtt__st_find(&st.metadata, "precision");
        int scaled = from && (!strcmp(from->value, "fp16") || !strcmp(from->value, "fp8"));
        if (!mtt__precisions[t->schedule->policy.precision].scaled) c.counters.loss_scale = 1;
        else if (!scaled && c.counters.loss_scale == 1) c.counters.loss_scale = mtt__first_loss_scale(t);
        t->positions = context;
        t->step = c.counters.steps;
        t->micro_batch = c.micro_batch;
        t->optim.seed = c.seed;
        status = mtt__move_counters(t, MTT__PUT, &c.counters);
    }
    if (!status && batches) *batches = c.batches;
    mtt__free(t->env, c.tensors);
    mtt__st_close(&st);
    return status;
}

#ifndef MTT_NO_MODELS
/* -----------------------------------------------------------------------------------------------------------
   >>models
   -------------------------------------------------------------------------------------------------------- */

/* Models in files, read as mtt's parameters. One table has the names that tensors have elsewhere. The reader
   and tools/convert.c both go through it with mtt_form_next. */

/* WHOLE: a parameter. JOINED: one that is several tensors in Llama's family. They are its columns. */
enum { MTT__WHOLE, MTT__JOINED, MTT__OF_Q, MTT__OF_K, MTT__OF_V, MTT__OF_GATE, MTT__OF_UP };

/* What names begin with: mtt's, as GPT-2's in Hugging Face; those of Llama and Qwen3 there; llama.cpp's. */
static const struct {
    const char *name, *llama, *gguf;
    int part;
} mtt__elsewhere[] = {
    {"wte.", "embed_tokens.", "token_embd.", MTT__WHOLE},
    {"wpe.", "", "position_embd.", MTT__WHOLE},
    {"h.%d.ln_1.", "layers.%d.input_layernorm.", "blk.%d.attn_norm.", MTT__WHOLE},
    {"h.%d.attn.c_attn.", "", "blk.%d.attn_qkv.", MTT__JOINED},
    {"h.%d.attn.c_attn.", "layers.%d.self_attn.q_proj.", "blk.%d.attn_q.", MTT__OF_Q},
    {"h.%d.attn.c_attn.", "layers.%d.self_attn.k_proj.", "blk.%d.attn_k.", MTT__OF_K},
    {"h.%d.attn.c_attn.", "layers.%d.self_attn.v_proj.", "blk.%d.attn_v.", MTT__OF_V},
    {"h.%d.attn.q_norm.", "layers.%d.self_attn.q_norm.", "blk.%d.attn_q_norm.", MTT__WHOLE},
    {"h.%d.attn.k_norm.", "layers.%d.self_attn.k_norm.", "blk.%d.attn_k_norm.", MTT__WHOLE},
    {"h.%d.attn.c_proj.", "layers.%d.self_attn.o_proj.", "blk.%d.attn_output.", MTT__WHOLE},
    {"h.%d.ln_2.", "layers.%d.post_attention_layernorm.", "blk.%d.ffn_norm.", MTT__WHOLE},
    {"h.%d.mlp.c_fc.", "", "blk.%d.ffn_up.", MTT__JOINED},
    {"h.%d.mlp.c_fc.", "layers.%d.mlp.gate_proj.", "blk.%d.ffn_gate.", MTT__OF_GATE},
    {"h.%d.mlp.c_fc.", "layers.%d.mlp.up_proj.", "blk.%d.ffn_up.", MTT__OF_UP},
    {"h.%d.mlp.c_proj.", "layers.%d.mlp.down_proj.", "blk.%d.ffn_down.", MTT__WHOLE},
    {"ln_f.", "norm.", "output_norm.", MTT__WHOLE},
    {"lm_head.", "lm_head.", "output.", MTT__WHOLE},
};

/* Fills in a tensor by a row of the table: parameter `kind` of a layer, with these rows and columns. */
static void mtt__form_fill(const mtt_model_desc *m, mtt_form form, int kind, int layer, int row,
                           const int64_t shape[2], mtt_form_tensor *t)
{
    const int64_t q = (int64_t)m->heads * m->d_head, kv = (int64_t)m->heads_kv * m->d_head, ff = m->d_ff;
    const int64_t firsts[] = {0, 0, 0, q, q + kv, 0, ff}, counts[] = {0, 0, q, kv, kv, ff, ff};
    const int rotary = m->positions == MTT_POSITIONS_ROTARY, part = mtt__elsewhere[row].part;
    const int turned = part == MTT__OF_Q || part == MTT__OF_K || kind == MTT__Q_NORM_WEIGHT ||
                       kind == MTT__K_NORM_WEIGHT;
    const int theirs = form == MTT_FORM_GGUF && !m->qk_norm; /* llama.cpp's llama has pairs side by side */
    const char *name = mtt__parameter_row[kind].name, *begin = mtt__elsewhere[row].name;
    const char *suffix = name + strlen(begin), *before = rotary ? "model." : "transformer.";
    mtt__text text;
    memset(t, 0, sizeof(*t));
    mtt__format(t->parameter, sizeof(t->parameter), name, layer);
    t->vector = !shape[1];
    t->rows = t->vector ? 1 : shape[0];
    t->width = t->vector ? shape[0] : shape[1];
    t->first = firsts[part];
    t->columns = part > MTT__JOINED ? counts[part] : t->width;
    if (form == MTT_FORM_GGUF) begin = mtt__elsewhere[row].gguf;
    if (form == MTT_FORM_HUGGING_FACE && rotary) begin = mtt__elsewhere[row].llama;
    mtt__text_init(&text, t->name, sizeof(t->name));
    if (form == MTT_FORM_HUGGING_FACE && kind < MTT__HEAD_WEIGHT) mtt__print(&text, "%s", before);
    mtt__print(&text, begin, layer);
    mtt__print(&text, "%s", suffix);
    if (form == MTT_FORM_MTT) return;
    t->transposed = !t->vector && layer >= 0 && layer < m->layers && (form == MTT_FORM_GGUF || rotary);
    t->d_head = m->d_head;
    t->pairs = turned && rotary ? theirs - m->rotary_interleaved : 0;
}

/* The cursor counts layers, before them and after them; in each, kinds of parameters; for each, the rows. */
MTTDEF int mtt_form_next(const mtt_model_desc *m, mtt_form form, int64_t *cursor, mtt_form_tensor *t)
{
    const int rows = MTT__LENGTH(mtt__elsewhere), rotary = m->positions == MTT_POSITIONS_ROTARY;
    const int64_t end = (int64_t)(m->layers + 2) * MTT__PARAMETER_KINDS * rows;
    int64_t shape[2];
    while (*cursor < end) {
        const int row = (int)(*cursor % rows), kind = (int)(*cursor / rows % MTT__PARAMETER_KINDS);
        const int layer = (int)(*cursor / rows / MTT__PARAMETER_KINDS) - 1, part = mtt__elsewhere[row].part;
        const int place = layer < 0 ? MTT__BEFORE : layer < m->layers ? MTT__LAYER : MTT__AFTER;
        const char *begin = mtt__elsewhere[row].name;
        ++*cursor;
        if (mtt__parameter_row[kind].place != place ||
            strncmp(mtt__parameter_row[kind].name, begin, strlen(begin)) != 0 ||
            (part != MTT__WHOLE && (part == MTT__JOINED) != (form == MTT_FORM_MTT || !rotary)) ||
            !mtt__parameter_shape(m, NULL, kind, m->vocab, shape))
            continue;
        mtt__form_fill(m, form, kind, layer, row, shape, t);
        return 1;
    }
    return 0;
}

MTTDEF int64_t mtt_form_column(const mtt_form_tensor *t, int64_t i)
{
    const int64_t half = t->d_head / 2, at = t->pairs ? i % t->d_head : 0;
    if (t->pairs > 0) i += at / 2 + at % 2 * half - at;
    if (t->pairs < 0) i += at % half * 2 + at / half - at;
    return t->first + i;
}

/* Gives a model what every one of its family has. GPT-2 may have other positions, as a table. */
static const char *mtt__form_impose(mtt_model_desc *m)
{
    const int rotary = m->positions == MTT_POSITIONS_ROTARY;
    m->norm = rotary ? MTT_NORM_RMS : MTT_NORM_LAYER;
    m->norm_place = MTT_NORM_PRE;
    m->mlp = rotary ? MTT_MLP_SWIGLU : MTT_MLP_GELU;
    m->no_head_bias = 1;
    if (rotary && m->qk_norm) return m->no_biases = 1, "qwen3";
    if (rotary) return "llama";
    if (m->positions == MTT_POSITIONS_NONE) m->positions = MTT_POSITIONS_LEARNED;
    m->no_biases = m->qk_norm = 0;
    m->heads_kv = m->heads;
    m->d_head = m->d_model / m->heads;
    return "gpt2";
}

/* MTT_E_MISMATCH names the first field in which two models differ. */
static mtt_status mtt__model_compare(mtt_env *env, const mtt_model_desc *is, const mtt_model_desc *must,
                                     const char *who, const char *remedy)
{
    const mtt_field *f;
    char words[2][40];
    for (f = mtt__model_field; f->name; f++) {
        if (f->offset == offsetof(mtt_model_desc, dropout) ||
            (f->offset == offsetof(mtt_model_desc, max_seq) && is->positions != MTT_POSITIONS_LEARNED) ||
            mtt__field_get(is, f) == mtt__field_get(must, f))
            continue;
        return mtt__fail(env, MTT_E_MISMATCH, "%s is %s in the model, but %s in %s: %s", f->name,
                         mtt__field_words(f, mtt__field_get(is, f), words[0]),
                         mtt__field_words(f, mtt__field_get(must, f), words[1]), who, remedy);
    }
    return MTT_OK;
}

MTTDEF mtt_status mtt_form_family(mtt_env *env, const mtt_model_desc *model, const char **family)
{
    mtt_model_desc m = *model;
    *family = mtt__form_impose(&m);
    if (!strcmp(*family, "llama") && m.d_model % m.heads)
        return mtt__fail(env, MTT_E_MISMATCH, "d_model is %d, but in transformers' llama it is a multiple of "
                         "the %d heads: train with one, or with qk_norm", m.d_model, m.heads);
    return mtt__model_compare(env, model, &m, *family, "other programs have only the second: train with it");
}

/* ---- opening ---- */

enum { MTT__MODEL_PATH = 2048, MTT__MODEL_FILES = 1000 };

struct mtt_model {
    mtt_env *env;
    mtt_model_desc desc;
    mtt_form form;
    int window, seq_len;
    mtt__st *files;
    size_t file_count, file_capacity;
    mtt__pool paths;      /* of the files */
    mtt__st_list tensors; /* of all files; in Hugging Face's without "transformer." and "model." */
    char path[MTT__MODEL_PATH], tokenizer[MTT__MODEL_PATH + 32];
};

MTTDEF void mtt_model_close(mtt_model *m)
{
    size_t i;
    if (!m) return;
    for (i = 0; i < m->file_count; i++) mtt__st_close(&m->files[i]);
    mtt__free(m->env, m->files);
    mtt__free(m->env, m->tensors.at);
    mtt__pool_free(m->env, &m->paths);
    mtt__free(m->env, m);
}

/* Opens a file of the model: `name` in its folder, or the path itself where name is NULL. */
static mtt_status mtt__model_file(mtt_model *m, const char *name)
{
    size_t room = strlen(m->path) + (name ? strlen(name) : 0) + 2, i;
    char *path = (char *)mtt__pool_take(m->env, &m->paths, room);
    mtt_status status;
    if (!path) return MTT_E_MEMORY;
    mtt__format(path, room, name ? "%s/%s" : "%s", m->path, name);
    for (i = 0; i < m->file_count; i++)
        if (strcmp(m->files[i].path, path) == 0) return MTT_OK;
    if (m->file_count == MTT__MODEL_FILES)
        return mtt__fail(m->env, MTT_E_FORMAT, "%s has more than 1000 files: save it in fewer", m->path);
    if (mtt__reserve(m->env, (void **)&m->files, &m->file_capacity, i + 1, sizeof(*m->files)))
        return MTT_E_MEMORY;
    status = mtt__st_open(m->env, path, &m->files[i]);
    if (!status) m->file_count++;
    return status;
}

/* Lists the files that {"weight_map": {"a tensor": "a file", ...}} names. */
static mtt_status mtt__model_index(mtt_model *m, const char *path)
{
    mtt__map map;
    mtt_json j;
    mtt_slice key, file;
    char name[256];
    mtt_status status = mtt__map_open(m->env, path, &map);
    if (status) return status;
    mtt_json_init(&j, map.data ? map.data : "", map.bytes);
    for (mtt_json_begin(&j, '{'); mtt_json_key(&j, &key);)
        if (!mtt_slice_is(key, "weight_map")) mtt_json_skip(&j);
        else
            for (mtt_json_begin(&j, '{'); !status && mtt_json_key(&j, &key) && mtt_json_string(&j, &file);) {
                size_t size = file.size < sizeof(name) ? mtt_json_unescape(file, name) : 0;
                name[size] = 0;
                if (!size || *name == '.' || strlen(name) != size || mtt__os_name(name) != name)
                    mtt__json_fail(&j, "the name of a file must have 1 to 255 bytes, no / and no . in front");
                else status = mtt__model_file(m, name);
            }
    if (!mtt_json_end(&j) && !status)
        status = mtt__fail(m->env, MTT_E_FORMAT, "%s: byte %zu: %s: get the file again", path,
                           (size_t)(j.at - j.begin), j.fault ? j.fault : "something follows");
    mtt__map_close(&map);
    return status;
}

/* Lists the tensors of all files by name. */
static mtt_status mtt__model_list(mtt_model *m)
{
    mtt__st_list *all = &m->tensors;
    mtt_json twice;
    size_t i, k;
    mtt_json_init(&twice, "", 0);
    for (i = 0; i < m->file_count; i++) {
        const mtt__st_list *list = &m->files[i].tensors;
        if (mtt__reserve(m->env, (void **)&all->at, &all->capacity, all->count + list->count + 1,
                         sizeof(*all->at)))
            return MTT_E_MEMORY;
        for (k = 0; k < list->count; k++) {
            mtt__st_entry *e = &all->at[all->count++];
            *e = list->at[k];
            e->file = &m->files[i];
            e->value = e->name;
            if (m->form == MTT_FORM_MTT) continue;
            if (strncmp(e->name, "transformer.", 12) == 0) e->name += 12;
            else if (strncmp(e->name, "model.", 6) == 0) e->name += 6;
        }
    }
    mtt__st_sort(&twice, all);
    if (!twice.fault) return MTT_OK;
    return mtt__fail(m->env, MTT_E_FORMAT, "%s: the tensor %.200s comes twice: save the model again", m->path,
                     twice.at);
}

/* Returns the entry of a tensor, whose name is without what it begins with. */
static mtt__st_entry *mtt__model_find(const mtt_model *m, const mtt_form_tensor *t)
{
    const char *dot = strchr(t->name, '.');
    const int begins = m->form != MTT_FORM_MTT && strncmp(t->name, "lm_head", 7) != 0;
    return (mtt__st_entry *)(uintptr_t)mtt__st_find(&m->tensors, begins ? dot + 1 : t->name);
}

/* Tensors that are no weights of the model: optimizer state, FP8's scales; masks and frequencies that earlier
   versions of transformers saved, and a copy of a tied head. */
static int mtt__model_ignores(const mtt_model *m, const char *name)
{
    static const char *const ends[] = {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"};
    size_t size = strlen(name), i;
    if (m->form == MTT_FORM_MTT) return !strncmp(name, "optim.", 6) || !strcmp(name, "fp8.scales");
    for (i = 0; i < MTT__LENGTH(ends); i++)
        if (size > strlen(ends[i]) && !strcmp(name + size - strlen(ends[i]), ends[i])) return 1;
    if (!strcmp(name, "rotary_emb.inv_freq")) return 1; /* of all layers */
    return m->desc.tied_head && !strcmp(name, "lm_head.weight");
}

/* An element of a tensor of F32, F16, BF16 or F64. */
static float mtt__st_float(const mtt__st_entry *e, size_t i)
{
    uint16_t half;
    float single;
    double wide;
    if (e->dtype == MTT_F32) return memcpy(&single, e->data + 4 * i, sizeof(single)), single;
    if (e->dtype != MTT_F16_BITS && e->dtype != MTT_BF16_BITS)
        return memcpy(&wide, e->data + 8 * i, sizeof(wide)), (float)wide;
    memcpy(&half, e->data + 2 * i, sizeof(half));
    return e->dtype == MTT_F16_BITS ? mtt__from_fp16(half) : mtt__from_bf16(half);
}

/* 1 = tensors have one shape and equal values, be it in two types. */
static int mtt__st_equal(const mtt__st_entry *a, const mtt__st_entry *b)
{
    const mtt__st_entry *const both[] = {a, b};
    size_t i, count = 1;
    int k;
    if (a->rank != b->rank || memcmp(a->shape, b->shape, sizeof(a->shape)) != 0) return 0;
    for (k = 0; k < 2; k++)
        if (both[k]->dtype != MTT_F32 && both[k]->dtype != MTT_F16_BITS && both[k]->dtype != MTT_BF16_BITS &&
            strcmp(mtt__st_dtype[both[k]->dtype].name, "F64")) return 0;
    for (k = 0; k < a->rank; k++) count *= (size_t)a->shape[k];
    for (i = 0; i < count && mtt__st_float(a, i) == mtt__st_float(b, i);) i++;
    for (k = 0; k < 2; k++) mtt__os_forget(both[k]->data, 0, both[k]->bytes);
    return i == count;
}

/* Checks that every tensor of the description is there, and no other. */
static mtt_status mtt__model_match(mtt_model *m)
{
    mtt_form_tensor t;
    int64_t cursor = 0;
    const int rotary = m->desc.positions == MTT_POSITIONS_ROTARY;
    const mtt__st_entry *head = mtt__st_find(&m->tensors, "lm_head.weight");
    const mtt__st_entry *table = mtt__st_find(&m->tensors, rotary ? "embed_tokens.weight" : "wte.weight");
    size_t i;
    /* As in transformers 5, another head in the file counts, even if config.json says that it is tied. */
    if (m->form != MTT_FORM_MTT && m->desc.tied_head && head && table && !mtt__st_equal(head, table))
        m->desc.tied_head = 0;
    while (mtt_form_next(&m->desc, m->form, &cursor, &t)) {
        mtt__st_entry *e = mtt__model_find(m, &t);
        const uint64_t rows = (uint64_t)(t.transposed ? t.columns : t.rows);
        const uint64_t columns = (uint64_t)(t.transposed ? t.rows : t.columns);
        if (!e || e->rank != (t.vector ? 1 : 2) || e->shape[e->rank - 1] != columns ||
            (!t.vector && e->shape[0] != rows))
            return mtt__fail(m->env, MTT_E_MISMATCH, "%s: %s is %s, expected are %llu x %llu values: it is "
                             "another model's, or not whole", m->path, t.name,
                             e ? "of another shape" : "missing", (unsigned long long)rows,
                             (unsigned long long)columns);
        if (e->dtype != MTT_F32 && (m->form == MTT_FORM_MTT ||
                                    (e->dtype != MTT_BF16_BITS && e->dtype != MTT_F16_BITS)))
            return mtt__fail(m->env, MTT_E_MISMATCH, "%s: %s has the type %s: save the model in float32",
                             m->path, t.name, mtt__st_dtype[e->dtype].name);
        e->used = 1;
    }
    for (i = 0; i < m->tensors.count; i++)
        if (!m->tensors.at[i].used && !mtt__model_ignores(m, m->tensors.at[i].name))
            return mtt__fail(m->env, MTT_E_MISMATCH, "%s: the model has no tensor %.200s: %s", m->path,
                             m->tensors.at[i].name, strstr(m->tensors.at[i].name, ".lora_")
                             ? "save it by mtt_save_merged" : "it is another model's");
    return MTT_OK;
}

#define MTT__IS_ADAPTER "%s is an adapter, without the weights of its model: give the merged file of its " \
    "run, ..._merged.safetensors, or the model that it was trained from"

static mtt_status mtt__model_checkpoint(mtt_model *m)
{
    mtt_status status = mtt__model_file(m, NULL);
    const mtt_field *f;
    size_t i;
    if (status) return status;
    for (i = 0; i < m->files->tensors.count; i++) /* PEFT's names */
        if (!strncmp(m->files->tensors.at[i].name, "base_model.model.", 17))
            return mtt__fail(m->env, MTT_E_FORMAT, MTT__IS_ADAPTER, m->path);
    if (!mtt__st_crc_is(&m->files[0], "crc32", m->files[0].metadata_crc))
        return mtt__fail(m->env, MTT_E_FORMAT, "%s: its metadata has no checksum or another one: give a "
                         "checkpoint of mtt_save, or a folder with config.json", m->path);
    for (f = mtt__model_field; f->name; f++) {
        const int real = f->kind == MTT_FIELD_FLOAT; /* bits of floats from 0 up are in their order */
        const int none = f->offset == offsetof(mtt_model_desc, max_seq) &&
                         m->desc.positions != MTT_POSITIONS_LEARNED; /* mtt_save then writes 0 */
        char name[40];
        int number = 0;
        mtt__format(name, sizeof(name), real ? "%s_bits" : "%s", f->name);
        if (!mtt__checkpoint_optional(f, 0) && !mtt__st_find(&m->files->metadata, name))
            return mtt__fail(m->env, MTT_E_FORMAT, "%s does not say its %s: give a checkpoint of mtt_save",
                             m->path, f->name);
        status = mtt__st_optional(m->files, name,
                                  none ? 0 : real ? mtt__float_bits((float)f->low) : (uint64_t)f->low,
                                  real ? mtt__float_bits((float)f->high) : (uint64_t)f->high, &number);
        if (status) return status;
        memcpy((char *)&m->desc + f->offset, &number, sizeof(number));
    }
    status = mtt__st_optional(m->files, "window", 0, INT_MAX, &m->window);
    if (!status) status = mtt__st_optional(m->files, "batches.seq_len", 1, 1 << 20, &m->seq_len);
    return status ? status : mtt__st_optional(m->files, "context", 1, 1 << 20, &m->seq_len);
}

/* ---- config.json ---- */

/* What transformers 5 computes follows from the keys of two tables: numbers of the description, and settings
   with the values that mtt can compute. All other keys are skipped: they change training alone, or nothing.
   Of keys between bars the first that is present counts, even if it is null. Keys with a dot in front are in
   rope_scaling or, where that is missing or empty, in rope_parameters. */
enum { MTT__GPT2 = 1, MTT__LLAMA = 2, MTT__QWEN3 = 4, MTT__ROTARY = 6, MTT__ALL = 7 };
enum { MTT__GPT2_NUMBERS = 7, MTT__ROTARY_NUMBERS = 10, MTT__LLAMA3_NUMBERS = 14 };

static const struct {
    size_t offset;
    const char *gpt2, *rotary; /* keys of GPT-2, of Llama and Qwen3 */
    int nullable;              /* families in which null is allowed, and means the same as 0 */
    double missing[3];         /* defaults of the families; 0: follows from other fields, -1: must be there */
} mtt__config_numbers[MTT__LLAMA3_NUMBERS] = {
    {MTT__SIZE(layers), "num_hidden_layers|n_layer", "num_hidden_layers", 0, {12, 32, 32}},
    {MTT__SIZE(heads), "num_attention_heads|n_head", "num_attention_heads", 0, {12, 32, 32}},
    {MTT__SIZE(d_model), "hidden_size|n_embd", "hidden_size", 0, {768, 4096, 4096}},
    {MTT__SIZE(d_ff), "n_inner", "intermediate_size", MTT__GPT2, {0, 11008, 22016}},
    {MTT__SIZE(norm_eps), "layer_norm_epsilon", "rms_norm_eps", 0, {1e-5, 1e-6, 1e-6}},
    {MTT__SIZE(vocab), "vocab_size", "vocab_size", 0, {50257, 32000, 151936}},
    {MTT__SIZE(max_seq), "max_position_embeddings|n_positions", "max_position_embeddings", 0,
     {1024, 2048, 32768}},
    {MTT__SIZE(heads_kv), "", "num_key_value_heads", MTT__ROTARY, {0, 0, 32}},
    {MTT__SIZE(d_head), "", "head_dim", MTT__LLAMA, {0, 0, 128}},
    {MTT__SIZE(rotary_theta), "", ".rope_theta|rope_theta", 0, {0, 10000, 10000}},
    {MTT__SIZE(rotary_factor), "", ".factor", 0, {0, -1, -1}},
    {MTT__SIZE(rotary_low), "", ".low_freq_factor", 0, {0, -1, -1}},
    {MTT__SIZE(rotary_high), "", ".high_freq_factor", 0, {0, -1, -1}},
    {MTT__SIZE(rotary_original), "", "original_max_position_embeddings|.original_max_position_embeddings", 0,
     {0, 0, 0}},
};

static const struct {
    int families;
    const char *keys, *allowed; /* keys: blanks separate settings; allowed: see mtt__json_rule */
} mtt__config_rules[] = {
    {MTT__ALL, "model_type", "\"gpt2\"|\"llama\"|\"qwen3\""},
    {MTT__ALL, "quantization_config per_layer_config attention_chunk_size transformers_weights text_config",
     "missing|null"},
    {MTT__ALL, "configuration_files .full_attention .sliding_attention", "missing"},
    {MTT__ALL, "is_causal scale_attn_weights", "true|missing"},
    {MTT__ALL, "is_encoder_decoder add_cross_attention scale_attn_by_inverse_layer_idx", "false|missing"},
    {MTT__ALL, "tie_word_embeddings", "true|false|missing"},
    {MTT__GPT2, "activation_function", "\"gelu_new\"|\"gelu_pytorch_tanh\"|\"gelu_python_tanh\"|missing"},
    {MTT__GPT2, "sliding_window rope_scaling rope_parameters", "missing|null"},
    {MTT__LLAMA, "sliding_window", "missing|null"}, /* training ignores it, generation's cache does not */
    {MTT__LLAMA, "attention_bias mlp_bias", "true|false|missing"},
    {MTT__QWEN3, "attention_bias use_sliding_window", "false|missing"},
    {MTT__ROTARY, "hidden_act", "\"silu\"|\"swish\"|missing"},
    {MTT__ROTARY, "rope_scaling rope_parameters", "{|null|missing"},
    {MTT__ROTARY, ".rope_type|.type", "\"default\"|\"llama3\"|missing"},
    {MTT__ROTARY, ".partial_rotary_factor", "1.0|1|missing"},
    {MTT__ROTARY, "partial_rotary_factor", "1.0|1|null|missing"},
};

/* Finds a setting. Its key and its value, which has the size 0 if there is none, become keys[0] of the file.
   keys[1] is the object of keys with a dot. */
static mtt_slice mtt__config_find(mtt__json_file *f, const char *keys)
{
    mtt__json_key *k = f->keys;
    char text[256];
    mtt_slice name;
    mtt_json j;
    for (;; keys++) {
        const size_t dot = *keys == '.', size = strcspn(keys, "| ");
        mtt__format(k->path, sizeof(k->path), "%s%.*s", dot ? k[1].path : "", (int)size, keys);
        k->value.at = "missing";
        k->value.size = 0;
        if (dot) mtt_json_init(&j, k[1].value.at, k[1].value.size);
        else mtt_json_init(&j, f->j.begin, (size_t)(f->j.end - f->j.begin));
        for (mtt_json_begin(&j, '{'); mtt_json_key(&j, &name);) {
            const char *at = (mtt_json_peek(&j), j.at);
            mtt_json_skip(&j);
            if (name.size < sizeof(text)) name.size = mtt_json_unescape(name, text), name.at = text;
            if (name.size != size - dot || memcmp(name.at, keys + dot, name.size) != 0) continue;
            if (k->value.size) f->j.at = at, mtt__json_fail(&f->j, "a key occurs twice");
            k->value.at = at;
            k->value.size = (size_t)(j.at - at);
        }
        keys += size;
        f->key_count = k->value.size > 0;
        if (f->key_count || *keys != '|') return k->value;
    }
}

static mtt_status mtt__config_number(mtt__json_file *f, size_t row, int family, mtt_model_desc *desc)
{
    const char *keys = family == MTT__GPT2 ? mtt__config_numbers[row].gpt2 : mtt__config_numbers[row].rotary;
    const mtt_slice text = mtt__config_find(f, keys);
    const mtt_field *field = mtt__model_field;
    double value = mtt__config_numbers[row].missing[family / 2];
    mtt_json j, integer;
    uint64_t whole;
    while (field->offset != mtt__config_numbers[row].offset) field++;
    mtt_json_init(&j, text.at, text.size);
    integer = j;
    if (mtt_slice_is(text, "null") && mtt__config_numbers[row].nullable & family) value = 0;
    else if (text.size && (!mtt_json_number(&j, &value) || value < field->low || value > field->high ||
                           (field->kind == MTT_FIELD_INT && !mtt_json_u64(&integer, &whole))))
        value = -1;
    if (value < 0)
        return mtt__fail(f->env, MTT_E_FORMAT, "%s: %s is %.*s, but must be %s from %.9g to %.9g", f->path,
                         f->keys->path, !text.size ? 7 : text.size < 40 ? (int)text.size : 40, text.at,
                         field->kind == MTT_FIELD_INT ? "an integer" : "a number", field->low, field->high);
    mtt__field_set(desc, field, value);
    return MTT_OK;
}

/* Reads the description that config.json gives. Its model_type implies the rest. */
static mtt_status mtt__model_config(mtt__json_file *f, mtt_model_desc *desc)
{
    const int gpt2 = mtt_slice_is(mtt__config_find(f, "model_type"), "\"gpt2\"");
    const int qwen3 = mtt_slice_is(mtt__config_find(f, "model_type"), "\"qwen3\"");
    const int bias = mtt_slice_is(mtt__config_find(f, "attention_bias"), "true");
    const int family = gpt2 ? MTT__GPT2 : qwen3 ? MTT__QWEN3 : MTT__LLAMA;
    size_t i, numbers = gpt2 ? MTT__GPT2_NUMBERS : MTT__ROTARY_NUMBERS;
    mtt_slice text = mtt__config_find(f, "rope_scaling"), type;
    int full = 0;
    mtt_json j;
    mtt_json_init(&j, text.at, text.size);
    mtt_json_begin(&j, '{');
    if (!mtt_json_key(&j, &type)) mtt__config_find(f, "rope_parameters");
    f->keys[1] = f->keys[0];
    for (i = 0; i < MTT__LENGTH(mtt__config_rules); i++) {
        const mtt__json_rule rule = {f->keys->path, mtt__config_rules[i].allowed};
        const char *keys = mtt__config_rules[i].families & family ? mtt__config_rules[i].keys : "";
        for (; *keys; keys += strcspn(keys, " "), keys += *keys == ' ') {
            mtt__config_find(f, keys);
            if (mtt__json_check(f, &rule, 1)) return MTT_E_FORMAT;
        }
    }
    if (mtt_slice_is(mtt__config_find(f, ".rope_type|.type"), "\"llama3\"")) numbers = MTT__LLAMA3_NUMBERS;
    for (i = 0; i < numbers; i++)
        if (mtt__config_number(f, i, family, desc)) return MTT_E_FORMAT;
    if (!(desc->rotary_original > 0) && desc->rotary_factor > 0) desc->rotary_original = (float)desc->max_seq;
    desc->positions = gpt2 ? MTT_POSITIONS_LEARNED : MTT_POSITIONS_ROTARY;
    desc->qk_norm = qwen3;
    text = mtt__config_find(f, "tie_word_embeddings");
    desc->tied_head = text.size ? *text.at == 't' : gpt2;
    desc->no_biases = !gpt2 && !bias;
    if (family == MTT__LLAMA && bias != mtt_slice_is(mtt__config_find(f, "mlp_bias"), "true"))
        return mtt__fail(f->env, MTT_E_MISMATCH, "%s: attention_bias and mlp_bias differ: mtt has biases in "
                         "all layers or in none", f->path);
    if (!qwen3 && desc->d_model % desc->heads)
        return mtt__fail(f->env, MTT_E_FORMAT, "%s: %s is %d, but must be a multiple of %d heads", f->path,
                         gpt2 ? "n_embd" : "hidden_size", desc->d_model, desc->heads);
    text = mtt__config_find(f, "layer_types");
    mtt_json_init(&j, text.at, text.size);
    for (mtt_json_begin(&j, '['); mtt_json_item(&j) && mtt_json_string(&j, &type);)
        full += mtt_slice_is(type, "full_attention");
    if (text.size && !mtt_slice_is(text, "null") && (!mtt_json_end(&j) || full != desc->layers))
        return mtt__fail(f->env, MTT_E_MISMATCH, "%s: layer_types must be full_attention in %d layers: %s",
                         f->path, desc->layers, f->scope);
    mtt__form_impose(desc);
    return MTT_OK;
}

/* Writes the path of a file in the model's folder to `text`. */
static const char *mtt__model_path(const mtt_model *m, const char *name, char text[MTT__MODEL_PATH + 32])
{
    return mtt__format(text, MTT__MODEL_PATH + 32, "%s/%s", m->path, name);
}

static mtt_status mtt__model_folder(mtt_model *m)
{
    char path[MTT__MODEL_PATH + 32];
    mtt__json_file f;
    mtt__map map;
    mtt__file_info info;
    mtt_status status;
    if (!mtt__os_find(mtt__model_path(m, "adapter_config.json", path), &info) &&
        mtt__os_find(mtt__model_path(m, "config.json", path), &info))
        return mtt__fail(m->env, MTT_E_FORMAT, MTT__IS_ADAPTER, m->path);
    status = mtt__map_open(m->env, mtt__model_path(m, "config.json", path), &map);
    if (status) return status;
    m->form = MTT_FORM_HUGGING_FACE;
    f.env = m->env;
    f.path = path;
    f.scope = "mtt computes no other models";
    mtt_json_init(&f.j, map.data ? map.data : "", map.bytes);
    if (mtt_json_peek(&f.j) != '{') mtt__json_fail(&f.j, "expected one object");
    mtt_json_skip(&f.j);
    if (mtt_json_end(&f.j)) status = mtt__model_config(&f, &m->desc);
    if (f.j.fault)
        status = mtt__fail(m->env, MTT_E_FORMAT, "%s: byte %zu: %s: get the file again", path,
                           (size_t)(f.j.at - f.j.begin), f.j.fault);
    mtt__map_close(&map);
    if (status) return status;
    m->seq_len = m->desc.max_seq;
    if (!mtt__os_readable(mtt__model_path(m, "tokenizer.json", m->tokenizer))) *m->tokenizer = 0;
    if (!mtt__os_find(mtt__model_path(m, "model.safetensors", path), &info))
        return mtt__model_file(m, "model.safetensors");
    if (!mtt__os_find(mtt__model_path(m, "model.safetensors.index.json", path), &info))
        return mtt__model_index(m, path);
    return mtt__fail(m->env, MTT_E_FILE, "%s has neither model.safetensors nor model.safetensors.index.json: "
                     "save the model with save_pretrained", m->path);
}

/* Resolves the description. Its faults are the file's, which has other names for the fields. */
static mtt_status mtt__model_resolve(mtt_model *m)
{
    char faults[sizeof(m->env->error)];
    if (!mtt_model_resolve(m->env, &m->desc, &m->desc)) return MTT_OK;
    if (m->env) memcpy(faults, m->env->error, sizeof(faults));
    return mtt__fail(m->env, MTT_E_FORMAT, "%s: %s%s", m->path, faults, m->form == MTT_FORM_MTT ? "" :
                     " (in config.json d_model is hidden_size or n_embd, d_ff intermediate_size or n_inner, "
                     "d_head head_dim, heads_kv num_key_value_heads, rotary_high high_freq_factor)");
}

MTTDEF mtt_status mtt_model_open(mtt_env *env, const char *path, mtt_model **out)
{
    mtt_model *m = (mtt_model *)mtt__alloc(env, 1, sizeof(*m));
    mtt__file_info info;
    size_t size = strlen(path);
    mtt_status status;
    *out = NULL;
    if (!m) return MTT_E_MEMORY;
    m->env = env;
    errno = ENOENT;
    if (size >= sizeof(m->path)) size = 0, errno = ENAMETOOLONG;
    memcpy(m->path, path, size);
    if (!size || mtt__os_find(path, &info)) status = mtt__file_fail(env, path, "open it", errno);
    else status = info.kind == MTT__FOLDER ? mtt__model_folder(m) : mtt__model_checkpoint(m);
    if (!status) status = mtt__model_resolve(m);
    if (!status) status = mtt__model_list(m);
    if (!status) status = mtt__model_match(m);
    if (status) mtt_model_close(m);
    else *out = m;
    return status;
}

MTTDEF const mtt_model_desc *mtt_model_describe(const mtt_model *m)
{
    return &m->desc;
}

MTTDEF const char *mtt_model_tokenizer(const mtt_model *m)
{
    return *m->tokenizer ? m->tokenizer : NULL;
}

MTTDEF const char *mtt_model_note(const mtt_model *m)
{
    const mtt__st_entry *pair = m->form == MTT_FORM_MTT ? mtt__st_find(&m->files->metadata, "note") : NULL;
    return pair ? pair->value : NULL;
}

MTTDEF void mtt_model_training(const mtt_model *m, int *window, int *seq_len)
{
    *window = m->window;
    *seq_len = m->seq_len;
}

/* ---- reading ---- */

/* Lists the tensors of a parameter: one, or those of q, k and v, or of gate and up. Returns their number. */
static int mtt__model_parts(const mtt_model *m, const char *parameter, mtt_form_tensor parts[3])
{
    int64_t cursor = 0;
    int count = 0;
    while (count < 3 && mtt_form_next(&m->desc, m->form, &cursor, &parts[count]))
        count += !strcmp(parts[count].parameter, parameter);
    return count;
}

/* Checks that the values of a tensor are finite, and its checksum, which files of other programs lack. */
static mtt_status mtt__model_check(const mtt_model *m, const mtt_form_tensor *t)
{
    const mtt__st_entry *e = mtt__model_find(m, t);
    const size_t size = e->bytes / (size_t)(t->rows * t->columns);
    size_t at, bytes;
    int faults = 0;
    if (mtt__st_find(&e->file->metadata, "crc32") && !mtt__st_is_whole(e->file, e, e->value))
        return mtt__fail(m->env, MTT_E_FORMAT, "%s: %s does not match its checksum: the file is damaged; "
                         "copy or save it again", e->file->path, t->name);
    for (at = 0; (bytes = mtt__st_piece(e, at)) > 0; at += bytes) {
        const int64_t end = (int64_t)((at + bytes) / size);
        int64_t i;
        MTT__OMP(omp parallel for reduction(+ : faults))
        for (i = (int64_t)(at / size); i < end; i++)
            faults += !mtt__finite((double)mtt__st_float(e, (size_t)i));
    }
    if (!faults) return MTT_OK;
    return mtt__fail(m->env, MTT_E_FORMAT, "%s: %s has %d values that are not finite: use another file",
                     m->path, t->name, faults);
}

/* Copies what a tensor has of `count` elements of its parameter, from `at` up. */
static void mtt__model_copy(const mtt_model *m, const mtt_form_tensor *t, int64_t at, int64_t count,
                            float *values)
{
    const mtt__st_entry *e = mtt__model_find(m, t);
    const int64_t first = at / t->width, rows = mtt__ceil_div(at + count, t->width) - first;
    const int64_t lines = t->transposed ? t->columns : rows, length = t->transposed ? rows : t->columns;
    const size_t row_bytes = e->bytes / (size_t)t->rows, end = (size_t)(first + rows) * row_bytes;
    int64_t line, i;
    MTT__OMP(omp parallel for private(i))
    for (line = 0; line < lines; line++)
        for (i = 0; i < length; i++) {
            const int64_t row = first + (t->transposed ? i : line), column = t->transposed ? line : i;
            const int64_t to = row * t->width + mtt_form_column(t, column) - at;
            const int64_t from = t->transposed ? column * t->rows + row : row * t->columns + column;
            if (to >= 0 && to < count) values[to] = mtt__st_float(e, (size_t)from);
        }
    if (!t->transposed || end == e->bytes)
        mtt__os_forget(e->data, t->transposed ? 0 : (size_t)first * row_bytes, end);
}

MTTDEF mtt_status mtt_model_read(mtt_model *m, const char *name, float *values)
{
    mtt_form_tensor parts[3];
    int count = mtt__model_parts(m, name, parts), k;
    mtt_status status = MTT_OK;
    if (!count) return mtt__fail(m->env, MTT_E_ARGUMENT, "%s has no parameter %.100s", m->path, name);
    for (k = 0; k < count && !status; k++) {
        status = mtt__model_check(m, &parts[k]);
        if (!status) mtt__model_copy(m, &parts[k], 0, parts[k].rows * parts[k].width, values);
    }
    return status;
}

/* All weights are checked before the first one is set, so that a refusal changes nothing. They pass in pieces
   from the file's types to floats and on to the device's, so the host needs no memory for them. */
MTTDEF mtt_status mtt_trainer_load(mtt_trainer *t, mtt_model *m)
{
    mtt_status status = mtt__model_compare(t->env, &m->desc, &t->schedule->model,
                                           t->schedule->chunk ? "the generator" : "the trainer",
                                           "create it with the model's description");
    const mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    const mtt__parameter *q, *end = p->parameters + p->parameter_count;
    const int ranks = t->schedule->policy.ranks;
    mtt_form_tensor parts[3];
    mtt__crc_table table;
    uint32_t crc = 0;
    int setting;
    mtt__crc_init(&table);
    for (setting = 0; setting < 2; setting++) {
        for (q = p->parameters; q < end && !status; q++) {
            const int count = mtt__is_added(q->kind) ? 0 : mtt__model_parts(m, q->weight->name, parts);
            const int64_t elements = count && (setting || ranks > 1) ? mtt__parameter_elements(q) : 0;
            int64_t at, n;
            int k;
            for (k = 0; k < count && !setting && !status; k++) status = mtt__model_check(m, &parts[k]);
            for (at = 0; at < elements && !status; at += n) {
                n = mtt__min(MTT__STAGING, elements - at);
                for (k = 0; k < count; k++) mtt__model_copy(m, &parts[k], at, n, t->values);
                if (setting) status = mtt__move_optim(t, MTT__PUT, q, MTT__MASTER, at, n, t->values);
                else crc = mtt__crc32(&table, crc, t->values, (size_t)n * sizeof(*t->values));
            }
        }
        if (setting) break;
        status = mtt__all_agree(t, status, NULL);
        if (!status) status = mtt__all_same(t, "the first weights", crc);
        if (!status && !t->schedule->chunk) status = mtt__fill_state(t, 1);
    }
    if (!status) t->step = t->micro_batch = t->measured = 0, t->positions = m->seq_len;
    return status;
}
#endif /* MTT_NO_MODELS */

#ifndef MTT_NO_GENERATOR
/* -----------------------------------------------------------------------------------------------------------
   >>generator
   -------------------------------------------------------------------------------------------------------- */

/* ---- the pass `generate` ---- */

static int mtt__generates(const mtt__builder *b)
{
    return b->schedule->chunk > 0;
}

/* The keys and values of each layer, and what a pass reads besides tokens. */
static void mtt__add_cache(mtt__builder *b)
{
    const mtt_schedule *s = b->schedule;
    const mtt_model_desc *m = &s->model;
    mtt__program *p = b->program;
    int64_t rows = s->programs[0].shape.rows;
    int i;
    if (!mtt__generates(b)) return;
    p->sequences = mtt__add_state(b, MTT_I32, MTT_DATA, "sequences", rows, 0);
    p->places = mtt__add_state(b, MTT_I32, MTT_DATA, "places", rows, 0);
    p->last = mtt__add_state(b, MTT_I32, MTT_DATA, "last", s->batch, 0);
    p->choices = mtt__add_state(b, MTT_U8, MTT_DATA, "choices", s->batch, (int64_t)sizeof(mtt_choice));
    p->chosen = mtt__add_state(b, MTT_U8, MTT_DATA, "chosen", s->batch, (int64_t)sizeof(mtt_chosen));
    p->cache = (mtt_tensor **)mtt__take(b, 2 * (size_t)m->layers * sizeof(*p->cache));
    for (i = 0; i < 2 * m->layers && !b->status; i++) {
        p->cache[i] = mtt__add_tensor(b, mtt__dtype(b), MTT_ACTIVATIONS, i / 2, "attn.",
                                      i % 2 ? "values" : "keys", (int64_t)s->batch * m->heads_kv, s->seq_len,
                                      m->d_head);
        p->cache[i]->persistent = 1;
    }
}

/* Returns the rows of a table at an index. */
static mtt_tensor *mtt__gather_rows(mtt__builder *b, mtt_tensor *table, mtt_tensor *index, const char *name)
{
    mtt_tensor *y;
    if (!table) return NULL;
    y = mtt__add_tensor(b, table->dtype, MTT_DATA, -1, name, ".row", b->program->shape.rows,
                        mtt__width(table), 0);
    MTT__EMIT(b, -1, 0, gather, table, index, y);
    return y;
}

/* The forward pass for rows of any sequences: tables of positions are gathered for each row, attention reads
   the cache, the last row of each sequence reaches the head, and ids are chosen from its logits. */
static int mtt__rule_generate(mtt__builder *b, mtt_op *op, const mtt_op *end)
{
    mtt__program *p = b->program;
    mtt_tensor **angles = (mtt_tensor **)mtt__own(b, sizeof(*angles));
    const mtt_op_flash *f = op < end ? MTT_OPERANDS_OF(flash, op) : NULL;
    if (!angles) return 0;
    switch (op < end ? op->kind : MTT_OP_KIND_COUNT) {
    case MTT_OP_embed:
        ((mtt_op_embed *)(void *)op->operands)->positions =
            mtt__gather_rows(b, p->positions, p->places, "positions");
        *angles = mtt__gather_rows(b, p->angles, p->places, "angles");
        return 0;
    case MTT_OP_rotary: ((mtt_op_rotary *)(void *)op->operands)->angles = *angles; return 0;
    case MTT_OP_flash:
        MTT__EMIT(b, op->layer, 0, cached_attention, f->qkv, p->sequences, p->places,
                  p->cache[2 * op->layer], p->cache[2 * op->layer + 1], f->out);
        return 1;
    case MTT_OP_pick_row:
        MTT__EMIT(b, -1, 0, gather, op->operands[0], p->last, op->operands[2]);
        return 1;
    case MTT_OP_KIND_COUNT: MTT__EMIT(b, -1, 0, choose_id, p->output, p->choices, p->chosen); return 0;
    default: return 0;
    }
}

static const mtt__wing *mtt__wing_generator(void)
{
    static const mtt__wing wing = {NULL, NULL, NULL, NULL, mtt__add_cache, NULL};
    return &wing;
}

/* ---- products of few rows ---- */

enum {
    MTT__FEW_ROWS = 32,     /* up to so many of C, B is multiplied where it lies, instead of packed */
    MTT__FEW_QUERIES = 4,   /* up to so many of a cache, its keys are, too */
    MTT__FEW_COLUMNS = 4096 /* of C that a thread then computes at a time, at most */
};

/* A token of one sequence, or of each of a batch: B is read once from memory, at 28 GB/s a core, and from a
   cache again for every MTT__ROWS rows of C. Terms are added as mtt__product_tile adds them, so the bits are
   the same. A sum of DEPTH terms begins with 0 in `sum`; then C adds it. BF16 becomes floats in registers. No
   generator computes in FP16.

   MTT__FEW_ALONG: B's rows are side by side. Of whole rows it adds one at a time, because one long run of
   memory is read up to twice as fast as many short ones. Of parts of rows it adds 16 at a time.

   MTT__FEW_TOGETHER: the same for several rows of C, whose sums are in registers. Up to 512 columns are taken
   at a time, and prefetched two vectors ahead: a step of 8 sequences of GPT-2 takes 1.5 times as long as of
   one, instead of 2.7 times with 192 columns and no prefetch.

   MTT__FEW_ACROSS: B's columns are contiguous. W of them and W rows are transposed in registers: log2 W
   rounds, each of which interleaves the first half of the vectors with the second, bring the bits of the
   columns into the rows' places. BF16 stays in pairs, words, until then. A sum waits for its last addition,
   so the next columns are begun before these end. What comes next is prefetched: with 16 lanes the next
   columns, 28 GB/s instead of 18; else the next terms of these, so that with AVX2 GPT-2's head takes 2.5 ms
   in BF16 instead of 4. */
#define MTT__FEW_ACROSS(name, vector, low, high, terms, add_terms)                                           \
    static void name(int64_t m, int64_t n, int64_t k, const float *x, int64_t ldx, const float *b,           \
                     int64_t ldb, float *sum)                                                                \
    {                                                                                                        \
        enum { wide = sizeof(vector) / sizeof(float) };                                                      \
        typedef int32_t lanes __attribute__((vector_size(sizeof(vector)), unused));                          \
        const int64_t next = wide == 16 ? wide * ldb : k;                                                    \
        int64_t j, p, r;                                                                                     \
        int i, round;                                                                                        \
        for (p = 0; p < k; p += wide)                                                                        \
            for (j = 0; j < n; j += wide) {                                                                  \
                const float *at = b + j * ldb + p;                                                           \
                vector total, t[wide], u[wide];                                                              \
                MTT__UNROLL_VECTORS                                                                          \
                for (i = 0; i < wide; i++, at += ldb) {                                                      \
                    MTT__PREFETCH(at + next);                                                                \
                    memcpy(&t[i], at, sizeof(vector));                                                       \
                }                                                                                            \
                MTT__UNROLL_VECTORS                                                                          \
                for (round = 1; round < wide; round *= 2) {                                                  \
                    MTT__UNROLL_VECTORS                                                                      \
                    for (i = 0; i < wide / 2; i++) {                                                         \
                        u[2 * i] = MTT__SHUFFLE(t[i], t[i + wide / 2], lanes, low);                          \
                        u[2 * i + 1] = MTT__SHUFFLE(t[i], t[i + wide / 2], lanes, high);                     \
                    }                                                                                        \
                    MTT__UNROLL_VECTORS                                                                      \
                    for (i = 0; i < wide; i++) t[i] = u[i];                                                  \
                }                                                                                            \
                for (r = 0; r < m; r++) {                                                                    \
                    const float *of_row = x + r * ldx + p * terms;                                           \
                    memcpy(&total, sum + r * n + j, sizeof(total));                                          \
                    MTT__UNROLL_VECTORS                                                                      \
                    for (i = 0; i < wide; i++) add_terms(total, of_row + i * terms, t[i]);                   \
                    memcpy(sum + r * n + j, &total, sizeof(total));                                          \
                }                                                                                            \
            }                                                                                                \
    }
#define MTT__FEW_ALONG(name, element, load, value)                                                           \
    static void name(int64_t n, int64_t k, const float *x, const element *b, int64_t ldb, float *sum)        \
    {                                                                                                        \
        enum { run = 16, wide = sizeof(mtt__vector) / sizeof(float) };                                       \
        const int whole = n == ldb, even = n % wide == 0;                                                    \
        int64_t p, j;                                                                                        \
        mtt__vector v, row;                                                                                  \
        int i;                                                                                               \
        for (p = 0; p < k && whole && even; p++, b += ldb)                                                   \
            for (j = 0; j < n; j += wide) {                                                                  \
                memcpy(&v, sum + j, sizeof(v));                                                              \
                load(row, b + j);                                                                            \
                v = MTT__MULTIPLY_ADD(v, x[p], row);                                                         \
                memcpy(sum + j, &v, sizeof(v));                                                              \
            }                                                                                                \
        for (; p < k && (whole || !even || k % run); p++, b += ldb) {                                        \
            for (j = 0; j + wide <= n; j += wide) {                                                          \
                memcpy(&v, sum + j, sizeof(v));                                                              \
                load(row, b + j);                                                                            \
                v = MTT__MULTIPLY_ADD(v, x[p], row);                                                         \
                memcpy(sum + j, &v, sizeof(v));                                                              \
            }                                                                                                \
            for (; j < n; j++) sum[j] = MTT__ADD_PRODUCT(sum[j], x[p], value(b[j]));                         \
        }                                                                                                    \
        for (; p < k; p += run, b += run * ldb)                                                              \
            for (j = 0; j < n; j += wide) {                                                                  \
                memcpy(&v, sum + j, sizeof(v));                                                              \
                MTT__UNROLL_VECTORS                                                                          \
                for (i = 0; i < run; i++) {                                                                  \
                    load(row, b + i * ldb + j);                                                              \
                    v = MTT__MULTIPLY_ADD(v, x[p + i], row);                                                 \
                }                                                                                            \
                memcpy(sum + j, &v, sizeof(v));                                                              \
            }                                                                                                \
    }

/* Up to MTT__ROWS rows: each vector of B is read once for all of them. Rows that C lacks repeat the last. */
#define MTT__FEW_TOGETHER(name, element, load)                                                               \
    static void name(int64_t m, int64_t n, int64_t k, const float *x, int64_t ldx, const element *b,         \
                     int64_t ldb, float *sum)                                                                \
    {                                                                                                        \
        enum { wide = sizeof(mtt__vector) / sizeof(float) };                                                 \
        mtt__vector total[MTT__ROWS], row;                                                                   \
        const float *of_row[MTT__ROWS];                                                                      \
        int64_t j, p;                                                                                        \
        int r;                                                                                               \
        for (r = 0; r < MTT__ROWS; r++) of_row[r] = x + (r < m ? r : m - 1) * ldx;                           \
        for (j = 0; j < n; j += wide) {                                                                      \
            memset(total, 0, sizeof(total));                                                                 \
            for (p = 0; p < k; p++) {                                                                        \
                MTT__PREFETCH(b + p * ldb + j + 2 * wide);                                                   \
                load(row, b + p * ldb + j);                                                                  \
                MTT__UNROLL_ROWS                                                                             \
                for (r = 0; r < MTT__ROWS; r++) total[r] = MTT__MULTIPLY_ADD(total[r], of_row[r][p], row);   \
            }                                                                                                \
            for (r = 0; r < m; r++) memcpy(sum + r * n + j, &total[r], sizeof(total[r]));                    \
        }                                                                                                    \
    }

#if defined(__x86_64__) && defined(__FMA__)
#define MTT__ADD_PRODUCT(sum, x, y) fmaf(x, y, sum)
#else
#define MTT__ADD_PRODUCT(sum, x, y) ((sum) + (x) * (y))
#endif
#ifdef __clang__
#define MTT__UNROLL_VECTORS _Pragma("clang loop unroll(full)")
#define MTT__SHUFFLE(a, b, lanes, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MTT__UNROLL_VECTORS _Pragma("GCC unroll 16")
#define MTT__SHUFFLE(a, b, lanes, ...) __builtin_shuffle(a, b, __extension__(lanes){__VA_ARGS__})
#endif
#define MTT__PREFETCH(address) __builtin_prefetch(address, 0, 2)

#ifdef MTT__GNU
enum { MTT__ACROSS = sizeof(mtt__vector) / sizeof(float) };
typedef uint32_t mtt__words __attribute__((vector_size(sizeof(mtt__vector))));
typedef uint16_t mtt__halves __attribute__((vector_size(sizeof(mtt__vector) / 2)));

/* Elements of BF16 as floats. Of a conversion of vectors GCC makes five instructions. */
#if defined(__x86_64__) && defined(__AVX512F__)
#define MTT__TO_WORDS(halves) (mtt__words) _mm512_cvtepu16_epi32((__m256i)(halves))
#elif defined(__x86_64__) && defined(__AVX2__)
#define MTT__TO_WORDS(halves) (mtt__words) _mm256_cvtepu16_epi32((__m128i)(halves))
#else
#define MTT__TO_WORDS(halves) __builtin_convertvector(halves, mtt__words)
#endif
MTT__INLINE void mtt__load_bf16(mtt__vector *v, const uint16_t *from)
{
    mtt__halves halves;
    memcpy(&halves, from, sizeof(halves));
    *v = (mtt__vector)(MTT__TO_WORDS(halves) << 16);
}

/* The terms of the lower, then of the upper halves of words. */
#define MTT__ADD_TWO(sum, x, y)                                                                              \
    ((sum) = MTT__MULTIPLY_ADD(sum, (x)[0], (mtt__vector)((mtt__words)(y) << 16)),                           \
     (sum) = MTT__MULTIPLY_ADD(sum, (x)[1], (mtt__vector)((mtt__words)(y) & 0xffff0000u)))
#define MTT__ADD_ONE(sum, x, y) ((sum) = MTT__MULTIPLY_ADD(sum, *(x), y))
#define MTT__LOAD(v, from) memcpy(&(v), from, sizeof(v))
#define MTT__LOAD_BF16(v, from) mtt__load_bf16(&(v), from)
#define MTT__FLOAT(x) (x)
MTT__FEW_ACROSS(mtt__few_across, mtt__vector, MTT__LOW, MTT__HIGH, 1, MTT__ADD_ONE)
MTT__FEW_ACROSS(mtt__few_across_bf16, mtt__vector, MTT__LOW, MTT__HIGH, 2, MTT__ADD_TWO)
MTT__FEW_ALONG(mtt__few_along, float, MTT__LOAD, MTT__FLOAT)
MTT__FEW_ALONG(mtt__few_along_bf16, uint16_t, MTT__LOAD_BF16, mtt__from_bf16)
MTT__FEW_TOGETHER(mtt__few_together, float, MTT__LOAD)
MTT__FEW_TOGETHER(mtt__few_together_bf16, uint16_t, MTT__LOAD_BF16)
#else
enum { MTT__ACROSS = 0 }; /* no vectors */
#define mtt__few_across(m, n, k, x, ldx, b, ldb, sum) ((void)(b))
#define mtt__few_across_bf16(m, n, k, x, ldx, b, ldb, sum) ((void)(b))
#define mtt__few_along(n, k, x, b, ldb, sum) ((void)(b))
#define mtt__few_along_bf16(n, k, x, b, ldb, sum) ((void)(b))
#define mtt__few_together(m, n, k, x, ldx, b, ldb, sum) ((void)(b))
#define mtt__few_together_bf16(m, n, k, x, ldx, b, ldb, sum) ((void)(b))
#endif

/* Of words: x has k words, B rows of BF16, of which two make words. */
#ifdef MTT__PAIRS_CODE
#define MTT__ADD_PAIR(sum, x, y) ((sum) = MTT__PAIRS_ADD(sum, *(x), y))
MTT__PAIRS_CODE
MTT__FEW_ACROSS(mtt__few_across_pairs, mtt__pairs_vector, MTT__PAIRS_WORDS(LOW), MTT__PAIRS_WORDS(HIGH), 1,
                MTT__ADD_PAIR)
__attribute__((always_inline)) MTT__PAIRS_CODE
MTT__INLINE void mtt__few_along_words(int64_t n, int64_t k, const float *x, const uint16_t *b, int64_t ldb,
                                      float *sum, int words)
{
    enum { wide = sizeof(mtt__pairs_vector) / 2 };
    typedef uint16_t row __attribute__((vector_size(2 * wide)));
    int64_t p, j;
    row even, odd;
    int i;
    for (p = 0; p < k; p += words, b += 2 * words * ldb, x += words)
        for (j = 0; j < n; j += wide) {
            mtt__pairs_vector left, right;
            memcpy(&left, sum + j, sizeof(left));
            memcpy(&right, sum + j + wide / 2, sizeof(right));
            MTT__UNROLL_ROWS
            for (i = 0; i < words; i++) {
                if (words == 1) MTT__PREFETCH(b + 2 * (ldb + j)), MTT__PREFETCH(b + 2 * (ldb + j) + wide);
                memcpy(&even, b + 2 * i * ldb + j, sizeof(even));
                memcpy(&odd, b + (2 * i + 1) * ldb + j, sizeof(odd));
                left = MTT__PAIRS_ADD(left, x[i], MTT__SHUFFLE(even, odd, row, MTT__PAIRS_HALVES(LOW)));
                right = MTT__PAIRS_ADD(right, x[i], MTT__SHUFFLE(even, odd, row, MTT__PAIRS_HALVES(HIGH)));
            }
            memcpy(sum + j, &left, sizeof(left));
            memcpy(sum + j + wide / 2, &right, sizeof(right));
        }
}

MTT__PAIRS_CODE
static void mtt__few_along_pairs(int64_t n, int64_t k, const float *x, const uint16_t *b, int64_t ldb,
                                 float *sum)
{
    if (n == ldb || k % 8) mtt__few_along_words(n, k, x, b, ldb, sum, 1);
    else mtt__few_along_words(n, k, x, b, ldb, sum, 8);
}

MTT__PAIRS_CODE
static void mtt__few_together_pairs(int64_t m, int64_t n, int64_t k, const float *x, int64_t ldx,
                                    const uint16_t *b, int64_t ldb, float *sum)
{
    enum { wide = sizeof(mtt__pairs_vector) / 2, side = wide / 2 };
    typedef uint16_t row __attribute__((vector_size(2 * wide)));
    mtt__pairs_vector left[MTT__ROWS], right[MTT__ROWS];
    const float *of_row[MTT__ROWS];
    int64_t j, p;
    row even, odd, low, high;
    int r;
    for (r = 0; r < MTT__ROWS; r++) of_row[r] = x + (r < m ? r : m - 1) * ldx;
    for (j = 0; j < n; j += wide) {
        memset(left, 0, sizeof(left));
        memset(right, 0, sizeof(right));
        for (p = 0; p < k; p++) {
            MTT__PREFETCH(b + 2 * p * ldb + j + 2 * wide);
            MTT__PREFETCH(b + (2 * p + 1) * ldb + j + 2 * wide);
            memcpy(&even, b + 2 * p * ldb + j, sizeof(even));
            memcpy(&odd, b + (2 * p + 1) * ldb + j, sizeof(odd));
            low = MTT__SHUFFLE(even, odd, row, MTT__PAIRS_HALVES(LOW));
            high = MTT__SHUFFLE(even, odd, row, MTT__PAIRS_HALVES(HIGH));
            MTT__UNROLL_ROWS
            for (r = 0; r < MTT__ROWS; r++) {
                left[r] = MTT__PAIRS_ADD(left[r], of_row[r][p], low);
                right[r] = MTT__PAIRS_ADD(right[r], of_row[r][p], high);
            }
        }
        for (r = 0; r < m; r++) {
            memcpy(sum + r * n + j, &left[r], sizeof(left[r]));
            memcpy(sum + r * n + j + side, &right[r], sizeof(right[r]));
        }
    }
}
#else
#define mtt__few_across_pairs(m, n, k, x, ldx, b, ldb, sum) ((void)(b))
#define mtt__few_along_pairs(n, k, x, b, ldb, sum) ((void)(b))
#define mtt__few_together_pairs(m, n, k, x, ldx, b, ldb, sum) ((void)(b))
#endif

/* Adds up to DEPTH terms, from p up, for n columns, from j0 up, of C's rows i to i + m - 1. */
static void mtt__few_terms(const mtt__product *g, int64_t i, int64_t m, int64_t p, int64_t j0, int64_t n,
                           float *sum)
{
    int64_t k = mtt__min(MTT__DEPTH, g->a.m - p), at = g->b.first + p * g->b.row + j0 * g->b.column;
    int64_t ldb = g->b.row * g->b.column, first = g->a.first + i * g->a.column + p, ldx = g->a.column, r;
    int across = g->b.column != 1, half = g->b.t->dtype == MTT_BF16_BITS;
    int floats = g->pairs || g->a.t->dtype == MTT_F32;
    float terms[(int)MTT__ROWS * MTT__DEPTH];
    const float *x = floats ? (const float *)g->a.t->data + first : terms;
    const float *b = (const float *)g->b.t->data + at;
    const uint16_t *halves = (const uint16_t *)g->b.t->data + at;
    const float *words = (const float *)(const void *)halves;
    for (r = 0; r < m && !floats; r++) mtt__load(g->a.t, first + r * ldx, k, terms + r * MTT__DEPTH);
    if (!floats) ldx = MTT__DEPTH;
    memset(sum, 0, (size_t)(m * n) * sizeof(float));
    if (g->pairs && across) mtt__few_across_pairs(m, n, k, x, ldx, b, ldb, sum);
    else if (g->pairs && m > 1) mtt__few_together_pairs(m, n, k, x, ldx, halves + p * ldb, ldb, sum);
    else if (g->pairs) mtt__few_along_pairs(n, k, x, halves + p * ldb, ldb, sum);
    else if (half && across) mtt__few_across_bf16(m, n, k / 2, x, ldx, words, ldb / 2, sum);
    else if (half && m > 1) mtt__few_together_bf16(m, n, k, x, ldx, halves, ldb, sum);
    else if (half) mtt__few_along_bf16(n, k, x, halves, ldb, sum);
    else if (across) mtt__few_across(m, n, k, x, ldx, b, ldb, sum);
    else if (m > 1) mtt__few_together(m, n, k, x, ldx, b, ldb, sum);
    else mtt__few_along(n, k, x, b, ldb, sum);
}

/* n columns of C, from j0 up. */
static void mtt__few_columns(const mtt__product *g, int64_t j0, int64_t n)
{
    int64_t p, i, j, m;
    float *sum = mtt__tiles(g->op), *c = sum + MTT__ROWS * n;
    memset(c, 0, (size_t)(g->c.m * n) * sizeof(float));
    for (i = 0; i < g->c.m && g->bias; i++) mtt__load(g->bias, j0, n, c + i * n);
    for (p = 0; p < g->a.m; p += MTT__DEPTH)
        for (i = 0; i < g->c.m; i += m) {
            m = mtt__min(MTT__ROWS, g->c.m - i);
            mtt__few_terms(g, i, m, p, j0, n, sum);
            for (j = 0; j < m * n; j++) c[i * n + j] += sum[j];
        }
    for (i = 0; i < g->c.m; i++) mtt__store(g->c.t, g->c.first + i * g->c.row + j0, n, c + i * n);
}

/* Computes C's only row. Threads share B's rows, DEPTH at a time, so each reads long runs of memory: up to
   twice as fast as if they shared its columns. 0 = B has too few rows for all threads, or there are too many
   sums. */
static int mtt__few_panels(const mtt__product *g)
{
    enum { depth = MTT__DEPTH, space = 65536 };
    float *sums = mtt__tiles(g->op), *c = sums + space - g->c.n;
    int64_t n = g->c.n, threads = mtt__threads(), panels = mtt__ceil_div(g->a.m, depth), p, j;
    if (threads == 1 || panels < threads || (panels + 1) * n > space || n * g->a.m <= MTT__ALONE) return 0;
    MTT__OMP(omp parallel for schedule(dynamic, 1))
    for (p = 0; p < panels; p++) mtt__few_terms(g, 0, 1, p * depth, 0, n, sums + p * n);
    memset(c, 0, (size_t)n * sizeof(float));
    if (g->bias) mtt__load(g->bias, 0, n, c);
    for (p = 0; p < panels; p++)
        for (j = 0; j < n; j++) c[j] += sums[p * n + j];
    mtt__store(g->c.t, g->c.first, n, c);
    return 1;
}

/* 1 = done, 0 = C has too many rows, or the operands are of other types or widths. */
static int mtt__few_rows(const mtt__product *g)
{
    int across = g->b.column != 1, half = !g->pairs && g->b.t->dtype == MTT_BF16_BITS;
    int wide = g->pairs ? 16 : MTT__ACROSS;
    int64_t n = g->c.n, share = mtt__ceil_div(n, mtt__threads()), j0;
    int64_t columns = !across ? 192 : wide == 16 ? 16 : 64;
    if (!across && g->c.m == 1 && share > columns)
        columns = mtt__min(MTT__FEW_COLUMNS, mtt__round_up(share, 32));
    if (!across && g->c.m > 1) columns = mtt__round_up(mtt__ceil_div(share, mtt__ceil_div(share, 512)), 32);
    if (g->c.m > MTT__FEW_ROWS || g->add || g->scale != 1 || g->a.column == 1 || MTT__ACROSS == 0) return 0;
    if (g->b.t->dtype != MTT_F32 && g->b.t->dtype != MTT_BF16_BITS) return 0;
    if (across && (g->a.m % (half ? 2 * wide : wide) || n % wide)) return 0;
    if (across && half && (g->b.first | g->b.column) % 2) return 0;
    if (!across && g->pairs && n % 32) return 0;
    if (!across && g->c.m > 1 && n % wide) return 0;
    if (!across && g->c.m == 1 && mtt__few_panels(g)) return 1;
    MTT__OMP(omp parallel for schedule(dynamic, across ? share / (4 * columns) + 1 : 1)
                 if (n * g->a.m > MTT__ALONE))
    for (j0 = 0; j0 < n; j0 += columns) mtt__few_columns(g, j0, mtt__min(columns, n - j0));
    return 1;
}

/* ---- attention to a cache, and rows of a table ---- */

/* Counts the rows of a tile from row i up: neighbours in their sequence, up to a place that tiles of keys
   divide. So a row's bits do not depend on which rows are computed with it. 0 = row i is within a tile, or no
   token. */
static int64_t mtt__tile_rows(const mtt_op *op, const int32_t *sequences, const int32_t *places, int64_t i)
{
    int64_t n = 1;
    if (places[i] < 0) return 0;
    if (i && places[i] % MTT__TILE && sequences[i - 1] == sequences[i] && places[i - 1] == places[i] - 1)
        return 0;
    while (i + n < op->shape->rows && (places[i] + n) % MTT__TILE && sequences[i + n] == sequences[i] &&
           places[i + n] == places[i] + n)
        n++;
    return n;
}

/* The products of a few queries. Keys of a cache are contiguous, so they are multiplied as few rows, with the
   same bits. That takes half the time: keys are not transposed, and no rows of zeros are multiplied. */
static void mtt__few_scores(const mtt__attention_tile *t, int64_t dim, int64_t j0, int64_t n,
                            mtt__attention_tiles *a)
{
    int64_t columns = mtt__round_up(n, MTT__ACROSS), i;
    mtt__load(t->k_t.t, t->k_t.first + j0 * dim, n * dim, a->k);
    for (i = 0; i < t->m; i++)
        mtt__few_across(1, columns, dim, a->q + i * MTT__MAX_HEAD, 0, a->k, dim, a->s + i * MTT__TILE);
}

static void mtt__few_values(const mtt__attention_tile *t, int64_t dim, int64_t j0, int64_t n,
                            mtt__attention_tiles *a)
{
    int64_t i, j;
    mtt__load(t->v.t, t->v.first + j0 * dim, n * dim, a->v);
    for (i = 0; i < t->m; i++) {
        float sum[MTT__MAX_HEAD] = {0};
        mtt__few_along(dim, n, a->s + i * MTT__TILE, a->v, dim, sum);
        for (j = 0; j < dim; j++) a->o[i * MTT__MAX_HEAD + j] += sum[j];
    }
}

/* k and v of each row into the cache; then flash attention with the keys and values there */
static void mtt__cpu_cached_attention(const mtt_op *op, const mtt_op_cached_attention *o)
{
    const mtt_shape *d = op->shape;
    const int32_t *sequences = (const int32_t *)o->sequences->data;
    const int32_t *places = (const int32_t *)o->places->data;
    mtt_qkv qkv = mtt_qkv_of(d);
    int64_t dim = d->d_head, context = o->keys->shape[1], groups = d->heads_kv, across = MTT__ACROSS, i, job;
    size_t size = mtt__bytes_of(o->qkv->dtype, 1), row = size * (size_t)qkv.row;
    for (i = 0; i < d->rows; i++) {
        const char *from = (const char *)o->qkv->data + (size_t)i * row;
        int head;
        if (places[i] < 0) memset((char *)o->out->data + size * (size_t)(i * d->heads * dim), 0,
                                  size * (size_t)(d->heads * dim));
        for (head = 0; head < groups && places[i] >= 0; head++) {
            size_t at = size * (size_t)(((sequences[i] * groups + head) * context + places[i]) * dim);
            int query = head * (d->heads / d->heads_kv);
            memcpy((char *)o->keys->data + at,
                   from + size * (size_t)mtt_qkv_column(&qkv, MTT__K, query), size * (size_t)dim);
            memcpy((char *)o->values->data + at,
                   from + size * (size_t)mtt_qkv_column(&qkv, MTT__V, query), size * (size_t)dim);
        }
    }
    MTT__OMP(omp parallel for schedule(dynamic, 1) if (d->rows * d->heads * dim * (*places + 1) > MTT__ALONE))
    for (job = 0; job < d->rows * d->heads; job++) {
        int64_t at = job / d->heads, head = job % d->heads, m = mtt__tile_rows(op, sequences, places, at);
        int64_t kv = sequences[at] * groups + head / (d->heads / groups);
        mtt__attention_tile t = {mtt__head(op, o->qkv, MTT__Q, head),
                                 mtt__matrix_at(o->keys, kv * context * dim, context, dim, 1),
                                 mtt__matrix_at(o->values, kv * context * dim, context, dim, 0),
                                 mtt__head(op, o->out, MTT__OUT, head), at, m, places[at], places[at] + m,
                                 NULL, 0, NULL};
        int few = m <= MTT__FEW_QUERIES && across && dim % across == 0;
        if (few && m) mtt__attend(op, &t, mtt__few_scores, mtt__few_values);
        else if (m) mtt__attend(op, &t, mtt__tile_scores, mtt__tile_values);
    }
}

/* y[i] = x[index[i]], or 0 */
static void mtt__cpu_gather(const mtt_op *op, const mtt_op_gather *o)
{
    const int32_t *index = (const int32_t *)o->index->data;
    size_t bytes = o->y->bytes / (size_t)o->y->shape[0];
    int64_t i;
    (void)op;
    for (i = 0; i < o->y->shape[0]; i++)
        if (index[i] < 0) memset((char *)o->y->data + (size_t)i * bytes, 0, bytes);
        else
            memcpy((char *)o->y->data + (size_t)i * bytes,
                   (const char *)o->x->data + (size_t)index[i] * bytes, bytes);
}

/* ---- the choice of an id ---- */

/* Returns the weight of a row's first `count` ids, or without a scale their number, of those whose logits are
   not before `least` in order. */
static uint64_t mtt__choice_mass(const mtt_tensor *logits, int64_t first, int64_t count, uint32_t least,
                                 float most, float scale)
{
    float buffer[MTT__BLOCK];
    uint64_t mass = 0;
    int64_t at, n, k;
    MTT__BLOCKS(at, n, first, first + count) {
        const float *x = mtt__read(logits, at, n, buffer);
        if (scale > 0)
            for (k = 0; k < n; k++)
                mass += mtt__order(x[k]) >= least ? mtt__choice_weight(most, x[k], scale) : 0;
        else
            for (k = 0; k < n; k++) mass += mtt__order(x[k]) >= least;
    }
    return mass;
}

/* Finds the last place in order, from `least` up, that leaves a mass of `wanted`. Bisection needs no
   memory. */
static uint32_t mtt__choice_least(const mtt_tensor *logits, int64_t first, int64_t count, uint32_t least,
                                  float most, float scale, double wanted)
{
    uint32_t end = mtt__order(most) + 1;
    while (end - least > 1) {
        uint32_t middle = least + (end - least) / 2;
        double mass = (double)mtt__choice_mass(logits, first, count, middle, most, scale);
        if (mass < wanted) end = middle;
        else least = middle;
        if (mass >= wanted && mass <= wanted) break;
    }
    return least;
}

/* Takes an id from the row of logits that begins at element `first`. */
static mtt_chosen mtt__choose_in_row(const mtt_tensor *logits, int64_t first, const mtt_choice *c)
{
    mtt_chosen chosen = {-1, 0};
    float buffer[MTT__BLOCK], most;
    uint32_t top = 0, least = 1, floor_order;
    uint64_t mass, target;
    int64_t end = first + c->count, at, n, k;
    if (c->count < 1) return chosen;
    MTT__BLOCKS(at, n, first, end) {
        const float *x = mtt__read(logits, at, n, buffer);
        for (k = 0; k < n; k++) top = mtt__order(x[k]) > top ? mtt__order(x[k]) : top;
    }
    mtt__load(logits, first, 1, &most);
    if (!mtt__order(most)) top = 0; /* a NaN is taken if it comes first, and so noticed */
    MTT__BLOCKS(at, n, first, end) {
        const float *x = mtt__read(logits, at, n, buffer);
        for (k = 0; k < n && mtt__order(x[k]) != top; k++) {}
        if (k < n) break;
    }
    most = chosen.logit = mtt__read(logits, at, n, buffer)[k];
    chosen.id = (int32_t)(at + k - first);
    if (!(c->scale > 0) || !mtt__finite((double)most)) return chosen;
    if (c->top_k > 0 && c->top_k < c->count)
        least = mtt__choice_least(logits, first, c->count, least, most, 0, c->top_k);
    mass = mtt__choice_mass(logits, first, c->count, least, most, c->scale);
    if (c->top_p > 0 && c->top_p < 1) {
        least = mtt__choice_least(logits, first, c->count, least, most, c->scale,
                                  (double)c->top_p * (double)mass);
        mass = mtt__choice_mass(logits, first, c->count, least, most, c->scale);
    }
    floor_order = mtt__order(most - c->below);
    if (floor_order > least) {
        least = floor_order;
        mass = mtt__choice_mass(logits, first, c->count, least, most, c->scale);
    }
    target = (uint64_t)((double)mass * c->place);
    if (target >= mass) target = mass - 1; /* the product was rounded up */
    MTT__BLOCKS(at, n, first, end) {
        const float *x = mtt__read(logits, at, n, buffer);
        for (k = 0; k < n; k++) {
            uint32_t weight = mtt__order(x[k]) < least ? 0 : mtt__choice_weight(most, x[k], c->scale);
            chosen.id = (int32_t)(at + k - first);
            chosen.logit = x[k];
            if (target < weight) return chosen;
            target -= weight;
        }
    }
    return chosen;
}

static void mtt__cpu_choose_id(const mtt_op *op, const mtt_op_choose_id *o)
{
    int64_t rows = mtt__rows(o->logits), width = mtt__width(o->logits), row;
    (void)op;
    MTT__THREADS(rows * width)
    for (row = 0; row < rows; row++)
        ((mtt_chosen *)o->chosen->data)[row] =
            mtt__choose_in_row(o->logits, row * width, (const mtt_choice *)o->choices->data + row);
}

/* ---- drawing ids, and the text of a sequence ---- */

/* How to draw an id from the first `count`. */
static mtt_choice mtt__choice(const mtt_sampling *s, int count, uint64_t index)
{
    double temperature = (double)s->temperature, halving = 24204406.3231; /* 2^24 / ln 2 */
    mtt_choice c = {0, 0, 0, 3e38f, 0, 0, 0};
    c.count = count;
    if (!(temperature > 0)) return c;
    c.place = mtt__random_uniform(s->seed, mtt__stream(MTT__SITE_SAMPLE, 0, 0), index);
    c.scale = (float)fmin(halving / temperature, 3e38);
    c.top_p = s->top_p;
    c.top_k = s->top_k;
    if (s->min_p > 0) c.below = (float)(-temperature * log(s->min_p < 1 ? (double)s->min_p : 1));
    return c;
}

static mtt_chosen mtt__choose_from(const float *logits, const mtt_choice *choice)
{
    mtt_tensor row;
    memset(&row, 0, sizeof(row));
    row.dtype = MTT_F32;
    row.data = (void *)(uintptr_t)logits;
    return mtt__choose_in_row(&row, 0, choice);
}

MTTDEF int32_t mtt_sample(const float *logits, int vocab, const mtt_sampling *s, uint64_t index)
{
    mtt_choice choice = mtt__choice(s, vocab, index);
    return mtt__choose_from(logits, &choice).id;
}

/* A sequence while its text is generated: `place` ids from `first` up are in the cache. */
typedef struct mtt__sequence {
    int number;  /* of its prompt; -1 = none */
    int32_t *ids;
    size_t ids_capacity, held_capacity, held; /* bytes of text that may begin a stop string */
    char *text;
    unsigned char *seen; /* 1 = the id is in the prompt or the text; NULL without a repetition penalty */
    int known, drawn, first, place;
} mtt__sequence;

static void mtt__free_sequence(mtt_env *env, mtt__sequence *q)
{
    mtt__free(env, q->ids);
    mtt__free(env, q->text);
    mtt__free(env, q->seen);
}

static mtt_status mtt__add_ids(mtt_env *env, mtt__sequence *q, const int32_t *ids, int count)
{
    size_t most = mtt__add((size_t)q->known, (size_t)count);
    int i;
    if (most > INT_MAX) return mtt__fail(env, MTT_E_ARGUMENT, "a text has at most 2^31 - 1 ids");
    if (mtt__reserve(env, (void **)&q->ids, &q->ids_capacity, most, sizeof(*ids))) return MTT_E_MEMORY;
    for (i = 0; i < count; i++) {
        q->ids[q->known++] = ids[i];
        if (q->seen) q->seen[ids[i]] = 1;
    }
    return MTT_OK;
}

/* Points to the ids of a prompt, and returns their number. */
static int mtt__prompt(const mtt_tokenizer *tokenizer, const mtt_generation *g, int number, int32_t *end,
                       const int32_t **ids)
{
    *end = tokenizer ? mtt_tokenizer_end_of_text(tokenizer) : 0;
    *ids = g->sizes[number] ? g->prompts[number] : end;
    return g->sizes[number] ? g->sizes[number] : 1;
}

/* Checks a task before anything is drawn. `most`: ids of the longest prompt that is allowed. */
static mtt_status mtt__generation_check(mtt_env *env, const mtt_tokenizer *tokenizer, const mtt_generation *g,
                                        int vocab, int most)
{
    const mtt_sampling *s = &g->sampling;
    const char *missing = NULL;
    const int32_t *ids;
    mtt__faults faults;
    int32_t end;
    int i, k, count;
    mtt__faults_init(&faults, env);
    mtt__in_range(&faults, "temperature", (double)s->temperature, 0, 1e30);
    mtt__in_range(&faults, "top_k", s->top_k, 0, INT_MAX);
    mtt__in_range(&faults, "top_p", (double)s->top_p, 0, 1);
    mtt__in_range(&faults, "min_p", (double)s->min_p, 0, 1);
    if (s->repetition_penalty != 0)
        mtt__in_range(&faults, "repetition_penalty", (double)s->repetition_penalty, 1e-6, 1e6);
    mtt__in_range(&faults, "full_context", g->full_context, MTT_CONTEXT_SLIDE, MTT_CONTEXT_STOP);
    if (tokenizer) mtt__in_range(&faults, "ids of the tokenizer", mtt_tokenizer_vocab(tokenizer), 1, vocab);
    if (faults.count) return MTT_E_ARGUMENT;
    if (g->count < 0 || g->prompt_count < 0 || g->stop_count < 0 || g->stop_id_count < 0)
        return mtt__fail(env, MTT_E_ARGUMENT, "count is %d, prompt_count %d, stop_count %d and stop_id_count "
                         "%d, they must not be negative", g->count, g->prompt_count, g->stop_count,
                         g->stop_id_count);
    if (g->stop_count && !g->stops) missing = "stops";
    if (g->stop_id_count && !g->stop_ids) missing = "stop_ids";
    if (g->prompt_count && !g->sizes) missing = "sizes";
    if (g->prompt_count && !g->prompts) missing = "texts and no prompts";
    if (!g->write && g->count) missing = "write";
    if (missing) return mtt__fail(env, MTT_E_ARGUMENT, "the generation has no %s: set it", missing);
    if (g->stop_count && !tokenizer)
        return mtt__fail(env, MTT_E_ARGUMENT, "stop strings need a tokenizer");
    for (i = 0; i < g->stop_count; i++)
        if (!g->stops[i] || !g->stops[i][0])
            return mtt__fail(env, MTT_E_ARGUMENT, "stop string %d is empty", i);
    for (i = 0; i < g->prompt_count; i++) {
        if (g->sizes[i] < !tokenizer)
            return mtt__fail(env, MTT_E_ARGUMENT, "prompt %d has %d ids, it needs at least one", i,
                             g->sizes[i]);
        if (g->sizes[i] && !g->prompts[i])
            return mtt__fail(env, MTT_E_ARGUMENT, "prompts has no prompt %d", i);
        count = mtt__prompt(tokenizer, g, i, &end, &ids);
        if (count > most)
            return mtt__fail(env, MTT_E_ARGUMENT, "prompt %d has %d ids, the context %d: raise it, or let it "
                             "slide", i, count, most);
        for (k = 0; k < count; k++)
            if (ids[k] < 0 || ids[k] >= vocab)
                return mtt__fail(env, MTT_E_ARGUMENT, "prompt %d has id %lld, the vocabulary has 0 to %d: "
                                 "was it encoded with another tokenizer?", i, (long long)ids[k], vocab - 1);
    }
    return MTT_OK;
}

static mtt_status mtt__begin_sequence(mtt_env *env, const mtt_tokenizer *tokenizer, const mtt_generation *g,
                                      int vocab, int number, mtt__sequence *q)
{
    const int32_t *ids;
    int32_t end;
    int count = mtt__prompt(tokenizer, g, number, &end, &ids);
    float penalty = g->sampling.repetition_penalty;
    if (penalty > 0 && !q->seen && !(q->seen = (unsigned char *)mtt__alloc(env, (size_t)vocab, 1)))
        return MTT_E_MEMORY;
    if (q->seen) memset(q->seen, 0, (size_t)vocab);
    q->number = number;
    q->known = q->drawn = q->first = q->place = 0;
    q->held = 0;
    return mtt__add_ids(env, q, ids, count);
}

/* Ends a sequence, and hands out the text that waited. */
static mtt_status mtt__end_sequence(const mtt_generation *g, mtt__sequence *q)
{
    int number = q->number;
    q->number = -1;
    return g->write(g->user, number, -1, q->text, q->held) ? MTT_END : MTT_OK;
}

/* Returns where the first stop string begins, in whole or with what is known of it; `count`: nowhere. */
static size_t mtt__stop_begins(const mtt_generation *g, const char *text, size_t count, int in_whole)
{
    size_t at, size;
    int i;
    for (at = 0; at < count; at++)
        for (i = 0; i < g->stop_count; i++) {
            size = strlen(g->stops[i]);
            if (in_whole && size > count - at) continue;
            if (!memcmp(text + at, g->stops[i], size < count - at ? size : count - at)) return at;
        }
    return count;
}

/* Hands out an id, and the text before a stop string or what may become one. *stopped is 1 at a stop string:
   one that is there in whole ends the text, even inside of what may become another. */
static mtt_status mtt__hand_out(const mtt_generation *g, mtt__sequence *q, int32_t id, int *stopped)
{
    size_t at = mtt__stop_begins(g, q->text, q->held, 1);
    int ends;
    *stopped = at < q->held;
    if (!*stopped) at = mtt__stop_begins(g, q->text, q->held, 0);
    ends = g->write(g->user, q->number, id, q->text, at);
    q->held -= at;
    memmove(q->text, q->text + at, q->held);
    return ends ? MTT_END : MTT_OK;
}

/* How to draw the next id of a sequence. A padded model has ids that have no text: those are not drawn. */
static mtt_choice mtt__next_choice(const mtt_tokenizer *tokenizer, const mtt_generation *g, int vocab,
                                   const mtt__sequence *q)
{
    mtt_sampling sampling = g->sampling;
    sampling.seed += (uint64_t)q->number;
    return mtt__choice(&sampling, tokenizer ? mtt_tokenizer_vocab(tokenizer) : vocab, (uint64_t)q->drawn);
}

/* Draws from logits on the host, which the repetition penalty changes before. */
static mtt_chosen mtt__draw_id(const mtt_choice *choice, const mtt_generation *g, int vocab, float *logits,
                               const mtt__sequence *q)
{
    float penalty = g->sampling.repetition_penalty;
    int i;
    for (i = 0; i < vocab && q->seen; i++)
        if (q->seen[i]) logits[i] = logits[i] > 0 ? logits[i] / penalty : logits[i] * penalty;
    return mtt__choose_from(logits, choice);
}

/* Adds a drawn id to its sequence, and hands it out. At the end of the sequence its number becomes -1. */
static mtt_status mtt__take_id(mtt_env *env, const mtt_tokenizer *tokenizer, const mtt_generation *g,
                               const mtt_chosen *chosen, mtt__sequence *q)
{
    const char *text;
    size_t bytes = 0;
    mtt_status status;
    int32_t id = chosen->id;
    int i, ends;
    if (!mtt__finite((double)chosen->logit))
        return mtt__fail(env, MTT_E_NUMBERS, "the logit of id %d is %g: take weights that are finite, not "
                         "too large for their precision", (int)id, (double)chosen->logit);
    ends = tokenizer && id == mtt_tokenizer_end_of_text(tokenizer);
    for (i = 0; i < g->stop_id_count; i++) ends |= id == g->stop_ids[i];
    if (!ends) {
        status = mtt__add_ids(env, q, &id, 1);
        text = tokenizer ? mtt_tokenizer_bytes(tokenizer, id, &bytes) : NULL;
        if (!status)
            status = mtt__reserve(env, (void **)&q->text, &q->held_capacity, mtt__add(q->held, bytes) + 1, 1);
        if (status) return status;
        if (text) memcpy(q->text + q->held, text, bytes), q->held += bytes;
        status = mtt__hand_out(g, q, id, &ends);
        if (status) return status;
        if (ends) q->held = 0;
        ends |= ++q->drawn >= g->count;
    }
    return ends ? mtt__end_sequence(g, q) : MTT_OK;
}

/* Encodes prompts that are texts. The ids are in the pool. */
static mtt_status mtt__encode_texts(mtt_env *env, mtt_tokenizer *tokenizer, mtt_generation *g,
                                    mtt__pool *pool)
{
    size_t all = g->texts && g->prompt_count > 0 ? (size_t)g->prompt_count : 0, i, count;
    const int32_t **prompts;
    int *sizes;
    mtt_status status = MTT_OK;
    if (!all) return MTT_OK;
    if (!tokenizer) return mtt__fail(env, MTT_E_ARGUMENT, "prompts that are texts need a tokenizer");
    prompts = (const int32_t **)mtt__pool_take(env, pool, mtt__mul(all, sizeof(*prompts)));
    sizes = (int *)mtt__pool_take(env, pool, mtt__mul(all, sizeof(*sizes)));
    if (!prompts || !sizes) return MTT_E_MEMORY;
    for (i = 0; i < all; i++)
        if (!g->texts[i]) return mtt__fail(env, MTT_E_ARGUMENT, "texts has no text %d", (int)i);
    for (i = 0; i < all && !status; i++) {
        size_t bytes = strlen(g->texts[i]), most = mtt__add(mtt__mul(bytes, 3), 1);
        int32_t *ids = (int32_t *)mtt__pool_take(env, pool, mtt__mul(most, sizeof(*ids)));
        if (!ids) return MTT_E_MEMORY;
        status = mtt_encode_prompt(tokenizer, g->texts[i], bytes, ids, most, &count);
        if (!status && count > INT_MAX)
            status = mtt__fail(env, MTT_E_ARGUMENT, "a text has at most 2^31 - 1 ids");
        prompts[i] = ids;
        sizes[i] = status ? 0 : (int)count;
    }
    g->prompts = prompts;
    g->sizes = sizes;
    return status;
}

MTTDEF mtt_status mtt_generate(mtt_trainer *trainer, mtt_tokenizer *tokenizer,
                               const mtt_generation *generation)
{
    mtt_env *env = trainer->env;
    int vocab = trainer->schedule->model.vocab, next, seq_len = trainer->schedule->seq_len;
    int stops = generation->full_context == MTT_CONTEXT_STOP;
    float *logits = (float *)mtt__alloc(env, (size_t)vocab, sizeof(*logits));
    mtt_generation g = *generation;
    mtt__pool pool = {NULL};
    mtt__sequence q;
    mtt_status status = logits ? mtt__encode_texts(env, tokenizer, &g, &pool) : MTT_E_MEMORY;
    memset(&q, 0, sizeof(q));
    if (!status) status = mtt__generation_check(env, tokenizer, &g, vocab, stops ? seq_len : INT_MAX);
    for (next = 0; !status && next < g.prompt_count && g.count > 0; next++) {
        status = mtt__begin_sequence(env, tokenizer, &g, vocab, next, &q);
        while (!status && q.number >= 0) {
            mtt_choice choice = mtt__next_choice(tokenizer, &g, vocab, &q);
            mtt_chosen chosen = {-1, 0};
            status = mtt_next_logits(trainer, q.ids, q.known, logits);
            if (!status) chosen = mtt__draw_id(&choice, &g, vocab, logits, &q);
            if (!status) status = mtt__take_id(env, tokenizer, &g, &chosen, &q);
            if (!status && q.number >= 0 && stops && q.known > seq_len) status = mtt__end_sequence(&g, &q);
        }
    }
    mtt__free_sequence(env, &q);
    mtt__free(env, logits);
    mtt__pool_free(env, &pool);
    return status;
}

/* ---- a cache, and passes over it ---- */

/* Makes the schedule of a generator. */
static mtt_status mtt__generation_init(mtt_schedule *s, mtt_env *env, const mtt_model_desc *model,
                                       const mtt_generator_desc *desc, mtt_device device)
{
    int chunk = desc->chunk ? desc->chunk : 256;
    mtt_policy policy;
    mtt_status status;
    memset(s, 0, sizeof(*s));
    memset(&policy, 0, sizeof(policy));
    policy.precision = desc->precision;
    policy.window = desc->window;
    policy.attention = MTT_ATTENTION_FLASH;
    policy.device = device;
    s->env = env;
    s->split = 1;
    s->batch = desc->batch ? desc->batch : 1;
    if (desc->precision != MTT_FP32 && desc->precision != MTT_BF16)
        return mtt__fail(env, MTT_E_ARGUMENT, "precision is %s, a generator computes in fp32 or bf16: take "
                         "bf16, whatever the weights were trained in",
                         (unsigned)desc->precision > MTT_FP8 ? "?" : mtt__precisions[desc->precision].name);
    if (chunk < 1 || chunk > 1 << 20)
        return mtt__fail(env, MTT_E_ARGUMENT, "chunk is %d, it must be 1 to %d", chunk, 1 << 20);
    if (desc->context < 0 || desc->context > 1 << 20)
        return mtt__fail(env, MTT_E_ARGUMENT, "context is %d, it must be 1 to %d", desc->context, 1 << 20);
    status = mtt_model_resolve(env, model, &s->model);
    s->seq_len = desc->context ? desc->context : s->model.max_seq;
    if (!status && s->model.positions == MTT_POSITIONS_LEARNED && s->seq_len > s->model.max_seq)
        status = mtt__fail(env, MTT_E_ARGUMENT, "context is %d, but learned positions end at max_seq %d: "
                           "lower the context", s->seq_len, s->model.max_seq);
    s->chunk = chunk > s->batch ? chunk : s->batch;
    if (!status) status = mtt_policy_resolve(env, &policy, &s->model, s->batch, s->seq_len, &s->policy);
    if (!status) status = mtt__build(s, 0, 0, SIZE_MAX);
    if (status) mtt__release_programs(s);
    return status;
}

MTTDEF mtt_status mtt_generator_plan(mtt_env *env, const mtt_model_desc *model,
                                     const mtt_generator_desc *desc, mtt_plan_report *report)
{
    mtt_schedule s;
    mtt_status status = mtt__generation_init(&s, env, model, desc, desc->device);
    if (status) return status;
    mtt_schedule_report(&s, report);
    mtt__release_programs(&s);
    return MTT_OK;
}

/* A generator is a trainer whose schedule has no backward pass, no optimizer and no counters: its first
   program passes over a chunk of prompts, its second one computes a token of each sequence. Rows of a program
   are tokens of any sequences, at any places. The cache has `context` places for each sequence, of which the
   first `lengths` are in use; what is behind them is never read. The device chooses the next ids, so that a
   step brings a few bytes of each sequence to the host. Only a repetition penalty needs the logits there. */
struct mtt_generator {
    mtt_trainer trainer;
    mtt_schedule schedule;
    int *lengths;
    char *feed; /* what a pass reads, as it lies in the arena: the next five */
    int32_t *tokens, *sequences, *places, *last; /* last: the row of each sequence's last token */
    mtt_choice *choices;
    mtt_chosen *chosen, *arrived; /* of the last pass of each sequence; of a pass */
    void *logits;                 /* all of a pass, in the device's type */
};

/* The tensors that a pass reads. */
enum { MTT__FEEDS = 5 };

static void mtt__list_feeds(const mtt__program *p, const mtt_tensor *feeds[MTT__FEEDS])
{
    feeds[0] = p->tokens, feeds[1] = p->sequences, feeds[2] = p->places, feeds[3] = p->last;
    feeds[4] = p->choices;
}

MTTDEF void mtt_generator_destroy(mtt_generator *g)
{
    if (!g) return;
    if (g->trainer.opened) {
        mtt__unbind(&g->trainer);
        g->trainer.backend.close(g->trainer.context);
    }
    mtt__release_programs(&g->schedule);
    mtt__free(g->trainer.env, g->trainer.staging);
    mtt__free(g->trainer.env, g->logits);
    mtt__free(g->trainer.env, g->chosen);
    mtt__free(g->trainer.env, g->feed);
    mtt__free(g->trainer.env, g->lengths);
    mtt__free(g->trainer.env, g);
}

/* Takes the host's memory of a generator. */
static mtt_status mtt__generator_memory(mtt_generator *g)
{
    const mtt__program *p = &g->schedule.programs[MTT__CHUNK];
    const mtt_tensor *feeds[MTT__FEEDS];
    mtt_trainer *t = &g->trainer;
    size_t batch = (size_t)g->schedule.batch, at[MTT__FEEDS], all = 0;
    int i;
    mtt__list_feeds(p, feeds);
    for (i = 0; i < MTT__FEEDS; i++) at[i] = all, all = mtt__add(all, mtt__slot_bytes(feeds[i]));
    if (!(t->staging = (float *)mtt__alloc(t->env, 2 * MTT__STAGING, sizeof(float))) ||
        !(g->lengths = (int *)mtt__alloc(t->env, batch, sizeof(int))) ||
        !(g->chosen = (mtt_chosen *)mtt__alloc(t->env, 2 * batch, sizeof(mtt_chosen))) ||
        !(g->logits = mtt__alloc(t->env, p->output->bytes, 1)) ||
        !(g->feed = (char *)mtt__alloc(t->env, all, 1)))
        return MTT_E_MEMORY;
    t->values = t->staging + MTT__STAGING;
    g->arrived = g->chosen + batch;
    g->tokens = (int32_t *)(void *)(g->feed + at[0]);
    g->sequences = (int32_t *)(void *)(g->feed + at[1]);
    g->places = (int32_t *)(void *)(g->feed + at[2]);
    g->last = (int32_t *)(void *)(g->feed + at[3]);
    g->choices = (mtt_choice *)(void *)(g->feed + at[4]);
    return MTT_OK;
}

MTTDEF mtt_status mtt_generator_create(mtt_env *env, const mtt_model_desc *model,
                                       const mtt_generator_desc *desc, const mtt_backend *backend,
                                       mtt_generator **out)
{
    mtt_generator *g = (mtt_generator *)mtt__alloc(env, 1, sizeof(*g));
    mtt_trainer *t;
    size_t all_bytes;
    mtt_status status;
    *out = NULL;
    if (!g) return MTT_E_MEMORY;
    t = &g->trainer;
    t->env = env;
    t->backend = *backend;
    t->backend.ranks = NULL;
    t->schedule = &g->schedule;
    status = mtt__check_backend(env, backend);
    if (!status) status = mtt__generation_init(&g->schedule, env, model, desc, backend->device);
    if (!status) status = mtt__generator_memory(g);
    if (!status) status = backend->open(env, &t->backend, &g->schedule.policy, &t->context);
    t->opened = !status;
    if (!status) status = backend->memory(t->context, &t->free_before, &all_bytes);
    if (!status) status = mtt__bind(t);
    if (!status) status = mtt__fill_tables(t);
    if (!status) *out = g;
    else mtt_generator_destroy(g);
    return status;
}

MTTDEF mtt_trainer *mtt_generator_trainer(mtt_generator *g)
{
    return &g->trainer;
}

MTTDEF mtt_status mtt_generator_cut(mtt_generator *g, int sequence, int length)
{
    if (sequence < 0 || sequence >= g->schedule.batch || length < 0)
        return mtt__fail(g->trainer.env, MTT_E_ARGUMENT, "sequence %d to %d tokens: sequences are 0 to %d",
                         sequence, length, g->schedule.batch - 1);
    if (length < g->lengths[sequence]) g->lengths[sequence] = length;
    return MTT_OK;
}

/* Uploads what a pass reads. Neighbours go in one copy, which is all of it in an arena. */
static mtt_status mtt__feed(mtt_generator *g, const mtt__program *p)
{
    const mtt_tensor *feeds[MTT__FEEDS];
    const char *from = g->feed;
    mtt_status status = MTT_OK;
    int i, next;
    mtt__list_feeds(p, feeds);
    for (i = 0; i < MTT__FEEDS && !status; i = next) {
        size_t bytes = 0;
        next = i;
        do bytes += mtt__slot_bytes(feeds[next++]);
        while (!MTT__SEPARATE && next < MTT__FEEDS &&
               (char *)feeds[i]->data + bytes == (char *)feeds[next]->data);
        status = mtt__copy(&g->trainer, MTT__PUT, feeds[i]->data, (void *)(uintptr_t)from,
                           bytes - mtt__slot_bytes(feeds[next - 1]) + feeds[next - 1]->bytes);
        from += bytes;
    }
    return status;
}

/* Fetches the logits of the sequences from `first` to before `end` in one copy, and widens those that end in
   the pass. */
static mtt_status mtt__fetch_logits(mtt_generator *g, const mtt__program *p, int first, int end,
                                    float *logits)
{
    mtt_tensor all = *p->output, some = mtt__row_range(p->output, first, end - first);
    int64_t vocab = g->schedule.model.vocab, width = p->shape.vocab_padded, i;
    mtt_status status;
    all.data = g->logits;
    status = mtt__copy(&g->trainer, MTT__GET, some.data, mtt__row_range(&all, first, end - first).data,
                       some.bytes);
    if (status) return status;
    MTT__THREADS((end - first) * vocab)
    for (i = first; i < end; i++)
        if (g->last[i] >= 0) mtt__load(&all, i * width, vocab, logits + i * vocab);
    return MTT_OK;
}

/* Runs a program over the first rows of the pass. Of the sequences that end in it, fetches the logits, or
   without room for these the chosen ids. */
static mtt_status mtt__pass(mtt_generator *g, int which, int rows, float *logits)
{
    const mtt__program *p = &g->schedule.programs[which];
    mtt_trainer *t = &g->trainer;
    mtt_status status;
    int first = g->schedule.batch, end = 0, i;
    for (; rows < p->shape.rows; rows++) g->tokens[rows] = g->sequences[rows] = 0, g->places[rows] = -1;
    for (i = 0; i < g->schedule.batch; i++)
        if (g->last[i] < 0) g->choices[i].count = 0;
        else first = i < first ? i : first, end = i + 1;
    status = mtt__feed(g, p);
    if (!status) status = mtt__told(t, t->backend.run(t->context, p->ops, p->op_count));
    if (status || first >= end) return status;
    if (logits) return mtt__fetch_logits(g, p, first, end, logits);
    status = mtt__copy(t, MTT__GET, p->chosen->data, g->arrived, p->chosen->bytes);
    for (i = first; i < end && !status; i++)
        if (g->last[i] >= 0) g->chosen[i] = g->arrived[i];
    return status;
}

/* Appends tokens to sequences. Then `logits` has those of the next token, or if it is NULL g->chosen has the
   next ids, as `choices` say. */
static mtt_status mtt__append_tokens(mtt_generator *g, const int32_t *const *tokens, const int *counts,
                                     const mtt_choice *choices, float *logits)
{
    int batch = g->schedule.batch, context = g->schedule.seq_len, most = 0, rows = 0, i, k;
    mtt_status status = MTT_OK;
    for (i = 0; i < batch && !status; i++) {
        most = counts[i] > most ? counts[i] : most;
        if (counts[i] < 0 || counts[i] > context - g->lengths[i])
            return mtt__fail(g->trainer.env, MTT_E_ARGUMENT, "%d tokens for sequence %d, which has %d of %d: "
                             "raise the context, or cut the sequence", counts[i], i, g->lengths[i], context);
        status = mtt__check_ids(&g->trainer, tokens[i], counts[i], 0, "token");
    }
    for (i = 0; i < batch; i++) g->last[i] = -1;
    for (i = 0; i < batch && !status; i++)
        for (k = 0; k < (most > 1 ? counts[i] : 1) && !status; k++) {
            g->tokens[rows] = counts[i] ? tokens[i][k] : 0;
            g->sequences[rows] = i;
            g->places[rows] = counts[i] ? g->lengths[i] + k : -1;
            if (k == counts[i] - 1) {
                g->last[i] = rows;
                if (choices) g->choices[i] = choices[i];
                else g->choices[i].count = 0;
            }
            if (++rows < g->schedule.chunk || most < 2) continue;
            status = mtt__pass(g, MTT__CHUNK, rows, logits);
            for (rows = 0; rows < batch; rows++) g->last[rows] = -1;
            rows = 0;
        }
    if (!status && most && rows) status = mtt__pass(g, most > 1 ? MTT__CHUNK : MTT__TOKEN, rows, logits);
    for (i = 0; i < batch && !status; i++) g->lengths[i] += counts[i];
    return status;
}

MTTDEF mtt_status mtt_generator_append(mtt_generator *g, const int32_t *const *tokens, const int *counts,
                                       float *logits)
{
    return mtt__append_tokens(g, tokens, counts, NULL, logits);
}

/* Makes room in the context for the ids of a sequence that are not in the cache. */
static mtt_status mtt__make_room(mtt_generator *g, int slot, const mtt_generation *o, mtt__sequence *q)
{
    int context = g->schedule.seq_len, half = context > 1 ? context / 2 : 1;
    if (q->known - q->first <= context) return MTT_OK;
    if (o->full_context == MTT_CONTEXT_STOP) return mtt__end_sequence(o, q);
    q->first = q->known - (q->drawn ? half : context);
    q->place = 0;
    return mtt_generator_cut(g, slot, 0);
}

/* A generation by a generator: a sequence of it in each place of the batch. */
typedef struct mtt__run {
    mtt__sequence *all;
    const int32_t **tokens; /* of a step, as mtt__append_tokens takes them, */
    int *counts;
    mtt_choice *choices;
    float *logits;          /* for a repetition penalty; NULL: none */
} mtt__run;

static mtt_status mtt__run_init(mtt_env *env, mtt__run *r, size_t batch, size_t vocab, float penalty)
{
    size_t i;
    memset(r, 0, sizeof(*r));
    if (!(r->all = (mtt__sequence *)mtt__alloc(env, batch, sizeof(*r->all)))) return MTT_E_MEMORY;
    for (i = 0; i < batch; i++) r->all[i].number = -1;
    r->tokens = (const int32_t **)mtt__alloc(env, batch, sizeof(*r->tokens));
    r->counts = (int *)mtt__alloc(env, batch, sizeof(*r->counts));
    r->choices = (mtt_choice *)mtt__alloc(env, batch, sizeof(*r->choices));
    if (penalty > 0) r->logits = (float *)mtt__alloc(env, mtt__mul(batch, vocab), sizeof(float));
    return r->tokens && r->counts && r->choices && (r->logits || !(penalty > 0)) ? MTT_OK : MTT_E_MEMORY;
}

static void mtt__run_free(mtt_env *env, mtt__run *r, int batch)
{
    int i;
    for (i = 0; i < batch && r->all; i++) mtt__free_sequence(env, &r->all[i]);
    mtt__free(env, r->logits);
    mtt__free(env, r->choices);
    mtt__free(env, r->counts);
    mtt__free(env, (void *)r->tokens);
    mtt__free(env, r->all);
}

/* Makes the next id of all sequences, and hands them out in order. */
static mtt_status mtt__run_step(mtt_generator *g, const mtt_tokenizer *tokenizer, const mtt_generation *o,
                                mtt__run *r)
{
    int64_t vocab = g->schedule.model.vocab, batch = g->schedule.batch, i;
    mtt_status status = mtt__append_tokens(g, r->tokens, r->counts, r->logits ? NULL : r->choices, r->logits);
    if (status) return status;
    MTT__OMP(omp parallel for schedule(dynamic, 1) if (r->logits && batch > 1))
    for (i = 0; i < batch; i++)
        if (r->logits && r->counts[i])
            g->chosen[i] = mtt__draw_id(&r->choices[i], o, (int)vocab, r->logits + i * vocab, &r->all[i]);
    for (i = 0; i < batch && !status; i++)
        if (r->counts[i]) status = mtt__take_id(g->trainer.env, tokenizer, o, &g->chosen[i], &r->all[i]);
    return status;
}

MTTDEF mtt_status mtt_generator_run(mtt_generator *g, mtt_tokenizer *tokenizer,
                                    const mtt_generation *generation)
{
    mtt_env *env = g->trainer.env;
    mtt_generation copy = *generation, *o = &copy;
    mtt__pool pool = {NULL};
    mtt__run r;
    float penalty = o->sampling.repetition_penalty;
    int batch = g->schedule.batch, vocab = g->schedule.model.vocab, next = 0, busy = 1, i;
    mtt_status status;
    if (penalty >= 1 && penalty <= 1) o->sampling.repetition_penalty = penalty = 0;
    status = mtt__run_init(env, &r, (size_t)batch, (size_t)vocab, penalty);
    if (!status) status = mtt__encode_texts(env, tokenizer, o, &pool);
    if (!status)
        status = mtt__generation_check(env, tokenizer, o, vocab,
                                       o->full_context == MTT_CONTEXT_STOP ? g->schedule.seq_len : INT_MAX);
    while (!status && busy && o->count > 0) {
        for (i = busy = 0; i < batch && !status; i++) {
            mtt__sequence *q = &r.all[i];
            if (q->number >= 0) status = mtt__make_room(g, i, o, q);
            while (!status && q->number < 0 && next < o->prompt_count) {
                status = mtt__begin_sequence(env, tokenizer, o, vocab, next++, q);
                if (!status) status = mtt_generator_cut(g, i, 0);
                if (!status) status = mtt__make_room(g, i, o, q);
            }
            if (status) break;
            r.counts[i] = q->number < 0 ? 0 : q->known - q->first - q->place;
            r.tokens[i] = r.counts[i] ? q->ids + q->first + q->place : NULL;
            r.choices[i] = mtt__next_choice(tokenizer, o, vocab, q);
            q->place += r.counts[i];
            busy |= r.counts[i];
        }
        if (!status && busy) status = mtt__run_step(g, tokenizer, o, &r);
    }
    mtt__run_free(env, &r, batch);
    mtt__pool_free(env, &pool);
    return status;
}
#endif /* MTT_NO_GENERATOR */

#ifndef MTT_NO_SOCKETS
/* -----------------------------------------------------------------------------------------------------------
   >>ranks
   -------------------------------------------------------------------------------------------------------- */

/* Every pair of ranks has a stream socket. On it travel frames: a head, then data. Data frames belong to an
   exchange; the others are notes. Sockets never block. Each wait is a poll of all of them, so a rank that
   fails is noticed at once, whoever is waited for. */

enum { MTT__RANKS = 1024, MTT__RANKS_TIMEOUT = 20, MTT__RANKS_PORT = 29501, MTT__BACKLOG = 4096 };

enum {
    MTT__FRAME_DATA = 0x4d545401, /* a number, after "MTT" */
    MTT__FRAME_WAITING,           /* I take part, and wait for somebody myself */
    MTT__FRAME_BUSY,              /* wait for me without a limit */
    MTT__FRAME_STOP               /* my last frame: a normal end, or a text that says why */
};

typedef struct mtt__frame {
    uint32_t kind;
    uint32_t number; /* of data frames: 0, 1, 2, ...; of a stop: a status to pass on, or 0 */
    uint64_t bytes;  /* that follow */
} mtt__frame;

/* One direction of a socket. */
typedef struct mtt__flow {
    mtt__frame head;
    char *data;      /* of the frame under way */
    size_t done;     /* bytes of it, with its head's, that were sent or received */
    int at;          /* the next transfer */
    uint32_t number; /* of the next data frame */
} mtt__flow;

typedef struct mtt__peer {
    int fd;            /* -1: this rank itself, or one that has ended */
    int busy, waiting; /* 1 = it has said so, and has sent no data since */
    int stopped;       /* 1 = it has sent its last frame */
    uint32_t note;     /* kind of a frame to send before further data, or 0 */
    double since;      /* ms: when data last moved, it first said that it waits, or the exchange began */
    double heard;      /* ms: when its last frame came */
    mtt__flow in, out;
    char reason[512];  /* text of its stop */
} mtt__peer;

/* The name of a rank's host, and where it listens; rank 0 sends these to all. */
typedef struct mtt__home {
    char host[64], address[64];
    int32_t port;
} mtt__home;

/* What a rank that connects, the guest, and the one it comes to, the host, say to each other: first without a
   proof that they know the secret, then with it. */
typedef struct mtt__hello {
    char magic[8];                 /* with a version */
    int32_t rank, ranks, port;
    int32_t sealed, taken;         /* 1 = it has a secret; 1 = the guest's rank has come, from host `other` */
    char run[128], host[64], other[64];
    unsigned char nonce[32], proof[32];
} mtt__hello;

/* What ranks tell each other before they go on. */
typedef struct mtt__message {
    int64_t number;
    int32_t status;
    char error[500];
} mtt__message;

struct mtt_ranks {
    const mtt__agreements *calls; /* first: see mtt__others */
    int rank, count;
    mtt_env *env;
    mtt__pool pool;
    int busy;        /* 1 = this rank has told the others */
    int busy_peers;  /* so many have told this rank */
    double timeout;  /* ms */
    double told;     /* ms: when this rank last said that it waits for its device */
    double looked;   /* ms: when it last looked at its peers */
    mtt_status status;             /* of the first failure */
    char failure[512];             /* its text */
    mtt__frame stop;               /* the head of this rank's last frame */
    const char *stop_text;
    mtt__peer *peers;              /* these six by rank */
    mtt__home *homes;
    struct pollfd *polls;
    uint64_t *words;               /* of a collective */
    mtt__message *messages;
    pid_t *children;               /* NULL but in the process that called mtt_ranks_fork */
    mtt_transfer *all;             /* room for one with each rank */
    const mtt_transfer *transfers; /* of the exchange under way */
    int transfer_count;
    mtt__hello own;                /* as it is not sent: its nonce is the key of those that are */
    uint64_t nonces;
    const char *secret;            /* until all have met; "": none, and proofs prove nothing */
    int listening;
    const char *address;           /* of rank 0 */
    char refused[512];             /* why the last rank was turned away */
#ifdef MTT_MPI
    int by_mpi, starts_mpi; /* 1 = this handle has started MPI */
    int clean;              /* 1 = all ranks have come to a normal end */
    MPI_Comm world;
    struct mtt__message_under_way *under_way; /* messages of the exchange */
    size_t capacity;
    mtt__frame notes[2];           /* what this rank says: it waits, it is busy */
#endif
};

/* Records the first failure, and returns it or the earlier one. The text begins with a rank, if not -1. */
MTT__PRINTF(4, 5)
static mtt_status mtt__ranks_fail(mtt_ranks *r, int rank, mtt_status status, const char *format, ...)
{
    if (!r->status) {
        mtt__text text;
        va_list args;
        va_start(args, format);
        mtt__text_init(&text, r->failure, sizeof(r->failure));
        if (rank >= 0) mtt__print(&text, "rank %d (host %s) ", rank, r->homes[rank].host);
        mtt__print_va(&text, format, args);
        va_end(args);
        r->status = status;
    }
    return mtt__fail(r->env, r->status, "%s", r->failure);
}

static void mtt__socket_close(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* Records that a peer has ended without a last frame. `error` is 0 if its socket was closed, as by death. */
static mtt_status mtt__lost(mtt_ranks *r, int rank, int error)
{
    mtt__socket_close(&r->peers[rank].fd);
    if (!error || error == ECONNRESET || error == EPIPE)
        return mtt__ranks_fail(r, rank, MTT_E_RANK, "ended: see its own output");
    return mtt__ranks_fail(r, rank, MTT_E_RANK, "is lost: %s; check the network", strerror(error));
}

/* Returns the next transfer of the exchange that sends to a rank, or receives from it; NULL after the last.
   */
static const mtt_transfer *mtt__due(mtt_ranks *r, int rank, int receive)
{
    int *at = receive ? &r->peers[rank].in.at : &r->peers[rank].out.at;
    for (; *at < r->transfer_count; ++*at) {
        const mtt_transfer *t = &r->transfers[*at];
        if (t->peer == rank && (receive ? t->receive_bytes : t->send_bytes)) return t;
    }
    return NULL;
}

/* Returns what is left of a frame's head, then of its data. */
static char *mtt__flow_rest(mtt__flow *flow, size_t *left)
{
    size_t head = sizeof(flow->head);
    *left = flow->done < head ? head - flow->done : (size_t)flow->head.bytes - (flow->done - head);
    if (*left > 1u << 30) *left = 1u << 30; /* some systems refuse more at once */
    return flow->done < head ? (char *)&flow->head + flow->done : flow->data + (flow->done - head);
}

/* Checks a head that is complete. */
static mtt_status mtt__frame_begin(mtt_ranks *r, int rank)
{
    mtt__peer *p = &r->peers[rank];
    const mtt__frame *head = &p->in.head;
    p->in.data = p->reason;
    if (head->kind == MTT__FRAME_DATA ? head->bytes && head->number == p->in.number
        : head->kind == MTT__FRAME_STOP ? head->bytes < sizeof(p->reason)
        : !head->bytes && (head->kind == MTT__FRAME_WAITING || head->kind == MTT__FRAME_BUSY)) return MTT_OK;
    return mtt__ranks_fail(r, rank, MTT_E_MISMATCH, "sent what no rank of this version sends: run the same "
                           "program everywhere");
}

/* Acts on a frame that is complete. */
static mtt_status mtt__frame_end(mtt_ranks *r, int rank)
{
    mtt__peer *p = &r->peers[rank];
    const mtt__frame *head = &p->in.head;
    p->in.done = 0;
    p->heard = mtt__now_ms();
    if (!p->waiting) p->since = p->heard;
    r->busy_peers += (head->kind == MTT__FRAME_BUSY) - p->busy;
    p->busy = head->kind == MTT__FRAME_BUSY;
    p->waiting = head->kind == MTT__FRAME_WAITING;
    if (head->kind == MTT__FRAME_DATA) p->in.at++, p->in.number++;
    if (head->kind != MTT__FRAME_STOP) return MTT_OK;
    p->stopped = 1;
    mtt__socket_close(&p->fd);
    p->reason[head->bytes] = 0;
    if (!head->bytes) return MTT_OK;
    if (!head->number || head->number >= MTT_STATUS_COUNT)
        return mtt__ranks_fail(r, rank, MTT_E_STOPPED, "stopped: %s", p->reason);
    return mtt__ranks_fail(r, -1, (mtt_status)head->number, "%s", p->reason);
}

/* Takes what has come from a peer. Data that this exchange does not expect stays in the socket. */
static mtt_status mtt__peer_receive(mtt_ranks *r, int rank)
{
    mtt__peer *p = &r->peers[rank];
    mtt__flow *in = &p->in;
    mtt_status status = MTT_OK;
    while (p->fd >= 0 && !status) {
        size_t left;
        ptrdiff_t n;
        char *at;
        if (in->done >= sizeof(in->head) && in->head.kind == MTT__FRAME_DATA) {
            const mtt_transfer *t = mtt__due(r, rank, 1);
            if (!t) break;
            if (t->receive_bytes != in->head.bytes)
                return mtt__ranks_fail(r, rank, MTT_E_MISMATCH, "sends %llu bytes, but rank %d expects %llu: "
                                       "run the same program with the same settings everywhere",
                                       (unsigned long long)in->head.bytes, r->rank,
                                       (unsigned long long)t->receive_bytes);
            in->data = (char *)t->receive;
        }
        at = mtt__flow_rest(in, &left);
        n = recv(p->fd, at, left, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) break;
        if (n <= 0) return mtt__lost(r, rank, n ? errno : 0);
        in->done += (size_t)n;
        if (in->done > sizeof(in->head)) p->since = mtt__now_ms();
        if (in->done == sizeof(in->head)) status = mtt__frame_begin(r, rank);
        if (!status && in->done >= sizeof(in->head) && in->done - sizeof(in->head) == in->head.bytes)
            status = mtt__frame_end(r, rank);
    }
    return status;
}

/* 1 = a frame to a peer is under way, or there is a next one, which is now prepared: a note, or data. */
static int mtt__outgoing(mtt_ranks *r, int rank)
{
    mtt__peer *p = &r->peers[rank];
    mtt__flow *out = &p->out;
    const mtt_transfer *t = p->note ? NULL : mtt__due(r, rank, 0);
    if (out->done) return 1;
    if (!p->note && !t) return 0;
    memset(&out->head, 0, sizeof(out->head));
    out->head.kind = t ? (uint32_t)MTT__FRAME_DATA : p->note;
    if (t) out->head.number = out->number, out->head.bytes = t->send_bytes;
    if (p->note == MTT__FRAME_STOP) out->head = r->stop;
    out->data = (char *)(t ? t->send : r->stop_text);
    return 1;
}

#ifdef MSG_NOSIGNAL
enum { MTT__NO_SIGNAL = MSG_NOSIGNAL };
#else
enum { MTT__NO_SIGNAL = 0 }; /* SO_NOSIGPIPE does it */
#endif

/* Sends to a peer what its socket takes. If the peer has closed it, its last words may still be there. */
static mtt_status mtt__peer_send(mtt_ranks *r, int rank)
{
    mtt__peer *p = &r->peers[rank];
    mtt__flow *out = &p->out;
    while (p->fd >= 0 && mtt__outgoing(r, rank)) {
        size_t left;
        const char *at = mtt__flow_rest(out, &left);
        ptrdiff_t n = send(p->fd, at, left, MTT__NO_SIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) {
            int error = errno;
            mtt_status status = mtt__peer_receive(r, rank);
            return status ? status : mtt__lost(r, rank, error);
        }
        if (!out->done && out->head.kind != MTT__FRAME_DATA) p->note = 0;
        out->done += (size_t)n;
        if (out->head.kind == MTT__FRAME_DATA) p->since = mtt__now_ms();
        if (out->done < sizeof(out->head) + out->head.bytes) continue;
        out->done = 0;
        if (out->head.kind == MTT__FRAME_DATA) out->at++, out->number++;
    }
    return MTT_OK;
}

/* Waits up to 50 ms until a socket can do something. */
static void mtt__ranks_poll(mtt_ranks *r)
{
    int i;
    for (i = 0; i < r->count; i++) {
        mtt__peer *p = &r->peers[i];
        int held = p->in.done >= sizeof(p->in.head) && !mtt__due(r, i, 1);
        r->polls[i].events = (short)((held ? 0 : POLLIN) | (mtt__outgoing(r, i) ? POLLOUT : 0));
        r->polls[i].fd = r->polls[i].events ? p->fd : -1;
        r->polls[i].revents = 0;
    }
    poll(r->polls, (nfds_t)r->count, 50);
}

/* Returns the time, for a look at the peers. The first look begins their silence. Between later ones lie 50
   ms, or this process was stopped, as by Ctrl-Z: then perhaps they were, too, and that time is not theirs. */
static double mtt__look(mtt_ranks *r, int begins)
{
    double now = mtt__now_ms(), gap = now - r->looked;
    int i;
    for (i = 0; i < r->count; i++) {
        mtt__peer *p = &r->peers[i];
        if (begins) p->since = now;
        else if (gap > 1000) p->since += gap, p->heard += gap;
    }
    r->looked = now;
    return now;
}

/* Fails because a rank has been silent for too long. */
static mtt_status mtt__silent(mtt_ranks *r, int rank, double ms)
{
    return mtt__ranks_fail(r, rank, MTT_E_RANK, "has been silent for %g seconds: check its host, or raise "
                           "the timeout", ms / 1e3);
}

/* Fails if a peer was waited for too long. One that itself waits, and goes on saying so, gets twice the time,
   and while any rank is busy its time does not run. So the culprit is named by those who wait for it, before
   others name them. */
static mtt_status mtt__patience(mtt_ranks *r, int rank, double now)
{
    mtt__peer *p = &r->peers[rank];
    double limit = p->waiting && now - p->heard <= r->timeout ? 2 * r->timeout : r->timeout;
    if (p->busy || (p->waiting && r->busy_peers)) p->since = now;
    if (p->stopped)
        return mtt__ranks_fail(r, rank, MTT_E_RANK, "has ended its run, but rank %d goes on: give all the "
                               "same settings", r->rank);
    if (now - p->since <= limit) return MTT_OK;
    return mtt__silent(r, rank, limit);
}

#ifdef MTT_MPI
/* The same by MPI, for ranks that mpirun has started. Notes and data have tags of their own. MPI does not
   report the death of a rank. mpirun then ends the others. */
enum { MTT__TAG_DATA = 1, MTT__TAG_NOTE = 2 };

typedef struct mtt__message_under_way {
    MPI_Request request;
    int peer, bytes; /* to be received; -1: sent */
} mtt__message_under_way;

static mtt_status mtt__mpi_checked(mtt_ranks *r, int result)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    if (result == MPI_SUCCESS) return MTT_OK;
    MPI_Error_string(result, text, &length);
    return mtt__ranks_fail(r, -1, MTT_E_RANK, "MPI: %.300s", text);
}

/* Takes the notes that have come. */
static mtt_status mtt__mpi_notes(mtt_ranks *r)
{
    mtt_status status = MTT_OK;
    MPI_Status from;
    int some = 1;
    while (!status && some) {
        char text[sizeof(mtt__frame) + sizeof(r->failure)] = "";
        mtt__peer *p;
        status = mtt__mpi_checked(r, MPI_Iprobe(MPI_ANY_SOURCE, MTT__TAG_NOTE, r->world, &some, &from));
        if (status || !some) break;
        p = &r->peers[from.MPI_SOURCE];
        status = mtt__mpi_checked(r, MPI_Recv(text, (int)sizeof(text) - 1, MPI_BYTE, from.MPI_SOURCE,
                                              MTT__TAG_NOTE, r->world, &from));
        memcpy(&p->in.head, text, sizeof(p->in.head));
        if (!status) status = mtt__frame_begin(r, from.MPI_SOURCE);
        if (!status) memcpy(p->reason, text + sizeof(p->in.head), (size_t)p->in.head.bytes);
        if (!status) status = mtt__frame_end(r, from.MPI_SOURCE);
    }
    return status;
}

/* Starts all sends and receives, in pieces whose bytes an int counts. */
static mtt_status mtt__mpi_start(mtt_ranks *r, int *count)
{
    const size_t most = 1u << 30;
    size_t pieces = 0, at;
    int i, receives;
    mtt_status status;
    *count = 0;
    for (i = 0; i < r->transfer_count; i++)
        pieces += r->transfers[i].send_bytes / most + r->transfers[i].receive_bytes / most + 2;
    status = mtt__reserve(r->env, (void **)&r->under_way, &r->capacity, pieces, sizeof(*r->under_way));
    for (i = 0; i < 2 * r->transfer_count; i++) {
        const mtt_transfer *t = &r->transfers[i / 2];
        size_t bytes = (receives = !(i % 2)) ? t->receive_bytes : t->send_bytes;
        for (at = 0; at < bytes && !status; at += most) {
            mtt__message_under_way *m = &r->under_way[(*count)++];
            int n = (int)(bytes - at < most ? bytes - at : most);
            m->peer = t->peer;
            m->bytes = receives ? n : -1;
            if (receives)
                status = mtt__mpi_checked(r, MPI_Irecv((char *)t->receive + at, n, MPI_BYTE, t->peer,
                                                       MTT__TAG_DATA, r->world, &m->request));
            else
                status = mtt__mpi_checked(r, MPI_Isend((const char *)t->send + at, n, MPI_BYTE, t->peer,
                                                       MTT__TAG_DATA, r->world, &m->request));
        }
    }
    return status;
}

/* Looks whether a message has arrived or left, and has the size that was expected. */
static mtt_status mtt__mpi_test(mtt_ranks *r, mtt__message_under_way *m, int *ended)
{
    MPI_Status state;
    int bytes;
    mtt_status status = mtt__mpi_checked(r, MPI_Test(&m->request, ended, &state));
    if (status || !*ended) return status;
    r->peers[m->peer].since = mtt__now_ms();
    if (m->bytes < 0) return MTT_OK;
    status = mtt__mpi_checked(r, MPI_Get_count(&state, MPI_BYTE, &bytes));
    if (status || bytes == m->bytes) return status;
    return mtt__ranks_fail(r, m->peer, MTT_E_MISMATCH, "sends %d bytes, but rank %d expects %d: run the same "
                           "program with the same settings everywhere", bytes, r->rank, m->bytes);
}

static void mtt__mpi_note_all(mtt_ranks *r, uint32_t note)
{
    mtt__frame *frame = &r->notes[note == MTT__FRAME_BUSY];
    int i;
    frame->kind = note;
    for (i = 0; i < r->count; i++) {
        MPI_Request request;
        if (i == r->rank || r->peers[i].stopped) continue;
        if (MPI_Isend(frame, (int)sizeof(*frame), MPI_BYTE, i, MTT__TAG_NOTE, r->world, &request)) continue;
        MPI_Request_free(&request);
    }
}

static mtt_status mtt__mpi_transfer_all(mtt_ranks *r)
{
    double now = mtt__look(r, 1), told = now;
    int count, i;
    mtt_status status = mtt__mpi_start(r, &count);
    for (; !status && count; now = mtt__look(r, 0)) {
        status = mtt__mpi_notes(r); /* first: the data of a peer that has ended came before its last note */
        for (i = 0; i < count && !status; i++) {
            int ended = 0;
            status = mtt__mpi_test(r, &r->under_way[i], &ended);
            if (ended) r->under_way[i--] = r->under_way[--count];
        }
        for (i = 0; i < count && !status; i++) status = mtt__patience(r, r->under_way[i].peer, now);
        if (now - told > r->timeout / 8) told = now, mtt__mpi_note_all(r, MTT__FRAME_WAITING);
        if (count) sched_yield(); /* ranks may share a processor */
    }
    return status;
}

/* Says the last word, and waits for those of the others. At a normal end it has the patience of an exchange:
   mpirun counts a rank that ends without MPI_Finalize as failed, and kills the others. MPI_Finalize waits for
   all ranks without a limit. So the barrier shows first that none hangs after its last word. */
static void mtt__mpi_farewell(mtt_ranks *r, const char *text, double end)
{
    char note[sizeof(mtt__frame) + sizeof(r->failure)];
    int left, busy, lost = 0, bytes = (int)(sizeof(r->stop) + r->stop.bytes), i;
    MPI_Request barrier;
    memcpy(note, &r->stop, sizeof(r->stop));
    memcpy(note + sizeof(r->stop), text, (size_t)r->stop.bytes);
    for (i = 0; i < r->count; i++)
        if (i != r->rank) lost |= MPI_Send(note, bytes, MPI_BYTE, i, MTT__TAG_NOTE, r->world);
    if (!r->stop.number && !r->stop.bytes) end = mtt__now_ms() + r->timeout;
    do {
        mtt__mpi_notes(r);
        for (i = left = busy = 0; i < r->count; i++) {
            left += i != r->rank && !r->peers[i].stopped;
            busy |= r->peers[i].busy;
        }
        poll(NULL, 0, left ? 1 : 0);
    } while (left && (busy || mtt__now_ms() < end));
    r->clean = !left && !lost && !r->stop.number;
    if (!r->clean || MPI_Ibarrier(r->world, &barrier)) return;
    for (r->clean = 0, end = mtt__now_ms() + r->timeout; !r->clean && mtt__now_ms() < end; poll(NULL, 0, 1))
        if (MPI_Test(&barrier, &r->clean, MPI_STATUS_IGNORE)) return;
}

static mtt_status mtt__mpi_watch(mtt_ranks *r, double now)
{
    mtt_status status;
    int i;
    for (i = 0; i < r->count; i++) r->peers[i].waiting = 0;
    status = mtt__mpi_notes(r);
    for (i = 0; i < r->count && !status; i++) {
        mtt__peer *p = &r->peers[i];
        if (p->busy) p->since = now;
        if (i == r->rank || now - p->since <= r->timeout) continue;
        status = p->stopped ? mtt__patience(r, i, now) : mtt__silent(r, i, r->timeout);
    }
    return status;
}
#endif

static void mtt__note_all(mtt_ranks *r, uint32_t note)
{
    int i;
#ifdef MTT_MPI
    if (r->by_mpi) {
        mtt__mpi_note_all(r, note);
        return;
    }
#endif
    for (i = 0; i < r->count; i++) r->peers[i].note = note;
}

/* Goes on until all is sent and received. A rank that waits long says so again and again, because data that
   it sends afterwards takes it back. Then it tries all sockets: if it was stopped itself, the others have
   said so, and it must not blame them. */
static mtt_status mtt__transfer_all(mtt_ranks *r)
{
    double now = mtt__look(r, 1), told = now;
    int i;
#ifdef MTT_MPI
    if (r->by_mpi) return mtt__mpi_transfer_all(r);
#endif
    for (i = 0; i < r->count; i++) {
        r->peers[i].in.at = r->peers[i].out.at = 0;
        r->polls[i].revents = POLLIN; /* try all of them first */
    }
    for (;; now = mtt__look(r, 0)) {
        mtt_status status = MTT_OK;
        int owed = 0, late = now - told > r->timeout / 8;
        if (late) told = now, mtt__note_all(r, MTT__FRAME_WAITING);
        for (i = 0; i < r->count && !status; i++) {
            if (!late && !r->polls[i].revents) continue;
            status = mtt__peer_send(r, i);
            if (!status) status = mtt__peer_receive(r, i);
        }
        for (i = 0; i < r->count && !status; i++)
            if (mtt__due(r, i, 0) || mtt__due(r, i, 1)) owed = 1, status = mtt__patience(r, i, now);
        if (status || !owed) return status;
        mtt__ranks_poll(r);
    }
}

/* Ends the frames under way, says the last word to all peers, and closes the sockets. Closing a socket with
   unread bytes in it may destroy what was sent last. So input is thrown away until the peer closes its end,
   for at most 2 seconds. */
static void mtt__farewell(mtt_ranks *r, const char *text)
{
    double end = mtt__now_ms() + (r->timeout < 2000 ? r->timeout : 2000);
    mtt_env *env = r->env;
    char waste[4096];
    int i, live;
    if (r->stop.kind) return; /* it has been said */
    r->env = NULL; /* `text` may be its error, which stays */
    r->stop.kind = MTT__FRAME_STOP;
    r->stop.number = (uint32_t)r->status;
    r->stop.bytes = strlen(text) < sizeof(r->failure) ? strlen(text) : sizeof(r->failure) - 1;
    r->stop_text = text;
    r->transfer_count = 0;
#ifdef MTT_MPI
    if (r->by_mpi) {
        mtt__mpi_farewell(r, text, end);
        r->env = env;
        return;
    }
#endif
    mtt__note_all(r, MTT__FRAME_STOP);
    for (;; mtt__ranks_poll(r)) {
        for (i = live = 0; i < r->count; i++) {
            mtt__peer *p = &r->peers[i];
            ptrdiff_t n = 1;
            mtt__peer_send(r, i);
            p->in.done = 0;
            if (p->fd >= 0 && !mtt__outgoing(r, i)) shutdown(p->fd, SHUT_WR);
            while (p->fd >= 0 && n > 0) n = recv(p->fd, waste, sizeof(waste), 0);
            if (!n || (n < 0 && errno != EAGAIN && errno != EINTR)) mtt__socket_close(&p->fd);
            live |= p->fd >= 0;
        }
        if (!live || mtt__now_ms() >= end) break;
    }
    for (i = 0; i < r->count; i++) mtt__socket_close(&r->peers[i].fd);
    r->env = env;
}

/* Performs all transfers at once. Those with one peer go in order, and the peer lists matching ones. Those
   with several peers may be listed in any order. A failure is passed on to all ranks. */
static mtt_status mtt__exchange(mtt_ranks *r, const mtt_transfer *transfers, int count)
{
    mtt_status status;
    if (!r) return MTT_OK;
    if (r->status) return mtt__fail(r->env, r->status, "%s", r->failure);
    if (r->busy && count) mtt__note_all(r, MTT__FRAME_WAITING), r->busy = 0;
    r->transfers = transfers;
    r->transfer_count = count;
    status = mtt__transfer_all(r);
    if (status) mtt__farewell(r, r->failure);
    r->transfer_count = 0;
    return status;
}

/* A socket whose other end is closed, whether or not there are bytes to read before the end. */
#ifdef __linux__
enum { MTT__CLOSED = POLLHUP | POLLERR | 0x2000 }; /* POLLRDHUP, which POSIX does not have */
#else
enum { MTT__CLOSED = POLLHUP | POLLERR };
#endif

/* Reads what a peer says while this rank waits for its device. Any frame shows that the peer lives. A peer
   that has sent data waits for this rank. Its later frames are behind the data, which stay in the socket, but
   a closed socket is seen. For a timeout after its normal end, the device may work for this rank alone. */
static mtt_status mtt__watch_peer(mtt_ranks *r, int rank, double now)
{
    mtt__peer *p = &r->peers[rank];
    struct pollfd polled;
    mtt_status status;
    if (p->fd < 0) return p->stopped && now - p->since > r->timeout ? mtt__patience(r, rank, now) : MTT_OK;
    polled.fd = p->fd;
    polled.events = MTT__CLOSED & ~(POLLHUP | POLLERR);
    p->waiting = 0;
    status = mtt__peer_send(r, rank);
    if (!status) status = mtt__peer_receive(r, rank);
    if (status || p->fd < 0) return status;
    if (p->in.done < sizeof(p->in.head)) {
        if (p->busy) p->since = now;
        return now - p->since > r->timeout ? mtt__silent(r, rank, r->timeout) : MTT_OK;
    }
    return poll(&polled, 1, 0) > 0 && (polled.revents & MTT__CLOSED) ? mtt__lost(r, rank, 0) : MTT_OK;
}

/* See mtt_backend. Says every now and then that this rank waits. */
static mtt_status mtt__watch(mtt_ranks *r, int begins)
{
    double now;
    mtt_status status = MTT_OK;
    int i;
    if (!r) return MTT_OK;
    if (r->status) return mtt__fail(r->env, r->status, "%s", r->failure);
    now = mtt__look(r, begins);
    if (begins) r->told = now;
    if (now - r->told > r->timeout / 8) r->told = now, mtt__note_all(r, MTT__FRAME_WAITING);
#ifdef MTT_MPI
    if (r->by_mpi) status = mtt__mpi_watch(r, now);
#endif
    for (i = 0; i < r->count && !status; i++) status = mtt__watch_peer(r, i, now);
    if (status) mtt__farewell(r, r->failure);
    return status;
}

/* Sends this rank's row of `rows` to all others, and receives theirs: the first `bytes` of each. */
static mtt_status mtt__exchange_rows(mtt_ranks *r, void *rows, size_t row, size_t bytes)
{
    int i, count = 0;
    for (i = 0; i < r->count; i++) {
        mtt_transfer *t = &r->all[count];
        if (i == r->rank) continue;
        t->peer = i;
        t->send = (char *)rows + (size_t)r->rank * row;
        t->receive = (char *)rows + (size_t)i * row;
        t->send_bytes = t->receive_bytes = bytes;
        count++;
    }
    return mtt__exchange(r, r->all, count);
}

/* Collects a word of each rank, or its lowest byte. */
static mtt_status mtt__collect(mtt_ranks *r, uint64_t word, size_t bytes)
{
    if (!r) return MTT_OK;
    memset(r->words, 0, (size_t)r->count * sizeof(word));
    r->words[r->rank] = word;
    return mtt__exchange_rows(r, r->words, sizeof(word), bytes);
}

MTTDEF int mtt_ranks_rank(const mtt_ranks *ranks)
{
    return ranks ? ranks->rank : 0;
}

MTTDEF int mtt_ranks_count(const mtt_ranks *ranks)
{
    return ranks ? ranks->count : 1;
}

MTTDEF mtt_status mtt_ranks_agree(mtt_ranks *ranks, const char *what, uint64_t value)
{
    mtt_status status = mtt__collect(ranks, value, sizeof(value));
    int i;
    for (i = 1; i < mtt_ranks_count(ranks) && !status; i++)
        if (ranks->words[i] != ranks->words[0])
            status = mtt__ranks_fail(ranks, i, MTT_E_MISMATCH, "differs from rank 0 (host %s) in %s: %llu, "
                                     "not %llu; start all ranks with the same program, files and settings",
                                     ranks->homes[0].host, what, (unsigned long long)ranks->words[i],
                                     (unsigned long long)ranks->words[0]);
    return status;
}

MTTDEF mtt_status mtt_ranks_any(mtt_ranks *ranks, int *flag)
{
    mtt_status status = mtt__collect(ranks, *flag != 0, 1);
    int i, any = *flag != 0;
    for (i = 0; ranks && i < ranks->count; i++) any |= ranks->words[i] != 0;
    if (!status) *flag = any;
    return status;
}

MTTDEF mtt_status mtt_ranks_busy(mtt_ranks *ranks)
{
    if (ranks && !ranks->status) mtt__note_all(ranks, MTT__FRAME_BUSY), ranks->busy = 1;
    return mtt__exchange(ranks, NULL, 0);
}

/* Waits for the children, and kills those that have not exited after `ms`. */
static void mtt__reap(mtt_ranks *r, double ms)
{
    double end = mtt__now_ms() + ms;
    int i;
    for (i = 1; i < r->count && r->children; i++) {
        pid_t child = r->children[i], ended;
        while (child > 0 && (ended = waitpid(child, NULL, WNOHANG)) != child) {
            if (ended < 0 && errno != EINTR) break;
            if (mtt__now_ms() >= end) kill(child, SIGKILL);
            poll(NULL, 0, 2);
        }
    }
}

static void mtt__ranks_free(mtt_ranks *r)
{
    int i;
    for (i = 0; i < r->count && r->peers; i++) mtt__socket_close(&r->peers[i].fd);
#ifdef MTT_MPI
    if (r->clean) MPI_Comm_free(&r->world);
    if (r->clean && r->starts_mpi) MPI_Finalize();
    mtt__free(r->env, r->under_way);
#endif
    mtt__pool_free(r->env, &r->pool);
    mtt__free(r->env, r);
}

MTTDEF void mtt_ranks_fail(mtt_ranks *ranks, const char *reason)
{
    mtt_env *env = ranks ? ranks->env : NULL;
    if (!ranks || ranks->status) return;
    mtt__farewell(ranks, reason);
    ranks->env = NULL; /* its error stays: it says why */
    mtt__ranks_fail(ranks, ranks->rank, MTT_E_STOPPED, "stopped: %s", reason);
    ranks->env = env;
}

MTTDEF void mtt_ranks_close(mtt_ranks *ranks)
{
    double patience = ranks ? ranks->timeout : 0;
    if (!ranks) return;
    if (ranks->status && patience > 5000) patience = 5000; /* a device takes seconds to close */
    mtt__farewell(ranks, ranks->status ? ranks->failure : "");
    mtt__reap(ranks, patience);
    mtt__ranks_free(ranks);
}

/* ---- what a trainer asks ---- */

/* See mtt__agreements. */
static void mtt__ranks_join(mtt_trainer *t, mtt_policy *p)
{
    p->ranks = t->backend.ranks->count;
    p->rank = t->backend.ranks->rank;
    t->backend.exchange = mtt__exchange;
    t->backend.watch = mtt__watch;
}

/* See mtt__spread. */
static mtt_status mtt__ranks_spread(mtt_trainer *t, int from, void *values, size_t bytes)
{
    mtt_ranks *r = t->backend.ranks;
    int peer, count = 0;
    for (peer = 0; peer < r->count; peer++) {
        mtt_transfer *x = &r->all[count];
        if (peer == r->rank || (r->rank != from && peer != from)) continue;
        x->peer = peer;
        x->send = x->receive = values;
        x->send_bytes = r->rank == from ? bytes : 0;
        x->receive_bytes = r->rank == from ? 0 : bytes;
        count++;
    }
    return mtt__exchange(r, r->all, count);
}

/* See mtt__all_agree. */
static mtt_status mtt__ranks_agree(mtt_trainer *t, mtt_status status, int64_t *number)
{
    mtt_ranks *r = t->backend.ranks;
    mtt__message *mine = &r->messages[r->rank];
    mtt_status sent;
    int peer;
    if (r->count == 1) return status;
    memset(mine, 0, sizeof(*mine));
    mine->status = (int32_t)status;
    if (number) mine->number = *number;
    if (status && t->env) memcpy(mine->error, t->env->error, sizeof(mine->error) - 1);
    sent = mtt__exchange_rows(r, r->messages, sizeof(*mine), sizeof(*mine));
    if (status) return mtt__fail(t->env, status, "%s", mine->error);
    if (number) *number = 0;
    for (peer = 0; peer < r->count && !sent; peer++) {
        mtt__message *theirs = &r->messages[peer];
        if (number) *number += theirs->number;
        theirs->error[sizeof(theirs->error) - 1] = 0;
        if (theirs->status)
            sent = mtt__fail(t->env, MTT_E_STOPPED, "rank %d (host %s) stopped: %s", peer,
                             r->homes[peer].host, theirs->error);
    }
    return sent;
}

/* Names the first field of a descriptor that is not the same on all ranks. */
static mtt_status mtt__agree_fields(mtt_ranks *r, const void *desc, const mtt_field *f)
{
    mtt_status status = MTT_OK;
    uint64_t word;
    int i;
    for (; f->name && !status; f++) {
        double value = mtt__field_get(desc, f);
        memcpy(&word, &value, sizeof(word));
        status = mtt__collect(r, word, sizeof(word));
        for (i = 1; i < r->count && !status; i++)
            if (r->words[i] != r->words[0])
                status = mtt__ranks_fail(r, i, MTT_E_MISMATCH, "differs from rank 0 (host %s) in %s; start "
                                         "all ranks with the same settings", r->homes[0].host, f->name);
    }
    return status;
}

/* Ranks that would train different models must not begin. */
static mtt_status mtt__start_ranks(mtt_trainer *t)
{
    const mtt_schedule *s = t->schedule;
    size_t i;
    const struct { const char *what; uint64_t value; } same[] = {
        {"version of mtt", MTT_VERSION},
        {"groups of parameters", t->groups},
        {"seed", t->optim.seed},
        {"zero_weights", t->optim.zero_weights != 0},
        {"batch", (uint64_t)s->batch},
        {"seq_len", (uint64_t)s->seq_len},
    };
    mtt_status status = MTT_OK;
    for (i = 0; i < MTT__LENGTH(same) && !status; i++)
        status = mtt_ranks_agree(t->backend.ranks, same[i].what, same[i].value);
    if (!status) status = mtt__agree_fields(t->backend.ranks, &s->model, mtt__model_field);
    if (!status) status = mtt__agree_fields(t->backend.ranks, &s->policy, mtt__policy_field);
    return status ? status : mtt__agree_fields(t->backend.ranks, &t->optim, mtt__optim_field);
}

/* Lists what goes to a rank and comes from it: of each parameter its share and mine. */
static int mtt__parameter_transfers(const mtt_op *op, int peer, mtt_transfer *t)
{
    const mtt_tensor *squares = op->kind == MTT_OP_gather_squares ? op->operands[1] : NULL;
    int rank = op->shape->rank, p;
    for (p = 0; p < op->parameters; p++, t++) {
        const mtt_tensor *whole = squares ? squares : op->sums ? op->sums[p] : op->weights[p];
        int64_t bytes = mtt__gathered_bytes(op, p), mine, theirs;
        t->send_bytes = (size_t)(mtt__gathered(op, p, rank, &mine) * bytes);
        t->receive_bytes = (size_t)(mtt__gathered(op, p, peer, &theirs) * bytes);
        t->send = (char *)whole->data + mine * bytes;
        t->receive = (char *)whole->data + theirs * bytes;
    }
    return op->parameters;
}

/* Does the same for gradients: to a rank goes its share, and mine comes. */
static int mtt__gradient_transfers(const mtt_op *op, int peer, mtt_transfer *t)
{
    const mtt_tensor *received = MTT_OPERANDS_OF(all_to_all, op)->received;
    int rank = op->shape->rank, p;
    char *row = (char *)received->data + (peer - (peer > rank)) * received->shape[1];
    for (p = 0; p < op->parameters; p++, t++) {
        int64_t bytes = (int64_t)mtt__bytes_of(op->gradients[p]->dtype, 1), theirs, mine;
        t->send_bytes = (size_t)(mtt__share(&op->parts[p], peer, &theirs) * bytes);
        t->receive_bytes = (size_t)(mtt__share(&op->parts[p], rank, &mine) * bytes);
        t->send = (char *)op->gradients[p]->data + theirs * bytes;
        t->receive = row;
        row += t->receive_bytes;
    }
    return op->parameters;
}

/* Does the same for rows. */
static int mtt__row_transfers(const mtt_op *op, int peer, mtt_transfer *t)
{
    const mtt_op_all_gather *o = MTT_OPERANDS_OF(all_gather, op);
    t->send = o->row->data;
    t->receive = (char *)o->rows->data + (size_t)peer * o->row->bytes;
    t->send_bytes = t->receive_bytes = o->row->bytes;
    return 1;
}

/* Adds a transfer to the one before it in the list, if it goes on where that ends; otherwise returns 0. The
   peer does the same, since squares have the same places on all ranks. */
static int mtt__extend_transfer(mtt_transfer *a, const mtt_transfer *b)
{
    int sends = !a->send_bytes || !b->send_bytes || (const char *)a->send + a->send_bytes == b->send;
    int receives = !a->receive_bytes || !b->receive_bytes ||
                   (const char *)a->receive + a->receive_bytes == b->receive;
    if (!sends || !receives || a->peer != b->peer) return 0;
    if (!a->send_bytes) a->send = b->send;
    if (!a->receive_bytes) a->receive = b->receive;
    a->send_bytes += b->send_bytes;
    a->receive_bytes += b->receive_bytes;
    return 1;
}

/* Lists what an operation transfers, without what is empty. Returns the end of the list. */
static mtt_transfer *mtt__list_transfers(mtt_op *op, mtt_transfer *list)
{
    mtt_transfer *end = list, *t;
    int peer, count, i;
    for (peer = 0; peer < op->shape->ranks; peer++) {
        if (peer == op->shape->rank) continue;
        if (op->kind == MTT_OP_all_to_all) count = mtt__gradient_transfers(op, peer, end);
        else if (op->kind == MTT_OP_all_gather) count = mtt__row_transfers(op, peer, end);
        else count = mtt__parameter_transfers(op, peer, end);
        for (i = 0, t = end; i < count; i++, t++) {
            t->peer = peer;
            if (op->kind == MTT_OP_gather_squares && end > list && mtt__extend_transfer(end - 1, t)) continue;
            if (t->send_bytes || t->receive_bytes) *end++ = *t;
        }
    }
    op->transfers = list;
    op->transfer_count = (int)(end - list);
    return end;
}

/* Lists the transfers of the training program, whose tensors have addresses now. */
static mtt_status mtt__bind_transfers(mtt_trainer *t)
{
    mtt__program *p = &t->schedule->programs[MTT__TRAIN];
    size_t others = (size_t)t->schedule->policy.ranks - 1, most = 0;
    mtt_transfer *end;
    int i;
    for (i = 0; i < p->op_count; i++)
        if (mtt__is_transfer(&p->ops[i])) most += others * (size_t)(p->ops[i].parameters + 1);
    if (!most) return MTT_OK;
    end = (mtt_transfer *)mtt__pool_take(t->env, &p->pool, most * sizeof(*end));
    if (!end) return MTT_E_MEMORY;
    for (i = 0; i < p->op_count; i++) {
        mtt_op *op = &p->ops[i];
        if (!mtt__is_transfer(op)) continue;
        end = mtt__list_transfers(op, end);
        if (!p->later_ops || i >= p->step_begin) continue;
        p->later_ops[i].transfers = op->transfers;
        p->later_ops[i].transfer_count = op->transfer_count;
    }
    return MTT_OK;
}

/* Moves what the optimizer keeps, wherever it is. All ranks get it from the one that has it. */
static mtt_status mtt__move_shares(mtt_trainer *t, int way, const mtt__parameter *q, int kind, int64_t at,
                                 int64_t count, float *values)
{
    const mtt_policy *policy = &t->schedule->policy;
    int everywhere = policy->shard == MTT_SHARD_NONE || !t->schedule->programs[MTT__TRAIN].optim[kind] ||
                     q->frozen, rank;
    mtt_status status = MTT_OK;
    if (policy->ranks == 1 || everywhere) return mtt__move_mine(t, way, q, kind, at, count, 1, values);
    for (rank = 0; rank < policy->ranks && !status; rank++) {
        int64_t begin, end = mtt__share(&q->part, rank, &begin), mine = rank == policy->rank;
        end = mtt__min(begin + end, at + count);
        if (begin < at) begin = at;
        if (begin >= end) continue;
        if (mine || way == MTT__PUT)
            status = mtt__move_mine(t, way, q, kind, begin, end - begin, (int)mine, values + begin - at);
        if (!status && way == MTT__GET)
            status = mtt__spread(t, rank, values + begin - at, (size_t)(end - begin) * sizeof(float));
    }
    return status;
}

static const mtt__agreements mtt__calls_of_ranks = {
    mtt__ranks_join,   mtt__start_ranks, mtt__bind_transfers, mtt__move_shares, mtt__ranks_agree,
    mtt__ranks_spread, mtt_ranks_agree,  mtt_ranks_busy,      mtt_ranks_fail};

/* ---- connecting ---- */

static mtt_status mtt__ranks_new(mtt_env *env, int rank, int count, double seconds, mtt_ranks **out)
{
    mtt_ranks *r = (mtt_ranks *)mtt__alloc(env, 1, sizeof(*r));
    size_t n = (size_t)count;
    int i;
    *out = NULL;
    if (!r) return MTT_E_MEMORY;
    r->env = env;
    r->calls = &mtt__calls_of_ranks;
    r->rank = rank;
    r->count = count;
    r->timeout = seconds * 1e3;
    r->peers = (mtt__peer *)mtt__pool_take(env, &r->pool, n * sizeof(*r->peers));
    r->homes = (mtt__home *)mtt__pool_take(env, &r->pool, n * sizeof(*r->homes));
    r->polls = (struct pollfd *)mtt__pool_take(env, &r->pool, n * sizeof(*r->polls));
    r->words = (uint64_t *)mtt__pool_take(env, &r->pool, n * sizeof(*r->words));
    r->all = (mtt_transfer *)mtt__pool_take(env, &r->pool, n * sizeof(*r->all));
    r->messages = (mtt__message *)mtt__pool_take(env, &r->pool, n * sizeof(*r->messages));
    for (i = 0; i < count && r->peers; i++) r->peers[i].fd = -1;
    if (!r->peers || !r->homes || !r->polls || !r->words || !r->all || !r->messages)
        return mtt__ranks_free(r), MTT_E_MEMORY;
    if (gethostname(r->homes[rank].host, sizeof(r->homes->host) - 1)) r->homes[rank].host[0] = '?';
    *out = r;
    return MTT_OK;
}

/* Sets a socket to be closed on exec, never to block, and to send no SIGPIPE. The rest is TCP's, and fails
   for other sockets: small frames go at once, and a host that is gone is noticed after a minute, even if its
   rank is busy. */
static void mtt__socket_prepare(int fd)
{
    int on = 1;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, O_NONBLOCK);
#ifdef SO_NOSIGPIPE
    setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof(on));
#endif
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
#ifdef TCP_KEEPIDLE
    on = 15;
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &on, sizeof(on));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &on, sizeof(on));
    on = 3;
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &on, sizeof(on));
#endif
}

/* Makes rank `rank` and its sockets to rank 0 and to the ranks after it; those before it have made theirs.
   ends[i * count + j] is rank i's end of its socket to rank j. Returns in the child, too. */
static mtt_status mtt__fork_one(mtt_ranks *r, int *ends, int rank)
{
    int i, pair[2], error = 0, n = r->count;
    pid_t child = -1;
    for (i = 0; i < n && !error; i++) {
        if (i == rank || ends[rank * n + i] >= 0) continue;
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) error = errno;
        else ends[rank * n + i] = pair[0], ends[i * n + rank] = pair[1];
        if (!error) mtt__socket_prepare(pair[0]), mtt__socket_prepare(pair[1]);
    }
    if (!error && (child = fork()) < 0) error = errno;
    if (error)
        return mtt__fail(r->env, MTT_E_ARGUMENT, "cannot start rank %d of %d: %s; use fewer ranks, or raise "
                         "the limits of files and processes (ulimit -n, -u)", rank, n, strerror(error));
    if (child) r->children[rank] = child;
    else r->rank = rank, r->children = NULL;
    for (i = 0; i < n && child; i++) mtt__socket_close(&ends[rank * n + i]);
    return MTT_OK;
}

MTTDEF mtt_status mtt_ranks_fork(mtt_env *env, int ranks, double timeout, mtt_ranks **out)
{
    mtt_ranks *r;
    mtt_status status;
    int *ends, i, all;
    *out = NULL;
    if (ranks < 1 || ranks > MTT__RANKS || !(timeout >= 0 && timeout <= 86400))
        return mtt__fail(env, MTT_E_ARGUMENT, "ranks = %d, timeout = %g: give 1..%d ranks and at most 86400 "
                         "seconds", ranks, timeout, MTT__RANKS);
    status = mtt__ranks_new(env, 0, ranks, timeout > 0 ? timeout : (double)MTT__RANKS_TIMEOUT, &r);
    if (status) return status;
    all = ranks * ranks;
    ends = (int *)mtt__alloc(env, (size_t)all, sizeof(*ends));
    r->children = (pid_t *)mtt__pool_take(env, &r->pool, (size_t)ranks * sizeof(*r->children));
    if (!ends || !r->children) status = MTT_E_MEMORY;
    for (i = 0; i < all && ends; i++) ends[i] = -1;
    for (i = 1; i < ranks; i++) memcpy(r->homes[i].host, r->homes[0].host, sizeof(r->homes->host));
    for (i = 1; i < ranks && !r->rank && !status; i++) status = mtt__fork_one(r, ends, i);
    for (i = 0; i < all && ends; i++) {
        if (status || i / ranks != r->rank) mtt__socket_close(&ends[i]);
        else r->peers[i % ranks].fd = ends[i];
    }
    mtt__free(env, ends);
#ifdef _OPENMP
    if (!status && !getenv("OMP_NUM_THREADS"))
        omp_set_num_threads(mtt__threads() > ranks ? mtt__threads() / ranks : 1);
#endif
    if (!status) return *out = r, MTT_OK;
    mtt__reap(r, 0);
    mtt__ranks_free(r);
    return status;
}

static uint32_t mtt__rotations(uint32_t x, int a, int b, int c) /* to the right */
{
    return (x >> a | x << (32 - a)) ^ (x >> b | x << (32 - b)) ^ (x >> c | x << (32 - c));
}

/* Computes SHA-256 (FIPS 180-4) of `head` bytes of a block and of data after them. `out` may be the data. */
static void mtt__sha256(const unsigned char *block, size_t head, const unsigned char *data, size_t bytes,
                        unsigned char *out)
{
    static const uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t v[8], w[64] = {0}, hash[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                           0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    size_t end = head + bytes, all = (end + 72) / 64 * 64, at = 0, i; /* with a bit and 8 bytes of length */
    while (at < all) {
        for (i = 0; i < 64; i++, at++)
            w[i / 4] = w[i / 4] << 8 | (at < head ? block[at] : at < end ? data[at - head] : at == end ? 128
                                        : at + 8 < all ? 0 : (uint64_t)end * 8 >> 8 * (all - 1 - at) & 255);
        memcpy(v, hash, sizeof(v));
        for (i = 0; i < 64; i++) {
            uint32_t t, u = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
            if (i >= 16)
                w[i] = w[i - 16] + (mtt__rotations(w[i - 15], 7, 18, 3) ^ w[i - 15] << 29) +
                       w[i - 7] + (mtt__rotations(w[i - 2], 17, 19, 10) ^ w[i - 2] << 22);
            t = v[7] + k[i] + w[i] + mtt__rotations(v[4], 6, 11, 25) + ((v[4] & v[5]) ^ (~v[4] & v[6]));
            u += t + mtt__rotations(v[0], 2, 13, 22);
            memmove(v + 1, v, 7 * sizeof(*v));
            v[4] += t;
            v[0] = u;
        }
        for (i = 0; i < 8; i++) hash[i] += v[i];
    }
    for (i = 0; i < 32; i++) out[i] = (unsigned char)(hash[i / 4] >> (24 - 8 * (i % 4)));
}

/* Computes HMAC-SHA-256 (RFC 2104), 32 bytes. */
static void mtt__hmac(const void *key, size_t size, const void *data, size_t bytes, unsigned char *out)
{
    unsigned char inner[64] = {0}, outer[64];
    int i;
    if (size > sizeof(inner)) mtt__sha256(NULL, 0, (const unsigned char *)key, size, inner);
    else memcpy(inner, key, size);
    for (i = 0; i < 64; i++) outer[i] = inner[i] ^ 0x5c, inner[i] ^= 0x36;
    mtt__sha256(inner, sizeof(inner), (const unsigned char *)data, bytes, out);
    mtt__sha256(outer, sizeof(outer), out, 32, out);
}

/* A connection that is not yet one to a rank: of a guest, or of this rank as the guest of another. */
typedef struct mtt__guest {
    int fd, answered, host;     /* host: the rank whose guest this one is; -1: none */
    size_t got;                 /* bytes of `hello` */
    double since;               /* ms: when it was accepted, or answered */
    char address[64];
    mtt__hello hello, own;      /* of the other side; of this one */
} mtt__guest;

/* This rank's hello with a nonce that is used for one connection. */
static mtt__hello mtt__fresh_hello(mtt_ranks *r)
{
    mtt__hello hello = r->own;
    r->nonces++;
    mtt__hmac(r->own.nonce, sizeof(r->own.nonce), &r->nonces, sizeof(r->nonces), hello.nonce);
    return hello;
}

/* Makes the proof of one who has said `own` and heard `other`, or only checks it, in a time that does not
   depend on where it differs. A hello is said by one side, so no side can repeat the other's proof. */
static int mtt__prove(const mtt_ranks *r, mtt__hello *own, const mtt__hello *other, int checks)
{
    mtt__hello both[2];
    unsigned char proof[32];
    int differ = 0, i;
    both[0] = *own, both[1] = *other;
    for (i = 0; i < 2; i++) memset(both[i].proof, 0, sizeof(proof));
    mtt__hmac(r->secret, strlen(r->secret), both, sizeof(both), proof);
    for (i = 0; i < 32; i++) differ |= proof[i] ^ own->proof[i];
    if (!checks) memcpy(own->proof, proof, sizeof(proof));
    return !differ;
}

/* Returns 1 if a guest and a host belong together. Otherwise notes why not, on both sides in the same way. */
static int mtt__fits(mtt_ranks *r, mtt__hello *guest, mtt__hello *host, int proven)
{
    const char *why;
    char twin[192];
    guest->run[127] = host->run[127] = guest->host[63] = host->host[63] = host->other[63] = 0;
    why = strcmp(guest->run, host->run) ? "give each run a port of its own"
        : guest->ranks != host->ranks ? "start all with the same number of ranks"
        : guest->sealed > host->sealed ? "the second has no MTT_SECRET, the first has one: give all the same"
        : guest->sealed < host->sealed ? "the first has no MTT_SECRET, the second has one: give all the same"
        : !proven ? "they have different secrets: give all ranks the same MTT_SECRET"
        : host->taken ? mtt__format(twin, sizeof(twin), "two processes are the first, the other one on host "
                                    "%s: give each a number of its own, and each run a port", host->other)
        : NULL;
    if (why)
        mtt__format(r->refused, sizeof(r->refused), "rank %d of %d of run \"%s\" (host %s) came to rank %d "
                    "of %d of run \"%s\" (host %s): %s", guest->rank, guest->ranks, guest->run, guest->host,
                    host->rank, host->ranks, host->run, host->host, why);
    return !why;
}

static int mtt__is_local(const char *address)
{
    return !strncmp(address, "127.", 4) || !strcmp(address, "::1");
}

/* Writes the numeric address of one end of a connection to 64 bytes, without the prefix of IPv4 in IPv6.
   Returns its port. */
static int mtt__socket_name(int fd, int peer, char *address)
{
    struct sockaddr_storage name;
    socklen_t bytes = sizeof(name);
    char port[16] = "0";
    memset(address, 0, 64);
    if (!(peer ? getpeername : getsockname)(fd, (struct sockaddr *)&name, &bytes))
        getnameinfo((struct sockaddr *)&name, bytes, address, 64, port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV);
    if (!strncmp(address, "::ffff:", 7)) memmove(address, address + 7, 64 - 7);
    return atoi(port);
}

static int mtt__resolve(const char *address, int port, int family, struct addrinfo **list)
{
    struct addrinfo hints;
    char service[16];
    memset(&hints, 0, sizeof(hints));
    hints.ai_family = family;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = address ? 0 : AI_PASSIVE;
    mtt__format(service, sizeof(service), "%d", port);
    *list = NULL;
    return getaddrinfo(address, service, &hints, list);
}

/* Opens the socket for ranks after this one, at a port (0: a free one) of `address` alone if that is one
   address of this host, and otherwise of all, for IPv6 and IPv4. A name that means loopback here may mean
   another address elsewhere, and so opens all. */
static mtt_status mtt__listen(mtt_ranks *r, const char *address, int port)
{
    static const int family[] = {AF_UNSPEC, AF_INET6, AF_INET};
    int fd = -1, on = 1, off = 0, error = EADDRNOTAVAIL, local = mtt__is_local(address), k;
    char name[64];
    for (k = 0; k < (local ? 1 : 3) && fd < 0 && error != EADDRINUSE; k++) {
        struct addrinfo *list;
        if (mtt__resolve(k ? NULL : address, port, family[k], &list)) continue;
        errno = error = EADDRNOTAVAIL;
        if (k || !list->ai_next) fd = socket(list->ai_family, SOCK_STREAM, 0);
        if (fd >= 0) {
            mtt__socket_prepare(fd);
            setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)); /* a run may just have ended here */
            if (list->ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
        }
        if (fd < 0 || bind(fd, list->ai_addr, list->ai_addrlen) || listen(fd, MTT__BACKLOG)) error = errno;
        else if ((r->own.port = mtt__socket_name(fd, 0, name)) && (local || !mtt__is_local(name))) error = 0;
        if (error) mtt__socket_close(&fd);
        freeaddrinfo(list);
    }
    r->listening = fd;
    if (fd >= 0) return MTT_OK;
    return mtt__ranks_fail(r, r->rank, MTT_E_ARGUMENT, "cannot listen at port %d: %s; if another run has it, "
                           "give each a port of its own (MASTER_PORT)", port, strerror(error));
}

/* Connects to one address within `ms`; -1 with errno set. */
static int mtt__connect_to(const struct addrinfo *to, int ms)
{
    struct pollfd writable;
    socklen_t size = sizeof(int);
    int error = 0, fd = socket(to->ai_family, to->ai_socktype, to->ai_protocol);
    if (fd < 0) return -1;
    mtt__socket_prepare(fd);
    writable.fd = fd;
    writable.events = POLLOUT;
    if (connect(fd, to->ai_addr, to->ai_addrlen)) error = errno;
    if (error == EINPROGRESS || error == EINTR) {
        error = ETIMEDOUT;
        if (poll(&writable, 1, ms) > 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size)) error = errno;
    }
    if (error) mtt__socket_close(&fd);
    errno = error;
    return fd;
}

/* Sends the first bytes on a socket, which are so few that its buffer takes them. */
static int mtt__say(int fd, const void *data, size_t bytes)
{
    ptrdiff_t n = 0;
    size_t done = 0;
    for (; done < bytes && (n >= 0 || errno == EINTR); done += n > 0 ? (size_t)n : 0)
        n = send(fd, (const char *)data + done, bytes - done, MTT__NO_SIGNAL);
    return done == bytes;
}

/* Fails if a rank that has connected ends before all have: the missing ones may never come. */
static mtt_status mtt__watch_connected(mtt_ranks *r)
{
    double now = mtt__now_ms();
    mtt_status status = MTT_OK;
    int i;
    for (i = 0; i < r->count && !status; i++) {
        r->peers[i].since = now; /* it may be silent for as long as this rank waits */
        status = mtt__watch_peer(r, i, now);
    }
    return status;
}

/* Connects to the host of a guest, and says hello. Returns what keeps them from meeting. */
static const char *mtt__call(mtt_ranks *r, mtt__guest *g, double left)
{
    const char *reason = "it says nothing", *address = g->host ? r->homes[g->host].address : r->address;
    struct addrinfo *list, *to;
    int error = mtt__resolve(address, r->homes[g->host].port, AF_UNSPEC, &list);
    char here[64];
    if (error) reason = gai_strerror(error);
    for (to = list; to && g->fd < 0; to = to->ai_next) {
        g->fd = mtt__connect_to(to, left < 5000 ? (int)left : 5000);
        reason = g->fd < 0 ? strerror(errno) : "it says nothing";
    }
    if (list) freeaddrinfo(list);
    if (g->fd >= 0 && r->listening < 0) { /* others reach this rank as rank 0 does */
        mtt__socket_name(g->fd, 0, here);
        mtt__listen(r, mtt__is_local(here) ? address : here, 0);
    }
    g->since = mtt__now_ms();
    g->own = mtt__fresh_hello(r);
    g->got = 0;
    g->answered = 0;
    if (g->fd >= 0 && !mtt__say(g->fd, &g->own, sizeof(g->own))) mtt__socket_close(&g->fd);
    return reason;
}

/* Reads what the other side says, and answers. Returns 1 if it is now a peer. Closes the socket if it is
   refused, and fails if this rank is. */
static int mtt__receive_guest(mtt_ranks *r, mtt__guest *g)
{
    mtt__hello *h = &g->hello, *own = &g->own;
    ptrdiff_t n = recv(g->fd, (char *)h + g->got, sizeof(*h) - g->got, 0);
    int rank, proven, fits, calls = g->host >= 0, ended = !n || (n < 0 && errno != EAGAIN && errno != EINTR);
    if (n > 0) g->got += (size_t)n;
    if (ended || memcmp(h, &r->own, g->got < sizeof(h->magic) ? g->got : sizeof(h->magic)))
        mtt__socket_close(&g->fd);
    if (g->got < sizeof(*h) || g->fd < 0) return 0;
    g->got = 0;
    rank = calls ? g->host : h->rank < 0 || h->rank >= r->count ? 0 : h->rank;
    if (calls && h->rank != rank) return mtt__socket_close(&g->fd), 0; /* TCP may connect one to itself */
    proven = g->answered && mtt__prove(r, h, own, 1);
    if (!calls && !g->answered) *own = mtt__fresh_hello(r);
    if (!calls) own->taken = rank <= r->rank || r->peers[rank].fd >= 0;
    if (own->taken) memcpy(own->other, r->homes[rank].host, sizeof(own->other));
    if (calls ? !g->answered : proven) mtt__prove(r, own, h, 0);
    fits = mtt__fits(r, calls ? own : h, calls ? h : own, !g->answered || proven);
    if (!fits && calls) mtt__ranks_fail(r, -1, MTT_E_MISMATCH, "%s", r->refused);
    if (!(calls && (g->answered || !fits)) && !mtt__say(g->fd, own, sizeof(*own))) fits = 0;
    if (!fits) return mtt__socket_close(&g->fd), 0;
    g->since = mtt__now_ms();
    if (!g->answered++) return 0;
    if (!calls) memcpy(r->homes[rank].address, g->address, sizeof(g->address)), r->homes[rank].port = h->port;
    memcpy(r->homes[rank].host, h->host, sizeof(h->host));
    r->peers[rank].fd = g->fd;
    return g->fd = -1, 1;
}

/* Returns the guest that loses its place to the next: one that was not answered before one that was, of the
   address with most places, the oldest. -1 = all were answered just now: a rank needs time to prove. */
static int mtt__least_guest(const mtt__guest *g, int count, double now)
{
    int i, k, weight, most = 0, least = -1;
    for (i = 0; i < count; i++) {
        for (weight = g[i].answered ? 0 : count, k = 0; k < count; k++)
            weight += !strcmp(g[k].address, g[i].address);
        if (g[i].answered && now - g[i].since < 100) continue;
        if (weight > most || (weight == most && g[i].since < g[least].since)) most = weight, least = i;
    }
    return least;
}

/* Connects to the ranks from `first` up to `last`. If it `waits`, it also lets those after this one connect,
   at the same time, since each may wait for others. Strangers are turned away. If all places are taken,
   guests lose theirs, and a rank that does comes again. */
static mtt_status mtt__gather(mtt_ranks *r, int first, int last, int waits)
{
    enum { guests = 64 };
    int calls = last - first, unmet = calls, missing = waits ? r->count - 1 - r->rank : 0, others = -missing;
    mtt__guest *all = (mtt__guest *)mtt__alloc(r->env, (size_t)(calls + guests), sizeof(*all));
    struct pollfd *polls = (struct pollfd *)mtt__alloc(r->env, (size_t)(calls + guests + 1), sizeof(*polls));
    double start = mtt__now_ms(), now = start, watched = now;
    const char *reason = "";
    int i, fd, comes, full = 0, count = calls;
    char absent[64];
    mtt__text names;
    if (!all || !polls) mtt__ranks_fail(r, -1, MTT_E_MEMORY, "out of host memory");
    for (i = 0; i < calls && !r->status; i++) all[i].fd = -1, all[i].host = first + i;
    for (; missing + unmet && !r->status && now - start < r->timeout; now = mtt__now_ms()) {
        for (i = 0; i < calls && !r->status; i++)
            if (all[i].fd < 0 && all[i].answered < 2 && now - all[i].since > 50)
                reason = mtt__call(r, &all[i], r->timeout - (now - start));
        for (i = 0; i <= count; i++) {
            polls[i].fd = i < count ? all[i].fd : waits ? r->listening : -1;
            polls[i].events = POLLIN;
        }
        poll(polls, (nfds_t)count + 1, 50);
        comes = polls[count].revents;
        for (i = count - 1; i >= 0; i--) {
            int met = polls[i].fd >= 0 && polls[i].revents && mtt__receive_guest(r, &all[i]);
            if (i < calls && polls[i].fd > all[i].fd && !met) reason = "another program or version answers";
            if (i < calls) unmet -= met;
            else missing -= met;
            if (i >= calls && all[i].fd < 0) all[i] = all[--count];
        }
        if (comes && (full || count == calls + guests)) {
            i = mtt__least_guest(all + calls, count - calls, now);
            if (i < 0) poll(NULL, 0, 10);
            else mtt__socket_close(&all[calls + i].fd), all[calls + i] = all[--count];
        }
        for (; waits && count < calls + guests && (fd = accept(r->listening, NULL, NULL)) >= 0; others++) {
            memset(&all[count], 0, sizeof(*all));
            mtt__socket_prepare(fd);
            mtt__socket_name(fd, 1, all[count].address);
            all[count].since = mtt__now_ms();
            all[count].host = -1;
            all[count++].fd = fd;
        }
        full = waits && count < calls + guests && (errno == EMFILE || errno == ENFILE);
        if (missing + unmet && !r->status && now - watched > 50) watched = now, mtt__watch_connected(r);
        if (missing && full && count == calls && !r->status)
            mtt__ranks_fail(r, r->rank, MTT_E_ARGUMENT, "cannot open %d sockets: raise the limit of open "
                            "files (ulimit -n)", r->count - 1);
    }
    for (i = 0; i < count && all; i++) mtt__socket_close(&all[i].fd);
    for (i = 0; i < calls && all && all[i].answered == 2;) i++;
    mtt__free(r->env, all);
    mtt__free(r->env, polls);
    if (!(missing + unmet) || r->status) return r->status;
    if (unmet)
        return mtt__ranks_fail(r, -1, MTT_E_RANK, "rank %d does not answer at %s, port %d, within %g "
                               "seconds: %s; start it, and check address, port and firewall", first + i,
                               first + i ? r->homes[first + i].address : r->address, r->homes[first + i].port,
                               r->timeout / 1e3, reason);
    mtt__text_init(&names, absent, sizeof(absent));
    for (i = r->rank + 1; i < r->count; i++)
        if (r->peers[i].fd < 0) mtt__print(&names, "%s%d", names.size ? ", " : "", i);
    return mtt__ranks_fail(r, r->rank, MTT_E_RANK, "waited %g seconds at port %d for %d of %d ranks: %s%s; "
                           "start them, and check address, port and firewall. Connections of others: %d%s%s",
                           r->timeout / 1e3, r->own.port, missing, r->count, absent,
                           names.size == sizeof(absent) - 1 ? "..." : "", others + missing,
                           *r->refused ? ". Turned away: " : "", r->refused);
}

/* Sends rank 0's table of homes to all. */
static mtt_status mtt__share_homes(mtt_ranks *r)
{
    size_t bytes = (size_t)r->count * sizeof(*r->homes);
    int i, count = r->rank ? 1 : r->count;
    mtt_status status;
    memset(r->all, 0, (size_t)r->count * sizeof(*r->all));
    for (i = 1; i < count; i++) r->all[i].peer = i, r->all[i].send = r->homes, r->all[i].send_bytes = bytes;
    if (r->rank) r->all[0].receive = r->homes, r->all[0].receive_bytes = bytes;
    status = mtt__exchange(r, r->all, count);
    for (i = 0; i < r->count; i++) r->homes[i].host[63] = r->homes[i].address[63] = 0;
    return status;
}

/* Connects a rank other than 0 to rank 0, which says where all are. */
static mtt_status mtt__join(mtt_ranks *r)
{
    char zero[64];
    mtt_status status;
    int i;
    mtt__format(r->homes[0].host, sizeof(r->homes->host), "%s", r->address); /* until it says its name */
    status = mtt__gather(r, 0, 1, 0);
    if (status) return status;
    mtt__socket_name(r->peers[0].fd, 1, zero);
    r->timeout *= 1.25; /* rank 0 may wait for the timeout, in silence, and then says who is absent */
    status = mtt__share_homes(r);
    r->timeout /= 1.25;
    for (i = 1; i < r->count; i++) /* rank 0 sees those on its host at an address of no use elsewhere */
        if (mtt__is_local(r->homes[i].address)) memcpy(r->homes[i].address, zero, sizeof(zero));
    return status;
}

#ifdef MTT_MPI
/* Makes the handle of the ranks of MPI_COMM_WORLD. */
static mtt_status mtt__mpi_connect(mtt_env *env, const mtt_ranks_desc *desc, double seconds, mtt_ranks **out)
{
    int started = 0, rank = 0, count = 0, level = MPI_THREAD_FUNNELED;
    mtt_ranks *r;
    mtt_status status;
    if (MPI_Initialized(&started) ||
        (!started && MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level)) ||
        level < MPI_THREAD_FUNNELED || MPI_Comm_rank(MPI_COMM_WORLD, &rank) ||
        MPI_Comm_size(MPI_COMM_WORLD, &count))
        return mtt__fail(env, MTT_E_RANK, "MPI does not start, or knows no MPI_THREAD_FUNNELED: start the "
                         "program by the mpirun of the MPI that it was compiled with");
    if (rank != desc->rank || count != desc->ranks)
        return mtt__fail(env, MTT_E_ARGUMENT, "rank %d of %d is rank %d of %d for MPI: start it by the "
                         "mpirun of the MPI that it was compiled with", desc->rank, desc->ranks, rank, count);
    status = mtt__ranks_new(env, rank, count, seconds, &r);
    if (status) return status;
    r->by_mpi = 1;
    r->starts_mpi = !started;
    status = mtt__mpi_checked(r, MPI_Comm_dup(MPI_COMM_WORLD, &r->world));
    if (!status) status = mtt__mpi_checked(r, MPI_Comm_set_errhandler(r->world, MPI_ERRORS_RETURN));
    if (!status)
        status = mtt__mpi_checked(r, MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, r->homes,
                                                   (int)sizeof(*r->homes), MPI_BYTE, r->world));
    if (!status) *out = r;
    else mtt__ranks_free(r);
    return status;
}
#endif

MTTDEF mtt_status mtt_ranks_connect(mtt_env *env, const mtt_ranks_desc *desc, mtt_ranks **out)
{
    const char *address = desc->address ? desc->address : "127.0.0.1";
    const char *run = desc->run ? desc->run : "", *secret = desc->secret ? desc->secret : "";
    int fd, port = desc->port ? desc->port : MTT__RANKS_PORT;
    double seconds = desc->timeout != 0 ? desc->timeout : (double)MTT__RANKS_TIMEOUT;
    mtt_ranks *r;
    mtt_status status;
    *out = NULL;
    if (!strcmp(address, "localhost")) address = "127.0.0.1"; /* one of its two addresses, everywhere */
    if (desc->ranks < 1 || desc->ranks > MTT__RANKS || desc->rank < 0 || desc->rank >= desc->ranks)
        return mtt__fail(env, MTT_E_ARGUMENT, "rank %d of %d: give 1..%d ranks, numbered from 0", desc->rank,
                         desc->ranks, MTT__RANKS);
    if (port < 1 || port > 65535 || !(seconds > 0 && seconds <= 86400) || strlen(run) >= sizeof(r->own.run))
        return mtt__fail(env, MTT_E_ARGUMENT, "port %d, timeout %g, run \"%s\": give a port of 1..65535, at "
                         "most 86400 seconds, and a name below %d bytes", port, seconds, run,
                         (int)sizeof(r->own.run));
#ifdef MTT_MPI
    if (desc->mpi) return mtt__mpi_connect(env, desc, seconds, out);
#else
    if (desc->mpi)
        return mtt__fail(env, MTT_E_ARGUMENT, "mpi is 1, but this build has no MPI: compile with -DMTT_MPI");
#endif
    if (*secret && strlen(secret) < 16)
        return mtt__fail(env, MTT_E_ARGUMENT, "the secret has %d bytes, which others can guess: give all "
                         "ranks 16 or more, as openssl rand -hex 16 prints them", (int)strlen(secret));
    status = mtt__ranks_new(env, desc->rank, desc->ranks, seconds, &r);
    if (status || r->count == 1) return *out = r, status;
    memcpy(r->own.magic, "mttrank2", sizeof(r->own.magic));
    memcpy(r->own.run, run, strlen(run));
    memcpy(r->own.host, r->homes[r->rank].host, sizeof(r->own.host));
    r->own.rank = r->rank;
    r->own.ranks = r->count;
    r->secret = secret;
    r->own.sealed = *r->secret != 0;
    r->listening = -1;
    fd = r->own.sealed ? open("/dev/urandom", O_RDONLY | O_CLOEXEC) : -1;
    if (r->own.sealed && (fd < 0 || read(fd, r->own.nonce, sizeof(r->own.nonce)) != sizeof(r->own.nonce)))
        status = mtt__ranks_fail(r, -1, MTT_E_ARGUMENT, "MTT_SECRET needs /dev/urandom: %s", strerror(errno));
    mtt__socket_close(&fd);
    r->address = address;
    r->homes[0].port = port;
    if (!status) status = r->rank ? mtt__join(r) : mtt__listen(r, address, port);
    if (!status) status = mtt__gather(r, r->rank ? 1 : 0, r->rank, 1);
    mtt__socket_close(&r->listening);
    if (!r->rank && !status) status = mtt__share_homes(r);
    if (!status) return *out = r, MTT_OK;
    mtt__farewell(r, r->failure);
    mtt__ranks_free(r);
    return status;
}
#endif /* MTT_NO_SOCKETS */

#endif /* none of the #errors */
#endif /* MTT_IMPLEMENTATION_DONE */
#endif /* MTT_IMPLEMENTATION */

/* This software is available under two licences: take the one you prefer.

   A - MIT
   Copyright (c) 2026 the mtt authors
   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
   associated documentation files (the "Software"), to deal in the Software without restriction, including
   without limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
   copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to the
   following conditions: The above copyright notice and this permission notice shall be included in all copies
   or substantial portions of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND,
   EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A
   PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR
   ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.

   B - Public domain (www.unlicense.org)
   This is free and unencumbered software released into the public domain. Anyone is free to copy, modify,
   publish, use, compile, sell, or distribute this software, either in source code form or as a compiled
   binary, for any purpose, commercial or non-commercial, and by any means. In jurisdictions that recognize
   copyright laws, the author or authors of this software dedicate any and all copyright interest in the
   software to the public domain. We make this dedication for the benefit of the public at large and to the
   detriment of our heirs and successors. We intend this dedication to be an overt act of relinquishment in
   perpetuity of all present and future rights to this software under copyright law. THE SOFTWARE IS PROVIDED
   "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF
   MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS BE
   LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE,
   ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. */

