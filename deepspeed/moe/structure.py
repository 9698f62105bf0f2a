"""Search for modules of experts by their structure, and a test on random tokens that they can be divided.

Experts are stacked along dim 0 of parameters ("packed"), or each is a child module ("expert_3" or "3"). A parameter
that is neither is shared by all experts and stays whole; its gradient is summed over ranks like other gradients.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from deepspeed.errors import ExpertParallelError
from deepspeed.foundation.equivalence import largest_value, relative_difference, tolerance
from deepspeed.foundation.fake_mode import Replaceable
from deepspeed.foundation.log import describe_error, log_rank0
from deepspeed.moe.calls import FORMS, Blocks, CallForm, Choices, read_call, signature_of
from deepspeed.moe.experts import Experts, sum_rows
from deepspeed.moe.packed_layout import ALL_ZERO, NO_MATRICES, PackedLayout, recognize
from deepspeed.moe.packed_products import MULTIPLE
from deepspeed.tensor_parallel.packed_experts import PackedParallel

comparison: Replaceable[Callable[[torch.Tensor, torch.Tensor], float]] = Replaceable(relative_difference)


@dataclass(frozen=True)
class ExpertStructure:
    """Layout of the experts of a module.

    Args:
        groups: number of experts of each kind (LongCat: experts and identities); each kind is divided among all ranks.
        packed: names of the parameters that stack the experts, or those of the first kind, along dim 0.
        children: names of the child modules that are experts, in order; empty if the experts are packed.
        forms: candidate forms of calls; exactly one after `tried`.
        width: last dim of a result; 0 before `tried`.
        layout: how `packed_products` computes the experts; None if the module's own forward does, and before `tried`.
    """

    groups: tuple[int, ...]
    packed: tuple[str, ...]
    children: tuple[str, ...]
    forms: tuple[CallForm, ...]
    width: int = 0
    layout: PackedLayout | None = None

    @property
    def count(self) -> int:
        """Number of experts."""
        return sum(self.groups)

    def segments(self, size: int, ep: int, part: int) -> list[tuple[int, int]]:
        """Return the (start, length) segments of share `part` of `ep` in dim 0 (`size`) of a packed parameter."""
        groups = self.groups if size % self.count == 0 else self.groups[:1]
        each = size // sum(groups)  # elements that belong to one expert
        starts = (0, *accumulate(groups))
        shares = [group // ep for group in groups]
        return [((starts[group] + part * share) * each, share * each) for group, share in enumerate(shares)]

    def places(self, ep: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each expert's share, below `ep` (E,), and its index in the share (E,); children keep their index."""
        shares = [group // ep for group in self.groups]
        parts = [torch.arange(ep).repeat_interleave(share) for share in shares]
        starts = (0, *accumulate(shares))
        numbers = [torch.arange(share).repeat(ep) + starts[group] for group, share in enumerate(shares)]
        local = torch.arange(self.count) if self.children else torch.cat(numbers)
        return torch.cat(parts), local

    def local_count(self, ep: int) -> int:
        """Return the number of experts in a forward of one of `ep` ranks: its share, or all if experts are children."""
        return self.count if self.children else self.count // ep


class RemoteExpert(nn.Module):
    """Placeholder for an expert on another rank; a call raises ExpertParallelError."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ExpertParallelError("an expert was called that another rank has: its module calls all experts")

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load nothing: accept the expert's tensors in the state dict of a whole layer."""


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertStructure]]:
    """Yield (name, module, structure with candidate forms) of modules of experts, without those of `MoE` layers."""
    skipped = ""
    for name, module in model.named_modules():
        if isinstance(module, Experts):  # of the explicit layer, which divides them itself
            skipped = name + "."
        if isinstance(module, Experts) or skipped and name.startswith(skipped):
            continue
        names = list(signature_of(type(module)).parameters)[1:]
        forms = tuple(form for form in FORMS if form.fits(names))
        structure = structure_of(module) if forms else None
        if structure is None:
            continue
        packed = [param for key, param in module.named_parameters() if key in structure.packed]
        sure = structure.count in _counts_of(module) and packed and all(param.dim() == 3 for param in packed)
        if len(names) < 3 and not sure:  # such signatures say little
            continue
        yield name, module, replace(structure, forms=forms)


def structure_of(module: nn.Module) -> ExpertStructure | None:
    """Return the layout of a module's experts, without forms of calls; None if it has no experts."""
    counts = _counts_of(module)
    params = dict(module.named_parameters())
    children = [(int(number[1]), key) for key in module._modules if (number := re.search(r"(\d+)$", key))]
    if len(children) in counts and [number for number, _ in sorted(children)] == list(range(len(children))):
        return ExpertStructure((len(children),), (), tuple(key for _, key in sorted(children)), ())
    sizes = sorted({param.shape[0] for param in params.values() if param.dim() == 3})
    if len(sizes) == 2 and {*sizes, sizes[1] - sizes[0]} <= set(counts):
        packed = tuple(key for key, param in params.items() if param.shape[0] in sizes)
        return ExpertStructure((sizes[0], sizes[1] - sizes[0]), packed, (), ())
    for count in [*counts, *sizes[:1]]:
        packed = tuple(key for key, param in params.items() if _holds(param, count, bool(sizes)))
        of_3 = {key for key, param in params.items() if param.dim() == 3}
        if packed and of_3 <= set(packed):
            return ExpertStructure((count,), packed, (), ())
    return None


def _counts_of(module: nn.Module) -> list[int]:
    """Return the integers above 1 among a module's attributes with "expert" in the name."""
    return [v for k, v in vars(module).items() if type(v) is int and v > 1 and "expert" in k]


def _holds(param: torch.Tensor, count: int, with_3: bool) -> bool:
    if param.dim() == 2 and not with_3:  # (E F, H)
        return param.shape[0] % count == 0
    return param.dim() > 0 and param.shape[0] == count


@contextlib.contextmanager
def counting(module: nn.Module, structure: ExpertStructure, ep: int) -> Generator[None]:
    """Context in which a module's attributes that count experts (`_counts_of`) have the counts of one of `ep` ranks."""
    counts = {group: group // ep for group in (*structure.groups, structure.count) if not structure.children}
    before = {k: v for k, v in vars(module).items() if type(v) is int and v in counts and "expert" in k}
    vars(module).update({name: counts[value] for name, value in before.items()})
    try:
        yield
    finally:
        vars(module).update(before)


def run_pairs(
    structure: ExpertStructure,
    forward: Callable[..., Any],
    rows: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    ep: int,
) -> torch.Tensor:
    """Run this rank's experts on the rows that have chosen them.

    Args:
        structure: structure of the module, with one form.
        forward: forward of the module.
        rows: (R, H) rows that have each chosen at least one expert of this rank.
        index: (R, k) local indices of the chosen experts; -1 for experts of other ranks.
        weights: (R, k) weights of the chosen experts.
        ep: number of ranks among which the experts are divided.

    Returns:
        (R, H') weighted sums over the experts of this rank.
    """
    row, choice = (index >= 0).nonzero(as_tuple=True)
    pairs, count = row.numel(), structure.local_count(ep)
    expert_of, weight_of = index[row, choice], weights[row, choice]
    more = _padding(expert_of, count) if rows.device.type == "cpu" else row[:0]
    once = pairs == rows.shape[0] and not len(more)  # each row is taken once, in order
    if len(more):  # by rows of the same expert: other rows may overflow in it
        first = row.new_full((count,), rows.shape[0]).scatter_reduce(0, expert_of, row, "amin")
        source = torch.cat([row, first[more]])
        expert_of, weight_of = torch.cat([expert_of, more]), torch.cat([weight_of, weights.new_zeros(len(more))])
    else:
        source = row
    taken = rows if once else rows.index_select(0, source)
    out = structure.forms[0].run(forward, taken, expert_of, weight_of, count)[:pairs]
    return out if pairs == rows.shape[0] else sum_rows(out, row, rows.shape[0])


def _padding(index: torch.Tensor, count: int) -> torch.Tensor:
    """Return the experts of the rows of weight 0 to add, so that each expert with rows has a multiple of `MULTIPLE`."""
    sizes = torch.bincount(index, minlength=count)
    return torch.arange(count).repeat_interleave(-sizes % MULTIPLE)


def tried(module: nn.Module, structure: ExpertStructure, ep: int) -> tuple[ExpertStructure, str]:
    """Find the form of calls in which the results of `ep` shares add up to the whole module's, on random tokens.

    Returns:
        The structure with this form and "", or the unchanged structure and the reason why there is none.
    """
    reason = _unlike(module, structure)
    if reason:
        return structure, reason
    training = [inner for inner in module.modules() if inner.training]
    for inner in training:
        inner.training = False
    try:
        for form in structure.forms:
            attempt = replace(structure, forms=(form,))
            width, why = _difference(module, attempt, ep)
            if not why:
                return replace(attempt, width=width, layout=_layout(module, attempt)), ""
            reason = reason or why
    finally:
        for inner in training:
            inner.training = True
    return structure, reason


def _layout(module: nn.Module, structure: ExpertStructure) -> PackedLayout | None:
    """Return how `packed_products` can compute the experts of a module; None if it cannot."""
    form, count = structure.forms[0], structure.count
    if type(form) is not Choices or structure.children or isinstance(module, PackedParallel):
        return None
    params = {name: param.detach() for name, param in module.named_parameters()}

    def run(
        params: dict[str, torch.Tensor], rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        def forward(*args: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(module, params, args)

        return form.run(forward, rows, index, weights, count)

    layout, reason = recognize(module, run, params, comparison.current)
    if reason == ALL_ZERO:
        layout, reason = recognize(module, run, _drawn(params), comparison.current)
    if reason and reason != NO_MATRICES:
        log_rank0(f"experts ({type(module).__name__}) run through their own forward: {reason}")
    return layout


def _unlike(module: nn.Module, structure: ExpertStructure) -> str:
    """Return why a module cannot be divided, as far as can be seen without running the module; "" if it can."""
    if "forward" in vars(module):
        return "its forward was replaced on the object: replace it on the class, or after deepspeed.initialize"
    experts = [module.get_submodule(name) for name in structure.children]
    if len({tuple(sorted((key, param.shape) for key, param in expert.named_parameters())) for expert in experts}) > 1:
        return "its experts have parameters of different shapes"
    for key, buffer in module.named_buffers():
        if key.partition(".")[0] in structure.children or structure.count in buffer.shape[:1]:
            return f"its experts have a buffer, '{key}', and buffers are equal on all ranks"
    return ""


def _difference(module: nn.Module, structure: ExpertStructure, ep: int) -> tuple[int, str]:
    """Return the last dim of a result, and the reason why the module cannot be divided; "" if it can."""
    form, first = structure.forms[0], next(module.parameters())
    params = {name: param.detach() for name, param in module.named_parameters()}
    widths = dict.fromkeys(dim for param in module.parameters() for dim in reversed(param.shape[1:]))
    reason = "its forward fails on random tokens"
    for width in widths:
        arguments = form.example(structure.count, width, first)
        try:
            with torch.no_grad():
                total, whole = _both(module, structure, params, arguments, ep)
                if not largest_value(whole):  # of parameters that are 0: any parts would add up
                    total, whole = _both(module, structure, _drawn(params), arguments, ep)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as why:
            reason = describe_error(why)
            continue
        gap = comparison.current(total, whole)
        if gap > tolerance(first.dtype):
            return 0, f"the results of {ep} parts differ from the whole by {gap:.1g}"
        return total.shape[-1], _of_zeros(module, arguments[0]) if isinstance(form, Blocks) else ""
    return 0, reason


def _both(
    module: nn.Module, structure: ExpertStructure, params: dict[str, torch.Tensor], arguments: list[Any], ep: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the shares' results, and the result of the whole module."""
    parts = [_part(module, structure, params, arguments, ep, part) for part in range(ep)]
    total = torch.stack(parts).sum(0)
    return total, torch.func.functional_call(module, params, tuple(arguments)).reshape(total.shape)


def _drawn(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(param.shape, generator=generator).to(param) if param.is_floating_point() else param
        for name, param in params.items()
    }


def _of_zeros(module: nn.Module, rows: torch.Tensor) -> str:
    """Return the reason why rows of zeros cannot be skipped; "" if their gradients are 0."""
    with torch.enable_grad():
        rows = rows.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(module(rows).square().sum() + module(rows).sum(), rows)
    zeros = rows.detach().eq(0).all(1)
    return "rows of zeros have gradients" if gradient[zeros].ne(0).any() else ""


def _part(
    module: nn.Module,
    structure: ExpertStructure,
    whole: dict[str, torch.Tensor],
    arguments: list[Any],
    ep: int,
    part: int,
) -> torch.Tensor:
    """Compute the result of share `part` of `ep`, from the parameters of the whole module."""
    call = read_call(structure.forms[0], arguments, structure.count, type(module).__name__)
    params = dict(whole)
    for name in structure.packed:
        pieces = [params[name].narrow(0, *segment) for segment in structure.segments(params[name].shape[0], ep, part)]
        params[name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    owner, local = (places.to(call.index.device) for places in structure.places(ep))
    here = (call.index >= 0) & (owner[call.index] == part)
    rows, index = here.any(1), torch.where(here, local[call.index], -1)

    def forward(*args: Any) -> torch.Tensor:
        return torch.func.functional_call(module, params, args)

    gone = [name for expert, name in enumerate(structure.children) if owner[expert] != part]
    with counting(module, structure, ep), _without(module, gone):
        if gone:
            params = {key: param for key, param in params.items() if key.partition(".")[0] not in gone}
        out = run_pairs(structure, forward, call.rows[rows], index[rows], call.weights[rows], ep)
    every = out.new_zeros(call.rows.shape[0], out.shape[-1])
    every[rows] = out
    return call.result(every).flatten(0, -2)


@contextlib.contextmanager
def _without(module: nn.Module, gone: list[str]) -> Generator[None]:
    before = {name: module._modules[name] for name in gone}
    module._modules.update(dict.fromkeys(gone, RemoteExpert()))
    try:
        yield
    finally:
        module._modules.update(before)
