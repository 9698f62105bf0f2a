"""Experts divided among ranks: equal to the whole model in one process, at every stage."""

from __future__ import annotations

import contextlib
import copy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

import deepspeed
from deepspeed import utils
from deepspeed.comm.process_groups.mesh import mesh_for, resolve
from deepspeed.errors import DeepSpeedError, ExpertParallelError, MeshError, OptimizerError
from deepspeed.moe.expert_parallel import DividedExperts, divide_experts
from deepspeed.moe.structure import find_experts
from deepspeed.zero.layout.placement import placement_of
from tests import zoo
from tests.parallel.tiny import raises

STEPS, CLIP = 3, 0.05
FAMILIES = (
    "Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss", "DeepseekV2", "DeepseekV3", "Olmoe", "GraniteMoe", "Phimoe", "Glm4Moe",
    "Jamba", "Dbrx", "Ernie4_5_Moe", "Dots1", "MiniMax",
)  # fmt: skip


def toy(family: str, seed: int = 0) -> Any:
    name = f"{family}ForCausalLM"
    torch.manual_seed(seed)
    config = next(zoo.configs(name))()
    for key in [key for key in vars(config) if "jitter" in key]:
        setattr(config, key, 0.0)
    model = getattr(transformers, name)(config)
    for module in model.modules():
        if "Router" in type(module).__name__:
            module.eval()  # Phi's draws experts at random while it trains
    return model


def tokens(rank: int, step: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Another length on each rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(3, 64, (1, 10 + 3 * rank), generator=generator, dtype=dtype)


class KeepDouble(TorchFunctionMode):
    """Norms and routers of Transformers compute in fp32, whatever the model's dtype: inside, in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return args[0].double() if func is torch.Tensor.float else func(*args, **kwargs)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    double = next(model.parameters()).dtype == torch.float64
    with KeepDouble() if double else contextlib.nullcontext():
        logits = model(input_ids=ids).logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(wide[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def optimizer_of(params: Any, kind: str) -> torch.optim.Optimizer:
    params = [param for param in params if param.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.5)
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def settings(stage: int, ep: int, accumulation: int = 1, clip: float = CLIP, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "expert_parallel": {"size": ep},
        "steps_per_print": None,
        **more,
    }


def in_one_process(model: Any, optimizer: Any, world: int, accumulation: int = 1, steps: int = STEPS) -> float:
    """Train on the batches of all ranks; gives the last norm."""
    norm = torch.zeros(())
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulation):
            for rank in range(world):
                loss = loss_of(model, tokens(rank, step * accumulation + micro))
                (loss / (world * accumulation)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return float(norm)


def train(engine: Any, first: int, last: int, accumulation: int = 1) -> None:
    for micro in range(first * accumulation, last * accumulation):
        engine.backward(loss_of(engine, tokens(dist.get_rank(), micro)))
        engine.step()


def gap(engine: Any, model: nn.Module) -> float:
    """The largest difference from a model's parameters, of the largest value of each."""
    worst = 0.0
    for (name, param), other in zip(engine.module.named_parameters(), model.parameters(), strict=True):
        if not param.requires_grad:
            continue
        ours = utils.safe_get_full_fp32_param(param)
        assert ours is not None and ours.shape == other.shape, name
        worst = max(worst, float((ours - other).detach().abs().max() / other.detach().abs().max()))
    return worst


def equal_to_dense(family: str, stage: int, ep: int, accumulation: int, kind: str) -> tuple[float, float]:
    world = dist.get_world_size()
    dense, model = toy(family), toy(family, seed=dist.get_rank())  # the values of rank 0 count
    optimizer = optimizer_of(model.parameters(), kind)  # a client's, made before experts are divided
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(stage, ep, accumulation))
    divided = [module for module in engine.module.modules() if isinstance(module, DividedExperts)]
    assert divided and all(param.shape[0] * ep == dense.get_submodule(module.location.name).get_parameter(name).shape[0]
                           for module in divided for name, param in module.named_parameters())  # fmt: skip
    train(engine, 0, STEPS, accumulation)
    norm = in_one_process(dense, optimizer_of(dense.parameters(), kind), world, accumulation)
    apart = gap(engine, dense), abs(float(engine.get_global_grad_norm()) - norm) / norm
    engine.destroy()
    return apart


FAST = [
    ("Mixtral", 0, 2, 2, 1, "adamw"),
    ("Qwen3Moe", 1, 2, 2, 2, "adamw"),
    ("GptOss", 2, 4, 2, 1, "sgd"),
    ("DeepseekV3", 3, 2, 2, 1, "adamw"),
    ("Mixtral", 3, 4, 2, 2, "adamw"),
    ("Mixtral", 3, 4, 4, 1, "adamw"),
]
SLOW = [
    pytest.param(family, stage, world, ep, accumulation, "adamw", marks=pytest.mark.slow)
    for family in FAMILIES
    for stage in range(4)
    for world, ep, accumulation, kind in (
        (2, 2, 2, "adamw"),
        (4, 2, 1, "adamw"),
        (4, 4, 1, "adamw"),
        (4, 2, 2, "sgd64"),
    )
]


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("family", "stage", "world", "ep", "accumulation", "kind"), [*FAST, *SLOW])
def test_a_model_trains_as_the_whole_one(
    workers: Any, family: str, stage: int, world: int, ep: int, accumulation: int, kind: str
) -> None:
    for difference, norm in workers(world).run(equal_to_dense, family, stage, ep, accumulation, kind, timeout=180):
        assert difference <= 2e-5 and norm <= 1e-6, (difference, norm)


def equal_in_double(family: str, ep: int) -> float:
    """Without an engine, whose gradients are fp32: SGD in fp64 on models whose ranks average gradients by hand."""
    world, rank = dist.get_world_size(), dist.get_rank()
    dense, model = toy(family).double(), toy(family).double()
    for each in (dense, model):
        each.set_experts_implementation("eager")  # torch's grouped products have no fp64
    mesh = mesh_for(resolve(world, []), list(range(world)))
    divide_experts(model, mesh, ep)
    copies = mesh.axis("edp", ep=ep)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, dense))
    for step in range(STEPS):
        ours.zero_grad()
        theirs.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
        for each in range(world):
            (loss_of(dense, tokens(each, step)) / world).backward()
        for param in model.parameters():
            alone = placement_of(param).ep > 1 and copies.size == 1
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            if not alone:
                dist.all_reduce(param.grad, group=copies.group if placement_of(param).ep > 1 else None)
            param.grad /= world
        ours.step()
        theirs.step()
    state = model.state_dict()
    return max(float((state[name] - p).abs().max() / p.abs().max()) for name, p in dense.named_parameters())


@pytest.mark.parametrize("family", ["Qwen3Moe", *[pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]])
def test_in_double_precision(workers: Any, family: str) -> None:
    assert max(workers(4).run(equal_in_double, family, 2, timeout=180)) <= 1e-12


def distance(gradients: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Of all gradients as one vector, relative."""
    squares = sum(float((gradients.get(name, 0.0) - value).square().sum()) for name, value in right.items())
    return (squares / sum(float(value.square().sum()) for value in right.values())) ** 0.5


def mean_gradients(model: Any, world: int) -> tuple[float, dict[str, torch.Tensor]]:
    """This rank's loss, and gradients in one process over the batches of all ranks."""
    losses = [loss_of(model, tokens(rank, 0)) for rank in range(world)]
    (sum(losses[1:], losses[0]) / world).backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return float(losses[dist.get_rank()].detach()), {name: grad.float() for name, grad in grads.items()}


def in_bf16(family: str, stage: int, ep: int) -> tuple[float, float, float]:
    """Difference of the loss from the whole model in bf16; errors of both gradients beside fp32 on the same weights."""
    world, rounded = dist.get_world_size(), toy(family).bfloat16()
    exact = toy(family)
    exact.load_state_dict(rounded.state_dict())
    _, right = mean_gradients(exact, world)
    loss, whole = mean_gradients(rounded, world)
    config = settings(stage, ep, clip=0.0, bf16={"enabled": True})
    model = toy(family).bfloat16()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model.parameters(), "sgd"), config=config)
    ours = loss_of(engine, tokens(dist.get_rank(), 0))
    engine.backward(ours)
    grads = {name: utils.safe_get_full_grad(param) for name, param in engine.module.named_parameters()}
    errors = distance({name: grad.float() for name, grad in grads.items() if grad is not None}, right)
    engine.destroy()
    return abs(float(ours.detach()) - loss), errors, distance(whole, right)


@pytest.mark.parametrize(
    ("family", "stage", "world", "ep"),
    [
        ("Qwen3Moe", 3, 2, 2),
        *(pytest.param(name, stage, 4, 2, marks=pytest.mark.slow) for name in FAMILIES for stage in range(4)),
    ],
)
def test_in_bf16(workers: Any, family: str, stage: int, world: int, ep: int) -> None:
    for loss, ours, whole in workers(world).run(in_bf16, family, stage, ep, timeout=180):
        assert loss <= 1e-2 and 0 < ours <= 2 * whole, (loss, ours, whole)


def checkpoints_of_other_sizes(folder: str, stages: tuple[int, int], sizes: tuple[int, int]) -> float:
    """Save with one ep size in the middle of a run, go on with another one."""
    world = dist.get_world_size()
    dense = toy("Mixtral")
    engine, *_ = deepspeed.initialize(model=toy("Mixtral"), config=with_adamw(stages[0], sizes[0]))
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine, *_ = deepspeed.initialize(model=toy("Mixtral", seed=5), config=with_adamw(stages[1], sizes[1]))
    engine.load_checkpoint(folder)
    train(engine, 2, STEPS)
    in_one_process(dense, optimizer_of(dense.parameters(), "adamw"), world)
    apart = gap(engine, dense)
    engine.destroy()
    return apart


def with_adamw(stage: int, ep: int, **more: Any) -> dict[str, Any]:
    params = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 1e-2}
    return settings(stage, ep, optimizer={"type": "AdamW", "params": params}, **more)


@pytest.mark.parametrize(
    ("stages", "sizes"),
    [((2, 3), (2, 1)), ((3, 1), (1, 2)), pytest.param((3, 3), (2, 4), marks=pytest.mark.slow)],
)
def test_a_checkpoint_goes_on_with_another_ep_size(
    workers: Any, tmp_path: Path, stages: tuple[int, int], sizes: tuple[int, int]
) -> None:
    ranks = max(sizes)
    assert max(workers(ranks).run(checkpoints_of_other_sizes, str(tmp_path), stages, sizes, timeout=180)) <= 2e-5


def saved_whole(folder: str, stage: int) -> None:
    config = with_adamw(stage, 2)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine, *_ = deepspeed.initialize(model=toy("Mixtral"), config=config)
    train(engine, 0, 1)
    assert engine.save_16bit_model(folder, "model.safetensors")
    masters = {name: utils.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    engine.destroy()
    if dist.get_rank() == 0:
        from safetensors.torch import load_file

        saved = load_file(Path(folder) / "model.safetensors")
        assert set(saved) == set(toy("Mixtral").state_dict())
        assert all(torch.equal(saved[name], value) for name, value in masters.items() if value is not None)


def whole_state(stage: int) -> None:
    engine, *_ = deepspeed.initialize(model=toy("Mixtral"), config=with_adamw(stage, 2))
    train(engine, 0, 1)
    state = engine.module.state_dict()
    for name, param in engine.module.named_parameters():
        assert torch.equal(state[name], utils.safe_get_full_fp32_param(param)), name
    assert set(state) == set(toy("Mixtral").state_dict())
    engine.destroy()


def partial_state() -> None:
    engine, *_ = deepspeed.initialize(model=toy("Mixtral"), config=with_adamw(3, 2))
    with raises(DeepSpeedError, "some of the experts", "save_16bit_model"):
        engine.module.state_dict()
    engine.destroy()


def test_a_state_dict_has_every_expert_or_is_refused(workers: Any) -> None:
    workers(2).run(whole_state, 1, timeout=120)
    workers(4).run(partial_state, timeout=120)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_one_file_has_every_expert(workers: Any, tmp_path: Path, stage: int) -> None:
    workers(2).run(saved_whole, str(tmp_path), stage, timeout=120)


def refused() -> None:
    with raises(ExpertParallelError, "no module that is called with tokens"):
        deepspeed.initialize(model=nn.Linear(4, 4), config=with_adamw(1, 2))
    with raises(MeshError, "ep 3 does not divide", "[1, 2]"):
        deepspeed.initialize(model=toy("Mixtral"), config=with_adamw(1, 3))
    model = toy("Mixtral")
    optimizer = optimizer_of(model.parameters(), "adamw")
    loss_of(model, tokens(0, 0)).backward()
    optimizer.step()
    with raises(DeepSpeedError, "state of all experts"):
        deepspeed.initialize(model=model, optimizer=optimizer, config=settings(1, 2))
    model = toy("Mixtral")
    optimizer = torch.optim.Adafactor(model.parameters())
    with raises(OptimizerError, "Adafactor", "experts", "AdamW"):
        deepspeed.initialize(model=model, optimizer=optimizer, config=settings(1, 2))


def test_what_cannot_be_divided_is_said(workers: Any) -> None:
    workers(2).run(refused, timeout=120)


def with_another_axis(extra: dict[str, Any], stage: int, ep: int) -> tuple[float, float]:
    dense, model = toy("Mixtral"), toy("Mixtral")
    config = with_adamw(stage, ep, **{key: value for key, value in extra.items() if key != "mics"})
    config["zero_optimization"] |= {"mics_shard_size": extra["mics"]} if "mics" in extra else {}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    data = engine._state.axes.data
    for step in range(STEPS):
        engine.backward(loss_of(engine, tokens(data.rank, step)))
        engine.step()
    norm = in_one_process(dense, optimizer_of(dense.parameters(), "adamw"), data.size)
    apart = gap(engine, dense), abs(float(engine.get_global_grad_norm()) - norm) / norm
    engine.destroy()
    return apart


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("extra", "stage", "world", "ep"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, 1, 4, 2),
        ({"tensor_parallel": {"autotp_size": 2}}, 3, 4, 2),
        ({"mics": 2}, 3, 4, 2),
        pytest.param({"mics": 4}, 3, 8, 2, marks=pytest.mark.slow),
    ],
)
def test_with_another_axis(workers: Any, extra: dict[str, Any], stage: int, world: int, ep: int) -> None:
    for difference, norm in workers(world).run(with_another_axis, extra, stage, ep, timeout=180):
        assert difference <= 2e-5 and norm <= 1e-6, (difference, norm)


def born_sharded(stage: int, ep: int) -> float:
    dense, config = toy("Mixtral"), with_adamw(stage, ep)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = toy("Mixtral")
    engine, *_ = deepspeed.initialize(model=model, config=config)
    train(engine, 0, STEPS)
    in_one_process(dense, optimizer_of(dense.parameters(), "adamw"), dist.get_world_size())
    apart = gap(engine, dense)
    engine.destroy()
    return apart


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2)])
def test_a_model_that_was_born_sharded(workers: Any, world: int, ep: int) -> None:
    assert max(workers(world).run(born_sharded, 3, ep, timeout=120)) <= 2e-5


def in_stages(stage: int, ep: int) -> float:
    dense, model = toy("Mixtral"), toy("Mixtral")
    config = with_adamw(stage, ep, pipeline={"stages": 2})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    data = engine._state.axes.data
    for step in range(STEPS):
        ids = tokens(data.rank, step)
        engine.train_batch(iter([{"input_ids": ids, "labels": ids}]))
    in_one_process(dense, optimizer_of(dense.parameters(), "adamw"), data.size)
    own = dict(dense.named_parameters())
    worst = 0.0
    for name, param in engine.module.named_parameters():
        ours = utils.safe_get_full_fp32_param(param)
        if ours is not None:
            worst = max(worst, float((ours - own[name]).detach().abs().max() / own[name].detach().abs().max()))
    engine.destroy()
    return worst


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_with_pipeline_stages(workers: Any, stage: int) -> None:
    assert max(workers(4).run(in_stages, stage, 2, timeout=180)) <= 2e-5


def over_sequences(stage: int) -> float:
    dense, model = toy("Mixtral"), toy("Mixtral")
    engine, *_ = deepspeed.initialize(model=model, config=with_adamw(stage, 2, sequence_parallel_size=2))
    data = engine._state.axes.data
    for step in range(STEPS):
        ids = sequence(data.rank, step)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    optimizer = optimizer_of(dense.parameters(), "adamw")
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(data.size):
            ids = sequence(rank, step)
            (dense(input_ids=ids, labels=ids).loss / data.size).backward()
        nn.utils.clip_grad_norm_(dense.parameters(), CLIP)
        optimizer.step()
    apart = gap(engine, dense)
    engine.destroy()
    return apart


def sequence(rank: int, step: int) -> torch.Tensor:
    return torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize(("world", "stage"), [(2, 1), pytest.param(4, 3, marks=pytest.mark.slow)])
def test_with_ranks_that_share_a_sequence(workers: Any, world: int, stage: int) -> None:
    assert max(workers(world).run(over_sequences, stage, timeout=180)) <= 2e-5


class Listed(nn.Module):
    """Experts whose result is not the sum over choices: the trial finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 6, 8))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.einsum("th,tkhw->tkw", hidden, self.up[index])[..., :6]
        return (out * weights.unsqueeze(-1)).sum(1).tanh()


def planted() -> None:
    with raises(ExpertParallelError, "'0' (Listed)", "differ from the whole"):
        deepspeed.initialize(model=nn.Sequential(Listed()), config=with_adamw(1, 2))


def test_experts_that_do_not_add_up_are_refused(workers: Any) -> None:
    assert [name for name, *_ in find_experts(nn.Sequential(Listed()))] == ["0"]
    workers(2).run(planted, timeout=120)


def empty_rank(recompute: str, stage: int) -> tuple[float, float]:
    """All tokens of all ranks choose experts of rank 0."""
    dense, model = toy("Mixtral"), toy("Mixtral")
    for each in chain(dense.modules(), model.modules()):
        if type(each).__name__ == "MixtralTopKRouter":
            each.register_forward_hook(first_experts)
    if recompute in ("reentrant", "not reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    more = {"activation_checkpointing": {"enabled": True}} if recompute == "engine" else {}
    engine, *_ = deepspeed.initialize(model=model, config=with_adamw(stage, 2, **more))
    engine.train()
    train(engine, 0, STEPS)
    norm = in_one_process(dense, optimizer_of(dense.parameters(), "adamw"), dist.get_world_size())
    apart = gap(engine, dense), abs(float(engine.get_global_grad_norm()) - norm) / norm
    engine.destroy()
    return apart


def first_experts(module: Any, args: Any, output: Any) -> Any:
    logits, weights, index = output
    return logits, weights, torch.arange(index.shape[1]).expand_as(index)


@pytest.mark.parametrize(
    ("recompute", "stage"),
    [
        ("", 2),
        ("not reentrant", 2),
        ("engine", 3),
        *[
            pytest.param(recompute, stage, marks=pytest.mark.slow)
            for recompute in ("reentrant", "not reentrant", "engine")
            for stage in (1, 2, 3)
        ],
    ],
)
def test_a_rank_whose_experts_nobody_chooses(workers: Any, recompute: str, stage: int) -> None:
    for difference, norm in workers(2).run(empty_rank, recompute, stage, timeout=120):
        assert difference <= 2e-5 and norm <= 1e-6


def without_tokens(name: str) -> None:
    """Rank 0 has no token at all in a call of the divided experts; the others have theirs."""
    model = toy(name)
    path, experts, _ = next(find_experts(model))
    whole = copy.deepcopy(experts)
    engine, *_ = deepspeed.initialize(model=model, config=with_adamw(1, 2))
    divided = engine.module.get_submodule(path)
    count = 0 if dist.get_rank() == 0 else 5
    hidden = torch.randn(count, engine.module.config.hidden_size, requires_grad=True)
    index, weights = torch.arange(2 * count).view(count, 2) % whole.num_experts, torch.rand(count, 2)
    result = divided(hidden, index, weights)
    result.sum().backward()
    assert result.shape == hidden.shape and torch.allclose(result, whole(hidden, index, weights), atol=1e-5)
    engine.destroy()


@pytest.mark.parametrize("name", ["Mixtral", pytest.param("GptOss", marks=pytest.mark.slow)])
def test_a_rank_without_any_token(workers: Any, name: str) -> None:
    workers(2).run(without_tokens, name, timeout=120)


class IntegerExperts(nn.Module):
    """Linear experts; with small integers as weights and tokens every product and sum is exact."""

    def __init__(self, count: int = 4, width: int = 6) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(integers(count, width, width))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, choice = (index == expert).nonzero(as_tuple=True)
            out = out.index_add(0, token, hidden[token] @ self.up[expert] * weights[token, choice, None])
        return out


class IntegerModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Parameter(integers(6, 6)), IntegerExperts()

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weights = 2.0 ** (index % 2).float()
        return (self.experts(hidden @ self.first, index, weights) * targets).sum()


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def of_integers(rank: int, step: int) -> tuple[torch.Tensor, ...]:
    seed, count = 100 * step + rank, 3 + rank
    drawn = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(4, generator=drawn)[:2] for _ in range(count)])
    return integers(count, 6, seed=seed), index, integers(count, 6, seed=seed + 1)


def bit_equal(stage: int, ep: int) -> None:
    world = dist.get_world_size()
    dense, model = IntegerModel(), IntegerModel()
    optimizer = torch.optim.SGD(dense.parameters(), lr=2.0**-6)
    same = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    engine, *_ = deepspeed.initialize(model=model, optimizer=same, config=settings(stage, ep, 2, clip=0.0))
    for step in range(2):
        for micro in range(2):
            engine.backward(engine(*of_integers(dist.get_rank(), 2 * step + micro)))
            engine.step()
        optimizer.zero_grad()
        for micro in range(2):
            for rank in range(world):
                (dense(*of_integers(rank, 2 * step + micro)) / (2 * world)).backward()
        optimizer.step()
    for param, other in zip(engine.module.parameters(), dense.parameters(), strict=True):
        assert torch.equal(utils.safe_get_full_fp32_param(param), other)
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "world", "ep"),
    [
        (3, 4, 2),
        *[
            pytest.param(stage, world, ep, marks=pytest.mark.slow)
            for stage in range(4)
            for world in (1, 2, 4)
            for ep in (1, 2, 4)
            if world % ep == 0
        ],
    ],
)
def test_integers_are_bit_equal(workers: Any, stage: int, world: int, ep: int) -> None:
    workers(world).run(bit_equal, stage, ep, timeout=120)


class WideExperts(nn.Module):
    """Experts in bf16 that add up in fp32, and divide by the norm of their input."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(0)).bfloat16())

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(hidden.shape)
        for expert in index.unique().tolist():
            token, choice = (index == expert).nonzero(as_tuple=True)
            rows = hidden[token] / hidden[token].norm(dim=-1, keepdim=True)
            out = out.index_add(0, token, (rows @ self.up[expert]).float() * weights[token, choice, None].float())
        return out


def wide(stage: int) -> None:
    """All tokens are for experts of rank 0: the other's results have the same dtype, and no gradient is NaN."""
    whole, divided = WideExperts(), WideExperts()
    model = nn.Sequential(divided)
    engine, *_ = deepspeed.initialize(model=model, config=with_adamw(stage, 2, bf16={"enabled": True}))
    hidden = torch.randn(5, 6, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16().requires_grad_()
    index, weights = torch.tensor([[0, 1]]).expand(5, 2), torch.full((5, 2), 0.5).bfloat16()
    out = engine.module[0](hidden, index, weights)
    assert out.dtype == torch.float32 and torch.equal(out, whole(hidden, index, weights))
    engine.backward(out.square().mean())
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    grad = utils.safe_get_full_grad(divided.up)
    assert grad is not None and grad.isfinite().all() and grad[2:].eq(0).all() and grad[:2].ne(0).any()
    engine.destroy()


def test_a_rank_without_rows_has_results_of_the_same_kind(workers: Any) -> None:
    workers(2).run(wide, 1, timeout=60)


class Flat(nn.Module):
    """Linear experts stacked in a matrix."""

    def __init__(self, count: int, inner: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count * inner, 6, generator=torch.Generator().manual_seed(1)))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up = self.up.view(self.num_experts, -1, 6)
        each = torch.einsum("th,tkih->tki", hidden, up[index]).square()
        return torch.einsum("tki,tkih,tk->th", each, up[index], weights)


def of_one_shape() -> None:
    """Two layers whose parameters have one shape, and other numbers of experts."""
    whole, divided = [nn.ModuleList([Flat(8, 3), Flat(4, 6)]) for _ in range(2)]
    deepspeed.initialize(model=divided, config=with_adamw(1, 2))
    hidden = torch.randn(5, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    index = torch.tensor([[0, 3]]).expand(5, 2)
    for ours, theirs in zip(divided, whole, strict=True):
        torch.testing.assert_close(ours(hidden, index, torch.ones(5, 2)), theirs(hidden, index, torch.ones(5, 2)))


def test_layers_of_one_shape_with_other_numbers_of_experts(workers: Any) -> None:
    workers(2).run(of_one_shape, timeout=60)
