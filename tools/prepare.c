/* prepare.c - makes a dataset of a text: a tokenizer and token files, which train.c takes as --data PREFIX.

   cc -O3 -march=native -fopenmp tools/prepare.c -o prepare -lm                 (or: make build/prepare)
   ./prepare --input novel.txt --output data/novel --vocab-size 8000
   ./prepare --input wiki.jsonl --output data/wiki --tokenizer wordpiece --lowercase
   zstd -dc wiki.jsonl.zst | ./prepare --input - --output data/wiki --tokenizer gpt2 --vocab-file vocab.bpe

   Writes PREFIX.tokenizer.json and PREFIX.train.tokens, .valid.tokens and .test.tokens, unless they are there
   and were made of the same text and options. Prints a report. */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "wordpiece.h"
#include "options.h"
#include "results.h"

static mtt_prepare_desc desc;
static mtt_wordpiece_options words;
static mtt_bpe_options bytes_options;
static const char *kind = "bpe", *file;
static int seed;

static const option options[] = {
    TITLE("usage: prepare --input FILE --output PREFIX [option...]"),
    TEXT("input", &desc.input, "text or JSONL, - for standard input"),
    TEXT("output", &desc.output, "prefix of the files to write"),
    TEXT("field", &desc.field, "field of the JSONL documents, default text"),
    INT("seed", &seed, 0, "seed of the split into train, valid and test"),
    TITLE("Tokenizer:"),
    TEXT("tokenizer", &kind, "bpe, wordpiece: train one; gpt2; or the path of a tokenizer"),
    TEXT("vocab-file", &file, "vocab.bpe for gpt2; vocab.txt for wordpiece, to load it"),
    INT("vocab-size", &desc.vocab, 0, "ids of a trained tokenizer, default 10000"),
    CHOICE("pattern", &bytes_options.pattern, "gpt2|smollm|llama3|qwen",
           "how to cut words: bpe, or a .tiktoken file of an unknown vocabulary"),
    FLAG("lowercase", &words.lowercase, 1, "wordpiece: convert text to lower case"),
    FLAG("strip-accents", &words.strip_accents, 1, "wordpiece: remove accents; not for Polish"),
    FLAG("keep-controls", &words.keep_controls, 1, "wordpiece: treat control characters as text"),
    FLAG("keep-cjk", &words.keep_cjk, 1, "wordpiece: do not make each Chinese character a word"),
};

/* Decides what to train or load; returns an exit code. */
static int choose_tokenizer(mtt_tokenizer_kind *wordpiece, mtt_tokenizer_kind *byte_level)
{
    int gpt2 = !strcmp(kind, "gpt2"), wp = !strcmp(kind, "wordpiece"), bpe = !strcmp(kind, "bpe");
    int pattern = option_given("pattern");
    FILE *in;
    int first;
    desc.tokenizer = wp || gpt2 ? file : bpe ? NULL : kind;
    desc.kind = pattern ? byte_level : bpe || gpt2 ? NULL : wordpiece;
    if (wp && pattern) return option_fail("--pattern is for BPE: leave it out");
    if (gpt2 && !file)
        return option_fail("--tokenizer gpt2 needs its merges: add --vocab-file vocab.bpe (get it with "
                           "tools/get_data.sh vocab.bpe)");
    if (file && !gpt2 && !wp)
        return option_fail("--vocab-file needs --tokenizer gpt2 or wordpiece: give any other file as "
                           "--tokenizer");
    if (desc.kind != wordpiece && memcmp(&words, &(mtt_wordpiece_options){0}, sizeof(words)))
        return option_fail("--lowercase, --strip-accents, --keep-controls and --keep-cjk need --tokenizer "
                           "wordpiece or a vocab.txt");
    if (!desc.tokenizer) return 0;
    in = fopen(desc.tokenizer, "rb");
    if (!in) {
        fprintf(stderr, "prepare: cannot open %s: expected %s\n", desc.tokenizer,
                file ? "the path of a vocabulary" : "bpe, gpt2, wordpiece or the path of a tokenizer");
        return EXIT_DATA;
    }
    first = fgetc(in);
    fclose(in);
    if ((!gpt2 || first == '#') && (!wp || first == '[')) return 0;
    fprintf(stderr, "prepare: %s is not a %s: get one with tools/get_data.sh %s\n", file,
            gpt2 ? "vocab.bpe" : "vocab.txt", gpt2 ? "vocab.bpe" : "bert-vocab.txt");
    return EXIT_DATA;
}

/* Says if a vocabulary has another pattern than --pattern: its ids then mean other texts than published. */
static void note_pattern(void)
{
    static const char *const names[] = {"gpt2", "smollm", "llama3", "qwen"};
    const char *own = NULL, *given = names[bytes_options.pattern];
    mtt_bpe_options other = {.pattern = MTT_PATTERN_GPT2};
    mtt_tokenizer_kind known = mtt_bpe(NULL), tried = mtt_bpe(&other);
    mtt_tokenizer *t = NULL;
    uint64_t hash;
    int k;
    if (!desc.tokenizer || !option_given("pattern") || mtt_tokenizer_load(NULL, desc.tokenizer, &known, &t))
        return;
    hash = result_tokenizer_hash(t);
    mtt_tokenizer_destroy(t);
    for (k = 0; k < MTT_PATTERN_COUNT; k++) {
        other.pattern = (mtt_pattern)k;
        if (mtt_tokenizer_load(NULL, desc.tokenizer, &tried, &t)) return;
        if (result_tokenizer_hash(t) == hash && own != given) own = names[k];
        mtt_tokenizer_destroy(t);
    }
    if (own && own != given)
        fprintf(stderr, "prepare: note: the pattern of %s is %s, not %s: leave out --pattern\n",
                desc.tokenizer, own, given);
}

static void row(const char *name, uint64_t documents, uint64_t bytes, uint64_t tokens)
{
    double bytes_per_token = tokens ? (double)bytes / (double)tokens : 0;
    printf("%-6s %12llu %15llu %15llu %12.3f\n", name, (unsigned long long)documents,
           (unsigned long long)bytes, (unsigned long long)tokens, bytes_per_token);
}

int main(int argc, char **argv)
{
    static const char *const names[] = {"train", "valid", "test"};
    static mtt_env env;
    mtt_tokenizer_kind wordpiece = mtt_wordpiece(&words), byte_level = mtt_bpe(&bytes_options);
    mtt_prepare_report r;
    mtt_status status;
    uint64_t documents = 0, bytes = 0, tokens = 0;
    char count[32];
    int k, code = option_parse(options, LENGTH(options), argc, argv);
    if (code) return code == OPTION_HELP ? 0 : code;
    if (!desc.input || !desc.output)
        return option_fail("--input and --output are needed, as in --input text.txt --output data/text "
                           "(--help lists all options)");
    if ((code = choose_tokenizer(&wordpiece, &byte_level))) return code;
    note_pattern();
    desc.seed = (uint64_t)seed;
    option_note_threads();
    status = mtt_prepare(&env, &desc, &r);
    if (status) return option_tell(&env, status);
    if (r.reused) fprintf(stderr, "prepare: %s is up to date\n", desc.output);
    if (result_invalid(&desc, &r)) fprintf(stderr, "prepare: %s\n", result_invalid(&desc, &r));
    if (result_inside(&desc, &r)) fprintf(stderr, "prepare: %s\n", result_inside(&desc, &r));
    for (k = 0; k < MTT_SPLIT_COUNT; k++) documents += r.documents[k];
    snprintf(count, sizeof(count), "%llu", (unsigned long long)documents);
    printf("%s\n", result_documents(&desc, &r, count));
    printf("vocabulary %d, %s.tokenizer.json\n", r.vocab, desc.output);
    printf("%-6s %12s %15s %15s %12s\n", "split", "documents", "bytes", "tokens", "bytes/token");
    for (k = 0; k < MTT_SPLIT_COUNT; k++) {
        row(names[k], r.documents[k], r.bytes[k], r.tokens[k]);
        bytes += r.bytes[k], tokens += r.tokens[k];
    }
    row("all", documents, bytes, tokens);
    return option_close_output(0);
}
