"""What "auto" becomes, and what is said when it cannot become anything."""

from __future__ import annotations

import pytest

from deepspeed.config import BatchSizeError, DeepSpeedConfig, DeepSpeedConfigError, Facts
from deepspeed.config.schema import all_keys

BATCH = {"train_batch_size": 8}
TRIPLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
FACTS = Facts(
    hidden_size=64, loader_batch_size=4, num_train_steps=500, device="cuda", bf16_fast=True, learning_rate=5e-5
)


def test_sizes_come_from_the_width_of_the_model():
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto", **dict.fromkeys(names, "auto")}
    known = DeepSpeedConfig({**BATCH, "zero_optimization": zero}, facts=FACTS)
    assert [known.get(f"zero_optimization.{name}") for name in names] == [4096, 3686, 640]
    assert known.zero.gather_16bit_weights_on_model_save
    unknown = DeepSpeedConfig({**BATCH, "zero_optimization": zero})
    assert [unknown.get(f"zero_optimization.{name}") for name in names] == [500_000_000, 50_000_000, 100_000]


@pytest.mark.parametrize(
    ("fixed", "expected"),
    [
        ({}, (8, 4, 1)),
        ({"gradient_accumulation_steps": 3}, (24, 4, 3)),
        ({"train_batch_size": 16}, (16, 4, 2)),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 8}, (16, 1, 8)),
        ({"train_micro_batch_size_per_gpu": 2}, (4, 2, 1)),
    ],
)
def test_the_batch_triple(fixed, expected):
    cfg = DeepSpeedConfig({**dict.fromkeys(TRIPLE, "auto"), **fixed}, world=2, facts=FACTS)
    assert tuple(cfg.get(name) for name in TRIPLE) == expected


def test_a_batch_that_cannot_be_found_names_the_key_and_what_would():
    with pytest.raises(BatchSizeError, match='per_gpu = "auto": cannot be resolved: .*pass a loader'):
        DeepSpeedConfig(dict.fromkeys(TRIPLE, "auto"))


@pytest.mark.parametrize(
    ("device", "fast", "expected"),
    [("cuda", True, (True, False)), ("cuda", False, (False, True)), ("cpu", False, (False, False))],
)
def test_precision_comes_from_the_machine(device, fast, expected):
    given = {**BATCH, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    cfg = DeepSpeedConfig(given, facts=Facts(device=device, bf16_fast=fast))
    assert (cfg.bf16.enabled, cfg.fp16.enabled) == expected


@pytest.mark.parametrize(("first", "second"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_an_automatic_precision_gives_way_to_a_given_one(first, second):
    cfg = DeepSpeedConfig({**BATCH, first: {"enabled": True}, second: {"enabled": "auto"}}, facts=FACTS)
    assert cfg.section(first).enabled and not cfg.section(second).enabled


def test_precision_needs_a_machine():
    with pytest.raises(DeepSpeedConfigError, match='bf16.enabled = "auto": cannot be resolved: .*machine'):
        DeepSpeedConfig({**BATCH, "bf16": {"enabled": "auto"}})


def test_numbers_of_optimizer_and_scheduler():
    given = {
        **BATCH,
        "optimizer": {"type": "Lion", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
    }
    cfg = DeepSpeedConfig(given, facts=Facts(num_train_steps=500))
    assert cfg.optimizer.params == {"lr": 1e-4}
    assert cfg.scheduler.params == {
        "warmup_min_lr": 0.0, "warmup_max_lr": 1e-4, "warmup_num_steps": 50, "total_num_steps": 500,
    }  # fmt: skip
    assert DeepSpeedConfig(given, facts=FACTS).scheduler.params["warmup_max_lr"] == 5e-5
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig(given)
    assert 'scheduler.params.total_num_steps = "auto": cannot be resolved: give the number' in str(caught.value)
    assert "problems" not in str(caught.value)


def test_any_key_takes_auto_and_none_keeps_it():
    for key in all_keys():
        if key.path.startswith(("zero_optimization.zenflow", "sparse_attention")):
            continue  # the mere presence of these blocks asks for what is not available
        if "[]" in key.path or "<name>" in key.path or key.path in ("optimizer.type", "scheduler.type"):
            continue
        config: dict = dict(BATCH)
        here = config
        *blocks, last = key.path.split(".")
        for block in blocks:
            here = here.setdefault(block, {})
        here[last] = "auto"
        if blocks and blocks[0] == "optimizer":
            config["optimizer"]["type"] = "AdamW"
        if blocks and blocks[0] == "scheduler":
            config["scheduler"]["type"] = "StepLR"
        if key.path == "train_batch_size":
            config["train_micro_batch_size_per_gpu"] = 2
        value = DeepSpeedConfig(config, facts=FACTS).get(key.path)
        assert value != "auto" or key.default == "auto", key.path


def test_the_configuration_of_zero_init_may_hold_auto_anywhere():
    given = {
        **dict.fromkeys(TRIPLE, "auto"),
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    cfg = DeepSpeedConfig.for_init(given)
    assert (cfg.zero.stage, cfg.bf16.enabled, cfg.train_batch_size) == (3, False, 0)
    assert DeepSpeedConfig.for_init({"zero_optimization": {"stage": 3}}).zero.stage == 3
    with pytest.raises(DeepSpeedConfigError, match="stge"):
        DeepSpeedConfig.for_init({"zero_optimization": {"stge": 3}})
