"""From model, arguments and configuration to the components an engine is made of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.collectives.one_sided import release_abandoned
from deepspeed.comm.collectives.same_error import OrderCheck
from deepspeed.config import DeepSpeedConfig, Facts
from deepspeed.engine.client_support import tell_dtypes
from deepspeed.engine.memory.suggestions import tells_what_fits
from deepspeed.engine.offload_plan import Offload, accumulator_dtype, master_dtype, state_of_group
from deepspeed.engine.optimizer_setup import traits_of
from deepspeed.engine.pipeline_setup import limits_of_stages
from deepspeed.errors import ArgumentError, OptimizerError, SchedulerError, ShardedParameterError, UsageError
from deepspeed.foundation.log import log_once, log_rank0
from deepspeed.foundation.module_tree import own_state
from deepspeed.optim import loss_scale
from deepspeed.optim.build import build_optimizer, check_supported, leave_embeddings_to_adam, needs_whole_tensors
from deepspeed.optim.lr_schedules import build_scheduler
from deepspeed.optim.precision import DTYPES, InputCaster, cast_buffers, check_policies, compute_dtypes
from deepspeed.optim.separability import UpdateTraits
from deepspeed.zero.api.reshard import check_not_served
from deepspeed.zero.gradients.accumulation import AccumulationWindow
from deepspeed.zero.gradients.buckets import ReduceSettings
from deepspeed.zero.gradients.reducer import Reducer
from deepspeed.zero.layout.stages import policy_for
from deepspeed.zero.layout.units import mark_leaves
from deepspeed.zero.optimizer.optimizer import StepSettings, ZeroOptimizer
from deepspeed.zero.parameters.collective_order import GatherOrder
from deepspeed.zero.parameters.grouping import GroupingPlan, build_group, named_parameters, plan_groups
from deepspeed.zero.parameters.module_hooks import DeferredAllGatherHooks, Hook, ModuleHooks
from deepspeed.zero.parameters.parallel_groups import (
    ParallelGroups,
    RankResolver,
    Signature,
    equalise,
    find_tied,
    signatures_of,
)
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.prefetch import PrefetchLimits, PrefetchScheduler
from deepspeed.zero.parameters.shard_group import ShardGroup, State


@dataclass
class Components:
    """What an engine puts in order."""

    groups: list[ShardGroup]
    axes: ParallelGroups
    dtype: torch.dtype
    window: AccumulationWindow
    reducer: Reducer | None = None
    optimizer: ZeroOptimizer | None = None
    lifecycle: ModuleHooks | None = None
    caster: InputCaster | None = None
    frozen: list[Any] = field(default_factory=list)  # members that may be unfrozen later
    destroyed: bool = False  # the engine has let everything go
    room: int = 0  # bytes that were free for all of it when it was built
    given: int = 0  # bytes of the model as it was given

    def wind_up(self) -> ShardedParameterError | None:
        """Let no gather be under way; gives the first complaint about a change that is lost, if there is one."""
        first = None
        for _ in self.groups:  # each complains once
            try:
                if self.lifecycle is not None:
                    self.lifecycle.settle()
                break
            except ShardedParameterError as error:
                first = first or error
        for group in self.groups:
            if group.state is State.INFLIGHT:
                group.wait_all_gather()
        return first


def compute_dtype(config: DeepSpeedConfig) -> torch.dtype:
    """The dtype of parameters while they compute."""
    if config.fp16.enabled:
        if get_accelerator().device_name() == "cpu":
            log_once("fp16 on CPU works but is slow (about 45 times slower than bf16 on this class of machine)")
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled else torch.float32


def listed(model_parameters: Any) -> list[Any] | None:
    """Materialise generators, of parameters or inside groups; None stays None."""
    if model_parameters is None:
        return None
    if isinstance(model_parameters, torch.Tensor):
        return [model_parameters]
    if isinstance(model_parameters, (str, bytes, dict)) or not isinstance(model_parameters, Iterable):
        raise ArgumentError(
            f"model_parameters is a {type(model_parameters).__name__}; pass model.parameters() or a list of groups"
        )
    entries = list(model_parameters)
    for entry in entries:
        if isinstance(entry, tuple):
            raise ArgumentError("model_parameters holds (name, parameter) pairs; pass model.parameters() instead")
        if isinstance(entry, dict):
            _check_group(entry)
        elif not isinstance(entry, torch.Tensor):
            raise ArgumentError(f"model_parameters holds a {type(entry).__name__}; it takes parameters or group dicts")
    if len({isinstance(entry, dict) for entry in entries}) > 1:
        raise ArgumentError("model_parameters mixes parameters and group dicts; put every parameter into a group")
    return entries


def _check_group(group: dict[str, Any]) -> None:
    """Make a list of a group's parameters, and see that they are parameters."""
    params = group.get("params")
    if isinstance(params, torch.Tensor):
        return
    if isinstance(params, (str, bytes)) or not isinstance(params, Iterable):
        raise ArgumentError(f"a group of model_parameters needs 'params' with its parameters; it has {sorted(group)}")
    group["params"] = list(params)
    for param in group["params"]:
        if not isinstance(param, torch.Tensor):
            raise ArgumentError(f"'params' of a group of model_parameters holds a {type(param).__name__}, no parameter")


def _flat(entries: Iterable[Any]) -> list[Parameter]:
    tensors: list[Any] = []
    for entry in entries:
        inside = entry["params"] if isinstance(entry, dict) else entry
        tensors += [inside] if isinstance(inside, torch.Tensor) else list(inside)
    return tensors


def choose_optimizer(
    model: nn.Module, client: Any, parameters: list[Any] | None, config: DeepSpeedConfig
) -> torch.optim.Optimizer | None:
    """The optimizer of an engine: the client's, the JSON's, AdamW when there are parameters to train, or none."""
    params: list[Any] = parameters or [p for p in model.parameters() if p.requires_grad]
    if isinstance(client, torch.optim.Optimizer):
        check_supported(client)
        return client
    if client is not None and hasattr(client, "param_groups"):
        raise OptimizerError(f"optimizer is a {type(client).__name__}, not a torch.optim.Optimizer or a callable")
    if client is not None:
        if not callable(client):
            raise OptimizerError(f"optimizer is a {type(client).__name__}; pass a torch.optim.Optimizer or a callable")
        optimizer = call_with("optimizer", client, params)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptimizerError(f"the optimizer callable returned a {type(optimizer).__name__}, not an Optimizer")
        check_supported(optimizer)
        return optimizer
    if config.optimizer is not None and config.optimizer.type:
        if not params:
            raise OptimizerError("the JSON names an optimizer, but the model has no parameter to train")
        arguments = dict(config.optimizer.params or {})
        if config.bf16.bf16_optimizer_states:
            arguments["fp32_optimizer_states"] = False
        if config.optimizer.type.lower() == "muon":
            leave_embeddings_to_adam(model)
        on_host = config.zero.offload_optimizer.device != "none"
        return build_optimizer(config.optimizer.type, arguments, params, on_host=on_host)
    if parameters and any(p.requires_grad for p in _flat(parameters)):
        log_once("no optimizer given: AdamW with torch's defaults (lr 1e-3, betas 0.9 0.999, weight decay 1e-2)")
        return build_optimizer("AdamW", {"torch_adam": True, "weight_decay": 1e-2}, parameters)
    return None


def facts_of(model: nn.Module, client: Any, device: torch.device) -> Facts:
    """What "auto" values are resolved from."""
    config = getattr(model, "config", None)
    hidden = getattr(config, "hidden_size", None) or max(getattr(config, "hidden_sizes", None) or [0]) or None
    rate = client.param_groups[0].get("lr") if isinstance(client, torch.optim.Optimizer) else None
    return Facts(
        hidden_size=hidden if isinstance(hidden, int) else None,
        device=device.type,
        bf16_fast=bool(get_accelerator().is_bf16_fast()),
        learning_rate=float(rate) if rate is not None else None,
    )


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[Parameter, str]) -> set[Parameter]:
    updated = set()
    foreign = 0
    for param in _flat(optimizer.param_groups):
        if param in updated:
            raise OptimizerError(f"parameter '{names.get(param, '?')}' appears twice in the optimizer's groups")
        updated.add(param)
        foreign += param not in names
    for param in updated:
        if param.is_complex():
            raise OptimizerError(
                f"parameter '{names.get(param, '?')}' is complex, and gradients are summed as real numbers; hold it "
                f"as a real parameter and use torch.view_as_complex in forward"
            )
    if foreign and foreign == len(updated):
        raise OptimizerError(
            "the optimizer holds none of the model's parameters: it was built over another model or over copies made "
            "before a cast or move; build it from model.parameters() of the model passed to initialize"
        )
    if foreign:
        raise OptimizerError(
            f"the optimizer holds {foreign} parameter(s) that are not in the model passed to initialize; "
            f"build it from that model's parameters"
        )
    return updated


@tells_what_fits
def build(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: DeepSpeedConfig,
    axes: ParallelGroups,
    device: torch.device,
    held: ZeroOptimizer | None = None,
) -> Components:
    """Cast, move, group and hook a model.

    Args:
        model: the user's module; its parameters keep their identity.
        optimizer: over its parameters, or None.
        config: resolved configuration.
        axes: who shares what.
        device: where the model computes.
        held: the optimizer users hold of an engine that is laid out anew.
    """
    low = compute_dtype(config)
    _check_parameters(model, low)
    mark_leaves(model, config.zero.leaf_module)
    written = own_state(model)
    names = _without(written, named_parameters(model), optimizer)
    updated = _check_optimizer(model, optimizer, names) if optimizer is not None else set()
    _place(model, device)
    broadcast_tensors(
        axes.dp_sp_group,
        [t for t in [*names, *written, *model.buffers()] if not is_managed(t) and t.device.type != "meta"],
        "broadcast of rank 0's model",
    )
    signatures = signatures_of(axes.mesh, names)
    tied = find_tied(axes.mesh, names, signatures)
    equalise(axes.mesh, names, signatures, tied)
    own = {names[param]: signature for param, signature in signatures.items() if signature[1]}
    relations = RankResolver(axes.mesh, policy_for(config.zero.stage, axes.mesh.size("pp")).owns_a_shard, tied, own)
    fp32_modules = config.data_types.keep_in_fp32_modules
    stay = () if fp32_modules in (None, "auto") else fp32_modules
    wanted = compute_dtypes(model, low, stay) if low != torch.float32 else {}
    if config.data_types.buffer_dtype is not None:
        cast_buffers(model, DTYPES[config.data_types.buffer_dtype], stay)
    traits = traits_of(optimizer, config, axes) if held is None else held.traits
    plan = _grouping_plan(config, optimizer, traits)
    groups = _groups(model, names, (wanted, updated), (relations, signatures), plan, config, optimizer)
    for param, dtype in wanted.items():
        if not is_managed(param):
            param.data = param.data.to(dtype)
    tell_dtypes(model, wanted)
    components = Components(groups, axes, low, _window(config, axes) if held is None else held.window)
    if wanted and config.auto_cast:
        components.caster = InputCaster(model, wanted, low, Hook)
    sharded = [g for g in groups if g.policy.gathers_before_use]
    if sharded:
        components.lifecycle = _lifecycle(model, sharded, config, axes)
    if optimizer is not None:
        _add_optimizer(components, model, (optimizer, traits), config, held)
    return components


def _grouping_plan(
    config: DeepSpeedConfig, optimizer: torch.optim.Optimizer | None, traits: UpdateTraits
) -> GroupingPlan:
    return GroupingPlan(
        bucket=config.zero.reduce_bucket_size,
        whole_tensors=optimizer is not None and needs_whole_tensors(optimizer),
        one_owner=not traits.by_parameter,
        persist_below=config.zero.param_persistence_threshold,
        persist_total=config.zero.model_persistence_threshold,
    )


def _without(
    written: dict[Parameter, None], names: dict[Parameter, str], optimizer: torch.optim.Optimizer | None
) -> dict[Parameter, str]:
    """The parameters that are left to manage, and to the optimizer, without those that the model writes itself."""
    for group in optimizer.param_groups if optimizer is not None and written else ():
        group["params"] = [param for param in group["params"] if param not in written]
    return {param: name for param, name in names.items() if param not in written}


def _window(config: DeepSpeedConfig, axes: ParallelGroups) -> AccumulationWindow:
    ranks = axes.data.size if config.gradient_allreduce_op == "mean" else 1
    # Ranks of a sequence have the same loss, of all its tokens, and each differentiates it once.
    ranks *= axes.mesh.size("sp")
    return AccumulationWindow(config.gradient_accumulation_steps, config.train_micro_batch_size_per_gpu, ranks)


def _check_parameters(model: nn.Module, low: torch.dtype) -> None:
    check_policies(model, low)
    check_not_served(model)
    for name, param in model.named_parameters():
        if isinstance(param, nn.UninitializedParameter):
            raise ArgumentError(f"parameter '{name}' of a lazy module has no shape yet; run a forward first")
        layout = zip(param.stride(), param.shape, strict=True)
        if param.numel() and any(step == 0 and size > 1 for step, size in layout):
            raise ArgumentError(
                f"parameter '{name}' is expanded: elements of its shape {tuple(param.shape)} share memory, so they "
                f"cannot be updated in place; make it of .clone()"
            )
        if param.is_inference() or torch.is_inference_mode_enabled():
            raise UsageError(
                f"parameter '{name}' cannot be trained: the model was made, or initialize was called, under "
                f"torch.inference_mode(); do both outside of it"
            )


def _place(model: nn.Module, device: torch.device) -> None:
    if device.type == "cpu" and all(t.device.type == "cpu" for t in [*model.parameters(), *model.buffers()]):
        return
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None and not is_managed(param) and param.device != device:
                if param.device.type == "meta":
                    raise ArgumentError(
                        "the model has parameters on the meta device, which have no values; build it under "
                        "deepspeed.zero.Init or give it real weights before initialize"
                    )
                param.data = param.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _groups(
    model: nn.Module,
    names: dict[Parameter, str],
    chosen: tuple[dict[Parameter, torch.dtype], set[Parameter]],
    ranks: tuple[RankResolver, dict[Parameter, Signature]],
    plan: GroupingPlan,
    config: DeepSpeedConfig,
    optimizer: torch.optim.Optimizer | None,
) -> list[ShardGroup]:
    (wanted, updated), (relations, signatures) = chosen, ranks
    policy = policy_for(config.zero.stage, relations.stages)
    offload, planned = Offload(config), []
    for own, members in plan_groups(model, names, updated, policy, plan, wanted, signatures):
        around = relations.resolve(signatures[members[0]])
        dtype = wanted.get(members[0], members[0].dtype)
        trained = members[0] in updated and members[0].requires_grad and dtype.is_floating_point
        master = master_dtype(config, dtype) if trained else None
        layout = plan.cut(own, [p.numel() for p in members], around.shard.size)
        state = state_of_group(config, (own, layout), around.shard.rank, (dtype, master), optimizer)
        planned.append((around, own, members, (dtype, master), offload.place(state), state))
    offload.announce([(state, tiers) for *_, tiers, state in planned])
    born = any(is_managed(param) for param in names)
    groups = [
        build_group(around, own, members, names, plan, dtypes, tiers)
        for around, own, members, dtypes, tiers, _ in planned
    ]
    if born and groups[0].device.type != "cpu":  # whole blocks are free now, which hold nothing but holes
        get_accelerator().empty_cache()
    places = {param: place for place, param in enumerate(names)}
    for member in (member for group in groups for member in group.members):
        member.place = places[member.param]
    return groups


def _lifecycle(
    model: nn.Module, sharded: list[ShardGroup], config: DeepSpeedConfig, axes: ParallelGroups
) -> ModuleHooks:
    zero = config.zero
    limits = PrefetchLimits(zero.max_live_parameters, zero.max_reuse_distance, zero.prefetch_bucket_size)
    if axes.mesh.size("pp") > 1:
        limits = limits_of_stages(sum(group.numel for group in sharded), limits, config)
    any_graph = axes.shard.tagged and axes.shard.size > 1 and not zero.stage3_fixed_graph
    release_abandoned(group.axis for group in sharded)
    for group in sharded:
        group.serve(any_graph)
    order = None
    if any(group.fetch is None for group in sharded) and OrderCheck.possible(axes.dp_sp_group):
        order = GatherOrder(axes.dp_sp_group, zero.stage3_check_order, zero.stage3_fixed_graph)
    lifecycle = ModuleHooks(model, PrefetchScheduler(sharded, limits), order)
    log_rank0(lifecycle.bound())
    return lifecycle


def _add_optimizer(
    components: Components,
    model: nn.Module,
    chosen: tuple[torch.optim.Optimizer, UpdateTraits],
    config: DeepSpeedConfig,
    held: ZeroOptimizer | None,
) -> None:
    fp16 = config.fp16.enabled
    low = components.dtype != torch.float32
    ranks = components.axes.data.size if config.gradient_allreduce_op == "mean" else 1
    comm_dtype = DTYPES[config.communication_data_type] if config.communication_data_type else None
    predivide = config.gradient_predivide_factor
    overlap = config.zero.overlap_comm is not False
    settings = ReduceSettings(
        accumulates=components.window.steps > 1,
        accumulator=accumulator_dtype(config),
        comm_dtype=comm_dtype,
        overlap=overlap,
        # A bucket travels while the next one is collected: with one alone, backward would wait for every message.
        in_flight=config.zero.reduce_bucket_size * (2 if overlap else 1),
        prescale=1.0 / ranks if config.prescale_gradients else 1.0 / predivide if predivide != 1.0 else None,
        in_rank_order=config.deterministic_reduction,
        watch_ranks=low,
    )
    axes = components.axes
    lifecycle = components.lifecycle
    complete = None if lifecycle is None else lifecycle.gradients_complete
    components.reducer = Reducer(axes, components.groups, settings, components.window, complete)
    components.reducer.replaced.watch(model)
    steps = StepSettings(
        clip=config.gradient_clipping,
        refuse_unused=not config.zero.ignore_unused_parameters,
        norm=config.zero.compute_grad_norm,
        check=fp16 or (low and config.bf16.check_grad_overflow),
        master=master_dtype(config, components.dtype),
    )
    scaler = loss_scale.from_config(config.fp16) if fp16 else None
    whole = config.zero.overlap_publish and lifecycle is None and axes.mesh.size("pp") == 1
    late = DeferredAllGatherHooks(model, components.groups) if whole else None
    if held is None:
        components.window.set_scaler(scaler)
        optimizer, traits = chosen
        components.optimizer = ZeroOptimizer(optimizer, components.reducer, steps, scaler, lifecycle, late, traits)
    else:
        held.attach(components.reducer, lifecycle, late)
        components.optimizer = held
    components.frozen = [
        m
        for g in components.groups
        for m in g.members
        if m.uid in components.optimizer.fragments and not m.param.requires_grad and m.param.is_floating_point()
    ]


def make_scheduler(client: Any, config: DeepSpeedConfig, optimizer: torch.optim.Optimizer | None) -> Any:
    """The schedule of an engine: the client's, the JSON's, or none.

    Args:
        client: the argument of `initialize`.
        config: names one otherwise.
        optimizer: what it is to schedule.
    """
    section = config.scheduler
    if client is not None:
        return _client_scheduler(client, _scheduled(optimizer, "an lr_scheduler"))
    if section is None or not section.type:
        return None
    return build_scheduler(section.type, dict(section.params or {}), _scheduled(optimizer, "a scheduler"))


def _scheduled(optimizer: torch.optim.Optimizer | None, what: str) -> torch.optim.Optimizer:
    if optimizer is None:
        raise ArgumentError(f"{what} was given, but there is no optimizer; name one in the JSON or pass one")
    return optimizer


def _client_scheduler(client: Any, optimizer: torch.optim.Optimizer) -> Any:
    if callable(client) and not hasattr(client, "step"):
        client = call_with("lr_scheduler", client, optimizer)
    if not hasattr(client, "step"):
        raise SchedulerError(f"lr_scheduler is (or its callable returned) a {type(client).__name__}: no step()")
    scheduled: Any = getattr(client, "optimizer", None)
    while not isinstance(scheduled, torch.optim.Optimizer) and hasattr(scheduled, "optimizer"):
        scheduled = scheduled.optimizer  # a client's wrapper
    if isinstance(scheduled, torch.optim.Optimizer) and scheduled is not optimizer:
        raise SchedulerError(
            f"lr_scheduler ({type(client).__name__}) schedules a {type(scheduled).__name__} that this engine does not "
            f"step: build it over the optimizer passed to initialize, or pass a callable that takes the optimizer"
        )
    return client


def call_with(what: str, callable_: Callable[..., Any], argument: Any) -> Any:
    """A client's factory, called with its one argument; typed when it takes another number of them.

    Args:
        what: the argument of `initialize` it was passed as, for the error.
        callable_: the factory.
        argument: parameters for an optimizer, the optimizer for a scheduler.
    """
    try:
        signature = inspect.signature(callable_)
    except ValueError:  # built in: it has none to look at
        return callable_(argument)
    try:
        signature.bind(argument)
    except TypeError as error:
        takes = "the optimizer" if isinstance(argument, torch.optim.Optimizer) else "the parameters"
        raise ArgumentError(f"the {what} callable must take one argument, {takes}: {error}") from error
    return callable_(argument)


def without_optimizer(call: str, components: Components) -> UsageError:
    """The error of a call that needs an optimizer."""
    if components.destroyed:
        return UsageError(f"{call}() on an engine that was destroyed; make a new one with deepspeed.initialize")
    return UsageError(
        f"{call}() on an engine without an optimizer: pass model_parameters (AdamW is then the default), an optimizer, "
        f"or name one in the JSON under optimizer.type"
    )
