"""What the clients' runs share: a small model, its data, what is noted of a run, and clients in a fresh state."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.parity.configs import limits_of_zero

WORDS, LENGTH, MICRO, UPDATES, ACCUMULATION, CLIP, RATE = 32, 8, 2, 10, 2, 0.5, 2e-3


@dataclass
class Run:
    """What a client reports of a training run on one rank."""

    losses: list[float] = field(default_factory=list)  # one per micro-batch, or per update where the client sums up
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    updates: int = 0


class Words(nn.Module):
    """A small residual model of words that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3))
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def sentences(count: int = 80, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, WORDS, (count, length), generator=torch.Generator().manual_seed(1))


def zero(stage: int) -> dict[str, Any]:
    """`zero_optimization` that shards the smallest parameter too."""
    return {"stage": stage, "stage3_param_persistence_threshold": 0} | (limits_of_zero() if stage == 3 else {})


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


@contextlib.contextmanager
def fresh_clients(**environment: str) -> Iterator[str]:
    """A folder for a run; before and after, Accelerate and Transformers know nothing of any other run."""
    before = dict(os.environ)
    os.environ.update(environment, HF_HUB_OFFLINE="1", CI="1")  # no downloads, no telemetry
    _forget()
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield folder
    finally:
        _forget()
        os.environ.clear()
        os.environ.update(before)


@functools.cache
def imported(name: str, **environment: str) -> Any:
    """A package that changes the environment when it is imported, without that change.

    Args:
        name: of the package.
        environment: what it finds meanwhile; `HERE` stands for a folder that goes away.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {key: value.replace("HERE", folder) for key, value in environment.items()}
        try:
            return importlib.import_module(name)
        finally:
            os.environ.clear()
            os.environ.update(before)


def _forget() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    with contextlib.suppress(ImportError):
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()


def whole_values(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers of a module that an engine may have sharded; all ranks call together."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        values = dict(module.named_parameters()) | dict(module.named_buffers())
        return {name: value.detach().clone() for name, value in values.items()}


@functools.cache
def without(train: Callable[..., Run], precision: str) -> Run:
    """The client's own run, once per worker."""
    return train(None, precision)


def compare(train: Callable[..., Run], stage: int, precision: str) -> None:
    """On a worker: the client with this package against the client without."""
    wanted, found = without(train, precision), train(stage, precision)
    assert len(found.losses) == len(wanted.losses) >= UPDATES, (len(found.losses), len(wanted.losses))
    assert found.updates == wanted.updates == UPDATES
    loss, other = (1e-5, 1e-4) if precision == "fp32" else (1e-2, 1e-1)
    close(found.losses, wanted.losses, loss, "losses")
    close(found.norms, wanted.norms, other, "gradient norms")
    close(found.rates, wanted.rates, 1e-9, "learning rates")


def close(ours: list[float], theirs: list[float], bar: float, what: str) -> None:
    assert len(ours) == len(theirs), (what, ours, theirs)
    gaps = [abs(a - b) / max(abs(b), 1e-6) for a, b in zip(ours, theirs, strict=True)]
    assert not gaps or max(gaps) <= bar, f"{what} differ by {max(gaps):.2g} > {bar:g}: {ours} against {theirs}"
