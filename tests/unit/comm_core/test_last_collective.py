"""The page of the last collective, which several threads write."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from deepspeed.comm.watchdog import last_collective
from deepspeed.comm.watchdog.last_collective import INSIDE, LastCollectivePage, describe


def test_a_thread_that_writes_in_the_middle_of_another_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A background save and an update communicate at the same time: the switch comes while the clock is read."""
    page, others = LastCollectivePage(), ["all_gather_object of a background save, which has a longer label"]
    page.share()
    label = "reduce-scatter w"

    def clock() -> float:
        if others:
            page.write(others.pop(), INSIDE)
        return time.time()

    monkeypatch.setattr(last_collective, "time", SimpleNamespace(time=clock))
    page.write(label, INSIDE)
    assert describe(page.snapshot())[0].startswith(f"'{label}'")
    page.write(label, INSIDE)
    assert page.label == label
    page.keep_to_itself()
