"""Counts operations where they are dispatched, below autograd, so whatever a module calls them by.

Which module an operation belongs to: forward, that which runs. Backward, that whose forward made the node of the graph
that runs: nodes are numbered in the order they are made, and hooks note the number where a module begins and ends. So
a module whose inputs need no gradient keeps its backward, which hooks on tensors would give to a neighbour.
[Note: again] What runs in backward with gradients enabled is forward computed again, by a checkpoint.
"""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.profiling.flops_profiler.formulas import computed_again, formulas

_core: Any = torch._C
FORWARD, BACKWARD, AGAIN = 0, 1, 2
OUTSIDE = "(outside)"  # what no module of the model did


def _in_backward() -> bool:
    return _core._current_graph_task_id() != -1


class _Mode(TorchDispatchMode):
    """Sees every operator."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter, self._formulas = counter, formulas()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = func._overloadpacket
        formula = self._formulas.get(operator)
        if formula is None and func._can_decompose() and torch.is_inference_mode_enabled():
            with self:  # autograd, which takes composites apart, is out of the way
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        began = time.perf_counter()
        out = func(*args, **kwargs)
        took = time.perf_counter() - began
        if formula is None:
            self._counter.uncounted[str(operator)] += took
        else:
            self._counter.add(formula(*args, **kwargs, out_val=out), computed_again(operator, args))
        self._counter.seconds_in_operators += took
        return out


class Counter:
    """Operations and seconds by module, while it is attached.

    Attributes:
        own: operations of forward, of backward, and computed again, by the name of the module itself.
        seconds: forward time of a module with all below it, by name; the host's clock.
        uncounted: seconds in operators without a formula, by operator; only while operations are counted.
    """

    def __init__(self, model: nn.Module, ignore: Iterable[type[nn.Module]] = ()) -> None:
        self._names: dict[nn.Module, list[str]] = defaultdict(list)
        for name, module in model.named_modules(remove_duplicate=False):
            self._names[module].append(name)
        self._ignore = tuple(ignore)
        self.own: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        self.seconds: dict[str, float] = defaultdict(float)
        self.uncounted: dict[str, float] = defaultdict(float)
        self.seconds_in_operators = 0.0
        self._running: list[tuple[str, nn.Module, float]] = []
        self._ignored = 0
        self._marks: list[tuple[int, str | None]] = [(0, OUTSIDE)]  # node number, and whose nodes begin there
        self._hooks: list[Any] = []
        self._mode: _Mode | None = None
        self._fast_path = False

    def attach(self, counting: bool = True) -> None:
        """Begin.

        Args:
            counting: operations too, which costs some microseconds each; else times alone.
        """
        for module in self._names:
            self._hooks.append(module.register_forward_pre_hook(self._enter))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        if counting:
            # One fused operator for a whole encoder layer would hide its products.
            self._fast_path = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            self._mode = _Mode(self)
            self._mode.__enter__()

    def detach(self) -> None:
        """End; the numbers stay."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            torch.backends.mha.set_fastpath_enabled(self._fast_path)
            self._mode = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._running.clear()

    # -- whose operation it is --------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, _args: Any) -> None:
        above = self._running[-1][0] if self._running else self._of_node() if _in_backward() else None
        self._running.append((self._name(module, above), module, time.perf_counter()))
        self._ignored += isinstance(module, self._ignore)
        self._mark()

    def _leave(self, module: nn.Module, _args: Any, _out: Any) -> None:
        while self._running:
            name, left, began = self._running.pop()
            self._ignored -= isinstance(left, self._ignore)
            if not _in_backward() and name not in (above for above, _, _ in self._running):
                self.seconds[name] += time.perf_counter() - began
            if left is module:  # others were left by an exception
                break
        self._mark()

    def _mark(self) -> None:
        whose = self._running[-1][0] if self._running else OUTSIDE
        self._marks.append((torch.autograd._get_sequence_nr(), None if self._ignored else whose))

    def _name(self, module: nn.Module, above: str | None) -> str:
        """Its name; of several (it is shared) the one on the way from, or to, the module that runs above it."""
        names = self._names[module]
        if above is None or above == OUTSIDE:
            return names[0]
        for name in names:
            if not above or name == above or name.startswith(f"{above}.") or above.startswith(f"{name}."):
                return name
        return f"{above}.<{names[0].replace('.', '/')}>"  # it lies elsewhere, and is called here

    def _of_node(self) -> str | None:
        """Whose forward made the node of the graph that runs; None is nobody's who counts."""
        node = _core._current_autograd_node()
        if node is None:
            return OUTSIDE
        return self._marks[bisect.bisect_right(self._marks, node._sequence_nr(), key=lambda mark: mark[0]) - 1][1]

    def add(self, flops: int, again: int) -> None:
        """An operator was called.

        Args:
            flops: its operations.
            again: part of them that forward had computed already.
        """
        backward = _in_backward()
        if self._running:
            whose = None if self._ignored else self._running[-1][0]
        else:
            whose = self._of_node() if backward else OUTSIDE
        if whose is None:
            return
        phase = FORWARD if not backward else AGAIN if self._running or torch.is_grad_enabled() else BACKWARD
        self.own[whose][phase] += flops - again
        self.own[whose][AGAIN] += again

    # -- what came of it --------------------------------------------------------------------------------------------

    def totals(self) -> dict[str, list[int]]:
        """Operations of each module with all below it, containers too; "" is the model."""
        found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for name, counts in self.own.items():
            if name != OUTSIDE:
                for above in _line_of(name):
                    found[above] = [a + b for a, b in zip(found[above], counts, strict=True)]
        return found

    def time_of(self, name: str) -> float:
        """Seconds of forward in a module; of a container, which is not called, in its children."""
        if name in self.seconds:
            return self.seconds[name]
        below = f"{name}." if name else ""
        inside = [n for n in self.seconds if n.startswith(below)]
        top = [n for n in inside if not any(n != other and n.startswith(f"{other}.") for other in inside)]
        return sum(self.seconds[n] for n in top)

    def without_formula(self, least: float = 0.01) -> list[tuple[str, float]]:
        """Operators that no formula counts, with their share of the time in all operators, the largest first.

        Args:
            least: share below which they are left out.
        """
        shares = {name: took / self.seconds_in_operators for name, took in self.uncounted.items()}
        return sorted(((n, s) for n, s in shares.items() if s >= least), key=lambda row: -row[1])


def _line_of(name: str) -> list[str]:
    """A name and those above it, up to the model's, which is empty."""
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]
