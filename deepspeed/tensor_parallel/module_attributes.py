"""Reduction of integer attributes of modules, such as `num_heads`, to the numbers of one rank.

A forward may reshape by `self.num_heads` or split at `self.split_size`, and these numbers must fit the sliced weights.
The integers that a forward reads are recorded. Reduced values are tried until the sliced module passes this rank's
slice of the dense activations to its row-parallel layers.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import DeepSpeedError
from deepspeed.foundation.equivalence import relative_difference, tolerance
from deepspeed.foundation.log import describe_error
from deepspeed.tensor_parallel.channel_dependencies import (
    ChannelDependencies,
    ModuleInputs,
    changing,
    length_of,
    randomised,
    same_draws,
)
from deepspeed.tensor_parallel.layers import (
    SliceLocation,
    become_column,
    become_row,
    cut_tensor,
    is_linear,
    mark_partial,
)
from deepspeed.tensor_parallel.trace import lies_in, owner

TRIES = 600
Numbers = dict[tuple[str, str], int]  # by (module, attribute); "config.…" for attributes of its config


def cut_region(module: nn.Module, shares: ChannelDependencies, rank: int, slot_of: Any) -> None:
    """Slice the layers and tensors of a region for a rank, in place.

    Args:
        module: dense module of the region.
        shares: sharding of the region.
        rank: position of the rank, from 0.
        slot_of: function from the name of a layer to its `SliceLocation`.
    """
    modules, region = dict(module.named_modules()), shares.region
    params: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    columns = {owner(name): shares.tensors.get(name) for name in region.columns}
    inner = {owner(name) for name in region.inner}
    for name, share in columns.items():
        if share is not None:
            become_column(modules[name], slot_of(name), share.segments[rank], share.copied)
            modules[name].enters = name not in inner  # type: ignore[assignment]
    for row in region.rows:
        become_row(modules[owner(row)], slot_of(owner(row)), shares.rows[rank])
    for name, share in shares.tensors.items():
        if owner(name) in columns:
            continue
        if share.dim < 0:
            mark_partial(params[name])
        else:
            cut_tensor(params[name], share.dim, share.segments[rank])


def set_numbers(module: nn.Module, numbers: Numbers) -> None:
    """Set integer attributes of modules inside `module`; configs are copied first, as other modules may share them."""
    modules = dict(module.named_modules())
    for (name, attribute), value in numbers.items():
        target: Any = modules[name]
        if attribute.startswith("config."):
            attribute = attribute.removeprefix("config.")
            if "_ds_config" not in vars(target):
                target.config, target._ds_config = copy.copy(target.config), True
            target = target.config
        setattr(target, attribute, value)


def fit(module: nn.Module, shares: ChannelDependencies, calls: Sequence[ModuleInputs], rank: int) -> Numbers | str:
    """Search for integer attributes with which a rank's slice computes its channels of the dense module.

    Args:
        module: dense module of the region; not changed.
        shares: sharding of the region.
        calls: recorded calls of the module.
        rank: position of the rank, from 0.

    Returns:
        Values by (module name, attribute), only of reduced attributes; or the reason why none were found.
    """
    dense = randomised(module, 0)
    exact = [call.floating()[0] for call in calls]
    with spied(dense, shares.region.home) as numbers:
        wanted = [_read(dense, shares, own) for own in exact]
    alone = Axis("alone", (0,), 0, None, True)
    local = randomised(module, 0)
    cut_region(local, shares, rank, lambda name: SliceLocation(alone, name))
    own_part = lambda path, t: shares.inputs[path].pick(t, rank) if path in shares.inputs else t  # noqa: E731
    local.get_submodule(shares.region.home).register_forward_pre_hook(changing(own_part), with_kwargs=True)
    start, length = shares.rows[rank][0]
    target = [read.narrow(-1, start, length) for reads in wanted for read in reads]
    reason = ""
    options = [
        (key, smaller) for key, smaller in _options(numbers, shares, module, rank) if settable(local, key, numbers[key])
    ]
    as_before = {key: numbers[key] for key, _ in options}
    for chosen in itertools.islice(combinations(options), TRIES):
        try:
            set_numbers(local, {**as_before, **chosen})
            reads = [read for call in exact for read in _read(local, shares, call)]
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError, DeepSpeedError) as why:
            reason = reason or describe_error(why)
            continue
        if len(reads) == len(target) > 0 and all(
            relative_difference(read, wanted, floor=1e-6) <= tolerance(torch.float32)
            for read, wanted in zip(reads, target, strict=True)
        ):
            return chosen
        reason = reason or "the channels of one rank are not those of the dense module"
    return reason or "nothing was read"


def settable(module: nn.Module, key: tuple[str, str], value: int) -> bool:
    """Set an attribute of `module`, which should be a copy, and return whether this works."""
    try:
        set_numbers(module, {key: value})
    except (AttributeError, ValueError):  # a property
        return False
    return True


@torch.no_grad()
def _read(module: nn.Module, shares: ChannelDependencies, call: ModuleInputs) -> list[torch.Tensor]:
    """Run a module and return the inputs of its row-parallel layers."""
    reads: list[torch.Tensor] = []
    modules = dict(module.named_modules())
    note = lambda _, args: reads.append(args[0])  # noqa: E731
    handles = [modules[owner(row)].register_forward_pre_hook(note) for row in shares.region.rows]
    try:
        with same_draws():
            call.floating()[0].run(module)
    finally:
        for handle in handles:
            handle.remove()
    return reads


@contextlib.contextmanager
def spied(module: nn.Module, home: str) -> Iterator[Numbers]:
    """Context that records integers above 1 that the modules inside `home` read from themselves and their configs."""
    numbers: Numbers = {}
    swapped: list[tuple[Any, type]] = []

    def watch(target: Any, name: str, prefix: str) -> None:
        kind: Any = type(target)

        def read(self: Any, attribute: str) -> Any:
            value = kind.__getattribute__(self, attribute)
            if type(value) is int and value > 1 and not attribute.startswith("_") and attribute != "layer_idx":
                numbers[name, prefix + attribute] = value
            return value

        swapped.append((target, kind))
        target.__class__ = type(kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__})

    for name, child in module.named_modules():
        if not lies_in(name, home):
            continue
        if is_linear(child):
            continue  # its own attributes were changed together with its weights
        config = vars(child).get("config")
        watch(child, name, "")
        if config is not None and not any(config is done for done, _ in swapped) and hasattr(config, "to_dict"):
            watch(config, name, "config.")
    try:
        yield numbers
    finally:
        for target, kind in swapped:
            target.__class__ = kind


def _options(
    numbers: Numbers, shares: ChannelDependencies, module: nn.Module, rank: int
) -> list[tuple[tuple[str, str], list[int]]]:
    """Return the attributes that a rank may have to reduce, with their candidate values."""
    row = Fraction(length_of(shares.rows[rank]), shares.region.row_size(module))
    sizes = {name: param.shape for name, param in module.named_parameters()}
    columns = [
        Fraction(length_of(share.segments[rank]), sizes[name][share.dim])
        for name, share in shares.tensors.items()
        if name in shares.region.columns
    ]
    ratios = {ratio for ratio in [row, *columns, *(row / column for column in columns)] if ratio < 1}
    options = []
    for key, value in numbers.items():
        smaller = sorted({int(value * ratio) for ratio in ratios if (value * ratio).denominator == 1})
        if smaller:
            attribute = key[1]  # heads first: most forwards reshape by them
            options.append(("head" not in attribute or "dim" in attribute or "size" in attribute, key, smaller))
    return [(key, smaller) for _, key, smaller in sorted(options, key=lambda option: option[:2])]


def combinations(options: list[tuple[tuple[str, str], list[int]]]) -> Iterator[Numbers]:
    """Yield all choices of values for all subsets of the attributes, the smallest subsets first."""
    for count in range(len(options) + 1):
        for some in itertools.combinations(options, count):
            for values in itertools.product(*(smaller for _, smaller in some)):
                yield {key: value for (key, _), value in zip(some, values, strict=True)}
