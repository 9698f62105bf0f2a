"""The global gradient norm over slices, and who made it overflow."""

from __future__ import annotations

import math

import torch

from deepspeed.comm.axis import Axis
from deepspeed.comm.collectives import all_gather_small
from deepspeed.optim.clip import sum_of_squares
from deepspeed.zero.buckets import Bucket
from deepspeed.zero.reducer import Reducer


def global_norm(buckets: list[Bucket], exact: bool, tag: int) -> float:
    """L2 norm of all accumulated gradients; every rank adds its own part, no part twice. All ranks call together.

    Args:
        buckets: the accumulators, the same groups on all ranks, at least one.
        exact: see `sum_of_squares`.
        tag: message tag.

    Returns:
        The norm; NaN or infinity when a gradient is not finite.
    """
    if not buckets:
        return 0.0
    squares = [sum_of_squares(b.own(), exact) for b in buckets if b.filled]
    mine = torch.zeros(1, dtype=torch.float64)
    if squares:
        mine[0] = torch.stack(squares).sum().cpu()
    total = float(_gather(buckets[0].group.axis, mine, tag, buckets[0].group.device).sum())
    return math.sqrt(total) if total >= 0 else math.nan


def explain_overflow(reducer: Reducer, tags: tuple[int, int]) -> str:
    """The first parameter of the model whose gradient is not finite, its module, and the rank that sent it.

    Args:
        reducer: after `finish`. All ranks call together.
        tags: two message tags.
    """
    device = reducer.buckets[0].group.device
    ordered = sorted(((m.uid, b, m) for b in reducer.buckets for m in b.group.members), key=lambda row: row[0])
    broken = (i for i, (_, b, m) in enumerate(ordered) if b.filled and not _finite(b, m.offset, m.numel))
    mine = torch.tensor([float(next(broken, len(ordered)))], dtype=torch.float64)
    first = int(_gather(reducer.world, mine, tags[0], device).min())
    if first == len(ordered):
        return "the gradient norm overflows although every gradient is finite"
    _, bucket, member = ordered[first]
    sent = any(not math.isfinite(float(total)) for total in bucket.sent)
    marks = _gather(reducer.world, torch.tensor([float(sent)], dtype=torch.float64), tags[1], device)
    ranks = [reducer.world.ranks[r] for r, mark in enumerate(marks.flatten().tolist()) if mark]
    origin = f"sent by rank {', '.join(map(str, ranks))}" if ranks else "formed in the sum over ranks"
    module = member.name.rpartition(".")[0] or "the root module"
    return f"first non-finite gradient: parameter '{member.name}' of module '{module}', {origin}"


def _finite(bucket: Bucket, offset: int, numel: int) -> bool:
    low, high = max(offset, bucket.low), min(offset + numel, bucket.high)
    return low >= high or bool(torch.isfinite(bucket.sum[low - bucket.low : high - bucket.low]).all())


def _gather(axis: Axis, row: torch.Tensor, tag: int, device: torch.device) -> torch.Tensor:
    row = row.to(device) if not axis.tagged and axis.size > 1 else row
    return all_gather_small(axis, row, tag, "agreement on the gradient norm").cpu()
