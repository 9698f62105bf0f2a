"""Operators without values: the same shapes, strides and dtypes as with them; integers keep theirs."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.ops.fake_tensors import Valueless

SIDE = 64  # squared, more elements than what is computed

PROGRAMS: dict[str, Callable[[torch.Tensor], object]] = {
    "products": lambda x: F.linear(x, x.t(), x[0]),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 4, 16, 64)] * 3, is_causal=True),
    "masked attention": lambda x: F.scaled_dot_product_attention(
        *[x.view(1, 4, 16, 64)] * 3, attn_mask=torch.ones(16, 16, dtype=torch.bool).tril()
    ),
    "dropout": lambda x: F.dropout(x, 0.5),
    "norm": lambda x: F.layer_norm(x, (SIDE,), x[0], x[1]),
    "convolution": lambda x: F.conv2d(x.view(1, 4, 32, 32), x[:2, :36].reshape(2, 4, 3, 3), stride=2),
    "strides": lambda x: (x.t() * 2).transpose(0, 1).contiguous().view(-1, 2, 2).permute(2, 0, 1) + 1,
    "recurrent": lambda x: nn.LSTM(SIDE, 8, batch_first=True)(x.view(1, SIDE, SIDE))[0],
    "embedding": lambda x: F.embedding(torch.arange(6).view(2, 3), x),
    "entropy": lambda x: F.cross_entropy(x, torch.arange(SIDE)),
    "selection": lambda x: x[torch.arange(SIDE) % 3 == 0],
    "half": lambda x: (x.bfloat16() @ x.bfloat16()).float(),
    "in place": lambda x: (x * 2).mul_(3).add_(x).relu_(),
    "out": lambda x: torch.add(x, x, out=torch.empty(SIDE, SIDE)),
    "parts": lambda x: torch.stack(x.chunk(2)).split(1),
}


def shapes(found: object) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    tensors = [found] if isinstance(found, torch.Tensor) else list(found)  # type: ignore[call-overload]
    return [(t.shape, t.stride(), t.dtype) for t in tensors]


@pytest.mark.parametrize("name", PROGRAMS)
def test_shapes_are_those_of_real_operators_forward_and_backward(name: str) -> None:
    def run() -> list[object]:
        x = torch.randn(SIDE, SIDE, requires_grad=name not in ("out",))
        made = PROGRAMS[name](x)
        first = made if isinstance(made, torch.Tensor) else made[0]  # type: ignore[index]
        if first.requires_grad:
            first.float().sum().backward()
        return [shapes(made), None if x.grad is None else shapes(x.grad)]

    real = run()
    with Valueless():
        assert run() == real


def test_integers_keep_their_values_and_floats_do_not() -> None:
    with Valueless() as valueless:
        ids = torch.arange(5000)
        mask = (ids[:, None] >= ids[None, :100]).sum(1)
        assert int(mask[50]) == 51
        assert torch.linspace(0, 1, 5)[1].item() == 0.25  # small, so it is computed
        large = torch.randn(5000)
        assert not valueless.has_values(large)
        assert not valueless.has_values(large.view(50, 100)[3])
        assert not valueless.has_values(large.sum())
        assert (large.sum().item(), bool(torch.equal(large, large.clone()))) == (1.0, True)
        assert valueless.has_values(torch.zeros(3))


def test_what_a_router_chooses_is_spread_evenly() -> None:
    with Valueless():
        chosen = torch.randn(100, 8).repeat(4, 1).softmax(-1).topk(2).indices
        assert torch.bincount(chosen.reshape(-1), minlength=8).tolist() == [100] * 8


def test_no_memory_is_touched() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Valueless():
        weights = [nn.Linear(8192, 8192).weight for _ in range(8)]  # 2 GiB
        x = torch.randn(8192, 8192)
        for weight in weights:
            x = x @ weight
        x.sum().backward()
        assert all(weight.grad is not None for weight in weights)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB
