#!/usr/bin/env python3
"""Rewrites the Unicode classes of mtt.h: which code points are \\p{L}, \\p{N} and \\s in GPT-2's pre-tokenizer.

usage: make_unicode.py [HEADER]      default mtt.h; needs Python's `regex` (pip install regex), whose tables it reads

Between the two marker comments of the header it writes runs of equal class over the code points from 0 up, one 16-bit
number each: length * 4 + class, with class 0 other, 1 letter, 2 number, 3 space. Longer runs than 16,383 are cut.
"""
import importlib.metadata
import re
import sys

import regex

BEGIN, END = "/* tools/make_unicode.py writes from here */\n", "/* to here */\n"
CLASSES = ((1, r"\p{L}"), (2, r"\p{N}"), (3, r"\s"))


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


def table(found, counts):
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


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else "mtt.h"
    with open(path, encoding="utf-8", newline="") as file:
        before, rest = file.read().split(BEGIN)
    after = rest.split(END)[1]
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(before + BEGIN + table(*classes()) + END + after)


main()
