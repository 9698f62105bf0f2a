"""Events for TensorBoard."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from deepspeed.monitor.base import Event, Monitor, folder_of


class TensorBoardMonitor(Monitor):
    """Writes event files by tensorboard's own writer, which needs no torch.

    Attributes:
        log_dir: folder of the event files.
    """

    module = extra = "tensorboard"

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.log_dir = str(folder_of(tensorboard_config))
        self._proto, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(self.log_dir)

    @cached_property
    def summary_writer(self) -> Any:
        """torch's SummaryWriter over the same folder, for pictures and histograms."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(log_dir=self.log_dir)

    def write(self, events: list[Event]) -> None:
        """Write scalars, and flush them."""
        for e in events:
            summary = self._summary(value=[self._summary.Value(tag=e.name, simple_value=e.value)])
            self._writer.add_event(self._proto(wall_time=e.time, step=e.step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Close the files, and end the writer's thread."""
        self._writer.close()
        if "summary_writer" in vars(self):
            self.summary_writer.close()
