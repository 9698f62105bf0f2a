"""Our optimizer classes against torch's or against their equations."""

from __future__ import annotations

import copy

import pytest
import torch

from deepspeed.errors import OptimizerError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon import Muon, orthogonalize

SHAPES = [(6, 5), (9,), (3, 4, 2)]
OURS = [FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, FusedLamb, DeepSpeedCPUAdagrad, Muon]
CPU_FORMS = [DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad]


def weights(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: int = 5, seed: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def largest_difference(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_adam_is_torchs(cls: type, decoupled: bool) -> None:
    ours, theirs = weights(), weights()
    mode = {"adam_w_mode" if cls is FusedAdam else "adamw_mode": decoupled}
    train(cls(ours, lr=0.01, weight_decay=0.1, **mode), ours)
    reference = torch.optim.AdamW if decoupled else torch.optim.Adam
    train(reference(theirs, lr=0.01, weight_decay=0.1), theirs)
    assert largest_difference(ours, theirs) <= 1e-6


def test_adam_without_bias_correction() -> None:
    ours, theirs = weights(), weights()
    optimizer = FusedAdam(ours, lr=0.01, bias_correction=False, weight_decay=0.1)
    train(optimizer, ours)
    assert optimizer.state[ours[0]]["step"] == 5
    generator = torch.Generator().manual_seed(2)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in theirs]
    with torch.no_grad():
        for _ in range(5):
            for param, (first, second) in zip(theirs, moments, strict=True):
                grad = torch.randn(param.shape, generator=generator)
                first.mul_(0.9).add_(0.1 * grad)
                second.mul_(0.999).add_(0.001 * grad * grad)
                param.mul_(1 - 0.001).sub_(0.01 * first / (second.sqrt() + 1e-8))
    assert largest_difference(ours, theirs) <= 1e-6


def test_amsgrad() -> None:
    ours, theirs = weights(), weights()
    train(DeepSpeedCPUAdam(ours, amsgrad=True), ours)
    train(torch.optim.AdamW(theirs, amsgrad=True, weight_decay=0.0), theirs)
    assert largest_difference(ours, theirs) <= 1e-6
    for cls in (FusedAdam, FusedLamb):
        with pytest.raises(RuntimeError, match="amsgrad"):
            cls(weights(), amsgrad=True)


def test_adagrad_is_torchs() -> None:
    ours, theirs = weights(), weights()
    train(DeepSpeedCPUAdagrad(ours, weight_decay=0.1), ours)
    train(torch.optim.Adagrad(theirs, weight_decay=0.1), theirs)
    assert largest_difference(ours, theirs) <= 1e-6
    with pytest.raises(OptimizerError, match="no meaning"):
        DeepSpeedCPUAdagrad(weights(), amsgrad=True)


def test_lion() -> None:
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = FusedLion([param], lr=0.1, betas=(0.9, 0.5), weight_decay=0.5)
    param.grad = torch.tensor([3.0, -1.0])
    optimizer.step()
    torch.testing.assert_close(param.data, torch.tensor([1 * 0.95 - 0.1, -2 * 0.95 + 0.1]))
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], torch.tensor([1.5, -0.5]))
    param.grad = torch.tensor([-20.0, 1.0])
    before = param.detach().clone()
    optimizer.step()
    torch.testing.assert_close(param.data, before * 0.95 - 0.1 * torch.tensor([-1.0, -1.0]))


@pytest.mark.parametrize("inside", [False, True])
def test_lamb(inside: bool) -> None:
    (param,) = params = [torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))]
    optimizer = FusedLamb(params, lr=0.1, weight_decay=0.01, eps=0.5, eps_inside_sqrt=inside, max_coeff=100.0)
    grad = torch.tensor([[0.3, -0.1]])
    param.grad = grad.clone()
    optimizer.step()
    start = torch.tensor([[3.0, 4.0]])
    root = (grad * grad + 0.5).sqrt() if inside else grad.abs() + 0.5
    direction = grad / root + 0.01 * start
    ratio = 5.0 / direction.norm()
    torch.testing.assert_close(param.data, start - 0.1 * ratio * direction)
    assert optimizer.get_lamb_coeffs() == pytest.approx([ratio.item()])


def test_lamb_keeps_its_ratio_in_bounds() -> None:
    zero, large = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.full((3,), 1e6))
    optimizer = FusedLamb([zero, large], max_coeff=2.0)
    zero.grad, large.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [1.0, 2.0]
    with pytest.raises(OptimizerError, match="gradient_clipping"):
        FusedLamb(weights(), max_grad_norm=1.0)


def test_orthogonalize_a_matrix_of_low_rank() -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(64, 2, generator=generator) @ torch.randn(2, 256, generator=generator)
    torch.testing.assert_close(orthogonalize(matrix, "gram"), orthogonalize(matrix, "standard"), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8)])
def test_orthogonalize(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    made = {method: orthogonalize(matrix, method) for method in ("gram", "standard")}
    torch.testing.assert_close(made["gram"], made["standard"], atol=1e-4, rtol=1e-4)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.linalg.svdvals(made["gram"]).sub(1).abs().max() < 0.6
    assert ((u @ vh) * made["gram"]).sum() / (u @ vh).norm() / made["gram"].norm() > 0.95


def test_muon_moves_matrices_like_torchs_and_the_rest_like_adamw() -> None:
    ours, theirs = weights()[:2], weights()[:2]
    train(Muon(ours, lr=0.02, weight_decay=0.1, adam_lr=0.01), ours)
    # torch's works in bf16, so the two differ by its rounding.
    matrix = torch.optim.Muon([theirs[0]], lr=0.02, weight_decay=0.1)
    rest = torch.optim.AdamW([theirs[1]], lr=0.01, weight_decay=0.1)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        for param in theirs:
            param.grad = torch.randn(param.shape, generator=generator)
        matrix.step()
        rest.step()
    assert (ours[0] - theirs[0]).abs().max() < 2e-3
    assert (ours[1] - theirs[1]).abs().max() < 1e-6


def test_muon_leaves_embeddings_to_adam_when_told() -> None:
    by_group, by_mark = weights(), weights()
    by_mark[0].use_muon = False
    grouped = Muon([{"params": by_group[:1], "use_muon": False}, {"params": by_group[1:]}])
    marked = Muon(by_mark)
    train(grouped, by_group)
    train(marked, by_mark)
    assert "exp_avg" in grouped.state[by_group[0]] and "momentum_buffer" in grouped.state[by_group[2]]
    assert largest_difference(by_group, by_mark) == 0.0


def test_a_schedule_moves_both_rates_of_muon() -> None:
    start, params = weights()[1], weights()[1:2]
    optimizer = Muon(params, muon_lr=0.02, adam_lr=0.01)
    optimizer.param_groups[0]["lr"] = 0.002
    train(optimizer, params, steps=1)
    torch.testing.assert_close((params[0] - start).abs(), torch.full((9,), 0.001), atol=1e-6, rtol=0)


@pytest.mark.parametrize("cls", OURS)
def test_every_class_is_a_torch_optimizer_that_keeps_group_dicts(cls: type) -> None:
    params = weights()
    given = torch.optim.AdamW([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}]).param_groups
    optimizer = cls(given)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert all(made is group for made, group in zip(optimizer.param_groups, given, strict=True))
    params[0].grad = torch.ones_like(params[0])
    before = copy.deepcopy(params)
    given[0]["lr"] = 0.0
    assert optimizer.step(lambda: 3.0) == 3.0
    assert largest_difference(params, before) == 0.0
    optimizer.zero_grad()
    assert params[0].grad is None


@pytest.mark.parametrize("cls", [FusedAdam, FusedLion])
def test_gradients_are_kept_as_zeros_when_asked(cls: type) -> None:
    params = weights()
    optimizer = cls(params, set_grad_none=False)
    train(optimizer, params, steps=1)
    optimizer.zero_grad()
    assert all(param.grad.eq(0).all() for param in params)


@pytest.mark.parametrize("cls", OURS)
def test_state_dict_resumes_bit_equal(cls: type) -> None:
    params = weights()
    optimizer = cls(params)
    train(optimizer, params)
    twins = copy.deepcopy(params)
    resumed = cls(twins)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, params, seed=4)
    train(resumed, twins, seed=4)
    assert largest_difference(params, twins) == 0.0


@pytest.mark.parametrize("cls", CPU_FORMS)
@pytest.mark.parametrize("fp32", [True, False])
def test_states_of_16_bit_parameters(cls: type, fp32: bool) -> None:
    params = weights(torch.bfloat16)
    optimizer = cls(params, fp32_optimizer_states=fp32)
    train(optimizer, params)
    resumed = cls(params, fp32_optimizer_states=fp32)
    resumed.load_state_dict(optimizer.state_dict())
    train(resumed, params)
    wanted = torch.float32 if fp32 else torch.bfloat16
    states = [v for o in (optimizer, resumed) for s in o.state.values() for k, v in s.items() if k != "step"]
    assert {state.dtype for state in states} == {wanted}
    assert all(param.dtype == torch.bfloat16 for param in params)
