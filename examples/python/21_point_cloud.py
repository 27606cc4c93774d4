"""A periodic cloud of points with a learned energy whose gradient are the forces; plain torch on points that ranks own. Beside one process.

    tessera run -n 3 -- python examples/python/21_point_cloud.py         # any number of ranks
"""

import torch
from torch import nn

import tessera as ts


class Net(nn.Module):
    """Two layers of messages along edges, scattered at their targets with a softmax over each point's edges; it knows no ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor, edges: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        source, target = edges
        distance = ((x[source] + shift - x[target]).square().sum(1, keepdim=True) + 1e-3).sqrt()
        h = torch.ones_like(x).sum(1, keepdim=True).expand(-1, 4)
        for layer in self.layers:
            message = layer(torch.cat([h[source], h[target], distance], 1)) * (-distance).exp()
            index = target.unsqueeze(1).expand_as(message)
            most = message.new_zeros(len(x), 4).scatter_reduce(0, index, message.detach(), "amax", include_self=False)
            weight = (message - most[target]).exp()
            total = message.new_zeros(len(x), 4).scatter_add(0, index, weight)
            h = h + message.new_zeros(len(x), 4).scatter_add(0, index, message * weight / total[target])
        return h.square().sum()


def train(net: nn.Module, x: torch.Tensor, edges: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(net(x, edges, shift), x, create_graph=True)
    (slope + x.detach().sin()).square().sum().backward()
    return -slope.detach()


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    ts.init(timeout=60)
    rank, ranks = ts.rank(), ts.world_size()
    mesh = ts.Mesh({"domain": ranks})
    torch.manual_seed(0)
    places = torch.rand(200, 3)
    net, alone = Net(), Net()
    alone.load_state_dict(net.state_dict())

    # A piece of a curve through the box for each rank: any owner of any point would do.
    (owned,) = torch.nonzero(ts.partition_along_curve(places, ranks) == rank, as_tuple=True)
    points, mine = ts.OwnedRows(mesh, owned), places[owned]
    edges, shift = ts.edges_within(points, mine, 0.2, box=1.0)
    x = points.shard(mine).requires_grad_(True)
    ts.distribute_module(net, mesh)
    with points:  # what is made with as many rows as there are points is theirs
        forces = ts.full_tensor(train(net, x, edges, shift))

    whole = ts.full_tensor(x.detach()).requires_grad_(True)
    expected = train(alone, whole, ts.full_tensor(edges), ts.full_tensor(shift))
    assert torch.allclose(forces, expected, rtol=1e-10, atol=1e-12)
    for p, q in zip(net.parameters(), alone.parameters()):
        assert p.grad is not None and q.grad is not None
        assert torch.allclose(ts.full_tensor(p.grad), q.grad, rtol=1e-9, atol=1e-11)
    conserved = forces.sum(0).abs().max() / forces.abs().max()
    assert conserved < 1e-12
    if rank == 0:
        print(f"point_cloud: {points.size} points, {edges.shape[1]} edges, forces sum to zero, as on one process", flush=True)


main()
