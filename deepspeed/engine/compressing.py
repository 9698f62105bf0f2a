"""The engine's side of `compression_training`: after which applied step what happens to the running engine."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from deepspeed.checkpoint.ranks import Ranks
from deepspeed.compression.basic_layer import plain_module
from deepspeed.compression.controller import CALLED, Compression
from deepspeed.compression.export import export
from deepspeed.compression.families import shapes_of
from deepspeed.compression.inside import left_on
from deepspeed.compression.layers import have_left
from deepspeed.compression.remove import Removal
from deepspeed.engine.checkpoint_io import CheckpointIO
from deepspeed.engine.feeding import Feeding
from deepspeed.engine.shrinking import Shrinking
from deepspeed.engine.state import EngineState
from deepspeed.engine.weights_io import WeightsIO
from deepspeed.errors import ArgumentError, CheckpointError, NotAvailableError, UsageError
from deepspeed.foundation.log import say


class Compressing:
    """What `compression_training` does to one engine.

    Args:
        state: of the engine.
        weights: gives whole weights to export.
        checkpoints: asks for the removals of a checkpoint to be done again.
        feeding: agrees with the other ranks.
        laid_out_anew: tells the engine that its groups are others than before.
        make: makes another engine of a model and a configuration.
    """

    def __init__(
        self,
        state: EngineState,
        weights: WeightsIO,
        checkpoints: CheckpointIO,
        feeding: Feeding,
        laid_out_anew: Callable[[], None],
        make: Callable[..., Any],
    ) -> None:
        self._state, self._weights, self._feeding, self._make = state, weights, feeding, make
        self._laid_out_anew = laid_out_anew
        self._exported = False
        checkpoints.replay_removals = self.replay

    @property
    def compression_scheduler(self) -> Compression | None:
        """What counts the applied steps of compression (`training_steps`); None without it."""
        return self._state.compression

    def start(self) -> None:
        """Begin, if the JSON or the old calls ask for something. All ranks call together."""
        top = self._state.ds_config.top
        section, called = top.compression_training, left_on(self._state.module, CALLED)
        if called is not None and not section.active:
            section = called
        elif called is not None and called != section:
            raise ArgumentError(
                "init_compression was called with another compression_training than initialize: pass both the same"
            )
        if section.active or top.quantize_training.enabled:
            if self._state.sliced:
                raise NotAvailableError(
                    "compression_training where ranks hold slices of the model is not available yet"
                )
            self._state.compression = Compression(
                self._state.module,
                section,
                top.quantize_training,
                self._state.axes,
                self._state.components.optimizer,
            )
            self._make_teacher()
            self._let_layers_leave(self._state.compression)

    def after_applied_step(self) -> None:
        """An optimizer step was applied. All ranks call together."""
        if self._state.compression is not None:
            ended = self._state.compression.step()
            if ended:
                self._shrink(self._state.compression.removal(ended))
            self._let_layers_leave(self._state.compression)
            self._export_when_due()

    def _let_layers_leave(self, compression: Compression) -> None:
        removal = compression.leaving()
        if removal is not None:
            self._shrink(removal)

    def set_teacher(self, teacher: Any) -> None:
        """Learn from this teacher (`compression_training.distillation`): a module, or an engine with its own sharding.

        Args:
            teacher: called with the student's arguments without labels, in evaluation mode, without gradients.

        Raises:
            UsageError: distillation is not enabled.
        """
        if self._state.compression is None or self._state.compression.distiller is None:
            raise UsageError("set_teacher needs compression_training.distillation.enabled")
        self._state.compression.distiller.set_teacher(teacher)

    def _make_teacher(self) -> None:
        """The model before its cut, as a teacher that is sharded over all ranks."""
        distiller = None if self._state.compression is None else self._state.compression.distiller
        if distiller is None or distiller.section.teacher != "before":
            return
        micro = self._state.ds_config.train_micro_batch_size_per_gpu
        block: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
        precision = {
            name: {"enabled": True} for name in ("bf16", "fp16") if getattr(self._state.ds_config, name).enabled
        }
        twin = copy.deepcopy(self._state.module)
        for module in twin.modules():
            plain_module(module)
        made = self._make(twin, {"train_micro_batch_size_per_gpu": micro, "zero_optimization": block, **precision})
        distiller.set_teacher(made)
        distiller.close = made.destroy

    def export_compressed(
        self, folder: str, weights: str | None = None, group_size: int | None = None
    ) -> dict[str, Any] | None:
        """Write the folder that is handed over; plain Transformers loads it. All ranks call together.

        Args:
            folder: made if it is not there.
            weights: `float`, `int8`, `int4` or `w8a8`; default: what `compression_training.export` says.
            group_size: inputs that share a scale of int4; likewise.

        Returns:
            On rank 0 the report: bytes and parameters; None elsewhere.
        """
        section = self._state.ds_config.top.compression_training.export
        state, report = self._weights._consolidated_16bit_state_dict(), None
        with Ranks(self._state.axes.same_slice).together(f"exporting to {folder}"):
            if state is not None:
                if self._state.compression is not None:
                    self._state.compression.quantizers.bake(state)
                report = export(
                    self._state.module, state, folder, weights or section.weights, group_size or section.group_size
                )
                say(f"exported to {folder}: {report['parameters']:,} parameters, {report['bytes']:,} bytes")
        return report

    def _export_when_due(self) -> None:
        section, compression = self._state.ds_config.top.compression_training.export, self._state.compression
        if section.folder is None or compression is None or self._exported:
            return
        if compression.ended and compression.training_steps >= section.after:
            self._exported = True
            self.export_compressed(section.folder)

    def _shrink(self, removal: Removal) -> None:
        """Take units out of the running engine. All ranks call together."""
        before = sum(shape.numel() for shape in shapes_of(self._state.module).values())
        agree = functools.partial(self._feeding.agree, 0, "all ranks are ready for a removal")
        Shrinking(self._state, removal, agree).run()
        self._state.removals.append(removal)
        self._laid_out_anew()
        if self._state.compression is not None:
            self._state.compression.resume()
        after = sum(shape.numel() for shape in shapes_of(self._state.module).values())
        say(f"removed {removal.text} …: {before:,} parameters are now {after:,}")

    def replay(self, saved: dict[str, Any]) -> None:
        """Take out what was out of the model when a checkpoint was saved."""
        wanted = [Removal.from_json(one) for one in saved.get("removals", ())]
        done = self._state.removals
        if len(done) > len(wanted):
            raise CheckpointError(
                f"{len(done)} removal(s) were done on this engine and the checkpoint was saved after {len(wanted)}: "
                f"make the engine anew from the dense model, with a schedule_offset of 1 or more: what leaves at 0 has "
                f"left before a checkpoint can be loaded"
            )
        for before, removal in zip(done, wanted, strict=False):
            if before.layers != removal.layers:
                raise CheckpointError(
                    f"layers {before.layers or 'none'} stay in this engine, and {removal.layers or 'none'} in the "
                    f"checkpoint: name the same ones (compression_training.layer_reduction)"
                )
        for removal in wanted[len(done) :]:
            if not have_left(self._state.module, removal.layers):
                self._shrink(removal)
                continue
            done.append(removal)  # the script has built the small model itself
            if self._state.compression is not None:
                self._state.compression.left(removal)

    def stop(self) -> None:
        """Take everything off the model."""
        if self._state.compression is not None:
            self._state.compression.remove()
            self._state.compression = None
