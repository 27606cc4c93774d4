"""Run by torchrun: torch.distributed's own Gloo first, and Tessera on its ranks. Arguments: a backend of ts.init, a folder for checkpoints."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import tessera as ts
from support import assert_same

backend, folder = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
# A world of other ranks than the launcher's, in another order; rank 0 has no part in it.
part = dist.new_group(list(range(1, ranks)), sort_ranks=False)


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 1, 3, padding=1)).double()


def adam(net):
    return torch.optim.AdamW(net.parameters(), 0.02, eps=1e-3)


def alone(x):
    """Parameters of one process after three steps."""
    net = build()
    optimizer = adam(net)
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return list(net.parameters())


def train(net, x, checkpoints):
    """Three steps; the third is taken, forgotten and taken again from a checkpoint."""

    def step():
        session.micro_batch(lambda: net(x).square().mean(), len(x))
        session.step()

    with ts.Session(net, adam(net), signals=False) as session:
        step()
        step()
        checkpoints.start_save("c", session.state())
        checkpoints.wait()
        step()
        checkpoints.load(checkpoints.latest(), session.state())
        assert session.steps == 2
        step()


def use(members):
    x = torch.randn(7, 2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(members))
    expected = alone(x)
    rows = {"x": members}
    meshes = [ts.Mesh(rows)]
    if backend != "c10d":  # whose one group has its ranks in their order
        plane = {"data": members // 2, "domain": members // (members // 2)}
        meshes += [ts.Mesh(rows, ranks=list(reversed(range(members)))), ts.Mesh(plane, ranks=[*range(1, members), 0])]
    for i, mesh in enumerate(meshes):
        cut = ts.distribute_tensor(x, mesh, [ts.Shard(0), ts.Shard(2)][: len(mesh.axes)])
        net = ts.fully_shard(build(), mesh)
        train(net, cut, ts.Checkpointer(f"{folder}/{members}/{i}"))
        for got, wanted in zip(net.parameters(), expected, strict=True):
            assert_same(got, wanted, f"fully sharded over {mesh}")
    net = build()
    train(ts.DistributedDataParallel(net), x.tensor_split(members)[ts.rank()], ts.Checkpointer(f"{folder}/{members}/ddp"))
    for got, wanted in zip(net.parameters(), expected, strict=True):
        assert_same(got, wanted, "data-parallel")
    whole = torch.arange(7.0, dtype=torch.float64)
    t = ts.distribute_tensor(whole, meshes[0], ts.Shard(0))
    assert_same(t.cumsum(0).sum(), whole.cumsum(0).sum(), "sums")
    ts.save({"t": t}, meshes[0], f"{folder}/{members}/t")
    assert_same(ts.load(f"{folder}/{members}/t", meshes[0], {"t": [ts.Replicate()]})["t"], whole, "saved and loaded")


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
