"""Communication of the ranks that save or load together: small objects, tensors, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed import comm
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import CheckpointCorruptError, CheckpointError, CheckpointMissingError, CommError

# Errors after which a load tries another checkpoint, and what the other ranks raise: either all ranks try it or none.
# If ranks have different ones, the first of this list counts.
_SHARED: tuple[tuple[type[Exception], type[CheckpointError]], ...] = (
    (CheckpointCorruptError, CheckpointCorruptError),
    (FileNotFoundError, CheckpointMissingError),
)


class Ranks:
    """Ranks that save or load together.

    Args:
        axis: mesh axis of the ranks; None: only this process.
        group: process group for messages; None: the group of the axis.
    """

    def __init__(self, axis: Axis | None = None, group: Any = None) -> None:
        self.rank, self.size = (0, 1) if axis is None else (axis.rank, axis.size)
        self.numbers = (0,) if axis is None else axis.ranks
        self.group = group if group is not None or axis is None else axis.group

    def gather(self, local: Any) -> list[Any]:
        """All-gather `local`: return all ranks' objects, in rank order; without a process group, `local` for each."""
        if self.size == 1 or self.group is None:
            return [local] * self.size
        every: list[Any] = [None] * self.size
        comm.all_gather_object(every, local, group=self.group)
        return every

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Context that raises an error of one rank, except CommError, on all ranks at its end. Collective.

        The failing rank raises its own error, the others CheckpointError with the text `what`. If one rank raises
        CheckpointCorruptError, all do; else if one raises FileNotFoundError, all do (CheckpointMissingError).
        """
        error: Exception | None = None
        try:
            yield
        except CommError:
            raise
        except Exception as problem:
            error = problem
        if error is None:
            local_report = None
        else:
            order = next((i for i, (raised, _) in enumerate(_SHARED) if isinstance(error, raised)), len(_SHARED))
            local_report = order, f"{type(error).__name__}: {error}"
        reports = [(*report, rank) for rank, report in enumerate(self.gather(local_report)) if report is not None]
        if not reports:
            return
        order, text, rank = min(reports, key=lambda report: report[0])
        raised, elsewhere = _SHARED[order] if order < len(_SHARED) else (Exception, CheckpointError)
        if error is not None and isinstance(error, raised):
            raise error
        raise elsewhere(f"{what} failed on rank {rank}: {text}") from error

    def send(self, tensor: Any, to: int) -> None:
        """Send a CPU tensor to rank `to` of this group, which must call `receive`."""
        comm.send(tensor, self.numbers[to], group=self.group)

    def receive(self, tensor: Any, sender: int) -> None:
        comm.recv(tensor, self.numbers[sender], group=self.group)
