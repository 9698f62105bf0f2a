"""Packed matrices as compressed-tensors stores them, which `compression` exports: their integers become ours as they
are, so one form and one set of products serve both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.errors import CheckpointError, NotAvailableError
from deepspeed.foundation.log import say
from deepspeed.inference.quantization.layers import PackedLinear
from deepspeed.inference.quantization.packed import Form, PackedWeight

_PARTS = ("weight_packed", "weight_scale", "weight_shape")
_REFUSED = ("weight_zero_point", "weight_g_idx", "weight_global_scale", "input_scale", "input_global_scale")
Named = Iterator[tuple[str, torch.Tensor]]


def unpacked_from(module: nn.Module, tensors: Named, dtype: torch.dtype, device: torch.device) -> Named:
    """The tensors that are no parts of packed matrices; linear layers of those are replaced, in place, as they come.

    Args:
        module: where layers are found by name; it may be on the meta device.
        tensors: by stored name, of all files.
        dtype: of products.
        device: where the integers go.

    Raises:
        CheckpointError: parts are missing, do not fit the layer, or belong to none.
        NotAvailableError: a form that the products here do not know.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    made = 0
    for name, value in tensors:
        layer, _, part = name.rpartition(".")
        if part in _REFUSED:
            raise NotAvailableError(f"checkpoint: '{name}': packed matrices with a {part} are not read here")
        if part not in _PARTS and not (part == "weight" and value.dtype == torch.int8 and _linear(module, layer)):
            yield name, value
            continue
        parts = found.setdefault(layer, {})
        parts[part] = value
        if parts.keys() >= {"weight", "weight_scale"} or parts.keys() >= set(_PARTS):
            _replace(module, layer, _packed(layer, parts, dtype).to(device))
            found[layer] = {}
            made += 1
    for layer, parts in found.items():
        for part, value in parts.items():
            raise CheckpointError(
                f"checkpoint: '{layer}.{part}' is {value.dtype} there, of its packed matrix {sorted(parts)} is all: "
                "integers mean nothing without their scales; give a file of whole weights, or all parts"
            )
    if made:
        say(f"checkpoint: {made} matrices stay the packed integers that they are there")


def _packed(layer: str, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> PackedWeight:
    scale = parts["weight_scale"].float()
    if "weight" in parts:
        integers, bits = parts["weight"], 8
        shape = integers.shape
    else:
        words = parts["weight_packed"]
        shape = torch.Size(parts["weight_shape"].tolist())
        bits = 32 * words.shape[-1] // shape[-1]
        if words.dim() != 2 or bits not in (4, 8) or 32 * words.shape[1] != bits * shape[1]:
            raise NotAvailableError(
                f"checkpoint: '{layer}' packs {tuple(shape)} into {tuple(words.shape)} words; 4 and 8 bits are read"
            )
        integers = words.contiguous().view(torch.uint8)  # the first column lies lowest, as in ours
        integers = integers.view(torch.int8) ^ -128 if bits == 8 else integers
    rows, groups = shape[0], scale.numel() // shape[0]
    if scale.shape[0] != rows or scale.numel() != rows * groups or groups == 0 or shape[1] % groups:
        raise NotAvailableError(f"checkpoint: '{layer}' has scales {tuple(scale.shape)} for a matrix of {tuple(shape)}")
    scale = scale.view(rows, groups, 1).contiguous()
    offset = torch.zeros_like(scale) if bits == 8 else -8 * scale
    return PackedWeight.of(Form(bits, shape[1] // groups, 1, True), shape, integers, scale, offset, dtype)


def _linear(module: nn.Module, name: str) -> str | None:
    """The model's name of a linear layer over floating weights; files of a bare model lack its prefix."""
    prefix = getattr(module, "base_model_prefix", "")
    layers: dict[str, Any] = dict(module.named_modules())
    for one in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if isinstance(layers.get(one), nn.Linear) and layers[one].weight.is_floating_point():
            return one
    return None


def _replace(module: nn.Module, name: str, packed: PackedWeight) -> None:
    at = _linear(module, name)
    if at is None:
        raise CheckpointError(f"checkpoint: '{name}' is packed there, and no linear layer of the model")
    layer: Any = module.get_submodule(at)
    if layer.weight.shape != packed.shape:
        raise CheckpointError(
            f"checkpoint: '{name}' is {tuple(packed.shape)} there and {tuple(layer.weight.shape)} in the model"
        )
    home, _, last = at.rpartition(".")
    setattr(module.get_submodule(home), last, PackedLinear(packed, layer.bias).train(layer.training))
