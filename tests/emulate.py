#!/usr/bin/env python3
"""emulate.py mtt_kernels.cu OUTPUT - makes C++ of the portable rooms of mtt_kernels.cu, for tests/emulate.h.

Lines keep their numbers. What C++ does not have is replaced:

    kernel<<<grid, block, bytes, stream>>>(...);    a call of emulate::launch
    __shared__ float partial[32];                   a static variable, poisoned in each block
    extern __shared__ uint4 ring[];                 a pointer to the dynamic shared memory
    asm("ex2.approx.ftz.f32 %0, %1;" : ...);        emulate::ex2_approx_ftz_f32(y, x);

An instruction that emulate.h lacks is therefore an error of the compiler, which names it."""
import re
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
    """One instruction as a call: its name, then its operands in the order of the text."""
    name, *rest = ptx.split(None, 1)
    if name == ".reg":
        kind, names = rest[0].split(None, 1)
        return f"emulate::{kind[1:]} {names};"
    words = re.findall(r"%\d+|\w+", rest[0]) if rest else []
    values = re.findall(r"<(\w+)>", name)  # "f32." TYPE: a macro's argument becomes the first one of the call
    values += [operands[int(word[1:])] if word[0] == "%" else word for word in words]
    return f"emulate::{re.sub(r'<.*?>', 'x', name).replace('.', '_')}({', '.join(values)});"


def assembly(source):
    """All asm statements as calls."""
    out, at = [], 0
    for match in re.finditer(r"\basm\b(?:\s+volatile)?\s*\(", source):
        end = closing(source, match.end() - 1)
        text = source[match.end():end].replace("\\\n", "\n")
        template = re.match(r'(?:\s*(?:"[^"]*"|\w+))*', text)[0]
        ptx = "".join(part.strip('"') if part[0] == '"' else f"<{part}>"
                      for part in re.findall(r'"[^"]*"|\w+', template)).strip()
        ptx = re.sub(r"^{(.*)}$", r"\1", ptx)
        operands = operands_of(text[len(template):])
        calls = " ".join(statement(part.strip(), operands) for part in ptx.split(";") if part.strip())
        newline = " \\\n" if "\\\n" in source[match.start():end] else "\n"
        lines = source.count("\n", match.start(), end)
        out += [source[at:match.start()], "{ ", re.sub(r"\s+", " ", calls), " }", newline * lines]
        at = source.index(";", end) + 1
    return "".join(out) + source[at:]


def main():
    path, output = sys.argv[1:]
    source = open(path, encoding="utf-8").read()
    source = source[:source.rindex("#ifndef MTT_NO_HOPPER")]  # the last room
    source = assembly(source)
    source = re.sub(r"\b__CUDA_ARCH__\b", "EMULATE_ARCH", source)
    source = re.sub(r"#include <cub/.*", "", source)  # emulate.h has it
    source = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+) (\w+)\[\];",
                    r"\1 *const \2 = (\1 *)emulate::dynamic_shared;", source)
    source = re.sub(r"__shared__ ([^;]*?(\w+)(?:\[[^;]*\])?);",
                    r"static \1; emulate::poison_once(&\2, sizeof(\2));", source)
    source = re.sub(r"(\w+)<<<(.*?), ([^,]*)>>>(\(.*\));",
                    r"emulate::launch(what, (const void *)\1, \2, [=] { \1\4; });", source)
    for left in ("__shared__", "<<<"):
        if left in source:
            line = source[:source.index(left)].count("\n") + 1
            sys.exit(f"{path}:{line}: emulate.py does not know this use of {left}")
    with open(output, "w", encoding="utf-8") as file:
        file.write(f'#line 1 "{path}"\n{source}')


if __name__ == "__main__":
    main()
