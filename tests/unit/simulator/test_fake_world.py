"""Classes that stand in for those that communicate are called as these are."""

from __future__ import annotations

import inspect

import pytest

from deepspeed.comm import fake_world

STAND_INS = [
    kind
    for _, kind in inspect.getmembers(fake_world, inspect.isclass)
    if kind.__module__ == fake_world.__name__ and kind.__base__ is not object
]


@pytest.mark.parametrize("kind", STAND_INS)
def test_a_stand_in_takes_the_arguments_of_its_base(kind: type) -> None:
    for name, method in vars(kind).items():
        of_base = getattr(kind.__base__, name, None)
        if inspect.isfunction(method) and inspect.isfunction(of_base) and name != "__init__":
            known = inspect.signature(method).parameters
            if not any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in known.values()):
                assert list(known) == list(inspect.signature(of_base).parameters), name
