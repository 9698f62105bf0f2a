"""Log lines of an engine: its plan at the start, and its progress every few steps."""

from __future__ import annotations

import logging
import time
import zlib
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
    """Log the first line of `initialize`: versions, ranks and devices."""
    ranks = f"ranks={get_world_size()}, backend={get_backend()}" if is_initialized() else "ranks=1, no process group"
    log_rank0(
        f"DeepSpeed info: version={__version__}, torch={torch.__version__}, "
        f"accelerator={get_accelerator().device_name()}, {ranks}, native library: {native.state()}"
    )


_NO_DIGEST = -1.0
_SAMPLED = 1024  # maximum number of elements of each tensor that a digest reads


def _digest(tensors: list[torch.Tensor]) -> float:
    """Return a checksum of a sample of the batch's elements; -1 if no tensor has two different values in the sample."""
    digest, varies = 0, False
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or tensor.device.type == "meta" or not tensor.numel():
            continue
        if tensor.layout != torch.strided:
            continue
        elements = tensor.detach().reshape(-1)
        sample = elements[:: -(-elements.numel() // _SAMPLED)].cpu().contiguous()
        varies = varies or bool((sample != sample[0]).any())
        text = f"{tuple(tensor.shape)}{tensor.dtype}{sample.tolist()}"
        digest = zlib.crc32(text.encode(), digest)
    return float(digest) if varies else _NO_DIGEST


class ProgressLog:
    """Log of an engine's plan and progress, and warnings about equal or too large first batches."""

    def __init__(self, state: EngineState, facts: StateAccessors) -> None:
        self._state, self._facts = state, facts
        self._reported = (time.perf_counter(), 0)
        self._looked = False  # whether the first batch was checked
        mesh, data = state.axes.mesh, state.axes.data
        self._compares = data.size > 1 and mesh.size("pp") == 1  # whether the first batches are still to be compared
        self._digest = _NO_DIGEST

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
        """Warn if rank 0's first batch has the size (dim 0 of the first tensor) of all ranks' batches together."""
        if self._looked:
            return
        self._looked = True
        tensors = list(tensors_in(arguments))
        self._digest = _digest(tensors) if self._compares else _NO_DIGEST
        first = next(iter(tensors), None)
        ranks, (_, micro, _) = self._state.axes.data.size, self._facts.get_batch_info()
        if first is not None and first.dim() and ranks > 1 and first.shape[0] == ranks * micro:
            self._digest = _NO_DIGEST  # this warning is enough
            log_rank0(
                f"forward got {first.shape[0]} samples; the configuration has {micro} for each of {ranks} ranks. If "
                f"every rank loads the same, all learn from the same samples: pass training_data to initialize, or a "
                f"torch.utils.data.DistributedSampler to the loader",
                logging.WARNING,
            )

    def digest_row(self) -> list[float]:
        """Return [digest of this rank's first batch] until it was compared, then []; sent with the gradient norm."""
        return [self._digest] if self._compares else []

    def compare_digests(self, rows: list[list[float]]) -> None:
        """Warn if ranks that should read other samples have rank 0's digest; `rows`: `digest_row` of each rank."""
        if not self._compares or not rows:
            return
        self._compares = False
        mesh, around = self._state.axes.mesh, self._state.axes.model_replica_group.ranks
        same: list[int] = []
        for rank, row in zip(around, rows, strict=True):
            other, here = mesh.coordinates_of(rank), mesh.coordinates
            peers = all(other[dim] == here[dim] for dim in ("sp", "tp"))  # ranks of one sample get equal batches
            if row[0] == self._digest != _NO_DIGEST and peers:
                same.append(rank)
        if len(same) > 1:
            log_rank0(
                f"ranks {', '.join(map(str, same))} got equal first batches, so they learn from the same samples: "
                f"pass training_data to initialize, or a torch.utils.data.DistributedSampler to the loader",
                logging.WARNING,
            )

    def report(self) -> None:
        """Log a progress line; the engine calls this every `steps_per_print` updates."""
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
        """Format the samples per second since the last report; "" if `timers.throughput` is off."""
        section = self._state.ds_config.timers.throughput
        if not section.enabled:
            return ""
        if section.synchronized:
            get_accelerator().synchronize()
        now = time.perf_counter()
        (then, samples), self._reported = self._reported, (now, self._state.global_samples)
        return f", {(self._state.global_samples - samples) / max(now - then, 1e-9):.4g} samples/s"
