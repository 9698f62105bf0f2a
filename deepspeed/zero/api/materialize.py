"""Materialization of a model from the meta device: modules are initialized and sharded one after another.

Each module is initialized by the `_init_weights(module)` of the nearest enclosing model (as in Transformers), called
the rule in the code, or by its own `reset_parameters()`. Modules are visited in the order of `Module.apply`, so random
values are the same as with `to_empty` on the unsharded model. For tensors that `_init_weights` does not write,
`reset_parameters` is called in addition, and does not change the others; `_init_weights` then runs again, since it may
scale the values of `reset_parameters`. Values that existed before, such as loaded ones, are not changed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import swap_tensors

from deepspeed.comm.collectives.same_error import alarmed
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import UsageError
from deepspeed.zero.api.gathered_parameters import GatheredParameters
from deepspeed.zero.api.init_context import Init, write_whole
from deepspeed.zero.parameters.parameter import init_writers, is_managed

Rule = Callable[[nn.Module], Any]
# Attribute of a module: its allocated but unwritten tensors, by name, with their versions. It remains after an error.
_UNWRITTEN = "_ds_unwritten"
_NOBODYS = 0xA5  # byte with which unwritten integer and bool tensors are filled
_STOPPED = "_ds_stopped"  # attribute of a model: module in which an error interrupted the initialization


def is_without_values(model: nn.Module) -> bool:
    """Return whether some parameters have no values: they are on the meta device, or `materialize` failed on them."""
    if any({_UNWRITTEN, _STOPPED} & vars(module).keys() for module in model.modules()):
        return True
    return any(not is_managed(param) and param.device.type == "meta" for param in model.parameters())


def materialize(model: nn.Module, axis: Axis, device: torch.device) -> None:
    """Initialize a model's meta tensors, and shard its parameters as `zero.Init` does.

    All ranks of the process group must call this. Besides its shards, a rank has at most one unsharded module in
    memory.

    Args:
        model: changed in place; parameters keep their identity, except in recurrent layers.
        axis: process group; its ranks have created the same model, and the values of the first rank are used.
        device: target device.

    Raises:
        UsageError: a tensor has no initialization rule (the message names it, all ranks raise, and the call can be
            repeated), or an earlier call failed within a rule (the model must be created anew).
        Exception: error of an initialization rule; the other ranks raise too.
    """
    where = next((vars(module)[_STOPPED] for module in model.modules() if _STOPPED in vars(module)), None)
    if where is not None:
        raise UsageError(
            f"an earlier attempt to give this model values ended at {where}: it is unknown which values had been "
            f"written. Build the model again"
        )
    materializer = _Materializer(Init.over(axis, device), device)
    init_writers.append(materializer.write)  # a rule may write to parameters of children, which are sharded already
    try:
        with torch.no_grad(), alarmed(lambda: f"values of {materializer.at}"):
            materializer.visit("", model, None)
    except BaseException:
        vars(model)[_STOPPED] = materializer.at
        raise
    finally:
        init_writers.remove(materializer.write)
    materializer.check()


class _Materializer:
    """State of one call of `materialize`."""

    def __init__(self, context: Init, device: torch.device) -> None:
        self._context, self._device = context, device
        self._met: set[nn.Module] = set()  # visited modules
        self._given: set[nn.Parameter] = set()  # initialized parameters
        self._ruled: set[nn.Parameter] = set()  # those of them that a rule wrote
        self._doing = ""  # "rule", "reset" or "again", while one is called
        self.at = "the model"  # module that is being initialized
        self._count = 0  # number of initialized tensors
        self._places: dict[str, tuple[nn.Module, str]] = {}  # module and name of each tensor, by path
        self._owed: dict[str, int] = {}  # versions of tensors that were not written yet, by path

    def visit(self, path: str, module: nn.Module, rule: Rule | None) -> None:
        """Initialize and shard a module after its children, in the order of `Module.apply`."""
        if module in self._met:
            return
        self._met.add(module)
        own_rule, before = getattr(module, "_init_weights", None), self._count
        if callable(own_rule) and not isinstance(own_rule, nn.Module):
            with contextlib.suppress(TypeError):  # its signature is not `_init_weights(module)`
                inspect.signature(own_rule).bind(module)
                rule = own_rule
        for name, child in module.named_children():
            self.visit(f"{path}.{name}".lstrip("."), child, rule)
        self.at = f"'{path}' ({type(module).__name__})" if path else type(module).__name__
        self._give(path, module, rule, before)
        self._context.shard(module)

    def write(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write to a sharded parameter of another module; do nothing if the present call must not change it.

        Writes are ignored if the parameter had values before, in the second run of a rule, and in a reset after a rule.
        """
        param = args[0]._ds_member.param
        if self._doing == "again" or param not in self._given or (self._doing == "reset" and param in self._ruled):
            return args[0]
        if self._doing == "rule":
            self._ruled.add(param)
        return write_whole(name, func, args, kwargs)

    def _give(self, path: str, module: nn.Module, rule: Rule | None, before: int) -> None:
        """Allocate and initialize a module's own tensors; the rule may also change initialized tensors of children."""
        earlier: dict[str, int] = vars(module).get(_UNWRITTEN, {})  # unwritten tensors of an earlier, failed call
        names, own = [*self._new_parameters(module), *self._new_buffers(module)], _own(module)
        # Tied weights, already sharded with another module, are initialized by both modules.
        shared = [param for param in module._parameters.values() if param is not None and is_managed(param)]
        self._count += len(names) + len(earlier) + sum(param in self._given for param in shared)
        if self._count == before:
            return
        versions = {**earlier, **{name: own[name]._version for name in names}}
        if versions:
            vars(module)[_UNWRITTEN] = versions
        with GatheredParameters(shared, modifier_rank=self._context.axis.ranks[0], enabled=bool(shared)):
            names += [name for name, version in earlier.items() if name not in names and _is_blank(own[name], version)]
            self._given.update(module._parameters[name] for name in names if name in module._parameters)  # type: ignore[misc]
            with self._keeping(module, names):
                self._initialize(module, rule, names, versions)
            owed = {name: version for name, version in versions.items() if _is_blank(_own(module)[name], version)}
        vars(module).pop(_UNWRITTEN, None)
        if owed:
            vars(module)[_UNWRITTEN] = owed
        for name in versions:
            self._places[f"{path}.{name}".lstrip(".")] = module, name
        self._owed.update({f"{path}.{name}".lstrip("."): version for name, version in owed.items()})

    @contextlib.contextmanager
    def _keeping(self, module: nn.Module, names: list[str]) -> Iterator[None]:
        """Return a context that restores the values of tensors that existed before materialization."""
        originals = {
            name: tensor.detach().clone()
            for name, tensor in _own(module).items()
            if name not in names and tensor not in self._given and not tensor.is_meta
        }
        yield
        for name, value in originals.items():
            _own(module)[name].detach().copy_(value)

    def _initialize(self, module: nn.Module, rule: Rule | None, provided: list[str], versions: dict[str, int]) -> None:
        names = [name for name, tensor in _own(module).items() if name in provided or tensor in self._given]
        tied = [name for name in names if name not in provided and _own(module)[name] not in self._ruled]
        if rule is not None:
            with self._during("rule"):
                rule(module)
        blank = [name for name in names if _is_blank(_own(module)[name], versions.get(name, 0))]
        if rule is not None:
            self._ruled.update(module._parameters[n] for n in names if n in module._parameters and n not in blank)  # type: ignore[misc]
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if not callable(reset) or not (blank or rule is None):
            return
        free = {*blank, *tied} if rule is None else {*blank}
        copies = {name: _own(module)[name].detach().clone() for name in names if name not in free}
        parts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # elements that the rule wrote, and their values
        for name in blank if rule is not None else ():
            tensor = _own(module)[name]
            if (written := _written(tensor)) is not None and written.any():
                parts[name] = written, tensor.detach()[written]
        with self._during("reset"):
            reset()
        if rule is not None:
            self._rule_again(module, rule, blank)
        for name, value in copies.items():
            _own(module)[name].detach().copy_(value)
        for name, (written, values) in parts.items():
            _own(module)[name].detach()[written] = values

    def _rule_again(self, module: nn.Module, rule: Rule, blank: list[str]) -> None:
        """Call the rule again, since it may use values that `reset_parameters` set; the random state is restored."""
        before = {name: _own(module)[name].detach().clone() for name in blank}
        kind = self._device.type
        with self._during("again"), torch.random.fork_rng([] if kind == "cpu" else [self._device], device_type=kind):
            rule(module)
        own = _own(module)
        changed = [name for name, value in before.items() if not torch.equal(_bytes(value), _bytes(own[name]))]
        self._ruled.update(module._parameters[name] for name in changed if name in module._parameters)  # type: ignore[misc]

    @contextlib.contextmanager
    def _during(self, what: str) -> Iterator[None]:
        self._doing = what
        try:
            yield
        finally:
            self._doing = ""

    def _new_parameters(self, module: nn.Module) -> list[str]:
        names = []
        for name, param in list(module._parameters.items()):
            if param is None or is_managed(param) or param.device.type != "meta":
                continue
            parameter = nn.Parameter(_blank(param, self._device), param.requires_grad)
            marks = dict(vars(param))  # attributes set by other code
            try:
                swap_tensors(param, parameter)
            except RuntimeError:  # weak references exist; recurrent layers have them, and update them in `__setattr__`
                setattr(module, name, parameter)
                param = parameter
            vars(param).update(marks)
            names.append(name)
        return names

    def _new_buffers(self, module: nn.Module) -> list[str]:
        names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in names:
            module._buffers[name] = _blank(module._buffers[name], self._device)  # type: ignore[arg-type]
        return names

    def check(self) -> None:
        """Raise UsageError if a tensor was initialized by no module. All ranks must call this."""
        lost = [where for where in self._of_any(self._owed) if self._is_lost(where)]
        lost = self._of_any(lost)  # buffers may differ between ranks
        for module in self._met:
            marks: dict[str, int] = vars(module).pop(_UNWRITTEN, {})
            left = {name: marks.get(name, 0) for owner, name in map(self._places.get, lost) if owner is module}  # type: ignore[misc]
            if left:
                vars(module)[_UNWRITTEN] = left
        if lost:
            names = ", ".join(f"'{where}' of {type(self._places[where][0]).__name__}" for where in lost[:3])
            raise UsageError(
                f"{len(lost)} tensor(s) on the meta device have no values, and nothing says which: {names}. Give the "
                f"class a reset_parameters(), or the model an _init_weights(module), or make it under zero.Init"
            )

    def _of_any(self, places: Iterable[str]) -> list[str]:
        """Return the union of the ranks' paths, in the same order on all ranks; a rule may write on one rank only."""
        everywhere = {
            where for rank_places in all_gather_objects(self._context.axis, list(places)) for where in rank_places
        }
        return [where for where in self._places if where in everywhere]

    def _is_lost(self, where: str) -> bool:
        module, name = self._places[where]
        tensor = _own(module)[name]
        with GatheredParameters([tensor], enabled=is_managed(tensor)):
            return _is_blank(tensor, self._owed.get(where, 0))


def _own(module: nn.Module) -> dict[str, Any]:
    """Return the parameters and buffers of a module without its children."""
    return {name: value for name, value in {**module._buffers, **module._parameters}.items() if value is not None}


def _blank(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Create a tensor filled with NaN (integers: an improbable value), by which unwritten elements are detected."""
    if like.is_floating_point() or like.is_complex():
        return torch.full(like.shape, float("nan"), dtype=like.dtype, device=device)
    tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    _bytes(tensor).fill_(_NOBODYS)
    return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a flat uint8 tensor, without a copy if they are contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _written(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of elements that are not NaN; None for integers and bools, which cannot be NaN."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    small = tensor.is_floating_point() and tensor.itemsize == 1  # torch cannot compare fp8
    return ~(tensor.float() if small else tensor).isnan()


def _is_blank(tensor: torch.Tensor, version: int) -> bool:
    """Return whether some float is NaN, or all integers still have the fill value at the same version."""
    written = _written(tensor)
    if written is not None:
        return not written.all()
    untouched = is_managed(tensor) or tensor._version == version
    return untouched and tensor.numel() > 0 and bool((_bytes(tensor) == _NOBODYS).all())
