"""Logs an engine's plan at the start, and its progress every few steps."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from deepspeed import native
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.process_groups.process_group import get_backend, get_world_size, is_initialized
from deepspeed.config.docs import as_text
from deepspeed.engine.accessors import StateAccessors
from deepspeed.engine.engine_state import EngineState
from deepspeed.foundation.log import log_once, log_rank0
from deepspeed.foundation.pytree import tensors_in
from deepspeed.version import __version__


def say_info() -> None:
    """What runs on what: the first line of `initialize`."""
    ranks = f"ranks={get_world_size()}, backend={get_backend()}" if is_initialized() else "ranks=1, no process group"
    log_rank0(
        f"DeepSpeed info: version={__version__}, torch={torch.__version__}, "
        f"accelerator={get_accelerator().device_name()}, {ranks}, native library: {native.state()}"
    )


class ProgressLog:
    """Logs an engine's plan and progress."""

    def __init__(self, state: EngineState, facts: StateAccessors) -> None:
        self._state, self._facts = state, facts
        self._reported = (time.perf_counter(), 0)
        self._looked = False  # at the first batch

    def say_plan(self) -> None:
        state, (batch, micro, steps) = self._state, self._facts.get_batch_info()
        config, chosen = state.ds_config, state.basic_optimizer
        precision = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
        if config.torch_autocast.enabled:
            precision = f"autocast {config.torch_autocast.dtype}"
        count, model = sum(p.numel() for p in state.module.parameters()), type(state.module).__name__
        name = type(chosen).__name__ if chosen is not None else "no optimizer"
        log_rank0(
            f"{model}: {count:,} parameters, ZeRO stage {config.zero.stage}, {precision}, {name}, "
            f"{state.axes.mesh.world} rank(s), batch {batch} = {micro} x {steps} x {state.axes.data.size}"
        )
        if state.axes.mesh.world > 1:
            log_rank0(f"mesh: {state.axes.mesh.table()}")
        if chosen is not None and not config.gradient_clipping:
            log_once("gradient_clipping is not set: gradients are not clipped")
        if config.dump_state:
            log_rank0(as_text(config.explain()))

    def look_at_batch(self, *arguments: Any) -> None:
        """Warn where a rank's first batch (dim 0 of the first tensor) is as large as that of all ranks should be."""
        if self._looked:
            return
        self._looked = True
        first = next(iter(tensors_in(arguments)), None)
        ranks, (_, micro, _) = self._state.axes.data.size, self._facts.get_batch_info()
        if first is not None and first.dim() and ranks > 1 and first.shape[0] == ranks * micro:
            log_rank0(
                f"forward got {first.shape[0]} samples; the configuration has {micro} for each of {ranks} ranks. If "
                f"every rank loads the same, all learn from the same samples: pass training_data to initialize, or a "
                f"torch.utils.data.DistributedSampler to the loader",
                logging.WARNING,
            )

    def report(self) -> None:
        """A line: the engine asks for one every `steps_per_print` updates."""
        rates = ", ".join(f"{rate:.3g}" for rate in self._facts.get_lr())
        norm = self._facts.get_global_grad_norm()
        log_rank0(
            f"step {self._state.global_steps}: skipped {self._state.skipped_steps}, lr {rates}"
            + (f", gradient norm {norm:.4g}" if norm is not None else "")
            + self._throughput()
        )
        if self._state.ds_config.memory_breakdown:
            log_rank0("state bytes: " + ", ".join(f"{k} {v:,}" for k, v in self._facts.state_bytes().items()))

    def _throughput(self) -> str:
        """Samples per second since the last report."""
        section = self._state.ds_config.timers.throughput
        if not section.enabled:
            return ""
        if section.synchronized:
            get_accelerator().synchronize()
        now = time.perf_counter()
        (then, samples), self._reported = self._reported, (now, self._state.global_samples)
        return f", {(self._state.global_samples - samples) / max(now - then, 1e-9):.4g} samples/s"
