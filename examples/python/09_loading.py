"""Loading on a mesh: ranks of one `data` coordinate get the same samples, others different ones, and the batch is one sharded tensor. Beside one process.

    tessera run -n 4 -- python examples/python/09_loading.py         # any number of ranks
"""

import torch

import tessera as ts


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    ranks = ts.world_size()
    mesh = ts.Mesh({"data": -1, "model": 2 if ranks % 2 == 0 else 1})

    # 20 samples in memory, by name; any object with len() and [index] reads its own files.
    values = {"input": torch.arange(60, dtype=torch.float64).view(20, 3), "label": torch.arange(20)}
    dataset = ts.TensorDataset(values)
    # The order is a function of seed and step alone, so that it is the same on any number of ranks.
    order = ts.FixedOrder(20, 5, seed=1)
    loader = ts.Loader(dataset, order, mesh, ["data"])
    whole = ts.Loader(dataset, order, mesh, [])  # to compare with: no axis shards this batch

    state, seen = "", 0
    for batch in loader:  # one epoch
        # 5 samples over the data axis, replicated over `model`: some ranks have one more, or none.
        x = ts.from_local(batch.fields["input"], mesh, [ts.Shard(0), ts.Replicate()])
        y = ts.from_local(batch.fields["label"], mesh, [ts.Shard(0), ts.Replicate()])
        expected = whole.next()
        assert x.shape == (5, 3) and torch.equal(ts.full_tensor(x), expected.fields["input"])
        assert torch.equal(ts.full_tensor(y), expected.fields["label"])
        seen += int(ts.full_tensor(y).sum())
        if batch.step == 1:
            state = loader.state()
    assert seen == sum(range(20))

    # Goes on behind the second batch, as a run that was stopped there would, on any number of ranks.
    loader.restore(state)
    rest = [batch.step for batch in loader]
    assert rest == [2, 3], rest
    if ts.rank() == 0:
        print(f"loading: {mesh.axes}, labels sum to {seen}, as on one process", flush=True)


main()
