"""Fake quantization: rounding to few levels, with straight-through gradients."""

from __future__ import annotations

from typing import Any

import torch


def _rows(values: torch.Tensor, groups: int) -> torch.Tensor:
    """Reshape values to [groups, n] in fp32; ValueError if `groups` does not divide their number."""
    if values.numel() % groups:
        raise ValueError(f"{values.numel()} elements cannot be split into {groups} equal groups")
    return values.reshape(groups, -1).to(torch.float32)


def symmetric(values: torch.Tensor, bits: int, groups: int = 1, stochastic: bool = False) -> torch.Tensor:
    """Quantize to 2^bits levels around zero, with one scale per group; arguments and result as in `quantize`."""
    rows = _rows(values, groups)
    scale = (2 * rows.abs().amax(1, keepdim=True) / 2**bits).clamp(min=torch.finfo(torch.float32).tiny)
    levels = _round(rows / scale, stochastic).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (levels * scale).view(values.shape).to(values.dtype)


def asymmetric(values: torch.Tensor, bits: int, groups: int = 1, stochastic: bool = False) -> torch.Tensor:
    """Quantize to 2^bits levels with a step of (maximum - minimum) / 2^bits of each group; the first is the minimum,
    rounded to a multiple of the step, so the last is about a step below the maximum.

    Arguments and result are those of `quantize`.
    """
    rows = _rows(values, groups)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale = ((high - low) / 2**bits).clamp(min=torch.finfo(torch.float32).tiny)
    zero = scale * torch.round(low / scale)
    levels = _round((rows - zero) / scale, stochastic).clamp(0, 2**bits - 1)
    return (zero + levels * scale).view(values.shape).to(values.dtype)


_STARTS = (6.0, 6.5, 7.0, 7.5, 8.0, 8.5, 9.0)  # steps from zero to a group's largest weight


def four_bit_scales(groups: torch.Tensor) -> torch.Tensor:
    """Return a signed scale per group that nearly minimizes the squared error of integers from -8 to 7.

    The weight of largest magnitude is mapped near -8, so the scale is negative if that weight is positive. Of several
    candidates, each refined once by least squares for its integers, the best one is returned.

    Args:
        groups: fp32 [..., elements of a group].

    Returns:
        fp32 [..., 1], never zero.
    """
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best, least = largest, torch.full_like(largest, torch.inf)
    for steps in _STARTS:
        scale = _not_zero(-largest / steps)
        levels = (groups / scale).round_().clamp_(-8, 7)
        squares = levels.square().sum(-1, keepdim=True)
        scale = _not_zero((groups * levels).sum(-1, keepdim=True) / squares.clamp(min=1))
        error = ((groups / scale).round_().clamp_(-8, 7).mul_(scale) - groups).square_().sum(-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale.abs() < 1e-12, 1e-12, scale)


def ternary(values: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """Quantize to {-a, 0, a} (ternary weight networks, arXiv:1605.04711).

    Magnitudes up to 0.7 times the group's mean magnitude become 0; a is the mean of the other magnitudes.

    Args:
        values: any float tensor.
        groups: number of equal parts of the flattened tensor.
    """
    rows = _rows(values, groups)
    sizes = rows.abs()
    above = sizes > 0.7 * sizes.mean(1, keepdim=True)
    level = (sizes * above).sum(1, keepdim=True) / above.sum(1, keepdim=True).clamp(min=1)
    return (rows.sign() * above * level).view(values.shape).to(values.dtype)


def binary(values: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """Quantize to plus or minus the mean magnitude of each of `groups` equal parts of the flattened tensor."""
    rows = _rows(values, groups)
    signs = torch.where(rows < 0, -1.0, 1.0)
    return (signs * rows.abs().mean(1, keepdim=True)).view(values.shape).to(values.dtype)


def quantize(values: torch.Tensor, bits: int, kind: str, groups: int = 1, stochastic: bool = False) -> torch.Tensor:
    """Quantize and dequantize: binary with 1 bit, ternary with 2 bits, else to 2^bits levels.

    Args:
        values: any float tensor.
        bits: 1 to 16.
        kind: `symmetric` or `asymmetric`, for 3 bits or more.
        groups: number of equal parts of the flattened tensor, each with its own scale.
        stochastic: whether values are rounded up with a probability equal to their fractional part.

    Returns:
        Rounded values, with the shape and dtype of `values`.

    Raises:
        ValueError: `groups` does not divide the number of elements.
    """
    if bits <= 2:
        return binary(values, groups) if bits == 1 else ternary(values, groups)
    return (symmetric if kind == "symmetric" else asymmetric)(values, bits, groups, stochastic)


def _round(values: torch.Tensor, stochastic: bool) -> torch.Tensor:
    return torch.floor(values + torch.rand_like(values)) if stochastic else torch.round(values)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        return quantized

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def straight_through(values: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """Return `quantized`; in backward, `values` gets the gradient of the result (straight-through estimator)."""
    return _StraightThrough.apply(values, quantized)  # pyright: ignore[reportReturnType]


class _Quantizer(torch.autograd.Function):
    """Fake quantizer with the interface of upstream DeepSpeed: `apply` returns values with a gradient."""

    form: Any = None

    @classmethod
    def apply(
        cls, input: torch.Tensor, num_bits: int, min_value: Any = None, max_value: Any = None, num_groups: int = 1
    ) -> Any:  # noqa: A002, E501
        """Quantize and dequantize `input`, with a straight-through gradient.

        Args:
            input: any float tensor.
            num_bits: number of bits.
            min_value: lower bound of a clamp before quantization; None: -max_value.
            max_value: upper bound of the clamp; None: no clamp.
            num_groups: number of equal parts of the flattened tensor, each with its own scale.
        """
        values = input.detach()
        if max_value is not None:
            values = values.clamp(-max_value if min_value is None else min_value, max_value)
        return straight_through(input, cls.form(values, num_bits, num_groups))


class SymQuantizer(_Quantizer):
    """Symmetric fake quantizer (see `symmetric`) with straight-through gradients."""

    form = staticmethod(symmetric)


class AsymQuantizer(_Quantizer):
    """Asymmetric fake quantizer (see `asymmetric`) with straight-through gradients."""

    form = staticmethod(asymmetric)


class TernaryQuantizer(_Quantizer):
    """Ternary fake quantizer (see `ternary`) with straight-through gradients; `num_bits` has no effect."""

    form = staticmethod(lambda values, bits, groups: ternary(values, groups))


class BinaryQuantizer(_Quantizer):
    """Binary fake quantizer (see `binary`) with straight-through gradients; `num_bits` has no effect."""

    form = staticmethod(lambda values, bits, groups: binary(values, groups))


class TopKBinarizer(torch.autograd.Function):
    """Function from scores to a mask of the largest ones, with a straight-through gradient (arXiv:2005.07683)."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, threshold: float, sigmoid: bool = False) -> torch.Tensor:
        """Return a mask of ones and zeros, with shape and dtype of `inputs`.

        Args:
            inputs: scores.
            threshold: fraction of the scores, the largest ones, that get a one.
            sigmoid: True: scores with a sigmoid above `threshold` get a one instead.
        """
        if sigmoid:
            return (torch.sigmoid(inputs) > threshold).to(inputs.dtype)
        flat = inputs.reshape(-1)
        keep = -int(-round(threshold * flat.numel(), 6) // 1)
        mask = torch.zeros_like(flat)
        mask[torch.sort(flat, descending=True, stable=True).indices[:keep]] = 1
        return mask.view(inputs.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the mask as the gradient of the scores."""
        return gradients[0], None, None
