/* peft.h - writes the adapters of a trainer to a folder as Hugging Face's PEFT reads them for the model's
   Hugging Face folder: adapter_model.safetensors and adapter_config.json. Include mtt.h first.

   PEFT has adapters for q, k and v, and for gate and up. Those of mtt share A, which is written for each, and
   have a part of B's columns each: the same function. */
#ifndef PEFT_H
#define PEFT_H
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "alone.h"
#include "failure.h"
#include "posix.h"

/* An adapter of a weight of Hugging Face, maybe some columns of mtt's: A^T, or such columns of B as rows. */
typedef struct peft_tensor {
    mtt_form_tensor weight; /* what it is added to */
    int is_b, number;       /* of the parameter */
    int64_t shape[2];       /* of the parameter: inputs x rank, or rank x outputs */
    int64_t rows;           /* in the file; columns are shape[0] */
} peft_tensor;

/* 1 = PEFT has such a model: GPT-2, or Llama and Qwen3 without biases. */
static inline int peft_has(const mtt_model_desc *m)
{
    if (m->norm_place != MTT_NORM_PRE) return 0;
    if (m->positions == MTT_POSITIONS_ROTARY)
        return m->norm == MTT_NORM_RMS && m->mlp == MTT_MLP_SWIGLU && m->no_biases;
    return m->norm == MTT_NORM_LAYER && m->mlp == MTT_MLP_GELU && m->positions <= MTT_POSITIONS_LEARNED &&
           !m->qk_norm && !m->no_biases && m->heads * m->d_head == m->d_model && m->heads_kv == m->heads;
}

/* Gives the next adapter of the model, A and B of each weight in turn; all zeros at first. 0: no more. */
static inline int peft_next(const mtt_trainer *t, const mtt_model_desc *model, int64_t *cursor,
                            peft_tensor *x)
{
    char name[80];
    if (*cursor) x->is_b = !x->is_b;
    while (x->is_b || mtt_form_next(model, MTT_FORM_HUGGING_FACE, cursor, &x->weight)) {
        const char *ending = strrchr(x->weight.parameter, '.');
        if (!ending || strcmp(ending, ".weight")) continue;
        snprintf(name, sizeof(name), "%.*s.lora_%c", (int)(ending - x->weight.parameter),
                 x->weight.parameter, "AB"[x->is_b]);
        x->number = mtt_parameter_find(t, name);
        if (!mtt_parameter(t, x->number, x->shape)) continue;
        x->rows = x->is_b ? x->weight.columns : x->shape[1];
        return 1;
    }
    return 0;
}

/* Returns the bytes of the text. */
static inline size_t peft_put(mtt_writer *writer, const char *format, ...)
{
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    mtt_writer_put(writer, line, strlen(line));
    return strlen(line);
}

/* The weight's name without its ending, as in transformer.h.0.attn.c_attn. */
static inline int peft_stem(const peft_tensor *x)
{
    return (int)(strlen(x->weight.name) - strlen(".weight"));
}

/* Writes adapter_config.json. Modules are named with their layers, since some layers may have no adapter. */
static inline void peft_config(mtt_writer *w, const mtt_trainer *t, const mtt_model_desc *model, int rank,
                               float alpha)
{
    peft_tensor x = {.is_b = 0};
    int64_t cursor = 0;
    const char *comma = "";
    peft_put(w, "{\"peft_type\":\"LORA\",\"task_type\":\"CAUSAL_LM\",\"inference_mode\":true,"
             "\"base_model_name_or_path\":null,\"bias\":\"none\",\"lora_dropout\":0.0,\"r\":%d,"
             "\"lora_alpha\":%.9g,\"fan_in_fan_out\":%s,\"target_modules\":[", rank, (double)alpha,
             model->positions == MTT_POSITIONS_ROTARY ? "false" : "true");
    while (peft_next(t, model, &cursor, &x))
        if (!x.is_b) peft_put(w, "%s\"%.*s\"", comma, peft_stem(&x), x.weight.name), comma = ",";
    peft_put(w, "]}\n");
}

/* Writes the header of adapter_model.safetensors: the size of the rest, a multiple of 8, in 8 bytes, then
   where each tensor is. */
static inline void peft_header(mtt_writer *w, const mtt_trainer *t, const mtt_model_desc *model)
{
    peft_tensor x = {.is_b = 0};
    int64_t cursor = 0;
    unsigned long long begin = 0, end;
    uint64_t size = peft_put(w, "        {\"__metadata__\":{\"format\":\"pt\"}") - 8;
    for (; peft_next(t, model, &cursor, &x); begin = end) {
        end = begin + 4 * (unsigned long long)(x.rows * x.shape[0]);
        size += peft_put(w, ",\"base_model.model.%.*s.lora_%c.weight\":{\"dtype\":\"F32\",\"shape\":[%lld,"
                         "%lld],\"data_offsets\":[%llu,%llu]}", peft_stem(&x), x.weight.name, "AB"[x.is_b],
                         (long long)x.rows, (long long)x.shape[0], begin, end);
    }
    size += peft_put(w, "}%*s", (int)(7 - size % 8), "");
    mtt_writer_patch(w, 0, &size, 8); /* little-endian, as all that mtt runs on */
}

/* Reads each adapter from all ranks, and writes it if there is a writer. */
static inline mtt_status peft_data(mtt_writer *w, mtt_trainer *t, const mtt_model_desc *model, float *values,
                                   float *row)
{
    peft_tensor x = {.is_b = 0};
    int64_t cursor = 0, i, k;
    mtt_status status = MTT_OK;
    while (!status && peft_next(t, model, &cursor, &x)) {
        status = mtt_parameter_get(t, x.number, values);
        for (i = 0; i < x.rows && w && !status; i++) {
            int64_t column = x.is_b ? mtt_form_column(&x.weight, i) : i;
            for (k = 0; k < x.shape[0]; k++) row[k] = values[k * x.shape[1] + column];
            mtt_writer_put(w, row, (size_t)x.shape[0] * sizeof(float));
        }
    }
    return status;
}

/* Opens both files, in a folder that is made if it is missing. */
static inline mtt_status peft_open(mtt_env *env, const char *folder, mtt_writer **weights,
                                   mtt_writer **config)
{
    char path[4096];
    mtt_status status;
    if (mkdir(folder, 0777) && errno != EEXIST)
        return failure(env, MTT_E_FILE, "cannot make the folder %s: %s", folder, strerror(errno));
    snprintf(path, sizeof(path), "%.4000s/adapter_model.safetensors", folder);
    status = mtt_writer_open(env, path, 0, weights);
    snprintf(path, sizeof(path), "%.4000s/adapter_config.json", folder);
    return status ? status : mtt_writer_open(env, path, 0, config);
}

/* Fails on all ranks where it has failed on one. */
static inline mtt_status peft_agree(mtt_env *env, mtt_ranks *ranks, mtt_status status)
{
    int failed = status != MTT_OK;
    mtt_status told = mtt_ranks_any(ranks, &failed);
    if (status || told) return status ? status : told;
    return failed ? failure(env, MTT_E_STOPPED, "another rank cannot write the adapters") : MTT_OK;
}

/* Writes both files. All ranks of the trainer call it, and rank 0 writes. MTT_E_ARGUMENT: PEFT has no such
   model. */
static inline mtt_status peft_save(mtt_env *env, mtt_ranks *ranks, mtt_trainer *t, const char *folder)
{
    const mtt_model_desc *model = mtt_schedule_model(mtt_trainer_schedule(t));
    const mtt_policy *policy = mtt_schedule_policy(mtt_trainer_schedule(t));
    peft_tensor x = {.is_b = 0};
    int64_t cursor = 0, most = 0, longest = 0;
    mtt_writer *weights = NULL, *config = NULL;
    float *values;
    mtt_status status = MTT_OK;
    if (!policy->lora_rank) return failure(env, MTT_E_ARGUMENT, "the model has no adapters: set lora_rank");
    if (!peft_has(model))
        return failure(env, MTT_E_ARGUMENT, "PEFT has adapters for GPT-2, Llama and Qwen3, and this model is "
                       "none of them: save it by mtt_save_merged");
    while (peft_next(t, model, &cursor, &x)) {
        if (x.shape[0] * x.shape[1] > most) most = x.shape[0] * x.shape[1];
        if (x.shape[0] > longest) longest = x.shape[0];
    }
    values = malloc((size_t)(most + longest + 1) * sizeof(float));
    if (!values) status = failure(env, MTT_E_MEMORY, "no memory to write the adapters");
    else if (!policy->rank) status = mtt_ranks_busy(ranks);
    if (!status && !policy->rank) status = peft_open(env, folder, &weights, &config);
    status = peft_agree(env, ranks, status);
    if (!status && weights) peft_header(weights, t, model);
    if (!status) status = peft_data(weights, t, model, values, values + most);
    if (!status && weights) status = mtt_ranks_busy(ranks);
    if (!status && weights) {
        peft_config(config, t, model, policy->lora_rank, policy->lora_alpha);
        status = mtt_writer_finish(weights);
        if (!status) status = mtt_writer_finish(config);
        if (!status) status = mtt_writer_commit(weights);
        if (!status) status = mtt_writer_commit(config);
    }
    mtt_writer_close(weights);
    mtt_writer_close(config);
    status = peft_agree(env, ranks, status);
    free(values);
    return status;
}
#endif
