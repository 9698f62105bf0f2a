"""Inputs of device passes: sizes, padding and tiles, beside those that `PagedRows` makes from the same batch."""

from __future__ import annotations

import pytest
import torch

from deepspeed.errors import ArgumentError
from deepspeed.inference.executors.pass_inputs import PassInputs, PassSizes, Tiling
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch, RowSampling
from deepspeed.ops.triton.attention import AttentionRule, PagedRows
from deepspeed.ops.triton.variants import SPLIT

CPU, PAGE, TILING = torch.device("cpu"), 4, Tiling(2, 4)
SPANS = [
    BatchSlice([9], 6, [3, 1]),
    BatchSlice([5, 6, 7, 8, 4, 3], 2, [5, 7], 1),
    BatchSlice([2, 4], 0, [0], 2),
]


def filled(spans: list[BatchSlice], sizes: PassSizes) -> PassInputs:
    inputs = PassInputs(sizes, PAGE, CPU)
    inputs.buffer.fill_(77)  # what was there before
    inputs.fill(RaggedBatch(spans, PAGE, CPU), TILING)
    return inputs


def test_a_batch_as_it_is() -> None:
    batch, inputs = RaggedBatch(SPANS, PAGE, CPU), filled(SPANS, PassSizes.of(SPANS, PAGE, TILING))
    for name, wanted in (
        ("tokens", batch.tokens), ("positions", batch.positions), ("slots", batch.new_slots), ("wanted", batch.wanted),
        ("table", batch.paged_rows.table), ("block_table", batch.block_table), ("row_starts", batch.row_starts),
        ("lengths", batch.context_lengths),
    ):  # fmt: skip
        assert torch.equal(getattr(inputs, name), wanted), name
    plain = PagedRows(batch.paged_rows.counts, batch.paged_rows.lengths, batch.paged_rows.table)
    planned, most = inputs.paged_rows, TILING.narrow
    assert torch.equal(planned.tiles(TILING.narrow, most=most), plain.tiles(TILING.narrow, most=most))
    for least in (1, most + 1):
        assert torch.equal(planned.tiles(TILING.whole, least), plain.tiles(TILING.whole, least))
    assert planned.end(most) == plain.end(most) == 9 and planned.rows == plain.rows == 9


def test_every_tensor_begins_at_16_bytes_and_none_overlap() -> None:
    inputs = PassInputs(PassSizes.of(SPANS, PAGE, TILING), PAGE, CPU)
    inputs.buffer.zero_()
    for number, name in enumerate(inputs.sizes.regions(), 1):
        tensor = getattr(inputs, name)
        assert (tensor.data_ptr() - inputs.buffer.data_ptr()) % 16 == 0, name
        assert not bool(tensor.any()), name
        tensor.fill_(number)


def test_padding() -> None:
    spans = [SPANS[0], BatchSlice([2, 4], 0, [0], 2)]
    sizes = PassSizes.decode(4, 3, PAGE, TILING, 2)
    inputs = filled(spans, sizes)
    assert (sizes.rows, sizes.wanted, sizes.narrow_tiles, sizes.rest_tiles, sizes.ends) == (8, 8, 4, 0, 8)
    assert inputs.tokens.tolist() == [9, 2, 4, 0, 0, 0, 0, 0] and inputs.slots[3:].tolist() == [-1] * 5
    assert inputs.slots[:3].tolist() == [2 * PAGE + 2, PAGE, PAGE + 1]
    assert inputs.row_starts.tolist() == [0, 1, 3, 3, 3] and inputs.lengths.tolist() == [7, 2, 0, 0]
    assert inputs.narrow.tolist() == [[0, 0, 1, 6], [1, 1, 2, 0], [-1, 0, 0, 0], [-1, 0, 0, 0]]
    assert inputs.table.tolist() == [[3, 1, -1], [0, -1, -1], [-1] * 3, [-1] * 3]
    assert bool((inputs.options == 0).all()) and bool((inputs.block_table == inputs.table + 1).all())
    assert PassSizes.decode(3, 3, PAGE, TILING, 1, 16).rows == 16


def test_sampling_is_part_of_the_copy() -> None:
    sizes = PassSizes.decode(3, 2, PAGE, TILING)
    batch = RaggedBatch([SPANS[0]], PAGE, CPU)
    options = torch.arange(8.0)[None]
    batch.sampling = RowSampling(options, torch.tensor([2**62]), torch.tensor([4], dtype=torch.int32))
    inputs = PassInputs(sizes, PAGE, CPU)
    inputs.fill(batch, TILING)
    assert torch.equal(inputs.options, torch.cat([options, torch.zeros(2, 8)]))
    assert inputs.seeds.tolist() == [2**62, 0, 0] and inputs.counts.tolist() == [4, 0, 0]


@pytest.mark.parametrize(
    "spans", [SPANS, [SPANS[0]] * 5, [BatchSlice([1], 12, [0, 1, 2, 3])], [BatchSlice([1, 2], 0, [0], 1)]], ids=str
)
def test_what_does_not_fit_is_refused(spans: list[BatchSlice]) -> None:
    """Too many rows, sequences, or pages; rows without logits where all have them."""
    with pytest.raises(ArgumentError, match="does not fit"):
        filled(spans, PassSizes.decode(4, 3, PAGE, TILING))


@pytest.mark.parametrize("rule", [AttentionRule(1.0), AttentionRule(1.0, window=700), AttentionRule(1.0, chunk=600)])
def test_splits_are_bounded(rule: AttentionRule) -> None:
    """By sizes alone: never fewer than a sequence reads."""
    sizes = PassSizes.decode(2, 5000 // PAGE, PAGE, TILING, 2)
    planned = PassInputs(sizes, PAGE, CPU).paged_rows
    bound = planned.splits(rule, TILING.narrow, TILING.narrow)
    table = torch.zeros(1, 1, dtype=torch.int32)
    most = max(PagedRows([n], [at], table).splits(rule, 2, 2) for n in (1, 2) for at in range(2, 5000, 17))
    assert most <= bound <= -(-5000 // SPLIT) and (bound - most <= 1 or not rule.window)
    assert PassInputs(PassSizes.of(SPANS[1:2], PAGE, TILING), PAGE, CPU).paged_rows.splits(rule, 2, 2) == 0
