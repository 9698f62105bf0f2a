"""A user's training script as the planner sees it: its JSON, the flags that repeat keys of it, how it is started."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.sections.search import Autotuning
from deepspeed.config.source import load_raw
from deepspeed.errors import ArgumentError
from deepspeed.planner.program import OUTSIDE
from deepspeed.planner.trials import Command

_FLAGS = ("--deepspeed_config", "--deepspeed", "--deepscale_config")
_MICRO, _STEPS, _TRAIN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
_MAPPED = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Script:
    """What `deepspeed --autotuning` was given.

    Args:
        options: of the launcher, without --autotuning.
        name: of the script.
        arguments: of the script.
        ranks: that the options start.
    """

    options: Sequence[str]
    name: str
    arguments: Sequence[str]
    ranks: int

    @property
    def _place(self) -> int:
        """Where in the arguments the JSON is."""
        for at, word in enumerate(self.arguments):
            flag, _, joined = word.partition("=")
            if flag in _FLAGS and joined.endswith(".json"):
                return at
            if word in _FLAGS and at + 1 < len(self.arguments) and self.arguments[at + 1].endswith(".json"):
                return at + 1
        raise ArgumentError(
            "--autotuning needs the JSON in the script's arguments: --deepspeed_config, or --deepspeed, and a FILE.json"
        )

    @property
    def json(self) -> Path:
        """The user's JSON.

        Raises:
            ArgumentError: the arguments name none.
        """
        return Path(self.arguments[self._place].rpartition("=")[2])

    def base(self) -> tuple[dict[str, Any], Autotuning]:
        """The JSON as it is written, and its `autotuning` block.

        Raises:
            ArgumentError: the block is not enabled.
            DeepSpeedConfigError: there is no such file, or the block is wrong.
        """
        found = load_raw(str(self.json))
        block = DeepSpeedConfig.for_init({"autotuning": found.get("autotuning") or {}}).top.autotuning
        if not block.enabled:
            raise ArgumentError(f'--autotuning needs "autotuning": {{"enabled": true}} in {self.json}')
        return found, block

    def with_json(self, path: str, config: Mapping[str, Any], flags: Mapping[str, str]) -> list[str]:
        """The arguments with another JSON.

        Args:
            path: of that.
            config: what is in it.
            flags: by key, the script's own, which get the same values.
        """
        words, at = list(self.arguments), self._place
        before = words[at].rpartition("=")
        words[at] = f"{before[0]}{before[1]}{path}"
        for key, flag in flags.items():
            value = str(_of(config, key))
            places = [where for where, word in enumerate(words) if word.partition("=")[0] == flag]
            if places and "=" in words[places[-1]]:
                words[places[-1]] = f"{flag}={value}"
            elif places:
                words[places[-1] + 1 : places[-1] + 2] = [value]
            else:
                words += [flag, value]
        return words

    def command(self, config: Mapping[str, Any], flags: Mapping[str, str], path: str = "{config}") -> Command:
        """Starts the script with a JSON; see `with_json`."""
        return Command(self.options, [self.name, *self.with_json(path, config, flags)])

    def train_batch(self, base: Mapping[str, Any], flags: Mapping[str, str]) -> tuple[int, int]:
        """The global batch, and the user's micro-batch (0 where nobody says), of the JSON or of the script's own flags.

        Raises:
            ArgumentError: neither says it.
        """
        train, micro, steps = (self._number(base, flags, key) for key in (_TRAIN, _MICRO, _STEPS))
        if not train and micro:
            train = micro * (steps or 1) * self.ranks
        if not train:
            raise ArgumentError(
                f"the global batch is not known: give {_TRAIN}, or {_MICRO}, as a number in {self.json}, or name the "
                f"script's own flags in autotuning.arg_mappings"
            )
        if not micro and steps:
            micro = train // (steps * self.ranks)
        return train, micro

    def _number(self, base: Mapping[str, Any], flags: Mapping[str, str], key: str) -> int:
        value = base.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, (int, float)):
            return int(value)
        flag, words = flags.get(key), list(self.arguments)
        for at, word in enumerate(words):
            name, _, joined = word.partition("=")
            told = joined or (words[at + 1] if at + 1 < len(words) else "")
            if flag and name == flag and _MAPPED.fullmatch(told):
                return int(told)
        return 0


def flags_of(block: Autotuning) -> dict[str, str]:
    """`arg_mappings`: by key of the JSON, the script's flag; what names no flag is left out."""
    return {key.strip(): str(flag).strip() for key, flag in (block.arg_mappings or {}).items() if flag}


def inside(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what acts on the outside: a trial writes no events and no pictures."""
    return {key: value for key, value in config.items() if key not in OUTSIDE}


def _of(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
