"""A vision transformer on images whose rows are sharded: class token, position embedding, attention over all tokens, shifted windows. Beside one process.

    tessera run -n 3 -- python examples/python/14_vision_transformer.py         # 1 to 4 ranks
"""

import copy

import torch
from torch import nn

import tessera as ts


class Attention(nn.Module):
    """Over dim 1, two heads: on tokens that are sharded, keys and values go round a ring."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y: torch.Tensor = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class VisionTransformer(nn.Module):
    def __init__(self, height: int, width: int, dim: int = 8, patch: int = 4) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, dim, patch, stride=patch), nn.Linear(dim, 2)
        self.token, self.everywhere, self.near = nn.Parameter(torch.randn(1, 1, dim)), Attention(dim), Attention(dim)
        self.positions = nn.Parameter(torch.randn(1, 1 + height * width // patch**2, dim))  # its shape follows the image

    def windows(self, x: torch.Tensor, shift: int = 1, n: int = 2) -> torch.Tensor:
        """Attention in windows of n x n tokens, shifted: a roll sends rows to the next rank, the partition sends nothing."""
        w = torch.roll(x, (-shift, -shift), (1, 2)).unflatten(2, (-1, n)).unflatten(1, (-1, n)).permute(1, 0, 3, 2, 4, 5)  # rows of windows first: what is sharded
        y = self.near(w.flatten(0, 2).flatten(1, 2)).unflatten(1, (n, n)).unflatten(0, w.shape[:3])
        return torch.roll(y.permute(1, 0, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2), (shift, shift), (1, 2))

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        field = self.patches(image)
        tokens = torch.cat([self.token.expand(len(field), -1, -1), field.flatten(2).transpose(1, 2)], 1)
        x = self.everywhere(tokens + self.positions)
        # A slice of the class token stays with the rank that has it; x[:, 0] would send it to all ranks.
        return self.head(x[:, :1].sum(1)), self.windows(x[:, 1:].unflatten(1, field.shape[-2:]))


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    ranks, rank = ts.world_size(), ts.rank()
    mesh = ts.Mesh({"domain": ranks})
    ts.set_policies("error")  # an operator that would gather is an error
    torch.manual_seed(0)
    images, alone = torch.randn(2, 3, 24, 16, dtype=torch.float64), VisionTransformer(24, 16).double()
    rows = [24] if ranks == 1 else [16, 8] + [0] * (ranks - 2)  # uneven on purpose; whole windows of 2 x 4 rows
    tokens = [r // 4 * 4 for r in rows]
    sizes = {1: [1 + tokens[0]] + tokens[1:]}  # the class token is the first rank's

    net = ts.distribute_module(copy.deepcopy(alone), mesh, lambda name, t: ([ts.Shard(1)], sizes) if name == "positions" else None)
    with ts.CommTrace() as trace:
        label, field = net(ts.distribute_tensor(images, mesh, [ts.Shard(2)], {2: rows}))
    expected = alone(images)
    (label.square().mean() + field.square().mean()).backward()
    (expected[0].square().mean() + expected[1].square().mean()).backward()
    assert ts.spec(field).placements == (ts.Shard(1),) and net.positions.grad is not None and ts.spec(net.positions.grad).sizes == sizes
    assert torch.allclose(ts.full_tensor(label.detach()), expected[0], rtol=0, atol=1e-12)
    assert torch.allclose(ts.full_tensor(field.detach()), expected[1], rtol=0, atol=1e-12)
    for p, q in zip(net.parameters(), alone.parameters()):
        assert p.grad is not None and q.grad is not None
        assert torch.allclose(ts.full_tensor(p.grad), q.grad, rtol=0, atol=1e-12)
    if rank == 0:
        print(f"vision_transformer: tokens {sizes[1]}, {trace.count} messages, as on one process", flush=True)


main()
