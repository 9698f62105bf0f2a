"""Unwraps the Transformers model in a Lightning module or under adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.dependency_groups import ParameterSlice, out_axis
from deepspeed.errors import CompressionError
from deepspeed.foundation.transformers_model import pretrained_models

ADAPTER = ".lora_"  # in the names of what low-rank adapters bring
_BASE = "base_layer"


def inside(model: nn.Module, holding: str | None = None) -> tuple[str, Any]:
    """(what its names begin with, the model of Transformers); the model itself where there is none, or several.

    Args:
        model: what the engine trains.
        holding: name of a module: of several models the one that has it.
    """
    found = pretrained_models(model)
    if "" in found:
        return "", model
    if holding is not None:
        found = {name: module for name, module in found.items() if holding.startswith(f"{name}.")}
    if len(found) != 1:
        return "", model
    name, module = next(iter(found.items()))
    return f"{name}.", module


def left_on(model: nn.Module, mark: str) -> Any:
    """What the old calls left on the model, or on the one that a client has wrapped since; None: nothing."""
    return next((vars(module)[mark] for module in model.modules() if mark in vars(module)), None)


def plain_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of the model inside: names without what is around it, low-rank adapters added to their weights.

    Args:
        model: what the engine trains.
        state: all its weights, whole.

    Raises:
        CompressionError: adapters of another kind.
    """
    prefix, _ = inside(model)
    made = {}
    for name, value in state.items():
        if not name.startswith(prefix) or ADAPTER in name:
            continue
        short = name[len(prefix) :]
        home, _, last = name.rpartition(".")
        if home.endswith(f".{_BASE}"):
            module: Any = model.get_submodule(home.removesuffix(f".{_BASE}"))
            value = value + _delta(module, home.removesuffix(_BASE), state) if last == "weight" else value
            short = short.replace(f".{_BASE}.", ".")
        made[short] = value
    return made


def slots_under_adapters(model: nn.Module, slot: ParameterSlice) -> list[ParameterSlice]:
    """The slots of a parameter that adapters stand on: its own under the name it has there, and those of the adapters.

    What leaves a weight leaves the product that an adapter adds to it: rows of `lora_B`, columns of `lora_A`.

    Args:
        model: with plain LoRA of Linears or of Transformers' `Conv1D`.
        slot: by the name without adapters.

    Raises:
        CompressionError: there are adapters of another kind, or something else stands in the parameter's place.
    """
    home, _, last = slot.name.rpartition(".")
    module: Any = dict(model.named_modules()).get(home, nn.Module())
    base = getattr(module, _BASE, None)
    other = [name for name, _ in module.named_parameters() if not name.startswith(f"{_BASE}.")]
    if base is None or len(slot.axes) != 1 or not all(name.startswith(("lora_A.", "lora_B.")) for name in other):
        raise CompressionError(
            f"{slot.name} is not in {type(model).__name__}, nor under plain LoRA adapters: leave adapters of other "
            f"kinds off what is pruned, or prune before they are added"
        )
    made = [replace(slot, name=f"{home}.{_BASE}.{last}")]
    if last == "weight":
        side = "lora_B" if slot.axes[-1] == out_axis(base) else "lora_A"
        axis = 0 if side == "lora_B" else 1
        made += [
            ParameterSlice(f"{home}.{name}", (axis,), slot.table, scored=False)
            for name in other
            if name.startswith(f"{side}.")
        ]
    return made


def _delta(module: Any, home: str, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What the active adapters of a module add to its weight."""
    total: Any = 0
    for adapter in module.active_adapters:
        one, two = (state.get(f"{home}lora_{side}.{adapter}.weight") for side in "AB")
        if one is None or two is None or one.dim() != 2 or len(getattr(module, "lora_magnitude_vector", ())):
            raise CompressionError(
                f"{home[:-1]} has adapters that are no plain LoRA of a Linear: call merge_and_unload, then export"
            )
        added = (two.float() @ one.float()) * module.scaling[adapter]
        total = total + (added.t() if getattr(module, "fan_in_fan_out", False) else added)
    base = state[f"{home}{_BASE}.weight"]
    return total.to(base.dtype) if isinstance(total, torch.Tensor) else torch.zeros_like(base)
