"""typed.py FOLDER: every documented program of Python, as files of FOLDER, judged by mypy --strict and by pyright's rules (`make types`).

What torch itself leaves without types (Tensor.backward is one) is not held against a program.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Pages whose blocks of Python are one program; elsewhere blocks are pieces of a reader's own.
PAGES = ["docs/start_pytorch.md", *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs/tutorials").glob("*.md")) if "\n```python\n" in page.read_text())]


def programs(folder):
    """The examples and the programs of pages, copied to `folder`; a page is a file of its name."""
    found = [folder / path.name for path in sorted((ROOT / "examples/python").glob("*.py"))]
    for path in found:
        shutil.copyfile(ROOT / "examples/python" / path.name, path)
    found.append(folder / "new.py")  # what `tessera new` writes
    shutil.copyfile(ROOT / "apps/tessera/skeleton/python/train.py", found[-1])
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
        found.append(folder / f"page_{pathlib.Path(page).stem}.py")
        found[-1].write_text("\n".join(blocks))
    return found


def mypy(folder, files):
    """What mypy says; the package is read where it is kept, so that nothing needs to be built."""
    options = ["--strict", "--untyped-calls-exclude=torch", f"--cache-dir={folder / 'cache'}", "--no-error-summary"]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, "-m", "mypy", *options, *map(str, files)], capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode < 2, done.stdout + done.stderr
    return done.stdout


def pyright(folder):
    """What pyright's standard rules say, by basedpyright, whose wheel brings all that it runs."""
    environment = pathlib.Path(sys.prefix)
    (folder / "pyrightconfig.json").write_text(
        f'{{"include": ["."], "extraPaths": ["{ROOT / "python"}"], "venvPath": "{environment.parent}", "venv": "{environment.name}", "typeCheckingMode": "standard"}}'
    )
    done = subprocess.run([sys.executable, "-m", "basedpyright", "-p", str(folder)], capture_output=True, text=True, cwd=folder)
    return "" if done.returncode == 0 else done.stdout + done.stderr


if __name__ == "__main__":
    place = pathlib.Path(sys.argv[1]).resolve()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    files = programs(place)
    said = mypy(place, files) + pyright(place)
    print(said or f"types: {len(files)} programs, nothing to say")
    sys.exit(bool(said))
