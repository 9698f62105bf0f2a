"""What the blocks of a model cost, with all that runs before the first and after the last, and how they are dealt.

An output projection over a large vocabulary costs as much as a block or two, so stages of equally many blocks, or of
equally many parameters, do not take equally long. Operations are counted in one forward on a small input, which gives
every rank the same numbers; seconds are measured on this machine.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.foundation.partition import partition_balanced
from deepspeed.foundation.simulation import simulating
from deepspeed.foundation.tree import tensors_in
from deepspeed.ops.dispatch import DispatchMode
from deepspeed.ops.flop_formulas import formulas
from deepspeed.tensor_parallel.inputs import quiet

_NEAR = 4  # an item goes over to parts this far away at most, so that the search stays linear in the number of parts


class _Crossings:
    """A forward of the model with a reading at each border: before the first block, between blocks, after the last.

    Args:
        read: gives what has passed so far, in any unit.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], inputs: dict[str, Any], read: Callable[[], float]
    ):
        self._read, self.crossed = read, list[torch.Tensor | None]()
        handles = [block.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True) for block in blocks]
        handles.append(blocks[-1].register_forward_hook(lambda _m, _a, made: self._enter(_m, (made,), {})))
        self._marks = [read()]
        try:
            self.made = model(**inputs)
        finally:
            for handle in handles:
                handle.remove()
        self._marks.append(read())

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._marks.append(self._read())
        self.crossed.append(next((t for t in tensors_in((args, kwargs)) if t.requires_grad), None))

    def forward(self) -> list[float]:
        """What passed before the blocks, in each of them, and after them."""
        return [high - low for low, high in itertools.pairwise(self._marks)]

    def backward(self, params: list[nn.Parameter]) -> list[float]:
        """The same of the backward that follows, which leaves no gradients behind."""
        marks: list[float | None] = [None] * len(self.crossed)

        def note(at: int) -> Callable[[torch.Tensor], None]:
            return lambda _gradient: marks.__setitem__(at, self._read())

        for at, tensor in enumerate(self.crossed):
            if tensor is not None:
                tensor.register_hook(note(at))
        loss = getattr(self.made, "loss", None)
        if loss is None:
            loss = torch.stack([t.float().sum() for t in tensors_in(self.made) if t.requires_grad]).sum()
        begun = self._read()
        torch.autograd.grad(loss, params, allow_unused=True)
        end = self._read()
        borders = [end, *(end if mark is None else mark for mark in marks), begun]  # what no gradient reached is last
        return [late - early for late, early in itertools.pairwise(borders)]


class _Counter(DispatchMode):
    """Adds up the operations of what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self._formulas = 0, formulas()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def operations(model: nn.Module, blocks: Sequence[nn.Module], inputs: dict[str, Any]) -> list[float]:
    """Floating-point operations of one forward.

    Args:
        model: whole.
        blocks: in the order in which they run.
        inputs: arguments of the model's forward.

    Returns:
        Of what runs before the blocks, of each block, of what runs after them.
    """
    with _Counter() as counter, quiet(model):
        return _Crossings(model, blocks, inputs, lambda: counter.total).forward()


def seconds(model: nn.Module, blocks: Sequence[nn.Module], inputs: dict[str, Any], repeats: int = 3) -> list[float]:
    """Time of a forward and its backward: the least of some, after one that is not counted.

    Args:
        model: whole.
        blocks: in the order in which they run.
        inputs: arguments of the model's forward; where it takes labels, some are made up.
        repeats: runs that are timed.

    Returns:
        As `operations`.
    """
    given = dict(inputs)
    if "labels" in inspect.signature(model.forward).parameters and "input_ids" in given:
        given["labels"] = given["input_ids"]
    params = [param for param in model.parameters() if param.requires_grad]
    rows: list[list[float]] = []
    with quiet(model), torch.set_grad_enabled(bool(params)):
        for _ in range(repeats + 1):
            run = _Crossings(model, blocks, given, _now)
            forward = run.forward()
            rows.append([sum(both) for both in zip(forward, run.backward(params), strict=True)] if params else forward)
    return [min(column) for column in zip(*rows[1:], strict=True)]


@contextmanager
def clock() -> Iterator[Callable[[], float]]:
    """Inside, what it gives reads seconds; of a run without values, operations."""
    if not simulating():
        yield _now
        return
    with _Counter() as counter:
        yield lambda: float(counter.total)


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()


def deal(costs: Sequence[float], stages: int, chunks: int) -> list[int]:
    """Deal blocks to parts so that the slowest stage is as fast as can be; part p belongs to stage p % stages.

    Args:
        costs: as `operations` gives them.
        stages: how many.
        chunks: parts of each stage.

    Returns:
        Bounds, as `partition_balanced` gives them; every part has a block.
    """
    parts, weights = stages * chunks, _of_blocks(costs)
    sums = [0.0, *itertools.accumulate(weights)]

    def price(bounds: Sequence[int]) -> tuple[float, float]:
        own = [sums[high] - sums[low] for low, high in itertools.pairwise(bounds)]
        slowest = max(sum(own[stage::stages]) for stage in range(stages))
        return round(slowest / sums[-1], 9), round(sum((one / sums[-1]) ** 2 for one in own), 9)

    return improve(partition_balanced(weights, parts), price)


def improve(best: list[int], price: Callable[[Sequence[int]], tuple[float, ...]]) -> list[int]:
    """Move single items between parts as long as that lowers a price.

    Args:
        best: bounds to begin with.
        price: of bounds; lower is better.
    """
    parts = len(best) - 1
    moves = [(a, b) for a in range(parts) for b in range(max(0, a - _NEAR), min(parts, a + _NEAR + 1)) if a != b]
    better = True
    while better:
        better = False
        for source, target in moves:
            tried = _moved(best, source, target)
            if tried is not None and price(tried) < price(best):
                best, better = tried, True
    return best


def costs_of_parts(costs: Sequence[float], bounds: Sequence[int]) -> list[float]:
    """What each part costs, as multiples of their mean; all alike where nothing is known.

    Args:
        costs: as `operations` gives them.
        bounds: as `deal` gives them.
    """
    weights = _of_blocks(costs)
    own = [sum(weights[low:high]) for low, high in itertools.pairwise(bounds)]
    return [one * len(own) / sum(own) for one in own] if sum(own) else [1.0] * len(own)


def _of_blocks(costs: Sequence[float]) -> list[float]:
    """What runs around the blocks runs with the first and the last of them."""
    weights = list(costs[1:-1])
    weights[0] += costs[0]
    weights[-1] += costs[-1]
    return weights


def _moved(bounds: list[int], source: int, target: int) -> list[int] | None:
    """One block less for a part and one more for another, all between them shifted; None: it has no more than one."""
    if bounds[source + 1] - bounds[source] < 2:
        return None
    step, low, high = (-1, source, target) if source < target else (1, target, source)
    return [bound + step if low < at <= high else bound for at, bound in enumerate(bounds)]
