"""Chat in a terminal with a model's folder: `python examples/chat/chat.py FOLDER`; an empty line or Ctrl-D ends it.

Tokens are printed as they come. The whole conversation is given to the model each time; what it has read before stays
in the generator's cache and is not computed again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed.inference import Generator, Request, SamplingParams


def answer(generator: Generator, tokenizer: Any, messages: list[dict[str, str]], sampling: SamplingParams) -> str:
    """Print the answer as it comes, and return it."""
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    generator.submit(Request("answer", tokens, sampling))
    said, printed = [], ""
    while not generator.idle:
        for output in generator.step():
            said += output.tokens
        text = tokenizer.decode(said, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # half of a letter
            print(text[len(printed) :], end="", flush=True)
            printed = text
    print()
    return printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a causal model with a chat template")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time")
    given = parser.parse_args()
    if (given.folder / "adapter_config.json").exists() and not (given.folder / "config.json").exists():
        raise SystemExit(f"{given.folder}: adapters alone; docs/sft.md merges them into a model")
    if not (given.folder / "config.json").exists():
        raise SystemExit(f"{given.folder}: no folder of a model (docs/trained-model.md makes one)")
    tokenizer = AutoTokenizer.from_pretrained(given.folder)
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype=getattr(torch, given.dtype)).eval()
    print("preparing the model …", flush=True)
    generator = Generator(model, speculation=4)
    sampling = SamplingParams(max_new_tokens=given.tokens, temperature=given.temperature)
    messages: list[dict[str, str]] = []
    while True:
        print("> ", end="", flush=True)
        if not (question := sys.stdin.readline().strip()):
            break
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer(generator, tokenizer, messages, sampling)})
    generator.close()


if __name__ == "__main__":
    main()
