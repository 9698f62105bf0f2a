"""sentence-transformers drops the gathered weights and saves its own modules, on every rank: they must be whole."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.clients import sentence_runs as runs

NEEDS_IT = pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="sentence-transformers not installed")


@NEEDS_IT
@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_its_trainer_saves_whole_weights(workers: Any, stage: int, tmp_path: Path) -> None:
    workers(2).run(runs.saved, stage, str(tmp_path), timeout=180)
