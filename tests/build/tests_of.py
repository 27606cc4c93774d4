"""scripts/tests_of finds the tests that a change must run: cases that are known."""

import pathlib
import subprocess
import sys

script, build = sys.argv[1:]
root = pathlib.Path(script).parent.parent


def groups(file, *options):
    said = subprocess.run([sys.executable, script, "--build", build, *options, root / file], capture_output=True, text=True, check=True, timeout=60).stdout
    return {line.split()[0]: line.split()[1:] for line in said.splitlines()}


cases = [
    # file, group, a test that is in it, one that is not
    ("tessera/mesh/resize.h", "direct", "mesh_resize", "base"),
    ("tessera/mesh/resize.cpp", "direct", "mesh_resize", "base"),
    ("tessera/mesh/resize.h", "room", "mesh_probe", "mesh_resize"),
    ("tessera/ops/spatial/detail/tap_sum.cpp", "room", "ops_convolution", "mesh"),
    ("tests/launch/recorded.h", "direct", "launch", "mesh"),
    ("tessera/base/error.h", "through", "mesh_resize", "mesh"),
]
faults = []
for file, group, there, absent in cases:
    found = groups(file, "--all")[group]
    if there not in found or absent in found:
        faults.append(f"{group} of {file}: {' '.join(found)}; it should hold {there} and not {absent}")
refused = subprocess.run([sys.executable, script, "--build", build, root / "no/such/file.h"], capture_output=True, text=True, timeout=60)
if refused.returncode == 0 or "is no file of" not in refused.stderr:
    faults.append("a file that does not exist is not refused")
print("\n".join(faults) or f"{len(cases)} cases are right")
sys.exit(1 if faults else 0)
