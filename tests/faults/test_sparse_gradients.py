"""Failures between the messages of gradients that are sent by rows: every rank ends with an error, and none hangs."""

from __future__ import annotations

import pytest

from tests.faults.test_experts import check_all_ranks_end

START = """
import deepspeed
from deepspeed.zero.gradients import row_exchange
from tests.parallel.test_sparse_gradients import model_of, train
from tests.parallel.tiny import start
dist.init_distributed(verbose=False)
rank = dist.get_rank()
def run(stage, between):
    engine = start(stage, model_of(), sparse_gradients=True)
    train(engine, range(1))
    print(time.monotonic(), flush=True)
    if rank == 1:
        for name in ("_send_to_owners", "_send_to_all"):
            setattr(row_exchange.RowExchange, name, between)
    train(engine, range(1, 3))
def stay():
    began = {name for name in os.listdir(os.environ["START_LINE"]) if name.startswith("start-")}
    (other,) = {name.removeprefix("start-") for name in began} - {str(os.getpid())}
    while os.path.exists(f"/proc/{other}"):
        time.sleep(0.1)
"""
CASES = {
    "a rank dies": ("run(1, lambda *_: os._exit(9))", ("rows of table.weight", "rank 1")),
    "a rank dies at stage 0": ("run(0, lambda *_: os._exit(9))", ("rows of table.weight", "rank 1")),
    "a rank raises": ("""
        def fail(*_): raise ValueError("no luck")
        try:
            run(2, fail)
        except ValueError:  # it stays as long as the other one, and takes part in nothing more
            stay()
    """, ("rows of table.weight", "rank 1")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end(case: str) -> None:
    check_all_ranks_end(START, *CASES[case])
