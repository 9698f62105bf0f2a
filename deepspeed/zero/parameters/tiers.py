"""The storage tiers of a group's state."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.storage.device_tier import RESIDENT
from deepspeed.storage.tier import Tier


@dataclass(frozen=True)
class Tiers:
    """In which tiers the state of a group rests.

    Args:
        optimizer: master, gradient accumulators, moments (`offload_optimizer`).
        parameters: the slices of parameters that are gathered before use (`offload_param`).
    """

    optimizer: Tier = RESIDENT
    parameters: Tier = RESIDENT
