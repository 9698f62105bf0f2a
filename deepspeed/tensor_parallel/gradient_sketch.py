"""Sketches gradients: multiplies each with random vectors as soon as it is computed.

The gradients of a unit take as much memory as the unit, and writing them more time than all that is read for them. A
gradient is looked at and let go, one after the other. That of a weight that a linear product reads as it is, dense or a
slice, is not even made: what was read and what came back, a few tokens, say all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed.foundation.fake_mode import with_values
from deepspeed.tensor_parallel.layers import take
from deepspeed.zero.layout.placement import placement_of

PROBES = 4  # random vectors: a wrong row would have to be at right angles to all of them
Sketches = dict[int, torch.Tensor]
"""Products of a gradient (…, a, b) with random vectors along its last dim, (…, a, PROBES) by -1, and along the one
before, (…, b, PROBES) by -2; both in units of the gradient's elements. Of one with fewer dims: itself, by 0."""


def sketches(gradient: torch.Tensor, without: Iterable[int] = ()) -> Sketches:
    """Those of a gradient.

    Args:
        gradient: of a parameter.
        without: dims from the end that are cut: what is multiplied along one is no part of the dense one's.
    """
    if gradient.dim() < 2:
        return {0: gradient.clone()}
    sides = {-1: gradient, -2: gradient.transpose(-1, -2)}
    return {dim: side @ _probes(side) for dim, side in sides.items() if dim not in set(without)}


def dims_of(param: torch.Tensor) -> set[int]:
    """The dims along which a parameter is cut, from the end."""
    return {cut.dim - param.dim() for cut in placement_of(param).cuts}


def part_of(sketch: torch.Tensor, along: int, param: torch.Tensor) -> torch.Tensor:
    """What a rank's sketch is, of the dense one.

    Args:
        sketch: dense.
        along: the dim that it was multiplied along, its key; it is not cut.
        param: this rank's slice.
    """
    for one in placement_of(param).cuts:
        at = one.dim - 1 if along == -2 and one.dim == param.dim() - 1 else one.dim
        several = len(one.segments) > 1
        sketch = take(sketch, at, one.segments) if several else sketch.narrow(at, *one.segments[0])
    return sketch


def _of_product(left: torch.Tensor, right: torch.Tensor) -> Sketches:
    """Those of `left^T @ right`, (tokens, a) and (tokens, b), which is not made."""
    return {-1: left.t() @ (right @ _probes(right)), -2: right.t() @ (left @ _probes(left))}


def _probes(tensor: torch.Tensor) -> torch.Tensor:
    """(length of the last dim, PROBES), the same for one length."""
    return _drawn(tensor.shape[-1], tensor.dtype, tensor.device)


@functools.lru_cache(maxsize=16)
def _drawn(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with with_values():  # they outlive a simulation
        drawn = torch.randn(size, PROBES, generator=torch.Generator().manual_seed(size))
        return (drawn / max(size, 1) ** 0.5).to(device, dtype)


class Watch:
    """Sees the gradients of parameters in one forward and backward; a context around both.

    Args:
        params: by name, all with `requires_grad`.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self._params = params
        self._names = {id(param): name for name, param in params.items()}
        self._found: dict[str, Sketches] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        self._handles = [param.register_hook(self._noting(name)) for name, param in self._params.items()]
        # By the name under which modules call them; who calls them by another one has its gradient made.
        self._before: tuple[Any, Any] = F.linear, torch.addmm
        F.linear, torch.addmm = self._linear, self._addmm  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        F.linear, torch.addmm = self._before  # type: ignore[assignment]
        for handle in self._handles:
            handle.remove()

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._product(input, weight, True, lambda matrix: self._before[0](input, matrix, bias))

    def _addmm(self, input: Any, mat1: torch.Tensor, mat2: torch.Tensor, **more: Any) -> torch.Tensor:
        made = lambda matrix: self._before[1](input, mat1, matrix, **more)  # noqa: E731
        return made(mat2) if more else self._product(mat1, mat2, False, made)

    def _product(
        self, read: torch.Tensor, matrix: torch.Tensor, by_outputs: bool, made: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """What `made` makes of a matrix; where that is a parameter as it is, its gradient is seen and not made.

        Args:
            read: (…, in).
            matrix: (out, in), a layer's weight or what a layer has made of it.
            by_outputs: so it is; else (in, out).
            made: the product.
        """
        param = matrix if id(matrix) in self._names else matrix._base
        turned = param is not matrix
        if param is None or id(param) not in self._names or (turned and not _is_turned(matrix, param)):
            return made(matrix)
        if not read.requires_grad or not torch.is_grad_enabled():
            return made(matrix)  # nothing would come back
        out = made(matrix.detach())
        kept = read.detach().reshape(-1, read.shape[-1]).clone()  # it may be changed in place

        def note(gradient: torch.Tensor) -> None:
            gradient = gradient.reshape(-1, gradient.shape[-1])
            pair = (gradient, kept) if by_outputs != turned else (kept, gradient)
            self._add(self._names[id(param)], _of_product(*pair), dims_of(param))

        out.register_hook(note)
        return out.clone()  # what changes the result in place would take the hook from it

    def _noting(self, name: str) -> Any:
        without = dims_of(self._params[name])

        def note(gradient: torch.Tensor) -> torch.Tensor:
            self._add(name, sketches(gradient, without))
            return gradient.new_zeros(()).expand_as(gradient)  # so that nobody keeps it

        return note

    def _add(self, name: str, found: Sketches, without: Iterable[int] = ()) -> None:
        found = {dim: sketch for dim, sketch in found.items() if dim not in set(without)}
        known = self._found.get(name)
        self._found[name] = found if known is None else {dim: known[dim] + found[dim] for dim in known}

    def found(self) -> dict[str, Sketches | None]:
        """Of every parameter, after backward; None: it has no gradient."""
        return {name: self._found.get(name) for name in self._params}


def _is_turned(view: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether a view of a matrix is all of it, with its dims in the other order."""
    whole = view.storage_offset() == param.storage_offset() and param.dim() == view.dim() == 2
    return whole and view.shape == param.shape[::-1] and view.stride() == param.stride()[::-1]
