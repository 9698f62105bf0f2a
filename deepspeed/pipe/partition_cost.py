"""Estimates and measures the cost of a model's layers, and partitions them over stages.

An output projection over a large vocabulary costs as much as a block or two, so stages of equally many blocks, or of
equally many parameters, do not take equally long. Operations are counted in one forward on a small input, which gives
every rank the same numbers; seconds are measured on this machine.
"""

from __future__ import annotations

import inspect
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.torch_api import all_gather_object
from deepspeed.comm.process_groups.mesh import ranks_started
from deepspeed.errors import ArgumentError
from deepspeed.foundation.equivalence import evaluating
from deepspeed.foundation.fake_mode import Replaceable
from deepspeed.foundation.log import describe_error
from deepspeed.foundation.partition import partition_balanced
from deepspeed.foundation.pytree import map_tensors, tensors_in
from deepspeed.ops.dispatch import DispatchMode
from deepspeed.ops.flop_formulas import formulas
from deepspeed.pipe.schedule import warmup

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
    with _Counter() as counter, evaluating(model, use_cache=False):
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
    with evaluating(model, use_cache=False), torch.set_grad_enabled(bool(params)):
        for _ in range(repeats + 1):
            run = _Crossings(model, blocks, given, _now)
            forward = run.forward()
            rows.append([sum(both) for both in zip(forward, run.backward(params), strict=True)] if params else forward)
    return [min(column) for column in zip(*rows[1:], strict=True)]


@contextmanager
def seconds_clock() -> Iterator[Callable[[], float]]:
    """Inside, the function that it gives reads seconds."""
    yield _now


@contextmanager
def operations_clock() -> Iterator[Callable[[], float]]:
    """Inside, the function that it gives reads the operations so far."""
    with _Counter() as counter:
        yield lambda: float(counter.total)


clocks: Replaceable[Callable[[], AbstractContextManager[Callable[[], float]]]] = Replaceable(seconds_clock)


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


_STATE = 4  # a trained element, its gradient and two moments of an optimizer
_ALIKE = 0.02  # of an even share: stages whose times differ by less take equally long, and memory decides

Layer = tuple[Callable[[Any], Any], nn.Module | None]


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs.

    Args:
        seconds: forward and backward of a micro-batch.
        state: bytes of its parameters, gradients and an optimizer's moments.
        activation: bytes that it keeps for the backward of a micro-batch.
    """

    seconds: float
    state: int
    activation: int


def measure(layers: Iterable[Layer], inputs: Any, repeats: int = 3) -> list[LayerCost]:
    """Run layers one after the other, forward and backward; they leave no gradients behind.

    Args:
        layers: what to call, and the module whose parameters it uses.
        inputs: what the first one takes.
        repeats: runs that are timed, after one that is not; the least counts.

    Raises:
        ArgumentError: a layer cannot run; says which.
    """
    device, found = torch.device(get_accelerator().current_device_name()), list[LayerCost]()
    given = map_tensors(lambda tensor: tensor.detach().to(device), inputs)
    for call, module in layers:
        at = len(found)
        if module is not None:
            module.to(device)
        params = [] if module is None else list(module.parameters())
        times, kept = list[float](), 0
        try:
            with clocks.current() as now:
                for _ in range(repeats + 1):
                    begun = now()
                    made, kept = _run(call, given, [param for param in params if param.requires_grad])
                    times.append(now() - begun)
        except Exception as error:
            raise ArgumentError(
                f'partition_method "profile": layer {at} cannot take what the one before gives of example_input: '
                f"{type(error).__name__}: {error}"
            ) from error
        state = sum(p.numel() * p.element_size() * (_STATE if p.requires_grad else 1) for p in params)
        found.append(LayerCost(min(times[1:]), state, kept))
        given = map_tensors(torch.Tensor.detach, made)
        del call, module, params, made  # before the next one is built; `enumerate` would keep it too
    return found


def _run(call: Callable[[Any], Any], given: Any, params: list[nn.Parameter]) -> tuple[Any, int]:
    """One forward and backward; what it gave, and bytes that it kept in between."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    entered = map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point()), given)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = call(entered)
    sums = [tensor.float().sum() for tensor in tensors_in(made) if tensor.requires_grad]
    wanted = [*params, *(tensor for tensor in tensors_in(entered) if tensor.requires_grad)]
    if sums and wanted:
        torch.autograd.grad(torch.stack(sums).sum(), wanted, allow_unused=True)
    return made, sum(kept.values())


def agreed(measured: Callable[[], list[LayerCost]], limit: float | None = None) -> tuple[list[LayerCost], float | None]:
    """What all ranks take for true: the middle of the times, the most of the bytes. All ranks call together.

    Args:
        measured: measures on this rank.
        limit: bytes that this rank may hold; None: any.

    Returns:
        Costs of the layers, and the least of the limits.

    Raises:
        ArgumentError: another rank could not measure; that one raises what it met.
    """
    mine, error = list[LayerCost](), None
    try:
        mine = measured()
    except Exception as met:  # layers' own code; the others wait for this rank's answer
        error = met
    everyone: list[Any] = [(mine, limit, describe_error(error) if error is not None else None)]
    if ranks_started() > 1:
        told, everyone = everyone[0], [None] * ranks_started()
        all_gather_object(everyone, told)
    if error is not None:
        raise error
    failed = [f"rank {rank}: {words}" for rank, (_, _, words) in enumerate(everyone) if words is not None]
    if failed:
        raise ArgumentError(f"layers could not be measured on {len(failed)} other rank(s); {failed[0]}")
    costs = [
        LayerCost(statistics.median(c.seconds for c in column), *_most(column))
        for column in zip(*(one for one, _, _ in everyone), strict=True)
    ]
    return costs, min((one for _, one, _ in everyone if one is not None), default=None)


def _most(column: Sequence[LayerCost]) -> tuple[int, int]:
    return max(cost.state for cost in column), max(cost.activation for cost in column)


def deal_layers(costs: Sequence[LayerCost], stages: int, chunks: int, limit: float | None = None) -> list[int]:
    """Deal layers so that the slowest stage is as fast as can be; of cuts that take equally long, that of least memory.

    Args:
        costs: of the layers.
        stages: how many.
        chunks: parts of each stage; part p belongs to stage p % stages.
        limit: bytes that a stage may hold; None: any.

    Returns:
        Bounds, as `partition_balanced` gives them.

    Raises:
        ArgumentError: no cut was found that keeps all stages under the limit.
    """
    parts, name = stages * chunks, "interleaved" if chunks > 1 else "1f1b"
    held = [warmup(name, stage, stages, 2 * stages, chunks) + 1 for stage in range(stages)]  # micro-batches x chunks
    total = sum(cost.seconds for cost in costs) or 1.0

    def bytes_of(bounds: Sequence[int]) -> list[float]:
        own = [costs[low:high] for low, high in itertools.pairwise(bounds)]
        found = []
        for stage in range(stages):
            mine = [cost for part in own[stage::stages] for cost in part]
            found.append(sum(c.state for c in mine) + held[stage] / chunks * sum(c.activation for c in mine))
        return found

    def price(bounds: Sequence[int]) -> tuple[float, ...]:
        own = [sum(c.seconds for c in costs[low:high]) / total for low, high in itertools.pairwise(bounds)]
        slowest, memory = max(sum(own[stage::stages]) for stage in range(stages)), bytes_of(bounds)
        over = 0.0 if limit is None else sum(max(0.0, one - limit) for one in memory)
        return over, round(slowest * stages / _ALIKE), max(memory), round(sum(one**2 for one in own), 9)

    found = improve(partition_balanced([cost.seconds for cost in costs], parts), price)
    if limit is not None and max(bytes_of(found)) > limit:
        most = max(bytes_of(found))
        raise ArgumentError(
            f"no cut of {len(costs)} layers into {stages} stages was found in which each holds at most {limit:,.0f} "
            f"bytes: the best one needs {most:,.0f} on stage {bytes_of(found).index(most)}; take more stages, or "
            f"recompute activations"
        )
    return found
