"""Activation checkpointing: run a function without saving its activations, and recompute them in backward.

The module extends torch's non-reentrant checkpoint by storage options for inputs (`saved_inputs`), named random states,
timing, and flags that are read at each call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint  # bound here: some scripts replace it

from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing import rng
from deepspeed.activation_checkpointing.saved_inputs import Saver
from deepspeed.comm.process_groups.axis import group_axis
from deepspeed.config.sections.memory import ActivationCheckpointing
from deepspeed.data import draw_keys
from deepspeed.foundation.log import log_once, log_rank0

_inside: ContextVar[bool] = ContextVar("inside a checkpointed function", default=False)


def inside_checkpoint() -> bool:
    """Return whether a checkpointed function is running, in forward or in recomputation."""
    return _inside.get()


class Checkpointer:
    """Runner of checkpointed functions under one set of flags.

    Args:
        flags: the `activation_checkpointing` block.
        mpu: model-parallel unit; its ranks must create this object together to partition inputs.
    """

    def __init__(self, flags: ActivationCheckpointing, mpu: Any = None) -> None:
        self.flags, self.mpu = flags, mpu
        axis = None
        if flags.partition_activations:
            group = rng.of_model_parallel(mpu, "group")
            if group is not None:
                axis = group_axis("model", group, torch.device(get_accelerator().current_device_name()))
            if axis is None or axis.size == 1:
                log_once(
                    "activation_checkpointing.partition_activations: no model-parallel group of several ranks is "
                    "known (pass mpu), so saved inputs stay whole"
                )
        self.saver = Saver(flags, axis)

    @contextlib.contextmanager
    def governed(self, name: str) -> Iterator[None]:
        """Apply the flags to inputs that torch's checkpoint saves inside the context; `name`: name in the log."""
        with self.saver.hooks(), self._boundary(f"{name}, forward"):
            yield

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        again: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        **options: Any,
    ) -> Any:
        """Call `function`. Backward calls it again on the same inputs with the same random states.

        Args:
            function: any callable.
            args: positional arguments; tensors may be in nested lists, tuples and dicts.
            kwargs: keyword arguments, likewise.
            again: creates a context around the second call.
            **options: arguments of `torch.utils.checkpoint.checkpoint`.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        # torch saves, and passes to the hooks, only tensors that are arguments themselves
        leaves, spec = tree_flatten((args, kwargs))
        name = getattr(function, "__qualname__", type(function).__name__)

        def call(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, spec)
            return function(*args, **kwargs)

        def contexts() -> tuple[Any, Any]:
            states, counts = rng.tracker.get_states(), draw_keys.snapshot()
            return self._marked(), _Fresh(lambda: self._second_call(name, (states, counts), again))

        with self.governed(name):
            return torch_checkpoint(call, *leaves, use_reentrant=False, context_fn=contexts, **options)

    @contextlib.contextmanager
    def _second_call(self, name: str, before: tuple[Any, Any], again: Callable[[], Any]) -> Iterator[None]:
        """Context of a recomputation; `before`: named random states and counts of draws at the first call."""
        now = rng.tracker.get_states()
        rng.tracker.set_states(before[0])
        try:
            with draw_keys.replay(before[1]), self._marked(), again(), self._boundary(f"{name}, recomputation"):
                yield
        finally:
            rng.tracker.set_states(now)

    @staticmethod
    @contextlib.contextmanager
    def _marked() -> Iterator[None]:
        token = _inside.set(True)
        try:
            yield
        finally:
            _inside.reset(token)

    @contextlib.contextmanager
    def _boundary(self, what: str) -> Iterator[None]:
        wait = self.flags.synchronize_checkpoint_boundary or self.flags.profile
        if wait:
            get_accelerator().synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            if wait:
                get_accelerator().synchronize()
            if self.flags.profile:
                log_rank0(f"checkpoint of {what}: {1e3 * (time.perf_counter() - start):.2f} ms")


class _Fresh:
    """Context that can be entered repeatedly, for graphs that run backward more than once."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


class CheckpointFlags:
    """Flags for direct calls of `checkpoint`: those of the engine whose forward is running, else of `configure`."""

    def __init__(self) -> None:
        self.configured: Checkpointer | None = None
        self.running: ContextVar[Checkpointer | None] = ContextVar("of the engine whose forward runs", default=None)
        self.made = 0  # calls so far
        self._plain = Checkpointer(ActivationCheckpointing())

    @property
    def mpu(self) -> Any:
        """Return the model-parallel unit of `configure`; None if there is none."""
        return None if self.configured is None else self.configured.mpu

    def configure(self, flags: ActivationCheckpointing, mpu: Any, **values: Any) -> None:
        """Store flags and unit for calls outside of engines; `values` that are not None replace values of `flags`."""
        changed = {name: value for name, value in values.items() if value is not None}
        self.configured = Checkpointer(ActivationCheckpointing(**flags.model_dump() | changed), mpu)

    def checkpointer(self) -> Checkpointer:
        """Return the checkpointer for the current call."""
        return self.running.get() or self.configured or self._plain


calls = CheckpointFlags()
