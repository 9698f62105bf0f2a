"""Tensor-parallel split of a dense model.

A plan is made, its units (modules with matrices to split) are split one after the other, and each is compared with its
dense form unless this is switched off.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.autograd import enter
from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.collectives.same_error import digest, first_difference, raise_together, run_collectively
from deepspeed.comm.collectives.torch_api import all_gather_objects, object_exchange
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.process_groups.mesh import DIMS, Mesh
from deepspeed.errors import ArgumentError, DataError, MeshError, NotAvailableError, TensorParallelError, UsageError
from deepspeed.foundation.log import describe_error, log_rank0
from deepspeed.foundation.partition import partition_uniform
from deepspeed.foundation.pytree import tensors_in
from deepspeed.tensor_parallel import verify
from deepspeed.tensor_parallel.attention import become_heads, pad_rows_of_encoders
from deepspeed.tensor_parallel.channel_dependencies import ChannelDependencies, changing
from deepspeed.tensor_parallel.layers import SliceLocation
from deepspeed.tensor_parallel.module_attributes import cut_region, set_numbers
from deepspeed.tensor_parallel.packed_experts import become_packed
from deepspeed.tensor_parallel.plan import Specs, TensorParallelPlan, Unit, make_plan
from deepspeed.tensor_parallel.plan_file import read_plan, same_file
from deepspeed.tensor_parallel.rng import draw_alike, install
from deepspeed.tensor_parallel.trace import join
from deepspeed.tensor_parallel.vocab_parallel import cut_vocabulary
from deepspeed.zero.api.gathered_parameters import GatheredParameters
from deepspeed.zero.layout.placement import placement_of
from deepspeed.zero.parameters.grouping import unshard
from deepspeed.zero.parameters.parameter import is_managed

_guards = itertools.count()  # a method may be guarded more than once


def guard(model: nn.Module, name: str, look: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
    """Wrap the method `name` of a model: `look(model, args, kwargs)` runs before each call, and may raise.

    Copies of the model are guarded too. The method may be defined by the class, as an attribute of the model, or by a
    module that the model wraps. A missing method is not wrapped.
    """
    if not hasattr(model, name):
        return
    own = f"_ds_guarded_{next(_guards)}_{name}"  # attribute of the model, so that a copy has its own method
    if name in vars(model):
        object.__setattr__(model, own, vars(model)[name])

    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        look(self, args, kwargs)
        if own in vars(self):
            return vars(self)[own](*args, **kwargs)
        if hasattr(type(self), name):
            return getattr(type(self), name)(self, *args, **kwargs)
        return self.__getattr__(name)(*args, **kwargs)  # a wrapper that forwards attributes

    object.__setattr__(model, name, MethodType(guarded, model))


def guard_generating(model: nn.Module, axis: Axis) -> None:
    """Make `generate` of a split model compare its arguments over the ranks and use the first rank's random state.

    All ranks must then call `generate`; DataError if arguments differ, NotAvailableError for `max_time`.
    """

    def look(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = getattr(self, "generation_config", None)
        everyone = all_gather_objects(axis, digest([args, kwargs, own]))
        other = next((pos for pos, calls in enumerate(everyone) if calls != everyone[0]), None)
        if other is not None:
            raise DataError(
                f"ranks {axis.ranks[0]} and {axis.ranks[other]} share the model's matrices (tp), and generate() was "
                f"given other arguments on each, or has another generation_config: give both the same prompts"
            )
        passed = [*args, *kwargs.values(), own]
        inside = [entry for value in passed for entry in (value if isinstance(value, (list, tuple)) else [value])]
        by_clock = any(getattr(entry, "max_time", None) is not None for entry in inside)  # a config, or a criterion
        if kwargs["max_time"] is not None if "max_time" in kwargs else by_clock:
            raise NotAvailableError(
                "generate() with max_time is not available for a model that is split over ranks (tp): ranks would stop "
                "at different times, and the others would wait; give max_new_tokens instead"
            )
        draw_alike(axis)

    guard(model, "generate", look)


DEALT = 2  # maximum number of units that a rank runs before it sends results: the others wait for the slowest
_MARK = "_ds_tensor_plan"
T = TypeVar("T")


def plan_of(model: nn.Module) -> TensorParallelPlan | None:
    """Return the plan of a split model; None for a dense one."""
    return getattr(model, _MARK, None)


def is_cut(model: nn.Module) -> bool:
    """Return whether the model is already split."""
    return plan_of(model) is not None or any(placement_of(param).cuts for param in model.parameters())


def cut_over(mesh: Mesh, model: nn.Module, **options: Any) -> TensorParallelPlan:
    """Call `cut_model` on a mesh's axis `tp`; errors are raised on all ranks. All ranks of the mesh must call this."""
    everyone = mesh.axis(*DIMS)
    # tp groups meet in each unit's gather, and would wait for a group that has ended.
    born = any(map(is_managed, model.parameters()))
    in_step = everyone if born or options.get("settle") is not None else None
    return _in_step(everyone, lambda: cut_model(model, mesh.axis("tp"), in_step=in_step, **options))


def _in_step(everyone: Axis | None, action: Callable[[], T]) -> T:
    """Run an action and return its result; raise if it raised on any rank of `everyone` (None: on this rank)."""
    if everyone is None:
        return action()
    return raise_together(
        everyone,
        action,
        lambda rank, text: TensorParallelError(f"rank {rank}, of another row of tp, could not split the model: {text}"),
    )


def cut_model(
    model: nn.Module,
    axis: Axis,
    *,
    example: Any = None,
    check: str = "units",
    specs: Specs | None = None,
    vocabulary: bool = False,
    settle: Callable[[nn.Module], None] | None = None,
    plan_file: str | None = None,
    in_step: Axis | None = None,
) -> TensorParallelPlan:
    """Reduce a dense model to this rank's slices, in place; return the plan. All ranks of the axis must call this.

    Args:
        model: the same on all ranks; values are broadcast from the first rank. Parameters stay the same objects.
        axis: the ranks over which the matrices are split.
        example: arguments of its forward, see `example_inputs`; None: generated for a model of Transformers.
        check: "units" compares each unit with its dense form, forward and backward; "model" also compares the model's
            output; "off" compares nothing; "shapes" neither compares nor broadcasts values, which the caller sets.
        specs: rules for single matrices; None: no rules.
        vocabulary: also split the embedding and the output projection of a causal LM.
        settle: called with the module of each unit after its split, while its parameters are plain tensors.
        plan_file: file of `write_plan`, read by each rank; None: the plan comes from a search.
        in_step: ranks of all tp groups, which then stop together on an error; None: tp groups do not synchronise.

    Raises:
        MeshError: the ranks have different models.
        TensorParallelError: the ranks' plan files differ, no matrix can be split, a rule is violated, or slices do not
            compute the results of the dense model.
        NotAvailableError: `vocabulary` is set, and the model's loss cannot be computed from split logits.
    """
    same_file(axis, plan_file)
    _same_model(model, axis, values=check != "shapes")
    check = "off" if check == "shapes" else check
    find = make_plan if plan_file is None else functools.partial(read_plan, plan_file)
    own_plan = _planned(lambda: find(model, axis.size, axis.rank, example, specs), axis)
    plan = _in_step(in_step, lambda: _agreed(own_plan, axis, specs))
    log_rank0(plan.table())
    # A model from `zero.Init` is whole unit by unit; a model that communicates in its forward runs on all ranks.
    alone = check == "off" or plan.meets or any(map(is_managed, model.parameters()))
    together = 1 if alone else DEALT * axis.size
    for dealt in _dealt(model, plan.units, together):
        units = {model.get_submodule(unit.name): unit for unit in dealt}
        _in_step(in_step, functools.partial(_cut_units, units, axis, check != "off", settle))
        for unit in units.values():
            unit.calls = []  # the recorded tensors are not needed any more
    pad_rows_of_encoders(model)
    get_accelerator().empty_cache()  # memory of plans and comparisons
    columns = {name for name, how in plan.cuts().items() if how == "column"}
    install(model, plan.drops, columns, axis)
    if vocabulary:
        _in_step(in_step, lambda: cut_vocabulary(model, axis, check != "off"))
    if check == "model":
        verify.compare_models(model, plan, axis)
    plan.output = None
    _guard_saving(model)
    guard_generating(model, axis)
    object.__setattr__(model, _MARK, plan)
    return plan


def _guard_saving(model: nn.Module) -> None:
    """Make `save_pretrained` without `state_dict` raise UsageError: it would silently save one rank's slices."""

    def look(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("state_dict") is None:
            raise UsageError(
                "save_pretrained of a model that is split over ranks (tp) would save one rank's slices: pass "
                "state_dict=engine._consolidated_16bit_state_dict(), or call engine.save_16bit_model(folder)"
            )

    guard(model, "save_pretrained", look)


def _same_model(model: nn.Module, axis: Axis, values: bool = True) -> None:
    """Raise MeshError if the ranks' parameters differ in more than values; broadcast the first rank's `values`."""
    params = [(name, tuple(t.shape), str(t.dtype)) for name, t in model.named_parameters()]
    if (difference := first_difference(axis, params)) is not None:
        other, first, second = difference
        raise MeshError(
            f"ranks {axis.ranks[0]} and {axis.ranks[other]} (tp) should have the same model, and have {first} and "
            f"{second}"
        )
    if not values:
        return
    label = "broadcast of a model that is to be split"
    tensors = [t for t in [*model.parameters(), *model.buffers()] if t.device.type != "meta"]
    broadcast_tensors(axis, [t.data for t in tensors if not is_managed(t)], label)
    for param in [t for t in tensors if is_managed(t)]:
        group: Any = param._ds_member.group  # type: ignore[attr-defined]
        with GatheredParameters(param, modifier_rank=group.axis.ranks[0]), torch.no_grad():
            broadcast_tensors(axis, [param], label)


def _planned(find: Callable[[], TensorParallelPlan], axis: Axis) -> TensorParallelPlan | str:
    before = axis.collectives_begun()
    try:
        plan = find()
        plan.meets = axis.collectives_begun() != before
        return plan
    except (ArgumentError, TensorParallelError) as error:
        return str(error)
    except Exception as error:  # a model's forward may raise any error, on one rank only
        return f"its forward on a small input ended in {describe_error(error, 300)}"


def _agreed(plan: TensorParallelPlan | str, axis: Axis, specs: Specs | None) -> TensorParallelPlan:
    """Reduce a plan to regions that every rank can split; TensorParallelError if none, or a rule is violated."""
    own: Any = plan
    if isinstance(plan, TensorParallelPlan):
        regions = {unit.key(fitted): fitted.digest() for unit in plan.units for fitted in unit.regions}
        calls = {unit.name: [call.shapes() for call in unit.calls] for unit in plan.units}
        own = (regions, plan.whole, calls, plan.meets, plan.unpadded)
    everyone = all_gather_objects(axis, own)
    refusals = {rank: text for rank, text in zip(axis.ranks, everyone, strict=True) if isinstance(text, str)}
    if refusals or not isinstance(plan, TensorParallelPlan):
        alike = len(set(refusals.values())) == 1 and len(refusals) == axis.size
        texts = [text if alike else f"rank {rank}: {text}" for rank, text in refusals.items()]
        raise TensorParallelError(texts[0] if alike else " | ".join(texts))
    unpadded = [text for *_, text in everyone]
    if any(unpadded) and not all(unpadded):
        texts = [f"rank {rank}: {text}" for rank, text in zip(axis.ranks, unpadded, strict=True) if text]
        raise TensorParallelError(
            f"the forward on a small input with padding ended on some ranks of tp {list(axis.ranks)} alone: "
            f"{' | '.join(texts)}"
        )
    for _, whole, _, meets, _ in everyone:
        plan.whole, plan.meets = {**whole, **plan.whole}, plan.meets or meets
    plan.keep_common_regions([regions for regions, *_ in everyone])
    for unit in plan.units:
        unit.keep_common_calls([calls[unit.name] for _, _, calls, *_ in everyone], axis)
    if not plan.units:
        raise TensorParallelError(f"no matrix can be split on every rank of tp {list(axis.ranks)}: {plan.whole}")
    if specs is not None:
        specs.check(plan.cuts(), plan.whole, [name for name, shape in plan.shapes.items() if len(shape) > 1])
    return plan


def _dealt(model: nn.Module, units: Sequence[Unit], most: int) -> list[list[Unit]]:
    """Group units (modules with regions) for joint comparison, up to `most` per group.

    A unit that shares parameters with an earlier unit gets its own group: those parameters are sliced already.
    """
    groups: list[list[Unit]] = [[]]
    known: set[int] = set()
    for unit in units:
        own = set(map(id, model.get_submodule(unit.name).parameters()))
        alone = not known.isdisjoint(own)
        known |= own
        if alone or len(groups[-1]) == most:
            groups.append([])
        groups[-1].append(unit)
        if alone:
            groups.append([])
    return [group for group in groups if group]


def _cut_units(
    units: Mapping[nn.Module, Unit], axis: Axis, check: bool, settle: Callable[[nn.Module], None] | None
) -> None:
    """Split some units (modules with regions), and, if `check`, compare each with its dense form; a collective."""
    unshard(param for module in units for param in module.parameters())
    if not check:
        for module, unit in units.items():
            ended = run_collectively(axis, functools.partial(_become_slices, module, unit, axis))
            verify.finished(unit.name, axis, ended)
            if settle is not None:
                settle(module)
        return
    constants = {module: _hidden(module) for module in units}
    inputs = [t for unit in units.values() for call in unit.calls for t in tensors_in(call.arguments)]
    # Random numbers drawn before a unit may differ over ranks.
    broadcast_tensors(axis, inputs, f"inputs of {' and '.join(unit.name for unit in units.values())}")
    wholes, seen = _dense_forms(units, axis), []
    for (module, unit), dense in zip(units.items(), wholes, strict=True):
        ended = run_collectively(axis, functools.partial(_cut_and_run, module, unit, dense, axis))
        seen.append(verify.finished(unit.name, axis, ended))
    everyone = all_gather_objects(axis, [text for text, _ in seen])
    for (module, unit), (_, cut), *texts in zip(units.items(), seen, *everyone, strict=True):
        if any(texts):
            verify.judge(unit, texts, cut, module, axis)
        params = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in constants[module].items():
                params[name].fill_(value)
        if settle is not None:
            settle(module)


def _dense_forms(units: Mapping[nn.Module, Unit], axis: Axis) -> list[list[verify.UnitResult]]:
    """Compute the dense results of units, a collective: each rank runs some, or all ranks run a single unit."""
    dealt, running = list(units.items()), ""
    bounds = partition_uniform(len(dealt), axis.size)
    own_units = dealt if len(dealt) == 1 else dealt[bounds[axis.rank] : bounds[axis.rank + 1]]

    def action() -> list[list[verify.UnitResult]]:
        nonlocal running
        results = []
        for module, unit in own_units:
            running = unit.name
            results.append(verify.run(module, unit))
        return results

    ended = run_collectively(axis, action)
    if not ended.ok:
        names = all_gather_objects(axis, running)
        running = next(name for name, text in zip(names, ended.texts, strict=True) if text)
    own = verify.finished(running, axis, ended)
    if len(dealt) == 1:
        return own
    by_rank = object_exchange.current.gather_present(axis, own)
    forms: list[list[verify.UnitResult]] = []
    for position, (low, high) in enumerate(itertools.pairwise(bounds)):
        forms += by_rank.get(position) or [[]] * (high - low)  # rank of a simulation that does not exist: no comparison
    return forms


def _cut_and_run(
    module: nn.Module, unit: Unit, dense: list[verify.UnitResult], axis: Axis
) -> tuple[str, list[verify.UnitResult]]:
    """Split a unit and run it; return the differences from the dense results, and the results."""
    _become_slices(module, unit, axis)
    cut = verify.run(module, unit)
    return verify.differences(unit, dense, cut, module, axis), cut


def _become_slices(module: nn.Module, unit: Unit, axis: Axis) -> None:
    for fitted in unit.regions:
        shares = fitted.shares
        if shares.region.heads:
            home = shares.region.home
            become_heads(module.get_submodule(home), shares, axis.rank, SliceLocation(axis, join(unit.name, home)))
        elif shares.region.packed:
            become_packed(module, shares, axis.rank, SliceLocation(axis, unit.name))
        else:
            cut_region(module, shares, axis.rank, lambda name: SliceLocation(axis, join(unit.name, name)))
        set_numbers(module, fitted.numbers)
        if shares.inputs or shares.partial_inputs:
            home = module.get_submodule(shares.region.home)
            home.register_forward_pre_hook(_inputs_hook(shares, axis), with_kwargs=True)


@torch.no_grad()
def _hidden(module: nn.Module) -> dict[str, float]:
    """Add noise to parameters with equal elements, which would hide errors; return the original values by name."""
    constants = {}
    for index, (name, param) in enumerate(module.named_parameters()):
        if not param.is_floating_point() or param.numel() < 2 or param.flatten()[0] != param.flatten()[-1]:
            continue
        if param.min() == param.max():
            constants[name] = float(param.flatten()[0])
            noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(index))
            param.add_((noise * 0.2).to(param))
    return constants


def _inputs_hook(shares: ChannelDependencies, axis: Axis) -> Callable[..., Any]:
    """Create a forward pre-hook that slices a region's arguments and sums the gradients of arguments over the ranks."""

    def change(path: str, tensor: torch.Tensor) -> torch.Tensor:
        share = shares.inputs.get(path)
        if share is not None and share.is_local(tensor, axis.rank):
            return tensor
        if share is not None:
            return share.pick(enter(tensor, axis, f"gradient of {path}"), axis.rank)
        return enter(tensor, axis, f"gradient of {path}") if path in shares.partial_inputs else tensor

    hook = changing(change)
    hook.transparent = not shares.inputs  # without split arguments, forward leaves all of them as they are
    return hook
