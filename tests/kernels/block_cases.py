"""Cases of the kernels of messages: the bits of the torch form, in tables of several slices with gaps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from deepspeed.comm.collectives.block_table import BlockTable, Parts, total_of
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.blocks import BlockKernelLauncher
from tests.kernels.pairs import pairwise

Check = Callable[[Kernels], None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEGMENTS = {
    "one element": [[1]],
    "a block": [[256]],
    "short": [[255, 1], [2]],
    "odd": [[300, 7, 513], [1, 1, 770], [256]],
    "even": [[512, 256], [768], [256, 512]],
}
SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
KINDS = ("normal", "zeros", "nan", "inf", "-inf", "both", "subnormal", "all sizes", "ties", "ties of scales")
GARBAGE = 0xA5


def values_of(kind: str, numel: int, dtype: torch.dtype, seed: int, bits: int = 8) -> torch.Tensor:
    """Numbers of a kind; ties are those of a codec."""
    limit = 2 ** (bits - 1) - 1
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=source, dtype=torch.float64)
    if kind == "zeros":
        values = values.sign() * 0.0
    if kind == "subnormal":
        values *= 1e-38
    if kind == "all sizes":
        values *= 10.0 ** (torch.rand(numel, generator=source, dtype=torch.float64) * 60 - 40)
    if kind == "ties":
        values = (values * limit / 3).round().clamp(1 - limit, limit - 1) / 2
        values[::100] = limit / 2
    if kind == "ties of scales":  # the largest over the limit is in the middle of two bf16 numbers
        values = values.clamp(-1, 1)
        values[::100] = limit * 257 / 256
    for name, value in SPECIAL.items():
        if name == kind or (kind == "both" and name != "-inf"):
            values[int(torch.randint(numel, (), generator=source))] = value
    return values.to(torch.float32).to(dtype)


def places(segments: list[list[int]], bits: int, gap: int) -> list[tuple[list[int], int, int]]:
    """Slices one behind the other, with `gap` values before each, and payloads at multiples of 64 bytes."""
    made, value, byte = [], gap, 64
    for lengths in segments:
        made.append((lengths, value, byte))
        nbytes = sum(2 * -(-length // 256) + -(-length * bits // 8) for length in lengths)
        value, byte = value + sum(lengths) + gap, byte + -(-nbytes // 64) * 64
    return made


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, but for those of NaN."""
    wide, other = a.float(), b.float()
    signs = torch.equal(wide.signbit() & ~wide.isnan(), other.signbit() & ~other.isnan())
    return signs and torch.allclose(wide, other, 0.0, 0.0, equal_nan=True)


def _table(case: dict[str, Any]) -> Check:
    table = BlockTable(case["bits"], 256, places(SEGMENTS[case["segments"]], case["bits"], case["gap"]))
    numel, nbytes = table.numel, table.nbytes  # nothing lies beyond the last block

    def check(kernels: Kernels) -> None:
        values = values_of(case["kind"], numel, case["dtype"], numel, case["bits"])
        memory = (values_of("normal", numel, torch.float32, 7) * 0.1).to(torch.bfloat16) if case["memory"] else None
        payloads, memories, outs = [], [], []
        for form in (None, BlockKernelLauncher(kernels)):
            payload = torch.full((nbytes,), GARBAGE, dtype=torch.uint8)
            errors = None if memory is None else memory.clone()
            out = torch.full((numel,), 7.0, dtype=case["out"])
            if form is None:
                table.encode(values, payload, errors, 0.75)
                table.decode(payload, out)
            else:
                assert form.encode(table, values, payload, errors, 0.75)
                assert form.decode(table, payload, out)
            payloads.append(payload)
            memories.append(errors)
            outs.append(out)
        assert torch.equal(*payloads), "payloads differ"
        assert memories[0] is None or memories[1] is None or equal(memories[0], memories[1]), "error memories differ"
        assert equal(*outs), "decoded values differ"

    return check


def _sum(case: dict[str, Any]) -> Check:
    lengths, bits, count = SEGMENTS[case["segments"]][0], case["bits"], case["count"]
    numel, own = sum(lengths), {"first": 0, "last": count - 1, "none": -1}[case["own"]]
    one = BlockTable(bits, 256, [(lengths, 0, 0)])
    stride = -(-one.nbytes // 64) * 64

    def check(kernels: Kernels) -> None:
        whole = torch.full((count * stride,), GARBAGE, dtype=torch.uint8)
        kinds = [case["kind"] if rank == 1 else "normal" for rank in range(count)]
        contributions = [values_of(kind, numel, case["dtype"], rank) for rank, kind in enumerate(kinds)]
        slots = [whole[rank * stride : rank * stride + one.nbytes] for rank in range(count)]
        for rank in range(count):
            if rank != own:
                one.encode(contributions[rank], slots[rank])
        parts = [contributions[rank] if rank == own else slots[rank] for rank in range(count)]
        stacked = Parts.of(parts, one.nbytes)
        assert stacked is not None and stacked.own == own
        terms = [part.float() for part in parts]
        for rank in range(count):
            if rank != own:
                terms[rank] = torch.empty(numel)
                one.decode(parts[rank], terms[rank])
        wanted = torch.randn(numel, generator=torch.Generator().manual_seed(3))
        out = wanted.clone()
        total_of(terms, wanted, case["scale"], case["add"])
        assert BlockKernelLauncher(kernels).sum(one, stacked, out, case["scale"], case["add"])
        assert equal(out, wanted), "sums differ"

    return check


TABLES = {
    "kind": KINDS, "segments": tuple(SEGMENTS), "dtype": DTYPES, "bits": (8, 4), "memory": (False, True),
    "out": DTYPES, "gap": (0, 5),
}  # fmt: skip
SUMS = {
    "kind": ("normal", "nan", "inf", "zeros"), "segments": ("one element", "odd", "even"), "dtype": DTYPES,
    "bits": (8, 4), "count": (3, 5), "own": ("first", "last", "none"), "scale": (1.0, 0.375), "add": (False, True),
}  # fmt: skip


def checks() -> dict[str, Check]:
    """All checks by name."""
    made: dict[str, Check] = {}
    for name, options, make in (("table", TABLES, _table), ("sum", SUMS, _sum)):
        for seed in range(2):
            for case in pairwise(options, seed):
                made[f"{name}-" + "-".join(f"{key}={value}" for key, value in case.items())] = make(case)
    return made
