"""Search for the operation that produced the first non-finite value, in a second run of forward and backward.

An operation produced it if it returns NaN for inputs without NaN, or infinity for inputs without infinity. Minus
infinity in a mask is not an error. Uninitialized memory is not checked.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.foundation.pytree import tensors_in
from deepspeed.ops.dispatch import DispatchMode
from deepspeed.profiling.module_attribution import FORWARD, OUTSIDE, Attribution

INPUT, UPDATE, OF_LOSS = "input", "update", "the loss, outside of the model"
_DIRECTIONS = ("forward", "backward", "forward again, in backward")
_UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_", "empty_permuted"}
_OF_MASKS = {
    "masked_fill", "masked_fill_", "where", "full", "full_like", "new_full", "fill", "fill_", "triu", "tril",
    "scalar_tensor", "lift_fresh", "_to_copy", "index_put", "index_put_", "masked_scatter", "_local_scalar_dense",
}  # fmt: skip


class Finding(NamedTuple):
    """Origin of the first non-finite value.

    Attributes:
        direction: "input", "forward", "backward", "forward again, in backward" (recomputation), or "update".
        module: name and class of the module, or "the loss, outside of the model"; for an input its position, for an
            update the parameter.
        operation: name of the operator; "" for inputs, updates and gradients from the loss.
        statistics: text of `describe` for the tensor with the value.
        inputs: inputs of the operation, for a dump; without an operation, the tensor with the value.
    """

    direction: str
    module: str
    operation: str
    statistics: str
    inputs: list[torch.Tensor]


def kinds_in(tensor: torch.Tensor) -> tuple[bool, bool, bool]:
    """Return whether a tensor has (NaN, plus infinity, minus infinity); a complex one: (NaN, any infinity, False)."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel() or tensor.device.type == "meta":
        return False, False, False
    if bool(torch.isfinite(tensor).all()):
        return False, False, False
    if tensor.is_complex():
        return bool(tensor.isnan().any()), bool(tensor.isinf().any()), False
    return bool(tensor.isnan().any()), bool((tensor == torch.inf).any()), bool((tensor == -torch.inf).any())


def describe(tensor: torch.Tensor) -> str:
    """Describe a tensor: shape, dtype, non-finite values, and the range of the finite ones."""
    values = tensor.detach()
    others = values[torch.isfinite(values)].float()
    rest = f"{float(others.min()):.4g} to {float(others.max()):.4g}" if others.numel() else "nothing else"
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    dtype = str(values.dtype).removeprefix("torch.")
    return f"{dtype}{list(values.shape)}, {nan} NaN, {inf} infinite, the others {rest}"


class Checker(DispatchMode):
    """Context that checks the output of every operation; `found` is the first that produces a non-finite value.

    Args:
        model: model whose module names appear in the finding.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model, self._modules = model, Attribution(model)
        self.found: Finding | None = None

    def __enter__(self) -> Any:
        self._modules.hook()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._modules.unhook()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        if self.found is not None or name in _UNWRITTEN:
            return func(*args, **kwargs)
        inputs = [tensor for tensor in tensors_in((args, kwargs))]
        before = [kinds_in(tensor) for tensor in inputs]
        copies = [t.detach().clone() for t in inputs] if name.endswith("_") else [t.detach() for t in inputs]
        out = func(*args, **kwargs)
        nan, inf, minus = (any(column) for column in zip(*before, (False,) * 3, strict=True))
        for tensor in tensors_in(out):
            is_nan, is_inf, is_minus = kinds_in(tensor)
            if (is_nan and not nan) or (is_inf and not inf) or (is_minus and not (minus or name in _OF_MASKS)):
                self._find(str(func), tensor, copies)
                break
        return out

    def _find(self, operation: str, tensor: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        whose, phase = self._modules.where()
        if whose in (None, OUTSIDE):
            module = "" if phase == FORWARD else OF_LOSS
        else:
            module = str(whose)
        if module != OF_LOSS:
            with contextlib.suppress(AttributeError):  # the model itself has no name
                module = f"{module} ({type(self._model.get_submodule(module)).__name__})".lstrip()
        self.found = Finding(_DIRECTIONS[phase], module, operation, describe(tensor), inputs)


def first_input(inputs: Any) -> Finding | None:
    """Return the first tensor in `inputs` with a NaN or plus infinity as a finding; None if there is none."""
    for index, tensor in enumerate(tensors_in(inputs)):
        nan, inf, _ = kinds_in(tensor)
        if nan or inf:
            return Finding(INPUT, f"tensor {index} of the inputs", "", describe(tensor), [tensor.detach()])
    return None
