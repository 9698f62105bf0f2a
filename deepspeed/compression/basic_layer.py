"""Modules that compute with fake-quantized weights and inputs (quantization-aware training).

The class of a module is replaced by a subclass; the object, its parameters, hooks and ties do not change. During
forward, the attribute `weight` is the quantized weight instead of the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.compression.utils import quantize, straight_through


class Compressed:
    """Mixin that adds fake quantizers of weight and input to a module; `FakeQuantizers` enables them by schedule."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the forward of the original class with the quantized weight and first input."""
        module: Any = self
        input_quantizer: QuantAct | None = module.__dict__.get("_activation")
        if input_quantizer is not None and inputs and isinstance(inputs[0], torch.Tensor):
            inputs = (input_quantizer(inputs[0], module.training), *inputs[1:])
        weight_quantizer: WeightQuantizer | None = module.__dict__.get("_weight_quantizer")
        if weight_quantizer is None or not weight_quantizer.bits:
            return super().forward(*inputs, **kwargs)  # type: ignore[misc]
        module.__dict__["weight"] = weight_quantizer(module._parameters["weight"])
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[misc]
        finally:
            del module.__dict__["weight"]


class LinearLayer_Compress(Compressed, nn.Linear):  # noqa: N801
    """`nn.Linear` with fake quantizers of weight and input."""


class Conv2dLayer_Compress(Compressed, nn.Conv2d):  # noqa: N801
    """`nn.Conv2d` with fake quantizers of weight and input."""


class Embedding_Compress(Compressed, nn.Embedding):  # noqa: N801
    """`nn.Embedding` with a fake quantizer of its weight."""


class BNLayer_Compress(Compressed, nn.BatchNorm2d):  # noqa: N801
    """`nn.BatchNorm2d` as a compressible class; its tensors are not quantized."""


_CLASSES = (LinearLayer_Compress, Conv2dLayer_Compress, Embedding_Compress, BNLayer_Compress)
_compressed_classes: dict[type, type] = {}  # compressed class by original class


def compress_module(module: nn.Module) -> nn.Module:
    """Replace a module's class in place by a subclass that supports fake quantizers. Returns the module."""
    own: Any = type(module)
    if isinstance(module, Compressed):
        return module
    if own not in _compressed_classes:
        plain = next((c for c in _CLASSES if c.__mro__[2] is own), None)
        base = next((c for c in _CLASSES if issubclass(own, c.__mro__[2])), Compressed)
        # Keeps the name: users look modules up by class name.
        compressed = plain or type(own.__name__, (base, own), {"__module__": own.__module__, "_plain": own})
        _compressed_classes[own] = compressed
    module.__class__ = _compressed_classes[own]
    return module


def plain_module(module: nn.Module) -> nn.Module:
    """Restore the class that a module had before `compress_module`, and remove its quantizers. Returns the module."""
    if isinstance(module, Compressed):
        module.__dict__.pop("_activation", None)
        module.__dict__.pop("_weight_quantizer", None)
        module.__class__ = next(plain for plain, own in _compressed_classes.items() if own is type(module))
    return module


class WeightQuantizer:
    """Fake quantizer of one weight, with a straight-through gradient.

    Attributes `bits` (0: off) and `dense_share` (fraction of the full-precision weight in the result) are set by the
    schedule.

    Args:
        kind: `symmetric` or `asymmetric`.
        groups: number of equal parts of the flattened weight; each has its own scale.
        stochastic: whether rounding is stochastic.
    """

    def __init__(self, kind: str, groups: int, stochastic: bool) -> None:
        self.kind, self.groups, self.stochastic = kind, groups, stochastic
        self.bits = 0  # 0: not active yet
        self.dense_share = 0.0  # fraction of the full weight that is mixed in

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            dense = weight.detach()
            quantized = quantize(dense, self.bits, self.kind, self.groups, self.stochastic)
            if self.dense_share > 0.0:
                quantized = dense * self.dense_share + quantized * (1.0 - self.dense_share)
        return straight_through(weight, quantized)


class QuantAct:
    """Fake quantizer of a module's inputs, with a straight-through gradient; `on` enables it.

    Args:
        bits: number of bits.
        kind: `symmetric` or `asymmetric`.
        running: True: one range, a running average with momentum 0.95 in the buffer `x_min_max` of the module; False: a
            range for each token, or for each sample of a convolution.
        owner: the module.
    """

    def __init__(self, bits: int, kind: str, running: bool, owner: nn.Module) -> None:
        self.bits, self.kind, self.running, self.owner = bits, kind, running, owner
        self.on = False
        if running and "x_min_max" not in owner._buffers:
            owner.register_buffer("x_min_max", torch.zeros(2))

    def __call__(self, values: torch.Tensor, training: bool) -> torch.Tensor:
        if not self.on or not values.is_floating_point():
            return values
        with torch.no_grad():
            dense = values.detach()
            if self.running:
                quantized = self._by_running_range(dense, training)
            else:  # a range per token of a Linear, per sample of a convolution
                per_sample = isinstance(self.owner, nn.modules.conv._ConvNd)
                groups = dense.shape[0] if per_sample else dense.numel() // dense.shape[-1]
                quantized = quantize(dense, self.bits, self.kind, max(groups, 1))
            if quantized.stride() != dense.stride():  # products of 16 bits round by memory layout
                quantized = torch.empty_like(dense).copy_(quantized)
        return straight_through(values, quantized)

    def _by_running_range(self, values: torch.Tensor, training: bool) -> torch.Tensor:
        running: torch.Tensor = self.owner.x_min_max  # type: ignore[assignment]
        if training:
            now = torch.stack([values.min(), values.max()]).to(running)
            running.copy_(now if not running.any() else running * 0.95 + now * 0.05)
        low, high = running.tolist()
        wide = values.float()
        if self.kind == "symmetric":
            scale = max(2 * max(abs(low), abs(high)) / 2**self.bits, 1e-30)
            levels = torch.round(wide / scale).clamp(-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)
            return (levels * scale).to(values.dtype)
        scale = max((high - low) / 2**self.bits, 1e-30)
        zero = scale * round(low / scale)
        return (zero + torch.round((wide - zero) / scale).clamp(0, 2**self.bits - 1) * scale).to(values.dtype)
