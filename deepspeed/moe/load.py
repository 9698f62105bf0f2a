"""Load of experts: how often each expert is chosen in the training forwards of a window (one update).

Hooks read the routers' choices from the arguments of a module of experts, or from the result of a `MoE` layer's gate.
Evaluation forwards and recomputed forwards (activation checkpointing) do not count. The counts of all ranks are added
once per window.
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
from deepspeed.foundation.hf_forward import named_arguments
from deepspeed.moe.calls import read_any, values_of
from deepspeed.moe.expert_parallel import DividedExperts
from deepspeed.moe.sharded_moe import TopKGate
from deepspeed.moe.structure import ExpertStructure, find_experts
from deepspeed.zero.parameters.module_hooks import Hook

_core: Any = torch._C
_GATE = ".deepspeed_moe.gate"


class TrainingForward:
    """Hooks that record whether a forward of a model trains, and its attention mask.

    Args:
        model: the model; a pipeline stage runs its parts without calling the model, so there is no mask.

    Attributes:
        mask: attention mask (B, T) of the running forward; None: it has none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mask: torch.Tensor | None = None
        self._runs = False
        self._handles = [
            model.register_forward_pre_hook(Hook(self._enter, transparent=True), with_kwargs=True),
            model.register_forward_hook(Hook(self._leave, transparent=True), always_call=True),
        ]

    def _enter(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._runs = model.training and torch.is_grad_enabled()
        mask = named_arguments(model, args, kwargs).get("attention_mask")
        self.mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None

    def _leave(self, *_: Any) -> None:
        self._runs, self.mask = False, None

    def trains(self, module: nn.Module) -> bool:
        """Return whether the running forward of a submodule is one of training, or its recomputation."""
        return module.training and (self._runs or torch.is_grad_enabled())

    @staticmethod
    def recomputes() -> bool:
        """Return whether the running forward is a recomputation in backward (activation checkpointing)."""
        return bool(_core._current_graph_task_id() != -1)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True)
class LayerLoad:
    """Load of a layer's experts in one window, over all ranks.

    Args:
        counts: number of tokens that chose each expert, dropped choices included.
        dropped: number of choices that were dropped because an expert was full.
    """

    counts: tuple[int, ...]
    dropped: int

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def max_over_mean(self) -> float:
        """Largest count divided by the mean count: from 1 (even, or no choices) to the number of experts."""
        return max(self.counts) * len(self.counts) / self.total if self.total else 1.0

    @property
    def dropped_share(self) -> float:
        """Dropped choices as a fraction of all choices; 0 without choices."""
        return self.dropped / self.total if self.total else 0.0

    @property
    def entropy(self) -> float:
        """Entropy of the experts' shares over that of equal shares: 0 (one expert has all) to 1 (even, or none)."""
        if not self.total or len(self.counts) == 1:
            return 1.0
        shares = [count / self.total for count in self.counts if count]
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.counts))


@dataclass(eq=False)
class _LayerCounts:
    """Counts of one layer on this rank.

    Args:
        name: name of the layer in reports.
        experts: number of experts E.
        row: (2E + 1,) int64: choices of each expert, the same without padding tokens, and dropped choices. None: no
            forward yet.
    """

    name: str
    experts: int
    row: torch.Tensor | None = None

    def add(self, chosen: torch.Tensor, unpadded: torch.Tensor, dropped: torch.Tensor | None = None) -> None:
        """Add (E,) choices of each expert, (E,) those without padding tokens, and the 0-d number of dropped choices."""
        if dropped is None:
            dropped = chosen.new_zeros(())
        row = torch.cat([chosen, unpadded, dropped.view(1)])
        self.row = row if self.row is None else self.row + row


def count_choices(index: torch.Tensor, experts: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Count the choices of each expert.

    Args:
        index: (T, k) chosen experts; values outside of [0, experts) are ignored.
        experts: number of experts E.
        mask: mask with T elements, 0 for tokens that do not count; None: all count.

    Returns:
        (E,) int64 counts.
    """
    flat = index.reshape(-1).long()
    place = torch.where((flat >= 0) & (flat < experts), flat, experts)
    counted = torch.ones_like(place)
    if mask is not None:
        counted = (mask.reshape(-1, 1) != 0).expand(index.shape).reshape(-1).to(place)
    return torch.zeros(experts + 1, dtype=torch.int64, device=index.device).scatter_add_(0, place, counted)[:experts]


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield (layer name, module, experts on all ranks) of modules of experts and of gates (`TopKGate`)."""
    whole = {module: structure.count for _, module, structure in find_experts(model)}
    for name, module in model.named_modules():
        if isinstance(module, DividedExperts):
            yield name, module, module.location.count
        elif isinstance(module, TopKGate):
            yield name.removesuffix(_GATE), module, module.wg.out_features
        elif module in whole:
            yield name, module, whole[module]


class ExpertLoad:
    """Counter of the load of a model's experts; its hooks stay registered until `remove`.

    Args:
        layers: (name, module, number of experts) of each layer, as from `layers_of`.
        axis: the ranks over which tokens are counted.
        forward: hooks on the model, which show whether a forward trains.

    Attributes:
        names: names of the layers.
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
                self._handles.append(module.register_forward_hook(Hook(self._after_gate(counts), transparent=True)))
            else:
                divided = isinstance(module, DividedExperts)
                structure = module.structure if divided else next(find_experts(module))[2]
                hook = Hook(self._before_experts(counts, structure), transparent=True)
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
        """Add up the counts of all ranks, and start a new window. All ranks of the axis must call this."""
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
        """Return (E,) int64 counts of the last window without padding tokens, by layer name; empty before the first."""
        pairs = zip(self._layers, self._sums, strict=False)  # there are no sums before the first window
        return {layer.name: row[layer.experts : 2 * layer.experts] for layer, row in pairs}

    def last(self) -> dict[str, LayerLoad]:
        """Return the load in the last window, by layer name; empty before the first window has ended."""
        if self._read is None:
            pairs = zip(self._layers, self._sums, strict=False)
            listed = [(layer, row.tolist()) for layer, row in pairs]
            self._read = {n.name: LayerLoad(tuple(row[: n.experts]), row[2 * n.experts]) for n, row in listed}
        return self._read

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
