"""programs.py BUILD FILE [--only PATTERN] [--rounds N]: whole programs on two ranks, from start to end.

The showcases over Gloo and over what groups of one host use by default, which must say the same; and showcases and examples with the ranks' memory kept
(`tessera run --allocator keep`). Wall-clock time, processor time and page faults of all ranks together, medians of N rounds in turn; no limits, since the time of a
whole program has its start in it.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

SHOWCASES = {
    "winds": ["winds", "--epochs", "4", "--double"],
    "winds, rows sharded": ["winds", "--mesh", "domain=2", "--epochs", "4", "--double"],
    "tokens": ["tokens", "--double", "--steps", "200"],
    "gpt, data": ["gpt", "--data", "2", "--steps", "100", "--double"],
    "gpt, fully sharded": ["gpt", "--sharded", "2", "--steps", "100", "--double"],
    "gpt, tensor": ["gpt", "--tensor", "2", "--steps", "100", "--double"],
    "gpt, pipeline": ["gpt", "--pipeline", "2", "--steps", "100", "--double"],
}
# On two ranks; the others need more.
NOT_ON_TWO = {"03_groups", "13_model_groups"}
WHAT_TIME_SAYS = re.compile(r"^trained in ")


def once(build, command, options):
    """Seconds, processor seconds and page faults of one run, and what it says."""
    launcher = [str(build / "bin/tessera"), "run", "-n", "2", "--bind", "cores", *options, "--"]
    start = time.perf_counter()
    process = subprocess.Popen([*launcher, str(build / "bin" / command[0]), *command[1:]], stdout=subprocess.PIPE, text=True)
    out = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode != 0:
        sys.exit(f"programs: {' '.join(command)} ended with {process.returncode}")
    said = [line for line in out.splitlines() if not WHAT_TIME_SAYS.search(line.partition("] ")[2])]
    return (seconds, used.ru_utime + used.ru_stime, used.ru_minflt), said


def compare(name, ours, theirs, rounds, records):
    """Records `name`: what `ours` and `theirs` (label, run) take, in turn. What both say."""
    taken, said = ([], []), [None, None]
    for i in range(rounds):
        for side in (0, 1) if i % 2 == 0 else (1, 0):
            used, said[side] = (ours, theirs)[side][1]()
            taken[side].append(used)
    for at, (metric, unit, scale) in enumerate((("time", "us", 1e6), ("processor time", "us", 1e6), ("page faults", "", 1))):
        mine, other = ([run[at] * scale for run in side] for side in taken)
        record = {
            "case": name,
            "metric": metric,
            "value": statistics.median(mine),
            "unit": unit,
            "reference": theirs[0],
            "reference_value": statistics.median(other),
            "meta": {"benchmark": "programs", "cores": os.cpu_count(), "rounds": rounds},
            "median_ratio": statistics.median(a / max(b, 1e-9) for a, b in zip(mine, other)),
        }
        records.append(record)
        shown = 1e-6 if unit else 1
        print(
            f"{name:40} {metric:15} {record['value'] * shown:12.6g} {record['reference_value'] * shown:12.6g} {'s' if unit else '':2} {theirs[0]:10}"
            f" {record['median_ratio']:8.3f}",
            flush=True,
        )
    return said


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="cases that this regular expression finds")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    build = options.build.resolve()
    examples = {}
    for program in sorted((build / "bin").glob("example_*")):
        name = program.name.removeprefix("example_")
        if name not in NOT_ON_TWO and name != "10_resume":
            examples["example " + name] = [program.name]
    records, differ = [], []
    print(f"{'case':40} {'metric':15} {'ours':>12} {'reference':>12}    {'':10} {'ratio':>8}")
    wanted = lambda name: re.search(options.only, name)
    for name, command in SHOWCASES.items():
        if wanted(name):
            case = name + " by default"
            said = compare(
                case,
                ("default", lambda: once(build, [*command, "--backend", "auto"], [])),
                ("gloo", lambda: once(build, [*command, "--backend", "gloo"], [])),
                options.rounds,
                records,
            )
            if said[0] != said[1]:
                differ.append(case)
    for name, command in {**SHOWCASES, **examples}.items():
        if wanted(name):
            kept, usual = (lambda: once(build, command, ["--allocator", "keep"])), (lambda: once(build, command, []))
            compare(name + ", memory kept", ("keep", kept), ("system", usual), options.rounds, records)
    if not records:
        sys.exit(3)
    cases = {record["case"] for record in records}
    old = json.loads(options.out.read_text()) if options.only and options.out.exists() else []
    records = [record for record in old if record["case"] not in cases] + records
    options.out.write_text(json.dumps(records, indent=1) + "\n")
    if differ:
        sys.exit(f"programs: what these say differs between Gloo and the default: {', '.join(differ)}")


main()
