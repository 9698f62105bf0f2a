"""Test suites for components of third parties; this package runs them on its own components too."""

from __future__ import annotations

from deepspeed.testing.accelerator import AcceleratorCheck, accelerator_checks

__all__ = ["AcceleratorCheck", "accelerator_checks"]
