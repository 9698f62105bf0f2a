"""Checkpoints of every format there has been load on any topology, bit for bit, for ever."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint import cli
from tests.golden.kept_checkpoints import AFTER, BEFORE, CELLS, FOLDER, engine_of
from tests.parallel.checkpointing import differences, everything, train

FORMATS = sorted(path.name for path in FOLDER.iterdir())
BAR = 1e-5  # relative, of losses after the load: processors differ in the last bits


def load(cell: str, folder: str, same: bool) -> None:
    expected = torch.load(Path(folder, "expected.pt"))
    with engine_of(cell, 1) as engine:
        path, client = engine.load_checkpoint(folder)
        assert path is not None and client["best"] == (0.5, "x") and client["average"].tolist() == [0.0, 1.0, 2.0]
        # Running statistics are each rank's own on the topology of the save.
        found = differences(everything(engine), expected["state"])
        assert dist.get_rank() and all("running" in name for name in found) or not found, found
        if same:
            losses = train(engine, iter(engine.training_dataloader), AFTER)
            after = everything(engine)
            if dist.get_rank() == 0:
                gaps = [abs(a - b) / abs(b) for a, b in zip(losses, expected["losses"], strict=True)]
                assert max(gaps) < BAR, gaps
                for name, value in after.items():
                    assert torch.allclose(value.float(), expected["after"][name].float(), rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("kept", FORMATS)
def test_a_kept_checkpoint_loads(workers: Any, tmp_path: Path, kept: str, cell: str, capsys: Any) -> None:
    folder = tmp_path / cell
    shutil.copytree(FOLDER / kept / cell, folder)
    ranks = CELLS[cell][1]
    for here in (ranks, 1):
        workers(here).run(load, cell, str(folder), here == ranks, timeout=240)
    assert cli.main(["verify", str(folder)]) == 0
    assert cli.main(["diff", str(folder), str(folder)]) == 0
    assert cli.main(["ls", str(folder)]) == 0 and f"step {BEFORE // 3}," in capsys.readouterr().out
