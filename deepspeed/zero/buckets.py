"""What is known of a group's gradients: the round being collected, the accumulator, who had a gradient.

[Note: rounds] A bucket collects one gradient per parameter of its group: a round. A full round is launched at once
where the policy reduces as gradients arrive (or in the boundary micro-batch), and closed by `finish` otherwise. Ranks
may run different branches, so a rank may have launched fewer rounds of a group than others; `finish`, which all ranks
enter in `step`, compares the counts, and a rank that is behind contributes zeros. Messages carry the group and the
round in their tag, so the order of launches need not agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepspeed.zero.shard_group import ShardGroup


@dataclass(frozen=True)
class ReduceSettings:
    """How gradients are summed.

    Args:
        mean_over: number the sum over micro-batches and ranks is divided by, per micro-batch of weight one.
        accumulates: windows have several micro-batches (`gradient_accumulation_steps` > 1).
        accumulator: dtype of the accumulators (`data_types.grad_accum_dtype`).
        wire: dtype gradients travel in (`communication_data_type`); None: as they are.
        overlap: send while backward still runs (`zero_optimization.overlap_comm`).
        in_flight: elements that may be on the wire at once (`reduce_bucket_size`).
        prescale: factor applied before the wire to low-precision gradients (`prescale_gradients`); None: after it.
        watch_ranks: be able to tell which rank sent non-finite values.
    """

    mean_over: float
    accumulates: bool = False
    accumulator: torch.dtype = torch.float32
    wire: torch.dtype | None = None
    overlap: bool = True
    in_flight: int = 500_000_000
    prescale: float | None = None
    watch_ranks: bool = False


@dataclass
class Round:
    """Gradients of one group that have not been sent yet."""

    buffer: torch.Tensor
    at_owner: float  # factor still to be applied to the sum
    pooled: bool
    expected: int = 0  # gradients that make it complete
    arrived: set[int] = field(default_factory=set)
    fresh: set[int] = field(default_factory=set)  # those of the micro-batch that is sent: all of them end the round


class Bucket:
    """The gradient side of one group.

    Args:
        group: the parameters.
        accumulator: dtype of the accumulated sum.
        sums_locally: several micro-batches are summed here before they travel.
    """

    def __init__(self, group: ShardGroup, accumulator: torch.dtype, sums_locally: bool) -> None:
        self.group = group
        self.whole = not group.policy.owns_a_slice
        self.low, self.high = group.low, group.high
        self.dtype = accumulator
        self.sums_locally = self.whole or (sums_locally and not group.policy.reduces_as_gradients_arrive)
        self.local: torch.Tensor | None = None
        self.sum = torch.empty(0, dtype=accumulator, device=group.device)
        self.filled = False  # whether `sum` holds anything
        self.round: Round | None = None
        self.launches = [0, 0]  # rounds sent in low precision, in the accumulator's precision
        self.touched = bytearray(len(group.members))
        self.sent: list[torch.Tensor] = []  # sum of each round this rank sent: not finite if one of its elements is not

    def prepare(self) -> None:
        """Allocate the accumulators: a group that is all frozen has none until one of its parameters is unfrozen."""
        if self.sum.numel() == self.high - self.low:
            return
        device = self.group.device
        if self.sums_locally:
            # Where gradients are summed before they travel, the reduced sum takes the place of the own part.
            self.local = torch.zeros(self.group.numel, dtype=self.dtype, device=device)
            self.sum = self.local[self.low : self.high]
        else:
            self.sum = torch.zeros(self.high - self.low, dtype=self.dtype, device=device)

    def own(self) -> torch.Tensor:
        """This rank's share of the sum; at stage 0, where everybody has everything, an equal part of it."""
        rank, cuts = self.group.axis.rank, self.group.layout.cuts
        return self.sum[cuts[rank] - self.low : cuts[rank + 1] - self.low]

    def clear(self) -> None:
        """Forget the window."""
        self.filled = False
        self.launches = [0, 0]
        self.touched = bytearray(len(self.group.members))
        self.sent = []
