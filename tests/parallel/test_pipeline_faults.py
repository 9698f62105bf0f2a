"""What goes wrong between stages is noticed and named: batches, models, copies, counts, deaths."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from tests.harness.pool import WORKER_IMPORTS
from tests.parallel.pipeline_faults import dropped, many_lengths, other_batches, other_models, stale, untied
from tests.unit.comm.ranks import run_ranks

TIMEOUT, MARGIN = 3.0, 5.0  # seconds: of one collective, and until every rank has ended


@pytest.mark.parametrize("run", [other_batches, other_models, dropped, stale], ids=lambda run: run.__name__)
def test_ranks_that_differ_are_told(workers: Any, run: Any) -> None:
    workers(2).run(run)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_untied_head_is_told(workers: Any, stage: int) -> None:
    workers(2).run(untied, stage)


def test_messages_of_many_sizes_keep_no_more_buffers(workers: Any) -> None:
    for found in workers(2).run(many_lengths):
        assert max(found) <= 6, found


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_stage_that_dies_ends_the_others_with_its_place(where: str) -> None:
    hook = "register_forward_pre_hook" if where == "forward" else "register_full_backward_hook"
    snippet = textwrap.dedent(f"""
        import deepspeed
        from tests.parallel.pipeline_runs import batches, config_of, deep
        dist.init_distributed(verbose=False)
        rank, model = dist.get_rank(), deep("Llama", 2)
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={{
            **config_of(1, 2, 3), "optimizer": {{"type": "AdamW"}}}})[0]
        seen = []
        def die(*_):
            seen.append(1)
            if rank == 1 and len(seen) == 2:
                print(time.monotonic(), flush=True)
                os._exit(9)
        if rank == 1:
            model.model.layers[1].{hook}(die)
        print(time.monotonic(), flush=True)
        engine.train_batch(batches(engine.module, 0, 3, 0))
        time.sleep({TIMEOUT + MARGIN})
    """)
    ends = run_ranks(snippet, 2, limit=90, imported=WORKER_IMPORTS, DEEPSPEED_TIMEOUT=str(TIMEOUT / 60))
    assert ends[1].code == 9 and ends[0].code, ends
    # Waiting for the second gradient, or at the first, which was posted, when it is read after the other rank ended.
    waited, late = ("micro-batch 1", "[<B1]"), ("micro-batch 0", "its memory is gone")
    assert "stage 0" in ends[0].err, ends[0].err
    assert any(all(word in ends[0].err for word in words) for words in (waited, late)), ends[0].err
    assert ends[0].last_word - float(ends[1].out.split()[-1]) < TIMEOUT + MARGIN
