"""Attribution of operations to modules, forward and backward.

Forward operations belong to the running module. Backward operations belong to the module whose forward created the
graph node: nodes are numbered in creation order, and hooks record the number where a module begins and ends. So
the backward of a module whose inputs need no gradient is attributed to it, which tensor hooks could not do.
[Note: again] Operations in backward with gradients enabled are a recomputed forward of a checkpoint.
"""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepspeed.foundation.saved_tensors import in_backward

_core: Any = torch._C
FORWARD, BACKWARD, AGAIN = 0, 1, 2
OUTSIDE = "(outside)"  # what no module of the model did


class Attribution:
    """Tracker of the module that runs the current operation, between `hook` and `unhook`.

    Args:
        model: the model.
        ignore: types of modules; `where` returns no name for operations inside of them.

    Attributes:
        seconds: forward time of a module including its descendants, by name, on the host's clock.
    """

    def __init__(self, model: nn.Module, ignore: Iterable[type[nn.Module]] = ()) -> None:
        self._names: dict[nn.Module, list[str]] = defaultdict(list)
        for name, module in model.named_modules(remove_duplicate=False):
            self._names[module].append(name)
        self._ignore = tuple(ignore)
        self.seconds: dict[str, float] = defaultdict(float)
        self._running: list[tuple[str, nn.Module, float]] = []
        self._ignored = 0
        self._marks: list[tuple[int, str | None]] = [(0, OUTSIDE)]  # first node number, module of its nodes
        self._hooks: list[Any] = []

    def hook(self) -> None:
        """Register forward hooks on all modules."""
        for module in self._names:
            self._hooks.append(module.register_forward_pre_hook(self._enter))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._running.clear()

    def where(self) -> tuple[str | None, int]:
        """Return (module name, phase) of the current operation: phase FORWARD, BACKWARD or AGAIN (recomputation).

        The name is `OUTSIDE` outside of all modules, and None inside of ignored ones.
        """
        backward = in_backward()
        if self._running:
            whose = None if self._ignored else self._running[-1][0]
        else:
            whose = self._of_node() if backward else OUTSIDE
        phase = FORWARD if not backward else AGAIN if self._running or torch.is_grad_enabled() else BACKWARD
        return whose, phase

    def _enter(self, module: nn.Module, _args: Any) -> None:
        above = self._running[-1][0] if self._running else self._of_node() if in_backward() else None
        self._running.append((self._name(module, above), module, time.perf_counter()))
        self._ignored += isinstance(module, self._ignore)
        self._mark()

    def _leave(self, module: nn.Module, _args: Any, _out: Any) -> None:
        while self._running:
            name, left, began = self._running.pop()
            self._ignored -= isinstance(left, self._ignore)
            if not in_backward() and name not in (above for above, _, _ in self._running):
                self.seconds[name] += time.perf_counter() - began
            if left is module:  # an exception left the others
                break
        self._mark()

    def _mark(self) -> None:
        whose = self._running[-1][0] if self._running else OUTSIDE
        self._marks.append((torch.autograd._get_sequence_nr(), None if self._ignored else whose))

    def _name(self, module: nn.Module, above: str | None) -> str:
        """Return the module's name; for a shared module, the one that fits its caller `above`."""
        names = self._names[module]
        if above is None or above == OUTSIDE:
            return names[0]
        for name in names:
            if not above or name == above or name.startswith(f"{above}.") or above.startswith(f"{name}."):
                return name
        return f"{above}.<{names[0].replace('.', '/')}>"  # a module from elsewhere that is called here

    def _of_node(self) -> str | None:
        """Return the module whose forward created the current graph node; None for an ignored module."""
        node = _core._current_autograd_node()
        if node is None:
            return OUTSIDE
        return self._marks[bisect.bisect_right(self._marks, node._sequence_nr(), key=lambda mark: mark[0]) - 1][1]
