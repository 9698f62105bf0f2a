"""Faults planted into the package's source, one at a time: the detector must report each with both lines."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.emulated.cells import Cell


@dataclass(frozen=True)
class Mutation:
    """One planted fault.

    Args:
        what: what is wrong.
        place: module and function, "deepspeed.storage.async_copy:AsyncCopier.copy".
        before: text of the function, there once.
        after: what it becomes.
        cell: a run that takes the path.
        found: a word that begins the report.
        lines: files that the report names, one per side.
    """

    what: str
    place: str
    before: str
    after: str
    cell: Cell
    found: str
    lines: tuple[str, str]

    def __str__(self) -> str:
        return self.what.replace(" ", "-")


HOST = Cell(stage=2, ranks=1, tier="cpu", small_buckets=True, accumulation=2)
HOST_BF16 = Cell(stage=2, ranks=1, dtype="bf16", tier="cpu", small_buckets=True)
TWO = Cell(stage=2, ranks=2, small_buckets=True)
GATHERS = Cell(stage=3, ranks=2, small_buckets=True)
NVME = Cell(stage=3, ranks=1, tier="nvme-nvme", small_buckets=True)

MOVER, NCCL = "deepspeed.storage.async_copy", "deepspeed.comm.collectives.collectives"
MUTATIONS = [
    Mutation(
        "a wait of the copying stream removed",
        f"{MOVER}:AsyncCopier.copy",
        "self._stream.wait_stream(self._accelerator.current_stream(self._device))",
        "pass",
        HOST,
        "RACE on device",
        ("storage/async_copy.py", "zero/gradients/buckets.py"),
    ),
    Mutation(
        "an event recorded before its copy",
        f"{MOVER}:AsyncCopier.copy",
        "target.copy_(source, non_blocking=True)\n        event = self._accelerator.Event()\n        event.record()",
        "event = self._accelerator.Event()\n        event.record()\n        target.copy_(source, non_blocking=True)",
        HOST,
        "HOST RACE",
        ("storage/async_copy.py", "deepspeed/"),
    ),
    Mutation(
        "a record removed",
        f"{MOVER}:AsyncCopier.copy",
        "event.record()",
        "pass",
        HOST,
        "HOST RACE",
        ("storage/async_copy.py", "deepspeed/"),
    ),
    Mutation(
        "an event not waited for by the host",
        f"{MOVER}:PendingCopy.wait",
        "self._event.synchronize()",
        "pass",
        HOST,
        "HOST RACE",
        ("storage/async_copy.py", "deepspeed/"),
    ),
    Mutation(
        "an event not waited for by the stream",
        f"{MOVER}:PendingCopy.before_current",
        "self._event.wait()",
        "pass",
        HOST_BF16,
        "RACE on device",
        ("storage/async_copy.py", "tests/"),
    ),
    Mutation(
        "a loan ended before its copy",
        "deepspeed.zero.parameters.local_shard:LocalShard.deliver_staged",
        "pool.put(staged, after=arrival)",
        "pool.put(staged)",
        HOST_BF16,
        "HOST RACE",
        ("storage/async_copy.py", "ops/cpu_optimizer.py"),
    ),
    Mutation(
        "a source not kept for its copy",
        f"{MOVER}:PendingCopy.__init__",
        "self._event, self._source = event, source",
        "self._event, self._source = event, None",
        HOST,
        "FREED",
        ("zero/gradients/buckets.py", "storage/async_copy.py"),
    ),
    Mutation(
        "a host read added",
        "deepspeed.zero.gradients.buckets:Bucket.leave_device",
        "def landed() -> None:",
        "(total if staged is None else staged).sum()\n\n    def landed() -> None:",
        HOST,
        "HOST RACE",
        ("zero/gradients/buckets.py", "storage/async_copy.py"),
    ),
    Mutation(
        "a gather not waited for",
        "deepspeed.zero.parameters.shard_group:ShardGroup.wait_all_gather",
        "self._handle.wait()",
        "pass",
        GATHERS,
        "RACE on device",
        ("tests/", "comm/collectives/collectives.py"),
    ),
    Mutation(
        "messages not waited for",
        f"{NCCL}:Handle.advance",
        "for work in self.works:",
        "for work in () if self.label.startswith('reduce') else self.works:",
        TWO,
        "RACE on device",
        ("comm/collectives/collectives.py", "comm/collectives/collectives.py"),
    ),
    Mutation(
        "another order on one rank",
        "deepspeed.zero.optimizer.update:start_all_gather_updated",
        "for group in groups:",
        "for group in (list(groups)[::-1] if groups[0].axis.rank else groups):",
        TWO,
        "MISMATCH",
        ("comm/collectives/collectives.py", "comm/collectives/collectives.py"),
    ),
    Mutation(
        "a transit buffer used again at once",
        "deepspeed.zero.gradients.reduce_scatter:GradReduceScatter.depart",
        "if not self.settings.overlap:",
        "self._pool[bucket.group.axis, current.buffer.dtype].append(current.buffer)\n    if not self.settings.overlap:",
        Cell(stage=3, ranks=2),
        "RACE on device",
        ("comm/collectives/collectives.py", "zero/"),
    ),
]


def _owner(place: str) -> tuple[Any, str, dict[str, Any]]:
    module_name, _, path = place.partition(":")
    module = owner = importlib.import_module(module_name)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    return owner, name, vars(module)


@contextlib.contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """Inside, the package has the fault, on the lines it had before."""
    owner, name, namespace = _owner(mutation.place)
    plain = vars(owner)[name]
    function = inspect.unwrap(plain)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutation.before) != 1:
        raise LookupError(f"{mutation.place} does not say {mutation.before!r} once: the mutation needs new words")
    text = source.replace(mutation.before, mutation.after)
    code = compile("\n" * (function.__code__.co_firstlineno - 1) + text, function.__code__.co_filename, "exec")
    made: dict[str, Any] = {}
    exec(code, namespace, made)
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, plain)
