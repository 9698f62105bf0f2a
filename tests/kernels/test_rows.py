"""Kernels of rows, sampling, packed products and messages by Triton's interpreter, against references."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.needs import need_triton

need_triton()

from deepspeed.errors import ArgumentError  # noqa: E402
from deepspeed.ops.triton import products, rows, sampling  # noqa: E402
from tests.kernels.interpreter import interpreted  # noqa: E402
from tests.kernels.suites import SUITES  # noqa: E402

CHECKS = {
    (suite, name): check
    for suite in (
        "row_kernels",
        "sampling_kernels",
        "packed_products",
        "gemv_kernels",
        "block_kernels",
        "single_row_kernels",
    )
    for name, check in SUITES[suite].checks().items()
}


@pytest.mark.parametrize(("suite", "name"), CHECKS)
def test_rows(suite: str, name: str) -> None:
    CHECKS[suite, name](interpreted(suite))


def test_what_does_not_fit_is_refused() -> None:
    kernels, x = interpreted("row_kernels"), torch.zeros(3, 64)
    for call in (
        lambda: rows.norm(kernels, x, torch.ones(32), eps=1e-6),
        lambda: rows.gated(kernels, x, x[:2], "silu"),
        lambda: rows.gated(kernels, x, x, "relu6"),
        lambda: rows.rotate_into_pages(kernels, (x[None],) * 3, (x, x), (x, x), torch.zeros(2, dtype=torch.int64)),
        lambda: products.packed_product(kernels, x, "int8", (torch.zeros(4, 32, dtype=torch.int8), torch.ones(4))),
        lambda: products.packed_product(kernels, x, "int8", (torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4))),
        lambda: products.packed_product(kernels, x, "fp8", (torch.zeros(4, 64, dtype=torch.int8), torch.ones(3))),
        lambda: products.packed_product(kernels, x, "int2", (torch.zeros(4, 64, dtype=torch.int8), torch.ones(4))),
        lambda: products.dense_product(kernels, x, torch.zeros(4, 64)),
        lambda: products.dense_product(kernels, x.half(), torch.zeros(4, 64).bfloat16()),
        lambda: products.rounded_rows(kernels, x[None]),
        lambda: sampling.sample(kernels, x, torch.zeros(3, 7), torch.zeros(3).double()),
        lambda: sampling.draw(kernels, torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
    ):
        with pytest.raises(ArgumentError):
            call()
