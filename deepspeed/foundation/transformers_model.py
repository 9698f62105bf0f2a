"""Properties of Transformers models: configs, vocabulary, blocks. This module does not import Transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import nn

# Keys of a config, the commonest first.
WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "dim", "n_hidden", "model_dim", "word_embed_proj_dim")
FFN_KEYS = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "encoder_ffn_dim",
    "decoder_ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "hidden_dim", "inner_dim", "dim_feedforward",
    "d_inner", "ffn_size", "expert_ffn_hidden_size", "n_ffn", "feed_forward_size", "dense_intermediate_size",
    "time_mix_extra_dim",
)  # fmt: skip
HEAD_KEYS = (
    "num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
    "num_decoder_heads",
)  # fmt: skip
KEY_VALUE_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
HEAD_DIM_KEYS = ("head_dim", "d_kv", "kv_channels", "attention_head_dim")
LAYER_KEYS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"
)  # fmt: skip
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN_KEYS = ("num_experts_per_tok", "moe_top_k", "moe_k")
LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "max_target_positions", "n_ctx"
)  # fmt: skip

Module = TypeVar("Module", bound=nn.Module)


def config_of(model: nn.Module) -> Any:
    """Return the config of a Transformers model; None for other modules."""
    config: Any = getattr(model, "config", None)
    return config if hasattr(config, "to_dict") and hasattr(config, "model_type") else None


def text_config(model: Any, decoder: bool | None = None) -> Any:
    """Return the config of the text part of a model or config; None for a model without config.

    Args:
        model: any module, or a config.
        decoder: for an encoder-decoder model, True: config of the decoder, False: of the encoder; None: Transformers'
            default.
    """
    config: Any = getattr(model, "config", None) if isinstance(model, nn.Module) else model
    if not hasattr(config, "get_text_config"):
        return config
    return config.get_text_config() if decoder is None else config.get_text_config(decoder=decoder)


def vocabulary_size(model: Any, decoder: bool | None = None) -> int | None:
    """Return the number of rows of a model's embedding, else the vocabulary size in its config; None if unknown.

    Of an embedding that is split over ranks (`VocabParallelEmbedding`), all ranks' rows count.

    Args:
        model: any module, or a config, which has no embedding.
        decoder: as in `text_config`.
    """
    table: Any = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    text = text_config(model, decoder)
    sizes = getattr(table, "whole", None), getattr(table, "num_embeddings", None), getattr(text, "vocab_size", None)
    return next((size for size in sizes if isinstance(size, int) and size), None)


def config_number(config: Any, keys: Sequence[str]) -> int | None:
    """Return the first integer that a config has under one of the keys, or None."""
    numbers = (getattr(config, key, None) for key in keys)
    return next((number for number in numbers if isinstance(number, int)), None)


def head_counts(config: Any) -> list[int]:
    """Return the integers above 1 of all entries with "head" in their names, in a config and its nested configs."""
    counts: list[int] = []
    entries = cast("dict[str, Any]", vars(config) if hasattr(config, "__dict__") else {})
    for key, entry in entries.items():
        if "head" in key and isinstance(entry, int) and not isinstance(entry, bool) and entry > 1:
            counts.append(entry)
        elif hasattr(entry, "to_dict"):
            counts += head_counts(entry)
    return counts


def caching_configs(model: nn.Module) -> list[Any]:
    """Return the configs inside a model that have `use_cache`, each once."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "to_dict") and isinstance(getattr(config, "use_cache", None), bool):
            configs[id(config)] = config
    return list(configs.values())


def is_instance_of(module: nn.Module, class_name: str) -> bool:
    """Return whether a module's class or one of its base classes has this name; the library is not imported."""
    return any(kind.__name__ == class_name for kind in type(module).__mro__)


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return cast("Iterator[tuple[str, nn.Module]]", model.named_modules())


def pretrained_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost Transformers models in a module, by name; the module itself may be one."""
    return outermost({name: module for name, module in _named(model) if is_instance_of(module, "PreTrainedModel")})


def outermost(modules: Mapping[str, Module]) -> dict[str, Module]:
    """Return the modules that are not inside another of them; `modules` is in the order of `named_modules`."""
    outer: dict[str, Module] = {}
    for name, module in modules.items():
        if not any(not around or name.startswith(f"{around}.") for around in outer):
            outer[name] = module
    return outer


def block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the outermost ModuleLists of two or more modules of one class, by name, the longest first."""
    lists = {
        name: module
        for name, module in _named(model)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1
    }
    return dict(sorted(outermost(lists).items(), key=lambda entry: -len(entry[1])))
