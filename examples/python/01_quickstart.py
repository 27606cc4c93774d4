"""Data-parallel training: every rank draws its own samples, and the gradient is the mean over all. Beside one process.

    tessera run -n 3 -- python examples/python/01_quickstart.py         # or torchrun, mpirun, srun, or no launcher at all
"""

import copy

import torch
from torch import nn

import tessera as ts


def samples(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64)
    return x, x.sum(1, keepdim=True).mul(0.5).sin()


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)  # who am I, and where are the others? The launch environment says it
    torch.manual_seed(ts.rank())
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    ddp = ts.DistributedDataParallel(net)  # parameters and buffers are broadcast from rank 0
    alone = copy.deepcopy(net)
    optimizer, beside = torch.optim.Adam(net.parameters(), 1e-2, eps=1e-4), torch.optim.Adam(alone.parameters(), 1e-2, eps=1e-4)

    last = float("nan")
    for step in range(150):
        x, y = samples(ts.rank(), step)
        loss = ddp.mean_loss(nn.functional.mse_loss(ddp(x), y), len(x))
        optimizer.zero_grad()
        loss.backward()  # gradients are reduced in buckets while it runs
        optimizer.step()
        last = loss.item()

        parts = [samples(rank, step) for rank in range(ts.world_size())]  # one process has the samples of all ranks
        x, y = (torch.cat(t) for t in zip(*parts))
        expected = nn.functional.mse_loss(alone(x), y)
        beside.zero_grad()
        expected.backward()
        beside.step()
        assert abs(last - expected.item()) < 1e-8, (step, last, expected.item())
        if ts.rank() == 0 and step % 50 == 0:
            print(f"step {step}: loss {last:.4f}", flush=True)

    assert last < 0.1
    mine = nn.utils.parameters_to_vector(net.parameters()).detach()
    assert torch.equal(ts.world().all_reduce(mine.clone(), "max"), mine)  # replicas stay equal, to the bit
    if ts.rank() == 0:
        print(f"quickstart: loss {last:.4f} on {ts.world_size()} ranks, as on one process", flush=True)


main()
