#!/usr/bin/env python3
"""tests/pytorch/run.py [--table FILE] [--only PATTERN] [GROUP...]: PyTorch's distributed tests over `tessera`; GROUP: c10d, c10d_4, c10d_8, ddp, fsdp, dtensor (all).

c10d are tests out of the installed torch, unchanged, in which the name gloo stands for tessera, on two ranks or as many as they need; the others are programs
written on the models and checks that torch brings for its own tests, since those of DDP, FSDP2 and DTensor are not in its wheel. What needs a GPU is not run,
and listed.
"""

import argparse
import collections
import importlib
import json
import os
import pathlib
import sys
import time
import unittest

# Module, class, and ranks where the tests leave them open.
GROUPS = {
    "c10d": ("c10d_tests", "C10d", 2),
    "c10d_4": ("c10d_tests", "C10d", 4),
    "c10d_8": ("c10d_tests", "C10d", 8),
    "ddp": ("ddp_tests", "Ddp", None),
    "fsdp": ("fsdp_tests", "Fsdp2", None),
    "dtensor": ("dtensor_tests", "DTensors", None),
}


class Result(unittest.TestResult):
    """A line for each test, and what each came to."""

    def __init__(self):
        super().__init__()
        self.verdicts, self._began = {}, 0.0

    def startTest(self, test):
        super().startTest(test)
        self._began = time.monotonic()

    def _note(self, test, verdict, why=""):
        name = test.id().split(".")[-1]
        self.verdicts[name] = (verdict, why)
        print(f"{verdict:7} {name} ({time.monotonic() - self._began:.1f} s) {why.splitlines()[-1] if why else ''}", flush=True)

    def addSuccess(self, test):
        super().addSuccess(test)
        self._note(test, "passed")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self._note(test, "failed", self.failures[-1][1])

    def addError(self, test, error):
        super().addError(test, error)
        self._note(test, "failed", self.errors[-1][1])

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._note(test, "skipped", reason)


def run(group, only):
    source, name_of_case, ranks = GROUPS[group]
    if ranks:
        os.environ["WORLD_SIZE"] = str(ranks)
    module = importlib.import_module(source)
    case = getattr(module, name_of_case)
    left_out = module.left_out() if ranks else {}
    elsewhere = module.of_other_ranks() if ranks else {}
    names = [name for name in unittest.TestLoader().getTestCaseNames(case) if only in name and name not in elsewhere]
    result = Result()
    unittest.TestSuite(case(name) for name in names if name not in left_out).run(result)
    verdicts = {name: ("skipped", left_out[name]) for name in names if name in left_out} | result.verdicts
    for name, text in ((test.id().split(".")[-1], text) for test, text in result.failures + result.errors):
        print(f"==== {name}\n{text}")
    return verdicts


def table(all_verdicts):
    lines = [
        "# PyTorch's distributed tests over `tessera`",
        "",
        "What `make test-pytorch` last came to: tests of `torch.testing._internal.distributed.distributed_test`, unchanged, in which the name gloo stands for `tessera`, and programs written on",
        "the models and checks of PyTorch's own tests of DDP, FSDP2 and DTensor, which its wheel does not bring. CPU, two to eight ranks of one host.",
        "",
        "| group | passed | failed | not run |",
        "| --- | --- | --- | --- |",
    ]
    for group, verdicts in all_verdicts.items():
        count = collections.Counter(verdict for verdict, _ in verdicts.values())
        lines.append(f"| {group} | {count['passed']} | {count['failed']} | {count['skipped']} |")
    for verdict, title in (("failed", "What fails"), ("skipped", "What is not run, and why")):
        reasons = collections.defaultdict(list)
        for verdicts in all_verdicts.values():
            for name, (what, why) in verdicts.items():
                if what == verdict:
                    reasons[why.strip().splitlines()[-1] if why.strip() else ""].append(name)
        if reasons:
            lines += ["", f"## {title}", ""]
        for why, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
            lines.append(f"- {why} ({len(names)}): {', '.join(f'`{name}`' for name in sorted(names))}")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--table", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []])
    arguments = parser.parse_args()
    groups = arguments.groups or list(GROUPS)
    if len(groups) > 1:  # the first changes what the name gloo means, in its process and its children
        failed = False
        for group in groups:
            status = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, "--only", arguments.only, *(["--table", f"{arguments.table}.{group}"] if arguments.table else []), group])
            failed = failed or status != 0
        if arguments.table:
            parts = [pathlib.Path(f"{arguments.table}.{group}") for group in groups]
            missing = [group for group, part in zip(groups, parts) if not part.exists()]
            if missing:
                print(f"{arguments.table} stays as it was: without a result are {', '.join(missing)}", file=sys.stderr)
            else:
                arguments.table.write_text(table({group: json.loads(part.read_text()) for group, part in zip(groups, parts)}))
            for part in parts:
                part.unlink(missing_ok=True)
        sys.exit(failed)
    verdicts = run(groups[0], arguments.only)
    if arguments.table:
        arguments.table.write_text(json.dumps(verdicts))
    count = collections.Counter(verdict for verdict, _ in verdicts.values())
    print(f"{groups[0]}: {count['passed']} passed, {count['failed']} failed, {count['skipped']} not run", flush=True)
    sys.exit(count["failed"] > 0)


if __name__ == "__main__":
    main()
