"""Test whether an optimizer updates each parameter independently, by running small copies of it.

ZeRO splits an update: each rank updates some parameters (stages 1 to 3), and with offload one step becomes several,
each with the gradients of some parameters. Both are exact only if the update of one parameter does not depend on the
others. A global norm inside of `step` (Adan, NVLAMB), one step size estimated from all parameters (Prodigy,
D-Adaptation) or a perturbation scaled by all gradients (SAM) violate this. Optimizer classes do not declare
this property, so this module tests it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, nn

from deepspeed.foundation.log import describe_error
from deepspeed.optim.nested import Counters, groups_of, join_states, nested_optimizers

Optimizer = torch.optim.Optimizer
Values = list[Tensor]

_KNOWN = ("torch.optim.", "deepspeed.ops.")  # classes that this package tests with every stage and tier
_PER_GROUP, _SIDE, _SIDE_OF_MANY = 3, 6, 3  # parameters of a copied group; their longest side; with over two dims
_ALIKE = 4  # number of groups of one kind that are copied with parameters
_STEPS, _FEW_METHODS = 12, 8  # more steps than the usual period of Lookahead (5 or 6), twice
_TOLERANCE = 1e-5  # of the distance that a parameter moves
_HOOKS = ("pre", "post")


@dataclass(frozen=True)
class MethodTraits:
    """Traits of a public optimizer method without arguments.

    Attributes:
        reads_gradients: whether the method reads gradients, such as SAM's `first_step`.
        by_parameter: whether separate calls on parts of the parameters give the same result as one call.
    """

    reads_gradients: bool
    by_parameter: bool

    def joined(self, other: MethodTraits) -> MethodTraits:
        """Return the combined traits of this and another test of the same method."""
        return MethodTraits(self.reads_gradients or other.reads_gradients, self.by_parameter and other.by_parameter)


@dataclass(frozen=True)
class HowToStep:
    """Requirements of an optimizer's `step`.

    Attributes:
        closure: whether `step` needs a closure that recomputes gradients.
        first: name of a method to call once before the first step; "": none.
    """

    closure: bool = False
    first: str = ""


@dataclass(frozen=True)
class UpdateTraits:
    """Ways in which an optimizer's update can be split.

    Attributes:
        known: whether the class is from torch or this package, so that nothing was run.
        by_parameter: whether ranks that each update some parameters give the same result as one process.
        in_parts: whether several steps, each with the gradients of some parameters, give the same result as one step.
        counts_alone: whether a group's counters advance with each step even if the group has no parameters.
        how: requirements of `step`.
        methods: traits of public methods that write parameters or state outside of `step`, by name.
        kept_in: path of an attribute with parameters, if a step updates these instead of the groups' own; else "".
        difference: largest difference caused by a split, relative to the distance moved.
        unknown: reason why the test failed; "" if it succeeded.
    """

    known: bool = False
    by_parameter: bool = True
    in_parts: bool = True
    counts_alone: bool = True
    how: HowToStep = HowToStep()
    methods: Mapping[str, MethodTraits] = field(default_factory=lambda: MappingProxyType({}))
    kept_in: str = ""
    difference: float = 0.0
    unknown: str = ""


def update_traits(optimizer: Optimizer) -> UpdateTraits:
    """Test how the update of an optimizer can be split.

    The test runs copies on parameters of a few dozen elements with artificial gradients: whole, divided between two
    objects, and in two steps of one object. The optimizer itself, its parameters and the random state do not change;
    an error in a run is returned as `unknown`. Call this before the parameters are replaced.
    """
    if type(optimizer).__module__.startswith(_KNOWN) and not nested_optimizers(optimizer):
        return UpdateTraits(known=True)
    try:
        with _quiet(optimizer):
            return _measured(optimizer)
    except Exception as error:  # a third-party class may raise any error
        return UpdateTraits(unknown=describe_error(error))


def _measured(optimizer: Optimizer) -> UpdateTraits:
    how = _how_to_step(optimizer)
    whole = _run(_Copy(optimizer), how)
    start = _Copy(optimizer).values()
    moved = max([float((a - b).abs().max()) for a, b in zip(whole.values(), start, strict=True)], default=0.0)
    if start and not moved:
        return UpdateTraits(how=how, unknown=f"{_STEPS} steps moved none of them")
    kept_in = _attribute_with_parameters(optimizer)
    if kept_in and _follows_groups(optimizer, how, whole, moved):
        kept_in = ""
    halves = [_run(_Copy(optimizer, lambda place, half=half: place % 2 == half), how) for half in (0, 1)]
    empty = _run(_Copy(optimizer, lambda place: False), how)
    apart = [halves[place % 2].tensors[place].detach() for place in range(len(start))]
    difference = _distance(whole.values(), apart, moved)
    in_parts = _distance(whole.values(), _run(_Copy(optimizer), how, parts=2).values(), moved)
    if max(difference, in_parts) > _TOLERANCE:
        again = _run(_Copy(optimizer), how, seed=1)
        if _distance(whole.values(), again.values(), moved) > _TOLERANCE:
            methods = _methods(optimizer, how)
            return UpdateTraits(how=how, methods=methods, kept_in=kept_in, unknown="it draws random numbers")
    alike = all(half.numbers() == whole.numbers() for half in halves)
    methods = _methods(optimizer, how)
    by_parameter = difference <= _TOLERANCE and alike and all(traits.by_parameter for traits in methods.values())
    return UpdateTraits(
        by_parameter=by_parameter,
        in_parts=by_parameter and in_parts <= _TOLERANCE,
        counts_alone=empty.numbers() == whole.numbers(),
        how=how,
        methods=methods,
        kept_in=kept_in,
        difference=max(difference, in_parts),
    )


def _attribute_with_parameters(optimizer: Optimizer) -> str:
    """Return the path of the first attribute, of this or a nested optimizer, with parameters of the groups; else ""."""
    ours = {id(param) for group in groups_of(optimizer) for param in group["params"]}

    def holds(value: Any, depth: int = 3) -> bool:
        if isinstance(value, Tensor):
            return id(value) in ours
        if isinstance(value, Mapping):
            return depth > 0 and any(holds(item, depth - 1) for pair in value.items() for item in pair)
        return (
            isinstance(value, (list, tuple, set, frozenset)) and depth > 0 and any(holds(v, depth - 1) for v in value)
        )

    for path, each in {"": optimizer, **nested_optimizers(optimizer)}.items():
        for name, value in vars(each).items():
            if name not in ("param_groups", "state", "defaults") and holds(value):
                return f"{path}.{name}".removeprefix(".")
    return ""


def _follows_groups(optimizer: Optimizer, how: HowToStep, whole: _Copy, moved: float) -> bool:
    """Return whether new tensors of equal values in the groups are updated like the original ones."""
    twin = _Copy(optimizer)
    twin.replace_parameters()
    try:
        return _distance(whole.values(), _run(twin, how).values(), moved) <= _TOLERANCE
    except Exception:  # a class may raise any error when it looks up replaced parameters
        return False


def _distance(left: Sequence[Tensor], right: Sequence[Tensor], moved: float) -> float:
    """Return the largest difference relative to `moved` (absolute if 0); inf if non-finite values differ."""
    worst = 0.0
    for value_left, other in zip(left, right, strict=True):
        gap = torch.where(value_left == other, torch.zeros_like(value_left), (value_left - other).abs())
        gap = gap.masked_fill(value_left.isnan() & other.isnan(), 0.0).nan_to_num(torch.inf, torch.inf)
        worst = max(worst, float(gap.max()) if gap.numel() else 0.0)
    return worst / moved if moved else worst


@contextlib.contextmanager
def _quiet(optimizer: Optimizer) -> Iterator[None]:
    """Context with one thread and without global optimizer hooks; restores random states and `Counters` at the end."""
    devices = {p.device for group in groups_of(optimizer) for p in group["params"] if p.device.type != "meta"}
    cards = [device for device in devices if device.type == "cuda"]
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        torch.set_num_threads(1)  # matrices this small are slower on several
        stack.callback(torch.set_num_threads, threads)
        stack.enter_context(torch.random.fork_rng(devices=cards))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(Counters.of(optimizer).restore)  # its functions may change the original
        for when in _HOOKS:
            stack.enter_context(mock.patch.object(torch_optimizer, f"_global_optimizer_{when}_hooks", OrderedDict()))
        yield


class _Copy:
    """Small copy of an optimizer and its nested optimizers; `keep` selects parameters by their position."""

    def __init__(self, optimizer: Optimizer, keep: Callable[[int], bool] = lambda place: True) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._memo: dict[int, Any] = {}
        self._pinned: list[Any] = []  # keeps the objects alive whose ids are in the memo
        small: dict[int, Tensor] = {}
        place, kinds = 0, Counter[object]()
        for group in groups_of(optimizer):
            kind = tuple((key, value) for key, value in group.items() if isinstance(value, (bool, str)))
            kinds[kind] += bool(group["params"])
            # Groups that differ only in numbers, such as one per layer, are of one kind: a few of them suffice.
            chosen = self._chosen(group["params"]) if kinds[kind] <= _ALIKE else set[int]()
            for param in group["params"]:
                if id(param) in small or id(param) not in chosen:
                    continue
                small[id(param)] = self._small(param, place)
                if keep(place):
                    self.tensors[place] = small[id(param)]
                place += 1
            self._remember(group, {})
        left, left_out = {id(tensor) for tensor in self.tensors.values()}, torch.zeros(1)
        for group in groups_of(optimizer):
            copies = [small[id(p)] for p in group["params"] if id(p) in small and id(small[id(p)]) in left]
            twin = self._memo[id(group)]
            twin.update({key: copy.deepcopy(value, self._memo) for key, value in group.items() if key != "params"})
            twin["params"] = copies
            self._set_rate(twin)
            for param in group["params"]:
                self._remember(param, small.get(id(param), left_out))
        every = [optimizer, *nested_optimizers(optimizer).values()]
        for each in every:
            self._remember(each, object.__new__(type(each)))
            groups = vars(each).get("param_groups")
            if groups is not None:
                self._memo.setdefault(id(groups), [self._memo[id(group)] for group in groups])
            self._memo.setdefault(id(each.state), self._state(each.state, small, left))
        for each in every:
            self._fill(each)
        self.optimizer: Optimizer = self._memo[id(optimizer)]
        join_states(self.optimizer)

    def _remember(self, original: Any, twin: Any) -> None:
        self._memo[id(original)] = twin
        self._pinned.append(original)

    def _fill(self, original: Optimizer) -> None:
        twin = self._memo[id(original)]
        for name, value in vars(original).items():
            if name.startswith("_optimizer_") and isinstance(value, dict):
                vars(twin)[name] = OrderedDict()
            elif isinstance(value, nn.Module):
                raise TypeError(f"it holds a module ({name})")
            elif name != "step":  # a scheduler's wrapper
                vars(twin)[name] = copy.deepcopy(value, self._memo)

    def _state(self, state: Mapping[Any, Any], small: dict[int, Tensor], left: set[int]) -> dict[Any, Any]:
        twin: dict[Any, Any] = defaultdict(dict)
        for param, entry in dict.items(state) if isinstance(state, dict) else state.items():
            if isinstance(param, str):  # it belongs to no parameter
                twin[param] = copy.deepcopy(entry)
                continue
            tensor = small.get(id(param))
            if tensor is not None and id(tensor) in left and isinstance(entry, Mapping):
                twin[tensor] = {key: self._cropped(value, param, tensor) for key, value in entry.items()}
        return twin

    def replace_parameters(self) -> None:
        """Replace the parameters in groups and state by others of equal values, as ZeRO does."""
        fresh: dict[int, Tensor] = {}
        for place, tensor in self.tensors.items():
            twin = nn.Parameter(tensor.detach().clone(), requires_grad=True)
            vars(twin).update(vars(tensor))
            self._remember(tensor, twin)
            fresh[id(tensor)] = self.tensors[place] = twin
        for group in groups_of(self.optimizer):
            group["params"] = [fresh.get(id(param), param) for param in group["params"]]
        for each in [self.optimizer, *nested_optimizers(self.optimizer).values()]:
            for param in list(dict.keys(each.state)) if isinstance(each.state, dict) else ():
                if id(param) in fresh:
                    each.state[fresh[id(param)]] = each.state.pop(param)

    def values(self) -> Values:
        return [tensor.detach().clone() for _, tensor in sorted(self.tensors.items())]

    def stored(self) -> Values:
        state = self.optimizer.state
        return [
            value.detach().clone()
            for _, tensor in sorted(self.tensors.items())
            for _, value in sorted(state.get(tensor, {}).items(), key=lambda item: str(item[0]))
            if isinstance(value, Tensor)
        ]

    def numbers(self) -> list[Any]:
        """Return the numbers in the groups, such as counters, for comparison between copies."""
        return [
            [value for key, value in sorted(group.items()) if isinstance(value, (bool, int, float)) and key != "params"]
            for group in groups_of(self.optimizer)
        ]

    def set_gradients(self, step: int, seed: int = 0, parts: int = 1, part: int = 0) -> None:
        """Set the gradients of a step on all parameters or one part; they depend on the parameters' values."""
        for place, tensor in self.tensors.items():
            tensor.grad = None
            if place % parts == part:
                generator = torch.Generator().manual_seed(7919 * (seed + 1) + 101 * step + place)
                scale = (1.0, 30.0, 0.1)[step % 3]
                tensor.grad = scale * torch.randn(tensor.shape, generator=generator).to(tensor) + tensor.detach()

    def step(self, step: int, how: HowToStep, parts: int = 1, part: int = 0) -> None:
        self.set_gradients(step, parts=parts, part=part)
        if not how.closure:
            type(self.optimizer).step(self.optimizer)
            return

        def closure() -> Tensor:
            self.set_gradients(step + 1000, parts=parts, part=part)
            return torch.zeros(())

        type(self.optimizer).step(self.optimizer, closure)  # type: ignore[arg-type]

    @staticmethod
    def _chosen(params: Sequence[Tensor]) -> set[int]:
        """Select a few parameters of a group, at least one for each number of dimensions."""
        first = {param.dim(): param for param in reversed(params)}
        rest = [param for param in params if all(param is not known for known in first.values())]
        return {id(param) for param in [*first.values(), *rest[: max(0, _PER_GROUP - len(first))]]}

    @staticmethod
    def _small(param: Tensor, place: int) -> nn.Parameter:
        shape = [min(size, _SIDE if param.dim() <= 2 else _SIDE_OF_MANY) for size in param.shape]
        device = torch.device("cpu") if param.device.type == "meta" else param.device
        values = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(place))
        twin = nn.Parameter(values.to(device), requires_grad=True)
        vars(twin).update({key: mark for key, mark in vars(param).items() if isinstance(mark, (bool, int, float, str))})
        return twin

    @staticmethod
    def _cropped(value: Any, param: Tensor, tensor: Tensor) -> Any:
        if not isinstance(value, Tensor) or value.shape != param.shape or not value.dim():
            return copy.deepcopy(value)
        return value.detach().reshape(-1)[: tensor.numel()].clone().view(tensor.shape).to(tensor.device)

    @staticmethod
    def _set_rate(group: dict[str, Any]) -> None:
        """Raise the learning rate above 0: a schedule may start at 0, where nothing would move."""
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            group["lr"] = rate.clamp(min=1e-2)
        elif isinstance(rate, (int, float)):
            group["lr"] = max(float(rate), 1e-2)


def _run(twin: _Copy, how: HowToStep, parts: int = 1, steps: int = _STEPS, seed: int = 0) -> _Copy:
    torch.manual_seed(seed)
    if how.first:
        getattr(twin.optimizer, how.first)()
    for step in range(steps):
        before = Counters.of(twin.optimizer) if parts > 1 else None
        for part in range(parts):
            if part and before is not None:
                before.restore()
            twin.step(step, how, parts, part)
    return twin


def _how_to_step(optimizer: Optimizer) -> HowToStep:
    """Find the requirements of a step by trial; raises the error of a plain step if no way succeeds."""
    ways = [HowToStep(), HowToStep(closure=True), *(HowToStep(first=name) for name in _own_methods(type(optimizer)))]
    errors: list[Exception] = []
    for how in ways:
        try:
            _run(_Copy(optimizer), how, steps=1)
        except Exception as error:  # of any class
            errors.append(error)
        else:
            return how
    raise errors[0]


def _methods(optimizer: Optimizer, how: HowToStep) -> dict[str, MethodTraits]:
    """Return the traits, by name, of methods from `_own_methods` that write parameters or state."""
    names = _own_methods(type(optimizer))
    traits: dict[str, MethodTraits] = {}

    def look(calls: list[str]) -> None:
        effect, name = _effect(optimizer, calls, how), calls[-1]
        if effect is not None:
            traits[name] = effect.joined(traits.get(name, effect))

    for name in names:
        look([name])
    # Some have an effect only after another, as train() after eval(). With many methods, only after those with effects.
    for first in names if len(names) <= _FEW_METHODS else tuple(traits):
        for name in names:
            look([first, name])
    return traits


def _effect(optimizer: Optimizer, calls: list[str], how: HowToStep) -> MethodTraits | None:
    """Return the traits of the last method in `calls`; None if it changes nothing or raises."""

    def called(seed: int, keep: Callable[[int], bool] = lambda place: True) -> tuple[_Copy, tuple[Values, Values]]:
        twin = _run(_Copy(optimizer, keep), how)
        for call in calls[:-1]:
            twin.set_gradients(50)
            getattr(twin.optimizer, call)()
        twin.set_gradients(60, seed)
        before = twin.values(), twin.stored()
        getattr(twin.optimizer, calls[-1])()
        return twin, before

    try:
        twins = [called(seed) for seed in (0, 1)]
        if all(_equal((twin.values(), twin.stored()), before) for twin, before in twins):
            return None
        halves = [called(0, lambda place, half=half: place % 2 == half)[0] for half in (0, 1)]
    except Exception:  # not callable in this way
        return None
    first, second = (twin for twin, _ in twins)
    apart = [halves[place % 2].tensors[place].detach() for place in first.tensors]
    reads = not _equal((first.values(), first.stored()), (second.values(), second.stored()))
    return MethodTraits(reads, _distance(first.values(), apart, 1.0) <= _TOLERANCE)


def _own_methods(cls: type) -> list[str]:
    """Return names of public methods beyond torch's Optimizer without required arguments and text or path defaults."""
    names: list[str] = []
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if name.startswith("_") or hasattr(Optimizer, name) or not inspect.isfunction(function):
            continue
        parameters = list(inspect.signature(function).parameters.values())[1:]
        if any(isinstance(p.default, (str, os.PathLike)) for p in parameters):
            continue  # a method with a name or path as argument may write files
        needed = [p for p in parameters if p.default is p.empty]
        if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed):
            names.append(name)
    return names


def _equal(left: tuple[Values, Values], right: tuple[Values, Values]) -> bool:
    pairs = [
        (a, b)
        for left_values, right_values in zip(left, right, strict=True)
        for a, b in zip(left_values, right_values, strict=False)
    ]
    return [*map(len, left)] == [*map(len, right)] and all(
        a.shape == b.shape and bool((a == b).all()) for a, b in pairs
    )
