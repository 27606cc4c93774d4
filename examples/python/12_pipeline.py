"""A U-Net in four stages on any number of ranks: cut by name, its skips and sizes pass over stages. Beside one process.

    tessera run -n 3 -- python examples/python/12_pipeline.py        # or torchrun --nproc-per-node 3
"""

import copy

import torch
from torch import nn

import tessera as ts


class UNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(2, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.GELU(), nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.GELU())
        self.up, self.last = nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = torch.tanh(self.first(x))
        coarse = self.middle(self.down(fine))
        y: torch.Tensor = self.last(torch.cat([self.up(coarse), fine], 1))
        return y.flatten(1)


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    ranks = ts.world_size()
    torch.manual_seed(1)
    net, x = UNet().double(), torch.randn(7, 2, 8, 8, dtype=torch.float64)
    alone, y = copy.deepcopy(net), x.sum(1).flatten(1).sin()

    parts = ts.split(net, at=["down", "middle.1", "up"])
    placement = [s * ranks // 4 for s in range(4)]  # the rank of each stage, on at most four ranks
    schedule = ts.Schedule.for_costs(placement, 3, ts.PipelineCosts.uniform(4))  # or ts.Schedule("1f1b", 4, 3), or a table of your own
    pipeline = ts.Pipeline(parts, schedule, ts.Mesh({"pipe": ranks}), "pipe", nn.functional.mse_loss)
    optimizer, beside = torch.optim.Adam(pipeline.module.parameters(), 1e-2, eps=1e-4), torch.optim.Adam(alone.parameters(), 1e-2, eps=1e-4)
    loss = float("nan")
    for _ in range(5):
        optimizer.zero_grad()
        loss = pipeline.step(x, y).loss  # three micro-batches of 3, 2 and 2 fields; the mean over all of them, on every rank
        optimizer.step()

        beside.zero_grad()
        expected = nn.functional.mse_loss(alone(x), y)
        expected.backward()
        beside.step()
        assert abs(loss - expected.item()) < 1e-10, (loss, expected.item())

    timeline = pipeline.timeline()  # as it ran; in a notebook the last line of a cell draws it
    if ts.rank() == 0:
        waits = f"ranks wait {100 * timeline.bubble:.0f} % of {timeline.makespan:.3f} s"
        print(f"pipeline: loss {loss:.6f} on {ranks} ranks, skips {parts.skips}, {waits}, as on one process\n{schedule.simulate()}", flush=True)


main()
