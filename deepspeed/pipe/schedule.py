"""Schedules as data: the order of each stage's actions, as text that prints and parses.

A line per stage, a word per action: `F3` and `B3` compute forward and backward of micro-batch 3, `<F3` and `>F3`
receive and send an activation, `<B3` and `>B3` its gradient. If a row has `W3`, `B3` defers the weight gradients to it
(`deepspeed/pipe/split_backward.py`). `F3.1` is chunk 1 of a stage that has several. Chunk c of stage s is the (c *
stages + s)-th part of the model. Sends do not block; messages from one stage to another arrive in order.
`deepspeed/pipe/schedule_simulator.py` validates a schedule, `deepspeed/pipe/executor.py` runs any.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed.errors import ArgumentError, PipelineError

_WORD = re.compile(r"([<>]?[FB]|W)(\d+)(?:\.(\d+))?")
NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "inference")
_ONE_CHUNK = ("1f1b", "zero_bubble")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a stage does.

    Args:
        op: `F`, `B`: compute forward or backward. `<F`, `<B`: receive its input. `>F`, `>B`: send its result. `W`:
            compute the weight gradients that `B` deferred.
        micro: micro-batch, from 0.
        chunk: part of the stage, from 0.
    """

    op: str
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.op}{self.micro}" + (f".{self.chunk}" if self.chunk else "")

    @classmethod
    def parse(cls, word: str) -> Action:
        """An action from the word that `str` makes of it."""
        match = _WORD.fullmatch(word)
        if match is None:
            raise PipelineError(f"{word!r} is not an action of a schedule, such as F3, <F3, >F3, B3, W3 or F3.1")
        return cls(match[1], int(match[2]), int(match[3] or 0))


Row = tuple[Action, ...]


@dataclass(frozen=True)
class PipelineSchedule:
    """What all stages do.

    Args:
        name: as in the JSON.
        micros: micro-batches.
        chunks: parts of each stage.
        rows: actions by stage.
    """

    name: str
    micros: int
    chunks: int
    rows: tuple[Row, ...]

    @property
    def stages(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def splits(self) -> bool:
        """Whether backward is in two."""
        return any(action.op == "W" for row in self.rows for action in row)

    @property
    def parts(self) -> int:
        """Parts of the model: stages times chunks."""
        return self.stages * self.chunks

    def part(self, stage: int, chunk: int) -> int:
        """Which part of the model a chunk of a stage is."""
        return chunk * self.stages + stage

    def __str__(self) -> str:
        head = f"{self.name}: {self.stages} stages, {self.micros} micro-batches, {self.chunks} chunks"
        return "\n".join([head, *(" ".join(map(str, row)) for row in self.rows)])

    def around(self, stage: int, position: int, beside: int = 3) -> str:
        """A stage's place in its schedule: "F1 >F1 [<B0] B0 F2"."""
        row, low = self.rows[stage], max(0, position - beside)
        near = row[
            low : position + beside + 1
        ]  # a stage says its place before each action: its whole row would be quadratic
        words = [f"[{action}]" if place == position else str(action) for place, action in enumerate(near, low)]
        return " ".join([*(["…"] if low else []), *words, *(["…"] if low + len(near) < len(row) else [])])


def parse(text: str) -> PipelineSchedule:
    """A schedule from the text that `str` makes of it.

    Raises:
        PipelineError: the text is no schedule; says which word is wrong.
    """
    head, *lines = text.strip().splitlines()
    match = re.fullmatch(r"(\S+): (\d+) stages, (\d+) micro-batches, (\d+) chunks", head.strip())
    if match is None:
        raise PipelineError(f"a schedule begins with 'NAME: S stages, M micro-batches, C chunks', not {head!r}")
    rows = tuple(tuple(Action.parse(word) for word in line.split()) for line in lines)
    if len(rows) != int(match[2]):
        raise PipelineError(f"a schedule of {match[2]} stages has a line for each, and here are {len(rows)}")
    return PipelineSchedule(match[1], int(match[3]), int(match[4]), rows)


def make_schedule(name: str, stages: int, micros: int, chunks: int = 1) -> PipelineSchedule:
    """A schedule by its name.

    Args:
        name: "gpipe" all forward, then all backward; "1f1b" a backward as soon as there is one; "interleaved" 1f1b
            over several chunks per stage, in rounds of as many micro-batches as there are stages; "zero_bubble" 1f1b
            whose gradients of weights come later, in time that would be spent waiting (ZB-H1 of Qi et al., "Zero Bubble
            Pipeline Parallelism", 2023); "inference" no backward.
        stages: ranks along `pp`.
        micros: micro-batches of a window.
        chunks: parts of each stage; 1f1b and zero_bubble have one.

    Raises:
        ArgumentError: no such schedule, or one that cannot be had with these numbers.
    """
    if name not in NAMES:
        raise ArgumentError(f"there is no schedule {name!r}; there are {', '.join(NAMES)}")
    if min(stages, micros, chunks) < 1:
        raise ArgumentError(f"a schedule needs stages, micro-batches and chunks, not {(stages, micros, chunks)}")
    if name in _ONE_CHUNK and chunks > 1:
        raise ArgumentError(f'{name} has one chunk per stage; with {chunks} there is the schedule "interleaved"')
    if name == "interleaved" and micros % stages:
        more = -(-micros // stages) * stages
        raise ArgumentError(
            f"interleaved runs in rounds of {stages} micro-batches, one for each stage, and {micros} are no multiple: "
            f"the next count is {more} (gradient_accumulation_steps)"
        )
    rows = (_computing(name, stage, stages, micros, chunks) for stage in range(stages))
    last = stages * chunks - 1
    return PipelineSchedule(
        name, micros, chunks, tuple(tuple(_with_messages(row, stage, stages, last)) for stage, row in enumerate(rows))
    )


def _computing(name: str, stage: int, stages: int, micros: int, chunks: int) -> list[Action]:
    """Forward and backward of one stage, without messages."""
    if name == "interleaved":
        rounds = [range(low, low + stages) for low in range(0, micros, stages)]
        order = [(micro, chunk) for group in rounds for chunk in range(chunks) for micro in group]
        back = [(micro, chunk) for group in rounds for chunk in reversed(range(chunks)) for micro in group]
    else:
        order = [(micro, chunk) for chunk in range(chunks) for micro in range(micros)]
        back = [(micro, chunk) for chunk in reversed(range(chunks)) for micro in range(micros)]
    forward, backward = [Action("F", *place) for place in order], [Action("B", *place) for place in back]
    if name == "inference":
        return forward
    first = warmup(name, stage, stages, micros, chunks)
    row = forward[:first]
    for pair in zip(forward[first:], backward, strict=False):
        row += pair
    row += backward[len(forward) - first :]
    if name != "zero_bubble":
        return row
    # `W` follows its `B` by `stage` micro-batches: every stage then holds as many micro-batches at its peak as stage 0.
    delayed, waiting = list[Action](), list[Action]()
    for action in row:
        delayed.append(action)
        if action.op == "B":
            waiting.append(Action("W", action.micro, action.chunk))
            if len(waiting) > stage:
                delayed.append(waiting.pop(0))
    return delayed + waiting


def warmup(name: str, stage: int, stages: int, micros: int, chunks: int) -> int:
    """Forward passes before the first that is followed by a backward."""
    total = micros * chunks
    if name == "gpipe":
        return total
    if name in _ONE_CHUNK:
        return min(total, stages - stage - 1)
    return min(total, 2 * (stages - stage - 1) + (chunks - 1) * stages)


def _with_messages(row: Iterable[Action], stage: int, stages: int, last: int) -> Iterable[Action]:
    """Receives as late and sends as early as can be: a send does not wait."""
    for action in row:
        if action.op == "W":
            yield action
            continue
        part = action.chunk * stages + stage
        # the part where this pass begins receives nothing, the part where it ends sends nothing
        begins, ends = (0, last) if action.op == "F" else (last, 0)
        if part != begins:
            yield Action("<" + action.op, action.micro, action.chunk)
        yield action
        if part != ends:
            yield Action(">" + action.op, action.micro, action.chunk)
