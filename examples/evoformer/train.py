"""Contacts from coevolving columns: `deepspeed --num_gpus 2 examples/evoformer/train.py`.

An alignment is a family of sequences, one under the other. Columns that touch in the folded molecule change together;
the model reads the alignment and tells, for each two columns, whether they touch. See README.md beside this file.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention

LENGTH, LETTERS, CONTACTS = 24, 5, 6  # columns; letters, of which the first is a gap; pairs of columns that touch
MOST, FEWEST = 32, 20  # sequences of an alignment
WIDTH, PAIR, HEADS = 32, 24, 4  # features of a letter, of a pair of columns; heads of attention
ABSENT = -1e4  # added to the scores of what is not there


def alignments(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Letters `[count, MOST, LENGTH]`, which sequences are there `[count, MOST]`, contacts `[count, LENGTH, LENGTH]`.

    In a contact the second letter follows from the first in 9 of 10 sequences, by a rule that differs from contact to
    contact: a model cannot learn the rule, only that there is one.
    """
    draw = torch.Generator().manual_seed(seed)
    letters = torch.randint(1, LETTERS, (count, MOST, LENGTH), generator=draw)
    contacts = torch.zeros(count, LENGTH, LENGTH)
    order = torch.rand(count, LENGTH, generator=draw).argsort(1)[:, : 2 * CONTACTS]
    each = torch.arange(count)
    for first, second in order.unflatten(1, (CONTACTS, 2)).permute(1, 2, 0):
        rule = torch.rand(count, LETTERS - 1, generator=draw).argsort(1) + 1
        follows = rule.gather(1, letters[each, :, first] - 1)
        kept = torch.rand(count, MOST, generator=draw) < 0.9
        letters[each, :, second] = torch.where(kept, follows, letters[each, :, second])
        contacts[each, first, second] = contacts[each, second, first] = 1
    letters[torch.rand(letters.shape, generator=draw) < 0.05] = 0
    there = torch.arange(MOST) < torch.randint(FEWEST, MOST + 1, (count, 1), generator=draw)
    return letters * there[..., None], there, contacts


class Attention(nn.Module):
    """Gated attention along a dimension of the alignment; the biases are those of the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, biases: list[Tensor | None]) -> Tensor:
        x = self.norm(x)
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        seen = DS4Sci_EvoformerAttention(query, key, value, biases)
        return self.out(self.gate(x).sigmoid() * seen.flatten(-2))


class Transition(nn.Sequential):
    """Two layers on each place alone."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class OuterProductMean(nn.Module):
    """Two columns' features multiplied, in the mean over the sequences that are there."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.norm, self.sides = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * hidden)
        self.out = nn.Linear(hidden * hidden, PAIR)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        left, right = (self.sides(self.norm(x)) * there[:, :, None, None]).chunk(2, -1)
        total = torch.einsum("bsic,bsjd->bijcd", left, right).flatten(-2)
        return self.out(total / there.sum(1)[:, None, None, None])


class Block(nn.Module):
    """Rows attend with the pairs as a bias, columns attend, and pairs learn from products of columns."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Sequential(nn.LayerNorm(PAIR), nn.Linear(PAIR, HEADS, bias=False))
        self.rows, self.columns, self.letters = Attention(), Attention(), Transition(WIDTH)
        self.product, self.pairs = OuterProductMean(), Transition(PAIR)

    def forward(self, x: Tensor, pairs: Tensor, gaps: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """`x` `[B, S, L, WIDTH]`, `pairs` `[B, L, L, PAIR]`, `gaps` `[B, S, L]`, `there` `[B, S]`, both 0 or 1."""
        bias = self.bias(pairs).permute(0, 3, 1, 2)[:, None]  # [B, 1, H, L, L]
        x = x + self.rows(x, [ABSENT * gaps[:, :, None, None], bias])
        absent = (1 - there)[:, None, None, None].expand(-1, LENGTH, -1, -1, -1)  # [B, L, 1, 1, S]
        x = x + self.columns(x.transpose(1, 2), [ABSENT * absent]).transpose(1, 2)
        x = x + self.letters(x)
        pairs = pairs + self.product(x, there)
        return x, pairs + self.pairs(pairs)


class Contacts(nn.Module):
    """An alignment in, the logit of a contact for each two columns out: `[B, L, L]`, symmetric."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.letter, self.distance = nn.Embedding(LETTERS, WIDTH), nn.Embedding(2 * LENGTH, PAIR)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(PAIR), nn.Linear(PAIR, 1))

    def forward(self, letters: Tensor, there: Tensor) -> Tensor:
        dtype = self.head[1].weight.dtype
        at = torch.arange(LENGTH, device=letters.device)
        x, pairs = self.letter(letters), self.distance(at[:, None] - at + LENGTH).expand(len(letters), -1, -1, -1)
        for block in self.blocks:
            x, pairs = block(x, pairs, (letters == 0).to(dtype), there.to(dtype))
        return self.head(pairs + pairs.transpose(1, 2)).squeeze(-1)


def found(scores: Tensor, contacts: Tensor) -> float:
    """Of the CONTACTS pairs with the highest scores in each alignment, the share that are contacts."""
    upper = torch.triu_indices(LENGTH, LENGTH, 1)
    best = scores[:, upper[0], upper[1]].topk(CONTACTS, 1).indices
    return contacts[:, upper[0], upper[1]].gather(1, best).mean().item()


def mutual_information(letters: Tensor, there: Tensor) -> Tensor:
    """Of each two columns, from counts: what can be said of one alignment without having learnt from others."""
    ones = F.one_hot(letters, LETTERS).double() * there[:, :, None, None]
    both = torch.einsum("bsic,bsjd->bijcd", ones, ones) / there.sum(1)[:, None, None, None, None]
    one = ones.sum(1) / there.sum(1)[:, None, None]
    apart = torch.einsum("bic,bjd->bijcd", one, one)
    return torch.where(both > 0, both * (both / apart).log(), 0).sum((3, 4))


def main() -> None:
    """Train, and measure on alignments that were not seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--local_rank", type=int, default=-1)
    given = parser.parse_args()
    torch.manual_seed(0)
    batch = 16
    data = list(zip(*alignments(given.steps * batch, seed=0), strict=True))
    config: dict[str, Any] = {
        "train_batch_size": batch,
        "optimizer": {"type": "Adam", "params": {"lr": 4e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": given.steps, "warmup_num_steps": 20}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": given.stage},
        "steps_per_print": 10**9,
    }
    model = Contacts()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=config
    )
    first = engine.global_rank == 0
    weight = torch.tensor(
        20.0, device=engine.device
    )  # of a contact: without it, learning that there are few comes first
    for step, (letters, there, contacts) in enumerate(engine.loop(loader)):
        logits = engine(letters.to(engine.device), there.to(engine.device))
        loss = F.binary_cross_entropy_with_logits(logits, contacts.to(engine.device), pos_weight=weight)
        engine.backward(loss)
        engine.step()
        if first and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    engine.eval()
    letters, there, contacts = alignments(128, seed=1)
    with torch.no_grad():
        scores = torch.cat([engine(letters[at : at + 16].to(engine.device), there[at : at + 16].to(engine.device)).cpu()
                            for at in range(0, 128, 16)])  # fmt: skip
    engine.destroy()
    if first:
        print(f"of {128 * CONTACTS} contacts in unseen alignments {100 * found(scores, contacts):.1f} % are found")
        counted, chance = found(mutual_information(letters, there), contacts), CONTACTS / (LENGTH * (LENGTH - 1) / 2)
        print(f"by mutual information {100 * counted:.1f} %, by chance {100 * chance:.1f} %")


if __name__ == "__main__":
    main()
