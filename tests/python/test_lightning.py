"""Lightning's Trainer on real ranks; skipped where Lightning is not installed."""

import importlib
import importlib.util
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="the package lightning is not installed (scripts/bootstrap --python)")
def test_each_strategy_trains_as_one_process(request, warm_python, tmp_path):
    launcher = pathlib.Path(request.config.getoption("--launcher"))
    done = subprocess.run(
        [str(word) for word in (launcher, "run", "-n", 4, "--timeout", 150, "--", *warm_python, HERE / "lightning_program.py", tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of 4: as one process") == 4


def test_without_lightning_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "tessera.lightning", raising=False)
    with pytest.raises(ImportError, match="pip install 'lightning"):
        importlib.import_module("tessera.lightning")
