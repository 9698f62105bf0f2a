"""The memory estimates against the formula, and the tables they print."""

from __future__ import annotations

import pytest
import torch

from deepspeed.errors import ArgumentError
from deepspeed.zero.api.memory_estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_live,
    state_bytes,
)


@pytest.mark.parametrize(
    ("stage", "low", "accumulating", "expected"),
    [
        (0, True, False, 18.0),
        (0, False, False, 16.0),
        (1, True, False, 2 + 16 / 4),
        (1, True, True, 2 + 12 / 4 + 4),
        (1, False, True, 4 + 8 / 4 + 4),
        (2, True, True, 2 + 16 / 4),
        (2, False, False, 4 + 12 / 4),
        (3, True, False, 18 / 4),
        (3, False, False, 16 / 4),
    ],
)
def test_state_bytes(stage: int, low: bool, accumulating: bool, expected: float) -> None:
    assert state_bytes(stage, 4, low_precision=low, accumulating=accumulating).total == expected


def test_unknown_stage() -> None:
    with pytest.raises(ArgumentError, match="stage is 4"):
        state_bytes(4, 1)


def test_stage_2_counts_states_buckets_and_activations() -> None:
    host, device = estimate_zero2_model_states_mem_needs(1000, 4, 2, False, activation_bytes=77, reduce_bucket_size=100)
    assert device == 1000 * (2 + 16 / 8) + 4 * 100 + 77
    assert host == 4 * 1000 * 4 * 1.5
    host, device = estimate_zero2_model_states_mem_needs(1000, 2, additional_buffer_factor=1.0)
    assert (host, device) == (16 * 1000, 2 * 1000 + 4 * 1000)


def test_stage_3_counts_what_is_gathered() -> None:
    sizes = {"reduce_bucket_size": 100, "max_live_parameters": 0}
    total = 10**9
    host, device, layer = estimate_zero3_model_states_mem_needs(total, 10**8, 8, 1, False, False, **sizes)
    assert device == total * 18 // 8 + 2 * 2 * 10**8 + 4 * (100 + 10**8)
    assert (host, layer) == (8 * 4 * 10**8 * 1.5, 4 * 10**8)
    host, device, _ = estimate_zero3_model_states_mem_needs(total, 10**8, 8, 1, True, True, **sizes)
    assert device == 2 * 2 * 10**8 + 4 * (100 + 10**8)
    assert host == 18 * total * 1.5


def test_the_largest_layer_is_a_whole_block(capsys: pytest.CaptureFixture[str]) -> None:
    linear = torch.nn.Linear
    blocks = (torch.nn.Sequential(linear(1000, 2000), linear(2000, 1000)) for _ in range(3))
    model = torch.nn.Sequential(linear(1000, 1000), torch.nn.ModuleList(blocks))
    estimate_zero3_model_states_mem_needs_all_live(model)
    assert "13M total params, 4M largest layer params" in capsys.readouterr().out
    tied = torch.nn.ModuleList([linear(1000, 1000), linear(1000, 1000)])
    tied[1].weight = tied[0].weight
    estimate_zero3_model_states_mem_needs_all_live(tied)
    assert "1M total params, 1M largest layer params" in capsys.readouterr().out


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1000, 2000), torch.nn.Linear(2000, 100))
    estimate_zero2_model_states_mem_needs_all_live(model, 8, 2)
    live = capsys.readouterr().out
    estimate_zero2_model_states_mem_needs_all_cold(2_202_100, 8, 2)
    assert capsys.readouterr().out == live
    assert "2 node(s), 8 rank(s) per node" in live and "per CPU  |  per GPU |   Options" in live
    assert len(live.splitlines()) == 6
    estimate_zero3_model_states_mem_needs_all_live(model, 8, activation_bytes=2**30)
    table = capsys.readouterr().out.splitlines()
    assert "2M total params, 2M largest layer params" in table[2]
    assert len(table) == 10
    assert table[4].endswith("offload_param=cpu , offload_optimizer=cpu , zero_init=1")
    assert all(float(row.split("|")[1].strip("GB ")) >= 1.0 for row in table[4:])
