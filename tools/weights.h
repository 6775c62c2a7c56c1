/* weights.h - reads the weights of a checkpoint that mtt_save has written, without the optimizer's state.

   Include it after mtt.h. A program opens a file, takes tensors by name, and reads the values of each. Sizes
   are checked, and the checksums of the metadata and of each tensor that is read. Functions return 1; or 0,
   and `error` then says what is wrong. */
#ifndef WEIGHTS_H_INCLUDED
#define WEIGHTS_H_INCLUDED

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { WEIGHTS_HEADER = 16 << 20, WEIGHTS_NAME = 64 };

typedef struct weight {
    char name[WEIGHTS_NAME];
    uint64_t shape[2], begin, end; /* a vector has shape[1] = 0 */
    uint32_t crc;
    int has_crc, is_f32, taken;
} weight;

typedef struct weights {
    const char *path;
    FILE *file;
    mtt_model_desc model; /* as the metadata has it: not resolved */
    int window, seq_len;  /* of the training; 0 = all keys, unknown */
    weight *at;
    size_t count;
    uint64_t data_begin, data_bytes;
    uint32_t crc_table[256], crc, expected; /* of the metadata: computed, and as the file says */
    int has_crc;
    char error[PATH_MAX + 256];
} weights;

static int weights_fail(weights *w, const char *format, ...)
{
    va_list arguments;
    int size = snprintf(w->error, sizeof(w->error), "%.*s: ", PATH_MAX, w->path);
    va_start(arguments, format);
    vsnprintf(w->error + size, sizeof(w->error) - (size_t)size, format, arguments);
    va_end(arguments);
    return 0;
}

static uint32_t weights_crc(const weights *w, uint32_t crc, const void *data, size_t bytes)
{
    const unsigned char *at = (const unsigned char *)data;
    for (crc = ~crc; bytes; bytes--) crc = crc >> 8 ^ w->crc_table[(crc ^ *at++) & 255];
    return ~crc;
}

/* NULL: there is none of that name. */
static weight *weights_find(const weights *w, const char *name)
{
    size_t i;
    for (i = 0; i < w->count; i++)
        if (!strcmp(w->at[i].name, name)) return &w->at[i];
    return NULL;
}

/* The tensor of a name, new or known; NULL without memory. */
static weight *weights_add(weights *w, mtt_slice name)
{
    weight fresh, *t;
    memset(&fresh, 0, sizeof(fresh));
    snprintf(fresh.name, sizeof(fresh.name), "%.*s", (int)name.size, name.at);
    t = weights_find(w, fresh.name);
    if (t) return t;
    if (!(w->count & (w->count + 1))) { /* 0, 1, 3, 7, ...: the room is full */
        t = (weight *)realloc(w->at, (2 * w->count + 1) * sizeof(*t));
        if (!t) return NULL;
        w->at = t;
    }
    w->at[w->count] = fresh;
    return &w->at[w->count++];
}

static int weights_begins(mtt_slice string, const char *with)
{
    return string.size >= strlen(with) && !memcmp(string.at, with, strlen(with));
}

/* 1 = the optimizer's, or scales of FP8, which belong to activations. */
static int weights_is_state(mtt_slice name)
{
    return weights_begins(name, "optim.") || mtt_slice_is(name, "fp8.scales");
}

/* A pair of the metadata. The checksum under "crc32" is of all pairs but checksums and "format": the
   exclusive or of theirs. Returns 0 without memory. */
static int weights_read_pair(weights *w, mtt_json *j, mtt_slice key)
{
    const mtt_field *f = mtt_model_fields();
    mtt_slice text, name = {key.at + 6, key.size - 6};
    mtt_json number;
    uint64_t value = 0;
    char digits[9] = "";
    int small;
    weight *t;
    if (!mtt_json_string(j, &text)) return 1;
    text.size = mtt_json_unescape(text, (char *)text.at);
    if (weights_begins(key, "crc32")) {
        memcpy(digits, text.at, text.size < 8 ? text.size : 8);
        if (key.size < 6) {
            w->has_crc = 1;
            w->expected = (uint32_t)strtoul(digits, NULL, 16);
        } else if (!weights_is_state(name)) {
            t = weights_add(w, name);
            if (!t) return 0;
            t->has_crc = 1;
            t->crc = (uint32_t)strtoul(digits, NULL, 16);
        }
        return 1;
    }
    if (mtt_slice_is(key, "format")) return 1;
    w->crc ^= weights_crc(w, weights_crc(w, (uint32_t)key.size, key.at, key.size), text.at, text.size);
    mtt_json_init(&number, text.at, text.size);
    if (!mtt_json_u64(&number, &value) || value > INT_MAX) return 1;
    small = (int)value;
    if (mtt_slice_is(key, "window")) w->window = small;
    if (mtt_slice_is(key, "batches.seq_len")) w->seq_len = small;
    while (f->name && !mtt_slice_is(key, f->name)) f++;
    if (f->name && f->kind != MTT_FIELD_FLOAT) memcpy((char *)&w->model + f->offset, &small, sizeof(small));
    return 1;
}

/* {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]} */
static void weights_read_tensor(mtt_json *j, weight *t)
{
    mtt_slice key, dtype = {"", 0};
    uint64_t offsets[2] = {0, 0};
    int rank = 0, places = 0;
    for (mtt_json_begin(j, '{'); mtt_json_key(j, &key);) {
        int is_shape = mtt_slice_is(key, "shape"), *count = is_shape ? &rank : &places;
        uint64_t *numbers = is_shape ? t->shape : offsets, number;
        if (is_shape || mtt_slice_is(key, "data_offsets")) {
            for (mtt_json_begin(j, '['); mtt_json_item(j) && mtt_json_u64(j, &number); ++*count)
                if (*count < 2) numbers[*count] = number;
        } else if (!mtt_slice_is(key, "dtype") || !mtt_json_string(j, &dtype)) mtt_json_skip(j);
    }
    t->begin = offsets[0];
    t->end = offsets[1];
    t->is_f32 = mtt_slice_is(dtype, "F32") && rank > 0 && rank < 3 && places == 2;
}

static int weights_read_header(weights *w, char *text, size_t size)
{
    mtt_slice key, inner;
    mtt_json j;
    weight *t;
    mtt_json_init(&j, text, size);
    for (mtt_json_begin(&j, '{'); mtt_json_key(&j, &key);)
        if (mtt_slice_is(key, "__metadata__")) {
            for (mtt_json_begin(&j, '{'); mtt_json_key(&j, &inner);)
                if (!weights_read_pair(w, &j, inner)) return weights_fail(w, "out of memory");
        } else if (weights_is_state(key)) mtt_json_skip(&j);
        else if ((t = weights_add(w, key))) weights_read_tensor(&j, t);
        else return weights_fail(w, "out of memory");
    if (j.fault)
        return weights_fail(w, "byte %zu: %s: the file is damaged", (size_t)(j.at - text) + 8, j.fault);
    if (!w->has_crc || !w->model.layers || !w->model.vocab)
        return weights_fail(w, "it does not say which model it has: give a checkpoint of mtt_save");
    return w->crc == w->expected || weights_fail(w, "its metadata does not match its checksum: the file is "
                                                    "damaged");
}

/* Opens a checkpoint; it stays open to the program's end. `path` must stay. */
static int weights_open(weights *w, const char *path)
{
    struct stat info;
    uint64_t size = 0;
    uint32_t i, crc;
    char *text;
    int k, ok;
    memset(w, 0, sizeof(*w));
    w->path = path;
    for (i = 0; i < 256; w->crc_table[i++] = crc)
        for (crc = i, k = 0; k < 8; k++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    w->file = fopen(path, "rb");
    if (!w->file || fstat(fileno(w->file), &info))
        return weights_fail(w, "cannot open it: %s", strerror(errno));
    if (fread(&size, 8, 1, w->file) != 1 || size > WEIGHTS_HEADER || size + 8 > (uint64_t)info.st_size)
        return weights_fail(w, "it is no safetensors file, or cut off: give a checkpoint of mtt_save");
    w->data_begin = 8 + size;
    w->data_bytes = (uint64_t)info.st_size - w->data_begin;
    text = (char *)malloc((size_t)size + 1);
    if (!text) return weights_fail(w, "out of memory");
    ok = fread(text, 1, (size_t)size, w->file) == size || weights_fail(w, "cannot read it");
    ok = ok && weights_read_header(w, text, (size_t)size);
    free(text);
    return ok;
}

/* The tensor of a name and shape, columns 0 for a vector; NULL after a failure. */
static inline const weight *weights_take(weights *w, const char *name, uint64_t rows, uint64_t columns)
{
    weight *t = weights_find(w, name);
    if (t && t->is_f32 && t->shape[0] == rows && t->shape[1] == columns && t->begin <= t->end &&
        t->end <= w->data_bytes && t->end - t->begin == rows * (columns ? columns : 1) * sizeof(float)) {
        t->taken = 1;
        return t;
    }
    weights_fail(w, "%s is missing, or has another shape or type than its model", name);
    return NULL;
}

/* Reads all values of a tensor that weights_take has found. Values must be finite. */
static inline int weights_read(weights *w, const weight *t, float *values)
{
    size_t bytes = (size_t)(t->end - t->begin), i;
    off_t at = (off_t)(w->data_begin + t->begin);
    if (fseeko(w->file, at, SEEK_SET) || fread(values, 1, bytes, w->file) != bytes)
        return weights_fail(w, "cannot read %s", t->name);
    if (!t->has_crc || weights_crc(w, 0, values, bytes) != t->crc)
        return weights_fail(w, "%s does not match its checksum: the file is damaged", t->name);
    for (i = 0; i < bytes / sizeof(float); i++)
        if (!(values[i] - values[i] == 0))
            return weights_fail(w, "%s has values that are not finite: the run had diverged", t->name);
    return 1;
}
#endif
