"""`torch.distributed.init_process_group("tessera")`: the backend for Python's own distributed training. Several hosts: test_c10d_hosts.py."""

import pathlib
import re
import subprocess
import sys

import pytest

import tessera
from test_processes import HERE, run, torchrun


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pythons_own_training_over_it_equals_gloo(warm_torchrun, ranks):
    done = warm_torchrun(ranks, "c10d_program.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank (\d) of \d: equal", done.stdout)) == [str(r) for r in range(ranks)]


def test_ranks_meet_anew_in_memory_at_a_store_that_remembers_them(tmp_path):
    """In one life, and after restarts by torchrun, whose agent keeps its store: of the second life one rank alone comes to the meeting."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 2, "--monitor-interval", 0.1]
    done = run(*launcher, HERE / "lives_program.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"life (\d) of rank (\d): shm, shm", done.stdout)) == [(life, rank) for life in "02" for rank in "01"], done.stdout + done.stderr


LIBRARY = next(pathlib.Path(tessera.__file__).parent.glob("lib*/libtessera_python.so"))


def test_the_library_alone_registers_it():
    done = torchrun(2, "library_program.py", LIBRARY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("without the package") == 2


@pytest.mark.parametrize("way", ["alone", "package"])
def test_loading_it_waits_for_no_thread_that_opens_libraries(way):
    program = pathlib.Path(__file__).with_name("loading_program.py")
    done = subprocess.run([sys.executable, program, LIBRARY, way], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "registered: True\n", done.stdout + done.stderr
