"""Eight architectures, small, with a micro-batch each: for predictions of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, Any]


def _tokens(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=96, n_head=4, n_positions=64, vocab_size=600))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": 600}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": 600}
    return BertForMaskedLM(BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=64))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 96, "d_ff": 192, "d_kv": 24, "num_heads": 4, "num_layers": 2, "vocab_size": 600}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 600}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=4))


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [2, 2, 2], "num_labels": 10}
    return ResNetForImageClassification(ResNetConfig(**sizes, layer_type="basic"))


class Recurrent(nn.Module):
    """Embedding, two layers of LSTM, a head that shares the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(600, 96), nn.LSTM(96, 96, num_layers=2, batch_first=True)
        self.head = nn.Linear(96, 600, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0]).float().logsumexp(-1).mean()


class Plain(nn.Module):
    """Encoder layers of torch's own, with dropout, over floating-point input."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(96, 4, 192, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.out = nn.Linear(96, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(x)).float().square().mean()


def _text(rows: int) -> dict[str, torch.Tensor]:
    tokens = _tokens(rows, 48, 600)
    return {"input_ids": tokens, "labels": tokens}


def _masked(rows: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, 48, dtype=torch.long)
    mask[:, 40:] = 0
    return {**_text(rows), "attention_mask": mask}


def _images(rows: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 64, 64), "labels": torch.arange(rows) % 10}


# name: (makes the model, makes a micro-batch of so many rows)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "gpt2": (gpt2, _text),
    "llama": (llama, _masked),
    "bert": (bert, _masked),
    "t5": (t5, _text),
    "mixtral": (mixtral, _text),
    "resnet": (resnet, _images),
    "lstm": (Recurrent, lambda rows: _tokens(rows, 48, 600)),
    "plain": (Plain, lambda rows: torch.randn(rows, 48, 96)),
}
