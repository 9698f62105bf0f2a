"""A run that stops twice and goes on on another number of ranks: `python examples/gallery/resume.py`.

The samples of a step are the same however many ranks share them, so the loss goes on as if nothing had happened.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

PARTS = ((2, 40), (1, 80), (3, 120))  # so many ranks, until this step
BATCH = 24


def train(given: argparse.Namespace) -> None:
    """One part, on a rank: from the last checkpoint to `given.until`."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import deepspeed
    from deepspeed import comm

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if (given.folder / "latest").exists():
        engine.load_checkpoint(str(given.folder))
    losses, rank, ranks = [], comm.get_rank(), comm.get_world_size()
    truth = torch.randn(32, 8, generator=torch.Generator().manual_seed(7))
    while engine.global_steps < given.until:
        draw = torch.Generator().manual_seed(engine.global_steps)
        x = torch.randn(BATCH, 32, generator=draw)
        mine = x[rank::ranks]
        loss = F.cross_entropy(engine(mine), (mine @ truth).argmax(1))
        engine.backward(loss)
        engine.step()
        every = loss.detach().clone()
        comm.all_reduce(every)
        losses.append(every.item() / ranks)
    if given.save:
        engine.save_checkpoint(str(given.folder))
    if rank == 0:
        given.result.write_text(json.dumps(losses))
    engine.destroy()


def launch(folder: Path, ranks: int, until: int, save: bool) -> list[float]:
    """The losses of a part, trained by processes of their own."""
    result = folder.parent / "losses.json"
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "-q", "--num_gpus", str(ranks), __file__]
    command += ["--until", str(until), "--folder", str(folder), "--result", str(result), *(["--save"] if save else [])]
    subprocess.run(command, check=True)
    return json.loads(result.read_text())


def main() -> None:
    """Start the parts and a run that is never stopped; draw both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--until", type=int, help="a part of the run, started by this script itself")
    parser.add_argument("--folder", type=Path, help="of its checkpoints")
    parser.add_argument("--result", type=Path, help="where its losses go")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("runs/gallery"))
    parser.add_argument("--local_rank", type=int, default=-1)
    given = parser.parse_args()
    if given.until is not None:
        return train(given)
    from pictures import picture

    with tempfile.TemporaryDirectory() as place:
        stopped = [launch(Path(place, "checkpoints"), ranks, until, save=True) for ranks, until in PARTS]
        whole = launch(Path(place, "none"), 1, PARTS[-1][1], save=False)
    joined = [loss for part in stopped for loss in part]
    gap = max(abs(a - b) / b for a, b in zip(joined, whole, strict=True))
    with picture(given.output / "resume.png") as axes:
        axes.plot(whole, color="lightgray", linewidth=5, label="one rank, never stopped")
        start = 0
        for (ranks, until), losses in zip(PARTS, stopped, strict=True):
            axes.plot(range(start, until), losses, linewidth=1.2, label=f"{ranks} rank(s)")
            start = until
        axes.set(xlabel="step", ylabel="loss", title=f"largest relative difference {gap:.1g}")
        axes.legend()
    print(f"stopped after steps {', '.join(str(until) for _, until in PARTS[:-1])}, gone on on other numbers of ranks: "
          f"largest relative difference of a loss {gap:.1g}")  # fmt: skip
    return None


if __name__ == "__main__":
    main()
