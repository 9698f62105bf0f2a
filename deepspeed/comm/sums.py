"""Sums over ranks that give the same bits wherever they are formed: in fp32, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed.comm.shared_memory import sum_natively

# Sums run over pieces that stay in the second-level cache.
_BLOCK = 1 << 16


def sum_in_rank_order(
    parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float, add: bool, any_order: bool = False
) -> None:
    """out (+)= scale * (parts[0] + parts[1] + …), each term and the sum in fp32.

    Args:
        parts: one contribution per rank, any floating dtype.
        out: the accumulator, any floating dtype.
        scale: factor on the sum.
        add: add to what `out` holds instead of replacing it.
        any_order: on a device, one kernel may add parts that lie behind each other in an order of its own, which is the
            same in every run; a kernel per part reads and writes several times as much.
    """
    if out.device.type != "cpu":
        _sum_on_device(parts, out, scale, add, any_order)
        return
    exact = out.dtype == torch.float32 and all(p.dtype == torch.float32 for p in parts)
    aliased = any(p.data_ptr() == out.data_ptr() for p in parts[2:])  # `out` may be the own part: read it first
    if not add and scale == 1.0 and exact and not aliased:
        if len(parts) == 1:
            out.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)
        return
    if sum_natively(parts, out, scale, add):
        return
    total = torch.empty(min(_BLOCK, out.numel()), dtype=torch.float32, device=out.device)
    term = torch.empty_like(total)
    aliased = any(p.data_ptr() == out.data_ptr() for p in parts)
    in_place = not add and not aliased and out.dtype == torch.float32
    for start in range(0, out.numel(), _BLOCK):
        stop = min(start + _BLOCK, out.numel())
        o, u = out[start:stop], term[: stop - start]
        t = o if in_place else total[: stop - start]
        t.copy_(parts[0][start:stop])
        for part in parts[1:]:
            t.add_(u.copy_(part[start:stop]))
        if scale != 1.0:
            t.mul_(scale)
        if add:
            t.add_(u.copy_(o))
        if t is not o:
            o.copy_(t)


def _sum_on_device(parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float, add: bool, any_order: bool) -> None:
    """The same bits in one kernel per term: a launch costs more there than memory traffic it could save."""
    table = _as_table(parts) if any_order else None
    if table is not None and not add and out.dtype == torch.float32:
        torch.sum(table, 0, dtype=torch.float32, out=out)
        if scale != 1.0:
            out.mul_(scale)
        return
    total = parts[0].to(torch.float32, copy=True) if table is None else table.sum(0, dtype=torch.float32)
    for part in parts[1:] if table is None else ():
        total.add_(part)
    if scale != 1.0:
        total.mul_(scale)
    if add:
        total.add_(out)
    out.copy_(total)


def _as_table(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Parts that lie behind each other in one storage as its rows; None where they do not."""
    first, count = parts[0], parts[0].numel()
    if len(parts) < 2 or not count or not all(part.is_contiguous() and part.numel() == count for part in parts):
        return None
    begin, key = first.storage_offset(), first.untyped_storage()._cdata
    for row, part in enumerate(parts):
        if part.untyped_storage()._cdata != key or part.storage_offset() != begin + row * count:
            return None
    return first.as_strided((len(parts), count), (count, 1))
