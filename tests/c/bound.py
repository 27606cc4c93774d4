"""bound.py ROOM: Fortran binds every function of tessera.h, and `module tessera` calls every function that is bound and makes it public."""

import pathlib
import re
import sys

room = pathlib.Path(sys.argv[1])
header = re.sub(r"/\*.*?\*/", "", (room / "tessera.h").read_text(), flags=re.DOTALL)
declared = set(re.findall(r"^\s*(?:tessera_result|const char\*) (tessera_\w+)\(", header, re.MULTILINE))
bindings = (room / "fortran/bindings.f90").read_text()
bound = dict(re.findall(r"function (c_\w+)\([^)]*\)(?: &\n)?\s*bind\(c, name=\"(\w+)\"\)", bindings))
bound |= {name: real for real, name in re.findall(r"procedure\(\w+\), bind\(c, name=\"(\w+)\"\) :: (c_\w+)", bindings)}
calls = "".join((room / "fortran" / name).read_text() for name in ("calls.inc", "tensors.inc", "training.inc"))
by_descriptor = {"tessera_field", "tessera_all_reduce", "tessera_broadcast", "tessera_all_gather"}
faults = [f"{name} is not bound" for name in sorted(declared - set(bound.values()) - by_descriptor)]
faults += [f"{name} ({real}) is bound and never called" for name, real in bound.items() if not re.search(rf"\b{name}[(,]", calls)]
faults += [f"{real} is bound and not declared" for real in bound.values() if real not in declared and "descriptor" not in real and real not in ("strlen", "tessera_refuse", "tessera_point_at_local")]
codes = dict(re.findall(r"^\s*(TESSERA_\w+) = (\d+)", header, re.MULTILINE))
module = (room / "fortran/tessera.F90").read_text()
for name in codes.keys() - {"TESSERA_ROW_MAJOR", "TESSERA_COLUMN_MAJOR"}:  # an array of Fortran's has its order
    if not re.search(rf"\b{name.lower()}\b", module):
        faults.append(f"Fortran has no {name.lower()}")
print("\n".join(faults) or f"{len(declared)} functions and {len(codes)} constants are bound")
sys.exit(1 if faults or len(declared) < 40 else 0)
