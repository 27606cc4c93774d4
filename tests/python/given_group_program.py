"""Run by torchrun: torch.distributed's own Gloo first, and Tessera on its ranks. Arguments: a backend of ts.init, a folder for checkpoints."""

import sys

import torch
import torch.distributed as dist

import tessera as ts
from support import assert_same

backend, folder = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
# A world of other ranks than the launcher's, in another order; rank 0 has no part in it.
part = dist.new_group(list(range(1, ranks)), sort_ranks=False)


def train(mesh, steps):
    """A sharded model, its rows cut over all ranks, saved once and read again."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    x = torch.randn(7, 6, dtype=torch.float64)
    if mesh is not None:
        ts.fully_shard(model, mesh)
        x = ts.distribute_tensor(x, mesh, ts.Shard(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def use(members):
    mesh = ts.Mesh({"x": members}, ranks=list(reversed(range(members))))
    if backend != "c10d":
        losses = torch.tensor(train(mesh, 3), dtype=torch.float64)
        assert_same(losses, torch.tensor(train(None, 3), dtype=torch.float64), "losses")
    mesh = ts.Mesh({"x": members})
    whole = torch.arange(7.0, dtype=torch.float64)
    t = ts.distribute_tensor(whole, mesh, ts.Shard(0))
    assert_same(t.cumsum(0).sum(), whole.cumsum(0).sum(), "sums")
    ts.save({"t": t}, mesh, f"{folder}/{members}")
    assert_same(ts.load(f"{folder}/{members}", mesh, {"t": [ts.Replicate()]})["t"], whole, "saved and loaded")


ts.init(backend, timeout=60, process_group=dist.group.WORLD)
assert (ts.rank(), ts.world_size()) == (rank, ranks)
use(ranks)
ts.shutdown()
dist.barrier()  # it is still there
if rank > 0:
    ts.init(backend, timeout=60, process_group=part)
    assert (ts.rank(), ts.world_size()) == (rank - 1, ranks - 1)
    use(ranks - 1)
    ts.shutdown()
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} of {ranks}: over {backend}")
