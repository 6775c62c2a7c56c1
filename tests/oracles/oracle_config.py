"""Compares what mtt and transformers make of random configurations.

usage: python tests/oracles/oracle_config.py [SEED [COUNT]]        in the repository root
       pip install torch transformers

Draws COUNT (300) configurations of each family: keys of config.json that transformers reads, right, missing,
null and odd, rotary settings in every place and spelling. Writes a small folder for each, with masks of any
dtype, and a head of its own, a copy or none. mtt must compute the same sizes, tying, frequencies and logits, or
refuse the folder and name a key or a tensor of it. What transformers refuses, mtt must refuse, too.
"""

import copy, json, os, random, re, struct, subprocess, sys, tempfile, warnings

os.environ["HF_HUB_OFFLINE"] = "1"
import numpy, torch, transformers
from safetensors.torch import save
from transformers import AutoConfig, AutoModelForCausalLM

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
seed, count = [int(x) for x in (sys.argv[1:] + ["1", "300"][len(sys.argv) - 1:])]
rng = random.Random(seed)
work, LENGTH, MISSING = tempfile.mkdtemp(), 24, "(missing)"
FULL, SLIDING = "full_attention", "sliding_attention"

# Of each key: values that models have, and odd ones.
WHOLE = [None, 0, -8, "32", True, [], 10**12]
EVERY = {
    "tie_word_embeddings": ([True, False, MISSING], [None, "true", 1]),
    "is_causal": ([MISSING], [True, False, None]),
    "is_encoder_decoder": ([MISSING, False], [True]),
    "quantization_config": ([MISSING], [None, {}, {"quant_method": "gptq", "bits": 4}]),
    "per_layer_config": ([MISSING], [None, {}, {"0": {"hidden_act": "relu"}}, {"0": {"rms_norm_eps": 0.1}}]),
    "transformers_weights": ([MISSING], [None, "other.safetensors"]),
    "configuration_files": ([MISSING], [["config.4.0.0.json"], ["config.9.0.0.json"]]),
    "text_config": ([MISSING], [None, {}, {"hidden_size": 64}]),
    "attention_chunk_size": ([MISSING], [None, 8]),
    "sliding_window": ([MISSING], [None, 8, 4096]),
    "layer_types": ([MISSING], [None, [FULL] * 2, [FULL], [SLIDING] * 2, [FULL, SLIDING], [], FULL, [FULL, 5],
                                ["attention"] * 2, {}]),
    # these change nothing
    "use_cache": ([MISSING, True], [False]),
    "torch_dtype": ([MISSING, "float32"], ["bfloat16", None]),
    "dtype": ([MISSING], ["float16", None]),
    "architectures": ([MISSING], [None, [], ["LlamaModel"]]),
    "transformers_version": ([MISSING, "4.30.0"], [None]),
    "initializer_range": ([MISSING, 0.02], [0.5]),
    "id2label": ([MISSING], [None, {str(i): f"LABEL_{i}" for i in range(300)}]),
    "task_specific_params": ([MISSING], [None, {"text": {"n_layer": 7, "deep": [[{}], {"a": [1, 2]}]}}]),
    "num_labels": ([MISSING], [1, 5]),
    "pad_token_id": ([MISSING, None], [0, 3]),
    "bos_token_id": ([MISSING, 0], [None, 60000]),
    "eos_token_id": ([MISSING, 0], [None, [1, 2]]),
    "auto_map": ([MISSING], [{"AutoModelForCausalLM": "modeling.Model"}]),
    "unknown": ([MISSING], [None, 1e-3, "\u0142", [{"a": {"b": []}}]]),
}
GPT2 = EVERY | {
    "vocab_size": ([61, 128], WHOLE + [61.0, MISSING]),
    "n_positions": ([64, 32], WHOLE + [64.0, MISSING]),
    "n_embd": ([32, 64], WHOLE + [36, 40, 32.0, MISSING]),
    "n_layer": ([2, 1], WHOLE + [2.0, MISSING, 2000]),
    "n_head": ([4, 2], WHOLE + [3, 5, 4.0, MISSING]),
    "n_inner": ([MISSING, None, 72], WHOLE + [36, 72.0]),
    "hidden_size": ([MISSING], [32, 64, None, 36]),
    "num_hidden_layers": ([MISSING], [1, 2, None, 0]),
    "num_attention_heads": ([MISSING], [2, 4, None, 3]),
    "max_position_embeddings": ([MISSING], [32, 64, None, "64"]),
    "num_key_value_heads": ([MISSING], [1, 2]),
    "head_dim": ([MISSING], [8, 16]),
    "intermediate_size": ([MISSING], [40]),
    "rms_norm_eps": ([MISSING], [0.1]),
    "layer_norm_epsilon": ([1e-5, 0.1, MISSING], [None, 0.0, -1e-5, "1e-5", 1e-13, 2.0, True]),
    "activation_function": (["gelu_new", "gelu_pytorch_tanh", MISSING],
                            ["gelu", "relu", "gelu_fast", "gelu_accurate", "gelu_python_tanh", None, "silu", 3]),
    "scale_attn_weights": ([MISSING, True], [False, None, 1]),
    "scale_attn_by_inverse_layer_idx": ([MISSING, False], [True, None, 0]),
    "reorder_and_upcast_attn": ([MISSING, False], [True]),
    "add_cross_attention": ([MISSING, False], [True, None]),
    "n_ctx": ([MISSING, 64], [8]),
    "attn_pdrop": ([MISSING, 0.1], [0, 0.5]),
    "summary_type": ([MISSING, "cls_index"], ["last"]),
    "rope_scaling": ([MISSING], [None, {"type": "linear", "factor": 2.0}, {"type": "linear"}]),
    "rope_theta": ([MISSING], [500000.0]),
    "rope_parameters": ([MISSING], [None, {"rope_type": "llama3"}]),
}
LLAMA = EVERY | {
    "vocab_size": ([61, 128], WHOLE + [61.0, MISSING]),
    "hidden_size": ([32, 64], WHOLE + [36, 40, 32.0, MISSING]),
    "intermediate_size": ([40, 72], WHOLE + [36, 40.0, MISSING]),
    "num_hidden_layers": ([2, 1], WHOLE + [2.0, MISSING, 2000]),
    "num_attention_heads": ([4, 2], WHOLE + [3, 5, 4.0, MISSING]),
    "num_key_value_heads": ([2, 1, None, MISSING], WHOLE + [3, 8, 2.0]),
    "head_dim": ([MISSING, None, 8, 16], WHOLE + [12, 7, 4, 2, 16.0, 264]),
    "max_position_embeddings": ([64, 4096, 131072, MISSING], WHOLE + [64.0]),
    "rms_norm_eps": ([1e-5, 1e-6, 0.1, MISSING], [None, 0.0, -1e-5, "1e-5", 1e-13, 2.0, True]),
    "hidden_act": (["silu", MISSING], ["swish", "gelu", "relu", "SiLU", None, 1]),
    "attention_bias": ([MISSING, False, True], [None, 0, "false"]),
    "mlp_bias": ([MISSING, False, True], [None, 0, "false"]),
    "attention_dropout": ([MISSING, 0.0], [0.1]),
    "pretraining_tp": ([MISSING, 1], [2, None]),
    "use_sliding_window": ([MISSING], [False, True]),
    "rope_theta": ([MISSING, 10000.0, 500000, 100.5], [None, "10000", 0, -1.0, 0.5, True, []]),
    "partial_rotary_factor": ([MISSING], [None, 1.0, 1, 0.5, 1.5, "1"]),
    "original_max_position_embeddings": ([MISSING], [16, 8192, None, 16.0, 0]),
}
QWEN3 = LLAMA | {
    "head_dim": ([8, 16, 24], WHOLE + [MISSING, 12, 7, 4, 2, 16.0, 264]),
    "num_key_value_heads": ([2, 1, None], WHOLE + [MISSING, 3, 8, 2.0]),
    "attention_bias": ([MISSING, False], [True, None, 0]),
    "mlp_bias": ([MISSING, False], [True, None]),
    "use_sliding_window": ([MISSING, False], [True, None, 0]),
    "sliding_window": ([MISSING, 4096, None], [8]),
    "max_window_layers": ([MISSING, 28], [0, 1]),
}
TYPES = ["linear", "dynamic", "yarn", "longrope", "proportional", "mrope", "su", None, "", "Llama3", 1]
ROPE = {
    "rope_type": (["llama3", "llama3", "default", MISSING], TYPES),
    "type": ([MISSING, MISSING, "llama3", "default"], TYPES),
    "factor": ([8.0, 4, 32.0, 1.0], [MISSING, None, 0.5, 0, -2, "8", 2000.0, True]),
    "low_freq_factor": ([1.0, 1, 1.5, 0.5], [MISSING, None, 0, "1", 4.0, 10, -1]),
    "high_freq_factor": ([4.0, 4, 3, 2.5], [MISSING, None, 0, "4", 1.0, 0.25]),
    "original_max_position_embeddings": ([MISSING, 8192, 16, 64.0, 100.5], [None, 0, "16", -5, 1 << 40]),
    "rope_theta": ([MISSING, 10000.0, 500000, 100.5], [None, "10000", 0, -1.0, 0.5, True]),
    "partial_rotary_factor": ([MISSING], [1.0, 1, 0.5, None, 1.5]),
    "full_attention": ([MISSING], [{"rope_theta": 100.0}, None]),
    "sliding_attention": ([MISSING], [{"rope_type": "default", "rope_theta": 100.0}]),
    "beta_fast": ([MISSING], [32]),
    "attention_factor": ([MISSING], [2.0]),
}
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "qwen3": QWEN3}
NAMES = sorted({k for table in FAMILIES.values() for k in table} | set(ROPE) | {"rope_scaling", "rope_parameters"})
MASKS = [("BOOL", 1), ("U8", 1), ("I64", 8), ("F64", 8), ("F8_E4M3", 1), ("U16", 2), ("C64", 8), ("I16", 2)]


def draw(table, odds):
    """Takes values that models have; `odds` of the keys get an odd one."""
    odd = rng.sample(sorted(table), min(odds, len(table)))
    drawn = {k: copy.deepcopy(rng.choice(table[k][k in odd])) for k in table}
    return {k: v for k, v in drawn.items() if v != MISSING}


def draw_rope():
    if rng.random() < 0.25:
        return rng.choice([None, {}, None, {}, "linear", [], False, 0])
    return draw(ROPE, rng.choice([0, 0, 0, 1, 2]))


def draw_config(family):
    config = draw(FAMILIES[family], rng.choice([0, 0, 0, 1, 1, 1, 2, 3]))
    if family == "llama" and rng.random() < 0.9 and "attention_bias" in config:
        config["mlp_bias"] = config["attention_bias"] # mtt has both or none
    for place in ("rope_scaling", "rope_parameters"):
        if family != "gpt2" and rng.random() < 0.4:
            config[place] = draw_rope()
    items = [("model_type", family), *config.items()]
    rng.shuffle(items)
    return dict(items)


def save_config(folder, config):
    """Some keys are written with escapes."""
    text = json.dumps(config, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1:
        text = text.replace('"type":', '"\\u0074ype":').replace('"rope_s', '"\\u0072ope_s')
    with open(f"{folder}/config.json", "w", encoding="utf-8") as f:
        f.write(text)


def save_weights(folder, model, family):
    """Writes a model's weights, of random values, maybe with a head of its own, and with masks."""
    tensors = {}
    for name, p in model.state_dict().items():
        tensors[name] = torch.randn(p.shape) * 0.2 + (p.dim() == 1 and name.endswith("weight"))
    table = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    head = rng.choice(["copy", "other", "none", "none"]) if model.config.tie_word_embeddings else "other"
    if head == "copy":
        tensors["lm_head.weight"] = tensors[table].clone()
    if head == "none" or rng.random() < 0.03:
        tensors.pop("lm_head.weight", None)
    raw = save({k: v.float().contiguous() for k, v in tensors.items()})
    size = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8:8 + size]), raw[8 + size:]
    if rng.random() < 0.3:
        dtype, bytes = rng.choice(MASKS)
        name = "transformer.h.0.attn.bias" if family == "gpt2" else "model.layers.0.self_attn.rotary_emb.inv_freq"
        header[name] = {"dtype": dtype, "shape": [1, 4], "data_offsets": [len(data), len(data) + 4 * bytes]}
        data += b"\0" * 4 * bytes
    if rng.random() < 0.1:
        header["__metadata__"] = None
    header = json.dumps(header).encode()
    with open(f"{folder}/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header + data)


def their_model(folder, config, family):
    """What transformers makes of a folder, whose weights this writes; raises what it raises."""
    try:
        theirs = AutoConfig.from_pretrained(folder)
        sizes = theirs.vocab_size * theirs.hidden_size + theirs.num_hidden_layers * theirs.hidden_size**2
        assert sizes < 4e6, "too large for this test"
        model = AutoModelForCausalLM.from_config(theirs)
    except Exception:
        base = AutoConfig.for_model(family, vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                    **({"n_positions": 64} if family == "gpt2" else
                                       {"intermediate_size": 40, "num_key_value_heads": 2, "head_dim": 8}))
        save_weights(folder, AutoModelForCausalLM.from_config(base), family)
        raise
    save_weights(folder, model, family)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    ids = torch.arange(LENGTH)[None] * 7 % theirs.vocab_size
    with torch.no_grad():
        logits = model(ids).logits[0].numpy()
    return model, logits, set(info["missing_keys"]), ids[0].numpy().astype(numpy.int32)


def values(*arguments):
    done = subprocess.run([f"{work}/values", *arguments], capture_output=True, encoding="utf-8", errors="replace")
    assert done.returncode in (0, 1), done
    return done.returncode == 0, done.stdout


def differences(folder, model, logits, ids, fields):
    """Where mtt's reading differs from transformers' model."""
    c, rotary = model.config, model.config.model_type != "gpt2"
    inner = c.intermediate_size if rotary else c.n_inner if c.n_inner is not None else 4 * c.n_embd
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    want = {"layers": c.num_hidden_layers, "heads": c.num_attention_heads, "d_model": c.hidden_size,
            "d_ff": inner, "vocab": c.vocab_size, "max_seq": c.max_position_embeddings,
            "norm_eps": c.rms_norm_eps if rotary else c.layer_norm_epsilon,
            "tied_head": table.data_ptr() == head.data_ptr()}
    if rotary:
        want |= {"heads_kv": c.num_key_value_heads, "d_head": c.head_dim,
                 "no_biases": not any(k.endswith("proj.bias") for k in model.state_dict())}
        want |= {f"step{i}": x.item() for i, x in enumerate(model.model.rotary_emb.inv_freq.double())}
    wrong = [f"{k}: {fields[k]}, not {v}" for k, v in want.items() if abs(fields[k] - v) > 1e-5 * abs(v)]
    ids.tofile(f"{work}/ids")
    good, text = values(folder, f"{work}/ids", f"{work}/out")
    assert good, text
    ours = numpy.fromfile(f"{work}/out", numpy.float32)[:(LENGTH - 1) * c.vocab_size].reshape(-1, c.vocab_size)
    error = abs(ours - logits[:-1]).max() / abs(logits).max()
    return wrong + ([] if error < 1e-4 else [f"logits: {error:.1e}"])


def judge(family, number):
    folder = f"{work}/{family}{number}"
    os.mkdir(folder)
    config = draw_config(family)
    save_config(folder, config)
    theirs = reason = None
    try:
        theirs = their_model(folder, config, family)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:160]
    good, text = values(folder)
    if good and theirs and not theirs[2]:
        model, logits, _, ids = theirs
        wrong = differences(folder, model, logits, ids, {k: float(v) for k, v in map(str.split, text.splitlines())})
        return ("equal", "") if not wrong else ("other", f"{wrong}")
    if good:
        return "other", f"mtt loads it, transformers: {reason or theirs[2]}"
    words = re.findall(r"[a-z_0-9]+", text.replace(folder, ""))
    if not any(name in words for name in NAMES) and (theirs and not theirs[2] or ".weight" not in text):
        return "other", f"no key is named: {text}; transformers: {reason}"
    return ("refused by both" if reason else "refused by mtt alone"), text.replace(folder, "")


if __name__ == "__main__":
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    subprocess.run(["cc", "-O2", "-fopenmp", "tests/oracles/model_values.c", "-o", f"{work}/values", "-lm"], check=True)
    others = 0
    for family in FAMILIES:
        counts, alone = {"equal": 0, "refused by mtt alone": 0, "refused by both": 0, "other": 0}, {}
        for number in range(count):
            verdict, text = judge(family, number)
            counts[verdict] += 1
            if verdict == "other":
                print(f"{work}/{family}{number}: {text}")
            if verdict == "refused by mtt alone":
                key = re.sub(r" is .*", "", text.strip().split(": ", 1)[-1], flags=re.S)
                alone[key] = alone.get(key, 0) + 1
        others += counts["other"]
        print(f"{family}, seed {seed}: " + ", ".join(f"{n} {k}" for k, n in counts.items()))
        print("   refused by mtt alone: " + ", ".join(f"{k} ({n})" for k, n in sorted(alone.items())))
    sys.exit(others > 0)
