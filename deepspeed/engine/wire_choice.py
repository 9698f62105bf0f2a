"""Choice of the codecs for `"wire": "auto"`: the most exact ones that cost no time, measured in the first steps.

Training starts with int8. After some steps, the time of a step and the speed of the link tell how long steps with other
codecs would take (`predicted`). The first one of none, bf16 and int8 that is at most 2 % slower than the fastest one is
taken, by all ranks. int4 is never chosen, since it changes losses (docs/communication.md).
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch

from deepspeed.comm.collectives.collectives import EXCHANGE, spread
from deepspeed.comm.collectives.encoded import Codec, Wire
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import Axis, axes_here
from deepspeed.engine.engine_state import EngineState
from deepspeed.engine.wire import codec_of
from deepspeed.foundation.log import log_rank0
from deepspeed.zero.optimizer.update import all_gather_updated

CHOICES = ("none", "bf16", "int8")
START = "int8"
_SKIPPED, _TIMED = 2, 4  # steps: buffers are allocated in the first ones
_SLACK = 1.02
_HIDDEN = 0.5  # part of a step's computation during which messages of gradients can travel
_PROBE_BYTES, _PROBES = 1 << 20, 3


@dataclass(frozen=True)
class LinkCosts:
    """Costs of messages on one rank.

    Args:
        bandwidth: bytes per second that a rank receives from other hosts.
        coding: seconds to encode and decode one element.
        gradients: elements of gradients that a rank receives from other ranks in a step.
        weights: elements of weights that a rank receives in a step.
    """

    bandwidth: float
    coding: float
    gradients: float
    weights: float

    def predicted(self, compute: float, codec: str) -> float:
        """Return the seconds of a step with a codec, of which `compute` seconds are computation."""
        width = {"none": 4.0, "bf16": 2.0, "int8": 1.01, "int4": 0.51}[codec]
        coding = (self.gradients + self.weights) * self.coding if codec in ("int8", "int4") else 0.0
        sent = max(0.0, self.gradients * width / self.bandwidth - _HIDDEN * compute)
        return compute + sent + self.weights * width / self.bandwidth + coding

    def compute(self, step: float, codec: str) -> float:
        """Return the seconds of computation of a step that took `step` seconds with a codec."""
        low, high = 0.0, step
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if self.predicted(middle, codec) > step else (middle, high)
        return low

    def best(self, step: float, measured: str = START) -> str:
        """Return the most exact of `CHOICES` that is about as fast as the fastest one.

        Args:
            step: seconds of a step.
            measured: codec with which it was measured.
        """
        return self.choose(self.compute(step, measured))[0]

    def choose(self, compute: float) -> tuple[str, dict[str, float]]:
        """Return the codec as `best` does for `compute` seconds of computation, and the seconds of a step by codec."""
        times = {codec: self.predicted(compute, codec) for codec in CHOICES}
        return next(codec for codec in CHOICES if times[codec] <= _SLACK * min(times.values())), times


def bandwidth_of(axis: Axis, device: torch.device) -> float:
    """Measure the bytes per second that this rank receives in an all-gather. All ranks of the axis must call this."""
    if axis.size == 1:
        return math.inf
    full = torch.zeros(_PROBE_BYTES * axis.size, dtype=torch.uint8, device=device)
    cuts = [_PROBE_BYTES * rank for rank in range(axis.size + 1)]
    seconds = []
    for _ in range(_PROBES):
        begun = time.perf_counter()
        spread(axis, full, cuts, axis.public_tag(EXCHANGE), "bandwidth of a link").wait()
        full[-1:].item()  # a device has finished
        seconds.append(time.perf_counter() - begun)
    return _PROBE_BYTES * (axis.size - 1) / min(seconds)


def coding_of(codec: Codec, device: torch.device) -> float:
    """Measure the seconds to encode and decode one element."""
    values = torch.randn(1 << 18, device=device)
    layout = codec.layout((0, values.numel()))
    payload = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(_PROBES):
        begun = time.perf_counter()
        layout.encode(values, payload)
        layout.decode(payload, values)
        values[-1:].item()
        seconds.append(time.perf_counter() - begun)
    return min(seconds) / values.numel()


class WireChoice:
    """Hook that times the first steps of an engine and then sets the codecs, if the JSON leaves them to it."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        wire = state.ds_config.wire
        self._kinds = [kind for kind in ("gradients", "weights") if getattr(wire, kind) == "measured"]
        self._times: list[float] = []
        self._last = 0.0
        self.chosen: str | None = None
        hosts = set(axes_here().hosts.values())
        if self._kinds and len(hosts) > 1 and state.components.reducer is not None:
            state.hooks.ended.append(self._step_ended)

    def _step_ended(self) -> None:
        now = time.perf_counter()
        if self._last:
            self._times.append(now - self._last)
        self._last = now
        if len(self._times) < _SKIPPED + _TIMED:
            return
        self._state.hooks.ended.remove(self._step_ended)
        axis, codec = self._state.axes.dp_sp_group, codec_of(START)
        if codec is None:
            raise RuntimeError(f"{START} is no codec")
        costs = self._costs(axis, codec)
        step = statistics.median(self._times[_SKIPPED:])
        rows = all_gather_objects(self._state.everyone, (step, costs.bandwidth, costs.coding))
        slowest = LinkCosts(min(row[1] for row in rows), max(row[2] for row in rows), costs.gradients, costs.weights)
        longest = max(row[0] for row in rows)
        self.chosen = slowest.best(longest)
        self._apply(self.chosen)
        log_rank0(
            f'wire = "auto": {self.chosen} for {" and ".join(self._kinds)}: a step takes {longest:.3f} s with {START}, '
            f"the link brings {slowest.bandwidth / 1e6:.0f} MB/s to a rank"
        )

    def _costs(self, axis: Axis, codec: Codec) -> LinkCosts:
        device, ranks = self._state.device, axis.size
        groups, micro = self._state.components.groups, self._state.window.steps
        gradients = weights = 0.0
        for group in groups:
            elements = group.numel * (ranks - 1) / ranks
            rounds = micro if group.policy.reduces_as_gradients_arrive else 1
            gradients += elements * rounds * (1 if group.policy.owns_a_shard else 2)
            weights += elements * (
                2 * micro if group.policy.gathers_before_use else group.policy.all_gathers_after_step
            )
        return LinkCosts(bandwidth_of(axis, device), coding_of(codec, device), gradients, weights)

    def _apply(self, name: str) -> None:
        """Set the codec of all groups. All ranks must call this at the end of a step."""
        parts, wire = self._state.components, Wire(codec_of(name))
        if parts.reducer is not None and "gradients" in self._kinds:
            for bucket in parts.reducer.buckets:
                bucket.set_wire(wire)
        if "weights" in self._kinds:
            for group in parts.groups:
                if group.members[0].param.requires_grad or self._state.ds_config.wire.frozen_weights is None:
                    group.set_wire(wire)
            all_gather_updated(parts.groups)
        all_gather_objects(self._state.everyone, None)  # all ranks serve shards in the new form
