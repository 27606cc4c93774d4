"""Trains, stops, and goes on from its checkpoint on another number of ranks and another mesh, as if it had never stopped.

tessera run -n 4 -- python examples/python/10_resume.py runs/fit 6
tessera run -n 3 -- python examples/python/10_resume.py runs/fit 12
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tessera as ts


def parts(place: Callable[[nn.Module], nn.Module] = lambda net: net) -> tuple[nn.Module, torch.optim.Adam, torch.optim.lr_scheduler.StepLR]:
    torch.manual_seed(0)
    net = place(nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)).double())
    adam = torch.optim.Adam(net.parameters(), 0.02)
    return net, adam, torch.optim.lr_scheduler.StepLR(adam, 4, 0.5)


def train(net: nn.Module, adam: torch.optim.Adam, schedule: torch.optim.lr_scheduler.StepLR, step: int, shard: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> float:
    x = torch.randn(30, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    adam.zero_grad()
    loss = nn.functional.mse_loss(net(shard(x)), shard(x.sum(1, keepdim=True).sin()))
    loss.backward()
    adam.step()
    schedule.step()
    return loss.item()


folder, until = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
ts.init(timeout=60)
mesh = ts.Mesh({"data": ts.world_size()})
# The first layer's rows are sharded, everything else replicated.
net, adam, schedule = parts(lambda net: ts.distribute_module(net, mesh, lambda name, t: [ts.Shard(0)] if name == "0.weight" else None))
checkpoints = ts.Checkpointer(folder, keep_last=2)
loss, begin = float("nan"), 0
state: dict[str, Any] = {"net": net, "adam": adam, "schedule": schedule}
if name := checkpoints.to_resume():
    begin = checkpoints.load(name, {**state, "step": 0})["step"]
for step in range(begin, until):
    loss = train(net, adam, schedule, step, lambda t: ts.distribute_tensor(t, mesh, [ts.Shard(0)]))
    checkpoints.start_save(f"step-{step + 1}", {**state, "step": step + 1})  # written while the next step runs
checkpoints.wait()

alone = parts()
expected = [train(*alone, step) for step in range(until)]
off = max((ts.full_tensor(p.detach()) - q).abs().max().item() for p, q in zip(net.parameters(), alone[0].parameters()))
assert off < 1e-10 and abs(loss - expected[-1]) < 1e-10, (off, loss, expected[-1])
kept = checkpoints.names()  # a collective call: on all ranks
if ts.rank() == 0:
    print(f"resume: steps {begin} to {until} on {ts.world_size()} ranks, kept {kept}: as on one process")
