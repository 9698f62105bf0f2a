"""Tensor subclasses for optimizer state that is sharded over ranks or offloaded.

[Note: state tensors] User code changes optimizer state in place: it zeroes, prunes or scales it. Elementwise operations
run on this rank's part, in any storage tier, without communication. Operations that need the whole tensor (norms,
quantiles, rows, storage) raise a UsageError on every rank.
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

# Names of elementwise operations, without the underscore of in-place variants.
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
    """Read-only copy of a view of offloaded state; writes raise a UsageError, since they would be lost."""

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
    """Placeholder of an offloaded state tensor, on the meta device; operations load the values temporarily.

    `to` (unless it changes the dtype), `cpu` and `cuda` return the placeholder itself, so that code which moves all
    state does not load it.
    """

    _ds_borrow: Callable[[bool], AbstractContextManager[torch.Tensor]]

    @classmethod
    def of(cls, value: torch.Tensor, borrow: Callable[[bool], AbstractContextManager[torch.Tensor]]) -> Away:
        """Create a placeholder.

        Args:
            value: tensor with the shape, strides and dtype.
            borrow: returns a context with the values; its argument tells whether they are written.
        """
        placeholder = torch.empty_like(value, device="meta").as_subclass(cls)
        placeholder._ds_borrow = borrow
        return placeholder

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        places = {key: value for key, value in kwargs.items() if key != "copy"}  # which the parser of modules refuses
        dtype = torch._C._nn._parse_to(*args, **places)[1]  # pyright: ignore[reportAttributeAccessIssue]
        if not kwargs.get("copy") and (dtype is None or dtype == self.dtype):
            return self
        return self._with_values(torch.Tensor.to, (self, *args), kwargs, self, False)

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    cuda = cpu

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
        """Call `func` with real tensors in place of placeholders; results that are views become `ReadOnly` copies."""
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
    """Part of a sharded state tensor on this rank.

    Args:
        member: parameter to which the state belongs.
        key: name of the state tensor.
        local: elements on this rank; empty if it has none.
        shape: unsharded shape.
        start: index of the first element in the flattened unsharded tensor; None: not sharded like the parameter.
    """

    member: ParamRecord
    key: str
    local: torch.Tensor
    shape: torch.Size
    start: int | None

    @property
    def device(self) -> torch.device:
        """Return the device on which operations on the elements run."""
        group = self.member.group
        return group.tiers.optimizer.lends_on(group.device) if isinstance(self.local, Away) else self.local.device

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """Return the part of an operand that corresponds to this rank's elements.

        Args:
            value: tensor that can be broadcast to the unsharded shape.
        """
        if self.start is None or value.numel() == 1:
            return value.detach()
        if isinstance(value, ManagedParameter) and value._ds_member is self.member:
            if self.member.group.policy.gathers_before_use:  # the parameter is sharded in the same way as the state
                return self.member.own_values().to(self.device).view(self.local.shape)
        if value.shape != self.shape:
            value = value.expand(self.shape)
        part = value.detach().reshape(-1)[self.start : self.start + self.local.numel()]
        return part.to(self.device).view(self.local.shape)

    def local_operand(self, name: str, value: Any) -> Any:
        """Return the value to pass for an argument of the operation `name` on the local part.

        Raises:
            UsageError: the argument is a state tensor that is sharded in another way.
        """
        if isinstance(value, StateTensor):
            other = value._ds_piece
            if other.member is not self.member or other.start != self.start or other.shape != self.shape:
                raise self.refuse(f"{name} with state of '{other.member.name}', which is sharded in another way,")
            return other.local
        return self.cut(value) if isinstance(value, torch.Tensor) else value

    def wrap(self, first: StateTensor | None, value: Any) -> Any:
        """Wrap a result with the local part's shape as a state tensor, and return other results unchanged.

        Args:
            first: first argument of the operation, returned if `value` is its local part.
            value: result of the operation on the local part.
        """
        if not isinstance(value, torch.Tensor) or value.shape != self.local.shape:
            return value
        if first is not None and value is first._ds_piece.local:
            return first
        return StateTensor.of(replace(self, local=value))

    def assignment(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], str]:
        """Convert `tensor[index] = value` to an elementwise operation.

        Args:
            args: tensor, index and value; the index must be `...`, `:` or a bool mask of the unsharded shape.

        Returns:
            Function, its arguments, and its name.

        Raises:
            UsageError: another index, or a mask with a value that is not a scalar.
        """
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
        """Return the error for an operation that needs the unsharded tensor; `what` names the operation."""
        return UsageError(
            f"{what} on optimizer state {self.key!r} of parameter '{self.member.name}' needs the whole tensor, and "
            f"this rank has a part of it. deepspeed.utils.safe_get_full_optimizer_state(param, {self.key!r}) gives the "
            f"whole and safe_set_full_optimizer_state takes it, on all ranks together; what treats each element by "
            f"itself (zero_, mul_, copy_, …) works in place"
        )


class StateTensor(torch.Tensor):
    """Sharded state tensor with the unsharded shape; see [Note: state tensors]. `of` wraps a `Piece`."""

    _ds_piece: Piece

    @classmethod
    def of(cls, piece: Piece) -> StateTensor:
        base = torch.zeros((), dtype=piece.local.dtype, device=piece.device)
        tensor = torch.Tensor._make_subclass(cls, base.expand(piece.shape))
        tensor._ds_piece = piece
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an elementwise operation on the local part, or return metadata; else raise UsageError, on every rank."""
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
        """Strip the underscores of operators and in-place variants, and the `r` or `i` of `__radd__` or `__iadd__`."""
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
