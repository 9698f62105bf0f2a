"""Log-probabilities with given values: their bits, their gradient beside fp64, and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from deepspeed.errors import ArgumentError
from deepspeed.inference.sampling_params import SamplingParams
from deepspeed.rollouts.logprobs import exact_logprobs, torch_logprobs

VOCABULARY = 64
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=0.8, top_k=10, top_p=0.95),
)


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).eval()


def gradients(whole: Any, ids: torch.Tensor, values: torch.Tensor, advantages: torch.Tensor, exact: bool) -> Any:
    """Gradient of a policy gradient's loss by all parameters, fp64, of a copy in the dtype of `whole`."""
    own, sampling = copy.deepcopy(whole), SamplingParams(temperature=0.7)
    logits = own(input_ids=ids).logits[:, :-1]
    if exact:
        logprobs = exact_logprobs(logits, ids[:, 1:], values, sampling)
    else:
        scores = logits if logits.dtype == torch.float64 else logits.float()
        logprobs = (scores / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    (-(logprobs - values.to(logprobs.dtype)).exp() * advantages.to(logprobs.dtype)).mean().backward()
    return torch.cat([param.grad.double().flatten() for param in own.parameters()])


def test_the_gradient_is_torchs_own_beside_fp64() -> None:
    whole, ids = model(), torch.randint(VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(1))
    advantages = torch.randn(4, 1, generator=torch.Generator().manual_seed(2))
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        cast = copy.deepcopy(whole).to(dtype)
        reference = copy.deepcopy(cast).double()  # the same weights, whose bits fp64 holds
        with torch.no_grad():
            logits = reference(input_ids=ids).logits[:, :-1]
            values = (logits / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        right = gradients(reference, ids, values, advantages, exact=False)
        for exact in (True, False):
            wrong = gradients(cast, ids, values.float(), advantages, exact) - right
            errors[dtype, exact] = float(wrong.norm() / right.norm())
    assert errors[torch.float32, True] <= 1e-5
    assert errors[torch.bfloat16, True] <= 1.2 * errors[torch.bfloat16, False], errors
    assert errors[torch.bfloat16, False] > 1e-4  # the two sides are told apart


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda each: f"{each.temperature}-{each.top_k}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_keep_their_bits_and_the_gradient_is_that_of_the_logits(
    sampling: SamplingParams, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 500, VOCABULARY, generator=generator).mul_(3).to(dtype).transpose(0, 1).requires_grad_()
    tokens = logits.detach().argmax(-1)  # which every truncation leaves
    values, weights = torch.randn(500, 3, generator=generator), torch.randn(500, 3, generator=generator)
    exact = exact_logprobs(logits, tokens, values, sampling)
    assert torch.equal(exact, values)
    (one,) = torch.autograd.grad((exact * weights).sum(), logits)
    (other,) = torch.autograd.grad((torch_logprobs(logits, tokens, sampling) * weights).sum(), logits)
    assert torch.allclose(one.float(), other.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_shapes_that_do_not_fit_are_refused() -> None:
    logits = torch.zeros(2, 3, VOCABULARY)
    for tokens, values in ((torch.zeros(2, 3), torch.zeros(2, 4)), (torch.zeros(2, 2), torch.zeros(2, 2))):
        with pytest.raises(ArgumentError, match=r"need tokens and values of shape \(2, 3\)"):
            exact_logprobs(logits, tokens.long(), values)
