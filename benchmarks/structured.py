"""What a constraint costs a token: `python -m benchmarks.structured [--model FOLDER] [--tokens 120] [--rounds 5]`.

One request after the other on one thread, with a JSON schema and without. CPU time of the process per token, rounds
alternate, and the ratio of the medians is printed; compiling is counted apart. The default model is SmolLM2-135M
(`tests.trained`); `--model toy` is a random one with a small vocabulary, which shows only whether it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from deepspeed.inference import Generator, SamplingParams
from deepspeed.inference.structured_output import StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 3,
            "maxItems": 12,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 4, "maxLength": 24},
                    "age": {"type": "integer", "minimum": 1, "maximum": 120},
                    "role": {"enum": ["author", "editor", "reader"]},
                    "notes": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 3},
                },
                "required": ["name", "age", "role", "notes"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}  # fmt: skip


def load(name: str) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if name == "toy":
        from tests.unit.inference.toys import llama
        from tests.unit.inference.vocabularies import vocabulary

        words = vocabulary("byte-level")
        return llama(vocab_size=len(words), max_position_embeddings=2048), words
    if not name:
        from tests.trained import base

        name = str(base())
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
    return model, AutoTokenizer.from_pretrained(name)


def seconds(generator: Generator, prompt: list[int], options: SamplingParams) -> tuple[float, int]:
    """CPU seconds of the process per token, after the prompt's pass, and tokens."""
    from deepspeed.inference import Request

    generator.submit(Request("it", prompt, options))
    count = len(generator.step()[0].tokens)
    begun = time.process_time()
    timed = 0
    while not generator.idle:
        timed += sum(len(output.tokens) for output in generator.step())
    return (time.process_time() - begun) / max(timed, 1), count + timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, words = load(args.model)
    generator = Generator(model, tokenizer=words, lossless_weights=True, prefix_cache=False)
    prompt = words("List the people as JSON:\n", add_special_tokens=False)["input_ids"]
    constraint = StructuredOutput("json_schema", json.dumps(SCHEMA))
    begun = time.process_time()
    generator.constraints.compile(constraint)
    print(f"{generator.kind}; table of the vocabulary and compiling: {time.process_time() - begun:.3f} s of CPU, once")
    for name, drawn in (("greedy", {}), ("drawn", {"temperature": 0.8, "seed": 1})):
        sides: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(args.rounds):
            for side in ("with", "without") if number % 2 else ("without", "with"):
                chosen = constraint if side == "with" else None
                options = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True, structured=chosen, **drawn)
                spent, _ = seconds(generator, prompt, options)
                sides[side].append(spent)
        middle = {side: statistics.median(spent) * 1e3 for side, spent in sides.items()}
        ratio = middle["with"] / middle["without"]
        print(
            f"{name}: {middle['with']:.2f} ms of CPU a token with the schema, {middle['without']:.2f} without, "
            f"ratio {ratio:.3f}"
        )


if __name__ == "__main__":
    main()
