"""Base classes and value types of the typed configuration sections."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.foundation.log import warn_once

AUTO = "auto"


class DeepSpeedConfigModel(BaseModel):
    """Base class of typed configuration blocks: `class Mine(DeepSpeedConfigModel): size: int = 1`.

    Unknown names are errors. The value "auto" means the field's default, unless `strict=True` is passed. A field with
    `"deprecated": True` in its `json_schema_extra` is accepted with one warning. With `"new_param": NAME` in addition
    (dotted for fields in blocks), the field NAME also gets the value, converted by the optional `"new_param_fn"`.

    Raises:
        pydantic.ValidationError: a name, type or value is wrong; the error is a ValueError.
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
        """Return a copy of the input, prepared for validation.

        Without `strict=True`, values "auto" are dropped, and values of deprecated fields also set their new fields.
        """
        if data.get("strict") is True and "strict" not in cls.model_fields:
            return {name: value for name, value in data.items() if name != "strict"}
        taken = {name: value for name, value in data.items() if not is_auto(value) and name != "strict"}
        if "strict" in cls.model_fields and "strict" in data:
            taken["strict"] = data["strict"]
        for name, field in cls.model_fields.items():
            extra = field.json_schema_extra
            extras = cast("dict[str, Any]", extra) if isinstance(extra, dict) else {}
            spelled = next((spelling for spelling in (name, field.alias) if spelling in taken), None)
            if spelled is not None and extras.get("deprecated"):
                cls._replace_deprecated(taken, spelled, extras)
        return taken

    @classmethod
    def _replace_deprecated(cls, taken: dict[str, Any], old: str, extras: dict[str, Any]) -> None:
        """Set the new field of a deprecated field in `taken`, in place; ValueError if both fields are given."""
        new: str = extras.get("new_param") or ""
        advice = extras.get("deprecated_msg") or (f"use {new}" if new else "leave it out")
        warn_once(f"{cls.__name__}.{old} is deprecated: {advice}")
        if not new or extras.get("set_new_param") is False:
            return
        change: Callable[[Any], Any] = extras.get("new_param_fn") or (lambda value: value)
        *blocks, last = new.split(".")
        home: Any = taken
        for block in blocks:
            home = home.setdefault(block, {})
        if isinstance(home, dict) and last in home:
            raise ValueError(f"{old} is deprecated, and {new}, which took its place, is given as well")
        if isinstance(home, dict):
            home[last] = change(taken[old])


def is_auto(value: object) -> bool:
    return isinstance(value, str) and value == AUTO


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Return `param_dict[param_name]`, or `param_default_value` if it is missing."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Convert pairs to a dict, for `json.load(object_pairs_hook=…)`.

    Raises:
        DeepSpeedConfigError: a name occurs twice.
    """
    merged = dict(ordered_pairs)
    if len(merged) < len(ordered_pairs):
        names = [name for name, _ in ordered_pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DeepSpeedConfigError(f"duplicate keys in one object: {', '.join(twice)}")
    return merged


Status = Literal["implemented", "moot by design", "not available yet"]


@dataclass(frozen=True)
class Note:
    """Metadata of one configuration key.

    Attributes:
        meaning: one-phrase description.
        status: implementation status of the key.
        instead: reason why the key has no effect, or its replacement; "" for other keys.
        aliases: other names, accepted without a warning.
        deprecated: old names, accepted with one warning.
        idle: values of an unavailable key, besides the default, that are accepted because they request no feature.
    """

    meaning: str
    status: Status = "implemented"
    instead: str = ""
    aliases: tuple[str, ...] = ()
    deprecated: tuple[str, ...] = ()
    idle: tuple[Any, ...] = ()


class Section(DeepSpeedConfigModel):
    """Base class of the blocks of the JSON: immutable, with strict names and types.

    `switch` is the dotted path, inside the block, of the key that enables the block. With `open_names`, an unknown name
    in the JSON is ignored with a warning, unless the name resembles a key of the block.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        validate_default=False,
        validate_assignment=False,
        use_enum_values=False,
        arbitrary_types_allowed=False,
        populate_by_name=False,
        defer_build=True,  # the schema is built at the first use, not at import
    )
    switch: ClassVar[str] = ""
    open_names: ClassVar[bool] = False

    @classmethod
    def respelled(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the input with canonical names, values of enum members, and without "auto" values."""
        notes = {name: note_of(field) for name, field in cls.model_fields.items()}
        names = {old: name for name, note in notes.items() for old in (*note.aliases, *note.deprecated)}
        renamed = {names.get(name, name): value for name, value in super().respelled(data).items()}
        return {name: value.value if isinstance(value, Enum) else value for name, value in renamed.items()}


def _field(default: Any, note: Note, limits: dict[str, Any]) -> Any:
    extra: Any = {"note": note}
    if isinstance(default, type) and issubclass(default, Section):
        limits = {"default_factory": default}
    else:
        limits = {"default": default, **limits}
    info: Any = Field(json_schema_extra=extra, **limits)
    return info


def key(
    default: Any, meaning: str, *, aliases: Sequence[str] = (), deprecated: Sequence[str] = (), **limits: Any
) -> Any:
    """Define an implemented key of a section.

    Args:
        default: default value, or a section class, for a key that is a block.
        meaning: one-phrase description.
        aliases: other names, accepted without a warning.
        deprecated: old names, accepted with one warning.
        limits: limits of pydantic's `Field`, such as `ge`, `lt` or `min_length`.
    """
    return _field(default, Note(meaning, aliases=tuple(aliases), deprecated=tuple(deprecated)), limits)


def moot(
    default: Any,
    meaning: str,
    instead: str,
    *,
    aliases: Sequence[str] = (),
    deprecated: Sequence[str] = (),
    **limits: Any,
) -> Any:
    """Define a key that is accepted without effect; `instead` is the reason or the replacement. See `key`."""
    note = Note(meaning, "moot by design", instead, aliases=tuple(aliases), deprecated=tuple(deprecated))
    return _field(default, note, limits)


def later(default: Any, meaning: str, *, idle: Sequence[Any] = (), aliases: Sequence[str] = (), **limits: Any) -> Any:
    """Define a key of an unavailable feature: in an enabled block, only the default and `idle` are valid. See `key`."""
    return _field(default, Note(meaning, "not available yet", aliases=tuple(aliases), idle=tuple(idle)), limits)


def note_of(field: FieldInfo) -> Note:
    """Return the note that `key`, `moot` or `later` stored in a field."""
    return cast(Note, cast("dict[str, Any]", field.json_schema_extra)["note"])


def _dtype_name(value: object) -> object:
    """Convert any name of a dtype to "fp32", "fp16" or "bf16"; return other values unchanged."""
    name = str(value).lower().removeprefix("torch.")
    return _DTYPES.get(name, value)


def _print_interval(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise ValueError("expected a number above 0, inf, or null for no progress lines")


def _one_of(*names: str) -> BeforeValidator:
    """Return a pydantic validator that replaces a text by the name that it equals in any case."""
    folded = {name.lower(): name for name in names}
    return BeforeValidator(lambda value: folded.get(value.lower(), value) if isinstance(value, str) else value)


_DTYPES = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32",
    "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "bf16": "bf16", "bfloat16": "bf16",
}  # fmt: skip

# JSON writes large counts as 5e8, which parses as a float.
Int = Annotated[
    int, BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
]
Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_dtype_name)]
LowDtype = Annotated[Literal["fp16", "bf16"], BeforeValidator(_dtype_name)]
WireDtype = Annotated[Literal["fp32", "fp16", "bf16", "int8", "int4"], BeforeValidator(_dtype_name)]
Interval = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_print_interval)]
AllreduceOp = Annotated[Literal["mean", "sum"], _one_of("mean", "sum")]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error", "critical"], _one_of("debug", "info", "warning", "error", "critical")
]
TagValidation = Annotated[Literal["Ignore", "Warn", "Fail"], _one_of("Ignore", "Warn", "Fail")]
Names = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
NumberOrList = float | list[float]


@dataclass(frozen=True)
class Kwargs:
    """Annotation of a dict of keyword arguments: names that are fields of `model` are type-checked, others accepted."""

    model: type[Section]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a schema that validates with the model and produces a plain dict of the given values."""
        schema = handler.generate_schema(self.model)
        return core_schema.no_info_after_validator_function(lambda model: model.model_dump(exclude_unset=True), schema)


def is_number(value: object) -> bool:
    """Return whether a value is a finite int or float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
