"""Faults planted in the package, each caught by the check that is there for it (those of ranks: tests/parallel)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from deepspeed.compression import basic_layer, export
from deepspeed.compression.distill import Distiller
from deepspeed.compression.pruning import layer_selection, structured_removal
from deepspeed.compression.pruning.dependency_groups import Family, ParameterSlice
from deepspeed.compression.pruning.transformers_groups import head_shrinks
from deepspeed.compression.pruning.verify import build, prove
from deepspeed.errors import CompressionError
from tests.unit.compression import test_calls as calls
from tests.unit.compression import test_families as families
from tests.unit.compression.architectures import architecture
from tests.unit.compression.test_export import packed_folder


def test_an_untied_head() -> None:
    """Modules are made anew, so that a tie breaks."""
    given = basic_layer.compress_module

    def anew(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().clone())
        return given(module)

    with (
        mock.patch("deepspeed.compression.helper.compress_module", anew),
        pytest.raises(AssertionError),
    ):
        calls.test_init_compression_keeps_what_the_model_was()


def test_an_untied_head_after_a_removal(tmp_path: Path) -> None:
    """What is cut is put into new parameters."""

    def untied(param: torch.Tensor, values: torch.Tensor, given: Any = structured_removal.reshape) -> None:
        given(param, values)
        for module in model.modules():
            if module._parameters.get("weight") is param and isinstance(module, nn.Linear):
                module.weight = nn.Parameter(values.clone())

    model = calls.Branch()
    model.head.weight = model.up[0].weight = nn.Parameter(torch.randn(10, 8))
    model.up[0].bias = nn.Parameter(torch.zeros(10))
    kept = structured_removal.Removal({"up.0.weight": [(0, torch.arange(4))]})
    structured_removal.remove_from(model, kept)
    assert model.head.weight is model.up[0].weight and model.head.weight.shape == (4, 8)
    with mock.patch.object(structured_removal, "reshape", untied):
        structured_removal.remove_from(model, structured_removal.Removal({"up.0.weight": [(0, torch.arange(2))]}))
    assert model.head.weight is not model.up[0].weight, "the check above sees it"


def test_a_swapped_head() -> None:
    """One matrix of a head goes with another head: the twin refuses it."""
    model_class, config = architecture("Llama")
    model = build(model_class, config)
    shrink = head_shrinks(model, config)[0]

    def swapped(model: Any, config: Any) -> Any:
        found = head_shrinks(model, config)
        for one in found:
            for family in one.families:
                family.slots = [
                    ParameterSlice(s.name, s.axes, s.table.roll(8)) if "v_proj" in s.name else s for s in family.slots
                ]
        return found

    assert prove(model_class, config, head_shrinks, shrink)[1] <= 1e-5
    with pytest.raises(CompressionError, match="removed is not masked"):
        prove(model_class, config, swapped, shrink)


def test_a_dead_channels_bias() -> None:
    """Only filters are masked: a dead channel still gives the bias of its norm to what reads it."""
    pytest.importorskip("torch_pruning")

    def flags(self: Family, name: str, *rest: Any, given: Any = Family.flags) -> torch.Tensor:
        made = given(self, name, *rest)
        read = all(slot.axes[-1] == 1 for slot in self.slots if slot.name == name)
        return torch.ones_like(made) if read or name.endswith("bias") else made

    calls.test_channels_leave_with_their_norms()
    with (
        mock.patch.object(Family, "flags", flags),
        pytest.raises((AssertionError, CompressionError)),
    ):
        calls.test_channels_leave_with_their_norms()


def test_an_old_layer_index(tmp_path: Path) -> None:
    """Layers leave, and those that stay keep their numbers."""
    families.layers_leave("Llama", tmp_path / "right")
    with (
        mock.patch.object(layer_selection, "_update_attributes", lambda *_: None),
        pytest.raises((AssertionError, IndexError)),
    ):
        families.layers_leave("Llama", tmp_path / "wrong")


def test_a_teacher_in_train_mode() -> None:
    def told(self: Distiller, inputs: Any, kwargs: dict[str, Any]) -> Any:
        with torch.no_grad():
            return self.teacher(*inputs, **{key: value for key, value in kwargs.items() if key != "labels"})

    def given(self: Distiller, inputs: Any, kwargs: dict[str, Any], wanted: Any = Distiller._teacher_output) -> Any:
        return wanted(self, inputs, kwargs) if self.teacher is None else told(self, inputs, kwargs)

    with mock.patch.object(Distiller, "_teacher_output", given), pytest.raises(AssertionError):
        calls.test_distillation_is_the_sum_written_by_hand()


def test_unpacked_int8(tmp_path: Path) -> None:
    """De-quantized numbers are written back: nothing is smaller."""
    pytest.importorskip("compressed_tensors")

    def plain(model: Any, weights: str, group_size: int, folder: Path) -> None:
        from deepspeed.compression.utils import symmetric

        with torch.no_grad():
            for module in export.packable(model).values():
                module.weight.copy_(symmetric(module.weight, export.BITS[weights], module.out_features))
        model.save_pretrained(folder)

    with mock.patch.object(export, "_pack_aside", plain), pytest.raises(AssertionError):
        packed_folder(tmp_path, "int8")
