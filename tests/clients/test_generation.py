"""Families of Transformers by the fast ways, whatever the release calls forward's cache; a lost way is a warning."""

from __future__ import annotations

import inspect
import logging
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers.cache_utils import Cache, DynamicCache

import deepspeed
from deepspeed.foundation import hf_forward, log
from deepspeed.inference import Generator, SamplingParams
from deepspeed.inference.executors.native import FusedExecutor
from tests.unit.inference.toys import alone, llama, prompts

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
WAYS = {
    "Llama": "native", "Mistral": "native", "Qwen2": "native", "Qwen3": "native", "Phi3": "native",
    "Gemma": "packed", "Gemma2": "packed", "Mixtral": "native", "Olmo2": "packed", "GPTNeoX": "packed",
    "GraniteMoe": "packed", "Roberta": "packed", "Falcon": "gathered", "DeepseekV3": "gathered", "Mamba": "generate",
}  # fmt: skip
LEFT_OUT = {
    "Roberta": "num_key_value_heads",
    "Mamba": "intermediate_size",
    "Falcon": "head_dim",
    "DeepseekV3": "head_dim",
}
OWN = {
    "Roberta": {"is_decoder": True},  # whose annotation says tuples
    "DeepseekV3": {
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
        "num_key_value_heads": 4,
    }
}  # fmt: skip
NEW = 8


def family(name: str) -> Any:
    """A toy of a family."""
    sizes = {key: value for key, value in SIZES.items() if key != LEFT_OUT.get(name)} | OWN.get(name, {})
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).eval()


@pytest.fixture
def warned():
    """Lines of level WARNING that the package says, though it said them before in this process."""
    lines: list[str] = []

    def note(level: int, text: str, *args: Any) -> None:
        if level >= logging.WARNING:
            lines.append(text % args if args else text)

    with mock.patch.object(log, "_said", set()), mock.patch.object(log.logger, "log", note):
        yield lines


def way(generator: Generator) -> str:
    return "native" if isinstance(generator._executor, FusedExecutor) else generator.kind


@pytest.mark.parametrize("name", WAYS)
def test_a_family_goes_the_fast_way(name: str, warned: list[str]) -> None:
    model, given = family(name), prompts((12, 5))
    generator = Generator(model, cache_bytes=1 << 22)
    assert way(generator) == WAYS[name], generator.why
    assert generator.generate(given, SamplingParams(max_new_tokens=NEW, ignore_eos=True)) == [
        alone(model, prompt, NEW) for prompt in given
    ]
    lost = [line for line in warned if type(model).__name__ in line]
    assert len(lost) == (WAYS[name] != "native"), warned


class Older(transformers.LlamaForCausalLM):
    """Code of its own, written for a release before 5.24."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):  # noqa: ANN201
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, **kwargs)


class Newer(transformers.LlamaForCausalLM):
    """Written for 5.24."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, **kwargs):  # noqa: ANN201
        return super().forward(input_ids, attention_mask, position_ids, cache, **kwargs)


class Later(transformers.LlamaForCausalLM):
    """Written for a release that nobody knows."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, memory: Cache | None = None, **kwargs):  # noqa: ANN201
        return super().forward(input_ids, attention_mask, position_ids, memory, **kwargs)


@pytest.mark.parametrize("kind", [Older, Newer, Later])
def test_whatever_forward_calls_its_cache(kind: type, warned: list[str]) -> None:
    plain = llama()
    model = kind(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    generator = Generator(model, cache_bytes=1 << 22)
    given = prompts((12, 5))
    assert way(generator) == "native" and not warned, warned
    assert generator.generate(given, SamplingParams(max_new_tokens=NEW, ignore_eos=True)) == [
        alone(plain, prompt, NEW) for prompt in given
    ]


def test_adapters_do_not_hide_the_cache(warned: list[str]) -> None:
    import peft

    model = peft.get_peft_model(llama(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).eval()
    torch.nn.init.normal_(next(p for name, p in model.named_parameters() if "lora_B" in name), std=0.1)
    generator = Generator(model, cache_bytes=1 << 22)
    assert generator.kind == "packed", generator.why
    wanted = [alone(model.get_base_model(), prompt, NEW) for prompt in prompts((12, 5))]
    assert generator.generate(prompts((12, 5)), SamplingParams(max_new_tokens=NEW, ignore_eos=True)) == wanted
    assert not [line for line in warned if "native passes" in line], warned  # LoRA's changes are added in them


def test_kernel_injection_that_replaces_nothing_warns(warned: list[str]) -> None:
    engine = deepspeed.init_inference(family("GraniteMoe"), dtype=torch.float32, replace_with_kernel_inject=True)
    assert engine._injected is None
    assert [
        line for line in warned if "replace_with_kernel_inject: GraniteMoeForCausalLM keeps its own layers: " in line
    ]


def test_kernel_injection_replaces_a_family(warned: list[str]) -> None:
    engine = deepspeed.init_inference(family("Llama"), dtype=torch.float32, replace_with_kernel_inject=True)
    assert engine._injected is not None and not warned, warned


def test_names_of_the_installed_release() -> None:
    """Every class that takes a `Cache` is seen to, and XLM's dict is none."""
    found = {name: hf_forward.cache_argument(getattr(transformers, f"{name}ForCausalLM")) for name in (*WAYS, "Gemma3")}
    newer = "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    wanted = "cache" if newer else "past_key_values"
    assert found == dict.fromkeys(found, wanted) | ({} if newer else {"Mamba": "cache_params"})
    assert hf_forward.cache_argument(transformers.XLMWithLMHeadModel) is None


def test_a_cache_is_known_by_what_it_is() -> None:
    cache = DynamicCache()
    assert list(hf_forward.caches_in({"hidden_states": 1, "memory": cache, "layer_past": (1,), "use_cache": True})) == [
        "memory",
        "layer_past",
    ]
    assert hf_forward.uncached({"memory": cache, "x": 1, "use_cache": True}) == {
        "memory": None, "x": 1, "use_cache": False,
    }  # fmt: skip
    output = llama()(torch.tensor([[3, 4]]), use_cache=True)
    assert isinstance(hf_forward.returned_cache(output), Cache)
