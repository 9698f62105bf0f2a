"""Kernels that read each row of a pass once: norms, rotation into pages, gated activations. Needs Triton.

A program computes one row, or a block of one, with a fixed order of sums: a row's bits depend on itself alone. Values
are computed in fp32; results are rounded once, in norms also the sum with the residual. Strides are in elements; the
last dimension of all tensors is contiguous.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found]
from triton import jit  # type: ignore[import-not-found]


@jit
def norm_rows(
    rows, residual, weight, bias, out, stream, row_stride, row_head, residual_stride, out_stride, out_head,
    stream_stride, width, eps, shift, has_residual, has_bias, BLOCK: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Norm of rows + residual, times (weight + shift), plus bias. Grid: (rows, heads); with a residual, one head.

    The sum goes to `stream`, rounded, if there is a residual; the norm reads the rounded sum, as modules do.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows += head * row_head
    out += head * out_head
    places = tl.arange(0, BLOCK)
    inside = places < width
    values = tl.load(rows + row * row_stride + places, mask=inside, other=0.0).to(tl.float32)
    if has_residual != 0:
        values += tl.load(residual + row * residual_stride + places, mask=inside, other=0.0).to(tl.float32)
        total = values.to(stream.dtype.element_ty)
        tl.store(stream + row * stream_stride + places, total, mask=inside)
        values = total.to(tl.float32)
    if CENTRED:
        values = tl.where(inside, values - tl.sum(values, 0) / width, 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / width + eps)
    factor = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32) + shift
    result = values * scale * factor
    if has_bias != 0:
        result += tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + places, result.to(out.dtype.element_ty), mask=inside)


@jit
def rotated(head, cosines, sines, inside, rotary, HEAD: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return a head of queries or keys, rotated in its first `rotary` places, in fp32."""
    places = tl.arange(0, BLOCK)
    turned = inside & (places < rotary)
    if INTERLEAVED:
        partners, negative = places ^ 1, places % 2 == 0
    else:
        half = rotary // 2
        partners, negative = tl.where(places < half, places + half, places - half), places < half
    values = tl.load(head + places, mask=inside & (places < HEAD), other=0.0).to(tl.float32)
    others = tl.load(head + partners, mask=turned, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + places, mask=turned, other=1.0).to(tl.float32)
    sine = tl.load(sines + places, mask=turned, other=0.0).to(tl.float32)
    return values * cosine + tl.where(negative, -others, others) * sine


@jit
def rotate_into_pages(
    queries, keys, values, cosines, sines, slots, out, key_pool, value_pool,
    query_row, query_head, key_row, key_head, value_row, value_head, table_row, out_row, out_head,
    key_slot, key_pool_head, value_slot, value_pool_head, heads, rotary,
    HEAD: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate queries into `out`; rotate keys and copy values into the pools. Grid: (rows, heads + key-value heads).

    `slots`: int64 slot of each row; for a negative one (a padding row) nothing is written, not to `out` either.
    `cosines` and `sines` [rows, rotary]: by row.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    cosines += row * table_row
    sines += row * table_row
    if head < heads:
        inside = (places < HEAD) & (slot >= 0)
        turned = rotated(
            queries + row * query_row + head * query_head, cosines, sines, inside, rotary, HEAD, BLOCK, INTERLEAVED
        )
        tl.store(out + row * out_row + head * out_head + places, turned.to(out.dtype.element_ty), mask=inside)
    else:
        head -= heads
        inside = (places < HEAD) & (slot >= 0)
        turned = rotated(
            keys + row * key_row + head * key_head, cosines, sines, inside, rotary, HEAD, BLOCK, INTERLEAVED
        )
        target = key_pool + slot * key_slot + head * key_pool_head + places
        tl.store(target, turned.to(key_pool.dtype.element_ty), mask=inside)
        there = (places < VALUE) & (slot >= 0)
        value = tl.load(values + row * value_row + head * value_head + places, mask=there, other=0.0)
        target = value_pool + slot * value_slot + head * value_pool_head + places
        tl.store(target, value.to(value_pool.dtype.element_ty), mask=there)


@jit
def gate_rows(
    gate, up, out, gate_row, up_row, out_row, width, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    """Activation of `gate` times `up`. Grid: (rows, blocks of the width). ACTIVATION: 0 SiLU, 1 GELU, 2 tanh-GELU."""
    row, places = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < width
    x = tl.load(gate + row * gate_row + places, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + places, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # twice the argument of the hyperbolic tangent
        x = x / (1.0 + tl.exp(-inner))
    tl.store(out + row * out_row + places, (x * y).to(out.dtype.element_ty), mask=inside)
