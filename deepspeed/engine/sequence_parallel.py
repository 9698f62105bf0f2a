"""Sequence parallelism in an engine: sharded batches, and losses over all tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives.same_error import COMPARED, digest
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.mesh import DIMS, Mesh
from deepspeed.errors import UsageError
from deepspeed.foundation.log import warn_once
from deepspeed.sequence.batches import check_labels, check_slices, edge_of, length_of, slice_batch
from deepspeed.sequence.transformers_adapter import cut_sequence, sequence_models, settings_of
from deepspeed.sequence.verify import prove

BARE = (
    "loss.backward() where ranks share a sequence (sp): call engine.backward(loss), which compares the ranks' losses "
    "(or takes num_items)"
)


def share_sequence(model: nn.Module, mesh: Mesh, mpu: Any = None) -> None:
    """Adapt a Transformers model in place to inputs that are slices of a sequence, if the mesh has several `sp` ranks.

    `mpu` may be the object that `UlyssesSPAttentionHF` returned, with settings of the adaptation.
    """
    settings = settings_of(mpu)
    cut_sequence(model, mesh.axis("sp"), settings.core, settings.disable_in_eval)


class Sequencing:
    """Batches and losses of sequence-parallel ranks.

    Args:
        model: model after `share_sequence`.
        verify: let `prove` compare the model with its computation on whole sequences.
        recompute: repeat exchanges in backward instead of storing the data of other ranks from forward.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, verify: bool, recompute: bool) -> None:
        self._axis, self._verify = mesh.axis("sp"), verify
        self.active = self._axis.size > 1
        # All ranks that compute with these layers.
        self._everyone = mesh.axis(*(dim for dim in DIMS if dim != "pp")) if self.active else self._axis
        self._models = sequence_models(model) if self.active else []
        for adapted in self._models:
            adapted.recompute = recompute
        self._names = list(inspect.signature(model.forward).parameters) if self.active else []
        self._batches = self._losses = COMPARED if self.active else 0
        self._whole = False  # whether each rank receives the whole batch

    def close(self) -> None:
        for model in self._models:
            model.remove()
        self._models = []

    def prove(self, around: Callable[[], AbstractContextManager[Any]]) -> None:
        """Compare the model with its computation on whole sequences, if `verify`. All ranks must call this.

        `around` creates the context of each comparison. Raises SequenceParallelError if the results differ.
        """
        for model in self._models if self._verify else []:
            with around():
                prove(model, self._everyone)

    def take(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) of a forward in training, sliced for this rank. All ranks must call this.

        The first ten batches are compared between ranks. Equal batches are sliced here; others must be slices of the
        same sequence already, else DataError is raised on all ranks of the sequence.
        """
        if self._batches:
            self._batches -= 1
            self._whole = self._compare(inputs, kwargs)
        for model in self._models:
            model.takes_slices = True
        named = self._named(inputs, kwargs)
        if not self._whole or not self._models or length_of(named) is None:
            return inputs, kwargs
        return (), slice_batch(named, self._axis)

    def _named(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self._names, inputs, strict=False)), **kwargs}

    def _compare(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether all ranks of a sequence got the same batch. Collective.

        DataError if different batches have no `position_ids`, positions that neither continue from rank to rank nor
        begin at 0, or labels that are shifted wrongly between two ranks.
        """
        named = self._named(inputs, kwargs)
        positions = named.get("position_ids")
        digests = (digest([inputs, kwargs]), positions.cpu() if positions is not None else None, edge_of(named))
        everyone = all_gather_objects(self._axis, digests)
        if len({input_digest for input_digest, *_ in everyone}) == 1:
            if not self._models:
                warn_once(
                    f"ranks {', '.join(map(str, self._axis.ranks))} share sequences (sp) and got the whole batch, and "
                    f"the model is none whose attention is found (a Transformers model, by its JSON or by "
                    f"UlyssesSPAttentionHF): unless its forward shares the sequence itself, each computes all of it"
                )
            return True
        check_slices([places for _, places, _ in everyone], self._axis.ranks)
        check_labels([edge for *_, edge in everyone], self._axis.ranks)
        return False

    def check_loss(self, loss: torch.Tensor) -> None:
        """Raise UsageError if one of the first ten losses differs between ranks of a sequence. Collective."""
        if not self._losses:
            return
        self._losses -= 1
        everyone = all_gather_objects(self._axis, (digest(loss), float(loss.detach())))
        for pos, (bits, value) in enumerate(everyone):
            if bits != everyone[0][0]:
                raise UsageError(
                    f"backward: ranks {self._axis.ranks[0]} and {self._axis.ranks[pos]} share a sequence (sp) and have "
                    f"the losses {everyone[0][1]:.9g} and {value:.9g}: a loss covers all tokens and has equal bits on "
                    f"all of them (gathered, with a sum in backward), or is this rank's sum over tokens with "
                    f"backward(loss_sum, num_items=its tokens)"
                )
