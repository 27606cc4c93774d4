"""A small language model whose layers are mixtures of experts: tokens travel to the two experts that they choose, and back. Beside one process.

    tessera run -n 4 -- python examples/python/19_experts.py         # any number of ranks
"""

import copy

import torch
from torch import nn

import tessera as ts

WORDS, LENGTH, WIDTH, SEQUENCES, EXPERTS = 17, 8, 16, 14, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *shape) / 4) for shape in ((WIDTH, 32), (32, WIDTH)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        h = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        tokens = h.flatten(0, 1)
        routing = ts.Routing(self.gate(tokens).softmax(-1), chosen=2, capacity=1.25)  # an expert that more tokens choose leaves the later ones out
        made = ts.grouped_product(ts.grouped_product(routing.to_experts(tokens), self.up, routing).relu(), self.down, routing)
        return h + routing.to_tokens(made).unflatten(0, h.shape[:2]), routing.balance()


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.first, self.second, self.head = Block(), Block(), nn.Linear(WIDTH, WORDS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x, one = self.first(self.words(text[:, :-1]) + self.places(torch.arange(LENGTH)))
        x, other = self.second(x)
        y: torch.Tensor = nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten()) + 0.01 * (one + other)
        return y


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    ranks = ts.world_size()
    mesh = ts.Mesh({"data": -1, "expert": 2 if ranks % 2 == 0 else ranks})
    torch.manual_seed(0)
    alone, loss = Gpt().double(), float("nan")
    net = ts.distribute_module(copy.deepcopy(alone), mesh, lambda name, t: [ts.Replicate(), ts.Shard(0)] if name.endswith((".up", ".down")) else None)
    optimizer, beside = (torch.optim.Adam(n.parameters(), 1e-2, eps=1e-4) for n in (net, alone))
    for step in range(30):
        start = torch.randint(WORDS, (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
        text = torch.cat([(start * 3**i + (3**i - 1) // 2) % WORDS for i in range(LENGTH + 1)], 1)  # the next word: three times this one, and one more
        losses = net(ts.distribute_tensor(text, mesh, [ts.Shard(0), ts.Shard(0)])), alone(text)
        for value, its in zip(losses, (optimizer, beside)):
            its.zero_grad()
            value.backward()
            its.step()
        loss, expected = (value.item() for value in losses)
        assert abs(loss - expected) < 1e-9, (step, loss, expected)
    assert loss < 1.5
    if ts.rank() == 0:
        print(f"experts: {mesh.axes}, loss {loss:.4f}, as on one process", flush=True)


main()
