"""`"stage": "plan"` takes what was found, and nothing that would change the global batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import BatchSizeError, DeepSpeedConfigError

PLAN = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d"}},
    "activation_checkpointing": {"enabled": True},
    "gradient_clipping": 9.0,
}
OWN: dict[str, Any] = {"gradient_clipping": 1.0, "zero_optimization": {"stage": "plan", "overlap_comm": False}}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DS_PLAN", raising=False)


def test_the_answer_is_taken_and_the_rest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("ds_plan.json").write_text(json.dumps(PLAN))
    found = DeepSpeedConfig(OWN, world=2)
    assert found.raw is OWN
    assert OWN["zero_optimization"]["stage"] == "plan"
    assert (found.zero.stage, found.zero.overlap_comm, found.gradient_clipping) == (3, False, 1.0)
    assert (found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps) == (4, 2)
    assert found.zero.offload_optimizer is not None
    assert found.zero.offload_optimizer.device == "nvme"
    assert found.top.activation_checkpointing.enabled
    assert DeepSpeedConfig.for_init(OWN).zero.stage == 3
    # What autotuning has found comes before, and what the variable names before both.
    tuned = tmp_path / "autotuning_results" / "ds_config_optimal.json"
    tuned.parent.mkdir()
    tuned.write_text(json.dumps({**PLAN, "zero_optimization": {"stage": 1}}))
    offloaded = {"stage": "plan", "offload_optimizer": {"device": "cpu"}}
    second = DeepSpeedConfig({**OWN, "zero_optimization": offloaded}, world=2)
    assert second.zero.stage == 1
    assert second.zero.offload_optimizer is None or second.zero.offload_optimizer.device == "none"
    monkeypatch.setenv("DS_PLAN", str(tmp_path / "ds_plan.json"))
    assert DeepSpeedConfig(OWN, world=2).zero.stage == 3


def test_another_batch_another_world_and_no_plan_are_refused() -> None:
    with pytest.raises(DeepSpeedConfigError, match="there is no plan: autotuning_results"):
        DeepSpeedConfig(OWN, world=2)
    Path("ds_plan.json").write_text(json.dumps(PLAN))
    with pytest.raises(BatchSizeError):
        DeepSpeedConfig(OWN, world=4)
    with pytest.raises(DeepSpeedConfigError, match="train_batch_size is 32"):
        DeepSpeedConfig({**OWN, "train_batch_size": 32}, world=2)
    micro = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    with pytest.raises(DeepSpeedConfigError, match="is 4, and the plan in ds_plan.json is for 8"):
        DeepSpeedConfig({**OWN, **micro}, world=2)
    Path("ds_plan.json").write_text("{}")
    with pytest.raises(DeepSpeedConfigError, match="is no plan"):
        DeepSpeedConfig(OWN, world=2)
