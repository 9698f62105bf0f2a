"""Divides the experts of a model among ranks, without a change of its code.

A module of experts is found by its structure (`structure.py`) and the form of its calls (`calls.py`), not by its class,
and is tried on random tokens first: the results of its parts must add up to the result of the whole. Then it keeps this
rank's experts; module and parameters stay the same objects, so an optimizer that was made before stays right. Its
forward sends tokens to their experts (`exchange.py`) and runs the module's own code there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives.autograd import gathered
from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.process_groups.mesh import REPLICATED, Mesh
from deepspeed.errors import ExpertParallelError, UsageError
from deepspeed.foundation.log import log_rank0
from deepspeed.moe.calls import read_call, values_of
from deepspeed.moe.exchange import Routing, combine, dispatch
from deepspeed.moe.structure import Elsewhere, Structure, counting, find_experts, run_pairs, tried
from deepspeed.tensor_parallel.layers import cut_tensor
from deepspeed.zero.api.reshard import shard_parameter
from deepspeed.zero.layout.placement import Relation, place, placement_of
from deepspeed.zero.parameters.grouping import unshard
from deepspeed.zero.parameters.parameter import StandIn, is_managed


class ExpertLocation:
    """Which of a layer's experts this rank has; copies of the layer share it.

    Args:
        axis: ranks that have the layer's experts together.
        name: of the module, for reports.
        count: number of experts of all ranks.
        order: position on the axis of the rank with the first experts, the second, and so on.
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
    """A module of experts that holds those of this rank. Its class is made by `become_parallel`."""

    location: ExpertLocation
    structure: Structure
    places: tuple[torch.Tensor, torch.Tensor]  # of each expert, and of none at the end: its rank, its number there

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the whole module; all ranks that share the experts call together, also without tokens."""
        location, structure = self.location, self.structure
        values = values_of(type(self), self, args, kwargs)
        call = read_call(structure.forms[0], values, structure.count, location.name)
        index, (owner, local) = call.index.long(), (place.to(call.index.device) for place in self.places)
        routing = Routing.of(index, owner, location.axis, location.name)
        rows, weights = dispatch(call.rows, call.weights, routing)
        chosen = local[index[routing.sent].masked_fill(~routing.choices, -1)]
        chosen = routing.to_experts(chosen, "choices")
        if rows.shape[0]:
            with counting(self, structure, location.axis.size):
                results = run_pairs(structure, super().forward, rows, chosen, weights, location.axis.size)
        else:  # a gradient of zeros, as experts of a whole layer have that no token has chosen
            zero = rows.sum() + sum(param.flatten()[:0].sum() for param in self.parameters())
            results = rows.new_zeros(0, structure.width) + zero
        return call.result(combine(results, routing))


def divide_experts(model: nn.Module, mesh: Mesh, ep: int) -> list[str]:
    """Divide the experts of all layers among `ep` ranks, in place. All ranks call together, with whole models.

    Returns:
        Names of the modules whose experts are divided.

    Raises:
        ExpertParallelError: the model has none that can be divided, or their number is no multiple of `ep`.
        MeshError: `ep` does not divide the ranks of dp_shard x sp.
    """
    modules = [entry for entry in find_experts(model) if not isinstance(entry[1], DividedExperts)]
    if not modules:
        raise ExpertParallelError(
            "expert_parallel: the model has no module that is called with tokens, choices and weights (docs/experts.md "
            "has other forms), with its experts along dim 0 of its parameters or as a child for each; leave "
            "expert_parallel out, or use deepspeed.moe.layer.MoE"
        )
    for name, _, structure in modules:
        for count in structure.groups:
            if count % ep:
                fits = [n for n in range(1, count + 1) if count % n == 0]
                raise ExpertParallelError(
                    f"'{name}' has {count} experts, no multiple of ep {ep}; sizes that fit: {fits}"
                )
    order, known = order_of(mesh, ep), dict[Any, Structure]()
    for name, module, structure in modules:
        params = dict(module.named_parameters())
        born_sharded = [key for key, param in params.items() if is_managed(param)]  # by `zero.Init`: equal on all ranks
        unshard(params[key] for key in born_sharded)
        kind = (type(module), tuple(tuple(param.shape) for param in params.values()))
        if kind not in known:
            known[kind], why = tried(module, structure, ep)
            if why:
                raise ExpertParallelError(f"the experts of '{name}' ({type(module).__name__}) cannot be divided: {why}")
        whole = [param for key, param in params.items() if key not in born_sharded]
        label = "broadcast of rank 0's experts"  # its values count, as for all parameters
        broadcast_tensors(mesh.axis(*REPLICATED), whole, label)
        become_parallel(module, ExpertLocation(mesh.axis("ep", ep=ep), name, structure.count, order), known[kind])
        _shard_again(name, module, born_sharded, mesh)
    count = modules[0][2].count
    log_rank0(f"experts of {len(modules)} layers are divided among {ep} ranks: {count // ep} of {count} each")
    return [name for name, *_ in modules]


def _shard_again(name: str, module: nn.Module, keys: list[str], mesh: Mesh) -> None:
    params = dict(module.named_parameters())
    for key in keys:
        if key in params:
            ep = placement_of(params[key]).ep
            alike = mesh.axis("edp", ep=ep) if ep > 1 else mesh.axis(*REPLICATED)
            if alike.size > 1:
                shard_parameter(params[key], f"{name}.{key}", alike)


def order_of(mesh: Mesh, ep: int) -> list[int]:
    """Positions on the axis of `ep` ranks of the one with the first experts, the second, and so on."""
    ranks = mesh.axis("ep", ep=ep).ranks
    place_of = {mesh.expert_coordinates(rank, ep)["ep"]: position for position, rank in enumerate(ranks)}
    return [place_of[index] for index in range(ep)]


_classes: dict[type, type] = {}


def become_parallel(module: nn.Module, location: ExpertLocation, structure: Structure) -> None:
    """Make a module keep the experts of this rank, in place."""
    kind, ep = type(module), location.axis.size
    if kind not in _classes:
        _classes[kind] = type(f"Parallel{kind.__name__}", (DividedExperts, kind), {"__module__": __name__})
    part, (owner, local) = location.order.index(location.axis.rank), structure.places(ep)
    for name, param in module.named_parameters():
        if name in structure.packed:
            cut_tensor(param, 0, structure.segments(param.shape[0], ep, part), ep=ep)
    for expert, name in enumerate(structure.children):
        if owner[expert] != part:
            module._modules[name] = Elsewhere()
            continue
        for param in module.get_submodule(name).parameters():
            placed = placement_of(param)
            place(param, replace(placed, relations={**placed.relations, "ep": Relation.ABSENT}, ep=ep))
    experts: Any = module
    experts.__class__, experts.location, experts.structure = _classes[kind], location, structure
    ranks = torch.tensor(location.order)[owner]
    none = torch.tensor([-1])
    experts.places = torch.cat([ranks, none]), torch.cat([local, none])
    module.register_state_dict_post_hook(_whole_state)


def _whole_state(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put all experts into a state dict. All ranks call together; with `keep_vars=True` local parameters stay."""
    for name, param in module.named_parameters():
        value = state.get(prefix + name)
        if value is None or isinstance(value, nn.Parameter) or placement_of(param).ep == 1:
            continue
        if isinstance(value, StandIn):
            raise UsageError(
                f"state_dict() at ZeRO stage 3 has some of the experts of '{module.location.name}' only: take the "
                f"weights from engine._zero3_consolidated_16bit_state_dict(), save_16bit_model or save_checkpoint"
            )
        state.update({prefix + key: whole for key, whole in _all_of(module, name, param).items()})


def _all_of(module: Any, name: str, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """By name, a parameter with the experts of all ranks; or that of a child and of its counterparts on other ranks."""
    location, structure = module.location, module.structure
    label = f"experts of {location.name} for a state dict (all ranks call state_dict together)"
    found = gathered(param, location.axis, 0, label=label).chunk(location.axis.size)
    parts, ep = [found[position] for position in location.order], location.axis.size
    if name in structure.packed:
        whole = param.new_empty(param.shape[0] * ep, *param.shape[1:])
        for part, piece in enumerate(parts):
            at = 0
            for start, length in structure.segments(len(whole), ep, part):
                whole[start : start + length] = piece[at : at + length]
                at += length
        return {name: whole}
    child, _, rest = name.partition(".")
    number, each = structure.children.index(child) % location.local_count, location.local_count
    return {f"{structure.children[part * each + number]}.{rest}": piece for part, piece in enumerate(parts)}


def is_divided(model: nn.Module) -> bool:
    """Whether ranks have experts of their own."""
    return any(placement_of(param).ep > 1 for param in model.parameters())
