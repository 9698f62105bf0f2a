"""Sequences of 32,768 tokens at tiny width: equal to one rank, activations shared out, one tile of logits."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.foundation.pytree import tensors_in
from deepspeed.sequence.batches import slice_batch
from tests.parallel.dense import momentum
from tests.parallel.sequence_runs import Tiled, config_of, start, tile
from tests.parallel.tensor_runs import model_of
from tests.parallel.test_sequence_layers import Largest

LENGTH = int(os.environ.get("LONG_SEQUENCE", "32768"))
TILES, WORDS = 16, 64


class Alive(TorchDispatchMode):
    """Bytes of the tensors that were made inside and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tensors_in([args, kwargs])}
        for one in tensors_in(out):
            if one.untyped_storage()._cdata not in given:  # as are views of what was there before
                storage = StorageWeakRef(one.untyped_storage())
                self._made[storage.cdata] = (storage, one.untyped_storage().nbytes())
        return out

    def bytes(self) -> int:
        return sum(size for storage, size in self._made.values() if not storage.expired())


def ran(sp: int, kv: int, tiled: bool, recompute: bool = True) -> tuple[list[float], float, int, int]:
    """Losses of two steps, the first gradient's norm, bytes kept for backward, the largest tensor of the loss."""
    model = model_of("Llama", num_key_value_heads=kv, max_position_embeddings=LENGTH, vocab_size=WORDS)
    ids = torch.randint(3, WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    if tiled:
        tile(model, TILES)
    losses, norm, kept, largest = [], 0.0, 0, Largest()
    config = config_of({"sp": sp}, 1, sequence_parallel_recompute=recompute)
    with start(Tiled(model, TILES if tiled else 1, largest), config, momentum) as engine:
        part = slice_batch({"input_ids": ids, "labels": ids}, current_mesh().axis("sp"))
        labels = part["shift_labels"]
        for _ in range(2):
            with Alive() as alive:
                loss = engine(part["input_ids"], part["position_ids"], labels)
            kept = alive.bytes()
            engine.backward(loss, num_items=int((labels != -100).sum()))
            engine.step()
            norm = norm or float(engine.get_global_grad_norm())
            total = loss.detach().clone()
            if sp > 1:
                torch.distributed.all_reduce(total)
            losses.append(float(total) / (LENGTH - 1))
    return losses, norm, kept, largest.numel


_alone: dict[tuple[int, bool], Any] = {}


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
            share = kept * sp / alone(tiled)[2]
            print(f"sp {sp} kv {kv} tiled {tiled}: {share:.4f} of a share")
            assert abs(share - 1) <= 0.05, kept
            if tiled:
                assert largest <= LENGTH // sp // TILES * WORDS
