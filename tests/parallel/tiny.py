"""A tiny model, its data, engines over it, and the lines the package says: for the tests of this folder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepspeed.foundation import log
from tests.parity.configs import config
from tests.parity.reference import Reference, largest_difference

WIDTH = 6
STAGES = (0, 1, 2, 3)
ARGUMENTS = ("lr_scheduler", "training_data", "collate_fn", "mpu")


class Tiny(nn.Module):
    """Three blocks and a head; no cut over ranks is even."""

    greeting = "hello"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def rows(step: int, rank: int, count: int = 2) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1000 + 10 * step + rank))


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def sgd(parameters: Iterable[Any], lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def start(stage: int, model: nn.Module | None = None, optimizer: Any = sgd, **settings: Any) -> Any:
    """An engine; `settings` are those of `tests.parity.configs.config` and arguments of `initialize`."""
    import deepspeed

    model = model or tiny()
    passed = {name: settings.pop(name) for name in ARGUMENTS if name in settings}
    parameters = list(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameters,
        optimizer=optimizer(parameters) if callable(optimizer) else optimizer,
        config=config(stage, model, **settings),
        **passed,
    )
    return engine


def micro_step(engine: Any, step: int, **how: Any) -> float:
    """Forward, backward and `step` on this rank's rows."""
    loss = loss_of(engine, rows(step, dist.get_rank()))
    engine.backward(loss, **how)
    engine.step()
    return loss.item()


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """Full fp32 masters by name."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def reference(windows: list[list[int]], ranks: int, accumulation: int | None = None, **settings: Any) -> Reference:
    """The dense twin after windows of micro-batches; `accumulation` is what each window's sum is divided by."""
    twin = Reference(tiny(), settings.pop("optimizer", sgd), ranks, **settings)
    for window in windows:
        twin.accumulation = accumulation or len(window)
        for step in window:
            for rank in range(ranks):
                twin.backward(rank, loss_of(twin.copies[rank], rows(step, rank)))
        twin.step()
    return twin


def expect_close(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], bar: float = 1e-6, at: Any = ""
) -> None:
    gap = largest_difference(ours, theirs)
    assert gap <= bar, f"{at}: {gap:.3g} > {bar:g}"


@contextlib.contextmanager
def raises(error: type[BaseException], *words: str) -> Iterator[None]:
    """`pytest.raises` for the workers; the message must hold all `words`."""
    try:
        yield
    except error as found:
        missing = [word for word in words if word not in str(found)]
        assert not missing, f"{missing} not in: {found}"
    else:
        raise AssertionError(f"{error.__name__} was not raised")


class _Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """The lines the package says inside (rank 0), as if it had said nothing before."""
    notes, before = _Notes(), set(log._said)
    log._said.clear()
    log.logger.addHandler(notes)
    try:
        yield notes.lines
    finally:
        log.logger.removeHandler(notes)
        log._said.update(before)


def with_words(lines: list[str], *words: str) -> int:
    """How many lines hold all `words`."""
    return sum(all(word in line for word in words) for line in lines)
