"""devices.py [--write] ROOT [PROGRAM...]: what docs/gpu.md says of the tests.

Every case of GoogleTest that the page names exists, it names every case of tests/device, and each test program stands in one row of the table of programs.
With PROGRAMs (test_device, test_device_order): the tables between <!-- NAME: by the tests --> and <!-- /NAME --> have the rows that their cases print;
--write puts them there.
"""

import collections
import pathlib
import re
import subprocess
import sys

write = "--write" in sys.argv
folder, *programs = [a for a in sys.argv[1:] if a != "--write"]
root = pathlib.Path(folder)
path = root / "docs/gpu.md"
page = path.read_text(encoding="utf-8")
named = set(re.findall(r"`([A-Z]\w*\.[A-Z]\w*)`", page))
case = re.compile(r"^TEST(?:_P|_F)?\((\w+), (\w+)\)", re.M)
PRINTED = {"planted": ("test_device", "Planted.Each*"), "launches": ("test_device_order", "DeviceLaunches.*")}


def cases(folder):
    found = set()
    for source in (root / "tests" / folder).glob("*_test.cpp"):
        found |= {f"{suite}.{name}" for suite, name in case.findall(source.read_text(encoding="utf-8"))}
    return found


def registered():
    """The test programs of all folders."""
    for source in root.glob("tests/*/CMakeLists.txt"):
        text = source.read_text(encoding="utf-8")
        yield from re.findall(r"^\s*tessera_test\(\s*(\w+)", text, re.M)
        yield from ("hostile_" + name for name in re.findall(r"^\s*hostile_test\(\s*(\w+)", text, re.M))


def printed(name, program):
    """The page with the rows of one table as the program prints them."""
    begin, end = f"<!-- {name}: by the tests -->\n", f"<!-- /{name} -->\n"
    if page.count(begin) != 1 or page.count(end) != 1:
        sys.exit(f"docs/gpu.md has no place for the table {name}: it stands between {begin.strip()} and {end.strip()}")
    before, rest = page.split(begin)
    table, after = rest.split(end)
    done = subprocess.run([program, f"--gtest_filter={PRINTED[name][1]}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{program} failed:\n{done.stdout}")
    rows = [line + "\n" for line in done.stdout.splitlines() if line.startswith("| ")]
    return before + begin + "".join(table.splitlines(True)[:2] + rows) + end + after


wrong = []
for name, (target, _) in PRINTED.items():
    for program in (p for p in programs if pathlib.Path(p).name == target):
        wanted = printed(name, program)
        if wanted != page and not write:
            wrong.append(f"the table {name} of docs/gpu.md is not what {target} prints: run this with --write")
        page = wanted if write else page
if write:
    path.write_text(page, encoding="utf-8")
own = cases("device")
wrong += [f"docs/gpu.md names {c}, which no test has" for c in sorted(named - own - cases("ops"))]
wrong += [f"docs/gpu.md does not name {c}" for c in sorted(own - named)]
table = page.split("## Each test program", 1)[-1].split("\n## ", 1)[0]
rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")]
listed = collections.Counter(name for row in rows for name in re.findall(r"`(\w+)`", row[0]))
wrong += [f"docs/gpu.md: a row has an empty cell: {row[0]}" for row in rows if len(row) != 3 or not all(row)]
wrong += [f"docs/gpu.md, each test program: {name} stands there {listed[name]} times" for name in sorted(set(registered())) if listed[name] != 1]
wrong += [f"docs/gpu.md, each test program: {name} is none" for name in sorted(set(listed) - set(registered()))]
print("\n".join(wrong) or f"{len(named)} cases, {len(listed)} programs")
sys.exit(bool(wrong))
