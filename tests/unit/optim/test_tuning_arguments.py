"""The schedules' command-line options."""

from __future__ import annotations

import argparse

import pytest
import torch

from deepspeed.optim.lr_schedules import (
    OneCycle,
    add_tuning_arguments,
    build_scheduler,
    get_config_from_args,
    get_lr_from_config,
    override_params,
    parse_arguments,
)

OPTIONS = (
    "--lr_schedule OneCycle --cycle_min_lr 0.1 --cycle_max_lr 0.5 --cycle_first_step_size 7 --cycle_momentum false"
)


def test_options_make_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--mine", *OPTIONS.split()])
    args, rest = parse_arguments()
    assert rest == ["--mine"]
    config, problem = get_config_from_args(args)
    assert problem is None and config["params"] == {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 0.5,
        "cycle_first_step_size": 7,
        "cycle_momentum": False,
    }
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    assert isinstance(build_scheduler(config["type"], config["params"], optimizer), OneCycle)
    assert get_lr_from_config(config) == (0.5, "")
    assert get_lr_from_config({"type": "OneCycle", "params": None})[0] is None


def test_options_override_the_section() -> None:
    params = {"warmup_min_lr": 0.5, "warmup_num_steps": 3}
    args = add_tuning_arguments(argparse.ArgumentParser()).parse_args(["--warmup_num_steps", "9"])
    override_params(args, params)
    assert params == {"warmup_min_lr": 0.5, "warmup_num_steps": 9}
    assert get_config_from_args(args) == (None, "--lr_schedule is None; use one of LRRangeTest, OneCycle, WarmupLR, "
                                          "WarmupDecayLR, WarmupCosineLR")  # fmt: skip
    assert get_lr_from_config({"type": "WarmupLR", "params": {}})[0] is None
