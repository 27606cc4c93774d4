"""The wheel: what a user installs, in an environment of its own, from Python and from C++, on 2 ranks. Offline; the torch is this environment's."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
VERSION = re.search(r"project\(Tessera VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
LIBRARY = f"lib/libtessera.so.{VERSION.rpartition('.')[0]}"  # before 1.0 a minor version may break its users
PIP = ["-m", "pip", "--disable-pip-version-check"]

PYTHON = """
import torch, tessera, sys
assert tessera.__file__.startswith(sys.prefix), tessera.__file__
mapped = [line.split()[-1] for line in open("/proc/self/maps") if "libtessera" in line]
assert mapped and all(path.startswith(sys.prefix) for path in mapped), set(mapped)
tessera.init(timeout=60)
torch.manual_seed(tessera.rank())
model = tessera.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(20):
    x = torch.randn(8 + tessera.rank(), 4)
    loss = model.mean_loss((model(x) - x.sum(1, True)).square().mean(), len(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.1 * losses[0], losses
print(f"python rank {tessera.rank()} of {tessera.world_size()}", flush=True)
"""


def of_readme(language, begin):
    """A block of the README."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if block.startswith(begin))


def run(*command, limit=200, **options):
    """Without the path on which ctest offers the package of the build folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(c) for c in command], env=environment, capture_output=True, text=True, timeout=limit, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def build_of(request):
    return pathlib.Path(request.config.getoption("--launcher")).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(request, tmp_path_factory):
    """Of the build folder: nothing is compiled. Or a given one."""
    if given := request.config.getoption("--wheel"):
        return pathlib.Path(given).resolve()
    to = tmp_path_factory.mktemp("wheel")
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", to]
    run(sys.executable, *PIP, "wheel", "--quiet", *options, "-C", f"build={build_of(request)}", ROOT / "python")
    (made,) = to.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """A fresh environment that sees this one's packages, with the wheel installed into it."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    fresh = folder / "bin" / "python"
    site = pathlib.Path(run(fresh, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # The wheel's own demand for a torch holds, and is satisfied by the one that is there.
    run(fresh, *PIP, "install", "--quiet", "--no-index", wheel)
    return fresh


def test_what_the_wheel_holds(wheel, request):
    import torch

    assert re.fullmatch(rf"tessera_sharding-{re.escape(VERSION)}-py3-none-(many)?linux_[\w.]+\.whl", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        metadata = file.read(next(n for n in names if n.endswith("METADATA"))).decode()
        texts = {n: file.read(n) for n in names if n.endswith((".cmake", ".py", ".txt")) or ".so" in n}
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"Requires-Dist: torch=={minor}.*" in metadata
    assert wheel.stat().st_size < 15e6
    for needed in ("bin/tessera", "bin/tessera-doctor", "include/tessera/tessera.h", LIBRARY, "lib/libtessera_python.so", "lib/cmake/Tessera/TesseraConfig.cmake", "py.typed"):
        assert f"tessera/{needed}" in names, (needed, names)
    assert not [n for n in names if n.endswith((f".so.{VERSION}", ".pc"))]  # each library once
    # No folder of this machine: neither of the build nor of torch, in CMake files or search paths of libraries.
    for name, data in texts.items():
        for folder in (str(build_of(request)), str(pathlib.Path(torch.__file__).parent)):
            assert f"{folder}/lib".encode() not in data, (name, folder)


def test_two_ranks_from_python_and_from_cpp(python, tmp_path):
    (tmp_path / "program.py").write_text(PYTHON)
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    printed = run(*torchrun, tmp_path / "program.py", cwd=tmp_path)
    assert sorted(re.findall(r"python rank \d of \d", printed)) == ["python rank 0 of 2", "python rank 1 of 2"]

    # The README's own program and CMakeLists.txt.
    (tmp_path / "CMakeLists.txt").write_text(of_readme("cmake", "cmake_minimum_required"))
    (tmp_path / "train.cpp").write_text(of_readme("cpp", "#include <torch/torch.h>"))
    where = {name: run(python, "-m", "tessera", f"--{name}-dir", cwd=tmp_path).strip() for name in ("cmake", "torch")}
    assert where["cmake"].startswith(str(python.parent.parent))
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    folders = [f"-DTessera_DIR={where['cmake']}", f"-DTESSERA_TORCH={where['torch']}"]
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", *generator, *folders)
    run("cmake", "--build", tmp_path / "build")
    printed = run(*torchrun, "--no-python", tmp_path / "build" / "train", cwd=tmp_path)
    losses = [float(value) for value in re.findall(r"step \d+: loss (\S+)", printed)]
    assert len(losses) == 4 and losses[-1] < 0.5 * losses[0], printed


FORTRAN = """
program solver
  use tessera
  implicit none
  type(tessera_job) :: job
  integer :: rank, ranks
  call tessera_start(job)
  call tessera_rank(job, rank, ranks)
  print '(a, i0, a, i0)', "fortran rank ", rank, " of ", ranks
  call tessera_end(job)
end program
"""


def test_fortran_is_compiled_with_the_programs_compilers(python, tmp_path):
    """The wheel holds the module's sources: module files are of one compiler's version."""
    if not shutil.which("gfortran"):
        pytest.skip("no compiler of Fortran here")
    (tmp_path / "solver.f90").write_text(FORTRAN)
    where = {name: run(python, "-m", "tessera", f"--{name}-dir", cwd=tmp_path).strip() for name in ("cmake", "torch")}

    def configure(languages):
        lines = ("cmake_minimum_required(VERSION 3.25)", f"project(solver {languages})", "find_package(Tessera CONFIG REQUIRED COMPONENTS Fortran)")
        (tmp_path / "CMakeLists.txt").write_text("\n".join((*lines, "add_executable(solver solver.f90)", "target_link_libraries(solver Tessera::fortran)\n")))
        command = ["cmake", "--fresh", "-S", tmp_path, "-B", tmp_path / "build", f"-DTessera_DIR={where['cmake']}", f"-DTESSERA_TORCH={where['torch']}"]
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=200)

    assert "project(solver C Fortran)" in configure("Fortran").stderr
    done = configure("C Fortran")
    assert done.returncode == 0, done.stderr
    run("cmake", "--build", tmp_path / "build")
    printed = run(python.parent / "tessera", "run", "-n", 2, "--", tmp_path / "build" / "solver", cwd=tmp_path)
    assert sorted(re.findall(r"fortran rank \d of \d", printed)) == ["fortran rank 0 of 2", "fortran rank 1 of 2"]


def test_the_program_starts_ranks_and_the_doctor(python, tmp_path):
    """On the path, as pip has put it there; it imports no torch itself."""
    program = python.parent / "tessera"
    assert run(program, "--version").startswith(f"tessera {VERSION}")
    imports = subprocess.run([python, "-X", "importtime", program, "--version"], capture_output=True, text=True, timeout=200).stderr
    assert re.search(r"\| +tessera_program$", imports, re.MULTILINE) and not re.search(r"\| +(torch|tessera)$", imports, re.MULTILINE), imports
    code = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    printed = run(program, "run", "-n", 2, "--", python, "-S", "-c", code, cwd=tmp_path)
    assert sorted(re.findall(r"rank \d of \d", printed)) == ["rank 0 of 2", "rank 1 of 2"]
    assert "libtorch" in run(program, "doctor")


def test_another_torch_gets_one_line(python, tmp_path):
    other = tmp_path / "torch"
    other.mkdir()
    (other / "__init__.py").write_text('__version__ = "2.99.1+cpu"\n')
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([python, "-c", "import tessera"], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode and re.match(r"ImportError: tessera was built with torch \S+ and this is torch 2\.99\.1: pip install 'torch==\d+\.\d+\.\*'", last), done.stderr


def load_backend(path):
    spec = importlib.util.spec_from_file_location("wheel_backend", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """The backend, of a checkout without a build, whose commands are recorded instead of run."""
    module = load_backend(ROOT / "python" / "backend.py")
    (tmp_path / "CMakeLists.txt").touch()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    module.commands = []
    monkeypatch.setattr(module, "_run", lambda *command: module.commands.append([str(part) for part in command]))
    return module


def test_a_source_distribution_makes_the_same_wheel(request, wheel, tmp_path):
    """From the sources alone: what a wheel of the checkout holds, and a first build that finds all that CMake names."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'python')!r}); import backend; print(backend.build_sdist({str(tmp_path)!r}))"
    sdist = tmp_path / run(sys.executable, "-c", code).strip()
    assert sdist.name == f"tessera_sharding-{VERSION}.tar.gz"
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path]
    run(sys.executable, *PIP, "wheel", "--quiet", *options, "-C", f"build={build_of(request)}", sdist)
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(tmp_path / wheel.name) as its:
        assert sorted(ours.namelist()) == sorted(its.namelist())
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (top,) = (tmp_path / "unpacked").iterdir()
    held = {str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()}
    assert {"PKG-INFO", "pyproject.toml", "CMakeLists.txt", "LICENSE"} <= held
    for folder in ("cmake", "tessera", "python"):
        assert {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.suffix in (".h", ".cpp", ".cmake", ".in", ".txt", ".py", ".pyi")} <= held
    module = load_backend(top / "python" / "backend.py")
    module.commands = []
    module._run = lambda *command: module.commands.append([str(part) for part in command])
    assert module._built({}) == top / "build" / "wheel" and str(top) in module.commands[0]


def configured(folder, root, torch, **changed):
    """What a build folder says of itself."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {"CMAKE_HOME_DIRECTORY": root, "CMAKE_BUILD_TYPE": "Release", "CMAKE_GENERATOR": "Ninja", "TESSERA_PYTHON": "ON", "TESSERA_SANITIZE": "", "TESSERA_UP_TO": ""}
    (folder / "CMakeCache.txt").write_text("# a comment\n" + "".join(f"{name}:STRING={value}\n" for name, value in {**known, **changed}.items()))
    (folder / "TesseraConfig.cmake").write_text(f'set(_tessera_torch "{torch}")\n')
    (folder / "TesseraTargets.cmake").write_text("".join(f"add_library(Tessera::{name} SHARED IMPORTED)\n" for name in ("base", "tessera", "data")))


def test_the_default_path_compiles_the_libraries_alone(backend, tmp_path):
    import torch

    folder = pathlib.Path(torch.__file__).parent
    assert backend._built({}) == tmp_path / "build" / "wheel"
    configure, build = backend.commands
    assert {"-DTESSERA_TESTS=OFF", "-DTESSERA_EXAMPLES=OFF", "-DTESSERA_BENCH=OFF", "-DTESSERA_APPS=OFF", f"-DTESSERA_TORCH={folder}"} <= set(configure)
    assert "--fresh" not in configure and build[:2] == ["cmake", "--build"] and "--target" not in build
    # Once more: what was configured with another generator, or before the checkout moved, is begun anew.
    generator = configure[configure.index("-G") + 1]
    for changed, fresh in [({}, False), ({"CMAKE_GENERATOR": "Other"}, True), ({"CMAKE_HOME_DIRECTORY": "/elsewhere"}, True)]:
        backend.commands.clear()
        configured(tmp_path / "build" / "wheel", tmp_path, folder, **{"CMAKE_GENERATOR": generator, **changed})
        backend._built({})
        assert ("--fresh" in backend.commands[0]) == fresh, changed


def test_the_default_path_takes_the_build_of_make(backend, tmp_path):
    import torch

    folder, release = pathlib.Path(torch.__file__).parent, tmp_path / "build" / "release"
    configured(release, tmp_path, folder)
    assert backend._built({"jobs": "3"}) == release
    (build,) = backend.commands
    assert build == ["cmake", "--build", str(release), "--parallel", "3", "--target", "tessera_python", "tessera_base_library", "tessera_library", "tessera_data_library"]
    # But not another kind of build, another torch, or where options are given.
    for changed in ({"CMAKE_BUILD_TYPE": "Debug"}, {"TESSERA_SANITIZE": "thread"}, {"TESSERA_PYTHON": "OFF"}, {"TESSERA_UP_TO": "comm"}, {"CMAKE_HOME_DIRECTORY": "/elsewhere"}):
        configured(release, tmp_path, folder, **changed)
        assert backend._built({}) == tmp_path / "build" / "wheel", changed
    configured(release, tmp_path, "/opt/libtorch")
    assert backend._built({}) == tmp_path / "build" / "wheel"
    configured(release, tmp_path, folder)
    assert backend._built({"cmake-args": "-DTESSERA_MPI=OFF"}) == tmp_path / "build" / "wheel" and "-DTESSERA_MPI=OFF" in backend.commands[-2]


@pytest.mark.parametrize(
    "option,answer",
    [
        ("build=nowhere", "is no build folder of Tessera"),
        ("biuld=x", "no option biuld; there are build, torch, cmake-args, jobs"),
    ],
)
def test_options_that_cannot_be(tmp_path, option, answer):
    pip = [sys.executable, *PIP, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path]
    done = subprocess.run([*pip, "-C", option, ROOT / "python"], capture_output=True, text=True, timeout=200)
    assert done.returncode and answer in done.stdout + done.stderr, done.stdout + done.stderr
