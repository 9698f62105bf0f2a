"""Forward of a 16-bit model in fp32 arithmetic, without an fp32 copy of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.foundation.pytree import map_tensors

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@contextmanager
def computes_in_fp32(model: nn.Module) -> Iterator[None]:
    """Context in which the modules of a model compute in fp32 with their 16-bit weights.

    While a module's forward runs, its own 16-bit parameters are replaced by fp32 copies, and so are the tensors that it
    gets; so one module at a time needs three times the memory of its weights. A module that reads another one's
    parameters may raise; one that casts its input to another one's dtype still rounds it.
    """
    replaced: dict[nn.Module, dict[str, nn.Parameter]] = {}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        own = {name: p for name, p in module._parameters.items() if p is not None and p.dtype in SIXTEEN_BITS}
        if own and module not in replaced:
            replaced[module] = own
            for name, param in own.items():
                module._parameters[name] = nn.Parameter(param.detach().float(), requires_grad=False)
        return map_tensors(_wide, args), map_tensors(_wide, kwargs)

    def leave(module: nn.Module, *_: Any) -> None:
        module._parameters.update(replaced.pop(module, {}))

    handles = []
    try:
        for module in model.modules():
            if any(p is not None for p in module._parameters.values()):
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                # First, so that hooks which free a gathered parameter see the parameter itself.
                handles.append(module.register_forward_hook(leave, prepend=True, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, own in replaced.items():
            module._parameters.update(own)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in SIXTEEN_BITS else tensor
