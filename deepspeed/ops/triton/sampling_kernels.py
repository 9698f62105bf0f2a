"""Kernels that choose the next tokens on the device, by the rule of `deepspeed.inference.sampler`. Needs Triton.

Tokens are ordered by descending score, equal ones by their number. Top-k, top-p and min-p each keep the first tokens of
this order, so what is kept is a prefix. Its end, and the token that a random number falls on, are places where a sum
over the order passes a bound. Sums of probabilities are fp64. Nothing is sorted:

1. `adjust_scores` applies penalties and finds the largest score of each part of 1,024 tokens. Of a greedy row nothing
   else is needed.
2. `weigh_parts` replaces scores by their distances from the largest one, and counts and weighs the tokens of each part
   up to 32 limits of the distance. Both kernels have a program for each part.
3. `choose_tokens` has one program for each row. It adds the parts up. Without truncation the random number falls into
   one part, and only this part is read. Otherwise a limit is chosen up to which the prefix lies; the tokens up to it,
   mostly few, are gathered in the order of the vocabulary. There each place is found by bisection over the bits of a
   distance between two limits, then among tokens of equal distances by their numbers.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found]
from triton import jit  # type: ignore[import-not-found]

SEEN, OCCURRED = tl.constexpr(1), tl.constexpr(2)  # in the table of tokens: a bit, and one occurrence in the output
LIMITS = tl.constexpr(32)
ENDLESS = tl.constexpr(0x7F800000)  # bits of an infinite distance


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
    logits, table, scores, options, maxima, firsts, logit_row, table_row, score_row, vocabulary, has_table,
    PART: tl.constexpr,
):  # fmt: skip
    """Scores after penalties, fp32, and of each part the largest, and its first token. Grid: (rows, parts).

    `options`: fp32 [rows, 8]: temperature, top-k, top-p, min-p, repetition, presence and frequency penalty, unused.
    `table`: int32 [rows, vocabulary]: 1 if a token is in prompt or output, plus 2 for each time in the output.
    `scores`: [rows, score_row], filled up to whole parts with -inf; not written where the temperature is 0.
    `maxima`: fp32 [rows, parts], NaN if a score of the part is. `firsts`: int32 [rows, parts].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = part * PART + tl.arange(0, PART)
    inside = places < vocabulary
    values = tl.load(logits + row * logit_row + places, mask=inside, other=float("-inf")).to(tl.float32)
    if has_table != 0:
        repetition, presence = tl.load(options + row * 8 + 4), tl.load(options + row * 8 + 5)
        frequency = tl.load(options + row * 8 + 6)
        entries = tl.load(table + row * table_row + places, mask=inside, other=0)
        counts = (entries // OCCURRED).to(tl.float32)
        penalised = tl.where(values > 0, values / repetition, values * repetition)
        values = tl.where(entries % OCCURRED == SEEN, penalised, values)
        values = tl.where(counts > 0, values - (presence + frequency * counts), values)
    largest = tl.max(tl.where(values == values, values, float("-inf")), 0)
    wrong = tl.sum((values != values).to(tl.int32), 0)
    entry = row * tl.num_programs(1) + part
    tl.store(firsts + entry, tl.min(tl.where(values == largest, places, vocabulary), 0))
    tl.store(maxima + entry, tl.where(wrong > 0, float("nan"), largest))
    if tl.load(options + row * 8) > 0:
        tl.store(scores + row * score_row + places, values)


@jit
def _limit(number):
    """Return the bits of a limit of distances, by its number; bits of distances have the same order as distances.

    The limits are 3, 3.25, … 4, 4.5, … 8, 9, … 16, 20, 24, 28, 32, 40, … 112. Those below 3 hold few tokens anyway. No
    token beyond the last one can be drawn, since exp(-104) is 0 in fp32.
    """
    return tl.where(number < 20, number * 0x100000 + 0x40400000, number * 0x200000 + 0x3F000000)


@jit
def _options(options, row):
    """Return temperature, top-k, top-p and min-p of a row, and whether one of the last three applies.

    Temperatures above 0 are raised to the coldest one with which quotients in fp32 have a meaning.
    """
    temperature, top_k = tl.load(options + row * 8), tl.load(options + row * 8 + 1)
    top_p, min_p = tl.load(options + row * 8 + 2), tl.load(options + row * 8 + 3)
    truncates = (top_k > 0) | (top_p < 1.0) | (min_p > 0)
    return tl.where(temperature > 0, tl.maximum(temperature, 1e-30), 0.0), top_k, top_p, min_p, truncates


@jit
def _largest(maxima, firsts, parts, vocabulary, TILE: tl.constexpr):
    """Return the largest score of a row, its first token, and whether the row may be sampled from: no score is NaN,
    and the largest is finite."""
    top, token, wrong = float("-inf"), vocabulary, 0
    for start in range(0, parts, TILE):
        columns = start + tl.arange(0, TILE)
        values = tl.load(maxima + columns, mask=columns < parts, other=float("-inf"))
        tokens = tl.load(firsts + columns, mask=columns < parts, other=0)
        wrong += tl.sum((values != values).to(tl.int32), 0)
        largest = tl.max(tl.where(values == values, values, float("-inf")), 0)
        first = tl.min(tl.where(values == largest, tokens, vocabulary), 0)
        token = tl.where(largest > top, first, token)
        top = tl.maximum(top, largest)
    return top, token, (wrong == 0) & (top > float("-inf")) & (top < float("inf"))


@jit
def weigh_parts(
    scores, options, maxima, firsts, weights, counts, score_row, vocabulary,
    PART: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Distances of scores below the largest, over the temperature, in place of the scores. Grid: (rows, parts).

    `weights`: fp64 [rows, parts, LIMITS]: sums of exponentials of minus the distances up to each limit.
    `counts`: int32 [rows, parts, LIMITS]: number of tokens up to each limit.
    Without truncation only the last entry of `weights` is written; with temperature 0, nothing.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, top_p, min_p, truncates = _options(options, row)
    if temperature > 0:
        parts = tl.num_programs(1)
        top, token, finite = _largest(maxima + row * parts, firsts + row * parts, parts, vocabulary, TILE)
        pointers = scores + row * score_row + part * PART + tl.arange(0, PART)
        values = tl.load(pointers)
        below = tl.where(values == top, 0.0, (top - values) / temperature)
        tl.store(pointers, below)
        bits = below.to(tl.int32, bitcast=True)
        weight = tl.exp(-below).to(tl.float64)
        entry = (row * parts + part) * LIMITS
        if truncates:
            for first in tl.static_range(0, LIMITS, GROUP):
                columns = first + tl.arange(0, GROUP)
                among = bits[None, :] <= _limit(columns)[:, None]
                tl.store(weights + entry + columns, tl.sum(tl.where(among, weight[None, :], 0.0), 1))
                tl.store(counts + entry + columns, tl.sum(among.to(tl.int32), 1))
        else:
            tl.store(weights + entry + (LIMITS - 1), tl.sum(weight, 0))


@jit
def _bound(number, total):
    """Return a random number's part of a sum: at most 1 - 2^-40 of it, which sums that round otherwise pass too."""
    whole = number * 0.0 + 1.0  # fp64, which a constant is not
    return tl.minimum(number, whole - 9.094947017729282e-13) * total


@jit
def _whole_weights(weights, columns, parts):
    """Return the sums of exponentials of some parts: their last entries."""
    return tl.load(weights + columns * LIMITS + (LIMITS - 1), mask=columns < parts, other=0.0)


@jit
def _in_vocabulary(distances, weights, parts, number, PART: tl.constexpr, TILE: tl.constexpr):
    """Return the token that a random number falls on if nothing is cut: sums are in the order of the vocabulary."""
    zero = number * 0.0
    total, passed, before, part = zero, zero, zero, parts - 1
    for start in range(0, parts, TILE):
        total += tl.sum(_whole_weights(weights, start + tl.arange(0, TILE), parts), 0)
    bound = _bound(number, total)
    for start in range(0, parts, TILE):
        columns = start + tl.arange(0, TILE)
        weight = _whole_weights(weights, columns, parts)
        ends = passed + tl.cumsum(weight, 0)
        part = tl.minimum(part, tl.min(tl.where((ends > bound) & (weight > 0), columns, parts), 0))
        passed += tl.sum(weight, 0)
    for start in range(0, parts, TILE):
        columns = start + tl.arange(0, TILE)
        before += tl.sum(tl.where(columns < part, _whole_weights(weights, columns, parts), 0.0), 0)
    places = part * PART + tl.arange(0, PART)
    weight = tl.exp(-tl.load(distances + places)).to(tl.float64)
    sums = before + tl.cumsum(weight, 0)
    chosen = tl.min(tl.where((sums > bound) & (weight > 0), places, ENDLESS), 0)
    return tl.minimum(chosen, tl.max(tl.where(weight > 0, places, 0), 0))


@jit
def _over_parts(entries, parts, TILE: tl.constexpr):
    """Return the sums over a row's parts of what they have up to each limit, fp64 [LIMITS]."""
    sums = tl.zeros([LIMITS], tl.float64)
    for start in range(0, parts, TILE):
        columns = start + tl.arange(0, TILE)[:, None]
        pointers = entries + columns * LIMITS + tl.arange(0, LIMITS)[None, :]
        sums += tl.sum(tl.load(pointers, mask=columns < parts, other=0).to(tl.float64), 0)
    return sums


@jit
def _gather(distances, members, parts, cut, PART: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Move the distances up to a limit to the front of a row, in their order, and return their number.

    Their tokens are written to `members`. A block of infinite distances follows, so later loads need no mask.
    """
    count = 0
    for start in range(0, parts * PART, CHUNK):
        places = start + tl.arange(0, CHUNK)
        below = tl.load(distances + places, mask=places < parts * PART, other=float("inf"))
        among = below.to(tl.int32, bitcast=True) <= cut
        ends = count + tl.cumsum(among.to(tl.int32), 0)
        tl.debug_barrier()  # what is written may lie where another thread reads
        tl.store(distances + ends - 1, below, mask=among)
        tl.store(members + ends - 1, places, mask=among)
        count += tl.sum(among.to(tl.int32), 0)
    tl.store(distances + count + tl.arange(0, BLOCK), tl.full([BLOCK], float("inf"), tl.float32))
    tl.debug_barrier()
    return count


@jit
def _weights(distances, start, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the places of a block of gathered tokens, the bits of their distances, and their weights: exponentials,
    or 1 each."""
    places = start + tl.arange(0, BLOCK)
    below = tl.load(distances + places)
    weight = below * 0.0 + 1.0 if COUNTED else tl.exp(-below)
    return places, below.to(tl.int32, bitcast=True), weight.to(tl.float64)


@jit
def _sum_to(distances, count, bits, place, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of weights of the gathered tokens before some bits, and of those with these bits up to a place."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        places, order, weight = _weights(distances, start, COUNTED, BLOCK)
        total += tl.where((order < bits) | ((order == bits) & (places <= place)), weight, 0.0)
    return tl.sum(total, 0)


@jit
def _around(distances, count, bits, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of weights of the gathered tokens up to some bits, the largest bits among these, and the smallest
    bits among the others."""
    total = tl.zeros([BLOCK], tl.float64)
    largest, smallest = tl.full([BLOCK], -1, tl.int32), tl.full([BLOCK], ENDLESS, tl.int32)
    for start in range(0, count, BLOCK):
        places, order, weight = _weights(distances, start, COUNTED, BLOCK)
        among = order <= bits
        total += tl.where(among, weight, 0.0)
        largest = tl.maximum(largest, tl.where(among, order, -1))
        smallest = tl.minimum(smallest, tl.where(among, ENDLESS, order))
    return tl.sum(total, 0), tl.max(largest, 0), tl.min(smallest, 0)


@jit
def _between(sums, bound, REACHED: tl.constexpr):
    """Return the limits between which a sum passes a bound, by the sums up to each limit: bits before, and bits up to.

    `REACHED`: whether a sum equal to the bound passes it.
    """
    columns = tl.arange(0, LIMITS)
    passes = sums >= bound if REACHED else sums > bound
    first = tl.min(tl.where(passes, columns, LIMITS - 1), 0)
    return tl.where(first > 0, _limit(first - 1), -1), _limit(first)


@jit
def _place_of(
    distances, count, sums, bound, REACHED: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return bits and place of the first gathered token, in descending order of scores, with which the sum passes
    `bound`; the last one if the sum passes it nowhere, which only rounding can do.

    Each step halves a range of bits and moves its end to a token's, so there are few steps for few tokens.
    `sums`: sums up to each limit, fp64 [LIMITS]. `REACHED`: as in `_between`.
    """
    low, high = _between(sums, bound, REACHED)
    bits = high
    while high - low > 1:
        passed, largest, following = _around(distances, count, low + (high - low) // 2, COUNTED, BLOCK)
        passes = (passed >= bound if REACHED else passed > bound) | (following == ENDLESS)
        bits = tl.where(passes, largest, following)
        low, high = tl.where(passes, low, bits - 1), tl.where(passes, bits, high)
    before = _sum_to(distances, count, bits, -1, COUNTED, BLOCK)
    chosen, last = count, -1
    for start in range(0, count, BLOCK):
        places, order, weight = _weights(distances, start, COUNTED, BLOCK)
        equal = order == bits
        weight = tl.where(equal, weight, 0.0)
        passed = before + tl.cumsum(weight, 0)
        passes = equal & (passed >= bound if REACHED else passed > bound)
        chosen = tl.minimum(chosen, tl.min(tl.where(passes, places, count), 0))
        last = tl.maximum(last, tl.max(tl.where(equal, places, -1), 0))
        before += tl.sum(weight, 0)
    return bits, tl.where(chosen < count, chosen, last)


@jit
def _earlier(bits, place, other_bits, other_place):
    """Return the earlier one of two places of the order."""
    first = (bits < other_bits) | ((bits == other_bits) & (place < other_place))
    return tl.where(first, bits, other_bits), tl.where(first, place, other_place)


@jit
def _in_order(
    distances, members, weights, counts, parts, number, top_k, top_p, min_p,
    PART: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the token that a random number falls on among those that are kept: sums are in the order of scores."""
    sums, numbers = _over_parts(weights, parts, TILE), _over_parts(counts, parts, TILE)
    columns = tl.arange(0, LIMITS)
    whole = tl.sum(tl.where(columns == LIMITS - 1, sums, 0.0), 0)
    share, wanted, endless = top_p.to(tl.float64), top_k.to(tl.float64), whole + float("inf")
    least = tl.where(min_p > 0, (-tl.log(min_p)).to(tl.int32, bitcast=True), ENDLESS)
    # The first limit up to which the prefix lies. Top-p is a share of what top-k keeps, so all of that is gathered.
    closes = numbers >= tl.where(top_k > 0, wanted, endless)
    closes = closes | (sums >= tl.where((top_p < 1.0) & (top_k <= 0), whole * share, endless))
    closes = closes | (_limit(columns) >= tl.where((top_p < 1.0) & (top_k > 0), ENDLESS, least))
    cut = tl.min(tl.where(closes, _limit(columns), _limit(LIMITS - 1)), 0)
    count = _gather(distances, members, parts, cut, PART, CHUNK, BLOCK)
    bits, last = ENDLESS, count
    if (top_k > 0) & (count > wanted):
        bits, last = _place_of(distances, count, numbers, wanted, True, True, BLOCK)
    if top_p < 1.0:
        whole = tl.where(top_k > 0, _sum_to(distances, count, bits, last, False, BLOCK), whole)
        place_bits, place = _place_of(distances, count, sums, whole * share, True, False, BLOCK)
        bits, last = _earlier(bits, last, place_bits, place)
    bits, last = _earlier(bits, last, least, count)
    bound = _bound(number, _sum_to(distances, count, bits, last, False, BLOCK))
    bits, place = _place_of(distances, count, sums, bound, False, False, BLOCK)
    return tl.load(members + place)


@jit
def choose_tokens(
    scores, options, numbers, maxima, firsts, weights, counts, members, table, tokens, table_row, score_row,
    vocabulary, has_table, PART: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Token of each row, int32 [rows]; -1 where a score is NaN or the largest is infinite. Grid: (rows).

    `scores`: distances, by `weigh_parts`; overwritten. `numbers`: random number of each row, fp64.
    `members`: int32 [rows, score_row], scratch memory. The table of tokens counts the chosen one.
    """
    row, parts = tl.program_id(0).to(tl.int64), tl.cdiv(vocabulary, PART)
    temperature, top_k, top_p, min_p, truncates = _options(options, row)
    top, token, finite = _largest(maxima + row * parts, firsts + row * parts, parts, vocabulary, TILE)
    if finite & (temperature > 0):
        number, distances = tl.load(numbers + row), scores + row * score_row
        weights, counts = weights + row * parts * LIMITS, counts + row * parts * LIMITS
        if truncates:
            token = _in_order(
                distances, members + row * score_row, weights, counts, parts, number, top_k, top_p, min_p,
                PART, TILE, CHUNK, BLOCK,
            )  # fmt: skip
        else:
            token = _in_vocabulary(distances, weights, parts, number, PART, TILE)
    tl.store(tokens + row, tl.where(finite, token, -1))
    if (has_table != 0) & finite:
        entry = table + row * table_row + token
        tl.store(entry, (tl.load(entry) | SEEN) + OCCURRED)
