"""The GPU kernels in plain torch, for tests of what calls them. `tests/kernels` proves the kernels themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from deepspeed.inference.draft_model import NgramProposer
from deepspeed.inference.executors import attention_ways, select
from deepspeed.inference.quantization.float8 import scaled_rows
from deepspeed.inference.sampler import draw
from deepspeed.ops.triton.sampling import uniform


class ReferenceKernels:
    """Kernels by operators of torch, on the tensors of their launches; `launches`: names and grids of what ran."""

    def __init__(self, without: str = "") -> None:
        self.launches: list[tuple[str, tuple[int, int, int]]] = []
        self.without = without

    def has(self, variant: Any) -> bool:
        return variant.kernel != self.without

    def prepare(self, variants: Any) -> None:
        pass

    @torch.no_grad()
    def launch(self, variant: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        assert min(grid) > 0, f"CUDA takes no grid of {grid} for {variant.name}"
        self.launches.append((variant.name, grid))
        names = [name for name, kind in variant.signature.items() if kind != "constexpr"]
        KERNELS[variant.kernel](**dict(zip(names, arguments, strict=True)), **variant.constants)


def _norm(rows: Any, residual: Any, weight: Any, bias: Any, out: Any, stream: Any, **more: Any) -> None:
    values = rows.float()
    if more["has_residual"]:
        stream.copy_(values + residual.float())
        values = stream.float()
    if more["CENTRED"]:
        values = values - values.mean(-1, keepdim=True)
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + more["eps"])
    values = values * (weight.float() + more["shift"])
    out.copy_(values + bias.float() if more["has_bias"] else values)


def _turned(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, interleaved: int) -> torch.Tensor:
    x, rest = heads[..., : cosines.shape[1]].float(), heads[..., cosines.shape[1] :].float()
    half = x.shape[-1] // 2
    if interleaved:
        other = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
    else:
        other = torch.cat([-x[..., half:], x[..., :half]], -1)
    return torch.cat([x * cosines.float()[:, None] + other * sines.float()[:, None], rest], -1)


def _rotate(
    queries: Any, keys: Any, values: Any, cosines: Any, sines: Any, slots: Any, out: Any, key_pool: Any,
    value_pool: Any, INTERLEAVED: int, **_: Any,
) -> None:  # fmt: skip
    used = slots >= 0
    out[used] = _turned(queries, cosines, sines, INTERLEAVED).to(out.dtype)[used]
    out[~used] = torch.nan
    key_pool[slots[used]] = _turned(keys, cosines, sines, INTERLEAVED).to(key_pool.dtype)[used]
    value_pool[slots[used]] = values.to(value_pool.dtype)[used]


def _gate(gate: Any, up: Any, out: Any, ACTIVATION: int, **_: Any) -> None:
    functions: list[Callable[..., Any]] = [F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh")]
    out.copy_(functions[ACTIVATION](gate.float()) * up.float())


def _attended(
    queries: Any, keys: Any, values: Any, table: Any, tile: Sequence[int], **more: Any
) -> tuple[slice, torch.Tensor]:
    """Rows of a tile, and their attention [rows, heads, value size], row by row and key by key in one order."""
    sequence, first, count, position = tile
    slots = torch.arange(position + count, device=table.device)
    slots = (table[sequence].long()[slots // more["PAGE"]] + 1) * more["PAGE"] + slots % more["PAGE"]
    results = []
    for row in range(count):
        at = position + row
        low = max(at - more["window"] + 1, 0) if more["window"] else 0
        low = max(low, at // more["chunk"] * more["chunk"]) if more["chunk"] else low
        seen = slots[low : at + 1]
        k, v = (pool[seen].float().repeat_interleave(more["group"], 1) for pool in (keys, values))
        scores = torch.einsum("hd,khd->hk", queries[first + row].float(), k) * more["scale"]
        scores = torch.tanh(scores / more["cap"]) * more["cap"] if more["CAPPED"] else scores
        if more.get("has_sinks"):
            scores = torch.cat([scores, more["sinks"].float()[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(seen)]
        results.append(torch.einsum("hk,khd->hd", weights, v))
    return slice(first, first + count), torch.stack(results)


def _whole(queries: Any, keys: Any, values: Any, out: Any, table: Any, tiles: Any, **more: Any) -> None:
    for tile in tiles.tolist():
        if tile[0] >= 0:
            rows, result = _attended(queries, keys, values, table, tile, **more)
            out[rows] = result.to(out.dtype)


def _split(queries: Any, keys: Any, values: Any, partial: Any, table: Any, tiles: Any, **more: Any) -> None:
    for tile in tiles.tolist():
        if tile[0] >= 0:
            rows, result = _attended(queries, keys, values, table, tile, **more)
            partial[rows, :, 0] = result


def _join(partial: Any, out: Any, tiles: Any, has_sinks: int, **_: Any) -> None:
    assert not has_sinks
    for sequence, first, count, _position in tiles.tolist():
        if sequence >= 0:
            out[first : first + count] = partial[first : first + count, :, 0].to(out.dtype)


def _draw(seeds: Any, counters: Any, numbers: Any, **_: Any) -> None:
    pairs = zip(seeds.tolist(), counters.tolist(), strict=True)
    numbers.copy_(torch.tensor([uniform(seed, count) for seed, count in pairs], dtype=torch.float64))


def _adjust(
    logits: Any, table: Any, scores: Any, options: Any, vocabulary: int, has_table: int, **_: Any
) -> None:  # fmt: skip
    values = logits.float()
    if has_table:
        repetition, presence, frequency = (options[:, column, None] for column in (4, 5, 6))
        counts = (table // 2).float()
        punished = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(table % 2 == 1, punished, values)
        values = torch.where(counts > 0, values - (presence + frequency * counts), values)
    scores[:, :vocabulary] = values


def _weigh(**_: Any) -> None:
    """Nothing: `_choose` takes the scores themselves."""


def _choose(scores: Any, options: Any, numbers: Any, tokens: Any, vocabulary: int, **_: Any) -> None:
    for row, values in enumerate(scores[:, :vocabulary]):
        temperature, top_k, top_p, min_p = options[row, :4].tolist()
        token = int(values.argmax()) if bool(values.max().isfinite()) else -1
        if token >= 0 and temperature > 0:
            sampling: Any = mock.Mock(temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p)
            token = int(draw(values[None], sampling, numbers[row : row + 1])[0])
        tokens[row] = token


def _integers4(integers: Any, scales: Any, offsets: Any) -> torch.Tensor:
    columns = torch.stack([integers & 15, integers >> 4], -1).flatten(-2).unflatten(1, (-1, 32)).float()
    groups = columns.shape[:2]
    return (columns * scales.view(*groups, 1) + offsets.view(*groups, 1)).flatten(1)


def _times(inputs: Any, weight: torch.Tensor, bias: Any, out: Any, has_bias: int, **_: Any) -> None:
    out.copy_(inputs.float() @ weight.T + (bias.float() if has_bias else 0.0))


def _dense(weights: Any, scales: Any, offsets: Any, FORM: int) -> torch.Tensor:
    """Values of a matrix, fp32 [outputs, inputs]."""
    if FORM == 4:
        return _integers4(weights.view(torch.uint8), scales, offsets)
    if FORM == 16:
        return weights.float()
    return (weights.view(torch.float8_e4m3fn) if FORM == 7 else weights).float() * scales.view(-1, 1)


def _product(weights: Any, scales: Any, offsets: Any, FORM: int, **more: Any) -> None:
    _times(weight=_dense(weights, scales, offsets, FORM), **more)


def _of_row(inputs: Any, squares: Any, weights: Any, scales: Any, offsets: Any, FORM: int, **more: Any) -> torch.Tensor:
    """Outputs of a product of a row, rounded, in fp32 [outputs]."""
    total = inputs[0].float() @ _dense(weights, scales, offsets, FORM).T
    if more["parts"]:
        total = total * torch.rsqrt(squares.sum() / more["inputs_"] + more["eps"])
    return (total + more["bias"].float() if more["has_bias"] else total).to(inputs.dtype).float()


def _row_add(residual: Any, norm: Any, out: Any, stream: Any, squares: Any, shift: float, **more: Any) -> None:
    stream.copy_(_of_row(squares=None, parts=0, **more) + residual.float())
    out.copy_(stream.float() * (norm.float() + shift))
    squares.zero_()
    squares[0] = stream.float().square().sum()


def _row_gate(out: Any, outputs: int, activation: int, **more: Any) -> None:
    total = _of_row(**more)
    _gate(total[None, :outputs], total[None, outputs:], out, activation)


def _row_rotate(
    cosines: Any, sines: Any, slots: Any, out: Any, key_pool: Any, value_pool: Any, heads: int, cached: int,
    head_size: int, **more: Any,
) -> None:  # fmt: skip
    every = _of_row(**more).view(1, -1, head_size)
    q, k, v = every.split([heads, cached, cached], 1)
    _rotate(q, k, v, cosines, sines, slots, out, key_pool, value_pool, 0)


def _round(rows: Any, values: Any, scales: Any, **_: Any) -> None:
    rounded, scale = scaled_rows(rows)
    values.view(torch.float8_e4m3fn).copy_(rounded)
    scales.copy_(scale)


KERNELS: dict[str, Callable[..., None]] = {
    "norm_rows": _norm, "rotate_into_pages": _rotate, "gate_rows": _gate, "attend_whole": _whole,
    "attend_split": _split, "join_splits": _join, "draw_numbers": _draw, "adjust_scores": _adjust,
    "weigh_parts": _weigh, "choose_tokens": _choose, "tile_product": _product, "wide_product": _product,
    "gemv": _product, "round_rows": _round, "gemv_add": _row_add, "gemv_gate": _row_gate, "gemv_rotate": _row_rotate,
}  # fmt: skip


@contextmanager
def only_way(kernels: Any) -> Iterator[Any]:
    """Context in which generators have these kernels, and no native passes."""
    ways: Any = [attention_ways.KernelWay(kernels)]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(attention_ways, "ways_of", lambda _: (ways, "")))
        stack.enter_context(mock.patch.object(select, "_fused", lambda executor, *_: executor))
        yield kernels


@contextmanager
def planned_drafts(texts: Sequence[list[int]], answers: Sequence[list[int]]) -> Iterator[None]:
    """Context in which drafts are the next tokens of these answers, every third one wrong."""

    def guess(self: Any, tokens: Sequence[int], most: int) -> list[int]:
        for text, answer in zip(texts, answers, strict=True):
            whole = [*text, *answer]
            if whole[: len(tokens)] == list(tokens):
                return [t if place % 3 else t ^ 1 for place, t in enumerate(whole)][len(tokens) :][:most]
        return []

    with mock.patch.object(NgramProposer, "guess", guess):
        yield
