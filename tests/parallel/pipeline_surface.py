"""What scripts ask of an engine of stages: loops, short windows, numbers beside the loss, flush and no_sync."""

from __future__ import annotations

import contextlib
import csv
import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import deepspeed
from deepspeed.comm import get_rank
from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.errors import ArgumentError, DataError, PipelineError, UsageError
from deepspeed.pipe import PipelineModule
from tests.parallel import pipeline_layers as layers
from tests.parallel.dense import Dense, momentum
from tests.parallel.pipeline_runs import apart, config_of, deep, engine_of, replica
from tests.parallel.tensor_runs import batch_of
from tests.parallel.tiny import raises

STEPS = 4


def row_of(model: Any, step: int, rank: int) -> Any:
    """A micro-batch of two samples, in every third step of one."""
    whole = batch_of(model, step, rank)
    return {name: value[:1] for name, value in whole.items()} if step % 3 == 2 else whole


def real(lengths: list[int], policy: str) -> list[list[tuple[int, int, int]]]:
    """Windows of (replica, step, samples) that count."""
    steps = min(lengths) if policy == "drop" else max(lengths)
    rows = []
    for step in range(steps):
        for rank, length in enumerate(lengths):
            if step < length or policy == "cycle":
                at = step % length
                rows.append((step, (rank, at, 1 if at % 3 == 2 else 2)))
    return [[row for step, row in rows if low <= step < low + STEPS] for low in range(0, steps, STEPS)]


def looped(stage: int, lengths: list[int], policy: str, settings: Any = None) -> list[float]:
    """Distances of the losses of all windows, and of parameters, from the dense model."""
    model = deep("GPTNeo", 4)
    dense = Dense(model, momentum, 1)
    config = config_of(stage, 2, STEPS, **(settings or {}))
    engine = engine_of(model, config)
    found, wanted = [], []
    with engine:
        for window in real(lengths, policy):
            dense.optimizer.zero_grad()
            count = sum(samples for *_, samples in window)
            total: Any = (
                sum(dense.model(**row_of(model, at, rank)).loss * samples for rank, at, samples in window) / count
            )
            total.backward()
            dense.step()
            wanted.append(float(total.detach()))
        rank = replica(current_mesh())
        loader = [row_of(model, step, rank) for step in range(lengths[rank])]
        for window in engine.loop(loader, policy=policy):
            assert len(window) <= STEPS
            found.append(float(engine.train_batch(window)))
        assert len(found) == len(wanted) == engine.global_steps
        return [*(abs(a - b) for a, b in zip(found, wanted, strict=True)), apart(engine, dense)]


def evaluated() -> list[float]:
    """The mean over samples of an evaluation loop, beside the dense model's."""
    model = deep("GPTNeo", 2)
    dense = Dense(model, momentum, 1)
    engine = engine_of(model, config_of(1, 2, STEPS))
    found = []
    with engine:
        rows = [row_of(model, step, 0) for step in range(6)]
        engine.eval()
        ours = [float(engine.eval_batch(window)) for window in engine.loop(rows)]
        engine.train()
        for low, mean in zip((0, 4), ours, strict=True):
            losses = [(float(dense.model(**one).loss), len(one["input_ids"])) for one in rows[low : low + STEPS]]
            found.append(abs(mean - sum(a * b for a, b in losses) / sum(b for _, b in losses)))
    return found


def in_a_row(pp: int, policy: str) -> list[float]:
    """A loop over layers in a row, whose stages in the middle have no loader."""
    found = []
    with layers.start(1, pp, STEPS) as engine:
        torch.manual_seed(0)
        dense = Dense(layers.Whole(), momentum, 1, STEPS)
        ends = engine.is_first_stage() or engine.is_last_stage()
        loader = [layers.batch_of(step, 0) for step in range(STEPS + 2)] if ends else None
        for at, window in enumerate(engine.loop(loader, policy=policy)):
            rows = [layers.batch_of(step, 0) for step in range(at * STEPS, min((at + 1) * STEPS, STEPS + 2))]
            dense.optimizer.zero_grad()
            total: Any = sum(dense.model(row) for row in rows) / len(rows)
            total.backward()
            dense.step()
            found.append(abs(float(engine.train_batch(window)) - float(total.detach())))
        assert len(found) == 2
        return [*found, layers.apart(engine, dense)]


class Reporting(PipelineModule):
    """Reports the size of what it was asked for last."""

    def get_additional_losses(self) -> Mapping[str, Any] | None:
        return {"size": self.seen}


def told(folder: str) -> tuple[dict[str, float], dict[str, float], list[float]]:
    """Numbers beside the loss, of training and of evaluation, and what was written of them."""
    torch.manual_seed(0)
    seen: list[float] = []

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        seen.append(float(labels.sum()))
        model.seen = labels.sum()
        return layers.loss_fn(outputs, labels), {"first": labels.flatten()[0]}

    model = Reporting(layers.rows(), num_stages=2, loss_fn=loss_fn)
    config = config_of(1, 2, STEPS, csv_monitor={"enabled": True, "output_path": folder, "job_name": "toy"})
    engine = engine_of(model, config)
    with engine:
        rank = replica(current_mesh())
        engine.train_batch(layers.feed(0, STEPS, rank))
        trained = dict(engine.metrics)
        engine.eval_batch(layers.feed(STEPS, STEPS, rank))
        replicas = [[layers.batch_of(step, at)[1] for at in range(engine.dp_world_size)] for step in range(2 * STEPS)]
        for metrics, rows in ((trained, replicas[:STEPS]), (engine.metrics, replicas[STEPS:])):
            labels = [one for row in rows for one in row]
            assert metrics["size"] == sum(float(one.sum()) for one in labels) / len(labels), metrics
            assert metrics["first"] == sum(float(one.flatten()[0]) for one in labels) / len(labels), metrics
        assert bool(seen) == engine.is_last_stage()
        evaluated = dict(engine.metrics)
    written = [path for path in Path(folder).rglob("*size*.csv")]
    return trained, evaluated, [float(list(csv.reader(path.open()))[-1][1]) for path in written]


class Telling(torch.nn.Module):
    """Gives the largest logit beside the loss."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config
        self.example_input_array = batch_of(inner, 0, 0)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.inner(input_ids=input_ids, labels=labels)
        return {"loss": found.loss, "largest": found.logits.max(), "logits": found.logits}


def named() -> tuple[float, dict[str, float]]:
    """A number in the outputs of an unedited model; the distance of its mean from the dense model's."""
    model = Telling(deep("GPTNeo", 2))
    dense = Dense(model, momentum, 1)
    wanted = [float(dense.model(**batch_of(model, step, 0))["largest"]) for step in range(2)]
    engine = engine_of(model, config_of(1, 2, 2))
    with engine:
        engine.train_batch(iter([batch_of(model, step, 0) for step in range(2)]))
        return abs(engine.metrics["largest"] - sum(wanted) / 2), engine.metrics


def asked() -> None:
    """flush has nothing to do, no_sync is for backward, and loops are wary of what does not fit them."""
    with layers.start(1, 2, STEPS) as engine:
        engine.train_batch(layers.feed(0, STEPS, 0))
        before = [param.detach().clone() for param in engine.module.parameters()]
        engine.flush()
        assert engine.global_steps == 1
        assert all(map(torch.equal, before, engine.module.parameters())), "a window of stages is never open"
        with engine.no_sync(), raises(PipelineError, "no_sync", "micro-batches"):
            engine.train_batch(layers.feed(0, STEPS, 0))
        window = next(engine.loop([layers.batch_of(step, 0) for step in range(STEPS)]))
        with raises(UsageError, "num_items"):
            engine.train_batch(window, num_items=lambda _: 1)
        assert torch.isfinite(engine.train_batch(window))
        with raises(DataError, "after 0"):
            engine.train_batch(window)
        kind, words = (ArgumentError, "needs a loader") if engine.is_first_stage() else (DataError, "of another rank")
        with raises(kind, words):
            next(engine.loop(None if engine.is_first_stage() else [layers.batch_of(0, 0)]))
        assert torch.isfinite(engine.train_batch(layers.feed(0, STEPS, 0))) and engine.metrics == {}


def along() -> None:
    """A stage in the middle reads no data: whatever it hands over, it runs the window of the others, or none."""
    with layers.start(1, 3, STEPS) as engine:
        ends = engine.is_first_stage() or engine.is_last_stage()
        rows = [layers.batch_of(step, 0) for step in range(STEPS + 1)]
        engine.set_batch_fn(lambda batch: (batch[0], batch[1]))
        seen = []
        for window in engine.loop(rows):
            seen.append(len(window))
            assert torch.isfinite(engine.train_batch(window if ends else None))
        assert seen == [STEPS, 1] and engine.global_steps == 2
        assert torch.isfinite(engine.train_batch(iter(rows)))
        counted = engine.train_batch(iter(rows), num_items=lambda batch: 2) if ends else engine.train_batch()
        assert torch.isfinite(counted) and torch.isfinite(engine.eval_batch(iter(rows) if ends else None))


def apart_from_others() -> None:
    """What fails on one rank, or is asked for otherwise, before a window starts ends it on all, and no more."""

    def broken() -> Any:
        yield layers.batch_of(0, 0)
        raise OSError("no such file")

    def refuse(batch: Any) -> Any:
        raise KeyError("labels")

    with layers.start(1, 2, STEPS) as engine:
        first, rows = engine.is_first_stage(), [layers.batch_of(step, 0) for step in range(STEPS + 1)]
        kind, words = (OSError, "no such file") if first else (DataError, "data of rank 0 failed")
        with raises(kind, words):
            engine.train_batch(broken() if first else iter(rows))
        if not first:
            engine.set_batch_fn(refuse)
        kind, words = (DataError, "data of rank 1 failed") if first else (KeyError, "labels")
        with raises(kind, words):
            engine.eval_batch(iter(rows))
        engine.set_batch_fn(lambda batch: batch)
        kind, words = (ArgumentError, "got a list") if first else (DataError, "data of rank 0 failed")
        with raises(kind, words):
            engine.train_batch(rows if first else iter(rows))
        windows = list(engine.loop(rows))
        with raises(UsageError, "ranks 0 and 1 ask for different windows", "a window of engine.loop for 1"):
            engine.train_batch(windows[1] if first else iter(rows))
        with raises(UsageError, "different windows", "with num_items"):
            engine.train_batch(iter(rows), num_items=(lambda _: 1) if first else None)
        with raises(UsageError, "different windows", "for 2"):
            engine.eval_batch(iter(rows), num_micro_batches=2 if first else 3)
        _refused_on_one(engine, first, rows)
        assert torch.isfinite(engine.train_batch(windows[0])) and engine.global_steps == 1


def _refused_on_one(engine: Any, first: bool, rows: list[Any]) -> None:
    """A rank in another mode than the others, or with an argument that cannot be, ends the call on all."""
    told = (PipelineError, "the call was refused on rank")
    engine.train(first)
    with raises(*told if first else (PipelineError, "evaluation mode")):
        engine.train_batch(iter(rows))
    with raises(UsageError, "rank 0 called train_batch() and rank 1 eval_batch()"):
        engine.train_batch(iter(rows)) if first else engine.eval_batch(iter(rows))
    engine.train()
    with engine.no_sync() if first else contextlib.nullcontext():
        with raises(*(PipelineError, "no_sync") if first else told):
            engine.train_batch(iter(rows))
    with raises(*(ArgumentError, "reduce_output") if first else told):
        engine.eval_batch(iter(rows), reduce_output="max" if first else "avg")
    assert engine.training
    with raises(*(DataError, "data of rank 1 failed") if first else (ZeroDivisionError, "division")):
        engine.train_batch(iter(rows), num_items=lambda _: 1 / 0)
    short = [(ids, labels[:1]) for ids, labels in rows]
    with raises(*(PipelineError, "loss on rank 1 failed") if first else (ValueError, "batch_size")):
        engine.eval_batch(iter(short))
    assert torch.isfinite(engine.eval_batch(iter(rows)))


def _not_here(text: str, *_: Any) -> None:
    raise PipelineError(text)


def handed_over() -> None:
    """An optimizer that has state on one rank alone ends initialize on all, and the model can be handed over again."""
    first = get_rank() == 0
    model = deep("GPTNeo", 2)
    used, fresh = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    if first:
        model(**batch_of(model, 0, 0)).loss.backward()
        used.step()
    begun = time.monotonic()
    words = ("has state of the whole model",) if first else ("rank 0 cannot be made a stage: the optimizer has state",)
    with raises(ArgumentError if first else PipelineError, *words):
        deepspeed.initialize(model=model, optimizer=used if first else fresh, config=config_of(1, 2, 2))
    handle = model.register_forward_pre_hook(lambda *_: 1 // 0) if first else None
    with raises(*(ZeroDivisionError, "") if first else (PipelineError, "rank 0 could not split", "ZeroDivisionError")):
        deepspeed.initialize(model=model, optimizer=fresh, config=config_of(1, 2, 2))
    if handle is not None:
        handle.remove()
    for text, kind in (("not here", "profile"), ("", "best")):
        handle = model.transformer.h[1].register_forward_pre_hook(functools.partial(_not_here, text)) if first else None
        with raises(
            PipelineError, text if first else f"rank 0 could not split the model into stages: {text or 'Pipe'}"
        ):
            config = config_of(1, 2, 2, pipeline={"partition": kind})
            deepspeed.initialize(model=model, optimizer=fresh, config=config)
        if handle is not None:
            handle.remove()
    assert time.monotonic() - begun < 10
    deepspeed.initialize(model=model, optimizer=fresh, config=config_of(1, 2, 2))[0].destroy()
