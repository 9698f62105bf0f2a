"""Key-value heads that are fewer than ranks, or do not divide: copied ones are partial, beside masks and caches too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from deepspeed.comm import all_reduce
from deepspeed.comm.process_groups.mesh import current_mesh, mesh_for
from deepspeed.tensor_parallel.parallelize import cut_model
from deepspeed.zero.layout.placement import Relation, placement_of
from tests.parallel.dense import Dense, compared, momentum, share_of
from tests.parallel.tensor_runs import batch_of, config_of, model_of

MASKS = ("none", "right", "left", "packed")


def given(model: Any, step: int, rank: int, mask: str) -> dict[str, torch.Tensor]:
    """Two sequences, the second of them padded, or both packed of two documents."""
    batch = batch_of(model, step, rank)
    ones = torch.ones_like(batch["input_ids"])
    if mask == "right":
        ones[1, -4:] = 0
    if mask == "left":
        ones[1, :4] = 0
    if mask in ("right", "left"):
        batch["attention_mask"] = ones
        batch["labels"] = batch["labels"].masked_fill(ones == 0, -100)
    if mask == "packed":
        batch["position_ids"] = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]).repeat(2, 1)
    return batch


def cut_heads(family: str, heads: int, shared: int, tp: int, attention: str) -> None:
    model = model_of(family, num_attention_heads=heads, num_key_value_heads=shared, head_dim=8)
    model.config._attn_implementation = attention
    model.config.pad_token_id = 0
    dense = copy.deepcopy(model)
    plan = cut_model(model, mesh_for({"tp": tp}).axis("tp"))
    assert not plan.whole, plan.table()
    layer = model.model.layers[0].self_attn
    if shared < tp:  # more of them may be cut in uneven shares of whole groups
        assert placement_of(layer.k_proj.weight).relations["tp"] is Relation.PARTIAL
    for mask in MASKS:
        model.zero_grad()
        dense.zero_grad()
        ours, theirs = (one(**given(one, 1, 0, mask)).loss for one in (model, dense))
        assert abs(float(ours) - float(theirs)) <= 2e-6 * float(theirs), mask
        ours.backward()
        theirs.backward()
        largest = max(float(p.grad.norm()) for p in dense.parameters())
        for name, param in model.named_parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
            if placement_of(param).relations.get("tp") is Relation.PARTIAL:
                all_reduce(grad, group=current_mesh().axis("tp").group)
            wanted = share_of(param, dense.get_parameter(name).grad)
            assert float((grad - wanted).norm()) <= 5e-6 * largest, (mask, name)
    prompt = given(model, 3, 0, "left")
    prompt.pop("labels")
    tokens = [one.eval().generate(**prompt, max_new_tokens=5, do_sample=False) for one in (model, dense)]
    assert torch.equal(*tokens), tokens


CELLS = [
    pytest.param("Llama", 4, 1, 2, "sdpa", id="one-head-for-all"),
    pytest.param("Llama", 6, 2, 3, "sdpa", id="two-heads-three-ranks"),
    pytest.param("Llama", 4, 2, 4, "sdpa", id="each-head-for-two"),
    pytest.param("Qwen3", 4, 1, 2, "eager", id="eager-with-norms"),
    *[
        pytest.param(family, heads, shared, tp, attention, marks=pytest.mark.slow)
        for family in ("Llama", "Qwen3", "Gemma2")
        for heads, shared, tp in ((4, 1, 3), (6, 3, 2), (6, 2, 4), (6, 1, 2))
        for attention in ("sdpa", "eager")
        if (family, attention) != ("Gemma2", "sdpa")
    ],
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("family", "heads", "shared", "tp", "attention"), CELLS)
def test_heads_that_ranks_share(workers: Any, family: str, heads: int, shared: int, tp: int, attention: str) -> None:
    workers(tp).run(cut_heads, family, heads, shared, tp, attention, timeout=120)


def masked_loss(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(**given(model, step, rank, "right" if step % 2 else "none")).loss


def trained(stage: int, dp: int, tp: int) -> list[tuple[float, ...]]:
    import deepspeed

    model = model_of("Llama", num_key_value_heads=1)
    dense = Dense(model, momentum, dp, 2, 0.0)
    config = config_of(stage, tp, 2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config)
    with engine:
        return list(compared(engine, dense, current_mesh(), masked_loss, 4))


@pytest.mark.parametrize(
    ("stage", "dp", "tp"),
    [(3, 1, 2), *(pytest.param(s, 2, tp, marks=pytest.mark.slow) for s in range(4) for tp in (2, 3))],
)
def test_copied_heads_train_as_one(workers: Any, stage: int, dp: int, tp: int) -> None:
    for windows in workers(dp * tp).run(trained, stage, dp, tp, timeout=120):
        worst = [max(column) for column in zip(*windows, strict=True)]
        assert worst[0] <= 2e-6 and max(worst[1:]) <= 5e-6, worst
