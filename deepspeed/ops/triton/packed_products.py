"""Products of rows in tiles with matrices in int8, e4m3 or 4 bits. Needs Triton.

The formats are those of `deepspeed.inference.quantization`. `tile_product` is for up to 64 rows: a program computes
BLOCK_OUT outputs of up to TILES tiles of 16 rows, over all inputs and in one order, so that a row's bits depend on
itself alone, and not on the number of tiles. `wide_product` is for more: a program computes a matrix of BLOCK_OUT
outputs times BLOCK_ROWS rows, whose left side, the decoded weights, matrix instructions read from registers. Both
decode a weight once for all rows of a program.

Integers of 8 bits and e4m3 are exact in every dtype, so their scale is applied to sums. Numbers of 4 bits are scaled
before the product, in fp32, and rounded to the dtype of the rows, as `PackedWeight.dense` rounds them.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found]
from triton import jit  # type: ignore[import-not-found]

GROUP = tl.constexpr(32)  # inputs with one scale and offset, in 4 bits
INT8, INT4, FLOAT8 = tl.constexpr(8), tl.constexpr(4), tl.constexpr(7)  # forms of a matrix


@jit
def from_float8(bits, dtype: tl.constexpr):
    """Return e4m3, given as int8, in another dtype: exponent and mantissa get their places by a shift, and the
    exponents' bases differ by a factor, which also makes subnormal numbers right. NaN becomes 480."""
    if dtype == tl.bfloat16:
        factor = tl.full([], 2.0**120, tl.float32).to(tl.bfloat16)
        return ((bits.to(tl.int16) << 4) & -0x7810).to(tl.bfloat16, bitcast=True) * factor
    elif dtype == tl.float16:
        return ((bits.to(tl.int16) << 7) & -0x4080).to(tl.float16, bitcast=True) * 256.0
    else:
        return ((bits.to(tl.int32) << 20) & -0x78100000).to(tl.float32, bitcast=True) * 2.0**120


@jit
def from_nibbles(pairs, scale, offset, dtype: tl.constexpr, GROUPS: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """Return numbers in a dtype, [outputs, 32 · groups], of two integers in a byte of `pairs` [outputs, 16 · groups].

    An integer becomes the first bits of the mantissa of a number from 1 to 2, which is 1 + integer / 16.
    """
    word = pairs.to(tl.int32)
    low = ((word << 19) & 0x780000 | 0x3F800000).to(tl.float32, bitcast=True)
    high = ((word << 15) & 0x780000 | 0x3F800000).to(tl.float32, bitcast=True)
    numbers = tl.reshape(tl.join(low, high), [BLOCK_OUT, GROUPS, GROUP])
    factor = tl.broadcast_to((scale * 16.0)[:, :, None], BLOCK_OUT, GROUPS, GROUP)
    base = tl.broadcast_to((offset - scale * 16.0)[:, :, None], BLOCK_OUT, GROUPS, GROUP)
    return tl.reshape(tl.fma(numbers, factor, base).to(dtype), [BLOCK_OUT, GROUPS * GROUP])


@jit
def decoded(
    weights, scales, offsets, output, start, width, dtype: tl.constexpr,
    FORM: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return a block [outputs, BLOCK_IN] of a matrix from input `start` on, in a dtype.

    EVEN: `width` is a multiple of BLOCK_IN; else inputs beyond it are 0. In 8 bits, scales are not applied.
    """
    line = output.to(tl.int64)[:, None]
    if FORM == INT4:
        GROUPS: tl.constexpr = BLOCK_IN // GROUP
        place, group = tl.arange(0, BLOCK_IN // 2) + start // 2, tl.arange(0, GROUPS) + start // GROUP
        inside = (place < width // 2) | (EVEN == 1)
        known = (group < width // GROUP) | (EVEN == 1)
        pairs = tl.load(weights + line * (width // 2) + place[None, :], mask=inside[None, :], other=0)
        entry = line * (width // GROUP) + group[None, :]
        scale = tl.load(scales + entry, mask=known[None, :], other=0.0)
        offset = tl.load(offsets + entry, mask=known[None, :], other=0.0)
        return from_nibbles(pairs, scale, offset, dtype, GROUPS, BLOCK_OUT)
    else:
        place = start + tl.arange(0, BLOCK_IN)
        inside = (place < width) | (EVEN == 1)
        bits = tl.load(weights + line * width + place[None, :], mask=inside[None, :], other=0)
        return from_float8(bits, dtype) if FORM == FLOAT8 else bits.to(dtype)


@jit
def load_rows(inputs, input_row, row, start, width, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr):
    """Return a tile of inputs, [rows, BLOCK_IN], from input `start` on; zero beyond the last, unless all are EVEN."""
    place = start + tl.arange(0, BLOCK_IN)
    inside = (place < width) | (EVEN == 1)
    return tl.load(inputs + row.to(tl.int64)[:, None] * input_row + place[None, :], mask=inside[None, :], other=0.0)


@jit
def finished(total, scales, scale_step, bias, has_bias, output, FORM: tl.constexpr):
    """Return sums [rows, outputs] times their scales, plus bias."""
    if FORM != INT4:
        total *= tl.load(scales + output * scale_step)[None, :]
    if has_bias != 0:
        total += tl.load(bias + output).to(tl.float32)[None, :]
    return total


@jit
def store_outputs(out, out_row, row, rows, output, outputs, total):
    """Store the outputs of a tile, [rows, outputs]."""
    there = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * out_row + output[None, :], total.to(out.dtype.element_ty), mask=there)


@jit
def tile_product(
    inputs, weights, scales, offsets, bias, out, input_row, out_row, rows, outputs, inputs_, scale_step, has_bias,
    FORM: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """inputs [rows, inputs_] times a matrix [outputs, inputs_] transposed, plus bias.

    weights: `INT8` int8, or `FLOAT8` the bits of e4m3, with scales `scale_step` apart; `INT4`: two columns in a byte,
    the first in the low bits, with scales and offsets [outputs, inputs_ / 32]. Grid: (groups of TILES tiles of rows,
    blocks of outputs). TILES: 1, 2 or 4.
    """
    row = tl.program_id(0) * (BLOCK_ROWS * TILES) + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # What lies beyond the last row or output is computed from the last one, and not stored: that needs no masks.
    line, last = tl.minimum(output, outputs - 1), rows - 1
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    second, third, fourth = total, total, total
    for start in range(0, inputs_, BLOCK_IN):
        weight = tl.trans(decoded(weights, scales, offsets, line, start, inputs_, inputs.dtype.element_ty,
                                  FORM, BLOCK_OUT, BLOCK_IN, EVEN))  # fmt: skip
        x = load_rows(inputs, input_row, tl.minimum(row, last), start, inputs_, BLOCK_IN, EVEN)
        total = tl.dot(x, weight, total, input_precision="ieee")
        if TILES > 1:
            x = load_rows(inputs, input_row, tl.minimum(row + BLOCK_ROWS, last), start, inputs_, BLOCK_IN, EVEN)
            second = tl.dot(x, weight, second, input_precision="ieee")
        if TILES > 2:
            x = load_rows(inputs, input_row, tl.minimum(row + 2 * BLOCK_ROWS, last), start, inputs_, BLOCK_IN, EVEN)
            third = tl.dot(x, weight, third, input_precision="ieee")
            x = load_rows(inputs, input_row, tl.minimum(row + 3 * BLOCK_ROWS, last), start, inputs_, BLOCK_IN, EVEN)
            fourth = tl.dot(x, weight, fourth, input_precision="ieee")
    total = finished(total, scales, scale_step, bias, has_bias, line, FORM)
    store_outputs(out, out_row, row, rows, output, outputs, total)
    if TILES > 1:
        second = finished(second, scales, scale_step, bias, has_bias, line, FORM)
        store_outputs(out, out_row, row + BLOCK_ROWS, rows, output, outputs, second)
    if TILES > 2:
        third = finished(third, scales, scale_step, bias, has_bias, line, FORM)
        store_outputs(out, out_row, row + 2 * BLOCK_ROWS, rows, output, outputs, third)
        fourth = finished(fourth, scales, scale_step, bias, has_bias, line, FORM)
        store_outputs(out, out_row, row + 3 * BLOCK_ROWS, rows, output, outputs, fourth)


@jit
def wide_product(
    inputs, weights, scales, offsets, bias, out, input_row, out_row, rows, outputs, inputs_, scale_step, has_bias,
    FORM: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """As `tile_product`. Grid: (blocks of rows, blocks of outputs): programs side by side read the same weights."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    line, place = tl.minimum(output, outputs - 1), tl.minimum(row, rows - 1)
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for start in range(0, inputs_, BLOCK_IN):
        x = load_rows(inputs, input_row, place, start, inputs_, BLOCK_IN, EVEN)
        weight = decoded(weights, scales, offsets, line, start, inputs_, inputs.dtype.element_ty,
                         FORM, BLOCK_OUT, BLOCK_IN, EVEN)  # fmt: skip
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    total = finished(tl.trans(total), scales, scale_step, bias, has_bias, line, FORM)
    store_outputs(out, out_row, row, rows, output, outputs, total)
