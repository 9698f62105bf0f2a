"""No silent key: every key of the table, away from its default, changes the plan, is refused, or is moot."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import Any

import pytest

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.config.docs import reference
from deepspeed.config.schema import all_keys
from deepspeed.config.sections.optimizer import ARGUMENTS, REQUIRED
from deepspeed.config.unavailable_keys import OUTLOOKS, outlook
from deepspeed.errors import NotAvailableError

# These two cannot leave their default without a conflict in a world of one rank.
CONFLICTS = {
    "data_parallel_size": "this run has",
    "zero_optimization.mics_shard_size": "must divide",
    "zero_optimization.zero_hpz_partition_size": "must divide",
}
WEIGHTS = {"start_bits": 8, "target_bits": 4, "quantization_period": 3}
PRUNED = ("sparse_pruning", "row_pruning", "head_pruning", "channel_pruning", "expert_pruning")
PARAMS = {name: {"dense_ratio": 0.25} for name in PRUNED} | {
    "weight_quantization": WEIGHTS,
    "activation_quantization": {"bits": 8},
}
KEYS = {key.path: key for key in all_keys()}


def away_from(kind: str, default: Any) -> Any:
    """A legal value that is not the default."""
    if kind == "true or false":
        return not default
    if kind.startswith('"'):
        return next(value for part in kind.split(" or ") if (value := json.loads(part)) != default)
    if kind == "list of object":
        return [{}]
    if kind.startswith("list of whole"):
        return [3]
    if kind.startswith("list of number"):
        return [0.5, 0.25]
    if kind.startswith("list"):
        return ["other"]
    if kind.startswith("whole number"):
        return default + 1 if isinstance(default, int) and default < 1e12 else 7
    if kind.startswith("number"):
        return (default or 0) / 2 + 0.3 if default != "auto" else 0.5
    return {"object": {"g": {}}, "block": {}, "string": "other", "anything": "other"}.get(kind, True)


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set a value at a path of the table; `[]` becomes a list of one, `<name>` the name "g"."""
    here: Any = config
    *blocks, last = path.replace("<name>", "g").split(".")
    for block in blocks:
        here = here.setdefault(block.removesuffix("[]"), [{}] if block.endswith("[]") else {})
        here = here[0] if isinstance(here, list) else here
    here[last] = value


def config_for(path: str) -> dict[str, Any]:
    """A valid configuration in which the key at `path` has something to say."""
    config: dict[str, Any] = {"train_batch_size": 42}
    if path.startswith("optimizer."):
        config["optimizer"] = {"type": "AdamW"}
    if path.startswith("scheduler."):
        name = path.rpartition(".")[2]
        kind = next((kind for kind, names in ARGUMENTS.items() if name in names), "StepLR")
        config["scheduler"] = {"type": kind, "params": dict.fromkeys(REQUIRED.get(kind, ()), 3)}
    sharded = ("mics_shard_size", "dp_replicate", "zero_hpz_partition_size", "weights", "weights_within_host")
    if path.rpartition(".")[2] in sharded or ".offload_" in path:
        config["zero_optimization"] = {"stage": 3}
    if ".zeropp_loco_param." in path or path.startswith("wire.error_"):
        config["wire"] = {"gradients": "int4"}
    if path == "elasticity.enabled":
        config["elasticity"] = {
            "ignore_non_elastic_batch_info": True,
            "max_train_batch_size": 42,
            "micro_batch_sizes": [42],
        }
    if path == "bf16.bf16_optimizer_states":
        config["bf16"] = {"bf16_master_weights_and_grads": True}
    if path.startswith("compression_training.") and path.count(".") > 2:
        name = path.split(".")[1]
        config["compression_training"] = {name: {"different_groups": {"g": {"params": PARAMS.get(name, {})}}}}
    if path == "compression_training.layer_reduction.enabled":
        config["compression_training"] = {"layer_reduction": {"teacher_layer": [0]}}
    return config


def turned_on(path: str) -> dict[str, Any]:
    config = config_for(path)
    for switch in KEYS[path].switches:
        put(config, switch, away_from(KEYS[switch].kind, KEYS[switch].default))
    return config


def plan(config: dict[str, Any]) -> dict[str, Any]:
    return {row.path: row.value for row in DeepSpeedConfig(config).explain()}


def value_at(plan: dict[str, Any], path: str) -> Any:
    """Blocks under names of the user's, and lists of blocks, are one row of the plan."""
    if "[]." in path:
        home, _, last = path.partition("[].")
        return plan[home][0][last]
    home, named, rest = path.partition(".<name>.")
    found = plan[home]
    for part in ["g", *rest.split(".")] if named else ():
        found = found[part]
    return found


def having(status: str) -> list[str]:
    """The paths of a class, without what has nothing to perturb: one legal value, or a dtype that no one reads."""
    return [path for path, key in KEYS.items() if key.note.status == status and path != "tensor_parallel.dtype"]


@pytest.mark.drawn(60)
@pytest.mark.parametrize("path", having("implemented"))
def test_an_implemented_key_changes_the_plan(path):
    config = config_for(path)
    before = plan(config)
    value = away_from(KEYS[path].kind, KEYS[path].default)
    put(config, path, value)
    if path in CONFLICTS:
        with pytest.raises(DeepSpeedConfigError, match=f"{path}.*{CONFLICTS[path]}"):
            plan(config)
        return
    after = plan(config)
    if not path.endswith(("different_groups", "layer_specs")):  # what is left out there is filled in
        assert value_at(after, path) == ([value] if path.endswith("related_modules") else value)
    assert after != before


@pytest.mark.drawn(20)
@pytest.mark.parametrize("path", having("moot by design"))
def test_a_moot_key_says_what_takes_its_place(path):
    config = config_for(path)
    put(config, path, away_from(KEYS[path].kind, KEYS[path].default))
    row = next(row for row in DeepSpeedConfig(config).explain() if row.path.replace("[0]", "[]") == path)
    assert row.origin == "given"
    assert row.remark == f"moot by design: {KEYS[path].note.instead}"
    assert KEYS[path].note.instead


@pytest.mark.drawn(40)
@pytest.mark.parametrize("path", having("not available yet"))
def test_a_key_that_is_not_available_is_refused_where_its_value_asks_for_something(path):
    config = turned_on(path)
    put(config, path, away_from(KEYS[path].kind, KEYS[path].default))
    with pytest.raises(NotAvailableError) as caught:
        DeepSpeedConfig(config)
    assert any(f"{name} = " in str(caught.value) for name in (path, *KEYS[path].switches))
    assert any(f": is {outlook(name)}" in str(caught.value) for name in (path, *KEYS[path].switches) if name in KEYS)


@pytest.mark.drawn(40)
@pytest.mark.parametrize("path", having("not available yet"))
def test_a_key_that_is_not_available_passes_at_its_default_and_in_a_block_that_is_off(path):
    key = KEYS[path]
    if "[]" in path or any(KEYS[switch].kind == "block" for switch in key.switches):
        return  # what is around it asks for the feature by being there
    config = config_for(path)
    put(config, path, key.default)
    DeepSpeedConfig(config)
    if key.switches and path not in key.switches:
        put(config, path, away_from(key.kind, key.default))
        DeepSpeedConfig(config)


def test_every_key_that_is_not_available_has_one_outlook_and_every_outlook_is_used():
    paths = [path for path, key in KEYS.items() if key.note.status == "not available yet"]
    page = reference()
    for path in paths:
        assert [row.text for row in OUTLOOKS if row.covers(path)] == [outlook(path)]
        assert f"| {outlook(path)} |" in page
    for row in OUTLOOKS:
        assert bool(row.feature) != bool(row.reason)
        for pattern in row.patterns.split():
            assert any(fnmatchcase(path, pattern) for path in paths), pattern
