"""Simulated slices and stages over a mesh: gradients, norm, clipping, skipped steps, edits equal one dense process."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed import utils, zero
from deepspeed.comm.process_groups.mesh import Mesh, mesh_for
from deepspeed.errors import DeepSpeedError, MeshError
from tests.parallel.cuts import TIED, Slices, Twin, share_of
from tests.parallel.tiny import raises, said

# sizes, blocks, tied weight, second stage empty
MESHES: dict[str, tuple[dict[str, int], int, bool, bool]] = {
    "tp2": ({"tp": 2}, 2, True, False),
    "sp2": ({"sp": 2}, 1, True, False),
    "pp2": ({"pp": 2}, 2, True, False),
    "pp2-empty": ({"pp": 2}, 1, False, True),
    "dp2-tp2": ({"dp_shard": 2, "tp": 2}, 2, True, False),
    "dp2-pp2": ({"dp_shard": 2, "pp": 2}, 2, True, False),
    "pp2-tp2": ({"pp": 2, "tp": 2}, 2, True, False),
    "sp2-tp2": ({"sp": 2, "tp": 2}, 1, True, False),
    "pp2-empty-dp2": ({"pp": 2, "dp_shard": 2}, 1, False, True),
    "tp3": ({"tp": 3}, 2, True, False),
    "hybrid-tp2": ({"dp_replicate": 2, "tp": 2}, 2, True, False),
    "hybrid-pp2": ({"dp_replicate": 2, "pp": 2}, 2, True, False),
    "dp2-tp3": ({"dp_shard": 2, "tp": 3}, 2, True, False),
    "pp2-tp3": ({"pp": 2, "tp": 3}, 2, True, False),
    "pp2-dp2-tp2": ({"pp": 2, "dp_shard": 2, "tp": 2}, 2, True, False),
    "dp2-sp2-tp2": ({"dp_shard": 2, "sp": 2, "tp": 2}, 2, True, False),
    "pp2-dp2-sp2": ({"pp": 2, "dp_shard": 2, "sp": 2}, 2, True, False),
    "hybrid-dp2-tp2": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 2, True, False),
    "hybrid-sp2-pp2": ({"dp_replicate": 2, "sp": 2, "pp": 2}, 2, True, False),
}
FAST = {"tp2", "sp2", "pp2", "pp2-empty", "dp2-tp2", "pp2-tp2", "hybrid-pp2"}
ACCUMULATION, WINDOWS = 2, 3


def ranks_of(name: str) -> int:
    return torch.tensor(list(MESHES[name][0].values())).prod().item()  # type: ignore[return-value]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    # An empty stage has nothing to update, and torch takes no empty list.
    return torch.optim.SGD([{"params": list(parameters)}], lr=0.25, momentum=0.5)


def start(mesh: Mesh, model: Slices, stage: int, clip: float, precision: str = "fp32", **zero: Any) -> Any:
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "gradient_clipping": clip,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config, mpu=mesh)
    return engine


def sample_of(mesh: Mesh) -> int:
    at = mesh.coordinates
    return at["dp_replicate"] * mesh.size("dp_shard") + at["dp_shard"]


def backward(engine: Any, mesh: Mesh, loss: torch.Tensor) -> None:
    """Of parts of a loss: those of a sequence's ranks are summed."""
    parts = mesh.size("sp")
    engine.backward(loss, num_items=None if parts == 1 else 1 / parts)


@contextlib.contextmanager
def built(name: str, stage: int, clip: float, exact: bool, precision: str = "fp32") -> Any:
    sizes, blocks, tied, empty = MESHES[name]
    mesh = Mesh(sizes)
    twin = Twin(mesh, blocks, tied, exact, clip, momentum)
    with start(mesh, Slices(mesh, blocks, tied, empty, exact), stage, clip, precision) as engine:
        yield mesh, twin, engine


def trained(name: str, stage: int, clip: float, exact: bool) -> dict[str, float]:
    """Largest difference by what is compared, after some windows."""
    found = {"gradient": 0.0, "value": 0.0, "norm": 0.0}
    with built(name, stage, clip, exact) as (mesh, twin, engine):
        for window in range(WINDOWS):
            steps = [ACCUMULATION * window + i for i in range(ACCUMULATION)]
            for step in steps:
                backward(engine, mesh, engine(step, sample_of(mesh)))
                engine.step()
            twin.window(steps)
            found["norm"] = max(found["norm"], abs(engine.get_global_grad_norm() - twin.norm) / twin.norm)
        for key, param in engine.module.named_parameters():
            ours, wanted = utils.safe_get_full_fp32_param(param), twin.params[key].detach()
            if ours is None:
                assert not param.requires_grad
                continue
            with zero.GatheredParameters(param):
                slices = [(ours, wanted), (param, share_of(mesh, key, wanted, twin.kinds))]  # with padding
                gaps = [(a - b).abs().max().item() / (b.abs().max().item() or 1.0) for a, b in slices]
            found["value"] = max(found["value"], *gaps)
        assert engine.world_size == mesh.world and engine.dp_world_size == mesh.size("dp_replicate", "dp_shard")
        assert engine.global_samples == WINDOWS * ACCUMULATION * engine.dp_world_size
    return found


def stages_of(name: str) -> tuple[int, ...]:
    return (3,) if "hybrid" in name else (0, 1, 2, 3)


CELLS = [
    pytest.param(name, stage, clip, exact, marks=() if name in FAST and exact == (clip > 0) else pytest.mark.slow)
    for name in MESHES
    for stage in stages_of(name)
    for clip in (0.0, 16.0)
    for exact in (True, False)
]


@pytest.mark.drawn(8)
@pytest.mark.parametrize(("name", "stage", "clip", "exact"), CELLS)
def test_slices_equal_the_dense_model(workers: Any, name: str, stage: int, clip: float, exact: bool) -> None:
    for found in workers(ranks_of(name)).run(trained, name, stage, clip, exact):
        assert all(gap <= (0.0 if exact else 1e-6) for gap in found.values()), found


def overflowed(name: str, stage: int) -> None:
    """A gradient that is not finite on one rank skips the step on all, and leaves every bit."""
    with built(name, stage, 1.0, True, "bf16") as (mesh, _, engine):
        before = [utils.safe_get_full_fp32_param(p).clone() for p in engine.module.parameters() if p.requires_grad]
        last = mesh.rank == mesh.world - 1
        for step in range(ACCUMULATION):
            loss = engine(step, sample_of(mesh))
            spoilt = [m for m in engine.module.modules() if dict(m.named_parameters(recurse=False))]
            backward(engine, mesh, loss * float("inf") if last and spoilt else loss)
            engine.step()
        assert engine.skipped_steps == 1 and not engine.was_step_applied()
        after = [utils.safe_get_full_fp32_param(p) for p in engine.module.parameters() if p.requires_grad]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["pp2-tp2", "dp2-tp2"])
def test_one_overflow_skips_everywhere(workers: Any, name: str, stage: int) -> None:
    workers(4).run(overflowed, name, stage)


# -- a client's unit --------------------------------------------------------------------------------------------------


class Unit:
    """A model-parallel unit of one family, over groups made here."""

    def __init__(self, tp: int, pp: int, family: str) -> None:
        size, me = dist.get_world_size(), dist.get_rank()
        dp = size // (tp * pp)
        grid = torch.arange(size).view(pp, dp, tp)
        names = {"megatron": ("tensor_model_parallel", "pipeline_model_parallel"), "old": ("model_parallel", None)}
        for unit, rows in zip(
            (names[family][0], "data_parallel", names[family][1]),
            (grid.reshape(-1, tp), grid.transpose(1, 2).reshape(-1, dp), grid.permute(1, 2, 0).reshape(-1, pp)),
            strict=True,
        ):
            for row in rows.tolist():
                group = dist.new_group(row)
                if me in row and unit is not None:
                    setattr(self, f"get_{unit}_group", lambda group=group: group)
                    setattr(self, f"get_{unit}_rank", lambda row=row: row.index(me))
                    setattr(self, f"get_{unit}_world_size", lambda row=row: len(row))


def with_unit(family: str, tp: int, pp: int, stage: int) -> tuple[float, ...]:
    import deepspeed
    from deepspeed.comm.process_groups.mesh import Mesh

    unit = Unit(tp, pp, family)
    mesh = Mesh.of_unit(unit)
    assert (mesh.size("tp"), mesh.size("pp")) == (tp, pp)
    twin = Twin(mesh, 2, True, True, 1.0, momentum)
    model = Slices(mesh, 2, True, False, True)
    config = {
        "train_batch_size": ACCUMULATION * mesh.size("dp_shard"),
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config, mpu=unit)
    with engine:
        for step in range(ACCUMULATION):
            backward(engine, mesh, engine(step, sample_of(mesh)))
            engine.step()
        twin.window(list(range(ACCUMULATION)))
        from deepspeed.utils import groups

        assert groups.get_tensor_model_parallel_world_size() == tp
        assert groups.get_data_parallel_world_size() == mesh.size("dp_shard")
        assert groups.get_tensor_model_parallel_rank() == mesh.coordinates["tp"]
        return engine.get_global_grad_norm() - twin.norm, engine.mp_world_size


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("family", "tp", "pp"), [("megatron", 2, 2), ("old", 2, 1)])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_clients_unit_makes_the_mesh(workers: Any, family: str, tp: int, pp: int, stage: int) -> None:
    assert workers(4).run(with_unit, family, tp, pp, stage) == [(0.0, tp * pp)] * 4


def contradictions() -> None:
    unit = Unit(2, 1, "old")
    for more, words in (
        ({"data_parallel_size": 4}, ("data_parallel_size", "mpu")),
        ({"mesh": {"dp_shard": 3}, "zero_optimization": {"stage": 3}}, ("mesh.dp_shard", "3")),
    ):
        with raises(DeepSpeedError, *words):
            import deepspeed

            model = torch.nn.Linear(2, 2)
            config = {"train_micro_batch_size_per_gpu": 1, **more}
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=unit)
    mesh = Mesh({"dp_shard": 2, "tp": 2})
    with raises(MeshError, "weight", "place"):  # an uncut matrix that differs in shape between slices
        start(mesh, torch.nn.Linear(2, 2 + mesh.coordinates["tp"]), 1, 0.0)  # type: ignore[arg-type]


def test_contradictions_are_named(workers: Any) -> None:
    workers(4).run(contradictions)


def edited(stage: int) -> None:
    """An edit of one rank reaches every rank that has the parameter, and no other slice."""
    with built("pp2-tp2", stage, 0.0, True) as (mesh, _, engine):
        params = dict(engine.module.named_parameters())
        tied = params[TIED]
        with zero.GatheredParameters(tied, modifier_rank=mesh.axis("pp").ranks[0]), torch.no_grad():
            tied.fill_(float(mesh.rank))
        whole = utils.safe_get_full_fp32_param(tied).chunk(2)  # of the first stage's two slices
        assert all(part.eq(float(slice_)).all() for slice_, part in enumerate(whole))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_edits_reach_all_copies(workers: Any, stage: int) -> None:
    workers(4).run(edited, stage)


def seen_from_outside(stage: int) -> None:
    """What is said at the start, copies of parameters, estimates and accessors read the mesh and its placements."""
    import contextlib
    import copy
    import io

    from deepspeed.zero.api.memory_estimate import estimate_zero3_model_states_mem_needs_all_live as estimate
    from deepspeed.zero.layout.placement import WHOLE, placement_of

    with said() as lines, built("dp2-tp2", stage, 0.0, True) as (mesh, _, engine):
        model = engine.module
        assert (mesh.rank != 0) or any(
            "mesh: pp 1 | dp_replicate 1 | dp_shard 2 (0,2) | sp 1 | tp 2 (0,1)" in line for line in lines
        )
        rows = {name: placement_of(param) for name, param in model.named_parameters()}
        assert any(row is not WHOLE for row in rows.values())
        for name, param in model.named_parameters():
            copied = copy.deepcopy(param)
            assert placement_of(copied) is rows[name] and type(copied) is torch.nn.Parameter
            found = utils.safe_get_full_fp32_param(param) if param.requires_grad else None
            shape = rows[name].global_shape(getattr(param, "ds_shape", param.shape))
            assert found is None or found.shape == shape
            if found is not None:
                utils.safe_set_full_fp32_param(param, found + 1)
                assert torch.equal(utils.safe_get_full_fp32_param(param), found + 1)
                with raises(DeepSpeedError, "shape"):
                    utils.safe_set_full_fp32_param(param, torch.zeros(3, 3))
        tables = []
        for arguments in ({}, {"model_parallel": 1}, {"model_parallel": 2}):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                estimate(engine.module, 4, 1, **arguments)
            tables.append(out.getvalue())
        assert tables[0] == tables[2]
        with raises(DeepSpeedError, "4 rank(s)", "3 slices"):
            estimate(engine.module, 4, 1, model_parallel=3)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_placements_are_seen_from_outside(workers: Any, stage: int) -> None:
    workers(4).run(seen_from_outside, stage)


def experts() -> None:
    rank, mesh = dist.get_rank(), mesh_for({"dp_shard": 2, "tp": 2})
    assert mesh.axis("ep", ep=2).ranks == ((0, 2) if rank in (0, 2) else (1, 3))
    assert mesh.axis("edp", ep=2).ranks == (rank,) and mesh.axis("ep", "tp", ep=2).ranks == (0, 1, 2, 3)
    assert mesh.axis("ep", ep=1).ranks == (rank,)
    assert mesh.axis("edp", ep=1).ranks == ((0, 2) if rank in (0, 2) else (1, 3))
    mesh = mesh_for({"dp_replicate": 2, "sp": 2})
    assert mesh.axis("ep", ep=2).ranks == ((0, 1) if rank < 2 else (2, 3)) and mesh.axis("edp", ep=2).ranks == (rank,)
    assert mesh.axis("dp_replicate", "edp", ep=2).ranks == (rank % 2, rank % 2 + 2)
    with raises(MeshError, "ep 4", "2 rank(s) of dp_shard x sp", "[1, 2]"):
        mesh.axis("ep", ep=4)


def test_experts_cut_data_and_sequence_ranks_anew(workers: Any) -> None:
    workers(4).run(experts)
