"""Metrics for a data analysis: functions of a batch of token ids. They can be pickled.

A batch is a tensor or array of token ids [batch, length], a list of sequences, or a dict with one under `input_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepspeed.data.index_lists import Array
from deepspeed.errors import ArgumentError, DataError


def token_rows(batch: Any, pad_token_id: int | None = None) -> list[Array]:
    """Return the token ids of each sample of a batch, without padding.

    Args:
        batch: see above; tokens with `attention_mask` 0 are padding.
        pad_token_id: tokens with this id are padding, too; None: no token.

    Raises:
        DataError: the batch has no token ids.
    """
    mask = None
    if isinstance(batch, Mapping):
        if "input_ids" not in batch:
            raise DataError(f"the batch has no input_ids, only {', '.join(map(str, batch))}")
        batch, mask = batch["input_ids"], batch.get("attention_mask")
    rows = [_integers(row) for row in batch]
    keep = [np.ones(len(row), bool) for row in rows]
    if mask is not None:
        keep = [np.asarray(row).astype(bool) for row in mask]
    if pad_token_id is not None:
        keep = [used & (row != pad_token_id) for used, row in zip(keep, rows, strict=True)]
    return [row[used] for used, row in zip(keep, rows, strict=True)]


def _integers(row: Any) -> Array:
    array = row.detach().cpu().numpy() if isinstance(row, torch.Tensor) else np.asarray(row)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise DataError(f"a sample has {array.dtype.name} of shape {array.shape}; token ids are integers [length]")
    return array.astype(np.int64)


class SequenceLength:
    """Number of tokens of each sample, at most `truncate_to`; a metric of type `single_value_per_sample`.

    Args:
        pad_token_id: token that is not counted; None: all are.
        truncate_to: length to which samples will be truncated; None: they will not.

    Raises:
        ArgumentError: `truncate_to` is below 1.
    """

    def __init__(self, pad_token_id: int | None = None, truncate_to: int | None = None) -> None:
        if truncate_to is not None and truncate_to < 1:
            raise ArgumentError(f"truncate_to {truncate_to} must be at least 1")
        self.pad_token_id, self.truncate_to = pad_token_id, truncate_to

    def __call__(self, batch: Any) -> torch.Tensor:
        """Return int64 lengths [batch]."""
        lengths = [len(row) for row in token_rows(batch, self.pad_token_id)]
        limit = self.truncate_to
        return torch.tensor([length if limit is None else min(length, limit) for length in lengths], dtype=torch.int64)


class TokenCounts:
    """Number of occurrences of each token; a metric of type `accumulate_value_over_samples`.

    Args:
        vocab_size: number of tokens of the vocabulary.
        pad_token_id: token that is not counted; None: all are.
    """

    def __init__(self, vocab_size: int, pad_token_id: int | None = None) -> None:
        self.vocab_size, self.pad_token_id = vocab_size, pad_token_id

    def __call__(self, batch: Any) -> torch.Tensor:
        """Return int64 counts [vocab_size].

        Raises:
            DataError: a token is outside of the vocabulary.
        """
        rows = token_rows(batch, self.pad_token_id)
        tokens = np.concatenate(rows) if rows else np.empty(0, np.int64)
        _check_tokens(tokens, self.vocab_size)
        return torch.from_numpy(np.bincount(tokens, minlength=self.vocab_size))


class VocabularyRarity:
    """Rarity of the tokens of each sample (arXiv:2212.03597): the sum of -ln p over its tokens, rounded down.

    A metric of type `single_value_per_sample`; p is the share of a token in all data.

    Args:
        counts: occurrences of each token in all data [vocabulary], such as the `metric_value` of `TokenCounts`.
        pad_token_id: token that adds nothing; None: all tokens count.

    Raises:
        ArgumentError: the counts are no list of integers of at least 0, or all are 0.
    """

    def __init__(self, counts: Sequence[int] | Any, pad_token_id: int | None = None) -> None:
        occurrences = np.asarray(counts)
        if (
            occurrences.ndim != 1
            or occurrences.dtype.kind not in "iu"
            or not occurrences.any()
            or occurrences.min() < 0
        ):
            raise ArgumentError("counts must be integers of at least 0, one for each token, and not all 0")
        self.pad_token_id = pad_token_id
        with np.errstate(divide="ignore"):  # a token that does not occur has an infinite rarity
            self.rarity = np.log(occurrences.sum(dtype=np.float64)) - np.log(occurrences.astype(np.float64))

    def __call__(self, batch: Any) -> torch.Tensor:
        """Return int64 rarities [batch], rounded down.

        Raises:
            DataError: a token is outside of the vocabulary, or does not occur in the data that was counted.
        """
        rows = token_rows(batch, self.pad_token_id)
        return torch.tensor([self._of(row) for row in rows], dtype=torch.int64)

    def _of(self, tokens: Array) -> int:
        _check_tokens(tokens, len(self.rarity))
        rarity = self.rarity[tokens]
        if not np.isfinite(rarity).all():
            token = int(tokens[np.flatnonzero(~np.isfinite(rarity))[0]])
            raise DataError(f"token {token} does not occur in the data that was counted; count all data")
        return int(rarity.sum())


def _check_tokens(tokens: Array, vocab_size: int) -> None:
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
        token = int(tokens.max() if tokens.max() >= vocab_size else tokens.min())
        raise DataError(f"token {token} is outside of the vocabulary of {vocab_size}")
