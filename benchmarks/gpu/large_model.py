"""Decode steps of a Llama of 8 B with random weights in bf16, beside the floor of its bytes and the predicted time."""

from __future__ import annotations

import contextlib
import functools
import statistics
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.decode_pass import Pass, record, times
from benchmarks.generate import greedy, tokens
from benchmarks.gpu.generation import SMALL, decode_seconds, floor_bytes, hugging_face
from benchmarks.gpu.plan import Setting
from benchmarks.gpu.results import Results
from benchmarks.gpu.rounds import timed
from benchmarks.gpu.simulated import machine_of
from deepspeed.inference import Generator, Request

SHAPE: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 16384,
}  # fmt: skip
BLOCKS, STEPS = 6, 12  # of steps; steps of each


@functools.cache
def _model(small: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(LlamaConfig(**(SMALL if small else SHAPE))).eval()
    finally:
        torch.set_default_dtype(before)


def measure(setting: Setting, batch: int, context: int) -> dict[str, Any]:
    """Rows of the part `large model`: milliseconds of a decode step, the median of blocks of steps."""
    model, steps = _model(setting.rehearse), setting.pick(STEPS, 2)
    batch, context = setting.pick(batch, min(batch, 2)), setting.pick(context, 24)
    new = (BLOCKS + 1) * steps + 8
    prompts = [tokens(model, context, seed) for seed in range(batch)]
    pages = setting.pick(batch * (context + new + 64) * 2 * 32 * 8 * 128 * 2, 1 << 22)
    generator = Generator(
        model, prefix_cache=False, cache_bytes=pages, max_sequences=batch, page_size=16,
        max_batch_tokens=setting.pick(8192, 256),
    )  # fmt: skip
    with contextlib.closing(generator):
        for number, prompt in enumerate(prompts):
            generator.submit(Request(number, prompt, greedy(new)))
        written = 0
        while written < 2 * batch:  # all prompts are read, and a pass is on its way
            written += sum(len(output.tokens) for output in generator.step())
        blocks = [timed(lambda: [generator.step() for _ in range(steps)]) / steps for _ in range(BLOCKS)]
        kind, graphs = type(generator._executor).__name__, generator.load().graphs
    ms = 1e3 * statistics.median(blocks)
    facts: dict[str, Any] = {"batch": batch, "context": context, "ms": ms, "blocks ms": [1e3 * each for each in blocks]}
    says = f"a token of each takes {ms:.2f} ms ({kind}, {graphs} graphs)"
    rows = Results(setting.folder).rows()
    card = rows.get(("environment", "machine"), {}).get("card", "")
    ceilings = rows.get(("environment", "ceilings"), {})
    length = context + (BLOCKS + 1) * steps // 2
    if "bandwidth" in ceilings:
        nbytes = floor_bytes(model, batch, length) - model.model.embed_tokens.weight.nbytes
        floor = 1e3 * nbytes / ceilings["bandwidth"]
        facts |= {"floor ms": floor, "of the floor": ms / floor, "GB": nbytes / 1e9}
        says += f", {ms / floor:.2f} x the time of {nbytes / 1e9:.1f} GB"
    machine = machine_of(card)
    if machine is not None and machine.kernels is not None and "bandwidth" in ceilings:
        own = replace(machine, kernels=replace(machine.kernels, stream=ceilings["bandwidth"]))
        predicted = 1e3 * times(record(Pass("llama3-8b", batch, length)), own).captured
        facts |= {"predicted ms": predicted}
        says += f"; predicted {predicted:.2f} ms ({predicted / ms - 1:+.0%})"
    if batch == 1:
        turns = functools.partial(decode_seconds, lambda texts, n: hugging_face(model, texts, n), prompts)
        theirs = 1e3 * statistics.median(turns(setting.pick(24, 3)) for _ in range(3))
        facts |= {"Transformers ms": theirs}
        says += f"; Transformers {theirs:.2f} ms"
    return {"says": says, **facts}
