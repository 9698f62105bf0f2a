"""Executor that runs one stage's actions of any pipeline schedule, and checks that compare all stages afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from deepspeed.comm.collectives.p2p import Header, P2PChannel, Receiver, Sender
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.watchdog import watchdog
from deepspeed.errors import CommError, PipelineError
from deepspeed.foundation.fake_mode import Replaceable, enter
from deepspeed.foundation.spans import BACKWARD, FORWARD, recorder
from deepspeed.pipe.schedule import Action, PipelineSchedule
from deepspeed.pipe.split_backward import SplitBackward

_APART = 1e-5  # relative; kernels may round differently aligned slices in different ways


class Count(NamedTuple):
    """Counters of one rank for one accumulation window (the micro-batches of one update).

    Args:
        loss: mean loss of this rank; 0 without losses.
        losses: number of micro-batches with a loss on this rank.
        items: number of items, such as tokens, by which summed losses are divided; 0 if losses are means.
        stage: index of the stage.
        step: number of updates before this window.
        forward: number of forward passes (chunks times micro-batches).
        backward: number of backward passes (chunks times micro-batches).
        metrics: number of scalars that this rank reports in addition to the loss.
        failed: 1 if computing the loss raised, else 0.
    """

    loss: float
    losses: float
    items: float
    stage: float
    step: float
    forward: float
    backward: float
    metrics: float = 0.0
    failed: float = 0.0

    @staticmethod
    def mean_loss(counts: Sequence[Count]) -> float:
        """Return the mean loss over the ranks with losses, or over the items if losses are sums."""
        total = sum(count.loss * count.losses for count in counts)
        items = sum(count.items for count in counts if count.losses)
        return total / (items or sum(count.losses for count in counts) or 1.0)

    @staticmethod
    def check(counts: Sequence[Count], stages: int, micros: int, chunks: int) -> None:
        """Check that a window of `micros` micro-batches was computed once, by stages at the same update.

        Raises:
            PipelineError: a micro-batch is missing or was computed twice, a loss was counted on two stages, or a stage
                is updates behind; the message says which.
        """
        for rank, count in enumerate(counts):
            where = f"rank {rank} (stage {count.stage:.0f})"
            for name, runs in (("forward", count.forward), ("backward", count.backward)):
                if runs != micros * chunks:
                    raise PipelineError(
                        f"{where} ran {runs:.0f} times {name} in a window of {micros} micro-batches and {chunks} chunks"
                    )
            if count.losses != (micros if count.stage == stages - 1 else 0):
                raise PipelineError(
                    f"{where} counted {count.losses:.0f} losses in a window of {micros}: the last stage ({stages - 1}) "
                    f"counts all of them, and no other stage any"
                )
            if count.step != counts[0].step:
                raise PipelineError(
                    f"{where} has made {count.step:.0f} updates and rank 0 (stage {counts[0].stage:.0f}) "
                    f"{counts[0].step:.0f}: one of them is stale"
                )


class Means:
    """Means, over micro-batches and ranks, of numbers that the last stage reports in addition to the loss."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, float]] = {}  # (sum of values times weights, sum of weights)

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, numbers: Mapping[str, torch.Tensor | float], weight: float = 1.0) -> None:
        """Add one micro-batch's numbers; `weight` is its number of samples."""
        for name, value in numbers.items():
            total, weights = self._sums.get(name, (0.0, 0.0))
            number = value.detach().double() if isinstance(value, torch.Tensor) else float(value)
            self._sums[name] = total + number * weight, weights + weight  # stays on the device, without synchronization

    def over(self, axis: Axis) -> dict[str, float]:
        """Return the means over all ranks that have numbers. All ranks of the axis must call this."""
        sums: dict[str, tuple[float, float]] = {}
        own_sums = {name: (float(total), weights) for name, (total, weights) in self._sums.items()}
        for rank_sums in all_gather_objects(axis, own_sums):
            for name, (total, weights) in rank_sums.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + total, before[1] + weights
        return {name: total / weights for name, (total, weights) in sums.items() if weights}


def check_shared(values: dict[str, torch.Tensor], axis: Axis) -> None:
    """Check by sums that parameters shared by several stages are equal on them. All ranks of the axis must call this.

    Args:
        values: shared parameters of this stage, by a name that all stages use.
        axis: the pipeline stages.

    Raises:
        PipelineError: a stage's copy differs; the message says which.
    """
    own_sums = {
        name: (float(value.detach().double().sum()), float(value.detach().double().abs().sum()))
        for name, value in values.items()
    }
    everyone = all_gather_objects(axis, own_sums)
    first: dict[str, tuple[int, tuple[float, float]]] = {}
    for stage, stage_sums in enumerate(everyone):
        for name, (total, size) in stage_sums.items():
            other, (wanted, _) = first.setdefault(name, (stage, (total, size)))
            if not abs(total - wanted) <= _APART * size:
                raise PipelineError(
                    f"'{name}' is held by stages {other} and {stage}, and is not the same there after an update: "
                    f"it is no longer tied"
                )


CPU = torch.device("cpu")
_COMPUTES = {"F": "forward", "B": "backward", "W": "backward of weights"}
_CARRIES = {"F": "activation", "B": "gradient"}


class ModelPart(Protocol):
    """Interface of a model part that a stage runs.

    Attributes:
        first, last: whether it is the first or the last part of the model.
        words: description for error messages.
        reads_batch: whether `run` or `loss` reads the batch.
    """

    first: bool
    last: bool
    words: str
    reads_batch: bool
    costs: list[float]  # costs of all parts of the model, in the simulator's unit; empty: unknown
    metrics: Mapping[str, torch.Tensor | float]  # scalars in addition to the last loss

    def run(self, received: Any, batch: Any) -> Any:
        """Compute the part's outputs from those of the previous part (the first part: from the batch)."""
        ...

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Compute the loss, a tensor with one element, from the last part's outputs."""
        ...

    def cast(self, dtype: torch.dtype) -> None:
        """Adapt to a change of the model's dtype."""
        ...


class Driver(Protocol):
    """Interface of the engine of a stage, which has the batches, the model and the accumulation window."""

    @property
    def costs(self) -> list[float]:
        """Costs of all parts of the model; see `ModelPart`."""
        ...

    def forward(self, chunk: int, micro: int, received: Any) -> Any:
        """Run a chunk (a model part) on received outputs; the last part returns outputs, or in training the loss."""
        ...

    def backward(
        self, micro: int, roots: list[Any], gradients: list[torch.Tensor | None] | None, run: Callable[..., None]
    ) -> None:
        """Run backward from `roots`, the outputs that a chunk has sent, with `gradients`; None: the root is the loss.

        `run` has the signature of `torch.autograd.backward`.
        """

    def weights(self, micro: int, run: Callable[[], None]) -> None:
        """Call `run`, which computes the weight gradients that the backward pass of a micro-batch has deferred."""

    def words(self, chunk: int) -> str:
        """Describe the model part of a chunk, for messages."""
        ...


class _ReceivedTensors(torch.autograd.Function):
    """Autograd function that inserts received tensors into this stage's graph and records their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, held: _Held, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.held = held
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.held.gradients = list(gradients)
        return None, None, None


@dataclass
class _Held:
    """State of a micro-batch in a chunk, from the arrival of its input until the input gradient is sent.

    Args:
        value: the received value.
        arrived: number of received tensors that can have a gradient.
        gradients: gradients of the received tensors, after backward.
        roots: roots of the backward pass.
        output_gradients: gradients of the roots; None: the root is the loss.
        anchor: leaf that gives received tensors a gradient; None: they cannot have one.
        outgoing: header and tensors to send.
    """

    value: Any = None
    arrived: int = 0
    gradients: list[torch.Tensor | None] | None = None
    roots: list[GradientEdge | torch.Tensor] = field(default_factory=list)
    output_gradients: list[torch.Tensor | None] | None = None
    anchor: torch.Tensor | None = None
    outgoing: tuple[Header, list[torch.Tensor]] | None = None


class OtherStages:
    """Interface to the other stages during one run of a schedule.

    Args:
        schedule: the schedule of all stages.
        stage: index of this stage.
        costs: costs of the parts; empty: equal costs.
    """

    def __init__(self, schedule: PipelineSchedule, stage: int, costs: list[float]) -> None:
        self.schedule, self.stage, self.costs = schedule, stage, costs

    @staticmethod
    def sender(axis: Axis) -> type[Sender]:
        """Return the class for sends to the other stages of an axis."""
        return Sender

    def come_to(self, place: int, action: Action) -> None:
        """Handle the start of the action at index `place` of this stage's row; does nothing by default."""

    def receive(self, action: Action, receiver: Receiver, rank: int, label: str) -> tuple[Header, list[torch.Tensor]]:
        """Receive the message of an action from a rank; `label` describes it in error messages."""
        return receiver.receive(label)

    def before_send(self, action: Action, sender: Sender, header: Header, tensors: list[torch.Tensor]) -> None:
        """Handle the message that an action is about to send; does nothing by default."""


other_stages: Replaceable[type[OtherStages]] = Replaceable(OtherStages)


class Executor:
    """Executor of one stage of a pipeline. All ranks of the world must create their executors together.

    Args:
        axis: the stages, in order.
        driver: the engine of this stage.
        ring: whether the last stage also sends to the first, as with several chunks per stage.
        device: device of the tensors that are sent.
    """

    def __init__(self, axis: Axis, driver: Driver, ring: bool, device: torch.device = CPU) -> None:
        self.axis, self._driver, self.stage = axis, driver, axis.rank
        onward, back = axis.channel(), axis.channel()
        before, after = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
        forth = [
            (stage, (stage + 1) % axis.size) for stage in range(axis.size if ring else axis.size - 1) if axis.size > 1
        ]
        edges = [*forth, *((after, before) for before, after in forth)]
        groups = axis.message_groups(edges)
        sends = other_stages.current.sender(axis)

        def end(kind: type[Sender] | type[Receiver], edge: tuple[int, int], channel: int, forward: bool) -> Any:
            half = edges[: len(forth)] if forward else edges[len(forth) :]
            if edge not in half:
                return None
            group = groups[half.index(edge) + (0 if forward else len(forth))]
            return kind(axis, edge[kind is sends], channel, P2PChannel(group, device) if group is not None else None)

        self._takes: dict[str, Receiver | None] = {
            "F": end(Receiver, (before, axis.rank), onward, True), "B": end(Receiver, (after, axis.rank), back, False)
        }  # fmt: skip
        self._sends: dict[str, Sender | None] = {
            "F": end(sends, (axis.rank, after), onward, True), "B": end(sends, (axis.rank, before), back, False)
        }  # fmt: skip
        self._held: dict[tuple[int, int], _Held] = {}
        self._split: dict[tuple[int, int], SplitBackward] = {}  # `B` done, `W` pending
        self._splits = False
        self._place = ""
        self._others: OtherStages  # position in the running schedule

    @property
    def bytes_sent(self) -> int:
        """Number of tensor bytes sent so far."""
        return sum(sender.bytes_sent for sender in self._sends.values() if sender is not None)

    @property
    def headers_sent(self) -> int:
        """Number of headers sent so far: one for each change of structure, shapes or dtypes."""
        return sum(sender.headers_sent for sender in self._sends.values() if sender is not None)

    def run(self, schedule: PipelineSchedule, training: bool) -> list[Any]:
        """Run this stage's row of a validated schedule; `training`: with autograd. All stages must call this.

        Returns:
            Outputs of the last part (in training the detached losses) by micro-batch; empty on other stages.

        Raises:
            PipelineError: a chunk raised; the message has stage, layers and micro-batch. All other ranks are notified.
            CommError: another rank failed or is late; the message shows each stage's position in its schedule.
        """
        self._held.clear()
        self._split.clear()
        self._splits = schedule.splits
        results: dict[int, Any] = {}
        self._others = others = other_stages.current(schedule, self.stage, self._driver.costs)
        with torch.set_grad_enabled(training):
            for position, action in enumerate(schedule.rows[self.stage]):
                self._place = schedule.around(self.stage, position)
                part = schedule.part(self.stage, action.chunk)
                others.come_to(position, action)
                try:
                    self._act(action, training, results if part == schedule.parts - 1 else None)
                    if action.op == "B" and part == 0:
                        del self._held[action.micro, action.chunk]
                except CommError:
                    raise
                except Exception as error:
                    raise self._failed(action, error) from error
        self._place = "the end of its schedule"
        for kind, sender in self._sends.items():
            if sender is not None:
                sender.settle(self._label(f"sends of {_CARRIES[kind]}s"))
        return [results[micro] for micro in sorted(results)]

    def _label(self, what: str) -> str:
        return f"{what}, stage {self.stage} at {self._place}"

    def _failed(self, action: Action, error: Exception) -> PipelineError:
        """Notify all ranks of an error, and return a PipelineError with stage, micro-batch and action."""
        where = (
            f"stage {self.stage} ({self._driver.words(action.chunk)}), micro-batch {action.micro}, "
            f"{_COMPUTES[action.op[-1]]}"
        )
        watchdog.failed(where, error)
        return PipelineError(f"{where}: {type(error).__name__}: {error}")

    def _act(self, action: Action, training: bool, results: dict[int, Any] | None) -> None:
        place, op = (action.micro, action.chunk), action.op
        if op in ("F", "B", "W"):
            enter(f"{op}{action.chunk}")
        if op == "<F":
            self._held[place] = self._receive_activation(action, training)
        elif op == "F":
            self._forward(action, training, results)
        elif op == ">F":
            held = self._held[place] if training else self._held.pop(place)
            self._send(action, held)
        elif op == "<B":
            header, tensors = self._receive(action)
            self._held[place].output_gradients = header.put_together(tensors)
        elif op == "B":
            self._backward(action)
        elif op == "W":
            with recorder.span(BACKWARD, str(action)):
                self._driver.weights(action.micro, self._split.pop(place).weights)
        else:
            self._send(action, self._held.pop(place))

    def _backward(self, action: Action) -> None:
        held, run = self._held[action.micro, action.chunk], torch.autograd.backward
        with recorder.span(BACKWARD, str(action)):
            if self._splits:
                split = SplitBackward(held.anchor)
                split.read(held.roots)
                waiting = list(self._split.items())
                while waiting and not split.overtakes(waiting[-1][1]):
                    waiting.pop()
                for (micro, _), earlier in waiting:  # gradients arrive in order of micro-batches
                    self._driver.weights(micro, earlier.weights)
                self._split[action.micro, action.chunk], run = split, split.backward
            self._driver.backward(action.micro, held.roots, held.output_gradients, run)
        held.roots, held.output_gradients = [], None
        held.outgoing = Header.take_apart(held.gradients if held.gradients is not None else [None] * held.arrived)
        held.gradients = None

    def _receive(self, action: Action) -> tuple[Header, list[torch.Tensor]]:
        kind = action.op[-1]
        receiver = self._takes[kind]
        if receiver is None:
            raise PipelineError(f"stage {self.stage} has no stage to receive {action} from")
        source = self.axis.ranks[receiver.peer]
        label = self._label(f"receive of the {_CARRIES[kind]} of micro-batch {action.micro} from rank {source}")
        return self._others.receive(action, receiver, source, label)

    def _send(self, action: Action, held: _Held) -> None:
        sender, kind = self._sends[action.op[-1]], action.op[-1]
        if sender is None or held.outgoing is None:
            raise PipelineError(f"stage {self.stage} has nothing to send for {action}, or no stage to send it to")
        target = self.axis.ranks[sender.peer]
        self._others.before_send(action, sender, *held.outgoing)
        label = self._label(f"send of the {_CARRIES[kind]} of micro-batch {action.micro} to rank {target}")
        sender.send(*held.outgoing, label)
        held.outgoing = None

    def _receive_activation(self, action: Action, training: bool) -> _Held:
        header, tensors = self._receive(action)
        held = _Held()
        enter = [index for index, leaf in enumerate(header.leaves) if leaf.differentiable]
        if training and enter:
            held.anchor = torch.empty((), requires_grad=True)
            entered: Any = _ReceivedTensors.apply(held.anchor, held, [tensors[index] for index in enter])
            for index, tensor in zip(enter, entered, strict=True):
                tensors[index] = tensor
            held.arrived = len(enter)
        held.value = header.put_together(tensors)
        return held

    def _forward(self, action: Action, training: bool, results: dict[int, Any] | None) -> None:
        place = (action.micro, action.chunk)
        held = self._held.setdefault(place, _Held())
        received, held.value = held.value, None
        with recorder.span(FORWARD, str(action)):
            outputs = self._driver.forward(action.chunk, action.micro, received)
        if results is None:
            held.outgoing = Header.take_apart(outputs)
            held.roots = [get_gradient_edge(t) for t in held.outgoing[1] if training and t.requires_grad]
            return
        if training:
            held.roots = [outputs]
            results[action.micro] = outputs.detach()
        else:
            del self._held[place]
            results[action.micro] = outputs
