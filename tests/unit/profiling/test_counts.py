"""Operations of ten architectures, as integers, against closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.errors import ArgumentError, UsageError
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from deepspeed.profiling.flops_profiler.profiler import (
    ModuleProfile,
    flops_to_string,
    number_to_string,
    params_to_string,
)
from tests.unit.profiling.architectures import CASES, CELLS, B, E, N, S, V, ids, lin, numbers


def counted(model: nn.Module, x: torch.Tensor) -> FlopsProfiler:
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(x).square().sum().backward()
    profiler.stop_profile()
    return profiler


def adds_up(rows: dict[str, ModuleProfile]) -> list[str]:
    """Modules that are not the sum of their own operations and their children's."""
    wrong = []
    for name, row in rows.items():
        children = [r for n, r in rows.items() if n and n.rpartition(".")[0] == name]
        below = [sum(column) for column in zip(*((c.forward, c.backward, c.again) for c in children), strict=True)]
        if (row.forward, row.backward, row.again) != tuple(
            a + b for a, b in zip(row.own, below or (0, 0, 0), strict=True)
        ):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(("name", "fused", "again"), CELLS)
def test_counts_equal_closed_forms(name: str, fused: bool, again: bool | None) -> None:
    case = CASES[name]
    profiler = counted(case.make(fused, again), case.inputs())
    rows = profiler.rows()
    assert (rows[""].forward, rows[""].backward, rows[""].again) == case.counts(fused, again)
    assert adds_up(rows) == []
    assert profiler.outside() == (0, 0, 0)


def test_backward_stays_with_a_module_whose_input_needs_no_gradient() -> None:
    """Hooks on tensors give it to a neighbour."""
    rows = counted(CASES["mlp"].make(False, None), numbers()).rows()
    assert rows["layers.0"].backward == lin(N, E, 4 * E)
    assert rows["layers.1"].backward == 2 * lin(N, 4 * E, V)


def test_each_parent_of_a_shared_module_has_its_own_calls() -> None:
    rows = counted(CASES["shared"].make(False, False), ids()).rows()
    assert rows["one.inner"].forward == rows["other.inner"].forward == lin(N, E, E)
    assert rows["one.inner"].backward == rows["other.inner"].backward == 2 * lin(N, E, E)


class Borrower(nn.Module):
    """Its second child calls a module that lies in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(E, E), nn.Identity()
        self.second.forward = lambda x: self.first(x)  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x)


def test_a_module_called_elsewhere_than_where_it_lies_counts_where_it_is_called() -> None:
    rows = counted(Borrower(), numbers()).rows()
    assert rows["first"].forward == 0 and rows["second.<first>"].forward == rows["second"].forward == lin(N, E, E)
    assert adds_up(rows) == []


def test_autocast_and_repeated_sessions_change_no_count() -> None:
    model = CASES["gpt"].make(True, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = counted(model, ids())
    again = counted(model, ids())
    assert first.get_total_flops() == again.get_total_flops() == CASES["gpt"].counts(True, None).forward
    assert model(ids()).shape == (*ids().shape, V)  # nothing stays patched
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_loss_is_outside_of_the_model() -> None:
    model, weight = nn.Linear(E, E), torch.randn(E, V)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    (model(numbers()) @ weight).sum().backward()
    profiler.stop_profile()
    assert profiler.get_total_flops() == lin(N, E, E)
    assert profiler.outside() == (lin(N, E, V), lin(N, E, V), 0)


def test_an_operator_without_a_formula_is_named_with_its_share() -> None:
    class Distances(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cdist(x, x, p=1.0)

    model = Distances()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(1, 600, 40))
    profiler.stop_profile()
    shares = dict(profiler.without_formula())
    assert max(shares, key=shares.__getitem__) == "aten._cdist_forward" and 0.5 < shares["aten._cdist_forward"] <= 1.0


def test_what_is_ignored_counts_nothing() -> None:
    model = CASES["gpt"].make(False, None)
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=[type(model.blocks[0])])
    model(ids()).sum().backward()
    profiler.stop_profile()
    rows = profiler.rows()
    assert (rows[""].forward, rows[""].backward) == (lin(N, E, V), 2 * lin(N, E, V))


@pytest.mark.parametrize("inference", [False, True])
def test_profile_of_a_model(inference: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = CASES["gpt"].make(True, None)
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    with torch.inference_mode(inference):
        flops, macs, params = get_model_profile(model, args=[ids()], as_string=False)
    assert flops == 2 * macs == CASES["gpt"].counts(True, None).forward
    assert params == sum(p.numel() for p in model.parameters())
    assert [module.training for module in model.modules()] == modes
    text = capsys.readouterr().out
    for words in (
        "DeepSpeed Flops Profiler",
        "Profile Summary at step 1:",
        "fwd MACs per GPU",
        "Detailed Profile per GPU",
    ):
        assert words in text
    assert text.count("Linear, in_features=8, out_features=11") == 1


def test_fused_encoder_layers_are_counted_too() -> None:
    layer = nn.TransformerEncoderLayer(E, 2, dim_feedforward=16, batch_first=True)
    assert torch.backends.mha.get_fastpath_enabled()
    attention = lin(N, E, 3 * E) + lin(N, E, E) + 4 * B * S * S * E
    flops, _, _ = get_model_profile(layer, args=[numbers()], print_profile=False, as_string=False)
    assert flops == attention + 2 * lin(N, E, 16)
    assert torch.backends.mha.get_fastpath_enabled()


def test_texts_and_mistakes(tmp_path) -> None:
    assert number_to_string(6.28e12) == "6.28 T" and flops_to_string(0.0) == "0.00 FLOPS"
    assert params_to_string(336.23e6) == "336.23 M" and params_to_string(2e9) == "2.00 B"
    with pytest.raises(ArgumentError, match="needs inputs"):
        get_model_profile(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="nothing was profiled"):
        FlopsProfiler(nn.Linear(2, 2)).get_total_flops()
    model = nn.Linear(E, V)
    profiler = counted(model, numbers())
    profiler.print_model_profile(output_file=str(tmp_path / "deep" / "profile.txt"))
    assert "fwd flops per GPU" in (tmp_path / "deep" / "profile.txt").read_text()
    profiler.end_profile()
    with pytest.raises(UsageError):
        profiler.rows()
