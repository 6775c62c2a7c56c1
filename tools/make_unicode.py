#!/usr/bin/env python3
"""Rewrites the Unicode tables of mtt.h: the classes of GPT-2's pre-tokenizer and what BERT's normaliser does.

usage: make_unicode.py [HEADER]      default mtt.h; needs pip install regex tokenizers, whose tables it reads

Each table stands between two marker comments of the header.
GPT-2: which code points are \\p{L}, \\p{N} and \\s, as runs of equal class from 0 up, one 16-bit number each:
length * 4 + class, with class 0 other, 1 letter, 2 number, 3 space. Longer runs than 16,383 are cut.
BERT: a string per kind of run, as its text there says, of numbers in base-64 digits: five bits each, the lowest first, and
a sixth that is set where more follow. They are asked of Hugging Face's tokenizers, one code point after another.
"""
import importlib.metadata
import re
import sys

import regex
import tokenizers
from tokenizers.normalizers import BertNormalizer

END = "/* to here */\n"
CLASSES = ((1, r"\p{L}"), (2, r"\p{N}"), (3, r"\s"))
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def classes():
    found, counts = bytearray(0x110000), {}
    for value, pattern in CLASSES:
        matches = [c for c in range(0x110000) if regex.match(pattern, chr(c))]
        counts[pattern] = len(matches)
        for c in matches:
            if found[c]:
                sys.exit(f"U+{c:04X} is in two classes")
            found[c] = value
    return found, counts


def runs(found):
    out, start = [], 0
    for c in range(1, len(found)):
        if found[c] != found[start] or c - start == 16383:
            out.append((c - start) * 4 + found[start])
            start = c
    while out[-1] % 4 == 0:  # what follows the last letter or number is other
        out.pop()
    return out


def gpt2_table():
    found, counts = classes()
    numbers = runs(found)
    end = sum(n // 4 for n in numbers)
    version = re.search(r"supports Unicode ([\d.]+\d)", importlib.metadata.metadata("regex").get_payload()).group(1)
    text = (f"/* Unicode {version} by Python's regex {importlib.metadata.version('regex')}: "
            + ", ".join(f"{count:,} of {pattern}" for pattern, count in counts.items()) + ". */\n"
            f"enum {{ MTT__UNICODE_END = {end:#x} }}; /* code points from here up are of class other */\n"
            "static const uint16_t mtt__unicode_runs[] = {\n")
    line = ""
    for n in numbers:
        if len(line) + len(f"{n},") > 120:
            text, line = text + line + "\n", ""
        line += f"{n},"
    return text + line + "\n};\n"


def digits(number):
    text = ""
    while number > 31:
        text, number = text + DIGITS[32 + number % 32], number // 32
    return text + DIGITS[number]


def signed(number):
    return digits(2 * number if number >= 0 else -2 * number - 1)


def class_runs(points):
    """Runs of consecutive code points: the gap since the last one and the length."""
    out, end, points = "", 0, sorted(points)
    while points:
        n = next((i for i, c in enumerate(points) if c != points[0] + i), len(points))
        out += digits(points[0] - end) + digits(n)
        end, points = points[0] + n, points[n:]
    return out


def shift_runs(pairs, step):
    """Takes the runs of code points `step` apart that move by the same distance out of `pairs`: gap, length, distance."""
    out, end = "", 0
    for c in sorted(pairs):
        n = 0
        while c in pairs and pairs.get(c + n * step) == pairs[c] + n * step and (step == 1 or n == 0 or c + n * step - 1 not in pairs):
            n += 1
        if n > (step == 2):
            out += digits(c - end) + digits(n) + signed(pairs[c] - c)
            end = c + (n - 1) * step + 1
            for i in range(n):
                del pairs[c + i * step]
    return out


def base_runs(pairs):
    """Runs of consecutive code points: gap, length, and for each its base less the base of the one before the last."""
    out, end, before, last = "", 0, 0, 0
    for c in sorted(pairs):
        if c < end:
            continue
        n = next(i for i in range(len(pairs) + 1) if c + i not in pairs)
        out += digits(c - end) + digits(n)
        for i in range(n):
            out += signed(pairs[c + i] - before)
            before, last = last, pairs[c + i]
        end = c + n
    return out


def bert_table():
    off = dict(clean_text=False, handle_chinese_chars=False, strip_accents=False, lowercase=False)
    does = lambda option, text: BertNormalizer(**{**off, option: True}).normalize_str(text)
    points = [c for c in range(0x110000) if not 0xd800 <= c < 0xe000]
    words = lambda c: [w for w, _ in tokenizers.pre_tokenizers.BertPreTokenizer().pre_tokenize_str(f"a{chr(c)}b")]
    cut = {c: words(c) for c in points}
    space = {c for c in points if cut[c] == ["a", "b"]}
    punctuation = {c for c in points if cut[c] == ["a", chr(c), "b"]}
    gone = {c for c in points if does("clean_text", f"a{chr(c)}b") == "ab"}
    cjk = {c for c in points if does("handle_chinese_chars", chr(c)) != chr(c)}
    bare = {c: does("strip_accents", chr(c)) for c in points}
    lower = {c: does("lowercase", chr(c)) for c in points}
    mark = {c for c in points if not bare[c]}
    one = {c: ord(t) for c, t in bare.items() if len(t) == 1 and t != chr(c)}
    whole = {t: c for c, t in bare.items() if len(t) == 2}
    pairs = {c: t for c, t in bare.items() if len(t) > 1 and not 0xac00 <= c < 0xd7a4}
    shifts = {c: ord(t[0]) for c, t in lower.items() if t != chr(c)}
    if gone & punctuation or mark & (gone | punctuation | cjk) or [c for c, t in lower.items() if len(t) > 1] != [0x130]:
        sys.exit("Hugging Face's classes do not fit the table")
    kinds = [class_runs(gone - space), class_runs(gone & space), class_runs(space - gone), class_runs(punctuation),
             class_runs(mark), class_runs(cjk), "", "", "", "", ""]
    kinds[7] = shift_runs(shifts, 2)
    kinds[6] = shift_runs(shifts, 1)
    kinds[8] = base_runs({c: b for c, b in one.items() if c not in cjk})
    kinds[9] = base_runs({c: b for c, b in one.items() if c in cjk})
    last = 0
    for c, t in pairs.items():
        head = ord(t[0]) if len(t) == 2 else whole[t[:-1]]
        kinds[10] += digits(c - last) + signed(head - c) + signed(ord(t[-1]) - c)
        last = c + 1
    text = f"/* As Hugging Face's tokenizers {tokenizers.__version__} do it. */\nstatic const char *const mtt__bert_runs[] = {{\n"
    for kind in kinds:
        lines = [kind[i:i + 116] for i in range(0, len(kind), 116)]
        text += "\n".join(f'"{line}"' for line in lines) + ",\n"
    return text + "};\n"


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else "mtt.h"
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    for name, table in (("GPT-2's", gpt2_table()), ("BERT's", bert_table())):
        begin = f"/* tools/make_unicode.py writes {name} from here */\n"
        before, rest = text.split(begin)
        text = before + begin + table + END + rest.split(END, 1)[1]
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)


main()
