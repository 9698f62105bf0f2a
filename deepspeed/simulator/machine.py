"""The rates of a machine: a GPU's published figures and a calibrated machine are files of the same format."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from deepspeed.errors import ArgumentError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Operators that draw numbers: bytes that they touch for each, in fp32.
_RANDOM = {"bernoulli_": 4, "uniform_": 4, "normal_": 4, "random_": 4, "exponential_": 4, "native_dropout": 9}
_CARDS = Path(__file__).parent / "cards"


@dataclass(frozen=True)
class Machine:
    """A host and one of its ranks, while all ranks are at work.

    Args:
        ranks: of a host.
        memory: bytes that the tensors of one rank may take.
        matrix: floating-point operations per second of a matrix product, by dtype: pairs of side and rate.
        bandwidth: bytes per second that operators read and write.
        overhead: seconds that an operator takes at least.
        collective: bytes per second that a rank of a host receives in a gather or a reduction among them.
        disk: bytes per second and rank, reads and writes mixed; 0: there is none.
        folder: on that disk.
        notes: where figures are from, what could not be measured, and what stands in its place.
        shared: messages take the operators' own cores and memory, so nothing hides behind anything (CPUs).
        between: bytes per second that one rank's share of its host's network receives; 0: there is one host.
        latency: seconds that a message takes at least, among the ranks of a host.
        latency_between: the same among hosts.
        link: bytes per second of one rank between host and device, each way; 0: there is no device.
        host: bytes per second of host memory, one rank's share; 0: as `bandwidth`.
        launch: seconds of the host per launch, where a recording does not say.
        attention: published: how much of `matrix` fused attention reaches; 0: as much as products.
        matrix_efficiency: fitted: how much of `matrix` large products reach.
        memory_efficiency: fitted: how much of `bandwidth` operators reach.
        host_memory: bytes of host memory that one rank may take, beside a device; 0: as much as it asks for.
        fresh: of memory that the system provides anew: pairs of a block's size and the bytes per second that being
            written for the first time costs besides; 0: blocks of that size are used again and again.
        random: random numbers per second, where they are slower than memory; 0: they are not.
    """

    ranks: int
    memory: int
    matrix: dict[str, list[list[float]]]
    bandwidth: float
    overhead: float
    collective: float
    disk: float = 0.0
    folder: str = ""
    notes: list[str] = field(default_factory=list)
    shared: bool = False
    between: float = 0.0
    latency: float = 0.0
    latency_between: float = 0.0
    link: float = 0.0
    host: float = 0.0
    launch: float = 0.0
    attention: float = 0.0
    matrix_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    host_memory: int = 0
    fresh: list[list[float]] = field(default_factory=list[list[float]])
    random: float = 0.0

    def rate(self, dtype: torch.dtype | str, flops: float) -> float:
        """Operations per second of a product of so many operations."""
        name = dtype if isinstance(dtype, str) else next((n for n, known in DTYPES.items() if known == dtype), "fp32")
        table = self.matrix.get(name) or self.matrix["fp32"]
        side = (flops / 2) ** (1 / 3)
        return self.matrix_efficiency * next((rate for size, rate in reversed(table) if side >= size), table[0][1])

    def first_touch(self, nbytes: float) -> float:
        """Seconds that a new block costs besides what is written into it."""
        rate = next((rate for size, rate in reversed(self.fresh) if nbytes >= size), 0.0)
        return nbytes / rate if rate else 0.0

    def kernel(self, name: str, flops: float, nbytes: float, dtype: str) -> float:
        """Seconds of an operator: the longer of arithmetic and traffic."""
        arithmetic = flops / self.rate(dtype, flops) if flops else 0.0
        if self.attention and "attention" in name:
            arithmetic *= self.matrix_efficiency / min(self.attention, self.matrix_efficiency)
        if self.random and name in _RANDOM:
            arithmetic = nbytes / _RANDOM[name] / self.random
        longer = max(arithmetic, nbytes / (self.bandwidth * self.memory_efficiency))
        return self.overhead + longer if self.shared else max(self.overhead, longer)  # shared: the host's own cores

    def message(self, name: str, nbytes: float, group: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of a collective: on the link, and besides.

        A ring's bytes pass each rank once, so the ranks of a host share what comes from other hosts; in an all-to-all
        each rank fetches its own from everywhere.

        Args:
            name: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast`, `send`.
            nbytes: of the whole tensor.
            group: its ranks.
        """
        size, hosts = len(group), len({rank // self.ranks for rank in group})
        if size < 2:
            return 0.0, 0.0
        turns, local = (2 if name == "all_reduce" else 1), max(1, size // hosts)
        if name in ("broadcast", "send"):
            within, across = nbytes, nbytes / local if name == "broadcast" else nbytes
        elif name == "all_to_all":
            within, across = nbytes * (local - 1) / size, nbytes * (size - local) / size
        else:
            within, across = nbytes * (size - 1) / size, nbytes * (hosts - 1) / hosts / local
        if hosts == 1:
            return turns * within / self.collective, self.latency
        if not self.between:
            raise ArgumentError(f"ranks {group[0]}–{group[-1]} are on {hosts} hosts, and the machine file says nothing "
                                "of a network: give `between`, in bytes per second and rank")  # fmt: skip
        within = within if local > 1 else 0.0
        return turns * max(within / self.collective, across / self.between), self.latency_between

    def moved(self, **factors: float) -> Machine:
        """The same with figures multiplied: `moved(matrix_efficiency=1.25)`."""
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})

    def save(self, path: str | Path) -> None:
        """Write the file that `load` reads."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """A machine from its file.

        Args:
            path: of the file, or the name of a card of `cards()`.

        Raises:
            ArgumentError: the file cannot be read, or lacks something.
        """
        try:
            where = _CARDS / f"{path}.json"
            fields = json.loads((where if where.exists() else Path(path)).read_text())
            machine = cls(**fields)
        except (OSError, ValueError, TypeError) as error:
            raise ArgumentError(
                f"machine file {path}: {error}; `ds_plan --machine here --save_machine FILE` writes one, and these are "
                f"known by name: {', '.join(cards())}"
            ) from error
        positive = (machine.ranks, machine.memory, machine.bandwidth, machine.collective)
        if not all(isinstance(value, (int, float)) and value > 0 for value in positive) or not machine.matrix.get(
            "fp32"
        ):
            raise ArgumentError(f"machine file {path}: ranks, memory, bandwidth, collective and matrix.fp32 are needed")
        return machine


def cards() -> list[str]:
    """Names of the cards whose published figures come with the package."""
    return sorted(path.stem for path in _CARDS.glob("*.json"))
