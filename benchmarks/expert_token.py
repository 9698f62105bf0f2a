"""A token of a mixture of experts: `python -m benchmarks.expert_token [--rounds 7] [--new 48] [--experts 8]`.

A Mixtral of 8 experts with 20 M parameters each (12 layers, width 512, inner width 1088), two for each token, random
weights, bf16, one thread, greedy, one prompt of 64 tokens. "ours" has its bf16 matrices in 12 bits, as engines and
servers that load a folder do; "ours, plain" is over the model as it is; "ours, int8" has integers. Transformers' own
`generate` has three implementations of experts, and each of them is a side. The time of a token is that of a text less
that of its first token. Sides alternate, their order is drawn anew in each round, ratios are medians of paired rounds
with 95 % intervals, and a line compares our side with itself.

The floor of a token is the bytes of its active weights (the experts that it does not choose are left out) over the rate
at which one thread reads memory; `share` is the floor over the time. Bar: 0.5 of the time of Transformers' `generate`.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks.common import write_json
from benchmarks.generate import Side, bandwidth, greedy, hugging_face, minus, rounds_of, rows_of, show, tokens
from deepspeed.inference import Generator
from deepspeed.inference.executors.native import FusedExecutor
from deepspeed.inference.quantization.lossless_bf16 import LosslessWeight
from deepspeed.inference.quantization.quantization import quantize_linears

PROMPT, CHOSEN, BAR = 64, 2, 0.5
FORMS = ("grouped_mm", "batched_mm", "eager")  # the first is the default of Transformers


def make(experts: int, layers: int) -> Any:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=512, intermediate_size=1088, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=8192, num_local_experts=experts, num_experts_per_tok=CHOSEN, max_position_embeddings=1024,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)  # larger ones let each rounding choose other experts
        model.lm_head.weight.normal_(0, 0.2)
    return model.to(torch.bfloat16)


def active_bytes(model: Any) -> int:
    """Bytes of the weights that one token reads, in whatever form."""
    table, experts = model.get_input_embeddings(), model.config.num_local_experts
    total = 0
    for name, module in model.named_modules():
        size = module.nbytes if isinstance(module, LosslessWeight) else 0
        size += sum(param.nbytes for param in module._parameters.values() if param is not None)
        share = CHOSEN / experts if ".experts" in name else 1.0
        total += 0 if module is table or getattr(table, "packed", None) is module else int(size * share)
    return total


def made_of(model: Any) -> dict[str, Generator]:
    integers, halves = copy.deepcopy(model), copy.deepcopy(model)
    quantize_linears(integers, 8, 1, torch.bfloat16)
    options: dict[str, Any] = {"prefix_cache": False, "cache_bytes": 1 << 27}
    found = {
        "ours": Generator(halves, lossless_weights=True, **options),
        "ours, plain": Generator(model, **options),
        "ours, int8": Generator(integers, **options),
    }
    for side, generator in found.items():
        if not isinstance(generator._executor, FusedExecutor):
            raise SystemExit(f"{side} does not run in native passes: {generator._executor.unfused}")
    return found


def measured(model: Any, rounds: int, new: int) -> list[dict[str, Any]]:
    prompt, made = tokens(model, PROMPT, 2), made_of(model)

    def transformers(form: str, count: int) -> None:
        model.set_experts_implementation(form)
        hugging_face(model, [prompt], count)

    sides: dict[str, Side] = {}
    for count, suffix in ((1, ", first token"), (new, "")):
        for side, generator in {**made, "ours again": made["ours"]}.items():
            sides[side + suffix] = lambda g=generator, n=count: g.generate([prompt], greedy(n))
        for form in FORMS:
            sides[f"HF {form}{suffix}"] = lambda f=form, n=count: transformers(f, n)
    found = minus(rounds_of(sides, rounds))
    rows, read = rows_of(found, f"a token, prompt {PROMPT}", f"HF {FORMS[0]}", new - 1), bandwidth()
    for row in rows:
        generator = made.get(row["side"].removesuffix(" again"))
        size = active_bytes(model if generator is None else generator.model)
        row["bandwidth"] = {"weights": size, "read": read, "share": size / (row["wall"]["ms"] / 1e3) / read}
    again = [a[0] / b[0] for a, b in zip(found["ours again"], found["ours"], strict=True)]
    print(f"A/A: ours again over ours, by round: {', '.join(f'{ratio:.3f}' for ratio in again)}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # threads that others start read it when they are born
        os.execve(sys.executable, [*sys.orig_argv], {**os.environ, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    model = make(given.experts, given.layers)
    one = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n) // given.experts
    read, size = bandwidth(), active_bytes(model)
    print(
        f"{given.experts} experts of {one / 1e6:.1f} M; a token reads {size / 1e6:.0f} MB of bf16 at {read / 1e9:.1f} "
        f"GB/s: floor {1e3 * size / read:.2f} ms, in 12 bits {0.75e3 * size / read:.2f} ms",
        flush=True,
    )
    rows = measured(model, given.rounds, given.new)
    show(rows)
    ours = {row["side"]: row["wall"]["ratio"] for row in rows}
    for side in ("ours", "ours, plain"):
        print(
            f"{side}: {ours[side]:.3f} of Transformers' generate, bar {BAR}: {'met' if ours[side] <= BAR else 'MISSED'}"
        )
    print(write_json("expert-token.json", rows), flush=True)


if __name__ == "__main__":
    main()
