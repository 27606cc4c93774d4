"""A model sharded over all ranks: layers by name over `tensor`, what that leaves over `data`, unit by unit. Beside one process.

    tessera run -n 4 -- python examples/python/06_fully_sharded.py        # or torchrun --nproc-per-node 4
"""

import copy
from collections.abc import Callable, Iterable

import torch
from torch import nn

import tessera as ts


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, clip: Callable[[Iterable[torch.Tensor], float], object]) -> float:
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, eps=1e-4)
    loss = torch.tensor(float("nan"))
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        clip(net.parameters(), 10.0)
        optimizer.step()
    return loss.item()


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    tensor = 2 if ts.world_size() % 2 == 0 else 1
    mesh = ts.Mesh({"data": -1, "tensor": tensor})
    torch.manual_seed(1)
    alone = nn.Sequential(*(Block(8) for _ in range(4)), nn.Linear(8, 2)).double()
    x, y = torch.randn(10, 3, 8, dtype=torch.float64), torch.randn(10, 3, 2, dtype=torch.float64)

    net = copy.deepcopy(alone)
    ts.tensor_parallel(net, mesh, {"*.up": ts.column(), "*.down": ts.row()})
    ts.fully_shard(net, mesh, "data")
    rows = [ts.Shard(0), ts.Replicate()]  # samples over `data`; ts.from_local where each rank reads its own
    loss = train(net, ts.distribute_tensor(x, mesh, rows), ts.distribute_tensor(y, mesh, rows), ts.clip_gradients)

    expected = train(alone, x, y, nn.utils.clip_grad_norm_)
    assert abs(loss - expected) < 1e-12, (loss, expected)
    held = sum(ts.to_local(p.detach()).numel() for p in net.parameters())
    if ts.rank() == 0:
        print(f"fully_sharded: loss {loss:.6f} on {mesh.axes}, {held} of {sum(p.numel() for p in alone.parameters())} numbers here, as on one process", flush=True)


main()
