"""Tensor-parallel plan: the split of each matrix, or the reason why it stays whole.

The split comes from a search or a plan file. Entries `row` and `column` of `partition_config` are assertions about the
split. A plan that the model declares (`tp_plan` of Transformers) is not used, because most classes declare none,
and others leave experts, fused layouts and uneven heads to layers of Transformers. The table of the plan shows where
the declared plan differs.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import TensorParallelError
from deepspeed.foundation.equivalence import evaluating, example_inputs
from deepspeed.foundation.fake_mode import Replaceable, with_values
from deepspeed.foundation.log import describe_error, log_rank0
from deepspeed.foundation.transformers_model import head_counts
from deepspeed.tensor_parallel.attention import attention_regions, share_heads
from deepspeed.tensor_parallel.channel_dependencies import (
    ChannelDependencies,
    ModuleInputs,
    Segments,
    length_of,
    share_out,
)
from deepspeed.tensor_parallel.example_inputs import all_calls, handed_states
from deepspeed.tensor_parallel.layers import starred
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


def declared_cuts(model: Any, matrices: Iterable[str]) -> dict[str, str]:
    """Return the split ("row" or "column") of the named matrices in the model's own `tp_plan`; empty without one."""
    rules = getattr(model, "tp_plan", None)
    styles: dict[str, str] = {}
    known = [
        (re.compile(re.escape(pattern).replace(r"\*", r"\d+")), _STYLES[style])
        for pattern, style in (rules.items() if isinstance(rules, dict) else ())
        if style in _STYLES
    ]
    for name in matrices if known else ():
        places = (name, owner(name)) if name.endswith(".weight") else (name,)
        how = next((how for pattern, how in known if any(map(pattern.fullmatch, places))), None)
        if how is not None:
            styles[name] = how
    return styles


SKIP = "skip"


@dataclass(frozen=True)
class Spec:
    """Rule `how` ("row", "column" or "skip") for all parameters with a name that contains one of the patterns."""

    patterns: tuple[re.Pattern[str], ...]
    how: str


class Specs:
    """Rules of `tensor_parallel.partition_config`; the first rule that matches a parameter name applies.

    Args:
        entries: the rules, in the order of the JSON.
        others: whether matrices without a rule are split too.
    """

    def __init__(self, entries: Sequence[Spec] = (), others: bool = True) -> None:
        self._entries, self._others = tuple(entries), others

    def _of(self, name: str) -> str:
        entries = (spec for spec in self._entries if any(pattern.search(name) for pattern in spec.patterns))
        return next((spec.how for spec in entries), "")

    def reason_to_skip(self, region: ShardableRegion) -> str:
        """Return the reason why a region stays whole; "" if it is split."""
        entries = {self._of(name) for name in region.matrices()}
        if SKIP in entries:
            return "partition_config says so"
        return "" if self._others or entries != {""} else "partition_config names others, and use_default_specs is off"

    def without_skipped(self, regions: Iterable[ShardableRegion], whole: dict[str, str]) -> list[ShardableRegion]:
        """Return the regions to split; the matrices of skipped regions are added to `whole`."""
        cut: list[ShardableRegion] = []
        for region in regions:
            if why := self.reason_to_skip(region):
                whole.update(dict.fromkeys(region.matrices(), why))
            else:
                cut.append(region)
        return cut

    def check(self, cut: Mapping[str, str], whole: Mapping[str, str], matrices: Sequence[str]) -> None:
        """Compare the rules with a plan, and log patterns without a match.

        Args:
            cut: "row" or "column" by name of each split matrix.
            whole: reasons by name of the other matrices.
            matrices: names of all matrices.

        Raises:
            TensorParallelError: a rule asks for another split than the plan's.
        """
        for name in matrices:
            wanted, planned = self._of(name), cut.get(name, "")
            if wanted in ("", SKIP, planned):
                continue
            why = (
                f"it is split by {planned}: {_OTHER[planned]}"
                if planned
                else whole.get(name, "no block has a pair for it")
            )
            raise TensorParallelError(f"partition_config wants '{name}' split by {wanted}: {why}")
        for pattern in (pattern for spec in self._entries for pattern in spec.patterns):
            if not any(pattern.search(name) for name in matrices):
                log_rank0(f"partition_config: the pattern '{pattern.pattern}' is in no matrix's name")


_OTHER = {
    "row": "its inputs are channels that other matrices of its block make",
    "column": "its outputs are channels that only other matrices of its block read",
}


@dataclass
class Fitted:
    """Sharding of a region, and the integer attributes to set on this rank (`module_attributes`)."""

    shares: ChannelDependencies
    numbers: Numbers

    def digest(self) -> int:
        """Return a checksum of everything that must be equal on all ranks; attribute values are excluded."""
        shares, region = self.shares, self.shares.region
        tensors, inputs = (
            sorted((t.name, t.dim, t.segments, t.copied) for t in by_name.values())
            for by_name in (shares.tensors, shares.inputs)
        )
        layers = (region.home, region.columns, region.rows, sorted(region.inner), region.tables, region.packed)
        layers = (*layers, region.heads)
        return zlib.crc32(repr((layers, shares.rows, tensors, inputs, sorted(shares.partial_inputs))).encode())


Calls = dict[str, list[ModuleInputs]]
KnownRegions = dict[Any, "Fitted | str"]
probes: Replaceable[Callable[[Calls], tuple[Calls, KnownRegions]]] = Replaceable(lambda calls: (calls, {}))
"""Selects the module calls to trace, and returns the regions already known from earlier traces."""


@dataclass
class Unit:
    """Module inside a block, with regions that are split and compared together.

    Args:
        name: name of the module.
        regions: shardings of the regions, with names relative to the module.
        calls: recorded calls on the example input: without padding, and with padding if shapes or constants differ.
    """

    name: str
    regions: list[Fitted]
    calls: list[ModuleInputs]

    def key(self, fitted: Fitted) -> str:
        """Return a key for one of the unit's regions, unique in the model: the full name of its first row matrix."""
        return join(self.name, fitted.shares.region.rows[0])

    def keep_common_calls(self, everyone: Sequence[list[Any]], axis: Axis) -> None:
        """Keep the first calls as far as all ranks' are equal; `everyone` has the shapes of the calls, by rank.

        Raises:
            TensorParallelError: the first calls of the ranks differ.
        """
        count = min(map(len, everyone))
        while count and any(calls[:count] != everyone[0][:count] for calls in everyone):
            count -= 1
        if not count:
            other = next((pos for pos, calls in enumerate(everyone) if calls[:1] != everyone[0][:1]), 0)
            raise TensorParallelError(
                f"ranks {axis.ranks[0]} and {axis.ranks[other]} (tp) call '{self.name}' on the small input with "
                f"different tensors: {everyone[0][0]} and {everyone[other][0]}; give all of them one example"
            )
        if any(len(calls) > count for calls in everyone):
            log_rank0(
                f"'{self.name}' is compared in {count} of its ways of being called: not every rank has seen the others"
            )
        self.calls = self.calls[:count]


@dataclass
class TensorParallelPlan:
    """Split of a model's matrices on one rank, with the reason for each matrix that stays whole.

    Args:
        ranks: number of tensor-parallel ranks.
        units: modules to split.
        whole: reasons why matrices of blocks stay whole, by parameter name.
        inputs: arguments of the model's forward in the traces.
        output: output of the dense model for `inputs`; None once the model is split.
        drops: names of the matrices that produce the activations that a module drops (dropout): one set for each
            dropout, by module name.
        shapes: shapes of all parameters of the dense model, by name.
        declared: the split in the model's own plan, see `declared_cuts`.
        unpadded: error of the model's forward with padding; "": it did not raise.
        meets: whether the model's forward itself communicates between the tp ranks.
    """

    ranks: int
    units: list[Unit]
    whole: dict[str, str]
    inputs: dict[str, Any]
    output: Any
    drops: dict[str, list[frozenset[str]]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    declared: dict[str, str] = field(default_factory=dict)
    unpadded: str = ""
    meets: bool = False

    def _regions(self) -> Iterator[tuple[str, ChannelDependencies]]:
        """Yield the unit's name and the sharding of each region."""
        return ((unit.name, fitted.shares) for unit in self.units for fitted in unit.regions)

    def keep_common_regions(self, everyone: Sequence[dict[str, int]]) -> None:
        """Remove regions that some rank leaves whole; `everyone` has each rank's checksums by `Unit.key`.

        Raises:
            TensorParallelError: ranks would split a region in different ways.
        """
        for unit in self.units:
            for fitted in list(unit.regions):
                key = unit.key(fitted)
                digests = {regions.get(key) for regions in everyone}
                if None in digests:
                    unit.regions.remove(fitted)
                    for name in fitted.shares.region.matrices():
                        self.whole.setdefault(join(unit.name, name), "another rank's plan leaves it whole")
                elif len(digests) > 1:
                    raise TensorParallelError(f"'{key}': the tp ranks would split it in different ways")
        self.units = [unit for unit in self.units if unit.regions]

    def part(self) -> float:
        """Return the size of the blocks' matrices on the largest rank, as a fraction of the dense model's."""
        dense = held = 0.0
        for unit, shares in self._regions():
            size = sum(math.prod(self.shapes[join(unit, name)]) for name in shares.region.matrices())
            dense, held = dense + size, held + size * shares.bytes
        left = sum(math.prod(self.shapes[name]) for name in self.whole)
        return (held + left) / max(dense + left, 1)

    def held(self, rank: int) -> int:
        """Return the number of parameter elements on a rank; embedding and output projection are counted whole."""
        total = sum(map(math.prod, self.shapes.values()))
        for unit, shares in self._regions():
            for name, share in shares.tensors.items():
                shape = self.shapes[join(unit, name)]
                if share.dim >= 0 and not share.copied:
                    total -= math.prod(shape) * (1 - Fraction(length_of(share.segments[rank]), shape[share.dim]))
            left_out = 1 - Fraction(length_of(shares.rows[rank]), sum(map(length_of, shares.rows)))
            total -= sum(math.prod(self.shapes[join(unit, row)]) for row in shares.region.rows) * left_out
        return int(total)

    def cuts(self) -> dict[str, str]:
        """Return the split of each matrix, "row" or "column", by name."""
        cuts = {}
        for unit, shares in self._regions():
            cuts |= {join(unit, name): "column" for name in shares.region.columns}
            cuts |= {join(unit, name): "row" for name in shares.region.rows}
        return cuts

    def unnamed(self) -> list[str]:
        """Return the block matrices that are neither split nor have a reason to stay whole."""
        known = set(self.whole)
        for unit, shares in self._regions():
            known |= {join(unit, name) for name in [*shares.tensors, *shares.region.rows]}
        return [name for name, shape in self.shapes.items() if len(shape) > 1 and block(name) and name not in known]

    def rows(self) -> list[tuple[str, str, str]]:
        """Return rows (matrix, split, channels by rank or reason); equal layers of several blocks share one row."""
        rows: Counter[tuple[str, str, str]] = Counter()
        for unit, shares in self._regions():
            rows.update(self._rows_of(unit, shares))
        for name, how in self.cuts().items():
            if self.declared.get(name, how) != how:
                rows[starred(name), how, f"its model's own plan splits it by {self.declared[name]}"] += 1
        for name, why in self.whole.items():
            own = f"; its model's own plan splits it by {self.declared[name]}" if name in self.declared else ""
            rows[starred(name), "whole", why + own] += 1
        return [(f"{name} ({count})" if count > 1 else name, how, what) for (name, how, what), count in rows.items()]

    @staticmethod
    def _rows_of(unit: str, shares: ChannelDependencies) -> list[tuple[str, str, str]]:
        rows, region = [], shares.region
        layers = {owner(column) for column in region.columns if not region.packed}
        for name, share in shares.tensors.items():
            if name in region.rows:
                continue
            how = "column" if name in region.columns or owner(name) in layers else f"dim {share.dim}"
            how = "partial" if share.dim < 0 or share.copied else how
            counts = channel_counts(share.segments)
            what = "copied" if share.dim < 0 else f"uses {counts}" if share.copied else counts
            rows.append((starred(join(unit, name)), how, what))
        return [*rows, *((starred(join(unit, name)), "row", channel_counts(shares.rows)) for name in region.rows)]

    def table(self) -> str:
        """Return the plan as a text table, with a line for each kind of matrix."""
        rows = [("matrix", "split", "channels of each rank"), *self.rows()]
        widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:2]]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        most, dense = max(map(self.held, range(self.ranks))), sum(map(math.prod, self.shapes.values()))
        head = (
            f"tensor parallelism over {self.ranks} ranks; the largest holds {self.part():.2f} of the blocks' matrices, "
            f"{most:,} of {dense:,} parameters"
        )
        return "\n".join([head, *lines])


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names by the pattern that `starred` returns for them."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(starred(name), []).append(name)
    return groups


def channel_counts(by_rank: Sequence[Segments]) -> str:
    """Describe the numbers of channels by rank, such as "8/8", and the number of segments per rank if several."""
    runs = max(map(len, by_rank))
    counts = "/".join(str(length_of(segments)) for segments in by_rank)
    return counts + (f" in {runs} runs" if runs > 1 else "")


def make_plan(
    model: nn.Module, ranks: int, rank: int, example: Any = None, specs: Specs | None = None
) -> TensorParallelPlan:
    """Find the plan of one rank for a dense model, by runs on a small input.

    Args:
        model: dense, whole on this rank or sharded by `zero.Init`; not changed.
        ranks: number of tensor-parallel ranks.
        rank: position of the plan's rank, from 0.
        example: arguments of its forward (dict, tensor or tuple); None: generated for a model of Transformers.
        specs: rules; a skipped matrix stays whole, together with all matrices that share its channels. None: no rules.

    Raises:
        ArgumentError: the model's inputs are unknown and no example is given.
        TensorParallelError: no matrix can be split.
    """
    inputs = example_inputs(model, example)
    with OpTrace(model, inputs) as trace, evaluating(model, use_cache=False):
        model(**inputs)
    regions, whole = find_regions(model, trace.nodes)
    regions += attention_regions(dict(model.named_modules()), trace.nodes)
    if specs is not None:
        regions = specs.without_skipped(regions, whole)
    of_units = _units_of(regions)
    calls, output, unpadded = all_calls(model, of_units, inputs)
    recurrent = handed_states(model, {home: each[0] for home, each in calls.items()}, inputs)
    calls, known = probes.current(calls)
    shapes, modules = shapes_of(model), dict(model.named_modules())
    heads = sorted(set(head_counts(getattr(model, "config", None))))
    inside_of, units = by_module(shapes), list[Unit]()
    for home, members in of_units.items():
        own, regions_of_unit = {name: shapes[name] for name in inside_of.get(home, ())}, list[Fitted]()
        for region in members:
            inside = region.inside(home)
            key = (_kind(modules[home], home, region, own), *map(_call_kind, calls[home]), (*heads, ranks, rank))
            if home in recurrent:
                known[key] = "in generation the model hands it a state of all channels"
            if key not in known:
                with with_values():
                    known[key] = _fitted(modules[home], inside, calls[home], heads, (ranks, rank))
            fitted = known[key]
            if isinstance(fitted, str):
                whole.update(dict.fromkeys(region.matrices(), fitted))
            else:
                regions_of_unit.append(Fitted(replace(fitted.shares, region=inside), fitted.numbers))
        if regions_of_unit:
            units.append(Unit(home, regions_of_unit, calls[home]))
    if not units:
        reasons = "; ".join(f"{starred(name)}: {why}" for name, why in list(whole.items())[:4])
        raise TensorParallelError(
            f"{type(model).__name__} cannot be split over {ranks} ranks: {reasons or 'no block has a pair'}"
        )
    drops, declared = dropped_in(model, inputs) | _dropped_by_heads(units, modules), declared_cuts(model, shapes)
    plan = TensorParallelPlan(ranks, units, whole, inputs, output, drops, shapes, declared, unpadded)
    for name in plan.unnamed():  # matrices of blocks without region still need an entry
        node, why = trace.nodes.get(name), "no matrix product of the small input reads it"
        plan.whole[name] = why if node is None else _UNPAIRED[node.lookup]
    plan.whole = {name: why for name, why in plan.whole.items() if name not in plan.cuts()}
    return plan


def _dropped_by_heads(units: Sequence[Unit], modules: Mapping[str, nn.Module]) -> dict[str, list[frozenset[str]]]:
    """Return the dropped matrices, see `dropped_in`, of attentions that are split by heads: traces do not show them."""
    dropped: dict[str, list[frozenset[str]]] = {}
    for unit in units:
        for region in (fitted.shares.region for fitted in unit.regions):
            home = join(unit.name, region.home)
            if region.heads and getattr(modules[home], "dropout", 0.0) > 0:
                dropped[home] = [frozenset(join(unit.name, column) for column in region.columns)]
    return dropped


_UNPAIRED = {True: "indices choose from it", False: "it has no pair in its block"}


def dropped_in(model: nn.Module, inputs: dict[str, Any]) -> dict[str, list[frozenset[str]]]:
    """Run a model once on `inputs`, in its own mode, and find the matrices that produce activations under dropout.

    Returns:
        Names of the matrices, one set for each dropout, by the name of its module; {} in evaluation mode.
    """
    training = [module for module in model.modules() if module.training]
    if not training:
        return {}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # preserves running statistics
    draws = Draws(model, inputs)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), draws:
            model(**inputs)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    finally:
        draws.remove()
    return draws.dropped


def _units_of(regions: Sequence[ShardableRegion]) -> dict[str, list[ShardableRegion]]:
    """Group regions by the outermost of their modules that contain each other; packed experts form their own groups."""
    packed = {region.home for region in regions if region.packed}
    others = {region.home for region in regions if not region.packed}
    outermost = {home: next(outer for outer in around(home) if outer in others) for home in others}
    units: dict[str, list[ShardableRegion]] = {}
    for region in regions:
        home = region.home if region.packed else outermost[region.home]
        if region.packed or home not in packed:
            units.setdefault(home, []).append(region)
    return units


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters, also for a model sharded by `zero.Init`."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}


_PLACES = ("layer_idx", "layer_id", "layer_number", "layer_index")  # attributes with the position of a block


def _call_kind(call: ModuleInputs) -> Any:
    return call.shapes(), tuple((path, value) for path, value in call.constants() if path not in _PLACES)


def _kind(module: nn.Module, home: str, region: ShardableRegion, shapes: dict[str, tuple[int, ...]]) -> Any:
    """Return a key that is equal for regions with the same split; `shapes` are those inside `home`."""
    numbers = {k: v for k, v in vars(module).items() if type(v) in (int, str, bool) and k not in (*_PLACES, "training")}
    inside = [(name.removeprefix(home), shape) for name, shape in shapes.items()]
    foreign = [name for name in region.tables if not lies_in(name, home)]
    inner = [name.removeprefix(home) for name in [*region.columns, *region.rows]]
    return (type(module), tuple(inside), tuple(inner), tuple(sorted(numbers.items())), tuple(foreign))


def _fitted(
    module: nn.Module, region: ShardableRegion, calls: list[ModuleInputs], heads: list[int], place: tuple[int, int]
) -> Fitted | str:
    """Compute a region's sharding and attribute values for `place` (ranks, rank), or the reason why it stays whole."""
    ranks, rank = place
    shares: ChannelDependencies | str
    try:
        if region.heads:
            shares = share_heads(module.get_submodule(region.home), region, ranks)
        elif region.packed:
            module = module.get_submodule(region.home)
            shares = share_packed(module, region, calls[-1], ranks)
            numbers = shares if isinstance(shares, str) else fit_packed(module, shares, calls[-1], rank)
        else:
            shares = share_out(module, region, calls, heads, ranks) or "every channel depends on every other"
    except (RuntimeError, ValueError, TypeError) as error:
        return f"it does not run alone: {describe_error(error)}"
    if isinstance(shares, str):
        return shares
    if region.heads:
        numbers = {}
    elif not region.packed:
        numbers = fit(module, shares, calls, rank)
    return numbers if isinstance(numbers, str) else Fitted(shares, numbers)
