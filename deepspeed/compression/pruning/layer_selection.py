"""Selects the layers that a student keeps, and adapts config and modules."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.structured_removal import attribute_changes
from deepspeed.compression.pruning.transformers_groups import dense_class, on_meta
from deepspeed.compression.pruning.unwrap import inside
from deepspeed.compression.pruning.verify import with_layers
from deepspeed.errors import CompressionError
from deepspeed.foundation.transformers_model import LAYER_KEYS, block_lists, config_of, text_config


def keep_layers(model: nn.Module, prefix: str, keep: list[int]) -> nn.Module:
    """Take layers out of a model, in place; what the config lists by layer and every `layer_idx` follow.

    Args:
        model: a plain one, or what is around the model of Transformers. Of an engine's, only the modules change here:
            an engine has its own way (`compression_training.layer_reduction`).
        prefix: name of its list of blocks; the list stays the object it is.
        keep: indices that stay, in order.

    Returns:
        The model.

    Raises:
        CompressionError: there is no such list, a layer that is not there is named, or the smaller model is no model of
            its class.
    """
    blocks = block_list(model, prefix)
    told = check_layers(model, prefix, keep)
    kept = [blocks[index] for index in keep]
    blocks._modules.clear()
    blocks._modules.update({str(at): block for at, block in enumerate(kept)})
    if told is None:
        return model
    outer, inner = inside(model, prefix)
    (small, base, after), short = told, prefix.removeprefix(outer)
    _follow(inner, base, after, {f"{short}.{new}": f"{short}.{old}" for new, old in enumerate(keep)})
    config = inner.config
    for key, value in vars(small).items():
        if vars(config).get(key) != value:
            vars(config)[key] = copy.deepcopy(value)
    for key in LAYER_KEYS:
        if getattr(small, key, None) != getattr(config, key, None):
            setattr(config, key, getattr(small, key))
    return model


def check_layers(model: nn.Module, prefix: str, keep: list[int]) -> tuple[Any, nn.Module, nn.Module] | None:
    """See that layers can be taken out, and change nothing.

    Args:
        model: as `keep_layers` takes it.
        prefix: likewise.
        keep: likewise.

    Returns:
        (the smaller config, a model of the config and one of the smaller, both without memory); None where no config
        says how many layers there are.

    Raises:
        CompressionError: as of `keep_layers`.
    """
    blocks = block_list(model, prefix)
    bad = [index for index in keep if not 0 <= index < len(blocks)]
    if bad or len(set(keep)) != len(keep) or not keep:
        raise CompressionError(f"layers {keep} of '{prefix}', which has {len(blocks)}: name each one once, from 0")
    outer, inner = inside(model, prefix)
    config, short = config_of(inner), prefix.removeprefix(outer)
    if config is None or not prefix.startswith(outer):
        return None
    small = _config_with_depth(dense_class(inner), config, short, len(blocks), keep)
    base, after = on_meta(dense_class(inner), config), on_meta(dense_class(inner), small)
    for new, old in enumerate(keep):
        _check_same_parameters(f"{prefix}.{old}", blocks[old], after.get_submodule(f"{short}.{new}"))
    _check_no_outside_parameters(base, after, short)
    return small, base, after


def _config_with_depth(model_class: type[nn.Module], config: Any, prefix: str, total: int, keep: list[int]) -> Any:
    """The config whose model has so many blocks in that list, and in no other: an encoder beside a decoder stays.

    Raises:
        CompressionError: no number of the config says how long the list is.
    """
    named = tuple(key for key in LAYER_KEYS if getattr(config, key, None) == total)
    wanted = {name: len(blocks) for name, blocks in block_lists(on_meta(model_class, config)).items()}
    wanted[prefix] = len(keep)
    for keys in [*((key,) for key in named), named]:
        small = with_layers(config, keep, keys, total)
        try:
            made: dict[str, Any] = dict(on_meta(model_class, small).named_modules())
        except CompressionError:
            continue
        if all(name in made and len(made[name]) == size for name, size in wanted.items()):
            _check_cache_depth(small, max((n for name, n in wanted.items() if "decoder" in name), default=0))
            return small
    raise CompressionError(f"{type(config).__name__} has no number that says the {total} blocks of '{prefix}' alone")


def _check_cache_depth(config: Any, decoder: int) -> None:
    """Transformers makes the cache of some decoders as deep as the encoder is."""
    if not getattr(config, "is_encoder_decoder", False):
        return
    cached = getattr(text_config(config, decoder=True), "num_hidden_layers", decoder)
    if cached < decoder:
        raise CompressionError(
            f"generate makes a cache of {cached} layers from {type(config).__name__}, and the decoder has {decoder}: "
            f"keep at most {cached} layers of the decoder first"
        )


def _check_same_parameters(name: str, block: nn.Module, place: nn.Module) -> None:
    """A block that has other parameters than the one in whose place it comes, as the first one of a T5 has."""
    one, two = _shapes_within(block), _shapes_within(place)
    if one != two:
        raise CompressionError(
            f"{name} cannot take another's place: they differ in {sorted(one.keys() ^ two.keys())[:2] or 'shapes'}; "
            f"keep the first block where it is"
        )


def _shapes_within(module: nn.Module) -> dict[str, torch.Size]:
    """Shapes of a module's parameters, without adapters that stand beside them."""
    found = {n: torch.Size(getattr(p, "ds_shape", p.shape)) for n, p in module.named_parameters()}
    return {n.replace(".base_layer.", "."): shape for n, shape in found.items() if ".lora_" not in n}


def _check_no_outside_parameters(base: nn.Module, after: nn.Module, prefix: str) -> None:
    """Parameters outside of the layers whose shape depends on their number, as tables with a column for each."""
    one, two = (
        {n: p.shape for n, p in model.named_parameters() if not n.startswith(f"{prefix}.")} for model in (base, after)
    )
    wrong = sorted(n for n in one.keys() | two.keys() if one.get(n) != two.get(n))
    if wrong:
        raise CompressionError(f"{wrong[0]} has another shape, or is not there, in a model with fewer blocks")


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
        _follow_config(model.get_submodule(name), old[before], module)


def _follow_config(module: Any, base: Any, after: Any) -> None:
    """A stack may have a config of its own, as the decoder of a T5: caches are made by it."""
    if any(config_of(one) is None for one in (module, base, after)) or module.config is base.config:
        return
    before, now = vars(base.config), vars(after.config)
    for key, value in now.items():
        if before.get(key) != value:
            vars(module.config)[key] = copy.deepcopy(value)


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


def have_left(model: nn.Module, layers: dict[str, list[int]]) -> bool:
    """Whether lists of blocks are as long already as after a removal, and too short for it.

    Args:
        model: any.
        layers: by list of blocks, the indices that stay; none: False.
    """
    try:
        return bool(layers) and all(
            len(block_list(model, name)) == len(keep) <= max(keep) for name, keep in layers.items()
        )
    except CompressionError:
        return False


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
    watch, was = InfluenceWatch(block_list(model, prefix), training=False), model.training
    model.eval()
    try:
        for batch in batches:
            model(**batch)
    finally:
        watch.remove()
        model.train(was)
    return watch.means()


class InfluenceWatch:
    """Adds up how much each block turns its input, while hooks are on them.

    Args:
        blocks: a list of repeated blocks.
        training: calls in which mode count.
    """

    def __init__(self, blocks: nn.ModuleList, training: bool) -> None:
        self._training = training
        self.sums = torch.zeros(2, len(blocks), dtype=torch.float64)  # of one minus the cosine, and how many there were
        self._hooks = [block.register_forward_hook(self._hook(at), with_kwargs=True) for at, block in enumerate(blocks)]

    def _hook(self, at: int) -> Any:
        @torch.no_grad()
        def add(module: nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
            if module.training is not self._training:
                return
            made = output[0] if isinstance(output, (tuple, list)) else output
            given = inputs[0] if inputs else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
            shapes = [value.shape if isinstance(value, torch.Tensor) else None for value in (given, made)]
            if shapes[0] != shapes[1] or not shapes[0]:
                raise CompressionError(
                    f"a {type(module).__name__} gives another shape than it is given, so its influence is not known: "
                    f"name the layers that stay (teacher_layer)"
                )
            cosine = nn.functional.cosine_similarity(given.float(), made.float(), dim=-1).flatten()
            cosine = cosine[cosine.isfinite()]  # what overflows in fp16 says nothing, and would hide all the rest
            self.sums[0, at] += float((1 - cosine).sum())
            self.sums[1, at] += cosine.numel()

        return add

    def means(self) -> list[float]:
        """One number per block."""
        return (self.sums[0] / self.sums[1].clamp(min=1)).tolist()

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


def by_influence(influence: list[float], keep: int) -> list[int]:
    """The layers that stay: the first always, and those that turn their input most.

    Args:
        influence: of `block_influence`.
        keep: how many.
    """
    order = sorted(range(1, len(influence)), key=lambda index: -influence[index])
    return sorted([0, *order[: keep - 1]])
