#!/usr/bin/env bash
# installed.sh SOURCE INSTALLED TESSERA MPIEXEC NETWORK WORK: what docs/c_and_fortran.md and showcases/shallow_water say to who has an installed Tessera. The page's programs by pkg-config,
# and by CMake's components; the showcase by its makefile. Their losses on several ranks are those of one.
set -euo pipefail
source=$1 installed=$2 tessera=$3 mpiexec=$4 network=$5 work=$6
rm -rf "$work"
mkdir -p "$work/cmake"
cp "$network" "$work/net.pt"
python3 - "$source/docs/c_and_fortran.md" "$work" <<'PYTHON'
import pathlib, re, sys

page, work = pathlib.Path(sys.argv[1]).read_text(), pathlib.Path(sys.argv[2])
for language, name in (("c", "solver.c"), ("fortran", "solver.f90")):
    (code,) = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (work / name).write_text(code)
PYTHON
export PKG_CONFIG_PATH
PKG_CONFIG_PATH=$(dirname "$(find "$installed" -name tessera-c.pc)")
cd "$work"
# The loss that a program prints, on so many ranks.
loss() { grep -oE 'loss +[0-9.]+$' "$1" | awk '{ print $2 }'; }
same() {
  [[ $(loss "$1") && $(loss "$1") == "$(loss "$2")" ]] || { echo "$1 and $2 differ:"; cat "$1" "$2"; exit 1; }
}

# shellcheck disable=SC2046
cc -std=c99 -Wall -Werror solver.c $(pkg-config --cflags --libs tessera-c) -lm -o solver_c
"$tessera" run -n 1 -- ./solver_c >c1.txt
"$tessera" run -n 3 -- ./solver_c >c3.txt
same c1.txt c3.txt

cat >cmake/CMakeLists.txt <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(solver LANGUAGES C)
find_package(Tessera CONFIG REQUIRED COMPONENTS C)
add_executable(solver ../solver.c)
target_link_libraries(solver PRIVATE Tessera::c m)
CMAKE
cmake -S cmake -B cmake/build "-DCMAKE_PREFIX_PATH=$installed" >cmake.log
cmake --build cmake/build >>cmake.log
cmake/build/solver >cmake.txt
same c1.txt cmake.txt

if [[ $mpiexec ]] && pkg-config --exists tessera-fortran; then
  # shellcheck disable=SC2046
  mpifort -std=f2018 solver.f90 $(pkg-config --cflags --libs tessera-fortran) -o solver_fortran
  "$mpiexec" -n 1 ./solver_fortran >f1.txt
  "$mpiexec" -n 3 ./solver_fortran >f3.txt
  same f1.txt f3.txt
  cp "$source"/showcases/shallow_water/{Makefile,*.f90,*.c} .
  make -s
  # Without -q, which would close the pipe before the program has printed everything.
  "$mpiexec" -n 2 ./shallow_water net.pt checkpoints 1 | grep '^window 1 loss' >/dev/null
  "$mpiexec" -n 1 ./shallow_water_c net.pt checkpoints_c 1 | grep '^window 1 loss' >/dev/null
fi
echo "all as the pages say"
