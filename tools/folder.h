/* folder.h - what a Hugging Face folder says beside its weights: the ids that end a text or a turn, the
   template of a chat, settings of generation. A path that is no folder says nothing. Include it after
   mtt.h. */
#ifndef FOLDER_H_INCLUDED
#define FOLDER_H_INCLUDED

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "posix.h"

enum { FOLDER_ENDS = 64, FOLDER_BYTES = 64 << 20 }; /* most ids, largest file */

typedef struct folder {
    char *config, *generation, *tokenizer; /* config.json, generation_config.json, tokenizer_config.json, */
    char *jinja;                           /* chat_template.jinja; NULL: there is no such file */
    int32_t ends[FOLDER_ENDS]; /* eos_token_id of generation_config.json, else of config.json */
    int end_count;
} folder;

static inline void folder_close(folder *f)
{
    free(f->config);
    free(f->generation);
    free(f->tokenizer);
    free(f->jinja);
    memset(f, 0, sizeof(*f));
}

static inline mtt_slice folder_slice(const char *text)
{
    return (mtt_slice){text ? text : "", text ? strlen(text) : 0};
}

/* Enters the object that a text is. An object without keys, if there is no text. */
static inline mtt_json folder_begin(const char *text)
{
    mtt_json j;
    mtt_json_init(&j, text ? text : "{}", text ? strlen(text) : 2);
    mtt_json_begin(&j, '{');
    return j;
}

/* Takes the next key of an object and its value, as they are in the text. Returns 0 past the last one. */
static inline int folder_next(mtt_json *j, mtt_slice *key, mtt_slice *value)
{
    if (!mtt_json_key(j, key)) return 0;
    value->at = (mtt_json_peek(j), j->at);
    mtt_json_skip(j);
    value->size = (size_t)(j->at - value->at);
    return !j->fault;
}

/* The value of a key of an object; 0 bytes if there is none. */
static inline mtt_slice folder_value(mtt_slice object, const char *name)
{
    const mtt_slice none = {"", 0};
    mtt_slice key, value;
    mtt_json j;
    mtt_json_init(&j, object.at, object.size);
    mtt_json_begin(&j, '{');
    while (folder_next(&j, &key, &value))
        if (mtt_slice_is(key, name)) return value;
    return none;
}

/* Reads a file of the folder, which is one object of JSON if `json`. */
static inline mtt_status folder_read(mtt_env *env, const char *path, const char *name, int json, char **text)
{
    char file[4096];
    struct stat info;
    size_t size = 0;
    FILE *in;
    mtt_json j;
    if (snprintf(file, sizeof(file), "%s/%s", path, name) >= (int)sizeof(file) || stat(file, &info))
        return MTT_OK;
    in = S_ISREG(info.st_mode) && info.st_size < FOLDER_BYTES ? fopen(file, "rb") : NULL;
    *text = in ? (char *)malloc((size_t)info.st_size + 1) : NULL;
    if (*text) size = fread(*text, 1, (size_t)info.st_size, in);
    if (*text) (*text)[size] = 0;
    if (in) fclose(in);
    if (in && !*text) return MTT_E_MEMORY;
    if (!in || size != (size_t)info.st_size) {
        snprintf(env->error, sizeof(env->error), "%.300s: cannot read it: it must be a regular file below 64 "
                 "MiB", file);
        return MTT_E_FILE;
    }
    mtt_json_init(&j, *text, size);
    if (!json || (mtt_json_peek(&j) == '{' && mtt_json_skip(&j) && mtt_json_end(&j))) return MTT_OK;
    snprintf(env->error, sizeof(env->error), "%.300s: byte %zu: %s: get the file again", file,
             (size_t)(j.at - j.begin), j.fault ? j.fault : "expected one object");
    return MTT_E_FORMAT;
}

/* Takes eos_token_id, a number or a list of them. Returns 0 if it is something else. */
static inline int folder_take_ends(folder *f, const char *text)
{
    mtt_slice value = folder_value(folder_slice(text), "eos_token_id");
    uint64_t id;
    mtt_json j;
    int list;
    if (!value.size || mtt_slice_is(value, "null")) return 1;
    mtt_json_init(&j, value.at, value.size);
    list = mtt_json_peek(&j) == '[' && mtt_json_begin(&j, '[');
    while ((list ? mtt_json_item(&j) : !f->end_count) && mtt_json_u64(&j, &id)) {
        if (id > INT32_MAX || f->end_count == FOLDER_ENDS) return 0;
        f->ends[f->end_count++] = (int32_t)id;
    }
    return mtt_json_end(&j);
}

static inline mtt_status folder_open(mtt_env *env, const char *path, folder *f)
{
    mtt_status status = folder_read(env, path, "config.json", 1, &f->config);
    if (!status) status = folder_read(env, path, "generation_config.json", 1, &f->generation);
    if (!status) status = folder_read(env, path, "tokenizer_config.json", 1, &f->tokenizer);
    if (!status) status = folder_read(env, path, "chat_template.jinja", 0, &f->jinja);
    if (status || (folder_take_ends(f, f->generation) && (f->end_count || folder_take_ends(f, f->config))))
        return status;
    snprintf(env->error, sizeof(env->error), "%.300s: eos_token_id of generation_config.json or config.json "
             "must be an id, or a list of at most %d", path, FOLDER_ENDS);
    return MTT_E_FORMAT;
}
#endif
