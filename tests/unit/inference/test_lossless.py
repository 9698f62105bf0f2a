"""Matrices of bf16 in 12 bits: products, logits and files have the bits of the whole ones."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from deepspeed.inference.native import functions, matrix_of, product, rows_of
from deepspeed.inference.quantization.lossless import LosslessWeight, lossless_twin
from deepspeed.native import INSTRUCTION_SETS
from tests.harness.kernels import forms

pytestmark = pytest.mark.skipif(functions() is None, reason="the native library is not built, or off")


@pytest.fixture(params=forms(INSTRUCTION_SETS))
def form(request):
    """Kernels of one instruction set that the processor has."""
    found = functions()
    assert found.ds_instruction_set(INSTRUCTION_SETS.index(request.param)) == INSTRUCTION_SETS.index(request.param)
    yield request.param
    found.ds_instruction_set(len(INSTRUCTION_SETS))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """In every bit, but for which NaN it is."""
    lost = one.isnan()
    return torch.equal(lost, two.isnan()) and torch.equal(
        bits(one.masked_fill(lost, 0)), bits(two.masked_fill(lost, 0))
    )


def matrix(outputs: int, inputs: int, escapes: int = 0) -> torch.Tensor:
    """Random, with so many elements whose exponents are all over."""
    made = (torch.randn(outputs, inputs) * 0.05).bfloat16()
    at = torch.randperm(made.numel())[:escapes]
    odd = torch.tensor([0.0, -0.0, 1e-40, -9e-41, 3e38, -2e30, 1e-20, 700.0])
    made.view(-1)[at] = odd[torch.arange(escapes) % len(odd)].bfloat16()
    return made


def packed(weight: torch.Tensor) -> LosslessWeight:
    """Whatever it holds, whether it pays or not."""
    with mock.patch("deepspeed.inference.quantization.lossless.RAREST", 1):
        return LosslessWeight(weight)


@pytest.mark.parametrize(("outputs", "inputs"), [(67, 192), (32, 2112), (3, 64), (130, 832)])
def test_products_and_rows_have_the_bits_of_the_whole_matrix(form, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    for escapes in (0, 5, outputs * inputs // 3):
        whole, bias = matrix(outputs, inputs, escapes), torch.randn(outputs)
        one = packed(whole)
        assert torch.equal(bits(one.dense()), bits(whole)) and torch.equal(bits(lossless_twin(one)), bits(whole))
        at = torch.tensor([[outputs - 1, 0], [1, outputs // 2]])
        assert torch.equal(bits(one.rows(at)), bits(whole[at]))
        plain, ours = matrix_of(whole, bias), matrix_of(one, bias)
        x = torch.randn(130, inputs)
        for rows in (1, 2, 3, 4, 8, 32, 61, 130):
            given = x[:rows].contiguous()
            assert same(product(ours, given, 1), product(plain, given, 1)), (escapes, rows)
        assert same(product(ours, x[:33].contiguous(), 2), product(plain, x[:33].contiguous(), 1))
        first = outputs // 2 // 4 * 4
        some, right = (rows_of(one, first, outputs - first) for one in (ours, plain))
        assert same(product(some, x[:3].contiguous(), 1), product(right, x[:3].contiguous(), 1))
