"""Names at old addresses whose feature this version does not have: looking one up says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.errors import NotAvailableError


def not_yet(module: str, reasons: dict[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`.

    Args:
        module: its `__name__`.
        reasons: by name, what it belongs to or what there is instead.

    Returns:
        A function that raises `NotAvailableError` for these names, `AttributeError` for others.
    """

    def look_up(name: str) -> Any:
        if name in reasons:
            raise NotAvailableError(f"{module}.{name} is not available yet: {reasons[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look_up
