"""Collectives that autograd knows, and layers that hold slices, each against its dense counterpart."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed.comm.collectives.autograd import (
    copy_to,
    enter,
    gather_from,
    gather_to,
    reduce_from,
    reduce_scatter,
    scatter_to,
)
from deepspeed.comm.process_groups.axis import Axis, world_axis
from deepspeed.errors import ArgumentError
from deepspeed.foundation.log import describe_error
from deepspeed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, even_sizes
from deepspeed.tensor_parallel.vocab_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy
from deepspeed.zero.layout.placement import placement_of
from tests.parallel.tiny import raises


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def own(tensor: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    return tensor.split(even_sizes(tensor.shape[dim], axis.size), dim)[axis.rank]


def expect(ours: torch.Tensor | None, theirs: torch.Tensor | None, bar: float = 1e-6) -> None:
    assert ours is not None and theirs is not None and ours.shape == theirs.shape, (ours, theirs)
    assert (ours - theirs).abs().max() <= bar * max(float(theirs.abs().max()), 1e-3), (ours, theirs)


def run(op: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    out = op(x)
    out.backward(drawn(*out.shape, seed=seed))
    assert x.grad is not None
    return out.detach(), x.grad


def collectives() -> None:
    """What each gives forward and backward, for even and uneven slices along any dim."""
    for dim, size in ((0, 6), (-1, 5), (1, 7)):
        collectives_along(world_axis(), dim, size)


def collectives_along(axis: Axis, dim: int, size: int) -> None:
    ranks = range(axis.size)
    shape = [3, 4, 2]
    shape[dim] = size
    sizes = even_sizes(size, axis.size)
    whole = [drawn(*shape, seed=r) for r in ranks]  # each rank's own
    total, mine = torch.stack(whole).sum(0), whole[axis.rank]
    parts = list(drawn(*shape, seed=50).split(sizes, dim))
    back = [drawn(*shape, seed=70 + r) for r in ranks]
    out, grad = run(lambda x: copy_to(x, axis), mine, 70 + axis.rank)
    expect(out, mine)
    expect(grad, torch.stack(back).sum(0))
    out, grad = run(lambda x: reduce_from(x, axis), mine, 70)
    expect(out, total)
    expect(grad, back[0])
    out, grad = run(lambda x: gather_from(x, axis, dim, sizes), parts[axis.rank], 70)
    expect(out, torch.cat(parts, dim))
    expect(grad, back[0].split(sizes, dim)[axis.rank])
    out, grad = run(lambda x: gather_to(x, axis, dim, sizes), parts[axis.rank], 70 + axis.rank)
    expect(out, torch.cat(parts, dim))
    expect(grad, torch.stack(back).sum(0).split(sizes, dim)[axis.rank])
    cotangents = [drawn(*part.shape, seed=90) for part in parts]
    out, grad = run(lambda x: scatter_to(x, axis, dim, sizes), whole[0], 90)
    expect(out, whole[0].split(sizes, dim)[axis.rank])
    expect(grad, torch.cat(cotangents, dim))
    out, grad = run(lambda x: reduce_scatter(x, axis, dim, sizes), mine, 90)
    expect(out, total.split(sizes, dim)[axis.rank])
    expect(grad, torch.cat(cotangents, dim))


def test_collectives_go_both_ways(workers: Any) -> None:
    workers(2).run(collectives)
    workers(3).run(collectives)


def one_sum_for_all_readers() -> None:
    axis, sums = world_axis(), []
    x = drawn(4, 3).requires_grad_()
    read = x * 2.0
    first, second = enter(read, axis), enter(read, axis)
    assert first is second and enter(x, axis) is not enter(x, axis)  # a leaf would never be let go
    first.register_hook(lambda g: sums.append(g))
    ((first + 2 * second) * float(axis.rank + 1)).sum().backward()
    assert len(sums) == 1
    expect(x.grad, torch.full((4, 3), 2.0 * 3 * sum(r + 1 for r in range(axis.size))))
    read.detach_()
    assert enter(read, axis) is read
    changed = (x * 1.0).mul_(1.0)
    before = enter(changed, axis)
    changed.add_(1.0)
    assert enter(changed, axis) is not before
    with torch.no_grad():
        assert enter(changed, axis) is changed
    gone = weakref.ref(before)
    del changed, before
    gc.collect()
    assert gone() is None


def test_layers_that_read_one_tensor_share_its_sum(workers: Any) -> None:
    workers(2).run(one_sum_for_all_readers)


def linear_pair(bias: bool, gather: bool) -> None:
    axis = world_axis()
    torch.manual_seed(0)
    up, down = nn.Linear(5, 7, bias), nn.Linear(7, 4, bias)
    torch.manual_seed(0)
    column = ColumnParallelLinear(5, 7, bias, axis=axis, gather_output=gather, name="up")
    row = RowParallelLinear(7, 4, bias, axis=axis, name="down")
    x, y = drawn(6, 5).requires_grad_(), drawn(6, 5).requires_grad_()
    wanted = down(torch.relu(up(x)))
    hidden = torch.relu(column(y))
    if gather:
        expect(hidden, torch.relu(up(x)))
        hidden = scatter_to(hidden, axis, -1, even_sizes(7, axis.size))
    found = row(hidden)
    expect(found, wanted)
    cotangent = drawn(6, 4, seed=9)
    wanted.backward(cotangent)
    found.backward(cotangent)
    expect(y.grad, x.grad)
    expect(column.weight.grad, own(up.weight.grad, axis, 0))  # type: ignore[arg-type]
    expect(row.weight.grad, own(down.weight.grad, axis, 1))  # type: ignore[arg-type]
    if bias:
        expect(column.bias.grad, own(up.bias.grad, axis, 0))  # type: ignore[arg-type]
        expect(row.bias.grad, down.bias.grad)
    assert column.out_features == row.in_features == even_sizes(7, axis.size)[axis.rank]
    assert placement_of(column.weight).global_shape(column.weight.shape) == (7, 5)
    assert placement_of(row.weight).global_shape(row.weight.shape) == (4, 7)
    with raises(ArgumentError, "narrow", "1 channels"):
        ColumnParallelLinear(5, 1, axis=axis, name="narrow")


def linears() -> None:
    for bias in (True, False):
        for gather in (True, False):
            linear_pair(bias, gather)


def test_linear_layers_equal_the_dense_ones(workers: Any) -> None:
    workers(2).run(linears)
    workers(3).run(linears)


def vocabulary() -> None:
    """Tied table, odd vocabulary, ignored targets, a padding row."""
    axis = world_axis()
    torch.manual_seed(0)
    dense = nn.Embedding(11, 6, padding_idx=9)
    torch.manual_seed(0)
    cut = VocabParallelEmbedding(11, 6, padding_idx=9, axis=axis, name="embed")
    ids = torch.tensor([[1, 9, 3, 10], [0, 5, 9, 6]])
    target = torch.tensor([2, -100, 10, 9, 0, 5, -100, 7])
    expect(cut(ids), dense(ids))
    for reduction in ("mean", "sum", "none"):
        dense.weight.grad = cut.weight.grad = None
        hidden, ours = torch.tanh(dense(ids)).flatten(0, 1), torch.tanh(cut(ids)).flatten(0, 1)
        wanted = F.cross_entropy(hidden @ dense.weight.t() * 3, target, reduction=reduction)
        logits = enter(ours, axis) @ cut.weight.t() * 3
        found = vocab_parallel_cross_entropy(logits, target, axis, vocabulary=11, reduction=reduction)
        expect(found, wanted)
        wanted.sum().backward()
        found.sum().backward()
        expect(cut.weight.grad, own(dense.weight.grad, axis, 0))  # type: ignore[arg-type]
    huge = torch.tensor([[1e4, -1e4, 0.0]]).repeat(8, 1)
    logits = own(torch.cat([huge] * 4, 1)[:, :11], axis)
    assert torch.isfinite(vocab_parallel_cross_entropy(logits, target, axis, vocabulary=11))
    with raises(ArgumentError, "target 11", "vocabulary of 11"):
        vocab_parallel_cross_entropy(logits, target.clamp(min=0) + 1, axis, vocabulary=11)
    with raises(IndexError, "embed", "11 rows"):
        cut(torch.tensor([11]))


def test_a_cut_vocabulary_equals_the_dense_one(workers: Any) -> None:
    workers(2).run(vocabulary)
    workers(3).run(vocabulary)


def test_an_error_that_says_nothing_is_named_by_its_class() -> None:
    assert (
        describe_error(AssertionError()) == "AssertionError: " and describe_error(ValueError("a\nb")) == "ValueError: a"
    )
