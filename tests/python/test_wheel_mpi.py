"""The wheel's MPI part, which is compiled on the machine that it is for. Of the other parts test_wheel.py."""

import re
import shutil

import pytest

from test_wheel import LIBRARY, PYTHON, python, run, wheel  # noqa: F401 (python and wheel are fixtures)


def test_the_mpi_part_is_compiled_for_this_machine(python, tmp_path):
    """For the MPI library that CMake finds; the wheel for other machines has none."""
    mpirun = shutil.which("mpirun")
    if not mpirun:
        pytest.skip("no MPI library with mpirun here")
    library = next(python.parent.parent.rglob(LIBRARY.removeprefix("lib/"))).parent / "libtessera_mpi.so"
    library.unlink(missing_ok=True)
    asks = "import tessera\ntry: tessera.init(backend='mpi')\nexcept tessera.NotAvailable as error: print(error)"
    assert "--build-mpi" in run(python, "-c", asks, cwd=tmp_path)
    assert "The backend is there" in run(python, "-m", "tessera", "--build-mpi", limit=600, cwd=tmp_path)
    assert library.exists()
    (record,) = library.parent.parent.parent.glob("tessera_sharding-*.dist-info/RECORD")
    assert record.read_text().count("/libtessera_mpi.so,") == 1  # pip uninstall takes it away
    (tmp_path / "program.py").write_text(PYTHON.replace("init(timeout=60)", "init(backend='mpi', timeout=60)"))
    as_root = ["env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMPI_MCA_rmaps_base_oversubscribe=1"]
    printed = run(*as_root, mpirun, "-n", 2, python, tmp_path / "program.py", cwd=tmp_path)
    assert sorted(re.findall(r"python rank \d of \d", printed)) == ["python rank 0 of 2", "python rank 1 of 2"]
