"""Log-probabilities in training with the bits of those that the generator drew with.

A training forward rounds in other places than a generator, so a ratio of the two is not 1 even for the weights that
drew the tokens. Here the loss gets the generator's values and the gradient of torch's graph. An on-policy ratio is then
exactly 1 in every dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.errors import ArgumentError
from deepspeed.inference.logprobs import log_probs, truncates
from deepspeed.inference.sampling_params import SamplingParams


class _ValuesWithGradient(torch.autograd.Function):
    """Autograd function that returns given log-probabilities and has the gradient of those of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor, sampling: Any) -> Any:
        ctx.save_for_backward(logits, tokens)
        ctx.sampling = sampling
        return values.detach().to(logits.device, torch.float32).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, tokens = ctx.saved_tensors
        gradient, temperature = gradients[0], ctx.sampling.temperature or 1.0
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)  # rows without gaps
        rows, chosen, grads = logits.flatten(0, -2), tokens.reshape(-1, 1), gradient.reshape(-1, 1)
        results = out.flatten(0, -2)
        for start in range(0, len(rows), ROWS):  # in parts, since fp32 logits of a whole batch would be large
            part = slice(start, start + ROWS)
            scaled = grads[part].float() / temperature
            if ctx.sampling.temperature and truncates(ctx.sampling):
                chances = log_probs(rows[part], ctx.sampling).exp_()
            else:
                scores = rows[part].float()
                chances = (scores if temperature == 1 else scores / temperature).softmax(-1)
            results[part] = chances.mul_(-scaled).scatter_add_(1, chosen[part], scaled)
        return out, None, None, None


ROWS = 256


def exact_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor, sampling: SamplingParams | None = None
) -> torch.Tensor:
    """Return `values`, bit by bit, with the gradient of the log-probabilities of `tokens` under `logits`.

    Args:
        logits: of the training forward, [..., vocabulary]; those at a position predict the token in `tokens` there.
        tokens: int64 [...].
        values: log-probabilities of these tokens by the generator (`Rollout.logprobs` or `engine.score`), [...].
        sampling: the same as for `values`: temperature and truncation; None: the model's own probabilities.

    Returns:
        fp32 [...].

    Raises:
        ArgumentError: shapes do not fit.
    """
    if logits.shape[:-1] != tokens.shape or values.shape != tokens.shape:
        raise ArgumentError(
            f"exact_logprobs: logits {tuple(logits.shape)} need tokens and values of shape {tuple(logits.shape[:-1])}, "
            f"not {tuple(tokens.shape)} and {tuple(values.shape)}"
        )
    return _ValuesWithGradient.apply(logits, tokens, values, sampling or SamplingParams())


def torch_logprobs(logits: torch.Tensor, tokens: torch.Tensor, sampling: SamplingParams | None = None) -> torch.Tensor:
    """Return the log-probabilities of `tokens` under `logits`, fp32, by torch; arguments as in `exact_logprobs`."""
    own = sampling or SamplingParams()
    scores = logits.float() / (own.temperature or 1.0)
    if own.temperature and truncates(own):
        barred = log_probs(logits.detach().flatten(0, -2), own).isneginf().view(logits.shape)
        scores = scores.masked_fill(barred, -torch.inf)
    return scores.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
