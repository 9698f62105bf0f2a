"""Encoded messages on the device: the losses of the CPU, no race, no wait that has no reason."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.collectives import encoded
from deepspeed.comm.collectives.collectives import Handle
from deepspeed.comm.process_groups import axis as axes
from tests.emulated import runs
from tests.emulated.cells import Cell
from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import observed
from tests.emulated.test_across_hosts import PER_HOST, on_hosts_of

need_compiler()

CELLS = [
    Cell(stage=0, ranks=2, small_buckets=True, wire="int8"),
    Cell(stage=2, ranks=2, small_buckets=True, wire="int4", dtype="bf16", accumulation=2),
    Cell(stage=3, ranks=2, small_buckets=True, wire="int8"),
    *(
        pytest.param(cell, marks=pytest.mark.slow)
        for cell in (
            Cell(stage=1, ranks=2, small_buckets=True, wire="int8", dtype="fp16"),
            Cell(stage=2, ranks=4, small_buckets=True, wire="int4", tier="cpu"),
            Cell(stage=3, ranks=4, small_buckets=True, wire="int4", tier="cpu-cpu", accumulation=2),
            Cell(stage=3, ranks=4, small_buckets=True, wire="int8", hybrid=True),
            Cell(stage=3, ranks=2, small_buckets=True, wire="int8", own_stream=True, checkpointing=True, init=True),
            Cell(stage=2, ranks=2, small_buckets=True, wire="bf16", own_stream=True),
        )
    ),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_losses_are_those_of_the_cpu(workers, emulated, cell: Cell) -> None:
    found = emulated(cell.ranks).run(runs.train, cell, timeout=LIMIT)
    assert [report for rank in found for report in rank.reports] == []
    theirs = [rank.losses for rank in workers(cell.ranks).run(runs.train, cell, timeout=LIMIT)]
    for ours, others in zip([rank.losses for rank in found], theirs, strict=True):
        # A value next to the middle of two codes may be rounded to the other one.
        assert ours == pytest.approx(others, rel=1e-4 if cell.dtype == "fp32" else 1e-3)


@contextlib.contextmanager
def on_two_hosts() -> Iterator[None]:
    """Inside, every two neighbours say that they are a host of their own, and share memory with each other alone."""
    shares = axes.shared_memory_of

    def shared_memory_of(group: dist.ProcessGroup) -> object:
        hosts = {rank // PER_HOST for rank in dist.get_process_group_ranks(group)}
        return shares(group) if len(hosts) == 1 else None

    with pytest.MonkeyPatch.context() as patch, on_hosts_of(PER_HOST):
        patch.setattr(axes, "boot", lambda: f"host {dist.get_rank() // PER_HOST}")
        patch.setattr(axes, "shared_memory_of", shared_memory_of)
        yield


def are_alike(tensors: list[torch.Tensor]) -> bool:
    """Whether all ranks have the same bits. All ranks call this."""
    flat = torch.cat([tensor.float().flatten() for tensor in tensors])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    return all(torch.equal(every[0], other) for other in every)


def trained(cell: Cell) -> runs.Seen:
    """A cell on two hosts; `extra`: codecs of the buckets' messages, and whether they go in two steps."""
    with on_two_hosts(), observed(cell.own_stream) as seen:
        engine = runs.engine_of(cell)
        made = [bucket.encoded for bucket in engine._state.components.reducer.buckets]
        seen.extra = {(each.slices.codec.name, each.two_steps is not None) for each in made if each is not None}
        for step in range(runs.STEPS):
            seen.losses += [runs.micro_step(engine, step, micro) for micro in range(cell.accumulation)]
        if cell.stage < 3:
            seen.extra.add(("alike", are_alike([param.detach() for param in engine.module.parameters()])))
        engine.destroy()
        del engine
    return seen


SHARE, PARAMETERS = 1000, [300, 1, 1699, 257, 1743]  # elements of a rank's slice; of parameters, in two hosts' slices


def reduced(bits: int) -> dict[str, object]:
    """Two encoded sums with error memory on two hosts of two ranks, and what they cost."""
    with on_two_hosts():
        device, size = torch.device("cuda", torch.cuda.current_device()), dist.get_world_size()
        world = axes.world_axis("dp", device)
        axes.axes_here().find_hosts()
        axes.axes_here().divide_by_host([world.ranks], device)
        codec, cuts = encoded.BlockCodec(bits), [rank * SHARE for rank in range(size + 1)]
        steps = encoded.two_steps(world, codec, cuts, list(itertools.accumulate(PARAMETERS, initial=0)))
        assert steps is not None
        sources = [torch.Generator().manual_seed(rank) for rank in range(size)]
        gradients = [[torch.randn(cuts[-1], generator=s).bfloat16() for s in sources] for _ in range(2)]
        layout, own = steps.slices.layouts, world.rank
        memory = torch.zeros(2 * SHARE, dtype=torch.bfloat16, device=device)
        expected_memory, equal, sums = torch.zeros(2, 2, SHARE, dtype=torch.bfloat16), [], []
        payloads = [torch.empty(steps.slices.nbytes, dtype=torch.uint8, device=device) for _ in range(2)]

        def finish(parts: list[torch.Tensor]) -> None:
            sums.append(torch.empty(SHARE, device=device))
            layout[own // PER_HOST].sum(parts, sums[-1], 0.5, False)

        def start(flat: torch.Tensor, payload: torch.Tensor) -> Handle:
            encoding = encoded.Encoding(steps.slices, payload, lambda: memory, 0.5)
            return steps.reduce(flat, encoding, 0, "reduce of a group", finish)

        flats = [ranks[own].to(device) for ranks in gradients]
        start(torch.zeros_like(flats[0]), payloads[0]).wait()  # copies tables to the device; no error of zeros is kept
        sums.clear()
        with observed() as seen:
            for handle in [start(*pair) for pair in zip(flats, payloads, strict=True)]:
                handle.wait()
        for index, ranks in enumerate(gradients):  # what the other host sends, with its memory, and the own host's sum
            low, high = cuts[own], cuts[own + 1]
            hosts = [
                torch.stack(ranks[at : at + PER_HOST]).sum(0, dtype=torch.float32)[low:high] for at in (0, PER_HOST)
            ]
            other = 1 - own // PER_HOST
            payload = torch.empty(layout[0].nbytes + layout[1].nbytes, dtype=torch.uint8)
            form = layout[own // PER_HOST]
            form.encode(hosts[other], payload[: form.nbytes], expected_memory[other, 0], 0.5)
            form.decode(payload[: form.nbytes], hosts[other])
            equal.append(torch.equal(sums[index].cpu(), 0.5 * (hosts[0] + hosts[1])))
        sent = steps.slices.byte_cuts[1]
        return {"equal": equal, "memory": bool(memory.any()), "sent": sent, "counters": seen.counters,
                "waits": seen.waits, "reports": seen.reports}  # fmt: skip


@pytest.mark.parametrize("bits", [8, 4])
def test_sums_and_bytes_of_two_hosts(emulated, bits: int) -> None:
    for seen in emulated(4).run(reduced, bits, timeout=LIMIT):
        assert seen["equal"] == [True, True] and seen["memory"] and seen["reports"] == [] and seen["waits"] == []
        within = 2 * (2 * SHARE)  # half of the 4,000 elements of 2 bytes come from the neighbour
        assert seen["sent"] <= SHARE * bits / 8 + 2 * 8 + 64  # at most eight blocks
        assert seen["counters"]["bytes.wire"] == 2 * (within + seen["sent"])


HOSTS = [
    *(
        pytest.param(cell, marks=pytest.mark.slow)
        for cell in (
            Cell(stage=2, ranks=4, small_buckets=True, wire="int4", dtype="bf16", accumulation=2, hosts=True),
            Cell(stage=0, ranks=4, small_buckets=True, wire="int8", hosts=True),
            Cell(stage=1, ranks=4, small_buckets=True, wire="int8", dtype="fp16", hosts=True),
            Cell(stage=2, ranks=4, small_buckets=True, wire="bf16", hosts=True, own_stream=True),
            Cell(stage=2, ranks=4, small_buckets=True, wire="int8", tier="cpu", hosts=True),
            Cell(stage=3, ranks=4, small_buckets=True, wire="int8", hosts=True, own_stream=True, init=True),
            Cell(stage=3, ranks=4, small_buckets=True, wire="int4", hosts=True, checkpointing=True, accumulation=2),
            Cell(stage=3, ranks=4, small_buckets=True, wire="int8", hosts=True, accumulation=2, secondary=True),
        )
    ),
]


@pytest.mark.parametrize("cell", HOSTS, ids=str)
def test_sums_are_formed_within_hosts_first(workers, emulated, cell: Cell) -> None:
    found = emulated(cell.ranks).run(trained, cell, timeout=LIMIT)
    assert [report for rank in found for report in rank.reports] == []
    alike = {("alike", True)} if cell.stage < 3 else set()
    for rank in found:
        assert rank.extra == {(cell.wire, True)} | alike
        assert rank.counters["nccl.all_to_all_single"] > 0
    theirs = [rank.losses for rank in workers(cell.ranks).run(trained, cell, timeout=LIMIT)]
    for ours, others in zip([rank.losses for rank in found], theirs, strict=True):
        assert ours == pytest.approx(others, rel=1e-4 if cell.dtype == "fp32" else 1e-3)


def replicated(cell: Cell) -> runs.Seen:
    """A cell whose replicas of shards lie on two hosts; `extra`: codecs between replicas, whether these are alike."""
    from deepspeed.zero.api.tensor_access import safe_get_full_fp32_param

    with on_two_hosts(), observed(cell.own_stream) as seen:
        engine = runs.engine_of(cell)
        made = [bucket.encoded for bucket in engine._state.components.reducer.buckets]
        seen.extra = {None if each is None or each.copies is None else each.copies.codec.name for each in made}
        for step in range(runs.STEPS):
            seen.losses += [runs.micro_step(engine, step, micro) for micro in range(cell.accumulation)]
        full = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
        seen.extra.add(("alike", are_alike([value for value in full if value is not None])))
        engine.destroy()
        del engine
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        Cell(stage=3, ranks=4, small_buckets=True, wire="int8", hybrid=True, hosts=True),
        Cell(stage=3, ranks=4, small_buckets=True, wire="int4", hybrid=True, hosts=True, dtype="bf16", accumulation=2),
        Cell(stage=3, ranks=4, small_buckets=True, wire="int8", hybrid=True, hosts=True, dtype="fp16", own_stream=True),
        Cell(stage=3, ranks=4, small_buckets=True, wire="int4", hybrid=True, hosts=True, tier="cpu-cpu"),
    ],
    ids=str,
)
def test_sums_of_replicas_are_encoded(workers, emulated, cell: Cell) -> None:
    found = emulated(cell.ranks).run(replicated, cell, timeout=LIMIT)
    assert [report for rank in found for report in rank.reports] == []
    for rank in found:
        assert rank.extra == {cell.wire, ("alike", True)}
    theirs = [rank.losses for rank in workers(cell.ranks).run(replicated, cell, timeout=LIMIT)]
    for ours, others in zip([rank.losses for rank in found], theirs, strict=True):
        assert ours == pytest.approx(others, rel=1e-4 if cell.dtype == "fp32" else 1e-3)
