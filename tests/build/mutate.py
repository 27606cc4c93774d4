"""scripts/mutate draws the same mutations from the same seed and changes nothing where it shows them; a line that it weaves is either of two, as it is told."""

import hashlib
import importlib.machinery
import importlib.util
import pathlib
import subprocess
import sys
import tempfile

script, compiler = pathlib.Path(sys.argv[1]), sys.argv[2]
root = script.parent.parent
faults = []


def run(*options):
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        faults.append(f"{' '.join(map(str, options))}: {done.stdout}{done.stderr}")
    return done.stdout


def sources():
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted((root / "tessera/partition").rglob("*")) if path.is_file())).hexdigest()


before = sources()
shown = [run("--seed", str(seed), "--count", "12", "--show", "partition") for seed in (1, 1, 2)]
if shown[0] != shown[1] or shown[0] == shown[2] or len(shown[0].splitlines()) != 36:
    faults.append(f"drawn: {shown}")
if sources() != before:
    faults.append("showing changes the sources")

# Each line as it is, and changed; 100 times what a line gives, then the next one.
LINES = [
    ("if (a < 3) r += 1;", "if (a < 3) r -= 1;", 1, -1),
    ("if (a == 3 && b) r += 1;", "if (a == 3 || b) r += 1;", 0, 1),
    ("if (const int c = a; c != 2) r += 1;", "if (const int c = a; c == 2) r += 1;", 0, 1),
    ("for (int i = 0; i < a; ++i) r += 1;", "for (int i = 1; i < a; ++i) r += 1;", 2, 1),
    ("for (int i = 0; i < a; ++i) r += 1;", "for (int i = 0; i <= a; ++i) r += 1;", 2, 3),
    ("for (int i = 0; i < 6; i += 2) r += 1;", "for (int i = 0; i < 6; i += 3) r += 1;", 3, 2),
    ("while (r < 4) ++r;", "while (r < 5) ++r;", 4, 5),
    ("r = std::min(a, 5);", "r = std::max(a, 5);", 2, 5),
    ("const auto e = a + 4;", "const auto e = a - 4;", None, None),  # in a block of its own below
    ("r += f(1, 2);", "r += f(2, 1);", 12, 21),
    ("note(7);", "", 7, 0),
    ("return_of(r, 3);", "return_of(r, 4);", 3, 4),
]
sys.dont_write_bytecode = True
loader = importlib.machinery.SourceFileLoader("mutate", str(script))
mutate = importlib.util.module_from_spec(importlib.util.spec_from_loader("mutate", loader))
loader.exec_module(mutate)
if mutate.woven(1, "foo(a,", "foo(b,") or mutate.woven(1, "int x(a);", "int x(b);") or mutate.woven(1, "std::lock_guard lock(m);", ""):
    faults.append("a part of a statement or a declaration is woven")
if "tessera_mutant(1) ? (a - 4) : (a + 4)" not in (mutate.woven(1, LINES[8][0], LINES[8][1]) or ""):
    faults.append("a declaration is not woven")
tried = [(number, *line) for number, line in enumerate(LINES, 1) if line[2] is not None]
code = ["#include <algorithm>", "#include <cstdio>", "#include <cstdlib>", "static int r, inForce;", "static bool tessera_mutant(int n) { return n == inForce; }"]
code += ["static int f(int a, int b) { return 10 * a + b; }", "static void note(int n) { r = n; }", "static void return_of(int& to, int n) { to = n; }"]
for number, one, other, _, _ in tried:
    made = mutate.woven(number, one, other)
    if made is None:
        faults.append(f"not woven: {one}")
    code.append(f"static void line{number}(int a, bool b) {{ (void)a; (void)b; r = 0;\n{made or ''}\n}}")
code.append("int main(int, char** given) { inForce = std::atoi(given[1]);")
code += [f'line{number}(2, true); std::printf("%d ", r);' for number, *_ in tried] + ["}"]
with tempfile.TemporaryDirectory() as folder:
    program = pathlib.Path(folder) / "lines"
    program.with_suffix(".cpp").write_text("\n".join(code))
    done = subprocess.run([compiler, "-std=c++20", program.with_suffix(".cpp"), "-o", program], capture_output=True, text=True, timeout=100)
    faults += [done.stderr] if done.returncode else []
    for number in [0, *(line[0] for line in tried)] if done.returncode == 0 else []:
        said = subprocess.run([program, str(number)], capture_output=True, text=True, timeout=20).stdout.split()
        if said != [str(changed if number == at else same) for at, _, _, same, changed in tried]:
            faults.append(f"with {number} in force: {said}")
print("\n".join(faults) or "drawn alike, shown without a change, woven right")
sys.exit(1 if faults else 0)
