"""Base class of optimizers in host memory: one native pass per tensor, or the same arithmetic in plain torch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from deepspeed.errors import OptimizerError
from deepspeed.native import KINDS, library, threads
from deepspeed.ops.group_optimizer import GroupOptimizer, State

# Elements that plain torch updates at once: few enough for the caches, so that memory is read and written once.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Fold:
    """Gradient of one update, and a tensor for a rounded copy of the new values.

    Args:
        gradient: tensor with as many elements as the parameter, of any floating-point dtype.
        out: tensor with as many elements, of any floating-point dtype, set to the new values; None: no copy.
    """

    gradient: Tensor
    out: Tensor | None = None


class _NativeLeaf(ctypes.Structure):
    """ctypes mirror of `Leaf` in optimizers.cpp."""

    _fields_ = [
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("param", "gradient", "first", "second", "out")),
        *((f"{name}_kind", ctypes.c_int32) for name in ("param", "gradient", "first", "second", "out")),
        ("factor", ctypes.c_float),
    ]


class HostOptimizer(GroupOptimizer):
    """Optimizer that updates each tensor in one pass over host memory.

    Attributes:
        folds: gradients and rounded copies of single parameters; other parameters use `.grad`. The caller sets this
            attribute for the time of a `step()`.
        factor: multiplier of every gradient, set in the same way.
        kernel: name of the native function.
        moments: names of the states with the parameter's shape.
    """

    kernel: ClassVar[str]
    moments: ClassVar[tuple[str, ...]]
    folds: Mapping[Tensor, Fold] | None = None
    factor: float = 1.0

    def __init__(
        self, params: Any, *, fp32_optimizer_states: bool, moments_dtype: torch.dtype | None, **defaults: Any
    ) -> None:
        """Create the optimizer; states are allocated at the first step.

        Args:
            params: tensors, or group dicts.
            fp32_optimizer_states: whether the moments of 16-bit parameters are fp32, instead of the parameters' dtype.
            moments_dtype: dtype of the moments for all parameters; None: see `fp32_optimizer_states`.
            defaults: default hyperparameters of the groups, such as `lr`.

        Raises:
            OptimizerError: a hyperparameter is out of range.
        """
        self.fp32_optimizer_states = fp32_optimizer_states
        self.moments_dtype = moments_dtype
        super().__init__(params, **defaults)

    def step_group(self, group: State) -> None:
        for param in group["params"]:
            fold = (self.folds or {}).get(param)
            if fold is None and param.grad is not None:
                if param.grad.is_sparse:
                    self.step_rows(group, param, param.grad.coalesce())
                    continue
                fold = Fold(param.grad)
            if fold is not None:
                self._step_param(group, param, fold)

    def step_rows(self, group: State, param: Tensor, grad: Tensor) -> None:
        """Update the rows of a sparse gradient.

        Args:
            group: group of the parameter.
            param: the dense parameter.
            grad: gradient, sparse in its first dim and coalesced.

        Raises:
            OptimizerError: the optimizer does not support sparse gradients, as its update also changes other rows.
        """
        raise OptimizerError(
            f"{type(self).__name__} takes dense gradients, and one of shape {tuple(grad.shape)} is sparse: use "
            "DeepSpeedCPUAdagrad, or an embedding with sparse=False"
        )

    def load_state_dict(self, state_dict: State) -> None:
        """Load a state from `state_dict()`; moments are converted to this optimizer's dtype."""
        super().load_state_dict(state_dict)
        # torch has cast them to the parameters' dtype, which rounds fp32 moments of 16-bit parameters.
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if name != "step" and torch.is_tensor(value):
                    dtype = self._moments_dtype(param)
                    self.state[param][name] = torch.empty_like(param, dtype=dtype).copy_(value)

    def numbers(self, group: State, state: State) -> tuple[float, ...]:
        """Return the fields of the update's struct in optimizers.cpp; the step count in `state` includes this step."""
        raise NotImplementedError(f"{type(self).__name__} has no kernel of its own")

    def fresh_state(self, group: State, param: Tensor, dtype: torch.dtype) -> State:
        """Return the state before the first step, with moments of `dtype`."""
        return {name: torch.zeros_like(param, dtype=dtype) for name in self.moments}

    def _moments_dtype(self, param: Tensor) -> torch.dtype:
        if self.moments_dtype is not None:
            return self.moments_dtype
        return torch.promote_types(param.dtype, torch.float32) if self.fp32_optimizer_states else param.dtype

    def _step_param(self, group: State, param: Tensor, fold: Fold) -> None:
        for role, other in (("gradient", fold.gradient), ("out", fold.out)):
            if other is not None and other.numel() != param.numel():
                raise OptimizerError(
                    f"{type(self).__name__}: {role} has {other.numel()} elements, its parameter of shape "
                    f"{tuple(param.shape)} has {param.numel()}; give as many"
                )
        state: State = self.state[param]
        if not state:
            state.update(self.fresh_state(group, param, self._moments_dtype(param)))
        if not self._step_natively(group, param, fold, state):
            self._step_in_torch(group, param, fold, state)

    def _step_natively(self, group: State, param: Tensor, fold: Fold, state: State) -> bool:
        native = library()
        if native is None or state.keys() - {"step"} != set(self.moments):  # amsgrad has one more moment
            return False
        moments = [state[name] for name in self.moments]
        tensors = [param, fold.gradient, *moments, *([] if fold.out is None else [fold.out])]
        served = (t.device.type == "cpu" and t.dtype in KINDS and t.is_contiguous() for t in tensors)
        if not all(served) or any(t.numel() != param.numel() for t in tensors):
            return False
        if "step" in state:
            state["step"] += 1
        numbers = self.numbers(group, state)
        first, second = moments if len(moments) == 2 else (moments[0], None)
        columns = (param, fold.gradient, first, second, fold.out)
        leaf = _NativeLeaf(
            param.numel(),
            *(None if t is None else t.data_ptr() for t in columns),
            *(0 if t is None else KINDS[t.dtype] for t in columns),
            self.factor,
        )
        rule = (ctypes.c_float * len(numbers))(*numbers)
        getattr(native, self.kernel)(ctypes.byref(leaf), rule, ctypes.c_int(threads()))
        increment_version(param)
        return True

    def _step_in_torch(self, group: State, param: Tensor, fold: Fold, state: State) -> None:
        """Run the step in torch instead of native code, chunk by chunk, with `update` in fp32 or wider."""
        dtype = torch.promote_types(param.dtype, torch.float32)
        shaped = [name for name in state if name != "step"]
        out = param if fold.out is None else fold.out
        columns = [param, fold.gradient, out, *(state[name] for name in shaped)]
        counted = state
        for values, gradient, copy, *moments in self._chunks(columns):
            # torch's fused kernels need elements in memory order.
            new_values = values.to(dtype).contiguous()
            new_moments = [moment.to(dtype).contiguous() for moment in moments]
            counted = {n: v.clone() if torch.is_tensor(v) else v for n, v in state.items() if n not in shaped}
            counted.update(zip(shaped, new_moments, strict=True))
            scaled = gradient.to(values.device, dtype).contiguous().mul(self.factor)
            self.update(group, [new_values], [scaled], [counted])
            for old, new in zip([values, *moments], [new_values, *new_moments], strict=True):
                if old is not new:
                    old.copy_(new)
            if copy is not values:
                copy.copy_(new_values)
        state.update({name: value for name, value in counted.items() if name not in shaped})

    @staticmethod
    def _chunks(columns: list[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return tuples with a chunk of each tensor; a single tuple of whole tensors if one is not contiguous."""
        if all(t.is_contiguous() for t in columns):
            return list(zip(*(t.view(-1).split(_CHUNK) for t in columns), strict=True))
        return [tuple(t.view(columns[0].shape) for t in columns)]
