"""Pipeline schedules: the order of each stage's actions, which can be printed as text and parsed.

The text has a line per stage and a word per action. `F3` and `B3` compute forward and backward of micro-batch 3, `<F3`
and `>F3` receive and send its activation, `<B3` and `>B3` its gradient. If a row has `W3`, `B3` defers the weight
gradients to it (`deepspeed/pipe/split_backward.py`). `F3.1` is chunk 1 of a stage with several chunks. Chunk c of stage
s is part c * stages + s of the model. Sends do not block; messages between two stages arrive in order.
`deepspeed/pipe/schedule_simulator.py` validates a schedule; `deepspeed/pipe/executor.py` runs it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed.errors import ArgumentError, PipelineError

_WORD = re.compile(r"([<>]?[FB]|W)(\d+)(?:\.(\d+))?")
INFERENCE = "inference"
NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble", INFERENCE)
_ONE_CHUNK = ("1f1b", "zero_bubble")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a stage: a computation, a receive or a send.

    Args:
        op: `F`, `B`: compute forward or backward. `<F`, `<B`: receive the input of `F` or `B`. `>F`, `>B`: send the
            result. `W`: compute the weight gradients that `B` deferred.
        micro: index of the micro-batch, from 0.
        chunk: index of the chunk in the stage, from 0.
    """

    op: str
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.op}{self.micro}" + (f".{self.chunk}" if self.chunk else "")

    @classmethod
    def parse(cls, word: str) -> Action:
        """Parse a word in the form of `str(action)`; PipelineError if it has another form."""
        match = _WORD.fullmatch(word)
        if match is None:
            raise PipelineError(f"{word!r} is not an action of a schedule, such as F3, <F3, >F3, B3, W3 or F3.1")
        return cls(match[1], int(match[2]), int(match[3] or 0))


Row = tuple[Action, ...]


@dataclass(frozen=True)
class PipelineSchedule:
    """Schedule of all stages.

    Args:
        name: name of the schedule, see `make_schedule`.
        micros: number of micro-batches per update.
        chunks: number of chunks per stage.
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
        """Whether backward is split in two (`B` and `W`)."""
        return any(action.op == "W" for row in self.rows for action in row)

    @property
    def parts(self) -> int:
        """Number of model parts: stages times chunks."""
        return self.stages * self.chunks

    def part(self, stage: int, chunk: int) -> int:
        """Return the index, in the whole model, of the part that is a stage's chunk."""
        return chunk * self.stages + stage

    def __str__(self) -> str:
        head = f"{self.name}: {self.stages} stages, {self.micros} micro-batches, {self.chunks} chunks"
        return "\n".join([head, *(" ".join(map(str, row)) for row in self.rows)])

    def around(self, stage: int, position: int, beside: int = 3) -> str:
        """Format an action of a stage's row with `beside` neighbours on each side: "F1 >F1 [<B0] B0 F2"."""
        row, low = self.rows[stage], max(0, position - beside)
        near = row[
            low : position + beside + 1
        ]  # called before each action: formatting the whole row would be quadratic
        words = [f"[{action}]" if place == position else str(action) for place, action in enumerate(near, low)]
        return " ".join([*(["…"] if low else []), *words, *(["…"] if low + len(near) < len(row) else [])])


def parse(text: str) -> PipelineSchedule:
    """Parse a schedule in the form of `str(schedule)`.

    Raises:
        PipelineError: the text is not a schedule.
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
    """Create a schedule by name.

    Args:
        name: "gpipe" (arXiv:1811.06965): all forward passes, then all backward passes; "1f1b" (arXiv:2006.09503): each
            backward as early as possible; "interleaved" (arXiv:2104.04473): 1f1b over several chunks per stage, in
            rounds of as many micro-batches as stages; "zero_bubble" (ZB-H1 of arXiv:2401.10241): 1f1b with weight
            gradients deferred into waiting times; "inference": no backward.
        stages: number of ranks along `pp`.
        micros: number of micro-batches per update.
        chunks: chunks per stage; 1 for 1f1b and zero_bubble.

    Raises:
        ArgumentError: the name is unknown, a number is below 1, 1f1b or zero_bubble has several chunks, or the
            micro-batches of interleaved are not a multiple of the stages.
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
    """Return the computations (`F`, `B` and `W`) of one stage, without messages."""
    if name == "interleaved":
        rounds = [range(low, low + stages) for low in range(0, micros, stages)]
        order = [(micro, chunk) for group in rounds for chunk in range(chunks) for micro in group]
        back = [(micro, chunk) for group in rounds for chunk in reversed(range(chunks)) for micro in group]
    else:
        order = [(micro, chunk) for chunk in range(chunks) for micro in range(micros)]
        back = [(micro, chunk) for chunk in reversed(range(chunks)) for micro in range(micros)]
    forward, backward = [Action("F", *place) for place in order], [Action("B", *place) for place in back]
    if name == INFERENCE:
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
    """Return the number of forward passes of a stage before forward and backward alternate; see `make_schedule`."""
    total = micros * chunks
    if name == "gpipe":
        return total
    if name in _ONE_CHUNK:
        return min(total, stages - stage - 1)
    return min(total, 2 * (stages - stage - 1) + (chunks - 1) * stages)


def _with_messages(row: Iterable[Action], stage: int, stages: int, last: int) -> Iterable[Action]:
    """Add receives as late and sends as early as possible; sends do not block."""
    for action in row:
        if action.op == "W":
            yield action
            continue
        part = action.chunk * stages + stage
        # the first part receives nothing, the last part sends nothing
        begins, ends = (0, last) if action.op == "F" else (last, 0)
        if part != begins:
            yield Action("<" + action.op, action.micro, action.chunk)
        yield action
        if part != ends:
            yield Action(">" + action.op, action.micro, action.chunk)
