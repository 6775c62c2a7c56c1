/* results.h - what a run of train leaves in its folder, for the programs that write and read it. */
#ifndef RESULTS_H_INCLUDED
#define RESULTS_H_INCLUDED

#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* Files of a run: {folder}/{dataset}_{technique}{ending}. */
#define RESULT_FILES(X)                                                                                      \
    X(METRICS, "_metrics.json")     /* one object, with the keys of RESULTS */                               \
    X(MEMORY, "_memory.json")       /* plan and timeline, by mtt_schedule_json */                            \
    X(LOG, ".jsonl")                /* a line for each step and each evaluation */                           \
    X(CHECKPOINT, ".safetensors")   /* by mtt_save */

/* Keys of the metrics: kind, name, and the size of a text or the format of a number. */
#define RESULTS(X)                                                                                           \
    X(TEXT, dataset, 256)                                                                                    \
    X(TEXT, technique, 128)                                                                                  \
    X(NUMBER, parameters, "%.0f")                                                                            \
    X(NUMBER, batch_size, "%.0f")                                                                            \
    X(NUMBER, seq_len, "%.0f")                                                                               \
    X(NUMBER, steps, "%.0f")                                                                                 \
    X(NUMBER, train_loss, "%.6f")                                                                            \
    X(NUMBER, val_loss, "%.6f")                                                                              \
    X(NUMBER, perplexity, "%.4f")                                                                            \
    X(NUMBER, bits_per_byte, "%.5f")                                                                         \
    X(NUMBER, accuracy, "%.5f")                                                                              \
    X(NUMBER, training_time, "%.3f") /* seconds */                                                           \
    X(NUMBER, ms_per_step, "%.3f")                                                                           \
    X(NUMBER, tokens_per_s, "%.1f")                                                                          \
    X(NUMBER, arena_bytes, "%.0f")                                                                           \
    X(NUMBER, device_bytes, "%.0f")                                                                          \
    X(NUMBER, peak_bytes, "%.0f")                                                                            \
    X(NUMBER, peak_forward_bytes, "%.0f")                                                                    \
    X(NUMBER, peak_backward_bytes, "%.0f")
#endif
