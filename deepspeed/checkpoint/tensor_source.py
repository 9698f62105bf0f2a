"""A source whose values are tensors at hand: a state dict, or the tensors of another library's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.manifest import BUFFER, FROZEN, VALUE, Manifest, Row, StateRule, entry_name
from deepspeed.checkpoint.source import Source, Wanted, clear_padding
from deepspeed.errors import CheckpointCorruptError
from deepspeed.zero.boxes import Box, BoxRange, copies

Chunk = tuple[int, torch.Tensor]  # first element in the flattened parameter, 1-D values


class TensorSource(Source):
    """Values in memory, or mapped from files.

    Args:
        path: what they came from, for reports.
        rows: parameters and buffers.
        chunks: by `entry_name`, in any order.
        states: as in `Manifest`.
        state: what `state()` gives.
        about: as in `Manifest`.
    """

    def __init__(
        self,
        path: Path,
        rows: list[Row],
        chunks: Mapping[str, list[Chunk]],
        states: Iterable[StateRule] = (),
        state: dict[str, Any] | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(path, Manifest(rows, [], list(states), {}, about or {}))
        self._chunks, self._state = chunks, state or {}

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Copy elements.

        Raises:
            CheckpointCorruptError: some are in no chunk.
        """
        for one in wanted:
            name, copied = entry_name(one.field, one.row.name), 0
            own_shape = self.manifest.is_whole(one.field, one.row)
            stored = Box((one.into.numel(),)) if own_shape else Box(one.row.shape)
            range_ = BoxRange(stored, 0, one.into.numel()) if own_shape else one.range
            clear_padding(one)
            for start, values in self._chunks.get(name, ()):
                for copy in copies(BoxRange(stored, start, start + values.numel()), range_):
                    copy(values, one.into)
                    copied += copy.numel
            if copied != range_.real_numel:
                raise CheckpointCorruptError(
                    f"{self.path}: elements {range_.start} to {range_.stop} of {name} are not all there ({copied} are)"
                )

    def state(self) -> dict[str, Any]:
        """The small state of the run."""
        return self._state


def from_state_dict(state_dict: Mapping[str, Any], what: str) -> TensorSource:
    """A source over the tensors of a state dict.

    Args:
        state_dict: tensors by name; other values are left alone.
        what: it is, for reports.
    """
    tensors = {name: value.detach() for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    rows = [
        Row(name, tuple(t.shape), t.dtype, FROZEN if t.is_floating_point() else BUFFER) for name, t in tensors.items()
    ]
    chunks = {entry_name(VALUE, name): [(0, tensor.reshape(-1))] for name, tensor in tensors.items()}
    return TensorSource(Path(what), rows, chunks)
