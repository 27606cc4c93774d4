"""Every installed header is compiled alone, and all of them in one file: two headers that define one name differently,
or that need another one before them, cannot land."""

import argparse
import concurrent.futures
import pathlib
import subprocess
import sys


def main():
    parser = argparse.ArgumentParser()
    for name in ("compiler", "include", "torch"):
        parser.add_argument(f"--{name}", required=True)
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

    def compiled(names):
        text = "".join(f'#include "{name}"\n' for name in names)
        run = subprocess.run([arguments.compiler, *options], input=text, capture_output=True, text=True, timeout=300)
        return names, run.returncode, run.stderr

    faults = 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for names, status, errors in pool.map(compiled, [headers] + [[header] for header in headers]):
            if status:
                faults += 1
                print(f"{'all headers together' if len(names) > 1 else names[0]}:\n{errors[:2000]}", file=sys.stderr)
    print(f"{len(headers)} headers, {faults} faults")
    return 1 if faults or len(headers) < 50 else 0


if __name__ == "__main__":
    sys.exit(main())
