"""Numbers about an engine: bytes of state, and what stage 3 gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepspeed.engine.build import Pieces


def _bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def state_bytes(pieces: Pieces) -> dict[str, int]:
    """Bytes by kind of training state on this rank; storages shared between kinds count for the first.

    Args:
        pieces: of an engine.
    """
    groups = pieces.groups
    params = [g.slice for g in groups] + [g.full for g in groups if not g.policy.gathers_before_use]
    masters = [g.master for g in groups if g.master is not None]
    sums = [b.sum for b in pieces.reducer.buckets] if pieces.reducer is not None else []
    moments = []
    if pieces.optimizer is not None:
        for state in pieces.optimizer.state.values():
            moments += [v for v in state.values() if isinstance(v, torch.Tensor) and v.dim()]
    return {
        "parameters": _bytes(params),
        "masters": _bytes(masters),
        "gradients": _bytes(sums),
        "optimizer": _bytes(moments),
    }


def gather_counts(pieces: Pieces) -> dict[str, int]:
    """What is gathered now, what was at most, and how often.

    Args:
        pieces: of an engine.
    """
    if pieces.lifecycle is None:
        return {"live": 0, "peak": 0, "gathers": 0, "groups": 0}
    keeper = pieces.lifecycle.keeper
    return {
        "live": keeper.live(),
        "peak": keeper.peak,
        "gathers": keeper.gathers,
        "groups": len(keeper.groups),
    }
