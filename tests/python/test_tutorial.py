"""What the pages say that programs in Python print; the cells of tutorials are run by test_notebooks.py."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def printed():
    spec = importlib.util.spec_from_file_location("printed", ROOT / "tests" / "docs" / "printed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["02_python", "04_domain"])
def test_what_the_page_says_is_printed(request, warm_python, page):
    programs = pathlib.Path(request.config.getoption("--launcher")).resolve().parent
    wrong, compared = printed().check(ROOT / "docs" / "tutorials" / f"{page}.md", ROOT, programs, [str(word) for word in warm_python], only_python=True)
    assert not wrong and compared > 0, "\n".join(wrong)


# Outputs of programs, and quotes of files, that a page has at least; `text` that is neither, and no cell's: a line of code.
COMPARED = {
    "01_winds": (2, 0, 0),
    "02_python": (1, 1, 1),
    "03_groups": (6, 4, 0),
    "04_domain": (5, 5, 0),
    "05_shard_tensor": (6, 0, 0),
    "06_fully_sharded": (4, 0, 0),
    "07_insitu": (2, 3, 0),
    "08_classification": (1, 0, 0),
    "09_loading": (5, 2, 0),
    "10_resume": (4, 0, 0),
    "11_strategy": (4, 0, 0),
    "12_pipelines": (4, 0, 0),
}


@pytest.mark.parametrize("page", COMPARED)
def test_what_a_page_shows_is_compared(page):
    """A mark that is lost or misspelt would leave the page without its comparison, and nothing else would say so."""
    path = ROOT / "docs" / "tutorials" / f"{page}.md"
    kinds = [kind for kind, *_ in printed().blocks(path)]
    prints, quotes, others = COMPARED[page]
    assert kinds.count("prints") >= prints and kinds.count("from") >= quotes
    text = path.read_text()
    marked = len(re.findall(r"^<!-- (?:shows|draws|(?:prints:|from|file:) .+) -->\n\n?```text$", text, re.MULTILINE))
    assert len(re.findall("^```text$", text, re.MULTILINE)) - marked == others
    assert text.count("<!-- prints") + text.count("<!-- from") + text.count("<!-- file") == len(kinds)


def test_a_page_that_is_wrong_is_noticed(tmp_path):
    module, page = printed(), tmp_path / "page.md"
    (tmp_path / "code.cpp").write_text("int main() {\n  return 0;\n}\n")
    says = f"<!-- prints: {sys.executable} -c 'print(\"off by 3e-16\\nlast\")' -->\n```text\n%s\n```\n"
    for text, good in [("off by 1.5e-16\nlast", True), ("off by 0\nlast", True), ("off by 0.5\nlast", False), ("...\nlast", True), ("off ...\nlast", True), ("off by 1.5e-16", False), ("off by 3e-16\nother", False)]:
        page.write_text(says % text)
        wrong, compared = module.check(page, tmp_path, tmp_path)
        assert compared == 1 and bool(wrong) != good, (text, wrong)
    for code, good in [("return 0;", True), ("int main() {\n// ...\n}", True), ("return 1;", False), ("}\n// ...\nint main() {", False)]:
        page.write_text(f"<!-- from code.cpp -->\n```c++\n{code}\n```\n")
        assert bool(module.check(page, tmp_path, tmp_path)[0]) != good, code


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_quick_start(request, warm_python, tmp_path, ranks):
    text = (ROOT / "docs" / "start_pytorch.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (output,) = re.findall(r"^```text\n(step 0: .*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    launcher = pathlib.Path(request.config.getoption("--launcher")).resolve()
    command = [str(launcher), "run", "-n", str(ranks), "--timeout", "150", "--", *map(str, warm_python), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and re.sub(r"^\[\d+\] ", "", done.stdout, flags=re.MULTILINE) == output, done.stdout + done.stderr
