"""Inputs of a pass on a device: all its integers lie in one buffer, so that one copy brings them from the host.

Sizes are separate from contents. A pass of next tokens can be padded to fixed sizes; then `PackedDecoder.compute` is a
function of the buffer alone, with the same launches on the same addresses, and can be captured as a graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ArgumentError
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch
from deepspeed.ops.triton.attention import PlannedRows

WORDS = 4  # of 4 bytes: kernels read addresses that are multiples of 16 bytes
OPTIONS = 8  # numbers of a row's sampling options, see `ops.triton.sampling.options_of`


@dataclass(frozen=True)
class Tiling:
    """Rows of one sequence in a tile of the attention kernels, which follow from the heads of the layers.

    Args:
        narrow: rows of a tile of the kernel that splits keys; a sequence with at most so many new rows is one tile.
        whole: rows of a tile of the kernel that reads all keys.
    """

    narrow: int = 1
    whole: int = 1


@dataclass(frozen=True)
class PassSizes:
    """Sizes of the tensors of a pass; passes of equal sizes have equal launches.

    Args:
        rows: tokens of all sequences, with padding.
        sequences: sequences, with padding.
        pages: pages of the longest block table.
        wanted: rows with requested logits, with padding.
        narrow_tiles: tiles of the sequences with few new rows, see `Tiling`.
        rest_tiles: whole tiles of the other sequences.
        all_tiles: whole tiles of all sequences.
        ends: rows up to the last sequence with few new rows.
        most: largest number of new rows of a sequence.
        length: longest context, or what it is padded to.
        every: whether logits are requested for every row.
    """

    rows: int
    sequences: int
    pages: int
    wanted: int
    narrow_tiles: int
    rest_tiles: int
    all_tiles: int
    ends: int
    most: int
    length: int
    every: bool

    @classmethod
    def decode(
        cls, sequences: int, pages: int, page_size: int, tiling: Tiling, count: int = 1, multiple: int = 1
    ) -> PassSizes:
        """Return the sizes of a padded pass with `count` rows of each sequence, all with requested logits.

        Args:
            sequences: sequences, padding included.
            pages: pages of a block table, padding included.
            page_size: tokens per page.
            tiling: rows of a tile.
            count: rows of each sequence: 1, or a draft's tokens and the one before them.
            multiple: the number of rows is padded to a multiple of it.

        Raises:
            ArgumentError: a size is below 1.
        """
        if min(sequences, pages, page_size, count) < 1:
            raise ArgumentError(f"a pass has at least 1 of each: {sequences} sequences, {count} rows, {pages} pages")
        rows, few = sequences * count, count <= tiling.narrow
        every, ends = sequences * -(-count // tiling.whole), rows if few else 0
        rows = -(-rows // multiple) * multiple
        return cls(
            rows, sequences, pages, rows, sequences if few else 0, 0 if few else every, every, ends, count,
            pages * page_size, True,
        )  # fmt: skip

    @classmethod
    def of(cls, spans: Sequence[BatchSlice], page_size: int, tiling: Tiling, multiple: int = 1) -> PassSizes:
        """Return the sizes of a batch as it is; rows and rows with logits are padded to a multiple of `multiple`."""
        counts = [len(span.tokens) for span in spans]
        rows, wanted, end, ends = sum(counts), sum(span.wanted for span in spans), 0, 0
        for count in counts:
            end += count
            ends = end if count <= tiling.narrow else ends
        narrow = sum(count <= tiling.narrow for count in counts)
        tiles = [-(-count // tiling.whole) for count in counts]
        rest = sum(n for n, count in zip(tiles, counts, strict=True) if count > tiling.narrow)
        length, every = max(span.end for span in spans), rows == wanted
        rows, wanted = (-(-number // multiple) * multiple for number in (rows, wanted))
        return cls(
            rows, len(spans), -(-length // page_size), wanted, narrow, rest, sum(tiles), ends, max(counts), length,
            every,
        )  # fmt: skip

    def fits(self, other: PassSizes) -> bool:
        """Whether a pass of these sizes can be padded to `other`."""
        return self.every == other.every and all(size <= vars(other)[name] for name, size in vars(self).items())

    def regions(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of each tensor of the buffer, in their order."""
        i32, i64 = torch.int32, torch.int64
        return {
            "tokens": (i64, (self.rows,)),
            "positions": (i64, (self.rows,)),
            "slots": (i64, (self.rows,)),
            "wanted": (i64, (self.wanted,)),
            "seeds": (i64, (self.wanted,)),
            "counts": (i32, (self.wanted,)),
            "options": (torch.float32, (self.wanted, OPTIONS)),
            "lengths": (i32, (self.sequences,)),
            "row_starts": (i32, (self.sequences + 1,)),
            "table": (i32, (self.sequences, self.pages)),
            "block_table": (i32, (self.sequences, self.pages)),
            "narrow": (i32, (self.narrow_tiles, 4)),
            "rest": (i32, (self.rest_tiles, 4)),
            "all": (i32, (self.all_tiles, 4)),
        }

    def offsets(self) -> tuple[dict[str, int], int]:
        """Return the place of each tensor in the buffer, and the buffer's size, in words of 4 bytes."""
        places, end = {}, 0
        for name, (dtype, shape) in self.regions().items():
            places[name] = end
            words = math.prod(shape) * dtype.itemsize // 4
            end += -(-words // WORDS) * WORDS
        return places, max(end, WORDS)


class PassInputs:
    """Tensors of a pass, views of one buffer.

    A padded row has token 0, position 0 and slot -1: it computes garbage, which nothing reads, and writes nothing to
    the pages. A padded sequence has length 0, no row of its own in `row_starts`, and a tile with sequence -1. A padded
    entry of `wanted` is 0; of the options, greedy.

    Args:
        sizes: sizes of the tensors.
        page_size: tokens per page.
        device: device of the buffer.

    Attributes:
        buffer: int32 [words], everything below.
        tokens: int64 [rows].
        positions: int64 [rows], position of each row in its sequence.
        slots: int64 [rows], slot of the row's keys and values in the layers' tensors; -1: padding.
        wanted: int64 [wanted], rows whose logits are requested.
        options: fp32 [wanted, 8], sampling options (`ops.triton.sampling.options_of`); all 0: greedy.
        seeds: int64 [wanted], seeds of the requests; `counts`: int32 [wanted], draws before this one.
        table: int32 [sequences, pages], page numbers. `block_table`: the same + 1, places in the layers' tensors.
        lengths: int32 [sequences], length of the context with the new rows.
        row_starts: int32 [sequences + 1], first row of each sequence, then the number of rows.
        narrow, rest, all: int32 [tiles, 4], tiles of the attention kernels (`ops.triton.attention.PlannedRows`).
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    wanted: torch.Tensor
    options: torch.Tensor
    seeds: torch.Tensor
    counts: torch.Tensor
    table: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    row_starts: torch.Tensor
    narrow: torch.Tensor
    rest: torch.Tensor
    all: torch.Tensor

    def __init__(self, sizes: PassSizes, page_size: int, device: torch.device) -> None:
        self.sizes, self.page_size, self.device = sizes, page_size, device
        self._places, words = sizes.offsets()
        self.buffer = torch.empty(words, dtype=torch.int32, device=device)
        for name, (dtype, shape) in sizes.regions().items():
            place, count = self._places[name], math.prod(shape) * dtype.itemsize // 4
            setattr(self, name, self.buffer[place : place + count].view(dtype).view(shape))

    @cached_property
    def paged_rows(self) -> PlannedRows:
        """Rows and pages for the attention kernels."""
        sizes, tiles = self.sizes, (self.narrow, self.rest, self.all)
        return PlannedRows(sizes.rows, sizes.most, sizes.length, sizes.ends, self.table, *tiles)

    @property
    def context_lengths(self) -> torch.Tensor:
        """As `lengths`."""
        return self.lengths

    def fill(self, batch: RaggedBatch, tiling: Tiling, sizes: PassSizes | None = None) -> None:
        """Write a batch, and padding behind it, by one copy from page-locked memory; the host does not wait for it.

        Args:
            batch: the batch; its `device` and `even` are not used.
            tiling: rows of a tile, as in `sizes`.
            sizes: sizes of the batch; None: they are computed.

        Raises:
            ArgumentError: the batch does not fit into `sizes`.
        """
        own = PassSizes.of(batch.spans, self.page_size, tiling) if sizes is None else sizes
        if not own.fits(self.sizes):
            raise ArgumentError(f"a batch of {own} does not fit into inputs of {self.sizes}")
        host = self if self.device.type == "cpu" else PassInputs(self.sizes, self.page_size, torch.device("cpu"))
        host._write(batch.spans, tiling)
        for name in ("options", "seeds", "counts"):
            target = getattr(host, name)
            target.zero_()
            if batch.sampling is not None:
                values = getattr(batch.sampling, name)
                target[: len(values)] = values
        if host is not self:
            self.buffer.copy_(get_accelerator().pin_memory(host.buffer), non_blocking=True)
        if batch.after is not None:
            chosen, chosen_rows = batch.after
            chosen.feed(chosen_rows, self.tokens[: len(chosen_rows)])

    def _write(self, spans: Sequence[BatchSlice], tiling: Tiling) -> None:
        """Write the rows of a batch to buffers in host memory."""
        tokens, positions, slots, wanted, row = [], [], [], [], 0
        tiles: dict[str, list[tuple[int, int, int, int]]] = {"narrow": [], "rest": [], "all": []}
        starts, size = [0], self.page_size
        table = self.table.numpy()  # writing lists to tensors takes ten times as long
        table.fill(-1)
        for number, span in enumerate(spans):
            count, places = len(span.tokens), range(span.start, span.end)
            tokens.extend(span.tokens)
            positions.extend(places)
            slots.extend([(span.pages[place // size] + 1) * size + place % size for place in places])
            wanted.extend(range(row + count - span.wanted, row + count))
            pages = span.pages[: -(-span.end // size)]
            table[number, : len(pages)] = pages
            narrow = count <= tiling.narrow
            if narrow:
                tiles["narrow"].append((number, row, count, span.start))
            whole = [
                (number, row + first, min(tiling.whole, count - first), span.start + first)
                for first in range(0, count, tiling.whole)
            ]
            tiles["all"] += whole
            tiles["rest"] += [] if narrow else whole
            row += count
            starts.append(row)
        torch.add(self.table, 1, out=self.block_table)
        starts += [row] * (len(self.row_starts) - len(starts))
        lists = {"tokens": tokens, "positions": positions, "slots": slots, "wanted": wanted, "row_starts": starts}
        lists["lengths"] = [span.end for span in spans]
        for name, values in lists.items():
            _put(getattr(self, name), values, -1 if name == "slots" else 0)
        for name, values in tiles.items():
            _put(getattr(self, name), values, 0)
            getattr(self, name).numpy()[len(values) :, 0] = -1


def _put(target: torch.Tensor, values: Sequence[Any], padding: int) -> None:
    """Write values to the beginning of a tensor, and padding behind them."""
    array = target.numpy()
    array[len(values) :] = padding
    if values:
        array[: len(values)] = values
