"""A small net trained by sessions in every kind of parallelism, and by a plain loop of one process."""

import copy
import functools
import math

import torch
from torch import nn

import tessera as ts

ROWS = {1: ([5], [3]), 2: ([5, 0], [1, 2]), 3: ([2, 0, 3], [0, 1, 4]), 4: ([1, 2, 0, 2], [3, 0, 1, 1])}  # of two micro-batches, on each rank
STEPS = 3
KINDS = ["plain", "ddp", "fully_shard", "domain", "sharded_optimizer", "mixed"]

torch.manual_seed(3)
NET = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 1, 3, padding=1)).double()


def build():
    """Ranks that are threads share torch's random numbers."""
    return copy.deepcopy(NET)


def batch(step, k, ranks):
    generator = torch.Generator().manual_seed(10 * step + k)
    total = sum(ROWS[ranks][k])
    return torch.randn(total, 2, 9, generator=generator).double(), torch.randn(total, 1, 9, generator=generator).double()


def adam(parameters):
    return torch.optim.AdamW(parameters, 0.02, eps=1e-3)


@functools.cache
def alone(ranks, steps=STEPS, max_norm=0.2):
    """Losses, norms and parameters of a plain loop with all samples."""
    net = build()
    optimizer, found = adam(net.parameters()), []
    for step in range(steps):
        x, y = (torch.cat(t) for t in zip(batch(step, 0, ranks), batch(step, 1, ranks)))
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in net.parameters()))
        for p in net.parameters():
            p.grad.mul_(min(1.0, max_norm / norm))
        optimizer.step()
        found.append((loss.item(), norm))
    return found, {name: t.detach().clone() for name, t in net.named_parameters()}


def made(kind, rank):
    """Net, optimizer, what places a micro-batch."""
    net, ranks = build(), ts.world_size()
    mesh = ts.Mesh({"data": ranks})

    def rows(t, k):
        return t.split(ROWS[ranks][k])[rank]

    def on_data(t, k):
        return ts.from_local(rows(t, k), mesh, [ts.Shard(0)])

    if kind == "fully_shard":
        ts.fully_shard(net, mesh)
        return net, adam(net.parameters()), on_data
    if kind == "domain":
        sizes = [9 - 2 * (ranks - 1)] + [2] * (ranks - 1)
        ts.distribute_module(net, mesh)
        return net, adam(net.parameters()), lambda t, k: ts.distribute_tensor(t, mesh, [ts.Shard(2)], {2: sizes})
    if kind == "sharded_optimizer":
        return net, ts.ShardedOptimizer(torch.optim.AdamW, net.parameters(), mesh, lr=0.02, eps=1e-3), rows
    if kind == "mixed":
        head = ts.DistributedDataParallel(net[2])
        return nn.Sequential(net[0], net[1], head.module), adam(net.parameters()), rows
    if kind == "plain" and rank == 1:
        nn.init.zeros_(net[0].weight)  # rank 0's count
    return (ts.DistributedDataParallel(net) if kind == "ddp" else net), adam(net.parameters()), rows


def train(session, net, place, steps):
    done = []
    for step in steps:
        for k in range(2):
            x, y = (place(t, k) for t in batch(step, k, ts.world_size()))
            with ts.CommTrace() as trace:
                session.micro_batch(lambda: nn.functional.mse_loss(net(x), y), len(x), last=k == 1)
            assert k or ts.is_sharded(x) or not trace.count  # nothing is sent before the last one
        done.append(session.step())
    return done


def named(net):
    return dict((net.module if isinstance(net, ts.DistributedDataParallel) else net).named_parameters())
