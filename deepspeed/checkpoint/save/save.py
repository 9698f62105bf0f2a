"""Atomic checkpoint save: plan, write to a staging directory, add checksums, rename."""

from __future__ import annotations

import json
import pickle
import platform
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

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
from deepspeed.checkpoint.save.save_plan import Reports, SavePlan, take
from deepspeed.checkpoint.save.snapshot import Snapshot, fixed
from deepspeed.errors import CheckpointCorruptError, CheckpointError
from deepspeed.foundation.log import log_rank0, warn_once

_SMALL_FILES = 1 << 20  # bytes kept free for the files beside the tensors


@dataclass
class Contents:
    """What a checkpoint is to hold.

    Args:
        captured: this rank's part of the training state.
        state: small state of the run in plain values and tensors: counters, schedules, client state; rank 0's counts.
        about: JSON values for the manifest.
        beside: small files for readers of other formats, by name; rank 0's count.
        allow_pickle: objects without a place in JSON are pickled (`checkpoint.client_state_pickle`).
    """

    captured: Snapshot
    state: dict[str, Any]
    about: dict[str, Any]
    beside: dict[str, bytes] = field(default_factory=dict)
    allow_pickle: bool = False


@dataclass(frozen=True)
class Target:
    """Where a checkpoint goes.

    Args:
        folder: holds the tags.
        tag: a checked tag.
        leads: this rank makes the folders and the small files, on its node or everywhere.
        latest: the tag becomes what loading without a tag finds.
        tools: small scripts dropped beside the tags, by name.
        check_tag: what is done when ranks disagree on the tag: `Fail`, `Warn` or `Ignore`.
    """

    folder: Path
    tag: str
    leads: bool
    latest: bool = True
    tools: dict[str, bytes] = field(default_factory=dict)
    check_tag: str = "Warn"

    @property
    def staging(self) -> Path:
        """Where it is written."""
        return filesystem.staging_of(self.folder, self.tag)


class Saving:
    """One save, in the order `begin`, `write`, `commit`; all ranks call each of them together.

    Args:
        target: where to.
        contents: what.
        ranks: who.
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
        """Find what cannot be stored. All ranks call together.

        Raises:
            CheckpointError: something has no place in a checkpoint.
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
        """Agree on the tag, see that there is room and make the staging folder; nothing is lost if it fails.

        Raises:
            CheckpointError: the tags differ, or the disk is too full.
        """
        reports, host = self.contents.captured.reports, platform.node()
        need = file_bytes(self.entries) + _SMALL_FILES
        report = (self.target.tag, self.target.leads, host, need, reports)
        tags, leads, hosts, needs, self._reports = zip(*self.ranks.gather(report), strict=True)
        self._check_tags(tags)
        shared = sum(leads) == 1  # one disk for all ranks
        if not shared:  # every node writes the same small files, those of rank 0
            self._small, self.contents.beside = self.ranks.gather((self._small, self.contents.beside))[0]
        room = sum(n for n, where in zip(needs, hosts, strict=True) if shared or where == host)
        with self.ranks.together(f"making the folder of checkpoint '{self.target.tag}'"):
            if self.target.leads:
                self._make_staging(room)

    def _encode(self) -> list[TensorToWrite]:
        """Encode what is no part of the training state; gives this rank's own tensors."""
        captured, contents = self.contents.captured, self.contents
        tensors: list[torch.Tensor] = []
        private = Encoder(tensors).encode(captured.private, "this rank's state")
        self._metadata = {"rank": json.dumps(private)}
        aside: list[torch.Tensor] = []
        pickled: list[Any] | None = [] if contents.allow_pickle else None
        encoder = Encoder(aside, pickled)
        encoded = {key: encoder.encode(value, key) for key, value in contents.state.items()}
        self._small = {"json": encoded, "tensors": aside, "pickle": pickled}
        return [fixed(f"rank/{i}", tensor) for i, tensor in enumerate(tensors)]

    def copy_small(self) -> None:
        """Copy the tensors of the client's state, which may change while a thread writes."""
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
        recover(self.target.folder, self.target.tag)
        free = filesystem.current.free_bytes(self.target.folder)
        if free < need:
            raise CheckpointError(
                f"checkpoint '{self.target.tag}' needs {need / 2**20:.0f} MiB, and the disk of {self.target.folder} "
                f"has {free / 2**20:.0f} MiB free: nothing was written; make room or save elsewhere"
            )
        filesystem.current.make_folder(self.target.staging)

    def write(self) -> None:
        """Write this rank's tensors; they are on the disk when this returns."""
        with self.ranks.together(f"writing checkpoint '{self.target.tag}'"):
            name = rank_file(self.ranks.rank)
            self._seal = write_tensors(self.target.staging / name, self.entries, self._metadata)

    def commit(self, more: Callable[[Path, Manifest], dict[str, Seal]] | None = None) -> None:
        """Seal the checkpoint and give it its name.

        Args:
            more: writes further files into the folder, from those that are there; all ranks call it together.
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
        small = self._small_files()
        filesystem.write_files({staging / name: data for name, data in small.items()})
        seals |= {name: Seal(len(data), zlib.crc32(data)) for name, data in small.items()}
        if self._small["tensors"]:
            entries = [fixed(str(i), tensor) for i, tensor in enumerate(self._small["tensors"])]
            seals[STATE_TENSORS] = write_tensors(staging / STATE_TENSORS, entries, {})
        filesystem.write_files({staging / MANIFEST: manifest.to_bytes()})
        filesystem.current.sync_folder(staging)
        beside = {name: data for name, data in self.target.tools.items() if not (folder / name).exists()}
        if self.target.latest:
            beside[filesystem.LATEST] = f"{self.target.tag}\n".encode()
        filesystem.publish(folder, self.target.tag, beside)
        log_rank0(f"checkpoint '{self.target.tag}' is complete in {folder}")

    def _small_files(self) -> dict[str, bytes]:
        files = {STATE: json.dumps(self._small["json"], indent=1).encode(), **self.contents.beside}
        if self._small["pickle"]:
            files[STATE_PICKLE] = pickle.dumps(self._small["pickle"])
        return files


def recover(folder: Path, tag: str) -> None:
    """Finish or undo what an interrupted save of `tag` left behind.

    Args:
        folder: holds the tags.
        tag: a checked tag.
    """
    final, staging, old = folder / tag, filesystem.staging_of(folder, tag), filesystem.replaced_of(folder, tag)
    if not final.exists() and staging.exists() and _is_complete(staging):
        filesystem.current.rename(staging, final)
    if not final.exists() and old.exists():
        filesystem.current.rename(old, final)
    for left in (staging, old):
        if left.exists():
            filesystem.current.remove(left)


def _is_complete(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except CheckpointCorruptError:
        return False
    return True
