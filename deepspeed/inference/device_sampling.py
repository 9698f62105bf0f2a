"""Next tokens chosen on the device: options, random numbers and penalties of the rows of a pass, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.inference.beam_search import BeamGroup
from deepspeed.inference.executors.native_tensors import largest
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch, RowSampling
from deepspeed.inference.sampling_params import SamplingParams
from deepspeed.ops.triton.sampling import options_of

GREEDY = SamplingParams()


def chooses(rows: BatchSlice) -> bool:
    """Whether the tokens after these rows can be chosen on the device: nothing but logits and counts decides."""
    sampler = getattr(rows.sequence, "sampler", None)  # a draft model's sequences have none
    if sampler is None or rows.hidden or rows.wanted <= rows.scored or isinstance(rows.sequence.group, BeamGroup):
        return False
    return sampler.draws_on_device


def row_sampling(executor: Any, slices: Sequence[BatchSlice], vocabulary: int) -> RowSampling | None:
    """Return how the tokens of a pass are chosen on the device; None if its executor chooses none there.

    Rows whose tokens are chosen on the host get the largest logit, which says whether their logits are finite.

    Args:
        executor: executor of the pass.
        slices: its rows.
        vocabulary: number of tokens.
    """
    if not getattr(executor, "samples", False):
        return None
    samplings, seeds, counts, seen = [], [], [], []
    for rows in slices:
        on_device = chooses(rows)
        for place in range(rows.wanted):
            ahead = place - rows.scored
            if not on_device or ahead < 0:
                samplings.append(GREEDY)
                seeds.append(0)
                counts.append(0)
                continue
            sampler = rows.sequence.sampler
            entries = sampler.entries(rows.drafts[:ahead], vocabulary)
            seen += [(len(samplings), token, entry) for token, entry in entries.items()]
            samplings.append(sampler.sampling)
            seeds.append(sampler.seed)
            counts.append(sampler.count + ahead)
    table = torch.tensor(seen, dtype=torch.int64).t().contiguous() if seen else None
    return RowSampling(
        options_of(samplings), torch.tensor(seeds, dtype=torch.int64), torch.tensor(counts, dtype=torch.int32), table
    )


def chosen_tokens(batch: RaggedBatch, logits: torch.Tensor) -> list[int]:
    """Return a token for each row with logits: the one chosen on the device, else the largest; -1: not finite.

    The samplers of rows whose token was chosen on the device return it at their next calls.
    """
    if not len(logits):
        return []
    if batch.sampling is None or batch.sampling.tokens is None:
        return largest(logits)
    tokens, end = batch.sampling.tokens, 0
    for rows in batch.spans:
        end += rows.wanted
        if chooses(rows):
            own = tokens[end - rows.wanted + rows.scored : end]
            rows.sequence.sampler.drawn = [(token, None) for token in own]
    return tokens
