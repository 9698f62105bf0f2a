"""Curricula: the difficulty of a step by upstream's four pacing functions; wrong schedules are refused at the start."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from deepspeed.errors import ArgumentError, DeepSpeedConfigError, UsageError
from deepspeed.foundation.log import warn_once
from deepspeed.foundation.pytree import tensors_in

Difficulty = int | float
SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")
TILE = 8  # half-precision matrix units want lengths that are multiples of it


def _required(config: Mapping[str, Any], key: str, where: str = "") -> Any:
    if key not in config:
        raise DeepSpeedConfigError(f"curriculum: `{where}{key}` is missing")
    return config[key]


def _whole(config: Mapping[str, Any], key: str, where: str = "schedule_config.") -> int:
    """Return an integer of at least 1."""
    value = _required(config, key, where)
    if isinstance(value, float) and value.is_integer():  # JSON writes large counts as 5e8
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DeepSpeedConfigError(f"curriculum: `{where}{key}` is {value!r}; it has to be an integer of at least 1")
    return value


class FixedPace:
    """Difficulty that grows with the `degree`-th root of the step, in multiples of `difficulty_step`."""

    def __init__(self, low: int, high: int, config: Mapping[str, Any], degree: float) -> None:
        self.low, self.high, self.degree = low, high, degree
        self.total = _whole(config, "total_curriculum_step")
        self.multiple = _whole(config, "difficulty_step")
        if self.multiple > high:
            raise DeepSpeedConfigError(
                f"curriculum: `schedule_config.difficulty_step` {self.multiple} is above `max_difficulty` {high}"
            )
        if low % self.multiple:
            raise DeepSpeedConfigError(
                f"curriculum: `min_difficulty` {low} is no multiple of `schedule_config.difficulty_step` "
                f"{self.multiple}, so that the first difficulty would be {low - low % self.multiple}"
            )
        if self.multiple % TILE:
            warn_once(
                f"curriculum: `difficulty_step` {self.multiple} is no multiple of {TILE}; if the difficulty is a "
                "sequence length, half-precision matrix products on GPUs are slower"
            )

    def at(self, step: int) -> int:
        """Return the difficulty at a step."""
        share = (float(step) / self.total) ** (1.0 / self.degree)
        grown = math.floor(share * (self.high - self.low) + self.low)
        return min(grown - grown % self.multiple, self.high)


class DiscretePace:
    """Difficulties from a list, each up to its last step."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.values = self._numbers(config, "difficulty")
        self.last_steps = self._numbers(config, "max_step")
        if len(self.last_steps) != len(self.values) - 1:
            raise DeepSpeedConfigError(
                f"curriculum: `schedule_config.max_step` has {len(self.last_steps)} entries for {len(self.values)} "
                "difficulties; it needs one less, since the last difficulty stays"
            )
        if any(after <= before for before, after in zip(self.last_steps, self.last_steps[1:], strict=False)):
            raise DeepSpeedConfigError(f"curriculum: `schedule_config.max_step` {self.last_steps} has to increase")

    @staticmethod
    def _numbers(config: Mapping[str, Any], key: str) -> list[Difficulty]:
        values = _required(config, key, "schedule_config.")
        if not isinstance(values, Sequence) or isinstance(values, str) or not all(_number(value) for value in values):
            raise DeepSpeedConfigError(
                f"curriculum: `schedule_config.{key}` is {values!r}; it has to be a list of numbers"
            )
        return list(values)

    def at(self, step: int) -> Difficulty:
        """Return the difficulty at a step."""
        return next(
            (value for value, last in zip(self.values, self.last_steps, strict=False) if step <= last), self.values[-1]
        )


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class CurriculumScheduler:
    """Difficulty by step. Steps count from 1; once the maximum is reached, the difficulty stays.

    Args:
        config: `min_difficulty`, `max_difficulty`, `schedule_type` and, unless that is "custom", `schedule_config`.

    Raises:
        DeepSpeedConfigError: a key is missing, has a wrong value or contradicts another; the message has its name.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        low, high = (_required(config, key) for key in ("min_difficulty", "max_difficulty"))
        if not _number(low) or not _number(high) or low > high:
            raise DeepSpeedConfigError(
                f"curriculum: `min_difficulty` {low!r} and `max_difficulty` {high!r} have to be numbers, the first not "
                "above the second"
            )
        self.kind = _required(config, "schedule_type")
        self._low, self._high = low, high
        self._custom: Callable[[int], Difficulty] | None = None
        self._at = self._schedule(config, low, high)
        self.current_difficulty: Difficulty = low

    def _schedule(self, config: Mapping[str, Any], low: Any, high: Any) -> Callable[[int], Difficulty]:
        if self.kind == "custom":
            return self._by_function
        if self.kind not in SCHEDULES:
            raise DeepSpeedConfigError(
                f"curriculum: `schedule_type` {self.kind!r} is unknown; there are {', '.join(SCHEDULES)}"
            )
        schedule = _required(config, "schedule_config")
        if self.kind == "fixed_discrete":
            return DiscretePace(schedule).at
        degree = 1 if self.kind == "fixed_linear" else _required(schedule, "root_degree", "schedule_config.")
        if not _number(degree) or degree <= 0:
            raise DeepSpeedConfigError(
                f"curriculum: `schedule_config.root_degree` is {degree!r}; it has to be positive"
            )
        if not isinstance(low, int) or not isinstance(high, int):
            raise DeepSpeedConfigError(f"curriculum: {self.kind} needs integers, not {low!r} and {high!r}")
        return FixedPace(low, high, schedule, degree).at

    def check_ready(self) -> None:
        """Raise UsageError if the schedule is "custom" and has no function yet; call this before the first step."""
        if self.kind == "custom" and self._custom is None:
            raise UsageError(
                'curriculum: `schedule_type` "custom" needs a function: call set_custom_get_difficulty (for an engine: '
                "set_custom_curriculum_learning_schedule) before the first step"
            )

    def _by_function(self, step: int) -> Difficulty:
        self.check_ready()
        return self._custom(step)  # type: ignore[misc]

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], Difficulty]) -> None:
        """Set the function from step to difficulty of a "custom" schedule.

        Raises:
            UsageError: it is no function, or the schedule is another one.
        """
        if self.kind != "custom" or not callable(schedule_function):
            raise UsageError(
                f"curriculum: a {type(schedule_function).__name__} cannot replace `schedule_type` {self.kind!r}; "
                'functions belong to "custom"'
            )
        self._custom = schedule_function

    def get_difficulty(self, global_steps: int) -> Difficulty:
        """Return the difficulty at a step, without a change of state.

        Raises:
            UsageError: the schedule is "custom" and has no function.
        """
        return self._at(global_steps)

    def update_difficulty(self, global_steps: int) -> Difficulty:
        """Set and return the current difficulty, which stays once it is at the maximum; errors as `get_difficulty`."""
        if self.current_difficulty < self._high or self.kind == "custom" and self._custom is None:
            self.current_difficulty = self.get_difficulty(global_steps)
        return self.current_difficulty

    def get_current_difficulty(self) -> Difficulty:
        """Return the difficulty of the last `update_difficulty`; before it, the minimum."""
        return self.current_difficulty

    def set_current_difficulty(self, difficulty: Difficulty) -> None:
        """Set the current difficulty."""
        self.current_difficulty = difficulty

    def get_state(self) -> dict[str, Any]:
        """Return the state: only the current difficulty changes."""
        return {"current_difficulty": self.current_difficulty}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `get_state`."""
        self.current_difficulty = state["current_difficulty"]


_TOKENS = ("input_ids", "inputs_embeds", "tokens")


def truncate_batch(batch: Any, length: int) -> Any:
    """Return a batch whose sequences are cut to their first `length` tokens, for a sequence-length curriculum.

    Args:
        batch: nested lists, tuples and mappings of tensors. The sequence is the second dim of `input_ids`,
            `inputs_embeds` or `tokens`, else of the first tensor of integers with two dims, else of the first with two;
            without one, the batch is returned whole. The second dim is cut where it has that size, and in masks and
            biases (by their names; without a name: with four dims) all later ones, too.
        length: tokens to keep; longer than the batch: all.

    Returns:
        The batch with views of its tensors.

    Raises:
        ArgumentError: `length` is below 1, or the batch is padded on the left.
    """
    if length < 1:
        raise ArgumentError(f"truncate_batch: a batch of {length} tokens has nothing to train on")
    size = _sequence_length(batch)
    return _cut(batch, "", size, length) if size > length else batch


def _sequence_length(batch: Any) -> int:
    """Return the number of tokens of a row; 0: the batch has no sequences."""
    if isinstance(batch, Mapping):
        entries = cast("Mapping[str, Any]", batch)
        named = [entries[name] for name in _TOKENS if isinstance(entries.get(name), torch.Tensor)]
        if named and named[0].dim() > 1:
            return named[0].shape[1]
    tables = [tensor for tensor in tensors_in(batch) if tensor.dim() == 2]
    integers = [table for table in tables if not table.dtype.is_floating_point and table.dtype != torch.bool]
    return next((table.shape[1] for table in [*integers, *tables]), 0)


def _cut(value: Any, name: str, size: int, length: int) -> Any:
    if isinstance(value, torch.Tensor):
        if name == "attention_mask" and value.dim() == 2 and bool(((value[:, 0] == 0) & (value != 0).any(1)).any()):
            raise ArgumentError(
                "truncate_batch: the attention_mask begins with padding, of which only the end is cut; pad on the right"
            )
        square = "mask" in name or "bias" in name if name else value.dim() == 4
        for axis in range(1, value.dim() if square else min(2, value.dim())):
            value = value.narrow(axis, 0, length) if value.shape[axis] == size else value
        return value
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value)
        changed: Any = dict(entries) if type(value) is dict else copy.copy(value)
        for key, entry in entries.items():
            changed[key] = _cut(entry, str(key), size, length)
        return changed
    if isinstance(value, (list, tuple)):
        kind = cast("Any", type(value))
        parts = [_cut(entry, name, size, length) for entry in cast("Sequence[Any]", value)]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    return value
