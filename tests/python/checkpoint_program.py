"""Run on processes by test_checkpoint.py: a run and its second life, and one that is killed while it saves."""

import os
import signal
import sys

import torch
from torch import nn

import tessera as ts

torch.set_num_threads(1)
what, folder = sys.argv[1:3]
ts.init(timeout=120)
rank, world = ts.rank(), ts.world()


def killed():
    mesh, dies = ts.Mesh({"x": world.size}), int(sys.argv[3])
    checkpoints = ts.Checkpointer(folder, background_rate=10_000, timeout=60)
    field = ts.full([1 << 16], 1.0, mesh, ts.Shard(0), dtype=torch.float64)
    checkpoints.save("whole", {"field": field, "step": 1})
    field.fill_(2)
    checkpoints.start_save("broken", {"field": field, "step": 2})  # half a minute of writing
    assert checkpoints.saving
    if rank == dies:
        print(f"rank {rank} is killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        checkpoints.wait()
    except ts.Error:
        sys.exit(3)


def training(resumed):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 2))
    ddp = ts.DistributedDataParallel(net)
    adam = torch.optim.AdamW(net.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10)
    torch.manual_seed(10 + rank + 50 * resumed)  # each rank drops others
    checkpoints = ts.Checkpointer(folder)
    state = {"net": net, "adam": adam, "schedule": schedule, "random": ts.RandomState()}
    begin = checkpoints.load(checkpoints.to_resume(), {**state, "step": 0})["step"] if resumed else 0
    for step in range(begin, 6):
        x = torch.randn(8, 4)
        adam.zero_grad()
        ddp.mean_loss(ddp(x).square().mean(), 8).backward()
        adam.step()
        schedule.step()
        if step == 2 and not resumed:
            checkpoints.start_save("middle", {**state, "step": step + 1})
    checkpoints.wait()
    values = torch.cat([t.flatten().double() for t in net.state_dict().values()] + [torch.rand(3).double()])
    path = os.path.join(folder, f"values of rank {rank}.pt")
    if resumed:
        assert torch.equal(values, torch.load(path)), (values - torch.load(path)).abs().max()
        print(f"rank {rank}: bit by bit", flush=True)
    else:
        torch.save(values, path)


if what == "killed":
    killed()
else:
    training(what == "resumed")
