"""View of this rank's elements of a pruned parameter, and collectives for scores and masks."""

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
    """Collectives over the ranks of an axis; `label` describes a message in errors.

    Args:
        axis: ranks over which parameters and optimizer state are sharded.
        device: device of the messages, if the backend of the axis does not send from the CPU.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        self._channel, self._rounds = axis.channel(), 0

    def rows(self, row: torch.Tensor, label: str) -> torch.Tensor:
        """All-gather 1-D rows of the same length n: [ranks, n] on the CPU."""
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
        """All-reduce a 1-D row by sum, in rank order: [n] on the CPU."""
        return self.rows(row, label).sum(0)

    def max(self, number: float, label: str) -> float:
        """All-reduce a number by maximum."""
        return float(self.rows(torch.tensor([number], dtype=torch.float64), label).max())

    def whole(self, part: torch.Tensor, cuts: Sequence[int], label: str) -> torch.Tensor:
        """All-gather 1-D parts of different lengths; rank r has the elements from `cuts[r]` to `cuts[r + 1]`."""
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
        name: name in the model; the first name of a tied parameter.
        param: the parameter, plain or sharded.
        axis: ranks over which parameters and optimizer state are sharded.
        optimizer: optimizer with the parameter's moments and gradients; None without training.
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
        """Range [start, stop) of elements that this rank contributes to sums over ranks; the ranges are disjoint."""
        return self.cuts[self.axis.rank], self.cuts[self.axis.rank + 1]

    @property
    def trained(self) -> bool:
        """Whether the optimizer updates the parameter."""
        return self.member is not None and self.optimizer is not None and self.member.uid in self.optimizer.fragments

    @property
    def learning_rate(self) -> float:
        """Current learning rate of the parameter; 1 if it is not trained."""
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
        """Context with the 1-D values of [low, high), of the master weight if there is one.

        Args:
            changed: whether the caller will write to them.
        """
        if self.member is None:
            yield self.param.data.view(-1)
            return
        with self.member.group.updated.borrowed(changed) as lent:
            yield lent[self.span]

    @property
    def bucket(self) -> Bucket | None:
        """Gradient bucket of the parameter's group; None if the parameter is not trained."""
        if self.optimizer is None or self.member is None or not self.trained:
            return None
        return self.optimizer.reducer.bucket_of(self.member.group)

    @contextlib.contextmanager
    def gradient(self, changed: bool = False) -> Iterator[torch.Tensor | None]:
        """Context with the accumulated gradient of [low, high), or None if no rank has a gradient.

        Args:
            changed: whether the caller will write to it.
        """
        bucket = self.bucket
        if bucket is None or self.optimizer is None or self.member is None or not bucket.filled:
            yield None
        elif not self.optimizer.reducer.touched(bucket, self.member):
            yield None
        else:
            with bucket.total.borrowed(changed) as total:
                yield total[self.span]

    def moments(self) -> Iterator[torch.Tensor]:
        """Yield the optimizer's 1-D state tensors of [low, high); valid only inside the shard's context `at_hand`."""
        if self.optimizer is None or self.member is None:
            return
        for fragment in self.optimizer.fragments.get(self.member.uid, []):
            for value in self.optimizer.optimizer.state.get(fragment.leaf, {}).values():
                if isinstance(value, torch.Tensor) and value.dim() and value.numel() == fragment.range.numel:
                    yield value.view(-1)

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elements of `values`, a 1-D tensor over [low, high), in the range `counted`."""
        start, stop = self.counted
        return values[start - self.low : stop - self.low]
