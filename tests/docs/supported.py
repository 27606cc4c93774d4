"""supported.py [--write] PAGE PROGRAM...: the table of operators on sharded fields in PAGE says what the tests draw and compare.

Each PROGRAM is run with --table=FILE, which draws its cases and notes them instead of computing them; the rows stand between the page's two markers.
Without --write: fails, with the difference, where the page says something else.
"""

import difflib
import pathlib
import subprocess
import sys
import tempfile

BEGIN, END = "<!-- supported: by the tests -->\n", "<!-- /supported -->\n"
HEAD = "| operator | what was sharded | derivatives | compared, by |\n| --- | --- | --- | --- |\n"


def rows(program):
    name = pathlib.Path(program).name
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "table"
        done = subprocess.run([program, f"--table={file}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            sys.exit(f"{name} --table failed:\n{done.stdout}")
        return [line.removesuffix(" |") + f", `{name}` |" for line in file.read_text().splitlines()]


def main():
    write = "--write" in sys.argv
    page, *programs = [a for a in sys.argv[1:] if a != "--write"]
    path = pathlib.Path(page)
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"{page} has no place for the table: it stands between {BEGIN.strip()} and {END.strip()}")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    table = HEAD + "".join(row + "\n" for program in programs for row in rows(program))
    wanted = before + BEGIN + table + END + after
    if write:
        path.write_text(wanted)
    elif wanted != text:
        sys.stdout.writelines(difflib.unified_diff(text.splitlines(True), wanted.splitlines(True), page, "the tests"))
        sys.exit(f"the table in {page} is not what the tests compare: run this with --write")


main()
