"""Variants of the attention kernels: which exist for a head size, page size and dtype, and how they are compiled.

This module needs neither Triton nor a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from deepspeed.errors import NotAvailableError

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SPLIT = 512  # keys of a split; a constant of the results, not of the machine
LARGEST_HEAD = 256
WGMMA = True  # whether tall tiles use the matrix instructions of sm_90, whose sums must have the bits of `mma.sync`
# Arguments by kernel: name and type of Triton. "*" alone is a pointer to the model's dtype.
_SHARED_STRIDES = ("key_slot", "key_head", "value_slot", "value_head")
_RULE = (
    ("scale", "fp32"),
    ("cap", "fp32"),
    ("window", "i32"),
    ("chunk", "i32"),
    ("group", "i32"),
    ("tile_heads", "i32"),
)
ARGUMENTS: dict[str, tuple[tuple[str, str], ...]] = {
    "attend_whole": (
        *((name, "*") for name in ("queries", "keys", "values", "out", "sinks")), ("table", "*i32"), ("tiles", "*i32"),
        *((name, "i32") for name in ("query_row", "query_head", *_SHARED_STRIDES, "out_row", "out_head", "table_row")),
        *_RULE, ("has_sinks", "i32"),
    ),
    "attend_split": (
        *((name, "*") for name in ("queries", "keys", "values")), ("partial", "*fp32"), ("stats", "*fp32"),
        ("table", "*i32"), ("tiles", "*i32"),
        *((name, "i32") for name in ("query_row", "query_head", *_SHARED_STRIDES, "table_row")),
        *_RULE, ("all_heads", "i32"), ("splits", "i32"),
    ),
    "join_splits": (
        ("partial", "*fp32"), ("stats", "*fp32"), ("out", "*"), ("sinks", "*"), ("tiles", "*i32"),
        ("out_row", "i32"), ("out_head", "i32"), *_RULE[2:], ("all_heads", "i32"), ("splits", "i32"),
        ("has_sinks", "i32"),
    ),
}  # fmt: skip
_ALIGNED = frozenset({"queries", "keys", "values", "partial", "query_row", "query_head", *_SHARED_STRIDES})


class KernelForm(Protocol):
    """One compiled form of a kernel, of any file: what the compiler and the loader read of it."""

    @property
    def name(self) -> str: ...
    @property
    def kernel(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def constants(self) -> Mapping[str, int]: ...
    @property
    def signature(self) -> Mapping[str, str]: ...
    @property
    def aligned(self) -> frozenset[str]: ...
    @property
    def even(self) -> bool: ...
    @property
    def warps(self) -> int: ...
    @property
    def stages(self) -> int: ...
    def form_on(self, architecture: str) -> tuple[int, Mapping[str, int]]: ...


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel.

    Args:
        kernel: name of the kernel in `paged_attention`.
        dtype: dtype of queries, keys, values and output.
        head: size of query and key heads.
        value: size of value heads.
        page: tokens per page (`join_splits` does not read pages: 0).
        capped: whether scores have a soft cap (`join_splits`: False).
        few: whether a tile of `attend_whole` is as small as one of `attend_split`, for sequences with few new rows.
    """

    kernel: str
    dtype: torch.dtype
    head: int
    value: int
    page: int = 0
    capped: bool = False
    few: bool = False

    @property
    def name(self) -> str:
        """Name of the variant's file, unique among all variants."""
        sizes = f"{self.head}x{self.value}" if self.head != self.value else f"{self.head}"
        page = f"_page{self.page}" if self.page else ""
        return f"{self.kernel}_{DTYPES[self.dtype]}_{sizes}{page}{'_capped' * self.capped}{'_few' * self.few}"

    @property
    def even(self) -> bool:
        """Whether strides are multiples of 16, as compiled kernels assume."""
        return self.head % 16 == 0 and self.value % 16 == 0

    @property
    def aligned(self) -> frozenset[str]:
        """Arguments that are multiples of 16 (addresses in bytes, strides in elements), so that 16 bytes are read at
        once."""
        return _ALIGNED

    @property
    def module(self) -> str:
        """Module of the kernel, in `deepspeed.ops.triton`."""
        return "paged_attention"

    @property
    def rows(self) -> int:
        """Rows of a tile: 64 where a program computes all keys of many rows in 16 bits, so that keys that are read once
        serve many; else 16.
        """
        return 64 if self._tall else 16

    @property
    def _tall(self) -> bool:
        long = self.kernel == "attend_whole" and not self.few
        return long and self.dtype != torch.float32 and max(self.head, self.value) <= 128

    @property
    def warps(self) -> int:
        """Warps of a program on sm_90; 8 where registers of 4 would be spilled."""
        if self.dtype == torch.float32:
            return 8
        large = max(self.head, self.value) > 64
        fits = WGMMA and self.head == self.value == 128 and not self.capped
        return 8 if self._tall and large and not fits else 4

    def form_on(self, architecture: str) -> tuple[int, Mapping[str, int]]:
        """Return the warps of a program, and the constants, on an architecture.

        Without `wgmma`, a branch around the masks would give the products of a tile different layouts.
        """
        if not self._tall or (WGMMA and architecture == "sm_90"):
            return self.warps, self.constants
        return (8 if max(self.head, self.value) > 64 else self.warps), {**self.constants, "SKIP": 0}

    @property
    def stages(self) -> int:
        """Stages of the loop over keys: keys and values of two later blocks are on their way; of one for heads in fp32
        that are padded to a power of two, where registers would be spilled."""
        return 2 if self.dtype == torch.float32 and self.head != _block(self.head) else 3

    @property
    def constants(self) -> dict[str, int]:
        """Values of the kernel's compile-time arguments."""
        if self.kernel == "join_splits":
            sizes = {"VALUE": self.value, "BLOCK_VALUE": _block(self.value)}
            return {**sizes, "BLOCK_ROWS": self.rows, "SPLIT": SPLIT}
        largest = max(self.head, self.value)
        if self.dtype == torch.float32:
            keys = 32 if largest <= 64 else 16
        else:
            keys = 64 if largest <= 128 else 32
        sizes = {"HEAD": self.head, "VALUE": self.value}
        sizes |= {"BLOCK_HEAD": _block(self.head), "BLOCK_VALUE": _block(self.value)}
        blocks = {"PAGE": self.page, "BLOCK_ROWS": self.rows, "BLOCK_KEYS": keys, "SPLIT": SPLIT}
        return {**sizes, **blocks, "CAPPED": self.capped, "SKIP": int(self._tall or self.kernel == "attend_split")}

    @property
    def signature(self) -> dict[str, str]:
        """Types of the arguments, in their order; compile-time ones are "constexpr"."""
        own = "*" + DTYPES[self.dtype]
        types = {name: own if kind == "*" else kind for name, kind in ARGUMENTS[self.kernel]}
        return types | {name: "constexpr" for name in self.constants}


def _block(size: int) -> int:
    """Return the smallest power of two that is at least `size` and 16."""
    return max(16, 1 << (size - 1).bit_length())


def unsupported(dtype: torch.dtype, head: int, value: int) -> str | None:
    """Return the reason why no variant can have this dtype and these head sizes, or None."""
    if dtype not in DTYPES:
        return f"kernels have no {dtype}"
    if not all(1 <= size <= LARGEST_HEAD for size in (head, value)):
        return f"kernels have heads of 1 to {LARGEST_HEAD}, not {head} and {value}"
    return None


def attention_variants(
    dtype: torch.dtype, head: int, value: int | None = None, page: int = 16, capped: bool = False
) -> dict[str, Variant]:
    """Return the variants that attention of one kind needs, by kernel; "attend_few": `attend_whole` with small tiles.

    Raises:
        NotAvailableError: no kernel has this dtype or head size.
    """
    value = head if value is None else value
    if (reason := unsupported(dtype, head, value)) is not None:
        raise NotAvailableError(f"paged attention: {reason}")
    whole = Variant("attend_whole", dtype, head, value, page, capped)
    few = Variant("attend_whole", dtype, head, value, page, capped, few=True)
    return {
        "attend_whole": whole,
        "attend_few": whole if whole.rows == few.rows else few,
        "attend_split": Variant("attend_split", dtype, head, value, page, capped),
        "join_splits": Variant("join_splits", dtype, value, value),
    }


def all_variants(
    dtypes: tuple[torch.dtype, ...], heads: tuple[int, ...], pages: tuple[int, ...], capped: tuple[bool, ...]
) -> Iterator[Variant]:
    """Yield each variant that one of these dtypes, head sizes, page sizes and caps needs, once."""
    wanted = {
        variant: None
        for dtype in dtypes
        for head in heads
        for page in pages
        for cap in capped
        for variant in attention_variants(dtype, head, page=page, capped=cap).values()
    }
    yield from wanted
