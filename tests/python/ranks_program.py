"""Run by torchrun and by `tessera run`: a short training on real processes, beside one process."""

import copy

import torch
from torch import nn

import tessera as ts
from support import assert_same

torch.set_num_threads(1)
ts.init(timeout=120)
ranks, rank = ts.world_size(), ts.rank()
mesh = ts.Mesh({"data": ranks})
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 2)).double()
plain = copy.deepcopy(net)
x, y = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
sizes = [1] * (ranks - 1) + [8 - ranks]
t, u = (ts.distribute_tensor(v, mesh, [ts.Shard(0)], {0: sizes}) for v in (x, y))
ts.distribute_module(net, mesh)
ours, theirs = torch.optim.Adam(net.parameters(), lr=0.01), torch.optim.Adam(plain.parameters(), lr=0.01)
for _ in range(5):
    for module, optimizer, a, b in ((net, ours, t, u), (plain, theirs, x, y)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(a), b)
        loss.backward()
        optimizer.step()
for p, q in zip(net.parameters(), plain.parameters()):
    assert_same(p, q)
rows = ts.from_local(torch.full((rank, 2), float(rank)), mesh, [ts.Shard(0)])
assert rows.shape[0] == ranks * (ranks - 1) // 2 and rows.sum().item() == 2.0 * sum(r * r for r in range(ranks))
print(f"rank {rank} of {ranks}: loss {loss.item():.12f}", flush=True)
