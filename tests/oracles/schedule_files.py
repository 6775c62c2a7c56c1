"""Checks files that build/schedule writes.

usage: schedule_files.py dump A [B]       tensors of a step; B: of the same step with another technique
       schedule_files.py weights A B      a dump of a step with the weights of checkpoint B
       schedule_files.py step A B         the weights after a step, of the same micro-batches planned otherwise
       schedule_files.py viz FILE JSON    a plan as a memory snapshot of PyTorch, and the plan's JSON
"""

import json, math, pickle, re, struct, sys


def read(path):
    """name -> (type, shape, bytes), in the order of the file."""
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size], object_pairs_hook=lambda pairs: unique(pairs))
    meta = header.pop("__metadata__")
    at, out = 0, {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        width = {"F64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}.get(entry["dtype"], 1)
        assert begin == at and end - begin == width * math.prod(entry["shape"]), name
        out[name], at = (entry["dtype"], entry["shape"], data[8 + size + begin:8 + size + end]), end
    assert 8 + size + at == len(data) and size % 8 == 0
    return meta, out


def unique(pairs):
    assert len({key for key, _ in pairs}) == len(pairs)
    return dict(pairs)


def numbers(entry):
    dtype, _, data = entry
    if dtype == "BF16":
        return [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(0, len(data), 2)]
    form = {"F64": "d", "F32": "f", "I32": "i", "F16": "e"}[dtype]
    return struct.unpack(f"<{len(data) // struct.calcsize(form)}{form}", data)


def columns(entry):
    """The sums of a matrix's columns."""
    width, values = entry[1][-1], numbers(entry)
    return [sum(values[i::width]) for i in range(width)]


def slope(x):
    """Of GELU."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)
    return 0.5 * (1 + math.tanh(inner)) + 0.5 * x * (1 - math.tanh(inner) ** 2) * math.sqrt(2 / math.pi) * (
        1 + 3 * 0.044715 * x ** 2)


def gradients(meta, tensors):
    """d_NAME is the whole gradient of NAME. Returns how many were checked."""
    operations = [meta[f"operation {i}"] for i in range(len(meta) - 2)]
    decay, rate = (float(re.search(word + r" ([0-9.e-]+)", meta["optimizer"])[1]) for word in ("decay", "lr"))
    checked = 0
    def close(name, ours, theirs, least=2e-4):
        nonlocal checked
        checked += 1
        assert len(ours) == len(theirs), name
        most, exact = max(map(abs, theirs)), tensors[name][0] in ("F32", "F64")
        worst = max(abs(a - b) for a, b in zip(ours, theirs))
        assert worst <= (least if exact else 4e-2) * most, f"{name} is off by {worst / most}"
    # that of a bias is the sum over all rows; of a norm's, too
    of_bias = {"attn.c_attn": "attn.qkv", "mlp.c_fc": None, "ln_1": "ln_1", "ln_2": "ln_2"}
    for name in [name for name in tensors if name.startswith("d_h.") and name.endswith(".bias")]:
        layer, module = re.fullmatch(r"d_(h\.\d+\.)(.*)\.bias", name).groups()
        subject = of_bias.get(module)
        if module == "ln_1" and f"d_{layer}ln_1" not in tensors:
            subject = "x_mid"  # norms after the sums
        if subject and f"d_{layer}{subject}" in tensors:
            close(name, columns(tensors[f"d_{layer}{subject}"]), numbers(tensors[name]))
    # GELU multiplies it by its slope
    for i, line in enumerate(operations):
        made = re.search(r" gelu_backward +d_(\S+) (\S+) .*-> (d_\S+\.gelu)", line)
        if made and made[2] in tensors:
            before = numbers(tensors["d_" + made[1]])
            close(f"{made[3]}@{i}", [d * slope(x) for d, x in zip(before, numbers(tensors[made[2]]))],
                  numbers(tensors[f"{made[3]}@{i}"]), 3e-3)
    # of a sum of parts, the last is whole
    sums = {line.split(" add ")[1].split()[1]: i for i, line in enumerate(operations) if " add " in line}
    for name in [name for name in sums if name != "d_x"]:
        assert name in tensors and f"{name}@{sums[name]}" not in tensors, f"{name} is a part"
    # what fuses both leaves no gradient of its output
    assert not any(re.search(r" linear_backward_gelu .*-> " + name + " ", line) for line in operations
                   for name in tensors if name.endswith(".gelu")), "the gradient of another tensor"
    # AdamW's first step goes against it
    for name in [name[6:] for name in tensors if name.startswith("after.") and "d_" + name[6:] in tensors]:
        down = numbers(tensors["d_" + name])
        old, new = numbers(tensors[name]), numbers(tensors["after." + name])
        matrix = decay if len(tensors[name][1]) > 1 else 0
        checked += 1
        for a, b, d in zip(old, new, down):
            if abs(d) > 0.05 * max(map(abs, down[:len(old)])):
                assert (b - a + rate * matrix * a) * d < 0, f"{name} does not go against d_{name}"
    return checked


def dump(path, other):
    meta, tensors = read(path)
    vocab = tensors["lm_head.bias"][1][0]
    targets, loss = numbers(tensors["targets"]), numbers(tensors["loss"])[0]
    assert all(f"operation {i}" in meta for i in range(len(meta) - 2)) and "AdamW" in meta["optimizer"]
    assert numbers(tensors["tokens"])[1:] == targets[:-1], "a target is the next token"
    if "logits" in tensors:
        logits, columns, total = numbers(tensors["logits"]), tensors["logits"][1][-1], 0
        for row, target in enumerate(targets):
            row = logits[row * columns:row * columns + vocab]
            total += math.log(sum(math.exp(x - max(row)) for x in row)) + max(row) - row[target]
        assert abs(total / len(targets) / loss - 1) < (1e-5 if tensors["logits"][0] == "F32" else 1e-2), total
    again = 0
    for key, line in meta.items():  # what is recomputed has the bits that it had
        if " again " in line:
            number = key.split()[1]
            for name in [name for name in tensors if name.endswith("@" + number)]:
                again += 1
                assert tensors[name][2] == tensors[name.split("@")[0]][2], name
    for name in [name for name in tensors if name.startswith("after.") and name.endswith(".weight")
                 and ("d_" + name[6:] in tensors or "lora" not in " ".join(tensors))]:
        assert tensors[name][2] != tensors[name[6:]][2], f"{name} is as before"
    checked = gradients(meta, tensors)
    assert checked > 5
    if other:
        theirs = read(other)[1]
        same = [name for name in tensors if name in theirs and "@" not in name]
        assert len(same) > 50
        for name in same:
            assert tensors[name][2] == theirs[name][2], f"{name} differs"
    print(f"{len(tensors)} tensors, {again} made again, {checked} gradients")


def weights(path, checkpoint):
    ours, theirs = read(path)[1], read(checkpoint)[1]
    names = [name[6:] for name in ours if name.startswith("after.")]
    assert len(names) > 20
    for name in names:
        assert ours[name][2] == theirs[name][2], name


def step(path, other):
    ours, theirs = read(path)[1], read(other)[1]
    names = ["loss"] + [name for name in ours if name.startswith("after.")]
    assert len(names) > 20
    for name in names:
        assert ours[name][2] == theirs[name][2], f"{name} differs"


def viz(path, plan):
    plan = json.load(open(plan, encoding="utf-8"))
    snapshot = pickle.load(open(path, "rb"))
    segment, = snapshot["segments"]
    base, size = segment["address"], segment["total_size"]
    assert size == plan["plan"]["arena_bytes"]
    live, time = {}, 0
    for event in snapshot["device_traces"][0][1:]:
        begin, end, frame = event["addr"], event["addr"] + event["size"], event["frames"][0]
        assert event["time_us"] >= time and base <= begin < end <= base + size
        time = event["time_us"]
        if event["action"] == "alloc":
            for other, (their_end, name) in live.items():
                assert end <= other or their_end <= begin, (frame["name"], name)
            live[begin] = (end, frame["name"])
        elif event["action"] == "free_completed":
            assert live.pop(begin) == (end, frame["name"])
            if frame["line"]:
                live_bytes = sum(end - begin for begin, (end, _) in live.items())
                assert live_bytes <= plan["timeline"][time - 1]["live_bytes"]
    assert time <= len(plan["timeline"]) and sum(block["size"] for block in segment["blocks"]) == size
    state = {block["address"]: (block["address"] + block["size"], block["frames"][0]["name"])
             for block in segment["blocks"] if block["state"] == "active_allocated"}
    assert state == live, "the state is left"


if __name__ == "__main__":
    if sys.argv[1] == "dump":
        dump(sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
    else:
        {"weights": weights, "step": step, "viz": viz}[sys.argv[1]](*sys.argv[2:])
