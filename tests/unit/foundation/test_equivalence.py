"""Example inputs, evaluation mode and tolerances of comparisons."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import ArgumentError
from deepspeed.foundation.equivalence import (
    evaluating,
    example_inputs,
    example_tokens,
    largest_value,
    made_up_inputs,
    relative_difference,
    tolerance,
)


class Config(SimpleNamespace):
    """As a config of Transformers."""

    model_type = "test"

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


class Tokens(nn.Module):
    """Takes tokens; draws numbers in each forward."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = Config(vocab_size=11, use_cache=True, **config)
        self.table, self.drop = nn.Embedding(11, 4), nn.Dropout(0.5)

    def forward(self, input_ids: torch.Tensor, use_cache: bool | None = None) -> torch.Tensor:
        return self.drop(self.table(input_ids)) + torch.rand(())


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 1e-4), (torch.float32, 1e-4), (torch.float16, 2e-2), (torch.bfloat16, 6e-2), (torch.int8, 6e-2)],
)
def test_a_tolerance_goes_by_the_dtype_and_a_factor(dtype: torch.dtype, limit: float) -> None:
    assert tolerance(dtype) == limit
    assert tolerance(dtype, 10) == 10 * limit


def test_a_difference_is_of_the_largest_expected_value() -> None:
    expected = torch.tensor([1.0, -4.0])
    assert relative_difference(expected + torch.tensor([0.0, 1.0]), expected) == 0.25
    assert relative_difference(expected + 1, expected, scale=2.0) == 0.5
    assert relative_difference(torch.ones(2), torch.zeros(2), floor=0.5) == 2.0
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_difference(torch.zeros(0), torch.zeros(0)) == 0.0
    assert relative_difference(expected.bfloat16(), expected) == 0.0


@pytest.mark.parametrize("bad", [torch.ones(3), torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.inf])])
def test_other_shapes_and_what_is_not_finite_are_infinitely_far(bad: torch.Tensor) -> None:
    assert relative_difference(bad, torch.ones(2)) == math.inf
    assert relative_difference(torch.ones(2), bad) == math.inf
    assert relative_difference(bad, bad.clone()) == (0.0 if bad.isfinite().all() else math.inf)


def test_the_largest_value_is_absolute_and_shows_nan() -> None:
    assert [largest_value(torch.tensor(v)) for v in ([-3.0, 2.0], [1.0, 2.0], [])] == [3.0, 2.0, 0.0]
    assert math.isnan(largest_value(torch.tensor([1.0, math.nan])))


def test_modes_random_state_and_configs_are_put_back() -> None:
    model = nn.Sequential(Tokens(), nn.Dropout(), nn.Dropout())
    model[2].eval()
    before, config = torch.get_rng_state(), model[0].config
    with evaluating(model, use_cache=False):
        assert not any(module.training for module in model.modules())
        assert not model[0](torch.tensor([1])).requires_grad
        assert config.use_cache is False
    assert [model.training, model[1].training, model[2].training] == [True, True, False]
    assert torch.equal(before, torch.get_rng_state())
    assert config.use_cache is True
    with evaluating(model):
        assert config.use_cache is True


def test_modes_are_put_back_after_an_error() -> None:
    model = Tokens()
    with pytest.raises(ZeroDivisionError), evaluating(model, use_cache=False):
        raise ZeroDivisionError
    assert model.training
    assert model.config.use_cache is True


def test_tokens_are_made_up_from_the_config() -> None:
    inputs = example_inputs(Tokens(), shape=(2, 5))
    assert inputs["use_cache"] is False
    assert inputs["input_ids"].shape == (2, 5)
    assert 3 <= int(inputs["input_ids"].min()) <= int(inputs["input_ids"].max()) < 11
    assert torch.equal(inputs["input_ids"], example_inputs(Tokens(), shape=(2, 5))["input_ids"])
    assert torch.equal(inputs["input_ids"], example_tokens(Config(vocab_size=11), 2, 5))
    assert int(example_tokens(Config(vocab_size=1 << 20), 4, 99).max()) < 1000
    assert int(example_tokens(Config(), 4, 99).max()) < 32
    assert int(example_tokens(Config(vocab_size=2), 4, 9).min()) == 1
    text = SimpleNamespace(vocab_size=5)
    nested = SimpleNamespace(get_text_config=lambda decoder=None: text, vocab_size=9)
    assert int(example_tokens(nested, 4, 99).max()) == 4


def test_a_decoder_behind_an_encoder_gets_tokens_of_its_own() -> None:
    inputs = example_inputs(Tokens(is_encoder_decoder=True), shape=(2, 8))
    assert inputs["decoder_input_ids"].shape == (2, 6)
    assert not torch.equal(inputs["decoder_input_ids"], inputs["input_ids"][:, :6])


@pytest.mark.parametrize(("size", "shape"), [(8, (2, 1, 8, 8)), ((4, 6), (2, 1, 4, 6))])
def test_pictures_have_the_size_that_the_config_says(size: Any, shape: tuple[int, ...]) -> None:
    model = Tokens(image_size=size, num_channels=1)
    model.main_input_name = "pixel_values"  # type: ignore[assignment]
    assert made_up_inputs(model, model.config, 2, 8)["pixel_values"].shape == shape


@pytest.mark.parametrize("example", [torch.ones(2, 3), (torch.ones(2, 3),), {"input": torch.ones(2, 3)}])
def test_an_example_takes_the_dtype_of_the_model(example: Any) -> None:
    layer = nn.Linear(3, 3).bfloat16()
    assert example_inputs(layer, example)["input"].dtype == torch.bfloat16
    layer.example_input_array = example
    assert example_inputs(layer)["input"].dtype == torch.bfloat16


def test_what_nothing_says_is_refused() -> None:
    with pytest.raises(ArgumentError, match="Linear does not say what its forward takes"):
        example_inputs(nn.Linear(3, 3))
    model = Tokens()
    model.main_input_name = "input_features"  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match="the input 'input_features' of Tokens cannot be made up"):
        example_inputs(model)
