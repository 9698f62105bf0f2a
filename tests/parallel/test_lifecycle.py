"""When sharded parameters are whole: freed between uses, within the limits, in the order of the last pass."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedError
from deepspeed.zero.parameters.parameter import ShardedParameter
from deepspeed.zero.parameters.shard_group import State
from tests.parallel.tiny import (
    STAGES,
    WIDTH,
    Tiny,
    expect_close,
    loss_of,
    masters,
    micro_step,
    reference,
    rows,
    start,
)

RANKS = 2
BLOCK = 48  # elements of a block's group, with its padding
LIMITS = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
TWO_GROUPS = dict.fromkeys(LIMITS, 2 * BLOCK)


def is_whole(param: Any) -> bool:
    return not isinstance(param, ShardedParameter)


def storage_bytes(param: Any) -> int:
    """What the group of a parameter holds for the gathered values."""
    return param._ds_member.group.full.untyped_storage().nbytes()


def watch(model: nn.Module, seen: list[tuple[str, ...]]) -> None:
    """Note which blocks are whole whenever a block begins its forward."""

    def note(*_: Any) -> None:
        blocks = dict(model.layers.named_children()) | {"out": model.out}
        seen.append(tuple(name for name, block in blocks.items() if is_whole(next(block.parameters()))))

    for block in model.layers:
        block.register_forward_pre_hook(note)


def freed() -> None:
    for precision in ("fp32", "bf16"):
        with start(3, precision=precision, zero=TWO_GROUPS) as engine:
            seen: list[tuple[str, ...]] = []
            watch(engine.module, seen)
            params = list(engine.module.parameters())
            for step in range(3):
                loss = loss_of(engine, rows(step, 0))
                assert sum(is_whole(p) for p in params) < len(params)  # between forward and backward too
                engine.backward(loss)
                engine.step()
                for p in params:
                    assert not is_whole(p) and storage_bytes(p) == 0
            assert max(len(blocks) for blocks in seen) <= 2, seen
            report = engine.zero_report()
            assert report["live"] == 0 and report["groups"] == 4, report
            assert 0 < report["peak"] <= 2 * BLOCK, report
            with torch.no_grad():
                engine(rows(0, 0))
            assert not any(is_whole(p) for p in params)


def test_freed_between_uses_within_two_groups(workers: Any) -> None:
    workers(RANKS).run(freed)


def one_group_at_a_time() -> None:
    twin = reference([[0], [1]], RANKS)
    with start(3, zero=dict.fromkeys(LIMITS, 0)) as engine:
        micro_step(engine, 0)
        micro_step(engine, 1)
        assert engine.zero_report()["peak"] <= 2 * BLOCK
        expect_close(masters(engine), twin.parameters(), 0.0)


def test_limits_of_zero(workers: Any) -> None:
    workers(RANKS).run(one_group_at_a_time)


def kept() -> None:
    """At the default limits a gathered group stays from forward to its backward; nothing stays after the step."""
    with start(3, sharded=False, zero={"stage3_param_persistence_threshold": 0}) as engine:
        params = list(engine.module.parameters())
        for step in range(3):
            before = engine.zero_report()["gathers"]
            loss = loss_of(engine, rows(step, 0))
            assert all(map(is_whole, params))
            assert engine.zero_report()["live"] == engine.zero_report()["peak"] > 0
            engine.backward(loss)
            engine.step()
            assert engine.zero_report()["gathers"] - before == engine.zero_report()["groups"]
            assert not any(map(is_whole, params))
        engine(rows(0, 0))
        engine.empty_partition_cache()
        assert not any(map(is_whole, params))


def test_defaults_keep_what_backward_needs(workers: Any) -> None:
    workers(RANKS).run(kept)


def persistence() -> None:
    """Parameters below the threshold stay whole; their gradients and optimizer state are split all the same."""
    twin = reference([[0], [1]], RANKS)
    for threshold, model_limit, whole in ((7, 1 << 40, 4), (7, 2 * WIDTH + 1, 2), (10_000, 1 << 40, 8), (0, 0, 0)):
        keys = {"stage3_param_persistence_threshold": threshold, "stage3_model_persistence_threshold": model_limit}
        with start(3, zero=keys) as engine:
            params = list(engine.module.parameters())
            assert sum(p.ds_persist for p in params) == sum(map(is_whole, params)) == whole, (threshold, whole)
            micro_step(engine, 0)
            micro_step(engine, 1)
            assert sum(map(is_whole, params)) == whole
            expect_close(masters(engine), twin.parameters(), at=threshold)
            gradients = engine.state_bytes()["gradients"]
            assert gradients <= 4 * (sum(p.numel() for p in params) / RANKS + 16 * engine.zero_report()["groups"] + 64)


def test_persistence_thresholds(workers: Any) -> None:
    workers(RANKS).run(persistence)


def prefetched() -> None:
    """From the second pass on, what comes next is on its way while the current block runs."""
    with start(3, zero=TWO_GROUPS) as engine:
        model = engine.module
        states: list[State] = []

        def note(index: int) -> Any:
            return lambda *_: states.append(next(model.layers[index + 1].parameters())._ds_member.group.state)

        for index in range(2):
            model.layers[index].register_forward_pre_hook(note(index))
        micro_step(engine, 0)
        assert states == [State.SHARDED, State.SHARDED]
        states.clear()
        micro_step(engine, 1)
        assert all(state is not State.SHARDED for state in states), states


def test_prefetch_follows_the_last_pass(workers: Any) -> None:
    workers(RANKS).run(prefetched)


def leftovers() -> None:
    """An exception in forward, an abandoned loss and a change of mode leave nothing gathered after the next step."""
    with start(3) as engine:
        params = list(engine.module.parameters())
        micro_step(engine, 0)
        hook = engine.module.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            engine(rows(0, 0))
        except ZeroDivisionError:
            hook.remove()
        abandoned = loss_of(engine, rows(0, 0))
        del abandoned
        engine.eval()
        with torch.no_grad():
            engine(rows(0, 0))
        engine.train()
        micro_step(engine, 1)
        assert not any(map(is_whole, params)) and engine.zero_report()["live"] == 0
        expect_close(masters(engine), reference([[0], [1]], RANKS).parameters())


def test_interrupted_passes(workers: Any) -> None:
    workers(RANKS).run(leftovers)


def nothing_left() -> list[int]:
    """Tensors that are alive after each of several rounds of engines."""

    def alive() -> int:
        for _ in range(8):  # hooks on several inputs make cycles with the graph: each pass frees one link of it
            gc.collect()
        with torch._C.DisableTorchFunctionSubclass():
            return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    counts = []
    for _ in range(4):
        for stage in STAGES:
            with start(stage, Tiny()) as engine:
                micro_step(engine, 0)
            del engine
        counts.append(alive())
        until = time.monotonic() + 5  # on a busy machine another thread may still be letting go
        while counts[-1] > min(counts) and time.monotonic() < until:
            time.sleep(0.05)
            counts[-1] = alive()
    return counts


def test_engines_leave_no_tensor_behind(workers: Any) -> None:
    for counts in workers(RANKS).run(nothing_left):
        assert counts[3] == counts[1], counts


def without_the_root() -> None:
    """A model driven through its children or a method: passes end, nothing stays, training equals that by forward."""
    twin = reference([[0], [1]], RANKS)
    with start(3, zero={"stage3_param_persistence_threshold": 0}) as engine:
        model, trace = engine.module, engine._components.lifecycle.prefetcher.trace
        params = list(model.parameters())

        def by_children(x: torch.Tensor) -> torch.Tensor:
            for layer in model.layers:
                x = layer(x)
            return model.out(x)

        longest = 0
        for step in range(2):
            for _ in range(10):
                with torch.no_grad():
                    by_children(rows(step, 0))
                assert not any(map(is_whole, params)), "kept although nothing will need it"
            engine.backward(by_children(rows(step, dist.get_rank())).square().mean())
            engine.step()
            longest = max(longest, len(trace._now.groups))
        assert longest <= 8, longest  # of one pass forward and backward
        for _ in range(10):  # backward without a step
            by_children(rows(0, 0)).mean().backward()
        assert len(trace._now.groups) <= 8
        engine.zero_grad()
        expect_close(masters(engine), twin.parameters())
        late = engine._components.lifecycle.prefetcher.late
        engine.backward(by_children(rows(0, dist.get_rank())).square().mean())
        assert engine._components.lifecycle.prefetcher.late == late  # the order of the last such pass is known


def test_passes_without_the_root_end(workers: Any) -> None:
    workers(RANKS).run(without_the_root)


def whole_and_split() -> None:
    """Below the limits the full buffers stay beside the slices: the breakdown counts both, and nothing else does."""
    for low in ("fp32", "bf16"):
        for limits, kept in ((dict.fromkeys(LIMITS, 10**9), True), (TWO_GROUPS, False)):
            with start(3, precision=low, zero={"stage3_param_persistence_threshold": 0, **limits}) as engine:
                size, groups = 2 if low == "bf16" else 4, engine._components.groups
                slices = sum(group.values.numel for group in groups) * size
                buffers = sum(group.numel for group in groups) * size if kept else 0
                found = engine.state_bytes()
                assert (found["parameters"], found["gathered"]) == (slices, buffers), (low, limits, found)
                with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                    assert engine.state_bytes()["gathered"] == sum(group.numel for group in groups) * size


def test_the_breakdown_counts_retained_buffers(workers: Any) -> None:
    workers(RANKS).run(whole_and_split)


def destroyed_with_a_lost_write(slow: int) -> None:
    """A view is written to after its parameter was freed, and one rank is slow to serve: destroy says so on all ranks,
    and no rank leaves while another still pulls."""
    from deepspeed.comm.collectives import collectives
    from tests.parallel.test_order import by_messages

    with by_messages(True):
        engine = start(3, sharded=False, zero={"stage3_param_persistence_threshold": 0, **dict.fromkeys(LIMITS, 0)})
    first, last = engine.module.layers[0][0].weight, engine.module.out.weight
    with deepspeed.zero.GatheredParameters([first]):
        view = first.data.view(-1)
    view.add_(1.0)
    if dist.get_rank() != slow:
        last._ds_member.group.start_all_gather()
    if dist.get_rank() == slow:
        collectives.PLANTED_DELAY = lambda label: time.sleep(0.5) if label.startswith("serve") else None
    try:
        try:
            engine.destroy()
            raise AssertionError("the lost write was not noticed")
        except deepspeed.errors.ShardedParameterError as error:
            assert "layers.0.0.weight" in str(error)
            engine.destroy()
    finally:
        dist.barrier()
        collectives.PLANTED_DELAY = None


@pytest.mark.parametrize("slow", [0, 1])
def test_destroy_ends_on_all_ranks_whatever_it_finds(workers: Any, slow: int) -> None:
    workers(RANKS).run(destroyed_with_a_lost_write, slow)


def refused_then_mended() -> None:
    """Refused while the groups are made (optimizer) and when they are (scheduler): the third time it runs."""
    model, config = Tiny(), {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    strange = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(DeepSpeedError):
        deepspeed.initialize(model=model, optimizer=strange, config=config)
    config |= {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    with pytest.raises(DeepSpeedError):
        deepspeed.initialize(model=model, config=config | {"scheduler": {"type": "WarmupLR", "params": {"no": 1}}})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    with engine:
        micro_step(engine, 0)


def test_a_model_whose_engine_was_refused_gets_another(workers: Any) -> None:
    workers(RANKS).run(refused_then_mended)
