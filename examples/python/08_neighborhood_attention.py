"""One rank holds a field; the others get their shards of it, attend to their neighbourhoods, and differentiate by a stencil. Beside one process.

    tessera run -n 3 -- python examples/python/08_neighborhood_attention.py         # any number of ranks
"""

import copy

import torch
from torch import nn

import tessera as ts


class Attend(nn.Module):
    """Neighbourhood attention over height x width, three by three, two heads."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)) for t in self.qkv(x).chunk(3, -1))
        y: torch.Tensor = self.out(ts.neighborhood_attention_2d(q, k, v, [3, 3]).flatten(-2))
        return x + y


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    ranks, rank = ts.world_size(), ts.rank()
    mesh = ts.Mesh({"rows": ranks})
    field = torch.sin(torch.arange(2 * 13 * 5 * 8, dtype=torch.float64)).reshape(2, 13, 5, 8)
    sizes = [13 - 2 * (ranks - 1)] + [2] * (ranks - 1)  # uneven on purpose

    torch.manual_seed(1)
    alone = nn.Sequential(Attend(8), Attend(8)).double()
    net = ts.distribute_module(copy.deepcopy(alone), mesh)

    x = ts.scatter(field if rank == 0 else None, mesh, [ts.Shard(1)], {1: sizes})
    y, expected = net(x), alone(field)
    y.square().mean().backward()
    expected.square().mean().backward()
    assert ts.spec(y).placements == (ts.Shard(1),)  # it never came together
    assert torch.allclose(ts.full_tensor(y.detach()), expected, rtol=0, atol=1e-12)
    for p, q in zip(net.parameters(), alone.parameters()):
        assert p.grad is not None and q.grad is not None
        assert torch.allclose(ts.full_tensor(p.grad), q.grad, rtol=0, atol=1e-12)

    # The slope along the rows: each rank's shard, and one row of each neighbour.
    h = ts.halo_exchange(y.detach(), {1: (1, 1, "replicate")})
    slope = ts.from_local((h[:, 2:] - h[:, :-2]) / 2, mesh, [ts.Shard(1)], {1: sizes})
    padded = torch.cat([expected[:, :1], expected, expected[:, -1:]], 1).detach()
    assert torch.allclose(ts.full_tensor(slope), (padded[:, 2:] - padded[:, :-2]) / 2, rtol=0, atol=1e-12)
    if rank == 0:
        print(f"neighborhood_attention: rows {sizes}, as on one process", flush=True)


main()
