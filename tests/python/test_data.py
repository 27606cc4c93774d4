"""The loader, orders and streams from Python: the batches of one process, on any mesh."""

import gc
import threading
import time

import pytest
import torch

import tessera as ts
from support import on_ranks

FIELD, LABEL = torch.arange(7 * 5, dtype=torch.float64).reshape(7, 5), torch.arange(100, 107)


class Samples:
    """Python's own: a field and a number."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return FIELD[index], int(LABEL[index])


def alone(order, steps=5, **options):
    def body(rank):
        loader = ts.Loader(ts.TensorDataset(FIELD, LABEL), order, ts.Mesh({"x": 1}), ["x"], **options)
        return [loader.next() for _ in range(steps)]

    return on_ranks(1, body)[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["tensors", "python"])
def test_batches_are_those_of_one_process(kind, workers):
    order = ts.FixedOrder(7, {0: 3, 2: 5}, seed=3, last="pad")
    expected = alone(order)
    samples = ts.TensorDataset(FIELD, LABEL) if kind == "tensors" else Samples()

    def body(rank):
        mesh = ts.Mesh({"data": 2, "domain": 2})
        with_threads = ts.Loader(samples, order, mesh, ["data"], workers=workers)
        with_threads.require_agreement()
        got = [with_threads.next() for _ in range(3)]
        state = with_threads.state()
        with_threads.close()
        resumed = ts.Loader(samples, order, mesh, ["data"], workers=workers)
        resumed.restore(state)
        return got + [resumed.next() for _ in range(2)]

    ranks = on_ranks(4, body)
    for step, whole in enumerate(expected):
        mine = [ranks[rank][step] for rank in (0, 2)]
        for i in range(2):
            assert torch.equal(torch.cat([b.tensors[i] for b in mine]), whole.tensors[i])
            assert torch.equal(ranks[1][step].tensors[i], mine[0].tensors[i])  # the same domain group, the same samples
        assert sum(b.real for b in mine) == whole.real == mine[0].global_real and mine[0].step == step
        assert mine[0].samples + mine[1].samples == whole.samples and mine[0].slices[0][:3] == (0, 0, mine[0].rows)


def test_epochs_and_orders():
    def body(rank):
        mesh = ts.Mesh({"x": 1})
        loader = ts.Loader(Samples(), ts.FixedOrder(7, 3, seed=1), mesh, ["x"])
        for _ in range(2):
            labels = torch.cat([b.tensors[1] for b in loader.epoch()])
            assert sorted(labels.tolist()) == LABEL.tolist()
        loader.seek(1)
        assert len(list(loader.epoch())) == 2 and loader.next_epoch() == 1
        weighted = ts.Loader(Samples(), ts.WeightedOrder([0, 1, 0, 0, 0, 0, 0], 4, 8), mesh, ["x"])
        assert weighted.next().tensors[1].tolist() == [101] * 4
        mixed = ts.Loader([Samples(), ts.TensorDataset(-FIELD, -LABEL)], ts.MixtureOrder({"a": 7, "b": 7}, [0.75, 0.25], 8), mesh, ["x"])
        labels = mixed.next().tensors[1]
        assert (labels < 0).sum() == 2 and (labels > 0).sum() == 6
        lengths = [1, 2, 3, 1, 2, 3, 2]
        tokens = [torch.arange(n) + 10 * i for i, n in enumerate(lengths)]
        packed = ts.Loader(ts.Dataset.of(tokens), ts.PackedOrder(lengths, 2, 5, shuffle=False), mesh, ["x"]).next()
        assert packed.tensors[0].shape == (2, 5) and packed.tensors[1].max() >= 2
        padded = ts.Dataset.of(tokens, collate=lambda got: [torch.nn.utils.rnn.pad_sequence(got, batch_first=True)])
        budget = ts.Loader(padded, ts.TokenBudgetOrder(lengths, 6, shuffle=False), mesh, ["x"])
        assert budget.next().tensors[0].shape == (3, 3)
        assert "seed 1" in ts.FixedOrder(7, 3, seed=1).describe()
        with pytest.raises(RuntimeError, match="'keep', 'pad' or 'drop'"):
            ts.FixedOrder(7, 3, last="repeat")
        with pytest.raises(RuntimeError, match="10"):
            ts.Loader(Samples(), ts.FixedOrder(10, 3), mesh, ["x"]).next()

    on_ranks(1, body)


class Nested(Samples):
    def __getitem__(self, index):
        field, label = super().__getitem__(index)
        return {"image": field, "about": {"label": label, "place": [index, 2.0 * index]}}


@pytest.mark.parametrize("workers", [0, 2])
def test_fields_are_nested_as_samples_are(workers):
    expected = alone(ts.FixedOrder(7, 3, seed=3))[0]

    def body(rank):
        mesh = ts.Mesh({"data": 4})  # the last ranks have no rows
        batch = ts.Loader(Nested(), ts.FixedOrder(7, 3, seed=3), mesh, ["data"], workers=workers).next()
        place, twice = batch.fields["about"]["place"]
        assert len(batch.tensors) == 4 and twice.tolist() == (2 * place).tolist() and batch.fields["image"].shape == (batch.rows, 5)
        sharded = ts.shard_batch(batch, mesh, ["data"])
        for t, u in zip((sharded.tensors[0], sharded.tensors[1]), expected.tensors):
            assert torch.equal(ts.full_tensor(t), u)

    on_ranks(4, body)
    mixed = ts.Dataset.of([{"a": 1}, {"b": 2}])
    with pytest.raises(RuntimeError, match="nested alike"):
        on_ranks(1, lambda rank: ts.Loader(mixed, ts.FixedOrder(2, 2), ts.Mesh({"x": 1}), ["x"]).next())


NAMES = ("image", "about/label", "about/place/0", "about/place/1")


@pytest.mark.parametrize("workers", [0, 2])
def test_fields_in_another_order_are_not_taken_for_each_other(workers):
    one, other = ({name: torch.full((2,), float(name == "x")) for name in order} for order in ("xy", "yx"))

    def body(rank):
        mesh = ts.Mesh({"data": 1})
        mixture = ts.Loader([ts.Dataset.of([one]), ts.Dataset.of([other])], ts.MixtureOrder({"a": 1, "b": 1}, [0.5, 0.5], 2), mesh, ["data"], workers=workers)
        with pytest.raises(ts.InvalidArgument, match=r"\['x', 'y'\] and \['y', 'x'\]"):
            mixture.next()
        # Alike within each batch, and not between them.
        loader = ts.Loader(ts.Dataset.of([one, other]), ts.FixedOrder(2, 1, shuffle=False), mesh, ["data"], workers=workers)
        with pytest.raises(ts.SampleError, match="nested alike"):
            [loader.next() for _ in range(2)]

    on_ranks(1, body)


def test_fields_are_sharded_by_name():
    """Read by every rank, or by one of each domain group, whose names the others get with their shards."""
    order = ts.FixedOrder(7, 3, seed=3)
    image, label = alone(order)[0].tensors

    def body(rank):
        mesh = ts.Mesh({"data": 2, "domain": 2})
        batch = ts.Loader(Nested(), order, mesh, ["data"]).next()
        assert batch.names == NAMES
        by_name = {"image": ts.FieldSharding({"domain": 1}, whole=True)}
        read = batch if ts.reads_for_others(mesh, ["data"]) else None
        for got in (ts.shard_batch(batch, mesh, ["data"], by_name), ts.scatter_batch(read, mesh, ["data"], {"image": {"domain": 1}, "about": None})):
            fields = got.fields
            assert torch.equal(ts.full_tensor(fields["image"]), image) and torch.equal(ts.full_tensor(fields["about"]["label"]), label)
            place, twice = fields["about"]["place"]
            assert torch.equal(ts.full_tensor(twice), 2.0 * ts.full_tensor(place))
            assert ts.spec(fields["image"]).sizes[1] == [3, 2] and ts.spec(place).placements == (ts.Shard(0), ts.Replicate())
        for wrong, why in ({"labels": None}, "the fields are"), ({"about": None, "about/label": None}, "two shardings"):
            with pytest.raises(RuntimeError, match=why):
                ts.shard_batch(batch, mesh, ["data"], wrong)
        # Keys that are no part of a path: the batch has no names, and the rest works.
        odd = ts.Loader(ts.TensorDataset({"a/b": FIELD, "": LABEL}), order, mesh, ["data"]).next()
        assert odd.names == () and odd.fields[""].tolist() == odd.tensors[1].tolist()
        assert torch.equal(ts.full_tensor(ts.shard_batch(odd, mesh, ["data"]).fields[0]), image)

    on_ranks(4, body)


def test_a_loop_over_a_loader_is_an_epoch():
    def body(rank):
        mesh = ts.Mesh({"x": 1})
        loader = ts.Loader(ts.TensorDataset(FIELD), ts.FixedOrder(7, 3, last="keep"), mesh, ["x"])
        for epoch in range(2):
            assert [(batch.epoch, batch.rows) for batch in loader] == [(epoch, 3), (epoch, 3), (epoch, 1)]
        with pytest.raises(TypeError, match=r"Dataset.of\(list\)"):
            ts.Loader([1, 2], ts.FixedOrder(2, 1), mesh, ["x"])

    on_ranks(1, body)


def test_samples_of_other_dtypes_are_refused_by_their_index():
    def body(rank):
        samples = ts.Dataset.of([torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int64)])
        loader = ts.Loader(samples, ts.FixedOrder(3, 3, shuffle=False), ts.Mesh({"x": 1}), ["x"])
        with pytest.raises(ts.SampleError, match="sample 2 has a tensor torch.int64"):
            loader.next()

    on_ranks(1, body)


class Damaged(Samples):
    def __getitem__(self, index):
        if index == 4:
            raise OSError("a bad sector")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_dataset_raises_is_the_cause(workers):
    def body(rank):
        loader = ts.Loader(Damaged(), ts.FixedOrder(7, 2, shuffle=False), ts.Mesh({"x": 1}), ["x"], workers=workers)
        assert loader.next().rows == 2 and loader.next().rows == 2
        for _ in range(2):  # it still stands there
            with pytest.raises(RuntimeError, match="sample 4: OSError: a bad sector") as error:
                loader.next()
            assert isinstance(error.value.__cause__, OSError)

    on_ranks(1, body)


class Interrupted(Samples):
    def __getitem__(self, index):
        raise KeyboardInterrupt


def test_an_interruption_is_no_error_of_data():
    def body(rank):
        with pytest.raises(KeyboardInterrupt):
            ts.Loader(Interrupted(), ts.FixedOrder(7, 2), ts.Mesh({"x": 1}), ["x"]).next()
        # The second dataset's exceptions are causes too, and an order over one dataset takes no list of samples.
        mixed = ts.Loader([ts.TensorDataset(FIELD, LABEL), Damaged()], ts.MixtureOrder({"a": 7, "b": 7}, [0, 1], 7), ts.Mesh({"x": 1}), ["x"])
        with pytest.raises(RuntimeError, match="a bad sector") as error:
            mixed.next()
        assert isinstance(error.value.__cause__, OSError)
        with pytest.raises(TypeError, match="Dataset.of"):
            ts.Loader([FIELD[0], FIELD[1]], ts.FixedOrder(2, 2), ts.Mesh({"x": 1}), ["x"])

    on_ranks(1, body)


def test_a_loader_that_goes_waits_for_threads_that_wait_for_the_interpreter():
    def body(rank):
        for _ in range(3):
            loader = ts.Loader(Samples(), ts.FixedOrder(7, 2), ts.Mesh({"x": 1}), ["x"], workers=2, prefetch=4)
            loader.next()
            del loader
            gc.collect()
        return True

    assert on_ranks(1, body) == [True]


def test_a_loader_may_go_within_the_read_of_a_sample():
    dropped, done, collected = threading.Event(), threading.Event(), []

    class Collecting(Samples):
        def __getitem__(self, index):
            if index > 1 and not collected:
                assert dropped.wait(100)
                begin = time.monotonic()
                gc.collect()  # drops the loader, whose thread this is
                collected.append(time.monotonic() - begin)
                done.set()
            return super().__getitem__(index)

    def body(rank):
        loader = ts.Loader(Collecting(), ts.FixedOrder(7, 2, shuffle=False), ts.Mesh({"x": 1}), ["x"], workers=1, stall_limit=100)
        loader.next()
        loader.me = loader
        del loader
        dropped.set()
        assert done.wait(200)

    gc.disable()
    try:
        on_ranks(1, body)
    finally:
        gc.enable()
    assert collected and collected[0] < 50


@pytest.mark.parametrize("axes,batch_axes", [({"data": 2, "domain": 2}, ["data"]), ({"domain": 2, "data": 2}, ["data"]), ({"data": 2, "fsdp": 2}, ["data", "fsdp"])])
def test_a_batch_as_sharded_tensors_in_one_call(axes, batch_axes):
    order = ts.FixedOrder(7, 3, seed=3, last="pad")
    expected = alone(order, 4)
    fields = [ts.FieldSharding({"domain": 1}, whole=False), None] if "domain" in axes else []

    def body(rank):
        mesh = ts.Mesh(axes)
        place = mesh.coordinate[list(axes).index("domain")] if fields else 0
        mine = FIELD[:, [slice(0, 3), slice(3, 5)][place]] if fields else FIELD
        loader = ts.Loader(ts.TensorDataset(mine, LABEL), order, mesh, batch_axes)
        reader = ts.Loader(ts.TensorDataset(FIELD, LABEL), order, mesh, batch_axes) if ts.reads_for_others(mesh, batch_axes) else None
        for whole in expected:
            for got in (
                ts.shard_batch(loader.next(), mesh, batch_axes, fields),
                ts.scatter_batch(reader.next() if reader else None, mesh, batch_axes, fields),
            ):
                assert got.rows == 3 and got.real == whole.global_real and (got.mask is None) == (whole.mask is None)
                for t, u in zip(got.tensors, whole.tensors):
                    assert torch.equal(ts.full_tensor(t), u)
                if fields:
                    assert ts.spec(got.tensors[0]).sizes[1] == [3, 2] and ts.spec(got.tensors[1]).placements.count(ts.Replicate()) == 1
        wrong = ([{"domain": 0}], "dim 0 is the batch") if fields else ([{"data": 1}], "shards the batch")
        with pytest.raises(ts.InvalidArgument, match=wrong[1]):
            ts.shard_batch(loader.next(), mesh, batch_axes, wrong[0])
        if fields:  # complete images that were taken for shards would lie one over the other
            with pytest.raises(ts.InvalidArgument, match="whole = true .* or whole = false"):
                ts.shard_batch(loader.next(), mesh, batch_axes, [{"domain": 1}, None])

    on_ranks(4, body)


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_of_different_lengths(workers):
    lengths = [5, 0, 2]

    def batches(rank, uneven, **options):
        stream = ((torch.tensor([rank, i]),) for i in range(lengths[rank]))
        return list(ts.StreamLoader(stream, 2, uneven=uneven, workers=workers, **options))

    def body(rank):
        got = batches(rank, "weight_zero", example=(torch.zeros(2, dtype=torch.int64),))
        assert [b.real for b in got] == {0: [2, 2, 1], 1: [0, 0, 0], 2: [2, 0, 0]}[rank]
        assert [b.global_real for b in got] == [4, 2, 1]
        kept = torch.cat([b.tensors[0][: b.real] for b in got])
        assert kept.tolist() == [[rank, i] for i in range(lengths[rank])]
        doubled = batches(rank, "weight_zero", example=(torch.zeros(2, dtype=torch.int64),), transform=lambda s: s[0] * 2)
        assert torch.equal(torch.cat([b.tensors[0][: b.real] for b in doubled]), kept * 2)
        with pytest.raises(RuntimeError, match="rank"):
            batches(rank, "error", example=(torch.zeros(2, dtype=torch.int64),))
        ts.world().barrier()
        return True

    assert on_ranks(3, body) == [True] * 3


def test_a_shard_that_fails_is_named_and_read_again():
    tries = []

    def samples(shard, sample):
        for i in range(sample, 4):
            if (shard, i) == (1, 2) and len(tries) < 2:
                tries.append(sample)
                raise OSError("the server is away")
            yield [torch.tensor(10 * shard + i)]

    def body(rank):
        loader = ts.StreamLoader(ts.StreamShards(2, samples, shuffle=False), rows=2)
        got = []
        for _ in range(2):
            got += loader.next().tensors[0].tolist()
        for _ in range(2):
            with pytest.raises(ts.SampleError, match="shard 1, sample 2: .*the server is away") as raised:
                loader.next()
            assert isinstance(raised.value.__cause__, OSError)
        got += [x for batch in loader for x in batch.tensors[0].tolist()]
        assert got == [0, 10, 1, 11, 2, 12, 3, 13] and tries == [0, 2]
        with pytest.raises(ValueError, match="divisor"):
            ts.StreamLoader(ts.StreamShards(4, samples, lanes=3), rows=4)
        with pytest.raises(ValueError, match="seed"):
            ts.StreamLoader(ts.StreamShards(4, samples, seed=-1), rows=4)

    on_ranks(1, body)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_that_fails_loses_nothing_of_any_shard(workers):
    """The iterators that were open are let go; what is read after them goes on where each lane was."""

    def samples(shard, sample):
        return ([torch.tensor(10 * shard + i)] for i in range(sample, 6))

    def read(fails):
        left = {value: 2 for value in fails}

        def transform(sample):
            value = sample[0].item()
            if left.get(value):
                left[value] -= 1
                raise OSError("no such codec")
            return sample

        loader = ts.StreamLoader(ts.StreamShards(8, samples, lanes=4), 8, workers=workers, prefetch=3, transform=transform)
        got, errors = [], 0
        while True:
            try:
                batch = loader.next()
            except ts.SampleError:
                errors += 1
                continue
            if batch is None:
                return got, errors
            got.append(batch.tensors[0].tolist())

    def body(rank):
        whole, _ = read([])
        assert sorted(sum(whole, [])) == [10 * s + i for s in range(8) for i in range(6)]
        fails = [x for batch in whole for x in batch[1::3]]
        got, errors = read(fails)
        assert got == whole
        # What is read ahead of a failure and dropped fails too, and nobody is told.
        assert errors == 2 * len(fails) if workers == 0 else 0 < errors <= 2 * len(fails)

    on_ranks(1, body)
