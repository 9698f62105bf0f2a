"""`ds_plan` says which codec pays between the hosts of a machine."""

from __future__ import annotations

from dataclasses import replace

from deepspeed.planner.cli import wire_advice
from deepspeed.planner.search import Judged, TrainingPlan
from deepspeed.planner.step_time import StepTime
from deepspeed.simulator.machine import Machine

ELEMENTS = 1_000_000_000


def judged(compute: float, stage: int = 2) -> Judged:
    return Judged(TrainingPlan(stage, "none", 8, 1, False), time=StepTime(compute, 1.0, 0.01, 0.0), fits=True)


def test_ethernet_pays_for_eight_bits_and_a_fast_link_does_not() -> None:
    machine = Machine.load("RTX-4090-Ethernet")
    slow, fast = replace(machine, between=3e9 / 8), replace(machine, between=400e9)
    assert '"wire": {"gradients": "int8", "weights": "int8"} pays' in wire_advice(judged(1.0), slow, ELEMENTS)
    assert "no codec pays" in wire_advice(judged(10.0), fast, ELEMENTS)
    assert wire_advice(judged(1.0), replace(machine, between=0.0), ELEMENTS) == ""
