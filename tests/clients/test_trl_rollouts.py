"""TRL's GRPO, RLOO, online DPO, GKD and SFT on two ranks: our generation in place of Transformers' changes no loss."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients import trl_rollout_runs

KINDS = ("grpo", "rloo", "online_dpo", "gkd", "sft")


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_learns_the_same_from_our_generation(workers: Any, kind: str, stage: int) -> None:
    for rank, report in enumerate(workers(2).run(trl_rollout_runs.compare, kind, stage, timeout=300)):
        print(kind, "stage", stage, "rank", rank, report)
        assert kind == "sft" or report["answers"] >= 4
        assert len(set(report["losses"])) > 1 or kind == "online_dpo", report
