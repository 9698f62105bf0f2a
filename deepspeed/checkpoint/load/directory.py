"""Lookup of the checkpoint to load, and removal of old checkpoints (`checkpoint.keep_last`)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

from deepspeed.checkpoint.format import filesystem
from deepspeed.checkpoint.format.manifest import MANIFEST, Manifest, check_files, read_manifest
from deepspeed.checkpoint.load.reader import NativeSource, Source, missing
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.errors import CheckpointCorruptError, CheckpointError, CheckpointMissingError
from deepspeed.foundation.log import log_rank0, logger


@dataclass(frozen=True)
class CheckpointStatus:
    """Status of a tag's checkpoint on the disk of one rank.

    Args:
        kind: `native`, or `foreign` for upstream's layout; "": nothing that can be loaded.
        problem: reason why nothing can be loaded; "": none.
        saved_at: time of a native save, in ns since 1970.
        crc32: CRC-32 of the manifest file of a native save.
        absent: files of the manifest that are missing or have another length.
    """

    kind: str = ""
    problem: str = ""
    saved_at: int = 0
    crc32: int = 0
    absent: frozenset[str] = frozenset()


def place_of(folder: Path, tag: str) -> Path:
    """Return the folder of a tag or, if an interrupted save left only a complete hidden folder, the hidden folder."""
    final = folder / tag
    if not final.exists():
        for other in (filesystem.staging_of(folder, tag), filesystem.replaced_of(folder, tag)):
            if (other / MANIFEST).exists():
                return other
    return final


def look(folder: Path, tag: str) -> CheckpointStatus:
    """Return the status of a tag's checkpoint on this rank's disk; only the manifest's checksum is verified."""
    path = place_of(folder, tag)
    if not path.is_dir():
        return CheckpointStatus(problem=f"there is no folder {path}")
    if not (path / MANIFEST).exists() and is_foreign(path):
        return CheckpointStatus("foreign")
    try:
        manifest = read_manifest(path)
    except CheckpointCorruptError as error:
        return CheckpointStatus(problem=str(error))
    absent = set()
    for name, seal in manifest.files.items():
        try:
            if (path / name).stat().st_size != seal.nbytes:
                absent.add(name)
        except OSError:
            absent.add(name)
    crc32 = zlib.crc32((path / MANIFEST).read_bytes())
    return CheckpointStatus("native", "", manifest.about["saved_at"], crc32, frozenset(absent))


def is_foreign(path: Path) -> bool:
    """Whether the folder of a tag has a checkpoint in upstream DeepSpeed's layout, universal format included."""
    if any(path.glob("rank-*.safetensors")):
        return False  # a native one that has lost its manifest; the small files beside it hold no weights
    return any(path.glob("*_model_states.pt")) or (path / "zero").is_dir()


def tags_of(folder: Path) -> list[str]:
    """Return the sorted tags in a folder, including those of interrupted saves; empty if the folder does not exist."""
    if not folder.is_dir():
        return []
    tags = {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    hidden = {filesystem.tag_under_way(entry.name) for entry in folder.iterdir() if entry.is_dir()}
    return sorted(tags | {tag for tag in hidden if tag})


def read_latest(folder: Path, name: str) -> str | None:
    """Return the tag in the file `name` (such as `latest`); None without a file or a valid tag."""
    try:
        return filesystem.checked_tag((folder / name).read_text().strip())
    except (OSError, UnicodeDecodeError, CheckpointError):
        return None


class Finder:
    """Lookup of a checkpoint by all ranks; `named`, `latest` and `newest` are collective and return equal results.

    Args:
        folder: folder that contains the tags.
        ranks: ranks that load together; their disks may differ.
        allow_pickle: allow unpickling of client state (`checkpoint.client_state_pickle`).
    """

    def __init__(self, folder: Path, ranks: Ranks, allow_pickle: bool = False) -> None:
        self.folder, self.ranks, self._allow_pickle = folder, ranks, allow_pickle
        self.skipped: dict[str, str] = {}

    def named(self, tag: str) -> Source | Path:
        """Return the checkpoint of a tag, or the folder of the tag if the checkpoint is in upstream's layout.

        Raises:
            CheckpointMissingError: there is no such tag, or no rank can read one of its files.
            CheckpointCorruptError: the manifest cannot be read, or only some ranks have upstream's layout.
        """
        return self._open(tag, self.ranks.gather(look(self.folder, tag)))

    def latest(self, name: str = filesystem.LATEST) -> str | None:
        """Return the tag in the file `name` of the first rank that has one; None if no rank has one."""
        return next((tag for tag in self.ranks.gather(read_latest(self.folder, name)) if tag), None)

    def newest(self, without: set[str]) -> Source | None:
        """Return the newest complete native checkpoint, or None; incomplete ones are logged and skipped.

        Args:
            without: tags to ignore.
        """
        local_statuses = {tag: look(self.folder, tag) for tag in tags_of(self.folder) if tag not in without}
        statuses_by_rank = self.ranks.gather(local_statuses)
        tags = {
            tag
            for statuses in statuses_by_rank
            for tag, seen in statuses.items()
            if seen.kind == "native" or seen.problem
        }
        views = {
            tag: [statuses.get(tag, CheckpointStatus(problem="not there")) for statuses in statuses_by_rank]
            for tag in tags
        }
        for tag in sorted(tags, key=lambda t: -max(seen.saved_at for seen in views[t])):
            try:
                source = self._open(tag, views[tag])
            except CheckpointError as error:
                self.skip(tag, str(error))
                continue
            if isinstance(source, Source):
                return source
        return None

    def skip(self, tag: str, why: str) -> None:
        """Record in `skipped`, and log, that the checkpoint of a tag is not used, with the reason `why`."""
        self.skipped[tag] = why
        if self.ranks.rank == 0:
            logger.warning("checkpoint '%s' is skipped: %s", tag, why)

    def _open(self, tag: str, seen: list[CheckpointStatus]) -> Source | Path:
        path = place_of(self.folder, tag)
        native = [status for status in seen if status.kind == "native"]
        if not native:
            if all(status.kind == "foreign" for status in seen):
                return path
            problem = next(status.problem for status in seen if status.problem)
            absent = all(status.problem.startswith("there is no folder") for status in seen)
            raise (CheckpointMissingError if absent else CheckpointCorruptError)(problem)
        chosen = max(native, key=lambda status: (status.saved_at, status.crc32))
        fits = [status.kind == "native" and status.crc32 == chosen.crc32 for status in seen]
        data = (path / MANIFEST).read_bytes() if fits[self.ranks.rank] else b""
        if not all(fits):
            data = self.ranks.gather(data)[fits.index(True)]
        manifest = Manifest.from_bytes(data, path)
        every = set(manifest.files)
        views = [every - status.absent if fit else set() for status, fit in zip(seen, fits, strict=True)]
        absent = sorted(every - set().union(*views))
        if absent:
            raise missing(manifest, absent, path)
        return NativeSource(path, manifest, self.ranks, views, self._allow_pickle)


def prune(folder: Path, newest: str, keep_last: int, keep_every: int | None) -> None:
    """Remove old complete native checkpoints; incomplete ones and other files are not removed.

    Args:
        folder: folder that contains the tags.
        newest: tag of the checkpoint just saved, which is always kept.
        keep_last: number of newest checkpoints to keep, `newest` included.
        keep_every: checkpoints with a step that is a multiple of this number are also kept; None: no others.
    """
    checkpoints = []
    for entry in folder.iterdir():
        if entry.name == newest or entry.name.startswith(".") or not entry.is_dir() or entry.is_symlink():
            continue
        try:
            manifest = read_manifest(entry)
            check_files(entry, manifest)
        except CheckpointCorruptError:
            continue
        checkpoints.append((manifest.about["saved_at"], manifest.about.get("global_steps", 0), entry))
    for _, step, entry in sorted(checkpoints, reverse=True)[keep_last - 1 :]:
        if keep_every is None or step % keep_every:
            # A half-removed checkpoint must not look like one.
            hidden = filesystem.replaced_of(folder, entry.name)
            filesystem.current.rename(entry, hidden)
            filesystem.current.remove(hidden)
            log_rank0(f"checkpoint '{entry.name}' is removed (checkpoint.keep_last: {keep_last})")
