"""The formulas of `ops/triton/costs.py` beside the bytes that interpreted kernels touch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.needs import need_triton

need_triton()

from deepspeed.inference.sampling_params import SamplingParams  # noqa: E402
from deepspeed.ops.triton import attention, products, rows, sampling, single_row  # noqa: E402
from deepspeed.ops.triton.costs import launch_cost  # noqa: E402
from tests.kernels.interpreter import InterpretedKernels, interpreted  # noqa: E402
from tests.kernels.product_cases import matrix  # noqa: E402


class CountedKernels:
    """Interpreted kernels whose launches are compared with their formulas.

    Args:
        kernels: the kernels.
        candidates: as in `launch_cost`.
    """

    def __init__(self, kernels: InterpretedKernels, candidates: int | None = None) -> None:
        self.kernels, self.candidates, self.compared = kernels, candidates, 0

    def has(self, variant: Any) -> bool:
        return True

    def prepare(self, variants: Any) -> None:
        pass

    def launch(self, variant: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        self.kernels.launch(variant, grid, arguments)
        bounds, cost = self.kernels.last, launch_cost(variant, grid, arguments, self.candidates)
        assert bounds is not None
        names = [name for name, kind in variant.signature.items() if kind != "constexpr"]
        # An argument that is not there is passed as another one's tensor.
        tensors = {n: v for n, v in zip(names, arguments, strict=True) if isinstance(v, torch.Tensor)}
        for what, formula in (("reads", cost.read), ("writes", cost.written)):
            counted = {
                address: len(np.unique(np.concatenate(places)))
                for (done, address), places in bounds.places.items()
                if done == what
            }
            wanted: dict[int, float] = {}
            for name, nbytes in formula.items():
                address = tensors[name].data_ptr()
                if nbytes:
                    wanted[address] = wanted.get(address, 0) + nbytes
            assert counted == wanted, (variant.kernel, what)
        self.compared += 1


def spread(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("window", [0, 40])
def test_attention(split: bool, window: int) -> None:
    kernels = CountedKernels(interpreted("paged_attention"))
    counts, lengths, page = [1, 1, 3], [30, 530, 70], 16
    table = torch.full((3, 40), -1, dtype=torch.int32)
    first = 0
    for row, length in zip(table, lengths, strict=True):
        pages = -(-length // page)
        row[:pages] = torch.arange(first, first + pages)
        first += pages
    pools = spread((first + 1) * page, 2, 32), spread((first + 1) * page, 2, 32) + 1
    query = spread(5, 8, 32)
    paged = attention.PagedRows(counts, lengths, table)
    rule = attention.AttentionRule(0.2, window)
    attention.attend_pages(kernels, query, pools, paged, page, rule, split=split)
    assert kernels.compared == (2 if split else 1)


def test_rows() -> None:
    kernels = CountedKernels(interpreted("row_kernels"))
    x, y = spread(3, 128), spread(3, 128) + 1
    rows.norm(kernels, x, spread(128), eps=1e-5)
    rows.norm(kernels, x, spread(128), spread(128) + 1, y, eps=1e-5, centred=True)
    rows.gated(kernels, x, y, "silu")
    heads = spread(3, 4, 32), spread(3, 2, 32) + 1, spread(3, 2, 32) + 2
    pools = spread(64, 2, 32), spread(64, 2, 32) + 1
    slots = torch.tensor([17, 5, 40])
    rows.rotate_into_pages(kernels, heads, (spread(3, 16), spread(3, 16) + 1), pools, slots)
    products.rounded_rows(kernels, spread(3, 5000))
    assert kernels.compared == 5


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("rows_", [33, 17, 2, 1])
def test_products(form: str, rows_: int) -> None:
    kernels = CountedKernels(interpreted("packed_products" if rows_ > 4 else "gemv_kernels"))
    parts, _ = matrix(form, 70, 128)
    x = spread(rows_, 128, dtype=torch.float32 if rows_ == 17 else torch.bfloat16)
    products.packed_product(kernels, x, form, parts, spread(70).to(x.dtype))
    assert kernels.compared == 1


@pytest.mark.parametrize("rows_", [1, 2])
def test_dense_products_of_few_rows(rows_: int) -> None:
    kernels = CountedKernels(interpreted("gemv_kernels"))
    x, weight = spread(rows_, 160, dtype=torch.float16), spread(9, 160, dtype=torch.float16)
    products.dense_product(kernels, x, weight)
    assert kernels.compared == 1


@pytest.mark.parametrize("form", ["dense", "int8", "int4", "fp8"])
def test_products_of_single_rows(form: str) -> None:
    kernels, x = CountedKernels(interpreted("single_row_kernels")), spread(1, 128, dtype=torch.bfloat16)
    parts = (spread(256, 128, dtype=torch.bfloat16),) if form == "dense" else matrix(form, 256, 128)[0]
    square = (parts[0][:128], *(part.view(256, -1)[:128] for part in parts[1:]))
    whole = single_row.RowMatrix(form, parts, spread(256).bfloat16())
    plain = single_row.RowMatrix(form, tuple(part.clone() for part in square), None)
    row, stream = single_row.add(kernels, x, plain, x + 1, spread(128).bfloat16(), 1e-5)
    single_row.gate(kernels, row, whole, "silu")
    pools = spread(40, 4, 32).bfloat16(), spread(40, 4, 32).bfloat16() + 1
    turn = spread(1, 32).bfloat16(), spread(1, 32).bfloat16() + 1
    single_row.rotate(kernels, row, whole, turn, (pools[0][:, :2].contiguous(),
                      pools[1][:, :2].contiguous()), torch.tensor([17]))  # fmt: skip
    assert kernels.compared == 3 and stream.shape == (1, 128)


@pytest.mark.parametrize(
    ("candidates", "changes"), [(None, {}), (0, {"temperature": 1.0}), (2100, {"temperature": 1.0, "top_k": 2500})]
)
def test_sampling(candidates: int | None, changes: dict[str, Any]) -> None:
    """A top-k beyond the vocabulary gathers all tokens."""
    kernels = CountedKernels(interpreted("sampling_kernels"), candidates)
    options = sampling.options_of([SamplingParams(**changes)] * 2)
    sampling.sample(kernels, spread(2, 2100), options, torch.full((2,), 0.3, dtype=torch.float64))
    assert kernels.compared == 3


def test_greedy_sampling_without_numbers_is_two_launches() -> None:
    kernels, logits = CountedKernels(interpreted("sampling_kernels")), spread(2, 1500)
    tokens = sampling.sample(kernels, logits, sampling.options_of([SamplingParams()] * 2), None)
    assert kernels.compared == 2 and tokens.tolist() == logits.argmax(-1).tolist()


def test_a_kernel_without_formula_is_named() -> None:
    from deepspeed.errors import ArgumentError
    from deepspeed.ops.triton.row_variants import KernelVariant

    with pytest.raises(ArgumentError, match="other_kernel"):
        launch_cost(KernelVariant("other_kernel", torch.float32, ()), (1, 1, 1), ())
