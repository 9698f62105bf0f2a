"""Folders of safetensors as Hugging Face writes them: read in place, range by range."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from deepspeed.checkpoint import restore
from deepspeed.checkpoint.manifest import FROZEN, Manifest, Row
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.source import Source, Wanted, byte_range, clear_padding, runs
from deepspeed.checkpoint.tensorfile import Range, TensorFile, read_all
from deepspeed.errors import CheckpointCorruptError, CheckpointMissingError
from deepspeed.foundation.log import say
from deepspeed.zero.boxes import copies
from deepspeed.zero.param import is_managed
from deepspeed.zero.shard_group import ShardGroup
from deepspeed.zero.state_view import StateView

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class FolderSource(Source):
    """The tensors of one or several safetensors files.

    Args:
        path: a file, or a folder with `model.safetensors` or its index.
        ranks: who reads together; every rank reads for itself.
    """

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self._ranks = ranks
        self._file_of: dict[str, Path] = {}
        rows = []
        for file in _files(path):
            with TensorFile(file) as opened:
                for name, stored in opened.entries.items():
                    self._file_of[name] = file
                    rows.append(Row(name, stored.shape, stored.dtype, FROZEN))
        super().__init__(path, Manifest(rows, [], [], {}, {}))

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Read elements into tensors, converting on the way."""
        with self._ranks.together(f"reading {self.path}"):
            by_file: dict[Path, list[Wanted]] = {}
            for one in wanted:
                by_file.setdefault(self._file_of[one.row.name], []).append(one)
            for path, some in by_file.items():
                with TensorFile(path) as file:
                    read_all({file: [range_ for one in some for range_ in _ranges(file, one)]})

    def most(self, count: int) -> int:
        """The largest count of any rank."""
        return max(self._ranks.gather(count))


def _ranges(file: TensorFile, one: Wanted) -> Iterator[Range]:
    stored = file.find(one.row.name)
    clear_padding(one)
    for copy in copies(one.row.everything, one.range):
        for start, distance, place in runs(copy, one.into):
            yield byte_range(stored, start, distance, place)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        named = set(json.loads((path / INDEX).read_text())["weight_map"].values())
        if any(Path(name).name != name for name in named):
            raise CheckpointCorruptError(f"{path / INDEX} names files outside of its folder")
        return [path / name for name in sorted(named)]
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    raise CheckpointMissingError(f"{path} has neither {WEIGHTS} nor {INDEX}")


def load_pretrained(module: nn.Module, path: str | Path, strict: bool = True) -> int:
    """Stream weights into a model, sharded by `zero.Init` or plain; every rank reads what it holds and no more.

    Args:
        module: the model; all ranks call together.
        path: a folder as `save_pretrained` writes it, or a safetensors file.
        strict: names must be the same on both sides.

    Returns:
        Elements loaded.

    Raises:
        CheckpointMissingError: there are no weights.
        CheckpointError: names or shapes differ.
    """
    managed: dict[str, Any] = {name: param for name, param in module.named_parameters() if is_managed(param)}
    for name, param in managed.items():
        param._ds_member.name = name  # it was born with the name it had in a part of the module
    groups: list[ShardGroup] = list({id(p._ds_member.group): p._ds_member.group for p in managed.values()}.values())
    axis = groups[0].axis if groups else None
    view, source = StateView(module, groups, axis, None, None), FolderSource(Path(path), Ranks(axis))
    rows, found = restore.compare(view, source, strict)
    restore.load_values(view, source, rows)
    say(f"loaded {found.elements:,} of {found.total:,} elements from {path}")
    return found.elements
