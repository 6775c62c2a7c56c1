/* generate.c - continues a text with a model: a checkpoint of train.c, or a Hugging Face folder.

   cc -O3 -march=native -fopenmp examples/generate.c -o generate -lm                (or: make build/generate)
   ./generate results/novel_fp32_best.safetensors --prompt "It was" --count 200
   ./generate SmolLM2-135M --precision bf16 --temperature 0.8 --min-p 0.1 --stop "."

   The tokenizer is in the folder, or beside the checkpoint. Text also ends at the eos_token_id of the folder,
   which checkpoints that are trained from it carry. */
#define MTT_IMPLEMENTATION
#include "../mtt.h"
#include "../tools/results.h"
#include "../tools/folder.h"
#include "../tools/wordpiece.h"
#include "../tools/options.h"

enum { MOST_CONTEXT = 4096 }; /* unless --context asks for more */

static mtt_env env;
static mtt_generator_desc desc;
static folder notes; /* of the model */
static const char *prompt = "\n", *stop, *tokenizer_path;
static mtt_generation job = {.texts = &prompt, .prompt_count = 1, .count = 100, .stops = &stop,
                             .stop_ids = notes.ends, .write = result_write_token};
static int plan, half;

static const option options[] = {
    TITLE("usage: generate MODEL [option...], a checkpoint of train or a folder of Hugging Face's"),
    TEXT("prompt", &prompt, "text to continue, default a new line"),
    INT("count", &job.count, 0, "tokens to write, at most"),
    TEXT("stop", &stop, "end before this text"),
    TEXT("tokenizer", &tokenizer_path, "tokenizer.json, vocab.bpe or vocab.txt; default: the model's"),
    REAL("temperature", &job.sampling.temperature, 0, "0, the default: always the most likely token"),
    INT("top-k", &job.sampling.top_k, 0, "draw from the N most likely tokens; 0: all"),
    OPTION("top-p", MTT_FIELD_FLOAT, &job.sampling.top_p, 0, 1e-30, 1, "the top X of probability; 1: all"),
    OPTION("min-p", MTT_FIELD_FLOAT, &job.sampling.min_p, 0, 0, 1, "and from X times the likeliest; 0: all"),
    REAL("repetition-penalty", &job.sampling.repetition_penalty, 0, "divides logits of earlier ones; 1: off"),
    OPTION("seed", MTT_FIELD_INT64, &job.sampling.seed, 0, 0, 9e18, "of the draws"),
    INT("context", &desc.context, 0, "tokens that the model sees; default as it was trained"),
    CHOICE("full-context", &job.full_context, "slide|stop", "what happens when the context is full"),
    CHOICE("precision", &half, "fp32|bf16", "of weights and cache"),
    CHOICE("device", &desc.device, "cpu|cuda", "device"),
    FLAG("plan", &plan, 1, "print the plan of memory to stderr"),
};

static mtt_status generate(const char *path)
{
    mtt_backend backend = *mtt_cpu_backend();
    mtt_tokenizer_kind kind = mtt_wordpiece(NULL);
    mtt_model *model = NULL;
    mtt_tokenizer *tokenizer = NULL;
    mtt_generator *generator = NULL;
    mtt_plan_report report;
    mtt_status status = mtt_model_open(&env, path, &model);
    int trained = 0, i;
    if (!status) status = folder_open(&env, path, model, &notes), job.stop_id_count = notes.end_count;
    for (i = 0; i < notes.end_count && !status; i++)
        if (notes.ends[i] >= mtt_model_describe(model)->vocab)
            fprintf(stderr, "generate: note: eos_token_id has %d, but the model's ids end at %d: correct it "
                    "in generation_config.json or config.json\n", (int)notes.ends[i],
                    mtt_model_describe(model)->vocab - 1);
    if (!status && !tokenizer_path) tokenizer_path = result_tokenizer_of(model, path);
    if (!status) status = result_load_tokenizer(&env, tokenizer_path, &kind, model, &tokenizer);
    if (!status) mtt_model_training(model, &desc.window, &trained);
    if (!status && !trained) trained = mtt_model_describe(model)->max_seq;
    if (!desc.context) desc.context = trained < MOST_CONTEXT ? trained : MOST_CONTEXT;
    if (!status) status = mtt_generator_plan(&env, mtt_model_describe(model), &desc, &report);
    if (!status && plan) mtt_plan_print(&report, result_write_text, stderr);
    if (!status && desc.device == MTT_DEVICE_CUDA) status = mtt_cuda_backend(&env, 0, &backend);
    if (!status) status = mtt_generator_create(&env, mtt_model_describe(model), &desc, &backend, &generator);
    if (!status) status = mtt_trainer_load(mtt_generator_trainer(generator), model);
    job.user = stdout, job.stop_count = stop != NULL;
    if (!status) fputs(prompt, stdout), status = mtt_generator_run(generator, tokenizer, &job);
    if (!status) putchar('\n');
    folder_close(&notes);
    mtt_generator_destroy(generator);
    mtt_tokenizer_destroy(tokenizer);
    mtt_model_close(model);
    return status;
}

int main(int argc, char **argv)
{
    int named = argc > 1 && argv[1][0] != '-', code;
    const char *path = argv[named];
    mtt_wait_passively(argv);
    argv[named] = argv[0];
    code = option_parse(options, LENGTH(options), argc - named, argv + named);
    if (code) return code == OPTION_HELP ? 0 : code;
    if (!named) return option_fail("the model comes first: generate MODEL [option...] (--help lists all)");
    option_note_threads();
    desc.precision = half ? MTT_BF16 : MTT_FP32;
    return option_close_output(option_tell(&env, generate(path)));
}
