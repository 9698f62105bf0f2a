"""Padding and time of packs and of batches of equal tokens: `python -m benchmarks.packing [--counts 100000,…]`.

With `--train`, steps of a small Llama on padded batches, batches of near lengths and packed rows, in turns.

Three distributions of lengths, budget 4,096: log-normal (chats), uniform, and bimodal (70 % short answers, 30 %
documents of about 1,300 tokens). Times are CPU seconds, the least of three tries. Bars: padding of packs at most 2 %,
time at most 2.3 times for twice the sequences.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from deepspeed.data.dynamic_batches import token_batches
from deepspeed.data.packing import PackedDataset, pack, separate_sequences

BUDGET = 4096


def lengths_of(kind: str, count: int) -> Any:
    draw = np.random.default_rng(0)
    if kind == "log-normal":
        sizes = draw.lognormal(5.5, 0.9, count)
    elif kind == "uniform":
        sizes = draw.integers(1, BUDGET + 1, count)
    else:
        sizes = np.where(draw.random(count) < 0.7, draw.normal(180, 60, count), draw.normal(1300, 200, count))
    return np.clip(np.asarray(sizes).astype(int), 8, BUDGET)


def least(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(3):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def padded(tokens: list[Any]) -> dict[str, torch.Tensor]:
    """Return a batch that is padded to its longest sequence."""
    longest = max(map(len, tokens))
    ids, mask = torch.zeros(len(tokens), longest, dtype=torch.long), torch.zeros(len(tokens), longest, dtype=torch.long)
    for row, sequence in enumerate(tokens):
        ids[row, : len(sequence)] = torch.as_tensor(sequence)
        mask[row, : len(sequence)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def train(rounds: int, samples: int, budget: int) -> None:
    """Print the time per real token of padded, bucketed and packed batches, beside each other in every round."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4))
    separate_sequences(model)
    optimizer = torch.optim.AdamW(model.parameters())
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(4.3, 0.8, samples).astype(int), 8, budget)
    texts = [draw.integers(1, 512, length) for length in lengths]
    size = max(1, int(budget / lengths.mean()))  # about as many tokens in a batch as in a packed row
    order = draw.permutation(samples)
    buckets = token_batches(lengths, budget, "bucketed", 0, padded=True)
    packs = pack(lengths, budget, seed=0, order="shuffled")
    sides = {
        "padded": [padded([texts[i] for i in order[at : at + size]]) for at in range(0, samples, size)],
        "bucketed": [padded([texts[i] for i in batch]) for batch in buckets],
        "packed": [{k: v[None] for k, v in PackedDataset(texts, packs)[row].items()} for row in range(len(packs))],
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, batches in sides.items():
            began = time.perf_counter()
            for batch in batches:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            times[side].append(time.perf_counter() - began)
    for side, batches in sides.items():
        share = 1 - lengths.sum() / sum(batch["input_ids"].numel() for batch in batches)
        ratios = sorted(own / other for own, other in zip(times[side], times["padded"], strict=True))
        print(
            f"{side:9} padding {share:5.1%}, {len(batches)} steps, time per real token over padded "
            f"{ratios[len(ratios) // 2]:.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}]"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", default="100000,125000,250000,500000,1000000")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--budget", type=int, default=512)
    options = parser.parse_args()
    if options.train:
        train(options.rounds, options.samples, options.budget)
        return
    counts = [int(count) for count in options.counts.split(",")]
    for kind in ("log-normal", "uniform", "bimodal"):
        for count in counts:
            lengths = lengths_of(kind, count)
            packs = pack(lengths, BUDGET, seed=0, order="shuffled")
            window = pack(lengths, BUDGET, seed=0, order="shuffled", window=2000)
            seconds = least(lambda lengths=lengths: pack(lengths, BUDGET, seed=0, order="shuffled"))
            batches = least(lambda lengths=lengths: token_batches(lengths, 4 * BUDGET, "bucketed", 0).evened(8))
            print(
                f"{kind} {count:,}: unpacked {1 - lengths.sum() / (count * BUDGET):.1%}, packed "
                f"{packs.padding_share:.3%}, window {window.padding_share:.2%}, {seconds:.3f} s; "
                f"batches {batches:.3f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
