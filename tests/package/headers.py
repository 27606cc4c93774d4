"""All installed headers are compiled in one file, in one order and in the other, and each that needs no libtorch alone: two headers that define one name
differently, or that need another one before them, cannot land. What is installed as sources, to be compiled on a user's machine (--sources), finds each header
of the library that it names, there or among the installed ones. With --alone each of them is, which takes ten minutes (scripts/matrix headers)."""

import argparse
import concurrent.futures
import pathlib
import re
import subprocess
import sys


def unresolved(sources, include):
    """Headers of the library that a folder of `sources`, its own include/ or what these name asks for, and nobody has: with who asks."""
    todo = [path for path in sources.rglob("*") if path.suffix in (".c", ".cpp", ".h", ".F90", ".f90")]
    seen, missing = set(), {}
    while todo:
        path = todo.pop()
        for name in re.findall(r'#include "(tessera/[^"]+)"', path.read_text()):
            if name in seen:
                continue
            seen.add(name)
            found = next((folder / name for folder in (sources / "include", include) if (folder / name).exists()), None)
            if found:
                todo.append(found)
            else:
                missing[name] = path.name
    return missing


def main():
    parser = argparse.ArgumentParser()
    for name in ("compiler", "include", "torch", "sources"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--parts", nargs="*", default=[])  # where the headers of optional libraries are
    arguments = parser.parse_args()
    include = pathlib.Path(arguments.include)
    headers = sorted(str(path.relative_to(include)) for path in include.rglob("*.h"))
    if not arguments.parts:
        headers = [header for header in headers if "<mpi.h>" not in (include / header).read_text()]
    torch = pathlib.Path(arguments.torch)
    options = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-x", "c++", "-", f"-I{include}",
               "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
    for folder in (torch / "include", torch / "include/torch/csrc/api/include", *arguments.parts):
        options += ["-isystem", str(folder)]

    def heavy(header, seen=()):
        lines = (include / header).read_text().splitlines()
        named = [line.split()[1].strip('<>"') for line in lines if line.startswith("#include ")]
        own = [name for name in named if name.startswith("tessera/") and name not in seen]
        return any(name.split("/")[0] in ("ATen", "c10", "torch") for name in named) or any(heavy(name, (*seen, header)) for name in own)

    def compiled(names):
        text = "".join(f'#include "{name}"\n' for name in names)
        run = subprocess.run([arguments.compiler, *options], input=text, capture_output=True, text=True, timeout=800)
        return names, run.returncode, run.stderr

    alone = [[header] for header in headers if arguments.alone or not heavy(header)]
    folders = [folder for folder in sorted(pathlib.Path(arguments.sources).iterdir()) if folder.is_dir()]
    faults = 0
    for folder in folders:
        for name, asks in unresolved(folder, include).items():
            faults += 1
            print(f"{folder.name}/{asks} includes {name}, which is not installed: see cmake/TesseraInstall.cmake", file=sys.stderr)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for names, status, errors in pool.map(compiled, [headers, headers[::-1], *alone]):
            if status:
                faults += 1
                print(f"{'all headers together' if len(names) > 1 else names[0]}:\n{errors[:2000]}", file=sys.stderr)
    print(f"{len(headers)} headers, {len(alone)} of them alone, {len(folders)} folders of sources, {faults} faults")
    return 1 if faults or len(headers) < 50 else 0


if __name__ == "__main__":
    sys.exit(main())
