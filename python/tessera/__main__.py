"""python -m tessera --cmake-dir: where things are, for builds that use the C++ library of this package; --build-mpi: its part for this machine's MPI."""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch

HERE = pathlib.Path(__file__).parent


def cmake_dir():
    """The folder of TesseraConfig.cmake: of the wheel, or of the build folder that holds this package."""
    installed = next(HERE.glob("lib*/cmake/Tessera/TesseraConfig.cmake"), HERE.parent.parent / "TesseraConfig.cmake")
    if not installed.exists():
        raise SystemExit(f"{HERE} has no CMake package")
    return installed.parent


def build_mpi():
    """Compiles libtessera_mpi.so, which the library loads where the backend is "mpi", with the MPI library that CMake finds, and puts it beside the library."""
    sources = HERE / "share" / "tessera" / "mpi"
    if not sources.exists():
        raise SystemExit(f"{HERE} is no installed package: build Tessera where CMake finds MPI (-DTESSERA_MPI=ON)")
    cmake = shutil.which("cmake")
    if cmake is None:
        raise SystemExit("no cmake in PATH: pip install cmake (3.25 or newer); a compiler of C++20 and make are needed too (Debian: g++ make)")
    library = next(HERE.glob("lib*/libtessera.so.*")).parent / "libtessera_mpi.so"
    if not os.access(library.parent, os.W_OK):
        raise SystemExit(f"{library.parent} cannot be written: run this as who installed the package, or install it into an environment of your own")
    torch_folder = pathlib.Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as build:
        for command in (
            [cmake, "-S", sources, "-B", build, f"-DTessera_DIR={cmake_dir()}", f"-DTESSERA_TORCH={torch_folder}"],
            [cmake, "--build", build, "--parallel", "2"],
            # What is there already serves until the new one has shown that it loads.
            [sys.executable, "-c", "import sys, ctypes, tessera; ctypes.CDLL(sys.argv[1])", f"{build}/{library.name}"],
        ):
            if subprocess.run([str(part) for part in command]).returncode:
                raise SystemExit("the MPI part was not built: what failed stands above")
        os.replace(f"{build}/{library.name}", library)
    # Of the package's files, so that pip takes it away with them.
    for record in HERE.parent.glob("tessera_sharding-*.dist-info/RECORD"):
        line = f"tessera/{library.relative_to(HERE)},,"
        if line.split(",")[0] not in {known.split(",")[0] for known in record.read_text().splitlines()}:
            record.write_text(record.read_text().rstrip("\n") + f"\n{line}\n")
    print("The backend is there, for programs that start from now on: ts.init(backend='mpi') under this MPI's own launcher.")


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tessera",
        description="Where the C++ library of this package is, and its part for MPI.",
        epilog='cmake -DTessera_DIR="$(python -m tessera --cmake-dir)" -DTESSERA_TORCH="$(python -m tessera --torch-dir)" ...',
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cmake-dir", action="store_true", help="the folder of TesseraConfig.cmake, for Tessera_DIR")
    what.add_argument("--torch-dir", action="store_true", help="the folder of torch, for TESSERA_TORCH")
    what.add_argument("--torch-version", action="store_true", help="the version of torch that the library was built with")
    what.add_argument("--build-mpi", action="store_true", help="compile the MPI part for the MPI library of this machine (MPI_HOME=folder: for that one)")
    asked = parser.parse_args()
    if asked.build_mpi:
        build_mpi()
    elif asked.cmake_dir:
        print(cmake_dir())
    elif asked.torch_dir:
        print(pathlib.Path(torch.__file__).parent)
    else:
        print((HERE / "torch_version.txt").read_text().strip())


main()
