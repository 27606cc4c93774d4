"""Sweeps PyTorch's operator database over sharded inputs, and writes the table of outcomes.

    sweep.py [--table docs/operator_table.md] [--only REGEX] [--every N] [--conditions A,B] [--list FILE] [--beside TABLE] [--json FILE] [--resume]

Each operator is tried under every condition of conditions.py, in a process that can be lost: a crash or a hang is an outcome. Exit status 1 if any
operator is wrong, crashes, hangs, or fails with an error that does not speak of sharding; with --list also if one of the operators named there is not
equal; with --beside also if one is refused, or needs extra bytes, where the table written before says that it is not or does not.
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

from conditions import CONDITIONS
from families import FAMILIES, family_of

FAULTS = ("wrong", "crashed", "hung", "error")
# The counts of a cell. A crash or an error without a word of sharding is as bad as a wrong value.
COUNTS = {"equal": ("equal",), "extra": ("extra",), "refused": ("refused",), "wrong": ("wrong", "error", "crashed"), "hung": ("hung",)}


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


def worker(todo, done, samples, limit, conditions):
    import torch
    from operator_cases import sweep_operator

    torch.set_num_threads(1)
    ops = dict(database())
    done.put(("ready", None))
    while (name := todo.get()) is not None:
        try:
            counts, texts = sweep_operator(ops[name], samples, limit, conditions)
            done.put((name, {"counts": counts, "texts": texts}))
        except Exception as error:
            done.put((name, {"counts": {"unknown": {"error": 1}}, "texts": {"error": f"{type(error).__name__}: {error}"[:200]}}))


class Lane:
    """One process, replaced when it dies or takes too long over an operator."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.start()

    def start(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["operator_cases", "torch.testing._internal.common_methods_invocations"])
        self.todo, self.done = context.Queue(), context.Queue()
        given = (self.todo, self.done, self.arguments.samples, self.arguments.cases, self.arguments.conditions)
        self.process = context.Process(target=worker, args=given, daemon=True)
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
        return (name, {"counts": {"unknown": {kind: 1}}, "texts": {kind: text}}) if name else None

    def end(self):
        self.process.kill()
        self.process.join()


def sweep(names, arguments):
    results = earlier(names, arguments)
    waiting = collections.deque(n for n in names if n not in results)
    lanes = [Lane(arguments) for _ in range(min(arguments.jobs, len(waiting)))]
    while len(results) < len(names):
        idle = True
        for lane in lanes:
            if lane.name is None and lane.ready and waiting:
                lane.give(waiting.popleft())
            if got := lane.poll():
                results[got[0]], idle = got[1], False
                keep(results, arguments)
                status = state(got[1])
                if arguments.verbose or status in FAULTS:
                    print(f"{status:8} {got[0]}: {dict(total(got[1]))} {got[1]['texts'].get(status, '')}", flush=True)
        if idle:
            time.sleep(0.01)
    for lane in lanes:
        lane.end()
    return {name: results[name] for name in names}


def settings(arguments):
    """What results depend on."""
    return {"samples": arguments.samples, "cases": arguments.cases, "conditions": list(arguments.conditions)}


def earlier(names, arguments):
    """With --resume: what an earlier run with the same settings has found, if it was ended before its time."""
    if not arguments.resume or not arguments.json.exists():
        return {}
    kept = json.loads(arguments.json.read_text())
    if kept["settings"] != settings(arguments):
        sys.exit(f"{arguments.json} is of a run with other settings: {kept['settings']}")
    return {n: r for n, r in kept["results"].items() if n in names}


def keep(results, arguments):
    if arguments.json:
        new = arguments.json.with_name(arguments.json.name + ".new")
        new.write_text(json.dumps({"settings": settings(arguments), "results": results}, indent=1))
        new.replace(arguments.json)


def total(result):
    """The outcomes of all conditions together."""
    counts = collections.Counter()
    for of_condition in result["counts"].values():
        counts.update(of_condition)
    return counts


def state(result):
    counts = total(result)
    for fault in FAULTS:
        if counts.get(fault):
            return fault
    if counts.get("equal") or counts.get("extra"):
        return "partly" if counts.get("refused") else "equal"
    return "refused" if counts.get("refused") else "no case"


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

ABOUT = """\
Written by `make sweep`: do not edit. PyTorch's operator database of {version}, {operators} variants, each tensor input sharded along every dim (and with all
those of its shape), float64 unless the condition says otherwise; value and gradients, second derivatives in every third case; beside plain libtorch, to 1e-10
of the largest value in float64, 1e-5 in float32, 0.12 in bfloat16 (random numbers beside a mesh of one rank). At most {cases} cases per operator and condition.

A cell counts **equal / equal with extra bytes / refused / wrong / hung**. *Extra bytes*: the operator had to move shards by itself, which the policy `error`
forbids. *Refused*: with a message that speaks of placements. *Wrong*: another value, another error, or a crash. *Skipped*: samples that plain libtorch
refuses under the condition too, that the database's generator fails to make, that have no strided tensor of one dim or more, or that have no second
derivative; a dash: the operators have no such form.
"""


def counted(counts):
    return [sum(counts.get(kind, 0) for kind in kinds) for kinds in COUNTS.values()]


def by_family(results, conditions):
    ops = dict(database())
    cells = {family: {c: collections.Counter() for c in conditions} for family in FAMILIES}
    for name, result in results.items():
        for condition, counts in result["counts"].items():
            cells[family_of(ops[name])].setdefault(condition, collections.Counter()).update(counts)
    columns = [*conditions, *(["unknown"] if any("unknown" in of for of in cells.values()) else [])]
    lines = [f"| family | {' | '.join(columns)} | skipped |", "| --- |" + " :---: |" * len(columns) + " ---: |"]
    for family, of in cells.items():
        if not any(sum(c.values()) for c in of.values()):
            continue
        texts = ["/".join(map(str, counted(of[c]))) if sum(counted(of.get(c, {}))) else "-" for c in columns]
        lines.append(f"| {family} | {' | '.join(texts)} | {sum(c['skipped'] for c in of.values())} |")
    return lines


def table(results, arguments):
    import torch

    totals = collections.Counter(state(r) for r in results.values())
    cases = collections.Counter()
    for r in results.values():
        cases.update(total(r))
    version = torch.__version__.split("+")[0]
    ops = dict(database())
    lines = [
        "# Operators on sharded tensors: the table of outcomes",
        "",
        *ABOUT.format(version=version, operators=len(results), cases=arguments.cases).splitlines(),
        "",
        f"Cases: {sum(n for k, n in cases.items() if k != 'skipped')}; " + ", ".join(f"{k} {n}" for k, n in sorted(cases.items())) + ".",
        "",
        *by_family(results, arguments.conditions),
        "",
        "| outcome | operators |",
        "| --- | ---: |",
        *(f"| {WORDS[s]} | {totals[s]} |" for s in WORDS),
        "",
        "| operator | family | outcome | equal | extra bytes | refused | wrong | hung | skipped | why not equal (first) |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, r in sorted(results.items()):
        why = next((r["texts"][k] for k in (*FAULTS, "refused", "none") if k in r["texts"]), "")
        why = re.sub(r"\. Either redistribute.*", "", why)[:140].replace("|", "\\|").replace("<", "&lt;")
        c = total(r)
        numbers = " | ".join(map(str, [*counted(c), c["skipped"]]))
        lines.append(f"| {name} | {family_of(ops[name])} | {state(r)} | {numbers} | {why} |")
    return "\n".join(lines) + "\n", totals


def read_table(path):
    """What a table says that was written before: (torch's version, {family: {condition: counts}}, {operator: counts}), counts being {kind: number}."""
    version, columns, families, operators = None, [], {}, {}
    for line in path.read_text().splitlines():
        if found := re.search(r"operator database of (\S+),", line):
            version = found[1]
        cells = [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[:1] == ["family"]:
            columns = cells[1:-1]
        elif cells and cells[0] in FAMILIES:
            counts = (dict(zip(COUNTS, map(int, c.split("/")))) if c != "-" else {} for c in cells[1:-1])
            families[cells[0]] = dict(zip(columns, counts))
        elif len(cells) > 8 and cells[3].isdigit():
            operators[cells[0]] = dict(zip(COUNTS, map(int, cells[3:8])))
    if not (version and families and operators):
        sys.exit(f"{path} is no table of operators as this program writes it")
    return version, families, operators


def worse(results, path):
    """{operator: why}: refused, or with extra bytes, where that table has none for the operator, or none for its family under the condition."""
    import torch

    version, families, operators = read_table(path)
    if version != torch.__version__.split("+")[0]:
        print(f"{path} is of torch {version}: not compared with")
        return {}
    ops, found = dict(database()), {}
    for name, result in results.items():
        for condition, counts in result["counts"].items():
            before = {"operator": operators.get(name, {}), "family": families.get(family_of(ops[name]), {}).get(condition, {})}
            for kind in ("refused", "extra"):
                without = [what for what, of in before.items() if of.get("equal", 0) + of.get("extra", 0) and not of[kind]]
                if counts.get(kind) and without:
                    found.setdefault(name, f"{kind} ({condition}), where {path} has none for the {' and the '.join(without)}")
    return found


def conditions(text):
    wanted = tuple(c.strip() for c in text.split(","))
    unknown = set(wanted) - set(CONDITIONS)
    if unknown:
        raise argparse.ArgumentTypeError(f"no condition is called {sorted(unknown)}; there are {', '.join(CONDITIONS)}")
    return wanted


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, help="results by operator, written after each")
    parser.add_argument("--resume", action="store_true", help="go on where the run that wrote --json ended")
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1, help="every N-th operator")
    parser.add_argument("--list", type=pathlib.Path, help="a file of operators that must be equal, and with `: local` move nothing; only these")
    parser.add_argument("--beside", type=pathlib.Path, help="a table of outcomes that was written before: nothing may be refused, or moved, more than there")
    parser.add_argument("--conditions", type=conditions, default=CONDITIONS, help="separated by commas; default: all")
    parser.add_argument("--samples", type=int, default=4, help="of each operator, at most")
    parser.add_argument("--cases", type=int, default=8, help="per operator and condition, at most")
    parser.add_argument("--seconds", type=int, default=240, help="limit of an operator")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    if arguments.resume and not arguments.json:
        parser.error("--resume needs --json")
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
    less = worse(results, arguments.beside) if arguments.beside else {}
    text, totals = table(results, arguments)
    if arguments.table:
        arguments.table.write_text(text)
    print(f"{len(names)} operators in {time.monotonic() - began:.0f} s: " + ", ".join(f"{k} {n}" for k, n in totals.most_common()))
    failed = [n for n in names if state(results[n]) in FAULTS]
    failed += [n for n, local in required.items() if n not in failed and (state(results[n]) != "equal" or (local and total(results[n])["extra"]))]
    for name in failed:
        print(f"FAILED {name}: {state(results[name])}, {dict(total(results[name]))}: {results[name]['texts']}")
    for name, why in less.items():
        print(f"FAILED {name}: {why}: {results[name]['texts']}")
    sys.exit(1 if failed or less else 0)


if __name__ == "__main__":
    main()
