"""Compares models that mtt reads with transformers.

usage: python tests/oracles/oracle_models.py        in the repository root
       pip install torch transformers

Makes small models of each family with random weights, and saves them in each type and in shards. mtt must
compute their loss, logits and gradients as transformers does in double precision.
"""

import os, subprocess, tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
import numpy, torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM

work, COUNT, VOCAB = tempfile.mkdtemp(), 33, 301
gpt2 = dict(vocab_size=VOCAB, n_positions=64, n_embd=64, n_layer=3, n_head=4, resid_pdrop=0, embd_pdrop=0,
            bos_token_id=0, eos_token_id=0)
llama = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=104, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
MODELS = {
    "gpt2": GPT2LMHeadModel(GPT2Config(attn_pdrop=0, **gpt2)),
    "gpt2 untied": GPT2LMHeadModel(GPT2Config(attn_pdrop=0, n_inner=80, tie_word_embeddings=False, **gpt2)),
    "llama": LlamaForCausalLM(LlamaConfig(**llama)),
    "llama biases tied": LlamaForCausalLM(
        LlamaConfig(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-5,
                    rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, **llama)),
    "llama scaled": LlamaForCausalLM(
        LlamaConfig(rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0,
                                     "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                     "original_max_position_embeddings": 8192}, **llama)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(head_dim=24, tie_word_embeddings=True, **llama)),
    "qwen3 untied": Qwen3ForCausalLM(Qwen3Config(head_dim=16, rope_theta=1e6, **llama)),
}
SAVES = [("float32", {}), ("float32", {"max_shard_size": "100KB"}), ("float16", {}), ("bfloat16", {}),
         ("bfloat16", {"max_shard_size": "60KB"})]


def run(*command):
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, (command, done.stdout[-400:], done.stderr[-400:])
    return done.stdout.decode().splitlines()


def gradient_of(model, name):
    """The gradient of a parameter of mtt, from those of transformers."""
    grads = {k.removeprefix("transformer.").removeprefix("model."): p.grad for k, p in model.named_parameters()}
    if name in grads:
        return grads[name]
    names = {"wte": ["embed_tokens"], "ln_f": ["norm"], "ln_1": ["input_layernorm"],
             "ln_2": ["post_attention_layernorm"], "attn.q_norm": ["self_attn.q_norm"],
             "attn.k_norm": ["self_attn.k_norm"], "attn.c_proj": ["self_attn.o_proj"],
             "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
             "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"], "mlp.c_proj": ["mlp.down_proj"]}
    stem, end = name.rsplit(".", 1)
    before, linear = "", stem.startswith("h.")
    if linear:
        _, layer, stem = stem.split(".", 2)
        before = f"layers.{layer}."
    parts = [grads[f"{before}{k}.{end}"] for k in names[stem]]
    return torch.cat([p.T if linear and p.dim() == 2 else p for p in parts], -1)


def error(ours, theirs):
    return float(abs(ours - theirs).max() / abs(theirs).max())


if __name__ == "__main__":
    torch.manual_seed(3)
    run("cc", "-O2", "-fopenmp", "tests/oracles/model_values.c", "-o", f"{work}/values", "-lm")
    ids = torch.randint(VOCAB, (1, COUNT))
    ids.numpy().astype(numpy.int32).tofile(f"{work}/ids")
    for name, model in MODELS.items():
        for p in model.parameters():  # biases and gains are not 0 and 1
            p.data = torch.randn_like(p) * 0.08 + (p.dim() == 1 and bool((p == 1).all()))
        model.tie_weights()
        for k, (dtype, how) in enumerate(SAVES):
            folder = f"{work}/{name.replace(' ', '_')}_{k}"
            model.to(getattr(torch, dtype)).save_pretrained(folder, **how)
            exact = type(model).from_pretrained(folder, dtype=torch.float64)
            out = exact(ids, labels=ids)
            out.loss.backward()
            lines = run(f"{work}/values", folder, f"{work}/ids", f"{work}/out")
            values = numpy.fromfile(f"{work}/out", numpy.float32)
            at = (COUNT - 1) * VOCAB
            errors = [abs(float(lines[0]) / out.loss.item() - 1),
                      error(values[:at].reshape(-1, VOCAB), out.logits[0, :-1].detach().numpy())]
            for line in lines[1:]:
                parameter, shape = line.split()[0], [int(n) for n in line.split()[1:] if n != "0"]
                size = numpy.prod(shape)
                errors.append(error(values[at:at + size].reshape(shape), gradient_of(exact, parameter).numpy()))
                at += size
            files = len([f for f in os.listdir(folder) if f.endswith(".safetensors")])
            print(f"{name}, {dtype}, {files} files: {len(lines) - 1} gradients within {max(errors[2:]):.1e}, "
                  f"logits {errors[1]:.1e}, loss {errors[0]:.1e}")
            assert at == len(values) and max(errors) < 1e-5, errors
