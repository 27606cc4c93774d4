"""Loads libtessera_python, which registers the operators and classes of `torch.ops.tessera` and `torch.classes.tessera`."""

import pathlib

import torch

HERE = pathlib.Path(__file__).parent


def _load():
    library = next(HERE.glob("lib*/libtessera_python.so"), None)
    version = HERE / "torch_version.txt"
    if library is None or not version.exists():
        raise ImportError(f"{HERE} has no library: build the project (`make`) and use build/release/python, or install what `pip wheel ./python` makes")
    built_with, running = version.read_text().strip(), torch.__version__.split("+")[0]
    # Before the library is opened: of another version it would name symbols that are not there.
    if built_with.split(".")[:2] != running.split(".")[:2]:
        minor = ".".join(built_with.split(".")[:2])
        raise ImportError(f"tessera was built with torch {built_with} and this is torch {running}: pip install 'torch=={minor}.*', or build the wheel again with this one")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:  # netCDF, HDF5, zlib, zstd, blosc, METIS, YAML, hwloc: those of the machine on which it was built
        raise ImportError(f"tessera's library needs what is not here: {error.__cause__ or error}; install it, or build the wheel on this machine (pip wheel ./python)") from error


_load()
ops = torch.ops.tessera
classes = torch.classes.tessera
