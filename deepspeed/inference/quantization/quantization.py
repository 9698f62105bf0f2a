"""Replacement of layers by packed ones: lossless, as integers for `dtype` int8, or by configured layer names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed.compression.export import packable
from deepspeed.errors import ArgumentError, DeepSpeedConfigError, NotAvailableError, PackingError
from deepspeed.foundation.log import log_rank0, warn_once
from deepspeed.inference.quantization import experts as stacked
from deepspeed.inference.quantization.experts import PackedExperts, pack_integers, packable_experts
from deepspeed.inference.quantization.layers import (
    PackedEmbedding,
    PackedLinear,
    can_pack,
    is_transposed,
    matrix_of,
    packed_layer,
)
from deepspeed.inference.quantization.lossless_bf16 import LosslessWeight, Room
from deepspeed.inference.quantization.packed_weight import PackedWeight, PackingFormat
from deepspeed.zero.parameters.parameter import is_managed

FormOf = Callable[[str, nn.Module | nn.Parameter], PackingFormat | None]
_KEYS = {"num_bits", "group_size", "group_dim", "symmetric"}


def quantize(model: nn.Module, form_of: FormOf, dtype: torch.dtype | None = None) -> int:
    """Pack layers of a model in place; layers with a shared matrix share its packed form. Returns the number of layers.

    Args:
        form_of: maps name and layer (Linear, Embedding or `Conv1D`), or name and parameter of stacked experts, to a
            format (experts: group_dim 1); None: not packed.
        dtype: dtype of unpacked matrices; None: that of the weights.

    Raises:
        ArgumentError: a format does not fit a matrix, or only some of the layers with a shared matrix, or only one of
            the two matrices of stacked experts, have a format.
        NotAvailableError: the model is sharded.
    """
    chosen = {name: (m, form) for name, m in model.named_modules() if can_pack(m) and (form := form_of(name, m))}
    _check_tied_layers(model, {id(module) for module, _ in chosen.values()})
    shared: dict[int, PackedWeight] = {}
    layers: dict[int, nn.Module] = {}
    before = sum(param.nbytes for param in model.parameters())
    for name, (module, form) in chosen.items():
        weight: Any = module.weight
        if id(weight) not in shared:
            try:
                shared[id(weight)] = PackedWeight(matrix_of(module), form, dtype)
            except ArgumentError as error:
                raise ArgumentError(f"'{name}' cannot be packed: {error}") from None
        layers[id(module)] = packed_layer(module, shared[id(weight)]).train(module.training)
    for name, experts in packable_experts(model):
        forms = [form_of(f"{name}.{key}", experts.get_parameter(key)) for key in stacked.NAMES]
        if forms.count(None) == 1:
            raise ArgumentError(f"'{name}' cannot be packed: name both of {', '.join(stacked.NAMES)}, or none")
        if any(form is not None and form.axis != 2 for form in forms):
            log_rank0(f"the experts of '{name}' stay whole: they are packed along group_dim 1 only")
        elif None not in forms:
            layers[id(experts)] = pack_integers(experts, forms, dtype).train(experts.training)  # type: ignore[arg-type]
    for owner in list(model.modules()):
        for name, child in owner.named_children():
            if id(child) in layers:
                setattr(owner, name, layers[id(child)])
    after = sum(param.nbytes for param in model.parameters())
    log_rank0(f"{len(layers)} layers are packed: {before / 1e6:.1f} MB of weights became {after / 1e6:.1f} MB")
    return len(layers)


def _check_tied_layers(model: nn.Module, chosen: set[int]) -> None:
    """Raise NotAvailableError for a sharded model, ArgumentError if only some layers with a shared matrix are packed.

    Args:
        chosen: ids of the layers to pack.
    """
    if any(is_managed(param) for param in model.parameters()):
        raise NotAvailableError(
            "the model is sharded already: build it outside zero.Init, or quantize it before initialize"
        )
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            users.setdefault(id(weight), []).append((name, module))
    for layers in users.values():
        packed = [name for name, module in layers if id(module) in chosen]
        whole = [name for name, module in layers if id(module) not in chosen]
        if packed and whole:
            raise ArgumentError(
                f"'{packed[0]}' shares its weight with '{whole[0]}', which stays whole: name both or neither"
            )


# -- without loss ------------------------------------------------------------------------------------------------------


def pack_lossless(model: nn.Module, whole: Collection[nn.Module] = ()) -> int:
    """Pack the bf16 matrices of Linear and Embedding layers and of experts in 12 bits per element, in place, without
    loss.

    Matrices are packed one at a time, first those of layers by size, the smallest first, then experts. Layers with a
    shared matrix share its packed form. A matrix that cannot be packed stays as it is; the first reason is logged.

    Args:
        model: a model in host memory. If a parameter is sharded or has a gradient, ArgumentError is raised. If other
            code has references to the weights, later writes to the weights have no effect on the model.
        whole: layers to leave unpacked. Layers with hooks are never packed.

    Returns:
        Number of packed matrices; the experts of a layer count as one.
    """
    for name, param in model.named_parameters():
        if is_managed(param) or param.grad is not None:
            raise ArgumentError(
                f"lossless_weights: '{name}' belongs to an engine or has a gradient: weights in training are read "
                "in place; leave lossless_weights out, or give a copy of the model"
            )
    room, before, after, count, refused = Room(), 0, 0, 0, list[str]()
    packings = [
        (names[0], size, partial(_pack_layers, model, names, room)) for size, names in _shared_layers(model, whole)
    ]
    packings += [
        (name, sum(param.nbytes for param in module.parameters()), partial(_pack_experts, model, name, room))
        for name, module in packable_experts(model)
        if module not in whole
    ]
    for name, size, pack in packings:
        try:
            after += pack()
        except PackingError as error:
            refused.append(f"'{name}' stays whole: {error}")
        else:
            before, count = before + size, count + 1
    if count:
        log_rank0(f"{before / 1e6:.1f} MB of bf16 matrices became {after / 1e6:.1f} MB, every bit kept")
    if refused:
        log_rank0(f"{refused[0]}{f'; {len(refused) - 1} more too' if len(refused) > 1 else ''}")
    return count


def _shared_layers(model: nn.Module, left: Collection[nn.Module]) -> list[tuple[int, list[str]]]:
    """Return (bytes, names of its layers) of each bf16 matrix to pack, smallest first; layers in `left` stay unpacked.

    The list has no reference to a tensor, so packed matrices free their memory.
    """
    layers: dict[int, tuple[int, list[str]]] = {}
    whole: set[int] = set()  # ids of matrices with an owner that cannot be packed
    for name, module in model.named_modules(remove_duplicate=False):
        free = not (module._forward_hooks or module._forward_pre_hooks or module in left)
        for kind, param in module._parameters.items():
            if param is None or param.dtype != torch.bfloat16 or param.dim() != 2:
                continue
            if free and kind == "weight" and can_pack(module) and not is_transposed(module):
                layers.setdefault(id(param), (param.nbytes, []))[1].append(name)
            else:
                whole.add(id(param))
    return sorted(pair for key, pair in layers.items() if key not in whole)


def _pack_layers(model: nn.Module, names: list[str], room: Room) -> int:
    """Pack the matrix that the layers `names` share; return its packed size in bytes."""
    module: Any = model.get_submodule(names[0])
    packed = LosslessWeight(module.weight, room)
    for name in names:
        layer = model.get_submodule(name)
        home, _, last = name.rpartition(".")
        setattr(model.get_submodule(home), last, packed_layer(layer, packed).train(layer.training))
    return packed.nbytes


def _pack_experts(model: nn.Module, name: str, room: Room) -> int:
    """Pack the experts of one layer; return their packed size in bytes."""
    experts = model.get_submodule(name)
    packed = stacked.pack_lossless(experts, room)
    home, _, last = name.rpartition(".")
    setattr(model.get_submodule(home), last, packed.train(experts.training))
    return sum(part.nbytes for _, part, _ in packed.matrices())


# -- as integers -------------------------------------------------------------------------------------------------------


def quantize_linears(model: nn.Module, num_bits: int, q_groups: int = 1, dtype: torch.dtype | None = None) -> int:
    """Pack the linear layers and stacked experts, in place; the head and a tied embedding always get 8 bits.

    Args:
        num_bits: 8 (symmetric), or 4 (asymmetric, with one scale per 32 inputs, or per 16, 8, 4 or 2 if 32 does not
            divide the number of inputs; a layer with an odd number is not packed).
        q_groups: number of scales per output, with 8 bits; 1 is used if it does not divide the number of inputs.
        dtype: dtype of unpacked matrices; None: that of the weights.

    Returns:
        Number of packed layers.

    Raises:
        ArgumentError, NotAvailableError: as in `quantize`, or a layer is already packed in another number of bits.
    """
    head_layer = getattr(model, "get_output_embeddings", lambda: None)()
    _check_same_bits(model, lambda name, module: None if module is head_layer else num_bits)
    linears: set[int] = {id(module) for module in packable(model).values()}
    linears |= {id(module) for module in model.modules() if is_transposed(module)}
    head = _head(model)

    def form_of(name: str, module: nn.Module | nn.Parameter) -> PackingFormat | None:
        if not isinstance(module, nn.Parameter) and id(module) not in linears | head:
            return None
        inputs = module.shape[-1] if isinstance(module, nn.Parameter) else matrix_of(module).shape[1]
        if id(module) in head:
            return PackingFormat(8, 0, 1, symmetric=True)
        if num_bits == 8:
            return PackingFormat(8, inputs // q_groups if inputs % q_groups == 0 else 0, 1, symmetric=True)
        size = next((size for size in (32, 16, 8, 4, 2) if inputs % size == 0), 0)
        return PackingFormat(4, size, 1) if size else None

    others = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    ]
    if others:
        rest = ", …" if len(others) > 3 else ""
        warn_once(
            f"{len(others)} linear layers stay as they are, not in {num_bits} bits, since their class has a forward of "
            f"its own, as slices of tensor parallelism have: {', '.join(others[:3])}{rest}"
        )
    return quantize(model, form_of, dtype)


def _check_same_bits(model: nn.Module, bits_of: Callable[[str, nn.Module], int | None]) -> None:
    """Raise ArgumentError if `bits_of` (name, module) differs from the bits of a packed layer; None: no change."""
    for name, module in model.named_modules():
        if not isinstance(module, PackedLinear | PackedEmbedding | PackedExperts):
            continue
        packed: Any = module.down if isinstance(module, PackedExperts) else module.packed
        bits, held = bits_of(name, module), packed.form.num_bits
        if bits not in (None, held):
            raise ArgumentError(
                f"'{name}' is packed in {held} bits already, as its folder or an earlier call made it, and {bits} are "
                f"asked: leave that out to keep {held}, or give whole weights"
            )


def _head(model: nn.Module) -> set[int]:
    """Return the ids of the LM head and of embeddings tied to it; empty if one of them cannot be packed."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, nn.Parameter):
        return set()
    tied = [module for module in model.modules() if module._parameters.get("weight") is weight]
    return {id(module) for module in tied} if all(map(can_pack, tied)) else set()


def _init_group_wise_weight_quantization(model: nn.Module, ds_config: Mapping[str, Any]) -> nn.Module:
    """Quantize the layers that the section `weight_quantization` of a configuration selects.

    Args:
        model: changed in place.
        ds_config: a dict with `weight_quantization.post_init_quant`: {part of a layer's name: {num_bits, group_size,
            group_dim, symmetric}}; or with `weight_quantization.quantized_initialization`: the same four keys, for
            every layer. Missing keys have the defaults of `PackingFormat`.

    Returns:
        The model.

    Raises:
        DeepSpeedConfigError: no or both kinds of section, unknown keys, a layer matched by two entries, or an entry
            without a layer; also a ValueError and an AssertionError.
        ArgumentError: as in `quantize`, or a layer is already packed in another number of bits.
        NotAvailableError: num_bits is neither 4 nor 8, or the model is sharded.
    """
    section = ds_config.get("weight_quantization")
    if not isinstance(section, Mapping):
        raise DeepSpeedConfigError("Must specify quantization scheme: the configuration has no weight_quantization")
    apply_section(model, section)
    return model


def apply_section(model: nn.Module, section: Mapping[str, Any]) -> int:
    """Quantize the layers that `post_init_quant` or `quantized_initialization` in `section` selects.

    See `_init_group_wise_weight_quantization`, also for the errors. Returns the number of packed layers.
    """
    entries: dict[str, Any] = dict(section.get("post_init_quant") or {})
    everywhere = section.get("quantized_initialization")
    if entries and everywhere:
        raise DeepSpeedConfigError("weight_quantization: give quantized_initialization or post_init_quant, not both")
    if everywhere:
        entries = {"": everywhere}
    forms: dict[str, PackingFormat] = {}
    for key, options in entries.items():
        if not isinstance(options, Mapping) or options.keys() - _KEYS:
            unknown = sorted(options.keys() - _KEYS) if isinstance(options, Mapping) else options
            raise DeepSpeedConfigError(
                f"weight_quantization: {key!r}: {unknown} is unknown; the keys are {sorted(_KEYS)}"
            )
        try:
            forms[key] = PackingFormat(**{"num_bits": 8, "group_size": 0, "group_dim": 1, **options})
        except (ArgumentError, NotAvailableError) as error:
            raise type(error)(f"weight_quantization: {key!r}: {error}") from None
    used: set[str] = set()

    def form_of(name: str, module: nn.Module | nn.Parameter) -> PackingFormat | None:
        keys = [key for key in forms if key in name]
        if len(keys) > 1:
            raise DeepSpeedConfigError(f"weight_quantization: '{name}' is named by {keys}: make them exclusive")
        used.update(keys)
        return forms[keys[0]] if keys else None

    _check_same_bits(model, lambda name, _: next((form.num_bits for key, form in forms.items() if key in name), None))
    packed = quantize(model, form_of) if forms else 0
    if forms.keys() - used:
        raise DeepSpeedConfigError(
            f"weight_quantization: no Linear, Embedding or stack of experts is named by {sorted(forms.keys() - used)}"
        )
    return packed
