"""Small Transformers models for the tests of random-LTD and layer drop, and their layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, LAYERS, HEADS = 31, 16, 4, 2
MODELS = ("gpt_neo", "llama", "bert")
ALL_MODELS = (*MODELS, "gpt2", "bloom", "opt", "qwen3", "gemma3", "t5")


def build(kind: str, seed: int = 0, attention: str = "sdpa", **more: Any) -> nn.Module:
    """A model with random weights; dropout is 0 unless `more` says otherwise."""
    import transformers as hf

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH}
    heads = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    own: dict[str, Any] = {"attn_implementation": attention, "use_cache": False} | more
    still = {"attention_dropout": 0.0}
    if kind == "gpt_neo":
        own.pop("attn_implementation")
        config = hf.GPTNeoConfig(
            **sizes, num_layers=LAYERS, num_heads=HEADS, attention_types=[[["global", "local"], LAYERS // 2]],
            window_size=5, max_position_embeddings=32, embed_dropout=0.0, resid_dropout=0.0, **still, **own,
        )  # fmt: skip
    elif kind in ("llama", "qwen3", "gemma3"):
        classes = {"llama": hf.LlamaConfig, "qwen3": hf.Qwen3Config, "gemma3": hf.Gemma3TextConfig}
        config = classes[kind](
            **sizes, **heads, intermediate_size=24, num_key_value_heads=1, head_dim=8, max_position_embeddings=32, **own
        )
    elif kind == "bert":
        own.pop("use_cache")
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | {
            name: own.pop(name) for name in tuple(own) if name.endswith("_prob")
        }
        config = hf.BertConfig(**sizes, **heads, intermediate_size=24, max_position_embeddings=32, **rates, **own)
        return hf.BertForMaskedLM._from_config(config, attn_implementation=own.pop("attn_implementation"))
    elif kind == "gpt2":
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=32, **rates, **own
        )
    elif kind == "bloom":
        config = hf.BloomConfig(**sizes, n_layer=LAYERS, n_head=HEADS, **own)
    elif kind == "opt":
        config = hf.OPTConfig(
            **sizes, **heads, ffn_dim=24, max_position_embeddings=32, dropout=0.0, word_embed_proj_dim=WIDTH, **own
        )
    else:
        config = hf.T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0,
            decoder_start_token_id=0, **own,
        )  # fmt: skip
        return hf.T5ForConditionalGeneration(config)
    attention_of = own.get("attn_implementation")
    return hf.AutoModelForCausalLM.from_config(
        config, **({"attn_implementation": attention_of} if attention_of else {})
    )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model of `build`; of T5 those of its encoder."""
    from deepspeed.foundation.transformers_model import block_lists

    lists = block_lists(model)
    return list(next(blocks for name, blocks in lists.items() if "decoder" not in name or len(lists) == 1))


def batch(seed: int, rows: int = 4, length: int = 10, padded: bool = True) -> dict[str, torch.Tensor]:
    """Token ids with labels; the second row is padded at the end, the third at the start."""
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(100 + seed))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, length // 2 + 1 :] = 0
        mask[2, : length // 2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def ltd_config(
    low: int, high: int, steps: int = 4, ids: tuple[int, ...] = (1, 2), layers: int = LAYERS, **more: Any
) -> dict[str, Any]:
    """The block `data_efficiency` of a run with random-LTD."""
    schedule = {
        "min_value": low, "max_value": high, "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": steps, "seq_per_step": 1},
    }  # fmt: skip
    block = {
        "enabled": True, "total_layer_num": layers, "random_ltd_layer_num": len(ids), "random_ltd_layer_id": list(ids),
        "model_mask_name": "attention_mask", "model_type": "decoder", "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": schedule,
    }  # fmt: skip
    return {"enabled": True, "data_routing": {"enabled": True, "random_ltd": block | more}}
