"""Generators follow what changes their model between two requests, and refuse to mix two versions in one answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.errors import NotAvailableError, RequestError, UsageError
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.rollouts.generation import check_scores_kept
from deepspeed.rollouts.weight_sender import whole_tensors
from tests.unit.inference.toys import llama

PROMPT, SAMPLING = [list(range(5, 40))], SamplingParams(max_new_tokens=8, logprobs=0)


def with_lora(**options: Any) -> Any:
    import peft

    torch.manual_seed(1)
    chosen = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False} | options
    return peft.get_peft_model(llama(), peft.LoraConfig(**chosen))


def values(generator: Generator) -> list[float]:
    """Log-probabilities of a greedy answer, which differ where a page or a matrix is an old one."""
    parts = generator.run([Request(object(), PROMPT[0], SAMPLING)])[0]
    return [entry.logprob for part in parts for entry in part.logprobs or ()]


def test_a_version_that_is_read_in_between_hides_no_change() -> None:
    model = llama()
    generator = Generator(model)
    generator.submit(Request("one", PROMPT[0], SAMPLING))
    generator.step()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert generator.weights_version == 1
    with pytest.raises(UsageError, match="have changed while 1 requests"):
        generator.step()
    generator.cancel("one")
    generator.step()
    assert values(generator) == values(Generator(model))


def test_an_adapter_of_the_same_name_takes_the_place_of_the_old_one() -> None:
    import peft

    model = with_lora()
    generator = Generator(model)
    before = values(generator)
    model.delete_adapter("default")
    torch.manual_seed(2)
    model.add_adapter("default", peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("default")
    after = values(generator)
    assert after == values(Generator(model)) and after != before


def test_a_hook_that_comes_later_is_called() -> None:
    model = llama()
    generator = Generator(model)
    before = values(generator)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: 2 * output)
    generator.refresh()
    after = values(generator)
    assert after != before and after == values(Generator(model))


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}, {"target_modules": ["embed_tokens"]}])
def test_adapters_that_cannot_be_sent_are_refused(options: dict[str, Any]) -> None:
    if "lora_bias" in options:
        model = llama(attention_bias=True)
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], **options))
    else:
        model = with_lora(**options)
    with pytest.raises(NotAvailableError, match="other than LoRA of linear layers cannot be sent"):
        list(whole_tensors(model))


def test_what_is_sent_of_lora_is_what_merging_gives() -> None:
    model = with_lora(target_modules=["q_proj", "down_proj"])
    sent = {name: tensor.clone() for name, tensor in whole_tensors(model)}
    merged = model.merge_and_unload()
    for name, param in merged.named_parameters():
        assert torch.allclose(sent.pop(name), param, atol=1e-6), name
    assert not sent


def test_log_probabilities_that_truncation_leaves_out_are_refused() -> None:
    check_scores_kept(SamplingParams(temperature=1.0, min_new_tokens=4))
    for options in ({"min_new_tokens": 4}, {"logit_bias": {3: 2.0}}, {"repetition_penalty": 1.2}):
        with pytest.raises(RequestError, match=next(iter(options))):
            check_scores_kept(SamplingParams(temperature=1.0, top_k=5, **options))


def test_tokens_that_come_later_are_accepted() -> None:
    model = llama()
    generator, size = Generator(model), model.config.vocab_size
    with pytest.raises(RequestError, match=f"vocabulary of {size}"):
        generator.generate([[5, size]], SAMPLING)
    model.resize_token_embeddings(size + 8)
    assert len(generator.generate([[5, size + 7]], SAMPLING)[0]) == 8
    with pytest.raises(RequestError, match=f"vocabulary of {size + 8}"):
        generator.generate([[5, size + 8]], SAMPLING)
