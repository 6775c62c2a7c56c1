"""Compares what convert writes with transformers, gguf and llama.cpp.

usage: python3 tests/oracles/oracle_convert.py BUILD_DIR      in the repository root, after make build/train build/convert
       pip install torch transformers gguf xllamacpp

Trains small models of each family. Their folders must load in from_pretrained with all keys, and give mtt's logits. In
GGUF every tensor must have the bytes that the package gguf makes, and llama.cpp must give the log-probabilities
of transformers for the same weights.

Random models with the other pre-tokenizers follow. llama.cpp must give transformers' ids of random texts, with and
without special tokens. The texts avoid the known differences of llama.cpp:
- It does not bring text to form NFC, so the texts for Qwen are in that form.
- Its classes of characters are those of Unicode 15.1. tokenizers 0.23 knows the letters and digits of Unicode 16.
- After an apostrophe, \u017f (long s) is a letter like others. In transformers (?i:'s) matches it.
- Where added tokens overlap, it takes the longest. transformers takes those with "normalized": false, then the first.
- Pieces with names such as </s> and <|im_end|> are special tokens, even if they are not among the added tokens.
- With GPT-2's, SmolLM's and Qwen's patterns it ignores "ignore_merges": true.
"""

import json, os, random, subprocess, sys, tempfile, unicodedata, urllib.request

os.environ["HF_HUB_OFFLINE"] = "1"
import gguf, gguf.quants, numpy, torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

try:
    import xllamacpp
except ImportError:
    xllamacpp = None
    print("skipped: llama.cpp: pip install xllamacpp")

build, work = os.path.realpath(sys.argv[1]), tempfile.mkdtemp()
LLAMA = "--norm rms --mlp swiglu --positions rotary"
MODELS = {
    "learned": "--layers 2 --heads 2 --d-model 64 --positions learned --max-seq 64 --head tied",
    "sinusoidal": "--layers 3 --heads 4 --d-model 96 --d-ff 160 --technique bf16_flash_chunked_compact",
    "odd": "--layers 2 --heads 5 --d-model 40 --d-ff 72 --positions learned --max-seq 100 --dropout 0.1",
    "llama": f"--layers 3 --heads 4 --heads-kv 2 --d-model 64 --d-ff 96 --no-biases {LLAMA}",
    "pairs": f"--layers 2 --heads 4 --d-model 96 --head tied --rotary-interleaved --rotary-theta 500000 {LLAMA}",
    "scaled": f"--layers 2 --heads 4 --d-model 64 --no-biases --rotary-theta 500000 --rotary-factor 32 {LLAMA}",
    "qwen": f"--layers 2 --heads 4 --heads-kv 1 --d-head 24 --d-model 64 --no-biases --qk-norm {LLAMA}",
    "qwen_pairs": f"--layers 2 --heads 2 --d-head 16 --d-model 64 --no-biases --qk-norm --rotary-interleaved {LLAMA}",
}
TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
SEQ = 64
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {  # llama.cpp's name: Digits or the regular expression, and the token before a text
    "gpt-2": (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", None),
    "smollm": (None, "<|endoftext|>"),
    "llama-bpe": (LLAMA3, "<|begin_of_text|>"),
    "dbrx": (LLAMA3, None),  # llama-bpe without ignore_merges
    "qwen2": (LLAMA3.replace("{1,3}", ""), None),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>"]
PARTS = SPECIAL + list(
    " \n\r\t'\"aeszLRTMDVE019.,!?_-<>|{}\0\x1c\x7f\x85\u00a0\u1680\u180e\u200b\u2003\u2028\u3000\ufeff\u0301½Ⅻ²٣éżółćęśąźń"
    "жшقאहिไทย日本語カ한국🤗👩\u200d🔬\U0010ffff\U00020000"
) + [
    "  ", "   ", "\r\n", "\n\n", " \n ", "\t\n", "!\n\n", " ?\r\n", "\t!", "'s", "'re", "'LL", "'Ll", "'VE", "''s", " the", "_a",
    "Zażółć", "2024", "12345", " 7", "½½½½", "<think>", "</think>", "<|end", "<thi", "😀\ufe0f", "मे\u093cनू", "Vie\u0323\u0302t",
]  # fmt: skip


def run(*command):
    done = subprocess.run(command, capture_output=True, cwd=work)
    assert done.returncode == 0, (command, done.stdout[-400:], done.stderr[-400:])
    return done.stdout.decode()


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().numpy()


def log_probabilities(logits):
    return torch.log_softmax(torch.tensor(logits), -1).numpy()


def check_bytes(file, kind, folder):
    """Each tensor of a GGUF file against the package's own conversion. Returns a model with these weights."""
    tensors = {t.name: t for t in gguf.GGUFReader(file).tensors}
    model = AutoModelForCausalLM.from_pretrained(folder)
    family = model.config.model_type
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], 100)
    model.types = {}
    with torch.no_grad():
        for name, value in model.named_parameters():
            key = names.get_name(name, (".weight", ".bias"))
            linear = value.dim() == 2 and ".h." in name
            data = (value.T if linear else value).contiguous().numpy()
            turned = family == "llama" and ("q_proj" in name or "k_proj" in name)
            d = model.config.head_dim if turned else 0
            if turned:  # llama.cpp has rotary pairs side by side
                data = data.reshape(-1, 2, d // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape).copy()
            as_type = tensors[key].tensor_type
            plain = value.dim() == 1 or "wpe" in name
            fits = kind != "q8_0" or data.shape[-1] % 32 == 0
            want = "F32" if plain else TYPES[kind] if fits else "F16"
            assert as_type.name == want, (key, as_type.name, want)
            bytes_of = gguf.quants.quantize(data, as_type)
            assert bytes_of.tobytes() == tensors[key].data.tobytes(), (file, key)
            model.types[name] = as_type
            back = torch.tensor(gguf.quants.dequantize(bytes_of, as_type).reshape(data.shape))
            if turned:
                back = back.reshape(-1, d // 2, 2, *back.shape[1:]).swapaxes(1, 2).reshape(back.shape)
            value.copy_(back.T if linear else back)
    model.types.setdefault("lm_head.weight", next(iter(model.types.values())))  # if it is tied
    count = len(list(model.named_parameters())) + ("rope_freqs.weight" in tensors)
    assert len(tensors) == count, (len(tensors), count)
    return model


def like_llama(model):
    """llama.cpp rounds the inputs of a product to the type of its matrix. So does the model that is returned."""

    def convert(kind):
        def hook(module, arguments):
            x = arguments[0].contiguous().numpy()
            data = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
            return (torch.tensor(data.reshape(x.shape)),)

        return hook

    for name, module in model.named_modules():
        if name == "lm_head" or name.split(".")[-1].startswith("c_") or name.endswith("_proj"):
            module.register_forward_pre_hook(convert(model.types[name + ".weight"]))
    return model


def llama_top(server, prompt):
    options = {"n_predict": 1, "n_probs": 5, "temperature": 1.0, "cache_prompt": False}
    bias = [[1, 1000.0]]  # generates ! or ": there is no answer after the end of text or a part of a character
    answer = server.handle_completions({"prompt": prompt, "logit_bias": bias, **options})
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {entry["id"]: entry["logprob"] for entry in top}


def check_ids(server, texts, tokenizer):
    """llama.cpp must give the tokenizer's ids, first with special tokens, then with their names as text."""
    for special in (True, False):
        want = tokenizer(texts, add_special_tokens=special, split_special_tokens=not special)["input_ids"]
        for text, ids in zip(texts, want):
            body = json.dumps({"content": text, "add_special": special, "parse_special": special}).encode()
            request = urllib.request.Request(server.listening_address + "/tokenize", body)
            got = json.load(urllib.request.urlopen(request))["tokens"]
            assert got == ids, f"llama.cpp has other ids: {text!a}: {got}, not {ids}"


def check_llama(file, prompts, texts, tokenizer, ids, same, exact):
    """The largest error of a top-5 log-probability: against the same rounding, and against FP32."""
    p = xllamacpp.CommonParams()
    p.model.path, p.n_ctx, p.n_parallel, p.verbosity = file, SEQ, 1, -1
    p.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    p.cache_type_k = p.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(p)
    errors = [0, 0]
    for count in prompts:
        top = llama_top(server, ids[:count])
        assert len(top) == 5, top
        for k, reference in enumerate((same, exact)):
            errors[k] = max([errors[k]] + [abs(reference[count - 1][i] - p) for i, p in top.items()])
    check_ids(server, texts, tokenizer)
    del server
    return errors


def random_texts(count):
    """Three of four parts are from the list, the others characters of Unicode 3.2, which all programs know."""
    known = [chr(c) for c in range(0x110000) if unicodedata.ucd_3_2_0.category(chr(c)) not in ("Cn", "Cs")]
    known.remove("\u017f")
    pick = lambda: rng.choice(PARTS if rng.random() < 0.75 else known)
    return ["".join(pick() for _ in range(rng.randrange(1, 24))) for _ in range(count)]


def make_tokenizer(pre, file):
    """Writes a tokenizer in the form of a family. Its merges cross words, so each wrong cut changes ids."""
    pattern, begin = PRE_TOKENIZERS[pre]
    bytes_of = lambda regex: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    cut = pre_tokenizers.Split(Regex(pattern), "isolated") if pattern else pre_tokenizers.Digits(True)
    hf = Tokenizer(models.BPE())
    hf.pre_tokenizer, hf.decoder = bytes_of(False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    hf.train_from_iterator(random_texts(3000), trainer)
    hf.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_of(not pattern)])
    hf.add_special_tokens(SPECIAL)
    if begin:
        ids = [(begin, hf.token_to_id(begin))]
        hf.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=ids)
    if pre == "qwen2":
        hf.normalizer = normalizers.NFC()
        hf.add_tokens(["<think>", "</think>"])
    form = json.loads(hf.to_str())
    form["model"]["ignore_merges"] = pre == "llama-bpe"
    if pattern and "{1,3}" in pattern:  # pieces that no merge makes: ignore_merges changes ids
        form["model"]["merges"] = [m for i, m in enumerate(form["model"]["merges"]) if i % 7]
    json.dump(form, open(file, "w", encoding="utf-8"))


def make_model(pre, folder):
    """Writes a random model of the family. Its large weights give sharp probabilities."""
    config = AutoConfig.for_model(
        "qwen3" if pre == "qwen2" else "llama", vocab_size=3020, hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer(pre, f"{folder}/tokenizer.json")


rng = random.Random(5)
words = ["".join(rng.choices("aeiouklmnprst", k=rng.randrange(1, 8))) for _ in range(300)]
weights = [1 / (k + 1) for k in range(300)]
source = "\n\n".join(" ".join(rng.choices(words, weights, k=200)) for _ in range(60))
open(os.path.join(work, "text"), "w", encoding="utf-8").write(source)
run("cc", "-O2", "-fopenmp", os.path.realpath("tests/oracles/model_values.c"), "-o", "values", "-lm")
failed = False
for name, options in MODELS.items():
    common = f"--data text --dataset {name} --results-dir results --vocab-size 500 --seq-len {SEQ} --steps 60"
    train = f"{common} --batch-size 8 --lr 3e-3 --no-head-bias {options}"
    run(f"{build}/train", *train.split())
    file = [f for f in os.listdir(f"{work}/results") if f.startswith(name) and f.endswith("_step60.safetensors")]
    checkpoint, folder = f"{work}/results/{file[0]}", f"{work}/{name}"
    run(f"{build}/convert", checkpoint, folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = source[2000:2160]
    text_ids = tokenizer(text)["input_ids"][: SEQ - 1]
    text = tokenizer.decode(text_ids)
    assert tokenizer(text)["input_ids"] == text_ids and tokenizer.eos_token_id == model.config.eos_token_id
    ids = tokenizer(source[5000:6000])["input_ids"][:SEQ]
    numpy.array(ids + ids[:1], numpy.int32).tofile(f"{work}/ids")
    run("./values", checkpoint, "ids", "out")
    ours = numpy.fromfile(f"{work}/out", numpy.float32)[: SEQ * 500].reshape(SEQ, 500)
    exact = logits_of(model, ids)
    error = abs(ours - exact).max()
    print(f"{name}: logits up to {abs(exact).max():.3f}, transformers differs by {error:.1e}")
    assert error < 1e-5 * max(1, abs(exact).max())
    for kind in TYPES:
        path = f"{work}/{name}_{kind}.gguf"
        run(f"{build}/convert", checkpoint, path, "--type", kind)
        rounded = check_bytes(path, kind, folder)
        line = f"{name} {kind}: GGUF has the bytes of gguf-py"
        if kind != "q8_0":
            half = f"{work}/{name}_{kind}"
            run(f"{build}/convert", checkpoint, half, "--type", kind)
            other = AutoModelForCausalLM.from_pretrained(half, dtype="auto")
            assert str(other.dtype) == f"torch.{dict(f32='float32', f16='float16', bf16='bfloat16')[kind]}"
            for (key, a), b in zip(other.named_parameters(), model.parameters()):
                assert torch.equal(a, b.to(a.dtype)), key
            line += "; so does the folder"
        if xllamacpp:
            same, exact_p = log_probabilities(logits_of(like_llama(rounded), ids)), log_probabilities(exact)
            errors = check_llama(path, (1, 2, 7, 20, 63), [text], tokenizer, ids, same, exact_p)
            line += f"; llama.cpp's top 5 differ by {errors[0]:.5f}, from FP32 by {errors[1]:.5f}"
            failed |= errors[0] > 0.005
        print(line)
for pre in PRE_TOKENIZERS:
    folder, path = f"{work}/{pre}", f"{work}/{pre}.gguf"
    make_model(pre, folder)
    run(f"{build}/convert", folder, path)
    run(f"{build}/convert", folder, f"{folder}_again")
    texts = random_texts(1000)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    again = AutoTokenizer.from_pretrained(f"{folder}_again", model_max_length=1 << 20)
    assert again(texts)["input_ids"] == tokenizer(texts)["input_ids"], pre
    assert gguf.GGUFReader(path).get_field("tokenizer.ggml.pre").contents() == pre
    rounded = check_bytes(path, "f16", folder)
    line = f"{pre}: transformers reads the folder with the ids of {len(texts)} texts"
    if xllamacpp:
        ids = sum(tokenizer(texts)["input_ids"], [])[:SEQ]
        exact_p = log_probabilities(logits_of(AutoModelForCausalLM.from_pretrained(folder), ids))
        same = log_probabilities(logits_of(like_llama(rounded), ids))
        if pre == "qwen2":
            texts = [unicodedata.normalize("NFC", text) for text in texts]
        errors = check_llama(path, (1, 2, 7, 20, 63), texts, tokenizer, ids, same, exact_p)
        line += f"; llama.cpp gives the same ids; its top 5 differ by {errors[0]:.5f}, from FP32 by {errors[1]:.5f}"
        failed |= errors[0] > 0.005
    print(line)
if failed:
    sys.exit("a top-5 log-probability is off by more than 0.005")
