"""Cases of the kernels of rows, with references in fp64: norms, rotation into pages, gated activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from deepspeed.inference.quantization.float8 import scaled_rows
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.products import rounded_rows
from deepspeed.ops.triton.rows import ACTIVATIONS, gated, norm, rotate_into_pages
from tests.kernels.pairs import pairwise

Check = Callable[[Kernels], None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of a value, by its size


def agrees(result: torch.Tensor, wanted: torch.Tensor, factor: float = 1.0) -> None:
    """Each value is within the rounding of its dtype, and a little of the largest in fp32."""
    assert result.shape == wanted.shape and bool(result.isfinite().all()), "shape, or not finite"
    step = ROUNDING[result.dtype] * factor
    error = (result.double() - wanted).abs() - step * wanted.abs() - 2e-6 * factor * wanted.abs().max()
    assert float(error.max()) <= 0, f"off by {float(error.max()):.2g} more than a rounding"


def spread(count: int, width: int, dtype: torch.dtype, seed: int, gap: int = 0) -> torch.Tensor:
    """Rows of a larger tensor, whose other places are NaN."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.full((count, width + gap), torch.nan, dtype=dtype)
    whole[:, :width] = torch.randn(count, width, generator=generator)
    return whole[:, :width]


def _norm(case: dict[str, Any]) -> Check:
    width, dtype = case["width"], case["dtype"]

    def check(kernels: Kernels) -> None:
        rows = spread(5, width, dtype, 1, case["gap"]) * case["size"] + (3.0 if case["centred"] else 0.0)
        residual = spread(5, width, dtype, 2, case["gap"] // 2) if case["residual"] else None
        weight = torch.randn(width, generator=torch.Generator().manual_seed(3)).to(dtype)
        bias = torch.randn(width, generator=torch.Generator().manual_seed(4)).to(dtype) if case["bias"] else None
        options = {"eps": case["eps"], "centred": case["centred"], "shift": case["shift"]}
        result, stream = norm(kernels, rows, weight, bias, residual, **options)
        total = rows if residual is None else (rows.float() + residual.float()).to(dtype)
        assert torch.equal(stream, total), "the sum"
        values = total.double()
        values = values - values.mean(-1, keepdim=True) if case["centred"] else values
        wanted = values * (values.square().mean(-1, keepdim=True) + case["eps"]).rsqrt()
        wanted = wanted * (weight.double() + case["shift"]) + (0 if bias is None else bias.double())
        agrees(result, wanted, 4)
        again, _ = norm(kernels, rows[2:3], weight, bias, None if residual is None else residual[2:3], **options)
        assert torch.equal(again, result[2:3]), "a row's bits depend on its neighbours"

    return check


def _head_norm(case: dict[str, Any]) -> Check:
    width, heads, dtype = case["width"], case["heads"], case["dtype"]

    def check(kernels: Kernels) -> None:
        joint = spread(4, heads * width, dtype, 7, case["gap"])  # heads of a matrix that holds more
        rows = joint.unflatten(1, (heads, width))
        weight = torch.randn(width, generator=torch.Generator().manual_seed(8)).to(dtype)
        result, same = norm(kernels, rows, weight, eps=case["eps"])
        assert same is rows
        values = rows.double()
        agrees(result, values * (values.square().mean(-1, keepdim=True) + case["eps"]).rsqrt() * weight.double(), 4)

    return check


def _rotation(case: dict[str, Any]) -> Check:
    head, value, dtype, rotary = case["head"], case["value"] or case["head"], case["dtype"], case["rotary"]
    rotary = head if rotary is None else rotary

    def check(kernels: Kernels) -> None:
        generator, rows = torch.Generator().manual_seed(5), case["rows"]
        joint = torch.randn(rows, (case["heads"] + case["cached"]) * head, generator=generator).to(dtype)
        queries, keys = joint.split([case["heads"] * head, case["cached"] * head], 1)
        queries, keys = queries.unflatten(1, (-1, head)), keys.unflatten(1, (-1, head))
        values = torch.randn(rows, case["cached"], value, generator=generator).to(dtype)
        cosines, sines = (torch.randn(rows, rotary, generator=generator).to(dtype) for _ in range(2))
        slots = torch.randperm(rows + 9, generator=generator)[:rows]
        slots[2] = -1
        pools = tuple(torch.full((rows + 9, case["cached"], size), 99.0, dtype=dtype) for size in (head, value))
        out = rotate_into_pages(
            kernels, (queries, keys, values), (cosines, sines), (pools[0], pools[1]), slots, case["interleaved"]
        )
        used = slots >= 0

        def turned(heads: torch.Tensor) -> torch.Tensor:
            x = heads.double()
            x, rest = x[..., :rotary], x[..., rotary:]
            if case["interleaved"]:
                other = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
            else:
                other = torch.cat([-x[..., rotary // 2 :], x[..., : rotary // 2]], -1)
            return torch.cat([x * cosines.double()[:, None] + other * sines.double()[:, None], rest], -1)

        agrees(out[used], turned(queries)[used], 2)
        agrees(pools[0][slots[used]], turned(keys)[used], 2)
        assert torch.equal(pools[1][slots[used]], values[used]), "values"
        others = torch.ones(rows + 9, dtype=torch.bool)
        others[slots[used]] = False
        assert all(bool((pool[others] == 99).all()) for pool in pools), "slots of no row are written"

    return check


def _gate(case: dict[str, Any]) -> Check:
    def check(kernels: Kernels) -> None:
        joint = spread(3, 2 * case["width"], case["dtype"], 6, case["gap"]) * case["size"]
        gate, up = joint.split(case["width"], 1)
        x, y = gate.double(), up.double()
        function = {
            "silu": functional.silu, "gelu": functional.gelu,
            "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        }[case["activation"]]  # fmt: skip
        agrees(gated(kernels, gate, up, case["activation"]), function(x) * y, 4)

    return check


def _rounding(case: dict[str, Any]) -> Check:
    """The bits of `scaled_rows`: numbers of all sizes, zeros, subnormal results, ties; a row of zeros, of NaN."""

    def check(kernels: Kernels) -> None:
        rows = spread(5, case["width"], case["dtype"], 9, case["gap"])
        steps = torch.arange(case["width"]) % 40
        rows[0] = (rows[0].float().sign() * 2.0 ** (8.75 - 0.5 * steps)).to(rows.dtype)
        rows[1] = 0
        rows[2] = ((steps - 17) / 16).to(rows.dtype)  # ties of three bits
        rows[3] *= case["size"]
        values, scales = rounded_rows(kernels, rows)
        wanted, wanted_scales = scaled_rows(rows)
        assert torch.equal(scales, wanted_scales) and torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
        rows[4, -1] = torch.nan
        rows[3, 0] = torch.inf
        values, scales = rounded_rows(kernels, rows)
        assert bool(values[4, -1].float().isnan()) and bool(values[3, 0].float().isnan()) and bool(scales[3].isinf())

    return check


NORMS = {
    "width": (1, 64, 100, 600, 4096), "dtype": DTYPES, "centred": (False, True), "residual": (False, True),
    "bias": (False, True), "shift": (0.0, 1.0), "eps": (1e-6, 1e-1), "size": (1.0, 50.0), "gap": (0, 8),
}  # fmt: skip
HEAD_NORMS = {"width": (16, 80, 128), "heads": (1, 3), "dtype": DTYPES, "eps": (1e-6, 1e-1), "gap": (0, 16)}
ROTATIONS = {
    "head": (16, 64, 80, 128), "value": (0, 48), "dtype": DTYPES, "rotary": (None, 8), "interleaved": (False, True),
    "heads": (1, 5, 9), "cached": (1, 2), "rows": (4, 257),
}  # fmt: skip
GATES = {"width": (1, 96, 1024, 2500), "dtype": DTYPES, "activation": ACTIVATIONS, "size": (1.0, 20.0), "gap": (0, 8)}
ROUNDINGS = {"width": (1, 96, 5000), "dtype": DTYPES, "size": (1e-4, 60.0), "gap": (0, 8)}


def checks() -> dict[str, Check]:
    """All checks by name."""
    made: dict[str, Check] = {}
    suites = (
        ("norm", NORMS, _norm), ("head-norm", HEAD_NORMS, _head_norm), ("rotation", ROTATIONS, _rotation),
        ("gate", GATES, _gate), ("rounding", ROUNDINGS, _rounding),
    )  # fmt: skip
    for name, options, make in suites:
        for seed in range(2):
            for case in pairwise(options, seed):
                made[f"{name}-" + "-".join(f"{key}={value}" for key, value in case.items())] = make(case)
    return made
