"""Toys of the text models of the installed Transformers: their names, and configs at toy size for a class.

Imports nothing of the package. Tables over many classes (tensor slices, stages, generation) take their toys from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.unit.compression.architectures import FAMILIES, architecture

LARGEST = 7_000_000  # parameters of a toy
# Numbers that configs have under these names.
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 96, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 6, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "n_embd": 96, "n_layer": 2, "n_head": 12, "n_positions": 64, "n_ctx": 64, "n_inner": 72,
    "d_model": 96, "d_ff": 72, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 12,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
    "encoder_ffn_dim": 72, "decoder_ffn_dim": 72, "ffn_dim": 72, "ffn_hidden_size": 72, "max_seq_len": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 36, "n_shared_experts": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "index_n_heads": 12, "index_head_dim": 8,
    "rotary_dim": 4, "embedding_size": 16, "dim": 96, "hidden_dim": 72, "n_layers": 2, "n_heads": 12,
    "state_size": 8, "sliding_window": 16, "decoder_start_token_id": 1, "word_embed_proj_dim": 96,
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0,
    "attention_chunk_size": 32, "window_size": 16, "max_target_positions": 64, "max_sequence_length": 64,
    "seq_length": 64, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "attention_types": [[["global", "local"], 1]],
}  # fmt: skip
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "encoder_layers",
          "decoder_layers")  # fmt: skip

# Sizes that go by names of their own, or have to fit each other, by class.
HINTS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"mamba_n_heads": 12, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 200},
    "CohereCompassForCausalLM": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
    }},
    "CpmAntForCausalLM": {"dim_ff": 72, "dim_head": 8},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 6, "clip_qkv": 8.0}},
    "EsmcForMaskedLM": {"num_key_value_heads": 12},
    "Ernie4_5_VLMoeTextModel": {"moe_intermediate_size": [24, 24]},
    "Ernie4_5_VLMoeForConditionalGeneration": {"text_config": {"moe_intermediate_size": [24, 24]}},
    "FunnelForMaskedLM": {"block_sizes": [1, 1], "d_inner": 72, "d_head": 8, "n_head": 12},
    "Gemma4AssistantForCausalLM": {"text_config": {"hidden_size_per_layer_input": 0}},
    "Glm4vMoeTextModel": {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0,
    }},
    "Glm5NextTextModel": {
        "qk_rope_head_dim": 0, "head_dim": 8, "layer_types": ["full_attention"], "mlp_layer_types": ["sparse"] * 2,
    },
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 12, "mamba_d_head": 16, "layer_types": ["mamba", "attention"]},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "LukeForMaskedLM": {"entity_vocab_size": 64, "entity_emb_size": 16},
    "Mamba2ForCausalLM": {"head_dim": 16, "n_groups": 1},
    "Mistral4ForCausalLM": {"head_dim": 12},
    "MobileBertForMaskedLM": {"intra_bottleneck_size": 96, "embedding_size": 96},
    "MusicgenForCausalLM": {"num_codebooks": 1},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 1},
    "Nemotron3_5TranscribeForConditionalGeneration": {"head_config": {"audio_hidden_size": 96}},
    "NeoMMEForMaskedLM": {"head_dim": 16},
    "PerceiverForMaskedLM": {
        "d_latents": 96, "num_latents": 8, "num_blocks": 1, "num_self_attends_per_block": 2, "qk_channels": 96,
        "num_self_attention_heads": 12, "num_cross_attention_heads": 12, "v_channels": 96,
        "max_position_embeddings": 10,
    },
    "Phi4MultimodalForCausalLM": {
        "audio_config": {"nemo_conv_channels": 16, "ext_pw_out_channel": 96, "num_blocks": 2},
    },
    "Qwen4ExpForCausalLM": {
        "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 32, "indexer_compress_ratio": 4, "ngram_vocab_size_base": 97,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "hc_lowrank": 16, "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 1,
    },
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3, "lru_width": 96, "attention_window_size": 16},
    "ReformerModelWithLMHead": {
        "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 64], "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 16, "attention_head_size": 8, "feed_forward_size": 72,
        "max_position_embeddings": 256,
    },
    "ReformerForMaskedLM": {
        "axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 16,
        "attention_head_size": 8, "feed_forward_size": 72, "is_decoder": False,
    },
    **dict.fromkeys(("RoCBertForCausalLM", "RoCBertForMaskedLM"), {
        "pronunciation_embed_dim": 16, "pronunciation_vocab_size": 64, "shape_embed_dim": 16, "shape_vocab_size": 64,
    }),
    "SqueezeBertForMaskedLM": {"embedding_size": 96},
    "XLMWithLMHeadModel": {"causal": True, "mask_token_id": 5},
    **dict.fromkeys(("XmodForCausalLM", "XmodForMaskedLM"), {"default_language": "en_XX"}),
    "Zamba2ForCausalLM": {"layers_block_type": ["linear_attention", "hybrid"], "mamba_headdim": 16,
                          "n_mamba_heads": 12, "mamba_ngroups": 1},
    "ZambaForCausalLM": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "n_mamba_heads": 2,
                         "num_hidden_layers": 3, "tie_word_embeddings": False},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "xLSTMForCausalLM": {"hidden_size": 128, "num_heads": 4},
}  # fmt: skip


def names() -> dict[str, str]:
    """Model class names, by kind: "causal LM", "encoder" or "encoder-decoder"."""
    from transformers.models.auto import modeling_auto as auto

    tables = {
        "causal LM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "encoder": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "encoder-decoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    found: dict[str, str] = {}
    for kind, table in tables.items():
        for name in table.values():
            for one in name if isinstance(name, (list, tuple)) else [name]:
                found.setdefault(one, kind)
    return found


def configs(name: str, more: Mapping[str, Any] | None = None, layers: int = 2) -> Iterator[Callable[[], Any]]:
    """Ways to a config at toy size without dropout, the richest first; each may raise whatever the class raises.

    Args:
        name: of a model class.
        more: numbers beside `SIZES`, or in their place.
        layers: at the least.
    """
    import transformers

    kind = getattr(transformers, name)
    sizes = {**SIZES, **dict.fromkeys(DEPTHS, layers), **(more or {})}
    sizes["attention_types"] = [[["global", "local"], layers // 2]]
    for mixed in (True, False):
        yield lambda mixed=mixed: _silent(_shrunk(kind.config_class, name, mixed, HINTS.get(name, {}), sizes, layers))
    for family in FAMILIES:
        try:
            made, config = architecture(family)
        except (AttributeError, TypeError, ValueError):
            continue
        if made.__name__ == name:
            yield lambda config=config: _silent(config)


def _shrunk(kind: Any, name: str, mixed: bool, hints: dict[str, Any], sizes: dict[str, Any], layers: int) -> Any:
    """A config of `kind` at toy size, the configs in it too, for a class; `mixed`: a layer of every kind it has."""
    from transformers import PreTrainedConfig

    base = kind()
    said = {**base.to_dict(), **{key: 0 for key in getattr(base, "attribute_map", {})}}
    accepted = inspect.signature(kind.__init__).parameters
    given = {key: value for key, value in sizes.items() if key in said or key in accepted}
    if "neo" not in name.lower():
        given.pop("attention_types", None)
    if given.get("window_size") and not isinstance(said.get("window_size"), int):
        given.pop("window_size")
    if "qk_rope_head_dim" in given:
        given["head_dim"], given["num_key_value_heads"] = given["qk_rope_head_dim"], given["num_attention_heads"]
    if mixed and isinstance(said.get("layer_types"), list):
        given["layer_types"] = _repeated(_unlike(said["layer_types"]), layers)
        given["num_hidden_layers"] = len(given["layer_types"])
    for key, inner in vars(base).items():
        if isinstance(inner, PreTrainedConfig):
            given[key] = _shrunk(type(inner), name, mixed, hints.get(key, {}), sizes, layers)
    given |= {key: value for key, value in hints.items() if not isinstance(given.get(key), PreTrainedConfig)}
    for key in ("layer_types", "layers_block_type", "attn_layers"):
        if key in hints:
            given[key] = _repeated(hints[key], layers)
    return kind(**given)


def _unlike(kinds: list[str]) -> list[str]:
    """Two or three layers, of unlike kinds if the class has such."""
    different = list(dict.fromkeys(kinds))[:3]
    return different if len(different) > 1 else different * 2


def _repeated(kinds: list[str], layers: int) -> list[str]:
    """All of them, and again from the first up to a number of layers."""
    return [kinds[at % len(kinds)] for at in range(max(layers, len(kinds)))]


def _silent(config: Any) -> Any:
    """The same config with nothing dropped, the configs in it too, and what an encoder-decoder begins with."""
    from transformers import PreTrainedConfig

    for key, value in vars(config).items():
        if ("drop" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
        elif isinstance(value, PreTrainedConfig):
            _silent(value)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config
