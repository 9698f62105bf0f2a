"""Drafts by a model on the trained model: `python -m benchmarks.draft_model [--draft int8] [--prompts 3] [--new 64]`.

The base of `tests/trained.py`, one thread, greedy, one prompt at a time, on held-out chats and sources. The draft model
is the base itself in integers (`int8`, `int4`), its first N layers (`layers:N`), or a folder. Reported: the accepted
share of drafts, tokens per pass, and CPU time of the process without drafts over that with them (paired, the order
alternates; the median). Tokens have to be the same.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import print_table, write_json
from benchmarks.trained_guesses import asked, run
from deepspeed.inference import Generator
from deepspeed.inference.engine import init_inference
from tests import trained

INTEGERS = ("int8", "int4")


def draft_of(model: Any, kind: str) -> nn.Module:
    """The draft model of one kind; `model` stays as it is."""
    if kind.startswith("layers:"):
        pruned = copy.deepcopy(model)
        pruned.model.layers = pruned.model.layers[: int(kind.removeprefix("layers:"))]
        pruned.config.num_hidden_layers = len(pruned.model.layers)
        return pruned
    if kind in INTEGERS:
        quant = {"weight": {"num_bits": int(kind.removeprefix("int"))}}
        return init_inference(copy.deepcopy(model), dtype=torch.int8, quant=quant).module
    return AutoModelForCausalLM.from_pretrained(kind).eval()


def measure(plain: Generator, drafting: Generator, prompts: list[list[int]], new: int) -> dict[str, float]:
    passes, tokens, ratios, before = 0, 0, [], drafting.load()
    for number, prompt in enumerate(prompts):
        sides = [(plain, drafting), (drafting, plain)][number % 2]
        found = {side: run(side, prompt, new) for side in sides}
        assert found[plain][0] == found[drafting][0], "drafts changed the tokens"
        passes, tokens = passes + found[drafting][1], tokens + new
        ratios.append(found[plain][2] / found[drafting][2])
    after = drafting.load()
    drafts, accepted = after.drafts - before.drafts, after.accepted - before.accepted
    return {"accepted": accepted / max(drafts, 1), "tokens per pass": tokens / passes, "CPU": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="int8", help="int8, int4, layers:N or a folder")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--speculation", type=int, default=4)
    given = parser.parse_args()
    if given.draft not in INTEGERS and not given.draft.startswith("layers:") and not Path(given.draft).is_dir():
        parser.error(f"--draft {given.draft!r} is none of int8, int4, layers:N and a folder")
    torch.set_num_threads(1)
    folder = trained.base()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, given.dtype)).eval()
    options: dict[str, Any] = {"prefix_cache": False, "cache_bytes": 1 << 28}
    plain = Generator(model, **options)
    drafting = Generator(model, draft_model=draft_of(model, given.draft), speculation=given.speculation, **options)
    rows, table = [], []
    for name, prompts in asked(AutoTokenizer.from_pretrained(folder), given.prompts).items():
        run(plain, prompts[0], 4)
        row = measure(plain, drafting, prompts, given.new)
        rows.append({"text": name} | row)
        table.append([name, *(f"{row[key]:.3f}" for key in ("accepted", "tokens per pass", "CPU"))])
    print_table(["text", "accepted", "tokens a pass", "CPU, without / with"], table)
    print(write_json("draft-model.json", vars(given) | {"rows": rows}))


if __name__ == "__main__":
    main()
