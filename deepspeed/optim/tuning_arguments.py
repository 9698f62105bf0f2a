"""Command-line options for the five schedules, for scripts that tune them without editing the JSON."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from deepspeed.optim.lr_schedules import SCHEDULES

LR_SCHEDULE = "lr_schedule"
# The parameter that holds a schedule's highest, or only, rate.
PEAK_RATE = {
    "LRRangeTest": "lr_range_test_min_lr",
    "OneCycle": "cycle_max_lr",
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
}


def _parameters(schedule: str) -> list[inspect.Parameter]:
    return list(inspect.signature(SCHEDULES[schedule]).parameters.values())[1:]


def _to_bool(text: str) -> bool:
    return text.lower() in ("1", "true", "yes")


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and an option for each parameter of the schedules.

    Args:
        parser: extended in place.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("Convergence Tuning", "learning-rate schedule")
    group.add_argument(f"--{LR_SCHEDULE}", choices=list(SCHEDULES), help="the schedule")
    known = {parameter.name: parameter for name in SCHEDULES for parameter in _parameters(name)}
    for name, parameter in known.items():
        annotation = str(parameter.annotation)
        kind = (
            _to_bool if annotation == "bool" else int if "int" in annotation else str if annotation == "str" else float
        )
        group.add_argument(f"--{name}", type=kind, help="scheduler.params of that name")
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The options of `add_tuning_arguments` on the command line, and what else stands there."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Put every option that was given into `params` (`scheduler.params`)."""
    names = {parameter.name for name in SCHEDULES for parameter in _parameters(name)}
    params.update({name: value for name, value in vars(args).items() if name in names and value is not None})


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """The `scheduler` section that the options ask for.

    Args:
        args: parsed options.

    Returns:
        The section and None, or None and what is wrong.
    """
    name = getattr(args, LR_SCHEDULE, None)
    if name not in SCHEDULES:
        return None, f"--{LR_SCHEDULE} is {name!r}; use one of {', '.join(SCHEDULES)}"
    given = {p.name: getattr(args, p.name, None) for p in _parameters(name)}
    return {"type": name, "params": {key: value for key, value in given.items() if value is not None}}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """The rate that a `scheduler` section starts from or rises to.

    Args:
        config: the section.

    Returns:
        The rate and "", or None and what is missing.
    """
    key = PEAK_RATE.get(config.get("type", ""))
    params = config.get("params", {})
    if key is None or key not in params:
        return None, f"scheduler.type {config.get('type')!r} with params {params} names no learning rate"
    return params[key], ""
