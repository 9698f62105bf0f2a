"""Expert parallelism: division of the experts of a model among ranks, without changes to its code.

A module of experts is found by its structure (`structure.py`) and the form of its calls (`calls.py`), not by its class.
It is tested on random tokens first: the results of the ranks' experts must add up to the result of the whole module.
Then each rank keeps its experts; module and parameters stay the same objects, so an existing optimizer stays valid. The
forward sends tokens to their experts (`exchange.py`) and runs the module's own code there, or, on CPUs, products of the
same experts without copies in between (`packed_products.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives.autograd import gathered
from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.collectives.same_error import alarmed
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.process_groups.mesh import REPLICATED, Mesh
from deepspeed.errors import ExpertParallelError, NotAvailableError, UsageError
from deepspeed.foundation.compiler import opaque
from deepspeed.foundation.log import log_rank0
from deepspeed.moe.adapters import ExpertPart, adapters_of, advise, set_local_count, wrappers_of
from deepspeed.moe.calls import read_call, values_of
from deepspeed.moe.exchange import Routing, combine, dispatch, expert_choices
from deepspeed.moe.packed_layout import computes
from deepspeed.moe.packed_products import run_packed
from deepspeed.moe.structure import ExpertStructure, RemoteExpert, counting, find_experts, run_pairs, tried
from deepspeed.tensor_parallel.layers import cut_tensor
from deepspeed.tensor_parallel.parallelize import guard
from deepspeed.zero.api.reshard import shard_parameter
from deepspeed.zero.api.tensor_access import join_slices
from deepspeed.zero.layout.placement import Relation, place, placement_of
from deepspeed.zero.layout.regions import Region
from deepspeed.zero.parameters.grouping import unshard
from deepspeed.zero.parameters.parameter import StandIn, is_managed


class ExpertLocation:
    """Share of this rank in the experts of a layer; deep copies of the layer share the object.

    Args:
        axis: the ranks among which the layer's experts are divided.
        name: name of the module in error messages.
        count: number of experts on all ranks together.
        order: positions on the axis of the ranks, in the order of their experts.
    """

    def __init__(self, axis: Axis, name: str, count: int, order: list[int]) -> None:
        self.axis, self.name, self.count = axis, name, count
        self.local_count = count // axis.size
        self.order = order
        self.owner = torch.tensor(order).repeat_interleave(self.local_count)
        self.part = order.index(axis.rank)
        self.first = self.part * self.local_count

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertLocation:
        return self


class DividedExperts(nn.Module):
    """Mixin of modules of experts with only the experts of this rank; `become_parallel` creates the classes."""

    location: ExpertLocation
    structure: ExpertStructure
    places: tuple[torch.Tensor, torch.Tensor]  # of each expert, and of none at the end: its rank, its number there
    first_local: int  # the number of an expert of this rank

    @opaque  # numbers of rows depend on values: torch.compile would compile pieces of it again and again
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the whole module's result. All ranks of the axis must call this, also those without tokens."""
        location, structure = self.location, self.structure
        with alarmed(lambda: f"experts of {location.name}"):  # all ranks combine, or none
            values = values_of(type(self), self, args, kwargs)
            call = read_call(structure.forms[0], values, structure.count, location.name)
            owner, local = (place.to(call.index.device) for place in self.places)
            index = expert_choices.current(call.index.long(), owner[:-1], location.axis, 0)
            routing = Routing.of(index, owner, location.axis, location.name)
            chosen = local[index[routing.sent].masked_fill(~routing.choices, -1)]
            rows, weights, choices = dispatch(call.rows, call.weights, chosen, routing)
            results = self._run(super().forward, rows, choices, weights)
        return call.result(combine(results, routing))

    def _run(self, forward: Any, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Run the experts of this rank on (R, H) rows; without rows, return (0, H') with gradients of 0."""
        structure, ep, layout = self.structure, self.location.axis.size, self.structure.layout
        if layout is not None and computes(self, rows.device):
            matrices = layout.matrices(functools.partial(getattr, self))
            return run_packed(rows, chosen, weights, matrices, layout.activation(self))
        with counting(self, structure, ep):
            if rows.shape[0]:
                return run_pairs(structure, forward, rows, chosen, weights, ep)
            row = torch.linspace(0.5, 1.5, rows.shape[1], device=rows.device).to(rows).unsqueeze(0)
            nothing = run_pairs(
                structure, forward, row, chosen.new_full((1, 1), self.first_local), weights.new_zeros(1, 1), ep
            )
        # a gradient of zeros, as experts of a whole layer have that no token has chosen
        adapted = getattr(self, "parametrizations", {})
        weights_here = [*self.parameters(), *(getattr(self, name) for name in adapted)]
        return nothing[:0] + (rows.sum() + sum(weight.flatten()[:0].sum() for weight in weights_here))


def divide_experts(model: nn.Module, mesh: Mesh, ep: int) -> list[str]:
    """Divide the experts of all layers among `ep` ranks, in place. All ranks must call this, with whole models.

    Args:
        model: the model; values are those of the first rank.
        mesh: mesh of all ranks.
        ep: number of ranks among which the experts of a layer are divided.

    Returns:
        Names of the divided modules of experts.

    Raises:
        ExpertParallelError: the model has no experts, they cannot be divided, or their number is no multiple of `ep`.
        MeshError: `ep` does not divide the ranks of dp_shard x sp.
    """
    modules = [entry for entry in find_experts(model) if not isinstance(entry[1], DividedExperts)]
    if not modules:
        raise ExpertParallelError(
            "expert_parallel: the model has no module that is called with tokens, choices and weights (docs/experts.md "
            "has other forms), with its experts along dim 0 of its parameters or as a child for each; leave "
            "expert_parallel out, or use deepspeed.moe.layer.MoE"
        )
    axis, order, known = mesh.axis("ep", ep=ep), order_of(mesh, ep), dict[Any, ExpertStructure]()
    for name, count in ((name, count) for name, _, structure in modules for count in structure.groups):
        if count % ep:
            fits = [n for n in range(1, count + 1) if count % n == 0]
            raise ExpertParallelError(f"'{name}' has {count} experts, no multiple of ep {ep}; sizes that fit: {fits}")
    kinds = {name: _kind_of(module, structure) for name, module, structure in modules}
    for name, module, structure in modules:  # before anything is divided
        if not any(is_managed(param) for param in module.parameters()):
            _try(known, kinds[name], name, module, structure, ep)
    for name, module, structure in modules:
        location, kind = ExpertLocation(axis, name, structure.count, order), kinds[name]
        if kind in known and _has_divided(module, structure):
            become_parallel(module, location, known[kind])
            continue
        wrappers = wrappers_of(model, module)
        adapted = [part for wrapper in wrappers for part in adapters_of(wrapper, structure, ep, location.part)]
        params = {(module, key): param for key, param in module.named_parameters()}
        params |= {(part.owner, part.key): part.param for part in adapted}
        born_sharded = [key for key, param in params.items() if is_managed(param)]  # by `zero.Init`: equal on all ranks
        unshard(params[key] for key in born_sharded)
        formed = _try(known, kind, name, module, structure, ep)
        whole = [param for key, param in params.items() if key not in born_sharded]
        label = "broadcast of rank 0's experts"  # its values count, as for all parameters
        broadcast_tensors(mesh.axis(*REPLICATED), whole, label)
        become_parallel(module, location, formed, adapted)
        for wrapper in wrappers:
            set_local_count(wrapper, location.count, location.local_count)
        _shard_again(name, born_sharded, mesh)
    advise(model, {name: module for name, module, _ in modules})
    guard(model, "generate", _generate_in_step)
    count = modules[0][2].count
    log_rank0(f"experts of {len(modules)} layers are divided among {ep} ranks: {count // ep} of {count} each")
    return [name for name, *_ in modules]


def _generate_in_step(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set `synced_gpus` in `kwargs`: each rank runs until the sequences of all ranks have ended, since other ranks need
    its experts. NotAvailableError for options by which ranks would run different numbers of passes."""
    settings = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    for key in ("cache_implementation", "prefill_chunk_size"):
        value = kwargs.get(key, getattr(settings, key, None))
        if value and (key == "prefill_chunk_size" or "static" in str(value)):
            raise NotAvailableError(
                f"generate() with {key}={value!r}: the experts of this model are divided among ranks, which run as "
                f"many passes each, until all have ended; leave {key} out"
            )
    methods = [getattr(type(module), "generate", None) for module in model.modules()]
    parameters = [dict(inspect.signature(method).parameters) if method else {} for method in methods]
    outer = parameters[0]  # of the model itself: a wrapper may pass its keywords on
    passes = "synced_gpus" in outer or any(entry.kind is entry.VAR_KEYWORD for entry in outer.values())
    if passes and any("synced_gpus" in names for names in parameters):
        kwargs["synced_gpus"] = True


def _kind_of(module: nn.Module, structure: ExpertStructure) -> Any:
    return type(module), structure, tuple(tuple(param.shape) for param in module.parameters())


def _has_divided(module: nn.Module, structure: ExpertStructure) -> bool:
    """Return whether packed experts were divided already, with another module that shares these parameters."""
    return bool(structure.packed) and all(placement_of(module.get_parameter(key)).ep > 1 for key in structure.packed)


def _try(
    known: dict[Any, ExpertStructure], kind: Any, name: str, module: nn.Module, structure: ExpertStructure, ep: int
) -> ExpertStructure:
    """Test a module and return its structure with the form of its calls; modules of one `kind` are tested once.

    Raises:
        ExpertParallelError: the module cannot be divided.
    """
    if kind not in known or "forward" in vars(module):
        known[kind], why = tried(module, structure, ep)
        if why:
            raise ExpertParallelError(f"the experts of '{name}' ({type(module).__name__}) cannot be divided: {why}")
    return known[kind]


def _shard_again(name: str, places: Iterable[tuple[nn.Module, str]], mesh: Mesh) -> None:
    """Shard parameters, given by module and name, over the ranks with the same experts; missing ones are skipped."""
    for owner, key in places:
        param = dict(owner.named_parameters()).get(key)
        if param is None:
            continue
        ep = placement_of(param).ep
        alike = mesh.axis("edp", ep=ep) if ep > 1 else mesh.axis(*REPLICATED)
        if alike.size > 1:
            shard_parameter(param, f"{name}.{key}", alike)


def order_of(mesh: Mesh, ep: int) -> list[int]:
    """Return the positions, on the axis of `ep` ranks, of the ranks in the order of their experts."""
    ranks = mesh.axis("ep", ep=ep).ranks
    place_of = {mesh.expert_coordinates(rank, ep)["ep"]: position for position, rank in enumerate(ranks)}
    return [place_of[index] for index in range(ep)]


_classes: dict[type, type] = {}


def become_parallel(
    module: nn.Module, location: ExpertLocation, structure: ExpertStructure, adapted: Iterable[ExpertPart] = ()
) -> None:
    """Reduce a module of experts, and the adapters on it, to the experts of this rank, in place.

    Args:
        module: module with all experts.
        location: share of this rank.
        structure: structure of the module, with one form of calls.
        adapted: slices of its adapters' parameters for this rank.
    """
    kind, ep = type(module), location.axis.size
    if kind not in _classes:
        _classes[kind] = type(f"Parallel{kind.__name__}", (DividedExperts, kind), {"__module__": __name__})
    part, (owner, local) = location.part, structure.places(ep)
    for name, param in module.named_parameters():
        if name in structure.packed and placement_of(param).ep == 1:  # not tied to a module that was divided before
            cut_tensor(param, 0, structure.segments(param.shape[0], ep, part), ep=ep)
    for adapter in adapted:
        cut_tensor(adapter.param, adapter.dim, adapter.segments, ep=ep)
    for expert, name in enumerate(structure.children):
        if owner[expert] != part:
            module._modules[name] = RemoteExpert()
            continue
        for param in module.get_submodule(name).parameters():
            placed = placement_of(param)
            place(param, replace(placed, relations={**placed.relations, "ep": Relation.ABSENT}, ep=ep))
    experts: Any = module
    experts.__class__, experts.location, experts.structure = _classes[kind], location, structure
    ranks = torch.tensor(location.order)[owner]
    none = torch.tensor([-1])
    experts.places = torch.cat([ranks, none]), torch.cat([local, none])
    experts.first_local = int(local[owner == part][0])
    for each in dict.fromkeys((module, *(adapter.owner for adapter in adapted))):
        each.register_state_dict_post_hook(functools.partial(_whole_state, module))


def _whole_state(experts: Any, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """State-dict hook that gathers the experts, or their adapters, of all ranks. All ranks must call `state_dict`.

    With `keep_vars=True` the state dict has only the parameters of this rank.

    Raises:
        UsageError: the parameters are sharded (ZeRO stage 3).
    """
    location, children = experts.location, experts.structure.children
    params = dict(module.named_parameters())
    if module is experts:  # children in one order on all ranks, whatever that of their registration
        known = {child: number for number, child in enumerate(children)}
        params = dict(sorted(params.items(), key=lambda item: (known.get(item[0].partition(".")[0], -1), item[0])))
    for name, param in params.items():
        value, placement = state.get(prefix + name), placement_of(param)
        if value is None or isinstance(value, nn.Parameter) or placement.ep == 1:
            continue
        if isinstance(value, StandIn):
            raise UsageError(
                f"state_dict() at ZeRO stage 3 has some of the experts of '{location.name}' only: take the "
                f"weights from engine._zero3_consolidated_16bit_state_dict(), save_16bit_model or save_checkpoint"
            )
        label = f"experts of {location.name} for a state dict (all ranks call state_dict together)"
        if placement.relations.get("ep") is Relation.ABSENT:
            state.update({prefix + key: whole for key, whole in _children(experts, name, param, label).items()})
            continue
        division = replace(placement, cuts=placement.cuts[-1:])  # slices of tp stay slices
        state[prefix + name] = join_slices(location.axis, Region.of(division, param.shape), param.detach(), label)


def _children(module: Any, name: str, param: torch.Tensor, label: str) -> dict[str, torch.Tensor]:
    """All-gather the parameter of a child and its counterparts on the other ranks; return {name: tensor}."""
    location, structure = module.location, module.structure
    every = gathered(param, location.axis, 0, label=label).chunk(location.axis.size)
    child, _, rest = name.partition(".")
    number, each = structure.children.index(child) % location.local_count, location.local_count
    pieces = [every[position] for position in location.order]
    return {f"{structure.children[part * each + number]}.{rest}": piece for part, piece in enumerate(pieces)}


def is_divided(model: nn.Module) -> bool:
    """Return whether experts of the model are divided among ranks."""
    return any(placement_of(param).ep > 1 for param in model.parameters())
