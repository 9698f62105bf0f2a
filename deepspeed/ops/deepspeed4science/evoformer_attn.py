"""Evoformer attention with two biases: softmax(QKᵀ/√D + b1 + b2) V, along L of `[B, N, L, H, D]`, computed in tiles.

It is used in AlphaFold 2 (Jumper et al. 2021, supplement, algorithms 7 and 8). A tile is a block of rows of the score
matrix, for some of the N sequences and all heads. Forward saves the log-sum-exp of each row, and backward recomputes
the scores of each tile (FlashAttention, arXiv:2205.14135). Scores and softmax are fp32, or fp64 for fp64 inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import ArgumentError

# scores per tile: about one CPU cache, and enough work for one kernel on accelerators
CPU_TILE, DEVICE_TILE = 2**19, 2**24


def DS4Sci_EvoformerAttention(Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Tensor | None]) -> Tensor:  # noqa: N802, N803
    """Compute attention along L with two biases, for each of N sequences and each head; memory is linear in L.

    Second-order gradients are supported, but need memory for whole score matrices. The result of a row with only -inf
    scores is NaN, as in `torch.softmax`.

    Args:
        Q: queries `[B, N, L, H, D]`; fp32, bf16, fp16 or fp64, on any device. Under autocast, Q, K and V are cast
            unless Q is fp64.
        K: keys, of the same shape, dtype and device.
        V: values, of the same shape, dtype and device.
        biases: zero to two tensors; None means no bias. The first is `[B, N, 1, 1, L]` (a key mask for each sequence),
            the second `[B, 1, H, L, L]` (pair bias, for all sequences), in any of these dtypes.

    Returns:
        `[B, N, L, H, D]` in the dtype of Q, after the cast.

    Raises:
        ArgumentError: a shape, dtype or device does not fit.
    """
    if len(Q.shape) != 5:
        raise ArgumentError(f"Q has shape {list(Q.shape)}; pass [B, N, L, H, D]")
    batch, sequences, length, heads, _ = Q.shape
    if len(biases) > 2:
        raise ArgumentError(f"biases has {len(biases)} entries; pass at most two: [mask, pair], None for no bias")
    mask, pair = (*biases, None, None)[:2]
    for name, tensor, shape in (
        ("K", K, Q.shape),
        ("V", V, Q.shape),
        ("biases[0]", mask, (batch, sequences, 1, 1, length)),
        ("biases[1]", pair, (batch, 1, heads, length, length)),
    ):
        _check(name, tensor, shape, Q)
    device = Q.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and Q.dtype != torch.float64:
        Q, K, V = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (Q, K, V))
    if not Q.dtype == K.dtype == V.dtype:
        raise ArgumentError(f"Q, K and V have dtypes {Q.dtype}, {K.dtype} and {V.dtype}; pass one dtype")
    return _Evoformer.apply(Q, K, V, mask, pair)


def _check(name: str, tensor: Tensor | None, shape: Sequence[int], query: Tensor) -> None:
    if tensor is None:
        return
    if tuple(tensor.shape) != tuple(shape):
        form = {"biases[0]": " ([B, N, 1, 1, L])", "biases[1]": " ([B, 1, H, L, L])"}.get(name, "")
        raise ArgumentError(f"{name} has shape {list(tensor.shape)}; for this Q it is {list(shape)}{form}")
    if not tensor.is_floating_point() or tensor.device != query.device:
        raise ArgumentError(f"{name} is {tensor.dtype} on {tensor.device}; pass floats on {query.device}, as Q")


class _Tiles:
    """Q, K, V of one batch entry as `[N, H, L, D]` in the dtype of the scores, and the biases of the entry."""

    def __init__(self, entry: int, inputs: Sequence[Any]) -> None:
        parts: list[Any] = [None if tensor is None else tensor[entry].detach() for tensor in inputs]
        query, key, value, mask, pair = parts
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.scale = 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
        self.query, self.key, self.value = (self.by_head(tensor) for tensor in (query, key, value))
        self.query = self.query * self.scale
        self.mask, self.pair = mask, pair  # [N, 1, 1, L], [1, H, L, L]

    def by_head(self, tensor: Tensor) -> Tensor:
        """Permute `[N, L, H, …]` to `[N, H, L, …]`, contiguous, in the dtype of the scores."""
        return tensor.transpose(1, 2).to(self.dtype, memory_format=torch.contiguous_format)

    def rows(self) -> Iterator[tuple[slice, list[slice]]]:
        """Yield (slice of rows, slices of sequences); each of these slices of sequences gives a tile of the rows."""
        sequences, heads, length, _ = self.query.shape
        budget = CPU_TILE if self.query.device.type == "cpu" else DEVICE_TILE
        rows = min(max(budget // max(heads * length, 1), 1), length)
        some = max(budget // max(heads * length * rows, 1), 1)
        for row in range(0, length, max(rows, 1)):
            yield slice(row, row + rows), [slice(first, first + some) for first in range(0, sequences, some)]

    def scores(self, some: slice, rows: slice) -> Tensor:
        """Compute the scores of one tile, `[n, H, rows, L]`."""
        scores = torch.matmul(self.query[some, :, rows], self.key[some].mT)
        if self.mask is not None:
            scores += self.mask[some]
        if self.pair is not None:
            scores += self.pair[:, :, rows]
        return scores


def _without_autocast(device: str) -> Any:
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


class _Evoformer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:  # type: ignore[override]
        query: Tensor = inputs[0]
        result = torch.empty_like(query, memory_format=torch.contiguous_format)
        batch, sequences, length, heads, _ = query.shape
        dtype = torch.promote_types(query.dtype, torch.float32)
        logsumexp = torch.empty(batch, sequences, heads, length, 1, dtype=dtype, device=query.device)
        with _without_autocast(query.device.type):
            for entry in range(batch):
                tiles = _Tiles(entry, inputs)
                for rows, parts in tiles.rows():
                    for some in parts:
                        scores = tiles.scores(some, rows)
                        most = scores.amax(-1, keepdim=True)
                        total = scores.sub_(most).exp_().sum(-1, keepdim=True)
                        mean = torch.matmul(scores, tiles.value[some]).div_(total)
                        result[entry, some, rows] = mean.transpose(1, 2)
                        logsumexp[entry, some, :, rows] = most.add_(total.log_())
        ctx.save_for_backward(*inputs, result, logsumexp)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *inputs, result, logsumexp = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():  # `create_graph=True`
            return _differentiable_gradients(inputs, needed, gradient)
        gradients = [torch.empty_like(tensor) if need else None for tensor, need in zip(inputs, needed, strict=True)]
        with _without_autocast(gradient.device.type):
            for entry in range(gradient.shape[0]):
                tiles = _Tiles(entry, inputs)
                of_result = tiles.by_head(gradient[entry])
                product = (of_result * tiles.by_head(result[entry])).sum(-1, keepdim=True)
                into = [None if tensor is None else tensor[entry] for tensor in gradients]
                _backward_of_entry(tiles, of_result, product, logsumexp[entry], into)
        return tuple(gradients)


def _backward_of_entry(
    tiles: _Tiles, of_result: Tensor, product: Tensor, logsumexp: Tensor, into: list[Tensor | None]
) -> None:
    """Write the gradients of one batch entry's five inputs into the requested tensors.

    Args:
        tiles: the batch entry.
        of_result: gradient of the result, `[N, H, L, D]`.
        product: product of gradient and result, summed over D, `[N, H, L, 1]`.
        logsumexp: log-sum-exp of the scores, `[N, H, L, 1]`.
        into: for Q, K, V `[N, L, H, D]`, for the biases `[N, 1, 1, L]` and `[1, H, L, L]`; None: not requested.
    """
    into_query, into_key, into_value, into_mask, into_pair = into
    of_key, of_value = torch.zeros_like(tiles.key), torch.zeros_like(tiles.value)
    of_mask = tiles.key.new_zeros(len(tiles.key), tiles.key.shape[2])
    for rows, parts in tiles.rows():
        of_pair = None
        for some in parts:
            chances = tiles.scores(some, rows).sub_(logsumexp[some, :, rows]).exp_()
            above = of_result[some, :, rows]
            of_value[some] += torch.matmul(chances.mT, above)
            of_scores = torch.matmul(above, tiles.value[some].mT).sub_(product[some, :, rows]).mul_(chances)
            if into_query is not None:
                into_query[some, rows] = torch.matmul(of_scores, tiles.key[some]).mul_(tiles.scale).transpose(1, 2)
            of_key[some] += torch.matmul(of_scores.mT, tiles.query[some, :, rows])
            of_mask[some] += of_scores.sum((1, 2))
            if into_pair is not None:
                part = of_scores.sum(0)
                of_pair = part if of_pair is None else of_pair.add_(part)
        if into_pair is not None:
            into_pair[0, :, rows] = 0 if of_pair is None else of_pair
    for target, value in ((into_key, of_key), (into_value, of_value)):
        if target is not None:
            target.copy_(value.transpose(1, 2))
    if into_mask is not None:
        into_mask.copy_(of_mask[:, None, None])


def _differentiable_gradients(
    inputs: Sequence[Any], needed: Sequence[bool], gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """Compute gradients of the needed inputs that are differentiable themselves, from whole score matrices."""
    query, key, value, mask, pair = inputs
    dtype = torch.promote_types(query.dtype, torch.float32)
    with _without_autocast(gradient.device.type):
        scores = torch.matmul(query.to(dtype).transpose(2, 3), key.to(dtype).permute(0, 1, 3, 4, 2))
        scores = scores / math.sqrt(query.shape[-1])
        for bias in (mask, pair):
            scores = scores if bias is None else scores + bias
        result = torch.matmul(scores.softmax(-1), value.to(dtype).transpose(2, 3)).transpose(2, 3).to(query.dtype)
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need and tensor is not None]
        gradients = iter(torch.autograd.grad(result, wanted, gradient, create_graph=True))
    return tuple(next(gradients) if need else None for need in needed)
