"""Failures in generation and rewards: every rank ends with an error that says what happened, and none hangs."""

from __future__ import annotations

import pytest

from tests.faults.test_experts import check_all_ranks_end

START = """
import deepspeed, torch
from deepspeed.inference.sampling_params import SamplingParams
from tests.parallel.test_rollouts import model_of, prompts_of, settings, train
dist.init_distributed(verbose=False)
rank = dist.get_rank()
sampling = SamplingParams(max_new_tokens=20, temperature=1.0, seed=rank)
def engine_of(stage, **block):
    config = settings(stage, hybrid_engine={"enabled": True} | block)
    return deepspeed.initialize(model=model_of("llama"), config=config)[0]
def stay():
    began = {name for name in os.listdir(os.environ["START_LINE"]) if name.startswith("start-")}
    (other,) = {name.removeprefix("start-") for name in began} - {str(os.getpid())}
    while os.path.exists(f"/proc/{other}"):
        time.sleep(0.1)
"""
# by name: what happens on rank 1, and words that the error of rank 0 has
CASES = {
    "a rank dies in generation": ("""
        engine = engine_of(3, pin_parameters=False)
        engine.score([[1, 2, 3]])
        if rank == 1:
            passes, run = [], engine._generation.generator._executor.run
            def dying(batch):
                passes.append(batch)
                if len(passes) == 3:
                    print(time.monotonic(), flush=True)
                    os._exit(9)
                return run(batch)
            engine._generation.generator._executor.run = dying
        print(time.monotonic(), flush=True)
        engine.rollout(prompts_of(rank), sampling)
        train(engine, 1)
    """, ("rank 1",)),
    "a reward raises on one rank": ("""
        engine = engine_of(2)
        answers = engine.rollout(prompts_of(rank), sampling)
        print(time.monotonic(), flush=True)
        try:
            if rank == 1:
                raise ValueError("no reward")
        except ValueError:
            stay()
        else:
            train(engine, 1)
    """, ("rank 1",)),
}  # fmt: skip


@pytest.mark.parametrize("case", ["a rank dies in generation", pytest.param(list(CASES)[1], marks=pytest.mark.slow)])
def test_all_ranks_end(case: str) -> None:
    check_all_ranks_end(START, *CASES[case])
