"""Which old checkpoints are removed once a new one is complete: none, unless the configuration says so."""

from __future__ import annotations

from pathlib import Path

from deepspeed.checkpoint import files
from deepspeed.checkpoint.manifest import check_files, read_manifest
from deepspeed.errors import CheckpointCorruptError
from deepspeed.foundation.log import say


def prune(folder: Path, newest: str, keep_last: int, keep_every: int | None) -> None:
    """Remove complete native checkpoints beyond the newest ones; nothing else in the folder is touched.

    Args:
        folder: holds the tags.
        newest: the tag that was just saved; always kept.
        keep_last: how many are kept (`checkpoint.keep_last`).
        keep_every: those whose step is a multiple stay too (`checkpoint.keep_every`).
    """
    found = []
    for entry in folder.iterdir():
        if entry.name == newest or entry.name.startswith(".") or not entry.is_dir() or entry.is_symlink():
            continue
        try:
            manifest = read_manifest(entry)
            check_files(entry, manifest)
        except CheckpointCorruptError:
            continue
        found.append((manifest.about["saved_at"], manifest.about.get("global_steps", 0), entry))
    for _, step, entry in sorted(found, reverse=True)[keep_last - 1 :]:
        if keep_every is None or step % keep_every:
            # A half-removed checkpoint must not look like one.
            hidden = files.replaced_of(folder, entry.name)
            files.current.rename(entry, hidden)
            files.current.remove(hidden)
            say(f"checkpoint '{entry.name}' is removed (checkpoint.keep_last: {keep_last})")
