"""The time of a step, from the operators of a run without values and what a machine does per second.

One rank's time is the sum of its operators', the longer of arithmetic and traffic for each, of its messages, of the
update and of the disk. Ranks of a CPU share its cores and its memory, so messages hide behind nothing; the disk works
beside the update, and what is longer counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.foundation.tree import tensors_in
from deepspeed.ops.dispatch import DispatchMode
from deepspeed.ops.flop_formulas import formulas
from deepspeed.simulator.machine import Machine
from deepspeed.zero.policy import Policy

_FREE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias")


class Clock(DispatchMode):
    """Adds up the seconds of what is dispatched.

    Args:
        machine: where it would run.

    Attributes:
        seconds: so far.
        flops: so far.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine, self._formulas = machine, formulas()
        self.seconds, self.flops = 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name in _FREE or any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            self.seconds += self._machine.overhead / 4
            return out
        machine, formula = self._machine, self._formulas.get(func._overloadpacket)
        arithmetic = 0.0
        tensors = [*tensors_in((args, kwargs)), *tensors_in(out)]
        if formula is not None:
            flops = formula(*args, **(kwargs or {}), out_val=out)
            self.flops += flops
            dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
            arithmetic = flops / machine.rate(dtype, _one_product(flops, tensors))
        traffic = {t.untyped_storage()._cdata: t.numel() * t.itemsize for t in tensors}
        self.seconds += machine.overhead + max(arithmetic, sum(traffic.values()) / machine.bandwidth)
        return out


def _one_product(flops: float, tensors: list[torch.Tensor]) -> float:
    """Operations of one product of a batch of them."""
    batched = max((t.shape[:-2].numel() for t in tensors if t.dim() > 2), default=1)
    return flops / max(1, batched)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one update on one rank.

    Args:
        compute: forward and backward of the window.
        messages: gathers, reductions, publishes.
        update: the optimizer's.
        disk: reads and writes.
    """

    compute: float
    messages: float
    update: float
    disk: float

    @property
    def total(self) -> float:
        """Seconds."""
        return self.compute + self.messages + max(self.update, self.disk)

    @property
    def limit(self) -> str:
        """What takes most."""
        parts = {"compute": self.compute, "messages": self.messages, "update": self.update, "disk": self.disk}
        return max(parts, key=lambda name: parts[name])


def message_bytes(policy: Policy, parameters: float, ranks: int, micro_batches: int, itemsize: int) -> float:
    """Bytes that one rank receives in an update.

    Args:
        policy: what is split.
        parameters: of the model.
        ranks: that share the state.
        micro_batches: of a window.
        itemsize: bytes of an element on the wire.
    """
    others = parameters * itemsize * (ranks - 1) / ranks
    reductions = micro_batches if policy.reduces_as_gradients_arrive else 1
    gathers = 2 * micro_batches if policy.gathers_before_use else 1  # else sums are shared, or values published, once
    return others * (reductions + gathers)
