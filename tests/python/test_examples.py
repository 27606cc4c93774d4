"""The ladder of examples/python, on real processes; each program compares itself with one process."""

import pathlib
import subprocess

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples" / "python"
# Program, ranks, what it says. 10_resume has arguments, and a test of its own.
LADDER = [
    ("01_quickstart", 3, "on 3 ranks"),
    ("02_uneven_batches", 3, "samples [0, 5, 10]"),
    ("03_groups", 4, "{'data': 2, 'domain': 2}"),
    ("04_domain_unet", 3, "rows [18, 4, 4]"),
    ("05_tensor_parallel", 3, "heads [2, 2, 1]"),
    ("06_fully_sharded", 3, "{'data': 3, 'tensor': 1}"),
    ("06_fully_sharded", 4, "{'data': 2, 'tensor': 2}"),
    ("07_solver_halo", 3, "rows [1, 3, 8]"),
    ("08_neighborhood_attention", 3, "rows [9, 2, 2]"),
    ("09_loading", 4, "{'data': 2, 'model': 2}"),
    ("11_training", 3, "12 steps on 3 ranks"),
    ("12_pipeline", 3, "skips [(1, 3)]"),
    ("13_model_groups", 4, "domain 2 x replicas 2"),
    ("14_vision_transformer", 3, "tokens [17, 8, 0], 4 messages"),
    ("15_parallel_groups", 4, "data 1 x pipeline 2 x model 2"),
    ("16_scatter", 3, "rows [5, 0, 4]"),
    ("16_scatter", 4, "{'data': 2, 'domain': 2}"),
    ("17_graph", 3, "ghosts on rank 0"),
    ("19_experts", 3, "{'data': 1, 'expert': 3}"),
    ("19_experts", 4, "{'data': 2, 'expert': 2}"),
    ("20_two_towers", 4, "{'data': 2, 'table': 2}"),
    ("21_point_cloud", 3, "forces sum to zero"),
]


@pytest.fixture
def run(request, warm_python):
    def start(ranks, program, *arguments):
        launcher = pathlib.Path(request.config.getoption("--launcher"))
        command = [launcher, "run", "-n", ranks, "--timeout", 150, "--", *warm_python, EXAMPLES / f"{program}.py", *arguments]
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return start


@pytest.mark.parametrize("program,ranks,says", LADDER)
def test_example(run, program, ranks, says):
    said = run(ranks, program)
    assert f"{program[3:]}: " in said and says in said and "as on one process" in said


def test_a_checkpoint_goes_on_on_other_ranks(run, tmp_path):
    for ranks, until, says in ((4, 4, "steps 0 to 4 on 4 ranks"), (3, 8, "steps 4 to 8 on 3 ranks, kept ['step-7', 'step-8']: as on one process")):
        assert says in run(ranks, "10_resume", tmp_path, until)


def test_the_ladder_is_that_of_cpp():
    """By number and name, each run by a test and short; docs/examples.md says why what one language lacks is not there."""
    found = {language: {p.stem: p for p in EXAMPLES.parent.glob(pattern)} for language, pattern in (("C++", "*.cpp"), ("Python", "python/*.py"))}
    assert found["C++"].keys() - found["Python"].keys() == {"18_configuration"} and not found["Python"].keys() - found["C++"].keys()
    assert found["Python"].keys() == {program for program, *_ in LADDER} | {"10_resume"}
    written = lambda path: sum(bool(line.strip()) for line in path.read_text().splitlines())  # noqa: E731
    assert all(written(path) < 60 for path in found["Python"].values())
    page = (EXAMPLES.parent.parent / "docs" / "examples.md").read_text()
    for language, programs in found.items():
        for path in programs.values():
            assert f"(../{path.relative_to(EXAMPLES.parent.parent)})" in page, (language, path.stem)
