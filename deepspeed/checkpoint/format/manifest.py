"""Manifest of a checkpoint: its tensors and their sharding.

A row is a parameter or buffer. A box is a region of a global tensor, such as a tensor-parallel slice.

[Note: formats] In format 2, a group lists its rows, the box of each row, and the file of each slice. In format 1, all
boxes were whole tensors, and slice r was in the file of rank r; this format is still read but no longer written.
"""

from __future__ import annotations

import bisect
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.format.safetensors_file import DTYPES, NAMES, Seal
from deepspeed.errors import CheckpointCorruptError, CheckpointError
from deepspeed.zero.api.state_view import LAYOUT_RULES
from deepspeed.zero.layout.layout import ShardLayout
from deepspeed.zero.layout.placement import Cut
from deepspeed.zero.layout.regions import Copy, Region, RegionRange, copies, extent

MANIFEST = "manifest.json"
# Files of the small state of a run.
STATE, STATE_TENSORS, STATE_PICKLE = "state.json", "state.safetensors", "state.pickle"
VERSION = 2
_PREFIX = '{"crc32": "%08x",\n"manifest": '

# Kinds of rows.
TRAINED, FROZEN, LEFT_OUT, BUFFER = "trained", "frozen", "left out", "buffer"
# Fields of a parameter with its shape and sharding; those of the optimizer state are `state/<key>`.
VALUE, GRADIENT = "value", "gradient"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def entry_name(field_: str, name: str) -> str:
    """Return the name of a field (`value`, `gradient`, `state/<key>`, `round`) of a parameter or buffer in a file."""
    return f"{field_}/{name}"


def state_field(key: str) -> str:
    """Return the field name for the optimizer state tensor `key`, such as `exp_avg`."""
    return f"state/{key}"


@dataclass(frozen=True)
class ManifestEntry:
    """Manifest row: one parameter or buffer.

    Args:
        name: name in the model.
        shape: global shape.
        dtype: dtype of the stored value (of the master weight if there is one).
        kind: `trained`, `frozen`, `left out` (frozen, and its values were not stored) or `buffer`.
        state: index of the optimizer state in `Manifest.states`; None: no optimizer state (yet).
        order: position in the optimizer, counted over all groups; -1: not in the optimizer.
        group: optimizer group; -1: not in the optimizer.
        place: position in the module of the rank that reports the row, by which rows are sorted; not stored.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = TRAINED
    state: int | None = None
    order: int = -1
    group: int = -1
    place: int = field(default=-1, compare=False)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def everything(self) -> RegionRange:
        return RegionRange(Region(self.shape), 0, self.numel)


@dataclass(frozen=True)
class StateRule:
    """Layout of an optimizer state, common to several parameters.

    Args:
        sliced: dtype by key, for tensors of the parameter's shape, which are sharded like the parameter.
        whole: (dtype, shape) by key, for tensors of other shapes, stored in the file of the parameter's first element.
        values: numbers and other small values by key, in typed JSON.
    """

    sliced: dict[str, torch.dtype]
    whole: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    values: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        whole = {key: [NAMES[dtype], list(shape)] for key, (dtype, shape) in self.whole.items()}
        return {"sliced": {k: NAMES[d] for k, d in self.sliced.items()}, "whole": whole, "values": self.values}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> StateRule:
        whole = {key: (DTYPES[dtype], tuple(shape)) for key, (dtype, shape) in fields["whole"].items()}
        return StateRule({k: DTYPES[d] for k, d in fields["sliced"].items()}, whole, fields["values"])


@dataclass(frozen=True)
class CutGroup:
    """Tensors that are sharded together: their boxes are flattened and concatenated, and the result is cut into slices.

    Args:
        rows: indices of the tensors in `Manifest.rows`.
        boxes: box of each tensor.
        rule: `equal`: slices of equal length; `between`: cuts only between tensors; `first`: all in slice 0.
        files: name of the file with slice r, for each r.
        stored: False for tensors that another group stores; empty: all are stored here.
        states: optimizer state of each tensor, as in `ManifestEntry`; empty: those of the rows.
    """

    rows: tuple[int, ...]
    boxes: tuple[Region, ...]
    rule: str
    files: tuple[str, ...]
    stored: tuple[bool, ...] = ()
    states: tuple[int | None, ...] = ()

    @cached_property
    def layout(self) -> ShardLayout:
        """Slice boundaries and offsets of the concatenation, padding included."""
        return LAYOUT_RULES[self.rule]([box.numel for box in self.boxes], len(self.files))

    def pieces(self, index: int, low: int, high: int) -> Iterator[tuple[str, RegionRange]]:
        """Yield the stored pieces with wanted elements of a tensor, as (file, range of the box without padding).

        Args:
            index: index of the tensor in the group.
            low: first wanted element of the flattened box without padding.
            high: one past the last wanted element.
        """
        box, cuts, offset = self.boxes[index], self.layout.cuts, self.layout.offsets[index]
        end = offset + box.numel
        for rank in range(max(bisect.bisect_right(cuts, offset) - 1, 0), len(self.files)):
            if cuts[rank] >= end:
                break
            start, stop = (box.packed_index(min(max(cut, offset), end) - offset) for cut in cuts[rank : rank + 2])
            if max(start, low) < min(stop, high):
                yield self.files[rank], RegionRange(box.packed, start, stop)


@dataclass(frozen=True)
class Read:
    """Read of one stored piece: its file, and the copy of its elements to their destination."""

    file: str
    copy: Copy


@dataclass
class Manifest:
    """Contents of `manifest.json`.

    Args:
        rows: all parameters and buffers.
        groups: sharding and files of the rows; empty if the values are stored elsewhere.
        states: the distinct optimizer states; rows refer to them by index.
        files: length and checksum of each file, by name.
        about: all other data: counters, hosts, version, settings of the run.
    """

    rows: list[ManifestEntry]
    groups: list[CutGroup]
    states: list[StateRule]
    files: dict[str, Seal]
    about: dict[str, Any]
    _numbers: dict[str, int] = field(init=False, repr=False)
    _stored: dict[str, list[tuple[CutGroup, int]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._numbers = {row.name: number for number, row in enumerate(self.rows)}
        self._stored = {}
        for group in self.groups:
            for index, number in enumerate(group.rows):
                if not group.stored or group.stored[index]:
                    self._stored.setdefault(self.rows[number].name, []).append((group, index))

    # -- asking ---------------------------------------------------------------------------------------------------

    @property
    def aliases(self) -> dict[str, str]:
        return self.about.get("aliases", {})

    def row(self, name: str) -> ManifestEntry | None:
        """Return the row of a parameter or buffer, by any of its names; None if there is none."""
        number = self._numbers.get(self.aliases.get(name, name))
        return None if number is None else self.rows[number]

    def state_of(self, row: ManifestEntry, box: Region | None = None) -> StateRule | None:
        """Return the optimizer state layout of a parameter, or of its `box` if boxes differ; None without a state."""
        group = None if box is None else self._find(row, box)
        number = row.state if group is None or not group[0].states else group[0].states[group[1]]
        return None if number is None else self.states[number]

    def is_whole(self, field_: str, row: ManifestEntry) -> bool:
        """Whether a field of a parameter is stored unsharded because it has another shape than the parameter."""
        rule = self.state_of(row)
        return rule is not None and any(field_ == state_field(key) for key in rule.whole)

    def _find(self, row: ManifestEntry, box: Region) -> tuple[CutGroup, int] | None:
        stored = self._stored.get(row.name, ())
        return next(((group, index) for group, index in stored if group.boxes[index] == box), None)

    def has_box(self, row: ManifestEntry, box: Region) -> bool:
        """Whether exactly this box of a parameter was saved, so that its unsharded optimizer state can be loaded."""
        return self._find(row, box) is not None if self.groups else box.whole

    def reads(self, row: ManifestEntry, wanted: RegionRange) -> Iterator[Read]:
        """Yield the reads for a range of a parameter, valid for each field that is sharded like the parameter."""
        for group, index in self._stored.get(row.name, ()):
            low, high = extent(group.boxes[index].packed, wanted)
            for file, piece in group.pieces(index, low, high):
                for copy in copies(piece, wanted):
                    yield Read(file, copy)

    def home(self, row: ManifestEntry, box: Region) -> str:
        """Return the name of the file with the first element of a box, and with the box's unsharded state.

        Raises:
            CheckpointError: the parameter was not saved with this box.
        """
        group = self._find(row, box)
        if group is None:
            raise CheckpointError(f"the checkpoint does not contain '{row.name}' split as it is here")
        for file, _ in group[0].pieces(group[1], 0, 1):
            return file
        return group[0].files[0]

    # -- on disk --------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        boxes: dict[Any, int] = {(): 0}  # numbers by cuts, in the order in which they are seen
        files: dict[tuple[str, ...], int] = {}
        groups = []
        for g in self.groups:
            numbers = [boxes.setdefault(box.cuts, len(boxes)) for box in g.boxes]
            # -1 minus the number of the box of a tensor that another group stores.
            stored = g.stored or [True] * len(g.rows)
            signed = [number if here else -1 - number for number, here in zip(numbers, stored, strict=True)]
            file_number = files.setdefault(g.files, len(files))
            groups.append([list(g.rows), signed, g.rule, file_number, list(g.states)])
        body = {
            "format": "deepspeed",
            "version": VERSION,
            **self.about,
            "files": {name: [seal.nbytes, f"{seal.crc32:08x}"] for name, seal in sorted(self.files.items())},
            "states": [state.to_json() for state in self.states],
            "columns": ["name", "shape", "dtype", "kind", "state", "order", "group"],
        }
        lines = {
            "boxes": [[[cut.dim, cut.size, cut.segments] for cut in cuts] for cuts in boxes],
            "slices": list(files),
            "groups": groups,
            "rows": [[r.name, r.shape, NAMES[r.dtype], r.kind, r.state, r.order, r.group] for r in self.rows],
        }
        text = json.dumps(body, indent=1)[:-2]
        for key, listed in lines.items():
            text += f',\n "{key}": [\n' + ",\n".join("  " + json.dumps(entry) for entry in listed) + "\n ]"
        encoded = (text + "\n}").encode()
        return (_PREFIX % zlib.crc32(encoded)).encode() + encoded + b"}\n"

    @staticmethod
    def from_bytes(data: bytes, where: Path) -> Manifest:
        size = len(_PREFIX % 0)
        try:
            stored_crc = int(data[len('{"crc32": "') :][:8], 16)
            if (
                zlib.crc32(data[size:-2]) != stored_crc
                or data[:size] != (_PREFIX % stored_crc).encode()
                or data[-2:] != b"}\n"
            ):
                raise CheckpointCorruptError(f"{where} differs from what was written (its checksum does not hold)")
            body = json.loads(data[size:-2])
            version = body.pop("version")
            if body.pop("format") != "deepspeed" or version not in (1, VERSION):
                raise CheckpointCorruptError(f"{where} was written by a newer version of this package")
            rows = [ManifestEntry(r[0], tuple(r[1]), DTYPES[r[2]], *r[3:]) for r in body.pop("rows")]
            groups = list(Manifest._groups_of_format_1(rows, body) if version == 1 else Manifest._groups(rows, body))
            states = [StateRule.from_json(state) for state in body.pop("states")]
            seals = {name: Seal(size, int(crc, 16)) for name, (size, crc) in body.pop("files").items()}
            body.pop("columns")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            if isinstance(error, CheckpointCorruptError):
                raise
            raise CheckpointCorruptError(f"{where} cannot be read as a manifest: {error!r}") from error
        if any("/" in name or name.startswith(".") for name in seals):
            raise CheckpointCorruptError(f"{where} names files outside of its folder")
        return Manifest(rows, groups, states, seals, body)

    @staticmethod
    def _groups(rows: list[ManifestEntry], body: dict[str, Any]) -> Iterator[CutGroup]:
        cuts = [
            tuple(Cut(dim, size, tuple((start, length) for start, length in segments)) for dim, size, segments in box)
            for box in body.pop("boxes")
        ]
        slices = [tuple(files) for files in body.pop("slices")]
        for numbers, signed, rule, files, states in body.pop("groups"):
            stored = () if all(number >= 0 for number in signed) else tuple(number >= 0 for number in signed)
            positions = (number if number >= 0 else -1 - number for number in signed)
            boxes = tuple(Region(rows[n].shape, cuts[position]) for n, position in zip(numbers, positions, strict=True))
            yield CutGroup(tuple(numbers), boxes, rule, slices[files], stored, tuple(states))

    @staticmethod
    def _groups_of_format_1(rows: list[ManifestEntry], body: dict[str, Any]) -> Iterator[CutGroup]:
        offset = 0
        for count, rule, ranks in body.pop("groups"):
            numbers = tuple(range(offset, offset + count))
            boxes = tuple(Region(row.shape) for row in rows[offset : offset + count])
            yield CutGroup(numbers, boxes, rule, tuple(map(rank_file, range(ranks))))
            offset += count


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointCorruptError(f"{folder} is not complete: no readable {MANIFEST} ({error.strerror})") from error
    return Manifest.from_bytes(data, path)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointCorruptError unless every file of a manifest exists with its recorded length."""
    for name, seal in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise CheckpointCorruptError(f"{folder / name} is missing") from None
        if size != seal.nbytes:
            raise CheckpointCorruptError(f"{folder / name} has {size} bytes; {seal.nbytes} were written")
