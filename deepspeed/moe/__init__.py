"""Mixture of experts: expert parallelism for layers of unedited models, and the explicit `MoE` layer."""

from __future__ import annotations

from deepspeed.foundation.addresses import serve

__getattr__, __all__ = serve(__name__)
