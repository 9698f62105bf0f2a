"""Verification of a split unit (module) against results of its dense form, forward and backward.

Gradients are compared by sketches: products with random vectors, computed as soon as a gradient exists. Storing all
gradients of a unit would need as much memory as the unit, and more time than reading all inputs. If a linear product
reads a weight directly, the weight's gradient is never formed: the sketch comes from the two small factors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from deepspeed.comm.collectives.autograd import summed
from deepspeed.comm.collectives.same_error import Outcome, comparison, run_collectively
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import TensorParallelError
from deepspeed.foundation.equivalence import evaluating, largest_value, relative_difference, tolerance
from deepspeed.foundation.fake_mode import with_values
from deepspeed.foundation.log import log_rank0
from deepspeed.foundation.pytree import map_leaves, map_tensors, tensors_in
from deepspeed.tensor_parallel.channel_dependencies import ModuleInputs, same_draws
from deepspeed.tensor_parallel.layers import take
from deepspeed.tensor_parallel.plan import Unit
from deepspeed.zero.layout.placement import Relation, placement_of

TOLERANCE = tolerance(torch.float32)  # tolerance of unit comparisons
T = TypeVar("T")
PROBES = 4  # random vectors: a wrong row would have to be orthogonal to all of them
Sketches = dict[int, torch.Tensor]
"""Products of a gradient (…, a, b) with random vectors: key -1: along the last dim, (…, a, PROBES); key -2: along the
dim before, (…, b, PROBES); scaled to the size of the gradient's elements. A gradient with fewer dims: key 0."""


def sketches(gradient: torch.Tensor, without: Iterable[int] = ()) -> Sketches:
    """Compute the `Sketches` of a parameter's gradient, except along the dims in `without` (negative numbers)."""
    if gradient.dim() < 2:
        return {0: gradient.clone()}
    sides = {-1: gradient, -2: gradient.transpose(-1, -2)}
    return {dim: side @ probes(side) for dim, side in sides.items() if dim not in set(without)}


def dims_of(param: torch.Tensor) -> set[int]:
    """Return the split dims of a parameter, as negative numbers."""
    return {cut.dim - param.dim() for cut in placement_of(param).cuts}


def part_of(sketch: torch.Tensor, along: int, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of a dense sketch along the unsplit dim `along` (-1, -2, or 0); see `Sketches`."""
    for cut in placement_of(param).cuts:
        dim = cut.dim - 1 if along == -2 and cut.dim == param.dim() - 1 else cut.dim
        several = len(cut.segments) > 1
        sketch = take(sketch, dim, cut.segments) if several else sketch.narrow(dim, *cut.segments[0])
    return sketch


@functools.lru_cache(maxsize=16)
def _drawn(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with with_values():  # they outlive a simulation
        drawn = torch.randn(size, PROBES, generator=torch.Generator().manual_seed(size))
        return (drawn / max(size, 1) ** 0.5).to(device, dtype)


def probes(tensor: torch.Tensor) -> torch.Tensor:
    """Return fixed random vectors (size of the last dim, PROBES), equal for equal sizes."""
    return _drawn(tensor.shape[-1], tensor.dtype, tensor.device)


class Watch:
    """Context that computes the `Sketches` of gradients in one forward and backward, and drops the gradients.

    Args:
        params: parameters by name; all must have `requires_grad`.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self._params = params
        self._names = {id(param): name for name, param in params.items()}
        self._sketches: dict[str, Sketches] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        self._handles = [param.register_hook(self._noting(name)) for name, param in self._params.items()]
        # Names by which modules call linear products; calls by other names get a full gradient.
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
        product = lambda matrix: self._before[1](input, mat1, matrix, **more)  # noqa: E731
        return product(mat2) if more else self._product(mat1, mat2, False, product)

    def _product(
        self,
        read: torch.Tensor,
        matrix: torch.Tensor,
        by_outputs: bool,
        product: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Multiply (…, in) by a matrix (out, in), or (in, out) if not `by_outputs`.

        If the matrix is a parameter or its transpose, backward computes only the sketch of its gradient.
        """
        param = matrix if id(matrix) in self._names else matrix._base
        turned = param is not matrix
        if param is None or id(param) not in self._names or (turned and not self._is_turned(matrix, param)):
            return product(matrix)
        if not read.requires_grad or not torch.is_grad_enabled():
            return product(matrix)  # no gradient would arrive
        out = product(matrix.detach())
        factor = read.detach().reshape(-1, read.shape[-1]).clone()  # the input may be changed in place

        def note(gradient: torch.Tensor) -> None:
            gradient = gradient.reshape(-1, gradient.shape[-1])
            left, right = (gradient, factor) if by_outputs != turned else (factor, gradient)
            # Sketches of `left^T @ right`, (tokens, a) and (tokens, b), without forming the product.
            parts = {-1: left.t() @ (right @ probes(right)), -2: right.t() @ (left @ probes(left))}
            self._add(self._names[id(param)], parts, dims_of(param))

        out.register_hook(note)
        return out.clone()  # an in-place change of the result would lose the hook

    @staticmethod
    def _is_turned(view: torch.Tensor, param: torch.Tensor) -> bool:
        """Return whether a view is the whole transposed matrix."""
        whole = view.storage_offset() == param.storage_offset() and param.dim() == view.dim() == 2
        return whole and view.shape == param.shape[::-1] and view.stride() == param.stride()[::-1]

    def _noting(self, name: str) -> Any:
        without = dims_of(self._params[name])

        def note(gradient: torch.Tensor) -> torch.Tensor:
            self._add(name, sketches(gradient, without))
            return gradient.new_zeros(()).expand_as(gradient)  # so that no reference remains

        return note

    def _add(self, name: str, parts: Sketches, without: Iterable[int] = ()) -> None:
        parts = {dim: sketch for dim, sketch in parts.items() if dim not in set(without)}
        known = self._sketches.get(name)
        self._sketches[name] = parts if known is None else {dim: known[dim] + parts[dim] for dim in known}

    def sketches(self) -> dict[str, Sketches | None]:
        """Return the sketches of every parameter, after backward; None for those without gradient."""
        return {name: self._sketches.get(name) for name in self._params}


@dataclass
class UnitResult:
    """Results of one call of a unit (a module that is split and compared as a whole).

    Args:
        outputs: all floating-point outputs.
        inputs: gradients of the arguments, by path.
        params: sketches of the parameters' gradients, by name, see `Sketches`; None: no gradient.
        slices: names of sliced parameters; in dense results, those that another unit shares and has sliced.
    """

    outputs: list[torch.Tensor]
    inputs: dict[str, torch.Tensor | None]
    params: dict[str, Sketches | None]
    slices: frozenset[str] = frozenset()

    def __getstate__(self) -> tuple[Any, ...]:
        """Convert tensors to NumPy: other ranks may lack the device, and pickled tensors are slow to read."""
        return map_tensors(self._on_host, (self.outputs, self.inputs, self.params, self.slices))  # type: ignore[no-any-return]

    @staticmethod
    def _on_host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        low = tensor.dtype in (torch.bfloat16, torch.float16)  # values are compared in fp32 or wider
        return (tensor.float() if low else tensor).cpu().numpy()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.outputs, self.inputs, self.params, self.slices = map_leaves(torch.from_numpy, np.ndarray, state)


def run(module: nn.Module, unit: Unit) -> list[UnitResult]:
    """Run forward and backward of a unit for each recorded call: in fp32 or wider, in evaluation, with fixed seeds."""
    low = any(t.dtype in (torch.bfloat16, torch.float16) for t in [*module.parameters(), *module.buffers()])
    exact = (
        copy.deepcopy(module).float() if low else module
    )  # rounding could hide an error, or change the routing of a token
    results: list[UnitResult] = []
    slices = frozenset(name for name, param in module.named_parameters() if "tp" in placement_of(param).relations)
    for call in unit.calls:
        with _unchanged(exact):
            results.append(replace(_called(exact, call), slices=slices))
    return results


def _called(module: nn.Module, call: ModuleInputs) -> UnitResult:
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    call, _ = call.floating()
    call = call.mapped(lambda _, t: t.to(dtype) if t.is_floating_point() and dtype != torch.float32 else t)
    leaves: dict[str, torch.Tensor] = {}

    def leaf(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaves[path] = tensor.detach().clone().requires_grad_()
        return leaves[path].view_as(leaves[path])

    with _trainable(module) as params, Watch(params) as watch, torch.enable_grad(), same_draws():
        outputs = [t for t in tensors_in(call.mapped(leaf).run(module)) if t.is_floating_point()]
        generator = torch.Generator().manual_seed(7)
        inputs: dict[str, torch.Tensor | None] = dict.fromkeys(leaves)
        if outputs and outputs[0].requires_grad:
            cotangent = torch.randn(outputs[0].shape, generator=generator).to(outputs[0])
            gradients = torch.autograd.grad(
                (outputs[0] * cotangent).sum(), [*leaves.values(), *params.values()], allow_unused=True
            )
            inputs = dict(zip(leaves, gradients, strict=False))
    return UnitResult([t.detach() for t in outputs], inputs, watch.sketches())


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Context that restores attributes and buffers that a forward changes: ranks run different numbers of forwards."""
    before = [(held, dict(held)) for part in module.modules() for held in (vars(part), part._buffers)]
    buffers = {b: b.clone() for b in module.buffers()}
    try:
        yield
    finally:
        for held, entries in before:
            held.clear()
            held.update(entries)
        for buffer, value in buffers.items():
            if not torch.equal(buffer, value):  # expanded buffers cannot be written
                buffer.copy_(value)


@contextlib.contextmanager
def _trainable(module: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Context in evaluation mode with gradients for all parameters, even frozen ones; yields the parameters by name."""
    params = {n: p for n, p in module.named_parameters() if p.is_floating_point()}
    frozen = [p for p in params.values() if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        with evaluating(module):
            yield params
    finally:
        for p in frozen:
            p.requires_grad_(False)


def differences(unit: Unit, dense: list[UnitResult], cut: list[UnitResult], module: nn.Module, axis: Axis) -> str:
    """Describe the differences between a unit's dense results and those of this rank's slice `cut`; "" if none.

    All ranks of the axis must call this, inside `run_collectively`.
    """

    def compare() -> str:
        texts = []
        for number, (wanted, ours) in enumerate(zip(dense, cut, strict=True), 1):
            way = f"in way {number} of {len(dense)} of calling it, " if len(dense) > 1 else ""
            texts += [way + text for text in _differences(wanted, ours, module, axis, TOLERANCE)]
        return "; ".join(texts[:3])

    return comparison.current(compare)


def judge(unit: Unit, texts: Sequence[str], cut: list[UnitResult], module: nn.Module, axis: Axis) -> None:
    """Raise for differences, unless the unit is not deterministic (logged). All ranks of the axis must call this.

    Args:
        unit: a unit with differences on some rank.
        texts: the differences on each rank, by position.
        cut: results of the split unit.
        module: module of the unit.
        axis: the ranks.

    Raises:
        TensorParallelError: the unit is deterministic; raised on every rank, with the differences of all.
    """

    def moved() -> bool:
        ways = zip(cut, run(module, unit), strict=True)
        pairs = [pair for before, after in ways for pair in zip(before.outputs, after.outputs, strict=True)]
        return any(True for before, after in pairs for _ in _apart("", before, after, 0.0, TOLERANCE))

    again = run_collectively(axis, moved)
    if again.ok and any(all_gather_objects(axis, again.result)):
        log_rank0(f"'{unit.name}' is not compared with its dense form: it computes something else each time")
        return
    raise _wrong(unit.name, axis, texts)


def finished(name: str, axis: Axis, ended: Outcome[T]) -> T:
    """Return the result of a unit's computation that has `ended`, or raise TensorParallelError if any rank failed."""
    return ended.result_or_raise(lambda texts: _wrong(name, axis, texts))


def _wrong(name: str, axis: Axis, texts: Sequence[str]) -> TensorParallelError:
    by_rank = " | ".join(f"rank {rank}: {text}" for rank, text in zip(axis.ranks, texts, strict=True) if text)
    return TensorParallelError(
        f"'{name}' split over {axis.size} ranks (tp) gives other results than its dense form: {by_rank}. Leave it "
        f"whole: partition_type skip in tensor_parallel.partition_config.layer_specs"
    )


def _differences(dense: UnitResult, cut: UnitResult, module: nn.Module, axis: Axis, limit: float) -> Iterator[str]:
    for index, (wanted, ours) in enumerate(zip(dense.outputs, cut.outputs, strict=False)):
        if index == 0 or wanted.shape == ours.shape:
            yield from _apart(f"output {index}", wanted, ours, 0.0, limit)
    peaks = {
        name: {dim: largest_value(sketch) for dim, sketch in (by_dim or {}).items()}
        for name, by_dim in dense.params.items()
    }
    largest = max((peak for of_param in peaks.values() for peak in of_param.values()), default=0.0)
    for name, wanted in dense.inputs.items():
        ours = cut.inputs.get(name)
        if wanted is not None and name in cut.inputs:
            yield from _apart(f"the gradient of {name}", wanted, ours, largest, limit)
    params = dict(module.named_parameters())
    for name, wanted in dense.params.items():
        ours, placed = cut.params[name], placement_of(params[name])
        known = name in dense.slices
        if placed.relations.get("tp") is Relation.PARTIAL and not known:
            ours = _over_ranks(params[name], ours, axis, f"check of {name}")
        if wanted is not None:
            wanted = {dim: sketch for dim, sketch in wanted.items() if dim not in dims_of(params[name])}
            if not known:
                wanted = {dim: part_of(sketch, dim, params[name]) for dim, sketch in wanted.items()}
            yield from _sketches_differ(name, wanted, ours, (largest, peaks[name]), limit)


def _sketches_differ(
    name: str,
    wanted: Sketches,
    ours: Sketches | None,
    sizes: tuple[float, dict[int, float]],
    limit: float,
) -> Iterator[str]:
    """Yield the first difference between this rank's sketches and its parts of the dense sketches."""
    if not wanted:
        yield f"{name} is split along both of its last dims, and is not compared"
    for along, part in wanted.items():
        own = None if ours is None else ours[along]
        texts = list(_apart(f"the gradient of {name}", part, own, sizes[0], limit, sizes[1][along]))
        if texts:
            yield from texts
            return


def _over_ranks(param: torch.Tensor, parts: Sketches | None, axis: Axis, label: str) -> Sketches:
    """Sum the sketches of a parameter's gradient over ranks; None: this rank has no gradient, and adds zeros."""
    if parts is None:  # zeros, in the precision of the others
        parts = sketches(param.new_zeros(param.shape, dtype=torch.promote_types(param.dtype, torch.float32)))
    return {dim: summed(part, axis, label) for dim, part in parts.items()}


def _apart(
    what: str,
    wanted: torch.Tensor,
    ours: torch.Tensor | None,
    largest: float,
    limit: float,
    peak: float | None = None,
) -> Iterator[str]:
    if ours is None:
        if largest_value(wanted) > limit * largest:
            yield f"{what} is missing"
        return
    if wanted.shape != ours.shape:
        yield f"{what} has shape {tuple(ours.shape)}, and {tuple(wanted.shape)} belongs there"
        return
    if not wanted.numel():
        return
    scale = max(largest_value(wanted) if peak is None else peak, 1e-3 * largest)
    if (relative := relative_difference(ours, wanted, scale)) > limit:
        yield f"{what} differs by {relative:.2g} of its largest value"


def compare_models(model: nn.Module, plan: Any, axis: Axis) -> None:
    """Compare a split model's output with that of the dense model in its plan. All ranks of the axis must call this.

    Raises:
        TensorParallelError: the outputs differ, or a rank failed.
    """

    def differences_of(outputs: list[torch.Tensor]) -> str:
        wanted = [t for t in tensors_in(plan.output) if t.is_floating_point()]
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        texts = [
            text for index, (a, b) in enumerate(zip(wanted, outputs, strict=False))
            for text in _apart(f"output {index}", a, b, 0.0, tolerance(dtype))
        ]  # fmt: skip
        return "; ".join(texts[:3])

    def differs() -> str:
        with evaluating(model, use_cache=False):
            outputs = [t for t in tensors_in(model(**plan.inputs)) if t.is_floating_point()]
        return comparison.current(lambda: differences_of(outputs))

    ended = run_collectively(axis, differs)
    everyone = all_gather_objects(axis, ended.result) if ended.ok else ended.texts
    wrong = [f"rank {rank}: {text}" for rank, text in zip(axis.ranks, everyone, strict=True) if text]
    if wrong:
        raise TensorParallelError(
            f"the model split over {axis.size} ranks (tp) is not the dense one: {' | '.join(wrong)}"
        ) from ended.error
