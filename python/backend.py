"""Builds the wheel: CMake makes the library, setuptools packs it.

    pip wheel ./python                                  # brings build/release up to date, or compiles into build/wheel; then packs
    pip wheel ./python -C build=build/release           # packs what was built there, compiles nothing
    python -m build --sdist ./python                    # the sources; pip wheel compiles them wherever there is a torch

Options (-C name=value):
    build       an existing build folder, relative to the checkout; it is installed as it is
    torch       the folder of libtorch (include/ and lib/); default: the torch of this environment
    cmake-args  more arguments of CMake, as in a shell: "-DTESSERA_MPI=OFF -DTESSERA_NCCL=OFF"
    jobs        files compiled at a time, about 1.5 GB each; default: CMAKE_BUILD_PARALLEL_LEVEL, or 2

The wheel holds the modules, and what `cmake --install` installs: libraries, headers, the CMake package, and the programs where they
were built. Nothing in it names a folder of this machine, and it needs no version of Python. `make wheel` makes one for other machines.
"""

import importlib.util
import io
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
OPTIONS = ("build", "torch", "cmake-args", "jobs")


def _options(settings):
    settings = settings or {}
    unknown = sorted(set(settings) - set(OPTIONS))
    if unknown:
        raise SystemExit(f"tessera: no option {', '.join(unknown)}; there are {', '.join(OPTIONS)}")
    # pip gives a list where an option is named more than once.
    several = sorted(name for name, value in settings.items() if isinstance(value, list) and name != "cmake-args")
    if several:
        raise SystemExit(f"tessera: option {several[0]} is given {len(settings[several[0]])} times")
    return {name: " ".join(value) if isinstance(value, list) else value for name, value in settings.items()}


def _torch_folder(options):
    """The torch to build with. pip hides the environment's packages from a build that it isolates, but not where they lie."""
    if "torch" in options:
        return pathlib.Path(options["torch"]).resolve()
    spec = importlib.util.find_spec("torch")
    places = [spec.origin and pathlib.Path(spec.origin).parent] if spec else []
    places += [pathlib.Path(sysconfig.get_path(name)) / "torch" for name in ("platlib", "purelib")]
    return next((place for place in places if place and (place / "lib" / "libtorch_cpu.so").exists()), None)


def get_requires_for_build_wheel(config_settings=None):
    options = _options(config_settings)
    needs = [] if shutil.which("cmake") else ["cmake>=3.25"]
    if "build" not in options:
        needs += [] if shutil.which("ninja") or shutil.which("make") else ["ninja"]
        needs += [] if _torch_folder(options) else ["torch>=2.11"]
    return needs


def _run(*command):
    command = [str(part) for part in command]
    if subprocess.run(command).returncode:
        raise SystemExit(f"tessera: failed: {shlex.join(command)}")


def _cache(build):
    """What CMake knows of a build folder; nothing where it was not configured."""
    cache = build / "CMakeCache.txt"
    lines = cache.read_text().splitlines() if cache.exists() else []
    return {line.split(":", 1)[0]: line.split("=", 1)[1] for line in lines if re.match(r"\w+:\w+=", line)}


def _is_like_a_wheels(build, torch):
    """A folder that `make` has configured for this checkout, optimised, with this torch and the Python package."""
    known, config = _cache(build), build / "TesseraConfig.cmake"
    wanted = {"CMAKE_HOME_DIRECTORY": str(ROOT), "CMAKE_BUILD_TYPE": "Release", "TESSERA_PYTHON": "ON", "TESSERA_SANITIZE": "", "TESSERA_UP_TO": ""}
    if any(known.get(name) != value for name, value in wanted.items()) or not config.exists():
        return False
    with_torch = re.search(r'^set\(_tessera_torch "([^"]*)"\)', config.read_text(), re.MULTILINE)
    return bool(with_torch) and pathlib.Path(with_torch[1]).resolve() == pathlib.Path(torch).resolve()


def _libraries(build):
    """The targets of CMake that the wheel installs."""
    names = re.findall(r"add_library\(Tessera::(\w+) SHARED", (build / "TesseraTargets.cmake").read_text())
    targets = ["tessera_library" if name == "tessera" else f"tessera_{name}_library" for name in names]
    installs = "".join(script.read_text() for script in (build / "tessera").rglob("cmake_install.cmake"))
    parts = [target for target, library in {"tessera_nccl": "nccl", "tessera_cuda": "cuda", "tessera_mpi_part": "mpi"}.items() if f"libtessera_{library}.so" in installs]
    return ["tessera_python", *targets, *parts]


def _built(options):
    """The folder of a complete build."""
    if "build" in options:
        build = (ROOT / options["build"]).resolve()
        if not (build / "TesseraConfig.cmake").exists():
            raise SystemExit(f"tessera: {build} is no build folder of Tessera: configure and build it first, or leave out -C build")
        return build
    if not (ROOT / "CMakeLists.txt").exists():
        raise SystemExit(f"tessera: {ROOT} has no sources: build the wheel from a checkout, or give -C build=FOLDER")
    torch = _torch_folder(options)
    if torch is None:
        raise SystemExit("tessera: no torch in this environment: install the one that the wheel is for, or give -C torch=FOLDER")
    jobs = options.get("jobs") or os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "2")
    release = ROOT / "build" / "release"
    if "cmake-args" not in options and _is_like_a_wheels(release, torch):
        # Of the developer's build the libraries alone: what is up to date is not compiled again.
        _run("cmake", "--build", release, "--parallel", jobs, "--target", *_libraries(release))
        return release
    build = ROOT / "build" / "wheel"
    left_out = [f"-DTESSERA_{part}=OFF" for part in ("TESTS", "EXAMPLES", "BENCH", "APPS")]
    generator, program = ("Ninja", shutil.which("ninja")) if shutil.which("ninja") else ("Unix Makefiles", shutil.which("make"))
    arguments = shlex.split(options.get("cmake-args", ""))
    known = _cache(build)
    # A build of another generator or of a checkout that has moved is begun anew.
    fresh = known and (known.get("CMAKE_GENERATOR") != generator or known.get("CMAKE_HOME_DIRECTORY") != str(ROOT))
    _run(
        "cmake",
        *(["--fresh"] if fresh else []),
        *("-S", ROOT, "-B", build, "-G", generator),
        # pip may bring a ninja of its own for each build, in another folder each time.
        *([f"-DCMAKE_MAKE_PROGRAM={program}"] if program else []),
        *("-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_INSTALL_LIBDIR=lib", f"-DTESSERA_TORCH={torch}"),
        *left_out,
        *arguments,
    )
    _run("cmake", "--build", build, "--parallel", jobs)
    return build


def _without(rpath, torch):
    """The search path of a library less the folders of torch, which is loaded first or linked beside it."""
    kept = [entry for entry in rpath.split(b":") if entry and entry != torch + b"/lib"]
    return b":".join(kept if any(entry.startswith(b"$ORIGIN") for entry in kept) else [b"$ORIGIN", *kept])


def _forget_torch(library, torch):
    """Takes the folder of torch out of the library's search path, in place: the rest is shorter."""
    data = bytearray(library.read_bytes())
    at = data.find(torch + b"/lib")
    while at >= 0:
        begin, end = data.rfind(b"\0", 0, at) + 1, data.find(b"\0", at)
        old = bytes(data[begin:end])
        if torch + b"/lib" in old.split(b":") and all(entry == b"" or entry.startswith((b"/", b"$ORIGIN")) for entry in old.split(b":")):
            data[begin:end] = _without(old, torch).ljust(len(old), b"\0")
        at = data.find(torch + b"/lib", end)
    library.write_bytes(data)


def _stage(build, package):
    """Installs the build into the package's folder; returns its version, and that of libtorch that it was built with."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = pathlib.Path(folder)
        _run("cmake", "--install", build, "--prefix", prefix, "--component", "tessera")
        libraries = next(prefix.glob("lib*/libtessera_python.so"), None)
        if libraries is None:
            raise SystemExit(f"tessera: {build} has no libtessera_python.so: configure it with -DTESSERA_PYTHON=ON")
        libraries = libraries.parent
        cmake = libraries / "cmake" / "Tessera"
        config = cmake / "TesseraConfig.cmake"
        text = config.read_text()
        torch_version = re.search(r'set\(Tessera_TORCH_VERSION "([^"]+)"\)', text)[1]
        version = re.search(r'set\(PACKAGE_VERSION "([^"]+)"\)', (cmake / "TesseraConfigVersion.cmake").read_text())[1]
        torch = re.search(r'^set\(_tessera_torch "([^"]*)"\)', text, re.MULTILINE)[1]
        if not torch.startswith("/"):
            raise SystemExit(f"tessera: {build} does not say which libtorch it was built with: is it a wheel's?")
        config.write_text(text.replace(f'set(_tessera_torch "{torch}")', 'set(_tessera_torch "")'))
        # A wheel has no links: each library once, under the name by which it is loaded.
        for library in libraries.glob("*.so*"):
            if library.is_symlink() and not re.search(r"\.so\.\d+\.\d+$", library.name):
                library.unlink()
        for link in [path for path in libraries.glob("*.so.*") if path.is_symlink()]:
            real = link.resolve()
            link.unlink()
            real.rename(link)
            for targets in cmake.glob("TesseraTargets*.cmake"):
                targets.write_text(targets.read_text().replace(f"/{real.name}", f"/{link.name}"))
        for file in [*libraries.glob("*.so*"), *prefix.glob("bin/*")]:
            _forget_torch(file, torch.encode())
        shutil.rmtree(libraries / "pkgconfig", ignore_errors=True)
        shutil.copytree(libraries, package / libraries.name)
        shutil.copytree(prefix / "include", package / "include")
        shutil.copytree(next(prefix.rglob("TesseraMpi.cmake")).parent.parent, package / "share" / "tessera")
        if (prefix / "bin").exists():
            shutil.copytree(prefix / "bin", package / "bin")
    return version, torch_version


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    from setuptools import build_meta

    build = _built(_options(config_settings))
    wheel_directory, before = pathlib.Path(wheel_directory).resolve(), pathlib.Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        for name in ("pyproject.toml", "setup.py", "tessera_program.py"):
            shutil.copy(HERE / name, tree)
        if (ROOT / "LICENSE").exists():
            shutil.copy(ROOT / "LICENSE", tree)
        shutil.copytree(HERE / "tessera", tree / "tessera", ignore=shutil.ignore_patterns("__pycache__"))
        version, torch_version = _stage(build, tree / "tessera")
        minor = ".".join(torch_version.split(".")[:2])
        (tree / "version.txt").write_text(version + "\n")
        (tree / "torch.txt").write_text(f"torch=={minor}.*\n")
        (tree / "tessera" / "torch_version.txt").write_text(torch_version + "\n")
        os.chdir(tree)
        try:
            return build_meta.build_wheel(str(wheel_directory))
        finally:
            os.chdir(before)


def _sources(folder):
    """What a build needs of a folder of the checkout, and nothing that building or running has left there."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in ("__pycache__", "build", "dist") or path.suffix in (".pyc", ".egg-info"):
            continue
        if path.is_dir():
            yield from _sources(path)
        else:
            yield path


def build_sdist(sdist_directory, config_settings=None):
    """The library's sources and the package's, laid out as in the checkout; a wheel is compiled from them as from it."""
    if not (ROOT / "CMakeLists.txt").exists():
        raise SystemExit(f"tessera: {ROOT} has no sources: make the source distribution from a checkout")
    text = (HERE / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    version = re.search(r"project\(Tessera VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
    name = f"{project['name'].replace('-', '_')}-{version}"
    # The backend lies one folder deeper than the file that names it.
    above = text.replace('backend-path = ["."]', 'backend-path = ["python"]')
    about = f"Metadata-Version: 2.2\nName: {project['name']}\nVersion: {version}\nSummary: {project['description']}\nRequires-Python: {project['requires-python']}\nDynamic: Requires-Dist\n"
    made = {"pyproject.toml": above.encode(), "PKG-INFO": about.encode()}
    files = [ROOT / file for file in ("CMakeLists.txt", "LICENSE", "README.md")]
    files += [path for folder in ("cmake", "tessera", "python") for path in _sources(ROOT / folder)]
    made.update((str(path.relative_to(ROOT)), path.read_bytes()) for path in files)
    with tarfile.open(pathlib.Path(sdist_directory) / f"{name}.tar.gz", "w:gz") as archive:
        for path, data in sorted(made.items()):
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return f"{name}.tar.gz"
