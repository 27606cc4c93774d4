"""Puts the built libraries beside the modules: what `cmake --install` gives of the build folder (default: build/release of this tree)."""

import pathlib
import shutil
import subprocess
import tempfile

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

BUILD = pathlib.Path(__file__).resolve().parent.parent / "build" / "release"


class WithLibraries(build_py):
    def run(self):
        super().run()
        if not (BUILD / "python" / "tessera" / "lib" / "libtessera_python.so").exists():
            raise SystemExit(f"{BUILD} holds no build with the Python library: run `make` first")
        to = pathlib.Path(self.build_lib) / "tessera" / "lib"
        to.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as prefix:
            subprocess.run(["cmake", "--install", BUILD, "--prefix", prefix, "--component", "tessera"], check=True, stdout=subprocess.DEVNULL)
            found = {path.name: path for path in pathlib.Path(prefix).glob("lib*/**/libtessera*.so*")}
            for name in ("libtessera_python.so", "libtessera.so.0", "libtessera_base.so.0"):
                shutil.copy(found[name], to / name)  # follows links


class Binary(Distribution):
    def has_ext_modules(self):
        return True  # the wheel is of this platform


setup(cmdclass={"build_py": WithLibraries}, distclass=Binary)
