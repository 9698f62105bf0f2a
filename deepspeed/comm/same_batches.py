"""Ranks that share matrices or a sequence get the same batches: compared by hash of values while a run is young.
Ranks of one model list the same parameters."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepspeed.comm.api import told_by_all
from deepspeed.comm.axis import Axis
from deepspeed.errors import DataError

COMPARED = 10  # micro-batches


class SameBatches:
    """Compares what the ranks of an axis are given.

    Args:
        axis: ranks of one data-parallel coordinate.
        share: what they do, for the error.
    """

    def __init__(self, axis: Axis, share: str = "share the model's matrices (tp)") -> None:
        self._axis, self._share, self.left = axis, share, COMPARED if axis.size > 1 else 0

    def compare(self, inputs: Any, in_parts: bool = False) -> None:
        """One micro-batch. All ranks of the axis call together.

        Args:
            inputs: arguments of forward.
            in_parts: a rank may have None for what it does not need, the whole or an entry of it; the rest is compared.

        Raises:
            DataError: two ranks have other values, on all ranks of the axis.
        """
        self.left -= 1
        everyone = told_by_all(self._axis, _digests(inputs) if in_parts else {"": digest(inputs)})
        first: dict[str, tuple[int, int]] = {}  # by entry: who had it first, and its digest
        for rank, theirs in zip(self._axis.ranks, everyone, strict=True):
            for entry, found in theirs.items():
                other, wanted = first.setdefault(entry, (rank, found))
                if found == wanted:
                    continue
                raise DataError(
                    f"ranks {other} and {rank} {self._share} and were given different batches"
                    f"{f' ({entry})' if entry else ''} in micro-batch {COMPARED - self.left}: a loader deals samples "
                    f"to data-parallel ranks, so give it engine.get_data_parallel_rank() of engine.dp_world_size, or "
                    f"pass training_data to initialize"
                )


def first_difference(axis: Axis, lines: Sequence[Any]) -> tuple[int, Any, Any] | None:
    """What a rank of an axis lists otherwise than its first one; all call together.

    Args:
        axis: ranks that should list the same.
        lines: of this rank; they travel only where their digests differ.

    Returns:
        Position of the rank, the first line in which it differs as the first rank has it, and its own; None for a line
        that is not there. None where all are the same.
    """
    if len(set(told_by_all(axis, digest(list(lines))))) == 1:
        return None
    everyone = told_by_all(axis, lines)
    at = next(at for at, theirs in enumerate(everyone) if theirs != everyone[0])
    return at, *next(pair for pair in itertools.zip_longest(everyone[0], everyone[at]) if pair[0] != pair[1])


def _digests(inputs: Any) -> dict[str, int]:
    """A digest for each entry of a batch that is not None."""
    entries = (
        inputs.items() if isinstance(inputs, dict) else enumerate(inputs) if isinstance(inputs, (list, tuple)) else ()
    )
    found = {f"entry {name!r}": digest(value) for name, value in entries if value is not None}
    return found or ({} if inputs is None else {"": digest(inputs)})


def digest(value: Any) -> int:
    """A number that tells values apart: tensors and arrays by their bytes, containers by what is in them, objects by
    what they say of themselves (`to_dict`, the fields of a dataclass), any other by the name of its type."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return zlib.crc32(data, zlib.crc32(f"{tuple(value.shape)} {value.dtype}".encode()))
    if isinstance(value, (np.ndarray, np.generic)):
        data = repr(digest(value.tolist())).encode() if value.dtype.hasobject else value.tobytes()
        return zlib.crc32(data, zlib.crc32(f"{value.shape} {value.dtype}".encode()))
    if isinstance(value, Mapping):
        return digest([[str(key), value[key]] for key in sorted(value, key=str)])
    if isinstance(value, (list, tuple)):
        return zlib.crc32(repr([digest(one) for one in value]).encode())
    if isinstance(value, (set, frozenset)):
        return zlib.crc32(repr(sorted(map(digest, value))).encode())
    inside = _said(value)
    if inside is not None:
        return digest([type(value).__name__, inside])
    plain = isinstance(value, (int, float, str, bytes, bool, type(None), torch.dtype, torch.device))
    return zlib.crc32((repr(value) if plain else type(value).__name__).encode())


def _said(value: Any) -> dict[str, Any] | None:
    """What an object says is in it; None where it says nothing."""
    if isinstance(value, type):
        return None
    try:
        found = value.to_dict()
    except Exception:  # it has none, or one of another kind
        found = None
    if not isinstance(found, dict) and dataclasses.is_dataclass(value):
        return {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}
    return found if isinstance(found, dict) else None
