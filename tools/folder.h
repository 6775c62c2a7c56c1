/* folder.h - what a Hugging Face folder says beside its weights: the ids that end a text or a turn, templates
   of chats, settings of generation. Include it after mtt.h.

   A checkpoint that was trained from a folder says the same. It has these texts in its note, as one object:

      {"eos_token_id": [2, 7], "config": {...}, "generation_config": {...}, "tokenizer_config": {...},
       "chat_template": "..."}

   Of config.json only the ids are in it. Keys whose file the folder lacks are missing. */
#ifndef FOLDER_H_INCLUDED
#define FOLDER_H_INCLUDED

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "failure.h"
#include "posix.h"

#define FOLDER_TEMPLATES "additional_chat_templates" /* a folder of NAME.jinja, beside chat_template.jinja */

enum { FOLDER_ENDS = 64, FOLDER_BYTES = 64 << 20 }; /* most ids, largest file */

typedef struct folder {
    char *config, *generation, *tokenizer; /* config.json, generation_config.json, tokenizer_config.json, */
    char *chat;                            /* chat_template, in JSON; NULL: there is none */
    int32_t ends[FOLDER_ENDS]; /* eos_token_id of generation_config.json, else of config.json */
    int end_count;
} folder;

static inline void folder_close(folder *f)
{
    free(f->config);
    free(f->generation);
    free(f->tokenizer);
    free(f->chat);
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

/* Reads a file of the folder: UTF-8 without a NUL, and one object of JSON if `json`. */
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
    if (!in || size != (size_t)info.st_size)
        return failure(env, MTT_E_FILE, "%.300s: cannot read it: it must be a regular file below 64 MiB",
                       file);
    if (strlen(*text) < size || !mtt_utf8_valid(*text, size))
        return failure(env, MTT_E_FORMAT, "%.300s is no text: it has a NUL, or bytes that are not UTF-8: get "
                       "the file again, or remove it", file);
    mtt_json_init(&j, *text, size);
    if (!json || (mtt_json_peek(&j) == '{' && mtt_json_skip(&j) && mtt_json_end(&j))) return MTT_OK;
    return failure(env, MTT_E_FORMAT, "%.300s: byte %zu: %s: get the file again", file, (size_t)(j.at -
                   j.begin), j.fault ? j.fault : "expected one object");
}

/* ---- texts that are made ---- */

/* A text that grows. NULL after it, or what was added, has run out of memory, which stays so. */
typedef struct folder_text {
    char *at;
    size_t size;
    int failed;
} folder_text;

static inline void folder_add(folder_text *t, const char *at, size_t size)
{
    char *other = t->failed || !at ? NULL : (char *)realloc(t->at, t->size + size + 1);
    if (!other) {
        free(t->at);
        memset(t, 0, sizeof(*t));
        t->failed = 1;
        return;
    }
    memcpy(other + t->size, at, size);
    t->at = other;
    t->size += size;
    t->at[t->size] = 0;
}

static inline void folder_add_words(folder_text *t, const char *words)
{
    folder_add(t, words, strlen(words));
}

/* Adds a key and its value, both in JSON, to an object; no comma after its {. */
static inline void folder_add_pair(folder_text *t, mtt_slice key, mtt_slice value)
{
    folder_add_words(t, t->size && t->at[t->size - 1] != '{' ? ", \"" : "\"");
    folder_add(t, key.at, key.size);
    folder_add_words(t, "\": ");
    folder_add(t, value.at, value.size);
}

/* Adds a text as a string of JSON. */
static inline void folder_add_string(folder_text *t, const char *text)
{
    char escaped[8];
    size_t plain;
    folder_add_words(t, "\"");
    for (; *text; text += plain) {
        for (plain = 0; (unsigned char)text[plain] >= 32 && !strchr("\"\\", text[plain]);) plain++;
        if (plain) {
            folder_add(t, text, plain);
            continue;
        }
        snprintf(escaped, sizeof(escaped), *text < 32 ? "\\u%04x" : "\\%c", *text);
        folder_add_words(t, escaped);
        plain = 1;
    }
    folder_add_words(t, "\"");
}

static inline mtt_status folder_take_text(mtt_env *env, folder_text *t, char **out)
{
    *out = t->at;
    return t->failed ? failure(env, MTT_E_MEMORY, "out of memory") : MTT_OK;
}

/* ---- templates of chats ---- */

/* The text of a JSON string, with a NUL behind it, in memory of the caller's; NULL: no string, no memory. */
static inline char *folder_plain(mtt_slice string, size_t *size)
{
    char *plain = string.size > 1 && *string.at == '"' ? (char *)malloc(string.size) : NULL;
    if (!plain) return NULL;
    *size = mtt_json_unescape((mtt_slice){string.at + 1, string.size - 2}, plain);
    plain[*size] = 0;
    return plain;
}

/* 1 = a string without a NUL, at which programs in C cut it. */
static inline int folder_is_text(mtt_slice value)
{
    size_t size = 0;
    char *plain = folder_plain(value, &size);
    const int is = plain && strlen(plain) == size;
    free(plain);
    return is;
}

/* Walks through the templates of a chat_template: one without a name, a list of objects with name and
   template, or an object whose keys are names. Returns 0 past the last one; a fault is in j, and a name or
   template that is missing has the size 0. *turn is 0 at first. */
static inline int folder_template(mtt_json *j, int *turn, mtt_slice *name, mtt_slice *value)
{
    const char *begin;
    const int mark = *turn ? *turn : mtt_json_peek(j);
    if (!*turn && (mark == '[' || mark == '{')) mtt_json_begin(j, mark);
    name->size = value->size = 0;
    if (mark == '{') {
        *turn = mark;
        if (!folder_next(j, name, value)) return 0;
        name->at--, name->size += 2; /* its quotes */
        return 1;
    }
    if (mark == '[' ? !mtt_json_item(j) : *turn) return 0;
    *turn = mark;
    begin = (mtt_json_peek(j), j->at);
    mtt_json_skip(j);
    *value = (mtt_slice){begin, (size_t)(j->at - begin)};
    *name = folder_slice("\"default\"");
    if (mark != '[') return !j->fault;
    *name = *begin == '{' ? folder_value(*value, "name") : (mtt_slice){"", 0};
    *value = *begin == '{' ? folder_value(*value, "template") : (mtt_slice){"", 0};
    return !j->fault;
}

/* Keeps the chat_template of tokenizer_config.json. null says that there is none. */
static inline mtt_status folder_take_chat(mtt_env *env, const char *path, mtt_slice chat, folder *f)
{
    folder_text copy = {NULL, 0, 0};
    mtt_slice name, value;
    int turn = 0, fine = 1;
    mtt_json j;
    if (!chat.size || mtt_slice_is(chat, "null")) return MTT_OK;
    mtt_json_init(&j, chat.at, chat.size);
    while (folder_template(&j, &turn, &name, &value)) fine &= folder_is_text(name) && folder_is_text(value);
    if (!fine || j.fault)
        return failure(env, MTT_E_FORMAT, "%.300s: chat_template of tokenizer_config.json must be a text "
                       "without a NUL, or a list of objects whose name and template are such: correct it or "
                       "remove it", path);
    folder_add(&copy, chat.at, chat.size);
    return folder_take_text(env, &copy, &f->chat);
}

static inline int folder_by_name(const void *a, const void *b)
{
    return strcmp((const char *)a, (const char *)b);
}

/* Names of the additional templates, sorted, at most FOLDER_ENDS. Returns their number; -1: too many. */
static inline int folder_list_templates(const char *path, char names[FOLDER_ENDS][256])
{
    char place[4096];
    struct dirent *e;
    int count = 0;
    DIR *list;
    snprintf(place, sizeof(place), "%.4000s/" FOLDER_TEMPLATES, path);
    list = opendir(place);
    while (list && count >= 0 && (e = readdir(list))) {
        const size_t size = strlen(e->d_name), end = strlen(".jinja");
        if (size <= end || size - end > 255 || strcmp(e->d_name + size - end, ".jinja")) continue;
        if (count == FOLDER_ENDS) count = -1;
        else snprintf(names[count++], 256, "%.*s", (int)(size - end), e->d_name);
    }
    if (list) closedir(list);
    if (count > 0) qsort(names, (size_t)count, sizeof(names[0]), folder_by_name);
    return count;
}

/* Takes chat_template.jinja and the files of the folder additional_chat_templates. If there is one, they are
   all templates, as in transformers; else tokenizer_config.json has them. */
static inline mtt_status folder_read_templates(mtt_env *env, const char *path, folder *f)
{
    char names[FOLDER_ENDS][256], file[320], *jinja = NULL;
    folder_text t = {NULL, 0, 0};
    mtt_status status = folder_read(env, path, "chat_template.jinja", 0, &jinja);
    const int count = folder_list_templates(path, names);
    int i, k;
    if (!status && count < 0)
        status = failure(env, MTT_E_FORMAT, "%.300s/" FOLDER_TEMPLATES " has more than %d templates: remove "
                         "some", path, FOLDER_ENDS);
    if (!status && !jinja && !count)
        status = folder_take_chat(env, path, folder_value(folder_slice(f->tokenizer), "chat_template"), f);
    else if (!status && !count) folder_add_string(&t, jinja);
    for (i = jinja ? -1 : 0, k = 0; !status && i < count && count; i++) {
        char *text = NULL;
        snprintf(file, sizeof(file), FOLDER_TEMPLATES "/%s.jinja", i < 0 ? "" : names[i]);
        if (i >= 0) status = folder_read(env, path, file, 0, &text);
        if (i >= 0 && !status && !mtt_utf8_valid(names[i], strlen(names[i])))
            status = failure(env, MTT_E_FORMAT, "%.300s/" FOLDER_TEMPLATES ": the name of a file is not "
                             "UTF-8: rename it", path);
        if (!status && (i < 0 || text)) {
            folder_add_words(&t, k++ ? ", {\"name\": " : "[{\"name\": ");
            folder_add_string(&t, i < 0 ? "default" : names[i]);
            folder_add_words(&t, ", \"template\": ");
            folder_add_string(&t, i < 0 ? jinja : text);
            folder_add_words(&t, "}");
        }
        free(text);
    }
    if (k) folder_add_words(&t, "]");
    free(jinja);
    if (!status && (t.at || t.failed)) return folder_take_text(env, &t, &f->chat);
    free(t.at);
    return status;
}

/* ---- reading and writing ---- */

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

/* Copies an object of a note. */
static inline mtt_status folder_copy(mtt_env *env, mtt_slice object, char **out)
{
    folder_text copy = {NULL, 0, 0};
    if (!object.size) return MTT_OK;
    if (*object.at != '{') return failure(env, MTT_E_FORMAT, "expected an object");
    folder_add(&copy, object.at, object.size);
    return folder_take_text(env, &copy, out);
}

static inline mtt_status folder_open_note(mtt_env *env, const char *path, const char *note, folder *f)
{
    const mtt_slice all = folder_slice(note);
    mtt_status status = MTT_OK;
    mtt_json j;
    mtt_json_init(&j, all.at, all.size);
    if (!mtt_json_skip(&j) || !mtt_json_end(&j)) status = MTT_E_FORMAT;
    if (!status) status = folder_copy(env, folder_value(all, "config"), &f->config);
    if (!status) status = folder_copy(env, folder_value(all, "generation_config"), &f->generation);
    if (!status) status = folder_copy(env, folder_value(all, "tokenizer_config"), &f->tokenizer);
    if (!status) status = folder_take_chat(env, path, folder_value(all, "chat_template"), f);
    if (!status && !folder_take_ends(f, note)) status = MTT_E_FORMAT;
    if (status != MTT_E_FORMAT) return status;
    return failure(env, MTT_E_FORMAT, "%.300s: its note, on chats and generation, is not as train writes it: "
                   "give another checkpoint", path);
}

/* Opens what the folder of a model says, or the note of a checkpoint. A note that is no object is of another
   program, and says nothing. */
static inline mtt_status folder_open(mtt_env *env, const char *path, const mtt_model *model, folder *f)
{
    const char *note = mtt_model_note(model);
    mtt_status status;
    if (note) return *note == '{' ? folder_open_note(env, path, note, f) : MTT_OK;
    status = folder_read(env, path, "config.json", 1, &f->config);
    if (!status) status = folder_read(env, path, "generation_config.json", 1, &f->generation);
    if (!status) status = folder_read(env, path, "tokenizer_config.json", 1, &f->tokenizer);
    if (!status) status = folder_read_templates(env, path, f);
    if (status || (folder_take_ends(f, f->generation) && (f->end_count || folder_take_ends(f, f->config))))
        return status;
    return failure(env, MTT_E_FORMAT, "%.300s: eos_token_id of generation_config.json or config.json must be "
                   "an id, or a list of at most %d", path, FOLDER_ENDS);
}

/* Makes the note of checkpoints that are trained from the model, in memory of the caller's; NULL: the folder
   says nothing. It has the ids of ends that are below `vocab`. MTT_E_FORMAT: folder_open would refuse it. */
static inline mtt_status folder_note(mtt_env *env, const folder *f, int vocab, char **note)
{
    static const char *const ids[] = {"bos_token_id", "pad_token_id"};
    folder_text t = {NULL, 0, 0}, part = {NULL, 0, 0};
    mtt_json j = folder_begin(f->tokenizer);
    mtt_slice key, value;
    char number[16];
    int i, said = f->end_count || f->generation || f->tokenizer || f->chat;
    folder_add_words(&part, "[");
    for (i = 0; i < f->end_count; i++) {
        if (f->ends[i] >= vocab) continue;
        snprintf(number, sizeof(number), "%s%d", part.size > 1 ? ", " : "", (int)f->ends[i]);
        folder_add_words(&part, number);
    }
    folder_add_words(&part, "]");
    folder_add_words(&t, "{");
    folder_add_pair(&t, folder_slice("eos_token_id"), (mtt_slice){part.at, part.size});
    part.size = 0;
    folder_add_words(&part, "{");
    for (i = 0; i < 2; i++) {
        value = folder_value(folder_slice(f->config), ids[i]);
        if (!value.size || mtt_slice_is(value, "null")) continue;
        folder_add_pair(&part, folder_slice(ids[i]), value);
        said = 1;
    }
    folder_add_words(&part, "}");
    folder_add_pair(&t, folder_slice("config"), (mtt_slice){part.at, part.size});
    if (f->generation)
        folder_add_pair(&t, folder_slice("generation_config"), folder_slice(f->generation));
    part.size = 0;
    folder_add_words(&part, "{");
    while (folder_next(&j, &key, &value))
        if (!mtt_slice_is(key, "chat_template")) folder_add_pair(&part, key, value);
    folder_add_words(&part, "}");
    if (f->tokenizer)
        folder_add_pair(&t, folder_slice("tokenizer_config"), (mtt_slice){part.at, part.size});
    if (f->chat) folder_add_pair(&t, folder_slice("chat_template"), folder_slice(f->chat));
    folder_add_words(&t, "}");
    t.failed |= part.failed;
    free(part.at);
    mtt_json_init(&j, t.at ? t.at : "", t.size);
    if (said && !t.failed && mtt_json_skip(&j)) return folder_take_text(env, &t, note);
    free(t.at);
    if (t.failed) return failure(env, MTT_E_MEMORY, "out of memory");
    return said ? failure(env, MTT_E_FORMAT, "a text is nested too deep") : MTT_OK;
}
#endif
