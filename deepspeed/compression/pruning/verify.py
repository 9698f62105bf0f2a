"""Verifies a removal on a small copy: the shrunken model computes what the masked one computes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.transformers_groups import (
    Shrink,
    joined,
    on_meta,
    relaid,
)
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

TOLERANCE = tolerance(torch.float32, 0.1)  # of the largest output
FLOOR = 1e-12  # the least output that a difference is divided by
LARGEST = 40_000_000  # parameters of a twin


def with_layers(config: Any, keep: list[int], keys: tuple[str, ...] = LAYER_KEYS, total: int | None = None) -> Any:
    """A copy of the config with some of the layers; what it lists by layer is cut alike.

    Args:
        config: of a Transformers model.
        keep: indices of the layers that stay.
        keys: the numbers of layers that are meant; default: all that are equal.
        total: layers there are; default: what the config says first.
    """
    made = copy.deepcopy(config)
    total = layers_of(config) if total is None else total
    for key in keys:
        if getattr(made, key, None) == total and key not in getattr(made, "attribute_map", {}):
            setattr(made, key, len(keep))
    for key, value in list(vars(made).items()):
        if isinstance(value, (list, tuple)) and len(value) == total and key not in ("architectures", "attention_types"):
            setattr(made, key, type(value)(value[at] for at in keep))
    if isinstance(getattr(made, "attention_types", None), list) and hasattr(made, "attention_layers"):
        made.attention_types = [[[kind], 1] for kind in made.attention_layers]
    return made


def layers_of(config: Any) -> int:
    """How many layers a config says.

    Raises:
        CompressionError: it says none.
    """
    if (count := config_number(config, LAYER_KEYS)) is None:
        raise CompressionError(f"{type(config).__name__} says no number of layers")
    return count


def build(model_class: type[nn.Module], config: Any) -> nn.Module:
    """A real model in evaluation mode, in fp32, with values that hide nothing: no zeros, no ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = model_class(copy.deepcopy(config)).float().eval()
        except Exception as error:  # a model class refuses a config in any way it likes
            raise CompressionError(f"a twin of {model_class.__name__} cannot be built: {error}") from error
        with torch.no_grad():
            for name, param in model.named_parameters():
                noise = torch.randn(param.shape) * (0.05 if param.dim() < 2 else 0.5 / param.shape[-1] ** 0.5)
                param.copy_(noise + 1 if "norm" in name.lower() and param.dim() == 1 and "bias" not in name else noise)
    return model


def inputs_for(model: nn.Module, config: Any) -> dict[str, Any]:
    """Inputs a Transformers model takes.

    Raises:
        CompressionError: they cannot be made up.
    """
    try:
        return made_up_inputs(model, config, 2, 8)
    except ArgumentError as error:
        raise CompressionError(str(error)) from error


def outputs(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    """All floating outputs in one row."""
    with evaluating(model):
        torch.manual_seed(2)
        try:
            found = model(**given)
        except Exception as error:
            raise CompressionError(f"{type(model).__name__} does not run: {type(error).__name__}: {error}") from error
    values = found.to_tuple() if hasattr(found, "to_tuple") else found if isinstance(found, tuple) else (found,)
    flat = [value.reshape(-1) for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return torch.cat(flat)


def flags_at_random(shrink: Shrink, ratio: float, seed: int = 3) -> list[torch.Tensor]:
    """Units that stay, equally many in every family and block."""
    generator = torch.Generator().manual_seed(seed)
    kept = kept_per_block(shrink, ratio)
    return [
        family.choose(torch.rand(family.size, generator=generator, dtype=torch.float64), kept * family.blocks)
        for family in shrink.families
    ]


def kept_per_block(shrink: Shrink, ratio: float) -> int:
    """Units that stay of each run of them: one at least."""
    family = shrink.families[0]
    width = family.size // family.blocks
    return max(1, min(width, -int(-round(width * ratio, 6) // 1)))


def small_state(model: nn.Module, shrink: Shrink, keeps: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of a plain model after removal."""
    state = {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()}
    shared: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        shared.setdefault(id(value), []).append(name)
    names = {name: alias for aliases in shared.values() for name in aliases for alias in aliases}
    by_first = {name: group for group in shared.values() for name in group}
    for family, keep in zip(shrink.families, keeps, strict=True):
        for slot in family.slots:
            cut = slot.select(state[slot.name], keep)
            for alias in by_first.get(slot.name, [names.get(slot.name, slot.name)]):
                state[alias] = cut
    return state


def masked(model: nn.Module, shrink: Shrink, keeps: list[torch.Tensor]) -> nn.Module:
    """A copy of a plain model whose units are zero."""
    made = copy.deepcopy(model)
    params = dict(made.named_parameters())
    with torch.no_grad():
        for family, keep in zip(shrink.families, keeps, strict=True):
            for name in family.names():
                flat = params[name].view(-1)
                flat.mul_(family.flags(name, params[name].shape, (0, flat.numel()), keep))
    return made


def removed(model: nn.Module, config: Any, shrink: Shrink, keeps: list[torch.Tensor]) -> nn.Module:
    """A new plain model, built from the smaller config and filled with what is left."""
    per_block = int(keeps[0].sum()) // shrink.families[0].blocks
    width = shrink.families[0].size // shrink.families[0].blocks
    small = type(model)(shrink.config(config, per_block, width)).float().eval()
    missing = small.load_state_dict(small_state(model, shrink, keeps), strict=False)
    wrong = [name for name in missing.missing_keys if name in dict(small.named_parameters())]
    if wrong:
        raise CompressionError(f"{type(model).__name__} has other parameters when smaller: {wrong[:3]}")
    return small


def prove(model_class: type[nn.Module], config: Any, find: Any, shrink: Shrink) -> tuple[Shrink, float]:
    """Settle the layout: the one by which a twin with units removed equals the twin with units masked.

    Args:
        model_class: of the model.
        config: its config.
        find: gives the shrinks of a model and its config.
        shrink: which of them.

    Returns:
        The shrink with the layout that holds, and the distance found.

    Raises:
        CompressionError: no layout holds.
    """
    config, twin, same = twin_of(model_class, config, find, shrink)
    given = inputs_for(twin, config)
    dense, tried = outputs(twin, given), []
    for join, layout in itertools.product((False, True), range(_layouts(shrink))):
        laid = relaid(joined(same) if join else same, layout)
        found = _try(twin, config, laid, given, dense)
        tried.append(found)
        if found <= TOLERANCE:
            return relaid(joined(shrink) if join else shrink, layout), found
    raise CompressionError(
        f"removed is not masked on a twin of {model_class.__name__}: differences {[f'{d:.2g}' for d in tried]}"
    )


def twin_of(model_class: type[nn.Module], config: Any, find: Any, shrink: Shrink) -> tuple[Any, nn.Module, Shrink]:
    """(config, small twin, the same shrink of it); arguments as of `prove`.

    Raises:
        CompressionError: there is no small twin, or it has no such units.
    """
    config = twin_config(model_class, config)
    twin = build(model_class, config)
    same = next((one for one in find(twin, config) if set(one.unit) == set(shrink.unit)), None)
    if same is None:
        raise CompressionError(f"a twin of {model_class.__name__} has no such units")
    return config, twin, same


def _layouts(shrink: Shrink) -> int:
    return max([1, *(len(slot.layouts) for family in shrink.families for slot in family.slots)])


def _try(twin: nn.Module, config: Any, shrink: Shrink, given: dict[str, Any], dense: torch.Tensor) -> float:
    """How far removed is from masked."""
    keeps = flags_at_random(shrink, 0.5)
    try:
        small = removed(twin, config, shrink, keeps)
        without = outputs(masked(twin, shrink, keeps), given)
        found = relative_difference(outputs(small, given), without, floor=FLOOR)
    except (CompressionError, RuntimeError, ValueError, IndexError) as error:
        raise CompressionError(f"the smaller twin of {type(twin).__name__} fails: {error}") from error
    if relative_difference(dense, without, floor=FLOOR) < TOLERANCE:
        raise CompressionError(f"masking {shrink.kind} of {type(twin).__name__} changes nothing: there is no proof")
    return found


def twin_config(model_class: type[nn.Module], config: Any) -> Any:
    """A config of few layers and a small vocabulary, which keeps the kinds of layers and the ratios of heads."""
    total = layers_of(config)
    made = with_layers(config, list(range(min(total, 2)))) if total > 2 else copy.deepcopy(config)
    if sum(p.numel() for p in on_meta(model_class, made).parameters()) <= LARGEST:
        return made
    narrow = _narrow(made)
    try:
        small = sum(p.numel() for p in on_meta(model_class, narrow).parameters())
    except CompressionError as error:
        raise CompressionError(f"no small twin of {model_class.__name__}: {error}") from error
    if small > LARGEST:
        raise CompressionError(f"no small twin of {model_class.__name__}: it still has {small:,} parameters")
    return narrow


def _narrow(config: Any) -> Any:
    """The same heads, of size 8, and what goes with that."""
    made = copy.deepcopy(config)
    heads = config_number(made, HEAD_KEYS) or 8
    for keys, value in ((WIDTH_KEYS, 8 * heads), (FFN_KEYS, 96), (HEAD_DIM_KEYS, 8), (("vocab_size",), 512)):
        for key in keys:
            if isinstance(getattr(made, key, None), int) and key not in getattr(made, "attribute_map", {}):
                setattr(made, key, value)
    return made
