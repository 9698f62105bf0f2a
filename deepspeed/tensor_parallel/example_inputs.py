"""Recording of the arguments of a model's modules, in a forward on a small example input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from deepspeed.foundation.equivalence import evaluating
from deepspeed.foundation.hf_forward import accepts, caches_at_all
from deepspeed.foundation.log import describe_error, log_rank0
from deepspeed.foundation.transformers_model import caching_configs
from deepspeed.tensor_parallel.channel_dependencies import ModuleInputs

PADDED = 3  # padding tokens at the end of the masked input


def all_calls(
    model: nn.Module, names: Iterable[str], inputs: dict[str, Any]
) -> tuple[dict[str, list[ModuleInputs]], Any, str]:
    """Run a model on `inputs`, and record the first call of each named module without and with padding.

    Attention may take another path with padding, and some of its attributes, such as the repetition of key-value heads,
    are read only there. A call with padding is kept if its shapes or constants differ. A model without a mask argument,
    with a mask in `inputs`, or without 2-D `input_ids`, runs once.

    Returns:
        The calls by module name, the model's output, and the error of the run with padding ("" if there was none).
    """
    names = list(names)
    first, output = calls_of(model, names, inputs)
    calls, ids = {name: [call] for name, call in first.items()}, inputs.get("input_ids")
    masked = accepts(model, "attention_mask") and "attention_mask" not in inputs
    if not masked or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return calls, output, ""
    mask = torch.ones_like(ids)
    mask[:, -PADDED:] = 0
    try:
        others = calls_of(model, names, {**inputs, "attention_mask": mask})[0]
    except Exception as error:  # a model's forward may raise any error
        why = describe_error(error)
        log_rank0(f"attention with padding is not traced: {type(model).__name__} ended in {why}")
        return calls, output, why
    for name, call in others.items():
        known = calls.setdefault(name, [])
        if not known or (call.shapes(), call.constants()) != (known[0].shapes(), known[0].constants()):
            known.append(call)
    return calls, output, ""


def calls_of(model: nn.Module, names: Iterable[str], inputs: dict[str, Any]) -> tuple[dict[str, ModuleInputs], Any]:
    """Run a model on `inputs`; return the first calls of the modules `names`, in call order, and the output."""
    calls: dict[str, ModuleInputs] = {}

    def note(name: str, call: ModuleInputs) -> None:
        if name not in calls:
            calls[name] = call.apart()

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fast path of torch's encoder layers calls no modules
    try:
        with evaluating(model, use_cache=False):
            return calls, _noted(model, names, inputs, note)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _noted(
    model: nn.Module, names: Iterable[str], inputs: dict[str, Any], note: Callable[[str, ModuleInputs], None]
) -> Any:
    """Run the model, call `note(name, arguments)` before each call of the named modules, and return the output."""
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
    """Return the names of the modules that receive recurrent state (lists of tensors) as arguments in generation.

    If one module of a class receives state, all modules of the class are included. `calls` are the recorded calls of a
    forward without cache, in call order.
    """
    caching = caches_at_all(model, inputs)
    if not calls or not (caching != inputs or caching_configs(model)):
        return set()
    modules = dict(model.named_modules())
    kinds: set[type] = set()

    def note(name: str, call: ModuleInputs) -> None:
        if call.has_states_beyond(calls[name]):
            kinds.add(type(modules[name]))

    # A model may have no cache, and raise any error.
    with evaluating(model, use_cache=True), contextlib.suppress(Exception):
        _noted(model, calls, caching, note)
    return {name for name in calls if type(modules[name]) in kinds}
