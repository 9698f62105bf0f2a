"""Layers over a cut sequence beside the same layers over the whole one: all-to-all, attention by heads, tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from deepspeed.comm.collectives.autograd import all_to_all
from deepspeed.comm.process_groups.axis import world_axis
from deepspeed.comm.process_groups.mesh import mesh_for
from deepspeed.comm.watchdog.comms_logger import comms_logger
from deepspeed.errors import ArgumentError, MeshError, SequenceParallelError
from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
from deepspeed.sequence.layer import DistributedAttention, _SeqAllToAll, repeats
from deepspeed.sequence.tiled import SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute
from tests.parallel.tiny import raises


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exchanged() -> None:
    axis = world_axis()
    whole = drawn(3, 4 * axis.size, 2 * axis.size, 5)
    one_each = drawn(3, 4 * axis.size, axis.size, 5).chunk(axis.size, 2)[axis.rank]
    assert all_to_all(one_each, axis, 1, 2).is_contiguous()
    for cut, join in ((2, 1), (1, 2), (-2, 1)):
        part = whole.chunk(axis.size, join)[axis.rank].clone().requires_grad_()
        got = all_to_all(part, axis, cut, join)
        assert got.is_contiguous() and torch.equal(got, whole.chunk(axis.size, cut)[axis.rank])
        weight = drawn(*whole.shape, seed=1)
        (got * weight.chunk(axis.size, cut)[axis.rank]).sum().backward()
        assert torch.equal(part.grad, weight.chunk(axis.size, join)[axis.rank])
    for dtype in (torch.int64, torch.bfloat16, torch.bool):
        given = (whole > 0).to(dtype)
        got = all_to_all(given.chunk(axis.size, 1)[axis.rank].contiguous(), axis, 2, 1)
        assert torch.equal(got, given.chunk(axis.size, 2)[axis.rank])
    own = whole.chunk(axis.size, 0)[axis.rank] if whole.shape[0] % axis.size == 0 else whole.chunk(axis.size, 1)[0]
    assert torch.equal(
        _SeqAllToAll.apply(axis.group, own.contiguous(), 2, 1, 0), all_to_all(own.contiguous(), axis, 2, 1)
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_to_all_and_back(workers: Any, ranks: int) -> None:
    workers(ranks).run(exchanged)


def core(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`[batch, tokens, heads, width]`"""
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def attended(heads: int, kv: int) -> None:
    axis, tokens = world_axis(), 12
    whole = [drawn(2, tokens, count, 6, seed=at).requires_grad_() for at, count in enumerate((heads, kv, kv))]
    weight = drawn(2, tokens, heads, 6, seed=9)
    wanted = core(*whole)
    (wanted * weight).sum().backward()
    part = slice(tokens // axis.size * axis.rank, tokens // axis.size * (axis.rank + 1))
    for turns in (0, 1):  # batch first, tokens first

        def turn(t: torch.Tensor, turns: int = turns) -> torch.Tensor:
            return t.transpose(0, turns)

        def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, turn: Any = turn) -> torch.Tensor:
            return turn(core(turn(q), turn(k), turn(v)))

        mine = [t.detach()[:, part].clone().requires_grad_() for t in whole]
        attention = DistributedAttention(local, axis, scatter_idx=2, gather_idx=1 - turns)
        got = turn(attention(*(turn(t) for t in mine)))
        torch.testing.assert_close(got, wanted[:, part], rtol=1e-5, atol=1e-6)
        (got * weight[:, part]).sum().backward()
        for ours, theirs in zip(mine, whole, strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad[:, part], rtol=1e-5, atol=1e-5)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("ranks", "heads", "kv"), [(2, 4, 1), (2, 6, 3), (3, 6, 2), (3, 3, 3), (4, 4, 2), (4, 8, 1)])
def test_key_value_heads_may_be_fewer_than_ranks(workers: Any, ranks: int, heads: int, kv: int) -> None:
    workers(ranks).run(attended, heads, kv)


class Exchanges:
    """Counts exchanges of ranks."""

    def __init__(self) -> None:
        comms_logger.enabled = comms_logger.prof_all = True
        comms_logger.reset()

    def since(self) -> int:
        found = sum(row["count"] for row in comms_logger.summary() if row["op"] == "all_to_all_single")
        comms_logger.reset()
        return int(found)


def kept_by_tokens(heads: int, kv: int) -> None:
    """Exchanged again in backward, every bit is as it was kept; nothing is exchanged again where others keep it."""
    axis, tokens = world_axis(), 12
    copied = repeats(kv, axis) > 1
    part = slice(tokens // axis.size * axis.rank, tokens // axis.size * (axis.rank + 1))
    whole = [drawn(2, tokens, count, 6, seed=at) for at, count in enumerate((heads, kv, kv))]
    exchanges = Exchanges()

    def ran(recompute: bool, again: int, around: Any = None, change: Any = None, fused: bool = False) -> Any:
        # Key and value may be parts of something larger, which need not stay.
        states = torch.cat([t[:, part] for t in whole], 2).requires_grad_()
        mine = states.split([heads, kv, kv], 2) if fused else [t.contiguous() for t in states.split([heads, kv, kv], 2)]
        attention = DistributedAttention(core, axis, scatter_idx=2, gather_idx=1)
        attention.recompute = recompute
        got = around(attention, *mine) if around else attention(*mine)
        forward = exchanges.since()
        if change:
            change(got)
        (got * drawn(2, tokens, heads, 6, seed=9)[:, part]).sum().backward(retain_graph=True)
        assert forward == 4 and exchanges.since() == 4 + again, (around, again)
        first = states.grad.clone()
        if around is None:
            states.grad = None
            (got * drawn(2, tokens, heads, 6, seed=9)[:, part]).sum().backward()
            assert torch.equal(states.grad, first) and exchanges.since() == 4 + again
        return got.detach(), first

    wanted = ran(False, 0)
    once = 1 + 2 * copied
    for fused in (False, True):
        assert all(map(torch.equal, ran(True, once, fused=fused), wanted))
    # These compute it again, the context's exchange only if need be: no more for what is kept a moment.
    for reentrant, more in ((False, 3), (True, 4)):

        def checkpointed(*given: Any, reentrant: bool = reentrant) -> Any:
            return checkpoint(*given, use_reentrant=reentrant)

        assert all(map(torch.equal, ran(True, more, checkpointed), wanted))

    def elsewhere(*given: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return given[0](*given[1:])

    assert all(map(torch.equal, ran(True, 0, elsewhere), wanted))
    with raises(SequenceParallelError, "changed in place", "sequence_parallel_recompute"):
        ran(True, once, change=lambda context: context.detach().mul_(2))
    exchanges.since()
    ran(False, 0, change=lambda context: context.detach().mul_(2))
    comms_logger.enabled = comms_logger.prof_all = False
    comms_logger.reset()


@pytest.mark.parametrize(
    ("ranks", "heads", "kv"), [(2, 4, 2), (2, 4, 1), pytest.param(4, 8, 2, marks=pytest.mark.slow)]
)
def test_what_is_kept_once_is_exchanged_again(workers: Any, ranks: int, heads: int, kv: int) -> None:
    workers(ranks).run(kept_by_tokens, heads, kv)


def refused() -> None:
    axis = world_axis()
    attention = DistributedAttention(core, axis, scatter_idx=2, gather_idx=1)
    with raises(MeshError, "4 query head(s)", "3 ranks", "2 and 4"):
        attention(*(drawn(1, 2, 4, 6) for _ in range(3)))


def test_heads_that_do_not_suffice_are_refused_with_the_nearest_sizes(workers: Any) -> None:
    workers(3).run(refused)


def rotated() -> None:
    """With the table of the whole sequence, rotation after the exchange is rotation before it."""
    axis, tokens, width = world_axis(), 8, 6
    angle = torch.outer(torch.arange(tokens).float(), torch.arange(1.0, 1 + width // 2))
    cos, sin = (f(torch.cat([angle, angle], -1))[None, :, None] for f in (torch.cos, torch.sin))

    def turned(t: torch.Tensor) -> torch.Tensor:
        first, second = t.chunk(2, -1)
        return t * cos + torch.cat([-second, first], -1) * sin

    states = [drawn(2, tokens, 4, width, seed=at) for at in range(3)]
    part = slice(tokens // axis.size * axis.rank, tokens // axis.size * (axis.rank + 1))
    attention = DistributedAttention(core, axis.group, scatter_idx=2, gather_idx=1)
    got = attention(*(t[:, part] for t in states), 0, (cos, sin))
    wanted = core(turned(states[0]), turned(states[1]), states[2])[:, part]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_rotary_tables_of_the_whole_sequence(workers: Any) -> None:
    workers(2).run(rotated)


def token_losses() -> None:
    axis = mesh_for({"sp": 2}).axis("sp")
    logits, labels = drawn(6, 2, 7), torch.randint(0, 7, (6, 2), generator=torch.Generator().manual_seed(1))
    whole = logits.clone().requires_grad_()
    wanted = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none").view(6, 2)
    wanted.mean().backward()
    part = slice(3 * axis.rank, 3 * axis.rank + 3)
    own = logits[part].clone().requires_grad_()
    got = vocab_sequence_parallel_cross_entropy(own, labels[part], axis.group)
    torch.testing.assert_close(got, wanted)
    got.mean().backward()
    torch.testing.assert_close(own.grad, axis.size * whole.grad[part])  # an engine divides by the ranks


def test_losses_of_all_tokens_on_every_rank(workers: Any) -> None:
    workers(2).run(token_losses)


# -- tiles ------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(one, torch.Tensor):
                self.numel = max(self.numel, one.numel())
        return out


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.dropout = nn.Linear(4, 64), nn.Linear(64, 4), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(torch.relu(self.up(x)), self.dropout))


def test_a_tiled_mlp_never_has_more_than_one_tile() -> None:
    model, x = MLP(), drawn(2, 50, 4)
    whole, tiled = (x.clone().requires_grad_() for _ in range(2))
    model(whole).square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    calls: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    with Largest() as largest:
        got = TiledMLP.apply(MLP.forward, model, tiled, 7)
        got.square().sum().backward()
    assert largest.numel <= 2 * 8 * 64  # a tile has at most 8 of 50 tokens
    assert sorted(calls) == sorted(dict(model.named_parameters()))  # one gradient each
    torch.testing.assert_close(got, model(x))
    torch.testing.assert_close(TiledMLP.apply(MLP.forward, model, x[:, :1], 7), model(x[:, :1]))
    torch.testing.assert_close(tiled.grad, whole.grad)
    for param, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(param.grad, grad)


def test_tiles_drop_in_backward_what_they_dropped_in_forward() -> None:
    model, x = MLP(0.5), drawn(1, 12, 4).requires_grad_()
    torch.manual_seed(3)
    out = TiledMLP.apply(MLP.forward, model, x, 4)
    after = torch.get_rng_state()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(3)
    again = x.detach().clone().requires_grad_()
    torch.cat([model(tile) for tile in again.split(3, 1)], 1).sum().backward()
    torch.testing.assert_close(grad, again.grad)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("masked", [False, True])
def test_tiled_logits_and_loss(reduction: str, masked: bool) -> None:
    tokens, words = 21, 300
    head, x = nn.Linear(6, words), drawn(2, tokens, 6)
    labels = torch.randint(0, words, (2, tokens), generator=torch.Generator().manual_seed(1))
    mask = None
    if masked:
        labels[:, :8] = -100  # the first tile counts nothing
        mask = labels != -100

    def loss(module: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module(x).flatten(0, 1), y.flatten(), reduction=reduction)

    whole, tiled = (x.clone().requires_grad_() for _ in range(2))
    wanted = loss(head, whole, labels)
    wanted.backward()
    grads = [p.grad.clone() for p in head.parameters()]
    head.zero_grad()
    with Largest() as largest:
        got = TiledFusedLogitsLoss.apply(loss, head, tiled, labels, mask, 5, None, reduction)
        (2 * got).backward()
    assert largest.numel <= max(2 * 5 * words, 6 * words)  # one tile's logits, or the weight's gradient
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(tiled.grad, 2 * whole.grad)
    for param, grad in zip(head.parameters(), grads, strict=True):
        torch.testing.assert_close(param.grad, 2 * grad)


def test_any_function_in_tiles() -> None:
    scale, x, y = nn.Parameter(torch.tensor(3.0)), drawn(2, 7, 3).requires_grad_(), drawn(2, 7)

    def fn(x: torch.Tensor, y: torch.Tensor, bias: float, nothing: Any) -> torch.Tensor:
        assert nothing is None
        return (x.sum(-1) * y * scale + bias).mean()

    given = ({"x": x, "y": y, "nothing": None}, {"bias": 2.0}, "x", [scale])
    one = sequence_tiled_compute(fn, 7, 3, *given)
    torch.testing.assert_close(one, fn(x, y, 2.0, None))
    (grad,) = torch.autograd.grad(one, scale)
    torch.testing.assert_close(grad, (x.sum(-1) * y).mean())
    two = SequenceTiledCompute.apply(
        fn, 7, 3, ["x", "y", "nothing"], ["bias"], "x", [scale], 1, "mean", x, y, None, 2.0
    )
    assert torch.equal(one, two)
    assert torch.equal(sequence_tiled_compute(fn, 7, 9, *given), sequence_tiled_compute(fn, 7, 7, *given))
    with raises(ArgumentError, "0 tiles", "from 1 on"):
        sequence_tiled_compute(fn, 7, 0, *given)
    with raises(ArgumentError, "output_reduction", "'max'"):
        sequence_tiled_compute(fn, 7, 3, *given, output_reduction="max")
