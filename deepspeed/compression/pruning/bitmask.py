"""Packed bit masks, applied in place in cache-sized pieces."""

from __future__ import annotations

import torch

_WEIGHTS = 2 ** torch.arange(8)
# The eight flags of every byte, as one 64-bit number each: unpacking is one lookup per byte.
_FLAGS = ((torch.arange(256)[:, None] // _WEIGHTS) % 2).to(torch.uint8).contiguous().view(torch.int64).view(-1)
_CHUNK = 1 << 14  # bytes of a mask unpacked at a time


def pack(keep: torch.Tensor) -> torch.Tensor:
    """Flags as bits.

    Args:
        keep: 1-D bool.

    Returns:
        uint8 of ceil(n / 8) elements; flags past the end are set.
    """
    count = -(-keep.numel() // 8)
    packed = torch.empty(count, dtype=torch.uint8, device=keep.device)
    weights = _WEIGHTS.to(torch.uint8).to(keep.device)
    for at in range(0, count, _CHUNK * 8):
        part = keep[at * 8 : (at + _CHUNK * 8) * 8]
        if part.numel() % 8:
            part = torch.cat([part, part.new_ones(-part.numel() % 8)])
        packed[at : at + _CHUNK * 8] = (part.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    return packed


def unpack(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Bits as flags.

    Args:
        packed: as `pack` gives it.
        numel: of the flags.

    Returns:
        1-D bool.
    """
    flags = _FLAGS.to(packed.device).index_select(0, packed.to(torch.int32))
    return flags.view(torch.bool)[:numel]


def apply(packed: torch.Tensor, values: torch.Tensor) -> None:
    """Multiply values by a mask, in place.

    Args:
        packed: the mask.
        values: 1-D, any dtype, as many as the mask has flags.
    """
    flags, numel = _FLAGS.to(packed.device), values.numel()
    for at in range(0, packed.numel(), _CHUNK):
        part = values[at * 8 : min((at + _CHUNK) * 8, numel)]
        keep = flags.index_select(0, packed[at : at + _CHUNK].to(torch.int32)).view(torch.uint8)
        part.mul_(keep[: part.numel()])


def count_dropped(packed: torch.Tensor) -> int:
    """Flags that are not set."""
    ones = torch.bincount(packed.to(torch.int64), minlength=256).to("cpu") * _FLAGS.view(torch.uint8).view(256, 8).sum(
        1
    )
    return packed.numel() * 8 - int(ones.sum())
