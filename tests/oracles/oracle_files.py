"""Compares test_files with Python's json and the packages safetensors and numpy.

usage: python3 tests/oracles/oracle_files.py PATH/TO/test_files [FILES]      FILES is how many random files to try

Our files must open in safetensors.numpy with equal values. Both must read random files alike, and accept or refuse the
same damaged ones. JSONL documents must come out as json.loads gives them.
"""

import json, os, random, subprocess, sys, tempfile, zlib
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

program, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2000
rng = random.Random(1)
folder = tempfile.mkdtemp()
path = os.path.join(folder, "file.safetensors")
NAME = {
    np.dtype("float32"): "F32",
    np.dtype("float16"): "F16",
    np.dtype("int32"): "I32",
    np.dtype("uint8"): "U8",
}


def run(*arguments):
    done = subprocess.run([program, *arguments], capture_output=True)
    assert done.returncode in (0, 1), done
    return done.returncode, done.stdout.decode("utf-8", "surrogateescape")


def ours(name):
    assert subprocess.run([program, "write", name]).returncode == 0
    pattern = lambda tensor, size: bytes((i * 7 + tensor * 31 + 1) % 256 for i in range(size))
    with safe_open(name, "np") as f:
        notes = f.metadata()
    assert notes["format"] == "pt" and notes["step"] == "120" and notes["te\nxt"] == 'a "b" \u00f3', notes
    os.system(f"cp {name} {name}.bf16")
    raw = bytearray(open(name, "rb").read())
    raw = raw.replace(b'"dtype":"BF16"', b'"dtype":"F16" ')  # numpy has no bfloat16
    open(name, "wb").write(raw)
    got = load_file(name)
    want = {
        'we"ight\u017c': (0, np.float32, (3, 4)),
        "scalar": (1, np.float32, ()),
        "nothing": (2, np.int32, (2, 0, 4)),
        "half": (3, np.float16, (2, 3)),
        "bytes": (4, np.uint8, (5,)),
    }
    assert set(got) == set(want), got.keys()
    for key, (tensor, dtype, shape) in want.items():
        value = np.frombuffer(pattern(tensor, got[key].nbytes), dtype).reshape(shape)
        assert (
            got[key].dtype == dtype and got[key].shape == shape and got[key].tobytes() == value.tobytes()
        ), key
        assert notes["crc32." + key] == "%08x" % zlib.crc32(got[key].tobytes()), key
    print("a file of ours opens in Python with equal values and zlib's checksums")


def random_file():
    tensors = {}
    for _ in range(
        rng.randrange(1, 8)
    ):  # without tensors but with metadata Python writes a file it cannot read
        name = "".join(rng.choice('abc.0_"\\/\n\u017c\u20ac\U0001f600') for _ in range(rng.randrange(1, 12)))
        shape = [rng.randrange(8) for _ in range(rng.randrange(8))]
        while np.prod(shape, dtype=np.int64) > 20000:
            shape.pop()
        dtype = rng.choice(list(NAME))
        tensors[name] = np.frombuffer(
            rng.randbytes(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize), dtype
        ).reshape(shape)
    save_file(tensors, path, rng.choice([None, {}, {"format": "np"}, {'a"\n': "\u017c", "b": ""}]))
    return tensors


def theirs():
    for _ in range(count):
        tensors = random_file()
        want = sorted(
            "%s %s [%s] %08x"
            % (k.encode().hex(), NAME[v.dtype], ",".join(map(str, v.shape)), zlib.crc32(v.tobytes()))
            for k, v in tensors.items()
        )
        code, text = run("dump", path)
        assert code == 0 and sorted(text.splitlines()) == want, (text, want)
    print(count, "random files of Python are read alike")


def damaged():
    judged = [0, 0]
    different = {}
    for _ in range(count):
        random_file()
        raw = bytearray(open(path, "rb").read())
        size = int.from_bytes(raw[:8], "little") + 8
        raw[rng.randrange(size)] = (
            rng.choice(b'{}[]":,0123456789eE.-+ \\u\xff\x00aF') if rng.random() < 0.7 else rng.randrange(256)
        )
        open(path, "wb").write(raw)
        try:
            with safe_open(path, "np") as f:
                names = list(f.keys())
            theirs_accept = True
        except (SafetensorError, Exception) as error:
            theirs_accept, why = False, str(error)
        code, text = run("dump", path)
        judged[theirs_accept] += 1
        if theirs_accept != (code == 0):
            key = text.split(": ", 2)[-1][:60] if code else "we accept: " + why[:60]
            different[key] = different.get(key, 0) + 1
    print(
        count,
        "damaged files: Python accepts",
        judged[1],
        "and refuses",
        judged[0],
        "- judged differently:",
        different or "none",
    )


def documents():
    letters = [
        "a",
        " ",
        "\n",
        "\t",
        '"',
        "\\",
        "/",
        "\u0000",
        "\u001f",
        "\u007f",
        "\u017c",
        "\u20ac",
        "\U0001f600",
        "\u2028",
        "\ud800",
        "\udc00",
        "\ud83d",
    ]
    name, want = os.path.join(folder, "corpus.jsonl"), []
    text = lambda: "".join(rng.choice(letters) for _ in range(rng.randrange(40)))
    with open(name, "wb") as f:
        for _ in range(10000):
            value = text() if rng.random() < 0.7 else [text() for _ in range(rng.randrange(4))]
            record = rng.choice(
                [
                    {"text": value, "meta": {"n": [1, None, {"x": -2.5e3}]}},
                    {"id": "text", "text": value},
                    value,
                ]
            )
            line = json.dumps(record, ensure_ascii=True, separators=rng.choice([(",", ":"), (" , ", " : ")]))
            line = line.replace("/", "\\/") if rng.random() < 0.5 else line
            if rng.random() < 0.5 and not any(c in line for c in ("\\ud8", "\\udc", "\\u00")):
                line = json.dumps(json.loads(line), ensure_ascii=False)
            f.write(line.encode() + rng.choice([b"\n", b"\r\n", b"\n\n", b"\n  \r\n"]))
            value = json.loads(line)
            value = value["text"] if isinstance(value, dict) else value
            value = value if isinstance(value, str) else None if value is None else value
            whole = value if isinstance(value, str) else "\n\n".join(value)
            parts = [whole] if isinstance(value, str) else value
            joined = b"\n\n".join(
                "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in part).encode() for part in parts
            )
            want.append("%d %08x" % (len(joined), zlib.crc32(joined)))
    code, out = run("corpus", name, "text")
    got = out.splitlines()
    assert code == 0 and got == want, [(a, b) for a, b in zip(got, want) if a != b][:3]
    print(len(want), "documents of JSONL are equal to json.loads")


ours(path)
theirs()
damaged()
documents()
