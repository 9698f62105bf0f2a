"""Kernels that are recorded instead of run, so that a pass can be simulated from the package's own calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deepspeed.ops.triton.costs import KernelCost, dtype_of, launch_cost
from deepspeed.ops.triton.variants import KernelForm
from deepspeed.simulator.trace import KERNEL, HostEvent, KernelWork, Recording
from deepspeed.simulator.trace_recorder import StepRecorder


class PassRecorder(StepRecorder):
    """Recorder of a pass: torch's operators and the package's kernels, each with its work, for machines with
    `CardRates`. A library's kernels are taken to have as many programs as memory needs.

    Args:
        recording: the recording to fill.
        device: type of the device on which operators count as kernels; "meta" records without memory.
    """

    def __init__(self, recording: Recording, device: str = "meta") -> None:
        super().__init__(recording, device)

    def add(self, entry: HostEvent) -> None:
        if entry.kind == KERNEL and entry.work is None:
            entry.work = KernelWork()
        super().add(entry)


class RecordedKernels:
    """Kernels, as `ops.triton.attention.Kernels`, that enter a recording and compute nothing.

    Args:
        recorder: recorder of the pass.
        candidates: as in `launch_cost`.
        page_bytes: bytes of an element of the pages; None: those of their tensors.
    """

    def __init__(self, recorder: StepRecorder, candidates: int | None = None, page_bytes: float | None = None) -> None:
        self.recorder, self.candidates, self.page_bytes = recorder, candidates, page_bytes

    def has(self, variant: KernelForm) -> bool:
        """Whether the variant is there: all are."""
        return True

    def prepare(self, variants: Iterable[KernelForm]) -> None:
        """Do nothing."""

    def launch(self, variant: KernelForm, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        """Record a launch by its formula; errors as in `launch_cost`."""
        cost = launch_cost(variant, grid, arguments, self.candidates)
        if self.page_bytes is not None and "keys" in cost.read:
            _resize(cost, self.page_bytes / arguments[1].element_size())
        work = KernelWork(cost.programs, cost.resident, cost.waiting, cost.cached_bytes, cost.instructions)
        event = HostEvent(KERNEL, variant.kernel, self.recorder.current(), cost.flops, cost.nbytes, dtype_of(variant))
        event.work = work
        self.recorder.add(event)


def _resize(cost: KernelCost, factor: float) -> None:
    """Multiply the bytes of pages."""
    for name in ("keys", "values"):
        cost.read[name] *= factor
    cost.waiting *= factor
