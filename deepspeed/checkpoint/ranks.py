"""Communication of the ranks that save or load together: small objects, tensors, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed import comm
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import CheckpointError, CommError


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

        The failing rank raises its own error, the others CheckpointError with the text `what`.
        """
        error: Exception | None = None
        try:
            yield
        except CommError:
            raise
        except Exception as problem:
            error = problem
        errors = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text is not None:
                raise CheckpointError(f"{what} failed on rank {rank}: {text}")

    def send(self, tensor: Any, to: int) -> None:
        """Send a CPU tensor to rank `to` of this group, which must call `receive`."""
        comm.send(tensor, self.numbers[to], group=self.group)

    def receive(self, tensor: Any, sender: int) -> None:
        comm.recv(tensor, self.numbers[sender], group=self.group)
