"""Compares the tensors that build/schedule --dump writes with those of transformers in double precision.

usage: python tests/oracles/oracle_activations.py        in the repository root
       pip install torch transformers safetensors

GPT-2, Llama with grouped queries, and Qwen3, with random weights. Compared are activations, gradients of activations,
gradients of parameters, and parameters after a step of torch.optim.AdamW. The dumps are of plain attention and of
flash attention, of everything kept and of checkpointing.
"""

import subprocess, tempfile

import torch
from safetensors import safe_open
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from oracle_models import error, gradient_of

LAYERS, BATCH, LENGTH, VOCAB, TOLERANCE = 3, 2, 48, 301, 3e-6
llama = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=104, num_hidden_layers=LAYERS,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
MODELS = {
    "gpt2": GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=64, n_layer=LAYERS, n_head=4, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0)),
    "llama": LlamaForCausalLM(LlamaConfig(**llama)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(head_dim=24, **llama)),
}


def watch(model):
    """Keeps what goes into a module, as "name<", and what comes out, as "name>", with gradients."""
    seen = {}
    def keep(name):
        def hook(module, args, out):
            for key, value in ((f"{name}<", args[0] if args else None), (f"{name}>", out)):
                if torch.is_tensor(value) and value.requires_grad:
                    value.retain_grad()
                    seen[key] = value
        return hook
    for name, module in model.named_modules():
        module.register_forward_hook(keep(name.removeprefix("transformer.").removeprefix("model.")))
    return seen


def expected(model, seen):
    """Tensors by mtt's names: (value, gradient), in transformers' terms."""
    gpt2 = hasattr(model, "transformer")
    at = lambda key: (seen[key].detach(), seen[key].grad)
    both = lambda *keys: tuple(torch.cat(parts, -1) for parts in zip(*[at(key) for key in keys]))
    out = {"x": at("ln_f<" if gpt2 else "norm<"), "ln_f": at("ln_f>" if gpt2 else "norm>"), "logits": at("lm_head>")}
    for n in range(LAYERS):
        h, ours = f"h.{n}." if gpt2 else f"layers.{n}.", f"h.{n}."
        names = {"x": "ln_1<", "ln_1": "ln_1>", "attn.qkv": "attn.c_attn>", "attn.out": "attn.c_proj<",
                 "attn.proj": "attn.c_proj>", "x_mid": "ln_2<", "ln_2": "ln_2>", "mlp.fc": "mlp.c_fc>",
                 "mlp.gelu": "mlp.c_proj<", "mlp.proj": "mlp.c_proj>"}
        if not gpt2:
            names.update({"x": "input_layernorm<", "ln_1": "input_layernorm>", "attn.out": "self_attn.o_proj<",
                          "attn.proj": "self_attn.o_proj>", "x_mid": "post_attention_layernorm<",
                          "ln_2": "post_attention_layernorm>", "mlp.gelu": "mlp.down_proj<",
                          "mlp.proj": "mlp.down_proj>"})
            del names["attn.qkv"], names["mlp.fc"]
            out[ours + "mlp.fc"] = both(h + "mlp.gate_proj>", h + "mlp.up_proj>")
            out[ours + "attn.v"] = at(h + "self_attn.v_proj>")
        for name, key in names.items():
            out[ours + name] = at(h + key)
    return out


def writes(ours, name):
    """What operations have written to a tensor, one after the other."""
    return [ours[key] for key in ours if key == name or key.startswith(name + "@")]


def gradient_of_activation(ours, name, family):
    """The gradient of a tensor in the file; None: there is none by itself."""
    stream = ["x"] + [f"h.{n}.{x}" for n in reversed(range(LAYERS)) for x in ("x_mid", "x")]
    if name in stream:  # that of the residual stream is made by the backward pass of norms, from the end
        return writes(ours, "d_x")[stream.index(name)]
    if name == "logits":
        return writes(ours, name)[-1]
    if name.endswith("mlp.fc"):  # it takes the place of another
        return writes(ours, "d_" + name.replace("fc", "gelu"))[-1] if family == "gpt2" else writes(ours, name)[-1]
    return ours.get("d_" + name)


def compare(name, model, options):
    folder, file = tempfile.mkdtemp(), tempfile.mkdtemp() + "/step.safetensors"
    model.to(torch.float32).save_pretrained(folder)
    subprocess.run(["build/schedule", "--init", folder, "--dump", file, "--batch-size", str(BATCH), "--seq-len",
                    str(LENGTH), *options], check=True, capture_output=True)
    exact = type(model).from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with safe_open(file, "pt") as f:
        ours = {key: f.get_tensor(key) for key in f.offset_keys()}
    seen = watch(exact)
    logits = exact(ours["tokens"].long().reshape(BATCH, LENGTH)).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), ours["targets"].long().reshape(-1))
    loss.backward()
    errors = {"loss": abs(float(ours["loss"]) / loss.item() - 1)}
    def check(key, mine, theirs):
        if key.endswith("attn.v"):
            mine = mine.reshape(-1, mine.shape[-1])[:, -theirs.shape[-1]:]
        mine = mine.reshape(-1, mine.shape[-1])[:, :theirs.shape[-1]].double()
        errors[key] = error(mine, theirs.reshape(mine.shape))
    for key, (value, gradient) in expected(exact, seen).items():
        stored = key.replace("attn.v", "attn.qkv")
        if stored in ours:
            check(key, ours[stored], value)
        made = gradient_of_activation(ours, stored, name)
        if made is not None:
            check("d_" + key, made, gradient)
    activations = len(errors)
    parameters = {}
    for key in [key for key in ours if "after." + key in ours]:
        gradient = ours["d_" + key].double()[:len(ours[key])]
        errors["d_" + key] = error(gradient, gradient_of(exact, key))
        parameters[key] = torch.nn.Parameter(ours[key].double())
        parameters[key].grad = gradient.clone()
    matrices = [p for p in parameters.values() if p.dim() > 1]
    vectors = [p for p in parameters.values() if p.dim() == 1]
    torch.nn.utils.clip_grad_norm_(matrices + vectors, 1.0)
    torch.optim.AdamW([{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
                      lr=3e-4, eps=1e-8).step()
    moved = max(float((ours["after." + key].double() - p.detach()).abs().max()) for key, p in parameters.items())
    worst = max(errors, key=errors.get)
    print(f"{name} {' '.join(options) or '(plain)'}: {activations} activations and gradients of them, "
          f"{len(errors) - activations} of parameters, worst {worst} {errors[worst]:.1e}; "
          f"after a step of AdamW weights differ by {moved:.1e}")
    assert activations > 40 and errors[worst] < TOLERANCE and moved < 1e-7, (worst, errors[worst], moved)


if __name__ == "__main__":
    torch.manual_seed(3)
    for name, model in MODELS.items():
        for p in model.parameters():  # biases and gains are not 0 and 1
            p.data = torch.randn_like(p) * 0.08 + (p.dim() == 1 and bool((p == 1).all()))
        model.tie_weights()
        for options in ([], ["--flash"], ["--checkpointing"], ["--flash", "--selective"]):
            compare(name, model, options)
