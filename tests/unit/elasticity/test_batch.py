"""The batch of an `elasticity` block against the table of the interface."""

from __future__ import annotations

import json

import pytest

from deepspeed.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from deepspeed.elasticity.batch import _SCALES, main
from deepspeed.launcher.elastic import valid_sizes

ROW_1 = "1 2 3 4 5 6 7 8 10 12 14 15 20 21 24 28 30 35 40 42 56 60 70 84 105 120 140 168 210 280 420 840"
ROW_2 = "32 34 36 48 51 64 68 72 96 102 136 144 153 192 204 272 288 306 408 576 612 816 1224"
BY_4 = "4 8 12 16 20 24 32 40 48 60 64 80 96 120 160 192 240 320 480 960"
BY_2 = "2 4 6 8 10 12 16 20 24 30 32 40 48 60 64 80 96 120 160 192 240 320 480 960"


def config(largest, micro, **keys):
    return {"elasticity": {"enabled": True, "max_train_batch_size": largest, "micro_batch_sizes": micro, **keys}}


OLD = {"version": 0.1}
NODES = {"num_gpus_per_node": 4}
HALF = {**NODES, "model_parallel_size": 2}


@pytest.mark.parametrize(
    ("largest", "micro", "keys", "world", "batch", "valid", "own"),
    [
        (2000, [2, 4, 6], OLD, 0, 1680, ROW_1, None),
        (10000, [8, 12, 16, 17], {**OLD, "min_gpus": 32, "max_gpus": 1500}, 0, 9792, ROW_2, None),
        (64, [1, 2, 4], OLD, 4, 60, "1 2 3 4 5 6 10 12 15 20 30 60", 1),
        (64, [1, 2, 4], OLD, 5, 60, "1 2 3 4 5 6 10 12 15 20 30 60", 4),
        (64, [1, 2, 4], {**OLD, "prefer_larger_batch": False}, 0, 60, "1 2 3 4 5 6 10 12 15 20 30 60", None),
        (24, [2, 3], {**OLD, "min_gpus": 2, "max_gpus": 6}, 0, 24, "2 3 4 6", None),
        (100, [7], OLD, 0, 84, "1 2 3 4 6 12", None),
        (32, [1, 2, 4], {**OLD, "max_gpus": 8}, 0, 24, "1 2 3 4 6 8", None),
        (48, [1, 2, 4], {**OLD, "max_gpus": 8}, 6, 48, "1 2 3 4 6 8", 4),
        (2000, [2, 4, 6], {}, 4, 1680, ROW_1, 6),
        (2000, [2, 4, 6], NODES, 16, 1920, BY_4, 6),
        (2000, [2, 4, 6], HALF, 16, 1920, BY_2, 6),
        (2000, [2, 4, 6], {**HALF, "min_gpus": 4, "max_gpus": 64}, 8, 1920, "2 4 6 8 10 12 16 20 24 30 32", 6),
    ],
)
def test_the_table(largest, micro, keys, world, batch, valid, own):
    found = compute_elastic_config(config(largest, micro, **keys), "1.0.0", world)
    assert found == (batch, [int(count) for count in valid.split()], *([own] if world else []))
    if own is not None:
        ranks = world // keys.get("model_parallel_size", 1)
        assert batch % (own * ranks) == 0


def test_the_scales_are_the_highly_composite_numbers():
    assert len(_SCALES) == 38
    assert _SCALES[:18] == [1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520]
    assert _SCALES[-1] == 720720


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (config(4, [8], **OLD), ValueError, "max_train_batch_size 4"),
        (config(2000, [2, 4]), ElasticityConfigError, "WORLD_SIZE"),
        (config(2000, [2, 4], **OLD, model_parallel_size=2), ElasticityConfigError, "version 0.2"),
        (config(2000, [2, 4], version=0.3), ElasticityConfigError, "0.3"),
        ({"elasticity": {"enabled": True, "max_train_batch_size": 9}}, ElasticityConfigError, "micro_batch_sizes"),
        (config(2000, [0]), ElasticityConfigError, "micro_batch_sizes"),
        ({"elasticity": {"enabled": False}}, ElasticityConfigError, "enabled"),
        ({}, ElasticityConfigError, "no `elasticity` block"),
        (config(24, [2, 3], **OLD, min_gpus=5, max_gpus=5), ElasticityError, "no batch up to 24"),
    ],
)
def test_what_cannot_be_served(monkeypatch, given, error, words):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(error, match=words):
        compute_elastic_config(given, "1.0.0")


def test_null_counts_as_missing(monkeypatch):
    """In the block, in its place, and in the launcher, which reads the JSON without its sections."""
    monkeypatch.delenv("DEEPSPEED_ELASTICITY_CONFIG", raising=False)
    assert not elasticity_enabled({"elasticity": None})
    plain, nulls = config(64, [1, 2, 4]), dict.fromkeys(["version", "min_gpus", "model_parallel_size"])
    with_nulls = {"elasticity": {**plain["elasticity"], **nulls}}
    assert compute_elastic_config(with_nulls, "1.0.0", 4) == compute_elastic_config(plain, "1.0.0", 4)
    sizes = [valid_sizes([], {"DEEPSPEED_ELASTICITY_CONFIG": json.dumps(c["elasticity"])}) for c in (plain, with_nulls)]
    assert sizes[0] == sizes[1]


def test_a_world_that_does_not_fit():
    with pytest.raises(ElasticityIncompatibleWorldSize, match="7 rank"):
        compute_elastic_config(config(64, [1, 2, 4], **OLD), "1.0.0", 7)


def test_a_world_of_the_environment_that_does_not_fit(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7")
    with pytest.raises(ElasticityIncompatibleWorldSize, match="7 rank"):
        compute_elastic_config(config(64, [1, 2, 4], **OLD), "1.0.0", return_microbatch=True)


def test_a_version_without_elasticity():
    with pytest.raises(ElasticityError, match="0.3.7"):
        compute_elastic_config(config(64, [1], **OLD), "0.3.7")


def test_the_schedulers_view_must_be_ours(monkeypatch):
    own = config(64, [1, 2], **OLD)["elasticity"]
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(own))
    ensure_immutable_elastic_config(own)
    with pytest.raises(ElasticityConfigError, match="max_batch is 32 here and 64"):
        ensure_immutable_elastic_config({**own, "max_train_batch_size": 32})


def test_the_command(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(48, [1, 2, 4], **OLD, max_gpus=8)))
    assert main(["-c", str(path), "-w", "6"]) == 0
    out = capsys.readouterr().out
    assert "final_batch_size .... 48" in out and "[1, 2, 3, 4, 6, 8]" in out and "micro_batch_size .... 4" in out
    path.write_text("{}")
    assert main(["-c", str(path)]) == 1
