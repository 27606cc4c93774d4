"""Real processes: under torchrun, and under `tessera run`."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


def run(*command, limit=200):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=limit)


def torchrun(ranks, program, *arguments):
    return run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, HERE / program, *arguments)


@pytest.mark.parametrize("ranks", [1, 3])
def test_torchrun(ranks):
    done = torchrun(ranks, "ranks_program.py")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"rank (\d) of (\d): loss ([\d.]+)", done.stdout)
    assert sorted(r for r, _, _ in lines) == [str(r) for r in range(ranks)] and len({loss for _, _, loss in lines}) == 1


def test_tessera_run(request):
    launcher = pathlib.Path(request.config.getoption("--launcher"))
    if not launcher.exists():
        pytest.fail(f"{launcher} is missing: build the target tessera_cli")
    done = run(launcher, "run", "-n", 2, "--timeout", 150, "--", sys.executable, HERE / "ranks_program.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 of 2" in done.stdout


def test_alone_without_a_launcher():
    done = run(sys.executable, HERE / "ranks_program.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_ranks_that_do_not_come_are_waited_for_as_long_as_is_said():
    program = "import tessera as ts\ntry:\n    ts.init(timeout=1.5)\nexcept ts.Error as error:\n    print(type(error).__name__, error)"
    with socket.socket() as taken:  # where nobody listens
        taken.bind(("127.0.0.1", 0))
        place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110, env={**os.environ, **place})
    assert done.returncode == 0 and "RendezvousError" in done.stdout and "within 1500 ms" in done.stdout, done.stdout + done.stderr


def test_a_rank_that_raises_ends_the_job(warm_torchrun):
    done = warm_torchrun(2, "failing_program.py")  # within 200 s, and not after its 300
    assert done.returncode != 0 and "rank 1 has had enough" in done.stderr


def test_the_others_are_told_what_a_rank_ended_by(request, warm_python):
    launcher = pathlib.Path(request.config.getoption("--launcher"))
    done = run(launcher, "run", "-n", 3, "--timeout", 150, "--linger", 20, "--", *warm_python, HERE / "failing_program.py")
    told = re.findall("told: (.*)", done.stdout)
    assert len(told) == 2 and all("rank 1 failed: its program ended by ValueError: rank 1 has had enough" in text for text in told), done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [3])
def test_an_error_of_one_rank_is_caught_by_all(warm_torchrun, ranks):
    done = warm_torchrun(ranks, "recovering_program.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("goes on") == ranks


def test_a_loss_that_one_rank_alone_prints_is_told(request, warm_python):
    launcher = pathlib.Path(request.config.getoption("--launcher"))
    done = run(launcher, "run", "-n", 2, "--timeout", 150, "--", *warm_python, HERE / "lone_item_program.py")
    assert "loss" not in re.sub("rank . is told.*", "", done.stdout) and "at the end" not in done.stdout
    told = re.findall("rank ([01]) is told: (.*)", done.stdout)
    assert {rank for rank, _ in told} == {"0", "1"}, done.stdout + done.stderr
    assert all("item() of []" in text and "rank 0" in text and "rank 1" in text for _, text in told), told


def test_nodes_of_a_tree_have_their_backends_and_limits(request, warm_python):
    launcher = pathlib.Path(request.config.getoption("--launcher"))
    done = run(launcher, "run", "-n", 4, "--timeout", 150, "--", *warm_python, HERE / "backends_program.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("gloo and shm") == 4


@pytest.mark.parametrize("ranks", [3])
def test_second_derivatives_of_a_ring(request, warm_python, ranks):
    launcher = pathlib.Path(request.config.getoption("--launcher"))
    done = run(launcher, "run", "-n", ranks, "--timeout", 150, "--", *warm_python, HERE / "ring_program.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"of {ranks}: 4 second derivatives") == ranks
