"""The engine's side of `compression_training`: after which applied step what happens to the running engine."""

from __future__ import annotations

from typing import Any

from deepspeed.compression.controller import CALLED, Compression
from deepspeed.compression.families import shapes_of
from deepspeed.compression.remove import Removal
from deepspeed.engine.shrinking import Shrinking
from deepspeed.errors import ArgumentError, CheckpointError
from deepspeed.foundation.log import say


class Compressing:
    """Mixed into the engine."""

    module: Any
    ds_config: Any
    _components: Any
    _axes: Any
    optimizer: Any
    _tell_reducer: Any
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
            ended = self.compression.step()
            if ended:
                self._shrink(self.compression.removal(ended))

    def _shrink(self, removal: Removal) -> None:
        """Take units out of the running engine. All ranks call together."""
        before = sum(shape.numel() for shape in shapes_of(self.module).values())
        Shrinking(self, removal).run()
        self.optimizer = self._components.optimizer or self._components.lifecycle
        if self.compression is not None:
            self.compression.resume()
        self._tell_reducer()
        after = sum(shape.numel() for shape in shapes_of(self.module).values())
        say(f"removed {removal.text} …: {before:,} parameters are now {after:,}")

    def _replay_removals(self, saved: dict[str, Any]) -> None:
        """Take out what was out of the model when a checkpoint was saved."""
        wanted = [Removal.from_json(one) for one in saved.get("removals", ())]
        done = [] if self.compression is None else self.compression.removals
        if len(done) > len(wanted):
            raise CheckpointError(
                f"{len(done)} removal(s) were done on this engine and the checkpoint was saved after {len(wanted)}: "
                f"make the engine anew from the dense model"
            )
        for removal in wanted[len(done) :]:
            self._shrink(removal)

    def _stop_compression(self) -> None:
        if self.compression is not None:
            self.compression.remove()
            self.compression = None
