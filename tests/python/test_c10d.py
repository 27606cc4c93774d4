"""`torch.distributed.init_process_group("tessera")`: the backend for Python's own distributed training. Several hosts: test_c10d_hosts.py."""

import pathlib
import re

import pytest

import tessera
from test_processes import torchrun


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pythons_own_training_over_it_equals_gloo(ranks):
    done = torchrun(ranks, "c10d_program.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank (\d) of \d: equal", done.stdout)) == [str(r) for r in range(ranks)]


def test_the_library_alone_registers_it():
    library = next(pathlib.Path(tessera.__file__).parent.glob("lib*/libtessera_python.so"))
    done = torchrun(2, "library_program.py", library)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("without the package") == 2
