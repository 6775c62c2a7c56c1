#!/usr/bin/env python3
"""Compares the tokenizer with tiktoken and Hugging Face's tokenizers, by hand: pip install tiktoken tokenizers regex.

usage: oracle_tokenizer.py PATH_TO_test_tokenizer [DATA_FOLDER]      default ../shared/data

1. GPT-2's ids of 100,000 random strings: ours, tiktoken's and an encoder in a few lines on Python's `regex`.
2. A tokenizer.json that we trained and one of GPT-2, read by Hugging Face: the ids of 1 MB of English and of Polish.
tiktoken and Hugging Face may know an older Unicode, so code points that their classes put elsewhere are told and left out.
"""
import base64
import random
import subprocess
import sys
import tempfile

import regex
import tiktoken
import tokenizers

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
HARD = (list(" \n\r\t'\"aeszLRTMDVE019.,!?_-<>|{}\0\x1c\x7f\x85\u00a0\u1680\u180e\u200b\u2003\u2028\u3000\ufeff\u0301½Ⅻ²٣éżółćęśąźń"
             "жшقאहிไทย日本語カ한국🤗👩\u200d🔬\U0010ffff\U00020000") + ["  ", "   ", "\r\n", "'s", "'re", "'LL", " the", "Zażółć", "2024"])


def gpt2(data):
    ranks = {}
    with open(f"{data}/gpt2.tiktoken", "rb") as file:
        for line in file:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    return ranks


def ours(binary, tokenizer, texts):
    lines = "".join(t.encode().hex() + "\n" for t in texts)
    out = subprocess.run([binary, "encode", tokenizer, "hex"], input=lines, capture_output=True, text=True, check=True).stdout
    return [[int(n) for n in line.split()] for line in out.split("\n")[:-1]]


def by_regex(ranks, text):
    ids = []
    for word in regex.findall(PATTERN, text):
        parts = [bytes([b]) for b in word.encode()]
        while len(parts) > 1:
            rank, i = min((ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))
            if rank == 1 << 30:
                break
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[p] for p in parts]
    return ids


def random_texts(count):
    rng = random.Random(7)
    known = [chr(c) for c in range(0x110000) if not 0xd800 <= c < 0xe000]
    pick = lambda: rng.choice(HARD) if rng.random() < 0.9 else rng.choice(known)
    return ["".join(pick() for _ in range(rng.randrange(1, 24))) for _ in range(count)]


def report(name, texts, got, want):
    bad = [i for i, (a, b) in enumerate(zip(got, want)) if a != b]
    print(f"{name}: {len(texts) - len(bad)} of {len(texts)} texts have the same ids")
    for i in bad[:5]:
        print("  ", ascii(texts[i])[:200], got[i][:20], want[i][:20])
    return bad


def main():
    binary, data = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "../shared/data"
    bpe, ranks, bad = f"{data}/vocab.bpe", gpt2(data), 0
    texts = random_texts(100_000)
    got = ours(binary, bpe, texts)
    wrong = report("regex", texts, got, [by_regex(ranks, t) for t in texts])
    reference = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    theirs = [reference.encode_ordinary(t) for t in texts]
    # After a letter or number 's stands alone; after a symbol of class other it does not.
    probes = [f"{chr(c)}'s" for c in range(0x110000) if not 0xd800 <= c < 0xe000]
    other = {p[0] for p, i in zip(probes, ours(binary, bpe, probes)) if i != reference.encode_ordinary(p)}
    print(f"tiktoken: {len(other)} code points differ", *(f"U+{ord(c):04X}" for c in sorted(other)[:8]))
    kept = [i for i, t in enumerate(texts) if not other & set(t)]
    wrong += report("tiktoken", [texts[i] for i in kept], [got[i] for i in kept], [theirs[i] for i in kept])

    samples = []
    for name in ("english_novels.txt", "polish_novels.txt"):
        with open(f"{data}/{name}", encoding="utf-8", newline="") as file:
            samples.append(file.read(1_000_000))
    with tempfile.TemporaryDirectory() as folder:
        for i, sample in enumerate(samples):
            path = f"{folder}/{i}"
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(sample)
            subprocess.run([binary, "train", path, f"{path}.json"], check=True)
            hf = tokenizers.Tokenizer.from_file(f"{path}.json")
            again = f"{path}.again.json"
            hf.save(again)  # Hugging Face's own layout, merges in pairs
            for tokenizer in (f"{path}.json", again):
                wrong += report(f"Hugging Face, trained {i}", samples, ours(binary, tokenizer, samples), [hf.encode(s).ids for s in samples])
            kept = [t for t in texts if not other & set(t)][:20_000]
            wrong += report(f"Hugging Face, trained {i}, random", kept, ours(binary, f"{path}.json", kept), [hf.encode(t).ids for t in kept])
    return bool(wrong)


sys.exit(main())
