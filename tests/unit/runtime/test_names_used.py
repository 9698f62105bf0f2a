"""Every row of docs/names.md says what is there."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import NotAvailableError
from deepspeed.foundation.addresses import LATER, PLACEHOLDERS
from deepspeed.zero.optimizer.optimizer import ZeroOptimizer
from deepspeed.zero.parameters.ds_attributes import ClientSurface

PAGE = (Path(__file__).parents[3] / "docs" / "names.md").read_text()
NAMES = re.findall(r"^\| `(deepspeed[^`]*)` \| [^|]+ \| (\w+) \| ([^|]*) \|$", PAGE, re.M)
ATTRIBUTES = re.findall(r"^\| `(\w+)\.(\w+)` \| (\w+) \| ([^|]*) \|$", PAGE, re.M)
OWNERS = ("programs", "experts", "serve", "rollouts", "links", "data", "cards")
CLASSES = {"engine": DeepSpeedEngine, "optimizer": ZeroOptimizer, "parameter": ClientSurface}


def look_up(address: str) -> Any:
    """As a program comes to it: import the module before the colon, or the longest one, then attributes."""
    module, _, attributes = address.partition(":")
    parts = [*module.split("."), *attributes.split(".")] if attributes else module.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(address)


@pytest.mark.parametrize(("address", "state", "why"), NAMES, ids=[row[0] for row in NAMES])
def test_a_name_is_what_the_page_says(address: str, state: str, why: str) -> None:
    if state == "missing":
        with pytest.raises((ImportError, AttributeError)):
            look_up(address)
    elif state == "placeholder":
        try:
            value = look_up(address)
        except NotAvailableError:
            return  # an attribute of a placeholder: it was used
        assert isinstance(value, ModuleType) or type(value).__name__ == "_Placeholder"
        if not isinstance(value, ModuleType):
            assert not isinstance(deepspeed, value)
            with pytest.raises(NotAvailableError, match="is not available yet: it belongs to"):
                value()
    else:
        assert state == "behaves" and type(look_up(address)).__name__ != "_Placeholder"


@pytest.mark.parametrize(("owner", "name", "state", "why"), ATTRIBUTES, ids=[f"{r[0]}.{r[1]}" for r in ATTRIBUTES])
def test_an_attribute_is_what_the_page_says(owner: str, name: str, state: str, why: str) -> None:
    assert hasattr(CLASSES[owner], name) == (state != "missing")


def test_rows_have_owners_and_enough_of_them_behave() -> None:
    for *_, state, why in [*NAMES, *ATTRIBUTES]:
        assert state == "behaves" or why.startswith(("refused for good: ", *OWNERS)), why
    states = Counter(row[-2] for row in [*NAMES, *ATTRIBUTES])
    assert states["behaves"] >= 60 and len(NAMES) == 104 and len(ATTRIBUTES) == 33


def test_what_is_not_there_in_the_table_is_on_the_page() -> None:
    for module, (_, names) in PLACEHOLDERS.items():
        for name in names.split():
            assert f"{module}:{name}" in PAGE or f"{module}.{name}" in PAGE or name == "DeepSpeedCheckpoint", name
    assert len(LATER) > 5


def test_a_program_that_replaces_what_no_engine_calls_is_told(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from deepspeed.foundation.log import logger

    monkeypatch.setattr(DeepSpeedEngine, "clip_fp32_gradients", lambda self: None, raising=False)
    logger.propagate = True
    try:
        engine, *_ = deepspeed.initialize(
            model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}}
        )
        engine.destroy()
    finally:
        logger.propagate = False
    assert any("clip_fp32_gradients" in message and "does not call" in message for message in caplog.messages)
