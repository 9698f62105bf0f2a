"""What a launch of a kernel costs: bytes by argument, operations, and how its programs divide them.

The formulas follow the kernels' loops; tests compare them with the addresses that interpreted kernels touch. Needs
neither Triton nor a device: tensors may be of the meta device, except the tiles of attention, which say what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.errors import ArgumentError
from deepspeed.ops.triton.row_variants import LIMITS
from deepspeed.ops.triton.variants import DTYPES, SPLIT, KernelForm, Variant

THREADS = 2048  # of a multiprocessor
WARP = 32
KEPT = 16 << 20  # bytes of activations that the L2 cache (40 and 50 MB) has for the next launch
_RECENT = {
    "attend_split": {"queries", "partial", "stats"}, "attend_whole": {"queries", "out"},
    "join_splits": {"partial", "stats", "out"}, "norm_rows": {"rows", "residual", "out", "stream"},
    "rotate_into_pages": {"queries", "keys", "values", "cosines", "sines", "out"}, "gate_rows": {"gate", "up", "out"},
    "adjust_scores": {"logits", "scores", "maxima", "firsts"},
    "weigh_parts": {"scores", "maxima", "firsts", "weights", "counts"},
    "choose_tokens": {"scores", "maxima", "firsts", "weights", "counts", "members"},
    "tile_product": {"inputs", "out"}, "wide_product": {"inputs", "out"}, "gemv": {"inputs", "out"},
    "round_rows": {"rows", "values", "scales"}, "gemv_add": {"inputs", "residual", "out", "stream", "squares"},
    "gemv_gate": {"inputs", "squares", "out"}, "gemv_rotate": {"inputs", "squares", "cosines", "sines", "out"},
}  # fmt: skip
# Programs of a multiprocessor where registers or shared memory limit them, by the compiler's report for sm_90 in bf16.
_RESIDENT = {"attend_split": 3, "attend_whole": 3, "weigh_parts": 5, "choose_tokens": 1, "round_rows": 6}
# Likewise of products, and instructions of a warp in the loop over one block of inputs, counted in that code: by form
# and tiles of rows, rows of a program of `wide_product`, or rows of `gemv`.
_TILES = {
    8: {1: (4, 160), 2: (3, 222), 4: (4, 496)}, 4: {1: (5, 497), 2: (3, 593), 4: (4, 422)},
    7: {1: (4, 215), 2: (3, 273), 4: (4, 575)},
}  # fmt: skip
_WIDE = {  # by rows of a program
    8: {64: (3, 372), 128: (2, 232)}, 4: {32: (3, 479), 64: (2, 478), 128: (1, 271)}, 7: {64: (3, 415), 128: (2, 255)},
}  # fmt: skip
_GEMV = {
    16: {1: (9, 138), 2: (5, 195)}, 8: {1: (3, 487), 2: (3, 464)}, 4: {1: (4, 533), 2: (3, 820)},
    7: {1: (4, 652), 2: (4, 513)},
}  # fmt: skip
_GEMV_ENDS = 400  # instructions of a warp of `gemv` before and after its loop: sums over threads, addresses
_SINGLE_ROW_ENDS = 600  # of kernels of single rows: sums of squares, residual, gate or rotation
_BITS = {16: 16, 8: 8, 7: 8, 4: 4}  # of an element, by form of `gemv`
_PLACES = 4  # bytes of the numbers in tables and tiles


@dataclass
class KernelCost:
    """Cost of one launch.

    Args:
        read: bytes that are read from memory, by argument; each byte once.
        written: bytes that are written, by argument.
        cached: bytes that are read again.
        flops: operations of matrix units, those of padding included.
        instructions: instructions of warps, if they were counted.
        programs: programs that have something to do.
        waiting: most bytes that one program has in flight: loads that are issued and have not arrived.
        resident: programs that a multiprocessor holds at once.
        recent: arguments that the launches before wrote: activations, which the L2 cache still has if they are small.
    """

    read: dict[str, float] = field(default_factory=dict[str, float])
    written: dict[str, float] = field(default_factory=dict[str, float])
    cached: float = 0.0
    flops: float = 0.0
    instructions: float = 0.0
    programs: int = 1
    waiting: float = 0.0
    resident: int = 1
    recent: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> float:
        """Bytes of memory traffic, without what the L2 cache has."""
        everything = sum(self.read.values()) + sum(self.written.values())
        return everything - self._in_cache

    @property
    def cached_bytes(self) -> float:
        """Bytes that come from the L2 cache: those that are read again, and small activations."""
        return self.cached + self._in_cache

    @property
    def _in_cache(self) -> float:
        """Bytes of activations that are read or written, if they are few."""
        nbytes = sum(self.read.get(name, 0.0) + self.written.get(name, 0.0) for name in self.recent)
        return nbytes if nbytes <= KEPT else 0.0


class _LaunchCall:
    """Arguments of a launch by name."""

    def __init__(self, variant: KernelForm, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        names = [name for name, kind in variant.signature.items() if kind != "constexpr"]
        if len(names) != len(arguments):
            raise ArgumentError(f"kernel {variant.name} takes {len(names)} arguments, not {len(arguments)}")
        self.variant, self.grid, self.constants = variant, grid, variant.constants
        self.values = dict(zip(names, arguments, strict=True))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def size(self, name: str) -> int:
        """Return the bytes of an element of a tensor."""
        return self.values[name].element_size()


def _tiles(call: _LaunchCall) -> list[tuple[int, int, int]]:
    """Return new rows, first key and end of the keys of each tile."""
    tiles, window, chunk = [], call["window"], call["chunk"]
    for sequence, _, count, position in call["tiles"].tolist():
        if sequence < 0:
            continue
        low = max(position - window + 1, 0) if window else 0
        low = max(low, position // chunk * chunk) if chunk else low
        tiles.append((count, low, position + count))
    return tiles


def _ranges(call: _LaunchCall) -> list[tuple[int, int]]:
    """Return the keys that each sequence's tiles read: the first and the end. Tiles of a sequence share them."""
    ranges: dict[int, tuple[int, int]] = {}
    sequences = [sequence for sequence, *_ in call["tiles"].tolist() if sequence >= 0]
    for sequence, (_, low, high) in zip(sequences, _tiles(call), strict=True):
        first, end = ranges.get(sequence, (low, high))
        ranges[sequence] = min(first, low), max(end, high)
    return list(ranges.values())


def _attention(call: _LaunchCall) -> KernelCost:
    sizes, item = call.constants, call.size("keys")
    blocks = -(-call["group"] // call["tile_heads"])
    cached_heads = call.grid[1] // blocks
    heads = cached_heads * call["group"]
    width = sizes["HEAD"] + sizes["VALUE"]
    tiles = _tiles(call)
    keys, ranges = sum(high - low for _, low, high in tiles), _ranges(call)
    once = sum(end - first for first, end in ranges)
    splits = [-(-high // SPLIT) - low // SPLIT for _, low, high in tiles]
    rows = sum(count for count, _, _ in tiles)
    split = call.variant.kernel == "attend_split"
    asked = sum(count * parts for (count, _, _), parts in zip(tiles, splits, strict=True)) if split else rows
    query = heads * sizes["HEAD"] * call.size("queries")
    read = {
        "queries": rows * query,
        "keys": once * cached_heads * sizes["HEAD"] * item,
        "values": once * cached_heads * sizes["VALUE"] * item,
        "table": sum(-(-end // sizes["PAGE"]) - first // sizes["PAGE"] for first, end in ranges) * _PLACES,
        "tiles": len(tiles) * 4 * _PLACES,
    }
    if split:
        written = {"partial": asked * heads * sizes["VALUE"] * 4, "stats": asked * heads * 2 * 4}
    else:
        written = {"out": rows * heads * sizes["VALUE"] * call.size("out")}
    again = (blocks * keys - once) * cached_heads * width * item + (asked - rows) * query
    programs = (sum(splits) if split else len(tiles)) * call.grid[1]
    flops = 2.0 * keys * call.grid[1] * sizes["BLOCK_ROWS"] * width
    return KernelCost(read, written, again, flops, 0.0, programs, sizes["BLOCK_KEYS"] * width * item)


def _join(call: _LaunchCall) -> KernelCost:
    value, tiles = call.constants["VALUE"], _tiles(call)
    parts = [(count, -(-high // SPLIT) - low // SPLIT) for count, low, high in tiles]
    heads, rows = call["all_heads"], sum(count for count, _ in parts)
    read = {
        "partial": sum(count * splits for count, splits in parts) * heads * value * 4,
        "stats": sum(count * splits for count, splits in parts) * heads * 2 * 4,
        "tiles": len(tiles) * 4 * _PLACES,
    }
    written = {"out": rows * heads * value * call.size("out")}
    most = max((count for count, _ in parts), default=1) * call["tile_heads"]
    return KernelCost(read, written, programs=len(tiles) * call.grid[1], waiting=1.0 * most * (value + 2) * 4)


def _norm(call: _LaunchCall) -> KernelCost:
    rows, width = call.grid[0], call["width"]
    row = width * call.size("rows")
    read = {"rows": rows * row, "weight": row}
    written = {"out": rows * row}
    if call["has_residual"]:
        read["residual"], written["stream"] = rows * row, rows * row
    if call["has_bias"]:
        read["bias"] = row
    again = (rows - 1) * row * (1 + bool(call["has_bias"]))
    return KernelCost(read, written, again, programs=rows, waiting=row * (2 + bool(call["has_residual"])))


def _rotation(call: _LaunchCall) -> KernelCost:
    rows, sizes, item = call["count"], call.constants, call.size("queries")
    heads, cached = call["heads"], call["cached"]
    head, value, rotary = sizes["HEAD"] * item, sizes["VALUE"] * item, call["rotary"] * item
    read = {
        "queries": rows * heads * head, "keys": rows * cached * head, "values": rows * cached * value,
        "cosines": rows * rotary, "sines": rows * rotary, "slots": rows * 8.0,
    }  # fmt: skip
    written = {
        "out": rows * heads * head,
        "key_pool": rows * cached * sizes["HEAD"] * call.size("key_pool"),
        "value_pool": rows * cached * sizes["VALUE"] * call.size("value_pool"),
    }
    again = rows * (call.grid[1] - 1) * (2 * rotary + 8.0)  # a program's heads share tables and slot
    again += 0.0 if sizes["WHOLE"] else rows * (heads + cached) * rotary  # partners
    waiting = sizes["ROWS"] * (sizes["HEADS"] * head + 2 * rotary)
    return KernelCost(read, written, again, programs=call.grid[0] * call.grid[1], waiting=waiting)


def _gate(call: _LaunchCall) -> KernelCost:
    row = call["width"] * call.size("gate")
    rows, block = call.grid[0], call.constants["BLOCK"] * call.size("gate")
    read, written = {"gate": rows * row, "up": rows * row}, {"out": rows * row}
    return KernelCost(read, written, programs=rows * call.grid[1], waiting=2.0 * block)


def _numbers(call: _LaunchCall) -> KernelCost:
    rows = call["rows"]
    return KernelCost({"seeds": rows * 8, "counters": rows * 4}, {"numbers": rows * 8}, programs=call.grid[0],
                      waiting=call.constants["BLOCK"] * 12.0)  # fmt: skip


def _scores(call: _LaunchCall, candidates: int | None = None) -> KernelCost:
    (rows, parts, _), vocabulary = call.grid, call["vocabulary"]
    item, part = call.size("logits"), call.constants["PART"]
    read = {"logits": rows * vocabulary * item, "options": rows * (16 if call["has_table"] else 4)}
    if call["has_table"]:
        read["table"] = rows * vocabulary * 4
    cost = KernelCost(read, programs=rows * parts, waiting=part * item * 1.0)
    cost.written |= {"maxima": rows * parts * 4, "firsts": rows * parts * 4}
    if candidates is not None:
        cost.written["scores"] = rows * parts * part * 4
    return cost


def _weights(call: _LaunchCall, candidates: int | None = None) -> KernelCost:
    (rows, parts, _), part = call.grid, call.constants["PART"]
    cost = KernelCost({"options": rows * 16}, {}, programs=rows * parts, waiting=part * 4.0)
    if candidates is not None:
        cost.read |= {"scores": rows * parts * part * 4, "maxima": rows * parts * 4, "firsts": rows * parts * 4}
        cost.written |= {"scores": rows * parts * part * 4, "weights": rows * parts * 8 * (LIMITS if candidates else 1)}
        cost.cached = (parts - 1) * rows * parts * 8.0
    if candidates:
        cost.written["counts"] = rows * parts * 4 * LIMITS
    return cost


def _choice(call: _LaunchCall, candidates: int | None = None) -> KernelCost:
    """With candidates, two places are looked for: a cut and the token. Each halving of their range reads them all, and
    is taken to halve their number."""
    rows, sizes = call.grid[0], call.constants
    parts = -(-call["vocabulary"] // sizes["PART"])
    read = {"options": rows * 16, "maxima": rows * parts * 4, "firsts": rows * parts * 4}
    cost = KernelCost(read, {"tokens": rows * 4}, programs=rows, waiting=parts * 8.0)
    if candidates is None:
        return cost
    read["numbers"], cost.waiting = rows * 8, sizes["CHUNK"] * 4.0
    if not candidates:
        read["weights"], read["scores"] = rows * parts * 8, rows * sizes["PART"] * 4
        return cost
    gathered = -(-candidates // sizes["BLOCK"]) * sizes["BLOCK"] * 4
    read |= {"weights": rows * parts * 8 * LIMITS, "counts": rows * parts * 4 * LIMITS, "members": rows * 4}
    read["scores"] = rows * max(parts * sizes["PART"] * 4, gathered)
    cost.written |= {"scores": rows * (candidates + sizes["BLOCK"]) * 4, "members": rows * candidates * 4}
    cost.cached = 2.0 * rows * gathered * (candidates.bit_length() + 3)
    return cost


def _matrix(call: _LaunchCall, rows: int, outputs: int, bits: int) -> tuple[dict[str, float], float]:
    """Bytes that a product reads of each argument, and those of the parts of its matrix."""
    width, item = call["inputs_"], call.size("inputs")
    parts: dict[str, float] = {"weights": outputs * width * bits // 8}
    if bits == 4:
        parts |= {"scales": outputs * width // 32 * 4, "offsets": outputs * width // 32 * 4}
    elif bits == 8:
        parts["scales"] = outputs * 4 if call["scale_step"] else 4
    read = {"inputs": rows * width * item, **parts}
    if call["has_bias"]:
        read["bias"] = outputs * item
    return read, sum(parts.values())


def _counted(call: _LaunchCall) -> tuple[int, int]:
    """Programs of a product that a multiprocessor holds, and instructions of its loop."""
    sizes = call.constants
    if call.variant.kernel.startswith("gemv"):
        return _GEMV[sizes["FORM"]][sizes.get("ROWS", 1)]
    if call.variant.kernel == "wide_product":
        return _WIDE[sizes["FORM"]][sizes["BLOCK_ROWS"]]
    return _TILES[sizes["FORM"]][sizes["TILES"]]


def _product(call: _LaunchCall) -> KernelCost:
    rows, outputs, width = call["rows"], call["outputs"], call["inputs_"]
    sizes, item = call.constants, call.size("inputs")
    read, parts = _matrix(call, rows, outputs, _BITS[sizes["FORM"]])
    again = (call.grid[0] - 1) * parts + (call.grid[1] - 1) * read["inputs"]
    loops, tiles = -(-width // sizes["BLOCK_IN"]), sizes.get("TILES", 1)
    programs = call.grid[0] * call.grid[1]
    block = sizes["BLOCK_OUT"] * sizes["BLOCK_IN"] * parts / (outputs * width)
    resident, instructions = _counted(call)
    return KernelCost(
        read, {"out": rows * outputs * item}, again,
        2.0 * call.grid[0] * sizes["BLOCK_ROWS"] * tiles * call.grid[1] * sizes["BLOCK_OUT"] * width,
        programs * loops * float(instructions) * call.variant.warps if item < 4 else 0.0,
        programs, (call.variant.stages - 1) * block, resident,
    )  # fmt: skip


def _gemv(call: _LaunchCall) -> KernelCost:
    rows, outputs, width = call["rows"], call["outputs"], call["inputs_"]
    sizes, bits = call.constants, _BITS[call.constants["FORM"]]
    read, parts = _matrix(call, rows, outputs, bits)
    again = (call.grid[0] - 1) * parts + (call.grid[1] * sizes["ROWS"] - 1) * width * call.size("inputs")
    loops = -(-width * bits // 32 // sizes["BLOCK_WORDS"])
    programs = call.grid[0] * call.grid[1]
    block = min(sizes["BLOCK_OUT"], outputs) * min(sizes["BLOCK_WORDS"] * 32 / bits, width) * parts / (outputs * width)
    resident, instructions = _counted(call)
    issued = programs * call.variant.warps * float(loops * instructions + _GEMV_ENDS)
    out: dict[str, float] = {"out": rows * outputs * call.size("out")}
    return KernelCost(read, out, max(again, 0.0), 0.0, issued, programs, block, resident)


def _single_row(call: _LaunchCall) -> KernelCost:
    """A product of one row, with what comes before and after it."""
    sizes, width, kernel = call.constants, call["inputs_"], call.variant.kernel
    bits, item = _BITS[sizes["FORM"]], call.size("inputs")
    programs = call.grid[0] * call.grid[1]
    outputs = call["outputs"] if kernel == "gemv_add" else programs * sizes["BLOCK_OUT"]
    outputs = 2 * call["outputs"] if kernel == "gemv_gate" else outputs
    read, parts = _matrix(call, 1, outputs, bits)
    again, written = (programs - 1) * width * item, dict[str, float]()
    if kernel == "gemv_add":
        read |= {"residual": outputs * item, "norm": outputs * item}
        written = {"out": outputs * item, "stream": outputs * item, "squares": programs * 4}
    else:
        read["squares"] = call["parts"] * 4
        again += (programs - 1) * call["parts"] * 4
    if kernel == "gemv_gate":
        written["out"] = call["outputs"] * item
    elif kernel == "gemv_rotate":
        head = call["head_size"] * item
        read |= {"cosines": head, "sines": head, "slots": 8}
        again += (programs - 1) * 8 + 2 * head * (call["heads"] + call["cached"] - 1)
        pages = {"key_pool": call["cached"] * head, "value_pool": call["cached"] * head}
        written = {"out": call["heads"] * head, **pages}
    loops = -(-width * bits // 32 // sizes["BLOCK_WORDS"])
    block = sizes["BLOCK_OUT"] * min(sizes["BLOCK_WORDS"] * 32 / bits, width) * parts / (outputs * width)
    resident, instructions = _counted(call)
    issued = programs * call.variant.warps * float(loops * instructions + _SINGLE_ROW_ENDS)
    return KernelCost(read, written, again, 0.0, issued, programs, block, resident)


def _rounding(call: _LaunchCall) -> KernelCost:
    rows, width = call.grid[0], call["width"]
    row = width * call.size("rows")
    written = {"values": rows * width, "scales": rows * 4}
    return KernelCost({"rows": rows * row}, written, rows * row, programs=rows, waiting=min(row, 8192.0))


_COSTS: Mapping[str, Callable[..., KernelCost]] = {
    "attend_split": _attention, "attend_whole": _attention, "join_splits": _join, "norm_rows": _norm,
    "rotate_into_pages": _rotation, "gate_rows": _gate, "draw_numbers": _numbers, "adjust_scores": _scores,
    "weigh_parts": _weights, "choose_tokens": _choice, "tile_product": _product, "wide_product": _product,
    "gemv": _gemv, "round_rows": _rounding,
    "gemv_add": _single_row, "gemv_gate": _single_row, "gemv_rotate": _single_row,
}  # fmt: skip
_SAMPLING = (_scores, _weights, _choice)


def launch_cost(
    variant: KernelForm, grid: tuple[int, int, int], arguments: Sequence[Any], candidates: int | None = None
) -> KernelCost:
    """Return the cost of a launch; arguments as in `attention.Kernels.launch`.

    Args:
        variant: the variant.
        grid: number of programs by axis.
        arguments: tensors of any device and numbers, without compile-time arguments; `tiles` with values.
        candidates: tokens of a row among which sampling looks for its places; 0: nothing is cut; None: the most likely
            token is taken. The options of the rows say so only on the device.

    Raises:
        ArgumentError: the number of arguments is another one, or the kernel has no formula.
    """
    formula = _COSTS.get(variant.kernel)
    if formula is None:
        raise ArgumentError(f"kernel {variant.kernel} has no formula; add one to deepspeed/ops/triton/costs.py")
    call = _LaunchCall(variant, grid, arguments)
    cost = formula(call, candidates) if formula in _SAMPLING else formula(call)
    cost.recent = frozenset(_RECENT.get(variant.kernel, ()))
    threads = THREADS // (variant.warps * WARP)
    products = cost.resident if formula in (_product, _gemv, _single_row) else 32
    cost.resident = min(threads, 32, products, _RESIDENT.get(variant.kernel, 32))
    return cost


def dtype_of(variant: KernelForm) -> str:
    """Return the short name of the dtype of a variant's arithmetic, as recordings have it."""
    dtype: torch.dtype = variant.dtype if isinstance(variant, Variant) else getattr(variant, "dtype", torch.float32)
    return DTYPES[dtype]
