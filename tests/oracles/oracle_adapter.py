"""Loads adapters that tools/peft.h has written with PEFT, on the same weights in transformers.

usage: python3 tests/oracles/oracle_adapter.py BUILD_DIR      in the repository root, after
       cc -O2 tests/oracles/adapter_files.c -o BUILD_DIR/adapter_files -lm
       pip install torch transformers peft safetensors

The logits must be mtt's within 1e-5, and not those without the adapter. A merged file must give the same.
"""

import os, subprocess, sys, tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
import numpy, torch
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

build, work = os.path.realpath(sys.argv[1]), tempfile.mkdtemp()
VOCAB, LENGTH = 96, 24
IDS = torch.tensor([[i * 31 % VOCAB for i in range(LENGTH)]])


def gpt2(w, heads):
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=w["wte.weight"].shape[1], n_layer=2, n_head=heads,
        n_inner=w["h.0.mlp.c_fc.weight"].shape[1], tie_word_embeddings="lm_head.weight" not in w,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    state = {("" if k.startswith("lm_head") else "transformer.") + k: v for k, v in w.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model


def halves(rows, width):
    """Rows of heads in pairs of neighbours become pairs of halves."""
    return rows.reshape(-1, width // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def llama(w, heads, heads_kv, pairs):
    C, F = w["wte.weight"].shape[1], w["h.0.mlp.c_proj.weight"].shape[0]
    layers, D = sum(k.endswith("ln_1.weight") for k in w), C // heads
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=C, intermediate_size=F, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads_kv, rms_norm_eps=1e-5, max_position_embeddings=LENGTH))
    state = {"model.embed_tokens.weight": w["wte.weight"], "model.norm.weight": w["ln_f.weight"],
             "lm_head.weight": w["lm_head.weight"]}
    for i in range(layers):
        ours, theirs = f"h.{i}.", f"model.layers.{i}."
        q, k, v = w[ours + "attn.c_attn.weight"].T.split([C, heads_kv * D, heads_kv * D])
        if pairs:
            q, k = halves(q, D), halves(k, D)
        gate, up = w[ours + "mlp.c_fc.weight"].T.split([F, F])
        for name, value in {
            "input_layernorm": w[ours + "ln_1.weight"], "post_attention_layernorm": w[ours + "ln_2.weight"],
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": w[ours + "attn.c_proj.weight"].T, "mlp.gate_proj": gate, "mlp.up_proj": up,
            "mlp.down_proj": w[ours + "mlp.c_proj.weight"].T}.items():
            state[theirs + name + ".weight"] = value.contiguous()
    model.load_state_dict(state)
    return model


MODELS = {"gpt2": lambda w: gpt2(w, 4), "gpt2_all": lambda w: gpt2(w, 2),
          "llama": lambda w: llama(w, 4, 2, False), "llama_pairs": lambda w: llama(w, 4, 1, True)}


def weights(file):
    return {k: torch.tensor(v) for k, v in load_file(os.path.join(work, file)).items()
            if not k.startswith("optim.") and ".lora_" not in k}


def logits_of(model):
    with torch.no_grad():
        return model.eval()(IDS).logits[0].numpy()


subprocess.run([os.path.join(build, "adapter_files"), work], check=True)
for name, make in MODELS.items():
    ours = numpy.fromfile(os.path.join(work, name + ".logits"), numpy.float32).reshape(LENGTH, VOCAB)
    base = make(weights(name + ".safetensors"))
    plain = abs(logits_of(base) - ours).max()
    adapted = PeftModel.from_pretrained(base, os.path.join(work, name))
    with_peft = abs(logits_of(adapted) - ours).max()
    merged = abs(logits_of(make(weights(name + ".merged.safetensors"))) - ours).max()
    print(f"{name}: logits differ by {with_peft:.1e} with the adapter, {merged:.1e} merged, {plain:.1e} without it")
    assert with_peft < 1e-5 and merged < 1e-5 and plain > 1e-2
print("adapters load in PEFT")
