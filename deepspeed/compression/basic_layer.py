"""Modules that see quantized weights and inputs: the module stays the object it was, with another class.

Parameters, hooks, ties and subclasses are kept: the class of a module becomes a subclass of the one it had, and a
quantized weight shadows the parameter for the length of a forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.compression.utils import quantize, straight_through


class Compressed:
    """What the classes of this file add to a module: quantizers, switched on by a schedule."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward, on quantized weight and input."""
        mine: Any = self
        watch: QuantAct | None = mine.__dict__.get("_activation")
        if watch is not None and inputs and isinstance(inputs[0], torch.Tensor):
            inputs = (watch(inputs[0], mine.training), *inputs[1:])
        weigh: WeightQuantizer | None = mine.__dict__.get("_weigh")
        if weigh is None or not weigh.bits:
            return super().forward(*inputs, **kwargs)  # type: ignore[misc]
        mine.__dict__["weight"] = weigh(mine._parameters["weight"])
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[misc]
        finally:
            del mine.__dict__["weight"]


class LinearLayer_Compress(Compressed, nn.Linear):  # noqa: N801
    """`nn.Linear`."""


class Conv2dLayer_Compress(Compressed, nn.Conv2d):  # noqa: N801
    """`nn.Conv2d`."""


class Embedding_Compress(Compressed, nn.Embedding):  # noqa: N801
    """`nn.Embedding`."""


class BNLayer_Compress(Compressed, nn.BatchNorm2d):  # noqa: N801
    """`nn.BatchNorm2d`; nothing of it is quantized."""


_CLASSES = (LinearLayer_Compress, Conv2dLayer_Compress, Embedding_Compress, BNLayer_Compress)
_made: dict[type, type] = {}


def compress_module(module: nn.Module) -> nn.Module:
    """Give a module the class that knows quantizers; itself."""
    own: Any = type(module)
    if isinstance(module, Compressed):
        return module
    if own not in _made:
        plain = next((c for c in _CLASSES if c.__mro__[2] is own), None)
        base = next((c for c in _CLASSES if issubclass(own, c.__mro__[2])), Compressed)
        # Named as before: clients look modules up by the names of their classes.
        _made[own] = plain or type(own.__name__, (base, own), {"__module__": own.__module__, "_plain": own})
    module.__class__ = _made[own]
    return module


def plain_module(module: nn.Module) -> nn.Module:
    """Undo `compress_module`; itself."""
    if isinstance(module, Compressed):
        module.__dict__.pop("_activation", None)
        module.__dict__.pop("_weigh", None)
        module.__class__ = next(plain for plain, made in _made.items() if made is type(module))
    return module


class WeightQuantizer:
    """Fake quantization of one weight.

    Args:
        kind: `symmetric` or `asymmetric`.
        groups: of the flattened weight.
        stochastic: rounding.
    """

    def __init__(self, kind: str, groups: int, stochastic: bool) -> None:
        self.kind, self.groups, self.stochastic = kind, groups, stochastic
        self.bits = 0  # 0: not yet
        self.full = 0.0  # share of the full weight that is mixed in

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """What forward sees."""
        with torch.no_grad():
            dense = weight.detach()
            seen = quantize(dense, self.bits, self.kind, self.groups, self.stochastic)
            if self.full > 0.0:
                seen = dense * self.full + seen * (1.0 - self.full)
        return straight_through(weight, seen)


class QuantAct:
    """Fake quantization of inputs: a range per token, or a running one.

    Args:
        bits: levels.
        kind: `symmetric` or `asymmetric`.
        running: keep a range with momentum 0.95, as a buffer of the module.
        owner: the module.
    """

    def __init__(self, bits: int, kind: str, running: bool, owner: nn.Module) -> None:
        self.bits, self.kind, self.running, self.owner = bits, kind, running, owner
        self.on = False
        if running and "x_min_max" not in owner._buffers:
            owner.register_buffer("x_min_max", torch.zeros(2))

    def __call__(self, values: torch.Tensor, training: bool) -> torch.Tensor:
        """What the module sees."""
        if not self.on or not values.is_floating_point():
            return values
        with torch.no_grad():
            dense = values.detach()
            seen = self._by_range(dense, training) if self.running else self._by_row(dense)
            if seen.stride() != dense.stride():  # in the layout it came in: products of 16 bits round by layout
                seen = torch.empty_like(dense).copy_(seen)
        return straight_through(values, seen)

    def _by_row(self, values: torch.Tensor) -> torch.Tensor:
        """Groups: one per token of a Linear, one per sample of a convolution."""
        rows = (
            values.shape[0] if isinstance(self.owner, nn.modules.conv._ConvNd) else values.numel() // values.shape[-1]
        )
        return quantize(values, self.bits, self.kind, max(rows, 1))

    def _by_range(self, values: torch.Tensor, training: bool) -> torch.Tensor:
        kept: torch.Tensor = self.owner.x_min_max  # type: ignore[assignment]
        if training:
            now = torch.stack([values.min(), values.max()]).to(kept)
            kept.copy_(now if not kept.any() else kept * 0.95 + now * 0.05)
        low, high = kept.tolist()
        wide = values.float()
        if self.kind == "symmetric":
            scale = max(2 * max(abs(low), abs(high)) / 2**self.bits, 1e-30)
            levels = torch.round(wide / scale).clamp(-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)
            return (levels * scale).to(values.dtype)
        scale = max((high - low) / 2**self.bits, 1e-30)
        zero = scale * round(low / scale)
        return (zero + torch.round((wide - zero) / scale).clamp(0, 2**self.bits - 1) * scale).to(values.dtype)
