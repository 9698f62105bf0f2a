"""What real clients send: it resolves, or the offload in it is refused by name."""

from __future__ import annotations

import copy

import pytest

from deepspeed.config import DeepSpeedConfig, Facts
from tests.unit.config.clients import ACCELERATE_3, CLIENTS

FACTS = Facts(hidden_size=64, loader_batch_size=4, num_train_steps=100, device="cpu", bf16_fast=False)


@pytest.mark.parametrize("name", CLIENTS)
def test_the_configuration_of_a_client_resolves(name):
    cfg = DeepSpeedConfig(CLIENTS[name], world=2, facts=FACTS)
    assert cfg.zero.stage == CLIENTS[name].get("zero_optimization", {"stage": 0})["stage"]
    assert DeepSpeedConfig.for_init(CLIENTS[name]).zero.stage == cfg.zero.stage


def test_offload_in_a_template_resolves():
    given = copy.deepcopy(ACCELERATE_3)
    given["zero_optimization"].update(
        offload_optimizer={"device": "cpu", "pin_memory": True}, offload_param={"device": "cpu", "pin_memory": True}
    )
    zero = DeepSpeedConfig(given, facts=FACTS).zero
    assert (zero.offload_optimizer.device, zero.offload_param.device) == ("cpu", "cpu")
