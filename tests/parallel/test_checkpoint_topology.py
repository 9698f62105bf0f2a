"""Any stage, number of ranks, tier and precision loads any other: no conversion step, no difference in a bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.checkpointing import differences, everything, make, mean_losses, train

BATCH = 12  # divided by every number of ranks
PRECISIONS = ("fp32", "bf16")
Cell = tuple[int, int, str, str]  # stage, ranks, precision, tier


def engine_of(cell: Cell, folder: str, seed: int) -> Any:
    stage, ranks, precision, tier = cell
    where = {"device": tier} | ({"nvme_path": folder} if tier == "nvme" else {})
    zero = {} if tier == "device" else {"offload_optimizer": where} | ({"offload_param": where} if stage == 3 else {})
    sizes = {"train_micro_batch_size_per_gpu": BATCH // ranks}
    return make(stage, precision, seed=seed, dropout=0.0, zero=zero, **sizes)


def save(cell: Cell, folder: str) -> dict[str, Any] | None:
    with engine_of(cell, folder, 0) as engine:
        mean_losses(engine, 2)
        engine.save_checkpoint(folder)
        state = everything(engine)
        # The rest of the epoch, continued by the loader that is half way through it.
        engine.training_dataloader.load_state_dict(engine.training_dataloader.state_dict())
        losses = mean_losses(engine, 2)
        return {"state": state, "losses": losses} if dist.get_rank() == 0 else None


def load(cell: Cell, folder: str, wanted: dict[str, Any], same_precision: bool) -> None:
    with engine_of(cell, folder, 1) as engine:
        assert engine.load_checkpoint(folder)[0]
        found = differences(everything(engine), wanted["state"])
        # Frozen weights have no master: a run in another precision holds them in that one.
        assert all(name.startswith("frozen.") and not same_precision for name in found), found
        losses = mean_losses(engine, 2)
        if same_precision:
            bars = [1e-6] * len(losses) if cell[2] == "fp32" else [1e-3]
            gaps = [abs(a - b) / abs(b) for a, b in zip(losses, wanted["losses"], strict=True)]
            assert all(gap <= bar for gap, bar in zip(gaps, bars, strict=False)), gaps


def trials(count: int, seed: int) -> list[tuple[Cell, Cell]]:
    draw = random.Random(seed)
    tiers = [(stage, tier) for stage in range(4) for tier in ("device", "cpu", "nvme") if stage or tier == "device"]
    cells = [(s, ranks, precision, tier) for s, tier in tiers for ranks in (1, 2, 3, 4) for precision in PRECISIONS]
    return [(draw.choice(cells), draw.choice(cells)) for _ in range(count)]


def run_trial(workers: Any, folder: Path, before: Cell, after: Cell) -> None:
    wanted = workers(before[1]).run(save, before, str(folder), timeout=120)[0]
    workers(after[1]).run(load, after, str(folder), wanted, before[2] == after[2], timeout=120)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, 2, "bf16", "device"), (1, 3, "fp32", "device")),
        ((1, 3, "fp32", "cpu"), (3, 2, "fp32", "nvme")),
        ((2, 3, "fp32", "device"), (0, 2, "bf16", "device")),
    ],
)
def test_another_topology_loads_it(workers: Any, tmp_path: Path, before: Any, after: Any) -> None:
    run_trial(workers, tmp_path, before, after)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(48))
def test_random_pairs(workers: Any, tmp_path: Path, trial: int) -> None:
    run_trial(workers, tmp_path, *trials(48, seed=5)[trial])


def seen_samples(folder: str, ranks: int, micro: int, resume: bool) -> list[float]:
    with make(2, dropout=0.0, train_micro_batch_size_per_gpu=micro) as engine:
        if resume:
            engine.load_checkpoint(folder)
        seen = []
        for number, batch in enumerate(engine.training_dataloader):
            seen += batch[:, 0].tolist()
            engine.backward(engine(batch).square().mean())
            engine.step()
            if not resume and number == 1:
                engine.save_checkpoint(folder)
                break
        return seen


def test_every_sample_of_the_epoch_is_seen_once(workers: Any, tmp_path: Path) -> None:
    from tests.parallel.checkpointing import samples

    first = workers(2).run(seen_samples, str(tmp_path), 2, 3, False, timeout=120)
    rest = workers(3).run(seen_samples, str(tmp_path), 3, 2, True, timeout=120)
    seen = [sample for rank in (*first, *rest) for sample in rank]
    wanted = torch.stack(samples())[:, 0].tolist()
    assert sorted(seen) == sorted(wanted)


def across_tiers(folder: str) -> None:
    nvme = {"device": "nvme", "nvme_path": f"{folder}/nvme"}
    tiers: list[dict[str, Any]] = [{}, {"offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": nvme}]
    tiers.append({"offload_optimizer": nvme, "offload_param": nvme})
    for number, before in enumerate(tiers):
        with make(3, "bf16", accumulation=2, zero=before) as engine:
            train(engine, iter(engine.training_dataloader), 3)
            engine.save_checkpoint(f"{folder}/{number}")
            wanted = everything(engine)
        for after in tiers:
            with make(3, "bf16", accumulation=2, seed=1, zero=after) as engine:
                engine.load_checkpoint(f"{folder}/{number}")
                assert not differences(everything(engine), wanted), (before, after)


@pytest.mark.slow
def test_any_tier_loads_any_other(workers: Any, tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    workers(2).run(across_tiers, str(tmp_path), timeout=120)
