"""Learning-rate schedules: DeepSpeed's five, torch's by name, and command-line options for tuning them."""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed.errors import SchedulerError, UsageError
from deepspeed.foundation.log import log_once, warn_once
from deepspeed.optim.build import construct, nearest

WARMUP_TYPES = ("log", "linear")
PerGroup = float | Sequence[float]


def get_torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer: `optimizer` itself, or the one inside of wrappers with an attribute `.optimizer`.

    Raises:
        SchedulerError: there is no torch optimizer.
    """
    inner = optimizer
    while inner is not None and not isinstance(inner, torch.optim.Optimizer):
        inner = getattr(inner, "optimizer", None)
    if inner is None:
        raise SchedulerError(f"{type(optimizer).__name__} is no torch.optim.Optimizer and has none as `.optimizer`")
    return inner


class LRSchedule:
    """Base class of the five schedules: a step counter, and the learning rates of each group.

    The first `step()` sets iteration `last_batch_iteration` + 1. Before the first step, the groups have the rates of
    `get_lr()` at `last_batch_iteration`.

    Args:
        optimizer: a torch optimizer, or a wrapper with one as `.optimizer`.
        last_batch_iteration: last finished iteration; -1: none.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    def get_lr(self) -> list[float]:
        raise NotImplementedError(f"{type(self).__name__} has no get_lr")

    def get_last_lr(self) -> list[float]:
        """Return the rates that the last `step()` (or `load_state_dict`) set.

        Raises:
            UsageError: there was no step yet.
        """
        if self._last_lr is None:
            raise UsageError(f"{type(self).__name__}.get_last_lr(): need to call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to `last_batch_iteration` (None: to the next iteration) and set the rates of the groups."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._last_lr = self._apply()

    def _apply(self) -> list[float]:
        rates = self.get_lr()
        # Groups that were added after the schedule keep their rate.
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration, which determines all rates."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Restore the iteration of a `state_dict()`, and set its rates."""
        self.last_batch_iteration = sd["last_batch_iteration"]
        rates = self._apply()
        self._last_lr = rates if self.last_batch_iteration >= 0 else None

    def _per_group(self, key: str, value: PerGroup) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, Sequence):
            return [float(value)] * groups
        if len(value) != groups:
            raise SchedulerError(
                f"scheduler.params.{key} has {len(value)} values, but the optimizer has {groups} parameter groups"
            )
        return [float(v) for v in value]

    def _optimizer_lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @staticmethod
    def _positive(key: str, value: int) -> int:
        if value <= 0:
            raise SchedulerError(f"scheduler.params.{key} is {value}; it must be > 0")
        return value


class _Warmup:
    """Factor that increases from 0 to 1 over the first iterations, logarithmically or linearly."""

    def __init__(self, num_steps: int, kind: str) -> None:
        if not isinstance(num_steps, int) or num_steps < 0:
            raise SchedulerError(f"scheduler.params.warmup_num_steps is {num_steps!r}; it must be an integer >= 0")
        if kind not in WARMUP_TYPES:
            warn_once(f"scheduler.params.warmup_type {kind!r} is not one of {', '.join(WARMUP_TYPES)}; log is used")
        # A division by ln(1) = 0 is impossible, so the shortest warmup takes two steps.
        self.num_steps = max(2, num_steps) if num_steps else 0
        self.linear = kind == "linear"

    def __call__(self, iteration: int) -> float:
        if iteration >= self.num_steps or not self.num_steps:
            return 1.0
        iteration = max(0, iteration)
        return iteration / self.num_steps if self.linear else math.log(iteration + 1) / math.log(self.num_steps)

    def warn_unless_it_ends(self, total_num_steps: int) -> None:
        if total_num_steps < self.num_steps:
            warn_once(
                f"scheduler.params.total_num_steps {total_num_steps} is below warmup_num_steps {self.num_steps}: "
                "training ends before the highest rate is reached"
            )


class WarmupLR(LRSchedule):
    """Warmup from `warmup_min_lr` to `warmup_max_lr`, then constant."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Set the first rates of the groups. All other arguments are keys of `scheduler.params`.

        Args:
            optimizer: a torch optimizer, or a wrapper with one as `.optimizer`.
            warmup_min_lr: first rate: one number, or one per group.
            warmup_max_lr: last rate; None: the optimizer's rate.
            warmup_num_steps: length of the warmup in optimizer steps; 1 counts as 2, 0: no warmup.
            warmup_type: "log" or "linear"; any other value: "log" with a warning.
            last_batch_iteration: last finished iteration.

        Raises:
            SchedulerError: a value is out of range or a list has the wrong length.
        """
        super().__init__(optimizer, last_batch_iteration)
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self.min_lrs = self._per_group("warmup_min_lr", warmup_min_lr)
        highest = self._optimizer_lrs() if warmup_max_lr is None else warmup_max_lr
        self.max_lrs = self._per_group("warmup_max_lr", highest)
        self._apply()

    def get_lr(self) -> list[float]:
        """Return min + (max - min) * g for each group.

        At iteration i of a warmup of W steps, g is ln(i + 1) / ln(W) or i / W (0 at i = -1). Afterwards g is 1, or
        with `WarmupDecayLR` decays linearly to 0.
        """
        factor = self._factor()
        return [low + (high - low) * factor for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _factor(self) -> float:
        return self.warmup(self.last_batch_iteration)


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, followed by a linear decay to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Set the first rates of the groups. Other arguments and errors as in `WarmupLR`.

        Args:
            total_num_steps: total optimizer steps, including warmup.
            warmup_min_lr: first and last rate: one number, or one per group.
        """
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self.warmup.warn_unless_it_ends(total_num_steps)

    def _factor(self) -> float:
        rise = self.warmup.num_steps
        if self.last_batch_iteration < rise:
            return self.warmup(self.last_batch_iteration)
        return max(0.0, (self.total_num_steps - self.last_batch_iteration) / max(1, self.total_num_steps - rise))


class WarmupCosineLR(LRSchedule):
    """Initial rates of the optimizer times a ratio that increases to 1, then decays as a cosine to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Set the first rates of the groups (0 if there is a warmup). Other arguments and errors as in `WarmupLR`.

        Args:
            total_num_steps: total optimizer steps, including warmup.
            warmup_min_ratio: ratio in the first step.
            cos_min_ratio: ratio in the last step.
        """
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self.org_lrs = self._optimizer_lrs()
        self.warmup.warn_unless_it_ends(total_num_steps)
        self._apply()

    def get_lr_ratio(self) -> float:
        """Return the ratio of the current iteration i.

        Warmup of W steps: m + (1 - m) g (0 at i = -1), with m = `warmup_min_ratio` and g as in `WarmupLR.get_lr`.
        Afterwards: c + (1 - c) (1 + cos(pi p)) / 2, with c = `cos_min_ratio`, p = min(1, (i - W + 1) / max(1, T - W))
        and T = `total_num_steps`.
        """
        iteration, rise = self.last_batch_iteration, self.warmup.num_steps
        if iteration < 0 and rise:
            return 0.0
        if iteration < rise:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self.warmup(iteration)
        progress = min(1.0, (iteration - rise + 1) / max(1, self.total_num_steps - rise))
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2

    def get_lr(self) -> list[float]:
        """Return each group's rate at the construction of the schedule, times `get_lr_ratio()`."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


class LRRangeTest(LRSchedule):
    """Learning-rate range test: the rate increases, to find the largest useful one (Smith, 2017, section 3.3)."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        """Set the first rates of the groups. All other arguments are keys of `scheduler.params`.

        Args:
            optimizer: a torch optimizer, or a wrapper with one as `.optimizer`.
            lr_range_test_min_lr: first rate: one number, or one per group.
            lr_range_test_step_size: optimizer steps of one increase.
            lr_range_test_step_rate: size of an increase, relative to the first rate.
            lr_range_test_staircase: whether to increase only once every `lr_range_test_step_size` steps.
            last_batch_iteration: last finished iteration.

        Raises:
            SchedulerError: a value is out of range or a list has the wrong length.
        """
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = self._positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._apply()

    def get_lr(self) -> list[float]:
        """Return min * (1 + step_rate * n), with n = (iteration + 1) / step_size, rounded down for a staircase."""
        interval = (self.last_batch_iteration + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * factor for lr in self.min_lr]


class OneCycle(LRSchedule):
    """One increase and decrease of the rate, with inverse momentum, followed by a decay (1cycle; Smith, 2018)."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        """Set the first rates and momenta of the groups. All other arguments are keys of `scheduler.params`.

        Args:
            optimizer: a torch optimizer, or a wrapper with one as `.optimizer`.
            cycle_min_lr: rate at both ends of the cycle: one number, or one per group.
            cycle_max_lr: rate at the top of the cycle: one number, or one per group.
            decay_lr_rate: decay of the rate in each `decay_step_size` after the cycle; see `get_lr`.
            cycle_first_step_size: optimizer steps of the increase.
            cycle_second_step_size: optimizer steps of the decrease; None: as many as of the increase.
            cycle_first_stair_count: number of stairs of the increase; 0: linear.
            cycle_second_stair_count: number of stairs of the decrease; None: as many as of the increase.
            decay_step_size: optimizer steps of one decay; 0: no decay.
            cycle_momentum: whether to change the momentum (first beta) too, if all groups have one.
            cycle_min_mom: momentum at the top of the cycle.
            cycle_max_mom: momentum at both ends of the cycle.
            decay_mom_rate: increase of the momentum in each `decay_step_size` after the cycle; see `get_mom`.
            last_batch_iteration: last finished iteration.

        Raises:
            SchedulerError: a value is out of range or a list has the wrong length.
        """
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr)
        self.first_size = self._positive("cycle_first_step_size", cycle_first_step_size)
        self.second_size = self._positive("cycle_second_step_size", cycle_second_step_size or cycle_first_step_size)
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_mom, self.max_mom = cycle_min_mom, cycle_max_mom
        has_momentum = all("betas" in group or group.get("momentum") for group in self.optimizer.param_groups)
        if cycle_momentum and not has_momentum:
            log_once(f"OneCycle: {type(self.optimizer).__name__} has no momentum here, so only the rate is cycled")
        self.cycle_momentum = cycle_momentum and has_momentum
        self._apply()

    def get_lr(self) -> list[float]:
        """Return min + (max - min) * height in the cycle, then min / (1 + decay_lr_rate * decays), for each group."""
        height, decays = self._position()
        shrink = 1 + self.decay_lr_rate * decays
        return [(low + (high - low) * height) / shrink for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[float] | None:
        """Return max - (max - min) * height in the cycle, then max * (1 + decay_mom_rate * decays), for each group.

        None if the momentum does not change.
        """
        if not self.cycle_momentum:
            return None
        height, decays = self._position()
        momentum = (self.max_mom - (self.max_mom - self.min_mom) * height) * (1 + self.decay_mom_rate * decays)
        return [momentum] * len(self.optimizer.param_groups)

    def _position(self) -> tuple[float, float]:
        """Return the height in the cycle (0 to 1 and back to 0), and the number of decays since its end."""
        done = self.last_batch_iteration + 1
        length = self.first_size + self.second_size
        if done >= length:
            return 0.0, (done - length) / self.decay_step_size if self.decay_step_size else 0.0
        if done <= self.first_size:
            return self._stairs(done / self.first_size, self.first_stairs), 0.0
        return 1 - self._stairs((done - self.first_size) / self.second_size, self.second_stairs), 0.0

    def _apply(self) -> list[float]:
        for group, momentum in zip(self.optimizer.param_groups, self.get_mom() or [], strict=False):
            if "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
            else:
                group["momentum"] = momentum
        return super()._apply()

    @staticmethod
    def _stairs(progress: float, count: int) -> float:
        return math.floor(progress * count) / count if count else progress


SCHEDULES: dict[str, type[LRSchedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(SCHEDULES)
PARAMETERS = {name: list(inspect.signature(cls).parameters.values())[1:] for name, cls in SCHEDULES.items()}
"""Arguments of each schedule, without the optimizer."""


def build_scheduler(name: str, params: Mapping[str, Any], optimizer: Any) -> Any:
    """Create the schedule of `scheduler.type` and `scheduler.params`.

    Args:
        name: one of `VALID_LR_SCHEDULES`, or the exact name of a class of torch.optim.lr_scheduler (`scheduler.type`).
        params: arguments of the class (`scheduler.params`).
        optimizer: a torch optimizer, or a wrapper with one as `.optimizer`.

    Raises:
        SchedulerError: an unknown name or parameter, or a value that the class rejects.
    """
    module = torch.optim.lr_scheduler
    classes: dict[str, type] = {
        other: cls
        for other, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, module.LRScheduler) and not other.startswith(("_", "LRScheduler"))
    }
    classes |= SCHEDULES
    if name not in classes:
        raise SchedulerError(
            f"scheduler.type {name!r} is unknown{nearest(name, classes)}; use one of {', '.join(SCHEDULES)} or a class "
            "of torch.optim.lr_scheduler"
        )
    return construct("scheduler", classes[name], get_torch_optimizer(optimizer), params, SchedulerError)


LR_SCHEDULE = "lr_schedule"
# Parameter with the highest, or only, rate of each schedule.
PEAK_RATE = {
    "LRRangeTest": "lr_range_test_min_lr",
    "OneCycle": "cycle_max_lr",
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and an option for each parameter of the schedules.

    Args:
        parser: parser that is extended in place.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("Convergence Tuning", "learning-rate schedule")
    group.add_argument(f"--{LR_SCHEDULE}", choices=list(SCHEDULES), help="the schedule")
    for name, parameter in {p.name: p for parameters in PARAMETERS.values() for p in parameters}.items():
        annotation = str(parameter.annotation)
        kind: Any = int if "int" in annotation else str if annotation == "str" else float
        if annotation == "bool":
            kind = lambda text: text.lower() in ("1", "true", "yes")  # noqa: E731 - takes every text
        group.add_argument(f"--{name}", type=kind, help="scheduler.params of that name")
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the process's command line with `add_tuning_arguments`; returns the options and the other arguments."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Copy the options in `args` that are not None into `params` (`scheduler.params`), in place."""
    names = {parameter.name for parameters in PARAMETERS.values() for parameter in parameters}
    params.update({name: value for name, value in vars(args).items() if name in names and value is not None})


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return the `scheduler` section of the configuration for the options of `add_tuning_arguments`.

    Args:
        args: parsed options.

    Returns:
        The section and None, or None and an error message.
    """
    name = getattr(args, LR_SCHEDULE, None)
    if name not in SCHEDULES:
        return None, f"--{LR_SCHEDULE} is {name!r}; use one of {', '.join(SCHEDULES)}"
    options = {p.name: getattr(args, p.name, None) for p in PARAMETERS[name]}
    return {"type": name, "params": {key: value for key, value in options.items() if value is not None}}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """Return the initial or maximum rate of a `scheduler` section.

    Args:
        config: the section.

    Returns:
        The rate (a list for one per group) and "", or None and an error message.
    """
    key = PEAK_RATE.get(config.get("type", ""))
    params = config.get("params") or {}
    if key is None or key not in params:
        return None, f"scheduler.type {config.get('type')!r} with params {params} names no learning rate"
    return params[key], ""
