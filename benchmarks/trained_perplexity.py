"""Perplexity of a trained model in fewer bits, beside torchao's and llama.cpp's of the same bits.

    python -m benchmarks.trained_perplexity [--rows 10] [--length 256] [--env torchao=PYTHON] [--env llama=PYTHON]

All sides start from one folder, the base of `tests/trained.py`, and compute the same held-out rows (documentation and
sources of Python's library, half each); the perplexity is exp of the mean loss per token. Our sides:

- int8, int4: `init_inference(dtype=int8)`, packed layers, head and embedding in 8 bits;
- int4 folder, W8A8 folder: what `export_compressed` writes, computed by plain Transformers with compressed-tensors,
  which rounds W8A8's inputs to 8 bits; its embedding and head stay whole;
- W8A8 served: the same folder through `init_inference`, which rounds no inputs here (15 bits in native passes);
- 12 bits: the base in bf16 with its matrices in 12 bits, beside itself in bf16.

A peer runs where `--env` names the interpreter of an environment that has it (`benchmarks/trained_peers.py` says what
it needs). Ours may be 0.5 % over a peer's of the same bits; 12 bits have to be equal. Exits with 1 where a bar fails.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import deepspeed
from benchmarks.common import BENCHMARKS, print_table, write_json
from deepspeed.compression.export import export, packable
from deepspeed.inference.quantization.layers import PackedLinear
from deepspeed.inference.quantization.quantization import pack_lossless
from tests import trained

BAR = 1.005
# Ours, and the peers' forms of the same bits; Q8_0 has a scale per 32 weights and inputs, which W8A8 has not.
PAIRS = {
    "int8": ("torchao int8", "llama Q8_0"),
    "int4": ("torchao int4, symmetric", "torchao int4, with offsets", "llama Q4_0"),
    "int4 folder": ("torchao int4, symmetric", "llama Q4_0"),
    "W8A8 folder": ("torchao W8A8",),
    "W8A8 served": ("torchao W8A8", "llama Q8_0"),
    "12 bits": ("bf16",),
}


def held_out(folder: Path, rows: int, length: int) -> torch.Tensor:
    """int64 (rows, length): documentation and sources that the base was not trained on."""
    tokenizer, text = AutoTokenizer.from_pretrained(folder), trained.texts(held_out=True)
    parts = [trained.windows(tokenizer, kind, length, rows // 2) for kind in (text.prose, text.code)]
    return torch.cat(parts)


def plain(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def packed(folder: Path, bits: int) -> Any:
    return deepspeed.init_inference(plain(folder), dtype=torch.int8, quant={"weight": {"num_bits": bits}})


def exported(folder: Path, form: str, into: str) -> Any:
    model = plain(folder)
    export(model, model.state_dict(), into, form)
    return AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32).eval()


def served(folder: Path, into: str) -> Any:
    return deepspeed.init_inference(plain(folder), dtype=torch.float32, checkpoint=into)


def bits_of(model: Any) -> float:
    """Bits of a weight of the layers' matrices, with scales and offsets."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    if not layers:
        return 8.0 * next(iter(packable(model).values())).weight.element_size()
    return 8.0 * sum(one.packed.nbytes for one in layers) / sum(one.packed.shape.numel() for one in layers)


def ours(folder: Path, rows: torch.Tensor) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}

    def measure(name: str, make: Callable[[], Any], bits: float | None = None) -> Any:
        model = make()
        loss = trained.held_out_loss(model, rows)
        found[name] = {"loss": loss, "bits": bits_of(getattr(model, "module", model)) if bits is None else bits}
        print(f"{name}: {math.exp(loss):.4f}", file=sys.stderr, flush=True)
        return model

    measure("fp32", lambda: plain(folder))
    for bits in (8, 4):
        measure(f"int{bits}", lambda b=bits: packed(folder, b))
    with tempfile.TemporaryDirectory() as four, tempfile.TemporaryDirectory() as eight:
        measure("int4 folder", lambda: exported(folder, "int4", four), 5.0)
        measure("W8A8 folder", lambda: exported(folder, "w8a8", eight), 8 + 32 / 576)
        measure("W8A8 served", lambda: served(folder, eight))
    model = measure("bf16", lambda: plain(folder, torch.bfloat16), 16)
    pack_lossless(model)
    measure("12 bits", lambda: model, 12)
    return found


def peer(name: str, python: str, folder: Path, rows: torch.Tensor) -> dict[str, dict[str, float]]:
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file, rows.numpy().astype(np.int32))
        file.flush()
        command = [python, str(BENCHMARKS / "trained_peers.py"), name, str(folder), file.name]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{name} ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return {f"{name} {line['side']}": {"loss": line["loss"], "bits": line["bits"]} for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--env", action="append", default=[], help="torchao=PYTHON or llama=PYTHON")
    parser.add_argument("--folder", type=Path, help="another model than the base")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    folder = given.folder or trained.base()
    rows = held_out(folder, given.rows, given.length)
    found = ours(folder, rows)
    for one in given.env:
        name, _, python = one.partition("=")
        found |= peer(name, python, folder, rows)
    failed = show(found)
    print(write_json("trained-perplexity.json", {"rows": list(rows.shape), "sides": found}))
    if failed:
        raise SystemExit(f"over the bar: {'; '.join(failed)}")


def show(found: dict[str, dict[str, float]]) -> list[str]:
    """Print the table; returns the pairs over the bar."""
    base, lines, failed = found["fp32"]["loss"], [], []
    for name, side in found.items():
        beside = []
        for other in PAIRS.get(name, ()):
            if other in found:
                ratio = math.exp(side["loss"] - found[other]["loss"])
                beside.append(f"{ratio:.4f} x {other}")
                if ratio > (1.0 if other == "bf16" else BAR):
                    failed.append(f"{name} {beside[-1]}")
        ratio = math.exp(side["loss"] - base)
        lines.append([name, f"{side['bits']:.2f}", f"{math.exp(side['loss']):.4f}", f"{ratio:.4f}", ", ".join(beside)])
    print_table(["side", "bits", "perplexity", "/ fp32", "beside"], lines)
    return failed


if __name__ == "__main__":
    main()
