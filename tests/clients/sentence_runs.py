"""sentence-transformers: its trainer at a stage, and what it saves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.clients.common import zero
from tests.clients.transformers_runs import AUTO, trainer_state

ASKED = ["w3 w4", "w40", "w1 w2 w9"]


def _base(folder: str) -> str:
    """A small encoder and its words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    words = [*special.values(), *(f"w{number}" for number in range(50))]
    words_of = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    words_of.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=words_of, **special).save_pretrained(folder)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=32, **sizes)).save_pretrained(folder)
    return folder


def saved(stage: int, folder: str) -> None:
    import sentence_transformers as library  # pyright: ignore[reportMissingImports]
    from datasets import Dataset
    from sentence_transformers.losses import MultipleNegativesRankingLoss  # pyright: ignore[reportMissingImports]

    base, out = f"{folder}/base", f"{folder}/saved"
    if dist.get_rank() == 0:
        _base(base)
    dist.barrier()
    texts = {"a": [f"w{at} w{at + 1}" for at in range(16)], "b": [f"w{at} w{at + 2}" for at in range(16)]}
    with trainer_state(stage) as scratch:
        arguments = library.SentenceTransformerTrainingArguments(
            output_dir=scratch,
            max_steps=2,
            per_device_train_batch_size=2,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            accelerator_config={"use_configured_state": True},
            deepspeed=dict.fromkeys(AUTO, "auto")
            | {"zero_optimization": zero(stage) | {"stage3_gather_16bit_weights_on_model_save": True}},
        )
        model = library.SentenceTransformer(base, device="cpu")
        loss = MultipleNegativesRankingLoss(model)
        trainer = library.SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=Dataset.from_dict(texts), loss=loss
        )
        trainer.train()
        trainer.save_model(out)
        dist.barrier()
        engine: Any = trainer.model_wrapped
        state = engine._consolidated_16bit_state_dict()
        trained = trainer.model.encode(ASKED)  # on all ranks, of weights that lie shared out
        engine.destroy()
    for name in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):  # scikit-learn's, when it is imported
        os.environ.pop(name, None)
    if state is not None:
        assert (Path(out) / "model.safetensors").stat().st_size > 4 * sum(value.numel() for value in state.values())
        loaded = library.SentenceTransformer(out, device="cpu")
        again = loaded.state_dict()
        assert set(again) <= set(state)
        assert all(torch.equal(value, state[name]) for name, value in again.items())
        assert trained.shape == (len(ASKED), 32)
        assert (loaded.encode(ASKED) == trained).all()
        assert (library.SentenceTransformer(base, device="cpu").encode(ASKED) != trained).any()
