"""Failures of ranks that have experts together: every rank ends with an error that names the layer, and none hangs."""

from __future__ import annotations

import textwrap

import pytest

from tests.harness.pool import PATIENCE, WORKER_IMPORTS
from tests.unit.comm.ranks import run_ranks

TIMEOUT = 3.0  # seconds of one collective
MARGIN = 5.0  # seconds after it within which every rank has ended

START = """
import deepspeed
from torch import nn
from tests.parallel.test_experts import loss_of, tokens, toy, with_adamw
dist.init_distributed(verbose=False)
rank, model, layer = dist.get_rank(), toy("Mixtral"), 1
def engine_of(stage=1, ep=2, **more):
    return deepspeed.initialize(model=model, config=with_adamw(stage, ep, **more))[0]
def step(engine, number=0):
    engine.backward(loss_of(engine, tokens(rank, number)))
    engine.step()
def stay():
    began = {name for name in os.listdir(os.environ["START_LINE"]) if name.startswith("start-")}
    (other,) = {name.removeprefix("start-") for name in began} - {str(os.getpid())}
    while os.path.exists(f"/proc/{other}"):
        time.sleep(0.1)
def at_experts(action):
    def hook(*_):
        print(time.monotonic(), flush=True)
        if rank == 1:
            action()
    model.model.layers[layer].mlp.experts.act_fn.register_forward_hook(hook)
"""
EXPERTS = "model.layers.1.mlp.experts"
# by name: what happens on rank 1, and words that the error of rank 0 has
CASES = {
    "an expert raises": ("""
        def fail(): raise ValueError("no luck")
        engine = engine_of()
        at_experts(fail)
        try:
            step(engine)
        except ValueError:  # it stays as long as the other one, and takes part in nothing more
            stay()
    """, (EXPERTS, "no luck", "rank 1")),
    "a rank dies": ("""
        engine = engine_of(3)
        at_experts(lambda: os._exit(9))
        step(engine)
    """, (EXPERTS, "rank 1")),
    "a rank skips a layer": ("""
        engine = engine_of()
        if rank == 1:
            model.model.layers[layer].mlp.forward = lambda hidden: hidden
        print(time.monotonic(), flush=True)
        step(engine)
    """, (EXPERTS, "rank 1")),
    "a rank has fewer batches": ("""
        engine = engine_of()
        for number in range(1 if rank == 1 else 3):
            print(time.monotonic(), flush=True)
            step(engine, number)
    """, ("model.layers.0.mlp.experts",)),
    "sizes differ": ("""
        print(time.monotonic(), flush=True)
        step(engine_of(1, 1 + rank))
    """, ("rank 0's experts",)),
}  # fmt: skip


def check_all_ranks_end(start: str, snippet: str, words: tuple[str, ...]) -> None:
    """Run a program on two ranks; rank 0 ends in time with a typed error that has these words."""
    limit = TIMEOUT * PATIENCE
    ends = run_ranks(
        start + textwrap.dedent(snippet), 2, limit=30 * PATIENCE, imported=WORKER_IMPORTS,
        DEEPSPEED_TIMEOUT=str(limit / 60),
    )  # fmt: skip
    assert ends[0].code, ends
    assert all(word in ends[0].err for word in words), ends[0].err
    assert "deepspeed.errors." in ends[0].err, ends[0].err
    assert ends[0].last_word - float(ends[0].out.split()[-1]) < limit + MARGIN, ends


@pytest.mark.parametrize("case", ["an expert raises", *[pytest.param(c, marks=pytest.mark.slow) for c in CASES]])
def test_all_ranks_end(case: str) -> None:
    check_all_ranks_end(START, *CASES[case])
