"""The command `tessera` of a wheel: it becomes the program that the wheel holds. A module of its own, since importing the package imports torch."""

import importlib.util
import os
import pathlib
import sys


def main():
    package = pathlib.Path(__file__).resolve().parent / "tessera"
    program = package / "bin" / "tessera"
    if not program.exists():
        sys.exit(f"tessera: {package} was packed without its programs: build the wheel with -DTESSERA_APPS=ON, or take that of `make wheel`")
    environment = dict(os.environ)
    torch = importlib.util.find_spec("torch")
    if sys.argv[1:2] == ["doctor"] and torch:
        # It links libtorch, which lies wherever this Python has it.
        paths = [str(pathlib.Path(torch.origin).parent / "lib"), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))
    os.execve(program, [str(program), *sys.argv[1:]], environment)
