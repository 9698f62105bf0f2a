"""Rates of a machine; published figures of a GPU and a calibrated machine use the same file format."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from deepspeed.errors import ArgumentError
from deepspeed.simulator.card_rates import CardRates
from deepspeed.simulator.trace import HostEvent

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Operators that draw random numbers: bytes touched per number, in fp32.
_RANDOM = {"bernoulli_": 4, "uniform_": 4, "normal_": 4, "random_": 4, "exponential_": 4, "native_dropout": 9}
_CARDS = Path(__file__).parent / "cards"


@dataclass(frozen=True)
class Machine:
    """Rates of one rank of a host, while all ranks of the host are busy.

    Args:
        ranks: number of ranks per host.
        memory: bytes available to the tensors of one rank.
        matrix: floating-point operations per second of a matrix product, by dtype: pairs of side length and rate.
        bandwidth: bytes per second that operators read and write.
        overhead: minimum seconds of an operator; if `shared`, added to the seconds of its work.
        collective: bytes per second that one rank receives in a gather or a reduction inside a host.
        disk: bytes per second and rank, mixed reads and writes; 0: no disk.
        folder: folder on that disk.
        notes: sources of the figures, figures that could not be measured, and their substitutes.
        shared: whether messages use the operators' cores and memory, so that nothing overlaps (CPUs).
        between: bytes per second that one rank receives over its share of the host's network; 0: a single host.
        latency: minimum seconds of a message between ranks of a host.
        latency_between: the same between hosts.
        link: bytes per second of one rank between host and device, each way; 0: no device.
        host: bytes per second of host memory for one rank; 0: same as `bandwidth`.
        launch: host seconds per launch, if the recording has none.
        attention: published fraction of `matrix` that fused attention reaches; 0: same as products.
        matrix_efficiency: fitted fraction of `matrix` that large products reach.
        memory_efficiency: fitted fraction of `bandwidth` that operators reach.
        host_memory: bytes of host memory available to one rank, with a device; 0: unlimited.
        fresh: cost of first writes to newly mapped memory: pairs of block size and bytes per second; 0: blocks of that
            size are reused.
        random: random numbers per second, if slower than memory; 0: not slower.
        kernels: published rates of single kernels, for recordings that say how kernels divide their work; None: none.
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
    kernels: CardRates | None = None

    def rate(self, dtype: torch.dtype | str, flops: float) -> float:
        """Return the floating-point operations per second of a matrix product with `flops` operations.

        `dtype` is a torch dtype or its short name, such as "bf16"; one that the machine does not list counts as fp32.
        """
        name = dtype if isinstance(dtype, str) else next((n for n, known in DTYPES.items() if known == dtype), "fp32")
        table = self.matrix.get(name) or self.matrix["fp32"]
        side = (flops / 2) ** (1 / 3)
        return self.matrix_efficiency * next((rate for size, rate in reversed(table) if side >= size), table[0][1])

    def first_touch(self, nbytes: float) -> float:
        """Return the additional seconds of the first write to a new block of `nbytes` bytes."""
        rate = next((rate for size, rate in reversed(self.fresh) if nbytes >= size), 0.0)
        return nbytes / rate if rate else 0.0

    def kernel(self, name: str, flops: float, nbytes: float, dtype: str) -> float:
        """Return the seconds of an operator: the longer of arithmetic and memory traffic (roofline), with `overhead`.

        Args:
            name: name of the operator.
            flops: floating-point operations.
            nbytes: bytes that it reads and writes.
            dtype: dtype of the arithmetic, as in `rate`.
        """
        arithmetic = flops / self.rate(dtype, flops) if flops else 0.0
        if self.attention and "attention" in name:
            arithmetic *= self.matrix_efficiency / min(self.attention, self.matrix_efficiency)
        if self.random and name in _RANDOM:
            arithmetic = nbytes / _RANDOM[name] / self.random
        longer = max(arithmetic, nbytes / (self.bandwidth * self.memory_efficiency))
        return self.overhead + longer if self.shared else max(self.overhead, longer)  # shared: the host's own cores

    def seconds(self, entry: HostEvent) -> float:
        """Return the seconds of a recorded kernel: by `kernels` if the recording has its work, else by `kernel`."""
        if entry.work is None or self.kernels is None:
            return self.kernel(entry.name, entry.flops, entry.nbytes, entry.dtype)
        return self.kernels.seconds(entry)

    def message(self, name: str, nbytes: float, group: tuple[int, ...]) -> tuple[float, float]:
        """Return the seconds of a message or collective: (time on the link, latency); zeros for less than two ranks.

        In a ring, each byte passes each rank once, so the ranks of a host share the traffic from other hosts. In an
        all-to-all, each rank receives its own bytes from all ranks.

        Args:
            name: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast`, `send`.
            nbytes: bytes of the whole tensor.
            group: global ranks that take part.

        Raises:
            ArgumentError: the ranks are on several hosts, and the machine has no `between`.
        """
        size, hosts = len(group), len({rank // self.ranks for rank in group})
        if size < 2:
            return 0.0, 0.0
        within, across = self.traffic(name, nbytes, group)
        if hosts == 1:
            return within / self.collective, self.latency
        if not self.between:
            raise ArgumentError(f"ranks {group[0]}–{group[-1]} are on {hosts} hosts, and the machine file says nothing "
                                "of a network: give `between`, in bytes per second and rank")  # fmt: skip
        within = within if size > hosts else 0.0
        return max(within / self.collective, across / self.between), self.latency_between

    def traffic(self, name: str, nbytes: float, group: tuple[int, ...]) -> tuple[float, float]:
        """Return the bytes of a message or collective that a rank receives: (in all, from other hosts).

        In an all-to-all the first number is that of bytes from its own host. Arguments as in `message`.
        """
        size, hosts = len(group), len({rank // self.ranks for rank in group})
        turns, local = (2 if name == "all_reduce" else 1), max(1, size // hosts)
        if name in ("broadcast", "send"):
            within, across = nbytes, nbytes / local if name == "broadcast" else nbytes
        elif name == "all_to_all":
            within, across = nbytes * (local - 1) / size, nbytes * (size - local) / size
        else:
            within, across = nbytes * (size - 1) / size, nbytes * (hosts - 1) / hosts / local
        return turns * within, turns * across if hosts > 1 else 0.0

    def moved(self, **factors: float) -> Machine:
        """Return a copy with some attributes multiplied by factors: `moved(matrix_efficiency=1.25)`."""
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})

    def save(self, path: str | Path) -> None:
        """Write a JSON file for `load`."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Load a machine from its file.

        Args:
            path: path of the file, or a name from `cards()`.

        Raises:
            ArgumentError: the file cannot be read, or an entry is missing or not positive.
        """
        try:
            where = _CARDS / f"{path}.json"
            fields = json.loads((where if where.exists() else Path(path)).read_text())
            rates = fields.pop("kernels", None)
            machine = cls(**fields, kernels=None if rates is None else CardRates(**rates))
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
    """Return the names of the machine files in the package, which have published figures of devices."""
    return sorted(path.stem for path in _CARDS.glob("*.json"))
