"""Publishes what methods of the inner optimizer write outside of `step`: `eval` and `train` of schedule-free ones.

They see leaves over the masters of this rank's slices, so what they write has to reach the model, of all ranks. Which
methods do that is found before (`deepspeed/optim/separability.py`); on the object they are replaced by themselves with
that around them, so that a call through the client's own object does the same as one through `engine.optimizer`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from deepspeed.optim.separability import MethodTraits, UpdateTraits


class MethodRunner(Protocol):
    """Runs a method that writes, and publishes what it wrote."""

    def run_method(self, call: Callable[[], Any], traits: MethodTraits) -> Any:
        """Call it. All ranks do, together."""
        ...


class PublishedMethods:
    """The methods of one optimizer, replaced until `remove`."""

    def __init__(self, optimizer: torch.optim.Optimizer, traits: UpdateTraits, runner: MethodRunner) -> None:
        self._optimizer = optimizer
        self._replaced: dict[str, Any] = {}
        for name, method in traits.methods.items():
            if name not in vars(optimizer):  # not what a user has put there
                self._replaced[name] = vars(optimizer)[name] = _published(optimizer, name, method, runner)

    def remove(self) -> None:
        """The class's own methods again."""
        for name, replaced in self._replaced.items():
            if vars(self._optimizer).get(name) is replaced:
                del vars(self._optimizer)[name]
        self._replaced.clear()


def _published(
    optimizer: torch.optim.Optimizer, name: str, traits: MethodTraits, runner: MethodRunner
) -> Callable[..., Any]:
    own = getattr(type(optimizer), name)

    @functools.wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        return runner.run_method(lambda: own(optimizer, *args, **kwargs), traits)

    return method
