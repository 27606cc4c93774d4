"""One rank of each domain group reads samples with named fields, and the others get their rows; a field of one rank is scattered. Beside one process.

    tessera run -n 4 -- python examples/python/16_scatter.py         # any number of ranks
"""

import torch
from torch import nn

import tessera as ts


def field(phase: float) -> torch.Tensor:
    return torch.sin(torch.arange(6 * 9 * 4, dtype=torch.float64) + phase).view(6, 9, 4)


def smoothed(wind: torch.Tensor, month: torch.Tensor) -> torch.Tensor:
    """The wind along the rows, where neighbours share a row, and the month as a factor."""
    mean = nn.functional.avg_pool1d(wind.transpose(1, 2), 3, 1, 1).transpose(1, 2)
    return mean * (1 + month).view(-1, 1, 1)


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    rank, ranks = ts.rank(), ts.world_size()
    mesh = ts.Mesh({"data": -1, "domain": 2 if ranks % 2 == 0 else 1})
    ts.set_policies("error")  # nothing is gathered unseen

    # 6 samples: two maps of 9 x 4 and the month, nested as they please.
    samples = ts.TensorDataset({"inputs": {"wind": field(0), "about": {"month": torch.arange(6)}}, "target": field(1)})
    order = ts.FixedOrder(6, 4, seed=1)
    loader = ts.Loader(samples, order, mesh, ["data"]) if ts.reads_for_others(mesh, ["data"]) else None
    whole = ts.Loader(samples, order, mesh, [])
    rows = ts.FieldSharding({"domain": 1})
    for _ in range(4):
        batch = ts.scatter_batch(loader.next() if loader else None, mesh, ["data"], {"inputs/wind": rows, "target": rows}).fields
        every = whole.next().fields
        y = smoothed(batch["inputs"]["wind"], batch["inputs"]["about"]["month"])
        expected = smoothed(every["inputs"]["wind"], every["inputs"]["about"]["month"])
        assert torch.allclose(ts.full_tensor(y), expected, rtol=0, atol=1e-12)
        apart = (y - batch["target"]).square().mean() - (expected - every["target"]).square().mean()
        assert abs(apart.item()) < 1e-12

    # The first rank alone has this; rows in shards of any sizes, some of them empty.
    sizes = [9] if ranks == 1 else [5, *[0] * (ranks - 2), 4]
    mine = ts.scatter(field(1)[0] if rank == 0 else None, ts.Mesh({"all": ranks}), [ts.Shard(0)], {0: sizes})
    assert torch.equal(ts.full_tensor(mine), field(1)[0])
    assert torch.allclose(ts.full_tensor(mine.square().sum(0)), field(1)[0].square().sum(0), rtol=0, atol=1e-12)
    if rank == 0:
        print(f"scatter: {mesh.axes}, rows {sizes}, as on one process", flush=True)


main()
