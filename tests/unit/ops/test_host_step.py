"""Optimizers over host memory, in plain torch and on every instruction set, against their equations in float64."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.errors import OptimizerError
from deepspeed.native import INSTRUCTION_SETS, library
from deepspeed.ops import cpu_optimizer
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.cpu_optimizer import Fold
from deepspeed.ops.lion import DeepSpeedCPULion
from tests.harness.kernels import forms

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TORCH = "torch"
LENGTHS = (0, 1, 63, 64, 65, 1000, 100_003)
FACTOR = 0.37
STEPS = 3
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "adamw": (DeepSpeedCPUAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "adam": (DeepSpeedCPUAdam, {"lr": 0.01, "weight_decay": 0.1, "adamw_mode": False}),
    "uncorrected": (DeepSpeedCPUAdam, {"lr": 0.01, "bias_correction": False, "betas": (0.4, 0.9)}),
    "amsgrad": (DeepSpeedCPUAdam, {"lr": 0.01, "amsgrad": True}),
    "adagrad": (DeepSpeedCPUAdagrad, {"lr": 0.01, "weight_decay": 0.1}),
    "lion": (DeepSpeedCPULion, {"lr": 0.01, "weight_decay": 0.1}),
    "quick-lion": (DeepSpeedCPULion, {"lr": 0.01, "betas": (0.37, 0.29)}),
}
# dtype of parameter, gradient, rounded copy; dtype of moments where it is not the usual one
DTYPES = [(F32, F32, None, None), (F32, BF16, BF16, None), (F32, F16, F16, None), (F32, BF16, BF16, BF16)]
DTYPES += [(BF16, BF16, None, None), (F16, F32, BF16, F16)]


@pytest.fixture(params=[TORCH, *forms()])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each form of the arithmetic in turn."""
    with using(request.param, monkeypatch):
        yield request.param


@contextmanager
def using(form: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found = library()
    with monkeypatch.context() as patch:
        if found is None or form == TORCH:
            patch.setattr(cpu_optimizer, "library", lambda: None)
        else:
            found.ds_instruction_set(INSTRUCTION_SETS.index(form))
        yield
    if found is not None:
        found.ds_instruction_set(len(INSTRUCTION_SETS))


def draws(numel: int, seed: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    values = torch.randn(numel + offset, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values[offset:]


def run(case: str, dtypes: tuple[Any, ...], numel: int, offset: int = 0) -> dict[str, Tensor]:
    """Three steps on folds; every tensor may start `offset` elements after an aligned address."""
    cls, arguments = CASES[case]
    param_dtype, gradient_dtype, out_dtype, moments_dtype = dtypes
    param = torch.nn.Parameter(draws(numel, 1, param_dtype, offset))
    optimizer = cls([param], **arguments, moments_dtype=moments_dtype)
    out = None if out_dtype is None else draws(numel, 0, out_dtype, offset)
    optimizer.factor = FACTOR
    for step in range(STEPS):
        optimizer.folds = {param: Fold(draws(numel, 2 + step, gradient_dtype, offset), out)}
        optimizer.step()
    results = {"param": param.detach(), **optimizer.state[param]}
    return results if out is None else results | {"out": out}


def adam_equations(settings: dict[str, Any], p: Tensor, gradients: list[Tensor]) -> dict[str, Tensor]:
    (beta1, beta2), decay, lr = settings.get("betas", (0.9, 0.999)), settings.get("weight_decay", 0.0), settings["lr"]
    m, v, largest = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    decoupled, corrected = settings.get("adamw_mode", True), settings.get("bias_correction", True)
    for step, g in enumerate(gradients, start=1):
        if decoupled:
            p = p - lr * decay * p
        else:
            g = g + decay * p
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        largest = torch.maximum(largest, v)
        used = largest if settings.get("amsgrad") else v
        first, second = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
        p = p - lr * (m / first) / ((used / second).sqrt() + 1e-8)
    return {"param": p, "exp_avg": m, "exp_avg_sq": v}


def adagrad_equations(settings: dict[str, Any], p: Tensor, gradients: list[Tensor]) -> dict[str, Tensor]:
    total = torch.zeros_like(p)
    for g in gradients:
        g = g + settings["weight_decay"] * p
        total = total + g * g
        p = p - settings["lr"] * g / (total.sqrt() + 1e-10)
    return {"param": p, "sum": total}


def lion_equations(settings: dict[str, Any], p: Tensor, gradients: list[Tensor]) -> dict[str, Tensor]:
    (beta1, beta2), m = settings.get("betas", (0.9, 0.999)), torch.zeros_like(p)
    for g in gradients:
        p = p - settings["lr"] * ((beta1 * m + (1 - beta1) * g).sign() + settings.get("weight_decay", 0.0) * p)
        m = beta2 * m + (1 - beta2) * g
    return {"param": p, "exp_avg": m}


EQUATIONS: dict[type, Callable[..., dict[str, Tensor]]] = {
    DeepSpeedCPUAdam: adam_equations,
    DeepSpeedCPUAdagrad: adagrad_equations,
    DeepSpeedCPULion: lion_equations,
}


def largest_error(found: Tensor, wanted: Tensor) -> float:
    """Relative to the largest element."""
    if found.numel() == 0:
        return 0.0
    return ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


@pytest.mark.parametrize("case", CASES)
def test_every_form_keeps_to_the_equations(case: str, way: str) -> None:
    cls, arguments = CASES[case]
    for numel, (gradient_dtype, out_dtype) in itertools.product(LENGTHS, [(F32, None), (BF16, BF16), (F16, F16)]):
        found = run(case, (F32, gradient_dtype, out_dtype, None), numel, offset=numel % 3)
        start = draws(numel, 1, F32, numel % 3).double()
        gradients = [FACTOR * draws(numel, 2 + s, gradient_dtype, numel % 3).double() for s in range(STEPS)]
        wanted = EQUATIONS[cls](arguments, start, gradients)
        assert {name: error for name in wanted if (error := largest_error(found[name], wanted[name])) > 1e-6} == {}
        assert out_dtype is None or torch.equal(found["out"], found["param"].to(out_dtype))
        assert found.get("step", torch.tensor(STEPS)) == STEPS


@pytest.mark.parametrize("case", CASES)
def test_native_forms_give_the_same_bits_and_agree_with_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for numel, dtypes in itertools.product((77, 100_003), DTYPES):
        results = {}
        for form in [TORCH, *forms()]:
            with using(form, monkeypatch):
                results[form] = run(case, dtypes, numel, offset=1)
        plain = results.pop(TORCH)
        for name, values in plain.items():
            ours = [result[name] for result in results.values()]
            assert all(torch.equal(other, ours[0]) for other in ours[1:])
            # A difference in the last bit may fall on the other side of a rounding, rarely.
            bar = 1e-6 if values.dtype == F32 else 2 * torch.finfo(values.dtype).eps
            assert all(other.dtype == values.dtype and largest_error(other, values) <= bar for other in ours)
            assert all((other != values).sum() <= 1e-3 * numel for other in ours if values.dtype != F32)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("offset", [0, 8, 1])  # the copy starts at a line, at a part of one, anywhere
@pytest.mark.parametrize("case", [name for name in CASES if CASES[name][0] is DeepSpeedCPUAdam])
def test_copies_written_around_the_caches_have_the_same_bits(
    case: str, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls, arguments = CASES[case]
    numel = (1 << 20) + 77  # as long as STREAMED in optimizers.cpp, with a part of a block
    gradient = draws(numel, 2, BF16, offset)
    odd = [math.inf, -math.inf, math.nan, -0.0, 1e-40, -3e38]
    for place in (0, 16, 1000, numel - 100, numel - len(odd)):
        gradient[place : place + len(odd)] = torch.tensor(odd)
    results = {}
    for form in [TORCH, *forms()]:
        with using(form, monkeypatch):
            param, out = torch.nn.Parameter(draws(numel, 1, F32, offset)), torch.zeros(numel + offset + 9, dtype=BF16)
            optimizer = cls([param], **arguments)
            optimizer.folds = {param: Fold(gradient, out[offset : offset + numel])}
            optimizer.step()
            results[form] = [values.nan_to_num(nan=7.0) for values in (param.detach(), out, *moments(optimizer, param))]
            assert torch.equal(results[form][1][offset : offset + numel], results[form][0].to(BF16))
            assert not out[:offset].any() and not out[offset + numel :].any()
    plain, *native = results.values()
    for found in native:
        assert all(torch.equal(a, b) for a, b in zip(found, native[0], strict=True))
        torch.testing.assert_close([found[0], *found[2:]], [plain[0], *plain[2:]], rtol=2e-6, atol=1e-6)


def moments(optimizer: torch.optim.Optimizer, param: Tensor) -> list[Tensor]:
    return [values for values in optimizer.state[param].values() if values.dim()]


def test_halves_are_widened_and_rounded_as_torch_does(way: str) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    for half in (BF16, F16):
        wide = every.view(half).float()
        ties = wide.add(torch.nextafter(wide, torch.tensor(math.inf))).div(2)
        for values in (wide, ties, random.view(F32)):
            param, out = torch.nn.Parameter(values.clone()), torch.empty_like(values, dtype=half)
            still = DeepSpeedCPULion([param], lr=0.0)
            still.folds = {param: Fold(torch.zeros_like(values), out)}
            still.step()
            assert torch.equal(out.nan_to_num(nan=7.0), param.detach().to(half).nan_to_num(nan=7.0))
        sums = torch.nn.Parameter(torch.zeros(65536))
        optimizer = DeepSpeedCPUAdagrad([sums])
        optimizer.folds = {sums: Fold(every.view(half))}
        optimizer.step()
        wanted = wide.square()
        assert torch.equal(optimizer.state[sums]["sum"].nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))


def test_folds_stand_beside_plain_gradients(way: str) -> None:
    folded, plain, idle = (torch.nn.Parameter(torch.ones(4)) for _ in range(3))
    optimizer = DeepSpeedCPULion([{"params": [folded]}, {"params": [plain, idle], "lr": 0.5}], lr=0.25)
    folded.grad, plain.grad = torch.full((4,), -9.0), torch.ones(4)
    optimizer.folds = {folded: Fold(torch.ones(2, 2))}
    optimizer.step()
    assert folded.tolist() == [0.75] * 4 and plain.tolist() == [0.5] * 4 and idle.tolist() == [1.0] * 4
    optimizer.folds = None
    optimizer.step()
    assert folded.tolist() == [1.0] * 4  # by its own gradient now
    assert idle not in optimizer.state


@pytest.mark.parametrize("fold", [Fold(torch.ones(3)), Fold(torch.ones(4), torch.ones(5))])
def test_a_fold_of_another_length_is_an_error(fold: Fold) -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = DeepSpeedCPUAdam([param])
    optimizer.folds = {param: fold}
    with pytest.raises(OptimizerError, match=r"has (3|5) elements, its parameter of shape \(4,\) has 4"):
        optimizer.step()


@pytest.mark.parametrize("case", CASES)
def test_shapes_that_are_not_contiguous(case: str, way: str) -> None:
    cls, arguments = CASES[case]
    values, gradient = draws(12, 1, F32).view(3, 4), draws(12, 2, F32).view(3, 4)
    straight, turned, scalar = values.clone(), values.t().contiguous().t(), torch.tensor(2.0)
    params = [torch.nn.Parameter(p) for p in (straight, turned, scalar)]
    optimizer = cls(params, **arguments)
    for _ in range(STEPS):
        for param in params:
            param.grad = gradient.clone() if param.dim() else torch.tensor(1.0)
        optimizer.step()
    assert not params[1].is_contiguous()
    torch.testing.assert_close(params[0], params[1], rtol=1e-6, atol=1e-7)
    assert scalar.item() < 2.0


def test_backward_notices_a_step_between(way: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    weight.grad = torch.ones(3)
    DeepSpeedCPUAdam([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_float64_is_left_to_torch(way: str) -> None:
    ours, theirs = (torch.nn.Parameter(draws(9, 1, F32).double()) for _ in range(2))
    for param, optimizer in ((ours, DeepSpeedCPUAdam([ours])), (theirs, torch.optim.AdamW([theirs], weight_decay=0.0))):
        param.grad = draws(9, 2, F32).double()
        optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("cls", EQUATIONS)
@pytest.mark.parametrize(("dtype", "moments_dtype"), [(BF16, None), (BF16, F32), (F32, BF16), (F32, None)])
def test_a_saved_state_goes_on_bit_equal(cls: type, dtype: torch.dtype, moments_dtype: torch.dtype | None) -> None:
    param = torch.nn.Parameter(draws(100, 1, dtype))
    optimizer = cls([param], moments_dtype=moments_dtype)

    def train(trained: torch.nn.Parameter, by: torch.optim.Optimizer, seed: int) -> None:
        for step in range(STEPS):
            trained.grad = draws(100, seed + step, dtype)
            by.step()

    train(param, optimizer, 2)
    twin = copy.deepcopy(param)
    resumed = cls([twin], moments_dtype=moments_dtype)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before, after = optimizer.state[param], resumed.state[twin]
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)
    assert {before[name].dtype for name in before if name != "step"} == {moments_dtype or F32}
    train(param, optimizer, 7)
    train(twin, resumed, 7)
    assert torch.equal(param, twin)


def test_a_state_of_other_moments_is_taken_over() -> None:
    wide, narrow = (torch.nn.Parameter(draws(10, 1, F32)) for _ in range(2))
    first, second = DeepSpeedCPUAdam([wide]), DeepSpeedCPUAdam([narrow], moments_dtype=BF16)
    wide.grad = draws(10, 2, F32)
    first.step()
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.state[narrow]["exp_avg"], first.state[wide]["exp_avg"].bfloat16())
    assert second.state[narrow]["step"] == 1 and second.state[narrow]["step"].dtype == F32


def test_what_is_not_finite_stays_so(way: str) -> None:
    param, out = torch.nn.Parameter(torch.ones(3)), torch.empty(3, dtype=BF16)
    optimizer = DeepSpeedCPUAdam([param])
    optimizer.folds = {param: Fold(torch.tensor([1.0, math.inf, math.nan]), out)}
    optimizer.step()
    assert param.isfinite().tolist() == out.isfinite().tolist() == [True, False, False]
