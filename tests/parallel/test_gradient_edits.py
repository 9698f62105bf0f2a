"""What users do to gradients and values between the calls: edits in a window, None, graphs, views that are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed import utils
from deepspeed.errors import UsageError
from tests.parallel.tiny import STAGES, loss_of, masters, raises, rows, said, start

RANKS = 2


def back(engine: Any, step: int = 0) -> None:
    """Backward of a micro-batch that is the same on all ranks and in all steps."""
    engine.backward(loss_of(engine, rows(step, 0)))


def first(engine: Any) -> tuple[str, Any]:
    return next(iter(engine.module.named_parameters()))


def whole(stage: int, gradient: torch.Tensor) -> torch.Tensor:
    """What all ranks have together of a gradient read before the boundary, where stages 0 and 1 show the own part."""
    return RANKS * gradient if stage < 2 else gradient.clone()


def applied(engine: Any, before: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return (before[name] - masters(engine)[name]) / 0.1


def edits_in_a_window(stage: int) -> None:
    with start(stage, accumulation=2) as engine:
        name, param = first(engine)
        before = masters(engine)
        back(engine)
        gradient = whole(stage, param.grad)
        param.grad.mul_(0.5)
        engine.step()
        back(engine)
        engine.step()
        torch.testing.assert_close(applied(engine, before, name), 1.5 * gradient)


def late_edits(stage: int) -> None:
    """A tensor that is no longer the gradient is changed: on all ranks an error, not a loss in silence."""
    with start(stage, accumulation=2) as engine:
        name, param = first(engine)
        back(engine)
        kept = param.grad
        engine.step()
        back(engine)
        kept.mul_(2.0)
        with raises(UsageError, name, "read .grad again"):
            engine.step()


def set_after_edit(stage: int) -> None:
    with start(stage) as engine:
        name, param = first(engine)
        before = masters(engine)
        back(engine)
        param.grad.mul_(0.5)
        utils.safe_set_full_grad(param, torch.full(param.shape, 3.0))
        assert utils.safe_get_full_grad(param).eq(3.0).all()
        engine.step()
        torch.testing.assert_close(applied(engine, before, name), torch.full(param.shape, 3.0))


def edits_past_the_version_counter(stage: int) -> None:
    """`p.grad.data` and a view that outlives the gradient's own name change the gradient too."""
    with start(stage) as engine:
        named = dict(engine.module.named_parameters())
        names = list(named)[:2]
        before = masters(engine)
        back(engine)
        wanted = {name: named[name].grad.clone() for name in names}
        named[names[0]].grad.data.mul_(0.5)
        view = named[names[1]].grad.view(-1)
        for param in named.values():  # what nobody holds is let go
            assert param.grad is not None
        view.mul_(3.0)
        engine.step()
        torch.testing.assert_close(applied(engine, before, names[0]), 0.5 * wanted[names[0]])
        torch.testing.assert_close(applied(engine, before, names[1]), 3.0 * wanted[names[1]])


def kept_beside_an_edit(stage: int) -> None:
    """A gradient was read and kept, then changed through another read of it: the kept one is no change back."""
    with start(stage) as engine:
        name, param = first(engine)
        before = masters(engine)
        back(engine)
        kept = param.grad
        values = kept.clone()
        param.grad.mul_(0.5)
        assert torch.equal(param.grad, 0.5 * values)
        engine.step()
        assert torch.equal(kept, values)
        torch.testing.assert_close(applied(engine, before, name), 0.5 * values)


def own_parts_are_edited(stage: int) -> None:
    """Before the boundary, stages 0 and 1 show this rank's part: one rank may change its own."""
    with start(stage, accumulation=2) as engine:
        name, param = first(engine)
        before = masters(engine)
        back(engine)
        gradient = param.grad.clone()
        if dist.get_rank() == 0:
            param.grad.data.zero_()
        engine.step()
        back(engine)
        engine.step()
        torch.testing.assert_close(applied(engine, before, name), 3.0 * gradient)


def kept_over_a_step(stage: int) -> None:
    """A gradient that is kept stays what it was when it was read."""
    for accumulation in (1, 2):
        with start(stage, accumulation=accumulation) as engine:
            param = next(engine.module.parameters())
            back(engine)
            kept = param.grad
            values = kept.clone()
            for step in range(1, 4):
                engine.step()
                back(engine, step)
            assert torch.equal(kept, values)


def reads_one_by_one(stage: int) -> None:
    """Reading every gradient packs what ranks compare once, and keeps none of them."""
    import gc

    from deepspeed.zero.gradients import buckets

    with start(stage) as engine:
        params = list(engine.module.parameters())
        back(engine)
        assert params[0].grad is not None
        packed, row = [], buckets.Bucket.row
        buckets.Bucket.row = lambda bucket: packed.append(bucket) or row(bucket)
        try:
            gc.collect()
            before = {id(found) for found in gc.get_objects() if isinstance(found, torch.Tensor)}
            for _ in range(3):
                for param in params:
                    assert param.grad is not None
            after = [found for found in gc.get_objects() if isinstance(found, torch.Tensor) and id(found) not in before]
        finally:
            buckets.Bucket.row = row
        assert packed == []
        assert len(after) <= 8, [tensor.shape for tensor in after]


def without_gradient(stage: int) -> None:
    """`p.grad = None`: out of the norm, and out of the sum of a window that goes on."""
    with start(stage) as engine:
        params = list(engine.module.parameters())
        back(engine)
        rest = torch.cat([param.grad.reshape(-1) for param in params[1:]])
        params[0].grad = None
        engine.step()
        assert abs(engine.get_global_grad_norm() - rest.norm()) <= 1e-5 * rest.norm()
    with start(stage, accumulation=2) as engine:
        name, param = first(engine)
        before = masters(engine)
        back(engine)
        gradient = whole(stage, param.grad)
        param.grad = None
        assert param.grad is None
        engine.step()
        back(engine)
        engine.step()
        torch.testing.assert_close(applied(engine, before, name), gradient)


def set_in_a_window(stage: int) -> None:
    with start(stage, accumulation=3) as engine:
        param, other = list(engine.module.parameters())[:2]
        back(engine)
        gradient, others = whole(stage, param.grad), whole(stage, other.grad)
        utils.safe_set_full_grad(param, torch.full(param.shape, 3.0))
        assert utils.safe_get_full_grad(param).eq(3.0).all()
        torch.testing.assert_close(utils.safe_get_full_grad(other), others)
        engine.step()
        back(engine)
        torch.testing.assert_close(utils.safe_get_full_grad(param), 3.0 + gradient)
        engine.step()


def graph_of_gradients(stage: int, accumulation: int) -> None:
    found = []
    for keep in (False, True):
        with start(stage, accumulation=accumulation) as engine:
            for step in range(accumulation):
                loss_of(engine, rows(step, dist.get_rank())).backward(create_graph=keep)
                engine.step()
            found.append(masters(engine))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def kept_data(stage: int) -> None:
    """A `.data` that is kept writes to the parameter in every later step too."""
    with start(stage, precision="bf16") as engine:
        _, param = first(engine)
        kept = param.data
        back(engine)
        engine.step()
        kept.zero_()
        for later in engine.module.parameters():
            later.requires_grad_(later is not param)
        back(engine)
        engine.step()
        assert param.detach().eq(0).all() and utils.safe_get_full_fp32_param(param).eq(0).all()


def exchanged_data(stage: int) -> None:
    with start(stage) as engine:
        one, other = [layer[0].weight for layer in list(engine.module.layers)[:2]]
        values = one.detach().clone(), other.detach().clone()
        one.data, other.data = other.data, one.data
        loss_of(engine, rows(0, 0)).mul(0.0).backward()
        engine.step()
        found = [utils.safe_get_full_fp32_param(param) for param in (one, other)]
        assert torch.equal(found[0], values[1]) and torch.equal(found[1], values[0])


def averages_exchanged_by_pointer(stage: int, precision: str) -> None:
    """Weights and their average change places and come back: neither takes the other's values."""
    import tempfile

    with start(stage, precision=precision) as engine:
        params = list(engine.module.parameters())
        averages = [torch.full_like(param, 7.0) for param in params]

        def exchange() -> None:
            for index, param in enumerate(params):
                param.data, averages[index] = averages[index], param.data

        back(engine)
        engine.step()
        before, weights = masters(engine), [param.detach().clone() for param in params]
        exchange()
        assert all(value.eq(7).all() for value in masters(engine).values())
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        engine.save_checkpoint(folder[0], tag="averages")
        assert all(torch.equal(average, weight) for average, weight in zip(averages, weights, strict=True))
        exchange()
        assert all(average.eq(7).all() for average in averages)
        after = masters(engine)
        bar = 0.0 if precision == "fp32" else 1e-2  # rounded masters come back
        assert all((after[name] - before[name]).abs().max() <= bar for name in before)
        back(engine)
        engine.step()
        stepped = masters(engine)
        assert all(average.eq(7).all() for average in averages)
        assert any(not torch.equal(stepped[name], after[name]) for name in after)
        assert all(
            torch.equal(p.detach().float(), stepped[n].to(p.dtype).float()) for n, p in engine.module.named_parameters()
        )


def old_memory_stays(stage: int) -> None:
    with start(stage) as engine:
        _, param = first(engine)
        kept = param.detach()
        values = kept.clone()
        param.data = torch.ones(param.shape)
        back(engine)
        engine.step()
        assert torch.equal(kept, values)


def memory_of_another(stage: int) -> None:
    """Values are copied; who still holds the tensor they come from is told that it is a copy now."""
    with start(stage) as engine:
        name, param = first(engine)
        held = torch.ones(param.shape)
        param.data = held
        with said() as told:
            back(engine)
            engine.step()
            assert held.eq(1).all() and not torch.equal(param.detach(), held)
        assert dist.get_rank() or any(name in each and "do not share memory" in each for each in told), told
        param.data = torch.full(param.shape, 2.0)
        with said() as told:
            back(engine)
            engine.step()
        assert not any("share memory" in each for each in told), told


def frozen(stage: int) -> None:
    from tests.parallel.tiny import tiny

    model = tiny()
    model.out.requires_grad_(False)
    with start(stage, model) as engine:
        weight = engine.module.out.weight
        with raises(UsageError, "out.weight", "frozen"):
            utils.safe_set_full_grad(weight, torch.ones(weight.shape))
        back(engine)
        engine.step()


@pytest.mark.drawn(9)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "case",
    [
        edits_in_a_window,
        edits_past_the_version_counter,
        kept_beside_an_edit,
        kept_over_a_step,
        reads_one_by_one,
        set_after_edit,
        without_gradient,
        set_in_a_window,
        frozen,
    ],
)
def test_gradients_follow_what_is_done_to_them(workers: Any, case: Any, stage: int) -> None:
    workers(RANKS).run(case, stage)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_rank_changes_its_own_part(workers: Any, stage: int) -> None:
    workers(RANKS).run(own_parts_are_edited, stage)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_edit_that_comes_too_late_raises(workers: Any, stage: int) -> None:
    workers(RANKS).run(late_edits, stage)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_of_gradients_changes_nothing(workers: Any, stage: int, accumulation: int) -> None:
    workers(RANKS).run(graph_of_gradients, stage, accumulation)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("case", [kept_data, exchanged_data, old_memory_stays, memory_of_another])
def test_values_follow_their_data(workers: Any, case: Any, stage: int) -> None:
    workers(RANKS).run(case, stage)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_averages_exchanged_by_pointer(workers: Any, stage: int, precision: str) -> None:
    workers(RANKS).run(averages_exchanged_by_pointer, stage, precision)


def other_rules(stage: int, change: str) -> None:
    lr = torch.tensor(0.1) if change == "tensor" else 0.1
    with start(stage, optimizer=lambda params: torch.optim.AdamW(params, lr=lr)) as engine:
        group = engine.optimizer.param_groups[0]
        if change == "nan":
            group["lr"] = float("nan")
        elif dist.get_rank() == 1 and change == "tensor":
            group["lr"] = torch.tensor(0.2)
        elif dist.get_rank() == 1:
            group["weight_decay"] = 0.5
        back(engine)
        if change == "nan":
            engine.step()  # the same everywhere: the user's own
            return
        with raises(UsageError, "ranks disagree", "hyperparameters"):
            engine.step()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("change", ["tensor", "weight_decay", "nan"])
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_update_by_one_rule(workers: Any, stage: int, change: str) -> None:
    workers(RANKS).run(other_rules, stage, change)


class Late(torch.nn.Module):
    """Its second half is used from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late, self.both = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.early(x) + self.late(x) if self.both else self.early(x)


def momentum_that_comes_later(stage: int) -> None:
    import deepspeed

    torch.manual_seed(0)
    model = Late()
    json = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=json)
    with engine:
        for step in range(3):
            model.both = step > 0
            back(engine, step)
            engine.step()
        found = masters(engine)
    torch.manual_seed(0)
    twin = Late()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        twin.both = step > 0
        optimizer.zero_grad()
        loss_of(twin, rows(step, 0)).backward()
        optimizer.step()
    for name, param in twin.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_whose_first_gradient_comes_later_has_momentum(workers: Any, stage: int) -> None:
    workers(RANKS).run(momentum_that_comes_later, stage)


def local_gradients(stage: int) -> None:
    """This rank's part of a gradient that is not there is None, and one that is set counts as any other."""
    with start(stage, Late(), zero={"stage3_param_persistence_threshold": 0}) as engine:
        model, late = engine.module, engine.module.late.weight
        model.both = True
        back(engine)
        engine.step()
        model.both = False
        back(engine, 1)
        assert utils.safe_get_local_grad(late) is None, "that of the last update"
        shard = utils.safe_get_local_fp32_param(late)
        count = 0 if shard is None else shard.numel()
        for value in (3.0, 2.0):  # beside gradients of other parameters; alone
            before = masters(engine)
            utils.safe_set_local_grad(late, torch.full((count,), value))
            own = utils.safe_get_local_grad(late)
            assert own is None or own.eq(value).all()
            engine.step()
            torch.testing.assert_close(applied(engine, before, "late.weight"), torch.full(late.shape, value))
            assert applied(engine, before, "late.bias").eq(0.0).all()
            assert applied(engine, before, "early.bias").eq(0.0).all() == (value == 2.0)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_local_gradients_are_there_when_they_were_set(workers: Any, stage: int) -> None:
    workers(RANKS).run(local_gradients, stage)
