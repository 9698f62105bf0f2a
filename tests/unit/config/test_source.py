"""Where a configuration may come from, and what is said when it cannot be read."""

from __future__ import annotations

import base64
import json
import random

import pytest

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, load_raw

CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}


def test_a_dict_is_kept_by_reference_and_not_changed():
    given = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "zero_optimization": True}
    before = json.dumps(given)
    cfg = DeepSpeedConfig(given, world=2)
    assert cfg.raw is given
    assert json.dumps(given) == before
    assert cfg.train_batch_size == 8


def test_json_hjson_and_base64_read_the_same(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(CONFIG))
    (tmp_path / "c.hjson").write_text("{\n # a comment\n train_batch_size: 8,\n zero_optimization: {stage: 2},\n}")
    encoded = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    for source in (str(tmp_path / "c.json"), tmp_path / "c.json", str(tmp_path / "c.hjson"), encoded):
        assert load_raw(source) == CONFIG


@pytest.mark.parametrize(
    "text", ['{"train_batch_size": 8, "train_batch_size": 4}', "{fp16: {enabled: true, enabled: 1}}"]
)
def test_duplicate_keys_are_named(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match="duplicate keys in one object: (train_batch_size|enabled)"):
        load_raw(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": ', "not valid JSON or HJSON.*line 1"),
        ("[1, 2]", "the top must be an object"),
        ("\x00", "not valid|the top must be"),
    ],
)
def test_a_file_that_is_not_json_is_an_error(tmp_path, text, words):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(DeepSpeedConfigError, match=words):
        DeepSpeedConfig(tmp_path / "c.json")


@pytest.mark.parametrize("name", ["missing.json", "missing", "", "x" * 5000, "a\x00b", "."])
def test_a_missing_file_is_named(name):
    with pytest.raises(DeepSpeedConfigError, match="cannot be read"):
        load_raw(name)


@pytest.mark.parametrize("thing", [None, 3, [1], b"{}", object()])
def test_other_things_are_not_configurations(thing):
    with pytest.raises(DeepSpeedConfigError, match="a dict, a path"):
        load_raw(thing)


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "c.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(DeepSpeedConfigError, match="UTF-8"):
        load_raw(tmp_path / "c.json")


def test_damaged_files_end_in_a_config_error_or_are_read(tmp_path):
    rng = random.Random(7)
    text = json.dumps(
        {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}}}, indent=1
    )
    for _ in range(300):
        at = rng.randrange(len(text))
        damaged = text[:at] + rng.choice(["", "{", "}", ",", '"', "\n", "]", "#", "1e"]) + text[at + rng.randrange(4) :]
        (tmp_path / "c.json").write_text(damaged)
        try:
            DeepSpeedConfig(tmp_path / "c.json")
        except DeepSpeedConfigError:
            pass
