"""Each client with this package against the same client without: losses, gradient norms, learning rates, counters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients import accelerate_runs, lightning_runs, transformers_runs, trl_runs
from tests.clients.common import compare

CLIENTS = {
    "accelerate": accelerate_runs.train,
    "transformers": transformers_runs.train,
    "transformers-json": transformers_runs.train_by_json,
    "lightning": lightning_runs.train,
    "fabric": lightning_runs.fabric_train,
    "peft": transformers_runs.train_adapters,
    "trl-sft": trl_runs.train_sft,
    "trl-dpo": trl_runs.train_dpo,
    "trl-grpo": trl_runs.train_grpo,
    "trl-reward": trl_runs.train_reward,
}
FAST = {
    ("accelerate", 0, "fp32", 1),
    ("accelerate", 3, "bf16", 2),
    ("transformers", 3, "fp32", 2),
    ("transformers-json", 2, "bf16", 2),
    ("lightning", 3, "fp32", 2),
    ("fabric", 3, "bf16", 2),
    ("peft", 3, "fp32", 2),
    ("trl-sft", 3, "bf16", 2),
    ("trl-dpo", 3, "fp32", 2),
    ("trl-grpo", 3, "fp32", 2),
}
CELLS = [
    pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow, id="-".join(map(str, cell)))
    for cell in (
        (client, stage, precision, ranks)
        for ranks in (1, 2)
        for client in CLIENTS
        for precision in ("fp32", "bf16")
        for stage in (0, 1, 2, 3)
    )
]


@pytest.mark.parametrize(("client", "stage", "precision", "ranks"), CELLS)
def test_the_client_trains_as_without(workers: Any, client: str, stage: int, precision: str, ranks: int) -> None:
    workers(ranks).run(compare, CLIENTS[client], stage, precision, timeout=180)
