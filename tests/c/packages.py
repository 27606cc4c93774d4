"""Packages of AOTInductor for the program in C: packages.py FOLDER. One that is right, and from it those that are not."""

import json
import pathlib
import sys
import zipfile
import zlib

import torch

import tessera as ts

RECORD = "net/extra/tessera_inputs.json"


class Net(torch.nn.Module):
    """Differences along the third dim, which read a shorter field beyond its end, and a sum."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x, shift):
        y = self.scale * (x[:, :, 1:] - x[:, :, :-1]) + shift[:, None, None]
        return y, y.sum()


def rewritten(source, path, change):
    """A copy whose records `change` has replaced, or left out where it gives None."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    net = folder / "net.pt2"
    h, w = torch.export.Dim("h", max=64), torch.export.Dim("w", max=64)
    example = torch.zeros(8, 5, 3, dtype=torch.float64).permute(2, 0, 1)[None]
    program = torch.export.export(Net(), (example, torch.zeros(3, dtype=torch.int64)), dynamic_shapes=({2: 2 * h, 3: w}, None))
    ts.save_package(program, net, {"aot_inductor.compile_wrapper_opt_level": "O0", "cpp_cache_precompile_headers": False})
    rewritten(net, folder / "bare.pt2", lambda name, content: None if name == RECORD else content)
    rewritten(net, folder / "code.pt2", lambda name, content: None if name.endswith(".so") else content)
    rewritten(net, folder / "text.pt2", lambda name, content: b"{" if name == RECORD else content)

    def recorded(**changes):
        """The record with other values, and a sum that is right."""

        def change(name, content):
            if name != RECORD:
                return content
            text = json.dumps(json.loads(json.loads(content)["record"]) | changes)
            return json.dumps({"record": text, "sum": zlib.crc32(text.encode())})

        return change

    unordered = {"name": "x", "dtype": "float64", "sizes": [1, 3, 8, 5], "order": [0, 1, 2, 9]}
    rewritten(net, folder / "sum.pt2", lambda name, content: content.replace(b"64]", b"65]") if name == RECORD else content)
    rewritten(net, folder / "cpu.pt2", recorded(instructions="of another CPU"))
    rewritten(net, folder / "order.pt2", recorded(inputs=[unordered]))
    content = net.read_bytes()
    (folder / "short.pt2").write_bytes(content[: len(content) // 2])
    with zipfile.ZipFile(net) as archive:
        code = next(entry for entry in archive.infolist() if entry.filename.endswith(".so"))
    damaged = bytearray(content)
    damaged[code.header_offset + 200 + code.file_size // 2] ^= 1
    (folder / "bit.pt2").write_bytes(damaged)
    (folder / "words.pt2").write_text("no package\n")
    torch.export.save(program, folder / "program.pt2")


main(pathlib.Path(sys.argv[1]))
