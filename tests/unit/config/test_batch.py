"""The batch triple: every combination given, what is derived, and the text when it cannot hold."""

from __future__ import annotations

import pytest

from deepspeed.config import BatchSizeError, DeepSpeedConfig

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("given", "world", "expected"),
    [
        ({TRAIN: 16, MICRO: 2, STEPS: 4}, 2, (16, 2, 4)),
        ({TRAIN: 16, MICRO: 2}, 2, (16, 2, 4)),
        ({TRAIN: 16, STEPS: 4}, 2, (16, 2, 4)),
        ({MICRO: 2, STEPS: 4}, 2, (16, 2, 4)),
        ({TRAIN: 16}, 2, (16, 8, 1)),
        ({MICRO: 2}, 3, (6, 2, 1)),
        ({TRAIN: 1e3}, 1, (1000, 1000, 1)),
    ],
)
def test_what_is_missing_is_derived(given, world, expected):
    cfg = DeepSpeedConfig(given, world=world)
    assert (cfg.train_batch_size, cfg.train_micro_batch_size_per_gpu, cfg.gradient_accumulation_steps) == expected
    assert all(isinstance(value, int) for value in expected)


@pytest.mark.parametrize(
    ("given", "world", "numbers"),
    [
        ({TRAIN: 8, MICRO: 4, STEPS: 2}, 2, "8 != 4 * 2 * 2"),
        ({TRAIN: 7}, 2, "7 != 3 * 1 * 2"),
        ({TRAIN: 2, MICRO: 4}, 1, "2 != 4 * 0 * 1"),
        ({TRAIN: 10, STEPS: 4}, 1, "10 != 2 * 4 * 1"),
    ],
)
def test_a_triple_that_cannot_hold_says_so_in_the_words_clients_search_for(given, world, numbers):
    with pytest.raises(AssertionError) as caught:
        DeepSpeedConfig(given, world=world)
    assert isinstance(caught.value, BatchSizeError)
    words = (
        "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * "
        f"world_size {numbers}"
    )
    assert words in str(caught.value)


@pytest.mark.parametrize("given", [{}, {STEPS: 4}])
def test_one_of_the_two_sizes_is_needed(given):
    with pytest.raises(BatchSizeError, match=f"{TRAIN} or {MICRO} must be given"):
        DeepSpeedConfig(given)


@pytest.mark.parametrize("name", [TRAIN, MICRO, STEPS])
@pytest.mark.parametrize("value", [0, -1, 1.5, "eight", True, float("nan"), float("inf")])
def test_each_part_is_a_whole_number_above_zero(name, value):
    with pytest.raises(AssertionError, match=name) as caught:
        DeepSpeedConfig({TRAIN: 8, **{name: value}})
    assert "Check batch" not in str(caught.value)


def test_the_world_of_an_mpu_takes_the_place_of_world():
    class Mpu:
        def get_data_parallel_world_size(self):
            return 4

    assert DeepSpeedConfig({TRAIN: 8}, Mpu()).train_micro_batch_size_per_gpu == 2
