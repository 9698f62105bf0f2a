"""Each client resumes in a new process and ends with the same bits as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients import resume_runs

FAST = [("transformers", 3, "fp32")]
CELLS = [
    pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow, id="-".join(map(str, cell)))
    for cell in (
        (client, stage, precision)
        for client in ("transformers", "accelerate", "lightning", "fabric", "peft")
        for stage in (0, 1, 2, 3)
        for precision in ("fp32", "bf16")
    )
]


@pytest.mark.parametrize(("client", "stage", "precision"), CELLS)
def test_a_new_process_goes_on_bit_by_bit(
    workers: Any, client: str, stage: int, precision: str, tmp_path: Path
) -> None:
    function = getattr(resume_runs, client)
    whole = workers(2).run(function, stage, precision, str(tmp_path), False, timeout=180)
    workers(2).kill()
    again = workers(2).run(function, stage, precision, str(tmp_path), True, timeout=180)
    for rank in (0, 1):
        losses, weights = whole[rank]
        assert losses and again[rank][0] == losses
        assert weights and [name for name in weights if again[rank][1].get(name) != weights[name]] == []
