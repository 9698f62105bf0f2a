"""Values as given: numbers, dtypes, aliases, deprecated names, look-ups, frozen sections."""

from __future__ import annotations

import enum
import logging
import subprocess
import sys

import pytest

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.foundation import log

BATCH = {"train_batch_size": 8}


@pytest.fixture
def lines(monkeypatch):
    """The log lines of the test; each line may be said again."""
    monkeypatch.setattr(log, "_said", set())
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    log.logger.addHandler(handler)
    yield found
    log.logger.removeHandler(handler)


def test_large_counts_may_be_floats():
    cfg = DeepSpeedConfig({**BATCH, "zero_optimization": {"reduce_bucket_size": 2e8, "stage": 3.0}})
    assert (cfg.zero.reduce_bucket_size, cfg.zero.stage) == (200_000_000, 3)
    assert isinstance(cfg.zero.reduce_bucket_size, int)


def test_steps_per_print_may_be_inf():
    assert DeepSpeedConfig({**BATCH, "steps_per_print": float("inf")}).steps_per_print == float("inf")
    assert DeepSpeedConfig(BATCH).steps_per_print is None


class Named(enum.Enum):
    bf16 = "bf16"


@pytest.mark.parametrize("spelling", ["bf16", "BF16", "bfloat16", "torch.bfloat16", Named.bf16])
def test_a_dtype_has_one_spelling_inside(spelling):
    cfg = DeepSpeedConfig({**BATCH, "communication_data_type": spelling, "data_types": {"grad_accum_dtype": spelling}})
    assert (cfg.communication_data_type, cfg.data_types.grad_accum_dtype) == ("bf16", "bf16")


@pytest.mark.parametrize("prefix", ["", "stage3_"])
def test_names_with_and_without_the_stage_prefix(prefix):
    names = ["prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "fixed_graph"]
    names += ["max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"]
    cfg = DeepSpeedConfig({**BATCH, "zero_optimization": {f"{prefix}{name}": 1 for name in names[:3] + names[4:6]}})
    assert all(cfg.get(f"zero_optimization.{prefix}{name}") == 1 for name in names[:3] + names[4:6])
    cfg = DeepSpeedConfig({**BATCH, "zero_optimization": {f"{prefix}{name}": True for name in (names[3], names[6])}})
    assert cfg.zero.stage3_fixed_graph and cfg.zero.gather_16bit_weights_on_model_save


def test_a_deprecated_name_works_with_one_warning(lines):
    given = {**BATCH, "zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}}
    for _ in range(2):
        cfg = DeepSpeedConfig(given)
    assert cfg.zero.gather_16bit_weights_on_model_save
    assert sum("is deprecated" in line for line in lines) == 1


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0)])
def test_the_legacy_boolean(lines, value, stage):
    cfg = DeepSpeedConfig({**BATCH, "zero_optimization": value, "allgather_size": 1e6})
    assert (cfg.zero.stage, cfg.zero.allgather_bucket_size) == (stage, 1_000_000)
    assert sum("is deprecated" in line for line in lines) == 2


def test_clipping_that_is_not_given_is_off():
    assert DeepSpeedConfig(BATCH).gradient_clipping == 0.0
    assert DeepSpeedConfig({**BATCH, "gradient_clipping": 1}).gradient_clipping == 1.0


def test_arguments_of_a_class_are_a_dict_of_what_was_given():
    params = {"lr": 1, "betas": (0.9, 0.99), "eps": (None, 1e-3), "own_flag": "x", "weight_decay": None}
    cfg = DeepSpeedConfig({**BATCH, "optimizer": {"type": "Whatever", "params": params}})
    assert cfg.optimizer.params == {"lr": 1.0, "betas": [0.9, 0.99], "eps": [None, 1e-3], "own_flag": "x"}
    assert cfg.scheduler is None


def test_sections_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        DeepSpeedConfig(BATCH).zero.stage = 3


def test_values_are_found_by_path():
    cfg = DeepSpeedConfig({**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}})
    assert cfg.get("optimizer.params.lr") == 0.5
    assert cfg.get("bfloat16.enabled") is False
    assert cfg.get("scheduler.params.warmup_type") is None
    assert cfg.section("zero_optimization.leaf_module").names == []
    with pytest.raises(DeepSpeedConfigError, match='did you mean "stage"'):
        cfg.get("zero_optimization.stge")
    with pytest.raises(DeepSpeedConfigError, match="a value, not a section"):
        cfg.section("train_batch_size")


def test_torch_is_not_imported():
    code = "import sys, deepspeed.config.__main__; sys.exit(any(name in sys.modules for name in ('torch', 'hjson')))"
    blocked = (
        "import importlib.machinery, sys, types; deepspeed = types.ModuleType('deepspeed'); "
        "deepspeed.__path__ = ['deepspeed']; sys.modules['deepspeed'] = deepspeed; "
    )
    assert subprocess.run([sys.executable, "-c", blocked + code], check=False).returncode == 0


@pytest.mark.parametrize("level", ["O1", "O2", "O3", None])
def test_apex_becomes_autocast_with_one_warning(lines, level):
    block = {"enabled": True, "loss_scale": "dynamic", **({"opt_level": level} if level else {})}
    for _ in range(2):
        cfg = DeepSpeedConfig({**BATCH, "amp": block})
        assert (cfg.torch_autocast.enabled, cfg.torch_autocast.dtype) == (True, "bf16")
    assert sum("torch_autocast" in line for line in lines) == 1


def test_apex_without_an_effect_is_fp32(lines):
    assert not DeepSpeedConfig({**BATCH, "amp": {"enabled": False, "opt_level": "O2", "x": 1}}).torch_autocast.enabled
    assert not lines
    assert not DeepSpeedConfig({**BATCH, "amp": {"enabled": True, "opt_level": "O0"}}).torch_autocast.enabled
    assert sum("fp32" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"torch_autocast": {"enabled": True}}, "amp.enabled"),
        ({"fp16": {"enabled": True}}, "amp.enabled"),
        ({"amp": {"enabled": True, "opt_level": "O7"}}, "amp.opt_level"),
        ({"amp": {"enabled": 2}}, "amp.enabled"),
    ],
)
def test_apex_beside_what_contradicts_it_is_refused(others, words):
    with pytest.raises(DeepSpeedConfigError, match=words):
        DeepSpeedConfig({**BATCH, "amp": {"enabled": True}, **others})


def test_wire_auto_sets_both_keys():
    wire = DeepSpeedConfig({**BATCH, "wire": "auto", "zero_optimization": {"stage": 2}}).wire
    assert (wire.gradients, wire.weights) == ("measured", "measured")
    assert DeepSpeedConfig({**BATCH, "wire": {"gradients": "auto"}}).wire.gradients == "none"
