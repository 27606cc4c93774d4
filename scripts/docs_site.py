"""Lays out the source of the documentation site: the checkout's pages where they are, and a page of reference for each room and for each module of
the Python package.

usage: docs_site.py FOLDER XML    (from the root of the checkout; XML is what Doxygen made)
"""

import os
import pathlib
import re
import shutil
import sys

import notebooks
import python_reference

ROOMS = re.findall(r"^\| `([a-z_]+)` \|", pathlib.Path("docs/architecture.md").read_text(), re.MULTILINE)
PRIVATE = {"detail", "internal", "backends"}
# Groups of the sidebar, by how the names of their pages begin; the others are guides.
GROUPS = {
    "Start": ("start_", "c_and_fortran", "troubleshooting", "glossary", "installing", "building", "launching", "concepts"),
    "Tables": ("names", "model_table", "operator_table", "pytorch_tests", "status", "compared", "benchmarks"),
    "Internals": ("architecture", "progress"),
}
LINK = re.compile(r"(?<!!)\[(?P<words>(?:[^\[\]]|`[^`]*`)*)\]\((?!https?:|#|mailto:)(?P<where>[^)#\s]+)(?P<anchor>#[^)]*)?\)")


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


def guides_of(index):
    """The pages of docs/index.md, in its order: group -> pages."""
    groups = {title: [] for title in ("Start", "Tutorials", "Guides", "Tables", "Internals")}
    for line in index.read_text().splitlines():
        for page in re.findall(r"\]\(([\w/]+)\.md\)", line.split("|")[1] if line.startswith("| [") else ""):
            group = "Tutorials" if page.startswith("tutorials/") else next((title for title, pages in GROUPS.items() if page.startswith(pages)), "Guides")
            groups[group].append(f"docs/{page}")
    return groups


def write_reference(out, xml):
    classes = classes_of(xml)
    for room in ROOMS:
        lines = [f"# {room}", ""]
        for header in filter(is_public, sorted(pathlib.Path("tessera", room).rglob("*.h"))):
            about = []
            for line in header.read_text().splitlines()[1:]:
                if not line.startswith("//"):
                    break
                about.append(line[3:])
            lines += [f"## {header.relative_to('tessera').as_posix()}", "", "```text", *about, "```", "", "```{doxygenfile} " + header.as_posix()]
            lines += [":sections: briefdescription detaileddescription innernamespace func enum typedef var define user-defined", "```", ""]
            for kind, name in classes.get(header.as_posix(), []):
                lines += [f"```{{doxygen{kind}}} {name}", ":members:", ":undoc-members:", "```", ""]
        (out / f"{room}.md").write_text("\n".join(lines))


def write_examples(out):
    """A page for each, below the page that lists them."""
    pages = []
    for source in [*sorted(pathlib.Path("examples").glob("*.cpp")), *sorted(pathlib.Path("examples/python").glob("*.py"))]:
        language = "cpp" if source.suffix == ".cpp" else "python"
        pages.append(source.with_suffix(f".{source.suffix[1:]}.md"))
        (out / pages[-1]).parent.mkdir(parents=True, exist_ok=True)
        (out / pages[-1]).write_text(f"# {source.relative_to('examples')}\n\n```{language}\n{source.read_text().rstrip()}\n```\n")
    with (out / "docs/examples.md").open("a") as page:
        page.write("\n".join(["", "```{toctree}", ":hidden:", "", *(f"../{program.with_suffix('').as_posix()}" for program in pages), "```", ""]))


def settle_links(out):
    """Links to what the site has elsewhere lead there; of those to other files of the checkout the words stay."""

    def place(page, link):
        path = pathlib.PurePosixPath(os.path.normpath(page.parent.relative_to(out) / link))
        room = re.match(r"tessera/(\w+)/.*\.h$", str(path))
        known = [path, f"{path}.md", path / "index.md", path.parent / "index.md" if path.name == "python" else path]
        known += [f"reference/{room[1]}.md"] if room else ["index.md"] if str(path) == "README.md" else []
        found = next((out / one for one in known if (out / one).is_file()), None)
        return found and os.path.relpath(found, page.parent)

    def settled(page, link):
        words, where, anchor = link["words"], place(page, link["where"]), link["anchor"] or ""
        return f"[{words}]({where}{anchor})" if where else words

    for page in [path for path in out.rglob("*.md") if "reference" not in path.parts]:
        pieces = re.split(r"(^```.*?^```$)", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        pieces[::2] = [LINK.sub(lambda link: settled(page, link), piece) for piece in pieces[::2]]
        page.write_text("".join(pieces))


def main():
    out, xml = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    name_files_by_path(xml)
    show_designators(xml)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree("docs", out / "docs", ignore=shutil.ignore_patterns("conf.py", "Doxyfile"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/conf.py"):
        shutil.copy(name, out)
    for notebook in notebooks.write(out / notebooks.TUTORIALS, sorted(notebooks.TUTORIALS.glob("*.md"))):
        with notebook.with_suffix(".md").open("a") as page:
            page.write(f"\n{{download}}`Its Python as a notebook <{notebook.name}>`\n")
    rooms = sorted(pathlib.Path("tessera").glob("**/README.md"))
    for guide in rooms:
        (out / guide).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(guide, out / guide)
    (out / "reference/python").mkdir(parents=True)
    write_reference(out / "reference", xml)
    modules = python_reference.pages()
    for module, text in modules.items():
        (out / f"reference/python/{module}.md").write_text(text)
    write_examples(out)

    groups = guides_of(pathlib.Path("docs/index.md"))
    groups["Start"].insert(0, "docs/index")
    groups["Operators"] = sorted(f"docs/operators/{page.stem}" for page in pathlib.Path("docs/operators").glob("*.md"))
    groups["Reference"] = [f"reference/{room}" for room in ROOMS]
    groups["Python reference"] = [f"reference/python/{module}" for module in modules]
    groups["Internals"] = groups.pop("Internals") + ["CONTRIBUTING", "CHANGELOG", "SECURITY", *(guide.with_suffix("").as_posix() for guide in rooms)]
    readme = out / "README.md"
    index = [readme.read_text(), ""]
    for title, pages in groups.items():
        index += ["```{toctree}", ":hidden:", f":caption: {title}", ":maxdepth: 1", "", *pages, "```", ""]
    readme.unlink()
    (out / "index.md").write_text("\n".join(index))
    settle_links(out)


main()
