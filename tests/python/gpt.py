"""A small GPT of plain torch.nn, for tests of sharded training."""

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn


class Attention(nn.Module):
    """Causal; the projections are fused, with the heads outermost."""

    def __init__(self, width, heads, size):
        super().__init__()
        self.heads, self.size = heads, size
        self.qkv, self.out = nn.Linear(width, 3 * heads * size), nn.Linear(heads * size, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3 * self.size)).transpose(1, 2).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, size, hidden):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, size)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """`checkpointed`: None, or whether the checkpoints of its blocks are reentrant."""

    VOCABULARY, LENGTH, HEADS = 11, 5, 3

    def __init__(self, tied=False, checkpointed=None, blocks=3, width=6, hidden=10):
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding, self.position = nn.Embedding(self.VOCABULARY, width), nn.Embedding(self.LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, self.HEADS, 2, hidden) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x) if self.checkpointed is None else torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.checkpointed)
        return self.head(self.norm(x))

    def loss(self, tokens, wanted):
        return F.cross_entropy(self(tokens).flatten(0, 1), wanted.flatten())

    @classmethod
    def batch(cls, seed, rows=5):
        """Tokens and those that follow them."""
        tokens = torch.randint(cls.VOCABULARY, (rows, cls.LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

