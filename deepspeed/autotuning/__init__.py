"""Old addresses: what is here lives elsewhere, and nobody inside imports it from here."""

from __future__ import annotations

from deepspeed.planner.autotuner import Autotuner

__all__ = ["Autotuner"]
