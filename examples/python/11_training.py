"""A loop of one's own by a session: micro-batches of other sizes on each rank, accumulation, clipping, votes to stop. Beside one process.

    tessera run -n 3 -- python examples/python/11_training.py         # any number of ranks
"""

import copy

import torch
from torch import nn

import tessera as ts

STEPS, MICRO_BATCHES = 12, 2


def rows(rank: int, step: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to four, and none at times."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + k)
    x = torch.randn((rank + 2 * step + k) % 5, 4, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    rank, ranks = ts.rank(), ts.world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    alone = copy.deepcopy(net)
    optimizer, beside = torch.optim.Adam(net.parameters(), 0.01, eps=1e-4), torch.optim.Adam(alone.parameters(), 0.01, eps=1e-4)

    last = float("nan")
    with ts.Session(net, optimizer, max_norm=0.5) as session:
        for step in range(STEPS + 5):
            for k in range(MICRO_BATCHES):
                x, y = rows(rank, step, k)
                session.micro_batch(lambda: nn.functional.mse_loss(net(x), y), len(x), last=k + 1 == MICRO_BATCHES)
            if rank == ranks - 1 and step + 1 == STEPS:
                session.request_stop()  # one rank wants to, as after SIGTERM: all learn of it in the same step
            done = session.step()

            parts = [rows(r, step, k) for r in range(ranks) for k in range(MICRO_BATCHES)]
            x, y = (torch.cat(t) for t in zip(*parts))
            loss = nn.functional.mse_loss(alone(x), y)
            beside.zero_grad()
            loss.backward()
            gradients = [p.grad for p in alone.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
            for gradient in gradients:
                gradient.mul_(min(1.0, 0.5 / norm.item()))
            beside.step()
            assert abs(done.loss - loss.item()) < 1e-10 and abs(done.norm - norm.item()) < 1e-10 and done.weight == len(x)
            last = done.loss
            if done.stop:
                break
        assert session.steps == STEPS
    for p, q in zip(net.parameters(), alone.parameters()):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)
    if rank == 0:
        print(f"training: {STEPS} steps on {ranks} ranks, loss {last:.6f}, as on one process", flush=True)


main()
