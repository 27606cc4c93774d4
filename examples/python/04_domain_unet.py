"""A small U-Net on an image whose rows are sharded unevenly: convolution, pooling and upsampling get their neighbours' rows by halo. Beside one process.

    tessera run -n 2 -- python examples/python/04_domain_unet.py         # 1 to 6 ranks
"""

import copy

import torch
from torch import nn

import tessera as ts


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = torch.relu(self.down(x))
        below = torch.relu(self.deep(nn.functional.max_pool2d(skip, 2)))
        again = nn.functional.interpolate(below, x.shape[2:], mode="bilinear")
        y: torch.Tensor = self.up(torch.cat([skip, again], 1))
        return y


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    ranks = ts.world_size()
    mesh = ts.Mesh({"domain": ranks})
    ts.set_policies("error")  # an operator that would gather rows is an error
    torch.manual_seed(0)
    alone, image = UNet().double(), torch.randn(1, 2, 26, 10, dtype=torch.float64)

    net = ts.distribute_module(copy.deepcopy(alone), mesh)
    rows = [26 - 4 * (ranks - 1)] + [4] * (ranks - 1)
    y = net(ts.distribute_tensor(image, mesh, [ts.Shard(2)], {2: rows}))
    y.square().mean().backward()

    expected = alone(image)
    expected.square().mean().backward()
    assert ts.spec(y).placements == (ts.Shard(2),)  # it never came together
    assert torch.allclose(ts.full_tensor(y.detach()), expected, rtol=0, atol=1e-12)
    for p, q in zip(net.parameters(), alone.parameters()):
        assert p.grad is not None and q.grad is not None
        assert torch.allclose(ts.full_tensor(p.grad), q.grad, rtol=0, atol=1e-12)
    if ts.rank() == 0:
        print(f"domain_unet: rows {rows}, as on one process", flush=True)


main()
