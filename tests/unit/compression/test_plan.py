"""`ds_compress plan` of a model of 70 B parameters, and of models whose units cannot go, with the reasons."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.compression import cli
from deepspeed.compression.pruning.pruning_plan import PruningPlan

LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.mark.slow
def test_the_plan_of_a_70_b_model_takes_less_than_a_minute(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    torch.set_num_threads(1)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert cli.main(["plan", str(tmp_path), "--json"]) == 0
    seconds = time.process_time() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    rows = {row.get("kind"): row for row in json.loads(capsys.readouterr().out)}
    with capsys.disabled():
        print(f"plan of {rows[None]['parameters']:,} parameters: {seconds:.1f} s of CPU, peak + {grown:.0f} MiB")
    assert rows[None]["parameters"] > 70e9 and seconds < 60 and grown < 2048
    assert {kind: "refused" in rows[kind] for kind in ("ffn", "heads", "layers")} == dict.fromkeys(
        ("ffn", "heads", "layers"), False
    )
    assert rows["ffn"]["proof"] <= 1e-5 and rows["heads"]["proof"] <= 1e-5
    assert rows["ffn"]["parameters_gone"] == 80 * 3 * 8192 * 28672 // 2


def test_experts_whose_number_cannot_be_smaller_are_a_row_of_the_plan() -> None:
    from transformers import PretrainedConfig

    class Mixture(nn.Module):
        """Each expert has parameters with names of its own."""

        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config = config
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(config.num_experts))

    config = PretrainedConfig(num_experts=4)
    rows = {row.get("kind"): row for row in cli.plan_rows(Mixture(config), config, None, 0.5)}
    assert list(rows) == [None, *cli.KINDS] and "other parameters appear" in rows["experts"]["refused"]


def test_the_reason_for_channels_is_the_first_one() -> None:
    plan = PruningPlan(nn.Sequential(nn.Conv2d(3, 4, 1)))
    assert plan.family_of("0.weight", 0, "channels") is None
    assert "has no example_input_array" in plan.why_not("channels", ["0"])
