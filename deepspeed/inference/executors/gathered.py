"""Gathered executor, for models with their own attention code: the pages of each sequence are gathered into one tensor.

A model call runs sequences with equal numbers of new rows and contexts of similar length, padded on the left as in
`generate`. If a model does not support such padding, a call runs only contexts of equal length.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from deepspeed.errors import PackingError
from deepspeed.foundation.hf_forward import accepts, cache_argument, with_cache
from deepspeed.inference.adapters import Part, applied
from deepspeed.inference.executors.paged import KVCache, NoLayers
from deepspeed.inference.executors.ragged_batch import AttentionGroup, RaggedBatch

_MISSING = object()
Table = dict[str, Any]


class ModuleState:
    """Attributes and buffers of a model's modules that one request has changed.

    Some models store recurrent state or the longest rotary length in their modules; interleaved requests would
    overwrite each other's values. Therefore, `turn` sets and resets the values of one request. Values are not copied:
    in-place changes of tensors that other requests also use are not separated. Changes of numbers only, such as a
    hook's counter, are kept for all requests.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own: list[tuple[Table, str, Any]] = []

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context in which the modules have this request's values; on exit, the previous values are restored."""
        before = [(module, vars(module).copy(), module._buffers.copy()) for module in self._model.modules()]
        for table, name, value in self._own:
            self._put(table, name, value)
        try:
            yield
        finally:
            self._own = []
            for module, attributes, buffers in before:
                changes = [*self._changed(vars(module), attributes), *self._changed(module._buffers, buffers)]
                if all(value is _MISSING or isinstance(value, int | float) for *_, pair in changes for value in pair):
                    continue
                for table, name, (now, was) in changes:
                    self._own.append((table, name, now))
                    self._put(table, name, was)

    @staticmethod
    def _changed(table: Table, before: Table) -> Iterator[tuple[Table, str, tuple[Any, Any]]]:
        """Yield (table, name, (new value, old value)) for each entry of `table` that is another object in `before`."""
        if table.keys() == before.keys() and all(map(operator.is_, table.values(), before.values())):
            return
        for name in {**before, **table}:
            pair = table.get(name, _MISSING), before.get(name, _MISSING)
            if pair[0] is not pair[1]:
                yield table, name, pair

    @staticmethod
    def _put(table: Table, name: str, value: Any) -> None:
        if value is _MISSING:
            table.pop(name, None)
        else:
            table[name] = value


class GatheringCache(Cache):
    """Cache of Transformers for one call of the model with a padded batch of sequences.

    Args:
        store: pages of keys and values.
        group: sequences with equal numbers of new rows.
    """

    def __init__(self, store: KVCache, group: AttentionGroup) -> None:
        super().__init__(layers=NoLayers())
        sequences, rows = group.rows.shape
        self.store, self.rows, self.sequences = store, rows, sequences
        longest = group.slots.shape[1]
        positions = torch.arange(longest, device=group.slots.device) - (longest - group.ends)[:, None]
        self.seen = positions >= 0  # [sequences, longest]: False for the padding on the left
        self.slots = group.slots.gather(1, positions.clamp(min=0)) * self.seen
        self.layer_used: set[int] = set()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):  # noqa: ANN201
        """Store new keys and values [sequences, heads, rows, head size] of a layer.

        Returns:
            Keys and values of the whole contexts, padded on the left, [sequences, heads, longest, head size].

        Raises:
            PackingError: another shape, or a second call for this layer.
        """
        for states in (key_states, value_states):
            fits = states.dim() == 4 and states.shape[0] == self.sequences and states.shape[2] == self.rows
            if not fits:
                raise PackingError(f"layer {layer_idx} caches a tensor of shape {tuple(states.shape)}")
        if layer_idx in self.layer_used:
            raise PackingError(f"layer {layer_idx} is cached twice in one pass")
        self.layer_used.add(layer_idx)
        new = [states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states)]
        self.store.write(layer_idx, new[0], new[1], self.slots[:, -self.rows :].flatten())
        pools = self.store.layers[layer_idx]
        keys, values = (pool[self.slots].transpose(1, 2).to(key_states.dtype) for pool in pools)
        return keys.contiguous(), values.contiguous()  # contiguous as from other caches: some models call view

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions before the new rows, including padding."""
        return self.slots.shape[1] - self.rows

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (number of keys, position of the first key), for the model's mask code."""
        return self.slots.shape[1], 0


class GatheringExecutor:
    """Executor that calls the model once for each group of similar sequences.

    Args:
        model: causal LM in evaluation mode that stores keys and values only in its cache argument.
        store: pages of keys and values.
        even: whether all contexts of one call must have the same length.
    """

    kind = "gathered"

    def __init__(self, model: nn.Module, store: KVCache, even: bool = False) -> None:
        self.model, self.store, self.even = model, store, even
        self.keeps, self._cached = accepts(model, "logits_to_keep"), cache_argument(model) or ""
        self.placed = accepts(model, "position_ids")

    @torch.no_grad()
    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Run a batch and return the requested logits, [rows with logits, vocabulary].

        Raises:
            PackingError: the model uses its cache in a way that `GatheringCache` does not support.
        """
        logits: dict[int, torch.Tensor] = {}
        for group, chosen in zip(batch.groups, batch.chosen, strict=True):
            wanted = [batch.spans[i].wanted for i in chosen]
            cache = GatheringCache(self.store, group)
            inputs: dict[str, Any] = {"attention_mask": cache.seen.long()}
            if self.placed:
                inputs["position_ids"] = group.positions
            if self.keeps:
                inputs["logits_to_keep"] = max(*wanted, 1)
            count, adapters = group.rows.shape[1], [batch.spans[i].adapter for i in chosen]
            parts: list[Part] = [
                (slice(n * count, (n + 1) * count), a) for n, a in enumerate(adapters) if a is not None
            ]
            with applied(self.model, parts, group.rows.numel()), batch.recording(self.model, group.rows):
                output = self.model(input_ids=batch.tokens[group.rows], **with_cache(self._cached, cache), **inputs)
            if not cache.layer_used:
                raise PackingError("it keeps nothing in the cache it is given")
            for sequence_logits, i, count in zip(output.logits, chosen, wanted, strict=True):
                logits[i] = sequence_logits[len(sequence_logits) - count :]
        return torch.cat([logits[i] for i in range(len(batch.spans))])
