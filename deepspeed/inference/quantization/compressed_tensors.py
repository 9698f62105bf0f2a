"""Loader of integer matrices in the formats of the library compressed-tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.errors import CheckpointError, NotAvailableError
from deepspeed.foundation.log import log_rank0
from deepspeed.inference.quantization.layers import PackedLinear
from deepspeed.inference.quantization.packed_weight import PackedWeight, PackingFormat

_PARTS = ("weight_packed", "weight_scale", "weight_shape")
_REFUSED = ("weight_zero_point", "weight_g_idx", "weight_global_scale", "input_scale", "input_global_scale")
Named = Iterator[tuple[str, torch.Tensor]]


def unread(section: Mapping[str, Any]) -> str:
    """Return a description of the unsupported part of a `quantization_config`; "" if everything is supported."""
    if section.get("quant_method") != "compressed-tensors":
        return f"quant_method {section.get('quant_method')}"
    for key in ("transform_config", "kv_cache_scheme"):
        if section.get(key):
            return key
    sparse = (section.get("sparsity_config") or {}).get("format") or "dense"
    if sparse != "dense":
        return f"sparsity of format {sparse}"
    groups = list((section.get("config_groups") or {}).values())
    return next((why for why in (_unread_group(section, group) for group in groups) if why), "" if groups else "groups")


def _unread_group(section: Mapping[str, Any], group: Mapping[str, Any]) -> str:
    form, weights = group.get("format") or section.get("format"), group.get("weights") or {}
    if form not in ("pack-quantized", "int-quantized"):
        return f"format {form}"
    if weights.get("type") != "int" or weights.get("num_bits") not in (4, 8) or not weights.get("symmetric"):
        return "weights that are no symmetric integers of 4 or 8 bits"
    if weights.get("strategy") not in ("channel", "group") or weights.get("actorder") in ("group", True):
        return f"scales by {weights.get('strategy')}, order {weights.get('actorder')}"
    inputs = group.get("input_activations")
    as_they_come = not inputs or (inputs.get("type") == "int" and inputs.get("dynamic") is True)
    if group.get("output_activations") or not as_they_come:
        return "scales of activations"
    return ""


def unpacked_from(module: nn.Module, tensors: Named, dtype: torch.dtype, device: torch.device) -> Named:
    """Replace linear layers by packed ones, in place, as soon as all their parts were read; yield all other tensors.

    Args:
        module: the model; may be on the meta device.
        tensors: all stored tensors with their names.
        dtype: dtype of unpacked matrices.
        device: device of the packed matrices.

    Raises:
        NotAvailableError: a packed matrix has unsupported parts or shapes, or is tied to another layer.
        CheckpointError: a part is missing, or a name or shape differs from the model.
    """
    packed: dict[str, dict[str, torch.Tensor]] = {}  # parts received so far, by layer
    others: list[str] = []
    replaced = 0
    for name, value in tensors:
        layer, _, part = name.rpartition(".")
        if part in _REFUSED:
            raise NotAvailableError(f"checkpoint: '{name}': packed matrices with a {part} are not read here")
        if part not in _PARTS and not (part == "weight" and value.dtype == torch.int8 and _linear(module, layer)):
            others += [name] if part != "bias" else []
            yield name, value
            continue
        parts = packed.setdefault(layer, {})
        parts[part] = value
        if parts.keys() >= {"weight", "weight_scale"} or parts.keys() >= set(_PARTS):
            _replace(module, layer, _packed(layer, parts, dtype).to(device))
            packed[layer] = {}
            replaced += 1
    for layer, parts in packed.items():
        for part, value in parts.items():
            raise CheckpointError(
                f"checkpoint: '{layer}.{part}' is {value.dtype} there, of its packed matrix {sorted(parts)} is all: "
                "integers mean nothing without their scales; give a file of whole weights, or all parts"
            )
    for name in others:
        if any(name[:dot] in packed for dot, character in enumerate(name) if character == "."):
            raise NotAvailableError(
                f"checkpoint: '{name}' belongs to a packed matrix, and nothing here knows what for: without it the "
                "model would compute something else; give a folder without transforms, or of whole weights"
            )
    if replaced:
        log_rank0(f"checkpoint: {replaced} matrices stay the packed integers that they are there")


def _packed(layer: str, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> PackedWeight:
    integers, bits, shape = _integers(layer, parts)
    rows, columns = shape
    scale = parts["weight_scale"]
    fits = scale.dim() == 2 and scale.is_floating_point() and scale.shape[0] == rows
    if not fits or not 0 < scale.shape[1] <= columns or columns % scale.shape[1]:
        raise NotAvailableError(
            f"checkpoint: '{layer}' has {scale.dtype} scales {tuple(scale.shape)} for a matrix of {tuple(shape)}; each "
            "row has one, or one per group of columns"
        )
    groups = scale.shape[1]
    scale = scale.float().reshape(rows, groups, 1).contiguous()
    offset = torch.zeros_like(scale) if bits == 8 else -8 * scale
    return PackedWeight.of(PackingFormat(bits, columns // groups, 1, True), shape, integers, scale, offset, dtype)


def _integers(layer: str, parts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int, torch.Size]:
    """Return integers in the layout of `PackedWeight.of`, bits (4 or 8), and shape; NotAvailableError for others."""
    if "weight" in parts:
        shape = parts["weight"].shape
        if len(shape) != 2 or min(shape) == 0:
            raise NotAvailableError(f"checkpoint: '{layer}' holds integers of shape {tuple(shape)}, which is no matrix")
        return parts["weight"], 8, shape
    words, sizes = parts["weight_packed"], parts["weight_shape"]
    shape = torch.Size(int(size) for size in sizes.flatten().tolist())
    bits = 0
    if words.dtype == torch.int32 and words.dim() == 2 and len(shape) == 2 and min(shape) > 0:
        bits = 32 * words.shape[1] // shape[1]
    if bits not in (4, 8) or words.shape[0] != shape[0] or 32 * words.shape[1] != bits * shape[1]:
        raise NotAvailableError(
            f"checkpoint: '{layer}' packs {tuple(shape)} into {tuple(words.shape)} words of {words.dtype}; int32 words "
            "of whole rows are read, of 4 or 8 bits"
        )
    integers = words.contiguous().view(torch.uint8)  # the first column is in the lowest bits, as in our format
    return (integers.view(torch.int8) ^ -128 if bits == 8 else integers), bits, shape


def _linear(module: nn.Module, name: str) -> str | None:
    """Return the model's name of a linear layer that a file calls `name`, with or without the model's prefix.

    None if the model has no such floating-point layer.
    """
    prefix = getattr(module, "base_model_prefix", "")
    layers: dict[str, Any] = dict(module.named_modules())
    for spelling in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if isinstance(layers.get(spelling), nn.Linear) and layers[spelling].weight.is_floating_point():
            return spelling
    return None


def _replace(module: nn.Module, name: str, packed: PackedWeight) -> None:
    path = _linear(module, name)
    if path is None:
        raise CheckpointError(f"checkpoint: '{name}' is packed there, and no linear layer of the model")
    layer: Any = module.get_submodule(path)
    if layer.weight.shape != packed.shape:
        raise CheckpointError(
            f"checkpoint: '{name}' is {tuple(packed.shape)} there and {tuple(layer.weight.shape)} in the model"
        )
    head = getattr(module, "get_output_embeddings", lambda: None)()
    will_tie = layer is head and getattr(getattr(module, "config", None), "tie_word_embeddings", False)
    others = (other for other in module.modules() if other is not layer)
    if will_tie or any(other._parameters.get("weight") is layer.weight for other in others):
        raise NotAvailableError(
            f"checkpoint: '{name}' is packed there, and shares its weight in the model: set tie_word_embeddings to "
            "false in its config where the folder holds both, or give it whole"
        )
    owner, _, last = path.rpartition(".")
    setattr(module.get_submodule(owner), last, PackedLinear(packed, layer.bias).train(layer.training))
