"""Write a training script and its JSON configuration, ready to run (`ds_new FOLDER`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPT, CONFIG = "train.py", "ds_config.json"
_INDENT = "    "

# By kind of model: source of the model class and of a synthetic, learnable data set, and the expression of the loss.
_MODELS = {
    "vectors": (
        '''class Net(nn.Module):
    """Sixteen numbers in, one of four classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        return self.layers(x)


def dataset():
    """Replace this: a list of (input, target), or any torch dataset. The same on every rank; ranks get shares of it."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=draw)
    return list(zip(x, x[:, :4].argmax(1)))
''',
        "F.cross_entropy(engine(x), y)",
    ),
    "images": (
        '''class Net(nn.Module):
    """An image of 8 x 8 in, one of two classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2),
        )

    def forward(self, x):
        return self.layers(x)


def dataset():
    """Replace this: a list of (input, target), or any torch dataset. The same on every rank; ranks get shares of it."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (512,), generator=draw)
    x = torch.randn(512, 1, 8, 8, generator=draw)
    x[:, :, :, :4] += 2.0 * y[:, None, None, None]  # bright on the left, or not
    return list(zip(x, y))
''',
        "F.cross_entropy(engine(x), y)",
    ),
    "text": (
        '''class Net(nn.Module):
    """Bytes in, the logits of each next byte out: a small causal transformer."""

    def __init__(self, width=64, depth=2, length=32) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), x.device, self.head.weight.dtype)
        x = self.bytes(x) + self.places(torch.arange(x.size(1), device=x.device))
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x)


def dataset():
    """Replace this: a list of (input, target), or any torch dataset. The same on every rank; ranks get shares of it."""
    text = torch.tensor(list(Path(__file__).read_bytes() * 4))
    return [(text[at : at + 32], text[at + 1 : at + 33]) for at in range(0, 512 * 8, 8)]
''',
        "F.cross_entropy(engine(x).flatten(0, 1).float(), y.flatten())",
    ),
}

_HEAD = '''"""Written by ds_new. Run it: deepspeed --num_gpus 2 train.py"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import deepspeed

HERE = Path(__file__).parent


'''

_MAIN = """

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1)  # the launcher gives it
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Net()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=dataset(), config=str(HERE / "ds_config.json")
    )
{begin}    for epoch in range({first}, arguments.epochs):
        total, count = 0.0, 0
        for x, y in engine.loop(loader, progress=True):
            x, y = x.to(engine.device), y.to(engine.device)
            loss = {loss}
            engine.backward(loss)
            engine.step()
            total, count = total + loss.detach(), count + 1
        if engine.global_rank == 0:
            print(f"epoch {{epoch}}: loss {{float(total) / count:.4f}}", flush=True)
{end}    engine.destroy()


if __name__ == "__main__":
    main()
"""

_BEGIN = """    first, checkpoints = 0, HERE / "checkpoints"
    if checkpoints.exists():  # goes on from the last one, on any number of ranks
        _, client = engine.load_checkpoint(str(checkpoints))
        first = client["epoch"] + 1
"""
_END = """        engine.save_checkpoint(str(checkpoints), client_state={"epoch": epoch})
"""


def script(model: str, checkpoints: bool) -> str:
    """Return the source of the training script.

    Args:
        model: `vectors`, `images` or `text`.
        checkpoints: whether the script saves after each epoch and resumes.
    """
    parts, loss = _MODELS[model]
    begin, end = (_BEGIN, _END) if checkpoints else ("", "")
    return _HEAD + parts + _MAIN.format(loss=loss, begin=begin, end=end, first="first" if checkpoints else "0")


def config(options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration for parsed options of `ds_new`: stage, offload, batch, accumulate, precision."""
    zero: dict[str, Any] = {"stage": options.stage}
    if options.offload != "none":
        place = {"device": options.offload} | ({"nvme_path": "offload"} if options.offload == "nvme" else {})
        zero["offload_optimizer"] = place
        if options.stage == 3:
            zero["offload_param"] = place
    settings: dict[str, Any] = {
        "train_batch_size": options.batch,
        "gradient_accumulation_steps": options.accumulate,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 3e-3}},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
    }
    if options.precision != "fp32":
        settings[options.precision] = {"enabled": True}
    return settings


def main(args: Sequence[str] | None = None) -> int:
    """Run `ds_new`: write the script and its configuration to a folder.

    Args:
        args: command line without the program's name; None: `sys.argv`.

    Returns:
        Exit code: 0, or 1 if nothing was written.
    """
    parser = argparse.ArgumentParser(prog="ds_new", description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, nargs="?", default=Path(), help="where to (default: here)")
    add("--model", choices=sorted(_MODELS), default="vectors", help="what the model sees")
    add("--stage", type=int, choices=[0, 1, 2, 3], default=2, help="ZeRO stage: 0 nothing is split … 3 everything")
    add("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    add("--offload", choices=["none", "cpu", "nvme"], default="none", help="where optimizer state (stage 3: all) rests")
    add("--batch", type=int, default=32, help="samples of an update, over all ranks")
    add("--accumulate", type=int, default=1, help="micro-batches of an update")
    add("--checkpoints", action="store_true", help="save after each epoch, go on from the last")
    add("--force", action="store_true", help="write over files that exist")
    options = parser.parse_args(args)
    problem = _problem(options)
    if problem:
        print(f"ds_new: {problem}", file=sys.stderr)
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / SCRIPT).write_text(script(options.model, options.checkpoints))
    (options.folder / CONFIG).write_text(json.dumps(config(options), indent=2) + "\n")
    print(f"wrote {options.folder / SCRIPT} and {options.folder / CONFIG}; run them:")
    print(f"  cd {options.folder} && deepspeed --num_gpus 2 {SCRIPT}")
    return 0


def _problem(options: argparse.Namespace) -> str:
    """Return the reason why the project cannot be written; "" if it can."""
    there = [name for name in (SCRIPT, CONFIG) if (options.folder / name).exists()]
    if there and not options.force:
        return f"{' and '.join(there)} exist in {options.folder}; --force writes over them"
    if options.folder.exists() and not options.folder.is_dir():
        return f"{options.folder} is a file; name a folder"
    if options.offload != "none" and options.stage == 0:
        return "--offload moves what ZeRO splits: give --stage 1, 2 or 3"
    if options.batch < 1 or options.accumulate < 1 or options.batch % options.accumulate:
        return (
            f"--batch {options.batch} is over all ranks and micro-batches: a multiple of --accumulate and of the ranks"
        )
    return ""


if __name__ == "__main__":
    sys.exit(main())
