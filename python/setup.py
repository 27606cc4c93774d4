"""Puts the built libraries beside the modules: those of build/release of this tree."""

import pathlib
import shutil

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

BUILD = pathlib.Path(__file__).resolve().parent.parent / "build" / "release"
LIBRARIES = ["python/tessera/lib/libtessera_python.so", "lib/libtessera.so.0", "lib/libtessera_base.so.0"]


class WithLibraries(build_py):
    def run(self):
        super().run()
        missing = [name for name in LIBRARIES if not (BUILD / name).exists()]
        if missing:
            raise SystemExit(f"{BUILD} has no {', '.join(missing)}: run `make` first")
        to = pathlib.Path(self.build_lib) / "tessera" / "lib"
        to.mkdir(parents=True, exist_ok=True)
        for name in LIBRARIES:
            shutil.copy(BUILD / name, to)  # what links point to


class Binary(Distribution):
    def has_ext_modules(self):
        return True  # the wheel is of this platform


setup(cmdclass={"build_py": WithLibraries}, distclass=Binary)
