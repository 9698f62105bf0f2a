"""The small language model of the parity table, and its batches."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 67  # odd, so that no cut over ranks is even
WIDTH = 16
SEQUENCE = 7


class Block(nn.Module):
    """Pre-norm attention and MLP; the key bias has a gradient that is zero but for rounding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query_key_value(self.norm_attention(x)).chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2) / WIDTH**0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.out(scores.masked_fill(mask, float("-inf")).softmax(-1) @ value)
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class SmallLM(nn.Module):
    """Embedding with an odd vocabulary, blocks, layer norm, and a head tied to the embedding."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = WIDTH, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def small_lm(seed: int = 0) -> SmallLM:
    """A `SmallLM` whose weights depend on `seed` alone."""
    torch.manual_seed(seed)
    return SmallLM()


def batch(step: int, micro: int, rank: int, vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets, `[2, SEQUENCE]` int64 each, of one micro-batch of one rank."""
    source = torch.Generator().manual_seed(1 + step * 1000 + micro * 100 + rank)
    ids = torch.randint(vocabulary, (2, SEQUENCE + 1), generator=source)
    return ids[:, :-1], ids[:, 1:]
