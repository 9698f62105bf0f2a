"""Kernels of block-quantised messages: encode, decode, and sums of encoded contributions. Needs Triton.

A program has ROWS blocks of BLOCK elements; tables say where each block's values, scale and codes are, so one launch
takes all slices of a message. The bits are those of the torch form in `comm/collectives/block_table.py`: all
arithmetic is in fp32, quotients are rounded to nearest, scales are rounded by their bits. Blocks start at places of any
alignment; the lanes of a warp read neighbouring elements.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found]
from triton import jit  # type: ignore[import-not-found]

# fp32 numbers from 2^23 to 2^24 are integers: adding this one rounds smaller numbers to nearest, ties to even.
TO_INTEGER = tl.constexpr(12582912.0)
SMALLEST_SCALE, NAN_SCALE = tl.constexpr(0x0080), tl.constexpr(0x7FC0)  # as in `block_table`


@jit
def encode_blocks(
    values, memory, payload, scales, starts, lengths, scale_places, code_places, blocks, beta, renewed,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    """Scales and codes of `values` (+ `memory`), and the new error memory. Grid: (programs of ROWS blocks).

    `scales` (int16) and `payload` (uint8) are the same memory. `renewed` is 1 - beta. Without MEMORY, `memory` is not
    read.
    """
    LIMIT: tl.constexpr = 2 ** (BITS - 1) - 1
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < blocks
    length = tl.load(lengths + rows, mask=there, other=0)
    columns = tl.arange(0, BLOCK)
    places = tl.load(starts + rows, mask=there, other=0).to(tl.int64)[:, None] + columns[None, :]
    inside = columns[None, :] < length[:, None]
    x = tl.load(values + places, mask=inside, other=0.0).to(tl.float32)
    if MEMORY:
        error = tl.load(memory + places, mask=inside, other=0.0).to(tl.float32)
        x += error
    size, number = tl.abs(x), x == x
    wrong = tl.max((x != x).to(tl.int32), 1) != 0
    most = tl.max(tl.where(number, size, 0.0), 1)
    finite = (most < float("inf")) & (wrong == 0)
    bits = tl.div_rn(most, most * 0.0 + LIMIT).to(tl.int32, bitcast=True)
    bits = tl.where(most < float("inf"), (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7F80)
    bits = tl.where(bits < SMALLEST_SCALE, 0, bits)
    bits = tl.where(wrong, NAN_SCALE, bits)
    tl.store(scales + tl.load(scale_places + rows, mask=there, other=0).to(tl.int64), bits.to(tl.int16), mask=there)
    scale = (bits << 16).to(tl.float32, bitcast=True)
    inverse = tl.where((bits > 0) & finite, tl.div_rn(scale * 0.0 + 1.0, scale), 0.0)
    code = (x * inverse[:, None] + TO_INTEGER) - TO_INTEGER
    special = tl.where(number, tl.where(size == float("inf"), tl.where(x > 0, 1.0, -1.0), 0.0), -LIMIT - 1.0)
    code = tl.where(finite[:, None], code, special)
    integers, target = (
        code.to(tl.int32),
        payload + tl.load(code_places + rows, mask=there, other=0).to(tl.int64)[:, None],
    )
    if BITS == 4:
        low, high = tl.split(tl.reshape(integers & 0xF, [ROWS, BLOCK // 2, 2]))
        halves = tl.arange(0, BLOCK // 2)[None, :]
        tl.store(target + halves, (low | (high << 4)).to(tl.uint8), mask=2 * halves < length[:, None])
    else:
        tl.store(target + columns[None, :], (integers & 0xFF).to(tl.uint8), mask=inside)
    if MEMORY:
        remaining = beta * error + renewed * (x - code * scale[:, None])
        remaining = tl.where(finite[:, None], remaining, 0.0)
        tl.store(memory + places, remaining.to(memory.dtype.element_ty), mask=inside)


@jit
def decoded(payload, bits, length, BLOCK: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr):
    """Return the values of blocks in fp32, [ROWS, BLOCK]: `payload` [ROWS] are places of codes, `bits` the scales."""
    LIMIT: tl.constexpr = 2 ** (BITS - 1) - 1
    if BITS == 4:
        halves = tl.arange(0, BLOCK // 2)[None, :]
        packed = tl.load(payload[:, None] + halves, mask=2 * halves < length[:, None], other=0).to(tl.int32)
        codes = tl.reshape(tl.join(packed & 0xF, packed >> 4), [ROWS, BLOCK])
    else:
        columns = tl.arange(0, BLOCK)[None, :]
        codes = tl.load(payload[:, None] + columns, mask=columns < length[:, None], other=0).to(tl.int32)
    signed = ((codes ^ (LIMIT + 1)) - (LIMIT + 1)).to(tl.float32)
    scale = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    finite = tl.abs(scale) < float("inf")
    product = signed * scale[:, None]
    endless = tl.where(signed > 0, float("inf"), float("-inf"))
    special = tl.where(signed == 0, 0.0, tl.where(signed < -LIMIT, float("nan"), endless))
    return tl.where(finite[:, None], product, special)


@jit
def decode_blocks(
    payload, scales, out, starts, lengths, scale_places, code_places, blocks,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Values of a payload, in the dtype of `out`. Grid: (programs of ROWS blocks)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < blocks
    length = tl.load(lengths + rows, mask=there, other=0)
    # Rows beyond the last block read the first scale, and store nothing.
    bits = tl.load(scales + tl.load(scale_places + rows, mask=there, other=0).to(tl.int64))
    codes = payload + tl.load(code_places + rows, mask=there, other=0).to(tl.int64)
    result = decoded(codes, bits, length, BLOCK, ROWS, BITS)
    columns = tl.arange(0, BLOCK)[None, :]
    places = tl.load(starts + rows, mask=there, other=0).to(tl.int64)[:, None] + columns
    tl.store(out + places, result.to(out.dtype.element_ty), mask=columns < length[:, None])


@jit
def sum_blocks(
    payload, scales, own, out, starts, lengths, scale_places, code_places, blocks, count, own_rank, stride,
    scale, add, BLOCK: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """out = scale * (sum of contributions), added to `out` if `add` is not 0. Grid: (programs of ROWS blocks).

    Contribution r is encoded at byte r * stride of `payload`, but that of `own_rank`, which is plain in `own`; they are
    added in this order. Tables are those of one contribution.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < blocks
    length = tl.load(lengths + rows, mask=there, other=0)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < length[:, None]
    places = tl.load(starts + rows, mask=there, other=0).to(tl.int64)[:, None] + columns
    scale_place = tl.load(scale_places + rows, mask=there, other=0).to(tl.int64)
    code_place = tl.load(code_places + rows, mask=there, other=0).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for rank in range(count):
        if rank == own_rank:
            total += tl.load(own + places, mask=inside, other=0.0).to(tl.float32)
        else:
            first = stride.to(tl.int64) * rank
            bits = tl.load(scales + first // 2 + scale_place)  # rows beyond the last block: the first scale
            total += decoded(payload + first + code_place, bits, length, BLOCK, ROWS, BITS)
    total *= scale
    if add != 0:
        total += tl.load(out + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)
