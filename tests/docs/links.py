"""Every relative link and picture of the pages leads to a file that is there, and every anchor to a heading."""

import pathlib
import re
import sys


def anchors(path):
    headings = re.findall(r"^#+ +(.+?) *$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


source = pathlib.Path(sys.argv[1])
faults, checked = [], 0
for page in sys.argv[2:]:
    text = re.sub(r"^```.*?^```$", "", (source / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        if re.match(r"[a-z]+:", target):
            continue
        checked += 1
        file, _, anchor = target.partition("#")
        there = (source / page).parent / file if file else source / page
        if not there.exists():
            faults.append(f"{page}: {target} is not there")
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            faults.append(f"{page}: {target} names no heading")
# The index names every page of docs/ but those of families, which docs/operators.md lists.
index = (source / "docs/index.md").read_text()
for page in sys.argv[2:]:
    if re.fullmatch(r"docs/(tutorials/)?\w+\.md", page) and page != "docs/index.md" and f"({page[5:]})" not in index:
        faults.append(f"docs/index.md does not list {page}")
print("\n".join(faults) or f"{checked} links are right")
sys.exit(1 if faults or not checked else 0)
