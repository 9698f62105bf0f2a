"""The engine users hold: the order of calls of a training step, and nothing else. Read this file first.

A window is the micro-batches between two updates. forward → backward (gradients enter buckets, `zero/buckets`) → step:
at the window's last micro-batch the optimizer (`zero/optimizer`) agrees, clips, updates, publishes.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing.wrapping import compile_block, wrap
from deepspeed.comm import scalars
from deepspeed.comm.logging import configure
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.accessors import StateAccessors
from deepspeed.engine.build import (
    Components,
    build,
    choose_optimizer,
    data_axis,
    facts_of,
    find_axes,
    listed,
    make_scheduler,
    without_optimizer,
)
from deepspeed.engine.checkpoint_io import CheckpointIO
from deepspeed.engine.clients import let_go, loss_is_divided, take_over
from deepspeed.engine.compressing import Compressing
from deepspeed.engine.config_accessors import ConfigAccessors
from deepspeed.engine.feeding import Feeding
from deepspeed.engine.offload_states import OffloadStates
from deepspeed.engine.reporting import BACKWARD, FORWARD, STEP, Reporting
from deepspeed.engine.statistics import RunningStatistics
from deepspeed.errors import ArgumentError, NotAvailableError, UsageError
from deepspeed.foundation.log import logger, say, say_once
from deepspeed.foundation.timer import SynchronizedWallClockTimer
from deepspeed.optim.precision import DTYPES


class DeepSpeedEngine(
    Reporting, StateAccessors, CheckpointIO, OffloadStates, Compressing, Feeding, ConfigAccessors, nn.Module
):
    """Trains a model under the stage, precision and schedule that the JSON names.

    Args:
        model: the module; cast and sharded in place.
        config: dict, path or base64 of the JSON.
        optimizer: a torch optimizer, a callable that makes one of parameters, or None.
        model_parameters: parameters or groups to train.
        lr_scheduler: a scheduler, a callable that makes one of an optimizer, or None.
        training_data: dataset for `training_dataloader`.
        collate_fn: for that loader.
        mpu: a client's model-parallel unit.

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
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"deepspeed.initialize requires a model: model is {type(model).__name__}, not a Module")
        accelerator = get_accelerator()
        self.device = scalars.current.device or torch.device(accelerator.current_device_name())
        self.mpu = mpu
        world = data_axis(mpu, self.device)
        raw = DeepSpeedConfig.for_init(config, world=world.size)
        axes = find_axes(raw.zero.mics_shard_size, world, self.device)
        self.ds_config = DeepSpeedConfig(config, world=axes.world.size, facts=facts_of(model, optimizer, self.device))
        if self.ds_config.log_level:
            logger.setLevel(self.ds_config.log_level.upper())
        if self.ds_config.comms_logger.enabled:
            configure(self.ds_config)
        self._axes = axes
        self.client_optimizer, self.client_lr_scheduler = optimizer, lr_scheduler
        self.basic_optimizer = choose_optimizer(model, optimizer, listed(model_parameters), self.ds_config)
        self.module = model
        take_over(model, self.destroy)
        self._recompute = wrap(model, self.ds_config.top.activation_checkpointing, mpu)
        self._components: Components = build(model, self.basic_optimizer, self.ds_config, axes, self.device)
        self._statistics = RunningStatistics(model, axes.world)
        self.optimizer: Any = self._components.optimizer or self._components.lifecycle
        if self._components.optimizer is not None:
            self._components.optimizer._scale_loss = lambda loss, retain: self.backward(loss, retain_graph=retain)
        self.lr_scheduler = make_scheduler(lr_scheduler, self.ds_config, self.basic_optimizer)
        self._reset_counters()
        self.training_dataloader = (
            self.deepspeed_io(training_data, collate_fn=collate_fn) if training_data is not None else None
        )
        self.timers = SynchronizedWallClockTimer(accelerator.synchronize)
        self._start_compression()
        self._say_plan()
        self._tell_reducer()
        if self._components.lifecycle is not None:  # a slice can be pulled only when its owner serves it
            self._agree(0, "all ranks have their engine")

    # -- making ---------------------------------------------------------------------------------------------------

    def _reset_counters(self) -> None:
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self._seen = 0  # micro-batches of the running window
        self._sums = False  # the window sums over its micro-batches (scale_wrt_gas=False)
        self._forced_boundary: bool | None = None
        self._in_no_sync = False
        self._weight: float | None = None  # real samples of the next micro-batch, when a loop counts them
        self._scaled_by_hand = False
        self._applied = False
        self._gas = self.ds_config.gradient_accumulation_steps
        self._micro = self.ds_config.train_micro_batch_size_per_gpu
        self._open_feed()
        self._reported = (time.perf_counter(), 0)

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Switch to training, or with False to evaluation (with rank 0's running statistics, see BatchNorm)."""
        self._statistics.switch(training=mode)
        return super().train(mode)

    # -- forward and backward -------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; same arguments and outputs."""
        if self.training:
            self._before_micro_batch()
        with self._timed(FORWARD), self._autocast():
            return self.module(*inputs, **kwargs)

    def _before_micro_batch(self) -> None:
        optimizer, reducer = self._components.optimizer, self._components.reducer
        if optimizer is None or reducer is None:
            return
        reducer.clean = False  # on all ranks alike, whatever branch each takes
        thawed = [m for m in self._components.frozen if m.param.requires_grad]
        for member in thawed:
            optimizer.activate(member)
            self._components.frozen.remove(member)
        self._scaled_by_hand = False
        self._tell_reducer()
        reducer.warn_unscaled = optimizer.scaler is not None

    def _tell_reducer(self) -> None:
        """Tell the gradient side where in the window we are, and what the next gradients are to be multiplied by."""
        reducer = self._components.reducer
        if reducer is None:
            return
        reducer.reduce_now = self.is_gradient_accumulation_boundary() and not self._in_no_sync
        reducer.deferred |= not reducer.reduce_now
        reducer.factor = self._factor(scaled=self._scaled_by_hand)
        reducer.weight = None if self._weight is None else self._weight / self._micro

    def _factor(self, *, by_window: bool = True, items: bool = False, scaled: bool = False) -> float:
        """What a gradient is multiplied by when it enters the accumulator: the one rule of scaling.

        Args:
            by_window: divide by `gradient_accumulation_steps`.
            items: the loss is a sum over items; the division comes in `step`, when their global count is known.
            scaled: the loss carries the loss scale.
        """
        optimizer, settings = self._components.optimizer, self._components.reducer
        if optimizer is None or settings is None:
            return 1.0
        scale = optimizer.loss_scale if scaled else 1.0
        if self._weight is not None:
            return self._micro / scale
        if items:
            return 1.0 / scale
        ranks = self.world_size if self.ds_config.gradient_allreduce_op == "mean" else 1
        return 1.0 / (ranks * (self._gas if by_window else 1) * scale)

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        num_items: float | None = None,
    ) -> torch.Tensor:
        """Run `loss` backward.

        Args:
            loss: scalar with a graph: the mean over the micro-batch, or with `num_items` the sum over its items.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: False sums over the window instead of taking the mean over its micro-batches.
            num_items: items (tokens, samples) `loss` is the sum over on this rank; the gradient becomes that of the
                total loss divided by the global count of the window.

        Returns:
            The loss divided by the accumulation steps (as it is with `num_items` or `scale_wrt_gas=False`).

        Raises:
            ArgumentError: the loss is no scalar tensor with a graph.
            UsageError: the engine has no optimizer, or a window mixes ways of counting.
        """
        self._check_loss(loss)
        optimizer, reducer = self._components.optimizer, self._components.reducer
        if optimizer is None or reducer is None:
            raise without_optimizer("backward", self._components)
        if self._weight is None:
            optimizer.count(num_items)
        elif num_items is not None:
            raise UsageError("engine.loop already counts samples; do not pass num_items inside it")
        self._tell_reducer()
        scale = optimizer.loss_scale
        by_window = scale_wrt_gas and num_items is None and not loss_is_divided(self.module)
        self._sums = not scale_wrt_gas
        reducer.factor = self._factor(by_window=by_window, items=num_items is not None, scaled=True)
        reducer.warn_unscaled = False
        with self._timed(BACKWARD):
            (loss.float() * scale if scale != 1.0 else loss).backward(retain_graph=retain_graph)
        return loss / self._gas if by_window and self._gas > 1 else loss

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, torch.Tensor):
            raise ArgumentError(
                f"backward needs the loss as a tensor, got {type(loss).__name__}; models that return several values: "
                f"pick the loss out first"
            )
        if loss.numel() != 1:
            raise ArgumentError(f"backward needs a scalar loss, got shape {tuple(loss.shape)}; take .mean() or .sum()")
        if not loss.requires_grad:
            raise ArgumentError(
                "the loss has no graph: it was detached, computed under no_grad, or no parameter that requires grad "
                "took part in it"
            )

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss with the loss scale applied, for a `.backward()` of one's own under fp16."""
        self._check_loss(loss)
        optimizer = self._components.optimizer
        if optimizer is None or optimizer.loss_scale == 1.0:
            return loss
        self._scaled_by_hand = True
        self._tell_reducer()
        if self._components.reducer is not None:
            self._components.reducer.warn_unscaled = False
        return loss.float() * optimizer.loss_scale

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes inside are not reduced at stages 0 and 1; legal at every stage.

        Stages 2 and 3 keep no whole gradients, so they reduce into their slices all the same: the result is equal.
        """
        if self._in_no_sync:
            raise UsageError("no_sync contexts cannot be nested")
        if self.ds_config.zero.stage >= 2:
            say_once(
                "no_sync at stage 2 and 3: gradients are still reduced into each rank's slice; the sum is the same"
            )
        self._in_no_sync = True
        self._tell_reducer()
        try:
            yield
        finally:
            self._in_no_sync = False
            self._tell_reducer()

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backward passes inside are reduced together, by the `step` that follows (see `no_sync`)."""
        with self.no_sync():
            yield

    # -- the step -------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the running micro-batch is the last of its window."""
        if self._forced_boundary is not None:
            return self._forced_boundary
        return (self._seen + 1) % self._gas == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide the boundary instead of the engine, from the next backward on."""
        self._forced_boundary = bool(is_boundary)
        self._tell_reducer()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at the window's last one clip, update, publish, and step the schedule.

        Args:
            lr_kwargs: for the scheduler's `step`.

        Raises:
            UsageError: inside `no_sync`, or without an optimizer.
        """
        if self._in_no_sync:
            raise UsageError("step() inside no_sync(): gradients have not been reduced; call it after the context")
        if self._components.optimizer is None:
            raise without_optimizer("step", self._components)
        boundary = self.is_gradient_accumulation_boundary()
        self._seen += 1
        self.micro_steps += 1
        self._applied = False
        if boundary:
            self._update(1.0, lr_kwargs)
        self._weight = None
        self._scaled_by_hand = False
        self._tell_reducer()

    def flush(self) -> None:
        """Apply a window that is not full, as at the end of an epoch: the mean is over the micro-batches seen.

        All ranks call together; without a micro-batch in the window nothing happens.
        """
        if self._components.optimizer is None:
            raise without_optimizer("flush", self._components)
        if self._seen:
            self._update(1.0 if self._sums else self._gas / self._seen, None)
            self._tell_reducer()

    def _update(self, rescale: float, lr_kwargs: dict[str, Any] | None) -> None:
        optimizer = self._components.optimizer
        if optimizer is None:
            return
        with self._timed(STEP):
            optimizer.step(rescale=rescale)
            self._statistics.publish()
        self.global_samples += self._seen * self._micro * self.world_size
        self._seen, self._sums = 0, False
        self.global_steps += 1
        self._applied = not optimizer.overflow
        if optimizer.overflow:
            self.skipped_steps += 1
            scaled = f"; loss scale is now {optimizer.loss_scale:g}" if optimizer.scaler is not None else ""
            say(f"step {self.global_steps} is skipped: {optimizer.skip_reason}{scaled}")
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        if self._applied:
            self._after_applied_step()
        if self.ds_config.disable_python_gc:
            gc.collect()
        self._report()

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated the parameters."""
        return self._applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw the gradients of the window away. All ranks call together."""
        if self._components.optimizer is not None:
            self._components.optimizer.zero_grad()
        else:
            self.module.zero_grad(set_to_none)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Tell the engine that micro-batches have another size from now on; the global batch changes with it."""
        if micro_batch_size <= 0:
            raise ArgumentError(f"a micro-batch has at least one sample, got {micro_batch_size}")
        self._micro = micro_batch_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the accumulation steps, between windows.

        Raises:
            ArgumentError: the number is not a multiple of micro-batch times ranks.
            UsageError: in the middle of a window.
        """
        step = self.train_micro_batch_size_per_gpu() * self.world_size
        if train_batch_size <= 0 or train_batch_size % step:
            raise ArgumentError(f"train_batch_size {train_batch_size} is not a multiple of micro x ranks = {step}")
        if self._seen:
            raise UsageError("set_train_batch_size in the middle of a window; call it after an update")
        self._gas = train_batch_size // step
        reducer = self._components.reducer
        if reducer is not None:
            reducer.set_accumulates(self._gas > 1)
        self._tell_reducer()

    # -- modes and contexts ---------------------------------------------------------------------------------------

    def _autocast(self) -> Any:
        section = self.ds_config.torch_autocast
        if not section.enabled:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[section.dtype])

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if not self.ds_config.wall_clock_breakdown:
            yield
            return
        timer = self.timers(name)
        timer.start()
        yield
        timer.stop()

    def compile(  # type: ignore[override]
        self,
        backend: str = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the forward of each repeated block (or of the module when it has none).

        Args:
            backend: of torch.compile.
            compile_kwargs: for torch.compile.
            schedule: passes of whole-graph compilation; not available yet.
            compiled_autograd_enabled: not available yet.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise NotAvailableError("compile(schedule=…, compiled_autograd_enabled=True) is not available yet")
        from deepspeed.zero.lifecycle import repeated_blocks

        for block in repeated_blocks(self.module) or [self.module]:
            compile_block(block, backend=backend, **(compile_kwargs or {}))
        self._compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return getattr(self, "_compiled", False)

    def empty_partition_cache(self) -> None:
        """Free gathered parameters that are not in use."""
        if self._components.lifecycle is not None:
            self._components.lifecycle.keeper.free_idle()

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Reduce what the window has so far, now rather than in `step`. All ranks call together.

        Args:
            bucket_size: accepted for old scripts; bucket sizes are fixed by the JSON.
        """
        if self._components.reducer is not None:
            self._components.reducer.finish()

    def destroy(self) -> None:
        """Take the hooks off and let optimizer state and gradients go; the model stays, plain or sharded.

        All ranks call together, since others may still pull this rank's slices; one that fails waits for nobody.
        """
        self.wait_for_checkpoint()
        self._stop_compression()
        components = self._components
        if components.lifecycle is not None:
            if sys.exc_info()[0] is None:
                self._agree(0, "all ranks are done with their engine")
            components.lifecycle.settle()
            components.lifecycle.detach()
        if components.optimizer is not None:
            components.optimizer.destroy()
        if components.caster is not None:
            components.caster.remove()
        if self._recompute is not None:
            self._recompute.remove()
        for group in components.groups:
            group.dissolve()
        let_go(self.module)
        self._components = Components([], self._axes, components.dtype, destroyed=True)
        self.optimizer = self.basic_optimizer = self.lr_scheduler = None
        self.client_optimizer = self.client_lr_scheduler = None

    def __enter__(self) -> DeepSpeedEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.destroy()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" not in modules or name.startswith("__"):
                raise
            try:
                return getattr(modules["module"], name)
            except AttributeError:
                raise AttributeError(
                    f"neither the engine nor its module {type(modules['module']).__name__} has {name!r}"
                ) from None

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})
