"""Run by `tessera run`: rank 0 alone prints the loss, as beginners do; both ranks are told, and no wrong number is shown."""

import torch

import tessera as ts

ts.init(timeout=120)
mesh = ts.Mesh({"data": ts.world_size()})
x = ts.distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [ts.Shard(0)])
weight = ts.distribute_tensor(torch.full((3,), 0.5), mesh, [ts.Replicate()]).requires_grad_()
optimizer = torch.optim.SGD([weight], 0.01)
try:
    for step in range(1, 4):
        optimizer.zero_grad()
        loss = (x * weight).square().mean()
        loss.backward()
        optimizer.step()
        if ts.rank() == 0:
            print(f"step {step}: loss {loss.item()}", flush=True)
    print(f"at the end {loss.item()}", flush=True)
except ts.MismatchError as error:
    print(f"rank {ts.rank()} is told: {error}", flush=True)
