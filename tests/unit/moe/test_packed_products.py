"""Packed experts by products of this package: values, gradients, neighbours, and which modules are recognized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.moe import expert_parallel
from deepspeed.moe.expert_parallel import ExpertLocation, become_parallel
from deepspeed.moe.packed_layout import computes, runs_grouped
from deepspeed.moe.packed_products import Activation, ExpertMatrices, SwiGLU, run_packed, swiglu
from deepspeed.moe.structure import ExpertStructure, find_experts, tried

COUNT, WIDTH, INNER, ROWS, CHOICES = 5, 12, 8, 23, 3


def interleaved(hidden: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's gate."""
    gate, up = hidden[..., ::2].clamp(max=0.7), hidden[..., 1::2].clamp(-0.7, 0.7)
    return (up + 1) * gate * torch.sigmoid(1.7 * gate)


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": swiglu,
    "swiglu, by autograd": swiglu,
    "interleaved": interleaved,
    "no gate": nn.functional.gelu,
}
KINDS: dict[str, tuple[Callable[[], Activation], bool, bool, int]] = {  # activation, transposed, biases, width of `up`
    "swiglu": (SwiGLU, False, False, 2 * INNER),
    "swiglu, by autograd": (lambda: Activation(swiglu), False, True, 2 * INNER),
    "interleaved": (lambda: Activation(interleaved), True, True, 2 * INNER),
    "no gate": (lambda: Activation(nn.functional.gelu), False, False, INNER),
}


def inputs_of(kind: str, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], torch.Tensor, bool]:
    """Leaves (rows, weights, matrices, biases), choices; expert 2 has no rows, and row 0 no expert."""
    _, transposed, biased, outer = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, WIDTH), (ROWS, CHOICES), (COUNT, outer, WIDTH), (COUNT, WIDTH, INNER)]
    shapes += [(COUNT, outer), (COUNT, WIDTH)] if biased else []
    leaves = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if transposed:
        leaves[2:4] = [leaf.transpose(1, 2).contiguous() for leaf in leaves[2:4]]
    index = torch.rand(ROWS, COUNT, generator=generator).argsort(1)[:, :CHOICES]
    index[index == 2] = -1
    index[0] = -1
    return [leaf.requires_grad_() for leaf in leaves], index, transposed


def one_by_one(kind: str, leaves: list[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
    """The formula, for one pair after the other."""
    rows, weights, up, down, *biases = leaves
    transposed, out = KINDS[kind][1], [rows.new_zeros(WIDTH) for _ in rows]
    for row, choice in (index >= 0).nonzero().tolist():
        expert = index[row, choice]
        first, second = (each[expert].T if transposed else each[expert] for each in (up, down))
        hidden = first @ rows[row] + (biases[0][expert] if biases else 0)
        inner = FORMULAS[kind](hidden.unsqueeze(0))[0]
        result = second @ inner + (biases[1][expert] if biases else 0)
        out[row] = out[row] + result * weights[row, choice]
    return torch.stack(out)


def packed(kind: str, leaves: list[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
    rows, weights, up, down, *biases = leaves
    up_bias, down_bias = biases or (None, None)
    matrices = ExpertMatrices(up, down, up_bias, down_bias, KINDS[kind][1])
    return run_packed(rows, index, weights, matrices, KINDS[kind][0]())


def gradients(out: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    factor = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
    return list(torch.autograd.grad((out * factor).sum(), leaves))


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind: str) -> None:
    leaves, index, _ = inputs_of(kind)
    ours, expected = packed(kind, leaves, index), one_by_one(kind, leaves, index)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    pairs = zip(gradients(ours, leaves), gradients(expected, leaves), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert not gradients(ours := packed(kind, leaves, index), leaves)[2][2].any() and not ours[0].any()


@pytest.mark.parametrize("trained", [[0], [1], [2], [3], [5], [0, 4]])
def test_some_inputs_are_frozen(trained: list[int]) -> None:
    leaves, index, _ = inputs_of("interleaved")
    every = gradients(packed("interleaved", leaves, index), leaves)
    some = [leaf if position in trained else leaf.detach() for position, leaf in enumerate(leaves)]
    out = packed("interleaved", some, index)
    for position, mine in zip(trained, gradients(out, [some[position] for position in trained]), strict=True):
        assert torch.equal(mine, every[position])


@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16(kind: str) -> None:
    """The error is that of rounded operations: of one product after the other in bf16, or less."""
    leaves, index, _ = inputs_of(kind, torch.bfloat16)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact, rounded = packed(kind, wide, index), one_by_one(kind, leaves, index)
    ours = packed(kind, leaves, index)
    assert ours.dtype == torch.bfloat16
    lists = [[out, *gradients(out, of)] for out, of in ((ours, leaves), (rounded, leaves), (exact, wide))]
    for mine, theirs, right in zip(*lists, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - right).norm() <= 1.2 * (theirs - right).norm() + 1e-3 * right.norm()


def test_weights_in_fp32_beside_rows_in_bf16() -> None:
    leaves, index, _ = inputs_of("swiglu", torch.bfloat16)
    leaves[1] = leaves[1].detach().float().requires_grad_()
    out = packed("swiglu", leaves, index)
    assert out.dtype == torch.bfloat16
    assert [grad.dtype for grad in gradients(out, leaves)] == [leaf.dtype for leaf in leaves]


def test_no_rows_at_all() -> None:
    leaves, index, _ = inputs_of("interleaved")
    rows, weights, *tensors = leaves
    out = packed("interleaved", [rows[:0], weights[:0], *tensors], index[:0])
    assert out.shape == (0, WIDTH)
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert not grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_others(kind: str, dtype: torch.dtype) -> None:
    leaves, index, _ = inputs_of(kind, dtype)
    rows, weights, *tensors = (leaf.detach() for leaf in leaves)
    whole = packed(kind, [rows, weights, *tensors], index)
    for first, last in [(0, 1), (3, 5), (4, 21), (2, 23)]:
        some = slice(first, last)
        assert torch.equal(packed(kind, [rows[some], weights[some], *tensors], index[some]), whole[some])


def test_under_autocast_products_have_the_dtype_of_the_parameters() -> None:
    leaves, index, _ = inputs_of("swiglu", torch.float32)
    out = packed("swiglu", leaves, index)
    expected = [out, *gradients(out, leaves)]
    with torch.autocast("cpu", torch.bfloat16):
        out = packed("swiglu", leaves, index)
        found = [out, *gradients(out, leaves)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


# -- recognition ------------------------------------------------------------------------------------------------------


def structure_of(module: nn.Module) -> ExpertStructure:
    structure, why = tried(module, next(find_experts(module))[2], 2)
    assert not why
    return structure


def transformers_experts(family: str, implementation: str = "grouped_mm") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from tests import zoo

    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(next(zoo.configs(f"{family}ForCausalLM"))())
    model.set_experts_implementation(implementation)
    return next(find_experts(model))[1]


@pytest.mark.parametrize(
    ("family", "inner", "quick"),
    [("Mixtral", "_apply_gate", True), ("GptOss", "_apply_gate", False), ("NemotronH", "act_fn", False)],
)
def test_experts_of_transformers_are_recognized(family: str, inner: str, quick: bool) -> None:
    module = transformers_experts(family)
    layout = structure_of(module).layout
    assert layout is not None and layout.inner == inner and runs_grouped(module)
    assert (type(layout.activation(module)) is SwiGLU) is quick


def scaled(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return 2 * type(self).__mro__[1].forward(self, hidden, index, weights)


def test_only_code_that_transformers_replaces_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that overrides forward, one whose forward is patched, and an interface of another's."""
    module: Any = transformers_experts("Mixtral")
    kind = type(module)
    assert runs_grouped(module)
    module.__class__ = type("Scaled", (kind,), {"forward": scaled})
    assert not runs_grouped(module) and structure_of(module).layout is None
    module.__class__ = kind
    module.has_bias = None  # as where a release does not say it
    assert structure_of(module).layout is None
    module.has_bias = False
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", scaled)
        assert not runs_grouped(module)
    from transformers.integrations import moe

    with monkeypatch.context() as patch:
        patch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", scaled)
        assert not runs_grouped(module)
    assert runs_grouped(module)


class Doubling(nn.Module):
    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        return 2 * gate if self.training else gate


@pytest.mark.usefixtures("without_group")
def test_what_a_user_changes_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Implementations of experts, hooks, another activation function, another gate, the mode of training."""
    from deepspeed.comm.fake_world import fake_ranks
    from deepspeed.comm.process_groups.axis import world_axis

    module: Any = transformers_experts("Mixtral")
    with fake_ranks(0, 1):
        structure = structure_of(module)
        become_parallel(module, ExpertLocation(world_axis("ep"), "experts", structure.count, [0]), structure)
        called, runs = list[Any](), list[int]()
        monkeypatch.setattr(expert_parallel, "run_packed", lambda *args: runs.append(1) or run_packed(*args))
        hidden = torch.randn(7, module.hidden_dim)
        index = torch.arange(14).view(7, 2) % structure.count
        weights = torch.rand(7, 2)

        def both() -> None:
            """Ours, and Transformers' own products of the same module."""
            before = len(runs)
            rows = [hidden.clone().requires_grad_() for _ in range(2)]
            outs = [module(rows[0], index, weights)]
            with monkeypatch.context() as patch:
                patch.setattr(expert_parallel, "computes", lambda *_: False)
                outs.append(module(rows[1], index, weights))
            assert len(runs) == before + 1
            torch.testing.assert_close(*outs)
            torch.testing.assert_close(
                *(torch.autograd.grad(out.sum(), row)[0] for out, row in zip(outs, rows, strict=True))
            )

        both()
        for register in ("register_forward_hook", "register_full_backward_hook"):
            handle = getattr(module.act_fn, register)(lambda *args: called.append(args) or None)
            before = len(runs)
            module(hidden.clone().requires_grad_(), index, weights).sum().backward()
            assert called and len(runs) == before
            called.clear()
            handle.remove()
        handle = nn.modules.module.register_module_forward_hook(lambda *args: called.append(args) or None)
        assert not computes(module, hidden.device)
        handle.remove()
        assert computes(module, hidden.device)
        module.act_fn = nn.GELU()
        both()
        module.act_fn = Doubling()
        for training in (True, False):
            module.train(training)
            both()
        module.train()
        rows = [hidden.clone().requires_grad_() for _ in range(2)]
        for row, training in zip(rows, (True, False), strict=True):
            out = module.train()(row, index, weights)
            module.train(training)
            out.sum().backward()
        assert torch.equal(rows[0].grad, rows[1].grad)  # type: ignore[arg-type]
        module._apply_gate = lambda hidden: hidden.chunk(2, -1)[0].clamp(max=0.1)
        both()
        for chosen, ours_runs in [("batched_mm", False), ("eager", False), (None, False), ("grouped_mm", True)]:
            module.config._experts_implementation = chosen
            assert computes(module, hidden.device) is ours_runs
        assert not computes(module, torch.device("meta"))
