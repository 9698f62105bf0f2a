"""Rates of single kernels on a card, as published measurements give them, and the time of one kernel by them.

A training step spends its time in large operators, for which one fitted constant is enough (`machine.Machine`). A pass
that generates one token a sequence is hundreds of short kernels: what counts is how fast memory is read, how many
programs read it, and what a launch costs on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed.simulator.trace import HostEvent, KernelWork


@dataclass(frozen=True)
class CardRates:
    """Published rates of a card.

    Args:
        multiprocessors: number of multiprocessors.
        stream: bytes per second that a kernel reaches which reads or copies long rows.
        latency: seconds from a load to its data while many loads are outstanding. Programs that are too few for
            `stream` reach their bytes in flight (programs times `KernelWork.waiting`) over this.
        l2: bytes per second from the L2 cache.
        l2_latency: seconds from a read to its data in the L2 cache.
        issue: instructions of warps per second, on all multiprocessors.
        products: operations per second that large matrix products reach, by dtype.
        launch: device seconds of a kernel's start and end, launched one by one.
        captured: the same inside of a graph.
        graph_launch: host seconds of the launch of a graph.
        sources: address of each figure's source, by name.
    """

    multiprocessors: int
    stream: float
    latency: float
    l2: float
    l2_latency: float
    issue: float
    products: dict[str, float]
    launch: float
    captured: float
    graph_launch: float
    sources: dict[str, str] = field(default_factory=dict[str, str])

    def seconds(self, entry: HostEvent) -> float:
        """Return the seconds of a kernel with `work`: its start, then the longest of what it needs of the card.

        These are memory, L2 cache, matrix units and instructions; each is used alone, as if the others were free.
        """
        work = entry.work or KernelWork()
        busy = min(1.0, work.programs / self.multiprocessors) if work.programs else 1.0
        rate = self.products.get(entry.dtype) or self.products["fp32"]
        longest = max(
            self._memory(entry.nbytes, work),
            self._cached(entry.nbytes, work),
            entry.flops / (rate * busy),
            work.instructions / (self.issue * busy),
        )
        return (self.captured if entry.captured else self.launch) + longest

    def _cached(self, nbytes: float, work: KernelWork) -> float:
        """Return the seconds of traffic from the L2 cache, through which memory's passes too."""
        if not work.programs or not work.waiting:
            return (nbytes + work.cached) / self.l2
        active = min(work.programs, self.multiprocessors * work.resident)
        return (nbytes + work.cached) / min(self.l2, active * work.waiting / self.l2_latency)

    def _memory(self, nbytes: float, work: KernelWork) -> float:
        """Return the seconds of memory traffic: full waves of programs, then what is left of them."""
        if not work.programs or not work.waiting:
            return nbytes / self.stream
        slots = self.multiprocessors * work.resident
        full, rest = divmod(work.programs, slots)
        return sum(
            waves * programs * nbytes / work.programs / min(self.stream, programs * work.waiting / self.latency)
            for waves, programs in ((full, slots), (1, rest))
            if waves * programs
        )
