"""Compares pages with what runs: the output that they show, and the code that they quote.

    <!-- prints: tessera plan --mesh data=8 -->     before a block: what the command prints
    <!-- from examples/03_groups.cpp -->            before a block: lines of that file
    <!-- file: groups.yaml -->                      before a block: a file that the commands below find

A line `...`, indented or not, stands for any lines, and `...` inside a line for any text. Numbers like 4.4e-16, and 0 after "by", are round-off, which differs from
processor to processor: which one is not compared. Lines of several ranks
come in any order. Programs are looked for in the folder of the build; `python` is the interpreter that is given, and commands with it are left out without one.
"""

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

PROGRAMS = ("tessera", "winds", "insitu", "relief", "tokens", "gpt")
BLOCK = re.compile(r"^<!-- (?P<kind>prints:|from|file:) (?P<what>.+?) -->\n\n?```[a-z+]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    text = page.read_text()
    for block in BLOCK.finditer(text):
        yield block["kind"].rstrip(":"), block["what"], block["text"], text.count("\n", 0, block.start()) + 1


def plain(text):
    """Without round-off and blanks at the ends of lines; the lines of ranks in order of their numbers."""
    lines = [re.sub(r"\b\d(\.\d+)?e[-+]\d+\b|(?<=\bby )0(\.0+)?(?![\w.])", "ROUND-OFF", line.rstrip()) for line in text.strip("\n").split("\n")]
    if all(re.match(r"\[\d+\] ", line) for line in lines):
        lines.sort(key=lambda line: int(line[1 : line.index("]")]))
    return "".join(line + "\n" for line in lines)


def pattern(text):
    lines = plain(text).splitlines()
    any_text = [".*".join(re.escape(part) for part in line.split("...")) + "\n" for line in lines]
    return "".join("(?:.*\n)*?" if line.strip() == "..." else wanted for line, wanted in zip(lines, any_text))


def command_of(words, source, programs, python):
    for word in words:
        if word == "python":
            yield from [python] if isinstance(python, str) else python
        elif word.startswith(("examples/", "showcases/")):
            yield str(source / word)
        else:
            yield str(programs / word) if word in PROGRAMS or word.startswith(("example_", "docs_")) else word


def quoted(text, file):
    """The quoted lines, one after the other, whatever their indentation; `...` leaves some out."""
    lines, at = [line.strip() for line in file.read_text().splitlines()], 0
    for piece in re.split(r"^\s*(?://|#)?\s*\.\.\.\s*$", text, flags=re.MULTILINE):
        wanted = [line.strip() for line in piece.strip("\n").splitlines()]
        if not any(wanted):
            continue
        found = next((i for i in range(at, len(lines) - len(wanted) + 1) if lines[i : i + len(wanted)] == wanted), None)
        if found is None:
            return "\n".join(wanted)
        at = found + len(wanted)
    return None


def check(page, source, programs, python=None, only_python=False):
    """What is wrong on a page, and how many outputs were compared."""
    wrong, compared, ran = [], 0, {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, what, text, line in blocks(page):
            here = f"{page}:{line}"
            if kind == "file":
                (pathlib.Path(folder) / what).write_text(text)
            elif kind == "from":
                missing = quoted(text, source / what)
                wrong += [f"{here}: {what} has no such lines:\n{missing}"] if missing is not None else []
            else:
                words = shlex.split(what)
                if ("python" in words) != only_python:
                    continue
                if what not in ran:  # a page may show what one run prints in several places
                    command = list(command_of(words, source, programs, python))
                    ran[what] = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=200)
                done = ran[what]
                compared += 1
                if done.returncode or not re.fullmatch(pattern(text), plain(done.stdout)):
                    wrong.append(f"{here}: {what} ended with {done.returncode} and printed\n{done.stdout}{done.stderr}which is not\n{text}")
    return wrong, compared


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--programs", type=pathlib.Path, required=True)
    parser.add_argument("pages", nargs="+")
    arguments = parser.parse_args()
    everything, outputs = [], 0
    for page in arguments.pages:
        wrong, compared = check(arguments.source / page, arguments.source.resolve(), arguments.programs.resolve())
        everything += wrong
        outputs += compared
    print("\n".join(everything) or f"{outputs} outputs are as the pages say")
    sys.exit(bool(everything) or outputs == 0)


if __name__ == "__main__":
    main()
