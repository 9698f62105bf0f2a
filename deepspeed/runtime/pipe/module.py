"""Old address of layers in a row."""

from __future__ import annotations

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
