"""The arguments and outputs of the forward of Transformers models. The only file with the names of the KV cache.

Transformers renames arguments: keys and values are `past_key_values` up to 5.23 and `cache` from 5.24 on, while models
with their own code keep the older name. So an argument is found in the signature of the called forward, by any of its
names or by its annotation, and a cache in a call or an output by its type. Transformers is not imported.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

CACHES = ("cache", "past_key_values", "cache_params")  # of a model's forward, the newest first
_OF_LAYERS = (*CACHES, "past_key_value", "layer_past")
_USES = "use_cache"
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
    """The arguments that a model's forward names, and those of the model inside, where a wrapper such as PEFT's hands
    on what it does not name."""
    own = inspect.signature(model.forward).parameters
    inner = getattr(model, "get_base_model", None)
    if not callable(inner) or not hands_on(own):
        return own
    inside: Any = inner()
    return own if inside is model else {**arguments(inside), **own}


def hands_on(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether keyword arguments that are not named are taken too."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def accepts(model: Any, name: str) -> bool:
    """Whether a model's forward names an argument."""
    return name in arguments(model)


def cache_argument(model: Any) -> str | None:
    """What forward calls keys and values of earlier tokens; None: it takes none.

    A known name, whatever its annotation says (several models still say tuples), but for a dict, which is another thing
    (XLM's `cache`); else an argument that is annotated as a cache. That it is one shows when the model is run.
    """
    named = {name: _text(parameter.annotation) for name, parameter in arguments(model).items()}
    known = [name for name in CACHES if name in named and not _DICT.match(named[name])]
    return next(iter(known or [name for name, text in named.items() if _KINDS.search(text)]), None)


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def with_cache(name: str, cache: Any) -> dict[str, Any]:
    """Arguments by which forward reads and writes a cache, which it calls `name`."""
    return {name: cache, _USES: True}


def without_cache(model: Any) -> dict[str, bool]:
    """Arguments by which forward keeps no keys and values; empty where it cannot be told.

    One that takes a cache, and hands on what it does not name, hands this on too.
    """
    named = arguments(model)
    takes = _USES in named or (hands_on(named) and cache_argument(model) is not None)
    return {_USES: False} if takes else {}


def caches_at_all(model: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a model that is to keep keys and values, as far as it can be told."""
    return {**call, _USES: True} if _USES in call or without_cache(model) else dict(call)


def caches_in(call: Mapping[str, Any]) -> Iterator[str]:
    """Names of the arguments of a call that are caches: by what they are, or older forms by their name."""
    module = sys.modules.get("transformers.cache_utils")
    for name, value in call.items():
        is_cache = module is not None and isinstance(value, module.Cache)
        if value is not None and (is_cache or name in _OF_LAYERS):
            yield name


def uncached(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a layer without its caches: repeated, it writes into none."""
    return {**call, **dict.fromkeys(caches_in(call))} | ({_USES: False} if _USES in call else {})


def returned_cache(output: Any) -> Any:
    """The cache that a forward returns, None where there is none."""
    named: Any = output if hasattr(output, "items") else {}
    return next((named[name] for name in caches_in(named)), None)


def counts_items(loss: Any) -> bool:
    """Whether a loss of tokens is the sum over them divided by `num_items_in_batch`, by calling it; true too where it
    cannot be called on a small example.

    One that lets the argument pass unread gives a mean, which sums over ranks to a multiple of what was meant.
    """
    logits = torch.arange(24.0).reshape(1, 3, 8).cos()
    labels = torch.tensor([[1, 2, 3]])
    try:
        whole, quarter = (loss(logits, labels, vocab_size=8, num_items_in_batch=count) for count in (1, 4))
        return bool(torch.isclose(whole, 4 * quarter))
    except Exception:  # a client's own: it may want arguments of its own, which its model gives it
        return True
