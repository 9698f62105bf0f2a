"""Dependency analysis: the slices of each parameter that one rank's share of the channels depends on.

The analysis runs a copy of the module with random parameters, sums one rank's share of the channels that the
row-parallel layers read, and differentiates the sum. Elements with a zero gradient belong to other ranks. This works
for any layout: query, key and value as three matrices, concatenated, or interleaved by head; gate and up concatenated
or alternating; shared keys and values.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import TensorParallelError
from deepspeed.foundation.partition import partition_uniform
from deepspeed.foundation.pytree import tensors_in
from deepspeed.tensor_parallel.layers import is_transposed
from deepspeed.tensor_parallel.trace import ShardableRegion, owner

DRAWS = 6  # random draws: a channel that an activation zeroes in one draw is nonzero in another
MOST_DRAWS = 30  # maximum draws while a column is zero in all: of many thousands of ReLU channels, some are zero in six
Segments = tuple[tuple[int, int], ...]


@dataclass
class TensorSharding:
    """Sharding of one tensor of a region (see `ShardableRegion`).

    Args:
        name: name of a parameter or buffer relative to the split module, or of an argument of its forward.
        dim: the split dim; -1: the tensor is replicated.
        segments: (start, length) pairs in that dim, by rank.
        copied: several ranks use the same elements: the tensor is replicated, and its gradients are partial sums.
    """

    name: str
    dim: int
    segments: list[Segments]
    copied: bool = False

    @staticmethod
    def of(name: str, by_rank: list[list[torch.Tensor]]) -> TensorSharding:
        """Split along the first dim with disjoint masks, else replicate; `by_rank[rank][dim]` is a boolean mask."""
        for dim, masks in enumerate(zip(*by_rank, strict=True)):
            if len(masks[0]) > 1 and disjoint(masks):
                return TensorSharding(name, dim, [runs(mask) for mask in masks])
        return TensorSharding(name, -1, [() for _ in by_rank], copied=True)

    def is_local(self, tensor: torch.Tensor, rank: int) -> bool:
        """Return whether an argument is already this rank's slice, as another split module's output is, or has size 1.

        Raises:
            TensorParallelError: the dim is a multiple neither of all channels nor of this rank's channels.
        """
        if tensor.shape[self.dim] == 1:  # the same for all channels, like most masks
            return True
        size, here = tensor.shape[self.dim], length_of(self.segments[rank])
        whole = 1 + max(start + length - 1 for segments in self.segments for start, length in segments)
        if size % whole and size % here:
            raise TensorParallelError(f"'{self.name}' has {size} channels; a rank of tp has {here} of {whole}")
        return size % whole != 0

    def pick(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return this rank's slice of a whole argument; a dim (batch x channels) is sliced for each batch entry."""
        if tensor.shape[self.dim] == 1:
            return tensor
        index = torch.cat([torch.arange(start, start + length) for start, length in self.segments[rank]])
        whole = 1 + max(start + length - 1 for segments in self.segments for start, length in segments)
        times = tensor.shape[self.dim] // whole
        every = (torch.arange(times)[:, None] * whole + index).flatten()
        return tensor.index_select(self.dim, every.to(tensor.device))


@dataclass
class ChannelDependencies:
    """Sharding of one region (see `ShardableRegion`) over the ranks.

    Args:
        region: the region, with names relative to the split module.
        rows: segments of the channels that the row-parallel matrices read, by rank.
        tensors: shardings of parameters and buffers, by name.
        inputs: shardings of the arguments of forward that are split too, by name.
        partial_inputs: arguments that all ranks read whole; their gradients are summed over the ranks.
        bytes: size of the matrices on the largest rank, as a fraction of the dense region's.
    """

    region: ShardableRegion
    rows: list[Segments]
    tensors: dict[str, TensorSharding] = field(default_factory=dict)
    inputs: dict[str, TensorSharding] = field(default_factory=dict)
    partial_inputs: list[str] = field(default_factory=list)
    bytes: float = 1.0

    def largest_part(self, module: nn.Module) -> float:
        """Return the fraction of a region's matrices on the largest rank; `module` is the dense split module."""
        region, most = self.region, 0.0
        sizes = {name: math.prod(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}
        channels = sum(map(length_of, self.rows))
        for rank, part in enumerate(self.rows):
            here = sum(sizes[row] * length_of(part) / channels for row in region.rows)
            for name in region.columns:
                share = self.tensors.get(name)
                held = 1.0
                if share is not None and not share.copied:
                    held = length_of(share.segments[rank]) / sum(map(length_of, share.segments))
                here += sizes[name] * held
            most = max(most, here)
        return most / sum(sizes[name] for name in [*region.rows, *region.columns])


@dataclass
class ModuleInputs:
    """Arguments of a module call, by parameter name; `positional` are the names of those passed by position."""

    arguments: dict[str, Any]
    positional: list[str]

    @staticmethod
    def of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModuleInputs:
        """Bind the arguments of a call to the parameter names of the module's forward."""
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
        named = [names[index] if index < len(names) else f"*{index}" for index in range(len(args))]
        return ModuleInputs({**dict(zip(named, args, strict=True)), **kwargs}, named)

    def mapped(self, change: Any) -> ModuleInputs:
        """Copy with every tensor replaced by `change(path, tensor)`; paths are "name" or "name.0" (in lists)."""

        def walk(path: str, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return change(path, value)
            if type(value) in (tuple, list):
                return type(value)(walk(f"{path}.{index}", entry) for index, entry in enumerate(value))
            return value

        return ModuleInputs({name: walk(name, value) for name, value in self.arguments.items()}, self.positional)

    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return (path, shape) of all tensors."""
        shapes: list[tuple[str, tuple[int, ...]]] = []

        def note(path: str, tensor: torch.Tensor) -> torch.Tensor:
            shapes.append((path, tuple(tensor.shape)))
            return tensor

        self.mapped(note)
        return tuple(shapes)

    def constants(self) -> tuple[tuple[str, Any], ...]:
        """Return (path, value) of None, numbers, flags, strings and dtypes, and (path, class) of other objects."""
        constants: list[tuple[str, Any]] = []

        def walk(path: str, value: Any) -> None:
            if type(value) in (tuple, list):
                for index, entry in enumerate(value):
                    walk(f"{path}.{index}", entry)
            elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
                constants.append((path, value))
            elif not isinstance(value, torch.Tensor):
                constants.append((path, type(value)))

        for name, value in self.arguments.items():
            walk(name, value)
        return tuple(constants)

    def split(self) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments."""
        args = [self.arguments[name] for name in self.positional]
        return args, {name: value for name, value in self.arguments.items() if name not in self.positional}

    def apart(self) -> ModuleInputs:
        """Return the arguments with deep copies of objects that a module may modify (a cache), but not of tensors."""
        return ModuleInputs({name: self._copy(value) for name, value in self.arguments.items()}, self.positional)

    @classmethod
    def _copy(cls, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(cls._copy, value))
        if value is None or isinstance(value, (torch.Tensor, nn.Module, bool, int, float, str)):
            return value
        try:
            return copy.deepcopy(value)
        except Exception:  # objects that cannot be copied are passed as they are
            return value

    def run(self, module: nn.Module) -> Any:
        args, kwargs = self.apart().split()
        return module(*args, **kwargs)

    def floating(self, grad: bool = False) -> tuple[ModuleInputs, dict[str, torch.Tensor]]:
        """Return a copy with floating-point tensors as detached fp32 tensors (`grad`: leaves), and these by path."""
        tensors: dict[str, torch.Tensor] = {}

        def change(path: str, tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            tensors[path] = tensor.detach().float().clone().requires_grad_(grad)
            # A unit may change its inputs in place, which autograd forbids for a leaf.
            return tensors[path].view_as(tensors[path]) if grad else tensors[path]

        return self.mapped(change), tensors

    def has_states_beyond(self, other: ModuleInputs) -> bool:
        """Return whether an argument that is missing or None in `other` contains tensors in a list or tuple."""
        there = {key for key, value in other.arguments.items() if value is not None}
        return any(
            type(value) in (list, tuple) and key not in there and next(iter(tensors_in(value)), None) is not None
            for key, value in self.arguments.items()
        )


def changing(change: Any) -> Any:
    """Create a forward pre-hook that replaces each tensor by `change(path, tensor)`, in argument order."""

    def hook(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = ModuleInputs.of(module, args, kwargs).mapped(change).split()
        return tuple(positional), named

    return hook


def randomised(module: nn.Module, draw: int) -> nn.Module:
    """Copy a module in fp32 and evaluation mode, with random parameters for each `draw`: zeros hide dependencies."""
    twin = copy.deepcopy(module).float().eval()
    generator = torch.Generator().manual_seed(1000 + draw)
    with torch.no_grad():
        for param in twin.parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(noise * (0.5 if param.dim() < 2 else param.shape[-1] ** -0.5))
            param.requires_grad_(True)
    return twin


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Context with a fixed seed, for modules that are random in evaluation too; random states are restored on exit."""
    accelerator = get_accelerator()
    states = torch.get_rng_state(), accelerator.get_rng_state()
    torch.default_generator.manual_seed(11)  # torch.manual_seed takes a millisecond, because it records its caller
    if accelerator.device_name() != "cpu":
        accelerator.manual_seed(11)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        accelerator.set_rng_state(states[1])


class _Reads:
    """Hooks that record the inputs of a region's row-parallel layers and detach those of its column-parallel layers.

    Attributes:
        tensors: recorded inputs of the row-parallel layers.
        inputs: floating-point arguments of the first call of the region's home module, by path. The module receives
            copies, since it may modify them.
    """

    def __init__(self, module: nn.Module, region: ShardableRegion) -> None:
        self.tensors: list[torch.Tensor] = []
        self.inputs: dict[str, torch.Tensor] = {}
        self._called = False
        modules = dict(module.named_modules())
        inner = {owner(name) for name in region.inner}
        self._handles = [modules[owner(row)].register_forward_pre_hook(self._note) for row in region.rows]
        for name in dict.fromkeys(map(owner, region.columns)):
            if name not in inner:
                detach = lambda _module, args: (args[0].detach(), *args[1:])  # noqa: E731
                self._handles.append(modules[name].register_forward_pre_hook(detach))
        if region.home:  # inputs of the unit may reach the home under other names
            self._handles.append(modules[region.home].register_forward_pre_hook(self._take, with_kwargs=True))

    def _note(self, module: nn.Module, args: Any) -> None:
        self.tensors.append(args[0])

    def _take(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        first, self._called = not self._called, True
        return changing(self._copied)(module, args, kwargs) if first else None

    def _copied(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        self.inputs[path] = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        return self.inputs[path].clone()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def runs(mask: torch.Tensor) -> Segments:
    """Return (start, length) of each run of True entries."""
    segments: list[tuple[int, int]] = []
    for index in mask.nonzero().flatten().tolist():
        if segments and sum(segments[-1]) == index:
            segments[-1] = (segments[-1][0], segments[-1][1] + 1)
        else:
            segments.append((index, 1))
    return tuple(segments)


def parts_of(size: int, units: int, ranks: int) -> list[tuple[int, int]]:
    """Return (start, length) of each rank's share of `size` channels, in multiples of `size // units`."""
    bounds, step = partition_uniform(units, ranks), size // units
    return [(low * step, (high - low) * step) for low, high in zip(bounds, bounds[1:], strict=False)]


def share_out(
    module: nn.Module, region: ShardableRegion, calls: Sequence[ModuleInputs], units: Sequence[int], ranks: int
) -> ChannelDependencies | None:
    """Return the sharding of a region with the least bytes on the largest rank; None if nothing can be split.

    Args:
        module: dense module of the region; not changed.
        region: the region, with names relative to the module.
        calls: recorded calls of the module.
        units: candidate counts of equal groups of channels, such as the numbers of heads. Groups are not split.
        ranks: number of ranks.
    """
    size, best = region.row_size(module), None
    for count in dict.fromkeys([*units, size]):
        if count < ranks or size % count:
            continue
        shares = _dependence(module, region, calls, parts_of(size, count, ranks))
        if shares is not None and (best is None or shares.bytes < best.bytes - 1e-9):
            best = shares
    return best


def _dependence(
    module: nn.Module, region: ShardableRegion, calls: Sequence[ModuleInputs], parts: list[tuple[int, int]]
) -> ChannelDependencies | None:
    masks: dict[tuple[str, bool], list[list[torch.Tensor]]] = {}
    columns = set(region.columns)
    barren = 0  # consecutive draws without new indices: the remaining indices are unused
    for draw in range(MOST_DRAWS):
        new = [_add(masks, _masks(module, region, call, parts, draw), columns) for call in calls]
        barren = 0 if any(new) else barren + 1
        needed = columns if draw >= DRAWS - 1 else {name for name, _ in masks}
        own = [by_rank for (name, is_input), by_rank in masks.items() if not is_input and name in needed]
        if barren == DRAWS or all(map(covered, own)):
            break
    shares = ChannelDependencies(region, [(part,) for part in parts])
    for (name, is_input), by_rank in masks.items():
        share = TensorSharding.of(name, by_rank)
        if is_input and share.dim >= 0:
            shares.inputs[name] = share
        elif is_input:
            shares.partial_inputs.append(name)
        else:
            shares.tensors[name] = share
    layers, cut = dict(module.named_modules()), False
    for name in columns & shares.tensors.keys():  # a column's outputs are rows of its matrix
        dim = 1 if is_transposed(layers[owner(name)]) else 0
        of_dim = [dims[dim] for dims in masks[name, False]]
        segments = [runs(mask) for mask in of_dim]
        shares.tensors[name] = TensorSharding(name, dim, segments, copied=not disjoint(of_dim))
        cut = cut or len(set(segments)) > 1
    shares.bytes = shares.largest_part(module)
    return shares if cut else None  # otherwise every rank needs all of every column


def _add(masks: dict[tuple[str, bool], Any], drawn: Mapping[tuple[str, bool], Any], columns: set[str]) -> bool:
    """Merge the masks of one draw into `masks`; return whether a column-parallel tensor has new indices."""
    new = False
    for key, by_rank in drawn.items():
        if key not in masks:
            masks[key] = by_rank
            new = new or key[0] in columns
            continue
        for known_dims, drawn_dims in zip(masks[key], by_rank, strict=True):
            for known, mask in zip(known_dims, drawn_dims, strict=True):
                new = new or (key[0] in columns and bool((mask & ~known).any()))
                known |= mask
    return new


def _masks(
    module: nn.Module, region: ShardableRegion, call: ModuleInputs, parts: list[tuple[int, int]], draw: int
) -> dict[tuple[str, bool], list[list[torch.Tensor]]]:
    """Return masks of the indices that each rank's channels depend on, by (name, is an argument), rank and dim."""
    twin = randomised(module, draw)
    own, inputs = call.floating(grad=True)
    reads = _Reads(twin, region)
    with torch.enable_grad(), same_draws():
        own.run(twin)
    reads.remove()
    leaves: dict[tuple[str, bool], torch.Tensor] = {(name, False): p for name, p in twin.named_parameters()}
    leaves |= {(name, True): tensor for name, tensor in (reads.inputs if region.home else inputs).items()}
    masks: dict[tuple[str, bool], list[list[torch.Tensor]]] = {}
    generator = torch.Generator().manual_seed(draw)
    for rank, (start, length) in enumerate(parts):
        shares = [read.narrow(-1, start, length) for read in reads.tensors if read.requires_grad]
        total = sum(((s * torch.randn(s.shape, generator=generator).to(s)).sum() for s in shares), torch.zeros(()))
        grads = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
        for (key, tensor), grad in zip(leaves.items(), grads, strict=True):
            if grad is None and key not in masks:
                continue
            nonzero = torch.zeros(tensor.shape, dtype=torch.bool) if grad is None else grad != 0
            empty = [[torch.zeros(size, dtype=torch.bool) for size in tensor.shape] for _ in parts]
            masks.setdefault(key, empty)[rank] = index_masks(nonzero)
    rows = {row for row in region.rows} | {f"{owner(row)}.bias" for row in region.rows}
    return {k: v for k, v in masks.items() if k[0] not in rows and any(m.any() for dims in v for m in dims)}


def index_masks(nonzero: torch.Tensor) -> list[torch.Tensor]:
    """Return, for each dim, the mask of indices with at least one True entry."""
    dims = range(nonzero.dim())
    return [nonzero.movedim(dim, 0).reshape(nonzero.shape[dim], -1).any(1).cpu() for dim in dims]


def covered(by_rank: list[list[torch.Tensor]]) -> bool:
    """Return whether the ranks together depend on every index of every dim."""
    return all(torch.stack(of_dim).any(0).all() for of_dim in zip(*by_rank, strict=True))


def disjoint(masks: Sequence[torch.Tensor]) -> bool:
    """Return whether the masks partition the indices: each index is in exactly one mask, and no mask is empty."""
    return bool((torch.stack(list(masks)).sum(0) == 1).all()) and all(mask.any() for mask in masks)


def length_of(segments: Segments) -> int:
    """Return the total length of all segments."""
    return sum(length for _, length in segments)
