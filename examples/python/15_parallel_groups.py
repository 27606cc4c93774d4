"""Model, pipeline and data groups from two numbers: layers over `mp`, stages over `pp`, replicas over `dp`. Beside one process.

    tessera run -n 8 -- python examples/python/15_parallel_groups.py         # any number of ranks
"""

import copy

import torch
from torch import nn

import tessera as ts

HIDDEN = 7


def samples(replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one replica: other numbers of rows."""
    torch.manual_seed(10 + replica)
    x = torch.randn(3 + replica, 4, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    model, pipeline = (2 if ts.world_size() % n == 0 else 1 for n in (2, 4))
    groups = ts.ParallelGroups(model, pipeline)
    first, last = groups.pp.rank == 0, groups.pp.rank == pipeline - 1
    pipe, layers = groups.pp.group, groups.mesh.submesh("mp")

    # One layer to a stage: the first by columns, the second by rows, so that only the sum at the end is exchanged in a stage.
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).double()
    mine = copy.deepcopy(alone if pipeline == 1 else alone[:2] if first else alone[2:])
    columns = {"0.weight": ts.Shard(0), "0.bias": ts.Shard(0), "2.weight": ts.Shard(1)} if pipeline == 1 or first else {"0.weight": ts.Shard(1)}
    ts.distribute_module(mine, layers, lambda name, t: [columns.get(name, ts.Replicate())])
    net = ts.DistributedDataParallel(mine, groups.dp.group)  # gradients averaged over the replicas of this stage

    x, y = samples(groups.dp.rank)
    if first:
        h = net(ts.distribute_tensor(x, layers, [ts.Replicate()]))
    else:
        shard = HIDDEN // model + (groups.mp.rank < HIDDEN % model)
        received = ts.functional.receive(pipe, torch.zeros(len(x), shard, dtype=torch.float64, requires_grad=True), 0)
        h = net(ts.from_local(received, layers, [ts.Shard(1)]))
    if last:
        loss = nn.functional.mse_loss(h, y)
    else:
        loss = ts.functional.send(pipe, ts.to_local(h), 1).sum()  # a token: the gradient comes back through it
    loss.backward()

    replicas = ts.world_size() // (model * pipeline)
    for a, b in map(samples, range(replicas)):
        (nn.functional.mse_loss(alone(a), b) / replicas).backward()
    expected = alone if pipeline == 1 else alone[:2] if first else alone[2:]
    for p, q in zip(mine.parameters(), expected.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert torch.allclose(ts.full_tensor(p.grad), q.grad, rtol=0, atol=1e-12)
    if ts.rank() == 0:
        print(f"parallel_groups: {groups.summary()}, as on one process", flush=True)


main()
