"""Time of two trees of the package in turns: `python benchmarks/two_trees.py TREE TREE [--rounds 12]`.

For a change that must not cost time. Each round starts one process per tree and case, in changing order, with that tree
on Python's path; a process does what is timed until it is warm, then reports the best of five. Printed are medians of
the paired ratios second / first with 95 % intervals. Cases: a training step of many small groups at stages 0 to 3, on
one rank and on two; a token of a small model through the batched generator.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import median_interval

CASES = [f"stage {stage}, {ranks} rank{'s' * (ranks > 1)}" for ranks in (1, 2) for stage in range(4)] + ["a token"]


def best(call: Callable[[], None], calls: int, rounds: int = 5) -> float:
    """Seconds of a call, the best of some rounds, after a warm one."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    return min(times[1:])


def step(stage: int) -> float:
    """Seconds of a step of 64 layers of width 64, with clipping."""
    import torch

    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(64)))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 20_000, "stage3_prefetch_bucket_size": 20_000,
            "stage3_param_persistence_threshold": 0,
        },
        "steps_per_print": None,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config)
    inputs = torch.randn(8, 64)

    def call() -> None:
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()

    seconds = best(call, 30)
    engine.destroy()
    return seconds


def token() -> float:
    """Seconds of a token of four sequences by the generator."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from deepspeed.inference import generator as room

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    sampling = (getattr(room, "SamplingParams", None) or vars(room)["Sampling"])(max_new_tokens=64)  # its older name
    generator = room.Generator(LlamaForCausalLM(config).eval())
    prompts = [[3 + i] * 16 for i in range(4)]
    return best(lambda: generator.generate(prompts, sampling) and None, 1) / 64


def child(case: str) -> None:
    """Time one case in this process and print it."""
    import torch

    torch.set_num_threads(1)
    print("seconds", token() if case == "a token" else step(int(case[6])), flush=True)


def run(tree: str, case: str) -> float:
    """Seconds of a case in processes of a tree."""
    ranks = 2 if "ranks" in case else 1
    processes = []
    for rank in range(ranks):
        env = os.environ | {
            "PYTHONPATH": tree, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29877",
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), "--child", case]
        processes.append(
            subprocess.Popen(command, env=env, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
    outputs = [process.communicate()[0] for process in processes]
    return max(float(line.split()[1]) for out in outputs for line in out.splitlines() if line.startswith("seconds"))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trees", nargs="*")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return 0
    first, second = (str(Path(tree).resolve()) for tree in options.trees)
    for case in options.cases:
        ratios = []
        for number in range(options.rounds):
            order = (first, second) if number % 2 else (second, first)
            seconds = {tree: run(tree, case) for tree in order}
            ratios.append(seconds[second] / seconds[first])
        ratio = median_interval(ratios)
        print(f"{case:<18} {ratio}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
