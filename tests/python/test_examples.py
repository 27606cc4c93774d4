"""The programs of examples/python, on real processes; each compares itself with one process."""

import pathlib
import subprocess

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples" / "python"


@pytest.mark.parametrize("program,ranks,says", [("groups", 4, "{'data': 2, 'domain': 2}"), ("field", 3, "rows [9, 2, 2]"), ("graph", 3, "ghosts on rank 0"), ("point_cloud", 3, "forces sum to zero"), ("parallel_groups", 4, "data 1 x pipeline 2 x model 2"), ("pipeline", 3, "skips [(1, 3)]"), ("sharded_training", 3, "{'data': 3, 'tensor': 1}"), ("sharded_training", 4, "{'data': 2, 'tensor': 2}"), ("vision_transformer", 3, "tokens [17, 8, 0], 4 messages")])
def test_example(request, warm_python, program, ranks, says):
    launcher = pathlib.Path(request.config.getoption("--launcher"))
    command = [launcher, "run", "-n", ranks, "--timeout", 150, "--", *warm_python, EXAMPLES / f"{program}.py"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{program}: " in done.stdout and says in done.stdout and "as on one process" in done.stdout


def test_a_checkpoint_goes_on_on_other_ranks(request, warm_python, tmp_path):
    launcher = pathlib.Path(request.config.getoption("--launcher"))
    for ranks, until, says in ((4, 4, "steps 0 to 4 on 4 ranks"), (3, 8, "steps 4 to 8 on 3 ranks, kept ['step-7', 'step-8']: as on one process")):
        command = [launcher, "run", "-n", ranks, "--timeout", 150, "--", *warm_python, EXAMPLES / "checkpoint.py", tmp_path, until]
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0 and says in done.stdout, done.stdout + done.stderr


def test_every_example_is_run_and_short():
    programs = sorted(EXAMPLES.glob("*.py"))
    assert [p.stem for p in programs] == ["checkpoint", "field", "graph", "groups", "parallel_groups", "pipeline", "point_cloud", "sharded_training", "vision_transformer"]
    # Those in C++ are run by tests/examples; trees, scatter, neighbourhood attention, vision transformers and groups have both.
    ladder = {"03_groups", "08_neighborhood_attention", "13_model_groups", "14_vision_transformer", "15_parallel_groups", "16_scatter"}
    programs += [p for p in EXAMPLES.parent.glob("*.cpp") if p.stem in ladder]
    assert len(programs) == 9 + len(ladder) and all(len(p.read_text().splitlines()) < 90 for p in programs)
