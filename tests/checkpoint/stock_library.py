"""Python's own safetensors library reads what we write, and we read what it writes.

usage: stock_library.py HELPER; exit code 77 (skipped) where the library is not installed.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
except ImportError as why:
    print(f"skipped: {why} (scripts/bootstrap --python brings it)")
    sys.exit(77)

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool", "complex64",
          "float8_e4m3fn", "float8_e5m2"]


def counted(name):
    i = torch.arange(15, dtype=torch.float32).view(5, 3)
    return (i % 2 if name == "bool" else i).to(getattr(torch, name))


def same(got, expected):
    assert got.dtype == expected.dtype and got.shape == expected.shape, (got.dtype, got.shape)
    assert got.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8)), (got, expected)


def main():
    helper = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        subprocess.run([helper, "write", folder], check=True, timeout=60)

        # The shards of a checkpoint, put together by the global offsets in their metadata.
        whole = {name: torch.zeros(5, 3).to(getattr(torch, name)) for name in DTYPES}
        whole["plain"] = torch.zeros(5, 3)
        covered = dict.fromkeys(whole, 0)
        shards = sorted((folder / "c").glob("shard-*.safetensors"))
        assert len(shards) >= 2
        for shard in shards:
            with safe_open(shard, framework="pt") as file:
                where = json.loads(file.metadata()["tessera.shards"])
                for name, about in where.items():
                    part = file.get_tensor(name)
                    assert about["shape"] == [5, 3]
                    target = whole[about["tensor"]]
                    (row, column) = about["offset"]
                    target[row:row + part.shape[0], column:column + part.shape[1]] = part
                    covered[about["tensor"]] += part.numel()
        for name, tensor in whole.items():
            assert covered[name] == 15, f"{name}: {covered[name]} of 15 elements"
            same(tensor, counted("float32" if name == "plain" else name))

        one = load_file(folder / "one.safetensors")
        assert set(one) == set(whole)
        for name, tensor in one.items():
            same(tensor, counted("float32" if name == "plain" else name))
        same(load_file(folder / "saved.safetensors")["w"], counted("float32"))

        save_file({name: counted(name) for name in DTYPES}, folder / "python.safetensors", metadata={"format": "pt"})
        subprocess.run([helper, "read", folder / "python.safetensors"], check=True, timeout=60)


main()
