#!/usr/bin/env python3
"""Compares mtt with PyTorch: the same weights and batches give the same losses; then time and memory of a step.

    tools/compare_pytorch.py --device cuda                       both parts: 100 steps of losses, the cases a32 a128 gpt2_16
    tools/compare_pytorch.py --curves --data my_text.txt --steps 100 --techniques fp32 bf16_flash
    tools/compare_pytorch.py --curves --data my_text.txt --init folder        from a folder, beside transformers' model
    tools/compare_pytorch.py --device cuda --speed gpt2_16 long --json figures.json
    tools/compare_pytorch.py --device cuda --speed a128 --pytorch bf16 --modes compile graphs       PyTorch alone, without the trainer
    torchrun --nproc-per-node 2 tools/compare_pytorch.py --speed gpt2_16 --pytorch bf16 --modes compile --zero    two GPUs by DDP

Needs Python 3, PyTorch, NumPy and the trainer (`make train`, or the nvcc line of tools/trainer.c for --device cuda).

Curves: the trainer writes a checkpoint before it has learned anything; PyTorch loads those weights, reads the same token
file in the order that mtt_batches documents, and trains with AdamW at the same settings. FP32 must agree within 1e-3 at
every step; BF16 and TF32 (autocast over FP32 weights, where mtt also stores activations in 16 bits) within 1 %.

Speed: whole steps (forward, backward, clipping, AdamW) on the same synthetic batches; of both sides the median of the
second half of the steps. mtt's time is wall clock and counts the copy of the batch to the device and the wait for the
loss; PyTorch's batch lies on the device and nothing waits between its steps. Memory: mtt's arena, which is all that it
allocates, and torch.cuda.max_memory_allocated. Two kinds of cases are PyTorch alone: gqa is attention, forward and backward,
and generate is a new token by transformers' GPT-2. tools/bench.sh puts mtt beside them.
Exit status: 1 if curves differ or mtt failed where it was timed; 2 if something is missing or wrong, and the message says what.
"""
import argparse, contextlib, functools, gc, itertools, json, math, os, platform, re
import signal, statistics, subprocess, sys, tempfile, time, zlib
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read at the import; spinning threads are slow on a busy machine
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"  # its key lacks --sdpa: it would run the kernel compiled first for all
try:
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional as F
except ImportError as missing:
    sys.exit(f"compare: {missing}: install PyTorch and NumPy, for example pip install torch numpy")

A = dict(layers=4, d_model=256, heads=8, d_ff=1024, vocab=50257, seq_len=256,
         positions="sinusoidal", head="untied", bias=True)
GPT2 = dict(layers=12, d_model=768, heads=12, d_ff=3072, vocab=50304, seq_len=1024,
            positions="learned", head="tied", bias=False)
LLAMA = dict(GPT2, d_ff=2048, positions="rotary", llama=True)  # RMSNorm, rotary positions, SwiGLU, no biases
GQA = dict(part="attention", d_head=64, heads=12, heads_kv=4, vocab=256, batch=1, seq_len=16384)  # alone, not a model
GQA16 = dict(GQA, heads=16, heads_kv=2)
GENERATE = dict(GPT2, part="generate", batch=1, new=512)  # ids after a prompt of 16
CASES = {
    "a32": dict(A, batch=32),
    "a128": dict(A, batch=128),
    "b64": dict(A, layers=6, d_model=512, d_ff=2048, vocab=10000, seq_len=512, batch=64),
    "d32": dict(A, layers=12, d_model=768, heads=12, d_ff=3072, vocab=30000, seq_len=1024, batch=32),
    "gpt2_16": dict(GPT2, batch=16),
    "gpt2_64": dict(GPT2, batch=64),
    "gpt2m_16": dict(GPT2, layers=24, d_model=1024, heads=16, d_ff=4096, batch=16),
    "long": dict(GPT2, seq_len=32768, batch=1),
    "llama_16": dict(LLAMA, batch=16),
    "llama_16_d128": dict(LLAMA, batch=16, heads=6),
    **{f"gqa{m['heads']}_{T // 1024}k": dict(m, seq_len=T, batch=16384 // T) for m in (GQA, GQA16) for T in (1024, 4096, 16384)},
    **{f"gpt2_generate_{n}": dict(GENERATE, batch=n) for n in (1, 8, 32, 128)},
    "tiny": dict(A, layers=2, d_model=64, heads=4, d_ff=256, vocab=1000, seq_len=64, batch=4),  # for a CPU
    "tiny_llama": dict(LLAMA, layers=2, d_model=64, heads=4, heads_kv=2, d_ff=256, vocab=1000, seq_len=64, batch=4),
    "tiny_gqa": dict(GQA, seq_len=64, batch=4),
    "tiny_generate": dict(GENERATE, layers=2, d_model=64, heads=4, vocab=1000, seq_len=64, new=40),
}
CURVE_TECHNIQUES = ["fp32", "tf32", "bf16", "bf16_flash"]
SPEED_TECHNIQUES = ["bf16_flash" + rest for rest in ("", "_chunked", "_selective_chunked", "_checkpointing_chunked")]
KERNELS = {"flash": "FA2", "cudnn": "cuDNN"}
MODES = {"eager": "eager", "compile": "compiled", "graphs": "compiled, graphs"}
ATTENTION = getattr(F, "scaled_dot_product_attention", None)  # PyTorch 1 has none
RANKS = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets it
ALLOWED = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 1e-2}  # relative difference of losses


# ---- mtt: the trainer and its files ----

def train(args, folder, name, model, technique, *options):
    """Runs the trainer; returns the rows of its log."""
    command = [args.train, "--device", args.device, "--results-dir", folder, "--dataset", name, "--technique", technique,
               "--lr", str(args.lr), "--seed", str(args.seed), "--eval-batches", "1", "--no-memory-profiling"]
    for key in ("layers", "d_model", "heads", "heads_kv", "d_ff", "seq_len", "positions", "head"):
        command += ["--" + key.replace("_", "-"), str(model[key])] if key in model else []
    command += ["--batch-size", str(model["batch"]), "--dropout", str(model.get("dropout", 0)), *map(str, options)]
    command += ["--no-head-bias"] * (not model.get("bias", True))
    command += ["--norm", "rms", "--mlp", "swiglu", "--no-biases"] if model.get("llama") else []
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
    except OSError as error:
        raise RuntimeError(f"cannot run {args.train} ({error.strerror}): build it with `make train`, or name it with --train")
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    with open(f"{folder}/{name}_{technique}.jsonl", encoding="utf-8") as log:
        return [json.loads(line) for line in log]


def load_safetensors(path):
    """A checkpoint's weights by name: a length, that much JSON, then the data."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    return {name: torch.from_numpy(data[slice(*entry["data_offsets"])].view(np.float32).reshape(entry["shape"]).copy())
            for name, entry in header.items() if name != "__metadata__" and not name.startswith("optim.")}


def open_tokens(path):
    """Vocabulary and ids of a token file, behind its header of 64 bytes."""
    with open(path, "rb") as file:
        header = file.read(64)
    if header[:8] != b"MTTTOKEN":
        raise RuntimeError(f"{path} is no token file: prepare it from text")
    return int.from_bytes(header[24:32], "little"), np.memmap(path, "<u2" if header[12] == 16 else "<u4", "r", offset=64)


def write_tokens(path, ids, vocab):
    ids = ids.astype("<u2" if vocab <= 65536 else "<u4")
    numbers = [(1, 4), (8 * ids.itemsize, 4), (len(ids), 8), (vocab, 8), (zlib.crc32(ids.tobytes()), 4)]
    with open(path, "wb") as file:
        file.write((b"MTTTOKEN" + b"".join(n.to_bytes(size, "little") for n, size in numbers)).ljust(64, b"\0"))
        file.write(ids.tobytes())


def phrases(seed, vocab):
    """Makes ids, as many as it is asked for: phrases, which a model can learn, of words as frequent as words are."""
    rng = np.random.default_rng(seed)
    words = np.minimum(vocab ** rng.random((4096, 16)), vocab - 1).astype(np.int64)  # log-uniform, nearly Zipf's law
    return lambda count: words[rng.integers(0, 4096, count // 16 + 1)].ravel()[:count]


def synthetic_data(args, folder, model):
    """Token files of phrases; returns their prefix."""
    V, T, ids = model["vocab"], model["seq_len"], phrases(args.seed, model["vocab"])
    prefix, any_model = f"{folder}/synthetic{V}", dict(CASES["tiny"], seq_len=8)
    if not os.path.exists(prefix + ".tokenizer.json"):  # the trainer needs one of V ids; any words will do
        with open(prefix, "w", encoding="utf-8") as file, open(prefix + ".vocab.txt", "w", encoding="utf-8") as words:
            file.writelines(f"{i}\n\n" for i in range(1 << 16))
            words.writelines(["[UNK]\n", "[SEP]\n"] + [f"{i}\n" for i in range(V - 2)])
        train(args, folder, f"synthetic{V}", any_model, "fp32", "--data", prefix, "--tokenizer", words.name, "--steps", 1)
        os.remove(prefix + ".test.tokens")  # of the text, not of phrases
    for split, count in ("train", max(1 << 20, 2 * T * model["batch"])), ("valid", T + 1):
        write_tokens(f"{prefix}.{split}.tokens", ids(count), V)
    return prefix


def philox(key, low, high):
    """64 random bits of Philox4x32-10 for each counter of the array `low`."""
    word = 0xffffffff
    c0, c1, c2, c3 = low & word, low >> 32, low * 0 + (high & word), low * 0 + (high >> 32)
    k0, k1 = key & word, key >> 32
    for _ in range(10):
        p, q = c0 * 0xd2511f53, c2 * 0xcd9e8d57
        c0, c1, c2, c3 = q >> 32 ^ c1 ^ k0, q & word, p >> 32 ^ c3 ^ k1, p & word
        k0, k1 = k0 + 0x9e3779b9 & word, k1 + 0xbb67ae85 & word
    return c1 << 32 | c0


def permutation(seed, epoch, count):
    """The order of an epoch's sequences: a Feistel network on 2 * half bits, walked until all places are below `count`."""
    half, shuffle = 1, 1
    while half < 32 and count > 1 << 2 * half:
        half += 1
    mask = (1 << half) - 1
    places, walking = np.arange(count, dtype=np.uint64), np.arange(count)
    while len(walking):
        left, right = places[walking] >> half, places[walking] & mask
        for turn in range(6):
            left, right = right, left ^ philox(seed, right | turn << 32, shuffle << 56 | epoch) & mask
        places[walking] = left << half | right
        walking = walking[places[walking] >= count]
    return places


def batches(ids, model, seed, device):
    """Tokens and targets of each step, without end: sequence k is ids kT .. kT + T, targets one ahead."""
    B, T = model["batch"], model["seq_len"]
    count = (len(ids) - 1) // T
    order = itertools.chain.from_iterable(permutation(seed, epoch, count) for epoch in itertools.count())
    while True:
        rows = np.stack([ids[int(k) * T:int(k) * T + T + 1] for k in itertools.islice(order, B)]).astype(np.int64)
        rows = torch.from_numpy(rows).to(device)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ---- PyTorch: the same model, its parameters under the checkpoint's names ----

def norm_of(m):
    return nn.RMSNorm(m["d_model"], eps=1e-5) if m.get("llama") else nn.LayerNorm(m["d_model"])


def rotate(x, cos, sin):
    """Rotary positions: column i of a head's first half and of its second half are a pair."""
    a, b = x.chunk(2, 3)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), 3).type_as(x)


class Block(nn.Module):
    def __init__(self, m):
        super().__init__()
        d, self.llama, self.dropout = m["d_model"], m.get("llama", False), m.get("dropout", 0)
        kv, self.d_head = m.get("heads_kv", m["heads"]), d // m["heads"]
        self.heads, self.grouped = [m["heads"], kv, kv], {"enable_gqa": True} if kv < m["heads"] else {}
        linear = functools.partial(nn.Linear, bias=not self.llama)
        self.ln_1, self.ln_2 = norm_of(m), norm_of(m)
        self.attn = nn.ModuleDict({"c_attn": linear(d, sum(self.heads) * self.d_head), "c_proj": linear(d, d)})
        self.mlp = nn.ModuleDict({"c_fc": linear(d, m["d_ff"] * (1 + self.llama)), "c_proj": linear(m["d_ff"], d)})

    def forward(self, x, mask, angles):
        q, k, v = self.attn["c_attn"](self.ln_1(x)).unflatten(2, (-1, self.d_head)).transpose(1, 2).split(self.heads, 1)
        if self.llama:
            q, k = rotate(q, *angles), rotate(k, *angles)
        if ATTENTION:
            y = ATTENTION(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=self.dropout, **self.grouped)
        else:
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril() if mask is None else mask
            y = F.dropout((q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(~seen, -math.inf).softmax(3), self.dropout) @ v
        x = x + F.dropout(self.attn["c_proj"](y.transpose(1, 2).flatten(2)), self.dropout)
        y = self.mlp["c_fc"](self.ln_2(x))
        y = F.silu(y.chunk(2, 2)[0]) * y.chunk(2, 2)[1] if self.llama else F.gelu(y, approximate="tanh")
        return x + F.dropout(self.mlp["c_proj"](y), self.dropout)


class Gpt(nn.Module):
    def __init__(self, m, window=0):
        super().__init__()
        d, V, T, self.dropout = m["d_model"], m["vocab"], m["seq_len"], m.get("dropout", 0)
        self.wte, self.ln_f, self.lm_head = nn.Embedding(V, d), norm_of(m), nn.Linear(d, V, bias=m["bias"])
        self.h = nn.ModuleList(Block(m) for _ in range(m["layers"]))
        if m["head"] == "tied":
            self.lm_head.weight = self.wte.weight
        self.wpe = nn.Embedding(max(T, 1024), d) if m["positions"] == "learned" else None
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        self.llama = m.get("llama", False)
        w = d // m["heads"] if self.llama else d
        angle = torch.arange(T).double()[:, None] / 10000 ** (torch.arange(0, w, 2).double() / w)
        self.register_buffer("angles", torch.stack([angle.cos(), angle.sin()]).float(), persistent=False)
        self.register_buffer("sines", 0.02 * torch.stack([angle.sin(), angle.cos()], 2).flatten(1).float(), persistent=False)
        i = torch.arange(T)
        mask = (i[:, None] >= i) & (i[:, None] - i < window) if window else None
        self.register_buffer("mask", mask, persistent=False)

    def load(self, weights):
        """Takes a checkpoint's weights, in which the matrices of layers are [in, out]."""
        state = {name: w.t() if name.startswith("h.") and w.dim() == 2 else w for name, w in weights.items()}
        state.setdefault("lm_head.weight", state["wte.weight"])
        self.load_state_dict(state)

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        if not self.llama:
            x = x + (self.sines if self.wpe is None else self.wpe.weight)[:tokens.shape[1]]
        x = F.dropout(x, self.dropout)
        for block in self.h:
            x = block(x, self.mask, self.angles)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).float().flatten(0, 1), targets.flatten())


def in_eight_bits(model):
    """The model with torchao's FP8 products, in all linear layers whose sizes those can take."""
    from torchao.float8 import convert_to_float8_training
    return convert_to_float8_training(model, module_filter_fn=lambda layer, name:
                                      layer.in_features % 16 == 0 and layer.out_features % 16 == 0)


def precision_of(technique):
    words = technique.split("_")
    if "fp8" in words:
        raise RuntimeError(f"{technique}: PyTorch has no counterpart of mtt's FP8 without another library: "
                           "take fp32, tf32 or bf16")
    if "fp16" in words:
        raise RuntimeError(f"{technique}: FP16 skips steps until it has found its loss scale, so no two curves agree: "
                           "take fp32, tf32 or bf16")
    return next((word for word in words if word in ALLOWED), "fp32")


def make_step(model, forward, precision, args):
    """A training step as PyTorch's users write it, with mtt's defaults; returns the loss, not yet waited for."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
              {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}]
    fused = {"fused": True} if args.device == "cuda" else {}
    settings = dict(lr=args.lr, betas=(0.9, 0.999), eps=1e-8, **fused)
    if args.zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **settings)
    else:
        optimizer = torch.optim.AdamW(groups, **settings)

    def step(tokens, targets):
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=precision in ("bf16", "fp8")):
            loss = forward(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()
    return step


# ---- the two parts ----

def compare_curves(args, folder, result):
    m = dict(layers=args.layers, d_model=args.d_model, heads=args.heads, d_ff=args.d_ff or 4 * args.d_model,
             vocab=args.vocab_size, seq_len=args.seq_len, batch=args.batch_size, positions=args.positions, head=args.head)
    init = ["--init", args.init] if args.init else []
    if init:
        from transformers import AutoModelForCausalLM
        m = {key: m[key] for key in ("seq_len", "batch")}
    data = args.data or synthetic_data(args, folder, m)
    prefix = data if os.path.exists(data + ".train.tokens") else f"{folder}/start"
    # A rate this small leaves every weight as it was: the checkpoint holds the initial values.
    options = init or ["--vocab-size", args.vocab_size]
    train(args, folder, "start", m, "fp32", "--data", data, *options, "--steps", 1, "--lr", 1e-30)
    weights = load_safetensors(f"{folder}/start_fp32_step1.safetensors")
    m["vocab"], ids = open_tokens(prefix + ".train.tokens")
    m["bias"] = "lm_head.bias" in weights
    techniques = args.techniques or CURVE_TECHNIQUES
    theirs, rows, failed = {}, [], False
    for technique in techniques:
        precision, window = precision_of(technique), int((re.search(r"window(\d+)", technique) or [0, 0])[1])
        key = (precision, window)
        if key not in theirs:
            if init:
                model = AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32).to(args.device)
                forward = lambda x, y: F.cross_entropy(model(x).logits.float().flatten(0, 1), y.flatten())
            else:
                forward = model = Gpt(m, window).to(args.device)
                model.load(weights)
            step = make_step(model, forward, precision, args)
            feed = itertools.islice(batches(ids, m, args.seed, args.device), args.steps)
            theirs[key] = torch.stack([step(*batch) for batch in feed]).tolist()
        log = train(args, folder, "run", m, technique, "--data", prefix, *init, "--steps", args.steps)
        ours = [row["loss"] for row in log if "loss" in row]
        gaps = [abs(a - b) / abs(b) for a, b in zip(ours, theirs[key])]
        good = len(gaps) == args.steps and all(gap <= ALLOWED[precision] for gap in gaps)  # not so with one that is no number
        failed |= not good
        rows.append(dict(technique=technique, mtt=ours, pytorch=theirs[key], largest=max(gaps), allowed=ALLOWED[precision],
                         good=good))
    result["curves"] = dict(model=m, lr=args.lr, rows=rows)
    table(["loss at step"] + [f"{r['technique']}: {who}" for r in rows for who in ("mtt", "PyTorch")],
          [[k + 1] + [f"{r[who][k]:.5f}" for r in rows for who in ("mtt", "pytorch")]
           for k in sorted({0, args.steps - 1, *range(9, args.steps, 10)})]
          + [["largest relative difference"] + [text for r in rows for text in
              (f"{r['largest']:.1e}", f"{'within' if r['good'] else '**above**'} {r['allowed']:g}")]])
    return failed


class OutOfTime(BaseException):
    """Raised by the alarm; no Exception, since compilers catch those."""


def on_alarm(*_):
    raise OutOfTime("took longer than --limit")


def run_pytorch(args, m, feed, precision, mode):
    """Milliseconds of a step and MiB at the peak."""
    cuda, half, marks = args.device == "cuda", args.speed_steps // 2, []
    model = Gpt(m).to(args.device)
    forward = model = in_eight_bits(model) if precision == "fp8" else model
    if mode != "eager":
        forward = torch.compile(model, mode="reduce-overhead" if mode == "graphs" else "default")
    if RANKS > 1:  # each rank has a batch of this size
        forward = nn.parallel.DistributedDataParallel(forward, gradient_as_bucket_view=True)
    step = make_step(model, forward, precision, args)
    for k in range(args.speed_steps + 1):
        if cuda and k == 1:  # the first step also compiles, and tries variants that take memory of their own
            torch.cuda.reset_peak_memory_stats()
        marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
        if cuda:
            marks[-1].record()
        step(*feed)
    if cuda:
        torch.cuda.synchronize()
    ms = [a.elapsed_time(b) if cuda else 1e3 * (b - a) for a, b in zip(marks[half:], marks[half + 1:])]
    return dict(ms=statistics.median(ms), mib=torch.cuda.max_memory_allocated() / 2**20 if cuda else None)


def clock(args, run, times, rounds):
    """Milliseconds of a run: the median of `rounds` means over `times` in a row, after two rounds that warm up."""
    cuda, means = args.device == "cuda", []
    for _ in range(2 + rounds):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
        start = time.perf_counter()
        for _ in range(times):
            run()
        if cuda:
            marks[1].record()
            torch.cuda.synchronize()
        means.append((marks[0].elapsed_time(marks[1]) if cuda else 1e3 * (time.perf_counter() - start)) / times)
    return statistics.median(means[2:])


def run_attention(args, m, feed, precision, mode):
    """One layer's attention alone, forward and backward."""
    heads, kv, dtype = m["heads"], m["heads_kv"], torch.bfloat16 if precision == "bf16" else torch.float32
    qkv = torch.randn(m["batch"], m["seq_len"], heads + 2 * kv, m["d_head"], device=args.device, dtype=dtype)
    parts = [t.detach().requires_grad_() for t in qkv.transpose(1, 2).split([heads, kv, kv], 1)]
    d_out = torch.randn_like(qkv[:, :, :heads]).transpose(1, 2)
    return dict(ms=clock(args, lambda: torch.autograd.grad(ATTENTION(*parts, is_causal=True, enable_gqa=True), parts, d_out), 10, 9),
                mib=None)


def run_generation(args, m, feed, precision, mode):
    """A new token by transformers' GPT-2, the prompt's time included."""
    from transformers import CompileConfig, GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(vocab_size=m["vocab"], n_positions=m["seq_len"], n_embd=m["d_model"], n_layer=m["layers"],
                                       n_head=m["heads"], bos_token_id=None, eos_token_id=None)).eval()
    model = model.to(args.device, torch.bfloat16 if precision == "bf16" else torch.float32)
    prompt, how = feed[0][:, :16], {}
    if mode != "eager":
        how = dict(cache_implementation="static",
                   compile_config=CompileConfig(mode="reduce-overhead" if mode == "graphs" else "default"))
    run = lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=m["new"], min_new_tokens=m["new"],
                                 do_sample=False, pad_token_id=0, eos_token_id=None, **how)
    return dict(ms=clock(args, run, 1, 3) / m["new"],
                mib=torch.cuda.max_memory_allocated() / 2**20 if args.device == "cuda" else None)


def time_pytorch(args, m, feed, precision, mode, kernel):
    """The same, or the reason that there is none; leaves the device's memory to the next."""
    attention = contextlib.nullcontext()
    run = {"attention": run_attention, "generate": run_generation}.get(m.get("part"), run_pytorch)
    if args.device == "cuda" and precision in ("bf16", "fp8") and run is not run_generation:  # a cache needs a mask
        from torch.nn.attention import SDPBackend, sdpa_kernel
        attention = sdpa_kernel(getattr(SDPBackend, kernel.upper() + "_ATTENTION"))
    signal.alarm(args.limit)
    try:
        with attention:
            return run(args, m, feed, precision, mode)
    except (Exception, OutOfTime) as error:  # out of memory, no compiler, no such kernel: the table goes on
        return dict(note=(str(error).strip() or type(error).__name__).splitlines()[0][:100])
    finally:
        signal.alarm(0)
        if mode != "eager":
            torch._dynamo.reset()
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def time_mtt(args, m, folder, prefix, technique):
    try:
        log = train(args, folder, "speed", m, technique, "--data", prefix, "--steps", args.speed_steps, "--no-checkpoint")
        with open(f"{folder}/speed_{technique}_metrics.json", encoding="utf-8") as file:
            metrics = json.load(file)
        ms = [row["ms"] for row in log if "ms" in row]
        return dict(ms=statistics.median(ms[len(ms) // 2:]), mib=metrics["arena_bytes"] / 2**20)
    except RuntimeError as error:
        return dict(note=str(error)[-100:], failed=True)


def compare_speed(args, folder, result):
    result["speed"] = []
    techniques = [] if args.pytorch else args.techniques or SPEED_TECHNIQUES
    modes = ["eager"] + ["compile"] * hasattr(torch, "compile") + ["graphs"] * (args.device == "cuda")
    modes = [mode for mode in modes if mode in args.modes]
    for case in args.speed or (["a32", "a128", "gpt2_16"] if args.device == "cuda" else ["tiny"]):
        m, rows = dict(CASES[case], dropout=args.dropout), []
        part = m.get("part")  # the trainer cannot time a part of a model
        kernels = args.sdpa if args.device == "cuda" and part != "generate" else args.sdpa[:1]
        prefix = None if args.pytorch or part else synthetic_data(args, folder, m)
        ids = open_tokens(prefix + ".train.tokens")[1] if prefix else phrases(args.seed, m["vocab"])(m["seq_len"] * m["batch"] + 1)
        feed = next(batches(ids, m, args.seed, args.device))
        for precision in args.pytorch or dict.fromkeys(map(precision_of, techniques)):
            how = precision + ", DDP" * (RANKS > 1) + ", ZeRO-1" * args.zero
            rows += [dict(program=f"PyTorch {how}, {MODES[mode]}" + f", {KERNELS[kernel]}" * (len(kernels) > 1),
                          **time_pytorch(args, m, feed, precision, mode, kernel))
                     for kernel in kernels for mode in (["eager"] if part == "attention" else modes)]
        best = min((row for row in rows if "ms" in row), key=lambda row: row["ms"], default={})
        rows += [dict(program=f"mtt {technique}", **time_mtt(args, m, folder, prefix, technique))
                 for technique in ([] if part else techniques)]
        tokens = RANKS * m["batch"] * (1 if part == "generate" else m["seq_len"])
        for row in rows:
            row.update(case=case, batch=m["batch"], seq_len=m["seq_len"])
        unit = "ms/token" if part == "generate" else "ms/step"
        table([f"{case}: B = {m['batch']}, T = {m['seq_len']}", unit, "tokens/s", "MiB", "speed", "memory"],
              [[r["program"], f"{r['ms']:.2f}", f"{1e3 * tokens / r['ms']:,.0f}",
                f"{r['mib']:,.0f}" if r["mib"] else "-", f"{best['ms'] / r['ms']:.2f}x" if best else "-",
                f"{100 * r['mib'] / best['mib']:.0f} %" if r["mib"] and best.get("mib") else "-"]
               if "ms" in r else [r["program"], r["note"].replace("|", "/"), "", "", "", ""] for r in rows])
        result["speed"] += rows
        write_json(args, result)  # for whoever is interrupted
    print("Speed and memory are relative to PyTorch's fastest. PyTorch counts no memory on a CPU.")
    return any("failed" in row for row in result["speed"])


def write_json(args, result):
    if args.json and int(os.environ.get("RANK", 0)) == 0:
        with open(args.json + ".tmp", "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
        os.replace(args.json + ".tmp", args.json)


def table(titles, rows):
    print("\n| " + " | ".join(titles) + " |\n|---|" + "---:|" * (len(titles) - 1))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def parse():
    p = argparse.ArgumentParser(description="Compares mtt with PyTorch: the same training's losses, a step's time and memory.")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    trainer = next((f for f in ("./train", "build/train") if os.path.exists(f)), "./train")
    p.add_argument("--train", default=trainer, help=f"the trainer ({trainer})")
    p.add_argument("--curves", action="store_true", help="only the losses (both parts if neither is named)")
    p.add_argument("--speed", nargs="*", choices=CASES, metavar="CASE", help="only time and memory: " + " ".join(CASES))
    p.add_argument("--techniques", nargs="+", metavar="NAME", help="of mtt, for both parts")
    p.add_argument("--pytorch", nargs="+", choices=[*ALLOWED, "fp8"], metavar="PRECISION",
                   help="speed: PyTorch alone, in " + ", ".join(ALLOWED) + ", or with torchao in fp8")
    p.add_argument("--dropout", type=float, default=0, help="speed: probability (0)")
    p.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="speed: how PyTorch runs (all of them)")
    p.add_argument("--json", metavar="FILE", help="the figures as JSON too")
    p.add_argument("--init", metavar="FOLDER", help="curves: from these weights, for example of build/convert")
    p.add_argument("--data", help="curves: text, or the prefix of prepared token files (phrases made up)")
    p.add_argument("--vocab-size", type=int, default=10000, help="curves: ids of the tokenizer made of a text (10000)")
    for name, value in dict(steps=100, layers=4, d_model=256, heads=8, d_ff=0, seq_len=256, batch_size=32).items():
        p.add_argument("--" + name.replace("_", "-"), type=int, default=value, help=f"curves ({value or '4 * d-model'})")
    p.add_argument("--positions", choices=["sinusoidal", "learned"], default="sinusoidal", help="curves")
    p.add_argument("--head", choices=["untied", "tied"], default="untied", help="curves")
    p.add_argument("--lr", type=float, default=3e-4, help="0.0003; at 0.001 and no warmup the loss leaps, and rounding with it")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--speed-steps", type=int, default=40, help="speed: steps of a run, of which the first half warms up (40)")
    p.add_argument("--sdpa", nargs="+", choices=KERNELS, default=["flash"], help="speed: PyTorch's attention, a row each (flash)")
    p.add_argument("--zero", action="store_true", help="speed, under torchrun: ranks divide the optimizer's state")
    p.add_argument("--limit", type=int, default=90, help="speed: most seconds for a row of PyTorch, compiling included (90)")
    args = p.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("PyTorch sees no CUDA device: install its CUDA build, or take --device cpu")
    if min(args.steps, args.speed_steps // 2) < 1:
        p.error("--steps must be 1 or more, --speed-steps 2 or more")
    if args.init and not args.data:
        p.error("--init needs --data: a text")
    if args.pytorch and args.speed is None:
        args.speed = []
    if RANKS > 1 and not args.pytorch:
        p.error("torchrun starts PyTorch's ranks alone: name a precision, as in --pytorch bf16")
    if args.zero and RANKS == 1:
        p.error("--zero divides between ranks: start them, as in torchrun --nproc-per-node 2 tools/compare_pytorch.py ...")
    return args


def join_ranks(args):
    """Makes this process one of torchrun's ranks. Rank 0 alone prints."""
    rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
    if torch.distributed.get_rank():
        sys.stdout = open(os.devnull, "w")


def main():
    args = parse()
    if RANKS > 1:
        join_ranks(args)
    both = not args.curves and args.speed is None
    signal.signal(signal.SIGALRM, on_alarm)
    device = torch.cuda.get_device_name(0) if args.device == "cuda" else f"CPU, {platform.machine()}"
    result = dict(device=device, pytorch=torch.__version__, cuda=torch.version.cuda)
    print(f"{device}, PyTorch {torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="mtt_compare_") as folder:
        try:
            if args.curves or both:
                failed |= compare_curves(args, folder, result)
            if args.speed is not None or both:
                failed |= compare_speed(args, folder, result)
        except RuntimeError as error:
            print(f"compare: {error}", file=sys.stderr)
            return 2
        finally:
            write_json(args, result)
    if RANKS > 1:
        torch.distributed.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
