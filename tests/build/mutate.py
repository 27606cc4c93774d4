"""scripts/mutate draws the same mutations from the same seed, changes nothing where it only shows them, and puts back what a run that was killed had changed."""

import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile

script = pathlib.Path(sys.argv[1])
root = script.parent.parent
faults = []


def run(*options):
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        faults.append(f"{' '.join(map(str, options))}: {done.stdout}{done.stderr}")
    return done.stdout


def sources():
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted((root / "tessera/partition").rglob("*")) if path.is_file())).hexdigest()


with tempfile.TemporaryDirectory() as folder:
    before = sources()
    shown = [run("--build", folder, "--seed", str(seed), "--count", "12", "--show", "partition") for seed in (1, 1, 2)]
    if shown[0] != shown[1] or shown[0] == shown[2] or len(shown[0].splitlines()) != 36:
        faults.append(f"drawn: {shown}")
    if sources() != before:
        faults.append("showing changes the sources")
    left = pathlib.Path(folder) / "left.cpp"
    left.write_text("a mutant")
    (pathlib.Path(folder) / "mutate.journal").write_text(json.dumps({"path": str(left), "text": "the source"}))
    run("--build", folder, "--restore")
    if left.read_text() != "the source" or (pathlib.Path(folder) / "mutate.journal").exists():
        faults.append("what a run that was killed had changed is not put back")
print("\n".join(faults) or "drawn alike, shown without a change, put back")
sys.exit(1 if faults else 0)
