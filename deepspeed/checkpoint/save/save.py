"""Atomic save of a checkpoint: write to a staging folder, then rename it; optionally in a background thread."""

from __future__ import annotations

import atexit
import itertools
import json
import pickle
import platform
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from deepspeed import comm
from deepspeed.checkpoint.format import filesystem
from deepspeed.checkpoint.format.json_codec import Encoder
from deepspeed.checkpoint.format.manifest import (
    MANIFEST,
    STATE,
    STATE_PICKLE,
    STATE_TENSORS,
    Manifest,
    rank_file,
    read_manifest,
)
from deepspeed.checkpoint.format.safetensors_file import Seal, TensorToWrite, file_bytes, write_tensors
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.save.save_plan import Reports, SavePlan, Snapshot, entry_of, take
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import CheckpointCorruptError, CheckpointError
from deepspeed.foundation.log import log_rank0, logger, warn_once

_ALIGN = 64
_SMALL_FILES = 1 << 20  # bytes kept free for the small files


@dataclass
class Contents:
    """Contents of a checkpoint to save.

    Args:
        captured: tensors and private state of this rank.
        state: small state of the run (counters, schedules, client state); that of rank 0 is saved.
        about: JSON values for the manifest; `aliases` is required.
        small_files: small files for readers of other formats, by name; those of rank 0 are saved.
        allow_pickle: pickle objects in `state` that have no JSON form, instead of raising an error.
    """

    captured: Snapshot
    state: dict[str, Any]
    about: dict[str, Any]
    small_files: dict[str, bytes] = field(default_factory=dict)
    allow_pickle: bool = False


@dataclass(frozen=True)
class Target:
    """Destination of a checkpoint.

    Args:
        folder: folder that contains the tags.
        tag: name of the checkpoint.
        leads: whether this rank creates folders and small files: one rank per node, or one rank for a shared disk.
        latest: whether the file `latest` gets this tag.
        tools: contents of scripts for `folder`, by name; existing ones are not replaced.
        check_tag: reaction if ranks have different tags: `Fail`, `Warn` or `Ignore`.
    """

    folder: Path
    tag: str
    leads: bool
    latest: bool = True
    tools: dict[str, bytes] = field(default_factory=dict)
    check_tag: str = "Warn"

    @property
    def staging(self) -> Path:
        return filesystem.staging_of(self.folder, self.tag)


class Saving:
    """One save: call `begin`, `place`, `write` and `commit` in this order; each call is collective.

    Args:
        target: destination.
        contents: contents.
        ranks: ranks that save together.
    """

    def __init__(self, target: Target, contents: Contents, ranks: Ranks) -> None:
        self.target, self.contents, self.ranks = target, contents, ranks
        self.entries: list[TensorToWrite] = []
        self._metadata: dict[str, str] = {}
        self._small: dict[str, Any] = {}
        self.taken = SavePlan()
        self._reports: tuple[Reports, ...] = ()
        self._aliases: dict[str, str] = {}
        self._seal = Seal(0, 0)

    def begin(self) -> None:
        """Encode the small state and plan which rank stores which shard. Collective.

        Raises:
            CheckpointError: a value of the state cannot be stored, or the ranks' shards do not cover a tensor.
        """
        with self.ranks.together(f"preparing checkpoint '{self.target.tag}'"):
            private = self._encode()
        captured, me = self.contents.captured, self.ranks.numbers[self.ranks.rank]
        led_offers = [offer for offer in captured.offers if offer.leader == me]
        offers_by_rank = self.ranks.gather((led_offers, self.contents.about["aliases"] if led_offers else {}))
        self.taken = take([offer for offers, _ in offers_by_rank for offer in offers], self.ranks.numbers)
        self._aliases = {alias: name for _, aliases in reversed(offers_by_rank) for alias, name in aliases.items()}
        self.entries = captured.taken(self.taken.leaders) + private

    def place(self) -> None:
        """Check tag and free disk space, clear an interrupted save of the tag, create the staging folder. Collective.

        Raises:
            CheckpointError: the disk is too full, or tags differ and `check_tag` is `Fail`.
        """
        reports, host = self.contents.captured.reports, platform.node()
        need = file_bytes(self.entries) + _SMALL_FILES
        report = (self.target.tag, self.target.leads, host, need, reports)
        tags, leads, hosts, needs, self._reports = zip(*self.ranks.gather(report), strict=True)
        self._check_tags(tags)
        shared = sum(leads) == 1  # one disk for all ranks
        if not shared:  # every node writes the same small files, those of rank 0
            self._small, self.contents.small_files = self.ranks.gather((self._small, self.contents.small_files))[0]
        room = sum(n for n, where in zip(needs, hosts, strict=True) if shared or where == host)
        with self.ranks.together(f"making the folder of checkpoint '{self.target.tag}'"):
            if self.target.leads:
                self._make_staging(room)

    def _encode(self) -> list[TensorToWrite]:
        """Encode the small state, and return the tensors of the state that only this rank has."""
        captured, contents = self.contents.captured, self.contents
        tensors: list[torch.Tensor] = []
        private = Encoder(tensors).encode(captured.private_state, "this rank's state")
        self._metadata = {"rank": json.dumps(private)}
        state_tensors: list[torch.Tensor] = []
        pickled: list[Any] | None = [] if contents.allow_pickle else None
        encoder = Encoder(state_tensors, pickled)
        encoded = {key: encoder.encode(value, key) for key, value in contents.state.items()}
        self._small = {"json": encoded, "tensors": state_tensors, "pickle": pickled}
        return [entry_of(f"rank/{i}", tensor) for i, tensor in enumerate(tensors)]

    def copy_small(self) -> None:
        """Copy the tensors of the small state, which the training thread may change while another thread writes."""
        self._small["tensors"] = [tensor.detach().clone() for tensor in self._small["tensors"]]

    def _check_tags(self, tags: tuple[str, ...]) -> None:
        if len(set(tags)) == 1 or self.target.check_tag == "Ignore":
            return
        text = f"ranks save under different tags: {', '.join(sorted(set(tags))[:4])}; pass the same tag on every rank"
        if self.target.check_tag == "Fail":
            raise CheckpointError(text + " (checkpoint.tag_validation: Fail)")
        warn_once(text)

    def _make_staging(self, need: int) -> None:
        filesystem.current.make_folder(self.target.folder)
        self._recover(self.target.folder, self.target.tag)
        free = filesystem.current.free_bytes(self.target.folder)
        if free < need:
            raise CheckpointError(
                f"checkpoint '{self.target.tag}' needs {need / 2**20:.0f} MiB, and the disk of {self.target.folder} "
                f"has {free / 2**20:.0f} MiB free: nothing was written; make room or save elsewhere"
            )
        filesystem.current.make_folder(self.target.staging)

    def write(self) -> None:
        """Write this rank's tensors to the staging folder and sync them to disk. Collective."""
        with self.ranks.together(f"writing checkpoint '{self.target.tag}'"):
            name = rank_file(self.ranks.rank)
            self._seal = write_tensors(self.target.staging / name, self.entries, self._metadata)

    def commit(self, more: Callable[[Path, Manifest], dict[str, Seal]] | None = None) -> None:
        """Write the small files and the manifest, and rename the staging folder to the tag. Collective.

        Args:
            more: function (staging folder, manifest) that writes further files and returns their seals by name, called
                on all ranks; None: no further files.
        """
        seals, hosts, times = zip(*self.ranks.gather((self._seal, platform.node(), time.time_ns())), strict=True)
        about = {
            **self.contents.about,
            "tag": self.target.tag,
            "saved_at": times[0],
            "hosts": list(hosts),
            "filled": self.taken.filled,
            "aliases": self._aliases,
        }
        named = {rank_file(rank): seal for rank, seal in enumerate(seals)}
        rows, groups, states = self.taken.with_states(self._reports)
        manifest = Manifest(rows, groups, states, named, about)
        if more is not None:
            manifest.files.update(more(self.target.staging, manifest))
        with self.ranks.together(f"completing checkpoint '{self.target.tag}'"):
            if self.target.leads:
                self._complete(manifest)

    def _complete(self, manifest: Manifest) -> None:
        staging, folder, seals = self.target.staging, self.target.folder, manifest.files
        small = {STATE: json.dumps(self._small["json"], indent=1).encode(), **self.contents.small_files}
        if self._small["pickle"]:
            small[STATE_PICKLE] = pickle.dumps(self._small["pickle"])
        filesystem.write_files({staging / name: data for name, data in small.items()})
        seals |= {name: Seal(len(data), zlib.crc32(data)) for name, data in small.items()}
        if self._small["tensors"]:
            entries = [entry_of(str(i), tensor) for i, tensor in enumerate(self._small["tensors"])]
            seals[STATE_TENSORS] = write_tensors(staging / STATE_TENSORS, entries, {})
        filesystem.write_files({staging / MANIFEST: manifest.to_bytes()})
        filesystem.current.sync_folder(staging)
        small_files = {name: data for name, data in self.target.tools.items() if not (folder / name).exists()}
        if self.target.latest:
            small_files[filesystem.LATEST] = f"{self.target.tag}\n".encode()
        filesystem.publish(folder, self.target.tag, small_files)
        log_rank0(f"checkpoint '{self.target.tag}' is complete in {folder}")

    @staticmethod
    def _recover(folder: Path, tag: str) -> None:
        """Complete an interrupted save if its manifest is written and no folder has the tag; else undo the save."""
        final, staging, old = folder / tag, filesystem.staging_of(folder, tag), filesystem.replaced_of(folder, tag)
        if not final.exists() and staging.exists():
            with suppress(CheckpointCorruptError):  # else it is not complete
                read_manifest(staging)
                filesystem.current.rename(staging, final)
        if not final.exists() and old.exists():
            filesystem.current.rename(old, final)
        for left in (staging, old):
            if left.exists():
                filesystem.current.remove(left)


class Background:
    """Asynchronous save, one at a time: the state is copied to a host buffer, which a thread writes to disk."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._group: Any = None
        self._left = False

    def ranks(self, axis: Axis) -> Ranks:
        """Return the ranks of `axis` with a separate gloo process group, created at the first call (collective)."""
        if self._group is None and axis.size > 1:
            self._group = comm.new_group(list(axis.ranks), backend="gloo")
        return Ranks(axis, self._group)

    def start(self, saving: Saving, ranks: Ranks, finish: Callable[[], None]) -> None:
        """Copy the state and return; a thread then calls `place` and `write` of the save, and `finish`.

        Args:
            saving: save after its `begin`.
            ranks: result of `ranks`.
            finish: function that completes the save, such as by `commit`.
        """
        saving.entries = self._copied(saving.entries)
        saving.copy_small()
        saving.ranks = ranks
        self._thread = threading.Thread(target=self._run, args=(saving, finish), name="deepspeed-save", daemon=True)
        if not self._left:
            self._left = True
            atexit.register(self._at_exit, weakref.ref(self))
        self._thread.start()

    def _copied(self, entries: list[TensorToWrite]) -> list[TensorToWrite]:
        places, size = [], 0
        for entry in entries:
            places.append(size)
            size += -(-entry.nbytes // _ALIGN) * _ALIGN
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
            log_rank0(
                f"async_save: a host buffer of {size / 2**20:.0f} MiB on each rank holds the state while it is written"
            )
        copies = []
        numbered = zip(entries, places, strict=True)
        for hold, together in itertools.groupby(numbered, lambda pair: pair[0].hold):
            with hold() if hold is not None else nullcontext():
                for entry, position in together:
                    copy = self._buffer[position : position + entry.nbytes].view(entry.dtype)
                    copy.copy_(entry.values().detach().reshape(-1))
                    copies.append(replace(entry, values=lambda copy=copy: copy, hold=None))
        return copies

    def _run(self, saving: Saving, finish: Callable[[], None]) -> None:
        try:
            saving.place()
            saving.write()
            finish()
        except Exception as error:  # raised by the next save, load or the end
            self._failure = error

    def wait(self) -> None:
        """Wait for the pending save, if there is one.

        Raises:
            CheckpointError: the save failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"the last checkpoint was not saved: {failure}") from failure

    @staticmethod
    def _at_exit(reference: Any) -> None:
        background = reference()
        if background is not None:
            try:
                background.wait()
            except CheckpointError as error:
                logger.error("%s", error)
