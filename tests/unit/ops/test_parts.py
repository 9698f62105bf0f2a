"""Updates of a part: one tensor of an Adam, taken back again; the rows that a sparse gradient names."""

from __future__ import annotations

import pytest
import torch

from deepspeed.errors import ArgumentError, OptimizerError, UsageError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion


def tensors(count: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(50, dtype=dtype)) for _ in range(count)]


def feed(params: list[torch.nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for param in params:
        param.grad = torch.randn(50).to(param.dtype)


SETTINGS = (
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "adamw_mode": False},
    {"bias_correction": False, "betas": (0.0, 0.9)},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=["adamw", "adam", "no-momentum"])
def test_subgroups_one_by_one_are_the_step(settings: dict) -> None:
    parts, whole = tensors(), tensors()
    one = DeepSpeedCPUAdam([{"params": parts[:2]}, {"params": parts[2:], "lr": 0.3}], lr=0.1, **settings)
    all_ = DeepSpeedCPUAdam([{"params": whole[:2]}, {"params": whole[2:], "lr": 0.3}], lr=0.1, **settings)
    for step in range(3):
        feed(parts, step)
        feed(whole, step)
        for number in (2, 0, 1):
            one.step_subgroup(number)
        all_.step()
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))
    assert one.step_subgroup(0, lambda: torch.tensor(5.0)) == 5


@pytest.mark.parametrize("settings", SETTINGS, ids=["adamw", "adam", "no-momentum"])
@pytest.mark.parametrize("before", [0, 4])
def test_a_rollback_undoes_the_last_step_of_one_tensor(settings: dict, before: int) -> None:
    params = tensors(2)
    optimizer = DeepSpeedCPUAdam(params, lr=0.1, **settings)
    for step in range(before):
        feed(params, step)
        optimizer.step()
    kept = [p.detach().clone() for p in params]
    moments = {k: v.clone() for k, v in optimizer.state[params[1]].items()}
    feed(params, 9)
    optimizer.step_subgroup(1)
    assert torch.equal(params[0], kept[0]) and not torch.allclose(params[1], kept[1])
    optimizer.rollback_subgroup(1)
    assert torch.allclose(params[1], kept[1], atol=1e-6)
    for name, value in moments.items():
        unknowable = name == "exp_avg" and settings.get("betas", (1,))[0] == 0  # and of no use to the next step
        assert unknowable or torch.allclose(optimizer.state[params[1]][name], value, atol=1e-6), name
    after = params[1].detach().clone()
    optimizer.step_subgroup(1)  # the other way goes on as it was
    assert not torch.allclose(params[1], after)
    assert float(optimizer.state[params[1]]["step"]) == before + 1


def test_what_cannot_be_undone_says_so() -> None:
    params = tensors(1)
    optimizer = DeepSpeedCPUAdam(params)
    feed(params, 0)
    with pytest.raises(UsageError, match="no step to undo"):
        optimizer.rollback_subgroup(0)
    with pytest.raises(ArgumentError, match="there are 1 tensors"):
        optimizer.step_subgroup(1)
    optimizer.step_subgroup(0)
    params[0].grad = None
    with pytest.raises(UsageError, match="no step to undo"):
        optimizer.rollback_subgroup(0)
    largest = DeepSpeedCPUAdam(params, amsgrad=True)
    feed(params, 0)
    largest.step()
    with pytest.raises(OptimizerError, match="amsgrad"):
        largest.rollback_subgroup(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adagrad_updates_the_rows_of_an_embedding_that_were_looked_up(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sparse = torch.nn.Embedding(20, 4, sparse=True).to(dtype)
    dense = torch.nn.Embedding(20, 4).to(dtype)
    dense.load_state_dict(sparse.state_dict())
    ours, same = DeepSpeedCPUAdagrad(sparse.parameters(), lr=0.1), DeepSpeedCPUAdagrad(dense.parameters(), lr=0.1)
    before = sparse.weight.detach().clone()
    for rows in ([1, 5, 5], [5, 7], [1]):
        for layer, optimizer in ((sparse, ours), (dense, same)):
            layer(torch.tensor(rows)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(sparse.weight, dense.weight, rtol=1e-6 if dtype == torch.float32 else 1e-2)
    untouched = [row for row in range(20) if row not in (1, 5, 7)]
    assert torch.equal(sparse.weight[untouched], before[untouched])


def test_sparse_gradients_that_cannot_be_used_say_so() -> None:
    for make, word in (
        (lambda p: DeepSpeedCPUAdagrad(p, weight_decay=0.1), "weight_decay moves all rows"),
        (DeepSpeedCPUAdam, "takes dense gradients"),
        (DeepSpeedCPULion, "takes dense gradients"),
    ):
        layer = torch.nn.Embedding(4, 2, sparse=True)
        optimizer = make(layer.parameters())
        layer(torch.tensor([1])).sum().backward()
        with pytest.raises(OptimizerError, match=word):
            optimizer.step()
