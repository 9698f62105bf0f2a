"""A model larger than the memory it may use, trained from a disk: `python examples/gallery/nvme.py`.

Parameters, gradients, masters and Adam's moments rest in a folder of a local disk; what a block needs is read before it
runs. The process limits its own memory, so that the same run without the disk fails.
"""

from __future__ import annotations

import argparse
import ctypes
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from pictures import picture
from torch import nn

import deepspeed


class Block(nn.Module):
    """A residual pair of wide layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def config_of(folder: str, offload: bool) -> dict[str, Any]:
    """Stage 3, all of its state on disk, one block at a time in memory."""
    place = {"device": "nvme", "nvme_path": folder, "buffer_count": 1}
    return {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 2e-6}},
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 2_000_000,
            "reduce_bucket_size": 2_000_000,
            "stage3_max_live_parameters": 4_300_000,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            **({"offload_param": place | {"max_in_cpu": 0}, "offload_optimizer": place} if offload else {}),
        },
    }


def main() -> None:
    """Train some steps under the limit; draw the memory beside the state."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--memory", type=int, default=360, help="MiB that the process may take beyond what it starts with"
    )
    parser.add_argument("--in_memory", action="store_true", help="without the disk, to see it fail")
    parser.add_argument("--output", type=Path, default=Path("runs/gallery"))
    given = parser.parse_args()
    if sys.platform == "linux":
        # glibc keeps freed blocks of some megabytes for itself; as maps of their own they go back at once.
        ctypes.CDLL(None).mallopt(-3, 1 << 17)
    process = psutil.Process()
    torch.manual_seed(0)
    deepspeed.init_distributed(verbose=False)
    (torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).sum().backward()  # threads and buffers of torch
    start = process.memory_info()
    room = start.data + (given.memory << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (room, room))
    seen, times = [], []
    given.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.output) as folder:
        config = config_of(folder, offload=not given.in_memory)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = nn.Sequential(*(Block(given.width) for _ in range(given.blocks)), nn.Linear(given.width, 1))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        parameters = sum(param.ds_numel for param in model.parameters())
        state = 16 * parameters  # bytes: values, gradients and two moments of fp32
        losses = []
        for step in range(given.steps):
            began = time.perf_counter()
            x = torch.randn(8, given.width, generator=torch.Generator().manual_seed(1))
            loss = (engine(x) - x.sum(1, keepdim=True).sign()).square().mean()
            engine.backward(loss)
            seen.append((process.memory_info().rss - start.rss) / 2**20)
            engine.step()
            seen.append((process.memory_info().rss - start.rss) / 2**20)
            losses.append(loss.item())
            times.append(time.perf_counter() - began)
            print(f"step {step}: loss {losses[-1]:.4f}, {seen[-1]:.0f} MiB, {times[-1]:.1f} s", flush=True)
        engine.destroy()
    with picture(given.output / "nvme.png") as axes:
        axes.plot([0.5 * at for at in range(1, len(seen) + 1)], seen, marker="o", label="memory of the process, grown")
        axes.axhline(given.memory, color="tab:red", linestyle="--", label="its limit")
        axes.axhline(state / 2**20, color="black", label=f"state of {parameters / 1e6:.0f} M parameters")
        axes.set(xlabel="step", ylabel="MiB", ylim=(0, None))
        axes.legend()
    most = f"{state / 2**20:.0f} MiB of state trained in at most {max(seen):.0f} MiB"
    print(f"{most}; loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
