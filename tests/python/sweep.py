"""Sweeps PyTorch's operator database over sharded inputs, and writes the table of outcomes.

    sweep.py [--table docs/operator_table.md] [--only REGEX] [--every N] [--list FILE] [--json FILE] [--jobs 2]

Each operator is tried in a process that can be lost: a crash or a hang is an outcome. Exit status 1 if any operator is wrong, crashes, hangs, or fails
with an error that does not speak of sharding; with --list also if one of the operators named there is not equal.
"""

import argparse
import collections
import json
import multiprocessing
import pathlib
import queue
import re
import sys
import time

FAULTS = ("wrong", "crashed", "hung", "error")


def full_name(op):
    return f"{op.name} ({op.variant_test_name})" if op.variant_test_name else op.name


def database():
    from torch.testing._internal.common_methods_invocations import op_db

    seen, all_ops = collections.Counter(), []
    for op in op_db:
        name = full_name(op)
        seen[name] += 1
        all_ops.append((name if seen[name] == 1 else f"{name} #{seen[name]}", op))
    return all_ops


def worker(todo, done, samples, limit):
    import torch

    torch.set_num_threads(1)
    from operator_cases import sweep_operator

    ops = dict(database())
    done.put(("ready", None))
    while (name := todo.get()) is not None:
        try:
            counts, moves, texts = sweep_operator(ops[name], samples, limit)
            done.put((name, {"counts": counts, "moves": moves, "texts": texts}))
        except Exception as error:  # the sample generator's own, for one
            done.put((name, {"counts": {}, "moves": 0, "texts": {"none": f"{type(error).__name__}: {error}"[:200]}}))


class Lane:
    """One process, replaced when it dies or takes too long over an operator."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.start()

    def start(self):
        context = multiprocessing.get_context("spawn")
        self.todo, self.done = context.Queue(), context.Queue()
        self.process = context.Process(target=worker, args=(self.todo, self.done, self.arguments.samples, self.arguments.cases), daemon=True)
        self.process.start()
        self.name, self.since, self.ready = None, time.monotonic(), False

    def give(self, name):
        self.todo.put(name)
        self.name, self.since = name, time.monotonic()

    def poll(self):
        """A result (name, dict) or None."""
        try:
            name, result = self.done.get_nowait()
            if name == "ready":
                self.ready, self.since = True, time.monotonic()
                return None
            self.name = None
            return name, result
        except queue.Empty:
            pass
        late = time.monotonic() - self.since > self.arguments.seconds + (0 if self.ready else 60)
        if self.process.is_alive() and not (late and self.name):
            return None
        kind = "hung" if self.process.is_alive() else "crashed"
        text = f"no end after {self.arguments.seconds} s" if kind == "hung" else f"the process ended with status {self.process.exitcode}"
        name = self.name
        self.process.kill()
        self.process.join()
        self.start()
        return (name, {"counts": {kind: 1}, "moves": 0, "texts": {kind: text}}) if name else None

    def end(self):
        self.process.kill()
        self.process.join()


def sweep(names, arguments):
    lanes, waiting, results = [Lane(arguments) for _ in range(arguments.jobs)], collections.deque(names), {}
    while len(results) < len(names):
        idle = True
        for lane in lanes:
            if lane.name is None and lane.ready and waiting:
                lane.give(waiting.popleft())
            if got := lane.poll():
                results[got[0]], idle = got[1], False
                status = state(got[1])
                if arguments.verbose or status in FAULTS:
                    print(f"{status:8} {got[0]}: {got[1]['counts']} {got[1]['texts'].get(status, '')}", flush=True)
        if idle:
            time.sleep(0.01)
    for lane in lanes:
        lane.end()
    return {name: results[name] for name in names}


def state(result):
    counts = result["counts"]
    for fault in FAULTS:
        if counts.get(fault):
            return fault
    if not counts:
        return "no case"
    if counts.get("equal"):
        return "partly" if counts.get("refused") else "equal"
    return "refused"


WORDS = {
    "equal": "equal: every case gives what plain libtorch gives",
    "partly": "partly: equal where it is not refused, refused with a message that says why elsewhere",
    "refused": "refused: every case, with a message that says why",
    "no case": "no case: the database has no strided tensor of one dim or more as input",
    "wrong": "wrong: a value or gradient that is not plain libtorch's",
    "error": "error: a message that does not speak of sharding",
    "hung": "hung: ranks waited for each other",
    "crashed": "crashed: the process ended",
}


def table(results):
    import torch

    totals = collections.Counter(state(r) for r in results.values())
    cases = collections.Counter()
    for r in results.values():
        cases.update(r["counts"])
    version = torch.__version__.split("+")[0]
    lines = [
        "# Operators on sharded tensors: the table of outcomes",
        "",
        f"Written by `make sweep`: do not edit. PyTorch's operator database of {version}, {len(results)} variants, every tensor input sharded along",
        "every dim over 2 or 3 ranks, uneven and empty parts among them; float64; value and gradients, second derivatives in every third case; beside",
        "plain libtorch, to 1e-10 of the largest value (random numbers beside a mesh of one rank). `moves`: cases in which the operator had to move",
        "shards between ranks by itself, which the policy `error` forbids.",
        "",
        "| outcome | operators |",
        "| --- | ---: |",
        *(f"| {WORDS[s]} | {totals[s]} |" for s in WORDS),
        "",
        f"Cases: {sum(cases.values())}; " + ", ".join(f"{k} {n}" for k, n in sorted(cases.items())) + ".",
        "",
        "| operator | outcome | equal | refused | moves | why refused (first) |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for name, r in sorted(results.items()):
        why = next((r["texts"][k] for k in (*FAULTS, "refused", "none") if k in r["texts"]), "")
        why = re.sub(r"\. Either redistribute.*", "", why)[:140].replace("|", "\\|").replace("<", "&lt;")
        c = r["counts"]
        lines.append(f"| {name} | {state(r)} | {c.get('equal', 0)} | {c.get('refused', 0)} | {r['moves']} | {why} |")
    return "\n".join(lines) + "\n", totals


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1, help="every N-th operator")
    parser.add_argument("--list", type=pathlib.Path, help="a file of operators that must be equal, and with `: local` move nothing; only these")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--cases", type=int, default=40, help="at most, an operator")
    parser.add_argument("--seconds", type=int, default=240, help="limit of an operator")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    names = [name for name, _ in database() if re.search(arguments.only, name)][:: arguments.every]
    required = {}
    if arguments.list:
        for line in arguments.list.read_text().splitlines():
            name, _, mark = line.split("#")[0].partition(" : ")
            if name.strip():
                required[name.strip()] = mark.strip() == "local"
        unknown = required.keys() - set(names)
        if unknown:
            sys.exit(f"{arguments.list}: not in the operator database: {sorted(unknown)}")
        names = [n for n in names if n in required]
    began = time.monotonic()
    results = sweep(names, arguments)
    text, totals = table(results)
    if arguments.table:
        arguments.table.write_text(text)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    print(f"{len(names)} operators in {time.monotonic() - began:.0f} s: " + ", ".join(f"{k} {n}" for k, n in totals.most_common()))
    failed = [n for n in names if state(results[n]) in FAULTS]
    failed += [n for n, local in required.items() if n not in failed and (state(results[n]) != "equal" or (local and results[n]["moves"]))]
    for name in failed:
        print(f"FAILED {name}: {state(results[name])}, {results[name]['moves']} cases move shards: {results[name]['texts']}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
