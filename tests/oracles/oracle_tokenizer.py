#!/usr/bin/env python3
"""Compares the tokenizers with tiktoken and Hugging Face's tokenizers. Run it by hand.

usage: oracle_tokenizer.py PATH/TO/test_tokenizer [DATA [families]]     DATA is a folder, default ../shared/data
       pip install tiktoken tokenizers transformers regex

1. GPT-2's ids of 100,000 random strings: ours, tiktoken's, and those of a few lines of Python with `regex`.
2. Hugging Face reads a tokenizer.json that we trained, and GPT-2's: the ids of 1 MB of English and of Polish.
3. WordPiece with all options: 20,000 random strings and WikiText-2 with BERT's vocab.txt, and every code point with a
   vocabulary that has all of them, so that no difference hides in [UNK].
4. WordPiece trained by both, compared piece by piece. Hugging Face numbers the ##characters in the order of a hash
   table and breaks ties by these numbers. So it gets our alphabet, in our order, as special tokens. It also reads what
   we save.
5. The families: tokenizer.json in the forms of GPT-2 (two), SmolLM, Llama 3, Qwen and cl100k_base, trained for the
   test. 30,000 random strings and 3 MB of each of three texts, with and without special tokens: ours, transformers' and
   tokenizers', which also reads what we save. Qwen's normalizer NFC gets 10,000 more random strings, of what it changes.
6. The same texts by .tiktoken files with three patterns: GPT-2's, and one whose tokens come before their parts.
With the word families it does 5 and 6 alone.
tiktoken and Hugging Face may know an older Unicode: code points of which they have another class are listed and left
out.
"""

import base64
import json
import random
import subprocess
import sys
import tempfile
import unicodedata

import regex
import tiktoken
import tokenizers
import transformers

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
HARD = list(
    " \n\r\t'\"aeszLRTMDVE019.,!?_-<>|{}\0\x1c\x7f\x85\u00a0\u1680\u180e\u200b\u2003\u2028\u3000\ufeff\u0301½Ⅻ²٣éżółćęśąźń"
    "жшقאहிไทย日本語カ한국🤗👩\u200d🔬\U0010ffff\U00020000"
) + ["  ", "   ", "\r\n", "'s", "'re", "'LL", " the", "Zażółć", "2024"]


def gpt2(data):
    ranks = {}
    with open(f"{data}/gpt2.tiktoken", "rb") as file:
        for line in file:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    return ranks


def ours(binary, tokenizer, texts, options=""):
    lines = "".join(t.encode().hex() + "\n" for t in texts)
    out = subprocess.run(
        [binary, "encode", tokenizer, "hex", options], input=lines, capture_output=True, encoding="utf-8", check=True
    ).stdout
    return [[int(n) for n in line.split()] for line in out.split("\n")[:-1]]


def by_regex(ranks, text):
    ids = []
    for word in regex.findall(PATTERN, text):
        parts = [bytes([b]) for b in word.encode()]
        while len(parts) > 1:
            rank, i = min((ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))
            if rank == 1 << 30:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[p] for p in parts]
    return ids


def random_texts(count):
    rng = random.Random(7)
    known = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    pick = lambda: rng.choice(HARD) if rng.random() < 0.9 else rng.choice(known)
    return ["".join(pick() for _ in range(rng.randrange(1, 24))) for _ in range(count)]


def report(name, texts, got, want):
    bad = [i for i, (a, b) in enumerate(zip(got, want)) if a != b]
    print(f"{name}: {len(texts) - len(bad)} of {len(texts)} texts have the same ids")
    for i in bad[:5]:
        print("  ", ascii(texts[i])[:200], got[i][:20], want[i][:20])
    return bad


def bert(vocab, options):
    model = tokenizers.models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100)
    hf = tokenizers.Tokenizer(model)
    hf.normalizer = tokenizers.normalizers.BertNormalizer(
        clean_text="c" not in options,
        handle_chinese_chars="j" not in options,
        strip_accents="a" in options,
        lowercase="l" in options,
    )
    hf.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return hf


def wordpiece(binary, data, texts, folder):
    path, wrong = f"{data}/bert-base-uncased-vocab.txt", []
    vocab = {line.rstrip(): i for i, line in enumerate(open(path, encoding="utf-8"))}
    known = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    points = [f"x{c}y {c}" for c in known]
    every = ["[UNK]", "[SEP]"] + [mark + c for mark in ("", "##") for c in known if c not in " \t\r\n"]
    with open(f"{folder}/every.txt", "w", encoding="utf-8", newline="") as file:
        file.write("\n".join(every))
    every = {piece: i for i, piece in enumerate(every)}
    with open(f"{data}/wt2_valid.txt", encoding="utf-8", newline="") as file:
        whole = [file.read()]
    for options in ("", "l", "a", "la", "c", "j", "lacj"):
        for name, many, pieces, file in (
            ("code points", points, every, f"{folder}/every.txt"),
            ("random characters", texts, every, f"{folder}/every.txt"),
            ("random", texts, vocab, path),
            ("wt2_valid", whole, vocab, path),
        ):
            theirs = bert(pieces, options).encode_batch(many)
            wrong += report(f"BERT {options} {name}", many, ours(binary, file, many, options), [e.ids for e in theirs])
    return wrong


def trained(binary, data, folder):
    wrong, special = [], ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    for name, size, vocab, options in (
        ("tinyshakespeare", -1, 2000, "w"),
        ("tinyshakespeare", -1, 8000, "la"),
        ("polish_novels", 5_000_000, 30_000, "w"),
        ("english_novels", 5_000_000, 10_000, "l"),
    ):
        path, out = f"{folder}/{name}", f"{folder}/{name}.json"
        with open(f"{data}/{name}.txt", encoding="utf-8", newline="") as file:
            text = file.read(size)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        subprocess.run([binary, "train", path, out, str(vocab), options], check=True)
        hf = tokenizers.Tokenizer.from_file(out)
        mine = sorted(hf.get_vocab(), key=hf.get_vocab().get)
        alphabet = [p for i, p in enumerate(mine) if i < 5 or len(p) == 1 or (len(p) == 3 and p.startswith("##"))]
        theirs = bert({}, options)
        trainer = tokenizers.trainers.WordPieceTrainer(
            vocab_size=vocab, min_frequency=2, special_tokens=alphabet, show_progress=False
        )
        theirs.train_from_iterator([text], trainer)
        theirs = sorted(theirs.get_vocab(), key=theirs.get_vocab().get)
        print(
            f"WordPiece trained on {name}: {sum(a == b for a, b in zip(mine, theirs))} of {len(mine)} and {len(theirs)} pieces are the "
            f"same in order, {len(set(mine) & set(theirs))} in any"
        )
        wrong += [name] * (mine != theirs)
        free = bert({}, options)
        free.train_from_iterator(
            [text],
            tokenizers.trainers.WordPieceTrainer(
                vocab_size=vocab, min_frequency=2, special_tokens=special, show_progress=False
            ),
        )
        print(f"  without its alphabet given: {len(set(mine) & set(free.get_vocab()))} in any")
        sample = text[:1_000_000]
        wrong += report(f"Hugging Face reads {name}", [sample], ours(binary, out, [sample]), [hf.encode(sample).ids])
        again = f"{folder}/{name}.again.json"
        hf.save(again)
        wrong += report(f"read again {name}", [sample], ours(binary, again, [sample]), [hf.encode(sample).ids])
    return wrong


MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LATER = (  # cl100k_base today; tokenizers read {1,3}+ as any number of digits
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
LLAMA3, QWEN = MODERN.replace("DIGITS", r"\p{N}{1,3}"), MODERN.replace("DIGITS", r"\p{N}")
HARDER = HARD + [
    "\r", "\n\n", " \n ", "\t\n", "'Ll", "'VE", "'RE", "'ſ", "'ſa", "'sS", "''s", "12345", " 7", "½½½½", "!\n\n", " ?\r\n", "\t!", "_a",
    "e\u0301\u0323", "o\u0323\u0302", "\u0301\u0323", "한", "\u1112\u1161\u11ab", "\u0958", "Å", ">\u0338", "\U0001d15e", "か\u3099", "שׁ",
    "\u0344", "Ω", "ﬁ", "豈", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|begin_of_text|>", "<|end", "<thi",
    "<think", "<|im_start|", "é<think>", " </s>", "\U0001f600\ufe0f", "मे\u093cनू", "ق\u064e\u0651", "Việt", "Vie\u0323\u0302t",
]  # fmt: skip


def mixed_texts(count):
    rng = random.Random(11)
    known = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    pick = lambda: rng.choice(HARDER) if rng.random() < 0.93 else rng.choice(known)
    return ["".join(pick() for _ in range(rng.randrange(1, 24))) for _ in range(count)]


def loose_texts(count):
    """Texts that NFC changes: marks in any order, Hangul's parts, singletons, excluded compositions, long runs."""
    rng = random.Random(13)
    known = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    marks = [c for c in known if unicodedata.combining(c)]
    parts = [c for c in known if unicodedata.decomposition(c) and "<" not in unicodedata.decomposition(c)]
    second = sorted({chr(int(unicodedata.decomposition(c).split()[-1], 16)) for c in parts})
    bases = sorted({unicodedata.normalize("NFD", c)[0] for c in parts if ord(c) < 0xF900})
    jamo = [chr(c) for c in range(0x1100, 0x1200)] + ["\uac00", "\uac01", "\ud7a3", "\u1161", "\u11a7", "\u11a8", "\u11c2"]
    kinds = (marks, marks, second, second, bases, bases, parts, jamo, list(" \nae1<=>"), ["<think>", "</think>"])
    pick = lambda: rng.choice(rng.choice(kinds))
    texts = ["".join(pick() for _ in range(rng.randrange(1, 24))) for _ in range(count - 20)]
    return texts + ["".join(rng.choices(marks + ["e"], k=5000)) for _ in range(20)]


def unlike(classes=(r"\p{L}", r"\p{N}", r"\s")):
    """The code points of which tokenizers have another class than Python's regex, from which our table is made."""
    found = set()
    for pattern in classes:
        cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "removed")
        for c in range(0x110000):
            if not 0xD800 <= c < 0xE000 and bool(cut.pre_tokenize_str(chr(c))) == bool(regex.match(pattern, chr(c))):
                found.add(chr(c))
    return found


def form(name, samples):
    """A tokenizer in the form of a family, trained on samples."""
    from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers as pre, processors, trainers

    byte_level = lambda regex: pre.ByteLevel(add_prefix_space=False, use_regex=regex)
    split = lambda pattern: pre.Sequence([pre.Split(Regex(pattern), "isolated"), byte_level(False)])
    hf = tokenizers.Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    hf.pre_tokenizer = {
        "gpt2": byte_level(True),
        "gpt2 split": split(PATTERN),
        "smollm": pre.Sequence([pre.Digits(individual_digits=True), byte_level(True)]),
        "llama3": split(LLAMA3),
        "qwen": split(QWEN),
        "later": split(LATER),
    }[name]
    hf.decoder = tokenizers.decoders.ByteLevel()
    hf.post_processor = processors.ByteLevel(trim_offsets=False)
    if name == "qwen":
        hf.normalizer = normalizers.NFC()
    special = ["<|endoftext|>"] if name in ("gpt2", "gpt2 split", "smollm", "later") else []  # in the vocabulary
    hf.train_from_iterator(
        samples,
        trainers.BpeTrainer(
            vocab_size=6000,
            special_tokens=special,
            initial_alphabet=pre.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if name == "gpt2 split":
        hf.add_tokens([AddedToken("é<think>", normalized=True), AddedToken("<think>", normalized=False)])
    if name == "llama3":
        hf.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|endoftext|>", "<|im_start|>"])
        bos, eos = hf.token_to_id("<|begin_of_text|>"), hf.token_to_id("<|end_of_text|>")
        template = processors.TemplateProcessing(
            single="<|begin_of_text|> $A",
            pair="<|begin_of_text|> $A <|begin_of_text|> $B:1",
            special_tokens=[("<|begin_of_text|>", bos)],
        )
        hf.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    if name == "qwen":
        hf.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        hf.add_tokens(
            [
                AddedToken("<think>", normalized=False),
                AddedToken("</think>", normalized=True),
                AddedToken("im_start|><thi"),
            ]
        )
    return hf


def families(binary, data, folder):
    wrong, samples = [], []
    other = unlike()
    print(f"tokenizers: {len(other)} code points differ", *(f"U+{ord(c):04X}" for c in sorted(other)[:8]))
    every = [t for t in mixed_texts(31_000) if not other & set(t)][:30_000]
    loose = [t for t in loose_texts(10_500) if not other & set(t)][:10_000]
    for name in ("tinyshakespeare.txt", "english_novels.txt", "polish_novels.txt"):
        with open(f"{data}/{name}", encoding="utf-8", newline="") as file:
            samples.append(file.read(3_000_000))
    learned = [s[:1_000_000] for s in samples] + every[:2000]
    for name in ("later", "qwen", "gpt2", "gpt2 split", "smollm", "llama3"):
        texts = every + loose if name == "qwen" else every
        path, old = f"{folder}/{name}.json", f"{folder}/{name}.old.json"
        hf = form(name, learned)
        hf.save(path)
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        merges = config["model"]["merges"]
        if name == "llama3":  # words that only the vocabulary can make
            config["model"]["merges"] = merges = [m for i, m in enumerate(merges) if i % 7]
        config["model"]["merges"] = [" ".join(m) for m in merges]  # as older versions write it
        with open(old, "w", encoding="utf-8") as file:
            json.dump(config, file, ensure_ascii=name != "gpt2")
        hf = tokenizers.Tokenizer.from_file(old)
        if name != "llama3":
            wrong += report(
                f"{name}, merges in pairs",
                texts,
                ours(binary, path, texts, "p"),
                [e.ids for e in hf.encode_batch(texts)],
            )
        again = f"{folder}/{name}.again.json"
        with open(again, "w", encoding="utf-8") as file:
            file.write(
                subprocess.run([binary, "encode", old, "hex", "S"], capture_output=True, check=True, encoding="utf-8").stdout
            )
        back = tokenizers.Tokenizer.from_file(again)
        fast = transformers.PreTrainedTokenizerFast(tokenizer_file=old)
        for many, kind in ((texts, "random"), (samples, "the three texts")):
            plain, prompt = ours(binary, old, many), ours(binary, old, many, "p")
            wrong += report(f"{name}, {kind}, transformers", many, prompt, fast(many)["input_ids"])
            wrong += report(
                f"{name}, {kind}, our file in tokenizers", many, prompt, [e.ids for e in back.encode_batch(many)]
            )
            wrong += report(f"{name}, {kind}, our file read again", many, ours(binary, again, many, "p"), prompt)
            hf.encode_special_tokens = True
            want = [e.ids for e in hf.encode_batch(many, add_special_tokens=False)]
            hf.encode_special_tokens = False
            wrong += report(f"{name}, {kind}, special tokens as text", many, plain, want)
    wrong += tiktokens(binary, data, folder, every, samples)
    return wrong


def tiktokens(binary, data, folder, texts, samples):
    wrong, ranks = [], gpt2(data)
    rng = random.Random(5)
    few = [t for t in ranks if len(t) == 1]
    more = [t for t in ranks if 1 < len(t) < 9][:3000]
    rng.shuffle(more)  # tokens before their parts
    shuffled = {t: i for i, t in enumerate(few + more)}
    with open(f"{folder}/shuffled.tiktoken", "wb") as file:
        file.writelines(base64.b64encode(t) + b" %d\n" % i for t, i in shuffled.items())
    for path, known in ((f"{data}/gpt2.tiktoken", ranks), (f"{folder}/shuffled.tiktoken", shuffled)):
        for option, pattern in (("0", PATTERN), ("2", LLAMA3), ("3", QWEN)):
            encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=known, special_tokens={})
            for many, kind in ((texts, "random"), (samples, "the three texts")):
                name = f"{path.split('/')[-1]}, pattern {option}, {kind}"
                want = [encoding.encode_ordinary(t) for t in many]
                wrong += report(name, many, ours(binary, path, many, option), want)
            again = f"{folder}/again.json"
            with open(again, "w", encoding="utf-8") as file:
                file.write(
                    subprocess.run(
                        [binary, "encode", path, "hex", "S" + option], capture_output=True, check=True, encoding="utf-8"
                    ).stdout
                )
            want = [encoding.encode_ordinary(t) for t in texts]
            name = name.replace("the three texts", "random")
            wrong += report(f"{name}, our file read again", texts, ours(binary, again, texts), want)
            hf = tokenizers.Tokenizer.from_file(again)
            hf.encode_special_tokens = True
            wrong += report(f"{name}, our file in tokenizers", texts, [e.ids for e in hf.encode_batch(texts)], want)
    return wrong


def main():
    binary, data = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "../shared/data"
    with tempfile.TemporaryDirectory() as folder:
        wrong = families(binary, data, folder)
    if "families" in sys.argv:
        return bool(wrong)
    bpe, ranks, bad = f"{data}/vocab.bpe", gpt2(data), 0
    texts = random_texts(100_000)
    got = ours(binary, bpe, texts)
    wrong += report("regex", texts, got, [by_regex(ranks, t) for t in texts])
    reference = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    theirs = [reference.encode_ordinary(t) for t in texts]
    # After a letter or number 's stands alone; after a symbol of class other it does not.
    probes = [f"{chr(c)}'s" for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    other = {p[0] for p, i in zip(probes, ours(binary, bpe, probes)) if i != reference.encode_ordinary(p)}
    print(f"tiktoken: {len(other)} code points differ", *(f"U+{ord(c):04X}" for c in sorted(other)[:8]))
    kept = [i for i, t in enumerate(texts) if not other & set(t)]
    wrong += report("tiktoken", [texts[i] for i in kept], [got[i] for i in kept], [theirs[i] for i in kept])

    samples = []
    for name in ("english_novels.txt", "polish_novels.txt"):
        with open(f"{data}/{name}", encoding="utf-8", newline="") as file:
            samples.append(file.read(1_000_000))
    with tempfile.TemporaryDirectory() as folder:
        wrong += wordpiece(binary, data, texts[:20_000], folder)
        wrong += trained(binary, data, folder)
        for i, sample in enumerate(samples):
            path = f"{folder}/{i}"
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(sample)
            subprocess.run([binary, "train", path, f"{path}.json"], check=True)
            hf = tokenizers.Tokenizer.from_file(f"{path}.json")
            again = f"{path}.again.json"
            hf.save(again)  # Hugging Face's own layout, merges in pairs
            for tokenizer in (f"{path}.json", again):
                wrong += report(
                    f"Hugging Face, trained {i}",
                    samples,
                    ours(binary, tokenizer, samples),
                    [hf.encode(s).ids for s in samples],
                )
            kept = [t for t in texts if not other & set(t)][:20_000]
            wrong += report(
                f"Hugging Face, trained {i}, random",
                kept,
                ours(binary, f"{path}.json", kept),
                [hf.encode(t).ids for t in kept],
            )
    return bool(wrong)


sys.exit(main())
