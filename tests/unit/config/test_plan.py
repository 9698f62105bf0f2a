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


def test_axes_of_the_mesh_are_taken_too() -> None:
    """Two of four ranks share matrices: two see other samples, each twice as many."""
    axes = {"tensor_parallel": {"autotp_size": 2}, "train_micro_batch_size_per_gpu": 4}
    Path("ds_plan.json").write_text(json.dumps({**PLAN, **axes}))
    mine = {**OWN, "tensor_parallel": {"verify": "model"}}
    found = DeepSpeedConfig({**mine, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, world=2)
    assert found.mesh_sizes() == [("tp", 2, "tensor_parallel.autotp_size")]
    assert found.top.tensor_parallel.verify == "model"
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu) == (16, 4)
    with pytest.raises(DeepSpeedConfigError, match="is 16, and the plan in ds_plan.json is for 4"):
        DeepSpeedConfig({**mine, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}, world=2)
    Path("ds_plan.json").write_text(json.dumps({**PLAN, "sequence_parallel_size": 2}))
    assert DeepSpeedConfig(OWN, world=2, replicas=4).mesh_sizes() == [("sp", 2, "sequence_parallel_size")]
    Path("ds_plan.json").write_text(json.dumps({**PLAN, "pipeline": {"stages": 2}}))
    staged = DeepSpeedConfig({**OWN, "pipeline": {"schedule": "gpipe"}}, world=2)
    assert (staged.top.pipeline.stages, staged.top.pipeline.schedule) == (2, "gpipe")
    experts = {"expert_parallel": {"enabled": True, "size": 2}}
    Path("ds_plan.json").write_text(json.dumps({**PLAN, **experts}))
    divided = DeepSpeedConfig({**OWN, "expert_parallel": {"balance": "window"}}, world=2)
    assert (divided.expert_parallel_size, divided.top.expert_parallel.balance) == (2, "window")
    zero = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}
    Path("ds_plan.json").write_text(json.dumps({**PLAN, **zero, "train_batch_size": 32}))
    assert DeepSpeedConfig(OWN, world=4).mesh_sizes() == [("shard", 2, "zero_optimization.mics_shard_size")]


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
