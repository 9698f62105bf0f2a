"""Counts how often each expert is chosen, in the training forwards of a window.

Hooks see what routers have chosen: the arguments of a module of experts, or what the gate of a `MoE` layer returns.
Forwards of evaluation do not count, and neither do those that activation checkpointing runs again in backward. The
counts of all ranks are added once in a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives.autograd import summed
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.moe.calls import read_any, values_of
from deepspeed.moe.expert_parallel import DividedExperts
from deepspeed.moe.sharded_moe import TopKGate
from deepspeed.moe.structure import ExpertStructure, find_experts
from deepspeed.zero.parameters.module_hooks import Hook

_core: Any = torch._C
_GATE = ".deepspeed_moe.gate"


class TrainingForward:
    """Tells which forwards train, and what attention mask they have.

    Args:
        model: whose forward has the mask; stages of a pipeline are run in parts, and have none.

    Attributes:
        mask: (B, T) of the forward that runs; None: it has none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mask: torch.Tensor | None = None
        self._runs = False
        self._handles = [
            model.register_forward_pre_hook(Hook(self._enter), with_kwargs=True),
            model.register_forward_hook(Hook(self._leave), always_call=True),
        ]

    def _enter(self, model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self._runs = model.training and torch.is_grad_enabled()
        mask = kwargs.get("attention_mask")
        self.mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None

    def _leave(self, *_: Any) -> None:
        self._runs, self.mask = False, None

    def trains(self, module: nn.Module) -> bool:
        """Whether a forward of a part of the model trains; it may be a recomputation."""
        return module.training and (self._runs or torch.is_grad_enabled())

    @staticmethod
    def recomputes() -> bool:
        """Whether a forward that runs now is run again, in backward."""
        return bool(_core._current_graph_task_id() != -1)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True)
class LayerLoad:
    """What a layer's experts had to do in a window, over all ranks.

    Args:
        counts: tokens that chose each expert, dropped ones too.
        dropped: choices that the capacity of experts dropped.
    """

    counts: tuple[int, ...]
    dropped: int

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def max_over_mean(self) -> float:
        """The busiest expert's tokens over the mean; 1 is even, and the number of experts is the worst."""
        return max(self.counts) * len(self.counts) / self.total if self.total else 1.0

    @property
    def dropped_share(self) -> float:
        """Share of the choices that were dropped."""
        return self.dropped / self.total if self.total else 0.0

    @property
    def entropy(self) -> float:
        """Of the experts' shares, over that of even shares: from 0, one expert has all, to 1."""
        shares = [count / self.total for count in self.counts if count]
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.counts)) if shares else 1.0


@dataclass(eq=False)
class _LayerCounts:
    """The counts of one layer on this rank.

    Args:
        name: of the module, for reports.
        experts: E.
        row: (2E + 1,) int64: choices of each expert; the same without padding; dropped choices.
    """

    name: str
    experts: int
    row: torch.Tensor | None = None

    def add(self, chosen: torch.Tensor, unpadded: torch.Tensor, dropped: torch.Tensor | None = None) -> None:
        """Count (E,) choices of each expert, those by tokens that are no padding, and a number of dropped ones."""
        if dropped is None:
            dropped = chosen.new_zeros(())
        row = torch.cat([chosen, unpadded, dropped.view(1)])
        self.row = row if self.row is None else self.row + row


def count_choices(index: torch.Tensor, experts: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """(E,) int64: how often each expert is among the choices (T, k); indices that are no experts are left out.

    Args:
        mask: of T elements, 0 where a token does not count.
    """
    flat = index.reshape(-1).long()
    place = torch.where((flat >= 0) & (flat < experts), flat, experts)
    counted = torch.ones_like(place)
    if mask is not None:
        counted = (mask.reshape(-1, 1) != 0).expand(index.shape).reshape(-1).to(place)
    return torch.zeros(experts + 1, dtype=torch.int64, device=index.device).scatter_add_(0, place, counted)[:experts]


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Modules that say which experts are chosen: name of the layer, module, number of experts on all ranks."""
    whole = {module: structure.count for _, module, structure in find_experts(model)}
    for name, module in model.named_modules():
        if isinstance(module, DividedExperts):
            yield name, module, module.location.count
        elif isinstance(module, TopKGate):
            yield name.removesuffix(_GATE), module, module.wg.out_features
        elif module in whole:
            yield name, module, whole[module]


class ExpertLoad:
    """The load of a model's layers of experts.

    Args:
        layers: of `layers_of`, which are watched until `remove`.
        axis: ranks whose tokens count together.
        forward: of the model.

    Attributes:
        names: of the layers.
    """

    def __init__(self, layers: Iterable[tuple[str, nn.Module, int]], axis: Axis, forward: TrainingForward) -> None:
        self._axis, self._forward = axis, forward
        self._layers: list[_LayerCounts] = []
        self._handles: list[Any] = []
        self._sums: list[torch.Tensor] = []  # of the last window, by layer
        self._read: dict[str, LayerLoad] | None = None
        for name, module, experts in layers:
            counts = _LayerCounts(name, experts)
            self._layers.append(counts)
            if isinstance(module, TopKGate):
                self._handles.append(module.register_forward_hook(Hook(self._after_gate(counts))))
            else:
                divided = isinstance(module, DividedExperts)
                structure = module.structure if divided else next(find_experts(module))[2]
                hook = Hook(self._before_experts(counts, structure))
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        self.names = [layer.name for layer in self._layers]

    def _counted(self, module: nn.Module) -> bool:
        return self._forward.trains(module) and not self._forward.recomputes()

    def _before_experts(self, counts: _LayerCounts, structure: ExpertStructure) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._counted(module):
                values = values_of(type(module), module, args, kwargs)
                index = read_any(structure.forms, values, counts.experts, counts.name).index.detach()
                chosen, mask = count_choices(index, counts.experts), self._forward.mask
                padded = mask is not None and mask.numel() == index.shape[0]
                counts.add(chosen, count_choices(index, counts.experts, mask) if padded else chosen)

        return hook

    def _after_gate(self, counts: _LayerCounts) -> Any:
        def hook(gate: nn.Module, _args: Any, routes: Any) -> None:
            if self._counted(gate) and len(routes) == 7:  # choices, as `MOELayer` asks for
                index, chosen = routes[3], routes[6].detach()
                counts.add(chosen, chosen, chosen.sum() - (index >= 0).sum())

        return hook

    def end_window(self) -> None:
        """Add up the counts of all ranks, which call together, and begin anew."""
        if not self._layers:
            return
        device = next((layer.row.device for layer in self._layers if layer.row is not None), torch.device("cpu"))
        rows = [
            torch.zeros(2 * layer.experts + 1, dtype=torch.int64, device=device) if layer.row is None else layer.row
            for layer in self._layers
        ]
        total = summed(torch.cat(rows), self._axis, "counts of experts")
        self._sums, self._read = list(total.split([row.numel() for row in rows])), None
        for layer in self._layers:
            layer.row = None

    def unpadded(self) -> dict[str, torch.Tensor]:
        """(E,) int64 of each layer: how often experts were chosen in the last window, by tokens that are no padding."""
        pairs = zip(self._layers, self._sums, strict=False)  # there are no sums before the first window
        return {layer.name: row[layer.experts : 2 * layer.experts] for layer, row in pairs}

    def last(self) -> dict[str, LayerLoad]:
        """The load of each layer in the last window; empty before."""
        if self._read is None:
            pairs = zip(self._layers, self._sums, strict=False)
            listed = [(layer, row.tolist()) for layer, row in pairs]
            self._read = {n.name: LayerLoad(tuple(row[: n.experts]), row[2 * n.experts]) for n, row in listed}
        return self._read

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
