"""Gradients of parameters, seen without holding them: multiplied with random vectors as soon as they are there.

The gradients of a unit take as much memory as the unit, and writing them more time than all that is read for them. A
gradient is looked at and let go, one after the other. That of a dense linear layer is not even made: what the layer
read and what came back, a few tokens, say all of it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.foundation.simulation import with_values
from deepspeed.tensor_parallel.layers import ColumnParallel, RowParallel, is_linear, is_transposed, take
from deepspeed.zero.placement import placement_of

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
    """Sees the gradients of a module's parameters in one forward and backward; a context around both.

    Args:
        module: dense or cut; in evaluation mode.
        params: by name, all with `requires_grad`.
        slices: whether slices make their gradients, which proves their own backward; else they are seen as any layer.
    """

    def __init__(self, module: nn.Module, params: Mapping[str, nn.Parameter], slices: bool = True) -> None:
        self._params = params
        self._found: dict[str, Sketches] = {}
        self._calls: dict[int, list[tuple[torch.Tensor, torch.Tensor, bool]]] = {}  # by weight: read, given, transposed
        own = (ColumnParallel, RowParallel) if slices else ()
        layers = [m for m in module.modules() if is_linear(m) and not isinstance(m, own)]
        self._backward = False
        self._handles = [layer.register_forward_hook(self._called, prepend=True) for layer in layers]

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._calls.clear()

    def _called(self, layer: Any, args: tuple[Any, ...], output: Any) -> Any:
        if len(args) != 1 or not isinstance(output, torch.Tensor) or not output.requires_grad:
            return None
        if output.shape[-1] != layer.weight.shape[1 if is_transposed(layer) else 0]:
            return None  # of a slice: some rows of a weight that is whole, or outputs that were joined
        read = args[0].detach().reshape(-1, args[0].shape[-1]).clone()  # both of them may be changed in place
        if not self._backward:  # in which checkpoints call layers again
            self._calls.setdefault(id(layer.weight), []).append((read, output, is_transposed(layer)))
        return output.clone()

    def gradients(self, total: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        """Backward.

        Args:
            total: one number.
            inputs: leaves, by path.

        Returns:
            Gradients of the inputs. Of the parameters see `found`.
        """
        self._backward = True
        uses, nodes = _uses(total)
        used = {key: [call for call in calls if call[1].grad_fn in nodes] for key, calls in self._calls.items()}
        del nodes  # they would keep what backward lets go
        known = {key: calls for key, calls in used.items() if uses[key] == len(calls) > 0}
        asked = [p for p in self._params.values() if id(p) not in known]
        given = [output for calls in known.values() for _, output, _ in calls]
        names = {id(p): name for name, p in self._params.items()}
        self._handles += [p.register_hook(self._noting(name)) for name, p in self._params.items() if id(p) not in known]
        grads = torch.autograd.grad(total, [*inputs.values(), *given, *asked], allow_unused=True)
        back = iter(grads[len(inputs) : len(inputs) + len(given)])
        for key, calls in known.items():
            for (read, _, transposed), gradient in zip(calls, back, strict=False):
                if gradient is not None:
                    gradient = gradient.reshape(-1, gradient.shape[-1])
                    self._add(names[key], _of_product(*((read, gradient) if transposed else (gradient, read))))
        return dict(zip(inputs, grads, strict=False))

    def _noting(self, name: str) -> Any:
        without = dims_of(self._params[name])

        def note(gradient: torch.Tensor) -> torch.Tensor:
            self._add(name, sketches(gradient, without))
            return gradient.new_zeros(()).expand_as(gradient)  # so that nobody keeps it

        return note

    def _add(self, name: str, found: Sketches) -> None:
        known = self._found.setdefault(name, found)
        if known is not found:
            self._found[name] = {dim: known[dim] + found[dim] for dim in known}

    def found(self) -> dict[str, Sketches | None]:
        """Of every parameter; None: it has no gradient."""
        return {name: self._found.get(name) for name in self._params}


def _uses(total: torch.Tensor) -> tuple[Counter[int], set[Any]]:
    """How often a graph uses each leaf, by its id: a layer's weight may be read by others than the layer. Its nodes."""
    found: Counter[int] = Counter()
    waiting, seen = [total.grad_fn] if total.grad_fn is not None else [], set[Any]()
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is None:
                continue
            if hasattr(following, "variable"):
                found[id(following.variable)] += 1
            waiting.append(following)
    return found, seen
