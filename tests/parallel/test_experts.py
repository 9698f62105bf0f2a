"""Experts divided among ranks: equal to the whole model in one process, at every stage."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import deepspeed
from deepspeed import utils
from deepspeed.errors import DeepSpeedError, ExpertParallelError, MeshError, OptimizerError
from deepspeed.moe.expert_parallel import DividedExperts, find_experts
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


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


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
    for world, ep, accumulation in ((2, 2, 2), (4, 2, 1), (4, 4, 1))
]


@pytest.mark.parametrize(("family", "stage", "world", "ep", "accumulation", "kind"), [*FAST, *SLOW])
def test_a_model_trains_as_the_whole_one(
    workers: Any, family: str, stage: int, world: int, ep: int, accumulation: int, kind: str
) -> None:
    for difference, norm in workers(world).run(equal_to_dense, family, stage, ep, accumulation, kind, timeout=180):
        assert difference <= 2e-5 and norm <= 1e-6, (difference, norm)


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
    workers(2).run(refused)


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
    workers(2).run(planted)


def empty_rank() -> tuple[float, float]:
    """All tokens of all ranks choose experts of rank 0."""
    dense, model = toy("Mixtral"), toy("Mixtral")
    for each in chain(dense.modules(), model.modules()):
        if type(each).__name__ == "MixtralTopKRouter":
            each.register_forward_hook(first_experts)
    engine, *_ = deepspeed.initialize(model=model, config=with_adamw(2, 2))
    train(engine, 0, STEPS)
    norm = in_one_process(dense, optimizer_of(dense.parameters(), "adamw"), dist.get_world_size())
    apart = gap(engine, dense), abs(float(engine.get_global_grad_norm()) - norm) / norm
    engine.destroy()
    return apart


def first_experts(module: Any, args: Any, output: Any) -> Any:
    logits, weights, index = output
    return logits, weights, torch.arange(index.shape[1]).expand_as(index)


def test_a_rank_whose_experts_nobody_chooses(workers: Any) -> None:
    for difference, norm in workers(2).run(empty_rank, timeout=120):
        assert difference <= 2e-5 and norm <= 1e-6
