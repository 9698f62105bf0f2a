"""Time of one training step of Transformers' Llama over a sequence that ranks share.

torch's context parallelism has no kernel for CPUs, so the reference is upstream's Ulysses at ZeRO 0, as Transformers'
Trainer uses it, in an environment of its own (`--upstream PYTHON`). Beside it, and in its place without that
environment, stands Ulysses with torch's own differentiable all-to-all (`all_to_all_single_autograd`) registered as
attention, its gradients averaged in one bucket after backward: in both environments, and twice in this one. Then the
cut model in the same loop, and an engine at ZeRO 0; and one that keeps contexts twice, where the other exchanges them
again in backward (`sequence_parallel_recompute`). Environments take turns, and their sides are in random order in
every round. Losses are equal, which is checked at the first step. fp32, 8 layers, vocabulary 8,192, AdamW.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import World, compare_worlds, print_table, serve, start_world, time_sides, write_json
from torch import Tensor, nn

SHAPES = {"A": {"width": 384, "batch": 8, "sequence": 128}, "B": {"width": 128, "batch": 1, "sequence": 2048}}
BAR = 1.00
LAYERS, VOCABULARY = 8, 8192
TORCH, UPSTREAM = "torch", "upstream"
SIDES = [TORCH, "torch-again", "layers", "engine", "engine-kept"]
THEIR_SIDES = ["torch-there", UPSTREAM]
SAME_LOSS = 1e-4
LEARNING_RATE = 1e-3
Step = Callable[[Tensor], float]


def llama(width: int, sequence: int) -> Any:
    """The same random weights on every rank and side."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=LAYERS, num_attention_heads=width // 32,
        num_key_value_heads=width // 32, vocab_size=VOCABULARY, max_position_embeddings=sequence, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def torch_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Ulysses with torch's all-to-all."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    ranks, group = dist.get_world_size(), dist.group.WORLD

    def exchange(t: Tensor, cut: int, join: int) -> Tensor:
        packed = t.unflatten(cut, (ranks, -1)).movedim(cut, 0).contiguous()
        return all_to_all_single_autograd(packed, None, None, group).movedim(0, join).flatten(join, join + 1)

    states = [exchange(t, 1, 2) for t in (query, key, value)]
    out, _ = sdpa_attention_forward(module, *states, None, is_causal=True, **kwargs)
    return exchange(out, 1, 2), None


def sliced(ids: Tensor) -> dict[str, Tensor]:
    """This rank's slice, with the labels that follow its tokens."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    places = torch.arange(ids.shape[1]).expand_as(ids)
    following = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    whole = {"input_ids": ids, "labels": ids, "position_ids": places, "shift_labels": following}
    return {name: value.chunk(ranks, 1)[rank].contiguous() for name, value in whole.items()}


def plain(model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> Step:
    """A plain loop; gradients of parts are summed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    params = list(model.parameters())

    def step(ids: Tensor) -> float:
        loss = loss_of(ids)
        loss.backward()
        grads = [p.grad for p in params if p.grad is not None]
        flat = torch.cat([grad.view(-1) for grad in grads])
        dist.all_reduce(flat)
        for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view_as(grad))
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        return whole.item()

    return step


def make_side(name: str, width: int, batch: int, sequence: int) -> Step:
    """The side of this name."""
    model = llama(width, sequence)
    if name == UPSTREAM:
        return upstream(model, batch, sequence)
    if name.startswith(TORCH):
        from transformers import AttentionInterface

        AttentionInterface.register("torch_ulysses", torch_attention)
        model.set_attn_implementation("torch_ulysses")

        def part_of_loss(ids: Tensor) -> Tensor:
            part = sliced(ids)
            items = ids.shape[0] * (ids.shape[1] - 1)
            return model(**part, num_items_in_batch=items).loss

        return plain(model, part_of_loss)
    if name == "layers":
        from deepspeed.comm.process_groups.axis import world_axis
        from deepspeed.sequence.transformers_adapter import cut_sequence

        cut_sequence(model, world_axis("sp"))
        return plain(model, lambda ids: model(**sliced(ids)).loss / dist.get_world_size())
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    config = {
        "train_micro_batch_size_per_gpu": 1, "mesh": {"sp": dist.get_world_size()}, "steps_per_print": 10**9,
        "sequence_parallel_recompute": name != "engine-kept",
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(ids: Tensor) -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def upstream(model: Any, batch: int, sequence: int) -> Step:
    """The engine of the package that this interpreter has, with its Ulysses; the loss as Transformers weighs it."""
    from torch.distributed.nn.functional import all_gather

    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed(dist_backend="gloo")
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=dist.get_world_size(),
        micro_batch_size=batch, seq_length=sequence, seq_length_is_variable=True,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    config = {"train_micro_batch_size_per_gpu": batch, "zero_optimization": {"stage": 0}, "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)

    def step(ids: Tensor) -> float:
        part = sliced(ids)
        own, group = engine(**part).loss, mpu.get_sequence_parallel_group()
        losses = torch.stack(list(all_gather(own, group=group)))
        counts = torch.stack(list(all_gather((part["shift_labels"] != -100).sum(), group=group)))
        loss = (losses * counts).sum() / counts.sum()
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def make_rank(shape: str, sides: list[str]) -> Callable[..., Any]:
    """A rank that holds all sides; a round answers with seconds and losses by side."""
    start_world()
    width, batch, sequence = SHAPES[shape].values()
    built = {name: make_side(name, width, batch, sequence) for name in sides}

    def handle(what: str, order: list[str], number: int) -> dict[str, tuple[float, float]]:
        ids = torch.randint(0, VOCABULARY, (batch, sequence), generator=torch.Generator().manual_seed(number))
        return time_sides(built, order, ids)

    return handle


def measure(shape: str, ranks: int, rounds: int, seed: int, python: str) -> list[dict[str, Any]]:
    """Rows of the table."""
    asked: list[tuple[str | None, list[str]]] = [(None, SIDES), *([(python, THEIR_SIDES)] if python else [])]
    worlds = [(World("sequence_step.py", ranks, {"shape": shape, "sides": sides}, env), sides) for env, sides in asked]
    rows = compare_worlds(worlds, UPSTREAM if python else TORCH, rounds, seed, SAME_LOSS)
    return [{"shape": shape, "ranks": ranks, **row} for row in rows]


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
    parser.add_argument("--upstream", default="", metavar="PYTHON", help="interpreter of an environment with upstream")
    parser.add_argument("--dry", action="store_true", help="two rounds, nothing written")
    args = parser.parse_args()
    rows = [
        row
        for shape in args.shapes
        for row in measure(shape, args.ranks, 2 if args.dry else args.rounds, args.seed, args.upstream)
    ]
    table = [
        [row["shape"], str(row["ranks"]), row["side"], f"{row['ms']:.1f}",
         f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]", f"{BAR:.2f}"]
        for row in rows
    ]  # fmt: skip
    print_table(["shape", "ranks", "side", "ms", f"of {UPSTREAM if args.upstream else TORCH}'s", "bar"], table)
    if not args.dry:
        shapes = "" if set(args.shapes) == set(SHAPES) else f"-{args.shapes}"
        print(write_json(f"sequence_step-{args.ranks}{shapes}.json", rows))


if __name__ == "__main__":
    main()
