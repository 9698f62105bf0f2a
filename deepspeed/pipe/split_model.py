"""Split of an unedited model into stages.

One forward of the full model on a small input gives the order of its modules. Then the parts run one after the other,
each with placeholders for modules of other parts, and must reproduce the outputs of the full model, bit by bit. A
stage keeps the modules that its parts run; gradients of parameters on several stages are summed over these stages.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from deepspeed.errors import PipelineError
from deepspeed.foundation.equivalence import evaluating
from deepspeed.foundation.partition import partition_balanced, partition_uniform
from deepspeed.foundation.pytree import tensors_in
from deepspeed.foundation.transformers_model import outermost
from deepspeed.pipe.partition_cost import costs_of_parts, deal, operations
from deepspeed.pipe.placeholders import Elsewhere, Final, Handover, Skipped, Slot, poisoned, without_values
from deepspeed.zero.layout.placement import Relation, place, placement_of


@dataclass
class ModelSplit:
    """Split of a model into parts.

    Args:
        container: name of the list of blocks.
        bounds: part p has the blocks from bounds[p] up to bounds[p + 1].
        before: names of modules that run before the blocks.
        after: names of modules that run after the blocks, or not at all.
        needed: modules of `before` that every part runs itself, because all parts need their values.
        strays: names of parameters that belong to none of these modules or blocks; every part has them.
        costs: costs of the parts, relative to their mean.
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
        return len(self.bounds) - 1

    @property
    def around(self) -> list[str]:
        """Names of the modules with parameters outside of the blocks."""
        return list(dict.fromkeys([*self.before, *self.after]))

    @property
    def units(self) -> list[str]:
        """Names of the blocks, and of the modules outside of them."""
        return [*(f"{self.container}.{block}" for block in range(self.bounds[-1])), *self.around]

    def blocks(self, part: int) -> range:
        """Return the indices of a part's blocks."""
        return range(self.bounds[part], self.bounds[part + 1])

    def runs(self, part: int) -> set[str]:
        """Return the names of the modules with parameters that a part runs."""
        names = {f"{self.container}.{block}" for block in self.blocks(part)} | set(self.needed)
        names |= set(self.before) if part == 0 else set()
        return names | (set(self.after) if part == self.parts - 1 else set())

    def words(self, part: int) -> str:
        """Describe a part by its blocks, such as "transformer.h 2-3"."""
        blocks = self.blocks(part)
        return f"{self.container} {blocks[0]}" + (f"-{blocks[-1]}" if len(blocks) > 1 else "")

    # -- checked by running the model -----------------------------------------------------------------------------

    def trace(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Run the whole model, set `before`, `after` and `strays`, and return the outputs.

        Raises:
            PipelineError: blocks do not run once and in order, run without autograd, or another module runs between.
        """
        container = model.get_submodule(self.container)
        around, count = dict(_around(model, self.container)), len(list(container.children()))
        calls: list[tuple[str, bool]] = []
        numbered = {str(index): block for index, block in enumerate(container.children())}
        with evaluating(model, use_cache=False), _watched({**around, **numbered}, calls):
            outputs = model(**inputs)
        events = [name for name, _ in calls]
        if [name for name in events if name.isdigit()] != [str(index) for index in range(count)]:
            raise PipelineError(
                f"the {count} blocks of '{self.container}' do not each run once, in order, so the model cannot be split"
            )
        trained = any(param.requires_grad for param in container.parameters())
        if trained and not all(recorded for name, recorded in calls if name.isdigit()):
            raise PipelineError(
                f"the blocks of '{self.container}' run where autograd records nothing (inside an autograd.Function of "
                f"the model's own, or torch.no_grad): no gradient could go from stage to stage"
            )
        begin, end = events.index("0"), events.index(str(count - 1))
        between = sorted({name for name in events[begin:end] if name in around})
        if between:
            raise PipelineError(f"'{between[0]}' runs between blocks of '{self.container}', on every stage")
        self.before = list(dict.fromkeys(name for name in events[:begin] if name in around))
        self.after = list(dict.fromkeys(name for name in events[end:] if name in around))
        self.after += [name for name in around if name not in self.before and name not in self.after]
        homes = {id(p) for name in self.runs(0) | set(self.after) for p in model.get_submodule(name).parameters()}
        homes |= {id(p) for p in container.parameters()}
        self.strays = [name for name, param in model.named_parameters() if id(param) not in homes]
        return outputs

    def verify(self, model: nn.Module, inputs: dict[str, Any], outputs: Any) -> None:
        """Check that the parts, run one after another, reproduce the outputs of the whole model.

        If they do not, set `needed` to the modules before the blocks that every part must run, and check again.

        Raises:
            PipelineError: the outputs still differ.
        """
        if not self._difference(model, inputs, outputs):
            return
        required = []  # every block may read values computed before the blocks
        for name in self.before:
            self.needed = [other for other in self.before if other != name]
            if self._difference(model, inputs, outputs):
                required.append(name)
        self.needed = required
        difference = self._difference(model, inputs, outputs)
        if difference:
            raise PipelineError(
                f"{type(model).__name__} split at the blocks of '{self.container}' gives other results than the full "
                f"model: {difference}"
            )

    def _difference(self, model: nn.Module, inputs: dict[str, Any], outputs: Any) -> str:
        """Describe the difference between the parts, run one after another, and the whole model; "" if none."""
        stand_ins = stand_ins_of(model, self.around)
        value: Any = None
        with evaluating(model, use_cache=False):
            for part in range(self.parts):
                try:
                    value = View(model, self, part, stand_ins).run(value, inputs)
                except Exception as error:  # any error of the model's own code, which runs on placeholders
                    return f"the part of {self.words(part)} raised {type(error).__name__}: {error}"
        staged, whole = list(tensors_in(value)), list(tensors_in(outputs))
        if len(staged) == len(whole) and all(torch.equal(a, b) for a, b in zip(staged, whole, strict=True)):
            return ""
        return "something else than what blocks return goes from one to the next"

    # -- over stages ----------------------------------------------------------------------------------------------

    def modules_by_stage(self, model: nn.Module, stages: int) -> list[set[str]]:
        """Return the names of each stage's modules: modules that it runs, and modules that register their parameters.

        Part p belongs to stage p % stages.
        """
        units = self.units
        home: dict[int, str] = {}
        for name, param in model.named_parameters():
            home[id(param)] = next((unit for unit in units if name.startswith(unit + ".")), "")
        modules = [set[str]() for _ in range(stages)]
        for part in range(self.parts):
            modules[part % stages] |= self.runs(part)
        for names in modules:
            pending = list(names)
            while pending:
                for param in model.get_submodule(pending.pop()).parameters():
                    if home[id(param)] and home[id(param)] not in names:
                        names.add(home[id(param)])
                        pending.append(home[id(param)])
        return modules

    def place_shared(self, model: nn.Module, modules: list[set[str]]) -> None:
        """Mark parameters that several stages have as partial sums; `modules`: from `modules_by_stage`."""
        stages_of: dict[int, set[int]] = {}
        params = dict(model.named_parameters())
        for stage, names in enumerate(modules):
            shared = [param for name in names for param in model.get_submodule(name).parameters()]
            for param in [*shared, *(params[name] for name in self.strays)]:
                stages_of.setdefault(id(param), set()).add(stage)
        for param in model.parameters():
            if len(stages_of.get(id(param), ())) > 1:
                row = placement_of(param)
                relations = {**row.relations, "pp": Relation.PARTIAL}
                place(param, replace(row, relations=relations, stages=frozenset(stages_of[id(param)])))


class View:
    """Part of an unedited model: its root module, with placeholders for modules that the part does not run.

    Args:
        model: the root module.
        layout: split of the model.
        part: index of the part.
        stand_ins: placeholders for modules outside of the blocks, by name.
    """

    def __init__(self, model: nn.Module, layout: ModelSplit, part: int, stand_ins: dict[str, nn.Module]) -> None:
        self._model, self.words, self.costs = model, layout.words(part), layout.costs
        self._skipped: list[Skipped] = []
        self.first, self.last, self.reads_batch = part == 0, part == layout.parts - 1, True
        self.metrics: Mapping[str, torch.Tensor | float] = {}
        self._stand_ins = stand_ins
        runs, slots = layout.runs(part), dict[Slot, nn.Module]()
        for name in layout.around:
            if name in stand_ins and name not in runs:
                slots[slot_of(model, name)] = stand_ins[name]
        container = model.get_submodule(layout.container)
        for block in map(str, range(layout.bounds[part])):
            self._skipped.append(Skipped(container.get_submodule(block)))
            slots[container, block] = self._skipped[-1]
        if not self.last:
            end = str(layout.bounds[part + 1] - 1)
            slots[container, end] = Final(container.get_submodule(end))
        self._slots = slots

    def run(self, received: Any, batch: Any) -> Any:
        """Compute the output of the part's last block (last part: of the root) from that of the previous part.

        The batch has the arguments of the root's forward: a dict, a sequence, or a single one.

        Raises:
            PipelineError: forward ended before the part's last block ran.
        """
        kwargs = dict(batch) if isinstance(batch, Mapping) else {}
        args = () if kwargs else tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
        poison = poisoned(received) if len(self._skipped) > 1 else None
        for skipped in self._skipped:
            skipped.value = poison
        if self._skipped:
            self._skipped[-1].value = received
        modules = {(parent, key): parent._modules[key] for parent, key in self._slots}
        try:
            for (parent, key), stand_in in self._slots.items():
                parent._modules[key] = stand_in
            outputs = self._model(*args, **kwargs)
        except Handover as handover:
            return handover.value
        finally:
            for (parent, key), module in modules.items():
                parent._modules[key] = module
            for skipped in self._skipped:
                skipped.value = None
        if not self.last:
            raise PipelineError("the model's forward ended before the last block of this stage ran")
        return outputs

    def cast(self, dtype: torch.dtype) -> None:
        """Set the output dtype of the placeholders to that of the model, unless it is fp32."""
        for stand_in in self._stand_ins.values():
            if isinstance(stand_in, Elsewhere) and dtype != torch.float32:
                stand_in.dtype_here = dtype

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the loss in the model's outputs: a tensor, the first of a tuple, or "loss". Other scalars: `metrics`.

        Raises:
            PipelineError: the model returns no loss.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
        loss = loss[0] if isinstance(loss, tuple) else loss
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise PipelineError(
                f"{type(self._model).__name__} returned no loss but a {type(outputs).__name__}: put labels into the "
                f"batch, or describe the model as a PipelineModule with loss_fn"
            )
        named = outputs if isinstance(outputs, Mapping) else vars(outputs) if hasattr(outputs, "__dict__") else {}
        self.metrics = {
            name: value.detach() for name, value in named.items() if name != "loss" and self._is_number(value)
        }
        return loss

    @staticmethod
    def _is_number(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def slot_of(model: nn.Module, name: str) -> Slot:
    """Return the parent of a module, and the module's name in the parent."""
    parent, _, key = name.rpartition(".")
    return model.get_submodule(parent), key


def stand_ins_of(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Create a placeholder that returns NaN for each of the named modules, by name."""
    return {name: Elsewhere(without_values(model.get_submodule(name)), name) for name in names}


def keep_stage(model: nn.Module, layout: ModelSplit, stages: int, stage: int) -> list[View]:
    """Reduce a model, split by `layout`, to one of `stages` stages, in place; return the stage's parts by chunk.

    Remaining modules keep their names; parameters stay the same objects.
    """
    modules = layout.modules_by_stage(model, stages)
    layout.place_shared(model, modules)
    stand_ins = stand_ins_of(model, layout.units)
    for name, stand_in in stand_ins.items():
        if name not in modules[stage]:
            parent, key = slot_of(model, name)
            parent._modules[key] = stand_in
    around = {name: stand_ins[name] for name in stand_ins if not name.startswith(layout.container + ".")}
    return [View(model, layout, part, around) for part in range(stage, layout.parts, stages)]


Meter = Callable[[nn.Module, Sequence[nn.Module]], list[float]]


def find_layout(
    model: nn.Module,
    stages: int,
    inputs: dict[str, Any],
    method: str = "best",
    chunks: int = 1,
    meter: Meter | None = None,
) -> ModelSplit:
    """Split a whole model, and check that its parts reproduce its outputs.

    Args:
        model: the whole model.
        stages: number of stages.
        inputs: arguments of its forward, a small example.
        method: "best": balance operations, including modules outside of the blocks (parameters, if the operations of a
            block are unknown); "parameters": balance the blocks' parameters; "uniform": equal numbers of blocks.
        chunks: chunks per stage.
        meter: called with (model, blocks); returns costs before, in each, and after the blocks, equal on all ranks.
            None: `deepspeed.pipe.partition_cost.operations`.

    Returns:
        The split; the model is not changed.

    Raises:
        PipelineError: the model cannot be split; the message has the reason.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise PipelineError(
            f"{type(model).__name__} is an encoder-decoder: such models cannot be split into stages yet"
        )
    parts = stages * chunks
    container = _block_list(model, parts)
    blocks = list(model.get_submodule(container).children())
    layout = ModelSplit(container, [0, len(blocks)])
    outputs = layout.trace(model, inputs)
    costs = operations(model, blocks, inputs) if meter is None else meter(model, blocks)
    weights = [float(sum(p.numel() for p in block.parameters())) for block in blocks]
    if method == "uniform":
        bounds = partition_uniform(len(blocks), parts)
    elif method == "parameters" or not all(costs[1:-1]):  # a block with operations without formula must not be free
        bounds = partition_balanced(weights, parts)
    else:
        bounds = deal(costs, stages, chunks)
    if bounds[0] != 0 or bounds[-1] != len(blocks) or any(low >= high for low, high in itertools.pairwise(bounds)):
        raise PipelineError(f"bounds {bounds} do not deal the {len(blocks)} blocks of '{container}' to {parts} parts")
    layout.bounds, layout.costs = bounds, costs_of_parts(costs, bounds)
    layout.verify(model, inputs, outputs)
    return layout


def _block_list(model: nn.Module, parts: int) -> str:
    """Return the name of the largest outermost list of at least `parts` blocks; PipelineError if there is none."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if name and isinstance(module, (nn.ModuleList, nn.Sequential)) and any(True for _ in module.parameters())
    }
    outer = outermost(lists)
    long = {name: module for name, module in outer.items() if len(module) >= parts}
    if not long:
        names = ", ".join(f"{name} ({len(module)})" for name, module in outer.items()) or "none"
        raise PipelineError(
            f"{type(model).__name__} has no list of at least {parts} blocks to split at; its lists: {names}. Take "
            f"fewer stages, or describe it as a PipelineModule"
        )
    return max(long, key=lambda name: sum(p.numel() for p in long[name].parameters()))


def _around(model: nn.Module, container: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules with parameters that are neither the list of blocks nor contain it, by name."""
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
    """Context in which the modules run without autograd; `events` gets (name, whether autograd was on) of each call."""
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
        with torch.enable_grad():  # restores the previous mode, even after an error
            yield
    finally:
        for handle in handles:
            handle.remove()
