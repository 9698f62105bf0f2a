"""Numbers of floating-point operations by operator: torch's formulas, and formulas that torch lacks.

A multiply-add of a matrix product, a convolution or an attention counts as two operations. Elementwise arithmetic,
norms and activations count as zero. Formulas registered by users with `torch.utils.flop_counter.register_flop_formula`
are included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten: Any = torch.ops.aten
Formula = Callable[..., int]


def _mv(matrix: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _addmv(_: torch.Tensor, matrix: torch.Tensor, *__: Any, **___: Any) -> int:
    return 2 * matrix.numel()


def _addmm(_: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *__: Any, **___: Any) -> int:
    return 2 * left.numel() * right.shape[-1]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _lstm_layer(x: torch.Tensor, into: torch.Tensor, hidden: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count one direction of one LSTM layer: products of both weights at each time step; `x` is (time, batch, in)."""
    return 2 * prod(x.shape[:2]) * (into.numel() + hidden.numel())


def _lstm_layer_backward(*args: Any, **__: Any) -> int:
    return 2 * _lstm_layer(*args)  # gradients of input and weights are always both computed


def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    _bias: Sequence[int] | None,
    _stride: Sequence[int],
    _padding: Sequence[int],
    _dilation: Sequence[int],
    transposed: bool,
    *rest: Any,
    **_: Any,
) -> int:
    """Count each requested gradient like the forward; torch's own formula counts the groups of a weight twice."""
    into_x, into_weight, _ = rest[2]
    return (into_x + into_weight) * conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), transposed)


_MISSING: dict[Any, Formula] = {
    aten.mv: _mv,
    aten.addmv: _addmv,
    aten.dot: _mv,
    aten.vdot: _mv,
    aten._addmm_activation: _addmm,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.mkldnn_rnn_layer: _lstm_layer,
    aten.mkldnn_rnn_layer_backward: _lstm_layer_backward,
}
_WRONG: dict[Any, Formula] = {aten.convolution_backward: _convolution_backward}

# Fused attention does not keep its scores, so these backward operators recompute them.
_SCORES_AGAIN = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
}


def formulas() -> dict[Any, Formula]:
    """Return formulas by overload packet; call them with the arguments of the operator and `out_val`, its result."""
    return {**_MISSING, **flop_registry, **_WRONG}


def computed_again(operator: Any, args: Sequence[Any]) -> int:
    """Count the operations of a backward call that recompute products of the forward; 0 for most operators.

    Args:
        operator: overload packet of the operator.
        args: arguments of the call.
    """
    if operator not in _SCORES_AGAIN:
        return 0
    (batch, heads, queries, width), keys = args[1].shape, args[2].shape[2]
    return 2 * batch * heads * queries * keys * width
