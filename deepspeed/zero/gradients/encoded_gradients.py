"""Encoded messages of one bucket's gradients, with the error memories of their codecs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepspeed.comm.collectives import collectives, encoded, hierarchical
from deepspeed.comm.collectives.collectives import Handle, sum_in_rank_order
from deepspeed.comm.collectives.encoded import EncodedSlices, ErrorFeedback, Layout, Wire
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.foundation.log import log_once
from deepspeed.zero.parameters.shard_group import ShardGroup


class ErrorMemory:
    """Carried error of one sender's encoded messages (LoCo, arXiv:2407.04480).

    Args:
        numel: number of elements of a message.
        device: device of the messages.
        feedback: weights and period.
    """

    def __init__(self, numel: int, device: torch.device, feedback: ErrorFeedback) -> None:
        self.feedback = feedback
        self.error = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        self.updates = 0  # updates since the last reset
        self._factor = 0.0  # factor of the last message; 0: none yet

    def for_factor(self, factor: float) -> torch.Tensor:
        """Return the error for a message whose sum will be multiplied by `factor`, for example because of fp16."""
        if self._factor not in (0.0, factor):
            self.error.mul_(self._factor / factor)
        self._factor = factor
        return self.error

    def end_update(self) -> None:
        self.updates += 1
        if self.updates >= self.feedback.reset:
            self.clear()

    def clear(self) -> None:
        self.updates, self._factor = 0, 0.0
        self.error.zero_()

    def state(self) -> dict[str, torch.Tensor | int | float]:
        """Return the state for a checkpoint; see `load`."""
        return {"error": self.error, "updates": self.updates, "factor": self._factor}

    def load(self, state: dict[str, torch.Tensor | int | float]) -> bool:
        """Restore a result of `state`; returns False if it was saved for messages of another size."""
        error = state["error"]
        if not isinstance(error, torch.Tensor) or error.shape != self.error.shape:
            return False
        self.error.copy_(error)
        self.updates, self._factor = int(state["updates"]), float(state["factor"])
        return True


class EncodedGradients:
    """Encoded form of a group's gradient messages.

    Args:
        group: parameter group.
        wire: codecs.
        whole: whether every rank gets the whole sum (stage 0).
        dtype: widest dtype of the messages, that of the accumulator.
    """

    def __init__(self, group: ShardGroup, wire: Wire, whole: bool, dtype: torch.dtype) -> None:
        axis, copies = group.axis, group.ranks.copies
        wire = wire if group.dtype != torch.float64 else Wire()
        first, second = wire.on(axis, dtype), None if copies is None else wire.on(copies, dtype)
        if isinstance(first, encoded.CastCodec) and group.dtype == torch.float16:
            first = None  # saves no byte
        if first is not None and copies is not None and not (whole or copies.tagged):
            log_once("gradients of sharded replicas on devices are encoded between replicas, not within a shard group")
            first = None
        self._group = group
        layout, own = group.layout, group.layout.shard_numel(axis.rank)
        self.two_steps = None if first is None else encoded.two_steps(axis, first, layout.cuts, layout.borders)
        self.slices: EncodedSlices | None = None
        self.shared: EncodedSlices | None = None
        if first is not None:
            both = self.two_steps
            alike = encoded.move_together(axis, layout.cuts)
            everyone = EncodedSlices(first, layout.cuts, layout.borders, alike)
            self.slices = everyone if both is None else both.slices
            # On devices, sums of stage 0 are shared in one step: see `encoded.TwoSteps`.
            self.shared = everyone if both is None or not axis.tagged else None
        self.copies: EncodedSlices | None = None
        # A sum that is encoded in turn has a memory at its owner.
        self.memory = self._memory(first, wire, 0 if self.slices is None else self.slices.cuts[-1])
        self.sum_memory = self._memory(first if whole else second, wire, own)
        if copies is not None and second is not None:
            low, high = layout.cuts[axis.rank], layout.cuts[axis.rank + 1]
            inside = [min(max(border, low), high) - low for border in layout.borders]
            borders = sorted({rank * own + border for rank in range(copies.size) for border in inside})
            cuts = [rank * own for rank in range(copies.size + 1)]
            self.copies = EncodedSlices(second, cuts, borders)

    def _memory(self, codec: encoded.Codec | None, wire: Wire, numel: int) -> ErrorMemory | None:
        if wire.feedback is None or not isinstance(codec, encoded.BlockCodec):
            return None
        return ErrorMemory(numel, self._group.device, wire.feedback)

    @property
    def memories(self) -> dict[str, ErrorMemory]:
        """Error memories by name."""
        both = {"contribution": self.memory, "sum": self.sum_memory}
        return {name: memory for name, memory in both.items() if memory is not None}

    @property
    def part(self) -> Layout | None:
        """Encoded form of the contributions to this rank's shard; None: they are not encoded."""
        if self.slices is None:
            return None
        axis = self._group.axis if self.two_steps is None else self.two_steps.across
        return self.slices.layouts[axis.rank]

    @staticmethod
    def message(
        slices: EncodedSlices, payload: torch.Tensor, memory: ErrorMemory | None, factor: float
    ) -> encoded.Encoding:
        """Return the encoding of a message whose sum will be multiplied by `factor`."""
        if memory is None:
            return encoded.Encoding(slices, payload)
        return encoded.Encoding(slices, payload, lambda: memory.for_factor(factor), memory.feedback.beta)

    def share_with_copies(
        self, axis: Axis, total: torch.Tensor, tag: int, label: str, factor: float
    ) -> tuple[Handle, torch.Tensor]:
        """Start to all-gather an encoded sum over the ranks with the same shard; returns a handle and the payload."""
        slices = self.copies
        if slices is None:
            raise RuntimeError("sums of replicas are not encoded")
        payload = axis.empty(slices.nbytes, torch.uint8, total.device)
        return self._share(axis, total, payload, tag, label, factor), payload

    def reduce_to_copies(
        self,
        flat: torch.Tensor,
        label: str,
        scale: float,
        factor: float,
        finish: Callable[[list[torch.Tensor]], Handle | None],
        in_rank_order: bool,
    ) -> Handle:
        """Do `hierarchical.reduce_to_copies` with encoded messages between the ranks with the same shard.

        Args:
            flat: 1-D contribution of this rank; must not change until the handle is done.
            label: name of the collective in error reports.
            scale: factor on the sum within the shard group.
            factor: factor by which the sum will be multiplied.
            finish: called with the encoded sums of all replicas, in rank order; returns the next phase, if any.
            in_rank_order: sum within the shard group in rank order.
        """
        slices, both = self.copies, self._group.ranks.copies
        if slices is None or both is None:
            raise RuntimeError("sums of replicas are not encoded")
        axis, copies, cuts = self._group.axis.reductions, both.reductions, self._group.layout.cuts
        low, high = cuts[axis.rank], cuts[axis.rank + 1]
        total = torch.empty(high - low, dtype=torch.float32, device=flat.device)
        payload = copies.empty(slices.nbytes, torch.uint8, flat.device)

        def add(parts: list[torch.Tensor]) -> None:
            sum_in_rank_order(parts, total, scale, add=False, any_order=not in_rank_order)

        with hierarchical.aside(flat.device):
            hierarchical.reduce_to_owners(axis, flat, cuts, 0, label, add, in_rank_order=in_rank_order).wait()
            handle = self._share(copies, total, payload, 0, f"reduce across copies: {label}", factor)
        pending = [total]  # the side stream reads it

        def arrived() -> Handle | None:
            pending.clear()
            return finish([slices.bytes_of(payload, rank) for rank in range(copies.size)])

        return handle.followed_by(arrived)

    def _share(
        self, axis: Axis, total: torch.Tensor, payload: torch.Tensor, tag: int, label: str, factor: float
    ) -> Handle:
        """Encode `total` into this rank's part of `payload` and start to all-gather it."""
        if self.copies is None:
            raise RuntimeError("sums of replicas are not encoded")
        slices, memory = self.copies, self.sum_memory
        error, beta = (None, 0.0) if memory is None else (memory.for_factor(factor), memory.feedback.beta)
        slices.encode_slice(axis.rank, total, slices.bytes_of(payload, axis.rank), label, error, beta)
        return collectives.share(axis, payload, slices.byte_cuts, tag, label)

    def end_update(self) -> None:
        for memory in self.memories.values():
            memory.end_update()


def sum_parts(
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    scale: float,
    add: bool,
    any_order: bool = False,
    layout: Layout | None = None,
) -> None:
    """Do `sum_in_rank_order`; with `layout`, uint8 tensors among `parts` are encoded in this form."""
    if layout is None:
        sum_in_rank_order(parts, out, scale, add, any_order)
    else:
        layout.sum(parts, out, scale, add)
