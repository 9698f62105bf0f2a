"""Gathered executor: models with their own attention get each sequence's cache as one tensor.

Sequences with the same number of rows and contexts of similar length are one call, padded on the left as `generate`
pads a batch; if a model does not support that, only contexts of equal length are batched.
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
    """The attributes and buffers that one request has set on a model's modules.

    Some recurrent models hold their state there, rotations the longest length that they have seen: requests that take
    turns would go on with each other's. Values are exchanged, not copied: a change in place counts as the request's
    only in tensors that it set itself. Plain numbers alone, such as a hook's count, are left where they are. The
    modules may be others from turn to turn.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own: list[tuple[Table, str, Any]] = []

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Inside, modules have the state of this request; afterwards, that from before."""
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
        """(table, name, (value now, value before)) of what is another object."""
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
    """The cache that the model is handed for a padded batch of sequences, in one call."""

    def __init__(self, store: KVCache, group: AttentionGroup) -> None:
        super().__init__(layers=NoLayers())
        sequences, rows = group.rows.shape
        self.store, self.rows, self.sequences = store, rows, sequences
        longest = group.slots.shape[1]
        positions = torch.arange(longest, device=group.slots.device) - (longest - group.ends)[:, None]
        self.seen = positions >= 0  # [sequences, longest]: what is no padding, on the left
        self.slots = group.slots.gather(1, positions.clamp(min=0)) * self.seen
        self.layer_used: set[int] = set()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):  # noqa: ANN201
        """Store rows [sequences, heads, rows, head size]; returns the whole contexts."""
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
        return keys.contiguous(), values.contiguous()  # as other caches hand them out: some models view them

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the new rows, padding included."""
        return self.slots.shape[1] - self.rows

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length of the keys, and their first position."""
        return self.slots.shape[1], 0


class GatheringExecutor:
    """Runs batches, a call for each group of them, of a causal LM in eval mode that keeps keys and values in the cache
    it is given. With `even`, contexts of one call have to have one length."""

    kind = "gathered"

    def __init__(self, model: nn.Module, store: KVCache, even: bool = False) -> None:
        self.model, self.store, self.even = model, store, even
        self.keeps, self._cached = accepts(model, "logits_to_keep"), cache_argument(model) or ""
        self.placed = accepts(model, "position_ids")

    @torch.no_grad()
    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits of the wanted rows, [wanted, vocabulary].

        Raises:
            PackingError: the model does with its cache what this one cannot serve.
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
