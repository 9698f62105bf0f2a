"""All monitors of a run behind one `write_events`; `registry.py` lists the monitors."""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from deepspeed.errors import NotAvailableError
from deepspeed.foundation.log import current_rank, log_rank0
from deepspeed.monitor.base import Event, Monitor, folder_of
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.monitor.monitor_process import Feed
from deepspeed.monitor.registry import MONITORS, monitor_class
from deepspeed.monitor.top import LivePage

__all__ = ["Event", "Monitor", "MonitorMaster"]

_WITH_FOLDER = ("tensorboard", "csv_monitor")


def missing_packages(monitor_config: DeepSpeedMonitorConfig) -> list[str]:
    """Return a line for each enabled monitor whose package is not installed, with the package to install."""
    lines: list[str] = []
    for block in MONITORS:
        if getattr(monitor_config, block).enabled:
            try:
                monitor_class(block).require()
            except NotAvailableError as error:
                lines.append(f"{block}.enabled is true, and {error}, or set it to false")
    return lines


class MonitorMaster:
    """Front end of all enabled monitors: sends the events of rank 0 to their writers.

    Each writer is a separate process (`monitor_process`), so `write_events` does not wait. Writers end with `close`,
    when this object is deleted, and when the run ends or is killed.

    Args:
        monitor_config: `DeepSpeedConfig(…).monitor_config`, or the result of `get_monitor_config`.
        rank: rank of this process; None: from the launcher's variables.

    Attributes:
        enabled: whether any monitor is enabled; equal on all ranks.
        writes: whether this rank writes events.
        tb_monitor, wandb_monitor, comet_monitor, csv_monitor, jsonl_monitor, mlflow_monitor, prometheus_monitor: the
            `Feed` of each monitor; None if it is not enabled, and on all ranks but 0.

    Raises:
        NotAvailableError: a monitor's package is not installed; on every rank.
    """

    tb_monitor: Feed | None = None
    wandb_monitor: Feed | None = None
    comet_monitor: Feed | None = None
    csv_monitor: Feed | None = None
    jsonl_monitor: Feed | None = None
    mlflow_monitor: Feed | None = None
    prometheus_monitor: Feed | None = None

    def __init__(self, monitor_config: DeepSpeedMonitorConfig, rank: int | None = None) -> None:
        self.monitor_config = monitor_config
        sections = {block: getattr(monitor_config, block) for block in MONITORS}
        wanted = {block: section.model_dump() for block, section in sections.items() if section.enabled}
        self.enabled = bool(wanted)
        self._rank = current_rank() if rank is None else rank
        self.writes = self.enabled and self._rank == 0
        for block in _WITH_FOLDER:
            if block in wanted:  # a monitor with a folder also gets a JSONL file there
                wanted.setdefault("jsonl_monitor", wanted[block])
        problems = missing_packages(monitor_config)
        if problems:
            raise NotAvailableError("; ".join(problems))
        self._page_settings = wanted.get("jsonl_monitor")  # folder of the page for ds_top
        self._page: LivePage | None = None
        self._feeds: list[Feed] = []
        for block, settings in wanted.items() if self.writes else ():
            feed = Feed(block, settings)
            setattr(self, "tb_monitor" if block == "tensorboard" else f"{block.removesuffix('_monitor')}_monitor", feed)
            self._feeds.append(feed)
        self._closing = weakref.finalize(self, Feed.close_all, self._feeds)  # at exit too

    def tell(self, facts: dict[str, Any]) -> None:
        """Publish figures of this rank's last step for `ds_top`, if a monitor with a folder is enabled.

        Args:
            facts: JSON values by name.
        """
        if self._page_settings is None:
            return
        try:
            self._page = self._page or LivePage(folder_of(SimpleNamespace(**self._page_settings)), self._rank)
            self._page.write(facts)
        except OSError as error:
            self._page_settings = None
            log_rank0(f"ds_top will not see rank {self._rank}: {error}", logging.WARNING)

    def write_events(self, event_list: Iterable[tuple[Any, ...]], flush: bool = True) -> None:
        """Queue events on rank 0; other ranks do nothing.

        Args:
            event_list: (name, value, step) tuples: a string, a number or one-element tensor, an integer.
            flush: accepted for old scripts without effect; writers always flush.
        """
        if self._feeds:
            now = time.time()
            events = [(str(name), float(value), int(step), now) for name, value, step, *_ in event_list]
            line = json.dumps(events).encode() + b"\n"
            for feed in self._feeds:
                feed.send(line)

    def close(self) -> None:
        """Wait for the writers to write all events and end; they are killed after about 30 s."""
        self._closing()
        page, self._page, self._page_settings = self._page, None, None
        if page is not None:
            page.close()
