"""Compute dtype of each parameter, and casting of inputs at the boundary of cast modules."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.foundation.log import log_once
from deepspeed.foundation.module_tree import layer_dtypes, own_state
from deepspeed.foundation.pytree import map_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Their kernels pair float32 buffers with the parameters.
_PAIRED_WITH_BUFFERS = (nn.modules.batchnorm._NormBase,)


def compute_dtypes(
    module: nn.Module, dtype: torch.dtype, keep_fp32: Iterable[str] = ()
) -> dict[Parameter, torch.dtype]:
    """Return the compute dtype of each floating-point parameter, except those that a model writes itself (`own_state`).

    `keep_fp32` are names, suffixes or patterns of modules that stay float32 (`data_types.keep_in_fp32_modules`), in
    addition to BatchNorm modules and those that the model itself lists (`_keep_in_fp32_modules`).
    """
    patterns = [*keep_fp32, *(getattr(module, "_keep_in_fp32_modules", None) or ())]
    wanted: dict[Parameter, torch.dtype] = {}
    stays_fp32: set[Parameter] = set()
    own = own_state(module)  # as buffers, these keep their dtype
    for name, child in module.named_modules():
        stays = isinstance(child, _PAIRED_WITH_BUFFERS) or any(_matches(name, p) for p in patterns)
        for param in child.parameters(recurse=stays and not isinstance(child, _PAIRED_WITH_BUFFERS)):
            if param.is_floating_point() and param not in own:
                wanted[param] = dtype
                if stays:
                    stays_fp32.add(param)
    return {p: torch.float32 if p in stays_fp32 else d for p, d in wanted.items()}


def check_policies(module: nn.Module, dtype: torch.dtype) -> None:
    """Raise for a Keras model in which no layer computes in `dtype`, the dtype that its weights would get.

    Layers with another policy keep it (such as a last layer in float32, as Keras recommends).

    Raises:
        DeepSpeedConfigError: all layers compute in another dtype; the message names the policy to set.
    """
    by_layer, wanted = layer_dtypes(module), str(dtype).removeprefix("torch.")
    if by_layer and dtype != torch.float32 and wanted not in by_layer.values():
        name, other = next(iter(by_layer.items()))
        block = next(short for short, full in DTYPES.items() if full == dtype)
        raise DeepSpeedConfigError(
            f"the block '{block}' asks for {wanted}, but Keras layer '{name}' computes in {other}, as all others do, "
            f"by its dtype policy; call keras.mixed_precision.set_dtype_policy('mixed_{wanted}') before the model is "
            f"built, or leave the block out"
        )


def cast_buffers(module: nn.Module, dtype: torch.dtype, keep_fp32: Iterable[str] = ()) -> None:
    """Cast floating-point buffers to a dtype, in place (`data_types.buffer_dtype`).

    Buffers of modules that stay float32 (as in `compute_dtypes`), and of their descendants, are not cast.
    """
    patterns = [*keep_fp32, *(getattr(module, "_keep_in_fp32_modules", None) or ())]
    excluded: set[nn.Module] = set()
    for name, child in module.named_modules():
        if isinstance(child, _PAIRED_WITH_BUFFERS) or any(_matches(name, p) for p in patterns):
            excluded.update(child.modules())
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point() and child not in excluded:
                child._buffers[name] = buffer.to(dtype)


def _matches(name: str, pattern: str) -> bool:
    return pattern in name.split(".") or name.endswith(pattern) or fnmatch.fnmatch(name, pattern)


class InputCaster:
    """Forward pre-hooks that cast the floating-point inputs of modules to the dtype of their parameters.

    Modules that stay float32 get float32 inputs, except those whose kernels accept mixed dtypes (BatchNorm).

    Args:
        module: the model.
        dtypes: result of `compute_dtypes`.
        low: dtype of the cast parameters; the first cast of an input to this dtype is logged.
        hook: wraps each hook function before it is registered.
    """

    def __init__(self, module: nn.Module, dtypes: dict[Parameter, torch.dtype], low: torch.dtype, hook: Any) -> None:
        self._handles: list[Any] = []
        self._low = low
        for name, child in module.named_modules():
            own = [p for p in child._parameters.values() if p is not None and p in dtypes]
            if not own or isinstance(child, _PAIRED_WITH_BUFFERS):
                continue
            target = dtypes[own[0]]
            call = hook(functools.partial(self._cast, name, target))
            self._handles.append(child.register_forward_pre_hook(call, with_kwargs=True))

    def _cast(self, name: str, target: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].dtype == target:
            return None  # nearly every call, and there are as many as modules

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype == target or not tensor.is_floating_point():
                return tensor
            if target == self._low and not torch.compiler.is_compiling():
                where = f"'{name}' ({type(module).__name__})" if name else type(module).__name__
                short = str(tensor.dtype).removeprefix("torch.")
                log_once(
                    f"{short} inputs are cast to {str(target).removeprefix('torch.')} where they enter modules whose "
                    f"parameters were cast, first at {where}; auto_cast: false turns it off",
                    key=("auto_cast", id(self)),
                )
            return tensor.to(target)

        return map_tensors(cast, args), map_tensors(cast, kwargs)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
