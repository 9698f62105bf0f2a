"""Counts operations where they are dispatched, below autograd, so whatever a module calls them by."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepspeed.ops.dispatch import DispatchMode
from deepspeed.ops.flop_formulas import computed_again, formulas
from deepspeed.profiling.module_attribution import AGAIN, OUTSIDE, Attribution


class _Mode(DispatchMode):
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


class Counter(Attribution):
    """Operations and seconds by module, while it is attached.

    Attributes:
        own: operations of forward, of backward, and computed again, by the name of the module itself.
        uncounted: seconds in operators without a formula, by operator; only while operations are counted.
    """

    def __init__(self, model: nn.Module, ignore: Iterable[type[nn.Module]] = ()) -> None:
        super().__init__(model, ignore)
        self.own: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        self.uncounted: dict[str, float] = defaultdict(float)
        self.seconds_in_operators = 0.0
        self._mode: _Mode | None = None

    def attach(self, counting: bool = True) -> None:
        """Begin.

        Args:
            counting: operations too, which costs some microseconds each; else times alone.
        """
        self.hook()
        if counting:
            self._mode = _Mode(self)
            self._mode.__enter__()

    def detach(self) -> None:
        """End; the numbers stay."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        self.unhook()

    def add(self, flops: int, again: int) -> None:
        """An operator was called.

        Args:
            flops: its operations.
            again: part of them that forward had computed already.
        """
        whose, phase = self.where()
        if whose is None:
            return
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
