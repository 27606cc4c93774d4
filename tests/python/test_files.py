"""Files of tensors from Python: their placements, and folders of several with an index."""

import copy
import re

import pytest
import torch
from torch import nn

import tessera as ts
from support import assert_same, draw, on_ranks, raises, whole


def test_files_restore_placements_on_wish(tmp_path):
    x, path = draw(7, 4), tmp_path / "x.safetensors"

    def save(rank):
        mesh = ts.Mesh({"data": 2, "domain": 2})
        ts.save({"x": ts.distribute_tensor(x, mesh, [ts.Shard(0), ts.Shard(1)], {0: [5, 2], 1: [3, 1]}), "y": x}, mesh, path)

    on_ranks(4, save)

    def load(rank, axes):
        mesh, misfits = ts.Mesh(axes), []
        found = ts.load_as_saved(path, mesh, misfits)
        assert_same(found["x"], x)
        assert_same(found["y"], x)
        return ts.spec(found["x"]).placements, ts.spec(found["x"]).sizes, misfits

    assert on_ranks(4, load, {"data": 2, "domain": 2})[0] == ((ts.Shard(0), ts.Shard(1)), {0: [5, 2], 1: [3, 1]}, [])
    placements, sizes, misfits = on_ranks(2, load, {"domain": 2})[0]
    assert placements == (ts.Shard(1),) and sizes == {1: [3, 1]} and len(misfits) == 1 and "'data'" in misfits[0]
    placements, sizes, _ = on_ranks(3, load, {"data": 3})[0]
    assert placements == (ts.Shard(0),) and sizes == {0: [3, 2, 2]}  # another size: even
    with pytest.raises(RuntimeError, match="'data'"):
        on_ranks(2, lambda rank: ts.load_as_saved(path, ts.Mesh({"domain": 2})))


def test_ranks_save_and_load_the_same(tmp_path):
    path = tmp_path / "a.safetensors"

    def body(rank):
        mesh, odd = ts.Mesh({"x": 3}), rank == 1
        for mine, says in (
            ({"b": torch.ones(4)}, "'b' Float [4]"),
            ({}, "nothing"),
            ({"a": torch.ones(5)}, "'a' Float [5]"),
            ({"a": torch.ones(4).double()}, "'a' Double [4]"),
            ({"a": ts.zeros([4], mesh, ts.Shard(0))}, "'a' Float [4] x=Shard(0)[2, 1, 1]"),
        ):
            said = says if says == "nothing" else f'"{says}"'
            raises(ts.MismatchError, re.escape(f"ranks [0, 2] have \"'a' Float [4]\", rank 1 has {said}"), ts.save, mine if odd else {"a": torch.ones(4)}, mesh, path)
        raises(ts.InvalidArgument, "rank 1: .*ComplexDouble", ts.save, {"a": torch.ones(4, dtype=torch.complex128 if odd else None)}, mesh, path)
        raises(ts.MismatchError, "tensors to save", ts.save, {name: torch.ones(20) for name in "abcd"}, mesh, tmp_path / "folder", max_bytes=200 if odd else 100)
        assert not path.exists()
        # Of plain tensors the values are those of the first rank.
        ts.save({"a": torch.full((3, 3), float(rank))}, mesh, path)
        assert_same(ts.load(path, mesh)["a"], torch.zeros(3, 3))
        # Shards of one size, which nothing else would tell apart.
        raises(ts.MismatchError, re.escape("rank 1 has \"'a' [3, 3] x=Shard(1)"), ts.load, path, mesh, {"a": ts.Shard(int(odd))})
        raises(ts.InvalidArgument, r"rank 1: .*Shard\(5\)", ts.load, path, mesh, {"a": ts.Shard(5 * odd)})
        assert_same(ts.load(path, mesh, {"a": ts.Shard(0)})["a"], torch.zeros(3, 3))

    ts.run_threads(3, body, timeout=20)


def network():
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).double()


def test_folders_of_files_with_an_index(tmp_path):
    """As Hugging Face's tools write and read them."""
    safetensors = pytest.importorskip("safetensors.torch")
    net = network()
    expected = {name: t.clone() for name, t in [*net.named_parameters(), *net.named_buffers()]}

    def body(rank):
        mesh = ts.Mesh({"x": 3})
        mine = ts.distribute_module(copy.deepcopy(net), mesh, lambda name, t: [ts.Shard(0)] if t.dim() else None)
        ts.save(mine, mesh, tmp_path / "model", max_bytes=200)
        got = ts.load(tmp_path / "model", ts.Mesh({"y": 3}), {"0.weight": ts.Shard(1)})
        assert ts.spec(got["0.weight"]).placements == (ts.Shard(1),) and got.keys() == expected.keys()
        for name, t in expected.items():
            assert torch.equal(whole(got[name]), t), name
        other = ts.distribute_module(network(), mesh, lambda name, t: [ts.Shard(0)] if name == "4.bias" else None)
        for p in other.parameters():
            p.data.zero_()
        ts.load_into(other, mesh, tmp_path / "model")
        for name, t in [*other.named_parameters(), *other.named_buffers()]:
            assert torch.equal(whole(t), expected[name]), name
        raises(ts.InvalidArgument, "'more' is not in the file", ts.load_into, {**dict(other.named_parameters()), "more": torch.ones(1)}, mesh, tmp_path / "model")
        raises(ts.InvalidArgument, "placements name", ts.load, tmp_path / "model", mesh, {"nobody": ts.Shard(0)})
        raises(ts.FileError, "index.json", ts.load, tmp_path, mesh)
        ts.world().barrier()
        if rank == 0:
            (tmp_path / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
        ts.world().barrier()
        raises(ts.FileError, "outside of the folder", ts.load, tmp_path / "model", mesh)

    on_ranks(3, body)
    files = sorted(tmp_path.glob("model/*.safetensors"))
    assert [f.name for f in files] == [f"model-{k + 1:05d}-of-{len(files):05d}.safetensors" for k in range(len(files))] and len(files) > 2
    read = {name: t for f in files for name, t in safetensors.load_file(f).items()}
    assert read.keys() == expected.keys() and all(torch.equal(read[name], t) for name, t in expected.items())
    with safetensors.safe_open(files[0], framework="pt") as file:
        assert file.metadata()["format"] == "pt"
