"""The collectives' arithmetic and numbers on one process: sums in rank order, tags, handles, an axis of one."""

from __future__ import annotations

import pytest
import torch

from deepspeed.comm.collectives import collectives
from deepspeed.comm.collectives.collectives import EXCHANGE, PULL, READ, SMALL, SPREAD, Handle, sum_in_rank_order
from deepspeed.comm.collectives.scalars import FakeScalars, Scalars
from deepspeed.comm.process_groups.axis import Axis, tag_of

ALONE = Axis("dp", (0,), 0, None, True)
THREE = Axis("dp", (4, 5, 6), 1, None, True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def parts(count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(count)
    return [(torch.randn(numel, generator=source) * 10.0**n).to(dtype) for n in range(count)]


@pytest.mark.drawn(9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("numel", [0, 3, 300_001])  # less and more than one block
def test_sums_are_fp32_in_rank_order(count: int, numel: int, dtype: torch.dtype) -> None:
    sent = parts(count, numel, dtype)
    wanted = torch.zeros(numel)
    for index, part in enumerate(sent):
        wanted = part.float() if index == 0 else wanted + part.float()
    for out_dtype in DTYPES:
        out = torch.full((numel,), 7.0, dtype=out_dtype)
        sum_in_rank_order(sent, out, 1.0, add=False)
        assert torch.equal(out, wanted.to(out_dtype))
        sum_in_rank_order(sent, out, 0.25, add=True)
        assert torch.equal(out, (wanted * 0.25 + wanted.to(out_dtype).float()).to(out_dtype))


def test_a_sum_may_take_the_place_of_a_contribution() -> None:
    for place in range(3):
        sent = parts(3, 1000, torch.float32)
        wanted = (sent[0] + sent[1]) + sent[2]
        sum_in_rank_order(sent, sent[place], 1.0, add=False)
        assert torch.equal(sent[place], wanted)


def test_tags_differ_by_channel_kind_and_number() -> None:
    tags = {tag_of(c, kind, n) for c in (1, 2, 99) for kind in (EXCHANGE, SPREAD, PULL, READ, SMALL) for n in range(9)}
    assert len(tags) == 3 * 5 * 9 and all(0 <= tag < 2**31 for tag in tags)
    assert 0 <= tag_of(2**40 + 1, SMALL, 2**40) < 2**31


def test_handles_run_their_phases_once() -> None:
    done: list[str] = []

    def first() -> Handle:
        done.append("first")
        return Handle(ALONE, "second of two", [], lambda: done.append("second"))

    handle = Handle(ALONE, "first of two", [], first)
    assert not done
    handle.wait()
    handle.wait()
    assert done == ["first", "second"] and handle.done and handle.advance() is None


def test_an_axis_of_one_sends_nothing() -> None:
    full = torch.arange(4.0)
    collectives.spread(ALONE, full, (0, 4), tag_of(1, SPREAD, 0), "spread").wait()
    collectives.broadcast(ALONE, full, 0, "broadcast")
    collectives.broadcast_tensors(ALONE, [full], "broadcast of a model")
    assert torch.equal(full, torch.arange(4.0)) and ALONE.peers == []
    seen: list[torch.Tensor] = []
    collectives.reduce_to_owners(ALONE, full, (0, 4), tag_of(1, EXCHANGE, 0), "reduce", seen.extend).wait()
    assert [part.tolist() for part in seen] == [[0.0, 1.0, 2.0, 3.0]]


def test_axes() -> None:
    assert THREE.size == 3 and THREE.peers == [0, 2]
    assert [THREE.channel() for _ in range(3)] == [2, 3, 4] and ALONE.channel() != ALONE.channel()


def test_numbers_of_one_rank() -> None:
    cpu = torch.device("cpu")
    assert Scalars().table(ALONE, [1.5, -2.0], 0, "numbers", cpu) == [[1.5, -2.0]]
    assert Scalars().value(torch.tensor(2.5)) == 2.5
    simulated = FakeScalars()
    assert simulated.table(THREE, [3.0], 0, "numbers", cpu) == [[3.0]] * 3
    assert simulated.value(torch.empty((), device="meta")) == 1.0 and simulated.device == torch.device("meta")


def test_planted_delays_see_every_label(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(collectives, "PLANTED_DELAY", seen.append)
    Handle(ALONE, "a label", []).wait()
    collectives.delay("another")
    assert seen == ["a label", "another"]
