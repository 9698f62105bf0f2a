"""`PipelineModule`: layers built where they belong, tied, fed with nests; what fails is named on every rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.zero.gradients import reduce_scatter
from tests.parallel.pipeline_layers import described, failed, gridded, limited, looked_up, refused, timed, unmeasured
from tests.parallel.pipeline_models import stage_and_compare
from tests.parallel.pipeline_runs import within

FAST = [
    (1, 2, 5, 1, {}),
    (3, 2, 4, 1, {"partition_method": "type:mixed"}),
    (2, 2, 4, 2, {"partition_method": "uniform"}),
]
SLOW = [
    (stage, pp, steps, chunks, {})
    for stage in range(4)
    for pp in (1, 2, 3)
    for steps in (4, 6)
    for chunks in (1, 2)
    if not (chunks == 2 and (pp == 1 or steps % pp))
]


@pytest.mark.parametrize(
    ("stage", "pp", "steps", "chunks", "module"),
    [*FAST, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)],
)
def test_layers_in_stages_equal_the_dense_model(
    workers: Any, stage: int, pp: int, steps: int, chunks: int, module: Any
) -> None:
    def run(stage: int, pp: int, steps: int, chunks: int) -> Any:
        return workers(max(pp, 2)).run(_described, stage, pp, steps, chunks, module)

    for found in run(stage, pp, steps, chunks):
        within(found)


def _described(stage: int, pp: int, steps: int, chunks: int, module: Any) -> Any:
    return described(stage, pp, steps, chunks, **module)


def _tied_in_small_buckets(overlap: bool) -> Any:
    small = {"zero": {"overlap_comm": overlap, "reduce_bucket_size": 1}}
    with mock.patch.object(reduce_scatter, "warn_once") as waited:
        found = described(0, 2, 6, 1, settings=small)
    assert not waited.called, "a sum of tied layers was waited for, which another stage sends later"
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_tied_layers_in_buckets_smaller_than_they_are(workers: Any, overlap: bool) -> None:
    for found in workers(2).run(_tied_in_small_buckets, overlap):
        within(found)


@pytest.mark.parametrize(("fault", "stage"), [("forward", 1), pytest.param("backward", 3, marks=pytest.mark.slow)])
def test_a_stage_that_raises_ends_all_ranks_with_its_name(workers: Any, fault: str, stage: int) -> None:
    (first, told, one), (kind, text, other) = workers(2).run(failed, fault, stage)
    where = f"stage 1 (layers 3-5), micro-batch 0, {fault}"
    assert kind == "PipelineError" and where in text and f"planted in {fault}" in text
    assert first == "CommError" and where in told and "[<B0]" in told, told
    assert max(one, other) < 20


@pytest.mark.parametrize(
    ("stage", "precision", "watched", "calls"),
    [
        (1, "fp32", False, 6),  # windows times micro-batches
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [(0, "fp32", False, 6), (2, "fp32", True, 0), (2, "bf16", False, 6), (3, "fp32", False, 6)]
        ),
    ],
)
def test_a_large_table_has_the_same_sums_by_rows(
    workers: Any, stage: int, precision: str, watched: bool, calls: int
) -> None:
    (ran, ours, whole), (other, *_) = workers(2).run(looked_up, stage, precision, watched)
    assert (ran, other) == (calls, 0)
    for one, other in zip(ours, whole, strict=True):  # narrow gradients of a whole table round where hits meet
        assert torch.equal(one, other) or (precision != "fp32" and torch.allclose(one, other, rtol=0, atol=1e-3))


def test_calls_that_a_pipeline_does_not_serve_say_so(workers: Any) -> None:
    workers(2).run(refused)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BloomForCausalLM", pytest.param("MixtralForCausalLM", marks=pytest.mark.slow)])
def test_a_toy_of_transformers_is_equal(workers: Any, name: str) -> None:
    for row in workers(2).run(stage_and_compare, name, 2):
        assert row["verdict"] == "equal", row


def test_an_encoder_decoder_is_refused_with_the_reason(workers: Any) -> None:
    for row in workers(2).run(stage_and_compare, "T5ForConditionalGeneration", 2):
        assert row["verdict"] == "refused" and "encoder" in row["why"], row


def test_layers_are_dealt_by_the_times_that_most_ranks_find(workers: Any) -> None:
    found = workers(3).run(timed, timeout=40)
    assert all(bounds == found[0][0] for bounds, _ in found)
    assert 3 in found[0][0], found[0][0]  # between the two that two of three find slow
    for _, gaps in found:
        within(gaps)


def test_a_layer_that_one_rank_cannot_measure_is_told_to_all(workers: Any) -> None:
    told, met = workers(2).run(unmeasured, timeout=30)
    assert "layer 1 cannot take" in met and "rank 1: ArgumentError" in told and "layer 1" in told, (told, met)


def test_the_least_limit_of_any_rank_holds_for_all(workers: Any) -> None:
    assert workers(2).run(limited, timeout=30) == [[0, 1, 4]] * 2


def test_a_grid_answers_by_the_names_of_old_scripts(workers: Any) -> None:
    found = workers(4).run(gridded)
    assert [row[1:] for row in found] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert len({row[0] for row in found}) == 1
