"""`layer_reduction` of a running engine: which blocks stay, and when the others are removed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.layer_selection import (
    InfluenceWatch,
    block_list,
    by_influence,
    check_layers,
)
from deepspeed.compression.pruning.sharded_view import Exchange
from deepspeed.compression.pruning.structured_removal import Removal
from deepspeed.compression.pruning.transformers_groups import shapes_of
from deepspeed.config.sections.compression import LayerReduction
from deepspeed.errors import CompressionError
from deepspeed.foundation.log import log_rank0
from deepspeed.foundation.transformers_model import block_lists

REDUCED = "_ds_layers_reduced"  # on a model: the old calls have given it its teacher's layers
LOOKS = 8  # applied steps over which influence is measured, the last ones before layers leave


class Depth:
    """The layers that leave one engine.

    Args:
        model: its parameters are managed already.
        section: `compression_training.layer_reduction`, enabled.

    Raises:
        CompressionError: there is no such list of blocks, or its model cannot have so few.
    """

    def __init__(self, model: nn.Module, section: LayerReduction) -> None:
        self.model, self.section = model, section
        self.prefix = _list_name(model, section.module_name_prefix)
        self._total = len(block_list(model, self.prefix))
        self._watch: InfluenceWatch | None = None
        self._sums = torch.zeros(2, self._total, dtype=torch.float64)  # of all ranks
        named, count = section.teacher_layer, section.keep_number_layer
        if named is None and (count or 0) > self._total:
            what = f"keep_number_layer is {count}, and {self.prefix} has {self._total} layers"
            raise CompressionError(f"layer_reduction: {what}")
        self._kept = count or 0 if named is None else len(named)
        self.over = self._kept == self._total
        self._told = False
        if not self.over:
            check_layers(model, self.prefix, list(range(self._kept)) if named is None else named)
        self._announce()

    @property
    def due(self) -> int:
        """The applied step after which they leave; influence needs one to look at."""
        return max(self.section.schedule_offset, 1 if self.section.teacher_layer is None else 0)

    def _announce(self) -> None:
        if self.over:
            log_rank0(f"layer_reduction: {self.prefix} has {self._total} layers already, and none leaves")
            return
        named = self.section.teacher_layer
        how = "picked by block influence" if named is None else f"{named} stay"
        gone = [at for at in range(self._total) if named is None or at not in named][: self._total - self._kept]
        marks = tuple(f"{self.prefix}.{at}." for at in gone)
        count = sum(shape.numel() for name, shape in shapes_of(self.model).items() if name.startswith(marks))
        log_rank0(
            f"layer_reduction: {len(gone)} of {self._total} layers of {self.prefix} leave the engine after step "
            f"{self.due} ({how}): {count:,} parameters, {4 * count / 2**20:.1f} MiB in fp32"
        )

    def after_step(self, step: int, exchange: Exchange) -> Removal | None:
        """What is to leave after `step` applied steps. All ranks call together.

        Args:
            step: how many were applied.
            exchange: adds up what ranks have seen.
        """
        if self.over:
            return None
        if self._watch is not None:
            row = exchange.sum(self._watch.sums.view(-1), "influence of blocks")
            self._sums += row.view_as(self._sums)
            self._watch.sums.zero_()
        if step >= self.due and self._knows():
            return self._leaving()
        self._look(step)
        return None

    def _knows(self) -> bool:
        """Whether layers can be picked: influence needs to have seen a block, on any rank."""
        return self.section.teacher_layer is not None or bool(self._sums[1].any())

    def _look(self, step: int) -> None:
        """Watch the blocks from here on, if the next steps are those over which influence is measured."""
        if self.over or self.section.teacher_layer is not None or step < self.due - LOOKS:
            return
        if self._watch is None:
            self._watch = InfluenceWatch(block_list(self.model, self.prefix), training=True)
        elif step >= self.due and not self._told:
            self._told = True
            log_rank0(
                f"layer_reduction: no call in training mode has shown the influence of {self.prefix}: none leaves yet"
            )

    def _leaving(self) -> Removal:
        keep = self.section.teacher_layer
        if keep is None:
            influence = (self._sums[0] / self._sums[1].clamp(min=1)).tolist()
            keep = by_influence(influence, self._kept)
            shown = ", ".join(f"{at}: {value:.3f}" for at, value in enumerate(influence))
            log_rank0(f"layer_reduction: layers {keep} stay; influence of blocks, one minus the cosine: {shown}")
            check_layers(self.model, self.prefix, keep)
        text = f"{self._total - len(keep)} of {self._total} layers of {self.prefix}"
        return Removal(layers={self.prefix: list(keep)}, text=text)

    def left(self) -> None:
        """The layers have left, now or in the run that is gone on with."""
        self.over = True
        self.remove()

    def remove(self) -> None:
        """Take hooks off."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def state_dict(self) -> dict[str, Any]:
        """What all ranks share."""
        return {"sums": self._sums.clone()}

    def load_state_dict(self, saved: dict[str, Any] | None, step: int) -> None:
        """Take it back.

        Args:
            saved: None: of a run in which no layers were to leave.
            step: applied steps until then.
        """
        self.remove()  # what was seen before is of another run
        self._sums.zero_()
        if saved is not None and saved["sums"].shape == self._sums.shape:
            self._sums.copy_(saved["sums"])
        self._look(step)


def _list_name(model: nn.Module, given: str | None) -> str:
    """The first name of the list of blocks that is meant: the longest where none is named."""
    if given is None:
        found = next(iter(block_lists(model)), None)
        if found is None:
            raise CompressionError(
                f"layer_reduction: {type(model).__name__} has no list of two or more equal blocks; "
                f"module_name_prefix names one"
            )
        return found
    blocks = block_list(model, given)
    return next(name for name, module in model.named_modules() if module is blocks)
