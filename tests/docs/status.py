"""status.py [--write] SOURCE BUILD: the matrix of docs/status.md says what the registered tests hold, and the rows of docs/compared.md name tests that there are.

Each cell of tests/docs/capabilities.txt names a test; one that is not registered in BUILD is a fault. The table stands between the page's two markers.
Without --write: fails, with the difference, where the page says something else. The last column: does `make test-2.11` run one of the row's tests.

A row of docs/compared.md begins its third cell with its state, and names in its fourth, between backticks, tests of ctest, cases of GoogleTest in the sources of the tests, or
python.NAME::CASE of the files that the test python.NAME runs. Each row has one but those that do not arise; the last line of the page counts the states.
"""

import difflib
import json
import pathlib
import re
import subprocess
import sys

BEGIN, END = "<!-- matrix: by the tests -->\n", "<!-- /matrix -->\n"
COLUMNS = ["alone", "threads", "processes", "gloo", "mpi", "memory", "hosts", "cuda", "python"]
STATES = ["works", "partly", "not", "n.a"]
HEADS = ["one process", "threads", "processes", "Gloo", "MPI", "memory", "hosts", "CUDA", "Python"]


def registered(build):
    said = subprocess.run(["ctest", "--test-dir", build, "-C", "Long", "--show-only=json-v1"], capture_output=True, text=True, check=True)
    return {test["name"]: test.get("command", []) for test in json.loads(said.stdout)["tests"]}


def row(line, tests, faults):
    name, _, cells = line.partition(" | ")
    told = dict(cell.split("=", 1) for cell in cells.split())
    for column, test in told.items():
        if column not in COLUMNS:
            faults.append(f"{name}: {column} is no column: {' '.join(COLUMNS)}")
        elif test != "-" and test not in tests:
            faults.append(f"{name}: no test is called {test}")
    shown = ["-" if told.get(column) == "-" else f"✓ {told[column]}" if column in told else "✗" for column in COLUMNS]
    older = any(test != "-" and not test.startswith("python.") for test in told.values())
    return f"| {name} | " + " | ".join([*shown, "✓" if older else "✗"]) + " |\n"


def cases(source, tests):
    """The names of all cases: of GoogleTest in C++, of pytest in the files of registered tests."""
    found = set()
    for file in (source / "tests").rglob("*.cpp"):
        found.update(f"{suite}.{case}" for suite, case in re.findall(r"^ *TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)", file.read_text(), re.MULTILINE))
    for name, command in tests.items():
        for file in (pathlib.Path(word) for word in command if name.startswith("python.") and re.search(r"/test_\w+\.py$", word)):
            found.update(f"{name}::{case}" for case in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE))
    return found


def compared(text, known):
    """What is wrong with the rows of docs/compared.md."""
    faults, counts, last = [], dict.fromkeys(STATES, 0), ("", 0)
    for line in re.findall(r"^\| [A-Z]\d+ \|.*$", text, re.MULTILINE):
        number, what, state, tests = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        word = re.match(r"[\w.]*\w", state).group()
        if word not in STATES:
            faults.append(f"{number} ({what}): {word} is no state: {' '.join(STATES)}")
        else:
            counts[word] += 1
        names = re.findall(r"`([^`]+)`", tests)
        faults += [f"{number} ({what}): no test is called {name}" for name in names if name not in known]
        if bool(names) == (word == "n.a") or (word in ("partly", "not", "n.a") and len(state) < len(word) + 10):
            faults.append(f"{number} ({what}): each row has a test or does not arise, and what does not work is told in a sentence")
        if (number[0], int(number[1:])) != ((last[0], last[1] + 1) if number[0] == last[0] else (number[0], 1)):
            faults.append(f"{number} ({what}) follows {last[0]}{last[1]}")
        last = (number[0], int(number[1:]))
    says = f"Of {sum(counts.values())} rows {counts['works']} work, {counts['partly']} partly and {counts['not']} not; {counts['n.a']} do not arise."
    return faults if text.endswith(says + "\n") else [*faults, f"the last line of docs/compared.md is to be: {says}"]


def main():
    write = "--write" in sys.argv
    source, build = (pathlib.Path(a) for a in sys.argv[1:] if a != "--write")
    faults, tests = [], registered(build)
    lines = (source / "tests/docs/capabilities.txt").read_text().splitlines()
    rows = [row(line, tests, faults) for line in lines if line and not line.startswith("#")]
    faults += compared((source / "docs/compared.md").read_text(), tests.keys() | cases(source, tests))
    if faults:
        sys.exit("\n".join(faults))
    page = source / "docs/status.md"
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"{page} has no place for the matrix: it stands between {BEGIN.strip()} and {END.strip()}")
    before, rest = text.split(BEGIN)
    head = "| capability | " + " | ".join([*HEADS, "libtorch 2.11"]) + " |\n| ---" + " | ---" * (len(HEADS) + 1) + " |\n"
    wanted = before + BEGIN + head + "".join(rows) + END + rest.split(END)[1]
    if write:
        page.write_text(wanted)
    elif wanted != text:
        sys.stdout.writelines(difflib.unified_diff(text.splitlines(True), wanted.splitlines(True), str(page), "the tests"))
        sys.exit("the matrix of docs/status.md is not what tests/docs/capabilities.txt says: run this with --write")


main()
