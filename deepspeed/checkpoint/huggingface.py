"""Reader of Hugging Face folders of safetensors, and writer of such folders and of `torch.save` state dicts."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from deepspeed.checkpoint.format.manifest import FROZEN, Manifest, ManifestEntry
from deepspeed.checkpoint.format.safetensors_file import Range, TensorFile, read_all
from deepspeed.checkpoint.load import load
from deepspeed.checkpoint.load.reader import ReadRequest, Source, byte_range, runs
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.errors import ArgumentError, CheckpointCorruptError, CheckpointMissingError
from deepspeed.foundation.log import log_rank0
from deepspeed.zero.api.state_view import StateView
from deepspeed.zero.layout.regions import copies
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.shard_group import ShardGroup

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class FolderSource(Source):
    """Source of the tensors in a safetensors file, or in a folder with `model.safetensors` or an index.

    Args:
        path: the file or folder.
        ranks: ranks that read together.

    Raises:
        CheckpointMissingError: the folder has no weights.
        CheckpointCorruptError: the index names files of other folders, or a file's header cannot be read.
    """

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self._ranks = ranks
        self._file_of: dict[str, Path] = {}
        rows = []
        for file in self._files(path):
            with TensorFile(file) as opened:
                for name, stored in opened.entries.items():
                    self._file_of[name] = file
                    rows.append(ManifestEntry(name, stored.shape, stored.dtype, FROZEN))
        super().__init__(path, Manifest(rows, [], [], {}, {}))

    def read(self, wanted: Iterable[ReadRequest]) -> None:
        """Read elements into their destinations, with conversion of dtypes. Collective."""
        with self._ranks.together(f"reading {self.path}"):
            by_file: dict[Path, list[ReadRequest]] = {}
            for request in wanted:
                by_file.setdefault(self._file_of[request.row.name], []).append(request)
            for path, some in by_file.items():
                with TensorFile(path) as file:
                    read_all({file: [range_ for request in some for range_ in self._ranges(file, request)]})

    def most(self, count: int) -> int:
        return max(self._ranks.gather(count))

    @staticmethod
    def _ranges(file: TensorFile, request: ReadRequest) -> Iterator[Range]:
        stored = file.find(request.row.name)
        request.clear_padding()
        for copy in copies(request.row.everything, request.range):
            for start, distance, place in runs(copy, request.into):
                yield byte_range(stored, start, distance, place)

    @staticmethod
    def _files(path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        if (path / INDEX).is_file():
            try:
                named = set(json.loads((path / INDEX).read_text())["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointCorruptError(f"{path / INDEX} is no index of files: {error!r}") from error
            if any(Path(name).name != name for name in named):
                raise CheckpointCorruptError(f"{path / INDEX} names files outside of its folder")
            return [path / name for name in sorted(named)]
        if (path / WEIGHTS).is_file():
            return [path / WEIGHTS]
        raise CheckpointMissingError(f"{path} has neither {WEIGHTS} nor {INDEX}")


def load_pretrained(module: nn.Module, path: str | Path, strict: bool = True) -> int:
    """Load weights into a model, in place. Collective.

    Args:
        module: the model, plain or sharded by `zero.Init`.
        path: a folder written by `save_pretrained`, or a safetensors file.
        strict: require equal names in the model and the file; False: load the names that both have.

    Returns:
        The number of loaded elements.

    Raises:
        CheckpointMissingError: the path has no weights.
        CheckpointError: names (if `strict`) or shapes differ.
    """
    managed: dict[str, Any] = {name: param for name, param in module.named_parameters() if is_managed(param)}
    for name, param in managed.items():
        param._ds_member.name = name  # it was born with the name it had in a part of the module
    groups: list[ShardGroup] = list({id(p._ds_member.group): p._ds_member.group for p in managed.values()}.values())
    axis = groups[0].axis if groups else None
    view, source = StateView(module, groups, axis, None, None), FolderSource(Path(path), Ranks(axis))
    rows, loaded = load.compare(view, source, strict)
    load.load_values(view, source, rows)
    log_rank0(f"loaded {loaded.elements:,} of {loaded.total:,} elements from {path}")
    return loaded.elements


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def once(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with each tensor under its first name only, because safetensors files have no aliases."""
    seen: dict[int, str] = {}
    for name, tensor in state.items():
        seen.setdefault(id(tensor), name)
    return {name: tensor for name, tensor in state.items() if seen[id(tensor)] == name}


def bytes_of(size: str | int | None) -> float:
    """Return a size such as "5GB" or "200MiB" in bytes; None: infinity. ArgumentError for other text."""
    if size is None:
        return math.inf
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", str(size))
    if match is None or match.group(2).upper() not in _UNITS:
        raise ArgumentError(f"max_shard_size is {size!r}; write it as '5GB', '200MB' or a number of bytes")
    return float(match.group(1)) * _UNITS[match.group(2).upper()]


def write_sharded(state: Mapping[str, Any], folder: Path, max_shard_size: str | int | None, safe: bool) -> list[Path]:
    """Write tensors to one file, or to several with an index, named as in Hugging Face libraries.

    Args:
        state: tensors by name, or lazy ones (`GatheredTensor`), of which one file at a time is in memory.
        folder: folder for the files; created if missing.
        max_shard_size: maximum size of a file, such as "5GB"; None: one file.
        safe: write safetensors (tied tensors only under their first name) instead of `torch.save` files.

    Returns:
        Paths of the files, without the index.

    Raises:
        ArgumentError: `max_shard_size` is not a size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    limit = bytes_of(max_shard_size)
    listed = once(state) if safe else dict(state)
    shards: list[list[str]] = []
    filled, total, seen = 0, 0, set()
    for name, tensor in listed.items():
        size = 0 if id(tensor) in seen else math.prod(tensor.shape) * tensor.dtype.itemsize
        seen.add(id(tensor))
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled, total = filled + size, total + size
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    written, weight_map = [], {}
    for number, names in enumerate(shards, 1):
        file = f"{stem}.{suffix}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}"
        real: dict[int, torch.Tensor] = {id(listed[name]): listed[name].contiguous() for name in names}
        tensors = OrderedDict((name, real[id(listed[name])]) for name in names)
        if safe:
            save_file(tensors, folder / file, {"format": "pt"})
        else:
            torch.save(tensors, folder / file)
        written.append(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return written
