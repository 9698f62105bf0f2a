"""Removal of layers: from a model, by index; from an engine in training, by index or block influence."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.sharded_view import Exchange
from deepspeed.compression.pruning.structured_removal import Removal, changed_attributes
from deepspeed.compression.pruning.transformers_groups import dense_class, inside, on_meta, shapes_of
from deepspeed.compression.pruning.verify import with_layers
from deepspeed.config.sections.compression import LayerReduction
from deepspeed.errors import CompressionError
from deepspeed.foundation.log import log_rank0
from deepspeed.foundation.transformers_model import LAYER_KEYS, block_lists, config_of, text_config

REDUCED = "_ds_layers_reduced"  # attribute of a model: `student_initialization` has copied its teacher's layers
LOOKS = 8  # number of applied steps, directly before the removal, that measure influence


def keep_layers(model: nn.Module, prefix: str, keep: list[int]) -> nn.Module:
    """Remove layers from a model, in place; in Transformers models, config and layer indices are updated.

    Args:
        model: a plain model, or a wrapper of a Transformers model. An engine's parameters are not removed; use
            `compression_training.layer_reduction` for an engine.
        prefix: name of the model's list of blocks.
        keep: indices of the kept layers, in their new order.

    Returns:
        The model.

    Raises:
        CompressionError: no such list exists, `keep` is empty, repeated or out of range, or the model cannot be built.
    """
    blocks = block_list(model, prefix)
    checked = check_layers(model, prefix, keep)
    kept_blocks = {str(index): blocks[old] for index, old in enumerate(keep)}
    blocks._modules.clear()
    blocks._modules.update(kept_blocks)
    if checked is None:
        return model
    outer, inner = inside(model, prefix)
    (small, base, after), short = checked, prefix.removeprefix(outer)
    _update_attributes(inner, base, after, {f"{short}.{new}": f"{short}.{old}" for new, old in enumerate(keep)})
    config = inner.config
    for key, value in vars(small).items():
        if vars(config).get(key) != value:
            vars(config)[key] = copy.deepcopy(value)
    for key in LAYER_KEYS:
        if getattr(small, key, None) != getattr(config, key, None):
            setattr(config, key, getattr(small, key))
    return model


def check_layers(model: nn.Module, prefix: str, keep: list[int]) -> tuple[Any, nn.Module, nn.Module] | None:
    """Check the arguments of `keep_layers`; the model does not change.

    Returns:
        Smaller config, model of the present config, model of the smaller config, both on the meta device; None if the
        list is in no Transformers model.

    Raises:
        CompressionError: as in `keep_layers`.
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
    for new, old in enumerate(keep):  # blocks may differ, like the first block of T5
        shapes, place = _block_shapes(blocks[old]), _block_shapes(after.get_submodule(f"{short}.{new}"))
        if shapes != place:
            raise CompressionError(
                f"{prefix}.{old} cannot take another's place: they differ in "
                f"{sorted(shapes.keys() ^ place.keys())[:2] or 'shapes'}; keep the first block where it is"
            )
    outside, outside_after = (  # tables may have a column for each layer
        {name: param.shape for name, param in twin.named_parameters() if not name.startswith(f"{short}.")}
        for twin in (base, after)
    )
    wrong = sorted(n for n in outside.keys() | outside_after.keys() if outside.get(n) != outside_after.get(n))
    if wrong:
        raise CompressionError(f"{wrong[0]} has another shape, or is not there, in a model with fewer blocks")
    return small, base, after


def _config_with_depth(model_class: type[nn.Module], config: Any, prefix: str, total: int, keep: list[int]) -> Any:
    """Return a config with the layers `keep` in the list `prefix`; other lists (such as an encoder's) are unchanged.

    Raises:
        CompressionError: the config has no such value, or `generate` would create a cache of too few layers.
    """
    named = tuple(key for key in LAYER_KEYS if getattr(config, key, None) == total)
    wanted = {name: len(blocks) for name, blocks in block_lists(on_meta(model_class, config)).items()}
    wanted[prefix] = len(keep)
    for keys in [*((key,) for key in named), named]:
        small = with_layers(config, keep, keys, total)
        try:
            modules: dict[str, Any] = dict(on_meta(model_class, small).named_modules())
        except CompressionError:
            continue
        if not all(name in modules and len(modules[name]) == size for name, size in wanted.items()):
            continue
        # Transformers gives the cache of some decoders the depth of the encoder.
        decoder = max((size for name, size in wanted.items() if "decoder" in name), default=0)
        two_stacks = getattr(small, "is_encoder_decoder", False)
        cached = getattr(text_config(small, decoder=True), "num_hidden_layers", decoder) if two_stacks else decoder
        if cached < decoder:
            raise CompressionError(
                f"generate makes a cache of {cached} layers from {type(small).__name__}, and the decoder has "
                f"{decoder}: keep at most {cached} layers of the decoder first"
            )
        return small
    raise CompressionError(f"{type(config).__name__} has no number that says the {total} blocks of '{prefix}' alone")


def _block_shapes(block: nn.Module) -> dict[str, torch.Size]:
    """Return the unsharded shapes of a block's parameters by name, without LoRA adapters."""
    shapes = {name: torch.Size(getattr(p, "ds_shape", p.shape)) for name, p in block.named_parameters()}
    return {name.replace(".base_layer.", "."): shape for name, shape in shapes.items() if ".lora_" not in name}


def _update_attributes(model: nn.Module, base: nn.Module, after: nn.Module, moved: dict[str, str]) -> None:
    """Set the attributes of modules that depend on the number or position of layers.

    Args:
        model: the model with fewer layers.
        base: model of the old config, on the meta device.
        after: model of the new config, on the meta device.
        moved: old names of the kept blocks, by new names.
    """
    old = dict(base.named_modules())
    for name, module in after.named_modules():
        home = next((new for new in moved if name == new or name.startswith(f"{new}.")), None)
        before = old.get(name if home is None else moved[home] + name[len(home) :])
        if before is None:
            continue
        target: Any = model.get_submodule(name)
        for key, value in changed_attributes(before, module).items():
            setattr(target, key, value)
        # A stack may have its own config, like the decoder of T5, from which caches are created.
        configs = [config_of(owner) for owner in (target, before, module)]
        if all(config is not None for config in configs) and target.config is not before.config:
            for key, value in vars(module.config).items():  # pyright: ignore[reportArgumentType]
                if vars(before.config).get(key) != value:  # pyright: ignore[reportArgumentType]
                    vars(target.config)[key] = copy.deepcopy(value)


def block_list(model: nn.Module, prefix: str | None) -> nn.ModuleList:
    """Return the list of blocks named `prefix`; CompressionError if it is not a ModuleList or Sequential."""
    try:
        named: Any = model.get_submodule(prefix) if prefix else None
    except AttributeError:
        named = None
    if not isinstance(named, (nn.ModuleList, nn.Sequential)):
        raise CompressionError(
            f"'{prefix}' is no list of blocks of {type(model).__name__}; there is {list(block_lists(model))}"
        )
    return named  # pyright: ignore[reportReturnType]


def have_left(model: nn.Module, layers: dict[str, list[int]]) -> bool:
    """Whether these lists of blocks are already shortened, so that their removal cannot be repeated.

    Args:
        model: the model.
        layers: indices of the kept layers, by list of blocks; without lists, the result is False.
    """
    try:
        return bool(layers) and all(
            len(block_list(model, name)) == len(keep) <= max(keep) for name, keep in layers.items()
        )
    except CompressionError:
        return False


@torch.no_grad()
def block_influence(model: nn.Module, prefix: str, batches: list[dict[str, Any]]) -> list[float]:
    """Compute the influence of each block: the mean over tokens of 1 - cos(input, output) (arXiv:2403.03853).

    Blocks with the lowest influence are the best to remove.

    Args:
        model: the model; it runs in evaluation mode.
        prefix: name of its list of blocks.
        batches: keyword arguments of forward, for each batch.

    Returns:
        Influence of each block, from 0 to 2.

    Raises:
        CompressionError: there is no such list, or a block's output has another shape than its input.
    """
    watch, was_training = InfluenceWatch(block_list(model, prefix), training=False), model.training
    model.eval()
    try:
        for batch in batches:
            model(**batch)
    finally:
        watch.remove()
        model.train(was_training)
    return watch.means()


class InfluenceWatch:
    """Hooks that sum 1 - cos(input, output) of each block over tokens; CompressionError if the two shapes differ.

    Args:
        blocks: list of blocks.
        training: True: calls in training mode count; False: calls in evaluation mode count.
    """

    def __init__(self, blocks: nn.ModuleList, training: bool) -> None:
        self._training = training
        self.sums = torch.zeros(2, len(blocks), dtype=torch.float64)  # rows: sum of (1 - cosine), number of tokens
        self._hooks = [
            block.register_forward_hook(self._hook(index), with_kwargs=True) for index, block in enumerate(blocks)
        ]

    def _hook(self, index: int) -> Any:
        @torch.no_grad()
        def add(module: nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
            if module.training is not self._training:
                return
            after = output[0] if isinstance(output, (tuple, list)) else output
            before = inputs[0] if inputs else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
            shapes = [value.shape if isinstance(value, torch.Tensor) else None for value in (before, after)]
            if shapes[0] != shapes[1] or not shapes[0]:
                raise CompressionError(
                    f"a {type(module).__name__} gives another shape than it is given, so its influence is not known: "
                    f"name the layers that stay (teacher_layer)"
                )
            cosine = nn.functional.cosine_similarity(before.float(), after.float(), dim=-1).flatten()
            cosine = cosine[cosine.isfinite()]  # an overflow in fp16 would make the whole sum infinite
            self.sums[0, index] += float((1 - cosine).sum())
            self.sums[1, index] += cosine.numel()

        return add

    def means(self) -> list[float]:
        """Return the mean influence of each block; 0 for a block that has not run."""
        return (self.sums[0] / self.sums[1].clamp(min=1)).tolist()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def by_influence(influence: list[float], keep: int) -> list[int]:
    """Return the sorted indices of `keep` layers: the first one, and those with the largest influence."""
    order = sorted(range(1, len(influence)), key=lambda index: -influence[index])
    return sorted([0, *order[: keep - 1]])


class Depth:
    """Schedule of the removal of layers from an engine.

    Args:
        model: the engine's module.
        section: `compression_training.layer_reduction`.

    Raises:
        CompressionError: the list of blocks does not exist, or the model cannot have the kept layers.
    """

    def __init__(self, model: nn.Module, section: LayerReduction) -> None:
        self.model, self.section = model, section
        if section.module_name_prefix is None:
            self.prefix = next(iter(block_lists(model)), "")
            if not self.prefix:
                raise CompressionError(
                    f"layer_reduction: {type(model).__name__} has no list of two or more equal blocks; "
                    f"module_name_prefix names one"
                )
        else:
            blocks = block_list(model, section.module_name_prefix)
            self.prefix = next(name for name, module in model.named_modules() if module is blocks)
        self.total = len(block_list(model, self.prefix))
        self._watch: InfluenceWatch | None = None
        self._sums = torch.zeros(2, self.total, dtype=torch.float64)  # sums over all ranks
        named, count = section.teacher_layer, section.keep_number_layer
        if named is None and (count or 0) > self.total:
            what = f"keep_number_layer is {count}, and {self.prefix} has {self.total} layers"
            raise CompressionError(f"layer_reduction: {what}")
        self._kept = count or 0 if named is None else len(named)
        self.over = self._kept == self.total
        self._warned = False  # warned that influence is unknown
        if not self.over:
            check_layers(model, self.prefix, list(range(self._kept)) if named is None else named)
        self._announce()

    @property
    def due(self) -> int:
        """Number of applied steps before the removal; at least one if layers are chosen by influence."""
        return max(self.section.schedule_offset, 1 if self.section.teacher_layer is None else 0)

    def _announce(self) -> None:
        if self.over:
            log_rank0(f"layer_reduction: {self.prefix} has {self.total} layers already, and none leaves")
            return
        named = self.section.teacher_layer
        how = "picked by block influence" if named is None else f"{named} stay"
        gone = [layer for layer in range(self.total) if named is None or layer not in named]
        gone = gone[: self.total - self._kept]
        marks = tuple(f"{self.prefix}.{layer}." for layer in gone)
        count = sum(shape.numel() for name, shape in shapes_of(self.model).items() if name.startswith(marks))
        log_rank0(
            f"layer_reduction: {len(gone)} of {self.total} layers of {self.prefix} leave the engine after step "
            f"{self.due} ({how}): {count:,} parameters, {4 * count / 2**20:.1f} MiB in fp32"
        )

    def after_step(self, step: int, exchange: Exchange) -> Removal | None:
        """Return the removal that is due after `step` applied steps, or None. Collective over `exchange`."""
        if self.over:
            return None
        if self._watch is not None:
            row = exchange.sum(self._watch.sums.view(-1), "influence of blocks")
            self._sums += row.view_as(self._sums)
            self._watch.sums.zero_()
        # influence is known once a block has run on any rank
        if step >= self.due and (self.section.teacher_layer is not None or bool(self._sums[1].any())):
            return self._removal()
        self._measure(step)
        return None

    def _measure(self, step: int) -> None:
        """Add hooks to the blocks from `LOOKS` steps before the removal, if layers are chosen by influence."""
        if self.over or self.section.teacher_layer is not None or step < self.due - LOOKS:
            return
        if self._watch is None:
            self._watch = InfluenceWatch(block_list(self.model, self.prefix), training=True)
        elif step >= self.due and not self._warned:
            self._warned = True
            log_rank0(
                f"layer_reduction: no call in training mode has shown the influence of {self.prefix}: none leaves yet"
            )

    def _removal(self) -> Removal:
        keep = self.section.teacher_layer
        if keep is None:
            influence = (self._sums[0] / self._sums[1].clamp(min=1)).tolist()
            keep = by_influence(influence, self._kept)
            shown = ", ".join(f"{layer}: {value:.3f}" for layer, value in enumerate(influence))
            log_rank0(f"layer_reduction: layers {keep} stay; influence of blocks, one minus the cosine: {shown}")
            check_layers(self.model, self.prefix, keep)
        text = f"{self.total - len(keep)} of {self.total} layers of {self.prefix}"
        return Removal(layers={self.prefix: list(keep)}, text=text)

    def left(self) -> None:
        """Record that the layers have been removed, in this run or before a resume."""
        self.over = True
        self.remove()

    def remove(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of influence, which are equal on all ranks."""
        return {"sums": self._sums.clone()}

    def load_state_dict(self, saved: dict[str, Any] | None, step: int) -> None:
        """Load the state after `step` applied steps; `saved` is None if the saved run had no layer removal."""
        self.remove()  # the hooks have sums of another run
        self._sums.zero_()
        if saved is not None and saved["sums"].shape == self._sums.shape:
            self._sums.copy_(saved["sums"])
        self._measure(step)
