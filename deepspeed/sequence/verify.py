"""Compares a sequence-parallel model with the whole one on a small example batch."""

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

_TOKENS = 5  # per rank
PACKED = "packed"
T = TypeVar("T")


def prove(made: SequenceModel, everyone: Axis) -> None:
    """Run the model on whole sequences and on slices.

    One batch has padding on its left, one has packed documents: positions, masks and what is cut by documents are
    compared with them.

    Args:
        made: the model, with its ranks of a sequence.
        everyone: all ranks that compute with these layers; they call together, and their forwards meet.

    Raises:
        SequenceParallelError: on every rank, with what differs on which, or what one of them alone has raised.
    """
    disabled, made.disable_in_eval = made.disable_in_eval, False
    try:
        with evaluating(made.model):
            batches = _together(made, everyone, lambda: list(_batches(made)))
            found = [_compared(made, everyone, kind, batch) for kind, batch in batches]
    finally:
        made.disable_in_eval = disabled
    wrong = ["; ".join(filter(None, texts)) for texts in zip(*found, strict=True)]
    if any(wrong):
        raise _wrong(made, everyone, wrong)


def _together(made: SequenceModel, everyone: Axis, action: Callable[[], T]) -> T:
    """What a part of the proof gives this rank; where a rank raises, all end."""
    return run_collectively(everyone, action).result_or_raise(lambda texts: _wrong(made, everyone, texts))


def _wrong(made: SequenceModel, everyone: Axis, texts: Sequence[str]) -> SequenceParallelError:
    by_rank = " | ".join(f"rank {everyone.ranks[at]}: {text}" for at, text in enumerate(texts) if text)
    return SequenceParallelError(
        f"{type(made.model).__name__} over a sequence that {made.axis.size} ranks share (sp) does not compute what it "
        f"computes whole: {by_rank}"
    )


def _batches(made: SequenceModel) -> Iterator[tuple[str, dict[str, Any]]]:
    """Two sequences each: padded on the left, and packed of two documents."""
    device, tokens = next(made.model.parameters()).device, _TOKENS * made.axis.size
    ids = example_tokens(made.model.config, 2, tokens)
    mask, padding = torch.ones_like(ids), getattr(text_config(made.model), "pad_token_id", None)
    mask[1, :3] = 0
    padded = ids if padding is None else ids.masked_fill(mask == 0, padding)
    yield "padded", {"input_ids": padded.to(device), "attention_mask": mask.to(device), **made.without_cache}
    places = torch.arange(tokens)
    first = tokens // 2 - 2
    places = torch.where(places < first, places, places - first).expand(2, -1)
    yield PACKED, {"input_ids": ids.to(device), "position_ids": places.to(device), **made.without_cache}


def _compared(made: SequenceModel, everyone: Axis, kind: str, batch: dict[str, Any]) -> list[str]:
    """What differs, by rank. Documents see each other over slices too, where the model lets them in whole sequences."""

    def found() -> list[str]:
        own = _together(made, everyone, lambda: _differences(made, kind, batch))
        return all_gather_objects(everyone, own)

    texts = found()
    if kind == PACKED and any(texts):
        made.separates = False
        texts = found()
    return texts


def _differences(made: SequenceModel, kind: str, batch: dict[str, Any]) -> str:
    with made.plainly():
        whole = _outputs(made.model(**batch))
    ours = _outputs(made.model(**slice_batch(batch, made.axis)))
    return comparison.current(lambda: "; ".join(_differing_outputs(made, kind, batch, whole, ours)))


def _differing_outputs(
    made: SequenceModel,
    kind: str,
    batch: dict[str, Any],
    whole: list[tuple[str, torch.Tensor]],
    ours: list[tuple[str, torch.Tensor]],
) -> Iterator[str]:
    axis, tokens = made.axis, batch["input_ids"].shape[1]
    part = tokens // axis.size
    mine = slice(axis.rank * part, (axis.rank + 1) * part)
    counted = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()[:, mine]
    dtype = next(p.dtype for p in made.model.parameters() if p.is_floating_point())
    for at, ((name, wanted), (_, got)) in enumerate(zip(whole, ours, strict=False)):
        by_token = wanted.dim() > 1 and wanted.shape[1] == tokens and got.shape[1] == part
        if not at and not (by_token and wanted.dim() > 2):
            shapes = tuple(wanted.shape), tuple(got.shape)
            yield f"its output {shapes[0]} has no entry for each of {tokens} tokens, and {shapes[1]} cut"
            return
        what = f"outputs of {kind} sequences differ"
        if by_token:
            wanted, got = wanted[:, mine][counted], got[counted]
        elif wanted.shape != got.shape:  # the model's own affair
            continue
        else:  # of one token that it takes for the first or last
            what = f"'{name}', which has no entry for each token, differs in {kind} sequences"
        if (relative := relative_difference(got, wanted)) > tolerance(dtype):
            yield f"{what} by {relative:.2g} of their largest value"


def _outputs(output: Any) -> list[tuple[str, torch.Tensor]]:
    """Tensors of numbers, by the names they have."""
    named = output.items() if isinstance(output, Mapping) else [("output", output)]
    return [(name, tensor) for name, value in named for tensor in tensors_in(value) if tensor.is_floating_point()]
