#!/usr/bin/env bash
# run_test.sh MPIEXEC PROGRAMS NETWORK FOLDER: Fortran's on one rank; on four, ended in the third window; gone on with on three; and C's on two. The losses and masses are those of one rank.
set -euo pipefail
mpiexec=$1 programs=$2 network=$3 folder=$4
rm -rf "$folder"
mkdir -p "$folder"
run() { "$mpiexec" -n "$1" "$programs/$2" "$network" "${@:3}"; }
run 1 shallow_water "$folder/one" 6 >"$folder/one.txt"
if run 4 shallow_water "$folder/four" 6 3 >"$folder/four.txt" 2>"$folder/four.err"; then
  echo "the run that is to be ended went through"
  exit 1
fi
run 3 shallow_water "$folder/four" 6 >"$folder/three.txt"
run 2 shallow_water_c "$folder/c" 6 >"$folder/c.txt"
python3 - "$folder" <<'PYTHON'
import pathlib, re, sys

folder = pathlib.Path(sys.argv[1])


def read(name):
    rows = re.findall(r"^window (\d+) loss +(\S+) mass +(\S+)$", (folder / f"{name}.txt").read_text(), re.MULTILINE)
    return {int(window): (float(loss), float(mass)) for window, loss, mass in rows}


one, four, three, c = (read(name) for name in ("one", "four", "three", "c"))
assert sorted(one) == sorted(c) == [1, 2, 3, 4, 5, 6], (one, c)
assert sorted(four) == [1, 2, 3], four
assert sorted(three) == [3, 4, 5, 6], three
for rows in (four, three, c):
    for window, values in rows.items():
        for a, b in zip(values, one[window]):
            assert abs(a - b) <= 1e-11 * abs(b), (window, values, one[window])
assert one[6][0] < one[1][0], one
assert abs(one[6][1] - one[1][1]) < 1e-9, one
print("equal to one rank, before and after the end of the run, and in C")
PYTHON
