"""Run on processes: an index that one rank alone sees to be wrong; the others hear of it, all catch it, and training goes on."""

import torch
from torch import nn

import tessera as ts
from support import assert_same

torch.set_num_threads(1)
ts.init(timeout=120)
ranks, rank = ts.world_size(), ts.rank()
mesh = ts.Mesh({"data": ranks})
torch.manual_seed(1)
net = ts.distribute_module(nn.Linear(3, 2).double(), mesh)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
table = ts.distribute_tensor(torch.arange(ranks * 3, dtype=torch.float64).reshape(ranks, 3), mesh, [ts.Shard(0)])
seen = []
for step in range(6):
    index = torch.zeros(ranks, 3, dtype=torch.long)
    if step % 2:
        index[step % ranks] = 9
    try:
        optimizer.zero_grad()
        net(table.gather(1, ts.distribute_tensor(index, mesh, [ts.Shard(0)]))).square().mean().backward()
        optimizer.step()
        mesh.barrier()
    except (RuntimeError, IndexError) as error:
        assert step % 2, error
        seen.append("own" if "aten::gather" not in str(error) or f"rank {rank} failed" in str(error) else "peer")
        mesh.barrier()
# An error of the program's own is told.
try:
    if rank == 0:
        mesh.fail("rank 0 is tired")
        raise ValueError("I am tired")
    mesh.barrier()
    raise SystemExit("nobody told this rank")
except (RuntimeError, ValueError) as error:
    assert "tired" in str(error)
mesh.barrier()
assert seen == ["own" if step % ranks == rank else "peer" for step in (1, 3, 5)], seen

torch.manual_seed(1)
alone = nn.Linear(3, 2).double()
optimizer = torch.optim.SGD(alone.parameters(), 0.1)
rows = torch.arange(0, ranks * 3, 3, dtype=torch.float64)[:, None].expand(ranks, 3)
for _ in range(3):
    optimizer.zero_grad()
    alone(rows).square().mean().backward()
    optimizer.step()
for p, q in zip(net.parameters(), alone.parameters()):
    assert_same(p, q)
print(f"rank {rank} of {ranks} goes on", flush=True)
