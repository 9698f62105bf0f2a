"""Paged attention by Triton's interpreter against plain torch, and the same bits for a row in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.needs import need_triton

need_triton()

from deepspeed.errors import ArgumentError, NotAvailableError  # noqa: E402
from deepspeed.ops.triton.attention import AttentionRule, PagedRows, attend_pages  # noqa: E402
from tests.kernels.attention_cases import Case, attended, checks, inputs_of, rule_of  # noqa: E402
from tests.kernels.interpreter import InterpretedKernels, OutOfBoundsError, bounded, interpreted  # noqa: E402
from tests.kernels.moved import MovedKernels, NotBuiltError  # noqa: E402

CHECKS = checks()


@pytest.fixture
def kernels() -> InterpretedKernels:
    return interpreted("paged_attention")


@pytest.mark.parametrize("name", CHECKS)
def test_attention(kernels: InterpretedKernels, name: str) -> None:
    CHECKS[name](kernels)


def test_the_cover_is_as_large_as_it_may_be() -> None:
    cases = [name for name in CHECKS if name != "padding" and not name.startswith("alone")]
    assert 150 <= len(cases) <= 400 and sum("4096" in name for name in cases) == 5


def test_few_rows_over_many_keys_are_split(kernels: InterpretedKernels) -> None:
    for rows, wanted in (
        (((1, 1100), (5, 9)), ["attend_split", "join_splits"]),
        (((1, 500), (2, 30)), ["attend_whole"]),
        (((300, 600),), ["attend_whole"]),
        (((1, 1100), (300, 600)), ["attend_split", "join_splits", "attend_whole"]),
    ):
        case = Case(head=16, rows=rows)
        attended(kernels, case, inputs_of(case))
        assert [name.rsplit("_fp32")[0] for name, _ in kernels.launches] == wanted, rows
        kernels.launches.clear()


def test_few_rows_have_small_tiles_and_the_bits_of_large_ones(kernels: InterpretedKernels) -> None:
    results = []
    for rows in (((1, 50), (40, 60)), ((50, 50), (40, 60))):
        case = Case(head=16, dtype=torch.bfloat16, rows=rows)
        inputs = inputs_of(case)
        inputs.query[-41] = torch.linspace(-1, 1, 16)  # the last row of the first sequence
        results.append(attended(kernels, case, inputs)[-41])
    assert [name for name, _ in kernels.launches] == [
        "attend_whole_bf16_16_page16_few", "attend_whole_bf16_16_page16", "attend_whole_bf16_16_page16",
    ]  # fmt: skip
    assert torch.equal(*results)


@pytest.mark.parametrize("window", [0, 600])
def test_next_tokens_read_each_key_once(kernels: InterpretedKernels, window: int) -> None:
    """Bytes of the pages that a pass reads are those of what its rows see; all others are a few per cent of them."""
    case = Case(head=128, cached=2, group=4, dtype=torch.bfloat16, page=64, window=window, rows=((1, 1000), (1, 1600)))
    inputs = inputs_of(case)
    attended(kernels, case, inputs)
    pools = {inputs.keys.data_ptr(), inputs.values.data_ptr()}
    pages = sum(count for (_, address), count in kernels.bytes.items() if address in pools)
    seen = sum(min(length, window or length) for _, length in case.rows)
    assert pages == seen * case.cached * 2 * case.head * 2
    assert sum(kernels.bytes.values()) <= 1.08 * pages


def test_addresses_are_checked(kernels: InterpretedKernels) -> None:
    case = Case()
    inputs = inputs_of(case)
    inputs.table[0, 0] = 10**6
    with pytest.raises(Exception, match="outside of its tensors"):
        attended(kernels, case, inputs)
    with pytest.raises(OutOfBoundsError), bounded([inputs.table]):
        from tests.kernels.interpreter import _bounds

        _bounds[-1].check("reads", torch.tensor([inputs.table.data_ptr() - 4]).numpy(), torch.ones(1).numpy(), 4)


def test_tensors_go_to_a_device_and_back(kernels: InterpretedKernels) -> None:
    """What the checks of a GPU's kernels do around each launch."""
    case, odd = Case(sinks=True, group=2), Case(head=24)
    inputs = inputs_of(case)
    moved: Any = MovedKernels(kernels, torch.device("cpu"))
    assert torch.equal(attended(moved, case, inputs), attended(kernels, case, inputs))
    with pytest.raises(NotBuiltError):
        attended(moved, odd, inputs_of(odd))


def test_what_does_not_fit_is_refused(kernels: InterpretedKernels) -> None:
    case = Case()
    inputs = inputs_of(case)
    counts, lengths = zip(*case.rows, strict=True)
    rows, pools = PagedRows(counts, lengths, inputs.table), (inputs.keys, inputs.values)
    rule, query = rule_of(case), inputs.query
    with pytest.raises(ArgumentError, match="head sizes differ"):
        attend_pages(kernels, query[..., :32], pools, rows, 16, rule)
    with pytest.raises(ArgumentError, match="the pass has 5 rows"):
        attend_pages(kernels, query[:4], pools, rows, 16, rule)
    with pytest.raises(ArgumentError, match="one sink for each head"):
        attend_pages(kernels, query, pools, rows, 16, rule, torch.zeros(3))
    with pytest.raises(ArgumentError, match="sequences differ in number"):
        PagedRows(counts, lengths[:2], inputs.table)
    with pytest.raises(ArgumentError, match="1 to `length` rows"):
        PagedRows((1, 0, 1), lengths, inputs.table)
    for scale, cap in ((0.0, None), (-1.0, None), (1.0, 0.0)):
        with pytest.raises(ArgumentError, match="have to be positive"):
            AttentionRule(scale, cap=cap)
    with pytest.raises(ArgumentError, match="int32"):
        PagedRows(counts, lengths, inputs.table.long())
    with pytest.raises(NotAvailableError, match="heads of 1 to 256"):
        wide = torch.zeros(5, 1, 300)
        attend_pages(kernels, wide, (torch.zeros(99, 1, 300),) * 2, rows, 16, AttentionRule(1.0))
