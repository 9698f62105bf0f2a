"""Captured passes: replays give the tokens of eager passes, whatever joins, ends, is preempted or guessed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from deepspeed.inference.executors.captured import MOST_GRAPHS, padded_shapes
from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import Seen, emulates, observed

need_compiler()

SIZES: dict[str, Any] = {"page_size": 4, "max_sequences": 6, "max_batch_tokens": 32, "prompt_chunk": 8}


def test_graphs_are_few_and_padded_to_powers_of_two():
    assert padded_shapes(6) == [(1, 1), (2, 1), (4, 1), (6, 1)]
    assert padded_shapes(1) == [(1, 1)]
    assert padded_shapes(300)[-2:] == [(256, 1), (300, 1)]
    assert padded_shapes(32, drafts=2, drafting=8) == [(1, 3), (2, 3), (4, 3), (16, 1), (8, 3), (32, 1)]
    assert padded_shapes(3, drafts=4, drafting=8) == [(1, 5), (2, 5), (3, 5)]
    for sequences in (1, 7, 512, 5000, 1 << 20):
        for drafts in (0, 3):
            assert 1 <= len(padded_shapes(sequences, drafts, 8)) <= MOST_GRAPHS


def made(**options: Any) -> Any:
    from deepspeed.inference import Generator
    from tests.unit.inference.toys import llama

    return Generator(llama(num_hidden_layers=1).to("cuda"), **{**SIZES, **options})


def both_ways(seed: int, requests: int, options: dict[str, Any]) -> Seen:
    """Tokens of a schedule with and without graphs, and what the detector saw."""
    from tests.emulated.captured_runs import schedule, standing_in

    with observed() as seen, standing_in():
        said = []
        for graphs in (False, True):
            generator = made(cuda_graphs=graphs, cache_bytes=11 * 256, **options)
            said.append(schedule(generator, seed, requests))
            stats, passes = generator.load(), len(generator._executor.computed)
            generator.close()
        seen.extra = said, stats, passes - 2 * stats.graphs
    return seen


SCHEDULES = [(0, 0), (1, 2), *(pytest.param(s, d, marks=pytest.mark.slow) for s in range(2, 22) for d in (0, 1, 2, 4))]


@pytest.mark.parametrize(("seed", "drafts"), SCHEDULES)
def test_replayed_tokens_are_the_eager_ones(emulated, seed, drafts):
    seen = emulated(1).run(both_ways, seed, 12, {"speculation": drafts}, timeout=LIMIT)[0]
    (eager, replayed), stats, passes = seen.extra
    assert replayed == eager and len(eager) >= 10
    assert seen.reports == []
    assert stats.graphs <= MOST_GRAPHS and stats.replays > passes, (stats, passes)
    assert stats.preemptions > 0 or seed > 1


def decoder(seed: int, drafts: int, *sizes: Any) -> Seen:
    """As `decoder_both_ways`, with kernels in plain torch."""
    from tests.emulated.captured_runs import decoder_both_ways
    from tests.unit.inference.reference_kernels import ReferenceKernels

    return decoder_both_ways(ReferenceKernels(), seed, drafts, *sizes)


def test_few_requests_of_the_device_executor_have_the_eager_tokens(emulated):
    from tests.emulated.captured_runs import check_decoder

    check_decoder(emulated(1).run(decoder, 3, 2, 3, 12, timeout=LIMIT)[0], 0, requests=3)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "drafts"), [(seed, drafts) for seed in range(20) for drafts in (0, 1, 3)])
def test_replayed_tokens_of_the_device_executor_are_the_eager_ones(emulated, seed, drafts):
    from tests.emulated.captured_runs import check_decoder

    check_decoder(emulated(1).run(decoder, seed, drafts, timeout=LIMIT)[0], drafts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "seed", "drafts"), [(torch.float32, 0, 0), (torch.float32, 1, 3), (torch.bfloat16, 2, 0)]
)
def test_replayed_tokens_of_weights_in_fp8_are_the_eager_ones(emulated, dtype, seed, drafts):
    from tests.emulated.captured_runs import check_decoder

    check_decoder(emulated(1).run(decoder, seed, drafts, 6, 30, dtype, timeout=LIMIT)[0], drafts)


def what_a_pass_costs() -> Seen:
    from deepspeed.inference import Request, SamplingParams
    from deepspeed.inference.generator import DEVICE_CHUNK
    from tests.emulated.captured_runs import standing_in

    with standing_in():
        generator = made()
        for number in range(3):
            generator.submit(Request(number, [number + 1] * 3, SamplingParams(max_new_tokens=9, ignore_eos=True)))
        generator.step()
        with observed() as seen:
            emulates().clear()
            assert len(generator.step()) == 3
        generator.close()
        other = made(prompt_chunk=None, max_batch_tokens=1024)
        assert other._scheduler.min_chunk == DEVICE_CHUNK[0]  # of prompts beside next tokens, on a device
        other.close()
    return seen


def test_a_pass_is_one_replay_and_one_wait(emulated):
    seen = emulated(1).run(what_a_pass_costs, timeout=LIMIT)[0]
    assert seen.counters["launch"] == 5 and seen.counters["graph.replays"] == 1, seen.counters
    assert [what for what, _ in seen.waits] == ["event"] and seen.reports == [], seen.waits


def lines_of(run: Any) -> tuple[Any, list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("DeepSpeed")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        return run(), [line for line in lines if "graph" in line.lower()]
    finally:
        log.removeHandler(handler)


def a_capture_that_fails() -> tuple[list[str], list[str]]:
    from tests.emulated.captured_runs import StandIn, schedule, standing_in

    plain = StandIn.compute

    def waits(self: Any, inputs: Any) -> torch.Tensor:
        logits = plain(self, inputs)
        logits[0, 0].item()  # the host looks at every pass
        return logits

    def run() -> Any:
        generator = made(cache_bytes=1 << 16)
        tokens, stats = schedule(generator, 0, 6), generator.load()
        generator.close()
        return tokens, stats

    with standing_in():
        wanted, _ = run()
        with observed() as seen:
            StandIn.compute = waits  # type: ignore[method-assign]
            try:
                (tokens, stats), lines = lines_of(run)
            finally:
                StandIn.compute = plain  # type: ignore[method-assign]
    assert tokens == wanted and (stats.graphs, stats.graph_bytes, stats.replays) == (0, 0, 0)
    return lines, seen.reports


def test_a_generator_goes_on_without_graphs_where_a_capture_fails(emulated):
    lines, reports = emulated(1).run(a_capture_that_fails, timeout=LIMIT)[0]
    assert len(lines) == 1 and "capture failed" in lines[0] and "cudaErrorStreamCaptureUnsupported" in lines[0], lines
    assert all(report.startswith("CAPTURE") for report in reports) and len(reports) == 1, reports


def pages_that_move() -> tuple[list[Any], list[Any]]:
    from tests.emulated.captured_runs import schedule, standing_in

    with standing_in():
        generator = made(cache_bytes=1 << 16)
        torch.cuda.empty_cache()
        before, stats = torch.cuda.memory_reserved(), [generator.load()]
        pages = generator._executor.store.bytes_per_page() * (generator.pages.count - 1)
        said = [schedule(generator, 3, 6)]
        generator.release_cache()
        torch.cuda.empty_cache()
        stats.append(generator.load())
        less = before - torch.cuda.memory_reserved()
        assert less >= stats[0].graph_bytes + pages and stats[0].graph_bytes > 0, (less, pages, stats[0])
        said.append(schedule(generator, 3, 6))
        stats.append(generator.load())
        generator.close()
    return said, [(each.graphs, each.graph_bytes > 0, each.replays) for each in stats]


def test_memory_of_graphs_goes_with_the_cache_and_they_are_captured_again(emulated):
    said, stats = emulated(1).run(pages_that_move, timeout=LIMIT)[0]
    assert said[0] == said[1]
    (graphs, _, none), (_, held, first), (again, _, second) = stats
    assert graphs == again == 4 and not held and none == 0 < first < second == 2 * first


def weights_that_move() -> tuple[Any, Any, list[str]]:
    from tests.emulated.captured_runs import schedule, standing_in

    with standing_in():
        still = made(cache_bytes=1 << 16)
        wanted = schedule(still, 4, 6)
        still.close()
        generator = made(cache_bytes=1 << 16)
        executor = generator._executor
        plain = executor.native

        def native(batch: Any) -> bool:
            executor.weights = [weight.clone() for weight in executor.weights]
            executor.version += 1
            return plain(batch)

        executor.native = native
        tokens, lines = lines_of(lambda: schedule(generator, 4, 6))
        stats = generator.load()
        generator.close()
    return tokens == wanted, (stats.graphs, stats.graph_bytes), lines


def test_weights_that_move_in_every_pass_end_the_graphs(emulated):
    same, stats, lines = emulated(1).run(weights_that_move, timeout=LIMIT)[0]
    assert same and stats == (0, 0)
    assert "move every few passes" in lines[-1] and 2 <= len(lines) <= 4, lines


def steps_on_two_streams(graphs: bool) -> tuple[list[list[int]], list[str]]:
    from deepspeed.inference import Request, SamplingParams
    from tests.emulated.captured_runs import standing_in

    said: list[list[int]] = []
    with observed() as seen:
        for streams in ([torch.cuda.current_stream()], [torch.cuda.Stream(), torch.cuda.Stream()]):
            torch.cuda.synchronize()
            with standing_in():
                generator = made(cuda_graphs=graphs)
            generator.submit(Request(0, [5, 6, 7], SamplingParams(max_new_tokens=8, ignore_eos=True)))
            said.append([])
            torch.cuda.synchronize()
            while not generator.idle:
                streams.append(streams.pop(0))
                with torch.cuda.stream(streams[0]):
                    said[-1] += [token for output in generator.step() for token in output.tokens]
            generator.close()
    return said, seen.reports


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_on_several_streams_follow_each_other(emulated, graphs):
    (wanted, tokens), reports = emulated(1).run(steps_on_two_streams, graphs, timeout=LIMIT)[0]
    assert tokens == wanted and len(tokens) == 8 and reports == []
