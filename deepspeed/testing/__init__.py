"""Test suites for third-party components such as accelerators; this package tests its own components with them."""

from __future__ import annotations

from deepspeed.testing.accelerator import AcceleratorCheck, accelerator_checks

__all__ = ["AcceleratorCheck", "accelerator_checks"]
