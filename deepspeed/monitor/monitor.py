"""All monitors of a run behind one `write_events`; which there are is in `registry.py`."""

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
    """A line for each enabled monitor whose package is not installed, with what to install."""
    lines: list[str] = []
    for block in MONITORS:
        if getattr(monitor_config, block).enabled:
            try:
                monitor_class(block).require()
            except NotAvailableError as error:
                lines.append(f"{block}.enabled is true, and {error}, or set it to false")
    return lines


class MonitorMaster:
    """Hands the events of rank 0 to the writers of all monitors that the configuration enables.

    Each writer is a process of its own (`monitor_process`), so `write_events` waits for nothing. They end with `close`,
    when this object goes, and when the run ends or is killed.

    Args:
        monitor_config: `DeepSpeedConfig(…).monitor_config`, or what `get_monitor_config` gives.
        rank: of this process; None: as its launcher named it.

    Attributes:
        enabled: whether any monitor is, on every rank alike.
        writes: whether it is, on this rank.
        tb_monitor, wandb_monitor, comet_monitor, csv_monitor, jsonl_monitor, mlflow_monitor, prometheus_monitor: the
            feed of each; None where it is not enabled, and on all ranks but 0.

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
            if block in wanted:  # whoever names a folder gets the JSONL file in it
                wanted.setdefault("jsonl_monitor", wanted[block])
        problems = missing_packages(monitor_config)
        if problems:
            raise NotAvailableError("; ".join(problems))
        self._page_settings = wanted.get("jsonl_monitor")  # where the page is that ds_top reads
        self._page: LivePage | None = None
        self._feeds: list[Feed] = []
        for block, settings in wanted.items() if self.writes else ():
            feed = Feed(block, settings)
            setattr(self, "tb_monitor" if block == "tensorboard" else f"{block.removesuffix('_monitor')}_monitor", feed)
            self._feeds.append(feed)
        self._closing = weakref.finalize(self, Feed.close_all, self._feeds)  # at exit too

    def tell(self, facts: dict[str, Any]) -> None:
        """Show `ds_top` this rank's last step, where a folder was named: a copy in memory.

        Args:
            facts: values that JSON has.
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
        """Queue events on rank 0; nothing happens elsewhere.

        Args:
            event_list: (name, value, step) each: text, a number or a tensor with one, a whole number.
            flush: accepted for old scripts; writers flush by themselves.
        """
        if self._feeds:
            now = time.time()
            events = [(str(name), float(value), int(step), now) for name, value, step, *_ in event_list]
            line = json.dumps(events).encode() + b"\n"
            for feed in self._feeds:
                feed.send(line)

    def close(self) -> None:
        """Let the writers finish, and end them."""
        self._closing()
        page, self._page, self._page_settings = self._page, None, None
        if page is not None:
            page.close()
