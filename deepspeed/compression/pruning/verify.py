"""Verification of a removal on a small copy of a model: removal and masking of units must give equal outputs.

For experts, masking differs from removal, because a router also selects an expert with zero weights. Instead, a copy
with permuted experts must have the same outputs; this shows that all parameters of an expert are known.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.transformers_groups import Shrink, experts_per_token, on_meta, shapes_of
from deepspeed.errors import ArgumentError, CompressionError
from deepspeed.foundation.equivalence import evaluating, made_up_inputs, relative_difference, tolerance
from deepspeed.foundation.transformers_model import (
    FFN_KEYS,
    HEAD_DIM_KEYS,
    HEAD_KEYS,
    LAYER_KEYS,
    WIDTH_KEYS,
    config_number,
)

TOLERANCE = tolerance(torch.float32, 0.1)  # relative to the largest output
FLOOR = 1e-12  # minimum divisor of a difference
LARGEST = 40_000_000  # maximum parameters of a small copy


def with_layers(config: Any, keep: list[int], keys: tuple[str, ...] = LAYER_KEYS, total: int | None = None) -> Any:
    """Return a copy of a config with fewer layers, also in its per-layer lists.

    Args:
        config: config of a Transformers model.
        keep: indices of the kept layers.
        keys: config keys to change, if their value is `total`; default: all keys for numbers of layers.
        total: number of layers before; None: the first number of layers in the config.
    """
    small = copy.deepcopy(config)
    total = layers_of(config) if total is None else total
    for key in keys:
        if getattr(small, key, None) == total and key not in getattr(small, "attribute_map", {}):
            setattr(small, key, len(keep))
    for key, value in list(vars(small).items()):
        if isinstance(value, (list, tuple)) and len(value) == total and key not in ("architectures", "attention_types"):
            setattr(small, key, type(value)(value[layer] for layer in keep))
    if isinstance(getattr(small, "attention_types", None), list) and hasattr(small, "attention_layers"):
        small.attention_types = [[[kind], 1] for kind in small.attention_layers]
    return small


def layers_of(config: Any) -> int:
    """Return the number of layers in a config; raise CompressionError if it has none."""
    if (count := config_number(config, LAYER_KEYS)) is None:
        raise CompressionError(f"{type(config).__name__} says no number of layers")
    return count


def build(model_class: type[nn.Module], config: Any) -> nn.Module:
    """Return a model in fp32 and evaluation mode, with reproducible random parameters.

    Zeros and ones would hide differences. CompressionError if the model cannot be built.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = model_class(copy.deepcopy(config)).float().eval()
        except Exception as error:  # any error of the model class
            raise CompressionError(f"a twin of {model_class.__name__} cannot be built: {error}") from error
        with torch.no_grad():
            for name, param in model.named_parameters():
                noise = torch.randn(param.shape) * (0.05 if param.dim() < 2 else 0.5 / param.shape[-1] ** 0.5)
                param.copy_(noise + 1 if "norm" in name.lower() and param.dim() == 1 and "bias" not in name else noise)
    return model


def inputs_for(model: nn.Module, config: Any) -> dict[str, Any]:
    """Return generated forward arguments for a Transformers model; raise CompressionError if that is impossible."""
    try:
        return made_up_inputs(model, config, 2, 8)
    except ArgumentError as error:
        raise CompressionError(str(error)) from error


def outputs(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Run a model and return its floating-point outputs, 1-D and concatenated; CompressionError if it fails."""
    with evaluating(model):
        torch.manual_seed(2)
        try:
            output = model(**inputs)
        except Exception as error:
            raise CompressionError(f"{type(model).__name__} does not run: {type(error).__name__}: {error}") from error
    values = output.to_tuple() if hasattr(output, "to_tuple") else output if isinstance(output, tuple) else (output,)
    flat = [value.reshape(-1) for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return torch.cat(flat)


def flags_at_random(shrink: Shrink, ratio: float, seed: int = 3) -> list[torch.Tensor]:
    """Return random bool flags of kept units for each dependency group of `shrink`, equal numbers in every block.

    Args:
        shrink: the dependency groups.
        ratio: fraction of units to keep.
        seed: seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    per_block = shrink.kept_per_block(ratio)
    return [
        family.choose(torch.rand(family.size, generator=generator, dtype=torch.float64), per_block * family.blocks)
        for family in shrink.families
    ]


def masked(model: nn.Module, shrink: Shrink, keeps: list[torch.Tensor]) -> nn.Module:
    """Return a copy of a model in which units of `shrink` with a False flag in `keeps` are zero."""
    twin = copy.deepcopy(model)
    params = dict(twin.named_parameters())
    with torch.no_grad():
        for family, keep in zip(shrink.families, keeps, strict=True):
            for name in family.names():
                flat = params[name].view(-1)
                flat.mul_(family.flags(name, params[name].shape, (0, flat.numel()), keep))
    return twin


def removed(model: nn.Module, config: Any, shrink: Shrink, keeps: list[torch.Tensor]) -> nn.Module:
    """Return a model of the smaller config with the elements of kept units (True flags in `keeps`).

    Raises:
        CompressionError: the smaller model has other parameters.
    """
    params = model.state_dict(keep_vars=True)
    state = {name: value.detach() for name, value in params.items()}
    tied: dict[int, list[str]] = {}
    for name, value in params.items():
        tied.setdefault(id(value), []).append(name)
    for family, keep in zip(shrink.families, keeps, strict=True):
        for slot in family.slots:
            state |= dict.fromkeys(tied[id(params[slot.name])], slot.select(state[slot.name], keep))
    per_block = int(keeps[0].sum()) // shrink.families[0].blocks
    width = shrink.families[0].size // shrink.families[0].blocks
    small = type(model)(shrink.config(config, per_block, width)).float().eval()
    missing = small.load_state_dict(state, strict=False)
    wrong = [name for name in missing.missing_keys if name in dict(small.named_parameters())]
    if wrong:
        raise CompressionError(f"{type(model).__name__} has other parameters when smaller: {wrong[:3]}")
    return small


def prove(model_class: type[nn.Module], config: Any, find: Any, shrink: Shrink) -> tuple[Shrink, float]:
    """Find the layout of fused axes for which removal and masking of units give equal outputs of a small copy.

    Args:
        model_class: class of the model.
        config: its config.
        find: function (model, config) that returns a list of `Shrink`, such as `ffn_shrinks`.
        shrink: an element of that list.

    Returns:
        `shrink` in the layout found, `joined` if necessary, and the relative difference of the outputs.

    Raises:
        CompressionError: no layout has equal outputs, masking has no effect, or the copy cannot be built or run.
    """
    config, twin, same = twin_of(model_class, config, find, shrink)
    inputs = inputs_for(twin, config)
    dense, differences = outputs(twin, inputs), []
    for join, layout in itertools.product((False, True), range(shrink.layouts)):
        laid = (same.joined() if join else same).laid(layout)
        keeps = flags_at_random(laid, 0.5)
        try:
            small = removed(twin, config, laid, keeps)
            without = outputs(masked(twin, laid, keeps), inputs)
            difference = relative_difference(outputs(small, inputs), without, floor=FLOOR)
        except (CompressionError, RuntimeError, ValueError, IndexError) as error:
            raise CompressionError(f"the smaller twin of {model_class.__name__} fails: {error}") from error
        if relative_difference(dense, without, floor=FLOOR) < TOLERANCE:
            raise CompressionError(
                f"masking {shrink.kind} of {model_class.__name__} changes nothing, so the removal cannot be verified"
            )
        differences.append(f"{difference:.2g}")
        if difference <= TOLERANCE:
            return (shrink.joined() if join else shrink).laid(layout), difference
    raise CompressionError(f"removed is not masked on a twin of {model_class.__name__}: differences {differences}")


def prove_experts(model_class: type[nn.Module], config: Any, find: Any, shrink: Shrink) -> tuple[Shrink, float]:
    """Verify that permuted experts give equal outputs of a small copy, and that a copy with fewer experts runs.

    Arguments and result are those of `prove`; `shrink` loses its router buffers, because masks cover parameters only.

    Raises:
        CompressionError: the order matters, as with group-limited routing, or the smaller copy fails.
    """
    config, twin, same = twin_of(model_class, config, find, shrink)
    inputs = inputs_for(twin, config)
    router = same.names() - shapes_of(twin).keys()
    with torch.no_grad():
        for name in router:  # buffers start as zeros, which would hide a wrong order
            twin.get_buffer(name).copy_(torch.linspace(0.1, 0.3, twin.get_buffer(name).numel()))
    dense, other = outputs(twin, inputs), copy.deepcopy(twin)
    tensors = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    with torch.no_grad():
        for family in same.families:
            order = torch.arange(family.size).roll(1)
            for slot in family.slots:
                tensors[slot.name].copy_(tensors[slot.name].index_select(slot.axes[0], order))
    difference = relative_difference(outputs(other, inputs), dense, floor=FLOOR)
    if difference > TOLERANCE:
        raise CompressionError(
            f"experts of {model_class.__name__} cannot be permuted (difference {difference:.2g}): something else "
            f"knows their order"
        )
    kept_experts = max(experts_per_token(config), same.families[0].size // 2)
    try:
        small = outputs(
            removed(twin, config, same, flags_at_random(same, kept_experts / same.families[0].size)), inputs
        )
    except (CompressionError, RuntimeError, ValueError, IndexError) as error:
        raise CompressionError(f"a twin of {model_class.__name__} with fewer experts fails: {error}") from error
    if not torch.isfinite(small).all():
        raise CompressionError(f"a twin of {model_class.__name__} with fewer experts gives no numbers")
    last = {name.rpartition(".")[2] for name in router}
    for family in shrink.families:  # masks cover parameters only; buffers follow at removal
        family.slots = [slot for slot in family.slots if slot.name.rpartition(".")[2] not in last]
    return shrink, difference


def twin_of(model_class: type[nn.Module], config: Any, find: Any, shrink: Shrink) -> tuple[Any, nn.Module, Shrink]:
    """Return the config of a small copy, the copy, and the copy's `Shrink` that reduces the same config keys.

    Arguments are those of `prove`.

    Raises:
        CompressionError: the copy cannot be built, or has no `Shrink` with these keys.
    """
    config = twin_config(model_class, config)
    twin = build(model_class, config)
    same = next((other for other in find(twin, config) if set(other.unit) == set(shrink.unit)), None)
    if same is None:
        raise CompressionError(f"a twin of {model_class.__name__} has no such units")
    return config, twin, same


def twin_config(model_class: type[nn.Module], config: Any) -> Any:
    """Return a config with at most two layers and, above `LARGEST` parameters, reduced widths and vocabulary.

    Raises:
        CompressionError: the model cannot be built, or still has more than `LARGEST` parameters.
    """
    total = layers_of(config)
    small = with_layers(config, list(range(min(total, 2)))) if total > 2 else copy.deepcopy(config)
    if sum(p.numel() for p in on_meta(model_class, small).parameters()) <= LARGEST:
        return small
    heads = config_number(small, HEAD_KEYS) or 8
    for keys, value in ((WIDTH_KEYS, 8 * heads), (FFN_KEYS, 96), (HEAD_DIM_KEYS, 8), (("vocab_size",), 512)):
        for key in keys:
            if isinstance(getattr(small, key, None), int) and key not in getattr(small, "attribute_map", {}):
                setattr(small, key, value)
    try:
        count = sum(p.numel() for p in on_meta(model_class, small).parameters())
    except CompressionError as error:
        raise CompressionError(f"no small twin of {model_class.__name__}: {error}") from error
    if count > LARGEST:
        raise CompressionError(f"no small twin of {model_class.__name__}: it still has {count:,} parameters")
    return small
