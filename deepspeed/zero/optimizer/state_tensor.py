"""State tensors that are sharded over ranks or rest in another tier: elementwise operations run on the local part.

[Note: state tensors] Clients change optimizer state in place: they zero it, prune it, scale it. What treats each
element by itself is done here on what this rank has, wherever that rests, and no rank waits for another. What needs the
whole tensor (norms, quantiles, rows, storage) raises, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepspeed.errors import UsageError
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
    """A copy of what was viewed while it was at hand: a write, which would be lost, raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], ReadOnly) and is_write(name_of(func)):
            raise UsageError(
                f"{name_of(func)} on a view of optimizer state that rests in another tier: it would change a copy that "
                f"nobody keeps. Change the state tensor itself, or use deepspeed.utils.safe_set_full_optimizer_state"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Away(torch.Tensor):
    """Stands, on the meta device, for a state tensor that rests in another tier; what uses it brings it for that time.

    To be moved changes nothing, as clients move all state at their end.
    """

    _ds_borrow: Callable[[bool], AbstractContextManager[torch.Tensor]]

    @classmethod
    def of(cls, value: torch.Tensor, borrow: Callable[[bool], AbstractContextManager[torch.Tensor]]) -> Away:
        """A placeholder of a tensor."""
        made = torch.empty_like(value, device="meta").as_subclass(cls)
        made._ds_borrow = borrow
        return made

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
        return _at_hand(func, args, kwargs, first, is_write(name))


def _at_hand(func: Any, args: Any, kwargs: Any, first: Away | None, writes: bool) -> Any:
    """Call `func` on the values that placeholders stand for."""
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

        def kept(value: Any) -> Any:
            if type(value) is not torch.Tensor or value.untyped_storage()._cdata not in storages:
                return value
            if first is not None and value.data_ptr() == lent[id(first)].data_ptr():
                if value.shape == first.shape and value.dtype == first.dtype:
                    return first
            return value.clone().as_subclass(ReadOnly)

        return map_nested(kept, result)


@dataclass(frozen=True)
class Piece:
    """What this rank has of a state tensor.

    Args:
        member: the parameter that it belongs to.
        key: its name in the state.
        local: the elements; empty where this rank has none.
        shape: of the whole tensor.
        start: first element, counted in the flattened tensor; None where the tensor is not cut as the parameter is.
    """

    member: ParamRecord
    key: str
    local: torch.Tensor
    shape: torch.Size
    start: int | None

    @property
    def device(self) -> torch.device:
        """Where the elements are when they are used."""
        group = self.member.group
        return group.tiers.optimizer.lends_on(group.device) if isinstance(self.local, Away) else self.local.device

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """The part of an operand that meets the elements of this rank."""
        if self.start is None or value.numel() == 1:
            return value.detach()
        if isinstance(value, ManagedParameter) and value._ds_member is self.member:
            if self.member.group.policy.gathers_before_use:  # its own slice is cut as the state is
                return self.member.own_values().to(self.device).view(self.local.shape)
        if value.shape != self.shape:
            value = value.expand(self.shape)
        part = value.detach().reshape(-1)[self.start : self.start + self.local.numel()]
        return part.to(self.device).view(self.local.shape)

    def refuse(self, what: str) -> UsageError:
        """The error of something that needs the whole tensor."""
        return UsageError(
            f"{what} on optimizer state {self.key!r} of parameter '{self.member.name}' needs the whole tensor, and "
            f"this rank has a part of it. deepspeed.utils.safe_get_full_optimizer_state(param, {self.key!r}) gives the "
            f"whole and safe_set_full_optimizer_state takes it, on all ranks together; what treats each element by "
            f"itself (zero_, mul_, copy_, …) works in place"
        )


class StateTensor(torch.Tensor):
    """A state tensor of which this rank has a part: the whole one's shape, and no memory of its own."""

    _ds_piece: Piece

    @classmethod
    def of(cls, piece: Piece) -> StateTensor:
        """A tensor that shows a piece."""
        base = torch.zeros((), dtype=piece.local.dtype, device=piece.device)
        made = torch.Tensor._make_subclass(cls, base.expand(piece.shape))
        made._ds_piece = piece
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _by_elements(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        piece = self._ds_piece
        return f"<optimizer state {piece.key} of {piece.member.name}: {tuple(piece.shape)}, {piece.local.numel()} here>"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, proto: int) -> Any:
        raise self._ds_piece.refuse("pickling")


def _by_elements(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What any torch function does when it meets a part of a state tensor."""
    name = name_of(func)
    first = args[0] if args and isinstance(args[0], StateTensor) else None
    if first is not None:
        if name in _SAME:
            return first
        if name in METADATA or name in DENSE_METADATA or name in LIKE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(_dense(first) if name in LIKE else first, *args[1:], **kwargs)
    piece = _piece_in((args, kwargs))
    writes = is_write(name)
    if name == "__setitem__" and first is not None:
        func, args, name = _assignment(first._ds_piece, args)
    if _base(name) not in _ELEMENTWISE or kwargs.get("out") is not None or (writes and first is None):
        raise piece.refuse(name)
    if name == "where" and len(args) + len(kwargs) < 3:
        raise piece.refuse("where (the places of what is not zero)")
    local = _locals(piece, name)
    result = func(*map_nested(local, args), **map_nested(local, kwargs))
    if writes:
        return first
    return map_nested(lambda value: _shown(piece, first, value), result)


def _locals(piece: Piece, name: str) -> Callable[[Any], Any]:
    def local(value: Any) -> Any:
        if isinstance(value, StateTensor):
            other = value._ds_piece
            if other.member is not piece.member or other.start != piece.start or other.shape != piece.shape:
                raise piece.refuse(f"{name} with state of '{other.member.name}', which is cut in another way,")
            return other.local
        return piece.cut(value) if isinstance(value, torch.Tensor) else value

    return local


def _shown(piece: Piece, first: StateTensor | None, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != piece.local.shape:
        return value
    if first is not None and value is first._ds_piece.local:
        return first
    return StateTensor.of(replace(piece, local=value))


def _assignment(piece: Piece, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], str]:
    """`tensor[index] = value` as an operation on each element: a mask, or everything."""
    target, index, value = args
    if index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
        whole = isinstance(value, torch.Tensor) and value.numel() != 1
        return (torch.Tensor.copy_ if whole else torch.Tensor.fill_), (target, value), "copy_"
    if isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.shape == piece.shape:
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            number = value.item() if isinstance(value, torch.Tensor) else value
            return torch.Tensor.masked_fill_, (target, index, number), "masked_fill_"
    raise piece.refuse("assignment to some places")


def _piece_in(nest: Any) -> Piece:
    found: list[Piece] = []

    def look(value: Any) -> Any:
        if isinstance(value, StateTensor):
            found.append(value._ds_piece)
        return value

    map_nested(look, nest)
    return found[0]


def _dense(tensor: StateTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _base(name: str) -> str:
    """The name of an operation without what says that it is an operator, reflected, or done in place."""
    if name.startswith("__") and name.endswith("__"):
        inner = name[2:-2]
        return inner if inner in _ELEMENTWISE or inner[:1] not in "ir" else inner[1:]
    return name.rstrip("_")
