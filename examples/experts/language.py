"""Train the byte model of `examples/bytes_lm` with experts that are divided among the ranks, and beside it the dense
model of as many active parameters, on the same bytes; draw both losses, and the load of the experts."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import deepspeed
from deepspeed import comm
from deepspeed.moe.layer import MoE

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bytes_lm"))
from corpus import Windows, bigram_loss, library_files, split
from train import build_model, held_out_loss, loss_of, mean_over_ranks, resolve_config

BYTES_LM = Path(__file__).resolve().parents[1] / "bytes_lm"
SMOOTHING = 0.95


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=128, help="bytes per window")
    parser.add_argument("--experts", type=int, default=8, help="of a layer, on all ranks together")
    parser.add_argument("--k", type=int, default=2, help="experts of a byte")
    parser.add_argument("--balance", type=float, default=0.01, help="factor of the balance loss")
    parser.add_argument("--train_bytes", type=int, default=1_200_000)
    parser.add_argument("--heldout_bytes", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="a small model and few steps, to try it")
    parser.add_argument("--output", type=Path, default=Path("runs/experts"), help="folder of the picture")
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = parser.parse_args()
    if arguments.short:
        arguments.width, arguments.layers, arguments.sequence = 48, 2, 32
        arguments.train_bytes, arguments.heldout_bytes = 20_000, 8_000
    return arguments


class ExpertBlock(nn.Module):
    """Takes the place of a feed-forward block of the dense model: k of its experts have as many parameters.

    Args:
        width: of a byte's vector.
        count: experts, on all ranks together.
        k: experts of a byte.
        ranks: among which they are divided.
    """

    def __init__(self, width: int, count: int, k: int, ranks: int) -> None:
        super().__init__()
        inner = 4 * width // k
        expert = nn.Sequential(nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width))
        self.moe = MoE(width, expert, count, ranks, k=k, drop_tokens=False, top2_2nd_expert_sampling=False)
        copies: Any = self.moe.deepspeed_moe.experts.deepspeed_experts
        for copy in copies:  # they are equal, and would stay so
            for layer in (copy[0], copy[2]):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.balance_loss: Any = None

    def forward(self, hidden: Tensor) -> Tensor:
        output, self.balance_loss, _ = self.moe(hidden)
        return output


def with_experts(arguments: argparse.Namespace) -> Any:
    """The byte model with a block of experts in each layer; ranks draw experts of their own."""
    torch.manual_seed(arguments.seed)
    model: Any = build_model(arguments)
    torch.manual_seed(arguments.seed + 1 + comm.get_rank())
    for block in model.transformer.h:
        block.mlp = ExpertBlock(arguments.width, arguments.experts, arguments.k, comm.get_world_size())
    return model


@dataclass
class Run:
    """What one model did.

    Args:
        parameters: of all ranks.
        active: those that a byte meets.
        losses: of the steps, nats per byte without the balance loss, the mean of all ranks.
        loads: of the steps, by layer: the busiest expert's bytes over the mean.
        held_out: nats per byte at the end.
        seconds: of training.
    """

    parameters: int
    active: int
    losses: list[float] = field(default_factory=list)
    loads: list[list[float]] = field(default_factory=list)
    held_out: float = 0.0
    seconds: float = 0.0


def train(name: str, model: nn.Module, arguments: argparse.Namespace, training: Windows, heldout: Windows) -> Run:
    """One pass over the training text."""
    blocks = [module for module in model.modules() if isinstance(module, ExpertBlock)]
    experts = sum(param.numel() for block in blocks for param in block.moe.deepspeed_moe.experts.parameters())
    shared, ranks = sum(param.numel() for param in model.parameters()) - experts, comm.get_world_size()
    run = Run(shared + experts * ranks, shared + experts * ranks * arguments.k // arguments.experts)
    config = resolve_config(str(BYTES_LM / "ds_config.json"), training)
    config |= {"expert_parallel": {"balance": "all_ranks" if blocks else "model", "load": bool(blocks)}}
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=training, config=config
    )
    started = time.perf_counter()
    for windows in tqdm(loader, desc=name, mininterval=1.0, disable=engine.global_rank != 0):
        loss = loss_of(engine, windows.to(engine.device))
        balance = sum(block.balance_loss for block in blocks)
        engine.backward(loss + arguments.balance * balance)
        engine.step()
        run.losses.append(mean_over_ranks(loss))
        if blocks:
            run.loads.append([load.max_over_mean for load in engine.expert_load.values()])
    run.seconds = time.perf_counter() - started
    run.held_out = held_out_loss(engine, heldout)
    engine.destroy()
    return run


def smooth(values: Sequence[float]) -> list[float]:
    """A running mean."""
    means: list[float] = []
    for value in values:
        means.append(value if not means else SMOOTHING * means[-1] + (1 - SMOOTHING) * value)
    return means


def draw(path: Path, runs: dict[str, Run], step_bytes: int) -> None:
    """The losses of both models over bytes, and the load of each layer's experts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (losses, loads) = plt.subplots(1, 2, figsize=(11, 3.8))
    for name, run in runs.items():
        seen = [(step + 1) * step_bytes / 1e6 for step in range(len(run.losses))]
        losses.plot(seen, smooth(run.losses), label=f"{name}: {run.held_out:.3f} held out")
        for layer, of_layer in enumerate(zip(*run.loads, strict=True)):
            loads.plot(seen, smooth(of_layer), label=f"layer {layer}", linewidth=0.9)
    losses.set(xlabel="million bytes seen", ylabel="nats per byte", title="equal active parameters, equal bytes")
    loads.set(xlabel="million bytes seen", ylabel="busiest expert / mean", title="load of the experts")
    loads.axhline(1.0, color="grey", linewidth=0.6)
    losses.legend()
    loads.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Train both models, then print and draw what they reached on rank 0."""
    arguments = parse_arguments()
    deepspeed.init_distributed()
    training_text, heldout_text = split(library_files())
    training = Windows(training_text, arguments.sequence, arguments.train_bytes, seed=arguments.seed)
    heldout = Windows(heldout_text, arguments.sequence, arguments.heldout_bytes, seed=arguments.seed)
    torch.manual_seed(arguments.seed)
    runs = {"dense": train("dense", build_model(arguments), arguments, training, heldout)}
    name = f"{arguments.experts} experts, {arguments.k} a byte"
    runs[name] = train("experts", with_experts(arguments), arguments, training, heldout)
    if comm.get_rank() == 0:
        picture = arguments.output / "load.png"
        draw(picture, runs, 16 * arguments.sequence)
        print(f"\nbyte bigram, held out: {bigram_loss(training_text, heldout):.3f} nats per byte")
        for model, run in runs.items():
            print(
                f"{model}: {run.parameters / 1e6:.2f} M parameters, {run.active / 1e6:.2f} M active, "
                f"training {smooth(run.losses)[-1]:.3f}, held out {run.held_out:.3f} nats per byte, {run.seconds:.0f} s"
            )
        last = ", ".join(f"{load:.2f}" for load in runs[name].loads[-1])
        print(f"busiest expert over the mean, by layer, in the last step: {last}")
        print(f"picture: {picture}", flush=True)


if __name__ == "__main__":
    main()
