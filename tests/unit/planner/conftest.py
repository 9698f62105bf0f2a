"""All tests of the planner predict."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _without_group(without_group: None) -> None:
    pass
