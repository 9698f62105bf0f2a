"""Units of a model: modules that are all-gathered, resharded and recomputed as a whole at stage 3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn import Parameter

from deepspeed.errors import ArgumentError
from deepspeed.foundation.module_tree import children_of, own_parameters

LEAF_MARK = "_z3_leaf"  # attribute of modules that are marked as units (leaf_module, set_z3_leaf_modules)
STANDS_FOR = "_stands_for"  # attribute of placeholders of other pipeline stages: the original module


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, such as its transformer layers, in its order.

    These are modules marked as units, and modules in a ModuleList, Sequential or ModuleDict that have children and a
    sibling of the same class. The root module, and blocks within blocks, are not returned.
    """
    blocks: list[nn.Module] = []

    def visit(parent: nn.Module) -> None:
        contains = isinstance(parent, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        siblings = Counter(map(_kind, parent.children())) if contains else {}
        for child in children_of(parent):
            if getattr(child, LEAF_MARK, False):
                blocks.append(child)
            elif siblings.get(_kind(child), 0) > 1 and any(True for _ in child.children()):
                blocks.append(child)
            else:
                visit(child)

    visit(module)
    return blocks


def _kind(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module; for a placeholder of another pipeline stage, the class of the original module."""
    return type(vars(module).get(STANDS_FOR, module))


def owners_of(module: nn.Module) -> Iterator[tuple[Parameter, nn.Module]]:
    """Yield each parameter with its unit, in the order of the model; tied parameters once per module that has them."""
    blocks = set(repeated_blocks(module))

    def visit(current: nn.Module, block: nn.Module | None) -> Iterator[tuple[Parameter, nn.Module]]:
        block = block or (current if current in blocks else None)
        yield from ((param, block or current) for param in own_parameters(current))
        for child in children_of(current):
            yield from visit(child, block)

    return visit(module, None)


def units_of(module: nn.Module) -> dict[Parameter, nn.Module]:
    """Return the unit of each parameter: the repeated block around it, or, without one, its own module.

    Tied parameters have the first unit.
    """
    homes: dict[Parameter, nn.Module] = {}
    for param, unit in owners_of(module):
        homes.setdefault(param, unit)
    return homes


def set_z3_leaf_modules(
    model: nn.Module, classes_or_names: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules as units, which are gathered as a whole at stage 3; call this before `deepspeed.initialize`.

    Args:
        model: root module.
        classes_or_names: classes (without subclasses), class names (short or with module path), or qualified names of
            modules.
        raise_if_not_found: raise if no module matches.

    Returns:
        Marked modules.

    Raises:
        ArgumentError: no module matches, and `raise_if_not_found` is True.
    """
    wanted = list(classes_or_names)
    leaves = [m for name, m in model.named_modules() if _matches(name, m, wanted)]
    if not leaves and raise_if_not_found:
        raise ArgumentError(f"no module of {type(model).__name__} matches {wanted}; give classes or qualified names")
    for module in leaves:
        setattr(module, LEAF_MARK, True)
    return leaves


def _matches(name: str, module: nn.Module, wanted: list[Any]) -> bool:
    cls = type(module)
    for entry in wanted:
        if isinstance(entry, type) and cls is entry:
            return True
        if isinstance(entry, str) and entry in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}", name):
            return True
    return False


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules as units by qualified name; like `set_z3_leaf_modules`, so class names match too."""
    return set_z3_leaf_modules(model, module_names, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules as units by the end of their qualified names; otherwise like `set_z3_leaf_modules`."""
    suffixes = tuple(module_name_suffixes)
    names = [name for name, _ in model.named_modules() if name.endswith(suffixes)]
    return set_z3_leaf_modules(model, names or suffixes, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, classes_or_names: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Unmark the modules that `set_z3_leaf_modules` would mark, and return them; same arguments and errors."""
    wanted = list(classes_or_names)
    leaves = [m for name, m in model.named_modules() if _matches(name, m, wanted)]
    if not leaves and raise_if_not_found:
        raise ArgumentError(f"no module of {type(model).__name__} matches {wanted}")
    for module in leaves:
        setattr(module, LEAF_MARK, False)
    return leaves


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a model that are marked as units."""
    return [m for m in model.modules() if z3_leaf_module(m)]


def z3_leaf_module(module: nn.Module) -> bool:
    """Return whether a module is marked as a unit."""
    return bool(getattr(module, LEAF_MARK, False))


def set_z3_leaf_module(module: nn.Module, flag: bool = True) -> None:
    """Mark one module as a unit (`flag=True`), or remove its mark (`flag=False`)."""
    setattr(module, LEAF_MARK, flag)


def mark_leaves(model: nn.Module, section: Any) -> None:
    """Mark the modules of the configuration as units.

    Args:
        model: root module.
        section: `zero_optimization.leaf_module`, with `classes`, `names` and `name_suffixes`.
    """
    classes, names, suffixes = list(section.classes or ()), list(section.names or ()), list(section.name_suffixes or ())
    for name, module in model.named_modules():
        if _matches(name, module, classes) or name in names or any(name.endswith(s) for s in suffixes):
            setattr(module, LEAF_MARK, True)
