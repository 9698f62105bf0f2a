"""Train a byte-level language model on Python's own standard library, with the ZeRO stage that the JSON names."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from corpus import VOCABULARY, Windows, bigram_loss, library_files, split
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import GPTNeoConfig, GPTNeoForCausalLM

import deepspeed
from deepspeed import comm

HERE = Path(__file__).resolve().parent
SMOOTHING = 0.95


def parse_arguments() -> argparse.Namespace:
    """The command line; `--deepspeed_config` comes from the package, `--local_rank` from its launcher."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=128, help="bytes per window")
    parser.add_argument("--train_bytes", type=int, default=3_000_000)
    parser.add_argument("--heldout_bytes", type=int, default=200_000)
    parser.add_argument("--sample_bytes", type=int, default=300)
    parser.add_argument("--prompt", default="def read_")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/bytes_lm"), help="folder of the loss curve")
    parser.add_argument(
        "--save", type=Path, help="folder that the trained model is written to, as Transformers reads it"
    )
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    arguments.deepspeed_config = arguments.deepspeed_config or str(HERE / "ds_config.json")
    return arguments


def build_model(arguments: argparse.Namespace) -> GPTNeoForCausalLM:
    """A GPT-Neo with random weights whose layers attend globally and locally in turn."""
    return GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=VOCABULARY,
            hidden_size=arguments.width,
            num_layers=arguments.layers,
            num_heads=arguments.heads,
            attention_types=[[[("global", "local")[layer % 2]], 1] for layer in range(arguments.layers)],
            window_size=arguments.sequence // 2,
            max_position_embeddings=arguments.sequence,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def resolve_config(path: str, training: Windows) -> dict[str, Any]:
    """The JSON with the one "auto" that only this script can resolve: the steps of a run of one pass."""
    config: dict[str, Any] = json.loads(Path(path).read_text())
    scheduler = config.get("scheduler", {}).get("params", {})
    if scheduler.get("total_num_steps") == "auto":
        scheduler["total_num_steps"] = math.ceil(len(training) / config["train_batch_size"])
    return config


def loss_of(model: torch.nn.Module, windows: Tensor) -> Tensor:
    """Mean nats per byte, formed in fp32; windows: int64 `[batch, sequence + 1]`."""
    logits = model(input_ids=windows[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def mean_over_ranks(value: Tensor) -> float:
    """The mean of a scalar over all ranks."""
    total = value.detach().float().clone()
    comm.all_reduce(total)
    return total.item() / comm.get_world_size()


def train(engine: deepspeed.DeepSpeedEngine, loader: Any, sequence: int) -> list[float]:
    """One pass over the loader; returns the loss of every step, meaned over the ranks."""
    losses: list[float] = []
    smooth = 0.0
    step_bytes = engine.train_batch_size() * sequence
    shown = {"unit": "tokens", "unit_scale": True, "mininterval": 1.0, "disable": engine.global_rank != 0}
    progress = tqdm(total=len(loader) * step_bytes, **shown)
    for windows in loader:
        loss = loss_of(engine, windows.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss))
        smooth = losses[0] if len(losses) == 1 else SMOOTHING * smooth + (1 - SMOOTHING) * losses[-1]
        progress.set_postfix(
            loss=f"{smooth:.3f}",
            lr=f"{engine.get_lr()[0]:.1e}",
            grad_norm=f"{float(engine.get_global_grad_norm() or 0.0):.2f}",
            refresh=False,
        )
        progress.update(step_bytes)
    progress.close()
    return losses


@torch.no_grad()
def held_out_loss(engine: deepspeed.DeepSpeedEngine, windows: Windows, batch: int = 16) -> float:
    """Mean nats per held-out byte; every rank takes the same number of windows, so that stage 3 gathers together."""
    rank, ranks = comm.get_rank(), comm.get_world_size()
    mine = [windows[index] for index in range(rank, len(windows) // ranks * ranks, ranks)]
    engine.eval()
    total = torch.zeros((), device=engine.device)
    for start in range(0, len(mine), batch):
        chunk = torch.stack(mine[start : start + batch]).to(engine.device)
        total += loss_of(engine, chunk) * len(chunk)
    engine.train()
    return mean_over_ranks(total / len(mine))


@torch.no_grad()
def generate(engine: deepspeed.DeepSpeedEngine, prompt: str, count: int, sequence: int, seed: int) -> str:
    """`prompt` and `count` bytes drawn after it at temperature 0.7; all ranks call, with equal results."""
    engine.eval()
    draws = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt.encode())], device=engine.device)
    for _ in range(count):
        logits = engine.module(input_ids=text[:, -sequence:]).logits[:, -1].float().cpu()
        following = torch.multinomial((logits / 0.7).softmax(dim=-1), 1, generator=draws)
        text = torch.cat([text, following.to(text.device)], dim=1)
    engine.train()
    return bytes(text[0].tolist()).decode("utf-8", errors="replace")


def draw_curve(path: Path, losses: list[float], step_bytes: int, held_out: float, bigram: float) -> None:
    """Write the training loss over bytes seen, with the held-out loss and the bigram model as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot([(step + 1) * step_bytes / 1e6 for step in range(len(losses))], losses, linewidth=0.6, label="training")
    axes.axhline(held_out, color="tab:green", label=f"held out, at the end: {held_out:.2f}")
    axes.axhline(bigram, color="tab:red", linestyle="--", label=f"byte bigram, held out: {bigram:.2f}")
    axes.set(xlabel="million bytes seen", ylabel="nats per byte")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Train, then print what was reached on rank 0."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    training_text, heldout_text = split(library_files())
    training = Windows(training_text, arguments.sequence, arguments.train_bytes, seed=arguments.seed)
    heldout = Windows(heldout_text, arguments.sequence, arguments.heldout_bytes, seed=arguments.seed)
    model = build_model(arguments)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=training,
        config=resolve_config(arguments.deepspeed_config, training),
    )
    started = time.perf_counter()
    losses = train(engine, loader, arguments.sequence)
    seconds = time.perf_counter() - started
    reached = held_out_loss(engine, heldout)
    sample = generate(engine, arguments.prompt, arguments.sample_bytes, arguments.sequence, arguments.seed)
    if arguments.save:
        weights = engine.module_state_dict()  # whole, whatever the stage; all ranks call
        if engine.global_rank == 0:
            model.save_pretrained(arguments.save, state_dict=weights)
    if engine.global_rank == 0:
        bigram = bigram_loss(training_text, heldout)
        step_bytes = engine.train_batch_size() * arguments.sequence
        curve = arguments.output / "loss.png"
        draw_curve(curve, losses, step_bytes, reached, bigram)
        print(f"\n--- a sample ---\n{sample}\n---")
        seen = f"{len(losses) * step_bytes / 1e6:.2f} M bytes in {seconds:.0f} s"
        print(f"trained on {seen} with ZeRO stage {engine.zero_optimization_stage()}")
        print(f"held out: {reached:.3f} nats per byte (byte bigram: {bigram:.3f})")
        print(f"loss curve: {curve}", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
