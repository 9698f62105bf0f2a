"""Capacity routing by plain loops, and the layer of experts over the dense buffer (E, C, H): what the package is held
against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def route(
    logits: torch.Tensor,
    k: int,
    factor: float,
    fewest: int,
    drop: bool = True,
    policy: str = "probs",
    random: torch.Tensor | None = None,
    used: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Balance loss, weights (S, E, C), counts (E,).

    `random`: (S, E), larger is kept first (k = 1). `noise`: added to logits for the choice (k = 1), or for the second
    choice (k = 2).
    """
    (tokens, experts), p = logits.shape, logits.softmax(1)
    choices: list[list[int]] = []
    for t in range(tokens):
        scores = logits[t] + noise[t] if noise is not None and k == 1 else logits[t]
        best = scores.argsort(descending=True).tolist()[:k]
        if noise is not None and k == 2:
            again = (logits[t] + noise[t]).argsort(descending=True).tolist()
            best = [best[0], next(e for e in again if e != best[0])]
        choices.append(best if used is None or used[t] else [])
    counts = torch.tensor([sum(e in row for row in choices) for e in range(experts)])
    capacity = max(math.ceil(tokens / experts * factor * k), fewest) if drop else int(counts.max())
    counted = 1 if k == 2 else k
    share = torch.tensor([sum(e in row[:counted] for row in choices) / tokens for e in range(experts)]).to(p)
    loss = (p.mean(0) * share).sum() * experts / (1 if k <= 2 else k)
    combine = torch.zeros(tokens, experts, capacity, dtype=p.dtype)
    kept: list[tuple[int, int, int]] = []
    for e in range(experts):
        if k == 2:
            queue = [t for t in range(tokens) if choices[t][0] == e] + [t for t in range(tokens) if choices[t][1] == e]
            kept += [(t, e, slot) for slot, t in enumerate(queue[:capacity])]
            continue
        queue = [t for t in range(tokens) if e in choices[t]]
        if drop and k == 1 and random is not None:
            queue = sorted(sorted(queue, key=lambda t: -float(random[t, e]))[:capacity])  # noqa: B023
        elif drop and k > 2 and policy == "probs":
            queue = sorted(sorted(queue, key=lambda t: -float(p[t, e].detach()))[:capacity])  # noqa: B023
        kept += [(t, e, slot) for slot, t in enumerate(queue[:capacity])]
    for t, e, slot in kept:
        total = 1.0 if k == 1 else sum(p[t, other] for token, other, _ in kept if token == t)
        combine[t, e, slot] = p[t, e] / total
    return loss, combine, counts


def through(experts: Sequence[Any], combine: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(S, H) tokens through experts by the dense buffer."""
    buffer = torch.einsum("sec,sh->ech", (combine != 0).to(x), x)
    results = torch.stack([expert(slots) for expert, slots in zip(experts, buffer, strict=True)])
    return torch.einsum("sec,ech->sh", combine.to(x), results)


def expert_of(width: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))
