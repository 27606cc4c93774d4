"""recipes.py SOURCE: the recipes of other package managers have the version of CMakeLists.txt and the sum of the sources, and name options that there are."""

import ast
import hashlib
import pathlib
import re
import subprocess
import sys
import tempfile
import types

source = pathlib.Path(sys.argv[1])


def spack(text, **chosen):
    """What a recipe of spack says: its directives, and the arguments that it gives CMake. Spack's functions are stood in for."""
    said = []
    package = types.ModuleType("spack.package")
    for name in ("license", "version", "variant", "generator", "extends", "depends_on", "conflicts"):
        setattr(package, name, lambda *words, name=name, **more: said.append((name, words, more)))
    package.run_after = lambda phase: lambda function: function
    package.join_path = lambda *parts: "/".join(parts)

    class CMakePackage:
        def define(self, name, value):
            return f"-D{name}={value}"

        def define_from_variant(self, name, variant):
            return self.define(name, chosen[variant])

    cmake = types.ModuleType("spack_repo.builtin.build_systems.cmake")
    cmake.CMakePackage = CMakePackage
    sys.modules.update({name: types.ModuleType(name) for name in ("spack", "spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems")})
    sys.modules.update({package.__name__: package, cmake.__name__: cmake})
    recipe = {}
    exec(compile(text, "package.py", "exec"), recipe)  # noqa: S102: the checkout's own

    class Spec(dict):
        def satisfies(self, wanted):
            return chosen[wanted[1:]] == (wanted[0] == "+")

    one = recipe["Tessera"]()
    one.spec = Spec({"py-torch": types.SimpleNamespace(prefix="/torch"), "python": types.SimpleNamespace(package=types.SimpleNamespace(platlib="lib/python"))})
    return said, one.cmake_args()


def main():
    version = re.search(r"project\(Tessera VERSION (\S+)", (source / "CMakeLists.txt").read_text())[1]
    known = set()
    for file in (source / "CMakeLists.txt", *(source / "cmake").glob("*.cmake")):
        known |= set(re.findall(r"(?:option|set)\((TESSERA_\w+)", file.read_text()))
    parts = {part.upper() for file in (source / "tessera").glob("*/CMakeLists.txt") for part in re.findall(r"tessera_part\(\s*(\w+)", file.read_text())}
    known |= {f"TESSERA_{part}_INCLUDE" for part in parts} | {"TESSERA_TORCH"}  # of TesseraTorch.cmake
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        archive = folder / "sources.tar.gz"
        archive.write_bytes(b"the sources")
        subprocess.run([source / "scripts/recipes", archive, folder / "made"], check=True, timeout=60)
        texts = {str(path.relative_to(folder / "made")): path.read_text() for path in (folder / "made").rglob("*") if path.is_file()}
    assert set(texts) == {"conda-forge/recipe.yaml", "container/Containerfile", "spack/package.py"}, set(texts)
    total = hashlib.sha256(b"the sources").hexdigest()
    for path, text in texts.items():
        assert "# CHECKED" in text and "# NOT CHECKED" in text, f"{path} does not say on top what was checked"
        unknown = set(re.findall(r"-D(TESSERA_\w+)", text)) - known
        assert not unknown, (path, unknown)
    conda = texts["conda-forge/recipe.yaml"]
    assert f'version: "{version}"' in conda and f"sha256: {total}" in conda and f"url: {archive.as_uri()}" in conda, conda

    ast.parse(texts["spack/package.py"])
    assert max(map(len, texts["spack/package.py"].splitlines())) < 160
    for fields in (False, True):
        said, arguments = spack(texts["spack/package.py"], mpi=True, fortran=False, fields=fields)
        assert ("version", (version,), {"sha256": total}) in said, said
        assert "-DTESSERA_TORCH=/torch/lib/python/torch" in arguments and ("-DTESSERA_HDF5_INCLUDE=False" in arguments) != fields, arguments
        given = {"NETCDF", "HDF5", "ZLIB", "ZSTD", "BLOSC", "HWLOC"} if fields else {"HWLOC"}
        off = {part for part in parts if f"-DTESSERA_{part}_INCLUDE=False" in arguments}
        assert off == parts - given, f"a library of the system's is looked at, or one that is there is not: {off} of {parts}"
        assert not {re.match(r"-D(\w+)", word)[1] for word in arguments} - known, arguments


main()
