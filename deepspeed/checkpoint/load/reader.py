"""Sources of checkpoint data: native files on disk or read by other ranks, and state dicts in memory."""

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
    """Elements of a field of a parameter, and their destination."""

    field: str  # `value`, `gradient`, `state/<key>`
    row: ManifestEntry
    range: RegionRange  # which elements of which box; of state with a shape of its own: all of it, and whose
    into: torch.Tensor  # 1-D tensor of as many elements, any dtype and device. Padding of the box becomes zero

    def clear_padding(self) -> None:
        """Set the padding elements, which no checkpoint has, to zero."""
        if self.range.box.packed is not self.range.box:
            self.into.zero_()


@dataclass(frozen=True)
class Fetch:
    """Elements of one entry of one file: a run, or rows at equal distances."""

    file: str
    entry: str
    start: int
    into: torch.Tensor = field(compare=False)  # 1-D, or (rows, elements of a row)
    distance: int = 0  # elements from the beginning of a row to that of the next

    @property
    def stop(self) -> int:
        return self.start + self.distance * (self.into.shape[0] - 1 if self.distance else 0) + self.into.shape[-1]


def byte_range(stored: TensorLocation, start: int, distance: int, into: torch.Tensor) -> Range:
    """Convert elements of a stored tensor to a byte range of its file; rows of `into` as in `Fetch`."""
    size, rows = stored.dtype.itemsize, into.shape[0] if distance else 1
    begin = stored.begin + start * size
    end = begin + ((rows - 1) * distance + into.shape[-1]) * size
    return Range(begin, end, stored.dtype, into, distance * size)


def runs(copy: Copy, into: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Split a copy into runs or rows for `Fetch`, as (start, distance, destination)."""
    for start, distance, place in copy.rows(into):
        yield (start, distance, place) if place.shape[0] > 1 else (start, 0, place[0])


class Source:
    """Interface of all checkpoint sources."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    def read(self, wanted: Iterable[ReadRequest]) -> None:
        """Read elements into tensors. Collective over the ranks that share the source."""
        raise NotImplementedError

    def most(self, count: int) -> int:
        """Return the maximum of `count` over all reading ranks. Collective over the ranks that share the source."""
        return count

    def state(self) -> dict[str, Any]:
        """Return the small state of the run by section: `engine`, `client` and so on."""
        raise NotImplementedError

    def private(self, rank: int) -> dict[str, Any]:
        """Return the private state of one rank of the saving run; empty if it has none."""
        return {}

    def private_tensors(self, rank: int, wanted: dict[str, torch.Tensor]) -> None:
        """Read the private tensors of a saved rank into the given ones, by entry name."""

    def whole(self, name: str, field_: str = "value") -> torch.Tensor:
        """Return one tensor in its original shape and stored dtype."""
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
    """A checkpoint in the native format.

    Args:
        seen: readable files by rank; a rank reads files for other ranks that cannot see them.
        allow_pickle: allow unpickling of a client's objects (`checkpoint.client_state_pickle`).
    """

    def __init__(
        self, path: Path, manifest: Manifest, ranks: Ranks, seen: list[set[str]], allow_pickle: bool = False
    ) -> None:
        super().__init__(path, manifest)
        self.ranks, self._seen, self._allow_pickle = ranks, seen, allow_pickle
        self._here = seen[ranks.rank]
        self._everywhere = all(status == seen[0] for status in seen)

    def read(self, wanted: Iterable[ReadRequest]) -> None:
        """Read elements into tensors and check the checksums of the blocks. All ranks must call this."""
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
        """Read files that this rank cannot access.

        All ranks gather their requests. The lowest rank that can read a file sends its values to the requesting ranks,
        in the same order on all ranks.
        """
        requests = [(f.file, f.entry, f.start, f.distance, tuple(f.into.shape), f.into.dtype) for f in far]
        wishes = self.ranks.gather(requests)
        for rank, listed in enumerate(wishes):
            for number, (file, entry, start, distance, shape, dtype) in enumerate(listed):
                server = self.server(file)
                if self.ranks.rank == server:
                    values = torch.empty(shape, dtype=dtype)
                    self._read_here([Fetch(file, entry, start, values, distance)])
                    self.ranks.send(values, rank)
                elif self.ranks.rank == rank:
                    values = torch.empty(shape, dtype=dtype)
                    self.ranks.receive(values, server)
                    far[number].into.copy_(values)

    def most(self, count: int) -> int:
        return max(self.ranks.gather(count))

    def server(self, file: str) -> int:
        """Return the rank that reads a file for ranks that do not see the file."""
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
        """Return the private state of one rank of the saving run. All ranks must call this, each for any rank."""
        name = rank_file(rank)
        text, tensors = "{}", {}
        with self.ranks.together("reading the ranks' own state"):
            if name in self._here:
                text, tensors = self._private_here(name)
        if not self._everywhere:
            wishes = self.ranks.gather(name)
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
        """Read the private tensors of a saved rank whole, by entry name. All ranks must call this."""
        self._fetch([Fetch(rank_file(rank), entry, 0, into) for entry, into in wanted.items()])


def missing(manifest: Manifest, names: list[str], path: Path) -> CheckpointMissingError:
    """Create the error for files that no rank can see; it names the host that wrote each file."""
    hosts = manifest.about.get("hosts", [])
    homes = {rank_file(rank): host for rank, host in enumerate(hosts)}
    listed = ", ".join(f"{name} (written by host {homes.get(name, hosts[0] if hosts else '?')})" for name in names[:8])
    return CheckpointMissingError(
        f"no rank can read {listed}{' …' if len(names) > 8 else ''} of {path} in full length: start a rank where it "
        f"is, or copy it"
    )


Chunk = tuple[int, torch.Tensor]  # first element in the flattened parameter, 1-D values


class TensorSource(Source):
    """Source for values in memory or memory-mapped from files.

    Args:
        chunks: chunks by `entry_name`, in any order.
    """

    def __init__(
        self,
        path: Path,
        rows: list[ManifestEntry],
        chunks: Mapping[str, list[Chunk]],
        states: Iterable[StateRule] = (),
        state: dict[str, Any] | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(path, Manifest(rows, [], list(states), {}, about or {}))
        self._chunks, self._state = chunks, state or {}

    def read(self, wanted: Iterable[ReadRequest]) -> None:
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
    """Create a source from the tensors of a state dict."""
    tensors = {name: value.detach() for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    rows = [
        ManifestEntry(name, tuple(t.shape), t.dtype, FROZEN if t.is_floating_point() else BUFFER)
        for name, t in tensors.items()
    ]
    chunks = {entry_name(VALUE, name): [(0, tensor.reshape(-1))] for name, tensor in tensors.items()}
    return TensorSource(Path(what), rows, chunks)
