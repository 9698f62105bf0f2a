"""Guesses on a trained model: `python -m benchmarks.trained_guesses [--rounds 5] [--prompts 6] [--new 96]`.

The base of `tests/trained.py` in fp32, one thread, greedy, one prompt at a time, on held-out chats and sources.
Reported: the share of guessed tokens that held, tokens per pass, and time without guesses over time with them (paired
rounds whose order alternates: the median, CPU time of the process and wall time). Tokens have to be the same. Guesses
may never cost more than 2 %: exits with 1 where the CPU time says so.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import print_table, write_json
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.inference.generator import NgramProposer
from tests import trained

BAR = 0.98


def asked(tokenizer: Any, count: int) -> dict[str, list[list[int]]]:
    """Chats, chats about a text that stands in the question, and beginnings of sources."""
    text = trained.texts(held_out=True)
    chats = text.chats[:: len(text.chats) // count][:count]
    functions = [part for part in text.code if len(part) > 3000][:count]
    edits = [f"Rewrite this Python code with a docstring for each function:\n{part[200:1000]}" for part in functions]

    def chat(question: str) -> list[int]:
        return trained.conversation(tokenizer, question, "", 1000)[0][:-1]

    return {
        "chat": [chat(question) for question, _ in chats],
        "chat about code in the question": [chat(question) for question in edits],
        "code": [tokenizer(part[:1200])["input_ids"] for part in functions],
    }


def run(generator: Generator, prompt: list[int], new: int) -> tuple[list[int], int, float, float]:
    """(tokens, passes, CPU seconds, wall seconds)."""
    generator.submit(Request("one", prompt, SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)))
    said, passes, cpu, wall = [], 0, time.process_time(), time.perf_counter()
    while not generator.idle:
        for output in generator.step():
            said += output.tokens
        passes += 1
    return said, passes, time.process_time() - cpu, time.perf_counter() - wall


def measure(plain: Generator, guessing: Generator, prompts: list[list[int]], new: int, rounds: int) -> dict[str, float]:
    guessed = held = passes = tokens = 0
    judge = NgramProposer.judge

    def counted(self: NgramProposer, drafts: int, right: int) -> None:
        nonlocal guessed, held
        guessed, held = guessed + drafts, held + right
        judge(self, drafts, right)

    cpu, wall = [], []
    for number in range(rounds):
        for prompt in prompts:
            with mock.patch.object(NgramProposer, "judge", counted):
                sides = [(plain, guessing), (guessing, plain)][number % 2]
                found = {side: run(side, prompt, new) for side in sides}
            assert found[plain][0] == found[guessing][0], "guesses changed the tokens"
            passes, tokens = passes + found[guessing][1], tokens + new
            cpu.append(found[plain][2] / found[guessing][2])
            wall.append(found[plain][3] / found[guessing][3])
    return {"guessed": guessed / tokens, "held": held / max(guessed, 1), "tokens per pass": tokens / passes,
            "CPU": statistics.median(cpu), "worst CPU": min(cpu), "wall": statistics.median(wall)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--speculation", type=int, default=6)
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = trained.base()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options: dict[str, Any] = {"prefix_cache": False, "cache_bytes": 1 << 28}
    plain, guessing = Generator(model, **options), Generator(model, speculation=given.speculation, **options)
    rows, table = [], []
    for name, prompts in asked(AutoTokenizer.from_pretrained(folder), given.prompts).items():
        run(plain, prompts[0], 4)
        row = measure(plain, guessing, prompts, given.new, given.rounds)
        rows.append({"text": name} | row)
        figures = [f"{row[key]:.3f}" for key in ("guessed", "held", "tokens per pass", "CPU", "wall")]
        table.append([name, *figures])
    print_table(["text", "guessed per token", "held", "tokens a pass", "CPU, without / with", "wall"], table)
    print(write_json("trained-guesses.json", {"speculation": given.speculation, "rows": rows}))
    slower = [row["text"] for row in rows if row["CPU"] < BAR]
    if slower:
        raise SystemExit(f"guesses cost more than 2 %: {slower}")


if __name__ == "__main__":
    main()
