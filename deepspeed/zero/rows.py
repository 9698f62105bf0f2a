"""Gradients of tables row by row: looking up a few rows leaves none for the others, which need not be touched.

A table of a large vocabulary has a gradient as large as itself in every micro-batch: zeros that are written, read again
and added. Where a driver knows what is looked up (a pipeline's does), autograd gives the rows alone, and they are added
to the accumulator where they belong. What is summed in the gradient's own precision is summed by row first and then
added once: in fp32, with one lookup of the table in a micro-batch, sums have the bits of whole gradients. Where the
accumulator is wider every hit is added to it, unrounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.foundation.tree import tensors_in
from deepspeed.zero.param import ManagedParameter

_FEW = 4  # times as many rows as are looked up make a table large


def tables(model: nn.Module) -> list[nn.Embedding]:
    """Modules on the host that only look rows up: whose gradient could come by rows."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None)
        and module.weight.device.type == "cpu"
    ]


@contextmanager
def by_rows(found: Sequence[nn.Embedding], batch: Any) -> Iterator[None]:
    """Inside, tables that are large beside a batch give their gradient by rows.

    One whose gradient a hook of the user's is to see gives it whole.

    Args:
        found: see `tables`.
        batch: its tensors of whole numbers say how many rows are looked up at most.
    """
    most = max((t.numel() for t in tensors_in(batch) if not t.is_floating_point()), default=0)
    large = [table for table in found if most and table.num_embeddings > _FEW * most and _is_plain(table.weight)]
    for table in large:
        table.sparse = True
    try:
        yield
    finally:
        for table in large:
            table.sparse = False


def _is_plain(weight: torch.Tensor) -> bool:
    """A managed parameter with no hooks beside its reducer's."""
    if not isinstance(weight, ManagedParameter) or not weight.requires_grad:
        return False
    after = getattr(weight, "_post_accumulate_grad_hooks", None)
    return not weight._backward_hooks and after is not None and len(after) == 1


def can_add(gradient: torch.Tensor, dtype: torch.dtype, padded: bool) -> bool:
    """Whether `add_rows` takes this gradient.

    Args:
        gradient: as autograd gave it.
        dtype: of what it is added to.
        padded: the parameter has another shape where its gradient is summed.
    """
    fits = dtype in (gradient.dtype, torch.float32)
    return gradient.is_sparse and gradient.sparse_dim() == 1 and fits and not padded


def add_rows(place: torch.Tensor, gradient: torch.Tensor, factor: float, again: bool) -> None:
    """Add the rows of a gradient to where its sum is formed.

    Args:
        place: of the table's shape.
        gradient: see `can_add`.
        factor: on the gradient.
        again: something is there already; else it is overwritten.
    """
    if not again:
        place.zero_()
    rows = gradient if place.dtype.itemsize > gradient.dtype.itemsize else gradient.coalesce()
    place.index_add_(0, rows._indices()[0], rows._values().to(place.dtype), alpha=factor)
