"""Linear layers with a matrix in 8-bit floating point (e4m3) and a scale per row; inputs are rounded in the same way.

A product is that of the rounded values, summed in fp32, times both scales. On GPUs of compute capability 8.9 or newer,
torch's scaled product reads the values as they are; elsewhere they are widened to fp32 for each product, which gives
the same up to the order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.errors import InputError, NotAvailableError
from deepspeed.foundation.log import log_rank0
from deepspeed.inference.quantization.layers import can_pack, matrix_of
from deepspeed.zero.parameters.parameter import is_managed

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max  # 448
MULTIPLE = 16  # sizes that torch's scaled product takes


_as_they_are: ContextVar[bool] = ContextVar("inputs_as_they_are", default=False)


@contextmanager
def inputs_as_they_are(exact: bool = True) -> Iterator[None]:
    """Context in which products with matrices in fp8 do not round their inputs; `exact` False: they do again.

    Two forms of a model can be compared there: their roundings to e4m3 would differ by chance.
    """
    token = _as_they_are.set(exact)
    try:
        yield
    finally:
        _as_they_are.reset(token)


def rounds_inputs() -> bool:
    """Whether products with matrices in fp8 round their inputs."""
    return not _as_they_are.get()


def scaled_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [n, width] in e4m3, rounded to the nearest, and their scales, fp32 [n, 1].

    The largest magnitude of a row becomes 448. A row of zeros has the smallest normal fp32 number as its scale. A NaN
    makes its whole row NaN; an infinity becomes NaN, with an infinite scale.
    """
    wide = rows.float()
    largest = wide.abs().amax(1, keepdim=True) if rows.shape[1] else wide.new_zeros(len(rows), 1)
    scale = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale).to(FLOAT8), scale


class Float8Linear(nn.Module):
    """Linear layer with a matrix [outputs, inputs] in e4m3, fp32 scales [outputs, 1] and an optional bias [outputs].

    Args:
        weight: the matrix to round.
        bias: the bias; None: none.
    """

    def __init__(self, weight: torch.Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        values, scale = scaled_rows(weight.detach())
        # As bytes: a cast of the model to another dtype leaves integers alone.
        self.values = nn.Parameter(values.view(torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias, self.dtype = bias, weight.dtype
        self.out_features, self.in_features = weight.shape

    def _apply(self, fn: Any, recurse: bool = True) -> Float8Linear:
        """Move the parts between devices. `.to(bfloat16)` changes the dtype of `weight` and bias, not the scales."""
        wished = fn(torch.zeros((), dtype=self.dtype, device=self.scale.device))
        scale = self.scale.detach()
        super()._apply(fn, recurse)
        if self.scale.dtype != scale.dtype:
            self.scale.data = scale.to(wished.device)
        self.dtype = wished.dtype
        return self

    @property
    def weight(self) -> torch.Tensor:
        """The matrix [outputs, inputs]; each access widens it again."""
        return (self.values.view(FLOAT8).float() * self.scale).to(self.dtype)

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix: [outputs, inputs]."""
        return torch.Size((self.out_features, self.in_features))

    @property
    def takes_scaled_product(self) -> bool:
        """Whether torch's scaled product takes this matrix on its device."""
        fits = self.out_features % MULTIPLE == 0 == self.in_features % MULTIPLE
        return fits and has_scaled_product(self.values.device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map [..., inputs] to [..., outputs], in the dtype of the inputs.

        Raises:
            InputError: the inputs are not floating point or have another width; also a RuntimeError, as of nn.Linear.
        """
        self._check(inputs)
        flat = inputs.reshape(math.prod(inputs.shape[:-1]), self.in_features)  # -1 is unknown for a width of 0
        exact = not rounds_inputs()
        x, scale = (flat, flat.new_ones(1, 1, dtype=torch.float32)) if exact else scaled_rows(flat)
        values = self.values.view(FLOAT8)
        if flat.numel() and not exact and inputs.dtype == torch.bfloat16 and self.takes_scaled_product:
            out = torch._scaled_mm(x, values.t(), scale_a=scale, scale_b=self.scale.t(), out_dtype=torch.bfloat16)
        else:
            column, sums = self.scale.t(), F.linear(x.float(), values.float())
            # The smaller scale first: sums times the larger one may overflow where the result does not.
            out = (sums * torch.minimum(scale, column) * torch.maximum(scale, column)).to(inputs.dtype)
        out = out.view(*inputs.shape[:-1], self.out_features)
        return out if self.bias is None else (out + self.bias).to(inputs.dtype)

    def _check(self, inputs: torch.Tensor) -> None:
        if not inputs.is_floating_point():
            raise InputError(f"{self} takes floating-point inputs, got {inputs.dtype}: cast them, or embed the indices")
        if not inputs.dim() or inputs.shape[-1] != self.in_features:
            width = inputs.shape[-1] if inputs.dim() else "no"
            raise InputError(
                f"{self} takes inputs of width {self.in_features}, got width {width} of shape {tuple(inputs.shape)}"
            )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@cache
def has_scaled_product(device: torch.device) -> bool:
    """Whether torch's scaled product of e4m3 with a scale per row runs on a device."""
    if device.type != "cuda":
        return False
    from deepspeed.accelerator.cuda_driver import compute_capability

    return compute_capability(device) >= (8, 9)


def float8_linears(model: nn.Module) -> int:
    """Replace the linear layers of a model by `Float8Linear`, in place. Returns the number of replaced layers.

    Embeddings, the head, experts and layers with a shared matrix stay as they are.

    Raises:
        NotAvailableError: the model is sharded.
    """
    if any(is_managed(param) for param in model.parameters()):
        raise NotAvailableError(
            "the model is sharded already: round it before initialize, or build it outside zero.Init"
        )
    head = getattr(model, "get_output_embeddings", lambda: None)()
    users: dict[int, int] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        users[id(weight)] = users.get(id(weight), 0) + 1
    before, count = sum(param.nbytes for param in model.parameters()), 0
    for owner in list(model.modules()):
        for name, child in owner.named_children():
            layer: Any = child
            if isinstance(child, nn.Embedding) or child is head or not can_pack(child) or users[id(layer.weight)] > 1:
                continue
            setattr(owner, name, Float8Linear(matrix_of(child), layer.bias).train(child.training))
            count += 1
    after = sum(param.nbytes for param in model.parameters())
    log_rank0(f"{count} layers are in e4m3: {before / 1e6:.1f} MB of weights became {after / 1e6:.1f} MB")
    return count
