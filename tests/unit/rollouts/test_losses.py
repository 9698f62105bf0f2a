"""Losses of generated answers: by loops in fp64, beside TRL's own functions, and with wrong values outside of masks."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.errors import ArgumentError, DataError
from deepspeed.rollouts import losses

B, T, V, GROUP = 8, 6, 11, 4


def drawn(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Log-probabilities with a gradient, older ones and a reference's nearby; answers of 0 to T tokens."""
    draw = torch.Generator().manual_seed(seed)
    new = torch.randn(B, T, generator=draw, dtype=dtype).sub(2)
    lengths = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6])
    return {
        "logprobs": new.clone().requires_grad_(),
        "old_logprobs": new + 0.3 * torch.randn(B, T, generator=draw, dtype=dtype),
        "reference": new + 0.3 * torch.randn(B, T, generator=draw, dtype=dtype),
        "rewards": torch.rand(B, generator=draw, dtype=dtype),
        "mask": torch.arange(T) < lengths[:, None],
    }


def group_of(rewards: list[float], at: int) -> list[float]:
    return rewards[at // GROUP * GROUP :][:GROUP]


def advantage(kind: str, rewards: list[float], at: int) -> float:
    group = group_of(rewards, at)
    mean = sum(group) / GROUP
    if kind == "rloo":
        return rewards[at] - (sum(group) - rewards[at]) / (GROUP - 1)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (GROUP - 1))
    return (rewards[at] - mean) / (1 if kind == "dr_grpo" else deviation + 1e-4)


def term(ratio: Tensor, value: float, low: float, high: float) -> Tensor:
    return -min(ratio * value, ratio.clamp(1 - low, 1 + high) * value)


def by_loops(kind: str, given: dict[str, Tensor], beta: float) -> Tensor:
    """The papers' formulas, token by token."""
    rewards = given["rewards"].tolist()
    sums, counts = [], []
    for at, count in enumerate(given["mask"].sum(1).tolist()):
        value = advantage({"dapo": "grpo", "gspo": "grpo"}.get(kind, kind), rewards, at)
        logs = [
            (given["logprobs"][at, t], given["old_logprobs"][at, t], given["reference"][at, t]) for t in range(count)
        ]
        ratios = [(new - old).exp() for new, old, _ in logs]
        counts.append(count)
        if kind in ("gspo", "rloo"):
            whole = torch.stack(ratios).prod() if ratios else torch.tensor(1.0)
            whole, clip = (whole ** (1 / max(count, 1)), (3e-4, 4e-4)) if kind == "gspo" else (whole, (0.2, 0.2))
            sums.append(term(whole, value, *clip) if count else torch.tensor(0.0))
            continue
        clip = (0.2, 0.28) if kind == "dapo" else (0.2, 0.2)
        terms = [term(ratio, value, *clip) for ratio in ratios]
        terms += [beta * ((ref - new).exp() - (ref - new) - 1) for new, _, ref in logs]
        sums.append(sum(terms, torch.tensor(0.0, dtype=torch.float64)))
    if kind == "grpo":
        return sum(total / max(count, 1) for total, count in zip(sums, counts, strict=True)) / B
    divisor = {"dr_grpo": B * 16, "dapo": sum(counts), "gspo": B, "rloo": B}[kind]
    return sum(sums) / divisor


def ours(kind: str, given: dict[str, Tensor], beta: float) -> Tensor:
    advantages = getattr(losses, f"{kind if kind in ('rloo', 'dr_grpo') else 'grpo'}_advantages")(
        given["rewards"], GROUP
    )
    values = [given["logprobs"], given["old_logprobs"], advantages, given["mask"]]
    if kind in ("gspo", "rloo"):
        return getattr(losses, f"{kind}_loss")(*values)
    penalty = beta * losses.kl_k3(given["logprobs"], given["reference"], given["mask"])
    more = {"length": 16} if kind == "dr_grpo" else {}
    return getattr(losses, f"{kind}_loss")(*values, penalty=penalty, **more)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "gspo", "rloo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_loss_and_its_gradient_are_the_formulas(kind: str, beta: float) -> None:
    one, other = drawn(), drawn()
    loss, expected = ours(kind, one, beta), by_loops(kind, other, beta)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(one["logprobs"].grad, other["logprobs"].grad, rtol=1e-10, atol=1e-14)
    assert one["logprobs"].grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_advantages_are_the_formulas(kind: str) -> None:
    rewards = drawn()["rewards"]
    found = getattr(losses, f"{kind}_advantages")(rewards, GROUP).tolist()
    assert found == pytest.approx([advantage(kind, rewards.tolist(), at) for at in range(B)], rel=1e-12)
    assert getattr(losses, f"{kind}_advantages")(torch.full((B,), 0.3), GROUP).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "gspo", "rloo"])
def test_values_outside_the_mask_have_no_effect(kind: str) -> None:
    results = []
    for outside in (0.0, math.nan, -math.inf, 500.0):
        given = drawn()
        for name in ("logprobs", "old_logprobs", "reference"):
            given[name] = given[name].detach().masked_fill(~given["mask"], outside if name == "logprobs" else 0.0)
        given["logprobs"].requires_grad_()
        loss = ours(kind, given, 0.1)
        loss.backward()
        results.append((loss.item(), given["logprobs"].grad))
    assert all(loss == results[0][0] and torch.equal(grad, results[0][1]) for loss, grad in results)
    assert not results[0][1][~drawn()["mask"]].any()


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "gspo", "rloo"])
def test_without_any_token_the_loss_is_zero(kind: str) -> None:
    given = drawn()
    given["mask"] = torch.zeros_like(given["mask"])
    loss = ours(kind, given, 0.1)
    loss.backward()
    assert loss.item() == 0 and not given["logprobs"].grad.any()


# -- beside TRL ------------------------------------------------------------------------------------------------------


def trl_loss(kind: str, given: dict[str, Tensor], beta: float) -> Tensor:
    """`GRPOTrainer._compute_loss` on an object that has what it reads, and no model."""
    trl = pytest.importorskip("trl")
    level = "sequence" if kind == "gspo" else "token"
    clip = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28)}.get(kind, (0.2, 0.2))
    arguments = SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False)
    trainer: Any = SimpleNamespace(
        loss_type="grpo" if kind == "gspo" else kind, importance_sampling_level=level, beta=beta, args=arguments,
        epsilon_low=clip[0], epsilon_high=clip[1], max_completion_length=16, use_vllm=False, aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False, model=torch.nn.Identity(), _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
    )  # fmt: skip
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (given["logprobs"], torch.zeros(B, T), None)
    inputs = {
        "prompt_ids": torch.zeros(B, 1), "prompt_mask": torch.ones(B, 1), "completion_ids": torch.zeros(B, T),
        "completion_mask": given["mask"].long(), "old_per_token_logps": given["old_logprobs"],
        "ref_per_token_logps": given["reference"], "num_items_in_batch": given["mask"].sum(),
        "advantages": losses.dr_grpo_advantages(given["rewards"], GROUP) if kind == "dr_grpo"
        else losses.grpo_advantages(given["rewards"], GROUP),
    }  # fmt: skip
    return trl.GRPOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize(
    ("kind", "beta"), [("grpo", 0.0), ("grpo", 0.1), ("dr_grpo", 0.1), ("dapo", 0.1), ("gspo", 0.0)]
)
def test_a_loss_and_its_gradient_are_trls(kind: str, beta: float) -> None:
    one, other = drawn(), drawn()
    for given in (one, other):  # TRL has no answers without tokens: its GSPO counts them as -A
        given["mask"][0, 0] = True
    loss, expected = ours(kind, one, beta), trl_loss(kind, other, beta)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(one["logprobs"].grad, other["logprobs"].grad, rtol=1e-10, atol=1e-14)


def logits(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    student = torch.randn(B, T, V, generator=draw, dtype=torch.float64).requires_grad_()
    return student, torch.randn(B, T, V, generator=draw, dtype=torch.float64), drawn(seed)["mask"]


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_divergence_is_trls(beta: float, temperature: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    student, teacher, mask = logits(1)
    found = losses.generalized_jsd_loss(student, teacher, mask, beta, temperature)
    labels = torch.where(mask, 1, -100)
    expected = gkd.generalized_jsd_loss(student, teacher, labels, beta, temperature)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert found.loss_sum.item() == pytest.approx(expected.item() * mask.sum().item(), rel=1e-12)
    assert found.valid_token_count.item() == mask.sum().item()
    (one,), (other,) = torch.autograd.grad(found.loss, student), torch.autograd.grad(expected, student)
    assert torch.allclose(one, other, rtol=1e-10, atol=1e-15) and one.any()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_is_the_formula(beta: float) -> None:
    """Also with the teacher's best tokens only, and with a limit for each entry."""
    student, teacher, mask = logits(2)
    for top, limit in ((None, None), (3, None), (3, 0.05)):
        total = 0.0
        for s, t in zip(student[mask].tolist(), teacher[mask].tolist(), strict=True):
            best = sorted(range(V), key=lambda at: -t[at])[:top]
            p, q = ([math.exp(row[at]) / sum(math.exp(row[b]) for b in best) for at in best] for row in (t, s))
            for a, b in zip(p, q, strict=True):
                m = beta * a + (1 - beta) * b
                part = {0.0: a * math.log(a / b), 1.0: b * math.log(b / a)}.get(
                    beta, beta * a * math.log(a / m) + (1 - beta) * b * math.log(b / m)
                )
                total += part if limit is None else min(part, limit)
        found = losses.generalized_jsd_loss(student, teacher, mask, beta, teacher_top_k=top, pointwise_clip=limit)
        assert found.loss_sum.item() == pytest.approx(total, rel=1e-10)


def test_a_divergence_without_tokens_is_zero_with_a_gradient() -> None:
    student, teacher, mask = logits(3)
    found = losses.generalized_jsd_loss(student, teacher, torch.zeros_like(mask))
    found.loss.backward()
    assert found.loss.item() == 0 and found.valid_token_count.item() == 0 and not student.grad.any()


def test_a_divergence_of_bf16_logits_is_computed_in_fp32() -> None:
    student, teacher, mask = logits(4)
    half = [each.detach().bfloat16() for each in (student, teacher)]
    found = losses.generalized_jsd_loss(*half, mask).loss
    exact = losses.generalized_jsd_loss(*(each.double() for each in half), mask).loss
    assert found.dtype == torch.float32 and found.item() == pytest.approx(exact.item(), rel=1e-6)


# -- differences -----------------------------------------------------------------------------------------------------


def test_differences_are_measured_on_the_mask_only() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    rollout = torch.tensor([[-1.0, -2.0, 9.0], [-3.0, math.nan, math.nan]])
    train = rollout + torch.tensor([[0.02, 0.0, 5.0], [-0.005, 0.0, 0.0]])
    found = losses.mismatch(train, rollout, mask)
    gaps = [0.02, 0.0, -0.005]
    assert found.k1 == pytest.approx(sum(gaps) / 3, rel=1e-4)
    assert found.k3 == pytest.approx(sum(math.exp(gap) - 1 - gap for gap in gaps) / 3, rel=1e-3)
    assert found.largest == pytest.approx(0.02, rel=1e-4)
    assert (found.outside, found.tokens) == (pytest.approx(1 / 3), 3)
    assert losses.mismatch(rollout, rollout, mask) == losses.Mismatch(0.0, 0.0, 0.0, 0.0, 3)
    assert losses.mismatch(train, rollout, mask & False).tokens == 0


def test_weights_are_truncated_and_have_no_gradient() -> None:
    old = torch.tensor([0.0, 1.0, -1.0], requires_grad=True)
    weights = losses.truncated_weights(old, torch.zeros(3), largest=2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-1)]) and not weights.requires_grad
    given = drawn()
    halved = losses.grpo_loss(
        given["logprobs"], given["old_logprobs"], given["rewards"], given["mask"], weights=torch.full((B, T), 0.5)
    )
    whole = losses.grpo_loss(given["logprobs"], given["old_logprobs"], given["rewards"], given["mask"])
    assert halved.item() == pytest.approx(whole.item() / 2, rel=1e-12)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_wrong_shapes_are_refused_by_name() -> None:
    given = drawn()
    values = [given["logprobs"], given["old_logprobs"], given["rewards"]]
    with pytest.raises(DataError, match=r"mask has shape \[8, 5\]"):
        losses.grpo_loss(*values, given["mask"][:, 1:])
    with pytest.raises(DataError, match="mask"):
        losses.mismatch(given["logprobs"], given["old_logprobs"], given["mask"][0])
    student, teacher, mask = logits(0)
    with pytest.raises(DataError, match=r"mask of shape \[8, 5\]"):
        losses.generalized_jsd_loss(student, teacher, mask[:, 1:])
    with pytest.raises(ArgumentError, match="beta"):
        losses.generalized_jsd_loss(student, teacher, mask, beta=1.5)
    for size in (1, 3):
        with pytest.raises(ArgumentError, match="groups"):
            losses.grpo_advantages(given["rewards"], size)
