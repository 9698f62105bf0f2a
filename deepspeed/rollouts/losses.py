"""Losses that learn from generated answers, as functions of tensors: policy gradients, distillation, differences.

Shapes: B answers with T positions each. `logprobs` [B, T] are log-probabilities of the tokens under the trained
weights, with a gradient; `old_logprobs` [B, T] those under the weights that drew them. `mask` [B, T] is true at the
tokens of the answers; values elsewhere have no effect, not even NaN. `advantages` is [B], or [B, T] with one for each
token. A loss is the mean over this rank's answers or tokens; the engine takes the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed.errors import ArgumentError, DataError

EPSILON = 1e-4  # added to the standard deviation of a group's rewards


# -- advantages --------------------------------------------------------------------------------------------------------


def _groups(rewards: Tensor, size: int) -> Tensor:
    if rewards.dim() != 1 or size < 2 or len(rewards) % size:
        raise ArgumentError(
            f"rewards of shape {list(rewards.shape)} are no groups of {size} answers each: one reward an answer, the "
            "answers to a prompt side by side, at least 2"
        )
    return rewards.view(-1, size)


def grpo_advantages(rewards: Tensor, group_size: int, epsilon: float = EPSILON) -> Tensor:
    """Return (reward - mean of the group) / (its standard deviation + epsilon): GRPO, arXiv:2402.03300, section 4.1.

    DAPO and GSPO have the same advantages.

    Args:
        rewards: [B], the `group_size` answers to a prompt side by side.

    Returns:
        Advantages [B]; 0 in a group whose rewards are equal.
    """
    groups = _groups(rewards, group_size)
    deviation = groups.std(dim=1, keepdim=True)
    return ((groups - groups.mean(dim=1, keepdim=True)) / (deviation + epsilon)).flatten()


def dr_grpo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return reward - mean of the group [B], without a divisor: Dr. GRPO, arXiv:2503.20783, section 3.2."""
    groups = _groups(rewards, group_size)
    return (groups - groups.mean(dim=1, keepdim=True)).flatten()


def rloo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return reward - mean of the other answers to the prompt [B]: RLOO, arXiv:2402.14740, section 2.3."""
    groups = _groups(rewards, group_size)
    others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    return (groups - others).flatten()


# -- policy gradients --------------------------------------------------------------------------------------------------


def _checked(mask: Tensor, *others: Tensor | None) -> Tensor:
    """Return the mask as booleans, if all tensors have its shape [B, T]."""
    shapes = [list(other.shape) for other in others if other is not None]
    if mask.dim() != 2 or any(shape != list(mask.shape) for shape in shapes):
        raise DataError(f"the mask has shape {list(mask.shape)}, the values of its tokens {shapes}: all are [B, T]")
    return mask.bool()


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logprobs - old_logprobs.detach(), 0.0)


def _clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), by token or by answer as `log_ratio` is."""
    if advantages.dim() == 1 and log_ratio.dim() == 2:
        advantages = advantages[:, None]
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def _token_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: tuple[float, float],
    weights: Tensor | None,
    penalty: Tensor | None,
) -> Tensor:
    """Return the term of each token [B, T], 0 outside of the mask."""
    terms = _clipped(_log_ratio(logprobs, old_logprobs, mask), advantages, *clip)
    terms = terms if weights is None else terms * torch.where(mask, weights.detach(), 0.0)
    terms = terms if penalty is None else terms + penalty
    return torch.where(mask, terms, 0.0)


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: tuple[float, float] = (0.2, 0.2),
    weights: Tensor | None = None,
    penalty: Tensor | None = None,
) -> Tensor:
    """Return the mean over answers of the mean over an answer's tokens: GRPO, arXiv:2402.03300, equation 3.

    Args:
        clip: the ratio of a token is clipped to 1 - clip[0] and 1 + clip[1].
        weights: [B, T], factor of each token's term, as from `truncated_weights`.
        penalty: [B, T], added to each token's term: beta * `kl_k3(logprobs, reference_logprobs, mask)` in the paper.

    Returns:
        A scalar; answers without tokens count as 0.

    Raises:
        DataError: the mask or a tensor with a value for each token has another shape than the log-probabilities.
    """
    mask = _checked(mask, logprobs, old_logprobs, weights, penalty)
    terms = _token_terms(logprobs, old_logprobs, advantages, mask, clip, weights, penalty)
    return (terms.sum(1) / mask.sum(1).clamp(min=1)).mean()


def dr_grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    length: int,
    clip: tuple[float, float] = (0.2, 0.2),
    weights: Tensor | None = None,
    penalty: Tensor | None = None,
) -> Tensor:
    """Return the sum over all tokens / (B * length), so that long answers are no cheaper: Dr. GRPO, arXiv:2503.20783.

    Args:
        length: a constant, such as the largest number of new tokens. The others are those of `grpo_loss`.

    Raises:
        DataError: as `grpo_loss`.
    """
    mask = _checked(mask, logprobs, old_logprobs, weights, penalty)
    terms = _token_terms(logprobs, old_logprobs, advantages, mask, clip, weights, penalty)
    return terms.sum() / (len(terms) * length)


def dapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: tuple[float, float] = (0.2, 0.28),
    tokens: float | None = None,
    weights: Tensor | None = None,
    penalty: Tensor | None = None,
) -> Tensor:
    """Return the mean over the tokens of all answers, with a wider clip above: DAPO, arXiv:2503.14476, equation 8.

    Args:
        tokens: divisor; None: this rank's own tokens. For the mean over the tokens of all ranks and micro-batches: all
            their tokens / (ranks * micro-batches). The other arguments are those of `grpo_loss`.

    Raises:
        DataError: as `grpo_loss`.
    """
    mask = _checked(mask, logprobs, old_logprobs, weights, penalty)
    terms = _token_terms(logprobs, old_logprobs, advantages, mask, clip, weights, penalty)
    return terms.sum() / (mask.sum() if tokens is None else torch.as_tensor(tokens)).clamp(min=1)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: tuple[float, float] = (3e-4, 4e-4),
) -> Tensor:
    """Return the mean over answers of the clipped ratio of a whole answer: GSPO, arXiv:2507.18071, equations 5 and 7.

    The ratio is the geometric mean of the ratios of its tokens. Advantages are [B]; the others as in `grpo_loss`.

    Raises:
        DataError: as `grpo_loss`.
    """
    mask = _checked(mask, logprobs, old_logprobs)
    means = _log_ratio(logprobs, old_logprobs, mask).sum(1) / mask.sum(1).clamp(min=1)
    return torch.where(mask.any(1), _clipped(means, advantages, *clip), 0.0).mean()


def rloo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: tuple[float, float] = (0.2, 0.2),
) -> Tensor:
    """Return the mean over answers of the clipped ratio of an answer's probability: RLOO, arXiv:2402.14740.

    On policy its gradient is REINFORCE's: -A times the gradient of the answer's log-probability. Advantages are [B]
    (`rloo_advantages`, of rewards that hold any KL penalty); the others as in `grpo_loss`.

    Raises:
        DataError: as `grpo_loss`.
    """
    mask = _checked(mask, logprobs, old_logprobs)
    sums = _log_ratio(logprobs, old_logprobs, mask).sum(1)
    return torch.where(mask.any(1), _clipped(sums, advantages, *clip), 0.0).mean()


# -- differences between two models, or between generation and training ------------------------------------------------


def kl_k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return log p - log p_ref by token: unbiased for KL(p | p_ref) on tokens drawn from p, with a large variance."""
    return logprobs - reference_logprobs


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return p_ref / p - 1 - log(p_ref / p) by token: unbiased as `kl_k1`, never negative, with a small variance.

    With a mask it is 0 elsewhere, and so is its gradient, whatever the values there.
    """
    difference = reference_logprobs - logprobs
    difference = difference if mask is None else torch.where(mask.bool(), difference, 0.0)
    return difference.expm1() - difference


def truncated_weights(train_logprobs: Tensor, rollout_logprobs: Tensor, largest: float = 2.0) -> Tensor:
    """Return min(largest, p_train / p_rollout) by token, without gradient: truncated importance sampling.

    It corrects for a generator whose probabilities differ from the trainer's; it is 1 where they are equal. p_train are
    those of the trainer's forward under the weights that drew the tokens.
    """
    return (train_logprobs - rollout_logprobs).detach().exp().clamp(max=largest)


@dataclass(frozen=True)
class Mismatch:
    """Difference of the trainer's log-probabilities from the generator's, over the tokens of a mask.

    `d` is log p_train - log p_rollout of a token that the generator has drawn. k1 and k3 estimate KL(rollout | train),
    k1 with the sign turned (J. Schulman, "Approximating KL divergence": his k1 is -d, his k3 is as here).

    Args:
        k1: mean of d: above 0 if the trainer finds the tokens more probable.
        k3: mean of exp(d) - 1 - d, never below 0.
        largest: largest absolute difference of two log-probabilities.
        outside: share of the tokens whose ratio is not within 1 % of 1.
        tokens: number of tokens; all the others are 0 if there is none.
    """

    k1: float
    k3: float
    largest: float
    outside: float
    tokens: int


def mismatch(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Mismatch:
    """Compare log-probabilities of the same tokens under the same weights, computed in training and in generation.

    Args:
        train_logprobs: [B, T].
        rollout_logprobs: [B, T].
        mask: [B, T].

    Raises:
        DataError: the shapes differ.
    """
    mask = _checked(mask, train_logprobs, rollout_logprobs)
    train, rollout = train_logprobs.detach()[mask].double(), rollout_logprobs.detach()[mask].double()
    if not len(train):
        return Mismatch(0.0, 0.0, 0.0, 0.0, 0)
    difference = train - rollout
    outside = (difference.expm1().abs() > 0.01).double().mean()
    k3 = kl_k3(rollout, train).mean()
    return Mismatch(difference.mean().item(), k3.item(), difference.abs().max().item(), outside.item(), len(train))


def merged_mismatch(parts: Sequence[Mismatch]) -> Mismatch:
    """Return the difference over the tokens of all parts, such as ranks or micro-batches."""
    tokens = sum(part.tokens for part in parts)
    if not tokens:
        return Mismatch(0.0, 0.0, 0.0, 0.0, 0)
    k1, k3, outside = (
        sum(getattr(part, name) * part.tokens for part in parts) / tokens for name in ("k1", "k3", "outside")
    )
    largest = torch.tensor([part.largest for part in parts], dtype=torch.float64).max().item()  # NaN if one is
    return Mismatch(k1, k3, largest, outside, tokens)


# -- distillation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JSDLoss:
    """Result of `generalized_jsd_loss`.

    Args:
        loss: mean over the tokens, 0 without any.
        loss_sum: sum over the tokens.
        valid_token_count: number of tokens.
    """

    loss: Tensor
    loss_sum: Tensor
    valid_token_count: Tensor


def generalized_jsd_loss(
    student: Tensor,
    teacher: Tensor,
    response_mask: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_top_k: int | None = None,
    pointwise_clip: float | None = None,
) -> JSDLoss:
    """Return the generalized Jensen-Shannon divergence of teacher and student: GKD, arXiv:2306.13649, equation 1.

    beta 0 is KL(teacher | student), beta 1 is KL(student | teacher), and between them beta * KL(teacher | m) +
    (1 - beta) * KL(student | m) with m = beta * teacher + (1 - beta) * student.

    Args:
        student: logits [..., V]; those of the positions before the tokens (`ResponseTokenBatch.select_causal_logits`).
        teacher: logits [..., V] of the same positions, which get no gradient.
        response_mask: [...], true where a token of an answer is predicted; softmaxes are taken only there.
        temperature: divisor of all logits.
        teacher_top_k: both distributions are restricted to the teacher's k most probable tokens; None: all.
        pointwise_clip: upper limit of the part of each vocabulary entry; None: no limit.

    Raises:
        DataError: the logits have different shapes, or the mask is not one value for each position.
        ArgumentError: beta is not within 0 to 1, or the temperature is not positive.
    """
    if student.shape != teacher.shape or response_mask.shape != student.shape[:-1]:
        shapes = [list(tensor.shape) for tensor in (student, teacher, response_mask)]
        raise DataError(f"logits of shapes {shapes[0]} and {shapes[1]} with a mask of shape {shapes[2]}")
    if not 0 <= beta <= 1 or not temperature > 0:
        raise ArgumentError(f"beta is from 0 to 1 and the temperature above 0, not {beta} and {temperature}")
    mask = response_mask.bool()
    logits = [student[mask], teacher.detach()[mask]]
    if teacher_top_k is not None:
        best = logits[1].topk(min(teacher_top_k, logits[1].shape[-1]), dim=-1).indices
        logits = [each.gather(-1, best) for each in logits]
    # log-probabilities in fp32 or fp64
    logs = [F.log_softmax(each.to(torch.promote_types(each.dtype, torch.float32)) / temperature, -1) for each in logits]
    parts = _jsd_parts(logs[0], logs[1], beta)
    total = (parts if pointwise_clip is None else parts.clamp(max=pointwise_clip)).sum()
    count = mask.sum()
    return JSDLoss(total / count.clamp(min=1), total, count)


def _jsd_parts(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the parts of the divergence [N, V], from log-probabilities [N, V]."""
    if beta == 0:
        return teacher.exp() * (teacher - student)
    if beta == 1:
        return student.exp() * (student - teacher)
    share = torch.tensor(beta, dtype=student.dtype, device=student.device)
    mixture = torch.logaddexp(student + torch.log1p(-share), teacher + share.log())
    return beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture)
