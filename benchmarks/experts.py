"""Time of a training step of a mixture of experts whose experts ranks divide among them.

Sides, on the same weights and batches, fp32, AdamW, which take turns in random order in every round:

- `engine`: `expert_parallel` at ZeRO 1, and `engine-3` at ZeRO 3;
- `transformers`: Transformers' own expert parallelism (`DistributedConfig`), which needs its FSDP2;
- `torch` and `torch-again` (A/A): a composition written out: the model's own experts on this rank's half, tokens sorted
  by expert, two uneven all-to-alls of torch over gloo, gradients of what is not an expert averaged in one bucket;
- `whole-3`: ZeRO 3 without expert parallelism;
- `alone`: no side of the comparison, but the floor of all that divide: the model's own code on a rank's share of the
  experts, as many rows as arrive when routing is balanced, the update of a share of the elements, and no message.

`--parts` times parts instead: a layer of experts beside its grouped products alone and its bytes at the bandwidth of a
large copy between the ranks; the same layer beside the model's own forward on the rows that arrive and those bytes (the
products alone leave the model's code out: activation function, order of rows); dispatch and combine beside a sort and
two all-to-alls of torch; the products of the experts beside one matrix product of as many operations. `--routing zipf`
chooses experts with frequency 1 / number.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import World, compare_sides, median_interval, print_table, serve, start_world, time_sides, write_json
from torch import Tensor, nn

SHAPES = {  # experts, choices
    "8x2": (8, 2),
    "64x8": (64, 8),
}
WIDTH, INNER, LAYERS, VOCABULARY, TOKENS = 256, 512, 4, 2048, 512
SIDES = ["engine", "engine-3", "transformers", "torch", "torch-again", "whole-3", "alone"]
PEERS = ("transformers", "torch", "whole-3")
BAR, SAME_LOSS, LEARNING_RATE = 0.95, 1e-4, 1e-3
PARTS = ["layer", "floor", "model-floor", "exchange", "exchange-torch", "products", "matrix"]
Step = Callable[[Tensor], float]


def mixtral(shape: str, folder: str, routing: str, **how: Any) -> Any:
    """The model of this shape with the same random weights on every rank and side."""
    from transformers import MixtralForCausalLM

    model = MixtralForCausalLM.from_pretrained(folder, **how).train()
    if routing == "zipf":
        skew(model, SHAPES[shape][0])
    return model


def skew(model: nn.Module, experts: int) -> None:
    """Let routers choose expert n with about frequency 1 / n."""
    bias = -torch.arange(1, experts + 1, dtype=torch.float32).log()

    def hook(module: Any, args: Any, output: Any) -> Any:
        logits, weights, index = output
        noise = torch.empty_like(logits).exponential_(generator=torch.Generator().manual_seed(0)).log().neg()
        chosen = (bias + noise).topk(index.shape[-1], -1).indices
        return logits, weights, chosen.to(index.dtype)

    for module in model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.register_forward_hook(hook)


def write_model(shape: str, folder: str) -> None:
    """The model that all sides read."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts, choices = SHAPES[shape]
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=WIDTH // 32,
        num_key_value_heads=WIDTH // 32, vocab_size=VOCABULARY, max_position_embeddings=TOKENS, use_cache=False,
        num_local_experts=experts, num_experts_per_tok=choices,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)


# -- sides ------------------------------------------------------------------------------------------------------------


def make_side(name: str, shape: str, folder: str, routing: str) -> Step:
    """A training step of one side: takes tokens (1, TOKENS) and gives the loss."""
    if name == "transformers":
        from transformers.distributed import DistributedConfig

        ranks = dist.get_world_size()
        how = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")
        return plain(mixtral(shape, folder, routing, distributed_config=how), [])
    model = mixtral(shape, folder, routing)
    if name == "alone":
        return alone(model)
    if name.startswith("torch"):
        divided = [divide(module) for module in model.modules() if type(module).__name__ == "MixtralExperts"]
        own = {param for params in divided for param in params}
        return plain(model, [param for param in model.parameters() if param not in own], own)
    import deepspeed

    stage = 3 if name.endswith("-3") else 1
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "steps_per_print": None,
    }
    if name.startswith("engine"):
        config["expert_parallel"] = {"size": dist.get_world_size()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(ids: Tensor) -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def plain(model: nn.Module, averaged: list[nn.Parameter], own: set[Any] = frozenset()) -> Step:  # type: ignore[assignment]
    """A plain loop.

    Args:
        averaged: parameters whose gradients are averaged over the ranks here; the model does so for others.
        own: parameters of experts of this rank, whose gradients are sums over all ranks' tokens.
    """
    ranks, optimizer = dist.get_world_size(), torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)

    def step(ids: Tensor) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = [param.grad for param in averaged if param.grad is not None]
        if grads:
            flat = torch.cat([grad.view(-1) for grad in grads])
            dist.all_reduce(flat)
            flat /= ranks
            for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(mean.view_as(grad))
        for param in own:
            if param.grad is not None:
                param.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def alone(model: nn.Module) -> Step:
    """A step without messages; it has no loss that could be compared."""
    experts = [module for module in model.modules() if type(module).__name__ == "MixtralExperts"]
    updated = [param for module in experts for param in keep_local(module)]
    for module in experts:
        forward, local = module.forward, module.num_experts
        module.forward = lambda hidden, index, weights, forward=forward, local=local: forward(
            hidden, index % local, weights
        )
    own = set(updated)
    dense = [param for param in model.parameters() if param not in own]
    share, taken = sum(param.numel() for param in dense) / dist.get_world_size(), 0
    for param in dense:  # whole parameters, up to a rank's share of the elements
        if taken < share:
            updated.append(param)
            taken += param.numel()
    optimizer = torch.optim.AdamW(updated, lr=LEARNING_RATE, foreach=False)

    def step(ids: Tensor) -> Any:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        model.zero_grad()

    return step


def divide(module: Any) -> list[nn.Parameter]:
    """Let a module of experts keep this rank's, and exchange tokens by torch's all-to-all."""
    forward = module.forward
    params = keep_local(module)
    local = module.num_experts

    def exchanging(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        order, rows, to, come, ids = send(hidden, index, local)
        if len(rows):
            out = forward(rows, ids, torch.ones_like(ids, dtype=rows.dtype))
        else:
            out = rows + sum(param.flatten()[:0].sum() for param in params)
        back = uneven(out, to, come)
        each = torch.empty_like(back).index_copy(0, order, back).view(*index.shape, -1)
        return (each * weights.unsqueeze(-1)).sum(1)

    module.forward = exchanging
    return params


def keep_local(module: Any) -> list[nn.Parameter]:
    """Let a module of experts have this rank's experts only; its parameters."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, param in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(param.detach().chunk(ranks)[rank].clone()))
    module.num_experts //= ranks
    return list(module.parameters())


def send(hidden: Tensor, index: Tensor, local: int) -> tuple[Tensor, Tensor, list[int], list[int], Tensor]:
    """Sort (token, choice) pairs by expert and exchange them; (order, rows, sent, received, local experts of rows)."""
    ranks, k = dist.get_world_size(), index.shape[1]
    order = index.flatten().argsort()
    counts = torch.bincount(index.flatten(), minlength=local * ranks).view(ranks, local)
    others = torch.empty_like(counts)
    dist.all_to_all_single(others, counts)
    to, come = counts.sum(1).tolist(), others.sum(1).tolist()
    rows = uneven(hidden[order // k], come, to)
    ids = torch.arange(local).repeat(ranks).repeat_interleave(others.flatten()).unsqueeze(-1)
    return order, rows, to, come, ids


def uneven(rows: Tensor, come: list[int], to: list[int]) -> Tensor:
    """Torch's differentiable all-to-all."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

    group = dist.group.WORLD
    return wait_tensor(all_to_all_single_autograd(rows.contiguous(), come, to, group))


# -- parts ------------------------------------------------------------------------------------------------------------


def make_part(name: str, shape: str, folder: str, routing: str) -> Step:
    """Forward and backward of a part of one layer."""
    experts, choices = SHAPES[shape]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    odds = torch.ones(experts) if routing == "balanced" else 1 / torch.arange(1, experts + 1)
    index = torch.multinomial(odds.expand(TOKENS, -1), choices, generator=draw)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw, requires_grad=True)
    weights = torch.rand(TOKENS, choices, generator=draw, requires_grad=True)
    model = mixtral(shape, folder, "balanced")
    module = next(module for module in model.modules() if type(module).__name__ == "MixtralExperts")
    return PART_MAKERS[name](module, hidden, index, weights, experts // ranks)


def _layer(module: Any, hidden: Tensor, index: Tensor, weights: Tensor, local: int) -> Step:
    from deepspeed.comm import init_distributed
    from deepspeed.comm.process_groups.axis import world_axis
    from deepspeed.moe.expert_parallel import ExpertLocation, become_parallel
    from deepspeed.moe.structure import find_experts, tried

    init_distributed(verbose=False)
    location = ExpertLocation(world_axis("ep"), "experts", module.num_experts, list(range(dist.get_world_size())))
    structure, why = tried(module, next(find_experts(module))[2], dist.get_world_size())
    assert not why, why
    become_parallel(module, location, structure)
    return _both_ways(lambda: module(hidden, index, weights), [hidden, weights, *module.parameters()])


def _both_ways(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Step:
    def step(_: Tensor) -> float:
        for leaf in leaves:
            leaf.grad = None
        forward().square().sum().backward()
        return 0.0

    return step


def _floor(module: Any, hidden: Tensor, index: Tensor, weights: Tensor, local: int) -> Step:
    """The grouped products alone on the rows that arrive, and a copy of the bytes that are received."""
    from torch.nn.functional import grouped_mm

    _, rows, _, come, ids = send(hidden.detach(), index, local)
    rank = dist.get_rank()
    ids, order = ids.flatten().sort()
    rows = rows[order].requires_grad_()
    offsets = torch.bincount(ids, minlength=local).cumsum(0).int()
    gate_up, down = (param.detach()[rank * local : (rank + 1) * local].transpose(1, 2) for param in module.parameters())
    gate_up.requires_grad_(), down.requires_grad_()
    received = rows.detach().clone()[: sum(come) - come[rank]]
    target = torch.empty_like(received)

    def step(_: Tensor) -> float:
        rows.grad = gate_up.grad = down.grad = None
        inner = grouped_mm(rows, gate_up, offs=offsets)
        grouped_mm(inner[:, : inner.shape[1] // 2].contiguous(), down, offs=offsets).square().sum().backward()
        for _ in range(4):
            target.copy_(received)
        return 0.0

    return step


def _model_floor(module: Any, hidden: Tensor, index: Tensor, weights: Tensor, local: int) -> Step:
    """The model's own forward on the rows that arrive, and a copy of the bytes that are received."""
    _, rows, _, come, ids = send(hidden.detach(), index, local)
    params = keep_local(module)
    ones = torch.ones_like(ids, dtype=rows.dtype)
    received = rows.clone()[: sum(come) - come[dist.get_rank()]]
    target = torch.empty_like(received)
    compute = _both_ways(lambda: module(rows, ids, ones), [rows.requires_grad_(), *params])

    def step(ids: Tensor) -> float:
        for _ in range(4):
            target.copy_(received)
        return compute(ids)

    return step


def _exchange(module: Any, hidden: Tensor, index: Tensor, weights: Tensor, local: int) -> Step:
    from deepspeed.comm import init_distributed
    from deepspeed.comm.process_groups.axis import world_axis
    from deepspeed.moe.exchange import Routing, combine, dispatch

    init_distributed(verbose=False)
    axis, owner = world_axis("ep"), torch.arange(dist.get_world_size()).repeat_interleave(local)

    def forward() -> Tensor:
        routing = Routing.of(index, owner, axis, "experts")
        rows, row_weights, _ = dispatch(hidden, weights, index[routing.sent], routing)
        return combine(rows * row_weights.sum(1, keepdim=True), routing)

    return _both_ways(forward, [hidden, weights])


def _exchange_torch(module: Any, hidden: Tensor, index: Tensor, weights: Tensor, local: int) -> Step:
    def forward() -> Tensor:
        order, rows, to, come, _ = send(hidden, index, local)
        back = uneven(rows, to, come)
        each = torch.empty_like(back).index_copy(0, order, back).view(*index.shape, -1)
        return (each * weights.unsqueeze(-1)).sum(1)

    return _both_ways(forward, [hidden, weights])


def _products(module: Any, hidden: Tensor, index: Tensor, weights: Tensor, local: int) -> Step:
    """All experts on this rank's own tokens, without an exchange."""
    return _both_ways(lambda: module(hidden, index, weights), [hidden, weights, *module.parameters()])


def _matrix(module: Any, hidden: Tensor, index: Tensor, weights: Tensor, local: int) -> Step:
    """One expert as large as the module's work: as many rows, no choice."""
    rows = hidden.detach().repeat(index.shape[1], 1).requires_grad_()
    up, down = (nn.Parameter(param.detach()[0].clone()) for param in module.parameters())

    def forward() -> Tensor:
        gate, value = nn.functional.linear(rows, up).chunk(2, -1)
        return nn.functional.linear(nn.functional.silu(gate) * value, down)

    return _both_ways(forward, [rows, up, down])


PART_MAKERS: dict[str, Callable[[Any, Tensor, Tensor, Tensor, int], Step]] = {
    "layer": _layer,
    "floor": _floor,
    "model-floor": _model_floor,
    "exchange": _exchange,
    "exchange-torch": _exchange_torch,
    "products": _products,
    "matrix": _matrix,
}
# part, what it is compared with, bar
COMPARED = [
    ("layer", "floor", 1.15),
    ("layer", "model-floor", 1.15),
    ("exchange", "exchange-torch", 1.0),
    ("products", "matrix", 1.6),
]


# -- the run ----------------------------------------------------------------------------------------------------------


def make_rank(shape: str, folder: str, routing: str, parts: bool) -> Callable[..., Any]:
    """A rank that holds all sides."""
    start_world()
    make, names = (make_part, PARTS) if parts else (make_side, SIDES)
    built = {name: make(name, shape, folder, routing) for name in names}

    def handle(what: str, order: list[str], number: int) -> dict[str, tuple[float, float | None]]:
        draw = torch.Generator().manual_seed(1_000 * number + dist.get_rank())
        timed = time_sides(built, order, torch.randint(0, VOCABULARY, (1, TOKENS), generator=draw))
        return timed if dist.get_rank() == 0 else {name: (seconds, None) for name, (seconds, _) in timed.items()}

    return handle


def measure(shape: str, ranks: int, rounds: int, routing: str, parts: bool) -> list[dict[str, Any]]:
    """Rows of the table, of one shape."""
    folder = tempfile.mkdtemp()
    try:
        write_model(shape, folder)
        setup = {"shape": shape, "folder": folder, "routing": routing, "parts": parts}
        world = World("experts.py", ranks, setup)
        if parts:
            return compare_parts(world, shape, ranks, routing, rounds)
        rows = compare_sides(world, SIDES, "torch", rounds, 0, SAME_LOSS)
    finally:
        shutil.rmtree(folder)
    return [{"shape": shape, "ranks": ranks, "routing": routing, "bar": BAR, **row} for row in rows]


def compare_parts(world: World, shape: str, ranks: int, routing: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each part, with its paired ratio to what it is compared with."""
    times: dict[str, list[float]] = {name: [] for name in PARTS}
    for number in range(rounds):
        answers = world.ask(what="round", order=PARTS, number=number)
        for name in PARTS:
            times[name].append(max(answer[name][0] for answer in answers))
    world.close()
    rows = []
    for part, other, bar in COMPARED:
        ratio = median_interval([a / b for a, b in zip(times[part], times[other], strict=True)])
        ms = 1e3 * median_interval(times[part]).median
        rows.append({"shape": shape, "ranks": ranks, "routing": routing, "bar": bar, "side": f"{part} / {other}",
                     "ms": ms, "ratio": ratio.median, "low": ratio.low, "high": ratio.high})  # fmt: skip
    return rows


def main() -> None:
    """Run and print."""
    if "--worker" in sys.argv:
        serve(make_rank)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--routing", default="balanced", choices=["balanced", "zipf"])
    parser.add_argument("--parts", action="store_true", help="parts of a layer instead of whole steps")
    parser.add_argument("--dry", action="store_true", help="two rounds, nothing written")
    args = parser.parse_args()
    rounds = 2 if args.dry else args.rounds
    rows = [row for shape in args.shapes for row in measure(shape, args.ranks, rounds, args.routing, args.parts)]
    table = [
        [row["shape"], str(row["ranks"]), row["routing"], row["side"], f"{row['ms']:.1f}",
         f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]", f"{row['bar']:.2f}"]
        for row in rows
    ]  # fmt: skip
    print_table(["shape", "ranks", "routing", "side", "ms", "ratio", "bar"], table)
    if not args.dry:
        kind = "parts" if args.parts else "steps"
        print(write_json(f"experts-{kind}-{args.ranks}-{args.routing}.json", rows))


if __name__ == "__main__":
    main()
