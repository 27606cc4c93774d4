"""names.py [--write] SOURCE: docs/names.md has every public name of C++ beside that of Python, and no cell without a name or a reason.

Names of C++ are what the installed headers declare in namespace tessera; those of Python are tessera.__all__. Equal names are one row; tests/docs/names.txt has
the pairs that are called differently, why a name is in one language alone, and which headers are settled beside those of tessera/tessera.h. Without --write: fails, with the difference, where the page says something else.
"""

import ast
import difflib
import pathlib
import re
import sys

PRIVATE = {"detail", "internal", "backends"}
PAGE = """# Names of C++ and Python

Names are alike on both sides. What is a method of `DistributedManager` in C++ is a function in Python, where there is one manager per process; a struct of options
is keyword arguments, and an enumeration is a text. A cell without a name says why. (A generated page: `python3 tests/docs/names.py --write .`)

Each room's headers have a label. *Settled*: a change is told in the changelog, and what it replaces stays for one minor version. *May change*: with any version, until 1.0.
"""


def declarations(text):
    """What a header declares directly in a namespace: (namespace, declaration, whether it is defined there)."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.MULTILINE)
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', text)
    scopes, piece = [], ""
    for letter in text:
        if letter == "{":
            found = re.search(r"namespace\s+([\w:]*)$", piece.strip())
            if scopes and scopes[-1] and not found:
                yield scopes[-1], piece.strip(), True
            scopes.append(found.group(1) if found else "")
        elif letter == "}" and scopes:
            scopes.pop()
        elif letter == ";" and scopes and scopes[-1]:
            yield scopes[-1], piece.strip(), False
        piece = "" if letter in "{};" else piece + letter


def name_of(declaration, defined):
    declaration = re.sub(r"\[\[[^\]]*\]\]|^\s*template\s*<(?:[^<>]|<[^<>]*>)*>", "", declaration).strip()
    if found := re.match(r"(?:class|struct|enum(?: class)?)\s+(\w+)", declaration):
        return found.group(1) if defined else None
    if found := re.match(r"using\s+(\w+)\s*=", declaration):
        return found.group(1)
    if re.match(r"using|friend|extern|static_assert|inline constexpr|constexpr|inline const|TORCH_MODULE", declaration):
        return None
    while re.search(r"<[^<>]*>", declaration):
        declaration = re.sub(r"<[^<>]*>", "", declaration)
    found = re.search(r"(\w+)\s*\(", declaration)
    return found.group(1) if found and declaration[: found.start()].strip() and "operator" not in declaration[: found.end()] else None


def names_of_cpp(source):
    """Room -> name -> header."""
    rooms = {}
    for room in re.findall(r"^\| `([a-z_]+)` \|", (source / "docs/architecture.md").read_text(), re.MULTILINE):
        for header in sorted((source / "tessera" / room).rglob("*.h")):
            if PRIVATE & set(header.parts):
                continue
            for scope, declaration, defined in declarations(header.read_text()):
                name = name_of(declaration, defined)
                if scope in ("tessera", "tessera::functional") and name:
                    prefix = "functional::" if scope != "tessera" else ""
                    rooms.setdefault(room, {}).setdefault(prefix + name, header.relative_to(source).as_posix())
    return rooms


def names_of_python(source):
    tree = ast.parse((source / "python/tessera/__init__.py").read_text())
    listed = next(node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")
    return ast.literal_eval(listed)


def told(source):
    """names.txt: pairs of names, reasons by patterns of C++ names and headers, and reasons of Python's names."""
    pairs, reasons, alone, settled = {}, [], {}, re.findall(r'"(tessera/.*)"', (source / "tessera/tessera.h").read_text())
    for line in (source / "tests/docs/names.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if " = " in line:
            cpp, python = line.split(" = ")
            pairs[cpp] = python.split(", ")
        else:
            names, reason = line.split(" : ")
            if names == "settled":
                settled += reason.split(", ")
            elif names.startswith("python "):
                alone.update((name, reason) for name in names[7:].split(", "))
            else:
                reasons.append((names.split(", "), reason))
    return pairs, reasons, alone, settled


def reason_of(name, header, reasons):
    """The first that names it, or its header, or the folder of that."""
    return next((why for names, why in reasons for n in names if n == name or (n[:1] == "*" and name.endswith(n[1:])) or ("/" in n and header.startswith(n))), None)


def labels(source, room, settled):
    """What is said of the headers of a room: settled, or not."""
    headers = [h.relative_to(source).as_posix() for h in sorted((source / "tessera" / room).rglob("*.h")) if not PRIVATE & set(h.parts)]
    groups = {"Settled": [h for h in headers if h in settled], "May change": [h for h in headers if h not in settled]}
    return " ".join(f"{label}: {listed(h.split('/', 2)[2] for h in group)}." for label, group in groups.items() if group)


def listed(names):
    return ", ".join(f"`{name}`" for name in names)


def page_of(source):
    rooms, python, (pairs, reasons, alone, settled) = names_of_cpp(source), names_of_python(source), told(source)
    every = {name for names in rooms.values() for name in names}
    faults = [f"names.txt: C++ has no {name}" for name in pairs if name not in every]
    faults += [f"names.txt: there is no {header}" for header in settled if header != "tessera/version.h" and not (source / header).is_file()]
    faults += [f"names.txt: Python has no {name}" for name in [*alone, *(n for names in pairs.values() for n in names)] if name.partition(".")[0] not in python]
    text, seen = [PAGE], set()
    for room, names in rooms.items():
        text.append(f"\n## {room}\n\n{labels(source, room, settled)}\n\n| C++ | Python |\n| --- | --- |\n")
        left = {}
        for name, header in names.items():
            theirs = pairs.get(name) or ([name] if name in python and name not in alone else None)
            if theirs:
                seen.update(name.partition(".")[0] for name in theirs)
                text.append(f"| `{name}` | {listed(theirs)} |\n")
                continue
            why = reason_of(name, header, reasons)
            if why is None:
                faults.append(f"{header}: {name} has no name in Python, and tests/docs/names.txt does not say why")
            left.setdefault(why, []).append(name)
        text += [f"| {listed(names)} | {why} |\n" for why, names in left.items()]
    text.append("\n## Python alone\n\n| Python | C++ |\n| --- | --- |\n")
    rest = {}
    for name in python:
        if name in alone:
            rest.setdefault(alone[name], []).append(name)
        elif name not in seen:
            faults.append(f"python: {name} has no name in C++, and tests/docs/names.txt does not say why")
    text += [f"| {listed(names)} | {why} |\n" for why, names in rest.items()]
    return "".join(text), faults


def main():
    source = pathlib.Path(next(a for a in sys.argv[1:] if a != "--write"))
    text, faults = page_of(source)
    if faults:
        sys.exit("\n".join(faults))
    page = source / "docs/names.md"
    if "--write" in sys.argv:
        page.write_text(text)
    elif page.read_text() != text:
        sys.stdout.writelines(difflib.unified_diff(page.read_text().splitlines(True), text.splitlines(True), str(page), "the sources"))
        sys.exit("docs/names.md is not what headers, tessera.__all__ and tests/docs/names.txt say: run this with --write")


main()
