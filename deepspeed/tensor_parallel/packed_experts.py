"""Tensor parallelism for experts with packed matrices: all experts in a few parameters of one module."""

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
    index_masks,
    parts_of,
    randomised,
    runs,
    same_draws,
)
from deepspeed.tensor_parallel.layers import SliceLocation, cut_tensor, mark_partial
from deepspeed.tensor_parallel.module_attributes import Numbers, combinations, set_numbers, settable, spied
from deepspeed.tensor_parallel.trace import ShardableRegion


class PackedParallel(nn.Module):
    slot: SliceLocation
    added: Sequence[str] = ()  # parameters that are added to the result: each rank adds a fraction of them

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the output of the whole module, equal on all ranks. All ranks must call this."""
        axis, name = self.slot.axis, self.slot.label

        def entered(value: Any) -> Any:
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            return enter(value, axis, f"gradient of what {name} reads") if floats else value

        with parts_of_added(self, self.added, axis.size):
            out = super().forward(*map(entered, args), **{key: entered(value) for key, value in kwargs.items()})
        return reduce_from(out, axis, f"sum of {name}")


@contextlib.contextmanager
def parts_of_added(module: nn.Module, names: Sequence[str], ranks: int) -> Iterator[None]:
    """Context that divides the parameters `names`, which are added to outputs, by `ranks`: the outputs are summed."""
    try:
        for name in names:  # set beside the module's own parameters, to keep their order
            object.__setattr__(module, name, module.get_parameter(name) / ranks)
        yield
    finally:
        for name in names:
            vars(module).pop(name, None)


_classes: dict[type, type] = {}


def become_packed(module: nn.Module, shares: ChannelDependencies, rank: int, slot: SliceLocation) -> None:
    """Reduce a module of experts to a rank's channels of each expert, in place; `shares` comes from `share_packed`."""
    experts: Any = module
    kind = type(module)
    if not issubclass(kind, PackedParallel):
        if kind not in _classes:
            _classes[kind] = type(f"Parallel{kind.__name__}", (PackedParallel, kind), {"__module__": __name__})
        experts.__class__ = _classes[kind]
    experts.slot, experts.added = slot, [share.name for share in shares.tensors.values() if share.copied]
    for share in shares.tensors.values():
        if share.copied:
            mark_partial(getattr(module, share.name))
        else:
            cut_tensor(getattr(module, share.name), share.dim, share.segments[rank])


def share_packed(
    module: nn.Module, region: ShardableRegion, call: ModuleInputs, ranks: int
) -> ChannelDependencies | str:
    """Divide the channels of packed experts (a dense module and its recorded call) over ranks, or return a reason."""
    if len(region.rows) != 1 or region.inner:
        return "its packed matrices feed each other in more than one step"
    row = region.rows[0]
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    reads = [t for t in tensors_in(call.arguments) if t.is_floating_point()]
    width, first, last = reads[0].shape[-1], len(shapes[row]) - 2, len(shapes[row]) - 1
    if shapes[row][first] != shapes[row][last] and width in shapes[row][-2:]:
        dim = last if shapes[row][first] == width else first  # the dim inside an expert
    else:
        dim = first if getattr(module, "is_transposed", False) else last
    size = shapes[row][dim]
    if size < ranks:
        return f"{size} channels cannot be shared out to {ranks} ranks"
    parts = parts_of(size, size, ranks)
    masks: dict[str, list[list[torch.Tensor]]] = {}
    for draw in range(DRAWS):
        for rank, part in enumerate(parts):
            for name, drawn in _masks(module, call, row, dim, part, draw).items():
                empty = [[torch.zeros(n, dtype=torch.bool) for n in shapes[name]] for _ in parts]
                for known, mask in zip(masks.setdefault(name, empty)[rank], drawn, strict=True):
                    known |= mask
        if all(covered(masks[name]) for name in masks if name in region.columns):
            break
    shares = ChannelDependencies(region, [(part,) for part in parts])
    shares.tensors[row] = TensorSharding(row, dim, [(part,) for part in parts])
    for name, by_rank in masks.items():
        dims = [d for d, of_dim in enumerate(zip(*by_rank, strict=True)) if disjoint(of_dim)]
        if not dims and all(torch.equal(*pair) for own in by_rank for pair in zip(own, by_rank[0], strict=True)):
            whole = TensorSharding(name, -1, [() for _ in by_rank], copied=True)
            shares.tensors[name] = whole  # a bias of the last matrices
            continue
        if not dims:
            return f"every channel of {name} depends on every other"
        shares.tensors[name] = TensorSharding(name, dims[-1], [runs(mask[dims[-1]]) for mask in by_rank])
    shares.bytes = max(length for _, length in parts) / size
    return shares


def _masks(
    module: nn.Module, call: ModuleInputs, row: str, dim: int, part: tuple[int, int], draw: int
) -> dict[str, list[torch.Tensor]]:
    """Return the indices of the other parameters that reach the output through some channels of the output matrices.

    Args:
        module: dense module of the experts; not changed.
        call: recorded call of the module.
        row: name of the parameter with the output matrices.
        dim: dim of the channels in that parameter.
        part: (start, length) of the channels.
        draw: seed of the random weights.

    Returns:
        One boolean mask for each dim, by parameter name.
    """
    twin = randomised(module, draw)
    params = dict(twin.named_parameters())
    with torch.no_grad():
        own_channels = params[row].narrow(dim, *part).clone()
        params[row].zero_().narrow(dim, *part).copy_(own_channels)
    own, _ = call.floating()
    with torch.enable_grad(), same_draws():
        out = own.run(twin)
        total = (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(draw)).to(out)).sum()
    names = [name for name in params if name != row]
    grads = torch.autograd.grad(total, [params[name] for name in names], allow_unused=True)
    by_name = zip(names, grads, strict=True)
    return {name: index_masks(grad != 0) for name, grad in by_name if grad is not None and bool((grad != 0).any())}


def fit_packed(module: nn.Module, shares: ChannelDependencies, call: ModuleInputs, rank: int) -> Numbers | str:
    """Return attribute values (see `fit`) with which the ranks' outputs add up to the dense output, or a reason."""
    dense, (own, _) = randomised(module, 0), call.floating()
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
                for of_rank in range(ranks):
                    local = randomised(module, 0)
                    for share in shares.tensors.values():
                        if not share.copied:
                            cut_tensor(getattr(local, share.name), share.dim, share.segments[of_rank])
                    set_numbers(local, {k: numbers[k] // whole * shares.rows[of_rank][0][1] for k in chosen})
                    with same_draws(), parts_of_added(local, added, ranks):
                        total += call.floating()[0].run(local)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, DeepSpeedError) as why:
            reason = reason or describe_error(why)
            continue
        if relative_difference(total, wanted) <= tolerance(torch.float32):
            return {k: numbers[k] // whole * shares.rows[rank][0][1] for k in chosen}
        reason = reason or "the ranks' outputs do not add up to the dense one"
    return reason
