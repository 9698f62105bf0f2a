"""The tokens of a pass: chosen on the device by options, random numbers and penalties of its rows, or on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.inference.beam_search import BeamGroup
from deepspeed.inference.executors.native_tensors import largest
from deepspeed.inference.executors.ragged_batch import BatchSlice, ChosenTokens, RaggedBatch, RowSampling
from deepspeed.inference.executors.select import device_of
from deepspeed.inference.sampler import draw_together
from deepspeed.inference.sampling_params import SamplingParams
from deepspeed.ops.triton.sampling import option_row

GREEDY = option_row(SamplingParams())


def chooses(rows: BatchSlice) -> bool:
    """Whether the tokens after these rows can be chosen on the device: nothing but logits and counts decides."""
    sampler = getattr(rows.sequence, "sampler", None)  # a draft model's sequences have none
    if sampler is None or rows.hidden or rows.wanted <= rows.scored or isinstance(rows.sequence.group, BeamGroup):
        return False
    return sampler.draws_on_device


def row_sampling(executor: Any, slices: Sequence[BatchSlice], unread: int = 0) -> RowSampling | None:
    """Return how the tokens of a pass are chosen on the device; None if its executor chooses none there.

    Other rows (of requests whose tokens are chosen on the host, of prompts that are scored, of a draft model) have
    greedy options: their entry is the token with the largest logit, or -1 if their logits are not finite.

    Args:
        executor: executor of the pass.
        slices: its rows.
        unread: tokens of each sequence that are chosen but not read.
    """
    if not getattr(executor, "samples", False):
        return None
    options, seeds, counts, seen = [], [], [], []
    on_device = list(map(chooses, slices))
    for rows, here in zip(slices, on_device, strict=True):
        sampler = getattr(rows.sequence, "sampler", None)
        _use_counted_numbers(rows.sequence)
        for place in range(rows.wanted):
            ahead = place - rows.scored
            if sampler is None or ahead < 0 or not here:
                options.append(GREEDY)
                seeds.append(0)
                counts.append(0)
                continue
            entries = sampler.entries(rows.drafts[:ahead], executor.vocabulary)
            seen += [(len(options), token, entry) for token, entry in entries.items()]
            options.append(sampler.option_row)
            seeds.append(sampler.seed)
            counts.append(sampler.count + ahead + unread)
    table = torch.tensor(seen, dtype=torch.int64).t().contiguous() if seen else None
    numbers = torch.tensor(seeds, dtype=torch.int64), torch.tensor(counts, dtype=torch.int32)
    return RowSampling(torch.tensor(options, dtype=torch.float32).reshape(-1, 8), *numbers, table, on_device)


def _use_counted_numbers(sequence: Any) -> None:
    """Let the host draw the numbers that a device draws, for a sequence and those that begin on its pages."""
    group = getattr(sequence, "group", None)
    for each in [sequence] if group is None else [sequence, *group.members]:
        if (sampler := getattr(each, "sampler", None)) is not None:
            sampler.counted = True


def run_pass(
    executor: Any, slices: Sequence[BatchSlice], page_size: int
) -> tuple[RaggedBatch, torch.Tensor, list[int]]:
    """Run a pass; return its batch, its logits and a token for each of their rows, as `read_tokens`.

    Args:
        executor: executor of the pass.
        slices: its rows.
        page_size: tokens per page.
    """
    batch, logits = launch_pass(executor, slices, page_size)
    return batch, logits, read_tokens(batch, logits)


def launch_pass(
    executor: Any, slices: Sequence[BatchSlice], page_size: int, after: tuple[ChosenTokens, Sequence[int]] | None = None
) -> tuple[RaggedBatch, torch.Tensor]:
    """Launch a pass; return its batch and its logits. The host does not wait for a device that chooses the tokens.

    Args:
        executor: executor of the pass.
        slices: its rows.
        page_size: tokens per page.
        after: `RaggedBatch.after` of a pass whose tokens are not read yet; None: they are known.
    """
    batch = RaggedBatch(slices, page_size, device_of(executor.model), getattr(executor, "even", False))
    batch.sampling, batch.after = row_sampling(executor, slices, int(after is not None)), after
    return batch, executor.run(batch)


def read_tokens(batch: RaggedBatch, logits: torch.Tensor) -> list[int]:
    """Return a token for each row with logits: the one chosen on the device, else the largest; -1: not finite.

    The samplers of rows whose token was chosen on the device, or is drawn from logits alone, return it at their next
    calls.
    """
    if not len(logits):
        return []
    sampling = batch.sampling
    if sampling is None or sampling.chosen is None:
        tokens = largest(logits)
    else:
        tokens, end = sampling.chosen.read(), 0
        for rows, here in zip(batch.spans, sampling.on_device, strict=True):
            end += rows.wanted
            if here:
                own = tokens[end - rows.wanted + rows.scored : end]
                rows.sequence.sampler.drawn = [(token, None) for token in own]
        if all(sampling.on_device):
            return tokens
    draw_plainly(batch.spans, logits, tokens)
    return tokens


def draw_plainly(slices: Sequence[BatchSlice], logits: torch.Tensor, largest: Sequence[int]) -> None:
    """Draw the next tokens of all requests of a pass that need nothing but the logits of their last row.

    Args:
        slices: rows of each request in the pass.
        logits: logits of the pass, [requested rows, vocabulary].
        largest: argmax of each row whose token is not chosen yet; negative if the row is not finite.
    """
    rows, end = [], 0
    for part in slices:
        end += part.wanted
        if part.wanted - part.scored != 1 or part.hidden or isinstance(part.sequence.group, BeamGroup):
            continue
        if (sampler := getattr(part.sequence, "sampler", None)) is None:  # of a draft model
            continue
        if part.sequence.sampling.max_new_tokens and sampler.draws_plainly and not (sampler.plain or sampler.drawn):
            rows.append((sampler, end - 1))
    if len(rows) > 1:
        draw_together(rows, logits, largest)
