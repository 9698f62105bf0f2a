"""Random programs of products whose weights are made of each other: a backward in two has autograd's bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.pipe.test_split_backward import ROWS, WIDTH, Model, both, matrix

Made = list[torch.Tensor]
# Of weights, activations and a bias: a new weight, or a new activation.
WEIGHTS: Sequence[Callable[[Callable[[], torch.Tensor]], torch.Tensor]] = (
    lambda w: w() + w(),
    lambda w: w() @ w(),
    lambda w: w() * 0.7,
    lambda w: w().t(),
)
VALUES: Sequence[Callable[[Any, Any, torch.Tensor], torch.Tensor]] = (
    lambda w, x, b: torch.tanh(x() @ w()),
    lambda w, x, b: torch.tanh(x() @ w().t()),
    lambda w, x, b: torch.addmm(b, x(), w()).tanh(),
    lambda w, x, b: (w() @ x().t()).t().tanh(),
    lambda w, x, b: x() * w().mean(),
    lambda w, x, b: torch.softmax(x() @ x().t(), -1) @ x(),
    lambda w, x, b: torch.ones(ROWS, WIDTH) @ w() + x(),
    lambda w, x, b: b.expand(ROWS, WIDTH) @ w(),
    lambda w, x, b: x() + x(),
)


def program(seed: int) -> Model:
    """A model that does the same each time, as the seed says."""
    count = 2 + seed % 4

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        chance = random.Random(seed)
        weights: Made = [getattr(m, f"w{at}") for at in range(count)]
        values: Made = [x]
        for _ in range(chance.randint(4, 22)):
            if chance.random() < 0.3:
                weights.append(chance.choice(WEIGHTS)(lambda: chance.choice(weights)))
            else:
                op = VALUES[0] if chance.random() < 0.3 else chance.choice(VALUES)
                values.append(op(lambda: chance.choice(weights), lambda: chance.choice(values), m.bias))
        return torch.stack(values[-4:]).sum(0)

    return Model(function, bias=nn.Parameter(torch.randn(WIDTH)), **{f"w{at}": matrix() for at in range(count)})


@pytest.mark.parametrize("first", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in (25, 125))])
def test_random_programs_have_the_bits_of_autograd(first: int) -> None:
    put_off = 0
    for seed in range(first, first + (100 if first else 25)):
        torch.manual_seed(seed)
        whole, halves, names = both(program(seed))
        put_off += bool(names)
        for one, other in zip(whole, halves, strict=True):
            assert (one is None) == (other is None), seed
            assert one is None or torch.equal(one, other), seed
    assert put_off > 10
