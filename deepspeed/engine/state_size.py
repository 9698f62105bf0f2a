"""Sizes of an engine's state, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from deepspeed.zero.optimizer.state_tensor import Away

if TYPE_CHECKING:
    from deepspeed.engine.build import Components


def bytes_of(tensors: Sequence[torch.Tensor | None]) -> int:
    """Return the bytes of tensors in memory, each storage once; None and offloaded tensors count 0, meta ones fully."""
    here = [t.untyped_storage() for t in tensors if t is not None and not isinstance(t, Away)]
    storages = {s._cdata: s.nbytes() for s in here}
    return sum(storages.values())


def state_bytes(components: Components) -> dict[str, int]:
    """Return this rank's bytes by kind of training state, each storage once; see `state_tensors`."""
    return {kind: bytes_of(tensors) for kind, tensors in state_tensors(components).items()}


def state_tensors(components: Components) -> dict[str, Sequence[torch.Tensor | None]]:
    """Return this rank's training state by kind.

    Returns:
        Tensors of `parameters` (shards if they are gathered before use, encoded and secondary ones too), `masters`,
        `gradients` (with error memories) and `optimizer`, and `gathered`: the buffers of stage 3 for whole parameters
        that are in memory besides the shards.
    """
    groups = components.groups
    gathered = [g.full for g in groups if g.policy.gathers_before_use]
    params = [g.values.memory for g in groups]
    params += [g.encoded.own for g in groups if g.encoded is not None]
    params += [g.secondary.values for g in groups if g.secondary is not None]
    masters = [g.master.memory for g in groups if g.master is not None]
    sums = (
        [b.sum.memory for b in components.reducer.buckets if b.sum is not None]
        if components.reducer is not None
        else []
    )
    if components.reducer is not None:
        sums += [memory.error for memory in components.reducer.error_memories().values()]
    moments = []
    if components.optimizer is not None:
        for state in components.optimizer.state.of_leaves():
            moments += [v for v in state.values() if isinstance(v, torch.Tensor) and v.dim()]
    return {
        "parameters": params, "masters": masters, "gradients": sums, "optimizer": moments, "gathered": gathered,
    }  # fmt: skip
