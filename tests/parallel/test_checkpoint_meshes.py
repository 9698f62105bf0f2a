"""Engines whose ranks hold slices and stages of a model: what they save, any other mesh loads, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.checkpoint import cli
from deepspeed.checkpoint.compat.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.errors import CheckpointError
from deepspeed.zero.api.gathered_parameters import GatheredParameters
from deepspeed.zero.layout.placement import Cut, Placement, Relation, place
from tests.parallel.tiny import adamw, raises, start

Mesh = tuple[int, int, int]  # stages, data-parallel ranks, slices
# name, stage (of two; -1: on both), global shape, cut dim
TENSORS: list[tuple[str, int, tuple[int, ...], int | None]] = [
    ("embed", -1, (11, 6), 0),
    ("first.up", 0, (12, 6), 0),
    ("first.down", 0, (6, 12), 1),
    ("first.norm", 0, (7,), None),
    ("second.up", 1, (12, 5), 0),
    ("second.bias", 1, (12,), 0),
    ("second.frozen", 1, (5, 12), 1),
    ("second.scale", 1, (), None),
]
STEPS, AFTER = 3, 1  # micro-steps; two make a window


def placement(shape: tuple[int, ...], dim: int | None, at: int, of: int) -> Placement:
    """Even slices, filled up with padding."""
    if dim is None or of == 1:
        return Placement((), {"pp": Relation.ABSENT})
    size = shape[dim]
    step = -(-size // of)
    begin, end = min(at * step, size), min((at + 1) * step, size)
    parts = ((begin, end - begin),) if begin < end else ()
    parts += ((-1, step - end + begin),) if end - begin < step else ()
    return Placement((Cut(dim, size, parts),), {"tp": Relation.SHARD, "pp": Relation.ABSENT})


def local(whole: torch.Tensor, placed: Placement) -> torch.Tensor:
    for cut in placed.cuts:
        index = torch.cat([torch.arange(s, s + n) if s >= 0 else torch.full((n,), -1) for s, n in cut.segments])
        zero = (index < 0).view(-1, *[1] * (whole.dim() - 1 - cut.dim))
        whole = whole.index_select(cut.dim, index.clamp(min=0)).masked_fill(zero, 0)
    return whole.contiguous()


def values(name: str, shape: tuple[int, ...], kind: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * kind + [one for one, *_ in TENSORS].index(name))
    return torch.randint(-8, 9, shape, generator=draw).float() / 8


class Sliced(nn.Module):
    """The tensors of one stage and slice; every element has its own gradient, whatever the mesh."""

    def __init__(self, mesh: Mesh, at: Mesh, seed: int) -> None:
        super().__init__()
        self.weights = nn.ParameterDict()
        self.targets = {}
        for name, stage, shape, dim in TENSORS:
            if mesh[0] > 1 and stage not in (-1, at[0]):
                continue
            placed = placement(shape, dim, at[2], mesh[2])
            if stage == -1:
                placed = Placement(placed.cuts, {"tp": Relation.SHARD, "pp": Relation.REPLICATE})
            key = name.replace(".", "_")
            self.weights[key] = nn.Parameter(local(values(name, shape, seed), placed), "frozen" not in name)
            place(self.weights[key], placed)
            self.targets[key] = local(values(name, shape, 9), placed)
        table = Placement(placement((12, 2), 0, at[2], mesh[2]).cuts)
        self.register_buffer("table", place(local(torch.arange(24.0).view(12, 2) + seed, table), table))
        self.register_buffer("turned", (torch.arange(6.0).view(2, 3) + seed).t())
        if mesh[0] == 1 or at[0] == 1:
            self.register_buffer("last", torch.full((3,), float(seed)))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return torch.stack([(w * self.targets[key]).sum() for key, w in self.weights.items()]).sum() * scale


def engine_of(mesh: Mesh, stage: int, seed: int, optimizer: Any = adamw, **settings: Any) -> tuple[Any, Any]:
    """An engine on a mesh, built from a unit of the kind that Megatron has."""
    shape = [range(size) for size in mesh]
    ranks = {at: rank for rank, at in enumerate(itertools.product(*shape))}
    at: Any = next(at for at, rank in ranks.items() if rank == dist.get_rank())
    unit = {}
    for dim, name in enumerate(("pipeline_model_parallel", "data_parallel", "tensor_model_parallel")):
        rows = {}
        for one, rank in ranks.items():
            rows.setdefault(tuple(c for i, c in enumerate(one) if i != dim), []).append(rank)
        groups = {key: dist.new_group(row) for key, row in rows.items()}
        group = groups[tuple(c for i, c in enumerate(at) if i != dim)]
        unit[f"get_{name}_group"] = lambda group=group: group
        unit[f"get_{name}_world_size"] = lambda dim=dim: mesh[dim]
        unit[f"get_{name}_rank"] = lambda dim=dim: at[dim]
    settings["train_micro_batch_size_per_gpu"] = 2 // mesh[1]  # equal batches, so that windows go on
    engine = start(stage, Sliced(mesh, at, seed), optimizer, accumulation=2, mpu=SimpleNamespace(**unit), **settings)
    return engine, at


def train(engine: Any, at: Mesh, dp: int, first: int, count: int) -> None:
    """Data-parallel ranks see other samples, whose mean is the same on every mesh."""
    for step in range(first, first + count):
        scale = float(step + 1 + (2 * at[1] - 1 if dp == 2 else 0))
        engine.backward(engine(torch.tensor([scale])).sum())
        engine.step()


def _copy(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.clone()


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

    found = dict(engine.module.named_buffers())
    for name, param in engine.module.named_parameters():
        master = safe_get_full_fp32_param(param)
        with GatheredParameters(param):  # of this slice, with padding
            found[f"{name} slice"] = param.detach().float().clone()
        if master is not None:
            found[name] = master.clone()
        if param.requires_grad:
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {key}"] = _copy(safe_get_full_optimizer_state(param, key))
            gradient = safe_get_full_grad(param)
            found[f"{name} gradient"] = torch.zeros_like(master) if gradient is None else gradient.clone()
    return found


def save(folder: str, mesh: Mesh, stage: int) -> Any:
    engine, at = engine_of(mesh, stage, 1)
    with engine:
        train(engine, at, mesh[1], 0, STEPS)
        engine.save_checkpoint(folder, "tag", client_state={"x": 1})
        consolidated = engine._consolidated_16bit_state_dict()
        state = {name: tensor.clone() for name, tensor in state_of(engine).items()}
        train(engine, at, mesh[1], STEPS, AFTER)
        return state, consolidated, state_of(engine)


def load(folder: str, mesh: Mesh, stage: int) -> Any:
    engine, at = engine_of(mesh, stage, 2)
    with engine:
        path, client = engine.load_checkpoint(folder)
        assert path and client["x"] == 1 and engine.micro_steps == STEPS
        state = {name: tensor.clone() for name, tensor in state_of(engine).items()}
        train(engine, at, mesh[1], STEPS, AFTER)
        return state, engine._consolidated_16bit_state_dict(), state_of(engine)


def joined(mesh: Mesh, states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Global tensors from those of all ranks; copies must be equal."""
    shapes = {f"weights.{name.replace('.', '_')}": (shape, dim) for name, _, shape, dim in TENSORS}
    shapes |= {"table": ((12, 2), 0), "turned": ((3, 2), None), "last": ((3,), None)}
    whole: dict[str, torch.Tensor] = {}
    for at, state in zip(itertools.product(*map(range, mesh)), states, strict=True):
        for name, tensor in state.items():
            shape, dim = shapes[name.split()[0]]
            placed, into = placement(shape, dim, at[2], mesh[2]), whole.setdefault(name, torch.full(shape, torch.nan))
            if tensor.shape == shape:
                assert into.isnan().all() or torch.equal(into, tensor), name
                into.copy_(tensor)
                continue
            cut, here = placed.cuts[0], 0
            for begin, length in cut.segments:
                part = tensor.narrow(cut.dim, here, length)
                here += length
                if begin < 0:
                    assert not part.any(), f"padding of {name}"
                else:
                    there = into.narrow(cut.dim, begin, length)
                    assert there.isnan().all() or torch.equal(there, part), name
                    there.copy_(part)
    return whole


def check(workers: Any, folder: Path, before: tuple[Mesh, int], after: tuple[Mesh, int]) -> None:
    size = {mesh: mesh[0] * mesh[1] * mesh[2] for mesh, _ in (before, after)}
    saved = workers(size[before[0]]).run(save, str(folder), *before, timeout=240)
    loaded = workers(size[after[0]]).run(load, str(folder), *after, timeout=240)
    ours, theirs = (joined(mesh, [one[0] for one in all_]) for (mesh, _), all_ in ((before, saved), (after, loaded)))
    assert ours.keys() == theirs.keys() and not any(tensor.isnan().any() for tensor in ours.values())
    wrong = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not wrong, wrong
    later = [joined(mesh, [one[2] for one in all_]) for (mesh, _), all_ in ((before, saved), (after, loaded))]
    assert all(torch.allclose(later[0][name], later[1][name], rtol=1e-6, atol=1e-7) for name in ours)
    exported = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert cli.main(["verify", str(folder)]) == 0
    ours |= {name.removesuffix(" slice"): tensor for name, tensor in ours.items() if name.endswith(" slice")}
    for name, tensor in saved[0][1].items():
        assert torch.equal(tensor, ours[name].to(tensor.dtype)) and torch.equal(exported[name], ours[name])
    assert saved[0][1].keys() == exported.keys() == loaded[0][1].keys()
    assert all(one[1] is None for one in saved[1:])


PAIRS = [
    (((1, 1, 2), 1), ((1, 1, 3), 3)),
    (((2, 1, 2), 3), ((1, 2, 1), 0)),
    (((1, 2, 1), 2), ((2, 1, 2), 2)),
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_another_mesh_loads_it(workers: Any, tmp_path: Path, before: Any, after: Any) -> None:
    check(workers, tmp_path, before, after)


MESHES = [mesh for mesh in itertools.product((1, 2), (1, 2), (1, 2, 3)) if mesh[0] * mesh[1] * mesh[2] <= 4]


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(20))
def test_random_pairs_of_meshes(workers: Any, tmp_path: Path, trial: int) -> None:
    import random

    draw = random.Random(trial)
    check(workers, tmp_path, *[(draw.choice(MESHES), draw.randint(0, 3)) for _ in range(2)])


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def whole_state(folder: str, mesh: Mesh, action: str) -> None:
    engine, at = engine_of(mesh, 1, 1 if action == "save" else 2, adafactor)
    with engine:
        if action == "save":
            train(engine, at, mesh[1], 0, 2)
            engine.save_checkpoint(folder)
        elif action == "load":
            engine.load_checkpoint(folder)
            state = engine.basic_optimizer.state
            assert any("row_var" in one and one["row_var"].any() for one in state.values())
        else:
            before = engine.module.weights["embed"].detach().clone()
            with raises(CheckpointError, "row_var", "'weights.", "split in another way"):
                engine.load_checkpoint(folder)
            assert torch.equal(engine.module.weights["embed"], before)
            engine.load_checkpoint(folder, load_optimizer_states=False)
            assert not torch.equal(engine.module.weights["embed"], before)


def test_state_with_a_shape_of_its_own_needs_the_same_cuts(workers: Any, tmp_path: Path) -> None:
    workers(2).run(whole_state, str(tmp_path), (1, 1, 2), "save", timeout=240)
    workers(2).run(whole_state, str(tmp_path), (1, 1, 2), "load", timeout=240)
    workers(1).run(whole_state, str(tmp_path), (1, 1, 1), "refuse", timeout=240)


def refuse_upstream(folder: str) -> None:
    engine, _ = engine_of((1, 1, 2), 1, 1, checkpoint={"format": "deepspeed"})
    with engine, raises(CheckpointError, "slices of the model", "ds_checkpoint"):
        engine.save_checkpoint(folder)


def test_upstreams_files_are_refused_where_cuts_are(workers: Any, tmp_path: Path) -> None:
    workers(2).run(refuse_upstream, str(tmp_path), timeout=240)
    assert not any(tmp_path.iterdir())
