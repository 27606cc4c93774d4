"""The tutorials as notebooks: of each page the sections that have cells of Python, with what the page says that they show.

usage: notebooks.py FOLDER          (from the root of the checkout; cells have the outputs of the page)
       notebooks.py FOLDER --run    (each runs in a kernel of Jupyter, and has what came out)

On a page `<!-- shows -->` stands before the block of what the cell above it prints, `<!-- draws -->` where a notebook has a picture or a table in its place.
"""

import argparse
import json
import os
import pathlib
import re
import tempfile
from dataclasses import dataclass

TUTORIALS = pathlib.Path("docs/tutorials")
PIECE = re.compile(r"(?:^<!-- (?P<mark>shows|draws) -->\n+)?^```(?P<kind>\S*)\n(?P<text>.*?)^```$|^#+ [^\n]*", re.MULTILINE | re.DOTALL)


@dataclass
class Cell:
    code: bool
    source: str
    mark: str = ""
    shown: str = ""

    def json(self):
        lines = self.source.strip("\n").splitlines(keepends=True)
        if not self.code:
            return {"cell_type": "markdown", "metadata": {}, "source": lines}
        outputs = [{"output_type": "stream", "name": "stdout", "text": self.shown.splitlines(keepends=True)}] if self.mark == "shows" else []
        return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": outputs, "source": lines}


def _say(cells, text):
    """Without comments, and without links into the checkout, where a notebook does not lie."""
    text = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)).strip()
    if text and cells and not cells[-1].code:
        cells[-1].source += f"\n\n{text}"
    elif text:
        cells.append(Cell(False, text))


def cells_of(page):
    """None, of a page without Python."""
    text, at, sections = page.read_text(), 0, [[]]
    for piece in PIECE.finditer(text):
        _say(sections[-1], text[at : piece.start()])
        at = piece.end()
        if piece["text"] is None:
            sections.append([Cell(False, piece.group())])
        elif piece["kind"] == "python":
            sections[-1].append(Cell(True, piece["text"]))
        elif piece["mark"]:
            of = next(cell for cell in reversed(sections[-1]) if cell.code)
            of.mark, of.shown = piece["mark"], piece["text"]
        else:
            _say(sections[-1], piece.group())
    _say(sections[-1], text[at:])
    taken = [section for section in sections if any(cell.code for cell in section)]
    if taken and taken[0] is not sections[1]:
        taken.insert(0, sections[1][:1])
        taken[0][0].source = taken[0][0].source.partition("\n")[0]
    return [cell for section in taken for cell in section]


def notebook_of(page):
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}
    return {"cells": [cell.json() for cell in cells_of(page)], "metadata": about, "nbformat": 4, "nbformat_minor": 4}


def run(notebook, timeout=120):
    """In a kernel of its own, `timeout` seconds a cell; returns the notebook with its outputs."""
    import jupyter_client
    import nbclient
    import nbformat

    with tempfile.TemporaryDirectory() as folder:  # of its sockets: a port could be read by others

        class Kernel(jupyter_client.AsyncKernelManager):
            def __init__(self, **given):
                super().__init__(transport="ipc", ip=f"{folder}/kernel", **given)

        # By its class, not an object: a kernel that was given is not ended.
        client = nbclient.NotebookClient(nbformat.reads(json.dumps(notebook), as_version=4), timeout=timeout, kernel_name="python3", kernel_manager_class=Kernel)
        # Nothing is written into the home of who runs it.
        return client.execute(env={**os.environ, "IPYTHONDIR": folder})


def write(folder, pages, finish=lambda notebook: notebook):
    """Those of the pages that have cells; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for page in pages:
        if cells_of(page):
            written.append(folder / f"{page.stem}.ipynb")
            written[-1].write_text(json.dumps(finish(notebook_of(page)), indent=1) + "\n")
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The tutorials that have Python as notebooks.")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--run", action="store_true", help="with what their cells print")
    given = parser.parse_args()
    for path in write(given.folder, sorted(TUTORIALS.glob("*.md")), run if given.run else lambda notebook: notebook):
        print(path)
