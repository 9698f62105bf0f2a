"""Evoformer attention against softmax(QKᵀ/√D + b1 + b2) V in fp64: results, gradients, memory, errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import deepspeed
from deepspeed.errors import ArgumentError
from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention, evoformer_attn
from deepspeed.profiling.live_memory import LiveMemory

SHAPE = (2, 5, 37, 3, 8)  # B, N, L, H, D
BOTH = (True, True)


@pytest.fixture(params=[1, 1000, 9000, 10**6], ids=["one row", "rows", "sequences", "one tile"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Tiles of one row, of some rows of a sequence, of some whole sequences, and of everything."""
    monkeypatch.setattr(evoformer_attn, "CPU_TILE", request.param)
    yield request.param


def drawn(shape: Sequence[int], dtype: torch.dtype = torch.float32, biases: Sequence[bool] = BOTH) -> list[Tensor]:
    """Q, K, V and the wanted biases."""
    torch.manual_seed(0)
    batch, sequences, length, heads, _ = shape
    shapes = (
        [shape] * 3 + [(batch, sequences, 1, 1, length)] * biases[0] + [(batch, 1, heads, length, length)] * biases[1]
    )
    return [torch.randn(each).to(dtype).requires_grad_() for each in shapes]


def listed(inputs: Sequence[Tensor], biases: Sequence[bool] = BOTH) -> list[Tensor | None]:
    rest = iter(inputs[3:])
    return [next(rest) if there else None for there in biases]


def plain(query: Tensor, key: Tensor, value: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
    scores = query.transpose(2, 3) @ key.permute(0, 1, 3, 4, 2) / math.sqrt(query.shape[-1])
    for bias in biases:
        scores = scores if bias is None else scores + bias
    return (scores.softmax(-1) @ value.transpose(2, 3)).transpose(2, 3)


def off(found: Tensor | None, wanted: Tensor | None) -> float:
    """Largest difference, over the largest wanted value."""
    assert found is not None and wanted is not None and found.shape == wanted.shape
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.drawn(16)
@pytest.mark.parametrize("biases", [BOTH, (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "bar"),
    [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)],
    ids=["fp32", "fp64", "bf16", "fp16"],
)
def test_results_and_gradients_are_those_of_fp64(
    dtype: torch.dtype, bar: float, biases: tuple[bool, bool], tile: int
) -> None:
    inputs = drawn(SHAPE, dtype, biases)
    twins = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found = DS4Sci_EvoformerAttention(*inputs[:3], listed(inputs, biases))
    wanted = plain(*twins[:3], listed(twins, biases))
    above = torch.randn(SHAPE).to(dtype)
    found.backward(above)
    wanted.backward(above.double())
    assert found.dtype == dtype and off(found, wanted) <= bar
    for tensor, twin in zip(inputs, twins, strict=True):
        assert tensor.grad is not None and tensor.grad.dtype == dtype and off(tensor.grad, twin.grad) <= bar


def test_numerical_gradients_of_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evoformer_attn, "CPU_TILE", 12)
    inputs = drawn((1, 2, 3, 2, 2), torch.float64)

    def of(*tensors: Tensor) -> Tensor:
        return DS4Sci_EvoformerAttention(*tensors[:3], tensors[3:])

    assert torch.autograd.gradcheck(of, inputs)
    assert torch.autograd.gradgradcheck(of, inputs)


def test_only_wanted_gradients_come() -> None:
    inputs = drawn(SHAPE)
    for index in range(5):
        for at, tensor in enumerate(inputs):
            tensor.requires_grad_(at == index).grad = None
        DS4Sci_EvoformerAttention(*inputs[:3], inputs[3:]).sum().backward()
        assert [tensor.grad is not None for tensor in inputs] == [at == index for at in range(5)]


def test_the_list_of_the_caller_stays_and_biases_may_be_of_another_dtype() -> None:
    *rest, mask, pair = drawn(SHAPE, torch.bfloat16)
    wanted = DS4Sci_EvoformerAttention(*rest, [mask, pair])
    biases: list[Tensor | None] = [mask.detach().float().requires_grad_()]
    DS4Sci_EvoformerAttention(*rest, biases).sum().backward()
    assert len(biases) == 1 and biases[0] is not None
    assert biases[0].grad is not None and biases[0].grad.dtype == torch.float32
    assert torch.equal(DS4Sci_EvoformerAttention(*rest, (mask, pair.double())), wanted)
    for none in ([], [None], (None, None)):
        assert torch.equal(DS4Sci_EvoformerAttention(*rest, none), DS4Sci_EvoformerAttention(*rest, []))


def test_masked_keys_count_for_nothing() -> None:
    inputs = drawn(SHAPE)
    mask = torch.zeros(2, 5, 1, 1, 37)
    mask[..., 30:] = -math.inf
    found = DS4Sci_EvoformerAttention(*inputs[:3], [mask])
    found.sum().backward()
    short = [tensor[:, :, :30] for tensor in inputs[:3]]
    assert off(found[:, :, :30], DS4Sci_EvoformerAttention(*short, [])) <= 1e-6
    assert inputs[2].grad is not None and inputs[1].grad is not None
    assert inputs[2].grad[:, :, 30:].abs().max() == 0 and inputs[1].grad.isfinite().all()


def test_inputs_that_are_views_and_sizes_of_zero() -> None:
    query, key, value, mask, pair = drawn(SHAPE)
    flipped = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value)]
    one_for_all = mask[:, :1].expand(2, 5, 1, 1, 37)
    found = DS4Sci_EvoformerAttention(*flipped, [one_for_all, pair.mT])
    assert off(found, plain(query, key, value, [one_for_all, pair.mT])) <= 1e-6
    for shape in ((0, 5, 4, 3, 8), (2, 0, 4, 3, 8), (2, 5, 0, 3, 8), (2, 5, 4, 0, 8)):
        inputs = drawn(shape)
        found = DS4Sci_EvoformerAttention(*inputs[:3], inputs[3:])
        found.sum().backward()
        assert found.shape == shape
        assert all(tensor.grad is not None and not tensor.grad.any() for tensor in inputs)


def test_under_autocast_its_dtype_is_used() -> None:
    inputs = drawn(SHAPE)
    low = [tensor.detach().bfloat16() for tensor in inputs[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        found = DS4Sci_EvoformerAttention(*inputs[:3], inputs[3:])
        found.sum().backward()  # a gradient in fp32 though autocast is on
        exact = DS4Sci_EvoformerAttention(*(tensor.double() for tensor in inputs[:3]), [])
    assert found.dtype == torch.bfloat16 and exact.dtype == torch.float64
    assert torch.equal(found, DS4Sci_EvoformerAttention(*low, inputs[3:]))
    assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in inputs)


def live(compute: object, shape: Sequence[int]) -> int:
    """Most bytes during forward and backward, beyond inputs, result and gradients."""
    inputs = drawn(shape)
    held = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
    above = torch.randn(shape)
    with LiveMemory() as memory:
        found = compute(*inputs[:3], inputs[3:])  # type: ignore[operator]
        found.backward(above)
    return memory.peak - 2 * held - found.numel() * found.element_size()


@pytest.mark.parametrize("dim", [1, 2], ids=["sequences", "length"])
def test_memory_is_linear(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evoformer_attn, "CPU_TILE", 2**14)
    shape, twice = [1, 8, 128, 4, 8], [1, 8, 128, 4, 8]
    twice[dim] *= 2
    small, large = live(DS4Sci_EvoformerAttention, shape), live(DS4Sci_EvoformerAttention, twice)
    assert large <= 2 * small, (small, large)
    whole = live(plain, shape)
    scores = 8 * 4 * 128 * 128 * 4
    assert whole > 2 * scores and small < scores / 2, (whole, small)
    if dim == 2:
        assert live(plain, twice) > 3.5 * whole


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({0: torch.zeros(5, 37, 3, 8)}, r"Q has shape \[5, 37, 3, 8\]; pass \[B, N, L, H, D\]"),
        ({1: torch.zeros(2, 5, 36, 3, 8)}, r"K has shape \[2, 5, 36, 3, 8\]; for this Q it is \[2, 5, 37, 3, 8\]"),
        ({2: torch.zeros(SHAPE, dtype=torch.float64)}, "Q, K and V have dtypes"),
        ({2: torch.zeros(SHAPE, device="meta")}, r"V is torch.float32 on meta; pass floats on cpu"),
        ({3: torch.zeros(2, 5, 1, 37)}, r"biases\[0\] .* it is \[2, 5, 1, 1, 37\] \(\[B, N, 1, 1, L\]\)"),
        ({3: torch.zeros(2, 5, 1, 1, 37, dtype=torch.bool)}, r"biases\[0\] is torch.bool"),
        ({4: torch.zeros(1, 1, 3, 37, 37)}, r"biases\[1\] .* it is \[2, 1, 3, 37, 37\] \(\[B, 1, H, L, L\]\)"),
        ({5: torch.zeros(1)}, "biases has 3 entries; pass at most two"),
    ],
    ids=range(8),
)
def test_wrong_inputs_are_named(changed: dict[int, Tensor], text: str) -> None:
    inputs = dict(enumerate(drawn(SHAPE))) | changed
    with pytest.raises(ArgumentError, match=text):
        DS4Sci_EvoformerAttention(inputs[0], inputs[1], inputs[2], [inputs[at] for at in range(3, len(inputs))])


def test_the_builder_loads_it() -> None:
    builder = deepspeed.ops.op_builder.EvoformerAttnBuilder()
    assert builder.is_compatible()
    assert builder.load().DS4Sci_EvoformerAttention is DS4Sci_EvoformerAttention
