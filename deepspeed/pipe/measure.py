"""What the layers of a row cost in time and memory, each built and run alone, and how they are dealt by both."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.api import all_gather_object
from deepspeed.comm.mesh import ranks_started
from deepspeed.errors import ArgumentError
from deepspeed.foundation.log import in_words
from deepspeed.foundation.partition import partition_balanced
from deepspeed.foundation.tree import map_tensors, tensors_in
from deepspeed.pipe.cost import clock, improve
from deepspeed.pipe.schedule import warmup

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
            with clock() as now:
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
    everyone: list[Any] = [(mine, limit, in_words(error) if error is not None else None)]
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
