"""Origins, the `ds_config` command, and the generated reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from deepspeed.config import DeepSpeedConfig, Facts
from deepspeed.config.__main__ import main
from deepspeed.config.docs import reference
from deepspeed.config.schema import all_keys
from deepspeed.engine.build import choose_optimizer
from deepspeed.errors import DeepSpeedError, NotAvailableError
from deepspeed.monitor.base import MLflowMonitor
from deepspeed.monitor.comet import CometMonitor
from deepspeed.monitor.monitor import MonitorMaster

GIVEN = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_gather_fp16_weights_on_model_save": True},
    "msamp": {},
}


def test_every_value_has_an_origin():
    found = {row.path: row for row in DeepSpeedConfig(GIVEN, world=2, facts=Facts(hidden_size=8)).explain()}
    origins = {path: row.origin for path, row in found.items()}
    assert origins["train_batch_size"] == "given"
    assert origins["train_micro_batch_size_per_gpu"].startswith("auto: derived: train_batch_size")
    assert origins["gradient_accumulation_steps"] == "default"
    assert origins["zero_optimization.reduce_bucket_size"].startswith("auto: hidden_size squared")
    assert origins["optimizer.params.lr"].startswith("auto: the learning rate")
    assert origins["optimizer.params.betas"] == "auto: the default of the class"
    name = "zero_optimization.stage3_gather_fp16_weights_on_model_save"
    assert origins["zero_optimization.gather_16bit_weights_on_model_save"] == f"deprecated: {name}"
    assert found["msamp"].remark == "accepted and not read"
    plain = {key.path for key in all_keys() if "[]" not in key.path and "<" not in key.path}
    optional = ("optimizer.", "scheduler.", "sparse_attention.", "zero_optimization.z")
    assert {path for path in plain if not path.startswith(optional)} <= set(found)


def test_explain_prints_rows(tmp_path, capsys):
    (tmp_path / "c.json").write_text(json.dumps(GIVEN))
    assert main(["explain", str(tmp_path / "c.json"), "--world", "2", "--hidden-size", "8"]) == 0
    short = capsys.readouterr().out
    assert "zero_optimization.reduce_bucket_size" in short
    assert "nebula.load_path" not in short
    assert main(["explain", str(tmp_path / "c.json"), "--all"]) == 0
    assert "nebula.load_path" in capsys.readouterr().out


def test_explain_of_a_wrong_file_prints_the_problems(tmp_path, capsys):
    (tmp_path / "c.json").write_text('{"train_batch_size": 8, "zero_optimisation": 1}')
    assert main(["explain", str(tmp_path / "c.json")]) == 1
    assert "zero_optimisation = 1: unknown key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ({"type": "AdamV"}, "optimizer.type 'AdamV' is unknown (did you mean "),
        ({"type": "AdamW", "params": {"beta": [0.9, 0.99]}}, "optimizer.params.beta is not a parameter of FusedAdam"),
        ({"type": "LBFGS"}, "LBFGS cannot be used: it evaluates the model several times"),
        ({"type": "OneBitAdam"}, "is refused for good: DeepSpeed 0.19 has ended the one-bit optimizers"),
    ],
)
def test_explain_refuses_an_optimizer_as_initialize_does(tmp_path, capsys, optimizer, text):
    config = {"train_batch_size": 1, "optimizer": optimizer}
    (tmp_path / "c.json").write_text(json.dumps(config))
    assert main(["explain", str(tmp_path / "c.json")]) == 1
    said = capsys.readouterr().err
    assert text in said
    model = nn.Linear(2, 2)
    with pytest.raises(DeepSpeedError) as caught:
        choose_optimizer(model, None, list(model.parameters()), DeepSpeedConfig(config))
    assert str(caught.value).splitlines()[0] == said.splitlines()[0]


def test_explain_names_the_monitor_whose_package_is_missing(tmp_path, capsys, monkeypatch):
    for monitor in (CometMonitor, MLflowMonitor):
        monkeypatch.setattr(monitor, "module", "no_such_package")
    config = {"train_batch_size": 1, "comet": {"enabled": True}, "mlflow": {"enabled": True}}
    (tmp_path / "c.json").write_text(json.dumps(config))
    assert main(["explain", str(tmp_path / "c.json")]) == 0
    said = capsys.readouterr().out
    assert "on this machine, initialize refuses: comet.enabled is true, and CometMonitor writes through" in said
    with pytest.raises(NotAvailableError) as caught:  # both in one error
        MonitorMaster(DeepSpeedConfig(config).monitor_config)
    for line in str(caught.value).split("; "):
        assert "pip install 'deepspeed[" in line and f"initialize refuses: {line}" in said
    assert "mlflow.enabled is true" in str(caught.value)


def test_the_command_writes_the_reference(tmp_path):
    assert main(["reference", str(tmp_path / "r.md")]) == 0
    assert (tmp_path / "r.md").read_text() == reference()


def test_the_committed_reference_is_current():
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference(), "run `ds_config reference` and commit the page"


def test_every_key_is_in_the_reference():
    page, paths = reference(), [key.path for key in all_keys()]
    missing = [path for path in paths if f"`{path.partition('.')[2] or path}`" not in page and f"`{path}`" not in page]
    assert len(paths) > 500 and missing == []
