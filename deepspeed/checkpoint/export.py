"""Weights as plain files: a Hugging Face folder of safetensors, or a state dict that `torch.load` opens."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deepspeed.errors import ArgumentError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def once(state: Mapping[str, Any]) -> dict[str, Any]:
    """Every tensor under its first name: safetensors files hold no aliases, and loaders tie them again."""
    seen: dict[int, str] = {}
    for name, one in state.items():
        seen.setdefault(id(one), name)
    return {name: one for name, one in state.items() if seen[id(one)] == name}


def bytes_of(size: str | int | None) -> float:
    """A size such as "5GB" as a number; None is no limit."""
    if size is None:
        return math.inf
    found = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", str(size))
    if found is None or found.group(2).upper() not in _UNITS:
        raise ArgumentError(f"max_shard_size is {size!r}; write it as '5GB', '200MB' or a number of bytes")
    return float(found.group(1)) * _UNITS[found.group(2).upper()]


def _numel_bytes(one: Any) -> int:
    return torch.Size(one.shape).numel() * one.dtype.itemsize


def write_sharded(state: Mapping[str, Any], folder: Path, max_shard_size: str | int | None, safe: bool) -> list[Path]:
    """Write tensors into one file, or several with an index, as Hugging Face libraries name them.

    Args:
        state: tensors by name, or objects with `shape`, `dtype` and `contiguous()`; one shard is in memory at a time.
        folder: made if it is not there.
        max_shard_size: largest file.
        safe: safetensors (without aliases) instead of `torch.save`.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    limit = bytes_of(max_shard_size)
    listed = once(state) if safe else dict(state)
    shards: list[list[str]] = []
    filled, total, seen = math.inf, 0, set()
    for name, one in listed.items():
        size = 0 if id(one) in seen else _numel_bytes(one)
        seen.add(id(one))
        if filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled, total = filled + size, total + size
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    written, weight_map = [], {}
    for number, names in enumerate(shards, 1):
        file = f"{stem}.{suffix}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}"
        real: dict[int, torch.Tensor] = {id(listed[name]): listed[name].contiguous() for name in names}
        made = OrderedDict((name, real[id(listed[name])]) for name in names)
        if safe:
            save_file(made, folder / file, {"format": "pt"})
        else:
            torch.save(made, folder / file)
        written.append(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return written
