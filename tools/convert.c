/* convert.c - writes the weights of a checkpoint in the formats of other programs.

   cc -O3 -march=native tools/convert.c -o convert -lm                          (or: make build/convert)
   ./convert results/novel_fp32_best.safetensors novel             a folder for Hugging Face's from_pretrained
   ./convert results/novel_fp32_best.safetensors novel.gguf --type q8_0            a file for llama.cpp

   Writes the FP32 weights of the checkpoint in the type that --type names, and the tokenizer. Both formats
   are GPT-2's, so the model must not have a bias in its head, or windows. Sinusoidal positions become a
   table. In GGUF, version 3, the type is that of matrices. Norms, biases and positions are FP32. A matrix
   with rows that are no multiple of 32 is FP16 in place of Q8_0.
   Each file is written beside its place, synced and renamed. Of a folder, config.json is the last.
   Exit codes: 0; 2 wrong call; 3 a file, or a model that the format cannot express; 4 memory. */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "wordpiece.h"
#include "options.h"
#include "weights.h"
#include <fcntl.h>
#include <unistd.h>

enum { EXIT_USAGE = 2, EXIT_DATA = 3, EXIT_MEMORY = 4 };
enum { F32, F16, BF16, Q8_0 };
enum { U32 = 4, I32 = 5, FLOAT32 = 6, BOOL = 7, STRING = 8, ARRAY = 9 }; /* of GGUF's metadata */

/* Names in safetensors and in config.json; codes of a tensor and of a file in GGUF. */
static const struct {
    const char *tensor, *config;
    uint32_t code, file;
} types[] = {{"F32", "float32", 0, 0}, {"F16", "float16", 1, 1}, {"BF16", "bfloat16", 30, 32},
             {NULL, "q8_0", 8, 7}};

/* Parameters of mtt, and their names in GGUF. Rows and columns: Vocabulary, Positions, width C, 3 C, F; a
   vector has no columns. Hugging Face has the same names and orientation: linear layers are [in, out]. GGUF
   has them transposed. */
static const struct {
    const char *name, *gguf;
    char rows, columns;
} parameters[] = {
    {"wte.weight", "token_embd.weight", 'V', 'C'},
    {"wpe.weight", "position_embd.weight", 'P', 'C'},
    {"h.%d.ln_1.weight", "blk.%d.attn_norm.weight", 'C', 0},
    {"h.%d.ln_1.bias", "blk.%d.attn_norm.bias", 'C', 0},
    {"h.%d.attn.c_attn.weight", "blk.%d.attn_qkv.weight", 'C', '3'},
    {"h.%d.attn.c_attn.bias", "blk.%d.attn_qkv.bias", '3', 0},
    {"h.%d.attn.c_proj.weight", "blk.%d.attn_output.weight", 'C', 'C'},
    {"h.%d.attn.c_proj.bias", "blk.%d.attn_output.bias", 'C', 0},
    {"h.%d.ln_2.weight", "blk.%d.ffn_norm.weight", 'C', 0},
    {"h.%d.ln_2.bias", "blk.%d.ffn_norm.bias", 'C', 0},
    {"h.%d.mlp.c_fc.weight", "blk.%d.ffn_up.weight", 'C', 'F'},
    {"h.%d.mlp.c_fc.bias", "blk.%d.ffn_up.bias", 'F', 0},
    {"h.%d.mlp.c_proj.weight", "blk.%d.ffn_down.weight", 'F', 'C'},
    {"h.%d.mlp.c_proj.bias", "blk.%d.ffn_down.bias", 'C', 0},
    {"ln_f.weight", "output_norm.weight", 'C', 0},
    {"ln_f.bias", "output_norm.bias", 'C', 0},
    {"lm_head.weight", "output.weight", 'V', 'C'},
};
enum { LAYER_FIRST = 2, LAYER_END = 14 };

/* A tensor of the output: `rows` rows of `length` elements, in `bytes` bytes at `offset`. */
typedef struct piece {
    char name[64];
    const weight *from; /* NULL: the sinusoidal table */
    int type, vector, transposed;
    size_t rows, length, bytes, offset;
} piece;

static mtt_env env;
static mtt_model_desc model;
static weights source;
static int type, context, gguf;
static const char *target, *tokenizer_file;
static char path[PATH_MAX], temporary[PATH_MAX + 8]; /* of the file under way */
static FILE *out;
static piece *pieces;
static size_t piece_count, parameter_count;
static uint64_t key_count; /* of GGUF's metadata */

static mtt_tokenizer *tokenizer; /* NULL: none */
static int end_of_text;
static mtt_slice *tokens, end_token, merges; /* text of each id; in JSON: of end_of_text, and all merges */
static unsigned char *is_control;            /* of each id */

static const option options[] = {
    TITLE("usage: convert CHECKPOINT.safetensors FOLDER|FILE.gguf [option...]"),
    CHOICE("type", &type, "f32|f16|bf16|q8_0", "of matrices, default f16 in a file, f32 in a folder"),
    INT("context", &context, 1, "positions, default: all that are learned; of sinusoidal ones those trained"),
    TEXT("tokenizer", &tokenizer_file, "its file, or none; default: the one beside the checkpoint"),
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
    if (status) fail(status == MTT_E_MEMORY ? EXIT_MEMORY : EXIT_DATA, "%s", env.error);
}

static void *allocate(size_t count, size_t size)
{
    void *block = calloc(count + !count, size);
    if (!block) fail(EXIT_MEMORY, "out of memory");
    return block;
}

/* ---- the model ---- */

/* Refuses what GPT-2's format cannot express. */
static void check_model(void)
{
    const mtt_field *f;
    mtt_model_desc plain;
    check(mtt_model_resolve(&env, &source.model, &model));
    plain = (mtt_model_desc){.layers = model.layers, .heads = model.heads, .d_model = model.d_model,
                             .d_ff = model.d_ff, .vocab = model.vocab, .max_seq = model.max_seq,
                             .positions = model.positions, .tied_head = model.tied_head, .no_head_bias = 1};
    check(mtt_model_resolve(&env, &plain, &plain));
    if (!model.no_head_bias)
        fail(EXIT_DATA, "%s has a bias in its head, which GPT-2's format lacks: train with --no-head-bias",
             source.path);
    if (source.window)
        fail(EXIT_DATA, "%s has learned windows of %d keys, which GPT-2's format lacks: train without "
             "--window-size and without windowN in --technique", source.path, source.window);
    for (f = mtt_model_fields(); f->name; f++)
        if (memcmp((char *)&plain + f->offset, (char *)&model + f->offset, sizeof(int)))
            fail(EXIT_DATA, "%s has another %s than GPT-2: train with the default", source.path, f->name);
    if (model.positions == MTT_POSITIONS_SINUSOIDAL && !context)
        context = source.seq_len ? source.seq_len : model.max_seq;
    if (model.positions == MTT_POSITIONS_SINUSOIDAL) return;
    if (context > model.max_seq)
        fail(EXIT_USAGE, "--context %d: %s has learned %d positions", context, source.path, model.max_seq);
    if (!context && source.seq_len && source.seq_len < model.max_seq)
        fprintf(stderr, "convert: note: the run trained %d of %d positions; --context %d leaves out the "
                "others\n", source.seq_len, model.max_seq, source.seq_len);
    if (!context) context = model.max_seq;
}

static size_t size_of(char letter)
{
    const int sizes[] = {model.vocab, context, model.d_model, 3 * model.d_model, model.d_ff};
    return letter ? (size_t)sizes[strchr("VPC3F", letter) - "VPC3F"] : 1;
}

/* Tensors of GGUF begin at multiples of 32. */
static size_t padded(size_t bytes)
{
    return gguf ? (bytes + 31) / 32 * 32 : bytes;
}

static void add_piece(int row, int layer)
{
    size_t rows = size_of(parameters[row].rows), columns = size_of(parameters[row].columns);
    int is_table = parameters[row].rows == 'P';
    piece p = {.vector = !parameters[row].columns}, *last = pieces + piece_count - 1;
    char name[40];
    snprintf(name, sizeof(name), parameters[row].name, layer);
    if (gguf) snprintf(p.name, sizeof(p.name), parameters[row].gguf, layer);
    else snprintf(p.name, sizeof(p.name), "%s%s", *name == 'l' && name[1] == 'm' ? "" : "transformer.", name);
    if (!is_table || model.positions == MTT_POSITIONS_LEARNED) {
        size_t stored = is_table ? (size_t)model.max_seq : rows;
        p.from = weights_take(&source, name, stored, p.vector ? 0 : columns);
        if (!p.from) fail(EXIT_DATA, "%s", source.error);
    }
    p.transposed = gguf && !p.vector && layer >= 0;
    p.rows = p.vector ? 1 : p.transposed ? columns : rows;
    p.length = p.vector || p.transposed ? rows : columns;
    p.type = gguf && (p.vector || is_table) ? F32 : type == Q8_0 && p.length % 32 ? F16 : type;
    p.bytes = p.rows * (p.type == Q8_0 ? p.length / 32 * 34 : p.length * (p.type == F32 ? 4 : 2));
    if (piece_count) p.offset = padded(last->offset + last->bytes);
    parameter_count += rows * columns;
    pieces[piece_count++] = p;
}

static void list_pieces(void)
{
    int layer, row, last = LENGTH(parameters) - (model.tied_head != 0);
    size_t i;
    pieces = allocate((size_t)model.layers * LENGTH(parameters) + LENGTH(parameters), sizeof(*pieces));
    for (row = 0; row < LAYER_FIRST; row++) add_piece(row, -1);
    for (layer = 0; layer < model.layers; layer++)
        for (row = LAYER_FIRST; row < LAYER_END; row++) add_piece(row, layer);
    for (row = LAYER_END; row < last; row++) add_piece(row, -1);
    for (i = 0; i < source.count; i++)
        if (!source.at[i].taken)
            fail(EXIT_DATA, "%s has a tensor %s, which GPT-2's format lacks", source.path, source.at[i].name);
}

/* ---- the tokenizer ---- */

/* The tokenizer of the checkpoint DATA_TECHNIQUE_best.safetensors is DATA.tokenizer.json beside it. */
static const char *find_tokenizer(void)
{
    static char found[PATH_MAX + 32];
    const char *slash = strrchr(source.path, '/');
    size_t folder = slash ? (size_t)(slash + 1 - source.path) : 0, size = strlen(source.path);
    for (; size > folder; size--) {
        snprintf(found, sizeof(found), "%.*s.tokenizer.json", (int)size, source.path);
        if (strchr("_.", source.path[size]) && !access(found, R_OK)) return found;
    }
    fail(EXIT_DATA, "there is no tokenizer beside %s: pass --tokenizer FILE, or none", source.path);
    return NULL;
}

static void read_added(mtt_json *j)
{
    mtt_slice key, content = {"", 0};
    uint64_t id = 0;
    char *text;
    for (mtt_json_begin(j, '{'); mtt_json_key(j, &key);)
        if (mtt_slice_is(key, "id")) mtt_json_u64(j, &id);
        else if (!mtt_slice_is(key, "content") || !mtt_json_string(j, &content)) mtt_json_skip(j);
    if (id >= (uint64_t)model.vocab) return;
    if ((int)id == end_of_text) end_token = content;
    text = allocate(content.size, 1); /* stays */
    tokens[id] = (mtt_slice){text, mtt_json_unescape(content, text)};
    is_control[id] = 1;
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
    mtt_slice cut = value_of(value_of(file, "pre_tokenizer"), "type"), vocab = value_of(bpe, "vocab"), key;
    mtt_json j;
    uint64_t id;
    merges = value_of(bpe, "merges");
    if (gguf && !(mtt_slice_is(value_of(bpe, "type"), "\"BPE\"") && mtt_slice_is(cut, "\"ByteLevel\"")))
        fail(EXIT_DATA, "a GGUF file can have GPT-2's byte-level BPE only: convert to a folder, or pass "
             "--tokenizer none");
    tokens = allocate((size_t)model.vocab, sizeof(*tokens));
    is_control = allocate((size_t)model.vocab, 1);
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
    if (!tokenizer_file) tokenizer_file = find_tokenizer();
    if (!strcmp(tokenizer_file, "none")) return;
    check(mtt_tokenizer_load(&env, tokenizer_file, &kind, &tokenizer));
    if (mtt_tokenizer_vocab(tokenizer) > model.vocab)
        fail(EXIT_DATA, "%s has %d ids, the model %d: pass --tokenizer with that of its run", tokenizer_file,
             mtt_tokenizer_vocab(tokenizer), model.vocab);
    end_of_text = mtt_tokenizer_end_of_text(tokenizer);
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
    out = fopen(temporary, "wb");
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
                fail(EXIT_DATA, "%s has a weight of %g, too large for f16: pass --type bf16", p->name,
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

static void put_piece(const piece *p)
{
    size_t count = p->from ? (size_t)(p->from->end - p->from->begin) / 4 : p->rows * p->length, k, row;
    float *values = allocate(count, sizeof(*values)), *line = allocate(p->length, sizeof(*line));
    uint16_t *half = allocate(p->length, sizeof(*half));
    if (!p->from) make_positions(values);
    else if (!weights_read(&source, p->from, values)) fail(EXIT_DATA, "%s", source.error);
    for (row = 0; row < p->rows; row++) {
        for (k = 0; p->transposed && k < p->length; k++) line[k] = values[k * p->rows + row];
        put_row(p, p->transposed ? line : values + row * p->length, half);
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
        fprintf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", p->name, types[p->type].tensor);
        if (!p->vector) fprintf(out, "%zu,", p->rows);
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
    char quoted[1024], *c;
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
    char ids[96] = "";
    if (mkdir(target, 0777) && errno != EEXIST)
        fail(EXIT_DATA, "cannot make %s: %s", target, strerror(errno));
    snprintf(path, sizeof(path), "%s/config.json", target);
    if (unlink(path) && errno != ENOENT) cannot_write();
    if (tokenizer) {
        snprintf(path, sizeof(path), "%s/tokenizer.json", target);
        save_tokenizer(path);
        snprintf(ids, sizeof(ids), ",\n \"bos_token_id\": %d,\n \"eos_token_id\": %d", end_of_text,
                 end_of_text);
        put_config("tokenizer_config.json",
                   "{\n 'tokenizer_class': 'PreTrainedTokenizerFast',\n 'bos_token': '%.*s',\n "
                   "'eos_token': '%.*s',\n 'clean_up_tokenization_spaces': false,\n "
                   "'model_max_length': %d\n}\n",
                   (int)end_token.size, end_token.at, (int)end_token.size, end_token.at, context);
    }
    put_safetensors();
    put_config("generation_config.json", "{\n 'do_sample': true%s\n}\n", ids);
    put_config("config.json",
               "{\n 'model_type': 'gpt2',\n 'architectures': ['GPT2LMHeadModel'],\n 'vocab_size': %d,\n "
               "'n_positions': %d,\n 'n_embd': %d,\n 'n_layer': %d,\n 'n_head': %d,\n 'n_inner': %d,\n "
               "'activation_function': 'gelu_new',\n 'layer_norm_epsilon': 1e-05,\n 'embd_pdrop': 0.0,\n "
               "'attn_pdrop': 0.0,\n 'resid_pdrop': 0.0,\n 'tie_word_embeddings': %s,\n "
               "'torch_dtype': '%s',\n 'dtype': '%s'%s\n}\n",
               model.vocab, context, model.d_model, model.layers, model.heads, model.d_ff,
               model.tied_head ? "true" : "false", types[type].config, types[type].config, ids);
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

static void put_array(const char *name, uint32_t kind, uint64_t count)
{
    put_key(name, ARRAY);
    put_u32(kind);
    put_u64(count);
}

/* Of ids that the tokenizer lacks llama.cpp wants a text, too, and that it differs. */
static void put_tokenizer(void)
{
    mtt_slice text;
    uint64_t count = 0;
    mtt_json j;
    char pad[32];
    int i;
    put_text("tokenizer.ggml.model", slice(tokenizer ? "gpt2" : "no_vocab"));
    if (!tokenizer) return;
    put_text("tokenizer.ggml.pre", slice("gpt-2"));
    put_array("tokenizer.ggml.tokens", STRING, (uint64_t)model.vocab);
    for (i = 0; i < model.vocab; i++) {
        snprintf(pad, sizeof(pad), "[PAD%d]", i);
        put_string(tokens[i].at ? tokens[i] : slice(pad));
    }
    put_array("tokenizer.ggml.token_type", I32, (uint64_t)model.vocab);
    for (i = 0; i < model.vocab; i++) put_u32(is_control[i] ? 3 : tokens[i].at ? 1 : 5);
    mtt_json_init(&j, merges.at, merges.size);
    for (mtt_json_begin(&j, '['); mtt_json_item(&j) && mtt_json_string(&j, &text);) count++;
    put_array("tokenizer.ggml.merges", STRING, count);
    mtt_json_init(&j, merges.at, merges.size);
    for (mtt_json_begin(&j, '['); mtt_json_item(&j) && mtt_json_string(&j, &text);) {
        text.size = mtt_json_unescape(text, (char *)text.at);
        put_string(text);
    }
    put_number("tokenizer.ggml.bos_token_id", end_of_text);
    put_number("tokenizer.ggml.eos_token_id", end_of_text);
    put_key("tokenizer.ggml.add_bos_token", BOOL);
    put("", 1); /* 0: no */
}

static void write_gguf(void)
{
    const char *slash = strrchr(source.path, '/'), *name = slash ? slash + 1 : source.path;
    const char *dot = strrchr(name, '.');
    const float epsilon = 1e-5f;
    const piece *p;
    snprintf(temporary, sizeof(temporary), "%s.tmp", target);
    if (tokenizer) save_tokenizer(temporary);
    open_output("");
    put("GGUF", 4);
    put_u32(3);
    put_u64(piece_count);
    put_u64(0); /* keys */
    put_text("general.architecture", slice("gpt2"));
    put_text("general.name", (mtt_slice){name, dot ? (size_t)(dot - name) : strlen(name)});
    put_number("general.file_type", (int)types[type].file);
    put_number("general.quantization_version", 2);
    put_number("gpt2.context_length", context);
    put_number("gpt2.embedding_length", model.d_model);
    put_number("gpt2.block_count", model.layers);
    put_number("gpt2.feed_forward_length", model.d_ff);
    put_number("gpt2.attention.head_count", model.heads);
    put_key("gpt2.attention.layer_norm_epsilon", FLOAT32);
    put(&epsilon, sizeof(epsilon));
    put_number("gpt2.vocab_size", model.vocab);
    put_tokenizer();
    for (p = pieces; p < pieces + piece_count; p++) {
        put_string(slice(p->name));
        put_u32(p->vector ? 1 : 2);
        put_u64(p->length);
        if (!p->vector) put_u64(p->rows);
        put_u32(types[p->type].code);
        put_u64(p->offset);
    }
    put_padding();
    for (p = pieces; p < pieces + piece_count; p++) put_piece(p);
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
        source.path = argv[1];
        target = argv[2];
        argv[2] = argv[0];
    } else if (argc < 2 || strcmp(argv[1], "--help")) {
        fprintf(stderr, "convert: name a checkpoint and what to write, as in convert results/text_fp32_best"
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
    if (!weights_open(&source, source.path)) fail(EXIT_DATA, "%s", source.error);
    check_model();
    list_pieces();
    load_tokenizer();
    if (gguf) write_gguf();
    else write_folder();
    printf("%s: GPT-2 with %d layers of %d, %d heads, %d ids, %d positions: %zu parameters in %s\n", target,
           model.layers, model.d_model, model.heads, model.vocab, context, parameter_count,
           types[type].config);
    return 0;
}
