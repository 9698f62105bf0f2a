"""Make an object from a class and the parameters of the JSON, refusing keys the class does not know."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.errors import ArgumentError, DeepSpeedError


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint " (did you mean 'x'?)" when a known name resembles `name`, ignoring case, and "" otherwise."""
    by_lower = {other.lower(): other for other in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[found[0]]!r}?)" if found else ""


def construct(section: str, cls: type, first: Any, params: Mapping[str, Any], error: type[ArgumentError]) -> Any:
    """`cls(first, **params)`.

    Args:
        section: "optimizer" or "scheduler", for the messages.
        cls: the class.
        first: its first argument: groups of parameters or the optimizer.
        params: the `params` of the section.
        error: raised when the class does not take them.

    Returns:
        The object.

    Raises:
        ArgumentError: of type `error`: an unknown key, a missing one or a value the class refuses.
    """
    accepted = list(inspect.signature(cls).parameters.values())[1:]
    names = [p.name for p in accepted]
    problems = [
        f"{section}.params.{key} is not a parameter of {cls.__name__}{nearest(key, names)}"
        for key in params
        if key not in names
    ]
    problems += [
        f"{section}.params.{p.name} is required by {cls.__name__}"
        for p in accepted
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.name not in params
    ]
    if problems:
        raise error("; ".join(problems) + f". {cls.__name__} takes: {', '.join(names)}")
    try:
        return cls(first, **params)
    except DeepSpeedError:
        raise
    except (TypeError, ValueError, RuntimeError) as problem:
        raise error(f"{section}.type {cls.__name__} with params {dict(params)}: {problem}") from problem
