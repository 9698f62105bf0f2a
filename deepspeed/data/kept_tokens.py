"""A layer on some of the tokens of each sample: its arguments at these tokens, and its output among the others.

[Note: arguments by structure] Which dims of an argument are the sequence follows from its shape and name:

- Masks and biases (names with `mask`, `bias`, `alibi`, `relative`): the last dim is keys. The one before is queries if
  it has the length of the sequence. A mask for all samples gets a batch dim, since samples keep different tokens.
- Positions, rotary tables and other tensors per token: the dim after the batch, or after batch and heads.
- Arguments of cross attention (`encoder_…`, `memory`, `image_…` and others): only the queries of their masks.
- Key-value caches are None: a cache would get the tokens of one layer only.

Where a tensor may be read in two ways, or has no batch dim although samples keep different tokens, an error names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.errors import UsageError
from deepspeed.foundation.hf_forward import CACHE_POSITION, uncached
from deepspeed.foundation.pytree import map_tensors, tensors_in

_MASKS = ("mask", "bias", "alibi", "relative")
# As wide as hidden states, one for each token.
_STATES = ("original", "initial", "transformer_hidden", "query_pos", "object_queries", "pos_emb")
_TOKENS = ("position", "rotary", "freqs", "cos", "sin", "embed", "residual", "per_layer", *_STATES)
_CROSS = ("encoder_", "cross_")
_MEMORIES = ("memory", "context", "enc_", "image_", "vision_", *_CROSS)  # anywhere in the name
_OF_QUERIES = ("rotary", "position", "freqs", "pos_enc")  # tables of the layer's own tokens, as in diffusion models
_PER_HEAD = ("head_mask", "layer_head_mask", "cross_attn_layer_head_mask")
_HIDE_WHERE_TRUE = ("padding_mask", "src_mask", "tgt_mask")  # of torch's and fairseq's layers
_BOUNDS = ("cu_seq", "cu_len")  # of packed sequences, for kernels of variable length

Axes = list[tuple[int, int]]  # (dim of the sequence, dim of the batch; -1: none) of a tensor, in the order of gathering


class KeptTokens:
    """Positions of the tokens that a layer processes.

    Args:
        positions: int64 `[batch, kept]`, ascending in each row.
        length: length of the sequences.
        sequence_first: whether hidden states are `[sequence, batch, width]` instead of `[batch, sequence, width]`.
        whole: names of arguments that are passed on as they are.
        width: that of the hidden states; 0: unknown.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        length: int,
        sequence_first: bool = False,
        whole: tuple[str, ...] = (),
        width: int = 0,
    ) -> None:
        self.positions, self.length, self.sequence_first = positions, length, sequence_first
        self._batch, self._kept = positions.shape
        self._whole, self._width = whole, width
        self._replaced: list[tuple[torch.Tensor, torch.Tensor]] = []  # (gathered argument, argument)
        self._passed: list[torch.Tensor] = []  # all tensors that the layer gets besides its hidden states

    # -- hidden states --------------------------------------------------------------------------------------------

    def take(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the kept tokens, with `kept` in place of the sequence."""
        rows = hidden.flatten(0, 1).index_select(0, self._rows(hidden))  # by rows: gather copies single numbers
        return rows.view(self._taken_shape(hidden))

    def put(self, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the hidden states with those of the kept tokens replaced by the layer's output.

        Raises:
            UsageError: the output has another shape than the layer's input.
        """
        shape = self._taken_shape(hidden)
        if list(output.shape) != shape:
            raise UsageError(
                f"random-LTD: a layer returned hidden states of shape {list(output.shape)} for {shape}; only layers "
                "that keep the shape of their input can leave tokens out"
            )
        rows = hidden.to(output.dtype).flatten(0, 1)
        return rows.index_copy(0, self._rows(hidden), output.flatten(0, 1)).view(hidden.shape)

    def _taken_shape(self, hidden: torch.Tensor) -> list[int]:
        width = hidden.shape[-1]
        return [self._kept, self._batch, width] if self.sequence_first else [self._batch, self._kept, width]

    def _rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the places of the kept tokens among all tokens of a batch, int64 `[batch * kept]`."""
        samples = torch.arange(self._batch, device=self.positions.device)
        if self.sequence_first:
            return (self.positions.t() * self._batch + samples).reshape(-1).to(hidden.device)
        return (self.positions + samples[:, None] * self.length).reshape(-1).to(hidden.device)

    def _index(self, tensor: torch.Tensor, axis: int, batch_axis: int) -> torch.Tensor:
        """Return the positions in the shape of a tensor whose sequence is cut, as `gather` takes them."""
        positions = self.positions if batch_axis < axis else self.positions.t()
        shape = [1] * tensor.dim()
        shape[axis], shape[batch_axis] = self._kept, self._batch
        target = list(tensor.shape)
        target[axis] = self._kept
        return positions.to(tensor.device).reshape(shape).expand(target)

    # -- other arguments ------------------------------------------------------------------------------------------

    def arguments(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return a layer's arguments, without its hidden states, at the kept tokens.

        Raises:
            UsageError: an argument cannot be gathered; the message has its name and shape.
        """
        cut = {name: self._argument(name, value) for name, value in uncached(named).items()}
        self._passed.extend(tensors_in(cut))
        return cut

    def _argument(self, name: str, value: Any) -> Any:
        if value is None or name in self._whole or name in _PER_HEAD:
            return value
        if any(word in name for word in _BOUNDS):
            raise self._refusal(name, value, "it has the bounds of packed sequences, which change with each layer")
        if type(value).__name__ == "BlockMask":
            raise self._refusal(name, value, "a mask of flex attention has no tensor; use sdpa or eager attention")

        def change(tensor: torch.Tensor) -> torch.Tensor:
            gathered = self._gathered(name, tensor)
            if gathered is not tensor:
                self._replaced.append((gathered, tensor))
            return gathered

        return map_tensors(change, value)

    def returned(self, value: Any) -> Any:
        """Return a further output of the layer; an argument that the layer has passed on is the whole one again."""
        return next((whole for gathered, whole in self._replaced if value is gathered), value)

    def is_new(self, value: Any) -> bool:
        """Return whether a further output of the layer has a tensor that is none of its arguments."""
        return any(all(tensor is not argument for argument in self._passed) for tensor in tensors_in(value))

    def _gathered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == CACHE_POSITION and tensor.shape == (self.length,):
            return tensor[: self._kept]  # read by caches only, and there is none
        whole = rows = tensor
        axes = self._axes(name, tensor)
        for axis, batch_axis in axes:
            rows = tensor
            if batch_axis >= 0:
                tensor = self._select(tensor, axis, batch_axis)
            elif self._batch == 1:
                tensor = tensor.index_select(axis, self.positions[0].to(tensor.device))
            else:
                raise self._refusal(name, tensor, "it has no batch dim, and each sample keeps other tokens")
        keys_cut = bool(axes) and axes[-1][0] == tensor.dim() - 1
        if tensor.is_floating_point() and (keys_cut or "mask" in name):
            return _without_empty_rows(tensor)
        hidden = _hidden_key(name, whole) if keys_cut and tensor.dtype == torch.bool else None
        if hidden is None:
            return tensor
        return tensor ^ ((tensor == hidden).all(-1, keepdim=True) & (rows != hidden).any(-1, keepdim=True))

    def _select(self, tensor: torch.Tensor, axis: int, batch_axis: int) -> torch.Tensor:
        size = tensor.shape[batch_axis]
        if size == 1 and self._batch > 1:
            tensor = tensor.expand([self._batch if dim == batch_axis else n for dim, n in enumerate(tensor.shape)])
        elif size != self._batch:  # samples times heads, as ALiBi's slopes
            tensor = tensor.unflatten(batch_axis, (self._batch, size // self._batch))
            moved = axis + 1 if axis > batch_axis else axis
            return self._select(tensor, moved, batch_axis).flatten(batch_axis, batch_axis + 1)
        return tensor.gather(axis, self._index(tensor, axis, batch_axis))

    # -- [Note: arguments by structure] ---------------------------------------------------------------------------

    def _axes(self, name: str, tensor: torch.Tensor) -> Axes:
        if self.length not in tensor.shape:
            return []
        masks = any(word in name for word in _MASKS)
        if _of_cross_attention(name, tensor, masks):
            if masks and tensor.dim() == 2 and ("image_" in name or "vision_" in name):
                raise self._refusal(name, tensor, "it may mask tokens or the memory of cross attention")
            queries = masks and tensor.dim() >= 3 and tensor.shape[-2] == self.length
            return [(tensor.dim() - 2, self._leading(name, tensor))] if queries else []
        if masks:
            return self._mask_axes(name, tensor)
        if any(word in name for word in _TOKENS):
            return self._token_axes(name, tensor)
        if tensor.dim() == 1:
            return []
        if tensor.dim() == 3 and tensor.shape[-1] == self._width and self.length in tensor.shape[:2]:
            raise self._refusal(name, tensor, "it may be the memory of cross attention, which is not cut")
        if tensor.dim() >= 3 and tensor.shape[-1] == self.length:
            if tensor.dim() == 3 and tensor.shape[-2] == self.length:
                raise self._refusal(name, tensor, "it may be [batch, sequence, width] or [batch, queries, keys]")
            return self._mask_axes(name, tensor)
        return self._token_axes(name, tensor)

    def _mask_axes(self, name: str, tensor: torch.Tensor) -> Axes:
        last = tensor.dim() - 1
        if last == 0:
            return [(0, -1)]
        if last == 1:
            if tensor.shape[0] == tensor.shape[1] and name != "attention_mask" and self._batch > 1:
                raise self._refusal(name, tensor, "it may be [batch, keys] or [queries, keys]")
            return [(1, self._leading(name, tensor))]
        batch_axis = self._leading(name, tensor)
        queries: Axes = [(last - 1, batch_axis)] if tensor.shape[-2] == self.length else []
        if queries and tensor.shape[-1] not in (1, self.length):
            raise self._refusal(name, tensor, "it has other keys than queries, as with a key-value cache")
        return queries + ([(last, batch_axis)] if tensor.shape[-1] == self.length else [])

    def _leading(self, name: str, tensor: torch.Tensor) -> int:
        """Return the batch dim of a mask or bias, which is the first one."""
        size = tensor.shape[0]
        if size in (1, self._batch) and not (tensor.dim() == 3 and "bias" in name):
            return 0
        if tensor.dim() == 3 and "alibi" in name and size % self._batch == 0:
            return 0
        raise self._refusal(name, tensor, "its first dim is not the batch")

    def _token_axes(self, name: str, tensor: torch.Tensor) -> Axes:
        shape, dims = tensor.shape, tensor.dim()
        samples = (1, self._batch)
        if dims == 1:
            return [(0, -1)]
        if dims == 2:
            by_sample = shape[1] == self.length and shape[0] in samples
            if by_sample and (shape[0] != self.length or not tensor.is_floating_point()):
                return [(1, 0)]
            if shape[0] == self.length and shape[1] != self.length:
                return [(0, -1)]
            raise self._refusal(name, tensor, "it may be [batch, sequence] or [sequence, width]")
        if dims == 3 and shape[2] == self.length and shape[1] in samples and not tensor.is_floating_point():
            return [(2, 1)]  # position ids of several kinds
        places = [(1, 0), (2, 0), (2, 1)] if not self.sequence_first else [(0, 1), (1, 0), (2, 0)]
        fitting = [
            (axis, batch_axis)
            for axis, batch_axis in places
            if axis < dims - 1 and shape[axis] == self.length and shape[batch_axis] in samples
        ]
        per_sample = [batch_axis for _, batch_axis in fitting if shape[batch_axis] > 1]
        if len({axis for axis, _ in fitting}) != 1 or len(per_sample) > 1:
            raise self._refusal(name, tensor, "its sequence dim is not known")
        return [(fitting[0][0], per_sample[0] if per_sample else fitting[0][1])]

    def _refusal(self, name: str, value: Any, why: str) -> UsageError:
        shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        return UsageError(
            f"random-LTD: the argument {name!r}{shape} of a layer cannot be cut to {self._kept} of {self.length} "
            f"tokens: {why}. Leave the layer out of random_ltd_layer_id, or, if the argument does not depend on "
            f"tokens, name it in convert_to_random_ltd(…, whole=[{name!r}])"
        )


def _of_cross_attention(name: str, tensor: torch.Tensor, mask: bool) -> bool:
    """Return whether an argument belongs to cross attention, by its name."""
    if name.startswith(_CROSS):
        return True
    if any(word in name for word in _OF_QUERIES) or (tensor.dim() < 3 and not mask):
        return False  # memory has three dims; `is_image_token` tells kinds of tokens
    return any(word in name for word in _MEMORIES)


def _without_empty_rows(mask: torch.Tensor) -> torch.Tensor:
    """Return an additive mask in which every query sees a key, so that no softmax is NaN.

    Only queries that are padding may see none of the kept tokens: others see themselves.
    """
    return mask.masked_fill(mask.isneginf().all(dim=-1, keepdim=True), 0.0)


def _hidden_key(name: str, mask: torch.Tensor) -> torch.Tensor | None:
    """Return the value that hides a key in a boolean mask, a bool scalar; None: unknown whether it masks keys.

    Libraries disagree on it. Where the name does not tell, it is the one that most tokens do not have for themselves.
    """
    if any(word in name for word in _HIDE_WHERE_TRUE):
        return mask.new_tensor(True)
    if "attention_mask" in name or mask.dim() < 3:
        return mask.new_tensor(False) if "attention_mask" in name or "attn_mask" in name else None
    square = mask.shape[-1] == mask.shape[-2]
    own = mask.diagonal(dim1=-2, dim2=-1) if square else mask
    return own.float().mean() < 0.5


@dataclass(frozen=True)
class OutputForm:
    """What a layer returns: its hidden states alone, or first in a list, tuple or mapping.

    Attributes:
        kind: the class of the output.
        names: names of its entries if it is a mapping, else empty.
    """

    kind: Any
    names: tuple[str, ...] = ()

    def form(self, hidden: torch.Tensor, rest: Sequence[Any]) -> Any:
        """Return an output with these hidden states and further entries."""
        if self.names:
            return self.kind(**dict(zip(self.names, (hidden, *rest), strict=True)))
        if not issubclass(self.kind, (list, tuple)):
            return hidden
        entries = [hidden, *rest]
        return self.kind(*entries) if hasattr(self.kind, "_fields") else self.kind(entries)


def split_output(output: Any) -> tuple[torch.Tensor, list[Any], OutputForm]:
    """Return a layer's hidden states, the further entries of its output, and the form of the output.

    Raises:
        UsageError: the output has no tensor in its first place.
    """
    kind, names = type(output), tuple[str, ...]()
    entries: list[Any] = [output]
    if isinstance(output, (list, tuple)):
        entries = list(output)
    elif isinstance(output, Mapping):
        names, entries = tuple(output), list(output.values())
    if not entries or not isinstance(entries[0], torch.Tensor):
        raise UsageError(f"a layer returned a {kind.__name__} without hidden states in its first place")
    return entries[0], entries[1:], OutputForm(kind, names)


def forms_bias(names: Sequence[str], named: Mapping[str, Any]) -> str:
    """Return the argument that a layer forms for itself and later layers, such as T5's `position_bias`; "": none.

    Args:
        names: names of the layer's arguments.
        named: arguments of a call.
    """
    own = (name for name in names if name.endswith("_bias") and not name.startswith(_CROSS))
    return next((name for name in own if named.get(name) is None), "")
