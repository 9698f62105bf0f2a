"""Timeline of selected updates: spans are recorded on every rank, gathered on the first, and written to files."""

from __future__ import annotations

import json
import statistics
import threading
from pathlib import Path
from typing import Any

from deepspeed.comm.collectives.torch_api import all_gather_object, gather_object
from deepspeed.comm.watchdog.last_collective import boot
from deepspeed.engine.engine_state import EngineState
from deepspeed.engine.memory.report import MemoryReport
from deepspeed.errors import NotAvailableError
from deepspeed.foundation.log import log_rank0
from deepspeed.foundation.spans import Span, now, recorder
from deepspeed.profiling.timeline import ModuleSpans, RankRecord, Timeline

_ROUNDS = 9  # rounds of comparing clocks


class Tracing:
    """Recording of the timeline of an engine, from the end of the update before `start_step` (`timeline` block).

    Attributes:
        timeline: the complete timeline, on rank 0; None before and on other ranks.
    """

    def __init__(self, state: EngineState, memory: MemoryReport) -> None:
        self._state, self._memory, self._section = state, memory, state.ds_config.top.timeline
        self._marks: list[int] = []
        self._modules: ModuleSpans | None = None
        self._due = self.enabled = self._section.enabled
        self.timeline: Timeline | None = None

    def after_update(self) -> None:
        """Start or finish recording if the update that has just ended requires it. All ranks must call this."""
        if not self._due:
            return
        done, section = self._state.global_steps, self._section
        if self._marks:
            self._marks.append(now())
            for kind, count in self._memory.by_category().items():
                recorder.count(f"bytes of {kind}", count)
            if done >= section.start_step + section.steps:
                self._finish()
        elif done >= section.start_step:
            if section.modules:
                self._modules = ModuleSpans(self._state.module)
            recorder.start(section.ring)
            self._marks = [now()]

    def close(self) -> None:
        """Stop recording; a timeline that is not complete is dropped."""
        if self._modules is not None:
            self._modules.remove()
            self._modules = None
        if self._due and self._marks:
            recorder.stop()
        self._due = False

    def _finish(self) -> None:
        """Gather the spans on rank 0, which creates and writes the timeline. All ranks must call this."""
        self.close()
        spans, lost = recorder.take()
        axis = self._state.everyone
        ahead = self._ahead(axis.group) if axis.size > 1 else 0
        spans = [s._replace(begin=s.begin - ahead, end=s.end - ahead) for s in spans]
        marks = [mark - ahead for mark in self._marks]
        local_record = (axis.rank, [tuple(span) for span in spans], marks, threading.get_ident(), lost)
        rank_records: list[Any] | None = [local_record]
        if axis.size > 1:
            rank_records = [None] * axis.size if axis.rank == 0 else None
            gather_object(local_record, rank_records, dst=axis.ranks[0], group=axis.group)
        if rank_records is not None:
            records = [
                RankRecord(rank, [Span(*s) for s in rank_spans], *rest) for rank, rank_spans, *rest in rank_records
            ]
            self.timeline = Timeline(records, self._state.global_steps - self._section.steps)
            self._write(self.timeline)

    @staticmethod
    def _ahead(group: Any) -> int:
        """Return how many nanoseconds this rank's clock is ahead of the first rank's; 0 on one machine. Collective."""
        clocks: list[Any] = [None] * group.size()
        all_gather_object(clocks, boot(), group=group)
        if len(set(clocks)) == 1:
            return 0
        offsets = []
        for _ in range(_ROUNDS):
            all_gather_object(clocks, None, group=group)
            all_gather_object(clocks, now(), group=group)
            offsets.append(clocks[group.rank()] - clocks[0])
        return int(statistics.median(offsets))

    def _write(self, timeline: Timeline) -> None:
        folder = Path(self._section.output_path or ".").absolute() / self._section.job_name
        folder.mkdir(parents=True, exist_ok=True)
        base = folder / f"timeline_step{timeline.first}"
        text = timeline.table()
        base.with_suffix(".txt").write_text(text + "\n")
        base.with_suffix(".json").write_text(json.dumps(timeline.chrome()))
        try:
            timeline.picture(base.with_suffix(".png"))
        except NotAvailableError as error:
            log_rank0(str(error))
        log_rank0(f"{text}\nwritten: {base}.txt, .json (Perfetto, chrome://tracing), .png")
