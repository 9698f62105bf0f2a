"""Variables are named by what they are, not by how they came about."""

from __future__ import annotations

from tests.architecture.measure import HISTORY, history_locals
from tests.architecture.sources import trees


def test_no_variable_is_named_by_how_it_came_about() -> None:
    counts = {path: history_locals(tree) for path, tree in trees().items()}
    assert {path: dict(count) for path, count in counts.items() if count} == {}, f"none of {', '.join(HISTORY)}"
