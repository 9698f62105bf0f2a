"""Packing: sequences of different lengths side by side in rows of a token budget, kept apart by position ids.

Packs are formed by best-fit decreasing: from the longest sequence to the shortest, each goes into the fullest pack that
has room. Sequences of equal length are placed together and packs with equal contents are one entry, so the work depends
on how many different lengths there are; only sorting depends on the number of sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from deepspeed.data.index_lists import Array, IndexLists, checked_lengths, reordered, stable_order
from deepspeed.errors import ArgumentError, DataError

IGNORED = -100  # label that losses skip


@dataclass(frozen=True)
class Packs(IndexLists):
    """Packs of sequences, by the sequences' indices.

    Attributes:
        budget: most tokens of a pack.
    """

    budget: int

    @property
    def padding_share(self) -> float:
        """Return the share of padding if every pack is padded to the budget."""
        return 1 - float(self.tokens.sum()) / (len(self) * self.budget) if len(self) else 0.0


@dataclass
class _Bins:
    """`count` packs with equal contents.

    Attributes:
        parts: of each length, the position of its first sequence in the sorted list, and how many each pack has.
    """

    count: int
    parts: list[tuple[int, int]]

    def split(self, count: int) -> tuple[_Bins, _Bins]:
        """Return the first `count` packs and the others."""
        rest = [(first + count * each, each) for first, each in self.parts]
        return _Bins(count, self.parts), _Bins(self.count - count, rest)


class _OpenBins:
    """Packs by the room that is left in them."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rooms: list[int] = []  # sorted
        self.by_room: dict[int, list[_Bins]] = {}

    def take(self, length: int, count: int) -> tuple[int, _Bins]:
        """Return room and packs of the fullest ones with room for a sequence; new ones if there are none."""
        place = bisect_left(self.rooms, length)
        if place == len(self.rooms):
            return self.budget, _Bins(-(-count // (self.budget // length)), [])
        room = self.rooms[place]
        bins = self.by_room[room].pop()
        if not self.by_room[room]:
            del self.by_room[room], self.rooms[place]
        return room, bins

    def put(self, room: int, bins: _Bins) -> None:
        if not bins.count:
            return
        if room not in self.by_room:
            insort(self.rooms, room)
            self.by_room[room] = []
        self.by_room[room].append(bins)

    def place(self, length: int, first: int, count: int) -> None:
        """Put `count` sequences of equal length, from position `first` of the sorted list on, into packs."""
        while count:
            room, bins = self.take(length, count)
            each = min(room // length, count)  # best fit goes on with the pack it has begun
            full, rest = bins.split(min(bins.count, count // each))
            self.put(room, rest)
            self.put(room - each * length, _Bins(full.count, [*full.parts, (first, each)]))
            first, count = first + full.count * each, count - full.count * each


def _best_fit(lengths: Array, order: Array, budget: int) -> tuple[Array, Array]:
    """Return `ids` and `bounds` of packs of the sequences in `order`, which sorts them from longest to shortest."""
    packs = _OpenBins(budget)
    values, starts, counts = np.unique(-lengths[order], return_index=True, return_counts=True)
    for value, first, count in zip((-values).tolist(), starts.tolist(), counts.tolist(), strict=True):
        packs.place(value, first, count)
    groups = [bins for room in packs.rooms for bins in packs.by_room[room]]
    members, sizes = [], []
    for bins in groups:
        columns = [
            first + np.arange(bins.count)[:, None] * each + np.arange(each)[None, :] for first, each in bins.parts
        ]
        block = np.concatenate(columns, axis=1)
        members.append(block.ravel())
        sizes.append(np.full(bins.count, block.shape[1]))
    if not groups:
        return np.empty(0, np.int64), np.zeros(1, np.int64)
    bounds = np.concatenate([[0], np.cumsum(np.concatenate(sizes), dtype=np.int64)])
    return order[np.concatenate(members)], bounds


def pack(
    lengths: Any,
    budget: int,
    seed: int | Sequence[int] | None = None,
    order: Literal["shuffled", "source", "fullest"] = "source",
    window: int | None = None,
    overlong: Literal["error", "drop"] = "error",
) -> Packs:
    """Pack sequences into rows of at most `budget` tokens; every sequence goes into one pack.

    Args:
        lengths: number of tokens of each sequence.
        budget: most tokens of a pack.
        seed: seed, or [seed, epoch], of what is random: the order of packs, and which of several sequences of equal
            length shares a pack with which others. None: nothing is random.
        order: order of packs: "shuffled" (needs a seed), "source": by the first sequence of each, or "fullest" first.
        window: number of consecutive sequences packed together, so that a pack mixes only near ones; None: all.
        overlong: what happens to sequences over the budget: "error", or "drop", which lists them in `Packs.left_out`.

    Raises:
        ArgumentError: budget or window is below 1, or "shuffled" has no seed, or an option is unknown.
        DataError: a length is below 1, or over the budget.
    """
    _check(budget, seed, order, window)
    sizes = checked_lengths(lengths)
    fits = sizes <= budget
    if overlong not in ("error", "drop"):
        raise ArgumentError(f'overlong={overlong!r}: pass "error" or "drop"')
    if overlong == "error" and not fits.all():
        raise DataError(
            f"{int((~fits).sum())} of {len(sizes)} sequences have more than {budget} tokens, the longest "
            f'{int(sizes.max())}: cut them, or pass a larger budget or overlong="drop"'
        )
    draw = None if seed is None else np.random.default_rng(seed)
    usable = np.flatnonzero(fits)
    packed: list[tuple[Array, Array]] = []
    step = window or max(1, len(usable))
    for start in range(0, len(usable), step):
        part = usable[start : start + step]
        part = part if draw is None else draw.permutation(part)
        longest_first = part[stable_order(budget - sizes[part])]
        packed.append(_best_fit(sizes, longest_first, budget))
    shifts = np.cumsum([0, *(len(ids) for ids, _ in packed)])
    bounds = [bounds[1:] + shift for (_, bounds), shift in zip(packed, shifts[:-1], strict=True)]
    ids = np.concatenate([ids for ids, _ in packed]) if packed else np.empty(0, np.int64)
    packs = Packs(ids, np.concatenate([[0], *bounds]).astype(np.int64), sizes, np.flatnonzero(~fits), budget)
    return _ordered(packs, order, draw)


def _check(budget: int, seed: object, order: str, window: int | None) -> None:
    if budget < 1 or (window is not None and window < 1):
        raise ArgumentError(f"budget {budget} and window {window} must be at least 1")
    if order not in ("shuffled", "source", "fullest"):
        raise ArgumentError(f'order={order!r}: pass "shuffled", "source" or "fullest"')
    if order == "shuffled" and seed is None:
        raise ArgumentError('order="shuffled" needs a seed, so that a run can be repeated')


def _ordered(packs: Packs, order: str, draw: np.random.Generator | None) -> Packs:
    """Put packs into their order; inside of a pack, sequences are in the order of the source."""
    if not len(packs):
        return packs
    owner = np.repeat(np.arange(len(packs)), packs.counts)
    owner_of = np.empty(len(packs.lengths), np.int64)
    owner_of[packs.ids] = owner
    fits = np.sort(packs.ids) if len(packs.left_out) else np.arange(len(packs.ids))
    ids = fits[stable_order(owner_of[fits])]
    if order == "shuffled" and draw is not None:
        following = draw.permutation(len(packs))
    elif order == "source":
        following = np.argsort(ids[packs.bounds[:-1]])
    else:
        following = np.argsort(-packs.tokens, kind="stable")
    ids, bounds = reordered(ids, packs.bounds, following)
    return replace(packs, ids=ids, bounds=bounds)


def _spans(lengths: Sequence[int], total: int | None) -> list[int]:
    """Return the lengths of all parts of a row, with the padding up to `total` as the last."""
    used = sum(lengths)
    if total is not None and used > total:
        raise DataError(f"sequences of {used} tokens together do not fit into {total}")
    return [*lengths, *([total - used] if total is not None and total > used else [])]


def position_ids(lengths: Sequence[int], total: int | None = None) -> torch.Tensor:
    """Return positions that start at 0 in each sequence, and again in the padding up to `total` tokens.

    Transformers separates the sequences where positions start again, if there is no attention mask and no cache.

    Raises:
        DataError: the sequences together have more than `total` tokens.
    """
    parts = [torch.arange(length) for length in _spans(lengths, total)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def cu_seqlens(lengths: Sequence[int], total: int | None = None) -> torch.Tensor:
    """Return the bounds of the sequences, from 0 on, as int32, for kernels of variable length.

    Padding up to `total` counts as one more sequence; errors as in `position_ids`.
    """
    ends = np.cumsum([0, *_spans(lengths, total)])
    return torch.from_numpy(ends).to(torch.int32)


def flash_arguments(lengths: Sequence[int], total: int | None = None) -> dict[str, Any]:
    """Return the bounds as arguments of Transformers' flash attention, which else derives them from the positions.

    There must be at least one sequence; errors as in `position_ids`.
    """
    bounds, longest = cu_seqlens(lengths, total), max(_spans(lengths, total))
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def packed_row(
    sequences: Sequence[Any],
    budget: int | None = None,
    pad_token_id: int = 0,
    labels: Sequence[Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Return one row: `input_ids`, `position_ids` and `labels`, without an attention mask.

    The label of the first token of each sequence is -100: it would be predicted from another sequence. A model with a
    cache ignores the positions: call `separate_sequences` once.

    Args:
        sequences: lists, arrays or tensors of token ids.
        budget: number of tokens to which the row is padded; None: none.
        pad_token_id: token of the padding.
        labels: labels of each sequence; None: its tokens.

    Raises:
        DataError: there is no sequence, they do not fit into the budget, or labels have other lengths.
    """
    tokens = [torch.as_tensor(np.asarray(sequence), dtype=torch.int64) for sequence in sequences]
    lengths = [len(part) for part in tokens]
    if not lengths or min(lengths) < 1:
        raise DataError("a row needs at least one sequence, and each sequence at least one token")
    wanted = tokens if labels is None else [torch.as_tensor(np.asarray(part), dtype=torch.int64) for part in labels]
    if [len(part) for part in wanted] != lengths:
        raise DataError(f"labels have {[len(part) for part in wanted]} tokens, their sequences {lengths}")
    positions = position_ids(lengths, budget)
    row = {
        "input_ids": torch.full_like(positions, pad_token_id),
        "position_ids": positions,
        "labels": torch.full_like(positions, IGNORED),
    }
    row["input_ids"][: sum(lengths)] = torch.cat(tokens)
    row["labels"][: sum(lengths)] = torch.cat(wanted)
    row["labels"][positions == 0] = IGNORED
    return row


def separate_sequences(model: Any) -> None:
    """Prepare a Transformers model for packed rows, and verify that the sequences of a row do not see each other.

    A cache makes Transformers ignore the positions, so `model.config.use_cache` is set to False. The check is two short
    forwards of one row each, in evaluation mode; with sharded parameters all ranks call it together.

    Args:
        model: causal language model, or an engine around one.

    Raises:
        DataError: tokens of a sequence change the logits of the next one.
    """
    model.config.use_cache = False
    training, device = model.training, next(model.parameters()).device
    rows = [packed_row([first, [3, 1, 2, 4]]) for first in ([1, 2, 3, 4], [4, 3, 1, 1])]
    model.eval()
    try:
        with torch.no_grad():
            logits = [
                model(**{name: row[name][None].to(device) for name in ("input_ids", "position_ids")}).logits[0, 4:]
                for row in rows
            ]
    finally:
        model.train(training)
    change = float((logits[0] - logits[1]).abs().max())
    if change > 16 * torch.finfo(logits[0].dtype).eps * float(logits[0].abs().max()):
        raise DataError(
            f"{type(model).__name__} does not keep packed sequences apart: other tokens in the first sequence of a row "
            f"change the logits of the second by up to {change:.2g}. Its attention does not follow `position_ids`; "
            "train it on padded batches, or pass a block-diagonal mask"
        )


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Rows of packed sequences, as a map-style dataset.

    All rows have `budget` tokens, so a data loader stacks them without a `collate_fn`.

    Args:
        sequences: map-style dataset of token ids, or of dicts with `input_ids` and perhaps `labels`.
        packs: packs of its indices.
        pad_token_id: token of the padding.
        tokens_of: returns the token ids and labels (None: the tokens) of a sample; None: as above.
    """

    def __init__(
        self,
        sequences: Any,
        packs: Packs,
        pad_token_id: int = 0,
        tokens_of: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> None:
        self.sequences, self.packs, self.pad_token_id = sequences, packs, pad_token_id
        self._tokens_of = tokens_of or _tokens_of

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        samples = [self._tokens_of(self.sequences[int(sample)]) for sample in self.packs[index]]
        tokens = [ids for ids, _ in samples]
        labels = [ids if wanted is None else wanted for ids, wanted in samples]
        return packed_row(tokens, self.packs.budget, self.pad_token_id, labels)


def _tokens_of(sample: Any) -> tuple[Any, Any]:
    return (sample["input_ids"], sample.get("labels")) if isinstance(sample, dict) else (sample, None)
