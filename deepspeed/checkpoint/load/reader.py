"""Sources of checkpoint data: native files, which other ranks may have to read, and tensors in memory."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.format.json_codec import Decoder
from deepspeed.checkpoint.format.manifest import (
    BUFFER,
    FROZEN,
    STATE,
    STATE_PICKLE,
    STATE_TENSORS,
    VALUE,
    Manifest,
    ManifestEntry,
    Read,
    StateRule,
    entry_name,
    rank_file,
)
from deepspeed.checkpoint.format.safetensors_file import Range, TensorFile, TensorLocation, read_all
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.errors import CheckpointCorruptError, CheckpointError, CheckpointMissingError
from deepspeed.zero.layout.regions import Copy, Region, RegionRange, copies


@dataclass(frozen=True)
class ReadRequest:
    """Request to read elements of one field of a parameter.

    Args:
        field: `value`, `gradient` or `state/<key>`.
        row: manifest row of the parameter.
        range: range of elements of a box; for state with another shape than the parameter, only the box counts.
        into: 1-D destination with as many elements, of any dtype and device; padding of the box becomes zero.
    """

    field: str
    row: ManifestEntry
    range: RegionRange
    into: torch.Tensor

    def clear_padding(self) -> None:
        """Set the destination to zero if the box has padding, which is not stored."""
        if self.range.box.packed is not self.range.box:
            self.into.zero_()


@dataclass(frozen=True)
class Fetch:
    """Read of elements of one tensor in one file: consecutive elements, or rows at a constant distance.

    Args:
        file: name of the file.
        entry: name of the tensor in the file.
        start: first element.
        into: destination: [elements], or [rows, elements per row].
        distance: elements from the start of a row to the start of the next; 0: consecutive elements.
    """

    file: str
    entry: str
    start: int
    into: torch.Tensor = field(compare=False)
    distance: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.distance * (self.into.shape[0] - 1 if self.distance else 0) + self.into.shape[-1]


def byte_range(stored: TensorLocation, start: int, distance: int, into: torch.Tensor) -> Range:
    """Return the byte range of elements of a stored tensor; `start`, `distance` and `into` are those of `Fetch`."""
    size, rows = stored.dtype.itemsize, into.shape[0] if distance else 1
    begin = stored.begin + start * size
    end = begin + ((rows - 1) * distance + into.shape[-1]) * size
    return Range(begin, end, stored.dtype, into, distance * size)


def runs(copy: Copy, into: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Split a copy into arguments (start, distance, into) of `Fetch`."""
    for start, distance, place in copy.rows(into):
        yield (start, distance, place) if place.shape[0] > 1 else (start, 0, place[0])


class Source:
    """Interface of checkpoint sources.

    Args:
        path: folder or file of the checkpoint.
        manifest: names, shapes and sharding of the tensors.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    def read(self, wanted: Iterable[ReadRequest]) -> None:
        """Read elements into their destinations. Collective over the ranks that share the source."""
        raise NotImplementedError

    def most(self, count: int) -> int:
        """Return the maximum of `count` over the ranks that share the source. Collective over these ranks."""
        return count

    def state(self) -> dict[str, Any]:
        """Return the small state of the run, by section, such as `engine` and `client_state`. Collective as `read`."""
        raise NotImplementedError

    def private(self, rank: int) -> dict[str, Any]:
        """Return the state that only `rank` of the saving run had; empty if there is none. Collective as `read`."""
        return {}

    def private_tensors(self, rank: int, wanted: dict[str, torch.Tensor]) -> None:
        """Read tensors of the saving run's rank `rank` into `wanted`, by name in the file. Collective as `read`."""

    def whole(self, name: str, field_: str = "value") -> torch.Tensor:
        """Return a full tensor on the CPU, in its global shape and stored dtype. Collective as `read`.

        Args:
            name: name of the parameter or buffer.
            field_: `value`, or `state/<key>` for an optimizer state tensor of the parameter's shape.

        Raises:
            CheckpointError: the checkpoint does not contain the name.
        """
        row = self.manifest.row(name)
        if row is None:
            raise CheckpointError(f"{self.path} holds no {name!r}")
        rule = self.manifest.state_of(row)
        key = field_.removeprefix("state/")
        dtype = rule.sliced[key] if rule is not None and key != field_ else row.dtype
        tensor = torch.empty(row.shape, dtype=dtype)
        self.read([ReadRequest(field_, row, row.everything, tensor.reshape(-1))])
        return tensor


class NativeSource(Source):
    """Source of a checkpoint in the native format.

    Args:
        path: folder of the tag.
        manifest: manifest of the checkpoint.
        ranks: ranks that read together.
        seen: names of the files that each rank can read; other files are read by a rank that can, and sent.
        allow_pickle: allow unpickling of client state (`checkpoint.client_state_pickle`).
    """

    def __init__(
        self, path: Path, manifest: Manifest, ranks: Ranks, seen: list[set[str]], allow_pickle: bool = False
    ) -> None:
        super().__init__(path, manifest)
        self.ranks, self._seen, self._allow_pickle = ranks, seen, allow_pickle
        self._here = seen[ranks.rank]
        self._everywhere = all(status == seen[0] for status in seen)

    def read(self, wanted: Iterable[ReadRequest]) -> None:
        """Read elements into their destinations and check the checksums. Collective.

        Raises:
            CheckpointCorruptError: a checksum differs, or a file is shorter than the manifest says.
            CheckpointMissingError: no rank can read a file.
        """
        reads: dict[tuple[str, RegionRange], list[Read]] = {}  # the same for all fields of a parameter
        fetches = []
        for request in wanted:
            name = entry_name(request.field, request.row.name)
            if self.manifest.is_whole(request.field, request.row):
                fetches.append(Fetch(self.manifest.home(request.row, request.range.box), name, 0, request.into))
                continue
            request.clear_padding()
            key = (request.row.name, request.range)
            if key not in reads:
                reads[key] = list(self.manifest.reads(request.row, request.range))
            for read in reads[key]:
                places = runs(read.copy, request.into)
                fetches += [Fetch(read.file, name, start, place, distance) for start, distance, place in places]
        self._fetch(fetches)

    def _fetch(self, fetches: list[Fetch]) -> None:
        with self.ranks.together("reading the checkpoint"):
            self._read_here([fetch for fetch in fetches if fetch.file in self._here])
        if not self._everywhere:
            self._read_through_peers([fetch for fetch in fetches if fetch.file not in self._here])

    def _read_here(self, fetches: list[Fetch]) -> None:
        with ExitStack() as stack:
            opened: dict[str, TensorFile] = {}
            wanted: dict[TensorFile, list[Range]] = {}
            for fetch in fetches:
                if fetch.file not in opened:
                    seal = self.manifest.files.get(fetch.file)
                    if seal is None:
                        raise CheckpointCorruptError(f"the manifest of {self.path} does not name {fetch.file}")
                    opened[fetch.file] = stack.enter_context(TensorFile(self.path / fetch.file, seal))
                file = opened[fetch.file]
                stored = file.find(fetch.entry)
                if fetch.stop > (stored.end - stored.begin) // stored.dtype.itemsize:
                    raise CheckpointCorruptError(f"{file.path}: {fetch.entry} is shorter than the manifest says")
                wanted.setdefault(file, []).append(byte_range(stored, fetch.start, fetch.distance, fetch.into))
            read_all(wanted)

    def _read_through_peers(self, far: list[Fetch]) -> None:
        """Read elements of files that this rank cannot access, through other ranks. Collective.

        The requests of all ranks are gathered and served in the same order on all ranks; the lowest rank that can read
        a file sends the elements.
        """
        requests = [(f.file, f.entry, f.start, f.distance, tuple(f.into.shape), f.into.dtype) for f in far]
        wishes, failed = self.ranks.gather(requests), None
        with self.ranks.together("reading the checkpoint for other ranks"):
            for rank, listed in enumerate(wishes):
                for number, (file, entry, start, distance, shape, dtype) in enumerate(listed):
                    server = self.server(file)
                    if self.ranks.rank == server:
                        values = torch.empty(shape, dtype=dtype)
                        try:
                            self._read_here([Fetch(file, entry, start, values, distance)])
                        except (CheckpointError, OSError) as error:
                            failed = failed or error  # raised after all reads: the other rank waits for values
                        self.ranks.send(values, rank)
                    elif self.ranks.rank == rank:
                        values = torch.empty(shape, dtype=dtype)
                        self.ranks.receive(values, server)
                        far[number].into.copy_(values)
            if failed is not None:
                raise failed

    def most(self, count: int) -> int:
        return max(self.ranks.gather(count))

    def server(self, file: str) -> int:
        """Return the lowest rank that can read a file; CheckpointMissingError if none can."""
        for rank, seen in enumerate(self._seen):
            if file in seen:
                return rank
        raise missing(self.manifest, [file], self.path)

    # -- small state ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        server = self.server(STATE)
        small: dict[str, bytes] = {}
        tensors: dict[str, torch.Tensor] = {}
        with self.ranks.together("reading the state of the run"):
            if self.ranks.rank == server or self._everywhere:
                small = {name: self._small(name) for name in (STATE, STATE_PICKLE) if name in self.manifest.files}
                if STATE_TENSORS in self.manifest.files:
                    with TensorFile(self.path / STATE_TENSORS, self.manifest.files[STATE_TENSORS]) as file:
                        tensors = {name: file.load(name) for name in file.entries}
        if not self._everywhere:
            small, tensors = self.ranks.gather((small, tensors))[server]
        pickled = self._unpickle(small[STATE_PICKLE]) if STATE_PICKLE in small else None
        return Decoder(lambda number: tensors[str(number)], pickled).decode(json.loads(small[STATE]))

    def _small(self, name: str) -> bytes:
        data = (self.path / name).read_bytes()
        if zlib.crc32(data) != self.manifest.files[name].crc32:
            raise CheckpointCorruptError(f"{self.path / name} differs from what was written")
        return data

    def _unpickle(self, data: bytes) -> list[Any]:
        if not self._allow_pickle:
            raise CheckpointError(
                f"{self.path / STATE_PICKLE} is a pickle, which runs code when it is opened: load with "
                f"checkpoint.client_state_pickle: true if you trust where it comes from"
            )
        return pickle.loads(data)

    def private(self, rank: int) -> dict[str, Any]:
        """Return the state that only `rank` of the saving run had. Collective; callers may ask for different ranks."""
        name = rank_file(rank)
        text, tensors = "{}", {}
        with self.ranks.together("reading the ranks' own state"):
            if name in self._here:
                text, tensors = self._private_here(name)
        if not self._everywhere:
            wishes, answers = self.ranks.gather(name), {}
            with self.ranks.together("reading the ranks' own state"):
                answers = {wish: self._private_here(wish) for wish in wishes if self._serves(wish)}
            for rank_answers in self.ranks.gather(answers):
                text, tensors = rank_answers.get(name, (text, tensors))
        return Decoder(lambda number: tensors[f"rank/{number}"]).decode(json.loads(text))

    def _serves(self, file: str) -> bool:
        return any(file in seen for seen in self._seen) and self.server(file) == self.ranks.rank

    def _private_here(self, name: str) -> tuple[str, dict[str, torch.Tensor]]:
        with TensorFile(self.path / name, self.manifest.files[name]) as file:
            own = {entry: file.load(entry) for entry in file.entries if entry.startswith("rank/")}
            return file.metadata.get("rank", "{}"), own

    def private_tensors(self, rank: int, wanted: dict[str, torch.Tensor]) -> None:
        """Read tensors that only `rank` of the saving run had into `wanted`, by name in the file. Collective."""
        self._fetch([Fetch(rank_file(rank), entry, 0, into) for entry, into in wanted.items()])


def missing(manifest: Manifest, names: list[str], path: Path) -> CheckpointMissingError:
    """Return the error for files that no rank can read; the message names up to eight files and their hosts."""
    hosts = manifest.about.get("hosts", [])
    homes = {rank_file(rank): host for rank, host in enumerate(hosts)}
    listed = ", ".join(f"{name} (written by host {homes.get(name, hosts[0] if hosts else '?')})" for name in names[:8])
    return CheckpointMissingError(
        f"no rank can read {listed}{' …' if len(names) > 8 else ''} of {path} in full length: start a rank where it "
        f"is, or copy it"
    )


Chunk = tuple[int, torch.Tensor]  # first element in the flattened parameter, 1-D values


class TensorSource(Source):
    """Source of tensors in memory, or memory-mapped.

    Args:
        path: origin, for messages.
        rows: parameters and buffers.
        chunks: (first element, 1-D values) of each flattened tensor, by `entry_name`, in any order.
        states: optimizer states; rows refer to them by index.
        state: small state of the run, by section; None: empty.
        about: other data of the manifest; None: empty.
        ranks: ranks that read together, each from its own source; None: only this process.
    """

    def __init__(
        self,
        path: Path,
        rows: list[ManifestEntry],
        chunks: Mapping[str, list[Chunk]],
        states: Iterable[StateRule] = (),
        state: dict[str, Any] | None = None,
        about: dict[str, Any] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(path, Manifest(rows, [], list(states), {}, about or {}))
        self._chunks, self._state, self._ranks = chunks, state or {}, ranks or Ranks()

    def read(self, wanted: Iterable[ReadRequest]) -> None:
        with self._ranks.together(f"reading {self.path}"):
            self._read_here(wanted)

    def most(self, count: int) -> int:
        return max(self._ranks.gather(count))

    def _read_here(self, wanted: Iterable[ReadRequest]) -> None:
        for request in wanted:
            name, copied = entry_name(request.field, request.row.name), 0
            own_shape = self.manifest.is_whole(request.field, request.row)
            stored = Region((request.into.numel(),)) if own_shape else Region(request.row.shape)
            range_ = RegionRange(stored, 0, request.into.numel()) if own_shape else request.range
            request.clear_padding()
            for start, values in self._chunks.get(name, ()):
                for copy in copies(RegionRange(stored, start, start + values.numel()), range_):
                    copy(values, request.into)
                    copied += copy.numel
            if copied != range_.real_numel:
                raise CheckpointCorruptError(
                    f"{self.path}: elements {range_.start} to {range_.stop} of {name} are not all there ({copied} are)"
                )

    def state(self) -> dict[str, Any]:
        return self._state


def from_state_dict(state_dict: Mapping[str, Any], what: str) -> TensorSource:
    """Return a source of the tensors in a state dict, without its other values; `what` names the dict in messages."""
    tensors = {name: value.detach() for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    rows = [
        ManifestEntry(name, tuple(t.shape), t.dtype, FROZEN if t.is_floating_point() else BUFFER)
        for name, t in tensors.items()
    ]
    chunks = {entry_name(VALUE, name): [(0, tensor.reshape(-1))] for name, tensor in tensors.items()}
    return TensorSource(Path(what), rows, chunks)
