"""Parameters and children of a module, including those that torch does not list.

A Keras model keeps its layers in a list of its own and lists all of their variables again at the root, in a container
that never runs; hooks on layers work nevertheless. Keras is recognized by attributes of its layers: it is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn
from torch.nn import Parameter

# Of a Keras layer: what torch is shown of its variables, the variables by kind, its random seeds, the layers below.
_SHOWN, _TRAINED, _KEPT, _SEEDS, _BELOW = (
    "_torch_params",
    "_trainable_variables",
    "_non_trainable_variables",
    "_seed_generators",
    "_layers",
)


def own_parameters(module: nn.Module) -> list[Parameter]:
    """Return the parameters that a module itself owns, without those of submodules."""
    if not _is_keras(module):
        own = module._parameters.values()  # pyright: ignore[reportPrivateUsage]
        return [param for param in own if param is not None]
    return _values([*_listed(module, _TRAINED), *_listed(module, _KEPT)])


def children_of(module: nn.Module) -> list[nn.Module]:
    """Return the direct children of a module, each once."""
    if not _is_keras(module):
        return list(module.children())
    shown = [child for name, child in module.named_children() if name != _SHOWN]
    layers = [layer for layer in _listed(module, _BELOW) if isinstance(layer, nn.Module)]
    return list(dict.fromkeys([*layers, *shown]))


def modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all its descendants, each once, parents first."""
    seen: set[nn.Module] = set()
    ahead = [module]
    while ahead:
        current = ahead.pop()
        if current not in seen:
            seen.add(current)
            yield current
            ahead += reversed(children_of(current))


def own_state(module: nn.Module) -> dict[Parameter, None]:
    """Return the parameters that a model changes in forward, like buffers; each rank has its own values.

    These are the non-trainable variables of Keras layers (such as running statistics) and the states of Keras' random
    seeds, in the order of the layers. Other models have none. Weights that were frozen later are not included.
    """
    written: dict[Parameter, None] = {}
    for child in modules_of(module):
        if _is_keras(child):
            seeds = [getattr(generator, "state", None) for generator in _listed(child, _SEEDS)]
            written |= dict.fromkeys(p for p in _values([*_listed(child, _KEPT), *seeds]) if not p.requires_grad)
    return written


def running_statistics(module: nn.Module) -> list[Parameter]:
    """Return the running means and variances of a Keras BatchNormalization; empty for other modules."""
    statistics = _values([module.__dict__.get(name) for name in ("moving_mean", "moving_variance")])
    return [param for param in statistics if not param.requires_grad]


def layer_dtypes(module: nn.Module) -> dict[str, str]:
    """Return the compute dtype (dtype policy) of each Keras layer with weights, by name; empty for other models."""
    return {
        str(getattr(child, "name", type(child).__name__)): str(getattr(child, "compute_dtype", "float32"))
        for child in modules_of(module)
        if _is_keras(child) and _listed(child, _TRAINED)
    }


def _is_keras(module: nn.Module) -> bool:
    return _TRAINED in module.__dict__ and _KEPT in module.__dict__


def _listed(module: nn.Module, name: str) -> list[Any]:
    entries = module.__dict__.get(name)
    return list(cast("Iterable[Any]", entries)) if isinstance(entries, (list, tuple)) else []


def _values(variables: Iterable[Any]) -> list[Parameter]:
    values = (getattr(variable, "value", None) for variable in variables)
    return [value for value in values if isinstance(value, Parameter)]
