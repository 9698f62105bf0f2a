"""View of this rank's elements of a compressed parameter, and sums over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from deepspeed.comm.collectives.collectives import READ, SMALL, spread
from deepspeed.comm.process_groups.axis import Axis, tag_of
from deepspeed.zero.gradients.buckets import Bucket
from deepspeed.zero.optimizer.optimizer import ZeroOptimizer
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.record import ParamRecord


class Exchange:
    """Sums and maxima over the ranks that share a state; all ranks call together, in the same order.

    Args:
        axis: these ranks.
        device: device of the messages, if the axis' backend is not on the CPU.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        self._channel, self._rounds = axis.channel(), 0

    def rows(self, row: torch.Tensor, label: str) -> torch.Tensor:
        """All-gather a 1-D row of equal length on every rank: [ranks, n] on the CPU."""
        axis, n = self.axis, row.numel()
        if axis.group is None or not n:
            return row.detach().cpu().view(1, -1).expand(axis.size, -1)
        device = torch.device("cpu") if axis.tagged else self.device
        flat = torch.empty(axis.size * n, dtype=row.dtype, device=device)
        flat[axis.rank * n : (axis.rank + 1) * n] = row.to(device)
        self._rounds += 1
        tag = tag_of(self._channel, SMALL, self._rounds)
        spread(axis, flat, [rank * n for rank in range(axis.size + 1)], tag, label).wait()
        return flat.view(axis.size, n).cpu()

    def sum(self, row: torch.Tensor, label: str) -> torch.Tensor:
        """Return the sum of all ranks' rows, in rank order."""
        return self.rows(row, label).sum(0)

    def max(self, number: float, label: str) -> float:
        """Return the maximum of all ranks' numbers."""
        return float(self.rows(torch.tensor([number], dtype=torch.float64), label).max())

    def whole(self, part: torch.Tensor, cuts: Sequence[int], label: str) -> torch.Tensor:
        """All-gather a 1-D tensor; `cuts` are the `ranks + 1` boundaries between the ranks' parts."""
        axis = self.axis
        flat = torch.empty(cuts[-1], dtype=part.dtype, device=part.device)
        flat[cuts[axis.rank] : cuts[axis.rank + 1]] = part
        if axis.group is not None:
            self._rounds += 1
            spread(axis, flat, cuts, tag_of(self._channel, READ, self._rounds), label).wait()
        return flat


class Owned:
    """This rank's part of one parameter: elements [low, high) of the flattened tensor.

    Args:
        name: name in the model; of a tied parameter, the first one.
        param: the parameter.
        axis: the ranks that share the state.
        optimizer: has the moments and gradients; None without training.
    """

    def __init__(self, name: str, param: nn.Parameter, axis: Axis, optimizer: ZeroOptimizer | None) -> None:
        self.name, self.param, self.axis, self.optimizer = name, param, axis, optimizer
        self.member: ParamRecord | None = param._ds_member if is_managed(param) else None  # type: ignore[attr-defined]
        self.shape = torch.Size(param.shape if self.member is None else self.member.shape)
        self.numel = self.shape.numel()
        if self.member is None:
            self.cuts = tuple(self.numel * rank // axis.size for rank in range(axis.size + 1))
        else:
            self.cuts = self.member.group.layout.cuts_of(self.member.index)
        whole = self.member is None or not self.member.group.policy.owns_a_shard
        self.low, self.high = (0, self.numel) if whole else self.counted

    @property
    def counted(self) -> tuple[int, int]:
        """Range [start, stop) that this rank contributes to sums, so that each element counts once."""
        return self.cuts[self.axis.rank], self.cuts[self.axis.rank + 1]

    @property
    def trained(self) -> bool:
        """Whether the optimizer updates the parameter."""
        return self.member is not None and self.optimizer is not None and self.member.uid in self.optimizer.fragments

    @property
    def learning_rate(self) -> float:
        """Learning rate of the parameter; 1 if it is not trained."""
        if self.optimizer is not None and self.member is not None:
            leaves = {id(f.leaf) for f in self.optimizer.fragments.get(self.member.uid, [])}
            for group in self.optimizer.param_groups:
                if leaves and any(id(leaf) in leaves for leaf in group["params"]):
                    return float(group["lr"])
        return 1.0

    @property
    def span(self) -> slice:
        """Position of [low, high) in this rank's master and gradient accumulator."""
        if self.member is None:
            return slice(self.low, self.high)
        start = self.member.offset - self.member.group.low + self.low
        return slice(start, start + self.high - self.low)

    @contextlib.contextmanager
    def values(self, changed: bool = False) -> Iterator[torch.Tensor]:
        """Context with the values of [low, high), 1-D: the master's, if there is a master."""
        if self.member is None:
            yield self.param.data.view(-1)
            return
        with self.member.group.updated.borrowed(changed) as lent:
            yield lent[self.span]

    @property
    def bucket(self) -> Bucket | None:
        """Gradient bucket of the parameter's group."""
        if self.optimizer is None or self.member is None or not self.trained:
            return None
        return self.optimizer.reducer.bucket_of(self.member.group)

    @contextlib.contextmanager
    def gradient(self, changed: bool = False) -> Iterator[torch.Tensor | None]:
        """Context with the accumulated gradient of [low, high); None if no rank has a gradient."""
        bucket = self.bucket
        if bucket is None or self.optimizer is None or self.member is None or not bucket.filled:
            yield None
        elif not self.optimizer.reducer.touched(bucket, self.member):
            yield None
        else:
            with bucket.total.borrowed(changed) as total:
                yield total[self.span]

    def moments(self) -> Iterator[torch.Tensor]:
        """Tensors of the optimizer state that are split like the parameter; valid inside the shard's `at_hand`."""
        if self.optimizer is None or self.member is None:
            return
        for fragment in self.optimizer.fragments.get(self.member.uid, []):
            for value in self.optimizer.optimizer.state.get(fragment.leaf, {}).values():
                if isinstance(value, torch.Tensor) and value.dim() and value.numel() == fragment.range.numel:
                    yield value.view(-1)

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """Return the contributed range of a tensor over [low, high)."""
        start, stop = self.counted
        return values[start - self.low : stop - self.low]
