#!/usr/bin/env python3
"""emulate.py mtt_kernels.cu OUTPUT COMPILER... - makes C++ of mtt_kernels.cu, for emulate.h. The
compiler, with its flags, expands macros first. What C++ does not have is replaced:

    kernel<<<grid, block, bytes, stream>>>(...);    a call of emulate::launch
    __shared__ float partial[32];                   a reference to a place in the block's shared memory
    extern __shared__ uint4 ring[];                 a pointer to the dynamic shared memory
    asm("ex2.approx.ftz.f32 %0, %1;" : ...);        emulate::ex2_approx_ftz_f32(y, x);

An instruction that emulate.h and emulate_hopper.h lack is therefore an error of the compiler, which names
it."""
import re
import subprocess
import sys


def closing(text, at):
    """The index of the parenthesis that closes the one at `at`. Strings may hold others."""
    depth = 0
    for token in re.compile(r'"(?:[^"\\]|\\.)*"|[()]').finditer(text, at):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return token.start()
    sys.exit("emulate.py: a parenthesis is not closed")


def operands_of(text):
    """The expressions of '"=r"(x), "r"(y)'; and of '"text" : "=r"(x) : "r"(y)', too."""
    found, at = [], 0
    while match := re.compile(r'"[^"]*"\s*(\()').search(text, at):
        at = closing(text, match.start(1)) + 1
        found.append(text[match.end():at - 1])
    return found


def statement(ptx, operands):
    """One instruction as a call: its name, then its operands in the order of the text. Names of registers
    that the text declares end in _reg, so that they are not those of its operands."""
    if match := re.match(r"(\w+):\s(.*)", ptx):
        return f"{match[1]}: {statement(match[2], operands)}"
    if match := re.match(r"@!(\w+) bra (\w+)$", ptx):
        return f"if (!{match[1]}_reg) goto {match[2]};"
    name, *rest = ptx.split(None, 1)
    if name == ".reg":
        kind, names = rest[0].split(None, 1)
        return f"emulate::{kind[1:]} {', '.join(name + '_reg' for name in names.split(', '))};"
    values = []
    for word in re.findall(r"%%\w+|%\d+|\w+", rest[0]) if rest else []:
        if word.startswith("%%"):
            values.append(f"emulate::{word[2:]}()")  # a special register
        elif word.startswith("%"):
            values.append(operands[int(word[1:])])
        elif word != "_":  # a result that is not wanted
            values.append(word if word.isdigit() else word + "_reg")
    return f"emulate::{re.sub('[.:]+', '_', name)}({', '.join(values)});"


def assembly(source):
    """All asm statements as calls."""
    out, at = [], 0
    for match in re.finditer(r"\basm\b(?:\s+volatile)?\s*\(", source):
        end = closing(source, match.end() - 1)
        text = source[match.end():end]
        template = re.match(r'(?:\s*"[^"]*")*', text)[0]
        ptx = "".join(re.findall(r'"([^"]*)"', template)).strip()
        ptx = re.sub(r"^{(.*)}$", r"\1", ptx)
        operands = operands_of(text[len(template):])
        calls = " ".join(statement(part.strip(), operands) for part in ptx.split(";") if part.strip())
        lines = source.count("\n", match.start(), end)
        out += [source[at:match.start()], "{ ", re.sub(r"\s+", " ", calls), " }", "\n" * lines]
        at = source.index(";", end) + 1
    return "".join(out) + source[at:]


def main():
    path, output, *compiler = sys.argv[1:]
    source = open(path, encoding="utf-8").read()
    source = re.sub(r"\b__CUDA_ARCH__\b", "EMULATE_ARCH", source)
    source = re.sub(r"#include <cub/.*", "", source)  # emulate_host.h has it
    start = f'# 1 "{path}"\n'
    ran = subprocess.run([*compiler, "-E", "-x", "c++", "-"], input=start + source, capture_output=True,
                         encoding="utf-8")
    if ran.returncode:
        sys.exit(ran.stderr)
    headers, start, source = ran.stdout.partition(start)
    source = assembly(source)
    source = re.sub(r"extern __shared__ (?:__attribute__\(\(aligned\(\d+\)\)\) )?([\w ]+) (\w+)\[\];",
                    r"\1 *const \2 = (\1 *)(emulate::block->shared + emulate::DYNAMIC_AT);", source)
    source = re.sub(r"__shared__ ([\w ]+) (\w+)((?:\[[^;]*\])?);",
                    r"typedef \1 \2_type\3; static char \2_key; "
                    r"\2_type &\2 = emulate::static_shared<\2_type>(&\2_key);", source)
    source = re.sub(r"(\w+)<<<(.*?), ([^,]*)>>>(\(.*\));",
                    r"emulate::launch(what, (const void *)\1, \2, [=] { \1\4; });", source)
    for left in ("__shared__", "<<<"):
        if left in source:
            line = source[:source.index(left)].count("\n") + 1
            sys.exit(f"{output}:{line}: emulate.py does not know this use of {left}")
    with open(output, "w", encoding="utf-8") as file:
        file.write(headers + start + source)


if __name__ == "__main__":
    main()
