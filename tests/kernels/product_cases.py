"""Cases of products with packed matrices, as `PackedWeight` packs them, with references in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.inference.quantization.packed_weight import PackedWeight, PackingFormat
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.rows import packed_product
from tests.kernels.pairs import pairwise
from tests.kernels.row_cases import DTYPES, spread

Check = Callable[[Kernels], None]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}  # of the largest
OPTIONS = {
    "bits": (8, 4), "rows": (1, 3, 16, 17, 40), "outputs": (1, 32, 70), "inputs": (32, 64, 160, 1024), "dtype": DTYPES,
    "bias": (False, True), "gap": (0, 16),
}  # fmt: skip
FORMATS = {8: PackingFormat(8, 0, 1, True), 4: PackingFormat(4, 32, 1, False)}


def _product(case: dict[str, Any]) -> Check:
    dtype, bits = case["dtype"], case["bits"]

    def check(kernels: Kernels) -> None:
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(case["outputs"], case["inputs"], generator=generator) + 0.3
        packed = PackedWeight(weight, FORMATS[bits], torch.float32)
        inputs = spread(case["rows"], case["inputs"], dtype, 2, case["gap"])
        bias = torch.randn(case["outputs"], generator=generator).to(dtype) if case["bias"] else None
        offsets = packed.offset.detach() if bits == 4 else None
        parts = packed.integers.detach(), packed.scale.detach(), offsets
        result = packed_product(kernels, inputs, *parts, bias)
        wanted = inputs.double() @ packed.dense().double().T + (0 if bias is None else bias.double())
        assert result.shape == wanted.shape and result.dtype == dtype
        size = (inputs.double().abs() @ packed.dense().double().abs().T).max() / 8  # what is rounded, if sums cancel
        error = float((result.double() - wanted).abs().max() / torch.maximum(wanted.abs().max(), size))
        assert error <= TOLERANCE[dtype], f"off by {error:.2g}"
        alone = torch.cat([packed_product(kernels, row[None], *parts, bias) for row in inputs[-2:]])
        assert torch.equal(alone, result[-2:]), "a row's bits depend on its neighbours"

    return check


def checks() -> dict[str, Check]:
    """All checks by name."""
    return {
        "-".join(f"{key}={value}" for key, value in case.items()): _product(case)
        for seed in range(2)
        for case in pairwise(OPTIONS, seed)
    }
