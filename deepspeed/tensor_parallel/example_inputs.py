"""Records what the modules of a model are called with on a small example input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from deepspeed.foundation.equivalence import evaluating
from deepspeed.foundation.hf_forward import accepts, caches_at_all
from deepspeed.foundation.log import describe_error, log_rank0
from deepspeed.foundation.pytree import tensors_in
from deepspeed.foundation.transformers_model import caching_configs
from deepspeed.tensor_parallel.channel_dependencies import ModuleInputs

PADDED = 3  # tokens at the end of the masked input


def masked(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The small input with padding at its end; None where a model takes no mask, or is given one already.

    Attention takes another way then: what it reads of itself, such as how often heads are repeated, shows only there.
    """
    ids = inputs.get("input_ids")
    if (
        not accepts(model, "attention_mask")
        or "attention_mask" in inputs
        or not isinstance(ids, torch.Tensor)
        or ids.dim() != 2
    ):
        return None
    mask = torch.ones_like(ids)
    mask[:, -PADDED:] = 0
    return {**inputs, "attention_mask": mask}


def all_calls(
    model: nn.Module, names: Iterable[str], inputs: dict[str, Any]
) -> tuple[dict[str, list[ModuleInputs]], Any, str]:
    """What modules are called with, plain and beside padding where they are given something else there.

    Returns:
        Calls by name, what the model returns, and what it raised beside padding.
    """
    names = list(names)
    plain, output = calls_of(model, names, inputs)
    found, padded = {name: [call] for name, call in plain.items()}, masked(model, inputs)
    if padded is None:
        return found, output, ""
    try:
        others = calls_of(model, names, padded)[0]
    except Exception as error:  # a model's forward may raise what it likes
        why = describe_error(error)
        log_rank0(f"attention beside padding is not looked at: {type(model).__name__} ended in {why}")
        return found, output, why
    for name, call in others.items():
        plainly = found.setdefault(name, [])
        if not plainly or (call.given(), call.told()) != (plainly[0].given(), plainly[0].told()):
            plainly.append(call)
    return found, output, ""


def calls_of(model: nn.Module, names: Iterable[str], inputs: dict[str, Any]) -> tuple[dict[str, ModuleInputs], Any]:
    """What modules are called with first in a forward, in their order, and what the model returns.

    Args:
        model: to be called.
        names: of the modules.
        inputs: of the model.
    """
    found: dict[str, ModuleInputs] = {}

    def note(name: str, call: ModuleInputs) -> None:
        if name not in found:
            found[name] = call.apart()

    with evaluating(model, use_cache=False):
        return found, _noted(model, names, inputs, note)


def _noted(
    model: nn.Module, names: Iterable[str], inputs: dict[str, Any], note: Callable[[str, ModuleInputs], None]
) -> Any:
    """What the model returns; `note` is told of each call of the modules."""
    modules = dict(model.named_modules())

    def noting(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: note(name, ModuleInputs.of(module, args, kwargs))

    handles = [modules[name].register_forward_pre_hook(noting(name), with_kwargs=True) for name in dict.fromkeys(names)]
    try:
        return model(**inputs)
    finally:
        for handle in handles:
            handle.remove()


def handed_states(model: nn.Module, calls: dict[str, ModuleInputs], inputs: dict[str, Any]) -> set[str]:
    """The modules that a model hands states of its own when it generates, as recurrent ones do: tensors in a list, of
    sizes that no module knows. What one module of a class is handed, all may be.

    Args:
        model: to be called once.
        calls: of its modules, in their order, without a cache.
        inputs: of the model.
    """
    caching = caches_at_all(model, inputs)
    if not calls or not (caching != inputs or caching_configs(model)):
        return set()
    modules = dict(model.named_modules())
    kinds: set[type] = set()

    def note(name: str, call: ModuleInputs) -> None:
        if _has_states(call, calls[name]):
            kinds.add(type(modules[name]))

    # A model may do without a cache, and raise what it likes.
    with evaluating(model, use_cache=True), contextlib.suppress(Exception):
        _noted(model, calls, caching, note)
    return {name for name in calls if type(modules[name]) in kinds}


def _has_states(call: ModuleInputs, without: ModuleInputs) -> bool:
    """Whether a list of tensors is among the arguments that is not there without a cache."""
    there = {key for key, value in without.arguments.items() if value is not None}
    return any(
        type(value) in (list, tuple) and key not in there and next(iter(tensors_in(value)), None) is not None
        for key, value in call.arguments.items()
    )
