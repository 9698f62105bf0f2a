"""Dependency groups of whole experts, read from the model's config and verified.

An expert has no masked phase. A router still picks an expert whose weights are zero, so masked is not removed; experts
leave at once. What is proven on a twin is that the pieces found belong together: a model whose experts were put in
another order, piece by piece, is the model itself.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.dependency_groups import Family, ParameterSlice
from deepspeed.compression.pruning.transformers_groups import Shrink, on_meta, shapes_of
from deepspeed.compression.pruning.verify import (
    FLOOR,
    TOLERANCE,
    flags_at_random,
    inputs_for,
    outputs,
    removed,
    twin_of,
)
from deepspeed.errors import CompressionError
from deepspeed.foundation.equivalence import relative_difference
from deepspeed.foundation.transformers_model import EXPERT_KEYS, EXPERTS_PER_TOKEN_KEYS, config_number


def chosen_of(config: Any) -> int:
    """How many experts a token passes; 1 where the config does not say."""
    return config_number(config, EXPERTS_PER_TOKEN_KEYS) or 1


def expert_shrinks(model: nn.Module, config: Any) -> list[Shrink]:
    """Fewer experts, where the config says how many there are.

    Raises:
        CompressionError: a parameter changes by something else than their number.
    """
    base, told = on_meta(type(model), config), config.to_dict()
    for key in EXPERT_KEYS:
        count = getattr(config, key, None)
        less = max(chosen_of(config), (count or 0) // 2) if isinstance(count, int) else 0
        if key not in {*told, *vars(config)} or not isinstance(count, int) or less >= count:
            continue
        small = copy.deepcopy(config)
        setattr(small, key, less)
        families = _families(base, on_meta(type(model), small), count, less)
        if families:
            return [Shrink("experts", {key: count}, {key: 1}, families)]
    return []


def _families(base: nn.Module, small: nn.Module, count: int, less: int) -> list[Family]:
    """By layer: every axis that is as long as there are experts; buffers of routers too."""
    one, two = shapes_of(base), shapes_of(small)
    one |= {name: buffer.shape for name, buffer in base.named_buffers()}
    two |= {name: buffer.shape for name, buffer in small.named_buffers()}
    if one.keys() != two.keys():
        raise CompressionError(f"other parameters appear with fewer experts: {sorted(one.keys() ^ two.keys())[:3]}")
    found: dict[str, Family] = {}
    for name, shape in one.items():
        for axis, (size, left) in enumerate(zip(shape, two[name], strict=True)):
            if size == left:
                continue
            if (size, left) != (count, less):
                raise CompressionError(f"{name} changes from {size} to {left} with {less} of {count} experts")
            layer = name.rpartition(".")[0].rpartition(".")[0]  # of the block that holds router and experts
            family = found.setdefault(layer, Family("experts", layer, count, [], 1, True))
            family.slots.append(ParameterSlice.along_axis(name, axis, count, count, scored=len(shape) == 3))
    return list(found.values())


def prove_experts(model_class: type[nn.Module], config: Any, find: Any, shrink: Shrink) -> tuple[Shrink, float]:
    """See on a twin that experts put in another order change nothing, and that a smaller twin runs.

    Arguments are those of `twin.prove`.

    Returns:
        The shrink, and the distance found.

    Raises:
        CompressionError: the order matters, as where experts are routed by groups, or the smaller twin fails.
    """
    config, twin, same = twin_of(model_class, config, find, shrink)
    given = inputs_for(twin, config)
    router = {name for family in same.families for name in family.names()} - shapes_of(twin).keys()
    with torch.no_grad():
        for name in router:  # buffers start as zeros, which hide their order
            twin.get_buffer(name).copy_(torch.linspace(0.1, 0.3, twin.get_buffer(name).numel()))
    dense, other = outputs(twin, given), copy.deepcopy(twin)
    tensors = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    with torch.no_grad():
        for family in same.families:
            order = torch.arange(family.size).roll(1)
            for slot in family.slots:
                tensors[slot.name].copy_(tensors[slot.name].index_select(slot.axes[0], order))
    found = relative_difference(outputs(other, given), dense, floor=FLOOR)
    if found > TOLERANCE:
        raise CompressionError(
            f"experts of {model_class.__name__} cannot change places (difference {found:.2g}): something else knows "
            f"their order"
        )
    kept = max(chosen_of(config), same.families[0].size // 2)
    try:
        small = outputs(removed(twin, config, same, flags_at_random(same, kept / same.families[0].size)), given)
    except (CompressionError, RuntimeError, ValueError, IndexError) as error:
        raise CompressionError(f"a twin of {model_class.__name__} with fewer experts fails: {error}") from error
    if not torch.isfinite(small).all():
        raise CompressionError(f"a twin of {model_class.__name__} with fewer experts gives no numbers")
    last = {name.rpartition(".")[2] for name in router}
    for family in shrink.families:  # masks know parameters; buffers follow when the units leave
        family.slots = [slot for slot in family.slots if slot.name.rpartition(".")[2] not in last]
    return shrink, found
