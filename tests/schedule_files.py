"""Checks files that build/schedule writes.

usage: schedule_files.py dump A [B]       tensors of a step; B: of the same step with another technique
       schedule_files.py weights A B      a dump of a step with the weights of checkpoint B
       schedule_files.py step A B         the weights after a step, of the same micro-batches planned otherwise
       schedule_files.py viz FILE JSON    a plan as a memory snapshot of PyTorch, and the plan's JSON
"""

import json, math, pickle, struct, sys


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
    for name in [name for name in tensors if name.startswith("after.") and name.endswith(".weight")]:
        assert tensors[name][2] != tensors[name[6:]][2], f"{name} is as before"
    if other:
        theirs = read(other)[1]
        same = [name for name in tensors if name in theirs and "@" not in name
                and not (name.startswith("d_") and name.endswith("qkv"))]  # of which the first writes a part
        assert len(same) > 50
        for name in same:
            assert tensors[name][2] == theirs[name][2], f"{name} differs"
    print(f"{len(tensors)} tensors, {again} made again")


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
