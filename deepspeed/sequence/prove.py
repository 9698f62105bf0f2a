"""A cut model beside the whole one, before the first step: the same outputs on a small made-up batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deepspeed.comm.api import told_by_all
from deepspeed.errors import SequenceParallelError
from deepspeed.foundation.simulation import simulating
from deepspeed.foundation.tree import tensors_in
from deepspeed.sequence.batches import slice_batch
from deepspeed.sequence.ulysses import SequenceModel

# Of the largest value, by the precision the model computes in.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}
_TOKENS = 5  # per rank
PACKED = "packed"


def prove(made: SequenceModel) -> None:
    """Run the model on whole sequences and on slices. All ranks of the axis call together.

    One batch has padding on its left, one has packed documents: positions, masks and what is cut by documents are
    compared with them.

    Raises:
        SequenceParallelError: on every rank, with what differs on which.
    """
    model, disabled, made.disable_in_eval = made.model, made.disable_in_eval, False
    training = [module for module in model.modules() if module.training]
    states = torch.get_rng_state()
    model.eval()
    try:
        error = "; ".join(text for kind, batch in _batches(made) for text in _compared(made, kind, batch))
    except (RuntimeError, ValueError, IndexError, TypeError) as why:
        error = f"{type(why).__name__}: {' '.join(str(why).split())[:300]}"
    finally:
        made.disable_in_eval = disabled
        torch.set_rng_state(states)
        for module in training:
            module.training = True
    everyone = told_by_all(made.axis, error)
    wrong = [f"rank {made.axis.ranks[at]}: {text}" for at, text in enumerate(everyone) if text]
    if wrong:
        raise SequenceParallelError(
            f"{type(model).__name__} over a sequence that {made.axis.size} ranks share (sp) does not compute what it "
            f"computes whole: {' | '.join(wrong)}"
        )


def _batches(made: SequenceModel) -> Iterator[tuple[str, dict[str, Any]]]:
    """Two sequences each: padded on the left, and packed of two documents."""
    config = made.model.config.get_text_config()
    device = next(made.model.parameters()).device
    vocabulary, tokens = min(int(config.vocab_size), 1000), _TOKENS * made.axis.size
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (2, tokens), generator=draw)
    mask, padding = torch.ones_like(ids), getattr(config, "pad_token_id", None)
    mask[1, :3] = 0
    padded = ids if padding is None else ids.masked_fill(mask == 0, padding)
    yield "padded", {"input_ids": padded.to(device), "attention_mask": mask.to(device), **made.without_cache}
    places = torch.arange(tokens)
    first = tokens // 2 - 2
    places = torch.where(places < first, places, places - first).expand(2, -1)
    yield PACKED, {"input_ids": ids.to(device), "position_ids": places.to(device), **made.without_cache}


def _compared(made: SequenceModel, kind: str, batch: dict[str, Any]) -> list[str]:
    """What differs. Documents see each other over slices too, where the model lets them in whole sequences."""
    found = list(_differences(made, kind, batch))
    if kind == PACKED and any(told_by_all(made.axis, found)):
        made.separates = False
        found = list(_differences(made, kind, batch))
    return found


def _differences(made: SequenceModel, kind: str, batch: dict[str, Any]) -> Iterator[str]:
    axis, tokens = made.axis, batch["input_ids"].shape[1]
    with torch.no_grad():
        with made.plainly():
            whole = _output(made.model(**batch))
        ours = _output(made.model(**slice_batch(batch, axis)))
    if simulating():  # nothing has values that could differ: a real run compares them
        return
    part = tokens // axis.size
    if whole.dim() < 3 or whole.shape[1] != tokens or ours.shape[1] != part:
        yield f"its output {tuple(whole.shape)} has no entry for each of {tokens} tokens, and {tuple(ours.shape)} cut"
        return
    wanted = whole.narrow(1, axis.rank * part, part)
    counted = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).narrow(1, axis.rank * part, part).bool()
    wanted, ours = wanted[counted].float(), ours[counted].float()
    gap, scale = float((wanted - ours).abs().max()), float(wanted.abs().max())
    dtype = next(p.dtype for p in made.model.parameters() if p.is_floating_point())
    if not gap <= TOLERANCES[dtype] * scale:
        yield f"outputs of {kind} sequences differ by {gap / max(scale, 1e-30):.2g} of their largest value"


def _output(output: Any) -> torch.Tensor:
    """The first tensor of numbers."""
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    return next(tensor for tensor in tensors_in(values) if tensor.is_floating_point())
