"""Log-probabilities of tokens under the distribution that they are drawn from: temperature, top-k, top-p, min-p.

Every function works row by row, so the bits of a row do not depend on the other rows: a token has the same value when
it is drawn, when its text is scored anew, and in any batch.
"""

from __future__ import annotations

import torch

from deepspeed.inference.sampling_params import SamplingParams

COLDEST = 1e-30  # lower temperatures underflow in fp32; this one is already greedy


def truncates(sampling: SamplingParams) -> bool:
    """Return whether some tokens cannot be drawn because they are too improbable."""
    return bool(sampling.top_k) or sampling.top_p < 1 or bool(sampling.min_p)


def kept_probs(ordered: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return the probabilities of tokens that can be drawn, 0 for the others; they add up to less than 1 if cut.

    Args:
        ordered: logits in descending order, fp32 [..., vocabulary].
        sampling: temperature (above 0) and truncation.

    Returns:
        fp32 [..., vocabulary], or [..., top_k].
    """
    scores = (ordered - ordered[..., :1]) / max(sampling.temperature, COLDEST)  # this order cannot overflow
    if sampling.top_k:
        scores = scores[..., : sampling.top_k]
    chances = scores.softmax(-1)
    if sampling.top_p < 1:  # the first tokens with a total of p
        before = torch.cat([torch.zeros_like(chances[..., :1]), chances.cumsum(-1)[..., :-1]], dim=-1)
        chances = chances * (before < sampling.top_p)
    if sampling.min_p:
        chances = chances * (chances >= sampling.min_p * chances[..., :1])
    return chances


def log_probs(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return the logarithms of the probabilities of all tokens; -inf for those that truncation leaves out.

    Args:
        logits: [rows, vocabulary]; computed in fp32.
        sampling: temperature and truncation; temperature 0 (greedy) counts as 1, without truncation.
    """
    logits = logits.float()
    temperature = sampling.temperature or 1.0
    if not sampling.temperature or not truncates(sampling):
        return (logits if temperature == 1 else logits / max(temperature, COLDEST)).log_softmax(-1)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    chances = kept_probs(ordered, sampling).double()
    logs = (chances / chances.cumsum(-1)[..., -1:]).log().float()
    return torch.full_like(logits, -torch.inf).scatter_(-1, order[..., : logs.shape[-1]], logs)
