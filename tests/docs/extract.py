"""Makes C++ files of the code blocks in Markdown pages.

A block that starts with ```cpp is compiled:
- with a `main`: as it is, a program of its own, `programs/PAGE_N.cpp`;
- after a comment that begins with `<!-- cpp program` (at namespace scope) or `<!-- cpp main` (the next lines of main()): in the one program that all such blocks of a
  page make, `programs/PAGE.cpp`, so that a page runs as it is read;
- else: as the body of a function in `fragments/PAGE.cpp`, its #include lines moved to the top; or at namespace scope if the comment before it begins with
  `<!-- cpp namespace`.
A program runs where its page shows what it prints (`prints: docs_PAGE`, printed.py).
A comment `<!-- cpp ... -->` just before a block holds lines that the reader need not see (includes, declarations); they go before the block's own.
Every fragment sees <torch/torch.h> and tessera/tessera.h. Code that is not to be compiled is marked otherwise (```c++, ```text).
"""

import argparse
import pathlib
import re

BLOCK = re.compile(r"(?:^<!-- cpp(?P<scope> (?:namespace|program|main)\b)?(?P<hidden>(?:(?!-->).)*?)-->\n\n?)?^```cpp\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def split_includes(text, line, page):
    """The #include lines of a text, and the rest with its place in the page."""
    includes = [row for row in text.splitlines() if row.startswith("#include")]
    rest = ["" if row.startswith("#include") else row for row in text.splitlines()]
    return includes, [f'#line {line} "{page}"', *rest]


def write(path, lines):
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("pages", nargs="*")
    arguments = parser.parse_args()
    written = set()
    for page in arguments.pages:
        text = (arguments.source / page).read_text()
        name = re.sub(r"\W", "_", page.removesuffix(".md"))
        top, body, programs = [], [], 0
        one = {"top": [], "program": [], "main": []}
        for block in BLOCK.finditer(text):
            code = block["code"]
            includes, rest = split_includes(code, text.count("\n", 0, block.start("code")) + 1, page)
            hidden_includes, hidden = split_includes(block["hidden"] or "", text.count("\n", 0, block.start()) + 1, page)
            scope = (block["scope"] or "").strip()
            if scope in ("program", "main"):
                one["top"] += [*hidden_includes, *includes]
                one[scope] += [*hidden, *rest]
                continue
            if re.search(r"\bint main\(", code):
                programs += 1
                written.add(write(arguments.out / "programs" / f"{name}_{programs}.cpp", [*hidden_includes, *includes, *hidden, *rest]))
                continue
            top += [*hidden_includes, *includes]
            if scope:
                body += [*hidden, *rest]
            else:
                body += [f"[[maybe_unused]] static void block_{block.start()}() {{", *hidden, *rest, "}"]
        if one["program"] or one["main"]:
            head = ["#include <torch/torch.h>", '#include "tessera/tessera.h"', *dict.fromkeys(one["top"])]
            its_main = ["int main([[maybe_unused]] int argc, [[maybe_unused]] char** argv) {", *one["main"], "}"] if one["main"] else []
            written.add(write(arguments.out / "programs" / f"{name}.cpp", [*head, *one["program"], *its_main]))
        if body:
            unused = [f'#pragma GCC diagnostic ignored "-W{what}"' for what in ("unused-variable", "unused-but-set-variable", "unused-function")]
            head = ["#include <torch/torch.h>", '#include "tessera/tessera.h"', *dict.fromkeys(top), *unused]
            # A namespace a page: several pages are compiled as one file.
            body = [f"namespace page_{name} {{", *body, "}"]
            written.add(write(arguments.out / "fragments" / f"{name}.cpp", [*head, *body]))
    for old in arguments.out.glob("*/*.cpp"):
        if old not in written:
            old.unlink()


main()
