"""Loading of a configuration from a dict, a JSON or HJSON file, or base64 of JSON."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from deepspeed.errors import DeepSpeedConfigError


def load_raw(config: object) -> dict[str, Any]:
    """Load the configuration as the user wrote it.

    Args:
        config: a dict (returned as it is), a mapping, the path of a JSON or HJSON file, or urlsafe base64 of JSON.

    Raises:
        DeepSpeedConfigError: the argument has another type, the file cannot be read, or the JSON is invalid, has
            duplicate keys, or is not an object.
    """
    if isinstance(config, dict):
        return cast("dict[str, Any]", config)
    if isinstance(config, Mapping):
        return dict(cast("Mapping[str, Any]", config))
    if not isinstance(config, (str, os.PathLike)):
        raise DeepSpeedConfigError(
            f"A configuration is a dict, a path to a JSON file, or base64 of JSON; got {type(config).__name__}"
        )
    text, where = _read(os.fspath(cast("str | os.PathLike[str]", config)))
    return _parse(text, where)


def block_of(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of a block of a configuration as the user wrote it; empty if it is missing, null or no object."""
    block = raw.get(name)
    return dict(cast("Mapping[str, Any]", block)) if isinstance(block, Mapping) else {}


def _read(name: str) -> tuple[str, str]:
    with contextlib.suppress(binascii.Error, ValueError):
        decoded = base64.urlsafe_b64decode(name).decode("utf-8")
        if decoded.lstrip().startswith("{"):
            return decoded, "the base64 configuration"
    try:
        return Path(name).read_text(encoding="utf-8"), name
    except UnicodeDecodeError as error:
        raise DeepSpeedConfigError(f"{name}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    except (OSError, ValueError) as error:  # missing, a folder, no permission, too long, a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        shown = name if len(name) <= 200 else name[:200] + "..."
        raise DeepSpeedConfigError(
            f"{shown!r} cannot be read ({reason}; looked in {Path.cwd()}), and it is not base64 of JSON either"
        ) from None


def _parse(text: str, where: str) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        if twice:
            raise DeepSpeedConfigError(f"{where}: duplicate keys in one object: {', '.join(sorted(twice))}")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        hjson: Any = import_module("hjson")  # only files with comments need it, and it has no type stubs
        try:
            value = hjson.loads(text, object_pairs_hook=without_duplicates)
        except (hjson.HjsonDecodeError, RecursionError):
            raise DeepSpeedConfigError(
                f"{where}: not valid JSON or HJSON: {error.msg} at line {error.lineno}, column {error.colno}"
            ) from None
    except RecursionError:
        raise DeepSpeedConfigError(f"{where}: nested too deeply") from None
    if not isinstance(value, dict):
        raise DeepSpeedConfigError(f"{where}: the top must be an object {{...}}, found {type(value).__name__}")
    return cast("dict[str, Any]", value)
