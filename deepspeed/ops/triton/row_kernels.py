"""Kernels of the rows of a pass: norms, rotation into pages, gated activations, rounding to e4m3. Needs Triton.

A program computes one row, a block of one, or some heads of some rows; sums have a fixed order: a row's bits depend on
itself alone. Values are computed in fp32; results are rounded once, in norms also the sum with the residual. Strides
are in elements; the last dimension of all tensors is contiguous.
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
    # Loads are issued before the sums, which wait for all warps.
    factor = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32) + shift
    added = tl.load(bias + places, mask=inside & (has_bias != 0), other=0.0).to(tl.float32)
    if CENTRED:
        values = tl.where(inside, values - tl.sum(values, 0) / width, 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / width + eps)
    result = values * scale * factor + added
    tl.store(out + row * out_stride + places, result.to(out.dtype.element_ty), mask=inside)


@jit
def rotate_heads(
    source, target, cosines, sines, there, rotary,
    HEAD: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rotate heads of queries or keys in their first `rotary` places, in fp32, and store them.

    `source`, `target`, `cosines`, `sines`: addresses of each head's own [lanes]; `there`: whether there is one.
    """
    if WHOLE:  # halves are read apart, so that addresses follow each other: 16 bytes at once
        half: tl.constexpr = HEAD // 2
        places = tl.arange(0, BLOCK // 2)[None, :]
        inside = there[:, None] & (places < half)
        low = tl.load(source[:, None] + places, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source[:, None] + half + places, mask=inside, other=0.0).to(tl.float32)
        cosine = tl.load(cosines[:, None] + places, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(sines[:, None] + places, mask=inside, other=0.0).to(tl.float32)
        high_cosine = tl.load(cosines[:, None] + half + places, mask=inside, other=0.0).to(tl.float32)
        high_sine = tl.load(sines[:, None] + half + places, mask=inside, other=0.0).to(tl.float32)
        low_result, high_result = low * cosine - high * sine, high * high_cosine + low * high_sine
        tl.store(target[:, None] + places, low_result.to(target.dtype.element_ty), mask=inside)
        tl.store(target[:, None] + half + places, high_result.to(target.dtype.element_ty), mask=inside)
    else:
        places = tl.arange(0, BLOCK)[None, :]
        inside = there[:, None] & (places < HEAD)
        turned = inside & (places < rotary)
        if INTERLEAVED:
            partners, negative = places ^ 1, places % 2 == 0
        else:
            half = rotary // 2
            partners, negative = tl.where(places < half, places + half, places - half), places < half
        values = tl.load(source[:, None] + places, mask=inside, other=0.0).to(tl.float32)
        others = tl.load(source[:, None] + partners, mask=turned, other=0.0).to(tl.float32)
        cosine = tl.load(cosines[:, None] + places, mask=turned, other=1.0).to(tl.float32)
        sine = tl.load(sines[:, None] + places, mask=turned, other=0.0).to(tl.float32)
        result = values * cosine + tl.where(negative, -others, others) * sine
        tl.store(target[:, None] + places, result.to(target.dtype.element_ty), mask=inside)


@jit
def rotate_into_pages(
    queries, keys, values, cosines, sines, slots, out, key_pool, value_pool,
    query_row, query_head, key_row, key_head, value_row, value_head, table_row, out_row, out_head,
    key_slot, key_pool_head, value_slot, value_pool_head, count, heads, cached, rotary,
    HEAD: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate queries into `out`; rotate keys and copy values into the pools.

    A program has ROWS rows of `count`, for HEADS heads. Grid: (blocks of rows, blocks of `heads` and then of `cached`
    key-value heads). `slots`: int64 slot of each row; for a negative one (a padding row) nothing is written, not to
    `out` either. `cosines` and `sines` [rows, rotary]: by row. WHOLE: `rotary` is HEAD, without interleaving.
    """
    lanes = tl.arange(0, ROWS * HEADS)
    rows = tl.program_id(0) * ROWS + lanes // HEADS
    slot = tl.load(slots + rows, mask=rows < count, other=-1)
    row = rows.to(tl.int64)
    cosines += row * table_row
    sines += row * table_row
    block, query_blocks = tl.program_id(1), tl.cdiv(heads, HEADS)
    if block < query_blocks:
        head = block * HEADS + lanes % HEADS
        there = (slot >= 0) & (head < heads)
        source, target = queries + row * query_row + head * query_head, out + row * out_row + head * out_head
        rotate_heads(source, target, cosines, sines, there, rotary, HEAD, BLOCK, INTERLEAVED, WHOLE)
    else:
        head = (block - query_blocks) * HEADS + lanes % HEADS
        there = (slot >= 0) & (head < cached)
        places = tl.arange(0, BLOCK)[None, :]
        inside = there[:, None] & (places < VALUE)
        source = values + row * value_row + head * value_head
        value = tl.load(source[:, None] + places, mask=inside, other=0.0)
        target = value_pool + slot * value_slot + head * value_pool_head
        tl.store(target[:, None] + places, value.to(value_pool.dtype.element_ty), mask=inside)
        source, target = keys + row * key_row + head * key_head, key_pool + slot * key_slot + head * key_pool_head
        rotate_heads(source, target, cosines, sines, there, rotary, HEAD, BLOCK, INTERLEAVED, WHOLE)


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


@jit
def round_rows(rows, values, scales, row_stride, width, BLOCK: tl.constexpr):
    """Rows as e4m3, given as int8, rounded to the nearest, ties to even, and a scale for each. Grid: (rows).

    The largest magnitude of a row becomes 448. NaN stays NaN; in a row with an infinity, infinities become NaN, and the
    scale is infinite.
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        x = tl.load(rows + row * row_stride + start + places, mask=start + places < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.where(x == x, tl.abs(x), 0.0))
    scale = tl.div_rn(tl.max(largest, 0), tl.full([], 448.0, tl.float32))
    scale = tl.maximum(scale, 1.1754943508222875e-38)  # the smallest normal number
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        inside = start + places < width
        x = tl.load(rows + row * row_stride + start + places, mask=inside, other=0.0).to(tl.float32)
        x = tl.div_rn(x, tl.full([BLOCK], 1.0, tl.float32) * scale)
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        code = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # three bits of the mantissa stay
        # Below 2^-6 numbers are multiples of 2^-9: the last bits of a sum with 2^14.
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 15
        code = tl.where(size < 0x3C800000, small, tl.minimum(code, 0x7E))
        code = tl.where(x == x, code | ((bits >> 24) & 0x80), 0x7F)
        tl.store(values + row * width + start + places, code.to(tl.int8), mask=inside)
