"""`deepspeed.moe` over ranks: equal to the dense buffer's formulas, and to one process at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import utils
from deepspeed.comm.process_groups.mesh import mesh_for
from deepspeed.errors import CheckpointError
from deepspeed.moe.layer import MoE
from deepspeed.moe.mappings import drop_tokens, gather_tokens
from tests.parallel.tiny import raises
from tests.unit.moe.by_hand import expert_of, route, through

WIDTH, EXPERTS, TOKENS, STEPS, CLIP = 6, 4, 24, 3, 0.05


def layer_of(ep: int, **settings: Any) -> MoE:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return MoE(WIDTH, expert_of(WIDTH), num_experts=EXPERTS, ep_size=ep, min_capacity=2, **settings)


def weights_of(model: nn.Module, seed: int = 5) -> dict[str, torch.Tensor]:
    """Other values for every parameter of a whole model."""
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.5 * torch.randn(value.shape, generator=generator) for name, value in model.state_dict().items()}


def tokens_of(rank: int, step: int = 0) -> torch.Tensor:
    """Another number of them on each rank, uneven over experts."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(TOKENS + 4 * rank, WIDTH, generator=generator) + 0.5


def as_the_buffer(ep: int, k: int, factor: float, drop: bool) -> None:
    """Output, loss and all gradients of one layer in fp64."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh_for({"dp_shard": world})  # the newest one is an earlier test's
    settings = {"k": k, "capacity_factor": factor, "drop_tokens": drop, "top2_2nd_expert_sampling": False}
    layer, twin = layer_of(ep, **settings).double(), layer_of(1, **settings).double()
    layer.set_deepspeed_parallelism()
    twin.load_state_dict(weights_of(twin))
    layer.load_state_dict(weights_of(twin))
    mine = tokens_of(rank).double().requires_grad_()
    torch.manual_seed(9 + rank)
    out, loss, counts = layer(mine)
    (out.square().sum() + loss).backward()
    inside = layer.deepspeed_moe
    local = list(inside.experts.deepspeed_experts._modules)
    first = rank % ep * EXPERTS // ep
    assert local == [str(number) for number in range(first, first + EXPERTS // ep)]
    for other in range(world):
        if ep == 1 and other != rank:
            continue
        tokens = tokens_of(other).double().requires_grad_()
        logits = tokens @ twin.deepspeed_moe.gate.wg.weight.t()
        torch.manual_seed(9 + other)
        random = 1 - torch.rand(logits.shape) if k == 1 and drop else None
        wanted_loss, combine, wanted_counts = route(logits, k, factor, 2, drop=drop, random=random)
        wanted = through(twin.deepspeed_moe.experts.deepspeed_experts, combine, tokens)
        gate = twin.deepspeed_moe.gate.wg.weight
        before = None if gate.grad is None else gate.grad.clone()
        (wanted.square().sum() + wanted_loss).backward()
        if other == rank:
            here = gate.grad if before is None else gate.grad - before
            close(inside.gate.wg.weight.grad, here)
            close(out, wanted)
            close(loss, wanted_loss)
            close(mine.grad, tokens.grad)
            assert torch.equal(counts, wanted_counts)
            assert not drop or factor >= 1 or int((combine != 0).sum()) < int(counts.sum())
    of_twin = dict(twin.named_parameters())
    for name, param in layer.named_parameters():
        if "experts" in name:
            close(param.grad, of_twin[name].grad)


def close(ours: Any, wanted: Any) -> None:
    assert float((ours - wanted).detach().abs().max()) <= 1e-12 * max(1.0, float(wanted.detach().abs().max()))


def all_as_the_buffer(ep: int) -> None:
    for k in (1, 2, 3):
        for factor, drop in ((0.5, True), (1.5, True), (1.0, False)):
            as_the_buffer(ep, k, factor, drop)


@pytest.mark.parametrize("ep", [1, 2])
def test_a_layer_is_the_formula(workers: Any, ep: int) -> None:
    workers(2).run(all_as_the_buffer, ep, timeout=180)


class Net(nn.Module):
    """Layers of different sizes, one of the residual form."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        common: dict[str, Any] = {"min_capacity": 2, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.first = MoE(WIDTH, expert_of(WIDTH), EXPERTS, sizes[0], k=2, capacity_factor=0.8, **common)
        self.second = MoE(WIDTH, expert_of(WIDTH), 2 * EXPERTS, sizes[1], k=1, use_residual=True, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.inner(x)
        out, first, _ = self.first(x)
        out, second, _ = self.second(x + out)
        return (x + out).square().mean() + 0.1 * (first + second)


def whole_net() -> Net:
    model = Net((1, 1))
    model.load_state_dict(weights_of(model))
    return model


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 1e-2}},
        "steps_per_print": None,
        **more,
    }


def in_one_process(model: nn.Module, world: int, steps: int = STEPS) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=1e-2)
    norm = torch.zeros(())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (model(tokens_of(rank, step)) / world).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return float(norm)


def train(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(tokens_of(engine.get_data_parallel_rank(), step)))
        engine.step()


def gap(engine: Any, dense: nn.Module) -> float:
    wanted, worst = dict(dense.named_parameters()), 0.0
    for name, param in engine.module.named_parameters():
        ours, other = utils.safe_get_full_fp32_param(param), wanted[name].detach()
        assert ours is not None
        worst = max(worst, float((ours - other).abs().max() / other.abs().max()))
    return worst


def trains(
    stage: int, sizes: tuple[int, int], born_sharded: bool = False, mesh: dict[str, int] | None = None
) -> tuple[float, float]:
    dense = whole_net()
    with deepspeed.zero.Init(config_dict_or_path=settings(stage), enabled=born_sharded):
        model = Net(sizes)
    engine, *_ = deepspeed.initialize(model=model, config=settings(stage), mpu=mesh_for(mesh) if mesh else None)
    engine.load_module_state_dict(dense.state_dict())
    assert engine.has_moe_layers and engine.num_experts == [EXPERTS, 2 * EXPERTS] and len(engine.moe_layers) == 2
    train(engine, 0, STEPS)
    norm = in_one_process(dense, engine.dp_world_size)
    apart = gap(engine, dense), abs(float(engine.get_global_grad_norm()) - norm) / norm
    engine.destroy()
    return apart


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("stage", "world", "sizes"),
    [
        (0, 2, (2, 1)),
        (1, 2, (2, 2)),
        (2, 4, (2, 4)),
        (3, 2, (2, 2)),
        (3, 4, (4, 2)),
        pytest.param(0, 4, (4, 2), marks=pytest.mark.slow),
        pytest.param(1, 4, (2, 4), marks=pytest.mark.slow),
        pytest.param(3, 4, (1, 2), marks=pytest.mark.slow),
    ],
)
def test_training_is_that_of_one_process(workers: Any, stage: int, world: int, sizes: tuple[int, int]) -> None:
    for difference, norm in workers(world).run(trains, stage, sizes, timeout=180):
        assert difference <= 2e-5 and norm <= 1e-6, (difference, norm)


@pytest.mark.parametrize(("world", "sizes"), [(2, (2, 1)), pytest.param(4, (2, 4), marks=pytest.mark.slow)])
def test_layers_born_sharded(workers: Any, world: int, sizes: tuple[int, int]) -> None:
    for difference, norm in workers(world).run(trains, 3, sizes, True, timeout=180):
        assert difference <= 2e-5 and norm <= 1e-6, (difference, norm)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_along_tp_have_the_same_tokens(workers: Any, stage: int) -> None:
    for difference, norm in workers(4).run(trains, stage, (2, 1), False, {"dp_shard": 2, "tp": 2}, timeout=180):
        assert difference <= 2e-5 and norm <= 1e-6, (difference, norm)


class Stage(nn.Module):
    """A layer of a pipeline; it adds its balance loss to what it passes on."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        common: dict[str, Any] = {"min_capacity": 2, "top2_2nd_expert_sampling": False}
        self.moe = MoE(WIDTH, expert_of(WIDTH), EXPERTS, ep, k=2, **common)

    def forward(self, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, loss = state
        out, aux, _ = self.moe(x)
        return x + out, loss + aux


def piped(sizes: tuple[int, int]) -> float:
    """Stages with layers of different ep sizes, two data-parallel ranks each."""
    from deepspeed.pipe import PipelineModule

    def loss_of(state: Any, labels: torch.Tensor) -> torch.Tensor:
        return (state[0] - labels).square().mean() + 0.1 * state[1].sum()

    def batch(rank: int, step: int) -> Any:
        return (tokens_of(0, 10 * step + rank), torch.zeros(1)), torch.zeros(TOKENS, WIDTH)

    dense = nn.ModuleList([Stage(1), Stage(1)])
    dense.load_state_dict(weights_of(dense))
    config = settings(1, gradient_clipping=0.0)
    model = PipelineModule([Stage(size) for size in sizes], num_stages=2, loss_fn=loss_of, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.load_module_state_dict(dense.state_dict())
    data = engine.mesh.axis("dp_shard").rank
    for step in range(2):
        engine.train_batch(iter([batch(data, step)]))
    optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-2, eps=1e-4, weight_decay=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            state, labels = batch(rank, step)
            (loss_of(dense[1](dense[0](state)), labels) / 2).backward()
        optimizer.step()
    apart = gap(engine, dense)
    engine.destroy()
    return apart


@pytest.mark.slow
def test_stages_with_layers_of_their_own_sizes(workers: Any) -> None:
    assert max(workers(4).run(piped, (2, 1), timeout=240)) <= 2e-5


def goes_on(folder: str, stages: tuple[int, int], sizes: tuple[tuple[int, int], tuple[int, int]]) -> float:
    dense = whole_net()
    engine, *_ = deepspeed.initialize(model=Net(sizes[0]), config=settings(stages[0]))
    engine.load_module_state_dict(dense.state_dict())
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    engine.destroy()
    more = {"zero_optimization": {"stage": stages[1], "stage3_gather_16bit_weights_on_model_save": True}}
    engine, *_ = deepspeed.initialize(model=Net(sizes[1]), config=settings(stages[1]) | more)
    engine.load_checkpoint(folder)
    train(engine, 2, STEPS)
    in_one_process(dense, dist.get_world_size())
    apart = gap(engine, dense)
    assert engine.save_16bit_model(folder, "whole.bin")
    engine.destroy()
    if dist.get_rank() == 0:
        saved = torch.load(Path(folder) / "whole.bin")
        assert set(saved) == set(dense.state_dict())
        for name, value in dense.state_dict().items():
            assert float((saved[name] - value).abs().max()) <= 2e-5 * float(value.abs().max())
    return apart


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("stages", "sizes"), [((2, 3), ((2, 2), (1, 1))), ((3, 1), ((1, 1), (2, 2))), ((0, 2), ((2, 1), (1, 2)))]
)
def test_a_checkpoint_goes_on_with_other_ep_sizes(workers: Any, tmp_path: Path, stages: Any, sizes: Any) -> None:
    assert max(workers(2).run(goes_on, str(tmp_path), stages, sizes, timeout=180)) <= 2e-5


def upstreams_files(folder: Path, old: bool) -> dict[str, torch.Tensor]:
    """A folder of upstream's at stage 0: a model file without experts, and a file for each expert."""
    state = weights_of(Net((1, 1)), seed=8)
    folder.mkdir()
    dense = {name: value for name, value in state.items() if ".deepspeed_experts." not in name}
    counts = [EXPERTS] if old else [EXPERTS, 2 * EXPERTS]
    model = {"module": dense, "num_experts": counts, "optimizer": None, "lr_scheduler": None, "ds_version": "0.19.6"}
    torch.save(
        model | {"global_steps": 7, "skipped_steps": 0, "global_samples": 14}, folder / "mp_rank_00_model_states.pt"
    )
    for number, (layer, count) in enumerate((("first", EXPERTS), ("second", 2 * EXPERTS))):
        for expert in range(count):
            inside = f"{layer}.deepspeed_moe.experts.deepspeed_experts.{expert}."
            values = {name: value for name, value in state.items() if name.startswith(inside)}
            name = f"expert_{expert}_mp_rank_00_model_states.pt"
            path = folder / (name if old else f"layer_{number}_{name}")
            torch.save(values | (torch.load(path) if path.exists() else {}), path)
    return state


def reads(folder: str, stage: int, sizes: tuple[int, int], state: dict[str, torch.Tensor]) -> None:
    engine, *_ = deepspeed.initialize(model=Net(sizes), config=settings(stage))
    path, _ = engine.load_checkpoint(folder, tag="tag", load_optimizer_states=False, load_module_only=True)
    assert path is not None
    for name, param in engine.module.named_parameters():
        assert torch.equal(utils.safe_get_full_fp32_param(param), state[name]), name
    if dist.get_rank() == 0:
        next(Path(folder, "tag").glob("*expert_3_*")).unlink()
    dist.barrier()
    with raises(CheckpointError, "expert 3"):
        engine.load_checkpoint(folder, tag="tag", load_module_only=True)
    engine.destroy()


@pytest.mark.parametrize(("stage", "sizes", "old"), [(1, (1, 1), True), (3, (2, 2), False)])
def test_upstreams_files_of_experts(workers: Any, tmp_path: Path, stage: int, sizes: Any, old: bool) -> None:
    state = upstreams_files(tmp_path / "tag", old)
    workers(2).run(reads, str(tmp_path), stage, sizes, state, timeout=120)


def names_of_groups() -> None:
    from deepspeed.utils import groups

    engine, *_ = deepspeed.initialize(model=Net((2, 4)), config=settings(1))
    rank = dist.get_rank()
    assert groups._get_expert_parallel_group_ranks("ep_size_2") == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == [rank % 2, rank % 2 + 2]
    assert (
        groups._get_expert_parallel_rank("ep_size_2") == groups._get_expert_broadcast_src_rank("ep_size_2") == rank % 2
    )
    assert groups._get_expert_parallel_world_size("ep_size_4") == groups._get_max_expert_size() == 4
    assert groups._get_expert_data_parallel_world_size("ep_size_2") == 2
    assert groups._get_expert_data_parallel_rank("ep_size_2") == rank // 2
    assert groups._get_max_expert_size_name() == "ep_size_4" and groups._get_expert_model_parallel_world_size() == 1
    group = groups._get_expert_parallel_group("ep_size_2")
    assert dist.get_process_group_ranks(group) == groups._get_expert_parallel_group_ranks("ep_size_2")
    assert dist.get_world_size(groups._get_max_expert_parallel_group()) == 4
    assert group is engine.expert_parallel_group["ep_size_2"] is engine.module.first.deepspeed_moe.ep_group
    assert dist.get_world_size(engine.expert_data_parallel_group["ep_size_4"]) == 1
    with raises(AssertionError, "'ep_size_3'"):
        groups._get_expert_parallel_rank("ep_size_3")
    engine.destroy()


def test_groups_of_experts(workers: Any) -> None:
    workers(4).run(names_of_groups, timeout=120)


def shares_tokens() -> None:
    mesh = mesh_for({"tp": 2})
    x = torch.arange(12.0).view(4, 3).requires_grad_()
    share = drop_tokens(x)
    assert torch.equal(share, x[mesh.coordinates["tp"] * 2 :][:2])
    whole = gather_tokens(share * (1 + mesh.coordinates["tp"]))
    assert torch.equal(whole, torch.cat([x[:2], 2 * x[2:]]))
    whole.sum().backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 1, 2, 2]).view(4, 1).expand(4, 3))
    with raises(AssertionError, "no multiple of the 2 ranks"):
        drop_tokens(torch.zeros(3, 2))


def test_tokens_of_slices_are_shared_out(workers: Any) -> None:
    workers(2).run(shares_tokens)
