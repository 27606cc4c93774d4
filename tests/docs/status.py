"""status.py [--write] SOURCE BUILD: the matrix of docs/status.md says what the registered tests hold.

Each cell of tests/docs/capabilities.txt names a test; one that is not registered in BUILD is a fault. The table stands between the page's two markers.
Without --write: fails, with the difference, where the page says something else. The last column: does `make test-2.11` run one of the row's tests.
"""

import difflib
import json
import pathlib
import subprocess
import sys

BEGIN, END = "<!-- matrix: by the tests -->\n", "<!-- /matrix -->\n"
COLUMNS = ["alone", "threads", "processes", "gloo", "mpi", "memory", "hosts", "cuda", "python"]
HEADS = ["one process", "threads", "processes", "Gloo", "MPI", "memory", "hosts", "CUDA", "Python"]


def registered(build):
    said = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1"], capture_output=True, text=True, check=True)
    return {test["name"] for test in json.loads(said.stdout)["tests"]}


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


def main():
    write = "--write" in sys.argv
    source, build = (pathlib.Path(a) for a in sys.argv[1:] if a != "--write")
    faults, tests = [], registered(build)
    lines = (source / "tests/docs/capabilities.txt").read_text().splitlines()
    rows = [row(line, tests, faults) for line in lines if line and not line.startswith("#")]
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
