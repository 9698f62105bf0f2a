"""Cosines and sines by position, from a model's own rotary module."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.errors import PackingError

CALL = 512  # positions per rotary call


def rotations(rotary: Any, start: int, end: int, device: torch.device | None = None) -> tuple[torch.Tensor, ...]:
    """Return cosines and sines of the positions from `start` to below `end`, both fp32 [positions, rotary size].

    Args:
        rotary: module that returns both for (hidden states, positions).
        start: first position.
        end: position after the last one.
        device: device of the module; None: the CPU.

    Raises:
        PackingError: the module returns other shapes.
    """
    states = torch.zeros(1, device=device)
    rotary(states, torch.zeros(1, 1, dtype=torch.long, device=device))  # undoes what a longer text has changed
    tables: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for first in range(start, end, CALL):
        positions = torch.arange(first, min(first + CALL, end), device=device)[None]
        for parts, values in zip(tables, rotary(states, positions), strict=True):
            parts.append(values[0].float())
    cosines, sines = (torch.cat(parts) for parts in tables)
    if cosines.dim() != 2 or cosines.shape != sines.shape or cosines.shape[1] % 2:
        raise PackingError(f"its rotations have shape {tuple(cosines.shape)}")
    return cosines, sines
