"""Every class of problem: one error, one line each, with path, value and what to do."""

from __future__ import annotations

import pytest

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.config.errors import near
from deepspeed.config.sections.top import TopLevel
from deepspeed.errors import ArgumentError, NotAvailableError
from tests.parallel.tiny import said, with_words

BATCH = {"train_batch_size": 8}


def problems_of(config, world=1, **rest):
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig({**BATCH, **config, **rest}, world=world)
    assert isinstance(caught.value, (ValueError, AssertionError))
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        # unknown, with the nearest name
        ({"zero_optimization": {"stge": 2}}, 'zero_optimization.stge = 2: unknown key; did you mean "stage"?'),
        ({"optimiser": {}}, 'optimiser = {}: unknown key; did you mean "optimizer"?'),
        ({"zero_optimisation": {"stage": 2}}, 'unknown key; did you mean "zero_optimization"?'),
        ({"gradient_cliping": 1}, 'unknown key; did you mean "gradient_clipping"?'),
        ({"activation_checkpointing": {"profil": True}}, 'profil = true: unknown key; did you mean "profile"?'),
        ({"bf16": {"qqqq": 1}}, "bf16.qqqq = 1: unknown key; the keys here are"),
        # misplaced
        ({"zero_optimization": {"gradient_clipping": 1}}, 'it belongs at "gradient_clipping"'),
        ({"zero_optimization": {"bf16": {"enabled": True}}}, 'zero_optimization.bf16 = {"enabled": true}: unknown key'),
        # type and range
        ({"zero_optimization": {"stage": 5}}, "zero_optimization.stage = 5: must be at most 3"),
        ({"zero_optimization": {"stage": "two"}}, 'zero_optimization.stage = "two": expected whole number'),
        ({"zero_optimization": 2}, 'zero_optimization = 2: expected an object with keys such as "stage"'),
        ({"zero_optimization": {"stage3_prefetch_bucket_size": 1.5}}, "zero_optimization.stage3_prefetch_bucket_size"),
        ({"fp16": {"enabled": "maybe"}}, 'fp16.enabled = "maybe": expected true or false'),
        ({"fp16": {"enabled": 2}}, "fp16.enabled = 2: expected true or false"),
        ({"fp16": {"loss_scale": float("nan")}}, "fp16.loss_scale = NaN: must be finite"),
        ({"fp16": {"initial_scale_power": 1e999}}, "fp16.initial_scale_power = Infinity: expected whole number"),
        ({"gradient_clipping": -1}, "gradient_clipping = -1: must be at least 0"),
        ({"communication_data_type": "int2"}, 'communication_data_type = "int2": expected "fp32" or "fp16" or "bf16"'),
        ({"wire": {"gradients": "int2"}}, 'wire.gradients = "int2": expected "none" or "bf16" or "int8" or "int4"'),
        ({"wire": {"error_beta": 1}}, "wire.error_beta = 1: must be below 1"),
        ({"steps_per_print": 0}, "steps_per_print = 0: expected a number above 0, inf, or null"),
        ({"optimizer": "Adam"}, 'optimizer = "Adam": expected an object with keys such as "type"'),
        ({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}, 'optimizer.params.lr = "fast": expected number'),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
            "optimizer.params.betas = [0.9]: needs at least 2",
        ),
        (
            {"tensor_parallel": {"partition_config": {"layer_specs": [{"partition_type": "diagonal"}]}}},
            'tensor_parallel.partition_config.layer_specs[0].partition_type = "diagonal"',
        ),
        # conflicts
        (
            {"wire": {"gradients": "int8"}, "communication_data_type": "int4"},
            "communication_data_type (int4) and wire.gradients (int8) are two encodings of gradients",
        ),
        (
            {"wire": {"gradients": "int8"}, "zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            "zero_optimization.zero_quantized_gradients (int4) and wire.gradients (int8) are two encodings",
        ),
        (
            {"wire": {"weights": "bf16"}, "zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights (int8) and wire.weights (bf16) are two encodings of weights",
        ),
        ({"wire": {"weights": "int8"}}, 'wire.weights = "int8": needs stage 1, 2 or 3: stage 0 sends no weights'),
        (
            {"sparse_gradients": True, "zero_optimization": {"stage": 3}},
            "sparse_gradients = true: needs stage 0, 1 or 2, not 3",
        ),
        ({"wire": {"error_memory": True}}, "wire.error_memory needs gradients in int8 or int4"),
        (
            {"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.5}}},
            "zero_optimization.zeropp_loco_param needs gradients in int8 or int4",
        ),
        (
            {
                "zero_optimization": {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.5}},
                "wire": {"error_beta": 0.7},
            },
            "zero_optimization.zeropp_loco_param and wire.error_beta or wire.error_reset are two settings",
        ),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_hpz_partition_size = 2: needs stage 3, not 0"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are all true"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, 'given twice: "bf16" is the same key'),
        ({"zero_optimization": {"compute_grad_norm": False}, "gradient_clipping": 1}, "needs the norm"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "mics_shard_size = 2: needs stage 3"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "must divide the 1 rank(s)"),
        ({"data_parallel_size": 4}, "data_parallel_size = 4: this run has 1 data-parallel rank(s)"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type is missing"),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": -1}}},
            "optimizer.params.max_grad_norm = -1: must be at least 0",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_step": 1}}},
            "warmup_step = 1: not an argument of WarmupLR",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"cycle_min_lr": 1}}}, "not an argument of WarmupLR"),
        (
            {"scheduler": {"type": "WarmupDecayLR"}},
            "scheduler.params.total_num_steps is missing: WarmupDecayLR needs it",
        ),
        # deprecated together with new
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "none"}}},
            'deprecated, and its new name "zero_optimization.offload_optimizer.device" is given as well',
        ),
        ({"zero_optimization": {"cpu_offload": "yes"}}, "expected true or false"),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": 3}},
            "offload_optimizer = 3: expected an object",
        ),
        ({"zero_optimization": 3, "allgather_size": 5}, "zero_optimization = 3: expected an object"),
        # offload
        ({"zero_optimization": {"cpu_offload": True}}, 'offload_optimizer.device = "cpu": needs stage 1, 2 or 3'),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.nvme_path is missing",
        ),
        ({"bf16": {"bf16_optimizer_states": True}}, "needs bf16.bf16_master_weights_and_grads = true"),
    ],
)
def test_the_line_names_path_value_and_remedy(config, line):
    assert line in problems_of(config)


def test_all_problems_come_in_one_error():
    text = problems_of(
        {"fp17": 1, "fp16": {"enabled": 3, "hysterisis": 1}, "gradient_clipping": "x", "nebula": {"enabled": True}},
        train_batch_size=-4,
    )
    assert "6 problems" in text
    for path in ("fp17", "fp16.enabled", "fp16.hysterisis", "gradient_clipping", "nebula.enabled", "train_batch_size"):
        assert f"  {path} = " in text


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "zero_optimization.offload_optimizer.super_offload",
        ),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.2}}}, "zero_optimization.zenflow"),
        ({"nebula": {"enabled": True, "load_path": "x"}}, "nebula.enabled"),
        ({"graph_harvesting": True}, "graph_harvesting"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type"),
        ({"eigenvalue": {"enabled": True}}, "eigenvalue.enabled"),
    ],
)
def test_what_is_not_available_is_refused_by_name(config, path):
    with pytest.raises(NotAvailableError, match="is (not available yet: comes with|refused for good: )") as caught:
        DeepSpeedConfig({**BATCH, **config})
    assert f"{path} = " in str(caught.value)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"expert_parallel": {"size": 2, "use_grouped_mm": False}},
            "is not available yet: comes with mixture of experts",
        ),
        ({"sparse_attention": {"mode": "fixed"}}, "is not available yet: comes with science and sparse blocks"),
        ({"datastates_ckpt": {"a": 1}}, "is refused for good: asynchronous, atomic saves are built in"),
        ({"optimizer": {"type": "Adam", "params": {"freeze_step": 4}}}, "is refused for good: DeepSpeed 0.19 has"),
    ],
)
def test_a_refusal_says_what_brings_the_key_or_why_it_never_comes(config, text):
    with pytest.raises(NotAvailableError, match=text):
        DeepSpeedConfig({**BATCH, **config})


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"offload_optimizer": {"device": "none", "nvme_path": None, "pin_memory": False}}},
        {"zero_optimization": {"offload_param": None, "zenflow": None}},
        {"zero_optimization": {"offload_param": {"device": "none", "nvme_path": "/local", "buffer_count": 9}}},
        {"nebula": {"enabled": False, "load_path": "x"}},
        {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False}},
        {"autotuning": {"enabled": False, "metric": "latency"}, "elasticity": {"enabled": False, "min_gpus": 4}},
        {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": False, "method": "topk"}}}},
        {"optimizer": None, "scheduler": None, "fp16": None, "sparse_gradients": False},
        {"checkpoint": {"tag_validation": "WARN"}, "compile": {"deepcompile": False, "passes": []}},
        {"aio": {"block_size": 4096, "thread_count": 4}},
        {"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1},
    ],
)
def test_values_that_ask_for_nothing_pass(config):
    DeepSpeedConfig({**BATCH, **config})


def test_names_that_clients_send_for_others_are_tolerated():
    cfg = DeepSpeedConfig({**BATCH, "msamp": {"enabled": True}, "zero_optimization.reduce_bucket_size": 1.5})
    assert {row.path: row.remark for row in cfg.explain()}["msamp"] == "accepted and not read"
    assert cfg.zero.reduce_bucket_size == 500_000_000


def test_wrong_names_and_values_of_one_block_come_together():
    groups = {None: {}, "g": 3, "h": {"params": {"start_bits": "x"}}}
    text = problems_of({"compression_training": {"weight_quantization": {"different_groups": groups}}})
    assert "3 problems" in text
    assert 'different_groups.h.params.start_bits = "x"' in text


def test_a_configuration_that_holds_itself():
    config = {"train_batch_size": 8, "wandb": {}}
    config["wandb"]["project"] = config
    with pytest.raises(DeepSpeedConfigError, match="holds itself"):
        DeepSpeedConfig(config)


@pytest.mark.parametrize("world", [0, -1])
def test_the_world_has_at_least_one_rank(world):
    with pytest.raises(ArgumentError, match="at least 1"):
        DeepSpeedConfig(BATCH, world=world)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offloaded_parameters_are_moot_below_stage_3(stage, device):
    with said() as lines:
        config = DeepSpeedConfig({**BATCH, "zero_optimization": {"stage": stage, "offload_param": {"device": device}}})
    assert config.zero.offload_param.device == device
    assert with_words(lines, f'offload_param.device = "{device}" has no effect: at stage {stage}') == len(lines) == 1


def test_a_scheduler_without_a_type_makes_none():
    with said() as lines:
        assert DeepSpeedConfig({**BATCH, "scheduler": {"params": {"warmup_num_steps": 3}}}).scheduler.type is None
    assert with_words(lines, "scheduler has no type:") == len(lines) == 1


@pytest.mark.parametrize("name", ["dp", "pp", "id", "fp8", "all"])
def test_two_edits_of_three_letters_make_another_word(name: str) -> None:
    assert near(name, 2, TopLevel) is None
    assert near("amb", 2, TopLevel) == "amp"
    assert near("bf61", {}, TopLevel) == "bf16"
