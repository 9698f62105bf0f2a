"""What a model of Transformers says of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from deepspeed.foundation.transformers_model import (
    HEAD_KEYS,
    WIDTH_KEYS,
    block_lists,
    caching_configs,
    config_number,
    config_of,
    head_counts,
    is_instance_of,
    outermost,
    pretrained_models,
    text_config,
    vocabulary_size,
)

transformers = pytest.importorskip("transformers")


def llama(**config: Any) -> Any:
    sizes = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **config)
    )


def test_numbers_are_read_from_the_config() -> None:
    model = llama()
    assert config_of(model) is model.config
    assert config_of(nn.Linear(1, 1)) is None
    assert [config_number(model.config, keys) for keys in (WIDTH_KEYS, HEAD_KEYS, ("not_there",))] == [16, 4, None]
    assert sorted(head_counts(model.config)) == [2, 4, 4]  # heads of keys and values, of queries, and their size
    assert sorted(head_counts(SimpleNamespace(n_head=2, inner=transformers.LlamaConfig(head_dim=8)))) == [2, 8, 32, 32]


def test_the_text_part_of_a_config_says_the_vocabulary() -> None:
    model = llama()
    assert text_config(model) is text_config(model.config) is model.config
    assert text_config(nn.Linear(1, 1)) is None
    vision = transformers.CLIPConfig(text_config={"vocab_size": 19})
    assert text_config(vision) is vision.text_config
    assert vocabulary_size(vision) == 19
    assert vocabulary_size(nn.Linear(1, 1)) is None


def test_an_embedding_says_the_vocabulary_before_the_config() -> None:
    model = llama()
    model.resize_token_embeddings(24)
    model.config.vocab_size = 17
    assert [vocabulary_size(model), vocabulary_size(model.config)] == [24, 17]


def test_configs_that_say_whether_to_cache_are_found_once() -> None:
    assert len(caching_configs(nn.ModuleList([llama(), nn.Linear(1, 1)]))) == 1


def test_the_outermost_models_of_transformers_are_found() -> None:
    model = llama()
    assert list(pretrained_models(model)) == [""]
    around = nn.ModuleDict({"student": model, "head": nn.Linear(1, 1), "teacher": llama()})
    assert list(pretrained_models(around)) == ["student", "teacher"]
    assert is_instance_of(model, "PreTrainedModel")
    assert not is_instance_of(around, "PreTrainedModel")
    named = {name: nn.Identity() for name in ("a", "a.b", "ab", "c.d", "c.d.e")}
    assert list(outermost(named)) == ["a", "ab", "c.d"]


def test_block_lists_hold_two_or_more_blocks_of_one_class() -> None:
    assert {name: len(blocks) for name, blocks in block_lists(llama()).items()} == {"model.layers": 3}
    blocks = nn.ModuleList([nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]) for _ in range(2)])
    mixed = nn.ModuleList([nn.Linear(1, 1), nn.Identity()])
    longer = nn.ModuleList([nn.Identity() for _ in range(3)])
    model = nn.ModuleDict(
        {"blocks": blocks, "mixed": mixed, "longer": longer, "single": nn.ModuleList([nn.Identity()])}
    )
    assert list(block_lists(model)) == ["longer", "blocks"]


def test_a_config_whose_text_config_takes_no_argument() -> None:
    """Code of a model's own repository may be written so."""
    text = SimpleNamespace(vocab_size=11)
    assert text_config(SimpleNamespace(get_text_config=lambda: text)) is text
