"""Clients beside training: loading, generation, adapters, quantised bases, saved models, validation, moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients import adapter_runs
from tests.clients import feature_runs as runs

slow = pytest.mark.slow


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=slow)])
def test_models_are_born_resized_and_generate(workers: Any, ranks: int, tmp_path: Path) -> None:
    workers(ranks).run(runs.born_resized_and_generating, str(tmp_path), timeout=180)


def test_only_adapters_are_trained_and_saved(workers: Any, tmp_path: Path) -> None:
    workers(2).run(adapter_runs.adapters_alone, str(tmp_path), timeout=180)


@pytest.mark.parametrize(
    ("bits", "stage"),
    [
        pytest.param(bits, stage, marks=() if (bits, stage) == (4, 3) else slow)
        for bits in (4, 8)
        for stage in (0, 1, 2, 3)
    ],
)
def test_adapters_train_on_a_base_that_bitsandbytes_quantised(
    workers: Any, bits: int, stage: int, tmp_path: Path
) -> None:
    workers(2).run(adapter_runs.quantised_base, bits, stage, str(tmp_path), timeout=180)


def test_adalora_sees_what_it_sees_in_plain_torch(workers: Any) -> None:
    workers(2).run(adapter_runs.importance_of_adapters, timeout=180)


EXPERTS_BORN = [("mixtral", 3, True, True), ("gpt-oss", 3, False, False)]  # kind, stage, born, checkpointing
EXPERTS_SLOW = [
    (kind, stage, born, checkpointing)
    for kind in adapter_runs.EXPERTS
    for stage in (0, 1, 2, 3)
    for born in ((False, True) if stage == 3 else (False,))
    for checkpointing in (False, True)
    if (kind, stage, born, checkpointing) not in EXPERTS_BORN
]


@pytest.mark.parametrize(
    ("kind", "stage", "born", "checkpointing"),
    [*EXPERTS_BORN, *(pytest.param(*cell, marks=slow) for cell in EXPERTS_SLOW)],
)
def test_adapters_train_on_packed_experts(
    workers: Any, kind: str, stage: int, born: bool, checkpointing: bool, tmp_path: Path
) -> None:
    workers(2).run(adapter_runs.adapters_on_experts, kind, stage, str(tmp_path), born, checkpointing, timeout=180)


@pytest.mark.parametrize(
    ("layers", "offload", "adapters"),
    [
        (1, False, ("default",)),  # the experts are a unit of their own
        pytest.param(2, True, ("default",), marks=slow),
        pytest.param(2, False, ("first", "second"), marks=slow),
    ],
)
def test_adapters_on_packed_experts_in_other_layouts(
    workers: Any, layers: int, offload: bool, adapters: tuple[str, ...], tmp_path: Path
) -> None:
    cell = ("qwen", 3, str(tmp_path), True, False, layers, offload, adapters)
    workers(2).run(adapter_runs.adapters_on_experts, *cell, timeout=180)


@pytest.mark.parametrize(
    ("kind", "stage", "ranks", "ep", "born", "checkpointing"),
    [
        ("mixtral", 2, 2, 2, False, True),
        *[
            pytest.param(kind, stage, ranks, 2, born, not born, marks=slow)
            for kind in adapter_runs.EXPERTS
            for stage, ranks, born in ((0, 2, False), (1, 2, False), (3, 2, False), (3, 4, False), (3, 4, True))
        ],
    ],
)
def test_adapters_on_experts_divided_among_ranks(
    workers: Any, kind: str, stage: int, ranks: int, ep: int, born: bool, checkpointing: bool, tmp_path: Path
) -> None:
    cell = (kind, stage, str(tmp_path), born, checkpointing, 2, False, ("default",), ep)
    workers(ranks).run(adapter_runs.adapters_on_experts, *cell, timeout=180)


def test_adapters_on_packed_experts_in_bf16(workers: Any) -> None:
    workers(2).run(adapter_runs.experts_in_bf16, timeout=180)


@slow
def test_the_trainer_trains_adapters_on_packed_experts(workers: Any, tmp_path: Path) -> None:
    workers(2).run(adapter_runs.experts_under_trainer, str(tmp_path), timeout=180)


@slow
def test_the_trainer_evaluates_before_it_trains(workers: Any) -> None:
    workers(2).run(runs.evaluated_then_trained, timeout=180)


@slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_both_ways(workers: Any, reentrant: bool) -> None:
    workers(2).run(runs.computed_again, reentrant, timeout=180)


@slow
@pytest.mark.parametrize("gathers", [True, False])
def test_the_trainer_saves_its_model(workers: Any, gathers: bool) -> None:
    workers(2).run(runs.model_saved, gathers, timeout=180)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "deepspeed_stage_3" else slow) for name in runs.STAGES]
)
def test_lightning_in_all_its_modes(workers: Any, name: str, tmp_path: Path) -> None:
    workers(2).run(runs.lightning_modes, name, str(tmp_path), timeout=240)


@slow
@pytest.mark.parametrize("name", [name for name in runs.STAGES if name != "nvme"])
def test_fabric_by_the_name_of_a_strategy(workers: Any, name: str) -> None:
    workers(2).run(runs.fabric_named, name, timeout=120)


@slow
def test_lightning_saves_300_million_parameters_without_a_whole_model(workers: Any) -> None:
    found = workers(2).run(runs.lightning_save, 5000, timeout=240)
    assert found[0][2] > 2e9  # weights and momentum
    for growth, whole, _ in found:
        print(f"RSS grows by {growth / 2**20:.0f} MiB while a model of {whole / 2**20:.0f} MiB is saved")
        assert whole == 1.2e9 and growth < whole / 2


TAKEN = [
    runs.module_moves,
    runs.born_with_written_children,
    runs.one_model_after_another,
    runs.values_put_under_parameters,
]


@pytest.mark.parametrize("run", TAKEN)
def test_what_clients_take_for_granted(workers: Any, run: Any) -> None:
    workers(2).run(run, timeout=90)
