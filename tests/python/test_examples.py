"""The programs of examples/python, on real processes; each compares itself with one process."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples" / "python"


@pytest.mark.parametrize("program,ranks,says", [("groups", 4, "{'data': 2, 'domain': 2}"), ("groups", 2, "{'data': 1, 'domain': 2}"), ("groups", 8, "{'data': 4, 'domain': 2}"), ("field", 3, "rows [9, 2, 2]"), ("graph", 1, "60 of 60 nodes and 0 ghosts"), ("graph", 3, "ghosts on rank 0"), ("parallel_groups", 4, "data 1 x pipeline 2 x model 2"), ("vision_transformer", 1, "tokens [25]"), ("vision_transformer", 3, "tokens [17, 8, 0], 4 messages")])
def test_example(request, program, ranks, says):
    launcher = pathlib.Path(request.config.getoption("--launcher"))
    command = [launcher, "run", "-n", ranks, "--timeout", 80, "--", sys.executable, EXAMPLES / f"{program}.py"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{program}: " in done.stdout and says in done.stdout and "as on one process" in done.stdout


def test_every_example_is_run_and_short():
    programs = sorted(EXAMPLES.glob("*.py"))
    assert [p.stem for p in programs] == ["field", "graph", "groups", "parallel_groups", "vision_transformer"]
    # Those in C++ are run by tests/examples; trees, scatter, neighbourhood attention, vision transformers and groups have both.
    ladder = {"03_groups", "08_neighborhood_attention", "13_model_groups", "14_vision_transformer", "15_parallel_groups", "16_scatter"}
    programs += [p for p in EXAMPLES.parent.glob("*.cpp") if p.stem in ladder]
    assert len(programs) == 5 + len(ladder) and all(len(p.read_text().splitlines()) < 90 for p in programs)
