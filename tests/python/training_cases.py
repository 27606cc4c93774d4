"""Models trained whole on one process, and sharded by whatever a test does with them."""

import contextlib
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessera as ts
from gpt import GPT
from support import assert_same


class Convolutions(nn.Module):
    """Convolutions, batch norms and a buffer of its own; parameters in a list, a dictionary, and outside of both."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.branches = nn.ModuleDict({"plain": nn.Conv2d(4, 3, 1), "strided": nn.Conv2d(4, 3, 3, padding=1)})
        self.head, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.full((3, 1, 1), 0.1))

    def loss(self, x, wanted):
        x = self.first(x)
        x = self.branches["plain"](x) + F.gelu(self.branches["strided"](x)) + self.shift
        return F.mse_loss(self.head(x.mean((2, 3))) * self.scale, wanted)

    @staticmethod
    def batch(seed, rows=5):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, 2, 6, 5, generator=generator, dtype=torch.float64), torch.randn(rows, 2, generator=generator, dtype=torch.float64)


def frozen():
    net = GPT()
    for part in (net.position, net.blocks[1]):
        part.requires_grad_(False)
    return net


MODELS = {
    "gpt": GPT,
    "tied": lambda: GPT(tied=True),
    "frozen": frozen,
    "recomputed": lambda: GPT(checkpointed=False),
    "reentrant": lambda: GPT(checkpointed=True),
    "convolutions": Convolutions,
}
# Where a gradient is all round-off, Adam makes a step of it unless eps is large.
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.2, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.02, eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, eps=1e-3, foreach=True),
}
STEPS, PARTS, NORM = 3, 2, 0.3


def build(model):
    torch.manual_seed(1)
    return MODELS[model]().double()


def clip_plainly(parameters, most):
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    for g in gradients:
        g.mul_(min(1.0, most / norm))


def train(net, optimizer, place, clip, scope=lambda net: contextlib.nullcontext(), first=0):
    """Two micro-batches a step; `scope` is around all but the last of them."""
    losses = []
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        for part in range(PARTS):
            with scope(net) if part + 1 < PARTS else contextlib.nullcontext():
                loss = net.loss(*(place(t) for t in net.batch(PARTS * step + part)))
                loss.backward()
            losses.append(loss.item())
        clip(net.parameters(), NORM)
        optimizer.step()
    return losses


def trained(net, optimizer):
    """Losses and states of one process."""
    losses = train(net, OPTIMIZERS[optimizer](net.parameters()), lambda t: t, clip_plainly)
    return losses, {name: t.clone() for name, t in net.state_dict().items()}


@functools.cache
def alone(model, optimizer):
    """To be called before there are ranks, since they share torch's random numbers."""
    return trained(build(model), optimizer)


def sharded_over(mesh, axes, sizes):
    """Rows over those of `axes` that the mesh has, replicated over the others."""
    where = [ts.Shard(0) if axis in axes else ts.Replicate() for axis in mesh.axes]
    return lambda t: ts.distribute_tensor(t, mesh, where, {0: sizes} if ts.Shard(0) in where else None)


def assert_trains_as(expected, optimizer, net, place):
    losses, state = expected
    got = train(net, OPTIMIZERS[optimizer](net.parameters()), place, ts.clip_gradients, ts.no_sync)
    assert got == pytest.approx(losses, rel=1e-10)
    assert list(net.state_dict()) == list(state)
    for name, t in net.state_dict().items():
        assert_same(t, state[name], name)
