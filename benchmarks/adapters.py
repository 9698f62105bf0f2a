"""A pass with LoRA adapters: `python -m benchmarks.adapters [--rounds 9] [--dtype bf16,fp32] [--threads 1]`.

A Llama of 135 M parameters (SmolLM2's sizes, random weights) decodes a batch of eight sequences, each with an adapter
of its own, and the same batch without adapters. Sides alternate in one process, over the same generator; the time of a
side in a round is the median CPU time of its passes (all threads), and a ratio is the median of the rounds' ratios.
"none again" compares the side without adapters with itself. Bar: 1.15 for eight adapters of PEFT's default form (rank
8, queries and values); larger forms are printed beside it, with the bytes of their matrices, which every pass reads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import write_json
from deepspeed.inference import Generator
from deepspeed.inference.executors.native import FusedExecutor
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch

BATCH, CONTEXT, PAGE, BAR = 8, 64, 16, 1.15
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FORMS: dict[str, tuple[int, list[str]]] = {
    "rank 8, q and v": (8, ["q_proj", "v_proj"]),
    "rank 8, all linear": (8, ALL),
    "rank 16, all linear": (16, ALL),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=1024,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model.eval().to(dtype)


def write_adapter(model: Any, folder: Path, rank: int, targets: list[str], seed: int, size: float = 0.02) -> Path:
    """Write an adapter of random matrices in PEFT's format."""
    folder.mkdir(parents=True)
    drawn, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            for half, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = size * torch.randn(shape, generator=drawn)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def batch_of(generator: Generator, names: list[str | None]) -> RaggedBatch:
    """Return a pass with one decoding row for each adapter, in a context of `CONTEXT` tokens."""
    pages, slices = -(-(CONTEXT + 1) // PAGE), []
    for number, name in enumerate(names):
        adapter = None if name is None else generator.adapters[name]
        own = list(range(number * pages, (number + 1) * pages))
        slices.append(BatchSlice([7 * number + 3], CONTEXT, own, adapter=adapter))
    return RaggedBatch(slices, PAGE, torch.device("cpu"))


def pass_time(generator: Generator, batch: RaggedBatch, passes: int) -> float:
    """Return the median CPU seconds of a pass."""
    times = []
    for _ in range(passes):
        before = time.process_time()
        generator._executor.run(batch)
        times.append(time.process_time() - before)
    return statistics.median(times)


def measured(dtype: str, rounds: int, passes: int) -> list[dict[str, Any]]:
    generator = Generator(make(DTYPES[dtype]), lossless_weights=dtype == "bf16", page_size=PAGE, cache_bytes=1 << 26)
    assert isinstance(generator._executor, FusedExecutor), generator._executor.unfused
    for pools in generator._executor.store.layers.values():
        for pool in pools:
            pool.normal_(0, 0.1)
    sides: dict[str, list[str | None]] = {"none": [None] * BATCH, "none again": [None] * BATCH}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as room:
        for form, (rank, targets) in FORMS.items():
            names = [f"{form} {number}" for number in range(BATCH)]
            for number, name in enumerate(names):
                generator.add_adapter(name, write_adapter(generator.model, Path(room, name), rank, targets, number))
            sides[form] = list(names)
            sizes[form] = sum(generator.adapters[name].nbytes for name in names)
    batches = {side: batch_of(generator, names) for side, names in sides.items()}
    found: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        order = list(sides) if turn % 2 else list(reversed(sides))
        times = {side: pass_time(generator, batches[side], passes) for side in order}
        for side in sides if turn else ():  # the first round warms up
            found[side].append(times[side])
    rows = []
    for side, times in found.items():
        ratio = statistics.median(a / b for a, b in zip(times, found["none"], strict=True))
        size = sizes.get(side, 0)
        rows.append({"dtype": dtype, "side": side, "ms": 1e3 * statistics.median(times), "ratio": ratio, "bytes": size})
        print(f"{dtype} {side:22} {rows[-1]['ms']:8.2f} ms  {ratio:.3f}  {size / 1e6:6.1f} MB", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--dtype", default="bf16,fp32")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = [row for dtype in given.dtype.split(",") for row in measured(dtype, given.rounds, given.passes)]
    for row in rows:
        if row["side"] == "rank 8, q and v":
            state = "met" if row["ratio"] <= BAR else "MISSED"
            print(f"{row['dtype']}: {row['ratio']:.3f} of the pass without adapters, bar {BAR}: {state}")
    print(write_json("adapters.json", rows), flush=True)


if __name__ == "__main__":
    main()
