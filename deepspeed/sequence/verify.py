"""Verification of a sequence-parallel model against its unsplit form, on a small example batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from deepspeed.comm.collectives.same_error import comparison, run_collectively
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import SequenceParallelError
from deepspeed.foundation.equivalence import evaluating, example_tokens, relative_difference, tolerance
from deepspeed.foundation.pytree import tensors_in
from deepspeed.foundation.transformers_model import text_config
from deepspeed.sequence.batches import slice_batch
from deepspeed.sequence.transformers_adapter import SequenceModel

_TOKENS = 5  # tokens per rank
PACKED = "packed"
T = TypeVar("T")


def prove(model: SequenceModel, everyone: Axis) -> None:
    """Compare a model on slices with itself on whole sequences: a left-padded batch, and a batch of packed documents.

    Sets `model.separates` to False if the model agrees only without separate documents.

    Args:
        everyone: all ranks that run parts of the model; all must call this together.

    Raises:
        SequenceParallelError: outputs differ, or a rank failed; raised on every rank.
    """
    _Comparison(model, everyone).run()


class _Comparison:
    def __init__(self, sequence_model: SequenceModel, everyone: Axis) -> None:
        self._adapted, self._everyone = sequence_model, everyone
        self._model, self._axis = sequence_model.model, sequence_model.axis
        self._tokens = _TOKENS * self._axis.size

    def run(self) -> None:
        disabled, self._adapted.disable_in_eval = self._adapted.disable_in_eval, False
        try:
            with evaluating(self._model):
                batches = self._together(self._batches)
                differences = [self._compared(kind, batch) for kind, batch in batches.items()]
        finally:
            self._adapted.disable_in_eval = disabled
        wrong = ["; ".join(filter(None, texts)) for texts in zip(*differences, strict=True)]
        if any(wrong):
            raise self._error(wrong)

    def _together(self, action: Callable[[], T]) -> T:
        """Run an action; an error on any rank raises SequenceParallelError on all."""
        return run_collectively(self._everyone, action).result_or_raise(self._error)

    def _error(self, texts: Sequence[str]) -> SequenceParallelError:
        ranks = zip(self._everyone.ranks, texts, strict=True)
        return SequenceParallelError(
            f"{type(self._model).__name__} over a sequence that {self._axis.size} ranks share (sp) does not compute "
            f"what it computes whole: {' | '.join(f'rank {rank}: {text}' for rank, text in ranks if text)}"
        )

    def _batches(self) -> dict[str, dict[str, Any]]:
        """Create batches by name, of two sequences each: one with left padding, and one with two documents each."""
        device = next(self._model.parameters()).device
        ids = example_tokens(self._model.config, 2, self._tokens)
        mask, padding = torch.ones_like(ids), getattr(text_config(self._model), "pad_token_id", None)
        mask[1, :3] = 0
        padded = ids if padding is None else ids.masked_fill(mask == 0, padding)
        places, first = torch.arange(self._tokens), self._tokens // 2 - 2
        places = torch.where(places < first, places, places - first).expand(2, -1)
        without_cache = self._adapted.without_cache
        return {
            "padded": {"input_ids": padded.to(device), "attention_mask": mask.to(device), **without_cache},
            PACKED: {"input_ids": ids.to(device), "position_ids": places.to(device), **without_cache},
        }

    def _compared(self, kind: str, batch: dict[str, Any]) -> list[str]:
        """Return the differences by rank; if packed documents differ, set `separates` to False and compare again."""
        texts: list[str] = []
        for separates in (self._adapted.separates, False):
            self._adapted.separates = separates
            own = self._together(lambda: self._differences(kind, batch))
            texts = all_gather_objects(self._everyone, own)
            if kind != PACKED or not any(texts):
                break
        return texts

    def _differences(self, kind: str, batch: dict[str, Any]) -> str:
        with self._adapted.plainly():
            whole = self._outputs(self._model(**batch))
        own = self._outputs(self._model(**slice_batch(batch, self._axis)))
        return comparison.current(lambda: "; ".join(self._differing(kind, batch, whole, own)))

    def _differing(
        self,
        kind: str,
        batch: dict[str, Any],
        whole: list[tuple[str, torch.Tensor]],
        own: list[tuple[str, torch.Tensor]],
    ) -> Iterator[str]:
        part = self._tokens // self._axis.size
        own_tokens = slice(self._axis.rank * part, (self._axis.rank + 1) * part)
        counted = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()[:, own_tokens]
        dtype = next(p.dtype for p in self._model.parameters() if p.is_floating_point())
        for index, ((name, wanted), (_, got)) in enumerate(zip(whole, own, strict=False)):
            by_token = wanted.dim() > 1 and wanted.shape[1] == self._tokens and got.shape[1] == part
            if not index and not (by_token and wanted.dim() > 2):
                shapes = tuple(wanted.shape), tuple(got.shape)
                yield f"its output {shapes[0]} has no entry for each of {self._tokens} tokens, and {shapes[1]} split"
                return
            what = f"outputs of {kind} sequences differ"
            if by_token:
                wanted, got = wanted[:, own_tokens][counted], got[counted]
            elif wanted.shape != got.shape:  # depends on the model
                continue
            else:  # outputs of a single token, such as the first or last one
                what = f"'{name}', which has no entry for each token, differs in {kind} sequences"
            if (relative := relative_difference(got, wanted)) > tolerance(dtype):
                yield f"{what} by {relative:.2g} of their largest value"

    @staticmethod
    def _outputs(output: Any) -> list[tuple[str, torch.Tensor]]:
        """Return (name, tensor) for the floating-point tensors of an output."""
        named = output.items() if isinstance(output, Mapping) else [("output", output)]
        return [(name, tensor) for name, value in named for tensor in tensors_in(value) if tensor.is_floating_point()]
