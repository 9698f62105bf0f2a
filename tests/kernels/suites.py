"""The kernels' files, the checks of each, and changes of it that change no result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed.ops.triton
from tests.kernels import attention_cases, block_cases, product_cases, row_cases, sampling_cases, single_row_cases

FOLDER = Path(deepspeed.ops.triton.__file__).parent


@dataclass(frozen=True)
class Suite:
    """A file of kernels.

    Args:
        name: name of the file.
        checks: function that returns the checks by name.
        equivalent: parts of the names of changes that give the same values, and are not judged.
    """

    name: str
    checks: Callable[[], dict[str, Callable[[Any], None]]]
    equivalent: tuple[tuple[str, ...], ...] = ()

    def path(self) -> Path:
        return FOLDER / f"{self.name}.py"


# Where nothing has been seen, any finite base gives weights of zero. What lies outside of a tile's keys, or beyond a
# head's size, is masked again, multiplied by zeros, or not stored. Blocks that are read in vain change nothing, nor
# do masks that hide nothing, nor splits without keys.
ATTENTION_EQUIVALENT = (
    ('base = tl.where(joined == float("-inf"), 0.0, joined)', "'0.0' value"),
    ('base = tl.where(highest == float("-inf"), 0.0, highest)', "'0.0' value"),
    ('base = tl.where(base == float("-inf"), 0.0, base)', "'0.0' value"),
    ("other=0.0,", "'0.0' value"),
    ("other=0.0)", "'0.0' value"),
    ("(numbers < high), other=-1)", "'1' value"),
    ("if (block + BLOCK_KEYS - 1 > first)", "ops -> GtE"),
    ("if (block + BLOCK_KEYS - 1 > first)", "ops -> LtE"),
    ("if (block % SPLIT == 0) & (block > start)", "ops -> GtE"),
    ("low // BLOCK_KEYS * BLOCK_KEYS", "op -> Sub"),
    ("size = tl.exp2", "'2.0' value -> 0"),
)
# Places beyond a row's width are zero by another mask, or are not stored; a rotation is not read where nothing turns.
ROW_EQUIVALENT = (
    ("other=1.0", "value"),
    ("x = tl.load(gate", "'0.0' value"),
    ("y = tl.load(up", "'0.0' value"),
    ("value = tl.load(values", "'0.0' value"),
    ("added = tl.load(bias", "'0.0' value"),
    ("rotate_heads:", "'0.0' value"),
    ("slot = tl.load(slots", "'1' value"),
)
# Beyond the inputs both factors are zero; outputs and rows beyond the last are not stored. A program with more tiles
# than its own computes those of the next one, with equal values.
PRODUCT_EQUIVALENT = (
    ("other=0", "'0.0' value"),
    ("other=0", "'0' value"),
    ("if TILES > 1:", "'TILES > 1' ops -> GtE"),
    ("if TILES > 2:", "'TILES > 2' ops -> GtE"),
)
# As above.
GEMV_EQUIVALENT = (("other=0", "'0.0' value"), ("other=0", "'0' value"))
# What lies beyond the rows or the vocabulary is not stored, or has no weight. Scores of greedy rows may be stored.
# Scores that are NaN may be counted downwards.
# Limits may lie elsewhere, since all kernels have the same ones; more tokens than needed may be gathered, and those
# beyond the last but one limit are not drawn in practice (1e-41). A top-p of 1 that is applied keeps all, and so does
# a top-k of all; a top-k of 1 keeps what is always gathered. There is a last token with a chance, an equal one and one
# at or before each place, so what stands for none is not used. The search may begin lower, and goes on beyond its end;
# a sum that equals the bound at a limit ends what is gathered. A weight of 0 passes no bound that the sum before did
# not pass, but for rounding.
SAMPLING_EQUIVALENT = (
    ("seed = tl.load(", "'0' value"),
    ("counter = tl.load(", "'0' value"),
    ("entries = tl.load(table", "'0' value"),
    ("if tl.load(options + row * 8) > 0:", "ops -> GtE"),
    ("tokens = tl.load(firsts", "'0' value"),
    ("wrong += ", "op -> Sub"),
    ("return tl.where(number < 20,", "' value"),
    ("return tl.where(number < 20,", "ops -> LtE"),
    ("closes = numbers >= ", "endless)' ops -> Gt"),
    ("closes = closes | (sums >= ", "endless)' ops -> Gt"),
    ("closes = closes | (_limit(columns) >= ", "leas' ops -> Gt"),
    ("closes = closes | (_limit(columns) >= ", "op -> BitOr"),
    ("closes = ", "'0' value"),
    ("cut = tl.min(", "LIMITS - 1' op"),
    ("cut = tl.min(", "'1' value"),
    ("first = tl.min(tl.where(passes, columns", "LIMITS - 1' op"),
    ("first = tl.min(tl.where(passes, columns", "'1' value"),
    ("passes = sums >= bound if", "ops -> Gt"),
    ("closes = ", "'top_p < 1.0' ops -> LtE"),
    ("closes = ", "'1.0' value"),
    ("closes = ", "'top_k <= 0' ops"),
    ("closes = closes | (_limit(columns)", "'top_k > 0' ops"),
    ("if top_p < 1.0:", "'1.0' value"),
    ("if (top_k > 0) & (count > wanted):", "'count > wanted' ops -> GtE"),
    ("part = tl.minimum(part,", "'weight > 0' ops -> GtE"),
    ("chosen = tl.min(tl.where((sums > bound)", "'weight > 0' ops -> GtE"),
    ("return tl.minimum(chosen,", "'0' value"),
    ("largest, smallest = tl.full(", "'1' value"),
    ("largest = tl.maximum(largest,", "'1' value"),
    ("return tl.where(first > 0, _limit(first - 1), -1)", "' value"),
    ("before = _sum_to(", "'1' value"),
    ("chosen, last = count, -1", "'1' value"),
    ("last = tl.maximum(last,", "'1' value"),
    ("first = (bits < other_bits)", "'place < other_place' ops -> LtE"),
)
# Places beyond a block's length or the last block are not stored, and count as zeros before. Zeros are chosen before
# signs.
BLOCK_EQUIVALENT = (
    ("mask=there, other=0", "'0' value"),
    ("tl.load(target", "'0' value"),
    ("other=0).to(tl.int32)", "'0' value"),
    ("endless = ", "GtE"),
)
SUITES = {
    "paged_attention": Suite("paged_attention", attention_cases.checks, ATTENTION_EQUIVALENT),
    "row_kernels": Suite("row_kernels", row_cases.checks, ROW_EQUIVALENT),
    "sampling_kernels": Suite("sampling_kernels", sampling_cases.checks, SAMPLING_EQUIVALENT),
    "block_kernels": Suite("block_kernels", block_cases.checks, BLOCK_EQUIVALENT),
    "packed_products": Suite("packed_products", product_cases.checks, PRODUCT_EQUIVALENT),
    "single_row_kernels": Suite("single_row_kernels", single_row_cases.checks, GEMV_EQUIVALENT),
    "gemv_kernels": Suite("gemv_kernels", product_cases.few_checks, GEMV_EQUIVALENT),
}
