"""Spans of forward and backward by module.

The backward of a module begins with the gradient of its output and ends with that of its input; operations in between
belong to the module that began last. If one tensor is the output of nested modules, the innermost counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from deepspeed.foundation.pytree import tensors_in
from deepspeed.foundation.saved_tensors import in_backward
from deepspeed.foundation.spans import BACKWARD, FORWARD, RECOMPUTE, now, recorder

_MARK = "_ds_span"  # attribute of outputs: version of the tensor for which a hook was registered
is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    """Return the tensors of a value, with a fast path for a single tensor."""
    return (value,) if isinstance(value, torch.Tensor) else tensors_in(value)


class ModuleSpans:
    """Hooks that record the forward and backward spans of all modules of a model, until `remove`.

    Args:
        model: the model; the engine records the span of the root module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._running: list[tuple[str, int]] = []
        self._module, self._since = "", 0  # module whose backward runs
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            if name:
                self._hooks.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                self._hooks.append(module.register_forward_hook(partial(self._leave, name), always_call=True))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._running.clear()

    def __deepcopy__(self, memo: Any) -> ModuleSpans:
        """Return the same object: copies of a model share these hooks until `remove`."""
        return self

    def _enter(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        # A compiled module is one span, so that its graph does not break.
        if is_compiling() or not recorder.on or not self._hooks:
            return
        running = self._running
        above = running[-1][0] if running else ""
        running.append((name, now()))
        if is_grad_enabled():
            for tensor in tensors_in((args, kwargs)) if kwargs or len(args) != 1 else _tensors(args[0]):
                node = tensor.grad_fn
                # The gradient of another module's output begins that module's backward, which ends this one.
                if node is not None and getattr(tensor, _MARK, None) != tensor._version:
                    node.register_prehook(partial(self._end, name, above))

    def _leave(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if is_compiling():
            return
        running = self._running
        while running:
            left, began = running.pop()
            if left == name:  # an exception left the others
                recorder.add(began, RECOMPUTE if in_backward() else FORWARD, module=name)
                break
        if recorder.on and self._hooks and is_grad_enabled():
            for tensor in _tensors(output):
                node = tensor.grad_fn
                if node is not None and getattr(tensor, _MARK, None) != tensor._version:
                    setattr(tensor, _MARK, tensor._version)
                    # Hook on the node: a hook on the tensor costs four times as much.
                    node.register_prehook(partial(self._begin, name))

    def _begin(self, name: str, _gradients: Any) -> None:
        """Begin the backward span of a module when the gradient of its output is computed."""
        if not recorder.on:
            return
        if not self._since:
            Variable._execution_engine.queue_callback(self._turn)
        self._turn(name)

    def _end(self, name: str, above: str, _gradients: Any) -> None:
        """End the backward of a module when the gradient of its input is computed; `above` is the module's caller."""
        if self._since and (self._module == name or self._module.startswith(f"{name}.")):
            self._turn(above)

    def _turn(self, name: str | None = None) -> None:
        """Attribute the following operations to a module; None: backward has ended."""
        if self._since and self._module:
            recorder.add(self._since, BACKWARD, module=self._module)
        self._module, self._since = name or "", 0 if name is None else now()
