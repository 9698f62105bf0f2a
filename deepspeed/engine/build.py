"""Construction of an engine's components from model, arguments and configuration."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.collectives.one_sided import release_abandoned
from deepspeed.comm.collectives.same_error import OrderCheck
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import axes_here
from deepspeed.config import DeepSpeedConfig, Facts
from deepspeed.engine.client_support import tell_dtypes
from deepspeed.engine.memory.suggestions import tells_what_fits
from deepspeed.engine.offload_plan import Offload, accumulator_dtype, master_dtype, state_of_group
from deepspeed.engine.pipeline_setup import limits_of_stages
from deepspeed.engine.sequence_parallel import BARE
from deepspeed.engine.wire import add_secondary_shards, gradient_wire, prepare_wire, weight_wire
from deepspeed.errors import ArgumentError, OptimizerError, SchedulerError, ShardedParameterError, UsageError
from deepspeed.foundation.log import log_once, log_rank0, warn_once
from deepspeed.foundation.module_tree import own_state
from deepspeed.optim import loss_scale
from deepspeed.optim.build import (
    build_configured,
    build_optimizer,
    check_supported,
    leave_embeddings_to_adam,
    needs_whole_tensors,
)
from deepspeed.optim.lr_schedules import build_scheduler
from deepspeed.optim.precision import DTYPES, InputCaster, cast_buffers, check_policies, compute_dtypes
from deepspeed.optim.separability import MethodTraits, UpdateTraits, update_traits
from deepspeed.zero.api.reshard import check_not_served
from deepspeed.zero.gradients.accumulation import AccumulationWindow
from deepspeed.zero.gradients.buckets import ReduceSettings
from deepspeed.zero.gradients.reducer import Reducer
from deepspeed.zero.gradients.row_exchange import find_tables
from deepspeed.zero.layout.placement import placement_of
from deepspeed.zero.layout.stages import policy_for
from deepspeed.zero.layout.units import mark_leaves
from deepspeed.zero.optimizer.optimizer import StepSettings, ZeroOptimizer
from deepspeed.zero.parameters.collective_order import GatherOrder
from deepspeed.zero.parameters.grouping import GroupingPlan, build_group, named_parameters, plan_groups
from deepspeed.zero.parameters.module_hooks import DeferredAllGatherHooks, ModuleHooks, TracedHook
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
    """Components of an engine for its training state: parameter groups, gradient reducer, optimizer and hooks."""

    groups: list[ShardGroup]
    axes: ParallelGroups
    dtype: torch.dtype
    window: AccumulationWindow
    reducer: Reducer | None = None
    optimizer: ZeroOptimizer | None = None
    lifecycle: ModuleHooks | None = None
    caster: InputCaster | None = None
    frozen: list[Any] = field(default_factory=list)  # members that may be unfrozen later
    ep_sizes: list[int] = field(default_factory=list)  # expert-parallel sizes of the model's layers
    destroyed: bool = False  # the engine was destroyed and has freed its state
    room: int = 0  # bytes of memory that were free before `build`, those of the model included
    model_bytes: int = 0  # bytes of the model's parameters before `build`

    def wind_up(self) -> ShardedParameterError | None:
        """Wait for all pending gathers; returns the first error about a lost edit of a parameter, or None."""
        first = None
        for _ in self.groups:  # each group raises at most once
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

    def without_optimizer(self, call: str) -> UsageError:
        """Create the error for a method `call` that needs an optimizer, on an engine without one or a destroyed one."""
        if self.destroyed:
            return UsageError(f"{call}() on an engine that was destroyed; make a new one with deepspeed.initialize")
        return UsageError(
            f"{call}() on an engine without an optimizer: pass model_parameters (AdamW is then the default), an "
            f"optimizer, or name one in the JSON under optimizer.type"
        )

    def add_lifecycle(self, model: nn.Module, config: DeepSpeedConfig) -> None:
        """Add the hooks of stage 3 that gather sharded parameters before a module runs; all ranks must call this."""
        sharded = [group for group in self.groups if group.policy.gathers_before_use]
        if not sharded:
            return
        zero, axes = config.zero, self.axes
        limits = PrefetchLimits(zero.max_live_parameters, zero.max_reuse_distance, zero.prefetch_bucket_size)
        if axes.mesh.size("pp") > 1:
            limits = limits_of_stages(sum(group.numel for group in sharded), limits, config)
        release_abandoned(axis for group in sharded for axis in group.served_axes)
        for group in sharded:
            group.serve(group.axis.tagged and group.axis.size > 1 and not zero.stage3_fixed_graph)
        add_secondary_shards(sharded, axes, config)
        order = None
        if any(group.fetch is None for group in sharded) and OrderCheck.possible(axes.dp_sp_group):
            order = GatherOrder(axes.dp_sp_group, zero.stage3_check_order, zero.stage3_fixed_graph)
        self.lifecycle = ModuleHooks(model, PrefetchScheduler(sharded, limits), order)
        log_rank0(self.lifecycle.bound())

    def add_optimizer(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        traits: UpdateTraits,
        config: DeepSpeedConfig,
        held: ZeroOptimizer | None,
    ) -> None:
        """Create the gradient reducer and the ZeRO optimizer.

        Args:
            optimizer: the inner optimizer.
            traits: how the inner optimizer's update can be split.
            held: ZeRO optimizer of the previous layout, which is used again; None: create one.
        """
        fp16, zero, axes, lifecycle = config.fp16.enabled, config.zero, self.axes, self.lifecycle
        low = self.dtype != torch.float32
        ranks = axes.data.size if config.gradient_allreduce_op == "mean" else 1
        predivide, overlap = config.gradient_predivide_factor, zero.overlap_comm is not False
        settings = ReduceSettings(
            accumulates=self.window.steps > 1,
            accumulator=accumulator_dtype(config),
            comm_dtype=DTYPES.get(config.communication_data_type or ""),
            overlap=overlap,
            # One bucket is reduced while the next one is filled: with one alone, backward would wait for each message.
            in_flight=zero.reduce_bucket_size * (2 if overlap else 1),
            prescale=1.0 / ranks if config.prescale_gradients else 1.0 / predivide if predivide != 1.0 else None,
            in_rank_order=config.deterministic_reduction,
            watch_ranks=low and axes.dp_sp_group.size > 1,
            wire=gradient_wire(config),
        )
        complete = None if lifecycle is None else lifecycle.gradients_complete
        self.reducer = Reducer(axes, self.groups, settings, self.window, complete)
        self.reducer.replaced.watch(model)
        steps = StepSettings(
            clip=config.gradient_clipping,
            refuse_unused=not zero.ignore_unused_parameters,
            norm=zero.compute_grad_norm,
            check=fp16 or (low and config.bf16.check_grad_overflow),
            master=master_dtype(config, self.dtype),
        )
        scaler = loss_scale.from_config(config.fp16) if fp16 else None
        whole = zero.overlap_publish and lifecycle is None and axes.mesh.size("pp") == 1
        late = DeferredAllGatherHooks(model, self.groups) if whole else None
        if held is None:
            self.window.set_scaler(scaler)
            self.optimizer = ZeroOptimizer(optimizer, self.reducer, steps, scaler, lifecycle, late, traits)
        else:
            held.attach(self.reducer, lifecycle, late)
            self.optimizer = held
        members = (m for group in self.groups for m in group.members if m.uid in self.optimizer.fragments)
        self.frozen = [m for m in members if not m.param.requires_grad and m.param.is_floating_point()]


def compute_dtype(config: DeepSpeedConfig) -> torch.dtype:
    """Return the dtype of parameters in forward and backward: fp16 or bf16 if the JSON enables it, else fp32."""
    if config.fp16.enabled:
        if get_accelerator().device_name() == "cpu":
            log_once("fp16 on CPU works but is slow (about 45 times slower than bf16 on this class of machine)")
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled else torch.float32


def listed(model_parameters: Any) -> list[Any] | None:
    """Convert parameters or groups that the user passed to a list, and check them; None stays None.

    The "params" of group dicts become lists, in place; a single tensor stays.

    Raises:
        ArgumentError: an entry is neither a parameter nor a group of parameters, or both kinds are mixed.
    """
    if model_parameters is None or isinstance(model_parameters, torch.Tensor):
        return None if model_parameters is None else [model_parameters]
    if isinstance(model_parameters, (str, bytes, dict)) or not isinstance(model_parameters, Iterable):
        raise ArgumentError(
            f"model_parameters is a {type(model_parameters).__name__}; pass model.parameters() or a list of groups"
        )
    entries = list(model_parameters)
    for entry in entries:
        if isinstance(entry, tuple):
            raise ArgumentError("model_parameters holds (name, parameter) pairs; pass model.parameters() instead")
        if not isinstance(entry, dict):
            if not isinstance(entry, torch.Tensor):
                kind = type(entry).__name__
                raise ArgumentError(f"model_parameters holds a {kind}; it takes parameters or group dicts")
            continue
        _check_group(entry)
    if len({isinstance(entry, dict) for entry in entries}) > 1:
        raise ArgumentError("model_parameters mixes parameters and group dicts; put every parameter into a group")
    return entries


def _check_group(group: dict[str, Any]) -> None:
    """Convert a group's parameters in place to a list; raises ArgumentError if they are not parameters."""
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
    """Return the inner optimizer: the client's, the JSON's, AdamW if trainable parameters were passed, or None.

    Args:
        client: optimizer, or a callable that creates one from parameters; None: no client's optimizer.
        parameters: parameters or groups that the user passed; None: all of the model that require a gradient.

    Raises:
        OptimizerError: `client` is not an optimizer or is not supported, or there is no parameter to train.
        ArgumentError: the callable does not take one argument.
    """
    params: list[Any] = parameters or [p for p in model.parameters() if p.requires_grad]
    if client is not None and config.optimizer is not None and config.optimizer.type:
        kind = type(client).__name__ if isinstance(client, torch.optim.Optimizer) else "optimizer of the callable"
        warn_once(
            f"there are two optimizers: the {kind} passed to initialize is used, and the {config.optimizer.type} that "
            f"optimizer.type of the JSON names is not; leave one of them out"
        )
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
        if config.optimizer.type.lower() == "muon":
            leave_embeddings_to_adam(model)
        return build_configured(config, params)
    if parameters and any(p.requires_grad for p in _flat(parameters)):
        log_once("no optimizer given: AdamW with torch's defaults (lr 1e-3, betas 0.9 0.999, weight decay 1e-2)")
        return build_optimizer("AdamW", {"torch_adam": True, "weight_decay": 1e-2}, parameters)
    return None


def facts_of(model: nn.Module, client: Any, device: torch.device) -> Facts:
    config = getattr(model, "config", None)
    hidden = getattr(config, "hidden_size", None) or max(getattr(config, "hidden_sizes", None) or [0]) or None
    rate = client.param_groups[0].get("lr") if isinstance(client, torch.optim.Optimizer) else None
    return Facts(
        hidden_size=hidden if isinstance(hidden, int) else None,
        device=device.type,
        bf16_fast=bool(get_accelerator().is_bf16_fast()),
        learning_rate=float(rate) if rate is not None else None,
    )


def _updated(
    optimizer: torch.optim.Optimizer, names: dict[Parameter, str], written: dict[Parameter, None]
) -> set[Parameter]:
    """Remove from the optimizer the parameters that the model itself writes; returns the set of the remaining ones.

    Raises:
        OptimizerError: a parameter appears twice, is complex or does not belong to the model.
    """
    for group in optimizer.param_groups if written else ():
        group["params"] = [param for param in group["params"] if param not in written]
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
    """Cast a model in place, move it to the device, shard it, and create the components. All ranks must call this.

    Args:
        optimizer: the inner optimizer, or None.
        held: ZeRO optimizer of an engine whose layout changes, which is used again; None for a new engine.

    Raises:
        ArgumentError: a parameter has no values or no shape, or shares memory within itself.
        OptimizerError: the optimizer does not belong to the model, or cannot be sharded.
        UsageError: inference mode was on for the model or is on now, or another engine has the model.
        MemoryExhaustedError: memory is not sufficient; the message suggests keys of the JSON.
    """
    low = compute_dtype(config)
    _check_parameters(model, low)
    mark_leaves(model, config.zero.leaf_module)
    written = own_state(model)
    names = {param: name for param, name in named_parameters(model).items() if param not in written}
    updated = _updated(optimizer, names, written) if optimizer is not None else set()
    _place(model, device)
    signatures = signatures_of(axes.mesh, names)
    prepare_wire(config, axes.mesh, device)
    ep_sizes = _broadcast_model(axes, [*names, *written, *model.buffers()])
    tied = find_tied(axes.mesh, names, signatures)
    equalise(axes.mesh, names, signatures, tied)
    own = {names[param]: signature for param, signature in signatures.items() if signature[1]}
    splits = policy_for(config.zero.stage, axes.mesh.size("pp")).owns_a_shard
    relations = RankResolver(axes.mesh, splits, tied, own, ep_sizes)
    fp32_modules = config.data_types.keep_in_fp32_modules
    stay = () if fp32_modules in (None, "auto") else fp32_modules
    wanted = compute_dtypes(model, low, stay) if low != torch.float32 else {}
    if config.data_types.buffer_dtype is not None:
        cast_buffers(model, DTYPES[config.data_types.buffer_dtype], stay)
    traits = traits_of(optimizer, config, axes, bool(ep_sizes)) if held is None else held.traits
    groups = _groups(model, names, (wanted, updated), (relations, signatures), traits, config, optimizer)
    for param, dtype in wanted.items():
        if not is_managed(param):
            param.data = param.data.to(dtype)
    tell_dtypes(model, wanted)
    components = Components(groups, axes, low, _window(config, axes) if held is None else held.window)
    components.ep_sizes = ep_sizes
    if wanted and config.auto_cast:
        components.caster = InputCaster(model, wanted, low, functools.partial(TracedHook, transparent=True))
    components.add_lifecycle(model, config)
    if optimizer is not None:
        components.add_optimizer(model, optimizer, traits, config, held)
    return components


def _broadcast_model(axes: ParallelGroups, tensors: list[torch.Tensor]) -> list[int]:
    """Broadcast tensors from the first rank with the same slice; returns the model's ep sizes above 1. Collective."""
    by_ep: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_ep.setdefault(placement_of(tensor).ep, []).append(tensor)
    sizes_by_rank = all_gather_objects(axes.everyone, set(by_ep) - {1}) if axes.everyone.size > 1 else []
    ep_sizes = sorted(set().union(*sizes_by_rank))  # sizes on all stages of a pipeline
    for ep in (1, *ep_sizes):
        same = axes.dp_sp_group if ep == 1 else axes.mesh.axis("dp_replicate", "edp", ep=ep)
        own = [t for t in by_ep.get(ep, ()) if not is_managed(t) and t.device.type != "meta"]
        broadcast_tensors(same, own, "broadcast of rank 0's model")
    return ep_sizes


def _window(config: DeepSpeedConfig, axes: ParallelGroups) -> AccumulationWindow:
    ranks = axes.data.size if config.gradient_allreduce_op == "mean" else 1
    # Sequence-parallel ranks each differentiate the same loss, which is over all tokens of the sequence.
    ranks *= axes.mesh.size("sp")
    steps, micro = config.gradient_accumulation_steps, config.train_micro_batch_size_per_gpu
    return AccumulationWindow(steps, micro, ranks, refuses_bare=BARE if axes.mesh.size("sp") > 1 else "")


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
    traits: UpdateTraits,
    config: DeepSpeedConfig,
    optimizer: torch.optim.Optimizer | None,
) -> list[ShardGroup]:
    (wanted, updated), (relations, signatures) = chosen, ranks
    policy = policy_for(config.zero.stage, relations.stages)
    plan = GroupingPlan(
        bucket=config.zero.reduce_bucket_size,
        whole_tensors=optimizer is not None and needs_whole_tensors(optimizer),
        one_owner=not traits.by_parameter,
        persist_below=config.zero.param_persistence_threshold,
        persist_total=config.zero.model_persistence_threshold,
        wire=weight_wire(config),
        frozen_wire=weight_wire(config, frozen=True),
        tables=find_tables(model, updated) if config.sparse_gradients and axes_here().size > 1 else frozenset(),
    )
    offload, planned = Offload(config), []
    some = names if relations.several else ()
    alone = {param for param in some if relations.resolve(signatures[param]).shard.size == 1}
    for own, members in plan_groups(model, names, updated, policy, plan, wanted, signatures, alone):
        around = relations.resolve(signatures[members[0]])
        dtype = wanted.get(members[0], members[0].dtype)
        trained = members[0] in updated and members[0].requires_grad and dtype.is_floating_point
        master = master_dtype(config, dtype) if trained else None
        layout = plan.layout_for(own, [p.numel() for p in members], around.shard.size)
        state = state_of_group(config, (own, layout), around.shard.rank, (dtype, master), optimizer)
        planned.append((around, own, members, (dtype, master), offload.place(state), state))
    offload.announce([(state, tiers) for *_, tiers, state in planned])
    were_sharded = any(is_managed(param) for param in names)
    groups = [
        # The small whole parameters of stage 3 are sent as they are.
        build_group(around, own, members, names, plan if own is policy else plan.exact(), dtypes, tiers)
        for around, own, members, dtypes, tiers, _ in planned
    ]
    if were_sharded and groups[0].device.type != "cpu":  # resharding has left free blocks in the allocator's cache
        get_accelerator().empty_cache()
    places = {param: place for place, param in enumerate(names)}
    for member in (member for group in groups for member in group.members):
        member.place = places[member.param]
    return groups


def traits_of(
    optimizer: torch.optim.Optimizer | None, config: DeepSpeedConfig, axes: ParallelGroups, experts_apart: bool
) -> UpdateTraits:
    """Determine how the optimizer's update can be split over ranks, and log the consequences. All ranks must call this.

    Args:
        experts_apart: experts are divided among ranks.

    Raises:
        OptimizerError: the update needs all parameters at once or keeps references to them, which the mesh or the
            JSON do not allow.
    """
    traits = UpdateTraits(known=True) if optimizer is None else update_traits(optimizer)
    if optimizer is None or traits.known:
        return traits
    traits = _joined_traits(traits, axes)
    name, mesh = type(optimizer).__name__, axes.mesh
    if traits.unknown:
        warn_once(
            f"{name} could not be tried on small copies of its groups ({traits.unknown}), so it is taken for one that "
            f"updates each parameter by itself; a global norm inside of its step would be that of one rank",
            key=type(optimizer),
        )
    if traits.kept_in:
        _refuse_kept_parameters(name, traits.kept_in, config)
    if not traits.by_parameter and (mesh.size("tp") > 1 or mesh.size("pp") > 1 or experts_apart):
        raise OptimizerError(
            f"the update of {name} looks at all parameters at once (on small copies, sharing them out changes it by "
            f"{traits.difference:.1g} of the distance moved), and ranks of tp, pp or ep have some of them each; use "
            f"an optimizer that updates each parameter by itself, such as AdamW, or data parallelism alone"
        )
    if not traits.by_parameter and config.zero.stage > 0 and axes.shard.size > 1:
        warn_once(
            f"the update of {name} looks at all parameters at once (on small copies, sharing them out changes it by "
            f"{traits.difference:.1g} of the distance moved), so rank 0 of each data-parallel group updates all of "
            f"them and holds all of its state; an optimizer that updates each parameter by itself, such as AdamW, is "
            f"sharded",
            key=type(optimizer),
        )
    return traits


def _refuse_kept_parameters(name: str, attribute: str, config: DeepSpeedConfig) -> None:
    """Raise OptimizerError if the engine replaces parameters that the optimizer updates through its own attribute."""
    replacing = {
        "ZeRO stage 3": config.zero.stage == 3,
        "fp16 or bf16": config.fp16.enabled or config.bf16.enabled,
        "offload_optimizer": config.zero.offload_optimizer.device != "none",
    }
    reasons = [setting for setting, is_on in replacing.items() if is_on]
    if reasons:
        raise OptimizerError(
            f"{name} updates the parameters in its attribute '{attribute}' and not those in its param_groups, where "
            f"{' and '.join(reasons)} put slices or copies in their place: let step() read self.param_groups, or train "
            f"in fp32 at stage 0, 1 or 2 without offload_optimizer"
        )


def _joined_traits(traits: UpdateTraits, axes: ParallelGroups) -> UpdateTraits:
    """Combine the traits of all ranks, since ranks can differ in parameters and in objects that cannot be copied.

    The layout of parameters depends on the result, so the result must be equal on all ranks. All ranks must call this.
    """
    every = [
        replace(each, methods=methods)
        for each, methods in all_gather_objects(axes.everyone, (replace(traits, methods={}), dict(traits.methods)))
    ]
    tried = [each for each in every if not each.unknown]
    if not tried:
        return traits
    methods: dict[str, MethodTraits] = {}
    for each in tried:
        for name, method in each.methods.items():
            methods[name] = method.joined(methods.get(name, method))
    return replace(
        tried[0],
        by_parameter=all(each.by_parameter for each in tried),
        in_parts=all(each.in_parts for each in tried),
        counts_alone=all(each.counts_alone for each in tried),
        methods=methods,
        kept_in=next((each.kept_in for each in every if each.kept_in), ""),
        difference=max(each.difference for each in tried),
    )


def make_scheduler(client: Any, config: DeepSpeedConfig, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the learning-rate scheduler: the client's, the JSON's, or None.

    Args:
        client: scheduler, or a callable that creates one from the optimizer, or None.

    Raises:
        ArgumentError: there is a scheduler but no optimizer, or the callable does not take one argument.
        SchedulerError: the scheduler has no `step` or belongs to another optimizer, or the JSON's is invalid.
    """
    section = config.scheduler
    name = section.type if section is not None else None
    if client is None and not name:
        return None
    if optimizer is None:
        what = "a scheduler" if client is None else "an lr_scheduler"
        raise ArgumentError(f"{what} was given, but there is no optimizer; name one in the JSON or pass one")
    if client is None and section is not None and name:
        return build_scheduler(name, dict(section.params or {}), optimizer)
    if callable(client) and not hasattr(client, "step"):
        client = call_with("lr_scheduler", client, optimizer)
    if not hasattr(client, "step"):
        raise SchedulerError(f"lr_scheduler is (or its callable returned) a {type(client).__name__}: no step()")
    scheduled: Any = getattr(client, "optimizer", None)
    while not isinstance(scheduled, torch.optim.Optimizer) and hasattr(scheduled, "optimizer"):
        scheduled = scheduled.optimizer  # unwrap a client's wrapper
    if isinstance(scheduled, torch.optim.Optimizer) and scheduled is not optimizer:
        raise SchedulerError(
            f"lr_scheduler ({type(client).__name__}) schedules a {type(scheduled).__name__} that this engine does not "
            f"step: build it over the optimizer passed to initialize, or pass a callable that takes the optimizer"
        )
    return client


def call_with(what: str, callable_: Callable[..., Any], argument: Any) -> Any:
    """Return `callable_(argument)`; raises ArgumentError, with the name `what`, if one argument does not fit."""
    try:
        signature = inspect.signature(callable_)
    except ValueError:  # a builtin without a signature
        return callable_(argument)
    try:
        signature.bind(argument)
    except TypeError as error:
        takes = "the optimizer" if isinstance(argument, torch.optim.Optimizer) else "the parameters"
        raise ArgumentError(f"the {what} callable must take one argument, {takes}: {error}") from error
    return callable_(argument)
