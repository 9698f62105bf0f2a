"""Splits experts whose matrices are packed into parameters of one module."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives.autograd import enter, reduce_from
from deepspeed.errors import DeepSpeedError
from deepspeed.foundation.equivalence import relative_difference, tolerance
from deepspeed.foundation.log import describe_error
from deepspeed.foundation.pytree import tensors_in
from deepspeed.tensor_parallel.channel_dependencies import (
    DRAWS,
    ChannelDependencies,
    ModuleInputs,
    TensorSharding,
    covered,
    disjoint,
    floating,
    parts_of,
    randomised,
    runs,
    same_draws,
)
from deepspeed.tensor_parallel.layers import SliceLocation, cut_tensor, mark_partial
from deepspeed.tensor_parallel.module_attributes import Numbers, combinations, set_numbers, settable, spied
from deepspeed.tensor_parallel.trace import ShardableRegion


class PackedParallel(nn.Module):
    """Some of the channels of each expert."""

    slot: SliceLocation
    added: Sequence[str] = ()  # parameters that are added to the result: each rank adds its part of them

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the whole module, equal on all ranks."""
        axis, name = self.slot.axis, self.slot.name

        def entered(value: Any) -> Any:
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            return enter(value, axis, f"gradient of what {name} reads") if floats else value

        with parts_of_added(self, self.added, axis.size):
            out = super().forward(*map(entered, args), **{key: entered(value) for key, value in kwargs.items()})
        return reduce_from(out, axis, f"sum of {name}")


@contextlib.contextmanager
def parts_of_added(module: nn.Module, names: Sequence[str], ranks: int) -> Iterator[None]:
    """Inside, parameters that are added to a module's result are divided by the ranks that add it up."""
    try:
        for name in names:  # beside the module's own parameters, which keep their order
            object.__setattr__(module, name, module.get_parameter(name) / ranks)
        yield
    finally:
        for name in names:
            vars(module).pop(name, None)


_classes: dict[type, type] = {}


def become_packed(module: nn.Module, shares: ChannelDependencies, rank: int, slot: SliceLocation) -> None:
    """Make a module of experts hold some of the channels of each, in place."""
    made: Any = module
    kind = type(module)
    if not issubclass(kind, PackedParallel):
        if kind not in _classes:
            _classes[kind] = type(f"Parallel{kind.__name__}", (PackedParallel, kind), {"__module__": __name__})
        made.__class__ = _classes[kind]
    made.slot, made.added = slot, [share.name for share in shares.tensors.values() if share.copied]
    for share in shares.tensors.values():
        if share.copied:
            mark_partial(getattr(module, share.name))
        else:
            cut_tensor(getattr(module, share.name), share.dim, share.segments[rank])


def share_packed(
    module: nn.Module, region: ShardableRegion, call: ModuleInputs, ranks: int
) -> ChannelDependencies | str:
    """What each rank has of the experts' matrices, or why they stay whole.

    Args:
        module: dense; it is copied.
        region: its own matrices.
        call: what it is called with.
        ranks: of the axis.
    """
    if len(region.rows) != 1 or region.inner:
        return "its packed matrices feed each other in more than one step"
    row = region.rows[0]
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    reads = [t for t in tensors_in(call.arguments) if t.is_floating_point()]
    dim = _inner_dim(module, shapes[row], reads[0].shape[-1])
    size = shapes[row][dim]
    if size < ranks:
        return f"{size} channels cannot be shared out to {ranks} ranks"
    parts = parts_of(size, size, ranks)
    masks: dict[str, list[list[torch.Tensor]]] = {}
    for draw in range(DRAWS):
        for at, part in enumerate(parts):
            for name, mask in _masks(module, call, row, dim, part, draw).items():
                known = masks.setdefault(
                    name, [[torch.zeros(n, dtype=torch.bool) for n in shapes[name]] for _ in parts]
                )
                for a, b in zip(known[at], mask, strict=True):
                    a |= b
        if all(covered(masks[name]) for name in masks if name in region.columns):
            break
    made = ChannelDependencies(region, [(part,) for part in parts])
    made.tensors[row] = TensorSharding(row, dim, [(part,) for part in parts])
    for name, by_rank in masks.items():
        dims = [d for d, of_dim in enumerate(zip(*by_rank, strict=True)) if disjoint(of_dim)]
        if not dims and all(_same(masks_of, by_rank[0]) for masks_of in by_rank):
            made.tensors[name] = TensorSharding(
                name, -1, [() for _ in by_rank], copied=True
            )  # a bias of the last matrices
            continue
        if not dims:
            return f"every channel of {name} depends on every other"
        made.tensors[name] = TensorSharding(name, dims[-1], [runs(mask[dims[-1]]) for mask in by_rank])
    made.bytes = max(length for _, length in parts) / size
    return made


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def _inner_dim(module: nn.Module, shape: Sequence[int], width: int) -> int:
    """The dim of the last matrices (experts, a, b) that lies inside an expert."""
    if shape[-1] != shape[-2] and width in shape[-2:]:
        return len(shape) - 1 if shape[-2] == width else len(shape) - 2
    return len(shape) - 2 if getattr(module, "is_transposed", False) else len(shape) - 1


def _masks(
    module: nn.Module, call: ModuleInputs, row: str, dim: int, part: tuple[int, int], draw: int
) -> dict[str, list[torch.Tensor]]:
    """By parameter and dim: the indices that some channels of the last matrices depend on."""
    twin = randomised(module, draw)
    params = dict(twin.named_parameters())
    with torch.no_grad():
        kept = params[row].narrow(dim, *part).clone()
        params[row].zero_().narrow(dim, *part).copy_(kept)
    own, _ = floating(call)
    with torch.enable_grad(), same_draws():
        out = own.run(twin)
        total = (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(draw)).to(out)).sum()
    names = [name for name in params if name != row]
    grads = torch.autograd.grad(total, [params[name] for name in names], allow_unused=True)
    found = {}
    for name, grad in zip(names, grads, strict=True):
        if grad is not None and bool((grad != 0).any()):
            found[name] = [(grad != 0).movedim(d, 0).reshape(grad.shape[d], -1).any(1).cpu() for d in range(grad.dim())]
    return found


def fit_packed(module: nn.Module, shares: ChannelDependencies, call: ModuleInputs, rank: int) -> Numbers | str:
    """As `fit`: the numbers by which the ranks' outputs add up to the dense one. One set of numbers serves all ranks.

    Args:
        module: dense; it is copied.
        shares: of its matrices.
        call: what it is called with.
        rank: whose numbers.
    """
    dense, (own, _) = randomised(module, 0), floating(call)
    with torch.no_grad(), same_draws(), spied(dense, "") as numbers:
        wanted = own.run(dense)
    row = shares.tensors[shares.region.rows[0]]
    whole, ranks = dense.get_parameter(row.name).shape[row.dim], len(shares.rows)
    keys = [k for k, v in numbers.items() if v % whole == 0 and settable(copy.deepcopy(dense), k, v)]
    reason, added = "", [share.name for share in shares.tensors.values() if share.copied]
    for chosen in itertools.islice(combinations([(key, [-1]) for key in keys]), 64):
        total = torch.zeros_like(wanted)
        try:
            with torch.no_grad():
                for at in range(ranks):
                    local = randomised(module, 0)
                    for share in shares.tensors.values():
                        if not share.copied:
                            cut_tensor(getattr(local, share.name), share.dim, share.segments[at])
                    set_numbers(local, {k: numbers[k] // whole * shares.rows[at][0][1] for k in chosen})
                    with same_draws(), parts_of_added(local, added, ranks):
                        total += floating(call)[0].run(local)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, DeepSpeedError) as why:
            reason = reason or describe_error(why)
            continue
        if relative_difference(total, wanted) <= tolerance(torch.float32):
            return {k: numbers[k] // whole * shares.rows[rank][0][1] for k in chosen}
        reason = reason or "the ranks' outputs do not add up to the dense one"
    return reason
