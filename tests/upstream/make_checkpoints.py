"""Writes small checkpoints with the upstream package: run it in an environment that has it, never in this project's.

    UPSTREAM/bin/torchrun --nproc_per_node 2 tests/upstream/make_checkpoints.py FOLDER

Each `FOLDER/stage<N>-<precision>/` gets the files of one tag, and `expected.json` with what the next steps lost.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

WIDTH, RANKS = 6, 2


class Small(nn.Module):
    """A tied, a frozen and an odd-sized parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.odd = nn.Parameter(torch.ones(5))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(self.embed(x.to(self.odd.dtype)) + self.shift.to(self.odd.dtype)))
        return self.out(self.frozen(x)) * self.odd.sum() / 5


def rows(step: int, rank: int) -> torch.Tensor:
    """The micro-batch of a rank."""
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1000 + 10 * step + rank))


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small()


def groups(model: nn.Module) -> list[dict[str, object]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.0}]


def config(stage: int, precision: str) -> dict[str, object]:
    made: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}},
    }
    return made | ({precision: {"enabled": True}} if precision != "fp32" else {})


def loss_of(engine: object, step: int) -> torch.Tensor:
    return engine(rows(step, dist.get_rank())).float().square().mean()  # type: ignore[operator]


def main() -> None:
    import deepspeed

    folder = Path(sys.argv[1])
    deepspeed.init_distributed("gloo")
    for stage in range(4):
        for precision in ("fp32", "bf16"):
            model = small()
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.AdamW(groups(model), lr=1e-2, eps=1e-4),
                config=config(stage, precision),
            )
            for step in range(3):
                engine.backward(loss_of(engine, step))
                engine.step()
            target = folder / f"stage{stage}-{precision}"
            engine.save_checkpoint(str(target), tag="small", client_state={"best": 0.5, "names": ["a", "b"]})
            losses = []
            for step in range(3, 6):
                loss = loss_of(engine, step)
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            every: list[object] = [None] * RANKS
            dist.all_gather_object(every, losses)
            if dist.get_rank() == 0:
                (target / "expected.json").write_text(json.dumps({"losses": every}))
                for script in target.glob("*.py"):  # upstream drops its own converter there
                    os.remove(script)
            dist.barrier()
            engine.destroy()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)


if __name__ == "__main__":
    main()
