"""Loader of the weights that the key `checkpoint` of `init_inference` names."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from deepspeed.checkpoint.compat.upstream_read import load_pt
from deepspeed.checkpoint.compat.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.checkpoint.huggingface import write_sharded
from deepspeed.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMissingError,
    NotAvailableError,
)
from deepspeed.foundation.log import log_rank0
from deepspeed.inference.quantization.compressed_tensors import unpacked_from

SAVED = "ds_inference_config.json"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_SHARD = re.compile(r"(.+-)(\d{5})(-of-)(\d{5})(\.safetensors|\.bin)")  # of several files, whose index may be lost
# Parts of names by wrappers: torch.compile, FSDP, activation checkpointing; and DDP's, at the beginning.
_WRAPPERS, _OUTERMOST = re.compile(r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\."), "module."
Named = Iterator[tuple[str, torch.Tensor]]  # the tensors have no other owner
_BYTES_PER_READ = 1 << 26
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def load_checkpoint(
    module: nn.Module, checkpoint: Any, base_dir: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Load weights into a model, in place. The model may be on the meta device.

    Args:
        checkpoint: a folder written by Transformers, by a training run, or by an export of `compression` (packed
            integers); a file or a list of files; or a description: a dict, or the path of its JSON file, with the key
            `checkpoints`, a list of files or a folder.
        base_dir: base of relative paths; "": the working directory, or the folder of a JSON description.
        dtype: dtype of floating-point parameters; buffers keep the dtype of the files.
        device: device of the loaded tensors.

    Raises:
        CheckpointError: a parameter is missing, a shape differs, or a file contains other objects than tensors.
        CheckpointMissingError: a file does not exist; also a CheckpointError.
        ArgumentError: a description without the key `checkpoints`.
        NotAvailableError: the files contain slices of single ranks, or an unsupported packed format.
    """
    tensors = unpacked_from(module, _tensors(checkpoint, Path(base_dir or ".")), dtype, device)
    left, strange, untied = _fill(module, tensors, dtype, device)
    tie = getattr(module, "tie_weights", None)
    if callable(tie) and not untied:
        tie()
    elif untied:
        text = "checkpoint: {} of the model is tied by its config, but has another value there: it stays untied"
        log_rank0(text.format(", ".join(untied)), logging.WARNING)
    filled = {id(p) for n, p in module.named_parameters(remove_duplicate=False) if n not in left}
    lost = [n for n, p in module.named_parameters() if n in left and id(p) not in filled]
    if lost:
        raise CheckpointError(f"checkpoint: {len(lost)} parameters are not in it, such as {lost[:3]}")
    persistent = {
        f"{name}.{kind}".removeprefix(".")
        for name, owner in module.named_modules()
        for kind, buffer in owner._buffers.items()
        if buffer is not None and kind not in owner._non_persistent_buffers_set
    }
    _log_names(module, "unexpected", strange, "{} tensors in it that the model has no place for are left out")
    _log_names(
        module, "missing", sorted(left & persistent), "{} buffers of the model are not in it and stay as they are"
    )
    restore_buffers(module, device)


def _log_names(module: Any, kind: str, names: list[str], text: str) -> None:
    """Log names that are only in the model or only in the files, except those that the model's class ignores.

    Args:
        kind: "missing" or "unexpected", as in the attributes `_keys_to_ignore_on_load_missing` and `…_unexpected`.
        text: message with {} for the number of names.
    """
    patterns = getattr(module, f"_keys_to_ignore_on_load_{kind}", None) or ()
    logged = [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]
    if logged:
        log_rank0(f"checkpoint: {text.format(len(logged))}, such as {logged[:3]}", logging.WARNING)


def _tensors(checkpoint: Any, base: Path) -> Named:
    if isinstance(checkpoint, list | tuple):
        return _of_files([base / name for name in checkpoint])
    if isinstance(checkpoint, Mapping):
        return _described(checkpoint, base)
    path = base / str(checkpoint)
    if path.is_dir():
        return _of_folder(path)
    if not path.is_file():
        raise CheckpointMissingError(f"checkpoint: there is no {path}")
    if path.suffix != ".json":
        return _of_files([path])
    try:
        described = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"checkpoint: {path} is not valid JSON: {error}") from None
    if isinstance(described, list):
        described = {"checkpoints": described}
    return _described(described, base if base != Path(".") else path.parent)


def _described(description: Mapping[str, Any], base: Path) -> Named:
    if "checkpoints" not in description:
        keys = sorted(description)
        raise ArgumentError(f"checkpoint: 'checkpoints' is missing: a list of files, or a folder; found {keys}")
    base = base / str(description.get("base_dir") or "")
    sizes = {key: description[key] for key in ("tp_size", "mp_size") if isinstance(description.get(key), int)}
    files = description["checkpoints"]
    megatron = str(description.get("type", "")).lower() == "megatron" and isinstance(files, list) and len(files) > 1
    if any(size > 1 for size in sizes.values()) or isinstance(files, Mapping) or megatron:
        raise NotAvailableError(
            f"checkpoint: type {description.get('type')!r} of {sizes or 'several files'} holds slices of ranks; "
            f"joining them is not available yet: give files of whole tensors"
        )
    if isinstance(files, str):
        return _tensors(files, base)
    return _of_files([base / name for name in files])


def _of_folder(folder: Path) -> Named:
    config_file = folder / "config.json"
    try:
        config = json.loads(config_file.read_text())
    except (OSError, ValueError):  # a folder of weights only
        config = None
    section = config.get("quantization_config") if isinstance(config, Mapping) else None
    if isinstance(section, Mapping) and section.get("transform_config"):  # transforms of matrices and inputs
        raise NotAvailableError(
            f"checkpoint: {config_file} names a transform_config: its weights mean nothing without those "
            "transforms, which are not made here; give a folder that was quantized without them"
        )
    for index in _INDEXES:
        if (folder / index).is_file():
            try:
                names = sorted(set(json.loads((folder / index).read_text())["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"checkpoint: {folder / index} is no index of files: {error}") from None
            if any(Path(name).name != name for name in names):
                raise CheckpointError(f"checkpoint: {folder / index} names files outside of its folder")
            return _of_files([folder / name for name in names])
    for whole in _WHOLE:
        if (folder / whole).is_file():
            return _of_files([folder / whole])
    if shards := _shards(folder):
        return _of_files(shards)
    if (folder / SAVED).is_file():
        return _tensors(str(folder / SAVED), Path("."))
    state = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    return ((name, lazy.contiguous().clone()) for name, lazy in state.items())


def _shards(folder: Path) -> list[Path]:
    """Return all files of a model in several files, from the name of the first one; [] if there is none."""
    for path in sorted(folder.iterdir()):
        parts = _SHARD.fullmatch(path.name)
        if parts is not None:
            return [folder / f"{parts[1]}{n + 1:05}{parts[3]}{parts[4]}{parts[5]}" for n in range(int(parts[4]))]
    return []


def _of_files(paths: list[Path]) -> Named:
    for path in paths:
        if not path.is_file():
            raise CheckpointMissingError(f"checkpoint: there is no file {path}")
    for path in paths:
        if path.suffix == ".gguf":
            raise NotAvailableError(
                f"checkpoint: {path} is a GGUF file: deepspeed.inference.gguf_files.load_gguf loads it"
            )
        if path.suffix == ".safetensors":
            yield from _of_safetensors(path)
        else:
            loaded = load_pt(path)
            if not isinstance(loaded, Mapping):
                raise CheckpointError(f"checkpoint: {path} holds a {type(loaded).__name__}, not tensors by name")
            for key in ("module", "model", "state_dict"):
                loaded = loaded[key] if isinstance(loaded.get(key), Mapping) else loaded
            yield from ((n, t.clone()) for n, t in loaded.items() if isinstance(t, torch.Tensor))


def _of_safetensors(path: Path) -> Named:
    """Yield (name, tensor) of a safetensors file, read without mmap to save memory; CheckpointError if unreadable."""
    try:
        with safe_open(str(path), framework="pt"):  # checks the header and the size
            pass
    except SafetensorError as error:
        raise CheckpointCorruptError(f"checkpoint: {path} cannot be read: {error}; copy it anew") from None
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            if entry["dtype"] not in _DTYPES:
                raise CheckpointError(f"checkpoint: '{name}' in {path} is {entry['dtype']}, which is not read here")
            tensor = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
            file.seek(8 + length + entry["data_offsets"][0])
            flat: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
            memory, filled = memoryview(flat), 0
            while filled < len(memory):
                count = file.readinto(memory[filled : filled + _BYTES_PER_READ])
                if not count:
                    raise CheckpointCorruptError(f"checkpoint: {path} ended while it was read; copy it anew")
                filled += count
            yield name, tensor


def _spellings(stored: str, prefix: str) -> tuple[str, ...]:
    """Return the names that a stored tensor may have in a model with the base model `prefix`."""
    bare = _WRAPPERS.sub("", stored)
    while bare.startswith(_OUTERMOST):
        bare = bare.removeprefix(_OUTERMOST)
    # Files of a bare model lack the model's prefix; files of a whole model may have it.
    return stored, f"{prefix}.{stored}", stored.removeprefix(f"{prefix}."), bare, f"{prefix}.{bare}"


def _fill(
    module: nn.Module, tensors: Named, dtype: torch.dtype, device: torch.device
) -> tuple[set[str], list[str], list[str]]:
    """Set a model's tensors by name. CheckpointError if shape or dtype differ.

    Returns:
        Names that are missing, unexpected names, and tied names whose stored values differ; these are not tied now.
    """
    own: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    names_of: dict[int, list[str]] = {}
    for name, target in own.items():
        names_of.setdefault(id(target), []).append(name)
    buffers = dict(module.named_buffers())
    prefix = getattr(module, "base_model_prefix", "")
    left, strange, untied = {*own, *buffers}, list[str](), list[str]()
    firsts: dict[int, torch.Tensor] = {}  # first values of tied parameters
    for stored, value in tensors:
        name = next((name for name in _spellings(stored, prefix) if name in own or name in buffers), stored)
        target = own.get(name, buffers.get(name))
        if target is None:
            strange.append(stored)
            continue
        _check_fit(name, target, value, name in own)
        value = value.to(device, dtype if value.is_floating_point() and name in own else value.dtype)
        names = names_of.get(id(target), [name])
        first = firsts.setdefault(id(target), value) if len(names) > 1 else value
        if first is not value and not torch.equal(first, value):
            names = [name]
            untied.append(name)
        if name in own and (target.is_meta or name in untied):
            parameter = nn.Parameter(value, requires_grad=target.requires_grad)
            for tied in names:
                home, _, last = tied.rpartition(".")
                setattr(module.get_submodule(home), last, parameter)
        elif name in own:
            target.data = value
        else:
            home, _, last = name.rpartition(".")
            module.get_submodule(home)._buffers[last] = value
        left.difference_update(names)
    return left, strange, untied


def _check_fit(name: str, target: torch.Tensor, value: torch.Tensor, parameter: bool) -> None:
    """Raise CheckpointError if a stored tensor cannot become the parameter or buffer `target`."""
    if target.shape != value.shape:
        raise CheckpointError(
            f"checkpoint: '{name}' is {tuple(value.shape)} there and {tuple(target.shape)} in the model"
        )
    castable = value.is_floating_point() == target.is_floating_point() and value.dtype.itemsize > 1
    if parameter and value.dtype != target.dtype and not castable:
        raise CheckpointError(
            f"checkpoint: '{name}' is {value.dtype} there and {target.dtype} in the model: integers and 8-bit "
            "floats mean nothing without their scales; give a file of whole weights"
        )


def restore_buffers(module: Any, device: torch.device) -> None:
    """Recompute buffers that are on the meta device and in no checkpoint, such as rotary frequencies, on `device`.

    Raises:
        CheckpointError: the model has no `config` from which to build it again.
    """
    lost = {name: buffer for name, buffer in module.named_buffers() if buffer.is_meta}
    if not lost:
        return
    config = getattr(module, "config", None)
    if config is None:
        raise CheckpointError(
            f"checkpoint: buffers of the model are on the meta device and in no file: {sorted(lost)[:3]}"
        )
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    with mock.patch.object(nn.Module, "register_parameter", on_meta):  # parameters on the meta device
        buffers = dict(type(module)(config).named_buffers())
    for name in lost:
        home, _, last = name.rpartition(".")
        module.get_submodule(home)._buffers[last] = buffers[name].to(device)


def save_checkpoint(module: nn.Module, folder: str | Path) -> Path:
    """Write the weights to safetensors files of at most 5 GB, and a JSON description of them for the key `checkpoint`.

    Returns:
        Path of the JSON file, in `folder`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = write_sharded(dict(module.state_dict(keep_vars=True)), folder, "5GB", True)
    files = [path.name for path in paths if path.suffix == ".safetensors"]
    about = {"type": "ds_model", "version": 1.0, "parallelization": "tp", "tp_size": 1, "checkpoints": files}
    (folder / SAVED).write_text(json.dumps(about, indent=1) + "\n")
    return folder / SAVED
