"""Cases of kernels of single rows, with references in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.rows import ACTIVATIONS
from deepspeed.ops.triton.single_row import NormedRow, RowMatrix, add, gate, rotate
from tests.kernels.pairs import pairwise
from tests.kernels.product_cases import matrix
from tests.kernels.row_cases import spread

Check = Callable[[Kernels], None]
BF16, TOLERANCE = torch.bfloat16, 0.012  # of the largest: three roundings
FORMS = ("dense", "int8", "int4", "fp8")
ADDED = {
    "form": FORMS, "outputs": (1, 13, 64), "inputs": (32, 160, 2080), "bias": (False, True), "shift": (0.0, 1.0),
    "eps": (1e-6, 0.3),
}  # fmt: skip
GATED = {
    "form": FORMS, "outputs": (3, 32), "inputs": (32, 160), "bias": (False, True), "activation": ACTIVATIONS,
    "normed": (False, True), "eps": (1e-6, 0.3), "parts": (1, 7, 1500),
}  # fmt: skip
ROTATED = {
    "form": FORMS, "head": (16, 64), "heads": (1, 4), "cached": (1, 2), "inputs": (32, 160), "bias": (False, True),
    "normed": (False, True), "padding": (False, False, True), "parts": (1, 7, 1500),
}  # fmt: skip
FUNCTIONS: tuple[Callable[..., Any], ...] = (F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"))


def agrees(result: torch.Tensor, wanted: torch.Tensor, largest: Any = None) -> None:
    """Raise unless a result is near."""
    size = wanted.abs().max() if largest is None else largest
    error = float((result.double() - wanted).abs().max() / size)
    assert result.dtype == BF16 and error <= TOLERANCE, f"off by {error:.2g}"


def made(case: dict[str, Any], outputs: int) -> tuple[RowMatrix, torch.Tensor, torch.Tensor]:
    """A matrix, its values and its bias in fp64."""
    bias = spread(1, outputs, BF16, 3)[0] if case["bias"] else None
    if case["form"] == "dense":
        weight = spread(outputs, case["inputs"], BF16, 1)
        parts, values = (weight,), weight.double()
    else:
        parts, values = matrix(case["form"], outputs, case["inputs"])
    return RowMatrix(case["form"], parts, bias), values, torch.zeros(1).double() if bias is None else bias.double()


def row_of(case: dict[str, Any]) -> tuple[NormedRow, torch.Tensor]:
    """A row, and the values for the product in fp64."""
    values = spread(1, case["inputs"], BF16, 2)
    if not case["normed"]:
        return NormedRow(values), values.double()
    squares = spread(1, case["parts"], torch.float32, 4)[0].abs() + 0.1
    eps = case.get("eps", 1e-3)
    factor = (squares.double().sum() / case["inputs"] + eps).rsqrt()
    return NormedRow(values, squares, eps), values.double() * factor


def _added(case: dict[str, Any]) -> Check:
    def check(kernels: Kernels) -> None:
        outputs = case["outputs"]
        weight, values, bias = made(case, outputs)
        row, residual, norm = (
            spread(1, case["inputs"], BF16, 2),
            spread(1, outputs, BF16, 5),
            spread(1, outputs, BF16, 6),
        )
        normed, stream = add(kernels, row, weight, residual, norm[0], case["eps"], case["shift"])
        wanted = row.double() @ values.T + bias + residual.double()
        size = torch.maximum(wanted.abs().max(), (row.double().abs() @ values.abs().T).max() / 8)
        agrees(stream, wanted, size)
        agrees(normed.values, stream.double() * (norm.double() + case["shift"]))
        assert normed.squares is not None and normed.eps == case["eps"]
        torch.testing.assert_close(normed.squares.sum(), stream.float().square().sum(), rtol=1e-5, atol=0)

    return check


def _gated(case: dict[str, Any]) -> Check:
    def check(kernels: Kernels) -> None:
        weight, values, bias = made(case, 2 * case["outputs"])
        row, x = row_of(case)
        total = ((x @ values.T + bias) / 1.0)[0]
        wanted = FUNCTIONS[ACTIVATIONS.index(case["activation"])](total[: case["outputs"]]) * total[case["outputs"] :]
        result = gate(kernels, row, weight, case["activation"])
        agrees(result[0], wanted, torch.maximum(wanted.abs().max(), total.abs().max()))

    return check


def _rotated(case: dict[str, Any]) -> Check:
    def check(kernels: Kernels) -> None:
        heads, cached, size = case["heads"], case["cached"], case["head"]
        weight, values, bias = made(case, (heads + 2 * cached) * size)
        row, x = row_of(case)
        angles = spread(1, size, torch.float32, 7) * 3
        turn = angles.cos().to(BF16), (angles * 1.1).sin().to(BF16)
        pools = torch.full((9, cached, size), 7.0).to(BF16), torch.full((9, cached, size), 7.0).to(BF16)
        slots = torch.tensor([-1 if case["padding"] else 5])
        queries = rotate(kernels, row, weight, turn, pools, slots)
        every = (x @ values.T + bias).view(-1, size)
        half = torch.cat([-every[:, size // 2 :], every[:, : size // 2]], 1)
        turned = every * turn[0].double() + half * turn[1].double()
        largest = every.abs().max()
        untouched = [each[torch.arange(9) != slots[0]] for each in pools]
        assert all(bool((each == 7.0).all()) for each in untouched)
        if not case["padding"]:
            agrees(queries[0], turned[:heads], largest)
            agrees(pools[0][5], turned[heads : heads + cached], largest)
            agrees(pools[1][5], every[heads + cached :], largest)

    return check


def checks() -> dict[str, Check]:
    """All checks by name."""
    named: dict[str, Check] = {}
    for name, options, make in (("add", ADDED, _added), ("gate", GATED, _gated), ("rotate", ROTATED, _rotated)):
        for seed in range(2):
            for case in pairwise(options, seed):
                named[f"{name}-" + "-".join(f"{key}={value}" for key, value in case.items())] = make(case)
    return named
