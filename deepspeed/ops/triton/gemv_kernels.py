"""Products of one or two rows with a matrix in 16, 8 or 4 bits, as fast as the matrix is read. Needs Triton.

A thread reads four neighbouring words of 32 bits (16 bytes) of several rows of the matrix and decodes them in registers
by shifts and masks, without matrix instructions. While a block is computed, the next one is on its way. A thread adds
the products of its own words in fp32; the threads' sums are added once, after the last block.

Numbers are decoded by as few instructions as possible, to a power of two of their value, and inputs are multiplied by
2^60 or less before. Integers stay where they are in their word and become subnormal numbers of fp32, n · 2^-149; inputs
of a number that stands k bits higher are multiplied by 2^-k more. Sums are multiplied by what is left at the end.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found]
from triton import jit  # type: ignore[import-not-found]

# Forms of a matrix: 16 bits of the dtype of the inputs; int8; 4 bits in groups of 32; e4m3.
DENSE, INT8, INT4, FLOAT8 = tl.constexpr(16), tl.constexpr(8), tl.constexpr(4), tl.constexpr(7)
INTEGERS_LEFT = tl.constexpr(2.0**89)  # what sums over integers are multiplied by: 149 - 60
FLOAT8_LEFT = tl.constexpr(2.0**60)  # an e4m3 is decoded to 2^-120 of its value


@jit
def low(pair, dtype: tl.constexpr):
    """Return the number in the low half of a word, in fp32."""
    if dtype == tl.bfloat16:
        return (pair << 16).to(tl.float32, bitcast=True)
    else:
        return pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def high(pair, dtype: tl.constexpr):
    """Return the number in the high half of a word, in fp32."""
    if dtype == tl.bfloat16:
        return (pair & -65536).to(tl.float32, bitcast=True)
    else:
        return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def int8_of(word, number: tl.constexpr):
    """Return byte `number` of a word, 0 to 255, as a subnormal."""
    if number < 2:
        return (word & (255 << 8 * number)).to(tl.float32, bitcast=True)
    else:
        return ((word >> 16) & (255 << 8 * (number - 2))).to(tl.float32, bitcast=True)


@jit
def int4_of(word, number: tl.constexpr):
    """Return the four bits `number` of a word as a subnormal."""
    if number < 4:
        return (word & (15 << 4 * number)).to(tl.float32, bitcast=True)
    else:
        return ((word >> 16) & (15 << 4 * (number - 4))).to(tl.float32, bitcast=True)


@jit
def float8_of(word, number: tl.constexpr):
    """Return byte `number` of a word, an e4m3: exponent and mantissa get the places of fp32."""
    return ((word << (24 - 8 * number) >> 4) & -0x78100000).to(tl.float32, bitcast=True)


@jit
def add_four(total, word, first, second, FORM: tl.constexpr, START: tl.constexpr, dtype: tl.constexpr):
    """Return total [outputs, words] + four numbers of a word, from number START on, times two pairs of inputs."""
    a, b = low(first, dtype)[None, :], high(first, dtype)[None, :]
    c, d = low(second, dtype)[None, :], high(second, dtype)[None, :]
    if FORM == INT8:
        total = tl.fma(int8_of(word, 0), a * 2.0**60, total)
        total = tl.fma(int8_of(word, 1), b * 2.0**52, total)
        total = tl.fma(int8_of(word, 2), c * 2.0**60, total)
        return tl.fma(int8_of(word, 3), d * 2.0**52, total)
    elif FORM == FLOAT8:
        total = tl.fma(float8_of(word, 0), a * 2.0**60, total)
        total = tl.fma(float8_of(word, 1), b * 2.0**60, total)
        total = tl.fma(float8_of(word, 2), c * 2.0**60, total)
        return tl.fma(float8_of(word, 3), d * 2.0**60, total)
    else:
        total = tl.fma(int4_of(word, START), a * 2.0**60, total)
        total = tl.fma(int4_of(word, START + 1), b * 2.0**56, total)
        total = tl.fma(int4_of(word, START + 2), c * 2.0**52, total)
        return tl.fma(int4_of(word, START + 3), d * 2.0**48, total)


@jit
def add_words(total, word, x, y, FORM: tl.constexpr, dtype: tl.constexpr):
    """Return total [outputs, words] + words of the matrix times their inputs.

    x, y [words]: the inputs of each word, as bits: two (y is not used), four (likewise), or eight.
    """
    if FORM == DENSE:
        total = tl.fma(low(word, dtype), low(x, dtype)[None, :], total)
        return tl.fma(high(word, dtype), high(x, dtype)[None, :], total)
    else:
        word = word ^ -0x7F7F7F80 if FORM == INT8 else word  # from 0 to 255
        total = add_four(total, word, x.to(tl.int32), (x >> 32).to(tl.int32), FORM, 0, dtype)
        if FORM == INT4:
            total = add_four(total, word, y.to(tl.int32), (y >> 32).to(tl.int32), FORM, 4, dtype)
        return total


@jit
def sum_four(bits, dtype: tl.constexpr):
    """Return the sums of four inputs each."""
    first, second = bits.to(tl.int32), (bits >> 32).to(tl.int32)
    return (low(first, dtype) + high(first, dtype)) + (low(second, dtype) + high(second, dtype))


@jit
def add_inputs(sums, x, y, FORM: tl.constexpr, dtype: tl.constexpr):
    """Return sums [words] + the inputs of each word, where the numbers of a matrix are decoded with a base."""
    if FORM == INT8:
        sums += sum_four(x, dtype)
    elif FORM == INT4:
        sums += sum_four(x, dtype) + sum_four(y, dtype)
    return sums


@jit
def load_inputs(inputs, row, rows, input_row, word, inside, PART: tl.constexpr, FORM: tl.constexpr):
    """Return the inputs of words of a row, as bits: two or four of each word; of 4 bits, part 0 or 1 of eight."""
    start = inputs + row.to(tl.int64) * input_row
    there = inside & (row < rows)
    if FORM == DENSE:
        return tl.load(start.to(tl.pointer_type(tl.int32), bitcast=True) + word, mask=there, other=0)
    elif FORM == INT4:
        return tl.load(start.to(tl.pointer_type(tl.int64), bitcast=True) + 2 * word + PART, mask=there, other=0)
    else:
        return tl.load(start.to(tl.pointer_type(tl.int64), bitcast=True) + word, mask=there, other=0)


@jit
def scaled_groups(total, products, sums, scale, offset, GROUPS: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """Return total [outputs, groups] + products · scale + sums · offset, of products and sums by word, four a group."""
    products = tl.sum(tl.reshape(products, [BLOCK_OUT, GROUPS, 4]), 2)
    sums = tl.sum(tl.reshape(sums, [GROUPS, 4]), 1)[None, :]
    return tl.fma(sums, offset, tl.fma(products, scale * INTEGERS_LEFT, total))


@jit
def load_scales(scales, offsets, output, there, start, groups, GROUPS: tl.constexpr):
    """Return scales and offsets of outputs, each [outputs, GROUPS], from group `start` on."""
    group = start + tl.arange(0, GROUPS)
    entry = output.to(tl.int64)[:, None] * groups + group[None, :]
    known = there & (group < groups)[None, :]
    return tl.load(scales + entry, mask=known, other=0.0), tl.load(offsets + entry, mask=known, other=0.0)


@jit
def add_block(
    total, sums, weight, x, y, scale, offset,
    FORM: tl.constexpr, dtype: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Return total [outputs, words, or groups in 4 bits] + a block of the matrix times its inputs, and sums of inputs.

    In 4 bits the sums are in the total, with the offsets; `scale` and `offset` are not read in other forms.
    """
    if FORM == INT4:
        products = add_words(tl.zeros([BLOCK_OUT, BLOCK_WORDS], tl.float32), weight, x, y, FORM, dtype)
        added = add_inputs(tl.zeros([BLOCK_WORDS], tl.float32), x, y, FORM, dtype)
        return scaled_groups(total, products, added, scale, offset, BLOCK_WORDS // 4, BLOCK_OUT), sums
    else:
        return add_words(total, weight, x, y, FORM, dtype), add_inputs(sums, x, y, FORM, dtype)


@jit
def store_row(out, out_row, row, rows, output, outputs, total, bias, has_bias):
    """Add the bias to the outputs of a row and store them."""
    there = (output < outputs) & (row < rows)
    if has_bias != 0:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * out_row + output, total.to(out.dtype.element_ty), mask=there)


@jit
def multiplied(
    inputs, weights, scales, offsets, input_row, row, rows, output, known, inputs_, scale_step,
    FORM: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Return the products of rows `row` and (with two ROWS) `row` + 1 with rows `output` of a matrix, each [outputs].

    known [outputs]: whether there is such an output; others as in `gemv`.
    """
    there = known[:, None]
    dtype: tl.constexpr = inputs.dtype.element_ty
    GROUPS: tl.constexpr = BLOCK_WORDS // 4
    OF_WORD: tl.constexpr = 2 if FORM == DENSE else 8 if FORM == INT4 else 4
    words = tl.multiple_of(inputs_ // OF_WORD, 4)
    word = tl.arange(0, BLOCK_WORDS)
    starts = weights.to(tl.pointer_type(tl.int32), bitcast=True) + output.to(tl.int64)[:, None] * words + word[None, :]
    first = tl.zeros([BLOCK_OUT, GROUPS if FORM == INT4 else BLOCK_WORDS], tl.float32)
    second = first
    sums = tl.zeros([BLOCK_WORDS], tl.float32)
    other_sums = sums
    weight = tl.load(starts, mask=there & (word < words)[None, :], other=0)
    for start in range(0, words, BLOCK_WORDS):
        place = start + word
        inside, after = place < words, place + BLOCK_WORDS
        x = load_inputs(inputs, row, rows, input_row, place, inside, 0, FORM)
        y = load_inputs(inputs, row, rows, input_row, place, inside, 1, FORM) if FORM == INT4 else x
        following = tl.load(starts + start + BLOCK_WORDS, mask=there & (after < words)[None, :], other=0)
        scale, offset = x, x
        if FORM == INT4:
            scale, offset = load_scales(scales, offsets, output, there, start // 4, words // 4, GROUPS)
        first, sums = add_block(first, sums, weight, x, y, scale, offset, FORM, dtype, BLOCK_OUT, BLOCK_WORDS)
        if ROWS > 1:
            x = load_inputs(inputs, row + 1, rows, input_row, place, inside, 0, FORM)
            y = load_inputs(inputs, row + 1, rows, input_row, place, inside, 1, FORM) if FORM == INT4 else x
            second, other_sums = add_block(second, other_sums, weight, x, y, scale, offset, FORM, dtype,
                                           BLOCK_OUT, BLOCK_WORDS)  # fmt: skip
        weight = following
    total, other = tl.sum(first, 1), tl.sum(second, 1)
    if FORM == INT8:
        total = total * INTEGERS_LEFT - 128.0 * tl.sum(sums, 0)
        other = other * INTEGERS_LEFT - 128.0 * tl.sum(other_sums, 0)
    if FORM == INT8 or FORM == FLOAT8:
        factor = tl.load(scales + output * scale_step, mask=known, other=0.0)
        factor = factor * FLOAT8_LEFT if FORM == FLOAT8 else factor
        total, other = total * factor, other * factor
    return total, other


@jit
def gemv(
    inputs, weights, scales, offsets, bias, out, input_row, out_row, rows, outputs, inputs_, scale_step, has_bias,
    FORM: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """inputs [rows, inputs_] times a matrix [outputs, inputs_] transposed, plus bias.

    weights: the matrix as words of 32 bits, [outputs, inputs_ · bits / 32], in the FORM `DENSE`, `INT8`, `INT4` or
    `FLOAT8`. scales: one for each output (in 4 bits: for each 32 inputs, with offsets), `scale_step` apart.
    Grid: (groups of ROWS rows, blocks of outputs). ROWS: 1 or 2. A row has equal bits with both.
    """
    row = tl.program_id(0) * ROWS
    output = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    total, other = multiplied(inputs, weights, scales, offsets, input_row, row, rows, output, output < outputs, inputs_,
                              scale_step, FORM, ROWS, BLOCK_OUT, BLOCK_WORDS)  # fmt: skip
    store_row(out, out_row, row, rows, output, outputs, total, bias, has_bias)
    if ROWS > 1:
        store_row(out, out_row, row + 1, rows, output, outputs, other, bias, has_bias)
