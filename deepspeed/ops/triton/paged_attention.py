"""Attention over the pages of a KV cache: one pass for prompts, next tokens and drafts. Needs Triton.

A program computes a tile: some rows of one sequence, for some query heads of one key-value head. Keys are read in
blocks, blocks belong to splits of fixed length, and splits are joined from the first to the last. The boundaries of
blocks and splits are positions in the sequence, so a row's bits depend on its own keys alone: not on the other rows of
its tile, on the batch, or on whether splits are joined within a program (`attend_whole`) or after it (`attend_split`
and `join_splits`). A block in which a row sees nothing leaves its bits as they are.

Arguments of all kernels, in elements where they are sizes:

- queries [rows, heads, head size]; keys, values [slots, key-value heads, head size]; out [rows, heads, value size].
  Slots of page p start at (p + 1) · PAGE.
- table: int32 [sequences, pages], page numbers. Entries after a sequence's last page are never read.
- tiles: int32 [tiles, 4]: sequence (-1: nothing to do), first row in the pass, number of rows, position of the first.
- partial: fp32 [rows, heads, splits, value size], weighted values of each split; stats: fp32 [rows, heads, splits, 2],
  their largest score and the sum of weights.
- scale: factor of the scores; cap: soft cap; window: keys that a row sees (0: all); chunk: positions of one chunk,
  whose rows see only keys of the same (0: none); sinks [heads]: scores that receive weight but have no value, if
  has_sinks.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-not-found]
from triton import jit  # type: ignore[import-not-found]

LOG2E = tl.constexpr(1.4426950408889634)


@jit
def read_tile(tiles, tile, group, tile_heads, window, chunk, BLOCK_ROWS: tl.constexpr):
    """Return what the rows of this program's tile are: sequence, rows and heads, whether each is there, positions, and
    the first key that each sees; then the keys that the tile reads, from the first to below the last; then those that
    all rows see, from the last of the rows' first keys up to the first row's position, in the other order."""
    tile *= 4
    sequence, first = tl.load(tiles + tile), tl.load(tiles + tile + 1)
    count, position = tl.load(tiles + tile + 2), tl.load(tiles + tile + 3)
    blocks = tl.cdiv(group, tile_heads)
    cached, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    lanes = tl.arange(0, BLOCK_ROWS)
    tokens, members = lanes // tile_heads, block * tile_heads + lanes % tile_heads
    there = (tokens < count) & (members < group) & (sequence >= 0)
    positions = position + tokens
    lows, low = tl.zeros_like(positions), position * 0
    if window > 0:
        lows, low = tl.maximum(positions - window + 1, 0), tl.maximum(position - window + 1, 0)
    if chunk > 0:
        lows, low = tl.maximum(lows, positions // chunk * chunk), tl.maximum(low, position // chunk * chunk)
    high = tl.where(sequence >= 0, position + count, low)
    last = position * 0
    if window > 0:
        last = tl.maximum(position + count - window, 0)
    if chunk > 0:
        last = tl.maximum(last, (position + count - 1) // chunk * chunk)
    return sequence, cached, first + tokens, cached * group + members, there, positions, lows, low, high, position, last


@jit
def join(top, total, values, other_top, other_total, other_values):
    """Join the results of two sets of keys: largest score, sums of weights [rows, columns], weighted values of rows."""
    joined = tl.maximum(top, other_top)
    base = tl.where(joined == float("-inf"), 0.0, joined)
    decay, other_decay = tl.exp2(top - base), tl.exp2(other_top - base)
    return (
        joined,
        total * decay[:, None] + other_total * other_decay[:, None],
        values * decay[:, None] + other_values * other_decay[:, None],
    )


@jit
def finish(top, total, values, sinks, heads, there, has_sinks):
    """Return the rows' attention from their results over all keys."""
    sink = tl.load(sinks + heads, mask=there & (has_sinks != 0), other=float("-inf")).to(tl.float32) * LOG2E
    base = tl.maximum(top, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    decay = tl.exp2(top - base)
    total = total * decay + tl.exp2(sink - base)
    return values * decay[:, None] / total[:, None]


@jit
def load_queries(queries, row_stride, head_stride, rows, heads, there, HEAD: tl.constexpr, BLOCK_HEAD: tl.constexpr):
    """Return the queries of a tile, [BLOCK_ROWS, BLOCK_HEAD], zero where there is none."""
    places = tl.arange(0, BLOCK_HEAD)
    starts = rows.to(tl.int64) * row_stride + heads * head_stride
    return tl.load(
        queries + starts[:, None] + places[None, :], mask=there[:, None] & (places < HEAD)[None, :], other=0.0
    )


@jit
def store_rows(
    out, row_stride, head_stride, rows, heads, there, values, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr
):
    """Store the attention of a tile's rows."""
    places = tl.arange(0, BLOCK_VALUE)
    starts = rows.to(tl.int64) * row_stride + heads * head_stride
    tl.store(
        out + starts[:, None] + places[None, :],
        values.to(out.dtype.element_ty),
        mask=there[:, None] & (places < VALUE)[None, :],
    )


@jit
def mask_scores(scores, numbers, positions, lows):
    """Return scores [rows, keys] without those of keys that a row does not see."""
    seen = (numbers[None, :] <= positions[:, None]) & (numbers[None, :] >= lows[:, None])
    return tl.where(seen, scores, float("-inf"))


@jit
def attend_block(
    query, keys, values, pages, block, top, total, result, positions, lows, low, high,
    first, last, scale, cap, key_slot, value_slot,
    HEAD: tl.constexpr, VALUE: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_KEYS: tl.constexpr, CAPPED: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to largest score, sums of weights [BLOCK_ROWS, 8] and weighted values of a tile's rows.

    Sums over keys are products of matrices, whose order is the same in all tiles; their columns are equal. SKIP:
    whether blocks from `last` to `first` are not masked, since all rows see them.
    """
    key_places, value_places = tl.arange(0, BLOCK_HEAD), tl.arange(0, BLOCK_VALUE)
    numbers = block + tl.arange(0, BLOCK_KEYS)
    inside = (numbers >= low) & (numbers < high)
    slots = (pages.to(tl.int64) + 1) * PAGE + numbers % PAGE
    key = tl.load(
        keys + slots[None, :] * key_slot + key_places[:, None],
        mask=inside[None, :] & (key_places < HEAD)[:, None],
        other=0.0,
    )
    scores = tl.dot(query, key.to(query.dtype), input_precision="ieee")
    factor = scale * LOG2E
    if CAPPED:
        scores = scores * (scale / cap)
        size = tl.exp2(tl.abs(scores) * (-2.0 * LOG2E))  # of the hyperbolic tangent: never overflows
        scores = tl.where(scores < 0, size - 1.0, 1.0 - size) / (1.0 + size)
        factor = cap * LOG2E
    # Most blocks of a prompt are seen by all rows.
    if SKIP:  # most blocks are seen by all rows
        if (block + BLOCK_KEYS - 1 > first) | (block < last):
            scores = mask_scores(scores, numbers, positions, lows)
    else:
        scores = mask_scores(scores, numbers, positions, lows)
    highest = tl.maximum(top, tl.max(scores, 1) * factor)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    decay = tl.exp2(top - base)
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None])).to(query.dtype)
    value = tl.load(
        values + slots[:, None] * value_slot + value_places[None, :],
        mask=inside[:, None] & (value_places < VALUE)[None, :],
        other=0.0,
    )
    ones = tl.full([BLOCK_KEYS, 8], 1.0, tl.float32).to(query.dtype)
    total = tl.dot(weights, ones, total * decay[:, None], input_precision="ieee")
    result = tl.dot(weights, value.to(query.dtype), result * decay[:, None], input_precision="ieee")
    return highest, total, result


@jit
def block_pages(table_row, block, low, high, PAGE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Return the page of each key of a block; -1 where the tile reads none."""
    numbers = block + tl.arange(0, BLOCK_KEYS)
    return tl.load(table_row + numbers // PAGE, mask=(numbers >= low) & (numbers < high), other=-1)


@jit
def attend_whole(
    queries, keys, values, out, sinks, table, tiles,
    query_row, query_head, key_slot, key_head, value_slot, value_head, out_row, out_head, table_row,
    scale, cap, window, chunk, group, tile_heads, has_sinks,
    HEAD: tl.constexpr, VALUE: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLIT: tl.constexpr, CAPPED: tl.constexpr,
    SKIP: tl.constexpr,
):  # fmt: skip
    """Attention of a tile over all its keys. Grid: (tiles, key-value heads · blocks of query heads)."""
    # The last tiles of a prompt read most keys: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence, cached, rows, heads, there, positions, lows, low, high, first, last = read_tile(
        tiles, tile, group, tile_heads, window, chunk, BLOCK_ROWS
    )
    query = load_queries(queries, query_row, query_head, rows, heads, there, HEAD, BLOCK_HEAD)
    table += sequence.to(tl.int64) * table_row
    keys += cached * key_head
    values += cached * value_head
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS, 8], tl.float32)
    result = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    split_top, split_total, split_result = top, total, result
    start = low // BLOCK_KEYS * BLOCK_KEYS
    pages = block_pages(table, start, low, high, PAGE, BLOCK_KEYS)
    for block in range(start, high, BLOCK_KEYS):
        if (block % SPLIT == 0) & (block > start):
            top, total, result = join(top, total, result, split_top, split_total, split_result)
            split_top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
            split_total = tl.zeros([BLOCK_ROWS, 8], tl.float32)
            split_result = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
        next_pages = block_pages(table, block + BLOCK_KEYS, low, high, PAGE, BLOCK_KEYS)
        split_top, split_total, split_result = attend_block(
            query, keys, values, pages, block, split_top, split_total, split_result, positions, lows, low, high,
            first, last, scale, cap, key_slot, value_slot,
            HEAD, VALUE, BLOCK_HEAD, BLOCK_VALUE, PAGE, BLOCK_KEYS, CAPPED, SKIP,
        )  # fmt: skip
        pages = next_pages
    top, total, result = join(top, total, result, split_top, split_total, split_result)
    result = finish(top, tl.max(total, 1), result, sinks, heads, there, has_sinks)
    store_rows(out, out_row, out_head, rows, heads, there, result, VALUE, BLOCK_VALUE)


@jit
def attend_split(
    queries, keys, values, partial, stats, table, tiles,
    query_row, query_head, key_slot, key_head, value_slot, value_head, table_row,
    scale, cap, window, chunk, group, tile_heads, all_heads, splits,
    HEAD: tl.constexpr, VALUE: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLIT: tl.constexpr, CAPPED: tl.constexpr,
    SKIP: tl.constexpr,
):  # fmt: skip
    """Results of a tile over one split, for `join_splits`. Grid: (tiles, as above, splits)."""
    sequence, cached, rows, heads, there, positions, lows, low, high, first, last = read_tile(
        tiles, tl.program_id(0), group, tile_heads, window, chunk, BLOCK_ROWS
    )
    split = low // SPLIT + tl.program_id(2)
    if split < tl.cdiv(high, SPLIT):
        query = load_queries(queries, query_row, query_head, rows, heads, there, HEAD, BLOCK_HEAD)
        table += sequence.to(tl.int64) * table_row
        keys += cached * key_head
        values += cached * value_head
        top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS, 8], tl.float32)
        result = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
        start = tl.maximum(split * SPLIT, low // BLOCK_KEYS * BLOCK_KEYS)
        pages = block_pages(table, start, low, high, PAGE, BLOCK_KEYS)
        for block in range(start, tl.minimum(split * SPLIT + SPLIT, high), BLOCK_KEYS):
            next_pages = block_pages(table, block + BLOCK_KEYS, low, high, PAGE, BLOCK_KEYS)
            top, total, result = attend_block(
                query, keys, values, pages, block, top, total, result, positions, lows, low, high,
                first, last, scale, cap, key_slot, value_slot,
                HEAD, VALUE, BLOCK_HEAD, BLOCK_VALUE, PAGE, BLOCK_KEYS, CAPPED, SKIP,
            )  # fmt: skip
            pages = next_pages
        entries = (rows.to(tl.int64) * all_heads + heads) * splits + tl.program_id(2)
        tl.store(stats + entries * 2, top, mask=there)
        tl.store(stats + entries * 2 + 1, tl.max(total, 1), mask=there)
        store_rows(partial, VALUE, 0, entries, heads, there, result, VALUE, BLOCK_VALUE)


@jit
def join_splits(
    partial, stats, out, sinks, tiles,
    out_row, out_head, window, chunk, group, tile_heads, all_heads, splits, has_sinks,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROWS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attention of a tile from the results of its splits, in their order. Grid: (tiles, as above)."""
    _, _, rows, heads, there, _, _, low, high, _, _ = read_tile(
        tiles, tl.program_id(0), group, tile_heads, window, chunk, BLOCK_ROWS
    )
    places = tl.arange(0, BLOCK_VALUE)
    entries = (rows.to(tl.int64) * all_heads + heads) * splits
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS, 1], tl.float32)
    result = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    for split in range(0, tl.cdiv(high, SPLIT) - low // SPLIT):
        other_top = tl.load(stats + (entries + split) * 2, mask=there, other=float("-inf"))
        other_total = tl.load(stats + (entries + split) * 2 + 1, mask=there, other=0.0)
        other_result = tl.load(
            partial + (entries + split)[:, None] * VALUE + places[None, :],
            mask=there[:, None] & (places < VALUE)[None, :],
            other=0.0,
        )
        top, total, result = join(top, total, result, other_top, other_total[:, None], other_result)
    result = finish(top, tl.max(total, 1), result, sinks, heads, there, has_sinks)
    store_rows(out, out_row, out_head, rows, heads, there, result, VALUE, BLOCK_VALUE)
