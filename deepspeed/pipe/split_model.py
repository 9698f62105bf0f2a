"""Finds where an unedited model can be split into stages.

One forward of the whole model on a small input says in which order things run. Then the parts are run one after the
other, each with stand-ins for all that it does not hold, and have to give the outputs of the whole model, bit by bit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.errors import PipelineError
from deepspeed.foundation.equivalence import evaluating
from deepspeed.foundation.partition import partition_balanced, partition_uniform
from deepspeed.foundation.pytree import tensors_in
from deepspeed.foundation.transformers_model import outermost
from deepspeed.pipe.partition_cost import costs_of_parts, deal, operations
from deepspeed.pipe.placeholders import Elsewhere, Final, Handover, Skipped, Slot, poisoned, replaced, without_values


@dataclass
class ModelSplit:
    """How a model is cut into parts.

    Args:
        container: name of the list of blocks.
        bounds: part p has the blocks from bounds[p] up to bounds[p + 1].
        before: names of modules that run before the blocks.
        after: those that run after them.
        needed: those of `before` whose values every part needs, and computes for itself.
        strays: parameters of modules around the list; every part holds them.
        costs: of the parts, in any unit.
    """

    container: str
    bounds: list[int]
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    @property
    def parts(self) -> int:
        """How many there are."""
        return len(self.bounds) - 1

    def blocks(self, part: int) -> range:
        """Positions of a part's blocks."""
        return range(self.bounds[part], self.bounds[part + 1])

    def runs(self, part: int) -> set[str]:
        """Names of the modules that a part runs, beside those without parameters."""
        found = {f"{self.container}.{at}" for at in self.blocks(part)} | set(self.needed)
        found |= set(self.before) if part == 0 else set()
        return found | (set(self.after) if part == self.parts - 1 else set())

    def words(self, part: int) -> str:
        """A part in words: "transformer.h 2-3"."""
        blocks = self.blocks(part)
        return f"{self.container} {blocks[0]}" + (f"-{blocks[-1]}" if len(blocks) > 1 else "")


class View:
    """One part of an unedited model: what stands in its slots while it runs.

    Args:
        model: the root.
        layout: how it is cut.
        part: which.
        stand_ins: for modules that are not run, by name.
    """

    def __init__(self, model: nn.Module, layout: ModelSplit, part: int, stand_ins: dict[str, nn.Module]) -> None:
        self._model, self.words, self.costs = model, layout.words(part), layout.costs
        self._skipped: list[Skipped] = []
        self.first, self.last, self.reads_batch = part == 0, part == layout.parts - 1, True
        self.metrics: Mapping[str, torch.Tensor | float] = {}
        self._stand_ins = stand_ins
        runs, slots = layout.runs(part), dict[Slot, nn.Module]()
        for name in all_units(layout, stand_ins):
            if name not in runs:
                slots[slot_of(model, name)] = stand_ins[name]
        container = model.get_submodule(layout.container)
        for at in map(str, range(layout.bounds[part])):
            self._skipped.append(Skipped(container.get_submodule(at)))
            slots[container, at] = self._skipped[-1]
        if not self.last:
            end = str(layout.bounds[part + 1] - 1)
            slots[container, end] = Final(container.get_submodule(end))
        self._slots = slots

    def run(self, received: Any, batch: Any) -> Any:
        """What the part's last block returns, or the root at the end of the model.

        Args:
            received: what the part before has returned.
            batch: arguments of the root's forward: by name, in a row, or one.
        """
        kwargs = dict(batch) if isinstance(batch, Mapping) else {}
        args = () if kwargs else tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
        poison = poisoned(received) if len(self._skipped) > 1 else None
        for one in self._skipped:
            one.value = poison
        if self._skipped:
            self._skipped[-1].value = received
        try:
            with replaced(self._slots):
                found = self._model(*args, **kwargs)
        except Handover as over:
            return over.value
        finally:
            for one in self._skipped:
                one.value = None
        if not self.last:
            raise PipelineError("the model's forward ended before the last block of this stage ran")
        return found

    def cast(self, dtype: torch.dtype) -> None:
        """What stands for other stages' modules gives this dtype too."""
        for one in self._stand_ins.values():
            if isinstance(one, Elsewhere) and dtype != torch.float32:
                one.dtype_here = dtype

    def loss(self, made: Any, batch: Any) -> torch.Tensor:
        """The loss that the model returns: alone, first in a tuple, or by name; other single numbers become `metrics`.

        Raises:
            PipelineError: it returns none.
        """
        found = made.get("loss") if isinstance(made, Mapping) else getattr(made, "loss", made)
        found = found[0] if isinstance(found, tuple) else found
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise PipelineError(
                f"{type(self._model).__name__} returned no loss but a {type(made).__name__}: put labels into the "
                f"batch, or describe the model as a PipelineModule with loss_fn"
            )
        named = made if isinstance(made, Mapping) else vars(made) if hasattr(made, "__dict__") else {}
        self.metrics = {name: value.detach() for name, value in named.items() if name != "loss" and _is_number(value)}
        return found


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def all_units(layout: ModelSplit, stand_ins: dict[str, nn.Module]) -> list[str]:
    """Names of the modules around the blocks that have a stand-in."""
    return [name for name in dict.fromkeys([*layout.before, *layout.after]) if name in stand_ins]


def slot_of(model: nn.Module, name: str) -> Slot:
    """Where a module stands."""
    parent, _, key = name.rpartition(".")
    return model.get_submodule(parent), key


def stand_ins_of(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Stand-ins for modules around the blocks."""
    return {name: Elsewhere(without_values(model.get_submodule(name)), name) for name in names}


# -- finding out ------------------------------------------------------------------------------------------------------


Meter = Callable[[nn.Module, Sequence[nn.Module]], list[float]]


def find_layout(
    model: nn.Module,
    stages: int,
    inputs: dict[str, Any],
    method: str = "best",
    chunks: int = 1,
    meter: Meter | None = None,
) -> ModelSplit:
    """Cut a model, and see that its parts compute what it computes.

    Args:
        model: whole.
        stages: how many there are.
        inputs: arguments of its forward.
        method: "best" deals blocks to stages by operations, with what runs around the blocks (by parameters, where a
            block has none that are known), "profile" by what `meter` says, "parameters" by the blocks' parameters,
            "uniform" by their number.
        chunks: parts of each stage.
        meter: measures as `deepspeed.pipe.partition_cost.seconds`; all ranks have to get the same.

    Raises:
        PipelineError: it cannot be cut so; says why.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise PipelineError(
            f"{type(model).__name__} has an encoder and a decoder that reads all of it: such models are not cut yet"
        )
    parts = stages * chunks
    container = _block_list(model, parts)
    blocks = list(model.get_submodule(container).children())
    layout = ModelSplit(container, [0, len(blocks)])
    wanted = _order(model, layout, inputs)
    costs = operations(model, blocks, inputs) if meter is None else meter(model, blocks)
    weights = [float(sum(p.numel() for p in block.parameters())) for block in blocks]
    if method == "uniform":
        bounds = partition_uniform(len(blocks), parts)
    elif method == "parameters" or not all(costs[1:-1]):  # a block whose operations have no formula costs something
        bounds = partition_balanced(weights, parts)
    else:
        bounds = deal(costs, stages, chunks)
    if bounds[0] != 0 or bounds[-1] != len(blocks) or any(low >= high for low, high in itertools.pairwise(bounds)):
        raise PipelineError(f"bounds {bounds} do not deal the {len(blocks)} blocks of '{container}' to {parts} parts")
    layout.bounds, layout.costs = bounds, costs_of_parts(costs, bounds)
    _compare(model, layout, inputs, wanted)
    return layout


def _block_list(model: nn.Module, parts: int) -> str:
    """The outermost list of blocks with most parameters."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if name and isinstance(module, (nn.ModuleList, nn.Sequential)) and any(True for _ in module.parameters())
    }
    outer = outermost(lists)
    long = {name: module for name, module in outer.items() if len(module) >= parts}
    if not long:
        found = ", ".join(f"{name} ({len(module)})" for name, module in outer.items()) or "none"
        raise PipelineError(
            f"{type(model).__name__} has no list of at least {parts} blocks to be cut at; its lists: {found}. Take "
            f"fewer stages, or describe it as a PipelineModule"
        )
    return max(long, key=lambda name: sum(p.numel() for p in long[name].parameters()))


def _around(model: nn.Module, container: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules with parameters that do not hold the list of blocks."""
    path = [""]
    for part in container.split("."):
        path.append(f"{path[-1]}.{part}".lstrip("."))
    for home in path[:-1]:
        for key, child in model.get_submodule(home).named_children():
            name = f"{home}.{key}".lstrip(".")
            if name not in path and any(True for _ in child.parameters()):
                yield name, child


@contextlib.contextmanager
def _watched(watched: Mapping[str, nn.Module], events: list[tuple[str, bool]]) -> Iterator[None]:
    """Inside, modules run without graphs; each notes its name, and whether it would have had one."""
    modes: list[bool] = []

    def begins(name: str) -> None:
        events.append((name, torch.is_grad_enabled()))
        modes.append(torch.is_grad_enabled())
        torch.set_grad_enabled(False)

    def ends() -> None:
        torch.set_grad_enabled(modes.pop())

    handles = [
        module.register_forward_pre_hook(lambda _m, _a, _k, name=name: begins(name), with_kwargs=True)
        for name, module in watched.items()
    ]
    handles += [module.register_forward_hook(lambda _m, _a, _o: ends()) for module in watched.values()]
    try:
        with torch.enable_grad():  # and restores the mode that was, also where a module raised
            yield
    finally:
        for handle in handles:
            handle.remove()


def _order(model: nn.Module, layout: ModelSplit, inputs: dict[str, Any]) -> Any:
    """Run the whole model; note what runs before and after its blocks. Returns what the model returns."""
    container = model.get_submodule(layout.container)
    units, count = dict(_around(model, layout.container)), len(list(container.children()))
    noted: list[tuple[str, bool]] = []
    with (
        evaluating(model, use_cache=False),
        _watched({**units, **{str(at): one for at, one in enumerate(container.children())}}, noted),
    ):
        wanted = model(**inputs)
    events = [name for name, _ in noted]
    if [name for name in events if name.isdigit()] != [str(at) for at in range(count)]:
        raise PipelineError(
            f"the {count} blocks of '{layout.container}' do not each run once, in order: nothing else can be cut"
        )
    trained = any(param.requires_grad for param in container.parameters())
    if trained and not all(recorded for name, recorded in noted if name.isdigit()):
        raise PipelineError(
            f"the blocks of '{layout.container}' run where autograd records nothing (inside an autograd.Function of "
            f"the model's own, or torch.no_grad): no gradient could go from stage to stage"
        )
    begin, end = events.index("0"), events.index(str(count - 1))
    between = sorted({name for name in events[begin:end] if name in units})
    if between:
        raise PipelineError(f"'{between[0]}' runs between blocks of '{layout.container}', on every stage")
    layout.before = list(dict.fromkeys(name for name in events[:begin] if name in units))
    layout.after = list(dict.fromkeys(name for name in events[end:] if name in units))
    layout.after += [name for name in units if name not in layout.before and name not in layout.after]
    homes = {id(p) for name in layout.runs(0) | set(layout.after) for p in model.get_submodule(name).parameters()}
    homes |= {id(p) for p in container.parameters()}
    layout.strays = [name for name, param in model.named_parameters() if id(param) not in homes]
    return wanted


def _compare(model: nn.Module, layout: ModelSplit, inputs: dict[str, Any], wanted: Any) -> None:
    """Run the parts one after another; they have to give what the whole model gave."""
    if not _wrong(model, layout, inputs, wanted):
        return
    layout.needed = layout.before  # a value that is made before the blocks may be read in each of them
    layout.needed = [name for name in layout.before if _matters(model, layout, inputs, wanted, name)]
    wrong = _wrong(model, layout, inputs, wanted)
    if wrong:
        raise PipelineError(
            f"{type(model).__name__} cut at the blocks of '{layout.container}' does not compute what it computes "
            f"whole: {wrong}"
        )


def _matters(model: nn.Module, layout: ModelSplit, inputs: dict[str, Any], wanted: Any, name: str) -> bool:
    """Whether later parts need a module that runs before the blocks."""
    before, layout.needed = layout.needed, [other for other in layout.before if other != name]
    try:
        return bool(_wrong(model, layout, inputs, wanted))
    finally:
        layout.needed = before


def _wrong(model: nn.Module, layout: ModelSplit, inputs: dict[str, Any], wanted: Any) -> str:
    """What is other than whole when the parts run one after another; empty: nothing."""
    stand_ins = stand_ins_of(model, list(dict.fromkeys([*layout.before, *layout.after])))
    value: Any = None
    with evaluating(model, use_cache=False):
        for part in range(layout.parts):
            try:
                value = View(model, layout, part, stand_ins).run(value, inputs)
            except Exception as error:  # the model's own code, which meets what stands for other parts
                return f"the part of {layout.words(part)} raised {type(error).__name__}: {error}"
    found, whole = list(tensors_in(value)), list(tensors_in(wanted))
    if len(found) == len(whole) and all(torch.equal(a, b) for a, b in zip(found, whole, strict=True)):
        return ""
    return "something else than what blocks return goes from one to the next"
