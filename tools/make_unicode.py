#!/usr/bin/env python3
"""Rewrites the Unicode tables of mtt.h (GPT-2's pre-tokenizer, NFC) and tools/wordpiece.h (BERT's normaliser).

usage: make_unicode.py      in the repository root; pip install regex tokenizers, whose tables it reads

Each table is between two marker comments, and the comment above it explains its form.
GPT-2: the code points that are \\p{L}, \\p{N} and \\s, as Python's regex has them.
NFC and BERT: what Hugging Face's tokenizers do to each code point, asked one by one. They know an older Unicode
than Python, which tells only how a decomposition is made and which combining class a mark has.
"""

import importlib.metadata
import os
import re
import sys
import unicodedata

import regex
import tokenizers
from tokenizers.normalizers import NFC, NFD, BertNormalizer

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
        if found[c] != found[start]:
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
        "static const char *const mtt__unicode_runs[] = {\n" + wrapped(map(number, runs), "", '"', '",') + "};\n"
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


def number(n):
    """Digits of base 63 from @ up, then a last one of base 28 from # up."""
    digits = chr(35 + n % 28)
    while n := n // 28 if len(digits) == 1 else n // 63:
        digits = chr(64 + n % 63) + digits
    return digits.replace("\\", "\\\\")


def signed(n):
    return number(2 * n if n >= 0 else -2 * n - 1)


def nfc_table():
    nfd, nfc = NFD().normalize_str, NFC().normalize_str
    kinds = {c: 255 for c in [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]}  # Hangul's vowels and last consonants
    for c in POINTS:  # U+0345 has the highest class, so marks go before it
        if c == 0x345 or (nfd(chr(c)) == chr(c) and nfd(f"\u0345{chr(c)}") == f"{chr(c)}\u0345"):
            kinds[c] = unicodedata.combining(chr(c))
    parts = {c: unicodedata.decomposition(chr(c)) for c in POINTS if nfd(chr(c)) != chr(c) and not 0xAC00 <= c < 0xD7A4}
    parts = {c: [int(n, 16) for n in text.split()] for c, text in parts.items()}
    for c, (first, *second) in parts.items():
        if nfd(chr(c)) != nfd(chr(first)) + "".join(map(chr, second)):
            sys.exit(f"U+{c:04X} has another decomposition")
        if nfc(nfd(chr(c))) != chr(c):
            kinds[c] = 255
        elif second:
            kinds.setdefault(second[0], 255)
    numbers, before = [], [0, 0]
    for section in ({c: (kinds[c],) for c in kinds}, *({c: p for c, p in parts.items() if len(p) == n} for n in (2, 1))):
        of_kinds, runs = len(numbers) == 0, []
        for c in sorted(section):
            if runs and c == runs[-1][-1] + 1 and (not of_kinds or section[c] == section[runs[-1][0]]):
                runs[-1].append(c)
            else:
                runs.append([c])
        numbers.append(number(len(runs)))
        end = 0
        for points in runs:
            numbers += [number(points[0] - end), number(len(points))]
            for c in points[:1] if of_kinds else points:
                if len(section[c]) == 2:
                    numbers += [signed(n - b) for n, b in zip(section[c], before)]
                    before = section[c]
                else:
                    numbers.append(number(section[c][0]))
            end = points[-1] + 1
    return (
        f"/* As Hugging Face's tokenizers {tokenizers.__version__} treat all code points. */\n"
        f"enum {{ MTT__NORMAL_END = {max(kinds) + 1:#x} }};\n"
        "static const char *const mtt__normal_table[] = {\n" + wrapped(numbers, "", '"', '",') + "};\n"
    )


def bert_table():
    off = dict(clean_text=False, handle_chinese_chars=False, strip_accents=False, lowercase=False)
    does = lambda option, text: BertNormalizer(**{**off, option: True}).normalize_str(text)
    nfd = NFD().normalize_str
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
    stripped = all("".join(a for a in nfd(chr(c)) if ord(a) not in mark) == t for c, t in bare.items())
    if gone & punctuation or mark & (gone | punctuation | cjk) or longer != [0x130] or not stripped:
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
    return (
        f"/* As Hugging Face's tokenizers {tokenizers.__version__} treat all code points. */\n"
        "static const mtt__words_class mtt__words_classes[] = {\n"
        + "".join(wrapped(class_runs(points), " ", f'{{MTT__{kind}, "', '"},') for kind, points in kinds)
        + "};\n"
        "static const char *const mtt__words_cases[] = {\n" + wrapped(cases, " ", '"', '",') + "};\n"
    )


def main():
    for path, table in (("mtt.h", gpt2_table() + nfc_table()), ("tools/wordpiece.h", bert_table())):
        with open(path, encoding="utf-8", newline="") as file:
            before, rest = file.read().split(BEGIN)
        with open(path + ".tmp", "w", encoding="utf-8", newline="") as file:
            file.write(before + BEGIN + table + END + rest.split(END, 1)[1])
        os.replace(path + ".tmp", path)


main()
