"""The one way between the rooms, checked on the commands that the build really runs.

For each room: a file in it that includes a header of a room it does not need must not compile; it needs lower rooms only; and what a room of the
core can include is its own window, those of the rooms it needs, and libtorch (the MPI and NCCL parts of `comm` besides).
Privacy has three degrees: public headers are installed; those in a folder `internal` are for the rooms that OPENS_TO names; those in `detail` and
`backends` no other room includes. An OPENS_TO without a reach is a fault too. docs/architecture.md says the same needs. Each room has a guide of at most 60 lines.
"""

import argparse
import collections
import json
import pathlib
import re
import shlex
import subprocess
import sys


def include_folders(command):
    """The folders that a compile command searches, and whether libtorch may be among them."""
    words = shlex.split(command)
    folders = []
    for at, word in enumerate(words):
        if word in ("-I", "-isystem"):
            folders.append(words[at + 1])
        elif word.startswith("-I"):
            folders.append(word[2:])
        elif word.startswith("-isystem"):
            folders.append(word[8:])
    return folders


def preprocess(compiler, folders, header):
    """None if a file that includes `header` gets through the preprocessor, else the first error."""
    options = [option for folder in folders for option in ("-isystem", folder)]
    run = subprocess.run([compiler, "-std=c++20", "-E", "-x", "c++", "-", "-o", "/dev/null", *options],
                         input=f'#include "{header}"\n', capture_output=True, text=True, timeout=60, cwd="/")
    return None if run.returncode == 0 else run.stderr


def main():
    parser = argparse.ArgumentParser()
    for name in ("source", "build", "compiler", "torch"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("core", "parts", "rooms"):
        parser.add_argument(f"--{name}", nargs="*", default=[])
    arguments = parser.parse_args()
    source, build = pathlib.Path(arguments.source), pathlib.Path(arguments.build)
    direct, opens = {}, {}
    for entry in arguments.rooms:
        room, needs, opened = entry.split(":")
        direct[room] = [need for need in needs.split(",") if need]
        opens[room] = {other for other in opened.split(",") if other}
    order = list(direct)
    faults, probes = [], 0
    private, public = {"detail", "backends"}, {"tessera/comm/backends/mpi/mpi.h"}

    needed = {}
    for room in order:  # Lowest first, so that the needs of what it needs are known.
        for need in direct[room]:
            if need not in order or order.index(need) >= order.index(room):
                faults.append(f"{room} needs {need}, which is not lower")
        needed[room] = set(direct[room]).union(*(needed.get(need, set()) for need in direct[room]))

    commands = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        # By what is made, since the source may be a batch of several.
        made = re.search(r" -o tessera/([a-z_]+)/CMakeFiles/tessera_\1\.dir/", entry["command"])
        if made:
            commands.setdefault(made.group(1), entry["command"])
    headers = {room: sorted((source / "tessera" / room).rglob("*.h")) for room in order}

    for room in order:
        if room not in commands:
            faults.append(f"{room}: no compile command, so nothing is checked")
            continue
        folders = include_folders(commands[room])
        windows = {str(build / "include" / other) for other in needed[room] | {room}}
        if room in arguments.core:
            parts = tuple(arguments.parts) if room == "comm" else ()
            for folder in folders:
                if folder not in windows and not folder.startswith((arguments.torch, *parts)):
                    faults.append(f"{room} is of the core, but can include from {folder}")
        for other in order:
            if not headers[other] or (other in needed[room]):
                continue
            header = headers[other][0].relative_to(source).as_posix()
            error = preprocess(arguments.compiler, folders, header)
            probes += 1
            if other == room and error:
                faults.append(f"{room} cannot include its own {header}: {error}")
            if other != room and (error is None or header not in error or "No such file" not in error):
                faults.append(f"{room} does not need {other}, but a file in it that includes {header} got: {error or 'no error'}")

    # The way around the include path: a quoted include is of a room, by its full name.
    reaches = collections.Counter()
    for room in order:
        for path in sorted((source / "tessera" / room).rglob("*")):
            if path.suffix not in (".h", ".cpp", ".cu"):
                continue
            for included in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE):
                parts = included.split("/")
                if parts[0] != "tessera" or len(parts) < 3 or ".." in parts or parts[1] not in needed[room] | {room}:
                    faults.append(f"{path.relative_to(source)} includes \"{included}\"")
                elif parts[1] != room and private & set(parts) and included not in public:
                    faults.append(f"{path.relative_to(source)} includes \"{included}\", which is private to {parts[1]}")
                elif parts[1] != room and "internal" in parts:
                    reaches[parts[1], room] += 1
                    if room not in opens[parts[1]]:
                        faults.append(f"{path.relative_to(source)} includes \"{included}\", and {parts[1]} does not open to {room}")
    for room in order:
        for other in sorted(opens[room]):
            if not (source / "tessera" / other).is_dir():
                faults.append(f"{room} opens to {other}, which is no room")
            elif other in order and not reaches[room, other]:
                faults.append(f"{room} opens to {other}, which does not reach in")

    for room in order:
        guide = source / "tessera" / room / "README.md"
        lines = len(guide.read_text().splitlines()) if guide.is_file() else 0
        if not 0 < lines <= 60:
            faults.append(f"the guide {guide.relative_to(source)} has {lines} lines, of 1 to 60")

    # The table of the documentation says what the build says.
    said = {}
    for line in (source / "docs/architecture.md").read_text().splitlines():
        row = re.match(r"\| `([a-z_]+)` \| ([a-z_, ]*?) ?\|", line)
        if row:
            said[row.group(1)] = [need.strip() for need in row.group(2).split(",") if need.strip()]
    for room in order:
        if sorted(said.get(room, ["nothing"])) != sorted(direct[room]):
            faults.append(f"docs/architecture.md says that {room} needs {said.get(room)}, the build {direct[room]}")

    for (room, other), count in sorted(reaches.items()):
        print(f"{other} reaches into {room}/internal {count} times")
    kept = private | {"internal"}
    public_headers = sum(1 for room in order for header in headers[room]
                         if not kept & set(header.relative_to(source).parts) or header.relative_to(source).as_posix() in public)
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{len(order)} rooms, {public_headers} public headers, {sum(reaches.values())} reaches, {probes} includes tried, {len(faults)} faults")
    return 1 if faults or probes < len(order) else 0


if __name__ == "__main__":
    sys.exit(main())
