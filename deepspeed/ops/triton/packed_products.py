"""Products of rows in tiles with matrices in int8, e4m3 or 4 bits. Needs Triton.

The formats are those of `deepspeed.inference.quantization`. A program computes BLOCK_OUT outputs of up to
TILES tiles of BLOCK_ROWS rows, over all inputs and in one order: a row's bits depend on itself alone, and not on the
number of tiles. Weights are decoded once for all tiles. Integers and e4m3 are exact in every dtype, so scales are
applied to sums: to that over all inputs in 8 bits, to those of 32 inputs in 4.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found]
from triton import jit  # type: ignore[import-not-found]

GROUP = tl.constexpr(32)  # inputs with one scale and offset, in 4 bits


@jit
def load_rows(inputs, input_row, row, rows, places, inside):
    """Return a tile of inputs, [rows, places], zero where there is none."""
    return tl.load(
        inputs + row.to(tl.int64)[:, None] * input_row + places[None, :],
        mask=(row < rows)[:, None] & inside[None, :],
        other=0.0,
    )


@jit
def store_outputs(out, out_row, row, rows, output, outputs, total, bias, has_bias):
    """Add the bias to a tile's outputs and store them."""
    if has_bias != 0:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * out_row + output[None, :],
        total.to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & (output < outputs)[None, :],
    )


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
def byte_product(
    inputs, values, scales, bias, out, input_row, out_row, rows, outputs, inputs_, scale_step, has_bias,
    FLOAT8: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """inputs [rows, inputs_] times values [outputs, inputs_] transposed, times scales `scale_step` apart, plus bias.

    values: int8; with FLOAT8, the bits of e4m3. Grid: (groups of TILES tiles of rows, blocks of outputs). TILES: 1, 2
    or 4.
    """
    row = tl.program_id(0) * (BLOCK_ROWS * TILES) + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    second, third, fourth = total, total, total
    starts = output.to(tl.int64) * inputs_
    for start in range(0, inputs_, BLOCK_IN):
        places = start + tl.arange(0, BLOCK_IN)
        inside = places < inputs_
        x = load_rows(inputs, input_row, row, rows, places, inside)
        weight = tl.load(
            values + starts[None, :] + places[:, None], mask=(output < outputs)[None, :] & inside[:, None], other=0
        )
        weight = from_float8(weight, x.dtype) if FLOAT8 else weight.to(x.dtype)
        total = tl.dot(x, weight, total, input_precision="ieee")
        if TILES > 1:
            x = load_rows(inputs, input_row, row + BLOCK_ROWS, rows, places, inside)
            second = tl.dot(x, weight, second, input_precision="ieee")
        if TILES > 2:
            x = load_rows(inputs, input_row, row + 2 * BLOCK_ROWS, rows, places, inside)
            third = tl.dot(x, weight, third, input_precision="ieee")
            x = load_rows(inputs, input_row, row + 3 * BLOCK_ROWS, rows, places, inside)
            fourth = tl.dot(x, weight, fourth, input_precision="ieee")
    scale = tl.load(scales + output * scale_step, mask=output < outputs, other=0.0)[None, :]
    store_outputs(out, out_row, row, rows, output, outputs, total * scale, bias, has_bias)
    if TILES > 1:
        row += BLOCK_ROWS
        store_outputs(out, out_row, row, rows, output, outputs, second * scale, bias, has_bias)
    if TILES > 2:
        row += BLOCK_ROWS
        store_outputs(out, out_row, row, rows, output, outputs, third * scale, bias, has_bias)
        row += BLOCK_ROWS
        store_outputs(out, out_row, row, rows, output, outputs, fourth * scale, bias, has_bias)


@jit
def from_nibbles(nibbles, dtype: tl.constexpr):
    """Return integers from 0 to 15 in a dtype, plus `base_of` it: in 16 bits they become the last bits of a mantissa,
    which takes one instruction."""
    if dtype == tl.bfloat16:
        return (nibbles | 0x4300).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return (nibbles | 0x6400).to(tl.float16, bitcast=True)
    else:
        return nibbles.to(tl.float32)


@jit
def base_of(dtype: tl.constexpr):
    """Return what `from_nibbles` adds."""
    if dtype == tl.bfloat16:
        return 128.0
    elif dtype == tl.float16:
        return 1024.0
    else:
        return 0.0


@jit
def add_groups(
    total, inputs, input_row, row, rows, columns, inside, low, high, scale, shift,
    GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """Return sums of each group of inputs, [GROUPS, rows, outputs], with those of some more columns, [GROUPS, 32]."""
    x = tl.load(
        inputs + row.to(tl.int64)[None, :, None] * input_row + columns[:, None, :],
        mask=(row < rows)[None, :, None] & inside[:, None, None],
        other=0.0,
    )
    even, odd = tl.split(tl.reshape(x, [GROUPS, BLOCK_ROWS, GROUP // 2, 2]))
    part = tl.dot(even, low, input_precision="ieee")
    part = tl.dot(odd, high, part, input_precision="ieee")
    sums = tl.sum(x.to(tl.float32), 2)
    total = tl.fma(part, tl.broadcast_to(scale[:, None, :], GROUPS, BLOCK_ROWS, BLOCK_OUT), total)
    sums = tl.broadcast_to(sums[:, :, None], GROUPS, BLOCK_ROWS, BLOCK_OUT)
    return tl.fma(sums, tl.broadcast_to(shift[:, None, :], GROUPS, BLOCK_ROWS, BLOCK_OUT), total)


@jit
def int4_product(
    inputs, integers, scales, offsets, bias, out, input_row, out_row, rows, outputs, inputs_, has_bias,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """As `byte_product`, with two columns in a byte, the first in the low bits, and an element of integer · scale +
    offset; scales and offsets [outputs, inputs_ / 32]. Sums are kept by group of a block, and joined at the end."""
    GROUPS: tl.constexpr = BLOCK_IN // GROUP
    row = tl.program_id(0) * (BLOCK_ROWS * TILES) + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    total = tl.zeros([GROUPS, BLOCK_ROWS, BLOCK_OUT], tl.float32)
    second, third, fourth = total, total, total
    there, groups, group = output < outputs, inputs_ // GROUP, tl.arange(0, GROUPS)
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    pairs = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    bytes_ = integers + output.to(tl.int64)[None, None, :] * (inputs_ // 2) + pairs[:, :, None]
    entries = output.to(tl.int64)[None, :] * groups + group[:, None]
    known = there[None, :] & (group < groups)[:, None]
    scale, offset = tl.load(scales + entries, mask=known, other=0.0), tl.load(offsets + entries, mask=known, other=0.0)
    for first in range(0, groups, GROUPS):
        inside = group + first < groups
        both = tl.load(bytes_ + first * (GROUP // 2), mask=there[None, None, :] & inside[:, None, None], other=0)
        both = both.to(tl.int16)
        low = from_nibbles(both & 15, inputs.dtype.element_ty)
        high = from_nibbles((both >> 4) & 15, inputs.dtype.element_ty)
        shift = offset - base_of(inputs.dtype.element_ty) * scale
        used = scale
        # Read before they are needed: nothing else would hide the wait.
        known = there[None, :] & (group + first + GROUPS < groups)[:, None]
        scale = tl.load(scales + entries + first + GROUPS, mask=known, other=0.0)
        offset = tl.load(offsets + entries + first + GROUPS, mask=known, other=0.0)
        places = first * GROUP + columns
        total = add_groups(total, inputs, input_row, row, rows, places, inside, low, high, used, shift,
                           GROUPS, BLOCK_ROWS, BLOCK_OUT)  # fmt: skip
        if TILES > 1:
            second = add_groups(second, inputs, input_row, row + BLOCK_ROWS, rows, places, inside, low, high, used,
                                shift, GROUPS, BLOCK_ROWS, BLOCK_OUT)  # fmt: skip
        if TILES > 2:
            third = add_groups(third, inputs, input_row, row + 2 * BLOCK_ROWS, rows, places, inside, low, high, used,
                               shift, GROUPS, BLOCK_ROWS, BLOCK_OUT)  # fmt: skip
            fourth = add_groups(fourth, inputs, input_row, row + 3 * BLOCK_ROWS, rows, places, inside, low, high, used,
                                shift, GROUPS, BLOCK_ROWS, BLOCK_OUT)  # fmt: skip
    store_outputs(out, out_row, row, rows, output, outputs, tl.sum(total, 0), bias, has_bias)
    if TILES > 1:
        row += BLOCK_ROWS
        store_outputs(out, out_row, row, rows, output, outputs, tl.sum(second, 0), bias, has_bias)
    if TILES > 2:
        row += BLOCK_ROWS
        store_outputs(out, out_row, row, rows, output, outputs, tl.sum(third, 0), bias, has_bias)
        row += BLOCK_ROWS
        store_outputs(out, out_row, row, rows, output, outputs, tl.sum(fourth, 0), bias, has_bias)
