"""State bytes per parameter and rank, counted on live tensors, against the formula of each ZeRO stage.

The formula is ARCHITECTURE.md's. Beside the state stand transit buffers: one being filled, two travelling (with
`overlap_comm` twice `reduce_bucket_size` may be on the wire), and what each of them receives; they have a bar of their
own. The memory of other ranks, mapped once, is theirs: a step before the first count maps it.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import GPT, Shape, World, batch_of, print_table, serve, start_world, whole_bytes, write_json

SHAPE = Shape(layers=40, width=128, vocabulary=1024, sequence=32)
BLOCK = 12 * SHAPE.width**2 + 13 * SHAPE.width
BAR = 0.03
ROUNDS = 3  # that hold a transit buffer at once
RANKS = (1, 2, 4)
CASES = [(stage, dtype) for dtype in ("fp32", "bf16") for stage in range(4)]


def formula(stage: int, dtype: str, ranks: int) -> float:
    """Bytes per parameter on each rank for Adam, counted before the step, without accumulation."""
    parameters, optimizer, gradients = (2, 12, 4) if dtype == "bf16" else (4, 8, 4)
    split_optimizer, split_gradients, split_parameters = (ranks if stage >= least else 1 for least in (1, 1, 3))
    return parameters / split_parameters + optimizer / split_optimizer + gradients / split_gradients


def live_bytes() -> int:
    """Bytes of all tensors alive in this process, each storage once."""
    gc.collect()
    storages = {}
    with torch._C.DisableTorchFunctionSubclass(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `.grad` of tensors that are no leaves
        tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        # The raw slot: the property of a managed parameter would gather what it shows.
        gradients = [torch._C.TensorBase.grad.__get__(tensor) for tensor in tensors]
        for tensor in [*tensors, *(gradient for gradient in gradients if gradient is not None)]:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def watch_gathers(model: GPT, peaks: list[int]) -> None:
    """Note the bytes of whole parameters whenever a block begins or ends its forward or ends its backward."""

    def note(*_: Any) -> None:
        peaks.append(whole_bytes(model))

    for block in model.blocks:
        block.register_forward_pre_hook(note)
        block.register_forward_hook(note)
        block.register_full_backward_hook(note)


def config_of(stage: int, dtype: str) -> dict[str, Any]:
    """The JSON; at stage 3 every group is sharded, with live, reuse and prefetch limits of two groups."""
    return {
        "train_micro_batch_size_per_gpu": SHAPE.batch,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BLOCK,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 2 * BLOCK,
            "stage3_max_reuse_distance": 2 * BLOCK,
            "stage3_prefetch_bucket_size": 2 * BLOCK,
        },
    }


def make_rank() -> Callable[..., Any]:
    """A rank that trains one case for a step and counts after the backward of the next."""
    import deepspeed

    rank, ranks = start_world()

    def handle(stage: int, dtype: str) -> dict[str, float]:
        before = live_bytes()
        model = GPT(SHAPE)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        config = config_of(stage, dtype)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        peaks: list[int] = []
        if stage == 3:
            watch_gathers(model, peaks)
        for step in range(2):
            engine.backward(engine(batch_of(SHAPE, step, rank)))
            if step == 0:
                engine.step()
        wire = engine._components.reducer.reduce_scatter
        wire.settle()  # until no gradient is on its way
        still_whole = whole_bytes(model) if stage == 3 and ranks > 1 else 0
        kept = [buffer for kind in (wire._pool, wire._received) for pool in kind.values() for buffer in pool]
        transit = sum(buffer.untyped_storage().nbytes() for buffer in kept)
        state = live_bytes() - before - still_whole - transit
        engine.destroy()
        return {"state": state / parameters, "transit": transit / (BLOCK * 4), "gathered": max(peaks, default=0)}

    handle(0, "fp32")
    return handle


def main() -> None:
    """Measure every case, print, write."""
    rows, records = [], []
    for ranks in RANKS:
        world = World("memory.py", ranks, {})
        for stage, dtype in CASES:
            answers = world.ask(stage=stage, dtype=dtype)
            state, expected = max(answer["state"] for answer in answers), formula(stage, dtype, ranks)
            transit = max(answer["transit"] for answer in answers)
            groups = max(answer["gathered"] for answer in answers) / (BLOCK * (2 if dtype == "bf16" else 4))
            held = abs(state - expected) <= BAR * expected and transit <= 2 * ROUNDS and groups <= 2
            verdict = "ok" if held else "MISSED"
            record = {"ranks": ranks, "dtype": dtype, "stage": stage, "bytes": state, "formula": expected}
            records.append(
                record | {"transit_buckets": transit, "gathered_groups": groups if stage == 3 else None, "held": held}
            )
            counted = [f"{state:.2f}", f"{expected:.2f}", f"{transit:.2f}", f"{groups:.2f}" if stage == 3 else ""]
            rows.append([str(ranks), dtype, str(stage), *counted, verdict])
        world.close()
    print_table(
        ["ranks", "dtype", "stage", "bytes/parameter", "formula", "transit buckets", "groups gathered", ""], rows
    )
    print(f"written: {write_json('memory.json', records)}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve(make_rank)
    else:
        main()
