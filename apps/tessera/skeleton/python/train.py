"""Trains a network on any number of ranks: tessera run -n 2 -- python train.py --steps 400"""

import argparse

import torch
from torch import nn

import tessera as ts

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=200)
arguments.add_argument("--width", type=int, default=32)
arguments.add_argument("--folder", default="runs/1")
options = arguments.parse_args()

ts.init()
mesh = ts.Mesh({"data": ts.world_size()})
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, options.width), nn.Tanh(), nn.Linear(options.width, 1))
net = ts.distribute_module(net, mesh)  # the same weights on all ranks
adam = torch.optim.AdamW(net.parameters(), 1e-2)
checkpoints = ts.Checkpointer(options.folder, keep_last=2)
state, begin = {"net": net, "adam": adam}, 0
if name := checkpoints.to_resume():
    begin = checkpoints.load(name, {**state, "step": 0})["step"]
for step in range(begin, options.steps):
    # Your data: each rank gives its own rows, any number of them.
    rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(1000 * ts.rank() + step))
    x = ts.from_local(rows, mesh, [ts.Shard(0)])
    loss = nn.functional.mse_loss(net(x), x.sum(1, keepdim=True).sin())  # over the rows of all ranks
    adam.zero_grad()
    loss.backward()
    adam.step()
    if (step + 1) % 50 == 0:
        value = loss.item()  # on all ranks: it is a collective call
        if ts.rank() == 0:
            print(f"step {step + 1}: loss {value:.4f}", flush=True)
        checkpoints.start_save(f"step-{step + 1}", {**state, "step": step + 1})  # written while the next step runs
checkpoints.wait()
