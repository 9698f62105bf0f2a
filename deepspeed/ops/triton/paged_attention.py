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
def read_tile(tiles, group, tile_heads, window, chunk, BLOCK_ROWS: tl.constexpr):
    """Return what the rows of this program's tile are: sequence, rows and heads, whether each is there, positions, and
    the first key that each sees; then the keys that the tile reads, from the first to below the last."""
    tile = tl.program_id(0) * 4
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
    return sequence, cached, first + tokens, cached * group + members, there, positions, lows, low, high


@jit
def join(top, total, values, other_top, other_total, other_values):
    """Join the results of two sets of keys: largest score, sum of weights, weighted values of each row."""
    joined = tl.maximum(top, other_top)
    base = tl.where(joined == float("-inf"), 0.0, joined)
    decay, other_decay = tl.exp2(top - base), tl.exp2(other_top - base)
    return (
        joined,
        total * decay + other_total * other_decay,
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
def attend_keys(
    query, keys, values, table_row, cached, positions, lows, low, high, start, stop,
    key_slot, key_head, value_slot, value_head, scale, cap,
    HEAD: tl.constexpr, VALUE: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Return largest score, sum of weights and weighted values of a tile's rows over the keys from start to stop."""
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    result = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    key_places, value_places = tl.arange(0, BLOCK_HEAD), tl.arange(0, BLOCK_VALUE)
    keys += cached * key_head
    values += cached * value_head
    for block in range(start, stop, BLOCK_KEYS):
        numbers = block + tl.arange(0, BLOCK_KEYS)
        inside = (numbers >= low) & (numbers < high)
        pages = tl.load(table_row + numbers // PAGE, mask=inside, other=-1)
        slots = (pages.to(tl.int64) + 1) * PAGE + numbers % PAGE
        key = tl.load(
            keys + slots[None, :] * key_slot + key_places[:, None],
            mask=inside[None, :] & (key_places < HEAD)[:, None],
            other=0.0,
        )
        scores = tl.dot(query, key.to(query.dtype), input_precision="ieee")
        if CAPPED:
            scores = scores * (scale / cap)
            size = tl.exp2(tl.abs(scores) * (-2.0 * LOG2E))  # of the hyperbolic tangent: never overflows
            scores = tl.where(scores < 0, size - 1.0, 1.0 - size) / (1.0 + size) * (cap * LOG2E)
        else:
            scores = scores * (scale * LOG2E)
        seen = (numbers[None, :] <= positions[:, None]) & (numbers[None, :] >= lows[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights, decay = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        value = tl.load(
            values + slots[:, None] * value_slot + value_places[None, :],
            mask=inside[:, None] & (value_places < VALUE)[None, :],
            other=0.0,
        )
        total = total * decay + tl.sum(weights, 1)
        result = tl.dot(weights.to(query.dtype), value.to(query.dtype), result * decay[:, None], input_precision="ieee")
        top = highest
    return top, total, result


@jit
def attend_whole(
    queries, keys, values, out, sinks, table, tiles,
    query_row, query_head, key_slot, key_head, value_slot, value_head, out_row, out_head, table_row,
    scale, cap, window, chunk, group, tile_heads, has_sinks,
    HEAD: tl.constexpr, VALUE: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLIT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attention of a tile over all its keys. Grid: (tiles, key-value heads · blocks of query heads)."""
    sequence, cached, rows, heads, there, positions, lows, low, high = read_tile(
        tiles, group, tile_heads, window, chunk, BLOCK_ROWS
    )
    query = load_queries(queries, query_row, query_head, rows, heads, there, HEAD, BLOCK_HEAD)
    table += sequence.to(tl.int64) * table_row
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    result = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    for split in range(low // SPLIT, tl.cdiv(high, SPLIT)):
        start = tl.maximum(split * SPLIT, low // BLOCK_KEYS * BLOCK_KEYS)
        stop = tl.minimum(split * SPLIT + SPLIT, high)
        other_top, other_total, other_result = attend_keys(
            query, keys, values, table, cached, positions, lows, low, high, start, stop,
            key_slot, key_head, value_slot, value_head, scale, cap,
            HEAD, VALUE, BLOCK_HEAD, BLOCK_VALUE, PAGE, BLOCK_ROWS, BLOCK_KEYS, CAPPED,
        )  # fmt: skip
        top, total, result = join(top, total, result, other_top, other_total, other_result)
    result = finish(top, total, result, sinks, heads, there, has_sinks)
    store_rows(out, out_row, out_head, rows, heads, there, result, VALUE, BLOCK_VALUE)


@jit
def attend_split(
    queries, keys, values, partial, stats, table, tiles,
    query_row, query_head, key_slot, key_head, value_slot, value_head, table_row,
    scale, cap, window, chunk, group, tile_heads, all_heads, splits,
    HEAD: tl.constexpr, VALUE: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLIT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Results of a tile over one split, for `join_splits`. Grid: (tiles, as above, splits)."""
    sequence, cached, rows, heads, there, positions, lows, low, high = read_tile(
        tiles, group, tile_heads, window, chunk, BLOCK_ROWS
    )
    split = low // SPLIT + tl.program_id(2)
    if split < tl.cdiv(high, SPLIT):
        query = load_queries(queries, query_row, query_head, rows, heads, there, HEAD, BLOCK_HEAD)
        table += sequence.to(tl.int64) * table_row
        start = tl.maximum(split * SPLIT, low // BLOCK_KEYS * BLOCK_KEYS)
        stop = tl.minimum(split * SPLIT + SPLIT, high)
        top, total, result = attend_keys(
            query, keys, values, table, cached, positions, lows, low, high, start, stop,
            key_slot, key_head, value_slot, value_head, scale, cap,
            HEAD, VALUE, BLOCK_HEAD, BLOCK_VALUE, PAGE, BLOCK_ROWS, BLOCK_KEYS, CAPPED,
        )  # fmt: skip
        entries = (rows.to(tl.int64) * all_heads + heads) * splits + tl.program_id(2)
        tl.store(stats + entries * 2, top, mask=there)
        tl.store(stats + entries * 2 + 1, total, mask=there)
        store_rows(partial, VALUE, 0, entries, heads, there, result, VALUE, BLOCK_VALUE)


@jit
def join_splits(
    partial, stats, out, sinks, tiles,
    out_row, out_head, window, chunk, group, tile_heads, all_heads, splits, has_sinks,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROWS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attention of a tile from the results of its splits, in their order. Grid: (tiles, as above)."""
    _, _, rows, heads, there, _, _, low, high = read_tile(tiles, group, tile_heads, window, chunk, BLOCK_ROWS)
    places = tl.arange(0, BLOCK_VALUE)
    entries = (rows.to(tl.int64) * all_heads + heads) * splits
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    result = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    for split in range(0, tl.cdiv(high, SPLIT) - low // SPLIT):
        other_top = tl.load(stats + (entries + split) * 2, mask=there, other=float("-inf"))
        other_total = tl.load(stats + (entries + split) * 2 + 1, mask=there, other=0.0)
        other_result = tl.load(
            partial + (entries + split)[:, None] * VALUE + places[None, :],
            mask=there[:, None] & (places < VALUE)[None, :],
            other=0.0,
        )
        top, total, result = join(top, total, result, other_top, other_total, other_result)
    result = finish(top, total, result, sinks, heads, there, has_sinks)
    store_rows(out, out_row, out_head, rows, heads, there, result, VALUE, BLOCK_VALUE)
