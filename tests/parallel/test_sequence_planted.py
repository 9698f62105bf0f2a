"""Mistakes that a loss curve does not show: each is refused on every rank, with the ranks that differ."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from deepspeed.comm.process_groups.mesh import current_mesh, mesh_for
from deepspeed.errors import DataError, MeshError, NotAvailableError, SequenceParallelError, UsageError
from deepspeed.sequence import transformers_adapter
from deepspeed.sequence.batches import UlyssesSPDataLoaderAdapter, slice_batch
from tests.parallel.sequence_runs import batch_of, config_of, start
from tests.parallel.tensor_runs import model_of
from tests.parallel.tiny import raises

SP = {"sp": 2}


def a_loader_cut_over_all_ranks() -> None:
    axis = mesh_for(SP).axis("sp")
    rows = [{name: value[0] for name, value in batch_of(step, 0).items()} for step in range(8)]
    loader = DataLoader(rows, 2, sampler=DistributedSampler(rows, 2, dist.get_rank(), shuffle=False))  # type: ignore[arg-type]
    with raises(DataError, "ranks 0 and 1", "share a sequence (sp)", "different batches"):
        next(iter(UlyssesSPDataLoaderAdapter(loader, axis.rank, axis.group, 2, None)))
    with start(model_of("Llama"), config_of(SP, 1)) as engine:
        with raises(DataError, "ranks 0 and 1", "share a sequence (sp)", "position_ids"):
            engine(**next(iter(loader)))


def positions_that_do_not_continue() -> None:
    with start(model_of("Llama"), config_of(SP, 1)) as engine:
        part = slice_batch(batch_of(0, 0), current_mesh().axis("sp"))
        part["position_ids"] = part["position_ids"] + dist.get_rank()
        with raises(DataError, "ranks 0 and 1", "position_ids continue"):
            engine(**part)


def labels_shifted_after_the_cut(fill: str) -> None:
    """Each rank shifts its own slice: the label of its last token is lost, or is its own first token."""
    with start(model_of("Llama"), config_of(SP, 1)) as engine:
        part = slice_batch(batch_of(0, 0), current_mesh().axis("sp"))
        local = part["labels"].roll(-1, 1)
        if fill == "lost":
            local[:, -1] = -100
        with raises(DataError, "ranks 0 and 1", "labels are shifted wrongly"):
            engine(**{**part, "shift_labels": local})
        engine(**part)


def a_loss_of_its_own_tokens() -> None:
    """The mean over each rank's own tokens, which weighs tokens by what their rank has."""
    with start(model_of("Llama"), config_of(SP, 1)) as engine:
        part = slice_batch(batch_of(0, 0, kind="prompt"), current_mesh().axis("sp"))
        logits = engine(**part).logits
        own = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part["shift_labels"].flatten(), reduction="sum")
        with raises(UsageError, "ranks 0 and 1", "share a sequence (sp)", "num_items"):
            engine.backward(own / 3)
        with raises(UsageError, "engine.backward(loss)"):
            engine(**part).loss.backward()
        engine.backward(own, num_items=float((part["shift_labels"] != -100).sum()))
        engine.step()


def heads_that_do_not_suffice() -> None:
    with raises(MeshError, "6 query head(s)", "4 ranks", "3 and 6"):
        start(model_of("Llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=48), config_of({"sp": 4}, 1))


def positions_of_another_kind() -> None:
    """A model whose attention does not do what it does whole is found by comparing, before the first step."""
    model = model_of("Llama")
    rotary = model.model.rotary_emb
    inner = rotary.forward
    rotary.forward = lambda x, position_ids: inner(x, position_ids=torch.arange(x.shape[1])[None])
    with raises(SequenceParallelError, "LlamaForCausalLM", "differ by", "rank 1"):
        start(model, config_of(SP, 3))
    with raises(NotAvailableError, "T5ForConditionalGeneration", "encoder"):
        start(model_of("T5"), config_of(SP, 1))
    with raises(DataError, "13 tokens", "2 ranks"), start(model_of("Llama"), config_of(SP, 1)) as engine:
        engine(**batch_of(0, 0, 13))


class Alone(Exception):
    pass


def one_rank_alone_raises(sizes: dict[str, int], zero: dict[str, Any], place: str) -> tuple[float, float]:
    """While the model is compared: when it was raised, and when this rank's `initialize` ended."""
    model, last = model_of("Llama"), dist.get_world_size() - 1
    raised = [0.0]

    def fails(*_: Any) -> None:
        slices = transformers_adapter._current.get() is not None
        if dist.get_rank() == last and not raised[0] and slices == (place != "whole"):
            raised[0] = time.monotonic()
            raise Alone("planted")

    where = model.lm_head if place == "behind the last exchange" else model.model.layers[1].mlp
    where.register_forward_pre_hook(fails)
    with raises(SequenceParallelError, "LlamaForCausalLM", f"rank {last}: Alone: planted"):
        start(model, config_of(sizes, zero.get("stage", 1), zero=zero))
    return raised[0], time.monotonic()


FIXED = {"stage": 3, "stage3_fixed_graph": True}  # gathers are collectives


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("sizes", "zero", "place"),
    [
        (SP, {}, "slices"),
        (SP, {}, "behind the last exchange"),
        (SP, FIXED, "whole"),
        (SP, FIXED, "slices"),
        pytest.param(SP, {"stage": 3}, "slices", marks=pytest.mark.slow),
        pytest.param({"sp": 2, "dp_shard": 2}, FIXED, "slices", marks=pytest.mark.slow),
        pytest.param({"sp": 2, "dp_shard": 2}, {}, "behind the last exchange", marks=pytest.mark.slow),
        pytest.param({"sp": 2, "tp": 2}, {}, "slices", marks=pytest.mark.slow),
    ],
)
def test_what_one_rank_raises_in_the_comparison_ends_all(
    workers: Any, sizes: dict[str, int], zero: dict[str, Any], place: str
) -> None:
    ends = workers(2 * len(sizes)).run(one_rank_alone_raises, sizes, zero, place, timeout=60)
    raised = ends[-1][0]
    assert all(0 < end - raised < 5 for _, end in ends), ends  # the watch's limit is minutes


PLANTED = [
    (a_loader_cut_over_all_ranks, 2, ()),
    (positions_that_do_not_continue, 2, ()),
    (labels_shifted_after_the_cut, 2, ("lost",)),
    (labels_shifted_after_the_cut, 2, ("rolled",)),
    (a_loss_of_its_own_tokens, 2, ()),
    (positions_of_another_kind, 2, ()),
    pytest.param(heads_that_do_not_suffice, 4, (), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("planted", "ranks", "args"), PLANTED)
def test_it_is_caught(workers: Any, planted: Any, ranks: int, args: tuple[Any, ...]) -> None:
    workers(ranks).run(planted, *args, timeout=120)
