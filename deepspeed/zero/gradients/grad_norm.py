"""Global L2 norm of sharded gradients, and diagnosis of non-finite gradients."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from deepspeed.comm.collectives import scalars
from deepspeed.optim.grad_norm import native_sums_of_squares, sum_of_squares
from deepspeed.zero.gradients.accumulation import Agreed
from deepspeed.zero.gradients.buckets import Bucket
from deepspeed.zero.gradients.reducer import Reducer

_LABEL = "agreement on the gradient norm"


def global_norm(
    buckets: list[Bucket], exact: bool, reducer: Reducer, tag: int, along: Sequence[float] = (), waits: bool = True
) -> tuple[float | torch.Tensor, list[list[float]]]:
    """Compute the L2 norm of all accumulated gradients of the model. Collective: all ranks must call this.

    Args:
        buckets: this rank's buckets; may be empty.
        exact: compute in float64 even where float32 is faster; see `optim.grad_norm.sum_of_squares`.
        reducer: reducer of the buckets.
        tag: message tag, unique on the process group `model_replica_group`.
        along: further numbers to exchange in the same message, equally many on every rank.
        waits: read the norm from the device also if no other rank needs it; so is that of accumulators under 4 bytes,
            where a factor would be rounded.

    Returns:
        Norm (NaN or infinity if a gradient is not finite), and the numbers `along` of each rank, in rank order. Unless
        `waits`, the norm of a model on one device is a 0-d float64 tensor there.
    """
    adding = [bucket for bucket in buckets if bucket.counted]
    known = reducer.squares.own(reducer.revision) if adding else None
    squares = _squares(adding, exact) if known is None else known
    if isinstance(squares, torch.Tensor):
        wide = reducer.settings.accumulator.itemsize >= torch.float32.itemsize
        if wide and not waits and reducer.axes.model_replica_group.size == 1:
            return squares.sqrt(), [list(along)]
        squares = scalars.current.value(squares)
    table = scalars.current.table(reducer.axes.model_replica_group, [squares, *along], tag, _LABEL, reducer.device)
    return _root(sum(row[0] for row in table)), [row[1:] for row in table]


def _squares(buckets: list[Bucket], exact: bool) -> float | torch.Tensor:
    """Return this rank's sum of squares; reads offloaded accumulators one at a time, prefetching the next.

    That of accumulators on one device is a 0-d float64 tensor there.
    """
    totals = [bucket.total for bucket in buckets]
    if all(total.memory is not None for total in totals):  # one native call
        parts = [bucket.own(total.acquire()) for bucket, total in zip(buckets, totals, strict=True)]
        native = native_sums_of_squares(parts)
        if native is not None:
            return math.fsum(native)
        if parts and all(
            part.device.type != "cpu" for part in parts
        ):  # few kernels, whose squares and sums are float64
            norms = torch._foreach_norm(parts, 2, dtype=torch.float64)
            return torch.stack(norms).square().sum()
    by_device: dict[torch.device, list[torch.Tensor | float]] = defaultdict(list)
    for bucket, following in itertools.zip_longest(buckets, buckets[1:]):
        if following is not None:
            following.total.prefetch()
        with bucket.total.borrowed() as total:
            own = bucket.own(total)
            native = native_sums_of_squares([own])
            by_device[total.device].append(sum_of_squares(own, exact) if native is None else native[0])
    whole = 0.0
    for squares in by_device.values():  # numbers and 0-d float64 tensors are summed in one order
        first = next((square for square in squares if isinstance(square, torch.Tensor)), None)
        if first is None:
            whole += scalars.current.value(torch.tensor(math.fsum(squares), dtype=torch.float64))  # type: ignore[arg-type]
        else:
            tensors = [s if isinstance(s, torch.Tensor) else first.new_tensor(s) for s in squares]
            whole += scalars.current.value(torch.stack(tensors).sum())
    return whole


def known_norm(reducer: Reducer, agreed: Agreed) -> float | None:
    """Return the cached gradient norm, so that `global_norm` need not be called; see [Note: known norm] in `buckets`.

    Args:
        reducer: reducer whose `squares.total` has been set.
        agreed: result of `Reducer.finish`, so that all ranks take the same decision.

    Returns:
        Norm; None, on all ranks alike, if some rank does not have it or the model is split into slices or stages.
    """
    total = reducer.squares.total
    return _root(total) if agreed.known and total is not None and reducer.axes.whole_model_agrees else None


def _root(total: float) -> float:
    return math.sqrt(total) if total >= 0 else math.nan


def squares_by_name(reducer: Reducer) -> dict[str, float]:
    """Compute this rank's part of the sum of squares of each parameter's gradient, and cache the sums per bucket.

    Returns:
        Sums by parameter name, for `counted` buckets; 0 if a gradient's elements are all on other ranks.
    """
    by_name: dict[str, float] = {}
    reducer.squares.begin(reducer.revision)
    for bucket in reducer.buckets:
        if not bucket.counted:
            continue
        first = bucket.group.layout.cuts[bucket.group.axis.rank]
        with bucket.total.borrowed() as total:
            own = bucket.own(total)
            parts: dict[str, torch.Tensor] = {}
            marks = reducer.marks(bucket) or bytes(len(bucket.group.members))
            for member, mark, offset in zip(bucket.group.members, marks, bucket.group.offsets, strict=True):
                low, high = max(offset - first, 0), min(offset + member.numel - first, own.numel())
                if mark and low < high:
                    parts[member.name] = own[low:high]
                elif mark:
                    by_name[member.name] = 0.0
            squares = native_sums_of_squares(list(parts.values()))
            if squares is None and parts:
                squares = torch.stack([sum_of_squares(part, exact=True) for part in parts.values()]).tolist()
        reducer.squares.note(bucket, math.fsum(squares or []))
        by_name.update(zip(parts, squares or [], strict=True))
    return by_name


def explain_overflow(reducer: Reducer, tags: tuple[int, int]) -> str:
    """Find the first parameter, in the order of backward, with a non-finite gradient. All ranks must call this.

    This parameter is reported since non-finite values propagate to the parameters after it.

    Args:
        reducer: reducer after `finish`.
        tags: two message tags, unique on the process group `dp_sp_group`.

    Returns:
        Description with parameter, module and (with `watch_ranks`) sending ranks; or that all gradients are finite.
    """
    device = reducer.device
    ordered = sorted(((-m.place, b, m) for b in reducer.buckets for m in b.group.members), key=lambda row: row[0])
    first_broken = float(next((i for i, (_, b, m) in enumerate(ordered) if not b.is_finite(m)), len(ordered)))
    table = scalars.current.table(reducer.axes.dp_sp_group, [first_broken], tags[0], _LABEL, device)
    first = int(min(row[0] for row in table))
    if first == len(ordered):
        of_slice = "" if reducer.axes.whole_model_agrees else " of this model slice"
        return f"the gradient norm overflows although every gradient{of_slice} is finite"
    _, bucket, member = ordered[first]
    alone = reducer.axes.dp_sp_group.size == 1  # then no checksums are kept
    sent = float(alone or any(not math.isfinite(float(total)) for total in bucket.sent))
    marks = scalars.current.table(reducer.axes.dp_sp_group, [sent], tags[1], _LABEL, device)
    ranks = [reducer.axes.dp_sp_group.ranks[r] for r, (mark,) in enumerate(marks) if mark]
    origin = f"sent by rank {', '.join(map(str, ranks))}" if ranks else "formed in the sum over ranks"
    module = member.name.rpartition(".")[0] or "the root module"
    return f"first non-finite gradient: parameter '{member.name}' of module '{module}', {origin}"
