"""Fake stages of a pipeline in a run without values.

One stage is run, and the others are not there (`deepspeed/foundation/fake_mode.py`). Where they stand in their rows
follows from the schedule: those that keep step are where the costs of their parts put them; those that are late have
done only what this stage has heard of.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.comm.collectives.p2p import Header
from deepspeed.comm.fake.fake_p2p import FakeMessage, SimulatedSender, UnheardError
from deepspeed.foundation.fake_mode import late, stage_outputs
from deepspeed.pipe.schedule import Action, PipelineSchedule
from deepspeed.pipe.schedule_simulator import simulate


class AbsentStages:
    """The other stages as one meets them in a run of a schedule; without costs parts cost the same."""

    def __init__(self, schedule: PipelineSchedule, stage: int, costs: list[float]) -> None:
        self._schedule, self._stage, self._late = schedule, stage, late()
        self._begins = simulate(schedule, costs).begins
        self._places = [
            {(action.op, action.micro, action.chunk): place for place, action in enumerate(row)}
            for row in schedule.rows
        ]
        self._known = [-1] * schedule.stages  # of each stage: its last action that this one has heard of
        self._now = 0.0

    def at(self, place: int, action: Action) -> None:
        """This stage has come to an action of its row."""
        self._now = self._begins[self._stage][place]
        if action.op in ("<F", "<B"):
            stage, chunk = self._peer(action)
            self._known[stage] = self._places[stage][">" + action.op[1], action.micro, chunk]

    def _peer(self, action: Action) -> tuple[int, int]:
        """The stage, and its chunk, that a message is sent to or comes from."""
        onward = 1 if action.op in (">F", "<B") else -1
        chunk, stage = divmod(self._schedule.part(self._stage, action.chunk) + onward, self._schedule.stages)
        return stage, chunk

    def sends(self, action: Action, header: Header, tensors: list[torch.Tensor]) -> None:
        """Keep what an activation's message says of itself, for the run of the next stage."""
        if action.op == ">F":
            stage_outputs()[self._schedule.part(self._stage, action.chunk)] = FakeMessage.of(header, tensors)

    def message(self, action: Action, rank: int) -> FakeMessage:
        """The message that a receive gets.

        Raises:
            UnheardError: the stage of `rank`, which sends it, has not been run.
        """
        part = self._schedule.part(self._stage, action.chunk)
        if action.op == "<B":
            return stage_outputs()[part].gradients()
        if part - 1 not in stage_outputs():
            raise UnheardError(rank)
        return stage_outputs()[part - 1]

    def let_go(self, sender: SimulatedSender, action: Action) -> None:
        """Before a message is sent: have its peer read and free the messages that it is through with.

        Messages of `sender` are named by window, micro-batch and chunk.
        """
        kind, (peer, _) = action.op[1], self._peer(action)
        for message in sender.unread():
            end = self._end(kind, peer, message)
            if end is not None and (self._known[peer] > end if self._late else self._begins[peer][end] < self._now):
                sender.read(message)
        sender.name((self, action))

    def _end(self, kind: str, peer: int, message: Any) -> int | None:
        """The place in a peer's row where it lets go of a message: the receive after the last use; None: none is."""
        window, action = message
        row, used = self._schedule.rows[peer], -1
        if window is self:
            op = "W" if self._schedule.splits else "F" if self._schedule.name == "inference" else "B"
            used = self._places[peer][op, action.micro, self._peer(action)[1]]
        later = (place for place, other in enumerate(row) if place > used and other.op == "<" + kind)
        return next(later, None)
