"""The engine: the order of calls of a training step. Read this file first.

The docstring of each method is at its implementation; `help(engine.save_checkpoint)` shows it.

A window consists of the micro-batches between two updates. forward → backward (gradients are copied into buckets,
`zero/gradients/buckets`) → step: at the window's last micro-batch the optimizer (`zero/optimizer/optimizer`) computes
the norm over all ranks, clips, updates, and all-gathers the parameters.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.instruments import SynchronizedWallClockTimer, ThroughputTimer
from deepspeed.activation_checkpointing.apply import wrap
from deepspeed.comm.collectives import scalars
from deepspeed.comm.collectives.one_sided import release_abandoned
from deepspeed.comm.collectives.same_error import BatchCheck
from deepspeed.comm.watchdog.comms_logger import configure
from deepspeed.comm.watchdog.desync import trail
from deepspeed.comm.watchdog.watchdog import stopping
from deepspeed.compression.controller import Compression
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.accessors import ConfigAccessors, MeshAccessors, StateAccessors
from deepspeed.engine.build import (
    Components,
    build,
    choose_optimizer,
    facts_of,
    listed,
    make_scheduler,
)
from deepspeed.engine.checkpointing import CheckpointIO
from deepspeed.engine.client_support import (
    RunningStatistics,
    check_loss,
    close_previous_engine,
    loss_is_divided,
    register_engine,
)
from deepspeed.engine.compiling import Compiling, uncompiled
from deepspeed.engine.compression import CompressionHooks
from deepspeed.engine.data_sampling import scaled_scheduler
from deepspeed.engine.engine_state import EngineState
from deepspeed.engine.expert_balance import ExpertBalance
from deepspeed.engine.expert_parallel import ExpertAccessors, divide_experts_of
from deepspeed.engine.generation import Generation
from deepspeed.engine.hybrid_engine import HybridMethods
from deepspeed.engine.logging import ProgressLog
from deepspeed.engine.metrics import BACKWARD, FORWARD, STEP, Instruments
from deepspeed.engine.offload_states import OffloadStates
from deepspeed.engine.preemption import Preemption
from deepspeed.engine.program_attributes import ProgramAttributes, warn_of_replaced_methods
from deepspeed.engine.rollout_report import RolloutReport
from deepspeed.engine.sequence_parallel import Sequencing, share_sequence
from deepspeed.engine.state_dict_io import WeightsIO
from deepspeed.engine.step_keywords import StepAccessors, StepKeywords
from deepspeed.engine.tensor_parallel import axes_cut_by_model, check_elementwise_optimizer, pack_weights, slice_model
from deepspeed.engine.train_loop import TrainLoop
from deepspeed.engine.wire_choice import WireChoice
from deepspeed.errors import ArgumentError, NotAvailableError, UsageError
from deepspeed.foundation.compiler import opaque, set_frame_callback
from deepspeed.foundation.log import log_once, log_rank0, logger
from deepspeed.foundation.wrapper import ModuleWrapper
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.optim.precision import DTYPES
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.profiling.timeline import Timeline
from deepspeed.zero.gradients.accumulation import Purpose, Way
from deepspeed.zero.layout.stages import policy_for
from deepspeed.zero.out_of_memory import behind
from deepspeed.zero.parameters.parallel_groups import axes_of, find_mesh

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")


def by(part: str, method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Create a method that calls `method` of the component `part`, with its signature and documentation."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(self, part), *args, **kwargs)

    return call


def shared(name: str) -> Any:
    """Create a property that reads and sets the field `name` of `EngineState`."""

    def put(self: Any, value: Any) -> None:
        setattr(self._state, name, value)

    return property(lambda self: getattr(self._state, name), put, doc=f"See `EngineState.{name}`.")


class EngineSurface(MeshAccessors, StateAccessors, ConfigAccessors, ExpertAccessors, StepAccessors):
    """Methods and properties of an engine that are implemented by its components."""

    ds_config, basic_optimizer, mpu, timers = map(shared, ("ds_config", "basic_optimizer", "mpu", "timers"))
    lr_scheduler, training_dataloader = shared("lr_scheduler"), shared("training_dataloader")
    global_steps, micro_steps = shared("global_steps"), shared("micro_steps")
    global_samples, skipped_steps = shared("global_samples"), shared("skipped_steps")
    device, compression = shared("device"), shared("compression")
    _components = shared("components")
    _instruments: Instruments
    _generation: Generation
    _rollouts: Any = property(lambda self: self._instruments.rollouts)
    _axes: Any = property(lambda self: self._state.components.axes)
    _window: Any = property(lambda self: self._state.components.window)

    deepspeed_io = by("_feeding", TrainLoop.deepspeed_io)
    loop = by("_feeding", TrainLoop.loop)
    rollout = by("_generation", Generation.rollout)
    score = by("_generation", Generation.score)
    measure_mismatch = by("_rollouts", RolloutReport.measure_mismatch)
    rollout_mismatch = property(lambda self: self._rollouts.last, doc="See `RolloutReport.last`.")

    offload_states = by("_offload", OffloadStates.offload_states)
    reload_states = by("_offload", OffloadStates.reload_states)

    get_wall_clock_timers = by("_instruments", Instruments.get_wall_clock_timers)
    memory_by_category = by("_instruments", Instruments.memory_by_category)
    gradient_norms = by("_instruments", Instruments.gradient_norms)

    set_teacher = by("_compressing", CompressionHooks.set_teacher)
    export_compressed = by("_compressing", CompressionHooks.export_compressed)

    save_checkpoint = by("_checkpoints", CheckpointIO.save_checkpoint)
    load_checkpoint = by("_checkpoints", CheckpointIO.load_checkpoint)
    wait_for_checkpoint = by("_checkpoints", CheckpointIO.wait_for_checkpoint)
    register_for_checkpointing = by("_checkpoints", CheckpointIO.register_for_checkpointing)

    save_16bit_model = save_fp16_model = by("_weights", WeightsIO.save_16bit_model)
    module_state_dict = by("_weights", WeightsIO.module_state_dict)
    load_module_state_dict = by("_weights", WeightsIO.load_module_state_dict)
    load_state_dict = by("_weights", WeightsIO.load_state_dict)
    load_pretrained = by("_weights", WeightsIO.load_pretrained)
    _consolidated_16bit_state_dict = by("_weights", WeightsIO._consolidated_16bit_state_dict)
    _zero3_consolidated_16bit_state_dict = by("_weights", WeightsIO._zero3_consolidated_16bit_state_dict)

    @property
    def monitor(self) -> MonitorMaster:
        """Return the monitor, which also takes a program's events: `write_events([(name, value, step), …])`."""
        return self._instruments.monitor

    @property
    def tput_timer(self) -> ThroughputTimer:
        """Return the timer of samples per second over all ranks; see `Instruments.throughput`."""
        return self._instruments.throughput

    @property
    def flops_profiler(self) -> FlopsProfiler | None:
        """Return the profiler of the `flops_profiler` block; None unless enabled, and on all ranks but 0."""
        return self._instruments.profiling.profiler

    @property
    def timeline(self) -> Timeline | None:
        """Return the timeline that the `timeline` block records; None until it is complete, and on all ranks but 0."""
        return self._instruments.tracing.timeline

    @property
    def weights_version(self) -> int:
        """Return the number of changes of the weights that were noticed; see `Generation.weights_version`."""
        return self._generation.weights_version

    @property
    def compression_scheduler(self) -> Compression | None:
        """Return the compression controller; its `training_steps` counts applied steps. None without compression."""
        return self._state.compression


class DeepSpeedEngine(EngineSurface, ProgramAttributes, ModuleWrapper):
    """Engine that trains a model with the ZeRO stage, precision and schedule of the JSON; errors as in `initialize`.

    Args:
        model: the module, which is cast and sharded in place.
        config: dict, path or base64 of the JSON.
        optimizer: a torch optimizer, or a callable that creates one from parameters; None: as in `initialize`.
        model_parameters: parameters or parameter groups to train; None: all that require a gradient.
        lr_scheduler: a scheduler, or a callable that creates one from an optimizer; None: the JSON's, if any.
        training_data: dataset for `training_dataloader`; None: no loader.
        collate_fn: collate function of that loader.
        mpu: the client's model-parallel unit, or a `Mesh`.
        mesh_param: sizes of mesh dims by name, or (data-parallel ranks, sequence-parallel ranks).

    Example:
        >>> engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
        >>> loss = engine(batch); engine.backward(loss); engine.step()
    """

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        *,
        optimizer: Any = None,
        model_parameters: Any = None,
        lr_scheduler: Any = None,
        training_data: Any = None,
        collate_fn: Any = None,
        mpu: Any = None,
        mesh_param: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"deepspeed.initialize requires a model: model is {type(model).__name__}, not a Module")
        accelerator = get_accelerator()
        device = scalars.current.device or torch.device(accelerator.current_device_name())
        mesh = find_mesh(DeepSpeedConfig.for_init(config), mpu, mesh_param, device, axes_cut_by_model(model))
        axes = axes_of(mesh)
        facts = facts_of(model, optimizer, device)
        resolved = DeepSpeedConfig(config, world=axes.data.size, replicas=axes.dp_sp_group.size, facts=facts)
        if resolved.log_level:
            logger.setLevel(resolved.log_level.upper())
        if resolved.comms_logger.enabled:
            configure(resolved)
        trail.start(resolved.top.divergence_check_interval)
        self.client_optimizer, self.client_lr_scheduler = optimizer, lr_scheduler
        with uncompiled(model):
            parameters = self._cut(model, resolved, mesh, mpu, optimizer, listed(model_parameters))
        chosen = choose_optimizer(model, optimizer, parameters, resolved)
        check_elementwise_optimizer(model, chosen)
        self.module = model
        close_previous_engine(model)
        share_sequence(model, mesh, mpu)
        warn_of_replaced_methods(type(self))
        self._recompute = wrap(model, resolved.top.activation_checkpointing, mpu)
        components = build(model, chosen, resolved, axes, device)
        timers = SynchronizedWallClockTimer()
        self._state = EngineState(resolved, model, device, mpu, components, chosen, timers)
        self._hold_parts()
        register_engine(model, self.destroy)
        self.optimizer: Any = components.optimizer or components.lifecycle
        if components.optimizer is not None:
            components.optimizer.engine = self
        self.lr_scheduler = make_scheduler(lr_scheduler, resolved, chosen)
        if training_data is not None:
            self.training_dataloader = self.deepspeed_io(training_data, collate_fn=collate_fn)
            self.lr_scheduler = scaled_scheduler(self._state, self.training_dataloader, self.lr_scheduler)
        self._compressing.start()
        self._reports.say_plan()
        self._preemption.listen()
        if self._shards_parameters:  # no rank may request a shard before its owner serves it
            self._feeding.agree(0, "all ranks have their engine")
        self._sequencing.prove(self._autocast)

    # -- construction ---------------------------------------------------------------------------------------------

    def _cut(self, model: Any, config: Any, mesh: Any, mpu: Any, optimizer: Any, parameters: Any) -> Any:
        """Reduce a whole model in place to this rank's part; returns `parameters` without removed ones. Collective."""
        slice_model(model, config, mesh, mpu, optimizer)
        divide_experts_of(model, config, mesh, optimizer, parameters)
        pack_weights(model, config, mesh, optimizer, parameters)
        return parameters

    def _hold_parts(self) -> None:
        """Create the components that `EngineSurface` refers to."""
        state = self._state
        self._balance = ExpertBalance(state)
        self._compiling = Compiling(state)
        self._share_statistics()
        self._reports, self._offload = ProgressLog(state, self), OffloadStates(state, self.register_forward_pre_hook)
        self._instruments = Instruments(state, self, self._balance)
        self._feeding = TrainLoop(state, lambda: self.training, self.flush, self._instruments)
        self._weights = WeightsIO(state)
        self._checkpoints = CheckpointIO(state, self._weights, self._instruments.guard)
        self._preemption = Preemption(state, self._checkpoints)
        self._compressing = CompressionHooks(state, self._weights, self._feeding, self._on_new_layout, type(self))
        self._generation = Generation(state)
        self._wire_choice = WireChoice(state)
        self._keywords = StepKeywords(state, pipelined=hasattr(type(self), "train_batch"))
        self._same_batches = BatchCheck(state.axes.mesh.axis("tp"))
        top = state.ds_config.top
        again = top.sequence_parallel_recompute
        self._sequencing = Sequencing(state.module, state.axes.mesh, top.sequence_parallel_verify, again)
        self._applied = False

    def _on_new_layout(self) -> None:
        """Update references to components after structured pruning has replaced the components."""
        self._share_statistics()
        self.optimizer = self._components.optimizer or self._components.lifecycle

    def _share_statistics(self) -> None:
        self._statistics = RunningStatistics(self.module, self._axes.dp_sp_group)
        stepped = [self._statistics.publish] if self._statistics.buffers else []
        self._state.hooks.stepped = [*stepped, *self._balance.stepped()]

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Switch to training mode, or with False to evaluation, where BatchNorm uses rank 0's running statistics."""
        self._statistics.switch(training=mode)
        return super().train(mode)

    # -- forward and backward -------------------------------------------------------------------------------------

    @functools.partial(opaque, inner=False)
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run `forward` and hooks; in `torch.compile(engine)`, the model is compiled and the engine is not."""
        callback = set_frame_callback(None)
        try:
            if callback:
                self._compiling.adopt(callback)
            return super().__call__(*inputs, **kwargs)
        finally:
            set_frame_callback(callback)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module with these arguments and return its outputs.

        In training, raises DataError if tensor-parallel ranks received different batches (the first ten are compared).
        """
        if self.training:
            self._reports.look_at_batch(inputs, kwargs)
            if self._same_batches.left:
                self._same_batches.compare([inputs, kwargs])
            if self._sequencing.active:
                inputs, kwargs = self._sequencing.take(inputs, kwargs)
            kwargs = self._keywords.added(kwargs)
            self._before_micro_batch()
            self._instruments.on_forward(inputs, kwargs)
        with self._timed(FORWARD), self._autocast():
            return self.module(*inputs, **kwargs)

    def _before_micro_batch(self) -> None:
        optimizer, reducer = self._components.optimizer, self._components.reducer
        if optimizer is None or reducer is None:
            return
        reducer.replaced.settle()
        reducer.clean = False  # equally on all ranks, even if they take different branches
        self._add_unfrozen_parameters()

    def _add_unfrozen_parameters(self) -> None:
        """Let the optimizer also update parameters that were frozen before and now require a gradient."""
        optimizer, frozen = self._components.optimizer, self._components.frozen
        for member in [m for m in frozen if m.param.requires_grad]:
            if optimizer is not None:
                optimizer.activate(member)
            frozen.remove(member)

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        num_items: float | None = None,
    ) -> torch.Tensor:
        """Run the backward pass of a micro-batch.

        Args:
            loss: differentiable scalar: the mean over the micro-batch, or with `num_items` the sum over its items.
            retain_graph: keep the graph for another backward pass.
            scale_wrt_gas: False: sum over the micro-batches of an update instead of the mean.
            num_items: number of items (tokens, samples) of which `loss` is the sum; the gradient is that of the total
                loss of an update, over all ranks, divided by its total number of items. None: `loss` is a mean.

        Returns:
            The loss divided by the accumulation steps (undivided with `num_items` or `scale_wrt_gas=False`, or if
            Lightning has divided it).

        Raises:
            ArgumentError: the loss is not a differentiable scalar tensor, or `num_items` is negative or not finite.
            UsageError: the engine has no optimizer, the loss is from `scale`, an update mixes calls with and without
                `num_items`, `num_items` is passed inside `loop`, or sequence-parallel ranks have different losses.
        """
        check_loss(loss)
        optimizer, reducer = self._components.optimizer, self._components.reducer
        if optimizer is None or reducer is None:
            raise self._components.without_optimizer("backward")
        window, counts = self._window, num_items is not None
        way = Way.ITEMS if counts else Way.MEAN if scale_wrt_gas else Way.SUM
        if not counts:
            self._sequencing.check_loss(loss)
        if window.samples is None:
            window.count(way, num_items)
        elif counts:
            raise UsageError("engine.loop already counts samples; do not pass num_items inside it")
        by_window = way is Way.MEAN and not loss_is_divided(self.module)
        scale = window.loss_scale
        self._instruments.on_loss(loss, num_items)
        with self._timed(BACKWARD), window.backward_pass(way, by_window=by_window), self._instruments.inner():
            (loss.float() * scale if scale != 1.0 else loss).backward(retain_graph=retain_graph)
        return loss / window.steps if by_window and window.steps > 1 else loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, with fp16 times the loss scale, for a manual `.backward()`; loss errors as in `backward`."""
        check_loss(loss)
        self._sequencing.check_loss(loss)
        return loss if self._window.scaler is None else self._window.scaled(loss)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Suspend the gradient reduction of backward passes inside the context, at stages 0 and 1.

        Stages 2 and 3 do not store whole gradients and reduce them as usual; the result is equal.

        Raises:
            UsageError: the context is nested.
        """
        if self._window.holding:
            raise UsageError("no_sync contexts cannot be nested")
        if self.ds_config.zero.stage >= 2:
            log_once("no_sync at stages 2 and 3: gradients are still reduced into slices; the sum is the same")
        self._window.hold(True)
        try:
            yield
        finally:
            self._window.hold(False)

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Alias of `no_sync`: at stages 0 and 1, the next update reduces all gradients of the context at once."""
        with self.no_sync():
            yield

    # -- the step -------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last before an update."""
        return self._window.boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether an update follows each of the next micro-batches; replaces `gradient_accumulation_steps`."""
        self._window.force(bool(is_boundary))

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; after the last one, clip, update, all-gather, step the scheduler. All ranks must call it.

        Args:
            lr_kwargs: keyword arguments of the scheduler's `step`; None: none.

        Raises:
            UsageError: the call is inside `no_sync`, there is no optimizer, or ranks have made different calls.
            LossScaleError: fp16 gradients overflowed at the minimum loss scale.
        """
        if self._window.holding:
            raise UsageError("step() inside no_sync(): gradients have not been reduced; call it after the context")
        if self._components.optimizer is None:
            raise self._components.without_optimizer("step")
        self.micro_steps += 1
        self._applied = False
        if self._instruments.on_step(self._window.end_micro_batch()):
            self._update(lr_kwargs)
            self._end_step()

    def flush(self) -> None:
        """Update before `gradient_accumulation_steps` is reached; means are over the micro-batches so far.

        All ranks must call this, for example at the end of an epoch. Does nothing without a micro-batch.

        Raises:
            UsageError: the engine has no optimizer, or ranks have made different calls.
        """
        if self._components.optimizer is None:
            raise self._components.without_optimizer("flush")
        with self._window.flush():
            if self._window.seen:
                self._update(None)
            elif self._components.reducer is not None:
                self._components.reducer.finish(Purpose.FLUSH)  # raises unless no rank has anything to apply

    def _update(self, lr_kwargs: dict[str, Any] | None) -> None:
        optimizer = self._components.optimizer
        if optimizer is None:
            return
        self._add_unfrozen_parameters()  # also if this rank had no forward in the window
        components, hooks = self._state.components, self._state.hooks
        samples = components.window.seen * components.window.micro * components.axes.data.size
        optimizer.piggyback_values, optimizer.optional_values = self._instruments.row(), self._reports.digest_row()
        with self._timed(STEP):
            optimizer.step()
            for hook in hooks.stepped:
                hook()
        self.global_samples += samples
        self.global_steps += 1
        self._applied = not optimizer.overflow
        if optimizer.overflow:
            self.skipped_steps += 1
            scaled = f"; loss scale is now {optimizer.loss_scale:g}" if optimizer.scaler is not None else ""
            log_rank0(f"step {self.global_steps} is skipped: {optimizer.skip_reason}{scaled}")
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        for hook in hooks.applied if self._applied else ():
            hook()
        self._reports.compare_digests(optimizer.gathered_optional_values)
        self._instruments.after_update(optimizer.gathered_piggyback_values, samples)
        if self.ds_config.disable_python_gc:
            gc.collect()
        every = self.ds_config.steps_per_print
        if every and self.global_steps % every == 0:
            self._reports.report()

    def _end_step(self) -> None:
        for hook in list(self._state.hooks.ended):
            hook()
        if stopping.possible:
            self._preemption.stop_if_asked()

    def was_step_applied(self) -> bool:
        """Return whether the last `step` or `flush` updated the parameters; False if it accumulated or was skipped."""
        return self._applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients since the last update; `set_to_none`: only without an optimizer. All ranks must call this."""
        self._instruments.row()
        if self._components.optimizer is not None:
            self._components.optimizer.zero_grad()
        else:
            self.module.zero_grad(set_to_none)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the samples per rank and micro-batch (positive, else ArgumentError); changes the global batch size."""
        if micro_batch_size <= 0:
            raise ArgumentError(f"a micro-batch has at least one sample, got {micro_batch_size}")
        self._window.set_micro(micro_batch_size)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the global batch size (samples per update) between two updates, by changing the accumulation steps.

        Raises:
            ArgumentError: the size is not a positive multiple of micro-batch size times data-parallel ranks.
            UsageError: micro-batches were run since the last update.
        """
        step = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size <= 0 or train_batch_size % step:
            raise ArgumentError(f"train_batch_size {train_batch_size} is not a multiple of micro x ranks = {step}")
        if self._window.seen:
            raise UsageError("set_train_batch_size in the middle of a window; call it after an update")
        self._window.set_steps(train_batch_size // step)
        if self._components.reducer is not None:
            self._components.reducer.set_accumulates(self._window.steps > 1)

    # -- modes and contexts ---------------------------------------------------------------------------------------

    def _autocast(self) -> Any:
        section = self.ds_config.torch_autocast
        if not section.enabled:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[section.dtype])

    def _timed(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._instruments.span(name)

    def compile(  # type: ignore[override]
        self,
        backend: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model: at stages 0 to 2 as a whole, at stage 3 unit by unit. A later call compiles it again.

        Args:
            backend: backend of torch.compile; None: the accelerator's, by default inductor.
            compile_kwargs: further arguments of torch.compile.
            schedule: passes over a compiled graph; only None is available.
            compiled_autograd_enabled: only False is available.

        Raises:
            NotAvailableError: another value was passed for one of the last two.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise NotAvailableError("compile(schedule=…, compiled_autograd_enabled=True) is not available yet")
        self._compiling.ask(backend, compile_kwargs)

    @property
    def is_compiled(self) -> bool:
        """Return whether compilation of the model was asked for, in any way."""
        return self._compiling.active

    def empty_partition_cache(self) -> None:
        """Free the gathered parameters of stage 3 that are not in use."""
        if self._components.lifecycle is not None:
            self._components.lifecycle.prefetcher.free_idle()

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Reduce the gradients accumulated since the last update, before `step`. All ranks must call this.

        Args:
            bucket_size: accepted without effect; `reduce_bucket_size` of the JSON is used.
        """
        if self._components.reducer is not None:
            self._components.reducer.finish(Purpose.REDUCE)

    @property
    def _shards_parameters(self) -> bool:
        """Return whether parameters are gathered before use; equal on all ranks, even if a stage has no parameters."""
        return policy_for(self.ds_config.zero.stage).gathers_before_use

    def destroy(self) -> None:
        """Remove the hooks and free optimizer state and gradients; the model remains, at stage 3 sharded.

        All ranks must call this, since others may still read this rank's shards. The call waits for the other ranks,
        except during an exception.

        Raises:
            ShardedParameterError: at the end, if an edit of a sharded parameter was lost.
            CheckpointError: an asynchronous save failed; nothing was destroyed.
        """
        failing = sys.exc_info()[0] is not None
        self.wait_for_checkpoint()
        self._compressing.stop()
        for part in (self._instruments, self._balance, self._keywords, self._compiling, self._generation):
            part.close()
        components = self._components
        # Pending gathers must end while the owners still serve their shards, even if this raises an error later.
        lost = components.wind_up()
        if self._shards_parameters and not components.destroyed and not failing:
            self._feeding.agree(0, "all ranks are done with their engine")
            release_abandoned(axis for group in components.groups for axis in group.served_axes)
        if components.lifecycle is not None:
            components.lifecycle.detach()
        if components.optimizer is not None:
            components.optimizer.destroy()
        if components.caster is not None:
            components.caster.remove()
        if self._recompute is not None:
            self._recompute.remove()
        for group in components.groups:
            group.dissolve()
        self._sequencing.close()
        register_engine(self.module, None)
        self._state.components = Components([], self._axes, components.dtype, self._window, destroyed=True)
        self.optimizer = self.basic_optimizer = self.lr_scheduler = None
        self.client_optimizer = self.client_lr_scheduler = None
        if lost is not None:
            raise lost

    def __enter__(self) -> DeepSpeedEngine:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        with behind(error):
            self.destroy()


class DeepSpeedHybridEngine(HybridMethods, DeepSpeedEngine):
    """Engine whose `generate`, and that of its module, run over the weights in training (`hybrid_engine.enabled`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin_hybrid()

    def eval(self) -> DeepSpeedHybridEngine:  # noqa: A003
        """Switch to evaluation, and log where the time since the last call went."""
        self.note_evaluation()
        return super().eval()  # type: ignore[return-value]

    def destroy(self) -> None:
        """Remove the module's `generate`, then as `DeepSpeedEngine.destroy`."""
        self._end_hybrid()
        super().destroy()
