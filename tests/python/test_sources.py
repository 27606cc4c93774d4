"""Sources of samples from Python: files of several formats, what other packages write, and shards of archives."""

import io
import pathlib
import re
import tarfile

import pytest
import torch

import tessera as ts
from support import on_ranks

FIELD = torch.arange(7 * 5, dtype=torch.float64).reshape(7, 5)


def test_sources(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    save_file({"u": FIELD}, path)
    source = ts.SafetensorsSource(path)
    assert source.variables == ["u"] and source.shape("u") == (7, 5)
    assert torch.equal(source.read("u", start=[1, 0], count=[3, 2], stride=[2, 1], dtype=torch.float64), FIELD[1:7:2, :2])
    data = ts.SourceDataset(source, [ts.SourceField("u", (0, 1), (7, 3))])
    assert len(data) == 7 and torch.equal(data[4][0].double(), FIELD[4, 1:4])
    named = on_ranks(1, lambda rank: ts.Loader(ts.SourceDataset(source, ["u"]), ts.FixedOrder(7, 7, shuffle=False), ts.Mesh({"x": 1}), ["x"]).next())[0]
    assert named.names == ("u",) and torch.equal(named.fields["u"].double(), FIELD)
    with pytest.raises(RuntimeError, match="u"):
        source.read("v")
    tokens = tmp_path / "tokens"
    tokens.write_bytes(torch.arange(10, dtype=torch.int32).numpy().tobytes())
    assert ts.TokenFileDataset(tokens, torch.int32, 4)[1][0].tolist() == [4, 5, 6, 7]


def test_zarr_written_by_its_package(tmp_path):
    """Each rank reads its rows, uneven and across chunks, of what the package zarr has written; what we refuse the package reads, for the page's loader."""
    zarr, codecs = pytest.importorskip("zarr"), pytest.importorskip("numcodecs")
    field = torch.randn(9, 7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    written = {
        "plain": {"zarr_format": 2, "compressors": None},
        "zlib": {"zarr_format": 2, "compressors": codecs.Zlib(3), "order": "F", "dtype": ">f4"},
        "separated": {"zarr_format": 2, "compressors": codecs.GZip(3), "chunk_key_encoding": {"name": "v2", "separator": "/"}},
        "third": {"zarr_format": 3, "compressors": None},
        "gzip": {"zarr_format": 3, "compressors": zarr.codecs.GzipCodec(), "dimension_names": ["time", "y", "x"]},
        "blosc": {"zarr_format": 2, "compressors": codecs.Blosc()},
        "shuffled": {"zarr_format": 3, "compressors": zarr.codecs.BloscCodec(cname="zstd", shuffle="bitshuffle")},
        "zstd": {"zarr_format": 3},
        "lz4": {"zarr_format": 2, "compressors": codecs.LZ4()},
        "sharding_indexed": {"zarr_format": 3, "shards": (8, 6, 4)},
    }
    for name, options in written.items():
        group = zarr.open_group(tmp_path / f"{name}.zarr", mode="w", zarr_format=options.pop("zarr_format"))
        array = group.create_array("sub/u", shape=field.shape, chunks=(4, 3, 2), **{"dtype": "f8", **options})
        array[:] = field.numpy()
        array.attrs["units"] = "m"

    def body(rank, ranks):
        mesh, cuts = ts.Mesh({"data": 1, "domain": ranks}), [0, 7] if ranks == 1 else [0, 3, 3, 6, 7][: ranks] + [7]
        begin, end = cuts[rank], cuts[rank + 1]
        got = {}
        for name in written:
            source = ts.ZarrSource(tmp_path / f"{name}.zarr")
            assert source.variables == ["sub/u"] and source.shape("sub/u") == (9, 7, 5)
            assert source.dims("sub/u") == (("time", "y", "x") if name == "gzip" else ("dim0", "dim1", "dim2"))
            if name in ("lz4", "sharding_indexed"):
                with pytest.raises(ts.NotAvailable, match=f"'{name}', which ZarrSource cannot read.*package zarr"):
                    source.read("sub/u")
                loader = of_the_page("loading_zarr", zarr=zarr, path=tmp_path / f"{name}.zarr/sub/u", rows=slice(begin, end), mesh=mesh)
            else:
                data = ts.SourceDataset(source, [ts.SourceField("sub/u", (0, begin), (9, end - begin))])
                loader = ts.Loader(data, ts.FixedOrder(9, 4, seed=2), mesh, ["data"], workers=2)
            got[name] = [loader.next().tensors[0] for _ in range(3)]
        return got

    whole = alone_of(field)
    for ranks in range(1, 5):
        every = on_ranks(ranks, lambda rank: body(rank, ranks))
        for name in written:
            for step, expected in enumerate(whole):
                assert torch.equal(torch.cat([got[name][step] for got in every], 1).float(), expected.float()), (name, ranks, step)


def alone_of(field):
    def body(rank):
        loader = ts.Loader(ts.TensorDataset(field), ts.FixedOrder(9, 4, seed=2), ts.Mesh({"data": 1}), ["data"])
        return [loader.next().tensors[0] for _ in range(3)]

    return on_ranks(1, body)[0]


def of_the_page(block, **names):
    """A loader as docs/loading.md has it."""
    page = (pathlib.Path(__file__).resolve().parent.parent.parent / "docs/loading.md").read_text()
    (code,) = re.findall(rf"^<!-- python: {block} -->\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names |= {"ts": ts, "torch": torch}
    exec(compile(code, "loading.md", "exec"), names)
    return names["loader"]


def test_shards_of_archives(tmp_path):
    """As many ranks as there may be read the same batches, and go on from a checkpoint of others."""
    lengths = [4, 0, 7, 3, 5, 2]
    for shard, length in enumerate(lengths):
        with tarfile.open(tmp_path / f"{shard:04}.tar", "w") as archive:
            for i in range(length):
                data = io.BytesIO()
                torch.save([torch.tensor([shard, i])], data)
                member = tarfile.TarInfo(f"{i}.pt")
                member.size = data.tell()
                archive.addfile(member, io.BytesIO(data.getvalue()))

    def steps(ranks, saved="", save_at=-1):
        def body(rank):
            loader = of_the_page("loading_tar", tarfile=tarfile, folder=tmp_path, mesh=ts.Mesh({"data": ranks}))
            checkpoints = ts.Checkpointer(tmp_path / "runs")
            if saved:
                checkpoints.load(saved, {"loader": loader})
            got = {}
            for batch in loader:
                got[batch.step] = batch.tensors[0][: batch.real].tolist()
                if batch.step == save_at:
                    checkpoints.save(f"on-{ranks}", {"loader": loader})
            return got

        every = on_ranks(ranks, body)
        assert all(got.keys() == every[0].keys() for got in every)
        return {step: sum((got[step] for got in every), []) for step in every[0]}

    whole = steps(1)
    assert sorted(sum(whole.values(), [])) == [[s, i] for s, n in enumerate(lengths) for i in range(n)]
    assert steps(2, save_at=1) == steps(3) == whole
    rest = {step: batch for step, batch in whole.items() if step > 1}
    assert rest and steps(1, "on-2") == steps(3, "on-2") == rest
