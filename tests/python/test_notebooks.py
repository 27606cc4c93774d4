"""The tutorials' notebooks (scripts/notebooks.py), each in a kernel of Jupyter: what comes out is what the page says."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notebooks, printed = module_of(pathlib.Path("scripts/notebooks.py")), module_of(pathlib.Path("tests/docs/printed.py"))
PAGES = {page.stem: notebooks.cells_of(page) for page in sorted((ROOT / "docs/tutorials").glob("*.md"))}


def wrong(cells, notebook):
    """Of each cell that shows other things than its page says: its code, and what came out."""
    found = []
    for cell, ran in zip(cells, notebook["cells"], strict=True):
        outputs = ran.get("outputs", [])
        text = "".join(out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in outputs)
        drawn = any({"text/html", "image/svg+xml"} & out.get("data", {}).keys() for out in outputs)
        if (text.strip() if not cell.mark else not printed.re.fullmatch(printed.pattern(cell.shown), printed.plain(text))) or drawn != (cell.mark == "draws"):
            found.append(f"{cell.source}\nshows, {'with' if drawn else 'without'} a picture:\n{text}")
    return found


@pytest.mark.parametrize("page", [name for name, cells in PAGES.items() if cells])
def test_a_kernel_shows_what_the_page_says(page):
    assert not wrong(PAGES[page], notebooks.run(notebooks.notebook_of(ROOT / f"docs/tutorials/{page}.md"))), page


def test_every_tutorial_has_one_but_that_of_a_program_of_cpp():
    assert [name for name, cells in PAGES.items() if not cells] == ["01_winds"]
    kinds = [cell.mark for cells in PAGES.values() for cell in cells]
    assert kinds.count("draws") >= 5 and kinds.count("shows") >= 12


PAGE = """# A page
Words with [a link](other.md).
```cpp
# no heading
```
## In C++
Nothing of it.
## In Python
<!-- a comment -->
```python
print("one")
```

<!-- shows -->
```text
%s
```
"""


def test_what_a_notebook_takes_of_a_page_and_what_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    for shown, good in [("one", True), ("on...", True), ("two", False)]:
        page.write_text(PAGE % shown)
        cells = notebooks.cells_of(page)
        assert [(cell.code, cell.source) for cell in cells] == [(False, "# A page"), (False, "## In Python"), (True, 'print("one")\n')]
        notebook = notebooks.notebook_of(page)
        notebook["cells"][2]["outputs"][0]["text"] = "one\n"
        assert bool(wrong(cells, notebook)) != good
        notebook["cells"][2]["outputs"].append({"data": {"text/html": "<p>"}})
        assert wrong(cells, notebook)
    page.write_text("# A page\n```cpp\n```\n")
    assert not notebooks.cells_of(page) and notebooks.write(tmp_path / "out", [page]) == []
