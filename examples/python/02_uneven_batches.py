"""Ranks with different numbers of samples, one of them with none: the gradient is that of one process that holds all samples.

    tessera run -n 3 -- python examples/python/02_uneven_batches.py         # any number of ranks
"""

import copy

import torch
from torch import nn

import tessera as ts


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    rank, ranks = ts.rank(), ts.world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 2)).double()
    alone = copy.deepcopy(net)

    # All samples, to compare with; rank r takes 5 r of them, so that rank 0 of several has none.
    counts = [7] if ranks == 1 else [5 * r for r in range(ranks)]
    inputs, targets = (torch.randn(sum(counts), n, dtype=torch.float64) for n in (4, 2))
    x, y = inputs.split(counts)[rank], targets.split(counts)[rank]

    # The mean over this rank's samples, weighted by their number. A rank without samples takes part all the same.
    ddp = ts.DistributedDataParallel(net)
    squares = (ddp(x) - y).square()
    loss = ddp.mean_loss(squares.mean() if len(x) else squares.sum(), len(x))
    loss.backward()

    expected = nn.functional.mse_loss(alone(inputs), targets)
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-12
    for p, q in zip(net.parameters(), alone.parameters()):
        assert p.grad is not None and q.grad is not None
        assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12)
    if rank == 0:
        print(f"uneven_batches: samples {counts}, loss {loss.item():.6f}, as on one process", flush=True)


main()
