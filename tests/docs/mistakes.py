"""mistakes.py SOURCE: the table of beginners' mistakes (mistakes.txt) is complete and says of none that it is silent, and docs/troubleshooting.md quotes what is said.

Every mistake of the review has a row. Its mark follows from what the text says: what was asked, the limit, what to do. At most three mistakes are below A.
What another test asserts is looked for in that file. Each quote of the table stands in the first table of the page, and each message of the page in the table.
"""

import pathlib
import re
import sys

NUMBERS = range(1, 34)


def quoted(page):
    """A quote of the page as a pattern: `...` stands for what differs."""
    return re.compile(".*".join(map(re.escape, pieces_of(page))), re.DOTALL)


def pieces_of(page):
    return [piece.strip() for piece in page.split("...") if piece.strip()]


def rows(source):
    found = []
    for line in (source / "tests/docs/mistakes.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if not line.startswith("  "):
            number, _, what = line.partition(" ")
            found.append({"id": number, "what": what, "by": "", "asked": [], "limit": [], "do": [], "page": ""})
            continue
        key, _, value = line.strip().partition(": ")
        if key in ("asked", "limit", "do"):
            found[-1][key].append(value)
        else:
            found[-1][key] = value
    for row in found:
        row["quoted"] = quoted(row["page"])
    return found


def mark(row):
    if row["by"].endswith(" works"):
        return "A"
    said = sum(bool(row[key]) for key in ("asked", "limit", "do"))
    return {3: "A", 2: "B" if not row["do"] else "C", 1: "C", 0: "S"}[said]


def faults_of(source, table):
    faults = [f"{row['id']} ({row['what']}) is silent" for row in table if mark(row) == "S"]
    below = {row["id"].rstrip("abcdef") for row in table if mark(row) != "A"}
    if len(below) > 3:
        faults.append(f"{len(below)} mistakes are below A: {sorted(below)}")
    told = {re.match(r"\d+", row["id"]).group() for row in table}
    faults += [f"mistake {number} has no row" for number in NUMBERS if str(number) not in told]
    for row in table:
        if row["by"].startswith(("python ", "c++ ")):
            continue
        words = (source / row["by"].split()[0]).read_text()
        # A text may go on in the next literal.
        words = re.sub(r'"\s*\n\s*"', "", words)
        pieces = row["asked"] + row["limit"] + row["do"] + pieces_of(row["page"])
        faults += [f"{row['id']}: {row['by']} does not say '{piece}'" for piece in pieces if piece not in words]
    return faults


def messages_of(page):
    """The first column of the page's first table."""
    lines = page.read_text().split("\n| --- |", 1)[1].split("\n")[1:]
    messages = []
    for line in lines:
        if not line.startswith("| "):
            break
        messages.append(re.match(r"\| `([^`]+)`", line).group(1))
    return messages


def main():
    source = pathlib.Path(sys.argv[1])
    table = rows(source)
    faults = faults_of(source, table)
    messages, quotes = messages_of(source / "docs/troubleshooting.md"), {row["page"] for row in table} - {""}
    faults += [f"docs/troubleshooting.md has no row `{quote}`" for quote in sorted(quotes - set(messages))]
    faults += [f"docs/troubleshooting.md says `{m}`, which no mistake of the table is told" for m in messages if m not in quotes]
    marks = [mark(row) for row in table]
    print("\n".join(faults) or f"{len(table)} cases: " + ", ".join(f"{marks.count(m)} {m}" for m in "ABCS"))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
