"""The tensor-parallel plan: which matrices are split, how, and why others are not.

The plan does not follow it: most classes have none, and those that have one leave experts, fused layouts and heads that
do not divide to layers of Transformers. Where the two differ, the plan's table says so.

Layouts are found, never told: `row` and `column` are claims that the plan is compared with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from deepspeed.errors import TensorParallelError
from deepspeed.foundation.equivalence import evaluating, example_inputs
from deepspeed.foundation.fake_mode import Replaceable, with_values
from deepspeed.foundation.log import describe_error, log_rank0
from deepspeed.foundation.transformers_model import head_counts
from deepspeed.tensor_parallel.channel_dependencies import (
    ChannelDependencies,
    ModuleInputs,
    Segments,
    share_out,
)
from deepspeed.tensor_parallel.example_inputs import all_calls, handed_states
from deepspeed.tensor_parallel.module_attributes import Numbers, fit
from deepspeed.tensor_parallel.packed_experts import fit_packed, share_packed
from deepspeed.tensor_parallel.rng import Draws
from deepspeed.tensor_parallel.trace import (
    OpTrace,
    ShardableRegion,
    around,
    block,
    by_module,
    find_regions,
    join,
    lies_in,
    owner,
)

_STYLES = {
    "colwise": "column", "packed_colwise": "column", "colwise_gather_output": "column", "rowwise": "row",
    "rowwise_split_input": "row", "packed_rowwise": "row",
}  # fmt: skip


def said_by(model: Any, matrices: Iterable[str]) -> dict[str, str]:
    """By which of its dims a model wants a matrix cut, "row" or "column", by name of its parameter.

    Args:
        model: of any kind; one that says nothing gives nothing.
        matrices: names of its parameters.
    """
    rules = getattr(model, "tp_plan", None)
    found: dict[str, str] = {}
    known = [
        (re.compile(re.escape(pattern).replace(r"\*", r"\d+")), _STYLES[style])
        for pattern, style in (rules.items() if isinstance(rules, dict) else ())
        if style in _STYLES
    ]
    for name in matrices if known else ():
        places = (name, owner(name)) if name.endswith(".weight") else (name,)
        how = next((how for pattern, how in known if any(map(pattern.fullmatch, places))), None)
        if how is not None:
            found[name] = how
    return found


SKIP = "skip"


@dataclass(frozen=True)
class Spec:
    """One entry.

    Args:
        patterns: regular expressions, searched for in names of parameters.
        how: "row", "column" or "skip".
    """

    patterns: tuple[re.Pattern[str], ...]
    how: str


class Specs:
    """All entries; the first that fits a name counts.

    Args:
        entries: in the order of the JSON.
        others: whether matrices that no entry names are cut too.
    """

    def __init__(self, entries: Sequence[Spec] = (), others: bool = True) -> None:
        self._entries, self._others = tuple(entries), others

    def _of(self, name: str) -> str:
        found = (one.how for one in self._entries if any(pattern.search(name) for pattern in one.patterns))
        return next(found, "")

    def reason_to_skip(self, region: ShardableRegion) -> str:
        """Why a region stays whole; empty: it does not."""
        said = {self._of(name) for name in [*region.columns, *region.rows]}
        if SKIP in said:
            return "partition_config says so"
        return "" if self._others or said != {""} else "partition_config names others, and use_default_specs is off"

    def check(self, cut: Mapping[str, str], whole: Mapping[str, str], matrices: Sequence[str]) -> None:
        """Compare the entries with a plan.

        Args:
            cut: "row" or "column", by name of a matrix.
            whole: why others stay whole.
            matrices: all of the model.

        Raises:
            TensorParallelError: a matrix cannot be cut as an entry wants it.
        """
        for name in matrices:
            wanted, found = self._of(name), cut.get(name, "")
            if wanted in ("", SKIP, found):
                continue
            why = f"it is cut by {found}: {_OTHER[found]}" if found else whole.get(name, "no block has a pair for it")
            raise TensorParallelError(f"partition_config wants '{name}' cut by {wanted}: {why}")
        for pattern in (pattern for one in self._entries for pattern in one.patterns):
            if not any(pattern.search(name) for name in matrices):
                log_rank0(f"partition_config: the pattern '{pattern.pattern}' is in no matrix's name")


_OTHER = {
    "row": "its inputs are channels that other matrices of its block make",
    "column": "its outputs are channels that only other matrices of its block read",
}


@dataclass
class Fitted:
    """A region, shared out, and the numbers of this rank."""

    shares: ChannelDependencies
    numbers: Numbers


Calls = dict[str, list[ModuleInputs]]
KnownRegions = dict[Any, "Fitted | str"]
probes: Replaceable[Callable[[Calls], tuple[Calls, KnownRegions]]] = Replaceable(lambda calls: (calls, {}))
"""From the calls of modules, those whose values are traced, and the regions that are known from earlier traces."""


@dataclass
class Unit:
    """A module of a block, whose regions are cut and compared together.

    Args:
        name: of the module.
        regions: with names inside it.
        calls: what it is called with on the small input: plain, and beside padding where it is given other tensors.
    """

    name: str
    regions: list[Fitted]
    calls: list[ModuleInputs]


@dataclass
class TensorParallelPlan:
    """How a model is cut.

    Args:
        ranks: that share it.
        units: in the order in which they run.
        whole: matrices of blocks that stay whole, and why.
        inputs: the small input of the model.
        output: what the dense model makes of it.
        drops: which matrices' results each module drops in training.
        shapes: of the parameters.
        said: by which dim the model itself wants matrices cut, see `said_by`.
        unpadded: why the model was not looked at beside padding, where its forward raised there.
        meets: whether its forward sends messages of its own between ranks that share it.
    """

    ranks: int
    units: list[Unit]
    whole: dict[str, str]
    inputs: dict[str, Any]
    output: Any
    drops: dict[str, list[frozenset[str]]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    unpadded: str = ""
    meets: bool = False

    def part(self) -> float:
        """Bytes of the blocks' matrices on the largest rank, over those of the dense model."""
        dense = held = 0.0
        for unit in self.units:
            for one in unit.regions:
                size = sum(
                    torch.Size(self.shapes[join(unit.name, n)]).numel()
                    for n in [*one.shares.region.columns, *one.shares.region.rows]
                )
                dense, held = dense + size, held + size * one.shares.bytes
        left = sum(torch.Size(self.shapes[name]).numel() for name in self.whole)
        return (held + left) / max(dense + left, 1)

    def held(self, rank: int) -> int:
        """Parameters that a rank has, the vocabulary whole."""
        total = sum(map(math.prod, self.shapes.values()))
        for unit in self.units:
            for one in unit.regions:
                for name, share in one.shares.tensors.items():
                    shape = self.shapes[join(unit.name, name)]
                    if share.dim >= 0 and not share.copied:
                        total -= math.prod(shape) * _left_out(share.segments[rank], shape[share.dim])
                for row in one.shares.region.rows:
                    size = sum(length for part in one.shares.rows for _, length in part)
                    total -= math.prod(self.shapes[join(unit.name, row)]) * _left_out(one.shares.rows[rank], size)
        return int(total)

    def cuts(self) -> dict[str, str]:
        """By which of its dims a matrix is cut, "row" or "column", by name."""
        found = {}
        for unit in self.units:
            for one in unit.regions:
                found |= {join(unit.name, name): "column" for name in one.shares.region.columns}
                found |= {join(unit.name, name): "row" for name in one.shares.region.rows}
        return found

    def rows(self) -> list[tuple[str, str, str]]:
        """(matrix, how it is cut, channels of each rank), one line for equal layers of several blocks."""
        found: dict[tuple[str, str, str], int] = {}
        for unit in self.units:
            for one in unit.regions:
                for key in _rows(unit.name, one.shares):
                    found[key] = found.get(key, 0) + 1
        cuts = self.cuts()
        for name, how in cuts.items():
            if self.said.get(name, how) != how:
                key = (starred(name), how, f"its model's own plan cuts it by {self.said[name]}")
                found[key] = found.get(key, 0) + 1
        for name, why in self.whole.items():
            own = f"; its model's own plan cuts it by {self.said[name]}" if name in self.said else ""
            key = (starred(name), "whole", why + own)
            found[key] = found.get(key, 0) + 1
        return [(f"{name} ({count})" if count > 1 else name, how, what) for (name, how, what), count in found.items()]

    def table(self) -> str:
        """The plan in words, a line for each kind of matrix."""
        rows = [("matrix", "cut", "channels of each rank"), *self.rows()]
        widths = [max(len(row[at]) for row in rows) for at in range(2)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        most, dense = max(map(self.held, range(self.ranks))), sum(map(math.prod, self.shapes.values()))
        head = (
            f"tensor parallelism over {self.ranks} ranks; the largest holds {self.part():.2f} of the blocks' matrices, "
            f"{most:,} of {dense:,} parameters"
        )
        return "\n".join([head, *lines])


def _left_out(segments: Segments, size: int) -> Fraction:
    """The part of a dim that a rank does not have."""
    return 1 - Fraction(sum(length for _, length in segments), size)


def starred(name: str) -> str:
    """A name with `*` in the place of each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by what they are with stars."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(starred(name), []).append(name)
    return found


def _counts(by_rank: Sequence[Segments]) -> str:
    runs = max(map(len, by_rank))
    counts = "/".join(str(sum(length for _, length in one)) for one in by_rank)
    return counts + (f" in {runs} runs" if runs > 1 else "")


def _rows(unit: str, shares: ChannelDependencies) -> list[tuple[str, str, str]]:
    made = []
    region = shares.region
    for name, share in shares.tensors.items():
        if name in region.rows:
            continue
        layers = {owner(column) for column in region.columns if not region.packed}
        how = "column" if name in region.columns or owner(name) in layers else f"dim {share.dim}"
        how = "partial" if share.dim < 0 or share.copied else how
        counts = _counts(share.segments)
        what = "copied" if share.dim < 0 else f"uses {counts}" if share.copied else counts
        made.append((starred(join(unit, name)), how, what))
    counts = _counts(shares.rows)
    made += [(starred(join(unit, name)), "row", counts) for name in region.rows]
    return made


def make_plan(
    model: nn.Module, ranks: int, rank: int, example: Any = None, specs: Specs | None = None
) -> TensorParallelPlan:
    """Find out how a dense model can be cut.

    Args:
        model: dense, whole on this rank or sharded by `zero.Init`; nothing of it is changed.
        ranks: to share its matrices out to.
        rank: this one.
        example: arguments of its forward; None: made up for a model of Transformers.
        specs: of matrices that stay whole, with all that shares their channels.

    Raises:
        ArgumentError: nothing says what the model takes.
        TensorParallelError: none of its matrices can be cut.
    """
    inputs = example_inputs(model, example)
    with OpTrace(model, inputs) as trace, evaluating(model, use_cache=False):
        model(**inputs)
    regions, whole = find_regions(model, trace.nodes)
    regions = _asked_for(regions, whole, specs)
    of_units = _units_of(regions)
    homes = list(of_units)
    calls, output, unpadded = all_calls(model, homes, inputs)
    recurrent = handed_states(model, {home: each[0] for home, each in calls.items()}, inputs)
    calls, known = probes.current(calls)
    shapes = shapes_of(model)
    modules = dict(model.named_modules())
    heads = sorted(set(head_counts(getattr(model, "config", None))))
    inside_of, units = by_module(shapes), list[Unit]()
    for home, mine in of_units.items():
        own = {name: shapes[name] for name in inside_of.get(home, ())}
        fitted = []
        for region in mine:
            inside = _inside(region, home)
            key = (
                _kind(modules[home], home, region, own),
                tuple((call.given(), _without_place(call.told())) for call in calls[home]),
                (*heads, ranks, rank),
            )
            if home in recurrent:
                known[key] = "in generation the model hands it a state of all channels"
            if key not in known:
                with with_values():
                    known[key] = _fitted(modules[home], inside, region, calls[home], heads, (ranks, rank))
            found = known[key]
            if isinstance(found, str):
                whole.update(dict.fromkeys([*region.columns, *region.rows], found))
            else:
                fitted.append(Fitted(replace(found.shares, region=inside), found.numbers))
        if fitted:
            units.append(Unit(home, fitted, calls[home]))
    if not units:
        raise _refusal(model, ranks, whole)
    drops, said = dropped_in(model, inputs), said_by(model, shapes)
    plan = TensorParallelPlan(ranks, units, whole, inputs, output, drops, shapes, said, unpadded)
    _name_others(plan, trace)
    return plan


def _refusal(model: nn.Module, ranks: int, whole: dict[str, str]) -> TensorParallelError:
    reasons = "; ".join(f"{starred(n)}: {why}" for n, why in list(whole.items())[:4])
    return TensorParallelError(
        f"{type(model).__name__} cannot be cut over {ranks} ranks: {reasons or 'no block has a pair'}"
    )


def _asked_for(regions: list[ShardableRegion], whole: dict[str, str], specs: Specs | None) -> list[ShardableRegion]:
    """Those that no entry wants whole; the others' matrices are noted."""
    skipped = {id(region): specs.reason_to_skip(region) for region in regions} if specs is not None else {}
    for region in regions:
        if why := skipped.get(id(region)):
            whole.update(dict.fromkeys([*region.columns, *region.rows], why))
    return [region for region in regions if not skipped.get(id(region))]


def _name_others(plan: TensorParallelPlan, trace: OpTrace) -> None:
    """Why those matrices of blocks stay whole that no region had, so that no figure leaves them out."""
    for name in unnamed(plan):
        node = trace.nodes.get(name)
        if node is None:
            plan.whole[name] = "no matrix product of the small input reads it"
        else:
            plan.whole[name] = "indices choose from it" if node.lookup else "it has no pair in its block"


def unnamed(plan: TensorParallelPlan) -> list[str]:
    """The matrices of blocks that a plan neither cuts nor says why not."""
    cut = {join(unit.name, name) for unit in plan.units for one in unit.regions for name in one.shares.tensors}
    cut |= {join(unit.name, name) for unit in plan.units for one in unit.regions for name in one.shares.region.rows}
    known = cut | set(plan.whole)
    return [name for name, shape in plan.shapes.items() if len(shape) > 1 and block(name) and name not in known]


def dropped_in(model: nn.Module, inputs: dict[str, Any]) -> dict[str, list[frozenset[str]]]:
    """What the model's modules drop in training."""
    training = [module for module in model.modules() if module.training]
    if not training:
        return {}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # running statistics
    draws = Draws(model, inputs)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), draws:
            model(**inputs)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    finally:
        draws.remove()
    return draws.found


def _units_of(regions: Sequence[ShardableRegion]) -> dict[str, list[ShardableRegion]]:
    """Regions by the module that is cut at once: one that lies in no other of them; packed experts are their own."""
    packed = {region.home for region in regions if region.packed}
    others = {region.home for region in regions if not region.packed}
    outermost = {home: next(one for one in around(home) if one in others) for home in others}
    found: dict[str, list[ShardableRegion]] = {}
    for region in regions:
        home = region.home if region.packed else outermost[region.home]
        if region.packed or home not in packed:
            found.setdefault(home, []).append(region)
    return found


def _inside(region: ShardableRegion, home: str) -> ShardableRegion:
    tables = [name for name in region.tables if lies_in(name, home)]
    return renamed(replace(region, tables=tables), lambda name: name.removeprefix(home).removeprefix("."))


def renamed(region: ShardableRegion, change: Callable[[str], str]) -> ShardableRegion:
    """A region under other names."""
    columns, rows, tables = (list(map(change, names)) for names in (region.columns, region.rows, region.tables))
    return ShardableRegion(change(region.home), columns, rows, set(map(change, region.inner)), tables, region.packed)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters, also of a model that `zero.Init` has sharded."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}


_PLACES = ("layer_idx", "layer_id", "layer_number", "layer_index")  # of a block among the others


def _without_place(told: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple((path, value) for path, value in told if path not in _PLACES)


def _kind(module: nn.Module, home: str, region: ShardableRegion, shapes: dict[str, tuple[int, ...]]) -> Any:
    """What regions with one way of being cut have in common; shapes are those inside `home`."""
    numbers = {k: v for k, v in vars(module).items() if type(v) in (int, str, bool) and k not in (*_PLACES, "training")}
    inside = [(name.removeprefix(home), shape) for name, shape in shapes.items()]
    foreign = [name for name in region.tables if not lies_in(name, home)]
    inner = [name.removeprefix(home) for name in [*region.columns, *region.rows]]
    return (type(module), tuple(inside), tuple(inner), tuple(sorted(numbers.items())), tuple(foreign))


def _fitted(
    module: nn.Module,
    inside: ShardableRegion,
    region: ShardableRegion,
    calls: list[ModuleInputs],
    heads: list[int],
    at: tuple[int, int],
) -> Fitted | str:
    if inside.packed:
        return _packed(module.get_submodule(inside.home), inside, calls[-1], at)
    try:
        shares = share_out(module, inside, calls, heads, at[0])
    except (RuntimeError, ValueError, TypeError) as error:
        return f"it does not run alone: {describe_error(error)}"
    if shares is None:
        return "every channel depends on every other"
    numbers = fit(module, shares, calls, at[1])
    return numbers if isinstance(numbers, str) else Fitted(shares, numbers)


def _packed(module: nn.Module, region: ShardableRegion, call: ModuleInputs, at: tuple[int, int]) -> Fitted | str:
    try:
        shares = share_packed(module, region, call, at[0])
        if isinstance(shares, str):
            return shares
        numbers = fit_packed(module, shares, call, at[1])
    except (RuntimeError, ValueError, TypeError) as error:
        return f"it does not run alone: {describe_error(error)}"
    return numbers if isinstance(numbers, str) else Fitted(shares, numbers)
