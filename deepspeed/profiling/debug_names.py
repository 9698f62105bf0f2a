"""Names of modules and parameters for debugging, and functions that print without mixing lines of processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from deepspeed.comm.process_groups.process_group import get_rank, is_initialized
from deepspeed.zero.parameters.record import ZeroParamStatus

UNKNOWN = "unknown"
_modules: MutableMapping[Any, str] = WeakIdKeyDictionary()
_params: MutableMapping[Any, str] = WeakTensorKeyDictionary()


def debug_extract_module_and_param_names(model: nn.Module) -> None:
    """Store the names of a model's modules and parameters; shared ones get their first name.

    Only weak references are stored. A second model adds its names to those of the first.
    """
    for names, named in ((_modules, model.named_modules()), (_params, model.named_parameters())):
        for name, part in named:
            names[part] = name


def debug_clear_module_and_param_names() -> None:
    """Delete all names."""
    _modules.clear()
    _params.clear()


def debug_module2name(module: nn.Module) -> str:
    """Return a module's name, "" for the model itself, or "unknown"."""
    return _modules.get(module, UNKNOWN)


def debug_module2name_id(module: nn.Module) -> str:
    """Return a module's name and the id of its object."""
    return f"name={debug_module2name(module)} id={id(module)}"


def debug_module2name_class(module: nn.Module) -> str:
    """Return a module's name and class."""
    return f"name={debug_module2name(module)} {type(module).__name__}"


def ds_id(param: torch.Tensor) -> int | str:
    """Return the id of a parameter that ZeRO manages, or "none"."""
    return getattr(param, "ds_id", "none")


def ds_shape(param: torch.Tensor) -> torch.Size:
    """Return the shape of a parameter before ZeRO shards it."""
    return torch.Size(getattr(param, "ds_shape", param.shape))


def debug_param2name(param: torch.Tensor) -> str:
    """Return a parameter's name, or "unknown"."""
    return _params.get(param, UNKNOWN)


def debug_param2name_id(param: torch.Tensor) -> str:
    """Return a parameter's name and `ds_id`."""
    return f"name={debug_param2name(param)} id={ds_id(param)}"


def debug_param2name_id_shape(param: torch.Tensor) -> str:
    """Return a parameter's name, `ds_id` and shape before sharding."""
    return f"{debug_param2name_id(param)} shape={ds_shape(param)}"


def debug_param2name_id_shape_device(param: torch.Tensor) -> str:
    """Return a parameter's name, `ds_id`, shape before sharding, and device."""
    return f"{debug_param2name_id_shape(param)} device={param.device}"


def debug_param2name_id_numel(param: torch.Tensor) -> str:
    """Return a parameter's name, `ds_id` and number of elements before sharding."""
    return f"{debug_param2name_id(param)} numel={ds_shape(param).numel()}"


def debug_param2name_id_shape_status(param: torch.Tensor) -> str:
    """Return a parameter's name, `ds_id`, shape before sharding, and `ds_status` (AVAILABLE without ZeRO)."""
    status = getattr(param, "ds_status", ZeroParamStatus.AVAILABLE)
    return f"{debug_param2name_id_shape(param)} status={status}"


def printflock(*msgs: object) -> None:
    """Print and flush under a lock between this user's processes, so that lines do not mix."""
    import fcntl  # missing on Windows, where the rest of the module works

    path = Path(tempfile.gettempdir(), f"deepspeed-print-{os.getuid()}.lock")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        print(*msgs, flush=True)
    finally:
        os.close(handle)  # releases the lock


def log_rank_file(rank: int, *msgs: object) -> None:
    """Append messages, a line each, to `log_rank_<rank>.txt` in the working directory."""
    with open(f"log_rank_{rank}.txt", "a") as file:
        file.writelines(f"{message}\n" for message in msgs)


def print_rank(*msg: object, force: bool = False) -> None:
    """Print on every rank, with the rank's number first, if `force` is true; else do nothing."""
    if force:
        printflock(f"[rank {get_rank() if is_initialized() else 0}]", *msg)


def print_rank0(*msg: object, force: bool = False) -> None:
    """Print on rank 0 if `force` is true; else do nothing."""
    if force and (not is_initialized() or get_rank() == 0):
        printflock(*msg)


def print_backward_tensors(tensor: torch.Tensor) -> None:
    """Print the backward graph of `tensor`, each node once, with the parameters at its leaves."""
    seen: set[Any] = set()
    ahead = [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        print(f"backward: {node.name()}")
        ends = getattr(node, "variable", None)
        if ends is not None:
            print(f"  tensor: {debug_param2name_id_shape_device(ends)} dtype={ends.dtype}")
        ahead += [following for following, _ in reversed(node.next_functions)]
