"""Classes of parameters: gathered, or sharded with the unsharded shape and intercepted reads and writes.

[Note: sharded parameters] When a group is resharded, its parameters stay the same objects with the same shape and
dtype; only class and data change. The data is one value (NaN, or the largest integer), expanded to the unsharded shape,
so it needs no memory. The class is `ShardedParameter`, whose `__torch_function__` returns metadata, raises for writes
and accesses to the storage, and passes an unsharded copy to all other functions. The class of gathered parameters is
`ManagedParameter`, without `__torch_function__`, so operations have no overhead. Views of a gathered parameter keep the
memory allocated after resharding (`zero/parameters/buffer_views.py`).

A stand-in is the result of `detach()` on a sharded parameter: a tensor that is sharded too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import TracingContext
from torch.nn import Parameter

from deepspeed.errors import ShardedParameterError
from deepspeed.zero.layout.placement import WHOLE, place
from deepspeed.zero.parameters.ds_attributes import ClientSurface
from deepspeed.zero.parameters.functorch import in_transform, outside_transforms
from deepspeed.zero.parameters.record import ParamRecord

# Functions that carry out writes to sharded parameters; not empty while a `zero.Init` context is open.
init_writers: list[Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any]] = []

_raw_grad: Any = torch._C.TensorBase.grad  # torch's own attribute, without the property of ManagedParameter
_raw_data: Any = torch._C.TensorBase.data
_raw_class: Any = object.__dict__["__class__"]
# Set data and class of parameters without the properties of ManagedParameter, which detect what users set.
set_raw_data: Any = _raw_data.__set__
set_raw_class: Any = _raw_class.__set__

METADATA = frozenset(
    "shape size dim ndim ndimension numel nelement dtype device layout is_leaf requires_grad requires_grad_ grad_fn "
    "is_cuda is_cpu is_meta is_sparse is_quantized is_complex is_floating_point is_signed is_inference itemsize nbytes "
    "element_size names has_names output_nr _version _backward_hooks _post_accumulate_grad_hooks retain_grad "
    "retains_grad register_hook register_post_accumulate_grad_hook get_device is_tensor __len__ "
    "__hash__ __dlpack_device__ is_mkldnn is_xpu is_mps is_ipu is_maia is_mtia is_vulkan is_xla is_sparse_csr "
    "is_nested is_conj is_neg is_distributed is_inference volatile name _is_view _base "
    "grad_dtype dense_dim sparse_dim __instancecheck__ _cdata".split()
)
DENSE_METADATA = frozenset("stride is_contiguous storage_offset is_non_overlapping_and_dense dim_order".split())
LIKE = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full "
    "new_empty_strided new_tensor new".split()
)
_RAW_STORAGE = frozenset(
    "data_ptr untyped_storage storage _typed_storage storage_type is_shared share_memory_ numpy __array__ __dlpack__ "
    "set_ resize_ resize_as_ is_set_to __cuda_array_interface__ to_dlpack _data_ptr const_data_ptr storage_use_count "
    "_fix_weakref module_load".split()
)
# Those of them that code which saves state dicts uses: a stand-in then gets a copy of the values.
_MEMORY = frozenset("data_ptr const_data_ptr untyped_storage storage _typed_storage".split())
_STAND_IN = frozenset(["detach", "data"])
_OWN_GRAD = frozenset(["grad", "grad="])  # for stand-ins that the user made leaves
_MOVES = frozenset("to cpu cuda type float double half bfloat16".split())
_MOVED = "_ds_moved"  # attribute of values that were moved to another device: uid of the parameter, and version


_UNREAD = METADATA | DENSE_METADATA | {"grad", "grad=", "requires_grad="}


def reads_values(func: Any) -> bool:
    """Return whether a torch function can access the values or the storage of its arguments."""
    return name_of(func) not in _UNREAD and func is not torch.autograd.grad


def raw_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return torch's own `grad` of a parameter, which autograd sets, instead of the property of this package."""
    if param.__class__ is ManagedParameter:  # has no `__torch_function__`
        return _raw_grad.__get__(param)
    with torch._C.DisableTorchFunctionSubclass():
        return _raw_grad.__get__(param)


def set_raw_grad(param: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set torch's own `grad` of a parameter (None: no gradient), instead of the property of this package."""
    if param.__class__ is ManagedParameter:
        _raw_grad.__set__(param, value)
        return
    with torch._C.DisableTorchFunctionSubclass():
        _raw_grad.__set__(param, value)


class _Guarded(torch.Tensor):
    """Base class of tensors whose torch functions are intercepted: sharded parameters, stand-ins and `ReadView`."""

    __slots__ = ()

    _ds_member: ParamRecord

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return intercept(func, args, kwargs or {})


class _Freed(_Guarded):
    """Base class of sharded parameters and stand-ins; replaces methods that do not call `__torch_function__`."""

    __slots__ = ()

    _kind = "stand-in"

    def set_(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(source, (ManagedParameter, StandIn)) and source._ds_member is self._ds_member:
            return self
        if isinstance(source, torch.Tensor) and (source.shape, source.dtype) == (self.shape, self.dtype):
            if init_writers:
                return init_writers[-1]("data=", None, (self, source), {})
        reject_write("set_", self._ds_member)

    def as_subclass(self: Any, cls: type[torch.Tensor]) -> Any:
        return dense_copy(self).as_subclass(cls)

    def __repr__(self: Any) -> str:
        member, span = self._ds_member, self._ds_member.own_span()
        return (
            f"<sharded {self._kind} {member.name}: shape {tuple(member.shape)}, {self.dtype}, "
            f"{span.stop - span.start} here>"
        )


class ManagedParameter(ClientSurface, Parameter):
    """Parameter of an engine or of `zero.Init` that is gathered or never sharded; base class of sharded ones."""

    _ds_member: ParamRecord

    def _change_class(self, kind: type) -> None:
        """Set `__class__`; detects `torch.utils.swap_tensors`, see [Note: replaced parameters].

        Raises:
            ShardedParameterError: `swap_tensors` on a parameter that is sharded at stage 3.
            UsageError: `swap_tensors` with a tensor that is not an `nn.Parameter`.
        """
        if not issubclass(kind, ManagedParameter) and "_ds_member" in vars(self):
            member = self._ds_member
            if member.reducer is not None:
                member.reducer.replaced.leaves(member, kind)
            elif member.group.policy.gathers_before_use:
                reject_write("swap_tensors", member)
        _raw_class.__set__(self, kind)

    __class__ = property(_raw_class.__get__, _change_class)  # type: ignore[assignment]

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """Return a copy of the gradient accumulated since the last update; None if there is none.

        At stages 0 and 1, before the last of several micro-batches, this is the gradient of this rank. Otherwise it is
        reduced, and all ranks with the parameter must read it. In-place changes of the copy take effect at the next
        backward or `step`; after a change later than that backward, `step` raises a UsageError on all ranks. Without an
        engine, the gradient is that of torch, not a copy.
        """
        if TracingContext.try_get() is not None:  # the compiler reads it of each parameter; no collective for that
            return None
        member = self._ds_member
        if member.reducer is None:
            return raw_grad(self)
        return member.reducer.grad_of(member)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        member = self._ds_member
        if member.reducer is None:
            with torch._C.DisableTorchFunctionSubclass():
                _raw_grad.__set__(self, value)  # type: ignore[attr-defined]
        else:
            member.reducer.set_grad(member, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Return the values, as in torch; they are compared later to detect writes, which change no version counter."""
        if "_ds_member" in vars(self):
            self._ds_member.group.buffer_views.mark_data_exposed(self._ds_member)
        return _raw_data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _raw_data.__set__(self, value)

    def set_(self, *source: Any, **how: Any) -> Any:
        """Set the storage, as in torch; no effect if storage, offset, shape, strides and dtype stay the same."""
        new = source[0] if len(source) == 1 and not how else None
        if new is self:
            return self
        if isinstance(new, torch.Tensor) and not isinstance(new, _Guarded) and new.dtype == self.dtype:
            place = (new.untyped_storage()._cdata, new.storage_offset(), new.shape, new.stride())
            if place == (self.untyped_storage()._cdata, self.storage_offset(), self.shape, self.stride()):
                return self
        return super().set_(*source, **how)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        if id(self) not in memo:
            copied = memo[id(self)] = Parameter(self._ds_member.dense(), self.requires_grad)
            if self._ds_member.placement is not WHOLE:
                place(copied, self._ds_member.placement)
        return memo[id(self)]

    def __reduce_ex__(self, proto: int) -> Any:
        return Parameter(self._ds_member.dense(), self.requires_grad).__reduce_ex__(proto)


class ShardedParameter(_Freed, ManagedParameter):
    """Parameter whose group is resharded; see [Note: sharded parameters]."""

    _kind = "Parameter"


class StandIn(_Freed):
    """Sharded tensor without memory: result of `detach()`, and value of `state_dict()`, for a sharded parameter.

    `data_ptr` and the storage functions use an unsharded copy of the values, or raise if the copy needs a collective.
    """

    _ds_member: ParamRecord
    _ds_copy: tuple[int, int, torch.Tensor] | None = None  # `group.changes`, version of the copy, copy

    def keeps_copy(self) -> bool:
        """Copy the parameter's present values unless a valid copy exists; return False if that needs a collective."""
        if self.copied() is None:
            member = self._ds_member
            if not member.group.reads_alone:
                return False
            copied = member.shared_copy()
            self._ds_copy = (member.group.changes, _version_of(copied), copied)
        return True

    def copied(self) -> torch.Tensor | None:
        """Return the copy of the values; None if there is none, or the group or the copy has changed since."""
        changes, version, copied = self._ds_copy or (-1, 0, self)
        return copied if changes == self._ds_member.group.changes and _version_of(copied) == version else None

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._ds_member.dense()

    def __reduce_ex__(self, proto: int) -> Any:
        return self._ds_member.dense().__reduce_ex__(proto)


class ReadView(_Guarded):
    """View of an unsharded copy of a sharded parameter; writes raise, since they would be lost."""

    _ds_member: ParamRecord

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, proto: int) -> Any:
        return self.clone().__reduce_ex__(proto)


def name_of(func: Any) -> str:
    """Return the name of a torch function; for the setter or deleter of a property, its name and "="."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(func.__self__, "__name__", "") + {"__get__": "", "__set__": "=", "__delete__": "="}[name]
    return name


def is_write(name: str) -> bool:
    """Return whether a torch function changes its first argument; `name` is a result of `name_of`."""
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
    return in_place or operator or name.endswith("=") or name in ("__setitem__", "__delitem__")


def reject_write(name: str, member: ParamRecord) -> None:
    """Raise ShardedParameterError for an operation that needs the storage of a sharded parameter.

    Args:
        name: name of the operation.
        member: parameter.
    """
    raise ShardedParameterError(
        f"{name.rstrip('=') or 'write'} on parameter '{member.name}', which is sharded here: it would change or expose "
        f"a temporary copy. Do it inside deepspeed.zero.GatheredParameters([param], modifier_rank=0), or use "
        f"deepspeed.utils.safe_set_full_fp32_param."
    )


def was_replaced(tensor: torch.Tensor, member: ParamRecord) -> bool:
    """Return whether the storage of a sharded parameter or stand-in was replaced by the unbound `torch.Tensor.set_`."""
    return tensor.data_ptr() != member.under(tensor).data_ptr()


def _reject_targets(name: str, targets: Any) -> None:
    """Raise ShardedParameterError if one of the output arguments of an operation is sharded or a `ReadView`."""
    for target in targets if isinstance(targets, (list, tuple)) else (targets,):
        if isinstance(target, _Guarded):
            reject_write(name, target._ds_member)


def intercept(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function with sharded tensors among its arguments; see [Note: sharded parameters].

    Raises:
        ShardedParameterError: the function writes to a sharded tensor outside of `zero.Init`, or accesses its storage
            (allowed for stand-ins that can be copied).
    """
    name = name_of(func)
    if not args and "tensor" in kwargs:  # torch.nn.init passes a keyword argument
        args, kwargs = (kwargs["tensor"],), {key: value for key, value in kwargs.items() if key != "tensor"}
    first = args[0] if args and isinstance(args[0], _Guarded) else None
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(first, _Freed) and was_replaced(first, first._ds_member):
            _raw_data.__set__(first, first._ds_member.under(first))
            reject_write("set_", first._ds_member)
        own = name in _OWN_GRAD and isinstance(first, StandIn)
        if name in METADATA or name == "requires_grad=" or own or func is torch.autograd.grad:
            return func(*args, **kwargs)  # torch.autograd.grad needs the same objects
        if first is not None:
            if _stays(name, first, args, kwargs):
                return first
            if name in _MEMORY and (isinstance(first, ReadView) or isinstance(first, StandIn) and first.keeps_copy()):
                return _compute(name, func, args, kwargs)
            if is_write(name) or name in _RAW_STORAGE:
                return _write(name, func, args, kwargs)
            if not isinstance(first, ReadView):
                if name in _STAND_IN:
                    return stand_in(first._ds_member)
                if name in DENSE_METADATA:
                    return func(torch.empty(first.shape, dtype=first.dtype, device="meta"), *args[1:], **kwargs)
                if name in LIKE:
                    dense = torch.empty(first.shape, dtype=first.dtype, device=first.device)
                    return func(dense, *args[1:], **kwargs)
        _reject_targets(f"{name}(out=…)", kwargs.get("out"))
        return _compute(name, func, args, kwargs)


def _write(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise ShardedParameterError for a write or storage access; within `zero.Init`, carry out the write."""
    if init_writers and is_write(name) and not (isinstance(args[0], ReadView) and name == "data="):
        return init_writers[-1](name, func, args, kwargs)
    reject_write(name, args[0]._ds_member)


def _stays(name: str, first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a move, cast or assignment to `data` has no effect, as in `module.cpu()` on the CPU."""
    if isinstance(first, ReadView):
        return False
    if name == "data=":
        value = args[1]
        own = isinstance(value, (ManagedParameter, StandIn)) and value._ds_member is first._ds_member
        return own or getattr(value, _MOVED, None) == (first._ds_member.uid, _version_of(value))
    if name not in _MOVES or kwargs.get("copy") or "memory_format" in kwargs or len(args) > 4:
        return False
    probe = torch.empty((), dtype=first.dtype, device=first.device)
    return getattr(probe, name)(*args[1:], **kwargs) is probe


def _compute(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` with unsharded copies, and return views of the copies as `ReadView`; reject writes to the copies."""
    copies: dict[int, tuple[torch.Tensor, ParamRecord, int]] = {}

    def dense(value: Any) -> Any:
        if not isinstance(value, _Guarded):
            return value
        if id(value) not in copies:
            member = value._ds_member
            plain = value.as_subclass(torch.Tensor) if isinstance(value, ReadView) else _read(value, member)
            copies[id(value)] = (plain, member, _version_of(plain))
        return copies[id(value)][0]

    result = func(*map_nested(dense, args), **map_nested(dense, kwargs))
    if name in _MOVES and isinstance(args[0], _Freed) and type(result) is torch.Tensor:
        if result.dtype == args[0].dtype:  # so that `param.data = result` is recognized as no change
            setattr(result, _MOVED, (args[0]._ds_member.uid, _version_of(result)))
    storages = {}
    for plain, member, version in copies.values():
        if _version_of(plain) != version:
            reject_write(name, member)
        if plain.layout == torch.strided and plain.device.type != "meta":
            storages[plain.untyped_storage()._cdata] = member

    def guard(value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or not storages or in_transform(value):
            return value
        member = storages.get(value.untyped_storage()._cdata)
        if member is None:
            return value
        view = value.as_subclass(ReadView)
        view._ds_member = member
        return view

    return map_nested(guard, result)


class _DenseCopy(torch.autograd.Function):
    """Autograd function that returns an unsharded copy of a parameter, and passes its gradient to the parameter."""

    @staticmethod
    def forward(param: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return copied.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # separate from forward, as torch.func requires
        return None

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors do not count their writes


@outside_transforms
def _read(value: torch.Tensor, member: ParamRecord) -> torch.Tensor:
    """Return an unsharded copy of `value`, differentiable if gradients are enabled; collective as `member.dense`."""
    copied = value.copied() if isinstance(value, StandIn) else None
    copied = member.dense() if copied is None else copied
    if isinstance(value, _Freed) and value.requires_grad and torch.is_grad_enabled():
        return _DenseCopy.apply(value, copied)  # type: ignore[return-value]
    return copied


def dense_copy(tensor: Any) -> Any:
    """Return an unsharded copy of a sharded parameter or stand-in (see `_read`), and other values unchanged."""
    if not isinstance(tensor, _Freed):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return _read(tensor, tensor._ds_member)


def reject_functionalize(tensor: Any) -> Any:
    """Raise ShardedParameterError for a sharded tensor, since `functionalize` writes to it; return other values."""
    _reject_targets("functionalize", tensor)
    return tensor


def stand_in(member: ParamRecord) -> StandIn:
    stand_in_tensor = torch.Tensor._make_subclass(StandIn, member.placeholder)
    stand_in_tensor._ds_member = member
    return stand_in_tensor


def map_nested(change: Any, value: Any) -> Any:
    """Apply `change` to all leaves of nested tuples, lists and dicts, and return the same structure of the results."""
    if isinstance(value, tuple):
        mapped = [map_nested(change, v) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*mapped)
        same = all(a is b for a, b in zip(value, mapped, strict=True))
        return value if same else tuple(mapped) if type(value) is tuple else type(value)(mapped)
    if isinstance(value, list):
        return [map_nested(change, v) for v in value]
    if isinstance(value, dict):
        return {k: map_nested(change, v) for k, v in value.items()}
    return change(value)


@functools.cache
def _feed_parameters() -> None:
    """Patch `nn.Parameter.__new__` to accept parameters of an engine, and tensors that were read from them.

    The result shares memory with a parameter that is never sharded, as in torch, and copies the values otherwise.
    """
    new = Parameter.__new__

    @functools.wraps(new)
    def with_values(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, (ManagedParameter, _Guarded)):
            with torch.no_grad():
                whole = not data._ds_member.group.policy.gathers_before_use
                data = data.detach() if whole else dense_copy(data).clone().as_subclass(torch.Tensor)
        return new(cls, data, *args, **kwargs)

    Parameter.__new__ = staticmethod(with_values)  # type: ignore[method-assign,assignment]


def manage(param: Parameter, member: ParamRecord) -> None:
    """Make a parameter a `ManagedParameter` with the record `member`."""
    _feed_parameters()
    param.__class__ = ManagedParameter
    param._ds_member = member  # type: ignore[attr-defined]


def unmanage(param: Parameter) -> None:
    """Make a gathered parameter an ordinary `nn.Parameter` again."""
    _raw_class.__set__(param, Parameter)
    vars(param).pop("_ds_member", None)


def is_managed(param: Any) -> bool:
    """Return whether a value is a parameter of an engine or of `zero.Init`."""
    return isinstance(param, ManagedParameter)
