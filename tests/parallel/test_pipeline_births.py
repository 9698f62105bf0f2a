"""No rank ever holds the whole of a model that is born sharded, or without values, and cut into stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.pipeline_births import alone, held, loaded, losses, refused, saved, trained
from tests.parallel.pipeline_runs import INTERLEAVED, within

FAST = [("init", "GPTNeo", {"pp": 2}, 3), ("meta", "Llama", {"pp": 2}, 1)]
SLOW = [
    *((how, "GPTNeo", {"pp": 2}, 0) for how in ("init", "ranks", "meta")),
    *((how, "Llama", {"pp": 2}, 2) for how in ("init", "ranks")),
    ("init", "GPTNeo", {"pp": 2, "dp": 2}, 3),
    ("ranks", "Llama", {"pp": 2, "dp": 2}, 3),
    ("meta", "GPTNeo", {"pp": 2, "dp": 2}, 1),
    ("meta", "GPTNeo", {"pp": 4}, 3),
    ("init", "GPTNeo", {"pp": 4}, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("how", "family", "mesh", "stage"), [*FAST, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)], ids=str
)
def test_stages_of_a_model_that_is_born_so_equal_the_dense_model(
    workers: Any, how: str, family: str, mesh: Any, stage: int
) -> None:
    for found in workers(mesh["pp"] * mesh.get("dp", 1)).run(trained, how, family, mesh, stage, timeout=60):
        within(found)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["init", "ranks", "meta"])
@pytest.mark.parametrize("stage", [1, 3])
def test_stages_of_slices_may_be_born_so_too(workers: Any, how: str, stage: int) -> None:
    for found in workers(4).run(trained, how, "GPTNeo", {"pp": 2, "tp": 2}, stage, timeout=60):
        within(found, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["init", "meta"])
def test_parts_of_a_stage_may_be_born_so_too(workers: Any, how: str) -> None:
    for found in workers(2).run(trained, how, "GPTNeo", {"pp": 2}, 3, INTERLEAVED, timeout=60):
        within(found)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_that_of_a_model_made_whole(workers: Any, precision: str) -> None:
    ours, whole = (workers(2).run(losses, how, precision) for how in ("ranks", "whole"))
    assert ours == whole and all(row == whole[0] for row in whole)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_slices_may_rest_elsewhere_from_birth_on(workers: Any, tmp_path: Path, tier: str) -> None:
    where = {"device": tier, "nvme_path": str(tmp_path)}
    settings = {"zero": {"offload_param": where, "offload_optimizer": where}}
    for found in workers(4).run(trained, "init", "GPTNeo", {"pp": 2, "dp": 2}, 3, settings, timeout=60):
        within(found)


@pytest.mark.parametrize(
    ("how", "pp"),
    [
        ("init", 2),
        ("meta", 2),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("ranks", 2), ("init", 4), ("meta", 4))),
    ],
)
def test_no_rank_ever_holds_the_whole_model(workers: Any, how: str, pp: int) -> None:
    # Its stage, its slices of what is still to be handed on, and the matrix that is under way.
    share = 1 / pp + (1 - 1 / pp) / pp
    assert max(workers(pp).run(held, how, pp, 3, timeout=60)) < share + 0.07
    if how == "init":
        assert min(workers(pp).run(held, "whole", pp, 3, timeout=60)) >= 1.0  # so the measure sees a whole model


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_names_in_its_checkpoint_are_those_of_the_whole_model(workers: Any, tmp_path: Path, stage: int) -> None:
    every: dict[str, torch.Tensor] = {}
    for found in workers(2).run(saved, str(tmp_path), stage):
        every |= found
    for found in workers(1).run(loaded, str(tmp_path)):
        assert set(found) == set(every) and all(torch.equal(value, every[name]) for name, value in found.items())


def test_births_that_cannot_be_staged_say_why(workers: Any) -> None:
    workers(2).run(refused)


@pytest.mark.parametrize(
    ("place", "ranks"),
    [("stage", 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("rule", 2), ("slices", 4)))],
)
def test_what_one_rank_raises_while_a_model_is_born_ends_all(workers: Any, place: str, ranks: int) -> None:
    times = workers(ranks).run(alone, place, timeout=60)
    begun = times[-1][0]
    assert all(0 < end - begun < 10 for _, end in times), times  # the watch's limit is minutes
