"""Heads that do not divide: five heads of attention over any number of ranks, from an ordinary module and four patterns. Beside one process.

    tessera run -n 3 -- python examples/python/05_tensor_parallel.py         # any number of ranks
"""

import copy

import torch
from torch import nn

import tessera as ts

HEADS, SIZE, WIDTH = 5, 4, 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) / SIZE**0.5
        y: torch.Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return y


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    mesh = ts.Mesh({"tensor": ts.world_size()})
    ts.set_policies("error")
    torch.manual_seed(0)
    alone, tokens = Attention().double(), torch.randn(2, 7, WIDTH, dtype=torch.float64)

    # Whole heads on each rank: output features of the projections, input features of the output.
    net = copy.deepcopy(alone)
    heads = ts.column(HEADS)
    ts.tensor_parallel(net, mesh, {"query": heads, "key": heads, "value": heads, "out": ts.row(HEADS)})
    x = ts.distribute_tensor(tokens, mesh, [ts.Replicate()])
    y = net(x)  # nothing has moved: a Partial sum until its value is needed
    assert ts.world_size() == 1 or ts.spec(y).placements == (ts.Partial("sum"),)
    ts.full_tensor(y).square().mean().backward()

    expected = alone(tokens)
    expected.square().mean().backward()
    assert torch.allclose(ts.full_tensor(y.detach()), expected, rtol=0, atol=1e-12)
    for p, q in zip(net.parameters(), alone.parameters()):
        assert p.grad is not None and q.grad is not None
        assert torch.allclose(ts.full_tensor(p.grad), q.grad, rtol=0, atol=1e-12)
    rows = ts.world().all_gather(torch.tensor([len(ts.to_local(net.query.weight.detach())) // SIZE]))
    if ts.rank() == 0:
        print(f"tensor_parallel: heads {rows.flatten().tolist()}, as on one process", flush=True)


main()
