"""Batches of any loader as sharded tensors, by the names of fields, and samples that a function augments: those of one process."""

import pytest
import torch

import tessera as ts
from support import assert_same, on_ranks

FIELD, LABEL = torch.arange(7 * 4 * 5, dtype=torch.float64).reshape(7, 4, 5), torch.arange(100, 107)


class Samples:
    """Python's own, of which a rank may have some columns alone."""

    def __init__(self, columns=slice(None)):
        self.columns = columns

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return {"field": FIELD[index][:, self.columns].clone(), "about": {"label": int(LABEL[index])}}


class Unread(Samples):
    def __getitem__(self, index):
        raise AssertionError("a rank for which another one reads was asked for a sample")


def altered(sample, draws):
    field = sample["field"].flip(0) if torch.rand(1, generator=draws) < 0.5 else sample["field"]
    field += torch.randn(field.shape, generator=draws, dtype=torch.float64)
    field[:, int(torch.randint(4, (1,), generator=draws))] = 0
    return {"field": field, "about": {"label": sample["about"]["label"] + torch.randint(1000, (), generator=draws)}}


def order():
    return ts.FixedOrder(7, 3, seed=3, last="pad")


def alone(steps, **options):
    def body(rank):
        loader = ts.Loader(Samples(), order(), ts.Mesh({"x": 1}), ["x"], **options)
        return [loader.next() for _ in range(steps)]

    return on_ranks(1, body)[0]


@pytest.mark.parametrize("axes", [{"data": 2, "domain": 2}, {"domain": 2, "data": 2}, {"data": 1, "domain": 3}])
def test_augmented_samples_are_those_of_one_process(axes):
    expected = alone(5, augment=altered, seed=9)
    assert not torch.equal(expected[0].fields["field"], alone(1, augment=altered, seed=8)[0].fields["field"])

    def body(rank):
        mesh = ts.Mesh(axes)
        parts = [slice(0, 3), slice(3, 5)] if axes["domain"] == 2 else [slice(0, 1), slice(1, 1), slice(1, 5)]
        mine = parts[mesh.coordinate[list(axes).index("domain")]]
        shards = ts.Loader(Samples(mine), order(), mesh, ["data"])
        whole = ts.Loader(Samples(), order(), mesh, ["data"], workers=1, augment=altered, seed=9)
        reads = ts.reads_for_others(mesh, ["data"])
        one = ts.Loader(Samples() if reads else Unread(), order(), mesh, ["data"], augment=altered, seed=9, reads=reads)
        one.require_agreement()
        for batch in expected:
            loaded = shards.next()
            cut = ts.shard_batch(loaded, mesh, ["data"], {"field": ts.FieldSharding({"domain": 2}, whole=False)})
            read = one.next()
            assert bool(read.tensors) == reads and len(read.samples) == read.rows
            for got in (
                ts.augment_batch(cut, loaded.samples, altered, seed=9),
                ts.shard_batch(whole.next(), mesh, ["data"], {"field": ts.FieldSharding({"domain": 2}, whole=True)}),
                ts.scatter_batch(read, mesh, ["data"], {"field": {"domain": 2}}),
            ):
                assert torch.equal(ts.full_tensor(got.fields["field"]), batch.fields["field"])
                assert torch.equal(ts.full_tensor(got.fields["about"]["label"]), batch.fields["about"]["label"])
                assert (got.rows, got.real) == (batch.global_rows, batch.global_real)
                assert [t is u for t, u in zip(got.tensors, (got.fields["field"], got.fields["about"]["label"]))] == [True, True]
        return True

    assert all(on_ranks(axes["data"] * axes["domain"], body))


def test_what_a_function_returns_is_taken_by_name():
    def turned(sample, draws):
        made = altered(sample, draws)
        return {"about": made["about"], "field": made["field"]}

    for got, batch in zip(alone(2, augment=turned, seed=9), alone(2, augment=altered, seed=9)):
        assert torch.equal(got.fields["field"], batch.fields["field"])
        assert torch.equal(got.fields["about"]["label"], batch.fields["about"]["label"])

    def body(rank):
        mesh = ts.Mesh({"data": 1, "domain": 2})
        loader = ts.Loader(Samples(), order(), mesh, ["data"], augment=lambda sample, draws: {"image": sample["field"], "about": sample["about"]})
        with pytest.raises(ts.SampleError, match=r"\['field', 'about/label'\] has become one with \['image', 'about/label'\]"):
            loader.next()
        loaded = ts.Loader(Samples(), order(), mesh, ["data"]).next()
        batch = ts.shard_batch(loaded, mesh, ["data"], {"field": ts.FieldSharding({"domain": 2}, whole=True)})
        got = [ts.augment_batch(batch, loaded.samples, function, seed=9).fields["field"] for function in (altered, turned)]
        assert torch.equal(*map(ts.full_tensor, got))

    on_ranks(2, body)


def test_a_resumed_run_and_processes_draw_the_same():
    expected = alone(6, augment=altered, seed=2)

    def body(rank):
        loader = ts.Loader(Samples(), order(), ts.Mesh({"x": 1}), ["x"], workers=2, augment=altered, seed=2)
        first = [loader.next() for _ in range(4)]
        resumed = ts.Loader(Samples(), order(), ts.Mesh({"x": 1}), ["x"], augment=altered, seed=2)
        resumed.restore(loader.state())
        for got, batch in zip(first + [resumed.next() for _ in range(2)], expected):
            assert torch.equal(got.fields["field"], batch.fields["field"])
        several = ts.Loader(Samples(), order(), ts.Mesh({"x": 1}), ["x"], processes=2, augment=altered, seed=2)
        for batch in expected:
            assert torch.equal(several.next().fields["field"], batch.fields["field"])
        several.close()

    on_ranks(1, body)


def test_what_a_function_raises_on_one_rank_all_raise():
    class Mine(Exception):
        pass

    def fails(sample, draws):
        if sample["about"]["label"] == 104:
            raise Mine("no such field")
        return sample

    def body(rank):
        mesh = ts.Mesh({"data": 2, "domain": 2})
        loaded = ts.Loader(Samples(), ts.FixedOrder(7, 7, seed=3), mesh, ["data"]).next()
        batch = ts.shard_batch(loaded, mesh, ["data"], {"field": ts.FieldSharding({"domain": 2}, whole=True)})
        with pytest.raises(ts.Error, match="sample 4.*no such field") as raised:
            ts.augment_batch(batch, loaded.samples, fails)
        with pytest.raises(ts.Error, match="sample of 2"):
            ts.augment_batch(batch, loaded.samples, lambda sample, draws: sample["field"])
        kept = ts.augment_batch(batch, loaded.samples, lambda sample, draws: sample)
        assert_same(kept.fields["field"], ts.full_tensor(batch.fields["field"]), "kept")
        return isinstance(raised.value.__cause__, Mine)

    assert sum(on_ranks(4, body)) == 1  # the rank on which it was raised has it as the cause

    def one(rank):
        loader = ts.Loader(Samples(), ts.FixedOrder(7, 7, seed=3), ts.Mesh({"x": 1}), ["x"], workers=1, augment=fails)
        with pytest.raises(ts.SampleError, match="sample 4.*no such field") as raised:
            loader.next()
        assert isinstance(raised.value.__cause__, Mine)

    on_ranks(1, one)


def test_what_one_rank_alone_gives_wrongly_the_others_are_told():
    rows = [torch.ones(2, 3)]

    def body(rank):
        mesh, alone = ts.Mesh({"data": 2}), ts.Mesh({"data": 1, "domain": 2})
        loader = ts.Loader(ts.TensorDataset(torch.ones(8, 3)), ts.FixedOrder(8, 4), mesh, ["data"])
        wrong = rank == 1
        for call, says in (
            (lambda: ts.shard_batch([] if wrong else rows, mesh, ["data"]), "a batch is a LoadedBatch, or tensors"),
            (lambda: ts.shard_batch(rows, mesh, ["date" if wrong else "data"]), "no axis 'date'"),
            (lambda: ts.shard_batch(rows, mesh, ["data"], [3] if wrong else []), "is no FieldSharding"),
            (lambda: ts.shard_batch(loader.next(), mesh, ["data"], [None] * 2 * wrong), "1 tensors and 2 field shardings"),
            (lambda: ts.scatter_batch([] if wrong else rows, alone, ["data"]), "a batch is a LoadedBatch, or tensors"),
        ):
            with pytest.raises((TypeError, ts.InvalidArgument) if wrong else ts.PeerFailedError, match=says):
                call()
                mesh.barrier()
            mesh.barrier()
        assert_same(ts.shard_batch(rows, mesh, ["data"]).tensors[0], torch.ones(4, 3), "goes on")

    ts.run_threads(2, body, timeout=20)


def test_tensors_of_any_loader_are_one_batch():
    images, labels = torch.arange(9 * 3 * 4.0, dtype=torch.float64).reshape(9, 3, 4) / 100, torch.arange(9)

    def linear():
        net = torch.nn.Linear(4, 1).double()
        for p in net.parameters():
            torch.nn.init.constant_(p, 0.3)
        return net

    def body(rank):
        mesh = ts.Mesh({"data": 2, "domain": 2})
        rows = [slice(0, 7), slice(7, 9)][mesh.coordinate[0]]
        given = {"input": {"image": images[rows]}, "target": [labels[rows]]}
        fields = {"input": ts.FieldSharding({"domain": 1}, whole=True)}
        got = ts.shard_batch(given, mesh, ["data"], fields)
        assert list(got.fields) == ["input", "target"] and isinstance(got.fields["target"], list) and got.real == 9
        read = ts.scatter_batch(given if ts.reads_for_others(mesh, ["data"]) else None, mesh, ["data"], {"input": {"domain": 1}})
        for batch in (got, read):
            assert_same(batch.fields["input"]["image"], images, "images")
            assert_same(batch.fields["target"][0], labels, "labels")
            assert ts.spec(batch.fields["input"]["image"]).placements == (ts.Shard(0), ts.Shard(1))
        # A session of one's own: the mean over all rows.
        net = linear()
        ts.distribute_module(net, mesh)
        with ts.Session(net, torch.optim.SGD(net.parameters(), 0.01)) as session:
            session.micro_batch(lambda: net(got.fields["input"]["image"]).square().mean(), got.real)
            session.step()
        # What is written at the first try: one sharding by itself, for labels too, or dims without a list.
        one = ts.FieldSharding({"domain": 1}, whole=True)
        assert_same(ts.shard_batch([images[rows]], mesh, ["data"], one).tensors[0], images, "images")
        with pytest.raises(ts.InvalidArgument, match="dim 1 of a tensor with 1 dims: give each tensor of the batch its own sharding"):
            ts.shard_batch([images[rows], labels[rows]], mesh, ["data"], [one])
        with pytest.raises(TypeError, match="fields: 1 of 'domain' is no FieldSharding.*stands in a list"):
            ts.shard_batch([images[rows]], mesh, ["data"], {"domain": 1})
        loader = ts.Loader(ts.TensorDataset(images), ts.FixedOrder(9, 8), ts.Mesh({"data": 4}), ["data"])
        with pytest.raises(ts.InvalidArgument, match="give the mesh and the axes that the loader was made with"):
            ts.shard_batch(loader.next(), mesh, ["data"], [one])
        with pytest.raises(ts.InvalidArgument, match="same samples"):
            ts.shard_batch({"image": images[: 2 + rank]}, mesh, ["data"])
        with pytest.raises(ts.InvalidArgument, match="dim 0 has the rows"):
            ts.shard_batch([images, labels[: 9 - (rank == 3)]], mesh, ["data"])
        for wrong in ([], {"a": 1}, [torch.tensor(1.0)]):
            with pytest.raises(TypeError, match="a batch is a LoadedBatch, or tensors"):
                ts.shard_batch(wrong, mesh, ["data"])
        return ts.full_tensor(net.weight).detach().clone()

    net = linear()
    net(images).square().mean().backward()
    for weight in on_ranks(4, body):
        assert_same(weight, (net.weight - 0.01 * net.weight.grad).detach(), "weight")
