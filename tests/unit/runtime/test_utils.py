"""Small tools behind `deepspeed.runtime.utils` and `deepspeed.utils`."""

from __future__ import annotations

import itertools
import math
import random
import re

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import ArgumentError
from deepspeed.runtime import utils
from deepspeed.utils import OnDevice, instrument_w_nvtx


def heaviest(weights: list[int], bounds: list[int]) -> int:
    return max(sum(weights[low:high]) for low, high in itertools.pairwise(bounds))


@pytest.mark.parametrize(
    ("items", "parts", "bounds"), [(6, 3, [0, 2, 4, 6]), (7, 3, [0, 3, 5, 7]), (2, 4, [0, 1, 2, 2, 2])]
)
def test_uniform_parts_differ_by_one_at_most(items: int, parts: int, bounds: list[int]) -> None:
    assert utils.partition_uniform(items, parts) == bounds


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 5))
def test_balanced_parts_are_the_best_there_are(weights: list[int], parts: int) -> None:
    bounds = utils.partition_balanced(weights, parts)
    assert bounds[0] == 0 and bounds[-1] == len(weights) and bounds == sorted(bounds) and len(bounds) == parts + 1
    assert len(set(bounds)) == min(parts, len(weights)) + 1  # no part is empty that need not be
    cuts = itertools.combinations_with_replacement(range(len(weights) + 1), parts - 1)
    assert heaviest(weights, bounds) == min(heaviest(weights, [0, *cut, len(weights)]) for cut in cuts)


@pytest.mark.parametrize("cut", [lambda: utils.partition_uniform(3, 0), lambda: utils.partition_balanced([1.0], 0)])
def test_a_row_cannot_be_cut_into_no_parts(cut) -> None:
    with pytest.raises(ArgumentError, match="num_parts is 0"):
        cut()


def test_a_seed_decides_all_generators() -> None:
    def draw() -> tuple[float, float, float]:
        utils.set_random_seed(2**32 + 7)
        return random.random(), float(numpy.random.rand()), torch.rand(1).item()

    assert draw() == draw()


def test_nests_move_and_a_criterion_chooses() -> None:
    nest = {"a": [torch.ones(2)], "b": torch.ones(3, dtype=torch.long), "c": "text"}
    moved = utils.move_to_device(nest, "meta")
    assert moved["a"][0].is_meta and moved["b"].is_meta and moved["c"] == "text"
    chosen = utils.move_to_device(nest, "meta", torch.is_floating_point)
    assert chosen["a"][0].is_meta and not chosen["b"].is_meta
    assert utils.move_to_device(torch.nn.Linear(2, 2), "meta").weight.is_meta


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_clipping_is_that_of_torch(norm_type: float) -> None:
    ours, theirs = (torch.nn.Linear(5, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    for layer in (ours, theirs):
        (layer(torch.arange(5.0)) ** 2).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5, norm_type)
    torch.testing.assert_close(utils.get_grad_norm(ours.parameters(), norm_type), expected)
    torch.testing.assert_close(utils.clip_grad_norm_(ours.parameters(), 0.5, norm_type), expected)
    assert torch.equal(ours.weight.grad, theirs.weight.grad) and torch.equal(ours.bias.grad, theirs.bias.grad)


def test_norms_join() -> None:
    assert utils.get_global_norm([3.0, torch.tensor(4.0)]) == 5.0


def test_memory_is_shown_when_forced(capsys: pytest.CaptureFixture[str]) -> None:
    utils.see_memory_usage("quiet")
    utils.see_memory_usage("here", force=True)
    shown = capsys.readouterr().err
    assert "quiet" not in shown and shown.count("here\nMA ") == 1
    assert re.search(
        r"MA [\d.]+ GB  Max_MA [\d.]+ GB  CA [\d.]+ GB  Max_CA [\d.]+ GB\nCPU Virtual Memory:  used", shown
    )


def test_on_device_makes_tensors_there_and_ends() -> None:
    with OnDevice(torch.bfloat16):
        made, whole, named = torch.nn.Linear(2, 2).weight, torch.arange(3), torch.ones(1, device="cpu")
    assert made.is_meta and made.dtype == torch.bfloat16 and whole.dtype == torch.int64 and not named.is_meta
    with OnDevice(torch.bfloat16, enabled=False):
        assert torch.ones(1).dtype == torch.float32
    with pytest.raises(KeyError), OnDevice(torch.float16, device="cpu"):
        raise KeyError
    assert torch.ones(1).dtype == torch.float32 and not torch.ones(1).is_meta


def test_a_traced_function_is_the_same_function() -> None:
    @instrument_w_nvtx
    def add(a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    assert add(2, b=3) == 5 and add.__doc__ == "Add."


def test_folders_are_made_for_files(tmp_path) -> None:
    utils.ensure_directory_exists(tmp_path / "a" / "b" / "file.txt")
    assert (tmp_path / "a" / "b").is_dir() and not (tmp_path / "a" / "b" / "file.txt").exists()


def test_calls_in_words_and_an_optimizer_that_does_nothing() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert utils.call_to_str("step", 1, "a", lr=0.5) == "step(1, 'a', lr=0.5)"
    assert utils.DummyOptim(parameters).param_groups == [{"params": parameters}]
