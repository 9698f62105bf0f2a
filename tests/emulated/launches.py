"""What one step costs in launches, collectives, waits of the host and bytes: this package, FSDP2 and DDP by one ruler.

`python -m pytest -s -m slow tests/emulated/test_launches.py` prints the table. The ruler is the emulated device's: one
launch per operator that reaches it, so figures compare with each other and not with a profile of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.emulated.runs import emulates, observed

WIDTH, DEPTH, ROWS, WARM = 16, 32, 4, 3


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """32 of them."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


Step = tuple[Callable[[torch.Tensor], None], Callable[[], None]]  # a step, and the end


def engine_of(stage: int, clip: float, depth: int = DEPTH, **keys: Any) -> Any:
    """An engine at a stage, which gathers block by block; `keys` of the JSON are added."""
    import deepspeed

    model = Blocks(depth)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "fused": True}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 3 * 4 * 2 * WIDTH * WIDTH,
            "stage3_max_reuse_distance": 0,
            "stage3_fixed_graph": True,  # the comparisons of the first steps are not what a step costs
        },
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config | keys)[0]


def package(stage: int, clip: float) -> Step:
    """This package at a stage."""
    engine = engine_of(stage, clip)

    def step(x: torch.Tensor) -> None:
        engine.backward(engine(x))
        engine.step()

    return step, engine.destroy


def _plain(model: nn.Module, clip: float) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(x: torch.Tensor) -> None:
        model(x).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: None


def fsdp2(_: int, clip: float) -> Step:
    """torch's fully_shard, block by block."""
    from torch.distributed.fsdp import fully_shard

    model = Blocks().cuda()
    for block in model.blocks:
        fully_shard(block)
    return _plain(fully_shard(model), clip)


def ddp(_: int, clip: float) -> Step:
    """torch's DistributedDataParallel."""
    model: Any = nn.parallel.DistributedDataParallel(Blocks().cuda(), device_ids=[torch.cuda.current_device()])
    model.logger = _Silent()  # DDP's own wants a timer that a build without CUDA lacks
    return _plain(model, clip)


class _Silent:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


MAKERS = {"package": package, "fsdp2": fsdp2, "ddp": ddp}


def cost(maker: str, stage: int, clip: float) -> dict[str, Any]:
    """Counters of one warm step, and the lines at which the host waited."""
    native = emulates()
    step, end = MAKERS[maker](stage, clip)
    x = torch.ones(ROWS, WIDTH, device="cuda") * (1 + dist.get_rank())
    for _ in range(WARM):
        step(x)
    with observed() as seen:
        native.clear()
        step(x)
    end()
    return {"counters": seen.counters, "waits": seen.waits, "reports": seen.reports}


def alone(stage: int, clip: float, accumulation: int, keys: dict[str, Any]) -> dict[str, Any]:
    """Steps of one rank: losses, norms and masters, and what the last step cost with its launches and waits."""
    import deepspeed

    native = emulates()
    engine = engine_of(stage, clip, 4, gradient_accumulation_steps=accumulation, **keys)
    losses, norms = [], []
    for number in range(4):
        with observed() as seen:
            native.clear()
            for micro in range(accumulation):
                loss = engine(torch.ones(ROWS, WIDTH, device="cuda") * (1 + number + micro))
                engine.backward(loss)
                engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    buffers = len(engine._components.reducer.reduce_scatter.buffers())
    masters = map(deepspeed.utils.safe_get_full_fp32_param, engine.module.parameters())
    weights = [master.cpu().tolist() for master in masters]
    engine.destroy()
    record = {"counters": seen.counters, "waits": seen.waits, "reports": seen.reports}
    return record | {"values": (losses, norms, weights), "buffers": buffers}
