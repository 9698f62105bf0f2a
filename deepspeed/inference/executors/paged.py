"""Paged executor: one pass through the model's modules for all sequences, with paged attention.

Transformers models call a registered attention function and pass keys and values to a cache object. This module
provides both. `PagedCache` writes new keys and values to pages and returns the same tensors. From these tensors,
`attention` identifies the layer, whose pages it reads; PackingError if a module passes other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deepspeed.errors import PackingError
from deepspeed.foundation.hf_forward import IMMATERIAL, accepts, cache_argument, with_cache
from deepspeed.inference.adapters import applied, parts_of
from deepspeed.inference.executors.attention_ways import AttentionWay, LayerAttention
from deepspeed.inference.executors.ragged_batch import AttentionGroup, RaggedBatch

NAME = "deepspeed_pages"


class KVCache:
    """Keys and values of all layers, in pages. A layer's tensors are allocated when it is first written.

    Args:
        pages: number of pages.
        size: tokens per page.
    """

    def __init__(self, pages: int, size: int) -> None:
        self.pages, self.size = pages, size
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys and values [tokens, heads, head size] of a layer to the slots `slots` [tokens].

        Slots number all positions of all pages; those of page p start at (p + 1) · size.
        """
        if layer not in self.layers:
            self._make(layer, keys, values)
        for pool, rows in zip(self.layers[layer], (keys, values), strict=True):
            pool[slots] = rows.to(pool.dtype)

    def _make(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        slots = (self.pages + 1) * self.size
        keys, values = (x.new_empty((slots, *x.shape[1:])) for x in (keys, values))
        keys[: self.size] = 0  # page of zeros, read by padding
        values[: self.size] = 0
        self.layers[layer] = (keys, values)

    def resized(self, pages: int, size: int) -> KVCache:
        """Return an empty cache with the same layers and another number or size of pages."""
        store = KVCache(pages, size)
        for layer, (keys, values) in sorted(self.layers.items()):
            store._make(layer, keys, values)
        return store

    def copy(self, source: int, target: int) -> None:
        """Copy the keys and values of page `source` to page `target`, in all layers."""
        size, source, target = self.size, source + 1, target + 1
        for pool in (pool for pair in self.layers.values() for pool in pair):
            pool[target * size : (target + 1) * size] = pool[source * size : (source + 1) * size]

    def bytes_per_page(self) -> int:
        """Return the number of bytes of one page, over all layers."""
        return sum(pool[: self.size].nbytes for pair in self.layers.values() for pool in pair)


class NoLayers(list[Any]):
    """Empty list of cache layers; access to an element raises PackingError."""

    def __getitem__(self, index: Any) -> Any:
        raise PackingError("it keeps states of another kind in its cache than keys and values")


class Mask:
    """Attention mask as a function of (batch, head, query position, key position); by default causal."""

    def __init__(self, mask_function: Callable[..., torch.Tensor] = lambda b, h, q, k: k <= q, **_: Any) -> None:
        self.function = mask_function


class PagedCache(Cache):
    """Cache of Transformers for one pass over a ragged batch.

    Args:
        store: pages of keys and values.
        batch: the batch.
        ways: layers whose attention reads the pages in place, and how; the pages of others are gathered.
    """

    def __init__(
        self, store: KVCache, batch: RaggedBatch, ways: dict[int, tuple[AttentionWay, LayerAttention]] | None = None
    ) -> None:
        super().__init__(layers=NoLayers())
        self.store, self.batch, self.ways = store, batch, ways or {}
        self.calls: dict[int, LayerAttention] = {}  # attention by layer
        self.handed: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
        self.cached: set[int] = set()  # layers of this pass
        self.rules: dict[int, Mask] = {}  # mask by layer
        self.scales: dict[int, float | None] = {}  # scale of the scores by layer; None: not just a scale
        self.default = Mask()
        self.windows: dict[int, Mask] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):  # noqa: ANN201
        """Write keys and values [1, heads, rows, head size] of a layer to its pages, and return the same tensors.

        Raises:
            PackingError: another shape, or a second call for this layer.
        """
        rows = len(self.batch.tokens)
        for states in (key_states, value_states):
            if states.dim() != 4 or states.shape[0] != 1 or states.shape[2] != rows:
                raise PackingError(f"layer {layer_idx} caches a tensor of shape {tuple(states.shape)} for {rows} rows")
        if layer_idx in self.cached:
            raise PackingError(f"layer {layer_idx} is cached twice in one pass")
        self.cached.add(layer_idx)
        self.store.write(
            layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), self.batch.new_slots
        )
        self.handed[id(key_states)] = (layer_idx, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: sequences have different lengths, and the model gets explicit positions."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (`query_length`, 0) for the model's mask code; a `Mask` does not depend on these sizes."""
        return query_length, 0

    def rule(self, mask: Any, window: int | None) -> Mask:
        """Return the mask of a layer.

        Args:
            mask: mask that the model passes to `attention`; None: causal, with a sliding window of `window` if given.
            window: size of the sliding window.

        Raises:
            PackingError: `mask` is of another type, such as a tensor.
        """
        if isinstance(mask, Mask):
            return mask
        if mask is not None:
            raise PackingError(f"its attention gets a mask that the model builds itself ({type(mask).__name__})")
        if window is None:
            return self.default
        return self.windows.setdefault(window, Mask(lambda b, h, q, k: (k <= q) & (k > q - window)))


_current: ContextVar[PagedCache | None] = ContextVar("pages of the pass", default=None)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for all rows of a pass; an attention function of Transformers.

    Args:
        module: attention module.
        query: [1, heads, rows, head size].
        key: result of `PagedCache.update`; identifies the layer.
        value: the same.
        attention_mask: a `Mask`, or None for a causal mask.
        scaling: factor of the scores; None: 1 / sqrt(head size).
        options: further arguments of the model, such as `sliding_window`, `softcap` and `s_aux` (attention sinks).

    Returns:
        [1, rows, heads, head size], and None for the attention weights.

    Raises:
        PackingError: an argument is unsupported, keys or values were changed after `update`, or no pass is running.
    """
    cache = _current.get()
    if cache is None:
        raise PackingError(f"{NAME!r} has paged attention, which works only in a pass of deepspeed.inference")
    layer, keys, values = cache.handed.get(id(key), (None, None, None))
    if layer is None or keys is not key or values is not value:
        raise PackingError(f"{type(module).__name__} changes keys or values after they are cached")
    if query.shape[0] != 1 or query.shape[2] != len(cache.batch.tokens):
        raise PackingError(f"{type(module).__name__} attends with queries of shape {tuple(query.shape)}")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal) and not isinstance(attention_mask, Mask):
        raise PackingError(f"{type(module).__name__} looks ahead")
    strange = sorted(n for n, o in options.items() if o is not None and o is not False and n not in IMMATERIAL)
    if strange:
        raise PackingError(f"{type(module).__name__} attends with {', '.join(strange)}")
    rule = cache.rules[layer] = cache.rule(attention_mask, options.get("sliding_window"))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plain = options.get("softcap") is None and options.get("s_aux") is None
    cache.scales[layer] = scale if plain else None
    pools, sinks = cache.store.layers[layer], options.get("s_aux")
    sizes = query.shape[-1], value.shape[-1], query.shape[1], key.shape[1]
    call = LayerAttention(query.dtype, *sizes, scale, options.get("softcap"), sinks is not None)
    cache.calls[layer] = call
    if layer in cache.ways:
        way, chosen_for = cache.ways[layer]
        if not call.alike(chosen_for):
            raise PackingError(f"{type(module).__name__} attends otherwise than when its generator was created")
        return way.attend(chosen_for, query[0].transpose(0, 1), pools, cache.batch, sinks)[None], None
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])
    for group in cache.batch.groups:
        out[group.rows] = _attend(group, query[0], pools, rule, scale, options)
    return out[None], None


def _attend(
    group: AttentionGroup,
    query: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    rule: Mask,
    scale: float,
    options: dict[str, Any],
) -> torch.Tensor:
    """Return attention for one group of sequences: [sequences, rows, heads, head size].

    Args:
        group: the sequences.
        query: [heads, all rows, head size].
        pools: keys and values of the layer.
        rule: mask of the layer.
        scale: factor of the scores.
        options: as in `attention`.
    """
    sequences, rows = group.rows.shape
    k, v = (pool[group.slots].transpose(1, 2) for pool in pools)  # sequences, cached heads, longest, head size
    heads, cached = query.shape[0], k.shape[1]
    # Query heads of one key-value head become rows, so that keys and values need not be repeated.
    q = query[:, group.rows].transpose(0, 1)  # sequences, heads, rows, head size
    q = q.reshape(sequences, cached, heads // cached * rows, -1)
    mask = group.mask(rule.function, rule)
    if mask is not None and heads != cached and rows > 1:
        mask = mask.repeat(1, 1, heads // cached, 1)
    k, v = k.to(q.dtype), v.to(q.dtype)
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    if softcap is None and sinks is None:
        attended = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        return attended.reshape(sequences, heads, rows, -1).transpose(1, 2)
    # Soft cap of scores, or attention sinks: a score per head that receives weight but has no value.
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        per_head = q.shape[2] // (sinks.numel() // cached)
        sink_scores = sinks.reshape(1, cached, -1, 1).expand(sequences, -1, -1, per_head)
        scores = torch.cat([scores, sink_scores.reshape(*q.shape[:3], 1).to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    attended = weights[..., : k.shape[2]] @ v
    return attended.reshape(sequences, heads, rows, -1).transpose(1, 2)


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, Mask)


class PagedExecutor:
    """Executor that runs a batch in one pass through the model's modules.

    Args:
        model: causal LM of Transformers, in evaluation mode.
        store: pages of keys and values.
    """

    kind = "packed"
    unfused = ""  # reason why there is no native form

    def __init__(self, model: nn.Module, store: KVCache) -> None:
        self.model, self.store = model, store
        self.configs = self._find_configs()
        self.keeps, self._cached = accepts(model, "logits_to_keep"), cache_argument(model) or ""
        self.rules: dict[int, Mask] = {}  # recorded in the last pass
        self.scales: dict[int, float | None] = {}
        self.calls: dict[int, LayerAttention] = {}
        self.ways: dict[int, tuple[AttentionWay, LayerAttention]] = {}  # by layer; set by `select.settle_attention`

    def _find_configs(self) -> list[Any]:
        """Return the config objects from which the model's modules read their attention implementation."""
        configs: dict[int, Any] = {}
        stack = [m.config for m in self.model.modules() if hasattr(getattr(m, "config", None), "to_dict")]
        while stack:
            config = stack.pop()
            if id(config) not in configs:
                configs[id(config)] = config
                parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
                stack.extend(part for part in parts if part is not None)
        return list(configs.values())

    @contextmanager
    def _attending(self, cache: PagedCache) -> Iterator[None]:
        """Context in which the model's modules use paged attention with `cache`."""
        before = [config._attn_implementation_internal for config in self.configs]
        token = _current.set(cache)
        try:
            for config in self.configs:
                config._attn_implementation_internal = NAME
            yield
        finally:
            for config, implementation in zip(self.configs, before, strict=True):
                config._attn_implementation_internal = implementation
            _current.reset(token)

    def forgets(self, windows: dict[int, int]) -> str | None:
        """Check for a layer that attends to more tokens than the sliding-window cache of `generate` stores.

        Args:
            windows: number of tokens that the cache of `generate` stores, by layer.

        Returns:
            A description of the first such layer, or None.
        """
        row, first = torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long)
        for layer, window in windows.items():
            rule = self.rules.get(layer)
            if rule is not None and bool(rule.function(first, first, row + window + 1, first)):
                return f"layer {layer} masks nothing, and its cache in generate forgets all but {window} tokens"
        return None

    @torch.no_grad()
    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Run a batch and return the requested logits, [rows with logits, vocabulary].

        Raises:
            PackingError: the model uses its cache or attention in a way that is unsupported for several sequences.
        """
        keep = {"logits_to_keep": batch.wanted} if self.keeps else {}
        cache = PagedCache(self.store, batch, self.ways)
        inputs = {"input_ids": batch.tokens[None], "position_ids": batch.positions[None]}
        adapted = applied(self.model, parts_of(batch), len(batch.tokens))
        with self._attending(cache), adapted, batch.recording(self.model):
            output = self.model(**inputs, **with_cache(self._cached, cache), **keep)
        self.rules, self.scales, self.calls = cache.rules, cache.scales, cache.calls
        if not cache.handed:
            raise PackingError("it keeps nothing in the cache it is given")
        logits = output.logits[0]
        return logits if self.keeps and len(logits) == len(batch.wanted) else logits[batch.wanted]
