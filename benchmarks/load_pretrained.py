"""Peak memory of `load_pretrained`: 2 GB of safetensors into a model sharded over four ranks, every tensor compared.

Measured from before the model is there to the end of the load: its shard is born and filled meanwhile.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from birth import forget_peak, peak_bytes
from common import World, print_table, serve, start_world, write_json
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

RANKS, LAYERS, WIDTH, VOCABULARY = 4, 64, 3584, 24_000  # 2 GB in bf16
CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
SPARE = 200e6  # bytes allowed beside the shard and the two largest tensors
LAYERS_PER_FILE = 16


def build() -> nn.Module:
    """Square layers between two embeddings."""
    model = nn.Module()
    model.embed = nn.Embedding(VOCABULARY, WIDTH)
    model.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
    model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    return model


def write_folder(folder: Path) -> None:
    """Random weights, as `save_pretrained` would cut them into files."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in build().state_dict().items()}
    names, draw = list(shapes), torch.Generator().manual_seed(0)
    step, index = 2 * LAYERS_PER_FILE, {}
    for number, start in enumerate(range(0, len(names), step)):
        file, some = f"model-{number:05d}.safetensors", names[start : start + step]
        values = {name: torch.randn(shapes[name], dtype=torch.bfloat16, generator=draw) for name in some}
        save_file(values, folder / file, {"format": "pt"})
        index |= dict.fromkeys(some, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def make_rank(folder: str) -> Callable[..., Any]:
    """A rank that builds, loads and compares; answers with sizes in bytes."""
    import deepspeed
    from deepspeed.checkpoint.huggingface import load_pretrained

    _, ranks = start_world()
    deepspeed.init_distributed()

    def handle() -> dict[str, float]:
        forget_peak()
        before = psutil.Process().memory_info().rss
        with deepspeed.zero.Init(config_dict_or_path=CONFIG):
            model = build()
        born = peak_bytes() - before
        load_pretrained(model, folder)
        grown = peak_bytes() - before
        sizes = sorted(p.numel() * p.element_size() for p in model.parameters())
        index = json.loads(Path(folder, "model.safetensors.index.json").read_text())["weight_map"]
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters(parameter), safe_open(Path(folder, index[name]), "pt") as file:
                if not torch.equal(parameter.detach(), file.get_tensor(name)):
                    raise RuntimeError(f"{name} differs from the file")
        return {"bytes": sum(sizes), "born": born, "grown": grown, "bar": sum(sizes) / ranks + sum(sizes[-2:]) + SPARE}

    return handle


def main() -> None:
    """Measure, print, write."""
    folder = Path(tempfile.mkdtemp(prefix="pretrained-"))
    try:
        write_folder(folder)
        world = World(Path(__file__).name, RANKS, {"folder": str(folder)})
        answers = world.ask()
        world.close()
    finally:
        shutil.rmtree(folder)
    rows = []
    for rank, answer in enumerate(answers):
        megabytes = [f"{answer[name] / 1e6:.0f}" for name in ("bytes", "born", "grown", "bar")]
        rows.append([str(rank), *megabytes, "ok" if answer["grown"] <= answer["bar"] else "MISSED"])
    print_table(["rank", "MB weights", "MB peak of birth", "MB peak to the load's end", "MB bar", ""], rows)
    print(f"written: {write_json('load_pretrained.json', {'ranks': RANKS, 'answers': answers})}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve(make_rank)
    else:
        main()
