"""Kinds of JSON that other people's programs carry: read, and what has no effect is said in one line each."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.config.load import load_raw
from tests.parallel.tiny import said, with_words

KINDS = {path.stem: path for path in sorted((Path(__file__).parent / "kinds").glob("*.json"))}
# kind: what each of its lines says
LINES = {
    "remarks": ("_comment = ", 'comment = "kept by hand"', "note = "),
    "settings_of_the_script": (
        "cuda_visible_devices = 0: unknown key, not read",
        'seed = 1: unknown key, not read; it belongs at "data_efficiency.seed"',
        "model_name = ",
        "lr = 0.1: unknown key, not read",
    ),
    "blocks_of_the_script": ("log = ", "comms_config = ", "monitor_config = "),
    "a_block_one_level_too_high": ('it belongs at "zero_optimization.offload_optimizer"',),
    "arguments_one_level_too_high": ('it belongs at "optimizer.params.adam_w_mode"', "scheduler.interval = "),
    "unknown_in_open_blocks": (
        "activation_checkpointing.checkpoint_in_cpu = false",
        "aio.file_system = ",
        "flops_profiler.granularity = ",
        "data_types.loss_dtype = ",
    ),
    "no_sub_groups": (
        "sub_group_size = 0 has no effect: the update runs group by group",
        "allgather_bucket_size = 0 has no effect",
        "buffer_size = 0 has no effect",
    ),
    "masters_from_16_bit": (),
    "clipping_among_arguments": ('write "gradient_clipping"',),
    "clipping_twice": ('"gradient_clipping" = 1.0 counts',),
    "autocast_over_bf16": (),
    "profiler_that_is_off": (),
    "no_step_profiled": ("flops_profiler.profile_step = -1: no step is profiled",),
    "no_count_of_checkpoints": (),
    "switches_as_numbers": (
        "zero_optimization.overlap_comm = 1: taken for true",
        'zero_optimization.contiguous_gradients = "true": taken for true',
        "bf16.enabled = 1: taken for true",
        'fp16.enabled = "false": taken for false',
    ),
    "numbers_in_quotes": (
        'gradient_clipping = "1.0": taken for 1',
        'zero_optimization.stage = "2": taken for 2',
        'zero_optimization.reduce_bucket_size = "5e8": taken for 500000000',
        'optimizer.params.lr = "1e-3": taken for 0.001',
    ),
    "dtype_over_a_sequence": (),
}


@pytest.mark.parametrize("kind", LINES)
def test_the_kind_is_read_and_each_thing_without_effect_is_said_once(kind):
    raw = load_raw(KINDS[kind])
    before = copy.deepcopy(raw)
    with said() as lines:
        for _ in range(2):
            DeepSpeedConfig(raw)
    assert raw == before
    for words in LINES[kind]:
        assert with_words(lines, words) == 1, (words, lines)
    assert len(lines) == len(LINES[kind]), lines


def test_every_file_is_a_kind():
    assert set(KINDS) == set(LINES)


def test_what_the_lines_say_is_what_holds():
    config = {kind: DeepSpeedConfig(load_raw(path)) for kind, path in KINDS.items()}
    assert config["clipping_among_arguments"].gradient_clipping == 0.5
    assert config["clipping_twice"].gradient_clipping == 1.0
    for kind in ("clipping_among_arguments", "clipping_twice"):
        assert "max_grad_norm" not in config[kind].get("optimizer.params")
    assert config["switches_as_numbers"].bf16.enabled is True
    assert config["switches_as_numbers"].fp16.enabled is False
    quoted = config["numbers_in_quotes"]
    assert (quoted.zero.stage, quoted.gradient_clipping, quoted.get("optimizer.params.lr")) == (2, 1.0, 1e-3)
    assert config["a_block_one_level_too_high"].zero.offload_optimizer.device == "none"
    assert config["no_count_of_checkpoints"].top.activation_checkpointing.number_checkpoints is None
    remarks = {row.path: row.remark for row in config["remarks"].explain()}
    assert remarks["_comment"] == remarks["note"] == "accepted and not read"


@pytest.mark.parametrize(
    "wrong",
    [
        {"zero_optimisation": {"stage": 2}},
        {"zero_optimization": {"stage3_gather": True}},
        {"bf16": {"enable": True}},
        {"bf16": {"comment": "x"}},
        {"fp16": {"opt_level": "O2"}},
        {"compile": {"backend": "inductor"}},
        {"tensorboard": {"log_path": "x"}},
        {"comet_": {"enabled": True}},
        {"gradient_acumulation_steps": 2},
        {"optimizer": {"typ": "AdamW"}},
        {"aio": {"block_sizes": 4096}},
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}},
        {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400}}},
        {"sparse_attention": {"mode": "fixed"}},
    ],
)
def test_what_stays_an_error(wrong):
    with pytest.raises(DeepSpeedConfigError):
        DeepSpeedConfig({"train_batch_size": 4, **wrong})


def test_a_block_that_is_absent_asks_for_nothing_when_named_as_a_remark():
    with pytest.raises(DeepSpeedConfigError, match='did you mean "comet"'):
        DeepSpeedConfig({"train_batch_size": 4, "comment": {"enabled": True}})
