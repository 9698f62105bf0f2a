"""An update from packed rows equals that from the same sequences one by one, whole and cut over two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deepspeed
from deepspeed.data.packing import PackedDataset, pack, separate_sequences

LENGTHS = (17, 5, 1, 12, 30, 2, 9, 3)
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CUTS = {
    "whole": {"zero_optimization": {"stage": 2}},
    "stage 3": {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
    "sp": {"mesh": {"sp": 2}},
    "tp": {"tensor_parallel": {"autotp_size": 2}},
    "pp": {"mesh": {"pp": 2}},
}


def model_of(family: str) -> Any:
    import transformers

    grouped = SIZES | {"num_key_value_heads": 2}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "Llama": ("LlamaForCausalLM", grouped),
        "Qwen3": ("Qwen3ForCausalLM", grouped | {"head_dim": 16}),
        "Mistral": ("MistralForCausalLM", grouped | {"sliding_window": 8, "head_dim": 16}),
        "Gemma2": (
            "Gemma2ForCausalLM",
            grouped | {"head_dim": 16, "attn_implementation": "eager", "sliding_window": 8},
        ),
        "GPTNeoX": ("GPTNeoXForCausalLM", SIZES),
        "GPT2": (
            "GPT2LMHeadModel",
            {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
            | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
        ),
    }
    name, sizes = kinds[family]
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes))


def sequences() -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(1, 64, size).tolist() for size in LENGTHS]


def one_by_one(family: str) -> dict[str, torch.Tensor]:
    """Weights after an update with rate 1 from the mean over all tokens with a label."""
    model = model_of(family).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    items = sum(length - 1 for length in LENGTHS)
    for sequence in sequences():
        tokens = torch.tensor([sequence])
        model(input_ids=tokens, labels=tokens, num_items_in_batch=items).loss.backward()
    optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def packed(family: str, cut: str, folder: str) -> None:
    """The same update from packed rows by an engine, and its whole weights in a folder."""
    model = model_of(family)
    separate_sequences(model)
    packs = pack(LENGTHS, 32, seed=0, order="shuffled")
    rows = list(PackedDataset(sequences(), packs))
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    config = {"train_micro_batch_size_per_gpu": len(rows), "gradient_accumulation_steps": 1, "steps_per_print": None}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config | CUTS[cut])[0]
    if cut == "pp":
        engine.train_batch(iter([batch]))
    else:
        if cut == "sp":
            from deepspeed.sequence.batches import slice_batch

            batch = slice_batch(batch, engine.mesh.axis("sp"))
        engine.backward(engine(**batch).loss)
        engine.step()
    engine.save_16bit_model(folder, "weights.bin")
    engine.destroy()


FAST = [("Llama", "sp"), ("Gemma2", "whole")]
CELLS = [(family, cut) for family in ("Llama", "Qwen3", "Mistral", "Gemma2", "GPTNeoX", "GPT2") for cut in CUTS]


@pytest.mark.parametrize(
    ("family", "cut"),
    [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow, id="-".join(cell)) for cell in CELLS],
)
def test_an_update_from_packed_rows_is_that_of_single_sequences(
    workers: Any, family: str, cut: str, tmp_path: Path
) -> None:
    workers(2).run(packed, family, cut, str(tmp_path), timeout=120)
    ours, expected = torch.load(tmp_path / "weights.bin"), one_by_one(family)
    before = model_of(family).state_dict()
    moved = max(float((expected[name] - before[name]).abs().max()) for name in expected)
    worst = {name: float((ours[name] - value).abs().max()) for name, value in expected.items() if name in ours}
    assert moved > 1e-2 and len(worst) > 10
    assert max(worst.values()) <= 1e-6, sorted(worst.items(), key=lambda pair: -pair[1])[:5]
