"""Whole tensors on one rank, from the slices of the model that the ranks hold."""

from __future__ import annotations

import torch

from deepspeed.checkpoint.ranks import Ranks
from deepspeed.zero.boxes import Box, BoxRange, copies
from deepspeed.zero.state_view import StateView


def join_slices(
    view: StateView, held: dict[str, torch.Tensor], ranks: Ranks
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Send every slice to the first rank, one tensor at a time. All ranks call together.

    Args:
        view: the model of this rank.
        held: this rank's tensors on the CPU, by name; empty on ranks whose slices another rank sends.
        ranks: all of them.

    Returns:
        Whole tensors and all aliases on the first rank; nothing of use on the others.
    """
    mine = {name: (view.box(name), tensor.dtype) for name, tensor in held.items()}
    told = ranks.gather((mine, view.aliases))
    whole: dict[str, torch.Tensor] = {}
    seen: set[tuple[str, Box]] = set()
    for rank, (listed, _) in enumerate(told):
        for name, (box, dtype) in listed.items():
            if (name, box.packed) in seen:
                continue
            seen.add((name, box.packed))
            if ranks.rank == rank and rank:
                ranks.send(held[name].contiguous(), 0)
            if ranks.rank:
                continue
            values = held[name] if rank == 0 else torch.empty(box.local_shape, dtype=dtype)
            if rank:
                ranks.receive(values, rank)
            into = whole.setdefault(name, torch.zeros(box.shape, dtype=dtype))
            for copy in copies(BoxRange(box, 0, box.numel), BoxRange(Box(box.shape), 0, into.numel())):
                copy(values.reshape(-1), into.reshape(-1))
    return whole, {alias: name for _, aliases in reversed(told) for alias, name in aliases.items()}
