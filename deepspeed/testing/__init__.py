"""Test suites that third parties run on their components; this package runs the same ones on its own."""

from __future__ import annotations

from deepspeed.testing.accelerator import AcceleratorCheck, accelerator_checks

__all__ = ["AcceleratorCheck", "accelerator_checks"]
