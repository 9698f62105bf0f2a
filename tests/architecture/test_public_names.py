"""The public names, frozen in `public_names.txt`: a line with parentheses freezes the signature too."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.foundation.addresses import ADDRESSES, PLACEHOLDERS

FROZEN = (Path(__file__).parent / "public_names.txt").read_text().splitlines()
ROOMS = ("deepspeed.ops",)  # every module in them is a public address, and every row of the table of addresses
_KERNELS = (
    "paged_attention",
    "row_kernels",
    "sampling_kernels",
    "packed_products",
    "gemv_kernels",
    "block_kernels",
    "single_row_kernels",
)
NEED_TRITON = {f"deepspeed.ops.triton.{name}" for name in _KERNELS}  # which other modules name by their strings
FRONT = ("deepspeed", "deepspeed.accelerator", "deepspeed.comm", "deepspeed.git_version_info", "deepspeed.zero")


def _look_up(address: str) -> Any:
    """What stands at an address: the longest module, then attributes."""
    parts = address.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(address)


def _signature(found: Any) -> str:
    """Names and defaults, no annotations."""
    signature = inspect.signature(found)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _stands_for_placeholders(name: str) -> bool:
    """Whether a module has nothing but names of features that are not here."""
    rows = {row for row in (*PLACEHOLDERS, *ADDRESSES) if row == name or row.startswith(f"{name}.")}
    return bool(rows) and not any(ADDRESSES.get(row) for row in rows)


def _public() -> Iterator[str]:
    modules = [*FRONT, *ROOMS, *ADDRESSES]
    for room in ROOMS:
        modules += [info.name for info in pkgutil.walk_packages(_look_up(room).__path__, f"{room}.")]
    for module in [module for module in modules if module not in NEED_TRITON]:
        names = (f"{module}.{name}" for name in getattr(_look_up(module), "__all__", ()))
        yield from (name for name in names if not _stands_for_placeholders(name))


def test_every_frozen_name_is_where_it_was() -> None:
    wrong = []
    for line in FROZEN:
        address = line.partition("(")[0]
        try:
            there = _look_up(address)
            found = address + _signature(there) if "(" in line else address
        except (ImportError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
        if found != line:
            wrong.append(f"{line}\n    now {found}")
    assert not wrong, "\n".join(wrong)


def test_every_public_name_is_frozen() -> None:
    assert set(_public()) - {line.partition("(")[0] for line in FROZEN} == set()


def test_the_list_is_sorted_and_says_each_name_once() -> None:
    names = [line.partition("(")[0] for line in FROZEN]
    assert names == sorted(set(names))


def test_every_frozen_function_and_class_has_a_docstring() -> None:
    objects = {line.partition("(")[0]: _look_up(line.partition("(")[0]) for line in FROZEN}
    ours = {
        name: value
        for name, value in objects.items()
        if inspect.isroutine(value) or inspect.isclass(value)
        if (value.__module__ or "").startswith("deepspeed")
    }
    assert ours and [name for name, value in ours.items() if not (value.__doc__ or "").strip()] == []
