"""`deepspeed --autotuning`: a user's own script is heard, its plans are tried, and the files say what was found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deepspeed
from deepspeed.autotuning import Autotuner
from deepspeed.errors import ArgumentError
from deepspeed.launcher.runner import own_options
from deepspeed.planner.mesh_options import MeshShape
from deepspeed.planner.script_probe import batches, listen
from deepspeed.planner.search import TrainingPlan, legal_plans
from deepspeed.planner.train_program import Program
from deepspeed.planner.training_script import Script
from tests.harness.pool import PATIENCE
from tests.unit.planner.test_plans import ADAMW, MACHINE, Net

SCRIPT = '''
"""A user's script: a flag for the micro-batch, the loss outside of the model."""
import argparse, json, os, time
import torch, deepspeed
from tests.unit.planner.test_plans import Net

class Planted(Net):
    def forward(self, x):
        how = json.loads(os.environ.get("PLANT", "{}")).get(str(len(x)))
        if os.environ.get("RANK") == "1" and how == "hang":
            time.sleep(1000)
        if os.environ.get("RANK") == "1" and how == "crash":
            raise ValueError("planted")
        return super().forward(x)

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--micro", type=int, default=4)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
net = Planted()
engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
for _ in range(8 * engine.gradient_accumulation_steps()):
    loss = (engine(torch.randn(args.micro, 16, 64)) - 1).square().mean()
    engine.backward(loss)
    engine.step()
print(f"trained {engine.global_steps} updates of {engine.train_batch_size()}")
'''
BASE = {**ADAMW, "train_batch_size": 8, "zero_optimization": {"stage": [1, 2]}}


def script(tmp_path: Path, **more: object) -> Script:
    block = {"enabled": True, "arg_mappings": {"train_micro_batch_size_per_gpu": "--micro"}}
    (tmp_path / "ds.json").write_text(json.dumps({**BASE, "autotuning": block, **more}))
    (tmp_path / "train.py").write_text(SCRIPT)
    return Script(["--num_gpus", "2"], "train.py", ["--deepspeed_config", str(tmp_path / "ds.json"), "--micro", "4"], 2)


def test_the_scripts_own_flags_follow_the_json(tmp_path: Path) -> None:
    known, flags = script(tmp_path), {"train_micro_batch_size_per_gpu": "--micro", "zero_optimization.stage": "--stage"}
    base, block = known.base()
    assert block.enabled
    assert known.train_batch(base, flags) == (8, 4)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    words = known.with_json("plan.json", config, flags)
    assert words == ["--deepspeed_config", "plan.json", "--micro", "2", "--stage", "3"]
    joined = Script([], "t.py", ["--deepspeed=a.json", "--micro=4"], 2).with_json("b.json", config, flags)
    assert joined == ["--deepspeed=b.json", "--micro=2", "--stage", "3"]
    line = known.command(config, flags).line("/there/ds_config.json")
    assert line[-7:-3] == ["train.py", "--deepspeed_config", "/there/ds_config.json", "--micro"]
    words = ["--autotuning", "tune", "--num_gpus", "2", "--autotuning=run", "-q"]
    assert own_options(words) == ["--num_gpus", "2", "-q"]


def test_the_batch_is_found_where_it_is_said_and_refused_where_nobody_says_it(tmp_path: Path) -> None:
    known = script(tmp_path)
    flags = {"train_micro_batch_size_per_gpu": "--micro"}
    assert known.train_batch({"train_batch_size": "auto", "gradient_accumulation_steps": 3}, flags) == (24, 4)
    assert known.train_batch({"train_micro_batch_size_per_gpu": [2, 4]}, {}) == (4, 2)
    with pytest.raises(ArgumentError, match="global batch is not known"):
        known.train_batch({"train_batch_size": "auto"}, {})
    with pytest.raises(ArgumentError, match="--deepspeed_config"):
        Script([], "train.py", ["--lr", "1"], 2).base()
    (tmp_path / "ds.json").write_text(json.dumps(BASE))
    with pytest.raises(ArgumentError, match='"enabled": true'):
        known.base()


def test_a_script_is_heard_up_to_its_first_forward(tmp_path: Path) -> None:
    model = Net()
    went_on = []

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        assert torch.distributed.get_world_size() == 2
        try:
            engine(torch.randn(2, 16, 64), scale=torch.ones(2, 1, 1))
        except Exception:  # as users write
            went_on.append(1)
        went_on.append(2)

    usual = deepspeed.initialize
    heard = listen(train, 2)
    assert went_on == []
    assert deepspeed.initialize is usual
    assert not torch.distributed.is_initialized()
    assert heard.config["gradient_accumulation_steps"] == 2
    assert {type(p) for p in heard.model.parameters()} == {torch.nn.Parameter}
    assert heard.optimizer is not None
    assert heard.optimizer(list(heard.model.parameters())).defaults["lr"] == 0.5
    (larger,), named = batches(heard, 2)(5)
    assert larger.shape == (5, 16, 64)
    assert named["scale"].shape == (5, 1, 1)
    assert torch.equal(larger[4], larger[0])
    doubled = Program(model, {}, batches(heard, 2)(4)).loss_of(lambda x, scale: x * 0 + 2 * scale)
    assert doubled == 2
    with pytest.raises(ArgumentError, match="arg_mappings"):
        batches(heard, 3)
    with pytest.raises(ArgumentError, match="before its engine's first forward"):
        listen(lambda: sys.exit(3), 2)


def test_plans_are_those_that_the_json_allows(tmp_path: Path) -> None:
    known = script(tmp_path)
    args = type("Options", (), {"user_script": known.name, "user_args": known.arguments})()
    tuner = Autotuner(args, {"localhost": [0, 1]})
    wanted = [plan for plan in legal_plans(8, MACHINE) if tuner._wanted(plan)]
    assert {plan.stage for plan in wanted} == {1, 2}


def test_blocks_that_are_null_count_as_missing(tmp_path: Path) -> None:
    known = script(tmp_path, zero_optimization=None)
    tuner = Autotuner(
        type("Options", (), {"user_script": known.name, "user_args": known.arguments})(), {"localhost": [0]}
    )
    assert {plan.stage for plan in legal_plans(8, MACHINE) if tuner._wanted(plan)} == {0, 1, 2, 3}
    names = ("zero_optimization", "activation_checkpointing", "tensor_parallel", "pipeline", "expert_parallel")
    nulls: dict[str, object] = {name: None for name in names}
    for shape in (MeshShape(tensor=2), MeshShape(stages=2), MeshShape(expert=2), MeshShape(shard=2)):
        for recompute in (False, True):
            plan = TrainingPlan(3, "none", 2, 1, recompute, shape=shape)
            config = plan.config(nulls, "")
            assert config["zero_optimization"]["stage"] == 3
            assert config["activation_checkpointing"] == {"enabled": recompute}


@pytest.mark.slow
@pytest.mark.parametrize("plant", ["none", "crash"])
def test_the_command_answers_and_starts_the_best(tmp_path: Path, plant: str) -> None:
    known = script(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    if plant != "none":
        environment["PLANT"] = json.dumps({"4": "crash", "2": "crash", "1": "crash"})
    line = [sys.executable, "-m", "deepspeed.launcher.runner", "--autotuning", "run", *known.options]
    done = subprocess.run(
        [*line, known.name, *known.arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300 * PATIENCE, check=False,
    )  # fmt: skip
    results = tmp_path / "autotuning_results"
    said = done.stdout + done.stderr
    assert "predicted best: z" in said, said
    best = json.loads((results / "ds_config_optimal.json").read_text())
    assert best["zero_optimization"]["stage"] in (1, 2)
    assert best["train_micro_batch_size_per_gpu"] * best["gradient_accumulation_steps"] * 2 == 8
    assert "autotuning" not in best
    assert (results / "cmd_optimal.txt").read_text().startswith("deepspeed --num_gpus 2 train.py --deepspeed_config")
    assert "tuning_space" in (results / "summary.txt").read_text()
    info = json.loads((results / "profile_model_info" / "model_info.json").read_text())
    assert info["num_params"] == sum(p.numel() for p in Net().parameters())
    names = {path.stem for path in (tmp_path / "autotuning_exps").glob("*.json")}
    assert 1 <= len(names) <= 5
    for name in names:
        assert {"ds_config.json", "exp.json", "cmd.txt", "stdout.log", "stderr.log"} <= set(os.listdir(results / name))
    if plant == "none":
        assert done.returncode == 0, said
        assert "trained 8 updates of 8" in said
        metrics = json.loads(next(results.glob("z*/metrics.json")).read_text())
        assert {"fwd", "bwd", "step", "latency", "throughput", "FLOPS_per_gpu", "rank"} <= set(metrics)
        assert metrics["FLOPS_per_gpu"] > 0
    else:
        assert "ValueError: planted" in said
        assert "not confirmed" in said
        assert done.returncode == 1  # the run that follows has the plant too
