"""Old address of questions about torch."""

from __future__ import annotations

from deepspeed.foundation.torch_version import required_torch_version

__all__ = ["required_torch_version"]
