"""Runs the example twice: what three ranks save, two ranks load, with the same loss."""

import pathlib
import re
import subprocess
import sys
import tempfile

launcher, program = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "net.safetensors"
    lines = []
    for ranks, word in ((3, "trained"), (2, "resumed")):
        run = subprocess.run([launcher, "run", "-n", str(ranks), "--timeout", "100", "--", program, str(path)],
                             capture_output=True, text=True, timeout=110)
        print(run.stdout, run.stderr)
        found = re.search(rf"{word}: loss ([0-9.]+)", run.stdout)
        if run.returncode or not found:
            sys.exit(f"the run on {ranks} ranks ended with {run.returncode}")
        lines.append(found.group(1))
    if lines[0] != lines[1]:
        sys.exit(f"saved at loss {lines[0]}, resumed at {lines[1]}")
