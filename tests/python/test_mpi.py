"""A program that calls MPI itself, by mpi4py."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_communicator_of_the_program_is_the_world(ranks):
    mpirun = shutil.which("mpirun")
    if not mpirun:
        pytest.skip("no MPI library with mpirun here")
    # By mpi4py, which ends the job where a rank fails.
    command = [mpirun, "-n", str(ranks), sys.executable, "-m", "mpi4py", pathlib.Path(__file__).with_name("mpi_program.py")]
    done = subprocess.run(command, env={**os.environ, **AS_ROOT}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank \d is right", done.stdout)) == [f"rank {r} is right" for r in range(ranks)]
