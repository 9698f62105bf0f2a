"""A model reduced to one stage: what other stages hold leaves it, and what several hold is placed as parts of a sum."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from deepspeed.pipe.split_model import ModelSplit, View, slot_of, stand_ins_of
from deepspeed.zero.layout.placement import Relation, place, placement_of


def holders(model: nn.Module, layout: ModelSplit, stages: int) -> list[set[str]]:
    """Names of the modules each stage keeps: those it runs, and those under whose name a parameter of them is known.

    Args:
        model: whole.
        layout: its parts; part p belongs to stage p % stages.
        stages: how many.
    """
    units = unit_names(layout)
    home: dict[int, str] = {}
    for name, param in model.named_parameters():
        home[id(param)] = next((unit for unit in units if name.startswith(unit + ".")), "")
    kept = [set[str]() for _ in range(stages)]
    for part in range(layout.parts):
        kept[part % stages] |= layout.runs(part)
    for names in kept:
        open_ = list(names)
        while open_:
            for param in model.get_submodule(open_.pop()).parameters():
                if home[id(param)] and home[id(param)] not in names:
                    names.add(home[id(param)])
                    open_.append(home[id(param)])
    return kept


def unit_names(layout: ModelSplit) -> list[str]:
    """Blocks, and modules around them that have parameters."""
    blocks = [f"{layout.container}.{at}" for at in range(layout.bounds[-1])]
    return [*blocks, *dict.fromkeys([*layout.before, *layout.after])]


def keep_stage(model: nn.Module, layout: ModelSplit, stages: int, stage: int) -> list[View]:
    """Reduce a model to one stage, in place; names of what stays are those of the whole model.

    Args:
        model: whole; parameters that stay are the objects they were.
        layout: its parts.
        stages: how many.
        stage: which.

    Returns:
        The stage's parts, by chunk.
    """
    kept = holders(model, layout, stages)
    _place(model, layout, kept)
    stand_ins = stand_ins_of(model, unit_names(layout))
    for name in unit_names(layout):
        if name not in kept[stage]:
            parent, key = slot_of(model, name)
            parent._modules[key] = stand_ins[name]
    around = {name: one for name, one in stand_ins.items() if not name.startswith(layout.container + ".")}
    return [View(model, layout, part, around) for part in range(stage, layout.parts, stages)]


def _place(model: nn.Module, layout: ModelSplit, kept: list[set[str]]) -> None:
    """Parameters that several stages hold have parts of a gradient there."""
    held: dict[int, set[int]] = {}
    params = dict(model.named_parameters())
    for stage, names in enumerate(kept):
        for name in names:
            for param in model.get_submodule(name).parameters():
                held.setdefault(id(param), set()).add(stage)
        for name in layout.strays:
            held.setdefault(id(params[name]), set()).add(stage)
    for param in model.parameters():
        if len(held.get(id(param), ())) > 1:
            row = placement_of(param)
            stages = frozenset(held[id(param)])
            place(param, replace(row, relations={**row.relations, "pp": Relation.PARTIAL}, stages=stages))
