"""Held-out loss of a trained model with packed weights against its own.

python examples/serve/load.py          # trains runs/serve/model, or: examples/bytes_lm/train.py --save FOLDER
python benchmarks/quantized_loss.py runs/serve/model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import deepspeed

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "bytes_lm"))
BARS = {"int8": 1.005, "int4": 1.03}


@torch.inference_mode()
def loss(model, windows, batch=16):
    """Mean nats per byte."""
    total = 0.0
    for at in range(0, len(windows), batch):
        chunk = torch.stack([windows[one] for one in range(at, min(at + batch, len(windows)))])
        logits = model(input_ids=chunk[:, :-1]).logits
        total += F.cross_entropy(logits.float().flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum").item()
    return total / (len(windows) * windows.length)


def main():
    from corpus import Windows, library_files, split
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bytes", type=int, default=100_000, help="of held-out text")
    arguments = parser.parse_args()
    plain = AutoModelForCausalLM.from_pretrained(arguments.folder).eval()
    heldout = Windows(split(library_files())[1], plain.config.max_position_embeddings, arguments.bytes, seed=0)
    want, size = loss(plain, heldout), sum(p.nbytes for p in plain.parameters())
    print(f"{'':14} {'nats/byte':>10} {'ratio':>8} {'bar':>6} {'MB':>7}")
    print(f"{'its own':14} {want:10.4f} {1:8.4f} {'':>6} {size / 1e6:7.2f}")
    for name, bits in (("int8", 8), ("int4", 4)):
        model = AutoModelForCausalLM.from_pretrained(arguments.folder)
        engine = deepspeed.init_inference(model, dtype=torch.int8, quant={"weight": {"num_bits": bits}})
        found, size = loss(engine, heldout), sum(p.nbytes for p in engine.parameters())
        print(f"{name:14} {found:10.4f} {found / want:8.4f} {BARS[name]:6} {size / 1e6:7.2f}")


if __name__ == "__main__":
    main()
