"""Typed JSON gives equal objects back, refuses the rest by path, and runs nothing."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import json
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from deepspeed.checkpoint.format.json_codec import Decoder, Encoder
from deepspeed.errors import CheckpointError


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Best:
    score: float
    at: tuple[int, int]

    def __post_init__(self) -> None:
        if self.score < 0:
            raise AssertionError("a loaded dataclass is not constructed")


class Point(NamedTuple):
    x: int
    y: int


def round_trip(value: Any) -> Any:
    tensors: list[torch.Tensor] = []
    text = json.dumps(Encoder(tensors).encode(value, "value"), allow_nan=False)
    return Decoder(lambda number: tensors[number]).decode(json.loads(text))


VALUES = [
    None, True, 3, 2**80, -0.5, "text", math.inf, 1e-300, 2 + 3j, b"\x00\xff", range(2, 9, 3),
    (1, (2, [3])), {1: "a", "b": 2, (3, 4): None}, {"!": 1}, {1, 2}, frozenset({"x"}), collections.deque([1, 2]),
    collections.OrderedDict(b=1, a=2), collections.Counter("aab"), collections.defaultdict(list, {"a": [1]}),
    argparse.Namespace(lr=0.1, names=["a"]), np.float32(1.5), np.int64(7), np.bool_(True),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.date(2026, 1, 2), datetime.timedelta(days=1, microseconds=5),
    pathlib.Path("a/b"), Colour.RED, Best(0.5, (1, 2)), Point(1, 2), torch.float16, torch.device("cpu"),
    torch.Size([2, 3]),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_equal_objects_come_back(value: Any) -> None:
    found = round_trip({"inside": [value]})["inside"][0]
    assert found == value and type(found) is type(value)


def test_nan_tensors_and_arrays() -> None:
    assert math.isnan(round_trip(math.nan))
    array = np.arange(6, dtype=">i2").reshape(2, 3)
    found = round_trip({"array": array, "empty": np.zeros((0, 3)), "tensor": torch.arange(3, dtype=torch.bfloat16)})
    assert np.array_equal(found["array"], array) and found["array"].dtype == array.dtype
    assert found["empty"].shape == (0, 3) and torch.equal(found["tensor"], torch.arange(3, dtype=torch.bfloat16))
    bad = Best(0.5, (0, 0))
    bad.score = -1.0
    assert round_trip(bad).score == -1.0


@pytest.mark.parametrize(
    "value", [lambda: 0, object(), open, type("Local", (), {})()], ids=lambda value: type(value).__name__
)
def test_others_are_refused_with_their_path(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"client_state\['loops'\]\[1\]\['x'\]"):
        Encoder([]).encode({"loops": [0, {"x": value}]}, "client_state")


def test_cycles_are_refused() -> None:
    value: dict[str, Any] = {}
    value["again"] = [value]
    with pytest.raises(CheckpointError, match=r"\['again'\]\[0\] contains itself"):
        Encoder([]).encode(value, "state")


def test_a_pickle_is_admitted_only_when_asked_for() -> None:
    pickled: list[Any] = []
    text = Encoder([], pickled).encode({"x": Point}, "state")
    assert pickled == [Point] and Decoder(lambda _: torch.empty(0), pickled).decode(text) == {"x": Point}


@pytest.mark.parametrize(
    "text",
    [
        {"!": "enum", "v": ["os", "system", "true"]},
        {"!": "dataclass", "v": ["subprocess", "Popen", {}]},
        {"!": "namedtuple", "v": ["not_imported_module", "x", []]},
        {"!": "dtype", "v": "load"},
        {"!": "__init__", "v": None},
        {"!": "unknown", "v": None},
    ],
)
def test_names_in_a_file_cannot_reach_code(text: Any) -> None:
    with pytest.raises(CheckpointError):
        Decoder(lambda _: torch.empty(0)).decode(text)
