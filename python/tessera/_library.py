"""Loads libtessera_python, which registers the operators and classes of `torch.ops.tessera` and `torch.classes.tessera`."""

import pathlib

import torch

_FOLDER = pathlib.Path(__file__).parent / "lib"
_LIBRARY = _FOLDER / "libtessera_python.so"


def _load():
    if not _LIBRARY.exists():
        raise ImportError(
            f"{_LIBRARY} is missing: build the project (`make`) and use build/release/python, or `pip install ./python` after the build"
        )
    torch.ops.load_library(str(_LIBRARY))
    built_with = torch.ops.tessera.built_with()
    running = torch.__version__.split("+")[0]
    if built_with != running:
        raise ImportError(f"{_LIBRARY} was built with libtorch {built_with}, and this is torch {running}: build it with this one")


_load()
ops = torch.ops.tessera
classes = torch.classes.tessera
