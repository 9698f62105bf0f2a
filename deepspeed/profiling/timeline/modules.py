"""Forward and backward by module, as spans.

Backward is a walk: the gradient of a module's output begins it, that of its input ends it, and what runs in between
belongs to the module that was begun last. One tensor is the output of a module and of those around it; the innermost
counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from deepspeed.foundation.recorder import BACKWARD, FORWARD, RECOMPUTE, now, recorder
from deepspeed.foundation.tree import tensors_in

_MARK = "_ds_span"  # on outputs: some module's span begins with the gradient that they had at this version
_core: Any = torch._C


def _in_backward() -> bool:
    return _core._current_graph_task_id() != -1


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    """`tensors_in`, which is given one alone most often."""
    return (value,) if isinstance(value, torch.Tensor) else tensors_in(value)


def _marked(tensor: torch.Tensor) -> bool:
    """Whether a module's span begins with its gradient, and it was not changed in place since."""
    return getattr(tensor, _MARK, None) == tensor._version


class ModuleSpans:
    """Hooks on all modules of a model, until `remove`.

    Args:
        model: its own span has no name, and is the engine's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules() if name}
        self._running: list[tuple[nn.Module, int]] = []
        self._module, self._since = "", 0  # whose backward runs
        self._above: list[str] = []
        self._hooks: list[Any] = []
        enter: Any = torch.compiler.disable(self._enter)
        leave: Any = torch.compiler.disable(self._leave)
        for module in self._names:
            self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._running.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if recorder.on:
            name = self._names[module]
            above = self._names[self._running[-1][0]] if self._running else ""
            self._running.append((module, now()))
            if torch.is_grad_enabled():
                for tensor in _tensors(args[0] if len(args) == 1 and not kwargs else (args, kwargs)):
                    # What another module gave begins that one's backward, so nothing is left to be ended then.
                    if tensor.requires_grad and not tensor.is_leaf and not _marked(tensor):
                        tensor.register_hook(lambda _grad: self._end(name, above))

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        while self._running:
            left, began = self._running.pop()
            if left is module:  # others were left by an exception
                recorder.add(began, RECOMPUTE if _in_backward() else FORWARD, module=self._names[module])
                break
        if recorder.on and torch.is_grad_enabled():
            name = self._names[module]
            for tensor in _tensors(output):
                if tensor.grad_fn is not None and not _marked(tensor):
                    setattr(tensor, _MARK, tensor._version)
                    tensor.register_hook(lambda _grad: self._begin(name))

    def _begin(self, name: str) -> None:
        """The backward of a module begins."""
        if not recorder.on:
            return
        if not self._since:
            Variable._execution_engine.queue_callback(self._turn)
        self._turn(name)

    def _end(self, name: str, above: str) -> None:
        """Its input has its gradient."""
        if self._since and (self._module == name or self._module.startswith(f"{name}.")):
            self._turn(above)

    def _turn(self, name: str | None = None) -> None:
        """What runs from now on is a module's; None: backward is over."""
        if self._since and self._module:
            recorder.add(self._since, BACKWARD, module=self._module)
        self._module, self._since = name or "", 0 if name is None else now()
