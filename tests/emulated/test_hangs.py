"""A host that blocks on its device inside no collective: the report names rank, message and the user's line."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.emulated.build import built
from tests.emulated.needs import need_compiler
from tests.harness.fork_server import Forked, servers_of
from tests.harness.pool import EMULATED_IMPORTS, PATIENCE, free_port

need_compiler()

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 3.0 * PATIENCE  # ranks begin at the same time
SCRIPT = """
import faulthandler, os, sys, time
faulthandler.enable()
from tests.emulated import device
import torch
import deepspeed
from tests.emulated import runs
from tests.emulated.cells import Cell
from tests.emulated.test_hangs import START_LINE

exec(START_LINE)
deepspeed.init_distributed()
engine = runs.engine_of(Cell(stage={stage}, ranks=2))
runs.micro_step(engine, 0)
torch.cuda.synchronize()
rank = torch.distributed.get_rank()
if rank == 1:
    time.sleep(600)
group = engine._components.groups[0]
if {stage} == 3:
    from deepspeed.comm.collectives.collectives import spread
    values = group.full.new_zeros(group.numel)
    handle = spread(group.axis, values, group.layout.cuts, 0, f"gather of {{group.name}}")
else:
    values, handle = group.full, group.start_all_gather_updated()
handle.wait()  # returns at once
print("not blocked", flush=True)
values.sum().item()  # THE LINE
print("over", flush=True)
"""

# importing may take ranks seconds apart, more than their timeout
START_LINE = """
import os, pathlib, sys, time
ready = pathlib.Path(sys.argv[0]).with_suffix("." + os.environ["RANK"])
ready.touch()
while len(list(ready.parent.glob(ready.stem + ".[01]"))) < 2:
    time.sleep(0.01)
"""

ALONE = """
from tests.emulated import device
import torch
import deepspeed
from tests.emulated.test_gather_order import engine_of, one_step
from tests.emulated.test_hangs import START_LINE

exec(START_LINE)

deepspeed.init_distributed()
engine = engine_of(3, stage3_prefetch_bucket_size=0, stage3_max_live_parameters=0)
for step in range(13):
    alone = step == 12 and torch.distributed.get_rank() == 1
    one_step(engine, (0, 2, 1, 3) if alone else (0, 1, 2, 3), step)
"""


def ended(script: Path) -> list[tuple[int, str, str]]:
    """Exit code and words of two ranks that run a script under a short limit."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "DEEPSPEED_TIMEOUT": str(LIMIT_S / 60)}
    built()
    program = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    ranks: list[Forked] = []
    for rank, server in enumerate(servers_of(2, EMULATED_IMPORTS)):
        env = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with written(script, rank, "out").open("wb") as out, written(script, rank, "err").open("wb") as err:
            ranks.append(server.start(program, env, out.fileno(), err.fileno()))
    limit = time.monotonic() + 200 * PATIENCE
    while time.monotonic() < limit and any([rank.poll() is None for rank in ranks]):
        time.sleep(0.02)
    for one in ranks:
        one.kill()
    texts = [[written(script, rank, kind).read_text() for kind in ("out", "err")] for rank in range(2)]
    return [(one.wait(), out, err) for one, (out, err) in zip(ranks, texts, strict=True)]


def written(script: Path, rank: int, kind: str) -> Path:
    """Where a rank writes to."""
    return script.with_suffix(f".{kind}{rank}")


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_report_names_rank_message_and_line(tmp_path, stage):
    script = tmp_path / "blocks.py"
    script.write_text(SCRIPT.format(stage=stage))
    line = 1 + script.read_text().splitlines().index("values.sum().item()  # THE LINE")
    (code, out, said), (other_code, _, others) = ended(script)
    assert (code, other_code) == (1, 1) and out.endswith("not blocked\n"), said + others
    what = "gather of " if stage == 3 else "publish of "
    for text in (said, others):
        assert f"the device of rank 0 still waits for '{what}" in text, text
        assert "rank 0: in no collective" in text and f"{script}:{line}" in text, text


@pytest.mark.slow
def test_a_rank_that_changes_its_order_alone_and_late_ends_in_a_report_by_name(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    for code, _, said in ended(script):
        assert code == 1 and "comparison before gather of blocks.2." in said, said
        assert "rank 0: " in said and "rank 1: in 'comparison" in said, said
