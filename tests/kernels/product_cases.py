"""Cases of products with matrices of all forms, with references in fp64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from deepspeed.inference.quantization.float8 import FLOAT8, scaled_rows
from deepspeed.inference.quantization.packed_weight import PackedWeight, PackingFormat
from deepspeed.ops.triton import products
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.products import dense_product, packed_product
from deepspeed.ops.triton.row_variants import wide_variant
from tests.kernels.pairs import pairwise
from tests.kernels.row_cases import DTYPES, spread

Check = Callable[[Kernels], None]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}  # of the largest
OPTIONS = {
    "form": ("int8", "int4", "fp8"), "rows": (1, 3, 16, 17, 40), "outputs": (1, 32, 70), "inputs": (32, 64, 160, 1024),
    "dtype": DTYPES, "bias": (False, True), "gap": (0, 16), "size": (1.0, 1e-5),
}  # fmt: skip
FEW = {
    "form": ("dense", "int8", "int4", "fp8"), "rows": (1, 2, 3), "outputs": (1, 13, 32), "inputs": (32, 160, 2080),
    "dtype": DTYPES[1:], "bias": (False, True), "gap": (0, 16), "size": (1.0, 1e-5),
}  # fmt: skip
WIDE = {
    "form": ("int8", "int4", "fp8"), "rows": (20, 33, 130), "outputs": (32, 70), "inputs": (128, 384),
    "dtype": DTYPES[1:], "bias": (False, True), "gap": (0, 16), "size": (1.0, 1e-5),
}  # fmt: skip
FORMATS = {"int8": PackingFormat(8, 0, 1, True), "int4": PackingFormat(4, 32, 1, False)}


def matrix(form: str, outputs: int, inputs: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The parts of a matrix in a form, and its values [outputs, inputs] in fp64."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)) + 0.3
    if form == "fp8":  # among them subnormal ones
        values, scale = scaled_rows(torch.where(weight.abs() < 0.1, weight * 0.01, weight))
        return (values.view(torch.int8), scale), values.double() * scale.double()
    packed = PackedWeight(weight, FORMATS[form], torch.float32)
    parts = packed.integers.detach(), packed.scale.detach(), packed.offset.detach()
    return parts if form == "int4" else parts[:2], packed.dense().double()


def _product(case: dict[str, Any], few: bool = False, many: bool = False) -> Check:
    """`few`: without invariance, by kernels for few rows; `many`: likewise, for many."""
    dtype, form = case["dtype"], case["form"]

    def check(kernels: Kernels) -> None:
        inputs = spread(case["rows"], case["inputs"], dtype, 2, case["gap"]) * case["size"]
        bias = None
        if case["bias"]:
            bias = (torch.randn(case["outputs"], generator=torch.Generator().manual_seed(3)) * case["size"]).to(dtype)
        if form == "dense":
            weight = torch.randn(case["outputs"], case["inputs"], generator=torch.Generator().manual_seed(1)).to(dtype)
            values = weight.double()
        else:
            parts, values = matrix(form, case["outputs"], case["inputs"])

        def product(rows: torch.Tensor) -> torch.Tensor:
            if form == "dense":
                return dense_product(kernels, rows, weight, bias)
            return packed_product(kernels, rows, form, parts, bias, invariant=not few and not many)

        result = product(inputs)
        wanted = inputs.double() @ values.T + (0 if bias is None else bias.double())
        assert result.shape == wanted.shape and result.dtype == dtype
        size = (inputs.double().abs() @ values.abs().T).max() / 8  # what is rounded, if sums cancel
        error = float((result.double() - wanted).abs().max() / torch.maximum(wanted.abs().max(), size))
        step = torch.finfo(dtype).tiny * torch.finfo(dtype).eps / float(size)  # of subnormal results
        assert error <= TOLERANCE[dtype] + step, f"off by {error:.2g}"
        alone = product(inputs.flip(0)).flip(0) if many else torch.cat([product(row[None]) for row in inputs[-2:]])
        assert torch.equal(alone, result[-len(alone) :]), "a row's bits depend on its neighbours"

    return check


def _one_scale(kernels: Kernels, invariant: bool) -> None:
    """A matrix with one scale."""
    inputs = spread(1, 64, torch.bfloat16, 4)
    (values, _), scale = matrix("fp8", 5, 64)[0], torch.full((1,), 0.5)
    result = packed_product(kernels, inputs, "fp8", (values, scale), None, invariant)
    wanted = inputs.double() @ (values.view(FLOAT8).double() * 0.5).T
    assert float((result.double() - wanted).abs().max() / wanted.abs().max()) <= TOLERANCE[torch.bfloat16]


def _every_code(kernels: Kernels, invariant: bool) -> None:
    """All numbers of e4m3, exactly."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where(codes & 127 == 127, torch.zeros_like(codes), codes).repeat_interleave(32).view(256, 32)
    chosen = torch.zeros(1, 32)
    chosen[0, 13] = 1.0
    for dtype in DTYPES if invariant else DTYPES[1:]:
        parts = codes.view(torch.int8), torch.ones(1)
        result = packed_product(kernels, chosen.to(dtype), "fp8", parts, None, invariant)
        assert torch.equal(result[0].float(), codes[:, 13].contiguous().view(FLOAT8).float()), dtype


def _named(cases: list[dict[str, Any]], few: bool) -> dict[str, Check]:
    made = {"-".join(f"{key}={value}" for key, value in case.items()): _product(case, few) for case in cases}
    whole = {"one scale": _one_scale, "codes": _every_code}
    return made | {name: functools.partial(check, invariant=not few) for name, check in whole.items()}


def _few_wide(kernels: Kernels) -> None:
    """17 to 32 rows with a matrix of 4 bits that is large."""
    inputs, variant = spread(20, 64, torch.bfloat16, 5), wide_variant(torch.bfloat16, "int4", 20, 1 << 20, 64)
    parts, values = matrix("int4", 140, 64)
    with mock.patch.object(products, "wide_variant", lambda *_: variant):
        result = packed_product(kernels, inputs, "int4", parts)
    wanted = inputs.double() @ values.T
    assert variant is not None and variant.constants["BLOCK_ROWS"] == 32
    assert float((result.double() - wanted).abs().max() / wanted.abs().max()) <= TOLERANCE[torch.bfloat16]


def checks() -> dict[str, Check]:
    """All checks of products in tiles, and of many rows, by name."""
    tiles = _named([case for seed in range(2) for case in pairwise(OPTIONS, seed)], False)
    wide = {
        "wide-" + "-".join(f"{key}={value}" for key, value in case.items()): _product(case, many=True)
        for seed in range(2)
        for case in pairwise(WIDE, seed)
    }
    return tiles | wide | {"wide-few": _few_wide}


def few_checks() -> dict[str, Check]:
    """All checks of products of few rows by name."""
    return _named([case for seed in range(2) for case in pairwise(FEW, seed)], True)
