/* test_tokenizer.c - tests of byte-level BPE and of tools/wordpiece.h.

   Run by hand:  test_tokenizer encode TOKENIZER [text|hex [OPTIONS]] < text
                 test_tokenizer train FILE OUT [VOCAB [OPTIONS]]
                 test_tokenizer bench FILE
   OPTIONS are letters: "lacjw" for WordPiece, as in word_options; for BPE a digit is a pattern of vocab.bpe
   and .tiktoken files, p encodes as mtt_encode_prompt does, and S prints a tokenizer.json instead of ids. */
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include "../../tools/wordpiece.h"

#include "../test.h"
#include <time.h>

/* ---- helpers */

static uint32_t turn(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

/* SHA-256 (FIPS 180-4) as 64 hexadecimal digits. Its constants are fractions of the cube and square roots of
   primes. */
static void sha256(const unsigned char *at, size_t size, char hex[65])
{
    uint32_t k[64], h[8], w[64], v[8];
    size_t padded = (size + 9 + 63) / 64 * 64, block;
    unsigned char *text = (unsigned char *)calloc(padded, 1);
    int i, n = 0, prime = 2, d;
    for (; n < 64; prime++) {
        double cube = cbrt(prime), square = sqrt(prime);
        for (d = 2; d * d <= prime && prime % d; d++) {
        }
        if (d * d <= prime) continue;
        k[n] = (uint32_t)((cube - floor(cube)) * 4294967296.0);
        if (n < 8) h[n] = (uint32_t)((square - floor(square)) * 4294967296.0);
        n++;
    }
    memcpy(text, at, size);
    text[size] = 0x80;
    for (i = 0; i < 8; i++) text[padded - 1 - (size_t)i] = (unsigned char)((uint64_t)size * 8 >> 8 * i);
    for (block = 0; block < padded; block += 64) {
        for (i = 0; i < 16; i++) {
            const unsigned char *p = text + block + 4 * i;
            w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
        }
        for (; i < 64; i++)
            w[i] = w[i - 16] + w[i - 7] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3) +
                   (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10);
        memcpy(v, h, sizeof(v));
        for (i = 0; i < 64; i++) {
            uint32_t a = v[0], e = v[4];
            uint32_t x =
                v[7] + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + k[i] + w[i];
            uint32_t y = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
            memmove(v + 1, v, 7 * sizeof(*v));
            v[4] += x;
            v[0] = x + y;
        }
        for (i = 0; i < 8; i++) h[i] += v[i];
    }
    for (i = 0; i < 8; i++) sprintf(hex + 8 * i, "%08x", (unsigned)h[i]);
    free(text);
}

#define WIKITEXT                                                                                           \
    "https://raw.githubusercontent.com/pytorch/examples/37ce9402ff0cae48d764d7788810fd2ed8238b25/"         \
    "word_language_model/data/wikitext-2/valid.txt"                                                        \
    "#sha256=f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"

static char *read_data(const char *name, size_t *size)
{
    const char *path = shared_data(name, strcmp(name, "wt2_valid.txt") ? name : WIKITEXT);
    return path ? read_file(path, size) : NULL;
}

static const mtt__merges *merges_of(const mtt_tokenizer *t)
{
    return &((const mtt__bpe *)t->own)->merges;
}

/* l = lowercase, a = strip accents, c = keep controls, j = keep CJK, w = none of them. */
static mtt_wordpiece_options word_options(const char *letters)
{
    mtt_wordpiece_options o;
    o.lowercase = strchr(letters, 'l') != NULL;
    o.strip_accents = strchr(letters, 'a') != NULL;
    o.keep_controls = strchr(letters, 'c') != NULL;
    o.keep_cjk = strchr(letters, 'j') != NULL;
    return o;
}

/* Loads a WordPiece with options. */
static mtt_status load_words(mtt_env *env, const char *path, const char *letters, mtt_tokenizer **t)
{
    mtt_wordpiece_options options = word_options(letters);
    mtt_tokenizer_kind kind = mtt_wordpiece(&options);
    return mtt_tokenizer_load(env, path, &kind, t);
}

static mtt_tokenizer *train_kind(mtt_env *env, const mtt_tokenizer_kind *kind, const char *text, size_t size,
                                 int vocab)
{
    mtt_vocab_trainer *trainer = NULL;
    mtt_tokenizer *t = NULL;
    check(!mtt_vocab_trainer_create(env, kind, &trainer) && !mtt_vocab_trainer_add(trainer, text, size) &&
              !mtt_vocab_trainer_finish(trainer, vocab, &t),
          "training of %d ids on %zu bytes: %s", vocab, size, env ? env->error : "");
    mtt_vocab_trainer_destroy(trainer);
    return t;
}

static mtt_tokenizer *train(mtt_env *env, const char *text, size_t size, int vocab)
{
    return train_kind(env, NULL, text, size, vocab);
}

static mtt_tokenizer *train_words(mtt_env *env, const char *text, size_t size, int vocab, const char *letters)
{
    mtt_wordpiece_options options = word_options(letters);
    mtt_tokenizer_kind kind = mtt_wordpiece(&options);
    return train_kind(env, &kind, text, size, vocab);
}

/* Encodes and decodes; 1 if the text comes back. The ids are in *out, which the caller frees, unless it is
   NULL. */
static int round_trip(mtt_tokenizer *t, const char *text, size_t size, int32_t **out, size_t *count)
{
    static int32_t small[256];
    static char back[1024];
    int32_t *ids = out || size > 256 ? (int32_t *)malloc((size + 1) * sizeof(*ids)) : small;
    char *decoded = size > sizeof(back) ? (char *)malloc(size) : back;
    size_t n = 0, bytes = 0;
    int same = !mtt_encode(t, text, size, ids, size, &n) && !mtt_decode(t, ids, n, decoded, size, &bytes) &&
               bytes == size && memcmp(decoded, text, size) == 0;
    if (decoded != back) free(decoded);
    if (out) *out = ids;
    else if (ids != small) free(ids);
    if (count) *count = n;
    return same;
}

/* ---- tests */

static void stream(mtt_tokenizer *t, const char *name, const char *text, size_t size, size_t tokens,
                   const char *want)
{
    int32_t *ids;
    size_t i, n;
    char hex[65];
    unsigned char *out;
    check(round_trip(t, text, size, &ids, &n), "%s comes back", name);
    out = (unsigned char *)malloc(2 * n + 1);
    for (i = 0; i < n; i++) out[2 * i] = (unsigned char)ids[i], out[2 * i + 1] = (unsigned char)(ids[i] >> 8);
    sha256(out, 2 * n, hex);
    check(n == tokens && strcmp(hex, want) == 0, "%s: %zu tokens, %s instead of %zu, %s", name, n, hex,
          tokens, want);
    free(out);
    free(ids);
}

static void test_streams(mtt_tokenizer *gpt2)
{
    size_t size = 0;
    char *text = read_data("tinyshakespeare.txt", &size);
    if (text && gpt2) {
        stream(gpt2, "all", text, size, 338025,
               "25c01b32b32f41897a6359dd222ec114992dc30c357bcafbfe6c56672f76cd31");
        stream(gpt2, "90", text, 1003854, 301966,
               "502a2bdc8210d1ac5d5674867cb74467dd31db575d25cf6dbb08c8bdbea8680f");
        stream(gpt2, "10", text + 1003854, 111540, 36059,
               "68a53422394c26a655ebe641f5c6f49888e8f4e45fe5d6f02abda63ba3ebd65b");
        stream(gpt2, "85", text, 948084, 284734,
               "cf0568398fdfc2ddf84357976122be503f29316914b30fc0d3cbef1c0b842967");
        stream(gpt2, "85-95", text + 948084, 111540, 35299,
               "2e4eec5f72cdc1b9a913ca6ee5308ee05343672107dc871c2b6acf0c3cd41b66");
        stream(gpt2, "last 5", text + 1059624, 55770, 17995,
               "9dbe8a4e9eef7cab2fee1735091c57a588696ebb2a4f0d3c0176f85e5c04e8ed");
    }
    free(text);
    text = read_data("wt2_valid.txt", &size);
    if (text && gpt2)
        stream(gpt2, "wt2", text, size, 258659,
               "17bc83b54d943c68889ab3b9cb01f17b86fe0216e9738ee39806d2631aac2ef9");
    free(text);
}

static const struct edge {
    const char *text;
    size_t size;
    int32_t ids[32];
} edges[] = {
    {"", 0, {-1}},
    {" ", 1, {220, -1}},
    {"  ", 2, {220, 220, -1}},
    {"   a", 4, {220, 220, 257, -1}},
    {"a  ", 3, {64, 220, 220, -1}},
    {"\n\n", 2, {628, -1}},
    {"a\n\n b", 5, {64, 628, 275, -1}},
    {"I'll we've don't IT'S", 21, {40, 1183, 356, 1053, 836, 470, 7283, 6, 50, -1}},
    {"Za\xc5\xbc\xc3\xb3\xc5\x82\xc4\x87 g\xc4\x99\xc5\x9bl\xc4\x85 ja\xc5\xba\xc5\x84",
     26,
     {57, 64, 129, 120, 10205, 41615, 38325, 308, 128, 247, 129, 249, 75, 128, 227, 45091, 129, 118, 129,
      226, -1}},
    {"\xef\xbc\x91\xef\xbc\x92\xef\xbc\x93 \xc2\xbd \xe2\x85\xab",
     16,
     {171, 120, 239, 171, 120, 240, 171, 120, 241, 25208, 2343, 227, 104, -1}},
    {"\0\x01\x7f", 3, {188, 189, 221, -1}},
    {"a\r\n\r\nb", 6, {64, 201, 198, 201, 198, 65, -1}},
    {" \t\t x", 5, {220, 197, 197, 2124, -1}},
    {"\xc3\xa9 e\xcc\x81", 6, {2634, 304, 136, 223, -1}},
    {"\xf0\x9f\xa4\x97\xf0\x9f\xa4\x97 x", 10, {8582, 97, 245, 8582, 97, 245, 2124, -1}},
    {"\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e \xe3\x83\x86\xe3\x82\xb9\xe3\x83\x88",
     19,
     {33768, 98, 17312, 105, 45739, 252, 14524, 228, 43302, -1}},
    {"<|endoftext|>", 13, {27, 91, 437, 1659, 5239, 91, 29, -1}},
};

static void test_edges(mtt_tokenizer *gpt2)
{
    size_t i, k, n, want, bytes;
    int32_t *ids;
    for (i = 0; gpt2 && i < MTT__LENGTH(edges); i++) {
        const struct edge *e = &edges[i];
        int same = round_trip(gpt2, e->text, e->size, &ids, &n);
        for (want = 0; e->ids[want] >= 0; want++) {
        }
        for (k = 0; k < want && k < n; k++) same = same && ids[k] == e->ids[k];
        check(same && n == want, "edge string %zu: %zu ids", i, n);
        free(ids);
    }
    if (!gpt2) return;
    check(mtt_tokenizer_vocab(gpt2) == 50257 && mtt_tokenizer_end_of_text(gpt2) == 50256,
          "GPT-2's vocabulary");
    check(mtt_tokenizer_bytes(gpt2, 50256, &bytes) && !bytes, "end of text has no bytes");
    check(!mtt_tokenizer_bytes(gpt2, 50257, &bytes) && !mtt_tokenizer_bytes(gpt2, -1, &bytes),
          "no bytes outside");
    check(memcmp(mtt_tokenizer_bytes(gpt2, 262, &bytes), " the", 4) == 0 && bytes == 4, "id 262 is ' the'");
}

/* Where pre-tokens end, for strings that the streams may not hold. A dot marks each end. */
static void check_pretokens(mtt_pattern pattern, const char *marks)
{
    mtt_bpe_options options = {pattern};
    mtt_tokenizer_kind kind = mtt_bpe(&options);
    mtt_tokenizer *t = NULL;
    char text[64], marked[64];
    size_t size = 0, out = 0, at = 0, n;
    const char *p;
    check(!mtt__tokenizer_make(NULL, &kind, NULL, NULL, 0, &t), "an empty tokenizer");
    for (p = marks; *p; p++)
        if (*p != '.') text[size++] = *p;
    for (; at < size; at += n) {
        n = mtt__bpe_cut(t, text + at, size - at);
        memcpy(marked + out, text + at, n);
        out += n;
        marked[out++] = '.';
    }
    marked[out] = 0;
    check(strcmp(marked, marks) == 0, "pre-tokens of pattern %d: %s, not %s", (int)pattern, marked, marks);
    mtt_tokenizer_destroy(t);
}

static void test_pretokens(void)
{
    static const char *const cases[] = {
        "'s.", "'.S.", "'re.x.", "'.r.", "'.", "''.s.", " '.s.", "'ll.ll.", "'.l.", "'ve.'.v.", "a.'d.",
        " ?!'.m.",
        "x. \n.", " . a.", "\n. a.", "\n \n. a.", " .\n.a.", "\t.a.", "\t\t.", "12.ab.", " 12. ab.", "a.1.",
        "\xc2\xa0.a.", " .\xc2\xa0.a.", " \xc2\xa0.\n.a.", "\xe2\x80\x8b.a.", " \xe2\x80\x8b. a.", "\xff.a.",
        " \xff\xfe. \xff.", "\xc3.a.", "\xed\xa0\x80.a.", "\xe0\x80\x80.a.", "\xf4\x90\x80\x80.a.",
        "\xc3\xa9.\xc3.",
        "\xe1\x9a\x80.a."
    };
    static const struct {
        mtt_pattern pattern;
        const char *marks;
    } others[] = { /* as tokenizers 0.23.3 has them */
        {MTT_PATTERN_SMOLLM, "a.  .1.b."},
        {MTT_PATTERN_SMOLLM, " .1.2."},
        {MTT_PATTERN_SMOLLM, "1.  ."},
        {MTT_PATTERN_SMOLLM, "x. .1. \n.2.\n."},
        {MTT_PATTERN_SMOLLM, "\xc2\xbd.\xe2\x85\xab. a."},
        {MTT_PATTERN_SMOLLM, "'s.1.'s."},
        {MTT_PATTERN_LLAMA3, "123.45. .678.9."},
        {MTT_PATTERN_LLAMA3, "1\xc2\xbd\xc2\xb2.\xd9\xa3."},
        {MTT_PATTERN_LLAMA3, "a. . .1.b."},
        {MTT_PATTERN_LLAMA3, "'LL.'vE.'S.'\xc5\xbf.'x."},
        {MTT_PATTERN_LLAMA3, "''.s."},
        {MTT_PATTERN_LLAMA3, "!a. !.a."},
        {MTT_PATTERN_LLAMA3, "!!.a."},
        {MTT_PATTERN_LLAMA3, "_the.\tthe.\n.the."},
        {MTT_PATTERN_LLAMA3, " \n \n. . a."},
        {MTT_PATTERN_LLAMA3, "!\r\n\r\n. a."},
        {MTT_PATTERN_LLAMA3, " !\n."},
        {MTT_PATTERN_LLAMA3, "\r\n \t\n.x."},
        {MTT_PATTERN_LLAMA3, "  \n."},
        {MTT_PATTERN_LLAMA3, "a.\xc2\xa0""b.\xe3\x80\x80.\xe3\x80\x80""c."},
        {MTT_PATTERN_LLAMA3, " '.sa."},
        {MTT_PATTERN_LLAMA3, "a. \n."},
        {MTT_PATTERN_LLAMA3, "\xcc\x81""a."},
        {MTT_PATTERN_LLAMA3, "?\n. .1."},
        {MTT_PATTERN_LLAMA3, "!.\t\n."},
        {MTT_PATTERN_QWEN, "1.2.a.3."},
        {MTT_PATTERN_QWEN, " .1.2."},
        {MTT_PATTERN_QWEN, "\xc2\xbd.\xe2\x85\xab."},
        {MTT_PATTERN_QWEN, "'RE.1.'d.2."},
    };
    mtt_bpe_options none = {MTT_PATTERN_COUNT};
    mtt_tokenizer_kind kind = mtt_bpe(&none);
    mtt_env env = {0};
    mtt_vocab_trainer *trainer;
    size_t i;
    for (i = 0; i < MTT__LENGTH(cases); i++) check_pretokens(MTT_PATTERN_GPT2, cases[i]);
    for (i = 0; i < MTT__LENGTH(others); i++) check_pretokens(others[i].pattern, others[i].marks);
    check(mtt_vocab_trainer_create(&env, &kind, &trainer) == MTT_E_ARGUMENT && strstr(env.error, "pattern 4"),
          "a pattern that is none: %s", env.error);
}

static void test_round_trips(mtt_tokenizer *t, const char *name)
{
    static const char *const hard[] = {
        " ", "  ", "\n", "\r\n", "\t", "'", "'s", "'LL", "a", "Z", "the", "0", "9", ".", "?!", "\xc2\x85",
        "\xc2\xa0",
        "\xe2\x80\xa8", "\xc5\xbc", "\xe2\x85\xab", "\xcc\x81", "\xf0\x9f\xa4\x97", "\xe6\x97\xa5", "\xff",
        "\xc3",
        "\xe2\x82", "\xed\xa0\x80", "<|endoftext|>"
    };
    char text[512];
    size_t size, bad = 0;
    uint32_t c, i, k;
    for (c = 0; c < 65536; c++) {
        text[0] = (char)c, text[1] = (char)(c >> 8);
        bad += !round_trip(t, text, 2, NULL, NULL);
    }
    check(!bad, "%s: %zu strings of two bytes do not come back", name, bad);
    for (bad = 0, c = 0; c < 0x110000; c++)
        if (c < 0xd800 || c > 0xdfff) bad += !round_trip(t, text, mtt__utf8_put(c, text), NULL, NULL);
    check(!bad, "%s: %zu code points do not come back", name, bad);
    for (bad = 0, i = 0; i < 200000; i++) {
        for (size = 0, k = below(24); k; k--) {
            const char *piece = hard[below(MTT__LENGTH(hard))];
            if (i % 2) text[size++] = (char)below(256);
            else memcpy(text + size, piece, strlen(piece)), size += strlen(piece);
        }
        bad += !round_trip(t, text, size, NULL, NULL);
    }
    check(!bad, "%s: %zu random strings do not come back", name, bad);
}

/* Merges as the definition says: the pair of the lowest rank, the leftmost first, one at a time. */
static size_t merge_simply(const mtt_tokenizer *t, const char *at, size_t n, int32_t *ids)
{
    const mtt__merges *merges = merges_of(t);
    size_t i, best;
    for (i = 0; i < n; i++) ids[i] = (int32_t)((const mtt__bpe *)t->own)->byte_id[(unsigned char)at[i]];
    for (;;) {
        uint32_t rank, lowest = MTT__NONE;
        for (i = best = 0; i + 1 < n; i++) {
            rank = mtt__rank(merges, (uint32_t)ids[i], (uint32_t)ids[i + 1]);
            if (rank < lowest) lowest = rank, best = i;
        }
        if (lowest == MTT__NONE) return n;
        ids[best] = (int32_t)merges->at[lowest].id;
        n--;
        memmove(ids + best + 1, ids + best + 2, (n - best - 1) * sizeof(*ids));
    }
}

/* Words that collide under every key of a hash of 64-bit products: the top bit of 8 bytes reaches bits 63 and
   31 alone, where the next 8 bytes undo it. 2^12 words have one such hash; here they must have as many. */
static void test_hash(void)
{
    enum { PAIRS = 12, WORDS = 1 << PAIRS, SIZE = 16 * PAIRS + 8 };
    static uint64_t seen[WORDS];
    const uint64_t k = 0x9e3779b97f4a7c15u;
    uint64_t weak, first = 0, key;
    char word[SIZE];
    int w, p, i, same = 0;
    for (key = 0; key < 3; key++) {
        for (w = 0; w < WORDS; w++) {
            memset(word, 'a', SIZE);
            for (p = 0; p < PAIRS; p++)
                for (i = 7; i < 16 && w >> p & 1; i += 4) word[16 * p + i] ^= -128;
            for (weak = key, i = 0; i < SIZE; i += 8) {
                uint64_t x;
                memcpy(&x, word + i, 8);
                weak = (weak ^ x) * k;
                weak ^= weak >> 32;
            }
            if (!w) first = weak;
            check(weak == first, "word %d does not collide, so it proves nothing", w);
            seen[w] = mtt__hash(key * k, word, SIZE);
            for (i = 0; i < w; i++) same += seen[i] == seen[w];
        }
        check(seen[1] != mtt__hash((key + 1) * k, word, SIZE), "the key changes nothing");
    }
    check(same == 0, "%d pairs of words collide", same);
}

static void test_long(mtt_tokenizer *t)
{
    enum { SIZE = 1000000, LONGEST = 150 };
    char *text = (char *)malloc(SIZE);
    int32_t want[LONGEST], got[LONGEST];
    size_t i, k, bad = 0;
    for (k = 0; k < 5; k++) {
        for (i = 0; i < SIZE; i++) text[i] = k < 4 ? "a^ \xff"[k] : (char)('a' + below(26));
        check(round_trip(t, text, SIZE, NULL, NULL), "a pre-token of a million bytes, kind %zu", k);
    }
    for (i = 0; i < 20000; i++) {
        size_t size = 1 + (size_t)below(i % 4 ? 40 : LONGEST), at = (size_t)below(SIZE - LONGEST), count;
        mtt__ids out = {got, 0, LONGEST};
        for (k = 0; k < size && i % 2; k++) text[at + k] = "aehnst"[below(6)];
        count = merge_simply(t, text + at, size, want);
        check(!mtt__bpe_spell(t, text + at, size, &out), "merge");
        bad += out.count != count || memcmp(want, got, count * sizeof(*want)) != 0;
    }
    check(!bad, "%zu of 20000 words are merged in another way", bad);
    free(text);
}

/* What calls that fail do to ids and counts. */
static void test_refusals(mtt_tokenizer *t, mtt_env *env)
{
    int32_t ids[8] = {0, 0, -1, 0, 0, 0, 0, 77};
    char text[8] = "xxxxxxx";
    size_t n = 9;
    mtt_vocab_trainer *trainer;
    mtt_tokenizer *none = t;
    check(mtt_encode(t, "q x z q", 7, ids, 2, &n) == MTT_E_ARGUMENT && n > 2 && n < 8 && ids[2] == -1,
          "small capacity, %zu needed", n);
    check(strstr(env->error, "do not fit an array of 2") != NULL, "message %s", env->error);
    check(mtt_encode(t, "q x z q", 7, NULL, 0, &n) == MTT_E_ARGUMENT && n > 2, "no capacity");
    check(mtt_encode(t, NULL, 0, NULL, 0, &n) == MTT_OK && n == 0, "nothing");
    check(mtt_encode(t, "q x z q", 7, ids, 7, &n) == MTT_OK && ids[7] == 77, "enough");
    check(mtt_decode(t, ids, n, text, 3, &n) == MTT_E_ARGUMENT && n == 7 && text[3] == 'x',
          "short text, %zu needed", n);
    ids[1] = -1;
    check(mtt_decode(t, ids, 2, text, 8, &n) == MTT_E_ARGUMENT && strstr(env->error, "token 1 is -1"),
          "negative id");
    ids[1] = INT32_MIN;
    check(mtt_decode(t, ids, 2, text, 8, &n) == MTT_E_ARGUMENT && strstr(env->error, "1 is -2147483648,"),
          "least id: %s", env->error);
    ids[1] = mtt_tokenizer_vocab(t);
    check(mtt_decode(t, ids, 2, text, 8, &n) == MTT_E_ARGUMENT && strstr(env->error, "outside"),
          "id too high");
    check(!mtt_vocab_trainer_create(env, NULL, &trainer), "trainer");
    check(mtt_vocab_trainer_finish(trainer, 256, &none) == MTT_E_ARGUMENT && !none &&
              strstr(env->error, "257"),
          "vocab 256");
    check(mtt_vocab_trainer_finish(trainer, 257, &none) == MTT_OK && mtt_tokenizer_vocab(none) == 257,
          "bytes alone");
    check(round_trip(none, "bytes alone", 11, NULL, &n) && n == 11, "no merges");
    mtt_tokenizer_destroy(none);
    check(mtt_vocab_trainer_finish(trainer, 0, &none) == MTT_OK && mtt_tokenizer_vocab(none) == 257,
          "no text");
    mtt_tokenizer_destroy(none);
    mtt_vocab_trainer_destroy(trainer);
    mtt_vocab_trainer_destroy(NULL);
    mtt_tokenizer_destroy(NULL);
    check(mtt_tokenizer_load(env, in("absent"), NULL, &none) == MTT_E_FILE && !none &&
              strstr(env->error, "absent"),
          "absent file");
}

typedef struct page {
    char *at;
    size_t size, capacity;
} page;

static void append(void *user, const char *text, size_t bytes)
{
    page *p = (page *)user;
    if (p->size + bytes > p->capacity)
        p->at = (char *)realloc(p->at, p->capacity = 2 * (p->capacity + bytes));
    memcpy(p->at + p->size, text, bytes);
    p->size += bytes;
}

/* The merges as lines "A B". */
static char *merges_text(const mtt_tokenizer *t, size_t *size)
{
    const mtt__merges *merges = merges_of(t);
    page p = {NULL, 0, 0};
    const mtt__out out = {append, &p};
    size_t i;
    for (i = 0; i < merges->count; i++) {
        mtt__put_piece(&out, t, merges->at[i].left);
        append(&p, " ", 1);
        mtt__put_piece(&out, t, merges->at[i].right);
        append(&p, "\n", 1);
    }
    *size = p.size;
    return p.at;
}

static int is_piece(const mtt_tokenizer *t, int id, const char *want)
{
    size_t size;
    const char *at = mtt_tokenizer_bytes(t, id, &size);
    return at && size == strlen(want) && memcmp(at, want, size) == 0;
}

static void test_counts(mtt_env *env)
{
    static const struct {
        const char *word;
        uint64_t count;
    } words[] = {{"ab", 3000000000u},  {"cd", 3000000001u}, {"ef", 5},
                 {"gh", 0x100000003u}, {"ij", 5},           {"aaaa", 2}};
    static const char *const want[] = {"gh", "cd", "ab", "aa", "ef", "ij", "aaaa"};
    static const struct {
        const char *word;
        uint64_t count;
    } hf[] = {{"roses", 1}, {"are", 2}, {"red", 1}, {"voilets", 1}, {"blue", 1}, {"BERT", 1},
              {"is", 2},    {"big", 1}, {"and", 1}, {"so", 1},      {"GPT-2", 1}};
    mtt_vocab_trainer *trainer;
    mtt_tokenizer *t;
    size_t i;
    check(!mtt_vocab_trainer_create(env, NULL, &trainer), "trainer");
    for (i = 0; i < MTT__LENGTH(words); i++)
        mtt__strings_count(&trainer->tokenizer.words, words[i].word, strlen(words[i].word), words[i].count);
    check(!mtt_vocab_trainer_finish(trainer, 0, &t) && mtt_tokenizer_vocab(t) == 257 + (int)MTT__LENGTH(want),
          "large counts");
    for (i = 0; i < MTT__LENGTH(want); i++)
        check(is_piece(t, 257 + (int)i, want[i]), "large counts: merge %zu is not %s", i, want[i]);
    mtt_tokenizer_destroy(t);
    check(!mtt_vocab_trainer_add(trainer, "xyxyxy xy", 9) && !mtt_vocab_trainer_finish(trainer, 260, &t),
          "added to and finished again");
    check(mtt_tokenizer_vocab(t) == 260, "260 ids");
    mtt_tokenizer_destroy(t);
    mtt_vocab_trainer_destroy(trainer);
    check(!mtt_vocab_trainer_create(env, NULL, &trainer), "trainer");
    for (i = 0; i < MTT__LENGTH(hf); i++)
        mtt__strings_count(&trainer->tokenizer.words, hf[i].word, strlen(hf[i].word), hf[i].count);
    check(!mtt_vocab_trainer_finish(trainer, 260, &t) && is_piece(t, 257, "re") && is_piece(t, 258, "are") &&
              is_piece(t, 259, "is"),
          "Hugging Face's test_train");
    mtt_tokenizer_destroy(t);
    mtt_vocab_trainer_destroy(trainer);
}

/* Trains on a text cut into documents in random order, and compares the saved files byte by byte. */
static void test_training(mtt_env *env)
{
    size_t size = 0, n, first_size = 0, got_size;
    char hex[65], *text = read_data("tinyshakespeare.txt", &size), *merges, *first = NULL, *got;
    mtt_tokenizer *t;
    int order;
    if (!text) return;
    t = train(env, text, size, 10000);
    merges = merges_text(t, &n);
    sha256((const unsigned char *)merges, n, hex);
    check(strcmp(hex, "74acca26bdb00034f3591dd182384c2bcffb2c153df2e71b1c45266231046d5b") == 0,
          "merges of tinyshakespeare: %s", hex);
    check(strncmp(merges, "\xc4\xa0 t\nh e\n\xc4\xa0 a\no u\n\xc4\xa0 s\n", 23) == 0 &&
              merges_of(t)->count == 9743,
          "first merges");
    check(round_trip(t, text, size, NULL, &n) && n == 312073, "tokens of tinyshakespeare: %zu", n);
    free(merges);
    mtt_tokenizer_destroy(t);
    for (order = 0; order < 12; order++) {
        enum { DOCUMENTS = 400 };
        size_t place[DOCUMENTS], i;
        mtt_vocab_trainer *trainer;
        check(!mtt_vocab_trainer_create(env, NULL, &trainer), "trainer");
        for (i = 0; i < DOCUMENTS; i++) place[i] = i;
        for (i = DOCUMENTS; order && --i;) {
            size_t k = below((int)i + 1), swap = place[i];
            place[i] = place[k];
            place[k] = swap;
        }
        for (i = 0; i < DOCUMENTS; i++) {
            size_t at = size * place[i] / DOCUMENTS, end = size * (place[i] + 1) / DOCUMENTS;
            check(!mtt_vocab_trainer_add(trainer, text + at, end - at), "document");
        }
        check(!mtt_vocab_trainer_finish(trainer, 3000, &t) && !mtt_tokenizer_save(t, in("order.json")),
              "order %d", order);
        mtt_tokenizer_destroy(t);
        mtt_vocab_trainer_destroy(trainer);
        got = read_file(in("order.json"), &got_size);
        if (!order) first = got, first_size = got_size;
        else
            check(got_size == first_size && memcmp(first, got, got_size) == 0, "order %d gives another file",
                  order),
                free(got);
    }
    free(first);
    free(text);
}

static void same_tokenizer(const mtt_tokenizer *a, const mtt_tokenizer *b, const char *name)
{
    size_t n, m;
    int id, same = a && b && mtt_tokenizer_vocab(a) == mtt_tokenizer_vocab(b) &&
                   mtt_tokenizer_end_of_text(a) == mtt_tokenizer_end_of_text(b);
    for (id = 0; same && id < mtt_tokenizer_vocab(a); id++) {
        const char *x = mtt_tokenizer_bytes(a, id, &n), *y = mtt_tokenizer_bytes(b, id, &m);
        same = n == m && memcmp(x, y, n) == 0;
    }
    if (same && a->kind.print == mtt__bpe_print) {
        const mtt__merges *x = merges_of(a), *y = merges_of(b);
        same = x->count == y->count && (!x->count || memcmp(x->at, y->at, x->count * sizeof(*x->at)) == 0);
    }
    check(same, "%s: the same tokenizer is loaded", name);
}

static void test_save(mtt_tokenizer *t, const char *name, mtt_env *env)
{
    mtt_tokenizer *again = NULL, *pairs = NULL;
    size_t size, i, out = 0;
    char *text, *other;
    int open = 0;
    check(!mtt_tokenizer_save(t, in("a.json")), "%s: save: %s", name, env->error);
    check(!mtt_tokenizer_load(env, in("a.json"), NULL, &again), "%s: load: %s", name, env->error);
    same_tokenizer(t, again, name);
    text = read_file(in("a.json"), &size);
    other = (char *)malloc(2 * size);
    i = out = (size_t)(strstr(text, "\"merges\":[") - text) + 10;
    for (memcpy(other, text, i); i < size; i++) { /* "A B" becomes ["A", "B"] */
        if (text[i] == '"') {
            open = !open;
            memcpy(other + out, open ? "[\"" : "\"]", 2);
            out += 2;
        } else if (text[i] == ' ') {
            memcpy(other + out, "\", \"", 4);
            out += 4;
        } else {
            other[out++] = text[i];
            if (text[i] == '\\') other[out++] = text[++i];
        }
    }
    write_file(in("b.json"), other, out);
    check(!mtt_tokenizer_load(env, in("b.json"), NULL, &pairs), "%s: load of merges in pairs: %s", name,
          env->error);
    same_tokenizer(t, pairs, name);
    mtt_tokenizer_destroy(again);
    mtt_tokenizer_destroy(pairs);
    free(text);
    free(other);
}

/* Replaces the only `from` in a text that the caller frees. */
static char *edit(char *text, const char *from, const char *to)
{
    char *at = strstr(text, from), *new_text = (char *)malloc(strlen(text) + strlen(to) + 1);
    check(at != NULL, "%s is in the file", from);
    if (!at) at = text + strlen(text), from = "";
    sprintf(new_text, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    free(text);
    return new_text;
}

#define TOKEN(id, content, special, normalized)                                                        \
    ",{\"id\":" id ",\"content\":\"" content "\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false," \
    "\"normalized\":" normalized ",\"special\":" special "}"
#define A_TEXT "{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}"
#define BEGIN "<|begin_of_text|>"

/* A file of each family: trained by us with its pattern, then given what such files have. */
static const char *const family_edits[MTT_PATTERN_COUNT][6] = {
    {"true}]", "true}" TOKEN("300", "<tool>", "false", "true")
     TOKEN("301", "ol>t", "false", "false") "]"},
    {NULL},
    {"true}]", "true}" TOKEN("300", BEGIN, "true", "false") "]",
     "\"ignore_merges\":false", "\"ignore_merges\":true", "\"post_processor\":null",
     "\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{\"type\":\"ByteLevel\",\"add_prefix_space\":"
     "true,\"trim_offsets\":false,\"use_regex\":true},{\"type\":\"TemplateProcessing\",\"single\":["
     "{\"SpecialToken\":{\"id\":\"" BEGIN "\",\"type_id\":0}}," A_TEXT "],\"pair\":[" A_TEXT
     ",{\"Sequence\":{\"id\":\"B\",\"type_id\":1}}],\"special_tokens\":{\"" BEGIN "\":{\"id\":\"" BEGIN
     "\",\"ids\":[300],\"tokens\":[\"" BEGIN "\"]}}}]}"},
    {"true}]", "true}" TOKEN("300", "<|im_start|>", "true", "false") TOKEN("301", "<think>", "false", "false")
     TOKEN("302", "<th", "false", "false") "]", "\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}"},
};

static const char family_sample[] =
    "the then there that at the hat the tat that to the top that's I'll I'LL we've 1234 123 12 99 1 123 \n\n "
    "the hat  that\n  tat _top .top (the !the ?!\n?!\n --- the--- "
    "\xe6\x97\xa5\xe6\x9c\xac\xe6\x97\xa5\xe6\x9c\xac";

static const char *const family_texts[] = {
    "It's I'LL we'VE'x 'the 12345 67 \xc2\xbd\xc2\xbd 1a",
    " \n\n  the\r\n\r\n  !? \n!\n\n?!\n\t\tx \t the  7   ",
    "the<|endoftext|>the <|begin_of_text|> <|im_start|>then<think>that<th<thi\xe2\x82\xac<tool>ol>t",
    "'\xc5\xbfthe hat\xc2\xa0that\xe3\x80\x80\xe3\x80\x80to _top $the "
    "\xe6\x97\xa5\xe6\x9c\xac\xd9\xa3\xd9\xa4",
};

/* The ids of tokenizers 0.23.3, with and without special tokens, of the files that test_families makes. */
static const int32_t family_ids[MTT_PATTERN_COUNT][MTT__LENGTH(family_texts)][2][96] = {
    {{{41, 84, 282, 274, 7, 285, 299, 7, 54, 37, 7, 88, 221, 7, 267, 268, 20, 21, 221, 22, 23, 221, 127, 122,
        127, 122, 261, 65, -1},
      {41, 84, 282, 274, 7, 285, 299, 7, 54, 37, 7, 88, 221, 7, 267, 268, 20, 21, 221, 22, 23, 221, 127,
        122, 127, 122, 261, 65, -1}},
     {{221, 288, 221, 260, 202, 199, 202, 289, 290, 31, 221, 199, 1, 199, 199, 269, 199, 198, 198, 88,
        221, 198, 260, 221, 221, 23, 221, 221, 221, -1},
      {221, 288, 221, 260, 202, 199, 202, 289, 290, 31, 221, 199, 1, 199, 199, 269, 199, 198, 198, 88,
        221, 198, 260, 221, 221, 23, 221, 221, 221, -1}},
     {{267, 28, 92, 69, 78, 68, 79, 70, 84, 69, 88, 84, 92, 30, 267, 221, 28, 92, 66, 69, 71, 73, 78,
        63, 79, 70, 63, 84, 69, 88, 84, 92, 30, 221, 28, 92, 73, 77, 63, 83, 84, 65, 82, 84, 92, 30,
        267, 78, 28, 84, 72, 73, 78, 75, 30, 84, 270, 28, 84, 72, 28, 84, 72, 73, 159, 225, 106, 300,
        301, -1},
      {267, 0, 267, 221, 28, 92, 66, 69, 71, 73, 78, 63, 79, 70, 63, 84, 69, 88, 84, 92, 30, 221, 28,
        92, 73, 77, 63, 83, 84, 65, 82, 84, 92, 30, 267, 78, 28, 84, 72, 73, 78, 75, 30, 84, 270, 28,
        84, 72, 28, 84, 72, 73, 159, 225, 106, 300, 301, -1}},
     {{7, 130, 124, 267, 275, 127, 255, 84, 270, 160, 223, 223, 160, 223, 223, 84, 79, 293, 271, 221, 4,
        267, 297, 150, 97, 150, 98, -1},
      {7, 130, 124, 267, 275, 127, 255, 84, 270, 160, 223, 223, 160, 223, 223, 84, 79, 293, 271, 221, 4,
        267, 297, 150, 97, 150, 98, -1}}},
    {{{41, 84, 279, 271, 7, 281, 294, 7, 54, 37, 7, 88, 221, 7, 265, 221, 17, 18, 19, 20, 21, 221, 22, 23,
        221, 127, 122, 127, 122, 221, 17, 65, -1},
      {41, 84, 279, 271, 7, 281, 294, 7, 54, 37, 7, 88, 221, 7, 265, 221, 17, 18, 19, 20, 21, 221, 22,
        23, 221, 127, 122, 127, 122, 221, 17, 65, -1}},
     {{295, 221, 260, 202, 199, 202, 285, 286, 31, 221, 199, 1, 199, 199, 266, 199, 198, 198, 88, 221,
        198, 260, 221, 221, 23, 221, 221, 221, -1},
      {295, 221, 260, 202, 199, 202, 285, 286, 31, 221, 199, 1, 199, 199, 266, 199, 198, 198, 88, 221,
        198, 260, 221, 221, 23, 221, 221, 221, -1}},
     {{265, 28, 92, 69, 78, 68, 79, 70, 84, 69, 88, 84, 92, 30, 265, 221, 28, 92, 66, 69, 71, 73, 78,
        63, 79, 70, 63, 84, 69, 88, 84, 92, 30, 221, 28, 92, 73, 77, 63, 83, 84, 65, 82, 84, 92, 30,
        265, 78, 28, 84, 72, 73, 78, 75, 30, 84, 267, 28, 84, 72, 28, 84, 72, 73, 159, 225, 106, 28, 84,
        79, 79, 76, 30, 79, 76, 30, 84, -1},
      {265, 0, 265, 221, 28, 92, 66, 69, 71, 73, 78, 63, 79, 70, 63, 84, 69, 88, 84, 92, 30, 221, 28,
        92, 73, 77, 63, 83, 84, 65, 82, 84, 92, 30, 265, 78, 28, 84, 72, 73, 78, 75, 30, 84, 267, 28,
        84, 72, 28, 84, 72, 73, 159, 225, 106, 28, 84, 79, 79, 76, 30, 79, 76, 30, 84, -1}},
     {{7, 130, 124, 265, 272, 127, 255, 84, 267, 160, 223, 223, 160, 223, 223, 84, 79, 289, 268, 221, 4,
        265, 293, 150, 97, 150, 98, -1},
      {7, 130, 124, 265, 272, 127, 255, 84, 267, 160, 223, 223, 160, 223, 223, 84, 79, 289, 268, 221, 4,
        265, 293, 150, 97, 150, 98, -1}}},
    {{{41, 84, 283, 274, 281, 44, 297, 7, 54, 37, 7, 88, 221, 7, 266, 221, 267, 20, 21, 221, 22, 23, 221,
        127, 122, 127, 122, 221, 17, 65, -1},
      {300, 41, 84, 283, 274, 281, 44, 297, 7, 54, 37, 7, 88, 221, 7, 266, 221, 267, 20, 21, 221, 22,
        23, 221, 127, 122, 127, 122, 221, 17, 65, -1}},
     {{298, 221, 260, 202, 199, 202, 199, 221, 289, 31, 221, 199, 268, 199, 269, 198, 198, 88, 221, 198,
        260, 221, 221, 23, 221, 221, 221, -1},
      {300, 298, 221, 260, 202, 199, 202, 199, 221, 289, 31, 221, 199, 268, 199, 269, 198, 198, 88, 221,
        198, 260, 221, 221, 23, 221, 221, 221, -1}},
     {{266, 28, 92, 69, 78, 68, 79, 70, 84, 69, 88, 84, 92, 30, 266, 221, 28, 92, 66, 69, 71, 73, 78,
        63, 79, 70, 63, 84, 69, 88, 84, 92, 30, 221, 28, 92, 73, 77, 63, 83, 84, 65, 82, 84, 92, 30,
        266, 78, 28, 84, 72, 73, 78, 75, 30, 84, 270, 28, 84, 72, 28, 84, 72, 73, 159, 225, 106, 28, 84,
        79, 79, 76, 30, 79, 76, 30, 84, -1},
      {300, 266, 0, 266, 221, 300, 221, 28, 92, 73, 77, 63, 83, 84, 65, 82, 84, 92, 30, 266, 78, 28, 84,
        72, 73, 78, 75, 30, 84, 270, 28, 84, 72, 28, 84, 72, 73, 159, 225, 106, 28, 84, 79, 79, 76, 30,
        79, 76, 30, 84, -1}},
     {{7, 130, 124, 266, 275, 127, 255, 84, 270, 160, 223, 223, 160, 223, 223, 84, 79, 292, 271, 221, 4,
        266, 296, 150, 97, 150, 98, -1},
      {300, 7, 130, 124, 266, 275, 127, 255, 84, 270, 160, 223, 223, 160, 223, 223, 84, 79, 292, 271,
        221, 4, 266, 296, 150, 97, 150, 98, -1}}},
    {{{41, 84, 281, 272, 279, 44, 294, 7, 54, 37, 7, 88, 221, 7, 265, 221, 17, 18, 19, 20, 21, 221, 22, 23,
        221, 127, 122, 127, 122, 221, 17, 65, -1},
      {41, 84, 281, 272, 279, 44, 294, 7, 54, 37, 7, 88, 221, 7, 265, 221, 17, 18, 19, 20, 21, 221, 22,
        23, 221, 127, 122, 127, 122, 221, 17, 65, -1}},
     {{295, 221, 260, 202, 199, 202, 199, 221, 286, 31, 221, 199, 266, 199, 267, 198, 198, 88, 221, 198,
        260, 221, 221, 23, 221, 221, 221, -1},
      {295, 221, 260, 202, 199, 202, 199, 221, 286, 31, 221, 199, 266, 199, 267, 198, 198, 88, 221, 198,
        260, 221, 221, 23, 221, 221, 221, -1}},
     {{265, 28, 92, 69, 78, 68, 79, 70, 84, 69, 88, 84, 92, 30, 265, 221, 28, 92, 66, 69, 71, 73, 78,
        63, 79, 70, 63, 84, 69, 88, 84, 92, 30, 221, 28, 92, 73, 77, 63, 83, 84, 65, 82, 84, 92, 30,
        265, 78, 301, 84, 268, 302, 302, 73, 159, 225, 106, 28, 84, 79, 79, 76, 30, 79, 76, 30, 84, -1},
      {265, 0, 265, 221, 28, 92, 66, 69, 71, 73, 78, 63, 79, 70, 63, 84, 69, 88, 84, 92, 30, 221, 300,
        265, 78, 301, 84, 268, 302, 302, 73, 159, 225, 106, 28, 84, 79, 79, 76, 30, 79, 76, 30, 84, -1}},
     {{7, 130, 124, 265, 273, 127, 255, 84, 268, 160, 223, 223, 160, 223, 223, 84, 79, 289, 269, 221, 4,
        265, 293, 150, 97, 150, 98, -1},
      {7, 130, 124, 265, 273, 127, 255, 84, 268, 160, 223, 223, 160, 223, 223, 84, 79, 289, 269, 221, 4,
        265, 293, 150, 97, 150, 98, -1}}},
};

static mtt_tokenizer *family(mtt_env *env, int pattern, const char *path)
{
    mtt_bpe_options options = {(mtt_pattern)pattern};
    mtt_tokenizer_kind kind = mtt_bpe(&options);
    mtt_tokenizer *t = train_kind(env, &kind, family_sample, sizeof(family_sample) - 1, 300);
    size_t size;
    char *text;
    int i;
    check(!mtt_tokenizer_save(t, path) && mtt_tokenizer_vocab(t) == 300, "family %d: %s", pattern,
          env->error);
    mtt_tokenizer_destroy(t);
    text = read_file(path, &size);
    for (i = 0; i < 6 && family_edits[pattern][i]; i += 2)
        text = edit(text, family_edits[pattern][i], family_edits[pattern][i + 1]);
    write_file(path, text, strlen(text));
    free(text);
    check(!mtt_tokenizer_load(env, path, NULL, &t), "family %d: %s", pattern, env->error);
    return t;
}

/* The ids of a text, ended by -1, are those that are wanted. */
static int encodes(mtt_tokenizer *t, int prompt, const char *text, const int32_t *want)
{
    int32_t ids[256];
    size_t n, k = 0;
    if ((prompt ? mtt_encode_prompt : mtt_encode)(t, text, strlen(text), ids, 256, &n)) return 0;
    while (k < n && ids[k] == want[k]) k++;
    return k == n && want[n] == -1;
}

static void test_families(mtt_env *env)
{
    mtt_tokenizer *t, *again;
    size_t i, size;
    int pattern, prompt, begin;
    for (pattern = 0; pattern < MTT_PATTERN_COUNT; pattern++) {
        t = family(env, pattern, in("family.json"));
        again = NULL;
        begin = pattern == MTT_PATTERN_LLAMA3 ? 300 : -1;
        check(mtt_tokenizer_begin_of_text(t) == begin && mtt_tokenizer_end_of_text(t) == 0, "first and last");
        check(!mtt_tokenizer_save(t, in("again.json")) &&
                  !mtt_tokenizer_load(env, in("again.json"), NULL, &again),
              "family %d is loaded again: %s", pattern, env->error);
        same_tokenizer(t, again, "a family");
        for (i = 0; i < MTT__LENGTH(family_texts); i++) {
            for (prompt = 0; prompt < 2; prompt++) {
                const int32_t *want = family_ids[pattern][i][prompt];
                check(encodes(t, prompt, family_texts[i], want), "%d, %zu, %d", pattern, i, prompt);
                check(encodes(again, prompt, family_texts[i], want), "again %d, %zu", pattern, i);
            }
            check(round_trip(t, family_texts[i], strlen(family_texts[i]), NULL, NULL), "comes back");
        }
        if (pattern == MTT_PATTERN_QWEN)
            check(mtt_tokenizer_bytes(t, 300, &size) && !size && mtt_tokenizer_bytes(t, 301, &size) &&
                      size == 7,
                  "special tokens alone have no bytes");
        mtt_tokenizer_destroy(t);
        mtt_tokenizer_destroy(again);
    }
}

/* Texts and their form NFC: as Unicode's annex 15 and its test file have them. */
static void test_nfc(mtt_env *env)
{
    static const char *const cases[][2] = {
        {"plain, Za\xc5\xbc\xc3\xb3\xc5\x82\xc4\x87 \xe6\x97\xa5\xe6\x9c\xac", NULL},
        {"e\xcc\x81", "\xc3\xa9"},
        {"xe\xcc\xa3\xcc\x82" "e\xcc\x82\xcc\xa3x", "x\xe1\xbb\x87\xe1\xbb\x87x"}, /* in any order */
        {"\xc3\xa9\xcc\xa3", "\xe1\xba\xb9\xcc\x81"}, /* what was composed comes apart */
        {"q\xcc\x87\xcc\xa3", "q\xcc\xa3\xcc\x87"}, /* sorted, not composed */
        {"a\xcc\xa8\xcc\x8a\xcc\x81", "\xc4\x85\xcc\x8a\xcc\x81"},
        {"a\xcc\x85\xcc\x81", NULL}, /* the first mark of the class blocks the second */
        {"\xe2\x84\xab \xe2\x84\xa6", "\xc3\x85 \xce\xa9"}, /* U+212B and U+2126 */
        {"\xef\xa4\x80", "\xe8\xb1\x88"}, /* U+F900 */
        {"\xe0\xa5\x98", "\xe0\xa4\x95\xe0\xa4\xbc"}, /* U+0958 and U+1D160 are never composed */
        {"\xf0\x9d\x85\xa0", "\xf0\x9d\x85\x98\xf0\x9d\x85\xa5\xf0\x9d\x85\xae"},
        {"\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab", "\xed\x95\x9c"}, /* Hangul in three parts, in two */
        {"\xed\x95\x98\xe1\x86\xab\xe1\x86\xa8", "\xed\x95\x9c\xe1\x86\xa8"},
        {"\xe0\xa7\x87\xe0\xa6\xbe", "\xe0\xa7\x8b"}, /* a starter that joins the one before it */
        {"\xe1\xbe\x82", NULL},
        {"\xce\xb1\xcd\x85\xcc\x80\xcc\x93", "\xe1\xbe\xb2\xcc\x93"},
        {"\xce\xb1\xcc\x93\xcc\x80\xcd\x85", "\xe1\xbe\x82"}, /* three compositions */
        {"\xcc\x81" "e\xff\xcc\x81\xe1\x84\x92\xe1", NULL}, /* no base, not UTF-8, cut short */
        {"e<th\xcc\x81<think>\xcc\x81", NULL}, /* marks do not join an added token */
        {"e\xcc\x81<think>e\xcc\x81", "\xc3\xa9<think>\xc3\xa9"},
    };
    enum { LONG = 100000 };
    mtt_tokenizer *t = family(env, MTT_PATTERN_QWEN, in("nfc.json")); /* whole_run reads it again */
    char *text = (char *)malloc(4 * LONG + 1), *back = (char *)malloc(4 * LONG + 1);
    int32_t *ids = (int32_t *)malloc((4 * LONG + 1) * sizeof(*ids));
    size_t i, count = 0, size = 0;
    for (i = 0; i < MTT__LENGTH(cases); i++) {
        const char *from = cases[i][0], *to = cases[i][1] ? cases[i][1] : from;
        const size_t most = 3 * strlen(from);
        check(!mtt_encode(t, from, strlen(from), ids, most, &count) &&
                  !mtt_decode(t, ids, count, back, LONG, &size) && size == strlen(to) &&
                  !memcmp(back, to, size),
              "NFC, case %zu: %.*s", i, (int)size, back);
    }
    text[0] = 'e'; /* marks of two classes by turns: all of the lower class go first */
    for (i = 0; i < LONG; i++) memcpy(text + 1 + 4 * i, "\xcc\x81\xcc\xa3", 4);
    check(!mtt_encode(t, text, 4 * LONG + 1, ids, 4 * LONG + 1, &count) &&
              !mtt_decode(t, ids, count, back, 4 * LONG + 1, &size) && size == 4 * LONG + 1,
          "NFC of 200,000 marks: %zu bytes", size);
    check(!memcmp(back, "\xe1\xba\xb9\xcc\xa3", 5) &&
              !memcmp(back + 2 * LONG - 1, "\xcc\xa3\xcc\x81\xcc\x81", 6),
          "and their order");
    mtt_tokenizer_destroy(t);
    free(text);
    free(back);
    free(ids);
}

/* A .tiktoken file of the 256 bytes and further tokens. */
static void write_tiktoken(const char *path, const char *const *tokens, const char *tail)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    FILE *file = fopen(path, "wb");
    int id;
    for (id = 0; id < 256 || tokens[id - 256]; id++) {
        const char byte = (char)id, *at = id < 256 ? &byte : tokens[id - 256];
        size_t size = id < 256 ? 1 : strlen(at), i;
        for (i = 0; i < size; i += 3) {
            uint32_t bits = (uint32_t)(unsigned char)at[i] << 16;
            if (i + 1 < size) bits |= (uint32_t)(unsigned char)at[i + 1] << 8;
            if (i + 2 < size) bits |= (uint32_t)(unsigned char)at[i + 2];
            fprintf(file, "%c%c%c%c", digits[bits >> 18], digits[bits >> 12 & 63],
                    i + 1 < size ? digits[bits >> 6 & 63] : '=', i + 2 < size ? digits[bits & 63] : '=');
        }
        fprintf(file, " %d\n", id);
    }
    fputs(tail, file);
    fclose(file);
}

/* The ids are tiktoken 0.14's. "xyz" comes before its parts; "qrst" is only a whole word. */
static void test_tiktoken(mtt_env *env)
{
    static const char *const tokens[] = {"ab", "abc", "bc", "xyz", " a", "yz", "qrst", "rs", "12", "123",
                                         "34", NULL};
    static const struct {
        const char *text;
        mtt_pattern pattern;
        int32_t ids[24];
    } cases[] = {
        {"abc bc xyz qrst qrstu abcbc", MTT_PATTERN_GPT2,
         {257, 32, 258, 32, 259, 32, 113, 263, 116, 32, 113, 263, 116, 117, 32, 257, 258, -1}},
        {"qrst", MTT_PATTERN_GPT2, {262, -1}},
        {"12345", MTT_PATTERN_GPT2, {265, 52, 53, -1}},
        {"12345", MTT_PATTERN_LLAMA3, {265, 52, 53, -1}},
        {"99123 4", MTT_PATTERN_LLAMA3, {57, 57, 49, 50, 51, 32, 52, -1}},
        {"12345", MTT_PATTERN_QWEN, {49, 50, 51, 52, 53, -1}},
    };
    static const struct {
        const char *tail, *word;
    } bad[] = {
        {"YQ== 267\n", "different tokens"}, {"YWE= 268\n", "0, 1, 2"}, {"YWE=267\n", "a space"},
        {"YW=E 267\n", "base64"}, {"YWE 267\n", "base64"}, {" 267\n", "base64"}, {"YWE=  267\n", "0, 1, 2"},
        {"YWE= 267", ""}, {"YWE= 267 \n", "0, 1, 2"}, {"YWE= 0x\n", "0, 1, 2"}, {"YWE= \n267\n", "0, 1, 2"},
    };
    mtt_tokenizer *t, *again;
    size_t i;
    write_tiktoken(in("t.tiktoken"), tokens, "");
    for (i = 0; i < MTT__LENGTH(cases); i++) {
        mtt_bpe_options options = {cases[i].pattern};
        mtt_tokenizer_kind kind = mtt_bpe(&options);
        check(!mtt_tokenizer_load(env, in("t.tiktoken"), &kind, &t), "tiktoken: %s", env->error);
        check(mtt_tokenizer_vocab(t) == 268 && mtt_tokenizer_end_of_text(t) == 267, "its vocabulary");
        check(encodes(t, 0, cases[i].text, cases[i].ids), "tiktoken, case %zu", i);
        check(!mtt_tokenizer_save(t, in("again.json")) &&
                  !mtt_tokenizer_load(env, in("again.json"), NULL, &again),
              "tiktoken is loaded again: %s", env->error);
        same_tokenizer(t, again, "tiktoken");
        check(encodes(again, 0, cases[i].text, cases[i].ids), "tiktoken again, case %zu", i);
        mtt_tokenizer_destroy(t);
        mtt_tokenizer_destroy(again);
    }
    for (i = 0; i < MTT__LENGTH(bad); i++) {
        mtt_bpe_options options = {MTT_PATTERN_GPT2};
        mtt_tokenizer_kind kind = mtt_bpe(&options);
        mtt_status status;
        write_tiktoken(in("t.tiktoken"), tokens, bad[i].tail);
        status = mtt_tokenizer_load(env, in("t.tiktoken"), &kind, &t);
        check(status == (*bad[i].word ? MTT_E_FORMAT : MTT_OK) && strstr(env->error, bad[i].word),
              "bad .tiktoken %zu: %s", i, env->error);
        mtt_tokenizer_destroy(t);
    }
}

/* Writes tokens of three bytes until there are `count` in the file, and in the place of the last one 4 bytes
   that give all tokens the CRC-32 `want`, unless that is 0. Lines end as in Windows if `crlf`. */
static void write_vocabulary(const char *path, uint32_t count, uint32_t want, int crlf)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    FILE *file = fopen(path, "wb");
    mtt__crc_table table;
    uint32_t crc = 0, id, i, k, back, steps[4];
    mtt__crc_init(&table);
    for (id = 0; id < count; id++) {
        unsigned char token[4] = {(unsigned char)id, (unsigned char)(id >> 8), (unsigned char)(id >> 16), 0};
        size_t size = id < 256 ? 1 : 3;
        if (want && id == count - 1) { /* the table backwards from `want`, then forwards from here */
            for (size = 4, i = 4, back = ~want; i--; back = (back ^ table.at[0][k]) << 8) {
                for (k = 0; table.at[0][k] >> 24 != back >> 24;) k++;
                steps[i] = k;
            }
            for (i = 0, back = ~crc; i < 4; back = back >> 8 ^ table.at[0][steps[i++]])
                token[i] = (unsigned char)(back ^ steps[i]);
        }
        crc = mtt__crc32(&table, crc, token, size);
        for (i = 0; i < size; i += 3) {
            uint32_t bits = (uint32_t)token[i] << 16;
            if (i + 2 < size) bits |= (uint32_t)token[i + 1] << 8 | token[i + 2];
            fprintf(file, "%c%c%c%c", digits[bits >> 18], digits[bits >> 12 & 63],
                    i + 1 < size ? digits[bits >> 6 & 63] : '=', i + 2 < size ? digits[bits & 63] : '=');
        }
        fprintf(file, " %u%s", (unsigned)id, crlf ? "\r\n" : "\n");
    }
    fclose(file);
}

/* Vocabularies without a pattern: published ones are known by number and contents, others are refused. */
static void test_vocabularies(mtt_env *env)
{
    static const struct {
        uint32_t count, crc;
        int pattern, end, vocab; /* -1 = it is refused */
        const char *word;
    } cases[] = {
        {50256, 0xf3e7b48d, MTT_PATTERN_GPT2, 50256, 50257, ""},
        {100256, 0x670626c2, MTT_PATTERN_LLAMA3, 100257, 100258, ""},
        {128000, 0x48279218, MTT_PATTERN_LLAMA3, 128001, 128002, ""},
        {151643, 0xfbaa3095, MTT_PATTERN_QWEN, 151643, 151644, ""},
        {199998, 0, -1, 0, 0, "is the vocabulary of o200k"}, {200000, 0x082bee67, -1, 0, 0, "of Llama 4"},
        {248044, 0x68631d48, -1, 0, 0, "of Qwen 3.6"},
        {50256, 0, -1, 0, 0, "pass gpt2, smollm, llama3 or qwen"}, {100256, 0, -1, 0, 0, "pass gpt2"},
        {128000, 0x670626c2, -1, 0, 0, "pass gpt2"},
        {50257, 0, -1, 0, 0, "pass gpt2"}, {999, 0, -1, 0, 0, "prepare --pattern, mtt_bpe_options"},
    };
    static const char *const none[] = {"ab", "abc", NULL};
    mtt_bpe_options options = {MTT_PATTERN_QWEN};
    mtt_tokenizer_kind kind = mtt_bpe(&options), wordpiece = mtt_wordpiece(NULL);
    mtt_tokenizer *t, *again;
    size_t i, bytes;
    for (i = 0; i < MTT__LENGTH(cases); i++) {
        mtt_status status;
        write_vocabulary(in("v.tiktoken"), cases[i].count, cases[i].crc, (int)i % 2);
        status = mtt_tokenizer_load(env, in("v.tiktoken"), i % 3 ? NULL : &wordpiece, &t);
        if (cases[i].pattern < 0) {
            check(status && !t && strstr(env->error, cases[i].word), "vocabulary %zu: %s", i, env->error);
            check(i < 7 || (!mtt_tokenizer_load(env, in("v.tiktoken"), &kind, &t) &&
                            ((mtt__bpe *)t->own)->pattern == &mtt__patterns[MTT_PATTERN_QWEN]),
                  "vocabulary %zu with a pattern: %s", i, env->error);
            mtt_tokenizer_destroy(i < 7 ? NULL : t);
            continue;
        }
        check(!status && ((mtt__bpe *)t->own)->pattern == &mtt__patterns[cases[i].pattern] &&
                  mtt_tokenizer_end_of_text(t) == cases[i].end && mtt_tokenizer_vocab(t) == cases[i].vocab &&
                  mtt_tokenizer_bytes(t, cases[i].end, &bytes) && !bytes,
              "vocabulary %zu: %s", i, env->error);
        check(!mtt_tokenizer_save(t, in("again.json")) &&
                  !mtt_tokenizer_load(env, in("again.json"), NULL, &again),
              "vocabulary %zu is loaded again: %s", i, env->error);
        same_tokenizer(t, again, "a vocabulary");
        mtt_tokenizer_destroy(t);
        mtt_tokenizer_destroy(again);
    }
    write_tiktoken(in("v.tiktoken"), none, "= 258\n"); /* the empty token, as Whisper's file has it */
    check(!mtt_tokenizer_load(env, in("v.tiktoken"), &kind, &t), "an empty token: %s", env->error);
    if (!t) return;
    check(mtt_tokenizer_end_of_text(t) == 259 && mtt_tokenizer_bytes(t, 258, &bytes) && !bytes, "its bytes");
    check(encodes(t, 0, "<|empty|>", (const int32_t[]){60, 124, 101, 109, 112, 116, 121, 124, 62, -1}),
          "no text is the empty token");
    check(!mtt_tokenizer_save(t, in("again.json")) &&
              !mtt_tokenizer_load(env, in("again.json"), NULL, &again),
          "it is loaded again: %s", env->error);
    same_tokenizer(t, again, "an empty token");
    mtt_tokenizer_destroy(t);
    mtt_tokenizer_destroy(again);
    write_tiktoken(in("v.tiktoken"), none, "= 258\n= 259\n");
    check(mtt_tokenizer_load(env, in("v.tiktoken"), &kind, &t) == MTT_E_FORMAT &&
              strstr(env->error, "different tokens"),
          "two empty tokens: %s", env->error);
}

/* Forms of a tokenizer.json that change no ids, and files of other kinds. */
static void test_forms(mtt_env *env)
{
    static const struct {
        const char *from, *to;
    } forms[] = {
        {"\"truncation\":null", "\"truncation\":{\"direction\":\"Right\",\"max_length\":3,\"strategy\":"
         "\"LongestFirst\",\"stride\":0}"},
        {"\"padding\":null", "\"padding\":{\"strategy\":{\"Fixed\":9},\"direction\":\"Left\",\"pad_id\":0,"
         "\"pad_to_multiple_of\":8,\"pad_type_id\":0,\"pad_token\":\"<pad>\"}"},
        {"\"truncation\":null,\"padding\":null,", ""},
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[ ]}"},
        {"\"normalizer\":null",
         "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"}]}"},
        {"{\"version\"", "\xef\xbb\xbf{\"version\""},
    };
    static const struct {
        const char *text;
        size_t size;
        const char *word;
    } others[] = {
        {"\x1f\x8b\x08xxxx", 7, "gzip -dc"}, {"\x28\xb5\x2f\xfdxx", 6, "zstd -dc"},
        {"PK\3\4xx", 6, "unzip -p"},
        {"\xff\xfe{\0\"\0v\0", 8, "UTF-16LE"}, {"\0{\0\"\0v\0e", 8, "UTF-16BE"},
    };
    static const char sample[] = "the then there that at the hat the tat that to the top";
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    mtt_tokenizer *t = train(env, sample, sizeof(sample) - 1, 264), *got;
    size_t i, size;
    char *text;
    check(!mtt_tokenizer_save(t, in("good.json")), "save");
    for (i = 0; i < MTT__LENGTH(forms); i++) {
        text = edit(read_file(in("good.json"), &size), forms[i].from, forms[i].to);
        write_file(in("form.json"), text, strlen(text));
        check(!mtt_tokenizer_load(env, in("form.json"), NULL, &got), "form %zu: %s", i, env->error);
        same_tokenizer(t, got, "a form");
        check(!got || got->nfc == (i == 4), "form %zu and NFC", i);
        mtt_tokenizer_destroy(got);
        free(text);
    }
    for (i = 0; i < 2 * MTT__LENGTH(others); i++) {
        write_file(in("other"), others[i / 2].text, others[i / 2].size);
        check(mtt_tokenizer_load(env, in("other"), i % 2 ? &kind : NULL, &got) == MTT_E_FORMAT && !got &&
                  strstr(env->error, others[i / 2].word) && !strstr(env->error, "BERT"),
              "another file %zu: %s", i, env->error);
    }
    text = (char *)malloc(8000);
    for (size = (size_t)sprintf(text, "{"), i = 0; i < 300; i++)
        size += (size_t)sprintf(text + size, "\"%zu\": %zu%s", i, i, i < 299 ? ", " : "}");
    write_file(in("encoder.json"), text, size);
    check(mtt_tokenizer_load(env, in("encoder.json"), NULL, &got) == MTT_E_FORMAT && !got &&
              strstr(env->error, "this is a vocabulary: pass vocab.bpe"),
          "encoder.json: %s", env->error);
    free(text);
    mtt_tokenizer_destroy(t);
}

/* cl100k_base's later expression: ids of tokenizers 0.23.3 with merges of every digit pair. */
static void test_later_pattern(mtt_env *env)
{
    static const char old[] =
        "\"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}| ?"
        "[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"";
    static const char later[] =
        "\"'(?i:[sdmt]|ll|ve|re)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?+\\\\p{L}++|\\\\p{N}{1,3}+| ?"
        "[^\\\\s\\\\p{L}\\\\p{N}]++[\\\\r\\\\n]*+|\\\\s++$|\\\\s*[\\\\r\\\\n]|\\\\s+(?!\\\\S)|\\\\s\"";
    static const char *const marks[] = {"1234567.", " .89. a.", "a. \n .", "x.\n \n.", "'LL.'ve.", "a.  . b.",
                                        "!?\r\n.1.a.", "\n\n. .1."};
    mtt_bpe_options options = {MTT_PATTERN_LLAMA3};
    mtt_tokenizer_kind kind = mtt_bpe(&options);
    mtt_tokenizer *t = train_kind(env, &kind, "the then there", 14, 260), *got;
    size_t i, size, n;
    char *text;
    const char *p;
    check(!mtt_tokenizer_save(t, in("later.json")), "save");
    mtt_tokenizer_destroy(t);
    text = edit(read_file(in("later.json"), &size), old, later);
    write_file(in("later.json"), text, strlen(text));
    free(text);
    for (i = 0; i < 2; i++) { /* as it is, and saved again */
        check(!mtt_tokenizer_load(env, in("later.json"), NULL, &got), "the later pattern: %s", env->error);
        if (!got) return;
        for (n = 0; n < MTT__LENGTH(marks); n++) {
            char plain[32], marked[64];
            size_t at = 0, out = 0;
            for (size = 0, p = marks[n]; *p; p++)
                if (*p != '.') plain[size++] = *p;
            for (; at < size; marked[out++] = '.') {
                const size_t word = mtt__bpe_cut(got, plain + at, size - at);
                memcpy(marked + out, plain + at, word);
                at += word, out += word;
            }
            marked[out] = 0;
            check(!strcmp(marked, marks[n]), "pre-tokens of the later pattern: %s, not %s", marked, marks[n]);
        }
        check(!mtt_tokenizer_save(got, in("later.json")), "save");
        mtt_tokenizer_destroy(got);
    }
}

/* Every bit of a saved tokenizer before its vocabulary: what still loads gives the same ids. */
static void test_flips(mtt_env *env)
{
    static const char sample[] = "the then there that at <|endoftext|> the hat the tat that to the top 12345";
    mtt_tokenizer *t = train(env, sample, sizeof(sample) - 1, 270), *got;
    int32_t want[128], ids[128];
    size_t size, i, n = 0, m = 0;
    char *text;
    int loads = 0;
    check(!mtt_tokenizer_save(t, in("flip.json")) &&
              !mtt_encode(t, sample, sizeof(sample) - 1, want, 128, &n), "save");
    text = read_file(in("flip.json"), &size);
    for (i = 0; i < 8 * (size_t)(strstr(text, "\"vocab\"") - text); i += (size_t)each()) {
        text[i / 8] = (char)(text[i / 8] ^ 1 << i % 8);
        write_file(in("flip.json"), text, size);
        if (!mtt_tokenizer_load(env, in("flip.json"), NULL, &got)) {
            loads++;
            check(!mtt_encode(got, sample, sizeof(sample) - 1, ids, 128, &m) && m == n &&
                      !memcmp(ids, want, n * sizeof(*ids)) && mtt_tokenizer_end_of_text(got) == 0,
                  "bit %zu: %zu ids, not %zu: %.40s", i, m, n, text + (i / 8 > 20 ? i / 8 - 20 : 0));
        }
        mtt_tokenizer_destroy(got);
        text[i / 8] = (char)(text[i / 8] ^ 1 << i % 8);
    }
    check(loads > 0, "no flip loads, so they prove nothing");
    mtt_tokenizer_destroy(t);
    free(text);
}

static void test_bad_json(mtt_env *env)
{
    static const struct {
        const char *from, *to, *word;
    } cases[] = {
        {"\"1.0\"", "\"2.0\"", "version"}, {"\"version\":\"1.0\",", "", "version"},
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"NFKC\"}", "NFKC"},
        {"\"pre_tokenizer\":{\"type\":\"ByteLevel\"", "\"pre_tokenizer\":{\"type\":\"Whitespace\"",
         "Whitespace"},
        {"\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false",
         "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true", "add_prefix_space"},
        {"\"use_regex\":true},\"post", "\"use_regex\":false},\"post", "use_regex"},
        {"\"post_processor\":null", "\"post_processor\":{\"type\":\"BertProcessing\"}", "BertProcessing"},
        {"\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"Metaspace\"", "Metaspace"},
        {"\"type\":\"BPE\"", "\"type\":\"Unigram\"", "Unigram"},
        {"\"type\":\"BPE\"", "\"type\":\"WordPiece\"", "WordPiece"},
        {"\"dropout\":null", "\"dropout\":0.1", "dropout"},
        {"\"byte_fallback\":false", "\"byte_fallback\":true", "byte_fallback"},
        {"\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"</w>\"", "</w>"},
        {"\"single_word\":false", "\"single_word\":true", "single_word"},
        {"\"lstrip\":false", "\"lstrip\":true", "lstrip"},
        {"\"content\":\"<|endoftext|>\"", "\"content\":\"\"", "content and an id"},
        {"\"special\":true}", "\"special\":true},{\"id\":0,\"content\":\"x\",\"special\":true}",
         "order of their ids"},
        {"\"special\":true}", "\"special\":true},{\"id\":264,\"content\":\"<|endoftext|>\",\"special\":true}",
         "two ids"},
        {"\"special\":true}],\"normalizer\":null", "\"special\":true},{\"id\":264,\"content\":\"e\xcc\x81\","
         "\"special\":false,\"normalized\":true}],\"normalizer\":{\"type\":\"NFC\"}", "must be in form NFC"},
        {"\"type\":\"ByteLevel\",\"add_prefix_space\":false", "\"type\":\"Sequence\",\"pretokenizers\":[{"
         "\"type\":\"Split\",\"pattern\":{\"Regex\":\"a+\"}}]", "must be the Regex of"},
        {"\"type\":\"ByteLevel\",\"add_prefix_space\":false", "\"type\":\"Sequence\",\"pretokenizers\":[{"
         "\"type\":\"Split\",\"pattern\":{\"String\":\"a\"}}]", "must be the Regex of"},
        {"\"type\":\"ByteLevel\",\"add_prefix_space\":false", "\"type\":\"Sequence\",\"pretokenizers\":[{"
         "\"type\":\"Punctuation\"}]", "Punctuation"},
        {"\"type\":\"ByteLevel\",\"add_prefix_space\":false", "\"type\":\"Sequence\",\"pretokenizers\":[{"
         "\"type\":\"Digits\",\"individual_digits\":false}]", "individual_digits"},
        {"\"type\":\"ByteLevel\",\"add_prefix_space\":false", "\"type\":\"Sequence\",\"pretokenizers\":[{"
         "\"type\":\"Digits\",\"individual_digits\":true}]", "1.type is missing"},
        {"\"post_processor\":null", "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[]}",
         "the text A"},
        {"\"post_processor\":null", "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":["
         "{\"SpecialToken\":{\"id\":\"q\"}},{\"Sequence\":{\"id\":\"A\"}}]}", "must be an added token"},
        {"\"content\":\"<|endoftext|>\"", "\"content\":\"<pad>\"", "must be <|endoftext|>"},
        {"\"special\":true}", "\"special\":true},{\"id\":1,\"content\":\"[MASK]\",\"special\":true}",
         "not the next"},
        {"\"added_tokens\":[", "\"added_tokens\":[],\"x\":[", "one of the added tokens must be"},
        {"\"special\":true", "\"specail\":true", "unknown key (at specail"},
        {"\"normalized\":false,\"special\":true", "\"normalized\":false", "and special"},
        {"\"special\":true", "\"special\":true,\"rank\":1", "unknown key (at rank"},
        {"\"special\":true", "\"special\":1", "true or false"},
        {"\"normalizer\":null,", "", "normalizer is missing"},
        {"\"post_processor\":null,", "", "post_processor is missing"},
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFD\"}]}",
         "NFD"},
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},"
         "{\"type\":\"NFC\"}]}", "normalizers.1"},
        {"[{\"id\":0", "[{\"id\":1", "two ids"},
        {"\"!\":1,", "\"!\":2,", "0, 1, 2"}, {"\"!\":1,", "", "0, 1, 2"},
        {"\"!\":1,", "\"!\":1,\"!\":2,", "different"}, {"\"!\":1,", "\"!!\":1,", "256 bytes"},
        {"\"!\":1,", "\"\\u4e00\":1,", "alphabet"}, {"\"!\":1,", "\"\":1,", "alphabet"},
        {"\"!\":1,", "\"!\":1.0,", "whole number"}, {"\"!\":1,", "\"!\":-1,", "whole number"},
        {"\"!\":1,", "\"!\":18446744073709551616,", "2^64"}, {"\"!\":1,", "\"!\":4294967297,", "0, 1, 2"},
        {"\"!\":1,", "\"!\" 1,", "colon"}, {"\"merges\":[\"", "\"merges\":[\"ab\",\"", "space"},
        {"\"merges\":[\"", "\"merges\":[\" a\",\"", "two pieces"},
        {"\"merges\":[\"", "\"merges\":[\"q zz\",\"", "not known"},
        {"\"merges\":[\"", "\"merges\":[\"q z\",\"", "not in the vocabulary"},
        {"\"merges\":[\"", "\"merges\":[\"\xc4\xa0 t\",\"", "twice"},
        {"\"merges\":[\"", "\"merges\":[[\"a\"],\"", "space"},
        {"\"merges\":[\"", "\"merges\":[[\"a\",\"b\",\"c\"],\"", "two pieces"},
        {"\"merges\":[\"", "\"merges\":[7,\"", "string"}, {"\"merges\":[", "\"x\":[", "model.merges"},
        {"\"vocab\":{", "\"vocab\":{},\"vocab\":{", "twice"}, {"]}}", "]}}]", "follows"},
        {"]}}", "]}", "comma"},
        {"{\"version\"", "[\"version\"", "neither a tokenizer.json nor"}
    };
    static const char sample[] = "the then there that at the hat the tat that to the top";
    mtt_tokenizer *t = train(env, sample, sizeof(sample) - 1, 264), *got;
    size_t i, size, cut;
    char *text, *other;
    check(!mtt_tokenizer_save(t, in("good.json")), "save");
    mtt_tokenizer_destroy(t);
    text = read_file(in("good.json"), &size);
    other = (char *)malloc(size + 200);
    for (i = 0; i < MTT__LENGTH(cases); i++) {
        const char *at = strstr(text, cases[i].from);
        mtt_status status;
        check(at != NULL, "bad json %zu: %s is in the file", i, cases[i].from);
        if (!at) continue;
        sprintf(other, "%.*s%s%s", (int)(at - text), text, cases[i].to, at + strlen(cases[i].from));
        write_file(in("bad.json"), other, strlen(other));
        got = NULL;
        status = mtt_tokenizer_load(env, in("bad.json"), NULL, &got);
        check(status == MTT_E_FORMAT && !got && strstr(env->error, cases[i].word),
              "bad json %zu (%s): %s, %s", i, cases[i].to, mtt_status_string(status), env->error);
        mtt_tokenizer_destroy(got);
    }
    for (cut = 0; cut + 1 < size; cut += cut < size - 300 ? 37 : 1) {
        write_file(in("bad.json"), text, cut);
        got = NULL;
        check(mtt_tokenizer_load(env, in("bad.json"), NULL, &got) != MTT_OK && !got,
              "a file cut at byte %zu is refused", cut);
        mtt_tokenizer_destroy(got);
    }
    for (i = 0; i < 3000; i++) {
        size_t at = below((int)size);
        memcpy(other, text, size);
        other[at] = (char)below(256);
        write_file(in("bad.json"), other, size);
        got = NULL;
        if (mtt_tokenizer_load(env, in("bad.json"), NULL, &got) == MTT_OK)
            check(round_trip(got, sample, 20, NULL, NULL), "byte %zu", at);
        mtt_tokenizer_destroy(got);
    }
    free(text);
    free(other);
}

static void test_bad_gpt2(mtt_env *env)
{
    static const struct {
        const char *text, *place, *word;
    } cases[] = {
        {"", "bad.bpe", "neither a tokenizer.json nor"}, {"#version: 0.2", "byte 0:", "no end"},
        {"#version: 0.3\n", "byte 0:", "#version"}, {"a b\n", "bad.bpe", "neither a tokenizer.json nor"},
        {"#version: 0.2\n", "byte 14:", "merge 50,000"}, {"#version: 0.2\na b\n", "byte 18:", "merge 50,000"},
        {"#version: 0.2\na b", "byte 14:", "no end"}, {"#version: 0.2\nab\n", "byte 14:", "space"},
        {"#version: 0.2\na b\n\n", "byte 18:", "space"},
        {"#version: 0.2\na b\nab c d\n", "byte 18:", "two pieces"},
        {"#version: 0.2\na b\nabc d\n", "byte 18:", "not known"},
        {"#version: 0.2\na b\na b\n", "byte 18:", "twice"},
        {"#version: 0.2\na b\nb c\nab c\na bc\n", "byte 27:", "exists"},
        {"#version: 0.2\r\na b\r\n", "byte 20:", "merge 50,000"},
        {"#version: 0.2\na b\r \n", "byte 14:", "two pieces"},
        {"#version: 0.2\na \xc4\xff\n", "byte 14:", "two pieces"},
        {"#version: 0.2\na \xc5\x84\n", "byte 14:", "two pieces"}
    };
    mtt_tokenizer *got;
    size_t i, size;
    char *text;
    for (i = 0; i < MTT__LENGTH(cases); i++) {
        write_file(in("bad.bpe"), cases[i].text, strlen(cases[i].text));
        got = NULL;
        check(mtt_tokenizer_load(env, in("bad.bpe"), NULL, &got) == MTT_E_FORMAT && !got &&
                  strstr(env->error, cases[i].word) && strstr(env->error, cases[i].place),
              "bad vocab.bpe %zu: %s", i, env->error);
    }
    text = read_data("vocab.bpe", &size);
    if (!text) return;
    text = (char *)realloc(text, size + 8);
    memcpy(text + size, "q z\n", 4);
    write_file(in("bad.bpe"), text, size + 4);
    check(mtt_tokenizer_load(env, in("bad.bpe"), NULL, &got) == MTT_E_FORMAT &&
              strstr(env->error, "byte 456318:"),
          "a merge too many: %s", env->error);
    write_file(in("bad.bpe"), text, size - 8);
    check(mtt_tokenizer_load(env, in("bad.bpe"), NULL, &got) == MTT_E_FORMAT &&
              strstr(env->error, "byte 456309:"),
          "a cut file: %s", env->error);
    free(text);
}

/* ---- WordPiece */

/* A vocabulary whose ids show what was done to a text. */
static const char small_vocab[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nz\n\xc5\xbc\nZ\n\xc5\xbb\n"
                                  "##a\n##b\n##"
                                  "ab\n##z\n##\xc5\xbc\nab\n,\n.\n[\n]\nSEP\n"
                                  "\xe6\x97\xa5\n\xe6\x9c\xac\n##\xe6\x9c\xac\ni\n##i\n##\xcc\x87\n"
                                  "\xe1\x84\x80\n##"
                                  "\xe1\x85\xa1\n##\xe1\x86\xa8\n\xf0\x9d\x85\x9f\nc\n"
                                  "##c\n\xe0\xa7\x87\n##\xe0\xa6\xbe\n;\nAb\ne\n##e\n\xe8\xb1\x88\n";

/* Ids of Hugging Face's tokenizers 0.23.3 with the same vocabulary and options, by
 * tests/oracles/oracle_tokenizer.py's bert(). */
static const struct word_case {
    const char *options, *text;
    size_t size;
    int32_t ids[12];
} word_cases[] = {
    {"", "ab,abab. aab", 12, {16, 17, 16, 13, 18, 5, 13, -1}},
    {"", "Za\xc5\xbc\xc5\xbc \xc5\xbb" "A", 10, {9, 11, 15, 15, 1, -1}},
    {"", "a\xcc\x81" "b e\xcc\xa8 \xc3\xa9" "b", 12, {1, 1, 1, -1}},
    {"", "\xe6\x97\xa5\xe6\x9c\xac \xe6\x97\xa5" "a\xe6\x9c\xac", 14, {22, 23, 22, 5, 23, -1}},
    {"", "[SEP]", 5, {19, 21, 20, -1}},
    {"", "i\xc4\xb0 \xc4\xb0", 6, {1, 1, -1}},
    {"", "\xea\xb0\x81" "a", 4, {1, -1}},
    {"", "x ab", 4, {1, 16, -1}},
    {"", "a\x00" "b a\x0b" "b a\xe2\x80\x8b" "b a\xef\xbf\xbd" "b", 19, {16, 16, 16, 16, -1}},
    {"", "a\xc2\xa0" "b\xe3\x80\x80" "b\x0d\x0a\x09" "b", 12, {5, 6, 6, 6, -1}},
    {"", "\xe0\xa7\x8b \xf0\x9d\x85\xa0", 8, {1, 1, -1}},
    {"", "a\xcd\xbe" "b", 4, {5, 1, 6, -1}},
    {"", "\xef\xa4\x80" "a", 4, {1, 5, -1}},
    {"", "AB aB Ab", 8, {1, 1, 37, -1}},
    {"", "", 0, {-1}},
    {"", "  \x0a", 3, {-1}},
    {"", "ab-ab \xe2\x80\x94", 9, {16, 1, 16, 1, -1}},
    {"", "\xcc\x87 ,,", 5, {1, 17, 17, -1}},
    {"", "a\xc2\x85" "b\x1c" "b", 6, {16, 12, -1}},
    {"l", "Za\xc5\xbc\xc5\xbc \xc5\xbb" "A", 10, {7, 11, 15, 15, 8, 11, -1}},
    {"l", "[SEP]", 5, {19, 1, 20, -1}},
    {"l", "i\xc4\xb0 \xc4\xb0", 6, {25, 26, 27, 25, 27, -1}},
    {"l", "AB aB Ab", 8, {16, 16, 16, -1}},
    {"a", "Za\xc5\xbc\xc5\xbc \xc5\xbb" "A", 10, {9, 11, 14, 14, 1, -1}},
    {"a", "a\xcc\x81" "b e\xcc\xa8 \xc3\xa9" "b", 12, {16, 38, 38, 12, -1}},
    {"a", "\xea\xb0\x81" "a", 4, {28, 29, 30, 11, -1}},
    {"a", "\xe0\xa7\x8b \xf0\x9d\x85\xa0", 8, {34, 35, 1, -1}},
    {"a", "a\xcd\xbe" "b", 4, {5, 36, 6, -1}},
    {"a", "\xef\xa4\x80" "a", 4, {40, 5, -1}},
    {"a", "\xcc\x87 ,,", 5, {17, 17, -1}},
    {"la", "Za\xc5\xbc\xc5\xbc \xc5\xbb" "A", 10, {7, 11, 14, 14, 7, 11, -1}},
    {"la", "i\xc4\xb0 \xc4\xb0", 6, {25, 26, 25, -1}},
    {"c", "a\x00" "b a\x0b" "b a\xe2\x80\x8b" "b a\xef\xbf\xbd" "b", 19, {1, 5, 6, 1, 1, -1}},
    {"c", "a\xc2\x85" "b\x1c" "b", 6, {5, 1, -1}},
    {"j", "\xe6\x97\xa5\xe6\x9c\xac \xe6\x97\xa5" "a\xe6\x9c\xac", 14, {22, 24, 22, 11, 24, -1}},
    {"j", "\xef\xa4\x80" "a", 4, {1, -1}},
};

static mtt_tokenizer *vocab_of(mtt_env *env, const char *text, const char *letters)
{
    mtt_tokenizer *t = NULL;
    write_file(in("vocab.txt"), text, strlen(text));
    check(!load_words(env, in("vocab.txt"), letters, &t), "vocab.txt: %s", env->error);
    return t;
}

static void test_words(mtt_env *env)
{
    mtt_tokenizer *t = NULL, *again = NULL;
    const char *last = NULL;
    char text[256], back[256];
    int32_t ids[256];
    size_t i, k, n, bytes, size;
    for (i = 0; i < MTT__LENGTH(word_cases); i++) {
        const struct word_case *c = &word_cases[i];
        int same = 1;
        if (!last || strcmp(last, c->options) != 0) {
            mtt_tokenizer_destroy(t);
            mtt_tokenizer_destroy(again);
            t = vocab_of(env, small_vocab, last = c->options);
            check(!mtt_tokenizer_save(t, in("w.json")) && !load_words(env, in("w.json"), "", &again),
                  "WordPiece is saved and loaded: %s", env->error);
            same_tokenizer(t, again, "WordPiece");
            check(memcmp(&((mtt__wordpiece *)t->own)->options, &((mtt__wordpiece *)again->own)->options,
                         sizeof(mtt_wordpiece_options)) == 0,
                  "options %s are kept", last);
        }
        check(!mtt_encode(t, c->text, c->size, ids, c->size, &n), "WordPiece case %zu: %s", i, env->error);
        for (k = 0; k < n && same; k++) same = k < 12 && ids[k] == c->ids[k];
        check(same && n < 12 && c->ids[n] == -1, "WordPiece case %zu (%s): %zu ids", i, c->options, n);
        check(!mtt_encode(again, c->text, c->size, ids, c->size, &k) && k == n, "loaded WordPiece case %zu",
              i);
    }
    for (k = 100; k < 102; k++) { /* the longest word that is looked at */
        memset(text, 'a', sizeof(text));
        check(!mtt_encode(t, text, k, ids, k, &n) &&
                  (k == 100 ? n == 100 && ids[99] == 11 : n == 1 && ids[0] == 1),
              "%zu characters", k);
    }
    check(!mtt_encode(t, "ab ab,\nxyz Abab [SEP]", 21, ids, 21, &n), "encode");
    ids[n] = mtt_tokenizer_end_of_text(t);
    for (size = 0, k = 0; k <= n; k++) size += mtt_tokenizer_bytes(t, ids[k], &bytes) ? bytes : 1000;
    check(!mtt_decode(t, ids, n + 1, back, sizeof(back), &bytes) && bytes == size && bytes == 27 &&
              memcmp(back, " ab ab , [UNK] Abab [ SEP ]", 27) == 0,
          "decode: %.*s, %zu bytes of %zu", (int)bytes, back, bytes, size);
    check(mtt_tokenizer_end_of_text(t) == 3 && mtt_tokenizer_bytes(t, 4, &bytes) && !bytes &&
              !mtt_tokenizer_bytes(t, 41, &bytes),
          "special pieces have no bytes");
    check(mtt_encode(t, "ab,ab", 5, ids, 2, &n) == MTT_E_ARGUMENT && n == 3, "small capacity, %zu needed", n);
    mtt_tokenizer_destroy(t);
    mtt_tokenizer_destroy(again);
    t = vocab_of(env, "[UNK]\r\n[SEP] \t\r\na\r\n##b", "");
    check(mtt_tokenizer_vocab(t) == 4 && !mtt_encode(t, "ab", 2, ids, 2, &n) && n == 2 && ids[1] == 3,
          "Windows line ends");
    mtt_tokenizer_destroy(t);
}

/* No text has more ids than bytes, whatever is in it, and none fails. */
static void test_word_bytes(mtt_env *env)
{
    static const char *const options[] = {"", "la", "lacj"};
    char text[64];
    int32_t ids[64];
    uint32_t c, i, k;
    size_t n, size, bad = 0;
    for (k = 0; k < MTT__LENGTH(options); k++) {
        mtt_tokenizer *t = vocab_of(env, small_vocab, options[k]);
        for (c = 0; c < 0x110000; c++) {
            size = mtt__utf8_put(c, text);
            bad += mtt_encode(t, text, size, ids, size, &n) != MTT_OK;
        }
        for (i = 0; i < 100000; i++) {
            size = below(64);
            for (n = 0; n < size; n++) text[n] = (char)(below(2) ? below(256) : 0xc2 + below(0x34));
            bad += mtt_encode(t, text, size, ids, size, &n) != MTT_OK;
        }
        mtt_tokenizer_destroy(t);
    }
    check(!bad, "%zu texts have more ids than bytes", bad);
}

static void test_word_training(mtt_env *env)
{
    static const char text[] =
        "roses are red, violets are blue; BERT is big and so is GPT-2 and so are the rosy reds. "
        "G\xc4\x99\xc5\x9b, "
        "g\xc4\x99si, g\xc4\x99\xc5\x9b i \xc5\xbc"
        "aba.";
    static const char *const want[] = {
        /* Hugging Face's, given our order of the ##characters */
        "",    " [UNK]", "",          "",          "",          " ,",       " -",  " .",   " 2",  " ;",
        " B",  " E",     " G",        " P",        " R",        " T",       " a",  " b",   " d",  " e",
        " g",  " h",     " i",        " l",        " n",        " o",       " r",  " s",   " t",  " u",
        " v",  " y",     " \xc4\x99", " \xc5\x9b", " \xc5\xbc", "E",        "P",   "R",    "T",   "a",
        "b",   "d",      "e",         "g",         "h",         "i",        "l",   "n",    "o",   "r",
        "s",   "t",      "u",         "y",         "\xc4\x99",  "\xc5\x9b", " ar", " are", " an",
        " g\xc4\x99",
        " is", " re",    " ro",       " so",       " and",      " red",     " ros"};
    mtt_vocab_trainer *trainer = NULL;
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    mtt_tokenizer *t = train_words(env, text, sizeof(text) - 1, 100, "");
    char hex[65], first[65], *whole;
    size_t size = 0, n;
    int order;
    size_t i;
    check(mtt_tokenizer_vocab(t) == (int)MTT__LENGTH(want), "%d WordPieces", mtt_tokenizer_vocab(t));
    for (i = 0; i < MTT__LENGTH(want); i++)
        check(is_piece(t, (int)i, want[i]), "WordPiece %zu is not %s", i, want[i]);
    check(mtt_tokenizer_end_of_text(t) == 3, "[SEP] ends a text");
    mtt_tokenizer_destroy(t);
    check(!mtt_vocab_trainer_create(env, &kind, &trainer) &&
              !mtt_vocab_trainer_add(trainer, text, sizeof(text) - 1),
          "trainer");
    check(mtt_vocab_trainer_finish(trainer, 55, &t) == MTT_E_ARGUMENT && !t && strstr(env->error, "56"),
          "55 ids: %s", env->error);
    check(!mtt_vocab_trainer_finish(trainer, 56, &t) && mtt_tokenizer_vocab(t) == 56, "56 ids");
    mtt_tokenizer_destroy(t);
    /* 1,196 Chinese characters twice, and those of the text more often or not at all */
    for (order = 0; order < 1200; order++) {
        char letter[8];
        n = mtt__utf8_put(0x4e00 + (uint32_t)order, letter);
        for (i = 0; i < 2; i++) check(!mtt_vocab_trainer_add(trainer, letter, n), "letter");
    }
    check(!mtt_vocab_trainer_finish(trainer, 3000, &t), "many characters: %s", env->error);
    for (n = 0, i = 5; i < (size_t)mtt_tokenizer_vocab(t); i++)
        n += *mtt_tokenizer_bytes(t, (int)i, &size) == ' ' && size == 4;
    check(is_piece(t, 5, " ,") && n > 950 && n < 1000, "rare characters go: %zu Chinese ones are left", n);
    mtt_tokenizer_destroy(t);
    mtt_vocab_trainer_destroy(trainer);
    whole = read_data("tinyshakespeare.txt", &size);
    for (order = 0; order < 4 && whole; order++) {
        enum { DOCUMENTS = 7 };
        char *got;
        check(!mtt_vocab_trainer_create(env, &kind, &trainer), "trainer");
        for (i = 0; i < DOCUMENTS; i++) {
            size_t k = (i * 3 + (size_t)order) % DOCUMENTS, at = size * k / DOCUMENTS,
                   end = size * (k + 1) / DOCUMENTS;
            while (at && whole[at] != '\n') at++;
            while (end < size && whole[end] != '\n') end++;
            check(!mtt_vocab_trainer_add(trainer, whole + at, end - at), "document");
        }
        check(!mtt_vocab_trainer_finish(trainer, 2000, &t) && !mtt_tokenizer_save(t, in("order.json")),
              "order %d", order);
        mtt_tokenizer_destroy(t);
        mtt_vocab_trainer_destroy(trainer);
        got = read_file(in("order.json"), &n);
        sha256((const unsigned char *)got, n, hex);
        if (!order) memcpy(first, hex, sizeof(hex));
        check(strcmp(hex, first) == 0, "order %d gives another vocabulary", order);
        free(got);
    }
    free(whole);
}

static void word_stream(mtt_env *env, const char *name, size_t tokens, const char *want)
{
    const char *path = shared_data("bert-base-uncased-vocab.txt", "bert-vocab.txt");
    size_t size, n = 0, i;
    char hex[65], *text = read_data(name, &size);
    mtt_tokenizer *t = NULL;
    int32_t *ids;
    unsigned char *out;
    if (!path || !text) return free(text);
    ids = (int32_t *)malloc(size * sizeof(*ids));
    check(!load_words(env, path, "la", &t) && !mtt_encode(t, text, size, ids, size, &n), "BERT: %s",
          env->error);
    out = (unsigned char *)malloc(2 * n);
    for (i = 0; i < n; i++) out[2 * i] = (unsigned char)ids[i], out[2 * i + 1] = (unsigned char)(ids[i] >> 8);
    sha256(out, 2 * n, hex);
    check(n == tokens && strcmp(hex, want) == 0, "BERT on %s: %zu tokens, %s", name, n, hex);
    mtt_tokenizer_destroy(t);
    free(out);
    free(ids);
    free(text);
}

static void test_bad_words(mtt_env *env)
{
    static const char *const lists[][2] = {{"", "vocab.txt:0: [UNK] or [SEP]"},
                                           {"[UNK]\na\n", "vocab.txt:2: [UNK] or [SEP]"},
                                           {"[SEP]\n", "vocab.txt:1: [UNK]"},
                                           {"[UNK]\n[SEP]\na\nb\na\n", "vocab.txt:5: a piece occurs twice"},
                                           {"[UNK]\n\n[SEP]\n", "vocab.txt:2: a piece is empty"},
                                           {"[UNK]\n[SEP]\n  \r\n", "vocab.txt:3: a piece is empty"},
                                           {"[UNK]\n\xff\n", "vocab.txt:2: a piece is empty or not UTF-8"},
                                           {"[UNK]\n##[SEP]\n[SEP]\n", "vocab.txt:3: a piece occurs twice"}};
    static const char *const json[][3] = {{"\"BertNormalizer\"", "\"NFC\"", "NFC"},
                                          {"\"clean_text\":true,", "", "clean_text is missing"},
                                          {"\"lowercase\":false", "\"lowercase\":1", "lowercase"},
                                          {"\"BertPreTokenizer\"", "\"Whitespace\"", "Whitespace"},
                                          {"\"type\":\"WordPiece\",\"prefix\"",
                                           "\"type\":\"Fuse\",\"prefix\"", "Fuse"},
                                          {"\"unk_token\":\"[UNK]\"", "\"unk_token\":\"<unk>\"", "<unk>"},
                                          {"prefix\":\"##\",\"max", "prefix\":\"\",\"max", "subword_prefix"},
                                          {"word\":100", "word\":200", "200"},
                                          {"\"type\":\"WordPiece\",\"unk",
                                           "\"type\":\"Unigram\",\"unk", "Unigram"},
                                          {"\"ab\":16", "\"ab\":17", "not the next"},
                                          {"\"ab\":16", "\"a\":16", "twice"},
                                          {"\"ab\":16", "\"\":16", "empty"},
                                          {"\"[UNK]\":1", "\"[unk]\":1", "[UNK]"},
                                          {"\"special\":true}]", "\"special\":false}]", "special"},
                                          {"\"special\":true},", "\"special\":true}", "comma"},
                                          {"\"ab\":16", "\"\xff\":16", "UTF-8"},
                                          {"}}}", "}}", "comma"}};
    mtt_tokenizer *t, *got;
    size_t i, size;
    char *text, *other;
    for (i = 0; i < MTT__LENGTH(lists); i++) {
        write_file(in("vocab.txt"), lists[i][0], strlen(lists[i][0]));
        got = NULL;
        check(load_words(env, in("vocab.txt"), "", &got) == MTT_E_FORMAT && !got &&
                  strstr(env->error, lists[i][1]),
              "bad vocab.txt %zu: %s", i, env->error);
    }
    t = vocab_of(env, small_vocab, "");
    check(!mtt_tokenizer_save(t, in("w.json")), "save");
    mtt_tokenizer_destroy(t);
    text = read_file(in("w.json"), &size);
    other = (char *)malloc(size + 200);
    for (i = 0; i < MTT__LENGTH(json); i++) {
        const char *at = strstr(text, json[i][0]);
        check(at != NULL, "bad WordPiece %zu: %s is in the file", i, json[i][0]);
        if (!at) continue;
        sprintf(other, "%.*s%s%s", (int)(at - text), text, json[i][1], at + strlen(json[i][0]));
        write_file(in("bad.json"), other, strlen(other));
        got = NULL;
        check(load_words(env, in("bad.json"), "", &got) == MTT_E_FORMAT && !got &&
                  strstr(env->error, json[i][2]),
              "bad WordPiece %zu (%s): %s", i, json[i][1], env->error);
        mtt_tokenizer_destroy(got);
    }
    for (i = 0; i < 1500; i++) {
        size_t at = below((int)size), n;
        int32_t ids[16];
        memcpy(other, text, size);
        if (i % 2) other[at] = (char)below(256);
        write_file(in("bad.json"), other, i % 2 ? size : at);
        got = NULL;
        if (load_words(env, in("bad.json"), "", &got) == MTT_OK)
            check(!mtt_encode(got, "ab, z\xc5\xbc", 8, ids, 8, &n), "byte %zu", at);
        mtt_tokenizer_destroy(got);
    }
    for (i = 0; i < 2; i++) { /* null means: as lowercase */
        const char *from = "\"strip_accents\":false,\"lowercase\":false", *at = strstr(text, from);
        sprintf(other, "%.*s\"strip_accents\":null,\"lowercase\":%s%s", (int)(at - text), text,
                i ? "true" : "false", at + strlen(from));
        write_file(in("null.json"), other, strlen(other));
        check(!load_words(env, in("null.json"), "", &got) &&
                  ((mtt__wordpiece *)got->own)->options.strip_accents == (int)i,
              "strip_accents null: %s", env->error);
        mtt_tokenizer_destroy(got);
    }
    check(mtt_tokenizer_load(env, in("w.json"), NULL, &got) == MTT_E_FORMAT && !got &&
              strstr(env->error, "model.type is \"WordPiece\"") &&
              strstr(env->error, "include tools/wordpiece.h"),
          "a WordPiece without its kind: %s", env->error);
    check(mtt_tokenizer_load(env, in("vocab.txt"), NULL, &got) == MTT_E_FORMAT && !got &&
              strstr(env->error, "vocab.txt is neither") && strstr(env->error, "include tools/wordpiece.h"),
          "a vocab.txt without its kind: %s", env->error);
    free(text);
    free(other);
}

/* An allocator that fails once, at call `fail_at`, and counts the blocks that live. */
typedef struct faulty {
    long calls, fail_at, live;
} faulty;

static void *faulty_alloc(void *user, size_t bytes)
{
    faulty *f = (faulty *)user;
    void *block = ++f->calls == f->fail_at ? NULL : malloc(bytes);
    f->live += block != NULL;
    return block;
}

static void faulty_free(void *user, void *block)
{
    ((faulty *)user)->live -= block != NULL;
    free(block);
}

static mtt_status whole_run(mtt_env *env, const char *text, size_t size, int words)
{
    mtt_vocab_trainer *trainer = NULL;
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    mtt_tokenizer *t = NULL, *again = NULL;
    int32_t *ids = (int32_t *)malloc(size * sizeof(*ids));
    size_t n;
    mtt_status status = mtt_vocab_trainer_create(env, words ? &kind : NULL, &trainer);
    if (!status) status = mtt_vocab_trainer_add(trainer, text, size);
    if (!status) status = mtt_vocab_trainer_finish(trainer, 300, &t);
    if (!status) status = mtt_encode(t, text, size, ids, size, &n);
    if (!status) status = mtt_tokenizer_save(t, in("m.json"));
    if (!status) status = mtt_tokenizer_load(env, in("m.json"), &kind, &again);
    mtt_tokenizer_destroy(again);
    again = NULL;
    if (!status) status = mtt_tokenizer_load(env, in(words ? "m.txt" : "nfc.json"), &kind, &again);
    if (!status && !words) status = mtt_encode(again, "e\xcc\x81 <th>e\xcc\x81", 11, ids, size, &n);
    mtt_tokenizer_destroy(again);
    mtt_tokenizer_destroy(t);
    mtt_vocab_trainer_destroy(trainer);
    free(ids);
    return status;
}

static void test_memory(int words)
{
    char text[3000];
    faulty f;
    mtt_env env;
    size_t i;
    long k;
    mtt_status status = MTT_E_MEMORY;
    for (i = 0; i < sizeof(text); i++)
        text[i] = (char)(i > 1500 && i < 1700 ? 'a' + below(3) : below(8) ? 'a' + below(26) : ' ');
    write_file(in("m.txt"), small_vocab, sizeof(small_vocab) - 1);
    memset(&env, 0, sizeof(env));
    env.alloc = faulty_alloc;
    env.free = faulty_free;
    env.user = &f;
    for (k = 1; k < 10000 && status; k++) {
        memset(&f, 0, sizeof(f));
        f.fail_at = k;
        status = whole_run(&env, text, sizeof(text), words);
        check((status == MTT_OK || status == MTT_E_MEMORY) && !f.live,
              "allocation %ld fails: %s, %ld blocks live", k, mtt_status_string(status), f.live);
        check(status == MTT_OK || strstr(env.error, "memory"), "allocation %ld: %s", k, env.error);
    }
    check(k > 50 && f.calls < f.fail_at, "%ld allocations failed in turn", k - 2);
    check(whole_run(NULL, text, sizeof(text), words) == MTT_OK, "no environment");
}

/* ---- modes for the hand */

static mtt_tokenizer *open_tokenizer(const char *path, const char *letters)
{
    mtt_env *env = (mtt_env *)calloc(1, sizeof(*env));
    mtt_tokenizer *t = NULL;
    const char *digit = strpbrk(letters, "0123");
    mtt_bpe_options options = {digit ? (mtt_pattern)(*digit - '0') : MTT_PATTERN_GPT2};
    mtt_tokenizer_kind kind = mtt_bpe(&options);
    if (digit ? mtt_tokenizer_load(env, path, &kind, &t) : load_words(env, path, letters, &t)) {
        fprintf(stderr, "%s\n", env->error);
        exit(1);
    }
    return t;
}

static void print_ids(mtt_tokenizer *t, const char *text, size_t size, const char *between, int prompt)
{
    const size_t most = 3 * size + 1;
    int32_t *ids = (int32_t *)malloc(most * sizeof(*ids));
    size_t i, n = 0;
    if ((prompt ? mtt_encode_prompt : mtt_encode)(t, text, size, ids, most, &n)) exit(1);
    for (i = 0; i < n; i++) printf("%s%d", i ? between : "", (int)ids[i]);
    printf("\n");
    free(ids);
}

static int mode_encode(const char *path, int hex, const char *letters)
{
    mtt_tokenizer *t = open_tokenizer(path, letters);
    size_t size, i, n = 0;
    const int prompt = strchr(letters, 'p') != NULL;
    char *text;
    unsigned byte = 0;
    if (strchr(letters, 'S')) {
        page json = {NULL, 0, 0};
        t->kind.print(t, append, &json);
        return fwrite(json.at, 1, json.size, stdout) != json.size;
    }
    text = read_file("-", &size);
    if (!hex) print_ids(t, text, size, "\n", prompt);
    for (i = 0; hex && i < size; i++) {
        if (text[i] == '\n') print_ids(t, text, n, " ", prompt), n = 0;
        else {
            char digits[5] = {'0', '0', text[i], text[i + 1], 0};
            mtt__hex(digits, &byte);
            text[n++] = (char)byte;
            i++;
        }
    }
    return 0;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The array of ids has been touched before, and the cache is empty. */
static void bench_encode(mtt_tokenizer *t, const char *name, const char *text, size_t size)
{
    int32_t *ids = (int32_t *)malloc(size * sizeof(*ids));
    size_t n;
    double start;
    memset(ids, 1, size * sizeof(*ids));
    start = seconds();
    mtt_encode(t, text, size, ids, size, &n);
    start = seconds() - start;
    printf("encode, %-8s %zu ids, %.3f s, %.1f MB/s\n", name, n, start, (double)size / start / 1e6);
    free(ids);
}

static int mode_bench(const char *path)
{
    const char *bpe = shared_data("vocab.bpe", "vocab.bpe");
    const char *bert = shared_data("bert-base-uncased-vocab.txt", "bert-vocab.txt");
    mtt_tokenizer *t;
    mtt_vocab_trainer *trainer;
    size_t size;
    char *text = read_file(path, &size), *word;
    double start = seconds(), counted;
    if (!text || mtt_vocab_trainer_create(NULL, NULL, &trainer) || mtt_vocab_trainer_add(trainer, text, size))
        return 1;
    counted = seconds() - start;
    if (mtt_vocab_trainer_finish(trainer, 10000, &t)) return 1;
    printf("training: %.2f s, of which counting %.2f s\n", seconds() - start, counted);
    start = seconds();
    mtt_tokenizer_destroy(train_words(NULL, text, size, 10000, ""));
    printf("training, wordpiece: %.2f s\n", seconds() - start);
    bench_encode(t, "trained:", text, size);
    if (bpe) bench_encode(open_tokenizer(bpe, ""), "gpt2:", text, size);
    if (bert) bench_encode(open_tokenizer(bert, "la"), "bert:", text, size);
    word = (char *)malloc(1000000);
    memset(word, 'a', 1000000);
    bench_encode(t, "aaaa:", word, 1000000);
    for (size = 0; size < 1000000; size++) word[size] = (char)('a' + below(26));
    bench_encode(t, "random:", word, 1000000);
    return 0;
}

static int mode_train(const char *path, const char *out, const char *vocab, const char *letters)
{
    size_t size;
    char *text = read_file(path, &size);
    mtt_tokenizer *t = NULL;
    if (text)
        t = letters ? train_words(NULL, text, size, atoi(vocab), letters)
                    : train(NULL, text, size, atoi(vocab));
    return !t || mtt_tokenizer_save(t, out) != MTT_OK;
}

int main(int argc, char **argv)
{
    static mtt_env env;
    mtt_tokenizer *gpt2 = NULL, *own;
    const char *bpe;
    static const char sample[] = "It's the same; the quick brown fox's. Za\xc5\xbc\xc3\xb3\xc5\x82\xc4\x87 "
                                 "g\xc4\x99\xc5\x9bl\xc4\x85 \"ja\xc5\xba\xc5\x84\\\"\n";
    if (argc >= 3 && strcmp(argv[1], "encode") == 0)
        return mode_encode(argv[2], argc > 3 && strcmp(argv[3], "hex") == 0, argc > 4 ? argv[4] : "");
    if (argc == 3 && strcmp(argv[1], "bench") == 0) return mode_bench(argv[2]);
    if (argc >= 4 && strcmp(argv[1], "train") == 0)
        return mode_train(argv[2], argv[3], argc > 4 ? argv[4] : "10000", argc > 5 ? argv[5] : NULL);
    if (!open_folder()) return finish();
    bpe = shared_data("vocab.bpe", "vocab.bpe");
    if (bpe) check(mtt_tokenizer_load(&env, bpe, NULL, &gpt2) == MTT_OK, "GPT-2: %s", env.error);
    own = train(&env, sample, sizeof(sample) - 1, 290);
    test_streams(gpt2);
    test_edges(gpt2);
    test_pretokens();
    test_hash();
    test_refusals(own, &env);
    test_round_trips(own, "own");
    test_long(own);
    test_save(own, "own", &env);
    if (gpt2) {
        test_round_trips(gpt2, "gpt2");
        test_long(gpt2);
        test_save(gpt2, "gpt2", &env);
    }
    test_counts(&env);
    test_training(&env);
    test_families(&env);
    test_nfc(&env);
    test_tiktoken(&env);
    test_vocabularies(&env);
    test_forms(&env);
    test_later_pattern(&env);
    test_flips(&env);
    test_bad_json(&env);
    test_bad_gpt2(&env);
    test_words(&env);
    test_word_bytes(&env);
    test_word_training(&env);
    test_bad_words(&env);
    word_stream(&env, "tinyshakespeare.txt", 288719,
                "10cdcaa00613634d883e1992e180c1c4e921e967b6d7c593eb67782418414384");
    word_stream(&env, "wt2_valid.txt", 260172,
                "058efb7e7b7d77508724559db7b98aa3ddd6925235e3f62083f2b38e58319bd7");
    test_memory(0);
    test_memory(1);
    mtt_tokenizer_destroy(own);
    mtt_tokenizer_destroy(gpt2);
    close_folder();
    return finish();
}
