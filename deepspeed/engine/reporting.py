"""What an engine says: its plan at the start, a line every few steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.explain import as_text
from deepspeed.foundation.log import say, say_once
from deepspeed.foundation.timer import SynchronizedWallClockTimer

FORWARD, BACKWARD, STEP = "forward", "backward", "step"


class Reporting:
    """The speaking side of the engine."""

    ds_config: DeepSpeedConfig
    module: torch.nn.Module
    basic_optimizer: torch.optim.Optimizer | None
    timers: SynchronizedWallClockTimer
    global_steps: int
    global_samples: int
    skipped_steps: int
    dp_world_size: Any
    mesh: Any
    get_batch_info: Callable[[], tuple[int, int, int]]
    get_lr: Callable[[], list[float]]
    get_global_grad_norm: Callable[[], float | None]
    memory_breakdown: Callable[[], dict[str, int]]
    _reported: tuple[float, int]

    def _say_plan(self) -> None:
        config, (batch, micro, steps) = self.ds_config, self.get_batch_info()
        precision = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
        if config.torch_autocast.enabled:
            precision = f"autocast {config.torch_autocast.dtype}"
        count = sum(p.numel() for p in self.module.parameters())
        name = type(self.basic_optimizer).__name__ if self.basic_optimizer is not None else "no optimizer"
        say(
            f"{type(self.module).__name__}: {count:,} parameters, ZeRO stage {config.zero.stage}, {precision}, {name}, "
            f"{self.mesh.world} rank(s), batch {batch} = {micro} x {steps} x {self.dp_world_size}"
        )
        if self.basic_optimizer is not None and not config.gradient_clipping:
            say_once("gradient_clipping is not set: gradients are not clipped")
        if config.dump_state:
            say(as_text(config.explain()))

    def _report(self) -> None:
        every = self.ds_config.steps_per_print
        if not every or self.global_steps % every:
            return
        rates = ", ".join(f"{rate:.3g}" for rate in self.get_lr())
        norm = self.get_global_grad_norm()
        say(
            f"step {self.global_steps}: skipped {self.skipped_steps}, lr {rates}"
            + (f", gradient norm {norm:.4g}" if norm is not None else "")
            + self._throughput()
        )
        if self.ds_config.wall_clock_breakdown:
            self.timers.log([FORWARD, BACKWARD, STEP])
        if self.ds_config.memory_breakdown:
            say("state bytes: " + ", ".join(f"{k} {v:,}" for k, v in self.memory_breakdown().items()))

    def _throughput(self) -> str:
        """Samples per second since the last report."""
        section = self.ds_config.timers.throughput
        if not section.enabled:
            return ""
        if section.synchronized:
            get_accelerator().synchronize()
        now = time.perf_counter()
        (then, samples), self._reported = self._reported, (now, self.global_samples)
        return f", {(self.global_samples - samples) / max(now - then, 1e-9):.4g} samples/s"
