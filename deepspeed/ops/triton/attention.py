"""Host's side of paged attention: which tiles a pass has, and which kernels compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from deepspeed.errors import ArgumentError
from deepspeed.ops.triton.variants import SPLIT, KernelForm, Variant, attention_variants

MOST_PARTIAL = 256 << 20  # bytes of the results of splits that a pass may hold


class Kernels(Protocol):
    """Kernels that can be launched: compiled ones (`load.LoadedKernels`), or interpreted ones in tests."""

    def has(self, variant: KernelForm) -> bool:
        """Whether the variant is there."""
        ...

    def prepare(self, variants: Iterable[KernelForm]) -> None:
        """Load variants, before the first launch of each."""
        ...

    def launch(self, variant: KernelForm, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        """Launch a variant on the current stream.

        Args:
            variant: the variant.
            grid: number of programs by axis.
            arguments: tensors and numbers, in the order of `variant.signature` without compile-time arguments.
        """
        ...


@dataclass(frozen=True)
class AttentionRule:
    """What rows see and how scores are made, beyond causality; the same for all rows of a layer.

    Args:
        scale: factor of the scores.
        window: number of last keys that a row sees; 0: all.
        chunk: positions of one chunk, whose rows see only keys of the same; 0: no chunks.
        cap: soft cap of the scores; None: none.

    Raises:
        ArgumentError: scale or cap is not positive: the largest product would not be the largest score.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    cap: float | None = None

    def __post_init__(self) -> None:
        if not self.scale > 0 or (self.cap is not None and not self.cap > 0):
            raise ArgumentError(f"attention with scale {self.scale} and cap {self.cap}: both have to be positive")


@dataclass
class PagedRows:
    """Rows of a pass and the pages of their sequences.

    Args:
        counts: new rows of each sequence; its rows follow those of the sequences before it.
        lengths: length of each sequence with these rows, whose keys and values are in the pages already.
        table: page numbers, int32 [sequences, pages] on the device of the queries. Entries after a sequence's last page
            may be any numbers.
        send: function that copies a host tensor to a device.

    Raises:
        ArgumentError: numbers of sequences differ, a count is not from 1 to its length, or the table is not int32.
    """

    counts: Sequence[int]
    lengths: Sequence[int]
    table: torch.Tensor
    send: Callable[[torch.Tensor, torch.device], torch.Tensor] = torch.Tensor.to
    _tiles: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not len(self.counts) == len(self.lengths) == len(self.table):
            sizes = f"{len(self.counts)} counts, {len(self.lengths)} lengths, {len(self.table)} rows of the table"
            raise ArgumentError(f"sequences differ in number: {sizes}")
        if any(not 0 < count <= length for count, length in zip(self.counts, self.lengths, strict=True)):
            raise ArgumentError(f"a sequence has 1 to `length` rows, not {list(self.counts)} of {list(self.lengths)}")
        if self.table.dtype != torch.int32:
            raise ArgumentError(f"the table of pages is int32, not {self.table.dtype}")

    @property
    def rows(self) -> int:
        """Number of rows of the pass."""
        return sum(self.counts)

    def tiles(self, tokens: int, least: int = 1, most: int | None = None) -> torch.Tensor:
        """Return the tiles of at most `tokens` rows, int32 [tiles, 4] on the device, as the kernels read them.

        `least` and `most`: numbers of new rows; other sequences have no tiles.
        """
        most = max(self.counts, default=0) if most is None else most
        key = tokens, least, most
        if key not in self._tiles:
            tiles, first = [], 0
            for sequence, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
                for start in range(0, count if least <= count <= most else 0, tokens):
                    tiles.append((sequence, first + start, min(tokens, count - start), length - count + start))
                first += count
            array = torch.tensor(tiles, dtype=torch.int32).reshape(-1, 4)
            self._tiles[key] = self.send(array, self.table.device)
        return self._tiles[key]

    def splits(self, rule: AttentionRule, tokens: int, most: int) -> int:
        """Return the largest number of splits that a tile of `tokens` rows reads, in sequences of at most `most` rows;
        0 without such sequences."""
        largest = 0
        for count, length in zip(self.counts, self.lengths, strict=True):
            for start in range(length - count, length if count <= most else 0, tokens):
                low = max(start - rule.window + 1, 0) if rule.window else 0
                low = max(low, start // rule.chunk * rule.chunk) if rule.chunk else low
                largest = max(largest, -(-min(start + tokens, length) // SPLIT) - low // SPLIT)
        return largest

    def end(self, most: int) -> int:
        """Return the number of rows up to the last sequence of at most `most` rows."""
        ends = [0]
        for count in self.counts:
            ends.append(ends[-1] + count)
        return max((end for end, count in zip(ends[1:], self.counts, strict=True) if count <= most), default=0)


@dataclass(frozen=True)
class PlannedRows:
    """Rows of a pass whose tiles are on the device already; stands for `PagedRows`.

    What a launch depends on are sizes and bounds, not contents: a pass whose rows, tiles and tables are padded to fixed
    sizes has the same launches for all contents. A tile with sequence -1 is padding.

    Args:
        rows: number of rows, padding included.
        most: largest number of new rows of a sequence.
        length: bound of the contexts' lengths.
        ends: rows up to the last sequence that has a tile in `narrow`.
        table: page numbers, int32 [sequences, pages].
        narrow: tiles of sequences whose new rows fit into one tile of the kernel that splits keys, int32 [tiles, 4].
        rest: whole tiles of the other sequences.
        all: whole tiles of all sequences.
    """

    rows: int
    most: int
    length: int
    ends: int
    table: torch.Tensor
    narrow: torch.Tensor
    rest: torch.Tensor
    all: torch.Tensor

    @property
    def counts(self) -> tuple[int, ...]:
        """The largest number of new rows of a sequence."""
        return (self.most,)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The bound of the contexts' lengths."""
        return (self.length,)

    def tiles(self, tokens: int, least: int = 1, most: int | None = None) -> torch.Tensor:
        """Return the tiles as in `PagedRows.tiles`; their rows were settled when they were planned."""
        if most is not None:
            return self.narrow
        return self.all if least == 1 else self.rest

    def splits(self, rule: AttentionRule, tokens: int, most: int) -> int:
        """Return a bound of the splits that a narrow tile reads, as in `PagedRows.splits`; 0 without narrow tiles."""
        if not len(self.narrow):
            return 0
        splits = -(-self.length // SPLIT)
        if rule.window:
            splits = min(splits, (rule.window + tokens - 2) // SPLIT + 2)
        if rule.chunk:
            splits = min(splits, (rule.chunk + tokens - 2) // SPLIT + 2)
        return splits

    def end(self, most: int) -> int:
        """Return the number of rows up to the last sequence with a narrow tile."""
        return self.ends


def tile_heads(heads: int, cached: int) -> int:
    """Return how many query heads of one key-value head share a tile."""
    return min(16, 1 << (heads // cached - 1).bit_length())


def tile_rows(variants: dict[str, Variant], heads: int, cached: int) -> tuple[int, int]:
    """Return how many rows of a sequence a tile has: of the kernel that splits keys, and of the one that does not."""
    members = tile_heads(heads, cached)
    return variants["attend_split"].rows // members, variants["attend_whole"].rows // members


@dataclass
class _PagedCall:
    """One call of `attend_pages`: its tensors, and numbers that its launches share."""

    kernels: Kernels
    variants: dict[str, Variant]
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    sinks: torch.Tensor | None
    rows: PagedRows | PlannedRows
    rule: AttentionRule

    def __post_init__(self) -> None:
        group, cached = self.query.shape[1] // self.keys.shape[1], self.keys.shape[1]
        self.members = tile_heads(self.query.shape[1], cached)
        self.blocks = cached * -(-group // self.members)
        self.narrow, self.tall = tile_rows(self.variants, self.query.shape[1], cached)
        cap = 1.0 if self.rule.cap is None else self.rule.cap
        self.shared = (self.rule.window, self.rule.chunk, group, self.members)
        self.scales = (self.rule.scale, cap)
        self.strides = (*self.query.stride()[:2], *self.keys.stride()[:2], *self.values.stride()[:2])
        self.sink = self.query if self.sinks is None else self.sinks.to(self.query.dtype)

    def whole(self, least: int) -> None:
        """Compute the sequences of at least `least` rows, all keys of a tile in one program."""
        self._each(self.variants["attend_whole"], self.rows.tiles(self.tall, least))

    def few(self, most: int) -> None:
        """Compute the sequences of at most `most` rows in the same way, with small tiles."""
        self._each(self.variants["attend_few"], self.rows.tiles(self.narrow, most=most))

    def _each(self, variant: Variant, tiles: torch.Tensor) -> None:
        if len(tiles):
            tensors = (self.query, self.keys, self.values, self.out, self.sink, self.rows.table, tiles)
            strides = (*self.strides, *self.out.stride()[:2], self.rows.table.stride(0))
            arguments = (*tensors, *strides, *self.scales, *self.shared, int(self.sinks is not None))
            self.kernels.launch(variant, (len(tiles), self.blocks, 1), arguments)

    def split(self, most: int, splits: int, ends: int) -> None:
        """Compute the sequences of at most `most` rows, splits of their keys side by side; `ends`: rows up to them."""
        tiles, heads, size = self.rows.tiles(self.narrow, most=most), self.query.shape[1], self.out.shape[2]
        partial, stats = (self.out.new_empty(ends, heads, splits, n, dtype=torch.float32) for n in (size, 2))
        tensors = (self.query, self.keys, self.values, partial, stats, self.rows.table, tiles)
        numbers = (*self.strides, self.rows.table.stride(0), *self.scales, *self.shared, heads, splits)
        self.kernels.launch(self.variants["attend_split"], (len(tiles), self.blocks, splits), (*tensors, *numbers))
        tensors = (partial, stats, self.out, self.sink, tiles)
        numbers = (*self.out.stride()[:2], *self.shared, heads, splits, int(self.sinks is not None))
        self.kernels.launch(self.variants["join_splits"], (len(tiles), self.blocks, 1), (*tensors, *numbers))


def attend_pages(
    kernels: Kernels,
    query: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    rows: PagedRows | PlannedRows,
    page: int,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
    split: bool | None = None,
) -> torch.Tensor:
    """Return the attention of all rows of a pass, [rows, heads, value size], with the dtype of the queries.

    Bits of a row depend on its own sequence alone, and not on `split`.

    Args:
        kernels: the kernels.
        query: queries, [rows, heads, head size]; any strides.
        pools: keys and values, [slots, key-value heads, size]; page p begins at slot (p + 1) · `page`.
        rows: the rows and their pages.
        page: tokens per page.
        rule: what rows see.
        sinks: score of the sink of each head, [heads]; None: no sinks.
        split: whether splits of the keys are computed in parallel; None: for sequences whose new rows fit into one
            tile, if one of them reads two splits or more and the partial results take at most 256 MiB.

    Raises:
        ArgumentError: shapes do not fit each other.
        NotAvailableError: no kernel has this dtype or head size.
    """
    keys, values = pools
    _check(query, keys, values, rows, sinks)
    if query.stride(-1) != 1 or any(stride % 16 for stride in query.stride()[:2]) or query.data_ptr() % 16:
        query = query.clone(memory_format=torch.contiguous_format)  # kernels read 16 bytes at once
    variants = attention_variants(query.dtype, query.shape[2], values.shape[2], page, rule.cap is not None)
    out = query.new_empty(len(query), query.shape[1], values.shape[2])
    call = _PagedCall(kernels, variants, query, keys, values, out, sinks, rows, rule)
    most = call.narrow if split is None else max(rows.counts) * split
    splits, ends = rows.splits(rule, call.narrow, most), rows.end(most)
    if split is None and (splits < 2 or ends * out[0].numel() * splits * 4 > MOST_PARTIAL):
        call.few(most)
    elif splits:
        call.split(most, splits, ends)
    call.whole(most + 1)
    return out


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PagedRows | PlannedRows,
    sinks: torch.Tensor | None,
) -> None:
    """Raise ArgumentError unless the shapes fit each other."""
    shapes = f"queries {tuple(query.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
    if query.dim() != 3 or keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[:2]:
        raise ArgumentError(f"paged attention of {shapes}: each has three dimensions, keys and values equal slots")
    if query.shape[2] != keys.shape[2] or query.shape[1] % keys.shape[1]:
        raise ArgumentError(f"paged attention of {shapes}: head sizes differ, or heads are no multiple of cached ones")
    if not query.dtype == keys.dtype == values.dtype:
        raise ArgumentError(f"paged attention of {query.dtype} over {keys.dtype} and {values.dtype}: dtypes differ")
    if len(query) != rows.rows:
        raise ArgumentError(f"paged attention of {shapes}: the pass has {rows.rows} rows")
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ArgumentError("paged attention: heads of keys and values have to be contiguous")
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise ArgumentError(f"paged attention of {shapes}: one sink for each head, not {tuple(sinks.shape)}")
