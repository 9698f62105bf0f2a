"""Named random states as in Megatron: tensor-parallel ranks draw different numbers only inside `fork`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ArgumentError

MODEL_PARALLEL = "model-parallel-rng"
SEED_OFFSET = 2718  # Megatron's, so that scripts written for it draw the same numbers


class RNGTracker:
    """Named random states of the current device."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        self._states.clear()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the table from name to state; the states are shared and never written."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Restore the states that `get_states` returned."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state, seeded with `manual_seed(seed)`.

        Raises:
            ArgumentError: a state of that name exists.
        """
        if name in self._states:
            raise ArgumentError(f"random state {name!r} exists already; reset() the tracker to seed anew")
        self._states[name] = self._state_after(seed)

    @staticmethod
    def _state_after(seed: int) -> torch.Tensor:
        accelerator = get_accelerator()
        around = accelerator.get_rng_state()
        accelerator.manual_seed(seed)
        seeded = accelerator.get_rng_state()
        accelerator.set_rng_state(around)
        return seeded

    def reseed(self, name: str, seed: int) -> None:
        """Create the state `name` or seed it again; the device's default state does not change."""
        self._states[name] = self._state_after(seed)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the named state inside the context; the outer state then continues as if nothing had been drawn.

        Raises:
            ArgumentError: no state has that name.
        """
        if name not in self._states:
            raise ArgumentError(
                f"no random state is named {name!r} (there are {sorted(self._states)}); add it, or call "
                f"model_parallel_cuda_manual_seed first"
            )
        accelerator = get_accelerator()
        around = accelerator.get_rng_state()
        accelerator.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(around)


tracker = RNGTracker()


def of_model_parallel(mpu: Any, what: str) -> Any:
    """Return the rank or the group (`what`: "rank", "group") of a model-parallel unit; None without such a method."""
    get = getattr(mpu, f"get_tensor_model_parallel_{what}", None) or getattr(mpu, f"get_model_parallel_{what}", None)
    return None if get is None else get()
