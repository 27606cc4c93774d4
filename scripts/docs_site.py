"""Lays out the source of the documentation site: the checkout's pages where they are, and a page of reference for each room and for each module of
the Python package.

usage: docs_site.py FOLDER XML    (from the root of the checkout; XML is what Doxygen made)
"""

import pathlib
import re
import shutil
import sys

import python_reference

ROOMS = re.findall(r"^\| `([a-z_]+)` \|", pathlib.Path("docs/architecture.md").read_text(), re.MULTILINE)
PRIVATE = {"detail", "internal", "backends"}


def title_of(page):
    return re.search(r"^# (.+)$", page.read_text(), re.MULTILINE).group(1)


def name_files_by_path(xml):
    """Doxygen's index names a file without its folder, and several rooms have an errors.h: each gets its path."""
    index = (xml / "index.xml").read_text()

    def path(found):
        compound = (xml / f"{found.group(1)}.xml").read_text()
        location = re.search(r'<location file="([^"]+)"/>\s*</compounddef>', compound)
        return f'<compound refid="{found.group(1)}" kind="file"><name>{location.group(1) if location else found.group(2)}</name>'

    (xml / "index.xml").write_text(re.sub(r'<compound refid="([^"]+)" kind="file"><name>([^<]+)</name>', path, index))


def show_designators(xml):
    """Sphinx cannot read `root = {.name = "world"}`: it is shown as {name("world")}."""

    def shown(found):
        depth, pieces = 0, [""]
        for letter in found.group(2):
            depth += (letter in "{(") - (letter in "})")
            pieces = [*pieces, ""] if letter == "," and depth == 0 else [*pieces[:-1], pieces[-1] + letter]
        values = [re.sub(r"^\s*\.(\w+) *= *(.*?)\s*$", r"\1(\2)", piece, flags=re.DOTALL) for piece in pieces]
        return found.group(1) + "{" + ", ".join(values) + "}"

    for compound in xml.glob("*.xml"):
        text = compound.read_text()
        changed = re.sub(r"(= *|<defval>)\{(\s*\.(?:[^{}]|\{[^{}]*\})*)\}", shown, text)
        if changed != text:
            compound.write_text(changed)


def classes_of(xml):
    """Header -> the classes of namespace tessera in it: (kind, name). Nested ones are among the members of theirs."""
    found = {}
    for compound in xml.glob("*_8h.xml"):
        text = compound.read_text()
        path = re.search(r'<location file="([^"]+)"/>\s*</compounddef>', text).group(1)
        found[path] = re.findall(r'<innerclass refid="(struct|class)[^"]*"[^>]*>(tessera::\w+)</innerclass>', text)
    return found


def is_public(header):
    """It says something to users: more than what stands in a namespace detail."""
    return not PRIVATE & set(header.parts) and "namespace tessera {" in header.read_text()


def main():
    name_files_by_path(pathlib.Path(sys.argv[2]))
    show_designators(pathlib.Path(sys.argv[2]))
    out = pathlib.Path(sys.argv[1])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(name, out)
    shutil.copytree("docs", out / "docs", ignore=shutil.ignore_patterns("conf.py", "Doxyfile", "index.md"))
    shutil.copy("docs/conf.py", out)
    sections = {}
    for line in pathlib.Path("docs/index.md").read_text().splitlines():
        for page in re.findall(r"\]\(([\w/]+)\.md\)", line.split("|")[1] if line.startswith("| [") else ""):
            kind = "Tutorials" if page.startswith("tutorials/") else "Guides"
            sections.setdefault(kind, []).append(f"docs/{page}")
    sections["Operators"] = sorted(f"docs/operators/{page.stem}" for page in pathlib.Path("docs/operators").glob("*.md"))

    reference, classes = out / "reference", classes_of(pathlib.Path(sys.argv[2]))
    reference.mkdir()
    for room in ROOMS:
        headers = [path for path in sorted(pathlib.Path("tessera", room).rglob("*.h")) if is_public(path)]
        lines = [f"# {room}", ""]
        for header in headers:
            name = header.relative_to("tessera").as_posix()
            about = []
            for line in header.read_text().splitlines()[1:]:
                if not line.startswith("//"):
                    break
                about.append(line[3:])
            lines += [f"## {name}", "", "```text", *about, "```", "", "```{doxygenfile} " + header.as_posix(), ":sections: briefdescription "
                      "detaileddescription innernamespace func enum typedef var define user-defined", "```", ""]
            for kind, name in classes.get(header.as_posix(), []):
                lines += [f"```{{doxygen{kind}}} {name}", ":members:", ":undoc-members:", "```", ""]
        (reference / f"{room}.md").write_text("\n".join(lines))
    sections["Reference"] = [f"reference/{room}" for room in ROOMS]
    (reference / "python").mkdir()
    sections["Python reference"] = []
    for module, text in python_reference.pages().items():
        (reference / "python" / f"{module}.md").write_text(text)
        sections["Python reference"].append(f"reference/python/{module}")
    sections["The project"] = ["CONTRIBUTING", "CHANGELOG"]

    # The examples, whole: programs to read.
    lines = ["# Examples", "", "One file each, in the order in which to read them; each compares its result with one process.", ""]
    for source in sorted(pathlib.Path("examples").glob("*.cpp")):
        lines += [f"## {source.name}", "", "```cpp", source.read_text().rstrip(), "```", ""]
    (out / "examples.md").write_text("\n".join(lines))
    sections["Guides"].insert(0, "examples")

    index = ["```{include} README.md", "```", ""]
    for title, pages in sections.items():
        index += ["```{toctree}", ":hidden:", f":caption: {title}", ":maxdepth: 1", "", *pages, "```", ""]
    (out / "index.md").write_text("\n".join(index))
    (out / "README.md").rename(out / "readme_text.md")
    text = (out / "index.md").read_text().replace("README.md", "readme_text.md")
    (out / "index.md").write_text(text)


main()
