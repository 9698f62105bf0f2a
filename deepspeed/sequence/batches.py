"""Batches of split sequences: each rank's slice, labels shifted before the split, and checks of slices.

A whole batch is a mapping with `input_ids` or `inputs_embeds` `[batch, sequence, …]`. All entries with the same size
along dim 1 are split too. Each rank also gets the positions of its tokens in the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from deepspeed.comm.collectives.same_error import BatchCheck
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import Axis, group_axis
from deepspeed.errors import DataError

IGNORED = -100  # label of ignored tokens
INPUTS = ("input_ids", "inputs_embeds")


def length_of(batch: Any) -> int | None:
    """Return the number of tokens along dim 1 of a batch of sequences; None for other objects."""
    if not isinstance(batch, Mapping):
        return None
    tokens = next((batch[name] for name in INPUTS if batch.get(name) is not None), None)
    return int(tokens.shape[1]) if isinstance(tokens, torch.Tensor) and tokens.dim() > 1 else None


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Shift labels `[…, tokens]` by one: each token gets the label of its successor; the last gets -100."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()


def slice_batch(batch: Mapping[str, Any], axis: Axis) -> dict[str, Any]:
    """Return this rank's slice of a whole batch, with the positions of its tokens.

    Args:
        batch: equal on all ranks of the axis. If it has `labels` per token and no `shift_labels`, a shifted copy is
            added as `shift_labels`.
        axis: ranks that share a sequence.

    Raises:
        DataError: `batch` has no sequence of tokens, its length is not divisible by the number of ranks, or its
            `attention_mask` has more than two dims.
    """
    tokens = length_of(batch)
    if tokens is None:
        names = f" of {sorted(batch)}" if isinstance(batch, Mapping) else ""
        raise DataError(
            f"a sequence is split along dim 1 of 'input_ids' or 'inputs_embeds', and the batch is a "
            f"{type(batch).__name__}{names}: let collate_fn make a dict of tensors, or split it in the loader and give "
            f"each rank the position_ids of its tokens"
        )
    if tokens % axis.size:
        raise DataError(
            f"a sequence of {tokens} tokens does not divide over {axis.size} ranks (sp): let the collator pad to a "
            f"multiple of {axis.size}"
        )
    whole = dict(batch)
    if whole.get("position_ids") is None:
        first = next(batch[name] for name in INPUTS if batch.get(name) is not None)
        whole["position_ids"] = torch.arange(tokens, device=first.device).expand(first.shape[0], -1)
    labels = whole.get("labels")
    if isinstance(labels, torch.Tensor) and labels.shape[1:] == (tokens,) and whole.get("shift_labels") is None:
        whole["shift_labels"] = shifted(labels)
    part = tokens // axis.size
    for name, value in whole.items():
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            continue
        if name == "attention_mask" and value.dim() > 2:
            raise DataError(f"attention_mask has shape {tuple(value.shape)}: give one of [batch, sequence]")
        if value.shape[1] == tokens:
            whole[name] = value.narrow(1, axis.rank * part, part).contiguous()
    return whole


def continues(before: torch.Tensor | None, after: torch.Tensor | None) -> bool:
    """Return whether positions `[batch, tokens]` continue from slice `before` to `after`, or `after` starts at 0."""
    if before is None or after is None or before.shape[0] != after.shape[0]:
        return False
    first = after[:, 0]
    return bool(((first == before[:, -1] + 1) | (first == 0)).all())


def check_slices(slices: Sequence[torch.Tensor | None], ranks: Sequence[int]) -> None:
    """Raise DataError if positions do not continue from each slice to the next (see `continues`).

    Args:
        slices: positions `[batch, tokens]` of each rank; None: a batch without positions.
        ranks: global ranks, for the message.
    """
    for rank, (before, after) in enumerate(zip(slices, slices[1:], strict=False)):
        if not continues(before, after):
            raise DataError(
                f"ranks {ranks[rank]} and {ranks[rank + 1]} share a sequence (sp) and were given different batches "
                f"that are no slices of one: give all ranks of a sequence the same batch (deal samples to "
                f"engine.get_data_parallel_rank() of engine.dp_world_size; with Accelerate's loaders by "
                f"ParallelismConfig(sp_size={len(ranks)}, sp_backend='deepspeed')), or slices whose position_ids "
                f"continue from rank to rank"
            )


def check_labels(edges: Sequence[Mapping[str, torch.Tensor]], ranks: Sequence[int]) -> None:
    """Raise DataError if the last label of a slice is neither the first token of the next slice nor ignored.

    An ignored label also raises if the labels beside it are not ignored and no document starts after it. Not checked:
    slices with an empty edge, and slices whose other labels are not the following tokens.

    Args:
        edges: result of `edge_of` for each rank.
        ranks: global ranks, for the message.
    """
    for rank, (before, after) in enumerate(zip(edges, edges[1:], strict=False)):
        if not before or not after or not bool(before["follow"]) or not bool(after["follow"]):
            continue
        label, token = before["last"], after["first"]
        lost = (label == IGNORED) & before["counted"] & after["counted"] & (after["position"] != 0)
        wrong = ((label != IGNORED) & (label != token)) | lost
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise DataError(
                f"labels are shifted wrongly where ranks {ranks[rank]} and {ranks[rank + 1]} split a sequence (sp): "
                f"the last label of the one is {int(label[row])}, and the first token of the other {int(token[row])}; "
                f"shift labels before the sequence is split, or pass them unshifted as labels"
            )


def edge_of(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return edge values of a slice for `check_labels`; {} without 2-D tokens, shifted labels and positions."""
    names = ("input_ids", "shift_labels", "position_ids")
    tensors = [batch.get(name) for name in names] if isinstance(batch, Mapping) else [None]
    if any(not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 or tensor.shape[1] < 2 for tensor in tensors):
        return {}
    tokens, labels, positions = (tensor.detach().cpu() for tensor in tensors if tensor is not None)
    inner = labels[:, :-1]
    counted = inner != IGNORED
    return {
        "follow": ((inner == tokens[:, 1:]) | ~counted).all() & counted.any(),
        "first": tokens[:, 0],
        "last": labels[:, -1],
        "counted": counted[:, -1] & counted[:, 0],
        "position": positions.expand(tokens.shape[0], -1)[:, 0],
    }


class UlyssesSPDataLoaderAdapter:
    """Data loader of sequence slices, around a loader of whole batches.

    Ranks of a sequence must load the same batches; the first ten are compared. Accelerate's loaders distribute samples
    to all ranks: with them, the ranks of a sequence process each rank's batch in turn.

    Args:
        dl: yields mappings with `input_ids` or `inputs_embeds`.
        sp_rank: rank of this process in the group.
        sp_group: process group of the ranks that share a sequence.
        sp_world_size: size of the group.
        device: target device of the slices; None: slices are not moved.

    Attributes:
        shift_labels: True: `labels` become `shift_labels`, for causal models; False: `labels` stay with their tokens,
            for masked LMs and token classifiers.
    """

    shift_labels = True

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any = None) -> None:
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size, self.device = (
            dl, sp_rank, sp_group, sp_world_size, device,
        )  # fmt: skip
        self._axis = group_axis("sp", sp_group)
        self._same = BatchCheck(self._axis, "share a sequence (sp)")
        self._takes_turns = type(dl).__module__.split(".")[0] == "accelerate"

    def __len__(self) -> int:
        return len(self.dl) * (self.sp_world_size if self._takes_turns else 1)

    def __getattr__(self, name: str) -> Any:
        if name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this rank's slices of the batches. All ranks of the group must iterate together.

        Raises:
            DataError: the ranks' batches differ, or a batch cannot be split (see `slice_batch`).
        """
        for batch in self._turns() if self._takes_turns else self.dl:
            if self._same.left and not self._takes_turns:
                self._same.compare(batch)
            part = slice_batch(batch, self._axis)
            part.pop("labels" if self.shift_labels else "shift_labels", None)
            if self.device is not None:
                part = {
                    n: value.to(self.device) if isinstance(value, torch.Tensor) else value for n, value in part.items()
                }
            yield part

    def _turns(self) -> Iterator[Any]:
        batches = iter(self.dl)
        while True:
            everyone = all_gather_objects(self._axis, next(batches, None))
            if any(batch is None for batch in everyone):
                return
            yield from everyone
