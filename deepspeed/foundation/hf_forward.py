"""Arguments and outputs of the forward of Transformers models; the names of the KV cache are only in this file.

Transformers renames arguments: the KV cache is `past_key_values` up to 5.23 and `cache` from 5.24 on, while models
with custom code keep the older name. So this module looks in the signature of the called forward for any of the names
or for the annotation, and recognizes a cache in a call or an output by type or name. Transformers is not imported.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

CACHES = ("cache", "past_key_values", "cache_params")  # of a model's forward, the newest first
_OF_LAYERS = (*CACHES, "past_key_value", "layer_past")
_USES = "use_cache"
CACHE_POSITION = "cache_position"  # of a layer: indices of its tokens in the cache
_DICT = re.compile(r"(Optional\[)?[dD]ict\b")
_KINDS = re.compile(r"\b(Dynamic|EncoderDecoder|Hybrid|Static)?Cache\b")
# What attention may be told besides its tensors without a change of its result.
IMMATERIAL = frozenset({
    *_OF_LAYERS, _USES, "attention_mask", "attention_type", "cache_position", "deterministic", "dropout", "head_mask",
    "is_causal", "labels", "layer_head_mask", "layer_idx", "logits_to_keep", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits", "position_embeddings",
    "position_ids", "return_dict", "return_legacy_cache", "s_aux", "scaling", "sliding_window", "softcap",
    "target_dtype", "training", "use_top_left_mask",
})  # fmt: skip


def arguments(model: Any) -> Mapping[str, inspect.Parameter]:
    """Return the named arguments of a model's forward; for a wrapper such as PEFT's, also those of the inner model."""
    own = inspect.signature(model.forward).parameters
    inner = getattr(model, "get_base_model", None)
    if not callable(inner) or not hands_on(own):
        return own
    inside: Any = inner()
    return own if inside is model else {**arguments(inside), **own}


def hands_on(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether the signature accepts arbitrary keyword arguments."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def named_arguments(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a model's forward by name, however they were passed.

    Positional arguments that the forward has no name for are left out.
    """
    if not args:
        return dict(kwargs)
    own = inspect.signature(model.forward).parameters
    passed_on = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in own.values())
    parameters = arguments(model) if passed_on else own
    by_position = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {**dict(zip(by_position, args, strict=False)), **kwargs}


def accepts(model: Any, name: str) -> bool:
    """Return whether a model's forward has an argument of this name."""
    return name in arguments(model)


def cache_argument(model: Any) -> str | None:
    """Return the name of the KV cache argument of a model's forward; None if there is none.

    An argument with a known name is the cache unless it is annotated as a dict (such as XLM's `cache`); several models
    annotate tuples. Otherwise, it is the first argument that is annotated as a cache. Whether the model uses the
    argument is only known at run time.
    """
    named = {name: _text(parameter.annotation) for name, parameter in arguments(model).items()}
    known = [name for name in CACHES if name in named and not _DICT.match(named[name])]
    return next(iter(known or [name for name, text in named.items() if _KINDS.search(text)]), None)


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def with_cache(name: str, cache: Any) -> dict[str, Any]:
    """Return arguments that pass `cache` to forward under the argument `name`, with `use_cache` True."""
    return {name: cache, _USES: True}


def without_cache(model: Any) -> dict[str, bool]:
    """Return arguments that disable the KV cache in forward; empty if unknown.

    A model with a cache argument and arbitrary keyword arguments also accepts `use_cache`.
    """
    named = arguments(model)
    takes = _USES in named or (hands_on(named) and cache_argument(model) is not None)
    return {_USES: False} if takes else {}


def caches_at_all(model: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with `use_cache` True; unchanged if the model does not accept `use_cache`."""
    return {**call, _USES: True} if _USES in call or without_cache(model) else dict(call)


def caches_in(call: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the arguments in a call that are KV caches, by their type or name."""
    module = sys.modules.get("transformers.cache_utils")
    for name, value in call.items():
        is_cache = module is not None and isinstance(value, module.Cache)
        if value is not None and (is_cache or name in _OF_LAYERS):
            yield name


def uncached(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer's arguments with KV caches None and a given `use_cache` False, so that a call fills no cache."""
    return {**call, **dict.fromkeys(caches_in(call))} | ({_USES: False} if _USES in call else {})


def returned_cache(output: Any) -> Any:
    """Return the KV cache in a forward's output, or None."""
    named: Any = output if hasattr(output, "items") else {}
    return next((named[name] for name in caches_in(named)), None)


def counts_items(loss: Any) -> bool:
    """Return whether a loss function divides a sum over tokens by `num_items_in_batch`, tested with a small call.

    The result is True if the call fails. A loss that ignores the argument returns a mean, and the sum of means over
    ranks is a multiple of the correct loss.
    """
    logits = torch.arange(24.0).reshape(1, 3, 8).cos()
    labels = torch.tensor([[1, 2, 3]])
    try:
        whole, quarter = (loss(logits, labels, vocab_size=8, num_items_in_batch=count) for count in (1, 4))
        return bool(torch.isclose(whole, 4 * quarter))
    except Exception:  # a client's own: it may want arguments of its own, which its model gives it
        return True
