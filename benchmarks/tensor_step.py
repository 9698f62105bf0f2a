"""Time of one training step of Transformers' Llama cut over ranks, beside torch's `parallelize_module`.

(A) width 384, batch 8; (B) width 128, batch 1; fp32, 8 layers, vocabulary 8,192, sequence 128. Sides, in random order
in every round: torch's DTensor styles by the model's own plan, the same again, the cut layers in the same loop, and an
engine at ZeRO 0. All losses are equal, which is checked at the first step. Bytes that a rank gets from the others in a
step are counted by the comms logger and compared with the formula: in each layer two sums forward and two backward, of
batch x sequence x width each. What an engine sends besides (the norm, agreement) is said.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import World, compare_sides, print_table, serve, start_world, time_sides, write_json
from torch import Tensor, nn

SHAPES = {"A": {"width": 384, "batch": 8}, "B": {"width": 128, "batch": 1}}
BARS = {"A": 1.00, "B": 0.90}
LAYERS, VOCABULARY, SEQUENCE = 8, 8192, 128
REFERENCE, AGAIN = "torch", "torch-again"
OURS = ["layers", "engine"]
SIDES = [REFERENCE, AGAIN, *OURS]
SAME_LOSS = 1e-4
LEARNING_RATE = 1e-3


def llama(width: int) -> nn.Module:
    """The same random weights on every rank and side."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=LAYERS, num_attention_heads=width // 32,
        num_key_value_heads=width // 32, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


@dataclass
class Side:
    """One way to train: a whole step that returns the loss before it."""

    step: Callable[[Tensor], float]


def plain(model: nn.Module) -> Side:
    """A plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)

    def step(ids: Tensor) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Side(step)


def make_side(name: str, width: int, ranks: int) -> Side:
    """The side of this name."""
    model = llama(width)
    if name in (REFERENCE, AGAIN):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        plan = {f"model.{name}": styles[style]() for name, style in model.config.base_model_tp_plan.items()
                if style in styles}  # fmt: skip
        return plain(parallelize_module(model, mesh, plan))
    if name == "layers":
        from deepspeed.comm.process_groups.mesh import mesh_for
        from deepspeed.tensor_parallel.parallelize import cut_model

        cut_model(model, mesh_for({"tp": ranks}).axis("tp"))
        return plain(model)
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": ranks}, "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(ids: Tensor) -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Side(step)


def received_in_step(step: Callable[[Tensor], float], ids: Tensor) -> dict[int, int]:
    """Bytes that came from other ranks in one step, by the bytes of the message."""
    from deepspeed.comm import comms_logger
    from deepspeed.comm.watchdog.comms_logger import CommsLogger

    comms_logger.reset()
    comms_logger.enabled = True
    step(ids)
    comms_logger.enabled = False
    (received,) = comms_logger.received.values() or [0]  # all travels over tp, which is all ranks here
    found: dict[int, int] = {}
    for operation, sizes in comms_logger.times.items():
        for (size, ranks), calls in sizes.items():
            bytes_each = CommsLogger.received_in(operation, size, ranks) * calls.calls
            found[size] = found.get(size, 0) + max(bytes_each, calls.received)
    assert sum(found.values()) == received, (found, received)
    return found


def make_rank(shape: str, ranks: int) -> Callable[..., Any]:
    """A rank that holds all sides; a round answers with seconds and losses by side."""
    start_world()
    width, batch = SHAPES[shape]["width"], SHAPES[shape]["batch"]
    built = {name: make_side(name, width, ranks) for name in SIDES}

    def handle(what: str, order: list[str], number: int) -> dict[str, tuple[float, float]]:
        ids = torch.randint(0, VOCABULARY, (batch, SEQUENCE), generator=torch.Generator().manual_seed(number))
        if what == "count":
            return {name: received_in_step(built[name].step, ids) for name in order}  # type: ignore[misc]
        return time_sides({name: side.step for name, side in built.items()}, order, ids)

    return handle


def measure(shape: str, ranks: int, rounds: int, seed: int) -> list[dict[str, Any]]:
    """Rows of the table."""
    world = World("tensor_step.py", ranks, {"shape": shape, "ranks": ranks})
    counts = world.ask(what="count", order=SIDES, number=0)[0]  # a step of all, so that losses stay the same
    message = 4 * SHAPES[shape]["batch"] * SEQUENCE * SHAPES[shape]["width"]
    formula = LAYERS * 4 * 2 * message * (ranks - 1) // ranks
    rows = compare_sides(world, SIDES, REFERENCE, rounds, seed, SAME_LOSS)
    for row in rows:
        counted = counts[row["side"]]
        if row["side"] in OURS:
            row["bytes"] = {"tp": counted.pop(message, 0), "formula": formula, "besides": sum(counted.values())}
            if row["bytes"]["tp"] != formula:
                raise SystemExit(f"{row['side']}: {row['bytes']}: the bytes are not those of the formula")
    return [{"shape": shape, "ranks": ranks, **row} for row in rows]


def bytes_of(row: dict[str, Any]) -> str:
    """What travels in a step, beside the formula."""
    counted = row.get("bytes")
    return f"{counted['tp']:,} = formula, and {counted['besides']:,}" if counted else ""


def main() -> None:
    """Run and print."""
    if "--worker" in sys.argv:
        serve(make_rank)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shapes", default="AB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="two rounds, nothing written")
    args = parser.parse_args()
    rows = [
        row for shape in args.shapes for row in measure(shape, args.ranks, 2 if args.dry else args.rounds, args.seed)
    ]
    table = [
        [row["shape"], str(row["ranks"]), row["side"], f"{row['ms']:.1f}",
         f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]", f"{BARS[row['shape']]:.2f}", bytes_of(row)]
        for row in rows
    ]  # fmt: skip
    print_table(["shape", "ranks", "side", "ms", "of torch's", "bar", "bytes a rank gets over tp in a step"], table)
    if not args.dry:
        print(write_json(f"tensor_step-{args.ranks}.json", rows))


if __name__ == "__main__":
    main()
