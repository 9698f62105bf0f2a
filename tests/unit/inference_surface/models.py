"""Tiny models with random weights that do not fall into one repeated token, and a tokenizer for them."""

from __future__ import annotations

import functools
import string
from typing import Any

import torch

WORDS = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    "<mask>",
    *string.ascii_lowercase,
    *(a + b for a in "abcdefgh" for b in "aeiou"),
]
VOCABULARY = len(WORDS)
SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@functools.cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


@functools.cache
def _built(kind: str) -> Any:
    import transformers as t

    width = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, **SMALL}
    neo = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], **SMALL}
    seq2seq = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        **SMALL,
    }
    speech = {
        "conv_dim": (8, 8),
        "conv_kernel": (10, 4),
        "conv_stride": (5, 4),
        "num_conv_pos_embeddings": 16,
        "num_feat_extract_layers": 2,
        "num_conv_pos_embedding_groups": 2,
        **width,
    }
    table = {
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**width)),
        "bert-class": lambda: t.BertForSequenceClassification(t.BertConfig(**width)),
        "distilbert": lambda: t.DistilBertForMaskedLM(
            t.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=64, **SMALL)
        ),
        "electra": lambda: t.ElectraForMaskedLM(t.ElectraConfig(embedding_size=32, **width)),
        "roberta": lambda: t.RobertaForMaskedLM(t.RobertaConfig(**width)),
        "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**seq2seq)),
        "wav2vec2": lambda: t.Wav2Vec2ForCTC(t.Wav2Vec2Config(**speech)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **SMALL)),
        "gpt_neo": lambda: t.GPTNeoForCausalLM(t.GPTNeoConfig(max_position_embeddings=64, window_size=8, **neo)),
        "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(max_position_embeddings=64, **width)),
        "gptj": lambda: t.GPTJForCausalLM(
            t.GPTJConfig(n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, **SMALL)
        ),
        "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **SMALL)),
        "opt": lambda: t.OPTForCausalLM(
            t.OPTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                ffn_dim=64,
                word_embed_proj_dim=32,
                max_position_embeddings=64,
                **SMALL,
            )
        ),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(max_position_embeddings=64, num_key_value_heads=2, **width)),
    }
    torch.manual_seed(7)
    made = table[kind]().eval()
    with torch.no_grad():
        for param in made.parameters():
            if param.dim() > 1:
                param.mul_(16.0)
    return made


def model(kind: str) -> Any:
    """A copy of its own of a model of that kind, in fp32 and evaluation mode."""
    import copy

    return copy.deepcopy(_built(kind))


def prompt(rows: int = 2, length: int = 9, seed: int = 3) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
