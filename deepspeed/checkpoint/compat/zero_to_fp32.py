"""Consolidation of a sharded checkpoint into full fp32 weights, without an engine."""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.compat.upstream_read import open_foreign
from deepspeed.checkpoint.format import filesystem
from deepspeed.checkpoint.format.manifest import FROZEN, LEFT_OUT, MANIFEST, ManifestEntry
from deepspeed.checkpoint.huggingface import write_sharded
from deepspeed.checkpoint.load.directory import Finder, read_latest
from deepspeed.checkpoint.load.reader import Source
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.errors import CheckpointMissingError
from deepspeed.foundation.log import log_rank0


def open_source(folder: str | Path, tag: str | None = None) -> Source:
    """Open a checkpoint for reading in this process only.

    Args:
        folder: folder that contains the tags, or the folder of one tag.
        tag: name of the tag; None: the tag in `latest`, else the newest complete one.

    Raises:
        CheckpointMissingError: there is no checkpoint.
        CheckpointCorruptError: the checkpoint is not complete.
    """
    path = Path(folder)
    if tag is None and ((path / MANIFEST).exists() or any(path.glob("*_model_states.pt"))):
        path, tag = path.absolute().parent, path.absolute().name
    finder = Finder(path, Ranks())
    tag = tag or read_latest(path, filesystem.LATEST)
    if tag is not None:
        source = finder.named(filesystem.checked_tag(tag))
        return source if isinstance(source, Source) else open_foreign(source)
    newest = finder.newest(set())
    if newest is None:
        raise CheckpointMissingError(
            f"Unable to find 'latest' file at {path / filesystem.LATEST}, or any checkpoint there"
        )
    return newest


def rows_of(source: Source, exclude_frozen: bool) -> Iterator[ManifestEntry]:
    """Yield the manifest rows of tensors with stored values; `exclude_frozen`: without frozen parameters."""
    for row in source.manifest.rows:
        if row.kind != LEFT_OUT and not (exclude_frozen and row.kind == FROZEN):
            yield row


def in_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Convert a floating-point tensor to a dtype (None: no conversion); other tensors are returned unchanged."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


class GatheredTensor:
    """Lazy tensor of a checkpoint, with `shape` and `dtype`; each call of `contiguous()` reads and returns the values.

    Args:
        source: the checkpoint.
        row: manifest row of the tensor.
        dtype: dtype of the result, if the stored dtype is floating-point.
    """

    def __init__(self, source: Source, row: ManifestEntry, dtype: torch.dtype) -> None:
        self._source, self._row = source, row
        self.shape = torch.Size(row.shape)
        self.dtype = dtype if row.dtype.is_floating_point else row.dtype

    def contiguous(self) -> torch.Tensor:
        return in_dtype(self._source.whole(self._row.name), self.dtype)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> OrderedDict[str, Any]:
    """Return the full weights and buffers of a checkpoint on the CPU, floating-point tensors in fp32.

    Args:
        checkpoint_dir: folder that contains the tags, or the folder of one tag.
        tag: name of the tag; None: the tag in `latest`, else the newest complete one.
        exclude_frozen_parameters: leave out parameters that did not require a gradient.
        lazy_mode: return `GatheredTensor` objects, which read their tensor at the call of `contiguous()`.

    Returns:
        Tensors by name; tied parameters under each of their names.

    Raises:
        CheckpointMissingError: there is no checkpoint.
        CheckpointCorruptError: a file is missing or differs from its checksum.
    """
    return _state_dict(open_source(checkpoint_dir, tag), torch.float32, exclude_frozen_parameters, lazy_mode)


def _state_dict(source: Source, dtype: torch.dtype, exclude_frozen: bool, lazy: bool) -> OrderedDict[str, Any]:
    state_dict: OrderedDict[str, Any] = OrderedDict()
    for row in rows_of(source, exclude_frozen):
        tensor = GatheredTensor(source, row, dtype)
        state_dict[row.name] = tensor if lazy else tensor.contiguous()
    for alias, name in source.manifest.aliases.items():
        if name in state_dict:
            state_dict[alias] = state_dict[name]
    return state_dict


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the full weights of a checkpoint to files for torch or Hugging Face libraries.

    Args:
        checkpoint_dir: folder that contains the tags, or the folder of one tag.
        output_dir: folder for the files; created if missing.
        max_shard_size: maximum size of a file, such as "5GB"; None: one file.
        safe_serialization: write safetensors instead of `torch.save` files.
        tag: name of the tag; None: the tag in `latest`, else the newest complete one.
        exclude_frozen_parameters: leave out parameters that did not require a gradient.
        dtype: dtype of the written floating-point tensors.

    Raises:
        CheckpointMissingError: there is no checkpoint.
        CheckpointCorruptError: a file is missing or differs from its checksum.
        ArgumentError: `max_shard_size` is not a size.
    """
    state = _state_dict(open_source(checkpoint_dir, tag), dtype, exclude_frozen_parameters, lazy=True)
    write_sharded(state, Path(output_dir), max_shard_size, safe_serialization)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the full weights of a checkpoint in fp32; arguments as in `convert_zero_checkpoint_to_state_dict`."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load the full weights of a checkpoint into a model that is not sharded, on the CPU.

    Args:
        model: the model, which is moved to the CPU; names that only the model or only the checkpoint has are ignored.
        checkpoint_dir: folder that contains the tags, or the folder of one tag.
        tag: name of the tag; None: the tag in `latest`, else the newest complete one.

    Returns:
        The model.

    Raises:
        CheckpointMissingError: there is no checkpoint.
        CheckpointCorruptError: a file is missing or differs from its checksum.
        RuntimeError: a shape differs.
    """
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """Return the path of rank 0's model states in upstream's layout.

    Args:
        checkpoint_dir: folder of one tag.
        zero_stage: ZeRO stage of the training run; stage 3 has another file name.

    Raises:
        CheckpointMissingError: the file does not exist.
    """
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if int(zero_stage) == 3 else "mp_rank_00_model_states.pt"
    path = Path(checkpoint_dir) / name
    if not path.exists():
        raise CheckpointMissingError(f"can't find model states file at '{path}'")
    return str(path)


def get_checkpoint_files(checkpoint_dir: str | Path, glob_pattern: str) -> list[str]:
    """Return the paths of files in a folder that match a pattern, sorted with numbers in numerical order.

    Args:
        checkpoint_dir: folder of one tag.
        glob_pattern: pattern, such as "*_optim_states.pt".

    Raises:
        CheckpointMissingError: no file matches.
    """
    paths = [str(path) for path in Path(checkpoint_dir).glob(glob_pattern)]
    if not paths:
        raise CheckpointMissingError(f"can't find {glob_pattern} files in directory '{checkpoint_dir}'")
    return sorted(paths, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)])


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """Return the paths of the optimizer states in a tag's folder; CheckpointMissingError if there are none."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str | Path) -> list[str]:
    """Return the paths of the model states in a tag's folder; CheckpointMissingError if there are none."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def main(arguments: list[str] | None = None) -> None:
    """Run `python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR`; `arguments` None: `sys.argv`."""
    parser = argparse.ArgumentParser(description="Write the fp32 weights of a checkpoint into plain files.")
    parser.add_argument("checkpoint_dir", help="folder of checkpoints, or of one tag")
    parser.add_argument("output_dir", help="folder for the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint; default: the latest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="list the tensors")
    options = parser.parse_args(arguments)
    convert_zero_checkpoint_to_fp32_state_dict(
        options.checkpoint_dir,
        options.output_dir,
        options.max_shard_size,
        options.safe_serialization,
        options.tag,
        options.exclude_frozen_parameters,
    )
    if options.debug:
        for name, tensor in get_fp32_state_dict_from_zero_checkpoint(
            options.checkpoint_dir, options.tag, options.exclude_frozen_parameters, lazy_mode=True
        ).items():
            log_rank0(f"{name}: {tuple(tensor.shape)} {tensor.dtype}")
