"""python -m tessera --cmake-dir: where things are, for builds that use the C++ library of this package."""

import argparse
import pathlib

import torch

HERE = pathlib.Path(__file__).parent


def cmake_dir():
    """The folder of TesseraConfig.cmake: of the wheel, or of the build folder that holds this package."""
    installed = next(HERE.glob("lib*/cmake/Tessera/TesseraConfig.cmake"), HERE.parent.parent / "TesseraConfig.cmake")
    if not installed.exists():
        raise SystemExit(f"{HERE} has no CMake package")
    return installed.parent


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tessera",
        description="Where the C++ library of this package is.",
        epilog='cmake -DTessera_DIR="$(python -m tessera --cmake-dir)" -DTESSERA_TORCH="$(python -m tessera --torch-dir)" ...',
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cmake-dir", action="store_true", help="the folder of TesseraConfig.cmake, for Tessera_DIR")
    what.add_argument("--torch-dir", action="store_true", help="the folder of torch, for TESSERA_TORCH")
    what.add_argument("--torch-version", action="store_true", help="the version of torch that the library was built with")
    asked = parser.parse_args()
    if asked.cmake_dir:
        print(cmake_dir())
    elif asked.torch_dir:
        print(pathlib.Path(torch.__file__).parent)
    else:
        print((HERE / "torch_version.txt").read_text().strip())


main()
