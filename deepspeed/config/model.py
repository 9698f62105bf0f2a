"""The base of typed sections, ours and those that users make of it, and small readers of plain dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, model_validator

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.foundation.log import warn_once

AUTO = "auto"


class DeepSpeedConfigModel(BaseModel):
    """A block of a configuration as a typed object: `class Mine(DeepSpeedConfigModel): size: int = 1`.

    Unknown names are refused. A value "auto" stands for the field's default, unless `strict=True` is given. A field
    whose `json_schema_extra` says `"deprecated": True` is accepted with one warning; with `"new_param": NAME` (dotted
    where it lies in a block) its value counts for that field, mapped by `"new_param_fn"`.

    Raises:
        pydantic.ValidationError: a name, type or value is wrong; it is a ValueError.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _respell(cls, data: Any) -> Any:
        return cls.respelled(cast("dict[str, Any]", data)) if isinstance(data, dict) else data

    @classmethod
    def respelled(cls, data: dict[str, Any]) -> dict[str, Any]:
        """What was given, under the names and values that the fields take."""
        if data.get("strict") is True and "strict" not in cls.model_fields:
            return {name: value for name, value in data.items() if name != "strict"}
        taken = {name: value for name, value in data.items() if not _is_auto(value) and name != "strict"}
        if "strict" in cls.model_fields and "strict" in data:
            taken["strict"] = data["strict"]
        for name, field in cls.model_fields.items():
            extra = field.json_schema_extra
            said = cast("dict[str, Any]", extra) if isinstance(extra, dict) else {}
            spelled = next((one for one in (name, field.alias) if one in taken), None)
            if spelled is not None and said.get("deprecated"):
                _hand_on(cls, taken, spelled, said)
        return taken


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == AUTO


def _hand_on(cls: type[BaseModel], taken: dict[str, Any], old: str, said: dict[str, Any]) -> None:
    """Let the value of a deprecated field count for the one that took its place."""
    new: str = said.get("new_param") or ""
    advice = said.get("deprecated_msg") or (f"use {new}" if new else "leave it out")
    warn_once(f"{cls.__name__}.{old} is deprecated: {advice}")
    if not new or said.get("set_new_param") is False:
        return
    change: Callable[[Any], Any] = said.get("new_param_fn") or (lambda value: value)
    *blocks, last = new.split(".")
    home: Any = taken
    for block in blocks:
        home = home.setdefault(block, {})
    if isinstance(home, dict) and last in home:
        raise ValueError(f"{old} is deprecated, and {new}, which took its place, is given as well")
    if isinstance(home, dict):
        home[last] = change(taken[old])


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """The value under a name, else the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of pairs, for `json.load(object_pairs_hook=…)`.

    Raises:
        DeepSpeedConfigError: a name stands twice.
    """
    made = dict(ordered_pairs)
    if len(made) < len(ordered_pairs):
        names = [name for name, _ in ordered_pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DeepSpeedConfigError(f"duplicate keys in one object: {', '.join(twice)}")
    return made
