"""debian.py BUILD TORCH COMPILER: the Debian packages of a build (scripts/deb), unpacked, used and, as root, installed and removed."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASE = """
#include <tessera/mesh/mesh.h>
#include <cstdio>
int main() {
  const tessera::Mesh mesh({{"data", 2}, {"model", 3}});
  std::printf("%d ranks\\n", mesh.size());
}
"""


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=100, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def files_of(package):
    return {line.split(None, 5)[5].split(" -> ")[0] for line in run("dpkg-deb", "-c", package).splitlines() if not line.endswith("/")}


def main():
    build, torch, compiler = sys.argv[1:4]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        run(ROOT / "scripts" / "deb", build, folder / "debs", "-Zgzip", "-z1")
        base, whole = sorted((folder / "debs").glob("*.deb"), key=lambda file: "base" not in file.name)
        assert files_of(base).isdisjoint(files_of(whole)) and "./usr/bin/tessera" in files_of(base), files_of(base)
        assert re.search(r"^Depends: .*\btessera-base \(= ", run("dpkg-deb", "-I", whole).replace("\n ", "\n"), re.MULTILINE)

        # Without libtorch: the program, and one that is compiled.
        first = folder / "first"
        run("dpkg-deb", "-x", base, first)
        assert run(first / "usr/bin/tessera", "--version").startswith("tessera ")
        assert "[1] hello" in run(first / "usr/bin/tessera", "run", "-n", 2, "--", "echo", "hello")
        (folder / "base.cpp").write_text(BASE)
        packages = {**os.environ, "PKG_CONFIG_PATH": str(next(first.rglob("pkgconfig")))}
        flags = run("pkg-config", "--cflags", "--libs", "tessera-base", env=packages).split()
        run(compiler, folder / "base.cpp", "-o", folder / "program", *flags)
        assert run(folder / "program") == "6 ranks\n"
        assert "torch" not in run("ldd", folder / "program")

        # Both: nothing is looked for in a folder of the machine that made them, and CMake finds the library.
        both = folder / "both"
        for package in (base, whole):
            run("dpkg-deb", "-x", package, both)
        for file in both.rglob("*"):
            if file.suffix in (".pc", ".cmake"):
                text = file.read_text()
            elif file.is_file() and (".so" in file.name or "bin" in file.parts):
                text = run("readelf", "-d", "--wide", file)
            else:
                continue
            named = [place for place in (ROOT, build, torch) if f"{place}/" in text]
            assert not named, (file, named)
        cmake = next(both.rglob("TesseraConfig.cmake")).parent
        consumer = ROOT / "tests" / "package" / "consumer"
        run("cmake", "-S", consumer, "-B", folder / "configured", f"-DTessera_DIR={cmake}", f"-DTESSERA_TORCH={torch}", f"-DCMAKE_CXX_COMPILER={compiler}")

        if os.geteuid() != 0:
            print("skipped: installing and removing need root")
            sys.exit(77)
        system = folder / "system"
        (system / "var/lib/dpkg/updates").mkdir(parents=True)
        (system / "var/lib/dpkg/info").mkdir()
        for file in ("status", "available"):
            (system / "var/lib/dpkg" / file).touch()
        dpkg = ("dpkg", f"--root={system}", "--force-depends", "--log=/dev/null")
        run(*dpkg, "--install", base, whole)
        assert (system / "usr/bin/tessera-doctor").exists()
        run(*dpkg, "--purge", "tessera", "tessera-base")
        left = [file for file in system.rglob("*") if file.is_file() and "dpkg" not in file.parts]
        assert not left, left


main()
