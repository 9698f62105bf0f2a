"""The table of parts: what is measured, in which order, and what fits into a number of seconds. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

START = 12.0  # seconds from the start of a part's process to its first row
LIMIT = 480.0  # seconds of a part's process at most

T = TypeVar("T")


class MissingError(Exception):
    """What a row needs is not on this machine."""


@dataclass(frozen=True)
class Row:
    """One line of the results, measured whole or not at all.

    Args:
        key: its name, unique in the part.
        seconds: expected on an H100; a row is begun only if so many are left.
        worth: 1: in every selection that has time for it; 2 and 3: if all of lower numbers fit.
        arguments: of the part's function.
    """

    key: str
    seconds: float
    worth: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Rows of one process.

    Args:
        name: for `--parts`.
        shows: what the rows show, a heading of the report.
        function: "module:name", called with a `Setting` and the row's arguments; returns the facts of the row.
        rows: the rows, the most valuable first.
        limit: seconds after which the process is ended.
    """

    name: str
    shows: str
    function: str
    rows: tuple[Row, ...]
    limit: float = LIMIT


@dataclass(frozen=True)
class Setting:
    """Circumstances of a row.

    Args:
        rehearse: small sizes, on the emulated device.
        folder: folder of the results.
        seconds: time that rounds of the row may take.
    """

    rehearse: bool
    folder: Path
    seconds: float

    @property
    def fewest(self) -> int:
        """Rounds of a comparison at least; with fewer than six pairs a median has no 95 % interval."""
        return self.pick(6, 2)

    def pick(self, card: T, rehearsed: T) -> T:
        """Return the size for a card, or the one for the rehearsal."""
        return rehearsed if self.rehearse else card


SUITES = {
    "paged_attention": 25,
    "row_kernels": 4,
    "sampling_kernels": 6,
    "packed_products": 6,
    "gemv_kernels": 4,
    "single_row_kernels": 3,
    "block_kernels": 4,
}  # seconds
STAGES = ("stage0", "stage1", "stage2", "stage3")
TINY = ("llama-tiny", 1, 32)  # model, sequences and tokens of each in a rehearsal of `training`
_SMALL = {"model": "gpt2", "micro": 8, "length": 1024}
_BILLION = {"model": "llama-1.3b", "micro": 2, "length": 2048, "recompute": True}


def _steps(key: str, seconds: float, worth: int, shape: dict[str, Any], *sides: str) -> Row:
    return Row(key, seconds, worth, shape | {"sides": list(sides)})


TRAINING = (
    _steps("124M, stages 0-3, FSDP2, DDP", 45, 1, _SMALL, "ddp", "fsdp2", *STAGES),
    _steps("1.3B, stage 3, FSDP2", 35, 1, _BILLION, "fsdp2", "stage3"),
    _steps("1.3B, stage 0, DDP", 35, 1, _BILLION, "ddp", "stage0"),
    _steps("1.3B, optimizer on the host, FSDP2", 100, 2, _BILLION, "fsdp2-offload", "stage2-optimizer-cpu"),
    _steps("1.3B, stage 2, DDP", 35, 2, _BILLION, "ddp", "stage2"),
    _steps("1.3B, stage 1, DDP", 35, 3, _BILLION, "ddp", "stage1"),
    _steps("220M, stages 0-3, FSDP2, DDP", 50, 3, _SMALL | {"model": "llama-220m"}, "ddp", "fsdp2", *STAGES),
    _steps("760M, stage 3, FSDP2", 35, 3, _SMALL | {"model": "mpt-760m", "micro": 4}, "fsdp2", "stage3"),
    _steps("760M, stages 0-2, DDP", 50, 3, _SMALL | {"model": "mpt-760m", "micro": 4}, "ddp", *STAGES[:3]),
    _steps("1.3B, all on the host, FSDP2", 150, 3, _BILLION, "fsdp2-offload", "stage3-all-cpu"),
)
PARTS = (
    Part(
        "environment",
        "What is there, what it reaches, and what is built",
        "benchmarks.gpu.environment:measure",
        (
            Row("machine", 7, 1, {"what": "machine"}),
            Row("native library", 90, 1, {"what": "native"}),
            Row("kernels, built", 40, 1, {"what": "kernels"}),
            Row("ceilings", 6, 1, {"what": "ceilings"}),
        ),
    ),
    Part(
        "contract",
        "The accelerator's contract, and tests marked `gpu`",
        "benchmarks.gpu.checks:contract",
        (Row("contract", 6, 1, {"what": "contract"}), Row("tests", 40, 2, {"what": "tests"})),
    ),
    Part(
        "kernels",
        "Compiled kernels beside references in fp64",
        "benchmarks.gpu.checks:kernels",
        (
            *(Row(suite, seconds, 1, {"suite": suite}) for suite, seconds in SUITES.items()),
            Row("messages, speed", 5, 1, {"suite": "speed"}),
        ),
    ),
    Part(
        "parity",
        "Losses beside the CPU's",
        "benchmarks.gpu.checks:parity",
        (
            Row("on the CPU", 40, 1, {"stage": -1}),
            *(
                Row(f"stage {stage}", seconds, 1, {"stage": stage})
                for stage, seconds in ((3, 12), (0, 3), (1, 3), (2, 3))
            ),
        ),
    ),
    Part(
        "generation",
        "Tokens, latency and throughput beside Transformers and vLLM",
        "benchmarks.gpu.generation:measure",
        (
            Row("tokens", 35, 1, {"what": "tokens"}),
            Row("latency, 1 x 128", 25, 1, {"what": "latency", "batch": 1, "context": 128}),
            Row("throughput", 45, 1, {"what": "throughput"}),
            Row("invariance", 25, 1, {"what": "invariance"}),
            Row("sampling, 32 x 24", 15, 1, {"what": "sampling"}),
            Row("weights, 1 x 128", 45, 1, {"what": "weights", "batch": 1, "context": 128}),
            Row("latency, 32 x 1024", 40, 2, {"what": "latency", "batch": 32, "context": 1024}),
            Row("latency, 1 x 8064", 40, 3, {"what": "latency", "batch": 1, "context": 8064}),
            Row("vLLM", 180, 3, {"what": "vllm"}),
        ),
    ),
    Part(
        "large model",
        "Decode steps of 8 B beside their floor and the prediction",
        "benchmarks.gpu.large_model:measure",
        (
            Row("1 x 1024", 30, 1, {"batch": 1, "context": 1024}),
            Row("32 x 1024", 15, 1, {"batch": 32, "context": 1024}),
            Row("1 x 8064", 15, 2, {"batch": 1, "context": 8064}),
            Row("128 x 1024", 25, 2, {"batch": 128, "context": 1024}),
        ),
    ),
    Part("training", "Steps beside FSDP2 and DDP, one card", "benchmarks.gpu.training:measure", TRAINING),
    Part(
        "simulator",
        "Simulated steps beside those of the part `training`",
        "benchmarks.gpu.simulated:measure",
        tuple(
            Row(row.key, 4, row.worth, row.arguments | {"row": row.key}) for row in TRAINING if "host" not in row.key
        ),
    ),
)


def choose(parts: Iterable[Part], done: Collection[tuple[str, str]], seconds: float) -> dict[str, list[str]]:
    """Return the keys of the rows that fit into a time, by part, in the table's order.

    Rows of worth 1 come first, in the order of the parts, then those of worth 2, then 3. One that does not fit is left
    out, and cheaper ones behind it are still taken.

    Args:
        parts: parts of the table.
        done: (part, key) of the rows that are there.
        seconds: time for all of them, with the start of each part's process.
    """
    left = [(part, row) for part in parts for row in part.rows if (part.name, row.key) not in done]
    taken: dict[str, list[Row]] = {}
    for part, row in sorted(left, key=lambda pair: pair[1].worth):  # stable: the order of the table within a worth
        own = taken.get(part.name, [])
        spent = sum(each.seconds for each in own) + START if own else 0.0
        cost = row.seconds + (0.0 if own else START)
        if cost <= seconds and spent + cost <= part.limit:
            taken.setdefault(part.name, []).append(row)
            seconds -= cost
    return {
        part.name: [row.key for row in part.rows if row in taken[part.name]] for part in parts if part.name in taken
    }
