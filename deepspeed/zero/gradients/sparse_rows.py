"""Row-sparse gradients of embeddings, as autograd returns them.

[Note: row-sparse gradients] The dense gradient of an embedding is as large as its table, and nearly all rows are zero.
If the number of looked-up rows is known to be small (as in a pipeline stage), autograd returns only these rows, which
are added to the accumulator at their positions. If gradient and accumulator have the same dtype, repeated rows are
summed first; in fp32, with one lookup per micro-batch, the sums are bitwise equal to those of dense gradients. If the
accumulator's dtype is wider, each row is added separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.foundation.pytree import tensors_in
from deepspeed.zero.parameters.parameter import ManagedParameter

_FEW = 4  # an embedding is large if its rows are more than this multiple of the integers in the batch


def tables(model: nn.Module) -> list[nn.Embedding]:
    """Return the embeddings on the CPU that support row-sparse gradients, for `by_rows`.

    Embeddings with `sparse`, `scale_grad_by_freq` or `max_norm` are left out.
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None)
        and module.weight.device.type == "cpu"
    ]


@contextmanager
def by_rows(embeddings: Sequence[nn.Embedding], batch: Any) -> Iterator[None]:
    """Return a context in which the gradients of large embeddings are row-sparse.

    Args:
        embeddings: result of `tables`; those with a gradient hook of the user keep dense gradients.
        batch: pytree of the inputs; its integers bound the number of rows that are looked up.
    """
    most = max((t.numel() for t in tensors_in(batch) if not t.is_floating_point()), default=0)
    large = []
    for table in embeddings:
        weight = table.weight
        if not most or table.num_embeddings <= _FEW * most:
            continue
        if isinstance(weight, ManagedParameter) and weight.requires_grad:
            hooks = getattr(weight, "_post_accumulate_grad_hooks", None)  # the reducer has registered one
            if not weight._backward_hooks and hooks is not None and len(hooks) == 1:
                large.append(table)
    for table in large:
        table.sparse = True
    try:
        yield
    finally:
        for table in large:
            table.sparse = False


def can_add(gradient: torch.Tensor, dtype: torch.dtype, padded: bool) -> bool:
    """Return whether `add_rows` supports a gradient.

    Args:
        gradient: gradient of a parameter, of any layout.
        dtype: dtype of the round's buffer.
        padded: whether the parameter is stored with padding, which is not supported.
    """
    fits = dtype in (gradient.dtype, torch.float32)
    return gradient.is_sparse and gradient.sparse_dim() == 1 and fits and not padded


def add_rows(place: torch.Tensor, gradient: torch.Tensor, factor: float, again: bool) -> None:
    """Add a row-sparse gradient to a part of an accumulator.

    Args:
        place: dense tensor in the shape of the parameter, changed in place.
        gradient: sparse COO tensor for which `can_add` is true.
        factor: factor on the gradient.
        again: add to the values of `place`; False: overwrite them.
    """
    if not again:
        place.zero_()
    rows = gradient if place.dtype.itemsize > gradient.dtype.itemsize else gradient.coalesce()
    place.index_add_(0, rows._indices()[0], rows._values().to(place.dtype), alpha=factor)
