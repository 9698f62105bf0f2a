"""Units of a module tree: what is gathered, computed again and published together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.nn import Parameter

from deepspeed.foundation.module_tree import children_of, own_parameters

LEAF_MARK = "_z3_leaf"  # set on modules to be treated as one unit (leaf_module, set_z3_leaf_modules)
STANDS_FOR = "_stands_for"  # in what stands for a module of another stage: that module


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Outermost children of containers that hold several modules of one class: the blocks of a deep model."""
    found: list[nn.Module] = []

    def visit(parent: nn.Module) -> None:
        contains = isinstance(parent, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        siblings = Counter(map(_kind, parent.children())) if contains else {}
        for child in children_of(parent):
            if getattr(child, LEAF_MARK, False):
                found.append(child)
            elif siblings.get(_kind(child), 0) > 1 and any(True for _ in child.children()):
                found.append(child)
            else:
                visit(child)

    visit(module)
    return found


def _kind(module: nn.Module) -> type[nn.Module]:
    """A module's class; that of what it stands for, where that is on another stage of a pipeline."""
    return type(vars(module).get(STANDS_FOR, module))


def owners_of(module: nn.Module) -> Iterator[tuple[Parameter, nn.Module]]:
    """Every parameter with the unit of each module that owns it, in the order of the tree; a tied one comes again."""
    blocks = set(repeated_blocks(module))

    def visit(current: nn.Module, block: nn.Module | None) -> Iterator[tuple[Parameter, nn.Module]]:
        block = block or (current if current in blocks else None)
        yield from ((param, block or current) for param in own_parameters(current))
        for child in children_of(current):
            yield from visit(child, block)

    return visit(module, None)


def units_of(module: nn.Module) -> dict[Parameter, nn.Module]:
    """The unit each parameter belongs to: the outermost repeated block around it, else the module that owns it."""
    homes: dict[Parameter, nn.Module] = {}
    for param, unit in owners_of(module):
        homes.setdefault(param, unit)
    return homes
