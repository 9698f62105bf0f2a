"""Products of one row with what comes before and after them in a layer, so that a layer is six launches. Needs Triton.

A norm is divided between two launches. `gemv_add` adds the residual to its outputs and multiplies the sums by the
norm's weight; each of its programs stores the sum of its squares. The next product adds these numbers up and multiplies
its own sums by 1 / sqrt(mean + eps), which needs no value of the row and takes no time before the product.

Products round their sums as separate launches do, before anything else is computed in fp32. A program of `gemv_gate`
has outputs of the gate and those of `up` for the same places; one of `gemv_rotate` has places of a head and those that
are half of the head further.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found]
from triton import jit  # type: ignore[import-not-found]

from deepspeed.ops.triton.gemv_kernels import multiplied

PARTS = tl.constexpr(1024)  # numbers of squares that are read at once


@jit
def norm_factor(squares, parts, width, eps):
    """Return 1 / sqrt(sum of `squares` [parts] / width + eps); 1 if there are no parts: the row is normed already."""
    sums, place = tl.zeros([PARTS], tl.float32), tl.arange(0, PARTS)
    for start in range(0, parts, PARTS):
        sums += tl.load(squares + start + place, mask=start + place < parts, other=0.0)
    factor = 1.0 / tl.sqrt_rn(tl.sum(sums, 0) / width + eps)
    return tl.where(parts > 0, factor, 1.0)


@jit
def pair_of(total, HALF: tl.constexpr):
    """Return the first and the second half of [2 · HALF] numbers."""
    return tl.split(tl.trans(tl.reshape(total, [2, HALF])))


@jit
def products_of_row(
    inputs, squares, weights, scales, offsets, bias, output, known, inputs_, scale_step, has_bias, parts, eps,
    FORM: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Return outputs of a product of the normed row, plus bias, [outputs], rounded to the dtype of the row, in fp32."""
    row = tl.program_id(2)  # 0: grids have two dimensions
    total, _ = multiplied(inputs, weights, scales, offsets, inputs_, row, 1, output, known, inputs_, scale_step,
                          FORM, 1, BLOCK_OUT, BLOCK_WORDS)  # fmt: skip
    total *= norm_factor(squares, parts, inputs_, eps)
    if has_bias != 0:
        total += tl.load(bias + output, mask=known, other=0.0).to(tl.float32)
    return total.to(inputs.dtype.element_ty).to(tl.float32)


@jit
def gemv_add(
    inputs, weights, scales, offsets, bias, residual, norm, out, stream, squares, outputs, inputs_, scale_step,
    has_bias, shift,
    FORM: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """A product of a row, plus `residual` [outputs], goes to `stream`; times (norm + shift), to `out`.

    squares: one for each program, the sum of the squares of what it stores in `stream`. Grid: (blocks of outputs).
    """
    program = tl.program_id(0)
    output = program * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    known = output < outputs
    total = products_of_row(inputs, squares, weights, scales, offsets, bias, output, known, inputs_, scale_step,
                            has_bias, 0, 0.0, FORM, BLOCK_OUT, BLOCK_WORDS)  # fmt: skip
    total += tl.load(residual + output, mask=known, other=0.0).to(tl.float32)
    rounded = total.to(stream.dtype.element_ty)
    tl.store(stream + output, rounded, mask=known)
    values = tl.where(known, rounded.to(tl.float32), 0.0)
    factor = tl.load(norm + output, mask=known, other=0.0).to(tl.float32) + shift
    tl.store(out + output, (values * factor).to(out.dtype.element_ty), mask=known)
    tl.store(squares + program, tl.sum(values * values, 0))


@jit
def gemv_gate(
    inputs, squares, weights, scales, offsets, bias, out, outputs, inputs_, scale_step, has_bias, parts, eps,
    activation,
    FORM: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Activation of a row's gate times up; the matrix has `outputs` rows of the gate and then as many of `up`.

    squares [parts], eps: of the norm of the row. activation: as in `gate_rows`. Grid: (blocks of half BLOCK_OUT).
    """
    HALF: tl.constexpr = BLOCK_OUT // 2
    lane = tl.arange(0, BLOCK_OUT)
    place = tl.program_id(0) * HALF + lane % HALF
    total = products_of_row(inputs, squares, weights, scales, offsets, bias, place + lane // HALF * outputs,
                            place < outputs, inputs_, scale_step, has_bias, parts, eps,
                            FORM, BLOCK_OUT, BLOCK_WORDS)  # fmt: skip
    x, y = pair_of(total, HALF)
    if activation == 0:
        x = x / (1.0 + tl.exp(-x))
    elif activation == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # twice the argument of the hyperbolic tangent
        x = x / (1.0 + tl.exp(-inner))
    output = tl.program_id(0) * HALF + tl.arange(0, HALF)
    tl.store(out + output, (x * y).to(out.dtype.element_ty), mask=output < outputs)


@jit
def gemv_rotate(
    inputs, squares, weights, scales, offsets, bias, cosines, sines, slots, out, key_pool, value_pool,
    inputs_, scale_step, has_bias, parts, eps, heads, cached, head_size, key_slot, key_pool_head, value_slot,
    value_pool_head,
    FORM: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of a row: rotated queries go to `out`, rotated keys and values to the slot of the row.

    The matrix has `heads`, `cached` and `cached` heads of `head_size` rows, a multiple of BLOCK_OUT. cosines, sines
    [head_size]; slots int64 [1]: a negative one is a row of padding, for which nothing is stored. squares, eps: as in
    `gemv_gate`. Grid: (blocks of a head, heads).
    """
    HALF: tl.constexpr = BLOCK_OUT // 2
    lane, head, start = tl.arange(0, BLOCK_OUT), tl.program_id(1), tl.program_id(0) * HALF
    half = head_size // 2
    output = head * head_size + start + lane % HALF + lane // HALF * half
    total = products_of_row(inputs, squares, weights, scales, offsets, bias, output, output >= 0, inputs_, scale_step,
                            has_bias, parts, eps, FORM, BLOCK_OUT, BLOCK_WORDS)  # fmt: skip
    low, high = pair_of(total, HALF)
    slot, place = tl.load(slots), start + tl.arange(0, HALF)
    there = (place >= 0) & (slot >= 0)
    if head < heads + cached:
        cosine, high_cosine = tl.load(cosines + place).to(tl.float32), tl.load(cosines + half + place).to(tl.float32)
        sine, high_sine = tl.load(sines + place).to(tl.float32), tl.load(sines + half + place).to(tl.float32)
        low_result, high_result = low * cosine - high * sine, high * high_cosine + low * high_sine
        if head < heads:
            target = out + head * head_size
        else:
            target = key_pool + slot * key_slot + (head - heads) * key_pool_head
    else:
        target = value_pool + slot * value_slot + (head - heads - cached) * value_pool_head
        low_result, high_result = low, high
    tl.store(target + place, low_result.to(out.dtype.element_ty), mask=there)
    tl.store(target + half + place, high_result.to(out.dtype.element_ty), mask=there)
