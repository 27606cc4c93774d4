"""A recommender of two towers: the rows of their tables lie over one axis of the mesh, impressions over both. Beside one process.

    tessera run -n 4 -- python examples/python/20_two_towers.py         # any number of ranks
"""

import copy

import torch
from torch import nn

import tessera as ts

CATEGORIES, WIDTH, NUMBERS, ALL = 3000, 8, 13, 60
Side = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # numbers, ids of categories, where each bag of ids begins


def drawn(generator: torch.Generator) -> Side:
    """Bags of 0 to 4 categories, of which few are common and most are rare."""
    ends = torch.randint(5, (ALL,), generator=generator).cumsum(0)
    rare = torch.rand(int(ends[-1]), generator=generator, dtype=torch.float64).pow(4)
    return torch.randn(ALL, NUMBERS, generator=generator, dtype=torch.float64), (rare * CATEGORIES).long(), torch.cat([ends.new_zeros(1), ends[:-1]])


def shared(side: Side, first: int, last: int, mesh: ts.Mesh) -> Side:
    """What a rank reads, impressions from `first` to `last`, as its part of those of all."""
    numbers, ids, offsets = side
    begin, end = (int(torch.cat([offsets, torch.tensor([len(ids)])])[at]) for at in (first, last))
    return ts.from_local(numbers[first:last], mesh, [ts.Shard(0)] * 2), *ts.bags_from_local(ids[begin:end], offsets[first:last] - begin, mesh)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.EmbeddingBag(CATEGORIES, WIDTH, mode="sum", sparse=True), nn.Linear(NUMBERS, WIDTH)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.relu(self.layer(numbers)) + self.table(ids, offsets)
        return y


def optimizers(net: nn.ModuleList) -> list[torch.optim.Optimizer]:
    """Tables have one of their own, which touches the rows that were used."""
    tables, layers = ([p for name, p in net.named_parameters() if ("table" in name) == wanted] for wanted in (True, False))
    return [ts.RowwiseAdagrad(tables, 0.3), torch.optim.Adam(layers, 1e-2, eps=1e-4)]


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    rank, ranks = ts.rank(), ts.world_size()
    mesh = ts.Mesh({"data": -1, "table": 2 if ranks % 2 == 0 else ranks})
    torch.manual_seed(0)
    alone, losses = nn.ModuleList([Tower(), Tower()]).double(), [float("nan")]
    net = copy.deepcopy(alone)
    ts.distribute_module(net, mesh, lambda name, t: [ts.Replicate(), ts.Shard(0)] if "table" in name else None)
    ours, theirs = optimizers(net), optimizers(alone)
    first, last = (ALL * r * r // ranks**2 for r in (rank, rank + 1))  # uneven on purpose
    for step in range(60):
        generator = torch.Generator().manual_seed(step % 6)
        user, ad = drawn(generator), drawn(generator)
        clicks = (user[0][:, 0] > ad[0][:, 0]).double()
        parts = shared(user, first, last, mesh), shared(ad, first, last, mesh), ts.from_local(clicks[first:last], mesh, [ts.Shard(0)] * 2)
        losses = []
        for towers, (u, a, y), its in ((net, parts, ours), (alone, (user, ad, clicks), theirs)):
            loss = nn.functional.binary_cross_entropy_with_logits((towers[0](*u) * towers[1](*a)).sum(1), y)
            towers.zero_grad()
            loss.backward()
            for optimizer in its:
                optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-9, (step, losses)
    assert losses[0] < 0.5
    if rank == 0:
        print(f"two_towers: {mesh.axes}, loss {losses[0]:.4f}, as on one process", flush=True)


main()
