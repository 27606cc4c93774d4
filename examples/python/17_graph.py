"""A graph network on nodes that a table of owners divides: the network's own code, one line changed. Beside one process.

    tessera run -n 3 -- python examples/python/17_graph.py         # any number of ranks
"""

from collections.abc import Callable

import torch
from torch import nn

import tessera as ts


class Net(nn.Module):
    """Two layers of messages along edges; the energy of positions, whose gradients are forces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 4)) for _ in range(2))

    def forward(self, positions: torch.Tensor, source: torch.Tensor, target: torch.Tensor, exchanged: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows) -> torch.Tensor:
        x, h = exchanged(positions), torch.ones(len(positions), 4)
        distance = ((x[source] - x[target]).square().sum(1, keepdim=True) + 0.1).sqrt()
        for layer in self.layers:
            everything = exchanged(h)  # this rank's rows, then its ghosts
            message = layer(torch.cat([everything[source], everything[target], distance], 1))
            h = h + torch.zeros_like(h).index_add(0, target, message)
        return h.square().sum()


def train(energy: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
    (slope + positions.detach().sin()).square().sum().backward()
    return -slope.detach()


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    ts.init(timeout=60)
    rank, ranks = ts.rank(), ts.world_size()
    torch.manual_seed(0)
    positions, edges = torch.randn(60, 3), torch.randint(60, (2, 400))
    owner = torch.randint(ranks, (60,))  # a solver's partition: any
    net, alone, whole = Net(), Net(), positions.clone().requires_grad_(True)
    alone.load_state_dict(net.state_dict())
    expected = train(alone(whole, *edges), whole)

    own, (source, target) = (owner == rank).nonzero().flatten(), edges[:, owner[edges[1]] == rank]
    plan = ts.GhostPlan(ts.world(), own, ts.ghosts_of(own, source))
    mine = positions[own].requires_grad_(True)
    rows = plan.local_rows(source), plan.local_rows(target)
    forces = train(net(mine, *rows, lambda t: ts.ghost_exchange(plan, t)), mine)
    assert torch.allclose(forces, expected[own], rtol=1e-10, atol=1e-12)
    for p, q in zip(net.parameters(), alone.parameters()):
        assert p.grad is not None and q.grad is not None
        assert torch.allclose(ts.world().all_reduce(p.grad), q.grad, rtol=1e-10, atol=1e-12)
    if rank == 0:
        print(f"graph: {plan.owned} of 60 nodes and {plan.ghosts} ghosts on rank 0, as on one process", flush=True)


main()
