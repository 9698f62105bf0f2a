"""Monitor for TensorBoard."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Any

from deepspeed.monitor.base import Event, Monitor, folder_of


class TensorBoardMonitor(Monitor):
    """Monitor for TensorBoard: writes event files with tensorboard's own writer, which does not need torch.

    Args:
        tensorboard_config: the `tensorboard` block.

    Attributes:
        log_dir: folder of the event files.
    """

    module = extra = "tensorboard"

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        self.log_dir = str(folder_of(tensorboard_config))
        self._proto = import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(self.log_dir)

    @cached_property
    def summary_writer(self) -> Any:
        """Return torch's SummaryWriter for the same folder, for images and histograms."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(log_dir=self.log_dir)

    def write(self, events: list[Event]) -> None:
        for e in events:
            summary = self._summary(value=[self._summary.Value(tag=e.name, simple_value=e.value)])
            self._writer.add_event(self._proto(wall_time=e.time, step=e.step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
        if "summary_writer" in vars(self):
            self.summary_writer.close()
