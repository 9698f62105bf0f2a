"""Old addresses: what is here lives elsewhere, and nobody inside imports it from here."""

from __future__ import annotations

from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode

__all__ = ["LinearAllreduce", "LinearLayer", "set_autotp_mode"]
