/* convert.c - writes a model in the formats of other programs.

   cc -O3 -march=native tools/convert.c -o convert -lm                          (or: make build/convert)
   ./convert results/novel_fp32_best.safetensors novel             a folder for Hugging Face's from_pretrained
   ./convert results/novel_fp32_best.safetensors novel.gguf --type q8_0            a file for llama.cpp

   Reads a checkpoint, or a folder of Hugging Face's. Writes the weights in the type that --type names, and
   the tokenizer. The model must be of the form of GPT-2, Llama or Qwen3, without windows, and without a bias
   in its head. Sinusoidal positions become a table. In GGUF, version 3, the type is that of matrices. Norms,
   biases and positions are FP32. A matrix with rows that are no multiple of 32 is FP16 in place of Q8_0.
   Each file is written beside its place, synced and renamed. Of a folder, config.json is the last.
   Exit codes: 0; 2 wrong call; 3 a file, or a model that the format cannot express; 4 memory. */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "wordpiece.h"
#include "options.h"
#include "results.h"
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <unistd.h>

enum { F32, F16, BF16, Q8_0 };
enum { U32 = 4, I32 = 5, FLOAT32 = 6, BOOL = 7, STRING = 8, ARRAY = 9 }; /* of GGUF's metadata */

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
} piece;

static mtt_env env;
static mtt_model *source;
static mtt_model_desc model;
static const char *family, *origin, *target, *tokenizer_file; /* origin: the path of the source */
static int type, context, gguf;
static char path[PATH_MAX], temporary[PATH_MAX + 8]; /* of the file under way */
static FILE *out;
static piece *pieces;
static size_t piece_count, parameter_count;
static uint64_t key_count; /* of GGUF's metadata */

static mtt_tokenizer *tokenizer; /* NULL: none */
static int end_of_text, begin_of_text; /* the second is the first where there is none */
static mtt_slice *tokens, end_token, begin_token, merges; /* text of each id; in JSON: the others */
static unsigned char *kinds;                 /* of each id, as in GGUF; 0: an ordinary one */
static const char *cut_name = "gpt-2";       /* llama.cpp's name of the pre-tokenizer */

static const option options[] = {
    TITLE("usage: convert CHECKPOINT.safetensors|FOLDER FOLDER|FILE.gguf [option...]"),
    CHOICE("type", &type, "f32|f16|bf16|q8_0", "of matrices, default f16 in a file, f32 in a folder"),
    INT("context", &context, 1, "positions, default: all that are learned; of others those trained"),
    TEXT("tokenizer", &tokenizer_file, "its file, or none; default: the one beside the model"),
};

/* Ends the program. An unfinished file does not stay. */
static void fail(int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "convert: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    if (*temporary) unlink(temporary);
    exit(code);
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

/* ---- the model ---- */

/* Refuses what the formats cannot express. */
static void check_model(void)
{
    int window, seq_len;
    model = *mtt_model_describe(source);
    mtt_model_training(source, &window, &seq_len);
    if (mtt_form_family(&env, &model, &family)) fail(EXIT_DATA, "%s: %s", origin, env.error);
    if (gguf && model.qk_norm && model.rotary_factor != 1)
        fail(EXIT_DATA, "%s scales rotary positions, which llama.cpp's qwen3 lacks: convert it to a folder",
             origin);
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
    piece p = {.t = *t}, *last = pieces + piece_count - 1;
    int is_table = !strcmp(t->parameter, "wpe.weight");
    p.rows = (size_t)(t->transposed ? t->columns : t->rows);
    p.length = (size_t)(t->transposed ? t->rows : t->columns);
    p.type = gguf && (t->vector || is_table) ? F32 : type == Q8_0 && p.length % 32 ? F16 : type;
    p.bytes = p.rows * (p.type == Q8_0 ? p.length / 32 * 34 : p.length * (p.type == F32 ? 4 : 2));
    if (piece_count) p.offset = padded(last->offset + last->bytes);
    parameter_count += p.rows * p.length;
    if (!(piece_count & (piece_count + 1))) /* 0, 1, 3, 7, ...: the room is full */
        pieces = realloc(pieces, (2 * piece_count + 1) * sizeof(*pieces));
    if (!pieces) fail(EXIT_MEMORY, "out of memory");
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
    char *text;
    for (mtt_json_begin(j, '{'); mtt_json_key(j, &key);)
        if (mtt_slice_is(key, "id")) mtt_json_u64(j, &id);
        else if (!mtt_slice_is(key, "content") || !mtt_json_string(j, &content)) {
            if (mtt_slice_is(key, "special")) special = mtt_json_peek(j) == 't';
            mtt_json_skip(j);
        }
    if (id >= (uint64_t)model.vocab) return;
    if ((int)id == end_of_text) end_token = content;
    if ((int)id == begin_of_text) begin_token = content;
    text = allocate(content.size, 1); /* stays */
    tokens[id] = (mtt_slice){text, mtt_json_unescape(content, text)};
    kinds[id] = special ? 3 : 4;
}

/* The value of a key of an object; 0 bytes if there is none. */
static mtt_slice value_of(mtt_slice object, const char *name)
{
    mtt_slice key, value = {"", 0};
    mtt_json j;
    mtt_json_init(&j, object.at, object.size);
    mtt_json_begin(&j, '{');
    while (!value.size && mtt_json_key(&j, &key)) {
        const char *at = (mtt_json_peek(&j), j.at);
        mtt_json_skip(&j);
        if (mtt_slice_is(key, name)) value = (mtt_slice){at, (size_t)(j.at - at)};
    }
    return value;
}

/* Takes the tokens and merges of a tokenizer.json. */
static void read_words(mtt_slice file)
{
    mtt_slice bpe = value_of(file, "model"), added = value_of(file, "added_tokens");
    mtt_slice cut = value_of(file, "pre_tokenizer"), vocab = value_of(bpe, "vocab"), key;
    int whole = mtt_slice_is(value_of(bpe, "ignore_merges"), "true"); /* in llama.cpp: llama-bpe, not dbrx */
    char pattern[2048];
    mtt_json j;
    uint64_t id;
    merges = value_of(bpe, "merges");
    if (gguf && !mtt_slice_is(value_of(bpe, "type"), "\"BPE\""))
        fail(EXIT_DATA, "a GGUF file can have byte-level BPE only: convert to a folder, or pass --tokenizer "
             "none");
    snprintf(pattern, sizeof(pattern), "%.*s", (int)cut.size, cut.at);
    if (strstr(pattern, "Split"))
        cut_name = !strstr(pattern, "{1,3}") ? "qwen2" : whole ? "llama-bpe" : "dbrx";
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
    if (!tokenizer_file) tokenizer_file = mtt_model_tokenizer(source);
    if (!tokenizer_file) tokenizer_file = result_find_tokenizer(origin);
    if (!tokenizer_file)
        fail(EXIT_DATA, "there is no tokenizer beside %s: pass --tokenizer FILE, or none", origin);
    if (!strcmp(tokenizer_file, "none")) return;
    check(mtt_tokenizer_load(&env, tokenizer_file, &kind, &tokenizer));
    if (mtt_tokenizer_vocab(tokenizer) > model.vocab)
        fail(EXIT_DATA, "%s has %d ids, the model %d: pass --tokenizer with that of its run", tokenizer_file,
             mtt_tokenizer_vocab(tokenizer), model.vocab);
    end_of_text = mtt_tokenizer_end_of_text(tokenizer);
    begin_of_text = mtt_tokenizer_begin_of_text(tokenizer);
    if (begin_of_text < 0) begin_of_text = end_of_text;
}

/* Saves the tokenizer as a tokenizer.json, and reads that. */
static void save_tokenizer(const char *to)
{
    struct stat info;
    char *text;
    FILE *in;
    check(mtt_tokenizer_save(tokenizer, to));
    in = fopen(to, "rb");
    if (!in || fstat(fileno(in), &info)) fail(EXIT_DATA, "cannot open %s: %s", to, strerror(errno));
    text = allocate((size_t)info.st_size, 1); /* stays: tokens are in it */
    if (fread(text, (size_t)info.st_size, 1, in) != 1) fail(EXIT_DATA, "cannot read %s", to);
    fclose(in);
    read_words((mtt_slice){text, (size_t)info.st_size});
}

/* ---- writing ---- */

static void cannot_write(void)
{
    fail(EXIT_DATA, "cannot write %s: %s", path, strerror(errno));
}

static void open_output(const char *name)
{
    snprintf(path, sizeof(path), gguf ? "%s" : "%s/%s", target, name);
    snprintf(temporary, sizeof(temporary), "%s.tmp", path);
    unlink(temporary); /* a link there is not followed */
    out = fopen(temporary, "wbx");
    if (!out) cannot_write();
}

/* Syncs the file, renames it, and syncs its folder. */
static void close_output(void)
{
    int whole = !fflush(out) && !ferror(out) && !fsync(fileno(out)), folder;
    char *slash;
    if (fclose(out) || !whole || rename(temporary, path)) cannot_write();
    *temporary = 0;
    slash = strrchr(path, '/');
    if (slash) slash[1] = 0;
    folder = open(slash ? path : ".", O_RDONLY);
    if (folder >= 0) fsync(folder), close(folder); /* some file systems refuse it */
}

static void put(const void *data, size_t bytes)
{
    if (fwrite(data, 1, bytes, out) != bytes) cannot_write();
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
    put(zeros, padded((size_t)ftello(out)) - (size_t)ftello(out));
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

/* Blocks of 32: a scale in FP16, which is the largest absolute value over 127, and the values over it. */
static void put_q8_0(const float *x, size_t count)
{
    int8_t codes[32];
    int i;
    for (; count; count -= 32, x += 32) {
        float largest = 0, scale, inverse;
        uint16_t half;
        for (i = 0; i < 32; i++) largest = fmaxf(largest, fabsf(x[i]));
        scale = largest / 127;
        inverse = scale > 0 ? 1 / scale : 0;
        half = to_f16(scale);
        for (i = 0; i < 32; i++) codes[i] = (int8_t)roundf(x[i] * inverse);
        put(&half, sizeof(half));
        put(codes, sizeof(codes));
    }
}

static void put_row(const piece *p, const float *x, uint16_t *half)
{
    size_t i;
    if (p->type == F32) put(x, p->length * sizeof(*x));
    else if (p->type == Q8_0) put_q8_0(x, p->length);
    else {
        for (i = 0; i < p->length; i++) {
            half[i] = p->type == F16 ? to_f16(x[i]) : to_bf16(x[i]);
            if (p->type == F16 && (half[i] & 0x7fff) == 0x7c00)
                fail(EXIT_DATA, "%s has a weight of %g, too large for f16: pass --type bf16", p->t.name,
                     (double)x[i]);
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

static void put_piece(const piece *p)
{
    const mtt_form_tensor *t = &p->t;
    int is_table = !strcmp(t->parameter, "wpe.weight");
    size_t rows = (size_t)(is_table && model.max_seq > t->rows ? model.max_seq : t->rows), row, k;
    float *values = allocate(rows * (size_t)t->width, sizeof(*values));
    float *line = allocate(p->length, sizeof(*line));
    uint16_t *half = allocate(p->length, sizeof(*half));
    if (is_table && model.positions == MTT_POSITIONS_SINUSOIDAL) make_positions(values);
    else check(mtt_model_read(source, t->parameter, values));
    for (row = 0; row < p->rows; row++) {
        for (k = 0; k < p->length; k++) {
            size_t column = (size_t)mtt_form_column(t, (int64_t)(t->transposed ? row : k));
            line[k] = values[(t->transposed ? k : row) * (size_t)t->width + column];
        }
        put_row(p, line, half);
    }
    put_padding();
    free(values);
    free(line);
    free(half);
}

/* ---- a folder of Hugging Face ---- */

static void put_safetensors(void)
{
    const piece *p, *end = pieces + piece_count;
    uint64_t size;
    open_output("model.safetensors");
    put_u64(0);
    fprintf(out, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (p = pieces; p < end; p++) {
        fprintf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", p->t.name, types[p->type].tensor);
        if (!p->t.vector) fprintf(out, "%zu,", p->rows);
        fprintf(out, "%zu],\"data_offsets\":[%zu,%zu]}", p->length, p->offset, p->offset + p->bytes);
    }
    fprintf(out, "}");
    while (ftello(out) % 8) fprintf(out, " ");
    size = (uint64_t)ftello(out) - 8;
    for (p = pieces; p < end; p++) put_piece(p);
    if (fseeko(out, 0, SEEK_SET)) cannot_write();
    put_u64(size);
    close_output();
}

/* Writes a file of JSON. Each ' of the format becomes a ". */
static void put_config(const char *name, const char *format, ...)
{
    char quoted[2048], *c;
    va_list arguments;
    snprintf(quoted, sizeof(quoted), "%s", format);
    for (c = quoted; *c; c++)
        if (*c == '\'') *c = '"';
    open_output(name);
    va_start(arguments, format);
    vfprintf(out, quoted, arguments);
    va_end(arguments);
    close_output();
}

/* A folder without config.json cannot be loaded, so an unfinished one is not taken for a model. */
static void write_folder(void)
{
    const char *tied = model.tied_head ? "true" : "false", *bias = model.no_biases ? "false" : "true";
    char end[160], ids[96] = "", rope[320];
    if (mkdir(target, 0777) && errno != EEXIST)
        fail(EXIT_DATA, "cannot make %s: %s", target, strerror(errno));
    snprintf(path, sizeof(path), "%s/config.json", target);
    if (unlink(path) && errno != ENOENT) cannot_write();
    if (tokenizer) {
        snprintf(path, sizeof(path), "%s/tokenizer.json", target);
        save_tokenizer(path);
        snprintf(ids, sizeof(ids), ",\n \"bos_token_id\": %d,\n \"eos_token_id\": %d", begin_of_text,
                 end_of_text);
        put_config("tokenizer_config.json",
                   "{\n 'tokenizer_class': 'PreTrainedTokenizerFast',\n 'bos_token': '%.*s',\n "
                   "'eos_token': '%.*s',\n 'clean_up_tokenization_spaces': false,\n "
                   "'model_max_length': %d\n}\n",
                   (int)begin_token.size, begin_token.at, (int)end_token.size, end_token.at, context);
    }
    put_safetensors();
    put_config("generation_config.json", "{\n 'do_sample': true%s\n}\n", ids);
    snprintf(rope, sizeof(rope), "{\"rope_type\": \"default\", \"rope_theta\": %.7g}",
             (double)model.rotary_theta);
    if (model.rotary_factor != 1)
        snprintf(rope, sizeof(rope), "{\"rope_type\": \"llama3\", \"rope_theta\": %.7g, \"factor\": %.7g, "
                 "\"low_freq_factor\": %.7g, \"high_freq_factor\": %.7g, "
                 "\"original_max_position_embeddings\": %.9g}",
                 (double)model.rotary_theta, (double)model.rotary_factor, (double)model.rotary_low,
                 (double)model.rotary_high, (double)model.rotary_original);
    snprintf(end, sizeof(end), " \"tie_word_embeddings\": %s,\n \"torch_dtype\": \"%s\",\n \"dtype\": \"%s\"",
             tied, types[type].config, types[type].config);
    if (model.positions != MTT_POSITIONS_ROTARY)
        put_config("config.json",
                   "{\n 'model_type': 'gpt2',\n 'architectures': ['GPT2LMHeadModel'],\n 'vocab_size': %d,\n "
                   "'n_positions': %d,\n 'n_embd': %d,\n 'n_layer': %d,\n 'n_head': %d,\n 'n_inner': %d,\n "
                   "'activation_function': 'gelu_new',\n 'layer_norm_epsilon': %.7g,\n 'embd_pdrop': 0.0,\n "
                   "'attn_pdrop': 0.0,\n 'resid_pdrop': 0.0,\n%s%s\n}\n",
                   model.vocab, context, model.d_model, model.layers, model.heads, model.d_ff,
                   (double)model.norm_eps, end, ids);
    else
        put_config("config.json",
                   "{\n 'model_type': '%s',\n 'architectures': ['%sForCausalLM'],\n 'vocab_size': %d,\n "
                   "'max_position_embeddings': %d,\n 'hidden_size': %d,\n 'num_hidden_layers': %d,\n "
                   "'num_attention_heads': %d,\n 'num_key_value_heads': %d,\n 'head_dim': %d,\n "
                   "'intermediate_size': %d,\n 'hidden_act': 'silu',\n 'rms_norm_eps': %.7g,\n "
                   "'rope_theta': %.7g,\n 'rope_scaling': %s,\n 'rope_parameters': %s,\n "
                   "'attention_bias': %s,\n 'mlp_bias': %s,\n 'attention_dropout': 0.0,\n%s%s\n}\n",
                   family, model.qk_norm ? "Qwen3" : "Llama", model.vocab, context, model.d_model,
                   model.layers, model.heads, model.heads_kv, model.d_head, model.d_ff,
                   (double)model.norm_eps, (double)model.rotary_theta,
                   model.rotary_factor != 1 ? rope : "null", rope, bias, bias, end, ids);
}

/* ---- GGUF ---- */

static void put_string(mtt_slice text)
{
    put_u64(text.size);
    put(text.at, text.size);
}

static mtt_slice slice(const char *text)
{
    return (mtt_slice){text, strlen(text)};
}

static void put_key(const char *name, uint32_t kind)
{
    put_string(slice(name));
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

/* llama.cpp wants a text for every id, each different. Ids that the tokenizer lacks get [PADn]. */
static void put_tokenizer(void)
{
    mtt_slice text;
    uint64_t count = 0;
    mtt_json j;
    char pad[32];
    int i;
    put_text("tokenizer.ggml.model", slice(tokenizer ? "gpt2" : "no_vocab"));
    if (!tokenizer) return;
    put_text("tokenizer.ggml.pre", slice(cut_name));
    put_array("tokenizer.ggml.tokens", STRING, (uint64_t)model.vocab);
    for (i = 0; i < model.vocab; i++) {
        snprintf(pad, sizeof(pad), "[PAD%d]", i);
        put_string(tokens[i].at ? tokens[i] : slice(pad));
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
    put_number("tokenizer.ggml.eos_token_id", end_of_text);
    put_key("tokenizer.ggml.add_bos_token", BOOL);
    put(mtt_tokenizer_begin_of_text(tokenizer) < 0 ? "\0" : "\1", 1);
}

static void write_gguf(void)
{
    const char *slash = strrchr(origin, '/'), *name = slash ? slash + 1 : origin;
    const char *dot = strrchr(name, '.');
    const piece *p;
    snprintf(temporary, sizeof(temporary), "%s.tmp", target);
    if (tokenizer) save_tokenizer(temporary);
    open_output("");
    put("GGUF", 4);
    put_u32(3);
    put_u64(piece_count);
    put_u64(0); /* keys */
    put_text("general.architecture", slice(family));
    put_text("general.name", (mtt_slice){name, dot ? (size_t)(dot - name) : strlen(name)});
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
        put_string(slice(p->t.name));
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
    if (fseeko(out, 16, SEEK_SET)) cannot_write();
    put_u64(key_count);
    close_output();
}

int main(int argc, char **argv)
{
    struct stat info;
    size_t size;
    int words = argc > 2 && *argv[1] != '-' && *argv[2] != '-' ? 2 : 0, code;
    mtt_wait_passively(argv); /* before argv changes */
    if (words) {
        origin = argv[1];
        target = argv[2];
        argv[2] = argv[0];
    } else if (argc < 2 || strcmp(argv[1], "--help")) {
        fprintf(stderr, "convert: name a model and what to write, as in convert results/text_fp32_best"
                        ".safetensors text.gguf (--help lists all options)\n");
        return EXIT_USAGE;
    }
    code = option_parse(options, LENGTH(options), argc - words, argv + words);
    if (code) return code == OPTION_HELP ? 0 : code;
    size = strlen(target);
    gguf = size > 5 && !strcmp(target + size - 5, ".gguf");
    if (size > PATH_MAX - 32) return option_fail("the path of the output is too long");
    if (!gguf && type == Q8_0) return option_fail("--type q8_0 is for GGUF: name a file that ends in .gguf");
    if (!gguf && !stat(target, &info) && !S_ISDIR(info.st_mode))
        return option_fail("the output is neither a folder nor a name that ends in .gguf");
    if (gguf && !option_given("type")) type = F16;
    check(mtt_model_open(&env, origin, &source));
    check_model();
    list_pieces();
    load_tokenizer();
    if (gguf) write_gguf();
    else write_folder();
    printf("%s: %s with %d layers of %d, %d heads, %d ids, %d positions: %zu parameters in %s\n", target,
           family, model.layers, model.d_model, model.heads, model.vocab, context, parameter_count,
           types[type].config);
    mtt_model_close(source);
    return option_close_output(0);
}
