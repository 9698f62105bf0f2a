"""Divide the experts of a model among ranks, without changes to the model's code.

A module of experts is called with tokens (…, H), T in all, the experts chosen by each token (T, k), and their weights
(T, k). Its parameters stack all experts along dim 0. `find_experts` recognises such modules by this structure, not by
class. A trial on random tokens then checks that the results of the module's parts add up to the result of the whole.
Afterwards the module holds only this rank's experts. Module and parameters stay the same objects, so an existing
optimizer stays valid. The new forward sends tokens to their experts (`exchange.py`) and runs the module's own forward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.collectives.same_error import alarmed
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.process_groups.mesh import REPLICATED, Mesh
from deepspeed.errors import ExpertParallelError, UsageError
from deepspeed.foundation.equivalence import relative_difference, tolerance
from deepspeed.foundation.log import describe_error, log_rank0
from deepspeed.moe.adapters import ExpertPart, adapters_of, advise, set_local_count, wrappers_of
from deepspeed.moe.exchange import Routing, combine, dispatch
from deepspeed.tensor_parallel.layers import cut_tensor
from deepspeed.zero.api.reshard import shard_parameter
from deepspeed.zero.api.tensor_access import join_slices
from deepspeed.zero.layout.placement import placement_of
from deepspeed.zero.layout.regions import Region
from deepspeed.zero.parameters.grouping import unshard
from deepspeed.zero.parameters.parameter import StandIn, is_managed

_TOKENS, _CHOICES = 16, 2  # of the trial
_INDEX, _WEIGHTS = ("ind", "select", "expert"), ("weight", "score", "prob")


class ExpertLocation:
    """Assignment of a layer's experts to ranks; deep copies of the layer share one instance.

    Args:
        axis: the ranks among which the layer's experts are divided.
        name: name of the module, for messages.
        count: number of experts on all ranks together.
        order: positions on the axis, sorted by their experts: order[0] has the first experts.
    """

    def __init__(self, axis: Axis, name: str, count: int, order: list[int]) -> None:
        self.axis, self.name, self.count = axis, name, count
        self.local_count = count // axis.size
        self.order = order
        self.owner = torch.tensor(order).repeat_interleave(self.local_count)
        self.first = order.index(axis.rank) * self.local_count

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertLocation:
        return self


class DividedExperts(nn.Module):
    """Module with only this rank's experts. `become_parallel` derives a subclass for each class of modules."""

    location: ExpertLocation

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the result of the undivided module. All ranks of the axis call together, even without tokens."""
        location = self.location
        hidden, index, weights = arguments_of(self, args, kwargs)
        routing = Routing.of(index, location.owner, location.axis, location.name)
        rows, row_weights = dispatch(hidden.reshape(-1, hidden.shape[-1]), weights, routing)
        chosen = routing.to_experts(index[routing.sent].masked_fill(~routing.choices, -1), "choices")
        if rows.shape[0]:
            with (
                alarmed(lambda: f"experts of {location.name}"),
                counting(self, location.count, location.local_count),
            ):
                results = run_pairs(super().forward, rows, chosen - location.first, row_weights, chosen >= 0)
        else:  # a gradient of zeros, as experts of a whole layer have that no token has chosen
            adapted = getattr(self, "parametrizations", {})
            weights_here = [*self.parameters(), *(getattr(self, name) for name in adapted)]
            results = rows + sum(weight.flatten()[:0].sum() for weight in weights_here)
        return combine(results, routing).view(*hidden.shape[:-1], -1)


def arguments_of(module: nn.Module, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens, choices and weights among the arguments of a call.

    Raises:
        ExpertParallelError: there are other arguments, or the shapes are not (…, H), (T, k) and (T, k).
    """
    values = list(signature_of(type(module)).bind(module, *args, **kwargs).arguments.values())[1:]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    fits = len(tensors) == 3 and tensors[1].dim() == 2 and tensors[1].shape == tensors[2].shape
    if len(values) != 3 or not fits or tensors[0].shape[:-1].numel() != tensors[1].shape[0]:
        shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in values]
        raise ExpertParallelError(
            f"experts that are divided among ranks are called with T tokens (…, H), choices (T, k) and weights (T, k); "
            f"this call has {shapes}"
        )
    return tensors[0], tensors[1], tensors[2]


def run_pairs(
    forward: Any, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, here: torch.Tensor
) -> torch.Tensor:
    """Run this rank's experts on the tokens that have chosen them.

    Args:
        rows: (R, H) tokens; each has chosen at least one expert of this rank.
        index: (R, k) chosen experts, counted from this rank's first expert.
        weights: (R, k) weights of the chosen experts.
        here: (R, k) bool: True where the chosen expert is on this rank.

    Returns:
        (R, H) weighted sums of the results of this rank's experts.
    """
    token, choice = here.nonzero(as_tuple=True)
    single = token.numel() == rows.shape[0]  # each token is here once, in order
    out = forward(rows if single else rows[token], index[token, choice, None], weights[token, choice, None])
    out = out.view(token.numel(), -1)
    return out if single else out.new_zeros(rows.shape[0], *out.shape[1:]).index_add(0, token, out)


@contextlib.contextmanager
def counting(module: nn.Module, count: int, local_count: int) -> Generator[None]:
    """Context in which the module's attributes for the number of experts hold the number of local experts."""
    names = [name for name, value in vars(module).items() if type(value) is int and value == count]
    for name in names:
        vars(module)[name] = local_count
    try:
        yield
    finally:
        for name in names:
            vars(module)[name] = count


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield (name, module, number of experts) of modules that stack several experts along dim 0 of their parameters."""
    for name, module in model.named_modules():
        params = list(module.parameters())
        if not params or any(param.dim() < 2 for param in params):
            continue
        names = list(signature_of(type(module)).parameters)[1:]
        if len(names) != 3 or not _says(names[1], _INDEX) or not _says(names[2], _WEIGHTS):
            continue
        counts = [v for k, v in vars(module).items() if type(v) is int and v > 1 and "expert" in k]
        counts += [param.shape[0] for param in params if param.dim() == 3]
        count = next((n for n in counts if all(param.shape[0] % n == 0 for param in params)), None)
        if count is not None:
            yield name, module, count


def signature_of(kind: type) -> inspect.Signature:
    """Return the signature of a module's own forward; wrappers that take *args are skipped."""
    signatures = [inspect.signature(vars(base)["forward"]) for base in kind.__mro__ if "forward" in vars(base)]
    own = [s for s in signatures if all(p.kind is not p.VAR_POSITIONAL for p in s.parameters.values())]
    return (own or signatures)[0]


def _says(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name for word in words)


def divide_experts(model: nn.Module, mesh: Mesh, ep: int) -> list[str]:
    """Divide the experts of all layers among `ep` ranks, in place. All ranks call together, with undivided models.

    Returns:
        Names of the modules with divided experts.

    Raises:
        ExpertParallelError: no module's experts can be divided, or their number is no multiple of `ep`.
        MeshError: `ep` does not divide the number of ranks of dp_shard x sp.
    """
    modules = [entry for entry in find_experts(model) if not isinstance(entry[1], DividedExperts)]
    if not modules:
        raise ExpertParallelError(
            "expert_parallel: the model has no module that is called with tokens, choices and weights and holds its "
            "experts along dim 0 of its parameters; leave expert_parallel out, or use deepspeed.moe.layer.MoE"
        )
    axis, order, tried = mesh.axis("ep", ep=ep), order_of(mesh, ep), set[Any]()
    for name, _, count in modules:
        if count % ep:
            fits = [n for n in range(1, count + 1) if count % n == 0]
            raise ExpertParallelError(f"'{name}' has {count} experts, no multiple of ep {ep}; sizes that fit: {fits}")
    everyone, alike = mesh.axis(*REPLICATED), mesh.axis("edp", ep=ep)
    for name, module, count in modules:
        location = ExpertLocation(axis, name, count, order)
        wrappers = wrappers_of(model, module)
        parts = [*_parts(module, location), *(part for one in wrappers for part in adapters_of(one, location))]
        born_sharded = [part for part in parts if is_managed(part.param)]  # by `zero.Init`: equal on all ranks
        unshard(part.param for part in born_sharded)
        kind = (type(module), tuple(tuple(param.shape) for param in module.parameters()))
        if kind not in tried and (why := _difference(module, count, ep)):
            raise ExpertParallelError(f"the experts of '{name}' ({type(module).__name__}) cannot be divided: {why}")
        tried.add(kind)
        whole = [part.param for part in parts if part not in born_sharded]
        broadcast_tensors(everyone, whole, "broadcast of rank 0's experts")  # its values count, as for all parameters
        become_parallel(module, location, parts)
        for wrapper in wrappers:
            set_local_count(wrapper, location)
        for part in born_sharded if alike.size > 1 else ():
            shard_parameter(part.param, f"{name}.{part.key}", alike)
    advise(model, {name: module for name, module, _ in modules})
    log_rank0(
        f"experts of {len(modules)} layers are divided among {ep} ranks: {modules[0][2] // ep} of {modules[0][2]} each"
    )
    return [name for name, *_ in modules]


def order_of(mesh: Mesh, ep: int) -> list[int]:
    """Return the positions on the axis of `ep` ranks, sorted by the experts that they hold."""
    ranks = mesh.axis("ep", ep=ep).ranks
    place_of = {mesh.expert_coordinates(rank, ep)["ep"]: position for position, rank in enumerate(ranks)}
    return [place_of[index] for index in range(ep)]


_classes: dict[type, type] = {}


def _parts(module: nn.Module, location: ExpertLocation) -> Iterator[ExpertPart]:
    """Yield the parts of the parameters of a module of experts that this rank keeps."""
    for key, param in module.named_parameters():
        size = param.shape[0] // location.count  # elements of dim 0 that belong to one expert
        yield ExpertPart(module, key, 0, [(location.first * size, location.local_count * size)])


def become_parallel(module: nn.Module, location: ExpertLocation, parts: Iterable[ExpertPart]) -> None:
    """Reduce a module and its adapters to the experts of this rank, in place."""
    kind, owners = type(module), dict[nn.Module, None]()
    if kind not in _classes:
        _classes[kind] = type(f"Parallel{kind.__name__}", (DividedExperts, kind), {"__module__": __name__})
    for part in parts:
        cut_tensor(part.param, part.dim, part.segments, ep=location.axis.size)
        owners[part.owner] = None
    experts: Any = module
    experts.__class__, experts.location = _classes[kind], location
    for owner in owners:
        owner.register_state_dict_post_hook(functools.partial(_whole_state, location))


def _whole_state(
    location: ExpertLocation, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Gather all experts into a state dict. All ranks call together; parameters from `keep_vars=True` stay local."""
    for name, param in module.named_parameters():
        value = state.get(prefix + name)
        if value is None or isinstance(value, nn.Parameter) or placement_of(param).ep == 1:
            continue
        if isinstance(value, StandIn):
            raise UsageError(
                f"state_dict() at ZeRO stage 3 has some of the experts of '{location.name}' only: take the "
                f"weights from engine._zero3_consolidated_16bit_state_dict(), save_16bit_model or save_checkpoint"
            )
        label = f"experts of {location.name} for a state dict (all ranks call state_dict together)"
        division = replace(placement_of(param), cuts=placement_of(param).cuts[-1:])  # tp's slices stay
        state[prefix + name] = join_slices(location.axis, Region.of(division, param.shape), param.detach(), label)


def _difference(module: nn.Module, count: int, ep: int) -> str:
    """Return the reason why the results of a module's parts do not add up to the result of the whole; "" if they do."""
    params = dict(module.named_parameters())
    first = next(iter(params.values()))
    generator = torch.Generator().manual_seed(0)
    k = min(_CHOICES, count)
    index = torch.stack([torch.randperm(count, generator=generator)[:k] for _ in range(_TOKENS)]).to(first.device)
    weights = torch.rand(_TOKENS, k, generator=generator).to(first)
    widths = dict.fromkeys(dim for param in params.values() for dim in reversed(param.shape[1:]))
    reason = "its forward fails on random tokens"
    for width in widths:
        hidden = torch.randn(_TOKENS, width, generator=generator).to(first)
        try:
            with torch.no_grad():
                whole = module(hidden, index, weights)
                total = sum(_part(module, params, (hidden, index, weights), count, ep, part) for part in range(ep))
        except (RuntimeError, ValueError, IndexError, TypeError) as why:
            reason = describe_error(why)
            continue
        gap = relative_difference(total, whole.view(_TOKENS, -1))  # type: ignore[arg-type]
        return "" if gap <= tolerance(first.dtype) else f"the results of {ep} parts differ from the whole by {gap:.1g}"
    return reason


def _part(module: nn.Module, params: Any, call: Any, count: int, ep: int, part: int) -> torch.Tensor:
    """Compute one rank's summand of the result."""
    hidden, index, weights = call
    local = count // ep
    chunk = {name: param.detach().chunk(ep)[part] for name, param in params.items()}
    here = (index // local) == part
    rows = here.any(1)
    out = torch.zeros_like(hidden)

    def forward(*args: Any) -> torch.Tensor:
        return torch.func.functional_call(module, chunk, args)

    with counting(module, count, local):
        out[rows] = run_pairs(forward, hidden[rows], (index - part * local)[rows], weights[rows], here[rows])
    return out


def is_divided(model: nn.Module) -> bool:
    """Whether the experts of a model are divided among ranks."""
    return any(placement_of(param).ep > 1 for param in model.parameters())
