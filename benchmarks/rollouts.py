"""Rollouts on an engine in training: `python -m benchmarks.rollouts [--tables cost speed switch] [--rounds 7]`, and on
two ranks `deepspeed --num_gpus 2 --module benchmarks.rollouts --tables stages`.

- `cost`: forward and backward of a policy gradient on 16 answers of 64 tokens with torch's own log-probabilities
  ("plain"), with those of the rollout ("reused", bar 1.05 of plain), and with those of a score made for the step
  ("anew", bar 1.35).
- `speed`: 16 greedy answers of 64 tokens: Transformers' `generate` on the engine's module, and `engine.generate` (bar
  0.30 of it), at stage 0. "floor" does as many operations as the products of these answers in square matrices of 1,024:
  the processor's best rate, which no product of 16 rows reaches. A bar below it cannot be held in this dtype.
- `stages`: the same by engines of stages 0 and 3 of two ranks that alternate, with `pin_parameters` (bar 1.25) and
  layer by layer.
- `switch`: cycles of rollout, score and update; the growth of the resident set after the second cycle, and whether the
  base weights under LoRA keep their bits.

Sides alternate in one process, on one thread; the time of a side is the CPU time of the process (of `stages`: wall
time), and a ratio is the median of the rounds' ratios. Models are Llamas of 20 M and 110 M parameters with random
weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed
from benchmarks.common import write_json
from deepspeed.inference.sampling_params import SamplingParams
from deepspeed.rollouts.logprobs import exact_logprobs, torch_logprobs

PROMPTS, PROMPT, NEW = 16, 16, 64
SIZES = {"20M": (384, 1024, 8, 6), "110M": (768, 2048, 12, 12), "toy": (64, 128, 2, 4)}
VOCABULARY = {"20M": 8192, "110M": 32000, "toy": 128}
BARS = {"reused": 1.05, "anew": 1.35, "engine": 0.30, "stage 3, pinned": 1.25}


def engine_of(size: str, dtype: str, stage: int = 0, lora: bool = False, **block: Any) -> Any:
    torch.manual_seed(0)
    width, inner, layers, heads = SIZES[size]
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY[size], hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=512, eos_token_id=None,
            bos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[param for param in model.parameters() if param.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": PROMPTS, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "zero_optimization": {"stage": stage}, "bf16": {"enabled": dtype == "bf16"}, "steps_per_print": 10**9,
            "hybrid_engine": {"enabled": True} | block,
        },
    )  # fmt: skip
    return engine


def prompts_of(size: str) -> torch.Tensor:
    return torch.randint(1, VOCABULARY[size], (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(1))


def compare(sides: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each side by round; sides alternate, in turned order every other round."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for call in sides.values():
        call()
    for number in range(rounds):
        names = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in names:
            begun = clock()
            sides[name]()
            seconds[name].append(clock() - begun)
    return seconds


def report(title: str, seconds: dict[str, list[float]], rows: list[dict[str, Any]]) -> None:
    first = next(iter(seconds))
    for name, values in seconds.items():
        ratios = sorted(a / b for a, b in zip(values, seconds[first], strict=True))
        ratio, bar = statistics.median(ratios), BARS.get(name)
        rows.append({"table": title, "side": name, "ratio": ratio, "low": ratios[0], "high": ratios[-1], "bar": bar})
        interval = f"[{ratios[0]:.3f}, {ratios[-1]:.3f}]"
        said = "" if bar is None else f"  bar {bar:.2f}: {'met' if ratio <= bar else 'missed'}"
        print(
            f"{title:16} {name:16} {1e3 * statistics.median(values):9.1f} ms  {ratio:.3f} {interval}{said}", flush=True
        )


def cost(size: str, dtype: str, rounds: int, rows: list[dict[str, Any]]) -> None:
    engine, sampling = engine_of(size, dtype), SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=0)
    answers = engine.rollout(prompts_of(size).tolist(), sampling)
    ids = torch.tensor([answer.prompt + answer.tokens for answer in answers])
    values = torch.tensor([answer.logprobs for answer in answers])
    advantages = torch.randn(PROMPTS, 1, generator=torch.Generator().manual_seed(2))

    def backward(logprobs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        current = logprobs(engine(input_ids=ids).logits[:, PROMPT - 1 : -1], ids[:, PROMPT:])
        engine.backward(-((current - values).exp() * advantages).mean())
        engine.zero_grad()

    def anew(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        scores = engine.score(ids.tolist(), sampling)
        return exact_logprobs(logits, tokens, torch.stack(scores)[:, PROMPT - 1 :], sampling)

    sides: dict[str, Callable[[], Any]] = {
        "plain": lambda: backward(lambda logits, tokens: torch_logprobs(logits, tokens, sampling)),
        "plain again": lambda: backward(lambda logits, tokens: torch_logprobs(logits, tokens, sampling)),
        "reused": lambda: backward(lambda logits, tokens: exact_logprobs(logits, tokens, values, sampling)),
        "anew": lambda: backward(anew),
    }
    report(f"cost {size} {dtype}", compare(sides, rounds, time.process_time), rows)
    engine.destroy()


def products_alone(engine: Any, size: str, dtype: str) -> Callable[[], None]:
    """Return a call that takes the time of the products of `speed` at the rate of large square matrices."""
    head = VOCABULARY[size] * SIZES[size][0]
    matrices = sum(param.numel() for param in engine.module.parameters() if param.ndim == 2) - 2 * head
    rows, sampled = PROMPTS * (PROMPT + NEW - 1), PROMPTS * NEW
    count = (rows * matrices + sampled * head) / 1024**3
    left, right = (torch.randn(1024, 1024, dtype=torch.bfloat16 if dtype == "bf16" else None) for _ in range(2))

    def multiply() -> None:
        for _ in range(int(count)):
            left @ right
        left[: int(1024 * (count % 1))] @ right

    return multiply


def speed(size: str, dtype: str, rounds: int, rows: list[dict[str, Any]]) -> None:
    engine, prompts = engine_of(size, dtype), prompts_of(size)
    own, call = type(engine.module).generate, {"max_new_tokens": NEW, "do_sample": False}
    mask = torch.ones_like(prompts)
    sides = {
        "transformers": lambda: own(engine.module, prompts, attention_mask=mask, **call),
        "engine": lambda: engine.generate(prompts, attention_mask=mask, **call),
        "engine, drawn": lambda: engine.generate(
            prompts, attention_mask=mask, max_new_tokens=NEW, do_sample=True, top_k=0
        ),
        "floor": products_alone(engine, size, dtype),
    }
    engine.eval()
    report(f"speed {size} {dtype}", compare(sides, rounds, time.process_time), rows)
    engine.destroy()


def stages(size: str, dtype: str, rounds: int, rows: list[dict[str, Any]]) -> None:
    engines = {
        "stage 0": engine_of(size, dtype),
        "stage 3, pinned": engine_of(size, dtype, 3),
        "stage 3, by layer": engine_of(size, dtype, 3, pin_parameters=False),
    }
    prompts = prompts_of(size).tolist()
    sides = {
        name: (lambda engine=engine: engine.rollout(prompts, SamplingParams(max_new_tokens=NEW)))
        for name, engine in engines.items()
    }
    seconds = compare(sides, rounds, time.perf_counter)
    if deepspeed.comm.get_rank() == 0:
        report(f"stages {size} {dtype}", seconds, rows)
    for engine in engines.values():
        engine.destroy()


def switch(size: str, dtype: str, cycles: int, rows: list[dict[str, Any]]) -> None:
    for stage, lora in ((0, False), (2, True), (3, True)):
        engine = engine_of(size, dtype, stage, lora)
        frozen = [param for param in engine.module.parameters() if not param.requires_grad]
        with deepspeed.zero.GatheredParameters(frozen):
            before = [param.detach().clone() for param in frozen]
        sampling, sizes = SamplingParams(max_new_tokens=8, temperature=1.0), []
        for _ in range(cycles):
            answers = engine.rollout(prompts_of(size).tolist()[:4], sampling)
            ids = torch.tensor([answer.prompt + answer.tokens for answer in answers])
            values = torch.stack(engine.score(ids.tolist(), sampling))
            logprobs = exact_logprobs(engine(input_ids=ids).logits[:, :-1], ids[:, 1:], values, sampling)
            engine.backward(-logprobs.mean())
            engine.step()
            sizes.append(psutil.Process().memory_info().rss)
        with deepspeed.zero.GatheredParameters(frozen):
            equal = all(map(torch.equal, before, [param.detach() for param in frozen]))
        growth, title = (sizes[-1] - sizes[1]) / 2**20, f"stage {stage}{', LoRA' * lora}"
        rows.append({"table": "switch", "side": title, "cycles": cycles, "growth_mib": growth, "base_equal": equal})
        print(
            f"switch {size} {dtype} {title}: {growth:+.1f} MiB in cycles 3 to {cycles}; base bit-equal: {equal}",
            flush=True,
        )
        engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", default=["cost", "speed", "switch"])
    parser.add_argument("--sizes", nargs="+", default=["20M", "110M"])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other take CPU time too
    rows: list[dict[str, Any]] = []
    for table in arguments.tables:
        for size in arguments.sizes[:1] if table == "switch" else arguments.sizes:
            for dtype in arguments.dtypes:
                count = arguments.cycles if table == "switch" else arguments.rounds
                {"cost": cost, "speed": speed, "stages": stages, "switch": switch}[table](size, dtype, count, rows)
    if not deepspeed.comm.is_initialized() or deepspeed.comm.get_rank() == 0:
        print(write_json(f"rollouts-{'-'.join([*arguments.tables, *arguments.sizes])}.json", rows))


if __name__ == "__main__":
    main()
