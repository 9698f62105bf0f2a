"""Whole layers: which of them a student keeps, and how a config and its modules follow."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from deepspeed.compression.families import LAYER_KEYS, config_of, on_meta
from deepspeed.compression.remove import attribute_changes
from deepspeed.compression.twin import layers_of, with_layers
from deepspeed.errors import CompressionError


def block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Lists of repeated blocks, the longest first."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1
    }
    inner = {name for name in lists for other in lists if name.startswith(f"{other}.")}
    return dict(sorted(((n, m) for n, m in lists.items() if n not in inner), key=lambda one: -len(one[1])))


def keep_layers(model: nn.Module, prefix: str, keep: list[int]) -> nn.Module:
    """Take layers out of a plain model, in place; what the config lists by layer and every `layer_idx` follow.

    Args:
        model: whole, not sharded.
        prefix: name of its list of blocks.
        keep: indices that stay, in order.

    Returns:
        The model.

    Raises:
        CompressionError: there is no such list, or a layer that is not there is named.
    """
    blocks = block_list(model, prefix)
    bad = [index for index in keep if not 0 <= index < len(blocks)]
    if bad or len(set(keep)) != len(keep):
        raise CompressionError(f"layers {keep} of '{prefix}', which has {len(blocks)}: name each one once, from 0")
    config, total = config_of(model), len(blocks)
    kept = [blocks[index] for index in keep]
    home, _, last = prefix.rpartition(".")
    setattr(model.get_submodule(home), last, nn.ModuleList(kept))
    if config is None:
        return model
    if layers_of(config) != total:
        raise CompressionError(f"{type(config).__name__} says {layers_of(config)} layers, and '{prefix}' has {total}")
    small = with_layers(config, keep)
    base, after = on_meta(type(model), config), on_meta(type(model), small)
    moved = {f"{prefix}.{new}": f"{prefix}.{old}" for new, old in enumerate(keep)}
    _follow(model, base, after, moved)
    for key, value in vars(small).items():
        if vars(config).get(key) != value:
            vars(config)[key] = copy.deepcopy(value)
    for key in LAYER_KEYS:
        if getattr(small, key, None) != getattr(config, key, None):
            setattr(config, key, getattr(small, key))
    return model


def _follow(model: nn.Module, base: nn.Module, after: nn.Module, moved: dict[str, str]) -> None:
    """Attributes as the smaller class has them: of kept blocks by their new place."""
    old = dict(base.named_modules())
    for name, module in after.named_modules():
        home = next((new for new in moved if name == new or name.startswith(f"{new}.")), None)
        before = name if home is None else moved[home] + name[len(home) :]
        if before not in old:
            continue
        pair = attribute_changes(_shell(old[before]), _shell(module))
        for key, value in pair.get("", {}).items():
            setattr(model.get_submodule(name), key, value)


def _shell(module: nn.Module) -> nn.Module:
    """A module's own attributes, without its children."""
    made = nn.Module()
    vars(made).update({k: v for k, v in vars(module).items() if k not in ("_modules", "_parameters", "_buffers")})
    return made


def block_list(model: nn.Module, prefix: str | None) -> nn.ModuleList:
    """The list of blocks of that name.

    Raises:
        CompressionError: there is none.
    """
    found = block_lists(model)
    try:
        named: Any = model.get_submodule(prefix) if prefix else None
    except AttributeError:
        named = None
    if not isinstance(named, (nn.ModuleList, nn.Sequential)):
        raise CompressionError(f"'{prefix}' is no list of blocks of {type(model).__name__}; there is {list(found)}")
    return named  # pyright: ignore[reportReturnType]


@torch.no_grad()
def block_influence(model: nn.Module, prefix: str, batches: list[dict[str, Any]]) -> list[float]:
    """How much each block turns its input: one minus the cosine of input and output, mean over tokens.

    Args:
        model: whole.
        prefix: its list of blocks.
        batches: keyword arguments of forward.

    Returns:
        One number per block; the smallest are the least missed.
    """
    blocks = block_list(model, prefix)
    sums, counts, hooks = [0.0] * len(blocks), [0] * len(blocks), []

    def watch(index: int) -> Any:
        def hook(module: nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
            given = inputs[0] if inputs else kwargs["hidden_states"]
            made = output[0] if isinstance(output, tuple) else output
            cosine = nn.functional.cosine_similarity(given.float(), made.float(), dim=-1)
            sums[index] += float((1 - cosine).sum())
            counts[index] += cosine.numel()

        return hook

    was = model.training
    model.eval()
    try:
        hooks += [b.register_forward_hook(watch(i), with_kwargs=True) for i, b in enumerate(blocks)]
        for batch in batches:
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was)
    return [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]


def by_influence(influence: list[float], keep: int) -> list[int]:
    """The layers that stay: the first always, and those that turn their input most.

    Args:
        influence: of `block_influence`.
        keep: how many.
    """
    order = sorted(range(1, len(influence)), key=lambda index: -influence[index])
    return sorted([0, *order[: keep - 1]])
