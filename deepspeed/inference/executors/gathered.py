"""Gathered executor, for models with their own attention code: each sequence's KV cache is gathered into one tensor.

One call runs sequences with the same number of new rows and contexts of similar length, padded on the left as in
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
from deepspeed.inference.executors.paged import KVCache, NoLayers
from deepspeed.inference.executors.ragged_batch import AttentionGroup, RaggedBatch

_MISSING = object()
Table = dict[str, Any]


class ModuleState:
    """Attributes and buffers that one request has changed on a model's modules.

    Some models store recurrent state or the longest rotary length in their modules, so interleaved requests would mix
    them up. `turn` swaps the values per request. Objects are swapped, not copied, so in-place changes stay with a
    request only for tensors that it created. Plain numbers, such as a hook's counter, are not swapped. The set of
    modules may change from turn to turn.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own: list[tuple[Table, str, Any]] = []

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context in which the modules have the state of this request; on exit the previous state is restored."""
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
        """Yield (table, name, (value now, value before)) for each entry that is a different object than before."""
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
    """Transformers cache passed to the model for one padded batch of sequences."""

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
        """Store rows [sequences, heads, rows, head size] and return the whole contexts."""
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
        """Return the number of positions before the new rows, padding included."""
        return self.slots.shape[1] - self.rows

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the length of the keys and the position of the first key."""
        return self.slots.shape[1], 0


class GatheringExecutor:
    """Executor that makes one model call per group of similar sequences. The model is a causal LM in eval mode that
    stores keys and values only in the cache argument. With `even`, all contexts of one call have the same length."""

    kind = "gathered"

    def __init__(self, model: nn.Module, store: KVCache, even: bool = False) -> None:
        self.model, self.store, self.even = model, store, even
        self.keeps, self._cached = accepts(model, "logits_to_keep"), cache_argument(model) or ""
        self.placed = accepts(model, "position_ids")

    @torch.no_grad()
    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Compute the requested logits, [wanted, vocabulary].

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
            output = self.model(input_ids=batch.tokens[group.rows], **with_cache(self._cached, cache), **inputs)
            if not cache.layer_used:
                raise PackingError("it keeps nothing in the cache it is given")
            for sequence_logits, i, count in zip(output.logits, chosen, wanted, strict=True):
                logits[i] = sequence_logits[len(sequence_logits) - count :]
        return torch.cat([logits[i] for i in range(len(batch.spans))])
