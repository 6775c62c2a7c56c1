/* convert.c - writes a model in the formats of other programs.

   cc -O3 -march=native tools/convert.c -o convert -lm                          (or: make build/convert)
   ./convert results/novel_fp32_best.safetensors novel             a folder for Hugging Face's from_pretrained
   ./convert results/novel_fp32_best.safetensors novel.gguf --type q8_0            a file for llama.cpp

   Reads a checkpoint, or a folder of Hugging Face's. Writes the weights in the type that --type names, the
   tokenizer, and what a folder says of its chat: templates, ids that end a turn, settings of generation. A
   checkpoint says what the folder said that it was trained from. The model must be of the form of GPT-2,
   Llama or Qwen3, without windows, and without a bias in its head. Sinusoidal positions become a table. In
   GGUF, version 3, the type is that of matrices. Norms, biases and positions are FP32. A matrix with rows
   that are no multiple of 32 is FP16 in place of Q8_0.

   All files are complete and synced in temporaries before the first one is renamed, and config.json comes
   last: without it a folder is no model. A folder that is a model already gets new weights alone, and only if
   all its other files would stay the same. So a process that dies at any moment leaves the old model, the new
   one, or none where there was none. The source is never written to.
   Exit codes: 0; 2 wrong call; 3 a file, or a model that the format cannot express; 4 memory; 130 Ctrl-C. */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "wordpiece.h"
#include "options.h"
#include "results.h"
#include "folder.h"
#include <stdarg.h>

enum { F32, F16, BF16, Q8_0 };
enum { U32 = 4, I32 = 5, FLOAT32 = 6, TRUTH = 7, STRING = 8, ARRAY = 9 }; /* of GGUF's metadata */

/* Names in safetensors and in config.json; codes of a tensor and of a file in GGUF. */
static const struct {
    const char *tensor, *config;
    uint32_t code, file;
} types[] = {{"F32", "float32", 0, 0}, {"F16", "float16", 1, 1}, {"BF16", "bfloat16", 30, 32},
             {NULL, "q8_0", 8, 7}};

/* A tensor of the output: `rows` rows of `length` elements, in `bytes` bytes at `offset`. */
typedef struct piece {
    mtt_form_tensor t;
    int type;
    size_t rows, length, bytes, offset;
    uint32_t crc; /* of its bytes, in a folder */
} piece;

typedef struct text {
    char *at;
    size_t size, room;
} text;

/* The files of a folder, in the order in which they take their places. A GGUF file is WEIGHTS alone. */
enum { WORDS, WORDS_CONFIG, GENERATION, WEIGHTS, CONFIG, FILES };
static const char *const names[FILES] = {"tokenizer.json", "tokenizer_config.json", "generation_config.json",
                                         "model.safetensors", "config.json"};

static mtt_env env;
static mtt_model *source;
static mtt_model_desc model;
static const char *family, *origin, *target, *tokenizer_file; /* origin: the path of the source */
static int type, context, gguf;
static folder notes; /* of the source */
static volatile sig_atomic_t stopped;
static int made; /* 1 = the folder is new */
static mtt_writer *writers[FILES];
static text texts[FILES];
static uint64_t written; /* bytes of the weights' file */
static uint32_t crc;     /* of the tensor under way */
static piece *pieces;
static size_t piece_count, parameter_count;
static uint64_t key_count; /* of GGUF's metadata */

static mtt_tokenizer *tokenizer; /* NULL: none */
static char *words;                    /* a copy of texts[WORDS], in which tokens lose their escapes */
static int end_of_text, begin_of_text; /* the second is the first where there is none */
static mtt_slice *tokens, end_token, begin_token, merges; /* text of each id; in JSON: the others */
static unsigned char *kinds;                 /* of each id, as in GGUF; 0: an ordinary one */
static const char *cut_name = "gpt-2";       /* llama.cpp's name of the pre-tokenizer */

static const option options[] = {
    TITLE("usage: convert CHECKPOINT.safetensors|FOLDER FOLDER|FILE.gguf [option...]"),
    CHOICE("type", &type, "f32|f16|bf16|q8_0", "of matrices, default f16 in a file, f32 in a folder"),
    INT("context", &context, 1, "positions, default: all that are learned or that the source's folder "
                                "has; else those trained"),
    TEXT("tokenizer", &tokenizer_file, "its file, or none; default: the one beside the model"),
};

/* Ends the program. No temporary stays, and no folder that was made for nothing. */
static void fail(int code, const char *format, ...)
{
    va_list arguments;
    int i;
    va_start(arguments, format);
    fprintf(stderr, "convert: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    for (i = 0; i < FILES; i++) mtt_writer_close(writers[i]);
    if (made) rmdir(target); /* if it is empty */
    exit(code);
}

/* The second time it ends the program at once, in the middle of a long sync. */
static void on_signal(int number)
{
    stopped = 1;
    signal(number, SIG_DFL);
}

static void check_signals(void)
{
    if (stopped) fail(EXIT_INTERRUPTED, "stopped: %s is as it was", target);
}

static void check(mtt_status status)
{
    if (status) fail(status == MTT_E_MEMORY ? EXIT_MEMORY : EXIT_DATA, "%s",
                     env.error[0] ? env.error : mtt_status_string(status));
}

static void *allocate(size_t count, size_t size)
{
    void *block = calloc(count + !count, size);
    if (!block) fail(EXIT_MEMORY, "out of memory");
    return block;
}

static void *resize(void *block, size_t size)
{
    void *other = realloc(block, size);
    if (!other) fail(EXIT_MEMORY, "out of memory");
    return other;
}

static void append(void *to, const char *at, size_t size)
{
    text *t = to;
    if (t->room - t->size < size + 1) {
        size_t room = 2 * (t->size + size + 1);
        t->at = resize(t->at, room);
        t->room = room;
    }
    memcpy(t->at + t->size, at, size);
    t->size += size;
    t->at[t->size] = 0;
}

/* Appends to a text. Each ' of the format becomes a ". */
static void print(text *t, const char *format, ...)
{
    char quoted[2048], line[4096], *c;
    va_list arguments;
    int size;
    snprintf(quoted, sizeof(quoted), "%s", format);
    for (c = quoted; *c; c++)
        if (*c == '\'') *c = '"';
    va_start(arguments, format);
    size = vsnprintf(line, sizeof(line), quoted, arguments);
    va_end(arguments);
    append(t, line, (size_t)size < sizeof(line) ? (size_t)size : sizeof(line) - 1);
}

/* ---- the model ---- */

/* Refuses what the formats cannot express. */
static void check_model(void)
{
    int window, seq_len, i;
    model = *mtt_model_describe(source);
    mtt_model_training(source, &window, &seq_len);
    if (mtt_form_family(&env, &model, &family)) fail(EXIT_DATA, "%s: %s", origin, env.error);
    if (gguf && model.qk_norm && model.rotary_factor != 1)
        fail(EXIT_DATA, "%s scales rotary positions, which llama.cpp's qwen3 lacks: convert it to a folder",
             origin);
    for (i = 0; i < notes.end_count; i++)
        if (notes.ends[i] >= model.vocab)
            fail(EXIT_DATA, "%s: eos_token_id has %d, but the model's ids end at %d: correct it in "
                 "generation_config.json or config.json", origin, (int)notes.ends[i], model.vocab - 1);
    if (window)
        fail(EXIT_DATA, "%s has learned windows of %d keys, which the formats lack: train without "
             "--window-size and without windowN in --technique", origin, window);
    if (model.positions == MTT_POSITIONS_LEARNED && context > model.max_seq)
        fail(EXIT_USAGE, "--context %d: %s has learned %d positions", context, origin, model.max_seq);
    if (model.positions == MTT_POSITIONS_LEARNED && !context && seq_len && seq_len < model.max_seq)
        fprintf(stderr, "convert: note: the run trained %d of %d positions; --context %d leaves out the "
                "others\n", seq_len, model.max_seq, seq_len);
    if (!context && model.positions != MTT_POSITIONS_LEARNED) context = seq_len;
    if (!context) context = model.max_seq;
}

/* Tensors of GGUF begin at multiples of 32. */
static size_t padded(size_t bytes)
{
    return gguf ? (bytes + 31) / 32 * 32 : bytes;
}

static void add_piece(const mtt_form_tensor *t)
{
    piece p = {.t = *t};
    int is_table = !strcmp(t->parameter, "wpe.weight");
    p.rows = (size_t)(t->transposed ? t->columns : t->rows);
    p.length = (size_t)(t->transposed ? t->rows : t->columns);
    p.type = gguf && (t->vector || is_table) ? F32 : type == Q8_0 && p.length % 32 ? F16 : type;
    p.bytes = p.rows * (p.type == Q8_0 ? p.length / 32 * 34 : p.length * (p.type == F32 ? 4 : 2));
    if (piece_count) p.offset = padded(pieces[piece_count - 1].offset + pieces[piece_count - 1].bytes);
    parameter_count += p.rows * p.length;
    if (!(piece_count & (piece_count + 1))) /* 0, 1, 3, 7, ...: the room is full */
        pieces = resize(pieces, (2 * piece_count + 1) * sizeof(*pieces));
    pieces[piece_count++] = p;
}

static void list_pieces(void)
{
    mtt_model_desc written = model;
    mtt_form_tensor t;
    int64_t cursor = 0;
    if (model.positions == MTT_POSITIONS_SINUSOIDAL) written.positions = MTT_POSITIONS_LEARNED;
    written.max_seq = context;
    while (mtt_form_next(&written, gguf ? MTT_FORM_GGUF : MTT_FORM_HUGGING_FACE, &cursor, &t)) add_piece(&t);
    if (!gguf || model.positions != MTT_POSITIONS_ROTARY || model.rotary_factor == 1) return;
    t = (mtt_form_tensor){.name = "rope_freqs.weight", .rows = 1, .columns = model.d_head / 2, .vector = 1};
    add_piece(&t);
}

/* ---- the tokenizer ---- */

static void read_added(mtt_json *j)
{
    mtt_slice key, content = {"", 0};
    uint64_t id = 0;
    int special = 1;
    size_t at;
    for (mtt_json_begin(j, '{'); mtt_json_key(j, &key);)
        if (mtt_slice_is(key, "id")) mtt_json_u64(j, &id);
        else if (!mtt_slice_is(key, "content") || !mtt_json_string(j, &content)) {
            if (mtt_slice_is(key, "special")) special = mtt_json_peek(j) == 't';
            mtt_json_skip(j);
        }
    if (id >= (uint64_t)model.vocab) return;
    at = (size_t)(content.at - words);
    if ((int)id == end_of_text) end_token = (mtt_slice){texts[WORDS].at + at, content.size};
    if ((int)id == begin_of_text) begin_token = (mtt_slice){texts[WORDS].at + at, content.size};
    tokens[id] = (mtt_slice){content.at, mtt_json_unescape(content, words + at)};
    kinds[id] = special ? 3 : 4;
}

/* Takes the tokens and merges of a tokenizer.json. */
static void read_words(mtt_slice file)
{
    mtt_slice bpe = folder_value(file, "model"), added = folder_value(file, "added_tokens");
    mtt_slice cut = folder_value(file, "pre_tokenizer"), vocab = folder_value(bpe, "vocab"), key;
    int whole = mtt_slice_is(folder_value(bpe, "ignore_merges"), "true");
    char pattern[2048];
    mtt_json j;
    uint64_t id;
    merges = folder_value(bpe, "merges");
    if (gguf && !mtt_slice_is(folder_value(bpe, "type"), "\"BPE\""))
        fail(EXIT_DATA, "a GGUF file can have byte-level BPE only: convert to a folder, or pass --tokenizer "
             "none");
    snprintf(pattern, sizeof(pattern), "%.*s", (int)cut.size, cut.at);
    if (strstr(pattern, "Split"))
        cut_name = !strstr(pattern, "{1,3}") ? "qwen2" : whole ? "llama-bpe" : "dbrx"; /* of llama.cpp */
    if (strstr(pattern, "Digits")) cut_name = "smollm";
    tokens = allocate((size_t)model.vocab, sizeof(*tokens));
    kinds = allocate((size_t)model.vocab, 1);
    mtt_json_init(&j, added.at, added.size);
    for (mtt_json_begin(&j, '['); mtt_json_item(&j);) read_added(&j);
    mtt_json_init(&j, vocab.at, vocab.size);
    for (mtt_json_begin(&j, '{'); mtt_json_key(&j, &key) && mtt_json_u64(&j, &id);) {
        key.size = mtt_json_unescape(key, (char *)key.at);
        if (id < (uint64_t)model.vocab) tokens[id] = key;
    }
}

static void load_tokenizer(void)
{
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    if (!tokenizer_file) tokenizer_file = result_tokenizer_of(source, origin);
    if (!tokenizer_file)
        fail(EXIT_DATA, "there is no tokenizer beside %s: pass --tokenizer FILE, or none", origin);
    if (!strcmp(tokenizer_file, "none")) {
        if (notes.chat) fprintf(stderr, "convert: note: without a tokenizer the chat template is left out\n");
        return;
    }
    check(result_load_tokenizer(&env, tokenizer_file, &kind, source, &tokenizer));
    end_of_text = mtt_tokenizer_end_of_text(tokenizer);
    begin_of_text = mtt_tokenizer_begin_of_text(tokenizer);
    if (begin_of_text < 0) begin_of_text = end_of_text;
    mtt_tokenizer_print(tokenizer, append, &texts[WORDS]);
    words = allocate(texts[WORDS].size + 1, 1);
    memcpy(words, texts[WORDS].at, texts[WORDS].size);
    read_words((mtt_slice){words, texts[WORDS].size});
}

/* ---- writing ---- */

/* The path of a file of the output, in static storage. */
static const char *path_of(int file)
{
    static char path[PATH_MAX + 32];
    snprintf(path, sizeof(path), gguf ? "%s" : "%s/%s", target, names[file]);
    return path;
}

static void open_file(int file, uint64_t bytes)
{
    check(mtt_writer_open(&env, path_of(file), bytes, &writers[file]));
}

/* All files are on the disk before the first one is renamed. */
static void commit_files(void)
{
    int i;
    for (i = 0; i < FILES; i++)
        if (writers[i]) check(mtt_writer_finish(writers[i]));
    check_signals();
    for (i = 0; i < FILES; i++)
        if (writers[i]) check(mtt_writer_commit(writers[i]));
}

/* CRC-32 as zlib's, continued from `sum`, which begins as 0. */
static uint32_t crc_of(uint32_t sum, const void *data, size_t bytes)
{
    static uint32_t table[256];
    const unsigned char *at = data;
    uint32_t i, k;
    for (i = 0; i < 256 && !table[255]; i++)
        for (table[i] = i, k = 0; k < 8; k++) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xedb88320 : 0);
    for (sum = ~sum; bytes; bytes--) sum = sum >> 8 ^ table[(sum ^ *at++) & 255];
    return ~sum;
}

/* Writes to the file of the weights. */
static void put(const void *data, size_t bytes)
{
    check_signals();
    check(mtt_writer_put(writers[WEIGHTS], data, bytes));
    written += bytes;
    if (!gguf) crc = crc_of(crc, data, bytes);
}

static void put_u32(uint32_t number)
{
    put(&number, sizeof(number));
}

static void put_u64(uint64_t number)
{
    put(&number, sizeof(number));
}

static void put_padding(void)
{
    static const char zeros[32];
    put(zeros, padded((size_t)written) - (size_t)written);
}

/* To nearest even; from 65,520 up infinite. */
static uint16_t to_f16(float x)
{
    uint32_t bits, sign;
    memcpy(&bits, &x, sizeof(bits));
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits < 0x38800000) return (uint16_t)(sign | (uint32_t)lrintf(fabsf(x) * 0x1p24f)); /* below 2^-14 */
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void check_half(const piece *p, int in, uint16_t half, float x)
{
    int infinite = in == BF16 ? 0x7f80 : 0x7c00;
    if ((half & 0x7fff) == infinite)
        fail(EXIT_DATA, "%s has a weight of %g, too large for %s: pass --type %s", p->t.name, (double)x,
             in == BF16 ? "bf16" : type == Q8_0 ? "q8_0" : "f16", in == BF16 ? "f32" : "bf16");
}

/* Blocks of 32: a scale in FP16, which is the largest absolute value over 127, and the values over it. */
static void put_q8_0(const piece *p, const float *x)
{
    size_t count = p->length;
    int8_t codes[32];
    int i;
    for (; count; count -= 32, x += 32) {
        float largest = 0, scale, inverse;
        uint16_t half;
        for (i = 0; i < 32; i++) largest = fmaxf(largest, fabsf(x[i]));
        scale = largest / 127;
        inverse = scale > 0 ? 1 / scale : 0;
        half = to_f16(scale);
        check_half(p, Q8_0, half, largest);
        for (i = 0; i < 32; i++) codes[i] = (int8_t)roundf(x[i] * inverse);
        put(&half, sizeof(half));
        put(codes, sizeof(codes));
    }
}

static void put_row(const piece *p, const float *x, uint16_t *half)
{
    size_t i;
    if (p->type == F32) put(x, p->length * sizeof(*x));
    else if (p->type == Q8_0) put_q8_0(p, x);
    else {
        for (i = 0; i < p->length; i++) {
            half[i] = p->type == F16 ? to_f16(x[i]) : to_bf16(x[i]);
            check_half(p, p->type, half[i], x[i]);
        }
        put(half, p->length * sizeof(*half));
    }
}

/* The table that mtt adds to embeddings of models without learned positions. */
static void make_positions(float *values)
{
    int C = model.d_model, row, i;
    for (row = 0; row < context; row++)
        for (i = 0; i < C; i++) {
            double angle = row * pow(10000.0, -(double)(i / 2 * 2) / C);
            *values++ = (float)(0.02 * (i % 2 ? cos(angle) : sin(angle)));
        }
}

/* The divisors that llama.cpp applies to the rotary angles, one for each pair. */
static void put_rotary_factors(void)
{
    int i;
    for (i = 0; i < model.d_head / 2; i++) {
        double whole = pow((double)model.rotary_theta, -2.0 * i / model.d_head);
        float factor = (float)(whole / mtt_rotary_step(&model, i));
        put(&factor, sizeof(factor));
    }
    put_padding();
}

static void put_piece(piece *p)
{
    const mtt_form_tensor *t = &p->t;
    int is_table = !strcmp(t->parameter, "wpe.weight");
    size_t rows = (size_t)(is_table && model.max_seq > t->rows ? model.max_seq : t->rows), row, k;
    float *values = allocate(rows * (size_t)t->width, sizeof(*values));
    float *line = allocate(p->length, sizeof(*line));
    uint16_t *half = allocate(p->length, sizeof(*half));
    if (is_table && model.positions == MTT_POSITIONS_SINUSOIDAL) make_positions(values);
    else check(mtt_model_read(source, t->parameter, values));
    crc = 0;
    for (row = 0; row < p->rows; row++) {
        for (k = 0; k < p->length; k++) {
            size_t column = (size_t)mtt_form_column(t, (int64_t)(t->transposed ? row : k));
            line[k] = values[(t->transposed ? k : row) * (size_t)t->width + column];
        }
        put_row(p, line, half);
    }
    p->crc = crc;
    put_padding();
    free(values);
    free(line);
    free(half);
}

/* ---- a folder of Hugging Face ---- */

static int is_same(const char *a, const struct stat *b)
{
    struct stat info;
    return !stat(a, &info) && info.st_dev == b->st_dev && info.st_ino == b->st_ino;
}

/* 1 = the path names the source, or one of its files, be it through links or by another name. */
static int is_source(const char *path)
{
    char file[PATH_MAX + 260];
    const struct dirent *entry;
    struct stat info;
    DIR *files;
    int found;
    if (stat(path, &info)) return 0;
    found = is_same(origin, &info) || (tokenizer_file && is_same(tokenizer_file, &info));
    files = S_ISREG(info.st_mode) ? opendir(origin) : NULL;
    while (files && !found && (entry = readdir(files))) {
        snprintf(file, sizeof(file), "%s/%s", origin, entry->d_name);
        found = is_same(file, &info);
    }
    if (files) closedir(files);
    return found;
}

/* 1 = a file has this text, -1 = there is none. */
static int has_text(const char *path, const text *t)
{
    size_t at = 0, n = 1;
    char part[4096];
    int same = 1;
    struct stat info;
    FILE *in;
    if (lstat(path, &info)) return errno == ENOENT ? -1 : 0;
    in = stat(path, &info) || !S_ISREG(info.st_mode) ? NULL : fopen(path, "rb");
    if (!in) return 0;
    for (; same && n; at += n) {
        n = fread(part, 1, sizeof(part), in);
        same = n <= t->size - at && !memcmp(part, t->at + at, n);
    }
    same &= !ferror(in) && at == t->size;
    fclose(in);
    return same;
}

/* Refuses a folder that has files of another model: programs would mix them with the new ones. */
static void check_names(void)
{
    static const char *const endings[] = {".safetensors", ".json", ".bin", ".jinja", ".model", "merges.txt",
                                          "vocab.txt", FOLDER_TEMPLATES};
    char file[PATH_MAX + 260];
    const struct dirent *entry;
    DIR *files = opendir(target);
    if (!files) fail(EXIT_DATA, "cannot read %s: %s", target, strerror(errno));
    while ((entry = readdir(files))) {
        const char *name = entry->d_name;
        size_t size = strlen(name);
        int own = 0, other = 0, i;
        for (i = 0; i < FILES; i++) own |= !strcmp(name, names[i]) && (texts[i].size || i == WEIGHTS);
        for (i = 0; i < LENGTH(endings); i++)
            other |= size >= strlen(endings[i]) && !strcmp(name + size - strlen(endings[i]), endings[i]);
        snprintf(file, sizeof(file), "%s/%s", target, name);
        if (own && is_source(file)) fail(EXIT_DATA, "%s is a file of the source: name another folder", file);
        if (other && !own)
            fail(EXIT_DATA, "%s is of another model: remove it, or name another folder", file);
    }
    closedir(files);
}

/* Opens the files of text that are missing. Those that are there must be the same: new weights then replace
   the old ones in one rename, and no crash leaves files of two models. Weights without these files are not
   replaced, as they are not known to be of this model; without config.json, an earlier call did not end. */
static void open_texts(void)
{
    int missing = 0, there, i;
    for (i = 0; i < FILES; i++) {
        if (!texts[i].size) continue;
        there = has_text(path_of(i), &texts[i]);
        if (!there)
            fail(EXIT_DATA, "%s is of another model, or was written with other options: remove %s, or name "
                 "another folder", path_of(i), target);
        missing |= there < 0 && i != CONFIG;
        if (there < 0 && i != CONFIG) open_file(i, texts[i].size);
        if (writers[i]) check(mtt_writer_put(writers[i], texts[i].at, texts[i].size));
    }
    if (missing && !access(path_of(WEIGHTS), F_OK))
        fail(EXIT_DATA, "%s is there without its other files: remove it, or name another folder",
             path_of(WEIGHTS));
}

/* The header, with a checksum for each tensor, as mtt_save has them. Blanks align the data to 8 bytes. */
static void print_header(text *header)
{
    const piece *p, *end = pieces + piece_count;
    uint64_t size = 0;
    header->size = 0;
    append(header, (const char *)&size, sizeof(size));
    print(header, "{'__metadata__':{'format':'pt','crc32':'00000000'");
    for (p = pieces; p < end; p++) print(header, ",'crc32.%s':'%08x'", p->t.name, (unsigned)p->crc);
    print(header, "}");
    for (p = pieces; p < end; p++) {
        print(header, ",'%s':{'dtype':'%s','shape':[", p->t.name, types[p->type].tensor);
        if (!p->t.vector) print(header, "%zu,", p->rows);
        print(header, "%zu],'data_offsets':[%zu,%zu]}", p->length, p->offset, p->offset + p->bytes);
    }
    print(header, "}");
    while (header->size % 8) print(header, " ");
    size = header->size - 8;
    memcpy(header->at, &size, sizeof(size));
}

static void put_safetensors(void)
{
    text *header = &texts[WEIGHTS];
    piece *p;
    print_header(header);
    open_file(WEIGHTS, header->size + pieces[piece_count - 1].offset + pieces[piece_count - 1].bytes);
    put(header->at, header->size);
    for (p = pieces; p < pieces + piece_count; p++) put_piece(p);
    print_header(header);
    check(mtt_writer_patch(writers[WEIGHTS], 0, header->at, header->size));
}

static void print_value(text *t, mtt_slice key, mtt_slice value)
{
    print(t, t->at[t->size - 1] == '{' ? "\n '" : ",\n '");
    append(t, key.at, key.size);
    print(t, "': ");
    append(t, value.at, value.size);
}

static void print_number(text *t, const char *key, int number)
{
    char digits[16];
    snprintf(digits, sizeof(digits), "%d", number);
    print_value(t, folder_slice(key), folder_slice(digits));
}

/* An id of config.json. Returns 0 if it has none. */
static int print_id(text *t, const char *key)
{
    mtt_slice value = folder_value(folder_slice(notes.config), key);
    if (!value.size || mtt_slice_is(value, "null")) return 0;
    print_value(t, folder_slice(key), value);
    return 1;
}

static void print_begin(text *t)
{
    if (!print_id(t, "bos_token_id") && tokenizer) print_number(t, "bos_token_id", begin_of_text);
}

static void print_ends(text *t)
{
    const char *key = "eos_token_id";
    int i;
    if (notes.end_count < 2) {
        if (notes.end_count || tokenizer) print_number(t, key, notes.end_count ? *notes.ends : end_of_text);
        return;
    }
    print_value(t, folder_slice(key), folder_slice("["));
    for (i = 0; i < notes.end_count; i++) print(t, "%s%d", i ? ", " : "", (int)notes.ends[i]);
    print(t, "]");
}

/* tokenizer_config.json: that of the source, or a new one. */
static void print_words_config(text *t)
{
    mtt_json j = folder_begin(notes.tokenizer);
    mtt_slice key, value;
    print(t, "{");
    if (!notes.tokenizer)
        print(t, "\n 'tokenizer_class': 'PreTrainedTokenizerFast',\n 'bos_token': '%.*s',\n "
              "'eos_token': '%.*s',\n 'clean_up_tokenization_spaces': false,\n 'model_max_length': %d",
              (int)begin_token.size, begin_token.at, (int)end_token.size, end_token.at, context);
    while (folder_next(&j, &key, &value))
        if (mtt_slice_is(key, "auto_map"))
            fprintf(stderr, "convert: note: auto_map is left out, as the code that it names is not copied\n");
        else if (mtt_slice_is(key, "model_max_length") && option_given("context"))
            print_number(t, "model_max_length", context);
        else if (!mtt_slice_is(key, "chat_template")) print_value(t, key, value);
    if (notes.chat) print_value(t, folder_slice("chat_template"), folder_slice(notes.chat));
    print(t, "\n}\n");
}

/* generation_config.json: that of the source, or one that samples. */
static void print_generation(text *t)
{
    mtt_json j = folder_begin(notes.generation);
    mtt_slice key, value;
    print(t, "{");
    if (!notes.config) print_value(t, folder_slice("do_sample"), folder_slice("true"));
    if (!notes.generation) print_begin(t);
    while (folder_next(&j, &key, &value))
        if (!mtt_slice_is(key, "eos_token_id")) print_value(t, key, value);
    print_ends(t);
    print(t, "\n}\n");
}

static void print_config(text *t)
{
    const char *tied = model.tied_head ? "true" : "false", *bias = model.no_biases ? "false" : "true";
    char rope[320];
    snprintf(rope, sizeof(rope), "{\"rope_type\": \"default\", \"rope_theta\": %.7g}",
             (double)model.rotary_theta);
    if (model.rotary_factor != 1)
        snprintf(rope, sizeof(rope), "{\"rope_type\": \"llama3\", \"rope_theta\": %.7g, \"factor\": %.7g, "
                 "\"low_freq_factor\": %.7g, \"high_freq_factor\": %.7g, "
                 "\"original_max_position_embeddings\": %.9g}",
                 (double)model.rotary_theta, (double)model.rotary_factor, (double)model.rotary_low,
                 (double)model.rotary_high, (double)model.rotary_original);
    if (model.positions != MTT_POSITIONS_ROTARY)
        print(t, "{\n 'model_type': 'gpt2',\n 'architectures': ['GPT2LMHeadModel'],\n 'vocab_size': %d,\n "
              "'n_positions': %d,\n 'n_embd': %d,\n 'n_layer': %d,\n 'n_head': %d,\n 'n_inner': %d,\n "
              "'activation_function': 'gelu_new',\n 'layer_norm_epsilon': %.7g,\n 'embd_pdrop': 0.0,\n "
              "'attn_pdrop': 0.0,\n 'resid_pdrop': 0.0",
              model.vocab, context, model.d_model, model.layers, model.heads, model.d_ff,
              (double)model.norm_eps);
    else
        print(t, "{\n 'model_type': '%s',\n 'architectures': ['%sForCausalLM'],\n 'vocab_size': %d,\n "
              "'max_position_embeddings': %d,\n 'hidden_size': %d,\n 'num_hidden_layers': %d,\n "
              "'num_attention_heads': %d,\n 'num_key_value_heads': %d,\n 'head_dim': %d,\n "
              "'intermediate_size': %d,\n 'hidden_act': 'silu',\n 'rms_norm_eps': %.7g,\n "
              "'rope_theta': %.7g,\n 'rope_scaling': %s,\n 'rope_parameters': %s,\n "
              "'attention_bias': %s,\n 'mlp_bias': %s,\n 'attention_dropout': 0.0",
              family, model.qk_norm ? "Qwen3" : "Llama", model.vocab, context, model.d_model, model.layers,
              model.heads, model.heads_kv, model.d_head, model.d_ff, (double)model.norm_eps,
              (double)model.rotary_theta, model.rotary_factor != 1 ? rope : "null", rope, bias, bias);
    print(t, ",\n 'tie_word_embeddings': %s,\n 'torch_dtype': '%s',\n 'dtype': '%s'", tied,
          types[type].config, types[type].config);
    print_begin(t);
    print_id(t, "pad_token_id");
    print_ends(t);
    print(t, "\n}\n");
}

/* The lock of config.json, from the beginning to the end, keeps other calls from the folder. */
static void write_folder(void)
{
    if (is_source(target)) fail(EXIT_DATA, "%s is the source itself: name another folder", target);
    made = !mkdir(target, 0777);
    if (!made && errno != EEXIST) fail(EXIT_DATA, "cannot make %s: %s", target, strerror(errno));
    print_config(&texts[CONFIG]);
    print_generation(&texts[GENERATION]);
    if (tokenizer) print_words_config(&texts[WORDS_CONFIG]);
    open_file(CONFIG, texts[CONFIG].size);
    check_names();
    open_texts();
    put_safetensors();
    commit_files();
}

/* ---- GGUF ---- */

static void put_string(mtt_slice text)
{
    put_u64(text.size);
    put(text.at, text.size);
}

static void put_key(const char *name, uint32_t kind)
{
    put_string(folder_slice(name));
    put_u32(kind);
    key_count++;
}

static void put_text(const char *name, mtt_slice text)
{
    put_key(name, STRING);
    put_string(text);
}

static void put_number(const char *name, int number)
{
    put_key(name, U32);
    put_u32((uint32_t)number);
}

/* A key of the architecture, as in llama.block_count. */
static const char *own(const char *name)
{
    static char key[64];
    snprintf(key, sizeof(key), "%s.%s", family, name);
    return key;
}

static void put_float(const char *name, float number)
{
    put_key(name, FLOAT32);
    put(&number, sizeof(number));
}

static void put_array(const char *name, uint32_t kind, uint64_t count)
{
    put_key(name, ARRAY);
    put_u32(kind);
    put_u64(count);
}

/* The id that ends a turn of a chat: the source's eos_token if its ids have it, else the first of these that
   does not end a document. llama.cpp has one such id, and knows others by their names. */
static int end_of_turn(void)
{
    mtt_slice text = folder_value(folder_slice(notes.tokenizer), "eos_token");
    char plain[256];
    size_t size = 0;
    int turn = notes.end_count ? *notes.ends : end_of_text, i;
    if (*text.at == '{') text = folder_value(text, "content");
    if (text.size > 1 && text.size < sizeof(plain))
        size = mtt_json_unescape((mtt_slice){text.at + 1, text.size - 2}, plain);
    for (i = notes.end_count - 1; i >= 0; i--)
        if (notes.ends[i] != end_of_text) turn = notes.ends[i];
    for (i = 0; i < notes.end_count; i++) {
        mtt_slice token = tokens[notes.ends[i]];
        if (token.at && size && token.size == size && !memcmp(token.at, plain, size)) turn = notes.ends[i];
    }
    for (i = 0; i < notes.end_count; i++)
        if (notes.ends[i] != turn && notes.ends[i] != end_of_text)
            fprintf(stderr, "convert: note: a GGUF file says of id %d only by its text that it ends a turn\n",
                    (int)notes.ends[i]);
    return turn;
}

/* The template of a chat; of several the default one. */
static void put_template(void)
{
    mtt_slice name, value, plain;
    int turn = 0, others = 0;
    char *chosen = NULL;
    mtt_json j;
    mtt_json_init(&j, notes.chat ? notes.chat : "", notes.chat ? strlen(notes.chat) : 0);
    while (notes.chat && folder_template(&j, &turn, &name, &value))
        if (!mtt_slice_is(name, "\"default\"")) others++;
        else {
            free(chosen);
            chosen = folder_plain(value, &plain.size);
            if (!chosen) fail(EXIT_MEMORY, "out of memory");
        }
    if (others)
        fprintf(stderr, "convert: note: of several chat templates, the default one alone is kept%s\n",
                chosen ? "" : ", and there is none");
    plain.at = chosen;
    if (chosen) put_text("tokenizer.chat_template", plain);
    free(chosen);
}

/* GGUF has no place for settings of generation. */
static void note_settings(void)
{
    static const char *const carried = "bos_token_id eos_token_id pad_token_id transformers_version";
    mtt_json j = folder_begin(notes.generation);
    mtt_slice key, value;
    char name[64];
    while (folder_next(&j, &key, &value)) {
        snprintf(name, sizeof(name), "%.*s", (int)key.size, key.at);
        if (!strstr(carried, name) && *name != '_' && !(mtt_slice_is(key, "do_sample") && *value.at == 't'))
            fprintf(stderr, "convert: note: a GGUF file has no %s: pass %.*s to the program that reads it\n",
                    name, value.size < 40 ? (int)value.size : 40, value.at);
    }
}

/* llama.cpp wants a text for every id, each different. Ids that the tokenizer lacks get [PADn]. */
static void put_tokenizer(void)
{
    mtt_slice text;
    uint64_t count = 0;
    mtt_json j;
    char pad[32];
    int i, turn;
    put_text("tokenizer.ggml.model", folder_slice(tokenizer ? "gpt2" : "no_vocab"));
    if (!tokenizer) return;
    turn = end_of_turn();
    put_text("tokenizer.ggml.pre", folder_slice(cut_name));
    put_array("tokenizer.ggml.tokens", STRING, (uint64_t)model.vocab);
    for (i = 0; i < model.vocab; i++) {
        snprintf(pad, sizeof(pad), "[PAD%d]", i);
        put_string(tokens[i].at ? tokens[i] : folder_slice(pad));
    }
    put_array("tokenizer.ggml.token_type", I32, (uint64_t)model.vocab);
    for (i = 0; i < model.vocab; i++) put_u32(kinds[i] ? kinds[i] : tokens[i].at ? 1 : 5);
    mtt_json_init(&j, merges.at, merges.size);
    for (mtt_json_begin(&j, '['); mtt_json_item(&j) && mtt_json_string(&j, &text);) count++;
    put_array("tokenizer.ggml.merges", STRING, count);
    mtt_json_init(&j, merges.at, merges.size);
    for (mtt_json_begin(&j, '['); mtt_json_item(&j) && mtt_json_string(&j, &text);) {
        text.size = mtt_json_unescape(text, (char *)text.at);
        put_string(text);
    }
    put_number("tokenizer.ggml.bos_token_id", begin_of_text);
    put_number("tokenizer.ggml.eos_token_id", turn);
    if (turn != end_of_text) put_number("tokenizer.ggml.eot_token_id", turn);
    put_key("tokenizer.ggml.add_bos_token", TRUTH);
    put(mtt_tokenizer_begin_of_text(tokenizer) < 0 ? "\0" : "\1", 1);
    put_template();
}

/* The name of the model: that of its folder, or of its file without .safetensors. */
static mtt_slice model_name(void)
{
    static char whole[PATH_MAX];
    const char *ending = ".safetensors", *slash;
    size_t size = strlen(origin), end = strlen(ending);
    struct stat info;
    snprintf(whole, sizeof(whole), "%s", origin);
    while (size > 1 && whole[size - 1] == '/') whole[--size] = 0;
    slash = posix_slash(whole);
    if ((!strcmp(slash ? slash + 1 : whole, ".") || !strcmp(slash ? slash + 1 : whole, "..")) &&
        realpath(origin, whole)) slash = posix_slash(whole);
    slash = slash ? slash + 1 : whole;
    size = strlen(slash);
    if (!stat(origin, &info) && S_ISREG(info.st_mode) && size > end && !strcmp(slash + size - end, ending))
        size -= end;
    return (mtt_slice){slash, size};
}

static void write_gguf(void)
{
    piece *p;
    note_settings();
    if (is_source(target)) fail(EXIT_DATA, "%s is a file of the source: name another", target);
    open_file(WEIGHTS, pieces[piece_count - 1].offset + pieces[piece_count - 1].bytes);
    put("GGUF", 4);
    put_u32(3);
    put_u64(piece_count);
    put_u64(0); /* keys */
    put_text("general.architecture", folder_slice(family));
    put_text("general.name", model_name());
    put_number("general.file_type", (int)types[type].file);
    put_number("general.quantization_version", 2);
    put_number(own("vocab_size"), model.vocab);
    put_number(own("context_length"), context);
    put_number(own("embedding_length"), model.d_model);
    put_number(own("block_count"), model.layers);
    put_number(own("feed_forward_length"), model.d_ff);
    put_number(own("attention.head_count"), model.heads);
    if (model.positions != MTT_POSITIONS_ROTARY)
        put_float(own("attention.layer_norm_epsilon"), model.norm_eps);
    else {
        put_number(own("attention.head_count_kv"), model.heads_kv);
        put_number(own("attention.key_length"), model.d_head);
        put_number(own("attention.value_length"), model.d_head);
        put_float(own("attention.layer_norm_rms_epsilon"), model.norm_eps);
        put_number(own("rope.dimension_count"), model.d_head);
        put_float(own("rope.freq_base"), model.rotary_theta);
    }
    put_tokenizer();
    for (p = pieces; p < pieces + piece_count; p++) {
        put_string(folder_slice(p->t.name));
        put_u32(p->t.vector ? 1 : 2);
        put_u64(p->length);
        if (!p->t.vector) put_u64(p->rows);
        put_u32(types[p->type].code);
        put_u64(p->offset);
    }
    put_padding();
    for (p = pieces; p < pieces + piece_count; p++)
        if (*p->t.parameter) put_piece(p);
        else put_rotary_factors();
    check(mtt_writer_patch(writers[WEIGHTS], 16, &key_count, sizeof(key_count)));
    commit_files();
}

int main(int argc, char **argv)
{
    struct stat info;
    size_t size;
    int given = argc > 2 && *argv[1] != '-' && *argv[2] != '-' ? 2 : 0, code, i;
    mtt_wait_passively(argv); /* before argv changes */
    posix_begin(argc, argv);
    if (given) {
        origin = argv[1];
        target = argv[2];
        argv[2] = argv[0];
    } else if (argc < 2 || strcmp(argv[1], "--help")) {
        fprintf(stderr, "convert: name a model and what to write, as in convert results/text_fp32_best"
                        ".safetensors text.gguf (--help lists all options)\n");
        return EXIT_USAGE;
    }
    code = option_parse(options, LENGTH(options), argc - given, argv + given);
    if (code) return code == OPTION_HELP ? 0 : code;
    size = strlen(target);
    gguf = size > 5 && !strcmp(target + size - 5, ".gguf");
    if (size > PATH_MAX - 32) return option_fail("the path of the output is too long");
    if (!gguf && type == Q8_0) return option_fail("--type q8_0 is for GGUF: name a file that ends in .gguf");
    if (!gguf && !stat(target, &info) && !S_ISDIR(info.st_mode))
        return option_fail("the output is neither a folder nor a name that ends in .gguf");
    if (gguf && !option_given("type")) type = F16;
    signal(SIGXFSZ, SIG_IGN); /* a write then fails, and says why */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    if (signal(SIGHUP, SIG_IGN) != SIG_IGN) signal(SIGHUP, on_signal);
    check(mtt_model_open(&env, origin, &source));
    check(folder_open(&env, origin, source, &notes));
    check_model();
    list_pieces();
    load_tokenizer();
    if (gguf) write_gguf();
    else write_folder();
    printf("%s: %s with %d layers of %d, %d heads, %d ids, %d positions: %zu parameters in %s\n", target,
           family, model.layers, model.d_model, model.heads, model.vocab, context, parameter_count,
           types[type].config);
    for (i = 0; i < FILES; i++) mtt_writer_close(writers[i]), free(texts[i].at);
    mtt_tokenizer_destroy(tokenizer);
    mtt_model_close(source);
    folder_close(&notes);
    free(words);
    free(tokens);
    free(kinds);
    free(pieces);
    return option_close_output(0);
}
