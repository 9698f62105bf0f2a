"""Cases of paged attention: drawn inputs with garbage where nothing may be read, and the reference in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepspeed.ops.triton.attention import AttentionRule, Kernels, PagedRows, attend_pages
from tests.kernels.pairs import pairwise

# Largest error over the largest value of the output. Weights are rounded to the dtype before the second product.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class Case:
    """One call: sizes, rule, and each sequence's new rows and length."""

    head: int = 64
    value: int = 0  # 0: as `head`
    cached: int = 1
    group: int = 1
    page: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    chunk: int = 0
    cap: float | None = None
    sinks: bool = False
    split: bool | None = None
    sharp: bool = False  # scores of several hundred, which overflow unless the largest is taken off
    rows: tuple[tuple[int, int], ...] = field(default=((1, 5), (3, 40), (1, 17)))  # (new rows, length)

    def __str__(self) -> str:
        rule = f"w{self.window}c{self.chunk}" + (f"cap{self.cap}" if self.cap else "") + ("sinks" if self.sinks else "")
        rule += "sharp" if self.sharp else ""
        sizes = f"{self.head}-{self.value or self.head}x{self.cached}x{self.group}-page{self.page}"
        rows = "+".join(f"{count}of{length}" for count, length in self.rows)
        return f"{sizes}-{str(self.dtype)[6:]}-{rule}-split{self.split}-{rows}"


@dataclass
class Inputs:
    """Tensors of a case."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    sinks: torch.Tensor | None


def inputs_of(case: Case, seed: int = 0) -> Inputs:
    """Draw the tensors of a case.

    Slots that no sequence has written are NaN, and entries of the table after a sequence's last page are page numbers
    far outside of the pool.
    """
    random_ = torch.Generator().manual_seed(seed)
    value, heads = case.value or case.head, case.cached * case.group
    needed = [-(-length // case.page) for _, length in case.rows]
    pool = sum(needed) + 3
    order = torch.randperm(pool, generator=random_).tolist()
    keys = torch.full(((pool + 1) * case.page, case.cached, case.head), torch.nan)
    values = torch.full(((pool + 1) * case.page, case.cached, value), torch.nan)
    keys[: case.page] = values[: case.page] = 0
    table = torch.full((len(case.rows), max(needed) + 2), 2**31 - 7, dtype=torch.int32)
    for row, (count, (_, length)) in enumerate(zip(needed, case.rows, strict=True)):
        pages = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(pages, dtype=torch.int32)
        positions = torch.arange(length)
        slots = (table[row, positions // case.page].long() + 1) * case.page + positions % case.page
        keys[slots] = torch.randn(length, case.cached, case.head, generator=random_)
        values[slots] = torch.randn(length, case.cached, value, generator=random_)
    total = sum(count for count, _ in case.rows)
    # As attention of Transformers hands them over: heads first, rows after.
    query = torch.randn(heads, total, case.head, generator=random_).to(case.dtype).transpose(0, 1)
    sinks = (torch.randn(heads, generator=random_) * (300 if case.sharp else 1)).to(case.dtype) if case.sinks else None
    return Inputs(query, keys.to(case.dtype), values.to(case.dtype), table, sinks)


def rule_of(case: Case) -> AttentionRule:
    return AttentionRule(
        case.head**-0.5 * (100.0 if case.sharp else 3.0 if case.cap else 1.5), case.window, case.chunk, case.cap
    )


def attended(kernels: Kernels, case: Case, inputs: Inputs) -> torch.Tensor:
    """The kernels' result."""
    counts, lengths = zip(*case.rows, strict=True)
    rows = PagedRows(counts, lengths, inputs.table)
    pools = inputs.keys, inputs.values
    return attend_pages(kernels, inputs.query, pools, rows, case.page, rule_of(case), inputs.sinks, case.split)


def reference(case: Case, inputs: Inputs) -> torch.Tensor:
    """The same in fp64, sequence by sequence, without pages."""
    rule, results, first = rule_of(case), [], 0
    for row, (count, length) in enumerate(case.rows):
        positions = torch.arange(length)
        slots = (inputs.table[row, positions // case.page].long() + 1) * case.page + positions % case.page
        keys = inputs.keys[slots].double().repeat_interleave(case.group, 1)
        values = inputs.values[slots].double().repeat_interleave(case.group, 1)
        query = inputs.query[first : first + count].double()
        scores = torch.einsum("rhd,khd->hrk", query, keys) * rule.scale
        if rule.cap is not None:
            scores = torch.tanh(scores / rule.cap) * rule.cap
        at = torch.arange(length - count, length)[:, None]
        seen = positions <= at
        if rule.window:
            seen = seen & (positions > at - rule.window)
        if rule.chunk:
            seen = seen & (positions // rule.chunk == at // rule.chunk)
        scores = scores.masked_fill(~seen, -torch.inf)
        if inputs.sinks is not None:
            scores = torch.cat([scores, inputs.sinks.double()[:, None, None].expand(-1, count, 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        results.append(torch.einsum("hrk,khd->rhd", weights, values))
        first += count
    return torch.cat(results)


def error_of(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest value; infinite if a result is not finite."""
    if result.shape != wanted.shape or not bool(result.isfinite().all()):
        return float("inf")
    return float((result.double() - wanted).abs().max() / wanted.abs().max())


# -- a pairwise cover --------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Sequence[Any]] = {
    "head": (64, 80, 96, 128, 256),
    "group": (1, 4, 8),
    "cached": (1, 2),
    "page": (16, 64),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "window": (0, 1, 37, 600),
    "chunk": (0, 16, 700),
    "cap": (None, 2.0, 30.0),
    "sinks": (False, True),
    "split": (False, True),
    "rows": (
        ((1, 1),),  # the first token
        ((7, 7), (1, 16), (1, 17), (1, 64)),  # a prompt, and contexts that end with a page
        ((1, 63), (2, 65), (1, 512), (5, 513)),  # drafts, and around blocks and splits
        ((33, 33), (1, 600)),  # more rows than a tile has
        ((20, 530), (1, 30), (4, 100)),  # a chunk of a prompt over the border of a split
        ((1, 1025), (3, 1100)),  # three splits
    ),
}


def cover() -> list[Case]:
    """The cases of the table: four pairwise covers, five with 4,096 keys, and single oddities."""
    cases = [Case(**choice) for seed in range(4) for choice in pairwise(OPTIONS, seed)]
    long = [
        Case(head=64, rows=((1, 4096),), group=4, split=True),
        Case(head=128, rows=((1, 4096),), dtype=torch.bfloat16, page=64, sinks=True, split=True),
        Case(head=80, rows=((3, 4096), (1, 9)), dtype=torch.float16, cap=20.0, split=True),
        Case(head=96, rows=((2, 4096),), window=1500, split=True),
        Case(head=64, rows=((1, 4095), (1, 4096)), chunk=1024, group=8, split=False),
    ]
    odd = [
        Case(head=24, value=16), Case(head=192, value=128, dtype=torch.bfloat16), Case(head=16, group=3),
        Case(head=32, group=7, rows=((5, 70),)), Case(head=32, group=20, rows=((2, 33),)), Case(head=48, page=2),
        Case(head=64, page=48, rows=((3, 100),)), Case(head=64, group=71, rows=((1, 20),)),
        Case(head=64, window=5, sinks=True, cap=5.0, chunk=8, rows=((9, 30), (1, 3))),
        Case(head=64, rows=((1, 1100),)), Case(head=64, rows=((1, 1100), (70, 600), (2, 530))),
    ]  # fmt: skip
    return list(dict.fromkeys([*cases, *long, *odd]))


# -- checks, for the tests and for changed kernels ---------------------------------------------------------------------

Check = Callable[[Kernels], None]


def _agrees(case: Case) -> Check:
    def check(kernels: Kernels) -> None:
        inputs = inputs_of(case)
        error = error_of(attended(kernels, case, inputs), reference(case, inputs))
        limit = TOLERANCE[case.dtype] * (25 if case.sharp else 1)  # the rounding of large scores
        assert error <= limit, f"off by {error:.2g}"

    return check


def parts_of(case: Case, inputs: Inputs) -> list[tuple[Case, Inputs]]:
    """Each row of each sequence as a call of its own, with as many pages as it needs."""
    parts, first = [], 0
    for row, (count, length) in enumerate(case.rows):
        for number in range(count):
            end = length - count + number + 1
            query = inputs.query[first + number][None]
            table = inputs.table[row, : -(-end // case.page)][None].contiguous()
            own = replace(inputs, query=query, table=table)
            parts.append((replace(case, rows=((1, end),), split=not case.split), own))
        first += count
    return parts


def _alone(case: Case) -> Check:
    """Each row has the bits that it has by itself, where splits are computed the other way."""

    def check(kernels: Kernels) -> None:
        inputs = inputs_of(case)
        together = attended(kernels, case, inputs)
        alone = torch.cat([attended(kernels, each, own) for each, own in parts_of(case, inputs)])
        assert torch.equal(together, alone), "a row's bits depend on its neighbours"

    return check


def _padded(kernels: Kernels) -> None:
    """Tiles of no sequence, as a captured pass has, change nothing and write nothing."""
    for split in (False, True):
        case = Case(split=split, window=9, chunk=4)
        inputs = inputs_of(case)
        plain = attended(kernels, case, inputs)
        counts, lengths = zip(*case.rows, strict=True)
        rows = PagedRows(counts, lengths, inputs.table)
        pools, none = (inputs.keys, inputs.values), torch.tensor([[-1, 0, 7, 3]] * 3, dtype=torch.int32)
        attend_pages(kernels, inputs.query, pools, rows, case.page, rule_of(case), None, split)
        for key, tiles in rows._tiles.items():
            rows._tiles[key] = torch.cat([tiles, none])
        padded = attend_pages(kernels, inputs.query, pools, rows, case.page, rule_of(case), None, split)
        assert torch.equal(plain, padded), "tiles of no sequence change others"


ALONE = [
    Case(rows=((3, 40), (1, 520), (5, 530))),
    Case(rows=((3, 40), (2, 600)), dtype=torch.bfloat16, head=128, group=4),
    Case(rows=((20, 600), (1, 70)), dtype=torch.float16, head=80, window=50, sinks=True),
    Case(rows=((6, 1030),), chunk=520, cap=5.0, group=3),
    Case(rows=((4, 1030),), window=515, split=True, dtype=torch.bfloat16, sinks=True),
    Case(rows=((9, 70), (1, 70)), chunk=32, window=20, split=True),
]  # fmt: skip


# Small ones that many faults show in, first.
STRONG = [
    Case(head=16, rows=((2, 1100), (1, 20)), split=True, group=3, sinks=True),
    Case(head=24, rows=((40, 560), (1, 20)), split=False, cap=2.0, cached=2),
    Case(head=16, rows=((5, 1200), (1, 9)), window=600, split=True, page=48),
    Case(head=16, rows=((5, 1200), (1, 9)), sharp=True, sinks=True, split=True, group=4),
    Case(head=16, rows=((5, 600), (1, 9)), sharp=True, split=False, group=4),
    Case(head=16, rows=((5, 1200), (6, 9)), chunk=700, window=690, split=False, dtype=torch.bfloat16),
]


def checks() -> dict[str, Check]:
    """All checks by name; the quick ones first."""
    cases = sorted(cover(), key=lambda case: sum(count * length for count, length in case.rows))
    return {
        "padding": _padded,
        **{str(case): _agrees(case) for case in STRONG},
        **{f"alone-{case}": _alone(case) for case in ALONE},
        **{str(case): _agrees(case) for case in cases},
    }
