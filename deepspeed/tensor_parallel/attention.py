"""Tensor parallelism for `nn.MultiheadAttention`: its matrices are plain parameters, so it is split by heads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed.comm.collectives.autograd import enter, gather_from, reduce_from
from deepspeed.foundation.partition import partition_uniform
from deepspeed.tensor_parallel.channel_dependencies import ChannelDependencies, Segments, TensorSharding
from deepspeed.tensor_parallel.layers import SliceLocation, cut_tensor
from deepspeed.tensor_parallel.trace import ShardableRegion, join

_PACKED, _APART = ("in_proj_weight",), ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_BIAS, _OUT = "in_proj_bias", "out_proj.weight"


def _columns(attention: Any) -> tuple[str, ...]:
    """Return the names of the query, key and value matrices: one packed, or three if keys or values differ in width."""
    return _APART if attention.in_proj_weight is None else _PACKED


def attention_regions(modules: Mapping[str, nn.Module], used: Iterable[str]) -> list[ShardableRegion]:
    """Return a region for each `nn.MultiheadAttention` with all of its matrices in `used`, the names from a trace."""
    seen = set(used)
    attentions = {name: m for name, m in modules.items() if name and isinstance(m, nn.MultiheadAttention)}
    regions = [
        ShardableRegion(name, [join(name, column) for column in _columns(module)], [join(name, _OUT)], heads=True)
        for name, module in attentions.items()
    ]
    return [region for region in regions if seen.issuperset(region.matrices())]


def share_heads(attention: Any, region: ShardableRegion, ranks: int) -> ChannelDependencies | str:
    """Divide the heads of an attention, the module of `region`, over ranks, or return the reason to keep it whole."""
    if type(attention).forward is not nn.MultiheadAttention.forward:
        return f"{type(attention).__name__} has a forward of its own over the matrices of nn.MultiheadAttention"
    if attention.bias_k is not None or attention.add_zero_attn:
        return "its keys have an entry more (add_bias_kv, add_zero_attn)"
    heads, width = attention.num_heads, attention.head_dim
    if heads < ranks:
        return f"{heads} heads cannot be shared out to {ranks} ranks"
    bounds = partition_uniform(heads, ranks)
    rows = [(low * width, (high - low) * width) for low, high in zip(bounds, bounds[1:], strict=False)]
    whole = attention.embed_dim
    # Queries, keys and values of the rank's heads, one after the other.
    parts: list[Segments] = [tuple((part * whole + low, length) for part in range(3)) for low, length in rows]
    shares = ChannelDependencies(region, [(row,) for row in rows])
    for name in (*_columns(attention), _BIAS):
        if getattr(attention, name) is not None:
            full = join(region.home, name)
            shares.tensors[full] = TensorSharding(full, 0, list(shares.rows) if name in _APART else parts)
    shares.bytes = max(length for _, length in rows) / whole
    return shares


class HeadParallel(nn.MultiheadAttention):
    """Attention with some of the heads; the outputs of the ranks are summed.

    Attributes:
        slot: the ranks, and the layer's name for error messages.
        sizes: number of heads of each rank.
    """

    slot: SliceLocation
    sizes: list[int]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the results of the dense `nn.MultiheadAttention`, with its arguments; all ranks must call this.

        Raises:
            RuntimeError: `is_causal` is set without `attn_mask`, as in torch.
        """
        axis, name = self.slot.axis, self.slot.label
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        alike = query is key is value
        tensors = [enter(t, axis, f"gradient of what {name} reads") for t in (query, key, value)]
        batched = query.dim() == 3
        if not batched:
            tensors = [t.unsqueeze(0) for t in tensors]
        elif not self.batch_first:
            tensors = [t.transpose(0, 1) for t in tensors]
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self._projected(tensors, alike))
        mask = self._mask(key_padding_mask, attn_mask, q, k)
        weights = None
        drop = self.dropout if self.training else 0.0
        if need_weights:
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), drop)
            heads = weights @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, drop)
        out = reduce_from(F.linear(heads.transpose(1, 2).flatten(2), self.out_proj.weight), axis, f"sum of {name}")
        out = out if self.out_proj.bias is None else out + self.out_proj.bias
        if weights is not None and average_attn_weights:
            weights = reduce_from(weights.sum(1) / self.num_heads, axis, f"mean of the weights of {name}")
        elif weights is not None:
            weights = gather_from(weights, axis, 1, self.sizes, f"weights of {name}")
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _projected(self, tensors: list[torch.Tensor], alike: bool) -> Iterable[torch.Tensor]:
        """Compute queries, keys and values of this rank's heads."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if alike and weight is not None:
            return F.linear(tensors[0], weight, bias).chunk(3, dim=-1)
        weights = weight.chunk(3) if weight is not None else [getattr(self, name) for name in _APART]
        biases = [None] * 3 if bias is None else bias.chunk(3)
        return [F.linear(*parts) for parts in zip(tensors, weights, biases, strict=True)]

    def _mask(
        self, padding: torch.Tensor | None, mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the additive mask for the scores (batch, this rank's heads, queries, keys)."""
        added = None
        if mask is not None:
            added = self._as_added(mask, q)
            if added.dim() == 3:
                first = sum(self.sizes[: self.slot.axis.rank])
                every = added.unflatten(0, (q.shape[0], self.num_heads))
                added = every.narrow(1, first, self.sizes[self.slot.axis.rank])
        if padding is not None:
            keys = self._as_added(padding, q).view(q.shape[0], 1, 1, k.shape[2])
            added = keys if added is None else added + keys
        return added

    def _as_added(self, mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if mask.dtype != torch.bool:  # a learned mask
            return enter(mask, self.slot.axis, f"gradient of a mask of {self.slot.label}").to(like.dtype)
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


_classes: dict[type, type] = {nn.MultiheadAttention: HeadParallel}


def become_heads(attention: Any, shares: ChannelDependencies, rank: int, slot: SliceLocation) -> None:
    """Reduce an attention to the heads of a rank, in place; `shares` comes from `share_heads`."""
    kind = type(attention)
    if kind not in _classes:
        _classes[kind] = type(f"Parallel{kind.__name__}", (HeadParallel, kind), {"__module__": __name__})
    attention.__class__ = _classes[kind]
    attention.slot = slot
    attention.sizes = [sum(length for _, length in row) // attention.head_dim for row in shares.rows]
    # torch's encoder layers have a fast path that reads whole matrices if this is True.
    attention._qkv_same_embed_dim = False
    params = dict(attention.named_parameters())
    home = shares.region.home
    for name, share in shares.tensors.items():
        cut_tensor(params[name.removeprefix(home).removeprefix(".")], share.dim, share.segments[rank])
    cut_tensor(attention.out_proj.weight, 1, shares.rows[rank])


def pad_rows_of_encoders(model: nn.Module) -> None:
    """Disable nested tensors in torch's encoders: they drop padded rows, which sliced attention does not support."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, HeadParallel) for m in module.modules()):
            module.use_nested_tensor = False
