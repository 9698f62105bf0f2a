"""State tensors that are sharded over ranks or offloaded: elementwise operations run on the local part.

[Note: state tensors] Clients change optimizer state in place: they zero it, prune it, scale it. Elementwise operations
run on this rank's part, in any tier, and no rank waits for another. Operations that need the whole tensor (norms,
quantiles, rows, storage) raise, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from deepspeed.errors import UsageError
from deepspeed.foundation.pytree import leaves_in
from deepspeed.zero.parameters.parameter import (
    DENSE_METADATA,
    LIKE,
    METADATA,
    ManagedParameter,
    is_write,
    map_nested,
    name_of,
)
from deepspeed.zero.parameters.record import ParamRecord

# What treats each element by itself, without the underscore of what is done in place.
_ELEMENTWISE = frozenset(
    "abs absolute add addcdiv addcmul and bernoulli ceil clamp clamp_max clamp_min clip clone copy copysign cpu cuda "
    "div divide double eq exp exp2 expm1 exponential fill float floor floor_divide floordiv fmax fmin fmod frac ge "
    "greater greater_equal gt half bfloat16 hypot invert isfinite isinf isnan isneginf isposinf ldexp le lerp less "
    "less_equal log log10 log1p log2 logical_and logical_not logical_or logical_xor log_normal lt masked_fill maximum "
    "minimum mod mul multiply nan_to_num ne neg negative normal not_equal or pos positive pow random reciprocal relu "
    "remainder round rsqrt rsub sgn sigmoid sign signbit sqrt square sub subtract tanh to true_divide truediv trunc "
    "type type_as uniform where xlogy xor zero".split()
)
_SAME = frozenset(["detach", "data", "contiguous", "detach_", "requires_grad_"])


class ReadOnly(torch.Tensor):
    """A read-only copy of a view of offloaded state: a write, which would be lost, raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], ReadOnly) and is_write(name_of(func)):
            raise UsageError(
                f"{name_of(func)} on a view of optimizer state that rests in another tier: it would change a "
                f"temporary copy. Change the state tensor itself, or use deepspeed.utils.safe_set_full_optimizer_state"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Away(torch.Tensor):
    """Meta placeholder of an offloaded state tensor; operations load the values temporarily.

    Moves between devices have no effect, since clients move all state when they finish.
    """

    _ds_borrow: Callable[[bool], AbstractContextManager[torch.Tensor]]

    @classmethod
    def of(cls, value: torch.Tensor, borrow: Callable[[bool], AbstractContextManager[torch.Tensor]]) -> Away:
        """Create a placeholder with the shape and dtype of `value`; `borrow` provides the values, writable or not."""
        placeholder = torch.empty_like(value, device="meta").as_subclass(cls)
        placeholder._ds_borrow = borrow
        return placeholder

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    cpu = cuda = to

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = name_of(func), kwargs or {}
        first = args[0] if args and isinstance(args[0], Away) else None
        if name in METADATA or name in DENSE_METADATA or name == "as_subclass":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if first is not None and name in _SAME:
            return first
        return cls._with_values(func, args, kwargs, first, is_write(name))

    @staticmethod
    def _with_values(func: Any, args: Any, kwargs: Any, first: Away | None, writes: bool) -> Any:
        """Call `func` on the values of the placeholders."""
        lent: dict[int, torch.Tensor] = {}
        with ExitStack() as stack:

            def real(value: Any) -> Any:
                if not isinstance(value, Away):
                    return value
                if id(value) not in lent:
                    lent[id(value)] = stack.enter_context(value._ds_borrow(writes and value is first))
                return lent[id(value)]

            result = func(*map_nested(real, args), **map_nested(real, kwargs))
            if writes and first is not None:
                return None if result is None else first
            storages = {tensor.untyped_storage()._cdata for tensor in lent.values()}

            def guard(value: Any) -> Any:
                if type(value) is not torch.Tensor or value.untyped_storage()._cdata not in storages:
                    return value
                if first is not None and value.data_ptr() == lent[id(first)].data_ptr():
                    if value.shape == first.shape and value.dtype == first.dtype:
                        return first
                return value.clone().as_subclass(ReadOnly)

            return map_nested(guard, result)


@dataclass(frozen=True)
class Piece:
    """This rank's part of a state tensor.

    Args:
        member: the tensor's parameter.
        key: name in the state.
        local: the elements; empty if this rank has none.
        shape: shape of the whole tensor.
        start: first element in the flattened tensor; None if the tensor is not sharded like the parameter.
    """

    member: ParamRecord
    key: str
    local: torch.Tensor
    shape: torch.Size
    start: int | None

    @property
    def device(self) -> torch.device:
        """Return the device of the elements during use."""
        group = self.member.group
        return group.tiers.optimizer.lends_on(group.device) if isinstance(self.local, Away) else self.local.device

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """Return the part of an operand that matches this rank's elements; it broadcasts to the whole shape."""
        if self.start is None or value.numel() == 1:
            return value.detach()
        if isinstance(value, ManagedParameter) and value._ds_member is self.member:
            if self.member.group.policy.gathers_before_use:  # its own shard is cut as the state is
                return self.member.own_values().to(self.device).view(self.local.shape)
        if value.shape != self.shape:
            value = value.expand(self.shape)
        part = value.detach().reshape(-1)[self.start : self.start + self.local.numel()]
        return part.to(self.device).view(self.local.shape)

    def local_operand(self, name: str, value: Any) -> Any:
        """Return the argument of an operation `name` for the local part."""
        if isinstance(value, StateTensor):
            other = value._ds_piece
            if other.member is not self.member or other.start != self.start or other.shape != self.shape:
                raise self.refuse(f"{name} with state of '{other.member.name}', which is sharded in another way,")
            return other.local
        return self.cut(value) if isinstance(value, torch.Tensor) else value

    def wrap(self, first: StateTensor | None, value: Any) -> Any:
        """Wrap a result of the local part's shape as a state tensor; other results are returned unchanged."""
        if not isinstance(value, torch.Tensor) or value.shape != self.local.shape:
            return value
        if first is not None and value is first._ds_piece.local:
            return first
        return StateTensor.of(replace(self, local=value))

    def assignment(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], str]:
        """Convert `tensor[index] = value` to an elementwise operation: with a mask, or on all elements."""
        target, index, value = args
        if index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
            whole = isinstance(value, torch.Tensor) and value.numel() != 1
            return (torch.Tensor.copy_ if whole else torch.Tensor.fill_), (target, value), "copy_"
        if isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.shape == self.shape:
            if not isinstance(value, torch.Tensor) or value.numel() == 1:
                number = value.item() if isinstance(value, torch.Tensor) else value
                return torch.Tensor.masked_fill_, (target, index, number), "masked_fill_"
        raise self.refuse("assignment to some places")

    def refuse(self, what: str) -> UsageError:
        """Create the error for an operation that needs the whole tensor."""
        return UsageError(
            f"{what} on optimizer state {self.key!r} of parameter '{self.member.name}' needs the whole tensor, and "
            f"this rank has a part of it. deepspeed.utils.safe_get_full_optimizer_state(param, {self.key!r}) gives the "
            f"whole and safe_set_full_optimizer_state takes it, on all ranks together; what treats each element by "
            f"itself (zero_, mul_, copy_, …) works in place"
        )


class StateTensor(torch.Tensor):
    """A sharded state tensor, with the shape of the whole tensor and no memory of its own."""

    _ds_piece: Piece

    @classmethod
    def of(cls, piece: Piece) -> StateTensor:
        base = torch.zeros((), dtype=piece.local.dtype, device=piece.device)
        tensor = torch.Tensor._make_subclass(cls, base.expand(piece.shape))
        tensor._ds_piece = piece
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an elementwise operation on the local part; any other operation raises, on every rank."""
        name, kwargs = name_of(func), kwargs or {}
        first = args[0] if args and isinstance(args[0], StateTensor) else None
        if first is not None:
            if name in _SAME:
                return first
            if name in METADATA or name in DENSE_METADATA or name in LIKE:
                with torch._C.DisableTorchFunctionSubclass():
                    like = torch.empty(first.shape, dtype=first.dtype, device=first.device) if name in LIKE else first
                    return func(like, *args[1:], **kwargs)
        piece = next(leaves_in((args, kwargs), StateTensor))._ds_piece
        writes = is_write(name)
        if name == "__setitem__" and first is not None:
            func, args, name = first._ds_piece.assignment(args)
        if cls._base(name) not in _ELEMENTWISE or kwargs.get("out") is not None or (writes and first is None):
            raise piece.refuse(name)
        if name == "where" and len(args) + len(kwargs) < 3:
            raise piece.refuse("where (the places of what is not zero)")
        local = partial(piece.local_operand, name)
        result = func(*map_nested(local, args), **map_nested(local, kwargs))
        return first if writes else map_nested(partial(piece.wrap, first), result)

    @staticmethod
    def _base(name: str) -> str:
        """Return the name of an operation without operator, reflection and in-place marks."""
        if name.startswith("__") and name.endswith("__"):
            inner = name[2:-2]
            return inner if inner in _ELEMENTWISE or inner[:1] not in "ir" else inner[1:]
        return name.rstrip("_")

    def __repr__(self) -> str:  # type: ignore[override]
        piece = self._ds_piece
        return f"<optimizer state {piece.key} of {piece.member.name}: {tuple(piece.shape)}, {piece.local.numel()} here>"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, proto: int) -> Any:
        raise self._ds_piece.refuse("pickling")
