"""What the benchmark of instruments says of figures whose answer is known."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def instruments(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("instruments")


def rounds(count: int, wall: float = 0.0, cpu: float = 0.0, slow: float = 0.0) -> list[Any]:
    """Steps of about a second; the recorder's take that part more, and one in twenty of them `slow` more."""
    draw, found = random.Random(0), []
    for at in range(count):
        took = {name: 1 + draw.gauss(0, 0.002) for name in ("off", "off again", "recorder")}
        late = slow if at % 20 == 0 else 0.0
        own = took["recorder"]
        found.append({name: (seconds, seconds, 0.0) for name, seconds in took.items()})
        found[-1]["recorder"] = (own * (1 + wall + late), own * (1 + cpu), 0.0)
    return found


def few(extra: float = 0.0) -> list[Any]:
    return [
        {name: tuple(0.02 * x for x in times) for name, times in each.items()} for each in rounds(300, extra, extra)
    ]


def said(instruments: Any, whole: list[Any], short: list[Any]) -> str:
    row = next(row for row in instruments.rows_of(whole, short, 2) if row["side"] == "recorder")
    return instruments.verdict(row)


def test_whole_steps_count_beside_those_with_few_tokens(instruments: Any) -> None:
    assert said(instruments, rounds(100), few()) == "1.01 ok"
    assert said(instruments, rounds(100, cpu=0.05), few()) == "1.01 MISSED: CPU"  # it grows with the tokens
    assert said(instruments, rounds(100, wall=0.05), few()) == "1.01 MISSED: wall"
    assert said(instruments, rounds(100, slow=0.5), few()) == "1.01 MISSED: 99th"
    assert said(instruments, rounds(100, 0.02, 0.02), few(1.0)) == "1.01 MISSED: CPU, wall"  # 20 ms of each step


def test_kinds_of_steps_that_disagree_show_nothing(instruments: Any) -> None:
    assert said(instruments, rounds(100), few(1.0)) == "1.01 not shown: CPU"
    assert said(instruments, rounds(48) + rounds(52, cpu=0.03), few()) == "1.01 not shown: CPU"


def test_without_a_round_of_few_tokens_whole_steps_are_kept(instruments: Any) -> None:
    assert said(instruments, rounds(100), []) == "1.01 not shown: CPU, 99th"
    assert said(instruments, rounds(100, cpu=0.05), []) == "1.01 MISSED: CPU"
    instruments.show(instruments.rows_of(rounds(100), [], 2))


def test_rounds_are_kept_and_each_side_has_those_that_it_was_in(instruments: Any, tmp_path: Path) -> None:
    path, both = tmp_path / "kept" / "whole.json", ["off", "off again", "recorder"]
    kept = instruments.Kept(path, both)
    assert kept.missing(30) == 30
    kept.add(rounds(20))
    kept.add([{**each, "norms": each["off"]} for each in rounds(25)])
    again = instruments.Kept(path, [*both, "norms"])
    assert again.rounds == [{name: list(took) for name, took in each.items()} for each in kept.rounds]
    assert (again.missing(30), instruments.Kept(path, both).missing(30)) == (5, -15)
    rows = {row["side"]: row for row in instruments.rows_of(again.rounds, [], 2)}
    assert {name: row["rounds"] for name, row in rows.items()} == {"off again": 45, "recorder": 45, "norms": 25}
    assert rows["norms"]["cpu"] == 1.0
