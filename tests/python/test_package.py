"""pip installs the package from the tree; what it installs needs nothing of the tree."""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent
PROGRAM = """
import torch, tessera
assert tessera.__file__.startswith({site!r}), tessera.__file__
mapped = [line.split()[-1] for line in open("/proc/self/maps") if "libtessera" in line]
assert mapped and all(path.startswith({site!r}) for path in mapped), set(mapped)
def body(rank):
    t = tessera.from_local(torch.ones(rank + 1), tessera.Mesh({{"x": 2}}), [tessera.Shard(0)])
    return t.sum().item()
assert tessera.run_threads(2, body) == [3.0, 3.0]
"""


def test_install_from_the_tree(tmp_path, request):
    build = pathlib.Path(request.config.getoption("--launcher")).resolve().parent.parent
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "python", tree / "python", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "build").mkdir()
    (tree / "build" / "release").symlink_to(build)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "--target", site, tree / "python"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(site=str(site))], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
