"""Ordinary programs on sharded tensors beside the same ones on one process."""

import torch

import tessera as ts
from support import assert_same, on_ranks

ROWS = torch.arange(30, dtype=torch.float64).reshape(5, 6) / 10 + 0.1


def rows(t, mesh):
    return ts.distribute_tensor(t, mesh, [ts.Shard(0)])


def plain(make):
    torch.manual_seed(1)
    return make().double()


def compare(make, x, call=lambda net, x: net(x), backward=True, rule=None):
    """Value, gradients of the input and of every parameter, beside one process."""
    net, x = plain(make), x.clone().requires_grad_(backward)
    y = call(net, x)
    if backward:
        (y * y.detach().cos()).sum().backward()
    nets = [plain(make) for _ in range(2)]

    def body(rank):
        mesh = ts.Mesh({"x": 2})
        ts.set_policies("allow", "allow")
        mine, t = ts.distribute_module(nets[rank], mesh, rule), rows(x.detach(), mesh).requires_grad_(backward)
        out = call(mine, t)
        assert_same(out, y, "output")
        if not backward:
            return
        (out * out.detach().cos()).sum().backward()
        assert_same(t.grad, x.grad, "input gradient")
        for (name, p), q in zip(mine.named_parameters(), net.parameters()):
            if q.grad is not None:
                assert_same(p.grad, q.grad, name)

    on_ranks(2, body)


def by_rows(name, p):
    return [ts.Shard(0)] if p.dim() else None


def rows_like(t, x):
    return ts.distribute_tensor(t, ts.spec(x).mesh, ts.spec(x).placements) if ts.is_sharded(x) else t


class WrongGradient(torch.autograd.Function):
    """Gives its input, and a gradient that is wrong where ranks share it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * 1.001 if ts.is_sharded(g) else g
