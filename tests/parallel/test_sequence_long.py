"""Sequences of 32,768 tokens at tiny width: equal to one rank, activations shared out, one tile of logits."""

from __future__ import annotations

import os
from math import gcd
from typing import Any

import pytest
import torch

from deepspeed.comm.mesh import current_mesh
from deepspeed.sequence.batches import slice_batch
from tests.parallel.dense import momentum
from tests.parallel.sequence_runs import Tiled, config_of, start, tile
from tests.parallel.tensor_runs import model_of
from tests.parallel.test_sequence_layers import Largest

LENGTH = int(os.environ.get("LONG_SEQUENCE", "32768"))
TILES, WORDS = 16, 64


class Saved:
    """Bytes that autograd keeps for backward, of activations."""

    def __init__(self, model: Any) -> None:
        self.bytes, self._seen = 0, {id(p) for p in model.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if id(tensor) not in self._seen and tensor.is_floating_point() and place not in self._seen:
            self._seen.add(place)
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor

    def __enter__(self) -> Any:
        self._hooks.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._hooks.__exit__(*args)


def ran(sp: int, kv: int, tiled: bool) -> tuple[list[float], float, int, int]:
    """Losses of two steps, the first gradient's norm, bytes kept for backward, the largest tensor of the loss."""
    model = model_of("Llama", num_key_value_heads=kv, max_position_embeddings=LENGTH, vocab_size=WORDS)
    ids = torch.randint(3, WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    if tiled:
        tile(model, TILES)
    losses, norm, kept, largest = [], 0.0, 0, Largest()
    with start(Tiled(model, TILES if tiled else 1, largest), config_of({"sp": sp}, 1), momentum) as engine:
        part = slice_batch({"input_ids": ids, "labels": ids}, current_mesh().axis("sp"))
        labels = part["shift_labels"]
        for _ in range(2):
            with Saved(model) as saved:
                loss = engine(part["input_ids"], part["position_ids"], labels)
            kept = kept or saved.bytes
            engine.backward(loss, num_items=int((labels != -100).sum()))
            engine.step()
            norm = norm or float(engine.get_global_grad_norm())
            total = loss.detach().clone()
            if sp > 1:
                torch.distributed.all_reduce(total)
            losses.append(float(total) / (LENGTH - 1))
    return losses, norm, kept, largest.numel


_alone: dict[tuple[int, bool], Any] = {}


def kept_twice(sp: int, kv: int) -> float:
    """Bytes a rank keeps beside its share: each layer's context, before and after its exchange, and copies of heads."""
    made = model_of("Llama").config
    width, copies = made.hidden_size // made.num_attention_heads, sp // gcd(kv, sp)
    heads = made.num_attention_heads / sp + 2 * kv * (copies - 1) / sp
    return 0 if sp == 1 else 4 * LENGTH * width * heads * made.num_hidden_layers


@pytest.mark.slow
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("kv", [1, 2, 4])
def test_long_sequences(workers: Any, kv: int, tiled: bool) -> None:
    def alone(tiled: bool) -> Any:
        return _alone.get((kv, tiled)) or _alone.setdefault(
            (kv, tiled), workers(1).run(ran, 1, kv, tiled, timeout=600)[0]
        )

    whole = alone(False)
    for sp in (1, 2, 4):
        for losses, norm, kept, largest in (
            [alone(tiled)] if sp == 1 else workers(sp).run(ran, sp, kv, tiled, timeout=600)
        ):
            assert max(abs(a - b) / b for a, b in zip(losses, whole[0], strict=True)) <= 2e-6
            assert abs(norm - whole[1]) <= 5e-6 * whole[1]
            wanted = alone(tiled)[2] / sp + kept_twice(sp, kv)
            print(f"sp {sp} kv {kv} tiled {tiled}: {kept * sp / alone(tiled)[2]:.3f} ÷ sp, {kept / wanted:.4f}")
            assert abs(kept / wanted - 1) <= 0.01, (kept, wanted)
            if tiled:
                assert largest <= LENGTH // sp // TILES * WORDS
