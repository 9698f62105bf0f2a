"""Costs of a model's layers, estimated or measured, and the partition of layers over stages by cost.

An output projection over a large vocabulary costs as much as one or two blocks, so stages with equal numbers of blocks
or parameters do not take equal times. The estimate counts operations in one forward on a small input, which gives every
rank the same numbers. A measurement takes the seconds on this machine.
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

_NEAR = 4  # maximum distance of a move, so that the search is linear in the number of parts


class _Crossings:
    """One forward of a model, with readings of a counter (operations or seconds) at the borders of all blocks."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], inputs: dict[str, Any], read: Callable[[], float]
    ):
        self._read, self.crossed = read, list[torch.Tensor | None]()
        handles = [block.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True) for block in blocks]
        handles.append(blocks[-1].register_forward_hook(lambda _m, _a, output: self._enter(_m, (output,), {})))
        self._marks = [read()]
        try:
            self.outputs = model(**inputs)
        finally:
            for handle in handles:
                handle.remove()
        self._marks.append(read())

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._marks.append(self._read())
        self.crossed.append(next((t for t in tensors_in((args, kwargs)) if t.requires_grad), None))

    def forward(self) -> list[float]:
        """Return the increase of the counter before the blocks, in each block, and after the blocks."""
        return [high - low for low, high in itertools.pairwise(self._marks)]

    def backward(self, params: list[nn.Parameter]) -> list[float]:
        """Run backward, without storing gradients, and return the increases in the order of `forward`."""
        marks: list[float | None] = [None] * len(self.crossed)

        def note(index: int) -> Callable[[torch.Tensor], None]:
            return lambda _gradient: marks.__setitem__(index, self._read())

        for index, tensor in enumerate(self.crossed):
            if tensor is not None:
                tensor.register_hook(note(index))
        loss = getattr(self.outputs, "loss", None)
        if loss is None:
            loss = torch.stack([t.float().sum() for t in tensors_in(self.outputs) if t.requires_grad]).sum()
        begun = self._read()
        torch.autograd.grad(loss, params, allow_unused=True)
        end = self._read()
        borders = [end, *(end if mark is None else mark for mark in marks), begun]  # blocks without gradient come last
        return [late - early for late, early in itertools.pairwise(borders)]


class _Counter(DispatchMode):
    """Dispatch mode that counts floating-point operations."""

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
    """Count the floating-point operations of one forward on `inputs`: before, in each of, and after the blocks."""
    with _Counter() as counter, evaluating(model, use_cache=False):
        return _Crossings(model, blocks, inputs, lambda: counter.total).forward()


def seconds(model: nn.Module, blocks: Sequence[nn.Module], inputs: dict[str, Any], repeats: int = 3) -> list[float]:
    """Measure seconds of forward and backward, split as in `operations`: the minimum of `repeats` runs each.

    Without trained parameters, only forward is measured. If forward takes labels, they are the input tokens.
    """
    arguments = dict(inputs)
    if "labels" in inspect.signature(model.forward).parameters and "input_ids" in arguments:
        arguments["labels"] = arguments["input_ids"]
    params = [param for param in model.parameters() if param.requires_grad]
    rows: list[list[float]] = []
    with evaluating(model, use_cache=False), torch.set_grad_enabled(bool(params)):
        for _ in range(repeats + 1):
            run = _Crossings(model, blocks, arguments, _now)
            forward = run.forward()
            rows.append([sum(both) for both in zip(forward, run.backward(params), strict=True)] if params else forward)
    return [min(column) for column in zip(*rows[1:], strict=True)]


@contextmanager
def seconds_clock() -> Iterator[Callable[[], float]]:
    """Context that yields a clock in seconds, which synchronizes the device first."""
    yield _now


@contextmanager
def operations_clock() -> Iterator[Callable[[], float]]:
    """Context that yields a counter of the floating-point operations inside the context."""
    with _Counter() as counter:
        yield lambda: float(counter.total)


clocks: Replaceable[Callable[[], AbstractContextManager[Callable[[], float]]]] = Replaceable(seconds_clock)


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()


def deal(costs: Sequence[float], stages: int, chunks: int) -> list[int]:
    """Partition blocks so that the slowest stage is fast, by local search from balanced parts.

    Args:
        costs: costs before the blocks, of each block, and after the blocks, as from `operations`.
        stages: number of stages.
        chunks: parts per stage. Part p belongs to stage p % stages.

    Returns:
        Bounds: part p has the blocks from bounds[p] up to bounds[p + 1], at least one.
    """
    parts, weights = stages * chunks, _of_blocks(costs)
    sums = [0.0, *itertools.accumulate(weights)]

    def price(bounds: Sequence[int]) -> tuple[float, float]:
        own = [sums[high] - sums[low] for low, high in itertools.pairwise(bounds)]
        slowest = max(sum(own[stage::stages]) for stage in range(stages))
        return round(slowest / sums[-1], 9), round(sum((cost / sums[-1]) ** 2 for cost in own), 9)

    return improve(partition_balanced(weights, parts), price)


def improve(best: list[int], price: Callable[[Sequence[int]], tuple[float, ...]]) -> list[int]:
    """Move single items between parts, starting from the bounds `best`, while `price` decreases; return bounds."""
    parts = len(best) - 1
    moves = [(a, b) for a in range(parts) for b in range(max(0, a - _NEAR), min(parts, a + _NEAR + 1)) if a != b]
    better = True
    while better:
        better = False
        for source, target in moves:
            if best[source + 1] - best[source] < 2:
                continue  # a part keeps at least one item
            step, low, high = (-1, source, target) if source < target else (1, target, source)
            moved = [bound + step if low < index <= high else bound for index, bound in enumerate(best)]
            if price(moved) < price(best):
                best, better = moved, True
    return best


def costs_of_parts(costs: Sequence[float], bounds: Sequence[int]) -> list[float]:
    """Return the costs of the parts with these bounds, relative to their mean; 1 if all `costs` (see `deal`) are 0."""
    weights = _of_blocks(costs)
    own = [sum(weights[low:high]) for low, high in itertools.pairwise(bounds)]
    return [cost * len(own) / sum(own) for cost in own] if sum(own) else [1.0] * len(own)


def _of_blocks(costs: Sequence[float]) -> list[float]:
    """Return the costs of the blocks; those before and after the blocks are added to the first and the last."""
    weights = list(costs[1:-1])
    weights[0] += costs[0]
    weights[-1] += costs[-1]
    return weights


_STATE = 4  # elements per trained element: weight, gradient and two moments of an optimizer
_ALIKE = 0.02  # relative to an even share: smaller differences of time count as equal, and memory decides

Layer = tuple[Callable[[Any], Any], nn.Module | None]


@dataclass(frozen=True)
class LayerCost:
    """Time and memory of one layer.

    Args:
        seconds: time of forward and backward of a micro-batch.
        state: bytes of parameters, gradients and two moments of an optimizer.
        activation: bytes of the activations of one micro-batch that are saved for backward.
    """

    seconds: float
    state: int
    activation: int


def measure(layers: Iterable[Layer], inputs: Any, repeats: int = 3) -> list[LayerCost]:
    """Measure forward and backward of layers, one after the other. Modules are moved to the current device.

    Args:
        layers: (function to call, module or None) for each layer.
        inputs: inputs of the first layer, any nest of tensors; each next layer reads the outputs of the one before.
        repeats: number of runs after a warm-up; the time of a layer is their minimum.

    Raises:
        ArgumentError: a layer cannot run; the message says which.
    """
    device, costs = torch.device(get_accelerator().current_device_name()), list[LayerCost]()
    activations = map_tensors(lambda tensor: tensor.detach().to(device), inputs)
    for call, module in layers:
        index = len(costs)
        if module is not None:
            module.to(device)
        params = [] if module is None else list(module.parameters())
        times, saved = list[float](), 0
        try:
            with clocks.current() as now:
                for _ in range(repeats + 1):
                    begun = now()
                    outputs, saved = _run(call, activations, [param for param in params if param.requires_grad])
                    times.append(now() - begun)
        except Exception as error:
            raise ArgumentError(
                f'partition_method "profile": layer {index} cannot take what the one before gives of example_input: '
                f"{type(error).__name__}: {error}"
            ) from error
        state = sum(p.numel() * p.element_size() * (_STATE if p.requires_grad else 1) for p in params)
        costs.append(LayerCost(min(times[1:]), state, saved))
        activations = map_tensors(torch.Tensor.detach, outputs)
        del call, module, params, outputs  # free the layer before the next one is built; `enumerate` would hold it
    return costs


def _run(call: Callable[[Any], Any], activations: Any, params: list[nn.Parameter]) -> tuple[Any, int]:
    """Run one forward and backward; return the output, and the bytes of activations saved for backward."""
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    entered = map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point()), activations)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = call(entered)
    sums = [tensor.float().sum() for tensor in tensors_in(outputs) if tensor.requires_grad]
    wanted = [*params, *(tensor for tensor in tensors_in(entered) if tensor.requires_grad)]
    if sums and wanted:
        torch.autograd.grad(torch.stack(sums).sum(), wanted, allow_unused=True)
    return outputs, sum(saved.values())


def agreed(measured: Callable[[], list[LayerCost]], limit: float | None = None) -> tuple[list[LayerCost], float | None]:
    """Combine the layer costs of all ranks: median time, maximum bytes. All ranks must call this.

    Args:
        measured: measures the layers on this rank.
        limit: memory limit of this rank in bytes; None: no limit.

    Returns:
        The costs, and the smallest limit of all ranks; equal on all ranks.

    Raises:
        ArgumentError: another rank could not measure; that rank raises its own error.
    """
    own_costs, error = list[LayerCost](), None
    try:
        own_costs = measured()
    except Exception as raised:  # any error of a layer; the other ranks wait for this rank's answer
        error = raised
    message = own_costs, limit, describe_error(error) if error is not None else None
    everyone: list[Any] = [message]
    if ranks_started() > 1:
        everyone = [None] * ranks_started()
        all_gather_object(everyone, message)
    if error is not None:
        raise error
    failed = [f"rank {rank}: {words}" for rank, (_, _, words) in enumerate(everyone) if words is not None]
    if failed:
        raise ArgumentError(f"layers could not be measured on {len(failed)} other rank(s); {failed[0]}")
    costs = []
    for column in zip(*(own for own, _, _ in everyone), strict=True):
        state, activation = max(c.state for c in column), max(c.activation for c in column)
        costs.append(LayerCost(statistics.median(c.seconds for c in column), state, activation))
    return costs, min((own for _, own, _ in everyone if own is not None), default=None)


def deal_layers(costs: Sequence[LayerCost], stages: int, chunks: int, limit: float | None = None) -> list[int]:
    """Partition layers by measured costs, as in `deal`; of similarly fast partitions, take that of least peak memory.

    Memory is that of the 1F1B schedule (several chunks: interleaved). `limit`: bytes per stage; None: no limit.

    Raises:
        ArgumentError: no partition was found that keeps all stages within the limit.
    """
    parts, name = stages * chunks, "interleaved" if chunks > 1 else "1f1b"
    held = [warmup(name, stage, stages, 2 * stages, chunks) + 1 for stage in range(stages)]  # micro-batches x chunks
    total = sum(cost.seconds for cost in costs) or 1.0

    def bytes_of(bounds: Sequence[int]) -> list[float]:
        own = [costs[low:high] for low, high in itertools.pairwise(bounds)]
        sizes = []
        for stage in range(stages):
            layers = [cost for part in own[stage::stages] for cost in part]
            sizes.append(sum(c.state for c in layers) + held[stage] / chunks * sum(c.activation for c in layers))
        return sizes

    def price(bounds: Sequence[int]) -> tuple[float, ...]:
        own = [sum(c.seconds for c in costs[low:high]) / total for low, high in itertools.pairwise(bounds)]
        slowest, memory = max(sum(own[stage::stages]) for stage in range(stages)), bytes_of(bounds)
        over = 0.0 if limit is None else sum(max(0.0, size - limit) for size in memory)
        return over, round(slowest * stages / _ALIKE), max(memory), round(sum(size**2 for size in own), 9)

    best = improve(partition_balanced([cost.seconds for cost in costs], parts), price)
    if limit is not None and max(bytes_of(best)) > limit:
        most = max(bytes_of(best))
        raise ArgumentError(
            f"no split of {len(costs)} layers into {stages} stages was found in which each holds at most {limit:,.0f} "
            f"bytes: the best one needs {most:,.0f} on stage {bytes_of(best).index(most)}; take more stages, or "
            f"recompute activations"
        )
    return best
