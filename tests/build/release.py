"""scripts/release makes nothing while versions differ, the changelog is not ready, or a change is not committed; and says all of it."""

import pathlib
import shutil
import subprocess
import sys
import tempfile

script = pathlib.Path(sys.argv[1])
faults = []


def git(folder, *words):
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *words], cwd=folder, check=True, capture_output=True)


def check(what, expected, cmake="0.3.0", changelog="## 0.3.0 (2026-01-31)\n\n- New.\n", dirty=False, version="0.3.0"):
    """`expected`: parts of what is said; none: the release may be made."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "scripts").mkdir()
        shutil.copy2(script, folder / "scripts" / "release")
        (folder / "CMakeLists.txt").write_text(f"project(Tessera VERSION {cmake} LANGUAGES CXX)\n")
        (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{changelog}")
        git(folder, "init", "-q")
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", "Begin")
        if dirty:
            (folder / "more").write_text("x")
        done = subprocess.run([sys.executable, folder / "scripts/release", version, "--check"], capture_output=True, text=True, timeout=60)
        said = done.stdout + done.stderr
        if (done.returncode == 0) != (not expected) or any(part not in said for part in expected) or said.count("release:") != max(1, len(expected)):
            faults.append(f"{what}: exit {done.returncode}: {said}")
        if (folder / "build").exists():
            faults.append(f"{what}: --check has made something")


check("ready", [])
check("another version in CMake", ["CMakeLists.txt says version 0.2.9"], cmake="0.2.9")
check("no version in CMake", ["CMakeLists.txt says version none"], cmake="")
check("no section", ["no section 0.3.0"], changelog="## 0.2.0 (2025-01-31)\n\n- Old.\n")
check("no date", ["has no date"], changelog="## 0.3.0\n\n- New.\n")
check("not released yet", ["under Unreleased"], changelog="## Unreleased\n\n- Newer.\n\n## 0.3.0 (2026-01-31)\n\n- New.\n")
check("an empty section", [], changelog="## Unreleased\n\n## 0.3.0 (2026-01-31)\n\n- New.\n")
check("uncommitted", ["not committed"], dirty=True)
check("all at once", ["CMakeLists.txt", "not committed", "no section 9.9.9"], version="9.9.9", dirty=True)
print("\n".join(faults))
sys.exit(bool(faults))
