"""Products with matrices packed in 8 or 4 bits, for passes with few rows. Needs Triton.

The formats are those of `deepspeed.inference.quantization.packed_weight`. A program computes BLOCK_ROWS rows and
BLOCK_OUT outputs over all inputs, in one order: a row's bits depend on itself alone. Integers of 8 bits are exact in
every dtype, so their scale is applied to the sum; 4 bits become values of the inputs' dtype, as `PackedWeight.dense`.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found]
from triton import jit  # type: ignore[import-not-found]

GROUP = tl.constexpr(32)  # inputs with one scale and offset, in 4 bits


@jit
def int8_product(
    inputs, integers, scales, bias, out, input_row, out_row, rows, outputs, inputs_, has_bias,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """inputs [rows, inputs_] times integers [outputs, inputs_] transposed, times scales [outputs], plus bias.

    Grid: (blocks of rows, blocks of outputs).
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    starts = output.to(tl.int64) * inputs_
    for start in range(0, inputs_, BLOCK_IN):
        places = start + tl.arange(0, BLOCK_IN)
        inside = places < inputs_
        x = tl.load(
            inputs + row.to(tl.int64)[:, None] * input_row + places[None, :],
            mask=(row < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        weight = tl.load(
            integers + starts[None, :] + places[:, None], mask=(output < outputs)[None, :] & inside[:, None], other=0
        )
        total = tl.dot(x, weight.to(x.dtype), total, input_precision="ieee")
    total *= tl.load(scales + output, mask=output < outputs, other=0.0)[None, :]
    if has_bias != 0:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * out_row + output[None, :],
        total.to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & (output < outputs)[None, :],
    )


@jit
def int4_product(
    inputs, integers, scales, offsets, bias, out, input_row, out_row, rows, outputs, inputs_, has_bias,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """As `int8_product`, with two columns in a byte, the first in the low bits, and an element of integer · scale +
    offset; scales and offsets [outputs, inputs_ / 32]."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    there, groups = output < outputs, inputs_ // GROUP
    for start in range(0, inputs_ // 2, BLOCK_IN // 2):
        pairs = start + tl.arange(0, BLOCK_IN // 2)
        inside = there[None, :] & (pairs < inputs_ // 2)[:, None]
        x_mask = (row < rows)[:, None] & (pairs < inputs_ // 2)[None, :]
        x_start = inputs + row.to(tl.int64)[:, None] * input_row + 2 * pairs[None, :]
        first, second = tl.load(x_start, mask=x_mask, other=0.0), tl.load(x_start + 1, mask=x_mask, other=0.0)
        both = tl.load(integers + output.to(tl.int64)[None, :] * (inputs_ // 2) + pairs[:, None], mask=inside, other=0)
        group = output.to(tl.int64)[None, :] * groups + (pairs // (GROUP // 2))[:, None]
        scale, offset = (
            tl.load(scales + group, mask=inside, other=0.0),
            tl.load(offsets + group, mask=inside, other=0.0),
        )
        low = ((both & 15).to(tl.float32) * scale + offset).to(first.dtype)
        high = ((both >> 4).to(tl.float32) * scale + offset).to(first.dtype)
        total = tl.dot(first, low, total, input_precision="ieee")
        total = tl.dot(second, high, total, input_precision="ieee")
    if has_bias != 0:
        total += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * out_row + output[None, :],
        total.to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & there[None, :],
    )
