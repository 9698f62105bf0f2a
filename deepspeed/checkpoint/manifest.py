"""What a checkpoint holds and how it is cut, stated by rule; every reader computes its own reads from it."""

from __future__ import annotations

import bisect
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.tensorfile import DTYPES, NAMES, Seal
from deepspeed.errors import CheckpointCorruptError
from deepspeed.zero.layout import Layout
from deepspeed.zero.state_view import LAYOUT_RULES

MANIFEST = "manifest.json"
VERSION = 1
_PREFIX = '{"crc32": "%08x",\n"manifest": '

# Kinds of rows.
TRAINED, FROZEN, LEFT_OUT, BUFFER = "trained", "frozen", "left out", "buffer"
# Fields that are cut as the parameter is; those of the optimizer are `state/<key>`.
VALUE, GRADIENT = "value", "gradient"


def rank_file(rank: int) -> str:
    """The tensor file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def entry_name(field_: str, name: str) -> str:
    """What a piece of a parameter is called in a rank's file."""
    return f"{field_}/{name}"


def state_field(key: str) -> str:
    """The field of a tensor of the optimizer state."""
    return f"state/{key}"


@dataclass(frozen=True)
class Row:
    """One parameter or buffer.

    Args:
        name: qualified name in the module.
        shape: global shape.
        dtype: of the stored value: that of the master where there is one.
        kind: `trained`, `frozen`, `left out` (frozen, and its values were not stored) or `buffer`.
        state: which of the optimizer states; None: it has none (yet).
        order: position in the optimizer, counted over all its groups; -1 outside.
        group: group of the optimizer; -1 outside.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = TRAINED
    state: int | None = None
    order: int = -1
    group: int = -1

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class StateRule:
    """The optimizer state of parameters that have equal ones.

    Args:
        sliced: tensors of the parameter's shape, cut as it is: dtype by key.
        whole: tensors of another shape, in the file of the parameter's first element: (dtype, shape) by key.
        values: numbers and the like, in typed JSON.
    """

    sliced: dict[str, torch.dtype]
    whole: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    values: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        whole = {key: [NAMES[dtype], list(shape)] for key, (dtype, shape) in self.whole.items()}
        return {"sliced": {k: NAMES[d] for k, d in self.sliced.items()}, "whole": whole, "values": self.values}

    @staticmethod
    def from_json(made: dict[str, Any]) -> StateRule:
        """From JSON."""
        whole = {key: (DTYPES[dtype], tuple(shape)) for key, (dtype, shape) in made["whole"].items()}
        return StateRule({k: DTYPES[d] for k, d in made["sliced"].items()}, whole, made["values"])


@dataclass(frozen=True)
class CutGroup:
    """Consecutive rows that are cut together.

    Args:
        count: how many rows.
        rule: `equal` slices of their concatenation, or cuts `between` them.
        ranks: number of slices; slice r is in the file of rank r.
    """

    count: int
    rule: str
    ranks: int

    def layout(self, numels: list[int]) -> Layout:
        """The layout of members with so many elements."""
        return LAYOUT_RULES[self.rule](numels, self.ranks)


@dataclass(frozen=True)
class Read:
    """A run of elements of one stored piece.

    Args:
        file: file name.
        entry: name in the file.
        start: first element, counted in the piece.
        stop: one past the last.
        at: where the run begins in the destination.
    """

    file: str
    entry: str
    start: int
    stop: int
    at: int


@dataclass
class Manifest:
    """The contents of `manifest.json`.

    Args:
        rows: parameters and buffers, in the order of the groups.
        groups: how they are cut.
        states: the different optimizer states; rows refer to them by number.
        files: every file beside the manifest, with its seal.
        about: everything else: counters, who saved, typed JSON of small state.
    """

    rows: list[Row]
    groups: list[CutGroup]
    states: list[StateRule]
    files: dict[str, Seal]
    about: dict[str, Any]
    _where: dict[str, tuple[int, int]] = field(init=False, repr=False)
    _cuts: list[tuple[Layout, list[int], int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._where, self._cuts = {}, []
        at = 0
        for number, group in enumerate(self.groups):
            members = self.rows[at : at + group.count]
            numels = [row.numel for row in members]
            self._cuts.append((group.layout(numels), [0, *accumulate(numels)], at))
            self._where |= {row.name: (number, at + i) for i, row in enumerate(members)}
            at += group.count

    # -- asking ---------------------------------------------------------------------------------------------------

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of tied parameters."""
        return self.about.get("aliases", {})

    def row(self, name: str) -> Row | None:
        """The row of a parameter or buffer, by any of its names."""
        place = self._where.get(self.aliases.get(name, name))
        return None if place is None else self.rows[place[1]]

    def state_of(self, row: Row) -> StateRule | None:
        """The optimizer state of a parameter."""
        return None if row.state is None else self.states[row.state]

    def is_whole(self, field_: str, row: Row) -> bool:
        """Whether a field of a parameter has a shape of its own and is not cut."""
        rule = self.state_of(row)
        return rule is not None and any(field_ == state_field(key) for key in rule.whole)

    def reads(self, field_: str, row: Row, start: int, stop: int) -> Iterator[Read]:
        """The runs that make up elements [start, stop) of a field of a parameter.

        Args:
            field_: `value`, `gradient` or a `state_field`.
            row: the parameter.
            start: first element of the flattened parameter.
            stop: one past the last.
        """
        number, index = self._where[row.name]
        layout, edges, first = self._cuts[number]
        offset, entry = edges[index - first], entry_name(field_, row.name)
        low, end = offset + start, offset + stop
        rank = bisect.bisect_right(layout.cuts, low) - 1
        while low < end:
            high = min(end, layout.cuts[rank + 1])
            if low < high:
                begin = max(layout.cuts[rank], offset)
                yield Read(rank_file(rank), entry, low - begin, high - begin, low - offset - start)
                low = high
            rank += 1

    def home(self, row: Row) -> str:
        """The file that holds a parameter's first element, and the state that is not cut."""
        for read in self.reads(VALUE, row, 0, min(1, row.numel)):
            return read.file
        return rank_file(0)

    # -- on disk --------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The file's contents."""
        rows = [
            [r.name, list(r.shape), NAMES[r.dtype], r.kind, r.state, r.order, r.group] for r in self.rows
        ]  # one line each
        body = {
            "format": "deepspeed",
            "version": VERSION,
            **self.about,
            "files": {name: [seal.nbytes, f"{seal.crc32:08x}"] for name, seal in sorted(self.files.items())},
            "groups": [[g.count, g.rule, g.ranks] for g in self.groups],
            "states": [state.to_json() for state in self.states],
            "columns": ["name", "shape", "dtype", "kind", "state", "order", "group"],
        }
        text = json.dumps(body, indent=1)[:-2] + ',\n "rows": [\n'
        text += ",\n".join("  " + json.dumps(row) for row in rows) + "\n ]\n}"
        encoded = text.encode()
        return (_PREFIX % zlib.crc32(encoded)).encode() + encoded + b"}\n"

    @staticmethod
    def from_bytes(data: bytes, where: Path) -> Manifest:
        """Parse the file's contents.

        Raises:
            CheckpointCorruptError: they are not what was written, or of a version that is not known here.
        """
        size = len(_PREFIX % 0)
        try:
            told = int(data[len('{"crc32": "') :][:8], 16)
            if zlib.crc32(data[size:-2]) != told or data[:size] != (_PREFIX % told).encode() or data[-2:] != b"}\n":
                raise CheckpointCorruptError(f"{where} differs from what was written (its checksum does not hold)")
            body = json.loads(data[size:-2])
            if body.pop("format") != "deepspeed" or body.pop("version") != VERSION:
                raise CheckpointCorruptError(f"{where} was written by a newer version of this package")
            rows = [Row(r[0], tuple(r[1]), DTYPES[r[2]], *r[3:]) for r in body.pop("rows")]
            groups = [CutGroup(*group) for group in body.pop("groups")]
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


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a checkpoint's folder.

    Raises:
        CheckpointCorruptError: there is none, or it is broken.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointCorruptError(f"{folder} is not complete: no readable {MANIFEST} ({error.strerror})") from error
    return Manifest.from_bytes(data, path)


def check_files(folder: Path, manifest: Manifest) -> None:
    """See that every file is there in its full length.

    Raises:
        CheckpointCorruptError: one is not.
    """
    for name, seal in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise CheckpointCorruptError(f"{folder / name} is missing") from None
        if size != seal.nbytes:
            raise CheckpointCorruptError(f"{folder / name} has {size} bytes; {seal.nbytes} were written")
