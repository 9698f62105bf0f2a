"""The engine's side of `compression_training`: after which applied step what happens to the running engine."""

from __future__ import annotations

from typing import Any

from deepspeed.compression.controller import CALLED, Compression
from deepspeed.errors import ArgumentError


class Compressing:
    """Mixed into the engine."""

    module: Any
    ds_config: Any
    _components: Any
    _axes: Any
    compression: Compression | None = None

    @property
    def compression_scheduler(self) -> Compression | None:
        """What counts the applied steps of compression (`training_steps`); None without it."""
        return self.compression

    def _start_compression(self) -> None:
        top = self.ds_config.top
        section, called = top.compression_training, getattr(self.module, CALLED, None)
        if called is not None and not section.active:
            section = called
        elif called is not None and called != section:
            raise ArgumentError(
                "init_compression was called with another compression_training than initialize: pass both the same"
            )
        if section.active or top.quantize_training.enabled:
            self.compression = Compression(
                self.module, section, top.quantize_training, self._axes.shard, self._components.optimizer
            )

    def _after_applied_step(self) -> None:
        """An optimizer step was applied. All ranks call together."""
        if self.compression is not None:
            self.compression.step()

    def _stop_compression(self) -> None:
        if self.compression is not None:
            self.compression.remove()
            self.compression = None
