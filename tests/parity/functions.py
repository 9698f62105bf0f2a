"""Every public torch function that takes a tensor, with arguments found by trying them on a dense parameter."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from tests.parity.function_arguments import (
    BARS,
    CRASHES_ON_NONSENSE,
    HINTS,
    KINDS,
    LISTS,
    NAMES,
    PARAMETER,
    PLAIN,
    SPECIAL,
    TENSORS,
    UNDEFINED,
    Kind,
)

EVERYTHING = 2  # of KINDS: how many are tried with every function
TRIALS, FEW_TRIALS = 120, 20  # combinations of arguments tried per function; with the other kinds
MODES = ("grad", "no_grad", "frozen")


@dataclass(frozen=True)
class Call:
    """A function by its public name, and what it is called with.

    `arguments` is a tuple with holes for the parameter, or Python text as in SPECIAL. `mode` is "grad", "no_grad", or
    "frozen": with a parameter that does not require a gradient.
    """

    name: str
    arguments: tuple[Any, ...] | str
    mode: str
    kind: Kind

    def __call__(self, parameter: torch.Tensor) -> Any:
        function, _ = public_functions()[self.name]
        torch.manual_seed(0)
        with warnings.catch_warnings(), torch.set_grad_enabled(self.mode == "grad"):
            warnings.simplefilter("ignore")
            parameter.requires_grad_(self.mode != "frozen")
            positional, named = self._placed(parameter)
            if self.name == "torch.Tensor.set_":  # torch hands the unbound one to no class; users call the method
                return parameter.set_(*positional[1:])
            return function(*positional, **named)

    def _placed(self, parameter: torch.Tensor) -> tuple[list[Any], dict[str, Any]]:
        if not isinstance(self.arguments, str):
            return [_place(argument, parameter) for argument in self.arguments], {}
        made = {name: make(parameter) for name, make in TENSORS.items() if name in self.arguments}
        return eval(f"collect({self.arguments})", {**NAMES, **made, "p": parameter, "collect": _collect})


def _collect(*positional: Any, **named: Any) -> tuple[list[Any], dict[str, Any]]:
    return list(positional), named


def _place(argument: Any, parameter: torch.Tensor) -> Any:
    if argument is PARAMETER:
        return parameter
    if isinstance(argument, list):
        return [_place(entry, parameter) for entry in argument]
    if isinstance(argument, dict):
        return dict(argument)
    return TENSORS[argument](parameter) if isinstance(argument, str) and argument in TENSORS else argument


def last_part(name: str) -> str:
    """The name of a function or attribute without its module or class."""
    return name.removesuffix(".__get__").removesuffix(".__set__").removesuffix(".__delete__").rsplit(".", 1)[-1]


@cache
def public_functions() -> dict[str, tuple[Callable[..., Any], inspect.Signature]]:
    """Overridable functions by name, with the signature torch documents for overriding them."""
    found = {}
    for function, dummy in torch.overrides.get_testing_overrides().items():
        name = torch.overrides.resolve_name(function) or getattr(function, "__name__", "")
        last = last_part(name)
        internal = last.startswith("_") and not last.startswith("__")
        if name.startswith("torch.") and not internal and not name.startswith("torch._"):
            found[name] = (function, inspect.signature(dummy))
    return dict(sorted(found.items()))


def _choices(name: str, index: int) -> tuple[Any, ...]:
    if name in LISTS:
        return ([PARAMETER, PARAMETER], PARAMETER)
    if index == 0:
        return (PARAMETER,)
    hinted = HINTS.get(name, ())
    return (*hinted, *(choice for choice in (*TENSORS, *PLAIN) if choice not in hinted))


def candidates(signature: inspect.Signature, trials: int) -> Iterator[tuple[Any, ...]]:
    """Argument tuples to try, likely ones first; the parameter goes first, or where a lone tensor fits."""
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in positional if p.default is p.empty]
    if any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values()):
        names.append("tensors") if not names else names.append("size")
        yield tuple([PARAMETER] * min(len(names), 2))
    product = itertools.product(*(_choices(name, index) for index, name in enumerate(names)))
    yield from itertools.islice(product, trials)
    yield (PARAMETER, "same")
    for extra in PLAIN:
        yield (PARAMETER, extra)
    yield (PARAMETER, 0, 1)


def find_call(name: str, kind: Kind) -> Call | None:
    """The first call that a dense parameter accepts and that gives the same twice; None when no try does."""
    _, signature = public_functions()[name]
    known = SPECIAL.get(last_part(name), ())
    more = candidates(signature, TRIALS if kind in KINDS[:EVERYTHING] else FEW_TRIALS)
    for arguments in known if name in CRASHES_ON_NONSENSE else itertools.chain(known, more):
        for mode in MODES if kind.dtype.is_floating_point else MODES[-1:]:
            call = Call(name, arguments, mode, kind)
            try:
                first = call(dense(kind))
                if last_part(name) in UNDEFINED or same(first, call(dense(kind)), BARS.get(name, 0.0)):
                    return call
            except TypeError:  # in any mode
                break
            except Exception:  # any other refusal of these arguments by torch
                continue
    return None


def find_calls(every: int = 1) -> list[list[Call]]:
    """The calls of every public function, or of every so-manieth, one list per entry of KINDS."""
    left, found = list(public_functions())[::every], []
    for index, kind in enumerate(KINDS):
        found.append([call for name in left if (call := find_call(name, kind))])
        if index >= EVERYTHING - 1:
            served = {call.name for calls in found for call in calls}
            left = [name for name in left if name not in served]
    return found


def dense(kind: Kind) -> nn.Parameter:
    """A plain parameter with fixed values: real ones in (0.1, 1.1), in the domain of most functions."""
    values = torch.rand(kind.shape, generator=torch.Generator().manual_seed(1)) + 0.1
    if not kind.dtype.is_floating_point and not kind.dtype.is_complex:
        values = (values * 5).round()
    return nn.Parameter(values.to(kind.dtype), requires_grad=kind.dtype.is_floating_point)


def same(ours: Any, theirs: Any, bar: float = 0.0) -> bool:
    """Whether two results are equal: tensors in shape, dtype and values, containers entry by entry.

    Args:
        ours: any result.
        theirs: what it should be.
        bar: largest difference of floating-point numbers in tensors.
    """
    if isinstance(theirs, torch.Tensor):
        return same_form(ours, theirs) and _same_values(torch.clone(ours).detach(), torch.clone(theirs).detach(), bar)
    if isinstance(theirs, (list, tuple)):
        alike = type(ours) is type(theirs) and len(ours) == len(theirs)
        return alike and all(same(a, b, bar) for a, b in zip(ours, theirs, strict=True))
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key], bar) for key in theirs)
    if isinstance(theirs, (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)):
        return ours == theirs or (ours != ours and theirs != theirs)
    return type(ours) is type(theirs)  # iterators, hooks, storages: nothing to compare


def same_form(ours: Any, theirs: Any) -> bool:
    """Whether two results are of one type, and tensors of one shape and dtype."""
    if not isinstance(theirs, torch.Tensor):
        return type(ours) is type(theirs)
    return isinstance(ours, torch.Tensor) and ours.shape == theirs.shape and ours.dtype == theirs.dtype


def _same_values(a: torch.Tensor, b: torch.Tensor, bar: float) -> bool:
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.is_complex():
        a, b = torch.view_as_real(a.cfloat()), torch.view_as_real(b.cfloat())
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool(((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= bar)).all())
