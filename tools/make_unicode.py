#!/usr/bin/env python3
"""Rewrites the Unicode tables of mtt.h (GPT-2's pre-tokenizer) and tools/wordpiece.h (BERT's normaliser).

usage: make_unicode.py      in the repository root; pip install regex tokenizers, whose tables it reads

Each table is between two marker comments, and the comment above it explains its form.
GPT-2: the code points that are \\p{L}, \\p{N} and \\s, as Python's regex has them.
BERT: what Hugging Face's tokenizers do to each code point, asked one by one.
"""

import importlib.metadata
import re
import sys

import regex
import tokenizers
from tokenizers.normalizers import BertNormalizer

BEGIN, END = "/* written by tools/make_unicode.py: from here */\n", "/* to here */\n"
CLASSES = ((1, r"\p{L}"), (2, r"\p{N}"), (3, r"\s"))
POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def wrapped(items, between, begin, end):
    """Lines of at most 110 columns, with `begin` and `end` around each."""
    lines = [""]
    for item in items:
        longer = lines[-1] + between * bool(lines[-1]) + item
        if len(begin + longer + end) > 110:
            lines.append(item)
        else:
            lines[-1] = longer
    return "".join(begin + line + end + "\n" for line in lines)


def gpt2_table():
    found, counts = bytearray(0x110000), {}
    for value, pattern in CLASSES:
        matches = [c for c in range(0x110000) if regex.match(pattern, chr(c))]
        counts[pattern] = len(matches)
        for c in matches:
            if found[c]:
                sys.exit(f"U+{c:04X} is in two classes")
            found[c] = value
    runs, start = [], 0
    for c in range(1, len(found)):
        if found[c] != found[start] or c - start == 16383:  # a length of 14 bits
            runs.append((c - start) * 4 + found[start])
            start = c
    while runs[-1] % 4 == 0:  # the rest is of class other
        runs.pop()
    end = sum(run // 4 for run in runs)
    about = importlib.metadata.metadata("regex").get_payload()
    version = re.search(r"supports Unicode ([\d.]+\d)", about).group(1)
    return (
        f"/* Unicode {version} by Python's regex {importlib.metadata.version('regex')}: "
        + ", ".join(f"{count:,} of {pattern}" for pattern, count in counts.items())
        + ". */\n"
        f"enum {{ MTT__UNICODE_END = {end:#x} }}; /* code points from here up are of class other */\n"
        "static const uint16_t mtt__unicode_runs[] = {\n"
        + wrapped([f"{run}," for run in runs], "", "", "")
        + "};\n"
    )


def run(first, last, step=1):
    return f"{first:04X}" + (f"-{last:04X}" if last > first else "") + ("/2" if step == 2 else "")


def class_runs(points):
    out, points = [], set(points)
    for c in sorted(points):
        if c - 1 not in points:
            last = c
            while last + 1 in points:
                last += 1
            out.append(run(c, last))
    return out


def case_runs(lower):
    """Runs of code points that move by the same distance; of every second one if those between do not."""
    out, left = {}, dict(lower)
    for step in (2, 1):
        for c in sorted(left):
            n = 0
            while (
                c in left
                and left.get(c + n * step) == left[c] + n * step
                and (step == 1 or not n or c + n * step - 1 not in left)
            ):
                n += 1
            if n > (step == 2):
                out[c] = f"{run(c, c + (n - 1) * step, step)} {left[c] - c:+X},"
                for i in range(n):
                    del left[c + i * step]
    return [out[c] for c in sorted(out)]


def base_runs(bare):
    """Runs of code points with the same base, then the bases of those after the run, up to a multiple of 16."""
    out, end = [], -1
    for c in sorted(bare):
        if c <= end:
            continue
        after, end = end + 1, c
        while bare.get(end + 1) == bare[c]:
            end += 1
        letters = "+".join(f"{ord(letter):04X}" for letter in bare[c])
        if c == after and c == end and c % 16:
            out[-1] += f" {letters}"
        else:
            out.append(f"{run(c, end)} {letters}")
    return [entry + "," for entry in out]


def bert_table():
    off = dict(clean_text=False, handle_chinese_chars=False, strip_accents=False, lowercase=False)
    does = lambda option, text: BertNormalizer(**{**off, option: True}).normalize_str(text)
    cutter = tokenizers.pre_tokenizers.BertPreTokenizer()
    words = lambda c: [w for w, _ in cutter.pre_tokenize_str(f"a{chr(c)}b")]
    cut = {c: words(c) for c in POINTS}
    space = {c for c in POINTS if cut[c] == ["a", "b"]}
    punctuation = {c for c in POINTS if cut[c] == ["a", chr(c), "b"]}
    gone = {c for c in POINTS if does("clean_text", f"a{chr(c)}b") == "ab"}
    cjk = {c for c in POINTS if does("handle_chinese_chars", chr(c)) != chr(c)}
    bare = {c: does("strip_accents", chr(c)) for c in POINTS}
    lower = {c: does("lowercase", chr(c)) for c in POINTS}
    mark = {c for c in POINTS if not bare[c]}
    longer = [c for c, t in lower.items() if len(t) > 1]
    if gone & punctuation or mark & (gone | punctuation | cjk) or longer != [0x130]:
        sys.exit("Hugging Face's classes do not fit the table")
    kinds = (
        ("CONTROL", gone - space),
        ("CONTROL_BLANK", gone & space),
        ("BLANK", space - gone),
        ("PUNCTUATION", punctuation),
        ("MARK", mark),
        ("CJK", cjk),
    )
    cases = case_runs({c: ord(t[0]) for c, t in lower.items() if t != chr(c)})
    bases = base_runs({c: t for c, t in bare.items() if t and t != chr(c) and not 0xAC00 <= c < 0xD7A4})
    return (
        f"/* As Hugging Face's tokenizers {tokenizers.__version__} treat all code points. */\n"
        "static const mtt__words_class mtt__words_classes[] = {\n"
        + "".join(wrapped(class_runs(points), " ", f'{{MTT__{kind}, "', '"},') for kind, points in kinds)
        + "};\n"
        "static const char *const mtt__words_cases[] = {\n" + wrapped(cases, " ", '"', '",') + "};\n"
        "static const char *const mtt__words_bases[] = {\n" + wrapped(bases, " ", '"', '",') + "};\n"
    )


def main():
    for path, table in (("mtt.h", gpt2_table()), ("tools/wordpiece.h", bert_table())):
        with open(path, encoding="utf-8", newline="") as file:
            before, rest = file.read().split(BEGIN)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(before + BEGIN + table + END + rest.split(END, 1)[1])


main()
