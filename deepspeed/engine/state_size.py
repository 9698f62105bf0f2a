"""Bytes of an engine's state, and what stage 3 has gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from deepspeed.zero.optimizer.state_tensor import Away

if TYPE_CHECKING:
    from deepspeed.engine.build import Components


def bytes_of(tensors: Sequence[torch.Tensor | None]) -> int:
    """Bytes of what is in memory, each storage once; a simulation's meta tensors count as what they stand for."""
    here = [t.untyped_storage() for t in tensors if t is not None and not isinstance(t, Away)]
    storages = {s._cdata: s.nbytes() for s in here}
    return sum(storages.values())


def state_bytes(components: Components) -> dict[str, int]:
    """Bytes by kind of training state on this rank, each storage once; see `state_tensors`."""
    return {kind: bytes_of(tensors) for kind, tensors in state_tensors(components).items()}


def state_tensors(components: Components) -> dict[str, Sequence[torch.Tensor | None]]:
    """Training state on this rank by kind.

    Args:
        components: of an engine.

    Returns:
        `parameters` at rest, `masters`, `gradients`, `optimizer`, and `gathered`: at stage 3 the full buffers that
        stand beside the slices now, in use or kept.
    """
    groups = components.groups
    gathered = [g.full for g in groups if g.policy.gathers_before_use]
    params = [g.values.memory for g in groups]
    masters = [g.master.memory for g in groups if g.master is not None]
    sums = (
        [b.sum.memory for b in components.reducer.buckets if b.sum is not None]
        if components.reducer is not None
        else []
    )
    moments = []
    if components.optimizer is not None:
        for state in components.optimizer.state.of_leaves():
            moments += [v for v in state.values() if isinstance(v, torch.Tensor) and v.dim()]
    return {
        "parameters": params, "masters": masters, "gradients": sums, "optimizer": moments, "gathered": gathered,
    }  # fmt: skip


def gather_counts(components: Components) -> dict[str, int]:
    """What is gathered now, what was at most, how often, and how often not ahead although the order was known.

    Args:
        components: of an engine.
    """
    if components.lifecycle is None:
        return {"live": 0, "peak": 0, "gathers": 0, "late": 0, "groups": 0}
    prefetcher = components.lifecycle.prefetcher
    return {
        "live": prefetcher.live(),
        "peak": prefetcher.peak,
        "gathers": prefetcher.gathers,
        "late": prefetcher.late,
        "groups": len(prefetcher.groups),
    }
