"""JSON files of tensor-parallel plans.

`write_plan` stores the plan that was found for a model. The file can be edited by hand, and an engine reads the file
instead of searching for a plan. When a file is read, its names, shapes and shares must fit the model; split units are
then compared with dense ones (`verify`) as without a file. A unit is a module with parameters to split; equal units are
written once, with `*` for the layer number if all layers are equal.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import TensorParallelError
from deepspeed.foundation.equivalence import example_inputs
from deepspeed.tensor_parallel.channel_dependencies import (
    ChannelDependencies,
    ModuleInputs,
    Segments,
    TensorSharding,
    length_of,
)
from deepspeed.tensor_parallel.example_inputs import all_calls
from deepspeed.tensor_parallel.layers import is_linear, is_transposed, starred
from deepspeed.tensor_parallel.module_attributes import Numbers
from deepspeed.tensor_parallel.plan import (
    Fitted,
    Specs,
    TensorParallelPlan,
    Unit,
    by_pattern,
    declared_cuts,
    dropped_in,
    make_plan,
    shapes_of,
)
from deepspeed.tensor_parallel.trace import ShardableRegion, by_module, join, lies_in, owner

FORMAT, VERSION = "deepspeed tensor plan", 1


def write_plan(
    path: str | Path, model: nn.Module, ranks: int, example: Any = None, specs: Specs | None = None
) -> list[TensorParallelPlan]:
    """Find the plan of a dense model for every rank, and write it to a file. A single process calls this.

    Args:
        path: path of the JSON file, for the key `tensor_parallel.plan_file`.
        model: dense; not changed.
        ranks: number of tensor-parallel ranks.
        example, specs: as in `make_plan`.

    Returns:
        The plans by rank.

    Raises:
        ArgumentError: the model's inputs are unknown and no example is given.
        TensorParallelError: no matrix can be split.
        OSError: the file cannot be written.
    """
    plans = [make_plan(model, ranks, rank, example, specs) for rank in range(ranks)]
    shapes = shapes_of(model)
    inside_of, modules = by_module(shapes), by_pattern(name for name, _ in model.named_modules())
    units: dict[str, dict[str, Any]] = {}
    by_rank = [{unit.name: {r.shares.region.rows[0]: r for r in unit.regions} for unit in p.units} for p in plans]
    for name in by_rank[0]:
        of_unit = [rank_units.get(name, {}) for rank_units in by_rank]
        rows = [row for row in of_unit[0] if all(row in regions for regions in of_unit)]
        if rows:
            region_data = [_region_data([regions[row] for regions in of_unit]) for row in rows]
            own = {n.removeprefix(f"{name}."): list(shapes[n]) for n in inside_of.get(name, ())}
            entry = {"modules": [name], "shapes": own, "regions": region_data}
            known = units.setdefault(json.dumps([starred(name), own, region_data]), entry)
            if known is not entry:
                known["modules"].append(name)
    for unit in units.values():
        same = {starred(name) for name in unit["modules"]}
        if len(same) == 1 and set(unit["modules"]).issuperset(modules[next(iter(same))]):
            unit["modules"] = sorted(same)
    plan = {
        "format": FORMAT, "version": VERSION, "model": type(model).__name__, "ranks": ranks,
        "units": list(units.values()),
        "whole": {starred(name): why for plan in plans for name, why in plan.whole.items()},
    }  # fmt: skip
    # Lists of numbers stay on one line.
    numbers = re.compile(r"\[[\s\d,\[\]]*\]")
    text = numbers.sub(lambda match: re.sub(r"\s+", " ", match[0]), json.dumps(plan, indent=1))
    Path(path).write_text(text + "\n")
    return plans


def _region_data(by_rank: Sequence[Fitted]) -> dict[str, Any]:
    shares = by_rank[0].shares
    region, numbers = shares.region, []
    columns = [name for name in region.columns if name in shares.tensors]  # tensors without gradient stay whole
    for fitted in by_rank:
        own: dict[str, dict[str, int]] = {}
        for (module, attribute), value in fitted.numbers.items():
            own.setdefault(module, {})[attribute] = value
        numbers.append(own)
    tensors, inputs = (
        {name: {"dim": s.dim, "segments": s.segments, "copied": s.copied} for name, s in by_name.items()}
        for by_name in (shares.tensors, shares.inputs)
    )
    return {
        "home": region.home, "columns": columns, "rows": region.rows, "inner": sorted(region.inner & {*columns}),
        "tables": region.tables, "packed": region.packed, "channels": shares.rows, "tensors": tensors,
        "inputs": inputs, "partial_inputs": shares.partial_inputs, "numbers": numbers,
    }  # fmt: skip


# -- reading ---------------------------------------------------------------------------------------------------------


class _FileEntry:
    """Value in the file, with its location for error messages."""

    def __init__(self, value: Any, where: str) -> None:
        self.value, self.where = value, where

    def wrong(self, what: str) -> TensorParallelError:
        return TensorParallelError(f"{self.where}: {what}")

    def fields(self, *names: str) -> list[_FileEntry]:
        """Return the values of an object by `names`; TensorParallelError unless these are its keys."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object belongs here")
        for name in [*(n for n in names if n not in self.value), *(n for n in self.value if n not in names)]:
            raise self.wrong(f"{name!r} is {'unknown' if name in self.value else 'missing'}; it has {', '.join(names)}")
        return [_FileEntry(self.value[name], f"{self.where}.{name}") for name in names]

    def items(self) -> list[tuple[str, _FileEntry]]:
        if not isinstance(self.value, dict):
            raise self.wrong("an object belongs here")
        return [(name, _FileEntry(value, f"{self.where}.{name}")) for name, value in self.value.items()]

    def entries(self, count: int | None = None) -> list[_FileEntry]:
        if not isinstance(self.value, list) or (count is not None and len(self.value) != count):
            raise self.wrong("a list belongs here" if count is None else f"a list of {count} belongs here")
        return [_FileEntry(value, f"{self.where}[{index}]") for index, value in enumerate(self.value)]

    def of(self, kind: type) -> Any:
        right = isinstance(self.value, kind) and (kind is bool or not isinstance(self.value, bool))
        if not right:
            raise self.wrong(f"{self.value!r} is no {kind.__name__}")
        return self.value

    def names(self, known: Iterable[str], what: str) -> list[str]:
        """Return the distinct names from `known`, else TensorParallelError; `what` describes a name in errors."""
        names = [entry.of(str) for entry in self.entries()]
        for place, name in enumerate(names):
            if name not in known:
                raise self.wrong(f"{name!r} is no {what}")
            if name in names[:place]:
                raise self.wrong(f"{name!r} is in it twice")
        return names


def same_file(axis: Axis, path: str | None, stage: int = 0) -> None:
    """Compare the contents of all ranks' plan files. All ranks of the axis must call this.

    Args:
        axis: the ranks.
        path: this rank's file; None: no file.
        stage: pipeline stage of this rank; only ranks of one stage are compared.

    Raises:
        TensorParallelError: ranks of one stage have different files. A file that cannot be read raises in `read_plan`.
    """
    try:
        content = "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        content = None
    known: dict[int, tuple[int, str]] = {}
    for rank, (of_stage, text) in zip(axis.ranks, all_gather_objects(axis, (stage, content)), strict=True):
        first, wanted = (rank, text) if text is None else known.setdefault(of_stage, (rank, text))
        if text != wanted:
            raise TensorParallelError(
                f"tensor_parallel.plan_file: ranks {first} and {rank} have different plans; give all ranks one file"
            )


def read_plan(
    path: str | Path, model: nn.Module, ranks: int, rank: int, example: Any = None, specs: Specs | None = None
) -> TensorParallelPlan:
    """Read the plan for a model from a file.

    Args:
        path: path of the file from `write_plan`.
        model: dense, whole on this rank or sharded by `zero.Init`; not changed.
        ranks: number of tensor-parallel ranks.
        rank: position of this rank, from 0.
        example, specs: as in `make_plan`.

    Returns:
        The plan, as from `make_plan`.

    Raises:
        ArgumentError: the model's inputs are unknown and no example is given.
        TensorParallelError: the file cannot be read or does not fit the model and ranks; the message has the location.
    """
    file = _FileEntry(None, f"tensor_parallel.plan_file '{path}'")
    try:
        file.value = json.loads(Path(path).read_text())
    except OSError as error:
        raise file.wrong(f"it cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise file.wrong(f"it is no JSON: {error}") from None
    form, version, kind, size, units, whole = file.fields("format", "version", "model", "ranks", "units", "whole")
    if (form.value, version.of(int)) != (FORMAT, VERSION):
        raise file.wrong(f"it is no {FORMAT} of version {VERSION}, which deepspeed.tensor_parallel.plan_file writes")
    if kind.value != type(model).__name__ or size.of(int) != ranks:
        raise file.wrong(
            f"it is of a {kind.value} over {size.value} ranks, and this is a {type(model).__name__} over {ranks}"
        )
    reader = _PlanReader(model, ranks, rank)
    read = [unit for entry in units.entries() for unit in reader.units(entry)]
    reasons = reader.reasons(whole)
    inputs = example_inputs(model, example)
    return _planned(model, reader, read, reasons, inputs, specs, file)


def _planned(
    model: nn.Module,
    reader: _PlanReader,
    units: list[Unit],
    reasons: dict[str, str],
    inputs: dict[str, Any],
    specs: Specs | None,
    file: _FileEntry,
) -> TensorParallelPlan:
    """Return the plan of the units that no rule skips, with recorded calls; TensorParallelError if it does not fit."""
    left = [name for name in reader.shapes if name not in reader.taken]
    whole = {name: reasons[key] for name in left for key in (starred(name), name) if key in reasons}
    specs = specs or Specs()  # no rules by default
    for unit in units:
        for fitted in list(unit.regions):
            region = fitted.shares.region.renamed(functools.partial(join, unit.name))
            if not specs.without_skipped([region], whole):
                unit.regions.remove(fitted)
    order = {name: place for place, name in enumerate(reader.modules)}
    units = sorted((unit for unit in units if unit.regions), key=lambda unit: order[unit.name])
    if not units:
        raise file.wrong("it leaves every matrix whole")
    homes = [join(unit.name, fitted.shares.region.home) for unit in units for fitted in unit.regions]
    calls, output, unpadded = all_calls(model, [*(unit.name for unit in units), *homes], inputs)
    for unit in units:
        if unit.name not in calls:
            raise file.wrong(f"the model never calls '{unit.name}'")
        unit.calls = calls[unit.name]
    for home in homes:
        reader.check_arguments(home, calls.get(home))
    drops, declared = dropped_in(model, inputs), declared_cuts(model, reader.shapes)
    plan = TensorParallelPlan(reader.ranks, units, whole, inputs, output, drops, reader.shapes, declared, unpadded)
    plan.whole.update(dict.fromkeys(plan.unnamed(), "the plan file leaves it whole"))
    return plan


class _PlanReader:
    """Reader of plan entries that compares them with a model."""

    def __init__(self, model: nn.Module, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self.modules, self.shapes = dict(model.named_modules()), shapes_of(model)
        self.taken: dict[str, str] = {}  # split parameters, with their location in the file
        self._inside, self._patterns = by_module(self.shapes), by_pattern(self.modules)
        # Arguments by module, to be checked in its calls.
        self._arguments: dict[str, list[tuple[TensorSharding, _FileEntry]]] = {}
        self._units: dict[str, str] = {}  # location of each

    def check_arguments(self, home: str, calls: Sequence[ModuleInputs] | None) -> None:
        """Raise TensorParallelError unless the split arguments are in the calls (None: none), in the right sizes."""
        for share, entry in self._arguments.pop(home, ()):
            if calls is None:
                raise entry.wrong(f"the model never calls '{home}'")
            shapes = [shape for call in calls for path, shape in call.shapes() if path == share.name]
            if not shapes:
                known = dict.fromkeys(path for call in calls for path, _ in call.shapes())
                raise entry.wrong(f"'{home}' is given no tensor {share.name!r}; it is given {', '.join(known)}")
            for shape in shapes if share.dim >= 0 else ():
                end = max(start + length for of_rank in share.segments for start, length in of_rank)
                if share.dim >= len(shape) or shape[share.dim] != end:
                    raise entry.wrong(
                        f"{share.name!r} has shape {list(shape)}, and {end} of dim {share.dim} are shared out"
                    )

    def units(self, entry: _FileEntry) -> list[Unit]:
        """Return the units (modules to split) of one entry of the file; TensorParallelError if it does not fit."""
        modules, shapes, regions = entry.fields("modules", "shapes", "regions")
        read: list[Unit] = []
        for pattern in modules.entries():
            names = self._patterns.get(pattern.of(str), [pattern.value] if pattern.value in self.modules else [])
            if not names:
                raise pattern.wrong(f"the model has no module {pattern.value!r}")
            for name in names:
                if name in self._units:
                    raise pattern.wrong(f"'{name}' is in {self._units[name].rpartition(': ')[2]} already")
                self._units[name] = pattern.where
            read += [self._unit(name, shapes, regions) for name in names]
        return read

    def reasons(self, entry: _FileEntry) -> dict[str, str]:
        """Return the reasons why parameters stay whole, by checked names in the file, which may contain `*`."""
        reasons = {name: text.of(str) for name, text in entry.items()}
        patterns = by_pattern(self.shapes)
        for name in reasons:
            meant = patterns.get(name, [name] if name in self.shapes else [])
            if not meant:
                raise entry.wrong(f"the model has no parameter {name!r}")
            if all(param in self.taken for param in meant):
                raise entry.wrong(f"{name!r} is split, in {self.taken[meant[0]].rpartition(': ')[2]}")
        return reasons

    def _unit(self, name: str, shapes: _FileEntry, regions: _FileEntry) -> Unit:
        here = {n.removeprefix(f"{name}."): self.shapes[n] for n in self._inside.get(name, ())}
        listed = {n: tuple(size.of(int) for size in shape.entries()) for n, shape in shapes.items()}
        for param in [*(n for n in listed if n not in here), *(n for n in here if n not in listed)]:
            raise shapes.wrong(f"{param!r} is {'not in' if param in listed else 'in'} '{name}' of this model")
        for param, shape in listed.items():
            if here[param] != shape:
                raise shapes.wrong(
                    f"{param!r} has shape {list(shape)}, and {list(here[param])} in '{name}' of this model"
                )
        return Unit(name, [self._region(name, here, entry) for entry in regions.entries()], [])

    def _region(self, unit: str, shapes: Mapping[str, tuple[int, ...]], entry: _FileEntry) -> Fitted:
        home, columns, rows, inner, tables, packed, channels, tensors, inputs, partial, numbers = entry.fields(
            "home", "columns", "rows", "inner", "tables", "packed", "channels", "tensors", "inputs", "partial_inputs",
            "numbers",
        )  # fmt: skip
        if join(unit, home.of(str)) not in self.modules:
            raise home.wrong(f"'{unit}' has no module {home.value!r}")
        region = ShardableRegion(
            home.value, columns.names(shapes, "parameter"), rows.names(shapes, "parameter"),
            set(inner.names(columns.value, "column")), tables.names(shapes, "parameter"), packed.of(bool),
            isinstance(self.modules[join(unit, home.value)], nn.MultiheadAttention),
        )  # fmt: skip
        if not region.rows or not region.columns:
            raise entry.wrong("it has no rows or no columns")
        shares = ChannelDependencies(region, self._segments(channels, None, copied=False))
        for name, share in tensors.items():
            if name not in shapes:
                raise share.wrong(f"'{unit}' has no parameter {name!r}")
            shares.tensors[name] = self._share(name, share, shapes[name])
        shares.inputs = {n: self._share(n, share, None) for n, share in inputs.items()}
        shares.partial_inputs = partial.names({name.of(str) for name in partial.entries()}, "argument")
        arguments = self._arguments.setdefault(join(unit, region.home), [])
        arguments += [(shares.inputs[name], share) for name, share in inputs.items()]
        arguments += [(TensorSharding(name, -1, []), partial) for name in shares.partial_inputs]
        self._check_layers(unit, shares, shapes, entry, tensors)
        shares.bytes = shares.largest_part(self.modules[unit])
        return Fitted(shares, self._numbers(unit, numbers))

    def _check_layers(
        self,
        unit: str,
        shares: ChannelDependencies,
        shapes: Mapping[str, tuple[int, ...]],
        entry: _FileEntry,
        tensors: _FileEntry,
    ) -> None:
        region, channels = shares.region, sum(map(length_of, shares.rows))
        for name in region.matrices():
            layer: Any = self.modules[join(unit, owner(name))]
            if not lies_in(name, region.home):
                raise entry.wrong(f"'{name}' is not in the region's home '{region.home}'")
            if (name in shares.tensors) is not (name in region.columns or region.packed):
                raise tensors.wrong(
                    f"{name!r} is {'a row, split by the channels' if name in region.rows else 'missing'}"
                )
            if not region.packed and not region.heads and not is_linear(layer):
                raise entry.wrong(f"'{join(unit, owner(name))}' is no linear layer")
            turned = not region.packed and is_transposed(layer)
            share = shares.tensors.get(name)
            if name in region.rows and not region.packed and shapes[name][0 if turned else 1] != channels:
                raise entry.wrong(f"the ranks' channels are {channels}, and '{name}' has shape {list(shapes[name])}")
            if name in region.columns and not region.packed and share is not None and share.dim != int(turned):
                raise tensors.wrong(f"'{name}' is split along dim {share.dim}, and its outputs are dim {int(turned)}")
            if region.packed and (share is None or share.copied):
                raise tensors.wrong(f"'{name}' is not shared out")
        for name in {*shares.tensors, *region.rows}:
            before = self.taken.setdefault(join(unit, name), entry.where)
            if before != entry.where:
                raise entry.wrong(f"'{join(unit, name)}' is in {before.rpartition(': ')[2]} already")

    def _share(self, name: str, entry: _FileEntry, shape: tuple[int, ...] | None) -> TensorSharding:
        dim, segments, copied = entry.fields("dim", "segments", "copied")
        if dim.of(int) < (0 if shape is None else -1):
            raise dim.wrong(f"{dim.value} is no dim that is split")
        if dim.value < 0 and shape is not None:
            return TensorSharding(name, -1, [() for _ in segments.entries(self.ranks)], copied=True)
        if shape is not None and dim.value >= len(shape):
            raise dim.wrong(f"{name!r} has shape {list(shape)}")
        size = None if shape is None else shape[dim.value]
        return TensorSharding(name, dim.value, self._segments(segments, size, copied.of(bool)), copied.value)

    def _segments(self, entry: _FileEntry, size: int | None, copied: bool) -> list[Segments]:
        """Read each rank's segments along a dim of `size` elements (None: unknown, its end is not checked).

        TensorParallelError if a rank has none, one ends beyond the dim, or, unless `copied`, those of all ranks have
        gaps or overlap.
        """
        by_rank: list[Segments] = []
        for of_rank in entry.entries(self.ranks):
            pairs = [tuple(number.of(int) for number in pair.entries(2)) for pair in of_rank.entries()]
            if not pairs or any(start < 0 or length < 1 for start, length in pairs):
                raise of_rank.wrong("each rank needs [start, length] of at least one")
            by_rank.append(tuple((start, length) for start, length in pairs))
        every = sorted(part for of_rank in by_rank for part in of_rank)
        end = 0
        for start, length in every if not copied else ():
            if start != end:
                raise entry.wrong(f"{'nobody has' if start > end else 'two ranks have'} what is at {min(start, end)}")
            end = max(end, start + length)
        if size is not None and not copied and end != size:
            raise entry.wrong(f"the ranks have {end} of {size}")
        last = max(start + length for start, length in every)
        if size is not None and last > size:
            raise entry.wrong(f"a rank uses what is at {last - 1}, of {size}")
        return by_rank

    def _numbers(self, unit: str, entry: _FileEntry) -> Numbers:
        """Return this rank's attribute values; those of other ranks are checked too, so that all ranks raise."""
        by_rank: list[Numbers] = []
        for of_rank in entry.entries(self.ranks):
            by_rank.append({})
            for name, numbers in of_rank.items():
                module: Any = self.modules.get(join(unit, name))
                if module is None:
                    raise numbers.wrong(f"'{unit}' has no module {name!r}")
                for attribute, value in numbers.items():
                    target = getattr(module, "config", None) if attribute.startswith("config.") else module
                    dense = getattr(target, attribute.removeprefix("config."), None)
                    if type(dense) is not int:
                        raise value.wrong(f"'{join(unit, name)}' has no number {attribute!r}")
                    if value.of(int) != dense and not 1 <= value.value <= dense:
                        raise value.wrong(f"{value.value} is no part of {dense}, which it is in the dense model")
                    by_rank[-1][name, attribute] = value.value
        return by_rank[self.rank]
