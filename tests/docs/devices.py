"""Compares the table of docs/gpu.md with the tests: every case that it names exists, and it names every case of tests/device."""

import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
page = (root / "docs/gpu.md").read_text(encoding="utf-8")
named = set(re.findall(r"`([A-Z]\w*\.[A-Z]\w*)`", page))
case = re.compile(r"^TEST(?:_P|_F)?\((\w+), (\w+)\)", re.M)


def cases(folder):
    found = set()
    for path in (root / "tests" / folder).glob("*_test.cpp"):
        found |= {f"{suite}.{name}" for suite, name in case.findall(path.read_text(encoding="utf-8"))}
    return found


own = cases("device")
wrong = [f"docs/gpu.md names {c}, which no test has" for c in sorted(named - own - cases("ops"))]
wrong += [f"docs/gpu.md does not name {c}" for c in sorted(own - named)]
print("\n".join(wrong) or f"{len(named)} cases")
sys.exit(bool(wrong))
