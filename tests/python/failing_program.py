"""Rank 1 raises while it holds a graph; the others must learn it, and what it was, long before their time limit."""

import torch

import tessera as ts

ts.init(timeout=300)
mesh = ts.Mesh({"data": ts.world_size()})
net = ts.distribute_module(torch.nn.Linear(4, 4), mesh)
loss = net(ts.ones([3, 4], mesh, ts.Shard(0))).sum()
mesh.barrier()
if ts.rank() == 1:
    raise ValueError("rank 1 has had enough")
try:
    loss.backward()
    mesh.barrier()
except ts.PeerFailedError as error:
    print("told:", error, flush=True)
    raise
