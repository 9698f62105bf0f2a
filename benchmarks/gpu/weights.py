"""A token of one sequence over weights of 16, 8 and 4 bits, each beside the floor of its own bytes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from benchmarks.generate import tokens
from benchmarks.gpu.generation import copy_of, decode_seconds, floor_bytes, generator_of, model_of, write_with
from benchmarks.gpu.plan import Setting
from benchmarks.gpu.results import Results
from benchmarks.gpu.rounds import compare
from deepspeed.inference.quantization.float8 import float8_linears
from deepspeed.inference.quantization.quantization import quantize_linears

PLAIN = "bf16"
FORMS: dict[str, Callable[[Any], Any]] = {
    "fp8": float8_linears,
    "int8": lambda model: quantize_linears(model, 8),
    "int4": lambda model: quantize_linears(model, 4),
}


def measure(setting: Setting, batch: int, context: int) -> dict[str, Any]:
    """Rows of the part `generation`: milliseconds of a decode step by form, compared by rounds."""
    new, batch, context = setting.pick(32, 3), setting.pick(batch, min(batch, 2)), setting.pick(context, 24)
    prompts = [tokens(model_of(setting), context, seed) for seed in range(batch)]
    models = {PLAIN: model_of(setting)}
    for name, packed in FORMS.items():
        models[name] = copy_of(models[PLAIN])
        packed(models[name])
    with contextlib.ExitStack() as stack:
        turns, kinds = {}, set()
        for name, model in models.items():
            generator = generator_of(model, setting)
            stack.callback(generator.close)
            kinds.add(f"{name} {type(generator._executor).__name__}")
            turns[name] = functools.partial(decode_seconds, write_with(generator), prompts, new)
        records = compare(turns, PLAIN, setting.pick(setting.seconds / 2, 1.0), setting.fewest)
    measured = Results(setting.folder).rows().get(("environment", "ceilings"), {}).get("bandwidth")
    for record in records:
        nbytes = floor_bytes(models[record["side"]], batch, context + new // 2)
        record["GB"] = nbytes / 1e9
        if measured:
            record["of the floor"] = record["ms"] / (1e3 * nbytes / measured)
    said = [
        f"{each['side']} {each['ms']:.2f} ms ({each['GB']:.2f} GB"
        + (f", {each['of the floor']:.2f} x their time)" if measured else ")")
        for each in records
    ]
    return {"says": f"{', '.join(said)}; {', '.join(sorted(kinds))}", "sides": records}
