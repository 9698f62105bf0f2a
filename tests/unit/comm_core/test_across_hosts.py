"""Which ranks sum within hosts first, and both ways beside each other in a world that is not there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.comm.process_groups import axis as axes
from deepspeed.planner.memory import simulate
from deepspeed.planner.train_program import Program


def test_hosts_share_sums_where_that_saves_bytes():
    def rows(*hosts: str) -> list[tuple[int, ...]]:
        return axes.AxisRegistry.by_host(range(len(hosts)), dict(enumerate(hosts)))

    assert rows(*"aaabbb") == [(0, 1, 2), (3, 4, 5)]
    assert rows(*"aaaabbbbcccc") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    for no_gain_or_unlike in ("aaaa", "aabb", "aaabb", "abcd", "ababab", "aaabbbaaa"):
        assert rows(*no_gain_or_unlike) == []


def test_ranks_that_nobody_numbers_are_of_one_host_by_its_name():
    def hosts(*places: tuple[str, int]) -> list[tuple[int, ...]]:
        return axes.AxisRegistry.by_host(range(len(places)), axes.AxisRegistry._hosts(places))

    numbered = [(name, local) for name in "ab" for local in range(3)]
    unnumbered = [(name, 0) for name, _ in numbered]  # no launcher's variable, or each rank sees one device
    alike = [("container", local) for _ in range(2) for local in range(3)]
    assert hosts(*numbered) == hosts(*unnumbered) == hosts(*alike) == [(0, 1, 2), (3, 4, 5)]
    assert hosts(*[("alone", 0)] * 6) == []


@pytest.mark.usefixtures("without_group")
@pytest.mark.parametrize("more", [{}, {"mics_shard_size": 4}], ids=["one copy", "copies"])
@pytest.mark.parametrize("per_host", [4, 8])
def test_a_devices_memory_is_predicted_over_hosts(monkeypatch, per_host, more):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0} | more,
    }
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
    program, found = Program(model, config, torch.zeros(2, 64)), []
    for said, told in ((0, per_host), (per_host, 1)):  # by the environment, or by who asks
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(told))
        found.append(simulate(program, 0, 8, device=True, per_host=said).at_peak)
    assert found[0] == found[1] and found[0]["transit"] > 0
