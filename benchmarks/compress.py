"""What compression gives: speed and bytes of exported folders, each measured in a fresh process without this package.

`python benchmarks/compress.py gain --size 20M` prints × faster than the dense folder in CPU time of one thread, paired:
dense and small take turns, and a second dense process (A/A) says what the noise is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

SIZES = {"toy": (2, 96, 512, 6), "20M": (8, 384, 8192, 6), "110M": (12, 768, 16384, 12)}  # layers, width, words, heads


def dense(size: str):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, words, heads = SIZES[size]
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
    ).eval()


def cut(model, ffn: float, heads: float):
    """Take units out by magnitude, as the engine does."""
    from deepspeed.compression import init_compression, redundancy_clean

    def technique(ratio: float, modules: list[str]) -> dict:
        shared = {"enabled": True, "method": "l1", "schedule_offset": 0}
        return {
            "shared_parameters": shared,
            "different_groups": {"g": {"params": {"dense_ratio": ratio}, "modules": modules}},
        }

    techniques = {"row_pruning": technique(ffn, ["gate_proj", "up_proj"]), "head_pruning": technique(heads, ["o_proj"])}
    section = {"compression_training": techniques}
    return redundancy_clean(init_compression(model, section), section)


def export_all(size: str, folder: Path) -> dict[str, Path]:
    from deepspeed.compression.export import export
    from deepspeed.compression.pruning.layer_selection import keep_layers

    layers = SIZES[size][0]
    made = {
        "dense fp32": (lambda: dense(size), "float"),
        "dense again": (lambda: dense(size), "float"),
        "FFN + heads -50%": (lambda: cut(dense(size), 0.5, 0.5), "float"),
        "FFN -30%, heads -1/3": (lambda: cut(dense(size), 0.7, 2 / 3), "float"),
        "layers -50%": (lambda: keep_layers(dense(size), "model.layers", list(range(0, layers, 2))), "float"),
        "int8": (lambda: dense(size), "int8"),
    }
    paths = {}
    for number, (name, (make, weights)) in enumerate(made.items()):
        model = make()
        paths[name] = folder / str(number)
        export(model, model.state_dict(), paths[name], weights)
    return paths


def gain(size: str, rounds: int) -> list[dict]:
    from deepspeed.compression.compare import Exported, faster

    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        paths = export_all(size, Path(temporary))
        base = Exported(paths.pop("dense fp32"))
        for name, path in paths.items():
            other = Exported(path)
            row = {"what": name, "parameters": other.parameters, "bytes": other.bytes, "of": other.bytes / base.bytes}
            for kind, count in (("prefill", 2), ("token", 8)):
                row[kind] = faster(base, other, kind, rounds, times=count)
            other.close()
            rows.append(row)
            print(
                f"{name:22} {row['bytes'] / 1e6:8.1f} MB (x {row['of']:.3f})  prefill x {row['prefill']:.2f}  "
                f"token x {row['token']:.2f}",
                flush=True,
            )
        base.close()
    return rows


def masks() -> None:
    """Bytes of a mask and seconds of acting, per element, beside `torch.nn.utils.prune`'s floats."""
    import time

    import torch

    from deepspeed.compression.pruning.masks import apply_mask, pack_flags

    torch.set_num_threads(1)
    numel = 10_000_000
    keep, values = torch.rand(numel) > 0.5, torch.randn(numel)
    packed, whole = pack_flags(keep), keep.float()
    for name, act in (("bits", lambda: apply_mask(packed, values)), ("floats", lambda: values.mul_(whole))):
        started = time.process_time()
        for _ in range(5):
            act()
        size = packed.numel() if name == "bits" else whole.numel() * 4
        print(
            f"{name:7} {size / numel:.4f} bytes, {(time.process_time() - started) / 5 / numel * 1e9:.2f} ns per element"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["gain", "masks"])
    parser.add_argument("--size", choices=SIZES, default="20M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.what == "masks":
        masks()
        return
    rows = gain(given.size, given.rounds)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
