"""Models of `planner.py`, each a factory of (module, batch) as `ds_plan` takes it; no test knows their sizes.

With PLANNER_TOY=1 in the environment they are a few layers of 32 to 64, to prove that everything runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, Callable[[int], Any]]
TOY = os.environ.get("PLANNER_TOY") == "1"


def _size(full: int, toy: int) -> int:
    return toy if TOY else full


def _text(vocabulary: int, length: int) -> Callable[[int], dict[str, torch.Tensor]]:
    def batch(rows: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
        return {"input_ids": tokens, "labels": tokens}

    return batch


def _gpt2(layers: int, width: int, vocabulary: int, length: int) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, length = _size(layers, 2), _size(width, 32), _size(length, 16)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": max(2, width // 64), "n_positions": length}
    vocabulary = _size(vocabulary, 64)
    return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=vocabulary)), _text(vocabulary, length)


def wide() -> Made:
    """Few wide blocks: products are large, states are too."""
    return _gpt2(2, 768, 4096, 64)


def tiny() -> Made:
    """Next to nothing: what a rank holds beside a model."""
    return _gpt2(1, 32, 64, 16)


def deep() -> Made:
    """Many narrow blocks: operators are many, recompute saves much."""
    return _gpt2(10, 192, 2048, 96)


def vocabulary() -> Made:
    """Most parameters are the embedding's, most activations the logits'."""
    return _gpt2(2, 256, 24576, 64)


def llama() -> Made:
    """Grouped queries, a longer sequence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = _size(384, 32)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": _size(4, 2)}
    heads = {"num_attention_heads": _size(6, 2), "num_key_value_heads": _size(2, 1)}
    many = _size(4096, 64)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=many)), _text(many, _size(160, 16))


def bert() -> Made:
    """An encoder with a mask."""
    from transformers import BertConfig, BertForMaskedLM

    width, many, length = _size(384, 32), _size(4000, 64), _size(96, 16)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": _size(5, 2)}
    model = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=_size(6, 2), vocab_size=many))
    text = _text(many, length)
    return model, lambda rows: {**text(rows), "attention_mask": torch.ones(rows, length, dtype=torch.long)}


def t5() -> Made:
    """Encoder and decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    width, many = _size(320, 32), _size(4000, 64)
    sizes = {"d_model": width, "d_ff": 4 * width, "d_kv": _size(64, 16), "num_heads": _size(5, 2)}
    config = T5Config(**sizes, num_layers=_size(3, 1), vocab_size=many, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config), _text(many, _size(96, 16))


def experts() -> Made:
    """Mixtral: most parameters are used by few tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    width, many = _size(256, 32), _size(2000, 64)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": _size(4, 1)}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": _size(6, 2)}
    config = MixtralConfig(**sizes, **heads, num_experts_per_tok=2, vocab_size=many)
    return MixtralForCausalLM(config), _text(many, _size(96, 16))


class Stack(nn.Module):
    """Residual blocks of two matrices over floating-point rows; the loss is its mean square."""

    def __init__(self, layers: int, width: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


def heavy() -> Made:
    """Many parameters, few samples: messages and the update are most of a step."""
    width = _size(896, 32)
    return Stack(_size(5, 2), width, 4 * width), lambda rows: torch.ones(rows, 8, width)


def light() -> Made:
    """Few parameters, many rows: activations are all."""
    width = _size(160, 32)
    return Stack(_size(10, 2), width, 4 * width), lambda rows: torch.ones(rows, 384, width)


def convolutions() -> Made:
    """Images: no matrix products of its own."""
    from transformers import ResNetConfig, ResNetForImageClassification

    widths = [96, 192, 384] if not TOY else [8, 16]
    sizes = {"embedding_size": 48 if not TOY else 8, "hidden_sizes": widths, "depths": [2] * len(widths)}
    model = ResNetForImageClassification(ResNetConfig(**sizes, num_labels=10, layer_type="basic"))
    side = _size(96, 32)
    return model, lambda rows: {"pixel_values": torch.ones(rows, 3, side, side), "labels": torch.arange(rows) % 10}


class Recurrent(nn.Module):
    """Residual blocks of an LSTM each, over tokens."""

    def __init__(self, layers: int, many: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(many, width), nn.Linear(width, many)
        self.layers = nn.ModuleList(Remembering(width) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Remembering(nn.Module):
    """An LSTM of one layer; gives its outputs alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(width), nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.norm(x))[0]


def recurrent() -> Made:
    """One step after the other."""
    many, text = _size(4000, 64), _text(_size(4000, 64), _size(64, 16))
    return Recurrent(_size(4, 2), many, _size(384, 32)), lambda rows: text(rows)["input_ids"]
