"""What is not computed twice, and who waits: `python -m benchmarks.reuse [--width 256] [--folder MODEL]`.

One thread, CPU time of the process beside wall time; sides alternate, the median of the rounds is printed.
First token: 512 tokens that an earlier request had, against 512 others. Drafts: a text that repeats itself, and one
that does not, with and without speculation. Gap: eight streams, while a prompt of 1,500 tokens enters.

`--folder` names a model that examples/bytes_lm/train.py saved; then only drafts are looked at, on text of Python's
library that the model has not read: prompts of half its context, gone on with greedily, and drawn at a temperature at
which nothing repeats. For instance:

    .venv/bin/deepspeed --num_gpus 2 examples/bytes_lm/train.py --sequence 512 --train_bytes 1500000 --save runs/reuse
    python -m benchmarks.reuse --folder runs/reuse
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.common import REPOSITORY
from deepspeed.inference import Generator, Request, SamplingParams

VOCABULARY = 2048


def make(width: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=max(1, width // 64), max_position_embeddings=4096,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    return model


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def cost(work: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds, wall seconds)."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def ratio(name: str, one: list[tuple[float, float]], other: list[tuple[float, float]]) -> None:
    figures = [statistics.median(a[i] / b[i] for a, b in zip(one, other, strict=True)) for i in range(2)]
    print(f"{name}: {figures[0]:.3f} in CPU time, {figures[1]:.3f} in wall time", flush=True)


def first_token(model: LlamaForCausalLM, rounds: int) -> None:
    generator = Generator(model, cache_bytes=1 << 28)
    one, shared = SamplingParams(max_new_tokens=1, ignore_eos=True), tokens(512, 1)
    generator.generate([shared + [7]], one)
    warm, cold, again = [], [], []
    for number in range(rounds):
        warm.append(cost(lambda n=number: generator.generate([shared + tokens(8, 100 + n)], one)))
        cold.append(cost(lambda n=number: generator.generate([tokens(520, 200 + n)], one)))
        again.append(cost(lambda n=number: generator.generate([tokens(520, 300 + n)], one)))
    ratio("first token after 512 shared tokens / cold", warm, cold)
    ratio("the same, cold / cold", again, cold)


def drafts(model: LlamaForCausalLM, rounds: int) -> None:
    """Text that repeats itself: a bias lets the model say one cycle. Text that does not: drawn."""
    plain, guessing = Generator(model), Generator(model, speculation=6)
    drawn = SamplingParams(max_new_tokens=128, temperature=3.0, seed=5, ignore_eos=True)
    cases = {"repeats": (tokens(24, 4) * 4, None), "does not repeat": (tokens(96, 5), drawn)}
    for name, (prompt, sampling) in cases.items():
        sampling = sampling or SamplingParams(max_new_tokens=256, ignore_eos=True)
        sides: list[list[tuple[float, float]]] = [[], []]
        for _ in range(rounds):
            for side, generator in zip(sides, (plain, guessing), strict=True):
                side.append(cost(lambda g=generator, p=prompt, s=sampling: g.generate([p], s)))
        same = plain.generate([prompt], sampling) == guessing.generate([prompt], sampling)
        ratio(f"drafts, text that {name}: time without / with (tokens equal: {same})", *sides)


def library_drafts(folder: Path, rounds: int, count: int = 12) -> None:
    """Guesses under a trained model of bytes, on held-out text of the library."""
    sys.path.insert(0, str(REPOSITORY / "examples" / "bytes_lm"))
    from corpus import Windows, library_files, split

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    length = model.config.max_position_embeddings // 2
    heldout = Windows(split(library_files())[1], length, count * length, seed=0)
    prompts = [heldout[at][:length].tolist() for at in range(len(heldout))]
    plain, guessing = Generator(model, prefix_cache=False), Generator(model, prefix_cache=False, speculation=6)
    print(f"{folder}: {plain.kind}, {len(prompts)} prompts of {length} bytes, as many new ones", flush=True)
    for name, sampling in (
        ("greedy", SamplingParams(max_new_tokens=length, ignore_eos=True)),
        ("drawn at temperature 3", SamplingParams(max_new_tokens=length, temperature=3.0, seed=5, ignore_eos=True)),
    ):
        said = [generator.generate(prompts, sampling) for generator in (plain, guessing)]
        sides: list[list[tuple[float, float]]] = [[], []]
        for _ in range(rounds):
            for side, generator in zip(sides, (plain, guessing), strict=True):
                side.append(cost(lambda g=generator, s=sampling: [g.generate([prompt], s) for prompt in prompts]))
        ratio(f"drafts, library text, {name}: time without / with (tokens equal: {said[0] == said[1]})", *sides)


def gap(model: LlamaForCausalLM) -> None:
    generator = Generator(model, cache_bytes=1 << 28, prefix_cache=False)
    for stream in range(8):
        sampling = SamplingParams(max_new_tokens=160, ignore_eos=True)
        generator.submit(Request(stream, tokens(32, stream), sampling))
    steps = []
    for step in range(120):
        if step == 40:
            generator.submit(Request("long", tokens(1500, 9), SamplingParams(max_new_tokens=1, ignore_eos=True)))
        steps.append(cost(generator.step))
    for which, name in enumerate(("CPU", "wall")):
        gaps = sorted(step[which] for step in steps[9:])
        median, high = statistics.median(gaps), gaps[int(0.99 * len(gaps))]
        print(f"gap between tokens of 8 streams, {name} time: p99 {high / median:.2f} x median {median * 1e3:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="a model of bytes, for the drafts alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.folder is not None:
        library_drafts(given.folder, given.rounds)
        return
    model = make(given.width, given.layers)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, fp32, one thread", flush=True)
    first_token(model, given.rounds)
    drafts(model, given.rounds)
    gap(model)


if __name__ == "__main__":
    main()
