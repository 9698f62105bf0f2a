"""Values for a model that was made on the meta device: module by module, and sharded as they come.

Each module is initialized as its class says: by the `_init_weights(module)` of the nearest model around it (as those of
Transformers have), or by its own `reset_parameters()`. Modules come in the order of `Module.apply`, so random values
are those of the same model made whole by `to_empty`, tied again, and the same calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import swap_tensors

from deepspeed.comm.axis import Axis
from deepspeed.errors import UsageError
from deepspeed.zero.gathered import GatheredParameters
from deepspeed.zero.init_context import Init, write_whole
from deepspeed.zero.param import birth_writers, is_managed

Rule = Callable[[nn.Module], Any]


def is_without_values(model: nn.Module) -> bool:
    """Whether some of a model's parameters are on the meta device."""
    return any(not is_managed(param) and param.device.type == "meta" for param in model.parameters())


def materialize(model: nn.Module, axis: Axis, device: torch.device) -> None:
    """Give values to a model's tensors on the meta device, and shard its parameters as `zero.Init` does.

    All ranks of the axis call together; no rank has more than one module beside its slices.

    Args:
        model: changed in place; parameters stay the objects they are, but for those of recurrent layers.
        axis: ranks that have made the same model; the values of the first count.
        device: where it is to be.

    Raises:
        UsageError: nothing says which values a tensor has; names it.
    """
    birth = _Birth(Init.over(axis, device), device)
    birth_writers.append(write_whole)  # a model initializes what its children have been given, and is sharded already
    try:
        with torch.no_grad():
            birth.visit("", model, None)
    finally:
        birth_writers.remove(write_whole)
    birth.check()


class _Birth:
    def __init__(self, context: Init, device: torch.device) -> None:
        self._context, self._device = context, device
        self._met: set[nn.Module] = set()
        self._given: set[nn.Parameter] = set()
        self._count = 0  # of tensors that have been given values
        self._owed: list[tuple[str, nn.Module, str, int]] = []  # where, module, name, version: not written as yet

    def visit(self, path: str, module: nn.Module, rule: Rule | None) -> None:
        """Children first, as `Module.apply` has them."""
        if module in self._met:
            return
        self._met.add(module)
        rule, before = _rule_of(module) or rule, self._count
        for name, child in module.named_children():
            self.visit(f"{path}.{name}".lstrip("."), child, rule)
        self._give(path, module, rule, before)
        self._context.shard(module)

    def _give(self, path: str, module: nn.Module, rule: Rule | None, before: int) -> None:
        """Values for a module's own tensors; it may change those of modules in it, of which some have been given."""
        given = [*self._new_parameters(module), *self._new_buffers(module)]
        # Those of another module, which has been sharded by now: tied weights are initialized by both.
        tied = [param for param in module._parameters.values() if param in self._given and is_managed(param)]
        self._given.update(param for name, param in module._parameters.items() if param is not None and name in given)
        self._count += len(given) + len(tied)
        if self._count == before:
            return
        with GatheredParameters(tied, modifier_rank=self._context.axis.ranks[0], enabled=bool(tied)):
            self._initialize(path, module, rule, given)

    def _initialize(self, path: str, module: nn.Module, rule: Rule | None, given: list[str]) -> None:
        versions = {name: _own(module)[name]._version for name in given}

        def unwritten() -> list[str]:
            now = _own(module)
            return [name for name in given if now[name]._version == versions[name]]

        if rule is not None:
            rule(module)
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset) and (unwritten() or rule is None):
            reset()
        self._owed += [(f"{path}.{name}".lstrip("."), module, name, versions[name]) for name in unwritten()]

    def _new_parameters(self, module: nn.Module) -> list[str]:
        found = []
        for name, param in list(module._parameters.items()):
            if param is None or is_managed(param) or param.device.type != "meta":
                continue
            made = nn.Parameter(_blank(param, self._device), param.requires_grad)
            marks = dict(vars(param))  # of the client's, such as its row of the table of placements
            try:
                swap_tensors(param, made)
            except RuntimeError:  # somebody has a weak reference, as recurrent layers have: they hear of a new one
                setattr(module, name, made)
                param = made
            vars(param).update(marks)
            found.append(name)
        return found

    def _new_buffers(self, module: nn.Module) -> list[str]:
        found = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in found:
            module._buffers[name] = _blank(module._buffers[name], self._device)  # type: ignore[arg-type]
        return found

    def check(self) -> None:
        """See that what a module has not initialized itself was initialized by one around it.

        Raises:
            UsageError: it was not.
        """
        lost = [(where, module) for where, module, name, version in self._owed if _is_blank(module, name, version)]
        if lost:
            names = ", ".join(f"'{where}' of {type(module).__name__}" for where, module in lost[:3])
            raise UsageError(
                f"{len(lost)} tensor(s) on the meta device have no values, and nothing says which: {names}. Give the "
                f"class a reset_parameters(), or the model an _init_weights(module), or make it under zero.Init"
            )


def _own(module: nn.Module) -> dict[str, Any]:
    return {**module._buffers, **module._parameters}


def _rule_of(module: nn.Module) -> Rule | None:
    rule = getattr(module, "_init_weights", None)
    if not callable(rule) or isinstance(rule, nn.Module):
        return None
    return rule if len(inspect.signature(rule).parameters) == 1 else None


def _blank(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """NaN where there can be, so that what nobody writes is seen."""
    value: Any = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full(like.shape, value, dtype=like.dtype, device=device)


def _is_blank(module: nn.Module, name: str, version: int) -> bool:
    tensor = _own(module)[name]
    if not is_managed(tensor):
        floating = tensor.is_floating_point() or tensor.is_complex()
        return bool(tensor.isnan().any()) if floating else tensor._version == version
    with GatheredParameters([tensor]):
        return bool(tensor.isnan().any()) if tensor.is_floating_point() or tensor.is_complex() else True
