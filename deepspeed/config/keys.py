"""Conversion of the user's keys to canonical names: aliases, deprecated names, "auto" and unknown keys."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from deepspeed.config.base_model import AUTO, Section, is_auto
from deepspeed.config.errors import Problem, near, nearest, show, wrong
from deepspeed.config.schema import Child, child_of, default_of, kind_of, spellings
from deepspeed.config.sections.top import TopLevel
from deepspeed.errors import DeepSpeedConfigError

TOLERATED = ("msamp",)  # sent by Accelerate for another library
_CPU = {True: "cpu", False: "none"}
_SWITCHES = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
_OFFLOAD_OPTIMIZER, _OFFLOAD_PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"


@dataclass(frozen=True)
class MovedKey:
    """Deprecated key that was moved to the keys `new`; `values` maps old values to new ones (None: unchanged)."""

    old: str
    new: tuple[str, ...]
    values: Mapping[Any, Any] | None = None


MOVED = (
    MovedKey("zero_optimization.cpu_offload", (f"{_OFFLOAD_OPTIMIZER}.device",), _CPU),
    MovedKey("zero_optimization.cpu_offload_param", (f"{_OFFLOAD_PARAM}.device",), _CPU),
    MovedKey("zero_optimization.cpu_offload_params", (f"{_OFFLOAD_PARAM}.device",), _CPU),
    MovedKey(
        "zero_optimization.cpu_offload_use_pin_memory",
        (f"{_OFFLOAD_OPTIMIZER}.pin_memory", f"{_OFFLOAD_PARAM}.pin_memory"),
    ),
    MovedKey("allgather_size", ("zero_optimization.allgather_bucket_size",)),
)


@dataclass
class Reading:
    """Configuration with canonical key names, before type checks.

    Attributes:
        tree: the user's values, under canonical names; null values are omitted.
        origins: origin of each value ("given", "deprecated: old name", "auto: ..."), by canonical path.
        spelled: path as the user wrote it, by canonical path, where the two differ.
        autos: canonical paths of the values "auto", which are not in the tree.
        tolerated: values that are accepted but not read, by the user's path.
        problems: problems found so far.
        warnings: lines to log once.
    """

    tree: dict[str, Any] = field(default_factory=lambda: {})
    origins: dict[str, str] = field(default_factory=lambda: {})
    spelled: dict[str, str] = field(default_factory=lambda: {})
    autos: list[str] = field(default_factory=lambda: [])
    tolerated: dict[str, Any] = field(default_factory=lambda: {})
    problems: list[Problem] = field(default_factory=lambda: [])
    warnings: list[str] = field(default_factory=lambda: [])

    def name(self, path: str) -> str:
        """Return a path as the user wrote it."""
        return self.spelled.get(path, path)

    def find(self, path: str) -> Any:
        """Return the value at a canonical path, or None if the value was not given."""
        here: Any = self.tree
        for part in path.split("."):
            here = cast("dict[str, Any]", here).get(part) if isinstance(here, dict) else None
        return here

    def enabled(self, *sections: str) -> bool:
        """Return whether the key `enabled` of any of the sections is true."""
        return any(self.find(f"{section}.enabled") is True for section in sections)

    def put(self, path: str, value: object, origin: str) -> None:
        """Set a value and its origin, and create missing blocks; if a parent is not a block, only the origin is set."""
        here: Any = self.tree
        *blocks, last = path.split(".")
        for block in blocks:
            if isinstance(here, dict):
                here = cast("dict[str, Any]", here).setdefault(block, {})
        if isinstance(here, dict):
            here[last] = value
        self.origins[path] = origin

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Reading:
        """Read a configuration as the user wrote it, and collect its problems. The argument is not changed.

        Raises:
            DeepSpeedConfigError: the configuration is nested too deeply, or contains itself.
        """
        reading = cls()
        settings = dict(raw)
        for name in [
            name for name in settings if name in TOLERATED or (isinstance(cast(object, name), str) and "." in name)
        ]:
            reading.tolerated[name] = settings.pop(name)
        try:
            settings = cast("dict[str, Any]", _plain(settings))
        except RecursionError:
            raise DeepSpeedConfigError("The configuration is nested too deeply, or holds itself") from None
        stage = settings.get("zero_optimization")
        if isinstance(stage, bool):
            settings["zero_optimization"] = {"stage": int(stage)}
            reading.spelled["zero_optimization.stage"] = "zero_optimization"
            reading.warnings.append(
                f'"zero_optimization": {str(stage).lower()} is deprecated: write {{"stage": {int(stage)}}}'
            )
        reading._take_apex(settings)
        reading._take_clipping(settings)
        moved = reading._take_moved(settings)
        reading.tree = reading._read_section(TopLevel, settings, "", "")
        for old, new, value in moved:
            if reading.find(new) is not None:
                reading.problems.append(wrong(old, value, f'deprecated, and its new name "{new}" is given as well'))
                continue
            reading.put(new, value, f"deprecated: {old}")
        return reading

    def _take_apex(self, settings: dict[str, Any]) -> None:
        """Replace an enabled `amp` (NVIDIA Apex) by torch's autocast in bf16, in place; `opt_level` O0 only warns."""
        block = settings.get("amp")
        if not isinstance(block, dict):
            return
        apex = cast("dict[str, Any]", block)
        level = apex.get("opt_level") or "O1"
        enabled = apex.get("enabled")
        enabled = enabled if isinstance(enabled, bool) else _SWITCHES.get(str(enabled).lower())
        settings["amp"] = {name: value for name, value in apex.items() if name in ("enabled", "opt_level")}
        if enabled is not True or level not in ("O0", "O1", "O2", "O3"):
            return  # off, or for the type check to name
        if level == "O0":
            self.warnings.append('"amp" with opt_level O0 is training in fp32: leave it out')
        elif isinstance(settings.get("torch_autocast"), dict):
            self.problems.append(wrong("amp.enabled", True, '"torch_autocast" takes its place, and is given as well'))
        else:
            settings["torch_autocast"] = {"enabled": True, "dtype": "bf16"}
            self.spelled["torch_autocast.enabled"] = "amp.enabled"
            self.warnings.append(
                f'"amp" (Apex, {level}) is deprecated: write "torch_autocast": {{"enabled": true, "dtype": "bf16"}}; '
                "that is what runs, and its other keys have no effect"
            )

    def _take_clipping(self, settings: dict[str, Any]) -> None:
        """In `settings`, move the optimizer's `max_grad_norm` to `gradient_clipping`, or delete it if both exist."""
        optimizer = settings.get("optimizer")
        params = cast("dict[str, Any]", optimizer).get("params") if isinstance(optimizer, dict) else None
        if not isinstance(params, dict) or "max_grad_norm" not in params:
            return
        limit, path = cast("dict[str, Any]", params).pop("max_grad_norm"), "optimizer.params.max_grad_norm"
        if limit is None or is_auto(limit):
            return
        if settings.get("gradient_clipping") is not None:
            self.warnings.append(
                f'"{path}" = {show(limit)} is not read: '
                f'"gradient_clipping" = {show(settings["gradient_clipping"])} counts'
            )
            return
        settings["gradient_clipping"] = limit
        self.spelled["gradient_clipping"] = path
        self.warnings.append(
            f'"{path}" is no argument of an optimizer: write "gradient_clipping", which is what it sets'
        )

    def _take_moved(self, settings: dict[str, Any]) -> list[tuple[str, str, Any]]:
        taken: list[tuple[str, str, Any]] = []
        for moved in MOVED:
            block, _, name = moved.old.rpartition(".")
            home = settings.get(block) if block else settings
            if not isinstance(home, dict) or name not in home:
                continue
            value = cast("dict[str, Any]", home).pop(name)
            if value is None or is_auto(value):
                continue
            if moved.values is not None and not isinstance(value, bool):
                self.problems.append(
                    wrong(moved.old, value, f'deprecated for "{moved.new[0]}"; expected true or false')
                )
                continue
            self.warnings.append(f'"{moved.old}" is deprecated: write "{moved.new[0]}"')
            taken += [(moved.old, new, moved.values[value] if moved.values else value) for new in moved.new]
        return taken

    def _read_section(
        self, section: type[Section], settings: dict[Any, Any], path: str, written: str
    ) -> dict[str, Any]:
        known = spellings(section)
        passes_unknown = section.model_config.get("extra") == "allow"
        tree: dict[str, Any] = {}
        for name, value in settings.items():
            as_written = f"{written}.{name}" if written else str(name)
            if name not in known and not (passes_unknown and isinstance(name, str)):
                self._unknown(section, str(name), as_written, value)
                continue
            canonical, deprecated = known.get(name, (name, False))
            here = f"{path}.{canonical}" if path else canonical
            if canonical in tree or here in self.autos:
                earlier = self.name(here)
                self.problems.append(wrong(as_written, value, f'given twice: "{earlier}" is the same key'))
                continue
            if value is None:
                continue
            if as_written != here:
                self.spelled.setdefault(here, as_written)
            if deprecated:
                self.warnings.append(f'"{as_written}" is deprecated: write "{here}"')
            info = section.model_fields.get(canonical)
            if here == "wire" and is_auto(value):
                value = dict.fromkeys(("gradients", "weights"), "measured")
            if is_auto(value) and (info is None or default_of(info) != AUTO):
                self.autos.append(here)
                continue
            self.origins[here] = f"deprecated: {as_written}" if deprecated else "given"
            child = child_of(info) if info else None
            if info is not None and child is None:
                value = self._meant(info.annotation, value, as_written)
            tree[canonical] = value if child is None else self._read_child(child, value, (here, as_written))
        return tree

    def _unknown(self, section: type[Section], name: str, as_written: str, value: Any) -> None:
        """Record an unknown name as a problem, or as a warning if the section has open names and no similar key."""
        close = near(name, value, section)
        if section.open_names and close is None:
            self.tolerated[as_written] = value
            self.warnings.append(f"{wrong(as_written, value, 'unknown key, not read').text}; {nearest(name, section)}")
            return
        hint = nearest(name, section) if close is None else f'did you mean "{close}"?'
        self.problems.append(wrong(as_written, value, f"unknown key; {hint}"))

    def _meant(self, annotation: Any, value: Any, as_written: str) -> Any:
        """Convert a clear value of a wrong type, with a warning: 0, 1 or a word for a bool, a quoted number."""
        kinds = set(kind_of(annotation).split(" or "))
        meant: Any = None
        if "true" in kinds and isinstance(value, (int, str)) and not isinstance(value, bool):
            meant = _SWITCHES.get(str(value).lower())
        elif isinstance(value, str) and "string" not in kinds and kinds & {"number", "whole number"}:
            meant = self._number(value, fractions="number" in kinds)
        if meant is None:
            return value
        self.warnings.append(f"{as_written} = {show(value)}: taken for {show(meant)}")
        return meant

    @staticmethod
    def _number(text: str, *, fractions: bool) -> int | float | None:
        try:
            number = float(text)
        except ValueError:
            return None
        if not math.isfinite(number):
            return None
        return int(number) if number.is_integer() else number if fractions else None

    def _read_child(self, child: Child, value: Any, paths: tuple[str, str]) -> Any:
        """Read the sections inside a value; values of another type are left to the type check."""
        here, written = paths
        if child.shape in ("block", "kwargs") and isinstance(value, dict):
            return self._read_section(child.section, cast("dict[Any, Any]", value), here, written)
        if child.shape == "list" and isinstance(value, list):
            block = Child(child.section, "block")
            items = enumerate(cast("list[Any]", value))
            return [self._read_child(block, item, (f"{here}.{index}", f"{written}[{index}]")) for index, item in items]
        if child.shape == "named" and isinstance(value, dict):
            block = Child(child.section, "block")
            named = cast("dict[Any, Any]", value).items()
            return {
                name: self._read_child(block, item, (f"{here}.{name}", f"{written}.{name}")) for name, item in named
            }
        return value


def _plain(value: Any) -> Any:
    """Convert a value to plain JSON types: clients also pass tuples, enums and numpy numbers."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)
