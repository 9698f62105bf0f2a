"""Upstream's files load here, and ours in its layout are its own: losses go on as they would have there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint.compat.upstream_read import load_pt
from deepspeed.errors import CheckpointCorruptError
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.parallel.tiny import raises
from tests.upstream import make_checkpoints as upstream
from tests.upstream.interpreter import NEEDS_UPSTREAM, run_upstream

MADE = Path(upstream.__file__).parent / "made"
CELLS = [f"stage{stage}-{precision}" for stage in range(4) for precision in ("fp32", "bf16")]


def small_engine(stage: int, precision: str) -> Any:
    import deepspeed

    model = upstream.small(seed=5)
    optimizer = torch.optim.AdamW(upstream.groups(model), lr=1e-2, eps=1e-4)
    config = upstream.config(stage, precision)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def go_on(folder: str, stage: int, precision: str) -> tuple[list[float], dict[str, Any], int]:
    with small_engine(stage, precision) as engine:
        path, client = engine.load_checkpoint(folder)
        assert path is not None and client is not None
        losses = []
        for step in range(3, 6):
            loss = upstream.loss_of(engine, step)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return losses, client, engine.global_steps


@pytest.mark.drawn(4)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("cell", CELLS)
def test_upstreams_files_load(workers: Any, cell: str, stage: int) -> None:
    precision = cell.partition("-")[2]
    wanted = json.loads((MADE / cell / "expected.json").read_text())["losses"]
    found = workers(2).run(go_on, str(MADE / cell), stage, precision, timeout=120)
    for rank, (losses, client, steps) in enumerate(found):
        assert client.pop("ds_version").startswith("0.")  # of the release that wrote it
        assert client == {"best": 0.5, "names": ["a", "b"]} and steps == 6
        assert losses[0] == pytest.approx(wanted[rank][0], rel=1e-6 if precision == "fp32" else 4e-3)
        assert losses == pytest.approx(wanted[rank], rel=1e-5 if precision == "fp32" else 2e-2)


def without_a_part(folder: str) -> None:
    with small_engine(3, "fp32") as engine, raises(CheckpointCorruptError, "no checkpoint in", "not all there"):
        engine.load_checkpoint(folder)


def test_elements_that_one_rank_misses_fail_on_all(workers: Any, tmp_path: Path) -> None:
    shutil.copytree(MADE / "stage1-fp32", tmp_path, dirs_exist_ok=True)
    path = next(tmp_path.glob("*/*zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    saved = load_pt(path)["optimizer_state_dict"]
    saved = {key: saved[key] for key in ("single_partition_of_fp32_groups", "base_optimizer_state")}
    *parts, last = saved["single_partition_of_fp32_groups"]
    saved["single_partition_of_fp32_groups"] = [*parts, last[:-4].clone()]  # of a bias
    torch.save({"optimizer_state_dict": saved}, tmp_path / "new")
    (tmp_path / "new").replace(path)  # the old file is mapped
    workers(2).run(without_a_part, str(tmp_path), timeout=60)


def test_weights_of_stage_0_are_not_taken_for_frozen() -> None:
    for cell, frozen in (("stage0-fp32", set()), ("stage1-fp32", {"frozen.weight", "frozen.bias"})):
        whole = get_fp32_state_dict_from_zero_checkpoint(MADE / cell)
        less = get_fp32_state_dict_from_zero_checkpoint(MADE / cell, exclude_frozen_parameters=True)
        assert set(whole) == set(upstream.small().state_dict()) and set(less) == set(whole) - frozen


def in_both_layouts(folder: str, stage: int, precision: str) -> tuple[dict[str, Any], list[float]]:
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    model = upstream.small(seed=5)
    optimizer = torch.optim.AdamW(upstream.groups(model), lr=1e-2, eps=1e-4)
    config = upstream.config(stage, precision) | {"checkpoint": {"format": "deepspeed"}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with engine:
        for step in range(3):
            engine.backward(upstream.loss_of(engine, step))
            engine.step()
        engine.save_checkpoint(folder, "small", client_state={"best": 0.5})
        state = get_fp32_state_dict_from_zero_checkpoint(folder)
        losses = []
        for step in range(3, 6):
            loss = upstream.loss_of(engine, step)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return state, losses


@pytest.mark.drawn(2)
@pytest.mark.parametrize("cell", CELLS)
def test_both_layouts_of_one_save_are_equal(workers: Any, tmp_path: Path, cell: str) -> None:
    from deepspeed.checkpoint.compat.upstream_read import open_foreign
    from deepspeed.checkpoint.format.manifest import MANIFEST

    stage, precision = int(cell[5]), cell.partition("-")[2]
    (state, losses), _ = workers(2).run(in_both_layouts, str(tmp_path), stage, precision, timeout=120)
    for path in [tmp_path / "small" / MANIFEST, *(tmp_path / "small").glob("rank-*.safetensors")]:
        path.unlink()
    source = open_foreign(tmp_path / "small")
    if stage:
        assert all(torch.equal(source.whole(name).float(), state[name]) for name in state if source.manifest.row(name))
        assert source.manifest.aliases == {"out.weight": "embed.weight"}
    again = workers(2).run(go_on, str(tmp_path), stage, precision, timeout=120)
    assert again[0][0] == losses and again[0][1]["best"] == 0.5


CONVERT = """
import sys, torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
torch.save(get_fp32_state_dict_from_zero_checkpoint(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.slow
@NEEDS_UPSTREAM
@pytest.mark.parametrize("cell", [cell for cell in CELLS if not cell.startswith("stage0")])
def test_upstreams_converter_gives_our_weights(workers: Any, tmp_path: Path, cell: str) -> None:
    (wanted, _), _ = workers(2).run(in_both_layouts, str(tmp_path), int(cell[5]), cell.partition("-")[2], timeout=120)
    run_upstream("-c", CONVERT, str(tmp_path), str(tmp_path / "converted.pt"))
    found = torch.load(tmp_path / "converted.pt")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name].float()) for name in wanted)


@pytest.mark.slow
@NEEDS_UPSTREAM
@pytest.mark.parametrize("cell", CELLS)
def test_upstreams_engine_goes_on_from_ours(workers: Any, tmp_path: Path, cell: str) -> None:
    stage, precision = int(cell[5]), cell.partition("-")[2]
    every = workers(2).run(in_both_layouts, str(tmp_path), stage, precision, timeout=120)
    script, output = Path(upstream.__file__).parent / "read_ours.py", tmp_path / "read.pt"
    arguments = [str(script), str(tmp_path), str(stage), precision, str(output)]
    run_upstream("-m", "torch.distributed.run", "--nproc_per_node", "2", *arguments)
    found = torch.load(output)
    assert found["best"] == 0.5
    for rank in range(2):
        assert found["losses"][rank] == pytest.approx(every[rank][1], rel=1e-6 if precision == "fp32" else 2e-2)
