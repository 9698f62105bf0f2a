"""`deepspeed.zero` and the `safe_*` accessors against a dense model, at every stage and precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import utils
from deepspeed.errors import ArgumentError, ShardedParameterError, UsageError
from deepspeed.zero.parameters.parameter import ShardedParameter
from tests.parallel.tiny import (
    STAGES,
    WIDTH,
    Tiny,
    adamw,
    expect_close,
    loss_of,
    masters,
    micro_step,
    raises,
    reference,
    rows,
    start,
    tiny,
)
from tests.parity.configs import config

RANKS = 2


def dense(module: nn.Module) -> dict[str, torch.Tensor]:
    """The values of all parameters, gathered one by one."""
    found = {}
    for name, param in module.named_parameters():
        with deepspeed.zero.GatheredParameters(param):
            found[name] = param.detach().float().clone()
    return found


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().float().clone() for name, p in module.named_parameters()}


def trained_like_dense(model: nn.Module, **settings: Any) -> None:
    twin = reference([[0], [1]], RANKS)
    with start(3, model, **settings) as engine:
        micro_step(engine, 0)
        micro_step(engine, 1)
        expect_close(masters(engine), twin.parameters())


# -- zero.Init --------------------------------------------------------------------------------------------------------


class Nested(Tiny):
    """Changes in its `__init__` what its parent made, and is born with a value per rank."""

    def __init__(self) -> None:
        super().__init__()
        with deepspeed.zero.GatheredParameters(self.out.bias, modifier_rank=0), torch.no_grad():
            self.out.bias.fill_(1.0 + dist.get_rank())
        layers: Any = self.layers
        with torch.no_grad():  # parts of what is sharded by now; the first rank's draw counts
            layers[0][0].weight[1].fill_(5.0 + dist.get_rank())
            layers[0][0].weight.t()[2, 3:].zero_()
            layers[1][0].weight[:, ::2] = 7.0 + dist.get_rank()
        self.own = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.register_buffer("table", torch.full((3,), float(dist.get_rank())))


def births() -> None:
    wanted = values(tiny())
    settings = config(3, tiny(), zero={"reduce_bucket_size": "auto"}, train_batch_size="auto")
    for how in ({"config_dict_or_path": settings}, {"config": settings}, {}):
        with deepspeed.zero.Init(**how):
            model = tiny()
        assert all(isinstance(p, ShardedParameter) for p in model.parameters()), how
        assert all(p.ds_tensor.numel() < p.ds_numel for p in model.parameters())
        expect_close(dense(model), wanted, 0.0, at=how)
    assert type(tiny().out.weight) is nn.Parameter  # outside, modules are born whole again
    trained_like_dense(model)
    with deepspeed.zero.Init(), deepspeed.zero.Init(dtype=torch.bfloat16):
        inner = tiny()
    assert inner.out.weight.dtype == torch.bfloat16
    with deepspeed.zero.Init(config={"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}):
        assert tiny().out.weight.dtype == torch.bfloat16
    with deepspeed.zero.Init(enabled=False):
        assert type(tiny().out.weight) is nn.Parameter


def test_models_are_born_sharded(workers: Any) -> None:
    workers(RANKS).run(births)


def further_births() -> None:
    model = tiny(seed=dist.get_rank())  # `module=`: an existing model, rank 0's values
    deepspeed.zero.Init(module=model)
    expect_close(dense(model), values(tiny()), 0.0)
    trained_like_dense(model)
    with deepspeed.zero.Init():
        nested = Nested()
        nested.out.apply(lambda m: nn.init.constant_(m.weight, 0.5))  # on whole parameters
    found = dense(nested)
    assert found["out.bias"].eq(1.0).all() and found["own"].eq(2.0).all() and found["out.weight"].eq(0.5).all()
    assert nested.table.eq(0.0).all()
    parts, every = found["layers.0.0.weight"], found["layers.1.0.weight"]
    assert parts[1].eq(5.0).all() and parts[3:, 2].eq(0.0).all()
    assert every[:, ::2].eq(7.0).all() and not every[:, 1::2].eq(7.0).any()
    with raises(ShardedParameterError, "zero_"):  # after birth, such a write would be lost
        nested.get_parameter("layers.0.0.weight").data[1].zero_()
    with raises(ArgumentError, "nvme", "nvme_path"):
        deepspeed.zero.Init(remote_device="nvme")
    with deepspeed.zero.Init():  # initialize itself is not under the context
        engine = start(1, tiny(), optimizer=adamw)
    micro_step(engine, 0)
    engine.destroy()


def test_existing_nested_and_refused(workers: Any) -> None:
    workers(RANKS).run(further_births)


# -- GatheredParameters -----------------------------------------------------------------------------------------------


def gathers() -> None:
    wanted = values(tiny())
    rank = dist.get_rank()
    for stage in STAGES:
        with start(stage) as engine:
            out, layers = engine.module.out, engine.module.layers
            plain = nn.Parameter(torch.ones(2))
            for asked in (out.weight, [out.weight, out.bias, out.weight, plain], (p for p in out.parameters()), []):
                with deepspeed.zero.GatheredParameters(asked):
                    if asked != []:
                        assert torch.equal(out.weight.detach(), wanted["out.weight"])
                        assert not isinstance(out.weight, ShardedParameter)
                assert isinstance(out.weight, ShardedParameter) == (stage == 3)
            with deepspeed.zero.GatheredParameters(out.weight), deepspeed.zero.GatheredParameters(out.weight):
                assert torch.equal(out.weight.data, wanted["out.weight"])
            with deepspeed.zero.GatheredParameters(out.weight, enabled=False):
                assert isinstance(out.weight, ShardedParameter) == (stage == 3)
            with deepspeed.zero.GatheredParameters(list(out.parameters()), modifier_rank=1):
                with torch.no_grad():
                    out.weight.fill_(3.0 + rank)  # rank 1's counts
            assert torch.equal(dense(engine.module)["out.weight"], torch.full((3, WIDTH), 4.0)), stage
            assert torch.equal(masters(engine)["out.weight"], torch.full((3, WIDTH), 4.0)), stage
            if stage == 3:
                with deepspeed.zero.GatheredParameters(layers[0].parameters()):
                    with torch.no_grad():
                        layers[0][0].weight.zero_()  # nobody's: lost
                expect_close({"w": dense(layers)["0.0.weight"]}, {"w": wanted["layers.0.0.weight"]}, 0.0)
                with raises(ShardedParameterError, "out.weight", "GatheredParameters"), torch.no_grad():
                    out.weight.zero_()
            with raises(ArgumentError, "modifier_rank"):
                with deepspeed.zero.GatheredParameters(out.weight, modifier_rank=7):
                    pass
            micro_step(engine, 0)


def test_gathered_parameters(workers: Any) -> None:
    workers(RANKS).run(gathers)


class Borrower(Tiny):
    """Its head is multiplied by a block's parameter, read in another module's forward."""

    def __init__(self, register: bool) -> None:
        super().__init__()
        self.register, self.borrowed = register, nn.Linear(WIDTH, 3)
        if register:
            deepspeed.zero.register_external_parameter(self, self.borrowed.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + nn.functional.linear(x, self.borrowed.weight)


def externals() -> None:
    def born(register: bool) -> Borrower:
        torch.manual_seed(0)
        return Borrower(register)

    twin = born(False)
    optimizer = adamw(twin.parameters())
    for step in range(3):
        for rank in range(RANKS):
            (loss_of(twin, rows(step, rank)) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = values(twin)
    for under_init in (False, True):
        for register in (False, True):
            with deepspeed.zero.Init(enabled=under_init):
                model = born(register)
            with start(3, model, optimizer=adamw) as engine:
                for step in range(3):
                    micro_step(engine, step)
                expect_close(masters(engine), wanted, at=(under_init, register))
                deepspeed.zero.register_external_parameter(model, model.out.weight)
                deepspeed.zero.unregister_external_parameter(model, model.out.weight)
                micro_step(engine, 3)
    with raises(ArgumentError, "Tensor"):
        deepspeed.zero.register_external_parameter(twin, torch.ones(1))


def test_external_parameters(workers: Any) -> None:
    workers(RANKS).run(externals)


# -- safe_* -----------------------------------------------------------------------------------------------------------

TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}


def full_access(precision: str) -> None:
    bar = TOLERANCE[precision]
    for stage in STAGES:
        twin = reference([[0]], RANKS, optimizer=adamw, precision=precision)
        with start(stage, precision=precision, optimizer=adamw) as engine:
            named = dict(engine.module.named_parameters())
            weight = named["out.weight"]
            assert utils.safe_get_full_grad(weight) is utils.safe_get_full_optimizer_state(weight, "exp_avg") is None
            assert utils.safe_get_full_fp32_param(weight).dtype == torch.float32
            micro_step(engine, 0)
            expect_close(masters(engine), twin.parameters(), bar, at=stage)
            for key in ("exp_avg", "exp_avg_sq"):
                ours = {name: utils.safe_get_full_optimizer_state(p, key) for name, p in named.items()}
                theirs = {name: twin.optimizer.state[p][key] for name, p in twin.master.named_parameters()}
                expect_close(ours, theirs, bar, at=(stage, key))
            for rank in range(RANKS):
                twin.backward(rank, loss_of(twin.copies[rank], rows(1, rank)))
            engine.backward(loss_of(engine, rows(1, dist.get_rank())))
            ours = {name: utils.safe_get_full_grad(p) for name, p in named.items()}
            expect_close(ours, twin.gradients(), 10 * bar, at=stage)
            edit(utils.safe_set_full_fp32_param, utils.safe_get_full_fp32_param, weight)
            edit(utils.safe_set_full_grad, utils.safe_get_full_grad, weight)
            for key in ("exp_avg", "exp_avg_sq"):
                edit(utils.safe_set_full_optimizer_state, utils.safe_get_full_optimizer_state, weight, key)
            assert torch.equal(dense(engine.module)["out.weight"], torch.full((3, WIDTH), 0.5))
            engine.step()  # with the planted gradient 0.5 and moments 0.5
            moved = 0.5 - utils.safe_get_full_fp32_param(weight)
            step = 0.01 * (0.5 / (1 - 0.9**2)) / ((0.5 * 0.999 + 0.25e-3) / (1 - 0.999**2)) ** 0.5 + 0.01 * 0.01 * 0.5
            assert (moved - step).abs().max() <= 1e-4, (stage, moved, step)
            with raises(ArgumentError, "out.weight", "(3, 6)"):
                utils.safe_set_full_fp32_param(weight, torch.ones(2))
            with raises(UsageError, "no_such"):
                utils.safe_set_full_optimizer_state(weight, torch.ones(3, WIDTH), "no_such")
            assert utils.safe_get_full_fp32_param(nn.Parameter(torch.ones(1))) is None


def edit(setter: Callable[..., Any], getter: Callable[..., Any], param: Any, *key: str) -> None:
    value = torch.full(param.shape, 0.5)
    setter(param, value, *key)
    assert torch.equal(getter(param, *key), value), setter.__name__


def test_full_access(workers: Any) -> None:
    for precision in TOLERANCE:
        workers(RANKS).run(full_access, precision)


def local_access(precision: str) -> None:
    for stage in STAGES:
        with start(stage, precision=precision, optimizer=adamw) as engine:
            micro_step(engine, 0)
            engine.backward(loss_of(engine, rows(1, dist.get_rank())))
            for param in engine.module.parameters():
                check_fragments(stage, param)
            for param in engine.module.parameters():
                for getter, setter, key in (
                    (utils.safe_get_local_fp32_param, utils.safe_set_local_fp32_param, ()),
                    (utils.safe_get_local_grad, utils.safe_set_local_grad, ()),
                    (utils.safe_get_local_optimizer_state, utils.safe_set_local_optimizer_state, ("exp_avg",)),
                ):
                    piece = getter(param, *key)
                    setter(param, torch.full_like(piece, 0.25) if piece is not None else torch.empty(0), *key)
            for param in engine.module.parameters():
                assert utils.safe_get_full_fp32_param(param).eq(0.25).all(), (stage, param.shape)
                assert utils.safe_get_full_grad(param).eq(0.25).all(), (stage, param.shape)
                assert utils.safe_get_full_optimizer_state(param, "exp_avg").eq(0.25).all(), (stage, param.shape)
            assert all(v.eq(0.25).all() for v in dense(engine.module).values())
            engine.step()


def check_fragments(stage: int, param: Any) -> None:
    """The ranks' pieces, laid end to end, are the whole tensor; at stage 0 every rank has all of it."""
    for full, local, key in (
        (utils.safe_get_full_fp32_param, utils.safe_get_local_fp32_param, ()),
        (utils.safe_get_full_grad, utils.safe_get_local_grad, ()),
        (utils.safe_get_full_optimizer_state, utils.safe_get_local_optimizer_state, ("exp_avg_sq",)),
    ):
        whole, piece = full(param, *key), local(param, *key)
        pieces: list[Any] = [None] * RANKS
        dist.all_gather_object(pieces, torch.empty(0) if piece is None else piece.float().clone())
        joined = pieces[0] if stage == 0 else torch.cat(pieces)
        assert torch.equal(joined, whole.reshape(-1)), (stage, local.__name__, param.shape)


def test_local_access(workers: Any) -> None:
    for precision in ("fp32", "bf16"):
        workers(RANKS).run(local_access, precision)


# -- leaf modules, frozen parameters ----------------------------------------------------------------------------------


class Experts(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.experts(x))


def leaves() -> None:
    for asked in ([nn.Sequential], ["Sequential"], ["experts"], ["torch.nn.modules.container.Sequential"]):
        model = Experts()
        found = utils.set_z3_leaf_modules(model, asked)
        assert model.experts in found and utils.z3_leaf_module(model.experts)
        assert utils.get_z3_leaf_modules(model) == found
        assert utils.unset_z3_leaf_modules(model, asked) == found and not utils.get_z3_leaf_modules(model)
    with raises(ArgumentError, "Nothing"):
        utils.set_z3_leaf_modules(model, ["Nothing"])
    assert utils.set_z3_leaf_modules(model, ["Nothing"], raise_if_not_found=False) == []
    assert utils.set_z3_leaf_modules_by_suffix(model, ["perts"]) == [model.experts]
    for by_json in (False, True):
        model = Experts()
        leaf = {"leaf_module": {"names": ["experts"]}} if by_json else {}
        if not by_json:
            utils.set_z3_leaf_modules_by_name(model, ["experts"])
        with start(3, model, zero=leaf) as engine:
            groups = {p._ds_member.group for p in model.experts.parameters()}
            assert len(groups) == 1
            micro_step(engine, 0)


def test_leaf_modules_travel_together(workers: Any) -> None:
    workers(RANKS).run(leaves)


def frozen() -> None:
    for precision in ("fp32", "bf16"):
        for stage in STAGES:
            model = tiny()
            model.layers[1].requires_grad_(False)
            start_values = values(model)
            with start(stage, model, precision=precision) as engine:
                micro_step(engine, 0)
                kept = engine.module.layers[1][0].weight
                wanted = start_values["layers.1.0.weight"]
                low = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
                assert torch.equal(dense(engine.module)["layers.1.0.weight"], wanted.to(low).float())
                assert utils.safe_get_full_grad(kept) is None
                engine.module.layers[1].requires_grad_(True)
                engine.backward(loss_of(engine, rows(1, dist.get_rank())))
                gradient = utils.safe_get_full_grad(kept)
                assert gradient is not None and gradient.abs().max() > 0, stage
                before = utils.safe_get_full_fp32_param(kept)
                engine.step()
                gap = (before - 0.1 * gradient - utils.safe_get_full_fp32_param(kept)).abs().max()
                assert gap <= 1e-6, (stage, precision, gap)


def test_frozen_parameters_and_unfreezing(workers: Any) -> None:
    workers(RANKS).run(frozen)


def edited_in_place() -> None:
    """What was changed since the last step is in the master that is shown."""
    for precision in ("fp32", "bf16"):
        for stage in (0, 1, 2):
            with start(stage, precision=precision) as engine:
                parameter = engine.module.out.weight
                for edit in (lambda p: p.mul_(0.5), lambda p: p.data.add_(0.5)):
                    with torch.no_grad():
                        edit(parameter)
                    shown = utils.safe_get_full_fp32_param(parameter)
                    assert torch.equal(shown, parameter.detach().float()), (stage, precision)
                    piece = utils.safe_get_local_fp32_param(parameter)
                    assert piece is None or bool(torch.isin(piece, shown).all()), (stage, precision)


def test_masters_show_what_was_edited_in_place(workers: Any) -> None:
    workers(RANKS).run(edited_in_place)


def gathered_by_hand() -> None:
    with start(3) as engine:
        weight, bias = engine.module.out.weight, engine.module.out.bias
        weight.all_gather([weight, bias])
        assert weight.ds_status.name == bias.ds_status.name == "AVAILABLE"
        with torch.no_grad():
            weight.fill_(0.25)
        weight.partition([weight, bias], has_been_updated=True)
        assert weight.ds_status.name == "NOT_AVAILABLE" and bool((weight.clone() == 0.25).all())
        micro_step(engine, 0)
        assert (utils.safe_get_full_fp32_param(weight) - 0.25).abs().max() < 0.25
        weight.all_gather()
        with torch.no_grad():
            weight.zero_()
        with raises(ShardedParameterError, "out.weight"):
            weight.partition()
        engine.module.out.weight.partition()


def test_gather_and_partition_by_hand(workers: Any) -> None:
    workers(RANKS).run(gathered_by_hand)


def generation() -> None:
    wanted = tiny()(rows(0, 0))
    for stage in STAGES:
        with start(stage) as engine:
            with deepspeed.zero.unwrap_model_for_generation(engine) as module, torch.no_grad():
                assert not any(isinstance(p, ShardedParameter) for p in module.parameters())
                assert (module(rows(0, 0)) - wanted).abs().max() <= 1e-6
            assert isinstance(engine.module.out.weight, ShardedParameter) == (stage == 3)
            micro_step(engine, 0)
            expect_close(masters(engine), reference([[0]], RANKS).parameters(), at=stage)


def test_unwrap_for_generation(workers: Any) -> None:
    workers(RANKS).run(generation)


def own_elements() -> None:
    for stage in range(4):
        with start(stage, zero={"stage3_param_persistence_threshold": 0} if stage == 3 else {}) as engine:
            whole = masters(engine)
            for name, param in engine.module.named_parameters():
                shards: list[Any] = [None] * RANKS
                dist.all_gather_object(shards, param.ds_tensor.clone())
                assert torch.equal(torch.cat(shards), whole[name].reshape(-1)), (stage, name)


def test_the_shards_of_all_ranks_are_the_parameter(workers: Any) -> None:
    workers(RANKS).run(own_elements)
