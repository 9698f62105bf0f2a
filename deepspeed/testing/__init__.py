"""Suites that a third party runs against its own parts, the ones this package runs against its own."""

from __future__ import annotations

from deepspeed.testing.accelerator import AcceleratorCheck, accelerator_checks

__all__ = ["AcceleratorCheck", "accelerator_checks"]
