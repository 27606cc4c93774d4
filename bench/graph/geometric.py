"""A layer of messages on one rank of ours beside the same layer of PyTorch Geometric, forward and backward, one thread.

    geometric.py [--edges 1000000] [--pairs 15]       an environment with torch_geometric (scripts/bootstrap --zoo), and the package on PYTHONPATH

Ours: plain torch on nodes and edges that are sharded over a mesh of one rank. Theirs: a MessagePassing with the same message, on plain tensors. In turn, in
one run; the bound is that of docs/benchmarks.md. Status 1: it is above 1.1.
"""

import argparse
import math
import statistics
import time

import torch
from torch_geometric.nn import MessagePassing

import tessera as ts

FEATURES, NEIGHBORS, LIMIT = 32, 10, 1.1


def near(nodes):
    """Edges from the ten nodes before and behind each along a curve, sorted by their targets."""
    target = torch.arange(nodes).repeat_interleave(NEIGHBORS)
    off = torch.tensor([-5, -4, -3, -2, -1, 1, 2, 3, 4, 5]).repeat(nodes)
    return torch.stack([(target + off) % nodes, target])


class Theirs(MessagePassing):
    def __init__(self, weight):
        super().__init__(aggr="add")
        self.weight = weight

    def forward(self, x, edges):
        return x + self.propagate(edges, x=x)

    def message(self, x_i, x_j):
        return torch.cat([x_j, x_i], 1).mm(self.weight).tanh()


def ours(x, edges, weight):
    source, target = edges[0], edges[1]
    ends = torch.cat([x.index_select(0, source), x.index_select(0, target)], 1)
    return x + torch.zeros_like(x).index_add(0, target, ends.mm(weight).tanh())


def bound(ratios):
    """The upper 95 % bound of the median: an order statistic."""
    n, below = len(ratios), 0.0
    for k, ratio in enumerate(sorted(ratios)):
        below += math.comb(n, k) / 2**n
        if below >= 0.95:
            return ratio
    return max(ratios)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--edges", type=int, default=1_000_000)
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ts.init()
    mesh = ts.Mesh({"domain": 1})
    edges = near(arguments.edges // NEIGHBORS)
    x, weight = torch.randn(arguments.edges // NEIGHBORS, FEATURES), torch.randn(2 * FEATURES, FEATURES) / 8

    def leaf(t):
        return t.detach().clone().requires_grad_(True)

    b, v = leaf(x), leaf(weight)
    own = [ts.distribute_tensor(t, mesh, [placement]).detach() for t, placement in ((x, ts.Shard(0)), (edges, ts.Shard(1)), (weight, ts.Replicate()))]
    a, cut, w = own[0].requires_grad_(True), own[1], own[2].requires_grad_(True)
    layer = Theirs(v)

    def mine():
        return torch.autograd.grad(ours(a, cut, w).square().mean(), (a, w))

    def geometric():
        return torch.autograd.grad(layer(b, edges).square().mean(), (b, v))

    for got, expected in zip(mine(), geometric()):
        assert torch.allclose(ts.full_tensor(got), expected, rtol=1e-4, atol=1e-7)

    def seconds(step):
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    pairs = []
    for n in range(arguments.pairs):
        order = (mine, geometric) if n % 2 == 0 else (geometric, mine)
        took = {step: seconds(step) for step in order}
        pairs.append((took[mine], took[geometric]))
    ratios = [m / g for m, g in pairs]
    most = bound(ratios)
    print(f"1 rank E={arguments.edges} beside PyTorch Geometric: {statistics.median(m for m, _ in pairs):.3f} s, {statistics.median(g for _, g in pairs):.3f} s; "
          f"ratio {statistics.median(ratios):.3f}, bound {most:.3f}, limit {LIMIT}: {'yes' if most <= LIMIT else 'NO'}")
    return most > LIMIT


if __name__ == "__main__":
    raise SystemExit(main())
