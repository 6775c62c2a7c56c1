"""notebook.py NOTEBOOK NAME=VALUE... - runs the code cells of a notebook in this folder, as Jupyter would,
with other values for the variables that its first code cell sets. Prints what is displayed, an image as its
path.

For cells that begin with %%bash, $NAME in that line is a variable of Python."""
import json
import shlex
import subprocess
import sys
import types


def main():
    path, *settings = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        cells = ["".join(c["source"]) for c in json.load(file)["cells"] if c["cell_type"] == "code"]
    display = types.ModuleType("IPython.display")
    display.Markdown = display.Image = str
    display.display = print
    sys.modules["IPython"] = types.ModuleType("IPython")
    sys.modules["IPython.display"] = display
    names = {}
    for number, cell in enumerate(cells):
        first, _, rest = cell.partition("\n")
        if first.startswith("%%bash"):
            words = [names[word[1:]] if word.startswith("$") else word for word in shlex.split(first)[1:]]
            subprocess.run(["bash", *(words or ["-s"])], input=rest, encoding="utf-8", check=True)
        else:
            exec(compile(cell, f"{path}, cell {number}", "exec"), names)
        if number == 0:
            for setting in settings:
                name, _, value = setting.partition("=")
                if name not in names:
                    sys.exit(f"{path}: its first cell does not set {name}")
                names[name] = value


if __name__ == "__main__":
    main()
