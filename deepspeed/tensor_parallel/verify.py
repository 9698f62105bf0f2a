"""A cut unit against its dense form, forward and backward, while both are at hand."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from deepspeed.comm.collectives.autograd import summed
from deepspeed.comm.collectives.same_error import Outcome, comparison, run_collectively
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import TensorParallelError
from deepspeed.foundation.equivalence import evaluating, largest_value, relative_difference, tolerance
from deepspeed.foundation.log import log_rank0
from deepspeed.foundation.pytree import map_leaves, map_tensors, tensors_in
from deepspeed.tensor_parallel.channel_dependencies import ModuleInputs, floating, same_draws
from deepspeed.tensor_parallel.gradient_sketch import Sketches, Watch, dims_of, part_of, sketches
from deepspeed.tensor_parallel.plan import Unit
from deepspeed.zero.layout.placement import Relation, placement_of

TOLERANCE = tolerance(torch.float32)  # of units
T = TypeVar("T")


@dataclass
class UnitResult:
    """What a unit computes in one way of calling it.

    Args:
        outputs: all of them.
        inputs: gradients of the arguments, by path.
        params: sketches of the gradients of parameters, by name, see `Sketches`; None: it has no gradient.
        slices: the parameters that were this rank's already, since another unit has them too.
    """

    outputs: list[torch.Tensor]
    inputs: dict[str, torch.Tensor | None]
    params: dict[str, Sketches | None]
    slices: frozenset[str] = frozenset()

    def __getstate__(self) -> tuple[Any, ...]:
        """For other ranks, which may have no device of this name; tensors by themselves would take long to read."""
        return map_tensors(_on_host, (self.outputs, self.inputs, self.params, self.slices))  # type: ignore[no-any-return]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.outputs, self.inputs, self.params, self.slices = map_leaves(torch.from_numpy, np.ndarray, state)


def _on_host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    low = tensor.dtype in (torch.bfloat16, torch.float16)  # values are compared in fp32 at least
    return (tensor.float() if low else tensor).cpu().numpy()


def _exact(module: nn.Module) -> nn.Module:
    """The module, or a copy in fp32 of one in less: rounding could hide a mistake, or route a token elsewhere."""
    low = any(t.dtype in (torch.bfloat16, torch.float16) for t in [*module.parameters(), *module.buffers()])
    return copy.deepcopy(module).float() if low else module


def run(module: nn.Module, unit: Unit) -> list[UnitResult]:
    """Forward and backward in fp32 with fixed cotangents, without dropout, in each way in which the unit is called.

    Args:
        module: dense or cut; nothing of it is changed.
        unit: says what it is called with.
    """
    exact = _exact(module)
    found: list[UnitResult] = []
    slices = frozenset(name for name, param in module.named_parameters() if "tp" in placement_of(param).relations)
    for call in unit.calls:
        with _unchanged(exact):
            found.append(replace(_seen(exact, call), slices=slices))
    return found


def _seen(module: nn.Module, call: ModuleInputs) -> UnitResult:
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    call, _ = floating(call)
    call = call.mapped(lambda _, t: t.to(dtype) if t.is_floating_point() and dtype != torch.float32 else t)
    given: dict[str, torch.Tensor] = {}

    def leaf(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        given[path] = tensor.detach().clone().requires_grad_()
        return given[path].view_as(given[path])

    with _trainable(module) as params, Watch(params) as watch, torch.enable_grad(), same_draws():
        outputs = [t for t in tensors_in(call.mapped(leaf).run(module)) if t.is_floating_point()]
        generator = torch.Generator().manual_seed(7)
        whole = [(t * _drawn(t, generator)).sum() for t in outputs[:1] if t.requires_grad]
        total = sum(whole, torch.zeros((), device=outputs[0].device if outputs else None))
        inputs = dict.fromkeys(given)
        if total.requires_grad:
            asked = [*given.values(), *params.values()]
            inputs = dict(zip(given, torch.autograd.grad(total, asked, allow_unused=True), strict=False))
    return UnitResult([t.detach() for t in outputs], inputs, watch.found())


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """What a forward leaves in a module, such as counts, is put back: not every rank has called it as often."""
    before = [(one, dict(vars(one)), dict(one._buffers)) for one in module.modules()]
    buffers = {b: b.clone() for b in module.buffers()}
    try:
        yield
    finally:
        for one, own, of_module in before:
            for kept, values in ((vars(one), own), (one._buffers, of_module)):
                kept.clear()
                kept.update(values)
        for buffer, value in buffers.items():
            if not torch.equal(buffer, value):  # some cannot be written to: they are expanded
                buffer.copy_(value)


@contextlib.contextmanager
def _trainable(module: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """In evaluation mode, with gradients of frozen parameters too; the parameters by name."""
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


def _drawn(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=generator).to(tensor)


def differences(unit: Unit, dense: list[UnitResult], cut: list[UnitResult], module: nn.Module, axis: Axis) -> str:
    """What this rank sees of what a unit computed whole that is not what it computes cut, way by way; empty: nothing.

    All ranks of the axis call, inside `run_collectively`.
    """

    def compare() -> str:
        found = []
        for at, (wanted, ours) in enumerate(zip(dense, cut, strict=True), 1):
            way = f"in way {at} of {len(dense)} of calling it, " if len(dense) > 1 else ""
            found += [way + text for text in _differences(wanted, ours, module, axis, TOLERANCE)]
        return "; ".join(found[:3])

    return comparison.current(compare)


def judge(unit: Unit, texts: Sequence[str], cut: list[UnitResult], module: nn.Module, axis: Axis) -> None:
    """Name a unit that differs and computes something else each time. All ranks of the axis call together.

    Args:
        unit: of which some rank has seen differences.
        texts: what each rank has seen, by position.
        cut: what it computes cut.
        module: the unit's.
        axis: the ranks.

    Raises:
        TensorParallelError: it computes the same each time; on every rank, with what differs on which.
    """
    again = run_collectively(axis, lambda: _moved(cut, run(module, unit)))
    if again.ok and any(all_gather_objects(axis, again.result)):
        log_rank0(f"'{unit.name}' is not compared with its dense form: it computes something else each time")
        return
    raise _wrong(unit.name, axis, texts)


def _moved(before: list[UnitResult], again: list[UnitResult]) -> bool:
    ways = zip(before, again, strict=True)
    pairs = [pair for one, other in ways for pair in zip(one.outputs, other.outputs, strict=True)]
    return any(True for a, b in pairs for _ in _apart("", a, b, 0.0, TOLERANCE))


def finished(name: str, axis: Axis, ended: Outcome[T]) -> T:
    """What a unit's computation gave this rank.

    Raises:
        TensorParallelError: it ended otherwise on some rank; on every rank, with what that one raised.
    """
    return ended.result_or_raise(lambda texts: _wrong(name, axis, texts))


def _wrong(name: str, axis: Axis, texts: Sequence[str]) -> TensorParallelError:
    by_rank = " | ".join(f"rank {axis.ranks[at]}: {text}" for at, text in enumerate(texts) if text)
    return TensorParallelError(
        f"'{name}' cut over {axis.size} ranks (tp) does not compute what it computed whole: {by_rank}. Leave it whole: "
        f"partition_type skip in tensor_parallel.partition_config.layer_specs"
    )


def _differences(dense: UnitResult, cut: UnitResult, module: nn.Module, axis: Axis, tolerance: float) -> Iterator[str]:
    for at, (wanted, ours) in enumerate(zip(dense.outputs, cut.outputs, strict=False)):
        if at == 0 or wanted.shape == ours.shape:
            yield from _apart(f"output {at}", wanted, ours, 0.0, tolerance)
    peaks = {
        name: {along: largest_value(one) for along, one in (of or {}).items()} for name, of in dense.params.items()
    }
    largest = max((peak for of_param in peaks.values() for peak in of_param.values()), default=0.0)
    for name, wanted in dense.inputs.items():
        ours = cut.inputs.get(name)
        if wanted is not None and name in cut.inputs:
            yield from _apart(f"the gradient of {name}", wanted, ours, largest, tolerance)
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
            yield from _sketches_differ(name, wanted, ours, (largest, peaks[name]), tolerance)


def _sketches_differ(
    name: str,
    wanted: Sketches,
    ours: Sketches | None,
    sizes: tuple[float, dict[int, float]],
    tolerance: float,
) -> Iterator[str]:
    """The first way in which this rank's sketches are no parts of the dense ones."""
    if not wanted:
        yield f"{name} is cut along both of its last dims, and is not compared"
    for along, part in wanted.items():
        own = None if ours is None else ours[along]
        found = list(_apart(f"the gradient of {name}", part, own, sizes[0], tolerance, sizes[1][along]))
        if found:
            yield from found
            return


def _over_ranks(param: torch.Tensor, parts: Sketches | None, axis: Axis, label: str) -> Sketches:
    """Sketches of a sum are the sums of sketches."""
    if parts is None:  # as the others', which are exact
        parts = sketches(param.new_zeros(param.shape, dtype=torch.promote_types(param.dtype, torch.float32)))
    return {dim: summed(part, axis, label) for dim, part in parts.items()}


def _apart(
    what: str,
    wanted: torch.Tensor,
    ours: torch.Tensor | None,
    largest: float,
    tolerance: float,
    peak: float | None = None,
) -> Iterator[str]:
    if ours is None:
        if largest_value(wanted) > tolerance * largest:
            yield f"{what} is missing"
        return
    if wanted.shape != ours.shape:
        yield f"{what} has shape {tuple(ours.shape)}, and {tuple(wanted.shape)} belongs there"
        return
    if not wanted.numel():
        return
    scale = max(largest_value(wanted) if peak is None else peak, 1e-3 * largest)
    if (relative := relative_difference(ours, wanted, scale)) > tolerance:
        yield f"{what} differs by {relative:.2g} of its largest value"


def compare_models(model: nn.Module, plan: Any, axis: Axis) -> None:
    """The output of the cut model against the dense one's. All ranks of the axis call together.

    Raises:
        TensorParallelError: they differ.
    """

    def differences_of(found: list[torch.Tensor]) -> str:
        wanted = [t for t in tensors_in(_values(plan.output)) if t.is_floating_point()]
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        texts = [
            text for at, (a, b) in enumerate(zip(wanted, found, strict=False))
            for text in _apart(f"output {at}", a, b, 0.0, tolerance(dtype))
        ]  # fmt: skip
        return "; ".join(texts[:3])

    def differs() -> str:
        with evaluating(model, use_cache=False):
            found = [t for t in tensors_in(_values(model(**plan.inputs))) if t.is_floating_point()]
        return comparison.current(lambda: differences_of(found))

    ended = run_collectively(axis, differs)
    everyone = all_gather_objects(axis, ended.result) if ended.ok else ended.texts
    wrong = [f"rank {axis.ranks[at]}: {text}" for at, text in enumerate(everyone) if text]
    if wrong:
        raise TensorParallelError(
            f"the model cut over {axis.size} ranks (tp) is not the dense one: {' | '.join(wrong)}"
        ) from ended.error


def _values(output: Any) -> Any:
    return output.to_tuple() if hasattr(output, "to_tuple") else output
