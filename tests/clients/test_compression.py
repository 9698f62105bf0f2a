"""Clients through a removal and an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients import compression_runs as runs

CLIENTS = {
    "transformers": runs.by_transformers,
    "accelerate": runs.by_accelerate,
    "lightning": runs.by_lightning,
    "peft": runs.by_peft,
}
FAST = {("transformers", 3), ("peft", 2)}


@pytest.mark.parametrize(
    ("client", "stage"),
    [
        pytest.param(client, stage, marks=() if (client, stage) in FAST else pytest.mark.slow)
        for client in CLIENTS
        for stage in (0, 1, 2, 3)
    ],
)
def test_units_leave_and_the_folder_loads(workers: Any, client: str, stage: int, tmp_path: Path) -> None:
    workers(2).run(CLIENTS[client], stage, str(tmp_path), timeout=180)
