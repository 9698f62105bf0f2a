"""Kernels that choose the next tokens on the device, by the rule of `deepspeed.inference.sampler`. Needs Triton.

Tokens are ordered by descending score, equal ones by their number. Top-k, top-p and min-p each keep the first tokens of
this order, so what is kept is a prefix. Its end, and the token that a random number falls on, are places where a sum
over the order passes a bound. They are found without sorting: by bisection over the 31 bits of a score's distance from
the largest, then among the tokens of equal scores by their numbers. Sums of probabilities are fp64.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found]
from triton import jit  # type: ignore[import-not-found]

SEEN, OCCURRED = tl.constexpr(1), tl.constexpr(2)  # in the table of tokens: a bit, and one occurrence in the output


@jit
def draw_numbers(seeds, counters, numbers, rows, BLOCK: tl.constexpr):
    """Random numbers from 0 to below 1, fp64 [rows], each from a seed (int64) and the number of draws before (int32).

    The counter-based generator Philox 4x32-10; `sampling.uniform` gives the same numbers on the host.
    """
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < rows
    seed = tl.load(seeds + places, mask=inside, other=0)
    counter = tl.load(counters + places, mask=inside, other=0).to(tl.uint32)
    zero = counter * 0
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second, _, _ = tl.random.philox_impl(counter, zero, zero, zero, low, high)
    number = (first >> 5).to(tl.float64) * 67108864.0 + (second >> 6).to(tl.float64)
    tl.store(numbers + places, number / 9007199254740992.0, mask=inside)


@jit
def adjust_scores(
    logits, table, scores, options, logit_row, table_row, score_row, vocabulary, has_table, BLOCK: tl.constexpr
):  # fmt: skip
    """Scores after penalties, fp32 [rows, vocabulary]. Grid: (rows, blocks of the vocabulary).

    `options`: fp32 [rows, 8]: temperature, top-k, top-p, min-p, repetition, presence and frequency penalty, unused.
    `table`: int32 [rows, vocabulary]: 1 if a token is in prompt or output, plus 2 for each time in the output.
    """
    row, places = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < vocabulary
    values = tl.load(logits + row * logit_row + places, mask=inside, other=0.0).to(tl.float32)
    if has_table != 0:
        repetition, presence = tl.load(options + row * 8 + 4), tl.load(options + row * 8 + 5)
        frequency = tl.load(options + row * 8 + 6)
        entries = tl.load(table + row * table_row + places, mask=inside, other=0)
        counts = (entries // OCCURRED).to(tl.float32)
        penalised = tl.where(values > 0, values / repetition, values * repetition)
        values = tl.where(entries % OCCURRED == SEEN, penalised, values)
        values = tl.where(counts > 0, values - (presence + frequency * counts), values)
    tl.store(scores + row * score_row + places, values, mask=inside)


@jit
def _bound(number, total):
    """Return a random number's part of a sum: at most 1 - 2^-40 of it, which sums that round otherwise pass too."""
    whole = number * 0.0 + 1.0  # fp64, which a constant is not
    return tl.minimum(number, whole - 9.094947017729282e-13) * total


@jit
def _distances(scores, places, inside, top, temperature):
    """Return how far scores lie below the largest, over the temperature, and their bits, which have the same order."""
    values = tl.load(scores + places, mask=inside, other=float("-inf"))
    below = (top - values) / temperature
    below = tl.where(values == top, 0.0, below)
    return below, below.to(tl.int32, bitcast=True)


@jit
def _sum_to(scores, top, temperature, vocabulary, bits, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of weights of the tokens whose bits are at most `bits`: their number, or their exponentials."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocabulary, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < vocabulary
        below, order = _distances(scores, places, inside, top, temperature)
        weight = tl.where(inside & (order <= bits), 1.0 if COUNTED else tl.exp(-below), 0.0)
        total += weight.to(tl.float64)
    return tl.sum(total, 0)


@jit
def _place_of(scores, top, temperature, vocabulary, bound, reached, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """Return bits and number of the first token of the order with which the sum passes `bound`.

    `reached`: 1 if a sum equal to the bound passes it, else 0. Without such a token: the last one of the order.
    """
    low, high = -1, 0x7F800000  # distances of the tokens before; infinity
    for _ in range(31):
        middle = low + (high - low) // 2
        sums = _sum_to(scores, top, temperature, vocabulary, middle, COUNTED, BLOCK)
        passes = (sums > bound) | ((sums == bound) & (reached != 0))
        low, high = tl.where(passes, low, middle), tl.where(passes, middle, high)
    before = _sum_to(scores, top, temperature, vocabulary, high - 1, COUNTED, BLOCK)
    chosen, last = vocabulary, -1
    for start in range(0, vocabulary, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < vocabulary
        below, order = _distances(scores, places, inside, top, temperature)
        equal = inside & (order == high)
        weight = tl.where(equal, 1.0 if COUNTED else tl.exp(-below), 0.0).to(tl.float64)
        sums = before + tl.cumsum(weight, 0)
        passes = equal & ((sums > bound) | ((sums == bound) & (reached != 0)))
        chosen = tl.minimum(chosen, tl.min(tl.where(passes, places, vocabulary), 0))
        last = tl.maximum(last, tl.max(tl.where(equal, places, -1), 0))
        before += tl.sum(weight, 0)
    return high, tl.where(chosen < vocabulary, chosen, last)


@jit
def _earlier(bits, number, other_bits, other_number):
    """Return the earlier one of two places of the order."""
    first = (bits < other_bits) | ((bits == other_bits) & (number < other_number))
    return tl.where(first, bits, other_bits), tl.where(first, number, other_number)


@jit
def _sum_before(scores, top, temperature, vocabulary, bits, number, BLOCK: tl.constexpr):
    """Return the sum of exponentials of the tokens up to a place of the order, that of the place included."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocabulary, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < vocabulary
        below, order = _distances(scores, places, inside, top, temperature)
        among = inside & ((order < bits) | ((order == bits) & (places <= number)))
        total += tl.where(among, tl.exp(-below), 0.0).to(tl.float64)
    return tl.sum(total, 0)


@jit
def _in_vocabulary(scores, top, temperature, vocabulary, number, BLOCK: tl.constexpr):
    """Return the token that a random number falls on if nothing is cut: sums are in the order of the vocabulary."""
    total = _sum_to(scores, top, temperature, vocabulary, 0x7F800000, False, BLOCK)
    bound = _bound(number, total)
    before, chosen, last = bound * 0.0, vocabulary, 0
    for start in range(0, vocabulary, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < vocabulary
        below, _ = _distances(scores, places, inside, top, temperature)
        weight = tl.where(inside, tl.exp(-below), 0.0).to(tl.float64)
        sums = before + tl.cumsum(weight, 0)
        chosen = tl.minimum(chosen, tl.min(tl.where((sums > bound) & (weight > 0), places, vocabulary), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, places, 0), 0))
        before += tl.sum(weight, 0)
    return tl.where(chosen < vocabulary, chosen, last)


@jit
def choose_tokens(
    scores, options, numbers, table, tokens, table_row, score_row, vocabulary, has_table, BLOCK: tl.constexpr
):  # fmt: skip
    """Token of each row, int32 [rows]; -1 where a score is NaN or the largest is infinite. Grid: (rows).

    `numbers`: random number of each row, fp64. The table of tokens counts the chosen one.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * score_row
    temperature, top_k = tl.load(options + row * 8), tl.load(options + row * 8 + 1)
    top_p, min_p = tl.load(options + row * 8 + 2), tl.load(options + row * 8 + 3)
    top, token, wrong = float("-inf"), vocabulary, 0
    for start in range(0, vocabulary, BLOCK):
        places = start + tl.arange(0, BLOCK)
        values = tl.load(scores + places, mask=places < vocabulary, other=float("-inf"))
        wrong += tl.sum((values != values).to(tl.int32), 0)
        largest = tl.max(tl.where(values == values, values, float("-inf")), 0)
        first = tl.min(tl.where(values == largest, places, vocabulary), 0)
        token = tl.where(largest > top, first, token)
        top = tl.maximum(top, largest)
    finite = (wrong == 0) & (top > float("-inf")) & (top < float("inf"))
    if finite & (temperature > 0):
        coldest = tl.maximum(temperature, 1e-30)
        number = tl.load(numbers + row)
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0):
            bits, last = 0x7F800000, vocabulary
            if top_k > 0:
                bits, last = _place_of(scores, top, coldest, vocabulary, top_k.to(tl.float64), 1, True, BLOCK)
            if top_p < 1.0:
                total = _sum_before(scores, top, coldest, vocabulary, bits, last, BLOCK)
                place, token = _place_of(
                    scores, top, coldest, vocabulary, total * top_p.to(tl.float64), 1, False, BLOCK
                )
                bits, last = _earlier(bits, last, place, token)
            if min_p > 0:
                least = (-tl.log(min_p)).to(tl.int32, bitcast=True)
                bits, last = _earlier(bits, last, least, vocabulary)
            total = _sum_before(scores, top, coldest, vocabulary, bits, last, BLOCK)
            bound = _bound(number, total)
            _, token = _place_of(scores, top, coldest, vocabulary, bound, 0, False, BLOCK)
        else:
            token = _in_vocabulary(scores, top, coldest, vocabulary, number, BLOCK)
    tl.store(tokens + row, tl.where(finite, token, -1))
    if (has_table != 0) & finite:
        entry = table + row * table_row + token
        tl.store(entry, (tl.load(entry) | SEEN) + OCCURRED)
