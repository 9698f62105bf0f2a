"""Variants of the kernels of rows, sampling, packed products and messages: arguments, constants, how they are built.

This module needs neither Triton nor a device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepspeed.errors import ArgumentError
from deepspeed.ops.triton.variants import DTYPES

ROWS, SAMPLING, BLOCKS = "row_kernels", "sampling_kernels", "block_kernels"
PRODUCTS, GEMV, SINGLE = "packed_products", "gemv_kernels", "single_row_kernels"
BLOCK_SIZE = 256  # elements of a block of messages
_TABLE = "starts:*i32 lengths:*i32 scale_places:*i32 code_places:*i32 blocks"
_PRODUCT = (
    "inputs:* weights:*i8 scales:*fp32 offsets:*fp32 bias:* out:* input_row out_row rows outputs inputs_ scale_step "
    "has_bias"
)
# Arguments by kernel: name and type of Triton. "*" alone is a pointer to the model's dtype.
ARGUMENTS: dict[str, tuple[str, str]] = {
    "norm_rows": (
        ROWS, "rows:* residual:* weight:* bias:* out:* stream:* row_stride row_head residual_stride out_stride "
        "out_head stream_stride width eps:fp32 shift:fp32 has_residual has_bias",
    ),
    "rotate_into_pages": (
        ROWS, "queries:* keys:* values:* cosines:* sines:* slots:*i64 out:* key_pool:* value_pool:* query_row "
        "query_head key_row key_head value_row value_head table_row out_row out_head key_slot key_pool_head value_slot "
        "value_pool_head count heads cached rotary",
    ),
    "gate_rows": (ROWS, "gate:* up:* out:* gate_row up_row out_row width"),
    "draw_numbers": (SAMPLING, "seeds:*i64 counters:*i32 numbers:*fp64 rows"),
    "adjust_scores": (
        SAMPLING, "logits:* table:*i32 scores:*fp32 options:*fp32 maxima:*fp32 firsts:*i32 logit_row table_row "
        "score_row vocabulary has_table",
    ),
    "weigh_parts": (
        SAMPLING, "scores:*fp32 options:*fp32 maxima:*fp32 firsts:*i32 weights:*fp64 counts:*i32 score_row vocabulary",
    ),
    "choose_tokens": (
        SAMPLING, "scores:*fp32 options:*fp32 numbers:*fp64 maxima:*fp32 firsts:*i32 weights:*fp64 counts:*i32 "
        "members:*i32 table:*i32 tokens:*i32 table_row score_row vocabulary has_table",
    ),
    "round_rows": (ROWS, "rows:* values:*i8 scales:*fp32 row_stride width"),
    "gemv": (
        GEMV, "inputs:* weights:*i32 scales:*fp32 offsets:*fp32 bias:* out:* input_row out_row rows outputs inputs_ "
        "scale_step has_bias",
    ),
    "gemv_add": (
        SINGLE, "inputs:* weights:*i32 scales:*fp32 offsets:*fp32 bias:* residual:* norm:* out:* stream:* "
        "squares:*fp32 outputs inputs_ scale_step has_bias shift:fp32",
    ),
    "gemv_gate": (
        SINGLE, "inputs:* squares:*fp32 weights:*i32 scales:*fp32 offsets:*fp32 bias:* out:* outputs inputs_ "
        "scale_step has_bias parts eps:fp32 activation",
    ),
    "gemv_rotate": (
        SINGLE, "inputs:* squares:*fp32 weights:*i32 scales:*fp32 offsets:*fp32 bias:* cosines:* sines:* slots:*i64 "
        "out:* key_pool:* value_pool:* inputs_ scale_step has_bias parts eps:fp32 heads cached head_size key_slot "
        "key_pool_head value_slot value_pool_head",
    ),
    "tile_product": (PRODUCTS, _PRODUCT),
    "wide_product": (PRODUCTS, _PRODUCT),
    "encode_blocks": (
        BLOCKS, f"values:* memory:*bf16 payload:*u8 scales:*i16 {_TABLE} beta:fp32 renewed:fp32",
    ),
    "decode_blocks": (BLOCKS, f"payload:*u8 scales:*i16 out:* {_TABLE}"),
    "sum_blocks": (
        BLOCKS, f"payload:*u8 scales:*i16 own:* out:*fp32 {_TABLE} count own_rank stride scale:fp32 add",
    ),
}  # fmt: skip


_GEMV_ALIGNED = frozenset({"input_row", "inputs_"})


@dataclass(frozen=True)
class KernelVariant:
    """One compiled form of a kernel of this module; as `variants.Variant`.

    Args:
        kernel: name of the kernel.
        dtype: dtype of the tensors without one of their own.
        sizes: names and values of the compile-time arguments.
        warps: warps of a program.
        stages: stages of the kernel's loop.
        even: whether strides are multiples of 16.
    """

    kernel: str
    dtype: torch.dtype
    sizes: tuple[tuple[str, int], ...]
    warps: int = 4
    stages: int = 3
    even: bool = True

    def form_on(self, architecture: str) -> tuple[int, dict[str, int]]:
        """Return the warps of a program, and the constants, on an architecture."""
        return self.warps, self.constants

    @property
    def name(self) -> str:
        """Name of the variant's file, unique among all variants."""
        sizes = "_".join(f"{name.lower()}{value}" for name, value in self.sizes)
        return f"{self.kernel}_{DTYPES[self.dtype]}_{sizes}"

    @property
    def aligned(self) -> frozenset[str]:
        """Arguments that are multiples of 16, as in `variants.Variant`; in sampling, whose vocabularies have any
        size, addresses and the stride of its own scores; of messages, none, since slices start anywhere.

        Where a row's end is not known to be one, its masks forbid to read 16 bytes at once: so widths are among them.
        """
        if self.module == BLOCKS:
            return frozenset()
        if self.module in (GEMV, SINGLE):
            return frozenset(name for name, kind in self.signature.items() if kind.startswith("*")) | _GEMV_ALIGNED
        own = ("score_row",) if self.module == SAMPLING else ("_stride", "_row", "_head", "_slot", "inputs_", "width")
        names = self.signature.items()
        other = "" if self.constants.get("WHOLE") else "table_row"  # of a part of a head: any number
        return frozenset(name for name, kind in names if kind.startswith("*") or (name.endswith(own) and name != other))

    @property
    def module(self) -> str:
        """Module of the kernel, in `deepspeed.ops.triton`."""
        return ARGUMENTS[self.kernel][0]

    @property
    def constants(self) -> dict[str, int]:
        """Values of the kernel's compile-time arguments."""
        return dict(self.sizes)

    @property
    def signature(self) -> dict[str, str]:
        """Types of the arguments, in their order; compile-time ones are "constexpr"."""
        types = {}
        for argument in ARGUMENTS[self.kernel][1].split():
            name, _, kind = argument.partition(":")
            types[name] = "*" + DTYPES[self.dtype] if kind == "*" else kind or "i32"
        return types | {name: "constexpr" for name in self.constants}


def block(size: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << (size - 1).bit_length())


@functools.cache
def norm_variant(dtype: torch.dtype, width: int, centred: bool) -> KernelVariant:
    """Variant of `norm_rows` for rows of a width."""
    size = block(width, 128)
    return KernelVariant("norm_rows", dtype, (("BLOCK", size), ("CENTRED", int(centred))), min(max(size // 512, 1), 16))


ROTATED_HEADS = 8  # heads of a program
MANY_ROWS = 256  # from so many on, a program has several rows: programs are then started faster than they end


@functools.cache
def rotation_variant(
    dtype: torch.dtype, head: int, value: int, interleaved: bool, rotary: int, rows: int = 1
) -> KernelVariant:
    """Variant of `rotate_into_pages` for heads of these sizes, of which `rotary` places are rotated, and some rows."""
    whole, several, size = rotary == head and head % 2 == 0 and not interleaved, rows >= MANY_ROWS, max(head, value)
    large = not whole and block(size) * dtype.itemsize > 512  # registers would be spilled
    heads = ROTATED_HEADS // 2 if large else ROTATED_HEADS
    sizes = (
        ("HEAD", head), ("VALUE", value), ("BLOCK", block(size)), ("INTERLEAVED", int(interleaved)),
        ("WHOLE", int(whole)), ("ROWS", min(8, 512 // block(size)) if several else 1), ("HEADS", heads),
    )  # fmt: skip
    return KernelVariant("rotate_into_pages", dtype, sizes, 4 if several else 1)


@functools.cache
def rotation_variants(dtype: torch.dtype, head: int, value: int, interleaved: bool, rotary: int) -> list[KernelVariant]:
    """Variants of `rotate_into_pages` for all numbers of rows."""
    return [rotation_variant(dtype, head, value, interleaved, rotary, rows) for rows in (1, MANY_ROWS)]


@functools.cache
def gate_variant(dtype: torch.dtype, activation: int) -> KernelVariant:
    """Variant of `gate_rows` for an activation."""
    return KernelVariant("gate_rows", dtype, (("BLOCK", 1024), ("ACTIVATION", activation)))


LIMITS = 32  # limits of distances in `sampling_kernels`
# Sizes of sampling: tokens of a part of the vocabulary; parts, tokens that are gathered, and gathered tokens that
# `choose_tokens` reads at once.
SAMPLING_SIZES = {"PART": 1024, "TILE": 256, "CHUNK": 4096, "BLOCK": 2048}


def sampling_variants(dtype: torch.dtype, sizes: dict[str, int] = SAMPLING_SIZES) -> dict[str, KernelVariant]:
    """Variants of sampling from logits of a dtype, by kernel."""
    part, tile = ("PART", sizes["PART"]), ("TILE", sizes["TILE"])
    return {
        "draw_numbers": KernelVariant("draw_numbers", torch.float32, (("BLOCK", 128),)),
        "adjust_scores": KernelVariant("adjust_scores", dtype, (part,)),
        "weigh_parts": KernelVariant("weigh_parts", torch.float32, (part, ("GROUP", 8), tile), 4),
        "choose_tokens": KernelVariant("choose_tokens", torch.float32, tuple(sizes.items()), 16),
    }


TILES = (1, 2, 4)  # tiles of 16 rows for which a product's program decodes its weights once
INT8, INT4, FLOAT8, DENSE = "int8", "int4", "fp8", "dense"  # forms of a matrix
FORMS = (INT8, INT4, FLOAT8)  # packed ones
_FORM_NUMBERS = {DENSE: 16, INT8: 8, INT4: 4, FLOAT8: 7}


@functools.cache
def product_variant(dtype: torch.dtype, form: str, rows: int = 1, width: int = 0) -> KernelVariant:
    """Variant of the product of a number of rows, in tiles, with a matrix of `width` inputs in int8, int4 or fp8."""
    tiles = next((tiles for tiles in TILES if rows <= 16 * tiles), TILES[-1])
    narrow = dtype.itemsize < 4  # without matrix instructions, products of fp32 take many registers
    few = form == INT4 and tiles < TILES[-1]  # long blocks, since loops have few instructions
    columns = (256 if few else 128) if narrow else 32
    even = narrow and width % columns == 0 != width
    tiles = tiles if even or not narrow else TILES[-1]  # other widths are rare: one variant is enough
    columns = columns if even or not narrow else 128
    outs = 64 if narrow and form != INT4 and tiles == TILES[-1] else 32
    sizes = (
        ("FORM", _FORM_NUMBERS[form]), ("EVEN", int(even)), ("BLOCK_ROWS", 16), ("BLOCK_OUT", outs),
        ("BLOCK_IN", columns), ("TILES", tiles),
    )  # fmt: skip
    # Few rows: as many bytes in flight as keep the whole memory busy with a matrix of 4,096 outputs.
    stages = (4 if columns == 256 else {1: 8, 2: 6, 4: 3}[tiles]) if narrow else 4
    return KernelVariant("tile_product", dtype, sizes, 4 if narrow else 8, stages)


WIDE_ROWS = 32  # with more rows, weights are the left side of matrix instructions
_PROGRAMS = 128  # smaller programs are launched where larger ones would leave multiprocessors without one


@functools.cache
def wide_variant(dtype: torch.dtype, form: str, rows: int, outputs: int, width: int) -> KernelVariant | None:
    """Variant of `wide_product` for sizes of rows [rows, width] and outputs; None if tiles multiply them.

    It decodes by fewer instructions than tiles, of which 4 bits take many; but a program has 128 outputs.
    """
    if dtype.itemsize != 2 or width % 64:
        return None
    if rows <= WIDE_ROWS:
        return _wide(dtype, form, 32) if form == INT4 and rows > 16 and outputs >= 128 * _PROGRAMS else None
    large = -(-rows // 128) * -(-outputs // 128) >= _PROGRAMS
    return _wide(dtype, form, 128 if large else 64)


def _wide(dtype: torch.dtype, form: str, rows: int) -> KernelVariant:
    sizes = (
        ("FORM", _FORM_NUMBERS[form]), ("EVEN", 1), ("BLOCK_ROWS", rows), ("BLOCK_OUT", 128), ("BLOCK_IN", 64),
    )  # fmt: skip
    return KernelVariant("wide_product", dtype, sizes, 8 if rows == 128 else 4, 4)


GEMV_ROWS = 2  # rows of a program of `gemv` at most


@functools.cache
def gemv_variant(dtype: torch.dtype, form: str, rows: int = 1) -> KernelVariant | None:
    """Variant of the product of few rows with a matrix in a form ("dense": of the same dtype); None if there is none.

    A thread has 16 bytes of each of four or eight rows of the matrix in flight.
    """
    if dtype not in DTYPES or dtype.itemsize != 2:
        return None
    each = min(rows, GEMV_ROWS)
    outs, words = (8, 256) if form == INT4 else (4 if form == DENSE or each > 1 else 8, 512)
    sizes = (("FORM", _FORM_NUMBERS[form]), ("ROWS", each), ("BLOCK_OUT", outs), ("BLOCK_WORDS", words))
    return KernelVariant("gemv", dtype, sizes, 4, 1)


def gemv_variants(dtype: torch.dtype, form: str) -> list[KernelVariant]:
    """Variants of `gemv` for all numbers of rows; none in fp32."""
    variants = [gemv_variant(dtype, form, rows) for rows in range(1, GEMV_ROWS + 1)]
    return [variant for variant in variants if variant is not None]


SINGLE_ROW = ("gemv_add", "gemv_gate", "gemv_rotate")


@functools.cache
def single_row_variant(kernel: str, dtype: torch.dtype, form: str) -> KernelVariant:
    """Variant of a kernel of `SINGLE_ROW` for a matrix in a form; its blocks are those of `gemv`."""
    plain = gemv_variant(dtype, form)
    if plain is None or dtype != torch.bfloat16:
        raise ArgumentError(f"kernels of single rows are for bfloat16, not {dtype}")
    sizes = tuple(size for size in plain.sizes if size[0] != "ROWS")
    return KernelVariant(kernel, dtype, sizes, plain.warps, plain.stages)


def product_variants(dtype: torch.dtype, form: str) -> list[KernelVariant]:
    """Variants of the products with a packed matrix for all numbers of rows and widths."""
    tiles = [product_variant(dtype, form, 16 * tiles, width) for width in (1, 256) for tiles in TILES]
    wide = [_wide(dtype, form, rows) for rows in (32, 64, 128) if dtype.itemsize == 2 and (form == INT4 or rows > 32)]
    return [*gemv_variants(dtype, form), *dict.fromkeys(tiles), *wide]


def rounding_variant(dtype: torch.dtype) -> KernelVariant:
    """Variant of `round_rows`."""
    return KernelVariant("round_rows", dtype, (("BLOCK", 4096),), 8)


def block_variant(kernel: str, dtype: torch.dtype, bits: int, memory: bool = False) -> KernelVariant | None:
    """Variant of a kernel of messages for values of a dtype; None if there is none."""
    if dtype not in DTYPES:
        return None
    sizes = (("BLOCK", BLOCK_SIZE), ("ROWS", 4), ("BITS", bits))
    return KernelVariant(kernel, dtype, (*sizes, ("MEMORY", int(memory))) if kernel == "encode_blocks" else sizes)


def block_variants() -> list[KernelVariant]:
    """Return the variants of the kernels of messages."""
    kinds = [("encode_blocks", False), ("encode_blocks", True), ("decode_blocks", False), ("sum_blocks", False)]
    forms = [(*kind, dtype, bits) for kind in kinds for dtype in DTYPES for bits in (8, 4)]
    variants = [block_variant(kernel, dtype, bits, memory) for kernel, memory, dtype, bits in forms]
    return [variant for variant in variants if variant is not None]


def row_variants(
    dtypes: tuple[torch.dtype, ...], heads: tuple[int, ...], widths: tuple[int, ...]
) -> Iterator[KernelVariant]:
    """Yield the variants that are built for these dtypes, head sizes and widths, each once.

    Not among them: interleaved rotations, value heads of another size.
    """
    wanted: dict[KernelVariant, None] = {}
    for dtype in dtypes:
        wanted |= {norm_variant(dtype, width, centred): None for width in widths for centred in (False, True)}
        wanted |= {norm_variant(dtype, head, False): None for head in heads}  # of queries and keys
        for head in heads:
            for rotary in (head, 0):  # all places, or fewer: the kernel reads how many
                wanted |= dict.fromkeys(rotation_variants(dtype, head, head, False, rotary))
        wanted |= {gate_variant(dtype, activation): None for activation in range(3)}
        wanted |= dict.fromkeys(sampling_variants(dtype).values())
        wanted |= dict.fromkeys(variant for form in FORMS for variant in product_variants(dtype, form))
        wanted |= dict.fromkeys([*gemv_variants(dtype, DENSE), rounding_variant(dtype)])
        if dtype == torch.bfloat16:
            forms = (DENSE, *FORMS)
            wanted |= {single_row_variant(kernel, dtype, form): None for kernel in SINGLE_ROW for form in forms}
    yield from wanted
